"""Batches that are on their way or out, and which worker a batch with large values goes to: pure bookkeeping.

States of a batch:

    choosing ──load known──▶ uploading ──uploaded──▶ sent ──its task ended──▶ (gone)
        │                       │ └──a function is on its way there──▶ blocked ──it is there──▶ uploading
        │                       │                     │  └──ended, outcomes missing──▶ gathering ──gathered──▶ (gone)
        └───────────────────────┴──the connection is cut: its calls wait again (nothing has gone out)

A batch without large values is sent at once. A batch that is sent belongs to an epoch, that of the connection which follows its task. When another
connection takes its place, the scheduler's answer decides about each batch of an earlier epoch.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from enum import Enum

from skyward_core.engine.members import Members
from skyward_core.engine.outbox import Shipment
from skyward_core.worker.wire import Parcel


class Phase(Enum):
    """How far a batch is."""

    CHOOSING = "choosing"
    BLOCKED = "blocked"
    UPLOADING = "uploading"
    SENT = "sent"
    GATHERING = "gathering"


@dataclass(slots=True)
class Out:
    """A batch that the queue has handed out. `worker` and `address`: where it goes, unless the scheduler chooses. `instance_id`: where large values lie."""

    shipment: Shipment
    phase: Phase
    epoch: int
    worker: str | None = None
    address: str | None = None
    instance_id: str | None = None
    functions: dict[str, Parcel] = field(default_factory=dict[str, Parcel])
    """Large functions as they lie on the node."""
    heard: dict[str, int] = field(default_factory=dict[str, int])
    """The number of the last report of it, by origin."""

    @property
    def number(self) -> int:
        """The number of the batch, which is never used again."""
        return self.shipment.number

    @property
    def is_out(self) -> bool:
        """Whether it has gone out: its calls may have begun."""
        return self.phase in (Phase.SENT, Phase.GATHERING)


def freest(members: Members, outs: Sequence[Out], load: Mapping[str, Sequence[str]], key_end: str) -> str | None:
    """Return the worker with most slots free, by what the scheduler has said (`load`: task keys by worker), and by what is on its way there.

    Of a batch whose last call has ended the client knows before the scheduler does.
    """
    unended = {f"skyward-{out.number}{key_end}" for out in outs if out.shipment.unended}
    meant = Counter(out.worker for out in outs if out.worker and (out.shipment.unended or not out.is_out))

    def free(name: str) -> int:
        node = members.node_of(name)
        there = sum(key in unended or not key.endswith(key_end) for key in load.get(name, ()))
        return (node.slots if node is not None else 0) - max(there, meant[name])

    return max(members.free, key=free, default=None)
