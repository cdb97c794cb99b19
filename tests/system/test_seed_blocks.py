"""Code blocks of the user's documents that open a pool run on this machine (see tests/unit/test_seed_blocks.py)."""

import sys
import types
from collections.abc import Callable
from typing import Any

import pytest

import skyward_core as sky
from tests.unit.test_seed_blocks import (  # noqa: F401 - fixtures
    ON_POOLS,
    run,
    skyward,
)


def on_this_machine(module: types.ModuleType) -> None:
    """Replace the cloud of the documents with this machine, which simulates the accelerator."""

    def make(kind: Callable[..., Any]) -> Callable[..., Any]:
        def pool(*, provider: Any, accelerator: Any = None, **rest: Any) -> Any:
            name = getattr(accelerator, "name", accelerator)
            local = sky.Local(simulate=name) if name else sky.Local()
            return kind(provider=local, accelerator=accelerator, display="quiet", **rest)

        return pool

    module.__dict__["ComputePool"] = make(sky.ComputePool)
    integrations = types.ModuleType("skyward.integrations")
    integrations.__dict__["__getattr__"] = lambda name: getattr(sky.integrations, name)
    for kind in ("JoblibPool", "ScikitLearnPool"):
        integrations.__dict__[kind] = make(getattr(sky.integrations, kind))
    sys.modules["skyward.integrations"] = integrations


def test_the_block_of_gather_runs(pool: sky.ComputePool) -> None:
    found = run("003:64", fn=sky.compute(lambda x: x * x), pool=pool)
    assert (found["r1"], found["r2"], found["r3"]) == (1, 4, 9)


@pytest.mark.parametrize("key", ON_POOLS)
def test_a_block_opens_a_pool_and_runs(key: str, skyward: types.ModuleType) -> None:
    from sklearn.datasets import load_iris
    from sklearn.tree import DecisionTreeClassifier

    on_this_machine(skyward)
    names: dict[str, Any] = {
        "fn": lambda x: x * x,
        "benchmark": sky.compute(sky.current_accelerator),
        "data": range(6),
        "estimator": DecisionTreeClassifier(random_state=0),
        "params": {"max_depth": [1, 3]},
    }
    names["X"], names["y"] = load_iris(return_X_y=True)
    found = run(key, **names)
    match key:
        case "003:132":
            assert (found["r1"], found["r2"]) == ("T4", "A100")
        case "003:759":
            assert found["results"] == [0, 1, 4, 9, 16, 25]
        case "003:786":
            assert found["grid"].best_params_ == {"max_depth": 3}
        case _:
            assert not found["pool"].is_active
