"""What a pool shows its user while it works: `display = "log" | "spinner" | "quiet"`, three callbacks that print.

All of it goes to stderr, what the nodes print included (`[node 0] ...`): stdout belongs to the result of the user's own
script, so that `python train.py > result.json` stays clean, and on one stream the lines of the nodes and ours keep
their order.
"""

from __future__ import annotations

import logging
import sys
import threading
from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING, Any, Protocol, TextIO, override

from skyward_core.concurrency.threads import LoopThread
from skyward_core.errors import BadRequest, meant
from skyward_core.events.events import (
    BootstrapCompleted,
    BootstrapProgress,
    BootstrapStarting,
    CallProgress,
    CallReported,
    CallsWaiting,
    ContactRegained,
    CostFinal,
    CostUpdate,
    InfraCreated,
    InfraCreating,
    InstanceLaunching,
    LogLine,
    PoolLeft,
    PoolReady,
    PoolStopping,
    SkywardEvent,
)
from skyward_core.events.narrator import Narrator, not_well, usd
from skyward_core.events.notebook import NotebookDisplay, kernel
from skyward_core.shown_text import each_line

if TYPE_CHECKING:
    from rich.progress import Progress, TaskID

KINDS = ("log", "spinner", "quiet")
SECONDS_BETWEEN_PICTURES = 0.125
_node_log = logging.getLogger("skyward.node")
OURS = ("skyward", "distributed", "tornado", "bokeh")
"""Loggers of the pool itself, and of what it imports: their levels here are not the user's wish."""
_log = logging.getLogger("skyward")


class Display(Protocol):
    """A callback that prints.

    Events may come from one thread and `close` from another; what comes after `close` is not shown.
    """

    def __call__(self, event: SkywardEvent, /) -> None: ...

    def close(self) -> None:
        """Give the terminal and the logger back as they were found; may be called twice."""
        ...


def display(kind: str, *, file: TextIO | None = None, pool_id: str = "") -> Display:
    """Make the display of that kind, for one pool; `file` stands in for stderr. `pool_id` is that of a pool which is
    open already; otherwise the events say it.

    "log" writes through `logging` (loggers "skyward", and "skyward.node" for what nodes print); where logging is not
    configured, to stderr. Its records have the fields of `_Log`. "spinner" draws progress bars on a terminal, and
    writes plain lines elsewhere. In a Jupyter notebook both are one output that is replaced (`NotebookDisplay`), but
    "log" writes through `logging` if that is configured. "quiet" shows nothing, no warning either (`log_of`): errors
    are raised anyway. Raises BadRequest for any other kind.

        with use_callback(display("log")): ...
    """
    is_notebook = file is None and kernel() is not None
    match kind:
        case "log":
            return NotebookDisplay() if is_notebook and not _others_listen() else _Log(file, pool_id)
        case "spinner":
            return NotebookDisplay() if is_notebook else _spinner(file)
        case "quiet":
            return _Quiet()
        case _:
            near = meant(str(kind), KINDS)
            hint = f'Did you mean "{near}"? ' if near else ""
            raise BadRequest(f'display={kind!r} is not known. {hint}Choose "log", "spinner" or "quiet".')


def log_of(kind: str) -> Callable[..., None]:
    """Return `Logger.log` of the logger "skyward", for what is said of a pool beside its events.

    For a "quiet" pool it drops the records of programs that have not configured logging: `logging` prints the warnings
    of these on stderr by itself.
    """
    return _log_if_heard if kind == "quiet" else _log.log


def last_log_of(kind: str) -> Callable[..., None]:
    """As `log_of`, for what is said after the display was closed: where logging is not configured, it is on stderr."""
    return _log_if_heard if kind == "quiet" else _log_last


def _log_last(level: int, message: str, *args: object) -> None:
    listener = _FallbackHandler(None)
    listener.attach()
    try:
        _log.log(level, message, *args)
    finally:
        listener.detach()


