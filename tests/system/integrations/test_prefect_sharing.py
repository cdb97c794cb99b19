"""Prefect flow runs that share a pool with a name; calls on all workers; how task runs and flow runs end."""

import contextlib
import os
import time
from collections.abc import Generator
from dataclasses import dataclass
from decimal import Decimal
from pathlib import Path
from typing import Any, ClassVar

import pytest

pytest.importorskip("prefect")

from tests.integrations import prefect_server  # noqa: I001 - before Prefect
from tests.integrations.prefect_server import messages, runner, wait_for

from prefect import flow, task
from prefect.cache_policies import NO_CACHE

import skyward_core as sky
from prefect_skyward import on_skyward, refuse_old_prefect, skyward_options
from skyward_core.distributed.group import Group, decorator
from skyward_core.distributed.group import places as places_of_call
from skyward_core.ledger.ledger import Ledger, default_url
from skyward_core.ledger.users import users_of

api = pytest.fixture(scope="module", autouse=True)(prefect_server.served)


pytestmark = [
    pytest.mark.filterwarnings("default"),  # Prefect's own warnings are not our faults
]
events = pytest.fixture(prefect_server.recorded)


@task(cache_policy=NO_CACHE)
def pool_id() -> str:
    return os.environ["SKYWARD_POOL_ID"]


# ── a pool with a name ───────────────────────────────────────────────────────────────────────────────────────────────


def test_flow_runs_share_a_pool_with_a_name_and_a_retry_finds_it_warm(tmp_path: Path) -> None:
    """While the flow run waits for its retry the pool has no users. A flow run beside it, and one after it, use the same
    machines; other hardware is a pool without the name. Shares of a cost that other flow runs have written stay.
    """
    events: list[Any] = []
    shared = runner(events, name="team-gpu", keep_warm=600, lease_seconds=10)
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
            (share,) = ledger.shares(first)  # of the process that has opened it: the others know no cost of a call
            other_work = sky.Work(system="prefect", workflow="another")
            ledger.set_shares(first, {other_work: Decimal("0.25")}, keeps_others=True)
            ledger.set_shares(first, {other_work: Decimal("0.5")}, keeps_others=True)
            assert share.workflow == "trying"
            assert set(ledger.shares(first)) == {share, other_work}
            assert ledger.shares(first)[other_work] == Decimal("0.5")
    finally:
        sky.release(pools[0])


# ── calls on all workers ─────────────────────────────────────────────────────────────────────────────────────────────


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
    """By options and by the decorator, submitted and called; the lines of all nodes are in the log of the task run. A
    group trains. The first error, and the timeout, stop the others.
    """

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
    wait_for(lambda: {"[node 0] here", "[node 1] here"} <= {text for _, text in messages(run)})
    assert not any("cannot interrupt blocking operations" in text for _, text in messages(run))


@pytest.mark.parametrize(("found", "is_refused"), [("3.5.9", True), ("2.20", True), ("3.6.0", False), ("4.0", False)])
def test_an_old_prefect_is_refused(found: str, is_refused: bool) -> None:
    if is_refused:
        with pytest.raises(ImportError, match=r"needs Prefect 3\.6 or newer"):
            refuse_old_prefect(found)
    else:
        assert refuse_old_prefect(found) is None
