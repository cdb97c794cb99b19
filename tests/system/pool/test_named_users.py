"""The costs of a pool with a name are split by the time for which the calls of each process held slots."""

import os
import time
from pathlib import Path

import pytest

import skyward_core as sky
from skyward_core.ledger.ledger import Ledger, default_url
from skyward_core.ledger.users import PoolUser, users_of
from tests.conftest import wait_until
from tests.system.pool.test_named_pools import name, pool_of  # noqa: F401 - a fixture

pytestmark = [pytest.mark.timeout(240)]


@sky.compute
def hold(until: str) -> float:
    """Hold a slot until a file exists; return for how long."""
    began = time.monotonic()
    while not os.path.exists(until):
        time.sleep(0.01)
    return time.monotonic() - began


def users(pool_id: str) -> list[PoolUser]:
    with Ledger(default_url()) as ledger:
        return users_of(ledger, pool_id)


def test_each_process_pays_for_the_slots_of_its_calls(name: str, tmp_path: Path) -> None:
    """Calls that run count too, with the renewals of their client; at the end all of it is in the receipt."""
    opener = pool_of(name, provider=sky.Local(price_per_hour=3600)).open()
    other = pool_of(name, provider=sky.Local(price_per_hour=3600)).open()

    def held_by(pool: sky.ComputePool, place: int, seconds: float) -> float:
        """Let a process hold a slot until the ledger has that many seconds of it; return for how long it did."""
        go = tmp_path / f"{place}"
        call = pool.submit(hold(str(go)))
        wait_until(lambda: users(opener.id)[place].slot_seconds > seconds, "the running call to be in the ledger")
        go.touch()
        return call.result(60)

    try:
        long = held_by(other, 1, 2.0)
        assert users(opener.id)[0].slot_seconds == 0
        short = held_by(opener, 0, 0.2)
        other.close()
    finally:
        other.close()
        opener.close()
    first, second = users(opener.id)
    assert first.slot_seconds == pytest.approx(short, abs=0.5)
    assert second.slot_seconds == pytest.approx(long, abs=0.5)
    assert second.cost_usd > first.cost_usd > 0
    assert opener.receipt is not None
    assert first.cost_usd + second.cost_usd == pytest.approx(opener.receipt["buckets"]["running calls"]["cost_usd"])
    assert [user["cost_usd"] for user in opener.receipt["users"]] == [float(first.cost_usd), float(second.cost_usd)]
