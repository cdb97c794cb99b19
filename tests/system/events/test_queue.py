"""One thread delivers the events: in order, each once. A thread that puts an event waits for no callback."""

from __future__ import annotations

import contextvars
import logging
import os
import signal
import sys
import threading
from collections.abc import Iterator
from itertools import pairwise
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

import skyward_core as sky
from skyward_core.events.queue import EventQueue
from tests.conftest import RecordedEvents
from tests.unit.events.test_events import LINE

BILL = sky.CostFinal(1.0, 1.0, 1.0, 0, 1, 0.0)
PATIENCE_SECONDS = 0.05


def line(number: int) -> sky.LogLine:
    return sky.LogLine(0, "i-0", str(number), 0.0)


class Blocked:
    """A sink that takes events only while it is released, and reports that it blocks."""

    def __init__(self) -> None:
        self.recorded = RecordedEvents()
        self.may_go_on = threading.Event()
        self.is_in = threading.Event()

    def __call__(self, event: Any) -> None:
        self.is_in.set()
        assert self.may_go_on.wait(60)
        self.recorded(event)


@pytest.fixture
def blocked() -> Iterator[Blocked]:
    """A sink that blocks; released at the end of the test."""
    sink = Blocked()
    yield sink
    sink.may_go_on.set()


def ended(queue: EventQueue) -> bool:
    queue.close()
    return queue.flush()


