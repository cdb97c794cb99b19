"""The ledger under races, kills at any statement, and 100,000 rows."""

import itertools
import sqlite3
import threading
from collections.abc import Mapping
from contextlib import closing
from datetime import timedelta
from pathlib import Path
from typing import Any

import pytest
from sqlalchemy import create_engine

from skyward_core.errors import LeaseLost
from skyward_core.ledger import migrations
from skyward_core.ledger.ledger import Ledger
from skyward_core.ledger.rows import Account, Bucket, CostBy, Period, Price
from skyward_core.ledger.tables import POOLS, RESOURCES, milliseconds_of
from tests.conftest import examples
from tests.ledger.fixtures import LATER, NOON, USD, Clock, intend, open_pool, resource_request, run_script
from tests.ledger.next_release import ADDED
from tests.system.ledger.test_schema import NEXT_RELEASE, THIS, schema, versions

DIES = """
import os, shutil, signal, sys
import alembic.runtime.environment  # once, before the forks
from sqlalchemy import Engine, event
from skyward_core.ledger.ledger import Ledger

folder, left = sys.argv[1], 0

def step(*_, **__):
    global left
    left -= 1
    if left == 0:
        os.kill(os.getpid(), signal.SIGKILL)

for name in ("before_cursor_execute", "after_cursor_execute", "commit"):
    event.listen(Engine, name, step)
"""


@pytest.mark.parametrize("verb", ["renew", "intend"])
def test_a_lease_is_either_renewed_or_condemned(ledger: Ledger, url: str, verb: str) -> None:
    with Ledger(url) as other:
        for number in range(20):
            pool_id, start, outcome = f"r{number}", threading.Barrier(2), {}
            open_pool(ledger, pool_id)

            def own() -> None:
                start.wait()
                try:
                    if verb == "renew":
                        other.renew(pool_id, LATER + timedelta(hours=1))
                    else:
                        other.intend(pool_id, resource_request(pool_id, pool_id))
                    outcome["is_renewed"] = True
                except LeaseLost:
                    outcome["is_renewed"] = False

            thread = threading.Thread(target=own)
            thread.start()
            start.wait()
            is_condemned = ledger.condemn(pool_id, seen=LATER)
            seen = len(ledger.open_intents(pool_id=pool_id))
            thread.join()
            if verb == "renew":
                assert is_condemned is not outcome["is_renewed"]
            else:
                # an intent that was accepted exists when the sweep reads, after it has condemned
                assert seen == outcome["is_renewed"]


WRITER = """
from datetime import UTC, datetime
from decimal import Decimal
from skyward_core.ledger.rows import Account, Bucket, Period, ResourceKind, ResourceRequest
from skyward_core.machines.owner import Owner

NOON = datetime(2026, 11, 21, 12, tzinfo=UTC)

def history(url, said):
    def say(what):
        os.write(said, f"{what}\\n".encode())
    with Ledger(url, clock=lambda: NOON) as ledger:
        ledger.open_pool("p", owner=Owner("a", "b", "c", "d", 1, "2"), provider={}, spec_json="{}", lease_expires_at=NOON)
        ledger.set_account(Account("team", Decimal(10), Period.RUN))
        for token in ("t1", "t2"):
            made = ledger.reserve("team", "p", Decimal(3))
            say(f"reserved {made.id}")
            intent = ledger.intend("p", ResourceRequest(ResourceKind.INSTANCE, "x", "y", token, token, {}, NOON))
            say(f"intended {token}")
            ledger.bind(intent, "i-" + token)
            say(f"bound {token}")
            ledger.note_all({intent.id: {Bucket.IDLE: 1}})
            ledger.ask_end_all([intent.id])[0]
            ledger.close_all([intent.id], "404")
            say(f"closed {token}")
            ledger.settle(made, Decimal(1))
            say(f"settled {made.id}")

point = 0
while True:
    point += 1
    reading, said = os.pipe()
    if not (pid := os.fork()):
        left = point
        history(f"sqlite:///{folder}/{point}.db", said)
        os._exit(0)
    os.close(said)
    with open(reading) as said_by_child:
        print(point, *said_by_child.read().splitlines(), sep=";")
    if os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) == 0:
        break
"""


@pytest.mark.timeout(300)
def test_a_writer_killed_at_any_statement_leaves_a_readable_ledger(tmp_path: Path) -> None:
    done = run_script(DIES + WRITER, str(tmp_path))
    assert done.returncode == 0, done.stderr
    lines = done.stdout.splitlines()
    assert len(lines) > 80
    for line in lines:
        point, *said = line.split(";")
        path = tmp_path / f"{point}.db"
        with Ledger(f"sqlite:///{path}") as ledger:
            check_what_was_left(ledger, said)
        with closing(sqlite3.connect(path)) as raw:
            assert raw.execute("PRAGMA integrity_check").fetchall() == [("ok",)]


