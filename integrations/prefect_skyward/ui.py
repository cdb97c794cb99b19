"""The output of a pool in Prefect's logs: the nodes' lines in those of the task runs, events of the machines in that of
the flow run.
"""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable
from concurrent.futures import Future
from contextvars import Context, copy_context
from dataclasses import dataclass
from typing import Any, Self, cast

from prefect.context import AsyncClientContext, FlowRunContext, SyncClientContext, TaskRunContext
from prefect.exceptions import MissingContextError
from prefect.logging import get_logger, get_run_logger
from prefect.logging.loggers import flow_run_logger

import skyward_core as sky


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
        context, outside = FlowRunContext.get(), copy_context()
        # a task that is called in the flow's own thread has contexts that end before the flow's pools
        for shorter in (TaskRunContext, SyncClientContext, AsyncClientContext):
            outside.run(cast(Any, shorter).__var__.set, None)
        if context is None or context.flow_run is None:
            return cls(get_logger("skyward"), outside)
        return cls(flow_run_logger(context.flow_run, cast(Any, context.flow)), outside)

    @classmethod
    def of_task(cls) -> Self:
        """Return the log of the current task run; outside of one, that of the flow run."""
        try:
            return cls(get_run_logger(), copy_context())
        except MissingContextError:
            return cls.of_flow()

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
        return self.follow_all(lambda: [submit()])[0]

    def follow_all(self, submit: Callable[[], list[Any]]) -> list[Any]:
        """The same for several calls of one task run, which `submit` makes at once."""
        task = RunLog.of_task()
        with self._lock:
            self._submitting += 1
        try:
            futures = submit()
            for future in futures:
                self._follow(future.call_id, task, future)
        finally:
            with self._lock:
                self._submitting -= 1
                if not self._submitting:
                    self._log_orphans()
        return futures

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
