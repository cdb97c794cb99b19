"""The ledger's database: its tables and their versions, what a row means, how a database is opened, and what to try
when it refuses.

Money is stored as whole micro-dollars and handed out as `Decimal`: sums of integers are exact in whatever order they
are made and on both databases; binary floats are not, and SQLite has no decimals. A price has at most six places after
rounding up, a cost is rounded up once for each resource. Times are UTC, stored as whole microseconds since 1970: SQLite
keeps no zone.
"""

from __future__ import annotations

import functools
import json
import logging
import os
import time
from collections.abc import Callable, Generator, Iterable, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import fields
from datetime import UTC, datetime, timedelta
from decimal import Decimal
from pathlib import Path
from stat import S_IMODE, S_ISREG
from types import MappingProxyType
from typing import Any, cast

from platformdirs import user_state_path
from sqlalchemy import (
    URL,
    BigInteger,
    Boolean,
    Column,
    Connection,
    Engine,
    ForeignKey,
    Index,
    Integer,
    MetaData,
    String,
    Table,
    Text,
    create_engine,
    event,
    func,
    insert,
    inspect,
    make_url,
    select,
    text,
    update,
)
from sqlalchemy.engine import ExceptionContext
from sqlalchemy.exc import ArgumentError, DBAPIError, IntegrityError, NoSuchModuleError, SQLAlchemyError
from sqlalchemy.pool import PoolProxiedConnection

from skyward_core.errors import BadRequest, LedgerConflict, LedgerError
from skyward_core.ledger.rows import (
    MICRO_USD,
    Account,
    Attempt,
    Bucket,
    Intent,
    Period,
    PoolEntry,
    Price,
    Reservation,
    ResourceKind,
    UnreadableRow,
)
from skyward_core.machines.offers import Extra
from skyward_core.machines.owner import Owner
from skyward_core.work import WORK_CHARACTERS, Work
from skyward_core.worker.private_folders import NotPrivate, make_file, other_writers

CONNECT_TIMEOUT_SECONDS = 10
BESIDE = ("-wal", "-shm", "-journal")
"""Endings of the files that SQLite keeps beside a database; it makes them with the mode of that one
(sqlite.org/wal.html).
"""
MIGRATION_LOCK = 0x736B7977617264  # "skyward": the advisory lock under which a PostgreSQL schema is made
_log = logging.getLogger("skyward")
_EPOCH = datetime(1970, 1, 1, tzinfo=UTC)

# ── schema ───────────────────────────────────────────────────────────────────────────────────────────────────────────
# Names begin with skyward_: a team may point SKYWARD_LEDGER at a database that holds other things too.

_ID = BigInteger().with_variant(Integer, "sqlite")  # SQLite numbers rows by itself in INTEGER PRIMARY KEY only
_METADATA = MetaData()

META = Table(
    "skyward_meta", _METADATA, Column("name", String(64), primary_key=True), Column("value", String(64), nullable=False)
)

WORK_COLUMNS = tuple(f"work_{field.name}" for field in fields(Work))
"""What a pool, or a share of its cost, is for: one column for each field of Work."""


def _work_columns() -> list[Column[Any]]:
    return [Column(name, String(WORK_CHARACTERS), nullable=False, server_default="") for name in WORK_COLUMNS]


POOLS = Table(
    "skyward_pools",
    _METADATA,
    Column("id", String(255), primary_key=True),
    Column("owner_user", String(255), nullable=False),
    Column("owner_host", String(255), nullable=False),
    Column("owner_process", String(255), nullable=False),
    Column("provider_json", Text, nullable=False),
    Column("spec_json", Text, nullable=False),
    # no foreign key: a pool whose account nobody has made is refused when it reserves, with words of its own
    Column("account", String(255)),
    Column("created_microseconds", BigInteger, nullable=False),
    Column("lease_expires_microseconds", BigInteger, nullable=False),
    Column("lives_by_lease", Boolean, nullable=False),
    Column("condemned_microseconds", BigInteger),
    Column("ended_microseconds", BigInteger),
    Column("provider_account", String(255), nullable=False, server_default=""),  # since version 2
    *_work_columns(),  # since version 3
)
Index("skyward_pools_by_run", POOLS.c.work_run)


