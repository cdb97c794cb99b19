"""A check on a machine with an NVIDIA GPU: `make gpu`, or `python -m tests.gpu` in an environment that has PyTorch, JAX and CuPy.

It prints a line for each check, and exits with 1 if one fails. CI has no GPU.
"""

# pyright: reportMissingImports=false

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
import traceback
from collections.abc import Callable
from typing import Any

import pynvml

import skyward_core as sky
from skyward_core.worker.metrics import gpus_here

GB = 1e9
FREED_SECONDS = 20.0
CHECKS: list[Callable[[], str]] = []


def check(function: Callable[[], str]) -> Callable[[], str]:
    """Add a check. It returns what it measured, or raises an error."""
    CHECKS.append(function)
    return function


def used_gb() -> float:
    """Return the memory in GB that all processes use on the first GPU."""
    pynvml.nvmlInit()
    try:
        return float(pynvml.nvmlDeviceGetMemoryInfo(pynvml.nvmlDeviceGetHandleByIndex(0)).used) / GB
    finally:
        pynvml.nvmlShutdown()


def freed(before: float) -> float:
    """Return the seconds until the memory of the GPU is free again, or raise AssertionError."""
    began = time.monotonic()
    while (used := used_gb()) > before + 0.5:
        seconds = time.monotonic() - began
        assert seconds < FREED_SECONDS, f"{used:.1f} GB are used, and were {before:.1f}"
        time.sleep(0.05)
    return time.monotonic() - began


def local_pool(**options: Any) -> sky.ComputePool:
    """Return a pool on this machine's GPU."""
    return sky.ComputePool(provider=sky.Local(), accelerator=ACCELERATOR, display="quiet", **options)


def failure(call: Any, pool: sky.ComputePool) -> str:
    """Return class and text of the error with which a call fails. Raises AssertionError if it does not."""
    try:
        result = pool.submit(call).result()
    except Exception as error:
        return f"{type(error).__name__}: {(str(error).splitlines() or [''])[0][:80]}"
    raise AssertionError(f"it returned {result!r}")


@sky.compute
def multiply(seconds: float, take_gb: float = 4.0) -> float:
    """Keep the GPU busy; return the sum of a product, which is not zero."""
    import time

    import torch

    kept = torch.ones(int(take_gb * 1e9 / 4), device="cuda")
    a = torch.randn(4096, 4096, device="cuda", dtype=torch.bfloat16)
    end = time.monotonic() + seconds
    b = a
    while time.monotonic() < end:
        for _ in range(20):
            b = a @ a
        torch.cuda.synchronize()
    return float(b.float().abs().sum()) + float(kept[0])


@check
def offer() -> str:
    """The driver's name is one of the catalogue."""
    (offer,) = sky.Local().offers(sky.Requirements(accelerator=sky.accelerators.parse(ACCELERATOR)))
    assert offer.accelerator == ACCELERATOR, offer
    assert offer.accelerator_memory_gb is not None
    return (
        f"{offer.accelerators} x {offer.accelerator}, {offer.accelerator_memory_gb:.1f} GB; NVML: {gpus_here()[0][0]}"
    )


@check
def metrics() -> str:
    """Utilisation and memory of a busy GPU are in the pool's events."""
    samples: list[sky.Metrics] = []
    with local_pool(on_event=lambda event: samples.append(event) if isinstance(event, sky.Metrics) else None) as pool:
        assert multiply(8.0) >> pool > 0
    busy = max(sample.gpu_utilization or 0.0 for sample in samples)
    memory_mb = max(sample.gpu_memory_used_mb or 0.0 for sample in samples)
    assert busy > 80, samples
    assert memory_mb > 4000, samples
    return f"{len(samples)} samples; utilisation {busy:.0f} %, {memory_mb / 1e3:.1f} GB, {max(sample.gpu_temperature or 0 for sample in samples):.0f} °C"


@check
def cancelled_call() -> str:
    """The memory of a cancelled call is free again, and the next call has the GPU."""
    before = used_gb()
    with local_pool() as pool:
        running = pool.submit(multiply(600.0, 20.0))
        while used_gb() < before + 20:
            time.sleep(0.05)
        began = time.monotonic()
        running.cancel()
        while used_gb() > before + 2:
            assert time.monotonic() - began < FREED_SECONDS, f"{used_gb():.1f} GB are used"
            time.sleep(0.02)
        seconds = time.monotonic() - began
        assert multiply(0.1) >> pool > 0
    return f"20 GB are free after {seconds:.2f} s; after the pool {freed(before):.2f} s"


@check
def killed_runner() -> str:
    """A call whose process dies by a signal fails, and the next one has all of the GPU's memory."""
    before = used_gb()

    @sky.compute
    def die() -> None:
        import os
        import signal

        import torch

        torch.ones(30_000_000_000, dtype=torch.uint8, device="cuda")
        os.kill(os.getpid(), signal.SIGKILL)

    with local_pool() as pool:
        text = failure(die(), pool)
        began = time.monotonic()
        assert multiply(0.1, 60.0) >> pool > 0
        seconds = time.monotonic() - began
    return f"{text}; a call with 60 GB right after it: {seconds:.1f} s; free {freed(before):.2f} s after the pool"


@check
def out_of_memory() -> str:
    """PyTorch's error keeps its class, and the pool goes on."""

    @sky.compute
    def take_all() -> None:
        import torch

        torch.ones(10**12, dtype=torch.uint8, device="cuda")

    with local_pool() as pool:
        text = failure(take_all(), pool)
        assert text.startswith("OutOfMemoryError"), text
        assert multiply(0.1) >> pool > 0
    return text


