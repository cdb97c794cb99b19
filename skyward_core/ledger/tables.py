"""The ledger's tables, and their rows as values.

Money is stored as whole micro-dollars and read as `Decimal`. Sums of integers are exact, in any order and on both
databases; binary floats are not, and SQLite has no decimals. A price is rounded up to six places, a cost is rounded up
once for each resource. Times are UTC, stored as whole microseconds since 1970, because SQLite keeps no time zone.

A change of a table needs a new module in `migrations`; a test compares the migrated schema with these tables.
"""

from __future__ import annotations

import functools
import importlib
import json
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import fields, replace
from datetime import UTC, datetime, timedelta
from decimal import Decimal
from types import MappingProxyType
from typing import TYPE_CHECKING, Any, Concatenate, cast, override

from sqlalchemy import (
    BigInteger,
    Boolean,
    Case,
    Column,
    ColumnElement,
    Connection,
    ForeignKey,
    Index,
    Integer,
    MetaData,
    String,
    Table,
    Text,
    TypeDecorator,
    and_,
    case,
    false,
    func,
    literal,
)

from skyward_core.errors import BadRequest
from skyward_core.ledger.lease_clock import LeaseClock
from skyward_core.ledger.names_policy import Client, NamedPool, NameState
from skyward_core.ledger.rows import (
    MICRO_USD,
    SECONDS_PER_HOUR,
    Account,
    Attempt,
    Bucket,
    CallEntry,
    Intent,
    Period,
    PoolEntry,
    Price,
    Reservation,
    ResourceKind,
    SealedLease,
    UnreadableRow,
)
from skyward_core.machines.offers import Extra
from skyward_core.machines.owner import Owner
from skyward_core.machines.signing import sign_provider
from skyward_core.providers.base import kind_of, sensitive_fields
from skyward_core.shown_text import is_visible, visible_lines
from skyward_core.work import WORK_CHARACTERS, Work

if TYPE_CHECKING:
    from sqlalchemy import Dialect
    from sqlalchemy.types import TypeEngine

_EPOCH = datetime(1970, 1, 1, tzinfo=UTC)

# ── tables ───────────────────────────────────────────────────────────────────────────────────────────────────────────
# All names begin with skyward_, because SKYWARD_LEDGER may name a database that holds other tables too.


class ShownText(TypeDecorator[str]):
    """A text that others have written, such as an error or the name of a function: it is stored as visible text
    (`shown_text.py`), because PostgreSQL takes no NUL and no database takes half of a surrogate pair.
    """

    impl = Text
    cache_ok = True

    def __init__(self, characters: int | None = None) -> None:
        super().__init__(characters)
        self.characters = characters

    @override
    def load_dialect_impl(self, dialect: Dialect) -> TypeEngine[str]:
        return dialect.type_descriptor(Text() if self.characters is None else String(self.characters))

    @override
    def process_bind_param(self, value: str | None, dialect: Dialect) -> str | None:
        if value is None or is_visible(value) or (shown := visible_lines(value)) == value:
            return value
        return shown[: self.characters]


_ID = BigInteger().with_variant(Integer, "sqlite")  # SQLite numbers rows by itself in INTEGER PRIMARY KEY only
METADATA = MetaData()

META = Table(
    "skyward_meta", METADATA, Column("name", String(64), primary_key=True), Column("value", String(64), nullable=False)
)

NAME_CHARACTERS = 128
"""The longest name of a pool."""
WORK_COLUMNS = tuple(f"work_{field.name}" for field in fields(Work))
"""Columns for the work that a pool, or a share of its cost, is for: one for each field of Work."""


def _work_columns() -> list[Column[Any]]:
    return [Column(name, String(WORK_CHARACTERS), nullable=False, server_default="") for name in WORK_COLUMNS]


def _clock_columns(prefix: str) -> list[Column[Any]]:
    """Return the columns for the clock by which a time was written (`lease_clock.py`)."""
    boot = Column(f"{prefix}_boot", String(64), nullable=False, server_default="")
    return [boot, Column(f"{prefix}_ahead_microseconds", BigInteger, nullable=False, server_default="0")]


