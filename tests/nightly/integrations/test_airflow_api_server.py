"""A real Airflow whose api-server is restarted while tasks run. Its limit for silent workers is Airflow's own, 300 s."""

import importlib.util
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

if importlib.util.find_spec("airflow") is None:
    pytest.skip("Airflow is not installed", allow_module_level=True)

from tests.integrations.airflow_server import AirflowServer, wait_for
from tests.nightly.integrations.test_airflow_server import FINAL, start  # noqa: F401 - a fixture

pytestmark = [pytest.mark.timeout(900)]
HEARTBEATS = {
    "AIRFLOW__SCHEDULER__TASK_INSTANCE_HEARTBEAT_TIMEOUT": "300",
    "AIRFLOW__WORKERS__MIN_HEARTBEAT_INTERVAL": "5",
}


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[AirflowServer]:
    dags = (Path(__file__).parents[2] / "integrations" / "airflow_dags.py").read_text()
    server = AirflowServer(tmp_path_factory.mktemp("airflow"), {"airflow_dags.py": dags}, **HEARTBEATS)
    yield server
    server.close()


def test_a_running_and_a_deferred_task_outlive_the_api_server(start: Any, server: AirflowServer) -> None:
    """SIGKILL to it while both calls run. Supervisor and triggerer reach the next one: each function runs once, and its
    task has its result and its whole bill.
    """
    running, deferred = start("durable"), start("deferred")
    for job in (running, deferred):
        job.begun()
    running.run.wait("running")
    deferred.run.wait("deferred")
    begun_by = {job: job.runs for job in (running, deferred)}
    server.kill("api-server")
    server.start("api-server")
    wait_for(server.is_healthy, "a healthy Airflow")
    for job in (running, deferred):
        job.go()
        assert job.run.wait(FINAL)["state"] == "success"
        # on a busy machine Airflow may fail a try before its function begins; the restart must not cost one
        (attempt,) = begun_by[job]
        assert job.runs == [attempt]
        assert job.run.task()["try_number"] == int(attempt)
        assert job.run.log(attempt=int(attempt)).count("[node 0] the end") == 1
        job.check_bill(pools=1)