def milliseconds_of(bucket: Bucket) -> str:
    """Return the name of a bucket's column."""
    return f"{bucket.name.lower()}_milliseconds"


RESOURCES = Table(
    "skyward_resources",
    _METADATA,
    Column("id", _ID, primary_key=True),
    Column("pool_id", ForeignKey(POOLS.c.id), nullable=False, index=True),
    Column("kind", String(32), nullable=False),
    Column("provider", String(64), nullable=False),
    Column("region", String(64), nullable=False),
    Column("name", String(255), nullable=False),
    Column("token", String(255), nullable=False, unique=True),
    Column("tags_json", Text, nullable=False),
    Column("price_micro_usd_per_hour", BigInteger, nullable=False),
    Column("on_demand_micro_usd_per_hour", BigInteger, nullable=False),
    Column("is_spot", Boolean, nullable=False),
    Column("increment_seconds", BigInteger, nullable=False),
    Column("minimum_seconds", BigInteger, nullable=False),
    Column("intended_microseconds", BigInteger, nullable=False),
    Column("expires_microseconds", BigInteger, nullable=False),
    Column("cloud_id", String(255)),
    Column("bound_microseconds", BigInteger),
    Column("end_asked_microseconds", BigInteger),
    Column("gone_microseconds", BigInteger),
    Column("evidence", Text),
    *(Column(milliseconds_of(bucket), BigInteger, nullable=False, server_default="0") for bucket in Bucket),
    # where a close has put the seconds that nobody had noted, and how many of that bucket's those are
    Column("filled_bucket", String(32)),
    Column("filled_milliseconds", BigInteger, nullable=False, server_default="0"),
    Column("minimum_micro_usd", BigInteger, nullable=False, server_default="0"),  # since version 4
    # since version 4: what of the price is billed beside the machine
    Column("extras_json", Text, nullable=False, server_default="[]"),
)
IS_OPEN = RESOURCES.c.gone_microseconds.is_(None)
Index("skyward_resources_open", RESOURCES.c.id, sqlite_where=IS_OPEN, postgresql_where=IS_OPEN)

ACCOUNTS = Table(
    "skyward_accounts",
    _METADATA,
    Column("name", String(255), primary_key=True),
    Column("limit_micro_usd", BigInteger, nullable=False),
    Column("period", String(16), nullable=False),
)

RESERVATIONS = Table(
    "skyward_reservations",
    _METADATA,
    Column("id", _ID, primary_key=True),
    Column("account", ForeignKey(ACCOUNTS.c.name), nullable=False, index=True),
    Column("pool_id", ForeignKey(POOLS.c.id), nullable=False, index=True),
    Column("scope", String(300), nullable=False),
    Column("reserved_micro_usd", BigInteger, nullable=False),
    Column("made_microseconds", BigInteger, nullable=False),
    Column("settled_microseconds", BigInteger),
    Column("spent_micro_usd", BigInteger),
)

# What is reserved and spent, for each account and scope: a month of reservations is millions of rows, and their sum
# would be made under a lock.
BALANCES = Table(
    "skyward_balances",
    _METADATA,
    Column("account", ForeignKey(ACCOUNTS.c.name), primary_key=True),
    Column("scope", String(300), primary_key=True),
    Column("committed_micro_usd", BigInteger, nullable=False),
)

# Since version 2: what became of each try to rent machines, for `skyward why` and for putting aside what fails again
# and again.
ATTEMPTS = Table(
    "skyward_attempts",
    _METADATA,
    Column("id", _ID, primary_key=True),
    Column("pool_id", ForeignKey(POOLS.c.id), nullable=False, index=True),
    Column("at_microseconds", BigInteger, nullable=False, index=True),
    Column("provider", String(64), nullable=False),
    Column("region", String(64), nullable=False),
    Column("instance_type", String(255), nullable=False),
    Column("is_spot", Boolean, nullable=False),
    Column("milliseconds", BigInteger, nullable=False),
    Column("error", String(64), nullable=False),
    Column("code", String(255), nullable=False),
    Column("message", Text, nullable=False),
)

