"""A healthy pool loses its client for 30 seconds at a time, for hours"""

from dataclasses import replace
from datetime import UTC, datetime, timedelta
from pathlib import Path

import pytest

from skyward_core.ledger.ledger import Ledger
from skyward_core.machines.owner import Owner, OwnerState
from tests.system.kill.test_partitions import HOURS, LEASE_SECONDS, RECONNECT_SECONDS, beats, cuts
from tests.unit.engine.test_recovery import World

ELSEWHERE = replace(Owner.here(), host="elsewhere")


@pytest.mark.parametrize("seed", range(3))
def test_the_client_waits_for_its_head(seed: int) -> None:
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


def test_no_sweep_finds_the_pool_dead(tmp_path: Path) -> None:
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
