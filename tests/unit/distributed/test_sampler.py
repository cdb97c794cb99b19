"""`sky.DistributedSampler` is a class, on a client without PyTorch too; PyTorch itself is in the nightly tests."""

import inspect
import pickle
import sys
import types
from collections.abc import Iterator
from typing import Any

import pytest

import skyward_core as sky

sampler = sys.modules[sky.DistributedSampler.__module__]


class TorchsSampler:
    """As PyTorch's, by its arguments."""

    def __init__(
        self,
        dataset: Any,
        num_replicas: int | None = None,
        rank: int | None = None,
        shuffle: bool = True,
        seed: int = 0,
    ) -> None:
        self.has = (dataset, num_replicas, rank, shuffle, seed)


@pytest.fixture
def group(monkeypatch: pytest.MonkeyPatch) -> Iterator[types.SimpleNamespace]:
    """PyTorch's modules, with a process group that can be initialised."""
    group = types.SimpleNamespace(is_available=lambda: True, is_initialized=lambda: False)
    monkeypatch.setitem(sys.modules, "torch", types.ModuleType("torch"))
    monkeypatch.setitem(sys.modules, "torch.distributed", group)  # type: ignore[arg-type]
    data: Any = types.SimpleNamespace(DistributedSampler=TorchsSampler)
    monkeypatch.setitem(sys.modules, "torch.utils", types.ModuleType("torch.utils"))
    monkeypatch.setitem(sys.modules, "torch.utils.data", data)
    info = types.SimpleNamespace(world_size=4, rank=3)
    monkeypatch.setattr(sampler, "instance_info", lambda: info)
    sampler._torch_sampler.cache_clear()
    yield group
    sampler._torch_sampler.cache_clear()


def test_it_is_a_class_whose_objects_are_pytorchs(group: types.SimpleNamespace) -> None:
    """With the worker's rank, unless PyTorch's process group has one. It can be subclassed, and its objects pickled."""
    assert inspect.isclass(sky.DistributedSampler)
    one: Any = sky.DistributedSampler([1, 2], shuffle=False)
    assert one.has == ([1, 2], 4, 3, False, 0)
    assert isinstance(one, sky.DistributedSampler)
    assert isinstance(one, TorchsSampler)
    assert not isinstance([], sky.DistributedSampler)
    assert pickle.loads(pickle.dumps(one)).has == one.has

    class Mine(sky.DistributedSampler):
        def first(self) -> Any:
            return self.has[0][0]  # type: ignore[attr-defined]

    mine: Any = Mine([7], seed=1)
    assert (mine.first(), mine.has) == (7, ([7], 4, 3, True, 1))
    assert issubclass(Mine, sky.DistributedSampler)
    group.is_initialized = lambda: True
    assert sky.DistributedSampler([1], rank=2).has == ([1], None, 2, True, 0)  # type: ignore[attr-defined]


def test_a_client_without_pytorch_can_name_it(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "torch.utils.data", None)
    sampler._torch_sampler.cache_clear()
    assert inspect.isclass(sky.DistributedSampler)
    with pytest.raises(ModuleNotFoundError):
        sky.DistributedSampler([1])
