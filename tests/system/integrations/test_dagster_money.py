"""Dagster: the parts of a run's bill, and what the run's events say of them. The test writes the bills into the ledger."""

import threading
from collections.abc import Iterator
from datetime import UTC, datetime, timedelta
from decimal import Decimal
from pathlib import Path
from typing import Any

import pytest

dg = pytest.importorskip("dagster")

import skyward_core as sky  # noqa: E402
from dagster_skyward import settlement  # noqa: E402
from dagster_skyward.metadata import COST_USD, OTHER_COST_USD, POOL_ID, RECEIPT, split_micro  # noqa: E402
from dagster_skyward.settlement import settle  # noqa: E402
from skyward_core.ledger.ledger import Ledger  # noqa: E402
from skyward_core.ledger.rows import Bucket, Price, ResourceKind, ResourceRequest  # noqa: E402
from skyward_core.machines.owner import Owner  # noqa: E402

POOL = "sky-bill"
SECONDS = 1000
"""For how long its one machine was rented, at 3.6 USD per hour: it costs 1 USD."""


@dg.asset
def made() -> dg.MaterializeResult[None]:
    return dg.MaterializeResult(metadata={COST_USD: 0.25})


@dg.asset
def failed() -> None:
    raise LookupError("the payload's own error")


@dg.op
def op(context: dg.OpExecutionContext) -> int:
    context.add_output_metadata({COST_USD: 0.1})
    return 1


@dg.job
def ops() -> None:
    op()


class Bill:
    """The ledger's entries of one pool."""

    def __init__(self, url: str) -> None:
        self.ledger = Ledger(url)

    def open(self, work: sky.Work) -> None:
        expires = datetime.now(UTC) + timedelta(hours=1)
        self.ledger.open_pool(
            POOL, owner=Owner.here(), provider={"name": "local"}, spec_json="{}", lease_expires_at=expires, work=work
        )
        request = ResourceRequest(
            ResourceKind.INSTANCE, "local", "here", POOL, POOL, {}, expires, Price(Decimal("3.6"))
        )
        (intent,) = self.ledger.intend_all(POOL, [request])
        self.ledger.bind(intent, "i-1")
        self.ledger.note_all({intent.id: {Bucket.IDLE: SECONDS}})

    def share(self, shares: dict[sky.Work, float]) -> None:
        self.ledger.set_shares(POOL, {work: Decimal(repr(usd)) for work, usd in shares.items()})

    def end(self) -> None:
        self.ledger.close_all([1], "it is gone")
        self.ledger.end_pool(POOL)


@pytest.fixture
def bill(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Bill]:
    url = f"sqlite:///{tmp_path / 'bills.db'}"
    monkeypatch.setenv("SKYWARD_LEDGER", url)
    it = Bill(url)
    yield it
    it.ledger.close()


@pytest.fixture(scope="module")
def instance() -> Iterator[Any]:
    with dg.DagsterInstance.ephemeral() as ephemeral:
        yield ephemeral


def work(run: dg.DagsterRun, task: str = "", asset: str = "") -> sky.Work:
    return sky.Work(system="dagster", workflow=run.job_name, run=run.run_id, task=task, asset=asset)


def run_of(assets: list[Any], instance: Any) -> dg.DagsterRun:
    return dg.materialize(assets, instance=instance, raise_on_error=False).dagster_run


def observed(instance: Any, run: dg.DagsterRun) -> list[tuple[str, str, float]]:
    """Step, asset and USD of each observation, in their order."""
    return [
        (entry.step_key, event.asset_key.to_user_string(), observation.metadata[OTHER_COST_USD].value)
        for entry in instance.all_logs(run.run_id, of_type=dg.DagsterEventType.ASSET_OBSERVATION)
        for event in [entry.dagster_event]
        for observation in [event.asset_observation_data.asset_observation]
    ]


def test_what_no_metadata_has_is_observed_once(bill: Bill, instance: Any) -> None:
    """The end of the machines, and a step without a materialization. Before the pool has ended nothing is reported."""
    run = run_of([made, failed], instance)
    bill.open(work(run, "made", "made"))
    bill.share({work(run, "failed", "failed"): 0.3})
    assert not settle(instance, run)
    assert observed(instance, run) == []
    bill.end()
    assert not settle(instance, run, ["failed"]), "another step may still have costs"
    assert observed(instance, run) == [("failed", "failed", 0.3)]
    for is_complete in (False, True):  # the second one has found that nothing was missing
        assert settle(instance, run) is is_complete
        assert observed(instance, run) == [("failed", "failed", 0.3), ("made", "made", 0.45)]
    (first, _) = instance.all_logs(run.run_id, of_type=dg.DagsterEventType.ASSET_OBSERVATION)
    metadata = first.dagster_event.asset_observation_data.asset_observation.metadata
    assert metadata[POOL_ID].value == POOL
    assert metadata["skyward/step"].value == "failed"
    assert RECEIPT not in metadata, "the pool was opened for the other step"
    (_, last) = instance.all_logs(run.run_id, of_type=dg.DagsterEventType.ASSET_OBSERVATION)
    receipt = last.dagster_event.asset_observation_data.asset_observation.metadata[RECEIPT].value
    assert (receipt["pool_id"], receipt["total_cost_usd"]) == (POOL, 1.0)


