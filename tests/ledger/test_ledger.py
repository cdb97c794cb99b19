"""The ledger: writes are committed, a killed writer leaves a readable file, and no limit is overdrawn."""

import itertools
import os
import shutil
import signal
import sqlite3
import subprocess
import sys
import tempfile
import threading
from collections.abc import Callable, Iterator, Mapping
from contextlib import closing
from dataclasses import replace
from datetime import UTC, datetime, timedelta
from decimal import Decimal
from itertools import count, pairwise
from pathlib import Path
from typing import Any

import pytest
from hypothesis import HealthCheck, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule
from sqlalchemy import Engine, create_engine, event

from skyward_core.errors import BadRequest, BudgetExceeded, LeaseLost, LedgerConflict, LedgerError
from skyward_core.ledger.database import Database
from skyward_core.ledger.ledger import Ledger, default_url
from skyward_core.ledger.rows import (
    BILLING_ROUNDING,
    Account,
    Attempt,
    Bucket,
    CostBy,
    Intent,
    Period,
    PoolEntry,
    Price,
    ResourceKind,
    ResourceRequest,
)
from skyward_core.ledger.tables import POOLS, RESOURCES, milliseconds_of
from skyward_core.machines.owner import Owner
from skyward_core.work import Work
from tests.conftest import examples, wait_until

NOON = datetime(2026, 11, 21, 12, tzinfo=UTC)
LATER = NOON + timedelta(hours=1)
OWNER = Owner("ada", "laptop", "c0ffee-boot", "4026531836", 4711, "1234")
PROVIDER = {"provider": "verda", "regions": ["FIN-01"]}
USD = Decimal


class Clock:
    """A time that the test sets."""

    def __init__(self) -> None:
        self.time = NOON

    def __call__(self) -> datetime:
        return self.time


@pytest.fixture
def clock() -> Clock:
    """Noon, until the test sets it."""
    return Clock()


@pytest.fixture
def sqlite_url(tmp_path: Path) -> str:
    """A ledger file that does not exist yet, in a directory that does not exist yet."""
    return f"sqlite:///{tmp_path}/state/ledger.db"


@pytest.fixture(params=["sqlite", pytest.param("postgresql", marks=pytest.mark.slow)])
def url(request: pytest.FixtureRequest) -> str:
    """A ledger that does not exist yet, in each kind of database."""
    return request.getfixturevalue("sqlite_url" if request.param == "sqlite" else "postgresql_url")


@pytest.fixture
def ledger(url: str, clock: Clock) -> Iterator[Ledger]:
    """An open ledger with one pool, `p`."""
    with Ledger(url, clock=clock, busy_timeout_seconds=10) as opened:
        open_pool(opened, "p")
        yield opened


@pytest.fixture
def file_ledger(sqlite_url: str, clock: Clock) -> Iterator[Ledger]:
    """The same in a file, for tests of files."""
    with Ledger(sqlite_url, clock=clock, busy_timeout_seconds=10) as opened:
        open_pool(opened, "p")
        yield opened


def open_pool(ledger: Ledger, pool_id: str, owner: Owner = OWNER) -> PoolEntry:
    return ledger.open_pool(pool_id, owner=owner, provider=PROVIDER, spec_json="{}", lease_expires_at=LATER)


def resource_request(token: str = "t1", pool_id: str = "p", price: Price = Price()) -> ResourceRequest:
    return ResourceRequest(
        kind=ResourceKind.INSTANCE,
        provider="verda",
        region="FIN-01",
        name=f"skyward-{token}",
        token=token,
        tags={"skyward-pool": pool_id, "skyward-rank": "0"},
        expires_at=LATER,
        price=price,
    )


def intend(ledger: Ledger, token: str = "t1", pool_id: str = "p", price: Price = Price()) -> Intent:
    return ledger.intend(pool_id, resource_request(token, pool_id, price))


# ── a PostgreSQL server for the tests ────────────────────────────────────────────────────────────────────────────────


@pytest.fixture(scope="session")
def postgresql_server() -> Iterator[str]:
    """The URL of a server that lives as long as the test session, or less if that is killed; reached over a Unix
    socket.
    """
    programs = next(
        (path.parent for path in sorted(Path("/usr/lib/postgresql").glob("*/bin/initdb"), reverse=True)), None
    )
    if programs is None:
        (pytest.fail if os.environ.get("CI") else pytest.skip)("no PostgreSQL server is installed (Debian: postgresql)")
    folder = tempfile.mkdtemp(prefix="ledger-")
    ours = ["setpriv"]
    if os.getuid() == 0:  # the server refuses to run as root
        shutil.chown(folder, "nobody", "nogroup")
        ours = ["setpriv", "--reuid=nobody", "--regid=nogroup", "--clear-groups"]
    quiet = {"cwd": folder, "stdin": subprocess.DEVNULL, "stdout": subprocess.DEVNULL, "stderr": subprocess.DEVNULL}
    server: subprocess.Popen[bytes] | None = None
    try:
        subprocess.run(
            [
                *ours,
                programs / "initdb",
                "-D",
                f"{folder}/data",
                "-U",
                "ada",
                "-A",
                "trust",
                "-N",
                "-E",
                "UTF8",
                "--no-locale",
            ],
            check=True,
            timeout=100,
            **quiet,
        )
        says = ["-D", f"{folder}/data", "-k", folder, "-c", "listen_addresses=", "-c", "fsync=off"]
        server = subprocess.Popen([*ours, "--pdeathsig=INT", programs / "postgres", *says], **quiet)
        wait_until(
            lambda: subprocess.run([programs / "pg_isready", "-h", folder], check=False, **quiet).returncode == 0,
            "the server to be ready",
            60,
        )
        yield f"postgresql+psycopg://ada@/postgres?host={folder}"
    finally:
        if server is not None:
            server.send_signal(signal.SIGINT)  # "fast shutdown": connections are closed
            server.wait(30)
        shutil.rmtree(folder)


_DATABASES = count(1)


@pytest.fixture
def postgresql_url(postgresql_server: str) -> Iterator[str]:
    """A new database."""
    name = f"ledger_{next(_DATABASES)}"
    run_on(postgresql_server, f"CREATE DATABASE {name}")
    yield postgresql_server.replace("/postgres?", f"/{name}?")
    run_on(postgresql_server, f"DROP DATABASE {name} WITH (FORCE)")


def run_on(url: str, statement: str) -> None:
    engine = create_engine(url, isolation_level="AUTOCOMMIT")
    with engine.connect() as connection:
        connection.exec_driver_sql(statement)
    engine.dispose()


# ── intents ──────────────────────────────────────────────────────────────────────────────────────────────────────────


def test_an_intent_is_committed_before_it_returns(ledger: Ledger, url: str) -> None:
    """Another process sees it at once, with all that is needed to find the resource."""
    intent = intend(ledger, price=Price(USD("1.5"), USD("3"), is_spot=True))
    with Ledger(url) as other:
        assert other.open_intents() == [intent]
    assert intent.tags == {"skyward-pool": "p", "skyward-rank": "0"}
    assert (intent.intended_at, intent.expires_at, intent.cloud_id) == (NOON, LATER, None)
    assert intent.price == Price(USD("1.5"), USD(3), is_spot=True)


