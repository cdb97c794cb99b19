"""Hardware per step in one Prefect flow: several pools, direct calls, other runners, subflows."""

import asyncio
import os
import time
from collections.abc import AsyncIterator, Iterator
from pathlib import Path
from typing import Any
from uuid import UUID

import pytest

from tests.system.integrations.test_prefect_steps import (
    here,
    ready,
    where,
)

pytest.importorskip("prefect")

from tests.integrations import prefect_server  # noqa: I001 - before Prefect
from tests.integrations.prefect_server import logs, processes_of, runner, wait_for

from prefect import flow, task
from prefect.cache_policies import NO_CACHE

import skyward_core as sky
from prefect_skyward import SkywardTaskRunner, on_skyward, skyward_options

pytestmark = [
    pytest.mark.filterwarnings("default"),  # Prefect's own warnings are not our faults
]

api = pytest.fixture(scope="module", autouse=True)(prefect_server.served)
BESIDE: dict[str, Any] = {"provider": sky.Local(price_per_hour=36.0), "env": {"STEP": "beside"}}


# ── without our runner ───────────────────────────────────────────────────────────────────────────────────────────────


@task(cache_policy=NO_CACHE)
@on_skyward(**BESIDE)
def beside(_number: int = 0) -> tuple[str, str]:
    print("beside")
    return here()


@task(cache_policy=NO_CACHE)
@on_skyward(**BESIDE)
async def beside_coroutine() -> tuple[str, str]:
    return here()


@task
@on_skyward(**BESIDE)
def counted(n: int) -> Iterator[tuple[int, str]]:
    for i in range(n):
        yield i, here()[1]


@task
@on_skyward(**BESIDE)
async def counted_coroutine(n: int) -> AsyncIterator[tuple[int, str]]:
    for i in range(n):
        yield i, here()[1]


@task(timeout_seconds=4, cache_policy=NO_CACHE)
@on_skyward(**BESIDE)
def sleeper(path: Path) -> None:
    path.write_text(str(os.getpid()))
    time.sleep(600)


@on_skyward(**BESIDE)
def helper() -> tuple[str, str]:
    return here()


@task(cache_policy=NO_CACHE)
@on_skyward(**BESIDE)
def nested() -> tuple[tuple[str, str], tuple[str, str]]:
    return helper(), beside.fn()


def test_beside_another_runner_a_pool_is_kept_for_the_flow_run(tmp_path: Path) -> None:
    """Direct calls, submits to Prefect's own runner, items one by one, a function that is no task: all on one pool,
    which ends with the flow run. Their lines are in the run's log.
    """

    @flow
    async def plain() -> tuple[list[Any], UUID]:
        from prefect.runtime import flow_run

        places = [beside(), beside.submit().result(), *beside.map([1, 2]).result(), helper(), *nested()]
        places.append(await beside_coroutine())
        assert list(counted(3)) == [(0, "beside"), (1, "beside"), (2, "beside")]
        assert counted.submit(2).result() == [(0, "beside"), (1, "beside")]
        assert [item async for item in counted_coroutine(2)] == [(0, "beside"), (1, "beside")]
        for state in (
            sleeper(tmp_path / "here", return_state=True),
            sleeper.submit(tmp_path / "there", return_state=True),
        ):
            assert state.name == "TimedOut"
        return places, UUID(flow_run.id)

    places, flow_run_id = asyncio.run(plain())
    ((pool, name),) = set(places)
    assert name == "beside"
    wait_for(lambda: processes_of({pool}) == [])
    found = wait_for(lambda: [r for r in logs(flow_run_id) if "done: " in r["message"]])
    assert found
    lines = [r for r in logs(flow_run_id) if r["message"] == "[node 0] beside"]
    assert len({r["task_run_id"] for r in lines}) == len(lines) == 5


def test_a_failing_flow_beside_another_runner_ends_its_pool(tmp_path: Path) -> None:
    """Also before its retry; each attempt has a pool."""
    pools: list[str] = []

    @flow(retries=1)
    def broken() -> None:
        if pools:
            wait_for(lambda: processes_of(set(pools)) == [])
        pools.append(beside()[0])
        raise LookupError("the flow itself is wrong")

    with pytest.raises(LookupError):
        broken()
    assert len(set(pools)) == 2
    wait_for(lambda: processes_of(set(pools)) == [])


def test_without_a_flow_the_pool_lives_for_one_call() -> None:
    """A task that is called outside of a flow, and a plain function."""
    pools = [beside()[0], helper()[0], asyncio.run(beside_coroutine())[0]]
    assert len(set(pools)) == 3
    assert processes_of(set(pools)) == []


def test_the_limit_of_the_money_is_not_renewed_by_another_pool(events: list[Any]) -> None:
    """The second pool of a spec gets the rest of max_cost."""

    @flow(task_runner=runner(events, idle_timeout=0.3, max_cost=0.615, provider=sky.Local(price_per_hour=36.0)))
    def poor() -> None:
        where.submit().result()
        wait_for(lambda: any(isinstance(event, sky.CostFinal) for event in events))
        where.submit().result()

    state = poor(return_state=True)
    assert state.is_failed()
    assert "BudgetExceeded" in state.message


