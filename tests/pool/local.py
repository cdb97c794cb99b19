"""Pools on this machine, with calls that a test holds back."""

import ctypes
import os
import signal
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

import skyward_core as sky
from tests.conftest import RecordedEvents, shared
from tests.waiting import wait_until


@sky.compute
def double(x: int) -> int:
    return 2 * x


def one_node(recorded: RecordedEvents | None = None, **options: Any) -> sky.ComputePool:
    """Return a pool of one node for a dollar a second, not yet open."""
    settings = {"provider": sky.Local(price_per_hour=3600.0), "display": "quiet", **options}
    return sky.ComputePool(on_event=recorded or RecordedEvents(), **settings)


@sky.compute
def block(folder: Path, name: str) -> str:
    """Report that it runs, and wait until it is released."""
    partial_file = folder / f".{name}"
    partial_file.write_text(str(os.getpid()))
    partial_file.rename(folder / name)
    while not (folder / "go").exists():
        time.sleep(0.01)
    return name


def pid_of(folder: Path, name: str) -> int:
    """Wait until the blocking call of that name runs; return its process."""
    wait_until((folder / name).exists, f"the call {name} to run")
    return int((folder / name).read_text())


def runs(pid: int) -> bool:
    """Return whether a process lives; a zombie does not."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(") ")[2][:1] not in "ZX"
    except OSError:
        return False


@sky.compute
def crash(how: str) -> None:
    print("last words before", how, end="", flush=True)
    match how:
        case "exit":
            os._exit(7)
        case "segfault":
            ctypes.string_at(0)
        case "sys.exit":
            sys.exit(3)
        case "memory":
            hoard = [b"x" * 50_000_000 for _ in range(20)]
            time.sleep(300)
            print(len(hoard))
        case _:
            os.kill(os.getpid(), signal.SIGKILL)


@pytest.fixture(scope="module")
def _crashing() -> Iterator[sky.ComputePool]:
    image = sky.Image(env={"FLAVOUR": "salt", "CUP": "1"})
    with shared(one_node(concurrency=2, memory="300MB", env={"FLAVOUR": "lemon"}, image=image)) as pool:
        yield pool


@pytest.fixture
def crashing(_crashing: sky.ComputePool) -> sky.ComputePool:
    """One local node with two slots of 300 MB each and some environment, shared by the tests of a module."""
    return _crashing
