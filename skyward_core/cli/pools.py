"""`skyward ps`, `stop`, `why` and `warm`: the pools of the ledger."""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping, Sequence
from datetime import UTC, datetime
from decimal import Decimal
from typing import TYPE_CHECKING, Annotated, Any

import typer

from skyward_core.cli import values
from skyward_core.cli.options import (
    SHOWN_ROWS,
    AsJson,
    PoolId,
    complete_pools,
    id_of,
    open_ledger,
    open_settled_ledger,
    provider_from,
)
from skyward_core.cli.printing import (
    duration,
    first_of,
    iso,
    money,
    number_of,
    print_json,
    print_table,
    print_warnings,
    say,
)
from skyward_core.errors import ZERO_USD, BadRequest

if TYPE_CHECKING:
    from skyward_core.ledger.ledger import Ledger
    from skyward_core.ledger.names_policy import Activity, NamedPool
    from skyward_core.ledger.rows import Attempt, Intent, PoolEntry, PoolRow, UnreadableRow

OLD_SECONDS = 60.0
"""A process that keeps a pool records its cost every five seconds; a record that is older than this has no successor,
or a late one.
"""


def ps(
    context: typer.Context,
    *,
    as_json: AsJson = False,
    include_ended: Annotated[bool, typer.Option("--all", help="also pools that have ended")] = False,
    limit: Annotated[
        int, typer.Option(parser=values.count, metavar="N", help="at most this many, the newest")
    ] = SHOWN_ROWS,
) -> int:
    """Show the pools, and what each has cost so far."""
    unreadable: list[UnreadableRow] = []
    with open_settled_ledger(context) as ledger:
        rows = ledger.pool_rows(include_ended=include_ended, limit=limit, unreadable=unreadable)
        pools = pools_of(ledger, rows, unreadable)
    if as_json:
        print_json(pools)
    elif not pools:
        print("no pools" if include_ended else "no open pools; `skyward ps --all` shows those that have ended")
    else:
        works = {row.entry.id: str(row.entry.work) for row in rows}
        print_table(*_pools_table(pools, works, has_dates=include_ended))
        if len(pools) == limit:
            say(f"the newest {limit}; --limit shows more")
    return print_warnings([*unreadable, *faults(rows)])


def stop(
    context: typer.Context,
    pool: PoolId,
    *,
    provider: Annotated[
        str | None,
        typer.Option(parser=values.printable, metavar="NAME", help="whose machines, if the ledger does not know"),
    ] = None,
    as_json: AsJson = False,
) -> int:
    """End a pool, live or not, by its id or its name."""
    from skyward_core.cleanup.release import release
    from skyward_core.machines.owner import Owner

    with open_ledger(context) as ledger:
        pool_id = id_of(ledger, pool)
        credentials = None if provider is None else provider_from(provider)
        is_known = _is_known(ledger, pool_id)
        ended = release(
            pool_id,
            ledger=ledger,
            credentials=credentials,
            why="it was stopped with `skyward stop`",
            stopped_by=f"{Owner.here().name} with `skyward stop`",
        )
    if as_json:
        print_json({"pool": pool_id, "ended": list(ended), "is_known": is_known})
    else:
        say(_stopped(pool_id, ended, is_known=is_known, provider=None if credentials is None else credentials.name))
    return 0


def _is_known(ledger: Ledger, pool_id: str) -> bool:
    from skyward_core.ledger.rows import UnreadableRow

    try:
        return ledger.pool(pool_id) is not None
    except UnreadableRow:
        return True


def why(context: typer.Context, pool: PoolId, *, as_json: AsJson = False) -> int:
    """Show why a pool has its machines where it has them, or none: each attempt to rent them, and its error."""
    unreadable: list[UnreadableRow] = []
    with open_ledger(context) as ledger:
        entry = ledger.pool(id_of(ledger, pool))
        if entry is None:
            raise BadRequest(f"the ledger has no pool {pool!r}: look with `skyward ps --all`")
        attempts = ledger.attempts(pool_id=entry.id, unreadable=unreadable)
    if as_json:
        print_json([attempt_json(attempt) for attempt in attempts])
    elif attempts:
        print_table(*_attempts_table(attempts))
        for note in _notes(entry, attempts):
            say(note)
    else:
        say(_none_known(entry))
    return print_warnings(unreadable)


def warm(
    context: typer.Context,
    name: Annotated[
        str, typer.Argument(metavar="NAME", parser=values.name, autocompletion=complete_pools, help="of a pool")
    ],
    *,
    seconds: Annotated[
        float,
        typer.Option("--for", parser=values.duration, metavar="TIME", help="such as 90s, 30m, 2h or 1d"),
    ],
    as_json: AsJson = False,
) -> int:
    """Keep a pool with a name warm, now or when the last process has left it."""
    from skyward_core.session.warm_pools import keep_warm

    with open_ledger(context) as ledger:
        row = keep_warm(ledger, name, seconds)
    if as_json:
        print_json(_warm_json(row))
    else:
        say(_warm_text(row))
    return 0


