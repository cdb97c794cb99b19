"""The steward of a named pool: one client at a time, by one compare-and-swap; what it writes names its epoch."""

from skyward_core.ledger.ledger import Ledger
from skyward_core.ledger.names_policy import Standing, standing
from tests.unit.ledger.test_ledger import Clock, clock, ledger, postgresql_server, postgresql_url, sqlite_url, url  # noqa: F401 - fixtures


def test_a_name_without_a_pool_has_no_steward(ledger: Ledger) -> None:
    assert standing(None, "b") is Standing.GONE
    assert ledger.stewards.look("no such name", "b") == (Standing.GONE, 0)
    assert ledger.stewards.take("no such name", "b") is None
