"""Real pools: calls on local nodes, how the calls end, and what is left after the pool."""

import asyncio
import contextlib
import ctypes
import dataclasses
import errno
import os
import pydoc
import random
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from concurrent.futures import CancelledError, Future
from functools import partial
from pathlib import Path
from typing import Any

import dask
import numpy as np
import pytest

import skyward_core as sky
from skyward_core.session import clock
from skyward_core.session.session import Session
from tests.conftest import RecordedEvents, connections, members, shared, wait_until
from tests.fakes import DyingLocal, NoCapacityProvider, UnpreparableLocal
from tests.unit.pool.test_pool import (
    double,
    one_node,
)

FACTOR = 3


@dataclasses.dataclass(frozen=True)
class Point:
    x: int
    y: int


def helper(point: Point) -> int:
    return FACTOR * (point.x + point.y)


@sky.compute
def where() -> sky.InstanceInfo:
    return sky.instance_info()


@sky.compute
def block(folder: Path, name: str) -> str:
    """Report that it runs, and wait until it is released."""
    partial_file = folder / f".{name}"
    partial_file.write_text(str(os.getpid()))
    partial_file.rename(folder / name)
    while not (folder / "go").exists():
        time.sleep(0.01)
    return name


def runs(pid: int) -> bool:
    """Return whether a process lives; a zombie does not."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(") ")[2][:1] not in "ZX"
    except OSError:
        return False


def pid_of(folder: Path, name: str) -> int:
    """Wait until the blocking call of that name runs; return its process."""
    wait_until((folder / name).exists, f"the call {name} to run")
    return int((folder / name).read_text())


# ── the operators ────────────────────────────────────────────────────────────────────────────────────────────────────


def test_a_call_returns_its_result(pool: sky.ComputePool) -> None:
    """`>>` runs the call on a node, in another process, and returns its result."""

    @sky.compute
    def work(x: int, *, times: int) -> tuple[int, int]:
        return x * times, os.getpid()

    value, pid = work(7, times=6) >> pool
    assert value == 42
    assert pid != os.getpid()


def test_a_broadcast_runs_on_every_node_in_their_order(pool: sky.ComputePool) -> None:
    """`@` runs the call once on each worker; the results are in the order of the nodes, and share one job."""
    first, second = where() @ pool
    assert [(info.node, info.rank, info.total_nodes, info.world_size, info.is_head) for info in (first, second)] == [
        (0, 0, 2, 2, True),
        (1, 1, 2, 2, False),
    ]
    assert first.job_id == second.job_id
    assert (first.head_addr, first.head_port) == (second.head_addr, second.head_port)
    assert first.accelerators == []
    again, _ = where() @ pool
    assert again.job_id != first.job_id


def test_a_broadcast_runs_on_all_nodes_at_once(pool: sky.ComputePool, tmp_path: Path) -> None:
    """The calls of a broadcast can wait for each other."""

    @sky.compute
    def meet(folder: Path) -> int:
        rank = sky.instance_info().rank
        (folder / str(rank)).touch()
        deadline = time.monotonic() + 30
        while not (folder / str(1 - rank)).exists():
            assert time.monotonic() < deadline, "the other one has not come"
            time.sleep(0.01)
        return rank

    assert meet(tmp_path) @ pool == (0, 1)


def test_gathered_calls_run_at_once_and_keep_their_order(pool: sky.ComputePool, tmp_path: Path) -> None:
    """`&` and `gather` run their calls in parallel; results are in the order of the calls, whatever their types."""

    @sky.compute
    def meet(folder: Path, mine: str, other: str) -> str:
        (folder / mine).touch()
        deadline = time.monotonic() + 30
        while not (folder / other).exists():
            assert time.monotonic() < deadline, "the other one has not come"
            time.sleep(0.01)
        return mine

    assert (meet(tmp_path, "a", "b") & meet(tmp_path, "b", "a")) >> pool == ("a", "b")
    assert sky.gather(double(1), double(2), double(3)) >> pool == (2, 4, 6)
    assert sky.gather() >> pool == ()


def test_map_keeps_the_order_of_two_thousand_calls(pool: sky.ComputePool) -> None:
    """Results of a map are in the order of its items, however the calls were grouped."""
    assert pool.map(lambda a, b: (a, b * b), range(2000), range(2000, 4000)) == [
        (a, (a + 2000) ** 2) for a in range(2000)
    ]


def test_map_accepts_any_iterable(pool: sky.ComputePool) -> None:
    """Generators, decorated functions and no items at all are accepted."""
    assert pool.map(double, (n for n in [3, 1, 2])) == [6, 2, 4]
    assert pool.map(double, []) == []


def test_long_calls_in_a_map_do_not_delay_the_short_ones(pool: sky.ComputePool, tmp_path: Path) -> None:
    """Some calls of a map are long. The calls grouped behind them run in the other slot meanwhile, each once."""

    def work(folder: str, i: int) -> int:
        with open(f"{folder}/{i}", "a") as file:
            file.write("x")
        if i == 150:  # waits for all others, also for those behind it in its group
            deadline = time.monotonic() + 60
            while len(os.listdir(folder)) < 300:
                assert time.monotonic() < deadline, f"only {len(os.listdir(folder))} of 300 have begun"
                time.sleep(0.01)
        return i

    assert pool.map(partial(work, str(tmp_path)), range(300)) == list(range(300))
    assert {path.name: path.read_text() for path in tmp_path.iterdir()} == {str(i): "x" for i in range(300)}


def test_submit_returns_at_once(pool: sky.ComputePool, tmp_path: Path) -> None:
    """`submit` returns a real future while the call still runs."""
    future = pool.submit(block(tmp_path, "one"))
    assert isinstance(future, Future)
    pid_of(tmp_path, "one")
    assert not future.done()
    (tmp_path / "go").touch()
    assert future.result(timeout=30) == "one"


def test_calls_may_come_from_many_threads(pool: sky.ComputePool) -> None:
    """Threads that use one pool at once each get their own results."""
    wrong: list[tuple[int, int]] = []

    def caller(base: int) -> None:
        for n in range(base, base + 20):
            if (result := double(n) >> pool) != 2 * n:
                wrong.append((n, result))

    threads = [threading.Thread(target=caller, args=(1000 * k,)) for k in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert wrong == []


# ── stopping ─────────────────────────────────────────────────────────────────────────────────────────────────────────


def test_a_waiting_call_that_is_cancelled_never_runs(pool: sky.ComputePool, tmp_path: Path) -> None:
    """Cancelling a call that has no slot yet prevents its run. Running calls continue."""
    running = [pool.submit(block(tmp_path, name)) for name in ("a", "b")]
    for name in ("a", "b"):
        pid_of(tmp_path, name)
    waiting = pool.submit(block(tmp_path, "c"))
    assert waiting.cancel()
    assert waiting.cancelled()
    with pytest.raises(CancelledError):
        waiting.result()
    (tmp_path / "go").touch()
    assert [future.result(timeout=30) for future in running] == ["a", "b"]
    assert double(2) @ pool == (4, 4)
    assert not (tmp_path / "c").exists()


def test_a_running_call_that_is_cancelled_is_stopped(pool: sky.ComputePool, tmp_path: Path) -> None:
    """`cancel` ends the process of a running call. Its slot takes the next call, and the other slot is not affected."""
    stopped, other = pool.submit(block(tmp_path, "stopped")), pool.submit(block(tmp_path, "other"))
    pid, other_pid = pid_of(tmp_path, "stopped"), pid_of(tmp_path, "other")
    assert stopped.cancel()
    assert stopped.cancelled()
    wait_until(lambda: not runs(pid), "the cancelled call's process to end")
    assert double(4) >> pool == 8
    assert runs(other_pid)
    (tmp_path / "go").touch()
    assert other.result(timeout=30) == "other"
    assert not other.cancel()


def test_a_call_that_ignores_sigterm_is_stopped_too(pool: sky.ComputePool, tmp_path: Path) -> None:
    """A cancelled call that ignores SIGTERM is killed, with the processes that it has started."""

    @sky.compute
    def stubborn(folder: Path) -> None:
        signal.signal(signal.SIGTERM, signal.SIG_IGN)
        child = subprocess.Popen(["sleep", "300"])
        (folder / ".pids").write_text(f"{os.getpid()} {child.pid}")
        (folder / ".pids").rename(folder / "pids")
        time.sleep(300)

    future = pool.submit(stubborn(tmp_path))
    wait_until((tmp_path / "pids").exists, "the call to run")
    pids = [int(pid) for pid in (tmp_path / "pids").read_text().split()]
    assert future.cancel()
    wait_until(lambda: not any(map(runs, pids)), "the call and its child to end")
    assert double(4) @ pool == (8, 8)


def test_the_first_error_of_a_gather_cancels_the_rest(pool: sky.ComputePool, tmp_path: Path) -> None:
    """When one call of a gather fails, its error is raised at once and the running calls are stopped."""

    @sky.compute
    def fail(folder: Path) -> None:
        while not (folder / "long").exists():
            time.sleep(0.01)
        raise LookupError("no luck")

    with pytest.raises(LookupError, match="no luck"):
        sky.gather(block(tmp_path, "long"), fail(tmp_path)) >> pool
    pid = pid_of(tmp_path, "long")
    wait_until(lambda: not runs(pid), "the other call to be stopped")
    assert double(1) @ pool == (2, 2)


def test_an_error_among_thousands_of_calls_does_not_flood_the_pool(pool: sky.ComputePool) -> None:
    """When one of 3,000 calls fails, the others are cancelled together, not with one message each, and the pool is free
    at once.
    """

    def work(n: int) -> int:
        if n == 3:
            raise ValueError(n)
        return n

    before = len(connections)
    with pytest.raises(ValueError, match="3"):
        pool.map(work, range(3000))
    assert double(1) @ pool == (2, 2)
    assert len(connections) - before < 50


def test_an_interrupt_cancels_the_call_that_is_waited_for(pool: sky.ComputePool, tmp_path: Path) -> None:
    """Ctrl-C while waiting raises KeyboardInterrupt and stops the call; the pool stays open."""

    def interrupt() -> None:
        with contextlib.suppress(pytest.fail.Exception):
            pid_of(tmp_path, "one")
        os.kill(os.getpid(), signal.SIGINT)

    thread = threading.Thread(target=interrupt)
    thread.start()
    with pytest.raises(KeyboardInterrupt):
        block(tmp_path, "one") >> pool
    thread.join()
    pid = pid_of(tmp_path, "one")
    wait_until(lambda: not runs(pid), "the call to be stopped")
    assert double(1) @ pool == (2, 2)


# ── serialization ────────────────────────────────────────────────────────────────────────────────────────────────────


def test_helpers_dataclasses_and_globals_are_sent_along(pool: sky.ComputePool) -> None:
    """The helpers of the user's module are sent along, and instances of its classes come back as such."""

    @sky.compute
    def work(points: list[Point]) -> tuple[int, Point]:
        return sum(map(helper, points)), Point(FACTOR, -1)

    assert work([Point(1, 2), Point(3, 4)]) >> pool == (30, Point(3, -1))


