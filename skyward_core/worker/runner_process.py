"""The processes of runners, as their worker sees them: it asks the supervisor for them, learns how they ended, reads
their output, and sends them signals.
"""

from __future__ import annotations

import array
import contextlib
import math
import os
import pickle
import re
import select
import signal
import socket
import threading
import time
from collections import deque
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import NamedTuple

from skyward_core.wire.messages import start_of
from skyward_core.wire.settings import NodeSettings

FORK_SECONDS = 30.0
REQUEST_BYTES = 8  # of a request's number, before the mark
MESSAGE_BYTES = 1 << 16
LAST_LINES = 20
READ_BYTES = 1 << 16
LONGEST_LINE_BYTES = 1 << 18
"""Of a line of output: the client and all displays keep whole lines."""
LONGEST_STATE_BYTES = 4096
"""Of a line that is redrawn, such as a progress bar."""
MARK_START = b"\x1e"
"""How marks, and what begins with them, begin."""
SECONDS_BETWEEN_STATES = 15.0
"""Of one stream of a call. Its last state always travels."""
UP = "\x1b[A"
"""What moves the cursor of a terminal up by a line."""
_ENDS = re.compile("(\r\n|\r|\n)")
PAGE_BYTES = os.sysconf("SC_PAGE_SIZE")
# the time that a runner has to stop: later it is in the kernel, and takes the signal before all else
STOP_SECONDS = 1.0
STOP_LOOK_SECONDS = 0.0002


def ready(readable: Iterable[int], writable: Iterable[int], seconds: float) -> set[int]:
    """Wait for descriptors, for so many seconds at most; return those that are ready.

    Not by `select`, which takes none above 1,023: a node has several for each of its slots.
    """
    poll = select.poll()
    for descriptor in readable:
        poll.register(descriptor, select.POLLIN)
    for descriptor in writable:
        poll.register(descriptor, select.POLLOUT)
    return {descriptor for descriptor, _ in poll.poll(math.ceil(seconds * 1000))}


@dataclass(frozen=True, slots=True)
class RunnerExit:
    """The end of a runner: its pid; its exit code, negative for a signal, as in `subprocess`; whether the kernel has
    killed it because it was out of memory.
    """

    pid: int
    code: int
    is_out_of_memory: bool = False


@dataclass(frozen=True, slots=True)
class Forked:
    """The runner that was forked for the request of this number."""

    request: int
    pid: int


@dataclass(frozen=True, slots=True)
class Reassigned:
    """The node has another rank or head, and its workers are to join there with their calls."""

    settings: NodeSettings


