"""The services of docker-compose.yml run here, and Prefect, Airflow and Dagster use the two nodes and the ledger."""

import json
import os
import shutil
import signal
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import pytest
import yaml

from tests.ports import free_ports
from tests.stack.__main__ import READY
from tests.stack.compose import ROOT, read, read_env, variables_of
from tests.stack.native import check_ports
from tests.waiting import wait_until

pytestmark = [pytest.mark.timeout(900)]

PORTS = [name for name in variables_of(read()) if name.endswith("_PORT")]
MICRO_DOLLAR = 1e-6
STEP_SECONDS = 300.0
"""How long a step may take beside other tests, its installation on the nodes included."""
LAUNCH = """mutation ($params: ExecutionParams!) { launchRun(executionParams: $params) {
  __typename ... on LaunchRunSuccess { run { runId } } ... on PythonError { message } } }"""
STATUS = """query ($run: ID!) { runOrError(runId: $run) { ... on Run { status } } }"""
COSTS = """query { assetNodes {
  assetMaterializations { runId metadataEntries { label ... on FloatMetadataEntry { floatValue } } }
  assetObservations { runId metadataEntries { label ... on FloatMetadataEntry { floatValue } } } } }"""


@pytest.fixture
def folder() -> Iterator[Path]:
    """A folder through which the user of PostgreSQL may pass, which pytest's own are not."""
    path = Path(tempfile.mkdtemp(prefix="stack-", dir="/var/tmp"))
    yield path
    shutil.rmtree(path)


def test_a_dag_a_flow_and_an_asset_use_the_nodes_and_nothing_is_left(folder: Path) -> None:
    """Each orchestrator shows the cost that the ledger has, and the ledger has the end of each machine."""
    ports = dict(zip(PORTS, map(str, free_ports(len(PORTS))), strict=True))
    ledger = ledger_at(ports["POSTGRES_PORT"])
    process = started(folder, ports)
    try:
        wait_until_ready(process)
        shown = {
            "airflow": cost_in_airflow(f"http://127.0.0.1:{ports['AIRFLOW_PORT']}"),
            "prefect": cost_in_prefect(f"http://127.0.0.1:{ports['PREFECT_PORT']}/api"),
            "dagster": cost_in_dagster(f"http://127.0.0.1:{ports['DAGSTER_PORT']}", ledger),
        }
        receipts = receipts_by_system(ledger, *shown)
    finally:
        process.send_signal(signal.SIGINT)
        output = process.communicate(timeout=300)[0]
    assert process.returncode == 0, output
    assert shown == {
        system: pytest.approx(receipt["total_cost_usd"], abs=MICRO_DOLLAR) for system, receipt in receipts.items()
    }
    assert min(shown.values()) > 0
    for receipt in receipts.values():
        assert receipt["left"] == []
        assert [machine["price_per_hour_usd"] for machine in receipt["resources"]] == [1.2, 1.2]
        for machine in receipt["resources"]:
            assert machine["bound_at"] < machine["end_asked_at"] <= machine["gone_at"] <= receipt["ended_at"]
    assert processes_of(folder) == []
    check_ports(ports)


def test_a_flow_that_is_stopped_with_the_stack_gives_its_nodes_back(folder: Path) -> None:
    """Its calls run when Ctrl-C comes. The next stack with the same data has the end in the log, and the bill."""
    ports = dict(zip(PORTS, map(str, free_ports(len(PORTS))), strict=True))
    url = f"http://127.0.0.1:{ports['PREFECT_PORT']}/api"
    process = started(folder, ports, COMPOSE_FILE=part_of(folder, "prefect-deploy", "node-1", "node-2"))
    try:
        wait_until_ready(process)
        with httpx.Client(base_url=url, timeout=60) as http:
            run = begun_flow_run(http)
            wait_until(lambda: "on node" in log_of(http, run), "a call on a node", STEP_SECONDS)
    finally:
        process.send_signal(signal.SIGINT)
        output = process.communicate(timeout=300)[0]
    assert process.returncode == 0, output
    assert processes_of(folder) == []
    check_ports(ports)
    again = started(folder, ports, COMPOSE_FILE=part_of(folder, "prefect-server"))
    try:
        wait_until_ready(again)
        with httpx.Client(base_url=url, timeout=60) as http:
            log = log_of(http, run)
        (receipt,) = receipts_by_system(ledger_at(ports["POSTGRES_PORT"]), "prefect").values()
    finally:
        again.send_signal(signal.SIGINT)
        again.communicate(timeout=300)
    assert receipt["left"] == [], log
    assert receipt["total_cost_usd"] > 0
    assert "giving the machines back" in log


