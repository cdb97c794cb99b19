"""Real pools: calls on local nodes, how the calls end, and what is left after the pool."""

import contextlib
import gc
import logging
import os
import sys
import threading
import time
import warnings
from collections.abc import Iterator
from datetime import UTC, datetime
from decimal import Decimal
from pathlib import Path
from typing import Any

import pytest

import skyward_core as sky
from skyward_core.cleanup.reaper import Reaper, ReaperInput
from skyward_core.ledger.database import Database
from skyward_core.ledger.ledger import Ledger, default_url
from skyward_core.ledger.rows import Account, Bucket, CostBy, Period
from skyward_core.provisioning.lifecycle import PoolMachines
from skyward_core.worker.slot import TERM_SECONDS
from skyward_core.worker.watchdog import DETACHED, read_lease, read_paid, uptime
from tests.conftest import RecordedEvents, wait_until
from tests.fakes import NoCapacityProvider
from tests.system.pool.test_pool import (  # noqa: F401 - fixtures
    _crashing,
    block,
    crash,
    crashing,
    pid_of,
    runs,
)
from tests.unit.pool.test_pool import (
    double,
    one_node,
)


def test_a_call_that_returns_as_it_is_stopped_does_not_stop_the_next() -> None:
    """A call returns because of the signal that stops it. The runner that must die gets no other call, so the next call
    is not stopped.

    Sleeps: the next call has to run when the time of the stopped one is over.
    """

    def yields() -> str:
        import signal
        import time

        asked: list[int] = []
        signal.signal(signal.SIGTERM, lambda number, _: asked.append(number))
        print("waiting", flush=True)
        while not asked:
            time.sleep(0.01)
        return "as you like"

    def nap() -> str:
        import time

        time.sleep(TERM_SECONDS + 1)
        return "slept"

    recorded = RecordedEvents()
    with one_node(recorded) as pool:
        call = pool.submit(sky.compute(yields)())
        wait_until(lambda: recorded.lines(call.call_id), "the call to run")
        assert call.cancel()
        assert pool.run(sky.compute(nap)()) == "slept"


@pytest.mark.parametrize("how", ["exit", "segfault", "sys.exit", "kill"])
def test_a_crash_loses_only_its_own_call(how: str, crashing: sky.ComputePool, tmp_path: Path) -> None:
    """Of many calls in flight, a crash loses only the result of its own call; all others run exactly once."""

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


def test_a_closed_pool_raises_pool_closed_and_can_be_opened_again() -> None:
    """After `with`, calls raise PoolClosed. A second close is allowed. A new opening rents new machines on a new
    bill.
    """
    recorded = RecordedEvents()
    pool = one_node(recorded)
    with pool as opened:
        assert opened is pool
        assert pool.is_active
        assert pool.instance_count == 1
        first = pool.lease
        assert double(1) >> pool == 2
    assert not pool.is_active
    assert pool.instance_count == 0
    with pytest.raises(sky.PoolClosed, match="closed"):
        double(1) >> pool
    pool.close()
    bill = pool.cost_final
    assert bill is not None
    assert bill.total_cost == pool.cost > 0
    with pool:
        assert pool.cost_final is None
        assert pool.lease.pool_id != first.pool_id
        assert double(1) >> pool == 2
    assert len(recorded.of(sky.CostFinal)) == 2


def test_the_events_of_a_pool_are_in_order() -> None:
    """Events are in the order in which things happen, and agree with each other about machines and calls."""
    recorded = RecordedEvents()
    with one_node(recorded, nodes=2, collect_metrics=False) as pool:
        pool.map(double, range(50))
        ids = {node.instance.id for node in pool.lease.nodes}
    names = [
        type(event).__name__
        for event in recorded.events
        if not isinstance(event, sky.CallProgress | sky.CostUpdate | sky.BootstrapProgress)
    ]
    assert names[:3] == ["InfraCreating", "InfraCreated", "InstanceLaunching"]
    assert names[3:5] == ["InstanceProvisioned"] * 2
    assert names[5:7] == ["BootstrapStarting"] * 2
    assert names[7:9] == ["BootstrapCompleted"] * 2
    assert names[9:] == ["PoolReady", "PoolStopping", "InstanceStopping", "InstanceStopping", "CostFinal"]
    for kind in (sky.InstanceProvisioned, sky.BootstrapStarting, sky.BootstrapCompleted, sky.InstanceStopping):
        assert {event.instance_id for event in recorded.of(kind)} == ids
    assert recorded.of(sky.CallProgress)[-1] == sky.CallProgress(submitted=50, done=50, failed=0)


def test_calls_that_still_run_when_the_pool_is_closed_get_an_error(tmp_path: Path) -> None:
    """No caller waits for ever for a call of a closed pool, running or waiting."""
    with one_node() as pool:
        futures = [pool.submit(block(tmp_path, name)) for name in ("a", "b")]
        pid = pid_of(tmp_path, "a")
    assert [type(future.exception(timeout=10)) for future in futures] == [sky.PoolClosed] * 2
    assert not runs(pid)


