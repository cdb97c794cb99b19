"""A `concurrent.futures.Executor` whose workers are the slots of a pool, for code that takes an executor.

Run it with `python examples/standard_executor.py`. It searches the number below 10,000 with the longest Collatz chain:
an even number n becomes n / 2, an odd one 3n + 1, until it is 1. It takes each part when it is ready.
"""

from concurrent.futures import Executor, as_completed

import skyward_core as sky

PROVIDER = sky.Local()  # this machine; or sky.Hosts("gpu-box"), sky.AWS(region="us-east-1"), ...


def longest_chain(start: int, stop: int) -> tuple[int, int]:
    """Return the length of the longest chain of the numbers from `start` to `stop`, and the number."""
    return max((steps(number), number) for number in range(max(start, 1), stop))


def steps(number: int) -> int:
    """Return the number of steps from a number to 1."""
    count = 0
    while number != 1:
        number = number // 2 if number % 2 == 0 else 3 * number + 1
        count += 1
    return count


def search(executor: Executor) -> tuple[int, int]:
    """Search with any executor: this function also works with a `ProcessPoolExecutor`."""
    futures = [executor.submit(longest_chain, start, start + 1000) for start in range(0, 10_000, 1000)]
    return max(future.result() for future in as_completed(futures))


def main() -> None:
    """Rent the nodes, search, and end the nodes."""
    with sky.ComputePool(provider=PROVIDER, nodes=2) as pool, pool.executor() as executor:
        count, number = search(executor)
    print(f"the longest chain below 10,000 begins with {number} and has {count} steps")


if __name__ == "__main__":
    main()
