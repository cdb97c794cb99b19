"""Prefect flow runs that share a pool with a name; calls on all workers; how task runs and flow runs end."""

import contextlib
import os
import threading
import time
from collections.abc import Generator
from dataclasses import dataclass
from decimal import Decimal
from pathlib import Path
from typing import Any, ClassVar
from uuid import UUID

import pytest

pytest.importorskip("prefect")

from tests.integrations import prefect_server  # noqa: I001 - before Prefect
from tests.integrations.prefect_server import artifacts, events_of, messages, runner, wait_for

from prefect import flow, task
from prefect.cache_policies import NO_CACHE
from prefect.client.orchestration import get_client
from prefect.runtime import flow_run as current_run

import skyward_core as sky
from prefect_skyward import on_skyward, refuse_old_prefect, skyward_options
from prefect_skyward.report.pages import usd
from skyward_core.distributed.group import Group, decorator
from skyward_core.distributed.group import places as places_of_call
from skyward_core.ledger.ledger import Ledger, default_url
from skyward_core.ledger.rows import CostBy
from skyward_core.ledger.users import users_of

pytestmark = [
    pytest.mark.slow,  # starts a server
    pytest.mark.filterwarnings("default"),  # Prefect's own warnings are not our faults
]

api = pytest.fixture(scope="module", autouse=True)(prefect_server.served)
events = pytest.fixture(prefect_server.recorded)


@task(cache_policy=NO_CACHE)
def pool_id() -> str:
    return os.environ["SKYWARD_POOL_ID"]


@task(cache_policy=NO_CACHE)
def busy() -> str:
    time.sleep(1.5)  # the cost of buckets is by whole seconds
    return os.environ["SKYWARD_POOL_ID"]


@task(cache_policy=NO_CACHE)
def hang(path: Path) -> None:
    path.touch()
    time.sleep(600)


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


def cost_page(flow_run_id: str) -> tuple[str, str]:
    """Description and text of the cost artifact of a flow run."""
    ((words, page),) = [
        (one["description"], one["data"]) for one in artifacts(flow_run_id) if one["key"] == "skyward-cost"
    ]
    return words, page


def test_a_flow_run_that_finds_a_pool_warm_has_its_share_of_the_cost() -> None:
    """Its artifacts, its final event and its labels say so, and the bill by run has a row for each run, that add up to the
    bill of the pool.
    """
    found: list[tuple[str, str]] = []

    @flow(name="sharing", task_runner=runner([], name="warm-gpu", keep_warm=60, lease_seconds=10))
    def sharing() -> None:
        found.append((current_run.id, busy.submit().result()))

    sharing()
    sharing()
    (first, pool), (second, other) = found
    sky.release(pool)
    assert pool == other
    for run in (first, second):
        words, page = cost_page(run)
        assert "share of pool warm-gpu" in words
        assert "share of pool `warm-gpu`" in page
        assert {"skyward-machines", "skyward-nodes"} <= {one["key"] for one in artifacts(run)}
        (final,) = wait_for(lambda: [one for one in events_of(run) if one["event"] == "skyward.cost.final"])
        assert final["payload"]["share_of"] == "warm-gpu"
        assert final["payload"]["has_opened"] is (run == first)
        with get_client(sync_client=True) as client:
            labels = client.read_flow_run(UUID(run)).labels
        assert labels["skyward.cost_usd"] == final["payload"]["usd"] > 0
        assert words.startswith(usd(final["payload"]["usd"]))
        assert (labels["skyward.pool_id"], labels["skyward.nodes"], labels["skyward.is_final"]) == (pool, 1, True)
    with Ledger(default_url()) as ledger:
        rows = {row.key: row.cost_usd for row in ledger.cost_rows(CostBy.RUN, pool_id=pool)}
        assert set(rows) == {f"prefect:sharing/{first}", f"prefect:sharing/{second}"}
        assert 0 < rows[f"prefect:sharing/{second}"] < rows[f"prefect:sharing/{first}"]
        assert sum(rows.values()) == sum(row.cost_usd for row in ledger.cost_rows(pool_id=pool))


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


# ── the run on the node ──────────────────────────────────────────────────────────────────────────────────────────────


@task(cache_policy=NO_CACHE, tags=["gpu"], retries=1)
def context() -> sky.RunContext | None:
    found = sky.run_context()
    if found is not None and found.run_count == 1:
        raise ValueError("the first attempt")
    return found


@task
@on_skyward()
def contexts() -> Any:
    yield sky.run_context()


def test_a_call_knows_its_run(events: list[Any]) -> None:
    """On the node: ids and names of flow run and task run, tags, attempt, and the parameters as Prefect has them, unless they are long."""

    @flow(name="knowing", task_runner=runner(events))
    def knowing(rate: float, path: Path, long: str) -> tuple[Any, ...]:
        from prefect.runtime import flow_run

        assert sky.run_context() is None
        future = context.submit()
        return flow_run.id, flow_run.name, future.task_run_id, future.result(), next(contexts())

    run_id, run_name, task_run_id, found, streamed = knowing(0.5, Path("here"), "x" * 10_000)
    assert (found.system, found.workflow, found.run_id, found.run_name) == ("prefect", "knowing", run_id, run_name)
    assert (found.task, found.task_run_id, found.run_count) == ("context", str(task_run_id), 2)
    assert found.task_run_name.startswith("context-")
    assert (found.tags, dict(found.parameters), found.deployment) == (("gpu",), {"rate": 0.5, "path": "here"}, "")
    assert (streamed.run_id, streamed.task) == (run_id, "contexts")
    assert sky.run_context() is None


@pytest.mark.parametrize(("found", "is_refused"), [("3.5.9", True), ("2.20", True), ("3.6.0", False), ("4.0", False)])
def test_an_old_prefect_is_refused(found: str, is_refused: bool) -> None:
    if is_refused:
        with pytest.raises(ImportError, match=r"needs Prefect 3\.6 or newer"):
            refuse_old_prefect(found)
    else:
        assert refuse_old_prefect(found) is None


# ── the end of a flow ────────────────────────────────────────────────────────────────────────────────────────────────


def test_on_unfinished_and_max_workers(events: list[Any], tmp_path: Path) -> None:
    """With "cancel" a flow that returns stops its calls; with "wait" one that fails waits for them. Of a runner with one
    worker the second task run begins after the first.
    """
    futures: list[Any] = []
    go = tmp_path / "go"

    @task(cache_policy=NO_CACHE)
    def wait_for_go(began: Path) -> str:
        began.touch()
        while not go.exists():
            time.sleep(0.02)
        return "done"

    @flow(task_runner=runner(events, on_unfinished="cancel"))
    def hasty() -> None:
        futures.append(hang.submit(tmp_path / "hasty"))
        wait_for((tmp_path / "hasty").exists)

    @flow(task_runner=runner(events, on_unfinished="wait", max_workers=1, nodes=2))
    def failing() -> None:
        futures.extend(wait_for_go.submit(tmp_path / name) for name in ("one", "two"))
        wait_for((tmp_path / "one").exists)
        assert not (tmp_path / "two").exists()
        threading.Timer(0.5, go.touch).start()
        raise LookupError("the flow is wrong")

    hasty()
    with pytest.raises(LookupError):
        failing()
    for future in futures:
        future.wait()
    assert [future.state.name for future in futures] == ["Cancelled", "Completed", "Completed"]
    for wrong in ({"max_workers": 0}, {"on_unfinished": "hope"}, {"idle_timeout": 0}):
        with pytest.raises(sky.BadRequest, match=next(iter(wrong))):
            runner(events, **wrong)
