"""The flow of the stack: tasks on the two nodes, which the settings name (SKYWARD_PROVIDER)."""

import time

from prefect import flow, task
from prefect.cache_policies import NO_CACHE

import skyward_core as sky
from prefect_skyward import SkywardTaskRunner


@task(cache_policy=NO_CACHE)
def square(number: int) -> int:
    print(f"{number} on node {sky.instance_info().node}")
    until = time.monotonic() + 4  # for so long that the nodes' utilisation is measured
    while time.monotonic() < until:
        sum(range(10_000))
    return number * number


@flow(log_prints=True, task_runner=SkywardTaskRunner(nodes=2))  # pyright: ignore - Prefect's type of runners is invariant
def two_nodes_flow() -> list[int]:
    return square.map([1, 2, 3, 4]).result()
