"""TF_CONFIG, and TensorFlow itself on two local nodes (`make frameworks`)."""

import json
import os
from typing import Any

import pytest

import skyward_core as sky

tensorflow_itself = [pytest.mark.frameworks, pytest.mark.timeout(900)]


def data() -> tuple[Any, Any]:
    import numpy as np

    generator = np.random.RandomState(0)
    return generator.randn(16, 3).astype("float32"), generator.randn(16, 1).astype("float32")


@sky.compute
@sky.distributed.tensorflow()
def averaged() -> tuple[int, int, list[float]]:
    """The gradient over the data of both workers, each of which has one half."""
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


class TestTensorflow:
    pytestmark = tensorflow_itself

    def test_the_gradient_is_that_of_the_whole_data(self, pool_of_two: sky.ComputePool) -> None:
        x, y = data()
        expected = (-2 * x.T @ y / len(x)).flatten().tolist()
        for _ in range(2):
            found = averaged() @ pool_of_two
            assert [one[:2] for one in found] == [(0, 2), (1, 2)]
            for one in found:
                assert one[2] == pytest.approx(expected, rel=1e-4, abs=1e-6)
        assert (averaged() >> pool_of_two)[1] == 1

    @pytest.mark.parametrize("rank", [0, 1])
    def test_the_error_of_the_first_rank_is_raised(self, pool_of_two: sky.ComputePool, rank: int) -> None:
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
