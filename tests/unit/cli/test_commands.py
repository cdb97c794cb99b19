"""The `skyward` command as a user types it: its output, its effects, and its exit codes."""

import json
import re
import shlex
from collections.abc import Callable, Iterator, Mapping
from dataclasses import replace
from datetime import UTC, datetime, timedelta
from decimal import Decimal
from pathlib import Path
from typing import Any

import pytest

from skyward_core import cli
from skyward_core.cleanup import release as releasing
from skyward_core.cleanup import survey
from skyward_core.cli.app import command_tree
from skyward_core.ledger.ledger import Ledger
from skyward_core.ledger.names_policy import Usage
from skyward_core.ledger.rows import (
    BILLING_ROUNDING,
    Account,
    Bucket,
    CallState,
    Period,
    Price,
    ResourceKind,
    ResourceRequest,
    SlotUse,
)
from skyward_core.machines.owner import Owner
from skyward_core.providers import base
from skyward_core.providers.base import LAUNCH_TAG, POOL_TAG, RANK_TAG
from skyward_core.work import NO_WORK, Work
from tests.cleanup.pools import FolderProvider

ROOT = Path(__file__).parents[3]
HERE = replace(Owner.here(), user="ada", host="laptop")
DEAD = replace(Owner.here(), started="1")

type Skyward = Callable[..., str]


class Clock:
    """The ledger's clock; it does not advance."""

    def __init__(self, now: datetime) -> None:
        self.now = now

    def __call__(self) -> datetime:
        return self.now


