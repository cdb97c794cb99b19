"""A clock that several processes share and a test may advance: real time plus an offset in a small file."""

from __future__ import annotations

import mmap
import struct
import threading
import time
from collections.abc import Callable
from datetime import UTC, datetime
from pathlib import Path
from typing import Self

_SHAPE = struct.Struct("d")
_real_monotonic, _real_time, _real_sleep = time.monotonic, time.time, time.sleep
_real_clock_gettime = time.clock_gettime

LAZINESS = 8
"""A sleep that advances the clock takes this factor longer than requested, as on a busy machine. A minute of polling
then makes an eighth of the requests.
"""
REAL_SLEEP_SECONDS = 0.1
"""Shorter sleeps wait for another thread or process, which needs the time. Longer ones only wait for the clock, and
advance it.
"""


class SharedClock:
    """Real time and the offset in a file, which is created if it does not exist."""

    def __init__(self, path: Path) -> None:
        if not path.exists():
            path.write_bytes(_SHAPE.pack(0.0))
        with path.open("r+b") as file:
            self._memory = mmap.mmap(file.fileno(), _SHAPE.size)
        self._lock = threading.Lock()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def close(self) -> None:
        self._memory.close()

    @property
    def offset_seconds(self) -> float:
        return float(_SHAPE.unpack(self._memory[:])[0])

    def advance(self, seconds: float) -> None:
        with self._lock:
            self._memory[:] = _SHAPE.pack(self.offset_seconds + seconds)

    def reset(self, offset_seconds: float = 0.0) -> None:
        self._memory[:] = _SHAPE.pack(offset_seconds)

    def monotonic(self) -> float:
        return _real_monotonic() + self.offset_seconds

    def clock_gettime(self, clock: int) -> float:
        return _real_clock_gettime(clock) + self.offset_seconds

    def time(self) -> float:
        return _real_time() + self.offset_seconds

    def utc(self) -> datetime:
        return datetime.fromtimestamp(self.time(), UTC)

    def sleep(self, seconds: float) -> None:
        """Wait: in real time if it is short, else by advancing the clock."""
        if seconds < REAL_SLEEP_SECONDS:
            _real_sleep(seconds)
        else:
            self.advance(LAZINESS * seconds)
            _real_sleep(0)

    def take_over(self) -> Callable[[], None]:
        """Make this the clock of the whole process; returns what restores the old one."""
        time.monotonic, time.time, time.sleep = self.monotonic, self.time, self.sleep
        time.clock_gettime = self.clock_gettime  # what machines have cost is counted by CLOCK_BOOTTIME

        def put_back() -> None:
            time.monotonic, time.time, time.sleep = _real_monotonic, _real_time, _real_sleep
            time.clock_gettime = _real_clock_gettime

        return put_back
