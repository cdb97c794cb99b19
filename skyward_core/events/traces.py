"""OpenTelemetry spans of a pool's life, made from its events.

    skyward.pool ──┬── skyward.provision     from the beginning to the machines
                   ├── skyward.bootstrap ──── skyward.node, one for each machine
                   ├── skyward.calls         while calls can run
                   └── skyward.release       until the bill

Needs the package `opentelemetry-api` (the extra "otel"). Without an SDK that exports spans nothing happens.
"""

from __future__ import annotations

import dataclasses
import importlib
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from skyward_core.events.events import (
    BootstrapCompleted,
    BootstrapProgress,
    BootstrapStarting,
    BudgetWarning,
    CallProgress,
    CallRetrying,
    CandidateRefused,
    ClusterRestarting,
    ContactLost,
    ContactRegained,
    CostFinal,
    Error,
    InfraCreated,
    InfraCreating,
    InstanceLaunching,
    InstanceLost,
    InstanceProvisioned,
    InstancesUnconfirmed,
    NodesScaled,
    PoolLeft,
    PoolReady,
    PoolStopping,
    PreemptionNoticed,
    RebalanceRecommended,
    SkywardEvent,
)

if TYPE_CHECKING:
    from opentelemetry.trace import Span, TracerProvider

type Attribute = str | bool | int | float
"""What an attribute of a span may be here."""

_NOTED = (
    CandidateRefused,
    InstanceLaunching,
    InstanceLost,
    InstanceProvisioned,
    InstancesUnconfirmed,
    PreemptionNoticed,
    RebalanceRecommended,
    CallRetrying,
    ContactLost,
    ContactRegained,
    ClusterRestarting,
    NodesScaled,
    BudgetWarning,
)
"""Events that become events of the span of the current phase."""


class Traces:
    """A callback that makes spans of one pool: `sky.ComputePool(on_event=sky.Traces(), ...)`.

    The span of the pool is below the span that is current where the pool is opened, for example that of a task. Its
    attributes have the work, the machines and the bill in USD. An error of the pool is the status of its span. A
    process that joins or attaches to a pool makes no spans. Use one object for each opening of a pool: it holds the
    spans that are not ended.
    """

    def __init__(self, provider: TracerProvider | None = None) -> None:
        """Use this provider of tracers; the global one if there is none.

        Raises ImportError if OpenTelemetry is not installed.
        """
        self._api = _opentelemetry()
        self._tracer = self._api.get_tracer("skyward", tracer_provider=provider)
        self._pool: Span | None = None
        self._phase: Span | None = None
        self._phase_name = ""
        self._nodes: dict[str, Span] = {}

    def __call__(self, event: SkywardEvent) -> None:
        """Take one event. Spans begin and end with the events, in their thread and in the pool's context."""
        match event:
            case InfraCreating():
                self._begin(event)
            case InfraCreated():
                self._set(event)
            case BootstrapStarting(instance_id):
                self._prepare(instance_id)
            case BootstrapProgress(instance_id, step):
                if instance_id in self._nodes:
                    self._nodes[instance_id].add_event(step)
            case BootstrapCompleted(instance_id):
                self._end_node(instance_id)
            case PoolReady():
                self._set(event)
                self._enter("calls")
            case CallProgress():
                if self._phase is not None:
                    self._phase.set_attributes(_attributes(event, "skyward.calls"))
            case PoolStopping():
                self._enter("release")
            case Error(message):
                self._fail(message)
            case CostFinal():
                parts = {f"skyward.cost.{bucket}": usd for bucket, usd in event.buckets.items()}
                self._end(event, parts)
            case PoolLeft():
                self._end(event, {})
            case _ if isinstance(event, _NOTED) and self._phase is not None:
                self._phase.add_event(type(event).__name__, _attributes(event))
            case _:
                pass

    def _begin(self, event: InfraCreating) -> None:
        work = {f"skyward.work.{name}": value for name, value in event.work.labels().items()}
        self._pool = self._tracer.start_span("skyward.pool", attributes={"skyward.pool_id": event.pool_id, **work})
        self._enter("provision")

    def _enter(self, phase: str) -> None:
        """End the current phase and begin another one."""
        if self._phase is not None:
            self._phase.end()
        self._phase_name = phase
        self._phase = self._child(f"skyward.{phase}", self._pool) if self._pool is not None else None

    def _child(self, name: str, parent: Span) -> Span:
        return self._tracer.start_span(name, context=self._api.set_span_in_context(parent))

    def _prepare(self, instance_id: str) -> None:
        """Begin the span of a machine. The first one of an opening begins the phase."""
        if self._pool is None or self._phase is None:
            return
        if self._phase_name == "provision":
            self._enter("bootstrap")
        self._nodes[instance_id] = self._child("skyward.node", self._phase)
        self._nodes[instance_id].set_attribute("skyward.instance_id", instance_id)

    def _end_node(self, instance_id: str) -> None:
        if (span := self._nodes.pop(instance_id, None)) is not None:
            span.end()

    def _set(self, event: InfraCreated | PoolReady | CostFinal | PoolLeft) -> None:
        if self._pool is not None:
            self._pool.set_attributes(_attributes(event))

    def _fail(self, message: str) -> None:
        for span in (*self._nodes.values(), self._phase, self._pool):
            if span is not None:
                span.set_status(self._api.StatusCode.ERROR, message)

    def _end(self, event: CostFinal | PoolLeft, parts: Mapping[str, float]) -> None:
        """End all spans; the pool's span gets the bill and its parts, or what it has cost so far."""
        self._set(event)
        if self._pool is not None:
            self._pool.set_attributes(parts)
        for span in (*self._nodes.values(), self._phase, self._pool):
            if span is not None:
                span.end()
        self._nodes.clear()
        self._phase = self._pool = None


def _opentelemetry() -> Any:
    """Return the module `opentelemetry.trace`. The core works without it, so it is imported only here."""
    try:
        return importlib.import_module("opentelemetry.trace")
    except ModuleNotFoundError as error:
        raise ImportError("sky.Traces needs OpenTelemetry: pip install opentelemetry-api") from error


def _attributes(event: SkywardEvent, prefix: str = "skyward") -> Mapping[str, Attribute]:
    """Return the fields of an event that are plain values, by `<prefix>.<field>`. None is left out."""
    values = {item.name: getattr(event, item.name) for item in dataclasses.fields(event)}
    return {f"{prefix}.{name}": value for name, value in values.items() if isinstance(value, str | bool | int | float)}
