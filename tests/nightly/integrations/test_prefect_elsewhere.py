"""Flow runs that stop and go on, and task runs in other processes than the flow's: pauses, suspensions, `.delay`,
`ProcessPoolTaskRunner`. Each on a real API.
"""

import json
import os
import signal
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any
from uuid import UUID

import pytest

pytest.importorskip("prefect")

from tests.integrations import prefect_server  # noqa: I001 - before Prefect
from tests.integrations.prefect_server import artifacts, asked, deployment_named, processes_of
from tests.kill.console import REPOSITORY
from tests.waiting import wait_until

from prefect.client.orchestration import get_client

import skyward_core as sky
from prefect_skyward import settle_flow_runs

pytestmark = [
    pytest.mark.timeout(600),
    pytest.mark.filterwarnings("default"),  # Prefect's own warnings are not our faults
]
api = pytest.fixture(scope="module", autouse=True)(prefect_server.served)

HEAD = """
import json, os, sys, time
from pathlib import Path
from prefect import flow, pause_flow_run, suspend_flow_run, task
from prefect.cache_policies import INPUTS, NO_CACHE
from prefect.runtime import flow_run
from prefect.task_runners import ProcessPoolTaskRunner
from prefect_skyward import SkywardTaskRunner, on_skyward
import skyward_core as sky

PLACE = sky.Local(price_per_hour=36.0)

@task(cache_policy=NO_CACHE)
def pool(step: int) -> str:
    return os.environ["SKYWARD_POOL_ID"]

@task(cache_policy=NO_CACHE)
@on_skyward(provider=PLACE)
def own(number: int) -> str:
    return os.environ["SKYWARD_POOL_ID"]

@task(cache_policy=NO_CACHE)
@on_skyward(provider=PLACE, name="of-several-processes", keep_warm=60)
def shared(number: int) -> str:
    return os.environ["SKYWARD_POOL_ID"]

def say(name, value):
    folder = Path(os.environ["FOLDER"])
    (folder / (name + ".new")).write_text(json.dumps(value))
    (folder / (name + ".new")).rename(folder / name)
"""
PAUSES = """
@flow(task_runner=SkywardTaskRunner(provider=PLACE, idle_timeout=1))
def pauses() -> None:
    say("first", [flow_run.id, pool.submit(1).result()])
    pause_flow_run(timeout=300, poll_interval=1)
    say("second", pool.submit(2).result())

if __name__ == "__main__":
    pauses()
"""
SUSPENDS = """
@flow(name="suspends", persist_result=True, task_runner=SkywardTaskRunner(provider=PLACE))
def suspends() -> None:
    kept = pool.with_options(cache_policy=INPUTS, persist_result=True)
    say("first", [flow_run.id, kept.submit(1).result()])
    suspend_flow_run(timeout=300)
    say("second", [kept.submit(1).result(), pool.submit(2).result()])

if __name__ == "__main__":
    suspends.serve("of-suspends", pause_on_shutdown=False)
"""
DELAYS = """
from prefect.task_worker import serve

if __name__ == "__main__":
    serve(own)
"""
SENDS = """
if __name__ == "__main__":
    say("first", own.delay(1).result())
"""
PROCESSES = """
@flow(task_runner=ProcessPoolTaskRunner(max_workers=2))
def processes() -> None:
    say("first", [flow_run.id, own.map(range(3)).result(), shared.map(range(3)).result()])

if __name__ == "__main__":
    processes()
    sky.release("of-several-processes")
"""


@contextmanager
def program(text: str, folder: Path, api: str) -> Iterator[subprocess.Popen[bytes]]:
    """A program in a process of its own, which is told to end at the end of the block."""
    file = folder / f"program{len(list(folder.glob('program*')))}.py"
    file.write_text(HEAD + text)
    environ = {**os.environ, "PYTHONPATH": str(REPOSITORY), "PREFECT_API_URL": api, "FOLDER": str(folder)}
    with file.with_suffix(".log").open("w") as log:
        process = subprocess.Popen([sys.executable, str(file)], cwd=folder, env=environ, stdout=log, stderr=log)
    try:
        yield process
    finally:
        process.send_signal(signal.SIGTERM)
        process.wait(60)


