"""A broadcast whose workers form one group: it succeeds as a whole, or runs again as a whole.

A rank that is lost with its node cannot join the running group again (docs/decisions/0023). So the engine does not
repeat its call alone. The other ranks are stopped, and when its node is replaced the call runs again on all workers,
with another `job_id`. It goes on from its checkpoint if it has one.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from concurrent.futures import FIRST_COMPLETED, FIRST_EXCEPTION, Future, wait
from typing import Any

from skyward_core.compute import PendingCompute, compute
from skyward_core.engine.futures import CallFuture
from skyward_core.errors import NodeLost, RankFailed
from skyward_core.pool.calls import results_of

LOSS_SECONDS = 60.0
"""How long the loss of a node may be noticed later here than by the other ranks. (Dask notices a silent node after
some 30 s.)
"""


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
