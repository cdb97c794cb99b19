"""The Python blocks of the README and the how-tos run.

Those of docs/airflow.md run as a DAG file, in integrations/test_airflow.py.
"""

import os
import subprocess
import sys
from pathlib import Path

import pytest
from sybil import Sybil
from sybil.parsers.markdown import PythonCodeBlockParser

from tests.conftest import processes_by_tag
from tests.system.test_docs import ROOT
from tests.testbed import Fleet
from tests.testbed.fixtures import fleet, mirror  # noqa: F401 - fixtures
from tests.testbed.mirror import Mirror
from tests.waiting import wait_until


@pytest.mark.timeout(300)
@pytest.mark.parametrize("page", ["docs/prefect.md", "docs/dagster.md"])
def test_the_page_of_an_orchestrator_runs_as_a_script(page: str, tmp_path: Path) -> None:
    own = {"PREFECT_SERVER_ANALYTICS_ENABLED": "false", "DAGSTER_HOME": str(tmp_path)}
    run_as_script(page, tmp_path, {"PREFECT_HOME": str(tmp_path / "prefect"), **own})


HOST = """Host {name}
HostName {host.ip}
User {host.user}
IdentityFile {host.key_path}
UserKnownHostsFile {host.known_hosts_path}
"""


@pytest.mark.timeout(300)
def test_the_page_of_machines_runs_on_real_hosts(fleet: Fleet, mirror: Mirror, tmp_path: Path) -> None:
    """Its aliases are bare hosts of the test bed, with an SSH configuration as a user would write it."""
    (tmp_path / ".ssh").mkdir(mode=0o700)
    with (tmp_path / ".ssh/config").open("w") as config:
        for name in ("gpu-1", "gpu-2", "gpu-3"):
            host = fleet.create()
            mirror.configure(host)
            config.write(HOST.format(name=name, host=host))
    own = str(tmp_path)
    run_as_script("docs/machines.md", tmp_path, {"HOME": own, "XDG_STATE_HOME": f"{own}/state", "TMPDIR": own})
    # the page leaves local nodes to their lease
    tag = "SKYWARD_INSTANCE_DIRECTORY"
    wait_until(lambda: not [path for _, path in processes_by_tag(tag) if path.startswith(own)], "the end of the lease")


def run_as_script(page: str, folder: Path, variables: dict[str, str]) -> None:
    blocks = [str(example.parsed) for example in Sybil(parsers=[PythonCodeBlockParser()]).parse(ROOT / page).examples()]
    assert blocks
    script = folder / "page.py"
    script.write_text("\n\n".join(blocks))
    patience = {"PREFECT_SERVER_EPHEMERAL_STARTUP_TIMEOUT_SECONDS": "200"}  # a busy machine needs more than the 20
    environ = os.environ | patience | variables
    done = subprocess.run(
        [sys.executable, script], env=environ, cwd=folder, capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stderr[-4000:]