def test_an_intent_goes_from_requested_to_gone(ledger: Ledger, clock: Clock) -> None:
    """Each step has its time, and the first time of each is kept. A closed intent is not open."""
    intent = intend(ledger)
    for minutes, step in enumerate(
        (
            lambda: ledger.bind(intent, "i-1"),
            lambda: ledger.ask_end_all([intent.id])[0],
            lambda: ledger.close_all([intent.id], "404"),
        ),
        1,
    ):
        clock.time = NOON + timedelta(minutes=minutes)
        step()
    clock.time = LATER
    (again,) = ledger.close_all([intent.id], "another story")
    assert ledger.bind(intent, "i-1") == ledger.ask_end_all([intent.id])[0] == again
    assert [again.bound_at, again.end_asked_at, again.gone_at] == [
        NOON + timedelta(minutes=minutes) for minutes in (1, 2, 3)
    ]
    assert (again.cloud_id, again.evidence) == ("i-1", "404")
    assert ledger.open_intents() == []
    assert ledger.intents(pool_id="p") == [again]


def test_a_known_token_returns_its_entry(ledger: Ledger) -> None:
    """A repeated call creates no second intent. The same token for another resource is refused."""
    intent = ledger.bind(intend(ledger), "i-1")
    assert intend(ledger) == intent
    open_pool(ledger, "q")
    with pytest.raises(LedgerConflict, match="belongs to instance 'skyward-t1' of pool 'p'"):
        intend(ledger, pool_id="q")
    assert ledger.intents() == [intent]


def test_two_resources_of_one_request_are_a_conflict(ledger: Ledger) -> None:
    """Another cloud id for a bound intent is refused, and the entry does not change."""
    bound = ledger.bind(intend(ledger), "i-1")
    with pytest.raises(LedgerConflict, match="terminate i-2"):
        ledger.bind(bound, "i-2")
    assert ledger.open_intents() == [bound]


def test_a_late_answer_opens_the_intent_again(ledger: Ledger) -> None:
    """It was closed because a listing did not show it. Now it has an id, and a machine must be terminated."""
    intent = intend(ledger)
    ledger.close_all([intent.id], "not listed")
    bound = ledger.bind(intent, "i-1")
    assert (bound.cloud_id, bound.gone_at, bound.evidence) == ("i-1", None, None)
    assert ledger.open_intents() == [bound]


@pytest.mark.parametrize("kind", ["key pair", "volume", "other"])
def test_entries_of_earlier_kinds_can_be_read(file_ledger: Ledger, sqlite_url: str, kind: str) -> None:
    """Earlier versions had kinds that this one does not create: their rows stay readable, and are not machines."""
    open_pool(file_ledger, "old")
    intend(file_ledger, pool_id="old")
    run_on(sqlite_url, f"UPDATE skyward_resources SET kind = '{kind}'")
    assert [its.kind for its in file_ledger.open_intents()] == [ResourceKind.OTHER]


def test_open_intents_can_be_filtered(ledger: Ledger) -> None:
    """They are selected by pool and by provider."""
    open_pool(ledger, "q")
    ours, theirs = intend(ledger, "a"), intend(ledger, "b", "q")
    assert ledger.open_intents(pool_id="q") == [theirs]
    assert ledger.open_intents(provider="aws") == []
    assert ledger.open_intents(provider="verda") == [ours, theirs]


def test_wrong_arguments_are_refused(ledger: Ledger) -> None:
    """Examples: unknown or duplicate pools, naive times, no evidence, negative seconds, entries of another ledger."""
    with pytest.raises(LedgerConflict, match="no pool 'unknown'"):
        intend(ledger, pool_id="unknown")
    with pytest.raises(LedgerConflict, match="already has a pool 'p'"):
        open_pool(ledger, "p")
    with pytest.raises(LedgerConflict, match="no pool 'x'"):
        ledger.renew("x", LATER)
    with pytest.raises(BadRequest, match="no time zone"):
        ledger.renew("p", datetime(2026, 1, 1))
    with pytest.raises(BadRequest, match="evidence"):
        ledger.close_all([intend(ledger).id], " ")
    with pytest.raises(BadRequest, match="only add up"):
        ledger.note_all({intend(ledger).id: {Bucket.IDLE: -1}})
    with pytest.raises(LedgerConflict, match="no entry 99"):
        ledger.bind(99, "i-1")
    assert len(ledger.intents()) == 1


def test_a_pool_ends_once_and_its_open_intents_stay(ledger: Ledger, clock: Clock) -> None:
    """An ended pool is listed only on request. Its open intents stay for a sweep."""
    left = intend(ledger)
    ledger.end_pool("p")
    clock.time = LATER
    ledger.end_pool("p")
    assert ledger.pools() == []
    (pool,) = ledger.pools(include_ended=True)
    assert (pool.owner, pool.provider, pool.ended_at, pool.spec_json) == (OWNER, PROVIDER, NOON, "{}")
    assert ledger.open_intents() == [left]


# ── leases ───────────────────────────────────────────────────────────────────────────────────────────────────────────


def test_a_lease_is_renewed_and_never_shortened(ledger: Ledger) -> None:
    """This holds for any order of renewals. A pool that lives by its lease continues to do so."""
    ledger.renew("p", LATER + timedelta(minutes=5))
    ledger.renew("p", LATER)
    pool = ledger.pool("p")
    assert pool is not None
    assert (pool.lease_expires_at, pool.lives_by_lease) == (LATER + timedelta(minutes=5), False)
    ledger.live_by_lease("p", LATER)
    ledger.renew("p", LATER + timedelta(minutes=6))
    assert ledger.pool("p") == replace(pool, lease_expires_at=LATER + timedelta(minutes=6), lives_by_lease=True)
    assert ledger.pool("unknown") is None


def spending_verbs(ledger: Ledger) -> list[Callable[[], object]]:
    return [
        lambda: ledger.renew("p", LATER),
        lambda: ledger.live_by_lease("p", LATER),
        lambda: ledger.intend("p", resource_request("new")),
        lambda: ledger.intend("p", resource_request("old")),
        lambda: ledger.reserve("team", "p", USD(1)),
        lambda: ledger.roll("team", "p", USD(1), USD(1)),
    ]


@pytest.mark.parametrize("is_condemned", [True, False])
def test_nothing_is_requested_for_a_dead_pool(ledger: Ledger, is_condemned: bool) -> None:
    """Every method that spends raises LeaseLost for a condemned or ended pool. Facts are still recorded."""
    ledger.set_account(Account("team", USD(10), Period.RUN))
    intent = intend(ledger, "old")
    if is_condemned:
        assert ledger.condemn("p", seen=LATER)
    else:
        ledger.end_pool("p")
    for spend in spending_verbs(ledger):
        with pytest.raises(
            LeaseLost,
            match="was judged dead at 2026-11-21 12:00:00" if is_condemned else "has ended, at 2026-11-21 12:00:00",
        ):
            spend()
    assert ledger.left_usd("team", "p") == 10
    assert ledger.bind(intent, "i-1").cloud_id == "i-1"
    ledger.note_all({intent.id: {Bucket.IDLE: 1}})
    assert ledger.ask_end_all([intent.id])[0].end_asked_at == NOON
    assert ledger.close_all([intent.id], "404")[0].gone_at == NOON
    found = ledger.adopt("p", resource_request("found"), "i-2")
    assert ledger.adopt("p", resource_request("found"), "i-2") == found
    assert ledger.open_intents() == [found]
    assert (found.cloud_id, found.bound_at, found.token) == ("i-2", NOON, "found")


