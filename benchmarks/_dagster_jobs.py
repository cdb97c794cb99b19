"""The jobs of dagster_steps.py, which Dagster's processes of steps load from this file."""

import time
from typing import Any

import dagster as dg

import skyward_core as sky
from dagster_skyward import PipesSkywardClient, SkywardResource

NAME, MESSAGES = "bench-dagster", 10_000
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


JOBS = {
    job.name: job
    for job in (
        _one("plain", plain),
        _one("warm", on_pool, compute=WARM),
        _one("warm_pipes", pipes_on_pool, pipes=PipesSkywardClient(compute=WARM)),
        _one("cold", on_pool, compute=_resource("step")),
        _one("subprocess_pipes", in_subprocess, subprocesses=dg.PipesSubprocessClient()),
        _one("messages", many_messages, pipes=PipesSkywardClient(compute=WARM)),
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
