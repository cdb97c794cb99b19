"""What a user expects of any task runner of Prefect, each behaviour by its name; docs/prefect.md has the table.

One flow run holds one pool for the whole file: a test hands it a function, which runs in the flow's body.
"""

import asyncio
import logging
import os
import sys
import threading
import time
from collections.abc import Iterator
from dataclasses import dataclass
from datetime import timedelta
from pathlib import Path
from typing import Any
from uuid import UUID

import pytest

pytest.importorskip("prefect")
from tests.integrations import prefect_server  # isort: skip
from tests.hostile_texts import HOSTILE_TEXTS, refuse_hidden
from tests.integrations.bare_node import BARE, importable

from tests.integrations.prefect_server import InFlow, asked, is_alive, logs  # isort: skip
from tests.waiting import wait_until  # isort: skip

from prefect import allow_failure, flow, get_run_logger, tags, task, unmapped  # isort: skip
from prefect.cache_policies import NO_CACHE
from prefect.client.orchestration import get_client
from prefect.client.schemas.objects import StateType
from prefect.exceptions import MappingLengthMismatch, MappingMissingIterable, ObjectNotFound, UnfinishedRun
from prefect.futures import PrefectFuture, as_completed, wait
from prefect.runtime import flow_run as current_run
from prefect.states import Completed, State
from prefect.tasks import task_input_hash
from prefect.transactions import transaction
from prefect.utilities.annotations import quote

import skyward_core as sky
from prefect_skyward import SkywardTaskRunner

pytestmark = [
    pytest.mark.filterwarnings("default")  # Prefect's own warnings are not our faults
]
SLOTS = 4

api = pytest.fixture(scope="module")(prefect_server.served)


@pytest.fixture(scope="module")
def pools() -> list[sky.PoolReady]:
    """The pools that have been opened."""
    return []


@pytest.fixture(scope="module")
def in_flow(pools: list[sky.PoolReady], api: str) -> Iterator[InFlow]:
    """Call a function in the body of a flow with our runner, and return its result or raise its error."""

    def keep(event: sky.SkywardEvent) -> None:
        if isinstance(event, sky.PoolReady):
            pools.append(event)

    with prefect_server.flow_body(
        SkywardTaskRunner(provider=sky.Local(), image=BARE, concurrency=SLOTS, on_event=keep, idle_timeout=None)
    ) as call:
        yield call


@task(cache_policy=NO_CACHE)
def add(a: Any, b: Any = 0) -> Any:
    return a + b


@task(cache_policy=NO_CACHE)
def fail(message: str = "on purpose") -> None:
    raise ValueError(message)


@task(cache_policy=NO_CACHE)
def identity(x: Any) -> Any:
    return x


@task(cache_policy=NO_CACHE)
def meet(folder: Path, name: str, others: int) -> int:
    """Return when as many calls have come: they run at the same time."""
    (folder / name).touch()
    deadline = time.monotonic() + 60
    while len(list(folder.iterdir())) < others and time.monotonic() < deadline:
        time.sleep(0.02)
    return len(list(folder.iterdir()))


@task(cache_policy=NO_CACHE)
async def meet_async(folder: Path, name: str, others: int) -> int:
    return await asyncio.to_thread(meet.fn, folder, name, others)


@task(cache_policy=NO_CACHE)
def interrupted() -> None:
    raise KeyboardInterrupt


@task(cache_policy=NO_CACHE)
def wait_for_file(path: Path) -> str:
    while not path.exists():
        time.sleep(0.02)
    return "done"


def test_submit_returns_a_future_at_once_or_the_final_state(in_flow: InFlow, tmp_path: Path) -> None:
    """The future has the id of a task run, and its result."""

    def body() -> tuple[PrefectFuture[Any], bool, Any, State[Any]]:
        future = wait_for_file.submit(tmp_path / "go")
        is_final = future.state.is_final()
        (tmp_path / "go").touch()
        return future, is_final, future.result(), add.submit(1, b=2, return_state=True)

    future, is_final, result, state = in_flow(body)
    assert (is_final, result, future.state.type.value) == (False, "done", "COMPLETED")
    assert (state.is_completed(), state.result()) == (True, 3)
    (run,) = wait_until(lambda: asked("/task_runs/filter", {"task_runs": {"id": {"any_": [str(future.task_run_id)]}}}))
    assert run["name"].startswith("wait_for_file-")


