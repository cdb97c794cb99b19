"""Metrics that a running call reports: `sky.report(step=10, loss=0.3)`.

A report is one line of the runner's output, `MARK:report JSON`, as a log record is (`log_records.py`). It is at most
LINE_BYTES long, so that the kernel writes it in one piece. It is written only while the pipe has room, so that it never
waits. What is not written now is merged into the next report, or written when the call ends.
"""

from __future__ import annotations

import contextlib
import json
import os
import select
import time
from collections.abc import Callable, Mapping
from typing import Any, NamedTuple, SupportsFloat, cast

from skyward_core.errors import BadRequest

LINE_BYTES = select.PIPE_BUF
"""The longest line that the kernel writes to a pipe in one piece."""
BURST = 20
"""How many reports a call may write at once."""
REPORTS_PER_SECOND = 2.0
"""How many it may write in the long run."""
KIND = "report"


class CallMetrics(NamedTuple):
    """What a call has reported: the step, if it named one, and the last value of each metric."""

    step: int | None
    values: Mapping[str, float]

    def to_text(self) -> str:
        """Return one line of JSON that `from_text` reads."""
        return json.dumps([self.step, dict(self.values)])

    @classmethod
    def from_text(cls, text: str) -> CallMetrics:
        """Rebuild metrics. Raises ValueError for any other text."""
        step, values = cast("tuple[int | None, dict[str, float]]", json.loads(text))
        return cls(step, values)

    def updated(self, later: CallMetrics) -> CallMetrics:
        """Return both in one: a later value replaces an earlier one."""
        return CallMetrics(self.step if later.step is None else later.step, {**self.values, **later.values})


class Reporter:
    """Writes the metrics of a runner's calls to a pipe. One call at a time; threads of a call may share it.

    If the runner dies, only the metrics in `pending` are lost.
    """

    def __init__(self, pipe: int, mark: bytes, clock: Callable[[], float] = time.monotonic) -> None:
        self._pipe = pipe
        self._start = start_of(mark)
        self._clock = clock
        self._allowance = float(BURST)
        self._counted_at = clock()
        self._pending: CallMetrics | None = None

    def report(self, metrics: CallMetrics) -> None:
        """Write the metrics, or keep them for the next line. Never waits.

        Raises BadRequest if one line cannot hold them.
        """
        if len(self._line(metrics)) > LINE_BYTES:
            raise BadRequest(f"sky.report: {len(metrics.values)} metrics are too many for one report of 4 kB")
        earlier, self._pending = self._pending, None
        if earlier is not None and len(self._line(earlier.updated(metrics))) <= LINE_BYTES:
            metrics = earlier.updated(metrics)
        if not (self._is_allowed() and self._has_room()):
            self._pending = metrics
            return
        self._write(metrics)

    def end_call(self) -> None:
        """Write the metrics that are still kept: the last values of a call must not be lost."""
        pending, self._pending = self._pending, None
        self._allowance = float(BURST)
        if pending is not None:
            self._write(pending)

    def _write(self, metrics: CallMetrics) -> None:
        with contextlib.suppress(OSError):  # its worker is gone, and this process soon will be
            os.write(self._pipe, self._line(metrics))

    def _line(self, metrics: CallMetrics) -> bytes:
        return f"{self._start}{metrics.to_text()}\n".encode()

    def _is_allowed(self) -> bool:
        """Count one line; False if the call has used up its allowance."""
        now = self._clock()
        self._allowance = min(float(BURST), self._allowance + (now - self._counted_at) * REPORTS_PER_SECOND)
        self._counted_at = now
        if self._allowance < 1:
            return False
        self._allowance -= 1
        return True

    def _has_room(self) -> bool:
        writable = select.poll()
        writable.register(self._pipe, select.POLLOUT)
        return any(event & select.POLLOUT for _, event in writable.poll(0))


def start_of(mark: bytes) -> str:
    """Return how a line of metrics starts in the output of a runner with this mark."""
    return f"{mark[:-1].decode()}:{KIND} "


_reporters: list[Reporter] = []
"""The reporter of this process, if it is a runner: calls find it here, as they find the standard output."""


def use(reporter: Reporter) -> None:
    """Make this the reporter of the process. Called once, by a runner."""
    _reporters[:] = [reporter]


def report(step: int | None = None, **metrics: SupportsFloat) -> None:
    """Report metrics of a running call: they become a `CallReported` event of the pool.

    `step` counts batches, epochs or anything else that the call counts. Values are numbers, or anything that `float`
    takes, such as a tensor with one element. Never waits: at most 20 reports at once and 2 per second travel. The
    values of others are merged into the next report, and the last values always arrive. Outside a pool it does nothing.

    Raises BadRequest for values that are no numbers, and for more metrics than fit into 4 kB.

    >>> report(step=1, loss=0.25)
    """
    reported = CallMetrics(_step(step), {name: _number(name, value) for name, value in metrics.items()})
    for reporter in _reporters:
        reporter.report(reported)


def _step(step: Any) -> int | None:
    try:
        return None if step is None else int(step)
    except (TypeError, ValueError) as error:
        raise BadRequest(f"sky.report: step must be a whole number, not {step!r}") from error


def _number(name: str, value: SupportsFloat) -> float:
    if isinstance(value, str):
        raise BadRequest(f"sky.report: {name} must be a number, not the text {value!r}: print texts")
    try:
        return float(value)
    except (TypeError, ValueError) as error:
        raise BadRequest(f"sky.report: {name} must be a number, not {type(value).__name__}") from error
