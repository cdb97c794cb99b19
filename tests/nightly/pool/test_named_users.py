"""The costs of a pool with a name are split by the time for which the calls of each process held slots."""

import time
from decimal import Decimal

import pytest

import skyward_core as sky
from tests.system.pool.test_named_pools import name, pool_of  # noqa: F401 - a fixture
from tests.system.pool.test_named_users import (
    users,
)

pytestmark = [pytest.mark.timeout(240)]


@sky.compute
def busy(seconds: float) -> None:
    time.sleep(seconds)


def test_the_cost_so_far_is_in_the_ledger_when_it_is_wanted(name: str) -> None:
    """Without `note_cost` it is some seconds behind. Sleeps: the cost of a bucket is by whole seconds."""
    first, second = (sky.Work(system="test", run=name, task=task) for task in ("open", "join"))
    spec = pool_of(name, provider=sky.Local(price_per_hour=3600), lease_seconds=120).spec
    opener = sky.ComputePool.from_spec(spec, work=first).open()
    other = sky.ComputePool.from_spec(spec, work=second).open()
    try:
        busy(1.2) >> other
        other.note_cost()
        assert users(opener.id)[1].slot_seconds >= 1.2
        busy(1.2) >> opener
        opener.note_cost()
        assert users(opener.id)[0].slot_seconds >= 1.2
        assert sum(part.cost_usd for part in sky.cost_parts(first)) > 2
    finally:
        other.close()
        opener.close()
    parts = sky.cost_parts(sky.Work(system="test", run=name))
    assert {part.work for part in parts} == {first, second}
    assert all(part.cost_usd > 0 and part.is_final for part in parts)
    assert sum(part.cost_usd for part in parts) == sum(map(Decimal, map(repr, [opener.cost])))
    opener.note_cost()  # a closed pool has nothing to write