@task
def where() -> tuple[int, list[str], int | None]:
    info = sky.instance_info()
    return os.getpid(), importable(), info.node if info else None


@task
def squares(n: int) -> Iterator[int]:
    for i in range(n):
        yield i * i


@task
async def slow_squares(n: int) -> Any:
    for i in range(n):
        yield i * i


def test_each_kind_of_function_runs_on_a_node_without_prefect(in_flow: InFlow) -> None:
    """The engine is in the flow's process. The items of a generator come as a list."""
    pid, modules, node = in_flow(lambda: where.submit().result())
    assert (pid != os.getpid(), modules, node) == (True, ["six"], 0)
    assert in_flow(lambda: (squares.submit(4).result(), slow_squares.submit(3).result())) == ([0, 1, 4, 9], [0, 1, 4])


@pytest.mark.parametrize("one", [meet, meet_async], ids=["sync", "async"])
def test_tasks_run_at_the_same_time(in_flow: InFlow, tmp_path: Path, one: Any) -> None:
    """As many as the pool has slots."""
    names = [str(i) for i in range(SLOTS)]
    found = in_flow(lambda: one.map(unmapped(tmp_path), names, unmapped(SLOTS)).result())
    assert found == [SLOTS] * SLOTS


# ── what travels ─────────────────────────────────────────────────────────────────────────────────────────────────────


def test_values_that_only_cloudpickle_can_carry_go_both_ways(in_flow: InFlow) -> None:
    factor = 3
    returned = in_flow(lambda: identity.submit(lambda x: factor * x).result())
    assert returned(2) == 6


@dataclass(frozen=True)
class Point:
    x: int
    y: int


OFFSET = Point(10, 20)


def shifted(point: Point) -> Point:
    return Point(point.x + OFFSET.x, point.y + OFFSET.y)


@task
def shift(point: Point) -> Point:
    return shifted(point)


@task
def shift_twice(point: Point) -> Point:
    get_run_logger().warning("shifting %s twice", point)
    return shift.fn(shift(point))


class Scale:
    def __init__(self, factor: int) -> None:
        self.factor = factor

    @task
    def of(self, x: int) -> int:
        return self.factor * x


@task
@sky.compute
def halved(x: float) -> float:
    return x / 2


def test_objects_that_the_function_uses_travel_too(in_flow: InFlow) -> None:
    def travel() -> tuple[Any, ...]:
        moved = shift_twice.submit(Point(1, 2)).result()
        return current_run.id, moved, Scale(3).of.submit(5).result(), halved.submit(3.0).result()

    flow_run_id, moved, *numbers = in_flow(travel)
    assert (moved, numbers) == (Point(21, 42), [15, 1.5])
    assert type(moved) is Point
    wait_until(
        lambda: [
            record
            for record in logs(UUID(flow_run_id))
            if (record["level"], record["message"]) == (30, "[node 0] shifting Point(x=1, y=2) twice")
        ]
    )


# ── inputs ───────────────────────────────────────────────────────────────────────────────────────────────────────────


def test_inputs(in_flow: InFlow) -> None:
    """Futures are resolved, also within collections and as the list that is mapped; a quoted input is passed as it is."""

    def body() -> Any:
        one, two = add.submit(1), add.submit(2)
        nested = identity.submit({"list": [one, {"two": two}], "tuple": (one,)}).result()
        mapped = add.map(identity.submit([1, 2, 3]), 10).result()
        return nested, mapped, identity.submit(quote([1, 2])).result()

    assert in_flow(body) == ({"list": [1, {"two": 2}], "tuple": (1,)}, [11, 12, 13], [1, 2])


def test_wait_for_orders_tasks_without_data(in_flow: InFlow, tmp_path: Path) -> None:
    """Sleeps: without the order the second task would be first."""

    @task(cache_policy=NO_CACHE)
    def write(path: Path) -> None:
        time.sleep(0.2)
        path.write_text("written")

    @task(cache_policy=NO_CACHE)
    def read(path: Path) -> str:
        return path.read_text()

    path = tmp_path / "shared"
    assert in_flow(lambda: read.submit(path, wait_for=[write.submit(path)]).result()) == "written"