def test_two_pools_at_once_are_separate(pool: sky.ComputePool) -> None:
    """Calls run on the pool to which they are sent, with its environment."""

    @sky.compute
    def look() -> tuple[str | None, int]:
        return os.environ.get("TASTE"), sky.instance_info().total_nodes

    with one_node(env={"TASTE": "sour"}) as other:
        assert look() >> other == ("sour", 1)
        assert look() >> pool == (None, 2)
        assert look() >> other == ("sour", 1)


def test_a_multi_pool_opens_and_closes_its_pools() -> None:
    """All pools are open inside, and closed outside, of the block."""
    pools = [one_node(env={"TASTE": taste}) for taste in ("sweet", "sour")]

    @sky.compute
    def look() -> str | None:
        return os.environ.get("TASTE")

    with sky.MultiPool(*pools) as (sweet, sour):
        assert (look() >> sweet, look() >> sour) == ("sweet", "sour")
    assert not any(pool.is_active for pool in pools)


def test_a_multi_pool_closes_all_if_one_fails(tmp_path: Path) -> None:
    """If one pool cannot be opened its error is raised, and the others are closed and billed."""
    recorded = RecordedEvents()
    good = one_node(recorded)
    with pytest.raises(sky.NoCapacity):
        sky.MultiPool(good, one_node(provider=NoCapacityProvider(folder=str(tmp_path)))).__enter__()
    assert not good.is_active
    assert len(recorded.of(sky.CostFinal)) == 1


def test_an_idle_pool_ends_itself(caplog: pytest.LogCaptureFixture) -> None:
    """After `timeout` seconds without a call the machines end; later calls raise an error with the reason."""
    recorded = RecordedEvents()
    # it counts from the node's start: on a busy machine seconds pass before the pool is open
    with one_node(recorded, timeout=8.0) as pool:
        assert double(1) >> pool == 2
        wait_until(lambda: recorded.of(sky.CostFinal), "the idle pool's bill")
        assert not pool.is_active
        with pytest.raises(sky.PoolClosed, match="idle"):
            double(1) >> pool
    assert len(recorded.of(sky.CostFinal)) == 1
    assert pool.cost_final is not None
    assert any("idle" in record.message for record in caplog.records)


def test_a_running_call_keeps_its_pool_alive() -> None:
    """The idle time counts from the last running call, not from the last submit.

    Sleeps: the call has to last longer than the idle time.
    """
    with one_node(timeout=6.0) as pool:  # opening the pool and submitting the next call may take this long
        assert pool.submit(sky.compute(lambda: time.sleep(9.0) or "done")()).result(timeout=60) == "done"
        assert double(1) >> pool == 2


def test_a_pool_is_in_the_ledger_while_it_is_open_and_after_it() -> None:
    """The ledger has the seconds of its machines as soon as it is open. When it has ended, the bill is the sum of the
    ledger's rows.
    """
    with Ledger(default_url()) as ledger:
        with one_node() as pool:
            pool_id = pool.lease.pool_id
            (intent,) = ledger.open_intents(pool_id=pool_id)
            assert intent.cloud_id == pool.lease.nodes[0].instance.id
            assert intent.seconds[Bucket.BOOTSTRAPPING] > 0
            assert double(1) >> pool == 2
        assert ledger.open_intents(pool_id=pool_id) == []
        (row,) = ledger.cost_rows(CostBy.POOL, pool_id=pool_id)
        assert float(row.cost_usd) == pool.cost
        entry = ledger.pool(pool_id)
        assert entry is not None
        assert entry.ended_at is not None
    assert pool.receipt is not None
    assert (pool.receipt["pool_id"], pool.receipt["left"], pool.receipt["total_cost_usd"]) == (pool_id, [], pool.cost)


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
        pool = sky.ComputePool(provider=sky.Local(price_per_hour=3600), display="quiet", budget="outage").open()
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
            assert ledger.pool(pool_id) is not None
            outage.clear()
            pool.close()
        entry = ledger.pool(pool_id)
        assert entry is not None
        assert entry.ended_at is not None
        assert ledger.open_intents(pool_id=pool_id) == []
        assert ledger.open_reservations(pool_id=pool_id) == []
        (row,) = ledger.cost_rows(CostBy.POOL, pool_id=pool_id)
        assert float(row.cost_usd) == pool.cost
        assert pool.receipt is not None
        assert pool.receipt["left"] == []
        assert reaper._process is not None
        reaper._process.wait(60)


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
        pool = sky.ComputePool(
            provider=sky.Local(price_per_hour=3.6), display="quiet", budget="leaving", lease_seconds=60
        ).open()
        undo.callback(pool.close)
        (node,) = pool.lease.nodes
        directory = Path(node.instance.directory or "")
        pool_id = pool.lease.pool_id

        def raises(error: type[sky.SkywardError], words: str, seconds: float) -> None:
            with pytest.raises(error, match=words):
                pool.detach(lease_seconds=seconds)
            entry = ledger.pool(pool_id)
            assert entry is not None
            assert not entry.lives_by_lease
            assert (entry.lease_expires_at - datetime.now(UTC)).total_seconds() <= 60
            assert not (directory / DETACHED).exists()
            assert (read_lease(directory) or 0.0) <= uptime() + 60
            assert sum(reservation.reserved_usd for reservation in ledger.open_reservations(pool_id=pool_id)) < Decimal(
                "0.5"
            )
            assert pool.is_active
            assert double(1) >> pool == 2

        raises(sky.BudgetExceeded, r"has .* USD left of .* pays for 19\d\d s: detach\(lease_seconds=", 86_400)
        with monkeypatch.context() as patch:
            patch.setattr(PoolMachines, "extend_leases", unreachable)
            raises(sky.Unreachable, "node 1 does not answer", 1800)
        with monkeypatch.context() as patch:
            patch.setattr(
                Ledger, "roll", lambda *given, **more: (roll(*given, **more), outage.set())[0]
            )  # from then on it fails
            undo.callback(outage.clear)
            with pytest.raises(sky.LedgerError, match="server is away"):
                pool.detach(lease_seconds=1800)
        outage.clear()
        assert not (directory / DETACHED).exists()
        assert (read_lease(directory) or 0.0) <= uptime() + 60
        before = datetime.now(UTC)
        lease = pool.detach(lease_seconds=1800)
        undo.callback(sky.release, pool_id)
        is_detached_for(1800, lease, before, ledger, directory)


