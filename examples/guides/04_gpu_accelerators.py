"""A GPU against a processor: `python examples/guides/04_gpu_accelerators.py [NAME [SIZE]]`, such as H100 or 4xT4."""

import skyward_core as sky


@sky.compute
def detect() -> sky.InstanceInfo:
    """Return what the node has; `is_simulated` says that no GPU is behind the name."""
    return sky.instance_info()


@sky.compute
def multiply(size: int) -> dict[str, float]:
    """Return the seconds of a product of two matrices, (size, size) each, on the processor and on the GPU."""
    import time
    from importlib.util import find_spec

    def seconds(product):
        product()  # the first product also compiles kernels and starts threads
        began = time.perf_counter()
        product()
        return time.perf_counter() - began

    if find_spec("torch") is None:  # a computer without PyTorch: NumPy has the processor's product
        import numpy as np

        a, b = np.random.default_rng(0).random((2, size, size), dtype="float32")
        return {"processor": seconds(lambda: a @ b)}

    import torch

    a, b = torch.rand(2, size, size)  # of 32-bit numbers, as NumPy's above

    found = {"processor": seconds(lambda: a @ b)}
    if torch.cuda.is_available():
        a, b = a.cuda(), b.cuda()
        # `a @ b` returns when the GPU has taken the product: synchronize waits for its end
        found["GPU"] = seconds(lambda: (a @ b, torch.cuda.synchronize()))
    return found


def main(name: str, size: int) -> None:
    with sky.ComputePool(
        accelerator=name,  # without `provider`: that of your settings, else this computer
        image=sky.Image(),  # packages of the nodes: elsewhere than on this computer, pip=["torch"]
        max_cost=5,
    ) as pool:
        node = detect() >> pool
        times = multiply(size) >> pool

    print("asked for", name, "and got", node.accelerators)
    print(f"processor: {times['processor']:.4f} s for {size} x {size}")
    if "GPU" in times:
        print(f"GPU: {times['GPU']:.4f} s, {times['processor'] / times['GPU']:.0f} times as fast")
    elif node.is_simulated:
        print("GPU: none. This computer has no GPU and simulates it, so there is nothing to compare")
    else:
        print("GPU: none that PyTorch can use. Is PyTorch for CUDA on the node?")


if __name__ == "__main__":
    import sys

    main(sys.argv[1] if len(sys.argv) > 1 else "A100", int(sys.argv[2]) if len(sys.argv) > 2 else 4096)

# Install what it needs with `pip install ".[examples]"` in a clone of the repository.
# (This line is the last one, because a document quotes the lines above by their numbers.)
