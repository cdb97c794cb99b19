"""What a pool shows in a Jupyter notebook: one output, HTML and plain text, that is replaced while the pool works.

    event (thread "skyward-events") -> `after` -> Summary -> `rendered` -> output (thread "skyward-notebook")

It needs no widgets and no package that Jupyter does not have. The first output is shown in the context (`contextvars`)
in which the pool was opened, so it stands below that cell. Later messages are sent for the cell that runs then. Later
summaries replace the first by its id, and the lines that nodes print appear below that cell. Programs that run
notebooks (nbclient, papermill) ignore messages for cells that have ended.

IPython is never imported here: a process that has not imported it is no kernel.
"""

from __future__ import annotations

import contextvars
import logging
import sys
import threading
from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from typing import Any, Protocol
from uuid import uuid4

from skyward_core.concurrency.threads import LoopThread
from skyward_core.events.events import (
    BootstrapCompleted,
    BootstrapProgress,
    BootstrapStarting,
    CallProgress,
    CallReported,
    ContactRegained,
    CostFinal,
    CostUpdate,
    InfraCreated,
    InfraCreating,
    InstanceLaunching,
    InstanceLost,
    InstanceStopping,
    LogLine,
    PoolLeft,
    PoolReady,
    PoolStopping,
    SkywardEvent,
)
from skyward_core.events.narrator import Narrator, not_well, usd
from skyward_core.shown_text import html

SECONDS_BETWEEN_OUTPUTS = 0.5
MOST_PROBLEMS = 12
"""Problems that an output shows: the last ones."""
MOST_CHARACTERS = 300
"""Of one problem; the whole output is sent each time."""

_log = logging.getLogger("skyward")

type MimeBundle = dict[str, str]
"""One output in Jupyter's form: its text by its type."""


class Show(Protocol):
    """Shows an output; an update replaces the one that was shown first."""

    def __call__(self, output: MimeBundle, *, is_update: bool) -> object: ...


def kernel() -> Any:
    """Return the IPython shell of this process if it is a Jupyter kernel, else None."""
    shell = getattr(sys.modules.get("IPython"), "get_ipython", lambda: None)()
    # Colab and others have subclasses
    return shell if any(kind.__name__ == "ZMQInteractiveShell" for kind in type(shell).__mro__) else None


# ── what is shown, as a value ────────────────────────────────────────────────────────────────────────────────────────


@dataclass(frozen=True, slots=True)
class Summary:
    """What is shown of a pool at one moment."""

    phase: str = "opening the pool"
    cost: str = ""
    calls: CallProgress | None = None
    nodes: Mapping[str, str] = field(default_factory=dict[str, str])
    """What each machine does, by its id: the step of its preparation, or "ready"."""
    problems: tuple[str, ...] = ()
    earlier_problems: int = 0
    """How many problems are left out."""


def after(summary: Summary, event: SkywardEvent, line: tuple[int, str] | None) -> Summary:
    """Return the summary after an event. `line` is what a `Narrator` returns for it: level and words."""
    words = line[1] if line else ""
    match event:
        case CallProgress():
            return replace(summary, calls=event)
        case CostUpdate(accumulated_cost=cost, hourly_rate=rate):
            return replace(summary, cost=f"{usd(cost)} at {usd(rate)}/h" if cost or rate else "")
        case BootstrapStarting(machine):
            return replace(summary, nodes={**summary.nodes, machine: "preparing"})
        case BootstrapProgress(machine, step):
            return replace(summary, nodes={**summary.nodes, machine: step})
        case BootstrapCompleted(machine):
            return replace(summary, nodes={**summary.nodes, machine: "ready"})
        case InstanceStopping(machine):
            return _without(summary, machine)
        case InstanceLost(machine):
            return _with_problem(_without(summary, machine), words)
        case ContactRegained():
            return _with_problem(summary, words)
        case CostFinal() | PoolLeft():  # the words have the cost
            return replace(summary, phase=words, cost="", nodes={})
        case InfraCreating() | InfraCreated() | InstanceLaunching() | PoolReady() | PoolStopping():
            return replace(summary, phase=words)
        case _:
            return _with_problem(summary, words) if line is not None and line[0] >= logging.WARNING else summary


def _without(summary: Summary, machine: str) -> Summary:
    return replace(summary, nodes={name: step for name, step in summary.nodes.items() if name != machine})


def _with_problem(summary: Summary, words: str) -> Summary:
    short = words if len(words) <= MOST_CHARACTERS else f"{words[:MOST_CHARACTERS]}…"
    kept = (*summary.problems, short)[-MOST_PROBLEMS:]
    left_out = summary.earlier_problems + len(summary.problems) + 1 - len(kept)
    return replace(summary, problems=kept, earlier_problems=left_out)


def rendered(summary: Summary) -> MimeBundle:
    """Return the output of a summary, as HTML and as plain text."""
    return {"text/plain": as_text(summary), "text/html": as_html(summary)}


