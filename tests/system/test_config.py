"""Settings: the environment has priority over the file, the nearest file is used, and the log names the source."""

from pathlib import Path

import pytest

import skyward_core as sky
from tests.unit.test_config import (  # noqa: F401 - fixtures
    project,
)


def test_the_log_names_the_provider_and_its_source(
    project: Path, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    """When the program names no provider, the log of the opening pool names it and where it was found."""
    caplog.set_level("INFO", "skyward")
    with sky.ComputePool(display="quiet"):
        assert "running on this machine (Local)" in caplog.text
    (project / "skyward.toml").write_text('provider = "local"\n')
    with sky.ComputePool(display="quiet"):
        assert f"provider 'local', from {project / 'skyward.toml'}" in caplog.text
    monkeypatch.setenv("SKYWARD_PROVIDER", '{"name": "local", "price_per_hour": 2.0}')
    with sky.ComputePool(display="quiet") as pool:
        assert "provider 'local', from SKYWARD_PROVIDER in the environment" in caplog.text
        assert pool.spec.provider == sky.Local(price_per_hour=2.0)
