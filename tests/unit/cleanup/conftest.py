"""Fixtures of this folder."""

from tests.cleanup.fixtures import hands, ledger, world  # noqa: F401 - fixtures
