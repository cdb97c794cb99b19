"""Measure pools with a name: how soon another process has its first result, how soon another attempt begins after a kill,
and what the heartbeats cost the ledger.

Each way runs in a new interpreter: a pool of its own (cold), a pool that is warm, one that is in use, and bare Dask
clients on running clusters, without TLS and with it, as ours. The ways take turns in each round. Seconds are from the start of
the interpreter, and from the end of its imports, to the first result. A second attempt begins when the function's first line runs on
the node. Ratios are medians of the ratios of each round. The heartbeats are those of 100 and 500 clients, each of them one after the other.

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
sky.ComputePool, sky.Local  # are loaded when they are first used
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
address, *pems = sys.argv[1:]
files = dict(zip(("tls_ca_file", "tls_client_cert", "tls_client_key"), pems))
security = distributed.Security(require_encryption=True, **files) if files else None
with distributed.Client(address, security=security, set_as_default=False) as client:
    assert client.submit(lambda: 42).result() == 42
    print(time.monotonic() - began, flush=True)
"""
CLUSTER = """
import sys
from pathlib import Path
import distributed
if __name__ == "__main__":
    folder, options = Path(sys.argv[1]), {}
    names = ("tls_ca_file", "tls_client_cert", "tls_client_key")
    if is_private := sys.argv[2] == "tls":
        security = distributed.Security.temporary()
        for name in names:
            (folder / name).write_text(getattr(security, name))
        options = dict(security=security, protocol="tls")
    with distributed.LocalCluster(n_workers=1, threads_per_worker=1, dashboard_address=None, **options) as cluster:
        print(cluster.scheduler_address, *((folder / name for name in names) if is_private else ()), flush=True)
        sys.stdin.read()
"""
ATTEMPT = """
import sys, time
from pathlib import Path
import skyward_core as sky
@sky.compute
def attempt(file, seconds):
    import time
    from pathlib import Path
    Path(file + "-new").write_text(str(time.monotonic()))
    Path(file + "-new").rename(file)
    time.sleep(seconds)
name, number, file = sys.argv[1:]
work = sky.Work(system="bench", run="1", task="fit", attempt=number)
pool = sky.ComputePool(name=name, keep_warm=300, provider=sky.Local(), display="quiet", work=work)
with sky.PoolUse(pool) as use:
    use.run(attempt(file, 600 if number == "1" else 0))
"""
WAYS = ("cold", "warm", "in use", "dask", "dask with TLS")
RIVALS = ("dask", "dask with TLS")


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
    for name, text in (("pool", POOL), ("dask", DASK), ("cluster", CLUSTER), ("attempt", ATTEMPT)):
        (folder / f"run_{name}.py").write_text(text)
    clusters = {way: _started(folder / "run_cluster.py", folder, way.split()[-1].lower()) for way in RIVALS}
    addresses = {way: _line(cluster).split() for way, cluster in clusters.items()}
    seconds: dict[str, list[tuple[float, float]]] = {way: [] for way in WAYS}
    begins: dict[str, list[float]] = {"after a killed one": [], "after one that ended": []}
    try:
        for _ in range(rounds):
            seconds["cold"].append(_timed(folder / "run_pool.py", "cold"))
            _timed(folder / "run_pool.py", "join")  # leaves a warm pool
            seconds["warm"].append(_timed(folder / "run_pool.py", "join"))
            holder = _started(folder / "run_pool.py", "hold")
            _line(holder)
            seconds["in use"].append(_timed(folder / "run_pool.py", "join"))
            holder.communicate("")
            for way in RIVALS:
                seconds[way].append(_timed(folder / "run_dask.py", *addresses[way]))
            for way, its in begins.items():
                its.append(_second_attempt(folder, is_killed="killed" in way))
    finally:
        for cluster in clusters.values():
            cluster.communicate("")
        for name in ("bench", "bench-attempts"):
            subprocess.run([sys.executable, "-m", "skyward_core.cli", "stop", name], check=False, capture_output=True)
    heads = [
        f"{what} | {' | '.join(f'to {way}' for way in RIVALS)}"
        for what in ("from the start, s", "after the imports, s")
    ]
    lines = [f"| to the first result | {' | '.join(heads)} |", "| --- |" + " ---: |" * (2 * (1 + len(RIVALS)))]
    for way in WAYS:
        cells: list[str] = []
        for place, column in enumerate(zip(*seconds[way], strict=True)):
            cells.append(_spread(column))
            for rival in RIVALS:
                pairs = zip(column, (its[place] for its in seconds[rival]), strict=True)
                cells.append(f"{statistics.median(own / theirs for own, theirs in pairs):.2f}")
        lines.append(f"| {way} | {' | '.join(cells)} |")
    lines += [
        "",
        "| a second attempt | from the start of its process to its function's first line, s |",
        "| --- | ---: |",
    ]
    return [*lines, *(f"| {way} | {_spread(its)} |" for way, its in begins.items())]


def _spread(seconds: Sequence[float]) -> str:
    return f"{statistics.median(seconds):.2f} [{min(seconds):.2f}, {max(seconds):.2f}]"


def _second_attempt(folder: Path, *, is_killed: bool) -> float:
    """Run two attempts of one work on the warm pool of a name; return the seconds from the start of the second process until
    its function runs on the node. The first one is killed while its call holds the slot, or its call ends at once.
    """
    files = [folder / f"attempt-{number}" for number in (1, 2)]
    for file in files:
        file.unlink(missing_ok=True)
    first = _started(folder / "run_attempt.py", "bench-attempts", 1 if is_killed else 0, files[0])
    while not files[0].exists():
        time.sleep(0.01)
    if is_killed:
        first.kill()
    first.communicate("")
    began = time.monotonic()
    second = _started(folder / "run_attempt.py", "bench-attempts", 2, files[1])
    second.communicate("")
    assert second.returncode == 0
    return float(files[1].read_text()) - began


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