def test_a_task_whose_input_has_failed_does_not_run_unless_it_allows_failures(in_flow: InFlow) -> None:
    def body() -> tuple[Any, Any, Any]:
        failed = fail.submit()
        after, waited = add.submit(failed), add.submit(1, wait_for=[failed])
        allowed = identity.submit(allow_failure(failed))
        wait([after, waited, allowed])
        return after.state, waited.state, allowed.result()

    after, waited, allowed = in_flow(body)
    assert (after.name, waited.name) == ("NotReady", "NotReady")
    assert isinstance(allowed, ValueError)


def test_map_repeats_constants_and_refuses_what_cannot_be_mapped(in_flow: InFlow) -> None:
    def body() -> list[Any]:
        with pytest.raises(MappingLengthMismatch):
            add.map([1, 2], [1, 2, 3])
        with pytest.raises(MappingMissingIterable):
            add.map(1, 2)
        return add.map(add.map([1, 2]), unmapped([])).result(raise_on_failure=False)

    assert all(isinstance(one, TypeError) for one in in_flow(body))


# ── ends ─────────────────────────────────────────────────────────────────────────────────────────────────────────────


def test_an_exception_of_the_task_is_the_failure_of_its_run(in_flow: InFlow) -> None:
    """It arrives as itself; its cause is the traceback on the node."""

    def body() -> State[Any]:
        future = fail.submit()
        with pytest.raises(ValueError, match="on purpose") as caught:
            future.result()
        assert "in fail" in str(caught.value.__cause__)
        assert isinstance(future.result(raise_on_failure=False), ValueError)
        return future.state

    state = in_flow(body)
    assert state.is_failed()
    assert "ValueError: on purpose" in state.message


def test_an_interrupt_in_a_task_ends_its_run_and_nothing_else(in_flow: InFlow) -> None:
    def body() -> tuple[State[Any], int]:
        future = interrupted.submit()
        future.wait()
        return future.state, add.submit(1, 2).result()

    state, after = in_flow(body)
    assert state.is_crashed() or state.is_failed()
    assert after == 3


def test_a_task_may_return_a_state_if_its_node_has_prefect(api: str) -> None:
    """Without packages, this node has those of this process. `test_bare_node.py` has the error of one without Prefect."""

    @task(cache_policy=NO_CACHE)
    def own_state() -> Any:
        return Completed(name="Fine", data=5)

    with prefect_server.flow_body(SkywardTaskRunner(provider=sky.Local())) as in_flow:
        state = in_flow(lambda: own_state.submit(return_state=True))
    assert (state.name, state.is_completed()) == ("Fine", True)


def test_wait_as_completed_timeouts_and_callbacks_work_with_our_futures(in_flow: InFlow, tmp_path: Path) -> None:
    def body() -> tuple[list[int], int, int, bool]:
        seen = threading.Event()
        slow, quick = wait_for_file.submit(tmp_path / "go"), add.map([1, 2, 3])
        slow.add_done_callback(lambda done: seen.set() if done is slow else None)
        ended = [future.result() for future in as_completed(list(quick), timeout=60)]
        done, pending = wait([*quick, slow], timeout=0.1)
        with pytest.raises((TimeoutError, UnfinishedRun)):
            slow.result(timeout=0.1)
        (tmp_path / "go").touch()
        slow.wait()
        return sorted(ended), len(done), len(pending), seen.wait(60)

    assert in_flow(body) == ([1, 2, 3], 3, 1, True)


@task(retries=2, cache_policy=NO_CACHE)
def third_time_lucky(path: Path, how: str) -> int:
    attempts = int(path.read_text()) + 1 if path.exists() else 1
    path.write_text(str(attempts))
    if attempts == 1:
        if how == "crash":
            os._exit(3)
        raise ValueError("not yet")
    return attempts


def runs_of(client: Any, task_run_id: UUID) -> int:
    """How often a task run has begun, by the server, which gets task runs as events, with a delay."""
    try:
        return client.read_task_run(task_run_id).run_count
    except ObjectNotFound:
        return 0


