"""The `skyward` command as a user types it: its output, its effects, and its exit codes."""

import json
import re
import shlex
from datetime import UTC, datetime, timedelta
from decimal import Decimal
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

import skyward_core as sky
from skyward_core import cli
from skyward_core.cli.app import command_tree
from skyward_core.cli.printing import iso
from skyward_core.ledger.receipt import receipt
from skyward_core.ledger.rows import BILLING_ROUNDING, Account, Attempt, Bucket, CallState, Period, SlotUse
from skyward_core.ledger.uses import UseCount
from skyward_core.machines.offers import Offer
from skyward_core.machines.owner import Owner
from skyward_core.providers.base import POOL_TAG, RANK_TAG
from skyward_core.provisioning import quote as plans
from skyward_core.work import Work
from tests.cleanup.pools import FolderProvider
from tests.cli.ledger import DEAD, HERE, Skyward, install, install_bills, lines
from tests.cli.lines import lines_of_the_pages, understood

# ── pools and their users ────────────────────────────────────────────────────────────────────────────────────────────


def test_ps_lists_open_pools(skyward: Skyward) -> None:
    """Oldest first, with state, owner, age and money; ended ones only with --all."""
    skyward.open("sky-live", age_seconds=7200, machines=2)
    skyward.open("sky-dead", owner=DEAD, age_seconds=60)
    skyward.open("sky-over", age_seconds=5000)
    skyward.ledger.end_pool("sky-over")
    head, live, dead = lines(skyward("ps"))
    assert head == ["POOL", "STATE", "OWNER", "PROVIDER", "OPEN", "AGE", "LEASE", "USD/H", "COST USD"]
    assert [*live[:6], *live[7:]] == ["sky-live", "live", "ada@laptop", "folder", "2/2", "2.0 h", "4.00", "8.0000"]
    assert dead[:2] == ["sky-dead", "dead: its owner is dead"]
    assert [row[0] for row in lines(skyward("ps --all"))[1:]] == ["sky-live", "sky-over", "sky-dead"]
    assert "the newest 2" in skyward("ps --all --limit 2")


def test_ps_all_has_the_dates_of_each_pool(skyward: Skyward, monkeypatch: pytest.MonkeyPatch) -> None:
    """In UTC, as in other commands. On 120 columns no row of pools without a name is folded."""
    skyward.open("sky-0123456789ab", age_seconds=7200)
    skyward.ledger.end_pool("sky-0123456789ab")
    skyward.open("sky-ba9876543210", owner=DEAD, age_seconds=5400)
    ended, dead = skyward.json("ps --all")
    monkeypatch.setenv("COLUMNS", "120")
    monkeypatch.setenv("FORCE_COLOR", "1")  # rich takes stdout for a terminal
    head, *rows = lines(skyward("ps --all"))
    assert head == ["POOL", "STATE", "OWNER", "PROVIDER", "OPEN", "BEGAN", "USD/H", "COST USD"]
    assert [row[:2] for row in rows] == [[ended["pool"], f"ended {ended['ended_at']}"], [dead["pool"], dead["state"]]]
    assert [row[5] for row in rows] == [iso(skyward.clock.now - timedelta(hours=hours)) for hours in (2, 1.5)]
    assert max(map(len, skyward("ps --all").splitlines())) <= 120


