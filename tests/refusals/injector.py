"""Refuses one call to the system, once: the start of a thread, a fork, a descriptor, a write, a COMMIT, its answer.

A call site is a kind with the two innermost lines of ours that lead to the call, or the innermost line of a library if
none of ours does. With `REFUSALS_SITE` the first call from that site fails; otherwise all sites are written to
`REFUSALS_FILE`, one a line. Only the standard library is used: nodes import this before everything else.

`stop` is a process that is stopped at that site, and continued after `REFUSALS_STOP_SECONDS`.
"""

from __future__ import annotations

import builtins
import errno
import io
import os
import re
import signal
import socket
import subprocess
import sys
import threading
from collections.abc import Callable
from types import FrameType
from typing import Any, override

OURS = re.compile(r".*/((?:skyward_core|prefect_skyward|dagster_skyward|airflow_provider_skyward)/.+)")
LIBRARY = re.compile(r".*/site-packages/(.+)")
TESTS = "/tests/"
LINES = 2
"""How many of our lines make a site."""
WRAPPERS = ("skyward_core/concurrency/threads.py",)
"""Through these go the starts of all threads: their lines say nothing about the site."""


class Injector:
    """Knows the sites of this process, and refuses the chosen one. `side` is "client" or "node"."""

    def __init__(self, side: str, file: str, site: str, stop_seconds: float) -> None:
        self._side, self._file, self._site, self._stop_seconds = side, file, site, stop_seconds
        self._sites: set[str] = set()
        self._is_inside = threading.local()
        self._lock = threading.Lock()

    def is_refused(self, kind: str, detail: str = "") -> bool:
        """Note the site of a call of this kind, and return whether it is refused now."""
        if getattr(self._is_inside, "now", False):
            return False
        self._is_inside.now = True
        try:
            place = _place(sys._getframe(2), kind)  # pyright: ignore[reportPrivateUsage]
            return place is not None and self._note(f"{self._side} {kind} {place}{detail and f' ({detail})'}")
        finally:
            self._is_inside.now = False

    def _note(self, site: str) -> bool:
        if self._site:
            if site != self._site:
                return False
            try:  # of all processes of one side, one is refused
                os.close(_REAL_OPEN(f"{self._file}.met", os.O_CREAT | os.O_EXCL | os.O_WRONLY))
            except FileExistsError:
                return False
            return True
        with self._lock:
            if site in self._sites:
                return False
            self._sites.add(site)
        descriptor = _REAL_OPEN(self._file, os.O_CREAT | os.O_APPEND | os.O_WRONLY)
        _REAL_WRITE(descriptor, f"{site}\n".encode())
        os.close(descriptor)
        return False

    def stop(self) -> None:
        """Stop this process; another one continues it."""
        pid, seconds = os.getpid(), self._stop_seconds
        self._is_inside.now = True
        try:
            subprocess.Popen(["sh", "-c", f"sleep {seconds}; kill -CONT {pid}"], start_new_session=True)
            os.kill(pid, signal.SIGSTOP)
        finally:
            self._is_inside.now = False


_REAL_OPEN, _REAL_WRITE = os.open, os.write


def _place(frame: FrameType | None, kind: str) -> str | None:
    """Return the lines that lead to a call, innermost first; None if it is the interpreter's or a test's own. The
    provider is a test's.
    """
    lines: list[str] = []
    library = None
    while frame is not None and len(lines) < LINES:
        path = frame.f_code.co_filename
        if ours := OURS.match(path):
            if ours[1] not in WRAPPERS:
                lines.append(f"{ours[1]}:{frame.f_lineno}")
        elif TESTS in path:
            if not lines and not kind.startswith("provider"):
                return None
            if lines:
                break
        elif library is None and (name := LIBRARY.match(path)):
            library = f"{name[1]}:{frame.f_lineno}"
        frame = frame.f_back
    return " < ".join(lines) if lines else library


