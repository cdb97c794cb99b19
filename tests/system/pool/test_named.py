"""Pools with a name: many processes, one rental; no process is special after the opening."""

import json
import os
import time
from decimal import Decimal
from pathlib import Path

import pytest

import skyward_core as sky
from skyward_core.cli import main
from skyward_core.engine.slot_use import FIRST_SECONDS
from skyward_core.ledger.ledger import Ledger, default_url
from skyward_core.ledger.names_policy import NameState
from skyward_core.ledger.receipt import PoolUser, users_of
from skyward_core.ledger.rows import Bucket
from tests.conftest import RecordedEvents
from tests.pool.named import (  # noqa: F401 - a fixture
    assert_nothing_left,
    await_steward,
    double,
    is_gone,
    machine,
    machines_of,
    name,
    pool_of,
    rentals,
    replaced,
    row_of,
)
from tests.pool.other_clock import run_at
from tests.waiting import wait_until

DEFAULT = sky.PoolSpec.model_fields["lease_seconds"].default

# machines that the ledger of this test does not have, and their owners, are not ours: they are left
SWEEP = ("sweep", "--yes", "--json", "--min-age", "864000")

pytestmark = [pytest.mark.timeout(240)]


def test_any_process_may_leave_and_the_next_finds_the_pool_warm(name: str) -> None:
    terms = {"nodes": 2, "keep_warm": 600}
    first = pool_of(name, **terms).open()
    second = pool_of(name, retries=0, lease_seconds=90, provision_timeout=900, **terms).open()
    assert second.id == first.id
    call = second.start_detached(double(5), call_id="train/1")
    again = first.start_detached(double(5), call_id="train/1")
    assert (again.result(60), call.is_new, again.is_new) == (10, True, False)
    before = rentals()
    with pytest.raises(sky.BadRequest, match=f"{name}.*nodes: it has 2, here 1"):
        pool_of(name, keep_warm=600).open()
    assert rentals() == before
    ids = machines_of(first)
    first.close()
    await_steward(name, 2)
    replaced(second, 1)
    ids |= machines_of(second)
    assert sorted(machine() @ second) == sorted(machines_of(second))
    second.close()
    assert row_of(name).state is NameState.WARM
    with pool_of(name, **terms) as third:
        assert (third.id, double(4) >> third) == (first.id, 8)
    assert row_of(name).state is NameState.WARM
    sky.release(name)
    assert_nothing_left(first, ids)


@pytest.mark.parametrize("who", ["opener", "joiner"])
def test_a_pool_whose_money_is_used_up_does_not_stay_warm(
    name: str, who: str, caplog: pytest.LogCaptureFixture
) -> None:
    """No call can begin any more: warm machines would spend the rest of the money on nothing."""
    opener = pool_of(name, keep_warm=600).open()
    last = opener if who == "opener" else pool_of(name, keep_warm=600).open()
    if last is not opener:
        opener.close()
        await_steward(name, 2)
    ids = machines_of(last)
    last._session.cluster.drain(sky.BudgetExceeded("max_cost=1 is used up"))  # pyright: ignore[reportPrivateUsage]
    last.close()
    assert_nothing_left(last, ids)
    assert "is not kept warm, and is ended: max_cost=1 is used up" in caplog.text


def test_a_process_that_leaves_notes_the_detached_calls_of_others(name: str, tmp_path: Path) -> None:
    """The pool may end by its own clocks, and nobody may look at the call again: it would be paid by the pool."""
    first, second = pool_of(name, keep_warm=600).open(), pool_of(name, keep_warm=600).open()
    call = first.start_detached(hold(str(tmp_path / "go")), call_id="train/1")
    wait_until(lambda: call.state == "running")
    first.close()
    await_steward(name, 2)
    (tmp_path / "go").touch()
    assert double(2) >> second == 4  # it has waited for the slot
    second.close()
    with Ledger(default_url()) as ledger:
        (noted,) = ledger.calls(pool_id=second.id)
    assert noted.ended_at is not None
    sky.release(name)


