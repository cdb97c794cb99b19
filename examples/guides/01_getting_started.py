"""The first calls: one, the same one on every node, two in parallel, many; and what they have cost.

Run it with `python examples/guides/01_getting_started.py`. The nodes are processes of this machine.
"""

import skyward_core as sky

PROVIDER = sky.Local(price_per_hour=1.2)  # or sky.Hosts("gpu-box"), sky.AWS(region="us-east-1"), ...


@sky.compute
def train(rate: float) -> float:
    """Calling it makes a pending call. Nothing runs before `>>`, `@` or `map`."""
    print(f"training with {rate}")  # appears here while the call runs
    return 1 - rate


def main() -> None:
    """Rent two nodes, make the calls, and end the nodes."""
    with sky.ComputePool(provider=PROVIDER, nodes=2, max_cost=5) as pool:
        print("one call:", train(0.1) >> pool)
        print("on every node:", train(0.1) @ pool)
        print("two in parallel:", (train(0.1) & train(0.2)) >> pool)
        print("many, in order:", pool.map(train, [0.5, 0.25, 0.125]))

    print("here, without a pool:", train.local(0.5))
    print(f"cost: {pool.cost:.6f} USD; left running: {pool.receipt['left']}")


if __name__ == "__main__":
    main()
