"""A step's use of a pool: its bill is what the slots of its calls have cost, however these end, and a kill loses nothing.

Run as a program, this file is a process that uses a pool of a name until it is killed.
"""

import contextlib
import dataclasses
import json
import os
import subprocess
import sys
import time
from concurrent.futures import CancelledError, ThreadPoolExecutor
from decimal import Decimal
from pathlib import Path
from typing import Any

import pytest

import skyward_core as sky
from skyward_core.ledger import Ledger, default_url
from skyward_core.ledger.rows import CostBy
from skyward_core.ledger.uses import UseEntry, Uses
from skyward_core.session.pool_uses import UseBook
from tests.conftest import RecordedEvents
from tests.pool.named import name, pool_of  # noqa: F401 - a fixture
from tests.waiting import wait_until

REPOSITORY = Path(__file__).parents[3]
PRICE = 3600.0
"""USD per hour: a second of a machine is a dollar."""
FIRST, SECOND = (sky.Work(system="test", run="1", task=task) for task in ("fit", "score"))

pytestmark = [pytest.mark.timeout(240)]


def touch_now(path: str) -> None:
    """Make a file with the time of now: the kernel's own times of files are some milliseconds behind."""
    Path(path).touch()
    now = time.time()
    os.utime(path, (now, now))


@sky.compute
def hold(go: str, *, then: str = "return") -> str:
    """Hold a slot until a file is there; another file has the time of the last moment."""
    touch_now(f"{go}-begun")
    sky.report(**{then: 0.5})
    while not Path(go).exists():
        touch_now(f"{go}-held")
        time.sleep(0.01)
    if then == "raise":
        raise ValueError("no")
    return then


def begun(go: Path) -> None:
    wait_until(Path(f"{go}-begun").exists, "the call to begin")


def uses_of(pool_id: str) -> dict[str, UseEntry]:
    with Ledger(default_url()) as ledger:
        return {use.work.task: use for use in ledger.uses.of_pool(pool_id)}


def cost_by_task(work: sky.Work = sky.Work(run="1")) -> dict[str, Decimal]:
    with Ledger(default_url()) as ledger:
        return {row.key: row.cost_usd for row in ledger.cost_rows(CostBy.TASK, work=work)}


def test_two_uses_of_one_pool_have_what_their_calls_have_held(tmp_path: Path) -> None:
    """Calls that return, raise, time out and are cancelled: all have held a slot. The rest is for the pool's work. The
    end of a use stops all calls for which it pays, and no others.
    """
    opener = sky.Work(system="test", run="1")
    with sky.ComputePool(provider=sky.Local(price_per_hour=PRICE), concurrency=4, display="quiet", work=opener) as pool:
        first, second = (sky.PoolUse(pool, work, is_alone=False).open() for work in (FIRST, SECOND))
        ways = {then: tmp_path / then for then in ("return", "raise", "cancel")}
        calls = {then: first.submit(hold(str(go), then=then)) for then, go in ways.items()}
        late = second.submit(hold(str(tmp_path / "late")).timeout(1.5))
        for go in ways.values():
            begun(go)
        assert first.cost >= 0.0
        with pytest.raises(sky.CallTimedOut):
            late.result(60)
        calls["cancel"].cancel()
        ways["return"].touch()
        ways["raise"].touch()
        assert calls["return"].result(60) == "return"
        with pytest.raises(ValueError, match="no"):
            calls["raise"].result(60)
        with pytest.raises(CancelledError):
            calls["cancel"].result(60)
        wait_until(lambda: first.bill().slot_seconds > 3 * 1.5, "three calls to be counted")
        bills = {"fit": first, "score": second}
        reported = {"fit": {"return": 0.5, "raise": 0.5, "cancel": 0.5}, "score": {"return": 0.5}}
        for task, use in bills.items():
            wait_until(lambda its=use.utilisation: its.numbers().get("cpu_percent_mean") is not None, "a sample")
            wait_until(lambda its=use.utilisation, task=task: its.last_values() == reported[task], "all reports")
        for use in bills.values():
            use.close()
        entries = uses_of(pool.id)
        per_slot_second = PRICE / 3600 / 4
        for task, use in bills.items():
            bill = use.bill()
            assert bill.is_final
            assert entries[task].ended_at is not None
            assert Decimal(repr(bill.cost_usd)) == entries[task].cost_usd
            # the nearest micro-dollar
            assert bill.cost_usd == pytest.approx(bill.slot_seconds * per_slot_second, rel=0, abs=0.51e-6)
        assert 1.5 <= bills["score"].bill().slot_seconds < 3 * 1.5
        third = sky.PoolUse(pool, dataclasses.replace(FIRST, task="all"), is_alone=False).open()
        with third.paying() as its_pool:
            assert its_pool.map(abs, [-1, 2]) == [1, 2]
            assert its_pool.broadcast(sky.PendingCompute(abs, (-1,))) == (1,)
            stopped = its_pool.submit(hold(str(tmp_path / "stopped")))
            begun(tmp_path / "stopped")
            third.stop()
            left = its_pool.submit(hold(str(tmp_path / "left")))
            begun(tmp_path / "left")
            third.close()
            with pytest.raises(sky.PoolClosed, match="has ended"):
                its_pool.submit(hold(str(tmp_path / "after")))
        beside = pool.submit(hold(str(tmp_path / "beside")))
        begun(tmp_path / "beside")
        assert (stopped.cancelled(), left.cancelled(), beside.done()) == (True, True, False)
        beside.cancel()
        assert third.cost > 0
        assert third.cost == round(third.cost, 6), "whole micro-dollars, as in the ledger"
        assert uses_of(pool.id)["all"].cost_usd == Decimal(repr(third.cost))
    by_task = cost_by_task()
    assert by_task["test:fit"] == entries["fit"].cost_usd
    assert by_task["test:score"] == entries["score"].cost_usd
    assert sum(by_task.values()) == Decimal(repr(pool.receipt["total_cost_usd"]))


