"""The connection of a process of a call to its worker, for requests about the pool's shared objects.

A process makes the connection when it first needs it. Its leases end with it. The kernel closes it when the process
dies, and the runner when the call ends. The worker closes all connections of a call that has ended. A fork makes its
own. No thread reads it, because runners fork: of the threads that wait for an answer, one reads for all.
"""

from __future__ import annotations

import contextlib
import itertools
import os
import select
import socket
import threading
import time
from collections.abc import Generator
from pathlib import Path
from typing import Protocol

from skyward_core.coordination.messages import Answer, Frames, Request, answer_of, frame_of
from skyward_core.errors import BadRequest, NodeLost

ENV = "SKYWARD_COORDINATION"
"""The environment variable of a call: its id, and the path of its worker's socket. Processes that it starts have it."""
SOCKET_NAME = "coordination-"
ANSWER_SECONDS = 30.0
"""How long an answer may take beyond the time that the request may wait: then the scheduler is out of reach."""
_PATH_BYTES = 100
"""Of a socket's path; the kernel takes 107 (unix(7))."""


class Channel(Protocol):
    """Carries requests to the pool's scheduler. May be used from any thread."""

    @property
    def is_ours(self) -> bool:
        """Whether this process has made it: a lease of the process before a fork is none of this one."""
        ...

    def number(self) -> int:
        """Return the number of a new request."""
        ...

    def ask(self, request: Request) -> Answer:
        """Send a request and wait for its answer. Raises NodeLost.

        If the wait is interrupted by an exception, the request is withdrawn.
        """
        ...


class CallChannel:
    """The connection of this process, for one call."""

    def __init__(self, path: str, call_id: str) -> None:
        self.pid = os.getpid()
        self.call_id = call_id
        self._socket = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        self._numbers = itertools.count(1)
        self._frames = Frames()
        self._changed = threading.Condition()
        """Guards what follows."""
        self._answers: dict[int, Answer] = {}
        self._awaited = set[int]()
        self._is_reading = False
        self.lost = ""
        """Why the connection has ended; empty if it has not, as far as is known."""
        try:
            with short_path(Path(path)) as short:
                self._socket.connect(short)
            self._socket.sendall(frame_of(call_id))
        except OSError as error:
            self._socket.close()
            raise NodeLost(f"the worker of this call does not take requests for locks and queues: {error}") from error

    @property
    def is_ours(self) -> bool:
        """Whether this process has made it."""
        return self.pid == os.getpid()

    def number(self) -> int:
        """Return the number of a new request."""
        return next(self._numbers)

    def close(self) -> None:
        """End the connection, and with it the leases that came over it. In a fork: only this process's descriptor."""
        if self.is_ours:
            with contextlib.suppress(OSError):
                self._socket.shutdown(socket.SHUT_RDWR)  # wakes threads that wait
        self._socket.close()

    def ask(self, request: Request) -> Answer:
        """Send a request and wait for its answer; withdraw it if the wait is interrupted. Raises NodeLost."""
        with self._changed:
            self._awaited.add(request.number)
        try:
            self._send(request)
            deadline = None if request.seconds is None else time.monotonic() + request.seconds + ANSWER_SECONDS
            return self._answer(request, deadline)
        except BaseException:
            with contextlib.suppress(NodeLost):
                self._send(request._replace(number=self.number(), action="withdraw", value=b"", target=request.number))
            raise
        finally:
            with self._changed:
                self._awaited.discard(request.number)
                self._answers.pop(request.number, None)

    def _send(self, request: Request) -> None:
        with self._changed:  # one message after the other; they are short
            try:
                self._socket.sendall(frame_of(request))
            except OSError as error:
                self.lost = str(error)
                raise self._loss(error) from error

    def _answer(self, request: Request, deadline: float | None) -> Answer:
        while True:
            with self._changed:
                while self._is_reading and request.number not in self._answers:
                    self._changed.wait(_left(deadline))
                    if _left(deadline) == 0.0:
                        break
                if request.number in self._answers:
                    return self._answers[request.number]
                if self.lost or _left(deadline) == 0.0:
                    raise self._loss(self.lost or "no answer in time")
                self._is_reading = True
            try:
                self._read(deadline)
            finally:
                with self._changed:
                    self._is_reading = False
                    self._changed.notify_all()

    def _read(self, deadline: float | None) -> None:
        """Take what the worker has sent. Only one thread at a time does this."""
        try:
            poll = select.poll()
            poll.register(self._socket, select.POLLIN)
            left = _left(deadline)
            if not poll.poll(None if left is None else 1000 * left):
                return
            data = self._socket.recv(1 << 16)
            if not data:
                raise ConnectionError("the call has ended, or its worker has no contact with the pool any more")
            self._frames.add(data)
            while (message := self._frames.next()) is not None:
                answer = answer_of(*message)
                with self._changed:
                    if answer.number in self._awaited:
                        self._answers[answer.number] = answer
        except (OSError, ValueError) as error:
            self.lost = str(error)

    def _loss(self, error: object) -> NodeLost:
        return NodeLost(f"the locks and queues of the pool are out of reach: {error}. What this call held is released")


def _left(deadline: float | None) -> float | None:
    return None if deadline is None else max(0.0, deadline - time.monotonic())


@contextlib.contextmanager
def short_path(path: Path) -> Generator[str]:
    """Yield a path of a socket that the kernel takes, however long the folder's path is."""
    if len(os.fsencode(path)) <= _PATH_BYTES:
        yield str(path)
        return
    folder = os.open(path.parent, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    try:
        yield f"/proc/self/fd/{folder}/{path.name}"
    finally:
        os.close(folder)


# ── the channel of this process ──────────────────────────────────────────────────────────────────────────────────────


class _Present:
    """The channel of this process and the present call, if it has made one."""

    def __init__(self) -> None:
        self.changing = threading.Lock()
        self.channel: CallChannel | None = None


_present = _Present()


def call_channel(what: str) -> CallChannel:
    """Return the channel of the present call. Raises BadRequest outside calls; `what` needs it. Raises NodeLost."""
    call_id, _, path = os.environ.get(ENV, "").strip().partition(" ")
    if not path:
        raise BadRequest(
            f"{what} belongs to a pool, and this code does not run in a call of a pool: pass the pool, as in"
            f" `{what[:-1]}, pool=pool)`, or use it in a function that runs on the pool"
        )
    with _present.changing:
        channel = _present.channel
        if channel is None or channel.call_id != call_id or channel.lost:
            end_call()
            channel = _present.channel = CallChannel(path, call_id)
        return channel


def end_call() -> None:
    """Close the channel of the present call, if there is one."""
    if (channel := _present.channel) is not None:
        _present.channel = None
        channel.close()


def _forget() -> None:
    """In a fork: the channel is that of the other process, and its lock may be held by a thread that is not here."""
    global _present
    channel, _present = _present.channel, _Present()
    if channel is not None:
        channel.close()


os.register_at_fork(after_in_child=_forget)


def of_call(path: str, call_id: str) -> str:
    """Return the value of `ENV` for a call."""
    return f"{call_id} {path}"
