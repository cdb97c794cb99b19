"""Real pools: calls on local nodes, how the calls end, and what is left after the pool."""

import asyncio
import contextlib
import dataclasses
import gc
import logging
import os
import pydoc
import random
import signal
import subprocess
import sys
import threading
import time
import traceback
from collections.abc import Callable, Iterator
from concurrent.futures import CancelledError, Future
from functools import partial
from pathlib import Path
from typing import Any

import dask
import numpy as np
import psutil
import pytest

import skyward_core as sky
from skyward_core.machines.offers import Offer, Requirements
from tests.conftest import RecordedEvents, members
from tests.fakes import DyingLocal, NoCapacityProvider, StubbornLocal, UnpreparableLocal
from tests.pool.local import _crashing, block, crash, crashing, double, one_node, pid_of, runs  # noqa: F401 - fixtures
from tests.waiting import wait_until

FACTOR = 3


@dataclasses.dataclass(frozen=True)
class Point:
    x: int
    y: int


def helper(point: Point) -> int:
    return FACTOR * (point.x + point.y)


@sky.compute
def meet(folder: Path, mine: str, others: tuple[str, ...]) -> str:
    """Return when the other calls run too."""
    (folder / mine).touch()
    deadline = time.monotonic() + 60
    while not all((folder / other).exists() for other in others):
        assert time.monotonic() < deadline, "the others have not come"
        time.sleep(0.01)
    return mine


# ── the operators ────────────────────────────────────────────────────────────────────────────────────────────────────


def test_a_call_runs_in_another_process_and_returns_its_result(pool: sky.ComputePool) -> None:
    @sky.compute
    def work(points: list[Point], *, times: int) -> tuple[int, Point, int]:
        return times * sum(map(helper, points)), Point(FACTOR, -1), os.getpid()

    class Model:
        def __init__(self, weight: int) -> None:
            self.weight = weight

        @sky.compute
        def predict(self, x: int) -> int:
            return self.weight * x

    @sky.compute
    async def waits(x: int) -> int:
        await asyncio.sleep(0)
        return x + 1

    *found, pid = work([Point(1, 2), Point(3, 4)], times=2) >> pool
    assert found == [60, Point(3, -1)]
    assert pid != os.getpid()
    assert (Model(5).predict(8) >> pool, waits(1) >> pool) == (40, 2)


def test_a_broadcast_runs_on_all_nodes_at_once_in_their_order(pool: sky.ComputePool, tmp_path: Path) -> None:
    @sky.compute
    def where() -> sky.InstanceInfo:
        info = sky.instance_info()
        meet.local(tmp_path, str(info.rank), ("0", "1"))
        return info

    first, second = where() @ pool
    assert [(info.node, info.rank, info.total_nodes, info.world_size, info.is_head) for info in (first, second)] == [
        (0, 0, 2, 2, True),
        (1, 1, 2, 2, False),
    ]
    assert first.job_id == second.job_id
    assert (first.head_addr, first.head_port) == (second.head_addr, second.head_port)
    assert first.accelerators == []
    assert (where() @ pool)[0].job_id != first.job_id


def test_an_included_file_is_in_the_working_directory_of_each_node(pool: sky.ComputePool) -> None:
    """One of elsewhere lies there under its name. The directory is each node's own, and has no modules."""

    @sky.compute
    def look(name: str) -> tuple[str, Path, bool]:
        here = Path.cwd()
        return Path(name).read_text(), here, any(Path(entry or ".").resolve() == here for entry in sys.path)

    path = Path(__file__).parents[2] / "README.md"
    (text, first, is_first_searched), (other, second, is_second_searched) = look(path.name) @ pool
    assert text == other == path.read_text()
    assert first != second
    assert not is_first_searched | is_second_searched


