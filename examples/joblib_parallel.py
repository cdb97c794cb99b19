"""joblib's `Parallel` over a pool: with `n_jobs=-1` it uses every slot of the pool.

Run it with `python examples/joblib_parallel.py`. It computes pi as the area below 4 / (1 + x²), in a hundred strips.

Install what it needs with `pip install ".[examples]"` in a clone of the repository.
"""

from joblib import Parallel, delayed

import skyward_core as sky

PROVIDER = sky.Local()  # this machine; or sky.Hosts("gpu-box"), sky.AWS(region="us-east-1"), ...

STRIPS = 100
POINTS = 2000


def area(strip: int) -> float:
    """Return the area of one strip, by the midpoint rule."""
    width = 1 / STRIPS / POINTS
    middles = (strip / STRIPS + (point + 0.5) * width for point in range(POINTS))
    return sum(4 / (1 + x * x) for x in middles) * width


def main() -> None:
    """Rent the nodes, compute, and end the nodes. The nodes get your version of joblib."""
    with sky.JoblibPool(provider=PROVIDER, nodes=2):
        areas = Parallel(n_jobs=-1, return_as="generator")(delayed(area)(strip) for strip in range(STRIPS))
        pi = sum(areas)
    print(f"pi is {pi:.8f}")


if __name__ == "__main__":
    main()
