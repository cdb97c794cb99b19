"""Keras's `fit` over two nodes, with JAX as its backend: one model, trained on the rows of all nodes.

Run it with `python examples/keras_fit.py`. It fits y = 1·a + 2·b + 3·c.

Install what it needs with `pip install . keras jax` in a clone of the repository.
"""

import skyward_core as sky

PROVIDER = sky.Local()  # this machine; or sky.Hosts("gpu-box"), sky.AWS(region="us-east-1"), ...
IMAGE = sky.Image()  # on Local the nodes have your packages; elsewhere: sky.Image(pip=["keras", "jax"])


@sky.compute
@sky.distributed.keras(backend="jax")
def train(epochs: int) -> list[float]:
    """Return the weights of the trained model."""
    import keras
    import numpy as np

    rows = np.random.default_rng(0).normal(size=(64, 3)).astype("float32")
    x, y = sky.shard(rows, rows @ np.array([[1], [2], [3]], "float32"))
    model = keras.Sequential([keras.layers.Input((3,)), keras.layers.Dense(1, use_bias=False)])
    model.compile(keras.optimizers.SGD(0.1), "mse")
    model.fit(x, y, batch_size=16, epochs=epochs, verbose=0)  # 16 rows from each node
    return model.get_weights()[0].flatten().tolist()


def main() -> None:
    """Rent the nodes, train, and end the nodes."""
    with sky.ComputePool(provider=PROVIDER, nodes=2, image=IMAGE) as pool:
        for rank, weights in enumerate(train(30) @ pool):
            print(f"rank {rank}: weights", [round(weight, 2) for weight in weights])


if __name__ == "__main__":
    main()
