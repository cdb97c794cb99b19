"""Pools on real hosts of the test bed: hosts, calls and measurements for `test_real_hosts.py`.

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

import pytest

import skyward_core as sky
from tests.conftest import RecordedEvents, processes_by_tag, wait_until
from tests.testbed import Fleet, Host
from tests.testbed.command import run
from tests.testbed.fixtures import fleet, mirror  # noqa: F401 - fixtures
from tests.testbed.mirror import Mirror

UNUSED_ADDRESS = "02:77:ff:00:00:00"


@sky.compute
def forever() -> None:
    """A call that does not end before its node."""
    time.sleep(3600)


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
        network = host.network
        run("ip", "neigh", "replace", host.ip, "lladdr", there, "dev", network.bridge, "nud", "permanent")
        run(
            "nsenter",
            f"--net=/proc/{host.pid}/ns/net",
            "ip",
            "neigh",
            "replace",
            network.gateway,
            "lladdr",
            client,
            "dev",
            "eth0",
            "nud",
            "permanent",
        )

    for host in hosts:
        address(host, UNUSED_ADDRESS, UNUSED_ADDRESS)
    yield
    for host in hosts:
        address(host, host.network._mac(1), host.network._mac(host.index))


def index_of(events: Sequence[Any], condition: Callable[[Any], bool]) -> int:
    return next(index for index, event in enumerate(events) if condition(event))


class Clocked(RecordedEvents):
    """The events of a pool, with their times."""

    def __init__(self) -> None:
        super().__init__()
        self.times: list[float] = []

    def __call__(self, event: Any) -> None:
        self.times.append(time.monotonic())
        super().__call__(event)

    def when(self, condition: Callable[[Any], bool]) -> float:
        """Wait for an event; return its time, on the clock of time.monotonic."""
        wait_until(lambda: any(condition(event) for event in list(self.events)), "the pool to tell it", seconds=90)
        return self.times[index_of(self.events, condition)]


def open_and_wait(*arguments: str) -> None:
    """Open a pool on hosts, give every node a call, print a line, and wait to be killed."""
    lease_seconds, *addresses, key, known_hosts = arguments
    provider = sky.Hosts(*addresses, user="root", key=key, known_hosts=known_hosts, config="/dev/null")
    with pool_on(provider, lambda event: None, lease_seconds=float(lease_seconds)) as pool:
        pool.submit_all([forever() for _ in range(3)])
        print("ready", flush=True)
        time.sleep(60)


CALLS = 200


RAN = "root/ran"


LEASE_SECONDS = 8


GUARD_SECONDS = 10


REPOSITORY = Path(__file__).parents[1]


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


class Timings:
    """The measurements, in seconds."""

    def __init__(self) -> None:
        self.rows: list[tuple[str, float]] = []

    @contextmanager
    def of(self, what: str) -> Iterator[None]:
        """Measure a block."""
        started = time.monotonic()
        yield
        self.rows.append((what, time.monotonic() - started))

    def __str__(self) -> str:
        return "\n".join(f"{what:<70}{seconds:>8.1f} s" for what, seconds in self.rows)


@pytest.fixture(scope="module")
def timings() -> Iterator[Timings]:
    """The measurements of all tests of this file."""
    timings = Timings()
    yield timings
    print(f"\n\n{timings}")


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
    """Their provider, which has their host keys.

    After each test no process of a node is left on them.
    """
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
    image = sky.Image(pip=["numpy"])
    return sky.ComputePool(
        **{
            "provider": provider,
            "nodes": 3,
            "image": image,
            "on_event": recorded,
            "display": "quiet",
            "provision_timeout": 150,
            **options,
        }
    )


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


@contextmanager
def client(*arguments: str) -> Iterator["subprocess.Popen[str]"]:
    """Run this file as a program; it does not outlive the block."""
    process = subprocess.Popen(
        [sys.executable, "-m", "tests.real_hosts", *arguments], cwd=REPOSITORY, stdout=subprocess.PIPE, text=True
    )
    try:
        yield process
    finally:
        process.kill()
        process.communicate(timeout=60)


if __name__ == "__main__":
    open_and_wait(*sys.argv[1:])
