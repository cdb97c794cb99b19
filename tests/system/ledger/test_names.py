"""Names of pools in the ledger: of all processes that open one, one rents, and one at a time is the steward."""

import threading
from collections.abc import Callable
from dataclasses import replace
from datetime import timedelta
from typing import Any

import pytest

from skyward_core.errors import LeaseLost
from skyward_core.ledger.ledger import Ledger
from skyward_core.ledger.names_policy import (
    Activity,
    Join,
    NamedPool,
    NameState,
    NotSteward,
    Refused,
    Rent,
    Standing,
    Usage,
    Wait,
)
from skyward_core.ledger.rows import Account, CallState, Period
from tests.ledger.fixtures import LEASE_SECONDS, USD, Clock, begin, claim, opened, resource_request


def activity(ledger: Ledger) -> Activity:
    return ledger.names.activity(["sky-a"])["sky-a"]


def row_of(ledger: Ledger) -> NamedPool:
    row = ledger.names.named("nightly")
    assert row is not None
    return row


def at_once(url: str, count: int, call: Callable[[Ledger, int], Any]) -> list[Any]:
    """Call in so many threads, each with a connection of its own; return the results."""
    found: list[Any] = []
    ready = threading.Barrier(count)

    def run(number: int) -> None:
        with Ledger(url) as mine:
            ready.wait()
            found.append(call(mine, number))

    threads = [threading.Thread(target=run, args=(number,)) for number in range(count)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    return found


def test_the_first_rents_and_the_others_wait_until_it_has_opened(ledger: Ledger) -> None:
    """Other names and other terms are other pools."""
    assert claim(ledger, "a") == Rent(1)
    assert claim(ledger, "other", name="other") == Rent(1)
    assert [row.name for row in ledger.names.all_named()] == ["nightly", "other"]
    assert isinstance(claim(ledger, "b"), Wait)
    begin(ledger, "sky-a")
    assert isinstance(claim(ledger, "b"), Wait)
    ledger.names.opened("nightly", 1)
    assert claim(ledger, "c", terms={"nodes": 3}) == Refused("sky-a", {"nodes": (2, 3)})
    join = claim(ledger, "b")
    assert isinstance(join, Join)
    assert join.row.pool_id == "sky-a"
    assert [client.id for client in ledger.names.clients("sky-a")] == ["a", "b"]


def test_of_many_processes_at_once_one_rents_and_one_becomes_the_steward(url: str) -> None:
    Ledger(url).close()  # migrate once
    claims = at_once(url, 16, lambda mine, number: claim(mine, f"c{number}"))
    assert sorted(type(one).__name__ for one in claims) == ["Rent"] + ["Wait"] * 15
    with Ledger(url) as first:
        renter = row_of(first).steward
        begin(first, f"sky-{renter}")
        first.names.opened("nightly", 1)
        for number in range(12):
            claim(first, f"d{number}")
        first.names.leave("nightly", renter)
    found = at_once(url, 12, lambda mine, number: mine.stewards.take("nightly", f"d{number}"))
    assert sorted(map(str, found)) == ["2"] + ["None"] * 11


def test_the_last_client_that_leaves_closes(ledger: Ledger) -> None:
    """The steward may leave before. A client that comes meanwhile waits until the pool has ended, and then rents."""
    opened(ledger)
    claim(ledger, "b")
    claim(ledger, "c")
    assert ledger.names.leave("nightly", "c") is NameState.IN_USE
    assert ledger.names.leave("nightly", "c") is None
    assert ledger.names.leave("no such name", "c") is None
    assert ledger.names.leave("nightly", "a") is NameState.IN_USE
    assert (row_of(ledger).state, row_of(ledger).steward) == (NameState.IN_USE, "")
    assert ledger.names.leave("nightly", "b") is NameState.CLOSING
    assert isinstance(claim(ledger, "d"), Wait)
    ledger.end_pool("sky-a")
    ledger.names.closed("b")
    assert claim(ledger, "d") == Rent(3)


def test_who_closes_a_pool_in_place_of_a_silent_steward_is_the_next_steward(ledger: Ledger, clock: Clock) -> None:
    """A steward that was stopped and goes on rents nothing for a pool that another process ends. Its own end is no new
    term.
    """
    opened(ledger)
    clock.go(LEASE_SECONDS - 1)
    claim(ledger, "b")
    clock.go(2)
    ledger.renew("sky-a", clock.time + timedelta(seconds=60))
    assert ledger.names.leave("nightly", "b") is NameState.CLOSING
    with pytest.raises(NotSteward):
        ledger.intend_all("sky-a", [resource_request("late")], epoch=1)
    assert ledger.names.leave("nightly", "b") is NameState.CLOSING
    assert row_of(ledger).epoch == 2


def test_a_warm_pool_is_found_in_time(ledger: Ledger, clock: Clock) -> None:
    opened(ledger, keep_warm_seconds=600.0)
    assert ledger.names.leave("nightly", "a") is NameState.WARM
    ledger.renew("sky-a", clock.time + timedelta(seconds=600))
    clock.go(599)
    assert isinstance(claim(ledger, "b"), Join)
    assert (row_of(ledger).state, row_of(ledger).warm_until) == (NameState.IN_USE, None)
    assert ledger.stewards.take("nightly", "b") == 2
    assert ledger.names.leave("nightly", "b", may_be_warm=False) is NameState.CLOSING


def test_a_pool_that_was_warm_long_enough_is_condemned_and_replaced(ledger: Ledger, clock: Clock) -> None:
    """Condemned in the same transaction: a frozen client cannot renew it any more."""
    opened(ledger, keep_warm_seconds=600.0)
    ledger.names.leave("nightly", "a")
    ledger.renew("sky-a", clock.time + timedelta(seconds=900))
    clock.go(601)
    rent = claim(ledger, "b")
    assert isinstance(rent, Rent)
    assert (rent.epoch, rent.dead_pool) == (2, "sky-a")
    with pytest.raises(LeaseLost):
        ledger.renew("sky-a", clock.time + timedelta(seconds=900))


def test_a_pool_is_idle_since_the_last_call_of_any_client(ledger: Ledger, clock: Clock) -> None:
    """Its clients say at each renewal how many calls they have. One that has left, or is silent, has none."""
    opened(ledger)
    joined_at = clock.time
    assert activity(ledger) == Activity(users=1, calls=0, idle_since=joined_at)
    claim(ledger, "b")
    clock.go(100)
    ledger.names.renew("a", LEASE_SECONDS, Usage(calls=2, idle_seconds=0.0))
    ledger.names.renew("b", LEASE_SECONDS, Usage(calls=1, idle_seconds=0.0))
    assert activity(ledger) == Activity(users=2, calls=3)
    ledger.names.renew("a", LEASE_SECONDS, Usage(idle_seconds=10.0))
    ledger.names.leave("nightly", "b", Usage(calls=1, idle_seconds=0.0))
    assert activity(ledger) == Activity(users=1, calls=0, idle_since=clock.time)
    ledger.names.renew("a", LEASE_SECONDS, Usage(calls=2, idle_seconds=0.0))
    busy_at = clock.time
    clock.go(LEASE_SECONDS + 1)
    assert activity(ledger) == Activity(users=0, calls=0, idle_since=busy_at)


def test_detached_calls_are_calls_of_the_pool(ledger: Ledger, clock: Clock) -> None:
    """They belong to no client, and run while no process uses the pool."""
    opened(ledger, keep_warm_seconds=600.0)
    ledger.names.leave("nightly", "a")
    call = CallState("train", "train", "ada", 1, "running", clock.time)
    ledger.note_calls("sky-a", [call])
    assert activity(ledger) == Activity(users=0, calls=1)
    clock.go(60)
    ledger.note_calls("sky-a", [replace(call, state="finished", ended_at=clock.time)])
    assert activity(ledger) == Activity(users=0, calls=0, idle_since=clock.time)


def test_a_client_is_renewed_until_it_leaves(ledger: Ledger, clock: Clock) -> None:
    opened(ledger)
    claim(ledger, "b")
    clock.go(100)
    ledger.names.renew("b", LEASE_SECONDS)
    assert ledger.names.clients("sky-a")[1].lease_expires_at == clock.time + timedelta(seconds=LEASE_SECONDS)
    ledger.names.leave("nightly", "b")
    left_at = clock.time
    clock.go(5)
    ledger.names.closed("b")
    assert ledger.names.clients("sky-a")[1].left_at == left_at
    with pytest.raises(LeaseLost):
        ledger.names.renew("b", LEASE_SECONDS)
    assert ledger.names.leave("nightly", "a") is NameState.CLOSING
    assert ledger.names.clients("sky-a")[0].left_at is None


def test_a_pool_that_no_client_can_reach_is_condemned(ledger: Ledger, clock: Clock) -> None:
    """By its only client, or when its lease has run out: a process that can reach the pool renews the lease."""
    opened(ledger, keep_warm_seconds=600.0)
    claim(ledger, "b")
    assert not ledger.names.report_unreachable("nightly", "sky-a", "b")
    ledger.names.leave("nightly", "a")
    claim(ledger, "c")
    ledger.names.leave("nightly", "b")
    assert ledger.names.report_unreachable("nightly", "sky-a", "c")
    assert isinstance(claim(ledger, "d"), Rent)
    begin(ledger, "sky-d")
    ledger.names.opened("nightly", 2)
    clock.go(420)
    ledger.names.renew("d", LEASE_SECONDS)
    assert isinstance(claim(ledger, "e"), Join)
    assert ledger.names.report_unreachable("nightly", "sky-d", "e")
    assert isinstance(claim(ledger, "f"), Rent)


def test_an_opener_that_was_replaced_opens_nothing(ledger: Ledger, clock: Clock) -> None:
    epoch = opened(ledger)
    clock.go(LEASE_SECONDS + 1)
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
    assert row_of(ledger).state is NameState.CLOSING
    assert isinstance(claim(ledger, "b"), Wait)


def test_a_client_takes_over_when_the_steward_has_left_or_is_silent(ledger: Ledger, clock: Clock) -> None:
    """The opener is the first one. A steward that comes back is not the steward any more."""
    assert ledger.stewards.look("no such name", "b") == (Standing.GONE, 0)
    assert ledger.stewards.take("no such name", "b") is None
    epoch = opened(ledger)
    clock.go(LEASE_SECONDS - 1)
    claim(ledger, "b")
    assert ledger.stewards.look("nightly", "a") == (Standing.HELD, epoch)
    assert ledger.stewards.look("nightly", "b") == (Standing.OTHER, epoch)
    assert ledger.stewards.take("nightly", "a") == epoch
    assert ledger.stewards.take("nightly", "b") is None
    clock.go(2)
    assert ledger.stewards.take("nightly", "b") == epoch + 1
    ledger.names.renew("a", LEASE_SECONDS)
    assert ledger.stewards.look("nightly", "a") == (Standing.OTHER, epoch + 1)
    for client, number in (("a", epoch), ("b", epoch), ("a", epoch + 1)):
        with pytest.raises(NotSteward):
            ledger.stewards.close("nightly", client, number)
    assert (row_of(ledger).state, row_of(ledger).steward) == (NameState.IN_USE, "b")
    ledger.names.leave("nightly", "b")
    assert ledger.stewards.take("nightly", "a") == epoch + 2
    assert ledger.stewards.look("nightly", "a") == (Standing.HELD, epoch + 2)


def test_a_steward_that_releases_the_pool_is_followed_by_any_client(ledger: Ledger) -> None:
    """Only the one of this epoch can release it."""
    epoch = opened(ledger)
    claim(ledger, "b")
    ledger.stewards.release("nightly", "a", epoch - 1)
    ledger.stewards.release("nightly", "b", epoch)
    assert ledger.stewards.look("nightly", "a") == (Standing.HELD, epoch)
    ledger.stewards.release("nightly", "a", epoch)
    assert ledger.stewards.look("nightly", "a") == (Standing.VACANT, epoch)
    assert ledger.stewards.take("nightly", "b") == epoch + 1


def test_a_process_that_comes_waits_while_the_steward_ends_the_pool(ledger: Ledger) -> None:
    """Others do not become the steward of it. A steward that gives up is not waited for."""
    epoch = opened(ledger, keep_warm_seconds=600.0)
    claim(ledger, "b")
    ledger.stewards.close("nightly", "a", epoch)
    assert isinstance(claim(ledger, "c"), Wait)
    assert ledger.stewards.look("nightly", "b") == (Standing.OTHER, epoch)
    assert ledger.names.leave("nightly", "b") is NameState.IN_USE
    assert isinstance(claim(ledger, "c"), Wait)
    ledger.stewards.release("nightly", "a", epoch)
    assert claim(ledger, "c") == Rent(epoch + 1, "sky-a", "the process that closed it has given up")
    begin(ledger, "sky-c")
    ledger.names.opened("nightly", epoch + 1)
    ledger.stewards.close("nightly", "c", epoch + 1)
    ledger.end_pool("sky-c")
    assert claim(ledger, "d") == Rent(epoch + 2)


def test_a_steward_that_reaches_a_limit_while_it_leaves_leaves_the_pool_to_the_next_one(ledger: Ledger) -> None:
    """It has detached the machines. The next steward ends the pool at the limit."""
    epoch = opened(ledger)
    claim(ledger, "b")
    ledger.stewards.close("nightly", "a", epoch)
    assert ledger.names.leave("nightly", "a") is NameState.IN_USE
    assert ledger.stewards.take("nightly", "b") == epoch + 1
    ledger.stewards.close("nightly", "b", epoch + 1)
    assert ledger.names.leave("nightly", "b") is NameState.CLOSING


def test_a_steward_that_was_replaced_rents_seals_and_pays_nothing(ledger: Ledger) -> None:
    """It is refused in the transaction in which it would write. The new one has settled the same time already."""
    ledger.set_account(Account("team", USD(10), Period.RUN))
    epoch = opened(ledger)
    claim(ledger, "b")

    def spend(token: str, total: int, by: int | None) -> None:
        ledger.intend_all("sky-a", [resource_request(token, "sky-a")], epoch=by)
        ledger.seal_lease("sky-a", "{}", token, epoch=by)
        ledger.roll("team", "sky-a", USD(total), USD(2), epoch=by)

    ledger.reserve("team", "sky-a", USD(1), epoch=epoch)
    spend("first", 1, epoch)
    ledger.names.leave("nightly", "a")
    new = ledger.stewards.take("nightly", "b")
    for late in (
        lambda: ledger.intend_all("sky-a", [resource_request("late", "sky-a")], epoch=epoch),
        lambda: ledger.seal_lease("sky-a", "{}", "late", epoch=epoch),
        lambda: ledger.roll("team", "sky-a", USD(1), USD(2), epoch=epoch),
        lambda: ledger.reserve("team", "sky-a", USD(1), epoch=epoch),
    ):
        with pytest.raises(NotSteward, match="silent for too long"):
            late()
    sealed = ledger.sealed_lease("sky-a")
    assert sealed is not None
    assert (len(ledger.intents(pool_id="sky-a")), sealed.sealed) == (1, "first")
    assert (ledger.settled_usd("sky-a", "team"), ledger.committed_usd("sky-a")) == (USD(1), USD(3))
    spend("second", 2, new)
    assert ledger.settled_usd("sky-a", "team") == USD(2)
