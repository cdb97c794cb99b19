"""JAX, TensorFlow and Keras themselves on the processors of two local nodes (`make frameworks`)."""

import json
import os
import sys
from types import SimpleNamespace
from typing import Any, cast

import pytest

import skyward_core as sky
from skyward_core.distributed.group import Group
from skyward_core.distributed.member import Place


def frameworks[F: Any](test: F) -> F:
    """Mark a test that needs the framework."""
    return pytest.mark.frameworks(pytest.mark.timeout(900)(test))


def data() -> tuple[Any, Any]:
    import numpy as np

    x = np.random.RandomState(0).randn(64, 3).astype("float32")
    return x, x @ np.array([[1.0], [-2.0], [3.0]], "float32") + 1


def assert_close(found: list[float], expected: Any) -> None:
    assert found == pytest.approx(expected.flatten().tolist(), rel=1e-3, abs=1e-4)


# ── JAX ──────────────────────────────────────────────────────────────────────────────────────────────────────────────


def test_jax_is_initialised_with_the_place_of_the_rank(monkeypatch: pytest.MonkeyPatch) -> None:
    """A second process of the second node, which has one of two devices. No shutdown after an error: others may hang."""
    calls = list[Any]()
    own = {
        "initialize": lambda *args, **kwargs: calls.append((args, kwargs)),
        "shutdown": lambda: calls.append("shutdown"),
    }
    monkeypatch.setitem(sys.modules, "jax", cast(Any, SimpleNamespace(distributed=SimpleNamespace(**own))))
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


@sky.compute
@sky.distributed.jax()
def gathered() -> tuple[int, int, int, list[float]]:
    import jax
    import jax.numpy as jnp
    from jax.experimental.multihost_utils import process_allgather

    values: Any = process_allgather(jnp.array([10.0 * jax.process_index() + 1]))
    return jax.process_index(), jax.process_count(), jax.device_count(), values.flatten().tolist()


@sky.compute
def alone() -> tuple[int, list[str]]:
    import jax

    return jax.process_count(), [name for name in os.environ if name.startswith("JAX_")]


@sky.compute
@sky.distributed.jax()
def averaged_by_jax() -> list[float]:
    """The gradient over the data of both processes, each of which has one half."""
    import jax
    import jax.numpy as jnp
    import numpy as np
    from jax.experimental.multihost_utils import host_local_array_to_global_array
    from jax.sharding import Mesh, PartitionSpec

    x, y = sky.shard(*data())
    mesh = Mesh(np.array(jax.devices()), ("rows",))
    rows, targets = (host_local_array_to_global_array(one, mesh, PartitionSpec("rows")) for one in (x, y))
    weights = host_local_array_to_global_array(np.zeros((3, 1), "float32"), mesh, PartitionSpec())

    def loss(w: Any, x: Any, y: Any) -> Any:
        return jnp.mean((x @ w - y) ** 2)

    return np.asarray(jax.jit(jax.grad(loss))(weights, rows, targets).addressable_data(0)).flatten().tolist()


@frameworks
def test_each_training_of_jax_is_one_runtime_over_all_workers(pool_of_two: sky.ComputePool) -> None:
    """The gradient is that of the whole data: 2 xᵀ(xw - y) / n at w = 0."""
    for _ in range(2):
        assert gathered() @ pool_of_two == ((0, 2, 2, [1.0, 11.0]), (1, 2, 2, [1.0, 11.0]))
    assert (gathered() >> pool_of_two)[1:] == (1, 1, [1.0])
    assert alone() @ pool_of_two == ((1, []), (1, []))
    x, y = data()
    for found in averaged_by_jax() @ pool_of_two:
        assert_close(found, -2 * x.T @ y / len(x))


# ── TensorFlow ───────────────────────────────────────────────────────────────────────────────────────────────────────


@sky.compute
@sky.distributed.tensorflow()
def averaged_by_tensorflow() -> tuple[int, int, list[float]]:
    import tensorflow as tf

    strategy = tf.distribute.MultiWorkerMirroredStrategy()
    x, y = sky.shard(*data())
    with strategy.scope():
        weights = tf.Variable(tf.zeros((3, 1)))

    @tf.function
    def step() -> Any:
        def of_replica() -> Any:
            with tf.GradientTape() as tape:
                loss = tf.reduce_mean((x @ weights - y) ** 2)
            gradient = tape.gradient(loss, weights)
            return tf.distribute.get_replica_context().all_reduce("MEAN", gradient)

        return strategy.run(of_replica)

    gradient = strategy.experimental_local_results(step())[0]
    index = json.loads(os.environ["TF_CONFIG"])["task"]["index"]
    return index, strategy.num_replicas_in_sync, gradient.numpy().flatten().tolist()