def test_a_step_of_the_clock_ends_no_pool_that_lives(
    name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """With the default lease, a sweep and a process that opens the name, whose time of day is an hour ahead or behind,
    find a pool that lives: also one without a name.
    """
    # a sweep asks all providers in the ledger: other tests of this process have hosts that are gone
    monkeypatch.setenv("SKYWARD_LEDGER", f"sqlite:///{tmp_path / 'ledger.db'}")
    with sky.ComputePool(provider=sky.Local(), display="quiet") as plain, pool_of(name, lease_seconds=DEFAULT) as named:
        for step in (3600, -3600):
            swept = json.loads(run_at(step, "skyward_core.cli", *SWEEP))
            verdicts = {finding["pool"]: finding["action"] for finding in swept["findings"]}
            assert (verdicts[plain.id], verdicts[named.id]) == ("leave", "leave")
            # it joins: a rental would have condemned the pool of the name
            settings = json.dumps({"lease_seconds": DEFAULT})
            assert json.loads(run_at(step, "tests.pool.named", name, settings).splitlines()[0])["id"] == named.id
            assert [double(step) >> pool for pool in (plain, named)] == [2 * step] * 2
        assert set(rentals()) == {plain.id, named.id}


def test_the_last_process_ends_the_machines_and_the_name_is_free(name: str) -> None:
    first, second = pool_of(name).open(), pool_of(name).open()
    ids = machines_of(first)
    second.close()
    assert double(1) >> first == 2
    first.close()
    assert is_gone(ids)
    assert first.receipt is not None
    with pool_of(name) as pool:
        assert pool.id != first.id


def test_a_warm_pool_ends_when_it_was_said_to_end_and_who_looks_settles_it(
    name: str, capsys: pytest.CaptureFixture[str]
) -> None:
    """With the default lease, which is longer than its warm time. The bill ends with its node."""
    with pool_of(name, keep_warm=2, price=36, lease_seconds=DEFAULT) as pool:
        assert double(1) >> pool == 2
        (instance_id,) = machines_of(pool)
    assert "stays warm until" in pool.still_running
    assert ", 36.00 USD/h" in pool.still_running
    wait_until(lambda: instance_id in sky.Local().ends([instance_id]), "the node to end", DEFAULT / 2)
    end = sky.Local().ends([instance_id])[instance_id]
    assert end.reason == "its warm time is over (keep_warm)"
    wait_until(lambda: is_gone({instance_id}), "its keeper to end")
    assert main(["ps", "--json"]) == 0
    assert pool.id not in capsys.readouterr().out
    with Ledger(default_url()) as ledger:
        (its,) = ledger.intents(pool_id=pool.id)
    assert end.reason in str(its.evidence)
    assert sum(its.seconds.values()) == pytest.approx((end.at - its.intended_at).total_seconds(), abs=1)
    assert its.seconds[Bucket.WARM] > 0
    with pool_of(name, keep_warm=2, lease_seconds=DEFAULT) as other:
        assert other.id != pool.id
    sky.release(name)


@sky.compute
def hold(until: str) -> float:
    """Hold a slot until a file exists; return for how long."""
    began = time.monotonic()
    open(f"{until}.begun", "w").close()
    while not os.path.exists(until):
        time.sleep(0.01)
    return time.monotonic() - began


def test_calls_that_wait_for_the_slots_of_others_say_who_holds_them(name: str, tmp_path: Path) -> None:
    """In the process that has opened the pool, and in one that has joined; a detached call has an owner instead.

    Detached calls that somebody looks at wait too.
    """
    opener_told, other_told = RecordedEvents(), RecordedEvents()
    opener = pool_of(name, on_event=opener_told).open()
    other = pool_of(name, on_event=other_told).open()
    first = opener.submit(hold(str(tmp_path / "first")))
    wait_until((tmp_path / "first.begun").exists)
    waiting, queued = other.submit(double(2)), other.start_detached(double(1))
    assert queued.state == "waiting"
    event = wait_until(lambda: next(iter(other_told.of(sky.CallsWaiting)), None))
    assert (event.pool, event.calls) == (name, 2)
    assert event.holder.startswith(f"process {os.getpid()} of ")
    assert event.held_seconds >= event.seconds >= FIRST_SECONDS
    (tmp_path / "first").touch()
    assert (waiting.result(60), queued.result(60), first.result(60) > FIRST_SECONDS) == (4, 2, True)
    detached = other.start_detached(hold(str(tmp_path / "second")), call_id="train/1")
    wait_until(lambda: detached.state == "running")
    waiting = opener.submit(double(3))
    event = wait_until(lambda: next(iter(opener_told.of(sky.CallsWaiting)), None))
    assert event.holder.startswith("the detached call train/1 of ")
    (tmp_path / "second").touch()
    assert (waiting.result(60), detached.result(60) > FIRST_SECONDS) == (6, True)
    opener.close()
    other.close()


def users(pool_id: str) -> list[PoolUser]:
    with Ledger(default_url()) as ledger:
        return users_of(ledger, pool_id)


@pytest.mark.parametrize(
    "belongs_to",
    [
        pytest.param(None, id="nobody", marks=pytest.mark.nightly),
        pytest.param(sky.Work(system="cron", run="nightly"), id="a work"),
    ],
)
def test_each_process_pays_for_the_slots_of_its_calls(name: str, tmp_path: Path, belongs_to: sky.Work | None) -> None:
    """Live and at the end, the opener and who has joined; calls name no `PoolUse`. The rest is that of the pool, or of the work for
    which a program has made the name.
    """
    works = [sky.Work(system="test", run=name, task=task) for task in ("open", "join")]
    spec = pool_of(name, price=3600).spec
    opener, other = (sky.ComputePool.from_spec(spec, work=work, belongs_to=belongs_to).open() for work in works)

    def held_by(pool: sky.ComputePool, place: int, seconds: float) -> float:
        go = tmp_path / f"{place}"
        call = pool.submit(hold(str(go)))
        wait_until(lambda: (its := used_by(opener.id, works[place])) and its.slot_seconds > seconds, "a note of it")
        go.touch()
        return call.result(60)

    try:
        long = held_by(other, 1, 1.0)
        assert used_by(opener.id, works[0]).slot_seconds == 0, "it has made no call"
        short = held_by(opener, 0, 0.2)
        detached = other.start_detached(hold(str(tmp_path / "1")), owner="a friend")
        detached.result(60)
        other.note_cost()
        assert other.cost == pytest.approx(float(used_by(opener.id, works[1]).cost_usd), abs=1e-6)
    finally:
        other.close()
        opener.close()
    first, second = (used_by(opener.id, work) for work in works)
    assert (first.slot_seconds, second.slot_seconds) == (pytest.approx(short, abs=0.5), pytest.approx(long, abs=0.5))
    assert other.cost == pytest.approx(float(second.cost_usd), abs=1e-6)
    assert float(second.cost_usd) == pytest.approx(second.slot_seconds * 1.0, rel=0.01)
    (call,) = (user for user in users(opener.id) if user.is_detached)
    assert (call.name, call.work, call.cost_usd > 0) == ("a friend", works[1], True)
    assert opener.receipt is not None
    total = Decimal(repr(opener.receipt["total_cost_usd"]))
    assert {user["cost_usd"] for user in opener.receipt["users"]} == {float(user.cost_usd) for user in users(opener.id)}
    running = Decimal(repr(opener.receipt["buckets"]["running calls"]["cost_usd"]))
    assert running >= sum(one.cost_usd for one in users(opener.id))
    rest = total - first.cost_usd - second.cost_usd - call.cost_usd
    costs = {part.work: part.cost_usd for part in sky.cost_parts(sky.Work()) if part.pool_id == opener.id}
    assert costs == {
        works[0]: first.cost_usd,
        works[1]: second.cost_usd + call.cost_usd,
        belongs_to or sky.Work(): rest,
    }
    if belongs_to is None:
        assert opener.cost == pytest.approx(float(first.cost_usd), abs=1e-6)
        assert sky.receipts_of(works[0]) == []
    else:
        assert opener.cost == float(total)
        assert [one["pool_id"] for one in sky.receipts_of(belongs_to)] == [opener.id]


def used_by(pool_id: str, work: sky.Work) -> PoolUser:
    return next(user for user in users(pool_id) if user.work == work and not user.is_detached)
