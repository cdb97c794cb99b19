"""The ledger: writes are committed, a killed writer leaves a readable file, and no limit is overdrawn."""

import sqlite3
import tempfile
import threading
from dataclasses import replace
from datetime import timedelta
from decimal import Decimal
from itertools import pairwise
from pathlib import Path

import pytest
from hypothesis import HealthCheck, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule
from sqlalchemy import create_engine

from skyward_core.errors import LeaseLost, LedgerConflict
from skyward_core.ledger.ledger import Ledger
from skyward_core.ledger.rows import BILLING_ROUNDING, Account, Bucket, CostBy, Intent, Period, Price
from tests.system.ledger.test_ledger import MANY, large, run_script  # noqa: F401 - fixtures
from tests.unit.ledger.test_ledger import (  # noqa: F401 - fixtures
    LATER,
    NOON,
    OWNER,
    USD,
    Clock,
    clock,
    intend,
    ledger,
    open_pool,
    postgresql_server,
    postgresql_url,
    resource_request,
    sqlite_url,
    url,
)


def test_an_intent_is_committed_before_it_returns(ledger: Ledger, url: str) -> None:
    intent = intend(ledger, price=Price(USD("1.5"), USD("3"), is_spot=True))
    with Ledger(url) as other:
        assert other.open_intents() == [intent]
    assert intent.tags == {"skyward-pool": "p", "skyward-rank": "0"}
    assert (intent.intended_at, intent.expires_at, intent.cloud_id) == (NOON, LATER, None)
    assert intent.price == Price(USD("1.5"), USD(3), is_spot=True)


@pytest.mark.parametrize("verb", ["renew", "intend"])
def test_a_lease_is_either_renewed_or_condemned(ledger: Ledger, url: str, verb: str) -> None:
    with Ledger(url) as other:
        for number in range(20):
            pool_id, start, outcome = f"r{number}", threading.Barrier(2), {}
            open_pool(ledger, pool_id)

            def own(
                pool_id: str = pool_id, start: threading.Barrier = start, outcome: dict[str, object] = outcome
            ) -> None:
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


def test_many_intents_are_recorded_at_once_in_their_order(ledger: Ledger) -> None:
    known = ledger.bind(intend(ledger, "t7"), "i-7")
    intents = ledger.intend_all("p", [resource_request(f"t{number}") for number in range(1100)])
    assert [intent.token for intent in intents] == [f"t{number}" for number in range(1100)]
    assert intents[7] == known
    assert ledger.intend_all(
        "p", [resource_request("t7"), resource_request("t3"), resource_request("new"), resource_request("new")]
    ) == [known, intents[3], *[ledger.intents()[-1]] * 2]
    numbers = [intent.id for intent in reversed(intents)]
    bound = ledger.bind_all({number: f"i-{number}" if number != known.id else "i-7" for number in numbers})
    assert [intent.id for intent in bound] == numbers
    before = ledger.intents()
    with pytest.raises(LedgerConflict, match="Token 't1' belongs to"):
        ledger.intend_all("p", [resource_request("another"), replace(resource_request("t1"), region="ICE-01")])
    with pytest.raises(LedgerConflict, match="no entry 99999"):
        ledger.close_all([numbers[0], 99999], "404")
    with pytest.raises(LedgerConflict, match="Token 'twice' belongs to"):
        ledger.intend_all("p", [resource_request("twice"), replace(resource_request("twice"), region="ICE-01")])
    assert ledger.intents() == before
    assert {intent.end_asked_at for intent in ledger.ask_end_all(numbers)} == {NOON}
    assert {intent.evidence for intent in ledger.close_all(iter(numbers), "404")} == {"404"}
    assert [intent.token for intent in ledger.open_intents()] == ["new"]
    assert (
        ledger.intend_all("p", []) == ledger.bind_all({}) == ledger.ask_end_all([]) == ledger.close_all([], "404") == []
    )