def test_a_method_runs_on_its_object(pool: sky.ComputePool) -> None:
    """`@compute` on a method binds as a function does."""

    class Model:
        def __init__(self, weight: int) -> None:
            self.weight = weight

        @sky.compute
        def predict(self, x: int) -> int:
            return self.weight * x

    assert Model(5).predict(8) >> pool == 40


def test_an_async_function_runs_to_its_end(pool: sky.ComputePool) -> None:
    """The result of an async function is its return value, not a coroutine."""

    @sky.compute
    async def work(x: int) -> int:
        await asyncio.sleep(0)
        return x + 1

    assert work(1) >> pool == 2


def test_a_generator_comes_back_as_a_list(pool: sky.ComputePool) -> None:
    """All but `>>` collect on the node what a generator yields."""

    @sky.compute
    def count(n: int) -> Iterator[int]:
        yield from range(n)

    assert pool.submit(count(4)).result() == pool.run(count(4)) == [0, 1, 2, 3]
    assert pool.map(count, [2, 3]) == [[0, 1], [0, 1, 2]]
    assert count(2) @ pool == (count(2) & count(2)) >> pool == ([0, 1], [0, 1])


def test_a_large_array_goes_and_comes_back(pool: sky.ComputePool) -> None:
    """50 MB of numpy arrive complete and writable on both sides. The two arrays are separate, and no memory stays in
    use.
    """
    rows = np.arange(6_250_000, dtype=np.float64)  # 50 MB

    @sky.compute
    def add_one(array: Any) -> Any:
        array += 1
        return array

    result = add_one(rows) >> pool
    assert result.nbytes == 50_000_000
    assert rows[0] == 0
    assert np.array_equal(result, rows + 1)
    result[0] = -1
    folders = [
        Path("/dev/shm") / name
        for name in os.listdir("/dev/shm")
        if any(name.endswith(node.instance.id) for node in pool.lease.nodes)
    ]
    assert folders
    wait_until(lambda: not any(list(folder.iterdir()) for folder in folders), "the memory folders to be empty")