def test_retries_are_new_calls(in_flow: InFlow, tmp_path: Path) -> None:
    """Prefect's retries run the function again, after its own exception and after the death of its process."""

    def stubborn() -> list[int]:
        futures = [third_time_lucky.submit(tmp_path / how, how) for how in ("raise", "crash")]
        values = [future.result() for future in futures]
        with get_client(sync_client=True) as client:
            wait_until(lambda: [runs_of(client, future.task_run_id) for future in futures] == [2, 2])
        return values

    assert in_flow(stubborn) == [2, 2]


class Busy(Exception):
    """Cannot be rebuilt by pickle's default."""

    def __init__(self, code: int, wait: str) -> None:
        super().__init__(f"busy {code}")
        self.wait = wait


def only_if_it_passes(_task: Any, _run: Any, state: Any) -> bool:
    return isinstance(state.data, Busy) and state.data.wait == "a moment"


@task(retries=3, retry_condition_fn=only_if_it_passes, cache_policy=NO_CACHE)
def busy(path: Path) -> None:
    attempts = int(path.read_text()) + 1 if path.exists() else 1
    path.write_text(str(attempts))
    raise Busy(503, "a moment" if attempts < 3 else "for ever")


def test_a_retry_condition_sees_the_function_s_own_exception(in_flow: InFlow, tmp_path: Path) -> None:
    with pytest.raises(Busy) as caught:
        in_flow(lambda: busy.submit(tmp_path / "n").result())
    assert caught.value.wait == "for ever"
    assert (tmp_path / "n").read_text() == "3"


def far_tensor(folder: Path, name: str) -> Any:
    """Note the run; return an object of a library that this process does not have."""
    import types

    (folder / f"{name}-{time.monotonic_ns()}").touch()
    module = sys.modules["far_library"] = types.ModuleType("far_library")
    module.__file__ = "/opt/python/site-packages/far_library.py"
    exec("class Tensor: pass", vars(module))
    return module.Tensor()


async def always(_task: Any, _run: Any, _state: Any) -> bool:
    return True


@task(retries=2, cache_policy=NO_CACHE)
def plain_weights(folder: Path) -> Any:
    return far_tensor(folder, "plain")


@task(retries=2, retry_condition_fn=always, cache_policy=NO_CACHE)
async def async_weights(folder: Path) -> Any:
    return far_tensor(folder, "async")


def test_work_is_not_repeated_if_its_result_cannot_be_loaded_here(in_flow: InFlow, tmp_path: Path) -> None:
    """The function has succeeded and is paid for; another try would fail here again."""

    def weighing() -> UUID:
        for future in [each.submit(tmp_path) for each in (plain_weights, async_weights)]:
            with pytest.raises(sky.ResultNotLoaded, match="the call succeeded on node 0") as caught:
                future.result()
            assert caught.value.missing == "far_library"
        return UUID(current_run.id)

    flow_run_id = in_flow(weighing)
    assert sorted(path.name.partition("-")[0] for path in tmp_path.iterdir()) == ["async", "plain"]
    wait_until(
        lambda: len([r for r in logs(flow_run_id) if r["level"] == 40 and "is not tried again" in r["message"]]) == 2
    )


def ran(folder: Path, name: str) -> None:
    (folder / f"{name}-{time.monotonic_ns()}").touch()


@task(retries=2, cache_policy=NO_CACHE)
def with_a_lock(folder: Path) -> Any:
    ran(folder, "lock")
    return {"the": [threading.Lock()]}


@task(retries=2, cache_policy=NO_CACHE)
async def gives_up(folder: Path) -> None:
    ran(folder, "gives up")
    raise sky.GiveUp("the table has no such column")


@task(retries=2, cache_policy=NO_CACHE)
def skips(folder: Path) -> None:
    ran(folder, "skips")
    raise sky.Skip("no new rows")


