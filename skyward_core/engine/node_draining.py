"""Nodes of an open cluster that come and leave: which of them broadcasts use, and what a node that is to leave still
has.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable
from typing import Any

from skyward_core.engine.broadcast_ranks import BroadcastRanks
from skyward_core.engine.connection import NotSent
from skyward_core.engine.owner import EngineThread
from skyward_core.errors import SkywardError
from skyward_core.worker.calls import WAITING
from skyward_core.worker.client_loads import stay
from skyward_core.worker.draining import FREE, KEPT

ANSWER_SECONDS = 1.0
BUSY_SECONDS = 2.0  # the caller renews leases, and cannot wait for a silent head


class NodeDraining:
    """Takes nodes in and drains them, in any thread.

    `hold` is the cluster's; `ask` asks its scheduler: an operation and its arguments.
    """

    def __init__(
        self, owner: EngineThread, ranks: BroadcastRanks, hold: Callable[[int], int], ask: Callable[..., Any]
    ) -> None:
        self._owner = owner
        self._ranks = ranks
        self._hold = hold
        self._ask = ask

    @property
    def size(self) -> int:
        """How many nodes take calls and are not to leave."""
        return sum(self._owner.dispatcher.members.has(rank) for rank in self._ranks.all)

    def backlog(self) -> int:
        """Return how many calls of all clients wait because all slots are taken; those of this one, if the scheduler
        does not answer.
        """
        try:
            others = int(self._ask(WAITING, BUSY_SECONDS, topic=self._owner.dispatcher.topic))
        except (SkywardError, OSError):
            others = 0
        return self._owner.dispatcher.waiting + others

    def announce(self) -> None:
        """Let the other clients know which ranks stay. Raises nothing; repeat it: a new scheduler knows none."""
        with contextlib.suppress(NotSent):
            if (connection := self._owner.connection) is not None:
                connection.send(stay(self._ranks.all))

    def take_in(self, rank: int) -> None:
        """Let broadcasts use the node of this rank, from now on."""
        self._ranks.take_in(rank)

    def leave_out(self, rank: int) -> None:
        """Let no more broadcasts use the node of this rank; those that have begun go on."""
        self._ranks.leave_out(rank)
        self.announce()

    def drain(self, rank: int) -> tuple[int, int]:
        """Give a node no more calls, of any client, as soon as no call of a broadcast waits for it. Idempotent.

        Returns how much it still has, in calls and in values that a client may ask for; and how many calls of this
        client can run nowhere else. Repeat it, because a worker that joins again is free. Raises NodeLost or PoolClosed
        if the scheduler is out of reach, and TimeoutError.
        """
        beginning = self._ranks.beginning_at(rank)  # first: afterwards their calls are in the queue
        waiting, bound, meant = self._owner.run(lambda: self._owner.dispatcher.calls_of(rank), ANSWER_SECONDS)
        if beginning or waiting:
            self.free(rank)
            return beginning + waiting, beginning + bound
        return max(self._hold(rank), meant) + int(self._ask(KEPT, rank=rank)), bound

    def free(self, rank: int) -> None:
        """Give a node calls again, after `drain`. Raises NodeLost or PoolClosed."""
        self._ask(FREE, rank=rank)