class RunnerFactory:
    """The worker's socket to the supervisor, which forks runners on request and reports how they ended.

    Requests are numbered. A runner that comes after its request has timed out is killed, because it must not answer a
    later request.
    """

    def __init__(
        self, control: socket.socket, on_reassigned: Callable[[NodeSettings], object] = lambda _: None
    ) -> None:
        self._control = control
        self._on_reassigned = on_reassigned
        self._exits: dict[int, RunnerExit] = {}
        self._changed = threading.Condition()
        self._request = 0
        """Number of the present request; those before it are answered or have timed out."""
        self._is_awaited = False
        self._forked = 0
        """Pid of the runner in its answer."""
        self._late: set[int] = set()
        """Runners that have come too late and have not ended yet."""
        self._watchers: dict[int, Callable[[], object]] = {}
        self._requests = threading.Lock()
        threading.Thread(target=self._listen, name="skyward-runner-factory", daemon=True).start()

    def fork(self, descriptors: list[int], mark: bytes, timeout_seconds: float = FORK_SECONDS) -> int:
        """Let the supervisor fork a runner with these descriptors (calls, outcomes, stdout, stderr); return its pid.

        Raises ConnectionError without one.
        """
        with self._requests:
            with self._changed:
                self._request, self._is_awaited, self._forked = self._request + 1, True, 0
            rights = [(socket.SOL_SOCKET, socket.SCM_RIGHTS, array.array("i", descriptors))]
            self._control.sendmsg([self._request.to_bytes(REQUEST_BYTES) + mark], rights)
            with self._changed:
                self._changed.wait_for(lambda: self._forked, timeout=timeout_seconds)
                self._is_awaited = False
                if not self._forked:
                    raise ConnectionError(f"the node's supervisor did not start a process within {timeout_seconds:g} s")
                return self._forked

    def exit_of(self, pid: int, timeout_seconds: float = 10.0) -> RunnerExit | None:
        """Return how a runner ended; None if the supervisor does not report it in time."""
        with self._changed:
            self._changed.wait_for(lambda: pid in self._exits, timeout=timeout_seconds)
            return self._exits.pop(pid, None)

    def watch(self, pid: int, on_exit: Callable[[], object]) -> None:
        """Call a function when the supervisor reports the end of a runner; at once if it has. It runs in any thread."""
        with self._changed:
            if pid not in self._exits:
                self._watchers[pid] = on_exit
                return
        on_exit()

    def _listen(self) -> None:
        with contextlib.suppress(OSError):
            while message := self._control.recv(MESSAGE_BYTES):
                news = pickle.loads(message)
                with self._changed:
                    self._receive(news)
                    watcher = self._watchers.pop(news.pid, None) if isinstance(news, Forked | RunnerExit) else None
                    self._changed.notify_all()
                if watcher is not None and isinstance(news, RunnerExit):
                    watcher()

    def _receive(self, message: RunnerExit | Forked | Reassigned) -> None:
        match message:
            case Reassigned(settings):
                self._on_reassigned(settings)
            case RunnerExit(pid) if pid in self._late:
                self._late.remove(pid)
            case RunnerExit(pid):
                self._exits[pid] = message
            case Forked(self._request, pid) if self._is_awaited:
                self._forked = pid
                self._exits.pop(pid, None)  # of an earlier process with this pid, reported too late
            case Forked(_, pid):
                self._late.add(pid)
                kill_group(pid)


# The output pipes of a runner, cut into lines and into calls.
#
# A progress bar ends its states with carriage returns, some ten a second. Below it others stand, if bars are nested:
# each state of theirs is a line, after which the cursor goes up again. A log that keeps all of them, as a database of
# an orchestrator does, holds nothing else. So few of such lines travel (`RedrawnLines`).


class RedrawnLines:
    """Takes the text of one stream of a call in pieces; lets lines pass, and some of the states of redrawn ones."""

    def __init__(self) -> None:
        self._held = ""
        """The last state that has not passed."""
        self._passed, self._passed_at = "", -math.inf
        """The last state that has passed, and when."""
        self._unfinished, self._unfinished_since = "", 0.0
        self._is_redrawn = False
        """Whether the line that goes on is drawn over another one."""
        self._is_nested = False
        """Whether the lines are bars below each other."""
        self.is_new = True
        """Whether this has seen nothing: then a call's end costs nothing here."""

    def are_all_plain(self, text: str) -> bool:
        """Return whether nothing of this text, which is to come, is redrawn."""
        return not (self._held or self._is_redrawn or self._is_nested or "\r" in text or UP in text)

    def lines(self, text: str, records: str, now: float) -> Iterator[str]:
        """Yield the lines of a text to pass on. Its last line is whole. `records` is how log records begin: they pass,
        and cut the line before them.
        """
        self.is_new = False
        pieces = _ENDS.split(text)
        for piece, end in zip(pieces[::2], [*pieces[1::2], ""], strict=True):
            before, found, record = piece.partition(records)
            if found:
                yield from self._piece(before, "\r" if self._is_redrawn else "\n", now) if before else ()
                self._is_redrawn = False
                yield found + record
            elif piece or end:
                yield from self._piece(piece, end, now)

    def due(self, unfinished: str, now: float) -> Iterator[str]:
        """Yield the last state, if it is time; `unfinished` is the text of the line that goes on, which is a state if
        it stands still.
        """
        self.is_new = False
        if unfinished != self._unfinished:
            self._unfinished, self._unfinished_since = unfinished, now
        stands = self._is_redrawn and unfinished.strip() and now - self._unfinished_since >= SECONDS_BETWEEN_STATES
        state = unfinished.replace(UP, "") if stands else self._held
        if state:
            yield from self._state(state, now)

    def end(self) -> Iterator[str]:
        """Yield the last state, if it has not passed: the call has ended."""
        if self.is_new:
            return
        held = self._held
        self.__init__()
        if held:
            yield held

    def _piece(self, text: str, end: str, now: float) -> Iterator[str]:
        was_redrawn, self._is_redrawn = self._is_redrawn, end == "\r"
        goes_up, text = UP in text, text.replace(UP, "")
        if not text.strip():  # a bar was cleared, or stands below a line that this ends
            if not (was_redrawn or self._is_redrawn or self._is_nested or goes_up):
                yield text
            return
        self._is_nested = goes_up or (self._is_nested and was_redrawn)
        if self._is_redrawn or self._is_nested:
            yield from self._state(text, now)
            return
        is_new = not was_redrawn or text != self._passed
        self._held = ""
        if is_new:
            yield text

    def _state(self, text: str, now: float) -> Iterator[str]:
        self._held = "" if text == self._passed else text
        if self._held and now - self._passed_at >= SECONDS_BETWEEN_STATES:
            self._held, self._passed, self._passed_at = "", text, now
            yield text


