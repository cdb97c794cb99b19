"""Dagster: what the events of a pool become in the run's log, without a pool."""

from collections.abc import Iterator
from types import SimpleNamespace
from typing import Any

import pytest

dg = pytest.importorskip("dagster")

import skyward_core as sky  # noqa: E402
from dagster_skyward import step_events, step_report  # noqa: E402
from dagster_skyward.metadata import CPU_UTIL_PCT, GPU_UTIL_PCT, RUNNING_COST_USD, Usage, plain  # noqa: E402
from dagster_skyward.step_events import StepEvents  # noqa: E402
from dagster_skyward.step_report import BOOTSTRAP, CHART, CONSOLE, NODES_TABLE, PROVISION, RUN, savings  # noqa: E402

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


class Pool:
    """What the report reads of an open pool."""

    id, is_active, instance_count, spec = "sky-1", True, 1, sky.PoolSpec.of(provider=sky.Local())
    lease = sky.Lease.model_construct(pool_id="sky-1", nodes=(sky.Node(instance=MACHINE, rank=0),))


def metrics(gpu: float | None, cpu: float) -> sky.Metrics:
    return sky.Metrics("i-1", 0, cpu, 0.0, 0.0, 0.0, gpu_utilization=gpu)


@pytest.fixture(scope="module")
def instance(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Any]:
    home = tmp_path_factory.mktemp("dagster")
    (home / "dagster.yaml").write_text("telemetry: {enabled: false}\n")
    with dg.DagsterInstance.from_config(str(home)) as it:
        yield it


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
    """Dagster keeps what the process prints, beside the run; a warning is one in the run's log too."""

    def talk(context: Any, events: StepEvents) -> None:
        events.take(sky.LogLine(0, "i-1", "loss 0.5", 0.0))
        events.take(sky.LogLine(1, "i-2", "careful", 0.0, stream="stderr", level=30))
        events.listeners.append(lambda event: isinstance(event, sky.LogLine))
        events.take(sky.LogLine(0, "i-1", "a message of Pipes", 0.0))

    entries = run_with(talk, instance)
    printed = capfd.readouterr()
    assert "[node 0] loss 0.5\n" in printed.out
    assert "[node 1] careful\n" in printed.err
    assert "a message of Pipes" not in printed.out
    logged = {entry.user_message: entry.level for entry in entries if "[node" in entry.user_message}
    assert logged == {"[node 0] loss 0.5": 20, "[node 1] careful": 30}


def test_a_running_step_is_observed_every_fifteen_seconds(instance: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    now = [1000.0]
    for module in (step_events, step_report):
        monkeypatch.setattr(module, "time", SimpleNamespace(monotonic=lambda: now[0]))

    def run(context: Any, events: StepEvents) -> None:
        events.take(metrics(50.0, 20.0))
        for _ in range(40):
            now[0] += 1.0
            events.live(context, Pool(), now[0] - 1000.0, lambda: 0.25)  # type: ignore[arg-type]

    observed = [
        entry.dagster_event.asset_observation_data.asset_observation
        for entry in run_with(run, instance)
        if entry.is_dagster_event and entry.dagster_event.is_asset_observation
    ]
    assert [one.metadata["skyward/running_seconds"].value for one in observed] == [15.0, 30.0]
    values = observed[0].metadata
    assert (values[RUNNING_COST_USD].value, values[GPU_UTIL_PCT].value, values[CPU_UTIL_PCT].value) == (
        0.25,
        50.0,
        20.0,
    )


def test_what_was_measured_is_metadata(instance: Any) -> None:
    """Means of the nodes' measurements since the step began, their course, and a table of machines with a link."""
    found: dict[str, Any] = {}

    def measure(context: Any, events: StepEvents) -> None:
        for event in (*OPENING, metrics(0.0, 10.0), metrics(100.0, 30.0), metrics(None, 50.0)):
            events.take(event)
        report = events.of_step(context)
        found.update(events.details(context, Pool()), gpu=report.gpu_util_pct, cpu=report.cpu_util_pct)  # type: ignore[arg-type]

    run_with(measure, instance)
    assert (found["gpu"], found["cpu"]) == (50.0, 30.0)
    assert found[CONSOLE].value == "https://console.example/i-1"
    (row,) = found[NODES_TABLE].records
    assert (row.data["machine"], row.data["market"], row.data["console"]) == ("i-1", "spot", found[CONSOLE].value)
    assert "| GPU | ▁█ | 50 % | 100 % |" in found[CHART].value
    assert savings(Pool(), 0.5) == 1.0  # type: ignore[arg-type]
    usage = Usage(0.5, 1.0, 1, "none", savings_usd=1.0, gpu_util_pct=50.0)
    assert {"skyward/savings_usd": 1.0, GPU_UTIL_PCT: 50.0}.items() <= plain(usage).items()
    assert CPU_UTIL_PCT not in plain(usage)
