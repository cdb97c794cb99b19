"""Several pools of a Prefect flow run: hardware for each step, calls on all workers, a pool with a name."""

import contextlib
import os
import time
from collections.abc import Generator
from dataclasses import dataclass
from pathlib import Path
from typing import Any, ClassVar

import pytest

pytest.importorskip("prefect")

from tests.integrations import prefect_server  # noqa: I001 - before Prefect
from tests.integrations.prefect_server import messages, runner
from tests.waiting import wait_until

from prefect import flow, task
from prefect.assets import materialize
from prefect.cache_policies import NO_CACHE

import skyward_core as sky
from prefect_skyward import SkywardTaskRunner, cost_so_far, on_skyward, skyward_options
from skyward_core.distributed.group import Group, decorator
from skyward_core.distributed.group import places as places_of_call
from skyward_core.ledger.ledger import Ledger, default_url
from skyward_core.ledger.receipt import users_of

pytestmark = [pytest.mark.filterwarnings("default")]  # Prefect's own warnings are not our faults
api = pytest.fixture(scope="module", autouse=True)(prefect_server.served)
events = pytest.fixture(prefect_server.recorded)
SECRET = "s3cr3t-0123456789"


@task(cache_policy=NO_CACHE)
def pool_id() -> str:
    return os.environ["SKYWARD_POOL_ID"]


def test_flow_runs_share_a_pool_with_a_name_and_a_retry_finds_it_warm(tmp_path: Path) -> None:
    """While the flow run waits for its retry the pool has no users."""
    events: list[Any] = []
    shared = runner(events, name="team-gpu", keep_warm=600)
    pools: list[str] = []

    @flow(name="beside", task_runner=shared)
    def beside() -> str:
        return pool_id.submit().result()

    @flow(name="trying", task_runner=shared, retries=1, retry_delay_seconds=2)
    def trying() -> None:
        if pools:
            with Ledger(default_url()) as ledger:
                assert [user.lives for user in users_of(ledger, pools[0])] == [False]
        pools.append(pool_id.submit().result())
        if len(pools) == 1:
            raise LookupError("the first attempt")
        pools.append(beside())
        with skyward_options(nodes=2):
            pools.append(pool_id.submit().result())

    trying()
    pools.append(beside())
    try:
        first, second, during, other, after = pools
        assert first == second == during == after != other
        with Ledger(default_url()) as ledger:
            uses = ledger.uses.of_pool(first)
            assert [use.work.workflow for use in uses] == ["trying", "trying", "beside", "beside"]
            assert all(use.ended_at is not None for use in uses)
            assert {use.work.task for use in uses} == {"pool_id"}
    finally:
        sky.release(pools[0])


def here() -> tuple[str, str]:
    """The pool and the step's name for it."""
    return os.environ.get("SKYWARD_POOL_ID", ""), os.environ.get("STEP", "")


@task(cache_policy=NO_CACHE)
def where(_number: int = 0) -> tuple[str, str]:
    return here()


@task(cache_policy=NO_CACHE)
@on_skyward(nodes=2, env={"STEP": "marked"})
def marked(_number: int = 0) -> tuple[str, str]:
    return here()


@materialize("test://model", cache_policy=NO_CACHE)
@on_skyward(nodes=2, env={"STEP": "marked"})
def model() -> tuple[str, str]:
    return here()


@task(cache_policy=NO_CACHE)
@on_skyward(nodes=2, env={"STEP": "marked"})
async def marked_coroutine() -> tuple[str, str]:
    return here()


def ready(events: list[Any]) -> list[int]:
    return [event.nodes for event in events if isinstance(event, sky.PoolReady)]


def test_each_step_has_its_hardware_and_equal_steps_share_a_pool(events: list[Any]) -> None:
    @flow(task_runner=SkywardTaskRunner(inherit=True, nodes=2, env={"STEP": "marked"}))
    def inheriting() -> tuple[str, str]:
        return where.submit().result()

    @flow(task_runner=runner(events))
    def steps() -> dict[str, Any]:
        found: dict[str, Any] = {"plain": [where.submit().result()]}
        assert ready(events) == [1]
        with skyward_options(nodes=2):
            with skyward_options(env={"STEP": "marked"}):
                found["options"] = [where.submit().result(), *where.map([1, 2]).result()]
            assert ready(events) == [1, 2]
        found["decorator"] = [
            marked.submit().result(),
            *marked.map([1, 2]).result(),
            model.submit().result(),
            marked.with_options(name="renamed").submit().result(),
            marked(),
            model(),
            marked_coroutine.submit().result(),
        ]
        with skyward_options(env={"STEP": "inner"}, nodes=1):
            found["inner"] = [marked.submit().result(), marked()]
        with pytest.raises(sky.BadRequest, match="did you mean 'nodes'"), skyward_options(node=2):
            pass
        found["decorator"].append(inheriting())
        found["cost"] = cost_so_far()
        return found

    found = steps()
    assert sorted(ready(events)) == [1, 1, 2]
    pools = {name: set(places) for name, places in found.items() if name != "cost"}
    assert pools["options"] == pools["decorator"]
    assert [len(places) for places in pools.values()] == [1, 1, 1, 1]
    assert [name for ((_, name),) in pools.values()] == ["", "marked", "marked", "inner"]
    assert len({pool for ((pool, _),) in pools.values()}) == 3
    finals = [event.total_cost for event in events if isinstance(event, sky.CostFinal)]
    assert len(finals) == 3
    assert max(finals) < found["cost"] <= sum(finals)


