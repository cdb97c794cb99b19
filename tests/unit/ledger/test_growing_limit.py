"""The life that a launch must leave to the pool: `SpendingLimit.commit` with `least_seconds`."""

from __future__ import annotations

from typing import Any

import pytest

from skyward_core.errors import BudgetExceeded
from skyward_core.ledger.budgets import Commitment
from tests.unit.ledger.test_budgets import Pool, pool, usd

PRICE, LEAST = usd("36"), 600.0  # a cent a second


def grow(it: Pool, received: list[float | None], heard: set[str] | None = None, **words: Any) -> Commitment:
    """Commit one more machine. `received` gets the paid time that the others receive; all confirm it, or those `heard`."""

    def notify() -> set[str]:
        received.append(it.limit.paid_seconds())
        return it.meter.rented() if heard is None else heard

    return it.limit.commit(1, PRICE, least_seconds=LEAST, notify=notify, **words)


def test_a_launch_that_would_leave_too_short_a_life_shortens_nothing() -> None:
    received = list[float | None]()
    it = pool(11.99)
    it.launch(1, PRICE)
    with pytest.raises(BudgetExceeded, match=r"max_cost=11.99 would not last for 600 s with 1 x 36 USD per hour more"):
        grow(it, received)
    assert (received, it.limit.paid_seconds()) == ([], 1199.0)
    it = pool(12.0)
    it.launch(1, PRICE)
    assert grow(it, received).hard_end == it.clock() + 600


def test_a_machine_that_is_not_there_yet_counts() -> None:
    received = list[float | None]()
    it = pool(15.0)
    it.launch(1, PRICE)
    grow(it, received)
    with pytest.raises(BudgetExceeded):
        grow(it, received)
    assert received == [750.0]


def test_a_machine_that_keeps_its_end_does_not_make_the_life_of_the_new_one_shorter() -> None:
    it = pool(20.0)
    it.launch(2, PRICE)
    with pytest.raises(BudgetExceeded):
        grow(it, [], heard={"m-0"})
    it.limit.check()
    assert it.limit.paid_seconds() == 1000.0
    assert it.limit.commit(1, PRICE, notify=lambda: {"m-0"}).hard_end == it.clock() + 500


def test_the_seconds_in_which_a_machine_ends_do_not_count() -> None:
    received = list[float | None]()
    it = pool(12.6)
    it.launch(1, PRICE)
    with pytest.raises(BudgetExceeded):
        grow(it, received, ending_seconds=60.0)
    assert grow(it, received, ending_seconds=30.0).hard_end == it.clock() + 630
    assert received == [600.0]


def test_no_machine_is_launched_for_the_last_minutes_before_the_end_in_the_tags() -> None:
    it = pool(20.0)
    it.launch(2, PRICE)
    it.clock.seconds += 401
    it.meter.end("m-0")
    with pytest.raises(BudgetExceeded, match=r"end in 599 s"):
        grow(it, [])


def test_without_a_limit_nothing_is_refused() -> None:
    it = pool(None)
    it.launch(1, PRICE)
    assert grow(it, []).hard_end is None
