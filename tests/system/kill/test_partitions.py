"""A healthy pool loses its client for 30 seconds at a time, for hours"""

import random
from collections.abc import Iterator
from pathlib import Path

import pytest

from skyward_core.worker.settings import NodeSettings
from skyward_core.worker.watchdog import Watch, write_lease

HOURS = 6
CUT_SECONDS = 30.0
RECONNECT_SECONDS = 6.0
"""How long a node may still be silent after the connection is back: one attempt to connect that began too early, and
the next.
"""
LEASE_SECONDS, BEAT_SECONDS = 120.0, 10.0


def cuts(seed: int) -> Iterator[tuple[float, float]]:
    """Yield the times at which the connection breaks and returns, in seconds"""
    chance, now = random.Random(seed), 0.0
    while now < HOURS * 3600:
        now += chance.uniform(1.0, 120.0)
        yield now, now + CUT_SECONDS
        now += CUT_SECONDS


def beats(seed: int) -> Iterator[float]:
    """Yield the times at which a client reaches the node, as its renewal thread does"""
    now = 0.0
    for cut, healed in cuts(seed):
        while now < cut:
            yield now
            now += BEAT_SECONDS
        now = healed + RECONNECT_SECONDS


@pytest.mark.parametrize("seed", range(3))
def test_the_node_waits_for_its_client(seed: int, tmp_path: Path) -> None:
    clock = [0.0]
    watch = Watch(tmp_path, lambda: clock[0])
    settings = node_settings()
    for beat in beats(seed):
        while clock[0] < beat:
            clock[0] += 1.0
            assert watch.verdict(settings, ()) is None, f"after {clock[0]:.0f} s"
        write_lease(tmp_path, beat + LEASE_SECONDS)
    assert clock[0] > (HOURS - 0.2) * 3600
    clock[0] += LEASE_SECONDS + 1  # and when the client is permanently gone, the node ends
    assert "lease" in str(watch.verdict(settings, ()))


def node_settings() -> NodeSettings:
    return NodeSettings(
        pool_id="sky-1",
        instance_id="i-1",
        rank=0,
        total_nodes=1,
        slots=1,
        host="127.0.0.1",
        head_host="127.0.0.1",
        head_port=1,
        tls_certificate="",
        tls_key="",
        value_directories=(),
        timeout_seconds=1e9,
        lease_seconds=LEASE_SECONDS,
    )