def pools_of(ledger: Ledger, rows: Sequence[PoolRow], unreadable: list[UnreadableRow]) -> list[dict[str, Any]]:
    """Return pools as in `skyward ps --json`."""
    rented = _rented(ledger, unreadable)
    names = {named.pool_id: named for named in ledger.names.all_named(unreadable=unreadable)}
    uses = ledger.names.activity(names, unreadable=unreadable) if names else {}
    now = datetime.now(UTC)
    return [
        _pool_json(row, rented.get(row.entry.id, ()), now, names.get(row.entry.id), uses.get(row.entry.id))
        for row in rows
    ]


def _rented(ledger: Ledger, unreadable: list[UnreadableRow]) -> dict[str, list[Intent]]:
    """Return what each pool has rented now, by pool id."""
    rented: dict[str, list[Intent]] = {}
    for intent in ledger.open_intents(unreadable=unreadable):
        if intent.cloud_id is not None:
            rented.setdefault(intent.pool_id, []).append(intent)
    return rented


def _unrecorded_usd(rented: Iterable[Intent], now: datetime, lease_end: datetime) -> Decimal:
    """Return what machines may have cost since the last record, of those whose last record is old: until the end of
    the pool's lease, when they end themselves.
    """
    from skyward_core.ledger.rows import SECONDS_PER_HOUR

    since = [(one.price.per_hour, _unrecorded_seconds(one, min(now, lease_end))) for one in rented]
    amounts = (price * Decimal(seconds) for price, seconds in since if seconds > OLD_SECONDS)
    return sum(amounts, ZERO_USD) / SECONDS_PER_HOUR


def _unrecorded_seconds(intent: Intent, now: datetime) -> float:
    return (now - intent.intended_at).total_seconds() - sum(intent.seconds.values())


def _pool_json(
    row: PoolRow,
    rented: Sequence[Intent],
    now: datetime,
    named: NamedPool | None = None,
    use: Activity | None = None,
) -> dict[str, Any]:
    """Return a pool as in `skyward ps --json`. `use` is there for a pool with a name."""
    entry = row.entry
    idle_since = None if use is None or entry.ended_at is not None else use.idle_since
    return {
        "pool": entry.id,
        "name": None if named is None else named.name,
        "users": None if use is None else use.users,
        "calls": None if use is None else use.calls,
        "idle_since": None if idle_since is None else iso(idle_since),
        "idle_seconds": None if idle_since is None else round(max(0.0, (now - idle_since).total_seconds()), 3),
        "warm_until": None if named is None or named.warm_until is None or entry.ended_at else iso(named.warm_until),
        "state": _pool_state(entry, now),
        "owner": entry.owner.name,
        "work": entry.work.labels(),
        "provider": entry.provider_name,
        "account": entry.account,
        "created_at": iso(entry.created_at),
        "lease_expires_at": iso(entry.lease_expires_at),
        "ended_at": None if entry.ended_at is None else iso(entry.ended_at),
        "open_resources": row.open_resources,
        "resources": row.resources,
        "age_seconds": round(((entry.ended_at or now) - entry.created_at).total_seconds(), 3),
        "lease_seconds": round((entry.lease_expires_at - now).total_seconds(), 3),
        "usd_per_hour": float(sum((intent.price.per_hour for intent in rented), ZERO_USD)),
        "cost_usd": float(row.cost_usd),
        "unrecorded_usd": float(_unrecorded_usd(rented, now, entry.lease_expires_at)),
        "saved_usd": float(row.on_demand_usd - row.cost_usd),
    }


def _pool_state(entry: PoolEntry, now: datetime) -> str:
    from skyward_core.machines.owner import OwnerState

    if entry.ended_at is not None:
        return "ended"
    owner = entry.owner.state()
    if why := entry.why_dead(now, owner):
        return f"dead: {why}"
    return "live, by its lease" if entry.lives_by_lease and owner is not OwnerState.ALIVE else "live"


def _pools_table(
    pools: Sequence[Mapping[str, Any]], works: Mapping[str, str], *, has_dates: bool
) -> tuple[list[str], list[list[str]]]:
    """Return heads and rows. NAME, USERS, CALLS and IDLE are there only if a pool has a name, WORK only if one has
    work. With dates BEGAN replaces AGE and LEASE, and STATE has the end.
    """
    times = ["BEGAN"] if has_dates else [">AGE", ">LEASE"]
    heads = ["POOL", "STATE", "OWNER", "PROVIDER", ">OPEN", *times, ">USD/H", ">COST USD"]
    rows = [_pool_row(pool, has_dates=has_dates) for pool in pools]
    if any(pool["name"] for pool in pools):
        heads += ["NAME", ">USERS", ">CALLS", ">IDLE"]
        rows = [[*row, *_name_columns(pool)] for row, pool in zip(rows, pools, strict=True)]
    if any(works.values()):
        return [*heads, "WORK"], [[*row, works[row[0]]] for row in rows]
    return heads, rows