def _log_if_heard(level: int, message: str, *args: object, exc_info: BaseException | None = None) -> None:
    if _others_listen():
        _log.log(level, message, *args, exc_info=exc_info)


class _Quiet:
    def __call__(self, event: SkywardEvent, /) -> None:
        return None

    def close(self) -> None:
        return None


# ── log ──────────────────────────────────────────────────────────────────────────────────────────────────────────────


class _Log:
    """Writes events to the logger; adds a handler in case the user has none.

    Each record has `skyward_event`, the event's class, and `skyward_pool`, `skyward_node` and `skyward_call`, None if
    the event is about no node, or no call. They have a prefix because `logging` raises KeyError if the user's record
    factory has set a field of the same name.
    """

    def __init__(self, file: TextIO | None, pool_id: str) -> None:
        self._narrator = Narrator()
        self._pool_id = pool_id
        self._lock = threading.Lock()
        self._open = True
        self._listener = _FallbackHandler(file)
        self._listener.attach()

    def __call__(self, event: SkywardEvent, /) -> None:
        with self._lock:
            if not self._open:
                return
            if line := self._narrator.tell(event):
                log = _node_log if isinstance(event, LogLine | CallReported) else _log
                write = log_record_of_node if isinstance(event, LogLine) and event.level and event.is_shown else log.log
                write(line[0], "%s", line[1], extra=self._fields(event))

    def _fields(self, event: SkywardEvent) -> dict[str, object]:
        if isinstance(event, InfraCreating | PoolReady) and event.pool_id:
            self._pool_id = event.pool_id
        node: int | None = getattr(event, "node", None)
        machine: str | None = getattr(event, "instance_id", None)
        return {
            "skyward_event": type(event).__name__,
            "skyward_pool": self._pool_id or None,
            "skyward_node": self._narrator.rank(machine) if node is None and machine is not None else node,
            "skyward_call": getattr(event, "call_id", None),
        }

    def close(self) -> None:
        with self._lock:
            if self._open:
                self._open = False
                self._listener.detach()


class _FallbackHandler(logging.Handler):
    """Prints what is logged under "skyward" while there is no other handler, as `logging.lastResort` does for
    warnings.

    It asks at each record, so that logging configured after the pool was opened doubles no line. Of several pools'
    listeners to one file only the first prints, and the next takes over when it goes.
    """

    def __init__(self, file: TextIO | None) -> None:
        super().__init__(logging.INFO)
        self.setFormatter(_MessageFormatter())
        self._file = file
        self._level_before = logging.NOTSET

    def attach(self) -> None:
        others = _last_listeners()
        self._level_before = others[0]._level_before if others else _log.level
        _log.addHandler(self)
        if not _others_listen() and _log.level == logging.NOTSET:
            # Otherwise the root's default, WARNING, holds and nothing of an ordinary run is heard.
            _log.setLevel(logging.INFO)

    def detach(self) -> None:
        _log.removeHandler(self)
        if not _last_listeners() and self._level_before == logging.NOTSET and _log.level == logging.INFO:
            _log.setLevel(logging.NOTSET)

    @override
    def emit(self, record: logging.LogRecord) -> None:
        if _others_listen() or self is not next((one for one in _last_listeners() if one._file is self._file), None):
            return
        try:
            file = self._file or sys.stderr
            file.write(self.format(record) + "\n")
            file.flush()
        # a full disk, a closed stderr: reported as `logging` reports it, and no reason to stop a pool
        except (OSError, ValueError):
            self.handleError(record)


def _last_listeners() -> list[_FallbackHandler]:
    return [one for one in _log.handlers if isinstance(one, _FallbackHandler)]


def log_record_of_node(level: int, words: str, *args: object, extra: Mapping[str, object] | None = None) -> None:
    """Write a record that a node has made, as the root logger does with those of other loggers: it asks for no level.

    The level of the record's own logger has held on the node (`levels_for_nodes`). A level of the loggers "skyward" or
    "skyward.node" still holds.
    """
    if (_node_log.level or _log.level) and not _node_log.isEnabledFor(level):
        return
    if level > _node_log.manager.disable:
        record = _node_log.makeRecord(_node_log.name, level, "", 0, words, args, None, extra=extra)
        _node_log.handle(record)


