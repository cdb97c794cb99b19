"""Fixtures of this folder."""

from tests.kill.fixtures import rental  # noqa: F401 - fixtures
