"""Real machines: three hosts that you own and a spare one, and machines that a cloud preempts.

Each test opens its own pool on the same hosts, which are bare in the first one only. Run with `-s` it prints its
measurements at the end. Run as a program it is a client: one that opens a pool and waits to be killed, or one that
attaches to a pool of another process.
"""

import json
import platform
import signal
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
from skyward_core.events.events import (
    BootstrapProgress,
)
from tests.conftest import RecordedEvents, processes_by_tag, slowness, wait_until
from tests.testbed import Fleet, Host
from tests.testbed.fixtures import fleet, mirror  # noqa: F401 - fixtures
from tests.testbed.mirror import Mirror

CALLS = 200
RAN = "root/ran"
LEASE_SECONDS = 8
GUARD_SECONDS = 10
REPOSITORY = Path(__file__).parents[2]

pytestmark = [pytest.mark.timeout(300)]


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


@sky.compute
def solved(matrix: Any, vector: Any) -> Any:
    """A numpy computation, with the node's own numpy."""
    import numpy as np

    return np.linalg.solve(matrix, vector)


# ── hosts, cloud and measurements ────────────────────────────────────────────────────────────────────────────────────


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


def is_reaper(process: psutil.Process) -> bool:
    """Return whether a process is a reaper; False for one that has ended meanwhile."""
    try:
        return any("reaper_process.py" in word for word in process.cmdline())
    except psutil.NoSuchProcess:
        return False


# ── the tests, in order ──────────────────────────────────────────────────────────────────────────────────────────────


def test_three_bare_hosts_become_a_pool(hosts, owned, timings):
    """From hosts with nothing but sshd to broadcast, map, numpy and logs. A second opening installs nothing, and at the
    end nothing runs on them.
    """
    np = pytest.importorskip("numpy")
    assert [(host.root / "root/.cache/skyward").exists() for host in hosts] == [False] * 4
    recorded = RecordedEvents()
    pool = pool_on(owned, recorded)
    with timings.of("open three bare hosts, numpy installed"):
        pool.open()
    with pool:
        names = [host.name for host in hosts[:3]]
        assert where() @ pool == tuple((name, rank) for rank, name in enumerate(names))
        assert pool.map(square, range(60)) == [number * number for number in range(60)]
        ran = [executions([host]) for host in hosts]
        assert sum(ran, Counter()) == Counter(range(60))
        assert [bool(of_one) for of_one in ran] == [True, True, True, False]

        matrix, vector = np.random.default_rng(0).random((300, 300)), np.arange(300.0)
        found = pool.map(solved, [matrix, matrix.T], [vector, vector])
        assert all(np.allclose(one @ answer, vector) for one, answer in zip((matrix, matrix.T), found, strict=True))

        call = pool.submit(square(7))
        assert call.result() == 49
        assert recorded.lines(call.call_id) == ["square of 7"]  # emitted before the result arrives
        lines = Counter(event.line for event in recorded.of(sky.LogLine))
        assert lines == Counter([f"square of {number}" for number in (*range(60), 7)])
        assert {event.node for event in recorded.of(sky.LogLine)} == {0, 1, 2}
    steps = [event.step for event in recorded.of(BootstrapProgress)]
    assert Counter(steps)["deps"] == 3
    executions(hosts)

    recorded.events.clear()
    with timings.of("open three hosts, environment cached"):
        pool.open()
    with pool:
        assert where() @ pool == tuple((name, rank) for rank, name in enumerate(names))
        with timings.of("map of 200 calls of 0.1 s on three hosts"):
            assert pool.map(square, range(CALLS)) == [number * number for number in range(CALLS)]
    assert executions(hosts) == Counter(range(CALLS))
    assert "deps" not in [event.step for event in recorded.of(BootstrapProgress)]