def test_a_pool_is_condemned_unless_its_lease_was_renewed(ledger: Ledger, clock: Clock) -> None:
    """A caller with an old lease must read again. The first time of a condemnation is kept. An ended pool is dead."""
    ledger.renew("p", LATER + timedelta(minutes=1))
    assert not ledger.condemn("p", seen=LATER)
    assert ledger.pool("p").condemned_at is None  # type: ignore[union-attr]
    assert ledger.condemn("p", seen=LATER + timedelta(minutes=1))
    clock.time = LATER
    assert ledger.condemn("p", seen=LATER)
    assert ledger.pool("p").condemned_at == NOON  # type: ignore[union-attr]
    open_pool(ledger, "q")
    ledger.end_pool("q")
    assert ledger.condemn("q", seen=NOON)
    assert ledger.pool("q").condemned_at is None  # type: ignore[union-attr]
    with pytest.raises(LedgerConflict, match="no pool 'x'"):
        ledger.condemn("x", seen=NOON)


def test_many_pools_are_condemned_and_ended_at_once(ledger: Ledger) -> None:
    """Pools with renewed leases are left out; if one pool is unknown nothing is done."""
    for pool_id in "abc":
        open_pool(ledger, pool_id)
    ledger.renew("b", LATER + timedelta(minutes=1))
    ledger.end_pool("c")
    assert ledger.condemn_all(dict.fromkeys("abc", LATER)) == {"a", "c"}
    assert {pool.id for pool in ledger.pools() if pool.condemned_at} == {"a"}
    for verb in (lambda: ledger.end_pools(["a", "x", "p"]), lambda: ledger.condemn_all({"p": LATER, "x": LATER})):
        with pytest.raises(LedgerConflict, match="no pool 'x'"):
            verb()
    assert [pool.id for pool in ledger.pools() if not pool.condemned_at] == ["b", "p"]
    ledger.end_pools(iter(["a", "p"]))
    assert [pool.id for pool in ledger.pools()] == ["b"]


@pytest.mark.parametrize("verb", ["renew", "intend"])
def test_a_lease_is_either_renewed_or_condemned(ledger: Ledger, url: str, verb: str) -> None:
    """Twenty races with its owner: after the sweep has condemned the pool, the owner gets LeaseLost."""
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


# ── many at once ─────────────────────────────────────────────────────────────────────────────────────────────────────


@pytest.mark.slow
def test_many_intents_are_recorded_at_once_in_their_order(ledger: Ledger) -> None:
    """The ledger writes all of them, in several statements, or none. Entries with known tokens do not change."""
    known = ledger.bind(intend(ledger, "t7"), "i-7")
    intents = ledger.intend_all("p", [resource_request(f"t{number}") for number in range(1100)])
    assert [intent.token for intent in intents] == [f"t{number}" for number in range(1100)]
    assert intents[7] == known
    assert ledger.intend_all(
        "p", [resource_request("t7"), resource_request("t3"), resource_request("new"), resource_request("new")]
    ) == [
        known,
        intents[3],
        *[ledger.intents()[-1]] * 2,
    ]
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


def test_a_conflicting_id_does_not_stop_the_binding_of_others(ledger: Ledger) -> None:
    """Each conflict is named and changes nothing; all others are recorded."""
    first, second, third = ledger.intend_all("p", [resource_request("a"), resource_request("b"), resource_request("c")])
    ledger.bind_all({first.id: "i-1", second.id: "i-2"})
    with pytest.raises(LedgerConflict, match=r"terminate i-8.*terminate i-9"):
        ledger.bind_all({first.id: "i-8", third.id: "i-3", second.id: "i-9"})
    assert [intent.cloud_id for intent in ledger.intents()] == ["i-1", "i-2", "i-3"]


# ── seconds ──────────────────────────────────────────────────────────────────────────────────────────────────────────


def seconds_of(ledger: Ledger) -> list[dict[Bucket, float]]:
    return [{bucket: seconds for bucket, seconds in intent.seconds.items() if seconds} for intent in ledger.intents()]


def test_noted_totals_replace_each_other_and_never_shrink(ledger: Ledger) -> None:
    """They are exact to the millisecond, and other buckets do not change."""
    one, other = ledger.intend_all("p", [resource_request("a"), resource_request("b")])
    ledger.note_all({one.id: {Bucket.LAUNCHING: 12.3456, Bucket.IDLE: 5}, other.id: {Bucket.IDLE: 1}})
    ledger.note_all({one.id: {Bucket.IDLE: 7.25}, other.id: {Bucket.IDLE: 0.5}})
    ledger.note_all({})
    assert seconds_of(ledger) == [{Bucket.LAUNCHING: 12.346, Bucket.IDLE: 7.25}, {Bucket.IDLE: 1}]


def test_a_second_may_move_to_another_bucket(ledger: Ledger) -> None:
    """The buckets of a resource are replaced together, because their sum is its life."""
    intent = intend(ledger)
    ledger.note_all({intent.id: {Bucket.LAUNCHING: 1, Bucket.IDLE: 5}})
    ledger.note_all({intent.id: {Bucket.LAUNCHING: 1, Bucket.IDLE: 1, Bucket.RUNNING_CALLS: 6}})
    assert seconds_of(ledger) == [{Bucket.LAUNCHING: 1, Bucket.IDLE: 1, Bucket.RUNNING_CALLS: 6}]
    # an older note that comes late
    ledger.note_all({intent.id: {Bucket.LAUNCHING: 1, Bucket.IDLE: 4, Bucket.RUNNING_CALLS: 2.9}})
    assert seconds_of(ledger) == [{Bucket.LAUNCHING: 1, Bucket.IDLE: 1, Bucket.RUNNING_CALLS: 6}]


def test_seconds_that_were_never_noted_are_filled_in_at_the_close(ledger: Ledger, clock: Clock) -> None:
    """A bound resource gets them from its intent on, an unbound one gets none. A second close changes nothing."""
    noted, unnoted, unbound, unfilled = ledger.intend_all("p", [resource_request(token) for token in "abcd"])
    ledger.bind_all({noted.id: "i-1", unnoted.id: "i-2", unfilled.id: "i-4"})
    ledger.note_all({noted.id: {Bucket.LAUNCHING: 60, Bucket.IDLE: 30}, unfilled.id: {Bucket.LAUNCHING: 60}})
    clock.time = NOON + timedelta(seconds=600.5)
    ledger.close_all([noted.id, unnoted.id, unbound.id], "not listed", fill=Bucket.IDLE)
    ledger.close_all([unfilled.id], "404")
    clock.time = LATER
    ledger.close_all([noted.id, unnoted.id, unbound.id, unfilled.id], "again", fill=Bucket.LOST)
    assert seconds_of(ledger) == [
        {Bucket.LAUNCHING: 60, Bucket.IDLE: 540.5},
        {Bucket.IDLE: 600.5},
        {},
        {Bucket.LAUNCHING: 60},
    ]


def test_a_machine_that_was_gone_long_before_is_filled_in_until_then(ledger: Ledger, clock: Clock) -> None:
    """The close has the time at which it was gone. Later seconds are not filled in, and known ones are kept."""
    early, late, short = ledger.intend_all("p", [resource_request(token) for token in "abc"])
    ledger.bind_all({early.id: "i-1", late.id: "i-2", short.id: "i-3"})
    ledger.note_all({short.id: {Bucket.IDLE: 90}})
    clock.time = NOON + timedelta(seconds=600)
    ends = {early.id: NOON + timedelta(seconds=240), late.id: LATER, short.id: NOON + timedelta(seconds=60)}
    closed = ledger.close_all([early.id, late.id, short.id], "not listed", fill=Bucket.IDLE, paid_until=ends)
    assert seconds_of(ledger) == [{Bucket.IDLE: 240}, {Bucket.IDLE: 600}, {Bucket.IDLE: 90}]
    assert {its.gone_at for its in closed} == {clock.time}


