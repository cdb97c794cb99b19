"""The jobs of dagster_steps.py, which Dagster's processes of steps load from this file."""

import os
import time
from pathlib import Path
from typing import Any

import dagster as dg

import skyward_core as sky
from dagster_skyward import PipesSkywardClient, SkywardResource

NAME, MESSAGES, TURNS = "bench-dagster", 10_000, 10
PIPES_SCRIPT = """
from dagster_pipes import open_dagster_pipes
with open_dagster_pipes() as pipes:
    pipes.report_custom_message({"answer": sum(range(1000))})
"""


def work() -> int:
    return sum(range(1000))


@dg.op
def plain() -> int:
    return work()


@dg.op
def on_pool(context: dg.OpExecutionContext, compute: SkywardResource) -> int:
    return compute.run(context, work).value


@dg.op
def in_subprocess(context: dg.OpExecutionContext, subprocesses: dg.PipesSubprocessClient) -> int:
    import sys

    done = subprocesses.run(command=[sys.executable, "-c", PIPES_SCRIPT], context=context)
    return done.get_custom_messages()[0]["answer"]


@dg.op
def pipes_on_pool(context: dg.OpExecutionContext, pipes: PipesSkywardClient) -> int:
    return pipes.run(context=context, fn=report_answer).get_custom_messages()[0]["answer"]


def report_answer() -> None:
    from dagster_pipes import PipesContext

    PipesContext.get().report_custom_message({"answer": work()})


def report_many() -> None:
    from dagster_pipes import PipesContext

    pipes = PipesContext.get()
    for number in range(MESSAGES):
        pipes.report_custom_message({"number": number})


@dg.op
def many_messages(context: dg.OpExecutionContext, pipes: PipesSkywardClient) -> float:
    """Return the seconds from the call to its result, with all messages in order."""
    began = time.monotonic()
    done = pipes.run(context=context, fn=report_many)
    seconds = time.monotonic() - began
    assert [one["number"] for one in done.get_custom_messages()] == list(range(MESSAGES))
    return seconds


def hold_once(folder: str, retry: int) -> None:
    """Say when the call begins. The first one is killed with its step; the second one ends."""
    (Path(folder) / f"{retry}.call").write_text(repr(time.time()))
    time.sleep(600 if retry == 0 else 0)


def _killed_once(name: str, **resources: Any) -> dg.JobDefinition:
    """A step whose process is killed once, on a pool if it has one."""

    @dg.op(
        name=f"{name}_op",
        required_resource_keys=set(resources),
        retry_policy=dg.RetryPolicy(max_retries=1),
    )
    def op(context: dg.OpExecutionContext) -> None:
        folder = os.environ["BENCH_FOLDER"]
        (Path(folder) / f"{context.retry_number}.pid").write_text(str(os.getpid()))
        if resources:
            context.resources.compute.run(context, hold_once, folder, context.retry_number)
        else:
            hold_once(folder, context.retry_number)

    @dg.job(name=name, resource_defs=resources, executor_def=dg.multiprocess_executor)
    def job() -> None:
        op()

    return job


MESSAGES_SCRIPT = f"""
from dagster_pipes import open_dagster_pipes
with open_dagster_pipes() as pipes:
    for number in range({MESSAGES}):
        pipes.report_custom_message({{"number": number}})
"""


@dg.op
def many_from_a_subprocess(context: dg.OpExecutionContext, subprocesses: dg.PipesSubprocessClient) -> float:
    import sys

    began = time.monotonic()
    done = subprocesses.run(command=[sys.executable, "-c", MESSAGES_SCRIPT], context=context)
    seconds = time.monotonic() - began
    assert [one["number"] for one in done.get_custom_messages()] == list(range(MESSAGES))
    return seconds


def _resource(sharing: str, **options: Any) -> SkywardResource:
    return SkywardResource(provider=sky.Local(), sharing=sharing, **options)


WARM = _resource("deployment", name=NAME, keep_warm=600)


def _one(name: str, op: Any, **resources: Any) -> dg.JobDefinition:
    @dg.job(name=name, resource_defs=resources, executor_def=dg.in_process_executor)
    def job() -> None:
        op()

    return job


def _five(name: str, op: Any, **resources: Any) -> dg.JobDefinition:
    """Five steps, two at a time, each in a process."""

    @dg.job(
        name=name,
        resource_defs=resources,
        executor_def=dg.multiprocess_executor.configured({"max_concurrent": 2}),
    )
    def job() -> None:
        for number in range(5):
            op.alias(f"step_{number}")()

    return job


@dg.job(
    resource_defs={
        "compute": WARM,
        "pipes": PipesSkywardClient(compute=WARM),
        "subprocesses": dg.PipesSubprocessClient(),
    },
    executor_def=dg.in_process_executor,
)
def turns() -> None:
    """Steps of each kind in one process, in turns. The first ones of a process connect it to the pool."""
    for number in range(TURNS):
        for op in (plain, on_pool, pipes_on_pool, in_subprocess):
            op.alias(f"{op.name}__{number}")()


JOBS = {
    job.name: job
    for job in (
        _one("plain", plain),
        _one("warm", on_pool, compute=WARM),
        _one("warm_pipes", pipes_on_pool, pipes=PipesSkywardClient(compute=WARM)),
        _one("cold", on_pool, compute=_resource("step")),
        _one("subprocess_pipes", in_subprocess, subprocesses=dg.PipesSubprocessClient()),
        _one("messages", many_messages, pipes=PipesSkywardClient(compute=WARM)),
        _one("messages_of_subprocess", many_from_a_subprocess, subprocesses=dg.PipesSubprocessClient()),
        turns,
        _killed_once("killed_plain"),
        _killed_once("killed_on_pool", compute=WARM),
        _five("five_plain", plain),
        _five("five_shared", on_pool, compute=_resource("run")),
        _five("five_alone", on_pool, compute=_resource("step")),
    )
}


def plain_job() -> dg.JobDefinition:
    return JOBS["five_plain"]


def shared_job() -> dg.JobDefinition:
    return JOBS["five_shared"]


def alone_job() -> dg.JobDefinition:
    return JOBS["five_alone"]


def killed_plain_job() -> dg.JobDefinition:
    return JOBS["killed_plain"]


def killed_on_pool_job() -> dg.JobDefinition:
    return JOBS["killed_on_pool"]
