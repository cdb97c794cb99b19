"""The queue in front of SQLite's write lock: first come, first served."""

import os
import signal
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator
from datetime import timedelta
from pathlib import Path

import pytest
from sqlalchemy import make_url

from skyward_core.ledger.ledger import Ledger
from skyward_core.ledger.turns import STUCK_SECONDS, Turns
from tests.conftest import wait_until
from tests.ledger.test_ledger import LATER, NOON, Clock, open_pool

ROOT = Path(__file__).parents[2]
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


def test_a_process_that_writes_without_a_pause_lets_the_others_write(url: str, tmp_path: Path) -> None:
    """It writes at most once after another writer came, whatever the speed of the disk."""
    with Ledger(url, clock=Clock()) as busy, Ledger(url, clock=Clock()) as other:
        open_pool(busy, "p")
        turns, over = Turns(make_url(url)), threading.Event()
        written: list[int] = []
        seen: list[int] = []

        def write() -> None:
            while not over.is_set():
                busy.renew("p", LATER + timedelta(seconds=len(written)))
                written.append(1)

        def look() -> None:
            with turns.turn():
                seen.append(len(written))

        writer = threading.Thread(target=write)
        writer.start()
        try:
            wait_until(lambda: written, "the first write")
            for _ in range(20):
                before = len(written)
                look()
                assert seen[-1] - before <= 3  # those between the count and the place in the queue
                other.renew("p", NOON)
        finally:
            over.set()
            writer.join()


def test_a_link_to_the_ledger_leads_to_the_same_queue(url: str, tmp_path: Path) -> None:
    (tmp_path / "link.db").symlink_to(tmp_path / "ledger.db")
    with Turns(make_url(f"sqlite:///{tmp_path}/link.db")).turn():
        assert Turns(make_url(url)).waiting() == 1


@pytest.mark.slow
def test_the_place_of_a_killed_process_is_free(url: str, process: Callable[[], subprocess.Popen[str]]) -> None:
    holder = process()
    assert holder.stdout is not None
    assert holder.stdout.readline() == "mine\n"
    holder.kill()
    holder.wait()
    with Turns(make_url(url), pause=_never).turn():
        pass


@pytest.mark.slow
def test_a_stopped_process_in_the_queue_delays_the_others_by_a_second(
    url: str, process: Callable[[], subprocess.Popen[str]]
) -> None:
    """SQLite's own lock decides then."""
    holder = process()
    assert holder.stdout is not None
    holder.stdout.readline()
    os.kill(holder.pid, signal.SIGSTOP)
    now = [0.0]

    def pause(seconds: float) -> None:
        now[0] += seconds

    with Turns(make_url(url), clock=lambda: now[0], pause=pause).turn():
        assert STUCK_SECONDS < now[0] < STUCK_SECONDS + 0.2


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
    """A ledger in PostgreSQL has none, and one in a folder that does not exist cannot."""
    for url in ("postgresql+psycopg://host/ledger", f"sqlite:///{tmp_path}/missing/ledger.db"):
        turns = Turns(make_url(url), pause=_never)
        with turns.turn(), turns.turn():
            assert turns.waiting() == 0


def _never(seconds: float) -> None:
    raise AssertionError(f"it waits for {seconds} s")
