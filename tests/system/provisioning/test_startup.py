"""Machines become nodes while a pool opens: in which order they get their settings, and when one counts as gone."""

import threading
import time
from collections.abc import Callable, Sequence
from types import SimpleNamespace
from typing import Any

import pytest

import skyward_core as sky
from skyward_core.errors import BootstrapFailed, ConnectionLost, SkywardError
from skyward_core.provisioning import startup as startup_module
from skyward_core.provisioning.startup import ASK_SECONDS, PORT_TRIES, Startup

SCRIPT = "make it a node"
SECONDS = 8000
"""The time limit of the opening; nodes get it to the nearest thousand, however slow this machine is."""


class StartingNode:
    """A machine that starts at once. It is the head if its settings name no scheduler."""

    def __init__(self, rank: int) -> None:
        self.rank = rank
        self.instance = SimpleNamespace(id=f"i-{rank}", tags={})
        self.transport = self
        self.is_connected = True
        self.head: str | None = None
        self.silent_from = 2
        """From this generation of heads on its scheduler does not come up."""
        self.done: list[Any] = []
        self.on_start: Callable[[], object] = lambda: None

    def start(self, script: str, timeout_seconds: float) -> None:
        self.done.append((script, round(timeout_seconds, -3)))
        self.on_start()

    def send_settings(self, settings: Any) -> None:
        self.done.append(settings)
        rank, scheduler, generation = settings
        assert rank == self.rank
        if scheduler is None:
            self.head = f"tls://head:{generation}" if generation < self.silent_from else None

    def opened(self) -> None:
        self.done.append("opened")

    def follow(self) -> None:
        """Read nothing."""

    def failure(self, words: str) -> BootstrapFailed:
        return BootstrapFailed(f"{self.instance.id}: {words}")


class Opening:
    """The startup of a pool of fake nodes."""

    def __init__(self, nodes: int = 3, *, is_here: bool = False) -> None:
        self.nodes: dict[int, Any] = {rank: StartingNode(rank) for rank in range(nodes)}
        self.is_closed = threading.Event()
        self.scheduler, self.generation = "", 0
        self.all = self.nodes
        self.choices = 0
        self.connected: list[Exception | None] = []
        """What each attempt to forward ports raises."""
        self.reached = dict.fromkeys(self.nodes, True)
        self.forwarding = SimpleNamespace(choose=self._choose)
        self.listed: list[set[str] | Exception] = []
        """The next answers of the provider; after them it lists all machines but the lost ones."""
        self.lost = set[str]()
        self.provider = SimpleNamespace(is_here=is_here, keeps_images=False)
        self.spec = sky.PoolSpec.of(provider=sky.Local(), nodes=nodes, lease_seconds=60)
        self.rental: Any = SimpleNamespace(
            provider=self.provider,
            transports=SimpleNamespace(close=self.is_closed.set),
            living=self._living,
            answered_at=0.0,
            is_closing=False,
        )
        self.startup = Startup(self.spec, self.rental, self)  # type: ignore[arg-type]

    def _choose(self) -> None:
        self.choices += 1

    def _living(self) -> set[str]:
        answer = self.listed.pop(0) if self.listed else {node.instance.id for node in self.all.values()} - self.lost
        if isinstance(answer, Exception):
            raise answer
        return answer

    def script(self) -> str:
        return SCRIPT

    def settings(self, node: Any, rank: int, scheduler: str | None) -> tuple[int, str | None, int]:
        assert node is self.nodes[rank]
        return rank, scheduler, self.generation

    def sees_the_head(self, node: Any) -> bool:
        return self.reached[node.rank]

    def connect(self) -> None:
        if self.connected and (error := self.connected.pop(0)) is not None:
            raise error

    def prepare(self) -> None:
        self.startup.prepare(time.monotonic() + SECONDS)

    def done(self) -> list[list[Any]]:
        return [node.done for node in self.nodes.values()]


def test_the_nodes_get_the_address_of_the_head() -> None:
    """The head has settings without one, and then its scheduler listens. When the pool opens, all get a message."""
    pool = Opening()
    pool.prepare()
    assert pool.scheduler == "tls://head:0"
    assert pool.done() == [
        [(SCRIPT, SECONDS), (0, None, 0), "opened"],
        [(SCRIPT, SECONDS), (1, "tls://head:0", 0), "opened"],
        [(SCRIPT, SECONDS), (2, "tls://head:0", 0), "opened"],
    ]
    assert (pool.choices, pool.is_closed.is_set()) == (0, False)


