"""The `skyward` command as a user types it: its output, its effects, and its exit codes."""

import json
import re
import shlex
from collections.abc import Mapping
from datetime import UTC, datetime, timedelta
from decimal import Decimal
from pathlib import Path
from typing import Any

import pytest

import skyward_core as sky
from skyward_core import cli
from skyward_core.cli.app import command_tree
from skyward_core.ledger.ledger import Ledger
from skyward_core.ledger.rows import BILLING_ROUNDING, Account, Attempt, Bucket, CallState, Period, SlotUse
from skyward_core.machines.offers import Offer
from skyward_core.providers.base import POOL_TAG, RANK_TAG
from skyward_core.work import Work
from tests.cleanup.pools import FolderProvider
from tests.cli.ledger import DEAD, HERE, ROOT, Clock, Skyward, install, lines, open_named, open_pool

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


def test_the_table_has_states_costs_and_their_sum(
    skyward: Skyward, ledger: Ledger, clock: Clock, folder: FolderProvider
) -> None:
    """A call whose end no process has seen says when its pool has ended. Filters narrow the list and the sum."""
    assert "no such detached calls" in skyward("calls")
    open_pool(ledger, clock, folder, "sky-1", owner=HERE)
    (machine,) = folder.instances()
    price = float(ledger.intents(pool_id="sky-1")[0].price.per_hour)
    hour = SlotUse(machine.id, 1, 3600.0)
    started = clock.now - timedelta(days=2)
    ledger.note_calls("sky-1", [CallState("a", "train", "dag/run", 2, "ended", clock.now, clock.now, (hour, hour))])
    ledger.note_calls("sky-1", [CallState("b", "score", "other", 1, "running", started, used=(hour,))])
    skyward("stop sky-1")
    oldest, newest, total = (line.split() for line in skyward("calls").splitlines()[1:])
    assert [oldest[0], newest[0], total[:2]] == ["b", "a", ["2", "calls"]]
    assert "unknown end (pool ended " in skyward("calls --owner other")
    assert [float(line[-1]) for line in (oldest, newest, total)] == [price, 2 * price, 3 * price]
    found = json.loads(skyward("calls --json --owner dag"))
    assert ([call["call"] for call in found["calls"]], found["cost_usd"]) == (["a"], 2 * price)
    assert json.loads(skyward("calls --json --pool sky-2")) == {"calls": [], "cost_usd": 0.0}
    since = (clock.now - timedelta(days=1)).date()
    assert [call["call"] for call in json.loads(skyward(f"calls --json --since {since}"))["calls"]] == ["a"]
    assert len(skyward("calls --limit 1").splitlines()) == 3


def test_users_of_a_pool_are_shown_by_its_name(
    skyward: Skyward, ledger: Ledger, clock: Clock, folder: FolderProvider
) -> None:
    """Two USD were spent while calls ran: three quarters for one process, a quarter for the other."""
    open_named(ledger, clock, folder, Work(system="cron", run="2"))
    rows = lines(skyward("users nightly"))
    assert rows[0] == ["USER", "STATE", "SINCE", "SLOT SECONDS", "SHARE", "COST USD", "WORK"]
    assert [row[0] for row in rows[1:]] == [HERE.name, HERE.name, "detached calls of dag", "(no calls)", "total"]
    assert [row[3:6] for row in rows[1:3]] == [["30.0", "66.7%", "1.3333"], ["10.0", "22.2%", "0.4444"]]
    assert rows[2][-1] == "cron:2"
    assert rows[-1][-1] == "2.0000"
    assert lines(skyward("users sky-named")) == rows


def test_a_pool_in_use_is_kept_warm_when_it_is_left(
    skyward: Skyward, ledger: Ledger, clock: Clock, folder: FolderProvider
) -> None:
    open_named(ledger, clock, folder)
    words = "nightly (sky-named) is in use; it stays warm for 2.0 h when the last process has left it\n"
    assert skyward("warm nightly --for 2h") == words
    found: Mapping[str, Any] = json.loads(skyward("warm nightly --for 90m --json"))
    assert found == {
        "name": "nightly",
        "pool": "sky-named",
        "state": "in use",
        "warm_until": None,
        "keep_warm_seconds": 5400,
    }


