"""The nodes of a pool and the workers that its scheduler has, as the dispatcher knows them: pure bookkeeping.

A worker's name is RANK-INDEX. A worker is away, present, or held. A held worker gets no more calls, and finishes those
that it has.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field

from skyward_core.machines.instances import Node
from skyward_core.worker.wire import Parcel

MANY = 1_000_000  # more than a worker has slots


def rank_of(name: str) -> int:
    """Return the rank of the node of a worker."""
    return int(name.partition("-")[0])


@dataclass(slots=True)
class Members:
    """`nodes` by rank. `workers` maps the names of present workers to their addresses, `held` the addresses of held
    ones to how many of their slots are busy.

    `is_here`: all nodes are processes of this machine, which see the same memory.
    """

    nodes: Mapping[int, Node]
    is_here: bool = False
    workers_per_node: int = 1
    workers: dict[str, str] = field(default_factory=dict[str, str])
    held: dict[str, int] = field(default_factory=dict[str, int])
    instances: dict[str, str] = field(default_factory=dict[str, str])
    """The ids of the machines of present workers, by name; without those that are unknown."""
    staying: frozenset[int] | None = None
    """The ranks that are to stay in an elastic pool; None: all."""

    @staticmethod
    def of(nodes: Iterable[Node], *, is_here: bool = False) -> Members:
        """Return the members of a new pool: all workers are away."""
        by_rank = {node.rank: node for node in nodes}
        return Members(by_rank, is_here, max((node.workers for node in by_rank.values()), default=1))

    def names_at(self, rank: int) -> list[str]:
        """Return the names of all workers of a node, also of those that are away."""
        node = self.nodes.get(rank)
        return [f"{rank}-{index}" for index in range(node.workers if node is not None else self.workers_per_node)]

    def missing(self, rank: int) -> list[int]:
        """Return the indexes of the workers of a node that are away."""
        node = self.nodes.get(rank)
        return [
            index for index in range(node.workers if node is not None else 0) if f"{rank}-{index}" not in self.workers
        ]

    def has(self, rank: int) -> bool:
        """Return whether all workers of a node are present."""
        return rank in self.nodes and not self.missing(rank)

    def join(self, name: str, address: str, instance_id: str = "") -> bool:
        """Note that a worker has joined; True if its node is complete now, and was not before."""
        was_complete = self.has(rank_of(name))
        before = self.workers.get(name)
        if before != address:
            self.held.pop(before or "", None)
        self.workers[name] = address
        self.instances.pop(name, None)
        if instance_id:
            self.instances[name] = instance_id
        return self.has(rank_of(name)) and not was_complete

    def leave(self, name: str, address: str) -> bool:
        """Note that a worker has left; False if its successor has joined already."""
        if self.workers.get(name) != address:
            return False
        del self.workers[name]
        self.instances.pop(name, None)
        self.held.pop(address, None)
        return True

    def hold(self, address: str, left: int | None) -> None:
        """Note that a worker gets no more calls and has this many left; None: not known."""
        if address in self.workers.values():
            self.held[address] = self.held.get(address, MANY) if left is None else left

    def clear(self) -> None:
        """All workers are away: there is another scheduler."""
        self.workers.clear()
        self.instances.clear()
        self.held.clear()

    @property
    def free(self) -> list[str]:
        """Names of present workers that are not held."""
        return [
            name for name, address in self.workers.items() if rank_of(name) in self.nodes and address not in self.held
        ]

    @property
    def leaving(self) -> list[str]:
        """Names of held workers of nodes that leave: they get the calls that may run nowhere else, because the node
        waits for these, and none takes its place.
        """
        return [
            name
            for name, address in self.workers.items()
            if rank_of(name) in self.nodes and address in self.held and self.is_leaving(rank_of(name))
        ]

    def is_leaving(self, rank: int) -> bool:
        """Return whether a node is to leave an elastic pool."""
        return self.staying is not None and rank not in self.staying

    def is_strange(self, name: str) -> bool:
        """Return whether a present worker runs on a machine that is not known: a new node, or one in the place of
        another.
        """
        node, instance_id = self.node_of(name), self.instances.get(name)
        return name in self.workers and (node is None or instance_id not in (None, node.instance.id))

    def strange_nodes(self) -> dict[int, str]:
        """Return the ids of machines that are not known and have workers here, by rank; "" if an id is unknown."""
        return {rank_of(name): self.instances.get(name, "") for name in self.workers if self.is_strange(name)}

    def left(self) -> list[int]:
        """Return the known ranks that were to leave, and of which no worker is present any more."""
        present = {rank_of(name) for name in self.workers}
        return [rank for rank in self.nodes if self.is_leaving(rank) and rank not in present]

    @property
    def slots(self) -> int:
        """How many calls may be in flight.

        The calls that a held worker has left count: they must not take the place of calls for free slots.
        """
        total = 0
        for name, address in self.workers.items():
            if (node := self.nodes.get(rank_of(name))) is not None:
                total += min(node.slots, self.held.get(address, node.slots))
        return max(1, total)

    def node_of(self, name: str) -> Node | None:
        """Return the node of a worker; None if it is not a node of the pool."""
        return self.nodes.get(rank_of(name))

    def instance_of(self, parcel: Parcel) -> str | None:
        """Return the id of the instance whose memory has a parcel; None if it is not a node of the pool.

        The path contains the instance's id. The longest match counts, because one id may be the beginning of another.
        """
        path = str(parcel.path)
        known = {node.instance.id for node in self.nodes.values()}
        return max((one for one in known.union(self.instances.values()) if one in path), key=len, default=None)

    def knows(self, instance_id: str) -> bool:
        """Return whether an instance is one of the pool's nodes."""
        return any(node.instance.id == instance_id for node in self.nodes.values())

    def may_know(self, instance_id: str) -> bool:
        """Return whether an instance is one of the pool's nodes, or has a worker here and will be known soon."""
        return self.knows(instance_id) or instance_id in self.instances.values()

    def is_there(self, instance_id: str) -> bool:
        """Return whether a worker of this instance is present."""
        if instance_id in self.instances.values():
            return True
        ranks = {rank_of(name) for name in self.workers}
        return any(node.instance.id == instance_id and node.rank in ranks for node in self.nodes.values())