def test_large_values_leave_nothing_when_their_call_fails(pool: sky.ComputePool) -> None:
    """The memory of a large argument is free again after a call that raised, crashed or was cancelled."""
    rows = np.zeros(1_000_000)
    folders = [
        Path("/dev/shm") / name
        for name in os.listdir("/dev/shm")
        if any(name.endswith(node.instance.id) for node in pool.lease.nodes)
    ]

    @sky.compute
    def end(array: Any, how: str) -> None:
        if how == "crash":
            os._exit(1)
        if how == "wait":
            time.sleep(300)
        raise ValueError(how)

    with pytest.raises(ValueError, match="raise"):
        end(rows, "raise") >> pool
    with pytest.raises(sky.CallCrashed):
        end(rows, "crash") >> pool
    pool.submit(end(rows, "wait")).cancel()
    wait_until(lambda: not any(list(folder.iterdir()) for folder in folders), "the memory folders to be empty")


def test_a_runner_may_get_more_functions_than_it_caches(pool: sky.ComputePool) -> None:
    """A runner that has received more functions than it caches still runs each one correctly."""
    functions = [sky.compute(lambda x, k=k: x * k) for k in range(150)]
    assert sky.gather(*(fn(2) for fn in functions)) >> pool == tuple(2 * k for k in range(150))
    assert sky.gather(*(fn(3) for fn in functions)) >> pool == tuple(3 * k for k in range(150))


