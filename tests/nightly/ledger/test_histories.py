"""The parts of a bill add up to it after every step of random histories, on both databases."""

import pytest

from skyward_core.ledger.ledger import Ledger
from skyward_core.ledger.rows import MICRO_USD
from tests.ledger.fixtures import Clock
from tests.ledger.histories import parts_in_order, play

HISTORIES = {"sqlite": 60, "postgresql": 20}
"""200 took twenty minutes beside other tests, and a quarter of a nightly run."""
ORDERS = {"sqlite": 8, "postgresql": 3}


def kind_of(ledger: Ledger) -> str:
    return ledger.url.get_backend_name()


@pytest.mark.timeout(1800)
def test_the_parts_of_a_bill_add_up_after_every_step_of_any_history(ledger: Ledger, clock: Clock) -> None:
    """Processes call, stop, go on, die, lose the ledger or the nodes, and write late; clocks are set; pools end."""
    for seed in range(1000, 1000 + HISTORIES[kind_of(ledger)]):
        play(ledger, clock, seed)


@pytest.mark.timeout(1800)
def test_the_order_of_the_last_writes_changes_no_sum(ledger: Ledger, clock: Clock) -> None:
    """Of four orders: the same parts, to the rounding of what each process has counted."""
    for seed in range(1000, 1000 + ORDERS[kind_of(ledger)]):
        first, *others = (parts_in_order(ledger, clock, seed, order) for order in range(4))
        for other in others:
            assert first.keys() == other.keys(), seed
            assert all(abs(first[key] - other[key]) <= 5 * MICRO_USD for key in first), (seed, first, other)
