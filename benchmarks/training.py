"""Training with two local ranks of PyTorch (gloo, one thread each): Skyward's group, and `torchrun`.

    make bench   (or, in the environment of the group `frameworks`: python benchmarks/training.py --rounds 3)

Each measurement is a fresh process, and the systems take turns. Prints a table: medians over the rounds, the lowest and
the highest round, and ratios.

- A step: forward, backward with averaged gradients, update. The median of 200 steps of rank 0.
- The start of a group: until the first `all_reduce` has ended on both ranks. With Skyward from the call on an open
  pool, the first time (the ranks import PyTorch) and a second time; with `torchrun` from the start of its process.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import time
from collections import defaultdict
from importlib.metadata import version
from statistics import median
from typing import Any

SYSTEMS = ("skyward", "torchrun")
RANKS, STEPS, UNTIMED_STEPS, ROWS, WIDTH = 2, 200, 20, 64, 256
LIMIT_SECONDS = 300.0
ROWS_OF_TABLE = (
    ("DistributedDataParallel, a step", "ms", 1e3, "step", "step"),
    ("start of a group: first call on an open pool", "s", 1.0, "first", "start"),
    ("the same, second call", "s", 1.0, "second", "start"),
    ("open the pool, and the first call", "s", 1.0, "cold", "start"),
)
"""What is shown, its unit and scale, and the metric of each system."""


def joined_at() -> float:
    """Return when the first collective operation has ended, by the clock that all processes of this machine share."""
    import torch
    import torch.distributed as dist

    dist.all_reduce(torch.ones(1))
    return time.monotonic()


def step_seconds() -> float:
    """Train a network, and return the median of the seconds of a step."""
    import torch
    from torch.nn.parallel import DistributedDataParallel

    torch.set_num_threads(1)
    torch.manual_seed(0)
    linear, relu = torch.nn.Linear, torch.nn.ReLU
    network = torch.nn.Sequential(linear(WIDTH, WIDTH), relu(), linear(WIDTH, WIDTH), relu(), linear(WIDTH, 10))
    model = DistributedDataParallel(network)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    x, y = torch.randn(ROWS, WIDTH), torch.randint(10, (ROWS,))
    seconds: list[float] = []
    for _ in range(UNTIMED_STEPS + STEPS):
        began = time.perf_counter()
        optimizer.zero_grad()
        torch.nn.functional.cross_entropy(model(x), y).backward()
        optimizer.step()
        seconds.append(time.perf_counter() - began)
    return median(seconds[UNTIMED_STEPS:])


def measure_skyward() -> dict[str, float]:
    import skyward_core as sky

    @sky.compute
    @sky.distributed.torch(backend="gloo")
    def starts() -> float:
        return joined_at()

    @sky.compute
    @sky.distributed.torch(backend="gloo")
    def trains() -> float:
        return step_seconds()

    opened_at = time.monotonic()
    with sky.ComputePool(provider=sky.Local(), nodes=RANKS, env={"OMP_NUM_THREADS": "1"}, display="quiet") as pool:
        begun_at = time.monotonic()
        first = max(starts() @ pool)
        begun_again_at = time.monotonic()
        second = max(starts() @ pool)
        step = (trains() @ pool)[0]
    return {
        "first": first - begun_at,
        "second": second - begun_again_at,
        "cold": first - opened_at,
        "step": step,
    }


def measure_torchrun() -> dict[str, float]:
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", str(RANKS)]
    began = time.monotonic()
    done = subprocess.run(
        [*command, __file__, "--rank"],
        env={**os.environ, "OMP_NUM_THREADS": "1"},
        check=True,
        stdout=subprocess.PIPE,
        text=True,
        timeout=LIMIT_SECONDS,
    )
    ranks = [json.loads(line) for line in done.stdout.splitlines()]
    assert len(ranks) == RANKS, done.stdout
    return {
        "start": max(rank["joined_at"] for rank in ranks) - began,
        "step": next(rank["step"] for rank in ranks if rank["rank"] == 0),
    }


def run_rank() -> None:
    """Run one rank of torchrun, and print what it measured as one line of JSON."""
    import torch.distributed as dist

    dist.init_process_group("gloo")
    found: dict[str, Any] = {"rank": dist.get_rank(), "joined_at": joined_at(), "step": step_seconds()}
    os.write(1, f"{json.dumps(found)}\n".encode())  # in one piece: the ranks share the pipe
    dist.destroy_process_group()
    os._exit(0)  # one exit in twenty of PyTorch 2.15 aborts: "terminate called without an active exception"


def shown(values: list[float], scale: float) -> str:
    low, middle, high = (value * scale for value in (min(values), median(values), max(values)))
    return f"{middle:.2f} [{low:.2f}, {high:.2f}]"


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--system", choices=SYSTEMS, help="measure this one here, and print JSON")
    parser.add_argument("--rank", action="store_true", help="be a rank that torchrun has started")
    parser.add_argument("--rounds", type=int, default=3)
    asked = parser.parse_args()
    if asked.rank:
        run_rank()
        return 0
    if asked.system:
        print(json.dumps({"skyward": measure_skyward, "torchrun": measure_torchrun}[asked.system]()))
        return 0
    load_before = os.getloadavg()[0]
    found: defaultdict[str, defaultdict[str, list[float]]] = defaultdict(lambda: defaultdict(list))
    for number in range(asked.rounds):
        for system in SYSTEMS:
            print(f"round {number + 1}: {system}", file=sys.stderr)
            command = [sys.executable, __file__, "--system", system]
            done = subprocess.run(command, check=True, stdout=subprocess.PIPE, text=True, timeout=LIMIT_SECONDS)
            for name, value in json.loads(done.stdout.splitlines()[-1]).items():
                found[system][name].append(value)
    versions = ", ".join(f"{name} {version(name)}" for name in ("torch", "skyward-core", "dask"))
    print(f"Load of the last minute, before → after: {load_before:.2f} → {os.getloadavg()[0]:.2f}; {versions}\n")
    print("| two ranks on this machine | unit | skyward | torchrun | to torchrun |\n| --- | --- | ---: | ---: | ---: |")
    for what, unit, scale, ours, theirs in ROWS_OF_TABLE:
        mine, other = found["skyward"][ours], found["torchrun"][theirs]
        ratio = median(mine) / median(other)
        print(f"| {what} | {unit} | {shown(mine, scale)} | {shown(other, scale)} | {ratio:.2f} |")
    return 0


if __name__ == "__main__":
    sys.exit(main())
