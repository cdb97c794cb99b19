"""Changes of the nodes and workers of a pool: what follows from them for calls, batches and files on nodes."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence

from skyward_core.engine import actions as do
from skyward_core.engine.calls import CallTable, Items
from skyward_core.engine.kept_calls import KeptCalls
from skyward_core.engine.losses import Losses
from skyward_core.engine.members import Members, rank_of
from skyward_core.engine.outbox import Queue
from skyward_core.engine.shipments import FunctionsOnNodes, Shipments
from skyward_core.events.events import BootstrapCompleted
from skyward_core.machines.instances import Node
from skyward_core.worker.retained_batches import WorkerKept
from skyward_core.worker.scheduler_messages import HELD, Resumed


class Roster:
    """Keeps `members` current, and its consequences. `act` takes the actions.

    In an elastic pool the process that keeps it decides which ranks stay. The others follow: their broadcasts use those
    of these ranks whose nodes they know.
    """

    def __init__(
        self,
        members: Members,
        queue: Queue,
        calls: CallTable,
        items: Items,
        shipments: Shipments,
        functions: FunctionsOnNodes,
        kept: KeptCalls,
        losses: Losses,
        act: Callable[[do.Action], object],
    ) -> None:
        self._members = members
        self._queue = queue
        self._calls = calls
        self._items = items
        self._shipments = shipments
        self._functions = functions
        self._kept = kept
        self._losses = losses
        self._do = act
        self._is_following = False
        self._staying: frozenset[int] | None = None

    # ── nodes ────────────────────────────────────────────────────────────────────────────────────────────────────────

    def know(self, nodes: Iterable[Node]) -> None:
        """Note these nodes: some have replaced others."""
        members, nodes = self._members, list(nodes)
        for node in nodes:
            before = members.nodes.get(node.rank)
            if before is not None and before.instance.id != node.instance.id:
                self._kept.without(members.names_at(node.rank))
        self._set({**members.nodes, **{node.rank: node for node in nodes}})

    def forget(self, rank: int) -> None:
        """Go on without the node of this rank, which is absent, and without a replacement."""
        self._set({other: node for other, node in self._members.nodes.items() if other != rank})

    def restart(self, nodes: Sequence[Node]) -> None:
        """Another head has these nodes; all workers are away."""
        self._members.clear()
        self._set({node.rank: node for node in nodes})

    def _set(self, nodes: Mapping[int, Node]) -> None:
        self._members.nodes = nodes
        self._functions.keep(self._members.knows)
        self._use_ranks()
        self.count_slots()

    # ── the ranks that stay ──────────────────────────────────────────────────────────────────────────────────────────

    def follow(self, *, is_following: bool) -> None:
        """Another process decides which ranks stay (True), or this one does."""
        self._is_following = is_following
        self._use_ranks()

    def ranks_known(self, ranks: frozenset[int] | None) -> None:
        """The process that keeps the pool has decided which ranks stay; None: it has decided nothing."""
        self._staying = ranks
        self._use_ranks()

    def _use_ranks(self) -> None:
        self._members.staying = self._staying if self._is_following else None
        if self._members.staying is not None:
            self._do(do.UseRanks(self._members.staying & self._members.nodes.keys()))
            self.count_slots()

    # ── workers ──────────────────────────────────────────────────────────────────────────────────────────────────────

    def resumed(self, resumed: Resumed) -> None:
        """The scheduler has listed its workers, and the ranks that stay."""
        self._losses.keepers_gone(resumed.workers)
        there = {name: address for address, (name, _) in resumed.workers.items()}
        for name, address in list(self._members.workers.items()):
            if there.get(name) != address:
                self.leave(name, address)
        for address, (name, status) in resumed.workers.items():
            self.join(name, address, resumed.instances.get(address, ""))
            if status == HELD:
                self._members.hold(address, None)
            else:  # its WorkerFree may have been lost with the connection
                self._members.held.pop(address, None)
        self.ranks_known(resumed.ranks)
        self.count_slots()

    def join(self, name: str, address: str, instance_id: str) -> None:
        """A worker has joined."""
        rank = rank_of(name)
        is_complete = self._members.join(name, address, instance_id)
        self.count_slots()
        self._calls.stop_unwanted()  # the batch of a cancelled call may go to this worker
        self._items.repeat_credit()
        if is_complete:
            self._do(do.EmitEvent(BootstrapCompleted(self._members.nodes[rank].instance.id)))
            self._do(do.Joined(rank))

    def leave(self, name: str, address: str) -> None:
        """A worker has left."""
        if not self._members.leave(name, address):
            return  # its successor has joined already
        self.count_slots()
        self._shipments.worker_left(address)
        self._losses.worker_left(address)
        self._do(do.Left(rank_of(name)))

    def hold(self, address: str, left: int | None) -> None:
        """A worker gets no more calls, and has so many left; None: not known."""
        self._members.hold(address, left)
        self.count_slots()

    def free(self, address: str) -> None:
        """A worker gets calls again."""
        self._members.held.pop(address, None)
        self.count_slots()

    def announced(self, news: WorkerKept, now: float) -> None:
        """A worker announces the calls that it has from an earlier head, those of other clients too."""
        self._kept.announced(news.name, news.address, self._shipments.ours(news.keys))
        self._calls.stop_unwanted(news.calls)
        if news.is_paused:
            self.hold(news.address, None)
        self._losses.lose_unkept(now)

    def count_slots(self) -> None:
        """Note how many calls may go out, and to which workers."""
        self._queue.workers = self._members.free
        self._queue.leaving = self._members.leaving
        self._queue.slots = self._members.slots
