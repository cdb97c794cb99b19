"""The ledger of `scale.py`: queries that users make, by the number of its rows.

A row is one rented machine. Pools have 20 machines each. Five pools are open, and all others have ended in the last
three years. The first of each kind is written through `Ledger`; the others are copies of their rows in SQL, because a
million transactions would take hours.
"""

from __future__ import annotations

import contextlib
import cProfile
import os
import pstats
import sqlite3
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from datetime import UTC, datetime, timedelta
from decimal import Decimal
from pathlib import Path

from benchmarks.ledger import DEAD, Empty
from skyward_core.cleanup.sweep import sweep
from skyward_core.cli.app import main as skyward
from skyward_core.ledger.ledger import Ledger
from skyward_core.ledger.rows import Bucket, Price, ResourceKind, ResourceRequest

MACHINES = 20
OPEN_POOLS = 5
DAYS = 3 * 365
DAY_MICROSECONDS = 86_400_000_000
SECONDS = {Bucket.LAUNCHING: 60, Bucket.RUNNING_CALLS: 600, Bucket.IDLE: 60}


@dataclass(frozen=True)
class Query:
    """A command, the seconds of each round by the clock and of the processor, and the function with most time."""

    what: str
    seconds: Sequence[float]
    processor: Sequence[float]
    limit: str


def filled(path: Path, rows: int) -> str:
    """Make a ledger with so many machines; return its URL."""
    url = f"sqlite:///{path}"
    yesterday = datetime.now(UTC) - timedelta(days=1)
    with Ledger(url, clock=lambda: yesterday) as ledger:
        for pool_id in ("sky-open", "sky-ended"):
            _write_pool(ledger, pool_id, yesterday)
        ledger.close_all([intent.id for intent in ledger.intents(pool_id="sky-ended")], "gone")
        ledger.end_pool("sky-ended")
    with contextlib.closing(sqlite3.connect(path)) as database:
        database.execute("PRAGMA synchronous=OFF")
        pools = max(2, rows // MACHINES)
        # both kinds have one pool already
        _copy(database, "sky-open", min(OPEN_POOLS, pools - 1) - 1, 0)
        _copy(database, "sky-ended", pools - 1 - min(OPEN_POOLS, pools - 1), DAYS)
        database.commit()
        database.execute("PRAGMA wal_checkpoint(TRUNCATE)")
    return url


def _write_pool(ledger: Ledger, pool_id: str, now: datetime) -> None:
    ledger.open_pool(
        pool_id,
        owner=DEAD,
        provider={"name": "local"},
        spec_json="{}",
        lease_expires_at=now + timedelta(minutes=2),
    )
    requests = [
        ResourceRequest(
            kind=ResourceKind.INSTANCE,
            provider="local",
            region="local",
            name=f"{pool_id}-{rank}",
            token=f"{pool_id}-1-{rank}",
            tags={"skyward-pool": pool_id, "skyward-rank": str(rank)},
            expires_at=now,
            price=Price(Decimal("1.5")),
        )
        for rank in range(MACHINES)
    ]
    numbers = [intent.id for intent in ledger.intend_all(pool_id, requests)]
    ledger.bind_all({number: f"i-{number}" for number in numbers})
    ledger.note_all(dict.fromkeys(numbers, SECONDS))


def _copy(database: sqlite3.Connection, pool_id: str, count: int, days: int) -> None:
    """Copy a pool and its machines so often; the copies are spread over so many days before the original."""
    for table, where in (("skyward_pools", "id"), ("skyward_resources", "pool_id")):
        names = [row[1] for row in database.execute(f"PRAGMA table_info({table})")]
        columns = [name for name in names if table == "skyward_pools" or name != "id"]
        rows = database.execute(f"SELECT {','.join(columns)} FROM {table} WHERE {where} = ?", [pool_id]).fetchall()
        database.executemany(
            f"INSERT INTO {table} ({','.join(columns)}) VALUES ({','.join('?' * len(columns))})",
            _copies(columns, rows, count, days),
        )


def _copies(columns: Sequence[str], rows: Sequence[Sequence[object]], count: int, days: int) -> Iterator[list[object]]:
    renamed = [index for index, name in enumerate(columns) if name in {"id", "pool_id", "token", "cloud_id", "name"}]
    moved = [index for index, name in enumerate(columns) if name.endswith("_microseconds")]
    for number in range(count):
        earlier = ((number + 1) * days // count) * DAY_MICROSECONDS
        for row in rows:
            copy = list(row)
            for index in renamed:
                copy[index] = f"{copy[index]}-{number}"
            for index in moved:
                copy[index] = None if (stamp := copy[index]) is None else int(str(stamp)) - earlier
            yield copy


def queries(url: str, rounds: int) -> list[Query]:
    """Measure the queries, in this process: a command has the start of its interpreter and its imports besides."""
    work: dict[str, Callable[[], object]] = {
        f"`skyward {words}`": lambda words=words: _skyward(words.split())
        for words in (
            "ps",
            "ps --all",
            "cost --by day",
            "cost --by pool",
            "cost --by owner",
            "cost --by bucket",
            "receipt sky-ended",
            "calls",
            "budget list",
        )
    }
    os.environ["SKYWARD_LEDGER"] = url
    with Ledger(url) as ledger:
        work["the sweep's listing"] = lambda: sweep(ledger, [Empty()], is_dry_run=True)
        return [_measured(what, one, rounds) for what, one in work.items()]


def _skyward(words: Sequence[str]) -> None:
    with open(os.devnull, "w") as nowhere, contextlib.redirect_stdout(nowhere):
        skyward(words)


def _measured(what: str, work: Callable[[], object], rounds: int) -> Query:
    work()  # imports, and fills the caches of the database's file
    seconds, processor = list[float](), list[float]()
    for _ in range(rounds):
        began, spent = time.perf_counter(), time.process_time()
        work()
        seconds.append(time.perf_counter() - began)
        processor.append(time.process_time() - spent)
    with cProfile.Profile() as profile:
        work()
    return Query(what, seconds, processor, _greatest(profile))


def _greatest(profile: cProfile.Profile) -> str:
    """Return the function with the most time of its own, and its share."""
    functions = pstats.Stats(profile).stats  # type: ignore[attr-defined]
    (file, _, name), most = max(functions.items(), key=lambda item: item[1][2])
    total = sum(times[2] for times in functions.values())
    plain = name.strip("<>").replace("method '", "").replace("built-in method ", "").replace("' of '", " of ")
    place = "" if file == "~" else f" of {Path(file).name}"
    return f"{plain.replace("' objects", '')}{place} {100 * most[2] / max(total, 1e-9):.0f} %"
