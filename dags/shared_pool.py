"""Tune a classifier on one pool that all tasks of the run share: a setup rents it, a teardown ends it.

    AIRFLOW__CORE__DAGS_FOLDER=dags airflow dags test shared_pool

Three tasks are mapped, one comes behind them, and all use the same two machines. So scikit-learn is installed once.
The teardown's log and result have the cost, and the share of each task. The machines are processes of this computer.
They have a price, so that the example shows a cost. Without `provider` the settings (`SKYWARD_PROVIDER=...`,
`skyward.toml`) choose the provider, so the same DAG can run on a cloud.

Install what it needs with `pip install ".[airflow,sklearn]"` in a clone of the repository.
"""

import json

from airflow.sdk import dag, task

import skyward_core as sky
from airflow_provider_skyward.pools import skyward_pool

MACHINES = sky.PoolSpec.of(provider=sky.Local(price_per_hour=1.2), nodes=2, image=sky.Image(pip=["scikit-learn"]))


@dag(schedule=None, catchup=False, tags=["skyward", "example"])
def shared_pool():
    with skyward_pool("machines", spec=MACHINES, hold=600) as pool:

        @task.skyward(skyward_pool=pool, retries=1)
        def cross_validate(weight: float) -> dict[str, float]:
            from sklearn.datasets import load_digits
            from sklearn.model_selection import cross_val_score
            from sklearn.svm import SVC

            images, labels = load_digits(return_X_y=True)
            return {"weight": weight, "score": float(cross_val_score(SVC(C=weight), images, labels, cv=3).mean())}

        @task.skyward(skyward_pool=pool)
        def fit_best(scores: list[dict[str, float]]) -> dict[str, float]:
            from sklearn.datasets import load_digits
            from sklearn.svm import SVC

            best = max(scores, key=lambda one: one["score"])
            images, labels = load_digits(return_X_y=True)
            model = SVC(C=best["weight"]).fit(images, labels)
            return best | {"support_vectors": float(model.n_support_.sum())}

        best = fit_best(cross_validate.expand(weight=[0.1, 1.0, 10.0]))

    @task
    def report(best: dict[str, float]) -> None:
        print("shared_pool:", json.dumps(best))

    report(best)


shared_pool()