def test_of_a_broadcast_only_the_first_node_s_output_is_shown_and_warnings_of_all(
    pool: sky.ComputePool, recorded: RecordedEvents
) -> None:
    """The events have all lines. Calls that are no broadcast are shown wherever they run."""

    @sky.compute
    def speaks(word: str) -> None:
        print(word)
        logging.getLogger("theirs").warning("careful")

    broadcast = pool.submit_broadcast(speaks("everywhere"))
    alone = pool.submit_all([speaks("alone")] * 2)
    for future in (*broadcast, *alone):
        future.result(60)
    shown = [
        [(line.node, line.line, line.is_shown) for line in recorded.of(sky.LogLine) if line.call_id == future.call_id]
        for future in broadcast
    ]
    assert shown == [
        [(0, "everywhere", True), (0, "careful", True)],
        [(1, "everywhere", False), (1, "careful", True)],
    ]
    ids = {future.call_id for future in alone}
    assert {line.is_shown for line in recorded.of(sky.LogLine) if line.call_id in ids} == {True}


def test_gathered_calls_run_at_once_and_keep_their_order(pool: sky.ComputePool, tmp_path: Path) -> None:
    assert (meet(tmp_path, "a", ("b",)) & meet(tmp_path, "b", ("a",))) >> pool == ("a", "b")
    assert sky.gather(double(1), double(2), double(3)) >> pool == (2, 4, 6)
    assert sky.gather() >> pool == ()


def test_map_keeps_the_order_of_two_thousand_calls_of_any_iterable(pool: sky.ComputePool) -> None:
    found = pool.map(lambda a, b: (a, b * b), range(2000), iter(range(2000, 4000)))
    assert found == [(a, (a + 2000) ** 2) for a in range(2000)]
    assert pool.map(double, []) == []


def test_long_calls_in_a_map_do_not_delay_the_short_ones(pool: sky.ComputePool, tmp_path: Path) -> None:
    """The calls grouped behind them run in the other slot meanwhile, each once."""

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


def test_submit_returns_a_future_at_once(pool: sky.ComputePool, tmp_path: Path) -> None:
    future = pool.submit(block(tmp_path, "one"))
    assert isinstance(future, Future)
    pid_of(tmp_path, "one")
    assert not future.done()
    (tmp_path / "go").touch()
    assert future.result(timeout=60) == "one"


# ── stopping ─────────────────────────────────────────────────────────────────────────────────────────────────────────


def test_a_waiting_call_that_is_cancelled_never_runs(pool: sky.ComputePool, tmp_path: Path) -> None:
    running = [pool.submit(block(tmp_path, name)) for name in ("a", "b")]
    for name in ("a", "b"):
        pid_of(tmp_path, name)
    waiting = pool.submit(block(tmp_path, "c"))
    assert waiting.cancel()
    with pytest.raises(CancelledError):
        waiting.result()
    (tmp_path / "go").touch()
    assert [future.result(timeout=60) for future in running] == ["a", "b"]
    assert double(2) @ pool == (4, 4)
    assert not (tmp_path / "c").exists()


def test_a_running_call_that_is_cancelled_is_stopped(pool: sky.ComputePool, tmp_path: Path) -> None:
    """Its slot takes the next call, and the other slot is not affected."""
    stopped, other = pool.submit(block(tmp_path, "stopped")), pool.submit(block(tmp_path, "other"))
    pid, other_pid = pid_of(tmp_path, "stopped"), pid_of(tmp_path, "other")
    assert stopped.cancel()
    assert stopped.cancelled()
    wait_until(lambda: not runs(pid), "the cancelled call's process to end")
    assert double(4) >> pool == 8
    assert runs(other_pid)
    (tmp_path / "go").touch()
    assert other.result(timeout=60) == "other"
    assert not other.cancel()


def test_a_cancelled_call_that_ignores_sigterm_is_killed_with_its_processes(
    pool: sky.ComputePool, tmp_path: Path
) -> None:
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


def test_the_first_error_of_a_gather_stops_the_rest(pool: sky.ComputePool, tmp_path: Path) -> None:
    @sky.compute
    def fail(folder: Path) -> None:
        while not (folder / "long").exists():
            time.sleep(0.01)
        raise LookupError("no luck")

    with pytest.raises(LookupError, match="no luck"):
        sky.gather(block(tmp_path, "long"), fail(tmp_path)) >> pool
    pid = pid_of(tmp_path, "long")
    wait_until(lambda: not runs(pid), "the other call to be stopped")


