"""Measure the ledger and the sweep alone: writes, the recovery of 1,000 open intents, and commands on 100,000 rows.

It needs only this package. Each figure is the median of the rounds, by the clock. The peer of a write is a bare SQLite
transaction of one row with the same `synchronous=FULL`. The peer of a command is an interpreter that imports
SQLAlchemy and does nothing.

    python benchmarks/ledger.py --rounds 5
"""

from __future__ import annotations

import argparse
import os
import sqlite3
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from datetime import UTC, datetime, timedelta
from decimal import Decimal
from pathlib import Path
from typing import ClassVar

from skyward_core.cleanup.sweep import sweep
from skyward_core.ledger.ledger import Ledger
from skyward_core.ledger.rows import Bucket, Price, ResourceKind, ResourceRequest
from skyward_core.machines.instances import Instance
from skyward_core.machines.owner import Owner
from skyward_core.providers.base import Provider

ROWS, POOLS = 100_000, 5_000
OPEN = 1_000
PAIRS = 200
LONG_AGO = datetime.now(UTC) - timedelta(days=1)
DEAD = Owner("ada", "elsewhere", "boot", "1", 1, "1")


class Empty(Provider):
    """A provider without machines, which answers at once."""

    name: ClassVar[str] = "local"

    def instances(self, pool_id: str | None = None) -> list[Instance]:
        return []

    def terminate(self, ids: Sequence[str]) -> None:
        """Do nothing, because there are no machines."""


@dataclass(frozen=True)
class Row:
    """A line of the table: the values of the rounds in `unit`, the highest allowed value, and the values of a peer.

    A row may have no limit and no peer.
    """

    what: str
    unit: str
    values: Sequence[float]
    most: float | None = None
    peer: Sequence[float] = ()

    def __str__(self) -> str:
        mark = (
            ""
            if self.most is None
            else f"≤ {self.most:g} {self.unit} | {'met' if statistics.median(self.values) <= self.most else 'MISSED'}"
        )
        return f"| {self.what} | {self.unit} | {_median_and_range(self.values)} | {_median_and_range(self.peer)} | {mark or ' | '} |"


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=5)
    rounds = parser.parse_args().rounds
    load = os.getloadavg()[0]
    with tempfile.TemporaryDirectory(prefix="skyward-ledger-") as folder:
        rows = [*_writes(Path(folder), rounds), *_recoveries(Path(folder), rounds), *_commands(Path(folder), rounds)]
    print(
        f"Load {load:.2f} → {os.getloadavg()[0]:.2f}, {os.cpu_count()} cores, SQLite {sqlite3.sqlite_version}, Python {sys.version.split()[0]}.\n"
    )
    print("| what | unit | ours | peer | mark |  |\n| --- | --- | ---: | ---: | --- | --- |")
    print("\n".join(map(str, rows)))
    return 0


def _writes(folder: Path, rounds: int) -> list[Row]:
    ours, bare = list[float](), list[float]()
    with Ledger(f"sqlite:///{folder / 'writes.db'}") as ledger:
        _pool(ledger, "sky-writes")
        bare_database = sqlite3.connect(folder / "bare.db", isolation_level=None)
        bare_database.execute("PRAGMA journal_mode=WAL")
        bare_database.execute("PRAGMA synchronous=FULL")
        bare_database.execute("CREATE TABLE t (a)")
        for number in range(rounds * PAIRS):
            ours.append(
                1000
                * _seconds(
                    lambda number=number: ledger.bind(
                        ledger.intend("sky-writes", _request("sky-writes", number)), f"i-{number}"
                    )
                )
            )
            bare.append(
                1000
                * _seconds(
                    lambda: (
                        bare_database.execute("INSERT INTO t VALUES (1)"),
                        bare_database.execute("INSERT INTO t VALUES (1)"),
                    )
                )
            )
        bare_database.close()
    return [Row("an intent written and bound, two transactions", "ms", ours, 5, bare)]