def test_an_ended_use_keeps_its_bill_and_no_memory(monkeypatch: pytest.MonkeyPatch) -> None:
    """A flow that goes on for a year has millions of steps on one open pool."""
    monkeypatch.setattr("skyward_core.session.pool_uses.FORGET_SECONDS", 0.0)
    monkeypatch.setattr("skyward_core.session.pool_uses.NOTE_SECONDS", 0.1)
    with sky.ComputePool(provider=sky.Local(price_per_hour=PRICE), display="quiet") as pool:
        uses = [sky.PoolUse(pool, is_alone=False).open() for _ in range(3)]
        for use in uses:
            assert use.run(sky.PendingCompute(abs, (-1,))) == 1
            use.close()
        bills = [use.bill() for use in uses]
        sizes = [pool.uses._final, pool.uses._ended_at, pool.uses._ends]
        wait_until(lambda: not any(sizes), "the book to forget the uses")
        assert [(use.bill().cost_usd, use.bill().slot_seconds, use.bill().is_final) for use in uses] == [
            (bill.cost_usd, bill.slot_seconds, True) for bill in bills
        ]
        assert all(bill.cost_usd > 0 for bill in bills)


def seconds_held(go: Path) -> float:
    """For how long the call that waits for this file has held a slot, by its own clock; two seconds at least."""
    wait_until(Path(f"{go}-held").exists, "the call to hold its slot")
    since = Path(f"{go}-begun").stat().st_mtime
    wait_until(lambda: Path(f"{go}-held").stat().st_mtime - since > 2.0, "two seconds of the call")
    return Path(f"{go}-held").stat().st_mtime - since


@pytest.mark.parametrize(
    ("kind", "way"),
    [
        ("its own", KeyboardInterrupt),
        ("its own", None),
        ("named", ValueError),
        ("joined", KeyboardInterrupt),
        ("detached", None),
    ],
)
def test_what_running_calls_have_held_counts_when_their_pool_is_left(
    kind: str, way: type[BaseException] | None, name: str, tmp_path: Path
) -> None:
    """By Ctrl-C, by an exception, or at the end of its block, and when it is detached: until that moment, not until the
    last report of the workers, which may be seconds ago.
    """
    go, settings = tmp_path / "go", {"provider": sky.Local(price_per_hour=PRICE), "display": "quiet"}
    shared = kind in {"named", "joined"}
    with contextlib.ExitStack() as others:
        if kind == "joined":
            others.enter_context(sky.ComputePool(**settings_of(name)))
        with contextlib.suppress(KeyboardInterrupt, ValueError):
            with sky.ComputePool(**(settings_of(name) if shared else settings)) as pool:
                call = pool.submit(hold(str(go)))
                begun(go)
                held = seconds_held(go)
                if kind == "detached":
                    others.callback(sky.release, pool.detach(60))
                if way is not None:
                    raise way
        with pytest.raises((sky.PoolClosed, CancelledError)):
            call.result(60)
        if shared:
            assert pool.cost >= held
            assert uses_of(pool.id)[""].cost_usd == Decimal(repr(pool.cost))
        elif kind == "its own":
            assert pool.cost_final.buckets["running calls"] == pool.receipt["buckets"]["running calls"]["cost_usd"]
        with Ledger(default_url()) as ledger:
            costs = {row.key: float(row.cost_usd) for row in ledger.cost_rows(CostBy.BUCKET, pool_id=pool.id)}
        assert costs["running calls"] >= held - 1.0, "whole seconds"