def part_of(folder: Path, *names: str) -> str:
    """Write a compose file with these services and all that they need; return its path."""
    content, wanted, found = read(), [*names], {}
    while wanted:
        one = wanted.pop()
        found[one] = content["services"][one]
        wanted += found[one].get("depends_on", {})
    path = folder / "part.yml"
    path.write_text(yaml.safe_dump(content | {"services": found}))
    return str(path)


def started(folder: Path, ports: dict[str, str], **more: str) -> subprocess.Popen[str]:
    own = {"STACK_DATA": str(folder), "POSTGRES_FSYNC": "off", **ports, **more}
    return subprocess.Popen(
        [sys.executable, "-m", "tests.stack"],
        cwd=ROOT,
        env=os.environ | own,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        start_new_session=True,
    )


def wait_until_ready(process: subprocess.Popen[str]) -> None:
    assert process.stdout is not None
    lines: list[str] = []
    for line in process.stdout:
        lines.append(line)
        if line.strip() == READY:
            return
    pytest.fail("the stack has ended:\n" + "".join(lines))


# ── the three orchestrators, through the APIs of their UIs ───────────────────────────────────────────────────────────


def cost_in_airflow(url: str) -> float:
    with httpx.Client(base_url=url, timeout=60) as http:
        http.headers["Authorization"] = f"Bearer {http.get('/auth/token').json()['access_token']}"
        wait_until(lambda: http.get("/api/v2/dags/two_nodes_dag").status_code == 200, "the DAG")
        run = http.post("/api/v2/dags/two_nodes_dag/dagRuns", json={"logical_date": None}).raise_for_status().json()
        task = f"/api/v2/dags/two_nodes_dag/dagRuns/{run['dag_run_id']}/taskInstances/squares"

        def end() -> str | None:
            state = http.get(task).json()["state"]
            return state if state in {"success", "failed", "up_for_retry"} else None

        state = wait_until(end, "the task", STEP_SECONDS)
        assert state == "success", http.get(f"{task}/logs/1", headers={"Accept": "application/x-ndjson"}).text[-4000:]
        assert value(http, task, "return_value") == [1, 4, 9, 16]
        cost = value(http, task, "skyward_cost")
        assert cost["is_final"]
        stored = http.get(f"{task}/state-store/skyward_metrics").raise_for_status().json()["value"]
        metrics = json.loads(stored) if isinstance(stored, str) else stored
        assert metrics["cost_usd"] == cost["cost_usd"]
        assert 0 < metrics["cpu_percent"] <= 100
        return cost["cost_usd"]


def value(http: httpx.Client, task: str, key: str) -> Any:
    """Return a result of a task as the tab XCom shows it."""
    query = {"deserialize": False, "stringify": False}
    return http.get(f"{task}/xcomEntries/{key}", params=query).raise_for_status().json()["value"]


def cost_in_prefect(url: str) -> float:
    with httpx.Client(base_url=url, timeout=60) as http:
        run = begun_flow_run(http)

        def ended() -> Any:
            """The labels are final some moments after the state is."""
            found = http.get(f"/flow_runs/{run}").raise_for_status().json()
            is_final = found["state"]["type"] in {"FAILED", "CRASHED", "CANCELLED"} or found["labels"].get(
                "skyward.is_final"
            )
            return found if is_final and found["end_time"] else None

        found = wait_until(ended, "the flow run", STEP_SECONDS)
        assert found["state"]["type"] == "COMPLETED", log_of(http, run)
        return float(found["labels"]["skyward.cost_usd"])


