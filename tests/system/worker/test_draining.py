"""Held nodes, in a scheduler of Dask's own with workers of this process."""

import asyncio
from collections.abc import AsyncGenerator
from contextlib import asynccontextmanager
from typing import Any

import distributed

from skyward_core.worker.draining import NodeHolding


@asynccontextmanager
async def cluster() -> AsyncGenerator[tuple[Any, NodeHolding, Any]]:
    """A scheduler with two workers, "0-0" and "1-0"; its holding, and a client."""
    holding = NodeHolding("skyward-pool")
    async with (
        distributed.Scheduler(host="127.0.0.1", port=0, dashboard=False) as scheduler,
        distributed.Worker(scheduler.address, name="0-0", nthreads=1, host="127.0.0.1", dashboard=False),
        distributed.Worker(scheduler.address, name="1-0", nthreads=1, host="127.0.0.1", dashboard=False),
        distributed.Client(scheduler.address, asynchronous=True, set_as_default=False) as client,
    ):
        await holding.start(scheduler)
        yield scheduler, holding, client


async def sent_to(client: Any, scheduler: Any, name: str, key: str, state: str) -> Any:
    """Send a task that only this worker may run; it waits for an event of its key. Return its future."""
    future = client.submit(_wait, key, key=key, workers=[name], pure=False)
    while (task := scheduler.tasks.get(key)) is None or task.state != state:  # noqa: ASYNC110 - Dask sends no event
        await asyncio.sleep(0.005)
    return future


async def _wait(key: str) -> str:
    await distributed.Event(key)
    return key


def test_a_task_that_comes_for_a_held_node_alone_is_let_in_and_counts() -> None:
    """It was on its way when the node was held: a large value went to that node first. All other tasks stay out."""

    async def main() -> None:
        async with cluster() as (scheduler, holding, client):
            assert [holding.hold(rank) for rank in (0, 1)] == [0, 0]
            bound = await sent_to(client, scheduler, "1-0", "bound", "no-worker")
            other = await sent_to(client, scheduler, "0-0", "other", "no-worker")
            assert [holding.hold(1) for _ in range(2)] == [1, 1]
            assert {worker.status for worker in scheduler.workers.values()} == {distributed.Status.paused}
            assert scheduler.tasks["other"].state == "no-worker"
            await distributed.Event("bound", client=client).set()
            assert await bound == "bound"
            assert holding.hold(1) == 0
            holding.free(0)
            await distributed.Event("other", client=client).set()
            assert await other == "other"

    asyncio.run(main())
