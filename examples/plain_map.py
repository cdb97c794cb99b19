"""One function over many values: each value is a call, and the results are in order.

Run it with `python examples/plain_map.py`. It counts the primes below 100,000, in ten parts, on two nodes.
"""

import skyward_core as sky

PROVIDER = sky.Local()  # this machine; or sky.Hosts("gpu-box"), sky.AWS(region="us-east-1"), ...

PART = 10_000


@sky.compute
def count_primes(start: int) -> int:
    """Return how many primes there are from `start` to `start + PART`."""
    return sum(is_prime(number) for number in range(start, start + PART))


def is_prime(number: int) -> bool:
    """Helpers of the same file travel with the function."""
    return number > 1 and all(number % divisor for divisor in range(2, int(number**0.5) + 1))


def main() -> None:
    """Rent the nodes, count, and end the nodes."""
    with sky.ComputePool(provider=PROVIDER, nodes=2) as pool:
        counts = pool.map(count_primes, range(0, 100_000, PART))
    print("in each part:", counts)
    print("primes below 100,000:", sum(counts))


if __name__ == "__main__":
    main()
