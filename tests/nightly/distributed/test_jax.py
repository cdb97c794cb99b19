"""The arguments of JAX, and JAX itself on the processors of two local nodes (`make frameworks`)."""

import os
import sys
from types import SimpleNamespace
from typing import Any, cast

import pytest

import skyward_core as sky
from skyward_core.distributed.group import Group
from skyward_core.distributed.member import Place


def test_jax_is_initialised_with_the_place_of_the_rank(monkeypatch: pytest.MonkeyPatch) -> None:
    calls = list[Any]()
    fake = SimpleNamespace(
        distributed=SimpleNamespace(
            initialize=lambda *args, **kwargs: calls.append((args, kwargs)), shutdown=lambda: calls.append("shutdown")
        )
    )
    monkeypatch.setitem(sys.modules, "jax", cast(Any, fake))
    group = Group(Place(3, 4, 1, 2, 1, 2, "10.0.0.1", "key"), "10.0.0.2", lambda _: [4000, None, None, None])
    framework = sky.distributed.jax(nproc_per_node=2)(print).framework
    with framework.running(group):
        assert os.environ["JAX_COORDINATOR_ADDRESS"] == "10.0.0.1:4000"
        assert (os.environ["JAX_NUM_PROCESSES"], os.environ["JAX_PROCESS_ID"]) == ("4", "3")
    (args, kwargs), end = calls
    assert (args, kwargs["local_device_ids"], end) == (("10.0.0.1:4000", 4, 3), [1], "shutdown")
    with pytest.raises(ValueError), framework.running(group):
        raise ValueError
    assert len(calls) == 3
    group.restore_environment()


def frameworks[F: Any](test: F) -> F:
    """Mark a test that needs JAX."""
    return pytest.mark.frameworks(pytest.mark.timeout(900)(test))


@sky.compute
@sky.distributed.jax()
def gathered() -> tuple[int, int, int, list[float]]:
    return gather()


def gather() -> tuple[int, int, int, list[float]]:
    import jax
    import jax.numpy as jnp
    from jax.experimental.multihost_utils import process_allgather

    values: Any = process_allgather(jnp.array([10.0 * jax.process_index() + 1]))
    return jax.process_index(), jax.process_count(), jax.device_count(), values.flatten().tolist()


@sky.compute
def alone() -> tuple[int, list[str]]:
    import jax

    return jax.process_count(), [name for name in os.environ if name.startswith("JAX_")]


@frameworks
def test_each_training_is_one_runtime_over_all_workers(pool_of_two: sky.ComputePool) -> None:
    for _ in range(2):
        assert gathered() @ pool_of_two == ((0, 2, 2, [1.0, 11.0]), (1, 2, 2, [1.0, 11.0]))
    assert (gathered() >> pool_of_two)[1:] == (1, 1, [1.0])
    assert alone() @ pool_of_two == ((1, []), (1, []))
    assert [one[1] for one in gathered() @ pool_of_two] == [2, 2]


@sky.compute
@sky.distributed.jax()
def averaged() -> list[float]:
    """The gradient over the data of both processes, each of which has one half."""
    import jax
    import jax.numpy as jnp
    import numpy as np
    from jax.experimental.multihost_utils import host_local_array_to_global_array
    from jax.sharding import Mesh, PartitionSpec

    x, y = sky.shard(*data())
    mesh = Mesh(np.array(jax.devices()), ("rows",))
    rows, targets = (host_local_array_to_global_array(one, mesh, PartitionSpec("rows")) for one in (x, y))
    weights = host_local_array_to_global_array(np.zeros(3, "float32"), mesh, PartitionSpec())

    def loss(w: Any, x: Any, y: Any) -> Any:
        return jnp.mean((x @ w - y) ** 2)

    return np.asarray(jax.jit(jax.grad(loss))(weights, rows, targets).addressable_data(0)).tolist()


def data() -> tuple[Any, Any]:
    import numpy as np

    generator = np.random.RandomState(0)
    return generator.randn(16, 3).astype("float32"), generator.randn(16).astype("float32")


@frameworks
def test_the_gradient_is_that_of_the_whole_data(pool_of_two: sky.ComputePool) -> None:
    x, y = data()
    expected = (-2 * x.T @ y / len(x)).tolist()
    for found in averaged() @ pool_of_two:
        assert found == pytest.approx(expected, rel=1e-4, abs=1e-6)