class IntentHistories(RuleBasedStateMachine):
    """Any order of methods, with the ledger closed and opened in between, compared with a dictionary."""

    def __init__(self) -> None:
        super().__init__()
        self.folder = tempfile.TemporaryDirectory()
        self.url = f"sqlite:///{self.folder.name}/ledger.db"
        self.ledger = Ledger(self.url, clock=lambda: NOON)
        open_pool(self.ledger, "p")
        self.model: dict[str, Intent] = {}

    def teardown(self) -> None:
        self.ledger.close()
        self.folder.cleanup()

    @rule(number=st.integers(0, 5))
    def intend(self, number: int) -> None:
        intent = intend(self.ledger, f"t{number}")
        assert self.model.setdefault(intent.token, intent) == intent

    @precondition(lambda self: self.model)
    @rule(data=st.data(), cloud_id=st.sampled_from(["i-1", "i-2"]))
    def bind(self, data: st.DataObject, cloud_id: str) -> None:
        was = self.pick(data)
        if was.cloud_id not in (None, cloud_id):
            with pytest.raises(LedgerConflict):
                self.ledger.bind(was, cloud_id)
        else:
            expected = (
                was if was.cloud_id else replace(was, cloud_id=cloud_id, bound_at=NOON, gone_at=None, evidence=None)
            )
            self.model[was.token] = expected
            assert self.ledger.bind(was, cloud_id) == expected

    @precondition(lambda self: self.model)
    @rule(data=st.data())
    def ask_end(self, data: st.DataObject) -> None:
        was = self.pick(data)
        self.model[was.token] = was if was.gone_at else replace(was, end_asked_at=NOON)
        self.ledger.ask_end_all([was.id])

    @precondition(lambda self: self.model)
    @rule(
        data=st.data(),
        evidence=st.text(min_size=1).filter(str.strip).filter(lambda text: "\0" not in text and text.isprintable()),
    )
    def close_intent(self, data: st.DataObject, evidence: str) -> None:
        was = self.pick(data)
        self.model[was.token] = was if was.gone_at else replace(was, gone_at=NOON, evidence=evidence)
        self.ledger.close_all([was.id], evidence)

    @precondition(lambda self: self.model)
    @rule(data=st.data(), bucket=st.sampled_from(Bucket), milliseconds=st.integers(0, 10**7))
    def note(self, data: st.DataObject, bucket: Bucket, milliseconds: int) -> None:
        was = self.pick(data)
        self.model[was.token] = replace(
            was, seconds={**was.seconds, bucket: max(was.seconds[bucket], milliseconds / 1000)}
        )
        self.ledger.note_all({was.id: {bucket: milliseconds / 1000}})

    @rule()
    def reopen(self) -> None:
        self.ledger.close()
        self.ledger = Ledger(self.url, clock=lambda: NOON)

    @invariant()
    def agrees(self) -> None:
        by_id = sorted(self.model.values(), key=lambda intent: intent.id)
        assert self.ledger.intents() == by_id
        assert self.ledger.open_intents() == [intent for intent in by_id if intent.gone_at is None]

    def pick(self, data: st.DataObject) -> Intent:
        return self.model[data.draw(st.sampled_from(sorted(self.model)))]


TestIntentHistories = IntentHistories.TestCase
TestIntentHistories.settings = settings(
    max_examples=12, stateful_step_count=20, deadline=None, suppress_health_check=list(HealthCheck)
)


