"""Entries of resources: which requests are refused, what a repeated request returns, and which entries are listed."""

from dataclasses import replace
from datetime import timedelta
from decimal import Decimal

import pytest

from skyward_core.errors import BadRequest, LedgerConflict
from skyward_core.ledger.ledger import Ledger
from skyward_core.ledger.rows import Price, Rented
from tests.unit.ledger.test_ledger import (  # noqa: F401 - fixtures
    NOON,
    Clock,
    clock,
    file_ledger,
    intend,
    open_pool,
    resource_request,
    sqlite_url,
)

USD = Decimal


@pytest.mark.parametrize(
    "price", [Price(increment_seconds=0), Price(minimum_seconds=-1), Price(minimum_usd=USD("-0.01"))]
)
def test_impossible_billing_rules_are_refused(file_ledger: Ledger, price: Price) -> None:
    with pytest.raises(BadRequest, match="billing increment"):
        intend(file_ledger, price=price)
    assert file_ledger.intents() == []
    smallest = Price(increment_seconds=1, minimum_seconds=0, minimum_usd=USD(0), on_demand_per_hour=USD(0))
    assert intend(file_ledger, price=smallest).price == smallest


def test_without_an_on_demand_price_it_is_the_same_price(file_ledger: Ledger) -> None:
    prices = [Price(USD(2)), Price(USD(2), USD(0)), Price(USD(2), USD(3))]
    found = [intend(file_ledger, f"t{number}", price=price).price for number, price in enumerate(prices)]
    assert [price.on_demand_per_hour for price in found] == [2, 0, 3]


def test_the_same_token_twice_in_one_call_is_one_entry(file_ledger: Ledger) -> None:
    first, other = resource_request("a"), resource_request("b")
    again = replace(first, tags={"skyward-rank": "1"})
    a, b, a_again = file_ledger.intend_all("p", [first, other, again])
    assert a == a_again
    assert (a.token, b.token, a.tags) == ("a", "b", first.tags)
    assert len(file_ledger.intents()) == 2


@pytest.mark.parametrize("of", ["provider", "region", "name"])
def test_a_token_of_another_resource_is_a_conflict(file_ledger: Ledger, of: str) -> None:
    intend(file_ledger)
    with pytest.raises(LedgerConflict, match="Use a new token"):
        file_ledger.intend("p", replace(resource_request(), **{of: "other"}))


def test_a_resource_is_adopted_once(file_ledger: Ledger, clock: Clock) -> None:
    adopted = file_ledger.adopt("p", resource_request(), "i-1")
    assert (adopted.cloud_id, adopted.intended_at, adopted.bound_at, adopted.gone_at) == ("i-1", NOON, NOON, None)
    file_ledger.end_pool("p")
    clock.time += timedelta(minutes=1)
    assert file_ledger.adopt("p", resource_request(), "i-1") == adopted
    assert file_ledger.intents() == [adopted]


def test_an_entry_that_is_gone_is_not_asked_to_end(file_ledger: Ledger) -> None:
    one, other = intend(file_ledger, "a"), intend(file_ledger, "b")
    file_ledger.close_all([one.id], "404")
    asked = file_ledger.ask_end_all([other.id, one.id])
    assert [(its.id, its.end_asked_at) for its in asked] == [(other.id, NOON), (one.id, None)]


def test_what_was_rented_replaces_the_price_and_the_tags(file_ledger: Ledger) -> None:
    cheap, dear, same = (intend(file_ledger, token, price=Price(USD(2), USD(3))) for token in "abc")
    ids = {cheap.id: "i-1", dear.id: "i-2", same.id: "i-3"}
    rented = {cheap.id: Rented(USD(1), {"skyward-rank": "7", "more": "x"}), dear.id: Rented(USD(4))}
    bound = file_ledger.bind_all(ids, rented)
    assert [its.price.per_hour for its in bound] == [1, 2, 2]
    assert [its.price.on_demand_per_hour for its in bound] == [3, 3, 3]
    assert bound[0].tags == {**cheap.tags, "skyward-rank": "7", "more": "x"}
    assert [its.tags for its in bound[1:]] == [dear.tags, same.tags]
    assert file_ledger.bind_all(ids, {cheap.id: Rented(USD("0.5"))}) == bound == file_ledger.intents()


def test_entries_are_listed_by_pool_and_provider(file_ledger: Ledger) -> None:
    open_pool(file_ledger, "q")
    ours, theirs = intend(file_ledger, "a"), intend(file_ledger, "b", "q")
    elsewhere = file_ledger.intend("p", replace(resource_request("c"), provider="aws"))
    (ours,) = file_ledger.close_all([ours.id], "404")
    assert file_ledger.intents() == [ours, theirs, elsewhere]
    assert file_ledger.intents(pool_id="p") == [ours, elsewhere]
    assert file_ledger.intents(provider="verda") == [ours, theirs]
    assert file_ledger.intents(pool_id="p", provider="aws") == [elsewhere]
    assert file_ledger.open_intents(pool_id="p") == [elsewhere]
