"""One pool for several tasks of a DAG run: setup, mapped tasks, teardown, and what happens when one of them fails.

This file is also the program of a worker: `python test_airflow_pools.py FOLDER TASK` runs one task of such a DAG.
"""

import importlib.util
import os
import signal
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.system.integrations.test_airflow import ROOT, airflow  # noqa: F401 - fixtures
from tests.system.integrations.test_airflow_durable import read_until
from tests.system.integrations.test_airflow_pools import (
    Airflow,
    Run,
    pools_of,
)

if importlib.util.find_spec("airflow") is None:
    pytest.skip("Airflow is not installed", allow_module_level=True)


pytestmark = pytest.mark.timeout(400)  # the first test also makes Airflow's database


@pytest.mark.timeout(400)
def test_the_example_shares_its_machines(airflow: "Airflow") -> None:
    """dags/shared_pool.py: mapped tasks and one behind them, on one pool of two machines."""
    ran = airflow.run("example", (ROOT / "dags" / "shared_pool.py").read_text(), head="")
    assert ran.state == "success", ran.log
    assert ran.xcoms["machines.fit_best", -1, "return_value"]["score"] > 0.9
    (pool,) = pools_of(airflow, "shared_pool")
    assert (len(pool["resources"]), pool["left"]) == (2, [])
    bill = ran.xcoms["machines.release_pool", -1, "return_value"]
    assert sum(bill["shares"].values()) == pytest.approx(pool["total_cost_usd"], abs=1e-9)


@pytest.fixture
def dag_run(tmp_path: Path) -> Iterator[Run]:
    run = Run(tmp_path)
    yield run
    run.end()


@pytest.mark.timeout(400)
def test_a_killed_task_leaves_the_pool_to_the_others(dag_run: Run) -> None:
    """One task is killed, one is told to end, and a third goes on; a later one finds the same machines. The teardown
    ends them, and the bill has the part of each.
    """
    handle = dag_run.finish("create")
    killed, asked, going_on = (dag_run.start(task) for task in ("killed", "asked", "going_on"))
    for process in (killed, asked, going_on):
        read_until(process, "[node 0] working")
    os.killpg(killed.pid, signal.SIGKILL)
    os.killpg(asked.pid, signal.SIGTERM)
    said, _ = asked.communicate(timeout=60)
    assert "raised AirflowException: the task was asked to stop" in said
    assert not dag_run.pools()[0]["ended_at"]
    dag_run.wait_for_share("going_on")
    (dag_run.folder / "go-going_on").touch()
    dag_run.said, _ = going_on.communicate(timeout=120)
    assert dag_run.result() == "going_on"
    assert dag_run.finish("later") == "later"
    assert "launching" not in dag_run.said
    bill = dag_run.finish("release")
    (pool,) = dag_run.pools()
    assert (pool["pool"], bool(pool["ended_at"])) == (handle["pool_id"], True)
    assert bill["cost_usd"] == pytest.approx(pool["cost_usd"])
    assert sum(bill["shares"].values()) == pytest.approx(bill["cost_usd"], abs=1e-9)
    assert 0 < bill["shares"]["going_on"] < bill["cost_usd"]
    assert bill["shares"]["create"] > 0


@pytest.mark.timeout(300)
def test_a_setup_that_is_asked_to_end_ends_its_pool(dag_run: Run) -> None:
    """Airflow runs no teardown after it."""
    setup = dag_run.start("create")
    read_until(setup, "launching")
    os.killpg(setup.pid, signal.SIGTERM)
    said, _ = setup.communicate(timeout=60)
    assert "raised AirflowException: the task was asked to stop" in said
    deadline = time.monotonic() + 120
    while not all(pool["ended_at"] for pool in dag_run.pools()) and time.monotonic() < deadline:
        time.sleep(0.2)
    assert all(pool["ended_at"] for pool in dag_run.pools())