def test_what_another_try_meets_again_is_not_tried_again(in_flow: InFlow, tmp_path: Path) -> None:
    """A result that cannot travel, and what the function asks for. A skipped task run is Completed, by that name."""

    def body() -> Any:
        lock, given_up, skipped = [each.submit(tmp_path) for each in (with_a_lock, gives_up, skips)]
        with pytest.raises(sky.NotPicklable) as caught:
            lock.result()
        assert caught.value.path == "result['the'][0]"
        with pytest.raises(sky.GiveUp, match="the table has no such column"):
            given_up.result()
        skipped.wait()
        return skipped.result(), skipped.state.type, skipped.state.name, skipped.state.message

    assert in_flow(body) == (None, StateType.COMPLETED, "Skipped", "no new rows")
    assert sorted(path.name.partition("-")[0] for path in tmp_path.iterdir()) == ["gives up", "lock", "skips"]


@task(timeout_seconds=4, cache_policy=NO_CACHE)  # the time in which it has to begin
def sleeper(path: Path) -> None:
    path.write_text(str(os.getpid()))
    time.sleep(600)


@task(timeout_seconds=4, cache_policy=NO_CACHE)  # the time in which it has to begin
async def async_sleeper(path: Path) -> None:
    path.write_text(str(os.getpid()))  # noqa: ASYNC240
    await asyncio.sleep(600)


def test_a_timeout_stops_the_work_on_the_node(in_flow: InFlow, tmp_path: Path) -> None:
    def impatient() -> int:
        for sleep in (sleeper, async_sleeper):
            path = tmp_path / sleep.name
            future = sleep.submit(path)
            future.wait()
            assert future.state.name == "TimedOut"
            wait_until(lambda path=path: not is_alive(int(path.read_text())))
        return add.submit(1, 1).result()

    assert in_flow(impatient) == 2


# ── what the engine does ─────────────────────────────────────────────────────────────────────────────────────────────


def test_hooks_and_rollbacks_run_in_the_flow_s_process(in_flow: InFlow) -> None:
    ran: list[tuple[str, int]] = []

    def note(one: Any, run: Any, state: Any) -> None:
        ran.append((state.name, os.getpid()))

    good, bad = add.with_options(on_completion=[note]), fail.with_options(on_failure=[note])
    staged = add.with_options(cache_policy=NO_CACHE)
    staged.on_rollback(lambda _: ran.append(("rolled back", os.getpid())))

    def body() -> None:
        good.submit(1).wait()
        bad.submit().wait()
        with pytest.raises(LookupError), transaction():
            staged.submit(1).result()
            raise LookupError

    in_flow(body)
    assert ran == [(name, os.getpid()) for name in ("Completed", "Failed", "rolled back")]


@task(cache_key_fn=task_input_hash, cache_expiration=timedelta(minutes=5), persist_result=True)
def counted(path: Path) -> int:
    path.write_text(path.read_text() + "x" if path.exists() else "x")
    return len(path.read_text())


def test_a_cached_result_is_not_computed_again(in_flow: InFlow, tmp_path: Path) -> None:
    """The key contains the user's code: another function of the same name is another entry."""

    def renamed(path: Path) -> int:
        return -counted.fn(path)

    renamed.__name__ = renamed.__qualname__ = counted.fn.__qualname__
    other = task(renamed, cache_key_fn=task_input_hash, cache_expiration=timedelta(minutes=5), persist_result=True)

    def body() -> list[Any]:
        values = [one.submit(tmp_path / "n").result() for one in (counted, counted, other)]
        return [*values, counted.submit(tmp_path / "n", return_state=True).name]

    assert in_flow(body) == [1, 1, -2, "Cached"]


def test_tags_of_the_flow_s_body_are_those_of_the_task_run(in_flow: InFlow) -> None:
    def body() -> PrefectFuture[Any]:
        with tags("outer"):
            future = add.with_options(tags=["own"]).submit(1)
        future.wait()
        return future

    future = in_flow(body)
    (run,) = wait_until(lambda: asked("/task_runs/filter", {"task_runs": {"id": {"any_": [str(future.task_run_id)]}}}))
    assert {"outer", "own"} <= set(run["tags"])


def test_a_limit_of_a_tag_lets_one_task_run_at_a_time(in_flow: InFlow, tmp_path: Path) -> None:
    """Sleeps: without the limit the second task would run meanwhile."""

    @task(tags=["one at a time"], cache_policy=NO_CACHE)
    def alone(folder: Path, name: str) -> int:
        (folder / name).touch()
        others = len(list(folder.iterdir()))
        time.sleep(0.2)
        (folder / name).unlink()
        return others

    with get_client(sync_client=True) as client:
        client.create_concurrency_limit(tag="one at a time", concurrency_limit=1)
    assert in_flow(lambda: alone.map(unmapped(tmp_path), ["a", "b"]).result()) == [1, 1]


