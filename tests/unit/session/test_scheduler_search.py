"""The search for a scheduler after a cut: what ends it, what does not, and how often it tries; lost nodes that nobody replaces."""

import logging
import threading
from collections.abc import Sequence
from datetime import UTC, datetime
from types import SimpleNamespace
from typing import Any, cast

import pytest

from skyward_core.errors import NodeLost, PoolStopped
from skyward_core.machines.instances import NodeEnd
from skyward_core.providers.base import Provider
from skyward_core.session import client_watch
from skyward_core.session.client_watch import ClientWatcher, SchedulerSearch, words_of_end
from tests.session.threads import Threads

LEASE_SECONDS = 240.0
NOON = datetime(2026, 11, 21, 12, tzinfo=UTC)


class World:
    """A cut connection, with a clock that only the pauses and the tries move."""

    def __init__(self) -> None:
        self.now = 0.0
        self.is_needed = True
        self.is_left = False
        self.stays_cut = 0
        """Before so many tries each connection is cut again at once."""
        self.outcomes: list[Any] = []
        """What the next tries do: return or raise this. After them each fails."""
        self.tries: list[tuple[float, float]] = []
        """When each try began, and how long it may take."""
        self.given_up: list[Exception | None] = []
        self.records: list[tuple[int, Any]] = []
        self.threads = Threads()
        self.search = SchedulerSearch(
            self.attempt, lambda: self.is_needed, self.given_up.append, self, LEASE_SECONDS, self.log
        )

    # the event that is set when the pool is left
    def is_set(self) -> bool:
        return self.is_left

    def wait(self, timeout: float) -> bool:
        self.now += timeout
        return self.is_left

    def attempt(self, seconds: float) -> bool:
        self.tries.append((self.now, seconds))
        outcome = self.outcomes.pop(0) if self.outcomes else NodeLost("no answer")
        if callable(outcome):
            outcome = outcome()
        if isinstance(outcome, Exception):
            self.now += seconds
            raise outcome
        self.is_needed = len(self.tries) < self.stays_cut or not outcome
        return outcome

    def log(self, level: int, _: str, *__: Any, error: Any = None) -> None:
        self.records.append((level, error))

    def cut(self) -> None:
        self.search.begin()
        self.threads.run()

    def look(self) -> None:
        self.search.look()
        self.threads.run()


@pytest.fixture
def world(monkeypatch: pytest.MonkeyPatch) -> World:
    world = World()
    monkeypatch.setattr(client_watch, "time", SimpleNamespace(monotonic=lambda: world.now))
    monkeypatch.setattr(client_watch, "LoopThread", world.threads.LoopThread)
    return world


def test_a_pool_that_has_ended_by_the_ledger_is_not_searched_any_more(world: World) -> None:
    """Otherwise calls of a stopped pool would wait for a whole lease, and then blame a node."""
    stopped = PoolStopped("by ada")
    world.outcomes = [NodeLost("no answer"), stopped]
    world.cut()
    assert world.given_up == [stopped]
    assert (len(world.tries), world.now < LEASE_SECONDS / 4) == (2, True)
    world.look()
    assert len(world.tries) == 2


@pytest.mark.parametrize(("error", "kind"), [(PoolStopped("by ada"), PoolStopped), (OSError("refused"), NodeLost)])
def test_the_calls_of_a_client_get_the_reason(error: Exception, kind: type[Exception]) -> None:
    failed: list[Exception] = []
    cluster: Any = SimpleNamespace(fail_calls=failed.append)
    watcher = ClientWatcher(
        lambda: cluster, lambda _: True, LEASE_SECONDS, threading.Event(), lambda *_, **__: None, failed.append
    )
    watcher._give_up(error)
    assert [type(one) for one in failed] == [kind, kind]


