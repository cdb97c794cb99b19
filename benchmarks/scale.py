"""Measure how the client and the ledger grow: pools of 1 to 1,000 nodes, maps of many calls, ledgers of many rows.

Client, session, provisioning, SSH, engine, scheduler and ledger are the product's own. The nodes are played: one other
process (`_played_pool.py`) has the cloud, an SSH server for each node, the scheduler and the Dask workers. The
installation takes no time, and a call returns at once without a runner. So the tables show what the client and the
scheduler add, and not what machines do.

1. Opening: from `open` of a pool until it is ready.
2. Map: calls that take no time.
3. Loss: calls of one second, of which each node has ten (`--call-seconds`, `--calls-each`). When half have run, 5 % of
   the nodes end, and their connections close. The pool rents others in their place. A machine that dies without a word
   is noticed only 14 s later (three heartbeats in a large pool): this is not in the figures.
4. Ledger: commands, measured in one process, without the start of an interpreter.

Each size has a process of its own. What limits a part: the threads with the most processor time, and their share of the
seconds by the clock. For the ledger it is the function with the most time of its own, by cProfile.

Run it in the repository, because the tests have the fakes, and as root, because nodes listen on port 22 of
addresses of the loopback.

    python -m benchmarks.scale --nodes 1 16 64 256 1000 --calls 1000000 --rows 1000000 --rounds 1
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import sqlite3
import statistics
import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterable, Sequence
from importlib.metadata import version
from pathlib import Path
from typing import Any

from benchmarks._scale_ledger import filled, queries
from tests.providers.fake_digitalocean import TOKEN

PARTS = ("nodes", "ledger")
LEAST_ROWS = 1_000
SHOWN_THREADS = 2

type Rounds = Sequence[dict[str, Any]]
"""What `_scale_pool.py` has printed in each round."""
type Sizes = dict[int, Rounds]
"""By number of nodes."""
type Cell = Callable[[Rounds, int], str]
"""Returns a cell of the table from the rounds of a size and its number of nodes."""


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--nodes", type=int, nargs="+", default=[1, 16, 64], help="numbers of nodes")
    parser.add_argument("--calls", type=int, default=20_000, help="calls of the map")
    parser.add_argument(
        "--rows", type=int, default=100_000, help="machines in the largest ledger; from 1,000 on by tens"
    )
    parser.add_argument("--rounds", type=int, default=1)
    parser.add_argument("--call-seconds", type=float, default=1.0, help="how long calls take while nodes are lost")
    parser.add_argument("--calls-each", type=int, default=10, help="how many calls each node has then")
    parser.add_argument("--only", choices=PARTS, help="measure only this")
    options = parser.parse_args()
    load = os.getloadavg()[0]
    with tempfile.TemporaryDirectory(prefix="skyward-scale-") as folder:
        os.environ |= {
            "XDG_STATE_HOME": str(Path(folder) / "state"),
            "SKYWARD_LEDGER": f"sqlite:///{Path(folder) / 'pools.db'}",
            "DIGITALOCEAN_TOKEN": TOKEN,
        }
        if options.only != "ledger":
            print("\n".join(of_nodes(options)), flush=True)
        if options.only != "nodes":
            print("\n".join(of_ledgers(Path(folder), options.rows, options.rounds)), flush=True)
    print(
        f"\nLoad {load:.1f} → {os.getloadavg()[0]:.1f}, {os.cpu_count()} cores, {platform.machine()}, Linux"
        f" {platform.release()}, Python {platform.python_version()}, distributed {version('distributed')}, asyncssh"
        f" {version('asyncssh')}, SQLite {sqlite3.sqlite_version}; {options.rounds} round(s)."
    )


# ── pools ────────────────────────────────────────────────────────────────────────────────────────────────────────────


def of_nodes(options: argparse.Namespace) -> list[str]:
    """Measure pools, and return the tables of the first three parts."""
    sizes: Sizes = {
        nodes: [measured(nodes, options.calls, options.call_seconds, options.calls_each) for _ in range(options.rounds)]
        for nodes in options.nodes
    }
    return [*opening_table(sizes), *map_table(sizes, options.calls), *loss_table(sizes)]


def measured(nodes: int, calls: int, call_seconds: float, calls_each: int) -> dict[str, Any]:
    """Measure one size once, in a new process."""
    command = [sys.executable, "-m", "benchmarks._scale_pool", "--nodes", str(nodes), "--calls", str(calls)]
    command += ["--call-seconds", str(call_seconds), "--calls-each", str(calls_each)]
    print(f"{nodes} nodes", file=sys.stderr, flush=True)
    found = json.loads(subprocess.run(command, stdout=subprocess.PIPE, check=True).stdout)
    print(json.dumps(found), file=sys.stderr, flush=True)  # the tables come when all sizes are measured
    return found


def opening_table(sizes: Sizes) -> list[str]:
    return node_table(
        "Opening",
        "opening",
        sizes,
        {
            "ready, s": lambda rounds, _: figure(rounds, "opening", "seconds"),
            "of it renting, s": lambda rounds, _: figure(rounds, "opening", "rented"),
            "logins": lambda rounds, _: figure(rounds, "opening", "logins"),
            "joins that failed": lambda rounds, _: figure(rounds, "opening", "failed_joins"),
            "removed as silent": lambda rounds, _: figure(rounds, "opening", "removed"),
            "client's processor, s": lambda rounds, _: figure(rounds, "opening", "client"),
            "ms a node": lambda rounds, nodes: figure(rounds, "opening", "client", 1e3 / nodes),
            "player's processor, s": lambda rounds, _: figure(rounds, "opening", "player"),
            "client's memory, MB": lambda rounds, _: figure(rounds, "opening", "megabytes"),
            "close, s": lambda rounds, _: figure(rounds, "closing", "seconds"),
        },
    )


def map_table(sizes: Sizes, calls: int) -> list[str]:
    return node_table(
        f"A map of {calls:,} calls",
        "mapping",
        sizes,
        {
            "calls/s": lambda rounds, _: median(calls / one["mapping"]["seconds"] for one in rounds),
            "client's processor, µs a call": lambda rounds, _: figure(rounds, "mapping", "client", 1e6 / calls),
            "player's, µs a call": lambda rounds, _: figure(rounds, "mapping", "player", 1e6 / calls),
            "client's memory, kB a call": lambda rounds, _: figure(rounds, "mapping", "megabytes", 1e3 / calls),
        },
    )


def loss_table(sizes: Sizes) -> list[str]:
    columns = {
        "lost": "lost",
        "calls": "calls",
        "map without loss, s": "undisturbed",
        "with loss, s": "seconds",
        "loss to last result, s": "after_loss",
        "run again": "retried",
        "loss to a whole pool, s": "whole_again",
    }
    with_loss = {nodes: rounds for nodes, rounds in sizes.items() if all("loss" in one for one in rounds)}
    cells: dict[str, Cell] = {
        head: lambda rounds, _, name=name: figure(rounds, "loss", name) for head, name in columns.items()
    }
    return node_table("Loss of 5 %", "loss", with_loss, cells)


def node_table(title: str, part: str, sizes: Sizes, columns: dict[str, Cell]) -> list[str]:
    """Return a table with a line for each number of nodes; the last column has the threads with most processor time."""
    lines = [
        [nodes, *(cell(rounds, nodes) for cell in columns.values()), limits(rounds[-1][part])]
        for nodes, rounds in sizes.items()
    ]
    return table(title, ["nodes", *columns, "most processor time"], lines)


def figure(rounds: Rounds, part: str, name: str, scale: float = 1.0) -> str:
    """Return the median of a figure of one part."""
    return median(scale * (one[part][name] if name in one[part] else one[part]["more"][name]) for one in rounds)


def limits(part: dict[str, Any]) -> str:
    """Return the threads with the most processor time, and their share of the clock's time."""
    busiest = list(part["threads"].items())[:SHOWN_THREADS]
    return ", ".join(f"{thread} {100 * seconds / part['seconds']:.0f} %" for thread, seconds in busiest)


