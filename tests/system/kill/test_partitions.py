"""A healthy pool loses its client for 30 seconds at a time, for six hours: no safeguard ends it, replaces nodes, or
treats it as dead.
"""

import random
from collections.abc import Iterator
from dataclasses import replace
from datetime import timedelta
from pathlib import Path

from skyward_core.ledger.ledger import Ledger
from skyward_core.machines.owner import Owner, OwnerState
from skyward_core.wire.settings import NodeSettings
from skyward_core.worker.node_clocks import Watch, write_lease
from tests.ledger.fixtures import NOON, Clock, open_pool
from tests.unit.engine.test_recovery import World

HOURS = 6
CUT_SECONDS = 30.0
RECONNECT_SECONDS = 6.0
"""How long a node may still be silent after the connection is back: one attempt that began too early, and the next."""
LEASE_SECONDS, BEAT_SECONDS = 120.0, 10.0


def cuts() -> Iterator[tuple[float, float]]:
    """Yield the seconds at which the connection breaks and returns: up to two minutes up, then half a minute down."""
    chance, now = random.Random(0), 0.0
    while now < HOURS * 3600:
        now += chance.uniform(1.0, 120.0)
        yield now, now + CUT_SECONDS
        now += CUT_SECONDS


def beats() -> Iterator[float]:
    """Yield when a client reaches the node: every few seconds, and soon after the connection is back."""
    now = 0.0
    for cut, healed in cuts():
        while now < cut:
            yield now
            now += BEAT_SECONDS
        now = healed + RECONNECT_SECONDS


def test_the_node_waits_for_its_client(tmp_path: Path) -> None:
    """When the client is permanently gone, the node ends."""
    clock = [0.0]
    watch = Watch(tmp_path, lambda: clock[0])
    settings = NodeSettings(
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
    for beat in beats():
        while clock[0] < beat:
            clock[0] += 1.0
            assert watch.verdict(settings, ()) is None, f"after {clock[0]:.0f} s"
        write_lease(tmp_path, beat + LEASE_SECONDS)
    assert clock[0] > (HOURS - 0.2) * 3600
    clock[0] += LEASE_SECONDS + 1
    assert "lease" in str(watch.verdict(settings, ()))


def test_the_client_waits_for_its_head() -> None:
    """The cluster is not restarted, no node is replaced, and none is reported lost."""
    world = World(lease_seconds=LEASE_SECONDS)
    for cut, healed in cuts():
        world.go_on(cut - world.now, step=1.0)
        world.cut(0)
        world.go_on(healed + RECONNECT_SECONDS - world.now, step=1.0)
        world.mend(0)
    world.go_on(60.0, step=1.0)
    assert world.now > HOURS * 3600
    assert (world.machines.restarts, world.machines.replaced, world.lost()) == (0, [], [])
    assert world.all_are_there()


def test_no_sweep_finds_the_pool_dead(tmp_path: Path) -> None:
    """Its owner, on another host, cannot reach the ledger during the cuts. Another process checks every 20 seconds."""
    clock, elsewhere = Clock(), replace(Owner.here(), host="elsewhere")
    with Ledger(f"sqlite:///{tmp_path / 'ledger.db'}", clock=clock) as ledger:
        open_pool(ledger, "sky-1", elsewhere, lease_expires_at=NOON + timedelta(seconds=LEASE_SECONDS))

        def why_dead() -> str:
            entry = ledger.pool("sky-1")
            assert entry is not None
            return entry.why_dead(clock(), OwnerState.UNKNOWN)

        for beat in beats():
            while clock() < NOON + timedelta(seconds=beat):
                clock.go(20)
                assert why_dead() == ""
            ledger.renew("sky-1", NOON + timedelta(seconds=beat + LEASE_SECONDS))
        clock.go(LEASE_SECONDS + 40)
        assert "lease ran out" in why_dead()