def test_ps_says_up_to_how_much_a_pool_may_have_cost_that_no_process_keeps(skyward: Skyward) -> None:
    """Nobody records what its machines cost; these began an hour before what is recorded of them."""
    for pool, owner in (("sky-dead", DEAD), ("sky-warm", DEAD), ("sky-live", HERE)):
        skyward.open(pool, owner=owner, age_seconds=1800, machines=2)
    earlier = "intended_microseconds - (CASE pool_id WHEN 'sky-live' THEN 30 ELSE 3600 END) * 1000000"
    skyward.damage(f"UPDATE skyward_resources SET intended_microseconds = {earlier}")
    skyward.damage("UPDATE skyward_pools SET lives_by_lease = 1 WHERE id = 'sky-warm'")
    found = {one["pool"]: one for one in skyward.json("ps")}
    assert {one["cost_usd"] for one in found.values()} == {2.0}
    assert found["sky-dead"]["unrecorded_usd"] == pytest.approx(4.0, abs=0.05)
    assert found["sky-warm"]["unrecorded_usd"] == pytest.approx(4.0, abs=0.05)
    assert found["sky-live"]["unrecorded_usd"] == 0.0, "its owner records it within seconds"
    costs = {row[0]: row[-1] for row in lines(skyward("ps"))[1:]}
    assert costs["sky-dead"].startswith("up to 6.0")
    assert costs["sky-warm"].startswith("up to 6.0")
    assert costs["sky-live"] == "2.0000"
    ended = "lease_expires_microseconds = (SELECT min(intended_microseconds) FROM skyward_resources) + 1800 * 1000000"
    skyward.damage(f"UPDATE skyward_pools SET {ended} WHERE id = 'sky-warm'")
    (warm,) = [one for one in skyward.json("ps") if one["pool"] == "sky-warm"]
    assert warm["state"].startswith("dead: its lease ran out")
    assert warm["unrecorded_usd"] == 0.0, "the machines have ended themselves with the lease"


def test_a_pool_that_may_outlive_its_owner_is_live_as_long_as_that_lives(skyward: Skyward) -> None:
    skyward.open("sky-team", owner=Owner.here())
    skyward.open("sky-left")
    skyward.damage("UPDATE skyward_pools SET lives_by_lease = 1")
    assert {one["pool"]: one["state"] for one in skyward.json("ps")} == {
        "sky-team": "live",
        "sky-left": "live, by its lease",
    }


def test_a_pool_with_a_name_shows_it_and_how_many_use_it(skyward: Skyward) -> None:
    """`stop`, `users`, `why` and `receipt` take the name too. What no call has used of two USD is a row of the pool."""
    skyward.open("sky-plain", age_seconds=7200)
    skyward.open_named(Work(system="cron", run="2"))
    output = lines(skyward("ps"))
    assert output[0][-4:] == ["NAME", "USERS", "CALLS", "IDLE"]
    assert "nightly  2 " in " ".join(f"{word} " for word in output[2])
    plain, named = skyward.json("ps")
    assert (plain["name"], plain["users"]) == (None, None)
    assert (named["name"], named["users"], named["warm_until"]) == ("nightly", 2, None)
    rows = lines(skyward("users nightly"))
    assert rows[0] == ["USER", "PID", "STATE", "SINCE", "SLOT SECONDS", "SHARE", "COST USD", "WORK"]
    assert [row[0] for row in rows[1:]] == [HERE.name, HERE.name, "detached calls of dag", "pool nightly", "total"]
    assert rows[1][1] == str(HERE.pid)
    assert [row[4:7] for row in rows[1:3]] == [["30.0", "15.0%", "0.3000"], ["10.0", "5.0%", "0.1000"]]
    assert rows[4][1] == "1.6000"
    split = lines(skyward("users nightly --split"))
    assert [row[6] for row in split[1:3]] == ["1.5000", "0.5000"]
    assert split[4][1] == "0.0000"
    assert (rows[2][-1], rows[-1][-1]) == ("cron:2", "2.0000")
    assert lines(skyward("users sky-named")) == rows
    for command in ("why", "receipt"):
        assert skyward(f"{command} nightly") == skyward(f"{command} sky-named")
    for client in ("a", "b"):
        skyward.ledger.names.leave("nightly", client)
    (pool,) = [one for one in skyward.json("ps") if one["name"]]
    warm_until = (skyward.clock.now + timedelta(seconds=60)).replace(microsecond=0)
    assert datetime.fromisoformat(pool["warm_until"]) == warm_until
    assert "warm until" in skyward("ps")
    skyward("stop nightly")
    assert [row["pool"] for row in skyward.json("ps")] == ["sky-plain"]


