"""Leases in the ledger, with sealed keys: replaced by newer ones, and deleted with the end of their pool."""

from datetime import timedelta

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


def test_a_newer_lease_replaces_the_one_before(ledger: Ledger, clock: Clock) -> None:
    open_pool(ledger, "q")
    assert ledger.sealed_lease("p") is None
    ledger.seal_lease("p", "first lease", "first keys")
    ledger.seal_lease("q", "another", "other keys")
    clock.time += timedelta(minutes=1)
    ledger.seal_lease("p", "second lease", "second keys")
    found = ledger.sealed_lease("p")
    assert found == SealedLease("p", "second lease", "second keys", NOON + timedelta(minutes=1))
    assert repr(found) == "SealedLease('p', updated_at=2026-11-21T12:01:00Z)"
    assert ledger.sealed_lease("q") == SealedLease("q", "another", "other keys", NOON)
