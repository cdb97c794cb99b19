"""The ledger's table of resources (a part of `Ledger`)."""

from __future__ import annotations

import json
from collections.abc import Callable, Generator, Iterable, Mapping, Sequence
from datetime import datetime
from typing import Any

from sqlalchemy import Connection, RowMapping, Select, bindparam, insert, select, update

from skyward_core.errors import BadRequest, LedgerConflict
from skyward_core.ledger.database import NUMBERS_PER_STATEMENT, Database
from skyward_core.ledger.names import must_be_steward
from skyward_core.ledger.pools import known_pool, must_live
from skyward_core.ledger.rows import Bucket, Intent, Rented, ResourceRequest, UnreadableRow, micro_usd
from skyward_core.ledger.sql_engine import shown
from skyward_core.ledger.tables import IS_OPEN, RESOURCES, Values, intent_of, milliseconds_of, read_rows, stamp
from skyward_core.ledger.uses import closing_values, unnoted_milliseconds, warm_since, with_warm


class Intents:
    """The rows of resources: intents, bindings, seconds by bucket, and evidence."""

    _database: Database

    def intend(self, pool_id: str, request: ResourceRequest) -> Intent:
        """Record one resource that is about to be requested; see `intend_all`."""
        return self.intend_all(pool_id, [request])[0]

    def intend_all(
        self, pool_id: str, requests: Sequence[ResourceRequest], *, epoch: int | None = None
    ) -> list[Intent]:
        """Record resources that are about to be requested, all or none.

        They are committed when this returns: make the creating call only then. For a known token the entry is returned
        unchanged: the call is a retry. Raises LedgerConflict if the token belongs to another resource or the pool is
        unknown. Raises LeaseLost if the pool was condemned or has ended, and NotSteward if a named pool has had another
        steward after this epoch.
        """
        rows = [self._row_of(pool_id, request) for request in requests]
        with self._database.write() as connection:
            must_be_steward(connection, pool_id, epoch)
            must_live(connection, pool_id)
            return _written(connection, rows)

    def adopt(self, pool_id: str, request: ResourceRequest, cloud_id: str) -> Intent:
        """Record a resource that exists and has no intent: intent and binding at once. Idempotent.

        Allowed for a pool that is condemned or has ended: what exists must be ended. Errors as of `intend_all` and
        `bind`.
        """
        with self._database.write() as connection:
            known_pool(connection, pool_id, is_alone=True)  # two sweeps may have found the same resource
            intent = _written(connection, [self._row_of(pool_id, request)])[0]
            return self._change_all(connection, [intent.id], self._binding({intent.id: cloud_id}, []))[0]

    def _row_of(self, pool_id: str, request: ResourceRequest) -> dict[str, Any]:
        price = request.price
        if price.increment_seconds < 1 or price.minimum_seconds < 0 or price.minimum_usd < 0:
            raise BadRequest(
                f"A billing increment is at least one second, and a minimum is not negative; given {price}."
            )
        return {
            "pool_id": pool_id,
            "kind": request.kind.value,
            "provider": request.provider,
            "region": request.region,
            "name": request.name,
            "token": request.token,
            "tags_json": json.dumps(dict(request.tags), sort_keys=True),
            "price_micro_usd_per_hour": micro_usd(price.per_hour),
            "on_demand_micro_usd_per_hour": micro_usd(
                price.per_hour if price.on_demand_per_hour is None else price.on_demand_per_hour
            ),
            "is_spot": price.is_spot,
            "increment_seconds": price.increment_seconds,
            "minimum_seconds": price.minimum_seconds,
            "minimum_micro_usd": micro_usd(price.minimum_usd),
            "extras_json": json.dumps([extra.model_dump() for extra in price.extras]),
            "intended_microseconds": stamp(self._database.clock()),
            "expires_microseconds": stamp(request.expires_at),
        }

    def bind(self, intent: Intent | int, cloud_id: str) -> Intent:
        """Record the cloud's id of one created resource; see `bind_all`."""
        return self.bind_all({intent if isinstance(intent, int) else intent.id: cloud_id})[0]

    def bind_all(self, ids: Mapping[int, str], as_rented: Mapping[int, Rented] | None = None) -> list[Intent]:
        """Record the cloud's ids, by the numbers of their intents. The same ids again change nothing.

        `as_rented` is for resources that differ from the request. Their price replaces the intent's if it is lower:
        money was reserved for the intent's price, and no bill may exceed it.

        An intent that was closed unbound is opened again: the listing or the answer was late, and the resource exists.
        Allowed for a condemned pool. Raises LedgerConflict for those that are bound to another id, after the others
        have been recorded.
        """
        conflicts: list[str] = []
        with self._database.write() as connection:
            intents = self._change_all(connection, ids, self._binding(ids, conflicts, as_rented or {}))
        if conflicts:
            raise LedgerConflict(" ".join(conflicts))
        return intents

    def _binding(
        self, ids: Mapping[int, str], conflicts: list[str], as_rented: Mapping[int, Rented] | None = None
    ) -> Callable[[Values], dict[str, Any]]:
        bound = stamp(self._database.clock())

        def change(row: Values) -> dict[str, Any]:
            cloud_id = ids[row["id"]]
            if row["cloud_id"] is None:
                rented = (as_rented or {}).get(row["id"])
                changed = {} if rented is None else _as_rented(row, rented)
                return {
                    "cloud_id": cloud_id,
                    "bound_microseconds": bound,
                    "gone_microseconds": None,
                    "evidence": None,
                } | changed
            if row["cloud_id"] != cloud_id:
                conflicts.append(
                    f"{row['kind']} {row['name']!r} at {row['provider']} is {row['cloud_id']} in the ledger, but"
                    f" {cloud_id} now. One request has created two resources: terminate {cloud_id}, or record a"
                    " separate intent for it."
                )
            return {}

        return change

    def ask_end_all(self, numbers: Iterable[int]) -> list[Intent]:
        """Record that the termination of these was requested; the first time is kept."""
        requested = stamp(self._database.clock())

        def change(row: Values) -> dict[str, Any]:
            return (
                {"end_asked_microseconds": requested}
                if row["end_asked_microseconds"] is None and row["gone_microseconds"] is None
                else {}
            )

        with self._database.write() as connection:
            return self._change_all(connection, numbers, change)

    def close_all(
        self,
        numbers: Iterable[int],
        evidence: str,
        *,
        fill: Bucket | None = None,
        paid_until: Mapping[int, datetime] | None = None,
    ) -> list[Intent]:
        """Record that these are gone or never existed, with the evidence; the first evidence is kept.

        With `fill`, the seconds since the intent that are in no bucket yet are added to that one, if the resource was
        bound: every second is in a bucket. `paid_until` has the times from which some cost nothing any more, if that
        was long before they were known to be gone.
        """
        if not evidence.strip():
            raise BadRequest("An intent is closed with the evidence that its resource is gone; none was given.")
        gone = stamp(self._database.clock())

        def change(row: Values) -> dict[str, Any]:
            if row["gone_microseconds"] is not None:
                return {}
            closed: dict[str, Any] = {"gone_microseconds": gone, "evidence": evidence}
            if fill is None or row["cloud_id"] is None:
                return closed
            end = min(gone, stamp(paid_until[row["id"]])) if paid_until and row["id"] in paid_until else gone
            warm = closing_values(row, since.get(row["pool_id"]), end)
            missing = unnoted_milliseconds({**row, **warm}, end)
            filled = {
                milliseconds_of(fill): row[milliseconds_of(fill)] + missing,
                "filled_bucket": fill.name,
                "filled_milliseconds": missing,
            }
            return closed | warm | filled

        with self._database.write() as connection:
            wanted = list(numbers)
            since = self._warm_since(connection, wanted)
            return self._change_all(connection, wanted, change)

    def _warm_since(self, connection: Connection, numbers: Sequence[int]) -> dict[str, int]:
        """Return since when the pools of these entries are warm, by pool id."""
        pools = set[str]()
        for start in range(0, len(numbers), NUMBERS_PER_STATEMENT):
            some = numbers[start : start + NUMBERS_PER_STATEMENT]
            pools |= set(connection.execute(select(RESOURCES.c.pool_id).where(RESOURCES.c.id.in_(some))).scalars())
        return warm_since(connection, pools)

    def note_all(self, seconds: Mapping[int, Mapping[Bucket, float]]) -> None:
        """Record the seconds of resources so far: totals by bucket, in whole milliseconds. Idempotent.

        The buckets of a resource are replaced together if their sum does not shrink: a second may move to another
        bucket and is never lost. After the close, noted seconds replace those that the close has filled in.
        """
        noted = {
            number: {bucket: round(total * 1000) for bucket, total in its.items()} for number, its in seconds.items()
        }
        if wrong := [total for its in noted.values() for total in its.values() if total < 0]:
            raise BadRequest(f"Seconds only add up; given {wrong[0] / 1000}.")
        with self._database.write() as connection:
            self._change_all(connection, noted, lambda row: _noted(row, noted[row["id"]]))

    def _change_all(
        self, connection: Connection, numbers: Iterable[int], change: Callable[[Values], dict[str, Any]]
    ) -> list[Intent]:
        """Lock rows, apply the changes that `change` returns, and return the intents in the order of `numbers`."""
        wanted = list(numbers)
        rows = {row["id"]: row for row in self._locked(connection, sorted(set(wanted)))}
        if missing := next((number for number in wanted if number not in rows), None):
            raise LedgerConflict(
                f"The ledger at {shown(self._database.url)} has no entry {missing}. Is it another ledger than the"
                " one it was written to?"
            )
        changes = {number: changed for number, row in rows.items() if (changed := change(row))}
        columns = sorted({column for changed in changes.values() for column in changed})
        if changes:
            statement = (
                update(RESOURCES)
                .where(RESOURCES.c.id == bindparam("number"))
                .values({column: bindparam(f"new_{column}") for column in columns})
            )
            new = [
                {f"new_{column}": ({**rows[number], **changed})[column] for column in columns} | {"number": number}
                for number, changed in changes.items()
            ]
            connection.execute(statement, new)
        return [intent_of({**rows[number], **changes.get(number, {})}) for number in wanted]

    def _locked(self, connection: Connection, numbers: Sequence[int]) -> Generator[RowMapping]:
        """Generate locked rows in the order of their numbers. All writers use this order, so there is no deadlock."""
        for start in range(0, len(numbers), NUMBERS_PER_STATEMENT):
            some = select(RESOURCES).where(RESOURCES.c.id.in_(numbers[start : start + NUMBERS_PER_STATEMENT]))
            yield from connection.execute(some.order_by(RESOURCES.c.id).with_for_update()).mappings()

    def open_intents(
        self, *, pool_id: str | None = None, provider: str | None = None, unreadable: list[UnreadableRow] | None = None
    ) -> list[Intent]:
        """Return the entries that are not known to be gone, oldest first: all, of one pool, or at one provider."""
        return self._intents(select(RESOURCES).where(IS_OPEN), pool_id, provider, unreadable)

    def intents(
        self, *, pool_id: str | None = None, provider: str | None = None, unreadable: list[UnreadableRow] | None = None
    ) -> list[Intent]:
        """Return all entries, open and closed, oldest first."""
        return self._intents(select(RESOURCES), pool_id, provider, unreadable)

    def _intents(
        self, wanted: Select[Any], pool_id: str | None, provider: str | None, unreadable: list[UnreadableRow] | None
    ) -> list[Intent]:
        if pool_id is not None:
            wanted = wanted.where(RESOURCES.c.pool_id == pool_id)
        if provider is not None:
            wanted = wanted.where(RESOURCES.c.provider == provider)
        with self._database.read() as connection:
            return read_rows(connection.execute(wanted.order_by(RESOURCES.c.id)).mappings(), intent_of, unreadable)


