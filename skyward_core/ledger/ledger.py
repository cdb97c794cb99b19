"""What we asked for, what we got, what it costs, what is gone: SQLite by default, PostgreSQL by URL.

An intent is written and committed before the call that creates something, bound to the cloud's id after it, and closed with the evidence that the
thing is gone. Whatever dies in between leaves an open intent, with all that is needed to find the thing: kind, provider, region, name, token, tags.

`rows.py` has the values and `tables.py` the tables. `database.py` owns the connections and transactions; `pools.py`, `intents.py`, `bills.py` and
`accounts.py` each read and write one group of tables with it. `Ledger` is the one class that other packages use.
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
from skyward_core.ledger.database import Database
from skyward_core.ledger.intents import Intents
from skyward_core.ledger.pools import Pools
from skyward_core.ledger.rows import Account, Attempt, Bucket, CostBy, CostRow, Intent, PoolEntry, PoolRow, Pruned, Rented, Reservation, UnreadableRow, Wish
from skyward_core.machines.owner import Owner
from skyward_core.paths import first_private, state_places
from skyward_core.work import NO_WORK, Work
from skyward_core.worker.private_folders import NotPrivate

BUSY_TIMEOUT_SECONDS = 30.0
"""How long a statement waits for another process that is writing; a write takes milliseconds."""
ELSEWHERE = "name another place, SKYWARD_LEDGER=sqlite:////var/lib/skyward/ledger.db or postgresql+psycopg://host/database"
_log = logging.getLogger("skyward")


def default_url(environ: Mapping[str, str] = os.environ, *, must_last: bool = False) -> str:
    """Return the ledger's URL: `SKYWARD_LEDGER`, or a SQLite file under the user's state directory.

    Where that may not be written to, it is a file in the user's runtime folder, after a warning: such a ledger may be gone after a reboot. `must_last` raises
    LedgerError instead, for what is paid from an account; and so does whoever has no home at all.
    """
    if url := environ.get("SKYWARD_LEDGER"):
        return url
    home, *others = state_places()
    try:
        folder = home[1]()
    except (RuntimeError, KeyError) as error:
        raise LedgerError(f"there is no place for the ledger, for this user has no home ({error}): set HOME, or {ELSEWHERE}") from error
    if not folder.is_absolute():
        raise LedgerError(f"there is no place for the ledger, for this user has no home ({folder} leads nowhere): set HOME, or {ELSEWHERE}")
    if _can_be_written(folder):
        return f"sqlite:///{folder / 'ledger.db'}"
    if must_last:
        raise LedgerError(f"{folder} may not be written to, and a budget needs a ledger that lasts: {ELSEWHERE}")
    try:
        runtime = first_private("ledger", others)
    except NotPrivate as error:
        raise LedgerError(f"{folder} may not be written to, and nothing else may be: {error}. {ELSEWHERE[0].upper()}{ELSEWHERE[1:]}") from error
    _log.warning("%s may not be written to: the ledger is in %s, which may be gone after a reboot; %s", folder, runtime, ELSEWHERE)
    return f"sqlite:///{runtime / 'ledger.db'}"


def _can_be_written(folder: Path) -> bool:
    """Whether files can be made in a folder, or the folder itself."""
    there = next(path for path in (folder, *folder.parents) if path.exists())
    return os.access(there, os.W_OK | os.X_OK)


def now() -> datetime:
    """Return the time of day, in UTC."""
    return datetime.now(UTC)


class Ledger:
    """An open ledger, usable from many threads; each process opens its own (not across a fork). Close it, or use it as a context manager.

    Every verb is one transaction, committed when it returns, and raises LedgerError when the database cannot be used. SQLite files are in WAL mode:
    readers never wait and are never waited for; they must not lie on a network file system, whose processes could not see each other's locks.
    """

    def __init__(self, url: str, *, clock: Callable[[], datetime] = now, busy_timeout_seconds: float = BUSY_TIMEOUT_SECONDS) -> None:
        """Open the ledger at a SQLAlchemy URL; make it if there is none, migrate it if it is of an older version."""
        self._database = Database(url, clock, busy_timeout_seconds)
        self.url = self._database.url
        self._pools = Pools(self._database)
        self._intents = Intents(self._database)
        self._bills = Bills(self._database)
        self._accounts = Accounts(self._database)

    def close(self) -> None:
        """Close all connections; may be called twice. What is used later opens a connection for the time of its transaction."""
        self._database.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        self.close()

    # ── pools ──────────────────────────────────────────────────────────────────────────────────────────────────────────

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
    ) -> PoolEntry:
        """Write down a pool before anything is asked for on its behalf. Raises LedgerConflict if there is one of that id."""
        return self._pools.open_pool(
            pool_id, owner=owner, provider=provider, spec_json=spec_json, lease_expires_at=lease_expires_at, account=account, work=work
        )

    def turn_to(self, pool_id: str, provider: Mapping[str, Any], provider_account: str) -> None:
        """Write down who is to rent out a pool's machines from now on, and to whom; what others had of it must be known to be gone.

        Raises LeaseLost if the pool was condemned or has ended, LedgerConflict if it is unknown.
        """
        self._pools.turn_to(pool_id, provider, provider_account)

    def renew(self, pool_id: str, lease_expires_at: datetime) -> None:
        """Move the end of a pool's lease, never to an earlier time.

        Raises LeaseLost if the pool was condemned or has ended, LedgerConflict if it is unknown. Cheap: it touches one row.
        """
        self._pools.renew(pool_id, lease_expires_at)

    def live_by_lease(self, pool_id: str, lease_expires_at: datetime) -> None:
        """Let a pool outlive its owner until its lease runs out; as `renew` otherwise."""
        self._pools.live_by_lease(pool_id, lease_expires_at)

    def condemn(self, pool_id: str, *, seen: datetime) -> bool:
        """Judge one pool dead, and return whether it is; see `condemn_all`."""
        return pool_id in self.condemn_all({pool_id: seen})

    def condemn_all(self, seen: Mapping[str, datetime]) -> set[str]:
        """Judge pools dead, each unless its lease was renewed since it was `seen` to end then. From now on nothing is asked for on their behalf.

        Returns the ids of those that are dead: by this, or because they were condemned or had ended before. Of the others somebody has renewed the lease;
        look again. Raises LedgerConflict if one is unknown.
        """
        return self._pools.condemn_all(seen)

    def end_pool(self, pool_id: str) -> None:
        """Write down that one pool has ended; see `end_pools`."""
        self.end_pools([pool_id])

    def end_pools(self, pool_ids: Iterable[str]) -> None:
        """Write down that pools have ended; the first time stands. Their open intents stay open. Raises LedgerConflict if one is unknown."""
        self._pools.end_pools(pool_ids)

    def pool(self, pool_id: str) -> PoolEntry | None:
        """Return a pool; None if the ledger has never heard of it."""
        return self._pools.pool(pool_id)

    def pools(self, *, include_ended: bool = False, unreadable: list[UnreadableRow] | None = None) -> list[PoolEntry]:
        """Return the pools, oldest first. What cannot be read is put into `unreadable`; without that list it is raised, here and in the other listings."""
        return self._pools.pools(include_ended=include_ended, unreadable=unreadable)

    def pool_rows(self, *, include_ended: bool = False, limit: int | None = None, unreadable: list[UnreadableRow] | None = None) -> list[PoolRow]:
        """Return the pools with what each has cost so far, oldest first; only the newest so many, if so asked."""
        return self._bills.pool_rows(include_ended=include_ended, limit=limit, unreadable=unreadable)

    # ── attempts ───────────────────────────────────────────────────────────────────────────────────────────────────────

    def note_attempts(self, attempts: Sequence[Attempt]) -> None:
        """Write down what became of tries to rent machines."""
        self._pools.note_attempts(attempts)

    def attempts(self, *, pool_id: str | None = None, since: datetime | None = None, unreadable: list[UnreadableRow] | None = None) -> list[Attempt]:
        """Return tries to rent machines, oldest first: those of a pool, those since a time, or all."""
        return self._pools.attempts(pool_id=pool_id, since=since, unreadable=unreadable)

    # ── intents ────────────────────────────────────────────────────────────────────────────────────────────────────────

    def intend(self, pool_id: str, wish: Wish) -> Intent:
        """Write down one thing that is about to be asked for; see `intend_all`."""
        return self.intend_all(pool_id, [wish])[0]

    def intend_all(self, pool_id: str, wishes: Sequence[Wish]) -> list[Intent]:
        """Write down what is about to be asked for, all of it or nothing. It is committed when this returns: only then make the creating call.

        With a token that the ledger knows, that entry is returned as it is (the call is being tried again). Raises LedgerConflict if it is for another
        thing or the pool is unknown, LeaseLost if the pool was condemned or has ended: nothing is asked for on behalf of the dead.
        """
        return self._intents.intend_all(pool_id, wishes)

    def adopt(self, pool_id: str, wish: Wish, cloud_id: str) -> Intent:
        """Write down a thing that is there and that no intent tells of, intent and bond in one; again with the same changes nothing.

        Allowed for a pool that is condemned or has ended: it is the truth, and what is there has to be ended. Errors as of `intend_all` and `bind`.
        """
        return self._intents.adopt(pool_id, wish, cloud_id)

    def bind(self, intent: Intent | int, cloud_id: str) -> Intent:
        """Write down the cloud's id of one thing that was created; see `bind_all`."""
        return self.bind_all({intent if isinstance(intent, int) else intent.id: cloud_id})[0]

    def bind_all(self, ids: Mapping[int, str], as_rented: Mapping[int, Rented] | None = None) -> list[Intent]:
        """Write down the cloud's ids, by the numbers of their intents; again with the same ids changes nothing.

        `as_rented` says of some that they are not quite what was asked for. Their price takes the place of the intent's where it is lower: money
        was set aside for that one, and no bill may rise above it.

        An intent that was closed unbound (a listing lagged behind, the answer came late) is open again: there is something after all. Allowed for a pool
        that is condemned. Raises LedgerConflict for those that are bound to another id, after the others have been written down.
        """
        return self._intents.bind_all(ids, as_rented)

    def ask_end_all(self, numbers: Iterable[int]) -> list[Intent]:
        """Write down that the termination of these has been asked for; the first time stands."""
        return self._intents.ask_end_all(numbers)

    def close_all(self, numbers: Iterable[int], evidence: str, *, fill: Bucket | None = None, paid_until: Mapping[int, datetime] | None = None) -> list[Intent]:
        """Write down that these are gone, or never were, and how we know; the first evidence stands.

        With `fill`, what of the time since its intent no bucket has yet is put into that one, for what was bound: every second is in a bucket. `paid_until`
        tells of some that they cost nothing any more since then, long before it was known that they are gone.
        """
        return self._intents.close_all(numbers, evidence, fill=fill, paid_until=paid_until)

    def note_all(self, seconds: Mapping[int, Mapping[Bucket, float]]) -> None:
        """Write down what the seconds of resources went to so far: totals by bucket, kept to the millisecond. Again with the same changes nothing.

        The buckets of a resource are replaced together, if their sum is not smaller than what is known: a second may turn out to have gone elsewhere, and is
        never lost. Allowed after the close: who noted knows better than who filled, so that what is noted then takes the place of what was filled in, and
        is never added to it.
        """
        self._intents.note_all(seconds)

    def open_intents(
        self,
        *,
        pool_id: str | None = None,
        provider: str | None = None,
        unreadable: list[UnreadableRow] | None = None,
    ) -> list[Intent]:
        """Return what is not known to be gone, oldest first: of one pool, or at one provider, if so asked."""
        return self._intents.open_intents(pool_id=pool_id, provider=provider, unreadable=unreadable)

    def intents(self, *, pool_id: str | None = None, provider: str | None = None, unreadable: list[UnreadableRow] | None = None) -> list[Intent]:
        """Return all entries, open and closed, oldest first."""
        return self._intents.intents(pool_id=pool_id, provider=provider, unreadable=unreadable)

    # ── cost ───────────────────────────────────────────────────────────────────────────────────────────────────────────

    def cost_rows(
        self,
        by: CostBy = CostBy.POOL,
        *,
        pool_id: str | None = None,
        since: datetime | None = None,
        until: datetime | None = None,
        work: Work = NO_WORK,
        unreadable: list[UnreadableRow] | None = None,
    ) -> list[CostRow]:
        """Return the bill, added up: of one pool, of what was intended from `since` until before `until`, of pools for this work, if so asked.

        A pool is for `work` if its own has the same texts wherever that is not empty. Whatever it is added up by, the rows have the same sum. By bucket there
        is one row more, `BILLING_ROUNDING`. By run, task and asset the shares of a pool's cost (`set_shares`) go where they belong, and what no share takes,
        with the number of the resources, to the pool's own work.
        With `unreadable`, rows whose numbers are none (SQLite takes anything) are left out and put there.
        """
        return self._bills.cost_rows(by, pool_id=pool_id, since=since, until=until, work=work, unreadable=unreadable)

    def set_shares(self, pool_id: str, shares: Mapping[Work, Decimal]) -> None:
        """Write down what parts of a pool's cost are for, in USD, in the place of what was written before. Allowed after the end of the pool.

        Raises BadRequest for a negative share, LedgerConflict if the pool is unknown.
        """
        self._bills.set_shares(pool_id, shares)

    def shares(self, pool_id: str) -> dict[Work, Decimal]:
        """Return what parts of a pool's cost are for, in USD."""
        return self._bills.shares(pool_id)

    # ── money ──────────────────────────────────────────────────────────────────────────────────────────────────────────

    def set_account(self, account: Account) -> None:
        """Make an account, or change its limit or period; with another period counting starts anew."""
        self._accounts.set_account(account)

    def accounts(self, *, unreadable: list[UnreadableRow] | None = None) -> list[Account]:
        """Return the accounts, by name."""
        return self._accounts.accounts(unreadable=unreadable)

    def left_usd(self, account: str, pool_id: str) -> Decimal:
        """Return what a pool could reserve from an account now; negative when more was spent than had been reserved."""
        return self._accounts.left_usd(account, pool_id)

    def reserve(self, account: str, pool_id: str, usd: Decimal) -> Reservation:
        """Set money aside for a pool, in one transaction that no other can come between.

        Raises BudgetExceeded if the account has less left in this period (what is reserved and what has been spent both count), LeaseLost if the pool was
        condemned or has ended: nobody would ever settle it.
        """
        return self._accounts.reserve(account, pool_id, usd)

    def roll(self, account: str, pool_id: str, spent_usd: Decimal, next_usd: Decimal) -> Reservation:
        """Settle what a pool has reserved from an account with what it has spent since it last did so, and reserve for what comes next: both or neither.

        How the sum is shared among several reservations is said at `settle_pool`. Nothing may come next (0 USD). Errors as of `reserve`; BudgetExceeded
        leaves everything as it was.
        """
        return self._accounts.roll(account, pool_id, spent_usd, next_usd)

    def settle(self, reservation: Reservation | int, spent_usd: Decimal) -> Reservation:
        """Say what was really spent of a reservation: the rest is free again. More than was reserved is written down too, for it is the truth.

        Again with the same sum changes nothing; raises LedgerConflict with another.
        """
        return self._accounts.settle(reservation, spent_usd)

    def settle_pool(self, pool_id: str, spent_usd: Decimal) -> None:
        """Settle all open reservations of a pool, so that its settled sums together are what it has spent; again changes nothing.

        Oldest first, each takes what it had reserved, and the newest what is beyond: so no period and no account pays for another while there is enough.
        If more than was spent has been settled already, the open ones are settled with nothing.
        """
        self._accounts.settle_pool(pool_id, spent_usd)

    def release(self, reservation: Reservation | int) -> Reservation:
        """Give a reservation back unspent."""
        return self.settle(reservation, ZERO_USD)

    def open_reservations(self, *, pool_id: str | None = None, unreadable: list[UnreadableRow] | None = None) -> list[Reservation]:
        """Return the reservations that are not settled, oldest first."""
        return self._accounts.open_reservations(pool_id=pool_id, unreadable=unreadable)

    # ── pruning ────────────────────────────────────────────────────────────────────────────────────────────────────────

    def prune(self, ended_before: datetime, *, is_dry_run: bool = True) -> Pruned:
        """Take away the details of pools that ended before then, of which nothing is open; again with the same changes nothing.

        Their specs, their tries to rent machines, the tags of their machines and their settled reservations go. What they have cost stays, machine by
        machine, and so does what accounts have spent: bills, receipts and budgets say what they said before.
        """
        return self._bills.prune(ended_before, is_dry_run=is_dry_run)

    def vacuum(self) -> None:
        """Give the room of what was pruned back to the disk (SQLite), or to the tables (PostgreSQL, where it is done by itself too)."""
        self._database.vacuum()