@dataclass(slots=True)
class Stream:
    """One of a runner's output pipes, cut into lines and, at the mark, into calls.

    A line may have LONGEST_LINE_BYTES. What follows is left out, and the next line says so: a client keeps whole lines.
    """

    name: str
    descriptor: int
    mark: bytes
    rest: bytearray = field(default_factory=bytearray)
    marks_seen: int = 0
    tails: dict[int, deque[str]] = field(default_factory=dict[int, deque[str]])
    clock: Callable[[], float] = time.monotonic
    redrawn: RedrawnLines = field(default_factory=RedrawnLines)
    searched: int = 0
    """How many bytes of `rest` have neither a line end nor a whole mark."""
    left_out: int | None = None
    """How many bytes of the line that goes on were left out; None: it is not too long."""

    def read(self) -> bool:
        """Read at most READ_BYTES from the pipe; False if it was empty."""
        try:
            chunk = os.read(self.descriptor, READ_BYTES)
        except BlockingIOError:
            return False
        self.rest += chunk
        return bool(chunk)

    def lines(self, *, flush: bool = False) -> Iterator[tuple[int, tuple[str, ...]]]:
        """Yield the lines read, as pairs of the number of marks before them and the lines; an unfinished line waits
        unless `flush`.
        """
        self._leave_out(is_last=flush)
        while (cut := self.rest.find(self.mark, max(0, self.searched - len(self.mark)))) >= 0:
            part = self._taken(cut)
            del self.rest[: len(self.mark)]
            yield self.marks_seen, self._remember((*self._passing(part), *self.redrawn.end()))
            self.marks_seen += 1
        waits = self.rest.endswith(b"\r")  # its line feed may be on the way
        last = len(self.rest) - waits
        ends = (self.rest.rfind(end, self.searched, last) for end in (b"\n", b"\r"))
        end = len(self.rest) if flush else max(ends) + 1
        if end:
            part = self._taken(end)
            yield self.marks_seen, self._remember((*self._passing(part), *(self.redrawn.end() if flush else ())))
        self.searched = max(0, len(self.rest) - waits)
        if len(self.rest) >= LONGEST_LINE_BYTES + len(self.mark):
            part = self._taken(LONGEST_LINE_BYTES)
            yield self.marks_seen, self._remember(self._passing(part))
            self.left_out = 0
            self._leave_out(is_last=False)
        state = self.rest[:LONGEST_STATE_BYTES].partition(MARK_START)[0].decode(errors="ignore")
        if (self.rest or not self.redrawn.is_new) and (late := tuple(self.redrawn.due(state, self.clock()))):
            yield self.marks_seen, self._remember(late)

    def _taken(self, count: int) -> bytes:
        part = bytes(self.rest[:count])
        del self.rest[:count]
        self.searched = 0
        return part

    def _leave_out(self, *, is_last: bool) -> None:
        """Drop what follows of a line that is too long, as far as its end or a mark; put a line about it there."""
        if self.left_out is None:
            return
        ends = [place for end in (b"\n", b"\r", self.mark) if (place := self.rest.find(end)) >= 0]
        count = min(ends, default=len(self.rest) if is_last else max(0, len(self.rest) - len(self.mark)))
        del self.rest[:count]
        self.left_out += count
        if ends or is_last:
            self.rest[:0] = f"skyward: the line above is cut, and {self.left_out} more bytes are left out".encode()
            self.left_out = None
        self.searched = 0

    def _passing(self, part: bytes) -> tuple[str, ...]:
        if not part:
            return ()
        text = part.decode("utf-8", errors="backslashreplace")
        if self.redrawn.are_all_plain(text):
            return tuple(text.removesuffix("\n").split("\n")) if text else ()
        return tuple(self.redrawn.lines(text, self.mark[:-1].decode() + ":", self.clock()))

    def _remember(self, lines: tuple[str, ...]) -> tuple[str, ...]:
        if lines:
            metrics = start_of(self.mark)  # they must not push the last lines out
            tail = self.tails.setdefault(self.marks_seen, deque(maxlen=LAST_LINES))
            tail.extend(line for line in lines if not line.startswith(metrics))
        return lines

    def forget(self, mark: int) -> tuple[str, ...]:
        """Return the last lines before a mark, and forget them."""
        return tuple(self.tails.pop(mark, ()))