def test_what_no_call_has_used_of_a_pool_is_never_negative(skyward: Skyward) -> None:
    """What calls have held is noted some seconds before the time of their machines; it counts in full."""
    skyward.open_named()
    skyward.clock.now += timedelta(hours=3)
    skyward.ledger.uses.write(counts={"a": UseCount(500.0, 5.0)})
    found = skyward.json("users nightly")
    assert (found["calls_cost_usd"], found["rest_usd"], found["cost_usd"]) == (5.1, 0.0, 5.1)
    assert lines(skyward("users nightly"))[4] == ["pool nightly", "0.0000"]
    by_run = {row["key"]: row["cost_usd"] for row in skyward.json("cost --by run")["rows"]}
    assert (by_run["(no run)"], by_run["pool nightly"]) == (5.1, 0.0)


def test_a_pool_in_use_is_kept_warm_when_it_is_left(skyward: Skyward) -> None:
    skyward.open_named()
    words = "nightly (sky-named) is in use; it stays warm for 2.0 h when the last process has left it\n"
    assert skyward("warm nightly --for 2h") == words
    known = {"name": "nightly", "pool": "sky-named", "state": "in use", "warm_until": None}
    assert skyward.json("warm nightly --for 90m") == {**known, "keep_warm_seconds": 5400}
    assert "no pool with the name 'nonesuch'" in skyward("warm nonesuch --for 2h", code=cli.FAILED)


@pytest.mark.parametrize("time", ["2", "0h", "-1h", "2 weeks", "h", "nan h", "nanh", "1e99d"])
def test_what_is_no_duration_is_refused(time: str, skyward: Skyward) -> None:
    assert "duration such as" in skyward.refused(["warm", "nightly", "--for", time]).replace("\n", " ")


def test_calls_have_states_costs_and_their_sum(skyward: Skyward) -> None:
    """A call whose end no process has seen says when its pool has ended. Filters narrow the list and the sum."""
    assert "no such detached calls" in skyward("calls")
    skyward.open("sky-1")
    (machine,), ledger, now = skyward.folder.instances(), skyward.ledger, skyward.clock.now
    price = float(ledger.intents(pool_id="sky-1")[0].price.per_hour)
    hour = SlotUse(machine.id, 1, 3600.0)
    ledger.note_calls("sky-1", [CallState("a", "train", "dag/run", 2, "ended", now, now, (hour, hour))])
    ledger.note_calls("sky-1", [CallState("b", "score", "other", 1, "running", now - timedelta(days=2), used=(hour,))])
    skyward("stop sky-1")
    oldest, newest, total = (line.split() for line in skyward("calls").splitlines()[1:])
    assert [oldest[0], newest[0], total[:2]] == ["b", "a", ["2", "calls"]]
    assert "unknown end (pool ended " in skyward("calls --owner other")
    assert [float(line[-1]) for line in (oldest, newest, total)] == [price, 2 * price, 3 * price]
    found = skyward.json("calls --owner dag")
    assert ([call["call"] for call in found["calls"]], found["cost_usd"]) == (["a"], 2 * price)
    assert skyward.json("calls --pool sky-2") == {"calls": [], "cost_usd": 0.0}
    since = (now - timedelta(days=1)).date()
    for since in (since, "36h", "1.5d"):
        assert [call["call"] for call in skyward.json(f"calls --since {since}")["calls"]] == ["a"]
    assert len(skyward("calls --limit 1").splitlines()) == 3


# ── money ────────────────────────────────────────────────────────────────────────────────────────────────────────────

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
def test_the_total_is_the_same_by_each_key(skyward: Skyward, by: str) -> None:
    skyward.clock.now = datetime(2026, 11, 21, 12, tzinfo=UTC)
    skyward.open("sky-a", age_seconds=1800, machines=3)
    skyward.open("sky-b", owner=DEAD, age_seconds=360_000)
    output = lines(skyward(f"cost --by {by}"))
    assert output[0] == [by.upper(), "RESOURCES", "HOURS", "USD", "ON DEMAND", "SAVED"]
    assert output[-1] == ["total", "4", "101.50", "203.0000", "812.0000", "609.0000"]
    bill = skyward.json(f"cost --by {by}")
    assert {row["key"] for row in bill["rows"]} == KEYS[by]
    money = {"cost_usd": 203.0, "on_demand_usd": 812.0, "saved_usd": 609.0}
    assert bill["total"] == {"key": "total", "resources": 4, "seconds": 365_400.0, **money}
    assert sum(row["cost_usd"] for row in bill["rows"]) == pytest.approx(203.0)


