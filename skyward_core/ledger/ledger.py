"""The ledger: requested and created resources, their cost, and their end. SQLite by default, PostgreSQL by URL.

An intent is committed before the call that creates a resource. After the call it is bound to the cloud's id. It is
closed with the evidence that the resource is gone. A crash in between leaves an open intent with the data to find the
resource: kind, provider, region, name, token, tags.

`rows.py` has the values, `tables.py` the tables, `schema.py` and `migrations` their versions. `database.py` owns the
connections and transactions; `sql_engine.py` opens SQLite and PostgreSQL. `pools.py`, `intents.py`, `bills.py` and
`accounts.py` each read and write one group of tables. `Ledger` is the one class that other packages use.
"""

from __future__ import annotations

import logging
import os
from collections.abc import Callable, Iterable, Mapping, Sequence
from datetime import UTC, datetime
from decimal import Decimal
from pathlib import Path
from types import TracebackType
from typing import Any, Self

from skyward_core.errors import ZERO_USD, LedgerError
from skyward_core.ledger.accounts import Accounts
from skyward_core.ledger.bills import Bills
from skyward_core.ledger.calls import Calls
from skyward_core.ledger.database import Database
from skyward_core.ledger.intents import Intents
from skyward_core.ledger.lease_clock import awake_seconds
from skyward_core.ledger.names import Names
from skyward_core.ledger.pools import Pools
from skyward_core.ledger.rows import (
    Account,
    Attempt,
    Bucket,
    CallEntry,
    CallState,
    CostBy,
    CostPart,
    CostRow,
    Intent,
    PoolEntry,
    PoolRow,
    Pruned,
    Rented,
    Reservation,
    ResourceRequest,
    SealedLease,
    UnreadableRow,
)
from skyward_core.ledger.stewards import Stewards
from skyward_core.ledger.uses import Uses
from skyward_core.machines.owner import Owner
from skyward_core.paths import first_private, state_places
from skyward_core.work import NO_WORK, Work
from skyward_core.worker.private_folders import NotPrivate

BUSY_TIMEOUT_SECONDS = 30.0
"""How long a statement waits for a writer in another process. A write takes milliseconds."""
ELSEWHERE = (
    "name another place, SKYWARD_LEDGER=sqlite:////var/lib/skyward/ledger.db or postgresql+psycopg://host/database"
)
_log = logging.getLogger("skyward")


def default_url(environ: Mapping[str, str] = os.environ, *, must_last: bool = False) -> str:
    """Return the ledger's URL: `SKYWARD_LEDGER`, or a SQLite file under the user's state directory.

    If that directory is not writable, it is a file in the user's runtime folder, with a warning, because a reboot may
    delete it. `must_last` raises LedgerError instead: a budget needs it. A user without a home raises it too.
    """
    if url := environ.get("SKYWARD_LEDGER"):
        return url
    home, *others = state_places()
    try:
        folder = home[1]()
    except (RuntimeError, KeyError) as error:
        raise LedgerError(
            f"there is no place for the ledger, because this user has no home ({error}): set HOME, or {ELSEWHERE}"
        ) from error
    if not folder.is_absolute():
        raise LedgerError(
            f"there is no place for the ledger, because this user has no home ({folder} leads nowhere): set HOME, or"
            f" {ELSEWHERE}"
        )
    if _can_be_written(folder):
        return f"sqlite:///{folder / 'ledger.db'}"
    if must_last:
        raise LedgerError(f"{folder} may not be written to, and a budget needs a ledger that lasts: {ELSEWHERE}")
    try:
        runtime = first_private("ledger", others)
    except NotPrivate as error:
        raise LedgerError(
            f"{folder} may not be written to, and there is no private runtime folder: {error}."
            f" {ELSEWHERE[0].upper()}{ELSEWHERE[1:]}"
        ) from error
    _log.warning(
        "%s may not be written to: the ledger is in %s, which may be gone after a reboot; %s",
        folder,
        runtime,
        ELSEWHERE,
    )
    return f"sqlite:///{runtime / 'ledger.db'}"