def test_an_interrupt_cancels_the_call_that_is_waited_for(pool: sky.ComputePool, tmp_path: Path) -> None:
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


# ── values ───────────────────────────────────────────────────────────────────────────────────────────────────────────


def test_a_generator_comes_back_as_a_list(pool: sky.ComputePool) -> None:
    @sky.compute
    def count(n: int) -> Iterator[int]:
        yield from range(n)

    assert pool.submit(count(4)).result() == pool.run(count(4)) == [0, 1, 2, 3]
    assert pool.map(count, [2, 3]) == [[0, 1], [0, 1, 2]]
    assert count(2) @ pool == (count(2) & count(2)) >> pool == ([0, 1], [0, 1])


def test_large_values_are_separate_copies_and_leave_no_memory_in_use(pool: sky.ComputePool) -> None:
    ids = tuple(node.instance.id for node in pool.lease.nodes)
    folders = [folder for folder in Path("/dev/shm").iterdir() if folder.name.endswith(ids)]
    assert folders

    @sky.compute
    def add_one(array: Any, how: str = "return") -> Any:
        match how:
            case "crash":
                os._exit(1)
            case "wait":
                time.sleep(300)
            case "raise":
                raise ValueError(how)
        array += 1
        return array

    rows = np.arange(6_250_000, dtype=np.float64)  # 50 MB
    result = add_one(rows) >> pool
    assert rows[0] == 0
    assert np.array_equal(result, rows + 1)
    result[0] = -1
    with pytest.raises(ValueError, match="raise"):
        add_one(rows, "raise") >> pool
    with pytest.raises(sky.CallCrashed):
        add_one(rows, "crash") >> pool
    pool.submit(add_one(rows, "wait")).cancel()
    wait_until(lambda: not any(list(folder.iterdir()) for folder in folders), "the memory folders to be empty")


def test_an_object_that_cannot_be_pickled_is_named(pool: sky.ComputePool) -> None:
    @sky.compute
    def give_back(value: Any = None) -> Any:
        return {"model": {"lock": threading.Lock()}} if value is None else value

    with pytest.raises(sky.NotPicklable, match="client") as caught:
        give_back({"client": [threading.Lock()]}) >> pool
    assert "client" in caught.value.path
    with pytest.raises(sky.NotPicklable, match="lock"):
        give_back() >> pool
    assert give_back(1) >> pool == 1


# ── output ───────────────────────────────────────────────────────────────────────────────────────────────────────────


def test_output_belongs_to_its_call_and_is_complete(pool: sky.ComputePool, recorded: RecordedEvents) -> None:
    """Each line is emitted for the call that wrote it, on its stream and in order, before the call's result. Lines of
    subprocesses, raw writes, bytes that are not UTF-8, and more than a pipe holds are included.
    """

    @sky.compute
    def talk(n: int) -> None:
        print("begin", n)
        print("warn", n, file=sys.stderr)
        subprocess.run(["sh", "-c", f"echo child {n}; echo child-err {n} >&2"], check=True)
        os.write(1, b"caf\xe9 \xe2\x82\xac\n")
        for line in range(20_000 if n == 0 else 1):
            print(f"{line:06d}", "x" * 60)
        print("no newline", n, end="")

    futures = [pool.submit(talk(n)) for n in range(20)]
    for n, future in enumerate(futures):
        future.result(timeout=60)
        many = [f"{line:06d} {'x' * 60}" for line in range(20_000 if n == 0 else 1)]
        lines = [f"begin {n}", f"child {n}", "caf\\xe9 €", *many, f"no newline {n}"]
        assert recorded.lines(future.call_id) == lines
        assert recorded.lines(future.call_id, "stderr") == [f"warn {n}", f"child-err {n}"]


