"""Which messages Dask's streams send at once, which wait to be sent together, and batches without a graph.

Comms are lists, or a real scheduler's; clocks are real.
"""

import asyncio
from collections.abc import Awaitable, Callable
from typing import Any

import pytest
from distributed.batched import BatchedSend
from distributed.protocol.pickle import dumps

from skyward_core.wire import streams
from skyward_core.wire.protocol import RUN_BATCH, cancel
from skyward_core.wire.streams import ReportedOutcomes, send_at_once
from tests.worker.fake_scheduler import TOPIC
from tests.worker.following import Following

URGENT = {"op": "compute-task"}
IDLE = {"op": "free-keys"}
ACKNOWLEDGEMENT = Following(TOPIC, print).acknowledge()


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


WAITS = {
    "free-keys": IDLE,
    "client-releases-keys": {"op": "client-releases-keys"},
    "release-worker-data": {"op": "release-worker-data"},
    "a small result": {"op": "key-in-memory", "type": dumps(ReportedOutcomes)},
    "an acknowledgement": ACKNOWLEDGEMENT,
}
AT_ONCE = {
    "a large result to be fetched": {"op": "key-in-memory", "type": dumps(dict)},
    "a call to be stopped": cancel(["c"]),
    "a connection to be resumed": Following(TOPIC, print).resume("client"),
    "a batch": {"op": RUN_BATCH},
}


@pytest.mark.parametrize("what", [*WAITS, *AT_ONCE])
def test_messages_without_a_waiting_receiver_are_sent_with_the_next_one(what: str, monkeypatch: pytest.MonkeyPatch):
    """All others are sent at once."""
    monkeypatch.setattr(streams, "CAN_WAIT_SECONDS", 1000)
    message = WAITS.get(what) or AT_ONCE[what]

    async def story(stream: BatchedSend, comm: Comm) -> None:
        stream.send(message)
        if what in WAITS:
            for _ in range(20):
                await asyncio.sleep(0)
            assert not comm.written
            stream.send(URGENT)
        await asyncio.wait_for(comm.wrote.wait(), 30)
        assert comm.written == [[message, URGENT] if what in WAITS else [message]]

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
