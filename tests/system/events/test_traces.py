"""Spans of a pool: their tree, their attributes, and their ends in every way that a pool ends."""

import sys
from collections.abc import Iterable, Iterator

import pytest
from opentelemetry.sdk.trace import ReadableSpan, TracerProvider
from opentelemetry.sdk.trace.export import SimpleSpanProcessor
from opentelemetry.sdk.trace.export.in_memory_span_exporter import InMemorySpanExporter
from opentelemetry.trace import StatusCode

import skyward_core as sky
from skyward_core.work import Work

ON_A_NODE = [sky.BootstrapStarting("i-0"), sky.BootstrapProgress("i-0", "deps"), sky.BootstrapCompleted("i-0")]
BILL = sky.CostFinal(1.5, 60.0, 90.0, 1, 0, 0.5, {"idle": 0.5, "calls": 1.0})


class Recorded:
    """Takes spans in memory."""

    def __init__(self) -> None:
        self._exporter = InMemorySpanExporter()
        self.provider = TracerProvider()
        self.provider.add_span_processor(SimpleSpanProcessor(self._exporter))

    def send(self, events: Iterable[sky.SkywardEvent]) -> None:
        traces = sky.Traces(self.provider)
        for event in events:
            traces(event)

    @property
    def spans(self) -> dict[str, ReadableSpan]:
        return {span.name: span for span in self._exporter.get_finished_spans()}

    def tree(self) -> dict[str, str]:
        """Each span's name, and that of its parent."""
        names = {span.context.span_id: span.name for span in self._exporter.get_finished_spans()}
        return {name: names.get(span.parent.span_id, "?") if span.parent else "" for name, span in self.spans.items()}


@pytest.fixture
def recorded() -> Iterator[Recorded]:
    recorded = Recorded()
    yield recorded
    recorded.provider.shutdown()


def test_a_whole_life(recorded: Recorded) -> None:
    events = [
        sky.InfraCreating("sky-1", Work(system="airflow", workflow="nightly")),
        sky.CandidateRefused(
            "aws", "us-east-1", "p5", spot=True, error="NoCapacity", code="ICE", message="", seconds=1
        ),
        sky.InfraCreated("us-east-1", 2, 90.0),
        sky.InstanceProvisioned("i-0", 0, spot=True, provider="aws"),
        *ON_A_NODE,
        sky.PoolReady("sky-1", 1, 2, 30.0),
        sky.CallProgress(3, 3, 1),
        sky.PreemptionNoticed("i-0", 0, "terminate", 0.0, 120.0),
        sky.PoolStopping(),
        sky.InstanceStopping("i-0"),
        BILL,
    ]
    with recorded.provider.get_tracer("test").start_as_current_span("task"):
        recorded.send(events)
    phases = ["skyward.provision", "skyward.bootstrap", "skyward.calls", "skyward.release"]
    assert recorded.tree() == {
        "task": "",
        "skyward.pool": "task",
        **dict.fromkeys(phases, "skyward.pool"),
        "skyward.node": "skyward.bootstrap",
    }
    pool = recorded.spans["skyward.pool"].attributes or {}
    assert pool["skyward.pool_id"] == "sky-1"
    assert (pool["skyward.work.system"], pool["skyward.work.workflow"]) == ("airflow", "nightly")
    assert (pool["skyward.region"], pool["skyward.nodes"], pool["skyward.slots"]) == ("us-east-1", 1, 2)
    assert (pool["skyward.total_cost"], pool["skyward.cost.idle"], pool["skyward.cost.calls"]) == (1.5, 0.5, 1.0)
    assert [event.name for event in recorded.spans["skyward.provision"].events] == [
        "CandidateRefused",
        "InstanceProvisioned",
    ]
    refused = recorded.spans["skyward.provision"].events[0].attributes or {}
    assert (refused["skyward.provider"], refused["skyward.code"]) == ("aws", "ICE")
    assert [event.name for event in recorded.spans["skyward.node"].events] == ["deps"]
    calls = recorded.spans["skyward.calls"]
    assert (calls.attributes or {})["skyward.calls.failed"] == 1
    assert [event.name for event in calls.events] == ["PreemptionNoticed"]


@pytest.mark.parametrize("reached", range(5))
def test_all_spans_end_with_the_bill_wherever_it_fails(reached: int, recorded: Recorded) -> None:
    begun = [sky.InfraCreating("sky-1"), *ON_A_NODE, sky.PoolReady("sky-1", 1, 1, 1.0)]
    recorded.send([*begun[: reached + 1], sky.Error("no machine"), BILL])
    failed = {name for name, span in recorded.spans.items() if span.status.status_code is StatusCode.ERROR}
    phase = ["skyward.provision", "skyward.bootstrap", "skyward.bootstrap", "skyward.bootstrap", "skyward.calls"]
    assert failed - {"skyward.node"} == {"skyward.pool", phase[reached]}
    assert ("skyward.node" in failed) == (reached in (1, 2))
    assert recorded.spans["skyward.pool"].status.description == "no machine"


def test_without_opentelemetry_the_error_says_what_to_install(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "opentelemetry.trace", None)
    with pytest.raises(ImportError, match="pip install opentelemetry-api"):
        sky.Traces()
