"""A ledger with a clock that a test sets, and a provider."""

from collections.abc import Iterator
from pathlib import Path

import pytest

from skyward_core.ledger.ledger import Ledger
from tests.cleanup.pools import CloudProvider, Time, World


@pytest.fixture
def hands() -> Time:
    return Time()


@pytest.fixture
def ledger(tmp_path: Path, hands: Time) -> Iterator[Ledger]:
    with Ledger(f"sqlite:///{tmp_path / 'ledger.db'}", clock=hands) as opened:
        yield opened


@pytest.fixture
def world(ledger: Ledger, tmp_path: Path, hands: Time) -> World:
    return World(ledger, CloudProvider(folder=str(tmp_path)), hands)
