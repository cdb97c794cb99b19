"""Real pools whose ledger fails, whose time is over, that are detached, forgotten, or closed while calls run."""

import asyncio
import contextlib
import gc
import os
import signal
import threading
import time
import warnings
from collections.abc import Iterator
from datetime import UTC, datetime
from decimal import Decimal
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

import skyward_core as sky
from skyward_core.cleanup.reaper import Reaper, ReaperInput
from skyward_core.ledger.database import Database
from skyward_core.ledger.ledger import Ledger, default_url
from skyward_core.ledger.rows import Account, Bucket, CostBy, Period
from skyward_core.provisioning.lifecycle import PoolMachines
from skyward_core.session import session
from skyward_core.worker.node_clocks import DETACHED, read_lease, read_paid, uptime
from skyward_core.worker.slot import TERM_SECONDS
from tests.conftest import RecordedEvents
from tests.fakes import NoCapacityProvider
from tests.pool.local import _crashing, block, crash, crashing, double, one_node, pid_of, runs  # noqa: F401 - fixtures
from tests.waiting import wait_until


def test_a_call_that_returns_as_it_is_stopped_does_not_stop_the_next() -> None:
    """The process that must die gets no other call. Sleeps: the next call runs when the stopped one's time is over."""

    def yields() -> str:
        asked: list[int] = []
        signal.signal(signal.SIGTERM, lambda number, _: asked.append(number))
        print("waiting", flush=True)
        while not asked:
            time.sleep(0.01)
        return "as you like"

    recorded = RecordedEvents()
    with one_node(recorded) as pool:
        call = pool.submit(sky.compute(yields)())
        wait_until(lambda: recorded.lines(call.call_id), "the call to run")
        assert call.cancel()
        assert pool.run(sky.compute(lambda: time.sleep(TERM_SECONDS + 1) or "slept")()) == "slept"


@pytest.mark.parametrize("how", ["exit", "sys.exit", "kill"])
def test_a_crash_loses_only_its_own_call(how: str, crashing: sky.ComputePool, tmp_path: Path) -> None:
    """All others run exactly once."""

    @sky.compute
    def work(n: int) -> int:
        with open(tmp_path / str(n), "a") as file:
            file.write("x")
        if n == 130:
            crash.local(how)
        return n

    futures = [crashing.submit(work(n)) for n in range(300)]
    results = [future.exception(timeout=60) or future.result() for future in futures]
    assert isinstance(results[130], sky.CallCrashed)
    assert results[:130] + results[131:] == [n for n in range(300) if n != 130]
    assert {path.name: path.read_text() for path in tmp_path.iterdir()} == {str(n): "x" for n in range(300)}


def test_a_life_is_in_the_events_and_in_the_ledger(tmp_path: Path) -> None:
    recorded, before = RecordedEvents(), time.monotonic()
    pool = one_node(recorded, nodes=2, collect_metrics=False)
    with Ledger(default_url()) as ledger, pool as same:
        opened = time.monotonic()
        assert same is pool
        assert (pool.is_active, pool.instance_count) == (True, 2)
        lease, ids = pool.lease, {node.instance.id for node in pool.lease.nodes}
        intents = ledger.open_intents(pool_id=pool.id)
        assert {intent.cloud_id for intent in intents} == ids
        assert all(intent.seconds[Bucket.BOOTSTRAPPING] > 0 for intent in intents)
        pool.map(double, range(50))
        progress = sky.CallProgress(submitted=50, done=50, failed=0)
        wait_until(lambda: recorded.of(sky.CallProgress)[-1:] == [progress], "the progress")
        futures = [pool.submit(block(tmp_path, name)) for name in ("a", "b", "c")]
        pids = [pid_of(tmp_path, name) for name in ("a", "b")]
        closing = time.monotonic()
    after, bill = time.monotonic(), pool.cost_final
    assert [type(future.exception(timeout=10)) for future in futures] == [sky.PoolClosed] * 3
    assert not any(map(runs, pids))
    assert (pool.is_active, pool.instance_count) == (False, 0)
    with pytest.raises(sky.PoolClosed, match="closed"):
        double(1) >> pool
    pool.close()
    assert bill is not None
    assert 2 * (closing - opened) <= bill.total_cost == pool.cost <= 2 * (after - before + 1)  # begun seconds in full
    assert (bill.hourly_rate, bill.spot_count, bill.ondemand_count) == (7200.0, 0, 2)
    with Ledger(default_url()) as ledger:
        is_settled(pool, lease.pool_id, ledger)
    unordered = sky.CallProgress | sky.CostUpdate | sky.BootstrapProgress
    names = [type(event).__name__ for event in recorded.events if not isinstance(event, unordered)]
    assert names == [
        *["InfraCreating", "InfraCreated", "InstanceLaunching", *["InstanceProvisioned"] * 2],
        *["BootstrapStarting"] * 2,
        *["BootstrapCompleted"] * 2,
        *["PoolReady", "PoolStopping", *["InstanceStopping"] * 2, "CostFinal"],
    ]
    for kind in (sky.InstanceProvisioned, sky.BootstrapStarting, sky.BootstrapCompleted, sky.InstanceStopping):
        assert {event.instance_id for event in recorded.of(kind)} == ids
    with pool:
        assert pool.cost_final is None
        assert pool.lease.pool_id != lease.pool_id
        assert double(1) >> pool == 2
    assert len(recorded.of(sky.CostFinal)) == 2


