"""The cost of a pool that several processes use: by user, by work, of warm time, and of detached calls."""

from dataclasses import replace
from datetime import datetime, timedelta
from typing import Any

import pytest
from sqlalchemy import event

from skyward_core.cleanup.policy import Ends
from skyward_core.cleanup.pool_record import close_entries
from skyward_core.errors import LedgerConflict
from skyward_core.ledger.bills import Bearer, Held, Recorded, parts_of, split_bill
from skyward_core.ledger.ledger import Ledger
from skyward_core.ledger.names_policy import Join, NameState, Rent
from skyward_core.ledger.receipt import receipt, users_of
from skyward_core.ledger.rows import Bucket, CallState, CostBy, Price, SlotUse
from skyward_core.ledger.uses import NewUse, UseCount, with_warm
from skyward_core.machines.owner import Owner
from skyward_core.work import NO_WORK, Work
from tests.ledger.fixtures import NOON, USD, Clock, claim, open_pool, opened, record_shares, resource_request

OPENER, JOINED = (Work(system="prefect", workflow="train", run=run) for run in ("1", "2"))
FIT = Work(system="prefect", workflow="train", run="2", task="fit")
MINUTE = timedelta(minutes=1)


def rented(ledger: Ledger, price: str = "1", token: str = "1", pool_id: str = "sky-a") -> int:
    (intent,) = ledger.intend_all(pool_id, [resource_request(token, pool_id, Price(USD(price)))])
    ledger.bind(intent, f"i-{token}")
    return intent.id


def adds_up(ledger: Ledger) -> None:
    """The buckets have the whole cost, to the micro-dollar."""
    buckets = ledger.cost_rows(CostBy.BUCKET, pool_id="sky-a")
    (whole,) = ledger.cost_rows(CostBy.POOL, pool_id="sky-a")
    assert sum(row.cost_usd for row in buckets) == whole.cost_usd
    assert sum(row.seconds for row in buckets) == pytest.approx(whole.seconds)
    assert sum(row.on_demand_usd for row in buckets) == whole.on_demand_usd


def held(ledger: Ledger, use_id: str, work: Work, client: str, usd: str, slot_seconds: float = 100.0) -> None:
    """A use of a process that has held slots."""
    count = {use_id: UseCount(slot_seconds, float(usd))}
    ledger.uses.write([NewUse(use_id, "sky-a", work, client)], ended=count)


def test_detached_calls_are_users_by_their_owners_and_works(ledger: Ledger, clock: Clock) -> None:
    """Each has the price of the slots that it has held. A pool without a name and without uses has no users."""
    opened(ledger, name_it=True)
    ledger.note_all({rented(ledger, "3.6"): {Bucket.RUNNING_CALLS: 3600}})
    used = (SlotUse("i-1", 2, 15.0),)
    ended = clock.time + timedelta(seconds=15)
    calls = [
        CallState("1", "f", "dag/train", 1, "ended", clock.time, ended, used, FIT),
        CallState("2", "f", "dag/train", 1, "ended", clock.time, ended, used, FIT),
        CallState("3", "f", "dag/other", 1, "running", clock.time, None, ()),
        CallState("4", "f", "dag/other", 1, "ended", clock.time, ended, ()),
    ]
    ledger.note_calls("sky-a", calls)
    process, other, train = users_of(ledger, "sky-a")
    assert (process.cost_usd, other.cost_usd, train.cost_usd) == (0, 0, USD("0.015"))
    assert (train.name, train.work, train.is_detached, train.lives) == ("dag/train", FIT, True, False)
    assert (train.left_at, other.left_at, other.lives) == (ended, None, True)
    ledger.note_calls("p", calls)
    assert users_of(ledger, "p") == []


def test_the_receipt_has_the_uses(ledger: Ledger) -> None:
    """With what is left of each bucket they add up to the whole cost."""
    opened(ledger)
    claim(ledger, "b")
    machine = rented(ledger, "3.6")
    ledger.note_all({machine: {Bucket.LAUNCHING: 7, Bucket.RUNNING_CALLS: 101, Bucket.IDLE: 13}})
    held(ledger, "1", NO_WORK, "a", "0.002", 2.0)
    held(ledger, "2", JOINED, "b", "0.001", 1.0)
    ledger.close_all([machine], "it is gone")
    ledger.end_pool("sky-a")
    paper = receipt(ledger, "sky-a")
    assert [(user["slot_seconds"], user["cost_usd"]) for user in paper["users"]] == [(2.0, 0.002), (1.0, 0.001)]
    assert paper["buckets"]["running calls"]["cost_usd"] == 0.101
    assert sum(USD(repr(its["cost_usd"])) for its in paper["buckets"].values()) == USD(repr(paper["total_cost_usd"]))


