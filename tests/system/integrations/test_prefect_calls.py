"""Calls of task runs, on a real API and real nodes: what travels, what fails, what is logged.

One flow run holds one pool for the whole file, as in test_prefect_behaviour.py.
"""

import asyncio
import os
import sys
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any
from uuid import UUID

import pytest

pytest.importorskip("prefect")

from tests.integrations import prefect_server  # noqa: I001 - before Prefect
from tests.integrations.prefect_server import InFlow, is_alive, logs, wait_for

from prefect import get_run_logger, task, unmapped
from prefect.cache_policies import NO_CACHE
from prefect.client.orchestration import get_client
from prefect.exceptions import ObjectNotFound
from prefect.runtime import flow_run as current_run

import skyward_core as sky
from prefect_skyward import SkywardTaskRunner

pytestmark = [
    pytest.mark.filterwarnings("default"),  # Prefect's own warnings are not our faults
]

api = pytest.fixture(scope="module", autouse=True)(prefect_server.served)


@pytest.fixture(scope="module")
def in_flow(api: str) -> Iterator[InFlow]:
    """Call a function in the body of a flow with our runner, and return its result or raise its error."""
    with prefect_server.flow_body(SkywardTaskRunner(provider=sky.Local(), concurrency=4, idle_timeout=None)) as call:
        yield call


@task
def where() -> dict[str, Any]:
    info = sky.instance_info()
    return {
        "pid": os.getpid(),
        "engine": "prefect" in sys.modules,
        "tag": os.environ.get("SKYWARD_POOL_ID"),
        "node": info.node if info else None,
    }


@task
def add(a: int, b: int) -> int:
    return a + b


@task
def squares(n: int) -> Iterator[int]:
    for i in range(n):
        yield i * i


@task
async def slow_double(x: int) -> int:
    await asyncio.sleep(0.01)
    return 2 * x


@task
async def slow_squares(n: int) -> Any:
    for i in range(n):
        yield i * i


def test_functions_run_on_nodes_and_futures_and_dependencies_are_resolved_here(in_flow: InFlow) -> None:
    """Submit, map, futures as inputs, `wait_for`, generators and asynchronous tasks work; the node has the function
    and no Prefect.
    """

    def every_way() -> dict[str, Any]:
        place = where.submit()
        three = add.submit(1, 2)
        return {
            "place": place.result(),
            "chain": add.submit(three, add.submit(three, 10)).result(),
            "map": add.map([1, 2, 3], unmapped(10)).result(),
            "map of futures": add.map(add.map([1, 2], [0, 0]), three).result(),
            "after": add.submit(0, 0, wait_for=[three]).result(),
            "generator": squares.submit(4).result(),
            "asynchronous generator": slow_squares.submit(3).result(),
            "async": slow_double.map([1, 2]).result(),
        }

    found = in_flow(every_way)
    place = found.pop("place")
    assert place["pid"] != os.getpid()
    assert not place["engine"]
    assert found == {
        "chain": 16,
        "map": [11, 12, 13],
        "map of futures": [4, 5],
        "after": 0,
        "generator": [0, 1, 4, 9],
        "asynchronous generator": [0, 1, 4],
        "async": [2, 4],
    }


# ── what travels ──


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
    """Helpers, dataclasses, globals, other tasks (as functions), methods, `@sky.compute` functions and `get_run_logger`
    work on a bare node.
    """

    def travel() -> tuple[Any, ...]:
        moved = shift_twice.submit(Point(1, 2)).result()
        return current_run.id, moved, Scale(3).of.submit(5).result(), halved.submit(3.0).result()

    flow_run_id, moved, *numbers = in_flow(travel)
    assert (moved, numbers) == (Point(21, 42), [15, 1.5])
    assert type(moved) is Point
    wait_for(
        lambda: [
            record
            for record in logs(UUID(flow_run_id))
            if (record["level"], record["message"]) == (30, "[node 0] shifting Point(x=1, y=2) twice")
        ]
    )


