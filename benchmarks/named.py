"""Measure pools with a name: how soon another process has its first result, and what its heartbeats cost the ledger.

Each way runs in a new interpreter: a pool of its own (cold), a pool that is warm, one that is in use, and a bare Dask
client on a running cluster. The ways take turns in each round. Seconds are from the start of the interpreter, and from
the end of its imports, to the first result. The heartbeats are those of 100 and 500 clients, each of them one after the other.

    python benchmarks/named.py --rounds 5 --ledger postgresql+psycopg://ada@/postgres?host=/tmp
"""

from __future__ import annotations

import argparse
import os
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from datetime import UTC, datetime, timedelta
from pathlib import Path

from skyward_core.ledger.ledger import Ledger
from skyward_core.ledger.names_policy import Rent
from skyward_core.machines.owner import Owner

CLIENTS, BEAT_SECONDS = (100, 500), 5.0
POOL = """
import sys, time
import skyward_core as sky
import skyward_core.pool.pool
@sky.compute
def answer():
    return 42
began = time.monotonic()
settings = dict(provider=sky.Local(), display="quiet")
if sys.argv[1] != "cold":
    settings |= dict(name="bench", keep_warm=300)
with sky.ComputePool(**settings) as pool:
    assert answer() >> pool == 42
    print(time.monotonic() - began, flush=True)
    if sys.argv[1] == "hold":
        sys.stdin.read()
"""
DASK = """
import sys, time
import distributed
began = time.monotonic()
with distributed.Client(sys.argv[1], set_as_default=False) as client:
    assert client.submit(lambda: 42).result() == 42
    print(time.monotonic() - began, flush=True)
"""
CLUSTER = """
import sys
import distributed
if __name__ == "__main__":
    with distributed.LocalCluster(n_workers=1, threads_per_worker=1, dashboard_address=None) as cluster:
        print(cluster.scheduler_address, flush=True)
        sys.stdin.read()
"""
WAYS = ("cold", "warm", "in use", "dask")


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--ledger", default="", help="the URL of an empty PostgreSQL database, for the heartbeats")
    options = parser.parse_args()
    load = os.getloadavg()[0]
    with tempfile.TemporaryDirectory(prefix="skyward-named-") as folder:
        os.environ |= {f"XDG_{kind}_HOME": f"{folder}/{kind.lower()}" for kind in ("CACHE", "CONFIG", "STATE")}
        print("\n".join(_first_results(Path(folder), options.rounds)))
        for url in filter(None, (f"sqlite:///{folder}/bench.db", options.ledger)):
            for clients in CLIENTS:
                print("\n".join(_heartbeats(url, clients)))
    print(f"load average of the last minute, before → after: {load:.2f} → {os.getloadavg()[0]:.2f}")
    return 0


# ── first results ────────────────────────────────────────────────────────────────────────────────────────────────────


def _first_results(folder: Path, rounds: int) -> list[str]:
    for name, text in (("pool", POOL), ("dask", DASK), ("cluster", CLUSTER)):
        (folder / f"run_{name}.py").write_text(text)
    cluster = _started(folder / "run_cluster.py")
    address = _line(cluster)
    seconds: dict[str, list[tuple[float, float]]] = {way: [] for way in WAYS}
    try:
        for _ in range(rounds):
            seconds["cold"].append(_timed(folder / "run_pool.py", "cold"))
            _timed(folder / "run_pool.py", "join")  # leaves a warm pool
            seconds["warm"].append(_timed(folder / "run_pool.py", "join"))
            holder = _started(folder / "run_pool.py", "hold")
            _line(holder)
            seconds["in use"].append(_timed(folder / "run_pool.py", "join"))
            holder.communicate("")
            seconds["dask"].append(_timed(folder / "run_dask.py", address))
    finally:
        cluster.communicate("")
        subprocess.run([sys.executable, "-m", "skyward_core.cli", "stop", "bench"], check=False, capture_output=True)
    head = ["| to the first result | from the start, s | to dask | after the imports, s | to dask |"]
    head.append("| --- | ---: | ---: | ---: | ---: |")
    peer = [statistics.median(column) for column in zip(*seconds["dask"], strict=True)]
    for way in WAYS:
        cells: list[str] = []
        for column, rival in zip(zip(*seconds[way], strict=True), peer, strict=True):
            middle = statistics.median(column)
            cells += [f"{middle:.2f} [{min(column):.2f}, {max(column):.2f}]", f"{middle / rival:.2f}"]
        head.append(f"| {way} | {' | '.join(cells)} |")
    return head


def _started(*command: object) -> subprocess.Popen[str]:
    pipe = subprocess.PIPE
    return subprocess.Popen([sys.executable, *map(str, command)], stdin=pipe, stdout=pipe, text=True)


def _line(process: subprocess.Popen[str]) -> str:
    assert process.stdout is not None
    return process.stdout.readline().strip()


def _timed(*command: object) -> tuple[float, float]:
    """Run a program; return the seconds to its first result, from its start and from the end of its imports."""
    began = time.monotonic()
    process = _started(*command)
    own = float(_line(process))
    seconds = time.monotonic() - began
    process.communicate("")
    assert process.returncode == 0
    return seconds, own


# ── heartbeats ───────────────────────────────────────────────────────────────────────────────────────────────────────


def _heartbeats(url: str, count: int) -> list[str]:
    """Renew so many clients of one pool; return what each step costs, and all of them in a second."""
    name, pool_id = f"bench-{count}", f"sky-bench-{count}"
    with Ledger(url) as ledger:
        clients = [f"{name}-{number}" for number in range(count)]
        for client in clients:
            claim = ledger.names.claim(
                name, pool_id, client, owner=Owner.here(), terms={}, keep_warm_seconds=0, lease_seconds=120
            )
            if isinstance(claim, Rent):
                until = datetime.now(UTC) + timedelta(hours=1)
                ledger.open_pool(
                    pool_id, owner=Owner.here(), provider={"name": "local"}, spec_json="{}", lease_expires_at=until
                )
                ledger.names.opened(name, claim.epoch)
        steps: dict[str, Callable[[str], object]] = {
            "a client's row (a write)": lambda client: ledger.names.renew(client, 120, 1.0),
            "the pool's row (a write)": lambda _: ledger.renew(pool_id, datetime.now(UTC) + timedelta(hours=1)),
            "does the pool exist (a read)": lambda _: ledger.pool(pool_id),
            "who is the steward (a read)": lambda client: ledger.stewards.look(name, client),
        }
        lines = [f"| {ledger.url.get_backend_name()}: each heartbeat | ms | of one second, with {count} clients |"]
        lines.append("| --- | ---: | ---: |")
        total = 0.0
        for name, step in steps.items():
            took = _each(step, clients)
            share = statistics.fmean(took) * count / BEAT_SECONDS
            total += share if "write" in name else 0.0
            low, high = min(took) * 1000, max(took) * 1000
            lines.append(f"| {name} | {statistics.median(took) * 1000:.2f} [{low:.2f}, {high:.2f}] | {share:.0%} |")
    each = len(steps) * count / BEAT_SECONDS
    return [*lines, f"| all: {each:.0f} transactions a second; the lock for writes is held | | {total:.0%} |"]


def _each(step: Callable[[str], object], clients: Sequence[str]) -> list[float]:
    took: list[float] = []
    for client in clients:
        began = time.perf_counter()
        step(client)
        took.append(time.perf_counter() - began)
    return took


if __name__ == "__main__":
    sys.exit(main())
