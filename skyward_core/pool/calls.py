"""The inputs and outputs of a pool's calls: checks of arguments, and waiting for results."""

from __future__ import annotations

import pickle
from collections.abc import Callable, Collection, Iterable, Iterator, Sequence
from concurrent.futures import ALL_COMPLETED, FIRST_EXCEPTION, Future, wait
from typing import Any, cast

from skyward_core.compute import ComputeFunction, PendingBatch, PendingCompute, refuse_wrong_arguments
from skyward_core.engine.futures import CallFuture
from skyward_core.errors import BadRequest, ResultNotLoaded, Stored
from skyward_core.serialization import pickling

TOGETHER_SECONDS = 0.2  # between checks for an error, while results that cannot be loaded here are awaited


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