def begun_flow_run(http: httpx.Client) -> str:
    deployment = http.get("/deployments/name/two-nodes-flow/nodes").raise_for_status().json()["id"]
    return http.post(f"/deployments/{deployment}/create_flow_run", json={}).raise_for_status().json()["id"]


def log_of(http: httpx.Client, run: str) -> str:
    logs = http.post("/logs/filter", json={"logs": {"flow_run_id": {"any_": [run]}}}).raise_for_status().json()
    return "\n".join(line["message"] for line in logs)


def cost_in_dagster(url: str, ledger: str) -> float:
    with httpx.Client(base_url=url, timeout=60) as http:

        def ask(query: str, **variables: Any) -> Any:
            body = {"query": query, "variables": variables}
            return http.post("/graphql", json=body).raise_for_status().json()["data"]

        selector = {
            "repositoryLocationName": "stack",
            "repositoryName": "__repository__",
            "jobName": "two_nodes",
        }
        launched = ask(LAUNCH, params={"selector": selector, "runConfigData": {}})["launchRun"]
        assert launched["__typename"] == "LaunchRunSuccess", launched
        run = launched["run"]["runId"]

        def end() -> str | None:
            status = ask(STATUS, run=run)["runOrError"]["status"]
            return status if status in {"SUCCESS", "FAILURE", "CANCELED"} else None

        assert wait_until(end, "the run", STEP_SECONDS) == "SUCCESS"

        def metadata() -> list[dict[str, Any]]:
            (asset,) = ask(COSTS)["assetNodes"]
            events = [*asset["assetMaterializations"], *asset["assetObservations"]]
            return [entry for event in events if event["runId"] == run for entry in event["metadataEntries"]]

        def cost() -> float:
            labels = {"skyward/cost_usd", "skyward/other_cost_usd"}
            return sum(entry["floatValue"] for entry in metadata() if entry["label"] in labels)

        def bill() -> float | None:
            receipt = receipts_by_system(ledger, "airflow", "prefect", "dagster")["dagster"]
            return receipt["total_cost_usd"] if receipt["ended_at"] else None

        billed = wait_until(bill, "the end of the pool")
        # its last part is reported after the run has ended, in its process
        wait_until(lambda: cost() == pytest.approx(billed, abs=MICRO_DOLLAR), "the whole bill")
        figures = {entry["label"]: entry.get("floatValue") for entry in metadata()}
        assert 0 < figures["skyward/cpu_util_pct"] <= 100
        return cost()


# ── what is there, and what is left ──────────────────────────────────────────────────────────────────────────────────


def ledger_at(port: str) -> str:
    return f"postgresql+psycopg://skyward:{read_env()['LEDGER_DB_PASSWORD']}@127.0.0.1:{port}/skyward"


def receipts_by_system(ledger: str, *systems: str) -> dict[str, Any]:
    """Return the receipt of the one pool of each of these orchestrators, from PostgreSQL. There are no others."""

    def ask(*arguments: str) -> Any:
        command = [sys.executable, "-m", "skyward_core.cli", "--ledger", ledger, *arguments]
        return json.loads(subprocess.run(command, check=True, capture_output=True, text=True).stdout)

    pools = {pool["work"]["system"]: pool["pool"] for pool in ask("ps", "--all", "--json")}
    assert pools.keys() == set(systems)
    return {system: ask("receipt", pool, "--json") for system, pool in pools.items()}


def processes_of(folder: Path) -> list[str]:
    """Return the processes that have the folder in their environment or their command."""
    found = []
    for entry in filter(str.isdigit, os.listdir("/proc")):
        try:
            texts = [Path("/proc", entry, name).read_bytes() for name in ("environ", "cmdline")]
        except OSError:  # it has ended
            continue
        if any(str(folder).encode() in text for text in texts):
            found.append(texts[1].replace(b"\0", b" ").decode())
    return found