def test_an_object_that_cannot_be_pickled_is_named(pool: sky.ComputePool) -> None:
    """An argument that cannot be pickled is refused here, a result there. Both errors name the path to the object, and
    the pool stays open.
    """

    @sky.compute
    def give_back(value: Any = None) -> Any:
        return {"model": {"lock": threading.Lock()}} if value is None else value

    with pytest.raises(sky.NotPicklable) as caught:
        give_back({"client": [threading.Lock()]}) >> pool
    assert "client" in str(caught.value)
    assert "client" in caught.value.path
    with pytest.raises(sky.NotPicklable) as caught:
        give_back() >> pool
    assert "lock" in str(caught.value)
    assert give_back(1) >> pool == 1


# ── output ───────────────────────────────────────────────────────────────────────────────────────────────────────────


def test_output_belongs_to_its_call_and_is_complete(pool: sky.ComputePool, recorded: RecordedEvents) -> None:
    """Each line is emitted for the call that wrote it, on its stream and in order, before the call's result. Lines of
    subprocesses and raw writes are included.
    """

    @sky.compute
    def talk(n: int) -> None:
        print("begin", n)
        print("warn", n, file=sys.stderr)
        subprocess.run(["sh", "-c", f"echo child {n}; echo child-err {n} >&2"], check=True)
        os.write(1, f"raw {n}\n".encode())
        print("no newline", n, end="")

    futures = [pool.submit(talk(n)) for n in range(20)]
    for n, future in enumerate(futures):
        future.result(timeout=60)
        assert recorded.lines(future.call_id) == [f"begin {n}", f"child {n}", f"raw {n}", f"no newline {n}"]
        assert recorded.lines(future.call_id, "stderr") == [f"warn {n}", f"child-err {n}"]


def test_large_output_arrives_completely(pool: sky.ComputePool, recorded: RecordedEvents) -> None:
    """Output larger than a pipe does not block the call, and no line is lost."""

    @sky.compute
    def flood(lines: int) -> None:
        for n in range(lines):
            print(f"{n:06d}", "x" * 60)

    future = pool.submit(flood(20_000))
    future.result(timeout=60)
    assert recorded.lines(future.call_id) == [f"{n:06d} {'x' * 60}" for n in range(20_000)]


def test_output_is_emitted_while_the_call_runs(pool: sky.ComputePool, recorded: RecordedEvents, tmp_path: Path) -> None:
    """Lines do not wait for the end of their call."""

    @sky.compute
    def talk(folder: Path) -> None:
        print("already", flush=True)
        while not (folder / "go").exists():
            time.sleep(0.01)

    future = pool.submit(talk(tmp_path))
    wait_until(lambda: recorded.lines(future.call_id) == ["already"], "the first line")
    assert not future.done()
    (tmp_path / "go").touch()
    future.result(timeout=30)