POOLS = Table(
    "skyward_pools",
    METADATA,
    Column("id", String(255), primary_key=True),
    Column("owner_user", ShownText(255), nullable=False),
    Column("owner_host", ShownText(255), nullable=False),
    Column("owner_process", String(255), nullable=False),
    Column("provider_json", Text, nullable=False),
    Column("spec_json", Text, nullable=False),
    # no foreign key: a pool with an unknown account is refused when it reserves, with a clearer error
    Column("account", String(255)),
    Column("created_microseconds", BigInteger, nullable=False),
    Column("lease_expires_microseconds", BigInteger, nullable=False),
    Column("lives_by_lease", Boolean, nullable=False),
    Column("condemned_microseconds", BigInteger),
    Column("ended_microseconds", BigInteger),
    Column("provider_account", String(255), nullable=False, server_default=""),
    *_work_columns(),
    # set while no process uses a pool with a name (`uses.py`)
    Column("warm_since_microseconds", BigInteger),
    # the account of the run, on which the pool draws beside `account` (`pools.py`)
    Column("run_account", String(255)),
    *_clock_columns("lease"),
    # a pool with a name and without a work belongs to nobody: its rest is its own (`bills.py`)
    Column("name", String(NAME_CHARACTERS), nullable=False, server_default=""),
    # set with `condemned_microseconds` when somebody stops the pool on purpose
    Column("stopped_by", ShownText(255), nullable=False, server_default=""),
)
Index("skyward_pools_by_run", POOLS.c.work_run)


def milliseconds_of(bucket: Bucket) -> str:
    """Return the name of a bucket's column."""
    return f"{bucket.name.lower()}_milliseconds"


RESOURCES = Table(
    "skyward_resources",
    METADATA,
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
    Column("evidence", ShownText()),
    *(Column(milliseconds_of(bucket), BigInteger, nullable=False, server_default="0") for bucket in Bucket),
    # the bucket to which a close has added the seconds that no process had noted, and how many these were
    Column("filled_bucket", String(32)),
    Column("filled_milliseconds", BigInteger, nullable=False, server_default="0"),
    Column("minimum_micro_usd", BigInteger, nullable=False, server_default="0"),
    # the part of the price that is billed in addition to the machine
    Column("extras_json", Text, nullable=False, server_default="[]"),
)
IS_OPEN = RESOURCES.c.gone_microseconds.is_(None)
# it is partial, for the open ones (`database.py`): to say so here would load the dialects of all databases
Index("skyward_resources_open", RESOURCES.c.id)

ACCOUNTS = Table(
    "skyward_accounts",
    METADATA,
    Column("name", String(255), primary_key=True),
    Column("limit_micro_usd", BigInteger, nullable=False),
    Column("period", String(16), nullable=False),
    # made for one run, and no user's: its limit is for all pools of that run, and `period` does not count
    Column("is_of_run", Boolean, nullable=False, server_default=false()),
)

RESERVATIONS = Table(
    "skyward_reservations",
    METADATA,
    Column("id", _ID, primary_key=True),
    Column("account", ForeignKey(ACCOUNTS.c.name), nullable=False, index=True),
    Column("pool_id", ForeignKey(POOLS.c.id), nullable=False, index=True),
    Column("scope", String(300), nullable=False),
    Column("reserved_micro_usd", BigInteger, nullable=False),
    Column("made_microseconds", BigInteger, nullable=False),
    Column("settled_microseconds", BigInteger),
    Column("spent_micro_usd", BigInteger),
)

# What is reserved and spent, for each account and scope. A month may have millions of reservations, and their sum would
# be computed under a lock.
BALANCES = Table(
    "skyward_balances",
    METADATA,
    Column("account", ForeignKey(ACCOUNTS.c.name), primary_key=True),
    Column("scope", String(300), primary_key=True),
    Column("committed_micro_usd", BigInteger, nullable=False),
)

