"""The clock of this computer by which leases are judged although its time of day was set meanwhile.

The time of day of a computer is set when NTP first answers, by hand, or after a sleep. So the writer of a lease stores
beside it which boot it runs in, and by how much its time of day is ahead of the clock that counts the seconds for which
this computer was awake since that boot. A reader in the same boot moves the lease by the difference to its own value.
docs/decisions/0044 says who is judged by which clock.
"""

from __future__ import annotations

import functools
import os
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from datetime import UTC, datetime, timedelta
from typing import Any

from skyward_core.machines.owner import boot_id

_EPOCH = datetime(1970, 1, 1, tzinfo=UTC)
NOISE = timedelta(seconds=2)
"""A smaller difference is none: two clocks cannot be read at once, and a leap second is no step."""
READ_SECONDS, READ_TRIES = 0.01, 100


@dataclass(frozen=True, slots=True)
class LeaseClock:
    """Which boot of which computer a time was written in, and how far its time of day was ahead of its awake time.

    `boot` is "" if that is unknown: then the time of day counts alone.
    """

    boot: str = ""
    ahead_microseconds: int = 0

    def values(self, prefix: str = "lease") -> dict[str, Any]:
        """Return the columns beside a time that is written now."""
        return {f"{prefix}_boot": self.boot, f"{prefix}_ahead_microseconds": self.ahead_microseconds}

    def shift(self, row: Mapping[Any, Any], prefix: str = "lease") -> timedelta | None:
        """Return by how much this computer's time of day was set forward since a row was written; 0 if it was not.

        None if the row is of another boot or computer, or of a writer that stored no clock.
        """
        if not self.boot or row[f"{prefix}_boot"] != self.boot:
            return None
        found = timedelta(microseconds=self.ahead_microseconds - row[f"{prefix}_ahead_microseconds"])
        return found if abs(found) >= NOISE else timedelta(0)


NO_CLOCK = LeaseClock()


def read_clock(wall: Callable[[], datetime], awake: Callable[[], float] | None) -> LeaseClock:
    """Return the clock of this computer now. `awake` counts seconds since its boot; without it there is none."""
    boot = "" if awake is None else _boot()
    if awake is None or not boot:
        return NO_CLOCK
    for _ in range(READ_TRIES):
        before = awake()
        ahead = (wall() - _EPOCH) // timedelta(microseconds=1) - round(before * 1_000_000)
        if awake() - before < READ_SECONDS:  # else this process was stopped in between
            return LeaseClock(boot, ahead)
    return NO_CLOCK


def boot_seconds() -> float:
    """Return for how many seconds this computer runs since its boot, also those in which it slept: machines that are
    rented elsewhere cost money meanwhile.
    """
    # without CLOCK_BOOTTIME (macOS) the clock of that name goes on during a sleep
    return time.clock_gettime(getattr(time, "CLOCK_BOOTTIME", time.CLOCK_MONOTONIC))


def awake_seconds() -> float:
    """Return for how many seconds this computer was awake since its boot."""
    return time.monotonic()


@functools.cache
def _boot() -> str:
    """Return which clock `awake_seconds` reads: the boot and the time namespace; "" if that is not known."""
    boot = boot_id()
    try:
        return f"{boot}.{os.stat('/proc/self/ns/time').st_ino}" if boot else ""
    except OSError:  # a kernel without time namespaces
        return boot
