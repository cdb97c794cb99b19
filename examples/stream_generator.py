"""The items of a generator come one by one, while it runs. A program that stops early stops the generator too.

Run it with `python examples/stream_generator.py`. An endless gradient descent sends its state after each step. The
program stops the generator when the loss is small enough.
"""

from collections.abc import Iterator

import skyward_core as sky

PROVIDER = sky.Local()  # this machine; or sky.Hosts("gpu-box"), sky.AWS(region="us-east-1"), ...


@sky.compute
def descend(rate: float) -> Iterator[tuple[int, float, float]]:
    """Search the minimum of (x - 3)², and yield step, x and loss after each step, endlessly."""
    x, step = 0.0, 0
    while True:
        x -= rate * 2 * (x - 3)
        step += 1
        yield step, x, (x - 3) ** 2


def main() -> None:
    """Rent a node, read the stream until the loss is small, and end the node."""
    with sky.ComputePool(provider=PROVIDER) as pool:
        for step, x, loss in descend(0.1) >> pool:
            if step % 10 == 0:
                print(f"step {step}: x {x:.4f}, loss {loss:.6f}")
            if loss < 1e-6:
                break  # the generator stops on its node
    print(f"the minimum is at x = {x:.2f}, found in {step} steps")


if __name__ == "__main__":
    main()
