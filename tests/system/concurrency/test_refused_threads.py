"""One thread cannot be started (`can't start new thread`): the pool works, or ends with words. Nothing is left."""

import asyncio
import contextlib
import os
import signal
import subprocess
import sys
import traceback
from concurrent.futures import Future
from functools import partial

import pytest

import skyward_core as sky
from skyward_core.concurrency.threads import FinalWork
from skyward_core.ledger.ledger import Ledger, default_url
from skyward_core.session.departure import SessionReaper
from skyward_core.wire.messages import Parcel
from skyward_core.worker.pool_worker import SlotThreadPoolExecutor
from tests.concurrency.thread_faults import Killer, Refusal, ThreadKilled
from tests.waiting import wait_until

pytestmark = [pytest.mark.timeout(240)]


@sky.compute
def double(x: int) -> int:
    return 2 * x


@sky.compute
def supervisor() -> int:
    return os.getppid()


MANY_BYTES = 8 << 20


@sky.compute
def large() -> bytes:
    return bytes(MANY_BYTES)


def new_pool(**settings: object) -> sky.ComputePool:
    return sky.ComputePool(provider=sky.Local(), display="quiet", collect_metrics=False, **settings)  # type: ignore[arg-type]


def assert_is_settled(pool: sky.ComputePool) -> None:
    """No machine is left, and the ledger has the pool's end."""
    assert sky.Local().instances(pool.id) == []
    with Ledger(default_url()) as ledger:
        entry = ledger.pool(pool.id)
        assert entry is not None
        assert entry.ended_at is not None
        assert ledger.open_intents(pool_id=pool.id) == []