def test_output_that_is_not_utf_8_is_emitted(pool: sky.ComputePool, recorded: RecordedEvents) -> None:
    """Bytes that are not UTF-8 do not lose the rest of their line."""

    @sky.compute
    def talk() -> None:
        os.write(1, b"caf\xe9 \xe2\x82\xac\n")

    future = pool.submit(talk())
    future.result(timeout=30)
    assert recorded.lines(future.call_id) == ["caf\\xe9 €"]


def test_lines_name_their_node(pool: sky.ComputePool, recorded: RecordedEvents) -> None:
    """Each line has the rank and the id of the node that wrote it."""

    @sky.compute
    def talk(word: str) -> None:
        print(word, sky.instance_info().rank)

    talk("node-mark") @ pool
    lines = [event for event in recorded.of(sky.LogLine) if event.line.startswith("node-mark")]
    assert sorted((event.node, event.line, event.instance_id) for event in lines) == [
        (node.rank, f"node-mark {node.rank}", node.instance.id) for node in pool.lease.nodes
    ]


# ── errors ───────────────────────────────────────────────────────────────────────────────────────────────────────────


def test_a_remote_exception_keeps_its_type_and_arguments(pool: sky.ComputePool) -> None:
    """Type and arguments are those raised on the node. The cause shows its traceback there, and a note names the
    node.
    """

    class OwnError(ValueError):
        pass

    def inner(x: int) -> None:
        raise OwnError("too far", x)

    @sky.compute
    def fails(x: int) -> None:
        try:
            {}["key"]
        except KeyError as error:
            raise RuntimeError("wrapped") from error
        finally:
            inner(x)

    with pytest.raises(OwnError) as caught:
        fails(7) >> pool
    error = caught.value
    assert error.args == ("too far", 7)
    assert "in inner" in str(error.__cause__)
    assert 'raise OwnError("too far", x)' in str(error.__cause__)
    assert "KeyError: 'key'" in str(error.__cause__)
    assert any("node" in note for note in error.__notes__)


def test_errors_of_many_calls_stay_with_their_calls(pool: sky.ComputePool) -> None:
    """Of many small calls exactly the failed ones have an error, each its own."""

    @sky.compute
    def work(n: int) -> int:
        if n % 7 == 3:
            raise ValueError(n)
        return n

    futures = [pool.submit(work(n)) for n in range(300)]
    for n, future in enumerate(futures):
        error = future.exception(timeout=60)
        assert (error.args if error else future.result()) == ((n,) if n % 7 == 3 else n)


def test_a_call_that_interrupts_itself_raises_an_error(pool: sky.ComputePool) -> None:
    """A call that raises KeyboardInterrupt on the node does not interrupt the client's program."""

    @sky.compute
    def fails() -> None:
        raise KeyboardInterrupt

    with pytest.raises(sky.RemoteError, match="KeyboardInterrupt"):
        fails() >> pool
    assert double(1) >> pool == 2


# ── crashes ──────────────────────────────────────────────────────────────────────────────────────────────────────────


@pytest.fixture(scope="module")
def _crashing() -> Iterator[tuple[sky.ComputePool, RecordedEvents]]:
    recorded = RecordedEvents()
    crashed = sky.ComputePool(
        provider=sky.Local(),
        concurrency=2,
        memory="300MB",
        env={"FLAVOUR": "lemon"},
        image=sky.Image(env={"FLAVOUR": "salt", "CUP": "1"}),
        display="quiet",
        on_event=recorded,
    )
    with shared(crashed) as pool:
        yield pool, recorded


@pytest.fixture
def crashing(_crashing: tuple[sky.ComputePool, RecordedEvents]) -> sky.ComputePool:
    """One local node with two slots of 300 MB each and some environment, shared by the tests of this module."""
    return _crashing[0]


@sky.compute
def crash(how: str) -> None:
    print("last words before", how, end="", flush=True)
    match how:
        case "exit":
            os._exit(7)
        case "segfault":
            ctypes.string_at(0)
        case "sys.exit":
            sys.exit(3)
        case "memory":
            hoard = [b"x" * 50_000_000 for _ in range(20)]
            time.sleep(300)
            print(len(hoard))
        case _:
            os.kill(os.getpid(), signal.SIGKILL)


