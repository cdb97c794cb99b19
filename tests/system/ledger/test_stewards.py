"""The steward of a named pool: one client at a time, by one compare-and-swap; what it writes names its epoch."""

import threading
from collections.abc import Mapping
from dataclasses import replace
from datetime import timedelta
from decimal import Decimal
from typing import Any

import pytest

from skyward_core.ledger.ledger import Ledger
from skyward_core.ledger.names_policy import Client, NamedPool, NameState, NotSteward, Rent, Standing, Wait, standing
from skyward_core.ledger.rows import Account, Period, PoolEntry, ResourceKind, ResourceRequest
from skyward_core.machines.owner import Owner, OwnerState
from tests.system.ledger.test_names import LEASE_SECONDS, claim, opened
from tests.unit.ledger.test_ledger import Clock, clock, ledger, postgresql_server, postgresql_url, sqlite_url, url  # noqa: F401 - fixtures
from tests.unit.ledger.test_names_policy import ADA, BOB, CLIENT, NOON, POOL, ROW, facts

OTHER = Client("b", "sky-1", BOB, NOON, NOON + timedelta(seconds=9999))
BOTH = (CLIENT, OTHER)
ALIVE = {ADA: OwnerState.ALIVE, BOB: OwnerState.ALIVE}


@pytest.mark.parametrize(
    ("row", "pool", "clients", "seconds", "states", "expected"),
    [
        (ROW, POOL, BOTH, 0, ALIVE, Standing.OTHER),
        (replace(ROW, steward="b"), POOL, BOTH, 0, ALIVE, Standing.HELD),
        (replace(ROW, steward=""), POOL, BOTH, 0, ALIVE, Standing.VACANT),
        (ROW, POOL, BOTH, 0, {**ALIVE, ADA: OwnerState.DEAD}, Standing.VACANT),
        (ROW, POOL, BOTH, 119, ALIVE, Standing.OTHER),
        (ROW, POOL, BOTH, 121, ALIVE, Standing.VACANT),
        (ROW, POOL, BOTH, 119, {**ALIVE, ADA: OwnerState.UNKNOWN}, Standing.OTHER),
        (ROW, POOL, BOTH, 121, {**ALIVE, ADA: OwnerState.UNKNOWN}, Standing.VACANT),
        (replace(ROW, steward="gone"), POOL, BOTH, 0, ALIVE, Standing.VACANT),
        (ROW, POOL, (replace(CLIENT, left_at=NOON), OTHER), 0, ALIVE, Standing.VACANT),
        (replace(ROW, steward="", state=NameState.OPENING), POOL, BOTH, 0, ALIVE, Standing.OTHER),
        (replace(ROW, steward="", state=NameState.CLOSING), POOL, BOTH, 0, ALIVE, Standing.OTHER),
        (replace(ROW, steward="", state=NameState.WARM), POOL, BOTH, 0, ALIVE, Standing.OTHER),
        (replace(ROW, steward=""), replace(POOL, ended_at=NOON), BOTH, 0, ALIVE, Standing.GONE),
        (replace(ROW, steward=""), replace(POOL, condemned_at=NOON), BOTH, 0, ALIVE, Standing.GONE),
        (replace(ROW, steward=""), None, BOTH, 0, ALIVE, Standing.GONE),
        (replace(ROW, steward="b", state=NameState.OPENING), None, BOTH, 0, ALIVE, Standing.HELD),
        (replace(ROW, steward="b"), POOL, (CLIENT, replace(OTHER, left_at=NOON)), 0, ALIVE, Standing.GONE),
        (replace(ROW, steward="", pool_id="sky-2"), POOL, BOTH, 0, ALIVE, Standing.GONE),
        (replace(ROW, steward=""), POOL, (CLIENT,), 0, ALIVE, Standing.GONE),
        (replace(ROW, steward=""), POOL, BOTH, 9999, ALIVE, Standing.OTHER),
    ],
)
def test_what_a_client_is_to_the_steward(
    row: NamedPool,
    pool: PoolEntry | None,
    clients: tuple[Client, ...],
    seconds: float,
    states: Mapping[Owner, OwnerState],
    expected: Standing,
) -> None:
    assert standing(facts(row, pool, clients, seconds=seconds, states=states), "b") is expected


