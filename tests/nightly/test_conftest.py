"""Tests of the leak checks in conftest.py: a false leak costs a day, a missed one costs a machine."""

import socket
import subprocess
import sys
from pathlib import Path

import pytest

import skyward_core as sky
from tests import conftest
from tests.conftest import shared


def test_one_more_connection_of_a_shared_pool_is_no_leak(request: pytest.FixtureRequest) -> None:
    """Its client opens one by its own clock, during any test. A connection to another address counts, and one to the
    pool too once it is closed.
    """
    others = set(conftest._shared_schedulers)
    with (
        socket.create_server(("127.0.0.1", 0)) as server,
        shared(sky.ComputePool(provider=sky.Local(), display="quiet")),
    ):
        (port,) = conftest._shared_schedulers - others
        before = conftest._descriptors(request)
        with socket.create_connection(("127.0.0.1", port)), socket.create_connection(server.getsockname()) as strange:
            assert list(conftest._new_descriptors(before, request)) == [strange.fileno()]
    assert port not in conftest._shared_schedulers


LEAKING = """
import pytest, socket

pytestmark = pytest.mark.filterwarnings("default")

class Cycle:
    def __init__(self):
        self.me, self.socket = self, socket.socket()

def test_leaves_a_socket_to_the_garbage_collector():
    Cycle()
"""
COLLECTING = """
import gc

def test_collects_garbage():
    gc.collect()
"""


def test_what_a_file_leaves_unclosed_fails_no_other_file(tmp_path: Path) -> None:
    """Prefect leaves sockets to the garbage collector, and test_prefect.py allows it; its neighbours do not."""
    (tmp_path / "conftest.py").write_text("from tests.conftest import pytest_runtest_teardown")
    (tmp_path / "pytest.ini").write_text("[pytest]\nfilterwarnings = error\n")
    (tmp_path / "test_a.py").write_text(LEAKING)
    (tmp_path / "test_b.py").write_text(COLLECTING)
    command = [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", str(tmp_path)]
    ended = subprocess.run(command, cwd=Path(__file__).parents[2], capture_output=True, text=True, check=False)
    assert ended.returncode == 0, ended.stdout
    assert "2 passed, 1 warning" in ended.stdout
