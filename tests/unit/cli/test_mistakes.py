"""Wrong input, terminals and damaged files: the `skyward` command reports the fault, does the rest, and shows no
traceback.
"""

import json
import shlex
from collections.abc import Callable, Iterator
from decimal import Decimal
from pathlib import Path
from typing import Any

import pytest
from sqlalchemy import create_engine, text

from skyward_core import cli
from skyward_core.cli.app import command_tree
from skyward_core.errors import LedgerError
from skyward_core.ledger.ledger import Ledger
from skyward_core.ledger.rows import Account, Attempt, Period
from tests.cleanup.pools import FolderProvider
from tests.unit.cli.test_commands import (  # noqa: F401 - fixtures
    DEAD,
    HERE,
    ROOT,
    Clock,
    Skyward,
    clock,
    folder,
    ledger,
    open_pool,
    skyward,
    url,
)

type Damage = Callable[[str], None]


@pytest.fixture
def damage(url: str) -> Damage:
    """Run a statement on the ledger's database, without the ledger's methods."""

    def run(statement: str) -> None:
        engine = create_engine(url)
        with engine.begin() as connection:
            connection.execute(text(statement))
        engine.dispose()

    return run


@pytest.fixture
def run(url: str, capsys: pytest.CaptureFixture[str]) -> Callable[..., tuple[int, str, str]]:
    """Run a command line; return its exit code, stdout and stderr."""

    def go(line: str) -> tuple[int, str, str]:
        code = cli.main(shlex.split(line))
        return code, *capsys.readouterr()

    return go


# ── damaged rows ─────────────────────────────────────────────────────────────────────────────────────────────────────

POOL_DAMAGES = {
    "provider is no JSON": "UPDATE skyward_pools SET provider_json = '{' WHERE id = 'sky-odd'",
    "provider is a list": "UPDATE skyward_pools SET provider_json = '[1]' WHERE id = 'sky-odd'",
    "lease is text": "UPDATE skyward_pools SET lease_expires_microseconds = 'soon' WHERE id = 'sky-odd'",
    "lease is beyond the calendar": "UPDATE skyward_pools SET lease_expires_microseconds = 9000000000000000000 WHERE id = 'sky-odd'",
    "account is bytes": "UPDATE skyward_pools SET account = x'ff00' WHERE id = 'sky-odd'",
    "lease is infinite": "UPDATE skyward_pools SET lease_expires_microseconds = 9e999 WHERE id = 'sky-odd'",
}
RESOURCE_DAMAGES = {
    "price is nan": "UPDATE skyward_resources SET price_micro_usd_per_hour = 'nan' WHERE pool_id = 'sky-odd'",
    "price is infinite": "UPDATE skyward_resources SET price_micro_usd_per_hour = 9e999 WHERE pool_id = 'sky-odd'",
    "tags are no JSON": "UPDATE skyward_resources SET tags_json = 'x' WHERE pool_id = 'sky-odd'",
    "kind is unknown": "UPDATE skyward_resources SET kind = 'dream' WHERE pool_id = 'sky-odd'",
    "minimum is infinite": "UPDATE skyward_resources SET minimum_micro_usd = 9e999 WHERE pool_id = 'sky-odd'",
    "minimum is text": "UPDATE skyward_resources SET minimum_micro_usd = 'x' WHERE pool_id = 'sky-odd'",
    "region is bytes": "UPDATE skyward_resources SET region = x'ff00' WHERE pool_id = 'sky-odd'",
    "time is text": "UPDATE skyward_resources SET intended_microseconds = 'then' WHERE pool_id = 'sky-odd'",
    "seconds are infinite": "UPDATE skyward_resources SET idle_milliseconds = 9e999 WHERE pool_id = 'sky-odd'",
}


@pytest.fixture
def three(ledger: Ledger, clock: Clock, folder: FolderProvider) -> None:
    """A live pool, a dead one, and a live one with rows that a test damages."""
    open_pool(ledger, clock, folder, "sky-live", owner=HERE)
    open_pool(ledger, clock, folder, "sky-dead", owner=DEAD)
    open_pool(ledger, clock, folder, "sky-odd", owner=HERE)


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
    three: None,
    run: Callable[..., tuple[int, str, str]],
    damage: Damage,
    folder: FolderProvider,
    clock: Clock,
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
        "offers --max-price inf",
        "offers --max-price -1",
        "offers --max-price 0",
        "offers --max-age nan",
        "offers --max-age -1",
        "offers --count 0",
        "offers --cpu 1e9",
        "sweep --min-age nan",
        "sweep --min-age -5",
        "sweep --min-age 1e300",
        "ps --limit 99999999999999999999",
        "ps --limit ²",
        "budget set team --limit 1e400 --per day",
        "budget set team --limit 99999999999999 --per day",
        "budget set '' --limit 1 --per day",
        "budget set $'\\x1b[2J' --limit 1 --per day",
        f"budget set {'x' * 300} --limit 1 --per day",
        "stop ''",
        "stop '  '",
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


