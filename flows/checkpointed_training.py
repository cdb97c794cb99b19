"""Training that loses its machine and goes on from its checkpoint, by the retries of Prefect.

`python flows/checkpointed_training.py` trains on this machine, and its process is killed once, in the middle. The
checkpoints are in a folder that outlives the process. In a cloud they must outlive the machine: use a volume.

    PROVIDER = sky.AWS(region="us-east-1")
    VOLUMES = [sky.S3Volume(mount_path="/checkpoints", bucket="team-checkpoints", read_only=False)]
    FOLDER = "/checkpoints/line"

Install what it needs with `pip install ".[prefect]"` in a clone of the repository.
"""

import json
import os
import signal
import tempfile

from prefect import flow, task
from prefect.cache_policies import NO_CACHE

import skyward_core as sky
from prefect_skyward import SkywardTaskRunner, cost_so_far

PROVIDER = sky.Local(price_per_hour=1.2)
VOLUMES: list[sky.S3Volume] = []
FOLDER = os.path.join(tempfile.gettempdir(), f"skyward-checkpoints-{os.getuid()}")
STEPS = 200


@task(retries=2, cache_policy=NO_CACHE)
def train(folder: str, steps: int, lost_at: int | None) -> dict[str, float]:
    """Fit y = 3x by gradient descent; save each tenth step. Go on from the newest checkpoint, if there is one.

    `lost_at`: the step at which a first attempt loses its process, as if its machine were taken back.
    """
    saved = sky.checkpoint(folder)
    state = saved.load() or {"step": 0, "slope": 0.0}
    begun_at, slope = state["step"], state["slope"]
    print(f"begins at step {begun_at}")
    for step in range(begun_at, steps):
        x = (step % 10 + 1) / 10
        slope -= 0.1 * 2 * x * (slope * x - 3 * x)
        sky.report(step=step, loss=(slope - 3) ** 2)
        if (step + 1) % 10 == 0 or sky.preemption_notice() is not None:
            saved.save(step + 1, {"step": step + 1, "slope": slope})
        if begun_at == 0 and step == lost_at:
            os.kill(os.getpid(), signal.SIGKILL)
    return {"begun_at": begun_at, "slope": slope}


@flow(log_prints=True, task_runner=SkywardTaskRunner(provider=PROVIDER, volume=VOLUMES))
def checkpointed_training(folder: str = FOLDER, lost_at: int | None = 123) -> dict[str, float]:
    """Train, and report where the last attempt has begun, the slope, and the cost of both attempts."""
    result = train.submit(folder, STEPS, lost_at).result()
    report = {
        "begun_at": result["begun_at"],
        "slope": round(result["slope"], 3),
        "cost_usd": round(cost_so_far(), 5),
    }
    print("checkpointed_training:", json.dumps(report))
    return report


if __name__ == "__main__":
    with tempfile.TemporaryDirectory(prefix="skyward-checkpoints-") as empty:
        checkpointed_training(empty)
