"""Until when machines are paid for that were found gone: until the end that they have written, or an estimate.

A provider may be able to show when and why a machine has ended itself (`Provider.ends`). Otherwise it was at the end of
its lease (`policy.paid_until`).
"""

from __future__ import annotations

import logging
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from datetime import datetime

from skyward_core.cleanup.policy import paid_until
from skyward_core.ledger.rows import Intent, PoolEntry
from skyward_core.machines.node_end import NodeEnd
from skyward_core.providers.base import Provider

ESTIMATED = "no process saw it end: its cost is estimated, up to the time at which its lease must have ended it"
_log = logging.getLogger("skyward")


@dataclass(frozen=True, slots=True)
class Ends:
    """For entries of machines that were found gone: until when each is paid for, and what its machine has written.

    An end without words is an estimate.
    """

    until: Mapping[int, datetime] = field(default_factory=dict[int, datetime])
    words: Mapping[int, str] = field(default_factory=dict[int, str])

    def before(self, now: datetime, least_seconds: float) -> dict[int, datetime]:
        """Return the ends that were written, and those that are estimated to be so long ago."""
        return {
            number: end
            for number, end in self.until.items()
            if number in self.words or (now - end).total_seconds() >= least_seconds
        }

    def evidence(self, number: int, evidence: str) -> str:
        """Add to some evidence how the end of an entry is known."""
        return f"{evidence}; {self.words.get(number, ESTIMATED)}"


NO_ENDS = Ends()


def ends_of(provider: Provider, pools: Mapping[str, PoolEntry], intents: Sequence[Intent], now: datetime) -> Ends:
    """Return the ends of machines that a listing lacks. Asks the provider for them; raises nothing."""
    shown = shown_ends(provider, intents)
    until: dict[int, datetime] = {}
    words: dict[int, str] = {}
    for intent in intents:
        if intent.cloud_id is not None and (end := shown.get(intent.cloud_id)) is not None:
            until[intent.id], words[intent.id] = known_end(intent, end, now), str(end)
        else:
            until[intent.id] = paid_until(provider, pools[intent.pool_id], intent, now)
    return Ends(until, words)


def shown_ends(provider: Provider, intents: Sequence[Intent]) -> Mapping[str, NodeEnd]:
    """Return the ends that the provider can show, by machine; none if it does not answer."""
    ids = [intent.cloud_id for intent in intents if intent.cloud_id is not None]
    try:
        return provider.ends(ids) if ids else {}
    except Exception as error:  # the machines are gone anyway, and their cost is estimated
        _log.warning("%s does not show when machines have ended: %s", provider.name, error)
        return {}


def known_end(intent: Intent, end: NodeEnd, now: datetime) -> datetime:
    """Return the end of a machine by the clock of the ledger: not before it was requested, and not after now."""
    return min(now, max(end.at, intent.intended_at))