@task(cache_policy=NO_CACHE)
def wrong() -> None:
    raise ValueError("wrong")


class SoldOut(sky.Local):
    def offers(self, want: Any) -> Any:
        return []


def test_a_pool_that_is_idle_ends_and_the_next_call_opens_another(events: list[Any]) -> None:
    def gone() -> bool:
        return any(isinstance(event, sky.CostFinal) for event in events)

    @flow(task_runner=runner(events, idle_timeout=0.3, max_cost=5.0))
    def patient() -> list[Any]:
        first = where.submit().result()
        wait_until(gone)
        second = where.submit().result()
        failed = wrong.submit()
        with skyward_options(nodes=2):
            after_failure = where.submit(failed)
        with skyward_options(provider=SoldOut()):
            sold_out = where.submit()
        sold_out.wait()
        after_failure.wait()
        return [first, second, after_failure.state.name, sold_out.state.message, cost_so_far()]

    first, second, after_failure, sold_out, cost = patient()
    assert first[0] != second[0]
    assert after_failure == "NotReady"
    assert "NoCapacity" in sold_out
    assert set(ready(events)) == {1}
    assert cost >= next(event.total_cost for event in events if isinstance(event, sky.CostFinal))


@dataclass(frozen=True)
class Ranks:
    """A framework that lets the ranks exchange their numbers."""

    needs_process: ClassVar[bool] = False

    @contextlib.contextmanager
    def running(self, group: Group) -> Generator[None]:
        group.set_environment({"RANKS": str(group.exchange(group.place.rank))})
        yield


def trained() -> Any:
    return decorator(Ranks(), 60.0)


@task(cache_policy=NO_CACHE)
def node() -> int:
    info = sky.instance_info()
    assert info is not None
    print("here")
    return info.node


@task(cache_policy=NO_CACHE)
@on_skyward(nodes=2, broadcast=True)
async def node_coroutine() -> int:
    return node.fn()


@task(cache_policy=NO_CACHE)
@on_skyward(nodes=2, broadcast=True)
@trained()
def train() -> tuple[int, str]:
    (place,) = places_of_call(1)
    return place.rank, os.environ["RANKS"]


@task(cache_policy=NO_CACHE)
@on_skyward(nodes=2, broadcast=True)
def broken_on_one() -> None:
    if node.fn() == 1:
        raise ValueError("node 1 is wrong")
    time.sleep(600)


@task(timeout_seconds=4, cache_policy=NO_CACHE)
@on_skyward(nodes=2, broadcast=True)
def endless() -> None:
    time.sleep(600)


@task(cache_policy=NO_CACHE)
def interrupted() -> None:
    raise KeyboardInterrupt


def test_a_broadcast_gives_a_tuple_with_a_result_of_each_node(events: list[Any]) -> None:
    """By options and by the decorator, submitted and called; the lines of all nodes are in the log of the task run."""

    @flow(task_runner=runner(events))
    def everywhere() -> Any:
        from prefect.runtime import flow_run

        with skyward_options(nodes=2, broadcast=True):
            future = node.submit()
        assert future.result() == node_coroutine.submit().result() == (0, 1)
        assert train.submit().result() == train() == ((0, "[0, 1]"), (1, "[0, 1]"))
        with pytest.raises(ValueError, match="node 1 is wrong"):
            broken_on_one.submit().result()
        assert endless.submit(return_state=True).name == "TimedOut"
        state = interrupted.submit(return_state=True)
        assert (state.type.name, "KeyboardInterrupt" in state.message) == ("CRASHED", True)
        return flow_run.id

    run = everywhere()
    assert [event.nodes for event in events if isinstance(event, sky.PoolReady)].count(2) == 1
    wait_until(lambda: {"[node 0] here", "[node 1] here"} <= {text for _, text in messages(run)})
    assert not any("cannot interrupt blocking operations" in text for _, text in messages(run))
