"""How much memory one large value takes on its way to a host over SSH and back, in parts of its size.

The host is one of the test bed, so it shares this machine with the client. Each direction is one call on an open pool:
an array as the argument of a call that reads its last item, and an array as the result of a call without arguments.
The client's memory is the peak of VmRSS of proc(5) above the value before. That of the node is the peak of the PSS of
all its processes above their sum before, sampled twenty times a second; it has their pages in /dev/shm.

    python benchmarks/large_value.py --gib 2
"""

from __future__ import annotations

import argparse
import contextlib
import importlib
import os
import threading
import time
from collections.abc import Generator
from pathlib import Path
from typing import Any

import _far
import numpy as np
import psutil
import ssh_path

import skyward_core as sky

SECONDS_BETWEEN_SAMPLES = 0.05
SETTLING_SECONDS = 2.0
"""The client frees an argument some time after the call, in another thread."""


@sky.compute
def last(array: Any) -> int:
    return int(array[-1])


@sky.compute
def ones(size: int) -> Any:
    return importlib.import_module("numpy").ones(size, dtype="uint8")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--gib", type=float, default=2.0, help="the size of the array")
    size = int(parser.parse_args().gib * (1 << 30))
    print("| direction | s | client's memory | node's memory |\n| --- | ---: | ---: | ---: |")
    with opened() as pool:
        assert last(np.ones(1000, dtype=np.uint8)) >> pool == 1
        array = np.ones(size, dtype=np.uint8)
        with measured("argument", size):
            assert last(array) >> pool == 1
        del array
        with measured("result", size):
            result = ones(size) >> pool
        assert result.nbytes == size


@contextlib.contextmanager
def opened() -> Generator[sky.ComputePool]:
    """Yield a pool of one host, on which the environment is installed by the pool."""
    testbed: Any = ssh_path.testbed()
    mirror: Any = importlib.import_module("tests.testbed.mirror")
    with testbed.Fleet() as fleet, mirror.Mirror(fleet.network.gateway, _far.requirements()) as index:
        host = fleet.create()
        index.configure(host)
        hosts = sky.Hosts(host.ip, user="root", key=str(fleet.key_path), known_hosts="/dev/null", config="/dev/null")
        image = sky.Image(pip=_far.PACKAGES)
        with sky.ComputePool(provider=hosts, nodes=1, image=image, display="quiet") as pool:
            yield pool


@contextlib.contextmanager
def measured(direction: str, size: int) -> Generator[None]:
    """Print a row of the table for what is done meanwhile."""
    time.sleep(SETTLING_SECONDS)
    before, peak, ended = node_bytes(), [0], threading.Event()

    def sample() -> None:
        while not ended.wait(SECONDS_BETWEEN_SAMPLES):
            peak[0] = max(peak[0], node_bytes())

    sampler = threading.Thread(target=sample, daemon=True)
    sampler.start()
    Path("/proc/self/clear_refs").write_text("5")  # VmHWM begins anew
    client, began = own_bytes("VmRSS"), time.monotonic()
    yield
    seconds, most = time.monotonic() - began, own_bytes("VmHWM")
    ended.set()
    sampler.join()
    print(f"| {direction} | {seconds:.1f} | {(most - client) / size:.2f} | {(peak[0] - before) / size:.2f} |")


def own_bytes(field: str) -> int:
    """Return a field of proc(5) of this process, in bytes."""
    lines = Path("/proc/self/status").read_text().splitlines()
    return next(int(line.split()[1]) * 1024 for line in lines if line.startswith(f"{field}:"))


def node_bytes() -> int:
    """Return the PSS of all processes of nodes of this machine, in bytes."""
    total = 0
    for process in psutil.process_iter():
        with contextlib.suppress(psutil.Error):
            command = " ".join(process.cmdline())
            if process.pid != os.getpid() and "skyward_core" in command:
                total += process.memory_full_info().pss
    return total


if __name__ == "__main__":
    main()