def check_what_was_left(ledger: Ledger, said: list[str]) -> None:
    done = [line.split() for line in said]
    reported = {
        word: {what for first, what in done if first == word}
        for word in ("intended", "bound", "closed", "reserved", "settled")
    }
    intents = {intent.token: intent for intent in ledger.intents()}
    found = {
        "intended": set(intents),
        "bound": {token for token, intent in intents.items() if intent.cloud_id},
        "closed": {token for token, intent in intents.items() if intent.gone_at},
    }
    for word, tokens in found.items():
        assert reported[word] <= tokens
    assert sum(len(tokens) - len(reported[word]) for word, tokens in found.items()) <= 1
    still_open = len(ledger.open_reservations()) - len(reported["reserved"]) + len(reported["settled"])
    assert still_open in (-1, 0, 1)
    if ledger.accounts():  # the balance agrees with the reservations
        settled = -ledger.left_usd("team", "p") + 10 - 3 * len(ledger.open_reservations())
        assert settled - len(reported["settled"]) in (0, 1)


MIGRATION = """
point = 0
while True:
    point += 1
    shutil.copy(f"{folder}/old.db", f"{folder}/{point}.db")
    if not (pid := os.fork()):
        left = point
        Ledger(f"sqlite:///{folder}/{point}.db", may_migrate=True).close()
        os._exit(0)
    if os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) == 0:
        break
print(point)
"""