def test_late_notes_replace_filled_in_seconds(ledger: Ledger, clock: Clock) -> None:
    """An owner that was believed dead knows the buckets better, but the sum does not grow."""
    intent = ledger.bind(intend(ledger), "i-1")
    ledger.note_all({intent.id: {Bucket.LAUNCHING: 60, Bucket.IDLE: 10}})
    clock.time = NOON + timedelta(seconds=600)
    ledger.close_all([intent.id], "not listed", fill=Bucket.IDLE)
    ledger.note_all({intent.id: {Bucket.LAUNCHING: 60, Bucket.RUNNING_CALLS: 400, Bucket.IDLE: 20}})
    assert seconds_of(ledger) == [{Bucket.LAUNCHING: 60, Bucket.RUNNING_CALLS: 400, Bucket.IDLE: 140}]
    ledger.note_all({intent.id: {Bucket.LAUNCHING: 60, Bucket.RUNNING_CALLS: 400, Bucket.IDLE: 20}})
    assert seconds_of(ledger) == [{Bucket.LAUNCHING: 60, Bucket.RUNNING_CALLS: 400, Bucket.IDLE: 140}]
    for _ in range(2):
        ledger.note_all({intent.id: {Bucket.RUNNING_CALLS: 500, Bucket.IDLE: 9000, Bucket.TERMINATING: 9000}})
        assert seconds_of(ledger) == [{Bucket.LAUNCHING: 60, Bucket.RUNNING_CALLS: 500, Bucket.IDLE: 40}]


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


TestIntentHistories = pytest.mark.slow(IntentHistories.TestCase)
TestIntentHistories.settings = settings(
    max_examples=12, stateful_step_count=20, deadline=None, suppress_health_check=list(HealthCheck)
)


# ── cost ─────────────────────────────────────────────────────────────────────────────────────────────────────────────


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
    """Begun increments, at least the minimum, rounded up to a micro-dollar."""
    intent = ledger.bind(intend(ledger, price=price), "i-1")
    ledger.note_all({intent.id: {Bucket.RUNNING_CALLS: seconds}})
    (row,) = ledger.cost_rows()
    assert (row.key, row.resources, row.cost_usd) == ("p", 1, USD(expected_usd))
    assert price.cost(seconds) == USD(expected_usd)


def test_a_resource_that_was_never_created_costs_nothing(ledger: Ledger) -> None:
    """An unbound intent has no minimum to pay."""
    intend(ledger, price=Price(USD(6), minimum_seconds=3600, minimum_usd=USD(1)))
    (row,) = ledger.cost_rows()
    assert row.cost_usd == 0


@pytest.mark.slow
def test_the_sum_of_a_bill_does_not_depend_on_the_key(ledger: Ledger, clock: Clock) -> None:
    """The bill by resource, pool, owner, day and bucket is equal to the micro-dollar, with odd prices, times and
    billing rules.
    """
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


def test_a_bill_can_be_filtered(ledger: Ledger, clock: Clock) -> None:
    """The filters are the pool and the time of the intent."""
    open_pool(ledger, "q")
    intend(ledger, "a")
    clock.time = LATER
    intend(ledger, "b", pool_id="q")
    assert [row.key for row in ledger.cost_rows(pool_id="q")] == ["q"]
    assert [row.key for row in ledger.cost_rows(since=LATER)] == ["q"]
    assert [row.key for row in ledger.cost_rows(until=LATER)] == ["p"]
    assert sum(row.resources for row in ledger.cost_rows(CostBy.BUCKET, since=LATER + timedelta(1))) == 0


def test_a_list_of_pools_has_the_cost_of_each(ledger: Ledger, clock: Clock) -> None:
    """It has open resources and costs, oldest pool first. Ended pools are listed only on request, and only the newest
    ones.
    """
    for minutes, pool_id in enumerate("qrs", 1):
        clock.time = NOON + timedelta(minutes=minutes)
        open_pool(ledger, pool_id)
    spot = Price(USD(1), USD(4), is_spot=True)
    one, other, unbound = ledger.intend_all(
        "q", [resource_request("a", "q", spot), resource_request("b", "q"), resource_request("c", "q", spot)]
    )
    ledger.bind_all({one.id: "i-1", other.id: "i-2"})
    ledger.note_all({one.id: {Bucket.LAUNCHING: 1800, Bucket.IDLE: 1800.5}})
    ledger.close_all([unbound.id], "fewer came")
    ledger.end_pool("r")
    rows = ledger.pool_rows()
    assert [row.entry for row in rows] == ledger.pools()
    assert [row.entry.id for row in rows] == ["p", "q", "s"]
    q = rows[1]
    assert (q.open_resources, q.resources, q.seconds, q.cost_usd, q.on_demand_usd) == (
        2,
        3,
        3600.5,
        USD("1.000278"),
        USD("4.001112"),
    )
    assert (rows[0].resources, rows[0].cost_usd) == (0, 0)
    assert [row.entry.id for row in ledger.pool_rows(include_ended=True)] == ["p", "q", "r", "s"]
    assert ledger.pool_rows(include_ended=True)[1] == q
    assert ledger.pool_rows(limit=2) == rows[1:]
    assert [row.entry.id for row in ledger.pool_rows(include_ended=True, limit=2)] == ["r", "s"]


# ── money ────────────────────────────────────────────────────────────────────────────────────────────────────────────


def test_a_limit_counts_reservations_and_spending(ledger: Ledger) -> None:
    """Unspent money is free again. A reservation above the limit changes nothing."""
    ledger.set_account(Account("team", USD(10), Period.MONTH))
    first, second = ledger.reserve("team", "p", USD(6)), ledger.reserve("team", "p", USD(4))
    with pytest.raises(BudgetExceeded, match=r"0\.000000 USD left") as refused:
        ledger.reserve("team", "p", USD("0.000001"))
    assert (refused.value.account, refused.value.left_usd) == ("team", 0)
    assert ledger.open_reservations() == [first, second]
    settled = ledger.settle(first, USD("1.25"))
    assert (settled.spent_usd, settled.settled_at) == (USD("1.25"), NOON)
    assert ledger.settle(first, USD("1.25")) == settled
    with pytest.raises(LedgerConflict, match=r"was settled with 1\.25"):
        ledger.settle(first, USD(2))
    ledger.release(second)
    assert ledger.left_usd("team", "p") == USD("8.75")
    assert ledger.open_reservations(pool_id="p") == []


def test_overspending_is_recorded(ledger: Ledger) -> None:
    """The rest is negative, and nothing more can be reserved."""
    ledger.set_account(Account("team", USD(10), Period.RUN))
    ledger.settle(ledger.reserve("team", "p", USD(9)), USD(11))
    assert ledger.left_usd("team", "p") == -1
    with pytest.raises(BudgetExceeded):
        ledger.reserve("team", "p", USD("0.01"))


