"""Code blocks of the user's documents that open a pool run on this machine (see tests/unit/test_seed_blocks.py)."""

import sys
import types
from collections.abc import Callable
from typing import Any

import pytest

import skyward_core as sky
from skyward_core.providers import local
from tests.unit.test_seed_blocks import (  # noqa: F401 - fixtures
    ON_POOLS,
    run,
    skyward,
)


def on_this_machine(module: types.ModuleType) -> None:
    """Replace the cloud of the documents with this machine. It has no GPU and simulates the accelerator, as it says."""

    def make(kind: Callable[..., Any]) -> Callable[..., Any]:
        def pool(*, provider: Any, **rest: Any) -> Any:
            return kind(provider=sky.Local(), display="quiet", **rest)

        return pool

    module.__dict__["ComputePool"] = make(sky.ComputePool)
    integrations = types.ModuleType("skyward.integrations")
    integrations.__dict__["__getattr__"] = lambda name: getattr(sky.integrations, name)
    for kind in ("JoblibPool", "ScikitLearnPool"):
        integrations.__dict__[kind] = make(getattr(sky.integrations, kind))
    sys.modules["skyward.integrations"] = integrations


@pytest.fixture(autouse=True)
def _without_gpus(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(local, "gpus_here", tuple)


def test_a_spot_pool_of_the_documents_runs_here_and_says_that_it_is_simulated(
    skyward: types.ModuleType, caplog: pytest.LogCaptureFixture
) -> None:
    """Two nodes with an A100, spot="always": neither is here. The packages of its image are not needed to see that."""
    on_this_machine(skyward)
    skyward.__dict__["Image"] = lambda **_: sky.Image()
    with run("003:72")["pool"] as pool:
        infos = sky.compute(sky.instance_info)() @ pool
    assert [(info.accelerators, info.is_simulated) for info in infos] == [(["A100"], True)] * 2
    assert [machine["is_spot"] for machine in pool.receipt["resources"]] == [True, True]
    (warning,) = [record.getMessage() for record in caplog.records if record.levelname == "WARNING"]
    assert "this machine has no GPU and stands in for A100 80GB, at $0 per hour" in warning
    assert "its spot machines are simulated, at $0 per hour" in warning


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