@pytest.mark.parametrize("name", ["skyward-end-1", "skyward-ending", "skyward-replace-1"])
def test_a_lost_node_is_replaced(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    pool = new_pool(nodes=2)
    with pool:
        refusal = Refusal(name, monkeypatch)
        before = supervisor() @ pool
        os.kill(before[1], signal.SIGKILL)
        wait_until(
            lambda: {*(supervisor() @ pool)}.isdisjoint(before[1:]) and len(supervisor() @ pool) == 2, "a new node"
        )
        assert list(double(3) @ pool) == [6, 6]
    assert name == "skyward-ending" or refusal.refused == [name]
    assert_is_settled(pool)


def test_callbacks_are_called(monkeypatch: pytest.MonkeyPatch) -> None:
    refusal = Refusal("skyward-callbacks", monkeypatch)
    values = list[int]()

    def note(future: Future[int]) -> None:
        values.append(future.result())

    with new_pool() as pool:
        for number in (1, 2):
            call = pool.submit(double(number))
            call.add_done_callback(note)
            assert call.result(60) == 2 * number
            # a program may wait for the callback of its only call
            wait_until(lambda number=number: values[-1:] == [2 * number], "the callback")
    assert values == [2, 4]
    assert refusal.refused == ["skyward-callbacks"]
    assert_is_settled(pool)


@pytest.mark.parametrize(
    "name",
    [
        "skyward-import",
        "skyward-opening",
        "skyward-lease",
        "skyward-node-lease",
        "skyward-clock",
        "skyward-engine",
        "skyward-results",
        "skyward-recovery",
        "skyward-prepare",
        "skyward-reap",
        "skyward-events",
        "IO loop",
    ],
)
def test_a_pool_opens_or_its_opening_fails_with_words(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    refusal = Refusal(name, monkeypatch)
    pool = new_pool(nodes=2)
    try:
        with pool:
            assert list(double(3) @ pool) == [6, 6]
    except (sky.SkywardError, RuntimeError, OSError) as error:
        assert "start new thread" in "".join(traceback.format_exception(error))
    assert refusal.refused
    if pool.id:
        assert_is_settled(pool)


def test_without_a_thread_a_finalizer_does_its_work_itself(monkeypatch: pytest.MonkeyPatch) -> None:
    refusal = Refusal("skyward-collected", monkeypatch)
    final_work, done = FinalWork(), list[str]()
    final_work.begin()
    final_work.hand_over(partial(done.append, "closed"))
    assert (refusal.refused, done) == (["skyward-collected"], ["closed"])
    final_work.begin()
    final_work.hand_over(partial(done.append, "closed by the thread"))
    final_work.finish()
    assert done == ["closed", "closed by the thread"]


def test_a_call_on_a_worker_without_a_thread_is_begun_later(monkeypatch: pytest.MonkeyPatch) -> None:
    """Dask counts a thread before it has started, and a call would wait for ever for one that could not be started."""
    refusal = Refusal("skyward-slot", monkeypatch)

    async def calls() -> list[int]:
        executor, loop = SlotThreadPoolExecutor(2, thread_name_prefix="skyward-slot"), asyncio.get_running_loop()
        try:
            begun = [loop.run_in_executor(executor, pow, number, 2) for number in (2, 3)]
            return await asyncio.wait_for(asyncio.gather(*begun), 30)
        finally:
            executor.shutdown()

    assert asyncio.run(calls()) == [4, 9]
    assert len(refusal.refused) == 1


def test_terminate_now_needs_no_thread(monkeypatch: pytest.MonkeyPatch) -> None:
    with new_pool() as pool:
        monkeypatch.setattr(SessionReaper, "terminate_now", lambda _: False)
        refusal = Refusal("skyward-terminate", monkeypatch)
        pool.terminate_now()
    assert refusal.refused == ["skyward-terminate"]
    assert_is_settled(pool)


def test_a_pool_that_is_collected_in_the_last_line_is_torn_down_whole() -> None:
    """The thread that closes it is waited for at the interpreter's end."""
    code = (
        "import skyward_core as sky\n"
        "pool = sky.ComputePool(provider=sky.Local(), display='quiet', collect_metrics=False).open()\n"
        "print(pool.id, flush=True)\n"
        "del pool\n"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True, timeout=120)
    with Ledger(default_url()) as ledger:
        entry = ledger.pool(done.stdout.strip())
        assert entry is not None
        assert (entry.ended_at is not None, ledger.open_intents(pool_id=entry.id)) == (True, [])
        assert sky.Local().instances(entry.id) == []


def test_a_file_that_cannot_be_removed_holds_up_no_later_result(monkeypatch: pytest.MonkeyPatch) -> None:
    """Its memory is freed in the results' thread."""
    refused = list[str]()

    def release(parcel: Parcel) -> None:
        if parcel.path is not None and not refused:
            refused.append(parcel.path)
            os.unlink(parcel.path)  # the test leaves nothing
            raise PermissionError(parcel.path)
        real(parcel)

    real = Parcel.release
    with new_pool() as pool:
        monkeypatch.setattr(Parcel, "release", release)
        for _ in range(3):
            assert len(pool.submit(large()).result(60)) == MANY_BYTES
    assert len(refused) == 1


NAMES = ("engine", "recovery", "clock", "lease", "events")


@pytest.mark.parametrize(
    ("name", "turn"),
    [
        *((f"skyward-{name}", 1) for name in (*NAMES, "results")),  # small results need few turns of their thread
        *(pytest.param(f"skyward-{name}", 10, marks=pytest.mark.nightly) for name in NAMES),
    ],
)
def test_a_thread_that_fails_goes_on(name: str, turn: int) -> None:
    """What it was asked for then may fail with its error, the opening too; nothing hangs."""
    with Killer(name, turn) as killer:
        pool = new_pool()
        with contextlib.suppress(ThreadKilled), pool:
            for number in range(20):
                with contextlib.suppress(ThreadKilled):
                    assert pool.submit(double(number)).result(60) == 2 * number
            wait_until(lambda: killer.has_killed, f"turn {turn} of {name}")
    assert_is_settled(pool)
    assert killer.has_killed
