"""A pool opens: what fails the opening, and when a machine counts as gone. The nodes are fakes."""

import threading
import time
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import pytest

import skyward_core as sky
from skyward_core.errors import BootstrapFailed, ConnectionLost
from skyward_core.provisioning import lifecycle as startup_module
from skyward_core.provisioning.lifecycle import ASK_SECONDS, PORT_TRIES, Startup


class StartingNode:
    """A machine that starts at once. It is the head if its settings name no scheduler."""

    def __init__(self, rank: int) -> None:
        self.rank = rank
        self.instance = SimpleNamespace(id=f"i-{rank}", tags={})
        self.transport = self
        self.is_connected, self.phase = True, "server"
        self.head: str | None = None
        self.is_silent = False
        """Whether its scheduler does not come up."""
        self.schedulers: list[str | None] = []
        """Those of its settings."""
        self.on_start: Callable[[], object] = lambda: None

    def start(self, script: str, timeout_seconds: float, files: object = ()) -> None:
        self.on_start()

    def send_settings(self, scheduler: str | None) -> None:
        self.schedulers.append(scheduler)
        if scheduler is None and not self.is_silent:
            self.head = f"tls://head:{len(self.schedulers)}"

    def opened(self) -> None:
        """The pool has opened."""

    def follow(self) -> None:
        """Read nothing."""

    def failure(self, words: str) -> BootstrapFailed:
        return BootstrapFailed(f"{self.instance.id}: {words}")


class Opening:
    """The startup of a pool of three fake nodes."""

    def __init__(self, *, is_local: bool = False) -> None:
        self.all: dict[int, Any] = {rank: StartingNode(rank) for rank in range(3)}
        self.is_closed = threading.Event()
        self.scheduler, self.generation = "", 0
        self.connected: list[Exception | None] = []
        """What each attempt to forward ports raises."""
        self.reached = True
        self.forwarding = SimpleNamespace(choose=lambda: None)
        self.listed: list[set[str] | Exception] = []
        """The next answers of the provider; after them it lists all machines."""
        spec = sky.PoolSpec.of(provider=sky.Local(), nodes=3, lease_seconds=60)
        self.rental: Any = SimpleNamespace(
            provider=SimpleNamespace(is_local=is_local, keeps_images=False),
            transports=SimpleNamespace(close=self.is_closed.set),
            living=self._living,
            answered_at=0.0,
            is_closing=False,
        )
        self.startup = Startup(spec, self.rental, self)  # type: ignore[arg-type]

    def _living(self) -> set[str]:
        answer = self.listed.pop(0) if self.listed else {node.instance.id for node in self.all.values()}
        if isinstance(answer, Exception):
            raise answer
        return answer

    def script(self) -> str:
        return "make it a node"

    def settings(self, node: Any, rank: int, scheduler: str | None) -> str | None:
        return scheduler

    def sees_the_head(self, node: Any) -> bool:
        return self.reached

    def connect(self) -> None:
        if self.connected and (error := self.connected.pop(0)) is not None:
            raise error

    def prepare(self) -> None:
        self.startup.prepare(time.monotonic() + 8000)

    @property
    def schedulers(self) -> list[list[str | None]]:
        return [node.schedulers for node in self.all.values()]


def test_nodes_that_do_not_reach_the_head_are_connected_through_this_client() -> None:
    """Ports are chosen again if one of them is used; then the head gets new settings, and the others its address."""
    pool = Opening()
    pool.prepare()
    assert pool.schedulers == [[None], ["tls://head:1"], ["tls://head:1"]]
    pool = Opening()
    pool.reached, pool.connected = False, [OSError("in use"), None]
    pool.prepare()
    assert pool.connected == []
    assert pool.schedulers == [[None, None], ["tls://head:2"], ["tls://head:2"]]
    assert not pool.is_closed.is_set()


@pytest.mark.parametrize(
    ("errors", "left"), [([OSError("in use")] * PORT_TRIES, 0), ([ConnectionLost("cut"), OSError("in use")], 1)]
)
def test_ports_that_cannot_be_forwarded_fail_the_opening(errors: list[Exception], left: int) -> None:
    """After some tries, and at once if a node is lost. No other node gets settings."""
    pool = Opening()
    pool.reached, pool.connected = False, [*errors]
    with pytest.raises(type(errors[0])):
        pool.prepare()
    assert (len(pool.connected), pool.schedulers[1:]) == (left, [[], []])
    assert pool.is_closed.is_set()