# Since version 3: what parts of a pool's cost are for, where several tasks use it. The rest is for the work of the pool
# itself.
SHARES = Table(
    "skyward_shares",
    _METADATA,
    Column("id", _ID, primary_key=True),
    Column("pool_id", ForeignKey(POOLS.c.id), nullable=False, index=True),
    *_work_columns(),
    Column("micro_usd", BigInteger, nullable=False),
)

type Migration = Callable[[Connection], None]
"""Moves a schema one version up, within the transaction that it is given."""


def _to_version_2(connection: Connection) -> None:
    """Attempts, and whose account a pool's machines are in. The first step makes all of it for a new ledger."""
    if POOLS.c.provider_account.name not in {column["name"] for column in inspect(connection).get_columns(POOLS.name)}:
        connection.execute(
            text(f"ALTER TABLE {POOLS.name} ADD COLUMN provider_account VARCHAR(255) DEFAULT '' NOT NULL")
        )
    ATTEMPTS.create(connection, checkfirst=True)


def _to_version_3(connection: Connection) -> None:
    """What pools and shares of their costs are for."""
    there = {column["name"] for column in inspect(connection).get_columns(POOLS.name)}
    for name in WORK_COLUMNS:
        if name not in there:
            connection.execute(
                text(f"ALTER TABLE {POOLS.name} ADD COLUMN {name} VARCHAR({WORK_CHARACTERS}) DEFAULT '' NOT NULL")
            )
    for index in POOLS.indexes:
        index.create(connection, checkfirst=True)
    SHARES.create(connection, checkfirst=True)


def _to_version_4(connection: Connection) -> None:
    """What is paid at least, and what is billed beside a machine."""
    there = {column["name"] for column in inspect(connection).get_columns(RESOURCES.name)}
    for name, kind in (
        ("minimum_micro_usd", "BIGINT DEFAULT 0 NOT NULL"),
        ("extras_json", "TEXT DEFAULT '[]' NOT NULL"),
    ):
        if name not in there:
            connection.execute(text(f"ALTER TABLE {RESOURCES.name} ADD COLUMN {name} {kind}"))


MIGRATIONS: tuple[Migration, ...] = (_METADATA.create_all, _to_version_2, _to_version_3, _to_version_4)
"""The step from each version to the next; 0 is a database without our tables, which the first step brings to the
newest: later ones find it done.
"""


def migrate(connection: Connection, steps: Sequence[Migration] = MIGRATIONS) -> None:
    """Bring the schema up to the version that `steps` lead to, within the connection's transaction.

    Raises LedgerError if it is newer than that.
    """
    if connection.dialect.name == "postgresql":
        connection.execute(select(func.pg_advisory_xact_lock(MIGRATION_LOCK)))
    version = schema_version(connection)
    if version > len(steps):
        raise LedgerError(
            f"The ledger at {connection.engine.url!r} has version {version}; this release of skyward-core knows"
            f" {len(steps)}. Use the newer release, or another ledger (SKYWARD_LEDGER)."
        )
    if version == len(steps):
        return
    for step in steps[version:]:
        step(connection)
    if connection.execute(update(META).where(META.c.name == "version").values(value=str(len(steps)))).rowcount == 0:
        connection.execute(insert(META).values(name="version", value=str(len(steps))))


def schema_version(connection: Connection) -> int:
    """Return the version of the schema; 0 where there is none."""
    if not inspect(connection).has_table(META.name):
        return 0
    version = connection.execute(select(META.c.value).where(META.c.name == "version")).scalar()
    if version is None:
        return 0
    if not (str(version).isascii() and str(version).isdecimal()):
        raise LedgerError(
            f"The ledger at {connection.engine.url!r} says that it has version {version!r}, which is none: it is"
            f" damaged, or not skyward's. Name another ledger (SKYWARD_LEDGER), or set the right number in {META.name};"
            f" this release of skyward-core writes {len(MIGRATIONS)}."
        )
    return int(version)


