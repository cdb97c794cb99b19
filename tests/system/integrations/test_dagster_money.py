"""Dagster: the parts of a run's bill, and what the events of a pool become in the run's log. No pool is opened."""

import base64
import math
import threading
from collections.abc import Iterator
from datetime import UTC, datetime, timedelta
from decimal import Decimal
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from xml.etree import ElementTree as ET

import pytest

dg = pytest.importorskip("dagster")

import skyward_core as sky  # noqa: E402
from dagster_skyward import settlement, step, step_events, step_report  # noqa: E402
from dagster_skyward.metadata import (  # noqa: E402
    COST_USD,
    CPU_UTIL_PCT,
    GPU_UTIL_PCT,
    MEMORY_GB,
    OTHER_COST_USD,
    POOL_ID,
    RECEIPT,
    RUNNING_COST_USD,
    Usage,
    equal_parts,
    plain,
)
from dagster_skyward.pool_asset import MACHINES, PHASES, POOLS, TOTAL_USD, USERS  # noqa: E402
from dagster_skyward.settlement import (  # noqa: E402
    OPEN,
    REPORTED,
    STATE_TAG,
    TOTAL_TAG,
    forget_parent,
    forget_parents,
    note_open,
    report_rests,
    settle,
    settle_ended_runs,
)
from dagster_skyward.step import Step  # noqa: E402
from dagster_skyward.step_events import StepEvents  # noqa: E402
from dagster_skyward.step_report import BARS, BOOTSTRAP, CHART, CONSOLE, NODES_TABLE, PROVISION, RUN, WAIT, savings  # noqa: E402
from dagster_skyward.upkeep import _report_costs  # noqa: E402
from skyward_core.ledger.ledger import Ledger  # noqa: E402
from skyward_core.ledger.rows import Bucket, Price, ResourceKind, ResourceRequest  # noqa: E402
from skyward_core.ledger.uses import NewUse, UseCount  # noqa: E402
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

    def open(self, work: sky.Work, name: str = "") -> None:
        expires = datetime.now(UTC) + timedelta(hours=1)
        owner, provider = Owner.here(), {"name": "local"}
        self.ledger.open_pool(
            POOL, owner=owner, provider=provider, spec_json="{}", lease_expires_at=expires, work=work, name=name
        )
        request = ResourceRequest(
            ResourceKind.INSTANCE, "local", "here", POOL, POOL, {}, expires, Price(Decimal("3.6"))
        )
        (intent,) = self.ledger.intend_all(POOL, [request])
        self.ledger.bind(intent, "i-1")
        self.ledger.note_all({intent.id: {Bucket.IDLE: SECONDS}})

    def use(self, work: sky.Work, usd: float, *, has_ended: bool = True) -> None:
        it, count = NewUse(work.task, POOL, work), {work.task: UseCount(1.0, usd)}
        self.ledger.uses.write([it], {} if has_ended else count, count if has_ended else {})

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
def instance(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Any]:
    home = tmp_path_factory.mktemp("dagster")
    (home / "dagster.yaml").write_text("telemetry: {enabled: false}\n")
    with dg.DagsterInstance.from_config(str(home)) as it:
        yield it


def work(run: dg.DagsterRun, task: str = "", asset: str = "") -> sky.Work:
    return sky.Work(system="dagster", workflow=run.job_name, run=run.run_id, task=task, asset=asset)


def run_of(assets: list[Any], instance: Any) -> dg.DagsterRun:
    return dg.materialize(assets, instance=instance, raise_on_error=False).dagster_run


def observed(instance: Any, run: dg.DagsterRun, has_step: bool | None = None) -> list[tuple[str, str, float]]:
    """Step, asset and USD of each observation, in their order; of those with or without a step, or of all."""
    return [
        (entry.step_key, event.asset_key.to_user_string(), observation.metadata[OTHER_COST_USD].value)
        for entry in instance.all_logs(run.run_id, of_type=dg.DagsterEventType.ASSET_OBSERVATION)
        for event in [entry.dagster_event]
        for observation in [event.asset_observation_data.asset_observation]
        if has_step in {None, entry.step_key is not None}
    ]