# The result of each attempt to rent machines: for `skyward why`, and to skip for a while offers that fail repeatedly.
ATTEMPTS = Table(
    "skyward_attempts",
    METADATA,
    Column("id", _ID, primary_key=True),
    Column("pool_id", ForeignKey(POOLS.c.id), nullable=False, index=True),
    Column("at_microseconds", BigInteger, nullable=False, index=True),
    Column("provider", String(64), nullable=False),
    Column("region", ShownText(64), nullable=False),
    Column("instance_type", ShownText(255), nullable=False),
    Column("is_spot", Boolean, nullable=False),
    Column("milliseconds", BigInteger, nullable=False),
    Column("error", String(64), nullable=False),
    Column("code", ShownText(255), nullable=False),
    Column("message", ShownText(), nullable=False),
)

# The work that parts of a pool's cost are for, if several tasks use the pool. The rest is for the pool's own work.
SHARES = Table(
    "skyward_shares",
    METADATA,
    Column("id", _ID, primary_key=True),
    Column("pool_id", ForeignKey(POOLS.c.id), nullable=False, index=True),
    *_work_columns(),
    Column("micro_usd", BigInteger, nullable=False),
    # user@host of the process whose calls it was for; "": that of the pool
    Column("owner", ShownText(511), nullable=False, server_default=""),
)

# Steps that make calls on a pool, and the cost of the slots that these have held (`uses.py`).
USES = Table(
    "skyward_uses",
    METADATA,
    Column("id", String(64), primary_key=True),
    Column("pool_id", String(255), nullable=False, index=True),
    # the row of CLIENTS in a pool with a name, else ""
    Column("client_id", String(64), nullable=False, server_default=""),
    Column("began_microseconds", BigInteger, nullable=False),
    Column("ended_microseconds", BigInteger),
    Column("slot_milliseconds", BigInteger, nullable=False, server_default="0"),
    Column("micro_usd", BigInteger, nullable=False, server_default="0"),
    # when the figures were noted, and what was held then
    Column("noted_microseconds", BigInteger, nullable=False),
    Column("held_slots", BigInteger, nullable=False, server_default="0"),
    Column("held_micro_usd_per_hour", BigInteger, nullable=False, server_default="0"),
    *_work_columns(),
)
Index("skyward_uses_by_run", USES.c.work_run)

# What another machine needs to attach to a pool that outlives its owner: the lease, and keys that only
# SKYWARD_SECRET_KEY opens. The row is deleted in the transaction that records the end of the pool.
SEALED_LEASES = Table(
    "skyward_sealed_leases",
    METADATA,
    Column("pool_id", ForeignKey(POOLS.c.id), primary_key=True),
    Column("lease_json", Text, nullable=False),
    Column("sealed", Text, nullable=False),
    Column("updated_microseconds", BigInteger, nullable=False),
)

# Detached calls: a row for each, written by every client that sees a new state (docs/decisions/0029).
CALLS = Table(
    "skyward_calls",
    METADATA,
    Column("pool_id", ForeignKey(POOLS.c.id), primary_key=True),
    Column("call_id", String(128), primary_key=True),
    Column("name", ShownText(255), nullable=False),
    Column("owner", ShownText(500), nullable=False),
    # how many nodes have got the call: a later attempt wins
    Column("generation", BigInteger, nullable=False),
    Column("state", String(32), nullable=False),
    Column("started_microseconds", BigInteger, nullable=False, index=True),
    Column("ended_microseconds", BigInteger),
    Column("milliseconds", BigInteger, nullable=False),
    Column("micro_usd", BigInteger, nullable=False),
    # the work that has started it
    *_work_columns(),
)
Index("skyward_calls_by_run", CALLS.c.work_run)