def _name_columns(pool: Mapping[str, Any]) -> list[str]:
    if not pool["name"]:
        return ["", "", "", ""]
    warm_until: str | None = pool["warm_until"]
    idle_seconds: float | None = pool["idle_seconds"]
    is_warm = warm_until is not None and not pool["users"]
    users = f"warm until {warm_until[11:16]}" if is_warm and warm_until else str(pool["users"])
    return [pool["name"], users, str(pool["calls"]), "" if idle_seconds is None else duration(idle_seconds)]


def _pool_row(pool: Mapping[str, Any], *, has_dates: bool) -> list[str]:
    is_ended = pool["ended_at"] is not None
    lease = "" if is_ended else duration(pool["lease_seconds"])
    return [
        pool["pool"],
        f"ended {pool['ended_at']}" if has_dates and is_ended else pool["state"],
        pool["owner"],
        pool["provider"],
        f"{pool['open_resources']}/{pool['resources']}",
        *([pool["created_at"]] if has_dates else [duration(pool["age_seconds"]), lease]),
        _rate(pool["usd_per_hour"]),
        f"up to {money(pool['cost_usd'] + pool['unrecorded_usd'])}"
        if pool["unrecorded_usd"]
        else money(pool["cost_usd"]),
    ]


def _rate(usd_per_hour: float) -> str:
    """Return a price to the cent; one below a dollar as exactly as any sum."""
    return f"{usd_per_hour:.2f}" if usd_per_hour >= 1 else money(usd_per_hour) if usd_per_hour else ""


def faults(rows: Sequence[PoolRow]) -> list[str]:
    """Return what is wrong with pools that could be read in part."""
    return [f"pool {row.entry.id!r}: {row.entry.trouble}" for row in rows if row.entry.trouble]


def _stopped(pool_id: str, ended: Sequence[str], *, is_known: bool, provider: str | None) -> str:
    """Return what `skyward stop` has done: `ended` are ids of machines."""
    if ended:
        return f"{pool_id} has ended: {number_of(ended, 'machine')} ended ({first_of(ended)}); nothing of it is left"
    if is_known:
        return f"{pool_id} has ended; there was no machine of it to end"
    return (
        f"nothing was ended: the ledger has no pool {pool_id!r}, and {provider or 'the provider'} lists no machine"
        " of it; is that its id? look with `skyward ps --all`"
    )


def attempt_json(attempt: Attempt) -> dict[str, Any]:
    return {
        "at": iso(attempt.at),
        "provider": attempt.provider,
        "region": attempt.region,
        "instance_type": attempt.instance_type,
        "spot": attempt.is_spot,
        "seconds": round(attempt.seconds, 3),
        "error": attempt.error or None,
        "code": attempt.code or None,
        "message": attempt.message or None,
    }


def _attempts_table(attempts: Sequence[Attempt]) -> tuple[list[str], list[list[str]]]:
    heads = ["AT", "PROVIDER", "REGION", "TYPE", "MARKET", ">SECONDS", "OUTCOME", "CODE", "REASON"]
    return heads, [_attempt_row(attempt) for attempt in attempts]


def _attempt_row(attempt: Attempt) -> list[str]:
    return [
        iso(attempt.at),
        attempt.provider,
        attempt.region,
        attempt.instance_type,
        "" if not attempt.instance_type else "spot" if attempt.is_spot else "on demand",
        f"{attempt.seconds:.1f}",
        attempt.error or "rented",
        attempt.code,
        " ".join(attempt.message.split()),
    ]


def _notes(entry: PoolEntry, attempts: Sequence[Attempt]) -> list[str]:
    """Return what the table does not say of the accelerators that the pool wanted."""
    from pydantic import ValidationError

    from skyward_core.providers.base import sizes_on_aws
    from skyward_core.spec import PoolSpec

    if all(attempt.provider != "aws" for attempt in attempts):
        return []
    try:  # nothing else of the spec: a text that anybody may write could name files of this computer
        spec = PoolSpec.model_validate({"accelerator": json.loads(entry.spec_json).get("accelerator")})
    except (ValidationError, ValueError, AttributeError):  # of another release, or deleted
        return []
    chips = [one.first_accelerator for one in spec.each_alternative()]
    return [note for chip in chips if chip is not None and (note := sizes_on_aws(chip))]


def _none_known(entry: PoolEntry) -> str:
    """Return why the ledger has no attempts of this pool."""
    from skyward_core.ledger.rows import PRUNED_SPEC

    if entry.spec_json == PRUNED_SPEC:
        return f"{entry.id}: its attempts are not known any more: `skyward ledger prune` deleted them"
    return f"{entry.id} has not tried to rent anything"


def _warm_json(row: NamedPool) -> dict[str, Any]:
    return {
        "name": row.name,
        "pool": row.pool_id,
        "state": row.state.value,
        "warm_until": None if row.warm_until is None else iso(row.warm_until),
        "keep_warm_seconds": row.keep_warm_seconds,
    }


def _warm_text(row: NamedPool) -> str:
    if row.warm_until is not None:
        return f"{row.name} ({row.pool_id}) stays warm until {iso(row.warm_until)}"
    seconds = duration(row.keep_warm_seconds)
    return f"{row.name} ({row.pool_id}) is {row.state}; it stays warm for {seconds} when the last process has left it"
