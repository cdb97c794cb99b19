"""The ledger in a file: its place, its modes and locks, its entries, and its bills when a row is damaged."""

import os
import re
import sqlite3
from collections.abc import Callable, Sequence
from contextlib import closing
from dataclasses import replace
from datetime import datetime, timedelta
from decimal import Decimal
from pathlib import Path
from typing import Any

import pytest
from sqlalchemy import Engine, event

from skyward_core.errors import BadRequest, LedgerError
from skyward_core.ledger import bills
from skyward_core.ledger.database import Database
from skyward_core.ledger.ledger import Ledger, default_url
from skyward_core.ledger.rows import Account, Bucket, CostBy, Period, Price, Pruned, Rented, ResourceKind, UnreadableRow
from skyward_core.ledger.tables import POOLS
from tests.ledger.fixtures import (  # noqa: F401 - tests of other folders take their fixtures from here
    LATER,
    NOON,
    PROVIDER,
    USD,
    Clock,
    clock,
    intend,
    ledger,
    open_pool,
    postgresql_server,
    postgresql_url,
    resource_request,
    run_on,
    sqlite_url,
    url,
)

HOURLY = Price(USD(3600), USD(7200))  # a dollar a second


def spend(ledger: Ledger, pool_id: str, token: str, seconds: float = 1) -> int:
    """Record a machine that has cost a dollar for each second."""
    number = ledger.bind(intend(ledger, token, pool_id, HOURLY), f"i-{token}").id
    ledger.note_all({number: {Bucket.IDLE: seconds}})
    return number


@pytest.mark.parametrize("kind", ["key pair", "volume", "other"])
def test_entries_of_earlier_kinds_can_be_read(file_ledger: Ledger, sqlite_url: str, kind: str) -> None:
    """Earlier versions had kinds that this one does not create: their rows stay readable, and are not machines."""
    intend(file_ledger)
    run_on(sqlite_url, f"UPDATE skyward_resources SET kind = '{kind}'")
    assert [its.kind for its in file_ledger.open_intents()] == [ResourceKind.OTHER]


def test_a_reader_blocks_no_writer_and_a_writer_that_stays_is_an_error(file_ledger: Ledger, tmp_path: Path) -> None:
    """The error names the writer as the cause. Readers do not wait, and later writers work."""
    with closing(sqlite3.connect(tmp_path / "state/ledger.db", isolation_level=None)) as raw:
        raw.execute("BEGIN")
        assert raw.execute("SELECT count(*) FROM skyward_resources").fetchone() == (0,)
        with Ledger(str(file_ledger.url), busy_timeout_seconds=0) as impatient:
            intend(impatient)
        assert raw.execute("SELECT count(*) FROM skyward_resources").fetchone() == (0,)
        raw.execute("ROLLBACK")
        raw.execute("BEGIN IMMEDIATE")
        with Ledger(str(file_ledger.url), busy_timeout_seconds=0.05) as impatient:
            with pytest.raises(LedgerError, match=r"ledger\.db is locked: this process"):
                intend(impatient, "t2")
            assert len(impatient.intents()) == 1
            raw.execute("ROLLBACK")
            intend(impatient, "t2")
    assert len(file_ledger.intents()) == 2


@pytest.mark.parametrize(
    "use",
    [lambda ledger: ledger.left_usd("team", "p"), lambda ledger: ledger.reserve("team", "p", USD(1))],
    ids=["read", "write"],
)
def test_closing_a_ledger_in_use_closes_every_connection(
    tmp_path: Path, clock: Clock, use: Callable[[Ledger], object]
) -> None:
    """Also the one that another thread uses meanwhile, and one that is used later. The methods do their work."""
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
        for closes in (True, False):
            use(ledger)
            assert connections() == 0


