"""Names of pools in the ledger: of all processes that open one, one rents."""

import threading
from dataclasses import replace
from datetime import timedelta
from typing import Any

import pytest

from skyward_core.errors import LeaseLost
from skyward_core.ledger.ledger import Ledger
from skyward_core.ledger.names_policy import Activity, Claim, Join, NameState, Refused, Rent, Usage, Wait
from skyward_core.ledger.rows import CallState
from skyward_core.machines.owner import Owner
from skyward_core.work import NO_WORK, Work
from tests.unit.ledger.test_ledger import (  # noqa: F401 - fixtures
    PROVIDER,
    Clock,
    clock,
    ledger,
    postgresql_server,
    postgresql_url,
    sqlite_url,
    url,
)

TERMS = {"nodes": 2}
LEASE_SECONDS = 120.0


def claim(ledger: Ledger, client: str, name: str = "nightly", **changes: Any) -> Claim:
    """Open a name as this client, with the pool id `sky-` and its id."""
    values: dict[str, Any] = {
        "owner": Owner.here(),
        "terms": TERMS,
        "keep_warm_seconds": 0.0,
        "lease_seconds": LEASE_SECONDS,
        **changes,
    }
    return ledger.names.claim(name, f"sky-{client}", client, **values)


def begin(ledger: Ledger, pool_id: str, work: Work = NO_WORK) -> None:
    """Write the pool into the ledger, as its journal does."""
    ledger.open_pool(
        pool_id,
        owner=Owner.here(),
        provider=PROVIDER,
        spec_json="{}",
        lease_expires_at=ledger.names.now() + timedelta(seconds=LEASE_SECONDS),
        work=work,
    )


def opened(ledger: Ledger, client: str = "a", **changes: Any) -> int:
    """Open a name, up to the state in which others may join; return the epoch."""
    rent = claim(ledger, client, **changes)
    assert isinstance(rent, Rent)
    begin(ledger, f"sky-{client}", changes.get("work", NO_WORK))
    ledger.names.opened("nightly", rent.epoch)
    return rent.epoch


def activity(ledger: Ledger) -> Activity:
    return ledger.names.activity(["sky-a"])["sky-a"]


def test_names_are_separate(ledger: Ledger) -> None:
    assert claim(ledger, "a") == Rent(1)
    assert claim(ledger, "b", name="other") == Rent(1)
    assert [row.name for row in ledger.names.all_named()] == ["nightly", "other"]


def test_other_terms_are_refused(ledger: Ledger) -> None:
    opened(ledger)
    assert claim(ledger, "b", terms={"nodes": 3}) == Refused("sky-a", {"nodes": (2, 3)})
    assert [client.id for client in ledger.names.clients("sky-a")] == ["a"]


