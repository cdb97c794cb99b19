"""A worker asks its node's supervisor for runners: the requests, the supervisor's answers and its reports of how
runners ended.
"""

from __future__ import annotations

import array
import contextlib
import pickle
import socket
import threading
from collections.abc import Callable
from dataclasses import dataclass

from skyward_core.worker.processes import kill_group
from skyward_core.worker.settings import NodeSettings

FORK_SECONDS = 30.0
REQUEST_BYTES = 8  # of a request's number, before the mark
MESSAGE_BYTES = 1 << 16


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