# ── rows into values ─────────────────────────────────────────────────────────────────────────────────────────────────

type Values = Mapping[Any, Any]
"""A row, by the names of its columns."""


def read_rows[T](
    rows: Iterable[Values], read: Callable[[Values], T], unreadable: list[UnreadableRow] | None = None
) -> list[T]:
    """Read rows one by one; those that mean nothing go into `unreadable`, or are raised if there is no such list."""
    found: list[T] = []
    for row in rows:
        try:
            found.append(read(row))
        except UnreadableRow as error:
            if unreadable is None:
                raise
            unreadable.append(error)
    return found


def _refuse_bytes(row: Values) -> None:
    """Raise TypeError for bytes, which SQLite keeps in a column of any type."""
    if columns := [column for column, value in row.items() if isinstance(value, bytes)]:
        raise TypeError(f"bytes in {', '.join(columns)}")


def _reader[T](
    table: Table, key: str = "id", pool: str = "pool_id"
) -> Callable[[Callable[[Values], T]], Callable[[Values], T]]:
    """Let a function that reads a row of a table raise UnreadableRow for what means nothing."""

    def decorate(read: Callable[[Values], T]) -> Callable[[Values], T]:
        @functools.wraps(read)
        def checked(row: Values) -> T:
            try:
                _refuse_bytes(row)
                return read(row)
            except (ValueError, TypeError, KeyError, AttributeError, ArithmeticError) as error:
                raise UnreadableRow(
                    table.name, row[key], str(row.get(pool, "")), f"{type(error).__name__}: {error}"
                ) from error

        return checked

    return decorate


@_reader(POOLS, pool="id")
def pool_of(row: Values) -> PoolEntry:
    """Return the pool of a row of POOLS.

    Raises UnreadableRow; of an owner that cannot be read only the name is known.
    """
    owner, trouble = _owner_of(row)
    return PoolEntry(
        id=row["id"],
        owner=owner,
        provider=_provider_of(row["provider_json"]),
        spec_json=row["spec_json"],
        created_at=moment(row["created_microseconds"]),
        lease_expires_at=moment(row["lease_expires_microseconds"]),
        lives_by_lease=row["lives_by_lease"],
        account=row["account"],
        condemned_at=moment_or_none(row["condemned_microseconds"]),
        ended_at=moment_or_none(row["ended_microseconds"]),
        provider_account=row["provider_account"],
        work=work_of(row),
        trouble=trouble,
    )


def work_of(row: Values) -> Work:
    """Return the work of a row of POOLS or SHARES."""
    return Work(*(row[name] for name in WORK_COLUMNS))


def work_values(work: Work) -> dict[str, str]:
    """Return a work as values of columns."""
    return {name: getattr(work, name.removeprefix("work_")) for name in WORK_COLUMNS}


def _owner_of(row: Values) -> tuple[Owner, str]:
    name = f"{row['owner_user']}@{row['owner_host']}"
    try:
        return Owner.parse(name, row["owner_process"]), ""
    except (ValueError, AttributeError):
        return (
            Owner.unknown(name),
            f"its owner's process, {row['owner_process']!r}, cannot be read: only its lease tells whether it lives",
        )


def _provider_of(text: str) -> Mapping[str, Any]:
    """A provider as plain data. Raises ValueError for what is none."""
    found = json.loads(text)
    if not isinstance(found, dict):
        raise ValueError(f"{text!r} is no provider")  # noqa: TRY004 - as `json.loads` says of what it cannot read
    return cast("Mapping[str, Any]", found)


