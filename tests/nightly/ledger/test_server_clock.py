"""The clock of the PostgreSQL server decides about pools with a name: those of two clients differ by four minutes."""

from skyward_core.ledger.names_policy import Rent, Wait
from tests.system.ledger.test_server_clock import FIRST, SECOND, Pair, claim, pair  # noqa: F401 - fixtures
from tests.unit.ledger.test_ledger import PROVIDER, postgresql_server, postgresql_url, sqlite_url  # noqa: F401 - fixtures


def test_an_opener_that_lives_is_waited_for(pair: Pair) -> None:
    first, second = pair
    assert claim(first, "a", FIRST) == Rent(1)
    assert isinstance(claim(second, "b", SECOND), Wait)