def node_level() -> int:
    """Return the level from which on records of nodes are shown here: as the user, or an orchestrator, has configured
    `logging`; INFO if neither has set one.
    """
    level = _node_log.getEffectiveLevel()
    return logging.INFO if level == logging.WARNING and not _others_listen() else level


def _others_listen() -> bool:
    """Whether the user configured logging: some handler but ours hears the logger "skyward"."""
    if any(not isinstance(one, _FallbackHandler) for one in _log.handlers):
        return True
    return _log.propagate and _log.parent is not None and _log.parent.hasHandlers()


class _MessageFormatter(logging.Formatter):
    """Begins our lines with "skyward"; a node's lines say themselves where they come from. Indents tracebacks."""

    @override
    def formatMessage(self, record: logging.LogRecord) -> str:
        if record.name == _node_log.name:
            return record.message
        level = f"{record.levelname.lower()}: " if record.levelno >= logging.WARNING else ""
        return f"skyward  {level}{record.message}"

    @override
    def formatException(self, ei: Any) -> str:
        return each_line("  ", super().formatException(ei))


# ── spinner ──────────────────────────────────────────────────────────────────────────────────────────────────────────


def _spinner(file: TextIO | None) -> Display:
    from rich.console import Console
    from rich.file_proxy import FileProxy

    console = Console(file=file, stderr=file is None)
    # A FileProxy in place of stderr is another live display, of a second pool or the user's own: two would overwrite
    # each other, while plain lines written to the proxy come out above it.
    taken = file is None and isinstance(sys.stderr, FileProxy)
    if taken or not console.is_interactive:
        return _ConsoleLines(file)
    from rich.progress import BarColumn, Progress, SpinnerColumn, TextColumn, TimeElapsedColumn

    return _Spinner(
        Progress(
            SpinnerColumn(finished_text="•"),
            TextColumn("{task.description}", markup=False),
            BarColumn(bar_width=20),
            TextColumn("{task.fields[note]}", markup=False),
            TimeElapsedColumn(),
            console=console,
            transient=False,
            auto_refresh=False,  # rich does not join its own refresh thread: `_Spinner` has one that ends with `close`
            # A stdout that goes to a file or a pipe must go on going there, not to the terminal.
            redirect_stdout=sys.stdout.isatty(),
        )
    )


class _ConsoleLines:
    """Plain lines, for a spinner that has no terminal to draw on."""

    def __init__(self, file: TextIO | None) -> None:
        self._narrator = Narrator()
        self._lock = threading.Lock()
        self._file = file
        self._open = True

    def __call__(self, event: SkywardEvent, /) -> None:
        with self._lock:
            line = _line(self._narrator, event)
            if self._open and line is not None:
                print(line, file=self._file or sys.stderr, flush=True)

    def close(self) -> None:
        with self._lock:
            self._open = False


def _line(narrator: Narrator, event: SkywardEvent) -> str | None:
    line = narrator.tell(event)
    if line is None or line[0] < logging.INFO:
        return None
    return line[1] if isinstance(event, LogLine | CallReported) else f"skyward  {line[1]}"


