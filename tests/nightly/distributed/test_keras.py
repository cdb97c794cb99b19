"""Keras itself with each of its backends on two local nodes (`make frameworks`)."""

import os
from typing import Any

import pytest

import skyward_core as sky


def test_a_backend_that_keras_does_not_have_is_refused() -> None:
    wrong: Any = "pytorch"
    with pytest.raises(sky.BadRequest, match="'jax', 'tensorflow', 'torch'"):
        sky.distributed.keras(backend=wrong)


def data() -> tuple[Any, Any]:
    import numpy as np

    generator = np.random.RandomState(0)
    x = generator.randn(64, 3).astype("float32")
    return x, x @ np.array([[1.0], [-2.0], [3.0]], "float32") + 1


@sky.compute
@sky.distributed.keras(backend="jax")
def fitted() -> tuple[str, list[float]]:
    """Train a model on the rows of this rank, and return its weights."""
    import keras

    model = keras.Sequential([keras.layers.Input((3,)), keras.layers.Dense(1, kernel_initializer="zeros")])
    model.compile(keras.optimizers.SGD(0.1), "mse")
    model.fit(*sky.shard(*data()), batch_size=32, epochs=5, shuffle=False, verbose=0)
    return keras.config.backend(), [float(value) for weight in model.get_weights() for value in weight.flatten()]


@pytest.mark.frameworks
@pytest.mark.timeout(900)
def test_with_jax_fit_trains_one_model_on_the_rows_of_all_ranks(pool_of_two: sky.ComputePool) -> None:
    import numpy as np

    x, y = data()
    rows, expected = np.hstack([x, np.ones((64, 1), "float32")]), np.zeros((4, 1), "float32")
    for _ in range(5):
        expected -= 0.1 * 2 * rows.T @ (rows @ expected - y) / 64
    for backend, weights in fitted() @ pool_of_two:
        assert backend == "jax"
        assert weights == pytest.approx(expected.flatten().tolist(), rel=1e-3, abs=1e-4)


@sky.compute
@sky.distributed.keras(backend="torch")
def averaged() -> tuple[str, int, list[float]]:
    """Keras's model is a module of PyTorch, so DistributedDataParallel takes it."""
    import keras
    import torch
    import torch.distributed as dist

    model = keras.Sequential([keras.layers.Input((3,)), keras.layers.Dense(1, kernel_initializer="zeros")])
    parallel = torch.nn.parallel.DistributedDataParallel(model)
    x, y = (torch.from_numpy(one) for one in sky.shard(*data()))
    torch.nn.functional.mse_loss(parallel(x), y).backward()
    gradients = [value for weight in model.trainable_weights for value in weight.value.grad.flatten().tolist()]
    return os.environ["KERAS_BACKEND"], dist.get_world_size(), gradients


@sky.compute
@sky.distributed.keras(backend="tensorflow")
def averaged_by_a_strategy() -> tuple[str, int, list[float]]:
    """The loop is written by hand: Keras's `fit` fails with a strategy of several workers."""
    import keras
    import tensorflow as tf

    strategy = tf.distribute.MultiWorkerMirroredStrategy()
    with strategy.scope():
        model = keras.Sequential([keras.layers.Input((3,)), keras.layers.Dense(1, kernel_initializer="zeros")])
    x, y = sky.shard(*data())

    @tf.function
    def step() -> Any:
        def of_replica() -> Any:
            with tf.GradientTape() as tape:
                loss = tf.reduce_mean((model(x) - y) ** 2)
            gradients = tape.gradient(loss, model.trainable_variables)
            return tf.distribute.get_replica_context().all_reduce("MEAN", gradients)

        return strategy.run(of_replica)

    found = [strategy.experimental_local_results(one)[0] for one in step()]
    gradients = [float(value) for one in found for value in one.numpy().flatten()]
    return os.environ["KERAS_BACKEND"], strategy.num_replicas_in_sync, gradients


@pytest.mark.frameworks
@pytest.mark.timeout(900)
@pytest.mark.parametrize(("backend", "training"), [("torch", averaged), ("tensorflow", averaged_by_a_strategy)])
def test_with_the_others_gradients_are_averaged(pool_of_two: sky.ComputePool, backend: str, training: Any) -> None:
    import numpy as np

    x, y = data()
    rows = np.hstack([x, np.ones((64, 1), "float32")])
    whole = [float(value) for value in (-2 * rows.T @ y / 64).flatten()]
    for name, world, gradients in training() @ pool_of_two:
        assert (name, world) == (backend, 2)
        assert gradients == pytest.approx(whole, rel=1e-3, abs=1e-4)