@pytest.mark.parametrize(
    ("seconds", "price", "expected_usd"),
    [
        (3600, Price(USD("2.5")), "2.5"),  # an hour costs the price of an hour
        (10, Price(USD("3.6")), "0.01"),
        (10.001, Price(USD("3.6")), "0.011"),  # a begun second
        (61, Price(USD(6), increment_seconds=60), "0.2"),  # a begun minute: two of them
        (61, Price(USD(6), minimum_seconds=3600), "6"),  # a minimum hour
        (3601, Price(USD(6), increment_seconds=3600), "12"),
        (0, Price(USD(6), minimum_seconds=60), "0.1"),  # bound, and gone at once
        (1, Price(USD(6), minimum_seconds=60, minimum_usd=USD("0.01")), "0.1"),  # the greater of two minimums
        (1, Price(USD("0.03"), minimum_seconds=60, minimum_usd=USD("0.01")), "0.01"),
        (0, Price(USD("0.03"), minimum_usd=USD("0.01")), "0.01"),
        (3600, Price(USD("1.2345671")), "1.234568"),  # a price has six places, rounded up
        (1, Price(USD("0.000001")), "0.000001"),  # never rounded down to nothing
    ],
)
def test_a_resource_is_billed_as_its_provider_counts(
    ledger: Ledger, seconds: float, price: Price, expected_usd: str
) -> None:
    intent = ledger.bind(intend(ledger, price=price), "i-1")
    ledger.note_all({intent.id: {Bucket.RUNNING_CALLS: seconds}})
    (row,) = ledger.cost_rows()
    assert (row.key, row.resources, row.cost_usd) == ("p", 1, USD(expected_usd))
    assert price.cost(seconds) == USD(expected_usd)


def test_the_sum_of_a_bill_does_not_depend_on_the_key(ledger: Ledger, clock: Clock) -> None:
    open_pool(ledger, "q", replace(OWNER, user="bob"))
    counted: dict[int, tuple[Decimal, Decimal]] = {}
    for number in range(60):
        clock.time = NOON + timedelta(hours=7 * number)
        price = Price(
            USD("1.234567") + number,
            USD("3.987653") + number,
            is_spot=True,
            increment_seconds=(1, 60, 3600)[number % 3],
            minimum_seconds=(0, 60, 600)[number % 3],
            minimum_usd=USD((number % 5) / 100),
        )
        intent = ledger.bind(intend(ledger, f"t{number}", "pq"[number % 2], price), f"i-{number}")
        seconds = {bucket: round((number * 13.377 * (place + 1)) % 1000, 3) for place, bucket in enumerate(Bucket)}
        ledger.note_all({intent.id: seconds})
        counted[number] = (price.cost(sum(seconds.values())), price.on_demand_cost(sum(seconds.values())))
    rows = {by: ledger.cost_rows(by) for by in CostBy}
    for one, other in pairwise(rows.values()):
        for of in ("cost_usd", "on_demand_usd", "saved_usd"):
            assert sum(getattr(row, of) for row in one) == sum(getattr(row, of) for row in other)
        assert sum(row.seconds for row in one) == pytest.approx(sum(row.seconds for row in other), abs=1e-6)
    # SQL and Python compute the same sums
    assert [(row.cost_usd, row.on_demand_usd) for row in rows[CostBy.RESOURCE]] == list(counted.values())
    assert [row.key for row in rows[CostBy.OWNER]] == ["ada@laptop", "bob@laptop"]
    assert [row.key for row in rows[CostBy.BUCKET]] == [*map(str, Bucket), BILLING_ROUNDING]
    assert [row.key for row in rows[CostBy.DAY]][:2] == ["2026-11-21", "2026-11-22"]
    assert all(row.cost_usd >= 0 for row in rows[CostBy.BUCKET])
    assert sum(row.cost_usd for row in rows[CostBy.RESOURCE]) > 60


EIGHT_RESERVE = """
import os, sys
from datetime import datetime
from decimal import Decimal
from skyward_core.errors import BudgetExceeded
from skyward_core.ledger.ledger import Ledger

now = datetime.fromisoformat(sys.argv[2])

def take_all(url, seed):
    reserved = 0
    with Ledger(url, clock=lambda: now, busy_timeout_seconds=60) as ledger:
        while True:
            try:
                made = ledger.reserve("team", "p", Decimal("0.37"))
            except BudgetExceeded:
                return reserved
            if reserved % 5 == seed % 5:
                ledger.settle(made, Decimal("0.11"))
            reserved += 1

children = []
for seed in range(8):
    if not (pid := os.fork()):
        os._exit(min(take_all(sys.argv[1], seed), 255))
    children.append(pid)
print(*(os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) for pid in children))
"""


