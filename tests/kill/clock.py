"""A clock that several processes share and a test may turn on: real time, and an offset that lies in a small file."""

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

LAZINESS = 8
"""A sleep that turns the clock takes so much longer than was asked for, as it may on a busy machine: a minute of
polling is an eighth of the requests.
"""
REAL_SLEEP_SECONDS = 0.1
"""Shorter sleeps wait for another thread or process, which needs the time; longer ones only wait for the clock, and
turn it.
"""


class SharedClock:
    """Real time and the offset in a file, which is made if it is not there.

    Safe to use from several threads and across a fork; `close` it at the end.
    """

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
        """Let go of the file."""
        self._memory.close()

    @property
    def offset_seconds(self) -> float:
        """How far the clock has been turned on."""
        return float(_SHAPE.unpack(self._memory[:])[0])

    def advance(self, seconds: float) -> None:
        """Turn the clock on."""
        with self._lock:
            self._memory[:] = _SHAPE.pack(self.offset_seconds + seconds)

    def reset(self, offset_seconds: float = 0.0) -> None:
        """Turn the clock back, to real time or to so much more."""
        self._memory[:] = _SHAPE.pack(offset_seconds)

    def monotonic(self) -> float:
        """Seconds, as `time.monotonic` counts them."""
        return _real_monotonic() + self.offset_seconds

    def time(self) -> float:
        """Seconds since 1970."""
        return _real_time() + self.offset_seconds

    def utc(self) -> datetime:
        """The time of day, in UTC."""
        return datetime.fromtimestamp(self.time(), UTC)

    def sleep(self, seconds: float) -> None:
        """Wait: for real if it is short, else by turning the clock on."""
        if seconds < REAL_SLEEP_SECONDS:
            _real_sleep(seconds)
        else:
            self.advance(LAZINESS * seconds)
            _real_sleep(0)

    def take_over(self) -> Callable[[], None]:
        """Make this the clock of the whole process; returns what puts the old one back.

        To be called before the code under test is imported: it binds the functions of `time` as it is loaded.
        """
        time.monotonic, time.time, time.sleep = self.monotonic, self.time, self.sleep

        def put_back() -> None:
            time.monotonic, time.time, time.sleep = _real_monotonic, _real_time, _real_sleep

        return put_back
