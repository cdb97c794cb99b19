"""One program, many providers: the machines and prices that each has now, and a call on the one that you choose.

    python examples/guides/03_providers.py                           this machine
    python examples/guides/03_providers.py hosts                     machines of yours, as HOSTS below names them
    python examples/guides/03_providers.py aws runpod --rent         the cheaper of two clouds, with your credentials

A cloud is asked for its offers, which costs nothing. Only with `--rent` is a machine rented there.
"""

import platform
import sys

import skyward_core as sky

HOSTS = ("gpu-1", "gpu-2")  # names of your ~/.ssh/config, or addresses

PROVIDERS: dict[str, sky.Provider] = {
    "local": sky.Local(),
    "hosts": sky.Hosts(*HOSTS),
    "aws": sky.AWS(region="us-east-1"),
    "digitalocean": sky.DigitalOcean(),
    "runpod": sky.RunPod(),
    "vastai": sky.VastAI(),
    "verda": sky.Verda(),
}


@sky.compute
def where() -> str:
    return f"{platform.machine()}, {platform.system()}"


def main(names: list[str], rents: bool) -> None:
    """Print the cheapest offers of the providers, then run one call on the cheapest."""
    providers = [PROVIDERS[name] for name in names]
    for offer in sky.offers(providers, cpu=1)[:5]:
        print(f"{offer.provider} {offer.instance_type}: {offer.total_per_hour:.4f} USD per hour")
    if rents:
        with sky.ComputePool(provider=providers, cpu=1, max_cost=1) as pool:
            print("a call ran on", where() >> pool)


if __name__ == "__main__":
    chosen = [name for name in sys.argv[1:] if name != "--rent"] or ["local"]
    main(chosen, rents="--rent" in sys.argv or chosen == ["local"])
