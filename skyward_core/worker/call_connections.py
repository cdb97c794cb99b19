"""The connections of calls to their worker, for requests about the pool's shared objects (docs/decisions/0027).

The worker listens on a socket in the node's private folder. It passes requests to the scheduler in its stream of
messages, and answers back. A connection is a holder: when it ends, the scheduler takes back what the holder has. It
ends with the process, when the call has ended, when the client breaks the rules, and when this worker loses its
scheduler.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import socket
from collections.abc import Callable, Iterable, Mapping
from pathlib import Path
from typing import Any

from skyward_core.coordination.channel import SOCKET_NAME, short_path
from skyward_core.coordination.messages import Answer, Frames, Request, fields_of, frame_of, request_of

REQUEST, DROP = "skyward-coordinate", "skyward-drop-holder"
"""Operations on a worker's stream to the scheduler: a holder's request; a holder is gone."""
ANSWER = "skyward-coordinated"
"""The operation on the scheduler's stream to a worker."""


def socket_path(directory: Path, index: int) -> Path:
    """Return where a worker of a node listens for its calls."""
    return directory / f"{SOCKET_NAME}{index}"


class CallConnections:
    """The listener of one worker process, and its connections. It lives in Dask's event loop.

    `send` sends a message to the scheduler; raises OSError without one. `begin` and `end` may be called in any thread.
    """

    def __init__(self, path: Path, send: Callable[[Mapping[str, Any]], object]) -> None:
        self._path = path
        self._send = send
        self._loop: asyncio.AbstractEventLoop | None = None
        self._serving: asyncio.Task[None] | None = None
        self._writers: dict[int, asyncio.StreamWriter] = {}
        """By holder."""
        self._holders: dict[str, set[int]] = {}
        """By call."""
        self._running = set[str]()
        """The calls that may have connections."""
        self._made = 0

    def listen(self) -> None:
        """Begin to listen; without a socket, requests of calls fail. To be called in the event loop."""
        self._loop = asyncio.get_running_loop()
        listener = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        try:
            self._path.unlink(missing_ok=True)  # left by an earlier worker process
            with short_path(self._path) as short:
                listener.bind(short)
            os.chmod(self._path, 0o600)
            listener.listen()
            listener.setblocking(False)  # noqa: FBT003 - the only way to call it
        except OSError as error:
            listener.close()
            print(f"skyward: calls have no locks and queues: {self._path}: {error}", flush=True)
            return
        self._serving = asyncio.create_task(self._listen(listener))

    def begin(self, calls: Iterable[str]) -> None:
        """Let these calls connect."""
        self._running.update(calls)

    def end(self, call: str) -> None:
        """End the connections of a call that has ended: a process that it has left behind may have one."""
        self._running.discard(call)  # first: `_serve` adds to `_holders` first, and looks then
        if call in self._holders and self._loop is not None:
            self._loop.call_soon_threadsafe(self._close_call, call)

    def answer(self, holder: int, answer: list[Any]) -> None:
        """Pass an answer of the scheduler on."""
        if (writer := self._writers.get(holder)) is not None:
            writer.write(frame_of(Answer(*answer)._replace(value=bytes(answer[2]))))

    def detach(self) -> None:
        """End all connections: the scheduler that knew their leases is gone."""
        for writer in [*self._writers.values()]:
            writer.close()

    def _close_call(self, call: str) -> None:
        for holder in [*self._holders.get(call, ())]:
            self._writers[holder].close()

    async def _listen(self, listener: socket.socket) -> None:
        async with await asyncio.start_unix_server(self._accept, sock=listener) as server:
            await server.serve_forever()

    async def _accept(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        with contextlib.suppress(OSError, ValueError):
            await self._serve(reader, writer)
        writer.close()

    async def _serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        frames = Frames()
        call, _ = await _next(reader, frames)
        if not isinstance(call, str):
            return
        self._made += 1
        holder = self._made
        self._writers[holder] = writer
        self._holders.setdefault(call, set()).add(holder)
        try:
            while call in self._running and not writer.is_closing():
                self._pass_on(holder, request_of(*await _next(reader, frames)))
        finally:
            del self._writers[holder]
            self._holders[call].discard(holder)
            if not self._holders[call]:
                del self._holders[call]
            self._send({"op": DROP, "holder": holder})

    def _pass_on(self, holder: int, request: Request) -> None:
        self._send({"op": REQUEST, "holder": holder, "request": fields_of(request)})


async def _next(reader: asyncio.StreamReader, frames: Frames) -> tuple[Any, bytes]:
    """Return the next message. Raises ConnectionError at the end of the connection, and ValueError."""
    while (message := frames.next()) is None:
        data = await reader.read(1 << 16)
        if not data:
            raise ConnectionError
        frames.add(data)
    return message
