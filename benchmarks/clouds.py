"""The clouds without the clouds: 50,000 offers ranked, five providers asked at once, 64 machines launched, against fakes that take 300 ms for each answer.

Run from the repository, whose tests have the fakes. Medians of the rounds by the clock; the peer of many is one.

    python -m benchmarks.clouds --rounds 3
"""

from __future__ import annotations

import argparse
import os
import statistics
import tempfile
import time
from collections.abc import Callable, Sequence
from pathlib import Path

import skyward_core as sky
from skyward_core.market import Offer, Requirements
from skyward_core.provisioning.placing import Sold, ask, candidates
from tests.providers.contract import STARTUP, tags
from tests.providers.fake_digitalocean import TOKEN, FakeDigitalOcean
from tests.providers.fake_verda import CLIENT_ID, CLIENT_SECRET, FakeVerda

OFFERS = 50_000
MACHINES = 64
LATENCY_SECONDS = 0.3


def timed(work: Callable[[], object]) -> float:
    """Return how long it takes, in seconds."""
    began = time.perf_counter()
    work()
    return time.perf_counter() - began


def told(what: str, unit: str, values: Sequence[float], peer: Sequence[float] = (), scale: float = 1.0, most: str = "") -> str:
    """Return a line of the table."""
    words = [f"{statistics.median(its) * scale:.3g} [{min(its) * scale:.3g}, {max(its) * scale:.3g}]" if its else "" for its in (values, peer)]
    ratio = f"{statistics.median(values) / statistics.median(peer):.2f}" if peer else ""
    return f"| {what} | {unit} | {words[0]} | {words[1]} | {ratio} | {most} |"


def offers() -> tuple[Offer, ...]:
    """Return as many as five clouds sell, twice."""
    return tuple(
        Offer(
            provider="local",
            instance_type=f"t{number % 500}",
            region=f"r-{number // 500}",
            price_per_hour=1 + (number * 7919) % OFFERS / 1000,
            vcpus=4 + number % 60,
            memory_gb=16,
            accelerator="A100" if number % 3 else "H100",
            accelerators=1 + number % 8,
            accelerator_memory_gb=80,
        )
        for number in range(OFFERS)
    )


def ranking(rounds: int) -> list[str]:
    """Filter and rank."""
    many = offers()
    wishes = {
        "50,000 offers ranked, all fit": sky.PoolSpec.of(nodes=2),
        "50,000 offers filtered and ranked": sky.PoolSpec.of(nodes=2, accelerator="H100", cpu=8),
    }
    return [
        told(what, "ms", [timed(lambda: candidates(spec, [Sold(sky.Local(), many)])) for _ in range(3 * rounds)], scale=1000, most="≤ 200 ms")
        for what, spec in wishes.items()
    ]


def asking(rounds: int, fakes: Sequence[FakeDigitalOcean]) -> str:
    """Five providers at once, against one."""
    providers = [sky.DigitalOcean(endpoint_url=fake.url) for fake in fakes]
    ask(providers, Requirements())
    many = [timed(lambda: ask(providers, Requirements())) for _ in range(rounds)]
    one = [timed(lambda: ask(providers[:1], Requirements())) for _ in range(rounds)]
    return told("five providers asked what they sell; peer: one", "s", many, one)


def launching(rounds: int, provider: sky.Provider, name: str) -> str:
    """Sixty-four machines, against one: from the call until each has an address."""
    offer = min(provider.offers(Requirements()), key=lambda offer: offer.price_per_hour)
    seconds: dict[int, list[float]] = {1: [], MACHINES: []}
    for number in range(rounds):
        for count, values in seconds.items():
            values.append(timed(lambda: provider.launch(offer, count, tags(launch=f"bench-{number}-{count}"), STARTUP)))
            provider.terminate([machine.id for machine in provider.instances()])
    return told(f"{MACHINES} machines launched, {name}; peer: one", "s", seconds[MACHINES], seconds[1])


def main() -> None:
    """Print the table."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--rounds", type=int, default=3)
    rounds = parser.parse_args().rounds
    with tempfile.TemporaryDirectory() as folder:
        os.environ |= {
            "XDG_STATE_HOME": str(Path(folder) / "state"),
            "DIGITALOCEAN_TOKEN": TOKEN,
            "VERDA_CLIENT_ID": CLIENT_ID,
            "VERDA_CLIENT_SECRET": CLIENT_SECRET,
        }
        print("| what | unit | ours | peer | ratio | mark |\n| --- | --- | ---: | ---: | ---: | --- |")
        print("\n".join(ranking(rounds)))
        fakes = [FakeDigitalOcean() for _ in range(5)]
        verda = FakeVerda()
        for fake in (*fakes, verda):
            fake.delay_seconds = LATENCY_SECONDS
        print(asking(rounds, fakes))
        print(launching(rounds, sky.DigitalOcean(endpoint_url=fakes[0].url), "DigitalOcean"))
        print(launching(rounds, sky.Verda(endpoint_url=verda.url + "/v1"), "Verda"))
        for fake in (*fakes, verda):
            fake.close()


if __name__ == "__main__":
    main()