# Pools with a name: which pool it has now. A row without a pool exists only to be locked.
NAMES = Table(
    "skyward_names",
    METADATA,
    Column("name", String(NAME_CHARACTERS), primary_key=True),
    # no foreign key: a name is claimed before its pool is written
    Column("pool_id", String(255), nullable=False, server_default=""),
    Column("terms_json", Text, nullable=False, server_default="{}"),
    Column("state", String(16), nullable=False, server_default=""),
    Column("steward", String(64), nullable=False, server_default=""),
    Column("epoch", BigInteger, nullable=False, server_default="0"),
    Column("keep_warm_milliseconds", BigInteger, nullable=False, server_default="0"),
    Column("warm_until_microseconds", BigInteger),
    *_clock_columns("warm"),
)

# The processes that use named pools, or have used them.
CLIENTS = Table(
    "skyward_clients",
    METADATA,
    Column("id", String(64), primary_key=True),
    Column("pool_id", String(255), nullable=False, index=True),
    Column("owner_user", ShownText(255), nullable=False),
    Column("owner_host", ShownText(255), nullable=False),
    Column("owner_process", String(255), nullable=False),
    Column("joined_microseconds", BigInteger, nullable=False),
    Column("lease_expires_microseconds", BigInteger, nullable=False),
    Column("left_microseconds", BigInteger),
    # of processes of earlier releases; their rows in USES have it now
    Column("slot_milliseconds", BigInteger, nullable=False, server_default="0"),
    Column("calls", BigInteger, nullable=False, server_default="0"),
    Column("busy_microseconds", BigInteger),
    # by what the pool's scheduler knows it, so that others can end its calls; "" before its first call
    Column("topic", String(64), nullable=False, server_default=""),
    *_work_columns(),
    *_clock_columns("lease"),
)


# ── rows as values ───────────────────────────────────────────────────────────────────────────────────────────────────

type Values = Mapping[Any, Any]
"""A row, by the names of its columns."""


def read_rows[T](
    rows: Iterable[Values], read: Callable[[Values], T], unreadable: list[UnreadableRow] | None = None
) -> list[T]:
    """Read rows one by one. Rows that cannot be read are appended to `unreadable`, or raised without that list."""
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
    """Raise TypeError for bytes, which SQLite accepts in a column of any type."""
    if columns := [column for column, value in row.items() if isinstance(value, bytes)]:
        raise TypeError(f"bytes in {', '.join(columns)}")


def reader[**P, T](
    table: Table, key: str = "id", pool: str = "pool_id"
) -> Callable[[Callable[Concatenate[Values, P], T]], Callable[Concatenate[Values, P], T]]:
    """Decorate a function that reads a row of a table: it raises UnreadableRow for values without a meaning.

    Whoever may write to the ledger writes any value: a time of no calendar, or JSON that is nested too deep to be read.
    """

    def decorate(read: Callable[Concatenate[Values, P], T]) -> Callable[Concatenate[Values, P], T]:
        @functools.wraps(read)
        def checked(row: Values, *args: P.args, **named: P.kwargs) -> T:
            try:
                _refuse_bytes(row)
                return read(row, *args, **named)
            except (ValueError, TypeError, KeyError, AttributeError, ArithmeticError, RecursionError) as error:
                raise UnreadableRow(
                    table.name, row[key], str(row.get(pool, "")), f"{type(error).__name__}: {error}"
                ) from error

        return checked

    return decorate


@reader(POOLS, pool="id")
def pool_of(row: Values) -> PoolEntry:
    """Return the pool of a row of POOLS. Raises UnreadableRow.

    If only the owner cannot be read, the pool has an unknown owner with that name, and `trouble` says so.
    """
    owner, trouble = _owner_of(row)
    provider, signature = _provider_of(row["provider_json"])
    return PoolEntry(
        id=row["id"],
        owner=owner,
        written_provider=provider,
        provider_signature=signature,
        spec_json=row["spec_json"],
        created_at=moment(row["created_microseconds"]),
        lease_expires_at=moment(row["lease_expires_microseconds"]),
        lives_by_lease=row["lives_by_lease"],
        account=row["account"],
        condemned_at=moment_or_none(row["condemned_microseconds"]),
        ended_at=moment_or_none(row["ended_microseconds"]),
        run_account=row["run_account"],
        provider_account=row["provider_account"],
        work=work_of(row),
        name=row["name"],
        stopped_by=row["stopped_by"],
        trouble=trouble,
    )


