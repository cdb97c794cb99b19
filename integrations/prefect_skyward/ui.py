"""The output of a pool in Prefect: the nodes' lines in the logs of the task runs, events of the machines in the flow
run's log, the bill as an artifact.
"""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable
from concurrent.futures import Future
from contextvars import Context, copy_context
from dataclasses import dataclass, replace
from typing import Any, Self, cast
from uuid import UUID

from prefect.client.schemas.actions import ArtifactCreate, ArtifactUpdate
from prefect.context import FlowRunContext, SyncClientContext
from prefect.logging import get_logger, get_run_logger
from prefect.logging.loggers import flow_run_logger

import skyward_core as sky

ARTIFACT_KEY = "skyward-cost"
ARTIFACT_SECONDS = 15.0
"""The least time between two updates: each is an event of the run, and its graph in Prefect's UI shows only fifty."""


@dataclass(frozen=True, slots=True)
class RunLog:
    """The log of one run, usable from any thread: Prefect's settings and connections are context variables, which a new
    thread does not have.
    """

    logger: logging.Logger | logging.LoggerAdapter[Any]
    context: Context

    @classmethod
    def of_flow(cls) -> Self:
        """Return the log of the current flow run; outside of one, a log that only goes to the console."""
        context = FlowRunContext.get()
        if context is None or context.flow_run is None:
            return cls(get_logger("skyward"), copy_context())
        return cls(flow_run_logger(context.flow_run, cast(Any, context.flow)), copy_context())

    @classmethod
    def of_task(cls) -> Self:
        """Return the log of the current task run."""
        return cls(get_run_logger(), copy_context())

    def say(self, level: int, text: str) -> None:
        """Write one line at a level of `logging`."""
        self.run(self.logger.log, level, "%s", text)

    def run(self, what: Callable[..., object], *args: object) -> None:
        """Call a function in the context of the run."""
        self.context.copy().run(what, *args)  # a copy: one context cannot be entered twice at once


class RunLogs:
    """Event sink: each line goes to the log of the task run that made the call, every other loggable event to the flow
    run's log.
    """

    def __init__(self, flow: RunLog) -> None:
        self._flow = flow
        self._narrator = sky.Narrator()
        self._lock = threading.Lock()
        self._tasks: dict[str, RunLog] = {}
        self._early: dict[str, list[sky.LogLine]] = {}
        self._submitting = 0

    def __call__(self, event: sky.SkywardEvent) -> None:
        if isinstance(event, sky.LogLine):
            with self._lock:
                self._log_line(event)
        elif line := self._narrator.tell(event):
            self._flow.say(*line)

    def follow(self, submit: Callable[[], Future[Any]]) -> Future[Any]:
        """Submit a call with `submit`; its lines go to the log of the current task run, also lines that come before
        `submit` returns.
        """
        task = RunLog.of_task()
        with self._lock:
            self._submitting += 1
        try:
            future = submit()
            self._follow(cast(Any, future).call_id, task, future)
        finally:
            with self._lock:
                self._submitting -= 1
                if not self._submitting:
                    self._log_orphans()
        return future

    def _follow(self, call_id: str, task: RunLog, future: Future[Any]) -> None:
        with self._lock:
            self._tasks[call_id] = task
            for line in self._early.pop(call_id, ()):
                self._log_line(line)
        future.add_done_callback(lambda done: self._forget(call_id, done))

    def _forget(self, call_id: str, future: Future[Any]) -> None:
        if not future.cancelled():  # else its last lines have not arrived yet
            with self._lock:
                self._tasks.pop(call_id, None)

    def _log_line(self, line: sky.LogLine) -> None:
        task = self._tasks.get(line.call_id) if line.call_id is not None else None
        if task is None and line.call_id is not None and self._submitting:
            self._early.setdefault(line.call_id, []).append(line)
        else:
            (task or self._flow).say(line.level or logging.INFO, f"[node {line.node}] {line.line}")

    def _log_orphans(self) -> None:
        early, self._early = self._early, {}
        for lines in early.values():
            for line in lines:
                self._log_line(line)