def test_the_end_of_a_pool_settles_all_its_reservations(ledger: Ledger, clock: Clock) -> None:
    """Its settled sums add up to its cost. Each pays at most its own sum, oldest first, so no day pays for another."""
    open_pool(ledger, "q")
    ledger.set_account(Account("team", USD(10), Period.DAY))
    ledger.settle(ledger.reserve("team", "p", USD(2)), USD(1))
    ledger.reserve("team", "p", USD(3))
    other = ledger.reserve("team", "q", USD(5))
    clock.time = NOON + timedelta(days=1)
    ledger.reserve("team", "p", USD(4))
    for _ in range(2):
        ledger.settle_pool("p", USD("4.5"))
        assert ledger.open_reservations() == [other]
        assert ledger.left_usd("team", "p") == USD("9.5")
        clock.time = NOON
        assert ledger.left_usd("team", "p") == USD("1")
        clock.time = NOON + timedelta(days=1)
    ledger.settle_pool("unknown", USD(1))


@pytest.mark.parametrize(("spent", "left"), [("0.5", "9"), ("11", "-1")])
def test_a_pool_that_spent_less_than_settled_or_more_than_reserved(ledger: Ledger, spent: str, left: str) -> None:
    """Settled sums do not change, and the rest is zero. Overspending is recorded."""
    ledger.set_account(Account("team", USD(10), Period.RUN))
    ledger.settle(ledger.reserve("team", "p", USD(2)), USD(1))
    for _ in range(3):
        ledger.reserve("team", "p", USD(1))
    ledger.settle_pool("p", USD(spent))
    assert ledger.left_usd("team", "p") == USD(left)
    with pytest.raises(BadRequest, match="not negative"):
        ledger.settle_pool("p", USD(-1))


def test_a_renewal_of_reservations_is_atomic(ledger: Ledger, clock: Clock) -> None:
    """The old reservation is settled and the next one made, or nothing changes if the limit does not allow it."""
    ledger.set_account(Account("team", USD(10), Period.DAY))
    ledger.set_account(Account("other", USD(10), Period.DAY))
    elsewhere = ledger.reserve("other", "p", USD(10))
    open_before = [elsewhere, ledger.reserve("team", "p", USD(3)), ledger.reserve("team", "p", USD(3))]
    with pytest.raises(BudgetExceeded, match=r"5\.000000 USD left.*5\.000001 requested"):
        ledger.roll("team", "p", USD(5), USD("5.000001"))
    assert ledger.open_reservations() == open_before
    assert ledger.left_usd("team", "p") == 4
    following = ledger.roll("team", "p", USD(5), USD(5))
    assert ledger.open_reservations() == [elsewhere, following]
    assert (following.reserved_usd, ledger.left_usd("team", "p")) == (5, 0)
    clock.time = NOON + timedelta(days=1)
    empty = ledger.roll("team", "p", USD(4), USD(0))
    assert (empty.reserved_usd, empty.scope, ledger.left_usd("team", "p")) == (0, "2026-11-22", 10)
    ledger.settle(empty, USD(0))
    ledger.roll("team", "p", USD(2), USD(1))
    assert ledger.left_usd("team", "p") == 7
    for spent, following in ((-1, 1), (1, -1)):
        with pytest.raises(BadRequest, match="not negative"):
            ledger.roll("team", "p", USD(spent), USD(following))
    assert ledger.left_usd("team", "p") == 7


@pytest.mark.parametrize(
    ("period", "same_day", "next_day", "next_month", "other_pool"),
    [("run", 0, 0, 0, 1), ("day", 0, 1, 1, 0), ("month", 0, 0, 1, 0)],
)
def test_a_limit_holds_for_its_period(
    ledger: Ledger, clock: Clock, period: str, same_day: int, next_day: int, next_month: int, other_pool: int
) -> None:
    """The period is a pool, a UTC day or a UTC month."""
    open_pool(ledger, "q")
    ledger.set_account(Account("team", USD(1), Period(period)))
    ledger.reserve("team", "p", USD(1))
    assert ledger.left_usd("team", "q") == other_pool
    for moment, left in (
        (NOON.replace(hour=23), same_day),
        (NOON + timedelta(days=1), next_day),
        (NOON + timedelta(days=30), next_month),
    ):
        clock.time = moment
        assert ledger.left_usd("team", "p") == left


def test_an_account_can_be_changed_and_must_exist(ledger: Ledger) -> None:
    """A new limit counts at once. The error for an unknown account lists the known ones."""
    ledger.set_account(Account("team", USD(1), Period.DAY))
    ledger.set_account(Account("team", USD("2.5"), Period.DAY))
    assert ledger.accounts() == [Account("team", USD("2.5"), Period.DAY)]
    ledger.reserve("team", "p", USD("2.5"))
    with pytest.raises(BadRequest, match="no account 'taem'; it has: team"):
        ledger.reserve("taem", "p", USD(1))
    with pytest.raises(BadRequest, match="positive"):
        ledger.reserve("team", "p", USD(0))


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


def run_script(script: str, *args: str, **options: object) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-c", script, *args], capture_output=True, text=True, timeout=250, check=False, **options
    )  # type: ignore[call-overload]


@pytest.mark.slow
def test_eight_processes_at_once_overdraw_nothing(ledger: Ledger, url: str) -> None:
    """They reserve and settle until the account refuses: less than one reservation is left then."""
    ledger.set_account(Account("team", USD(30), Period.MONTH))
    done = run_script(EIGHT_RESERVE, url, NOON.isoformat())  # in the same month as the account
    assert done.returncode == 0, done.stderr
    reserved = ledger.open_reservations()
    left = ledger.left_usd("team", "p")
    assert USD(0) <= left < USD("0.37")
    counts = [int(count) for count in done.stdout.split()]
    assert sum(counts) > len(reserved) >= 1  # some were settled
    assert sum(made.reserved_usd for made in reserved) + (sum(counts) - len(reserved)) * USD("0.11") == 30 - left


# ── crashes and outages ──────────────────────────────────────────────────────────────────────────────────────────────

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


@pytest.mark.long
@pytest.mark.timeout(300)
def test_a_writer_killed_at_any_statement_leaves_a_readable_ledger(tmp_path: Path) -> None:
    """SIGKILL before and after every statement and before every commit, from an empty file on.

    Everything that had returned is there, and at most one more change.
    """
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


def test_a_reader_blocks_no_writer(file_ledger: Ledger, tmp_path: Path) -> None:
    """A pool writes during an open read transaction, which still sees the old state."""
    raw = sqlite3.connect(tmp_path / "state/ledger.db", isolation_level=None)
    raw.execute("BEGIN")
    assert raw.execute("SELECT count(*) FROM skyward_resources").fetchone() == (0,)
    with Ledger(str(file_ledger.url), busy_timeout_seconds=0) as impatient:
        intend(impatient)
    assert raw.execute("SELECT count(*) FROM skyward_resources").fetchone() == (0,)
    raw.close()
    assert len(file_ledger.intents()) == 1


