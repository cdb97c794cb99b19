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

from tests.conftest import processes_by_tag, wait_until
from tests.system.test_docs import ROOT
from tests.testbed import Fleet
from tests.testbed.fixtures import fleet, mirror  # noqa: F401 - fixtures
from tests.testbed.mirror import Mirror


@pytest.mark.timeout(300)
@pytest.mark.parametrize("page", ["docs/prefect.md", "docs/dagster.md"])
def test_the_page_of_an_orchestrator_runs_as_a_script(page: str, tmp_path: Path) -> None:
    """The page's Python blocks, put together in one file, run to the end in a process with its own home."""
    run_as_script(
        page,
        tmp_path,
        {
            "PREFECT_HOME": str(tmp_path / "prefect"),
            "PREFECT_SERVER_ANALYTICS_ENABLED": "false",
            "DAGSTER_HOME": str(tmp_path),
        },
    )


@pytest.mark.timeout(300)
def test_the_page_of_machines_runs_on_real_hosts(fleet: Fleet, mirror: Mirror, tmp_path: Path) -> None:
    """The page's aliases are bare hosts of the test bed, with an SSH configuration as a user would write it; the rest
    is unchanged.
    """
    (tmp_path / ".ssh").mkdir(mode=0o700)
    aliases = []
    for name in ("gpu-1", "gpu-2", "gpu-3"):
        host = fleet.create()
        mirror.configure(host)
        aliases += [
            f"Host {name}",
            f"HostName {host.ip}",
            f"User {host.user}",
            f"IdentityFile {host.key_path}",
            f"UserKnownHostsFile {host.known_hosts_path}",
        ]
    (tmp_path / ".ssh/config").write_text("\n".join(aliases) + "\n")
    run_as_script(
        "docs/machines.md",
        tmp_path,
        {"HOME": str(tmp_path), "XDG_STATE_HOME": str(tmp_path / "state"), "TMPDIR": str(tmp_path)},
    )
    directory = str(tmp_path)  # of the local nodes that the page leaves to their lease
    wait_until(
        lambda: not any(path.startswith(directory) for _, path in processes_by_tag("SKYWARD_INSTANCE_DIRECTORY")),
        "the end of the lease",
        seconds=60,
    )


def run_as_script(page: str, folder: Path, variables: dict[str, str]) -> None:
    blocks = [str(example.parsed) for example in Sybil(parsers=[PythonCodeBlockParser()]).parse(ROOT / page).examples()]
    assert blocks
    script = folder / "page.py"
    script.write_text("\n\n".join(blocks))
    patience = {"PREFECT_SERVER_EPHEMERAL_STARTUP_TIMEOUT_SECONDS": "200"}  # a busy machine needs more than the 20
    done = subprocess.run(
        [sys.executable, str(script)],
        env=os.environ | patience | variables,
        cwd=folder,
        capture_output=True,
        text=True,
        check=False,
        timeout=240,
    )
    assert done.returncode == 0, done.stderr[-4000:]
