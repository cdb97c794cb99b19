"""The tabs of the Airflow plugin: their routes, who may read them, and the bills from the ledger."""

import importlib.util
import json
import os
import subprocess
import sys
from typing import Any

import pytest

if importlib.util.find_spec("airflow") is None:
    pytest.skip("Airflow is not installed", allow_module_level=True)


PROGRAM = """
import json
from airflow.api_fastapi.app import init_auth_manager
from airflow.api_fastapi.auth.managers.simple.user import SimpleAuthManagerUser
from fastapi.testclient import TestClient
import skyward_core as sky
from airflow_provider_skyward.plugin import SkywardPlugin

def nothing():
    return 1

def rent(**work):
    pool = sky.ComputePool.from_spec(
        sky.PoolSpec(provider=sky.Local(price_per_hour=36.0), display="quiet"),
        work=sky.Work(system="airflow", **work))
    with pool:
        sky.compute(nothing)() >> pool
    return pool.id

pools = {
    "try 1": rent(workflow="nightly", run="run 1/a", task="train", attempt="1"),
    "other dag": rent(workflow="secret", run="run 1/a", task="train", attempt="1"),
}
manager = init_auth_manager()
client = TestClient(SkywardPlugin.fastapi_apps[0]["app"])
roles = {"viewer": "VIEWER", "no rights": None}
logins = {"nobody": {}, "bad token": {"Authorization": "Bearer wrong"}} | {
    name: {"Authorization": "Bearer " + manager.generate_jwt(SimpleAuthManagerUser(username=name, role=role))}
    for name, role in roles.items()}
run, task = {"run_id": "run 1/a"}, {"run_id": "run 1/a", "task_id": "train"}
routes = {"/tabs.js": {}, "/dags/nightly/run": run, "/dags/nightly/task": task}
print("ANSWER", json.dumps({
    "pools": pools,
    "paths": sorted(route.path for route in client.app.routes),
    "tabs": SkywardPlugin.react_apps,
    "status": {login: {path: client.get(path, params=params, headers=headers).status_code
        for path, params in routes.items()} for login, headers in logins.items()},
    "run": client.get("/dags/nightly/run", params=run, headers=logins["viewer"]).json(),
    "task": client.get("/dags/nightly/task", params=task, headers=logins["viewer"]).json(),
    "no run": client.get("/dags/nightly/run", params={"run_id": ""}, headers=logins["viewer"]).status_code,
    "unknown": client.get("/dags/nightly/run", params={"run_id": "none"}, headers=logins["viewer"]).json(),
    "bundle": client.get("/tabs.js", headers=logins["viewer"]).text,
    "cost": sky.cost_of(sky.Work(workflow="nightly")),
}))
"""


@pytest.fixture(scope="module")
def answer(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    home = tmp_path_factory.mktemp("airflow")
    environ = {
        **os.environ,
        "AIRFLOW_HOME": str(home),
        "AIRFLOW__CORE__LOAD_EXAMPLES": "False",
        "SKYWARD_LEDGER": f"sqlite:///{home}/ledger.sqlite",
    }
    subprocess.run([sys.executable, "-m", "airflow", "db", "migrate"], env=environ, check=True, capture_output=True)
    program = home / "program.py"
    program.write_text(PROGRAM)
    ran = subprocess.run([sys.executable, program], env=environ, capture_output=True, text=True, timeout=100)
    lines = [line for line in ran.stdout.splitlines() if line.startswith("ANSWER ")]
    assert lines, ran.stdout + ran.stderr
    return json.loads(lines[0].removeprefix("ANSWER "))


def test_each_route_refuses_readers_without_login_or_rights(answer: dict[str, Any]) -> None:
    """Without a login each route answers 401, with an invalid one 403; so do the bills to a user without rights."""
    bills = ["/dags/nightly/run", "/dags/nightly/task"]
    assert answer["paths"] == ["/dags/{dag_id}/run", "/dags/{dag_id}/task", "/tabs.js"]
    assert set(answer["status"]["nobody"].values()) == {401}
    assert set(answer["status"]["bad token"].values()) == {403}
    assert [answer["status"]["no rights"][path] for path in bills] == [403, 403]
    assert set(answer["status"]["viewer"].values()) == {200}


def test_the_bills_are_those_of_the_ledger(answer: dict[str, Any]) -> None:
    """A run and a task have the cost that the ledger has, and nothing of another DAG."""
    assert answer["run"] == answer["task"]
    assert [pool["pool_id"] for pool in answer["run"]["pools"]] == [answer["pools"]["try 1"]]
    assert answer["run"]["cost_usd"] == pytest.approx(sum(answer["cost"].values()))
    assert answer["run"]["cost_usd"] > 0
    assert answer["no run"] == 422
    assert (answer["unknown"]["cost_usd"], answer["unknown"]["pools"]) == (0, [])


def test_the_module_has_the_components_of_both_tabs(answer: dict[str, Any]) -> None:
    """Airflow's UI looks for a component by the name of each tab."""
    assert {tab["name"] for tab in answer["tabs"]} == {"Skyward", "Cost"}
    assert all(f"globalThis.{tab['name']} = " in answer["bundle"] for tab in answer["tabs"])
