"""Nodes that are added by two threads at the same moment, with the real rental and spending limit."""

import threading

from skyward_core.errors import BudgetExceeded
from skyward_core.provisioning.candidates import ENOUGH_SECONDS
from tests.unit.provisioning.test_growth import A, Make, make, opened  # noqa: F401 - fixtures


def test_of_two_nodes_that_come_at_once_only_one_has_money_for_ten_minutes(make: Make) -> None:
    """15 USD are 750 s of two machines, and 500 s of three. Both ranks have their offers before one is rented."""
    it, ready = make(A, max_cost=15), threading.Barrier(2)
    threads = [threading.Thread(target=it.add, args=(rank, lambda: ready.wait(120))) for rank in (1, 2)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert it.rented == ["a", "a"]
    assert [type(error) for error in it.refusals] == [BudgetExceeded]
    assert it.paid_seconds >= ENOUGH_SECONDS
