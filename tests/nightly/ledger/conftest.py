"""Fixtures of this folder."""

from tests.ledger.fixtures import (  # noqa: F401 - fixtures
    clock,
    file_ledger,
    ledger,
    postgresql_server,
    postgresql_url,
    sqlite_url,
    url,
)