@pytest.mark.parametrize(
    "use",
    [lambda ledger: ledger.left_usd("team", "p"), lambda ledger: ledger.reserve("team", "p", USD(1))],
    ids=["read", "write"],
)
def test_closing_a_ledger_in_use_closes_every_connection(
    tmp_path: Path, clock: Clock, use: Callable[[Ledger], object]
) -> None:
    """This includes the one that another thread uses during the close, and one that is used later.

    The methods themselves do their work.
    """
    path = tmp_path / "state/ledger.db"

    def connections() -> int:
        return sum(os.path.realpath(f"/proc/self/fd/{number}") == str(path) for number in os.listdir("/proc/self/fd"))

    def closing() -> datetime:
        if closes:
            ledger.close()
        return clock()

    closes = False
    with Ledger(f"sqlite:///{path}", clock=closing) as ledger:
        open_pool(ledger, "p")
        ledger.set_account(Account("team", USD(10), Period.RUN))
        closes = True
        use(ledger)
        assert connections() == 0
        closes = False
        use(ledger)
        assert connections() == 0


def test_a_ledger_that_stays_locked_is_an_error(file_ledger: Ledger, tmp_path: Path) -> None:
    """The error names the writer as the cause. Readers do not wait, and later writers work."""
    raw = sqlite3.connect(tmp_path / "state/ledger.db", isolation_level=None)
    raw.execute("BEGIN IMMEDIATE")
    with Ledger(str(file_ledger.url), busy_timeout_seconds=0.05) as impatient:
        with pytest.raises(LedgerError, match=r"ledger\.db is locked by another process"):
            intend(impatient)
        assert impatient.intents() == []
        raw.close()
        intend(impatient)


def test_threads_share_a_ledger(ledger: Ledger) -> None:
    """Calls from many threads lose nothing. (Warm time would change the idle time.)"""
    intent = intend(ledger)
    buckets = [bucket for bucket in Bucket if bucket is not Bucket.WARM]
    threads = [
        threading.Thread(
            target=lambda bucket=bucket: [ledger.note_all({intent.id: {bucket: seconds}}) for seconds in range(1, 11)]
        )
        for bucket in buckets
    ]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert ledger.intents()[0].seconds == {**dict.fromkeys(buckets, 10), Bucket.WARM: 0}


@pytest.mark.parametrize("garbage", [b"not a database at all" * 100, b"SQLite format 3\0" + b"\x5a" * 5000])
def test_a_garbage_file_is_refused_and_not_changed(tmp_path: Path, garbage: bytes) -> None:
    """The message says what to do."""
    path = tmp_path / "ledger.db"
    path.write_bytes(garbage)
    with pytest.raises(LedgerError, match=r"is damaged, or no ledger\. Move it away"):
        Ledger(f"sqlite:///{path}")
    assert path.read_bytes() == garbage


@pytest.mark.slow
def test_a_ledger_that_is_damaged_later_is_an_error(file_ledger: Ledger, tmp_path: Path) -> None:
    """Another program has overwritten pages."""
    for number in range(200):
        intend(file_ledger, f"t{number}")
    file_ledger.close()
    path = tmp_path / "state/ledger.db"
    path.write_bytes(path.read_bytes()[:8192] + b"\xa5" * (path.stat().st_size - 8192))
    with pytest.raises(LedgerError, match="damaged"), Ledger(f"sqlite:///{path}") as damaged:
        damaged.intents()


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


@pytest.mark.slow
@pytest.mark.parametrize("is_made", [False, True])
def test_a_read_only_directory_is_an_error(tmp_path: Path, is_made: bool) -> None:
    """This holds with a ledger in it, and without."""
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


def test_a_directory_that_cannot_be_created_is_an_error(tmp_path: Path) -> None:
    """A file has its name."""
    (tmp_path / "state").write_text("")
    with pytest.raises(LedgerError, match="Check the path"):
        Ledger(f"sqlite:///{tmp_path}/state/ledger.db")


FILL = """
import resource, signal, sys
from datetime import UTC, datetime
from skyward_core.ledger.rows import ResourceKind, ResourceRequest
from skyward_core.errors import LedgerError
from skyward_core.ledger.ledger import Ledger
NOON = datetime(2026, 11, 21, 12, tzinfo=UTC)
signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
resource.setrlimit(resource.RLIMIT_FSIZE, (int(sys.argv[2]), int(sys.argv[2])))
with Ledger(sys.argv[1]) as ledger:
    for number in range(100_000):
        try:
            ledger.intend("p", ResourceRequest(ResourceKind.INSTANCE, "x", "y", "n", str(number), {}, NOON))
        except LedgerError as error:
            print(number, error)
            break
"""


@pytest.mark.slow
def test_a_full_disk_is_an_error_and_loses_nothing(file_ledger: Ledger, sqlite_url: str) -> None:
    """All earlier writes are there."""
    done = run_script(FILL, sqlite_url, str(200_000))
    assert done.returncode == 0, done.stderr
    written, _, message = done.stdout.partition(" ")
    assert "disk" in message
    assert len(file_ledger.intents()) == int(written) > 0


@pytest.mark.parametrize(
    ("url", "message"),
    [
        ("ledger.db", "is no URL"),
        ("mysql://host/x", "SQLite or PostgreSQL, not in mysql"),
        ("sqlite://", "lost with its process"),
        ("postgresql+nothing://ada:secret@host/x", "driver for .*is not installed"),
        ("postgresql+psycopg://ada:secret@127.0.0.1:9/x", "is not installed|cannot be reached"),
    ],
)
def test_a_wrong_url_is_an_error(url: str, message: str) -> None:
    """The message has the reason, and no password."""
    with pytest.raises(LedgerError, match=message) as caught:
        Ledger(url)
    assert "secret" not in str(caught.value)