@pytest.mark.parametrize(
    ("line", "suggestion"),
    [("swep", "Did you mean 'sweep'?"), ("budget liste", "Did you mean 'list'?"), ("ps --al", "--all")],
)
def test_a_near_miss_gets_a_suggestion(line: str, suggestion: str, capsys: pytest.CaptureFixture[str]) -> None:
    """The error names the nearest command or option."""
    with pytest.raises(SystemExit) as caught:
        cli.main(line.split())
    assert caught.value.code == 2
    assert suggestion in capsys.readouterr().err


def test_a_choice_that_does_not_exist_is_refused_with_the_choices(capsys: pytest.CaptureFixture[str]) -> None:
    """The error has the choices, and no text of the library that parses them."""
    with pytest.raises(SystemExit):
        cli.main(["cost", "--by", "colour"])
    assert "error: Invalid value for '--by': 'colour' is not one of 'day', 'pool'," in capsys.readouterr().err


def test_the_command_prints_its_version(skyward: Skyward, capsys: pytest.CaptureFixture[str]) -> None:
    """Another option prints the path of the file with the tested versions."""
    for line, expected in (("--version", "skyward 0."), ("--constraints", str(ROOT / "skyward_core/constraints-3."))):
        with pytest.raises(SystemExit) as caught:
            cli.main([line])
        assert caught.value.code == 0
        output = capsys.readouterr().out
        assert output.startswith(expected)
    assert Path(output.strip()).is_file()


def test_tables_are_readable_on_a_narrow_terminal(
    three: None, skyward: Skyward, monkeypatch: pytest.MonkeyPatch
) -> None:
    """With 20 columns each value has its own line, complete; with 200 it is a table."""
    monkeypatch.setenv("FORCE_COLOR", "1")
    monkeypatch.setenv("COLUMNS", "20")
    output = skyward("ps")
    assert "POOL: sky-live\nSTATE: live\nOWNER: ada@laptop\nPROVIDER: folder\nOPEN: 1/1\n" in output
    assert "COST USD: 2.0000" in output
    assert "USD: 6.0000" in skyward("cost --by pool")
    monkeypatch.setenv("COLUMNS", "200")
    assert skyward("ps").splitlines()[0].startswith("POOL  ")


# ── generated command lines ──────────────────────────────────────────────────────────────────────────────────────────


def _options(command: Any, path: tuple[str, ...] = ()) -> Iterator[tuple[tuple[str, ...], list[Any]]]:
    """Each command with its options and arguments, as typer has them."""
    for name, sub in getattr(command, "commands", {}).items():
        yield from _options(sub, (*path, name))
    if not hasattr(command, "commands"):
        yield path, command.params


COMMANDS = list(_options(command_tree()))


@pytest.mark.parametrize("path", [(), ("budget",), ("ledger",), *(path for path, _ in COMMANDS)], ids=" ".join)
def test_help_fits_a_narrow_terminal_without_unicode(
    path: tuple[str, ...], skyward: Skyward, monkeypatch: pytest.MonkeyPatch
) -> None:
    """On 60 columns no line is wider, and every character is ASCII."""
    monkeypatch.setenv("COLUMNS", "60")
    monkeypatch.setenv("FORCE_COLOR", "1")
    shown = skyward(shlex.join([*path, "--help"]))
    assert shown.startswith("Usage: skyward")
    assert shown.isascii()
    assert max(map(len, shown.splitlines())) <= 60


def test_a_bill_by_work_is_complete_without_a_pools_row(
    three: None, run: Callable[..., tuple[int, str, str]], damage: Damage
) -> None:
    """Its resources belong to no work, and are in the total."""
    whole = json.loads(run("cost --by run --json")[1])["total"]
    damage("UPDATE skyward_pools SET id = 'sky-lost' WHERE id = 'sky-odd'")
    code, out, _ = run("cost --by run --json")
    assert code == 0
    assert json.loads(out)["total"] == whole


def test_escape_sequences_of_a_row_do_not_reach_the_terminal(
    three: None, run: Callable[..., tuple[int, str, str]], damage: Damage
) -> None:
    """Other users may write to a shared ledger: their text is shown with escape sequences written out."""
    damage("UPDATE skyward_pools SET owner_user = 'x\x1b[2J' WHERE id = 'sky-odd'")
    _, out, errors = run("ps --all")
    assert "\x1b" not in out + errors
    assert "x\\x1b[2J" in out
