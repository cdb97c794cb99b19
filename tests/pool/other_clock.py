"""Run a program of ours in a process whose time of day differs from that of all others: SECONDS MODULE ARGUMENTS.

The clocks of the kernel stay as they are: that is what a process sees right after the time of day was set.
"""

import datetime as dt
import runpy
import subprocess
import sys
import time
from pathlib import Path
from typing import Self

REPOSITORY = Path(__file__).parents[2]


def run_at(seconds: float, module: str, *arguments: str) -> str:
    """Return the output of a module that runs with its time of day set forward by so many seconds."""
    command = [sys.executable, "-m", "tests.pool.other_clock", str(seconds), module, *arguments]
    done = subprocess.run(
        command, cwd=REPOSITORY, stdin=subprocess.DEVNULL, capture_output=True, text=True, timeout=200, check=False
    )
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


def _set_clock(seconds: float) -> None:
    real = time.time

    class Shifted(dt.datetime):
        @classmethod
        def now(cls, tz: dt.tzinfo | None = None) -> Self:
            return cls.fromtimestamp(real() + seconds, tz)

    time.time = lambda: real() + seconds
    dt.datetime = Shifted


if __name__ == "__main__":
    _set_clock(float(sys.argv[1]))  # before any module of ours is imported
    sys.argv = sys.argv[2:]
    runpy.run_module(sys.argv[0], run_name="__main__", alter_sys=True)