@pytest.mark.parametrize(
    ("seconds", "held_usd", "expected"),
    [
        ({Bucket.RUNNING_CALLS: 2, Bucket.IDLE: 5, Bucket.WARM: 111}, "0.0101", (0.0101, 0.0, 0.1079)),
        ({Bucket.RUNNING_CALLS: 20, Bucket.IDLE: 5}, "0.0101", (0.02, 0.005, 0.0)),
        ({Bucket.LAUNCHING: 3}, "0.5", (0.003, 0.0, 0.0)),
    ],
    ids=["nobody kept the pool while they ran", "slots beside them were empty", "more than the machines cost"],
)
def test_the_time_of_running_calls_is_not_less_than_that_of_the_uses(
    ledger: Ledger, seconds: dict[Bucket, float], held_usd: str, expected: tuple[float, float, float]
) -> None:
    opened(ledger)
    ledger.note_all({rented(ledger, "3.6"): seconds})
    held(ledger, "1", NO_WORK, "a", held_usd)
    rows = {row.key: row for row in ledger.cost_rows(CostBy.BUCKET)}
    costs = tuple(float(rows[bucket].cost_usd) for bucket in (Bucket.RUNNING_CALLS, Bucket.IDLE, Bucket.WARM))
    assert costs == expected
    assert rows[Bucket.RUNNING_CALLS].seconds == pytest.approx(expected[0] * 1000)
    adds_up(ledger)


def statements_of(ledger: Ledger) -> int:
    """How many statements it takes to add up the buckets."""
    seen: list[str] = []

    def see(_connection: Any, _cursor: Any, statement: str, *_: Any) -> None:
        seen.append(statement)

    engine = ledger._database._engine  # not all engines: threads of earlier tests may use others
    event.listen(engine, "before_cursor_execute", see)
    try:
        ledger.cost_rows(CostBy.BUCKET)
    finally:
        event.remove(engine, "before_cursor_execute", see)
    return len(seen)


def test_the_buckets_of_many_pools_take_as_many_statements_as_those_of_one(ledger: Ledger) -> None:
    """Each pool gives up its own idle time for what its own calls have held, and no other pool's."""
    found = []
    for number in range(3):
        pool_id = f"sky-{number}"
        open_pool(ledger, pool_id)
        times = {Bucket.IDLE: 10} if number else {Bucket.RUNNING_CALLS: 50, Bucket.IDLE: 10}
        ledger.note_all({rented(ledger, "3.6", f"{number}", pool_id): times})
        ledger.uses.write([NewUse(pool_id, pool_id, NO_WORK)], ended={pool_id: UseCount(4.0, 0.004)})
        found.append(statements_of(ledger))
    assert found[0] == found[1] == found[2]
    costs = cost(ledger, CostBy.BUCKET)
    assert (costs[Bucket.RUNNING_CALLS], costs[Bucket.IDLE]) == (USD("0.058"), USD("0.022"))


def used(ledger: Ledger, work: Work = OPENER, **changes: Any) -> None:
    """A pool of the flow run 1 at 3.6 USD an hour, which processes of the runs 1 and 2 have used."""
    opened(ledger, work=work, **changes)
    claim(ledger, "b", work=JOINED)
    buckets = {Bucket.LAUNCHING: 100, Bucket.RUNNING_CALLS: 400, Bucket.IDLE: 50, Bucket.WARM: 450}
    ledger.note_all({rented(ledger, "3.6"): buckets})
    held(ledger, "1", OPENER, "a", "0.1")
    held(ledger, "2", JOINED, "b", "0.2")


def cost(ledger: Ledger, by: CostBy, work: Work = NO_WORK, *, split: bool = False) -> dict[str, Any]:
    return {row.key: row.cost_usd for row in ledger.cost_rows(by, work=work, split=split)}


