"""`Utilisation`: the samples of all live pools, since the page was started. It only listens: no pool lives longer."""

from __future__ import annotations

import threading
from collections.abc import Mapping, Sequence
from statistics import fmean
from typing import TYPE_CHECKING, Any, Self

from skyward_core.errors import LedgerError
from skyward_core.events.utilisation import MEASURES, percentages
from skyward_core.live.metrics import NodeUse, PoolUses

if TYPE_CHECKING:
    from skyward_core.events.events import Metrics
    from skyward_core.ledger.ledger import Ledger

EVERY_SECONDS = 2.0
MOST_SAMPLES = 900
"""Of one node: half an hour."""
POINTS = 60
"""Of one curve: the samples are averaged in so many groups."""
END_SECONDS = 5.0


class Utilisation:
    """Follows the live pools in a thread of its own, because a connection to a node may take half a minute."""

    def __init__(self, ledger: Ledger) -> None:
        self._ledger = ledger
        self._uses: Mapping[str, Sequence[NodeUse] | str] = {}
        self._trouble: LedgerError | None = None
        self._end = threading.Event()
        # a login that hangs does not keep the process
        self._thread = threading.Thread(target=self._follow, name="skyward-ui", daemon=True)

    def __enter__(self) -> Self:
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._end.set()
        self._thread.join(END_SECONDS)

    def of(self, pool_id: str) -> Sequence[NodeUse] | str | None:
        """Return the use of a pool's nodes, or why it is out of reach; None if it was not looked at yet.

        Raises LedgerError if the pools could not be read at the last look.
        """
        if self._trouble is not None:
            raise LedgerError(str(self._trouble)) from self._trouble
        return self._uses.get(pool_id)

    def _follow(self) -> None:
        with PoolUses(self._ledger, most_samples=MOST_SAMPLES) as uses:
            while not self._end.wait(EVERY_SECONDS if self._uses or self._trouble else 0.2):
                try:
                    pools = [entry.id for entry in self._ledger.pools(unreadable=[])]
                except LedgerError as error:
                    self._trouble = error
                    continue
                self._trouble = None
                uses.keep(pools)
                self._look(uses, pools)

    def _look(self, uses: PoolUses, pools: Sequence[str]) -> None:
        self._uses = {pool_id: one for pool_id, one in self._uses.items() if pool_id in pools}
        for pool_id in pools:
            if self._end.is_set():
                return
            self._uses = {**self._uses, pool_id: uses.of(pool_id)}


def curves(samples: Sequence[Metrics]) -> dict[str, list[float | None]]:
    """Return percentages over time, the oldest first: at most `POINTS` of each, None where there is no GPU."""
    size = max(1, -(-len(samples) // POINTS))
    groups = [samples[start : start + size] for start in range(0, len(samples), size)]
    known = [[percentages(one) for one in group] for group in groups]
    return {name: [_mean([one.get(name) for one in group]) for group in known] for name in MEASURES}


def use_as_json(one: NodeUse) -> dict[str, Any]:
    """Return a node with its curves, and the time that they show, in seconds."""
    first, last = (one.samples[0], one.samples[-1]) if one.samples else (None, None)
    return {
        "node": one.node,
        "instance": one.instance_id,
        "busy_slots": one.busy,
        "slots": one.slots,
        "seconds": 0.0 if first is None or last is None else round(last.timestamp - first.timestamp, 1),
        **curves(one.samples),
    }


def _mean(values: Sequence[float | None]) -> float | None:
    known = [value for value in values if value is not None]
    return round(fmean(known), 1) if known else None
