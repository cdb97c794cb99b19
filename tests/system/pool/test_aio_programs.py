"""asyncio programs on real pools: many calls with cancellations and time-outs, and pools that open under a deadline."""

import asyncio
import collections
import os
import threading
import time
from collections.abc import Coroutine
from pathlib import Path
from typing import Any

import skyward_core as sky
from tests.conftest import RecordedEvents, wait_until


@sky.compute
def square(x: int) -> int:
    return x * x


@sky.compute
def fail(x: int) -> int:
    raise LookupError(x)


@sky.compute
def endless(directory: str) -> None:
    """Note this process, and never return."""
    (Path(directory) / str(os.getpid())).touch()
    while True:
        time.sleep(60)


def living(directory: Path) -> list[str]:
    return [path.name for path in directory.iterdir() if Path(f"/proc/{path.name}").exists()]


def progress(recorded: RecordedEvents) -> sky.CallProgress:
    return (recorded.of(sky.CallProgress) or [sky.CallProgress(0, 0, 0)])[-1]


async def limited[R](seconds: float, call: Coroutine[Any, Any, R]) -> R:
    async with asyncio.timeout(seconds):
        return await call


async def outcome_of(call: Coroutine[Any, Any, object]) -> str:
    try:
        result = await call
    except sky.CallTimedOut:
        return "ended on its node"
    except TimeoutError:
        return "timed out here"
    except LookupError:
        return "failed"
    return "done" if isinstance(result, int) else f"wrong: {result!r}"


def test_a_program_of_a_thousand_calls_leaves_nothing(
    pool: sky.ComputePool, recorded: RecordedEvents, tmp_path: Path
) -> None:
    """Results, errors, tasks that are cancelled, time-outs of asyncio and of the node: each task has its outcome, the
    counts of the pool agree, no process of a call is left, and no thread was started for a call.
    """
    never = endless(str(tmp_path))
    wanted = {"done": 840, "failed": 50, "timed out here": 50, "ended on its node": 5}
    threads = set[str]()

    async def program() -> tuple[collections.Counter[str], list[asyncio.Task[str]]]:
        async with asyncio.TaskGroup() as group:
            tasks = [
                *(group.create_task(outcome_of(square(x) >> pool.aio)) for x in range(840)),
                *(group.create_task(outcome_of(pool.arun(fail(x)))) for x in range(50)),
                *(group.create_task(outcome_of(limited(0.5, pool.arun(never)))) for _ in range(50)),
                *(group.create_task(outcome_of(pool.arun(never.timeout(0.3)))) for _ in range(5)),
            ]
            abandoned = [group.create_task(outcome_of(pool.arun(never))) for _ in range(55)]
            outcomes = collections.Counter(await asyncio.gather(*tasks))
            threads.update(thread.name for thread in threading.enumerate())
            for task in abandoned:
                task.cancel()
        return outcomes, abandoned

    before, there = progress(recorded), {thread.name for thread in threading.enumerate()}
    outcomes, abandoned = asyncio.run(program())
    assert outcomes == wanted
    assert all(task.cancelled() for task in abandoned)
    assert threads - there <= {"skyward-callbacks"}
    expected = sky.CallProgress(before.submitted + 1000, before.done + 895, before.failed + 55, before.cancelled + 105)
    wait_until(lambda: progress(recorded) == expected, f"the counts {expected}, not {progress(recorded)}")
    wait_until(lambda: not living(tmp_path), "the processes of calls to end")
    assert pool.map(square, [3]) == [9]
