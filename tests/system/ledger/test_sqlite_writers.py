"""The queue in front of SQLite's write lock: first come, first served; and checkpoints, which take that lock."""

import contextlib
import os
import signal
import sqlite3
import subprocess
import sys
import threading
import time
from datetime import timedelta
from pathlib import Path

import pytest
from sqlalchemy import make_url

from skyward_core.errors import LedgerError
from skyward_core.ledger.ledger import Ledger
from skyward_core.ledger.sqlite_writers import STUCK_SECONDS, WriterQueue
from tests.ledger.fixtures import LATER, NOON, Clock, open_pool
from tests.unit.ledger.test_sqlite_writers import SMALL_BYTES, clock, path, wal_bytes, write  # noqa: F401 - fixtures
from tests.waiting import wait_until

ROOT = Path(__file__).parents[3]
WAITS = """
import sys
from sqlalchemy import make_url
from skyward_core.ledger.sqlite_writers import WriterQueue
with WriterQueue(make_url(sys.argv[1])).turn():
    print("mine", flush=True)
    sys.stdin.read()
"""


@pytest.fixture
def queue(tmp_path: Path) -> str:
    return f"sqlite:///{tmp_path}/ledger.db"


def test_writers_get_their_turns_in_the_order_in_which_they_came(queue: str) -> None:
    writers = WriterQueue(make_url(queue))
    order: list[int] = []

    def write(number: int) -> None:
        with writers.turn():
            order.append(number)

    threads = [threading.Thread(target=write, args=(number,)) for number in range(12)]
    with writers.turn():
        for number, thread in enumerate(threads, 2):
            thread.start()
            wait_until(lambda: writers.waiting() == number, "the writer to be in the queue")
    for thread in threads:
        thread.join()
    assert order == list(range(12))
    assert writers.waiting() == 0


def test_a_process_that_writes_without_a_pause_lets_the_others_write(queue: str) -> None:
    with Ledger(queue, clock=Clock()) as busy, Ledger(queue, clock=Clock()) as other:
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

        writers = WriterQueue(make_url(queue), pause=pause)
        writer = threading.Thread(target=write)
        writer.start()
        try:
            rounds = 0
            while rounds < 20:
                at_first_pause.clear()
                with writers.turn():
                    now = len(written)
                if at_first_pause:
                    rounds += 1
                    # the write that ran, and one that had ended and was not counted yet
                    assert now - at_first_pause[0] <= 2
                other.renew("p", NOON)
        finally:
            over.set()
            writer.join()


def test_a_stopped_process_delays_the_others_by_a_second_and_a_killed_one_not_at_all(queue: str) -> None:
    """Writers behind a stopped one do not wait for it in turn: the first that goes on shows all that it is stuck."""
    pipe, now = subprocess.PIPE, [0.0]
    with subprocess.Popen([sys.executable, "-c", WAITS, queue], cwd=ROOT, stdin=pipe, stdout=pipe, text=True) as holder:
        assert holder.stdout is not None
        assert holder.stdout.readline() == "mine\n"
        holder.send_signal(signal.SIGSTOP)

        def pause(seconds: float) -> None:
            now[0] += seconds
            if now[0] > 10:
                first.close()

        writers = WriterQueue(make_url(queue), clock=lambda: now[0], pause=pause)
        with contextlib.ExitStack() as first:
            first.enter_context(writers.turn())
            assert STUCK_SECONDS < now[0] < STUCK_SECONDS + 0.2
            now[0] = 10.0
            with writers.turn():
                assert now[0] < 10.2
        holder.kill()
    with WriterQueue(make_url(queue), pause=_never).turn():
        pass


def test_a_fork_does_not_keep_the_place_of_its_parent(queue: str) -> None:
    writers = WriterQueue(make_url(queue))
    ours, theirs = os.pipe()
    with writers.turn():
        pid = os.fork()
        if pid == 0:
            os.close(theirs)
            os.read(ours, 1)
            os._exit(0)
    try:
        assert writers.waiting() == 0
    finally:
        os.close(theirs)
        os.close(ours)
        os.waitpid(pid, 0)


def test_which_ledgers_have_a_queue(queue: str, tmp_path: Path) -> None:
    """A link leads to the same one. There is none in PostgreSQL, nor in a folder that does not exist."""
    (tmp_path / "link.db").symlink_to(tmp_path / "ledger.db")
    with WriterQueue(make_url(f"sqlite:///{tmp_path}/link.db")).turn():
        assert WriterQueue(make_url(queue)).waiting() == 1
    for url in ("postgresql+psycopg://host/ledger", f"sqlite:///{tmp_path}/missing/ledger.db"):
        writers = WriterQueue(make_url(url), pause=_never)
        with writers.turn(), writers.turn():
            assert writers.waiting() == 0


def _never(seconds: float) -> None:
    raise AssertionError(f"it waits for {seconds} s")


def test_the_wal_file_stays_small_while_connections_are_open(path: Path, clock: Clock) -> None:
    largest = 0
    with Ledger(f"sqlite:///{path}") as ledger, Ledger(f"sqlite:///{path}"):
        for _ in range(100):
            write(ledger, 3)
            largest = max(largest, wal_bytes(path))
    assert SMALL_BYTES / 2 < largest < 2 * SMALL_BYTES
    with contextlib.closing(sqlite3.connect(path)) as raw:
        assert raw.execute("PRAGMA integrity_check").fetchall() == [("ok",)]


HOLDS = """
import sqlite3, sys
connection = sqlite3.connect(sys.argv[1], isolation_level=None)
connection.execute("BEGIN IMMEDIATE")
print("held", flush=True)
sys.stdin.read()
"""


def test_the_error_of_a_busy_ledger_says_who_holds_it_and_what_to_do(tmp_path: Path) -> None:
    """A process that is stopped can be continued; of one that runs, the end is waited for."""
    with Ledger(f"sqlite:///{tmp_path}/ledger.db", clock=Clock(), busy_timeout_seconds=0.01) as ledger:
        open_pool(ledger, "p")
        holder = subprocess.Popen(
            [sys.executable, "-c", HOLDS, str(tmp_path / "ledger.db")], stdin=subprocess.PIPE, stdout=subprocess.PIPE
        )
        assert holder.stdout is not None
        assert holder.stdout.readline() == b"held\n"
        who = rf"is locked: process {holder.pid} \({Path(sys.executable).name} -c\) writes to it"
        with pytest.raises(LedgerError, match=rf"{who} for long\. Try again when that has ended"):
            open_pool(ledger, "q")
        holder.send_signal(signal.SIGSTOP)
        os.waitpid(holder.pid, os.WUNTRACED)
        with pytest.raises(LedgerError, match=rf"{who}, and is stopped\. Let it go on \(kill -CONT {holder.pid}\)"):
            open_pool(ledger, "q")
        holder.kill()
        holder.communicate()
        open_pool(ledger, "q")
