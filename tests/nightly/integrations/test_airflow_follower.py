"""The trigger's side of a deferred task, with pools that misbehave: outages, cuts, ends, and a user who is quicker."""

import asyncio
import importlib.util
from typing import Any

import pytest

from tests.unit.integrations.test_airflow_follower import (  # noqa: F401 - fixtures
    Pool,
    pool,
)

if importlib.util.find_spec("airflow") is None:
    pytest.skip("Airflow is not installed", allow_module_level=True)

import skyward_core as sky
from airflow_provider_skyward import triggers


def test_many_triggers_whose_pools_are_busy_each_have_one_event(pool: Pool, monkeypatch: pytest.MonkeyPatch) -> None:
    """All calls have ended when the schedulers answer again. Each is followed once, and its connection is closed."""
    for name in ("FIRST_PAUSE_SECONDS", "LONGEST_PAUSE_SECONDS"):
        monkeypatch.setattr(triggers, name, 0.0)
    count = 50
    pool.looks = 1
    pool.why_not_attached = [sky.Unreachable("busy"), OSError(24, "Too many open files")] * count
    made = [triggers.SkywardTrigger("sky-a", [f"c/{number}"], [0]) for number in range(count)]

    async def events(trigger: triggers.SkywardTrigger) -> list[Any]:
        return [event async for event in trigger.run()]

    async def all_events() -> list[list[Any]]:
        return await asyncio.gather(*map(events, made))

    assert [len(its) for its in asyncio.run(all_events())] == [1] * count
    assert sorted(pool.followed) == sorted(f"c/{number}" for number in range(count))
    assert (pool.attached, pool.closed, pool.why_not_attached) == (count, count, [])
