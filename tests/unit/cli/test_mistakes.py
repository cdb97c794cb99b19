"""Wrong input, terminals and damaged files: the `skyward` command reports the fault, does the rest, and shows no
traceback.
"""

import json
import shlex
from collections.abc import Callable
from decimal import Decimal
from pathlib import Path
from typing import Any

import pytest

from skyward_core import cli
from skyward_core.cli.commands import ui as command
from skyward_core.errors import LedgerError
from skyward_core.ledger.ledger import Ledger
from skyward_core.ledger.rows import Account, Attempt, Period
from tests.cleanup.pools import FolderProvider
from tests.cli.ledger import DEAD, HERE, RESOURCE_DAMAGES, ROOT, Clock, Damage, Skyward, open_named, open_pool

# ── damaged rows ─────────────────────────────────────────────────────────────────────────────────────────────────────

POOL_DAMAGES = {
    "provider is no JSON": "UPDATE skyward_pools SET provider_json = '{' WHERE id = 'sky-odd'",
    "lease is text": "UPDATE skyward_pools SET lease_expires_microseconds = 'soon' WHERE id = 'sky-odd'",
    "account is bytes": "UPDATE skyward_pools SET account = x'ff00' WHERE id = 'sky-odd'",
    "lease is infinite": "UPDATE skyward_pools SET lease_expires_microseconds = 9e999 WHERE id = 'sky-odd'",
}