def test_the_cost_of_a_work_is_its_part_of_the_pools_that_it_has_used(ledger: Ledger) -> None:
    """Start, idle and warm time are for the run to which it belongs; the tasks of a run are within its part."""
    used(ledger)
    by_run = {"prefect:train/1": USD("0.8"), "prefect:train/2": USD("0.2")}
    assert cost(ledger, CostBy.POOL, JOINED) == {"sky-a": USD("0.2")}
    assert cost(ledger, CostBy.POOL, OPENER) == {"sky-a": USD("0.8")}
    assert cost(ledger, CostBy.POOL, Work(system="prefect")) == {"sky-a": USD(1)}
    assert cost(ledger, CostBy.RUN, JOINED) == {"prefect:train/2": USD("0.2")}
    assert cost(ledger, CostBy.POOL, Work(run="another")) == {}
    assert cost(ledger, CostBy.RUN) == cost(ledger, CostBy.RUN, split=True) == by_run
    record_shares(ledger, "sky-a", {FIT: USD("0.15")})
    assert cost(ledger, CostBy.RUN) == by_run
    assert cost(ledger, CostBy.TASK) == {"prefect:train/fit": USD("0.15"), "(no task)": USD("0.85")}
    assert sum(row.resources for row in ledger.cost_rows(CostBy.RUN)) == 1
    assert cost(ledger, CostBy.POOL)["sky-a"] == USD(1)


@pytest.mark.parametrize("by", [CostBy.RUN, CostBy.TASK, CostBy.ASSET, CostBy.PARTITION, CostBy.OWNER])
def test_the_rest_of_a_pool_that_belongs_to_nobody_is_its_own(ledger: Ledger, clock: Clock, by: CostBy) -> None:
    """Never silently its opener's; the same after pruning. By owner its users are the processes, wherever they are."""
    work = Work(system="prefect", workflow="train", run="3", task="fit", asset="model", partition="2026-11")
    used(ledger, NO_WORK, name_it=True)
    claim(ledger, "c", owner=replace(Owner.here(), user="bob"), work=work)
    held(ledger, "3", work, "c", "0.05")
    nobody = {"pool nightly": USD("0.65")}
    here = Owner.here().name
    expected = {
        CostBy.RUN: {"prefect:train/1": USD("0.1"), "prefect:train/2": USD("0.2"), "prefect:train/3": USD("0.05")},
        CostBy.TASK: {"(no task)": USD("0.3"), "prefect:train/fit": USD("0.05")},
        CostBy.ASSET: {"(no asset)": USD("0.3"), "model": USD("0.05")},
        CostBy.PARTITION: {"(no partition)": USD("0.3"), "2026-11": USD("0.05")},
        CostBy.OWNER: {here: USD("0.3"), here.replace(here.split("@")[0], "bob", 1): USD("0.05")},
    }
    before = expected[by] | nobody
    assert cost(ledger, by) == before
    ledger.close_all([1], "it is gone")
    ledger.end_pool("sky-a")
    assert ledger.prune(clock.time + timedelta(days=1), is_dry_run=False).pools == 1
    assert cost(ledger, by) == before


def test_the_rest_of_a_pool_is_divided_where_the_reader_asks_for_it(ledger: Ledger) -> None:
    """In proportion to what the users have cost; equally if that is nothing. It adds up to the micro-dollar."""
    used(ledger, NO_WORK, name_it=True)
    whole = {"prefect:train/1": USD("0.333333"), "prefect:train/2": USD("0.666667"), "pool nightly": USD(0)}
    assert cost(ledger, CostBy.RUN, split=True) == whole
    assert [user.cost_usd for user in users_of(ledger, "sky-a")] == [USD("0.1"), USD("0.2")]
    assert [user.cost_usd for user in users_of(ledger, "sky-a", split=True)] == [USD("0.333333"), USD("0.666667")]
    claim(ledger, "c")
    assert [user.cost_usd for user in users_of(ledger, "sky-a", split=True)][2] == 0, "it has made no calls"
    parts = {(part.work, part.pool): part.cost_usd for part in ledger.cost_parts(NO_WORK) if part.pool_id == "sky-a"}
    assert parts == {(OPENER, ""): USD("0.1"), (JOINED, ""): USD("0.2"), (NO_WORK, "nightly"): USD("0.7")}
    assert [part.pool for part in ledger.cost_parts(Work(system="prefect"))] == ["", ""]