def test_of_many_processes_at_once_exactly_one_rents(url: str) -> None:
    claims: list[Claim] = []
    ready = threading.Barrier(16)

    def open_name(number: int) -> None:
        with Ledger(url) as mine:
            ready.wait()
            claims.append(claim(mine, f"c{number}"))

    Ledger(url).close()  # migrate once
    threads = [threading.Thread(target=open_name, args=(number,)) for number in range(16)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert sorted(type(one).__name__ for one in claims) == ["Rent"] + ["Wait"] * 15


def test_the_last_client_that_leaves_closes(ledger: Ledger) -> None:
    opened(ledger)
    claim(ledger, "b")
    assert ledger.names.leave("nightly", "a") is NameState.IN_USE
    assert ledger.names.leave("nightly", "b") is NameState.CLOSING
    assert isinstance(claim(ledger, "c"), Wait)
    ledger.end_pool("sky-a")
    ledger.names.closed("b")
    assert claim(ledger, "c") == Rent(2)


def test_the_steward_leaves_and_the_others_go_on(ledger: Ledger) -> None:
    opened(ledger)
    claim(ledger, "b")
    ledger.names.leave("nightly", "a")
    row = ledger.names.named("nightly")
    assert row is not None
    assert (row.state, row.steward) == (NameState.IN_USE, "")


def test_a_client_that_has_left_leaves_no_second_time(ledger: Ledger) -> None:
    opened(ledger)
    claim(ledger, "b")
    assert ledger.names.leave("nightly", "b") is NameState.IN_USE
    assert ledger.names.leave("nightly", "b") is None
    assert ledger.names.leave("no such name", "b") is None


def test_a_warm_pool_is_found_in_time(ledger: Ledger, clock: Clock) -> None:
    opened(ledger, keep_warm_seconds=600.0)
    assert ledger.names.leave("nightly", "a") is NameState.WARM
    ledger.renew("sky-a", clock.time + timedelta(seconds=600))
    clock.time += timedelta(seconds=599)
    assert isinstance(claim(ledger, "b"), Join)
    row = ledger.names.named("nightly")
    assert row is not None
    assert (row.state, row.warm_until) == (NameState.IN_USE, None)


def test_a_pool_that_was_warm_long_enough_is_condemned_and_replaced(ledger: Ledger, clock: Clock) -> None:
    opened(ledger, keep_warm_seconds=600.0)
    ledger.names.leave("nightly", "a")
    ledger.renew("sky-a", clock.time + timedelta(seconds=900))
    clock.time += timedelta(seconds=601)
    rent = claim(ledger, "b")
    assert isinstance(rent, Rent)
    assert (rent.epoch, rent.dead_pool) == (2, "sky-a")
    with pytest.raises(LeaseLost):
        ledger.renew("sky-a", clock.time + timedelta(seconds=900))


def test_a_pool_that_cannot_be_kept_warm_is_closed(ledger: Ledger) -> None:
    opened(ledger, keep_warm_seconds=600.0)
    assert ledger.names.leave("nightly", "a", may_be_warm=False) is NameState.CLOSING


def test_the_users_of_a_pool_are_those_that_have_not_left(ledger: Ledger, clock: Clock) -> None:
    opened(ledger)
    claim(ledger, "b")
    assert activity(ledger).users == 2
    ledger.names.leave("nightly", "b")
    assert activity(ledger).users == 1
    clock.time += timedelta(seconds=LEASE_SECONDS + 1)
    assert activity(ledger).users == 0


def test_a_pool_is_idle_since_the_last_call_of_any_client(ledger: Ledger, clock: Clock) -> None:
    opened(ledger)
    joined_at = clock.time
    assert activity(ledger) == Activity(users=1, calls=0, idle_since=joined_at)
    claim(ledger, "b")
    clock.time += timedelta(seconds=100)
    ledger.names.renew("a", LEASE_SECONDS, Usage(1.0, calls=2, idle_seconds=0.0))
    ledger.names.renew("b", LEASE_SECONDS, Usage(2.0, calls=1, idle_seconds=0.0))
    assert activity(ledger) == Activity(users=2, calls=3)
    ledger.names.renew("a", LEASE_SECONDS, Usage(1.0, idle_seconds=10.0))
    ledger.names.leave("nightly", "b", Usage(2.0, calls=1, idle_seconds=0.0))
    assert activity(ledger) == Activity(users=1, calls=0, idle_since=clock.time)


def test_a_client_that_is_silent_has_no_calls(ledger: Ledger, clock: Clock) -> None:
    opened(ledger)
    ledger.names.renew("a", LEASE_SECONDS, Usage(1.0, calls=2, idle_seconds=0.0))
    busy_at = clock.time
    clock.time += timedelta(seconds=LEASE_SECONDS + 1)
    assert activity(ledger) == Activity(users=0, calls=0, idle_since=busy_at)


def test_detached_calls_are_calls_of_the_pool(ledger: Ledger, clock: Clock) -> None:
    opened(ledger, keep_warm_seconds=600.0)
    ledger.names.leave("nightly", "a")
    call = CallState("train", "train", "ada", 1, "running", clock.time)
    ledger.note_calls("sky-a", [call])
    assert activity(ledger) == Activity(users=0, calls=1)
    clock.time += timedelta(seconds=60)
    ledger.note_calls("sky-a", [replace(call, state="finished", ended_at=clock.time)])
    assert activity(ledger) == Activity(users=0, calls=0, idle_since=clock.time)


def test_a_steward_that_was_replaced_writes_no_more(ledger: Ledger, clock: Clock) -> None:
    epoch = opened(ledger)
    clock.time += timedelta(seconds=LEASE_SECONDS + 1)
    assert isinstance(claim(ledger, "b"), Rent)
    with pytest.raises(LeaseLost):
        ledger.names.opened("nightly", epoch)


def test_a_pool_that_is_being_ended_is_not_opened_to_others(ledger: Ledger) -> None:
    """Its opener reached a limit before it could let others use the pool."""
    assert claim(ledger, "a") == Rent(1)
    begin(ledger, "sky-a")
    ledger.stewards.close("nightly", "a", 1)
    with pytest.raises(LeaseLost, match="is being ended"):
        ledger.names.opened("nightly", 1)
    row = ledger.names.named("nightly")
    assert row is not None
    assert row.state is NameState.CLOSING
    assert isinstance(claim(ledger, "b"), Wait)


def test_a_client_is_renewed_until_it_leaves(ledger: Ledger, clock: Clock) -> None:
    opened(ledger)
    clock.time += timedelta(seconds=100)
    ledger.names.renew("a", LEASE_SECONDS, Usage(1.5))
    (client,) = ledger.names.clients("sky-a")
    assert client.lease_expires_at == clock.time + timedelta(seconds=LEASE_SECONDS)
    assert client.slot_seconds == 1.5
    ledger.names.closed("a")
    with pytest.raises(LeaseLost):
        ledger.names.renew("a", LEASE_SECONDS)


def test_a_pool_that_no_client_can_reach_is_condemned(ledger: Ledger) -> None:
    opened(ledger)
    claim(ledger, "b")
    assert not ledger.names.give_up("nightly", "sky-a", "b")
    ledger.names.leave("nightly", "a")
    assert isinstance(claim(ledger, "c"), Wait), "the opener is closing it"


def test_the_only_client_of_an_unreachable_pool_condemns_it(ledger: Ledger) -> None:
    opened(ledger, keep_warm_seconds=600.0)
    ledger.names.leave("nightly", "a")
    assert isinstance(claim(ledger, "b"), Join)
    assert ledger.names.give_up("nightly", "sky-a", "b")
    assert isinstance(claim(ledger, "c"), Rent)


def test_a_pool_whose_lease_has_run_out_is_condemned_although_a_client_of_it_lives(
    ledger: Ledger, clock: Clock
) -> None:
    opened(ledger)
    clock.time += timedelta(minutes=7)
    ledger.names.renew("a", LEASE_SECONDS)
    assert isinstance(claim(ledger, "b"), Join)
    assert ledger.names.give_up("nightly", "sky-a", "b")
    assert isinstance(claim(ledger, "c"), Rent)
