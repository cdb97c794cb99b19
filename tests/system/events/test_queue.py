"""One thread delivers the events: in order, each once. A thread that puts an event waits for no callback."""

import contextvars
import logging
import os
import signal
import sys
import threading
from typing import Any

import pytest

import skyward_core as sky
from skyward_core.events.queue import EventQueue

BILL = sky.CostFinal(1.0, 1.0, 1.0, 0, 1, 0.0)


def line(number: int) -> sky.LogLine:
    return sky.LogLine(0, "i-0", str(number), 0.0)


def ended(queue: EventQueue) -> bool:
    queue.close()
    return queue.flush()


def test_events_are_delivered_in_order_and_each_once_until_the_bill() -> None:
    variable: contextvars.ContextVar[str] = contextvars.ContextVar("variable", default="nothing")
    seen: list[Any] = []
    contexts = set[str]()
    variable.set("the opener's")
    queue = EventQueue(
        lambda event: (seen.append(event), contexts.add(variable.get())),
        lambda: seen.append(threading.current_thread().name),
    )
    variable.set("of later")
    threads = [
        threading.Thread(target=lambda first=first: [queue.put(line(first + number)) for number in range(500)])
        for first in range(0, 4000, 1000)
    ]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert queue.put(BILL) == queue.put(line(1)) == 2001
    assert ended(queue)
    assert seen[-2:] == [BILL, "skyward-events"]
    numbers = [int(event.line) for event in seen[:-2]]
    for first in range(0, 4000, 1000):
        assert [number for number in numbers if number // 1000 == first // 1000] == [*range(first, first + 500)]
    assert queue.delivered == queue.number == len(numbers) + 1
    assert contexts == {"the opener's"}


def test_a_flush_ends_when_a_callback_blocks_and_the_rest_is_delivered_later() -> None:
    """Beyond the limit lines and progress are dropped and counted; other events never, and the last progress comes."""
    is_in, may_go_on, is_closed = threading.Event(), threading.Event(), threading.Event()
    seen: list[Any] = []

    def blocks(event: Any) -> None:
        is_in.set()
        assert may_go_on.wait(60)
        seen.append(event)

    queue = EventQueue(blocks, is_closed.set, most_waiting=4)
    queue.put(line(0))
    assert is_in.wait(60)
    lost, progress = sky.InstanceLost("i-0", 1, ""), [sky.CallProgress(number, number, 0) for number in range(3)]
    for event in (*progress, *map(line, range(1, 20)), lost, progress[-1]):
        queue.put(event)
    queue.put(BILL)
    queue.close()
    assert not queue.flush(0.05)
    assert not is_closed.is_set()
    may_go_on.set()
    assert queue.flush()
    assert is_closed.is_set()
    assert (seen[0], seen[-1], lost in seen) == (line(0), BILL, True)
    assert [event for event in seen if isinstance(event, sky.CallProgress)][-1] == progress[-1]
    lines = [event for event in seen if isinstance(event, sky.LogLine)]
    assert lines[1:] == [line(number) for number in range(1, len(lines))]
    assert len(lines) <= 5
    (dropped,) = [int(event.message.split()[0]) for event in seen if isinstance(event, sky.Error)]
    assert dropped >= 20 - len(lines)


def test_a_callback_that_exits_ends_the_program_and_not_the_thread(caplog: pytest.LogCaptureFixture) -> None:
    """`sys.exit` in a callback is raised once, where the program waits for the pool. An exception is logged."""
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
