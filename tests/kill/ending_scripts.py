"""The common start of the programs of `test_endings.py`"""

from __future__ import annotations

import os
import signal
import sys
import time
from pathlib import Path
from typing import Any

import skyward_core as sky
from tests.kill.billed import Billed

HOME = Path(os.environ["ENDINGS_HOME"])


def pool(**options: Any) -> sky.ComputePool:
    price = options.pop("price_per_hour", 1.0)
    provider = Billed(folder=str(HOME / "billed"), price_per_hour=price)
    return sky.ComputePool(provider=provider, display="quiet", collect_metrics=False, **options)


@sky.compute
def long_call(home: str) -> None:
    Path(home, "running").touch()
    time.sleep(600)


@sky.compute
def quick_call() -> str:
    return "done"


def say(word: str) -> None:
    sys.stdout.write(f"{word}\n")
    sys.stdout.flush()


# the process that started the tests may ignore some signals, and a child inherits that
signal.signal(signal.SIGINT, signal.default_int_handler)
for usual in (signal.SIGTERM, signal.SIGHUP):
    signal.signal(usual, signal.SIG_DFL)
