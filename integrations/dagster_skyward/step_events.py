"""The receiver of the events of a resource's pools: the step that used one last, and before all steps the resource.

It writes lines to the output of the process and, from WARNING on, to the step's log (all of them if Dagster keeps no
output), spans and errors to the run's log, and while a step uses a pool an observation of its assets every
LIVE_SECONDS.
"""

import logging
import time
from collections.abc import Callable, Mapping
from typing import Any
from weakref import WeakKeyDictionary

import dagster as dg

import skyward_core as sky
from dagster_skyward.dagster_events import report_observation
from dagster_skyward.metadata import StepContext, assets_of, is_of_step, partition_of, shown, step_key, work_of
from dagster_skyward.step_log import Log, LogWriter
from dagster_skyward.step_report import (
    BOOTSTRAP,
    PROVISION,
    RUN,
    SPAN_SECONDS,
    WAIT,
    Spans,
    StepSpan,
    charts_of,
    is_due,
    node_table,
    print_line,
)

LIVE_SECONDS = 15.0

type Listener = Callable[[sky.SkywardEvent], bool]
"""Returns whether it has taken the event."""


class StepEvents:
    """`take` gets the events, in the thread of a pool's events; the other methods are those of the steps' threads."""

    def __init__(self, log: Log | None, instance: dg.DagsterInstance | None, run: dg.DagsterRun | None) -> None:
        """Without a run there is only the log."""
        self.listeners: list[Listener] = []
        self._resource_log = self._log = log
        self._instance = instance
        self._run = run
        self._step = ""
        self._prints = instance is not None and not instance.is_ephemeral
        """Whether Dagster keeps what this process prints."""
        self._narrator = sky.Narrator()
        self._writer = LogWriter()
        self._spans = Spans(instance, run)
        self._consoles: dict[str, str | None] = {}
        self._of_steps: WeakKeyDictionary[StepContext, StepSpan] = WeakKeyDictionary()
        self._of_step = StepSpan()
        self._live_at: WeakKeyDictionary[StepContext, float] = WeakKeyDictionary()

    # ── steps ────────────────────────────────────────────────────────────────────────────────────────────────────────

    def begin(self, context: StepContext) -> None:
        """From now on the events are those of this step."""
        self._log, self._step = context.log, step_key(context) or ""
        if is_of_step(context):
            self._of_step = self._of_steps.setdefault(context, StepSpan())
            self._live_at.setdefault(context, time.monotonic())

    def opened(self) -> None:
        """The step has its pool, and makes calls: a span begins, once for each step."""
        if not self._of_step.has_begun:
            self._of_step.has_begun = True
            self._do(lambda step=self._step: self._spans.begin(step, RUN, "the step uses its pool"))

    def failed(self, error: BaseException) -> None:
        """The opening of a pool, or a call, has failed: an error of Skyward is in the run's log with its cause."""
        self._end_opening(f"not opened: {type(error).__name__}")
        if isinstance(error, sky.SkywardError):
            self._do(lambda step=self._step: self._spans.error(step, f"{type(error).__name__}: {error}", error))

    def used(self, context: StepContext) -> None:
        """A use has ended: the end of the step's span moves to now, every few seconds."""
        span = self._of_steps.get(context)
        if span is None or not span.has_begun:
            return
        span.is_late = not is_due(span.moved_at, SPAN_SECONDS)
        if not span.is_late:
            self._move_span(span, step_key(context) or "")

    def live(self, context: StepContext, running: Callable[[], Mapping[str, Any]]) -> None:
        """While the step uses a pool: observe its assets with this metadata, every LIVE_SECONDS."""
        if not is_due(self._live_at.get(context, 0.0), LIVE_SECONDS):
            return
        self._live_at[context] = time.monotonic()
        self._do(lambda: self._observe(context, running()))

    def waits(self, context: StepContext, *, is_waiting: bool) -> None:
        """The step's calls wait for slots that others hold, or do so no more: a span begins or ends."""
        step = step_key(context) or ""
        if is_waiting:
            self._do(lambda: self._spans.begin(step, WAIT, "the step's calls wait for slots that others hold"))
        else:
            self._do(lambda: self._spans.end(step, WAIT, "the step's calls have slots, or have ended"))

    def details(self, pool: sky.ComputePool, use: sky.Utilisation) -> Mapping[str, Any]:
        """Return metadata that is no number: the machines, a console, the course of the utilisation."""
        return {**node_table(pool, self._consoles), **charts_of(use)}

    # ── the log ──────────────────────────────────────────────────────────────────────────────────────────────────────

    def say(self, text: str) -> None:
        """Write a line to the log."""
        if self._log is not None:
            self._writer.write(self._log, logging.INFO, text)

    def flush(self) -> None:
        """Wait until all that came so far is written."""
        self._writer.flush()

    def resource_only(self) -> None:
        """The events after all steps are the resource's."""
        for context, span in tuple(self._of_steps.items()):
            if span.is_late:
                self._move_span(span, step_key(context) or "")
        self._log, self._step = self._resource_log, ""

    def close(self) -> None:
        """Write the rest, and end the thread."""
        self._writer.close()

    def take(self, event: sky.SkywardEvent) -> None:
        """Take an event of a pool."""
        if any(listener(event) for listener in tuple(self.listeners)):
            return
        match event:
            case sky.InfraCreating():
                self._span(PROVISION, "machines are requested")
            case sky.InstanceProvisioned():
                self._consoles[event.instance_id] = event.console_url
            case sky.BootstrapStarting():
                self._end_span(PROVISION, "the machines are there")
                self._span(BOOTSTRAP, "the machines are prepared")
            case sky.PoolReady():
                self._end_opening("the pool is ready")
            case sky.LogLine(level=level, is_shown=True) if self._prints:
                self._do(lambda: print_line(event))
                if (level or logging.INFO) < logging.WARNING:
                    return  # the page of the run has it under stdout or stderr
            case sky.Error(message) if self._spans.is_written:
                self._do(lambda step=self._step: self._spans.error(step, message))
                return
            case _:
                pass
        line = self._narrator.tell(event)
        if line is not None and self._log is not None:
            self._writer.write(self._log, *line)

    def _do(self, work: Callable[[], object]) -> None:
        self._writer.do(work)

    def _span(self, name: str, words: str) -> None:
        self._do(lambda step=self._step: self._spans.begin(step, name, words))

    def _end_span(self, name: str, words: str) -> None:
        self._do(lambda step=self._step: self._spans.end(step, name, words))

    def _end_opening(self, words: str) -> None:
        self._end_span(PROVISION, words)
        self._end_span(BOOTSTRAP, words)

    def _move_span(self, span: StepSpan, step: str) -> None:
        span.moved_at, span.is_late = time.monotonic(), False
        self._do(lambda: self._spans.move_end(step, RUN, "the step has used its pool"))

    def _observe(self, context: StepContext, metadata: Mapping[str, Any]) -> None:
        if self._instance is None or self._run is None:
            return
        work = work_of(context)
        for asset in assets_of(context):
            observation = dg.AssetObservation(asset, metadata=shown(metadata), partition=partition_of(work))
            report_observation(self._instance, self._run, work.task, observation, "the step runs")
