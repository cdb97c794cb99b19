"""Fixtures of this folder."""

from tests.distributed.fixtures import pool_of_two  # noqa: F401 - fixtures
