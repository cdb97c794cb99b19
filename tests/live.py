"""A check against a real cloud, for people with an account: `make live PROVIDER=aws`, and with SPEND=0.50 one machine
for a minute, for at most 0.50 USD.

Without SPEND it makes only requests that cost nothing: account, offers, and our machines.
"""

import argparse
import platform
import sys
import time
from collections import Counter

import skyward_core as sky
from skyward_core.machines.offers import Requirements
from skyward_core.providers.base import load


def look(provider: sky.Provider) -> None:
    """Print the results of the requests that only read."""
    print(f"account    {provider.account()}")
    began = time.monotonic()
    offers = sorted(provider.offers(Requirements()), key=lambda offer: offer.price_per_hour)
    spot = sum(offer.is_spot for offer in offers)
    print(f"offers     {len(offers)} in {time.monotonic() - began:.1f} s, {spot} of them spot")
    cheapest = {offer.accelerator or "no accelerator": offer for offer in reversed(offers)}
    for name, count in Counter(offer.accelerator or "no accelerator" for offer in offers).most_common():
        best = cheapest[name]
        print(f"  {count:5} with {name}: from ${best.price_per_hour:.4f} an hour ({best.name})")
    machines = provider.instances()
    print(f"machines   {len(machines)} of ours")
    for one in machines:
        print(f"  {one.id} {one.state.value} {one.instance_type} in {one.region}, pool {one.pool_id}")


@sky.compute
def hello() -> str:
    """Return where the call runs."""
    return f"{platform.node()}, {platform.platform()}, {sky.instance_info().accelerators}"


def spend(provider: sky.Provider, usd: float, accelerator: str | None) -> None:
    """Rent one machine, run one call on it, and check that it is gone."""
    began = time.monotonic()
    with sky.ComputePool(provider=provider, accelerator=accelerator, max_cost=usd, max_lifetime=1800) as pool:
        print(f"ready      {time.monotonic() - began:.0f} s")
        print(f"call       {hello() >> pool}")
    receipt = pool.receipt
    assert receipt is not None
    print(f"gone       {time.monotonic() - began:.0f} s, ${receipt['total_cost_usd']}, left: {receipt['left']}")


def main() -> int:
    """Check one provider."""
    parser = argparse.ArgumentParser(prog="make live", description=__doc__)
    parser.add_argument("provider")
    parser.add_argument("--spend", type=float, default=0.0, metavar="USD")
    parser.add_argument("--accelerator")
    asked = parser.parse_args()
    provider = load(asked.provider)
    try:
        look(provider)
        if asked.spend:
            spend(provider, asked.spend, asked.accelerator)
    except sky.SkywardError as error:
        print(f"{type(error).__name__}: {error}", file=sys.stderr)
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())