def is_settled(pool: sky.ComputePool, pool_id: str, ledger: Ledger) -> None:
    """Check that the ledger has the end of a pool, its real cost, and no open entry or reservation."""
    entry = ledger.pool(pool_id)
    assert entry is not None
    assert entry.ended_at is not None
    assert ledger.open_intents(pool_id=pool_id) == ledger.open_reservations(pool_id=pool_id) == []
    (row,) = ledger.cost_rows(CostBy.POOL, pool_id=pool_id)
    assert float(row.cost_usd) == pool.cost
    assert pool.receipt is not None
    assert (pool.receipt["pool_id"], pool.receipt["left"], pool.receipt["total_cost_usd"]) == (pool_id, [], pool.cost)


def test_a_multi_pool_opens_and_closes_its_pools(tmp_path: Path) -> None:
    pools = [one_node(env={"TASTE": taste}) for taste in ("sweet", "sour")]
    look = sky.compute(lambda: os.environ.get("TASTE"))
    with sky.MultiPool(*pools) as (sweet, sour):
        assert (look() >> sweet, look() >> sour, look() >> sweet) == ("sweet", "sour", "sweet")
    assert not any(pool.is_active for pool in pools)
    recorded = RecordedEvents()
    good = one_node(recorded)
    with pytest.raises(sky.NoCapacity):
        sky.MultiPool(good, one_node(provider=NoCapacityProvider(folder=str(tmp_path)))).__enter__()
    assert not good.is_active
    assert len(recorded.of(sky.CostFinal)) == 1


def test_an_idle_pool_ends_itself_and_a_running_call_keeps_it_alive(caplog: pytest.LogCaptureFixture) -> None:
    """Later calls raise an error with the reason. Sleeps: the call has to last longer than the idle time."""
    recorded = RecordedEvents()
    # it counts from the node's start: on a busy machine seconds pass before the pool is open
    with one_node(recorded, timeout=8.0) as pool:
        assert pool.submit(sky.compute(lambda: time.sleep(11.0) or "done")()).result(timeout=60) == "done"
        assert double(1) >> pool == 2
        wait_until(lambda: recorded.of(sky.CostFinal), "the idle pool's bill")
        assert not pool.is_active
        with pytest.raises(sky.PoolClosed, match="idle"):
            double(1) >> pool
    assert len(recorded.of(sky.CostFinal)) == 1
    assert any("idle" in record.message for record in caplog.records)


def test_a_pool_that_must_end_at_the_end_of_its_opening_does_not_open(monkeypatch: pytest.MonkeyPatch) -> None:
    """The money is used up between the last machine and the last line of `start`. Else it would end a second later."""
    used_up = sky.BudgetExceeded("the money is used up", "team")

    def limits(_limit: object, _renewal: object, fail: Any, _log: object) -> Any:
        return SimpleNamespace(start=lambda: None, end=lambda: fail(used_up))

    monkeypatch.setattr(session, "OpeningLimits", limits)
    recorded = RecordedEvents()
    with pytest.raises(sky.BudgetExceeded, match="the money is used up"):
        one_node(recorded).open()
    (created,) = recorded.of(sky.InfraCreating)
    assert sky.Local().instances(created.pool_id) == []


