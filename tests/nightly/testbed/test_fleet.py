"""The hosts of the test bed are isolated, and nothing of them is left behind."""

import os
import re
import signal
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from tests.testbed import Fleet, Host, leftovers
from tests.testbed.fixtures import fleet  # noqa: F401 - a fixture
from tests.waiting import wait_until

REPOSITORY = Path(__file__).parents[3]


def said(host: Host, command: str) -> str:
    done = host.run(command)
    assert done.returncode == 0, done.stderr
    return done.stdout.strip()


def test_hosts_are_isolated(fleet: Fleet) -> None:
    """A host has its own name, files and processes, and none of this machine's homes. It reaches only its network, and
    isolated hosts do not reach each other.
    """
    one, two = fleet.create(isolated=True), fleet.create(isolated=True)
    assert [said(host, "hostname") for host in (one, two)] == [one.name, two.name]
    said(one, "echo mine > /etc/testbed-mark")
    assert two.run("test -e /etc/testbed-mark").returncode == 1
    assert not Path("/etc/testbed-mark").exists()
    assert said(one, f"find /root /home /mnt /tmp {REPOSITORY} -type f") == "/root/.ssh/authorized_keys"
    assert len(said(one, "ls -d /proc/[0-9]*").splitlines()) < 10
    assert "unreachable" in one.run("bash -c '< /dev/tcp/192.0.2.1/80'").stderr.lower()
    assert one.run(f"timeout 1 bash -c '< /dev/tcp/{two.ip}/22'").returncode == 124
    for host in (one, two):
        host.crash()


def test_a_closed_fleet_leaves_nothing() -> None:
    """Processes, interfaces, mounts and files."""
    with Fleet() as fleet:
        hosts = [fleet.create(), fleet.create()]
        hosts[1].partition()
        kinds = " ".join(leftovers(fleet.number))
        assert all(kind in kinds for kind in ("process", f"tb{fleet.number}-2", "/run/skyward-testbed"))
        pids = [host.pid for host in hosts]
    assert leftovers(fleet.number) == []
    assert [pid for pid in pids if Path(f"/proc/{pid}").exists()] == []


@pytest.mark.parametrize("with_watcher", [False, True])
def test_a_killed_run_is_swept(fleet: Fleet, with_watcher: bool) -> None:
    """Its watcher removes everything; if that is killed too, `gc` does. Living fleets stay."""
    with _up() as up:
        assert up.stdout is not None
        line = up.stdout.readline()
        assert "1 hosts in" in up.stdout.readline()
        found = re.search(r"@10\.77\.(\d+)\.", line)
        assert found is not None
        number = int(found[1])
        if with_watcher:
            for child in Path(f"/proc/{up.pid}/task/{up.pid}/children").read_text().split():
                if b"watch" in Path(f"/proc/{child}/cmdline").read_bytes().split(b"\0"):
                    os.kill(int(child), signal.SIGKILL)
        up.kill()
    if with_watcher:
        assert leftovers(number) != []
        argv = [sys.executable, "-m", "tests.testbed", "gc"]
        swept = subprocess.run(argv, cwd=REPOSITORY, capture_output=True, text=True, timeout=90, check=False)
        assert f"removed fleet {number}\n" in swept.stdout
    wait_until(lambda: leftovers(number) == [], f"fleet {number} to be swept")
    assert leftovers(fleet.number) != []


@contextmanager
def _up() -> Iterator["subprocess.Popen[str]"]:
    argv = [sys.executable, "-m", "tests.testbed", "up", "1"]
    with subprocess.Popen(argv, cwd=REPOSITORY, stdout=subprocess.PIPE, text=True) as up:
        try:
            yield up
        finally:
            up.kill()
