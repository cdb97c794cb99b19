"""What a pool tells its user while it works: `display = "log" | "spinner" | "quiet"`, three callbacks that print.

All of it goes to stderr, what the nodes print included (`[node 0] ...`): stdout belongs to the result of the user's own script, so that
`python train.py > result.json` stays clean, and on one stream the lines of the nodes and ours keep their order.
"""

from __future__ import annotations

import difflib
import logging
import sys
import threading
from typing import TYPE_CHECKING, Protocol, TextIO, override

from skyward_core.errors import BadRequest
from skyward_core.events import (
    BootstrapCompleted,
    BootstrapProgress,
    BootstrapStarting,
    CallProgress,
    CostFinal,
    CostUpdate,
    Error,
    InfraCreated,
    InfraCreating,
    InstanceLaunching,
    InstanceLost,
    InstanceProvisioned,
    InstanceStopping,
    LogLine,
    PoolReady,
    PoolStopping,
    SkywardEvent,
)

if TYPE_CHECKING:
    from rich.progress import Progress, TaskID

KINDS = ("log", "spinner", "quiet")
SECONDS_BETWEEN_COSTS = 60.0
SECONDS_BETWEEN_PICTURES = 0.125

_log = logging.getLogger("skyward")
_node_log = logging.getLogger("skyward.node")


class Display(Protocol):
    """A callback that prints. Events may come from one thread and `close` from another; what comes after `close` is not shown."""

    def __call__(self, event: SkywardEvent, /) -> None: ...

    def close(self) -> None:
        """Give the terminal and the logger back as they were found; may be called twice."""
        ...


def display(kind: str, *, file: TextIO | None = None) -> Display:
    """Make the display of that kind, for one pool; `file` stands in for stderr.

    "log" writes through `logging` (loggers "skyward", and "skyward.node" for what nodes print); where nobody configured logging, to stderr.
    "spinner" draws progress bars on a terminal, and plain lines elsewhere. "quiet" shows nothing at all: errors are raised anyway.
    Raises BadRequest for any other kind.

        with use_callback(display("log")): ...
    """
    match kind:
        case "log":
            return _Log(file)
        case "spinner":
            return _spinner(file)
        case "quiet":
            return _Quiet()
        case _:
            near = difflib.get_close_matches(str(kind), KINDS, n=1, cutoff=0.3)
            hint = f'Did you mean "{near[0]}"? ' if near else ""
            raise BadRequest(f'display={kind!r} is not known. {hint}Choose "log", "spinner" or "quiet".')


class _Quiet:
    def __call__(self, event: SkywardEvent, /) -> None:
        return None

    def close(self) -> None:
        return None


# ── log ──────────────────────────────────────────────────────────────────────────────────────────────────────────────


class _Log:
    """Tells events to the logger, and brings a listener along in case the user has none."""

    def __init__(self, file: TextIO | None) -> None:
        self._narrator = _Narrator()
        self._lock = threading.Lock()
        self._open = True
        self._listener = _LastListener(file)
        self._listener.attach()

    def __call__(self, event: SkywardEvent, /) -> None:
        with self._lock:
            if not self._open:
                return
            if isinstance(event, LogLine):
                _node_log.info("[node %d] %s", event.node, event.line)
            elif told := self._narrator.tell(event):
                _log.log(told[0], "%s", told[1])

    def close(self) -> None:
        with self._lock:
            if self._open:
                self._open = False
                self._listener.detach()


class _LastListener(logging.Handler):
    """Prints what is logged under "skyward" for as long as nobody else listens, as `logging.lastResort` does for warnings.

    It asks at each record, so that logging configured after the pool was opened doubles no line. Of several pools' listeners to
    one file only the first prints, and the next takes over when it goes.
    """

    def __init__(self, file: TextIO | None) -> None:
        super().__init__(logging.INFO)
        self.setFormatter(_Plain())
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
        except (OSError, ValueError):  # a full disk, a closed stderr: told as `logging` tells it, and no reason to stop a pool
            self.handleError(record)


def _last_listeners() -> list[_LastListener]:
    return [one for one in _log.handlers if isinstance(one, _LastListener)]


def _others_listen() -> bool:
    """Whether the user configured logging: some handler but ours hears the logger "skyward"."""
    if any(not isinstance(one, _LastListener) for one in _log.handlers):
        return True
    return _log.propagate and _log.parent is not None and _log.parent.hasHandlers()