def test_a_subflow_runs_its_tasks_on_the_pool_around_it_and_its_failure_ends_nothing_else(in_flow: InFlow) -> None:
    @flow(task_runner=SkywardTaskRunner(inherit=True))
    def inner(fails: bool) -> list[int]:
        values = add.map([1, 2], unmapped(1)).result()
        if fails:
            raise LookupError("inner")
        return values

    def body() -> tuple[list[int], bool, int]:
        values = inner(fails=False)
        return values, inner(fails=True, return_state=True).is_failed(), add.submit(1, 1).result()

    assert in_flow(body) == ([2, 3], True, 2)


@task
def log_all() -> None:
    log = logging.getLogger("mine")
    log.debug("not kept: nobody has asked for it")
    log.info("told")
    logging.getLogger("extra").debug("by a logger of PREFECT_LOGGING_EXTRA_LOGGERS")
    log.warning("careful")
    try:
        raise ValueError("boom")
    except ValueError:
        log.exception("it failed")
    get_run_logger().error("by the run's logger")
    get_run_logger().debug("not kept: the run's level is INFO")
    print("only printed")


def test_log_records_of_a_node_keep_their_level_and_their_traceback(
    in_flow: InFlow, monkeypatch: pytest.MonkeyPatch
) -> None:
    def talk() -> tuple[UUID, str]:
        monkeypatch.setattr(logging.getLogger("extra"), "level", logging.DEBUG)
        future = log_all.submit()
        future.result()
        return UUID(current_run.id), str(future.task_run_id)

    flow_run_id, task_run_id = in_flow(talk)

    def from_the_node() -> list[tuple[int, str]]:
        return [
            (record["level"], record["message"])
            for record in logs(flow_run_id)
            if record["task_run_id"] == task_run_id and record["message"].startswith("[node 0] ")
        ]

    found = wait_until(lambda: found if len(found := from_the_node()) >= 6 else None)
    assert sorted(found)[0] == (10, "[node 0] by a logger of PREFECT_LOGGING_EXTRA_LOGGERS")
    assert (20, "[node 0] only printed") in found
    assert (20, "[node 0] told") in found
    assert (30, "[node 0] careful") in found
    assert (40, "[node 0] by the run's logger") in found
    (failure,) = [message for level, message in found if level == 40 and "it failed" in message]
    assert "\n[node 0] Traceback (most recent call last):\n" in failure
    assert failure.endswith("\n[node 0] ValueError: boom")
    assert len(found) == 6


@task
def log_hostile_texts(texts: list[str]) -> None:
    log = logging.getLogger("mine")
    log.info("first")
    for text in texts:
        log.info("said: %s", text)
        print("printed:", text.replace("\n", " "))


def test_no_text_of_a_node_loses_the_lines_of_the_others(in_flow: InFlow) -> None:
    """Prefect sends lines in batches. A record that could not be encoded would take those of all task runs with it;
    PostgreSQL would refuse a batch with NUL.
    """
    texts = list(HOSTILE_TEXTS.values())

    def talk() -> UUID:
        wait([log_hostile_texts.submit(texts), add.submit(1, 1)])
        return UUID(current_run.id)

    flow_run_id = in_flow(talk)

    def of_the_node() -> list[str] | None:
        found = [one["message"] for one in logs(flow_run_id) if one["message"].startswith("[node 0] ")]
        return found if sum("said: " in one for one in found) == len(texts) else None

    found = wait_until(of_the_node)
    for message in found:
        refuse_hidden(message)
        assert all(line.startswith("[node 0] ") for line in message.split("\n"))
    assert any("said: a\\udc80\\ud800b" in one for one in found)
    assert any("said: a\\x00b" in one for one in found)


def test_one_pool_has_run_them_all(in_flow: InFlow, pools: list[sky.PoolReady]) -> None:
    """Also after the failures above."""
    assert in_flow(lambda: add.submit(20, 22).result()) == 42
    assert len(pools) == 1
