"""`SkywardTaskRunner`: the engine of a task stays in the flow's process, its function runs on the pool.

So retries, caching, results, hooks and states are Prefect's own and happen here; the nodes need neither Prefect nor
access to its API. `live_runner.py` is a runner in a flow run, `flow_pools.py` and `pool_life.py` own the
machines, `run_calls.py` and `remote_call.py` make the calls, `node_objects.py` is what nodes get in place of Prefect's
objects, `ui.py` is what Prefect shows.
"""

from __future__ import annotations

import functools
from collections.abc import Iterable
from dataclasses import asdict
from types import TracebackType
from typing import TYPE_CHECKING, Any, Self

from prefect.context import FlowRunContext
from prefect.exceptions import MissingContextError
from prefect.futures import PrefectConcurrentFuture, PrefectFuture
from prefect.task_runners import TaskRunner
from prefect.tasks import Task

import skyward_core as sky
from prefect_skyward.blocks import load_pool
from prefect_skyward.live_runner import LiveRunner, OnUnfinished, RunnerSettings
from prefect_skyward.prefect_context import refuse_without_prefect
from prefect_skyward.run_calls import RunCalls
from prefect_skyward.secrets import with_references

if TYPE_CHECKING:
    from prefect.client.schemas.objects import RunInput


class SkywardTaskRunner(TaskRunner[PrefectConcurrentFuture[Any]]):
    """Runs the tasks that a flow submits or maps on a pool of machines that lives as long as the flow run.

    Takes the keywords of `ComputePool`, or `spec`, a `PoolSpec`; wrong keywords raise BadRequest here. The pool
    opens at the first `.submit` or `.map` and closes with the flow. `display` is "quiet" unless you set it, because the
    output of the nodes is in the logs of the task runs anyway.

    With `prefect_context=True` the functions run in Prefect's context: `runtime`, run loggers, variables, concurrency
    limits, artifacts and nested submits work in them. The nodes need Prefect, and reach its API.

    A task that is called directly, `train(x)`, never reaches a task runner: it runs in the flow's own process.

        @flow(task_runner=SkywardTaskRunner(accelerator="A100", nodes=2))
        def sweep() -> list[float]:
            return train.map([1e-2, 1e-3, 1e-4]).result()
    """

    def __init__(
        self,
        *,
        spec: sky.PoolSpec | None = None,
        on_event: sky.Callback | None = None,
        idle_timeout: float | None = 300.0,
        max_workers: int | None = None,
        on_unfinished: OnUnfinished | None = None,
        inherit: bool = False,
        prefect_context: bool = False,
        **keywords: Any,
    ) -> None:
        super().__init__()
        if spec is not None and keywords:
            raise sky.BadRequest(
                f"give spec=... or keywords, not both: {', '.join(keywords)} stand beside a spec; write"
                " spec=spec.with_(...)"
            )
        self._settings = RunnerSettings(idle_timeout, max_workers, on_unfinished, inherit, prefect_context)
        self._spec = spec if spec is not None else sky.PoolSpec.of(**with_references(keywords))
        self._spec.refuse_what_cannot_be()
        # else the settings of the machine that runs the flow name one; it may be another machine than this
        if self._spec.provider is not None:
            # the name for keep_warm may come from a step's options
            sky.ComputePool.from_spec(self._spec if self._spec.name else self._spec.with_(keep_warm=0.0))
            if prefect_context and "image" in self._spec.model_fields_set:
                refuse_without_prefect(self._spec)
        self._on_event = on_event
        self._block: str | None = None
        self._live: LiveRunner | None = None

    @classmethod
    def from_block(cls, name: str, **arguments: Any) -> Self:
        """Return a runner with the settings and the credentials of a saved `SkywardPool` block.

        `arguments` are those of the runner that are no settings of a pool: `on_event`, `idle_timeout`, `max_workers`,
        `on_unfinished`, `inherit`, `prefect_context`. A pickled runner holds the name of the block only, and loads it
        again. Raises BadRequest if there is no such block, or if its settings cannot be.
        """
        runner = cls(spec=load_pool(name).get_spec(), **arguments)
        runner._block = name
        return runner

    @property
    def spec(self) -> sky.PoolSpec:
        """The spec of the pool."""
        return self._spec

    def quote(self) -> sky.Quote:
        """Return what the pool would rent now, for which price, and the most that it may cost. Rents nothing.

        Raises BadRequest.
        """
        return sky.ComputePool.from_spec(self._spec).quote()

    @property
    def pool(self) -> sky.ComputePool | None:
        """The pool of this spec in the current flow run; None before it was needed, and after the end."""
        return self._live.pool if self._live is not None else None

    @property
    def live(self) -> LiveRunner | None:
        """The state of the current flow run; None while the runner is not entered."""
        return self._live

    def duplicate(self) -> Self:
        """Return a runner of the same settings and without a pool; Prefect makes one for each flow run."""
        copy = type(self)(**self._arguments())
        copy._block = self._block
        return copy

    def __eq__(self, other: object) -> bool:
        if not isinstance(other, SkywardTaskRunner):
            return NotImplemented
        return self._spec == other._spec and self._settings == other._settings

    __hash__ = None  # type: ignore[assignment]  # as Prefect's own runners

    def __reduce__(self) -> tuple[Any, ...]:
        """Pickle a runner as its settings: the pools stay with the process that opened them. A runner from a block is
        pickled as the name of the block, whose credentials are no part of a pickle.
        """
        if self._block is None:
            return functools.partial(type(self), **self._arguments()), ()
        arguments = {name: value for name, value in self._arguments().items() if name != "spec"}
        return functools.partial(type(self).from_block, self._block, **arguments), ()

    def _arguments(self) -> dict[str, Any]:
        return {"spec": self._spec, "on_event": self._on_event, **asdict(self._settings)}

    def __enter__(self) -> Self:
        super().__enter__()
        self._live = LiveRunner(
            self._spec,
            self._settings,
            self._on_event,
            calls_around() if self._settings.inherit else None,
            lambda runner: runner is self,
        )
        return self

    def __exit__(
        self, exc_type: type[BaseException] | None, exc_value: BaseException | None, traceback: TracebackType | None
    ) -> None:
        """Close the pools.

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
        """Run the task with its function on the pool of its spec, which opens when the task run needs it first.

        Returns at once. Raises BadRequest for options that cannot be.
        """
        if self._live is None:
            raise RuntimeError(
                "the task runner is not started: name it in @flow(task_runner=...), or submit inside a `with` block"
                " of it"
            )
        return self._live.submit(task, parameters, wait_for, dependencies)


def cost_so_far() -> float:
    """Return the cost of the current flow run's pools so far, in USD; 0.0 before the first.

    Call it in the flow. A runner that inherits reports the cost of the pools around it.
    """
    context = FlowRunContext.get()
    runner = context.task_runner if context is not None else None
    if isinstance(runner, SkywardTaskRunner):
        return runner.live.cost if runner.live is not None else 0.0
    raise MissingContextError("cost_so_far() is for the body of a flow whose task_runner is a SkywardTaskRunner")


def calls_around() -> RunCalls | None:
    """Return the calls of the current flow run, if its runner is ours. While a subflow begins, it is the one around."""
    context = FlowRunContext.get()
    runner = context.task_runner if context is not None else None
    return runner.live.calls() if isinstance(runner, SkywardTaskRunner) and runner.live is not None else None