def _as_rented(row: Values, rented: Rented) -> dict[str, Any]:
    tags = json.loads(row["tags_json"]) | dict(rented.tags)
    price = min(row["price_micro_usd_per_hour"], micro_usd(rented.per_hour))
    return {"price_micro_usd_per_hour": price, "tags_json": json.dumps(tags, sort_keys=True)}


def _written(connection: Connection, rows: Sequence[Mapping[str, Any]]) -> list[Intent]:
    """Insert rows with new tokens; return the intents of all in their order."""
    by_token: dict[str, Intent] = {}
    tokens = [row["token"] for row in rows]
    for start in range(0, len(tokens), NUMBERS_PER_STATEMENT):
        known = select(RESOURCES).where(RESOURCES.c.token.in_(tokens[start : start + NUMBERS_PER_STATEMENT]))
        by_token |= {row["token"]: intent_of(row) for row in connection.execute(known).mappings()}
    if new := list({row["token"]: row for row in reversed(rows) if row["token"] not in by_token}.values())[::-1]:
        made = connection.execute(insert(RESOURCES).returning(*RESOURCES.c, sort_by_parameter_order=True), new)
        by_token |= {row["token"]: intent_of(row) for row in made.mappings()}
    for row in rows:
        found = by_token[row["token"]]
        if (found.pool_id, found.kind, found.provider, found.region, found.name) != tuple(
            row[of] for of in ("pool_id", "kind", "provider", "region", "name")
        ):
            raise LedgerConflict(
                f"Token {found.token!r} belongs to {found.kind} {found.name!r} of pool {found.pool_id!r} at"
                f" {found.provider}. Use a new token."
            )
    return [by_token[token] for token in tokens]


def _noted(row: Values, totals: Mapping[Bucket, int]) -> dict[str, Any]:
    """Return the changes of a row for new totals by bucket. They replace the old ones if their sum does not shrink.

    They replace all buckets together, because idle time may turn out to be running time. Seconds that a close has
    filled in are reduced by the growth of the sum. When none of them are left, the sum cannot grow any more. Warm time
    stays (`with_warm`).
    """
    filled, filled_bucket = row["filled_milliseconds"], row["filled_bucket"]
    known = {
        bucket: row[milliseconds_of(bucket)] - (filled if filled_bucket == bucket.name else 0) for bucket in Bucket
    }
    new = with_warm(known, totals)
    growth = sum(new.values()) - sum(known.values())
    if growth < 0 or new == known:
        return {}
    if filled_bucket is not None:
        over = max(0, growth - filled)
        filled -= growth - over
        for bucket in reversed(Bucket):
            cut = min(over, max(0, new[bucket] - known[bucket]))
            new[bucket], over = new[bucket] - cut, over - cut
        new[Bucket[filled_bucket]] += filled
    return {milliseconds_of(bucket): total for bucket, total in new.items()} | {"filled_milliseconds": filled}
