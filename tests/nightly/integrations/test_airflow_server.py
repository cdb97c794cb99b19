"""Tasks of a real Airflow with its own supervisor, scheduler and triggerer: deferral, kills, crashes, restarts.

After each test no machine of its tasks lives, the tab of the UI has the ledger's bill, and no generation has run twice.
"""

import importlib.util
import os
import signal
import subprocess
import sys
from collections.abc import Iterator
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import pytest

if importlib.util.find_spec("airflow") is None:
    pytest.skip("Airflow is not installed", allow_module_level=True)

from tests.integrations.airflow_host import micro
from tests.integrations.airflow_server import DAGS, FINAL, AirflowServer, DagRun, Job, parent_of
from tests.page_blocks import programs
from tests.waiting import wait_until

pytestmark = [pytest.mark.timeout(900)]


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[AirflowServer]:
    first = programs("docs/airflow/function.md")[0]
    of_asset = first.replace("import dag, task", "import Asset, dag, task").replace(
        "@dag(schedule=None)\ndef pools",
        '@dag(dag_id="pools_of_asset", schedule=[Asset("s3://bucket/new")])\ndef pools',
    )
    pages = {"pools.py": first, "pools_of_asset.py": of_asset}
    sweep = Path(__file__).parents[3].joinpath("dags/sweep.py").read_text()
    at_once = sweep.replace("timedelta(minutes=10)", "None", 1).replace(
        "bills(asset_state_store)", "bills(asset_state_store, newest=timedelta(0))"
    )
    server = AirflowServer(tmp_path_factory.mktemp("airflow"), DAGS | pages | {"sweep.py": at_once})
    yield server
    server.close()


@pytest.fixture
def start(server: AirflowServer, tmp_path: Path) -> Iterator[Any]:
    jobs: list[Job] = []

    def begin(dag_id: str) -> Job:
        jobs.append(Job(server, tmp_path / f"{dag_id}-{len(jobs)}", dag_id))
        return jobs[-1]

    yield begin
    for job in jobs:
        job.go()


def test_a_task_runs_and_a_deferred_one_too(start: Any) -> None:
    """Both return the function's result; the log has each of its lines once; the bill is the ledger's."""
    attended, deferred = start("attended"), start("deferred")
    for job in (attended, deferred):
        job.begun()
    deferred.run.wait("deferred")
    links = [job.run.links() for job in (attended, deferred)]
    for job, found in zip((attended, deferred), links, strict=True):
        page = f"{job.server.url}/dags/{job.run.dag_id}/runs/{job.run.run_id}/tasks/work/plugin/skyward"
        assert found["Skyward"] == page
        assert found["Receipt"].startswith(f"{job.server.url}/skyward/dags/{job.run.dag_id}/task?")
        assert found["Cloud console"] is None  # `Local` has none
    wait_until(lambda: "[node 0] line 3" in deferred.run.log(), "lines that the trigger writes")
    for job in (attended, deferred):
        job.go()
        job.run.wait("success")
        assert job.run.xcom("return_value") == 42
        assert job.run.log().count("[node 0] line 1\n") == 1
        assert job.run.log().count("[node 0] the end") == 1
        job.check_bill(pools=1)
        assert job.run.stored("skyward_metrics")["cost_usd"] == job.run.xcom("skyward_cost")["cost_usd"]
    assert [job.run.links() for job in (attended, deferred)] == links


WAYS = ("dags test", "dags trigger", "without a date", "with a date, as the UI", "an asset")


@pytest.mark.parametrize("way", WAYS)
def test_the_first_example_of_the_page_runs_however_it_is_started(way: str, server: AirflowServer) -> None:
    dag_id = "pools_of_asset" if way == "an asset" else "pools"
    path = f"/api/v2/dags/{dag_id}"
    wait_until(
        lambda: dag_id in {dag["dag_id"] for dag in server.ask("GET", "/api/v2/dags")["dags"]}, f"the DAG {dag_id}"
    )
    before = {run["dag_run_id"] for run in server.ask("GET", f"{path}/dagRuns")["dag_runs"]}
    if way.startswith("dags "):
        command = [sys.executable, "-m", "airflow", *way.split(), dag_id]
        subprocess.run(command, env=server.environ, cwd=server.home, check=True, capture_output=True, timeout=300)
    elif way == "an asset":
        (asset,) = server.ask("GET", "/api/v2/assets", params={"uri_pattern": "s3://bucket/new"})["assets"]
        server.ask("POST", "/api/v2/assets/events", json={"asset_id": asset["id"]})
    else:
        date = datetime.now(UTC).isoformat() if "UI" in way else None
        server.ask("POST", f"{path}/dagRuns", json={"logical_date": date})
    runs = wait_until(
        lambda: [one for one in server.ask("GET", f"{path}/dagRuns")["dag_runs"] if one["dag_run_id"] not in before],
        "the DAG run",
    )
    run = DagRun(server, dag_id, runs[0]["dag_run_id"])
    run.wait("success", "classic")
    run.wait("success", "tell")
    assert (run.xcom("return_value", "square"), run.xcom("return_value", "classic")) == ([1, 4, 9], 5.0)
    assert "[1, 4, 9] for 0." in run.log("tell") or way == "dags test", "whose log is on the terminal"


