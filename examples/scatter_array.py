"""A large array for many calls: `sky.scatter` sends it to each node once, and the calls name it.

Run it with `python examples/scatter_array.py`. It draws many samples of a million measurements (the bootstrap), and
prints an interval for their median.

Install what it needs with `pip install ".[examples]"` in a clone of the repository.
"""

import numpy as np

import skyward_core as sky

PROVIDER = sky.Local()  # this machine; or sky.Hosts("gpu-box"), sky.AWS(region="us-east-1"), ...
IMAGE = sky.Image()  # on Local the nodes have your packages; elsewhere: sky.Image(pip=["numpy"])


@sky.compute
def median_of_sample(measurements: np.ndarray, seed: int) -> float:
    """Return the median of a random sample of the same size, drawn with replacement."""
    random = np.random.default_rng(seed)
    drawn = random.integers(len(measurements), size=len(measurements))
    return float(np.median(measurements[drawn]))


def main() -> None:
    """Rent the nodes, draw forty samples, and end the nodes."""
    measurements = np.random.default_rng(0).normal(loc=5, scale=2, size=1_000_000)  # 8 MB
    everywhere = sky.scatter(measurements)
    with sky.ComputePool(provider=PROVIDER, nodes=2, image=IMAGE) as pool:
        medians = pool.map(median_of_sample, [everywhere] * 40, range(40))
    low, high = np.quantile(medians, [0.025, 0.975])
    print(f"the median is between {low:.3f} and {high:.3f} (95 %)")


if __name__ == "__main__":
    main()
