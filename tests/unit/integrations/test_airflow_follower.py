"""The trigger's side of a deferred task, with pools that misbehave: outages, cuts, ends, and a user who is quicker."""

import importlib.util
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import pytest

if importlib.util.find_spec("airflow") is None:
    pytest.skip("Airflow is not installed", allow_module_level=True)

import skyward_core as sky
from airflow_provider_skyward.call_follower import LEASE_SECONDS, CallFollower


class Pool:
    """A pool whose calls write one line for each look, and end after `looks` of them. `failure` is raised instead."""

    def __init__(self, looks: int = 3) -> None:
        self.looks = looks
        self.failure: Exception | None = None
        self.attached = 0
        self.closed = 0
        self.followed: list[str] = []
        self.on_event: Callable[[Any], object] = lambda _: None
        self.why_not_attached: list[Exception] = []

    def attach(self, pool_id: str, **options: Any) -> Any:
        assert (pool_id, options["pays"]) == ("sky-a", True)
        if self.why_not_attached:
            raise self.why_not_attached.pop(0)
        self.attached += 1
        self.on_event = options["on_event"]
        return SimpleNamespace(detached_call=self.call, close=self.close)

    def call(self, call_id: str) -> Any:
        return SimpleNamespace(follow=lambda cursor: self.follow(call_id, cursor))

    def follow(self, call_id: str, cursor: int) -> sky.CallNews:
        if self.failure is not None:
            failure, self.failure = self.failure, None
            raise failure
        self.followed.append(call_id)
        state = "ended" if cursor + 1 >= self.looks else "running"
        return sky.CallNews(state, [f"{call_id} {cursor}"], cursor + 1, 1)

    def close(self) -> None:
        self.closed += 1


@pytest.fixture
def pool(monkeypatch: pytest.MonkeyPatch) -> Pool:
    pool = Pool()
    monkeypatch.setattr(sky.ComputePool, "attach", pool.attach)
    return pool


def follower(*cursors: int) -> CallFollower:
    return CallFollower("sky-a", [f"c/{number}" for number in range(len(cursors))], cursors)


def test_each_line_comes_once_and_a_call_that_has_ended_is_not_looked_at_again(pool: Pool) -> None:
    """The second call begins with two lines in the log."""
    it = follower(0, 2)
    assert it.look() == (["[node 1] c/0 0", "[node 1] c/1 2"], False)
    assert it.look() == (["[node 1] c/0 1"], False)
    assert it.look() == (["[node 1] c/0 2"], True)
    assert (pool.followed, it.cursors, pool.attached) == (["c/0", "c/1", "c/0", "c/0"], [3, 3], 1)


@pytest.mark.parametrize("outage", [sky.Unreachable("away"), sky.LedgerError("locked")])
def test_an_outage_of_network_or_ledger_is_no_end(pool: Pool, outage: sky.SkywardError) -> None:
    """Nodes out of reach are looked for again; lines before the outage are not lost."""
    pool.why_not_attached = [outage] * 20
    it = follower(0)
    assert [it.look() for _ in range(20)] == [([], False)] * 20
    assert it.look() == (["[node 1] c/0 0"], False)
    pool.failure = outage
    assert it.look() == ([], False)
    assert it.look() == (["[node 1] c/0 1"], False)
    assert (pool.attached, pool.closed) == (2, 1)


def test_an_outage_that_is_longer_than_the_lease_is_an_end(pool: Pool) -> None:
    """No process has renewed the lease of the nodes: a task must not be deferred forever."""
    now = [0.0]
    it = CallFollower("sky-a", ["c/0"], [0], lambda: now[0])
    it.look()
    pool.failure = sky.Unreachable("away")
    now[0] += LEASE_SECONDS
    assert it.look() == ([], False)
    pool.why_not_attached = [sky.LedgerError("locked")] * 2
    assert it.look() == ([], False)
    now[0] += 1
    with pytest.raises(sky.NodeLost, match="could not be reached for 601 s"):
        it.look()


def test_a_cut_connection_is_made_again(pool: Pool) -> None:
    """The scheduler's connection may break while the pool lives."""
    it = follower(0)
    it.look()
    pool.failure = sky.NodeLost("cut")
    assert it.look() == ([], False)
    assert it.look() == (["[node 1] c/0 1"], False)
    assert pool.attached == 2


def test_a_pool_that_is_gone_ends_the_following(pool: Pool) -> None:
    """It is gone if a new attachment says so."""
    it = follower(0)
    it.look()
    pool.failure = sky.NodeLost("cut")
    it.look()
    pool.why_not_attached = [sky.NodeLost("gone")]
    with pytest.raises(sky.NodeLost, match="gone"):
        it.look()
    assert pool.closed == pool.attached


PASSING = [
    sky.NodeLost("the scheduler has not answered in time"),
    sky.PoolClosed("cut"),
    OSError(24, "Too many open files"),
    RuntimeError("can't start new thread"),
    AssertionError(),
]
"""What a look at a live pool may raise on an overloaded machine."""


@pytest.mark.parametrize("error", PASSING)
@pytest.mark.parametrize("when", ["look", "first request"])
def test_attachments_that_break_are_no_end_within_a_lease(pool: Pool, error: Exception, when: str) -> None:
    """Each new attachment has found the pool, so it lives."""
    now = [0.0]
    it = CallFollower("sky-a", ["c/0"], [0], lambda: now[0])
    call = pool.call

    def broken(call_id: str) -> Any:
        if when == "look":
            pool.failure = error
            return call(call_id)
        raise error

    pool.call = broken  # type: ignore[method-assign]
    assert [it.look() for _ in range(20)] == [([], False)] * 20
    assert pool.closed == pool.attached == 20
    now[0] = LEASE_SECONDS + 1
    with pytest.raises(sky.NodeLost, match="could not be reached for 601 s"):
        it.look()
    pool.call = call  # type: ignore[method-assign]
    assert it.look() == (["[node 1] c/0 0"], False)


@pytest.mark.parametrize("error", PASSING[2:])
def test_an_attachment_that_fails_for_want_of_resources_is_tried_again(pool: Pool, error: Exception) -> None:
    pool.why_not_attached = [error] * 20
    it = follower(0)
    assert [it.look() for _ in range(20)] == [([], False)] * 20
    assert it.look() == (["[node 1] c/0 0"], False)


@pytest.mark.parametrize("error", [sky.BadRequest("no such call"), sky.CredentialsError("no key"), sky.LeaseLost("x")])
def test_an_error_that_stays_is_raised_at_once(pool: Pool, error: Exception) -> None:
    pool.why_not_attached = [error]
    with pytest.raises(type(error)):
        follower(0).look()


def test_an_attachment_that_comes_after_the_end_of_the_trigger_is_closed(pool: Pool) -> None:
    """A user ends the task while a look waits for the pool: the connection must not keep the nodes alive."""
    it = follower(0)
    call = pool.call

    def left_meanwhile(call_id: str) -> Any:
        it.leave()
        return call(call_id)

    pool.call = left_meanwhile
    assert it.look() == ([], False)
    assert (pool.attached, pool.closed, pool.followed) == (1, 1, [])


def test_the_reason_why_the_money_ends_is_kept(pool: Pool) -> None:
    it = follower(0)
    it.look()
    assert it.last_warning == ""
    pool.on_event(sky.BudgetWarning(1.0, None, "team", "nothing is left: the machines end in 20 s"))
    assert it.last_warning == "nothing is left: the machines end in 20 s"
