"""When this process last could not reach the ledger: perhaps no other process could reach it either.

    in contact ──a renewal is missing──▶ out of contact ──the ledger answers──▶ back ──RENEW_SECONDS──▶ in contact

While the ledger is out of reach no process can renew its row. When it is back, rows of living processes may have
expired. Each of them renews its row within RENEW_SECONDS. Before that, a process that leaves must not assume that it is
the last one.
"""

from __future__ import annotations

from dataclasses import dataclass

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