def test_events_are_delivered_in_order_and_each_once() -> None:
    """Many threads put; the events of one thread keep their order.

    The display is closed after the last one, by the thread that delivers.
    """
    seen: list[Any] = []
    queue = EventQueue(seen.append, lambda: seen.append(threading.current_thread().name))
    threads = [
        threading.Thread(target=lambda first=first: [queue.put(line(first + number)) for number in range(500)])
        for first in range(0, 4000, 1000)
    ]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert ended(queue)
    assert seen.pop() == "skyward-events"
    numbers = [int(event.line) for event in seen]
    assert sorted(numbers) == [first + number for first in range(0, 4000, 1000) for number in range(500)]
    for first in range(0, 4000, 1000):
        assert all(
            one < other for one, other in pairwise(number for number in numbers if number // 1000 == first // 1000)
        )
    assert queue.delivered == queue.number == 2000


def test_a_flush_ends_when_a_callback_blocks_and_the_rest_is_delivered_later(blocked: Blocked) -> None:
    """No thread waits without end for a callback, and no event is lost."""
    is_closed = threading.Event()
    queue = EventQueue(blocked, is_closed.set)
    queue.put(line(0))
    queue.close()
    assert blocked.is_in.wait(60)
    assert not queue.flush(PATIENCE_SECONDS)
    assert not is_closed.is_set()
    blocked.may_go_on.set()
    assert queue.flush()
    assert is_closed.is_set()
    assert blocked.recorded.events == [line(0)]


def test_nothing_comes_after_the_bill() -> None:
    """CostFinal is the last event; later ones are dropped."""
    seen: list[Any] = []
    queue = EventQueue(seen.append)
    queue.put(line(0))
    number = queue.put(BILL)
    assert queue.put(line(1)) == number
    queue.put(BILL)
    assert ended(queue)
    queue.close()
    assert seen == [line(0), BILL]


@given(st.lists(st.sampled_from(["line", "progress", "lost"]), max_size=60), st.integers(2, 10))
def test_the_queue_is_bounded_and_keeps_important_events(kinds: list[str], most: int) -> None:
    """Beyond the limit lines and progress are dropped and counted. Other events are never dropped, and the last
    progress comes last.

    Looks inside: the waiting events are not delivered yet.
    """
    may_go_on = threading.Event()
    seen: list[Any] = []
    queue = EventQueue(lambda event: (may_go_on.wait(60), seen.append(event)), most_waiting=most)
    made: dict[str, Any] = {
        "line": lambda number: line(number),
        "lost": lambda number: sky.InstanceLost("i-0", number, ""),
    }
    made["progress"] = lambda number: sky.CallProgress(number, number, 0)
    put = [made[kind](number) for number, kind in enumerate(kinds)]
    for event in put:
        queue.put(event)
    lost = [event for event in put if isinstance(event, sky.InstanceLost)]
    assert (
        sum(isinstance(event, sky.LogLine) for event in list(queue._waiting)) <= most
    )  # the thread may take the first one now
    may_go_on.set()
    queue.put(BILL)
    assert ended(queue)
    assert [event for event in seen if isinstance(event, sky.InstanceLost)] == lost
    progress = [event for event in put if isinstance(event, sky.CallProgress)]
    assert [event for event in seen if isinstance(event, sky.CallProgress)][-1:] == progress[-1:]
    counts = [int(event.message.split()[0]) for event in seen if isinstance(event, sky.Error)]
    again = sum(1 for event in seen if isinstance(event, sky.CallProgress)) + sum(
        1 for event in seen if isinstance(event, sky.LogLine)
    )
    dropped = len(put) - len(lost) - again
    # the last progress was counted as dropped, and is delivered anyway
    assert dropped <= sum(counts) <= dropped + len(counts)
    assert seen[-1] == BILL


def test_callbacks_run_in_the_context_in_which_the_pool_was_opened() -> None:
    """Context variables of an orchestrator, such as its current run, are set in its callbacks."""
    variable: contextvars.ContextVar[str] = contextvars.ContextVar("variable", default="nothing")
    seen: list[str] = []
    variable.set("the opener's")
    queue = EventQueue(lambda _: seen.append(variable.get()))
    variable.set("of later")
    queue.put(line(0))
    assert ended(queue)
    assert seen == ["the opener's"]


def test_a_callback_that_exits_ends_the_program_and_not_the_thread(caplog: pytest.LogCaptureFixture) -> None:
    """`sys.exit` in a callback is raised once, where the program waits for the pool. An exception is logged. Both stop
    no later event.
    """
    seen: list[Any] = []

    def exits(event: Any) -> None:
        seen.append(event)
        if event == line(0):
            sys.exit("out of here")
        if event == line(1):
            raise ValueError("trouble")

    queue = EventQueue(exits)
    for number in range(3):
        queue.put(line(number))
    queue.close()
    with pytest.raises(SystemExit, match="out of here"):
        queue.flush()
    assert queue.flush()
    assert seen == [line(0), line(1), line(2)]
    assert [str(record.exc_info[1]) for record in caplog.records if record.exc_info] == ["trouble"]


def test_a_fork_delivers_no_events() -> None:
    """A forked process has no thread that delivers, and the lock may have been held at the fork."""
    seen: list[Any] = []
    queue = EventQueue(seen.append)
    queue.put(line(0))
    assert queue.flush()
    with queue._lock:
        pid = os.fork()
        if pid == 0:
            try:
                queue.put(line(1))
                queue.log(logging.INFO, "late")
                queue.close()
                is_right = not queue.flush() and seen == [line(0)]
                os._exit(0 if is_right else 1)
            finally:
                os._exit(2)
    assert os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) == 0
    assert ended(queue)


def test_a_signal_handler_may_put_during_a_put() -> None:
    """It runs in the thread that it interrupts, which may hold the queue's lock."""
    seen: list[Any] = []
    queue = EventQueue(seen.append)
    before = signal.signal(signal.SIGUSR1, lambda *_: (queue.put(line(1)), queue.flush(), None)[-1])
    try:
        with queue._lock:
            signal.raise_signal(signal.SIGUSR1)
            queue.put(line(2))
    finally:
        signal.signal(signal.SIGUSR1, before)
    assert ended(queue)
    assert seen == [line(1), line(2)]


def test_a_callback_belongs_to_its_context() -> None:
    """Another thread does not see the callback of this one, and an error in the block removes it."""
    seen: list[Any] = []
    with pytest.raises(ZeroDivisionError), sky.use_callback(lambda event: seen.append(event)):
        thread = threading.Thread(target=sky.emit, args=(LINE,))
        thread.start()
        thread.join()
        raise ZeroDivisionError
    sky.emit(LINE)
    assert seen == []
