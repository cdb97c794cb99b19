"""`skyward quote dags/`: what the tasks of DAGs would rent, from their files alone."""

import importlib.util
import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

if importlib.util.find_spec("airflow") is None:
    pytest.skip("Airflow is not installed", allow_module_level=True)

from airflow_provider_skyward.quotes import planned_tasks

pytestmark = pytest.mark.timeout(400)

DAGS = """
from datetime import timedelta
from airflow.sdk import dag, task, task_group
import skyward_core as sky
from airflow_provider_skyward.operators import SkywardOperator
from neighbour import LOCAL

print("this file prints")

@task
def pick(): return [1, 2]

@dag(schedule=None, default_args={"retries": 1})
def nightly():
    @task.skyward(provider=LOCAL, nodes=2, max_cost=3.0)
    def train(x=1): return x
    train()
    train.override(task_id="slow", retries=0, execution_timeout=timedelta(minutes=30), max_cost=None)()
    train.override(task_id="deferred", deferrable=True, execution_timeout=timedelta(minutes=30), max_cost=None)()
    train.override(task_id="templated", nodes="{{ params.nodes }}", cpu=pick())()
    train.override(task_id="tagged", env={"DAY": "{{ ds }}"}, budget="{{ params.team }}")()
    class Setup(SkywardOperator):
        is_pool_setup = True
    Setup(task_id="setup", python_callable=len, op_args=["ab"], provider=LOCAL, execution_timeout=timedelta(minutes=30))
    user = SkywardOperator(task_id="user", python_callable=len, op_args=["ab"], provider=LOCAL)
    user.pool_setup_id = "setup"
    train.override(task_id="three").expand(x=[1, 2, 3])
    train.override(task_id="many").expand(x=pick())
    SkywardOperator.partial(task_id="sizes", python_callable=len, op_args=["ab"], spec=sky.PoolSpec.of(provider=LOCAL)
        ).expand(nodes=[1, 2])
    SkywardOperator.partial(task_id="dicts", python_callable=len, op_args=["ab"], provider=LOCAL
        ).expand_kwargs([{"nodes": 2, "op_args": ["a"]}, {"nodes": 2, "op_args": ["b"]}, {"nodes": 1}])
    SkywardOperator.partial(task_id="later", python_callable=len, op_args=["ab"], provider=LOCAL).expand_kwargs(pick())
    @task_group
    def group(x):
        SkywardOperator(task_id="inner", python_callable=len, op_args=["ab"], provider=LOCAL)
    group.expand(x=[1, 2])
nightly()
"""

PROGRAM = """
import sys
from skyward_core import cli
sys.addaudithook(lambda event, args: sys.exit(f"{event} {args}") if event == "socket.connect" else None)
sys.exit(cli.main(sys.argv[1:]))
"""


@pytest.fixture(scope="module")
def found(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    """Quote a folder of DAGs, without a database and without a network."""
    home = tmp_path_factory.mktemp("airflow")
    dags = home / "dags"
    dags.mkdir()
    (dags / "nightly.py").write_text(DAGS)
    (dags / "neighbour.py").write_text("import skyward_core as sky\nLOCAL = sky.Local(price_per_hour=2.0)\n")
    (dags / "bad.py").write_text("from airflow.sdk import dag\nraise LookupError('no such table')\n")
    environ = {
        **os.environ,
        "AIRFLOW_HOME": str(home),
        "AIRFLOW__DATABASE__SQL_ALCHEMY_CONN": f"sqlite:///{home}/no/such/folder/airflow.db",
        "SKYWARD_LEDGER": f"sqlite:///{home}/no/such/folder/ledger.db",
    }
    command = [sys.executable, "-c", PROGRAM, "quote", str(dags), "--json"]
    ran = subprocess.run(command, env=environ, capture_output=True, text=True, timeout=300, cwd=home)
    assert ran.returncode == 1, ran.stdout + ran.stderr
    assert "skyward: airflow: " in ran.stderr
    return json.loads(ran.stdout)


def rows(found: dict[str, Any], name: str) -> list[dict[str, Any]]:
    return [one for one in found["tasks"] if one["task"] == name]


def test_each_task_of_the_dags_is_quoted(found: dict[str, Any]) -> None:
    """Price, tries and ceiling: of `max_cost` for both tries, or of `execution_timeout`. For a deferred task that holds
    twice: until its call has ended, and for the worker that comes back.
    """
    (train,), (slow,), (deferred,) = (rows(found, name) for name in ("train", "slow", "deferred"))
    assert (train["workflow"], train["price_per_hour"], train["tries"]) == ("nightly", 4.0, 2)
    assert (train["ceiling_usd"], train["run_ceiling_usd"]) == (3.0, 6.0)
    assert (slow["timeout_seconds"], slow["tries"], slow["run_ceiling_usd"]) == (1800, 1, 2.0)
    assert (deferred["timeout_seconds"], deferred["ceiling_usd"]) == (3600, 4.0)


def test_a_shared_pool_is_quoted_once(found: dict[str, Any]) -> None:
    """That is in its setup task. The pool outlives this task, so its timeout limits nothing."""
    (setup,) = rows(found, "setup")
    assert (setup["price_per_hour"], setup["timeout_seconds"], setup["ceiling_usd"]) == (2.0, None, None)
    assert rows(found, "user") == []


def test_what_only_a_run_knows_is_named(found: dict[str, Any]) -> None:
    """Templates, results of other tasks and mapped keywords that decide on the price are the reason; others do not
    matter.
    """
    (templated,), (tagged,), (later,) = (rows(found, name) for name in ("templated", "tagged", "later"))
    assert (templated["asks_for"], templated["price_per_hour"]) == (None, None)
    assert "nodes, cpu are known only in a run" in templated["reason"]
    assert tagged["price_per_hour"] == 4.0
    assert later["instances"] is None
    assert later["reason"]


def test_mapped_tasks_are_counted(found: dict[str, Any]) -> None:
    """Lists in the file are counted, and keywords of the pool among them are rows of their own."""
    (three,), (many,), (inner,) = (rows(found, name) for name in ("three", "many", "group.inner"))
    assert (three["instances"], three["run_ceiling_usd"]) == (3, 18.0)
    assert (many["instances"], many["run_ceiling_usd"], inner["instances"]) == (None, None, None)
    assert [(one["instances"], one["price_per_hour"]) for one in rows(found, "sizes")] == [(1, 2.0), (1, 4.0)]
    assert [(one["instances"], one["price_per_hour"]) for one in rows(found, "dicts")] == [(2, 4.0), (1, 2.0)]


def test_a_file_with_a_fault_does_not_hide_the_others(found: dict[str, Any]) -> None:
    (warning,) = found["warnings"]
    assert "bad.py: LookupError: no such table" in warning


@pytest.mark.parametrize("target", ["project.definitions:defs", "jobs.crontab", "no/such/folder"])
def test_another_target_is_left_to_other_orchestrators(target: str, tmp_path: Path) -> None:
    (tmp_path / "jobs.crontab").touch()
    assert planned_tasks(str(tmp_path / target)) is None
