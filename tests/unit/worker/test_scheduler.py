"""The plug-ins of the scheduler, without Dask: messages that clients miss, loads, and time of clients."""

import asyncio
import uuid
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from skyward_core.wire.protocol import (
    ANSWERS_CALLS,
    BUSY_TIMES,
    CALLS_ANSWER,
    CALLS_QUESTION,
    END_CLIENT,
    INTRODUCE,
    LIST_CALLS,
    POOL_TOPIC,
    PoolRanks,
    Resumed,
    detached_key,
    leave,
    load,
    resume,
    stay,
)
from skyward_core.wire.reports import decode_news
from skyward_core.worker.calls import CallMemory
from skyward_core.worker.detached_calls import Topic
from skyward_core.worker.scheduler import SILENCE_CHECK_SECONDS, CallLists, SilentWorkers
from skyward_core.worker.topic_seconds import MOST_TOPICS, RECENT_SECONDS, TopicSeconds, added_up, by_use, key_of
from tests.conftest import examples
from tests.worker.fake_scheduler import FOR_EVER, TOPIC, FakeScheduler, Wire
from tests.worker.following import Following

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


FIRST, SECOND = "skyward-first", "skyward-second"


def worker(name: str, instance_id: str) -> Any:
    return SimpleNamespace(
        name=name,
        address=f"tls://{name}",
        status=SimpleNamespace(name="running"),
        metrics={BUSY_TIMES: (instance_id, "1", 0.0, {})},
        processing=(),
        nthreads=1,
    )


def with_two_clients(check: Callable[[Any, CallMemory], None]) -> None:
    """Check with a scheduler of one worker, and clients "a" and "b" of the two topics."""

    async def main() -> None:
        calls = CallMemory(3600.0)
        scheduler: Any = FakeScheduler(calls)
        scheduler.unrunnable, scheduler.queued = set(), set()
        scheduler.workers = {"tls://1-0": worker("1-0", "machine-001")}
        await calls.start(scheduler)
        for client, topic in (("a", FIRST), ("b", SECOND)):
            scheduler.wires[client] = Wire(client, lambda event: None)
            scheduler.take(client, resume(client, topic, 0, 1))
        check(scheduler, calls)
        await calls.close()

    asyncio.run(main())


def test_the_calls_in_the_queues_of_all_other_clients_wait() -> None:
    """Not those of a client that is away: they do not come while it is. A client cannot speak for another one."""

    def check(scheduler: Any, calls: CallMemory) -> None:
        scheduler.take("a", load(FIRST, 3, []))
        scheduler.take("b", load(SECOND, 4, []))
        scheduler.take("b", load(FIRST, 100, []))
        assert [calls.skyward_waiting(topic) for topic in ("", FIRST, SECOND)] == [7, 4, 3]
        scheduler.take("a", load(FIRST, 0, []))
        assert calls.skyward_waiting() == 4
        del scheduler.wires["b"]
        assert calls.skyward_waiting() == 0

    with_two_clients(check)


def test_a_machine_is_needed_until_its_client_leaves_or_says_otherwise() -> None:
    """A client that is away still needs it, until its topic is dropped."""

    def check(scheduler: Any, calls: CallMemory) -> None:
        workers = list(scheduler.workers.values())
        scheduler.take("a", load(FIRST, 0, ["machine-001", "machine-002"]))
        scheduler.take("b", load(SECOND, 0, ["machine-001"]))
        assert calls.needs(workers) == 2
        assert calls.needs([worker("3-0", "machine-003")]) == 0
        scheduler.take("b", load(SECOND, 0, []))
        assert calls.needs(workers) == 1
        wire = scheduler.wires.pop("a")
        calls.remove_client(scheduler, "a")
        assert calls.needs(workers) == 1
        scheduler.wires["a"] = wire
        scheduler.take("a", leave(FIRST))
        assert calls.needs(workers) == 0

    with_two_clients(check)


def test_the_ranks_that_stay_are_sent_once_and_to_each_client_that_comes() -> None:
    def check(scheduler: Any, calls: CallMemory) -> None:
        scheduler.subscribe_topic(POOL_TOPIC, "b")
        for ranks in ([0, 1], [1, 0], [0]):
            scheduler.take("a", stay(ranks))
        sent = [content for _, content in scheduler.wires["b"].sent if isinstance(content, bytes)]
        assert [decode_news(content) for content in sent] == [PoolRanks(frozenset({0, 1})), PoolRanks(frozenset({0}))]
        scheduler.wires["c"] = Wire("c", lambda event: None)
        scheduler.take("c", resume("c", "skyward-third", 0, 1))
        answer = Resumed.of(scheduler.wires["c"].sent[-1][1])
        assert (answer.ranks, answer.instances) == (frozenset({0}), {"tls://1-0": "machine-001"})

    with_two_clients(check)