def test_the_default_ledger_is_in_the_state_directory(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """This holds without SKYWARD_LEDGER. A new directory is private."""
    monkeypatch.setenv("XDG_STATE_HOME", str(tmp_path))
    assert default_url({}) == f"sqlite:///{tmp_path}/skyward/ledger.db"
    assert default_url({"SKYWARD_LEDGER": "sqlite:////x.db"}) == "sqlite:////x.db"
    Ledger(default_url({})).close()
    assert (tmp_path / "skyward").stat().st_mode & 0o777 == 0o700


# ── attempts ─────────────────────────────────────────────────────────────────────────────────────────────────────────


def test_attempts_are_kept_in_their_order(ledger: Ledger, clock: Clock) -> None:
    """They can be read of one pool, since a time, or all. A code may have any length."""
    intend(ledger)
    (pool,) = ledger.pools()
    moments = [clock() + timedelta(seconds=seconds) for seconds in (5, 0)]
    later, sooner = (
        Attempt(
            pool.id,
            at,
            "aws",
            "us-east-1",
            "p5.48xlarge",
            is_spot=True,
            seconds=1.25,
            error="NoCapacity",
            code="I" * 200,
        )
        for at in moments
    )
    ledger.note_attempts([later, sooner])
    ledger.note_attempts([])
    assert ledger.attempts() == ledger.attempts(pool_id=pool.id) == [sooner, later]
    assert ledger.attempts(since=moments[0]) == [later]
    assert ledger.attempts(pool_id="sky-other") == []


def test_the_provider_of_a_dead_pool_cannot_change(ledger: Ledger) -> None:
    """A condemned pool keeps the provider of its machines."""
    intend(ledger)
    (pool,) = ledger.pools()
    ledger.condemn(pool.id, seen=pool.lease_expires_at)
    with pytest.raises(LeaseLost):
        ledger.turn_to(pool.id, {"name": "aws"}, "1234")
    with pytest.raises(LedgerConflict):
        ledger.turn_to("sky-unknown", {"name": "aws"}, "1234")


# ── the work of pools ────────────────────────────────────────────────────────────────────────────────────────────────

TRAIN = Work(system="airflow", workflow="nightly", run="manual__2026-11-22T07:00:00+00:00", task="train", attempt="1")


def pay(ledger: Ledger, pool_id: str, work: Work, usd: int) -> None:
    """Open a pool for this work, with two machines of this total cost."""
    ledger.open_pool(
        pool_id, owner=OWNER, provider={"name": "verda"}, spec_json="{}", lease_expires_at=LATER, work=work
    )
    price = Price(Decimal(usd) / 2)
    requests = [
        ResourceRequest(ResourceKind.INSTANCE, "verda", "FIN-01", f"{pool_id}-{n}", f"{pool_id}-{n}", {}, LATER, price)
        for n in range(2)
    ]
    intents = ledger.intend_all(pool_id, requests)
    ledger.bind_all({intent.id: f"{pool_id}-i-{intent.id}" for intent in intents})
    ledger.note_all({intent.id: {Bucket.RUNNING_CALLS: 3600.0} for intent in intents})


def bill(ledger: Ledger, by: CostBy, **which: object) -> dict[str, tuple[int, Decimal]]:
    return {row.key: (row.resources, row.cost_usd) for row in ledger.cost_rows(by, **which)}


def test_a_pool_is_recorded_with_its_work(ledger: Ledger) -> None:
    """Each field of the work finds the pool."""
    pay(ledger, "q", TRAIN, 2)
    assert {pool.id: pool.work for pool in ledger.pools()} == {"p": Work(), "q": TRAIN}
    assert bill(ledger, CostBy.POOL, work=Work(run=TRAIN.run, task="train")) == {"q": (2, Decimal(2))}
    assert bill(ledger, CostBy.POOL, work=Work(run=TRAIN.run, task="other")) == {}


def test_costs_add_up_by_run_task_and_asset(ledger: Ledger) -> None:
    """All attempts of a task count together, in all runs. Shares count for their work, the rest for the pool's own."""
    dagster = Work(system="dagster", workflow="job", run="r1")
    pay(ledger, "one", TRAIN, 2)
    pay(ledger, "two", replace(TRAIN, attempt="2"), 4)
    pay(ledger, "other-run", replace(TRAIN, run="r2"), 8)
    pay(ledger, "shared", dagster, 16)
    pay(ledger, "plain", Work(), 32)
    shares = {
        replace(dagster, task="a", asset="a"): Decimal("5.000001"),
        replace(dagster, task="b", asset="b"): Decimal(3),
    }
    ledger.set_shares("shared", {Work(task="before"): Decimal(1)})
    ledger.set_shares("shared", shares)
    assert ledger.shares("shared") == shares
    assert bill(ledger, CostBy.RUN) == {
        "airflow:nightly/manual__2026-11-22T07:00:00+00:00": (4, Decimal(6)),
        "airflow:nightly/r2": (2, Decimal(8)),
        "dagster:job/r1": (2, Decimal(16)),
        "(no run)": (2, Decimal(32)),
    }
    assert bill(ledger, CostBy.TASK) == {
        "airflow:nightly/train": (6, Decimal(14)),
        "dagster:job/a": (0, Decimal("5.000001")),
        "dagster:job/b": (0, Decimal(3)),
        "(no task)": (4, Decimal("39.999999")),
    }
    assert bill(ledger, CostBy.ASSET) == {
        "a": (0, Decimal("5.000001")),
        "b": (0, Decimal(3)),
        "(no asset)": (10, Decimal("53.999999")),
    }
    assert sum(row.seconds for row in ledger.cost_rows(CostBy.ASSET)) == pytest.approx(10 * 3600)


def test_shares_above_the_cost_are_reduced_in_proportion(ledger: Ledger) -> None:
    """Shares of a live pool may exceed its bill by rounding; the sum is still the bill."""
    pay(ledger, "q", TRAIN, 2)
    ledger.set_shares("q", {Work(asset="a"): Decimal(3), Work(asset="b"): Decimal(1)})
    assert bill(ledger, CostBy.ASSET) == {
        "a": (0, Decimal("1.5")),
        "b": (0, Decimal("0.5")),
        "(no asset)": (2, Decimal(0)),
    }


def test_a_share_is_not_negative_and_needs_its_pool(ledger: Ledger) -> None:
    """Negative shares and those of unknown pools are refused."""
    with pytest.raises(BadRequest, match="zero or more"):
        ledger.set_shares("p", {Work(): Decimal("-0.1")})
    with pytest.raises(LedgerConflict):
        ledger.set_shares("nonesuch", {})


# ── PostgreSQL only ──────────────────────────────────────────────────────────────────────────────────────────────────


@pytest.mark.slow
def test_a_database_without_an_encoding_works(postgresql_server: str) -> None:
    """A server that was set up with LC_ALL=C has such databases."""
    run_on(
        postgresql_server, "CREATE DATABASE ascii ENCODING 'SQL_ASCII' LC_COLLATE 'C' LC_CTYPE 'C' TEMPLATE template0"
    )
    try:
        with Ledger(postgresql_server.replace("/postgres?", "/ascii?")) as ledger:
            ledger.set_account(Account("Müller", Decimal(1), Period.DAY))
            assert [account.name for account in ledger.accounts()] == ["Müller"]
    finally:
        run_on(postgresql_server, "DROP DATABASE ascii WITH (FORCE)")


@pytest.mark.slow
def test_a_row_that_stays_locked_is_an_error(postgresql_url: str, clock: Clock) -> None:
    """A transaction that does not end causes an error, not an endless wait. Readers do not wait."""
    with Ledger(postgresql_url, clock=clock, busy_timeout_seconds=0.05) as impatient:
        open_pool(impatient, "p")
        holder = create_engine(postgresql_url)
        with holder.connect() as connection:
            connection.exec_driver_sql("SELECT * FROM skyward_pools FOR UPDATE")
            with pytest.raises(LedgerError, match=r"refuses \(SQLSTATE 55P03\)"):
                impatient.renew("p", LATER + timedelta(hours=1))
            assert len(impatient.pools()) == 1
        holder.dispose()
        impatient.renew("p", LATER + timedelta(hours=1))


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


@pytest.mark.slow
def test_on_a_server_concurrent_methods_neither_overdraw_nor_deadlock(postgresql_url: str, clock: Clock) -> None:
    """Three processes of six threads: no error, and each balance is the sum of its reservations.

    A balance exceeds the limit only by overspending.
    """
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


@pytest.mark.slow
def test_a_connection_that_the_server_has_closed_is_replaced(
    postgresql_server: str, postgresql_url: str, clock: Clock
) -> None:
    """A restart of the server between two calls causes no error."""
    with Ledger(postgresql_url, clock=clock) as ledger:
        open_pool(ledger, "p")
        run_on(
            postgresql_server,
            "SELECT pg_terminate_backend(pid) FROM pg_stat_activity WHERE starts_with(datname, 'ledger')",
        )
        assert [pool.id for pool in ledger.pools()] == ["p"]


# ── many rows ───────────────────────────────────────────────────────────────────────────────────────────────────────


MANY = examples(100_000)
"""Number of resources; they repeat every 5,000."""


@pytest.fixture(scope="module", params=["sqlite", "postgresql"])
def large(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Ledger]:
    """A ledger of 5,000 pools, 200 of them open, with `MANY` resources, a twenty-fifth of them open."""
    server = request.getfixturevalue("postgresql_server") if request.param == "postgresql" else ""
    if server:
        run_on(server, "CREATE DATABASE large")
    url = server.replace("/postgres?", "/large?") or f"sqlite:///{tmp_path_factory.mktemp('large')}/ledger.db"
    with Ledger(url, clock=Clock()) as ledger:
        open_pool(ledger, "0")
        intent = ledger.bind(
            intend(ledger, pool_id="0", price=Price(USD("2.345678"), USD("7.5"), increment_seconds=60)), "i-1"
        )
        ledger.note_all({intent.id: dict.fromkeys(Bucket, 0.1)})
        with ledger._database.write() as connection:
            pool = connection.exec_driver_sql("SELECT * FROM skyward_pools").mappings().one()
            if server:  # on a busy machine the rows take longer to make than the server waits for a transaction
                connection.exec_driver_sql("SET LOCAL idle_in_transaction_session_timeout = 0")
            connection.execute(POOLS.insert(), [another_pool(pool, number) for number in range(1, 5000)])
            resource = connection.exec_driver_sql("SELECT * FROM skyward_resources").mappings().one()
            for numbers in itertools.batched(range(2, MANY + 1), 5000):
                connection.execute(RESOURCES.insert(), [another_resource(resource, number) for number in numbers])
        yield ledger
    if server:
        run_on(server, "DROP DATABASE large WITH (FORCE)")


def another_pool(pool: Mapping[str, Any], number: int) -> dict[str, Any]:
    is_ended = number >= 200
    return {
        **pool,
        "id": str(number),
        "owner_user": f"user{number % 40}",
        "created_microseconds": pool["created_microseconds"] + number,
        "ended_microseconds": 1 if is_ended else None,
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


@pytest.mark.slow
@pytest.mark.generated
@pytest.mark.parametrize("by", CostBy)
def test_a_bill_of_many_resources_is_right(large: Ledger, by: CostBy) -> None:
    """It is checked with every key: `skyward cost`."""
    rows = large.cost_rows(by)
    # the first has a second less in each
    assert sum(row.seconds for row in rows) == pytest.approx(
        len(Bucket) * (MANY // 1000 * sum(range(1000)) + MANY * 0.1 - 1)
    )


@pytest.mark.slow
@pytest.mark.generated
@pytest.mark.parametrize(
    ("include_ended", "limit", "pools", "resources"),
    [(False, None, 200, MANY // 25), (True, None, 5000, MANY), (True, 50, 50, MANY // 100)],
)
def test_a_list_of_five_thousand_pools_is_right(
    large: Ledger, include_ended: bool, limit: int | None, pools: int, resources: int
) -> None:
    """It is checked for the open ones, for all, and for the newest: `skyward ps`."""
    rows = large.pool_rows(include_ended=include_ended, limit=limit)
    assert (len(rows), sum(row.resources for row in rows)) == (pools, resources)
    assert sum(row.open_resources for row in rows) == (0 if limit else MANY // 25)


@pytest.mark.slow
@pytest.mark.generated
def test_all_open_intents_are_found(large: Ledger) -> None:
    """They are found among twenty-five times as many, by the first query of a sweep."""
    intents = large.open_intents()
    assert len(intents) == MANY // 25


# ── owners and modes of files ────────────────────────────────────────────────────────────────────────────────────────


def modes(folder: Path) -> dict[str, int]:
    return {path.name: path.stat().st_mode & 0o777 for path in folder.iterdir()}


def test_the_files_of_a_ledger_are_private(tmp_path: Path) -> None:
    """This holds with any umask, and for the default folder."""
    before = os.umask(0)
    try:
        with Ledger(f"sqlite:///{tmp_path / 'new' / 'ledger.db'}") as ledger:
            ledger.set_account(Account("team", Decimal(1), Period.RUN))
            names = ("ledger.db", "ledger.db-wal", "ledger.db-shm", "ledger.db-queue")
            assert modes(tmp_path / "new") == dict.fromkeys(names, 0o600)
            assert (tmp_path / "new").stat().st_mode & 0o777 == 0o700
    finally:
        os.umask(before)


def test_a_ledger_that_others_could_read_becomes_private(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    """There is one warning, and no entry is lost. Only the default folder's mode changes too."""
    path = tmp_path / "ledger.db"
    with Ledger(f"sqlite:///{path}") as ledger, Ledger(f"sqlite:///{path}"):
        ledger.set_account(Account("team", Decimal(1), Period.RUN))
        for name in modes(tmp_path):
            (tmp_path / name).chmod(0o644)
        tmp_path.chmod(0o755)
        with caplog.at_level("WARNING"), Ledger(f"sqlite:///{path}") as again:
            assert [account.name for account in again.accounts()] == ["team"]
            assert set(modes(tmp_path).values()) == {0o600}
        with Ledger(f"sqlite:///{path}"):
            pass
    ours = [record.getMessage() for record in caplog.records if record.name.startswith("skyward")]
    assert ours == [f"other users could read the ledger {path} (mode 0644); its mode is 0600 now"]
    assert tmp_path.stat().st_mode & 0o777 == 0o755


def test_the_default_folder_is_private(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """An earlier version, or a wide umask, may have left it open."""
    monkeypatch.setenv("XDG_STATE_HOME", str(tmp_path))
    (tmp_path / "skyward").mkdir(mode=0o755)
    Ledger(default_url({})).close()
    assert (tmp_path / "skyward").stat().st_mode & 0o777 == 0o700


@pytest.mark.parametrize("mode", [0o777, 0o1777])
def test_a_ledger_in_a_folder_that_others_can_write_is_refused(tmp_path: Path, mode: int) -> None:
    """Others could put a journal file there, which SQLite would apply."""
    tmp_path.chmod(mode)
    with pytest.raises(LedgerError, match=rf"SKYWARD_LEDGER.*may be written to by everybody \(mode {mode:04o}\)"):
        Ledger(f"sqlite:///{tmp_path / 'ledger.db'}")
    assert modes(tmp_path) == {}


def test_the_locks_of_an_open_ledger_survive_another_open(tmp_path: Path) -> None:
    """A check of the file's mode must not open it, because a close drops all its locks (fcntl(2))."""
    path = tmp_path / "ledger.db"
    with closing(Database(f"sqlite:///{path}", lambda: NOON, 1.0)) as database, database.write():
        Ledger(f"sqlite:///{path}").close()
        code = f"import sqlite3; sqlite3.connect({str(path)!r}, timeout=0).execute('BEGIN IMMEDIATE')"
        done = subprocess.run([sys.executable, "-IS", "-c", code], capture_output=True, text=True, check=False)
    assert "database is locked" in done.stderr


def test_a_transaction_that_a_signal_interrupts_keeps_no_lock(tmp_path: Path) -> None:
    """The exception still exists while its handlers write, as after SIGTERM of a task."""
    with closing(Database(f"sqlite:///{tmp_path / 'ledger.db'}", lambda: NOON, 0.5)) as database:

        def interrupt(*_: object) -> None:
            event.remove(Engine, "after_cursor_execute", interrupt)
            raise KeyboardInterrupt

        with pytest.raises(KeyboardInterrupt) as caught, database.write() as connection:
            event.listen(Engine, "after_cursor_execute", interrupt)
            connection.exec_driver_sql("SELECT id FROM (SELECT 1 AS id UNION ALL SELECT 2)")  # a row remains to be read
        assert caught.value.__traceback__ is not None
        with database.write() as connection:
            connection.execute(POOLS.select())
