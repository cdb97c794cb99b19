"""The clock of the PostgreSQL server decides about pools with a name: those of two clients differ by four minutes."""

from collections.abc import Iterator
from contextlib import ExitStack
from datetime import datetime, timedelta, tzinfo

import pytest

from skyward_core.ledger import ledger as module
from skyward_core.ledger.ledger import Ledger
from skyward_core.ledger.names_policy import SKEW_SECONDS, Client, Join, NameState, Rent
from skyward_core.machines.owner import Owner
from tests.conftest import wait_until
from tests.system.ledger.test_names import TERMS
from tests.unit.ledger.test_ledger import PROVIDER, postgresql_server, postgresql_url, sqlite_url  # noqa: F401 - fixtures

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


def claim(ledger: Ledger, client: str, owner: Owner, *, lease_seconds: float = 60.0, keep_warm: float = 60.0) -> object:
    return ledger.names.claim(
        "nightly",
        f"sky-{client}",
        client,
        owner=owner,
        terms=TERMS,
        keep_warm_seconds=keep_warm,
        lease_seconds=lease_seconds,
    )


def opened(ledger: Ledger, *, lease_seconds: float = 60.0, keep_warm: float = 60.0) -> None:
    """Open the pool `sky-a`, with a lease that was written by a clock that is behind."""
    rent = claim(ledger, "a", FIRST, lease_seconds=lease_seconds, keep_warm=keep_warm)
    assert isinstance(rent, Rent)
    ends = module.now() + BEHIND + timedelta(seconds=60)
    ledger.open_pool("sky-a", owner=FIRST, provider=PROVIDER, spec_json="{}", lease_expires_at=ends)
    ledger.names.opened("nightly", rent.epoch)


def only_client(ledger: Ledger) -> Client:
    (client,) = ledger.names.clients("sky-a")
    return client


def test_an_opener_whose_lease_has_run_out_is_replaced(pair: Pair) -> None:
    first, second = pair
    claim(first, "a", FIRST, lease_seconds=0.0)
    found = claim(second, "b", SECOND)
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


def test_a_silent_client_counts_for_none(pair: Pair) -> None:
    first, second = pair
    opened(first, keep_warm=0.0)
    claim(second, "b", SECOND)
    assert not second.names.is_last("nightly", "b")
    first.names.renew("a", 0.0)
    assert second.names.is_last("nightly", "b")
    assert first.names.activity(["sky-a"])["sky-a"].users == 1
    assert second.names.leave("nightly", "b") is NameState.CLOSING


def test_a_warm_pool_is_found_as_long_as_it_is_warm(pair: Pair) -> None:
    first, second = pair
    opened(first)
    assert first.names.leave("nightly", "a") is NameState.WARM
    named = second.names.named("nightly")
    assert named is not None
    assert named.warm_until is not None
    assert abs(named.warm_until - timedelta(seconds=60) - second.names.now()) < CLOSE
    assert isinstance(claim(second, "b", SECOND), Join)


def test_a_pool_that_was_warm_for_long_enough_is_replaced(pair: Pair) -> None:
    first, second = pair
    opened(first, keep_warm=0.001)
    assert first.names.leave("nightly", "a") is NameState.WARM
    named = first.names.named("nightly")
    assert named is not None
    assert named.warm_until is not None
    until = named.warm_until
    wait_until(lambda: second.names.now() > until, "the warm time to be over")
    assert isinstance(claim(second, "b", SECOND), Rent)


def test_a_steward_is_dead_for_both_clients_or_for_none(pair: Pair) -> None:
    first, second = pair
    opened(first)
    claim(second, "b", SECOND)
    assert second.stewards.take("nightly", "b") is None
    first.names.renew("a", 0.0)
    assert second.stewards.take("nightly", "b") == 2


def test_sqlite_has_the_clock_of_its_machine(sqlite_url: str) -> None:
    with with_clock(sqlite_url, AHEAD) as ledger:
        assert abs(ledger.names.now() - module.now() - AHEAD) < CLOSE


def test_a_clock_that_is_given_is_that_of_the_ledger(postgresql_url: str) -> None:
    with Ledger(postgresql_url, clock=lambda: module.now() + AHEAD) as ledger:
        assert abs(ledger.names.now() - module.now() - AHEAD) < CLOSE


def test_without_a_clock_it_is_the_servers(postgresql_url: str, monkeypatch: pytest.MonkeyPatch) -> None:

    class Wrong(datetime):
        @classmethod
        def now(cls, tz: tzinfo | None = None) -> datetime:
            return datetime.now(tz) + AHEAD

    right = module.now()
    monkeypatch.setattr(module, "datetime", Wrong)
    assert module.now() - right > AHEAD
    with Ledger(postgresql_url) as ledger:
        assert abs(ledger.names.now() - right) < CLOSE