def rests(instance: Any, run: dg.DagsterRun) -> list[tuple[str | None, float]]:
    """Step and USD of each event of a step without an asset, or of the run."""
    return [
        (entry.step_key, metadata[OTHER_COST_USD].value)
        for entry in instance.all_logs(run.run_id, of_type=dg.DagsterEventType.ENGINE_EVENT)
        for metadata in [entry.dagster_event.engine_event_data.metadata]
        if OTHER_COST_USD in metadata
    ]


def test_what_no_metadata_has_is_observed_once(bill: Bill, instance: Any) -> None:
    """The end of the machines, and a step without a materialization. Before the pool has ended nothing is reported."""
    run = run_of([made, failed], instance)
    bill.open(work(run, "made", "made"))
    bill.use(work(run, "failed", "failed"), 0.3, has_ended=False)
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
    assert set(metadata) == {OTHER_COST_USD, POOL_ID}, "the page has run, job, step and asset"
    assert RECEIPT not in metadata, "the pool was opened for the other step"
    (_, last) = instance.all_logs(run.run_id, of_type=dg.DagsterEventType.ASSET_OBSERVATION)
    receipt = last.dagster_event.asset_observation_data.asset_observation.metadata[RECEIPT].value
    assert (receipt["pool_id"], receipt["total_cost_usd"]) == (POOL, 1.0)
    assert instance.get_run_by_id(run.run_id).tags[TOTAL_TAG] == "1.000000"


def test_what_no_step_has_used_is_for_the_run(bill: Bill, instance: Any) -> None:
    """Start, idle time and end of a pool that several steps use are an observation of the asset of these pools, and in
    no step's cost. What a step has cost is reported when its use has ended, also while the pool is open.
    """
    run = run_of([made, failed], instance)
    bill.open(work(run))
    bill.use(work(run, "made", "made"), 0.3, has_ended=False)
    bill.use(work(run, "failed", "failed"), 0.2)
    assert not settle(instance, run)
    assert observed(instance, run) == [("failed", "failed", 0.2)]
    bill.end()
    assert [settle(instance, run), settle(instance, run)] == [False, True]
    assert sorted(observed(instance, run, has_step=True)) == [("failed", "failed", 0.2), ("made", "made", 0.05)]
    assert observed(instance, run, has_step=False) == [(None, "skyward/pools/assets", 0.5)]
    (metadata,) = [
        one.asset_observation.metadata
        for one in instance.all_logs(run.run_id, of_type=dg.DagsterEventType.ASSET_OBSERVATION)
        if one.step_key is None
    ]
    assert metadata[TOTAL_USD].value == 1.0
    tables = {name: [row.data for row in metadata[name].records] for name in (PHASES, MACHINES, USERS)}
    assert all(sum(row["USD"] for row in rows) == pytest.approx(1.0) for rows in tables.values())
    assert [(row["machine"], row["USD per hour"]) for row in tables[MACHINES]] == [("i-1", 3.6)]
    assert [(row["step"], row["USD"]) for row in tables[USERS]] == [
        ("made", 0.3),
        ("failed", 0.2),
        ("none: start, idle time and end", 0.5),
    ]


def test_a_re_execution_has_not_the_total_of_its_parent(bill: Bill, instance: Any) -> None:
    """It begins with the tags of its parent. Its own total stays."""
    parent = run_of([made], instance)
    instance.add_run_tags(parent.run_id, {TOTAL_TAG: "2.500000"})
    for total, expected in (("2.500000", "0.000000"), ("0.250000", "0.250000")):
        tags = {TOTAL_TAG: total}
        again = instance.create_run_for_job(ops, tags=tags, parent_run_id=parent.run_id, root_run_id=parent.run_id)
        forget_parent(instance, again)
        assert instance.get_run_by_id(again.run_id).tags[TOTAL_TAG] == expected


