"""What travels to a node, how an exception comes back, and what a pool says of itself while it lives.

Run it with `python examples/guides/02_core_concepts.py`.
"""

from dataclasses import dataclass

import skyward_core as sky

PROVIDER = sky.Local(price_per_hour=1.2)  # or sky.Hosts("gpu-box"), sky.AWS(region="us-east-1"), ...


@dataclass
class Sample:
    """Classes of your own files travel with the calls that use them."""

    values: list[float]


def mean(values: list[float]) -> float:
    """So do helpers. Installed packages do not: `image=sky.Image(pip=[...])` installs them on the nodes."""
    return sum(values) / len(values)


@sky.compute
def centred(sample: Sample) -> Sample:
    middle = mean(sample.values)
    return Sample([value - middle for value in sample.values])


def main() -> None:
    """Use a pool that keeps its events, and look at them when its nodes have ended."""
    events: list[sky.SkywardEvent] = []
    with sky.ComputePool(provider=PROVIDER, display="quiet", on_event=events.append) as pool:
        print("a value of your own class:", centred(Sample([1.0, 2.0, 6.0])) >> pool)
        try:
            centred(Sample([])) >> pool
        except ZeroDivisionError as error:
            print("the error of the node, in its own class:", error)

    (bill,) = (event for event in events if isinstance(event, sky.CostFinal))
    print(f"the pool has ended: {bill.total_seconds:.0f} s, {bill.total_cost:.6f} USD")


if __name__ == "__main__":
    main()
