"""The reaper as its driver sees it: a small process of its own session, started before anything is asked for, that ends
the pool when the driver is gone.

It is held by a pipe that only the driver writes to. What it does is in `reaper_process.py`; whom it reports to is
`reaper.log` under the user's state directory.
"""

from __future__ import annotations

import contextlib
import io
import logging
import os
import pickle
import select
import subprocess
import sys
import threading
import time
from dataclasses import astuple, dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, BinaryIO, Self

from platformdirs import user_state_path

from skyward_core.errors import NotPicklable
from skyward_core.serialization.pickling import Pickled, dumps

if TYPE_CHECKING:
    from collections.abc import Sequence

    from skyward_core.providers.base import Provider

SCRIPT = Path(__file__).with_name("reaper_process.py")
LENGTH_BYTES = 8
LARGEST_LOG_BYTES = 1_000_000
TELL_SECONDS = 5.0
"""How long the reaper may take to listen, if its charge is larger than a pipe holds."""

_NODE_VARIABLES = ("SKYWARD_INSTANCE", "SKYWARD_POOL", "SKYWARD_RANK", "SKYWARD_TAGS", "SKYWARD_OWNER")
_log = logging.getLogger("skyward")


@dataclass(frozen=True, slots=True)
class Charge:
    """What a reaper must know to end a pool. Holds secrets, so it travels through a pipe alone.

    `providers` are those that may have machines of it, one after the other, as bytes; `path` and `directory` are the
    driver's `sys.path` and working directory.
    """

    pool_id: str
    ledger_url: str = field(repr=False)
    providers: bytes = field(repr=False)
    path: tuple[str, ...] = field(repr=False)
    directory: str = field(repr=False)

    @classmethod
    def of(cls, providers: Sequence[Provider], pool_id: str, ledger_url: str) -> Self:
        """Return the charge for a pool of this process.

        Raises NotPicklable for a provider that cannot travel: the pool then has no reaper.
        """
        try:
            directory = os.getcwd()
        except OSError:  # it was removed
            directory = "/"
        path = tuple(os.path.join(directory, entry) for entry in sys.path)
        return cls(pool_id, ledger_url, _pickled(tuple(providers)), path, directory)


def _pickled(providers: tuple[Provider, ...]) -> bytes:
    """By value, so that a class of a script or a DAG file can be rebuilt; by name if that fails, for the reaper is on
    the same machine.
    """
    try:
        return pickle.dumps(dumps(providers, label="provider"), protocol=5)
    except NotPicklable:
        if not {type(provider).__module__ for provider in providers} & {"__main__", "__mp_main__"}:
            with contextlib.suppress(Exception):  # anything may be raised by anybody's __reduce__
                return pickle.dumps(Pickled(pickle.dumps(providers, protocol=5)), protocol=5)
        raise


class _Child(subprocess.Popen[bytes]):
    """The reaper's process, which outlives its driver on purpose."""

    def __del__(self) -> None:
        """Warn of nothing: neither when the interpreter ends, nor in a fork of the driver."""


_unreaped: list[_Child] = []
"""Reapers that were left on their own: the next start buries those that have ended."""


