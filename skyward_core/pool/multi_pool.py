"""`MultiPool`: several pools as one `with` block."""

from __future__ import annotations

from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from types import TracebackType

from skyward_core.pool.pool import ComputePool


class MultiPool:
    """Several pools, opened in parallel and closed in parallel.

    If one fails to open, all are closed and its error is raised.

    with MultiPool(ComputePool(accelerator="T4"), ComputePool(accelerator="A100")) as (t4, a100):
        ...
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
        with ThreadPoolExecutor(len(self._pools), thread_name_prefix="skyward-multipool") as threads:
            errors = [future.exception() for future in [threads.submit(verb, pool) for pool in self._pools]]
        failures = [error for error in errors if error is not None]
        if len(failures) == 1:
            raise failures[0]
        if failures:
            raise BaseExceptionGroup(what, failures)
