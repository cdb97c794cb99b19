"""A process that does not keep an elastic pool: which nodes it learns of, and which it forgets."""

from datetime import UTC, datetime
from typing import Any

from skyward_core.errors import LedgerError
from skyward_core.machines.instances import Lease, Node
from skyward_core.session.follower import Follower
from tests.engine.model import machine_id, node_of

KEYS: Any = object()


class Pool:
    """A pool whose newest lease and workers a test sets, and a process that follows it; `steps` is what it did."""

    def __init__(self) -> None:
        self.lease = lease_of(0, 1)
        self.newest = self.lease
        self.left: list[int] = []
        self.strange: dict[int, str] = {}
        self.unreachable: set[str] = set()
        self.trouble: Exception | None = None
        self.draining = self
        self.now = 0.0
        self.reads = 0
        self.steps: list[str] = []
        self.follower = Follower(lambda: self.lease, self.reach, self.use, self.find, lambda: self.now)

    def find(self, pool_id: str) -> tuple[Lease, Any]:
        self.reads += 1
        if self.trouble is not None:
            raise self.trouble
        return self.newest, KEYS

    def reach(self, lease: Lease, keys: Any) -> list[Node]:
        assert keys is KEYS
        self.steps += [f"reach {node.instance.id}" for node in lease.nodes]
        return [node for node in lease.nodes if node.instance.id not in self.unreachable]

    def use(self, lease: Lease, gone: list[Node]) -> None:
        self.lease = lease
        self.steps += [f"without {node.instance.id}" for node in gone]

    def look(self) -> list[str]:
        """Look once; return what was done."""
        self.steps = []
        cluster: Any = self
        self.follower.look(cluster)
        return self.steps

    def left_nodes(self) -> list[int]:
        return self.left

    def strange_nodes(self) -> dict[int, str]:
        return self.strange

    def give_up(self, error: Exception, rank: int) -> None:
        self.steps.append(f"give up {rank}")

    def forget(self, rank: int) -> None:
        self.steps.append(f"forget {rank}")

    def know(self, lease: Lease) -> None:
        self.steps.append("know " + " ".join(node.instance.id for node in lease.nodes))


def lease_of(*serials: int, **ranks: int) -> Lease:
    nodes = [node_of(serial, serial, 1, 1) for serial in serials]
    nodes += [node_of(serial, int(rank.removeprefix("rank")), 1, 1) for rank, serial in ranks.items()]
    nodes.sort(key=lambda node: node.rank)
    return Lease(pool_id="pool", provider={}, nodes=tuple(nodes), created_at=datetime.now(UTC))


def machines(lease: Lease) -> list[str]:
    return [node.instance.id for node in lease.nodes]


def test_a_node_that_joined_is_reached_and_known_as_soon_as_the_lease_names_it() -> None:
    """Of the newer lease only what the scheduler has named is taken: rank 3 may have left meanwhile."""
    pool = Pool()
    pool.strange = {2: machine_id(2)}
    assert pool.look() == []
    pool.now += 10
    pool.newest = lease_of(0, 1, 2, 3)
    assert pool.look() == [f"reach {machine_id(2)}", f"know {' '.join(map(machine_id, range(3)))}"]
    assert machines(pool.lease) == [machine_id(0), machine_id(1), machine_id(2)]


def test_another_machine_in_the_place_of_a_known_one_replaces_it() -> None:
    """An older lease still names the other one, and is not used."""
    pool = Pool()
    pool.strange = {1: machine_id(7)}
    assert pool.look() == []
    pool.now += 10
    pool.newest = lease_of(0, rank1=7)
    known = f"know {machine_id(0)} {machine_id(7)}"
    assert pool.look() == [f"reach {machine_id(7)}", f"without {machine_id(1)}", known]


def test_the_lease_is_read_less_and_less_often_until_something_changes() -> None:
    """Also if the ledger does not answer, or the machine."""
    pool = Pool()
    pool.strange, pool.trouble = {2: machine_id(2)}, LedgerError("away")
    for second in range(100):
        pool.now = float(second)
        pool.look()
    assert 4 <= pool.reads <= 10
    pool.trouble, pool.newest, pool.unreachable = None, lease_of(0, 1, 2, 3), {machine_id(3)}
    pool.strange = {2: machine_id(2), 3: machine_id(3)}
    assert pool.look()[-1] == f"know {' '.join(map(machine_id, range(3)))}"
    assert pool.lease == lease_of(0, 1, 2).model_copy(update={"created_at": pool.lease.created_at})


def test_a_node_that_has_left_is_forgotten() -> None:
    """Its calls that wait raise; the ledger is not asked."""
    pool = Pool()
    pool.left = [1]
    assert pool.look() == [f"without {machine_id(1)}", "give up 1", "forget 1"]
    assert (machines(pool.lease), pool.reads) == ([machine_id(0)], 0)
