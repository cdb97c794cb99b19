"""Whether a process keeps a named pool, how it adopts one, how its stewardship ends at a limit, and who may scale."""

import logging
import threading
from types import SimpleNamespace
from typing import Any, override

import pytest

import skyward_core as sky
from skyward_core.errors import LedgerError, NodeLost, SkywardError
from skyward_core.ledger.names_policy import NotSteward
from skyward_core.session import named_use as named_use_module
from skyward_core.session import stewardship as stewardship_module
from skyward_core.session.named_session import NamedSession
from skyward_core.session.named_use import Successor
from skyward_core.session.session_engine import PoolSize
from skyward_core.session.state import Claims, SessionState
from skyward_core.session.steward_term import StewardTerm
from skyward_core.session.stewardship import Stewardship
from tests.session.threads import Threads

LEASE_SECONDS = 10.0


class Rows:
    """A ledger's answers to renewals, and a clock that the test sets."""

    def __init__(self) -> None:
        self.seconds = 100.0
        self.renewals = 0
        self.answer = "steward"
        self.term = StewardTerm(LEASE_SECONDS, self.renew, lambda: self.seconds)

    def renew(self) -> None:
        since = self.term.now()
        self.renewals += 1
        if self.answer == "away":
            raise LedgerError("the server is being restarted")
        if self.answer == "steward":
            self.term.confirm(since)
        else:
            self.term.lose()


@pytest.fixture
def rows() -> Rows:
    """A steward since 100 s."""
    rows = Rows()
    rows.term.begin(3, rows.seconds)
    return rows


def test_a_steward_is_certain_as_long_as_its_lease_runs(rows: Rows) -> None:
    """It counts from the time before a renewal. In this time no other process can take the pool over. Then it asks."""
    rows.term.confirm(105.0)
    rows.term.confirm(101.0)  # an older answer that arrives late
    rows.seconds = 114.9
    rows.term.check()
    assert (rows.term.is_certain, rows.renewals, rows.term.epoch) == (True, 0, 3)
    rows.seconds = 115.0
    assert not rows.term.is_certain
    rows.term.check()
    assert (rows.renewals, rows.term.is_certain) == (1, True)


def test_a_steward_that_was_replaced_may_not_act_until_it_begins_anew(rows: Rows) -> None:
    rows.seconds += 1000
    rows.answer = "another"
    for _ in range(2):
        with pytest.raises(NotSteward):
            rows.term.check()
        rows.term.confirm(rows.seconds)
        assert (rows.term.is_certain, rows.term.is_lost, rows.renewals) == (False, True, 1)
    assert not rows.term.lose()
    rows.term.begin(4, rows.seconds)
    assert (rows.term.is_certain, rows.term.is_lost, rows.term.epoch) == (True, False, 4)


def test_a_process_that_never_was_the_steward_may_not_act() -> None:
    """It does not ask, either."""
    rows = Rows()
    with pytest.raises(NotSteward):
        rows.term.check()
    assert (rows.renewals, rows.term.is_certain, rows.term.is_lost) == (0, False, False)


def test_a_steward_that_cannot_ask_does_not_act(rows: Rows) -> None:
    """It is not replaced by that: it goes on when the ledger answers."""
    rows.seconds += 1000
    rows.answer = "away"
    with pytest.raises(LedgerError, match="being restarted"):
        rows.term.check()
    rows.answer = "steward"
    rows.term.check()
    assert rows.term.is_certain


class Client:
    """A process as a client of a name, and what it keeps; `steps` is what was done, in order."""

    name = "nightly"

    def __init__(self) -> None:
        self.steps: list[str] = []
        self.can_take = True
        self.trouble: Exception | None = None
        self.term = SimpleNamespace(is_lost=False)
        self.on_vacant: Any = None
        self.on_lost: Any = None
        self.logged: list[str] = []
        self.seconds = 1000.0
        self.threads = Threads()
        self.successor = Successor(self, lambda: self, self.log)  # type: ignore[arg-type]

    def log(self, level: int, text: str, *values: object, error: Exception | None = None) -> None:
        self.logged.append(logging.getLevelName(level) + ": " + text % values)

    def take_stewardship(self) -> bool:
        self.steps.append("take")
        return self.can_take

    def release_stewardship(self) -> None:
        self.steps.append("release")

    def start(self) -> None:
        self.steps.append("start")
        if self.trouble is not None:
            raise self.trouble

    def leave(self) -> None:
        self.steps.append("leave")

    def lose(self) -> None:
        self.steps.append("lose")


@pytest.fixture
def client(monkeypatch: pytest.MonkeyPatch) -> Client:
    client = Client()
    monkeypatch.setattr(named_use_module, "LoopThread", client.threads.LoopThread)
    monkeypatch.setattr(named_use_module, "time", SimpleNamespace(monotonic=lambda: client.seconds))
    return client


