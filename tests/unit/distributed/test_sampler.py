"""`sky.DistributedSampler` gives PyTorch's sampler this worker's rank; tests/nightly/distributed/test_torch.py uses the real one."""

import sys
from types import ModuleType
from typing import Any

import pytest

import skyward_core as sky
from skyward_core.worker.info import ENV, InstanceInfo, to_env


@pytest.fixture
def is_initialized(monkeypatch: pytest.MonkeyPatch) -> list[bool]:
    """A PyTorch with a sampler that returns its arguments; the value says whether there is a process group."""
    value = [False]
    modules: dict[str, Any] = {
        name: ModuleType(name) for name in ("torch", "torch.distributed", "torch.utils", "torch.utils.data")
    }
    modules["torch"].distributed = modules["torch.distributed"]
    modules["torch"].utils = modules["torch.utils"]
    modules["torch.utils"].data = modules["torch.utils.data"]
    modules["torch.distributed"].is_available = lambda: True
    modules["torch.distributed"].is_initialized = lambda: value[0]
    modules["torch.utils.data"].DistributedSampler = lambda dataset, **settings: settings
    for name, module in modules.items():
        monkeypatch.setitem(sys.modules, name, module)
    info = InstanceInfo(
        1, 3, is_head=False, accelerators=[], head_addr="", head_port=1, job_id="", worker=1, workers_per_node=2
    )
    monkeypatch.setenv(ENV, to_env(info))
    return value


def test_without_a_process_group_the_rank_is_the_workers(is_initialized: list[bool]) -> None:
    """Worker 1 of node 1 is the fourth of six."""
    settings = sky.DistributedSampler([1, 2], shuffle=False, seed=7, drop_last=True)
    assert settings == {"num_replicas": 6, "rank": 3, "shuffle": False, "seed": 7, "drop_last": True}


def test_with_a_process_group_the_rank_is_pytorchs(is_initialized: list[bool]) -> None:
    """PyTorch asks its group for what is None."""
    is_initialized[0] = True
    assert sky.DistributedSampler([1]) == {
        "num_replicas": None,
        "rank": None,
        "shuffle": True,
        "seed": 0,
        "drop_last": False,
    }
