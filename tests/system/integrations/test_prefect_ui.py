"""What Prefect's UI shows of a run, read back from a real API: artifacts, events, labels and log lines."""

import json
import re
import time
from types import SimpleNamespace
from typing import Any
from uuid import UUID

import pytest

pytest.importorskip("prefect")
from tests.integrations import prefect_server  # isort: skip
from tests.integrations.prefect_server import artifacts, asked, events_of, messages, wait_for

from prefect import flow, task  # isort: skip
from prefect.cache_policies import NO_CACHE
from prefect.runtime import flow_run as current_run

import skyward_core as sky
from prefect_skyward import SkywardTaskRunner
from prefect_skyward.report import pages

pytestmark = [
    pytest.mark.filterwarnings("default"),  # Prefect's own warnings are not our faults
]
PRICE = 36.0


api = pytest.fixture(scope="module", autouse=True)(prefect_server.served)


@task(cache_policy=NO_CACHE)
def train(step_count: int) -> int:
    for step in range(step_count):
        sky.report(step=step, loss=1.0 / (step + 1))
        time.sleep(0.05)
    return step_count


@task(cache_policy=NO_CACHE)
def double(x: int) -> int:
    return 2 * x


@pytest.fixture(scope="module")
def run(api: str) -> SimpleNamespace:
    """A flow run of two attempts, each with a pool; the first one fails."""
    events: list[Any] = []
    ids: list[str] = []
    trained: list[str] = []

    @flow(
        name="two attempts",
        retries=1,
        task_runner=SkywardTaskRunner(
            provider=sky.Local(price_per_hour=PRICE), nodes=2, on_event=events.append, max_cost=10
        ),
    )
    def attempts() -> None:
        ids.append(current_run.id)
        assert double.map([1, 2, 3]).result() == [2, 4, 6]
        if len(ids) == 1:
            raise LookupError("the first attempt")
        future = train.submit(5)
        assert future.result() == 5
        trained.append(str(future.task_run_id))

    attempts()
    finals = [event for event in events if isinstance(event, sky.CostFinal)]
    pool_ids = [event.pool_id for event in events if isinstance(event, sky.InfraCreating)]
    assert len(finals) == len(pool_ids) == 2
    found = artifacts(ids[0])
    return SimpleNamespace(
        id=UUID(ids[0]),
        pool_ids=pool_ids,
        finals=finals,
        usd=sum(final.total_cost for final in finals),
        trained=trained[0],
        of_run={one["key"]: one for one in found if one["task_run_id"] is None},
        of_tasks={one["task_run_id"]: one for one in found if one["task_run_id"] is not None},
        count=len(found),
        provisioned=[event.instance_id for event in events if isinstance(event, sky.InstanceProvisioned)],
    )


def amounts(page: str, row: str) -> float:
    """The last amount of the row that begins with these words."""
    (line,) = [line for line in page.splitlines() if line.startswith(f"| {row}")]
    return float(re.findall(r"\$([0-9.]+)", line)[-1])


def section(page: str, head: str) -> list[list[str]]:
    """The cells of the table below a head, without its own head."""
    lines = page.split(f"### {head}")[1].split("###", maxsplit=1)[0].splitlines()
    return [line.strip("| ").split(" | ") for line in lines if line.startswith("|")][2:]


def test_the_cost_of_a_retried_run_is_one_artifact_that_sums_its_attempts(run: SimpleNamespace) -> None:
    """Its description, which lists show, begins with the amount."""
    artifact = run.of_run["skyward-cost"]
    assert artifact["type"] == "markdown"
    assert amounts(artifact["data"], "Total |") == pytest.approx(run.usd, abs=1e-4)
    assert amounts(artifact["data"], "Earlier attempts") == pytest.approx(run.finals[0].total_cost, abs=1e-4)
    assert artifact["description"].startswith(pages.usd(run.usd) + " · 2 x ")
    assert len([key for key in run.of_run if key == "skyward-cost"]) == 1
    assert all(f"`skyward receipt {pool_id}`" in artifact["data"] for pool_id in run.pool_ids)