class _Spinner:
    """A row for the pool, one for each machine while it is being prepared, one for the calls; lines of the nodes come
    out above.
    """

    def __init__(self, progress: Progress) -> None:
        self._progress = progress
        self._narrator = Narrator()
        self._lock = threading.Lock()
        self._open = True
        self._pool: TaskID | None = None
        self._calls: TaskID | None = None
        self._machines: dict[str, TaskID] = {}
        self._closing = threading.Event()
        self._animation = LoopThread("skyward-spinner", self._animate)

    def __call__(self, event: SkywardEvent, /) -> None:
        with self._lock:
            if not self._open:
                return
            line = self._narrator.tell(event)
            match event:
                case LogLine(is_shown=False):
                    pass
                case LogLine() | ContactRegained() | CallsWaiting():
                    self._print_above(line[1] if line else "")
                case CallReported() if line is not None:
                    self._print_above(line[1])
                case CallProgress():
                    self._show_calls(event)
                case BootstrapStarting(machine) | BootstrapProgress(machine) | BootstrapCompleted(machine):
                    self._show_machine(machine, event)
                case CostUpdate(accumulated_cost=cost, hourly_rate=rate):
                    self._show_pool(note=f"{usd(cost)} at {usd(rate)}/h" if rate or cost else "")
                case (
                    InfraCreating()
                    | InfraCreated()
                    | InstanceLaunching()
                    | PoolReady()
                    | PoolStopping()
                    | CostFinal()
                    | PoolLeft()
                ):
                    self._show_phase(event, line[1] if line else "")
                case _ if line is not None and line[0] >= logging.WARNING:
                    self._print_above(line[1])
                case _:
                    pass

    def close(self) -> None:
        with self._lock:
            if self._open and self._pool is not None:
                self._closing.set()
                self._animation.join()
                self._progress.stop()
            self._open = False

    def _animate(self) -> None:
        while not self._closing.wait(SECONDS_BETWEEN_PICTURES):
            self._progress.refresh()

    def _print_above(self, text: str) -> None:
        self._pool_row()
        # soft_wrap: a long line stays one line for those who copy it.
        self._progress.console.print(text, markup=False, highlight=False, emoji=False, soft_wrap=True)

    def _show_calls(self, calls: CallProgress) -> None:
        self._pool_row()
        if self._calls is None:
            self._calls = self._progress.add_task("calls", total=calls.submitted, note="")
        note = f"{calls.done} of {calls.submitted} calls{not_well(calls)}"
        self._progress.update(self._calls, total=calls.submitted, completed=calls.done + calls.cancelled, note=note)

    def _show_machine(self, machine: str, event: SkywardEvent) -> None:
        pool = self._pool_row()
        row = self._machines.get(machine)
        if row is None:
            row = self._machines[machine] = self._progress.add_task(
                self._narrator.name(machine), total=None, note="preparing"
            )
        if isinstance(event, BootstrapProgress):
            self._progress.update(row, note=event.step)
        elif isinstance(event, BootstrapCompleted):
            self._progress.update(row, visible=False)
            self._progress.advance(pool)

    def _show_phase(self, event: SkywardEvent, text: str) -> None:
        pool = self._pool_row()
        self._progress.update(pool, description=text)
        if isinstance(event, InstanceLaunching):
            self._progress.update(pool, total=event.count)
        elif isinstance(event, PoolReady):
            self._progress.update(pool, total=event.nodes, completed=event.nodes)
        elif isinstance(event, CostFinal | PoolLeft):
            for row in self._machines.values():
                self._progress.update(row, visible=False)
            self._progress.update(pool, note="")
            self._progress.stop_task(pool)

    def _show_pool(self, note: str) -> None:
        self._progress.update(self._pool_row(), note=note)

    def _pool_row(self) -> TaskID:
        """The pool's own row; with the first event that is shown, drawing begins."""
        if self._pool is None:
            self._progress.start()
            self._animation.start_if_possible()  # without it the rows stand still
            self._pool = self._progress.add_task("opening the pool", total=None, note="")
        return self._pool


def levels_for_nodes(root_level: int = 0) -> tuple[tuple[str, int], ...]:
    """Return the level of each logger for which the user or an orchestrator has set one.

    The root logger gets `root_level`; 0: the level from which on the lines of nodes are shown in this process.
    """
    named = [
        (name, level)
        for name, logger in list(logging.root.manager.loggerDict.items())  # a copy: other threads make loggers
        if (level := getattr(logger, "level", 0)) and name.partition(".")[0] not in OURS
    ]
    return (("", root_level or node_level()), *named)
