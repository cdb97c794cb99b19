"""A flow run whose process is killed, and no worker is left: what ends, and the automation that sets it Crashed."""

import os
import subprocess
import sys
from pathlib import Path
from typing import Any
from uuid import UUID

import pytest

pytest.importorskip("prefect")
from tests.integrations import prefect_server  # isort: skip
from tests.integrations.prefect_server import processes_of, wait_for

from prefect import flow  # isort: skip
from prefect.client.orchestration import SyncPrefectClient, get_client
from prefect.events import emit_event
from prefect.states import Running

import skyward_core as sky
from prefect_skyward.automations import CRASH_GUARD_NAME, HEARTBEAT, deploy_crash_guard

pytestmark = [
    pytest.mark.filterwarnings("default"),  # Prefect's own warnings are not our faults
]

api = pytest.fixture(scope="module", autouse=True)(prefect_server.served)


FLOW = """
import os, sys, time
from pathlib import Path
from prefect import flow, runtime, task
from prefect_skyward import SkywardTaskRunner
import skyward_core as sky

@task
def hang(folder: str) -> None:
    Path(folder, "new").write_text(os.environ["SKYWARD_POOL_ID"])
    Path(folder, "new").rename(Path(folder, "pool"))
    time.sleep(600)

@flow(name="killed", task_runner=SkywardTaskRunner(provider=sky.Local(price_per_hour=36.0)))
def killed(folder: str) -> None:
    Path(folder, "run").write_text(runtime.flow_run.id)
    hang.submit(folder).result()

killed(sys.argv[1])
"""


def test_a_killed_run_without_a_worker_leaves_no_machine_and_stays_running(api: str, tmp_path: Path) -> None:
    """No process is left that could set its state. The machines end by themselves, and the ledger has the bill."""
    environ = os.environ | {"PREFECT_API_URL": api}
    with subprocess.Popen([sys.executable, "-c", FLOW, str(tmp_path)], env=environ) as process:
        try:
            wait_for((tmp_path / "pool").exists)
        finally:
            process.kill()
    run, pool = ((tmp_path / name).read_text() for name in ("run", "pool"))
    wait_for(lambda: processes_of({pool}) == [])
    work = sky.Work(system="prefect", workflow="killed", run=run)
    (receipt,) = wait_for(lambda: all(one["ended_at"] for one in sky.receipts_of(work)) and sky.receipts_of(work))
    assert (receipt["pool_id"], receipt["left"]) == (pool, [])
    assert sum(sky.cost_of(work).values()) == pytest.approx(receipt["total_cost_usd"]) != 0
    with get_client(sync_client=True) as client:
        assert client.read_flow_run(UUID(run)).state.name == "Running"


@flow
def abandoned() -> None:
    """Its run is only created."""


@flow
def unwatched() -> None:
    """As `abandoned`; no automation is for it."""


def silent_run(client: SyncPrefectClient, of: Any) -> UUID:
    """Create a run that is Running and has sent one heartbeat."""
    run = client.create_flow_run(of, state=Running())
    names = {"prefect.resource.id": f"prefect.flow.{run.flow_id}", "prefect.resource.role": "flow"}
    emit_event(
        HEARTBEAT,
        resource={"prefect.resource.id": f"prefect.flow-run.{run.id}"},
        related=[names | {"prefect.resource.name": of.name}],
    )
    return run.id


def test_the_crash_guard_ends_a_silent_run_of_the_named_flows() -> None:
    """It is deployed by one call, which may be repeated. A run of another flow stays Running."""
    deploy_crash_guard(600, flows=["other"])
    guard = deploy_crash_guard(10, flows=["abandoned"])
    with get_client(sync_client=True) as client:
        assert [one.id for one in client.read_automations_by_name(CRASH_GUARD_NAME)] == [guard.id]
        other, run = silent_run(client, unwatched), silent_run(client, abandoned)
        wait_for(lambda: client.read_flow_run(run).state.name == "Crashed")
        assert "no heartbeat for 10 s" in client.read_flow_run(run).state.message
        assert client.read_flow_run(other).state.name == "Running"
