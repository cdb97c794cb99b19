"""Three steps of one flow, each on its hardware: prepare on a small machine, train on two with GPUs, judge on one.

`python flows/hardware_per_step.py` runs it on the server of PREFECT_API_URL, else on a temporary one. `PROVIDER` is
this machine, which simulates the GPUs. Name a cloud there, and nothing else changes.

Install what it needs with `pip install ".[prefect]"` in a clone of the repository.
"""

import json
import random
import statistics

from prefect import flow, task
from prefect.cache_policies import NO_CACHE

import skyward_core as sky
from prefect_skyward import SkywardTaskRunner, cost_so_far, on_skyward, skyward_options

PROVIDER = sky.Local(price_per_hour=1.2, simulate="T4")  # or sky.AWS(region="us-east-1"), sky.RunPod(), ...
SLOPE = 3.0


@task(cache_policy=NO_CACHE)
def prepare(count: int) -> list[tuple[float, float]]:
    """Return points of a line with noise. It needs no GPU, and so it runs on the machines of the runner."""
    draw = random.Random(0)  # noqa: S311 - no secret
    return [(x, SLOPE * x + draw.gauss(0, 0.1)) for x in (draw.random() for _ in range(count))]


@task(cache_policy=NO_CACHE)
@on_skyward(accelerator="T4", broadcast=True)
def train(points: list[tuple[float, float]]) -> tuple[str, float]:
    """Fit the slope to this node's part of the points; return the node's accelerator and the slope."""
    info = sky.instance_info()
    mine = sky.shard(points)
    slope = sum(x * y for x, y in mine) / sum(x * x for x, _ in mine)
    print(f"node {info.node} of {info.total_nodes}: slope {slope:.3f} from {len(mine)} points")
    return str(sky.current_accelerator()), slope


@task(cache_policy=NO_CACHE)
@on_skyward(memory="2GB")
def judge(slope: float) -> float:
    """Return how far the slope is from the true one."""
    return abs(slope - SLOPE)


@flow(log_prints=True, task_runner=SkywardTaskRunner(provider=PROVIDER, idle_timeout=60))
def hardware_per_step() -> dict[str, float]:
    """Prepare, train on two nodes, judge. Each set of settings has a pool, which opens when its first step begins."""
    points = prepare.submit(1000)
    with skyward_options(nodes=2):
        parts = train.submit(points).result()
    error = judge.submit(statistics.mean(slope for _, slope in parts)).result()
    report = {
        "nodes": len(parts),
        "accelerator": parts[0][0],
        "error": round(error, 4),
        "cost_usd": round(cost_so_far(), 5),
    }
    print("hardware_per_step:", json.dumps(report))
    return report


if __name__ == "__main__":
    hardware_per_step()