@pytest.mark.parametrize("what", POOL_DAMAGES)
def test_a_pool_that_cannot_be_read_stops_nothing(
    what: str,
    three: None,
    run: Callable[..., tuple[int, str, str]],
    damage: Damage,
    folder: FolderProvider,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """The others are listed and swept. Its own machines stay, because the ledger has them. Each command reports it and
    exits with 1.
    """
    # no other command lists this provider's machines
    monkeypatch.setattr("skyward_core.cleanup.policy.IN_FLIGHT_SECONDS", 0.0)
    damage(POOL_DAMAGES[what])
    code, output, complaint = run("ps")
    assert (code, "sky-live" in output, "sky-dead" in output) == (1, True, True)
    assert complaint.startswith("skyward: row 'sky-odd' of skyward_pools in the ledger cannot be read: ")
    code, output, complaint = run("sweep --yes --min-age 0 --unknown --json")
    report = json.loads(output)
    assert code == 1
    assert [finding["pool"] for finding in report["ended"]] == ["sky-dead"]
    assert [(failure["provider"], failure["pool"]) for failure in report["failures"]] == [("ledger", "sky-odd")]
    (left,) = [finding for finding in report["findings"] if finding["pool"] == "sky-odd"]
    assert left["action"] == "leave"
    assert {machine.pool_id for machine in folder.instances()} == {"sky-live", "sky-odd"}
    for line in ("receipt sky-odd", "why sky-odd", "stop sky-odd"):
        code, _, complaint = run(line)
        assert (code, complaint.count("\n"), "cannot be read" in complaint) == (1, 1, True)
    code, output, complaint = run(f"stop sky-odd --provider {shlex.quote(json.dumps(folder.to_json()))}")
    assert {machine.pool_id for machine in folder.instances()} == {"sky-live"}
    assert "cannot be read" in complaint


def test_a_pool_whose_owner_cannot_be_read_lives_by_its_lease(
    three: None, run: Callable[..., tuple[int, str, str]], damage: Damage, folder: FolderProvider, clock: Clock
) -> None:
    """It is listed, has a receipt, is reported, and ends when its lease has expired. An unreadable owner does not keep
    machines alive.
    """
    damage("UPDATE skyward_pools SET owner_process = 'garbage' WHERE id = 'sky-odd'")
    code, output, complaint = run("ps --json")
    assert (code, {pool["pool"]: pool["state"] for pool in json.loads(output)}["sky-odd"]) == (1, "live")
    assert "its owner's process, 'garbage', cannot be read" in complaint
    assert json.loads(run("receipt sky-odd")[1])["owner"] == "ada@laptop"
    code, output, _ = run("sweep --yes --json")
    report = json.loads(output)
    assert (code, [finding["pool"] for finding in report["ended"]]) == (1, ["sky-dead"])
    assert [failure["pool"] for failure in report["failures"]] == ["sky-odd"]
    damage("UPDATE skyward_pools SET lease_expires_microseconds = 1 WHERE id = 'sky-odd'")
    assert [finding["pool"] for finding in json.loads(run("sweep --yes --json")[1])["ended"]] == ["sky-odd"]
    assert {machine.pool_id for machine in folder.instances()} == {"sky-live"}


def test_a_bill_omits_and_names_rows_without_a_number(
    three: None, run: Callable[..., tuple[int, str, str]], damage: Damage
) -> None:
    """No such row counts as zero without a message: the row is named, the total is that of the others."""
    before = json.loads(run("cost --json")[1])["total"]["cost_usd"]
    damage(RESOURCE_DAMAGES["price is nan"])
    code, output, complaint = run("cost --json")
    assert (code, json.loads(output)["total"]["cost_usd"]) == (1, pytest.approx(before * 2 / 3))
    assert "a price or a time is no number" in complaint


@pytest.mark.parametrize("version", ["abc", "-1", "", "2.5", "²"])
def test_a_database_without_a_known_version_is_refused(
    version: str, ledger: Ledger, skyward: Skyward, damage: Damage, url: str
) -> None:
    """No command migrates, or writes into, a database that is no ledger of a known version."""
    damage(f"UPDATE skyward_meta SET value = '{version}'")
    output = skyward("ps", code=1)
    assert f"says that it has version {version!r}, which is none" in output
    with pytest.raises(LedgerError, match="SKYWARD_LEDGER"):
        Ledger(url)


# ── wrong command lines ──────────────────────────────────────────────────────────────────────────────────────────────


@pytest.mark.parametrize(
    "line",
    [
        "offers --max-price nan",
        "offers --max-price 0",
        "offers --count 0",
        "offers --cpu 1e9",
        "sweep --min-age nan",
        "sweep --min-age 1e300",
        "ps --limit ²",
        "budget set team --limit 1e400 --per day",
        "budget set '' --limit 1 --per day",
        "budget set $'\\x1b[2J' --limit 1 --per day",
        f"budget set {'x' * 300} --limit 1 --per day",
        "stop ''",
        f"stop {'x' * 5000}",
        "why 'sky\x07'",
        "receipt 'sky\x00'",
        "receipt 'sky\udcff'",
        "sweep --provider ''",
        "--ledger '' ps",
    ],
)
def test_a_meaningless_argument_is_an_error_with_a_message(
    line: str, url: str, capsys: pytest.CaptureFixture[str]
) -> None:
    """Exit code 2; the terminal gets no control character, and no endless line."""
    with pytest.raises(SystemExit) as caught:
        cli.main(shlex.split(line.replace("$'\\x1b[2J'", "'\x1b[2J'")))
    assert caught.value.code == 2
    output = capsys.readouterr().err
    assert "Usage: skyward" in output
    assert output.replace("\n", "").isprintable()
    assert max(map(len, output.splitlines())) < 400


def test_the_command_prints_its_version(skyward: Skyward, capsys: pytest.CaptureFixture[str]) -> None:
    """Another option prints the path of the file with the tested versions."""
    for line, expected in (("--version", "skyward 0."), ("--constraints", str(ROOT / "skyward_core/constraints-3."))):
        with pytest.raises(SystemExit) as caught:
            cli.main([line])
        assert caught.value.code == 0
        output = capsys.readouterr().out
        assert output.startswith(expected)
    assert Path(output.strip()).is_file()


def test_escape_sequences_of_a_row_do_not_reach_the_terminal(
    three: None, run: Callable[..., tuple[int, str, str]], damage: Damage
) -> None:
    """Other users may write to a shared ledger: their text is shown with escape sequences written out."""
    damage("UPDATE skyward_pools SET owner_user = 'x\x1b[2J' WHERE id = 'sky-odd'")
    _, out, errors = run("ps --all")
    assert "\x1b" not in out + errors
    assert "x\\x1b[2J" in out


# ── the command ──────────────────────────────────────────────────────────────────────────────────────────────────────


@pytest.mark.parametrize("token", ["", "short", "with a blank in the middle of it", "t\xf6ken-of-enough-letters"])
def test_a_weak_token_of_the_environment_is_refused(
    token: str, monkeypatch: pytest.MonkeyPatch, skyward: Skyward
) -> None:
    monkeypatch.setenv(command.TOKEN, token)
    assert "SKYWARD_UI_TOKEN needs at least 20" in skyward("ui", code=cli.FAILED)


type Complete = Callable[[str], list[str]]


@pytest.fixture
def complete(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], url: str) -> Complete:
    """Return what bash is offered for the last word of a command line."""

    def run(line: str) -> list[str]:
        monkeypatch.setenv("_SKYWARD_COMPLETE", "complete_bash")
        monkeypatch.setenv("COMP_WORDS", line)
        monkeypatch.setenv("COMP_CWORD", str(len(line.split(" ")) - 1))
        with pytest.raises(SystemExit):
            cli.main([])
        output = capsys.readouterr()
        assert output.err == ""
        return output.out.split()

    return run