def test_lines_come_while_the_call_runs_and_name_their_node(
    pool: sky.ComputePool, recorded: RecordedEvents, tmp_path: Path
) -> None:
    @sky.compute
    def talk(folder: Path) -> None:
        print("node-mark", sky.instance_info().rank, flush=True)
        while not (folder / "go").exists():
            time.sleep(0.01)

    def lines() -> list[tuple[int, str, str]]:
        found = [event for event in recorded.of(sky.LogLine) if event.line.startswith("node-mark")]
        return sorted((event.node, event.line, event.instance_id) for event in found)

    futures = pool.submit_broadcast(talk(tmp_path))
    wait_until(lambda: len(lines()) == 2, "the lines")
    assert not any(future.done() for future in futures)
    (tmp_path / "go").touch()
    assert lines() == [(node.rank, f"node-mark {node.rank}", node.instance.id) for node in pool.lease.nodes]
    for future in futures:
        future.result(timeout=60)


# ── errors and crashes ───────────────────────────────────────────────────────────────────────────────────────────────


def test_a_remote_exception_keeps_its_type_and_arguments(pool: sky.ComputePool) -> None:
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
    for words in ("in inner", 'raise OwnError("too far", x)', "KeyError: 'key'"):
        assert words in str(error.__cause__)
    assert any("node" in note for note in error.__notes__)


def test_errors_of_many_calls_stay_with_their_calls(pool: sky.ComputePool) -> None:
    @sky.compute
    def work(n: int) -> int:
        if n % 7 == 3:
            raise ValueError(n)
        return n

    for n, future in enumerate([pool.submit(work(n)) for n in range(300)]):
        error = future.exception(timeout=60)
        assert (error.args if error else future.result()) == ((n,) if n % 7 == 3 else n)


def test_a_call_that_interrupts_itself_does_not_interrupt_the_program(pool: sky.ComputePool) -> None:
    @sky.compute
    def fails() -> None:
        raise KeyboardInterrupt

    with pytest.raises(sky.RemoteError, match="KeyboardInterrupt"):
        fails() >> pool


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
    """It has the last lines of its own call, and not those of earlier ones on the slot."""
    for _ in range(2):
        sky.compute(lambda: print("earlier"))() >> crashing
    with pytest.raises(sky.CallCrashed) as caught:
        crash(how) >> crashing
    error = caught.value
    assert type(error) is kind
    assert (error.exit_code, error.node) == (exit_code, 0)
    assert error.output[0] == f"last words before {how}"
    assert "earlier" not in error.output
    assert f"last words before {how}" in str(error)
    assert crashing.map(double, range(10)) == [2 * n for n in range(10)]


def test_two_slots_of_a_node_work_at_once(crashing: sky.ComputePool, tmp_path: Path) -> None:
    @sky.compute
    def look(mine: str, other: str) -> tuple[tuple[Any, ...], tuple[str | None, ...]]:
        meet.local(tmp_path, mine, (other,))
        numbers = float(np.random.random()), random.random()  # noqa: NPY002 - it is the old generator that a fork copies
        return (os.getpid(), *numbers), tuple(os.environ.get(name) for name in ("FLAVOUR", "CUP"))

    (first, variables), (second, _) = (look("a", "b") & look("b", "a")) >> crashing
    assert all(a != b for a, b in zip(first, second, strict=True))
    assert variables == ("lemon", "1")


# ── the life of a pool ───────────────────────────────────────────────────────────────────────────────────────────────


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
def test_the_bill_is_emitted_once_and_last(way: Callable[[sky.ComputePool], None]) -> None:
    recorded = RecordedEvents()
    way(one_node(recorded, collect_metrics=False))
    wait_until(lambda: recorded.of(sky.CostFinal), "the bill")
    assert len(recorded.of(sky.CostFinal)) == 1
    assert isinstance(recorded.events[-1], sky.CostFinal)


def test_a_pool_whose_machines_are_not_confirmed_gone_has_a_receipt(monkeypatch: pytest.MonkeyPatch) -> None:
    """It has the cost so far, and names the machines that are left; closing again completes it."""
    monkeypatch.setattr(StubbornLocal, "trouble", ["503 from the provider"])
    pool = sky.ComputePool(provider=StubbornLocal(price_per_hour=3600), nodes=2, display="quiet")
    with pytest.raises(sky.InstancesLeft) as caught, pool:
        assert double(1) >> pool == 2
    so_far = pool.receipt
    assert so_far is not None
    assert {one["cloud_id"] for one in so_far["left"]} == set(caught.value.ids)
    assert so_far["ended_at"] is None
    assert so_far["total_cost_usd"] > 0
    StubbornLocal.trouble.clear()
    pool.close()
    assert pool.receipt is not None
    assert pool.receipt["left"] == []
    assert pool.receipt["total_cost_usd"] >= so_far["total_cost_usd"]