@pytest.mark.parametrize("has_used_a_pool", [False, True])
def test_a_re_execution_that_used_no_pool_has_cost_nothing(bill: Bill, instance: Any, has_used_a_pool: bool) -> None:
    """It was canceled in the queue, or its steps need none: no step of it has forgotten the parent's total."""
    parent = run_of([made], instance)
    tags = {TOTAL_TAG: "0.500000", STATE_TAG: REPORTED}
    instance.add_run_tags(parent.run_id, tags)
    again = instance.create_run_for_job(
        ops, tags=tags, parent_run_id=parent.run_id, root_run_id=parent.run_id, status=dg.DagsterRunStatus.CANCELED
    )
    if has_used_a_pool:  # for as much as the parent, by chance
        bill.open(work(again, "made"))
        bill.use(work(again, "made"), 0.5)
        bill.end()
    forget_parents(instance)
    assert instance.get_run_by_id(again.run_id).tags[TOTAL_TAG] == ("0.500000" if has_used_a_pool else "0.000000")
    assert instance.get_run_by_id(parent.run_id).tags[TOTAL_TAG] == "0.500000"


def test_no_cost_is_negative(bill: Bill, instance: Any, caplog: pytest.LogCaptureFixture) -> None:
    """Two settlers on different hosts may write the same difference. Then the log says how much is too much."""
    run = run_of([made], instance)
    bill.open(work(run, "made", "made"))
    bill.use(sky.Work(run="another"), 0.9)
    bill.end()
    assert settle(instance, run)
    assert observed(instance, run) == []
    assert "the events of made have 0.150000 USD more than its bill" in caplog.text


@pytest.mark.parametrize(
    ("made_by_step", "usd", "expected"),
    [
        (["a", "b", "c"], 0.9, [("a", 0.3), ("b", 0.3), ("c", 0.3)]),
        (["a", "b", "c"], 0.000005, [("a", 0.000002), ("b", 0.000002), ("c", 0.000001)]),
        (["c"], 0.9, [("c", 0.9)]),
    ],
    ids=["three outputs", "a rest", "one of three was made"],
)
def test_outputs_of_one_step_divide_its_bill(
    made_by_step: list[str], usd: float, expected: list[tuple[str, float]], bill: Bill, instance: Any
) -> None:
    """Equally among those that were made, to the micro-dollar. Each has a part of what the step knew at its end."""

    @dg.multi_asset(specs=[dg.AssetSpec(name, skippable=True) for name in "abc"])
    def three(context: dg.AssetExecutionContext) -> Any:
        for name in made_by_step:
            yield dg.MaterializeResult(name, metadata={COST_USD: equal_parts(4, 3)["abc".index(name)] / 1e6})

    run = run_of([three], instance)
    bill.open(work(run))
    bill.use(work(run, "three", "a, b, c"), usd)
    bill.end()
    settle(instance, run)
    assert all(usd > 0 for _, _, usd in observed(instance, run))
    sums = {
        event.asset_key.to_user_string(): event.step_materialization_data.materialization.metadata[COST_USD].value
        for entry in instance.all_logs(run.run_id, of_type=dg.DagsterEventType.ASSET_MATERIALIZATION)
        for event in [entry.dagster_event]
    }
    for _, asset, rest in observed(instance, run, has_step=True):
        sums[asset] = round(sums[asset] + rest, 6)
    assert sorted(sums.items()) == expected


def test_an_op_has_the_rest_in_an_event_of_its_step(bill: Bill, instance: Any) -> None:
    """It has no asset to observe. A pool that no step has used has its cost at the asset of the job's pools."""
    run = ops.execute_in_process(instance=instance).dagster_run
    bill.open(work(run, "op"))
    bill.end()
    settle(instance, run)
    assert settle(instance, run)
    assert rests(instance, run) == [("op", 0.9)]
    idle = ops.execute_in_process(instance=instance).dagster_run
    bill.use(work(idle), 0.25)
    settle(instance, idle)
    assert settle(instance, idle)
    assert observed(instance, idle) == [(None, "skyward/pools/ops", 0.25)]


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
    bill.use(work(run, "failed", "failed"), 0.3)
    bill.end()
    report = settlement.report_observation
    with monkeypatch.context() as patch:
        patch.setattr(settlement, "report_observation", lambda *given: (report(*given), 1 / 0))
        with pytest.raises(ZeroDivisionError):
            settle(instance, run)
    assert len(observed(instance, run)) == 1
    settle(instance, run)
    assert sorted(observed(instance, run)) == [("failed", "failed", 0.3), ("made", "made", 0.45)]