def test_a_pool_whose_users_have_cost_nothing_is_divided_equally(ledger: Ledger) -> None:
    opened(ledger, name_it=True)
    ledger.note_all({rented(ledger, "3.6"): {Bucket.IDLE: 3}})
    assert cost(ledger, CostBy.RUN, split=True)["pool nightly"] == USD("0.003"), "nobody has made a call"
    assert {user.cost_usd for user in users_of(ledger, "sky-a", split=True)} <= {0}
    for number in (1, 2):
        held(ledger, str(number), Work(run=str(number)), "a", "0", 0.0)
    by_run = cost(ledger, CostBy.RUN, split=True)
    assert (by_run["1"], by_run["2"], by_run["pool nightly"]) == (USD("0.0015"), USD("0.0015"), 0)


def test_a_use_without_a_work_is_no_rest(ledger: Ledger) -> None:
    opened(ledger, name_it=True)
    ledger.note_all({rented(ledger, "3.6"): {Bucket.RUNNING_CALLS: 100}})
    held(ledger, "1", NO_WORK, "a", "0.04")
    assert cost(ledger, CostBy.RUN) == {"(no run)": USD("0.04"), "pool nightly": USD("0.06")}


def test_the_parts_of_the_cost_for_a_work_are_those_of_exact_works(ledger: Ledger) -> None:
    """They add up to the bill. That of a use is final when it has ended, the rest when the pool and all that it rented
    have.
    """
    used(ledger)
    record_shares(ledger, "sky-a", {FIT: USD("0.15")})
    system = Work(system="prefect")
    parts = {part.work: part for part in ledger.cost_parts(system)}
    expected = {FIT: USD("0.15"), JOINED: USD("0.05"), OPENER: USD("0.8")}
    assert {work: part.cost_usd for work, part in parts.items()} == expected
    assert sum(part.cost_usd for part in parts.values()) == sum(cost(ledger, CostBy.POOL, system).values())
    assert [part.work for part in ledger.cost_parts(FIT)] == [FIT]
    assert {work for work, part in parts.items() if not part.is_final} == {OPENER}
    ledger.uses.write([NewUse("later", "sky-a", JOINED, "b")])
    assert {part.work for part in ledger.cost_parts(system) if not part.is_final} == {OPENER, JOINED}
    ledger.end_pool("sky-a")
    not_final = {part.work for part in ledger.cost_parts(system) if not part.is_final}
    assert not_final == {OPENER}, "its machine may still cost"
    ledger.close_all([1], "it is gone")
    assert all(part.is_final for part in ledger.cost_parts(system))
    assert ledger.cost_parts(Work(run="another")) == []
    pool = ledger.pool("sky-a")
    assert pool is not None
    assert (ended := pool.ended_at) is not None
    second = timedelta(seconds=1)
    assert ledger.cost_parts(system, (ended - second, ended)) == ledger.cost_parts(system)
    assert ledger.cost_parts(system, (ended + second, ended + 2 * second)) == []


def test_a_part_counts_in_full_while_the_time_of_the_machines_is_noted_late(ledger: Ledger, clock: Clock) -> None:
    """The rest of the pool is nothing then. Of a part of its machines, parts count in proportion."""
    opened(ledger, name_it=True)
    intent = rented(ledger, "3.6")
    clock.go(30)
    ledger.note_all({intent: {Bucket.RUNNING_CALLS: 10}})
    held(ledger, "1", FIT, "a", "0.02")
    for seconds, rest in ((10, "0"), (30, "0.01")):
        ledger.note_all({intent: {Bucket.RUNNING_CALLS: seconds}})
        (part,) = ledger.cost_parts(FIT)
        assert (part.cost_usd, part.is_final) == (USD("0.02"), True)
        assert cost(ledger, CostBy.TASK) == {"prefect:train/fit": USD("0.02"), "pool nightly": USD(rest)}
    clock.go(3600)
    later = rented(ledger, "3.6", token="2")
    ledger.note_all({later: {Bucket.RUNNING_CALLS: 5}})
    late, early = (
        {row.key: row.cost_usd for row in ledger.cost_rows(CostBy.TASK, **when)}
        for when in ({"since": clock.time}, {"until": clock.time})
    )
    assert sum(late.values()) == USD("0.005")
    assert late["prefect:train/fit"] + early["prefect:train/fit"] == pytest.approx(USD("0.02"), abs=USD("0.000001"))