def test_a_ledger_is_written_to_a_file_and_read_back(skyward: Skyward, tmp_path: Path) -> None:
    """A restore shows first what it would do, and is refused while a pool lives or the ledger is open."""
    skyward.open("sky-live")
    file = tmp_path / "kept.db"
    assert skyward(f"ledger backup {file}").startswith(f"written: {file}, version ")
    assert "--yes does it" in skyward(f"ledger restore {file}", code=cli.TO_DO)
    assert "pools of the ledger live" in skyward(f"ledger restore {file} --yes", code=cli.FAILED)
    skyward.ledger.end_pool("sky-live")
    assert "another process has the ledger" in skyward(f"ledger restore {file} --yes", code=cli.FAILED)
    skyward.ledger.close()
    assert skyward(f"ledger restore {file} --yes").startswith(f"restored: {file}, version ")
    assert "sky-live" in skyward("ps")


def test_the_bill_of_some_days(skyward: Skyward) -> None:
    skyward.clock.now = datetime(2026, 11, 21, 12, tzinfo=UTC)
    skyward.open("sky-a")
    skyward.open("sky-b", age_seconds=86_400 + 3600)
    assert [row[0] for row in lines(skyward("cost"))] == ["DAY", "2026-11-20", "2026-11-21", "total"]
    assert [row[0] for row in lines(skyward("cost --by pool --since 2026-11-21"))] == ["POOL", "sky-a", "total"]
    assert [row[0] for row in lines(skyward("cost --by pool --until 2026-11-21"))] == ["POOL", "sky-b", "total"]


def test_a_receipt_has_each_machine_the_buckets_and_what_is_left(skyward: Skyward) -> None:
    skyward.clock.now = datetime(2026, 11, 21, 12, tzinfo=UTC)
    skyward.open("sky-1", machines=2, account="team", work=Work(system="cron", workflow="nightly", run="7"))
    ids = [intent.cloud_id or "" for intent in skyward.ledger.intents(pool_id="sky-1")]
    title, heads, *rows = lines(skyward("receipt sky-1"))
    assert title == ["sky-1 of ada@laptop for cron:nightly/7, from 2026-11-21T11:00:00Z until now, so far"]
    assert heads == ["NODE", "MACHINE", "TYPE", "REGION", "REQUESTED", "ENDED", "SECONDS", "USD"]
    requested = ["here", "2026-11-21T11:00:00Z"]
    assert rows[:3] == [
        ["0", ids[0], *requested, "3600.0", "2.0000"],
        ["1", ids[1], *requested, "3600.0", "2.0000"],
        ["total", "7200.0", "4.0000"],
    ]
    assert rows[3:7] == [
        [""],
        ["BUCKET", "SECONDS", "USD", "ON DEMAND"],
        ["running calls", "7200.0", "4.0000", "16.0000"],
        ["total", "7200.0", "4.0000", "16.0000"],
    ]
    left = f"left: 2 machines, not known to be gone ({ids[0]}, {ids[1]})"
    assert rows[7:] == [[""], ["saved: 12.0000 USD, beside machines on demand"], ["paid by: account team"], [left]]
    skyward("stop sky-1")
    ended = skyward("receipt sky-1")
    until = f"until {skyward.json('receipt sky-1')['ended_at'][:19]}Z"
    assert ended.splitlines()[0].endswith(f"from 2026-11-21T11:00:00Z {until}")
    assert ended.endswith("\nnothing is left: each machine is known to be gone\n")
    assert re.fullmatch(r"20\d\d-\d\d-\d\dT[\d:]{8}Z", lines(ended)[2][4])


def test_a_receipt_of_a_pool_that_has_rented_nothing(skyward: Skyward) -> None:
    skyward.open("sky-none", machines=0)
    assert skyward("receipt sky-none").splitlines()[1:] == ["nothing was rented"]