@reader(POOLS, pool="id")
def pool_seen(row: Values, clock: LeaseClock) -> PoolEntry:
    """Return the pool of a row, with its lease by this computer's present time of day. Raises UnreadableRow."""
    entry, shift = pool_of(row), clock.shift(row)
    if shift is None:
        return entry
    return replace(entry, lease_expires_at=entry.lease_expires_at + shift, lease_shift=shift)


def later_lease(end: datetime, clock: LeaseClock) -> dict[str, Case[Any]]:
    """Return the columns of POOLS that move the end of a lease to `end`, unless it is later already."""
    c, new = POOLS.c, {"lease_expires_microseconds": stamp(end), **clock.values()}
    left, left_now = c.lease_expires_microseconds - c.lease_ahead_microseconds, stamp(end) - clock.ahead_microseconds
    is_later = case((c.lease_boot == clock.boot, left < left_now), else_=c.lease_expires_microseconds < stamp(end))
    return {name: case((is_later, value), else_=c[name]) for name, value in new.items()}


def work_of(row: Values) -> Work:
    """Return the work of a row that has the columns of one."""
    return Work(*(row[name] for name in WORK_COLUMNS))


def work_values(work: Work) -> dict[str, str]:
    """Return the columns of a work with their values."""
    return {name: getattr(work, name.removeprefix("work_")) for name in WORK_COLUMNS}


def _owner_of(row: Values) -> tuple[Owner, str]:
    name = f"{row['owner_user']}@{row['owner_host']}"
    try:
        return Owner.parse(name, row["owner_process"]), ""
    except (ValueError, AttributeError):
        return (
            Owner.unknown(name),
            f"its owner's process, {row['owner_process']!r}, cannot be read: only its lease shows whether it lives",
        )


SIGNATURE = "skyward-signature"
"""The key of the signature in `provider_json`. No field of a provider can have this name."""


def provider_text(pool_id: str, provider: Mapping[str, Any]) -> str:
    """Return a provider's plain data as `provider_json`, with a signature if it sets more than harmless fields."""
    try:
        kind = kind_of(str(provider.get("name", "")))
    except BadRequest:  # of a script, without an entry point
        kind = None
    signature = sign_provider(pool_id, provider) if sensitive_fields(provider, kind) else ""
    return json.dumps({**provider, **({SIGNATURE: signature} if signature else {})}, sort_keys=True)


def _provider_of(text: str) -> tuple[Mapping[str, Any], str]:
    """Return a provider as plain data, and its signature. Raises ValueError if the text is not one."""
    found = json.loads(text)
    if not isinstance(found, dict):
        raise ValueError(f"{text!r} is no provider")  # noqa: TRY004 - the same error as of `json.loads`
    provider = cast("dict[str, Any]", found)
    return provider, str(provider.pop(SIGNATURE, ""))


@reader(ATTEMPTS)
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
        nodes=_least_nodes(json.loads(row["spec_json"])),
    )


def _least_nodes(spec: Mapping[str, Any]) -> int:
    """Return how many machines a pool opens with: its number of nodes, or the least of (least, most)."""
    nodes = spec.get("nodes", 1)
    return nodes[0] if isinstance(nodes, list) else nodes


@reader(CALLS, key="call_id")
def call_of(row: Values) -> CallEntry:
    """Return the call of a row of CALLS with the `ended_microseconds` of its pool as `pool_ended`."""
    return CallEntry(
        pool_id=row["pool_id"],
        call_id=row["call_id"],
        name=row["name"],
        owner=row["owner"],
        generation=row["generation"],
        state=row["state"],
        started_at=moment(row["started_microseconds"]),
        ended_at=moment_or_none(row["ended_microseconds"]),
        seconds=row["milliseconds"] / 1000,
        cost_usd=in_usd(row["micro_usd"]),
        pool_ended_at=moment_or_none(row["pool_ended"]),
        work=work_of(row),
    )