def test_the_client_and_its_reaper_are_killed_and_the_hosts_end_by_themselves(hosts, owned, timings, tmp_path):
    """Without client and reaper no process of a node outlives its lease by more than ten seconds; then the hosts serve
    another pool.
    """
    with client(
        "open", str(LEASE_SECONDS), *(host.ip for host in hosts), str(hosts[0].key_path), str(tmp_path / "known_hosts")
    ) as process:
        assert process.stdout is not None
        assert process.stdout.readline() == "ready\n"
        assert all(tagged(host) for host in hosts[:3])
        (reaper,) = [child for child in psutil.Process(process.pid).children() if is_reaper(child)]
        reaper.kill()
        process.send_signal(signal.SIGKILL)
        killed_at = time.monotonic()
        wait_until(
            lambda: not any(tagged(host) for host in hosts),
            "the hosts to end their nodes",
            (LEASE_SECONDS + GUARD_SECONDS) * slowness(),
        )
        timings.rows.append(
            (f"client killed, until nothing runs on the hosts (lease {LEASE_SECONDS} s)", time.monotonic() - killed_at)
        )
    with pool_on(owned, RecordedEvents()) as pool:
        assert pool.map(square, range(10)) == [number * number for number in range(10)]
    assert executions(hosts) == Counter(range(10))


def test_a_host_with_a_wrong_key_is_refused(hosts, owned):
    """Another machine answers at the address of one of the hosts: the pool does not open, and nothing was started on
    the others.
    """
    hosts[1].change_host_key()
    recorded = RecordedEvents()
    with pytest.raises(sky.HostKeyChanged, match=hosts[1].ip), pool_on(owned, recorded):
        pass
    assert recorded.of(sky.InstanceProvisioned) == []
    assert [names_of(tagged(host)) for host in hosts] == [[]] * 4


# ── other processes ──────────────────────────────────────────────────────────────────────────────────────────────────


@contextmanager
def client(*arguments: str) -> Iterator["subprocess.Popen[str]"]:
    """Run this file as a program; it does not outlive the block."""
    process = subprocess.Popen(
        [sys.executable, "-m", "tests.system.test_real_hosts", *arguments],
        cwd=REPOSITORY,
        stdout=subprocess.PIPE,
        text=True,
    )
    try:
        yield process
    finally:
        process.kill()
        process.communicate(timeout=60)


@sky.compute
def forever() -> None:
    """A call that does not end before its node."""
    time.sleep(3600)


def open_and_wait(*arguments: str) -> None:
    """Open a pool on hosts, give every node a call, print a line, and wait to be killed."""
    lease_seconds, *addresses, key, known_hosts = arguments
    provider = sky.Hosts(*addresses, user="root", key=key, known_hosts=known_hosts, config="/dev/null")
    with pool_on(provider, lambda event: None, lease_seconds=float(lease_seconds)) as pool:
        pool.submit_all([forever() for _ in range(3)])
        print("ready", flush=True)
        time.sleep(60)


def leave(*arguments: str) -> sky.ComputePool:
    """Open a pool on hosts, use it, and do not close it."""
    *addresses, key, known_hosts = arguments
    pool = pool_on(
        sky.Hosts(*addresses, user="root", key=key, known_hosts=known_hosts, config="/dev/null"), lambda event: None
    ).open()
    print(pool.map(square, [1, 2]), flush=True)
    return pool


def attach(lease: str, key: str, call_id: str) -> None:
    """Use a pool of another process, and print the results."""
    started = time.monotonic()
    with sky.ComputePool.attach(Path(lease).read_text(), key=key) as pool:
        seconds = time.monotonic() - started
        call = pool.detached_call(call_id)
        found = {
            "seconds": seconds,
            "squares": pool.map(square, range(20)),
            "hosts": where() @ pool,
            "result": call.result(30),
            "log": call.log(),
        }
    print(json.dumps(found))


if __name__ == "__main__":
    # until the interpreter ends
    left = {"open": open_and_wait, "leave": leave, "attach": attach}[sys.argv[1]](*sys.argv[2:])
