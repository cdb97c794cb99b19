"""Find the best classifier for handwritten digits: a cross-validated sweep on two ephemeral machines.

    AIRFLOW__CORE__DAGS_FOLDER=dags airflow dags test digits_sweep

The machines are processes of this computer. They have a price, so that the example shows a cost. Without `provider` the
settings (`SKYWARD_PROVIDER=...`, `skyward.toml`) choose the provider, so the same DAG can run on a cloud.

Install what it needs with `pip install ".[airflow,sklearn]"` in a clone of the repository.
"""

import itertools
import json

from airflow.sdk import dag, task

import skyward_core as sky

MACHINES = sky.PoolSpec.of(provider=sky.Local(price_per_hour=1.2), image=sky.Image(pip=["scikit-learn"]))


def split_digits():
    """Return training images, test images, training labels, test labels.

    scikit-learn has 1,797 images. A quarter of them is for the test.
    """
    from sklearn.datasets import load_digits
    from sklearn.model_selection import train_test_split

    images, labels = load_digits(return_X_y=True)
    return train_test_split(images, labels, test_size=0.25, stratify=labels, random_state=0)


@dag(schedule=None, catchup=False, tags=["skyward", "example"], params={"least_score": 0.9})
def digits_sweep():
    @task
    def candidates() -> list[dict[str, float]]:
        return [
            {"C": C, "gamma": gamma}
            for C, gamma in itertools.product([0.1, 1, 10, 100], [0.0001, 0.0003, 0.001, 0.003])
        ]

    @task.skyward(spec=MACHINES, nodes=2, map_over="candidate")
    def cross_validate(candidate):
        from sklearn.model_selection import cross_val_score
        from sklearn.svm import SVC

        images, _, labels, _ = split_digits()
        score = cross_val_score(SVC(**candidate), images, labels, cv=5).mean()
        print(f"{score:.4f} for {candidate}")
        return float(score)

    @task
    def choose(candidates: list[dict[str, float]], scores: list[float]) -> dict[str, float]:
        score, best = max(zip(scores, candidates, strict=True), key=lambda pair: pair[0])
        print(f"best of {len(scores)}: {best}, {score:.4f} in cross-validation")
        return best | {"score": score}

    @task.skyward(spec=MACHINES)
    def test_accuracy(best, params) -> float:
        from sklearn.svm import SVC

        candidate = {name: best[name] for name in ("C", "gamma")}
        if best["score"] < params["least_score"]:  # the report is skipped too
            raise sky.Skip(f"{candidate} is the best, and has only {best['score']:.4f} in cross-validation")
        images, test_images, labels, test_labels = split_digits()
        return float(SVC(**candidate).fit(images, labels).score(test_images, test_labels))

    @task
    def report(accuracy: float, bills: list[dict[str, float]]) -> None:
        total = {name: sum(bill[name] for bill in bills) for name in ("calls", "seconds", "cost_usd")}
        print(
            "digits_sweep:",
            json.dumps({"accuracy": round(accuracy, 4)} | {name: round(value, 4) for name, value in total.items()}),
        )

    grid = candidates()
    scores = cross_validate(grid)
    accuracy = test_accuracy(choose(grid, scores))
    report(accuracy, [scores["skyward_cost"], accuracy["skyward_cost"]])


digits_sweep()