@frameworks
def test_the_gradient_of_tensorflow_is_that_of_the_whole_data(pool_of_two: sky.ComputePool) -> None:
    """Two trainings in a row, and one of a single worker, on one pool."""
    x, y = data()
    for _ in range(2):
        found = averaged_by_tensorflow() @ pool_of_two
        assert [one[:2] for one in found] == [(0, 2), (1, 2)]
        for one in found:
            assert_close(one[2], -2 * x.T @ y / len(x))
    assert (averaged_by_tensorflow() >> pool_of_two)[1] == 1


@frameworks
@pytest.mark.parametrize("rank", [0, 1])
def test_the_error_of_the_first_rank_is_raised(pool_of_two: sky.ComputePool, rank: int) -> None:
    """The other one is in a collective operation."""

    @sky.compute
    @sky.distributed.tensorflow()
    def fails() -> None:
        import tensorflow as tf

        strategy = tf.distribute.MultiWorkerMirroredStrategy()
        if sky.instance_info().rank == rank:
            raise ValueError(f"rank {rank} has failed")
        strategy.reduce("SUM", strategy.run(lambda: tf.ones(())), axis=None)

    with pytest.raises(ValueError, match=f"rank {rank} has failed"):
        fails() @ pool_of_two


# ── Keras ────────────────────────────────────────────────────────────────────────────────────────────────────────────


def test_a_backend_that_keras_does_not_have_is_refused() -> None:
    wrong: Any = "pytorch"
    with pytest.raises(sky.BadRequest, match="'jax', 'tensorflow', 'torch'"):
        sky.distributed.keras(backend=wrong)


def model() -> Any:
    import keras

    return keras.Sequential([keras.layers.Input((3,)), keras.layers.Dense(1, kernel_initializer="zeros")])


@sky.compute
@sky.distributed.keras(backend="jax")
def fitted() -> tuple[str, list[float]]:
    """Train a model on the rows of this rank, and return its weights."""
    import keras

    trained = model()
    trained.compile(keras.optimizers.SGD(0.1), "mse")
    trained.fit(*sky.shard(*data()), batch_size=32, epochs=5, shuffle=False, verbose=0)
    return keras.config.backend(), [float(value) for weight in trained.get_weights() for value in weight.flatten()]


@frameworks
def test_with_jax_fit_trains_one_model_on_the_rows_of_all_ranks(pool_of_two: sky.ComputePool) -> None:
    """As NumPy does with 5 steps of gradient descent on all rows."""
    import numpy as np

    x, y = data()
    rows, expected = np.hstack([x, np.ones((64, 1), "float32")]), np.zeros((4, 1), "float32")
    for _ in range(5):
        expected -= 0.1 * 2 * rows.T @ (rows @ expected - y) / 64
    for backend, weights in fitted() @ pool_of_two:
        assert backend == "jax"
        assert_close(weights, expected)


@sky.compute
@sky.distributed.keras(backend="torch")
def averaged_by_torch() -> tuple[str, int, list[float]]:
    """Keras's model is a module of PyTorch, so DistributedDataParallel takes it."""
    import torch
    import torch.distributed as dist

    trained = model()
    parallel = torch.nn.parallel.DistributedDataParallel(trained)
    x, y = (torch.from_numpy(one) for one in sky.shard(*data()))
    torch.nn.functional.mse_loss(parallel(x), y).backward()
    gradients = [value for weight in trained.trainable_weights for value in weight.value.grad.flatten().tolist()]
    return os.environ["KERAS_BACKEND"], dist.get_world_size(), gradients


@sky.compute
@sky.distributed.keras(backend="tensorflow")
def averaged_by_a_strategy() -> tuple[str, int, list[float]]:
    """The loop is written by hand: Keras's `fit` fails with a strategy of several workers."""
    import tensorflow as tf

    strategy = tf.distribute.MultiWorkerMirroredStrategy()
    with strategy.scope():
        trained = model()
    x, y = sky.shard(*data())

    @tf.function
    def step() -> Any:
        def of_replica() -> Any:
            with tf.GradientTape() as tape:
                loss = tf.reduce_mean((trained(x) - y) ** 2)
            gradients = tape.gradient(loss, trained.trainable_variables)
            return tf.distribute.get_replica_context().all_reduce("MEAN", gradients)

        return strategy.run(of_replica)

    found = [strategy.experimental_local_results(one)[0] for one in step()]
    gradients = [float(value) for one in found for value in one.numpy().flatten()]
    return os.environ["KERAS_BACKEND"], strategy.num_replicas_in_sync, gradients


@frameworks
@pytest.mark.parametrize(
    ("backend", "training"), [("torch", averaged_by_torch), ("tensorflow", averaged_by_a_strategy)]
)
def test_with_the_others_gradients_are_averaged(pool_of_two: sky.ComputePool, backend: str, training: Any) -> None:
    import numpy as np

    x, y = data()
    rows = np.hstack([x, np.ones((64, 1), "float32")])
    for name, world, gradients in training() @ pool_of_two:
        assert (name, world) == (backend, 2)
        assert_close(gradients, -2 * rows.T @ y / 64)