class _Plain(logging.Formatter):
    """`skyward  launching ...` for our lines; a node's lines say themselves where they come from."""

    @override
    def formatMessage(self, record: logging.LogRecord) -> str:
        if record.name == _node_log.name:
            return record.message
        level = f"{record.levelname.lower()}: " if record.levelno >= logging.WARNING else ""
        return f"skyward  {level}{record.message}"


# ── spinner ──────────────────────────────────────────────────────────────────────────────────────────────────────────


def _spinner(file: TextIO | None) -> Display:
    from rich.console import Console
    from rich.file_proxy import FileProxy

    console = Console(file=file, stderr=file is None)
    # A FileProxy in place of stderr is another live display, of a second pool or the user's own: two would overwrite each other,
    # while plain lines written to the proxy come out above it.
    taken = file is None and isinstance(sys.stderr, FileProxy)
    if taken or not console.is_interactive:
        return _Lines(file)
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


class _Lines:
    """Plain lines, for a spinner that has no terminal to draw on."""

    def __init__(self, file: TextIO | None) -> None:
        self._narrator = _Narrator()
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


def _line(narrator: _Narrator, event: SkywardEvent) -> str | None:
    if isinstance(event, LogLine):
        return f"[node {event.node}] {event.line}"
    told = narrator.tell(event)
    return f"skyward  {told[1]}" if told and told[0] >= logging.INFO else None


class _Spinner:
    """A row for the pool, one for each machine while it is being prepared, one for the calls; lines of the nodes come out above."""

    def __init__(self, progress: Progress) -> None:
        self._progress = progress
        self._narrator = _Narrator()
        self._lock = threading.Lock()
        self._open = True
        self._pool: TaskID | None = None
        self._calls: TaskID | None = None
        self._machines: dict[str, TaskID] = {}
        self._closing = threading.Event()
        self._animation = threading.Thread(target=self._animate, name="skyward-spinner", daemon=True)

    def __call__(self, event: SkywardEvent, /) -> None:
        with self._lock:
            if not self._open:
                return
            told = self._narrator.tell(event)
            match event:
                case LogLine() | InstanceLost() | Error():
                    self._print_above(event, told)
                case CallProgress(submitted, done, failed):
                    self._show_calls(submitted, done, failed)
                case BootstrapStarting(machine) | BootstrapProgress(machine) | BootstrapCompleted(machine):
                    self._show_machine(machine, event)
                case CostUpdate(accumulated_cost=cost, hourly_rate=rate):
                    self._show_pool(note=f"{_usd(cost)} at {_usd(rate)}/h" if rate or cost else "")
                case InfraCreating() | InfraCreated() | InstanceLaunching() | PoolReady() | PoolStopping() | CostFinal():
                    self._show_phase(event, told[1] if told else "")
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

    def _print_above(self, event: SkywardEvent, told: tuple[int, str] | None) -> None:
        text = f"[node {event.node}] {event.line}" if isinstance(event, LogLine) else told[1] if told else ""
        self._pool_row()
        # soft_wrap: a long line stays one line for whoever copies it.
        self._progress.console.print(text, markup=False, highlight=False, emoji=False, soft_wrap=True)

    def _show_calls(self, submitted: int, done: int, failed: int) -> None:
        self._pool_row()
        if self._calls is None:
            self._calls = self._progress.add_task("calls", total=submitted, note="")
        note = f"{done} of {submitted} calls" + (f", {failed} failed" if failed else "")
        self._progress.update(self._calls, total=submitted, completed=done, note=note)

    def _show_machine(self, machine: str, event: SkywardEvent) -> None:
        pool = self._pool_row()
        row = self._machines.get(machine)
        if row is None:
            row = self._machines[machine] = self._progress.add_task(self._narrator.name(machine), total=None, note="preparing")
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
        elif isinstance(event, CostFinal):
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
            self._animation.start()
            self._pool = self._progress.add_task("opening the pool", total=None, note="")
        return self._pool


# ── words ────────────────────────────────────────────────────────────────────────────────────────────────────────────