def test_a_migration_that_is_killed_at_any_statement_leaves_the_old_ledger(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with Ledger(f"sqlite:///{tmp_path}/old.db") as ledger:
        open_pool(ledger, "p")
        intent = intend(ledger)
        ledger.vacuum()  # the file has all of it now, the write-ahead log nothing
    old = schema(tmp_path / "old.db")
    done = run_script(NEXT_RELEASE + DIES + MIGRATION, str(tmp_path))
    assert done.returncode == 0, done.stderr
    points = int(done.stdout)
    assert points > 10
    monkeypatch.setattr(migrations, "MIGRATIONS", (*migrations.MIGRATIONS, ADDED))
    for point in range(1, points):
        path = tmp_path / f"{point}.db"
        assert schema(path) == old
        with Ledger(f"sqlite:///{path}", may_migrate=True) as ledger:
            assert ledger.intents() == [intent]
        assert versions(f"sqlite:///{path}") == (str(THIS + 1), str(THIS + 1))


ALL_AT_ONCE = """
import os, random, sys, threading, traceback
from datetime import datetime, timedelta
from decimal import Decimal
from skyward_core.ledger.rows import Account, Bucket, Period, ResourceKind, ResourceRequest
from skyward_core.errors import BudgetExceeded, LeaseLost, LedgerConflict
from skyward_core.ledger.ledger import Ledger

url, now = sys.argv[1], datetime.fromisoformat(sys.argv[2])
POOLS, LATER = [f"p{number}" for number in range(6)], now + timedelta(hours=1)

def resource_request(name, token):
    return ResourceRequest(ResourceKind.INSTANCE, "x", "r", name, token, {}, LATER)

def cents(draw, most):
    return Decimal(draw.randrange(most)) / 100

def settle_one(ledger, draw, pool, account):
    if made := ledger.open_reservations(pool_id=pool):
        try:
            ledger.settle(draw.choice(made), Decimal("0.01"))
        except LedgerConflict:
            pass  # another thread has settled it with another sum

def rent_three(ledger, draw, pool, account):
    token = f"{os.getpid()}-{draw.random()}"
    intents = [intent.id for intent in ledger.intend_all(pool, [resource_request(f"n{rank}", f"{token}-{rank}") for rank in range(3)])]
    ledger.bind_all({number: f"c{number}" for number in reversed(intents)})
    ledger.note_all({number: {Bucket.IDLE: 5} for number in intents})
    ledger.close_all(intents[::-1], "gone")

def adopt_one(ledger, draw, pool, account):
    number = draw.randrange(30)
    ledger.adopt(POOLS[number % 6], resource_request("n", f"found-{number}"), f"same-{number}")

VERBS = [
    lambda ledger, draw, pool, account: ledger.reserve(account, pool, cents(draw, 49) + Decimal("0.01")),
    lambda ledger, draw, pool, account: ledger.roll(account, pool, cents(draw, 10), cents(draw, 50)),
    lambda ledger, draw, pool, account: ledger.settle_pool(pool, cents(draw, 100)),
    settle_one,
    lambda ledger, draw, pool, account: ledger.renew(pool, LATER + timedelta(seconds=draw.randrange(1000))),
    lambda ledger, draw, pool, account: ledger.condemn_all({name: LATER if name == "p5" else now for name in draw.sample(POOLS, 6)}),
    lambda ledger, draw, pool, account: ledger.set_account(Account(draw.choice("ab"), Decimal(5), Period.DAY)),
    rent_three,
    adopt_one,
]

def work(ledger, seed, faults):
    draw = random.Random(seed)
    for verb in draw.sample(VERBS * 3, len(VERBS) * 3):
        try:
            verb(ledger, draw, draw.choice(POOLS), draw.choice("ab"))
        except (BudgetExceeded, LeaseLost):
            pass
        except Exception:
            faults.append(traceback.format_exc())

def drive(process):
    faults = []
    with Ledger(url, clock=lambda: now, busy_timeout_seconds=60) as ledger:
        threads = [threading.Thread(target=work, args=(ledger, process * 100 + number, faults)) for number in range(6)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
    print(*faults, sep="", end="", flush=True)
    return min(len(faults), 255)

children = []
for process in range(3):
    if not (pid := os.fork()):
        os._exit(drive(process))
    children.append(pid)
print(*(os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) for pid in children))
"""

COMMITTED_AND_RESERVED = """
SELECT b.account, b.committed_micro_usd,
       SUM(CASE WHEN r.settled_microseconds IS NULL THEN r.reserved_micro_usd ELSE r.spent_micro_usd END),
       SUM(GREATEST(0, COALESCE(r.spent_micro_usd, 0) - r.reserved_micro_usd))
FROM skyward_balances b JOIN skyward_reservations r ON r.account = b.account AND r.scope = b.scope GROUP BY b.account, b.committed_micro_usd
"""


def test_on_a_server_concurrent_methods_neither_overdraw_nor_deadlock(postgresql_url: str, clock: Clock) -> None:
    with Ledger(postgresql_url, clock=clock) as ledger:
        for account in "ab":
            ledger.set_account(Account(account, USD(5), Period.DAY))
        for number in range(6):
            open_pool(ledger, f"p{number}")
        done = run_script(ALL_AT_ONCE, postgresql_url, NOON.isoformat())
        assert done.stdout == "0 0 0\n", done.stdout + done.stderr
        server = create_engine(postgresql_url)
        with server.connect() as connection:
            balances = connection.exec_driver_sql(COMMITTED_AND_RESERVED).all()
        server.dispose()
        assert [row[0] for row in sorted(balances)] == ["a", "b"]
        for _, committed, expected, overspent in balances:
            assert committed == expected
            assert committed - overspent <= 5_000_000
        assert len([intent for intent in ledger.open_intents() if intent.cloud_id is None]) == 0


MANY = examples(100_000)
"""Number of resources; they repeat every 5,000."""


def fill(ledger: Ledger) -> None:
    """Write 5,000 pools, 200 of them open, with `MANY` resources, a twenty-fifth of them open."""
    open_pool(ledger, "0")
    price = Price(USD("2.345678"), USD("7.5"), increment_seconds=60)
    ledger.note_all({ledger.bind(intend(ledger, pool_id="0", price=price), "i-1").id: dict.fromkeys(Bucket, 0.1)})
    with ledger._database.write() as connection:
        pool = connection.exec_driver_sql("SELECT * FROM skyward_pools").mappings().one()
        if connection.dialect.name == "postgresql":  # the rows may take longer than the server waits for a transaction
            connection.exec_driver_sql("SET LOCAL idle_in_transaction_session_timeout = 0")
        connection.execute(POOLS.insert(), [another_pool(pool, number) for number in range(1, 5000)])
        resource = connection.exec_driver_sql("SELECT * FROM skyward_resources").mappings().one()
        for numbers in itertools.batched(range(2, MANY + 1), 5000):
            connection.execute(RESOURCES.insert(), [another_resource(resource, number) for number in numbers])


def another_pool(pool: Mapping[str, Any], number: int) -> dict[str, Any]:
    return {
        **pool,
        "id": str(number),
        "owner_user": f"user{number % 40}",
        "created_microseconds": pool["created_microseconds"] + number,
        "ended_microseconds": 1 if number >= 200 else None,
    }


def another_resource(resource: Mapping[str, Any], number: int) -> dict[str, Any]:
    return {
        **resource,
        "id": number,
        "pool_id": str(number % 5000),
        "token": str(number),
        "intended_microseconds": resource["intended_microseconds"] + number * 20_000_000,
        "gone_microseconds": None if number % 5000 < 200 else 1,
        **{milliseconds_of(bucket): 1000 * (number % 1000) + 100 for bucket in Bucket},
    }


@pytest.mark.generated
def test_lists_and_bills_of_many_resources_are_right(url: str) -> None:
    """`skyward ps`, `skyward cost` by every key, and the first query of a sweep."""
    with Ledger(url, clock=Clock()) as ledger:
        fill(ledger)
        for include_ended, limit, pools, resources in (
            (False, None, 200, MANY // 25),
            (True, None, 5000, MANY),
            (True, 50, 50, MANY // 100),
        ):
            rows = ledger.pool_rows(include_ended=include_ended, limit=limit)
            assert (len(rows), sum(row.resources for row in rows)) == (pools, resources)
            assert sum(row.open_resources for row in rows) == (0 if limit else MANY // 25)
        assert len(ledger.open_intents()) == MANY // 25
        # the first has a second less in each
        seconds = len(Bucket) * (MANY // 1000 * sum(range(1000)) + MANY * 0.1 - 1)
        for by in CostBy:
            assert sum(row.seconds for row in ledger.cost_rows(by)) == pytest.approx(seconds)