@pytest.mark.parametrize("who", ["task", "supervisor"])
def test_the_next_try_adopts_the_call_of_a_worker_that_was_killed(start: Any, who: str) -> None:
    job = start("durable")
    job.begun()
    wait_until(lambda: "[node 0] line 1" in job.run.log(), "the log")
    pid = job.run.task()["pid"]
    os.kill(pid if who == "task" else parent_of(pid), signal.SIGKILL)
    wait_until(lambda: job.run.task()["try_number"] == 2, "the next try")
    job.run.wait("running")
    wait_until(lambda: "adopted the call that try 1 has begun" in job.run.log(), "the adoption")
    job.go()
    assert job.run.wait(FINAL)["state"] == "success"
    assert job.runs == ["1"]
    job.check_bill(pools=1)


def test_the_sweep_makes_the_bill_of_a_task_final_that_was_killed_in_its_last_try(
    start: Any, server: AirflowServer
) -> None:
    """No next try writes it. Its pool ends by itself, and then the XCom has what the tab has."""
    job = start("attended")
    job.begun()
    pid = job.run.task()["pid"]
    for one in (parent_of(pid), pid):
        os.kill(one, signal.SIGKILL)
    cost = job.ended(pools=1)
    job.run.wait("failed")
    assert job.run.xcom("skyward_cost")["is_final"] is False
    swept = server.trigger("skyward_sweep")
    swept.wait("success", "make_bills_final")
    assert job.run.dag_id in str(swept.xcom("return_value", "make_bills_final"))
    bill = job.run.xcom("skyward_cost")
    assert (bill["is_final"], micro(bill["cost_usd"]), micro(bill["all_tries_usd"])) == (True, micro(cost), micro(cost))
    assert micro(job.run.tab()["cost_usd"]) == micro(cost)


def test_a_deferred_task_outlives_its_triggerer_and_its_scheduler(start: Any, server: AirflowServer) -> None:
    """SIGKILL to both while the call runs: the next triggerer follows the call, and the task has its result."""
    job = start("deferred")
    job.begun()
    job.run.wait("deferred")
    wait_until(lambda: "[node 0] line 1" in job.run.log(), "lines that the trigger writes")
    for name in ("triggerer", "scheduler"):
        server.kill(name)
        server.start(name)
    before = job.run.log().count("[node 0] line")
    wait_until(lambda: job.run.log().count("[node 0] line") > before + 5, "lines that the next trigger writes")
    job.go()
    assert job.run.wait(FINAL)["state"] == "success"
    assert job.runs == ["1"]
    job.check_bill(pools=1)


def test_a_deferral_that_takes_too_long_ends_its_pool(start: Any) -> None:
    """`execution_timeout` is for the whole task, also while it is deferred."""
    job = start("timed")
    job.begun()
    job.run.wait("failed")
    job.check_bill(pools=1)


def test_the_example_trains_without_a_worker_and_goes_on_from_its_checkpoint(
    server: AirflowServer, tmp_path: Path
) -> None:
    """The process of the first run is killed at step 123; the second one begins at step 120. The bill has both."""
    run = server.trigger("deferrable_training", folder=str(tmp_path / "checkpoints"))
    run.wait(FINAL, "report")
    assert run.xcom("return_value", "train") == {"begun_at": 120, "slope": pytest.approx(3.0, abs=0.01)}
    bill = run.xcom("skyward_cost", "train")
    assert set(bill["tries"]) >= {"1", "2"}
    assert sum(cost > 0 for cost in bill["tries"].values()) == 2
    assert micro(run.tab("train")["cost_usd"]) == micro(bill["all_tries_usd"])
    assert "deferrable_training: {" in run.log("report")


def test_a_running_and_a_deferred_task_outlive_the_api_server(tmp_path: Path) -> None:
    """SIGKILL to it while both calls run, with Airflow's own limit for silent workers."""
    limits = {"SCHEDULER__TASK_INSTANCE_HEARTBEAT_TIMEOUT": "300", "WORKERS__MIN_HEARTBEAT_INTERVAL": "5"}
    server = AirflowServer(tmp_path / "home", DAGS, **{f"AIRFLOW__{name}": value for name, value in limits.items()})
    try:
        jobs = [Job(server, tmp_path / dag_id, dag_id) for dag_id in ("durable", "deferred")]
        for job in jobs:
            job.begun()
        jobs[0].run.wait("running")
        jobs[1].run.wait("deferred")
        begun_by = [job.runs for job in jobs]
        server.kill("api-server")
        server.start("api-server")
        wait_until(server.is_healthy, "a healthy Airflow")
        for job, (attempt,) in zip(jobs, begun_by, strict=True):
            job.go()
            assert job.run.wait(FINAL)["state"] == "success"
            # on a busy machine Airflow may fail a try before its function begins; the restart must not cost one
            assert job.runs == [attempt]
            assert job.run.task()["try_number"] == int(attempt)
            # Airflow's supervisor may set the state before it has written the last lines
            wait_until(lambda its=job.run, of=int(attempt): "of each machine" in its.log(attempt=of), "the last line")
            assert job.run.log(attempt=int(attempt)).count("[node 0] the end") == 1
            job.check_bill(pools=1)
    finally:
        server.close()
