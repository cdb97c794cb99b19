"""Which messages Dask's streams send at once, which wait to be sent together, and batches without a graph.

Comms are lists, or a real scheduler's; clocks are real.
"""

import asyncio
import time
from collections.abc import Awaitable, Callable
from typing import Any

import distributed
import pytest
from distributed.batched import BatchedSend
from distributed.protocol.pickle import dumps

import skyward_core as sky
from skyward_core.worker import streams
from skyward_core.worker.calls import cancel
from skyward_core.worker.detached_calls import KEEP
from skyward_core.worker.pool_scheduler import RUN_BATCH
from skyward_core.worker.scheduler_messages import Resumed
from skyward_core.worker.streams import ReportedOutcomes, send_at_once
from skyward_core.worker.wire import Sealed
from tests.worker.following import Following
from tests.worker.test_calls import TOPIC, Head, follow, with_head

CALLS = 40
KEY = "skyward-1-0123"
URGENT = {"op": "compute-task"}
IDLE = {"op": "free-keys"}
ACKNOWLEDGEMENT = Following(TOPIC, print).acknowledge()


@sky.compute
def square(number: int) -> int:
    return number * number


class Comm:
    """Records what is written."""

    def __init__(self) -> None:
        self.written: list[list[dict[str, Any]]] = []
        self.allow_offload = True
        self.wrote = asyncio.Event()

    def closed(self) -> bool:
        return False

    async def write(self, payload: list[dict[str, Any]], **_: Any) -> int:
        self.written.append(payload)
        self.wrote.set()
        return 1

    async def close(self) -> None:
        pass


def on_stream(story: Callable[[BatchedSend, Comm], Awaitable[None]]) -> None:
    async def main() -> None:
        stream, comm = BatchedSend(interval="10 s"), Comm()
        stream.start(comm)
        send_at_once(stream)
        await story(stream, comm)
        await stream.close()

    asyncio.run(main())


def test_urgent_messages_are_sent_at_once_with_any_interval_of_the_stream():
    async def story(stream: BatchedSend, comm: Comm) -> None:
        for number in range(3):
            comm.wrote.clear()
            stream.send({**URGENT, "number": number})
            await asyncio.wait_for(comm.wrote.wait(), 30)
        assert [message["number"] for payload in comm.written for message in payload] == [0, 1, 2]
        assert not comm.allow_offload

    on_stream(story)


@pytest.mark.parametrize(
    "message",
    [
        IDLE,
        {"op": "client-releases-keys"},
        {"op": "release-worker-data"},
        {"op": "key-in-memory", "type": dumps(ReportedOutcomes)},
        ACKNOWLEDGEMENT,
    ],
    ids=lambda message: message["op"],
)
def test_messages_without_a_waiting_receiver_are_sent_with_the_next_one(
    message: dict[str, Any], monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.setattr(streams, "CAN_WAIT_SECONDS", 1000)

    async def story(stream: BatchedSend, comm: Comm) -> None:
        stream.send(message)
        for _ in range(20):
            await asyncio.sleep(0)
        assert not comm.written
        stream.send(URGENT)
        await asyncio.wait_for(comm.wrote.wait(), 30)
        assert comm.written == [[message, URGENT]]

    on_stream(story)


@pytest.mark.parametrize(
    "message",
    [
        {"op": "key-in-memory", "type": dumps(dict)},
        cancel(["c"]),
        Following(TOPIC, print).resume("client"),
        {"op": RUN_BATCH},
    ],
    ids=lambda message: message["op"],
)
def test_messages_with_a_waiting_receiver_are_sent_at_once(message: dict[str, Any], monkeypatch: pytest.MonkeyPatch):
    """A large result to be fetched, a call to be stopped, a connection to be resumed, a batch."""
    monkeypatch.setattr(streams, "CAN_WAIT_SECONDS", 1000)

    async def story(stream: BatchedSend, comm: Comm) -> None:
        stream.send(message)
        await asyncio.wait_for(comm.wrote.wait(), 30)

    on_stream(story)


def test_a_single_message_is_sent_after_a_while(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(streams, "CAN_WAIT_SECONDS", 0.001)

    async def story(stream: BatchedSend, comm: Comm) -> None:
        for _ in range(2):  # the second message needs a new timer
            comm.wrote.clear()
            stream.send(IDLE, IDLE)
            await asyncio.wait_for(comm.wrote.wait(), 30)
        assert comm.written == [[IDLE, IDLE]] * 2

    on_stream(story)


def test_waiting_messages_are_sent_before_the_stream_closes(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(streams, "CAN_WAIT_SECONDS", 1000)
    comms: list[Comm] = []

    async def story(stream: BatchedSend, comm: Comm) -> None:
        comms.append(comm)
        stream.send(IDLE)

    on_stream(story)
    assert comms[0].written == [[IDLE]]


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