@pytest.mark.parametrize("can_take", [True, False], ids=["adopted", "another process was faster"])
def test_a_vacant_pool_is_adopted_once_and_left_at_the_end(client: Client, can_take: bool) -> None:
    """A process that leaves waits for its adoption, and adopts nothing afterwards."""
    client.can_take = can_take
    client.on_vacant()
    client.on_vacant()
    client.successor.close()
    client.on_vacant()
    client.threads.run()
    assert client.steps == ["take", *["start", "leave"] * can_take, "release"]


def test_a_process_that_cannot_adopt_releases_the_pool_and_leaves_it_to_others_for_a_while(client: Client) -> None:
    client.trouble = NodeLost("no node answers")
    for seconds in (1000.0, 1004.0):
        client.seconds = seconds
        client.on_vacant()
        client.threads.run()
        assert client.steps == ["take", "start", "release"]
    assert client.logged[0].startswith("WARNING: the pool 'nightly' has no process that replaces its nodes")
    assert client.logged[0].endswith("no node answers")
    client.trouble, client.seconds = None, 1005.0
    client.on_vacant()
    client.threads.run()
    assert client.steps == ["take", "start", "release", "take", "start"]


@pytest.mark.parametrize("when", ["later", "during the adoption", "before the adoption has ended"])
def test_a_pool_that_another_process_keeps_now_is_kept_no_more(client: Client, when: str) -> None:
    """The renewal reports a loss once."""
    client.term.is_lost = when == "before the adoption has ended"
    client.on_vacant()
    if when == "later":
        client.threads.run()
    if when != "before the adoption has ended":
        client.on_lost()
    client.threads.run()
    assert client.steps == ["take", "start", "lose"]
    client.successor.close()
    assert client.steps == ["take", "start", "lose", "release"]


class Keeping(Stewardship):
    """A stewardship without machines; `steps` is what it does, in order."""

    def __init__(self, steps: list[str]) -> None:
        self._ending, self._ended = threading.RLock(), threading.Event()
        self._pool_id, self._log = "sky-1", lambda *_: None
        self._emitter: Any = SimpleNamespace(emit=lambda _: None)
        self._recovery: Any = SimpleNamespace(stop=lambda: None)
        self._use: Any = SimpleNamespace(
            begin_to_end=lambda: steps.append("closing"), release_stewardship=lambda: steps.append("release")
        )
        self._attached: Any = SimpleNamespace(
            cluster=SimpleNamespace(take_sample=int), end=lambda *_: steps.append("end the machines")
        )
        self._on_end = lambda *_: steps.append("let the session go")


def test_the_session_learns_of_a_limit_before_the_machines_end(monkeypatch: pytest.MonkeyPatch) -> None:
    """Else its calls are repeated on nodes that end, and raise NodeLost instead of the error of the limit."""
    monkeypatch.setattr(stewardship_module, "note_all", lambda *_: None)
    steps: list[str] = []
    Keeping(steps).stop("the money is used up")
    assert steps == ["closing", "let the session go", "end the machines", "release"]


class Opener(NamedSession):
    """A session that does nothing when it is stopped."""

    def __init__(self, steps: list[str], state: SessionState) -> None:
        self._claims = Claims()
        self._claims.state = state
        self._steps = steps
        self.term: Any = SimpleNamespace(check=lambda: None)
        self._use: Any = SimpleNamespace(
            begin_to_end=lambda: steps.append("closing"), release_stewardship=lambda: steps.append("release")
        )

    @override
    def stop(self, reason: str, error: SkywardError | None = None) -> None:
        self._steps.append(f"ours: {self._claims.claim_stop(reason, error)}")


@pytest.mark.parametrize(
    ("state", "is_ours"), [(SessionState.OPEN, True), (SessionState.DETACHING, False), (SessionState.LEAVING, False)]
)
def test_a_session_that_leaves_at_its_limit_stays_the_steward_until_it_has_left(
    state: SessionState, is_ours: bool
) -> None:
    """Its leave, in another thread, decides whether the pool goes on: `closing` without a steward would end it."""
    steps: list[str] = []
    Opener(steps, state)._stop_at_limit("the money is used up", None)
    assert steps == ["closing", f"ours: {is_ours}", *["release"] * is_ours]


SPEC = sky.PoolSpec.of(provider=sky.Local(), nodes=(1, 3))


@pytest.mark.parametrize("is_stopped", [False, True], ids=["keeps the pool", "stepped down"])
def test_only_the_process_that_keeps_the_pool_announces_which_ranks_stay(is_stopped: bool) -> None:
    """The clock of a process that has stepped down goes on. It may lack nodes that the new steward has rented."""
    done: list[str] = []
    recovery: Any = SimpleNamespace(
        is_stopped=is_stopped, observe=lambda _: done.append("observe"), fix_size=lambda _: None
    )
    draining = SimpleNamespace(announce=lambda: done.append("announce"), backlog=lambda: 0, size=1)
    size = PoolSize(SPEC, SimpleNamespace(draining=draining, is_idle=True), recovery, lambda: False)  # type: ignore[arg-type]
    size.look()
    assert done == ([] if is_stopped else ["announce", "observe"])
    if is_stopped:
        with pytest.raises(sky.BadRequest, match="another process keeps it now"):
            size.scale(3, 3600.0)
