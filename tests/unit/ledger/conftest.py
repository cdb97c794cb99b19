"""Fixtures of this folder."""

from tests.ledger.fixtures import clock, file_ledger, sqlite_url  # noqa: F401 - fixtures
