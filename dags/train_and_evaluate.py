"""Prepare, train and evaluate on one machine: a setup rents it, a teardown ends it, also after a task has failed.

    AIRFLOW__CORE__DAGS_FOLDER=dags airflow dags test train_and_evaluate

The tasks leave their files in the working directory of the machine, so nothing is copied between them. A machine that
is lost takes them with it: then clear `rent`, and all tasks behind it. The teardown's result is the cost, with the
share of each task. The machine is a process of this computer. It has a price, so that the example shows a cost.

Install what it needs with `pip install ".[airflow]"` in a clone of the repository.
"""

import json

from airflow.sdk import dag, task

import skyward_core as sky
from airflow_provider_skyward.pools import SkywardCreatePool, SkywardReleasePool

MACHINE = sky.PoolSpec.of(provider=sky.Local(price_per_hour=1.2))


@dag(schedule=None, catchup=False, tags=["skyward", "example"], params={"rows": 2000, "epochs": 20})
def train_and_evaluate():
    rent = SkywardCreatePool(task_id="rent", spec=MACHINE, hold=600, max_cost=1.0)
    pool = rent.output

    @task.skyward(skyward_pool=pool)
    def prepare(params) -> list[str]:
        """Write rows of y = 3a - 2b + 1: four of five for training, the rest for the test."""
        import csv
        import math

        points = [(math.sin(number), math.cos(3 * number)) for number in range(params["rows"])]
        rows = [(a, b, 3 * a - 2 * b + 1) for a, b in points]
        limit = len(rows) * 4 // 5
        for name, part in {"train.csv": rows[:limit], "test.csv": rows[limit:]}.items():
            with open(name, "w", newline="") as file:
                csv.writer(file).writerows(part)
        return ["train.csv", "test.csv"]

    @task.skyward(skyward_pool=pool, retries=2)
    def train(files: list[str], params) -> str:
        """Fit the three weights by stochastic gradient descent; save them after each epoch."""
        import csv
        import json

        with open(files[0], newline="") as file:
            rows = [tuple(map(float, row)) for row in csv.reader(file)]
        weights = [0.0, 0.0, 0.0]
        for epoch in range(params["epochs"]):
            loss = 0.0
            for a, b, y in rows:
                error = weights[0] * a + weights[1] * b + weights[2] - y
                loss += error**2 / len(rows)
                weights = [weight - 0.02 * error * x for weight, x in zip(weights, (a, b, 1.0), strict=True)]
            sky.report(epoch=epoch, loss=loss)
            with open("model.json", "w") as file:
                json.dump(weights, file)
        return "model.json"

    @task.skyward(skyward_pool=pool)
    def evaluate(model: str, files: list[str]) -> float:
        """Return the mean error on rows that the training has not seen."""
        import csv
        import json

        with open(model) as file:
            weights = json.load(file)
        with open(files[1], newline="") as file:
            rows = [tuple(map(float, row)) for row in csv.reader(file)]
        return sum(abs(weights[0] * a + weights[1] * b + weights[2] - y) for a, b, y in rows) / len(rows)

    @task
    def report(error: float, bill: dict) -> None:
        shares = {name: round(usd, 5) for name, usd in bill["shares"].items()}
        print("train_and_evaluate:", json.dumps({"error": round(error, 4), "cost_usd": bill["cost_usd"]} | shares))

    files = prepare()
    error = evaluate(train(files), files)
    end = SkywardReleasePool(task_id="end", skyward_pool=pool)
    error >> end
    report(error, end.output)


train_and_evaluate()
