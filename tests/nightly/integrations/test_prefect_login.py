"""A Prefect server that wants a login, as `PREFECT_SERVER_API_AUTH_STRING` sets it: pool, logs, artifacts, context."""

import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import pytest

pytest.importorskip("prefect")

from tests.integrations import session_server  # isort: skip
from tests.integrations.prefect_server import wait_for

LOGIN = "someone:open-sesame"
FLOW = """
from prefect import flow, get_run_logger, runtime, task
from prefect.artifacts import create_markdown_artifact
from prefect_skyward import SkywardTaskRunner
import skyward_core as sky

@task
def inside() -> str:
    create_markdown_artifact("made on a node", key="from-a-node")
    get_run_logger().warning("said on a node")
    return runtime.flow_run.id

@flow(task_runner=SkywardTaskRunner(provider=sky.Local(price_per_hour=36.0), prefect_context=True))
def whole() -> None:
    assert inside.submit().result() == runtime.flow_run.id
    print("flow run", runtime.flow_run.id)

whole()
"""


@pytest.fixture
def address(tmp_path: Path) -> Iterator[str]:
    """The API of a server of this test."""
    port = session_server.free_port()
    environ = os.environ | {
        "PREFECT_HOME": str(tmp_path),
        "PREFECT_API_DATABASE_CONNECTION_URL": f"sqlite+aiosqlite:///{tmp_path / 'prefect.db'}",
        "PREFECT_SERVER_API_AUTH_STRING": LOGIN,
        "PREFECT_SERVER_ANALYTICS_ENABLED": "false",
        "PREFECT_UI_ENABLED": "0",
        "PREFECT__SERVER_FINAL": "1",
        "DO_NOT_TRACK": "1",
    }
    command = [sys.executable, "-m", "uvicorn", "--factory", "prefect.server.api.server:create_app"]
    with subprocess.Popen([*command, "--port", str(port), "--log-level", "error"], env=environ) as server:
        try:
            wait_for(lambda: session_server.is_healthy(port))
            yield f"http://127.0.0.1:{port}/api"
        finally:
            server.kill()


def test_a_server_with_a_login_gets_logs_and_artifacts_of_flow_and_nodes(address: str, tmp_path: Path) -> None:
    """The flow's process and, with `prefect_context=True`, the nodes log in. The login is in no output or log."""
    (tmp_path / "login_flow.py").write_text(FLOW)
    environ = os.environ | {"PREFECT_API_URL": address, "PREFECT_API_AUTH_STRING": LOGIN}
    done = subprocess.run(
        [sys.executable, "login_flow.py"], cwd=tmp_path, env=environ, capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stderr[-4000:]
    flow_run_id = done.stdout.split("flow run ")[1].split()[0]
    wanted = {"flow_run_id": {"any_": [flow_run_id]}}
    name, _, password = LOGIN.partition(":")
    assert httpx.post(f"{address}/logs/filter", json={"logs": wanted}).status_code == 401
    with httpx.Client(base_url=address, auth=(name, password)) as client:

        def read(what: str) -> Any:
            return client.post(f"/{what}/filter", json={what: wanted}).raise_for_status().json()

        assert client.get(f"/flow_runs/{flow_run_id}").json()["state"]["type"] == "COMPLETED"
        records = wait_for(lambda: [one for one in read("logs") if one["message"] == "[node 0] said on a node"])
        assert [(one["level"], one["task_run_id"] is not None) for one in records] == [(30, True)]
        assert {one["key"] for one in read("artifacts")} >= {"from-a-node", "skyward-cost", "skyward-nodes"}
        assert password not in f"{done.stdout}{done.stderr}{read('logs')}{read('artifacts')}"
