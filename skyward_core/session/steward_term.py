"""Whether this process keeps a named pool: replaces its nodes, pays for it, ends it at its limits.

    certain ──a lease long without a confirmed renewal──▶ unsure ──a renewal, and the ledger agrees──▶ certain
      └──────────────────────────┬───────────────────────────┘
                                 └──the ledger names another steward──▶ lost, for good

While the lease of this process's row is valid, no other process may take the pool over. So the steward may act without
a request to the ledger. After a stop (SIGSTOP, a machine that slept) its own clock shows that the lease has expired.
Then it asks the ledger before it ends or rents anything. Safe to use from several threads, without a lock: each field
is one value, and `_confirmed` only grows.

`LedgerContact` knows when this process last could not reach the ledger: perhaps no other process could reach it either.

    in contact ──a renewal is missing──▶ out of contact ──the ledger answers──▶ back ──RENEW_SECONDS──▶ in contact

While the ledger is out of reach no process can renew its row. When it is back, rows of living processes may have
expired. Each of them renews its row within RENEW_SECONDS. Before that, a process that leaves must not assume that it is
the last one.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Protocol

from skyward_core.ledger.lease_clock import boot_seconds
from skyward_core.ledger.names_policy import NotSteward


class StewardUse(Protocol):
    """The part of `named_use.NamedUse` that the process which keeps the pool needs."""

    term: StewardTerm

    def begin_to_end(self) -> None: ...
    def release_stewardship(self) -> None: ...


class StewardTerm:
    """A term in which this process is the steward, as far as it is known."""

    def __init__(
        self, lease_seconds: float, renew: Callable[[], object], clock: Callable[[], float] = boot_seconds
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
        """Return the time on the term's clock: read it before a renewal, for `confirm`."""
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
            raise NotSteward("another process keeps the pool now: this one did not renew in time, or has released it")


RENEW_SECONDS = 30.0
"""How long a process takes at most to renew its row when the ledger is back: a renewal that was on its way waits 20 s
for its answer, and the next one comes 5 s later.
"""


@dataclass(frozen=True, slots=True)
class Gap:
    """A period in which the ledger may have been out of reach, on the clock of `LedgerContact`."""

    began: float
    """When it had last answered before."""
    ended: float
    """When it has answered again."""


class LedgerContact:
    """What this process knows of its ledger. `answered` may be called by several threads; each field is one value."""

    def __init__(self, beat_seconds: float) -> None:
        """`beat_seconds`: the time between two renewals. If one is missing, that is a gap."""
        self._longest_seconds = 2 * beat_seconds
        self._answered: float | None = None
        self._gap: Gap | None = None

    def answered(self, at: float) -> None:
        """The ledger has answered a request that was made at this time."""
        self._gap = self.gap(at)
        self._answered = at if self._answered is None else max(self._answered, at)

    def gap(self, now: float) -> Gap | None:
        """Return the gap after which other processes may not have renewed their rows yet, if the ledger answers now.

        None: there was none, or it ended long enough ago.
        """
        last, gap = self._answered, self._gap
        if last is not None and now - last > self._longest_seconds:
            is_one = gap is not None and last - gap.ended < RENEW_SECONDS
            return Gap(gap.began if gap is not None and is_one else last, now)
        return gap if gap is not None and now - gap.ended < RENEW_SECONDS else None
