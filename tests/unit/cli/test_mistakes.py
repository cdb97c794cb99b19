"""Wrong input, settings and damaged rows: the `skyward` command reports the fault, does the rest, and shows no traceback."""

import functools
import json
import shlex
from collections.abc import Callable
from decimal import Decimal
from pathlib import Path
from typing import Any

import pytest

import skyward_core as sky
from skyward_core import cli
from skyward_core.cleanup.sweep import RENEWAL_SECONDS, sweep
from skyward_core.cli import live as command
from skyward_core.errors import LedgerError
from skyward_core.ledger import migrations
from skyward_core.ledger.lease_clock import _boot
from skyward_core.ledger.ledger import Ledger
from skyward_core.ledger.rows import Account, Attempt, Period
from tests.cli.ledger import DEAD, ROOT, TOKEN, Skyward
from tests.ledger.next_release import ADDED, THIS

# ── damaged rows ─────────────────────────────────────────────────────────────────────────────────────────────────────

POOL_DAMAGES = {
    "provider is no JSON": "provider_json = '{'",
    "lease is text": "lease_expires_microseconds = 'soon'",
    "account is bytes": "account = x'ff00'",
    "lease is infinite": "lease_expires_microseconds = 9e999",
    "lease is in no calendar": f"lease_ahead_microseconds = {2**63 - 1}, lease_boot = '{_boot()}'",
    "provider is nested too deep": f"provider_json = '{'[' * 60_000}'",
}


def machines(skyward: Skyward) -> set[str]:
    return {machine.pool_id for machine in skyward.folder.instances()}


@pytest.mark.parametrize("what", POOL_DAMAGES)
def test_a_pool_that_cannot_be_read_stops_nothing(what: str, skyward: Skyward, monkeypatch: pytest.MonkeyPatch) -> None:
    """The others are listed and swept. Its own machines stay, because the ledger has them. Each command reports it and
    exits with 1.
    """
    # no other command lists this provider's machines
    monkeypatch.setattr("skyward_core.cleanup.policy.IN_FLIGHT_SECONDS", 0.0)
    skyward.open_three()
    skyward.damage(f"UPDATE skyward_pools SET {POOL_DAMAGES[what]} WHERE id = 'sky-odd'")
    code, output, complaint = skyward.run("ps")
    assert (code, "sky-live" in output, "sky-dead" in output) == (1, True, True)
    assert complaint.startswith("skyward: row 'sky-odd' of skyward_pools in the ledger cannot be read: ")
    code, output, complaint = skyward.run("sweep --yes --min-age 0 --unknown --json")
    report = json.loads(output)
    assert code == 1
    assert [finding["pool"] for finding in report["ended"]] == ["sky-dead"]
    assert [(failure["provider"], failure["pool"]) for failure in report["failures"]] == [("ledger", "sky-odd")]
    (left,) = [finding for finding in report["findings"] if finding["pool"] == "sky-odd"]
    assert left["action"] == "leave"
    assert machines(skyward) == {"sky-live", "sky-odd"}
    for line in ("receipt sky-odd", "why sky-odd", "stop sky-odd"):
        code, _, complaint = skyward.run(line)
        assert (code, complaint.count("\n"), "cannot be read" in complaint) == (1, 1, True)
    _, _, complaint = skyward.run(f"stop sky-odd --provider {shlex.quote(json.dumps(skyward.folder.to_json()))}")
    assert machines(skyward) == {"sky-live"}
    assert "cannot be read" in complaint


NAMED_DAMAGES = {
    "a use began in no calendar": f"UPDATE skyward_uses SET began_microseconds = {-(2**63)} WHERE id = 'a'",
    "a use is text": "UPDATE skyward_uses SET micro_usd = 'much' WHERE id = 'a'",
    "a client is of no calendar": (
        f"UPDATE skyward_clients SET lease_ahead_microseconds = {2**63 - 1}, lease_boot = '{_boot()}' WHERE id = 'a'"
    ),
    "terms are nested too deep": f"UPDATE skyward_names SET terms_json = '{'[' * 60_000}'",
}


