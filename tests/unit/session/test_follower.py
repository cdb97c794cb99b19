"""A process that does not keep an elastic pool: which nodes it learns of, and which it forgets."""

from datetime import UTC, datetime
from typing import Any

from skyward_core.errors import LedgerError
from skyward_core.machines.instances import Lease, Node
from skyward_core.session.client_watch import Follower
from tests.engine.model import machine_id, node_of

KEYS: Any = object()


class Pool:
    """A pool whose newest lease and workers a test sets, and a process that follows it; `steps` is what it did."""

    def __init__(self) -> None:
        self.lease = self.newest = lease_of((0, 0), (1, 1))
        self.left: list[int] = []
        self.strange: dict[int, str] = {}
        self.trouble: Exception | None = None
        self.draining = self
        self.now = 0.0
        self.steps: list[str] = []
        self.follower = Follower(lambda: self.lease, self.reach, self.use, self.find, lambda: self.now)

    def find(self, pool_id: str) -> tuple[Lease, Any]:
        if self.trouble is not None:
            raise self.trouble
        return self.newest, KEYS

    def reach(self, lease: Lease, keys: Any) -> list[Node]:
        assert keys is KEYS
        self.steps += [f"reach {node.instance.id}" for node in lease.nodes]
        return [*lease.nodes]

    def use(self, lease: Lease, gone: list[Node]) -> None:
        self.lease = lease
        self.steps += [f"without {node.instance.id}" for node in gone]

    def look(self) -> list[str]:
        """Look once, later than every pause; return what was done."""
        self.steps, self.now = [], self.now + 100
        cluster: Any = self
        self.follower.look(cluster)
        return self.steps

    # ── the cluster ──────────────────────────────────────────────────────────────────────────────────────────────────

    def left_nodes(self) -> list[int]:
        return self.left

    def strange_nodes(self) -> dict[int, str]:
        return self.strange

    def fail_calls(self, error: Exception, rank: int) -> None:
        self.steps.append(f"give up {rank}")

    def remove_node(self, rank: int) -> None:
        self.steps.append(f"forget {rank}")

    def update_nodes(self, lease: Lease) -> None:
        self.steps.append("know " + " ".join(node.instance.id for node in lease.nodes))


def lease_of(*nodes: tuple[int, int]) -> Lease:
    """Return a lease of these nodes: the rank, and the number of the machine."""
    its = tuple(node_of(serial, rank, 1, 1) for rank, serial in nodes)
    return Lease(pool_id="pool", provider={}, nodes=its, created_at=datetime.now(UTC))


def test_a_node_that_joined_is_reached_as_soon_as_the_lease_names_it() -> None:
    """Also after an outage of the ledger. Only what the scheduler has named is taken: rank 3 may have left meanwhile."""
    pool = Pool()
    pool.strange, pool.trouble = {2: machine_id(2)}, LedgerError("away")
    assert pool.look() == []
    pool.trouble = None
    assert pool.look() == []
    pool.newest = lease_of((0, 0), (1, 1), (2, 2), (3, 3))
    assert pool.look() == [f"reach {machine_id(2)}", f"know {' '.join(map(machine_id, range(3)))}"]
    assert [node.rank for node in pool.lease.nodes] == [0, 1, 2]


def test_another_machine_in_the_place_of_a_known_one_replaces_it() -> None:
    """An older lease still names the other one, and is not used."""
    pool = Pool()
    pool.strange = {1: machine_id(7)}
    assert pool.look() == []
    pool.newest = lease_of((0, 0), (1, 7))
    known = f"know {machine_id(0)} {machine_id(7)}"
    assert pool.look() == [f"reach {machine_id(7)}", f"without {machine_id(1)}", known]


def test_calls_that_wait_for_a_node_that_has_left_are_given_up() -> None:
    pool = Pool()
    pool.left = [1]
    assert pool.look() == [f"without {machine_id(1)}", "give up 1", "forget 1"]
    assert [node.rank for node in pool.lease.nodes] == [0]
