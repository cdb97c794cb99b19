"""The server of a test session: one for all processes, and none after the session."""

import subprocess
import sys
from pathlib import Path
from urllib.request import urlopen

import pytest

from tests.conftest import processes_by_tag, wait_until
from tests.integrations import session_server

pytestmark = [pytest.mark.timeout(300)]  # a server of its own


def test_all_processes_get_one_server_which_ends_with_a_session_that_is_killed(tmp_path: Path) -> None:
    pytest.importorskip("prefect")
    folder = tmp_path / "server"
    with subprocess.Popen([sys.executable, "-c", "input()"], stdin=subprocess.PIPE) as controller:
        address = session_server.address_in(folder, controller.pid)
        second = "import sys; from tests.integrations.session_server import *;"
        second += " print(address_in(Path(sys.argv[1]), int(sys.argv[2])))"
        command = [sys.executable, "-c", second, str(folder), str(controller.pid)]
        said = subprocess.run(command, capture_output=True, text=True, check=True).stdout
        assert said.strip() == address
        with urlopen(f"{address}/health", timeout=60) as answer:
            assert answer.status == 200
        homes = [home for _, home in processes_by_tag("PREFECT_HOME")]
        assert homes.count(str(folder)) == 1
        controller.kill()
    wait_until(lambda: str(folder) not in [home for _, home in processes_by_tag("PREFECT_HOME")], "the server to end")
    wait_until(lambda: not folder.exists(), "its folder to be removed")
