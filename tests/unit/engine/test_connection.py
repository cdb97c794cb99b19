"""The connection to a pool's scheduler: its tasks, its pings and acknowledgements, and reports of the client's load."""

from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from skyward_core.engine import actions as do
from skyward_core.engine import connection as module
from skyward_core.engine.certificates import make_certificate
from skyward_core.engine.connection import NotSent, SchedulerConnection, connect
from skyward_core.engine.dispatcher import ACKNOWLEDGED_TOGETHER, PING_SECONDS, PINGS, Dispatcher
from skyward_core.engine.slot_use import LoadReports, SlotSeconds
from skyward_core.wire.messages import Batch, Report
from skyward_core.wire.protocol import POOL_TOPIC, Resumed, load

BATCH = Batch("topic", (), {})

# ── tasks ────────────────────────────────────────────────────────────────────────────────────────────────────────────


class Line:
    """A connection that has sent task "a" with number 1, and knows task "old" of an earlier connection; what it has
    posted to the engine. Dask's loop runs callbacks at once, and those for later when `wait` is called.
    """

    def __init__(self, answer: Any = None) -> None:
        self.resumed, self.reports, self.news = list[int](), list[bytes](), list[Any]()
        self.finished, self.failed = list[int](), dict[int, str]()
        self.later = list[Callable[[], object]]()
        self.unreadable = list[str]()
        self.handlers = dict[str, Callable[[Any], object]]()
        client: Any = SimpleNamespace(
            status="running",
            id="client",
            listener=None,
            loop=SimpleNamespace(
                add_callback=lambda callback, *arguments: callback(*arguments),
                call_later=lambda _, callback: self.later.append(callback),
            ),
            subscribe_topic=self.handlers.__setitem__,
            _send_to_scheduler=lambda message: None,
            _stream_handlers={},
        )
        engine: Any = SimpleNamespace(
            on_resumed=lambda epoch, resumed: self.resumed.append(resumed.number),
            on_report=lambda epoch, report: self.reports.append(report),
            on_pool_news=lambda epoch, news: self.news.append(news),
            on_tasks_finished=lambda epoch, numbers: self.finished.extend(numbers),
            on_task_failed=self.fail,
            on_unreadable=lambda sender, error: self.unreadable.append(str(error)),
        )
        self.connection = SchedulerConnection(client)
        self.connection.listen(1, "topic", 0, engine)
        answer = answer or {
            "request": 1,
            "number": 0,
            "missed": 0,
            "is_known": True,
            "tasks": {"old": "processing"},
            "gone": (),
        }
        self.handlers["topic"]((0.0, answer))
        self.connection.send_batch(1, "a", BATCH, None)

    def fail(self, epoch: int, number: int, reason: str) -> None:
        assert number not in self.failed
        self.failed[number] = reason

    def wait(self) -> None:
        while self.later:
            self.later.pop(0)()


@pytest.fixture
def line() -> Line:
    return Line()


ANSWER = {"request": 1, "number": 7, "missed": 0, "is_known": True, "tasks": {"a": "memory"}, "gone": ()}


def test_only_the_first_answer_to_this_connection_counts() -> None:
    """Whoever has the pool's certificate can send others on the client's topic. A wrong number would make the scheduler
    drop messages that were not heard.
    """
    line = Line()
    assert line.resumed == [0]
    for forged in (ANSWER, {**ANSWER, "request": 2}, {**ANSWER, "request": "1"}, {}):
        line.handlers["topic"]((0.0, forged))
    assert (line.resumed, line.unreadable) == ([0], [])


def test_what_is_no_message_is_no_report() -> None:
    """The scheduler counts bytes only: the numbers of both must stay the same. Whether the bytes are a report is found
    in the engine's thread.
    """
    line = Line()
    for lie in (7, None, (), (0.0,), (0.0, "text"), (0.0, 7), (0.0, [b"x"]), "event"):
        line.handlers["topic"](lie)
    line.handlers["topic"]((0.0, b"no report"))
    assert (len(line.unreadable), line.reports) == (8, [b"no report"])
    line.handlers[POOL_TOPIC]("event")
    line.handlers[POOL_TOPIC]((0.0, {"a": 1}))
    assert line.news == [None, {"a": 1}]


def test_an_answer_that_cannot_be_read_is_none() -> None:
    line = Line(answer={"request": 1, "number": -1})
    assert (line.resumed, line.unreadable) == ([], ["the number of messages is not readable (int)"])
    line.handlers["topic"]((0.0, ANSWER))
    assert line.resumed == [7]


