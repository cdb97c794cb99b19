"""Calls from any thread to the loop's thread. Part of `ssh_connection.py`."""

from __future__ import annotations

import asyncio
import time
import warnings
from collections.abc import Coroutine
from typing import Any

import asyncssh  # noqa: TID253  a part of ssh_connection.py

from skyward_core.errors import CommandTimedOut, ConnectionLost, Unreachable
from skyward_core.machines.instances import Endpoint
from skyward_core.transport.ssh_channels import TextStream
from skyward_core.transport.ssh_link import SSHLink
from skyward_core.transport.ssh_loop import Loop


class LoopCalls:
    """Runs coroutines of a connection on its loop, for callers of other threads; `close` cancels them and closes the
    link.
    """

    def __init__(self, endpoint: Endpoint, link: SSHLink, loop: Loop | None) -> None:
        self.is_closed = True  # for `__del__`, if no loop can be made
        self.endpoint = endpoint
        self._link = link
        self._owns_loop = loop is None
        self._loop = loop or Loop()
        self._tasks: set[asyncio.Task[Any]] = set()  # touched on the loop's thread only
        self.is_closed = False

    def call[T](self, coroutine: Coroutine[Any, Any, T], timeout_seconds: float | None = None) -> T:
        """Run a coroutine on the loop and return its result.

        Raises Unreachable once this is closed, TimeoutError after `timeout_seconds`.
        """
        if self.is_closed:
            coroutine.close()
            raise Unreachable(f"the SSH connection to {self.endpoint} is closed")
        return self._loop.call(self._watched(coroutine), timeout_seconds)

    def call_command[T](
        self,
        deadline: float | None,
        coroutine: Coroutine[Any, Any, T],
        command: str,
        text: TextStream,
        *,
        begun: bool = False,
    ) -> T:
        """`call` for a step of a command that has a deadline, of `time.monotonic`.

        Raises CommandTimedOut after it, with the output so far.
        """
        try:
            return self.call(coroutine, None if deadline is None else max(0.0, deadline - time.monotonic()))
        except TimeoutError as error:
            raise CommandTimedOut(
                f"still running on {self.endpoint} at its deadline: {short(command)}", output=text.whole
            ) from error
        except Unreachable as error:
            if begun and not isinstance(error, ConnectionLost):  # closed while this thread was in `on_line`
                raise ConnectionLost(f"{error}, under: {short(command)}") from error
            raise

    def call_transfer[T](self, coroutine: Coroutine[Any, Any, T], undone: str, timeout_seconds: float | None) -> T:
        """`call` for the transfer of a file. Raises CommandTimedOut, which says what was not done."""
        try:
            return self.call(coroutine, timeout_seconds)
        except TimeoutError as error:
            raise CommandTimedOut(f"{undone} within {timeout_seconds} s", output="") from error

    def call_quietly(self, coroutine: Coroutine[Any, Any, None]) -> None:
        """`call` for what tidies up after a command."""
        try:
            self.call(coroutine)
        except Unreachable:
            pass  # the connection ended with the command

    def close(self) -> None:
        """Cancel all calls, which raise ConnectionLost in their threads, and close the link. May be called twice."""
        if self.is_closed:
            return
        self.is_closed = True
        try:
            self._loop.call(self._close())
        finally:
            if self._owns_loop:
                self._loop.close()

    def __del__(self) -> None:
        if not getattr(self, "is_closed", True):
            warnings.warn(
                f"the SSH connection to {self.endpoint} was never closed", ResourceWarning, source=self, stacklevel=1
            )
            if self._owns_loop:
                self._loop.close()

    async def _watched[T](self, coroutine: Coroutine[Any, Any, T]) -> T:
        """Run a coroutine so that `close` can cancel it; raise our own errors when the connection ends."""
        task = asyncio.current_task()
        assert task is not None
        self._tasks.add(task)
        try:
            return await coroutine
        except (asyncssh.Error, asyncssh.ChannelListenError, OSError) as error:
            if isinstance(error, asyncssh.ChannelOpenError | asyncssh.ChannelListenError) and self._link.ssh:
                raise Unreachable(f"{self.endpoint} refuses: {error}") from error
            # ETIMEDOUT too ends a connection, and is a TimeoutError
            if isinstance(error, asyncssh.Error | ConnectionError) or self._link.ssh is None:
                raise ConnectionLost(f"the SSH connection to {self.endpoint} is gone: {error}") from error
            raise
        finally:
            self._tasks.discard(task)

    async def _close(self) -> None:
        tasks = set(self._tasks)
        for task in tasks:
            task.cancel()
        if tasks:
            await asyncio.wait(tasks)
        await self._link.close()


def short(command: str) -> str:
    """Return a command in one line of at most 120 characters, for messages."""
    line = " ".join(command.split())
    return line if len(line) <= 120 else line[:117] + "..."
