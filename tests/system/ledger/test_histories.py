"""Some random histories of money, on both databases; `tests/nightly` has hundreds."""

from skyward_core.ledger.ledger import Ledger
from skyward_core.ledger.rows import MICRO_USD
from tests.ledger.fixtures import Clock
from tests.ledger.histories import parts_in_order, play


def test_the_parts_of_a_bill_add_up_after_every_step_of_a_history(ledger: Ledger, clock: Clock) -> None:
    """Processes call, stop, go on, die, lose the ledger or the nodes, and write late; clocks are set; pools end."""
    for seed in range(3):
        play(ledger, clock, seed)


def test_the_order_of_the_last_writes_of_a_history_changes_no_sum(ledger: Ledger, clock: Clock) -> None:
    for seed in range(1):
        first, second = (parts_in_order(ledger, clock, seed, order) for order in range(2))
        assert first.keys() == second.keys()
        assert all(abs(first[key] - second[key]) <= 5 * MICRO_USD for key in first)
