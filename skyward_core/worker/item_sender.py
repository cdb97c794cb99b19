"""What a call yields, in its runner: generators become lists, or streams of items that the client takes one by one.

States of a streaming call in its runner:

    may yield ──sent as many items as it has credit for──▶ waiting ──credit──▶ may yield
        │                                                     │
        ├──the generator ends or raises: the call's outcome   │
        └──SIGTERM: it was cancelled, or its time is up───────┴──▶ closing (`finally` blocks run) ──▶ the process ends

The runner takes no item from the generator without credit. A runner may be killed at any time, because its worker knows
how many items it has sent.
"""

from __future__ import annotations

import asyncio
import contextlib
import inspect
import os
import pickle
import signal
import socket
from collections.abc import AsyncGenerator, Callable, Generator, Iterator
from typing import Any, NoReturn, cast

from skyward_core.serialization import pickling
from skyward_core.worker.wire import INLINE_BYTES, Call, Credit, Item, Parcel


def is_generator(value: Any) -> bool:
    """Return whether a value is a generator, plain or asynchronous."""
    return inspect.isgenerator(value) or inspect.isasyncgen(value)


def items_of(value: Any) -> Iterator[Any]:
    """Return an iterator over what a generator or another iterable yields.

    An asynchronous one has its own event loop, which runs while an item is awaited. Raises TypeError.
    """
    return _stepped(cast("AsyncGenerator[Any]", value)) if inspect.isasyncgen(value) else iter(value)


def _stepped(generator: AsyncGenerator[Any]) -> Generator[Any]:
    async def step() -> Any:
        return await anext(generator)

    with asyncio.Runner() as runner:
        try:
            while True:
                try:
                    item = runner.run(step())
                except StopAsyncIteration:
                    return
                yield item
        finally:
            runner.run(generator.aclose())


class _Stopped(BaseException):
    """The call was cancelled, or its time is up."""


class ItemSender:
    """Sends the items of one call after the other. `calls` is the runner's queue, which also brings credit.

    `send` sends a message to the worker; `stored` puts a large parcel into a file, and may raise OSError.
    """

    def __init__(
        self, calls: socket.socket, send: Callable[[Item], object], stored: Callable[[Parcel], Parcel]
    ) -> None:
        self._calls = calls
        self._send = send
        self._stored = stored
        self._may_stop = self._is_stopped = False
        """Whether a signal ends the call at once, and whether one has come while it may not. It may not while an item
        is written to a file, because that file would stay.
        """

    def send_all(self, call: Call, value: Any) -> None:
        """Send what a value yields, as far as the client's credit goes; return at its end. Raises what it raises."""
        items = items_of(value)
        self._may_stop = self._is_stopped = False
        before = signal.signal(signal.SIGTERM, self._stop)
        try:
            self._send_items(call, items)
        except _Stopped:
            _close_and_end(items)
        finally:
            signal.signal(signal.SIGTERM, before)

    def _send_items(self, call: Call, items: Iterator[Any]) -> None:
        number, below = 0, call.ahead
        while True:
            self._may_stop = True
            if self._is_stopped:
                raise _Stopped
            while number >= below:
                below = max(below, self._credit(call.call_id))
            try:
                value = next(items)
            except StopIteration:
                return
            finally:
                self._may_stop = False
            pickled = pickling.dumps(value, label=f"item {number}")
            parcel = Parcel(pickled.data, pickled.buffers)
            if parcel.nbytes >= INLINE_BYTES or parcel.buffers:
                parcel = self._stored(parcel)
            self._send(Item(call.call_id, number, parcel))
            number += 1
            del value, pickled, parcel

    def _credit(self, call_id: str) -> int:
        """Wait for a message of the worker; return the credit that it gives to this call."""
        packet = self._calls.recv(INLINE_BYTES * 4)
        if not packet:
            os._exit(0)  # the worker has closed the queue
        message = pickle.loads(packet)
        return message.below if type(message) is Credit and message.call_id == call_id else 0

    def _stop(self, *_: object) -> None:
        if self._may_stop:
            raise _Stopped
        self._is_stopped = True


def _close_and_end(items: Iterator[Any]) -> NoReturn:
    """Let the generator clean up, then end the process: the worker waits for that, two seconds at most."""
    with contextlib.suppress(BaseException):
        if isinstance(items, Generator):
            items.close()
    os._exit(128 + signal.SIGTERM)