def test_a_file_that_was_named_by_mistake_keeps_its_mode(tmp_path: Path) -> None:
    path = tmp_path / "results.csv"
    path.write_text("day,usd\n")
    path.chmod(0o644)
    with pytest.raises(LedgerError, match="is damaged, or no ledger"):
        Ledger(f"sqlite:///{path}")
    assert path.stat().st_mode & 0o777 == 0o644


@pytest.mark.parametrize("garbage", [b"not a database at all" * 100, b"SQLite format 3\0" + b"\x5a" * 5000])
def test_a_garbage_file_is_refused_and_not_changed(tmp_path: Path, garbage: bytes) -> None:
    path = tmp_path / "ledger.db"
    path.write_bytes(garbage)
    with pytest.raises(LedgerError, match=r"is damaged, or no ledger\. Move it away"):
        Ledger(f"sqlite:///{path}")
    assert path.read_bytes() == garbage


@pytest.mark.parametrize(
    ("url", "message"),
    [
        ("ledger.db", "is no URL"),
        ("mysql://host/x", "SQLite or PostgreSQL, not in mysql"),
        ("sqlite://", "lost with its process"),
        ("postgresql+nothing://ada:secret@host/x", "driver for .*is not installed"),
        ("postgresql+psycopg://ada:secret@127.0.0.1:9/x", "is not installed|cannot be reached"),
        (f"sqlite:///{__file__}/ledger.db", "Check the path"),
        ("postgresql+psycopg://ada:secret@host:54 32/x", r"^postgresql\+psycopg://\*\*\* is no URL"),
        ("postgresql+psycopg://ada:se@cret@host:port/x", "is no URL.*%40 for @"),
        ("postgresql+psycopg://ada:x@secret@host/x", "is no URL.*%40 for @"),
        ("postgresql+psycopg://ada:secret/x", "is no URL"),
        ("host=db user=ada password=secret", "is no URL"),
        ("postgresql+nothing://host/x?user=ada&password=secret&sslpassword=secret", "driver for .*is not installed"),
        ("postgresql+psycopg://127.0.0.1:9/x?password=secret", "is not installed|cannot be reached"),
    ],
)
def test_a_wrong_url_is_an_error(url: str, message: str) -> None:
    """The message has the reason, and no password; nor has what was raised before it."""
    with pytest.raises(LedgerError, match=message) as caught:
        Ledger(url)
    error: BaseException | None = caught.value
    while error is not None:
        assert not {"secret", "cret"} & set(re.findall("se?cret|cret", f"{error} {error!r}"))
        error = error.__cause__ or error.__context__


def modes(folder: Path) -> dict[str, int]:
    return {path.name: path.stat().st_mode & 0o777 for path in folder.iterdir()}


