"""The thread on which asyncssh works. Part of `ssh_connection.py`."""

from __future__ import annotations

import asyncio
import concurrent.futures
import logging
import threading
from collections.abc import Coroutine
from types import TracebackType
from typing import Any, Self

from skyward_core.concurrency.threads import PlainExecutor
from skyward_core.errors import ConnectionLost, Unreachable


class Loop:
    """A thread that runs an asyncio loop, for one connection or many. The code that makes it closes it."""

    def __init__(self) -> None:
        self._loop = asyncio.new_event_loop()
        # teardown also runs when the interpreter ends, and asyncio's own executor accepts no work by then
        self._loop.set_default_executor(PlainExecutor("skyward-ssh-work"))
        self._lock = threading.Lock()
        self._closed = False
        self._thread = threading.Thread(target=_turn, args=(self._loop,), name="skyward-ssh", daemon=True)
        self._thread.start()

    def call[T](self, coroutine: Coroutine[Any, Any, T], timeout_seconds: float | None = None) -> T:
        """Run a coroutine on the loop and return its result; raises TimeoutError, with the coroutine cancelled, when it
        takes longer.
        """
        with self._lock:
            if self._closed or threading.current_thread() is self._thread:
                coroutine.close()
                raise Unreachable(
                    "the SSH loop is closed"
                    if self._closed
                    else "a callback of an SSH connection must not wait for SSH"
                )
            future = asyncio.run_coroutine_threadsafe(coroutine, self._loop)
        try:
            return future.result(timeout_seconds)
        except concurrent.futures.CancelledError:
            raise ConnectionLost("the SSH connection was closed meanwhile") from None
        finally:
            future.cancel()

    def close(self) -> None:
        """Cancel all coroutines and end the thread. Idempotent."""
        with self._lock:
            first, self._closed = not self._closed, True
        if first:
            self._loop.call_soon_threadsafe(self._loop.stop)
        if threading.current_thread() is not self._thread:
            self._thread.join()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()


def _turn(loop: asyncio.AbstractEventLoop) -> None:
    """Run the loop. Refers to the loop only, so that an abandoned `Loop` can be collected."""
    log = logging.getLogger("asyncssh")
    if log.level == logging.NOTSET:
        # it logs each connection and channel at INFO, into the task logs of orchestrators
        log.setLevel(logging.WARNING)
    asyncio.set_event_loop(loop)
    try:
        loop.run_forever()
        loop.run_until_complete(_settle())
        loop.run_until_complete(loop.shutdown_asyncgens())
        loop.run_until_complete(loop.shutdown_default_executor())
    finally:
        asyncio.set_event_loop(None)
        loop.close()


async def _settle() -> None:
    """Cancel all tasks, then let transports close."""
    tasks = asyncio.all_tasks() - {asyncio.current_task()}
    for task in tasks:
        task.cancel()
    await asyncio.gather(*tasks, return_exceptions=True)
    for _ in range(3):
        await asyncio.sleep(0)