@pytest.mark.parametrize(
    ("provider", "phase", "words", "exit_code"),
    [(UnpreparableLocal, "deps", "nonesuch", 3), (DyingLocal, "", "going down", None)],
)
def test_a_node_that_cannot_be_prepared_is_an_error_with_its_last_lines(
    provider: type[sky.Local], phase: str, words: str, exit_code: int | None
) -> None:
    """The bill is emitted once, and nothing is left running."""
    recorded = RecordedEvents()
    pool = one_node(recorded, provider=provider(price_per_hour=3600.0))
    with pytest.raises(sky.BootstrapFailed, match=words) as caught:
        pool.open()
    assert caught.value.phase == phase
    assert exit_code in (None, caught.value.exit_code)
    assert words in "\n".join(caught.value.output)
    assert [pool.cost_final] == recorded.of(sky.CostFinal)
    assert len(recorded.of(sky.Error)) == 1
    assert not pool.is_active
    pool.close()


@pytest.mark.parametrize(
    "place",
    [
        "skyward_core.session.bookkeeping.Meter",
        "skyward_core.session.departure.ReaperInput.of",
        "skyward_core.session.bookkeeping.Journal.open",
        "skyward_core.session.session.lifecycle.PoolMachines",
    ],
)
def test_a_pool_that_is_to_end_before_it_has_opened_rents_nothing(
    place: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A signal handler may call `terminate_now` at any moment of `open`; afterwards the pool may be opened again."""
    pool = sky.ComputePool(provider=NoCapacityProvider(folder=str(tmp_path)), display="quiet")
    owner, _, name = place.rpartition(".")
    real = pydoc.locate(place)
    asked: list[str] = []

    def interrupted(*given: Any, **named: Any) -> Any:
        pool.terminate_now()
        return real(*given, **named)

    for verb in ("offers", "launch"):
        method = getattr(NoCapacityProvider, verb)
        noted = lambda *given, verb=verb, method=method: (asked.append(verb), method(*given))[1]
        monkeypatch.setattr(NoCapacityProvider, verb, noted)
    with monkeypatch.context() as patch:
        patch.setattr(pydoc.locate(owner), name, interrupted)
        with pytest.raises(sky.PoolClosed):
            pool.open()
    assert asked == (["offers"] if name == "PoolMachines" else [])
    assert not pool.is_active
    monkeypatch.undo()
    with pytest.raises(sky.NoCapacity):
        pool.open()


def test_metrics_arrive_from_every_node(pool: sky.ComputePool, recorded: RecordedEvents) -> None:
    wait_until(lambda: {sample.node for sample in recorded.of(sky.Metrics)} == {0, 1}, "samples of both nodes")
    for sample in recorded.of(sky.Metrics):
        assert 0 <= sample.cpu_percent <= 100
        assert 0 < sample.memory_used_mb < sample.memory_total_mb
        assert sample.memory_total_mb == pytest.approx(psutil.virtual_memory().total / 1e6)
        assert sample.instance_id == pool.lease.nodes[sample.node].instance.id


def test_the_dask_client_can_be_used(pool: sky.ComputePool) -> None:
    client = pool.dask_client()
    total = dask.delayed(sum)([dask.delayed(pow)(n, 2) for n in range(10)])
    assert client.compute(total).result(timeout=60) == 285
    assert len(members(client)) == 2
    assert double(1) >> pool == 2


def test_the_lease_has_the_machines_and_no_secret(pool: sky.ComputePool) -> None:
    text = pool.lease.model_dump_json()
    assert sky.Lease.model_validate_json(text) == pool.lease
    assert "PRIVATE KEY" not in text
    assert [node.rank for node in pool.lease.nodes] == [0, 1]
    assert pool.lease.scheduler.startswith("tls://127.0.0.1:")


@pytest.mark.timeout(600)
def test_an_image_with_packages_is_installed_once(monkeypatch: pytest.MonkeyPatch) -> None:
    """A node with `pip` has its own environment; the second start with the same image installs nothing."""
    image = sky.Image(pip=["iniconfig==2.1.0"])

    @sky.compute
    def look() -> tuple[str, str]:
        from importlib.metadata import version

        return version("iniconfig"), sys.executable

    recorded = RecordedEvents()
    with one_node(recorded, image=image, collect_metrics=True) as pool:
        installed, python = look() >> pool
        wait_until(lambda: recorded.of(sky.Metrics), "a sample of the node")
    assert installed == "2.1.0"
    assert python != sys.executable
    assert image.content_hash() in python

    def times() -> dict[Path, int]:
        return {path: path.stat().st_mtime_ns for path in (Path(python).parents[1] / "lib").rglob("*.dist-info")}

    before = times()
    monkeypatch.setenv("UV_OFFLINE", "1")
    monkeypatch.setenv("UV_CACHE_DIR", "/nonexistent/uv")
    with one_node(image=image) as pool:
        assert look() >> pool == (installed, python)
    assert times() == before


@pytest.mark.timeout(600)
def test_a_package_that_does_not_exist_fails_the_bootstrap() -> None:
    recorded = RecordedEvents()
    with pytest.raises(sky.BootstrapFailed) as caught:
        one_node(recorded, image=sky.Image(pip=["skyward-no-such-package-5a1e==1"])).open()
    assert caught.value.phase == "deps"
    assert "skyward-no-such-package-5a1e" in "\n".join(caught.value.output)
    assert len(recorded.of(sky.CostFinal)) == 1


@pytest.mark.filterwarnings("ignore::ResourceWarning")
@pytest.mark.parametrize("named", [{}, {"name": "forgotten-in-its-own-thread"}])
@pytest.mark.parametrize("where", ["skyward-events", "skyward-engine", "IO loop"])
def test_a_pool_that_is_collected_in_a_thread_of_its_own_is_closed(named: dict[str, Any], where: str) -> None:
    """Any thread may run the collector at any line; one that closes the pool itself would wait for itself."""
    kept: list[sky.ComputePool] = []
    gone_on: list[str] = []
    recorded = RecordedEvents()

    def forget() -> None:
        kept.clear()
        gc.collect()
        gone_on.append(threading.current_thread().name)

    def on_event(event: sky.SkywardEvent) -> None:
        recorded(event)
        if isinstance(event, sky.LogLine) and where == "skyward-events":
            forget()

    pool = sky.ComputePool(provider=sky.Local(), display="quiet", on_event=on_event, **named).open()
    (node,) = pool.lease.nodes
    owner = pool._session.cluster.owner
    kept.append(pool)
    if where == "skyward-events":
        pool.submit(says_hello())
    elif where == "skyward-engine":
        owner.post(forget)
    else:
        owner.present_connection.client.loop.add_callback(forget)
    del pool, owner
    wait_until(lambda: node.instance.id not in {instance.id for instance in sky.Local().instances()}, "its end")
    wait_until(lambda: recorded.of(sky.CostFinal), "the bill")
    assert gone_on == [where]


@sky.compute
def says_hello() -> None:
    print("hello")


class Unheard(sky.Local):
    """A provider that does not answer, four functions deep."""

    def offers(self, want: Requirements) -> list[Offer]:
        try:
            raise OSError("no route to host")
        except OSError as error:
            raise sky.ProviderFailed("the cloud does not answer") from error


def test_the_frames_of_a_failed_opening_are_in_the_log_and_not_in_the_traceback(
    caplog: pytest.LogCaptureFixture,
) -> None:
    with caplog.at_level(logging.DEBUG, logger="skyward_core"), pytest.raises(sky.ProviderFailed) as raised:
        sky.ComputePool(provider=Unheard(), display="quiet").open()
    lines = "".join(traceback.format_exception(raised.value))
    assert "OSError: no route to host\n\nThe above exception was the direct cause" in lines
    assert "in offers" not in lines
    assert any("in offers" in record.getMessage() for record in caplog.records)
