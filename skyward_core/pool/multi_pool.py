"""`MultiPool`: several pools as one `with` block."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Coroutine, Iterable, Sequence
from types import TracebackType
from typing import Any

from skyward_core.concurrency.threads import Threads
from skyward_core.pool.pool import ComputePool


class MultiPool:
    """Several pools, opened in parallel and closed in parallel.

    If one fails to open, all are closed and its error is raised.

    with MultiPool(ComputePool(accelerator="T4"), ComputePool(accelerator="A100")) as (t4, a100):
        ...

    `async with` is the same in a coroutine: each pool opens and closes as `async with` of one pool does.
    """

    def __init__(self, *pools: ComputePool) -> None:
        self._pools = pools

    def __enter__(self) -> tuple[ComputePool, ...]:
        try:
            self._all(ComputePool.open, "could not open all pools")
        except BaseException:
            self._all(ComputePool.close, "could not close all pools")
            raise
        return self._pools

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if error is None:
            self._all(ComputePool.close, "could not close all pools")
        else:
            self._all(lambda pool: pool.__exit__(kind, error, trace), "could not close all pools")

    def _all(self, verb: Callable[[ComputePool], object], what: str) -> None:
        if not self._pools:
            return
        threads = Threads("skyward-multipool")
        errors = [future.exception() for future in [threads.submit(verb, pool) for pool in self._pools]]
        _raise_all(errors, what)

    async def __aenter__(self) -> tuple[ComputePool, ...]:
        openings = [asyncio.ensure_future(pool.__aenter__()) for pool in self._pools]
        try:
            await _ended(openings, "could not open all pools")
        except BaseException as error:
            opened = [pool for pool, opening in zip(self._pools, openings, strict=True) if _has_succeeded(opening)]
            await _ended([pool.__aexit__(type(error), error, None) for pool in opened], "could not close all pools")
            raise
        return self._pools

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        await _ended([pool.__aexit__(kind, error, trace) for pool in self._pools], "could not close all pools")


async def _ended(pools: Sequence[asyncio.Future[Any] | Coroutine[Any, Any, None]], what: str) -> None:
    """Wait for all pools, also if this task is cancelled: each pool then undoes what it does. Raise their errors."""
    _raise_all(
        [error for error in await asyncio.gather(*pools, return_exceptions=True) if isinstance(error, BaseException)],
        what,
    )


def _has_succeeded(opening: asyncio.Future[Any]) -> bool:
    return not opening.cancelled() and opening.exception() is None


def _raise_all(errors: Iterable[BaseException | None], what: str) -> None:
    failures = [error for error in errors if error is not None]
    if len(failures) == 1:
        raise failures[0]
    if failures:
        raise BaseExceptionGroup(what, failures)
