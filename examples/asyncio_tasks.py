"""Calls as coroutines: many at once in a task group, and a deadline for one call.

Run it with `python examples/asyncio_tasks.py`. It sums the digits of some powers of two, and stops a call that takes
too long.
"""

import asyncio
import time

import skyward_core as sky

PROVIDER = sky.Local()  # this machine; or sky.Hosts("gpu-box"), sky.AWS(region="us-east-1"), ...


@sky.compute
def digit_sum(exponent: int) -> int:
    """Return the sum of the decimal digits of two to this power."""
    return sum(int(digit) for digit in str(2**exponent))


@sky.compute
def wait(seconds: float) -> None:
    """Sleep, as an example of a call that hangs."""
    time.sleep(seconds)


async def main() -> None:
    """Rent the nodes, make the calls, and end the nodes. The event loop is never blocked."""
    async with sky.ComputePool(provider=PROVIDER, nodes=2) as pool:
        exponents = [15, 100, 1000]
        async with asyncio.TaskGroup() as group:
            tasks = [group.create_task(pool.arun(digit_sum(exponent))) for exponent in exponents]
        for exponent, task in zip(exponents, tasks, strict=True):
            print(f"the digits of 2**{exponent} sum up to {task.result()}")
        try:
            await pool.arun(wait(3600).timeout(1))
        except TimeoutError:
            print("the call that hangs was stopped after a second")


if __name__ == "__main__":
    asyncio.run(main())
