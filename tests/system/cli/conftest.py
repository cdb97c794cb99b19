"""Fixtures of this folder."""

from tests.cli.ledger import clock, damage, folder, ledger, page, run, skyward, three, url, utilisation  # noqa: F401 - fixtures
