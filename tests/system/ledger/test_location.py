"""The default place of the ledger, and the behaviour if it is not writable."""

import logging
import os
import pwd
from pathlib import Path
from typing import NoReturn

import distributed  # noqa: F401 - imported here, and not by a thread of a pool that ends before it has begun
import pytest

import skyward_core as sky
from skyward_core import cli
from skyward_core.ledger.ledger import default_url


@pytest.fixture
def read_only(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A read-only home, for root too, and a writable runtime folder."""
    home, runtime = tmp_path / "home", tmp_path / "run"
    home.mkdir()
    runtime.mkdir(mode=0o700)
    monkeypatch.setenv("XDG_STATE_HOME", str(home / "state"))
    monkeypatch.setenv("XDG_RUNTIME_DIR", str(runtime))
    may = os.access
    monkeypatch.setattr(
        os, "access", lambda path, mode, **named: may(path, mode, **named) and not str(path).startswith(str(home))
    )
    return runtime


def test_the_error_without_a_home_says_what_to_set(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:

    def no_user(uid: int) -> NoReturn:
        raise KeyError(f"getpwuid(): uid not found: {uid}")

    for name in ("HOME", "XDG_STATE_HOME", "XDG_CONFIG_HOME", "SKYWARD_LEDGER"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setattr(pwd, "getpwuid", no_user)
    with pytest.raises(
        sky.LedgerError, match=r"this user has no home.*SKYWARD_LEDGER=sqlite:////var/lib/skyward/ledger\.db"
    ):
        default_url()
    with pytest.raises(sky.LedgerError, match="SKYWARD_LEDGER"), sky.ComputePool(provider=sky.Local(), display="quiet"):
        pass
    assert cli.main(["ps"]) == cli.FAILED
    assert "SKYWARD_LEDGER=" in capsys.readouterr().err


def test_a_budget_needs_a_ledger_that_lasts(read_only: Path) -> None:
    """After a reboot the account would be full again."""
    with (
        pytest.raises(sky.LedgerError, match=r"a budget needs a ledger that lasts.*SKYWARD_LEDGER="),
        sky.ComputePool(provider=sky.Local(price_per_hour=1.2), budget="team", display="quiet"),
    ):
        pass


def test_an_account_that_does_not_exist_is_refused_also_if_nothing_costs_money() -> None:
    """The same file must not fail on a cloud only."""
    with (
        pytest.raises(sky.BadRequest, match="has no account 'nope'"),
        sky.ComputePool(provider=sky.Local(), budget="nope", display="quiet"),
    ):
        pass


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
