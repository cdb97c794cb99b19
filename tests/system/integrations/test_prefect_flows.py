"""Three flows of flows/ on a real API, smaller than their users run them; flows/sweep.py is in test_sweeps.py.

The whole ones, as programs, are in nightly/integrations/test_prefect_browser.py.
"""

import importlib.util
import sys
from collections.abc import Callable
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest

pytest.importorskip("prefect")
from tests.integrations import prefect_server  # isort: skip

import skyward_core as sky
from prefect_skyward import SkywardTaskRunner

pytestmark = [pytest.mark.filterwarnings("default")]  # Prefect's own warnings are not our faults
api = pytest.fixture(scope="module", autouse=True)(prefect_server.served)
FLOWS = Path(__file__).parents[3] / "flows"


@pytest.fixture
def flow_file(monkeypatch: pytest.MonkeyPatch) -> Callable[[str], ModuleType]:
    """Imports a file of flows/."""

    def load(name: str) -> ModuleType:
        spec = importlib.util.spec_from_file_location(f"flows_{name}", FLOWS / f"{name}.py")
        assert spec is not None
        assert spec.loader is not None
        module = importlib.util.module_from_spec(spec)
        monkeypatch.setitem(sys.modules, spec.name, module)
        spec.loader.exec_module(module)
        return module

    return load


def test_a_sweep_finds_its_best_candidate(
    flow_file: Callable[[str], ModuleType], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Of two; scikit-learn is that of this interpreter."""
    sweep = flow_file("digits_sweep")
    monkeypatch.setattr(sweep, "GRID", sweep.GRID[-2:])
    monkeypatch.setattr(sweep, "FOLDS", 2)
    runner = SkywardTaskRunner(provider=sky.Local(price_per_hour=1.2))
    report = sweep.digits_sweep.with_options(task_runner=runner)()
    assert (report["calls"], report["accuracy"] > 0.9) == (5, True)
    assert report["cost_usd"] > 0


def test_a_training_goes_on_from_its_checkpoint_in_its_next_attempt(
    flow_file: Callable[[str], ModuleType], tmp_path: Path
) -> None:
    found = flow_file("checkpointed_training").checkpointed_training(str(tmp_path))
    assert found.items() >= {"begun_at": 120, "slope": 3.0}.items()
    assert found["cost_usd"] > 0


def test_each_step_has_its_hardware(flow_file: Callable[[str], ModuleType]) -> None:
    found: dict[str, Any] = flow_file("hardware_per_step").hardware_per_step()
    assert found.items() >= {"nodes": 2, "accelerator": "T4"}.items()
    assert found["error"] < 0.05
