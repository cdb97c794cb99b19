"""The cost of a pool that several processes use: by user, by work, of warm time, and of detached calls."""

from datetime import datetime, timedelta
from typing import Any

import pytest

from skyward_core.cleanup.ends import Ends
from skyward_core.cleanup.pool_record import close_entries
from skyward_core.errors import LedgerConflict
from skyward_core.ledger.ledger import Ledger
from skyward_core.ledger.names_policy import Join, NameState, Rent, Usage
from skyward_core.ledger.receipt import receipt
from skyward_core.ledger.rows import Bucket, CallState, CostBy, Price, SlotUse
from skyward_core.ledger.users import users_of
from skyward_core.ledger.warm_time import with_warm
from skyward_core.ledger.work_costs import Recorded, parts_of
from skyward_core.machines.owner import Owner
from skyward_core.work import NO_WORK, Work
from tests.ledger.fixtures import LEASE_SECONDS, NOON, USD, Clock, claim, open_pool, opened, resource_request

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


def test_the_busy_cost_is_split_by_the_time_of_slots(ledger: Ledger, clock: Clock) -> None:
    """To the micro-dollar: 0.1 USD among three of equal use. A killed client keeps what it had written last."""
    opened(ledger)
    claim(ledger, "b", work=Work(system="cron", run="1"))
    claim(ledger, "c")
    ledger.note_all({rented(ledger): {Bucket.RUNNING_CALLS: 360, Bucket.IDLE: 3600}})
    for client in "abc":
        ledger.names.renew(client, LEASE_SECONDS, Usage(120.0))
    ledger.names.leave("nightly", "a")
    clock.go(LEASE_SECONDS + 1)
    users = users_of(ledger, "sky-a")
    assert [user.cost_usd for user in users] == [USD("0.033334"), USD("0.033333"), USD("0.033333")]
    assert [(user.name, user.slot_seconds) for user in users] == [(Owner.here().name, 120.0)] * 3
    assert [(user.left_at is None, user.lives) for user in users] == [(False, False), (True, False), (True, False)]
    assert users[1].work == Work(system="cron", run="1")


def test_detached_calls_are_users_by_their_owners(ledger: Ledger, clock: Clock) -> None:
    """They belong to no process: each has its time in the ledger. A pool without a name has no users."""
    opened(ledger)
    ledger.note_all({rented(ledger): {Bucket.RUNNING_CALLS: 3600}})
    ledger.names.renew("a", LEASE_SECONDS, Usage(10.0))
    used = (SlotUse("i-1", 1, 15.0),)
    ended = clock.time + timedelta(seconds=15)
    calls = [
        CallState("1", "f", "dag/train", 1, "ended", clock.time, ended, used),
        CallState("2", "f", "dag/train", 1, "ended", clock.time, ended, used),
        CallState("3", "f", "dag/other", 1, "running", clock.time, None, ()),
        CallState("4", "f", "dag/other", 1, "ended", clock.time, ended, ()),
    ]
    ledger.note_calls("sky-a", calls)
    process, other, train = users_of(ledger, "sky-a")
    assert (process.cost_usd, other.cost_usd, train.cost_usd) == (USD("0.25"), 0, USD("0.75"))
    assert (train.name, train.is_detached, train.left_at, train.lives) == ("dag/train", True, ended, False)
    assert (other.left_at, other.lives) == (None, True)
    ledger.note_calls("p", calls)
    assert users_of(ledger, "p") == []


def test_the_receipt_has_the_split(ledger: Ledger) -> None:
    """Its parts and the other buckets add up to the whole cost."""
    opened(ledger)
    claim(ledger, "b")
    machine = rented(ledger)
    ledger.note_all({machine: {Bucket.LAUNCHING: 7, Bucket.RUNNING_CALLS: 101, Bucket.IDLE: 13}})
    ledger.names.leave("nightly", "a", Usage(2.0))
    ledger.names.closed("b", Usage(1.0))
    ledger.close_all([machine], "it is gone")
    ledger.end_pool("sky-a")
    paper = receipt(ledger, "sky-a")
    assert [user["slot_seconds"] for user in paper["users"]] == [2.0, 1.0]
    parts = sum(USD(repr(user["cost_usd"])) for user in paper["users"])
    assert parts == USD(repr(paper["buckets"]["running calls"]["cost_usd"])) > 0
    others = sum(USD(repr(its["cost_usd"])) for name, its in paper["buckets"].items() if name != "running calls")
    assert parts + others == USD(repr(paper["total_cost_usd"]))
    assert parts + others == sum(row.cost_usd for row in ledger.cost_rows(CostBy.POOL, pool_id="sky-a"))


def used(ledger: Ledger) -> None:
    """A pool of the flow run 1 at 3.6 USD an hour, which a process of run 2 has used for as long; 400 s were busy."""
    opened(ledger, work=OPENER)
    claim(ledger, "b", work=JOINED)
    buckets = {Bucket.LAUNCHING: 100, Bucket.RUNNING_CALLS: 400, Bucket.IDLE: 50, Bucket.WARM: 450}
    ledger.note_all({rented(ledger, "3.6"): buckets})
    for client in "ab":
        ledger.names.renew(client, LEASE_SECONDS, Usage(200.0))


