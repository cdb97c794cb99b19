"""The queue in front of SQLite's write lock: first come, first served."""

import heapq
import itertools
import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from datetime import timedelta
from pathlib import Path

import pytest
from sqlalchemy import make_url

from skyward_core.ledger.ledger import Ledger
from skyward_core.ledger.turns import STUCK_SECONDS, Turns
from tests.conftest import wait_until
from tests.unit.ledger.test_ledger import LATER, NOON, Clock, open_pool

ROOT = Path(__file__).parents[3]
WAITS = """
import sys
from sqlalchemy import make_url
from skyward_core.ledger.turns import Turns
with Turns(make_url(sys.argv[1])).turn():
    print("mine", flush=True)
    sys.stdin.read()
"""


@pytest.fixture
def url(tmp_path: Path) -> str:
    return f"sqlite:///{tmp_path}/ledger.db"


@pytest.fixture
def process(url: str) -> Iterator[Callable[[], subprocess.Popen[str]]]:
    """Starts a process that waits for its turn, says so when it has it, and keeps it until its input ends."""
    started: list[subprocess.Popen[str]] = []

    def start() -> subprocess.Popen[str]:
        pipe = subprocess.PIPE
        started.append(
            subprocess.Popen([sys.executable, "-c", WAITS, url], cwd=ROOT, stdin=pipe, stdout=pipe, text=True)
        )
        return started[-1]

    yield start
    for one in started:
        one.kill()
        one.communicate()


def test_writers_get_their_turns_in_the_order_in_which_they_came(url: str) -> None:
    turns = Turns(make_url(url))
    order: list[int] = []

    def write(number: int) -> None:
        with turns.turn():
            order.append(number)

    threads = [threading.Thread(target=write, args=(number,)) for number in range(12)]
    with turns.turn():
        for number, thread in enumerate(threads, 2):
            thread.start()
            wait_until(lambda: turns.waiting() == number, "the writer to be in the queue")
    for thread in threads:
        thread.join()
    assert order == list(range(12))
    assert turns.waiting() == 0


def test_a_process_that_writes_without_a_pause_lets_the_others_write(url: str) -> None:
    with Ledger(url, clock=Clock()) as busy, Ledger(url, clock=Clock()) as other:
        open_pool(busy, "p")
        over = threading.Event()
        written: list[int] = []
        at_first_pause: list[int] = []

        def write() -> None:
            while not over.is_set():
                busy.renew("p", LATER + timedelta(seconds=len(written)))
                written.append(1)

        def pause(seconds: float) -> None:  # this thread has its place in the queue when it pauses first
            if not at_first_pause:
                at_first_pause.append(len(written))
            time.sleep(seconds)

        turns = Turns(make_url(url), pause=pause)
        writer = threading.Thread(target=write)
        writer.start()
        try:
            rounds = 0
            while rounds < 20:
                at_first_pause.clear()
                with turns.turn():
                    now = len(written)
                if at_first_pause:
                    rounds += 1
                    # the write that ran, and one that had ended and was not counted yet
                    assert now - at_first_pause[0] <= 2
                other.renew("p", NOON)
        finally:
            over.set()
            writer.join()


def test_a_link_to_the_ledger_leads_to_the_same_queue(url: str, tmp_path: Path) -> None:
    (tmp_path / "link.db").symlink_to(tmp_path / "ledger.db")
    with Turns(make_url(f"sqlite:///{tmp_path}/link.db")).turn():
        assert Turns(make_url(url)).waiting() == 1


def test_the_place_of_a_killed_process_is_free(url: str, process: Callable[[], subprocess.Popen[str]]) -> None:
    holder = process()
    assert holder.stdout is not None
    assert holder.stdout.readline() == "mine\n"
    holder.kill()
    holder.wait()
    with Turns(make_url(url), pause=_never).turn():
        pass


def test_a_stopped_process_in_the_queue_delays_the_others_by_a_second(
    url: str, process: Callable[[], subprocess.Popen[str]]
) -> None:
    holder = process()
    assert holder.stdout is not None
    holder.stdout.readline()
    os.kill(holder.pid, signal.SIGSTOP)
    now = [0.0]

    def pause(seconds: float) -> None:
        now[0] += seconds

    with Turns(make_url(url), clock=lambda: now[0], pause=pause).turn():
        assert STUCK_SECONDS < now[0] < STUCK_SECONDS + 0.2


class FakeTime:
    """The clock of several threads. It goes on when all of them pause, and then one of them goes on."""

    def __init__(self, threads: int) -> None:
        self.now = 0.0
        self._running = threads
        self._number = itertools.count()
        self._pauses: list[tuple[float, int, threading.Event]] = []
        self._lock = threading.Lock()

    def pause(self, seconds: float) -> None:
        wakes = threading.Event()
        with self._lock:
            heapq.heappush(self._pauses, (self.now + seconds, next(self._number), wakes))
        self.end()
        assert wakes.wait(60)

    def end(self) -> None:
        """One thread runs no more."""
        with self._lock:
            self._running -= 1
            if not self._running and self._pauses:
                self.now, _, wakes = heapq.heappop(self._pauses)
                self._running = 1
                wakes.set()


def test_many_writers_behind_a_stopped_one_wait_for_it_once(url: str) -> None:
    at = FakeTime(20)
    ends: list[float] = []

    def write(number: int) -> None:
        at.pause(0.04 * number)
        with Turns(make_url(url), clock=lambda: at.now, pause=at.pause).turn():
            ends.append(at.now)
            at.pause(0.01)
        at.end()

    with Turns(make_url(url)).turn():
        threads = [threading.Thread(target=write, args=(number,)) for number in range(20)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
    assert len(ends) == 20
    assert ends[0] > STUCK_SECONDS
    assert ends[-1] < STUCK_SECONDS + 1
    assert all(later - earlier >= 0.01 for earlier, later in itertools.pairwise(ends)), "one after the other"


def test_a_fork_does_not_keep_the_place_of_its_parent(url: str) -> None:
    turns = Turns(make_url(url))
    ours, theirs = os.pipe()
    with turns.turn():
        pid = os.fork()
        if pid == 0:
            os.close(theirs)
            os.read(ours, 1)
            os._exit(0)
    try:
        assert turns.waiting() == 0
    finally:
        os.close(theirs)
        os.close(ours)
        os.waitpid(pid, 0)


def test_without_a_queue_nobody_waits(tmp_path: Path) -> None:
    for url in ("postgresql+psycopg://host/ledger", f"sqlite:///{tmp_path}/missing/ledger.db"):
        turns = Turns(make_url(url), pause=_never)
        with turns.turn(), turns.turn():
            assert turns.waiting() == 0


def _never(seconds: float) -> None:
    raise AssertionError(f"it waits for {seconds} s")