def test_the_opener_is_the_first_steward(ledger: Ledger) -> None:
    epoch = opened(ledger)
    claim(ledger, "b")
    assert ledger.stewards.look("nightly", "a") == (Standing.HELD, epoch)
    assert ledger.stewards.look("nightly", "b") == (Standing.OTHER, epoch)
    assert ledger.stewards.take("nightly", "a") == epoch
    assert ledger.stewards.take("nightly", "b") is None


def test_a_client_takes_over_when_the_steward_has_left(ledger: Ledger) -> None:
    epoch = opened(ledger)
    claim(ledger, "b")
    ledger.names.leave("nightly", "a")
    assert ledger.stewards.take("nightly", "b") == epoch + 1
    assert ledger.stewards.look("nightly", "b") == (Standing.HELD, epoch + 1)


def test_a_client_takes_over_from_a_steward_that_is_silent(ledger: Ledger, clock: Clock) -> None:
    epoch = opened(ledger)
    clock.time += timedelta(seconds=LEASE_SECONDS - 1)
    claim(ledger, "b")
    assert ledger.stewards.take("nightly", "b") is None
    clock.time += timedelta(seconds=2)
    assert ledger.stewards.take("nightly", "b") == epoch + 1
    ledger.names.renew("a", LEASE_SECONDS)
    assert ledger.stewards.look("nightly", "a") == (Standing.OTHER, epoch + 1)


def test_a_client_of_a_warm_pool_becomes_its_steward(ledger: Ledger) -> None:
    epoch = opened(ledger, keep_warm_seconds=600.0)
    ledger.names.leave("nightly", "a")
    claim(ledger, "b")
    assert ledger.stewards.take("nightly", "b") == epoch + 1


def test_a_steward_that_resigns_is_followed_by_any_client(ledger: Ledger) -> None:
    epoch = opened(ledger)
    claim(ledger, "b")
    ledger.stewards.resign("nightly", "a", epoch - 1)
    ledger.stewards.resign("nightly", "b", epoch)
    assert ledger.stewards.look("nightly", "a") == (Standing.HELD, epoch)
    ledger.stewards.resign("nightly", "a", epoch)
    assert ledger.stewards.look("nightly", "a") == (Standing.VACANT, epoch)
    assert ledger.stewards.take("nightly", "b") == epoch + 1


def test_a_process_that_comes_waits_while_the_steward_ends_the_pool(ledger: Ledger) -> None:
    epoch = opened(ledger, keep_warm_seconds=600.0)
    claim(ledger, "b")
    ledger.stewards.close("nightly", "a", epoch)
    assert isinstance(claim(ledger, "c"), Wait)
    assert ledger.stewards.look("nightly", "b") == (Standing.OTHER, epoch)
    assert ledger.names.leave("nightly", "b") is NameState.IN_USE
    assert isinstance(claim(ledger, "c"), Wait)
    ledger.stewards.resign("nightly", "a", epoch)
    assert claim(ledger, "c") == Rent(epoch + 1, "sky-a", "the process that closed it has given up")


def test_a_steward_that_reaches_a_limit_while_it_leaves_leaves_the_pool_to_the_next_one(ledger: Ledger) -> None:
    epoch = opened(ledger)
    claim(ledger, "b")
    ledger.stewards.close("nightly", "a", epoch)
    assert ledger.names.leave("nightly", "a") is NameState.IN_USE
    assert ledger.stewards.take("nightly", "b") == epoch + 1
    ledger.stewards.close("nightly", "b", epoch + 1)
    assert ledger.names.leave("nightly", "b") is NameState.CLOSING


def test_a_process_rents_anew_when_the_steward_has_ended_the_pool(ledger: Ledger) -> None:
    epoch = opened(ledger)
    ledger.stewards.close("nightly", "a", epoch)
    ledger.end_pool("sky-a")
    assert claim(ledger, "c") == Rent(epoch + 1)


