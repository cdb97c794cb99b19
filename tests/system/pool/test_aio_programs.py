"""An asyncio program on a real pool: many calls with cancellations and time-outs."""

import asyncio
import collections
import os
import threading
import time
from collections.abc import Coroutine
from pathlib import Path
from typing import Any

import skyward_core as sky
from tests.conftest import RecordedEvents
from tests.waiting import wait_until


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


async def outcome_of(call: Coroutine[Any, Any, object], seconds: float | None = None) -> str:
    try:
        async with asyncio.timeout(seconds):
            return type(await call).__name__
    except (LookupError, TimeoutError) as error:
        return type(error).__name__


def test_a_program_of_many_calls_leaves_nothing(
    pool: sky.ComputePool, recorded: RecordedEvents, tmp_path: Path
) -> None:
    """Each task has its outcome, the counts of the pool agree, no process of a call is left, and no thread was started
    for a call.
    """
    never = endless(str(tmp_path))
    before = (recorded.of(sky.CallProgress) or [sky.CallProgress(0, 0, 0)])[-1]
    there, threads = {thread.name for thread in threading.enumerate()}, set[str]()

    async def program() -> tuple[collections.Counter[str], list[asyncio.Task[str]]]:
        async with asyncio.TaskGroup() as group:
            tasks = [
                *(group.create_task(outcome_of(square(x) >> pool.aio)) for x in range(840)),
                *(group.create_task(outcome_of(pool.arun(fail(x)))) for x in range(50)),
                *(group.create_task(outcome_of(pool.arun(never), 0.5)) for _ in range(50)),
                *(group.create_task(outcome_of(pool.arun(never.timeout(0.3)))) for _ in range(5)),
            ]
            abandoned = [group.create_task(outcome_of(pool.arun(never))) for _ in range(55)]
            outcomes = collections.Counter(await asyncio.gather(*tasks))
            threads.update(thread.name for thread in threading.enumerate())
            for task in abandoned:
                task.cancel()
        return outcomes, abandoned

    outcomes, abandoned = asyncio.run(program())
    assert outcomes == {"int": 840, "LookupError": 50, "TimeoutError": 50, "CallTimedOut": 5}
    assert all(task.cancelled() for task in abandoned)
    assert threads - there <= {"skyward-callbacks"}
    expected = sky.CallProgress(before.submitted + 1000, before.done + 895, before.failed + 55, before.cancelled + 105)
    wait_until(lambda: recorded.of(sky.CallProgress)[-1] == expected, f"the counts {expected}")
    wait_until(
        lambda: not any(Path("/proc", path.name).exists() for path in tmp_path.iterdir()), "the processes to end"
    )
    assert pool.map(square, [3]) == [9]