@pytest.fixture
def url(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> str:
    """Return the URL of the ledger that commands use by default.

    No command finds the machines of other tests, which are processes of this host.
    """
    found = f"sqlite:///{tmp_path / 'ledger.db'}"
    monkeypatch.setenv("SKYWARD_LEDGER", found)
    load = base.load

    def loading(requested: Any) -> Any:
        fields = dict(requested) if isinstance(requested, Mapping) else {"name": requested}
        assert fields.get("name") != "local", "a test must not sweep this host"
        return FolderProvider(folder=fields["folder"]) if fields.get("name") == "folder" else load(requested)

    monkeypatch.setattr(base, "load", loading)
    monkeypatch.setattr(releasing, "load", loading)
    monkeypatch.setattr(survey, "load", loading)
    monkeypatch.setenv("SKYWARD_PROVIDER", json.dumps({"name": "folder", "folder": str(tmp_path)}))
    return found


@pytest.fixture
def clock() -> Clock:
    return Clock(datetime.now(UTC))


@pytest.fixture
def ledger(url: str, clock: Clock) -> Iterator[Ledger]:
    with Ledger(url, clock=clock) as opened:
        yield opened


@pytest.fixture
def folder(tmp_path: Path) -> FolderProvider:
    return FolderProvider(folder=str(tmp_path))


@pytest.fixture
def skyward(capsys: pytest.CaptureFixture[str], url: str) -> Skyward:
    """Run a command line; return its stdout, or its stderr if it must fail."""

    def run(line: str, code: int = 0) -> str:
        assert cli.main(shlex.split(line)) == code
        output = capsys.readouterr()
        if code == cli.FAILED:
            assert "Traceback" not in output.err
            return output.err
        assert output.err == ""
        return output.out

    return run


def open_pool(
    ledger: Ledger,
    clock: Clock,
    provider: FolderProvider,
    pool_id: str,
    *,
    owner: Owner,
    age_seconds: float = 3600,
    machines: int = 1,
    **more: Any,
) -> None:
    """Open a pool with machines at 2 USD an hour each (8 USD on demand), which have run calls since it was opened."""
    began = clock.now - timedelta(seconds=age_seconds)
    now, clock.now = clock.now, began
    try:
        ledger.open_pool(
            pool_id,
            owner=owner,
            provider=provider.to_json(),
            spec_json="{}",
            lease_expires_at=now + timedelta(seconds=100),
            **more,
        )
        tags = {POOL_TAG: pool_id, LAUNCH_TAG: f"{pool_id}-1", RANK_TAG: "0"}
        price = Price(Decimal(2), Decimal(8), is_spot=True)
        requests = [
            ResourceRequest(
                ResourceKind.INSTANCE,
                "folder",
                "here",
                f"{pool_id}-{rank}",
                f"{pool_id}-1-{rank}",
                tags | {RANK_TAG: str(rank)},
                now,
                price,
            )
            for rank in range(machines)
        ]
        intents = ledger.intend_all(pool_id, requests)
        instances = provider.launch(None, machines, tags, "")
        ledger.bind_all({its.id: instance.id for its, instance in zip(intents, instances, strict=True)})
        ledger.note_all({its.id: {Bucket.RUNNING_CALLS: age_seconds} for its in intents})
    finally:
        clock.now = now


def open_named(ledger: Ledger, clock: Clock, provider: FolderProvider, work: Work = NO_WORK) -> None:
    """Open the pool `sky-named` with the name "nightly", which two processes and the owner of a detached call use."""
    open_pool(ledger, clock, provider, "sky-named", owner=HERE)
    for client, its_work, seconds in (("a", NO_WORK, 30.0), ("b", work, 10.0)):
        ledger.names.claim(
            "nightly",
            "sky-named",
            client,
            owner=HERE,
            terms={},
            keep_warm_seconds=60.0,
            lease_seconds=100.0,
            work=its_work,
        )
        ledger.names.opened("nightly", 1)
        ledger.names.renew(client, 100.0, Usage(seconds))
    used = (SlotUse("i", 1, 5.0),)
    ledger.note_calls("sky-named", [CallState("c", "train", "dag", 1, "running", clock.now, None, used)])


def lines(output: str) -> list[list[str]]:
    """The text of a table, by lines and columns."""
    return [re.split(r" {2,}", line.strip()) for line in output.splitlines()]


# ── ps ───────────────────────────────────────────────────────────────────────────────────────────────────────────────


def test_ps_lists_open_pools(skyward: Skyward, ledger: Ledger, clock: Clock, folder: FolderProvider) -> None:
    """Pools are listed oldest first, with state, owner, age and money; ended ones only with --all."""
    open_pool(ledger, clock, folder, "sky-live", owner=HERE, age_seconds=7200, machines=2)
    open_pool(ledger, clock, folder, "sky-dead", owner=DEAD, age_seconds=60)
    open_pool(ledger, clock, folder, "sky-over", owner=HERE, age_seconds=5000)
    ledger.end_pool("sky-over")
    output = lines(skyward("ps"))
    assert output[0] == ["POOL", "STATE", "OWNER", "PROVIDER", "OPEN", "AGE", "LEASE", "USD/H", "COST USD"]
    assert [row[0] for row in output[1:]] == ["sky-live", "sky-dead"]
    assert [output[1][place] for place in (1, 2, 3, 4, 5, 7, 8)] == [
        "live",
        "ada@laptop",
        "folder",
        "2/2",
        "2.0 h",
        "4.00",
        "8.0000",
    ]
    assert output[2][1] == "dead: its owner is dead"
    assert [row[0] for row in lines(skyward("ps --all"))[1:]] == ["sky-live", "sky-over", "sky-dead"]
    assert "the newest 2" in skyward("ps --all --limit 2")


def test_ps_shows_the_calls_of_a_pool_with_a_name_and_for_how_long_there_are_none(
    skyward: Skyward, ledger: Ledger, clock: Clock, folder: FolderProvider
) -> None:
    open_pool(ledger, clock, folder, "sky-named", owner=HERE)
    ledger.names.claim("nightly", "sky-named", "a", owner=HERE, terms={}, keep_warm_seconds=0.0, lease_seconds=900.0)
    ledger.names.opened("nightly", 1)
    ledger.names.renew("a", 900.0, Usage(7.0, calls=3, idle_seconds=0.0))
    (pool,) = json.loads(skyward("ps --json"))
    assert (pool["calls"], pool["idle_since"], pool["idle_seconds"]) == (3, None, None)
    assert lines(skyward("ps"))[1][-1] == "3"
    clock.now += timedelta(seconds=300)
    ledger.names.renew("a", 900.0, Usage(9.0, idle_seconds=240.0))
    (pool,) = json.loads(skyward("ps --json"))
    assert pool["calls"] == 0
    assert datetime.fromisoformat(pool["idle_since"]) == (clock.now - timedelta(seconds=240)).replace(microsecond=0)


def test_ps_shows_the_name_of_a_pool_and_how_many_use_it(
    skyward: Skyward, ledger: Ledger, clock: Clock, folder: FolderProvider
) -> None:
    """`skyward stop` takes the name too."""
    open_pool(ledger, clock, folder, "sky-plain", owner=HERE, age_seconds=7200)
    open_pool(ledger, clock, folder, "sky-named", owner=HERE)
    for client in ("a", "b"):
        ledger.names.claim(
            "nightly", "sky-named", client, owner=HERE, terms={}, keep_warm_seconds=60.0, lease_seconds=100.0
        )
        ledger.names.opened("nightly", 1)
    output = lines(skyward("ps"))
    assert output[0][-4:] == ["NAME", "USERS", "CALLS", "IDLE"]
    assert output[2][-4:-2] == ["nightly", "2"]
    plain, named = json.loads(skyward("ps --json"))
    assert (plain["name"], plain["users"]) == (None, None)
    assert (named["name"], named["users"], named["warm_until"]) == ("nightly", 2, None)
    for client in ("a", "b"):
        ledger.names.leave("nightly", client)
    (pool,) = [one for one in json.loads(skyward("ps --json")) if one["name"]]
    assert datetime.fromisoformat(pool["warm_until"]) == (clock.now + timedelta(seconds=60)).replace(microsecond=0)
    assert "warm until" in skyward("ps")
    skyward("stop nightly")
    assert [row["pool"] for row in json.loads(skyward("ps --json"))] == ["sky-plain"]


def test_ps_as_json_has_the_same_pools(skyward: Skyward, ledger: Ledger, clock: Clock, folder: FolderProvider) -> None:
    """As JSON, with units in the names and times in ISO 8601."""
    open_pool(ledger, clock, folder, "sky-live", owner=HERE, age_seconds=7200, machines=2)
    (pool,) = json.loads(skyward("ps --json"))
    assert (
        pool["pool"],
        pool["state"],
        pool["open_resources"],
        pool["cost_usd"],
        pool["saved_usd"],
        pool["usd_per_hour"],
    ) == (
        "sky-live",
        "live",
        2,
        8.0,
        24.0,
        4.0,
    )
    assert datetime.fromisoformat(pool["created_at"]) == (clock.now - timedelta(hours=2)).replace(microsecond=0)
    assert pool["ended_at"] is None


def test_listings_of_an_empty_ledger_are_one_line(skyward: Skyward) -> None:
    """Each listing says that it is empty, and how to add an entry."""
    assert "no open pools" in skyward("ps")
    assert "skyward budget set" in skyward("budget list")
    assert lines(skyward("cost"))[-1][0] == "total"
    assert skyward("sweep") == "nothing is to be done\n"
    assert json.loads(skyward("ps --json")) == []


# ── cost ─────────────────────────────────────────────────────────────────────────────────────────────────────────────


KEYS = {
    "day": {"2026-11-17", "2026-11-21"},
    "pool": {"sky-a", "sky-b"},
    "owner": {HERE.name, DEAD.name},
    "bucket": {BILLING_ROUNDING, *(bucket.value for bucket in Bucket)},
    "run": {"(no run)"},
    "task": {"(no task)"},
    "asset": {"(no asset)"},
}


@pytest.mark.parametrize("by", KEYS)
def test_the_total_is_the_same_by_each_key(
    skyward: Skyward, ledger: Ledger, clock: Clock, folder: FolderProvider, by: str
) -> None:
    """The total is the same by each key, with what spot has saved."""
    clock.now = datetime(2026, 11, 21, 12, tzinfo=UTC)
    open_pool(ledger, clock, folder, "sky-a", owner=HERE, age_seconds=1800, machines=3)
    open_pool(ledger, clock, folder, "sky-b", owner=DEAD, age_seconds=360_000)
    output = lines(skyward(f"cost --by {by}"))
    assert output[0] == [by.upper(), "RESOURCES", "HOURS", "USD", "ON DEMAND", "SAVED"]
    assert output[-1] == ["total", "4", "101.50", "203.0000", "812.0000", "609.0000"]
    bill = json.loads(skyward(f"cost --by {by} --json"))
    assert {row["key"] for row in bill["rows"]} == KEYS[by]
    assert bill["total"] == {
        "key": "total",
        "resources": 4,
        "seconds": 365_400.0,
        "cost_usd": 203.0,
        "on_demand_usd": 812.0,
        "saved_usd": 609.0,
    }
    assert sum(row["cost_usd"] for row in bill["rows"]) == pytest.approx(203.0)


def test_the_bill_of_some_days(skyward: Skyward, ledger: Ledger, clock: Clock, folder: FolderProvider) -> None:
    """The options select from one day on, and until before another."""
    clock.now = datetime(2026, 11, 21, 12, tzinfo=UTC)
    open_pool(ledger, clock, folder, "sky-a", owner=HERE, age_seconds=3600)
    open_pool(ledger, clock, folder, "sky-b", owner=HERE, age_seconds=86_400 + 3600)
    assert [row[0] for row in lines(skyward("cost"))] == ["DAY", "2026-11-20", "2026-11-21", "total"]
    assert [row[0] for row in lines(skyward("cost --by pool --since 2026-11-21"))] == ["POOL", "sky-a", "total"]
    assert [row[0] for row in lines(skyward("cost --by pool --until 2026-11-21"))] == ["POOL", "sky-b", "total"]


def test_the_cheapest_lines_of_a_bill_are_added_up(
    skyward: Skyward, ledger: Ledger, clock: Clock, folder: FolderProvider
) -> None:
    """Of many lines the most expensive are shown, and the rest in one; the total is that of all."""
    for number in range(4):
        open_pool(ledger, clock, folder, f"sky-{number}", owner=HERE, age_seconds=3600 * (number + 1))
    assert [(row[0], row[3]) for row in lines(skyward("cost --by pool --limit 2"))[1:]] == [
        ("sky-2", "6.0000"),
        ("sky-3", "8.0000"),
        ("(2 others)", "6.0000"),
        ("total", "20.0000"),
    ]


# ── sweep and stop ───────────────────────────────────────────────────────────────────────────────────────────────────


def test_a_sweep_is_dry_without_yes(skyward: Skyward, ledger: Ledger, clock: Clock, folder: FolderProvider) -> None:
    """Without --yes it says what it would do and why, and exits with 3. With --yes it does it; then there is nothing to
    do.
    """
    open_pool(ledger, clock, folder, "sky-dead", owner=DEAD, machines=2)
    open_pool(ledger, clock, folder, "sky-live", owner=HERE)
    output = skyward("sweep", code=3)
    assert ["end", "sky-dead"] in [row[:2] for row in lines(output)]
    assert "its owner is dead" in output
    assert "skyward sweep --yes" in output
    assert len(folder.instances()) == 3
    would = json.loads(skyward("sweep --json", code=3))
    assert (would["is_dry_run"], [finding["action"] for finding in would["findings"]], would["ended"]) == (
        True,
        ["end", "leave"],
        [],
    )
    assert skyward("sweep --yes").splitlines()[-1] == "machines of 1 pool ended"
    assert [instance.pool_id for instance in folder.instances()] == ["sky-live"]
    assert "nothing is to be done" in skyward("sweep")


def test_a_sweep_reports_what_it_has_done(
    skyward: Skyward, ledger: Ledger, clock: Clock, folder: FolderProvider
) -> None:
    """Ended, closed and adopted are separate, in text and in JSON."""
    for number in range(2):
        open_pool(ledger, clock, folder, f"sky-gone-{number}", owner=DEAD)
        folder.terminate([instance.id for instance in folder.instances()])
    open_pool(ledger, clock, folder, "sky-dead", owner=DEAD)
    output = skyward("sweep --yes")
    assert output.splitlines()[-1] == "machines of 1 pool ended; entries of 2 pools closed, nothing of which was there"
    open_pool(ledger, clock, folder, "sky-gone-2", owner=DEAD)
    folder.terminate([instance.id for instance in folder.instances()])
    report = json.loads(skyward("sweep --yes --json"))
    assert ([finding["pool"] for finding in report["closed"]], report["ended"], report["adopted"]) == (
        ["sky-gone-2"],
        [],
        [],
    )
    assert ledger.pools() == []


def test_a_sweep_lists_the_providers_of_its_options(
    skyward: Skyward, ledger: Ledger, folder: FolderProvider, tmp_path: Path
) -> None:
    """They are given by name, or as JSON with fields.

    Machines that are in no ledger stay until they are old, and another user's machines unless `--unknown` is given.
    """
    (tmp_path / "other").mkdir()
    other = FolderProvider(folder=str(tmp_path / "other"))
    other.launch(None, 1, {POOL_TAG: "sky-stranger", RANK_TAG: "0"}, "")
    assert skyward("sweep") == "nothing is to be done\n"
    where = shlex.quote(json.dumps({"name": "folder", "folder": other.folder}))
    assert "another user" not in skyward(f"sweep --provider {where}")
    assert ["end", "sky-stranger"] in [
        row[:2] for row in lines(skyward(f"sweep --provider {where} --unknown --min-age 0", code=3))
    ]
    assert "nonesuch" in skyward("sweep --provider nonesuch", code=1)
    assert "--provider {" in skyward("sweep --provider '{'", code=1)


def test_a_pool_is_stopped_by_its_id(skyward: Skyward, ledger: Ledger, clock: Clock, folder: FolderProvider) -> None:
    """This holds for a live pool and a dead one. The error for an unknown pool says where to look."""
    open_pool(ledger, clock, folder, "sky-live", owner=HERE, machines=2)
    assert re.fullmatch(
        r"sky-live has ended: 2 machines ended \(sky-live\S+, sky-live\S+\); nothing of it is left\n",
        skyward("stop sky-live"),
    )
    assert folder.instances() == []
    assert ledger.open_intents() == []
    assert "skyward ps --all" in skyward("stop sky-nowhere", code=1)


def test_a_stop_reports_whether_it_has_ended_machines(
    skyward: Skyward, ledger: Ledger, clock: Clock, folder: FolderProvider
) -> None:
    """For an unknown pool, and for one without machines, it does not report an end."""
    where = shlex.quote(json.dumps({"name": "folder", "folder": folder.folder}))
    assert skyward(f"stop nope --provider {where}").startswith(
        "nothing was ended: the ledger has no pool 'nope', and folder lists no machine of it"
    )
    open_pool(ledger, clock, folder, "sky-gone", owner=DEAD)
    folder.terminate([instance.id for instance in folder.instances()])
    assert skyward("stop sky-gone") == "sky-gone has ended; there was no machine of it to end\n"
    folder.launch(None, 1, {POOL_TAG: "sky-stranger", RANK_TAG: "0"}, "")
    assert "1 machine ended" in skyward(f"stop sky-stranger --provider {where}")


def test_a_receipt_is_json(skyward: Skyward, ledger: Ledger, clock: Clock, folder: FolderProvider) -> None:
    """It has the state of each resource; an unknown pool has no receipt."""
    open_pool(ledger, clock, folder, "sky-1", owner=HERE, machines=2)
    skyward("stop sky-1")
    output = json.loads(skyward("receipt sky-1"))
    assert output["pool_id"] == "sky-1"
    assert len(output["resources"]) == 2
    assert output["left"] == []
    assert "sky-nowhere" in skyward("receipt sky-nowhere", code=1)


# ── budgets ──────────────────────────────────────────────────────────────────────────────────────────────────────────


def test_a_budget_is_set_and_listed(skyward: Skyward, ledger: Ledger, clock: Clock, folder: FolderProvider) -> None:
    """The list has the money spent, reserved and left in this period. A limit for each run has no sum."""
    assert skyward("budget set team --limit 100 --per day") == "team: 100 USD per day\n"
    skyward("budget set runs --limit 5.50 --per run")
    assert ledger.accounts() == [
        Account("runs", Decimal("5.50"), Period.RUN),
        Account("team", Decimal(100), Period.DAY),
    ]
    open_pool(ledger, clock, folder, "sky-1", owner=HERE, account="team")
    ledger.settle(ledger.reserve("team", "sky-1", Decimal(10)), Decimal(4))
    ledger.reserve("team", "sky-1", Decimal(7))
    output = lines(skyward("budget list"))
    assert output[0] == ["ACCOUNT", "PER", "LIMIT USD", "SPENT", "RESERVED", "LEFT"]
    assert output[2] == ["team", "day", "100.0000", "4.0000", "7.0000", "89.0000"]
    runs, team = json.loads(skyward("budget list --json"))
    assert (runs["spent_usd"], runs["left_usd"], team["left_usd"]) == (None, None, 89.0)
    skyward("budget set team --limit 20 --per day")
    assert json.loads(skyward("budget list --json"))[1]["left_usd"] == 9.0


# ── errors and exit codes ────────────────────────────────────────────────────────────────────────────────────────────


@pytest.mark.parametrize(
    "line",
    [
        "",
        "nonesuch",
        "cost --by colour",
        "cost --since yesterday",
        "ps --limit 0",
        "budget set a --limit -1 --per day",
        "budget set a --limit nan --per day",
        "budget set a --limit 1 --per hour",
        "stop",
    ],
)
def test_a_wrong_command_line_is_no_traceback(line: str, url: str, capsys: pytest.CaptureFixture[str]) -> None:
    """Exit code 2, with the valid choices."""
    with pytest.raises(SystemExit) as caught:
        cli.main(shlex.split(line))
    assert caught.value.code == 2
    assert "Usage: skyward" in capsys.readouterr().err


def test_a_ledger_that_cannot_be_used_is_one_line(skyward: Skyward, tmp_path: Path) -> None:
    """It names the problem and what to try."""
    (tmp_path / "text").write_text("no ledger at all, and longer than the header of one\n" * 20)
    output = skyward(f"--ledger sqlite:///{tmp_path}/text ps", code=1)
    assert output.startswith("skyward: ")
    assert output.count("\n") == 1
    assert "damaged" in output


def test_the_parser_accepts_the_commands_of_the_page() -> None:
    """The parser accepts each command line of docs/commands.md.

    Looks inside: to run the commands would do what they say.
    """
    shown = re.findall(r"^(?:\$ )?skyward (.+)$", (ROOT / "docs" / "commands.md").read_text(), re.MULTILINE)
    assert len(shown) > 8
    for line in shown:
        understood(command_tree(), shlex.split(line, comments=True))


def understood(command: Any, words: list[str], parent: Any = None) -> None:
    """Parse a command line without running it; a line that the parser refuses raises."""
    with command.make_context("skyward", words, parent=parent) as context:
        if hasattr(command, "commands"):
            _, found, rest = command.resolve_command(context, [*context._protected_args, *context.args])
            understood(found, rest, context)