def test_eight_processes_at_once_overdraw_nothing(ledger: Ledger, url: str) -> None:
    ledger.set_account(Account("team", USD(30), Period.MONTH))
    done = run_script(EIGHT_RESERVE, url, NOON.isoformat())  # in the same month as the account
    assert done.returncode == 0, done.stderr
    reserved = ledger.open_reservations()
    left = ledger.left_usd("team", "p")
    assert USD(0) <= left < USD("0.37")
    counts = [int(count) for count in done.stdout.split()]
    assert sum(counts) > len(reserved) >= 1  # some were settled
    assert sum(made.reserved_usd for made in reserved) + (sum(counts) - len(reserved)) * USD("0.11") == 30 - left


KILLED_AT = """
import os, signal, sys
from datetime import UTC, datetime
from decimal import Decimal
import alembic.runtime.environment  # once, before the forks
from sqlalchemy import Engine, event
from skyward_core.ledger.rows import Account, Bucket, Period, ResourceKind, ResourceRequest
from skyward_core.ledger.ledger import Ledger
from skyward_core.machines.owner import Owner
from skyward_core.work import Work

NOON = datetime(2026, 11, 21, 12, tzinfo=UTC)
folder, left = sys.argv[1], 0

def step(*_, **__):
    global left
    left -= 1
    if left == 0:
        os.kill(os.getpid(), signal.SIGKILL)

for name in ("before_cursor_execute", "after_cursor_execute", "commit"):
    event.listen(Engine, name, step)

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
    done = run_script(KILLED_AT, str(tmp_path))
    assert done.returncode == 0, done.stderr
    lines = done.stdout.splitlines()
    assert len(lines) > 80
    for line in lines:
        point, *said = line.split(";")
        path = tmp_path / f"{point}.db"
        with Ledger(f"sqlite:///{path}") as ledger:
            check_what_was_left(ledger, said)
        with sqlite3.connect(path) as raw:
            assert raw.execute("PRAGMA integrity_check").fetchall() == [("ok",)]
        raw.close()


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
    assert len(ledger.open_reservations()) in {
        len(reported["reserved"]) - len(reported["settled"]) + more for more in (-1, 0, 1)
    }
    if ledger.accounts():
        settled = -ledger.left_usd("team", "p") + 10 - 3 * len(ledger.open_reservations())
        assert settled in {
            len(reported["settled"]),
            len(reported["settled"]) + 1,
        }  # the balance agrees with the reservations


TRY_TO_OPEN = """
import os, sys
from skyward_core.errors import LedgerError
from skyward_core.ledger.ledger import Ledger
Ledger(sys.argv[2]).close()  # everything is imported
if os.getuid() == 0:
    os.setgid(65534)
    os.setuid(65534)  # root may write anywhere
try:
    with Ledger(sys.argv[1]) as ledger:
        ledger.end_pool("p")
except LedgerError as error:
    print(error)
"""


@pytest.mark.parametrize("is_made", [False, True])
def test_a_read_only_directory_is_an_error(tmp_path: Path, is_made: bool) -> None:
    folder = tmp_path / "read-only"
    folder.mkdir()
    if is_made:
        Ledger(f"sqlite:///{folder}/ledger.db").close()
    folder.chmod(0o555)
    for parent in (tmp_path, *tmp_path.parents[:2]):
        parent.chmod(0o755)  # so that the other user gets as far as the directory itself
    done = run_script(TRY_TO_OPEN, f"sqlite:///{folder}/ledger.db", f"sqlite:///{tmp_path}/other.db")
    folder.chmod(0o755)
    assert done.returncode == 0, done.stderr
    assert "name another ledger (SKYWARD_LEDGER)" in done.stdout


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


@pytest.mark.generated
@pytest.mark.parametrize("by", CostBy)
def test_a_bill_of_many_resources_is_right(large: Ledger, by: CostBy) -> None:
    rows = large.cost_rows(by)
    # the first has a second less in each
    assert sum(row.seconds for row in rows) == pytest.approx(
        len(Bucket) * (MANY // 1000 * sum(range(1000)) + MANY * 0.1 - 1)
    )