def _can_be_written(folder: Path) -> bool:
    """Return whether files can be created in a folder, or the folder itself."""
    there = next(path for path in (folder, *folder.parents) if path.exists())
    return os.access(there, os.W_OK | os.X_OK)


def now() -> datetime:
    """Return the time of day, in UTC."""
    return datetime.now(UTC)


class Ledger:
    """An open ledger. Close it, or use it as a context manager. Safe to use from several threads, not across a fork.

    Every method is one transaction, committed when it returns, and raises LedgerError when the database cannot be used.
    SQLite files are in WAL mode: readers never wait, and nothing waits for them. Do not put the file on a network file
    system: processes there do not see each other's locks.
    """

    def __init__(
        self,
        url: str,
        *,
        clock: Callable[[], datetime] = now,
        busy_timeout_seconds: float = BUSY_TIMEOUT_SECONDS,
        uses_server_clock: bool | None = None,
        awake: Callable[[], float] | None = None,
    ) -> None:
        """Open the ledger at a SQLAlchemy URL, and create or migrate it.

        `uses_server_clock`: whether a PostgreSQL server's clock decides about pools with a name; None: unless another
        clock is given. `awake` counts the seconds for which this computer was awake since its boot, by which leases of
        this boot are judged although its time of day was set; None: the kernel's, unless another clock is given.
        """
        of_server = clock is now if uses_server_clock is None else uses_server_clock
        awake = awake_seconds if awake is None and clock is now else awake
        self._database = Database(url, clock, busy_timeout_seconds, uses_server_clock=of_server, awake=awake)
        self.url = self._database.url
        self._pools = Pools(self._database)
        self._intents = Intents(self._database)
        self._bills = Bills(self._database)
        self._accounts = Accounts(self._database)
        self._calls = Calls(self._database)
        self.names = Names(self._database)
        """Pools with a name, and their clients."""
        self.uses = Uses(self._database)
        """What each step has cost that makes calls on a pool."""
        self.stewards = Stewards(self._database)
        """Which client keeps a named pool."""

    def close(self) -> None:
        """Close all connections. May be called twice. A later call opens its own connection."""
        self._database.close()

    def time_of_day(self) -> datetime:
        """Return the time of this computer, by which `PoolEntry.lease_expires_at` is judged."""
        return self._database.clock()

    def try_write(self) -> int:
        """Write without changing anything; return the version of the tables. For checks of an installation."""
        return self._database.try_write()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    # ── pools ────────────────────────────────────────────────────────────────────────────────────────────────────────

    def open_pool(
        self,
        pool_id: str,
        *,
        owner: Owner,
        provider: Mapping[str, Any],
        spec_json: str,
        lease_expires_at: datetime,
        account: str | None = None,
        work: Work = NO_WORK,
        name: str = "",
        run_limit_usd: Decimal | None = None,
    ) -> PoolEntry:
        """Record a pool before anything is requested for it. Raises LedgerConflict if the id is taken.

        `work` is that to which the pool belongs. With a `name` and without a work it belongs to nobody.
        `run_limit_usd` limits the cost of all pools whose work has the same system, workflow and run, in USD: the
        pool draws on an account that they share, with each of its reservations. The newest limit counts. Raises
        BadRequest if the work names no run.
        """
        return self._pools.open_pool(
            pool_id,
            owner=owner,
            provider=provider,
            spec_json=spec_json,
            lease_expires_at=lease_expires_at,
            account=account,
            work=work,
            name=name,
            run_limit_usd=run_limit_usd,
        )

    def turn_to(self, pool_id: str, provider: Mapping[str, Any], provider_account: str) -> None:
        """Record the provider and account of a pool from now on.

        All machines at an earlier provider must be known to be gone.
        Raises LeaseLost if the pool was condemned or has ended, LedgerConflict if it is unknown.
        """
        self._pools.turn_to(pool_id, provider, provider_account)

    def renew(self, pool_id: str, lease_expires_at: datetime) -> None:
        """Move the end of a pool's lease, never to an earlier time.

        Raises LeaseLost if the pool was condemned or has ended, LedgerConflict if it is unknown. Changes one row.
        """
        self._pools.renew(pool_id, lease_expires_at)

    def live_by_lease(self, pool_id: str, lease_expires_at: datetime) -> None:
        """Let a pool outlive its owner until its lease runs out; as `renew` otherwise."""
        self._pools.live_by_lease(pool_id, lease_expires_at)

    def condemn(self, pool_id: str, *, seen: datetime) -> bool:
        """Condemn one pool, and return whether it is dead; see `condemn_all`. `seen` is its `written_lease`."""
        return pool_id in self.condemn_all({pool_id: seen})

    def condemn_all(self, seen: Mapping[str, datetime]) -> set[str]:
        """Condemn pools, each unless its lease was renewed: `seen` has the ends that were read, as they were written.

        From now on nothing is requested for them.
        Returns the ids of those that are dead: condemned now or before, or ended. The leases of the others were
        renewed: read them again. Raises LedgerConflict if one is unknown.
        """
        return self._pools.condemn_all(seen)

    def end_pool(self, pool_id: str) -> None:
        """Record that one pool has ended; see `end_pools`."""
        self.end_pools([pool_id])

    def end_pools(self, pool_ids: Iterable[str]) -> None:
        """Record that pools have ended; the first time is kept. Their sealed leases are deleted.

        Their open intents stay open. Raises LedgerConflict if one is unknown.
        """
        self._pools.end_pools(pool_ids)

    def seal_lease(self, pool_id: str, lease_json: str, sealed: str, *, epoch: int | None = None) -> None:
        """Record the newest lease of a pool that outlives its owner, with the keys for it as a sealed text.

        It replaces an earlier one. Raises LeaseLost if the pool was condemned or has ended, and LedgerConflict if it is
        unknown. Raises NotSteward if a named pool has had another steward after this epoch.
        """
        self._pools.seal_lease(pool_id, lease_json, sealed, epoch=epoch)

    def sealed_lease(self, pool_id: str) -> SealedLease | None:
        """Return the newest lease of a pool with its sealed keys, not verified; None if there is none."""
        return self._pools.sealed_lease(pool_id)

    def pool(self, pool_id: str) -> PoolEntry | None:
        """Return a pool; None if it is unknown."""
        return self._pools.pool(pool_id)

    def pools(self, *, include_ended: bool = False, unreadable: list[UnreadableRow] | None = None) -> list[PoolEntry]:
        """Return the pools, oldest first.

        Rows that cannot be read are appended to `unreadable`; without that list they raise, as in the other listings.
        """
        return self._pools.pools(include_ended=include_ended, unreadable=unreadable)

    def pool_rows(
        self, *, include_ended: bool = False, limit: int | None = None, unreadable: list[UnreadableRow] | None = None
    ) -> list[PoolRow]:
        """Return the pools with what each has cost so far, oldest first; with `limit` only so many of the newest."""
        return self._bills.pool_rows(include_ended=include_ended, limit=limit, unreadable=unreadable)

    # ── attempts ─────────────────────────────────────────────────────────────────────────────────────────────────────

    def note_attempts(self, attempts: Sequence[Attempt]) -> None:
        """Record the results of attempts to rent machines."""
        self._pools.note_attempts(attempts)

    def attempts(
        self,
        *,
        pool_id: str | None = None,
        since: datetime | None = None,
        unreadable: list[UnreadableRow] | None = None,
    ) -> list[Attempt]:
        """Return attempts to rent machines, oldest first: of one pool, since a time, or all."""
        return self._pools.attempts(pool_id=pool_id, since=since, unreadable=unreadable)

    # ── detached calls ───────────────────────────────────────────────────────────────────────────────────────────────

    def note_calls(self, pool_id: str, calls: Sequence[CallState]) -> None:
        """Record the states of detached calls. Idempotent: a later attempt and a later state win, an end stays.

        Raises LedgerConflict if the pool is unknown.
        """
        self._calls.note_calls(pool_id, calls)

    def calls(
        self,
        *,
        pool_id: str | None = None,
        owner: str | None = None,
        since: datetime | None = None,
        unreadable: list[UnreadableRow] | None = None,
    ) -> list[CallEntry]:
        """Return detached calls, oldest first: of one pool, of owners that contain this text, started since a time."""
        return self._calls.calls(pool_id=pool_id, owner=owner, since=since, unreadable=unreadable)

    # ── intents ──────────────────────────────────────────────────────────────────────────────────────────────────────

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
        return self._intents.intend_all(pool_id, requests, epoch=epoch)

    def adopt(self, pool_id: str, request: ResourceRequest, cloud_id: str) -> Intent:
        """Record a resource that exists and has no intent: intent and binding at once. Idempotent.

        Allowed for a pool that is condemned or has ended: what exists must be ended. Errors as of `intend_all` and
        `bind`.
        """
        return self._intents.adopt(pool_id, request, cloud_id)

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
        return self._intents.bind_all(ids, as_rented)

    def ask_end_all(self, numbers: Iterable[int]) -> list[Intent]:
        """Record that the termination of these was requested; the first time is kept."""
        return self._intents.ask_end_all(numbers)

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
        return self._intents.close_all(numbers, evidence, fill=fill, paid_until=paid_until)

    def note_all(self, seconds: Mapping[int, Mapping[Bucket, float]]) -> None:
        """Record the seconds of resources so far: totals by bucket, in whole milliseconds. Idempotent.

        The buckets of a resource are replaced together if their sum does not shrink: a second may move to another
        bucket and is never lost. After the close, noted seconds replace those that the close has filled in.
        """
        self._intents.note_all(seconds)

    def open_intents(
        self, *, pool_id: str | None = None, provider: str | None = None, unreadable: list[UnreadableRow] | None = None
    ) -> list[Intent]:
        """Return the entries that are not known to be gone, oldest first: all, of one pool, or at one provider."""
        return self._intents.open_intents(pool_id=pool_id, provider=provider, unreadable=unreadable)

    def intents(
        self, *, pool_id: str | None = None, provider: str | None = None, unreadable: list[UnreadableRow] | None = None
    ) -> list[Intent]:
        """Return all entries, open and closed, oldest first."""
        return self._intents.intents(pool_id=pool_id, provider=provider, unreadable=unreadable)

    # ── cost ─────────────────────────────────────────────────────────────────────────────────────────────────────────

    def cost_rows(
        self,
        by: CostBy = CostBy.POOL,
        *,
        pool_id: str | None = None,
        since: datetime | None = None,
        until: datetime | None = None,
        work: Work = NO_WORK,
        split: bool = False,
        unreadable: list[UnreadableRow] | None = None,
    ) -> list[CostRow]:
        """Return the bill, added up by `by`.

        It is the bill of all pools, one pool, intents from `since` until before `until`, or pools for this work.
        A pool is for `work` if the work to which it belongs, of one of its uses, detached calls or shares, has the same
        text in each field that is not empty in `work`. By bucket there is one more row, `BILLING_ROUNDING`. By run,
        task, asset, partition and owner, uses and detached calls count for their works (`work_costs`), and so do the
        shares that pruning and earlier releases have left. The rest of the cost, and the number of resources, count for
        the work to which the pool belongs; of a pool that belongs to nobody they are a row of their own, `pool NAME`,
        unless `split` divides the rest among the others in proportion to their costs. With `work`, only the parts for
        it count in these bills, and by pool; otherwise the sum of the rows does not depend on `by`, but for what calls
        have held in the last seconds, which counts before the time of their machines is noted. With `unreadable`, rows
        with values that are no numbers (SQLite stores any value) are left out and appended to it.
        """
        return self._bills.cost_rows(
            by, pool_id=pool_id, since=since, until=until, work=work, split=split, unreadable=unreadable
        )

    def cost_parts(self, work: Work, ended_between: tuple[datetime, datetime] | None = None) -> list[CostPart]:
        """Return the parts of the cost of pools that are for a work: one for each pool, and each work that has the same
        text in all fields that are not empty in `work`. Their sum is that of `cost_rows(work=work)`. With
        `ended_between` only pools count that have ended in that time.
        """
        return self._bills.cost_parts(work, ended_between)

    # ── accounts ─────────────────────────────────────────────────────────────────────────────────────────────────────

    def set_account(self, account: Account) -> None:
        """Create an account, or change its limit or period; a new period counts from zero."""
        self._accounts.set_account(account)

    def accounts(self, *, unreadable: list[UnreadableRow] | None = None) -> list[Account]:
        """Return the accounts, by name."""
        return self._accounts.accounts(unreadable=unreadable)

    def left_usd(self, account: str, pool_id: str) -> Decimal:
        """Return what a pool could reserve from an account now, in USD; negative after overspending."""
        return self._accounts.left_usd(account, pool_id)

    def reserve(self, account: str | None, pool_id: str, usd: Decimal, *, epoch: int | None = None) -> Reservation:
        """Reserve money for a pool, in one transaction that is isolated from all others.

        The same sum is reserved from the account of the pool's run, if it has one: both or neither. Without `account`
        only that one pays.

        Raises BudgetExceeded if less is left in this period (reservations and spending both count), LeaseLost if the
        pool was condemned or has ended: nothing would settle the reservation, NotSteward if `epoch` is not that of the
        steward of the pool's name.
        """
        return self._accounts.reserve(account, pool_id, usd, epoch=epoch)

    def roll(
        self, account: str | None, pool_id: str, spent_usd: Decimal, next_usd: Decimal, *, epoch: int | None = None
    ) -> Reservation:
        """Settle a pool's reservations from an account, and from that of its run, and reserve for the next interval:
        all or nothing.

        `spent_usd` is the cost since the last settlement.
        `settle_pool` describes how the sum is divided among several reservations. The next reservation may be 0 USD.
        Errors as of `reserve`; after BudgetExceeded nothing has changed.
        """
        return self._accounts.roll(account, pool_id, spent_usd, next_usd, epoch=epoch)

    def settle(self, reservation: Reservation | int, spent_usd: Decimal) -> Reservation:
        """Record what was spent of a reservation; the rest is free again. More than was reserved is recorded too.

        The same sum again changes nothing; another sum raises LedgerConflict.
        """
        return self._accounts.settle(reservation, spent_usd)

    def settle_pool(self, pool_id: str, spent_usd: Decimal) -> None:
        """Settle all open reservations of a pool, so that its settled sums add up to `spent_usd`. Idempotent.

        The oldest comes first. Each pays at most its own sum, and the newest pays the rest: so no period and no account
        pays for another one while there is enough. Those from the account of its run add up to `spent_usd` separately.
        If the settled sum is larger already, the open ones pay nothing.
        """
        self._accounts.settle_pool(pool_id, spent_usd)

    def committed_usd(self, pool_id: str) -> Decimal:
        """Return what accounts have paid for a pool, and what is reserved for it now, in USD."""
        return self._accounts.committed_usd(pool_id)

    def release(self, reservation: Reservation | int) -> Reservation:
        """Free a reservation unspent."""
        return self.settle(reservation, ZERO_USD)

    def settled_usd(self, pool_id: str, account: str) -> Decimal:
        """Return what an account has paid for a pool so far, in USD."""
        return self._accounts.settled_usd(pool_id, account)

    def open_reservations(
        self, *, pool_id: str | None = None, unreadable: list[UnreadableRow] | None = None
    ) -> list[Reservation]:
        """Return the reservations that are not settled, oldest first."""
        return self._accounts.open_reservations(pool_id=pool_id, unreadable=unreadable)

    # ── pruning ──────────────────────────────────────────────────────────────────────────────────────────────────────

    def prune(self, ended_before: datetime, *, is_dry_run: bool = True) -> Pruned:
        """Delete the details of pools that ended before `ended_before` and have no open entries. Idempotent.

        Details are specs, attempts to rent machines, tags of machines, settled reservations and detached calls. The
        cost of each machine and the spending of accounts stay: bills, receipts and budgets show the same as before.
        """
        return self._bills.prune(ended_before, is_dry_run=is_dry_run)

    def vacuum(self) -> None:
        """Free the space of deleted rows: on the disk (SQLite), or in the tables (PostgreSQL)."""
        self._database.vacuum()