@dataclass(frozen=True, slots=True)
class Bill:
    """The content of the artifact. Money is USD."""

    pool_id: str = ""
    total: float = 0.0
    per_hour: float = 0.0
    seconds: float = 0.0
    nodes: int = 0
    submitted: int = 0
    done: int = 0
    failed: int = 0
    cancelled: int = 0
    unconfirmed: tuple[str, ...] = ()
    """Machines that were not confirmed gone when the pool was closed."""
    is_final: bool = False

    def after(self, event: sky.SkywardEvent) -> Bill:
        """Return the bill as it is after an event."""
        match event:
            case sky.InfraCreating(pool_id):
                return replace(self, pool_id=pool_id)
            case sky.InstanceProvisioned():
                return replace(self, nodes=self.nodes + 1)
            case sky.InstancesUnconfirmed(machines):
                return replace(self, unconfirmed=machines)
            case sky.CallProgress(submitted, done, failed, cancelled):
                return replace(self, submitted=submitted, done=done, failed=failed, cancelled=cancelled)
            case sky.CostUpdate(elapsed_seconds, accumulated_cost, hourly_rate):
                return replace(self, total=accumulated_cost, per_hour=hourly_rate, seconds=elapsed_seconds)
            case sky.CostFinal(total_cost, total_seconds, hourly_rate):
                return replace(self, total=total_cost, per_hour=hourly_rate, seconds=total_seconds, is_final=True)
            case _:
                return self

    def to_markdown(self) -> str:
        """Return the bill as a table."""
        rows = {
            "Total" if self.is_final else "Total so far": _usd(self.total),
            "Rate": f"{_usd(self.per_hour)} per hour",
            "Seconds": f"{self.seconds:.1f}",
            "Nodes": str(self.nodes),
            "Calls": f"{self.done} of {self.submitted} done, {self.failed} failed"
            + (f", {self.cancelled} cancelled" if self.cancelled else ""),
            "Each machine": f"`skyward receipt {self.pool_id}`",
        }
        if self.unconfirmed:
            rows["**Not confirmed gone**"] = (
                f"{', '.join(self.unconfirmed)}; the pool's reaper and `skyward sweep` ask again"
            )
        return "\n".join(
            ["| Machines of this run | |", "| --- | --- |", *(f"| {name} | {value} |" for name, value in rows.items())]
        )


class CostArtifact:
    """Event sink: keeps one artifact of the flow run up to date, at most every ARTIFACT_SECONDS, from a thread of its
    own.

    An API that is slow or does not answer must delay neither the calls nor the end of the machines: it only causes one
    warning in the log.
    """

    def __init__(self, flow_run_id: UUID, log: RunLog) -> None:
        self._flow_run_id = flow_run_id
        self._log = log
        self._bill = self._written = Bill()
        self._artifact_id: UUID | None = None
        self._is_silent = False
        self._ended = threading.Event()
        self._thread = threading.Thread(
            target=log.run, args=(self._write_periodically,), name="skyward-cost", daemon=True
        )
        self._thread.start()

    def __call__(self, event: sky.SkywardEvent) -> None:
        self._bill = self._bill.after(event)

    def close(self) -> None:
        """Write the last state and end the thread; called once the pool is closed."""
        self._ended.set()
        self._thread.join()

    def _write_periodically(self) -> None:
        while not self._ended.wait(ARTIFACT_SECONDS):
            self._write_if_changed()
        self._write_if_changed()

    def _write_if_changed(self) -> None:
        bill = self._bill
        if bill == self._written:
            return
        self._written = bill
        try:
            with SyncClientContext.get_or_create() as context:
                self._write(context.client, bill.to_markdown())
        except Exception as error:
            if not self._is_silent:
                self._is_silent = True
                self._log.logger.warning("the artifact %s could not be written: %r", ARTIFACT_KEY, error)

    def _write(self, client: Any, markdown: str) -> None:
        if self._artifact_id is not None:
            client.update_artifact(self._artifact_id, ArtifactUpdate(data=markdown))
            return
        artifact = ArtifactCreate(
            key=ARTIFACT_KEY,
            type="markdown",
            description="What the machines of this flow run cost",
            data=markdown,
            flow_run_id=self._flow_run_id,
        )
        self._artifact_id = client.create_artifact(artifact).id


def _usd(amount: float) -> str:
    return f"${amount:,.2f}" if amount >= 1 else f"${amount:.4f}" if amount else "$0"