_EARLIER_KINDS = frozenset({"key pair", "security group", "image", "volume", "fleet"})
"""Kinds of resources that earlier versions could write and this version does not."""


@reader(RESOURCES)
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


@reader(NAMES, key="name")
def name_of(row: Values) -> NamedPool:
    """Return the named pool of a row of NAMES that has one."""
    return NamedPool(
        name=row["name"],
        pool_id=row["pool_id"],
        terms=MappingProxyType(json.loads(row["terms_json"])),
        state=NameState(row["state"]),
        steward=row["steward"],
        epoch=row["epoch"],
        keep_warm_seconds=row["keep_warm_milliseconds"] / 1000,
        warm_until=moment_or_none(row["warm_until_microseconds"]),
    )


@reader(CLIENTS)
def client_of(row: Values) -> Client:
    """Return the client of a row of CLIENTS."""
    owner, _ = _owner_of(row)
    return Client(
        id=row["id"],
        pool_id=row["pool_id"],
        owner=owner,
        joined_at=moment(row["joined_microseconds"]),
        lease_expires_at=moment(row["lease_expires_microseconds"]),
        left_at=moment_or_none(row["left_microseconds"]),
        work=work_of(row),
        calls=row["calls"],
        busy_at=moment_or_none(row["busy_microseconds"]),
        topic=row["topic"],
    )


@reader(NAMES, key="name")
def name_seen(row: Values, clock: LeaseClock) -> NamedPool:
    """Return the named pool of a row, with its warm time by this computer's present time of day."""
    named, shift = name_of(row), clock.shift(row, "warm")
    return named if not shift or named.warm_until is None else replace(named, warm_until=named.warm_until + shift)


@reader(CLIENTS)
def client_seen(row: Values, clock: LeaseClock) -> Client:
    """Return the client of a row, with its lease by this computer's present time of day."""
    client, shift = client_of(row), clock.shift(row)
    return replace(client, lease_expires_at=client.lease_expires_at + shift) if shift else client


@reader(ACCOUNTS, key="name")
def account_of(row: Values) -> Account:
    """Return the account of a row of ACCOUNTS."""
    return Account(row["name"], in_usd(row["limit_micro_usd"]), Period(row["period"]))


@reader(RESERVATIONS)
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


@reader(SEALED_LEASES, key="pool_id")
def sealed_lease_of(row: Values) -> SealedLease:
    """Return the sealed lease of a row of SEALED_LEASES. Its texts are not verified."""
    return SealedLease(row["pool_id"], row["lease_json"], row["sealed"], moment(row["updated_microseconds"]))


def in_usd(micro_usd: int | Decimal) -> Decimal:
    """Return micro-dollars as dollars. PostgreSQL returns sums as `Decimal`."""
    return int(micro_usd) * MICRO_USD


def stamp(at: datetime) -> int:
    """Return a time in microseconds since 1970. Raises BadRequest if it has no zone."""
    if at.tzinfo is None:
        raise BadRequest(f"Times in the ledger are UTC; {at.isoformat()} has no time zone.")
    return (at - _EPOCH) // timedelta(microseconds=1)


def moment(microseconds: int) -> datetime:
    """Return the time of microseconds since 1970."""
    return _EPOCH + timedelta(microseconds=microseconds)


def moment_or_none(microseconds: int | None) -> datetime | None:
    """Return the time of microseconds since 1970, None for None."""
    return None if microseconds is None else moment(microseconds)


def insert_new(connection: Connection, table: Table) -> Any:
    """Return an INSERT that does nothing if the row is there already.

    Only the dialect of the connection is loaded: that of PostgreSQL takes 20 ms.
    """
    dialect: Any = importlib.import_module(f"sqlalchemy.dialects.{connection.dialect.name}")
    return dialect.insert(table).on_conflict_do_nothing()


