"""TensorFlow's MultiWorkerMirroredStrategy over two nodes.

Run it with `python examples/tensorflow_workers.py`. It fits y = 1·a + 2·b + 3·c by gradient descent. Each node has
other rows, and the strategy averages the gradients.

Install what it needs with `pip install . tensorflow-cpu` in a clone of the repository.
"""

import skyward_core as sky

PROVIDER = sky.Local()  # this machine; or sky.Hosts("gpu-box"), sky.AWS(region="us-east-1"), ...
IMAGE = sky.Image()  # on Local the nodes have your packages; elsewhere: sky.Image(pip=["tensorflow"])


@sky.compute
@sky.distributed.tensorflow()
def train(steps: int) -> tuple[int, list[float]]:
    """Return the number of replicas, and the weights."""
    import numpy as np
    import tensorflow as tf

    strategy = tf.distribute.MultiWorkerMirroredStrategy()
    rows = np.random.default_rng(0).normal(size=(64, 3)).astype("float32")
    x, y = sky.shard(rows, rows @ np.array([[1], [2], [3]], "float32"))
    with strategy.scope():
        weights = tf.Variable(tf.zeros((3, 1)))

    def step() -> None:
        with tf.GradientTape() as tape:
            loss = tf.reduce_mean((x @ weights - y) ** 2)
        gradient = tape.gradient(loss, weights)
        mean = tf.distribute.get_replica_context().all_reduce("MEAN", gradient)
        weights.assign_sub(0.1 * mean)

    @tf.function
    def step_of_all() -> None:
        strategy.run(step)

    for _ in range(steps):
        step_of_all()
    return strategy.num_replicas_in_sync, weights.numpy().flatten().tolist()


def main() -> None:
    """Rent the nodes, train, and end the nodes."""
    with sky.ComputePool(provider=PROVIDER, nodes=2, image=IMAGE) as pool:
        for rank, (replicas, weights) in enumerate(train(100) @ pool):
            print(f"rank {rank} of {replicas} replicas: weights", [round(weight, 2) for weight in weights])


if __name__ == "__main__":
    main()
