"""Which messages Dask's streams send at once, which wait to be sent together, and batches without a graph.

Comms are lists, or a real scheduler's; clocks are real.
"""

import time
from typing import Any

import distributed
import pytest

import skyward_core as sky
from skyward_core.worker import streams
from skyward_core.worker.detached_calls import KEEP
from skyward_core.worker.pool_scheduler import RUN_BATCH
from skyward_core.worker.scheduler_messages import Resumed
from skyward_core.worker.wire import Sealed
from tests.system.worker.test_calls import Head, follow, with_head
from tests.unit.worker.test_calls import TOPIC
from tests.worker.following import Following

CALLS = 40
KEY = "skyward-1-0123"


@sky.compute
def square(number: int) -> int:
    return number * number


# ── batches ──────────────────────────────────────────────────────────────────────────────────────────────────────────


def send_batch(client: Any, key: str, annotations: dict[str, Any], batch: bytes = b"sealed") -> Any:
    """Send a batch as the pool does; return its future."""
    future = distributed.Future(key, client)
    client._send_to_scheduler({"op": RUN_BATCH, "key": key, "batch": batch, "annotations": annotations})
    return future


def test_a_batch_outlives_a_broken_connection_until_it_is_released() -> None:
    """A batch is a task that KEEP wants too: the client's next connection finds it, for its worker, and releases it.

    Looks inside: what the scheduler keeps shows nowhere else.
    """

    async def test(head: Head) -> None:
        following, answers = Following(TOPIC, print), list[Resumed]()
        first = await head.client()
        follow(first, following)
        kept = send_batch(first, KEY, {"workers": ["tcp://127.0.0.1:1"]})
        await head.until(lambda: KEY in head.scheduler.tasks, "the task")
        task = head.scheduler.tasks[KEY]
        assert {client.client_key for client in task.who_wants} == {first.id, KEEP}
        assert task.worker_restrictions == {"tcp://127.0.0.1:1"}
        assert task.run_spec.args == (Sealed(b"sealed"),)
        await head.lose(first)
        following._resumed = answers.append
        second = await head.client()
        follow(second, following)
        await head.until(lambda: answers, "an answer")
        assert answers[0].tasks == {KEY: "no-worker"}
        futures = [distributed.Future(KEY, second)]
        await head.until(
            lambda: second.id in {client.client_key for client in task.who_wants}, "the new client's request"
        )
        futures.pop().release()
        await head.until(lambda: not head.scheduler.tasks, "the task to be let go")
        assert not head.calls._keys
        del kept

    with_head(test)


def test_a_batch_that_cannot_become_a_task_fails_alone() -> None:
    """Its future has the error; its stream goes on, and the scheduler keeps nothing of it.

    Looks inside: what the scheduler keeps shows nowhere else.
    """

    async def test(head: Head) -> None:
        client = await head.client()
        connections = head.scheduler._client_connections_added_total
        bad = send_batch(client, "skyward-bad", {"workers": [1.5]})
        with pytest.raises(TypeError, match="string"):
            await bad
        good = send_batch(client, KEY, {})
        await head.until(lambda: KEY in head.scheduler.tasks, "the next batch")
        assert head.scheduler._client_connections_added_total == connections
        bad.release()
        good.release()
        await head.until(lambda: not head.scheduler.tasks, "both to be forgotten")
        assert not head.calls._keys

    with_head(test)


def test_a_tiny_call_costs_the_scheduler_few_messages_and_no_memory(pool: sky.ComputePool):
    """The batch to the worker and the report to the client, and sometimes messages that waited. Dask's own protocol
    takes twice as many, and keeps a span for each call.
    """

    def look(dask_scheduler: Any) -> tuple[int, int, bool]:
        comms = [*dask_scheduler.stream_comms.values(), *dask_scheduler.client_comms.values()]
        return sum(comm.batch_count for comm in comms), len(comms), hasattr(dask_scheduler.extensions["spans"], "spans")

    client: Any = pool.dask_client()
    before, _, _ = client.run_on_scheduler(look)
    began = time.monotonic()
    assert [square(number) >> pool for number in range(CALLS)] == [number * number for number in range(CALLS)]
    after, comms, has_spans = client.run_on_scheduler(look)
    # on a busy machine a call may take longer than the time after which waiting calls are handed back
    waited_for = comms * (time.monotonic() - began) / streams.CAN_WAIT_SECONDS
    assert after - before < 2.25 * CALLS + waited_for
    assert not has_spans