@pytest.fixture
def outage(monkeypatch: pytest.MonkeyPatch) -> threading.Event:
    """While it is set, the ledger accepts no write of this process."""
    is_away = threading.Event()
    real = Database.write

    @contextlib.contextmanager
    def write(self: Database) -> Iterator[Any]:
        if is_away.is_set():
            raise sky.LedgerError("the ledger's server is away")
        with real(self) as connection:
            yield connection

    monkeypatch.setattr(Database, "write", write)
    return is_away


@pytest.mark.parametrize("is_back_soon", [True, False])
def test_a_ledger_that_fails_while_a_pool_closes_gets_its_end_later(
    outage: threading.Event, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch, *, is_back_soon: bool
) -> None:
    """Refused writes are repeated by this `close` if the ledger works again, or by the next. The bill is the actual
    cost, and no reservation stays.
    """
    reapers: list[Reaper] = []
    start, release = Reaper.start, PoolMachines.release

    def started(reaper_input: ReaperInput) -> Reaper:
        reapers.append(start(reaper_input))
        return reapers[-1]

    monkeypatch.setattr(Reaper, "start", started)
    with Ledger(default_url()) as ledger:
        ledger.set_account(Account("outage", Decimal(2000), Period.MONTH))
        pool = one_node(budget="outage").open()
        pool_id = pool.lease.pool_id
        (reaper,) = reapers
        outage.set()
        if is_back_soon:
            monkeypatch.setattr(PoolMachines, "release", lambda machines: (release(machines), outage.clear())[0])
            pool.close()
            assert "has it now: the ledger's server is away" in caplog.text
        else:
            with pytest.raises(sky.LedgerError, match="server is away"):
                pool.close()
            with pytest.raises(sky.PoolClosed, match="close it, and open it then"):
                pool.open()
            assert not reaper.is_alive  # as this process sees it: the reaper was left to record it
            outage.clear()
            pool.close()
        is_settled(pool, pool_id, ledger)
        assert reaper._process is not None
        reaper._process.wait(120)