def _recoveries(folder: Path, rounds: int) -> list[Row]:
    rows = list[Row]()
    for pools, each in ((1, OPEN), (OPEN, 1)):
        seconds = list[float]()
        for turn in range(rounds):
            with Ledger(f"sqlite:///{folder / f'open-{pools}-{turn}.db'}", clock=lambda: LONG_AGO) as ledger:
                for pool in range(pools):
                    _pool(ledger, f"sky-{pool}")
                    intents = ledger.intend_all(f"sky-{pool}", [_request(f"sky-{pool}", rank) for rank in range(each)])
                    ledger.bind_all({intent.id: f"sky-{pool}-{intent.id}" for intent in intents})
            with Ledger(f"sqlite:///{folder / f'open-{pools}-{turn}.db'}") as ledger:
                seconds.append(_seconds(lambda ledger=ledger: sweep(ledger, [Empty()], is_dry_run=False)))
                assert ledger.open_intents() == []
        rows.append(Row(f"sweep of {OPEN:,} open intents, {pools:,} pool(s) of {each:,}", "s", seconds, 10))
    return rows


def _commands(folder: Path, rounds: int) -> list[Row]:
    url = f"sqlite:///{folder / 'large.db'}"
    with Ledger(url, clock=lambda: LONG_AGO) as ledger:
        for pool in range(POOLS):
            _pool(ledger, f"sky-{pool}")
            intents = ledger.intend_all(f"sky-{pool}", [_request(f"sky-{pool}", rank) for rank in range(ROWS // POOLS)])
            numbers = [intent.id for intent in intents]
            ledger.bind_all({number: f"i-{number}" for number in numbers})
            ledger.note_all(
                {number: {Bucket.LAUNCHING: 60, Bucket.RUNNING_CALLS: 600, Bucket.IDLE: 60} for number in numbers}
            )
            if pool >= POOLS // 25:
                ledger.close_all(numbers, "gone")
                ledger.end_pool(f"sky-{pool}")
    idle = [_seconds(lambda: _run(["-c", "import sqlalchemy"], url)) for _ in range(rounds)]
    commands = (["ps"], ["ps", "--all"], *(["cost", "--by", key] for key in ("day", "pool", "owner", "bucket")))
    return [
        Row(
            f"`skyward {' '.join(command)}`, {ROWS:,} rows",
            "s",
            [_seconds(lambda command=command: _skyward(command, url)) for _ in range(rounds)],
            1,
            idle,
        )
        for command in commands
    ]


def _skyward(command: Sequence[str], url: str) -> None:
    _run(["-m", "skyward_core.cli", *command], url)


def _run(arguments: Sequence[str], url: str) -> None:
    subprocess.run(
        [sys.executable, *arguments], env={**os.environ, "SKYWARD_LEDGER": url}, stdout=subprocess.DEVNULL, check=True
    )


def _pool(ledger: Ledger, pool_id: str) -> None:
    ledger.open_pool(
        pool_id,
        owner=DEAD,
        provider={"name": "local"},
        spec_json="{}",
        lease_expires_at=LONG_AGO + timedelta(minutes=2),
    )


def _request(pool_id: str, rank: int) -> ResourceRequest:
    return ResourceRequest(
        kind=ResourceKind.INSTANCE,
        provider="local",
        region="local",
        name=f"{pool_id}-{rank}",
        token=f"{pool_id}-1-{rank}",
        tags={"skyward-pool": pool_id, "skyward-rank": str(rank)},
        expires_at=LONG_AGO,
        price=Price(Decimal("1.5")),
    )


def _seconds(work: Callable[[], object]) -> float:
    began = time.perf_counter()
    work()
    return time.perf_counter() - began


def _median_and_range(values: Sequence[float]) -> str:
    return f"{statistics.median(values):.3g} [{min(values):.3g}, {max(values):.3g}]" if values else ""


if __name__ == "__main__":
    sys.exit(main())
