"""A pool that lives for days must not grow.

`make soak` makes 1,000,000 tiny calls and measures the memory of each process of the pool. Memory is what a process has
to itself (USS). The first fifth of the calls is not measured, because queues and free lists reach their size there.
"""

import argparse
import os
import sys
import time
from collections.abc import Iterator

import psutil

import skyward_core as sky

MB = 1e6
BATCH = 2_000
LOOKS = 10
NOISE_BYTES = 8 * MB
"""A process may grow by this much and still count as constant: a new arena of malloc, or a due garbage collection."""

type Look = dict[str, int]
"""The memory of each process in bytes, by the process's name."""


@sky.compute
def echo(number: int) -> int:
    return number


def looks(calls: int) -> Iterator[Look]:
    """Make this many calls on one node of this machine; measure LOOKS times, evenly."""
    with sky.ComputePool(provider=sky.Local(), nodes=1, display="quiet") as pool:
        processes = _processes(pool)
        for _ in range(LOOKS):
            for first in range(0, calls // LOOKS, BATCH):
                rows = range(first, min(first + BATCH, calls // LOOKS))
                assert pool.map(echo, rows) == list(rows)
            yield {role: process.memory_full_info().uss for role, process in processes.items()}


def growth(seen: list[Look]) -> Look:
    """Return by how many bytes each process has grown since a fifth of the calls was made."""
    return {role: seen[-1][role] - seen[LOOKS // 5 - 1][role] for role in seen[-1]}


def _processes(pool: sky.ComputePool) -> dict[str, psutil.Process]:
    """Return the client, the runner that answers, its parent, and the parent's first forks: the scheduler, the worker."""
    runner = psutil.Process(sky.compute(os.getpid)() >> pool)
    supervisor = runner.parent()
    assert supervisor is not None
    scheduler, worker = sorted((one for one in supervisor.children() if one != runner), key=lambda one: one.pid)
    there = {"supervisor": supervisor, "scheduler": scheduler, "worker": worker, "runner": runner}
    return {"client": psutil.Process(), **there}


def main() -> int:
    """Print a table, and which process has grown; return 1 if any has."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--calls", type=int, default=1_000_000)
    calls = parser.parse_args().calls
    seen, started = list[Look](), time.monotonic()
    for look in looks(calls):
        if not seen:
            print("      calls  seconds  " + "".join(f"{role:>12}" for role in look), "(MB)")
        seen.append(look)
        columns = "".join(f"{memory / MB:>12.1f}" for memory in look.values())
        print(f"{len(seen) * calls // LOOKS:>11,} {time.monotonic() - started:>8.1f}  {columns}", flush=True)
    grown = growth(seen)
    print("\n".join(f"{role}: {grown_bytes / (0.8 * calls):+.2f} bytes a call" for role, grown_bytes in grown.items()))
    return int(any(grown_bytes > NOISE_BYTES for grown_bytes in grown.values()))


if __name__ == "__main__":
    sys.exit(main())
