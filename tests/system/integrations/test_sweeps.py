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
from tests.conftest import wait_until
from tests.integrations import session_server

ROOT = Path(__file__).parents[3]
BIN = Path(sys.executable).parent
DAY_SECONDS = 86_400

ORCHESTRATORS = {
    "airflow": [str(BIN / "airflow"), "dags", "test", "skyward_sweep"],
    "prefect": [sys.executable, "flows/sweep.py"],
    "dagster": [
        sys.executable,
        "-m",
        "dagster",
        "job",
        "execute",
        "-f",
        "flows/dagster_definitions.py",
        "-j",
        "skyward_sweep",
    ],
}
DRY = {
    "airflow": [*ORCHESTRATORS["airflow"], "-c", '{"dry_run": true}'],
    "prefect": [
        sys.executable,
        "-c",
        "import sys; sys.path.insert(0, 'flows'); import sweep; sweep.skyward_sweep(is_dry_run=True)",
    ],
    "dagster": [
        sys.executable,
        "-c",
        "import sys; sys.path.insert(0, 'flows'); from dagster_definitions import defs\ndefs.resolve_job_def('skyward_sweep').execute_in_process(run_config={'ops': {'skyward_sweep_op': {'config': {'is_dry_run': True}}}})",
    ],
}

ONE_AND_LONG = [pytest.param(name, marks=[] if name == "dagster" else [pytest.mark.nightly]) for name in ORCHESTRATORS]
"""Their servers take a minute of processor time; `make test` runs the sweep of one."""


@pytest.fixture(scope="module")
def environ(tmp_path_factory: pytest.TempPathFactory) -> dict[str, str]:
    """Homes of all three and a ledger, separate from all others."""
    home = tmp_path_factory.mktemp("sweeps")
    (home / "dagster").mkdir()
    environ = os.environ | {
        "PREFECT_HOME": str(home / "prefect"),
        "PREFECT_SERVER_ANALYTICS_ENABLED": "false",
        "AIRFLOW_HOME": str(home / "airflow"),
        "AIRFLOW__CORE__DAGS_FOLDER": str(ROOT / "dags"),
        "AIRFLOW__CORE__LOAD_EXAMPLES": "False",
        "AIRFLOW__USAGE_DATA_COLLECTION__ENABLED": "False",
        "DAGSTER_HOME": str(home / "dagster"),
        "SKYWARD_LEDGER": f"sqlite:///{home / 'ledger.db'}",
    }
    run([str(BIN / "airflow"), "db", "migrate"], environ)
    return environ


@pytest.fixture
def server(orchestrator: str, environ: dict[str, str], tmp_path_factory: pytest.TempPathFactory) -> None:
    """Prefect's server, if the test needs it."""
    if orchestrator == "prefect":
        environ["PREFECT_API_URL"] = session_server.address(tmp_path_factory)


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


@pytest.mark.timeout(400)
@pytest.mark.usefixtures("server")
@pytest.mark.parametrize("orchestrator", ONE_AND_LONG)
def test_a_forgotten_machine_ends(orchestrator: str, environ: dict[str, str], forgotten: sky.Instance) -> None:
    """A dry run names the machine and the reason, and leaves it; the sweep ends it and succeeds."""
    code, said = run(DRY[orchestrator], environ)
    assert code == 0, said
    assert forgotten.id in said
    assert sky.Local().instances(forgotten.pool_id) == [forgotten]
    code, said = run(ORCHESTRATORS[orchestrator], environ)
    assert code == 0, said
    assert forgotten.id in said
    assert sky.Local().instances(forgotten.pool_id) == []
    if orchestrator == "airflow":  # both sweeps have found it
        with closing(sqlite3.connect(f"{environ['AIRFLOW_HOME']}/airflow.db")) as database:
            events = [json.loads(extra) for (extra,) in database.execute("SELECT extra FROM asset_event ORDER BY id")]
        assert [(one["is_dry_run"], one["machines"]) for one in events] == [(True, 1), (False, 1)]
        assert all(forgotten.id in one["found"][0] for one in events)
