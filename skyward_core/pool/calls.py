"""The inputs and outputs of a pool's calls: checks of arguments, and waiting for results."""

from __future__ import annotations

import functools
import itertools
import pickle
import threading
import time
import weakref
from collections.abc import Callable, Collection, Generator, Iterable, Iterator, Sequence
from concurrent.futures import ALL_COMPLETED, FIRST_COMPLETED, FIRST_EXCEPTION, Executor, Future, wait
from typing import Any, cast, override

from skyward_core.compute import ComputeFunction, PendingBatch, PendingCompute, compute, refuse_wrong_arguments
from skyward_core.engine.futures import CallFuture
from skyward_core.errors import BadRequest, NodeLost, RankFailed, ResultNotLoaded, Stored
from skyward_core.serialization import pickling
from skyward_core.worker.chunks import call_each

TOGETHER_SECONDS = 0.2  # between checks for an error, while results that cannot be loaded here are awaited
LOSS_SECONDS = 60.0
"""How long the loss of a node may be noticed later here than by the other ranks. (Dask notices a silent node after
some 30 s.)
"""


def checked[R](pending: PendingCompute[R], timeout: float | None = None) -> PendingCompute[R]:
    """Return a pending call, with this deadline if there is one; raises TypeError for anything else."""
    if isinstance(cast(object, pending), PendingCompute):
        return pending if timeout is None else pending.timeout(timeout)
    raise TypeError(
        f"a pool runs pending calls, not {type(pending).__name__!r}: decorate the function with @sky.compute and"
        " call it"
    )


def mapped_calls[R](
    fn: Callable[..., R] | ComputeFunction[..., R], iterables: Sequence[Iterable[Any]], timeout: float | None = None
) -> Iterator[PendingCompute[R]]:
    """Return a call of `fn` for each group of items.

    Raises BadRequest and TypeError as `ComputePool.map` does, before the first call.
    """
    if not iterables:
        raise BadRequest("map needs something to map over: pool.map(fn, [1, 2, 3])")
    function = fn.local if isinstance(fn, ComputeFunction) else fn
    mapped = cast(object, fn)
    # for these two the pickler's error says what to write
    if not callable(mapped) and not isinstance(mapped, (PendingCompute, PendingBatch)):
        raise TypeError(f"{mapped!r} is no function: write pool.map(fn, [1, 2, 3])")
    try:
        items = list(zip(*iterables, strict=True))
    except ValueError as error:
        raise BadRequest(
            f"map: {error}. Give iterables of one length, or zip them yourself with what should happen to the rest"
        ) from error
    if items:
        refuse_wrong_arguments(function, items[0], {})
    items.reverse()
    # each is freed once it is sent, because there may be many
    return (PendingCompute(function, items.pop(), timeout_seconds=timeout) for _ in range(len(items)))


def results_of(
    futures: Sequence[Future[Any]] | Sequence[CallFuture[Any]], kind: type[list[Any] | tuple[Any, ...]] = list
) -> Any:
    """Wait for all calls; return the results.

    On an interrupt, or on the first error in the order of the calls among those that have ended, the others are
    cancelled. A result that cannot be loaded here does not end the wait: all results are kept in the error.
    """
    left: Collection[Future[Any]] = futures
    is_kept = False
    try:
        while left:
            ended, left = wait(
                left, TOGETHER_SECONDS if is_kept else None, ALL_COMPLETED if is_kept else FIRST_EXCEPTION
            )
            for future in futures if ended else ():
                if future in ended and not future.cancelled() and (error := future.exception()) is not None:
                    if not isinstance(error, ResultNotLoaded):
                        raise error
                    is_kept = True
        if is_kept and len(futures) > 1:
            raise _all_kept(futures, kind)
        return kind([future.result() for future in futures])
    finally:
        for future in futures:
            future.cancel()


def _all_kept(futures: Sequence[Future[Any]], kind: type[list[Any] | tuple[Any, ...]]) -> ResultNotLoaded:
    """Return one error that keeps the results of all calls, also of those that could be loaded."""
    errors = [error for future in futures if isinstance(error := future.exception(), ResultNotLoaded)]
    kept = list[Stored]()
    for future in futures:
        if isinstance(error := future.exception(), ResultNotLoaded):
            kept.append(error.stored)
        else:
            pickled = pickling.dumps(future.result(), label="result")
            kept.append(Stored(pickled.data, pickled.buffers))
    buffers: list[pickle.PickleBuffer] = []
    data = pickle.dumps(kind(kept), protocol=5, buffer_callback=buffers.append)
    first = errors[0]
    message = (
        f"{len(errors)} of {len(futures)} results cannot be loaded here, and all are kept: error.load() gives them in"
        f" their order. The first one: {first}"
    )
    together = ResultNotLoaded(message, first.node, first.missing, data, [buffer.raw() for buffer in buffers])
    together.__cause__ = first.__cause__
    return together


# A broadcast whose workers form one group: it succeeds as a whole, or runs again as a whole.
#
# A rank that is lost with its node cannot join the running group again (docs/decisions/0023). So the engine does not
# repeat its call alone. The other ranks are stopped, and when its node is replaced the call runs again on all workers,
# with another `job_id`. It goes on from its checkpoint if it has one.


@compute
def _be_there() -> None:
    """Return at once: a broadcast of this has ended when all workers are there, and free."""


def group_results(
    broadcast: Callable[[PendingCompute[Any]], Sequence[CallFuture[Any]]],
    pending: PendingCompute[Any],
    retries: int,
    on_retry: Callable[[str, int, NodeLost], object],
) -> tuple[Any, ...]:
    """Return the results of all ranks, in their order. After the loss of a node the call runs again on all workers.

    `on_retry` gets the first rank's call id, the number of the next attempt, from 2, and the loss. Raises NodeLost
    after the last one, and every other error of a rank at once.
    """
    attempt, call_id = 1, ""  # without an id: the loss was seen before the first call began
    while True:
        futures: Sequence[CallFuture[Any]] = ()
        try:
            if attempt > 1:
                results_of(broadcast(_be_there()))
            futures = broadcast(pending)
            call_id = futures[0].call_id
            _wait_for_cause(futures)
            return results_of(futures, tuple)
        except NodeLost as error:
            if attempt > retries:
                raise
            attempt += 1
            on_retry(call_id, attempt, error)
        finally:
            for future in futures:
                future.cancel()


def _wait_for_cause(futures: Sequence[Future[Any]]) -> None:
    """Wait until all calls have ended, or one has failed with an error that is not RankFailed.

    RankFailed is none: its cause is another rank, whose error may arrive later.
    """
    _, left = wait(futures, return_when=FIRST_EXCEPTION)
    deadline = time.monotonic() + LOSS_SECONDS
    while left and (patience := deadline - time.monotonic()) > 0:
        if not all(isinstance(future.exception(), RankFailed) for future in futures if _has_failed(future)):
            return
        _, left = wait(left, patience, FIRST_COMPLETED)
    for future in futures:
        if _has_failed(future) and not isinstance(error := future.exception(), RankFailed) and error is not None:
            raise error


def _has_failed(future: Future[Any]) -> bool:
    return future.done() and not future.cancelled() and future.exception() is not None


# A pool as an executor of the standard library, for programs that take one.
#
# It starts no thread, process or machine, so that nothing is left of an executor that was forgotten. Only the engine
# knows a call that runs.


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
