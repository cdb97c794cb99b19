"""Leases in the ledger, with sealed keys: replaced by newer ones, and deleted with the end of their pool."""

import pytest
from sqlalchemy import text

from skyward_core.errors import LeaseLost, LedgerConflict, LedgerError
from skyward_core.ledger.ledger import Ledger
from skyward_core.ledger.rows import SealedLease
from tests.unit.ledger.test_ledger import (  # noqa: F401 - fixtures
    LATER,
    NOON,
    Clock,
    clock,
    file_ledger,
    ledger,
    open_pool,
    postgresql_server,
    postgresql_url,
    sqlite_url,
    url,
)


def test_it_is_deleted_with_the_end_of_its_pool(ledger: Ledger) -> None:
    open_pool(ledger, "q")
    for pool_id in ("p", "q"):
        ledger.seal_lease(pool_id, "lease", "keys")
    ledger.condemn("p", seen=LATER)
    with pytest.raises(LeaseLost, match="judged dead"):
        ledger.seal_lease("p", "newer lease", "keys")
    assert ledger.sealed_lease("p") == SealedLease("p", "lease", "keys", NOON)
    ledger.end_pool("p")
    assert ledger.sealed_lease("p") is None
    with pytest.raises(LeaseLost, match="has ended"):
        ledger.seal_lease("p", "newer lease", "keys")
    with pytest.raises(LedgerConflict, match="no pool"):
        ledger.seal_lease("unknown", "lease", "keys")
    assert ledger.sealed_lease("q") is not None


def test_a_row_that_is_no_text_is_an_error_of_the_ledger(file_ledger: Ledger) -> None:
    file_ledger.seal_lease("p", "lease", "keys")
    with file_ledger._database.write() as connection:
        connection.execute(text("UPDATE skyward_sealed_leases SET sealed = x'00ff'"))
    with pytest.raises(LedgerError, match="skyward_sealed_leases"):
        file_ledger.sealed_lease("p")
