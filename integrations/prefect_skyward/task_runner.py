"""`SkywardTaskRunner`: the engine of a task stays in the flow's process, its function runs on the pool.

So retries, caching, results, hooks and states are Prefect's own and happen here; the nodes need neither Prefect nor
access to its API. `flow_pools.py` owns the pool of one flow run, `remote_call.py` is the call within Prefect's engine,
`node_objects.py` is what nodes get in place of Prefect's objects, `ui.py` is what Prefect shows.
"""

from __future__ import annotations

import functools
import inspect
from collections.abc import Iterable
from types import TracebackType
from typing import TYPE_CHECKING, Any, Self

from prefect.context import FlowRunContext
from prefect.exceptions import MissingContextError
from prefect.futures import PrefectConcurrentFuture, PrefectFuture
from prefect.task_runners import TaskRunner
from prefect.tasks import Task

import skyward_core as sky
from prefect_skyward.flow_pools import LiveRunner
from prefect_skyward.secrets import with_references

if TYPE_CHECKING:
    from prefect.client.schemas.objects import RunInput


class SkywardTaskRunner(TaskRunner[PrefectConcurrentFuture[Any]]):
    """Runs the tasks that a flow submits or maps on a pool of machines that lives as long as the flow run.

    Takes the keywords of `ComputePool`, or `spec`, a `PoolSpec`; wrong keywords raise BadRequest here. The pool
    opens at the first `.submit` or `.map` and closes with the flow. `display` is "quiet" unless you set it, because the
    output of the nodes is in the logs of the task runs anyway.

    A task that is called directly, `train(x)`, never reaches a task runner: it runs in the flow's own process.

        @flow(task_runner=SkywardTaskRunner(accelerator="A100", nodes=2))
        def sweep() -> list[float]:
            return train.map([1e-2, 1e-3, 1e-4]).result()
    """

    def __init__(
        self, *, spec: sky.PoolSpec | None = None, on_event: sky.Callback | None = None, **keywords: Any
    ) -> None:
        super().__init__()
        if spec is not None and keywords:
            raise sky.BadRequest(
                f"give spec=... or keywords, not both: {', '.join(keywords)} stand beside a spec; write"
                " spec=spec.with_(...)"
            )
        self._spec = spec if spec is not None else sky.PoolSpec.of(**with_references(keywords))
        self._spec.refuse_what_cannot_be()
        # else the settings of the machine that runs the flow name one; it may be another machine than this
        if self._spec.provider is not None:
            sky.ComputePool.from_spec(self._spec)
        self._on_event = on_event
        self._live: LiveRunner | None = None

    @property
    def spec(self) -> sky.PoolSpec:
        """The spec of the pool."""
        return self._spec

    @property
    def pool(self) -> sky.ComputePool | None:
        """The pool of the current flow run; None before the first submit and after the end."""
        return self._live.pool if self._live is not None else None

    def duplicate(self) -> Self:
        """Return a runner of the same spec and without a pool; Prefect makes one for each flow run."""
        return type(self)(spec=self._spec, on_event=self._on_event)

    def __eq__(self, other: object) -> bool:
        return self._spec == other._spec if isinstance(other, SkywardTaskRunner) else NotImplemented

    __hash__ = None  # type: ignore[assignment]  # as Prefect's own runners

    def __reduce__(self) -> tuple[Any, ...]:
        """Pickle a runner as its spec: the pool stays with the process that opened it."""
        return functools.partial(type(self), spec=self._spec, on_event=self._on_event), ()

    def __enter__(self) -> Self:
        super().__enter__()
        self._live = LiveRunner(self._spec, self._on_event)
        return self

    def __exit__(
        self, exc_type: type[BaseException] | None, exc_value: BaseException | None, traceback: TracebackType | None
    ) -> None:
        """Close the pool.

        Raises the errors of closing; if the flow is being stopped, its own error goes on with a note. Unconfirmed
        machines raise nothing: the run's log and artifact name them, and the pool's reaper goes on.
        """
        live, self._live = self._live, None
        super().__exit__(exc_type, exc_value, traceback)
        if live is not None:
            live.close(exc_value)

    def submit(  # pyright: ignore[reportIncompatibleMethodOverride] - the overloads of the base say the same
        self,
        task: Task[Any, Any],
        parameters: dict[str, Any],
        wait_for: Iterable[PrefectFuture[Any]] | None = None,
        dependencies: dict[str, set[RunInput]] | None = None,
    ) -> PrefectConcurrentFuture[Any]:
        """Run the task with its function on the pool; opens the pool if this is the first.

        Raises TypeError for an asynchronous generator.
        """
        if self._live is None:
            raise RuntimeError(
                "the task runner is not started: name it in @flow(task_runner=...), or submit inside a `with` block"
                " of it"
            )
        if inspect.isasyncgenfunction(task.fn):
            raise TypeError(
                f"task {task.name!r} is an asynchronous generator, whose values cannot travel one by one: return a"
                " list, or use a plain generator"
            )
        return self._live.submit(task, parameters, wait_for, dependencies)


def cost_so_far() -> float:
    """Return the cost of the current flow run's pool so far, in USD; 0.0 before its first submit.

    Call it in the flow.
    """
    context = FlowRunContext.get()
    runner = context.task_runner if context is not None else None
    if isinstance(runner, SkywardTaskRunner):
        return runner.pool.cost if runner.pool is not None else 0.0
    raise MissingContextError("cost_so_far() is for the body of a flow whose task_runner is a SkywardTaskRunner")