def is_detached_for(seconds: float, lease: sky.Lease, before: datetime, ledger: Ledger, directory: Path) -> None:
    """Check the entry, the lease, the paid time and the reserved money of a pool that was detached after `before`."""
    entry = ledger.pool(lease.pool_id)
    assert entry is not None
    assert entry.lives_by_lease
    assert lease.expires_at is not None
    assert seconds - 1 <= (lease.expires_at - before).total_seconds() < seconds + 5
    seconds_left = (lease.expires_at - datetime.now(UTC)).total_seconds()
    assert (read_paid(directory) or 0.0) - uptime() >= seconds_left - 0.2
    assert (read_lease(directory) or 0.0) - uptime() >= seconds_left - 0.2
    reserved = ledger.open_reservations(pool_id=lease.pool_id)
    assert sum(reservation.reserved_usd for reservation in reserved) >= Decimal("1.8")


def test_a_lease_is_not_longer_than_max_cost_lasts() -> None:
    """A pool whose limit lasts only some minutes is detached for those, whatever lease was requested."""
    pool = sky.ComputePool(provider=sky.Local(price_per_hour=36), display="quiet", max_cost=5).open()
    lease = pool.detach(lease_seconds=86_400)
    try:
        assert lease.expires_at is not None
        assert 300 < (lease.expires_at - datetime.now(UTC)).total_seconds() <= 500
    finally:
        sky.release(lease.pool_id)


def test_a_forgotten_pool_warns_and_is_closed() -> None:
    """A pool that is collected while open warns with ResourceWarning, which names its machines, and ends them."""
    recorded = RecordedEvents()
    pool = one_node(recorded).open()
    instance_id = pool.lease.nodes[0].instance.id
    with pytest.warns(ResourceWarning, match=instance_id):
        del pool
        gc.collect()
    wait_until(lambda: recorded.of(sky.CostFinal), "the bill")
    assert len(recorded.of(sky.CostFinal)) == 1


def test_a_forgotten_pool_is_closed_where_warnings_are_errors(monkeypatch: pytest.MonkeyPatch) -> None:
    """Under `python -W error` the machines of a forgotten pool end too."""
    recorded = RecordedEvents()
    unraisable: list[Any] = []
    monkeypatch.setattr(sys, "unraisablehook", unraisable.append)
    monkeypatch.setattr(
        sys, "excepthook", lambda *raised: unraisable.append(raised)
    )  # weakref.finalize reports errors here
    pool = one_node(recorded).open()
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        del pool
        gc.collect()
    wait_until(lambda: recorded.of(sky.CostFinal), "the bill")


def test_a_callback_that_raises_stops_no_call_and_no_other_sink(caplog: pytest.LogCaptureFixture) -> None:
    """A callback's error is logged once, however often it is raised. Calls continue and other sinks get every event."""
    recorded = RecordedEvents()

    def broken(event: object) -> None:
        raise ValueError("callback trouble")

    with caplog.at_level(logging.ERROR, logger="skyward"), sky.use_callback(recorded):
        with one_node(on_event=broken) as pool:
            assert double(1) >> pool == 2
    reports = [record for record in caplog.records if record.exc_info and "callback trouble" in str(record.exc_info[1])]
    assert len(reports) == 1
    assert len(recorded.of(sky.CostFinal)) == 1