def test_the_end_of_a_task_is_posted_once(line: Line) -> None:
    """Finished tasks are posted together, a little later."""
    line.connection.finished("a")
    line.connection.finished("a")
    line.connection.failed("a", "gone")
    assert line.finished == []
    line.wait()
    assert (line.finished, line.failed) == ([1], {})


@pytest.mark.parametrize("is_first", [True, False])
def test_a_task_of_an_earlier_connection_ends_before_or_after_it_is_followed(line: Line, is_first: bool) -> None:
    if is_first:
        line.connection.finished("old")
    line.connection.follow(7, "old")
    if not is_first:
        line.connection.finished("old")
    line.wait()
    assert line.finished == [7]


def test_a_restart_of_the_cluster_fails_all_tasks(line: Line) -> None:
    """A user's Dask client may restart it. A task that is not followed yet fails when it is."""
    line.connection.all_failed("restarted")
    assert line.failed == {1: "restarted"}
    line.connection.follow(7, "old")
    assert line.failed == {1: "restarted", 7: "restarted"}


def test_a_task_is_taken_back_or_posted_but_not_both(line: Line) -> None:
    assert line.connection.take_back("a")
    line.connection.failed("a", "gone")
    line.connection.send_batch(2, "b", BATCH, None)
    line.connection.failed("b", "gone")
    assert not line.connection.take_back("b")
    assert line.failed == {2: "gone"}