class Clock:
    now = 0.0

    def __call__(self) -> float:
        return self.now


def test_a_topic_that_was_not_used_lately_is_known_and_not_sent() -> None:
    """Heartbeats stay small; it goes on from its sum when it comes back."""
    clock = Clock()
    times = TopicSeconds(clock)
    times.add("a", 1.0)
    clock.now = RECENT_SECONDS + 1
    times.add("b", 2.0)
    assert times.recent() == {"b": 2.0}
    assert times.recent(running="a") == {"a": 1.0, "b": 2.0}
    times.add("a", 1.0)
    assert times.recent() == {"b": 2.0, "a": 2.0}


def test_the_time_of_each_use_is_counted_and_sent_while_it_runs() -> None:
    times = TopicSeconds()
    for use, seconds in (("", 1.0), ("train", 2.0), ("train", 3.0), ("score", 4.0)):
        times.add(key_of("a", use), seconds)
    times.add(key_of("b", "train"), 16.0)
    assert times.recent() == {"a": 1.0}
    running = times.recent(running=key_of("a", "train"))
    assert by_use(running, "a") == {"": 1.0, "train": 5.0}
    assert by_use(running, "b") == {}


def test_the_topic_that_was_used_least_recently_is_forgotten() -> None:
    times = TopicSeconds(Clock())
    times.add("first", 1.0)
    times.add("second", 1.0)
    times.add("first", 1.0)
    for number in range(MOST_TOPICS - 1):
        times.add(f"t{number}", 1.0)
    assert len(times.recent()) == MOST_TOPICS
    assert (times.of("first"), times.of("second")) == (2.0, 0.0)


def test_detached_calls_are_no_clients() -> None:
    times = TopicSeconds()
    times.add(detached_key("train/1"), 1.0)
    times.add("", 1.0)
    assert times.recent(running=detached_key("train/1")) == {}


def test_the_slots_of_a_worker_add_up() -> None:
    assert added_up([{"a": 1.0}, {}, {"a": 2.0, "b": 3.0}]) == {"a": 3.0, "b": 3.0}


# ── a client that connects again and again ───────────────────────────────────────────────────────────────────────────

STEPS = st.lists(
    st.sampled_from(["say", "say", "deliver", "cut", "reconnect", "resume", "acknowledge", "deliver late"]), max_size=80
)


@pytest.mark.generated
@settings(max_examples=examples(400), deadline=None)
@given(STEPS, st.sampled_from([10**6, 12]))
def test_a_client_gets_each_message_once_however_it_reconnects(steps: list[str], limit_bytes: int) -> None:
    """With messages, broken connections, new clients and repeated questions in any order: each message comes once,
    in order, or is known to be missed.
    """
    asyncio.run(_reconnecting(steps, limit_bytes))


async def _reconnecting(steps: list[str], limit_bytes: int) -> None:
    calls = CallMemory(FOR_EVER, limit_bytes)
    scheduler: Any = FakeScheduler(calls)
    await calls.start(scheduler)
    said, heard, missed = list[bytes](), list[bytes](), list[int]()

    def resumed(answer: Resumed) -> None:
        missed.extend(range(len(heard) + len(missed), answer.number))
        assert answer.missed == 0 or limit_bytes < 10**6

    following = Following(TOPIC, heard.append, resumed)
    old: Wire | None = None
    wire: Wire | None = None

    def connect() -> Wire:
        client_id = f"client-{uuid.uuid4().hex}"
        wire = scheduler.wires[client_id] = Wire(client_id, following.handler(client_id))
        if len(said) % 2:
            # as client.subscribe_topic does: live messages may come before the answer
            scheduler.subscribe_topic(TOPIC, client_id)
        return wire

    def ask(wire: Wire) -> None:
        scheduler.take(wire.client_id, following.resume(wire.client_id))

    wire = connect()
    ask(wire)
    for step in [*steps, "reconnect", "deliver", "say", "deliver"]:
        if step == "say":
            said.append(f"{len(said):04}".encode())
            scheduler.log_event(TOPIC, said[-1])
        elif step == "cut" and wire is not None:
            calls.remove_client(scheduler, wire.client_id)
            old = scheduler.wires.pop(wire.client_id)
            wire = None
        elif step == "reconnect":
            old, wire = wire or old, connect()
            ask(wire)
        elif step == "resume" and wire is not None:
            ask(wire)
        elif step == "acknowledge" and wire is not None:
            scheduler.take(wire.client_id, following.acknowledge())
        elif step == "deliver late" and old is not None and old.sent:
            old.handler(old.sent.pop(0))
        elif step == "deliver" and wire is not None:
            while wire.sent:
                wire.handler(wire.sent.pop(0))
    await calls.close()
    assert sorted([*heard, *(said[number] for number in missed)]) == said
    assert heard == sorted(heard)
    if limit_bytes == 10**6:
        assert heard == said