def test_the_page_of_the_cost_adds_up(run: SimpleNamespace) -> None:
    """Machines, buckets and tasks each add up to the bill of this attempt, and a machine's price times its seconds is
    its cost but for the rounding of the provider.
    """
    page = run.of_run["skyward-cost"]["data"]
    bill = run.finals[1].total_cost
    *machines, earlier, whole = section(page, "How it adds up")
    nodes = [cells for cells in machines if cells[0].startswith("node")]
    assert len(nodes) == 2
    for _, rate, seconds, cost in nodes:
        assert rate == "$36.00"
        assert float(cost.strip("$")) == pytest.approx(PRICE * float(seconds) / 3600, abs=PRICE / 3600 + 1e-4)
    assert sum(float(cells[-1].strip("$")) for cells in machines) == pytest.approx(bill, abs=1e-3)
    assert earlier[0] == "earlier attempts"
    assert float(whole[-1].strip("$*")) == pytest.approx(run.usd, abs=1e-4)
    *buckets, together = section(page, "What it went to")
    assert sum(float(cells[1].strip("$")) for cells in buckets) == pytest.approx(bill, abs=1e-3)
    assert float(together[1].strip("$*")) == pytest.approx(bill, abs=1e-4)
    *tasks, attempt = section(page, "By task")
    assert {cells[0] for cells in tasks} >= {"train", "double", "no task (opening, idle time, the end)"}
    assert sum(float(cells[2].strip("$")) for cells in tasks) == pytest.approx(bill, abs=1e-3)
    assert float(attempt[2].strip("$*")) == pytest.approx(bill, abs=1e-4)


def test_the_table_of_nodes_has_the_machines_of_all_attempts(run: SimpleNamespace) -> None:
    rows = json.loads(run.of_run["skyward-nodes"]["data"])
    assert [(row["pool"], row["node"]) for row in rows] == [(pool, node) for pool in run.pool_ids for node in (0, 1)]
    assert {row["instance id"] for row in rows} == set(run.provisioned)
    assert sum(row["USD"] for row in rows) == pytest.approx(run.usd, abs=1e-4)
    assert {(row["price per hour"], row["spot"], row["state"]) for row in rows} == {(PRICE, "no", "ended")}


def test_opening_is_a_progress_artifact_that_ends_full(run: SimpleNamespace) -> None:
    artifact = run.of_run["skyward-machines"]
    assert (artifact["type"], float(artifact["data"])) == ("progress", 100.0)
    assert "ready after" in artifact["description"]


def test_task_runs_have_their_cost_in_one_table_and_the_costliest_ones_an_artifact(run: SimpleNamespace) -> None:
    """The table grows with the run; the number of artifacts does not."""
    rows = json.loads(run.of_run["skyward-tasks"]["data"])
    assert sorted(row["task"] for row in rows) == ["double"] * 6 + ["train"]
    assert rows[-4:][0]["USD"] >= 0
    assert all(row["USD"] > 0 for row in rows)
    trained = next(row for row in rows if row["task"] == "train")
    assert trained["task run"] == run.trained
    assert trained["loss"] == pytest.approx(0.2)
    assert len(run.of_tasks) <= 2 * 20
    assert set(run.of_tasks) <= {row["task run"] for row in rows}


def test_what_a_call_reports_is_an_artifact_of_its_task_run(run: SimpleNamespace) -> None:
    """The last value, the course, the step and the cost."""
    artifact = run.of_tasks[run.trained]
    assert re.search(r"\| loss \| 0\.2 \| 0\.2 \| 1 \| `[▁▂▃▄▅▆▇█]+` \|", artifact["data"])
    assert "Step 4" in artifact["data"]
    assert artifact["description"].endswith("loss 0.2")
    assert artifact["description"].startswith("$")


def test_events_are_few_and_name_run_and_pool(run: SimpleNamespace) -> None:
    """One when a pool is ready and one with its bill, each related to the flow run and its flow."""
    found = wait_for(lambda: found if len(found := events_of(run.id)) >= 4 else None)
    assert [one["event"] for one in found] == ["skyward.pool.ready", "skyward.cost.final"] * 2
    for one, pool_id in zip(found, [pool for pool in run.pool_ids for _ in (0, 1)], strict=True):
        assert one["resource"]["prefect.resource.id"] == f"skyward.pool.{pool_id}"
        roles = {related["prefect.resource.role"] for related in one["related"]}
        assert {"flow-run", "flow"} <= roles
    assert [one["payload"]["usd"] for one in found[1::2]] == [final.total_cost for final in run.finals]
    assert found[3]["payload"]["flow_run_usd"] == pytest.approx(run.usd, abs=1e-4)
    assert len(events_of(run.id, "prefect.artifact.")) <= 8


def test_labels_of_the_flow_run_have_the_cost_and_the_pool(run: SimpleNamespace) -> None:
    (found,) = asked("/flow_runs/filter", {"flow_runs": {"id": {"any_": [str(run.id)]}}})
    labels = found["labels"]
    assert labels["skyward.cost_usd"] == pytest.approx(run.usd, abs=1e-4)
    assert labels["skyward.pool_id"] == run.pool_ids[1]
    assert (labels["skyward.provider"], labels["skyward.nodes"], labels["skyward.is_final"]) == ("local", 2, True)


def test_the_log_of_the_flow_run_has_no_warning_of_the_report(run: SimpleNamespace) -> None:
    lines = wait_for(lambda: lines if len(lines := messages(run.id)) > 10 else None)
    assert [text for level, text in lines if level >= 30 and "incomplete" in text] == []
