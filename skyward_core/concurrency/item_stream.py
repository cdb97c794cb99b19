"""`ItemStream`: the items of a call that streams, as an iterator for plain and for asynchronous programs."""

from __future__ import annotations

import asyncio
import contextlib
import weakref
from collections.abc import AsyncIterator, Callable, Iterator
from concurrent.futures import Future
from types import TracebackType
from typing import Any, Protocol, Self, cast


class ItemSource(Protocol):
    """Where items come from: `engine.futures.ItemFuture`. Used by one thread at a time, except `leave_later`."""

    def take(self) -> Any:
        """Return the next item; waits for it. Raises StopIteration at the end, and the call's exception."""
        ...

    def is_ready(self, wake: Callable[[], object]) -> bool:
        """Return whether `take` would not wait. If it would, `wake` is called once when that changes, in any thread."""
        ...

    def leave(self) -> None:
        """Take no more items: stop the call and drop what has come. Idempotent."""
        ...

    def leave_later(self) -> None:
        """The same, soon and in another thread: for the collection of garbage, which may happen anywhere."""
        ...


class ItemStream[T](Iterator[T], AsyncIterator[T]):
    """The items that a generator yields on its node, in their order: `for item in fn() >> pool`, or `async for`.

    The node is at most some items ahead of the program (`ComputePool.stream` says how many). A program that stops early
    (`break`, `close`, an exception, or no reference any more) stops the generator. An exception of the generator comes
    after the items before it. `list(...)` collects all items. One consumer at a time.
    """

    def __init__(self, source: ItemSource) -> None:
        self._source = source
        self._finalizer = weakref.finalize(self, source.leave_later)
        self._finalizer.atexit = False

    @property
    def future(self) -> Future[Any]:
        """The future of the call: `call_id`, `seconds`, `cost`. Its result says only that the call has ended."""
        return cast("Future[Any]", self._source)

    def __iter__(self) -> Self:
        return self

    def __next__(self) -> T:
        """Wait for the next item and return it."""
        try:
            return cast("T", self._source.take())
        except BaseException:
            del self  # a traceback that is kept, as a notebook does, would keep the stream, and the call would go on
            raise

    def __aiter__(self) -> Self:
        return self

    async def __anext__(self) -> T:
        """Wait for the next item and return it, while other tasks go on."""
        loop = asyncio.get_running_loop()
        try:
            while True:
                woken: asyncio.Future[None] = loop.create_future()
                if self._source.is_ready(lambda woken=woken: _wake(loop, woken)):
                    break
                await woken
            return cast("T", self._source.take())
        except StopIteration:
            raise StopAsyncIteration from None
        except BaseException:
            del self  # as in `__next__`
            raise

    def close(self) -> None:
        """Stop the generator, unless it has ended, and drop the items that were not taken. Idempotent."""
        self._finalizer.detach()
        self._source.leave()

    async def aclose(self) -> None:
        """The same as `close`."""
        self.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        """Close."""
        self.close()


def _wake(loop: asyncio.AbstractEventLoop, woken: asyncio.Future[None]) -> None:
    with contextlib.suppress(RuntimeError):  # the loop is closed
        loop.call_soon_threadsafe(lambda: woken.done() or woken.set_result(None))