# ── ledgers ──────────────────────────────────────────────────────────────────────────────────────────────────────────


def of_ledgers(folder: Path, most_rows: int, rounds: int) -> list[str]:
    """Measure ledgers, and return their table: a line for each query, a column for each size."""
    sizes = [LEAST_ROWS]
    while sizes[-1] * 10 <= most_rows:
        sizes.append(sizes[-1] * 10)
    lines: dict[str, list[object]] = {}
    limit = dict[str, str]()
    for rows in sizes:
        path = folder / f"ledger-{rows}.db"
        url = filled(path, rows)
        print(f"{rows} rows, {path.stat().st_size / 1e6:.0f} MB", file=sys.stderr, flush=True)
        for query in queries(url, max(3, rounds)):
            clock, processor = (median(1e3 * one for one in side) for side in (query.seconds, query.processor))
            lines.setdefault(query.what, []).append(f"{clock} ({processor})")
            limit[query.what] = query.limit
        path.unlink()
    head = [
        "query, ms by the clock (of the processor)",
        *(f"{rows:,} rows" for rows in sizes),
        f"most time at {sizes[-1]:,}",
    ]
    return table("The ledger", head, [[what, *cells, limit[what]] for what, cells in lines.items()])


def table(title: str, head: Sequence[str], lines: Iterable[Sequence[object]]) -> list[str]:
    rule = ["---:"] * (len(head) - 1) + ["---"]
    rows = (" | ".join(map(str, line)) for line in (head, rule, *lines))
    return ["", f"### {title}", "", *(f"| {row} |" for row in rows)]


def median(values: Iterable[float]) -> str:
    middle = statistics.median(values)
    return f"{middle:,.0f}" if abs(middle) >= 100 or middle == int(middle) else f"{middle:.3g}"


if __name__ == "__main__":
    main()