class _FullFile(io.FileIO):
    """A file on a disk that is full for one write."""

    is_full = True

    @override
    def write(self, data: Any, /) -> int:
        if self.is_full:
            self.is_full = False
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        return super().write(data)


def _system_error(number: int) -> OSError:
    return OSError(number, os.strerror(number))


def install(injector: Injector) -> None:
    """Put the injector into the functions by which Python calls the system."""
    _refuse_threads(injector)
    for owner, name, kind, number in (
        (subprocess, "_fork_exec", "fork", errno.EAGAIN),
        (os, "fork", "fork", errno.EAGAIN),
        (os, "open", "open", errno.EMFILE),
        (os, "pipe", "pipe", errno.EMFILE),
        (os, "pipe2", "pipe", errno.EMFILE),
        (socket, "socketpair", "socket", errno.EMFILE),
        (os, "unlink", "unlink", errno.EACCES),
        (os, "remove", "unlink", errno.EACCES),
        (os, "rmdir", "unlink", errno.EACCES),
        (os, "write", "write", errno.ENOSPC),
    ):
        _refuse(injector, owner, name, kind, number)
    _refuse_sockets(injector)
    _refuse_files(injector)


def _refuse(injector: Injector, owner: Any, name: str, kind: str, number: int) -> None:
    real: Callable[..., Any] = getattr(owner, name)

    def call(*args: Any, **named: Any) -> Any:
        if injector.is_refused(kind):
            raise _system_error(number)
        return real(*args, **named)

    setattr(owner, name, call)


def _refuse_threads(injector: Injector) -> None:
    real = threading.Thread.start

    def start(thread: threading.Thread) -> None:
        if injector.is_refused("thread", re.sub(r"[\d-]+$|Thread-\d+", "", thread.name)):
            raise RuntimeError("can't start new thread")
        real(thread)

    threading.Thread.start = start  # type: ignore[method-assign]


def _refuse_sockets(injector: Injector) -> None:
    real = socket.socket.__init__

    def init(self: socket.socket, *args: Any, fileno: int | None = None, **named: Any) -> None:
        if fileno is None and len(args) < 4 and injector.is_refused("socket"):
            raise _system_error(errno.EMFILE)
        real(self, *args, fileno=fileno, **named) if len(args) < 4 else real(self, *args, **named)

    socket.socket.__init__ = init  # type: ignore[method-assign]


def _refuse_files(injector: Injector) -> None:
    real = builtins.open

    def opened(file: Any, mode: str = "r", *args: Any, **named: Any) -> Any:
        if injector.is_refused("open"):
            raise _system_error(errno.EMFILE)
        if not set(mode).isdisjoint("wax+") and injector.is_refused("write"):
            raw = _FullFile(file, mode.replace("b", "").replace("t", ""))
            buffered = io.BufferedRandom(raw) if "+" in mode else io.BufferedWriter(raw)
            return buffered if "b" in mode else io.TextIOWrapper(buffered, "utf-8")
        return real(file, mode, *args, **named)

    builtins.open = io.open = opened  # type: ignore[assignment]


def install_commits(injector: Injector) -> None:
    """Refuse COMMITs of the ledger, and lose their answers. Imports SQLAlchemy."""
    from sqlalchemy.engine.default import DefaultDialect

    real = DefaultDialect.do_commit

    def do_commit(self: DefaultDialect, connection: Any) -> None:
        error: Any = self.loaded_dbapi.OperationalError
        if injector.is_refused("COMMIT"):
            raise error("disk I/O error")
        if injector.is_refused("stop"):
            injector.stop()
        real(self, connection)
        if injector.is_refused("answer"):
            raise error("server closed the connection unexpectedly")

    DefaultDialect.do_commit = do_commit  # type: ignore[method-assign]


def from_environment(side: str) -> Injector | None:
    """Return the injector that the environment describes, None without one."""
    if not (file := os.environ.get("REFUSALS_FILE")):
        return None
    site = os.environ.get("REFUSALS_SITE", "")
    return Injector(side, file, site, float(os.environ.get("REFUSALS_STOP_SECONDS", "15")))