def test_the_sensor_settles_ended_runs_until_their_bills_are_final(
    bill: Bill, tmp_path: Path, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "dagster.yaml").write_text("telemetry: {enabled: false}\n")
    with dg.DagsterInstance.from_config(str(tmp_path)) as instance:
        run, without = run_of([made], instance), run_of([made], instance)
        note_open(instance, run.run_id)
        bill.open(work(run, "made", "made"))
        assert settle_ended_runs(instance) == []
        bill.end()
        with monkeypatch.context() as patch:

            def away(_: sky.Work) -> Any:
                raise sky.LedgerError("the database is locked")

            patch.setattr(sky, "cost_parts", away)
            assert settle_ended_runs(instance) == []
            assert "could not be reported yet: the database is locked" in caplog.text
        assert settle_ended_runs(instance) == [run.run_id]
        assert settle_ended_runs(instance) == []
        assert observed(instance, run) == [("made", "made", 0.75)]
        tags = [instance.get_run_by_id(one.run_id).tags for one in (run, without)]
    assert [its.get(STATE_TAG) for its in tags] == [REPORTED, None]


def rest_of_pool(instance: Any, *key: str) -> list[dict[str, Any]]:
    """The metadata of the observations of an asset of pools that are in no run."""
    records = instance.fetch_observations(dg.AssetKey([*POOLS, *key]), limit=100).records
    assert all(not record.run_id for record in records)
    return [{name: its.value for name, its in one.asset_observation.metadata.items()} for one in records]