def test_a_process_that_is_not_the_steward_any_more_ends_nothing(ledger: Ledger, clock: Clock) -> None:
    epoch = opened(ledger)
    clock.time += timedelta(seconds=LEASE_SECONDS - 1)
    claim(ledger, "b")
    clock.time += timedelta(seconds=2)
    ledger.stewards.take("nightly", "b")
    for client, number in (("a", epoch), ("b", epoch), ("a", epoch + 1)):
        with pytest.raises(NotSteward):
            ledger.stewards.close("nightly", client, number)
    row = ledger.names.named("nightly")
    assert row is not None
    assert (row.state, row.steward) == (NameState.IN_USE, "b")


def test_of_many_clients_at_once_one_becomes_the_steward(url: str) -> None:
    with Ledger(url) as first:
        epoch = opened(first)
        for number in range(12):
            claim(first, f"c{number}")
        first.names.leave("nightly", "a")
    found: list[int | None] = []
    ready = threading.Barrier(12)

    def take(number: int) -> None:
        with Ledger(url) as mine:
            ready.wait()
            found.append(mine.stewards.take("nightly", f"c{number}"))

    threads = [threading.Thread(target=take, args=(number,)) for number in range(12)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert sorted(map(str, found)) == [str(epoch + 1)] + ["None"] * 11


def request(**changes: Any) -> ResourceRequest:
    values = {
        "kind": ResourceKind.INSTANCE,
        "provider": "fake",
        "region": "r",
        "name": "sky-a-0",
        "token": "t",
        "tags": {},
        "expires_at": NOON,
    }
    return ResourceRequest(**(values | changes))


def test_a_steward_that_was_replaced_rents_nothing(ledger: Ledger) -> None:
    """It is refused in the transaction in which it would write the request."""
    epoch = opened(ledger)
    claim(ledger, "b")
    ledger.intend_all("sky-a", [request()], epoch=epoch)
    ledger.names.leave("nightly", "a")
    new = ledger.stewards.take("nightly", "b")
    with pytest.raises(NotSteward, match="silent for too long"):
        ledger.intend_all("sky-a", [request(token="u")], epoch=epoch)
    assert len(ledger.intents(pool_id="sky-a")) == 1
    ledger.intend_all("sky-a", [request(token="v")], epoch=new)


def test_a_steward_that_was_replaced_writes_no_lease(ledger: Ledger) -> None:
    epoch = opened(ledger)
    claim(ledger, "b")
    ledger.seal_lease("sky-a", "{}", "sealed", epoch=epoch)
    ledger.names.leave("nightly", "a")
    new = ledger.stewards.take("nightly", "b")
    with pytest.raises(NotSteward):
        ledger.seal_lease("sky-a", "{}", "older", epoch=epoch)
    ledger.seal_lease("sky-a", "{}", "newer", epoch=new)
    row = ledger.sealed_lease("sky-a")
    assert row is not None
    assert row.sealed == "newer"


def test_a_steward_that_was_replaced_pays_nothing(ledger: Ledger) -> None:
    ledger.set_account(Account("team", Decimal(10), Period.RUN))
    epoch = opened(ledger)
    claim(ledger, "b")
    ledger.reserve("team", "sky-a", Decimal(1), epoch=epoch)
    ledger.roll("team", "sky-a", Decimal(1), Decimal(2), epoch=epoch)
    ledger.names.leave("nightly", "a")
    new = ledger.stewards.take("nightly", "b")
    with pytest.raises(NotSteward):
        ledger.roll("team", "sky-a", Decimal(1), Decimal(2), epoch=epoch)
    with pytest.raises(NotSteward):
        ledger.reserve("team", "sky-a", Decimal(1), epoch=epoch)
    assert (ledger.settled_usd("sky-a", "team"), ledger.committed_usd("sky-a")) == (Decimal(1), Decimal(3))
    ledger.roll("team", "sky-a", Decimal(1), Decimal(2), epoch=new)
    assert ledger.settled_usd("sky-a", "team") == Decimal(2)
