"""The nodes of a pool by rank. A replacement and a restart of the cluster may drop a node at the same time."""

from concurrent.futures import Future
from types import SimpleNamespace
from typing import Any

import pytest

import skyward_core as sky
from skyward_core.errors import BadRequest, BootstrapFailed, SkywardError, Unreachable
from skyward_core.machines.instances import Instance, InstanceState
from skyward_core.provisioning.head_restart import HeadRestart
from skyward_core.provisioning.nodes import Nodes
from skyward_core.worker.watchdog import MISSED


class FakeRental:
    """A rental that rents nothing. It records the nodes that it must end."""

    def __init__(self) -> None:
        self.provider = SimpleNamespace(is_here=False)
        self.ended: list[Any] = []

    def end(self, node: Any) -> None:
        self.ended.append(node)


@pytest.fixture
def rental() -> FakeRental:
    return FakeRental()


@pytest.fixture
def nodes(rental: FakeRental) -> Nodes:
    return Nodes(sky.PoolSpec.of(provider=sky.Local(), nodes=2), "sky-test", rental, Future(), lambda event: None)  # type: ignore[arg-type]


def test_only_the_given_node_is_dropped(nodes: Nodes) -> None:
    """Another node may have its rank by now."""
    first: Any = object()
    second: Any = object()
    nodes.all[1] = second
    assert not nodes.drop(1, first)
    assert nodes.all == {1: second}
    assert nodes.drop(1, second)
    assert not nodes.drop(1, second)
    assert nodes.all == {}