# ── failures ──


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
            wait_for(lambda: [runs_of(client, future.task_run_id) for future in futures] == [2, 2])
        return values

    assert in_flow(stubborn) == [2, 2]


@task
def fail_on_node(x: int) -> None:
    raise KeyError(f"bad {x}")


def test_the_function_s_exception_arrives_as_itself_with_its_remote_traceback(in_flow: InFlow) -> None:
    """The task fails with the exception of the function; its cause is the traceback on the node."""

    with pytest.raises(KeyError, match="bad 7") as caught:
        in_flow(lambda: fail_on_node.submit(7).result())
    assert "fail_on_node" in str(caught.value.__cause__)


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
    """An exception that pickle alone cannot rebuild keeps its class and its attributes: the task is tried again
    twice, and then no more.
    """

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


@task(retries=2, retry_condition_fn=only_if_it_passes, cache_policy=NO_CACHE)
def picky_weights(folder: Path) -> Any:
    return far_tensor(folder, "picky")


@task(retries=2, retry_condition_fn=always, cache_policy=NO_CACHE)
async def async_weights(folder: Path) -> Any:
    return far_tensor(folder, "async")


def test_work_is_not_repeated_if_its_result_cannot_be_loaded_here(in_flow: InFlow, tmp_path: Path) -> None:
    """The function has succeeded and is paid for; another try would fail here again.

    The error keeps the result, and the run's log says why.
    """

    def weighing() -> UUID:
        for future in [each.submit(tmp_path) for each in (plain_weights, picky_weights, async_weights)]:
            with pytest.raises(sky.ResultNotLoaded, match="the call succeeded on node 0") as caught:
                future.result()
            assert caught.value.missing == "far_library"
        return UUID(current_run.id)

    flow_run_id = in_flow(weighing)
    assert sorted(path.name.partition("-")[0] for path in tmp_path.iterdir()) == ["async", "picky", "plain"]
    wait_for(
        lambda: len([r for r in logs(flow_run_id) if r["level"] == 40 and "is not tried again" in r["message"]]) == 3
    )


@task(timeout_seconds=4, cache_policy=NO_CACHE)  # the time in which it has to begin
def sleeper(path: Path) -> None:
    path.write_text(str(os.getpid()))
    time.sleep(600)


@task(timeout_seconds=4, cache_policy=NO_CACHE)  # the time in which it has to begin
async def async_sleeper(path: Path) -> None:
    path.write_text(str(os.getpid()))  # noqa: ASYNC240
    await asyncio.sleep(600)


def test_a_timeout_stops_the_work_on_the_node(in_flow: InFlow, tmp_path: Path) -> None:
    """`timeout_seconds` ends the task run and the remote process, for plain and asynchronous tasks; the slot then
    takes other calls.
    """

    def impatient() -> int:
        for sleep in (sleeper, async_sleeper):
            path = tmp_path / sleep.name
            future = sleep.submit(path)
            future.wait()
            assert future.state.name == "TimedOut"
            wait_for(lambda path=path: not is_alive(int(path.read_text())))
        return add.submit(1, 1).result()

    assert in_flow(impatient) == 2


# ── logs and caches ──


@task
def log_all() -> None:
    import logging

    log = logging.getLogger("mine")
    log.warning("careful")
    try:
        raise ValueError("boom")
    except ValueError:
        log.exception("it failed")
    get_run_logger().error("by the run's logger")
    get_run_logger().debug("not kept: the run's level is INFO")
    print("only printed")


def test_log_records_of_a_node_keep_their_level_and_their_traceback(in_flow: InFlow) -> None:
    def talk() -> tuple[UUID, str]:
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

    found = wait_for(lambda: found if len(found := from_the_node()) >= 4 else None)
    assert sorted(found)[0] == (20, "[node 0] only printed")
    assert (30, "[node 0] careful") in found
    assert (40, "[node 0] by the run's logger") in found
    (failure,) = [message for level, message in found if level == 40 and "it failed" in message]
    assert "\nTraceback (most recent call last):\n" in failure
    assert failure.endswith("ValueError: boom")
    assert len(found) == 4