@pytest.mark.parametrize(
    ("work", "first", "second"),
    [(NO_WORK, "0.8", "0.2"), (OPENER, "0.8", "0.2"), (JOINED, "0.4", "0.6")],
    ids=["of no work", "the pool's", "another's"],
)
def test_a_detached_call_is_for_the_work_that_has_started_it(
    ledger: Ledger, work: Work, first: str, second: str
) -> None:
    """At the price of its slots. Of an attached process without a work it is for that of the pool."""
    used(ledger)
    call = CallState("1", "f", "dag", 1, "ended", NOON, NOON, (SlotUse("i-1", 1, 400.0),), work)
    ledger.note_calls("sky-a", [call])
    assert cost(ledger, CostBy.RUN) == {"prefect:train/1": USD(first), "prefect:train/2": USD(second)}
    assert cost(ledger, CostBy.POOL, JOINED) == {"sky-a": USD(second)}


def test_the_bill_by_run_is_the_same_after_pruning(ledger: Ledger, clock: Clock) -> None:
    """The rows of the uses are deleted then; their parts stay as shares."""
    used(ledger)
    record_shares(ledger, "sky-a", {FIT: USD("0.15")})
    before = cost(ledger, CostBy.RUN), cost(ledger, CostBy.TASK), cost(ledger, CostBy.POOL, JOINED)
    ledger.close_all([1], "it is gone")
    ledger.end_pool("sky-a")
    assert ledger.prune(clock.time + timedelta(days=1), is_dry_run=False).pools == 1
    assert ledger.names.clients("sky-a") == []
    assert (cost(ledger, CostBy.RUN), cost(ledger, CostBy.TASK), cost(ledger, CostBy.POOL, JOINED)) == before


def test_the_parts_of_a_pool() -> None:
    """Shares that exceed a use's part leave it none; uses of one work have one part; one without a work has its part
    too, and takes no shares of others.
    """
    run, task, nobody = Bearer(Work(run="2")), Bearer(Work(run="2", task="fit")), Bearer()
    own = Bearer(Work(run="1"))
    recorded = Recorded(own, [(task, 60)], [Held(run, 50), Held(nobody, 50), Held(run, 0), Held(own, 7)])
    assert parts_of(recorded, 200) == [(task, 60), (nobody, 50)]
    recorded.shares = [(task, 20)]
    assert parts_of(recorded, 200) == [(task, 20), (run, 30), (nobody, 50)]
    assert parts_of(Recorded(own, held=[Held(run, 0)]), 200) == [(run, 0)], "zero is a value"


@pytest.mark.parametrize("bill", [200, 100, 90, 55, 41, 40, 20])
def test_only_estimates_give_way_to_a_bill(bill: int) -> None:
    """In proportion, down to nothing. Only a bill below what was measured divides that."""
    held = [Held(Bearer(), 30), Held(Bearer(), 0, 25), Held(Bearer(), 10, 35)]
    found = split_bill(bill, held)
    assert sum(found) == min(bill, 100)
    assert all(0 <= part <= one.micro_usd + one.estimated for part, one in zip(found, held, strict=True))
    if bill >= 40:
        assert all(part >= one.micro_usd for part, one in zip(found, held, strict=True))
        assert found[1] == pytest.approx(min(25, (bill - 40) * 25 / 60), abs=1)
    else:
        assert found == [15, 0, 5]


LAUNCHED = {Bucket.LAUNCHING: 10.0, Bucket.IDLE: 20.0}
"""What the opener has recorded until it leaves, half a minute after the machine was requested."""


def left_warm(ledger: Ledger, clock: Clock) -> int:
    """Open a pool, rent, and leave it warm after half a minute; return its machine."""
    opened(ledger, keep_warm_seconds=600.0)
    machine = rented(ledger, "0.33")
    clock.go(30)
    ledger.note_all({machine: LAUNCHED})
    assert ledger.names.leave("nightly", "a") is NameState.WARM
    ledger.renew("sky-a", clock.time + timedelta(seconds=600))
    return machine


def seconds(ledger: Ledger, machine: int) -> dict[Bucket, float]:
    (intent,) = (intent for intent in ledger.intents(pool_id="sky-a") if intent.id == machine)
    return {bucket: spent for bucket, spent in intent.seconds.items() if spent}