@check
def device_fault() -> str:
    """A kernel that fails leaves its process without a usable CUDA context: the next call has another process."""

    @sky.compute
    def fault() -> None:
        import torch

        index = torch.tensor([10**9], device="cuda")
        torch.ones(4, device="cuda")[index]
        torch.cuda.synchronize()

    with local_pool() as pool:
        text = failure(fault(), pool)
        assert "CUDA error" in text, text
        assert multiply(0.1) >> pool > 0
    return f"{text}; the next call runs"


@check
def results() -> str:
    """One GB as an array of NumPy, and as a tensor of the processor and of the GPU; how fast each comes back."""

    @sky.compute
    def make(kind: str, gigabytes: float) -> Any:
        import numpy as np
        import torch

        count = int(gigabytes * 1e9 / 4)
        if kind == "numpy":
            return np.arange(count, dtype=np.float32)
        return torch.arange(count, dtype=torch.float32, device=kind)

    times: list[str] = []
    with local_pool() as pool:
        for kind in ("numpy", "cpu", "cuda"):
            pool.run(make(kind, 0.001))
            began = time.monotonic()
            big = pool.run(make(kind, 1.0))
            times.append(f"{kind} {time.monotonic() - began:.2f} s")
            assert float(big[1000]) == 1000.0
            assert kind in {"numpy", str(big.device).partition(":")[0]}
    return ", ".join(times)


@check
def client_without_gpu() -> str:
    """A tensor of the GPU comes to a program that has none."""
    program = """
import os, sys
os.environ["CUDA_VISIBLE_DEVICES"] = ""
import skyward_core as sky

@sky.compute
def make():
    import torch
    return {"weights": torch.ones(10, device="cuda"), "model": torch.nn.Linear(3, 1).cuda()}

with sky.ComputePool(provider=sky.Local(), env={"CUDA_VISIBLE_DEVICES": "0"}, display="quiet") as pool:
    found = make() >> pool
    print(found["weights"].device, next(found["model"].parameters()).device)
"""
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    return done.stdout.strip()


@check
def cupy_fault() -> str:
    """What CuPy raises for a kernel that fails is found to need another process."""

    @sky.compute
    def fault() -> None:
        import cupy

        text = 'extern "C" __global__ void fault() { *(int*)8 = 1; }'
        cupy.RawKernel(text, "fault")((1,), (1,), ())
        cupy.cuda.runtime.deviceSynchronize()

    with local_pool() as pool:
        text = failure(fault(), pool)
        assert "cudaErrorIllegalAddress" in text, text
        assert multiply(0.1) >> pool > 0
    return f"{text}; the next call runs"


@check
def torch_group() -> str:
    """A group of PyTorch on one GPU uses NCCL."""

    @sky.compute
    @sky.distributed.torch()
    def reduce() -> tuple[str, float, str]:
        import torch
        import torch.distributed as dist

        x = torch.full((1000,), 2.0, device="cuda")
        dist.all_reduce(x)
        return dist.get_backend(), float(x.sum()), str(x.device)

    with local_pool() as pool:
        began = time.monotonic()
        (found,) = reduce() @ pool
    assert found == ("nccl", 2000.0, "cuda:0"), found
    return f"{found[0]} in {time.monotonic() - began:.1f} s"


@check
def jax_group() -> str:
    """JAX finds the GPU, and its memory is free for the next call."""
    before = used_gb()

    @sky.compute
    @sky.distributed.jax()
    def devices() -> tuple[str, float]:
        import jax
        import jax.numpy as jnp

        return str(jax.devices()), float(jnp.ones((1000, 1000)).sum())

    with local_pool() as pool:
        (found,) = devices() @ pool
        held = used_gb() - before
        assert multiply(0.1, 30.0) >> pool > 0
    assert found[1] == 1e6
    return f"{found[0]}; {held:.1f} GB are held after the call; a call of PyTorch with 30 GB follows; free {freed(before):.2f} s after the pool"


@check
def killed_client() -> str:
    """kill -9 of the program frees the GPU."""
    before = used_gb()
    program = "from tests import gpu\nwith gpu.local_pool() as pool:\n    gpu.multiply(600.0, 40.0) >> pool\n"
    client = subprocess.Popen([sys.executable, "-c", program])
    began = time.monotonic()
    while used_gb() < before + 40:
        assert client.poll() is None
        assert time.monotonic() - began < 60
        time.sleep(0.05)
    client.send_signal(signal.SIGKILL)
    client.wait()
    killed = time.monotonic()
    freed(before)
    seconds = time.monotonic() - killed
    while sky.Local().instances():
        assert time.monotonic() - killed < FREED_SECONDS
        time.sleep(0.05)
    return (
        f"40 GB are free {seconds:.2f} s after the kill, and the node is gone after {time.monotonic() - killed:.2f} s"
    )


@check
def guide() -> str:
    """The guide to accelerators finds the GPU, and compares it with the processor."""
    done = subprocess.run(
        [sys.executable, "examples/guides/04_gpu_accelerators.py", ACCELERATOR],
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    last = done.stdout.splitlines()[-1]
    assert last.startswith("GPU: ") and last.endswith(" times as fast"), done.stdout
    return last


ACCELERATOR = os.environ.get("SKYWARD_GPU", "H100")


def main(names: list[str]) -> int:
    """Run the checks with these names, or all; return the exit code."""
    failed = 0
    for function in [one for one in CHECKS if not names or one.__name__ in names]:
        began = time.monotonic()
        try:
            text = function()
        except BaseException:
            failed += 1
            text = f"FAILED\n{traceback.format_exc()}"
        print(f"{function.__name__:16} {time.monotonic() - began:5.1f} s  {text}", flush=True)
    return 1 if failed else 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
