"""The scheduler's memory: messages that clients miss, calls without waiting clients, workers that do not answer."""

import asyncio
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

from distributed.broker import Broker
from hypothesis import given
from hypothesis import strategies as st

from skyward_core.worker.calls import CallMemory, leave, resume
from skyward_core.worker.pool_scheduler import (
    SILENCE_CHECK_SECONDS,
    SilentWorkers,
)
from skyward_core.worker.scheduler_messages import Resumed
from skyward_core.worker.topic import Topic

TOPIC = "skyward-0123"
FOR_EVER = 3600.0


# ── numbers ──────────────────────────────────────────────────────────────────────────────────────────────────────────


@given(st.lists(st.one_of(st.binary(max_size=30), st.integers(0, 40))), st.integers(1, 60))
def test_a_topic_keeps_the_newest_within_its_bounds(steps: list[bytes | int], limit_bytes: int) -> None:
    """A topic returns the newest messages with the right numbers; it holds at most its limit, but always the last
    one.
    """
    topic, said, acknowledged = Topic(limit_bytes), list[bytes](), 0
    for step in steps:
        if isinstance(step, bytes):
            said.append(step)
            topic.add(step)
        else:
            acknowledged = max(acknowledged, min(step, len(said)))
            topic.acknowledge(min(step, len(said)))
        number, messages = topic.after(0)
        assert messages == said[number:]
        assert topic.number == len(said)
        assert number >= acknowledged
        assert topic.nbytes == sum(map(len, messages))
        assert topic.nbytes <= limit_bytes or len(messages) == 1
        assert messages or acknowledged == len(said)
        fits = acknowledged == number or sum(map(len, said[number - 1 :])) > limit_bytes
        assert fits, "a message was dropped that had room"


@dataclass
class Wire:
    """The stream from the scheduler to one client: messages in transit, and whether it is open."""

    client_id: str
    handler: Callable[[Any], None]
    sent: list[Any] = field(default_factory=list)


class FakeScheduler:
    """Dask's own broker, and streams that tests deliver from, or cut."""

    def __init__(self, calls: CallMemory) -> None:
        self.plugins = {calls.name: calls}
        self.tasks: dict[str, Any] = {}
        self.workers: dict[str, Any] = {}
        self.stream_handlers: dict[str, Any] = {}
        self.handlers: dict[str, Any] = {}
        self.wires: dict[str, Wire] = {}
        self.clients = self.wires
        self.broker = Broker(0, self)  # type: ignore[arg-type]
        self.log_event, self.subscribe_topic, self.unsubscribe_topic = (
            self.broker.publish,
            self.broker.subscribe,
            self.broker.unsubscribe,
        )

    def send_all(self, client_msgs: dict[str, list[Any]], worker_msgs: Any) -> None:
        for client, messages in client_msgs.items():
            if wire := self.wires.get(client):
                wire.sent += [message["event"] for message in messages]

    def take(self, client: str, message: dict[str, Any]) -> None:
        """Handle a message of a client's stream as Dask does."""
        message = {"client": client, **message}
        self.stream_handlers[message.pop("op")](**message)


@given(st.lists(st.tuples(st.floats(0.1, 500), st.booleans()), max_size=60))
def test_only_checks_make_a_worker_silent(steps: list[tuple[float, bool]]) -> None:
    """A worker is dropped after a number of checks without news of it. If the scheduler has slept for hours, it
    drops no worker because of that.
    """
    silence, seen, unheard = SilentWorkers(), 0.0, 0.0
    silence.check({"w": seen}, 1.0, {"w": 12.0})
    for elapsed_seconds, is_heard in steps:
        seen += is_heard
        unheard = 0.0 if is_heard else unheard + min(elapsed_seconds, 2 * SILENCE_CHECK_SECONDS)
        assert silence.check({"w": seen}, elapsed_seconds, {"w": 12.0}) == (["w"] if unheard > 12.0 else [])


# ── connections that overtake each other ─────────────────────────────────────────────────────────────────────────────


def answers_to(wire: Wire) -> list[Resumed]:
    return [Resumed.of(event[1]) for event in wire.sent if isinstance(event[1], dict)]


def scheduler_with(calls: CallMemory) -> FakeScheduler:
    scheduler: Any = FakeScheduler(calls)
    asyncio.run(calls.start(scheduler))
    for name in ("first", "second"):
        scheduler.wires[name] = Wire(name, print)
    return scheduler  # type: ignore[no-any-return]


def test_a_late_resume_of_an_earlier_connection_gets_no_topic() -> None:
    """The client has a later connection, which has resumed since: the earlier one is replaced, and gets no answer."""
    calls = CallMemory(FOR_EVER)
    scheduler = scheduler_with(calls)
    scheduler.take("second", resume("second", TOPIC, 0, 2))
    scheduler.take("first", resume("first", TOPIC, 0, 1))
    assert calls.is_replaced("first")
    assert not calls.is_replaced("second")
    assert (len(answers_to(scheduler.wires["first"])), len(answers_to(scheduler.wires["second"]))) == (0, 1)


def test_a_client_learns_that_it_was_abandoned() -> None:
    """Also if the first answer that says so is lost: a client that believes that its topic is known would send calls
    again that have run.
    """
    calls = CallMemory(FOR_EVER)
    scheduler = scheduler_with(calls)
    scheduler.send_all = lambda client_msgs, worker_msgs: FakeScheduler.send_all(scheduler, client_msgs, worker_msgs)  # type: ignore[method-assign]
    scheduler.take("first", resume("first", TOPIC, 0, 1))
    scheduler.take("first", leave(TOPIC))
    for asked in (2, 3):
        scheduler.take("second", resume("second", TOPIC, 0, asked))
    assert [answer.is_known for answer in answers_to(scheduler.wires["second"])] == [False, True]
    assert [
        answer.abandoned for answer in (*answers_to(scheduler.wires["first"]), *answers_to(scheduler.wires["second"]))
    ] == [0, 1, 1]