@_reader(ATTEMPTS)
def attempt_of(row: Values) -> Attempt:
    """Return the attempt of a row of ATTEMPTS with the `spec_json` of its pool."""
    return Attempt(
        pool_id=row["pool_id"],
        at=moment(row["at_microseconds"]),
        provider=row["provider"],
        region=row["region"],
        instance_type=row["instance_type"],
        is_spot=row["is_spot"],
        seconds=row["milliseconds"] / 1000,
        error=row["error"],
        code=row["code"],
        message=row["message"],
        nodes=json.loads(row["spec_json"]).get("nodes", 1),
    )


_EARLIER_KINDS = frozenset({"key pair", "security group", "image", "volume", "fleet"})
"""Kinds of resources that earlier versions could write and this version does not."""


@_reader(RESOURCES)
def intent_of(row: Values) -> Intent:
    """Return the intent of a row of RESOURCES."""
    return Intent(
        id=row["id"],
        pool_id=row["pool_id"],
        kind=ResourceKind.OTHER if row["kind"] in _EARLIER_KINDS else ResourceKind(row["kind"]),
        provider=row["provider"],
        region=row["region"],
        name=row["name"],
        token=row["token"],
        tags=MappingProxyType(json.loads(row["tags_json"])),
        price=Price(
            in_usd(row["price_micro_usd_per_hour"]),
            in_usd(row["on_demand_micro_usd_per_hour"]),
            row["is_spot"],
            row["increment_seconds"],
            row["minimum_seconds"],
            in_usd(row["minimum_micro_usd"]),
            tuple(Extra(**extra) for extra in json.loads(row["extras_json"])),
        ),
        intended_at=moment(row["intended_microseconds"]),
        expires_at=moment(row["expires_microseconds"]),
        cloud_id=row["cloud_id"],
        bound_at=moment_or_none(row["bound_microseconds"]),
        end_asked_at=moment_or_none(row["end_asked_microseconds"]),
        gone_at=moment_or_none(row["gone_microseconds"]),
        evidence=row["evidence"],
        seconds=MappingProxyType({bucket: int(row[milliseconds_of(bucket)]) / 1000 for bucket in Bucket}),
    )


@_reader(ACCOUNTS, key="name")
def account_of(row: Values) -> Account:
    """Return the account of a row of ACCOUNTS."""
    return Account(row["name"], in_usd(row["limit_micro_usd"]), Period(row["period"]))


@_reader(RESERVATIONS)
def reservation_of(row: Values) -> Reservation:
    """Return the reservation of a row of RESERVATIONS."""
    return Reservation(
        id=row["id"],
        account=row["account"],
        pool_id=row["pool_id"],
        scope=row["scope"],
        reserved_usd=in_usd(row["reserved_micro_usd"]),
        made_at=moment(row["made_microseconds"]),
        settled_at=moment_or_none(row["settled_microseconds"]),
        spent_usd=None if row["spent_micro_usd"] is None else in_usd(row["spent_micro_usd"]),
    )


def in_usd(micro_usd: int | Decimal) -> Decimal:
    """Return micro-dollars as dollars; PostgreSQL adds up to `Decimal`."""
    return int(micro_usd) * MICRO_USD


def stamp(at: datetime) -> int:
    """Return a time in microseconds since 1970. Raises BadRequest if it has no zone."""
    if at.tzinfo is None:
        raise BadRequest(f"Times in the ledger are UTC; {at.isoformat()} has no time zone.")
    return (at - _EPOCH) // timedelta(microseconds=1)


def moment(microseconds: int) -> datetime:
    """Return the time that `stamp` made this of."""
    return _EPOCH + timedelta(microseconds=microseconds)


def moment_or_none(microseconds: int | None) -> datetime | None:
    """Likewise, of what may not have happened yet."""
    return None if microseconds is None else moment(microseconds)


# ── databases ────────────────────────────────────────────────────────────────────────────────────────────────────────