def test_the_default_ledger_is_in_the_state_directory(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """A new folder is private; so is one that an earlier version, or a wide umask, has left open."""
    monkeypatch.setenv("XDG_STATE_HOME", str(tmp_path / "not/there/yet"))
    folder = tmp_path / "not/there/yet/skyward"
    assert default_url({}) == f"sqlite:///{folder}/ledger.db"
    assert default_url({"SKYWARD_LEDGER": "sqlite:////x.db"}) == "sqlite:////x.db"
    for mode in (0o700, 0o755):
        folder.mkdir(mode=mode, parents=True, exist_ok=True)
        folder.chmod(mode)
        Ledger(default_url({})).close()
        assert folder.stat().st_mode & 0o777 == 0o700


def test_the_files_of_a_ledger_are_private(tmp_path: Path) -> None:
    """With any umask."""
    before = os.umask(0)
    try:
        with Ledger(f"sqlite:///{tmp_path / 'new' / 'ledger.db'}") as ledger:
            ledger.set_account(Account("team", USD(1), Period.RUN))
            names = ("ledger.db", "ledger.db-wal", "ledger.db-shm", "ledger.db-queue")
            assert modes(tmp_path / "new") == dict.fromkeys(names, 0o600)
            assert (tmp_path / "new").stat().st_mode & 0o777 == 0o700
    finally:
        os.umask(before)


def test_a_ledger_that_others_could_read_becomes_private(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    """There is one warning, and no entry is lost. Only the default folder's mode changes too."""
    path = tmp_path / "ledger.db"
    with Ledger(f"sqlite:///{path}") as ledger, Ledger(f"sqlite:///{path}"):
        ledger.set_account(Account("team", USD(1), Period.RUN))
        for name in modes(tmp_path):
            (tmp_path / name).chmod(0o644)
        tmp_path.chmod(0o755)
        with caplog.at_level("WARNING"), Ledger(f"sqlite:///{path}") as again:
            assert [account.name for account in again.accounts()] == ["team"]
            assert set(modes(tmp_path).values()) == {0o600}
        Ledger(f"sqlite:///{path}").close()
    ours = [record.getMessage() for record in caplog.records if record.name.startswith("skyward")]
    assert ours == [f"other users could read the ledger {path} (mode 0644); its mode is 0600 now"]
    assert tmp_path.stat().st_mode & 0o777 == 0o755


@pytest.mark.parametrize("mode", [0o777, 0o1777])
def test_a_ledger_in_a_folder_that_others_can_write_is_refused(tmp_path: Path, mode: int) -> None:
    """Others could put a journal file there, which SQLite would apply."""
    tmp_path.chmod(mode)
    with pytest.raises(LedgerError, match=rf"SKYWARD_LEDGER.*may be written to by everybody \(mode {mode:04o}\)"):
        Ledger(f"sqlite:///{tmp_path / 'ledger.db'}")
    assert modes(tmp_path) == {}


@pytest.mark.parametrize(("mode", "is_good"), [(0o755, True), (0o1777, True), (0o777, False)])
@pytest.mark.parametrize("below", ["b", "not/there/yet"])
def test_no_folder_above_a_ledger_can_be_renamed_by_others(
    tmp_path: Path, mode: int, is_good: bool, below: str
) -> None:
    """After a rename the next command would begin an empty ledger. In a sticky folder only owners rename."""
    above = tmp_path / "above"
    above.mkdir()
    (above / "b").mkdir(mode=0o700)
    above.chmod(mode)
    (tmp_path / "link").symlink_to(above)
    for start in (above, tmp_path / "link"):
        url = f"sqlite:///{start}/{below}/ledger.db"
        if is_good:
            Ledger(url).close()
        else:
            with pytest.raises(LedgerError, match=rf"SKYWARD_LEDGER.*{above} may be written to by everybody"):
                Ledger(url)
    assert [path.name for path in above.rglob("*.db")] == ["ledger.db"] * is_good


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


@pytest.mark.parametrize(
    "price", [Price(increment_seconds=0), Price(minimum_seconds=-1), Price(minimum_usd=USD("-0.01"))]
)
def test_impossible_billing_rules_are_refused(file_ledger: Ledger, price: Price) -> None:
    """A second, no minimum and no lowest cost are possible, and an on-demand price of zero."""
    with pytest.raises(BadRequest, match="billing increment"):
        intend(file_ledger, price=price)
    assert file_ledger.intents() == []
    smallest = Price(increment_seconds=1, minimum_seconds=0, minimum_usd=USD(0), on_demand_per_hour=USD(0))
    assert intend(file_ledger, price=smallest).price == smallest
    assert intend(file_ledger, "t2", price=Price(USD(2))).price.on_demand_per_hour == 2


def test_an_entry_that_is_gone_is_not_asked_to_end(file_ledger: Ledger) -> None:
    one, other = intend(file_ledger, "a"), intend(file_ledger, "b")
    file_ledger.close_all([one.id], "404")
    asked = file_ledger.ask_end_all([other.id, one.id])
    assert [(its.id, its.end_asked_at) for its in asked] == [(other.id, NOON), (one.id, None)]


def test_what_was_rented_replaces_the_price_and_the_tags(file_ledger: Ledger) -> None:
    """A lower price replaces the entry's, a higher one does not. Tags are added. Later calls change nothing."""
    cheap, dear, same = (intend(file_ledger, token, price=Price(USD(2), USD(3))) for token in "abc")
    ids = {cheap.id: "i-1", dear.id: "i-2", same.id: "i-3"}
    rented = {cheap.id: Rented(USD(1), {"skyward-rank": "7", "more": "x"}), dear.id: Rented(USD(4))}
    bound = file_ledger.bind_all(ids, rented)
    assert [its.price.per_hour for its in bound] == [1, 2, 2]
    assert [its.price.on_demand_per_hour for its in bound] == [3, 3, 3]
    assert bound[0].tags == {**cheap.tags, "skyward-rank": "7", "more": "x"}
    assert [its.tags for its in bound[1:]] == [dear.tags, same.tags]
    assert file_ledger.bind_all(ids, {cheap.id: Rented(USD("0.5"))}) == bound == file_ledger.intents()


def test_entries_are_listed_by_pool_and_provider(file_ledger: Ledger) -> None:
    """Open and closed, oldest first."""
    open_pool(file_ledger, "q")
    ours, theirs = intend(file_ledger, "a"), intend(file_ledger, "b", "q")
    elsewhere = file_ledger.intend("p", replace(resource_request("c"), provider="aws"))
    (ours,) = file_ledger.close_all([ours.id], "404")
    assert file_ledger.intents() == [ours, theirs, elsewhere]
    assert file_ledger.intents(pool_id="p") == [ours, elsewhere]
    assert file_ledger.intents(provider="verda") == [ours, theirs]
    assert file_ledger.intents(pool_id="p", provider="aws") == [elsewhere]
    assert file_ledger.open_intents(pool_id="p") == [elsewhere]
    assert file_ledger.open_intents(provider="verda") == [theirs]


def test_a_row_without_numbers_is_left_out_of_its_own_bill_only(file_ledger: Ledger, sqlite_url: str) -> None:
    """It is named in the bills that would have it, with its pool. All other rows are billed."""
    open_pool(file_ledger, "q")
    spend(file_ledger, "p", "a", 2)
    damaged = spend(file_ledger, "q", "b", 3)
    run_on(sqlite_url, f"UPDATE skyward_resources SET price_micro_usd_per_hour = '3600000000 USD' WHERE id = {damaged}")
    for by in (CostBy.POOL, CostBy.RESOURCE, CostBy.BUCKET, CostBy.TASK):
        unreadable: list[UnreadableRow] = []
        assert sum(row.cost_usd for row in file_ledger.cost_rows(by, unreadable=unreadable)) == 2
        (error,) = unreadable
        assert (error.pool_id, error.is_pool) == ("q", False)
        assert f"row {damaged} of skyward_resources in the ledger cannot be read (pool 'q')" in str(error)
    unreadable = []
    assert [row.key for row in file_ledger.cost_rows(pool_id="p", unreadable=unreadable)] == ["p"]
    assert unreadable == []


def test_lists_survive_damaged_sums_and_days(file_ledger: Ledger, sqlite_url: str) -> None:
    """A sum that is no number counts as zero. The cost counts all the same on a day that no calendar has."""
    spend(file_ledger, "p", "a")
    run_on(sqlite_url, f"UPDATE skyward_resources SET intended_microseconds = {5_000_000 * 86_400_000_000 + 1}")
    (day,) = file_ledger.cost_rows(CostBy.DAY)
    assert (day.key, day.cost_usd) == ("day 5000000 after 1970-01-01", 1)
    run_on(sqlite_url, "UPDATE skyward_resources SET idle_milliseconds = 1e999")
    (row,) = file_ledger.pool_rows()
    assert (row.open_resources, row.resources, row.seconds) == (1, 1, 0)


def test_the_newest_pools_of_one_moment_are_chosen_by_their_ids(file_ledger: Ledger) -> None:
    for pool_id in ("a", "z"):
        open_pool(file_ledger, pool_id)
        spend(file_ledger, pool_id, pool_id)
    assert [row.entry.id for row in file_ledger.pool_rows()] == ["a", "p", "z"]
    assert [(row.entry.id, row.cost_usd) for row in file_ledger.pool_rows(limit=2)] == [("p", 0), ("z", 1)]


def test_a_bill_has_the_intents_of_its_time_only(file_ledger: Ledger, clock: Clock) -> None:
    """From the first time on, and before the last one."""
    for minutes in range(3):
        clock.time = NOON + timedelta(minutes=minutes)
        spend(file_ledger, "p", f"t{minutes}", 10**minutes)
    minute = timedelta(minutes=1)
    (row,) = file_ledger.cost_rows(since=NOON + minute, until=NOON + 2 * minute)
    assert (row.resources, row.seconds, row.cost_usd, row.on_demand_usd, row.saved_usd) == (1, 10, 10, 20, 10)
    assert sum(row.resources for row in file_ledger.cost_rows(CostBy.BUCKET, since=LATER)) == 0


def test_a_pool_that_ended_at_the_given_time_is_not_pruned(file_ledger: Ledger, sqlite_url: str, clock: Clock) -> None:
    """Only an earlier end counts. Damaged tags stay as they are."""
    number = spend(file_ledger, "p", "a")
    file_ledger.close_all([number], "404")
    file_ledger.end_pool("p")
    run_on(sqlite_url, "UPDATE skyward_resources SET tags_json = '[damaged'")
    clock.time = LATER
    assert file_ledger.prune(NOON, is_dry_run=False) == Pruned(0, 0, 0)
    assert file_ledger.prune(LATER, is_dry_run=False) == Pruned(1, 0, 0)
    unreadable: list[UnreadableRow] = []
    assert file_ledger.intents(unreadable=unreadable) == []
    assert "JSONDecodeError" in str(unreadable[0])
    assert [row.cost_usd for row in file_ledger.cost_rows()] == [1]


def test_others_write_while_old_pools_are_pruned(
    file_ledger: Ledger, sqlite_url: str, clock: Clock, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Each few pools have a transaction. A prune that is killed is gone on with by the next one; none counts twice."""
    for pool_id in ("p", "q", "r"):
        if file_ledger.pool(pool_id) is None:
            open_pool(file_ledger, pool_id)
        file_ledger.close_all([spend(file_ledger, pool_id, pool_id)], "404")
        file_ledger.end_pool(pool_id)
    clock.time = LATER
    monkeypatch.setattr(bills, "POOLS_PER_PRUNING", 1)
    keep_parts, begun = bills._keep_parts, list[str]()

    def write_between(connection: Any, pool_ids: Sequence[str]) -> None:
        begun.extend(pool_ids)
        if pool_ids == ["q"]:
            raise LedgerError("killed")
        keep_parts(connection, pool_ids)

    monkeypatch.setattr(bills, "_keep_parts", write_between)
    with pytest.raises(LedgerError, match="killed"):
        file_ledger.prune(LATER, is_dry_run=False)
    assert begun == ["p", "q"]
    assert file_ledger.prune(LATER).pools == 2
    monkeypatch.setattr(bills, "_keep_parts", keep_parts)
    assert file_ledger.prune(LATER, is_dry_run=False).pools == 2
    assert file_ledger.prune(LATER).pools == 0


@pytest.mark.parametrize("limit", [Decimal(-1), Decimal("inf"), Decimal("nan"), Decimal(10) ** 13, True, 5.0, "5"])
def test_the_limit_of_an_account_is_an_amount(file_ledger: Ledger, limit: Any) -> None:
    with pytest.raises(BadRequest, match="it is an amount in USD"):
        file_ledger.set_account(Account("team", limit, Period.MONTH))
    assert file_ledger.accounts() == []
