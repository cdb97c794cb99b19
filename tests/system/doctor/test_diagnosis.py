"""`diagnose`: all checks at once, each with a time limit; and the checks of this machine, of clouds and of others."""

import json
import threading
from importlib.metadata import EntryPoint
from pathlib import Path

import pytest

from skyward_core import cli
from skyward_core import doctor as diagnosis
from skyward_core import doctor as this_machine
from skyward_core.doctor import Check, CheckState, diagnose
from tests.cleanup.pools import FolderProvider
from tests.unit.doctor.test_diagnosis import (  # noqa: F401 - fixtures
    place,
    states,
)


def test_a_check_that_hangs_has_failed(place: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The others have their results; the process does not wait for it."""
    forever = threading.Event()

    def hang() -> list[Check]:
        forever.wait()
        return []

    monkeypatch.setattr(this_machine, "check_network", hang)
    try:
        found = states(diagnose(providers=[FolderProvider(folder=str(place))], limit_seconds=3.0))
    finally:
        forever.set()
    assert (found["network"], found["versions"]) == ("failed", "ok")


def test_settings_that_no_pool_can_have(place: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The provider of such settings is not checked."""
    (place / "skyward.toml").write_text("provider = 'nonesuch'\n")
    found = diagnose()
    assert states(found)["settings"] == "failed"
    assert not [check for check in found if check.subject.startswith("provider")]
    monkeypatch.setenv("SKYWARD_PROVIDER", "local")
    (settings,) = this_machine.check_settings()
    assert (settings.state, "SKYWARD_PROVIDER in the environment" in settings.message) == (CheckState.OK, True)


def test_other_distributions_add_checks(monkeypatch: pytest.MonkeyPatch) -> None:
    """One that is not installed, one that fails, and one of ours that lacks a module of its own."""
    entries = {"mine": "checks:mine", "absent": "checks:absent", "broken": "gone:check"}
    found = [EntryPoint(name, f"tests.doctor.{value}", diagnosis.GROUP) for name, value in entries.items()]
    monkeypatch.setattr(diagnosis, "entry_points", lambda group: found)
    checks = {check.subject: check for check in diagnose(providers=[])}
    assert (checks["scratch"].state, checks["scratch"].cure) == (CheckState.WARNING, "delete old runs")
    assert (checks["Absent"].state, "not installed" in checks["Absent"].message) == (CheckState.OK, True)
    assert (checks["Broken"].state, "tests.doctor.gone" in checks["Broken"].message) == (CheckState.FAILED, True)


def test_prefects_api_is_asked(monkeypatch: pytest.MonkeyPatch) -> None:
    """An API that is set and does not answer has failed; without one there is nothing to ask."""
    from prefect.settings import PREFECT_API_URL, temporary_settings

    from prefect_skyward import doctor

    with temporary_settings(restore_defaults={PREFECT_API_URL}):
        assert states(doctor.check()) == {"Prefect": "ok", "Prefect: API": "ok"}
    with temporary_settings({PREFECT_API_URL: "http://127.0.0.1:1/api"}):
        found = doctor.check()[1]
    assert (found.state, "http://127.0.0.1:1/api" in found.message) == (CheckState.FAILED, True)
    monkeypatch.setattr(doctor, "version", lambda name: "2.20.0")
    assert states(doctor.check()) == {"Prefect": "failed"}


def test_the_command_shows_each_check_with_its_cure(place: Path, capsys: pytest.CaptureFixture[str]) -> None:
    def skyward(*options: str) -> tuple[int, str]:
        return cli.main(["doctor", "--provider", "local", *options]), capsys.readouterr().out

    code, text = skyward()
    assert (code, text.splitlines()[-1]) == (0, "7 ok")
    assert text.splitlines()[0].split() == ["STATE", "CHECK", "FOUND"]
    (place / "skyward.toml").write_text("node = 1\n")
    code, text = skyward("--json")
    (failed,) = [one for one in json.loads(text) if one["state"] == "failed"]
    assert (code, failed["subject"], "skyward config show" in failed["cure"]) == (1, "settings", True)
    code, text = skyward()
    assert (code, "what to do: `skyward config show`" in text, text.splitlines()[-1]) == (1, True, "6 ok, 1 failed")
