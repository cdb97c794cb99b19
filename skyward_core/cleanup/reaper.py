"""The owner's side of the reaper: a small process that ends the pool when the owner is gone. First safeguard.

It is started before any machine is requested, in its own session. The owner holds the writing end of a pipe to it.
`reaper_process.py` is the process itself. It logs to `reaper.log` in the user's state directory.
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
from skyward_core.wire.private_folders import opened_private

if TYPE_CHECKING:
    from collections.abc import Sequence

    from skyward_core.providers.base import Provider

SCRIPT = Path(__file__).with_name("reaper_process.py")
LENGTH_BYTES = 8
LOG, LARGEST_LOG_BYTES = "reaper.log", 1_000_000
SEND_SECONDS = 5.0
"""How long the reaper may take to read its input, if that is larger than a pipe's buffer."""

_NODE_VARIABLES = ("SKYWARD_INSTANCE", "SKYWARD_POOL", "SKYWARD_RANK", "SKYWARD_TAGS", "SKYWARD_OWNER")
_log = logging.getLogger("skyward")


@dataclass(frozen=True, slots=True)
class ReaperInput:
    """What a reaper must know to end a pool. It holds secrets, so it is sent through a pipe only.

    `providers` are those that may have machines of the pool, pickled. `path` and `directory` are the owner's `sys.path`
    and working directory.
    """

    pool_id: str
    ledger_url: str = field(repr=False)
    providers: bytes = field(repr=False)
    path: tuple[str, ...] = field(repr=False)
    directory: str = field(repr=False)

    @classmethod
    def of(cls, providers: Sequence[Provider], pool_id: str, ledger_url: str) -> Self:
        """Return the input for the reaper of a pool of this process.

        Raises NotPicklable for a provider that cannot be pickled: the pool has no reaper then.
        """
        try:
            directory = os.getcwd()
        except OSError:  # it was removed
            directory = "/"
        path = tuple(os.path.join(directory, entry) for entry in sys.path)
        return cls(pool_id, ledger_url, _pickled(tuple(providers)), path, directory)


def _pickled(providers: tuple[Provider, ...]) -> bytes:
    """Pickle by value, so that a class of a script or a DAG file can be rebuilt.

    If that fails, pickle by name, because the reaper is on the same machine.
    """
    try:
        return pickle.dumps(dumps(providers, label="provider"), protocol=5)
    except NotPicklable:
        if not {type(provider).__module__ for provider in providers} & {"__main__", "__mp_main__"}:
            with contextlib.suppress(Exception):  # a provider's __reduce__ may raise anything
                return pickle.dumps(Pickled(pickle.dumps(providers, protocol=5)), protocol=5)
        raise


class _Child(subprocess.Popen[bytes]):
    """The reaper's process, which outlives its owner on purpose."""

    def __del__(self) -> None:
        """Do not warn: neither when the interpreter ends, nor in a fork of the owner."""


_unreaped: list[_Child] = []
"""Reapers that go on alone. The next start waits for those that have ended, so that they are no zombies."""


