"""The clock of the PostgreSQL server decides about pools with a name: those of two clients differ by four minutes."""

import threading
import time
from collections.abc import Iterator
from contextlib import ExitStack
from datetime import UTC, datetime, timedelta, tzinfo
from typing import Any

import pytest

import skyward_core as sky
from skyward_core.ledger import ledger as module
from skyward_core.ledger.ledger import Ledger
from skyward_core.ledger.names_policy import SKEW_SECONDS, Client, Join, LookAgain, NameState, Rent, Wait
from skyward_core.machines.owner import Owner
from skyward_core.session.named_use import NamedUse
from skyward_core.work import NO_WORK
from tests.ledger import fixtures
from tests.ledger.fixtures import open_pool
from tests.waiting import wait_until

BEHIND, AHEAD = timedelta(seconds=-SKEW_SECONDS), timedelta(seconds=SKEW_SECONDS)
CLOSE = timedelta(seconds=30)
"""How much later a test may look at what it has written."""
FIRST, SECOND = (Owner("ada", f"host-{number}", "boot", "1", 4711, "1") for number in range(2))
"""Processes of other machines: only their leases show whether they live."""

type Pair = tuple[Ledger, Ledger]


def with_clock(url: str, wrong_by: timedelta) -> Ledger:
    """Connect as a client whose clock is wrong."""
    return Ledger(url, clock=lambda: module.now() + wrong_by, uses_server_clock=True, busy_timeout_seconds=10)


@pytest.fixture(params=[(BEHIND, AHEAD), (AHEAD, BEHIND)], ids=["behind-ahead", "ahead-behind"])
def pair(request: pytest.FixtureRequest, postgresql_url: str) -> Iterator[Pair]:
    """The ledgers of two clients with different clocks."""
    with ExitStack() as stack:
        first, second = (stack.enter_context(with_clock(postgresql_url, wrong_by)) for wrong_by in request.param)
        yield first, second


def claim(
    ledger: Ledger, client: str, owner: Owner, *, lease_seconds: float = 60.0, keep_warm: float = 60.0, **more: Any
) -> object:
    values = {"owner": owner, "lease_seconds": lease_seconds, "keep_warm_seconds": keep_warm, **more}
    return fixtures.claim(ledger, client, **values)


def opened(ledger: Ledger, *, keep_warm: float = 60.0) -> None:
    """Open the pool `sky-a`, with a lease that was written by a clock that is behind."""
    rent = claim(ledger, "a", FIRST, keep_warm=keep_warm)
    assert isinstance(rent, Rent)
    open_pool(ledger, "sky-a", FIRST, lease_expires_at=module.now() + BEHIND + timedelta(seconds=60))
    ledger.names.opened("nightly", rent.epoch)


def only_client(ledger: Ledger) -> Client:
    (client,) = ledger.names.clients("sky-a")
    return client


def test_an_opener_that_lives_is_waited_for(pair: Pair) -> None:
    first, second = pair
    assert claim(first, "a", FIRST) == Rent(1)
    assert isinstance(claim(second, "b", SECOND), Wait)


def test_an_opener_whose_lease_has_run_out_is_replaced(pair: Pair) -> None:
    first, second = pair
    claim(first, "a", FIRST, lease_seconds=0.0)
    found = claim(second, "b", SECOND)
    if isinstance(found, LookAgain):  # by the clock that is behind it has not run out
        found = claim(second, "b", SECOND, dead=found.silent)
    assert isinstance(found, Rent)
    assert found.dead_pool == "sky-a"


def test_leases_and_times_are_those_of_the_server(pair: Pair) -> None:
    first, second = pair
    opened(first)
    client, now = only_client(second), second.names.now()
    assert abs(client.joined_at - now) < CLOSE
    assert abs(client.lease_expires_at - timedelta(seconds=60) - now) < CLOSE
    first.names.renew("a", 600.0)
    assert abs(only_client(second).lease_expires_at - timedelta(seconds=600) - second.names.now()) < CLOSE
    assert second.names.activity(["sky-a"])["sky-a"].users == 1
    first.names.leave("nightly", "a")
    left_at = only_client(second).left_at
    assert left_at is not None
    assert abs(left_at - second.names.now()) < CLOSE


