"""JAX over two nodes: one array of all rows, and each node has a part of it.

Run it with `python examples/jax_gradient.py`. It fits y = 1·a + 2·b + 3·c by gradient descent; JAX sums the gradients
over the nodes.

Install what it needs with `pip install . jax` in a clone of the repository.
"""

import skyward_core as sky

PROVIDER = sky.Local()  # this machine; or sky.Hosts("gpu-box"), sky.AWS(region="us-east-1"), ...
IMAGE = sky.Image()  # on Local the nodes have your packages; elsewhere: sky.Image(pip=["jax", "numpy"])
ENV = {"JAX_PLATFORMS": "cpu"}  # both nodes are this machine, and NCCL refuses two ranks on one GPU; elsewhere: {}


@sky.compute
@sky.distributed.jax()
def train(steps: int) -> tuple[int, list[float]]:
    """Return the number of devices of all nodes, and the weights."""
    import jax
    import jax.numpy as jnp
    import numpy as np
    from jax.experimental.multihost_utils import host_local_array_to_global_array as to_global
    from jax.sharding import Mesh, PartitionSpec

    def loss(weights: jax.Array, x: jax.Array, y: jax.Array) -> jax.Array:
        return jnp.mean((x @ weights - y) ** 2)

    @jax.jit
    def step(weights: jax.Array, x: jax.Array, y: jax.Array) -> jax.Array:
        return weights - 0.1 * jax.grad(loss)(weights, x, y)

    rows = np.random.default_rng(0).normal(size=(64, 3)).astype("float32")
    mine = sky.shard(rows, rows @ np.array([1, 2, 3], "float32"))
    mesh = Mesh(np.array(jax.devices()), ("rows",))
    x, y = to_global(mine, mesh, PartitionSpec("rows"))
    weights = np.zeros(3, "float32")
    for _ in range(steps):
        weights = step(weights, x, y)
    return len(jax.devices()), np.asarray(weights).tolist()


def main() -> None:
    """Rent the nodes, train, and end the nodes."""
    with sky.ComputePool(provider=PROVIDER, nodes=2, image=IMAGE, env=ENV) as pool:
        for rank, (devices, weights) in enumerate(train(100) @ pool):
            print(f"rank {rank} of {devices} devices: weights", [round(weight, 2) for weight in weights])


if __name__ == "__main__":
    main()
