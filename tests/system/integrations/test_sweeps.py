"""The sweeps of dags/ and flows/, each run by its orchestrator: a machine with a dead owner ends, a dry run ends
nothing, and a failure fails the run.
"""

import json
import os
import sqlite3
import subprocess
import sys
import time
import uuid
from collections.abc import Iterator
from contextlib import closing
from pathlib import Path

import pytest

import skyward_core as sky
from tests.integrations import session_server
from tests.integrations.airflow_host import ROOT, environ_of, new_database
from tests.waiting import wait_until

DAY_SECONDS = 86_400
FAILURE = "some machines could not be listed or ended; the next sweep tries again"
PYTHON = [sys.executable, "-c"]
DAGSTER = "from dagster_definitions import defs; defs.resolve_job_def('skyward_sweep').execute_in_process(run_config={'ops': {'skyward_sweep_op': {'config': {'is_dry_run': True}}}})"
SWEEP = {
    "airflow": [sys.executable, "-m", "airflow", "dags", "test", "skyward_sweep"],
    "prefect": [sys.executable, "flows/sweep.py"],
    "dagster": [*f"{sys.executable} -m dagster job execute -f flows/dagster_definitions.py -j skyward_sweep".split()],
}
DRY = {
    "airflow": [*SWEEP["airflow"], "-c", '{"dry_run": true}'],
    "prefect": [*PYTHON, "import sys; sys.path.insert(0, 'flows'); import sweep; sweep.skyward_sweep(is_dry_run=True)"],
    "dagster": [*PYTHON, f"import sys; sys.path.insert(0, 'flows'); {DAGSTER}"],
}
ONE_AND_LONG = [pytest.param(name, marks=[] if name == "dagster" else [pytest.mark.nightly]) for name in SWEEP]
"""Their servers take a minute of processor time; `make test` runs the sweep of one."""

pytestmark = pytest.mark.timeout(400)


@pytest.fixture
def environ(orchestrator: str, tmp_path: Path, tmp_path_factory: pytest.TempPathFactory) -> dict[str, str]:
    """A home of the orchestrator and a ledger, separate from all others."""
    environ = environ_of(tmp_path) | {
        "AIRFLOW__CORE__DAGS_FOLDER": str(ROOT / "dags"),
        "PREFECT_HOME": str(tmp_path),
        "PREFECT_SERVER_ANALYTICS_ENABLED": "false",
        "DAGSTER_HOME": str(tmp_path),
        "SKYWARD_LEDGER": f"sqlite:///{tmp_path / 'ledger.db'}",
    }
    if orchestrator == "prefect":
        environ["PREFECT_API_URL"] = session_server.address(tmp_path_factory)
    if orchestrator == "airflow":
        (tmp_path / "airflow.db").write_bytes(new_database(tmp_path_factory).read_bytes())
    return environ


@pytest.fixture
def forgotten() -> Iterator[sky.Instance]:
    """A machine that no ledger knows, requested a day ago by a process that is dead; its time ran out an hour ago."""
    owner = subprocess.run([sys.executable, "-c", OWNER], capture_output=True, text=True, check=True).stdout.split()
    now = int(time.time())
    tags = {
        "skyward-pool": f"sky-test-{uuid.uuid4().hex[:8]}",
        "skyward-rank": "0",
        "skyward-owner": owner[0],
        "skyward-process": owner[1],
        "skyward-created": str(now - DAY_SECONDS),
        "skyward-expires": str(now - 3600),
    }
    provider = sky.Local()
    (machine,) = provider.launch(provider.offers(sky.Requirements())[0], 1, tags, "exec sleep 600")
    wait_until(lambda: provider.instances(machine.pool_id) == [machine], "the machine to be listed")
    yield machine
    provider.terminate([machine.id])


OWNER = "from skyward_core.machines.owner import Owner; owner = Owner.here(); print(owner.name, owner.process)"


def run(command: list[str], environ: dict[str, str]) -> tuple[int, str]:
    done = subprocess.run(
        command,
        cwd=ROOT,
        env=environ,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        check=False,
        timeout=170,
    )
    return done.returncode, done.stdout


@pytest.mark.parametrize("orchestrator", ONE_AND_LONG)
def test_a_forgotten_machine_ends(orchestrator: str, environ: dict[str, str], forgotten: sky.Instance) -> None:
    """A dry run names the machine and the reason, and leaves it; the sweep ends it and succeeds."""
    code, said = run(DRY[orchestrator], environ)
    assert code == 0, said
    assert forgotten.id in said
    assert sky.Local().instances(forgotten.pool_id) == [forgotten]
    code, said = run(SWEEP[orchestrator], environ)
    assert code == 0, said
    assert forgotten.id in said
    assert sky.Local().instances(forgotten.pool_id) == []
    if orchestrator == "airflow":  # both sweeps have found it
        with closing(sqlite3.connect(f"{environ['AIRFLOW_HOME']}/airflow.db")) as database:
            events = [json.loads(extra) for (extra,) in database.execute("SELECT extra FROM asset_event ORDER BY id")]
        assert [(one["is_dry_run"], one["machines"]) for one in events] == [(True, 1), (False, 1)]
        assert all(forgotten.id in one["found"][0] for one in events)


BLIND = """
import skyward_core as sky

def blind(provider, pool_id=None):
    raise ConnectionError("503 from the listing")

sky.Local.instances = blind
"""
"""Simulates a provider that does not answer; imported by every Python process that has it on its path."""


@pytest.mark.nightly
@pytest.mark.parametrize("orchestrator", SWEEP)
def test_a_sweep_fails_if_a_provider_does_not_answer(
    orchestrator: str, environ: dict[str, str], forgotten: sky.Instance, tmp_path: Path
) -> None:
    """The run fails with its error, and none of its machines was ended. The sweep asks all providers of the settings."""
    environ = {name: value for name, value in environ.items() if not name.startswith("DIGITALOCEAN")}
    (tmp_path / "sitecustomize.py").write_text(BLIND)
    path = f"{tmp_path}{os.pathsep}{os.environ.get('PYTHONPATH', '')}"
    settings = {"SKYWARD_PROVIDER": '["local", "digitalocean"]', "XDG_CONFIG_HOME": str(tmp_path), "PYTHONPATH": path}
    code, said = run(SWEEP[orchestrator], environ | settings)
    for words in (FAILURE, "503 from the listing", "DIGITALOCEAN_TOKEN"):  # there is no token
        assert words in said
    assert code != 0 or orchestrator == "airflow", said  # `airflow dags test` reports the state only as text
    assert "state=failed" in said or "DagRunState.FAILED" in said or orchestrator != "airflow", said
    assert sky.Local().instances(forgotten.pool_id) == [forgotten]