class _Narrator:
    """Puts one pool's events into words, and leaves out what would be noise. Not thread-safe."""

    def __init__(self) -> None:
        self._nodes: dict[str, int] = {}
        self._calls = CallProgress(submitted=0, done=0, failed=0)
        self._cost_told_at = 0.0

    def tell(self, event: SkywardEvent) -> tuple[int, str] | None:
        """Return the level (of `logging`) and the words for an event, or None if it is not worth a line."""
        match event:
            case InstanceProvisioned(instance_id, node):
                self._nodes[instance_id] = node
                return logging.INFO, _provisioned(event)
            case CallProgress():
                self._calls = event
                return None
            case CostUpdate():
                return self._cost_so_far(event)
            case InstanceLost(_, node, reason):
                return logging.WARNING, f"node {node} is lost: {reason}"
            case Error(message, machine):
                return (logging.ERROR, message if machine is None else f"{self.name(machine)}: {message}")
            case InstanceStopping(machine):
                return logging.DEBUG, f"{self.name(machine)}: stopping"
            case _:
                words = self._phase(event)
                return (logging.INFO, words) if words else None

    def name(self, instance_id: str) -> str:
        """Return "node 1" for a machine whose rank is known, else its id."""
        node = self._nodes.get(instance_id)
        return instance_id if node is None else f"node {node}"

    def _phase(self, event: SkywardEvent) -> str | None:
        match event:
            case InfraCreating():
                return "looking for machines"
            case InfraCreated(region):
                return f"found what you asked for in {region}"
            case InstanceLaunching(count, instance_type, provider):
                return f"launching {count} x {instance_type} on {provider}"
            case BootstrapStarting(machine):
                return f"{self.name(machine)}: preparing"
            case BootstrapProgress(machine, step):
                return f"{self.name(machine)}: {step}"
            case BootstrapCompleted(machine):
                return f"{self.name(machine)}: ready"
            case PoolReady():
                return f"ready after {_duration(event.seconds)}: {_count(event.nodes, 'node')}, {_count(event.slots, 'slot')}"
            case PoolStopping():
                return "giving the machines back" + (f" ({self._calls_so_far()})" if self._calls.submitted else "")
            case CostFinal():
                return _bill(event)
            case _:
                return None

    def _cost_so_far(self, event: CostUpdate) -> tuple[int, str] | None:
        if event.elapsed_seconds - self._cost_told_at < SECONDS_BETWEEN_COSTS:
            return None
        self._cost_told_at = event.elapsed_seconds
        parts = [f"running for {_duration(event.elapsed_seconds)}"]
        if self._calls.submitted:
            parts.append(self._calls_so_far())
        if event.accumulated_cost or event.hourly_rate:
            parts.append(f"{_usd(event.accumulated_cost)} so far at {_usd(event.hourly_rate)} per hour")
        return logging.INFO, ", ".join(parts)

    def _calls_so_far(self) -> str:
        calls = self._calls
        return f"{calls.done} of {_count(calls.submitted, 'call')} done" + (f", {calls.failed} failed" if calls.failed else "")


def _provisioned(event: InstanceProvisioned) -> str:
    price = event.price_spot if event.spot else event.price_on_demand
    market = "spot" if event.spot else "on demand"
    told = [event.instance_type, event.ip, f"{market} at {_usd(price)} per hour" if price else None]
    rest = ", ".join(part for part in told if part)
    return f"node {event.node} is {event.instance_id}" + (f" ({rest})" if rest else "")


def _bill(event: CostFinal) -> str:
    markets = ((event.spot_count, "spot"), (event.ondemand_count, "on demand"))
    machines = ", ".join(f"{count} {market}" for count, market in markets if count)
    saved = f", {_usd(event.savings_vs_ondemand)} less than on demand" if event.savings_vs_ondemand > 0 else ""
    return f"done: {_duration(event.total_seconds)}, {_usd(event.total_cost)}" + (f" ({machines})" if machines else "") + saved


def _usd(amount: float) -> str:
    if amount == 0:
        return "$0"
    return f"${amount:.4f}" if abs(amount) < 1 else f"${amount:,.2f}"


def _duration(seconds: float) -> str:
    if seconds < 60:
        return f"{seconds:.1f} s"
    minutes, rest = divmod(round(seconds), 60)
    if minutes < 60:
        return f"{minutes} min {rest} s"
    return f"{minutes // 60} h {minutes % 60} min"


def _count(number: int, noun: str) -> str:
    return f"{number} {noun}" if number == 1 else f"{number} {noun}s"