def as_text(summary: Summary) -> str:
    """Return the summary as plain text, several lines."""
    rows = [_head(summary), _calls(summary), _nodes(summary), *_problems(summary)]
    return "\n".join(row for row in rows if row)


def as_html(summary: Summary) -> str:
    """Return the summary as HTML in which all text is escaped, in the notebook's own style."""
    rows = [f"<b>skyward</b> {html(_head(summary))}"]
    if (calls := summary.calls) is not None:
        bar = f'<progress value="{calls.done + calls.cancelled}" max="{max(calls.submitted, 1)}"></progress>'
        rows.append(f"{bar} {html(_calls(summary))}")
    rows += [html(nodes)] if (nodes := _nodes(summary)) else []
    rows += [f"<b>{html(problem)}</b>" for problem in _problems(summary)]
    return "".join(f"<div>{row}</div>" for row in rows)


def _head(summary: Summary) -> str:
    return f"{summary.phase} · {summary.cost}" if summary.cost else summary.phase


def _calls(summary: Summary) -> str:
    calls = summary.calls
    return f"{calls.done} of {calls.submitted} calls{not_well(calls)}" if calls else ""


def _nodes(summary: Summary) -> str:
    """Return how many nodes do what, as "nodes: 2 ready, 1 deps": the ready ones first."""
    steps = Counter(summary.nodes.values())
    counts = ", ".join(f"{steps[step]} {step}" for step in sorted(steps, key=lambda step: (step != "ready", step)))
    return f"nodes: {counts}" if counts else ""


def _problems(summary: Summary) -> list[str]:
    earlier = summary.earlier_problems
    return ([f"… {earlier} earlier problems"] if earlier else []) + [*summary.problems]


# ── showing it ───────────────────────────────────────────────────────────────────────────────────────────────────────


class NotebookDisplay:
    """The display of one pool in a notebook.

    The caller's thread shows the first output, and prints the lines of nodes. A thread of the display shows what has
    changed, twice a second, and the last state when the display is closed. If the notebook takes no output, that is
    reported once, and no more is shown.
    """

    def __init__(self, show: Show | None = None) -> None:
        self._show = show or _show_in_kernel(f"skyward-{uuid4().hex}")
        self._narrator = Narrator()
        self._lock = threading.Lock()
        self._summary = Summary()
        self._is_closed = False
        self._closing = threading.Event()
        self._thread: LoopThread | None = None
        self._present = contextvars.Context()
        """The empty context: what is printed in it belongs to the cell that runs."""

    def __call__(self, event: SkywardEvent, /) -> None:
        with self._lock:
            if self._is_closed:
                return
            line = self._narrator.tell(event)
            if isinstance(event, LogLine | CallReported):
                if line is not None and getattr(event, "is_shown", True):
                    stream = getattr(event, "stream", "stdout")
                    self._present.run(_print, line[1], stream)
                return
            self._summary = after(self._summary, event, line)
            if self._thread is None:
                self._begin()

    def close(self) -> None:
        """Show the last state, if it was not shown; nothing after it. May be called twice."""
        with self._lock:
            self._is_closed = True
            thread = self._thread
        self._closing.set()
        if thread is not None:
            thread.join()

    def _begin(self) -> None:
        # in the empty context too
        context, shown = contextvars.Context(), self._summary
        self._thread = thread = LoopThread("skyward-notebook", lambda: context.run(self._run, shown))
        self._show(rendered(self._summary), is_update=False)
        thread.start_if_possible()  # without it the output stays as it begins

    def _run(self, shown: Summary) -> None:
        try:
            is_last = False
            while not is_last:
                is_last = self._closing.wait(SECONDS_BETWEEN_OUTPUTS)
                _wake_kernel()
                if (summary := self._summary) != shown:
                    self._show(rendered(summary), is_update=True)
                    shown = summary
        except Exception:
            _log.exception("the notebook does not take the pool's state: nothing more is shown, and the pool goes on")


def _wake_kernel() -> None:
    """Let the event loop of the kernel run its callbacks.

    ipykernel 7 adds one when SIGINT comes to a cell that awaits, and does not wake the loop. Without this function the
    stop button would have no effect on `await pool.arun(...)` until the call ends.
    """
    loop = getattr(getattr(kernel(), "kernel", None), "io_loop", None)
    if loop is not None:
        loop.add_callback(lambda: None)


def _print(line: str, stream: str) -> None:
    # ipykernel's streams send what was written a few times a second, and never wait for the notebook
    print(line, file=sys.stderr if stream == "stderr" else sys.stdout)


def _show_in_kernel(display_id: str) -> Show:
    def show(output: MimeBundle, *, is_update: bool) -> None:
        # `IPython.display.display` does no more, and would be an import; `%%capture` replaces the publisher
        if (shell := kernel()) is not None:
            shell.display_pub.publish(output, {}, transient={"display_id": display_id}, update=is_update)

    return show