class Reaper:
    """A reaper that was started by this process. In a fork of this process every method does nothing."""

    def __init__(self, process: _Child | None, pipe: int | None) -> None:
        self._process = process
        # closefd=False: the garbage collector must not close it; the reaper would end the pool
        self._pipe = _closed() if pipe is None else os.fdopen(pipe, "wb", buffering=0, closefd=False)
        self._owner = os.getpid()
        self._hanging_up = threading.RLock()
        self._is_alone = False

    @classmethod
    def start(cls, reaper_input: ReaperInput) -> Self:
        """Start a reaper and send its input.

        Never raises: a reaper that could not be started is not alive, and the log has the reason.
        """
        _unreaped[:] = [process for process in _unreaped if process.poll() is None]
        try:
            theirs, ours = os.pipe2(os.O_CLOEXEC)
        except OSError as error:  # no more descriptors
            _log.warning("the pool's reaper could not be started: %s", error)
            return cls(None, None)
        os.set_blocking(ours, False)
        try:
            reaper = cls(_spawned(reaper_input.pool_id, theirs), ours)
        except OSError as error:  # no more processes, no more memory
            _log.warning("the pool's reaper could not be started: %s", error)
            reaper = cls(None, ours)
        finally:
            os.close(theirs)
        if reaper._process is not None and not _send(ours, reaper_input):
            _log.warning("the pool's reaper did not read its input")
            reaper.leave(0)
        return reaper

    @property
    def pid(self) -> int:
        """The id of its process; 0 if it could not be started."""
        return self._process.pid if self._process is not None else 0

    @property
    def is_alive(self) -> bool:
        """Whether the reaper would notice if this process were killed now. If not, start another one."""
        return (
            self._process is not None
            and not self._pipe.closed
            and self._owner == os.getpid()
            and self._process.poll() is None
        )

    def terminate_now(self) -> None:
        """Have the reaper end the machines while this process goes on. Never waits and never raises, so that signal
        handlers and any thread may call it.

        The reaper goes on until `leave`. If the owner dies before that, it ends the pool once more.
        """
        self._send_command(b"terminate\n")

    def live_by_lease(self) -> None:
        """Inform the reaper that the pool outlives this process.

        The reaper reads this from the ledger too; this command is for a ledger that cannot be read then.
        """
        self._send_command(b"lease\n")

    def leave(self, timeout_seconds: float = 5.0) -> None:
        """Have the reaper exit without ending anything, because the pool has ended or lives by its lease. Waits for
        its exit; may be called again.

        Does nothing after `hang_up`.
        """
        if self._owner != os.getpid() or self._is_alone:
            return
        self._send_command(b"leave\n")
        self._close_pipe()
        if self._process is not None:
            try:
                self._process.wait(timeout_seconds)
            except subprocess.TimeoutExpired:  # it was stopped, by SIGSTOP for instance
                self._process.kill()
                self._process.wait()

    def hang_up(self) -> None:
        """Leave the pool to the reaper, as if this process were gone: it ends the machines and exits.

        Returns at once.
        """
        if self._owner != os.getpid() or self._pipe.closed:
            return
        self._is_alone = True
        self._close_pipe()
        if self._process is not None:
            _unreaped.append(self._process)

    def _close_pipe(self) -> None:
        with self._hanging_up:
            if not self._pipe.closed:
                number = self._pipe.fileno()
                self._pipe.close()
                os.close(number)

    def _send_command(self, line: bytes) -> None:
        if self._owner == os.getpid():
            with contextlib.suppress(OSError, ValueError):  # the reaper is gone, or the pipe is closed
                self._pipe.write(line)


def _closed() -> BinaryIO:
    """Return a closed file, for a reaper without a pipe."""
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
            # these variables mark the processes of a node, and the reaper must outlive the node
            env={name: value for name, value in os.environ.items() if not name.startswith(_NODE_VARIABLES)},
            start_new_session=True,
        )
    finally:
        os.close(log)


def _opened_log() -> int:
    try:
        with opened_private(user_state_path("skyward"), make=True) as folder:
            log = os.open(LOG, flags := os.O_WRONLY | os.O_APPEND | os.O_CREAT | os.O_NOFOLLOW, 0o600, dir_fd=folder)
            if os.fstat(log).st_size > LARGEST_LOG_BYTES:
                os.close(log)
                os.replace(LOG, f"{LOG}.old", src_dir_fd=folder, dst_dir_fd=folder)
                log = os.open(LOG, flags, 0o600, dir_fd=folder)
            return log
    except (OSError, RuntimeError):  # no room, no home, or a folder that another user could exchange
        return os.open(os.devnull, os.O_WRONLY)


def _send(pipe: int, reaper_input: ReaperInput) -> bool:
    """Write the input into the pipe; return False if the reaper is gone or does not read it in time.

    An input of usual size fits into the pipe's buffer, so that this does not wait.
    """
    body = pickle.dumps(astuple(reaper_input), protocol=5)
    left = memoryview(len(body).to_bytes(LENGTH_BYTES, "big") + body)
    has_room = select.poll()
    has_room.register(pipe, select.POLLOUT)
    deadline = time.monotonic() + SEND_SECONDS
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
