"""The event loop of one Dask client, in a thread of its own. Part of `connection.py`.

Dask's own runner waits 10 s for its thread to begin. Then it raises an AssertionError and leaves the thread behind, and
meanwhile no other client of the process starts or ends. A process with hundreds of connections may need longer.
"""

from __future__ import annotations

import asyncio
import logging
import threading
from concurrent.futures import Future, InvalidStateError
from contextlib import suppress
from typing import Any, cast

import uvloop
from tornado.ioloop import IOLoop

START_SECONDS = 30.0
"""How long a new thread may take until its loop runs. An overloaded machine has taken more than 10 s."""
_log = logging.getLogger("skyward")


class DaskLoop:
    """The methods of Dask's `LoopRunner` that a client calls. May be used from any thread.

    States: new -> started -> stopped. It is started once.
    """

    def __init__(self) -> None:
        self._running: Future[IOLoop] = Future()
        """The loop, from when it runs."""
        self._unwanted: Future[None] = Future()
        """Ends the loop, also one that does not run yet."""
        self._thread: threading.Thread | None = None
        self._is_started = False

    def start(self) -> None:
        """Start the thread, and wait until its loop runs.

        Raises OSError if there can be no other thread or loop, such as TimeoutError. Then nothing stays behind.
        """
        self._thread = thread = threading.Thread(target=self._run, name="IO loop", daemon=True)
        try:
            thread.start()
        except RuntimeError as error:
            self._thread = None
            raise OSError(f"no thread for the connection: {error}") from error
        try:
            self._running.result(START_SECONDS)
        except BaseException as error:
            self._end()  # the thread may come later
            if isinstance(error, TimeoutError):
                raise TimeoutError(f"the thread for the connection has not begun within {START_SECONDS:g} s") from error
            raise
        self._is_started = True

    def stop(self, timeout: float = 10) -> None:  # Dask's signature
        """End the loop, and wait so many seconds for its thread. Idempotent. Raises TimeoutError."""
        self._is_started = False
        self._end()
        thread = self._thread
        # a loop that has not begun by now ends when it does
        if thread is None or thread is threading.current_thread() or not self._running.done():
            return
        thread.join(timeout)
        if thread.is_alive():
            raise TimeoutError(f"the thread of the connection has not ended within {timeout:g} s")

    def is_started(self) -> bool:
        """Return whether it is started, and not stopped."""
        return self._is_started

    @property
    def loop(self) -> IOLoop:
        """The loop. Raises RuntimeError if it does not run."""
        loop: Any = self._running.result() if self._running.done() else None  # tornado's types say too little
        if loop is None or not loop.asyncio_loop.is_running():
            raise RuntimeError("the loop of the connection does not run")
        return cast(IOLoop, loop)

    def _end(self) -> None:
        with suppress(InvalidStateError):  # another thread has ended it
            self._unwanted.set_result(None)

    def _run(self) -> None:
        try:
            with asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
                runner.run(self._until_unwanted())
        except BaseException as error:
            if self._running.done():
                _log.exception("the thread of a connection to a scheduler has failed")
            else:
                self._running.set_exception(error)

    async def _until_unwanted(self) -> None:
        self._running.set_result(IOLoop.current())
        await asyncio.wrap_future(self._unwanted)
