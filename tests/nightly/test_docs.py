"""Each Python block of the pages that need a server or hosts runs alone (see tests/system/test_docs.py)."""

from pathlib import Path

import pytest

from tests.conftest import processes_by_tag
from tests.page_blocks import pages_of, run_in_a_process
from tests.testbed import Fleet
from tests.testbed.fixtures import fleet, mirror  # noqa: F401 - fixtures
from tests.testbed.mirror import Mirror
from tests.waiting import wait_until


@pytest.mark.timeout(300)
@pytest.mark.parametrize("page", ["README.md", *pages_of("prefect"), *pages_of("dagster")])
def test_each_block_of_a_page_with_an_orchestrator_runs(page: str, tmp_path: Path) -> None:
    variables = {
        "DAGSTER_HOME": str(tmp_path),
        "PREFECT_HOME": str(tmp_path / "prefect"),
        "PREFECT_SERVER_ANALYTICS_ENABLED": "false",
        "PREFECT_SERVER_EPHEMERAL_STARTUP_TIMEOUT_SECONDS": "200",  # a busy machine needs more than the 20
    }
    run_in_a_process(page, tmp_path, variables)


HOST = """Host {name}
HostName {host.ip}
User {host.user}
IdentityFile {host.key_path}
UserKnownHostsFile {host.known_hosts_path}
"""


@pytest.mark.timeout(300)
def test_the_pages_of_machines_run_on_real_hosts(fleet: Fleet, mirror: Mirror, tmp_path: Path) -> None:
    """Its aliases are bare hosts of the test bed, with an SSH configuration as a user would write it."""
    (tmp_path / ".ssh").mkdir(mode=0o700)
    with (tmp_path / ".ssh/config").open("w") as config:
        for name in ("gpu-1", "gpu-2", "gpu-3"):
            host = fleet.create()
            mirror.configure(host)
            config.write(HOST.format(name=name, host=host))
    own = str(tmp_path)
    for page in pages_of("machines"):
        run_in_a_process(page, tmp_path, {"HOME": own, "XDG_STATE_HOME": f"{own}/state", "TMPDIR": own})
    # a page leaves local nodes to their lease
    tag = "SKYWARD_INSTANCE_DIRECTORY"
    wait_until(lambda: not [path for _, path in processes_by_tag(tag) if path.startswith(own)], "the end of the lease")