@pytest.mark.parametrize(
    ("how", "kind", "exit_code"),
    [
        ("exit", sky.CallCrashed, 7),
        ("segfault", sky.CallCrashed, -signal.SIGSEGV),
        ("sys.exit", sky.CallCrashed, 3),
        ("memory", sky.CallOutOfMemory, -signal.SIGKILL),
        ("kill", sky.CallCrashed, -signal.SIGKILL),
    ],
)
def test_a_crash_is_a_typed_error_and_the_slot_works_again(
    how: str, kind: type[sky.CallCrashed], exit_code: int, crashing: sky.ComputePool
) -> None:
    """However the process of a call dies, the error has exit code, node and last lines, and both slots work
    afterwards.
    """
    with pytest.raises(sky.CallCrashed) as caught:
        crash(how) >> crashing
    error = caught.value
    assert type(error) is kind
    assert (error.exit_code, error.node) == (exit_code, 0)
    assert f"last words before {how}" in error.output
    assert f"last words before {how}" in str(error)
    assert crashing.map(double, range(10)) == [2 * n for n in range(10)]


def test_the_slots_work_after_many_crashes(crashing: sky.ComputePool) -> None:
    """Twenty crashes in a row are twenty errors, and the slots still work."""
    futures = [crashing.submit(crash("exit")) for _ in range(20)]
    assert [type(future.exception(timeout=60)) for future in futures] == [sky.CallCrashed] * 20
    assert crashing.map(double, range(100)) == [2 * n for n in range(100)]


def test_two_slots_of_a_node_work_at_once(crashing: sky.ComputePool, tmp_path: Path) -> None:
    """With concurrency=2 two calls run on one node at the same time, in separate processes with different random
    numbers.
    """

    @sky.compute
    def meet(mine: str, other: str) -> tuple[int, float, float]:
        (tmp_path / mine).touch()
        deadline = time.monotonic() + 30
        while not (tmp_path / other).exists():
            assert time.monotonic() < deadline, "the other one has not come"
            time.sleep(0.01)
        return os.getpid(), float(np.random.random()), random.random()  # noqa: NPY002 - it is the old generator that a fork copies

    first, second = (meet("a", "b") & meet("b", "a")) >> crashing
    assert all(a != b for a, b in zip(first, second, strict=True))


def test_variables_reach_the_calls(crashing: sky.ComputePool, monkeypatch: pytest.MonkeyPatch) -> None:
    """Every call has the image's environment and then the pool's."""

    @sky.compute
    def look() -> tuple[str | None, ...]:
        return tuple(os.environ.get(name) for name in ("FLAVOUR", "CUP"))

    assert look() >> crashing == ("lemon", "1")


def _normal(pool: sky.ComputePool) -> None:
    with pool:
        pass
    pool.close()


def _body_fails(pool: sky.ComputePool) -> None:
    with pytest.raises(ZeroDivisionError), pool:
        _ = 1 / 0


