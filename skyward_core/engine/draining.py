"""Nodes of an open cluster that come and leave: which of them broadcasts use, and what a node that is to leave still
has. A node that is to leave is left out of new broadcasts, and waits for those that have begun.
"""

from __future__ import annotations

import contextlib
import threading
from collections import Counter
from collections.abc import Generator, Iterable

from skyward_core.engine.connection import NotSent
from skyward_core.engine.owner import EngineThread
from skyward_core.errors import SkywardError
from skyward_core.wire.answers import whole_number
from skyward_core.wire.protocol import FREE, HOLD, KEPT, WAITING, stay

ANSWER_SECONDS = 1.0
HOLD_SECONDS = 1.0
BUSY_SECONDS = 2.0  # the caller renews leases, and cannot wait for a silent head


class BroadcastRanks:
    """The ranks of a pool as its broadcasts see them. Several threads may use it; nothing waits under its lock."""

    def __init__(self, ranks: Iterable[int]) -> None:
        self._lock = threading.Lock()
        self._ranks = sorted(ranks)
        self._beginning: Counter[int] = Counter()
        """By rank: how many broadcasts are being packed that use it."""

    @property
    def all(self) -> list[int]:
        """The present ranks, in their order."""
        with self._lock:
            return list(self._ranks)

    @contextlib.contextmanager
    def begin(self) -> Generator[list[int]]:
        """Return the ranks of a broadcast that begins; its calls must be on their way at the end of the block."""
        with self._lock:
            ranks = list(self._ranks)
            self._beginning.update(ranks)
        try:
            yield ranks
        finally:
            with self._lock:
                self._beginning.subtract(ranks)

    def set(self, ranks: Iterable[int]) -> None:
        """Let broadcasts use these ranks."""
        with self._lock:
            self._ranks = sorted(ranks)

    def take_in(self, rank: int) -> None:
        """Let broadcasts use a rank. Idempotent."""
        with self._lock:
            self._ranks = sorted({*self._ranks, rank})

    def leave_out(self, rank: int) -> None:
        """Let no more broadcasts use a rank. Idempotent."""
        with self._lock:
            self._ranks = [other for other in self._ranks if other != rank]

    def beginning_at(self, rank: int) -> int:
        """Return how many broadcasts are being packed that use a rank."""
        with self._lock:
            return self._beginning[rank]


class NodeDraining:
    """Takes nodes in and drains them, in any thread."""

    def __init__(self, owner: EngineThread, ranks: BroadcastRanks) -> None:
        self._owner = owner
        self._ranks = ranks
        owner.use_ranks = ranks.set

    # ── which process decides ────────────────────────────────────────────────────────────────────────────────────────

    def set_steward(self, ranks: Iterable[int] | None) -> None:
        """This process decides from now on which ranks stay: these, and it forgets the nodes of all others.

        None: another process decides. Broadcasts use the ranks that this one says.
        """
        dispatcher = self._owner.dispatcher
        if ranks is None:
            self._owner.post(lambda: dispatcher.follow(is_following=True))
            return
        wanted = set(ranks)

        def apply() -> None:
            dispatcher.follow(is_following=False)
            self._ranks.set(wanted)
            for rank in dispatcher.members.nodes.keys() - wanted:
                dispatcher.remove_node(rank)

        self._ranks.set(wanted)
        self._owner.post(apply)

    @property
    def size(self) -> int:
        """How many nodes take calls and are not to leave."""
        return sum(self._owner.dispatcher.members.has(rank) for rank in self._ranks.all)

    def backlog(self) -> int:
        """Return how many calls of all clients wait because all slots are taken; those of this one, if the scheduler
        does not answer.
        """
        try:
            others = self._owner.ask_for(whole_number, WAITING, BUSY_SECONDS, topic=self._owner.dispatcher.topic)
        except (SkywardError, OSError):
            others = 0
        return self._owner.dispatcher.queue.waiting + others

    def strange_nodes(self) -> dict[int, str]:
        """Return the ids of the machines that have joined and are not known here, by rank. Raises PoolClosed and
        TimeoutError.
        """
        return self._owner.run(self._owner.dispatcher.members.strange_nodes, ANSWER_SECONDS)

    def left_nodes(self) -> list[int]:
        """Return the known ranks that have left an elastic pool and do not return. Raises PoolClosed and
        TimeoutError.
        """
        return self._owner.run(self._owner.dispatcher.members.left, ANSWER_SECONDS)

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
        return max(self.hold(rank), meant) + self._owner.ask_for(whole_number, KEPT, rank=rank), bound

    def hold(self, rank: int) -> int:
        """Give a node no more calls, of any client; return how many it still has. Idempotent. Repeat it: a worker that
        joins again is free.

        Calls for that node wait for its replacement. Raises NodeLost or PoolClosed if the scheduler is out of reach.
        """
        left = self._owner.ask_for(whole_number, HOLD, rank=rank)
        node = self._owner.dispatcher.members.nodes.get(rank)
        try:  # after all messages that have arrived by now: the fetches that they begin count too
            return left + self._owner.run(
                lambda: self._owner.fetching_from(node.instance.id) if node is not None else 0, HOLD_SECONDS
            )
        except TimeoutError:
            return left + 1

    def free(self, rank: int) -> None:
        """Give a node calls again, after `drain`. Raises NodeLost or PoolClosed."""
        self._owner.ask(FREE, rank=rank)