def said(folder: Path, name: str) -> Any:
    file = folder / name
    wait_until(file.exists, f"{name} of {folder}", 300)
    return json.loads(file.read_text())


def run_of(flow_run_id: str) -> dict[str, Any]:
    (found,) = asked("/flow_runs/filter", {"flow_runs": {"id": {"any_": [flow_run_id]}}})
    return found


def resume(flow_run_id: str, pool_id: str, state: str) -> None:
    """Let a run go on that has stopped, once its machines are gone."""
    wait_until(lambda: run_of(flow_run_id)["state_name"] == state, state, 120)
    wait_until(lambda: processes_of({pool_id}) == [], "the end of its machines", 120)
    with get_client(sync_client=True) as client:
        client.resume_flow_run(UUID(flow_run_id))


def test_a_flow_that_is_paused_keeps_its_machines_for_the_idle_time_only(api: str, tmp_path: Path) -> None:
    """And rents others when it goes on."""
    with program(PAUSES, tmp_path, api) as process:
        flow_run_id, pool_id = said(tmp_path, "first")
        resume(flow_run_id, pool_id, "Paused")
        assert said(tmp_path, "second") != pool_id
        assert process.wait(120) == 0


def test_a_flow_that_is_suspended_gives_its_machines_back_and_goes_on_in_another_process(
    api: str, tmp_path: Path
) -> None:
    """Of a deployment. What it has done before is cached, by Prefect's own means."""
    with program(SUSPENDS, tmp_path, api), get_client(sync_client=True) as client:
        found = wait_until(lambda: deployment_named("of-suspends"), "the deployment", 120)
        client.create_flow_run_from_deployment(found.id)
        flow_run_id, pool_id = said(tmp_path, "first")
        resume(flow_run_id, pool_id, "Suspended")
        before, after = said(tmp_path, "second")
        assert (before, after != pool_id) == (pool_id, True)
        wait_until(lambda: run_of(flow_run_id)["state_name"] == "Completed", "its end", 120)
        wait_until(lambda: run_of(flow_run_id)["labels"].get("skyward.is_final"), "its bill")
    assert run_of(flow_run_id)["labels"]["skyward.cost_usd"] == pytest.approx(cost_of(flow_run_id), abs=1e-6)


def test_a_delayed_task_run_rents_its_machines_in_the_task_worker(api: str, tmp_path: Path) -> None:
    """For one call: they are gone after it."""
    with program(DELAYS, tmp_path, api), program(SENDS, tmp_path, api):
        pool_id = said(tmp_path, "first")
        assert pool_id.startswith("sky-")
        wait_until(lambda: processes_of({pool_id}) == [], "the end of its machines", 120)


def test_in_the_processes_of_a_task_runner_a_pool_is_for_one_call_or_has_a_name(api: str, tmp_path: Path) -> None:
    """Each process has a part of the run: the bill is the ledger's, and is written once."""
    with program(PROCESSES, tmp_path, api) as process:
        flow_run_id, own, shared = said(tmp_path, "first")
        assert process.wait(300) == 0
    log = (tmp_path / "program0.log").read_text()
    assert "Logging error" not in log, log
    assert (len(set(own)), len(set(shared))) == (3, 1)

    def labels_with_the_bill() -> dict[str, Any]:
        settle_flow_runs()  # the last process has done it, if the server has answered it in time
        return found if (found := run_of(flow_run_id)["labels"])["skyward.is_final"] else {}

    labels = wait_until(labels_with_the_bill, "its bill")
    assert labels["skyward.cost_usd"] == pytest.approx(cost_of(flow_run_id), abs=1e-6)
    assert [one["key"] for one in artifacts(flow_run_id)].count("skyward-cost") == 1


def cost_of(flow_run_id: str) -> float:
    return sum(sky.cost_of(sky.Work(system="prefect", run=flow_run_id)).values())