def test_a_node_that_cannot_start_fails_the_opening() -> None:
    """While the head still starts. Its thread is woken."""
    pool = Opening()

    def fail() -> None:
        raise BootstrapFailed("no room")

    woken = list[bool]()
    pool.all[0].on_start = lambda: woken.append(pool.is_closed.wait(120))
    pool.all[2].on_start = fail
    with pytest.raises(BootstrapFailed, match="no room"):
        pool.prepare()
    assert woken == [True]


@pytest.mark.parametrize("waits_for", ["head", "other"])
def test_a_pool_that_is_to_end_does_not_wait_for_machines(waits_for: str) -> None:
    """`terminate_now` was called: the reaper ends the machines, and a machine that has not answered yet never will."""
    pool = Opening()
    if waits_for == "head":
        pool.all[0].is_silent = True
        pool.all[0].on_start = lambda: setattr(pool.rental, "is_closing", True)
    else:
        pool.all[2].on_start = lambda: (setattr(pool.rental, "is_closing", True), pool.is_closed.wait(120))
    with pytest.raises(sky.PoolClosed, match="while the pool opened"):
        pool.prepare()
    assert pool.is_closed.is_set()


# ── machines that are gone ───────────────────────────────────────────────────────────────────────────────────────────


@pytest.fixture
def now(monkeypatch: pytest.MonkeyPatch) -> list[float]:
    """The time of the startup, which a test sets."""
    seconds = [1000.0]
    monkeypatch.setattr(startup_module, "time", SimpleNamespace(monotonic=lambda: seconds[0]))
    monkeypatch.setattr(startup_module, "boot_seconds", lambda: seconds[0])
    return seconds


def test_a_silent_machine_is_gone_if_two_listings_lack_it(now: list[float]) -> None:
    """The provider is asked at most every ASK_SECONDS, and not right after a launch. An outage proves nothing."""
    pool = Opening()
    pool.startup.check()
    pool.all[1].is_connected = False
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
    pool.all[1].is_connected = False
    pool.startup.check()
    now[0] += 50
    pool.all[1].is_connected = True
    pool.startup.check()
    pool.all[1].is_connected = False
    pool.startup.check()
    now[0] += 60
    pool.startup.check()
    now[0] += 1
    with pytest.raises(BootstrapFailed, match="i-1: it is gone"):
        pool.startup.check()


@pytest.mark.parametrize("is_new", [True, False], ids=["before its script", "while it installs"])
def test_a_node_that_ended_while_the_client_slept_is_gone(now: list[float], is_new: bool) -> None:
    """Its guard has ended it, and its host still answers: without a question the opening would wait for its limit."""
    pool = Opening()
    pool.all[1].phase = "" if is_new else "packages"
    pool.startup.check()
    pool.listed = [{"i-0", "i-2"}] * 2
    now[0] += 61
    pool.startup.check()
    now[0] += ASK_SECONDS
    with pytest.raises(BootstrapFailed, match="i-1: it is gone"):
        pool.startup.check()


def test_a_node_that_answers_is_not_looked_for(now: list[float]) -> None:
    """Until the client has slept for longer than a lease."""
    pool = Opening()
    pool.listed = [set(), set()]
    for _ in range(30):
        pool.startup.check()
        now[0] += 60
    assert len(pool.listed) == 2


def test_processes_of_this_machine_are_looked_for_each_time(now: list[float]) -> None:
    """One that is missing is gone. An error is raised, because no network can be out."""
    pool = Opening(is_local=True)
    pool.listed = [{"i-0", "i-1", "i-2"}, OSError("no processes"), {"i-0", "i-1"}]
    pool.startup.check()
    with pytest.raises(OSError, match="no processes"):
        pool.startup.check()
    with pytest.raises(BootstrapFailed, match="i-2: it is gone"):
        pool.startup.check()


def test_a_machine_may_be_lost_while_the_head_starts_again(monkeypatch: pytest.MonkeyPatch) -> None:
    """The new scheduler does not come up, and the opening does not wait for it."""
    pool = Opening(is_local=True)
    pool.reached = False

    def connect() -> None:
        pool.all[0].is_silent, pool.all[0].head = True, None
        pool.listed = [{"i-0", "i-1"}]

    monkeypatch.setattr(pool, "connect", connect)
    with pytest.raises(BootstrapFailed, match="i-2: it is gone"):
        pool.prepare()