def _two_threads(pool: sky.ComputePool) -> None:
    with pool:
        threads = [threading.Thread(target=pool.close) for _ in range(3)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()


def _from_a_callback(pool: sky.ComputePool) -> None:
    with pool:
        pool.submit(double(1)).add_done_callback(lambda _: pool.close())
        wait_until(lambda: not pool.is_active, "the pool to be closed")


@pytest.mark.parametrize("way", [_normal, _body_fails, _two_threads, _from_a_callback])
def test_the_bill_is_emitted_once(way: Any) -> None:
    """However a pool ends, CostFinal is emitted exactly once and is the last event."""
    recorded = RecordedEvents()
    way(one_node(recorded, collect_metrics=False))
    wait_until(lambda: recorded.of(sky.CostFinal), "the bill")
    assert len(recorded.of(sky.CostFinal)) == 1
    assert isinstance(recorded.events[-1], sky.CostFinal)


@pytest.mark.parametrize(
    ("provider", "phase", "words"), [(UnpreparableLocal, "deps", "nonesuch"), (DyingLocal, "", "going down")]
)
def test_a_node_that_cannot_be_prepared_is_an_error_with_its_last_lines(
    provider: type[sky.Local], phase: str, words: str
) -> None:
    """A failing bootstrap raises BootstrapFailed with phase and output. The bill is emitted once and the machines are
    gone.
    """
    recorded = RecordedEvents()
    pool = one_node(recorded, provider=provider(price_per_hour=3600.0))
    with pytest.raises(sky.BootstrapFailed) as caught:
        pool.open()
    assert caught.value.phase == phase
    assert words in "\n".join(caught.value.output)
    assert words in str(caught.value)
    assert len(recorded.of(sky.CostFinal)) == 1
    assert pool.cost_final == recorded.of(sky.CostFinal)[0]
    assert len(recorded.of(sky.Error)) == 1
    assert not pool.is_active
    pool.close()


def test_a_failed_bootstrap_has_the_exit_code() -> None:
    """BootstrapFailed has the exit code of the command that failed."""
    with pytest.raises(sky.BootstrapFailed) as caught:
        one_node(provider=UnpreparableLocal()).open()
    assert caught.value.exit_code == 3


def test_the_bill_is_price_times_time() -> None:
    """Two nodes at 1 USD per second cost two dollars for each second from the request to their end, and the meter runs
    meanwhile.
    """
    before = time.monotonic()
    with one_node(nodes=2) as pool:
        opened = time.monotonic()
        first = pool.cost
        wait_until(lambda: pool.cost > first, "the meter to move")
        closing = time.monotonic()
    after = time.monotonic()
    bill = pool.cost_final
    assert bill is not None
    assert 2 * (closing - opened) <= bill.total_cost <= 2 * (after - before + 1)  # begun seconds are billed in full
    assert (bill.hourly_rate, bill.spot_count, bill.ondemand_count) == (7200.0, 0, 2)
    assert bill.savings_vs_ondemand == pytest.approx(0.0)
    assert bill.total_seconds <= after - before


@pytest.mark.parametrize(
    "place",
    [
        "skyward_core.session.event_emitter.Meter",
        "skyward_core.session.session_reaper.ReaperInput.of",
        "skyward_core.session.bookkeeping.Journal.open",
        "skyward_core.session.session.lifecycle.PoolMachines",
    ],
)
def test_a_pool_that_is_to_end_before_it_has_opened_rents_nothing(
    place: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A signal handler may call `terminate_now` at any moment of `open`; afterwards the pool may be opened again."""
    provider = NoCapacityProvider(folder=str(tmp_path))
    pool = sky.ComputePool(provider=provider, display="quiet")
    owner, _, name = place.rpartition(".")
    real = pydoc.locate(place)
    asked: list[str] = []

    def interrupted(*given: Any, **named: Any) -> Any:
        pool.terminate_now()
        return real(*given, **named)

    for verb in ("offers", "launch"):
        monkeypatch.setattr(
            NoCapacityProvider,
            verb,
            lambda *given, verb=verb, real=getattr(NoCapacityProvider, verb): (asked.append(verb), real(*given))[1],
        )
    with monkeypatch.context() as patch:
        patch.setattr(pydoc.locate(owner), name, interrupted)
        with pytest.raises(sky.PoolClosed):
            pool.open()
    assert asked == (["offers"] if name == "PoolMachines" else [])
    assert not pool.is_active
    monkeypatch.undo()
    with pytest.raises(sky.NoCapacity):
        pool.open()


def test_the_clock_of_a_pool_continues_after_errors(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """A step that always fails is logged once, and prevents no other step, in this round and the next."""
    monkeypatch.setattr(clock, "CLOCK_SECONDS", 0.001)
    opened = Session(sky.PoolSpec.of(display="quiet"), [sky.Local()], None)
    looks: list[int] = []

    def fails() -> None:
        raise OSError(errno.EMFILE, "Too many open files")

    def looks_around() -> None:
        looks.append(1)
        if len(looks) == 5:
            opened._ended.set()

    clock.Clock(opened.pool_id, [fails, looks_around], [], opened.stop, opened.events.log, time.monotonic()).run(
        opened._ended
    )
    opened.events.close()
    assert opened.events.flush()
    assert len(looks) == 5
    assert caplog.text.count("the clock of sky-") == 1
    assert "Too many open files" in caplog.text


def test_metrics_arrive_from_every_node(pool: sky.ComputePool, recorded: RecordedEvents) -> None:
    """Each node's samples of processor and memory arrive without a request and are plausible."""
    wait_until(lambda: {sample.node for sample in recorded.of(sky.Metrics)} == {0, 1}, "samples of both nodes")
    import psutil

    for sample in recorded.of(sky.Metrics):
        assert 0 <= sample.cpu_percent <= 100
        assert 0 < sample.memory_used_mb < sample.memory_total_mb
        assert sample.memory_total_mb == pytest.approx(psutil.virtual_memory().total / 1e6)
        assert sample.instance_id == pool.lease.nodes[sample.node].instance.id
        assert abs(sample.timestamp - time.time()) < 3600


def test_the_dask_client_can_be_used(pool: sky.ComputePool) -> None:
    """`dask_client()` is a working client of the same machines."""
    client = pool.dask_client()
    total = dask.delayed(sum)([dask.delayed(pow)(n, 2) for n in range(10)])
    assert client.compute(total).result(timeout=30) == 285
    assert len(members(client)) == 2
    assert double(1) >> pool == 2


def test_the_lease_has_the_machines_and_no_secret(pool: sky.ComputePool) -> None:
    """A lease is plain JSON: pool, provider, nodes and scheduler; it is equal after a conversion to JSON and back."""
    text = pool.lease.model_dump_json()
    assert sky.Lease.model_validate_json(text) == pool.lease
    assert "PRIVATE KEY" not in text
    assert [node.rank for node in pool.lease.nodes] == [0, 1]
    assert pool.lease.scheduler.startswith("tls://127.0.0.1:")


# ── a real environment ───────────────────────────────────────────────────────────────────────────────────────────────


@pytest.mark.timeout(600)
def test_an_image_with_packages_is_installed_once(monkeypatch: pytest.MonkeyPatch) -> None:
    """A node with `pip` has its own environment with the packages. The second start with the same image installs
    nothing.
    """
    image = sky.Image(pip=["iniconfig==2.1.0"])

    @sky.compute
    def look() -> tuple[str, str]:
        from importlib.metadata import version

        return version("iniconfig"), sys.executable

    recorded = RecordedEvents()
    with one_node(recorded, image=image, collect_metrics=True) as pool:
        installed, python = look() >> pool
        assert pool.map(double, range(20)) == [2 * n for n in range(20)]
        wait_until(lambda: recorded.of(sky.Metrics), "a sample of the node")
    assert installed == "2.1.0"
    assert python != sys.executable
    assert image.content_hash() in python
    packages = sorted((Path(python).parents[1] / "lib").rglob("*.dist-info"))
    before = {path: path.stat().st_mtime_ns for path in packages}
    monkeypatch.setenv("UV_OFFLINE", "1")
    monkeypatch.setenv("UV_CACHE_DIR", "/nonexistent/uv")
    with one_node(image=image) as pool:
        assert look() >> pool == (installed, python)
    assert {
        path: path.stat().st_mtime_ns for path in sorted((Path(python).parents[1] / "lib").rglob("*.dist-info"))
    } == before


@pytest.mark.timeout(600)
def test_a_package_that_does_not_exist_fails_the_bootstrap() -> None:
    """BootstrapFailed names the phase and shows the output of uv; the bill is emitted once."""
    recorded = RecordedEvents()
    with pytest.raises(sky.BootstrapFailed) as caught:
        one_node(recorded, image=sky.Image(pip=["skyward-no-such-package-5a1e==1"])).open()
    assert caught.value.phase == "deps"
    assert "skyward-no-such-package-5a1e" in "\n".join(caught.value.output)
    assert len(recorded.of(sky.CostFinal)) == 1


@sky.compute
def say_and_die(words: str, how: str) -> None:
    print(words)
    if how == "exit":
        sys.exit(4)
    os._exit(4)


@pytest.mark.parametrize("how", ["exit", "_exit"])
def test_a_crash_shows_the_last_lines_of_its_own_call_only(pool: sky.ComputePool, how: str) -> None:
    """The output of earlier calls on the same slot is not part of the crashed call's output."""
    for _ in range(4):
        shout("earlier") >> pool
    with pytest.raises(sky.CallCrashed) as caught:
        say_and_die("mine", how) >> pool
    assert caught.value.output == ("mine",)
    assert caught.value.exit_code == 4


@sky.compute
def shout(words: str) -> None:
    print(words)
