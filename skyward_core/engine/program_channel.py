"""The connection of a program to its pool's scheduler, for requests about shared objects (docs/decisions/0027).

It is one more connection of the user's Dask client (`engine/user_client.py`), with the same TLS, and is closed with it.
When the connection ends, all that the program holds is released.
"""

from __future__ import annotations

import asyncio
import contextlib
import itertools
import os
from concurrent.futures import Future
from concurrent.futures import TimeoutError as FutureTimeoutError
from typing import TYPE_CHECKING, Any, cast

from skyward_core.coordination.channel import ANSWER_SECONDS
from skyward_core.coordination.messages import Answer, Request, answer_of, fields_of
from skyward_core.errors import NodeLost, PoolClosed

if TYPE_CHECKING:
    import distributed

SERVE_PROGRAM = "skyward_coordinate"
"""The scheduler's operation, of `worker/coordination.py`; importing that would import Dask."""
LOST = "the connection to the pool's scheduler was lost: what this program held is released"


class ProgramChannel:
    """The connection of one Dask client. May be used from any thread."""

    def __init__(self, client: distributed.Client) -> None:
        self.client = client
        self._pid = os.getpid()
        self._numbers = itertools.count(1)
        self._answers: dict[int, Future[Answer]] = {}
        """Used in Dask's loop only."""
        self._is_lost = self._is_closed = False
        self._sending: asyncio.Queue[Request] | None = None
        self._tasks: list[asyncio.Task[None]] = []
        self._loop: asyncio.AbstractEventLoop = cast(Any, client).loop.asyncio_loop
        self._begin().result()

    @property
    def is_ours(self) -> bool:
        """Whether this process has made it."""
        return self._pid == os.getpid()

    @property
    def is_open(self) -> bool:
        """Whether the connection has not ended."""
        return not self._is_lost

    def number(self) -> int:
        """Return the number of a new request."""
        return next(self._numbers)

    def close(self) -> None:
        """Let waiting threads get PoolClosed instead of NodeLost when the client, and so the connection, ends."""
        self._is_closed = True

    def ask(self, request: Request) -> Answer:
        """Send a request and wait for its answer; withdraw it if the wait is interrupted.

        Raises PoolClosed if the pool is closed meanwhile, and NodeLost.
        """
        answered = Future[Answer]()
        self._post(request, answered)
        try:
            return answered.result(None if request.seconds is None else request.seconds + ANSWER_SECONDS)
        except FutureTimeoutError as error:
            raise NodeLost("the pool's scheduler does not answer") from error
        finally:
            if not answered.done():
                withdrawal = request._replace(number=self.number(), action="withdraw", value=b"", target=request.number)
                with contextlib.suppress(NodeLost, PoolClosed):
                    self._post(withdrawal, None)

    def _begin(self) -> Future[None]:
        """Connect, in Dask's loop. Raises NodeLost if that has ended."""
        try:
            return asyncio.run_coroutine_threadsafe(self._connect(), self._loop)
        except RuntimeError as error:
            raise NodeLost(LOST) from error

    async def _connect(self) -> None:
        client: Any = self.client
        try:
            comm = await client.rpc.connect(client.scheduler.addr)
            await comm.write({"op": SERVE_PROGRAM, "reply": False})
        except OSError as error:
            raise NodeLost(f"the pool's scheduler does not answer: {error}") from error
        self._sending = asyncio.Queue()
        self._tasks = [asyncio.create_task(self._read(comm)), asyncio.create_task(self._write(comm, self._sending))]

    def _post(self, request: Request, answered: Future[Answer] | None) -> None:
        def post() -> None:
            if self._is_lost or self._sending is None:
                if answered is not None:
                    answered.set_exception(self._loss())
                return
            if answered is not None:
                self._answers[request.number] = answered
            self._sending.put_nowait(request)

        try:
            self._loop.call_soon_threadsafe(post)
        except RuntimeError as error:  # Dask's thread has ended
            raise self._loss() from error

    def _loss(self) -> NodeLost | PoolClosed:
        return PoolClosed("the pool is closed") if self._is_closed else NodeLost(LOST)

    async def _write(self, comm: Any, requests: asyncio.Queue[Request]) -> None:
        with contextlib.suppress(OSError):
            while True:
                await comm.write(fields_of(await requests.get()))

    async def _read(self, comm: Any) -> None:
        try:
            while True:
                fields = await comm.read()
                answer = answer_of(fields, bytes(fields[2]))
                if (answered := self._answers.pop(answer.number, None)) is not None:
                    answered.set_result(answer)
        except (OSError, ValueError):
            pass
        finally:
            self._is_lost = True
            self._tasks[1].cancel()
            for answered in self._answers.values():
                answered.set_exception(self._loss())
            self._answers.clear()
