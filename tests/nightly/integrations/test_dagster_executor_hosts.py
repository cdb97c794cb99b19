"""Dagster: whole steps on real hosts, by `skyward_executor`.

The hosts install what every node needs. Dagster and the project are those of this machine: their folders are shared
with the hosts, as on a network file system, and so is Dagster's storage.
"""

import json
import os
import subprocess
import sys
import sysconfig
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

dg = pytest.importorskip("dagster")

import skyward_core as sky  # noqa: E402
from dagster_skyward.configuration import plain  # noqa: E402
from skyward_core.ledger.ledger import Ledger, default_url  # noqa: E402
from tests.conftest import processes_by_tag  # noqa: E402
from tests.real_hosts import owned_by  # noqa: E402
from tests.testbed import Fleet, Host  # noqa: E402
from tests.testbed.fixtures import fleet, mirror  # noqa: E402, F401 - fixtures
from tests.testbed.mirror import Mirror  # noqa: E402
from tests.testbed.wheel import wheel_that_shows  # noqa: E402

pytestmark = [pytest.mark.timeout(400)]

REPOSITORY = Path(__file__).parents[3]
PACKAGES = Path(sysconfig.get_path("purelib"))

PROJECT = '''
import json, pathlib, platform, threading
import dagster as dg
from dagster_skyward import skyward_executor

HERE = pathlib.Path(__file__).parent

def meet(name, other):
    """Wait until the other step runs too."""
    (HERE / name).touch()
    while not (HERE / other).exists():
        threading.Event().wait(0.05)

@dg.op
def left():
    print("left is on", platform.node())
    meet("left", "right")
    return platform.node()

@dg.op
def right():
    print("right is on", platform.node())
    meet("right", "left")
    return platform.node()

@dg.op
def both(one, other):
    (HERE / "names.json").write_text(json.dumps(sorted([one, other])))

@dg.job(executor_def=skyward_executor.configured({"compute": json.loads((HERE / "compute.json").read_text())}))
def on_hosts():
    both(left(), right())
'''


@pytest.fixture
def hosts(fleet: Fleet, mirror: Mirror, tmp_path: Path) -> Iterator[list[Host]]:
    """Two hosts with the folders of the test, of the packages and of this project."""
    hosts = [fleet.create(shared=(tmp_path, PACKAGES, REPOSITORY)) for _ in range(2)]
    for host in hosts:
        mirror.configure(host)
    yield hosts
    for host in hosts:
        host.crash()


def stdout_of(instance: Any, run_id: str) -> Iterator[str]:
    """What each step has printed, as its node has stored it."""
    for entry in instance.all_logs(run_id, of_type=dg.DagsterEventType.LOGS_CAPTURED):
        key = [run_id, "compute_logs", entry.dagster_event.logs_captured_data.file_key]
        yield instance.compute_log_manager.get_log_data(key).stdout.decode()


def test_the_steps_of_a_run_are_calls_on_hosts(hosts: list[Host], tmp_path: Path) -> None:
    """Two steps run at once on two hosts, and the third gets their values. What they print is in the stored logs. When
    the run has ended, no process of a node lives.
    """
    wheel = wheel_that_shows([PACKAGES, REPOSITORY / "integrations"], tmp_path)
    compute = plain(
        {
            "provider": owned_by(hosts, tmp_path / "known_hosts"),
            "nodes": 2,
            "image": sky.Image(pip=[f"packages-of-the-tests @ {wheel.as_uri()}"]),
            "provision_timeout": 150,
        }
    )
    (tmp_path / "compute.json").write_text(json.dumps(compute))
    (tmp_path / "dagster.yaml").write_text("telemetry: {enabled: false}\n")
    (tmp_path / "project.py").write_text(PROJECT)
    done = subprocess.run(
        [sys.executable, "-m", "dagster", "job", "execute", "-f", "project.py", "-j", "on_hosts"],
        cwd=tmp_path,
        env={**os.environ, "DAGSTER_HOME": str(tmp_path)},
        capture_output=True,
        text=True,
        timeout=300,
        check=False,
    )
    assert done.returncode == 0, done.stderr[-5000:]
    names = sorted(host.name for host in hosts)
    with dg.DagsterInstance.from_config(str(tmp_path)) as instance:
        (record,) = instance.get_run_records(limit=1)
        run_id = record.dagster_run.run_id
        printed = "".join(stdout_of(instance, run_id))
    assert sorted(line.split()[-1] for line in printed.splitlines() if " is on " in line) == names
    assert json.loads((tmp_path / "names.json").read_text()) == names
    (pool,) = {part.pool_id for part in sky.cost_parts(sky.Work(system="dagster", run=run_id))}
    with Ledger(default_url()) as ledger:
        entry = ledger.pool(pool)
    assert entry is not None
    assert entry.ended_at is not None
    there = {pid for host in hosts for pid in host._processes()}
    assert not [pid for pid, _ in processes_by_tag("SKYWARD_INSTANCE_ID") if pid in there]
