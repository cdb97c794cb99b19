"""`skyward_executor`: the steps of a run are calls on one pool."""

from collections.abc import Generator
from typing import Any

import dagster as dg

# no public name has the executor that leaves its steps to a handler
from dagster._core.execution.retries import RetryMode, get_retries_config
from dagster._core.execution.tags import get_tag_concurrency_limits_config
from dagster._core.executor.step_delegating import StepDelegatingExecutor
from dagster._utils.interrupts import capture_interrupts
from pydantic import create_model

import skyward_core as sky
from dagster_skyward.configuration import FIELDS, spec_of
from dagster_skyward.step_calls import StepCalls
from dagster_skyward.watch import RunWatch

HEALTH_SECONDS = 1
LOOP_SECONDS = 0.25

_Compute: Any = create_model("_Compute", __base__=dg.Config, **FIELDS)


@dg.executor(
    name="skyward",
    config_schema={
        "compute": _Compute.to_config_schema().as_field(),
        "max_concurrent": dg.Field(
            dg.Noneable(int),
            default_value=None,
            description="How many steps run at once. By default as many as the pool's workers run calls.",
        ),
        "tag_concurrency_limits": get_tag_concurrency_limits_config(),
        "retries": get_retries_config(),
    },
    requirements=dg.multiple_process_executor_requirements(),
)
def skyward_executor(init_context: dg.InitExecutorContext) -> dg.Executor:
    """Runs each step of a run as a call on one ephemeral pool, which opens with the first step and ends with the run.

    `compute` has the keywords of `ComputePool`. The nodes need Dagster, the project's code at the same place, and
    access to Dagster's storage. A step's tag `skyward/config` gives it other hardware: a pool for each set of settings.
    """
    config = init_context.executor_config
    spec = spec_of(config["compute"])  # pyright: ignore[reportArgumentType]
    return SkywardExecutor(
        spec,
        retries=RetryMode.from_config(config["retries"]),  # pyright: ignore[reportArgumentType]
        max_concurrent=config.get("max_concurrent") or spec.most_nodes * spec.workers_per_node * spec.concurrency,
        tag_concurrency_limits=config.get("tag_concurrency_limits"),
    )


class SkywardExecutor(StepDelegatingExecutor):
    """Dagster's loop over the steps of a run, and the life of their pools."""

    def __init__(self, spec: sky.PoolSpec, **options: Any) -> None:
        self._calls = StepCalls(spec)
        super().__init__(
            self._calls,
            sleep_seconds=LOOP_SECONDS,
            check_step_health_interval_seconds=HEALTH_SECONDS,
            should_verify_step=False,
            **options,
        )

    def execute(self, plan_context: Any, execution_plan: Any) -> Generator[Any]:
        """Yield the run's events. The pools are ended in whatever way the run ends."""
        calls, is_over = self._calls, False
        calls.begin(plan_context.instance, plan_context.run_id, plan_context.log)
        watch = RunWatch(plan_context.instance, plan_context.run_id, lambda _: calls.stop())
        watch.start()
        try:
            yield from super().execute(plan_context, execution_plan)
            is_over = True
        finally:
            with capture_interrupts():  # a second SIGTERM must not interrupt the teardown
                watch.close()
                if not is_over:
                    calls.stop()
                calls.close()