@pytest.mark.parametrize("answer", [NodeEnd(NOON, "the money is used up (max_cost, budget)"), None, OSError("silent")])
def test_the_calls_of_a_client_get_what_the_head_has_written_about_its_end(answer: NodeEnd | Exception | None) -> None:
    """If it has written nothing, or the provider cannot be asked, the message says what may have happened."""

    def ends(ids: Sequence[str]) -> dict[str, NodeEnd]:
        if isinstance(answer, Exception):
            raise answer
        return {} if answer is None else dict.fromkeys(ids, answer)

    provider, failed = cast("Provider", SimpleNamespace(ends=ends)), list[Exception]()
    cluster: Any = SimpleNamespace(fail_calls=failed.append)
    watcher = ClientWatcher(
        lambda: cluster,
        lambda _: True,
        LEASE_SECONDS,
        threading.Event(),
        lambda *_, **__: None,
        why_gone=lambda: words_of_end(provider, "host-1"),
    )
    watcher._give_up(OSError("refused"))
    written = "it has written that it ended at 2026-11-21 12:00:00 UTC: the money is used up (max_cost, budget)"
    assert str(failed[0]).startswith(
        f"the head of the pool is gone: {written if isinstance(answer, NodeEnd) else 'another process may have'}"
    )


def test_an_error_that_nobody_foresaw_does_not_end_the_search(world: World) -> None:
    """Dask has raised AssertionError, because a thread began late. It is logged once, with its traceback."""
    error = AssertionError()
    world.outcomes = [NodeLost("no answer"), error, error, OSError("refused"), True]
    world.cut()
    assert (len(world.tries), world.given_up) == (5, [])
    assert world.records == [(logging.ERROR, error)]


def test_after_one_lease_it_gives_up_with_the_last_error(world: World) -> None:
    """Then nothing is searched for. It tries less often and more patiently: hundreds of searches at once must not take
    all of the machine, so that none of them succeeds.
    """
    last = AssertionError()
    world.outcomes = [OSError("refused"), *[last] * 100]
    world.cut()
    assert world.given_up == [last]
    assert LEASE_SECONDS <= world.now < LEASE_SECONDS + 30
    seconds = [its for _, its in world.tries]
    assert seconds[:5] == [2.0, 4.0, 8.0, 16.0, 20.0]
    assert set(seconds[5:]) == {20.0}
    pauses = [after - at - its for (at, its), (after, _) in zip(world.tries, world.tries[1:], strict=False)]
    assert pauses[:5] == pytest.approx([0.2, 0.4, 0.8, 1.6, 3.2])
    assert set(pauses[5:]) == {5.0}
    world.look()
    assert (len(world.tries), len(world.given_up)) == (len(seconds), 1)


@pytest.mark.parametrize("is_in_the_try", [False, True])
def test_a_pool_that_is_left_meanwhile_is_not_given_up(world: World, is_in_the_try: bool) -> None:
    """Its calls raise why it was left: the head may be there."""

    def left() -> Exception:
        world.is_left, world.is_needed = True, False
        return NodeLost("no answer")

    if is_in_the_try:
        world.outcomes = [left]
    else:
        world.is_left = True
    world.cut()
    assert (len(world.tries), world.given_up) == (int(is_in_the_try), [])


def test_a_cut_during_a_search_is_not_forgotten(world: World) -> None:
    def reached_and_cut_again() -> bool:
        world.search.begin()
        return True

    world.outcomes = [reached_and_cut_again, True]
    world.stays_cut = 2
    world.cut()
    assert (len(world.tries), world.given_up) == (2, [])


def test_a_search_that_no_thread_could_begin_begins_later(world: World) -> None:
    """The process has too many threads: that must not cut it off for ever."""
    world.threads.trouble = RuntimeError("can't start new thread")
    world.cut()
    assert [level for level, _ in world.records] == [logging.WARNING]
    world.threads.trouble, world.outcomes = None, [True]
    world.look()
    assert len(world.tries) == 1


def test_an_attached_client_does_not_wait_for_ever(monkeypatch: pytest.MonkeyPatch) -> None:
    """Where a lost node is not replaced, broadcasts to it raise. They wait for a node that is back or has just left."""
    given_up = list[int]()
    cluster: Any = SimpleNamespace(is_connected=True, fail_calls=lambda _, rank: given_up.append(rank))
    watcher = ClientWatcher(lambda: cluster, lambda _: True, 60.0, threading.Event(), lambda *_: None)
    for rank in (1, 2):
        watcher.left(rank)
    monkeypatch.setattr(client_watch, "REPLACED_SECONDS", -1.0)
    watcher.joined(1)
    watcher.look()
    monkeypatch.setattr(client_watch, "REPLACED_SECONDS", 300.0)
    watcher.look()
    assert given_up == [2]
