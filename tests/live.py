"""A check against a real cloud, for people with an account: `make live PROVIDER=aws`, and with SPEND=0.50 two machines,
one after the other, for a few minutes and for at most 0.50 USD each. The second one loses its client to `kill -9`, and
must end itself when its lease runs out.

Without SPEND it makes only requests that cost nothing: account, what the account has and lacks before its first machine
(`tests/live_checks.py`), offers, and our machines.
"""

import argparse
import contextlib
import os
import platform
import signal
import subprocess
import sys
import time
from collections import Counter
from pathlib import Path

import psutil

import skyward_core as sky
from skyward_core.machines.instances import InstanceState
from skyward_core.machines.offers import Requirements
from skyward_core.providers.base import load
from tests.live_checks import findings
from tests.live_record import Recorder

LEASE_SECONDS = 120
POLL_SECONDS = 10.0
RECORDED = Path("build/live")


def look(provider: sky.Provider) -> None:
    """Print the results of the requests that only read."""
    print(f"account    {provider.account()}")
    for finding in findings(provider):
        print(f"  {finding}")
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


def hold(provider: sky.Provider, usd: float, accelerator: str | None) -> None:
    """Open a pool, print its id, and keep it until somebody kills this process."""
    with sky.ComputePool(
        provider=provider,
        accelerator=accelerator,
        display="quiet",
        max_cost=usd,
        max_lifetime=1800,
        lease_seconds=LEASE_SECONDS,
    ) as pool:
        print(pool.lease.pool_id, flush=True)
        time.sleep(1800)


def abandon(provider: sky.Provider, usd: float, accelerator: str | None) -> None:
    """Kill a client and its reaper, and wait until the machine has ended itself by its lease. Then end what is left."""
    words = [provider.name, "--hold", "--spend", str(usd), *(["--accelerator", accelerator] if accelerator else [])]
    client = subprocess.Popen([sys.executable, "-m", "tests.live", *words], stdout=subprocess.PIPE, text=True)
    assert client.stdout is not None
    pool_id = client.stdout.readline().strip()
    for pid in reapers_of(client.pid):  # first, because it would end the machine within a second
        with contextlib.suppress(ProcessLookupError):
            os.kill(pid, signal.SIGKILL)
    client.kill()
    client.wait()
    if not pool_id:
        raise sky.SkywardError("the client that was to be killed has opened no pool")
    killed_at = time.monotonic()
    deadline = killed_at + 2 * LEASE_SECONDS + provider.gone_deadline_seconds + 120
    try:
        while running := [one for one in provider.instances(pool_id) if one.state in COMING]:
            if time.monotonic() > deadline:
                raise sky.InstancesLeft("the lease has ended no machine", [one.id for one in running])
            time.sleep(POLL_SECONDS)
        seconds = time.monotonic() - killed_at
        print(
            f"abandoned  ended by itself {seconds:.0f} s after kill -9 of its client and reaper (lease {LEASE_SECONDS} s)"
        )
    finally:
        provider.terminate([one.id for one in provider.instances(pool_id)])


COMING = (InstanceState.PENDING, InstanceState.RUNNING)


def reapers_of(client: int) -> list[int]:
    """Return the reapers of a client's pools."""
    return [child.pid for child in psutil.Process(client).children() if "reaper_process" in " ".join(child.cmdline())]


def main() -> int:
    """Check one provider."""
    parser = argparse.ArgumentParser(prog="make live", description=__doc__)
    parser.add_argument("provider")
    parser.add_argument("--spend", type=float, default=0.0, metavar="USD")
    parser.add_argument("--accelerator")
    parser.add_argument("--record", type=Path, default=RECORDED, metavar="FOLDER", help="where the answers are written")
    parser.add_argument("--hold", action="store_true", help=argparse.SUPPRESS)
    asked = parser.parse_args()
    provider = load(asked.provider)
    try:
        if asked.hold:
            hold(provider, asked.spend, asked.accelerator)
            return 0
        file = asked.record / f"{provider.name}.json"
        with Recorder(file):
            look(provider)
            if asked.spend:
                spend(provider, asked.spend, asked.accelerator)
                abandon(provider, asked.spend, asked.accelerator)
        print(f"answers    {file}: without secrets, as far as they are known; read it before it becomes a fixture")
    except sky.SkywardError as error:
        print(f"{type(error).__name__}: {error}", file=sys.stderr)
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())
