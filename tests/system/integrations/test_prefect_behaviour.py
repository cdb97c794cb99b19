"""What a user expects of any task runner of Prefect, each behaviour by its name; docs/prefect.md has the table.

One flow run holds one pool for the whole file: a test hands it a function, which runs in the flow's body.
"""

import asyncio
import os
import threading
import time
from collections.abc import Iterator
from datetime import timedelta
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("prefect")
from tests.integrations import prefect_server  # isort: skip
from tests.integrations.prefect_server import InFlow, asked, wait_for  # isort: skip

from prefect import allow_failure, flow, tags, task, unmapped  # isort: skip
from prefect.cache_policies import NO_CACHE
from prefect.client.orchestration import get_client
from prefect.context import FlowRunContext
from prefect.exceptions import MappingLengthMismatch, MappingMissingIterable, UnfinishedRun
from prefect.futures import PrefectFuture, as_completed, wait
from prefect.states import Completed, State
from prefect.tasks import task_input_hash
from prefect.transactions import transaction
from prefect.utilities.annotations import quote

import skyward_core as sky
from prefect_skyward import SkywardTaskRunner

pytestmark = [
    pytest.mark.filterwarnings("default"),  # Prefect's own warnings are not our faults
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
        SkywardTaskRunner(provider=sky.Local(), concurrency=SLOTS, on_event=keep, idle_timeout=None)
    ) as call:
        yield call


@task(cache_policy=NO_CACHE)
def add(a: Any, b: Any = 0) -> Any:
    return a + b


@task(cache_policy=NO_CACHE)
async def add_async(a: int, b: int = 0) -> int:
    await asyncio.sleep(0)
    return a + b


@task(cache_policy=NO_CACHE)
def fail(message: str = "on purpose") -> None:
    raise ValueError(message)


@task(cache_policy=NO_CACHE)
async def fail_async() -> None:
    raise ValueError("on purpose")


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


# ── submit ───────────────────────────────────────────────────────────────────────────────────────────────────────────


def test_submit_returns_a_future_with_the_id_of_a_task_run_and_its_result(in_flow: InFlow) -> None:
    def body() -> tuple[PrefectFuture[Any], Any]:
        future = add.submit(1, b=2)
        return future, future.result()

    future, result = in_flow(body)
    assert (result, future.state.type.value) == (3, "COMPLETED")
    (run,) = wait_for(lambda: asked("/task_runs/filter", {"task_runs": {"id": {"any_": [str(future.task_run_id)]}}}))
    assert run["name"].startswith("add-")


def test_submit_does_not_wait_for_the_task(in_flow: InFlow, tmp_path: Path) -> None:
    def body() -> tuple[bool, str]:
        future = wait_for_file.submit(tmp_path / "go")
        is_final = future.state.is_final()
        (tmp_path / "go").touch()
        return is_final, future.result()

    assert in_flow(body) == (False, "done")


def test_asynchronous_tasks_can_be_submitted_and_mapped(in_flow: InFlow) -> None:
    assert in_flow(lambda: (add_async.submit(1, 2).result(), add_async.map([1, 2], [3, 4]).result())) == (3, [4, 6])


def test_return_state_gives_the_final_state(in_flow: InFlow) -> None:
    state = in_flow(lambda: add.submit(1, 2, return_state=True))
    assert isinstance(state, State)
    assert (state.is_completed(), state.result()) == (True, 3)


@pytest.mark.parametrize("one", [meet, meet_async], ids=["sync", "async"])
def test_tasks_run_at_the_same_time(in_flow: InFlow, tmp_path: Path, one: Any) -> None:
    """As many as the pool has slots."""
    names = [str(i) for i in range(SLOTS)]
    found = in_flow(lambda: one.map(unmapped(tmp_path), names, unmapped(SLOTS)).result())
    assert found == [SLOTS] * SLOTS


def test_tasks_run_in_other_processes(in_flow: InFlow) -> None:
    @task(cache_policy=NO_CACHE)
    def pid() -> int:
        return os.getpid()

    assert os.getpid() not in in_flow(lambda: [future.result() for future in (pid.submit(), pid.submit())])


def test_values_that_only_cloudpickle_can_carry_go_both_ways(in_flow: InFlow) -> None:
    factor = 3
    returned = in_flow(lambda: identity.submit(lambda x: factor * x).result())
    assert returned(2) == 6


# ── inputs ───────────────────────────────────────────────────────────────────────────────────────────────────────────


def test_futures_among_the_inputs_are_resolved_also_within_collections(in_flow: InFlow) -> None:
    def body() -> Any:
        one, two = add.submit(1), add.submit(2)
        return identity.submit({"list": [one, {"two": two}], "tuple": (one,)}).result()

    assert in_flow(body) == {"list": [1, {"two": 2}], "tuple": (1,)}


def test_a_quoted_input_is_passed_as_it_is(in_flow: InFlow) -> None:
    assert in_flow(lambda: identity.submit(quote([1, 2])).result()) == [1, 2]


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


def test_map_over_a_future_of_a_list(in_flow: InFlow) -> None:
    assert in_flow(lambda: add.map(identity.submit([1, 2, 3]), 10).result()) == [11, 12, 13]


# ── ends ─────────────────────────────────────────────────────────────────────────────────────────────────────────────


@pytest.mark.parametrize("one", [fail, fail_async], ids=["sync", "async"])
def test_an_exception_of_the_task_is_the_failure_of_its_run(in_flow: InFlow, one: Any) -> None:
    def body() -> State[Any]:
        future = one.submit()
        with pytest.raises(ValueError, match="on purpose"):
            future.result()
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


