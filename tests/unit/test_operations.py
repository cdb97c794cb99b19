"""`sky.sweep` without arguments uses the providers of the settings, because the ledger with its providers
may be lost.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest

import skyward_core as sky
from skyward_core import cli
from skyward_core.cleanup import sweep as sweeping
from skyward_core.cleanup.sweep import SweepReport
from skyward_core.errors import BadRequest

TWO = [{"name": "local", "price_per_hour": 1.5}, {"name": "digitalocean", "region": "nyc2"}]


@pytest.fixture
def asked(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> list[list[dict[str, Any]]]:
    """The providers of each sweep, as plain data. The ledger is empty, and nothing is set."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("SKYWARD_LEDGER", f"sqlite:///{tmp_path / 'ledger.db'}")
    monkeypatch.delenv("SKYWARD_PROVIDER", raising=False)
    seen: list[list[dict[str, Any]]] = []

    def sweep(_: Any, providers: Sequence[sky.Provider], **__: Any) -> SweepReport:
        seen.append([provider.to_json() for provider in providers])
        return SweepReport()

    monkeypatch.setattr(sweeping, "sweep", sweep)
    return seen


def test_a_sweep_uses_the_providers_of_the_settings(asked: list[Any], monkeypatch: pytest.MonkeyPatch) -> None:
    """This holds in Python as on the command line."""
    monkeypatch.setenv("SKYWARD_PROVIDER", json.dumps(TWO))
    sky.sweep()
    assert cli.main(["sweep"]) == 0
    assert asked == [TWO, TWO]


def test_given_providers_replace_those_of_the_settings(asked: list[Any], monkeypatch: pytest.MonkeyPatch) -> None:
    """An empty list does too: then only the ledger's providers are used."""
    monkeypatch.setenv("SKYWARD_PROVIDER", json.dumps(TWO))
    sky.sweep([sky.Local()])
    sky.sweep(providers=())
    assert asked == [[{"name": "local"}], []]


def test_settings_without_a_known_provider_are_an_error(asked: list[Any], monkeypatch: pytest.MonkeyPatch) -> None:
    """A sweep that skips a provider of the settings would report that nothing is left."""
    monkeypatch.setenv("SKYWARD_PROVIDER", "digitalocaen")
    with pytest.raises(BadRequest, match="did you mean 'digitalocean'"):
        sky.sweep()
    assert asked == []