def cost(ledger: Ledger, by: CostBy, work: Work = NO_WORK) -> dict[str, Any]:
    return {row.key: row.cost_usd for row in ledger.cost_rows(by, work=work)}


def test_the_cost_of_a_work_is_its_part_of_the_pools_that_it_has_used(ledger: Ledger) -> None:
    """The opening, idle and warm time are for the run that has opened it; the tasks of a run are within its part."""
    used(ledger)
    by_run = {"prefect:train/1": USD("0.8"), "prefect:train/2": USD("0.2")}
    assert cost(ledger, CostBy.POOL, JOINED) == {"sky-a": USD("0.2")}
    assert cost(ledger, CostBy.POOL, OPENER) == {"sky-a": USD("0.8")}
    assert cost(ledger, CostBy.POOL, Work(system="prefect")) == {"sky-a": USD(1)}
    assert cost(ledger, CostBy.RUN, JOINED) == {"prefect:train/2": USD("0.2")}
    assert cost(ledger, CostBy.POOL, Work(run="another")) == {}
    assert cost(ledger, CostBy.RUN) == by_run
    ledger.set_shares("sky-a", {FIT: USD("0.15")}, keeps_others=True)
    assert cost(ledger, CostBy.RUN) == by_run
    assert cost(ledger, CostBy.TASK) == {"prefect:train/fit": USD("0.15"), "(no task)": USD("0.85")}
    assert sum(row.resources for row in ledger.cost_rows(CostBy.RUN)) == 1
    assert cost(ledger, CostBy.POOL)["sky-a"] == USD(1)


def test_the_parts_of_the_cost_for_a_work_are_those_of_exact_works(ledger: Ledger) -> None:
    """They add up to the bill, and are final once the pool and all that it rented have ended."""
    used(ledger)
    ledger.set_shares("sky-a", {FIT: USD("0.15")}, keeps_others=True)
    system = Work(system="prefect")
    parts = {part.work: part for part in ledger.cost_parts(system)}
    expected = {FIT: USD("0.15"), JOINED: USD("0.05"), OPENER: USD("0.8")}
    assert {work: part.cost_usd for work, part in parts.items()} == expected
    assert sum(part.cost_usd for part in parts.values()) == sum(cost(ledger, CostBy.POOL, system).values())
    assert [part.work for part in ledger.cost_parts(FIT)] == [FIT]
    assert not any(part.is_final for part in parts.values())
    ledger.end_pool("sky-a")
    assert not any(part.is_final for part in ledger.cost_parts(system)), "its machine may still cost"
    ledger.close_all([1], "it is gone")
    assert all(part.is_final for part in ledger.cost_parts(system))
    assert ledger.cost_parts(Work(run="another")) == []


@pytest.mark.parametrize(
    ("owner", "first", "second"), [("dag", "0.9", "0.1"), (str(JOINED), "0.7", "0.3")], ids=["the pool's", "a user's"]
)
def test_whose_cost_a_detached_call_is(ledger: Ledger, owner: str, first: str, second: str) -> None:
    """Of the user whose work its owner names, or of the work of the pool."""
    used(ledger)
    call = CallState("1", "f", owner, 1, "ended", NOON, NOON, (SlotUse("i-1", 1, 400.0),))
    ledger.note_calls("sky-a", [call])
    assert cost(ledger, CostBy.RUN) == {"prefect:train/1": USD(first), "prefect:train/2": USD(second)}
    assert cost(ledger, CostBy.POOL, JOINED) == {"sky-a": USD(second)}


def test_the_bill_by_run_is_the_same_after_pruning(ledger: Ledger, clock: Clock) -> None:
    """The rows of the users are deleted then; their parts stay as shares."""
    used(ledger)
    ledger.set_shares("sky-a", {FIT: USD("0.15")})
    before = cost(ledger, CostBy.RUN), cost(ledger, CostBy.TASK), cost(ledger, CostBy.POOL, JOINED)
    ledger.close_all([1], "it is gone")
    ledger.end_pool("sky-a")
    assert ledger.prune(clock.time + timedelta(days=1), is_dry_run=False).pools == 1
    assert ledger.names.clients("sky-a") == []
    assert (cost(ledger, CostBy.RUN), cost(ledger, CostBy.TASK), cost(ledger, CostBy.POOL, JOINED)) == before


def test_the_parts_of_a_pool() -> None:
    """Shares that exceed a user's part leave it none; attempts of one run have one part; a process without a work has
    its part too, and takes no shares of others.
    """
    task = Work(run="2", task="fit")
    use = Recorded(
        shares=[(task, 60)], users=[(Work(run="2"), 5), (NO_WORK, 5), (Work(run="2"), 0), (Work(run="1"), 0)]
    )
    assert parts_of(Work(run="1"), 100, use) == [(task, 60), (NO_WORK, 50)]
    use.shares = [(task, 20)]
    assert parts_of(Work(run="1"), 100, use) == [(task, 20), (Work(run="2"), 30), (NO_WORK, 50)]
    assert parts_of(Work(run="1"), 100, Recorded(detached_milliseconds=7)) == []


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
