"""`skyward config show` and `skyward config schema`."""

import json
from pathlib import Path
from typing import Any

import pytest

from skyward_core import cli
from tests.unit.cli.test_commands import Skyward, skyward, url  # noqa: F401 - fixtures


@pytest.fixture
def project(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The working directory, without settings in the environment but the test's provider."""
    folder = tmp_path / "project"
    folder.mkdir()
    monkeypatch.chdir(folder)
    monkeypatch.setenv("XDG_STATE_HOME", str(tmp_path / "state"))
    for name in ("SKYWARD_SECRET_KEY", "SKYWARD_LEASE_KEY", "SKYWARD_PROFILE", "SKYWARD_PROVIDER"):
        monkeypatch.delenv(name, raising=False)
    return folder


def shown(skyward: Skyward, line: str = "config show --json", code: int = 0) -> dict[str, tuple[Any, str, str | None]]:
    found = json.loads(skyward(line, code))
    return {one["name"]: (one["value"], one["source"], one["where"]) for one in found["settings"] + found["others"]}


def test_each_value_has_its_source(skyward: Skyward, url: str, project: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    file = project / "skyward.toml"
    file.write_text("nodes = 2\nretries = 1\n[profiles.large]\nnodes = 8\n[pools.nightly]\nkeep_warm = 60\n")
    monkeypatch.setenv("SKYWARD_RETRIES", "5")
    found = shown(skyward, "config show --json --profile large --pool nightly")
    assert found["nodes"] == (8, "file", f"{file} [profiles.large]")
    assert found["keep_warm"] == (60.0, "file", f"{file} [pools.nightly]")
    assert found["retries"] == (5, "environment", "SKYWARD_RETRIES")
    assert found["timeout"] == (3600.0, "default", None)
    assert found["profile"] == ("large", "option", "--profile")
    assert found["ledger"] == (url, "environment", "SKYWARD_LEDGER")
    assert shown(skyward)["nodes"] == (2, "file", str(file))
    table = [line.split() for line in skyward("config show").splitlines()]
    assert ["retries", "5", "SKYWARD_RETRIES"] in table
    assert ["timeout", "3600.0", "default"] in table
    assert skyward("config show").splitlines()[-1] == f"read: {file}; profiles: large; pools: nightly"


SECRETS = [
    ("SKYWARD_ENV", '{"API_TOKEN": "hidden-value"}'),
    ("SKYWARD_PROVIDER", '{"name": "vastai", "api_key": "hidden-value"}'),
    ("SKYWARD_PROVIDER", '{"name": "vastai", "api_key": "hidden-value", "nonesuch": 1}'),
    ("SKYWARD_ENV", '{"API_TOKEN": "hidden-value", "A": 1}'),
    ("SKYWARD_IMAGE", '{"env": {"API_TOKEN": "hidden-value"}}'),
    ("SKYWARD_LEDGER", "postgresql+psycopg://ada:hidden-value@host/ledger"),
    ("SKYWARD_LEDGER", "hidden-value://ada"),
    ("SKYWARD_SECRET_KEY", "hidden-value"),
    ("SKYWARD_LEASE_KEY", "hidden-value"),
]


@pytest.mark.parametrize(("variable", "value"), SECRETS)
def test_values_of_secrets_are_masked(
    variable: str,
    value: str,
    url: str,
    project: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    """Also where the settings are not valid, and in messages."""
    monkeypatch.setenv(variable, value)
    for line in (["config", "show"], ["config", "show", "--json"]):
        cli.main(line)
        output = capsys.readouterr()
        assert variable in output.out
        assert "hidden-value" not in output.out + output.err


def test_a_wrong_value_is_shown_with_its_fault(
    url: str, project: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """Exit code 1; the list has it as it was written."""
    monkeypatch.setenv("SKYWARD_NODES", "many")
    assert cli.main(["config", "show"]) == cli.FAILED
    output = capsys.readouterr()
    assert ["nodes", "many", "SKYWARD_NODES"] in [line.split() for line in output.out.splitlines()]
    assert "nodes is from SKYWARD_NODES in the environment" in output.err


def test_an_unknown_profile_is_an_error(skyward: Skyward, project: Path) -> None:
    (project / "skyward.toml").write_text("[profiles.large]\n")
    assert "did you mean 'large'" in skyward("config show --profile larg", code=cli.FAILED)


def test_a_key_of_this_user_is_named_by_its_file(skyward: Skyward, project: Path, tmp_path: Path) -> None:
    """The key is not read."""
    assert shown(skyward)["secret_key"] == (None, "default", None)
    place = tmp_path / "state" / "skyward" / "secret.key"
    place.parent.mkdir(parents=True)
    place.write_bytes(b"x" * 32)
    assert shown(skyward)["secret_key"] == ("***", "file", str(place))


def test_the_schema_is_json(skyward: Skyward) -> None:
    assert json.loads(skyward("config schema"))["title"] == "skyward.toml"