def test_a_receipt_as_json_is_that_of_the_pool(skyward: Skyward) -> None:
    skyward.open("sky-1", machines=2)
    skyward("stop sky-1")
    data = skyward.json("receipt sky-1")
    assert data == receipt(skyward.ledger, "sky-1")
    assert (data["pool_id"], len(data["resources"]), data["left"]) == ("sky-1", 2, [])
    assert "sky-nowhere" in skyward("receipt sky-nowhere", code=1)


def test_a_budget_is_set_and_listed(skyward: Skyward) -> None:
    """With the money spent, reserved and left in this period. A limit for each run has no sum."""
    ledger = skyward.ledger
    assert skyward("budget set team --limit 100 --per day") == "team: 100 USD per day\n"
    skyward("budget set runs --limit 5.50 --per run")
    accounts = [Account("runs", Decimal("5.50"), Period.RUN), Account("team", Decimal(100), Period.DAY)]
    assert ledger.accounts() == accounts
    skyward.open("sky-1", account="team")
    ledger.settle(ledger.reserve("team", "sky-1", Decimal(10)), Decimal(4))
    ledger.reserve("team", "sky-1", Decimal(7))
    output = lines(skyward("budget list"))
    assert output[0] == ["ACCOUNT", "PER", "LIMIT USD", "SPENT", "RESERVED", "LEFT"]
    assert output[2] == ["team", "day", "100.0000", "4.0000", "7.0000", "89.0000"]
    runs, team = skyward.json("budget list")
    assert (runs["spent_usd"], runs["left_usd"], team["left_usd"]) == (None, None, 89.0)
    skyward("budget set team --limit 20 --per day")
    assert skyward.json("budget list")[1]["left_usd"] == 9.0


def test_a_budget_is_removed_when_no_open_pool_uses_it(skyward: Skyward) -> None:
    """The bill, and the receipt with the name of the account, stay as they were."""
    skyward("budget set team --limit 100 --per day")
    skyward.open("sky-1", account="team")
    skyward.ledger.reserve("team", "sky-1", Decimal(10))
    assert "'team' is not removed: sky-1 may still draw on it" in skyward("budget remove team", code=cli.FAILED)
    assert skyward.json("budget list")[0]["reserved_usd"] == 10.0
    skyward("stop sky-1")
    bill = skyward("cost --by pool"), skyward("receipt sky-1 --json")
    words = "team is removed; what was spent from it stays in `skyward cost` and in receipts\n"
    assert skyward("budget remove team") == words
    assert skyward("budget list").startswith("no accounts; ")
    assert (skyward("cost --by pool"), skyward("receipt sky-1 --json")) == bill
    assert json.loads(bill[1])["account"] == "team"
    assert "no account 'team'; it has: none" in skyward("budget remove team", code=cli.FAILED)
    skyward("budget set team --limit 100 --per day")
    assert skyward.json("budget list")[0]["left_usd"] == 100.0


def test_users_says_where_the_cost_of_a_pool_is_that_nobody_shares(skyward: Skyward) -> None:
    skyward.open("sky-live", work=Work(system="cron", run="1"))
    words = "the pool sky-live is not shared: all of it is for cron:1. `skyward receipt sky-live` has its cost"
    assert words in skyward("users sky-live", code=cli.FAILED)
    assert "no pool with the name or the id 'nonesuch'" in skyward("users nonesuch", code=cli.FAILED)
    skyward.open("sky-plain")
    assert "all of it is for ada@laptop." in skyward("users sky-plain", code=cli.FAILED)


# ── sweep and stop ───────────────────────────────────────────────────────────────────────────────────────────────────


def where(provider: FolderProvider) -> str:
    return f"--provider {shlex.quote(json.dumps({'name': 'folder', 'folder': provider.folder}))}"


def test_a_sweep_is_dry_without_yes(skyward: Skyward) -> None:
    """It says what it would do and why, and exits with 3. With --yes it does it; then there is nothing to do."""
    skyward.open("sky-dead", owner=DEAD, machines=2)
    skyward.open("sky-live")
    output = skyward("sweep", code=3)
    assert ["end", "sky-dead"] in [row[:2] for row in lines(output)]
    assert "its owner is dead" in output
    assert "skyward sweep --yes" in output
    assert len(skyward.folder.instances()) == 3
    would = skyward.json("sweep", code=3)
    actions = [finding["action"] for finding in would["findings"]]
    assert (would["is_dry_run"], actions, would["ended"]) == (True, ["end", "leave"], [])
    assert skyward("sweep --yes").splitlines()[-1] == "machines of 1 pool ended"
    assert [instance.pool_id for instance in skyward.folder.instances()] == ["sky-live"]
    assert "nothing is to be done" in skyward("sweep")


