"""Hardware per step in one Prefect flow: several pools, direct calls, other runners, subflows."""

import os
from typing import Any

import pytest

pytest.importorskip("prefect")

from tests.integrations import prefect_server  # noqa: I001 - before Prefect
from tests.integrations.prefect_server import runner, wait_for

from prefect import flow, task
from prefect.assets import materialize
from prefect.cache_policies import NO_CACHE

import skyward_core as sky
from prefect_skyward import cost_so_far, on_skyward, skyward_options

api = pytest.fixture(scope="module", autouse=True)(prefect_server.served)


pytestmark = [
    pytest.mark.filterwarnings("default"),  # Prefect's own warnings are not our faults
]
events = pytest.fixture(prefect_server.recorded)


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
    """By options around submit and map, which nest, and by a decorator, for all ways to call; one flow run, three
    pools, of which each opens when it is needed first.
    """

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


def test_on_skyward_beneath_task_only() -> None:
    with pytest.raises(TypeError, match="write @task above @on_skyward"):
        on_skyward(nodes=2)(where)
    with pytest.raises(sky.BadRequest, match="did you mean 'nodes'"):
        on_skyward(node=2)


# ── the life of several pools ────────────────────────────────────────────────────────────────────────────────────────


@task(cache_policy=NO_CACHE)
def wrong() -> None:
    raise ValueError("wrong")


class SoldOut(sky.Local):
    def offers(self, want: Any) -> Any:
        return []


def test_a_pool_that_is_idle_ends_and_the_next_call_opens_another(events: list[Any]) -> None:
    """The limit of the money counts for both; a task run whose input has failed opens none; a pool that cannot open
    fails only its own task runs.
    """

    def gone() -> bool:
        return any(isinstance(event, sky.CostFinal) for event in events)

    @flow(task_runner=runner(events, idle_timeout=0.3, max_cost=5.0))
    def patient() -> list[Any]:
        first = where.submit().result()
        wait_for(gone)
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
