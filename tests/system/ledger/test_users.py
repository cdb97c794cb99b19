"""Who has used a pool with a name, and the part of its cost that is for the calls of each."""

from datetime import timedelta
from decimal import Decimal

import pytest

from skyward_core.errors import LeaseLost
from skyward_core.ledger.ledger import Ledger
from skyward_core.ledger.names_policy import NameState, Usage
from skyward_core.ledger.receipt import receipt
from skyward_core.ledger.rows import Bucket, CallState, CostBy, Price, SlotUse
from skyward_core.ledger.users import users_of
from skyward_core.machines.owner import Owner
from skyward_core.work import Work
from tests.system.ledger.test_names import LEASE_SECONDS, claim, opened
from tests.unit.ledger.test_ledger import (  # noqa: F401 - fixtures
    Clock,
    clock,
    ledger,
    postgresql_server,
    postgresql_url,
    resource_request,
    sqlite_url,
    url,
)

USD = Decimal


def rented(ledger: Ledger, pool_id: str = "sky-a") -> int:
    """Rent a machine at 1 USD an hour for a pool; return its number in the ledger."""
    (intent,) = ledger.intend_all(pool_id, [resource_request(f"{pool_id}-1", pool_id, Price(USD(1)))])
    ledger.bind(intent, f"i-{intent.id}")
    return intent.id


def slot_seconds(ledger: Ledger) -> dict[str, float]:
    return {client.id: client.slot_seconds for client in ledger.names.clients("sky-a")}


def test_the_last_time_of_slots_is_written_when_a_client_leaves(ledger: Ledger, clock: Clock) -> None:
    """Also when it has left already, because the calls end after the row says so; the time of leaving stays."""
    opened(ledger)
    claim(ledger, "b")
    ledger.names.leave("nightly", "b", Usage(3.0))
    assert slot_seconds(ledger) == {"a": 0.0, "b": 3.0}
    left_at = ledger.names.clients("sky-a")[1].left_at
    clock.time += timedelta(seconds=5)
    ledger.names.closed("b", Usage(4.5))
    ledger.names.closed("b")
    assert slot_seconds(ledger) == {"a": 0.0, "b": 4.5}
    assert ledger.names.clients("sky-a")[1].left_at == left_at
    with pytest.raises(LeaseLost):
        ledger.names.renew("b", LEASE_SECONDS, Usage(9.0))


def test_the_time_of_the_client_that_closes_is_written_before_the_pool_has_ended(ledger: Ledger) -> None:
    """So that the receipt that it reads then has it."""
    opened(ledger)
    assert ledger.names.leave("nightly", "a", Usage(3.0)) is NameState.CLOSING
    assert slot_seconds(ledger) == {"a": 3.0}
    assert ledger.names.clients("sky-a")[0].left_at is None


def test_the_busy_cost_is_split_by_the_time_of_slots(ledger: Ledger, clock: Clock) -> None:
    opened(ledger)
    claim(ledger, "b", work=Work(system="cron", run="1"))
    claim(ledger, "c")
    machine = rented(ledger)
    ledger.note_all({machine: {Bucket.RUNNING_CALLS: 360, Bucket.IDLE: 3600}})
    for client in "abc":
        ledger.names.renew(client, LEASE_SECONDS, Usage(120.0))
    ledger.names.leave("nightly", "a")
    clock.time += timedelta(seconds=LEASE_SECONDS + 1)
    users = users_of(ledger, "sky-a")
    assert [user.cost_usd for user in users] == [USD("0.033334"), USD("0.033333"), USD("0.033333")]
    assert [(user.name, user.slot_seconds) for user in users] == [(Owner.here().name, 120.0)] * 3
    assert [(user.left_at is None, user.lives) for user in users] == [(False, False), (True, False), (True, False)]
    assert users[1].work == Work(system="cron", run="1")


def test_detached_calls_are_users_by_their_owners(ledger: Ledger, clock: Clock) -> None:
    opened(ledger)
    machine = rented(ledger)
    ledger.note_all({machine: {Bucket.RUNNING_CALLS: 3600}})
    ledger.names.renew("a", LEASE_SECONDS, Usage(10.0))
    used = (SlotUse(f"i-{machine}", 1, 15.0),)
    ended = clock.time + timedelta(seconds=15)
    ledger.note_calls(
        "sky-a",
        [
            CallState("1", "f", "dag/train", 1, "ended", clock.time, ended, used),
            CallState("2", "f", "dag/train", 1, "ended", clock.time, ended, used),
            CallState("3", "f", "dag/other", 1, "running", clock.time, None, ()),
            CallState("4", "f", "dag/other", 1, "ended", clock.time, ended, ()),
        ],
    )
    process, other, train = users_of(ledger, "sky-a")
    assert (process.cost_usd, other.cost_usd, train.cost_usd) == (USD("0.25"), 0, USD("0.75"))
    assert (train.name, train.is_detached, train.left_at, train.lives) == ("dag/train", True, ended, False)
    assert (other.left_at, other.lives) == (None, True)


def test_a_pool_without_a_name_has_no_users(ledger: Ledger, clock: Clock) -> None:
    ledger.note_calls("p", [CallState("1", "f", "dag", 1, "running", clock.time)])
    assert users_of(ledger, "p") == []


def test_the_receipt_has_the_split(ledger: Ledger) -> None:
    opened(ledger)
    claim(ledger, "b")
    machine = rented(ledger)
    ledger.note_all({machine: {Bucket.LAUNCHING: 7, Bucket.RUNNING_CALLS: 101, Bucket.IDLE: 13}})
    ledger.names.leave("nightly", "a", Usage(2.0))
    ledger.names.closed("b", Usage(1.0))
    ledger.close_all([machine], "it is gone")
    ledger.end_pool("sky-a")
    paper = receipt(ledger, "sky-a")
    assert [user["slot_seconds"] for user in paper["users"]] == [2.0, 1.0]
    parts = sum(USD(repr(user["cost_usd"])) for user in paper["users"])
    assert parts == USD(repr(paper["buckets"]["running calls"]["cost_usd"])) > 0
    others = sum(USD(repr(its["cost_usd"])) for name, its in paper["buckets"].items() if name != "running calls")
    assert parts + others == USD(repr(paper["total_cost_usd"]))
    assert parts + others == sum(row.cost_usd for row in ledger.cost_rows(CostBy.POOL, pool_id="sky-a"))