def test_what_is_for_no_step_is_divided_among_the_steps_of_the_run(bill: Bill, instance: Any) -> None:
    """A process that runs several steps opens a shared pool for the run, and writes the shares of its steps."""
    run = run_of([made, failed], instance)
    bill.open(work(run))
    bill.share({work(run, "made", "made"): 0.3, work(run, "failed", "failed"): 0.2})
    bill.end()
    settle(instance, run)
    assert sorted(observed(instance, run)) == [("failed", "failed", 0.4), ("made", "made", 0.35)]


def test_a_sum_that_is_too_large_is_mended(bill: Bill, instance: Any) -> None:
    """Two settlers on different hosts may write the same difference, or a part has shrunk since its metadata."""
    run = run_of([made], instance)
    bill.open(work(run, "made", "made"))
    bill.share({sky.Work(run="another"): 0.9})
    bill.end()
    assert not settle(instance, run)
    assert observed(instance, run) == [("made", "made", -0.15)]
    assert settle(instance, run)


def test_an_op_has_the_rest_in_an_event_of_its_step(bill: Bill, instance: Any) -> None:
    """It has no asset to observe. A pool that no step has used has its cost in an event of the run."""
    run = ops.execute_in_process(instance=instance).dagster_run
    bill.open(work(run, "op"))
    bill.end()
    settle(instance, run)
    assert settle(instance, run)

    def rests(run: dg.DagsterRun) -> list[tuple[str | None, float]]:
        return [
            (entry.step_key, metadata[OTHER_COST_USD].value)
            for entry in instance.all_logs(run.run_id, of_type=dg.DagsterEventType.ENGINE_EVENT)
            for metadata in [entry.dagster_event.engine_event_data.metadata]
            if OTHER_COST_USD in metadata
        ]

    assert rests(run) == [("op", 0.9)]
    idle = ops.execute_in_process(instance=instance).dagster_run
    bill.share({work(idle): 0.25})
    settle(instance, idle)
    assert settle(instance, idle)
    assert rests(idle) == [(None, 0.25)]


def test_two_settlers_at_once_report_each_part_once(bill: Bill, instance: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """The second one waits until the first one has written, also if both have found a difference before."""
    run = run_of([made, failed], instance)
    bill.open(work(run, "made", "made"))
    bill.end()
    first_reads, may_go_on = threading.Event(), threading.Event()
    cost_parts = sky.cost_parts

    def slow(work: sky.Work) -> Any:
        first_reads.set()
        assert may_go_on.wait(30)
        return cost_parts(work)

    monkeypatch.setattr(sky, "cost_parts", slow)
    threads = [threading.Thread(target=settle, args=(instance, run)) for _ in range(2)]
    threads[0].start()
    assert first_reads.wait(30)
    threads[1].start()
    may_go_on.set()
    for thread in threads:
        thread.join(60)
    assert observed(instance, run) == [("made", "made", 0.75)]


def test_a_settler_that_is_killed_leaves_the_rest_to_the_next(
    bill: Bill, instance: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The events are the state. An outage of the ledger is no end of the work either."""
    run = run_of([made, failed], instance)
    bill.open(work(run, "made", "made"))
    bill.share({work(run, "failed", "failed"): 0.3})
    bill.end()
    report = settlement.report_observation
    with monkeypatch.context() as patch:
        patch.setattr(settlement, "report_observation", lambda *given: (report(*given), 1 / 0))
        with pytest.raises(ZeroDivisionError):
            settle(instance, run)
    assert len(observed(instance, run)) == 1
    settle(instance, run)
    assert sorted(observed(instance, run)) == [("failed", "failed", 0.3), ("made", "made", 0.45)]


@pytest.mark.parametrize(
    ("amount", "weights", "parts"),
    [(10, [1, 1, 1], [3, 3, 4]), (10, [0, 0], [5, 5]), (7, [2, 5], [2, 5]), (-3, [1, 1], [-2, -1]), (5, [], [])],
)
def test_parts_of_micro_dollars_add_up(amount: int, weights: list[int], parts: list[int]) -> None:
    assert split_micro(amount, weights) == parts
