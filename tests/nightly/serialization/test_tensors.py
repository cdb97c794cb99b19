"""Tensors of PyTorch itself (`make frameworks`)."""

# pyright: reportMissingImports=false

from typing import Any

import pytest

import skyward_core as sky
from skyward_core.serialization.pickling import dumps, loads, restored

pytestmark = [pytest.mark.frameworks, pytest.mark.timeout(300)]


def there_and_back(value: Any) -> Any:
    """Return the value as another process gets it: its buffers are copies that cannot be written to."""
    pickled = dumps(value)
    return loads(pickled.data, [bytes(buffer) for buffer in pickled.buffers])


@pytest.mark.parametrize("kind", ["float32", "bfloat16", "int64", "bool", "complex64"])
@pytest.mark.parametrize("count", [0, 3, 100_000])
def test_a_tensor_keeps_its_values_and_can_be_written_to(kind: str, count: int) -> None:
    import torch

    tensor = torch.arange(count).to(getattr(torch, kind))
    found = there_and_back({"a": tensor})["a"]
    assert found.dtype is tensor.dtype
    assert torch.equal(found, tensor)
    if count:
        found[0] = 1
        assert found[0] == 1


def test_views_parameters_and_modules_come_back() -> None:
    import torch

    whole = torch.arange(24.0).reshape(4, 6)
    view, model = whole[1:, ::2].T, torch.nn.Sequential(torch.nn.Linear(3, 300), torch.nn.BatchNorm1d(300))
    view_found, model_found = there_and_back((view, model))
    assert torch.equal(view_found, view)
    assert view_found.stride() == view.stride()
    assert all(parameter.requires_grad for parameter in model_found.parameters())
    for (name, before), (name_found, after) in zip(
        model.state_dict().items(), model_found.state_dict().items(), strict=True
    ):
        assert name == name_found
        assert torch.equal(before, after)


def test_a_tensor_of_a_device_that_is_not_here_is_in_the_processors_memory() -> None:
    import torch

    for device in ("cuda:99", "xpu:99"):
        storage = restored(torch.ones(3).numpy().tobytes(), torch.float32, device)
        tensor = torch.empty(0).set_(storage, 0, (3,))
        assert tensor.device.type == "cpu"
        assert tensor.tolist() == [1.0, 1.0, 1.0]


def test_a_tensor_in_a_scattered_value_is_a_copy_for_each_call() -> None:
    import torch

    @sky.compute
    def add_one(model: Any) -> float:
        model["weights"] += 1
        return float(model["weights"].sum())

    with sky.ComputePool(provider=sky.Local(), display="quiet") as pool:
        for count in (10, 1_000_000):
            model = sky.scatter({"weights": torch.ones(count)})
            assert [add_one(model) >> pool for _ in range(2)] == [2.0 * count] * 2
