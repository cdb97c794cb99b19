"""A deferrable task whose pool is lost, out of reach, or out of money: what it ends, what it rents, and what it says."""

import importlib.util
from types import SimpleNamespace
from typing import Any

import pytest

from tests.unit.integrations.test_airflow_deferred_faults import (  # noqa: F401 - fixtures
    World,
    nothing,
    world,
)

if importlib.util.find_spec("airflow") is None:
    pytest.skip("Airflow is not installed", allow_module_level=True)

import skyward_core as sky
from airflow_provider_skyward import durable_attempt


@pytest.mark.parametrize("step", ["start", "finish"])
def test_a_worker_whose_supervisor_is_dead_leaves_the_pool_to_the_next_try(
    world: World, monkeypatch: pytest.MonkeyPatch, step: str
) -> None:
    """Its requests to Airflow fail a moment before it has another parent.

    Looks inside: the steps that make such a request.
    """
    parents = iter([7, 7, 7, 1])
    monkeypatch.setattr(durable_attempt, "os", SimpleNamespace(getppid=lambda: next(parents, 1)))
    attempt = world.attempt()
    monkeypatch.setattr(attempt, "_started", _fails)
    monkeypatch.setattr(attempt, "_results", _fails)
    with pytest.raises(BrokenPipeError):
        if step == "start":
            attempt.start(sky.PoolSpec.of(provider="local"), [nothing()])
        else:
            attempt.finish(1, None, "")
    assert attempt.is_orphan
    assert world.done == ["attach sky-old"]


def _fails(*_: Any) -> Any:
    raise BrokenPipeError(32, "Broken pipe")