def test_commands_are_completed(complete: Complete) -> None:
    assert complete("skyward lo") == ["logs"]
    assert complete("skyward config s") == ["show", "schema"]


@pytest.mark.parametrize("command", ["logs", "stop", "users", "warm", "receipt", "ssh"])
def test_pools_are_completed_from_the_ledger(
    complete: Complete, ledger: Ledger, clock: Clock, folder: FolderProvider, command: str
) -> None:
    """Those that have not ended, by id and by name."""
    open_pool(ledger, clock, folder, "sky-a", owner=HERE)
    open_pool(ledger, clock, folder, "sky-b", owner=DEAD)
    open_pool(ledger, clock, folder, "sky-ended", owner=HERE)
    ledger.end_pools(["sky-ended"])
    open_named(ledger, clock, folder)
    assert sorted(complete(f"skyward {command} sky-")) == ["sky-a", "sky-b", "sky-named"]
    assert complete(f"skyward {command} night") == ["nightly"]


def test_a_ledger_that_cannot_be_read_completes_nothing(complete: Complete, monkeypatch: pytest.MonkeyPatch) -> None:
    """A message would be in the middle of what the user types."""
    monkeypatch.setenv("SKYWARD_LEDGER", "sqlite:////nonesuch/folder/ledger.db")
    assert complete("skyward logs sky-") == []


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


def test_a_key_of_this_user_is_named_by_its_file(skyward: Skyward, project: Path, tmp_path: Path) -> None:
    """The key is not read."""
    assert shown(skyward)["secret_key"] == (None, "default", None)
    place = tmp_path / "state" / "skyward" / "secret.key"
    place.parent.mkdir(parents=True)
    place.write_bytes(b"x" * 32)
    assert shown(skyward)["secret_key"] == ("***", "file", str(place))


def test_other_rows_that_cannot_be_read(
    three: None,
    run: Callable[..., tuple[int, str, str]],
    damage: Damage,
    ledger: Ledger,
    clock: Clock,
) -> None:
    """Attempts, accounts and reservations, and text that is not UTF-8: each affects only its own line."""
    ledger.set_account(Account("team", Decimal(5), Period.DAY))
    ledger.set_account(Account("odd", Decimal(5), Period.DAY))
    tried = [
        Attempt("sky-live", clock.now, "folder", region, "t", is_spot=False, seconds=1.0)
        for region in ("here", "there")
    ]
    ledger.note_attempts(tried)
    damage("UPDATE skyward_accounts SET period = 'fortnight' WHERE name = 'odd'")
    damage("UPDATE skyward_attempts SET at_microseconds = 'x' WHERE region = 'there'")
    damage("UPDATE skyward_pools SET owner_user = CAST(x'ff41' AS TEXT) WHERE id = 'sky-odd'")
    code, output, complaint = run("budget list")
    assert (code, "team" in output, "'odd' of skyward_accounts" in complaint) == (1, True, True)
    code, output, complaint = run("why sky-live")
    assert (code, "here" in output, "skyward_attempts" in complaint) == (1, True, True)
    code, output, complaint = run("ps")
    assert (code, "\ufffdA@laptop" in output, complaint) == (0, True, "")