# ── cost, in integers, so that both databases add up alike ────────────────────────────────────────────────────────────


def total_milliseconds(buckets: Sequence[Bucket]) -> ColumnElement[int]:
    total: ColumnElement[int] = literal(0, BigInteger)
    for bucket in buckets:
        total += RESOURCES.c[milliseconds_of(bucket)]
    return total


def _billed_micro_usd(price_per_hour: ColumnElement[int]) -> ColumnElement[int]:
    """Return the same as `Price.cost`. A resource that was never bound and has no seconds costs nothing."""
    r = RESOURCES.c
    increments = ((MILLISECONDS + 999) // 1000 + r.increment_seconds - 1) // r.increment_seconds
    seconds = increments * r.increment_seconds
    billed = case((seconds < r.minimum_seconds, r.minimum_seconds), else_=seconds)
    cost = (price_per_hour * billed + SECONDS_PER_HOUR - 1) // SECONDS_PER_HOUR
    return case(
        (r.bound_microseconds.is_(None) & (MILLISECONDS == 0), 0),
        (cost < r.minimum_micro_usd, r.minimum_micro_usd),
        else_=cost,
    )


MILLISECONDS = total_milliseconds(tuple(Bucket))
COST = _billed_micro_usd(RESOURCES.c.price_micro_usd_per_hour)
ON_DEMAND = _billed_micro_usd(RESOURCES.c.on_demand_micro_usd_per_hour)

# ── machines that can be billed ───────────────────────────────────────────────────────────────────────────────────────

# Whoever may write to the ledger writes any number. The bounds keep sums within 64 bits, and are far above each machine
# that a pool may rent (`machines/offers.py` MOST_USD_PER_HOUR).
_MOST_MICRO_USD_PER_HOUR = 10**12
_MOST_SECONDS = 10**9
"""Thirty years: of an increment and a minimum, and of a bucket in milliseconds."""
_MOST_MICRO_USD = 10**15
_BOUNDS: Mapping[str, tuple[int, int]] = {
    "price_micro_usd_per_hour": (0, _MOST_MICRO_USD_PER_HOUR),
    "on_demand_micro_usd_per_hour": (0, _MOST_MICRO_USD_PER_HOUR),
    "increment_seconds": (1, _MOST_SECONDS),
    "minimum_seconds": (0, _MOST_SECONDS),
    "minimum_micro_usd": (0, _MOST_MICRO_USD),
    **{milliseconds_of(bucket): (0, _MOST_SECONDS * 1000) for bucket in Bucket},
}
_MOST_PRODUCT = 2**63 - 1 - SECONDS_PER_HOUR
"""Of a price and the seconds that it is billed for."""
NOT_BILLABLE = "a price or a time is no number, or none that a bill can have"


def is_billable(connection: Connection) -> ColumnElement[bool]:
    """Return the condition of the rows of RESOURCES from which a cost can be computed."""
    r = RESOURCES.c
    is_bounded = [r[name].between(least, most) for name, (least, most) in _BOUNDS.items()]
    if connection.dialect.name == "sqlite":  # it stores any value in any column
        names = (*_BOUNDS, "intended_microseconds")
        is_bounded += [func.typeof(r[name]) == "integer" for name in names]
    most_seconds = MILLISECONDS // 1000 + 1 + r.increment_seconds + r.minimum_seconds
    fits = [
        most_seconds <= literal(_MOST_PRODUCT, BigInteger) // case((price > 0, price), else_=1)
        for price in (r.price_micro_usd_per_hour, r.on_demand_micro_usd_per_hour)
    ]
    # a database computes the terms of AND in any order, and the sum of numbers without bounds is an error
    return case((and_(*is_bounded), and_(*fits)), else_=false())


def whole_number(number: object) -> int:
    """Return a sum of the database as an integer of zero or more; 0 if a damaged row has made it something else."""
    try:
        return max(0, int(cast("Any", number)))
    except (TypeError, ValueError, OverflowError):
        return 0