def stop(pid: int) -> None:
    """Stop a process, not its children; return when it has stopped or is gone, or after STOP_SECONDS."""
    deadline = time.monotonic() + STOP_SECONDS
    send_signal(pid, signal.SIGSTOP)
    while time.monotonic() < deadline and not _is_stopped(pid):
        time.sleep(STOP_LOOK_SECONDS)


def _is_stopped(pid: int) -> bool:
    """Return whether a process's main thread is stopped or traced (field 3 of proc(5) stat), or the process is gone."""
    try:
        return Path(f"/proc/{pid}/stat").read_text(errors="replace").rpartition(") ")[2][0] in "TtZX"
    except OSError:
        return True


def kill_group(pid: int, sig: signal.Signals = signal.SIGKILL) -> None:
    with contextlib.suppress(ProcessLookupError, PermissionError):
        os.killpg(pid, sig)


def send_signal(pid: int, sig: signal.Signals) -> None:
    with contextlib.suppress(ProcessLookupError, PermissionError):
        os.kill(pid, sig)


@dataclass(frozen=True, slots=True)
class StrayProcess:
    """A process that has left the group of the process that started it.

    `started` is in clock ticks since the machine's start: a later process with the same pid has another value.
    """

    pid: int
    started: int

    def send(self, sig: signal.Signals) -> None:
        """Send a signal, unless the process is gone."""
        if (status := _status_of(self.pid)) is not None and status.started == self.started:
            send_signal(self.pid, sig)


def strays_of(pid: int) -> set[StrayProcess]:
    """Return the processes that a process has started, itself or through others that live, and that are not in the
    process group of its pid.
    """
    children: dict[int, list[tuple[int, _Status]]] = {}
    for name in os.listdir("/proc"):
        if name.isdigit() and (status := _status_of(int(name))) is not None:
            children.setdefault(status.parent, []).append((int(name), status))
    found, parents = set[StrayProcess](), [pid]
    while parents:
        for child, status in children.pop(parents.pop(), ()):
            parents.append(child)
            if status.group != pid:
                found.add(StrayProcess(child, status.started))
    return found


class _Status(NamedTuple):
    """Fields 4, 5 and 22 of proc(5) stat."""

    parent: int
    group: int
    started: int


def _status_of(pid: int) -> _Status | None:
    try:
        fields = Path(f"/proc/{pid}/stat").read_text(errors="replace").rpartition(") ")[2].split()
    except OSError:
        return None
    return _Status(int(fields[1]), int(fields[2]), int(fields[19]))


def resident_bytes(pid: int) -> int:
    try:
        return int(Path(f"/proc/{pid}/statm").read_text().split()[1]) * PAGE_BYTES
    except (OSError, IndexError):
        return 0
