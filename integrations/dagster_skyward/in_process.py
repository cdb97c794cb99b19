"""What stands for a pool in the tests of a user's project: calls run in this process, one after the other."""

import asyncio
import inspect
from collections.abc import Callable, Iterable
from concurrent.futures import Future
from typing import Any

import skyward_core as sky


class InProcessPool:
    """Has the methods of a pool that make calls. It rents nothing; what a node has, such as its rank, is not there."""

    id = ""
    is_active = True

    def __init__(self, spec: sky.PoolSpec) -> None:
        self.spec = spec

    @property
    def instance_count(self) -> int:
        """How many nodes the pool would have."""
        return self.spec.least_nodes

    def __getattr__(self, name: str) -> Any:
        """Raise AttributeError, which says what to write instead."""
        raise AttributeError(
            f"SkywardResource.local() has no pool.{name}: it runs functions in this process. A pool of this machine has"
            " it: SkywardResource(provider=sky.Local())"
        )

    def run[R](self, call: sky.PendingCompute[R]) -> R:
        """Make the call, and return its result; its exception is raised as it is."""
        result: Any = call.fn(*call.args, **call.kwargs)
        return asyncio.run(result) if inspect.iscoroutine(result) else result

    def run_batch(self, batch: Any) -> tuple[Any, ...]:
        """Make the calls; return their results in order."""
        return tuple(self.run(call) for call in batch.calls)

    def broadcast[R](self, call: sky.PendingCompute[R]) -> tuple[R, ...]:
        """Make the call once for each worker that the pool would have."""
        return tuple(self.run(call) for _ in range(self.instance_count * self.spec.workers_per_node))

    def map[R](
        self,
        fn: Callable[..., R] | sky.ComputeFunction[..., R],
        *iterables: Iterable[Any],
        timeout: float | None = None,
    ) -> list[R]:
        """Call `fn(a, b, ...)` for the items of the iterables; return the results in order. `timeout` means nothing."""
        function: Any = sky.compute(fn)
        return [self.run(function(*items)) for items in zip(*iterables, strict=True)]

    def submit[R](self, call: sky.PendingCompute[R]) -> Future[R]:
        """Make the call; return a future that has ended."""
        future: Future[R] = Future()
        try:
            future.set_result(self.run(call))
        except Exception as error:
            future.set_exception(error)
        return future
