"""A pool as an executor of the standard library, for programs that take one.

It starts no thread, process or machine, so that nothing is left of an executor that was forgotten. Only the engine
knows a call that runs.
"""

from __future__ import annotations

import functools
import itertools
import threading
import time
import weakref
from collections.abc import Callable, Generator, Iterable, Iterator, Sequence
from concurrent.futures import Executor, wait
from typing import Any, cast, override

from skyward_core.compute import ComputeFunction, PendingBatch, PendingCompute
from skyward_core.engine.futures import CallFuture
from skyward_core.worker.chunks import call_each


class PoolExecutor(Executor):
    """Runs functions on a pool. `ComputePool.executor` makes it.

    Futures are those of `ComputePool.submit`: `cancel` also stops a call that runs, and returns True then. Wherever the
    pool would raise at once, so does this: NotPicklable for arguments that cannot travel, PoolClosed for a pool that is
    not open. A process that dies takes its own call (CallCrashed), and the executor goes on.
    """

    def __init__(
        self,
        submit_all: Callable[[Iterable[PendingCompute[Any]]], list[CallFuture[Any]]],
        cancel_waiting: Callable[[Sequence[CallFuture[Any]]], None],
    ) -> None:
        self._submit_all = submit_all
        self._cancel_waiting = cancel_waiting
        self._changing = threading.Lock()
        self._is_shut_down = False
        self._futures: weakref.WeakSet[CallFuture[Any]] = weakref.WeakSet()
        """Contains all that have not ended: the engine holds these."""

    @override
    def submit[**P, R](self, fn: Callable[P, R], /, *args: P.args, **kwargs: P.kwargs) -> CallFuture[R]:
        """Submit `fn(*args, **kwargs)` and return at once. `fn` may be decorated with `@sky.compute`.

        Raises RuntimeError after `shutdown`, TypeError for what is no function, and what `ComputePool.submit` raises.
        """
        return cast("CallFuture[R]", self._take_in([PendingCompute(_function(fn), args, kwargs)])[0])

    @override
    def map[R](
        self, fn: Callable[..., R], *iterables: Iterable[Any], timeout: float | None = None, chunksize: int = 1
    ) -> Iterator[R]:
        """Submit `fn(a, b, ...)` for the items of the iterables taken together, as far as the shortest goes; return an
        iterator over the results, in order.

        All items are read and submitted at once. `chunksize` items travel as one call, which saves little here: the
        pool puts short calls together by itself. The iterator raises TimeoutError if the next result is not there
        `timeout` seconds after this call. Calls that have not ended are cancelled when that or another error is raised,
        and when the iterator is closed. Raises ValueError for a `chunksize` below 1.
        """
        ends_at = None if timeout is None else timeout + time.monotonic()
        if chunksize < 1:
            raise ValueError("chunksize must be >= 1.")
        function, items = _function(fn), zip(*iterables, strict=False)
        if chunksize == 1:
            return _results(self._take_in(PendingCompute(function, args) for args in items), ends_at)
        chunked = functools.partial(call_each, function)
        chunks = itertools.batched(items, chunksize)
        return _flat(_results(self._take_in(PendingCompute(chunked, (chunk,)) for chunk in chunks), ends_at))

    @override
    def shutdown(self, wait: bool = True, *, cancel_futures: bool = False) -> None:
        """Take no more calls; with `wait`, return when all have ended. May be called twice. The pool stays open.

        `cancel_futures` cancels the calls that have not been sent to a node; those that run may end.
        """
        with self._changing:
            self._is_shut_down = True
            futures = [*self._futures]
        if cancel_futures:
            self._cancel_waiting(futures)
        if wait:
            _await(futures)

    def _take_in(self, calls: Iterable[PendingCompute[Any]]) -> list[CallFuture[Any]]:
        """Submit calls. Pickling runs the code of arguments, which may use the executor: no lock is held meanwhile."""
        self._refuse()
        futures = self._submit_all(calls)
        try:
            with self._changing:
                self._refuse()
                self._futures.update(futures)
        except RuntimeError:  # it was shut down meanwhile, without these
            for future in futures:
                future.cancel()
            raise
        return futures

    def _refuse(self) -> None:
        if self._is_shut_down:
            raise RuntimeError("cannot schedule new futures after shutdown")


def _function(fn: object) -> Callable[..., Any]:
    if isinstance(fn, ComputeFunction):
        return cast("ComputeFunction[..., Any]", fn).local
    if callable(fn):
        return fn
    if isinstance(fn, (PendingCompute, PendingBatch)):
        raise TypeError("an executor takes a function and its arguments; a pending call goes to pool.submit(...)")
    raise TypeError(f"{fn!r} is no function: write executor.submit(fn, 1, 2)")


def _await(futures: Sequence[CallFuture[Any]]) -> None:
    wait(futures)


def _results(futures: list[CallFuture[Any]], ends_at: float | None) -> Generator[Any]:
    """Yield the results; each is forgotten before the next one is awaited."""
    futures.reverse()
    try:
        while futures:
            yield _result(futures.pop(), None if ends_at is None else ends_at - time.monotonic())
    finally:
        for future in futures:
            future.cancel()


def _result(future: CallFuture[Any], timeout_seconds: float | None) -> Any:
    try:
        return future.result(timeout_seconds)
    finally:
        future.cancel()


def _flat(chunks: Generator[list[Any]]) -> Generator[Any]:
    try:
        for chunk in chunks:
            chunk.reverse()
            while chunk:
                yield chunk.pop()
    finally:
        chunks.close()
