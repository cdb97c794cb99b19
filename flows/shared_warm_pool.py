"""Two flow runs on one pool: the second one finds the machines of the first one, and waits for none.

`python flows/shared_warm_pool.py` runs the flow twice. Between the two the machines stay warm, for five minutes at
most. Flow runs of other processes and deployments that use the same name share them too. `skyward stop` ends them
earlier, as the program does at its end.

Install what it needs with `pip install ".[prefect]"` in a clone of the repository.
"""

import json
import os
import platform
import time

from prefect import flow, task
from prefect.cache_policies import NO_CACHE

import skyward_core as sky
from prefect_skyward import SkywardTaskRunner

NAME = "shared-warm-pool"
PROVIDER = sky.Local(price_per_hour=1.2)  # or sky.AWS(region="us-east-1"), sky.RunPod(), ...


@task(cache_policy=NO_CACHE)
def embed(text: str) -> tuple[str, int]:
    """Return the process that has done it, and the number of letters in place of a real embedding."""
    return f"process {os.getpid()} of {platform.node()}", len(text)


@flow(log_prints=True, task_runner=SkywardTaskRunner(provider=PROVIDER, nodes=2, name=NAME, keep_warm=300))
def nightly(texts: list[str]) -> list[str]:
    """Embed all texts; return the processes of the pool that have worked."""
    started = time.perf_counter()
    found = embed.map(texts).result()
    processes = sorted({process for process, _ in found})
    print(f"{len(found)} texts in {time.perf_counter() - started:.1f} s by {len(processes)} processes")
    return processes


def main() -> dict[str, object]:
    """Run the flow twice, end the pool, and report whether the same processes have worked for both."""
    texts = [f"text {number}" for number in range(20)]
    runs = []
    for _ in range(2):
        started = time.perf_counter()
        processes = nightly(texts)
        runs.append((processes, round(time.perf_counter() - started, 1)))
    sky.release(NAME)
    (first, cold_seconds), (second, warm_seconds) = runs
    return {"is_shared": set(second) <= set(first), "cold_seconds": cold_seconds, "warm_seconds": warm_seconds}


if __name__ == "__main__":
    print("shared_warm_pool:", json.dumps(main()))
