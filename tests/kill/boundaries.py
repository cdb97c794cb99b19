"""Boundaries at which a process may be killed."""

from __future__ import annotations

import json
import mmap
import os
import signal
import struct
import sys
import threading
import traceback
from collections.abc import Callable, Generator
from contextlib import contextmanager
from enum import StrEnum
from pathlib import Path
from typing import Any, NoReturn

import httpx

from tests.kill import wire
from tests.kill.service import verb_of

_SHAPE = struct.Struct("QQ")


class Phase(StrEnum):
    """How far a pool has come."""

    BEFORE = "before intent"
    INTENDED = "intent .. ask"
    ASKED = "ask .. bound"
    BOUND = "bound .. ready"
    RUNNING = "running"
    REPLACING = "replacing"
    ENDING = "ending"
    AFTER = "after"


PHASES = list(Phase)


class Boundaries:
    """Counts the boundaries that a process reaches, and kills it at the one for which it is armed."""

    def __init__(self) -> None:
        self._memory = mmap.mmap(-1, _SHAPE.size)  # shared with every fork
        self._lock = threading.Lock()
        self._kill_at = 0
        self.passed: list[tuple[str, str]] = []
        """Phase and label of each boundary, in the process that reached it."""

    def close(self) -> None:
        self._memory.close()

    def arm(self, kill_at: int) -> None:
        """Start counting from zero; die at this boundary. The first one is 1; 0 means never."""
        self._kill_at = kill_at
        self.passed = []
        self._memory[:] = _SHAPE.pack(0, 0)

    @property
    def count(self) -> int:
        return int(_SHAPE.unpack(self._memory[:])[0])

    @property
    def phase(self) -> Phase:
        return PHASES[_SHAPE.unpack(self._memory[:])[1]]

    def enter(self, phase: Phase) -> None:
        with self._lock:
            self._memory[:] = _SHAPE.pack(self.count, PHASES.index(phase))

    def reach(self, label: str) -> None:
        with self._lock:
            phase = _next(self.phase, label)
            self._memory[:] = _SHAPE.pack(self.count + 1, PHASES.index(phase))
            self.passed.append((phase.value, label))
            if len(self.passed) == self._kill_at:  # other forks may count at the same time
                os.kill(os.getpid(), signal.SIGKILL)

    def install(self) -> None:
        """Install this at all boundaries of this process, until the process ends."""
        from skyward_core.ledger.database import Database

        write, transport = Database.write, wire.transport

        @contextmanager
        def writing(database: Database) -> Generator[Any]:
            verb = _verb_above()
            self.reach(f"ledger {verb} before")
            with write(database) as connection:
                yield connection
                self.reach(f"ledger {verb} inside")
            self.reach(f"ledger {verb} after")

        Database.write = writing  # type: ignore[method-assign]
        wire.transport = lambda: _Wire(transport(), self)


def run_in_fork(boundaries: Boundaries, folder: Path, work: Callable[[], object], seconds: int) -> NoReturn:
    """Run a function in this fork, which ends with it. Write the boundaries that it has passed, or its error."""
    status = 1
    try:
        signal.alarm(seconds)
        boundaries.install()
        work()
        (folder / "passed").write_text(json.dumps(boundaries.passed))
        status = 0
    except BaseException:
        (folder / "crash").write_text(traceback.format_exc())
    finally:
        os._exit(status)


def signal_of(pid: int) -> int:
    """Wait for the end of a fork; return 0, the signal that ended it, or minus its exit status."""
    _, status = os.waitpid(pid, 0)
    return os.WTERMSIG(status) if os.WIFSIGNALED(status) else -os.WEXITSTATUS(status)


class _Wire(httpx.BaseTransport):
    """Carries requests, with boundaries."""

    def __init__(self, wire: httpx.BaseTransport, boundaries: Boundaries) -> None:
        self._wire = wire
        self._boundaries = boundaries

    def handle_request(self, request: httpx.Request) -> httpx.Response:
        verb = verb_of(request.method, request.url.path)
        self._boundaries.reach(f"http {verb} before")

        def on_trace(event: str, _: object) -> None:
            if event == "http11.send_request_body.complete":
                self._boundaries.reach(f"http {verb} sent")

        request.extensions = {**request.extensions, "trace": on_trace}
        answer = self._wire.handle_request(request)
        answer.read()
        self._boundaries.reach(f"http {verb} after")
        return answer

    def close(self) -> None:
        self._wire.close()


def _verb_above() -> str:
    """The ledger method that opened a transaction: its frame is above this one, the generator, `next` and `with`."""
    return sys._getframe(3).f_code.co_name  # pyright: ignore[reportPrivateUsage]


def _next(phase: Phase, label: str) -> Phase:
    """The phase of the pool at this boundary. A replacement is one phase, with all that it requests and ends."""
    if phase is Phase.REPLACING:
        return phase
    match label:
        case "ledger intend_all after" if phase is Phase.BEFORE:
            return Phase.INTENDED
        case "http create sent" if phase is Phase.INTENDED:
            return Phase.ASKED
        case "ledger bind_all after" if phase is Phase.ASKED:
            return Phase.BOUND
        case "ledger ask_end_all before" | "http terminate before":
            return Phase.ENDING
        case "ledger end_pools after":
            return Phase.AFTER
        case _:
            return phase