def parsed(url: str) -> URL:
    """Return a ledger's URL. Raises LedgerError if it leads to none."""
    try:
        found = make_url(url)
    except (ArgumentError, ValueError) as error:  # ValueError: a port that is no number
        raise LedgerError(
            f"{url!r} is no URL of a ledger. Such are sqlite:////var/lib/skyward/ledger.db and"
            " postgresql+psycopg://host/database."
        ) from error
    if found.get_backend_name() not in ("sqlite", "postgresql"):
        raise LedgerError(f"A ledger is kept in SQLite or PostgreSQL, not in {found.get_backend_name()}.")
    if found.get_backend_name() == "sqlite" and found.database in (None, "", ":memory:"):
        raise LedgerError(
            "A ledger in memory would be lost with its process. Name a file: sqlite:////var/lib/skyward/ledger.db."
        )
    return found


def opened(url: URL, busy_timeout_seconds: float) -> Engine:
    """Return the engine for a ledger's URL; in SQLite, what has the execution option `skyward_writes` takes the lock as
    it begins.
    """
    with told(url):
        if url.get_backend_name() == "postgresql":
            settings = {
                "connect_timeout": CONNECT_TIMEOUT_SECONDS,
                "options": f"-c lock_timeout={round(busy_timeout_seconds * 1000)}",
                # a server that was set up under LC_ALL=C has none, and its texts would come as bytes
                "client_encoding": "utf8",
            }
            return create_engine(url, pool_pre_ping=True, connect_args=settings)
        _keep_from_others(Path(str(url.database)))
        engine = create_engine(url, connect_args={"timeout": busy_timeout_seconds})
    event.listen(engine, "connect", lambda connection, _: _prepare_sqlite(connection, busy_timeout_seconds))
    event.listen(engine, "begin", _begin_sqlite)
    event.listen(engine, "handle_error", _keep_connection)
    return engine


def _keep_from_others(path: Path) -> None:
    """Make the file, if there is none, and see to it that no other user can read or write it, or what SQLite keeps
    beside it. Raises OSError.

    It is never opened: to close it again would drop all locks that this process has on it (fcntl(2)).
    """
    path = Path(os.path.realpath(path))
    path.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
    status = path.parent.stat()
    if others := other_writers(status):
        raise NotPrivate(
            f"{path.parent} may be written to by {others} (mode {S_IMODE(status.st_mode):04o}), who could exchange the"
            " ledger"
        )
    if status.st_mode & 0o077 and status.st_uid == os.geteuid() and path.parent == user_state_path("skyward"):
        path.parent.chmod(0o700)
    if not path.exists():
        make_file(path)
    for file in (path, *(path.with_name(f"{path.name}{ending}") for ending in BESIDE)):
        with suppress(FileNotFoundError):  # those beside it come and go
            _close_to_others(file)


def _close_to_others(file: Path) -> None:
    status = file.lstat()
    if not S_ISREG(status.st_mode):
        return  # SQLite says what is wrong
    if status.st_uid != os.geteuid() and os.geteuid() != 0:
        raise NotPrivate(
            f"{file} belongs to user {status.st_uid}: a ledger that several users share is kept in PostgreSQL"
        )
    if status.st_mode & 0o077:
        file.chmod(0o600)
        if not file.name.endswith(BESIDE):
            _log.warning(
                "the ledger %s could be read by others (mode %04o), and is closed to them: mode 0600",
                file,
                S_IMODE(status.st_mode),
            )


def _prepare_sqlite(connection: PoolProxiedConnection, busy_timeout_seconds: float) -> None:
    driver: Any = connection
    # a damaged text spoils its row, not the listing
    driver.text_factory = functools.partial(str, encoding="utf-8", errors="replace")
    # we say BEGIN ourselves; the driver's own one comes too late for DDL and takes no lock
    driver.isolation_level = None
    _switch_to_wal(driver, time.monotonic() + busy_timeout_seconds)
    # an intent must outlive a power cut, or a machine is rented that nobody has asked for
    driver.execute("PRAGMA synchronous=FULL")
    driver.execute("PRAGMA foreign_keys=ON")