class Reaper:
    """A reaper that was started by this process. Means nothing in a fork of it: there, every method does nothing."""

    def __init__(self, process: _Child | None, pipe: int | None) -> None:
        self._process = process
        # not by the garbage collector: its end tells our death
        self._pipe = _closed() if pipe is None else os.fdopen(pipe, "wb", buffering=0, closefd=False)
        self._driver = os.getpid()
        self._hanging_up = threading.RLock()
        self._is_on_its_own = False

    @classmethod
    def start(cls, charge: Charge) -> Self:
        """Start a reaper and hand it its charge, without waiting for it.

        Never raises: one that could not be started is not alive, and the log says why.
        """
        _unreaped[:] = [process for process in _unreaped if process.poll() is None]
        try:
            theirs, ours = os.pipe2(os.O_CLOEXEC)
        except OSError as error:  # no more descriptors
            _log.warning("the pool's reaper could not be started: %s", error)
            return cls(None, None)
        os.set_blocking(ours, False)
        try:
            reaper = cls(_spawned(charge.pool_id, theirs), ours)
        except OSError as error:  # no more processes, no more memory
            _log.warning("the pool's reaper could not be started: %s", error)
            reaper = cls(None, ours)
        finally:
            os.close(theirs)
        if reaper._process is not None and not _tell(ours, charge):
            _log.warning("the pool's reaper did not listen")
            reaper.leave(0)
        return reaper

    @property
    def pid(self) -> int:
        """Its process; 0 if it could not be started."""
        return self._process.pid if self._process is not None else 0

    @property
    def is_alive(self) -> bool:
        """Tell whether the reaper would notice if this process were killed now. Start another one if not."""
        return (
            self._process is not None
            and not self._pipe.closed
            and self._driver == os.getpid()
            and self._process.poll() is None
        )

    def terminate_now(self) -> None:
        """Have the reaper end the machines while this process goes on. Returns at once, for signal handlers and any
        thread; never raises.

        It goes on until `leave`, and tries once more if the driver dies before that.
        """
        self._say(b"terminate\n")

    def live_by_lease(self) -> None:
        """Tell the reaper that the pool outlives this process.

        It asks the ledger too; this is for a ledger that cannot be read then.
        """
        self._say(b"lease\n")

    def leave(self, timeout_seconds: float = 5.0) -> None:
        """Let the reaper go without touching anything: the pool has ended, or lives on by its lease. Waits for it; may
        be called again.

        Does nothing after `hang_up`.
        """
        if self._driver != os.getpid() or self._is_on_its_own:
            return
        self._say(b"leave\n")
        self._close_pipe()
        if self._process is not None:
            try:
                self._process.wait(timeout_seconds)
            except subprocess.TimeoutExpired:  # stopped by somebody
                self._process.kill()
                self._process.wait()

    def hang_up(self) -> None:
        """Leave the pool to the reaper, as if this process were gone: it ends the machines, and then itself.

        Returns at once.
        """
        if self._driver != os.getpid() or self._pipe.closed:
            return
        self._is_on_its_own = True
        self._close_pipe()
        if self._process is not None:
            _unreaped.append(self._process)

    def _close_pipe(self) -> None:
        with self._hanging_up:
            if not self._pipe.closed:
                number = self._pipe.fileno()
                self._pipe.close()
                os.close(number)

    def _say(self, line: bytes) -> None:
        if self._driver == os.getpid():
            with contextlib.suppress(OSError, ValueError):  # it is gone; the pipe is closed
                self._pipe.write(line)


def _closed() -> BinaryIO:
    """Stand for a pipe that there is none of."""
    pipe = io.BytesIO()
    pipe.close()
    return pipe


def _spawned(pool_id: str, pipe: int) -> _Child:
    log = _opened_log()
    try:
        return _Child(
            [sys.executable or "", "-I", "-S", str(SCRIPT), pool_id, str(os.getpid())],
            stdin=pipe,
            stdout=log,
            stderr=log,
            cwd="/",
            # those mark the processes of a node
            env={name: value for name, value in os.environ.items() if not name.startswith(_NODE_VARIABLES)},
            start_new_session=True,
        )
    finally:
        os.close(log)


def _opened_log() -> int:
    try:
        directory = user_state_path("skyward")
        directory.mkdir(mode=0o700, parents=True, exist_ok=True)
        path = directory / "reaper.log"
        if path.exists() and path.stat().st_size > LARGEST_LOG_BYTES:
            path.replace(directory / "reaper.log.old")
        return os.open(path, os.O_WRONLY | os.O_APPEND | os.O_CREAT, 0o600)
    except (OSError, RuntimeError):  # no room, no home
        return os.open(os.devnull, os.O_WRONLY)


def _tell(pipe: int, charge: Charge) -> bool:
    """Write the charge into the pipe; False if the reaper is gone, or does not listen in time.

    A charge of usual size fits, and waits for nobody.
    """
    body = pickle.dumps(astuple(charge), protocol=5)
    left = memoryview(len(body).to_bytes(LENGTH_BYTES, "big") + body)
    has_room = select.poll()
    has_room.register(pipe, select.POLLOUT)
    deadline = time.monotonic() + TELL_SECONDS
    while left:
        if not has_room.poll(max(0.0, deadline - time.monotonic()) * 1000):
            return False
        try:
            left = left[os.write(pipe, left) :]
        except BlockingIOError:
            continue
        except OSError:
            return False
    return True