@pytest.mark.parametrize("tries", [1, PORT_TRIES])
def test_nodes_that_do_not_reach_the_head_are_connected_through_this_client(tries: int) -> None:
    """One suffices. Ports are chosen again if one of them is used; then the head gets new settings."""
    pool = Opening()
    pool.reached[2] = False
    pool.connected = [OSError("in use"), SkywardError("in use")] * 2
    pool.connected[tries - 1 :] = [None]
    pool.prepare()
    assert (pool.choices, pool.connected) == (tries, [])
    assert pool.scheduler == "tls://head:1"
    assert pool.done()[0] == [(SCRIPT, SECONDS), (0, None, 0), (0, None, 1), "opened"]
    assert pool.done()[1] == [(SCRIPT, SECONDS), (1, "tls://head:1", 1), "opened"]


@pytest.mark.parametrize(
    ("errors", "tries"), [([OSError("in use")] * PORT_TRIES, PORT_TRIES), ([ConnectionLost("cut")], 1)]
)
def test_ports_that_cannot_be_forwarded_fail_the_opening(errors: Sequence[Exception], tries: int) -> None:
    """After some tries, and at once if a node is lost. No other node gets settings."""
    pool = Opening()
    pool.reached[1] = False
    pool.connected = [*errors]
    with pytest.raises(type(errors[0])):
        pool.prepare()
    assert pool.choices == tries
    assert pool.done()[1:] == [[(SCRIPT, SECONDS)]] * 2
    assert pool.is_closed.is_set()


def test_a_node_that_cannot_start_fails_the_opening() -> None:
    """While the head still starts. Its thread is woken."""
    pool = Opening()

    def fail() -> None:
        raise BootstrapFailed("no room")

    woken = list[bool]()
    pool.nodes[0].on_start = lambda: woken.append(pool.is_closed.wait(120))
    pool.nodes[2].on_start = fail
    with pytest.raises(BootstrapFailed, match="no room"):
        pool.prepare()
    assert woken == [True]


@pytest.mark.parametrize("waits_for", ["head", "other"])
def test_a_pool_that_is_to_end_does_not_wait_for_machines(waits_for: str) -> None:
    """`terminate_now` was called: the reaper ends the machines, and a machine that has not answered yet never will."""
    pool = Opening()
    if waits_for == "head":
        pool.nodes[0].silent_from = 0
        pool.nodes[0].on_start = lambda: setattr(pool.rental, "is_closing", True)
    else:
        pool.nodes[2].on_start = lambda: (setattr(pool.rental, "is_closing", True), pool.is_closed.wait(120))
    with pytest.raises(sky.PoolClosed, match="while the pool opened"):
        pool.prepare()
    assert pool.is_closed.is_set()


# ── machines that are gone ───────────────────────────────────────────────────────────────────────────────────────────


@pytest.fixture
def now(monkeypatch: pytest.MonkeyPatch) -> list[float]:
    """The time of the startup, which a test sets."""
    seconds = [1000.0]
    monkeypatch.setattr(startup_module, "time", SimpleNamespace(monotonic=lambda: seconds[0]))
    return seconds


def test_a_silent_machine_is_gone_if_two_listings_lack_it(now: list[float]) -> None:
    """The provider is asked at most every ASK_SECONDS, and not right after a launch. An outage proves nothing."""
    pool = Opening()
    pool.startup.check()
    pool.nodes[1].is_connected = False
    pool.rental.answered_at = now[0]
    pool.startup.check()
    pool.listed = [{"i-0", "i-2"}, ConnectionError("down"), {"i-0", "i-2"}]
    for left in (2, 1):
        now[0] += ASK_SECONDS
        for _ in range(3):
            pool.startup.check()
        assert len(pool.listed) == left
    now[0] += ASK_SECONDS
    with pytest.raises(BootstrapFailed, match="i-1: it is gone"):
        pool.startup.check()


def test_a_machine_that_is_silent_for_longer_than_its_lease_is_gone(now: list[float]) -> None:
    """Its guard has ended it. A machine that answers again begins a new lease."""
    pool = Opening()
    pool.listed = [{"i-0", "i-1", "i-2"}] * 3
    pool.nodes[1].is_connected = False
    pool.startup.check()
    now[0] += 50
    pool.nodes[1].is_connected = True
    pool.startup.check()
    pool.nodes[1].is_connected = False
    pool.startup.check()
    now[0] += 60
    pool.startup.check()
    now[0] += 1
    with pytest.raises(BootstrapFailed, match="i-1: it is gone"):
        pool.startup.check()


def test_processes_of_this_machine_are_looked_for_each_time(now: list[float]) -> None:
    """One that is missing is gone. An error is raised, because no network can be out."""
    pool = Opening(is_here=True)
    pool.listed = [{"i-0", "i-1", "i-2"}, OSError("no processes"), {"i-0", "i-1"}]
    pool.startup.check()
    with pytest.raises(OSError, match="no processes"):
        pool.startup.check()
    with pytest.raises(BootstrapFailed, match="i-2: it is gone"):
        pool.startup.check()
