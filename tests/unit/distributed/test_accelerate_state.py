"""The state that Accelerate keeps for a process; tests/nightly/distributed/test_torch.py uses the real one."""

import sys
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest

from skyward_core.distributed.frameworks import forget_state


def test_the_state_of_accelerate_is_reset_if_it_is_loaded(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delitem(sys.modules, "accelerate.state", raising=False)
    forget_state()
    assert "accelerate.state" not in sys.modules
    resets: list[object] = []
    module: Any = ModuleType("accelerate.state")
    module.AcceleratorState = SimpleNamespace(
        _reset_state=lambda reset_partial_state: resets.append(reset_partial_state)
    )
    module.GradientState = SimpleNamespace(_reset_state=lambda: resets.append("gradient"))
    monkeypatch.setitem(sys.modules, "accelerate.state", module)
    forget_state()
    assert resets == [True, "gradient"]