def test_a_task_may_return_a_state(in_flow: InFlow) -> None:
    @task(cache_policy=NO_CACHE)
    def own_state(state: Any) -> Any:
        return state

    state = in_flow(lambda: own_state.submit(quote(Completed(name="Fine", data=5)), return_state=True))
    assert (state.name, state.is_completed()) == ("Fine", True)


def test_wait_and_as_completed_work_with_our_futures(in_flow: InFlow, tmp_path: Path) -> None:
    def body() -> tuple[list[int], int, int]:
        slow = wait_for_file.submit(tmp_path / "go")
        quick = add.map([1, 2, 3])
        ended = [future.result() for future in as_completed(list(quick), timeout=60)]
        done, pending = wait([*quick, slow], timeout=0.1)
        (tmp_path / "go").touch()
        slow.wait()
        return sorted(ended), len(done), len(pending)

    assert in_flow(body) == ([1, 2, 3], 3, 1)


def test_a_result_that_is_not_there_in_time_is_a_timeout(in_flow: InFlow, tmp_path: Path) -> None:
    def body() -> str:
        future = wait_for_file.submit(tmp_path / "go")
        with pytest.raises((TimeoutError, UnfinishedRun)):
            future.result(timeout=0.1)
        (tmp_path / "go").touch()
        return future.result()

    assert in_flow(body) == "done"


def test_done_callbacks_get_the_future(in_flow: InFlow) -> None:
    def body() -> bool:
        seen = threading.Event()
        future = add.submit(1)
        future.add_done_callback(lambda done: seen.set() if done is future else None)
        return seen.wait(60)

    assert in_flow(body)


# ── what the engine does ─────────────────────────────────────────────────────────────────────────────────────────────


def test_hooks_run_in_the_flow_s_process(in_flow: InFlow) -> None:
    ran: list[tuple[str, int]] = []

    def note(one: Any, run: Any, state: Any) -> None:
        ran.append((state.name, os.getpid()))

    good, bad = add.with_options(on_completion=[note]), fail.with_options(on_failure=[note])
    in_flow(lambda: (good.submit(1).wait(), bad.submit().wait()))
    assert sorted(ran) == [("Completed", os.getpid()), ("Failed", os.getpid())]


def test_a_cached_result_is_not_computed_again(in_flow: InFlow, tmp_path: Path) -> None:
    @task(cache_key_fn=task_input_hash, cache_expiration=timedelta(minutes=5), persist_result=True)
    def count(path: Path) -> int:
        path.write_text(path.read_text() + "x" if path.exists() else "x")
        return len(path.read_text())

    def body() -> tuple[Any, ...]:
        first, second = count.submit(tmp_path / "n"), None
        first.wait()
        second = count.submit(tmp_path / "n")
        return first.result(), second.result(), second.state.name

    assert in_flow(body) == (1, 1, "Cached")


def test_a_transaction_that_fails_rolls_its_tasks_back(in_flow: InFlow) -> None:
    rolled: list[int] = []
    staged = add.with_options(cache_policy=NO_CACHE)
    staged.on_rollback(lambda _: rolled.append(os.getpid()))

    def body() -> None:
        with pytest.raises(LookupError), transaction():
            staged.submit(1).result()
            raise LookupError

    in_flow(body)
    assert rolled == [os.getpid()]


def test_tags_of_the_flow_s_body_are_those_of_the_task_run(in_flow: InFlow) -> None:
    def body() -> PrefectFuture[Any]:
        with tags("outer"):
            future = add.with_options(tags=["own"]).submit(1)
        future.wait()
        return future

    future = in_flow(body)
    (run,) = wait_for(lambda: asked("/task_runs/filter", {"task_runs": {"id": {"any_": [str(future.task_run_id)]}}}))
    assert {"outer", "own"} <= set(run["tags"])


def test_a_limit_of_a_tag_lets_one_task_run_at_a_time(in_flow: InFlow, tmp_path: Path) -> None:
    """The engine takes the slot in the flow's process, before the function travels.

    Sleeps: without the limit the second task would run meanwhile.
    """

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


def test_retries_with_a_condition_and_a_delay(in_flow: InFlow, tmp_path: Path) -> None:
    @task(retries=2, retry_delay_seconds=[0, 0], retry_condition_fn=lambda *_: True, cache_policy=NO_CACHE)
    def third_time(path: Path) -> int:
        path.write_text(path.read_text() + "x" if path.exists() else "x")
        if len(path.read_text()) < 3:
            raise ValueError("not yet")
        return len(path.read_text())

    assert in_flow(lambda: third_time.submit(tmp_path / "n").result()) == 3


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


def test_a_task_sees_no_context_of_prefect_on_its_node(in_flow: InFlow) -> None:
    """It cannot: the engine is in the flow's process. `sky.instance_info` says where the call runs."""

    @task(cache_policy=NO_CACHE)
    def look() -> tuple[bool, bool]:
        from prefect.context import FlowRunContext  # this node has Prefect, because it is this machine

        return sky.instance_info() is not None, FlowRunContext.get() is None

    assert in_flow(lambda: look.submit().result()) == (True, True)
    assert in_flow(lambda: FlowRunContext.get() is not None)


def test_one_pool_has_run_them_all(in_flow: InFlow, pools: list[sky.PoolReady]) -> None:
    """Also after the failures above."""
    assert in_flow(lambda: add.submit(20, 22).result()) == 42
    assert len(pools) == 1
