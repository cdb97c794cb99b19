"""Settings of a pool that opens."""

from pathlib import Path

import pytest

import skyward_core as sky


def test_the_log_names_the_provider_and_its_source(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    caplog.set_level("INFO", "skyward")
    with sky.ComputePool(display="quiet"):
        assert "running on this machine (Local)" in caplog.text
    (tmp_path / "skyward.toml").write_text('provider = "local"\n')
    with sky.ComputePool(display="quiet"):
        assert f"provider 'local', from {tmp_path / 'skyward.toml'}" in caplog.text
    monkeypatch.setenv("SKYWARD_PROVIDER", '{"name": "local", "price_per_hour": 2.0}')
    with sky.ComputePool(display="quiet") as pool:
        assert "provider 'local', from SKYWARD_PROVIDER in the environment" in caplog.text
        assert pool.spec.provider == sky.Local(price_per_hour=2.0)