def test_the_limit_of_the_money_is_for_all_attempts_and_all_specs_of_a_flow_run(events: list[Any]) -> None:
    """The second attempt asks for other hardware, and the first one has left too little for a minute of it."""
    attempts: list[int] = []

    @flow(retries=3, task_runner=runner(events, max_cost=0.615))
    def poor() -> None:
        attempts.append(len(attempts))
        with skyward_options(env={"STEP": str(len(attempts))}):
            where.submit().result()
        raise LookupError

    state = poor(return_state=True)
    assert state.is_failed()
    assert "BudgetExceeded" in state.message
    assert "max_cost=0.615 is for all pools of the run" in state.message
    assert attempts == [0, 1]


def test_two_pools_at_once_spend_the_limit_of_their_flow_run_once(
    events: list[Any], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The nodes of both end when that is used up; the flow run fails with the reason, and is not tried again."""
    # a machine costs a dollar a second: the first pool reserves 20 s, the second one gets what is left
    monkeypatch.setattr("skyward_core.ledger.budgets.FIRST_MINUTE_SECONDS", 1.0)
    monkeypatch.setattr("skyward_core.ledger.budgets.LONGEST_BOOT_SECONDS", 0.0)
    attempts: list[int] = []
    provider = sky.Local(price_per_hour=3600.0)

    @flow(retries=3, task_runner=runner(events, max_cost=30, provider=provider, lease_seconds=10))
    def costly() -> None:
        attempts.append(len(attempts))
        with skyward_options(env={"STEP": "other"}):
            other = hang.submit(tmp_path / "other")
        hang.submit(tmp_path / "first").wait()
        other.result()

    state = costly(return_state=True)
    assert state.is_failed()
    assert "BudgetExceeded" in state.message
    assert attempts == [0]
    costs = [event.total_cost for event in events if isinstance(event, sky.CostFinal)]
    assert len(costs) == 2
    assert all(costs), "one was refused at its start"
    assert sum(costs) < 45, "both have spent the whole limit"


@task(cache_policy=NO_CACHE)
def hang(path: Path) -> None:
    path.with_suffix(".new").write_text("")
    path.with_suffix(".new").rename(path)  # atomically, because it may be stopped at any moment
    time.sleep(600)


@pytest.mark.parametrize("error", [LookupError, KeyboardInterrupt])
def test_a_flow_that_fails_or_is_stopped_ends_all_its_pools(
    error: type[BaseException], events: list[Any], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """After a signal the reapers have the machines of all pools before the first one is closed. A flow that is tried
    again has given them all back before.
    """
    order: list[str] = []
    terminate_now, close = sky.ComputePool.terminate_now, sky.ComputePool.close
    monkeypatch.setattr(sky.ComputePool, "terminate_now", lambda pool: (order.append("now"), terminate_now(pool))[1])
    monkeypatch.setattr(sky.ComputePool, "close", lambda pool: (order.append("close"), close(pool))[1])
    attempts: list[int] = []

    @flow(task_runner=runner(events), retries=1)
    def broken() -> None:
        attempts.append(1)
        if len(attempts) == 2:
            assert sum(isinstance(event, sky.CostFinal) for event in events) == 2
            return
        markers = [tmp_path / "one", tmp_path / "two"]
        hang.submit(markers[0])
        with skyward_options(nodes=2):
            hang.submit(markers[1])
        for marker in markers:
            wait_for(marker.exists)
        raise error

    if error is KeyboardInterrupt:
        with pytest.raises(KeyboardInterrupt):
            broken()
        assert order == ["now", "now", "close", "close"]
    else:
        broken()
        assert set(order) == {"close"}
    assert sorted(ready(events)) == [1, 2]


def test_a_subflow_inherits_the_pool_around_it(events: list[Any]) -> None:
    """With `inherit=True` it uses the pool of the flow around it, with keywords another one of the same set; its end
    leaves them open. Alone it is a runner like others.
    """

    @flow(task_runner=SkywardTaskRunner(inherit=True, provider=sky.Local()))
    def inner() -> tuple[str, str]:
        return where.submit().result()

    @flow(task_runner=SkywardTaskRunner(inherit=True))
    def failing() -> None:
        where.submit().result()
        raise LookupError("the subflow is wrong")

    @flow(task_runner=SkywardTaskRunner(inherit=True, nodes=2))
    def larger() -> tuple[str, str]:
        return where.submit().result()

    @flow(task_runner=runner(events, env={"STEP": "outer"}))
    def outer() -> list[Any]:
        with pytest.raises(LookupError):
            failing()
        places = [larger(), where.submit().result(), larger()]
        assert not any(isinstance(event, sky.CostFinal) for event in events)
        return places

    places = outer()
    assert places[0] == places[2] != places[1]
    assert {name for _, name in places} == {"outer"}
    assert sorted(ready(events)) == [1, 2]
    assert inner()[1] == ""