def test_a_batch_that_was_not_sent_is_not_followed(line: Line, monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(message: Any) -> None:
        raise NotSent

    monkeypatch.setattr(line.connection, "send", refuse)
    with pytest.raises(NotSent):
        line.connection.send_batch(3, "c", BATCH, None)
    line.connection.failed("c", "gone")
    assert line.failed == {}


def test_a_connection_that_is_cut_at_once_is_none(monkeypatch: pytest.MonkeyPatch) -> None:
    """`_reconnect` has taken the stream before it is used."""
    closed: list[str] = []
    loop = SimpleNamespace(stop=lambda timeout: closed.append("stop"))
    client: Any = SimpleNamespace(
        scheduler_comm=None, status="connecting", close=lambda timeout: closed.append("close"), _loop_runner=loop
    )
    monkeypatch.setattr(module, "PoolClient", lambda *_, **__: client)
    with pytest.raises(OSError, match="at once"):
        connect("tls://127.0.0.1:1", make_certificate("p"), 0.1)
    assert closed == ["close", "stop"]


def test_a_client_that_cannot_be_closed_in_time_leaves_no_thread() -> None:
    """The scheduler reads nothing, or this machine is overloaded."""
    stopped: list[float] = []

    def close(timeout: float) -> None:
        raise TimeoutError

    client: Any = SimpleNamespace(close=close, status="closing", _loop_runner=SimpleNamespace(stop=stopped.append))
    client._loop_runner.stop = lambda timeout: stopped.append(timeout)
    SchedulerConnection(client).close()
    assert (client.status, len(stopped)) == ("closed", 1)


# ── pings and acknowledgements ───────────────────────────────────────────────────────────────────────────────────────


class PingedLine:
    """A dispatcher with a connection, made at time 0, whose scheduler has answered; and what it does on the connection."""

    KINDS = (do.Ping, do.CutOff, do.Acknowledge)

    def __init__(self) -> None:
        self.dispatcher = Dispatcher((), "topic")
        self.answer(self.dispatcher.connected(0.0), 0)
        self._done: list[do.Action] = []

    def answer(self, epoch: int, number: int) -> None:
        self.dispatcher.resumed(epoch, Resumed(number, 0, is_known=True, tasks={}), 0.0)

    def tick(self, now: float) -> None:
        self.dispatcher.tick(now, lambda _: True)

    def hear(self, count: int) -> None:
        for _ in range(count):
            self.dispatcher.report(1, Report(0, "i-0", ()), 0.0)

    @property
    def done(self) -> list[do.Action]:
        self._done += [action for action in self.dispatcher.take_actions() if isinstance(action, self.KINDS)]
        return self._done


def test_there_is_one_ping_at_a_time_and_none_too_early() -> None:
    """The next one waits for the answer and the interval. Another connection gets its own."""
    line = PingedLine()
    for now, is_answered, pings in ((1, False, 0), (1.1, False, 1), (2.2, False, 1), (2, True, 1), (2.3, False, 2)):
        if is_answered:
            line.dispatcher.pinged(1, is_answered=True)
        line.tick(now * PING_SECONDS)
        assert line.done == [do.Ping(1)] * pings
    line.answer(line.dispatcher.connected(100.0), 0)
    line.tick(100.0 + 1.1 * PING_SECONDS)
    assert line.done[2:] == [do.Ping(2)]


def test_misses_in_a_row_end_the_connection() -> None:
    """Those of another connection do not count, nor those before an answer. The end is reported once."""
    line = PingedLine()
    dispatcher = line.dispatcher
    for is_answered in (*[False] * (PINGS - 1), True, *[False] * (PINGS - 1)):
        dispatcher.pinged(1, is_answered=is_answered)
    dispatcher.pinged(0, is_answered=False)
    assert dispatcher.is_live
    dispatcher.pinged(1, is_answered=False)
    dispatcher.cut(1)
    line.tick(100.0)
    assert (dispatcher.is_connected, dispatcher.is_live, line.done) == (False, False, [do.CutOff()])
    line.answer(1, 5)
    line.hear(1)
    assert (dispatcher.is_live, dispatcher.heard) == (False, 0)


def test_messages_are_acknowledged_together() -> None:
    """When there are many, or at the next tick; each number once."""
    line = PingedLine()
    line.hear(ACKNOWLEDGED_TOGETHER)
    assert line.done == []
    line.hear(1)
    line.tick(0.0)
    assert line.done == [do.Acknowledge(1, ACKNOWLEDGED_TOGETHER + 1)]
    line.hear(1)
    assert line.done[1:] == []
    for _ in range(2):
        line.tick(0.0)
    assert line.done[1:] == [do.Acknowledge(1, ACKNOWLEDGED_TOGETHER + 2)]


# ── the load and the time of one client ──────────────────────────────────────────────────────────────────────────────


def test_only_changes_of_the_load_are_reported() -> None:
    """And all of it on a new connection, also a load that has ended meanwhile: the scheduler may be the same one."""
    reports = LoadReports("topic")
    for waiting, machines, reported in (
        (0, [], None),
        (3, [], (3, [])),
        (3, [], None),
        (None, ["b", "a"], (3, ["a", "b"])),
        (None, ["a", "b"], None),
        ("forget", [], None),
        (3, ["a"], (3, ["a"])),
        ("forget", [], None),
        (0, [], (0, [])),
        (0, [], None),
        ("forget", [], None),
        (None, [], (0, [])),
    ):
        if waiting == "forget":
            reports.forget()
        else:
            assert reports.next(waiting, machines) == (load("topic", *reported) if reported else None)


def test_running_and_lost_calls_count_before_they_have_reported() -> None:
    """Not twice when they have. A worker that follows counts from zero; one that has forgotten the client changes
    nothing.
    """
    time = SlotSeconds()
    for process, seen, total in (("0-1", 5.0, 5.0), ("0-1", 2.0, 5.0), ("0-1", 6.0, 6.0), ("0-2", 1.0, 7.0)):
        time.seen("", "a", process, seen)
        assert time.seconds == total
    time.ran("", "a", 1.5)
    time.ran("", "a", 6.0)
    time.ran("", "b", 4.0)
    assert time.seconds == 7.5 + 4.0


def test_each_use_has_its_slot_seconds() -> None:
    """On each machine, because their prices differ; the sum is the client's."""
    time = SlotSeconds()
    time.ran("first", "a", 2.0)
    time.seen("first", "a", "0-1", 5.0)
    time.ran("first", "b", 1.0)
    time.ran("second", "a", 4.0)
    time.ran("", "a", 8.0)
    assert (time.of("first"), time.of("second"), time.of("")) == ({"a": 5.0, "b": 1.0}, {"a": 4.0}, {"a": 8.0})
    assert (time.of("third"), time.seconds) == ({}, 18.0)


def test_a_use_that_is_forgotten_leaves_its_seconds_in_the_sum() -> None:
    time = SlotSeconds()
    time.ran("first", "a", 2.0)
    time.seen("first", "a", "0-1", 5.0)
    time.forget("first")
    assert (time.of("first"), time.seen_at("first"), time.seconds) == ({}, None, 5.0)


SECONDS = st.floats(0, 1e6)
EVENTS = st.lists(st.tuples(st.sampled_from(["", "use"]), st.sampled_from("ab"), st.sampled_from(["", "1"]), SECONDS))


@given(EVENTS)
def test_the_slot_seconds_never_shrink(events: list[tuple[str, str, str, float]]) -> None:
    """It is at least what ended calls have reported."""
    time, reported, before = SlotSeconds(), 0.0, 0.0
    for use, instance_id, process, seconds in events:
        if process:
            time.seen(use, instance_id, process, seconds)
        else:
            time.ran(use, instance_id, seconds)
            reported += seconds
        assert time.seconds >= before
        before = time.seconds
    assert time.seconds >= reported - 1e-6 * max(1.0, reported)
