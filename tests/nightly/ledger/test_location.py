"""The default place of the ledger, and the behaviour if it is not writable."""

import logging
from pathlib import Path

import distributed  # noqa: F401 - imported here, and not by a thread of a pool that ends before it has begun
import pytest

import skyward_core as sky
from skyward_core.ledger.ledger import default_url
from tests.system.ledger.test_location import read_only  # noqa: F401 - fixtures


def test_a_read_only_home_has_its_ledger_in_the_runtime_folder(
    read_only: Path, caplog: pytest.LogCaptureFixture
) -> None:
    with (
        caplog.at_level(logging.WARNING, logger="skyward"),
        sky.ComputePool(provider=sky.Local(), display="quiet") as pool,
    ):
        assert sky.compute(abs)(-2) >> pool == 2
    assert any(
        "may not be written to: the ledger is in" in message and "SKYWARD_LEDGER=" in message
        for message in caplog.messages
    )
    assert default_url() == f"sqlite:///{read_only}/skyward/ledger/ledger.db"
    assert (read_only / "skyward/ledger/ledger.db").is_file()