def closed(ledger: Ledger, machine: int, now: datetime, *ends: datetime) -> None:
    """Close the entry of a machine, as a sweep or `skyward stop` does; `ends`: it ended earlier than it was found so."""
    intents = [intent for intent in ledger.intents(pool_id="sky-a") if intent.id == machine]
    close_entries(ledger, intents, "it is gone", now, Ends(dict.fromkeys([machine], *ends) if ends else {}))


def test_the_time_in_which_no_process_has_the_pool_is_warm(ledger: Ledger, clock: Clock) -> None:
    """Not the time before that no process had counted: others have used the pool then. Warm times add up."""
    opened(ledger, keep_warm_seconds=600.0)
    claim(ledger, "b")
    machine = rented(ledger)
    clock.go(30)
    ledger.note_all({machine: LAUNCHED})
    ledger.names.leave("nightly", "a")
    clock.go(50)
    assert ledger.names.leave("nightly", "b") is NameState.WARM
    clock.go(45)
    ledger.renew("sky-a", clock.time + timedelta(seconds=600))
    assert isinstance(claim(ledger, "c", keep_warm_seconds=600.0), Join)
    assert seconds(ledger, machine) == {**LAUNCHED, Bucket.WARM: 45.0}
    clock.go(5)
    assert isinstance(claim(ledger, "d"), Join), "the second one finds it in use"
    assert seconds(ledger, machine) == {**LAUNCHED, Bucket.WARM: 45.0}
    for client in "cd":
        ledger.names.leave("nightly", client)
    clock.go(100)
    ledger.ask_end_all([machine])
    clock.go(7)
    closed(ledger, machine, clock.time)
    whole = {Bucket.LAUNCHING: 10.0, Bucket.IDLE: 75.0, Bucket.WARM: 145.0, Bucket.TERMINATING: 7.0}
    assert seconds(ledger, machine) == whole
    adds_up(ledger)


def test_time_that_a_process_has_counted_is_not_warm(ledger: Ledger, clock: Clock) -> None:
    """It was frozen, and wrote when it was none of the pool's processes any more."""
    machine = left_warm(ledger, clock)
    clock.go(100)
    ledger.note_all({machine: {Bucket.LAUNCHING: 10.0, Bucket.IDLE: 80.0}})
    claim(ledger, "b", keep_warm_seconds=600.0)
    assert seconds(ledger, machine) == {Bucket.LAUNCHING: 10.0, Bucket.IDLE: 80.0, Bucket.WARM: 40.0}
    adds_up(ledger)


def test_a_warm_pool_that_has_ended_itself_was_warm_until_then(ledger: Ledger, clock: Clock) -> None:
    """A sweep finds it an hour later; the next process has the name by then. The account pays for the warm time."""
    machine = left_warm(ledger, clock)
    end = clock.time + timedelta(seconds=600)
    clock.go(3600)
    assert isinstance(claim(ledger, "b"), Rent)
    closed(ledger, machine, clock.time, end)
    assert seconds(ledger, machine) == {**LAUNCHED, Bucket.WARM: 600.0}
    adds_up(ledger)
    (row,) = ledger.cost_rows(CostBy.POOL, pool_id="sky-a")
    assert row.cost_usd == Price(USD("0.33")).cost(630)


def test_a_process_that_counts_the_whole_life_does_not_count_warm_time_twice(ledger: Ledger, clock: Clock) -> None:
    """It takes warm time for idle time. A process that has the warm time from the ledger may write it back."""
    machine = left_warm(ledger, clock)
    clock.go(100)
    claim(ledger, "b", keep_warm_seconds=600.0)
    ledger.note_all({machine: {Bucket.LAUNCHING: 10.0, Bucket.IDLE: 125.0, Bucket.RUNNING_CALLS: 5.0}})
    whole = {Bucket.LAUNCHING: 10.0, Bucket.IDLE: 25.0, Bucket.RUNNING_CALLS: 5.0, Bucket.WARM: 100.0}
    assert seconds(ledger, machine) == whole
    ledger.note_all({machine: {**whole, Bucket.TERMINATING: 3.0}})
    assert seconds(ledger, machine) == {**whole, Bucket.TERMINATING: 3.0}
    adds_up(ledger)
    known = {**dict.fromkeys(Bucket, 0), Bucket.IDLE: 5, Bucket.WARM: 3}
    assert with_warm(known, {Bucket.LOST: 1}) == {**known, Bucket.LOST: 1}
    assert with_warm(known, {Bucket.IDLE: 9}) == {**known, Bucket.IDLE: 6}


