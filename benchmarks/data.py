"""One large value for many calls, and generators: Skyward, Dask and Ray.

    python benchmarks/data.py --rounds 3

Scatter: an array of 200 MB and 40 calls that read all of it, on two nodes with two slots each (Ray: one node with four).
Generators: one call that yields 20,000 numbers, or 200 arrays of 1 MB, which the client takes one by one. Dask has no
generators; a task there puts the items into a `distributed.Queue` of 16.
Each measurement is a fresh process, and the systems take turns. Prints medians over the rounds, [least, most].
"""

from __future__ import annotations

import argparse
import importlib
import json
import os
import subprocess
import sys
import tempfile
import time
from collections import defaultdict
from collections.abc import Callable, Iterator
from statistics import median
from typing import Any

import numpy as np

ROWS = 25_000_000
"""Of float64: 200 MB."""
CALLS = 40
NODES, SLOTS = 2, 2
NUMBERS, ARRAYS, ARRAY_ROWS = 20_000, 200, 125_000
AHEAD = 16
LIMIT_SECONDS = 900.0
SCATTER, NUMBERS_NAME, ARRAYS_NAME = "200 MB to 40 calls", "20,000 numbers", "200 arrays of 1 MB"
UNITS = {SCATTER: "s", NUMBERS_NAME: "items/s", ARRAYS_NAME: "MB/s"}

type Found = dict[str, float]


def total(rows: Any, number: int) -> float:
    return float(rows[number::CALLS].sum())


def numbers(count: int) -> Iterator[int]:
    for number in range(count):  # noqa: UP028 - Ray sends to the generator, which a range does not accept
        yield number


def arrays(count: int) -> Iterator[Any]:
    for number in range(count):
        yield np.full(ARRAY_ROWS, float(number))


def seconds_of(work: Callable[[], object]) -> float:
    began = time.perf_counter()
    work()
    return time.perf_counter() - began


def rates(take: Callable[[Callable[[int], Iterator[Any]], int], Iterator[Any]]) -> Found:
    """Return the rates of both generators; `take` yields their items in this process."""
    found: Found = {}
    for name, function, count in ((NUMBERS_NAME, numbers, NUMBERS), (ARRAYS_NAME, arrays, ARRAYS)):
        assert sum(1 for _ in take(function, 10)) == 10  # the first call loads the function
        seconds = seconds_of(lambda function=function, count=count: check(take(function, count), count))
        found[name] = (count if name == NUMBERS_NAME else count * ARRAY_ROWS * 8 / 1e6) / seconds
    return found


def check(items: Iterator[Any], count: int) -> None:
    last, many = None, 0
    for item in items:
        last, many = item, many + 1
    assert many == count
    assert np.max(last) == count - 1


def skyward(*, is_scattered: bool) -> Found:
    import skyward_core as sky

    rows = np.ones(ROWS)
    with sky.ComputePool(provider=sky.Local(), nodes=NODES, concurrency=SLOTS, display="quiet") as pool:
        call = sky.compute(total)
        pool.map(call, [np.ones(CALLS)] * CALLS, range(CALLS))

        def run() -> None:
            value = sky.scatter(rows) if is_scattered else rows
            assert sum(pool.map(call, [value] * CALLS, range(CALLS))) == ROWS

        found = {SCATTER: seconds_of(run)}
        if is_scattered:
            found |= rates(lambda function, count: iter(sky.compute(function)(count) >> pool))
    return found


def dask(*, is_scattered: bool) -> Found:
    distributed: Any = importlib.import_module("distributed")

    def put(function: Callable[[int], Iterator[Any]], count: int, name: str) -> None:
        queue = distributed.Queue(name)
        for item in function(count):
            queue.put(item)

    rows = np.ones(ROWS)
    with (
        distributed.LocalCluster(n_workers=NODES, threads_per_worker=SLOTS, dashboard_address=None) as cluster,
        distributed.Client(cluster) as client,
    ):
        client.gather(client.map(total, [np.ones(CALLS)] * CALLS, range(CALLS), pure=False))

        def run() -> None:
            value = client.scatter(rows, broadcast=True) if is_scattered else rows
            assert sum(client.gather(client.map(total, [value] * CALLS, range(CALLS), pure=False))) == ROWS

        def take(function: Callable[[int], Iterator[Any]], count: int) -> Iterator[Any]:
            queue = distributed.Queue(f"{function.__name__}-{count}", maxsize=AHEAD)
            task = client.submit(put, function, count, queue.name, pure=False)
            for _ in range(count):
                yield queue.get()
            task.result()

        found = {SCATTER: seconds_of(run)}
        return found | (rates(take) if is_scattered else {})


def ray(*, is_scattered: bool) -> Found:
    module: Any = importlib.import_module("ray")
    with tempfile.TemporaryDirectory(prefix="skb-", dir="/tmp") as folder:
        module.init(
            num_cpus=NODES * SLOTS,
            include_dashboard=False,
            log_to_driver=False,
            logging_level="error",
            _node_ip_address="127.0.0.1",
            _temp_dir=folder,
        )
        remote = module.remote(total)
        rows = np.ones(ROWS)
        module.get([remote.remote(np.ones(CALLS), number) for number in range(CALLS)])

        def run() -> None:
            value = module.put(rows) if is_scattered else rows
            assert sum(module.get([remote.remote(value, number) for number in range(CALLS)])) == ROWS

        def take(function: Callable[[int], Iterator[Any]], count: int) -> Iterator[Any]:
            options = {"num_returns": "streaming", "_generator_backpressure_num_objects": AHEAD}
            for reference in module.remote(function).options(**options).remote(count):
                yield module.get(reference)

        try:
            found = {SCATTER: seconds_of(run)}
            return found | (rates(take) if is_scattered else {})
        finally:
            module.shutdown()


SYSTEMS: dict[str, Callable[[], Found]] = {
    "skyward": lambda: skyward(is_scattered=True),
    "skyward, sent with each call": lambda: skyward(is_scattered=False),
    "dask": lambda: dask(is_scattered=True),
    "ray": lambda: ray(is_scattered=True),
}


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--system", choices=tuple(SYSTEMS), help="measure this one here, and print JSON")
    parser.add_argument("--rounds", type=int, default=3)
    options = parser.parse_args()
    if options.system:
        print(json.dumps(SYSTEMS[options.system]()))
        return 0
    measured: defaultdict[str, defaultdict[str, list[float]]] = defaultdict(lambda: defaultdict(list))
    environment = os.environ | {"RAY_USAGE_STATS_ENABLED": "0", "RAY_ENABLE_UV_RUN_RUNTIME_ENV": "0"}
    for number in range(options.rounds):
        for system in SYSTEMS:
            print(f"round {number + 1}: {system}", file=sys.stderr)
            command = [sys.executable, __file__, "--system", system]
            done = subprocess.run(
                command, check=True, stdout=subprocess.PIPE, text=True, timeout=LIMIT_SECONDS, env=environment
            )
            for name, value in json.loads(done.stdout.splitlines()[-1]).items():
                measured[name][system].append(value)
    print(f"| what | unit | {' | '.join(SYSTEMS)} |\n| --- | --- |{' ---: |' * len(SYSTEMS)}")
    for name, by_system in measured.items():
        print(f"| {name} | {UNITS[name]} | {' | '.join(cell(by_system[system]) for system in SYSTEMS)} |")
    return 0


def cell(values: list[float]) -> str:
    return f"{median(values):.4g} [{min(values):.3g}, {max(values):.3g}]" if values else ""


if __name__ == "__main__":
    sys.exit(main())
