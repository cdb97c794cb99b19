"""The output of a pool in Prefect's logs: the nodes' lines in those of the task runs, events of the machines in that of
the flow run.
"""

from __future__ import annotations

import contextlib
import json
import logging
import re
import threading
from collections import deque
from collections.abc import Callable
from concurrent.futures import Future
from contextvars import Context, copy_context
from dataclasses import dataclass, replace
from typing import Any, Self, cast

from prefect.context import AsyncClientContext, FlowRunContext, SyncClientContext, TaskRunContext
from prefect.exceptions import MissingContextError
from prefect.logging import get_logger, get_run_logger
from prefect.logging.handlers import APILogHandler
from prefect.logging.loggers import PrefectLogAdapter, flow_run_logger

import skyward_core as sky

SEND_SECONDS = 2.0
MOST_ENDED = 10_000
"""How many calls that have ended are known: events have their own thread, so last lines may come after the result."""
_OF_A_RUN = re.compile(r"\[(task|flow) run (\{.*?\})\] ", re.DOTALL)
"""What `node_context.py` writes before a record of a nested run, and of the flow run."""


def send_lines() -> None:
    """Send the lines that Prefect has collected to its API, for SEND_SECONDS at most. Prefect does it every two seconds
    and at exit, but not before it ends the process by SIGTERM.
    """
    sender = sky.Threads()
    sender.run("skyward-lines", APILogHandler().flush)  # this thread may have an event loop: `flush` would not wait
    sender.join(SEND_SECONDS)


@dataclass(frozen=True, slots=True)
class RunLog:
    """The log of one run, usable from any thread: Prefect's settings and connections are context variables, which a new
    thread does not have.
    """

    logger: logging.Logger | logging.LoggerAdapter[Any]
    context: Context
    has_nested_runs: bool = False
    """Whether lines may name another run, which has begun on a node, and to whose log they belong."""

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
        """Write one line at a level of `logging`. Its text is visible (`sky.shown_text`): one record that cannot be
        encoded would take the lines of all runs with it, because Prefect sends them in batches.

        Does not raise the SystemExit of a console whose reader was killed, as a worker may be: it would end a thread
        that has the machines to end. The API has the line by then. While the interpreter ends, Prefect starts no worker
        for its logs any more: lines of that time are on the console only.
        """
        logger = self.logger if threading.main_thread().is_alive() else get_logger("skyward")
        with contextlib.suppress(SystemExit):  # rich's, `Console.on_broken_pipe`
            self.run(logger.log, level, "%s", sky.shown_text.visible_lines(text))

    def say_record(self, level: int, text: str) -> None:
        """Write a record that a node has made, also below the level of the run's logger: the levels of this process's
        loggers, extra ones too, have held on the node. Its text is visible, as that of `say`.
        """
        text = sky.shown_text.visible_lines(text)
        logger, extra = self.logger, {}
        if isinstance(logger, logging.LoggerAdapter):
            logger, extra = logger.logger, dict(logger.extra or {})
        if level > logging.root.manager.disable:
            record = logger.makeRecord(logger.name, level, "", 0, "%s", (text,), None, extra=extra)
            with contextlib.suppress(SystemExit):
                self.run(logger.handle, record)

    def say_line(self, line: sky.LogLine) -> None:
        """Write a line of a node."""
        log, text = self._log_of(line.line) if self.has_nested_runs else (self, line.line)
        text = sky.shown_text.each_line(f"[node {line.node}] ", text)
        if not line.is_shown:
            log.say(logging.DEBUG, text)
            return
        write = log.say_record if line.level else log.say
        write(line.level or logging.INFO, text)

    def _log_of(self, text: str) -> tuple[Self, str]:
        """Return the log of the run that a line names, and the rest of the line."""
        if (found := _OF_A_RUN.match(text)) is None:
            return self, text
        try:
            names = {str(name): str(value) for name, value in sky.shown_text.visible_data(json.loads(found[2])).items()}
        except (ValueError, RecursionError):  # a line of the function's own that begins so
            return self, text
        logger = PrefectLogAdapter(get_logger(f"prefect.{found[1]}_runs"), extra=names)
        return replace(self, logger=logger), text[found.end() :]

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
        self._ended: deque[str] = deque()
        self._early: dict[str, list[sky.LogLine]] = {}
        self._submitting = 0

    def __call__(self, event: sky.SkywardEvent) -> None:
        if isinstance(event, sky.LogLine):
            with self._lock:
                self._log_line(event)
        elif line := self._narrator.tell(event):
            self._flow.say(*line)

    def follow_all(self, submit: Callable[[], list[Any]], *, has_nested_runs: bool = False) -> list[Any]:
        """Submit calls of one task run with `submit`; their lines go to the log of the current task run, also lines
        that come before `submit` returns. With `has_nested_runs` lines may name a run that has begun on a node.
        """
        task = replace(RunLog.of_task(), has_nested_runs=has_nested_runs)
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
        future.add_done_callback(lambda _: self._note_end(call_id))

    def _note_end(self, call_id: str) -> None:
        with self._lock:
            self._ended.append(call_id)
            if len(self._ended) > MOST_ENDED:
                self._tasks.pop(self._ended.popleft(), None)

    def _log_line(self, line: sky.LogLine) -> None:
        task = self._tasks.get(line.call_id) if line.call_id is not None else None
        if task is None and line.call_id is not None and self._submitting:
            self._early.setdefault(line.call_id, []).append(line)
        else:
            (task or self._flow).say_line(line)

    def _log_orphans(self) -> None:
        early, self._early = self._early, {}
        for lines in early.values():
            for line in lines:
                self._log_line(line)
