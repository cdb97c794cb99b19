"""Fixtures of this folder."""

from tests.cli.ledger import clock, folder, ledger, page, skyward, url, utilisation  # noqa: F401 - fixtures
