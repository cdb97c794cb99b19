"""Prefect flow runs that share a pool with a name; calls on all workers; how task runs and flow runs end."""

import os
import threading
import time
from pathlib import Path
from typing import Any
from uuid import UUID

import pytest

pytest.importorskip("prefect")

from tests.integrations import prefect_server  # noqa: I001 - before Prefect
from tests.integrations.prefect_server import artifacts, events_of, runner, wait_for

from prefect import flow, task
from prefect.cache_policies import NO_CACHE
from prefect.client.orchestration import get_client
from prefect.runtime import flow_run as current_run

import skyward_core as sky
from prefect_skyward import on_skyward
from prefect_skyward.report.pages import usd
from skyward_core.ledger.ledger import Ledger, default_url
from skyward_core.ledger.rows import CostBy

pytestmark = [
    pytest.mark.filterwarnings("default"),  # Prefect's own warnings are not our faults
]

api = pytest.fixture(scope="module", autouse=True)(prefect_server.served)


@task(cache_policy=NO_CACHE)
def busy() -> str:
    time.sleep(1.5)  # the cost of buckets is by whole seconds
    return os.environ["SKYWARD_POOL_ID"]


@task(cache_policy=NO_CACHE)
def hang(path: Path) -> None:
    path.touch()
    time.sleep(600)


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