def test_a_node_dropped_by_a_failed_replacement_does_not_fail_the_restart(
    nodes: Nodes, rental: FakeRental, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The restart sends the new head's address to all nodes.

    Meanwhile the replacement of one node fails, and drops and ends that node.

    Looks inside: the drop comes between two steps of a restart.
    """

    class Dropped:
        def send_settings(self, settings: object) -> None:
            nodes.all.clear()
            raise Unreachable("it does not answer")

    node: Any = Dropped()
    nodes.all[1] = node
    monkeypatch.setattr(nodes, "settings", lambda *_: None)
    restart = HeadRestart.__new__(HeadRestart)
    vars(restart).update(_nodes=nodes, _rental=rental)
    restart._send_or_drop(1, node)
    assert rental.ended == []


# ── questions to a node, and its settings ────────────────────────────────────────────────────────────────────────────


class Wire:
    """A transport to one machine. Its answers are set by a test."""

    def __init__(self, machine: Instance) -> None:
        self.instance = machine
        self.is_here = False
        self.is_connected = True
        self.value_directories = ("/dev/shm/x",)
        self.answer: bool | SkywardError | None = None
        self.asked: list[Any] = []

    def lives(self, seconds: float) -> bool | None:
        return self._answer(seconds)

    def can_reach(self, host: str, port: int) -> bool | None:
        return self._answer((host, port))

    def _answer(self, question: Any) -> bool | None:
        self.asked.append(question)
        if isinstance(self.answer, SkywardError):
            raise self.answer
        return self.answer

    def write(self, name: str, text: str) -> None:
        self.asked.append((name, text))

    def extend_lease(self, seconds: float) -> None:
        self.asked.append(seconds)

    def address(self, address: str) -> str:
        return f"here:{address}"


class Prepared:
    """A node whose log has one line more after each `follow`."""

    def __init__(self, wire: Wire) -> None:
        self.transport, self.instance = wire, wire.instance
        self.follows = 0
        self.error: SkywardError | None = None

    def follow(self) -> None:
        self.follows += 1
        if self.error is not None:
            raise self.error

    @property
    def last_words(self) -> str:
        return f"line {self.follows}"

    @property
    def has_ended(self) -> bool:
        return self.follows > 1

    @property
    def notices(self) -> tuple[str, ...]:
        return ("notice",) * self.follows

    def failure(self, words: str) -> BootstrapFailed:
        return BootstrapFailed(words)


class Pool:
    """Nodes 0 and 2 of a pool whose provider lists the machines `listed`."""

    def __init__(self, *, is_here: bool = False, is_spot: bool = False, **options: Any) -> None:
        self.listed: set[str] | Exception = {"i-0", "i-2"}
        provider = SimpleNamespace(
            is_here=is_here, notice_url="http://notice", simulates=False, to_json=lambda: {"name": "local"}
        )
        rental: Any = SimpleNamespace(
            provider=provider,
            living=self._living,
            accelerator_of=lambda machine: None,
            transports=SimpleNamespace(to=Wire),
        )
        certificate: Future[Any] = Future()
        certificate.set_result(SimpleNamespace(certificate="cert", key="key"))
        self.events: list[Any] = []
        spec = sky.PoolSpec.of(provider=sky.Local(), nodes=3, max_lifetime=77.0, **options)
        self.nodes = Nodes(spec, "sky-test", rental, certificate, self.events.append)
        self.head, self.other = (Prepared(Wire(machine(rank, is_spot=is_spot))) for rank in (0, 2))
        self.nodes.all = {2: self.other, 0: self.head}  # type: ignore[dict-item]
        self.nodes.scheduler = "tls://10.0.0.9:8786"

    def _living(self) -> set[str]:
        if isinstance(self.listed, Exception):
            raise self.listed
        return self.listed


def machine(rank: int, **fields: Any) -> Instance:
    return Instance(
        id=f"i-{rank}",
        provider="local",
        pool_id="sky-test",
        rank=rank,
        state=InstanceState.RUNNING,
        region="r",
        instance_type="t",
        private_ip=f"10.0.0.{rank}",
        **fields,
    )


def test_the_lease_has_the_present_nodes_in_the_order_of_their_ranks() -> None:
    """With workers and slots of each, and with the provider: another client can continue with it."""
    pool = Pool(concurrency=3)
    lease = pool.nodes.lease
    assert [(node.rank, node.instance.id, node.workers, node.slots) for node in lease.nodes] == [
        (0, "i-0", 1, 3),
        (2, "i-2", 1, 3),
    ]
    assert (lease.pool_id, lease.provider, lease.scheduler) == ("sky-test", {"name": "local"}, pool.nodes.scheduler)
    assert lease.created_at == pool.nodes.created_at
    assert pool.nodes.scheduler_from_here == "here:tls://10.0.0.9:8786"


def test_settings_have_the_place_of_a_node_in_the_pool() -> None:
    """Nodes that reach each other listen at their own addresses. Those without one are processes of this machine."""
    pool = Pool()
    pool.nodes.generation, pool.nodes.head_port = 4, 8786
    settings = pool.nodes.settings(pool.other, 2, "tls://10.0.0.0:1")  # type: ignore[arg-type]
    assert (settings.rank, settings.generation, settings.host, settings.head_host) == (2, 4, "10.0.0.2", "10.0.0.0")
    assert (settings.head_port, settings.scheduler, settings.worker_ports) == (8786, "tls://10.0.0.0:1", ())
    assert (settings.max_lifetime_seconds, settings.notice_url, settings.is_simulated) == (77.0, "", False)
    assert (settings.tls_certificate, settings.instance_id, settings.total_nodes) == ("cert", "i-2", 3)
    for node in (pool.head, pool.other):
        node.instance = node.instance.model_copy(update={"private_ip": None})
    settings = pool.nodes.settings(pool.other, 2, None)  # type: ignore[arg-type]
    assert (settings.host, settings.head_host, settings.scheduler) == ("127.0.0.1", "127.0.0.1", None)


def test_nodes_that_cannot_reach_each_other_listen_on_loopback() -> None:
    """Each at its own ports, one for a scheduler and one for each worker. Such a pool cannot be detached."""
    pool = Pool()
    pool.nodes.forwarding.choose()
    settings = pool.nodes.settings(pool.other, 2, None)  # type: ignore[arg-type]
    assert (settings.host, settings.head_host) == ("127.0.0.1", "127.0.0.1")
    assert (settings.scheduler_port, *settings.worker_ports) == pool.nodes.forwarding.ports_of(2)
    assert len(settings.worker_ports) == 1
    with pytest.raises(BadRequest, match="cannot be detached"):
        pool.nodes.extend_leases(60)
    assert pool.head.transport.asked == []


def test_a_new_preparation_begins_on_its_machine() -> None:
    """It has its rank, and emits."""
    pool = Pool()
    node = pool.nodes.preparation_of(machine(1), 1)
    assert (node.rank, node.instance.id) == (1, "i-1")
    assert [event.instance_id for event in pool.events] == ["i-1"]


@pytest.mark.parametrize(("address", "port"), [("tls://10.0.0.9:8786", 8786), ("tls://10.0.0.9", 0)])
def test_a_node_is_asked_whether_it_reaches_the_scheduler(address: str, port: int) -> None:
    """Its answer is returned. If it gives none, the bootstrap has failed."""
    pool = Pool()
    pool.nodes.scheduler, wire = address, pool.other.transport
    for answer in (True, False):
        wire.answer = answer
        assert pool.nodes.sees_the_head(pool.other) is answer  # type: ignore[arg-type]
    assert wire.asked == [("10.0.0.9", port)] * 2
    wire.answer = Unreachable("silent")
    with pytest.raises(BootstrapFailed, match="silent"):
        pool.nodes.sees_the_head(pool.other)  # type: ignore[arg-type]


def test_the_last_words_of_a_node_are_read_when_they_are_asked_for() -> None:
    """Also those of a node that has failed. A rank without a node has none, and has ended."""
    nodes, other = (pool := Pool()).nodes, pool.other
    assert (nodes.last_words(2), nodes.has_ended(2)) == ("line 1", True)
    other.follows = 0
    assert not nodes.has_ended(2)
    other.error = BootstrapFailed("over")
    assert nodes.has_ended(2)
    assert nodes.last_words(2) == "line 3"
    assert (nodes.last_words(1), nodes.has_ended(1)) == ("", True)


@pytest.mark.parametrize(
    ("is_here", "is_connected", "listed", "expected"),
    [
        (False, True, {"i-0"}, True),
        (False, False, {"i-2"}, False),
        (True, True, {"i-2"}, True),
        (True, True, {"i-0"}, False),
    ],
)
def test_a_node_is_connected(is_here: bool, is_connected: bool, listed: set[str], expected: bool) -> None:
    """On this machine there is no connection to lose, so its processes are looked for."""
    pool = Pool(is_here=is_here)
    pool.other.transport.is_connected, pool.listed = is_connected, listed
    assert pool.nodes.is_connected(2) is expected
    assert not pool.nodes.is_connected(1)


def test_a_node_restarts_the_named_workers() -> None:
    """A rank without a node is passed over."""
    pool = Pool()
    pool.nodes.restart_workers(2, [0, 1])
    pool.nodes.restart_workers(1, [0])
    assert pool.other.transport.asked == [(MISSED, "0 1")]


def test_only_spot_machines_may_be_taken_back() -> None:
    """The notices of others are not read. A node that has failed keeps those that it has."""
    pool = Pool()
    assert (pool.nodes.notices(2), pool.nodes.notice_url(pool.other)) == ((), "")  # type: ignore[arg-type]
    pool = Pool(is_spot=True)
    assert pool.nodes.notice_url(pool.other) == "http://notice"  # type: ignore[arg-type]
    pool.other.error = BootstrapFailed("over")
    assert (pool.nodes.notices(2), pool.nodes.notices(1)) == (("notice",), ())


def test_a_machine_is_lost_only_if_a_listing_lacks_it() -> None:
    """One that answers is not looked for, and an outage of the provider proves nothing."""
    pool = Pool()
    pool.listed = set()
    pool.nodes.raise_if_lost(pool.other)  # type: ignore[arg-type]
    pool.other.transport.is_connected = False
    with pytest.raises(BootstrapFailed, match="its machine is gone"):
        pool.nodes.raise_if_lost(pool.other)  # type: ignore[arg-type]
    pool.listed = {"i-2"}
    pool.nodes.raise_if_lost(pool.other)  # type: ignore[arg-type]
    pool.listed = ConnectionError("down")
    pool.nodes.raise_if_lost(pool.other)  # type: ignore[arg-type]
    here = Pool(is_here=True)
    here.listed = set()
    with pytest.raises(BootstrapFailed, match="its machine is gone"):
        here.nodes.raise_if_lost(here.other)  # type: ignore[arg-type]