@pytest.mark.parametrize("kind", ["named", "detached"])
def test_a_process_that_leaves_a_pool_to_others_emits_no_whole_bill(kind: str, name: str) -> None:
    """It says what the pool has cost so far. The receipt has the whole bill, after the end."""
    recorded = RecordedEvents()
    settings = {"provider": sky.Local(price_per_hour=PRICE), "display": "quiet", "on_event": recorded}
    opener = sky.ComputePool(**settings, **({"name": name} if kind == "named" else {}))
    opener.open()
    if kind == "named":
        with sky.ComputePool(**settings_of(name)):
            opener.close()
    else:
        sky.release(opener.detach(60))
    (left,) = recorded.of(sky.PoolLeft)
    assert (recorded.of(sky.CostFinal), recorded.events[-1]) == ([], left)
    assert (opener.cost_final, left.pool_id) == (None, opener.id)
    whole = sky.receipt_of(opener.id)["total_cost_usd"]
    assert 0 < left.cost_so_far <= whole
    assert opener.cost == (0.0 if kind == "named" else left.cost_so_far), "of a pool of nobody it has used nothing"


def test_the_bill_that_is_emitted_is_the_receipt(tmp_path: Path) -> None:
    """Also its parts: what uses have held is in the bucket of running calls."""
    recorded = RecordedEvents()
    (tmp_path / "go").touch()
    provider = sky.Local(price_per_hour=PRICE)
    with sky.ComputePool(provider=provider, display="quiet", on_event=recorded, work=FIRST) as pool:
        with sky.PoolUse(pool, SECOND, is_alone=False) as use:
            use.run(hold(str(tmp_path / "go")))
    (final,) = recorded.of(sky.CostFinal)
    assert final == pool.cost_final
    assert (final.total_cost, pool.cost) == (pool.receipt["total_cost_usd"],) * 2
    costs = {name: line["cost_usd"] for name, line in pool.receipt["buckets"].items() if line["cost_usd"]}
    assert final.buckets == costs
    with Ledger(default_url()) as ledger:
        rows = {row.key: float(row.cost_usd) for row in ledger.cost_rows(CostBy.TASK, pool_id=pool.id)}
    assert rows["test:score"] == use.cost
    assert sum(rows.values()) == pytest.approx(final.total_cost, abs=1e-9)


def test_a_pool_of_its_own_is_billed_whole(tmp_path: Path) -> None:
    pool = sky.ComputePool(provider=sky.Local(price_per_hour=PRICE), display="quiet", work=FIRST)
    with sky.PoolUse(pool) as use:
        (tmp_path / "go").touch()
        assert use.run(hold(str(tmp_path / "go"))) == "return"
        assert not use.bill().is_final
        assert use.cost > 0
    bill = use.bill()
    assert (bill.is_final, bill.is_shared) == (True, False)
    assert bill.cost_usd == pytest.approx(pool.receipt["total_cost_usd"])
    assert uses_of(pool.id) == {}


def test_a_pool_that_costs_nothing_has_a_final_bill_of_zero(name: str, tmp_path: Path) -> None:
    (tmp_path / "go").touch()
    with sky.PoolUse(pool_of(name), FIRST) as use:
        assert use.run(hold(str(tmp_path / "go"))) == "return"
    assert (use.bill().cost_usd, use.bill().is_final, use.bill().is_shared) == (0.0, True, True)