@pytest.mark.parametrize("what", NAMED_DAMAGES)
def test_a_row_of_a_shared_pool_that_cannot_be_read_is_an_error_in_words(what: str, skyward: Skyward) -> None:
    """Whoever may write to the ledger writes any value. No command ends with a traceback, and other pools are shown."""
    skyward.open("sky-live")
    skyward.open_named()
    skyward.damage(NAMED_DAMAGES[what])
    for line in (
        "ps",
        "users nightly",
        "users sky-named",
        "cost --by run",
        "receipt sky-named",
        "warm nightly --for 2h",
    ):
        code, output, complaint = skyward.run(line)
        assert "Traceback" not in complaint
        assert code == 0 or "cannot be read" in complaint, (line, complaint)
        assert line != "ps" or "sky-live" in output


def test_a_pool_whose_owner_cannot_be_read_lives_by_its_lease(
    skyward: Skyward, monkeypatch: pytest.MonkeyPatch
) -> None:
    """After its lease the sweep waits for a renewal, because the owner may be another computer's."""
    pauses = list[float]()
    monkeypatch.setattr("skyward_core.cleanup.sweep.sweep", functools.partial(sweep, pause=pauses.append))
    skyward.open_three()
    skyward.damage("UPDATE skyward_pools SET owner_process = 'garbage' WHERE id = 'sky-odd'")
    code, output, complaint = skyward.run("ps --json")
    assert (code, {pool["pool"]: pool["state"] for pool in json.loads(output)}["sky-odd"]) == (1, "live")
    assert "its owner's process, 'garbage', cannot be read" in complaint
    assert json.loads(skyward.run("receipt sky-odd --json")[1])["owner"] == "ada@laptop"
    code, output, _ = skyward.run("sweep --yes --json")
    report = json.loads(output)
    assert (code, [finding["pool"] for finding in report["ended"]]) == (1, ["sky-dead"])
    assert [failure["pool"] for failure in report["failures"]] == ["sky-odd"]
    skyward.damage("UPDATE skyward_pools SET lease_expires_microseconds = 1 WHERE id = 'sky-odd'")
    report = json.loads(skyward.run("sweep --yes --json")[1])
    assert [finding["pool"] for finding in report["ended"]] == ["sky-odd"]
    assert machines(skyward) == {"sky-live"}
    assert pauses == [RENEWAL_SECONDS]


def test_other_rows_that_cannot_be_read(skyward: Skyward) -> None:
    """Attempts and accounts, text that is not UTF-8 or has escape sequences: each affects only its own line."""
    skyward.open_three()
    ledger, now = skyward.ledger, skyward.clock.now
    for name in ("team", "odd"):
        ledger.set_account(Account(name, Decimal(5), Period.DAY))
    tried = [
        Attempt("sky-live", now, "folder", region, "t", is_spot=False, seconds=1.0) for region in ("here", "there")
    ]
    ledger.note_attempts(tried)
    skyward.damage(
        "UPDATE skyward_accounts SET period = 'fortnight' WHERE name = 'odd'",
        "UPDATE skyward_attempts SET at_microseconds = 'x' WHERE region = 'there'",
        "UPDATE skyward_pools SET owner_user = CAST(x'ff41' AS TEXT) WHERE id = 'sky-odd'",
        "UPDATE skyward_pools SET owner_user = 'x\x1b[2J' WHERE id = 'sky-live'",
    )
    code, output, complaint = skyward.run("budget list")
    assert (code, "team" in output, "'odd' of skyward_accounts" in complaint) == (1, True, True)
    code, output, complaint = skyward.run("why sky-live")
    assert (code, "here" in output, "skyward_attempts" in complaint) == (1, True, True)
    code, output, complaint = skyward.run("ps")
    assert (code, "\ufffdA@laptop" in output, complaint) == (0, True, "")
    assert "x\\x1b[2J" in output
    assert "\x1b" not in output


@pytest.mark.parametrize("version", ["abc", "-1", "", "2.5", "²"])
def test_a_database_without_a_known_version_is_refused(version: str, skyward: Skyward, url: str) -> None:
    """No command migrates, or writes into, a database that is no ledger of a known version."""
    skyward.damage(f"UPDATE skyward_meta SET value = '{version}'")
    assert f"says that it has version {version!r}, which is none" in skyward("ps", code=1)
    with pytest.raises(LedgerError, match="SKYWARD_LEDGER"):
        Ledger(url)


