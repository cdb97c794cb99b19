"""`sky.sweep` without arguments uses the providers of the settings, because the ledger with its providers may be lost."""

import json
from pathlib import Path
from typing import Any

import pytest

import skyward_core as sky
from skyward_core import cli
from skyward_core.cleanup import sweep as sweeping
from skyward_core.cleanup.sweep import SweepReport

TWO = [{"name": "local", "price_per_hour": 1.5}, {"name": "digitalocean", "region": "nyc2"}]


def test_a_sweep_uses_the_providers_of_the_settings(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """Given ones replace them. A sweep that skips one would report that nothing is left."""
    asked: list[list[dict[str, Any]]] = []

    def sweep(_: Any, providers: Any, **__: Any) -> SweepReport:
        asked.append([provider.to_json() for provider in providers])
        return SweepReport()

    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("SKYWARD_LEDGER", f"sqlite:///{tmp_path / 'ledger.db'}")
    monkeypatch.setattr(sweeping, "sweep", sweep)
    monkeypatch.setenv("SKYWARD_PROVIDER", json.dumps(TWO))
    sky.sweep()
    assert cli.main(["sweep"]) == 0
    sky.sweep([sky.Local()])
    sky.sweep(providers=())
    assert asked == [TWO, TWO, [{"name": "local"}], []]
    monkeypatch.setenv("SKYWARD_PROVIDER", "digitalocaen")
    with pytest.raises(sky.BadRequest, match="did you mean 'digitalocean'"):
        sky.sweep()
    assert len(asked) == 4