# ── lists of calls ───────────────────────────────────────────────────────────────────────────────────────────────────


@pytest.mark.parametrize("is_worker_silent", [False, True])
def test_members_are_asked_for_their_calls_and_the_silent_ones_are_named(is_worker_silent: bool) -> None:
    """Only those that have said that they answer: the stream of a member of an earlier release would break."""
    sent: list[tuple[list[str], list[str]]] = []

    async def main() -> dict[str, Any]:
        calls, lists = CallMemory(FOR_EVER), CallLists()
        scheduler: Any = FakeScheduler(calls)
        scheduler.workers = {f"tls://{name}": worker(name, f"machine-{name}") for name in ("0-0", "1-0")}
        scheduler.workers["tls://0-0"].metrics[ANSWERS_CALLS] = True
        await calls.start(scheduler)
        await lists.start(scheduler)
        for client in ("a", "b", "old"):
            scheduler.wires[client] = Wire(client, print)
        for client in ("a", "b", "gone"):
            scheduler.handlers[INTRODUCE](client=client, who={"user": client})
        del scheduler.wires["b"]

        def answer(clients: dict[str, Any], workers: dict[str, Any]) -> None:
            sent.append((list(clients), list(workers)))
            for name in ("client",) if is_worker_silent else ("client", "worker"):
                message = {"client": "a", "worker": "tls://0-0"}
                handler = scheduler.stream_handlers[CALLS_ANSWER]
                handler(request=1, answer=[name], **{name: message[name]})
                handler(request=7, answer=["of no question"], **{name: message[name]})

        scheduler.send_all = answer
        return dict(await scheduler.handlers[LIST_CALLS](seconds=0.0 if is_worker_silent else 60.0))

    found = asyncio.run(main())
    assert sent == [(["a"], ["tls://0-0"])]
    assert found["clients"] == [{"user": "a", "calls": ["client"]}]
    assert found["workers"] == [{"name": "0-0", "slots": None if is_worker_silent else ["worker"]}]
    assert (found["others"], found["detached"]) == (["1-0"], [])


@pytest.mark.parametrize("seconds", [60.0, 0.0])
def test_the_calls_of_a_dead_client_are_ended_and_their_slots_waited_for(seconds: float) -> None:
    """Its topic is dropped at once; its tasks are refused, if it lives and comes back. The answer has what it has had."""
    asked: list[dict[str, Any]] = []
    busy = [[True, "machine-0", {"fit": 1.0}], [False, "machine-0", {"fit": 2.0}]]

    async def main() -> tuple[bool, list[Any], bool]:
        calls, lists = CallMemory(FOR_EVER), CallLists()
        scheduler: Any = FakeScheduler(calls)
        scheduler.workers = {"tls://0-0": worker("0-0", "machine-0")}
        scheduler.workers["tls://0-0"].metrics[ANSWERS_CALLS] = True
        await calls.start(scheduler)
        await lists.start(scheduler)
        scheduler.wires["dead"] = Wire("dead", print)
        scheduler.stream_handlers["skyward-resume"](client="dead", topic=TOPIC, after=0, request=1)

        def send(clients: dict[str, Any], workers: dict[str, Any]) -> None:
            for message in workers.get("tls://0-0", ()):
                if message["op"] == CALLS_QUESTION:
                    asked.append(message)
                    answer = busy[min(len(asked), 2) - 1] if seconds else busy[0]
                    handler = scheduler.stream_handlers[CALLS_ANSWER]
                    handler(request=message["request"], answer=answer, worker="tls://0-0")
                else:
                    asked.append(message)

        scheduler.send_all = send
        is_free, spent = await scheduler.handlers[END_CLIENT](topic=TOPIC, seconds=seconds)
        return is_free, spent, calls.is_replaced("dead")

    is_free, spent, is_replaced = asyncio.run(main())
    assert (is_free, is_replaced) == (bool(seconds), True)
    assert spent == [["machine-0", {"fit": 2.0 if seconds else 1.0}]]
    assert asked[0] == {"op": "skyward-cancel", "calls": [TOPIC]}
    assert all(message["topic"] == TOPIC for message in asked[1:])
