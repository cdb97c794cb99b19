"""Tests of the leak checks in conftest.py: a false leak costs a day, a missed one costs a machine."""

import os

import pytest

from tests import conftest


def test_a_test_cannot_open_the_default_ledger() -> None:
    """This process would lose its locks on it, and another would take it for unused and delete its log."""
    ledger = conftest._ledger()
    with pytest.raises(RuntimeError, match="must not open"):
        ledger.read_bytes()
    with pytest.raises(RuntimeError, match="must not open"):
        os.open(f"{ledger}-wal", os.O_RDONLY)