def test_a_detach_that_fails_leaves_the_pool_as_it_was(
    outage: threading.Event, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A node, the ledger or the account may fail: no lease is longer than before, no more money is reserved, and the
    pool can be detached later.
    """

    def unreachable(self: PoolMachines, seconds: float) -> None:
        extend(self, seconds)
        raise sky.Unreachable("node 1 does not answer")

    extend, roll = PoolMachines.extend_leases, Ledger.roll
    with Ledger(default_url()) as ledger, contextlib.ExitStack() as undo:
        ledger.set_account(Account("leaving", Decimal(2), Period.MONTH))
        pool = one_node(provider=sky.Local(price_per_hour=3.6), budget="leaving", lease_seconds=60).open()
        undo.callback(pool.close)
        (node,) = pool.lease.nodes
        directory, pool_id = Path(node.instance.directory or ""), pool.lease.pool_id

        def reserved() -> Decimal | int:
            return sum(reservation.reserved_usd for reservation in ledger.open_reservations(pool_id=pool_id))

        def raises(error: type[sky.SkywardError], words: str, seconds: float) -> None:
            with pytest.raises(error, match=words):
                pool.detach(lease_seconds=seconds)
            entry = ledger.pool(pool_id)
            assert entry is not None
            assert not entry.lives_by_lease
            assert (entry.lease_expires_at - datetime.now(UTC)).total_seconds() <= 60
            assert not (directory / DETACHED).exists()
            assert (read_lease(directory) or 0.0) <= uptime() + 60
            assert reserved() < Decimal("0.5")
            assert pool.is_active
            assert double(1) >> pool == 2

        raises(sky.BudgetExceeded, r"has .* USD left of .* pays for 19\d\d s: detach\(lease_seconds=", 86_400)
        with monkeypatch.context() as patch:
            patch.setattr(PoolMachines, "extend_leases", unreachable)
            raises(sky.Unreachable, "node 1 does not answer", 1800)
        with monkeypatch.context() as patch:
            # the ledger is away after that
            patch.setattr(Ledger, "roll", lambda *given, **more: (roll(*given, **more), outage.set())[0])
            undo.callback(outage.clear)
            with pytest.raises(sky.LedgerError, match="server is away"):
                pool.detach(lease_seconds=1800)
        outage.clear()
        assert not (directory / DETACHED).exists()
        assert (read_lease(directory) or 0.0) <= uptime() + 60
        before = datetime.now(UTC)
        lease = pool.detach(lease_seconds=1800)
        undo.callback(sky.release, pool_id)
        entry = ledger.pool(lease.pool_id)
        assert entry is not None
        assert entry.lives_by_lease
        assert lease.expires_at is not None
        assert 1799 <= (lease.expires_at - before).total_seconds() < 1805
        seconds_left = (lease.expires_at - datetime.now(UTC)).total_seconds()
        assert min(read_paid(directory) or 0.0, read_lease(directory) or 0.0) - uptime() >= seconds_left - 0.2
        assert reserved() >= Decimal("1.8")


def test_a_lease_is_not_longer_than_max_cost_lasts() -> None:
    pool = one_node(provider=sky.Local(price_per_hour=36), max_cost=5).open()
    lease = pool.detach(lease_seconds=86_400)
    try:
        assert lease.expires_at is not None
        assert 300 < (lease.expires_at - datetime.now(UTC)).total_seconds() <= 500
    finally:
        sky.release(lease.pool_id)


@pytest.mark.parametrize("are_errors", [False, True])
def test_a_forgotten_pool_warns_and_is_closed(monkeypatch: pytest.MonkeyPatch, *, are_errors: bool) -> None:
    recorded = RecordedEvents()
    raised: list[Any] = []
    monkeypatch.setattr(threading, "excepthook", raised.append)
    pool = one_node(recorded).open()
    instance_id = pool.lease.nodes[0].instance.id
    with warnings.catch_warnings(record=True) as warned:
        warnings.simplefilter("error" if are_errors else "always")
        del pool
        gc.collect()
        wait_until(lambda: recorded.of(sky.CostFinal), "the bill")
    assert len(recorded.of(sky.CostFinal)) == 1
    if are_errors:
        wait_until(lambda: raised, "the warning, which is an error")
        assert [args.exc_type for args in raised] == [ResourceWarning]
    else:
        assert any(instance_id in str(warning.message) for warning in warned if warning.category is ResourceWarning)


@pytest.mark.parametrize("seconds", [0.3, 1.0])
def test_a_pool_whose_opening_is_cancelled_leaves_nothing(seconds: float) -> None:
    async def program() -> None:
        async with asyncio.timeout(seconds), sky.ComputePool(provider=sky.Local(), display="quiet"):
            await asyncio.Event().wait()

    with pytest.raises(TimeoutError) as caught:
        asyncio.run(program())
    assert not hasattr(caught.value.__cause__, "__notes__")


MOST_AT_ONCE = 1024
"""The limit of `concurrency` (docs/pool/settings.md)."""


@sky.compute
def runs_beside_others(folder: str, number: int) -> int:
    """Note that this call runs, and wait until all do."""
    Path(folder, str(number)).touch()
    while not Path(folder, "go").exists():
        time.sleep(0.5)
    return number


@pytest.mark.timeout(600)
def test_as_many_calls_run_at_once_as_the_page_promises(tmp_path: Path) -> None:
    """Each has a process and several open files: more than `select` takes, and than a soft limit of 1,024 allows."""
    with sky.ComputePool(provider=sky.Local(), concurrency=MOST_AT_ONCE, display="quiet") as pool:
        futures = pool.submit_all([runs_beside_others(str(tmp_path), number) for number in range(MOST_AT_ONCE)])
        wait_until(lambda: len(os.listdir(tmp_path)) == MOST_AT_ONCE, "all calls to run at once", 400)
        (tmp_path / "go").touch()
        assert [future.result(timeout=200) for future in futures] == list(range(MOST_AT_ONCE))