def test_only_what_begins_something_migrates_a_ledger(skyward: Skyward, monkeypatch: pytest.MonkeyPatch) -> None:
    """A command that looks changes nothing. `ledger migrate` waits for the pools of the older release."""
    skyward.open("sky-live")
    monkeypatch.setattr(migrations, "MIGRATIONS", (*migrations.MIGRATIONS, ADDED))
    for line in ("ps", "cost", "sweep", "users sky-live", "budget list", "ledger prune --older-than 1d"):
        assert "`skyward ledger migrate`" in skyward(line, code=cli.FAILED)
    for line in ("ledger migrate", "sweep --yes"):
        assert "while pools of that release live: sky-live of" in skyward(line, code=cli.FAILED)
    skyward.damage("UPDATE skyward_pools SET ended_microseconds = 1")
    assert skyward("ledger migrate") == f"the ledger has version {THIS + 1}, which is that of this release\n"
    assert skyward("ps").startswith("no open pools")


def test_a_ledger_that_cannot_be_opened_ends_the_command(skyward: Skyward, tmp_path: Path) -> None:
    (tmp_path / "broken.db").write_text("this is no database, and is long enough to be looked at" * 10)
    for line in ("ui", "ps"):
        assert "broken.db" in skyward(f"--ledger sqlite:///{tmp_path}/broken.db {line}", code=cli.FAILED)


def test_a_named_ledger_that_is_not_there_is_said_to_be_missing(skyward: Skyward, tmp_path: Path) -> None:
    """A mistyped name would else read as: no pools are open. A command that reads does not make it, `budget set` does."""
    place = tmp_path / "mistyped.db"
    ledger = f"--ledger sqlite:///{place}"
    for _ in range(2):
        code, output, found = skyward.run(f"{ledger} ps")
        assert (code, found) == (0, f"skyward: there is no ledger at {place}: no pool is known\n")
        assert output.startswith("no open pools")
    made = f"skyward: there is no ledger at {place}: a new one is made, and it knows no pool\n"
    assert made in skyward.run(f"{ledger} budget set team --limit 5 --per day")[2]
    assert skyward.run(f"{ledger} budget list")[2] == ""


@pytest.mark.parametrize(
    "line",
    [
        "ps --all",
        "cost",
        "receipt x",
        "why x",
        "logs x",
        "stop x",
        "top --once",
        "calls x",
        "budget list",
        "ledger prune --older-than 9d",
    ],
)
def test_a_command_that_reads_makes_no_ledger_and_no_folder(
    skyward: Skyward, line: str, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    home = tmp_path / "new home"
    home.mkdir()
    for name in ("XDG_STATE_HOME", "XDG_CACHE_HOME", "XDG_RUNTIME_DIR", "SKYWARD_LEDGER"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("HOME", str(home))
    assert skyward.run(line)[0] in {0, cli.FAILED}
    assert [*home.rglob("*")] == []


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
        "budget set '\x1b[2J' --limit 1 --per day",
        f"budget set {'x' * 300} --limit 1 --per day",
        "stop ''",
        f"stop {'x' * 5000}",
        "why 'sky\x07'",
        "receipt 'sky\x00'",
        "receipt 'sky\udcff'",
        "sweep --provider ''",
        "--ledger '' ps",
        "cost --since 2026-11-21 --until 2026-11-20",
        "calls nightly --owner ada",
        "calls --stacks",
        "cost --since 2026-11-21 --until 2026-11-21T00:00+00:00",
    ],
)
def test_a_meaningless_argument_is_an_error_with_a_message(line: str, skyward: Skyward) -> None:
    """The terminal gets no control character, and no endless line."""
    output = skyward.refused(shlex.split(line))
    assert "Usage: skyward" in output
    assert output.replace("\n", "").isprintable()
    assert max(map(len, output.splitlines())) < 400


def test_the_command_prints_its_version(capsys: pytest.CaptureFixture[str]) -> None:
    for line, expected in (("--version", "skyward 0."), ("--constraints", str(ROOT / "skyward_core/constraints-3."))):
        with pytest.raises(SystemExit) as caught:
            cli.main([line])
        assert caught.value.code == 0
        output = capsys.readouterr().out
        assert output.startswith(expected)
    assert Path(output.strip()).is_file()


@pytest.mark.parametrize("token", ["", "short", "with a blank in the middle of it", "t\xf6ken-of-enough-letters"])
def test_a_weak_token_of_the_environment_is_refused(
    token: str, monkeypatch: pytest.MonkeyPatch, skyward: Skyward
) -> None:
    monkeypatch.setenv(command.TOKEN, token)
    assert "SKYWARD_UI_TOKEN needs at least 20" in skyward("ui", code=cli.FAILED)


