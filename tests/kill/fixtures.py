"""A rental service for the tests of this folder."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.kill.console import RunningService


@pytest.fixture
def rental(tmp_path: Path) -> Iterator[RunningService]:
    """Start a service of this test's own."""
    with RunningService(tmp_path / "rental") as service:
        yield service
