"""Training without a worker: the task is deferred while it trains, and a try that is lost goes on from its checkpoint.

It trains on this machine, and the process of the first try is killed once, in the middle. The task needs a
scheduler, a triggerer, and Airflow 3.3: `airflow standalone`, then trigger `deferrable_training`. The checkpoints are
in a folder that outlives the process. In a cloud they must outlive the machine: use a volume.

    PROVIDER = sky.AWS(region="us-east-1")
    VOLUMES = [sky.S3Volume(mount_path="/checkpoints", bucket="team-checkpoints", read_only=False)]
    FOLDER = "/checkpoints/line"

Install what it needs with `pip install ".[airflow]"` in a clone of the repository.
"""

import json
import os
import tempfile
from datetime import timedelta

from airflow.sdk import Param, dag, task

import skyward_core as sky

PROVIDER = sky.Local(price_per_hour=1.2)
VOLUMES: list[sky.S3Volume] = []
FOLDER = os.path.join(tempfile.gettempdir(), f"skyward-checkpoints-{os.getuid()}")
STEPS = 200


@dag(
    schedule=None,
    catchup=False,
    tags=["skyward", "example"],
    params={"folder": Param(FOLDER, type="string"), "lost_at": Param(123, type=["integer", "null"])},
)
def deferrable_training():
    @task.skyward(
        provider=PROVIDER,
        volume=VOLUMES,
        deferrable=True,
        max_cost=1.0,
        retries=2,
        retry_delay=timedelta(seconds=1),
        execution_timeout=timedelta(hours=1),
    )
    def train(params) -> dict[str, float]:
        """Fit y = 3x by gradient descent; save each tenth step. Go on from the newest checkpoint, if there is one.

        `lost_at`: the step at which a first try loses its process, as if its machine had no memory left.
        """
        import signal

        saved = sky.checkpoint(params["folder"])
        state = saved.load() or {"step": 0, "slope": 0.0}
        begun_at, slope = state["step"], state["slope"]
        print(f"begins at step {begun_at}")
        for step in range(begun_at, STEPS):
            x = (step % 10 + 1) / 10
            slope -= 0.1 * 2 * x * (slope * x - 3 * x)
            sky.report(step=step, loss=(slope - 3) ** 2)
            if (step + 1) % 10 == 0 or sky.preemption_notice() is not None:
                saved.save(step + 1, {"step": step + 1, "slope": slope})
            if begun_at == 0 and step == params["lost_at"]:
                os.kill(os.getpid(), signal.SIGKILL)
        return {"begun_at": begun_at, "slope": slope}

    @task
    def report(result: dict[str, float], bill: dict) -> None:
        figures = {"begun_at": result["begun_at"], "slope": round(result["slope"], 3)}
        print("deferrable_training:", json.dumps(figures | {"cost_usd": round(bill["all_tries_usd"], 5)}))

    trained = train()
    report(trained, trained["skyward_cost"])


deferrable_training()