def test_the_token_of_the_environment_is_no_setting_of_a_pool(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setenv(command.TOKEN, TOKEN)
    assert sky.PoolSpec.of(provider="local")
    assert "is no setting" not in caplog.text


# ── completion ───────────────────────────────────────────────────────────────────────────────────────────────────────

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


def test_commands_are_completed_and_pools_from_the_ledger(
    complete: Complete, skyward: Skyward, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Those that have not ended, by id and by name. Without a ledger no message comes in the middle of what is typed."""
    assert complete("skyward lo") == ["logs"]
    assert complete("skyward config s") == ["show", "schema"]
    skyward.open("sky-a")
    skyward.open("sky-b", owner=DEAD)
    skyward.open("sky-ended")
    skyward.ledger.end_pools(["sky-ended"])
    skyward.open_named()
    for its in ("logs", "stop", "users", "warm", "receipt", "ssh"):
        assert sorted(complete(f"skyward {its} sky-")) == ["sky-a", "sky-b", "sky-named"]
        assert complete(f"skyward {its} night") == ["nightly"]
    monkeypatch.setenv("SKYWARD_LEDGER", "sqlite:////nonesuch/folder/ledger.db")
    assert complete("skyward logs sky-") == []


# ── settings ─────────────────────────────────────────────────────────────────────────────────────────────────────────


@pytest.fixture
def project(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, url: str) -> Path:
    """The working directory, without settings in the environment but the test's ledger."""
    folder = tmp_path / "project"
    folder.mkdir()
    monkeypatch.chdir(folder)
    monkeypatch.setenv("XDG_STATE_HOME", str(tmp_path / "state"))
    for name in ("SKYWARD_SECRET_KEY", "SKYWARD_LEASE_KEY", "SKYWARD_PROFILE", "SKYWARD_PROVIDER"):
        monkeypatch.delenv(name, raising=False)
    return folder


def shown(skyward: Skyward, options: str = "") -> dict[str, tuple[Any, str, str | None]]:
    found = skyward.json(f"config show {options}")
    return {one["name"]: (one["value"], one["source"], one["where"]) for one in found["settings"] + found["others"]}


def test_each_value_has_its_source(skyward: Skyward, url: str, project: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    file = project / "skyward.toml"
    file.write_text("nodes = 2\nretries = 1\n[profiles.large]\nnodes = 8\n[pools.nightly]\nkeep_warm = 60\n")
    monkeypatch.setenv("SKYWARD_RETRIES", "5")
    found = shown(skyward, "--profile large --pool nightly")
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


@pytest.mark.parametrize(
    ("variable", "value"),
    [
        ("SKYWARD_ENV", '{"API_TOKEN": "hidden-value", "A": 1}'),
        ("SKYWARD_ENV", '{"API_TOKEN": "hidden-value"}'),
        ("SKYWARD_PROVIDER", '{"name": "vastai", "api_key": "hidden-value"}'),
        ("SKYWARD_PROVIDER", '{"name": "vastai", "api_key": "hidden-value", "nonesuch": 1}'),
        ("SKYWARD_IMAGE", '{"env": {"API_TOKEN": "hidden-value"}}'),
        ("SKYWARD_LEDGER", "postgresql+psycopg://ada:hidden-value@host/ledger"),
        ("SKYWARD_LEDGER", "hidden-value://ada"),
        ("SKYWARD_SECRET_KEY", "hidden-value"),
        ("SKYWARD_LEASE_KEY", "hidden-value"),
    ],
)
@pytest.mark.usefixtures("project")
def test_values_of_secrets_are_masked(
    variable: str, value: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """Also where the settings are not valid, and in messages."""
    monkeypatch.setenv(variable, value)
    for line in (["config", "show"], ["config", "show", "--json"]):
        cli.main(line)
        output = capsys.readouterr()
        assert variable in output.out
        assert "hidden-value" not in output.out + output.err


@pytest.mark.usefixtures("project")
def test_a_key_of_this_user_is_named_by_its_file(skyward: Skyward, tmp_path: Path) -> None:
    """The key is not read."""
    assert shown(skyward)["secret_key"] == (None, "default", None)
    place = tmp_path / "state" / "skyward" / "secret.key"
    place.parent.mkdir(parents=True)
    place.write_bytes(b"x" * 32)
    assert shown(skyward)["secret_key"] == ("***", "file", str(place))
