"""Pools on real hosts of the test bed: hosts, calls and faults.

Run as a program it is a client that opens a pool and waits to be killed.
"""

import platform
import subprocess
import sys
import time
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import psutil
import pytest

import skyward_core as sky
from skyward_core.events.events import BootstrapProgress
from tests.conftest import processes_by_tag
from tests.testbed import Fleet, Host
from tests.testbed.command import run
from tests.testbed.fixtures import fleet, mirror  # noqa: F401 - fixtures
from tests.testbed.mirror import Mirror

UNUSED_ADDRESS = "02:77:ff:00:00:00"
REPOSITORY = Path(__file__).parents[1]
RAN = "root/ran"


@sky.compute
def forever() -> None:
    """A call that does not end before its node."""
    time.sleep(3600)


@sky.compute
def where() -> tuple[str, int]:
    """Return the name of the host, and the rank of the node."""
    return platform.node(), sky.instance_info().node


@sky.compute
def square(number: int) -> int:
    """Take a moment, write a line to a file on the host, and return."""
    with open(f"/{RAN}", "a") as ran:
        ran.write(f"{number}\n")
    print("square of", number)
    time.sleep(0.1)
    return number * number


# ── hosts ────────────────────────────────────────────────────────────────────────────────────────────────────────────


@pytest.fixture(scope="module")
def hosts(fleet: Fleet, mirror: Mirror) -> Iterator[list[Host]]:
    """Four hosts: three to work on, and a spare one. They are bare, except for the configuration of the mirror."""
    hosts = [fleet.create() for _ in range(4)]
    for host in hosts:
        mirror.configure(host)
    yield hosts
    for host in hosts:
        host.crash()


@pytest.fixture
def owned(hosts: list[Host], tmp_path: Path) -> Iterator[sky.Hosts]:
    """Their provider, which has their host keys. After each test no process of a node is left on them."""
    yield owned_by(hosts, tmp_path / "known_hosts")
    assert [name for host in hosts for name in names_of(tagged(host))] == []


def owned_by(hosts: Sequence[Host], known_hosts: Path) -> sky.Hosts:
    known_hosts.write_text("".join(f"{host.known_hosts_line}\n" for host in hosts))
    return sky.Hosts(
        *(host.ip for host in hosts),
        user="root",
        key=str(hosts[0].key_path),
        known_hosts=str(known_hosts),
        config="/dev/null",
    )


def pool_on(provider: sky.Provider, recorded: Callable[[Any], Any], **options: Any) -> sky.ComputePool:
    fields: dict[str, Any] = {
        "nodes": 3,
        "image": sky.Image(pip=["numpy"]),
        "display": "quiet",
        "provision_timeout": 150,
    }
    return sky.ComputePool(**{**fields, "provider": provider, "on_event": recorded, **options})


def tagged(host: Host) -> list[int]:
    """Return the living processes of nodes on a host, seen from outside, because it may be unreachable."""
    there = set(host._processes())
    return [pid for pid, _ in processes_by_tag("SKYWARD_INSTANCE_ID") if pid in there]


def names_of(pids: Iterable[int]) -> list[str]:
    names = []
    for pid in pids:
        try:
            name = Path(f"/proc/{pid}/cmdline").read_bytes().replace(b"\0", b" ").decode()
        except OSError:
            continue
        if name:  # else it has ended meanwhile, and waits for its parent
            names.append(name)
    return names


def executions(hosts: Iterable[Host]) -> Counter[int]:
    """Return how often each call has begun, on all of these hosts together; then delete the record."""
    found = Counter[int]()
    for host in hosts:
        path = host.root / RAN
        if path.exists():
            found.update(int(line) for line in path.read_text().split())
            path.unlink()
    return found


# ── faults ───────────────────────────────────────────────────────────────────────────────────────────────────────────


@contextmanager
def from_everybody(hosts: Sequence[Host]) -> Iterator[None]:
    """Cut hosts off from the client and from each other."""
    for host in hosts:
        host.partition()
    yield
    for host in hosts:
        host.heal()


@contextmanager
def from_the_client(hosts: Sequence[Host]) -> Iterator[None]:
    """Cut the client off, while the hosts see each other: packets in both directions go to a hardware address that does
    not exist.
    """

    def address(host: Host, client: str, there: str) -> None:
        change, network = ("ip", "neigh", "replace"), host.network
        run(*change, host.ip, "lladdr", there, "dev", network.bridge, "nud", "permanent")
        inside = ("nsenter", f"--net=/proc/{host.pid}/ns/net")
        run(*inside, *change, network.gateway, "lladdr", client, "dev", "eth0", "nud", "permanent")

    for host in hosts:
        address(host, UNUSED_ADDRESS, UNUSED_ADDRESS)
    yield
    for host in hosts:
        address(host, host.network._mac(1), host.network._mac(host.index))


# ── a client that a test kills ───────────────────────────────────────────────────────────────────────────────────────


class Client:
    """A program that opens a pool on hosts and gives every node a call. It prints the steps of the bootstrap."""

    def __init__(self, process: "subprocess.Popen[str]") -> None:
        self._process = process

    def says(self, line: str) -> None:
        """Wait until it has printed a line: a step, or "ready" when the pool is open."""
        assert self._process.stdout is not None
        for said in self._process.stdout:
            if said == f"{line}\n":
                return
        pytest.fail(f"the client has ended before it said {line}")

    def kill(self, *, with_reaper: bool) -> None:
        """Kill it with SIGKILL, after its reaper."""
        if with_reaper:
            children = psutil.Process(self._process.pid).children()
            (reaper,) = [one for one in children if any("reaper_process.py" in word for word in one.cmdline())]
            reaper.kill()
        self._process.kill()


@contextmanager
def client(hosts: Sequence[Host], known_hosts: Path, lease_seconds: float) -> Iterator[Client]:
    """Run this file as a program; it does not outlive the block."""
    addresses = [host.ip for host in hosts]
    arguments = [str(lease_seconds), *addresses, str(hosts[0].key_path), str(known_hosts)]
    argv = [sys.executable, "-m", "tests.real_hosts", *arguments]
    process = subprocess.Popen(argv, cwd=REPOSITORY, stdout=subprocess.PIPE, text=True)
    try:
        yield Client(process)
    finally:
        process.kill()
        process.communicate(timeout=60)


def open_and_wait(*arguments: str) -> None:
    """Open a pool on at most three of these hosts, and wait to be killed."""
    lease_seconds, *addresses, key, known_hosts = arguments
    provider = sky.Hosts(*addresses, user="root", key=key, known_hosts=known_hosts, config="/dev/null")

    def tell(event: Any) -> None:
        if isinstance(event, BootstrapProgress):
            print(event.step, flush=True)

    nodes = min(3, len(addresses))
    with pool_on(provider, tell, nodes=nodes, lease_seconds=float(lease_seconds)) as pool:
        pool.submit_all([forever() for _ in range(nodes)])
        print("ready", flush=True)
        time.sleep(60)


if __name__ == "__main__":
    open_and_wait(*sys.argv[1:])