def test_a_sweep_lets_orchestrators_complete_the_bills_of_killed_runs(
    skyward: Skyward, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Not a dry run; and a server that is away is a warning. JSON has nothing of it."""
    completed: list[int] = []

    def complete() -> int:
        completed.append(2)
        return 2

    install_bills(monkeypatch, complete)
    skyward("sweep")
    assert completed == []
    assert skyward("sweep --yes").splitlines() == [
        "nothing is to be done",
        "cron: the final costs of 2 runs were written",
    ]
    assert skyward.json("sweep --yes")["ended"] == []

    def fail() -> int:
        raise OSError("the server is away")

    install_bills(monkeypatch, fail)
    code, output, complaint = skyward.run("sweep --yes")
    assert (code, output) == (0, "nothing is to be done\n")
    assert "cron: the costs of runs whose processes were killed could not be completed: the server is away" in complaint


def test_a_sweep_lists_the_providers_of_its_options(skyward: Skyward, tmp_path: Path) -> None:
    """They are given by name, or as JSON with fields. Machines that are in no ledger stay until they are old, and
    another user's machines unless `--unknown` is given.
    """
    (tmp_path / "other").mkdir()
    other = FolderProvider(folder=str(tmp_path / "other"))
    other.launch(None, 1, {POOL_TAG: "sky-stranger", RANK_TAG: "0"}, "")
    assert skyward("sweep") == "nothing is to be done\n"
    assert "another user" not in skyward(f"sweep {where(other)}")
    output = lines(skyward(f"sweep {where(other)} --unknown --min-age 0", code=3))
    assert ["end", "sky-stranger"] in [row[:2] for row in output]
    assert "nonesuch" in skyward("sweep --provider nonesuch", code=1)
    assert "--provider {" in skyward("sweep --provider '{'", code=1)


def test_a_stop_ends_a_pool_and_says_what_it_has_ended(skyward: Skyward) -> None:
    """For an unknown pool, and for one without machines, it reports no end; the error says where to look."""
    folder = skyward.folder
    skyward.open("sky-live", machines=2)
    words = r"sky-live has ended: 2 machines ended \(sky-live\S+, sky-live\S+\); nothing of it is left\n"
    assert re.fullmatch(words, skyward("stop sky-live"))
    assert folder.instances() == skyward.ledger.open_intents() == []
    assert "skyward ps --all" in skyward("stop sky-nowhere", code=1)
    words = "nothing was ended: the ledger has no pool 'nope', and folder lists no machine of it"
    assert skyward(f"stop nope {where(folder)}").startswith(words)
    skyward.open("sky-gone", owner=DEAD)
    folder.terminate([instance.id for instance in folder.instances()])
    assert skyward("stop sky-gone") == "sky-gone has ended; there was no machine of it to end\n"
    folder.launch(None, 1, {POOL_TAG: "sky-stranger", RANK_TAG: "0"}, "")
    assert "1 machine ended" in skyward(f"stop sky-stranger {where(folder)}")


# ── what is sold ─────────────────────────────────────────────────────────────────────────────────────────────────────


def test_why_lists_every_attempt(skyward: Skyward) -> None:
    skyward.open("sky-1")
    assert "sky-1 has not tried" in skyward("why sky-1")
    place, error = ("aws", "us-east-1", "p5.48xlarge"), {"error": "NoCapacity", "code": "Insufficient"}
    now = skyward.clock.now
    refused = Attempt("sky-1", now, *place, is_spot=True, seconds=2.13, message="none\nat all", **error)
    rented = Attempt("sky-1", now, "runpod", "any", "H100 x8", is_spot=False, seconds=9.0)
    skyward.ledger.note_attempts([refused, rented])
    head, first, second = lines(skyward("why sky-1"))
    assert head == ["AT", "PROVIDER", "REGION", "TYPE", "MARKET", "SECONDS", "OUTCOME", "CODE", "REASON"]
    assert first[1:] == [*place, "spot", "2.1", "NoCapacity", "Insufficient", "none at all"]
    assert second[1:] == ["runpod", "any", "H100 x8", "on demand", "9.0", "rented"]
    found = [(one["error"], one["code"], one["seconds"]) for one in skyward.json("why sky-1")]
    assert found == [("NoCapacity", "Insufficient", 2.13), (None, None, 9.0)]
    assert "sky-nowhere" in skyward("why sky-nowhere", code=1)


@pytest.mark.parametrize(
    ("wanted", "provider", "note"),
    [
        ("A100", "aws", 'on AWS A100 80GB is a p4de.24xlarge; a p4d.24xlarge has A100 40GB: write "A100-40GB"'),
        ("A100-40GB", "aws", 'on AWS A100 40GB is a p4d.24xlarge; a p4de.24xlarge has A100 80GB: write "A100-80GB"'),
        (
            ["H100", "A100"],
            "aws",
            'on AWS A100 80GB is a p4de.24xlarge; a p4d.24xlarge has A100 40GB: write "A100-40GB"',
        ),
        ("A100", "runpod", ""),
        ("H100", "aws", ""),
    ],
)
def test_why_says_which_type_of_aws_an_a100_is(skyward: Skyward, wanted: Any, provider: str, note: str) -> None:
    now, spec = skyward.clock.now, sky.PoolSpec.of(accelerator=wanted).model_dump_json()
    skyward.ledger.open_pool("p", owner=HERE, provider={"name": provider}, spec_json=spec, lease_expires_at=now)
    skyward.ledger.note_attempts([Attempt("p", now, provider, "r", "t", is_spot=True, seconds=1.0, error="NoCapacity")])
    assert skyward("why p").splitlines()[2:] == ([note] if note else [])


@pytest.fixture
def asked(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> tuple[list[object], list[Offer]]:
    """The requests for offers, and what is sold: one type at 2 USD per hour."""
    requests: list[object] = []
    sold = [Offer(provider="folder", instance_type="t", region="here", price_per_hour=2.0, vcpus=4, memory_gb=8)]

    def offers(_: FolderProvider, want: object) -> list[Offer]:
        requests.append(want)
        return sold

    monkeypatch.setattr(FolderProvider, "offers", offers)
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    return requests, sold


type Asked = tuple[list[object], list[Offer]]


def test_offers_are_listed_with_their_age(skyward: Skyward, asked: Asked) -> None:
    card = {"accelerator": "L4", "accelerators": 1, "accelerator_memory_gb": 24, "memory_gb": 8}
    asked[1][:] = [
        Offer(provider="folder", instance_type=f"t{n}", region="here", price_per_hour=float(n), vcpus=n, **card)
        for n in (3, 1, 2)
    ]
    head, *offers, age = lines(skyward("offers --accelerator L4 --max-price 2.5"))
    assert head[:5] == ["PROVIDER", "REGION", "TYPE", "MARKET", "USD/H"]
    assert [(offer[2], offer[3], offer[4], offer[7]) for offer in offers] == [
        ("t1", "on demand", "1.0000", "1 x L4 24GB"),
        ("t2", "on demand", "2.0000", "1 x L4 24GB"),
    ]
    assert age[0].startswith("2 in all; queried ")
    output = skyward.json("offers --limit 1")
    assert output["age_seconds"] < 300
    assert [offer["instance_type"] for offer in output["offers"]] == ["t1"]
    assert "the cheapest 1 of 3" in skyward("offers --limit 1")
    assert "does not report its architecture" in skyward("offers --architecture arm64", code=1)
    assert "has 1 of them" in skyward("offers --accelerator L4 --count 8", code=1)


def test_a_price_below_a_hundredth_of_a_cent_is_not_zero(skyward: Skyward, asked: Asked) -> None:
    price = 0.00001234567
    asked[1][:] = [
        Offer(provider="folder", instance_type="t", region="here", price_per_hour=price, vcpus=1, memory_gb=8)
    ]
    assert lines(skyward("offers"))[1][4] == "0.00001235"
    assert skyward.json("offers")["offers"][0]["price_per_hour"] == price
    assert "costs $0.00001235 an hour" in skyward("offers --max-price 0.000001", code=1)
    skyward.open("sky-short", age_seconds=0.5)  # a begun second is billed in full
    assert lines(skyward("ps"))[1][-2:] == ["2.00", "0.000556"]
    assert lines(skyward("cost"))[-1][-3:] == ["0.000556", "0.002223", "0.001667"]


def test_each_task_has_its_candidates_its_price_and_its_ceiling(
    skyward: Skyward, monkeypatch: pytest.MonkeyPatch, asked: Asked
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
    install(monkeypatch, lambda target: sky.Plan(tasks) if target == "jobs/" else None)
    monkeypatch.setattr(FolderProvider, "launch", lambda *_: pytest.fail("rented"))
    shown = skyward("quote jobs/")
    head, *rows = lines(shown)
    assert head[:5] == ["WORKFLOW", "TASK", "TASKS", "TRIES", "ASKS FOR"]
    assert rows[0][:3] == ["cron:nightly", "train", "1"]
    assert [row[-2:] for row in rows[:3]] == [["4.0000", "6.0000"], ["4.0000", "6.0000"], ["4.0000", "1.0000"]]
    assert "not known: accelerator is a template" in " ".join(rows[4])
    assert "cron:nightly: a run costs at most 12.0000 USD" in shown
    assert "cron:free: the cost of a run is not limited, or not known, in 2 tasks: play, guess" in shown
    assert len(asked[0]) == 1, "once for each command"
    found = skyward.json("quote jobs/")
    ceilings = [(one["ceiling_usd"], one["run_ceiling_usd"]) for one in found["tasks"]]
    assert ceilings == [(3.0, 6.0), (2.0, 6.0), (1.0, 1.0), (None, None), (None, None)]
    assert [one["ceiling_usd"] for one in found["workflows"]] == [12.0, 1.0, None]


def test_a_target_that_no_plugin_reads_is_refused_with_the_reasons(
    skyward: Skyward, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    install(monkeypatch, lambda _: None)
    assert "cron does not know it" in skyward(f"quote {tmp_path}/", code=cli.FAILED)
    assert f"there is no file or folder '{tmp_path}/dags'" in skyward(f"quote {tmp_path}/dags", code=cli.FAILED)

    def absent() -> None:
        raise ModuleNotFoundError("No module named 'cron_shared'")

    entries = [SimpleNamespace(name="cron", load=absent)]
    monkeypatch.setattr(plans, "entry_points", lambda group: entries)
    assert "cron is not installed" in skyward("quote jobs", code=cli.FAILED)


def test_a_pool_that_could_not_be_opened_is_a_fault(
    skyward: Skyward, monkeypatch: pytest.MonkeyPatch, asked: Asked
) -> None:
    tasks = (
        sky.PlannedTask("w", "huge", sky.PoolSpec.of(cpu=1000)),
        sky.PlannedTask("w", "dear", sky.PoolSpec.of(nodes=2, max_hourly_cost=1.5)),
        sky.PlannedTask("w", "old", sky.PoolSpec.of(image=sky.Image(python="3.9"))),
    )
    install(monkeypatch, lambda _: sky.Plan(tasks, ("jobs/bad.py: SyntaxError",)))
    errors = skyward("quote jobs/", code=1)
    assert "cron:w/huge: nothing to rent" in errors
    assert "costs $4.00 per hour" in errors
    assert "max_hourly_cost=1.5 is less: write max_hourly_cost=4" in errors
    assert "cron:w/old: the image wants Python 3.9" in errors
    assert "cron: jobs/bad.py: SyntaxError" in errors


# ── the page ─────────────────────────────────────────────────────────────────────────────────────────────────────────


def test_the_parser_accepts_the_commands_of_the_page() -> None:
    """Each command line of docs/commands.md and docs/commands/. Looks inside: to run the commands would do what they say."""
    shown = lines_of_the_pages()
    assert len(shown) > 8
    for line in shown:
        understood(command_tree(), shlex.split(line, comments=True))