def test_a_ledger_that_does_not_answer_stops_no_step(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """The first use cannot connect, and the second one cannot write. All is written when the ledger answers again; bills
    are final then.
    """
    (tmp_path / "go").touch()

    def refuse(*_: object, **__: object) -> None:
        raise sky.LedgerError("the server is being restarted")

    with sky.ComputePool(provider=sky.Local(price_per_hour=PRICE), display="quiet") as pool:
        first, second = (sky.PoolUse(pool, work, is_alone=False) for work in (FIRST, SECOND))
        with monkeypatch.context() as patched:
            patched.setattr(Ledger, "__init__", refuse)
            first.open()
            assert first.run(hold(str(tmp_path / "go"))) == "return"
            assert first.cost > 0, "what its calls hold is counted all the same"
        with monkeypatch.context() as patched:
            patched.setattr(Uses, "write", refuse)
            with second:
                assert second.run(hold(str(tmp_path / "go"))) == "return"
            first.close()
            assert not first.bill().is_final
            assert not second.bill().is_final
        wait_until(lambda: first.bill().is_final and second.bill().is_final, "the ledger to have the ends")
        entries = uses_of(pool.id)
        for task, use in {"fit": first, "score": second}.items():
            assert entries[task].ended_at is not None
            assert Decimal(repr(use.cost)) == entries[task].cost_usd > 0


def test_a_lost_answer_of_the_ledger_and_a_fault_of_a_count_end_no_use(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """The first row was written, and its answer lost; and once, what the uses have had could not be counted."""
    (tmp_path / "go").touch()
    answers, write, counts = [], Uses.write, UseBook._counts

    def lose(*arguments: Any) -> None:
        write(*arguments)
        answers.append(1)
        if len(answers) == 1:
            raise sky.LedgerError("the answer was lost")

    def fail_once(*arguments: Any) -> Any:
        monkeypatch.setattr(UseBook, "_counts", counts)
        raise RuntimeError("a fault of ours")

    monkeypatch.setattr(Uses, "write", lose)
    with sky.ComputePool(provider=sky.Local(price_per_hour=PRICE), display="quiet") as pool:
        with sky.PoolUse(pool, FIRST, is_alone=False) as first:
            monkeypatch.setattr(UseBook, "_counts", fail_once)
            assert first.run(hold(str(tmp_path / "go"))) == "return"
            wait_until(lambda: UseBook._counts is counts, "the uses to be counted")
            assert first.run(hold(str(tmp_path / "go"))) == "return"
        wait_until(lambda: first.bill().is_final, "the ledger to have the end")
        assert uses_of(pool.id)["fit"].ended_at is not None


def test_a_use_takes_calls_between_its_begin_and_its_end_only(tmp_path: Path) -> None:
    """A fork of its process ends nothing."""
    go = tmp_path / "go"
    with sky.ComputePool(provider=sky.Local(), display="quiet") as pool:
        use = sky.PoolUse(pool, FIRST, is_alone=False)
        with pytest.raises(sky.PoolClosed, match="is not open"):
            use.submit(hold(str(go)))
        with use:
            call = use.submit(hold(str(go)))
            begun(go)
            if not (child := os.fork()):
                use.close()
                os._exit(0)
            assert os.waitpid(child, 0)[1] == 0
            go.touch()
            assert call.result(60) == "return"
        with pytest.raises(sky.PoolClosed, match="has ended"):
            use.submit(hold(str(go)))


def test_machines_that_may_be_left_are_named_by_the_end_of_a_use(monkeypatch: pytest.MonkeyPatch) -> None:
    left = sky.InstancesLeft("not confirmed gone: i-1", ids=("i-1",))
    monkeypatch.setattr(sky.ComputePool, "open", lambda pool: pool)
    monkeypatch.setattr(sky.ComputePool, "hand_over", lambda _: left)
    with pytest.raises(sky.InstancesLeft, match="i-1"), sky.PoolUse(sky.ComputePool(display="quiet")):
        pass
    with pytest.raises(ValueError, match="no") as caught, sky.PoolUse(sky.ComputePool(display="quiet")):
        raise ValueError("no")
    assert "i-1" in caught.value.__notes__[0]


def test_a_signal_right_after_the_opening_leaves_nothing_open(monkeypatch: pytest.MonkeyPatch) -> None:
    """A handler that raises, as Airflow's, between two lines."""
    pool, opens = sky.ComputePool(provider=sky.Local(), display="quiet"), sky.ComputePool.open

    def interrupted(its: sky.ComputePool) -> None:
        opens(its)
        raise KeyboardInterrupt

    monkeypatch.setattr(sky.ComputePool, "open", interrupted)
    with pytest.raises(KeyboardInterrupt):
        sky.PoolUse(pool, FIRST).open()
    assert not pool.is_active
    assert pool.receipt is not None


def test_a_use_that_could_not_be_opened_may_be_opened_again(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    (tmp_path / "go").touch()
    use = sky.PoolUse(sky.ComputePool(provider=sky.Local(), display="quiet"), FIRST)

    def refuse(_: object) -> None:
        raise sky.NoCapacity("sold out")

    with monkeypatch.context() as patched:
        patched.setattr(sky.ComputePool, "open", refuse)
        with pytest.raises(sky.NoCapacity):
            use.open()
    with use:
        assert use.run(hold(str(tmp_path / "go"))) == "return"


def test_a_thousand_steps_cost_few_writes(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """Those that begin at the same time share a transaction, and so do their ends with the pool."""
    (tmp_path / "go").touch()
    writes, write = [], Uses.write
    monkeypatch.setattr(Uses, "write", lambda *arguments: (writes.append(1), write(*arguments)))
    with sky.ComputePool(provider=sky.Local(), display="quiet") as pool:
        uses = [sky.PoolUse(pool, dataclasses.replace(FIRST, task_run=str(n)), is_alone=False) for n in range(1000)]
        with ThreadPoolExecutor(100) as threads:
            list(threads.map(sky.PoolUse.open, uses))
        assert uses[0].run(hold(str(tmp_path / "go"))) == "return"
    with Ledger(default_url()) as ledger:
        assert len([use for use in ledger.uses.of_pool(pool.id) if use.ended_at is not None]) == 1000
    assert all(use.bill().is_final for use in uses)
    assert len(writes) < 200


def test_a_killed_process_loses_nothing_of_its_bill(name: str, tmp_path: Path) -> None:
    """Its call goes on holding the slot until its end; then the use has the time until that."""
    go = tmp_path / "go"
    argv = [sys.executable, "-m", "tests.system.pool.test_pool_use", name, str(go)]
    with sky.PoolUse(sky.ComputePool(**settings_of(name)), SECOND) as stays:
        process = subprocess.Popen(argv, cwd=REPOSITORY, stdout=subprocess.PIPE, text=True)
        assert process.stdout is not None
        assert json.loads(process.stdout.readline()) == stays.pool.id
        begun(go)
        began = time.monotonic()
        wait_until(lambda: uses_of(stays.pool.id)["fit"].slot_seconds > 0, "a note of the other process")
        process.kill()
        process.communicate()
        held = time.monotonic() - began  # the pool may end the use now or at its own end: its bill is the same
    killed = uses_of(stays.pool.id)["fit"]
    assert killed.ended_at is not None
    assert killed.slot_seconds >= held - 0.1
    assert float(killed.cost_usd) == pytest.approx(killed.slot_seconds * PRICE / 3600, rel=0.01)


@pytest.mark.parametrize("is_killed", [True, False], ids=["killed", "alive"])
def test_a_newer_attempt_ends_the_calls_of_the_earlier_one_before_its_own(
    is_killed: bool, name: str, tmp_path: Path
) -> None:
    """Never both at the same time, and no wait for a lease: also if the earlier process lives, cut off from all."""
    earlier, later = tmp_path / "earlier", tmp_path / "later"
    argv = [sys.executable, "-m", "tests.system.pool.test_pool_use", name, str(earlier)]
    with subprocess.Popen(argv, cwd=REPOSITORY, stdout=subprocess.PIPE, text=True) as process:
        try:
            assert process.stdout is not None
            pool_id = json.loads(process.stdout.readline())
            begun(earlier)
            if is_killed:
                process.kill()
                process.wait()
            work = dataclasses.replace(FIRST, attempt="2")
            with sky.PoolUse(sky.ComputePool(**settings_of(name), work=work)) as use:
                assert use.pool.id == pool_id
                call = use.submit(hold(str(later)))
                begun(later)
                assert Path(f"{earlier}-held").stat().st_mtime <= Path(f"{later}-begun").stat().st_mtime
                later.touch()
                assert call.result(60) == "return"
        finally:
            process.kill()
    with Ledger(default_url()) as ledger:
        first, second = ledger.uses.of_pool(pool_id)
    assert (first.work.attempt, second.work.attempt) == ("1", "2")
    assert first.ended_at is not None
    assert second.ended_at is not None
    assert first.ended_at < second.ended_at
    assert first.slot_seconds > 0


def settings_of(name: str) -> dict[str, Any]:
    return {"name": name, "provider": sky.Local(price_per_hour=PRICE), "display": "quiet"}


def be_a_process(name: str, go: str) -> None:
    work = dataclasses.replace(FIRST, attempt="1")
    with sky.PoolUse(sky.ComputePool(**settings_of(name), work=work)) as use:
        use.submit(hold(go))
        print(json.dumps(use.pool.id), flush=True)
        time.sleep(600)


if __name__ == "__main__":
    be_a_process(*sys.argv[1:])