@pytest.mark.parametrize(
    ("name", "owner", "key"),
    [
        ("team", sky.Work(), ("team",)),
        ("team/RUN/eu", sky.Work(), ("team", "run", "eu")),
        ("dagster/backfill-abc/1", sky.Work("dagster", "weekly", "backfill-abc"), ("weekly",)),
    ],
    ids=["a name", "a name with the run's id", "a backfill"],
)
def test_the_rest_of_a_pool_of_no_run_is_observed_once_it_has_ended(
    name: str, owner: sky.Work, key: tuple[str, ...], bill: Bill, instance: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """By the sensor, which keeps in its cursor which pools have not ended: the run is reported when that is kept. A run
    that comes after the end finds that nothing is missing.
    """
    cursor: str | None = None
    first, second = (instance.create_run_for_job(ops, status=dg.DagsterRunStatus.SUCCESS) for _ in range(2))

    def tick() -> list[str]:
        """Return which of the runs are reported."""
        nonlocal cursor
        with dg.build_sensor_context(instance, cursor=cursor) as context:
            _report_costs(context)
            cursor = context.cursor
        tags = [instance.get_run_by_id(run.run_id).tags for run in (first, second)]
        return [its.get(STATE_TAG, "") for its in tags]

    bill.open(owner, name.replace("RUN", first.run_id))
    bill.use(work(first, "made", "made"), 0.3)
    note_open(instance, first.run_id)
    assert [tick(), cursor] == [[OPEN, ""], f'["{POOL}"]']
    assert tick() == [REPORTED, ""]
    assert rest_of_pool(instance, *key) == []
    bill.use(work(second, "failed", "failed"), 0.2)
    note_open(instance, second.run_id)
    bill.end()
    assert [tick(), cursor] == [[REPORTED, REPORTED], "[]"]
    monkeypatch.setattr(settlement, "OBSERVATIONS_PER_PAGE", 1)
    instance.report_runless_asset_event(dg.AssetObservation(dg.AssetKey(["skyward", "pools", *key])))
    report_rests(instance, [POOL])
    metadata, *_ = (its for its in rest_of_pool(instance, *key) if its)
    assert len([its for its in rest_of_pool(instance, *key) if its]) == 1
    assert (metadata[POOL_ID], metadata[OTHER_COST_USD], metadata[TOTAL_USD]) == (POOL, 0.5, 1.0)
    assert metadata[RECEIPT]["pool_id"] == POOL
    assert [row.data["USD"] for row in metadata[USERS].records] == [0.3, 0.2, 0.5]


def test_a_pool_of_a_run_has_its_rest_in_that_run(bill: Bill, instance: Any) -> None:
    """Not at an asset of pools with names; nor is a pool asked for again that the ledger does not have."""
    run = instance.create_run_for_job(ops)
    bill.open(work(run), "dagster/of-a-run/1")
    assert report_rests(instance, [POOL, "sky-of-another-ledger"]) == set()
    bill.end()
    report_rests(instance, [POOL])
    assert rest_of_pool(instance, "dagster", "of-a-run", "1") == []


@pytest.mark.parametrize("count", range(1, 6))
def test_equal_parts_add_up_and_grow_with_the_amount(count: int) -> None:
    """So what was reported when a step ended is never more than its part at the end of the pool."""
    before = [0] * count
    for amount in range(20):
        parts = equal_parts(amount, count)
        assert sum(parts) == amount
        assert max(parts) - min(parts) <= 1
        assert all(one >= other for one, other in zip(parts, before, strict=True))
        before = parts


# ── the log of a run ─────────────────────────────────────────────────────────────────────────────────────────────────


MACHINE = sky.Instance(
    id="i-1",
    provider="local",
    pool_id="sky-1",
    rank=0,
    state=sky.InstanceState.RUNNING,
    region="here",
    instance_type="big",
    is_spot=True,
    price_per_hour=1.0,
    on_demand_price_per_hour=3.0,
)

OPENING = [
    sky.InfraCreating("sky-1"),
    sky.InstanceProvisioned("i-1", 0, spot=True, provider="local", console_url="https://console.example/i-1"),
    sky.BootstrapStarting("i-1"),
    sky.BootstrapStarting("i-2"),
    sky.BootstrapCompleted("i-1"),
    sky.PoolReady("sky-1", 1, 1, 3.0),
]


class OpenPool:
    """What the report reads of an open pool."""

    id, is_active, instance_count, spec = "sky-1", True, 1, sky.PoolSpec.of(provider=sky.Local())
    work, cost, cost_final = sky.Work(system="dagster"), 0.25, None
    lease = sky.Lease.model_construct(pool_id="sky-1", nodes=(sky.Node(instance=MACHINE, rank=0),))


def metrics(gpu: float | None, cpu: float) -> sky.Metrics:
    return sky.Metrics("i-1", 0, cpu, 50.0, 100 * cpu, 8000.0, gpu_utilization=gpu)


def measured(its: Step, *events: sky.SkywardEvent) -> Step:
    """The step, which has used another pool in which this happened."""
    use = its.use_of(OpenPool())  # type: ignore[arg-type]
    for event in events:
        use.utilisation.see(event)
    return its


def run_with(what: Any, instance: Any) -> list[Any]:
    """Run an asset that gives its context and `StepEvents` to a function; return the entries of the step's log."""

    @dg.asset
    def one(context: dg.AssetExecutionContext) -> None:
        events = StepEvents(context.log, instance, context.run)
        events.begin(context)
        what(context, events)
        events.used(context)
        events.resource_only()
        events.close()

    run = dg.materialize([one], instance=instance).dagster_run
    return [entry for entry in instance.all_logs(run.run_id) if entry.step_key == "one"]


def engine_events(entries: list[Any]) -> list[Any]:
    kind = dg.DagsterEventType.ENGINE_EVENT
    return [
        entry.dagster_event.engine_event_data
        for entry in entries
        if entry.is_dagster_event and entry.dagster_event.event_type is kind
    ]


def marks(entries: list[Any]) -> list[str]:
    """The begins (+) and ends (-) of spans."""
    return [
        sign + mark
        for data in engine_events(entries)
        for sign, mark in (("+", data.marker_start), ("-", data.marker_end))
        if mark
    ]


def test_opening_and_use_of_a_pool_are_spans_of_the_step(instance: Any) -> None:
    """Each begins once and ends; many calls move the end of one span, and not all of them are written."""

    def open_and_use(context: Any, events: StepEvents) -> None:
        for event in OPENING:
            events.take(event)
        for _ in range(3):
            events.opened()
            events.used(context)

    opening = [f"+{PROVISION}", f"-{PROVISION}", f"+{BOOTSTRAP}", f"-{BOOTSTRAP}"]
    assert marks(run_with(open_and_use, instance)) == [*opening, f"+{RUN}", f"-{RUN}", f"-{RUN}"]


def test_waiting_for_slots_is_a_span_of_the_step(instance: Any) -> None:
    """It ends when the calls have slots, and with the use. A use that has not waited has none."""

    def wait(context: Any, events: StepEvents) -> None:
        for is_waiting in (False, True, True, False, False):
            events.waits(context, is_waiting=is_waiting)

    assert marks(run_with(wait, instance)) == [f"+{WAIT}", f"-{WAIT}"]


def test_an_error_is_an_event_with_its_class_and_cause(instance: Any) -> None:
    """Of a pool that could not be opened, whose span ends, and of a node. That of the user's function is the step's."""

    def fail(context: Any, events: StepEvents) -> None:
        events.take(OPENING[0])
        try:
            raise sky.NoCapacity("no machine is free") from ValueError("the provider's own words")
        except sky.NoCapacity as error:
            events.failed(error)
        events.failed(LookupError("the payload's own error"))
        events.take(sky.Error("the disk is full", "i-1"))

    entries = run_with(fail, instance)
    assert marks(entries) == [f"+{PROVISION}", f"-{PROVISION}"]
    first, second = [data.error for data in engine_events(entries) if data.error]
    assert (first.cls_name, first.cause.cls_name) == ("NoCapacity", "ValueError")
    assert "no machine is free" in first.message
    assert second.message == "the disk is full"


def test_lines_of_nodes_are_printed_and_logged_with_their_levels(
    instance: Any, capfd: pytest.CaptureFixture[str]
) -> None:
    """Dagster keeps what the process prints, beside the run. The run's log has what is a warning or worse, and what is
    not printed.
    """

    def talk(context: Any, events: StepEvents) -> None:
        events.take(sky.LogLine(0, "i-1", "loss 0.5", 0.0))
        events.take(sky.LogLine(1, "i-2", "careful", 0.0, stream="stderr", level=30))
        events.take(sky.LogLine(1, "i-2", "of another node", 0.0, is_shown=False))
        events.listeners.append(lambda event: isinstance(event, sky.LogLine))
        events.take(sky.LogLine(0, "i-1", "a message of Pipes", 0.0))

    entries = run_with(talk, instance)
    printed = capfd.readouterr()
    assert "[node 0] loss 0.5\n" in printed.out
    assert "[node 1] careful\n" in printed.err
    assert "a message of Pipes" not in printed.out
    logged = {entry.user_message: entry.level for entry in entries if "[node" in entry.user_message}
    assert logged == {"[node 1] careful": 30, "[node 1] of another node": 10}
    assert "of another node" not in printed.out


def test_a_running_step_is_observed_every_fifteen_seconds(instance: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    now = [1000.0]
    for module in (step, step_events, step_report):
        monkeypatch.setattr(module, "time", SimpleNamespace(monotonic=lambda: now[0]))

    def run(context: Any, events: StepEvents) -> None:
        its = measured(Step(OpenPool.work), sky.CallProgress(1, 0, 0), metrics(50.0, 20.0))
        for _ in range(40):
            now[0] += 1.0
            events.live(context, lambda: its.running(OpenPool()))  # type: ignore[arg-type]
            events.flush()

    observed = [
        entry.dagster_event.asset_observation_data.asset_observation
        for entry in run_with(run, instance)
        if entry.is_dagster_event and entry.dagster_event.is_asset_observation
    ]
    assert [one.metadata["skyward/running_seconds"].value for one in observed] == [15.0, 30.0]
    values = {name: its.value for name, its in observed[0].metadata.items()}
    expected = {RUNNING_COST_USD: 0.25, GPU_UTIL_PCT: 50.0, CPU_UTIL_PCT: 20.0, MEMORY_GB: 2.0}
    assert expected.items() <= values.items()


def lines_of_picture(chart: str) -> list[str]:
    """The points of each line of the picture in Markdown, from left to right; 110 is 0 %, 10 is 100 %."""
    head, data = chart.removesuffix(")").split(",")
    assert head == "![utilisation](data:image/svg+xml;base64"
    svg = ET.fromstring(base64.b64decode(data))
    return [line.attrib["points"] for line in svg if line.tag.endswith("}polyline")][:2]


def test_what_was_measured_is_metadata(instance: Any) -> None:
    """Means and maxima of the nodes' measurements while calls ran, what these have reported, the course, and a table
    of machines with a link.
    """
    found: dict[str, Any] = {}

    def measure(context: Any, events: StepEvents) -> None:
        for event in OPENING:
            events.take(event)
        idle, last = metrics(100.0, 100.0), sky.CallReported(0, "i-1", "call", 9, {"loss": 0.25, "lr": math.nan}, 0.0)
        its = measured(
            Step(OpenPool.work),
            *(idle, sky.CallProgress(1, 0, 0), metrics(0.0, 10.0), metrics(100.0, 30.0), last),
            *(metrics(None, 50.0), sky.CallProgress(1, 1, 0), metrics(None, 30.0), idle),
        )
        found.update(events.details(OpenPool(), its.utilisation), measured=its.numbers())  # type: ignore[arg-type]

    run_with(measure, instance)
    assert found["measured"] == {
        GPU_UTIL_PCT: 50.0,
        "skyward/gpu_util_max_pct": 100.0,
        CPU_UTIL_PCT: 30.0,
        "skyward/cpu_util_max_pct": 50.0,
        "skyward/memory_pct": 50.0,
        "skyward/memory_max_pct": 50.0,
        MEMORY_GB: 3.0,
        "skyward/memory_max_gb": 5.0,
        "skyward/reported/loss": 0.25,
        "skyward/reported/lr": "NaN",
    }
    assert found[CONSOLE].value == "https://console.example/i-1"
    (row,) = found[NODES_TABLE].records
    assert (row.data["machine"], row.data["market"], row.data["console"]) == ("i-1", "spot", found[CONSOLE].value)
    assert "| accelerators | ▁█ | 50 % | 100 % |" in found[BARS].value
    assert lines_of_picture(found[CHART].value) == [
        "50.0,110.0 530.0,10.0",
        "50.0,100.0 210.0,80.0 370.0,60.0 530.0,80.0",
    ]
    assert savings(OpenPool(), 0.5) == 1.0  # type: ignore[arg-type]
    usage = Usage(0.5, 1.0, 1, "none", savings_usd=1.0, measured={GPU_UTIL_PCT: 50.0})
    assert {"skyward/savings_usd": 1.0, GPU_UTIL_PCT: 50.0}.items() <= plain(usage).items()
    assert CPU_UTIL_PCT not in plain(usage)


def test_another_thread_of_a_step_may_begin_a_use_meanwhile() -> None:
    """While its cost is added up."""
    its = Step(OpenPool.work)

    class Slow(OpenPool):
        @property
        def cost(self) -> float:  # type: ignore[override]
            its.use_of(OpenPool())  # type: ignore[arg-type]
            return 0.5

    its.use_of(Slow())  # type: ignore[arg-type]
    assert its.cost_usd == 0.5
    assert len(its.uses) == 2


def test_what_a_later_pool_of_a_step_has_replaces_what_an_earlier_one_has() -> None:
    """A step that prepares on one pool and trains on another shows how the second one was used."""
    report = sky.CallReported(0, "i-1", "call", 9, {"rows": 7.0, "loss": 0.5}, 0.0)
    its = measured(Step(OpenPool.work), sky.CallProgress(1, 0, 0), metrics(None, 90.0), report)
    assert its.utilisation.measured["cpu_percent"].mean == 90.0
    assert its.numbers()[CPU_UTIL_PCT] == 90.0
    measured(its)
    assert its.utilisation.measured["cpu_percent"].mean == 90.0, "nothing is measured there yet"
    last = sky.CallReported(0, "i-1", "call", 9, {"loss": 0.25}, 0.0)
    measured(its, sky.CallProgress(1, 0, 0), metrics(80.0, 10.0), last)
    assert {GPU_UTIL_PCT: 80.0, CPU_UTIL_PCT: 10.0}.items() <= its.numbers().items()
    assert {"skyward/reported/rows": 7.0, "skyward/reported/loss": 0.25}.items() <= its.numbers().items()
    assert its.utilisation.measured["cpu_percent"].mean == 10.0