def _switch_to_wal(driver: Any, deadline: float) -> None:
    """Two who make a ledger at once both switch it over, and SQLite does not always wait for that lock
    (sqlite.org/wal.html, section 9).
    """
    while True:
        try:
            driver.execute("PRAGMA journal_mode=WAL")
        except driver.OperationalError as error:
            if error.sqlite_errorcode & 0xFF != SQLITE_BUSY or time.monotonic() > deadline:
                raise
            time.sleep(0.01)
        else:
            return


def _begin_sqlite(connection: Connection) -> None:
    """A writer takes the lock at once: one that reads first and then finds the file changed could only fail."""
    connection.exec_driver_sql(
        "BEGIN IMMEDIATE" if connection.get_execution_options().get("skyward_writes") else "BEGIN"
    )


def _keep_connection(context: ExceptionContext) -> None:
    """Roll back what a signal has interrupted.

    SQLAlchemy would close the connection, whose statement, and write lock, live as long as the exception does.
    """
    if not isinstance(context.original_exception, Exception):
        context.is_disconnect = False


# ── what went wrong, and what to try ─────────────────────────────────────────────────────────────────────────────────

(
    SQLITE_BUSY,
    SQLITE_LOCKED,
    SQLITE_READONLY,
    SQLITE_IOERR,
    SQLITE_CORRUPT,
    SQLITE_FULL,
    SQLITE_CANTOPEN,
    SQLITE_NOTADB,
) = (5, 6, 8, 10, 11, 13, 14, 26)
"""Primary result codes (sqlite.org/rescode.html)."""

_IS_DAMAGED = (
    "is damaged, or no ledger. Move it away: a new one is made, and `skyward sweep` finds by their tags the machines"
    " that only this one knew."
)
_ADVICE = {
    SQLITE_BUSY: "is locked by another process that does not finish. Find it (fuser) and end it, or try again.",
    SQLITE_LOCKED: "is locked by another connection of this process. Try again.",
    SQLITE_READONLY: (
        "may not be written to. Mend the permissions of the file and its directory, or name another ledger"
        " (SKYWARD_LEDGER)."
    ),
    SQLITE_IOERR: (
        "could not be read or written by the operating system. Look at the disk: is it full, is it still there?"
    ),
    SQLITE_CORRUPT: _IS_DAMAGED,
    SQLITE_FULL: "lies on a full disk. Make room; what was written before is safe.",
    SQLITE_CANTOPEN: (
        "could not be opened. Look at the path and its permissions, or name another ledger (SKYWARD_LEDGER)."
    ),
    SQLITE_NOTADB: _IS_DAMAGED,
}


@contextmanager
def told(url: URL) -> Generator[None]:
    """Turn what the database, its driver or the operating system raises into LedgerError, with what to try; passwords
    are not shown.
    """
    try:
        yield
    except IntegrityError as error:
        raise LedgerConflict(
            f"The ledger at {url!r} does not take this entry: {error.orig}. Its pool or account is not in the ledger,"
            " or another process was faster; try again."
        ) from error
    except DBAPIError as error:
        raise LedgerError(f"The ledger at {url!r} {_advice(error)} ({_cause(error)})") from error
    except (NoSuchModuleError, ImportError) as error:
        raise LedgerError(
            f"The driver for {url!r} is not installed: {error}. For postgresql+psycopg: pip install 'psycopg[binary]'."
        ) from error
    except SQLAlchemyError as error:
        raise LedgerError(f"The ledger at {url!r} could not be used: {error}") from error
    except OSError as error:
        raise LedgerError(f"The ledger at {url!r} {_ADVICE[SQLITE_CANTOPEN]} ({error})") from error


def _advice(error: DBAPIError) -> str:
    code = getattr(error.orig, "sqlite_errorcode", None)
    if code is not None:
        return _ADVICE.get(code & 0xFF, "refuses.")
    state = getattr(error.orig, "sqlstate", None)
    if state is None or error.connection_invalidated:
        return "cannot be reached. Look whether its server runs and the URL is right; then try again."
    return f"refuses (SQLSTATE {state}). Look at the server's log; then try again."


def _cause(error: DBAPIError) -> str:
    return " ".join(str(error.orig).split())