def test_a_silent_client_counts_for_none_and_a_silent_steward_is_replaced(pair: Pair) -> None:
    first, second = pair
    opened(first, keep_warm=0.0)
    claim(second, "b", SECOND)
    assert not second.names.is_last("nightly", "b")
    assert second.stewards.take("nightly", "b") is None
    first.names.renew("a", 0.0)
    assert second.names.is_last("nightly", "b")
    assert first.names.activity(["sky-a"])["sky-a"].users == 1
    assert second.stewards.take("nightly", "b") == 2
    assert second.names.leave("nightly", "b") is NameState.CLOSING


@pytest.mark.parametrize("keep_warm", [60.0, 0.001])
def test_a_warm_pool_is_found_as_long_as_it_is_warm(pair: Pair, keep_warm: float) -> None:
    """Though its lease was written by the clock of the machine that has left it."""
    first, second = pair
    opened(first, keep_warm=keep_warm)
    assert first.names.leave("nightly", "a") is NameState.WARM
    named = second.names.named("nightly")
    assert named is not None
    assert named.warm_until is not None
    until = named.warm_until
    assert abs(until - timedelta(seconds=keep_warm) - second.names.now()) < CLOSE
    if keep_warm < 1:
        wait_until(lambda: second.names.now() > until, "the warm time to be over")
    assert isinstance(claim(second, "b", SECOND), Join if keep_warm > 1 else Rent)


def test_a_step_of_the_servers_clock_ends_no_pool_that_lives(
    postgresql_url: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It was set forward by an hour: the leases that were written before have run out. A process that opens the name
    looks again, and one that leaves lets the others renew.
    """
    hour = timedelta(hours=1)
    monkeypatch.setenv("SKYWARD_LEDGER", postgresql_url)
    spec = sky.PoolSpec.of(name="nightly", lease_seconds=120, display="quiet")
    leaving, coming, other = (NamedUse(spec, [sky.Local()], NO_WORK) for _ in range(3))
    for use in (leaving, coming, other):
        monkeypatch.setattr(use.ledger._database, "clock", lambda: datetime.now(UTC) - hour)
        monkeypatch.setattr(use.ledger._database, "_awake", None)  # as if each ran on a computer of its own
    ledger = other.ledger
    try:
        leaving.claim("sky-a", time.monotonic() + 60)
        open_pool(ledger, "sky-a", Owner.here(), lease_expires_at=module.now() - hour + timedelta(seconds=120))
        leaving.opened()
        leaving._renewal.end()
        terms = {"terms": leaving.terms, "lease_seconds": 120.0, "keep_warm_seconds": 0.0}
        assert isinstance(ledger.names.claim("nightly", "sky-b", "b", owner=SECOND, **terms), Join)
        before = {"a": leaving._client_id, "b": "b"}
        for client in before.values():
            ledger.names.renew(client, 120.0 - hour.total_seconds())
        silent = ledger.names.claim("nightly", "sky-c", "c", owner=FIRST, **terms)
        assert isinstance(silent, LookAgain)
        assert {client for client, _ in silent.silent} == set(before.values())

        renewal = threading.Timer(1.0, lambda: ledger.names.renew("b", 120.0))
        renewal.start()
        assert leaving.leave() is NameState.IN_USE
        assert isinstance(coming.claim("sky-d", time.monotonic() + 60), Join)
        renewal.join()

        for client in ("b", coming._client_id):
            ledger.names.renew(client, 120.0 - hour.total_seconds())
        coming._renewal.end()
        assert isinstance(other.claim("sky-e", time.monotonic() + 60), Rent), "none has renewed"
    finally:
        for use in (leaving, coming, other):
            use.left()


def test_whose_clock_a_ledger_has(sqlite_url: str, postgresql_url: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """SQLite has that of its machine; a clock that is given counts; else it is the server's, though ours is wrong."""
    for ledger in (with_clock(sqlite_url, AHEAD), Ledger(postgresql_url, clock=lambda: module.now() + AHEAD)):
        with ledger:
            assert abs(ledger.names.now() - module.now() - AHEAD) < CLOSE

    class Wrong(datetime):
        @classmethod
        def now(cls, tz: tzinfo | None = None) -> datetime:
            return datetime.now(tz) + AHEAD

    right = module.now()
    monkeypatch.setattr(module, "datetime", Wrong)
    assert module.now() - right > AHEAD
    with Ledger(postgresql_url) as ledger:
        assert abs(ledger.names.now() - right) < CLOSE
