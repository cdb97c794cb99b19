"""Names of pools in the ledger: of all processes that open one, one rents."""

from skyward_core.ledger.ledger import Ledger
from skyward_core.ledger.names_policy import Join, Rent, Wait
from tests.system.ledger.test_names import begin, claim
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


def test_the_first_rents_and_the_others_wait_until_it_has_opened(ledger: Ledger) -> None:
    assert claim(ledger, "a") == Rent(1)
    assert isinstance(claim(ledger, "b"), Wait)
    begin(ledger, "sky-a")
    assert isinstance(claim(ledger, "b"), Wait)
    ledger.names.opened("nightly", 1)
    join = claim(ledger, "b")
    assert isinstance(join, Join)
    assert join.row.pool_id == "sky-a"
    assert [client.id for client in ledger.names.clients("sky-a")] == ["a", "b"]