def test_a_machine_that_is_gone_or_never_came_was_not_warm(ledger: Ledger, clock: Clock) -> None:
    """Nor one of a pool that was closed."""
    gone = left_warm(ledger, clock)
    (never,) = ledger.intend_all("sky-a", [resource_request("2", "sky-a")])
    clock.go(40)
    closed(ledger, gone, clock.time)
    clock.go(60)
    claim(ledger, "b")
    assert seconds(ledger, gone) == {**LAUNCHED, Bucket.WARM: 40.0}
    assert seconds(ledger, never.id) == {}
    last = rented(ledger, token="3")
    assert ledger.names.leave("nightly", "b", may_be_warm=False) is NameState.CLOSING
    clock.go(20)
    closed(ledger, last, clock.time)
    assert Bucket.WARM not in seconds(ledger, last)


def state(name: str, generation: int = 1, **fields: Any) -> CallState:
    values: dict[str, Any] = {"call_id": "c", "name": "train", "owner": "", "started_at": NOON, **fields}
    return CallState(generation=generation, state=name, **values)


def test_later_attempts_and_states_win_and_an_end_stays(ledger: Ledger) -> None:
    """What an older client writes late changes nothing; the owner is that of the first writer."""
    steps = [
        (state("waiting", 0, owner="dag/run"), "waiting", 0),
        (state("running", 1), "running", 1),
        (state("waiting", 1), "running", 1),
        (state("waiting", 2), "waiting", 2),
        (state("running", 1), "waiting", 2),
        (state("failed", 2, ended_at=NOON + MINUTE), "failed", 2),
        (state("running", 3), "failed", 2),
        (state("ended", 2, ended_at=NOON), "failed", 2),
    ]
    for written, name, generation in steps:
        ledger.note_calls("p", [written, written])
        (call,) = ledger.calls()
        assert (call.state, call.generation, call.owner) == (name, generation, "dag/run")
    assert call.ended_at == NOON + MINUTE


def test_a_call_costs_its_share_of_the_machines_price(ledger: Ledger) -> None:
    """A slot of four for 100 s at 3.60 USD an hour is 2.5 cents. A machine that the ledger does not know costs nothing."""
    open_pool(ledger, "q", work=Work(system="cron", workflow="nightly", task="train"))
    rented(ledger, "3.6", pool_id="q")
    uses = (SlotUse("i-1", 4, 60.0), SlotUse("i-1", 4, 40.0), SlotUse("unknown", 1, 5.0))
    ledger.note_calls("q", [state("ended", 2, ended_at=NOON + MINUTE, used=uses)])
    (call,) = ledger.calls()
    assert (call.cost_usd, call.seconds, call.generation) == (USD("0.025"), 105.0, 2)
    assert (call.started_at, call.ended_at, call.owner) == (NOON, NOON + MINUTE, "cron:nightly/train")


def test_calls_are_found_by_pool_owner_and_time_and_pruned_with_their_pool(ledger: Ledger, clock: Clock) -> None:
    """A text of an owner is no pattern. A call without an end in a pool that has ended has an unknown one."""
    open_pool(ledger, "q")
    ledger.note_calls("p", [state("running", owner="a%b"), state("ended", call_id="d", owner="axb", ended_at=NOON)])
    ledger.note_calls("q", [state("running", started_at=NOON + MINUTE)])
    assert [(call.pool_id, call.call_id) for call in ledger.calls()] == [("p", "c"), ("p", "d"), ("q", "c")]
    assert [call.call_id for call in ledger.calls(owner="%")] == ["c"]
    assert [call.pool_id for call in ledger.calls(since=NOON + MINUTE)] == ["q"]
    assert [call.has_unknown_end for call in ledger.calls()] == [False] * 3
    ledger.end_pool("p")
    assert [call.has_unknown_end for call in ledger.calls()] == [True, False, False]
    with pytest.raises(LedgerConflict, match="no pool 'nowhere'"):
        ledger.note_calls("nowhere", [state("running")])
    clock.time = NOON + timedelta(days=9)
    for is_dry_run in (True, False):
        assert len(ledger.calls()) == 3
        assert ledger.prune(NOON + timedelta(days=1), is_dry_run=is_dry_run).calls == 2
    assert [call.pool_id for call in ledger.calls()] == ["q"]
