"""Real machines: three hosts that you own and a spare one, and machines that a cloud preempts.

Each test opens its own pool on the same hosts, which are bare in the first one only. Run with `-s` it prints its
measurements at the end. Run as a program it is a client: one that opens a pool and waits to be killed, or one that
attaches to a pool of another process.
"""

import signal
import time
from collections import Counter
from typing import Any

import psutil
import pytest

import skyward_core as sky
from skyward_core.events.events import BootstrapProgress
from tests.conftest import RecordedEvents, slowness, wait_until
from tests.real_hosts import (  # noqa: F401 - fixtures
    CALLS,
    GUARD_SECONDS,
    LEASE_SECONDS,
    client,
    executions,
    hosts,
    names_of,
    owned,
    pool_on,
    square,
    tagged,
    timings,
    where,
)
from tests.testbed.fixtures import fleet, mirror  # noqa: F401 - fixtures

pytestmark = [pytest.mark.timeout(300)]


@sky.compute
def solved(matrix: Any, vector: Any) -> Any:
    """A numpy computation, with the node's own numpy."""
    import numpy as np

    return np.linalg.solve(matrix, vector)


# ── hosts, cloud and measurements ────────────────────────────────────────────────────────────────────────────────────


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
        str(LEASE_SECONDS), *(host.ip for host in hosts), str(hosts[0].key_path), str(tmp_path / "known_hosts")
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
