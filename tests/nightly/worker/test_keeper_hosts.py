"""No process that a call has started outlives its node on a real host over SSH: with a control group and without,
whatever process of the node is killed.
"""

import contextlib
import os
import signal
import subprocess
import uuid
from collections.abc import Iterator
from pathlib import Path

import pytest

import skyward_core as sky
from skyward_core.providers.termination_shell import PROOFS
from skyward_core.worker import keeper
from tests.testbed import Fleet, Host
from tests.testbed.fixtures import fleet, mirror  # noqa: F401 - fixtures
from tests.testbed.mirror import Mirror
from tests.waiting import wait_until

LEASE_SECONDS = 8

pytestmark = [pytest.mark.timeout(300)]


@pytest.fixture(scope="module")
def hosts(fleet: Fleet, mirror: Mirror) -> Iterator[list[Host]]:
    """Two machines: the first one has cgroup v2 as systemd mounts it, the second has none."""
    hosts = [fleet.create() for _ in range(2)]
    for host in hosts:
        mirror.configure(host)
    mounted = hosts[0].run("mount -t cgroup2 cgroup2 /sys/fs/cgroup && test -w /sys/fs/cgroup/cgroup.procs")
    assert mounted.returncode == 0, mounted.stderr
    yield hosts
    for host in hosts:
        host.crash()


@pytest.fixture
def mark() -> str:
    """A duration that no other process sleeps: it identifies processes without a tag."""
    return f"{4000 + uuid.uuid4().int % 1000000}.{uuid.uuid4().int % 10**8}"


@sky.compute
def run_away(mark: str) -> int:
    """Start processes that remove their tags: one without environment, one with another user."""
    for command in (
        "env -i setsid /bin/sleep $0 </dev/null >/dev/null 2>&1 &",
        "su -s /bin/sh nobody -c 'setsid nohup env -i /bin/sleep '$0' &' >/dev/null 2>&1 </dev/null",
    ):
        subprocess.run(["sh", "-c", command, mark], check=True)
    return os.getpid()


@sky.compute
def forever() -> None:
    """A call that must be ended with its node."""
    signal.pause()


def owned_by(hosts: list[Host], known_hosts: Path) -> sky.Hosts:
    known_hosts.write_text("".join(f"{host.known_hosts_line}\n" for host in hosts))
    return sky.Hosts(
        *(host.ip for host in hosts),
        user="root",
        key=str(hosts[0].key_path),
        known_hosts=str(known_hosts),
        config="/dev/null",
    )


def running(host: Host, mark: str) -> list[int]:
    """The processes on a host that sleep this long, by their pids on this machine."""
    found = []
    for pid in host._processes():
        with contextlib.suppress(OSError):
            if mark.encode() in Path(f"/proc/{pid}/cmdline").read_bytes().split(b"\0") and keeper.start_of(pid):
                found.append(pid)
    return found


def groups_on(host: Host) -> str:
    """The control groups of nodes there; groups of this computer's own nodes are visible from there too."""
    return host.run("ls -d /sys/fs/cgroup/skyward.host-* 2>/dev/null").stdout


def test_close_ends_processes_that_a_call_has_left_on_hosts(hosts: list[Host], mark: str, tmp_path: Path) -> None:
    """For each host the receipt has the evidence that nothing is left; no control group stays."""
    with sky.ComputePool(
        provider=owned_by(hosts, tmp_path / "known_hosts"), nodes=2, display="quiet", provision_timeout=150
    ) as pool:
        _ = run_away(mark) @ pool
        wait_until(lambda: all(len(running(host, mark)) == 2 for host in hosts), "the runaways")
        assert len(groups_on(hosts[0]).split()) == 1
        pool.submit(forever())
    assert [running(host, mark) for host in hosts] == [[], []]
    assert groups_on(hosts[0]) == ""
    assert pool.receipt is not None
    assert [resource["evidence"].partition(": ")[2] for resource in pool.receipt["resources"]] == [
        PROOFS["group"],
        PROOFS["tree"],
    ]


@pytest.mark.parametrize("who", ["supervisor", "first keeper", "second keeper", "guard", "guard and supervisor"])
def test_after_any_kill_on_a_host_nothing_outlives_the_lease(
    who: str, hosts: list[Host], mark: str, tmp_path: Path
) -> None:
    """SIGKILL to one or two of the processes that could have ended what a call has left; no process of the client
    helps.
    """
    host = hosts[1]
    with sky.ComputePool(
        provider=owned_by([host], tmp_path / "known_hosts"),
        display="quiet",
        provision_timeout=150,
        lease_seconds=LEASE_SECONDS,
        retries=0,
    ) as pool:
        runner = run_away(mark) >> pool
        wait_until(lambda: len(running(host, mark)) == 2, "the runaways")
        there = {pid_inside(pid): pid for pid in host._processes()}
        supervisor = keeper.parent_of(there[runner])
        second = keeper.parent_of(supervisor)
        instance = pool.lease.nodes[0].instance
        guard = there[int((host.root / str(instance.directory)[1:] / "guard").read_text())]
        known = {
            "supervisor": supervisor,
            "second keeper": second,
            "first keeper": keeper.parent_of(second),
            "guard": guard,
        }
        assert keeper.name_of(known["first keeper"]) == keeper.name_of(second) == keeper.KEEPER
        for name in who.split(" and "):
            os.kill(known[name], signal.SIGKILL)
        if "supervisor" in who or "second" in who:
            wait_until(lambda: running(host, mark) == [], "what the call has left to end with the node")
    assert running(host, mark) == []


def pid_inside(pid: int) -> int:
    """A process's pid in its own namespace."""
    try:
        lines = Path(f"/proc/{pid}/status").read_text().splitlines()
    except OSError:
        return 0
    return int(next(line for line in lines if line.startswith("NSpid:")).split()[-1])
