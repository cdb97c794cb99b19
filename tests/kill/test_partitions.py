"""A healthy pool loses its client for 30 seconds at a time, for hours: no safeguard ends it, replaces nodes, or treats
it as dead.
"""

import random
from collections.abc import Iterator
from dataclasses import replace
from datetime import UTC, datetime, timedelta
from pathlib import Path

import pytest

from skyward_core.ledger.ledger import Ledger
from skyward_core.machines.owner import Owner, OwnerState
from skyward_core.worker.settings import NodeSettings
from skyward_core.worker.watchdog import Watch, write_lease
from tests.engine.test_recovery import World

HOURS = 6
CUT_SECONDS = 30.0
RECONNECT_SECONDS = 6.0
"""How long a node may still be silent after the connection is back: one attempt to connect that began too early, and
the next.
"""
LEASE_SECONDS, BEAT_SECONDS = 120.0, 10.0
ELSEWHERE = replace(Owner.here(), host="elsewhere")


def cuts(seed: int) -> Iterator[tuple[float, float]]:
    """Yield the times at which the connection breaks and returns, in seconds: up to two minutes up, then half a minute
    down.
    """
    chance, now = random.Random(seed), 0.0
    while now < HOURS * 3600:
        now += chance.uniform(1.0, 120.0)
        yield now, now + CUT_SECONDS
        now += CUT_SECONDS


def beats(seed: int) -> Iterator[float]:
    """Yield the times at which a client reaches the node, as its renewal thread does: every few seconds, and soon after
    the connection is back.
    """
    now = 0.0
    for cut, healed in cuts(seed):
        while now < cut:
            yield now
            now += BEAT_SECONDS
        now = healed + RECONNECT_SECONDS


@pytest.mark.slow
@pytest.mark.parametrize("seed", range(3))
def test_the_client_waits_for_its_head(seed: int) -> None:
    """For six hours the client cannot reach the head every other minute. The cluster is not restarted, no node is
    replaced, and no node is reported lost.
    """
    world = World(lease_seconds=LEASE_SECONDS)
    for cut, healed in cuts(seed):
        world.go_on(cut - world.now, step=1.0)
        world.cut(0)
        world.go_on(healed + RECONNECT_SECONDS - world.now, step=1.0)
        world.mend(0)
    world.go_on(60.0, step=1.0)
    assert world.now > HOURS * 3600
    assert (world.machines.restarts, world.machines.replaced, world.lost()) == (0, [], [])
    assert world.all_are_there()


@pytest.mark.slow
@pytest.mark.parametrize("seed", range(3))
def test_the_node_waits_for_its_client(seed: int, tmp_path: Path) -> None:
    """For six hours a client reaches the node only between the cuts. Its watchdog checks once a second, and never ends
    the node.
    """
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


@pytest.mark.slow
def test_no_sweep_finds_the_pool_dead(tmp_path: Path) -> None:
    """For six hours the owner cannot reach the ledger during the cuts. Another process checks every 20 seconds: the
    pool is always live.
    """
    now = [datetime(2026, 11, 21, tzinfo=UTC)]
    began = now[0]
    with Ledger(f"sqlite:///{tmp_path / 'ledger.db'}", clock=lambda: now[0]) as ledger:
        ledger.open_pool(
            "sky-1",
            owner=ELSEWHERE,
            provider={"name": "local"},
            spec_json="{}",
            lease_expires_at=began + timedelta(seconds=LEASE_SECONDS),
        )
        for beat in beats(0):
            while now[0] < began + timedelta(seconds=beat):
                now[0] += timedelta(seconds=20)
                assert why_dead(ledger, now[0]) == ""
            ledger.renew("sky-1", began + timedelta(seconds=beat + LEASE_SECONDS))
        now[0] += timedelta(seconds=LEASE_SECONDS + 40)
        assert "lease ran out" in why_dead(ledger, now[0])


def why_dead(ledger: Ledger, now: datetime) -> str:
    entry = ledger.pool("sky-1")
    assert entry is not None
    return entry.why_dead(now, OwnerState.UNKNOWN)


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