def test_a_name_without_a_pool_is_an_error(skyward: Skyward, ledger: Ledger) -> None:
    assert "no pool with the name 'nonesuch'" in skyward("warm nonesuch --for 2h", code=cli.FAILED)


@pytest.mark.parametrize("time", ["2", "0h", "-1h", "2 weeks", "h", "nan h", "nanh", "1e99d"])
def test_what_is_no_duration_is_refused(time: str, url: str, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as caught:
        cli.main(["warm", "nightly", "--for", time])
    assert caught.value.code == 2
    assert "duration such as" in capsys.readouterr().err.replace("\n", " ")


def test_why_lists_every_attempt(skyward: Skyward, ledger: Ledger, clock: Clock, folder: FolderProvider) -> None:
    """They are in order, with the provider's own messages. A pool without attempts is reported, an unknown one is an
    error.
    """
    open_pool(ledger, clock, folder, "sky-1", owner=HERE)
    assert "sky-1 has not tried" in skyward("why sky-1")
    refused = Attempt(
        "sky-1",
        clock.now,
        "aws",
        "us-east-1",
        "p5.48xlarge",
        is_spot=True,
        seconds=2.13,
        error="NoCapacity",
        code="Insufficient",
        message="none\nat all",
    )
    rented = Attempt("sky-1", clock.now, "runpod", "any", "H100 x8", is_spot=False, seconds=9.0)
    ledger.note_attempts([refused, rented])
    head, first, second = lines(skyward("why sky-1"))
    assert head == ["AT", "PROVIDER", "REGION", "TYPE", "MARKET", "SECONDS", "OUTCOME", "CODE", "REASON"]
    assert first[1:] == ["aws", "us-east-1", "p5.48xlarge", "spot", "2.1", "NoCapacity", "Insufficient", "none at all"]
    assert second[1:] == ["runpod", "any", "H100 x8", "on demand", "9.0", "rented"]
    output = json.loads(skyward("why sky-1 --json"))
    assert [(one["error"], one["code"], one["seconds"]) for one in output] == [
        ("NoCapacity", "Insufficient", 2.13),
        (None, None, 9.0),
    ]
    assert "sky-nowhere" in skyward("why sky-nowhere", code=1)


def test_offers_are_listed_with_their_age(skyward: Skyward, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """The cheapest is first. A search without offers fails, and the error has the reason."""
    sold = [
        Offer(
            provider="folder",
            instance_type=f"t{n}",
            region="here",
            price_per_hour=float(n),
            vcpus=n,
            memory_gb=8,
            accelerator="L4",
            accelerators=1,
            accelerator_memory_gb=24,
        )
        for n in (3, 1, 2)
    ]
    monkeypatch.setattr(FolderProvider, "offers", lambda self, want: sold)
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    head, *offers, age = lines(skyward("offers --accelerator L4 --max-price 2.5"))
    assert head[:5] == ["PROVIDER", "REGION", "TYPE", "MARKET", "USD/H"]
    assert [(offer[2], offer[3], offer[4], offer[7]) for offer in offers] == [
        ("t1", "on demand", "1.0000", "1 x L4 24GB"),
        ("t2", "on demand", "2.0000", "1 x L4 24GB"),
    ]
    assert age[0].startswith("2 in all; queried ")
    output = json.loads(skyward("offers --json --limit 1"))
    assert output["age_seconds"] < 300
    assert [offer["instance_type"] for offer in output["offers"]] == ["t1"]
    assert "the cheapest 1 of 3" in skyward("offers --limit 1")
    assert "does not report its architecture" in skyward("offers --architecture arm64", code=1)
    assert "has 1 of them" in skyward("offers --accelerator L4 --count 8", code=1)


@pytest.fixture
def asked(monkeypatch: pytest.MonkeyPatch) -> list[object]:
    """Sell one type at 2 USD per hour; return the requests for offers."""
    requests: list[object] = []
    sold = [Offer(provider="folder", instance_type="t", region="here", price_per_hour=2.0, vcpus=4, memory_gb=8)]

    def offers(_: FolderProvider, want: object) -> list[Offer]:
        requests.append(want)
        return sold

    monkeypatch.setattr(FolderProvider, "offers", offers)
    return requests


def test_each_task_has_its_candidates_its_price_and_its_ceiling(
    skyward: Skyward, monkeypatch: pytest.MonkeyPatch, asked: list[object]
) -> None:
    """The ceiling comes from `max_cost`, `max_lifetime` and the task's timeout, the lowest of them. That of a run
    counts tries and mapped tasks. Tasks with equal hardware share the providers' answers; nothing is rented.
    """
    tasks = (
        sky.PlannedTask("nightly", "train", sky.PoolSpec.of(nodes=2, max_cost=3.0), tries=2),
        sky.PlannedTask("nightly", "score", sky.PoolSpec.of(nodes=2), timeout_seconds=1800, instances=3),
        sky.PlannedTask("other", "embed", sky.PoolSpec.of(nodes=2, max_lifetime=900, max_cost=3.0)),
        sky.PlannedTask("free", "play", sky.PoolSpec.of(nodes=2)),
        sky.PlannedTask("free", "guess", None, reason="accelerator is a template"),
    )
    install(monkeypatch, cron=lambda target: sky.Plan(tasks) if target == "jobs/" else None)
    monkeypatch.setattr(FolderProvider, "launch", lambda *_: pytest.fail("rented"))
    head, *rows = lines(skyward("quote jobs/"))
    assert head[:5] == ["WORKFLOW", "TASK", "TASKS", "TRIES", "ASKS FOR"]
    assert rows[0][:3] == ["cron:nightly", "train", "1"]
    assert rows[0][-2:] == ["4.0000", "6.0000"]
    assert rows[1][-2:] == ["4.0000", "6.0000"]
    assert rows[2][-2:] == ["4.0000", "1.0000"]
    assert "not known: accelerator is a template" in " ".join(rows[4])
    shown = skyward("quote jobs/")
    assert "cron:nightly: a run costs at most 12.0000 USD" in shown
    assert "cron:free: the cost of a run is not limited, or not known, in 2 tasks: play, guess" in shown
    assert len(asked) == 2, "once for each command"
    found = json.loads(skyward("quote jobs/ --json"))
    assert [(one["ceiling_usd"], one["run_ceiling_usd"]) for one in found["tasks"]] == [
        (3.0, 6.0),
        (2.0, 6.0),
        (1.0, 1.0),
        (None, None),
        (None, None),
    ]
    assert [one["ceiling_usd"] for one in found["workflows"]] == [12.0, 1.0, None]


def test_a_pool_that_could_not_be_opened_is_a_fault(
    skyward: Skyward, monkeypatch: pytest.MonkeyPatch, asked: list[object]
) -> None:
    """So is a definition that cannot be read. All other tasks are shown."""
    tasks = (
        sky.PlannedTask("w", "huge", sky.PoolSpec.of(cpu=1000)),
        sky.PlannedTask("w", "old", sky.PoolSpec.of(image=sky.Image(python="3.9"))),
    )
    install(monkeypatch, cron=lambda _: sky.Plan(tasks, ("jobs/bad.py: SyntaxError",)))
    errors = skyward("quote jobs/", code=1)
    assert "cron:w/huge: nothing to rent" in errors
    assert "cron:w/old: the image wants Python 3.9" in errors
    assert "cron: jobs/bad.py: SyntaxError" in errors


def test_the_bill_of_some_days(skyward: Skyward, ledger: Ledger, clock: Clock, folder: FolderProvider) -> None:
    """The options select from one day on, and until before another."""
    clock.now = datetime(2026, 11, 21, 12, tzinfo=UTC)
    open_pool(ledger, clock, folder, "sky-a", owner=HERE, age_seconds=3600)
    open_pool(ledger, clock, folder, "sky-b", owner=HERE, age_seconds=86_400 + 3600)
    assert [row[0] for row in lines(skyward("cost"))] == ["DAY", "2026-11-20", "2026-11-21", "total"]
    assert [row[0] for row in lines(skyward("cost --by pool --since 2026-11-21"))] == ["POOL", "sky-a", "total"]
    assert [row[0] for row in lines(skyward("cost --by pool --until 2026-11-21"))] == ["POOL", "sky-b", "total"]


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
