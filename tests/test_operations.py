"""`sky.sweep` without further words asks whom the settings name: the ledger may be lost, and with it whom it named."""

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
    """Whom each sweep was to ask, as plain data. The ledger is empty, and nothing is set."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("SKYWARD_LEDGER", f"sqlite:///{tmp_path / 'ledger.db'}")
    monkeypatch.delenv("SKYWARD_PROVIDER", raising=False)
    seen: list[list[dict[str, Any]]] = []

    def sweep(_: Any, providers: Sequence[sky.Provider], **__: Any) -> SweepReport:
        seen.append([provider.to_json() for provider in providers])
        return SweepReport()

    monkeypatch.setattr(sweeping, "sweep", sweep)
    return seen


def test_the_settings_say_whom_a_sweep_asks(asked: list[Any], monkeypatch: pytest.MonkeyPatch) -> None:
    """In Python as on the command line."""
    monkeypatch.setenv("SKYWARD_PROVIDER", json.dumps(TWO))
    sky.sweep()
    assert cli.main(["sweep"]) == 0
    assert asked == [TWO, TWO]


def test_a_file_is_a_setting_too(asked: list[Any], tmp_path: Path) -> None:
    """Where the sweep runs."""
    (tmp_path / "skyward.toml").write_text('provider = "runpod"\n')
    sky.sweep()
    assert asked == [[{"name": "runpod"}]]


def test_who_is_given_is_asked_in_their_place(asked: list[Any], monkeypatch: pytest.MonkeyPatch) -> None:
    """Nobody as well: then the ledger's are all."""
    monkeypatch.setenv("SKYWARD_PROVIDER", json.dumps(TWO))
    sky.sweep([sky.Local()])
    sky.sweep(providers=())
    assert asked == [[{"name": "local"}], []]


def test_without_settings_this_computer_is_asked(asked: list[Any]) -> None:
    """As a pool without settings is of this computer."""
    sky.sweep()
    assert asked == [[{"name": "local"}]]


def test_settings_that_mean_nobody_are_told(asked: list[Any], monkeypatch: pytest.MonkeyPatch) -> None:
    """A sweep that asks fewer than it was set to would look as if nothing were left."""
    monkeypatch.setenv("SKYWARD_PROVIDER", "digitalocaen")
    with pytest.raises(BadRequest, match="did you mean 'digitalocean'"):
        sky.sweep()
    assert asked == []
