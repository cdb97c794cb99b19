"""Measure what deferred tasks cost their triggerer: memory, threads, processor time, and how soon an end is noticed.

One process follows the calls with one `SkywardTrigger` for each, in one event loop, as a triggerer does. The calls are
on a few real pools of this machine; 200 pools of processes would need some 40 GB. Of each pool the first call waits for
a file, and the others for the first one, so that the nodes take no processor time. Each trigger has a connection of its
own, as with a pool for each task.

    python benchmarks/airflow_deferred.py --triggers 200 --pools 4 --seconds 60
"""

from __future__ import annotations

import argparse
import asyncio
import logging
import os
import resource
import signal
import statistics
import sys
import tempfile
import threading
import time
from pathlib import Path


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--triggers", type=int, default=200)
    parser.add_argument("--pools", type=int, default=4)
    parser.add_argument("--seconds", type=float, default=60.0)
    options = parser.parse_args()
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(1))  # the pools are released then too
    with tempfile.TemporaryDirectory(prefix="skyward-deferred-") as folder:
        # set before the import of Airflow, which reads its settings then
        os.environ |= {f"XDG_{kind}_HOME": f"{folder}/{kind.lower()}" for kind in ("CACHE", "CONFIG", "STATE")}
        os.environ |= {"AIRFLOW_HOME": f"{folder}/airflow", "SKYWARD_LEDGER": f"sqlite:///{folder}/ledger.db"}
        print("\n".join(_measured(Path(folder), options.triggers, options.pools, options.seconds)))
    return 0


def _measured(folder: Path, triggers: int, pools: int, seconds: float) -> list[str]:
    import skyward_core as sky
    from airflow_provider_skyward.triggers import SkywardTrigger

    logging.disable(logging.WARNING)  # each line of a call is one of the task log
    opened = [_pool(triggers // pools, str(folder / "go")) for _ in range(pools)]
    try:
        made = [
            SkywardTrigger(pool_id, [f"c/{number}"], [0]) for pool_id in opened for number in range(triggers // pools)
        ]
        return asyncio.run(_followed(made, folder / "go", seconds))
    finally:
        for pool_id in opened:
            sky.release(pool_id)


def _pool(calls: int, go: str) -> str:
    """Open a pool with so many waiting calls, and leave it; return its id."""
    import skyward_core as sky

    def waits(path: str) -> None:
        while not os.path.exists(path):
            time.sleep(0.5)

    pool = sky.ComputePool(provider=sky.Local(), display="quiet").open()
    for number in range(calls):
        pool.start_detached(sky.compute(waits)(go), call_id=f"c/{number}")
    pool.detach(900)
    return pool.id


async def _followed(triggers: list, go: Path, seconds: float) -> list[str]:
    before, load = _memory_mb(), os.getloadavg()[0]
    began, busy = time.monotonic(), _processor_seconds()
    ended: list[float] = []

    async def follow(trigger) -> None:
        ended.extend([time.monotonic() async for _ in trigger.run()])

    tasks = [asyncio.create_task(follow(trigger)) for trigger in triggers]
    while not all(trigger.is_following for trigger in triggers):  # noqa: ASYNC110 - triggers have no such event
        await asyncio.sleep(0.1)
    attached, attaching = time.monotonic() - began, _processor_seconds() - busy
    since, busy = time.monotonic(), _processor_seconds()
    lags = list[float]()
    while time.monotonic() - since < seconds:
        at = time.monotonic()
        await asyncio.sleep(0.1)
        lags.append(time.monotonic() - at - 0.1)
    share = (_processor_seconds() - busy) / (time.monotonic() - since)
    memory, threads = _memory_mb(), threading.active_count()
    let_go = time.monotonic()
    go.touch()  # noqa: ASYNC240 - in memory
    await asyncio.gather(*tasks)
    waits = sorted(at - let_go for at in ended)
    count = len(triggers)
    rows = [
        ("memory before", f"{before:.0f} MB"),
        ("memory that they add", f"{memory - before:.0f} MB, {(memory - before) / count:.2f} MB each"),
        ("threads", f"{threads}, {threads / count:.1f} each"),
        ("until all follow their calls", f"{attached:.1f} s, of which {attaching:.1f} s of processor time"),
        ("processor time while they wait", f"{share:.1%} of one core"),
        (
            "longest delay of the event loop",
            f"{max(lags) * 1000:.0f} ms, median {statistics.median(lags) * 1000:.1f} ms",
        ),
        (
            "from the end of all calls to the event",
            f"median {statistics.median(waits):.1f} s, longest {waits[-1]:.1f} s",
        ),
    ]
    head = [f"| {count} deferred tasks in one process | measured |", "| --- | --- |"]
    foot = [f"\nload average of the last minute, before → after: {load:.2f} → {os.getloadavg()[0]:.2f}"]
    return [*head, *(f"| {name} | {value} |" for name, value in rows), *foot]


def _memory_mb() -> float:
    """Return the proportional share of this process in memory."""
    lines = Path("/proc/self/smaps_rollup").read_text().splitlines()
    return sum(int(line.split()[1]) for line in lines if line.startswith("Pss:")) / 1000


def _processor_seconds() -> float:
    used = resource.getrusage(resource.RUSAGE_SELF)
    return used.ru_utime + used.ru_stime


if __name__ == "__main__":
    sys.exit(main())
