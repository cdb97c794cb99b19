"""Whether this process keeps a named pool: replaces its nodes, pays for it, ends it at its limits.

    certain ──a lease long without a confirmed renewal──▶ unsure ──a renewal, and the ledger agrees──▶ certain
      └──────────────────────────┬───────────────────────────┘
                                 └──the ledger names another steward──▶ lost, for good

While the lease of this process's row is valid, no other process may take the pool over. So the steward may act without
a request to the ledger. After a stop (SIGSTOP, a machine that slept) its own clock shows that the lease has expired.
Then it asks the ledger before it ends or rents anything. Safe to use from several threads, without a lock: each field
is one value, and `_confirmed` only grows.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Protocol

from skyward_core.ledger.names_policy import NotSteward


class Keeper(Protocol):
    """The part of `named_use.NamedUse` that the process which keeps the pool needs."""

    guard: StewardGuard

    def begin_to_end(self) -> None: ...
    def resign(self) -> None: ...


def boot_clock() -> float:
    """Return the seconds since this machine was started, also those in which it slept."""
    return time.clock_gettime(time.CLOCK_BOOTTIME)


class StewardGuard:
    """The stewardship of this process, as far as it is known."""

    def __init__(
        self, lease_seconds: float, renew: Callable[[], object], clock: Callable[[], float] = boot_clock
    ) -> None:
        """`renew` renews the row of this process, and calls `confirm` or `lose`; it raises LedgerError, LeaseLost."""
        self._lease_seconds = lease_seconds
        self._renew = renew
        self._clock = clock
        self._confirmed: float | None = None
        self.epoch: int | None = None
        """The number of this steward; None while this process is not the steward."""
        self.is_lost = False
        """Whether another process has become the steward after this one."""

    def now(self) -> float:
        """Return the time on the guard's clock: read it before a renewal, for `confirm`."""
        return self._clock()

    def begin(self, epoch: int, since: float) -> None:
        """This process is the steward from now on. Its row was renewed after `since`."""
        self.epoch, self._confirmed, self.is_lost = epoch, since, False

    def confirm(self, since: float) -> None:
        """The row was renewed after `since`, and this process was the steward then."""
        if self._confirmed is not None:
            self._confirmed = max(self._confirmed, since)

    def lose(self) -> bool:
        """This process is not the steward any more; return whether it was."""
        was_steward = self._confirmed is not None
        self._confirmed = None
        self.is_lost = self.is_lost or was_steward
        return was_steward

    @property
    def is_held(self) -> bool:
        """Whether this process is the steward as far as it knows. Waits for nothing."""
        return self._confirmed is not None

    @property
    def is_certain(self) -> bool:
        """Whether this process is the steward for certain. Waits for nothing."""
        confirmed = self._confirmed
        return confirmed is not None and self._clock() - confirmed < self._lease_seconds

    def check(self) -> None:
        """Raise NotSteward if this process may not act for the pool; asks the ledger if that is not certain.

        Raises LedgerError, too, if the ledger does not answer then.
        """
        if not self.is_certain and self._confirmed is not None:
            self._renew()
        if not self.is_certain:
            raise NotSteward("another process keeps the pool now: this one did not renew in time, or has resigned")
