"""Measure many offers, providers, machines and nodes, against fake clouds that take 300 ms for each answer.

It ranks 50,000 offers, queries five providers at once, launches 64 machines, and opens pools of 64 nodes.

Nodes: one other process (`_nodes.py`) is the cloud and all machines, each with a real SSH server. A login and each
command take 300 ms more. The machines do not run the commands. The installation is a pause, as long for 64 nodes as for
one. A node joins as a Dask worker without runners, and all workers run beside the scheduler in that process. The time
is from `open` until the pool is ready, with connections, uploads (uv and our package) and the join. It does not include
the work of the machines, because 64 real machines have 64 times the processors.

Run it in the repository, because the tests have the fakes. Run it as root, because the machines listen on port 22 of
127.77.x.y. Values are medians of the rounds, by the clock; the peer of many is one. It takes about seven minutes.

    python -m benchmarks.clouds --rounds 3 --install 20
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import resource
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Generator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import ClassVar

import skyward_core as sky
from skyward_core.machines.offers import Offer, Requirements
from skyward_core.provisioning.candidates import ProviderOffers, ask, candidates
from tests.providers.contract import STARTUP, tags
from tests.providers.fake_digitalocean import TOKEN, FakeDigitalOcean
from tests.providers.fake_verda import CLIENT_ID, CLIENT_SECRET, FakeVerda

OFFERS = 50_000
MACHINES = 64
LATENCY_SECONDS = 0.3
INSTALL_SECONDS = 20.0
"""A typical time to install a few packages with uv on a new machine."""
MOST_RATIO = "≤ 1.5 x one"


def timed(work: Callable[[], object]) -> float:
    """Return the duration of the call, in seconds."""
    began = time.perf_counter()
    work()
    return time.perf_counter() - began


def table_line(
    what: str, unit: str, values: Sequence[float], peer: Sequence[float] = (), scale: float = 1.0, most: str = ""
) -> str:
    """Return a line of the table."""
    cells = [
        f"{statistics.median(side) * scale:.3g} [{min(side) * scale:.3g}, {max(side) * scale:.3g}]" if side else ""
        for side in (values, peer)
    ]
    ratio = f"{statistics.median(values) / statistics.median(peer):.2f}" if peer else ""
    return f"| {what} | {unit} | {cells[0]} | {cells[1]} | {ratio} | {most} |"


def offers() -> tuple[Offer, ...]:
    """Return twice as many offers as five clouds sell."""
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
    """Measure filtering and ranking."""
    many = offers()
    specs = {
        "50,000 offers ranked, all fit": sky.PoolSpec.of(nodes=2),
        "50,000 offers filtered and ranked": sky.PoolSpec.of(nodes=2, accelerator="H100", cpu=8),
    }
    return [
        table_line(
            what,
            "ms",
            [timed(lambda: candidates(spec, [ProviderOffers(sky.Local(), many)])) for _ in range(3 * rounds)],
            scale=1000,
            most="≤ 200 ms",
        )
        for what, spec in specs.items()
    ]


def querying(rounds: int, fakes: Sequence[FakeDigitalOcean]) -> str:
    """Measure a query of five providers at once, against one."""
    providers = [sky.DigitalOcean(endpoint_url=fake.url) for fake in fakes]
    ask(providers, Requirements())
    many = [timed(lambda: ask(providers, Requirements())) for _ in range(rounds)]
    one = [timed(lambda: ask(providers[:1], Requirements())) for _ in range(rounds)]
    return table_line("offers of five providers queried; peer: one", "s", many, one)


def launching(rounds: int, provider: sky.Provider, name: str) -> str:
    """Measure 64 machines, against one: from the call until each has an address."""
    offer = min(provider.offers(Requirements()), key=lambda offer: offer.price_per_hour)
    seconds: dict[int, list[float]] = {1: [], MACHINES: []}
    for number in range(rounds):
        for count, values in seconds.items():
            values.append(timed(lambda: provider.launch(offer, count, tags(launch=f"bench-{number}-{count}"), STARTUP)))
            provider.terminate([machine.id for machine in provider.instances()])
    return table_line(f"{MACHINES} machines launched, {name}; peer: one", "s", seconds[MACHINES], seconds[1])


class Prompt(sky.DigitalOcean):
    """DigitalOcean without the listing delay.

    A closing pool waits half a minute for machines that are not yet in the listing. This benchmark does not measure it.
    """

    listing_lag_seconds: ClassVar[float] = 0.0


@dataclass(frozen=True)
class Opening:
    """How long a pool took to be ready, in seconds, and the processor time until then."""

    seconds: float
    ours: float
    """Processor seconds of this client."""
    theirs: float
    """Processor seconds of the process with the cloud and the nodes."""


@contextlib.contextmanager
def nodes(install_seconds: float) -> Generator[tuple[str, int]]:
    """Start the process with the cloud and the machines; yield the address of the API and the id of the process."""
    command = [
        sys.executable,
        "-m",
        "benchmarks._nodes",
        "--latency",
        str(LATENCY_SECONDS),
        "--install",
        str(install_seconds),
    ]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as process:
        assert process.stdin is not None
        assert process.stdout is not None
        try:
            yield json.loads(process.stdout.readline())["url"], process.pid
        finally:
            process.stdin.close()
    if process.returncode:
        raise RuntimeError(f"the fake nodes ended with {process.returncode}")


def opened(count: int, install_seconds: float) -> Opening:
    """Open a pool on new machines of a new cloud, and close it."""
    with nodes(install_seconds) as (url, pid):
        pool = sky.ComputePool(provider=Prompt(endpoint_url=url), nodes=count, display="quiet")
        ours, theirs, began = resource.getrusage(resource.RUSAGE_SELF), processor_seconds(pid), time.perf_counter()
        with pool:
            seconds = time.perf_counter() - began
            after = resource.getrusage(resource.RUSAGE_SELF)
            return Opening(
                seconds,
                after.ru_utime + after.ru_stime - ours.ru_utime - ours.ru_stime,
                processor_seconds(pid) - theirs,
            )


def processor_seconds(pid: int) -> float:
    """Return the processor time of a process until now: fields 14 and 15 of stat in proc(5)."""
    fields = Path(f"/proc/{pid}/stat").read_text().rpartition(") ")[2].split()
    return (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")


def opening(rounds: int, install_seconds: float) -> list[str]:
    """Measure 64 nodes, against one: from `open` until the pool is ready."""
    times: dict[int, list[Opening]] = {1: [], MACHINES: []}
    for _ in range(rounds):
        for count, values in times.items():
            values.append(opened(count, install_seconds))
    many, one = ([value.seconds for value in times[count]] for count in (MACHINES, 1))
    what = (
        f"{MACHINES} nodes launched, bootstrapped and joined, {install_seconds:g} s of installation on each; peer: one"
    )
    ours, theirs = ([getattr(value, side) for value in times[MACHINES]] for side in ("ours", "theirs"))
    processor = (
        f"processor time of it, the client with {MACHINES}; peer: the process with the cloud and the {MACHINES} nodes"
    )
    return [
        table_line(what, "s", many, one, most=MOST_RATIO if install_seconds else ""),
        table_line(processor, "s", ours, theirs),
    ]


def main() -> None:
    """Print the table."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument(
        "--install", type=float, default=INSTALL_SECONDS, help="seconds that the installation takes on each node"
    )
    parser.add_argument("--only", choices=["nodes"], help="measure only the nodes")
    options = parser.parse_args()
    rounds = options.rounds
    with tempfile.TemporaryDirectory() as folder:
        os.environ |= {
            "XDG_STATE_HOME": str(Path(folder) / "state"),
            "DIGITALOCEAN_TOKEN": TOKEN,
            "VERDA_CLIENT_ID": CLIENT_ID,
            "VERDA_CLIENT_SECRET": CLIENT_SECRET,
        }
        print("| what | unit | ours | peer | ratio | mark |\n| --- | --- | ---: | ---: | ---: | --- |", flush=True)
        if options.only is None:
            without_nodes(rounds)
        opened(1, 0.0)  # imports, and fills the caches of uploads; not measured
        for install_seconds in dict.fromkeys((options.install, 0.0)):
            print("\n".join(opening(rounds, install_seconds)), flush=True)


def without_nodes(rounds: int) -> None:
    """Print the lines of the measurements without logins."""
    print("\n".join(ranking(rounds)))
    fakes = [FakeDigitalOcean().serve() for _ in range(5)]
    verda = FakeVerda().serve()
    for fake in (*fakes, verda):
        fake.delay_seconds = LATENCY_SECONDS
    print(querying(rounds, fakes))
    print(launching(rounds, sky.DigitalOcean(endpoint_url=fakes[0].url), "DigitalOcean"))
    print(launching(rounds, sky.Verda(endpoint_url=verda.url + "/v1"), "Verda"), flush=True)
    for fake in (*fakes, verda):
        fake.close()


if __name__ == "__main__":
    main()
