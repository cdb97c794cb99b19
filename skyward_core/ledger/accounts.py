"""The ledger's tables of accounts, balances and reservations (a part of `Ledger`)."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Sequence
from datetime import UTC, datetime
from decimal import Decimal
from typing import cast

from sqlalchemy import ColumnElement, Connection, RowMapping, delete, func, insert, select, true, update

from skyward_core.errors import ZERO_USD, BadRequest, BudgetExceeded, LedgerConflict
from skyward_core.ledger.database import MOST_NAMED, Database
from skyward_core.ledger.names import must_be_steward
from skyward_core.ledger.pools import SCOPE, must_live, refusal, run_account_of
from skyward_core.ledger.rows import Account, Period, Reservation, UnreadableRow, micro_usd
from skyward_core.ledger.sql_engine import shown
from skyward_core.ledger.tables import (
    ACCOUNTS,
    BALANCES,
    POOLS,
    RESERVATIONS,
    Values,
    account_of,
    in_usd,
    read_rows,
    reservation_of,
    stamp,
)
from skyward_core.spec import MOST_USD

RESERVATIONS_PER_REMOVAL = 10_000
"""How many reservations one transaction deletes: others cannot write meanwhile, for some tens of milliseconds."""


class Accounts:
    """Accounts with their limits, and reservations from them."""

    _database: Database

    def set_account(self, account: Account) -> None:
        """Create an account, or change its limit or period; a new period counts from zero. Raises BadRequest for a
        limit that is no amount.
        """
        limit = cast(object, account.limit_usd)
        if not isinstance(limit, Decimal) or not limit.is_finite() or not 0 <= limit <= MOST_USD:
            raise BadRequest(
                f"the limit of account {account.name!r} is {limit!r}: it is an amount in USD, from 0 to {MOST_USD:.0e},"
                " such as Decimal(500)"
            )
        values = {"limit_micro_usd": micro_usd(account.limit_usd), "period": account.period.value}
        with self._database.write() as connection:
            is_it = (ACCOUNTS.c.name == account.name) & ~ACCOUNTS.c.is_of_run
            if connection.execute(update(ACCOUNTS).where(is_it).values(values)).rowcount == 0:
                connection.execute(insert(ACCOUNTS).values(name=account.name, **values))

    def remove_account(self, name: str) -> None:
        """Remove an account that no open pool uses, with its balances and settled reservations. Bills and receipts
        stay: they count machines. An account that gets the name later counts from zero.

        A transaction deletes `RESERVATIONS_PER_REMOVAL` reservations, the last one the account. After a kill the next
        removal deletes the rest. Each transaction locks the row of the account, as `reserve` does. So a pool that opens
        at the same moment has reserved before, and the removal is refused; or it reserves afterwards, and is refused as
        with any unknown account.

        Raises BadRequest if there is no such account, LedgerConflict while an open pool names it or has drawn on it, or
        a reservation from it is not settled.
        """
        while self._remove_some(name):
            pass

    def _remove_some(self, name: str) -> bool:
        """Return whether there may be more to remove."""
        with self._database.write() as connection:
            is_it = (ACCOUNTS.c.name == name) & ~ACCOUNTS.c.is_of_run
            if connection.execute(select(ACCOUNTS.c.name).where(is_it).with_for_update()).first() is None:
                raise BadRequest(f"The ledger has no account {name!r}; it has: {_names_of_accounts(connection)}.")
            _refuse_used(connection, name)
            of_account = RESERVATIONS.c.account == name
            some = select(RESERVATIONS.c.id).where(of_account).limit(RESERVATIONS_PER_REMOVAL)
            deleted = connection.execute(delete(RESERVATIONS).where(RESERVATIONS.c.id.in_(some))).rowcount
            if deleted == RESERVATIONS_PER_REMOVAL:
                return True
            connection.execute(delete(BALANCES).where(BALANCES.c.account == name))
            connection.execute(delete(ACCOUNTS).where(is_it))
            return False

    def accounts(self, *, unreadable: list[UnreadableRow] | None = None) -> list[Account]:
        """Return the accounts, by name."""
        wanted = select(ACCOUNTS).where(~ACCOUNTS.c.is_of_run).order_by(ACCOUNTS.c.name)
        with self._database.read() as connection:
            return read_rows(connection.execute(wanted).mappings(), account_of, unreadable)

    def left_usd(self, account: str, pool_id: str) -> Decimal:
        """Return what a pool could reserve from an account now, in USD; negative after overspending."""
        with self._database.read() as connection:
            row = _account_row(connection, account)
            scope = _scope(row, pool_id, self._database.clock())
            return in_usd(row["limit_micro_usd"] - (_committed(connection, account, scope) or 0))

    def reserve(self, account: str | None, pool_id: str, usd: Decimal, *, epoch: int | None = None) -> Reservation:
        """Reserve money for a pool, in one transaction that is isolated from all others.

        The same sum is reserved from the account of the pool's run, if it has one: both or neither. Without `account`
        only that one pays.

        Raises BudgetExceeded if less is left in this period (reservations and spending both count), LeaseLost if the
        pool was condemned or has ended: nothing would settle the reservation, NotSteward if `epoch` is not that of the
        steward of the pool's name.
        """
        amount = micro_usd(usd)
        if amount <= 0:
            raise BadRequest(f"A reservation is a positive sum; given {usd} USD.")
        with self._database.write() as connection:
            must_be_steward(connection, pool_id, epoch)
            must_live(connection, pool_id)
            return self._reserve(connection, _payers(connection, account, pool_id), pool_id, amount)

    def roll(
        self, account: str | None, pool_id: str, total_usd: Decimal, next_usd: Decimal, *, epoch: int | None = None
    ) -> Reservation:
        """Settle a pool's reservations from an account, and from that of its run, and reserve for the next interval:
        all or nothing. Idempotent: whoever has not got the answer may do it again.

        `total_usd` is the cost of the pool so far: each account pays what it has not paid yet.
        `settle_pool` describes how the sum is divided among several reservations. The next reservation may be 0 USD.
        Errors as of `reserve`; after BudgetExceeded nothing has changed.
        """
        total, amount = micro_usd(total_usd), micro_usd(next_usd)
        if total < 0 or amount < 0:
            raise BadRequest(f"Spent and reserved sums are not negative; given {total_usd} and {next_usd} USD.")
        with self._database.write() as connection:
            must_be_steward(connection, pool_id, epoch)
            must_live(connection, pool_id)
            payers = _payers(connection, account, pool_id)
            is_its = RESERVATIONS.c.pool_id == pool_id
            # all before the first balance changes: the order of locks
            _open_reservations(connection, is_its & RESERVATIONS.c.account.in_([row["name"] for row in payers]))
            for row in payers:
                are_its = is_its & (RESERVATIONS.c.account == row["name"])
                spent = max(0, total - _paid(connection, are_its))
                if spent and not _open_reservations(connection, are_its):
                    scope = _scope(row, pool_id, self._database.clock())
                    self._insert_reservation(connection, row["name"], pool_id, scope, 0)
                self._settle_open(connection, are_its, spent)
            return self._reserve(connection, payers, pool_id, amount)

    def _reserve(self, connection: Connection, payers: Sequence[Values], pool_id: str, amount: int) -> Reservation:
        """Reserve the sum from each of the locked accounts, or from none. Return the first one's reservation."""
        scopes = [_scope(account, pool_id, self._database.clock()) for account in payers]
        for account, scope in zip(payers, scopes, strict=True):
            _refuse_overdraft(connection, account, scope, amount)
        first, *_ = [
            self._insert_reservation(connection, account["name"], pool_id, scope, amount)
            for account, scope in zip(payers, scopes, strict=True)
        ]
        return first

    def _insert_reservation(
        self, connection: Connection, account: str, pool_id: str, scope: str, amount: int
    ) -> Reservation:
        if _committed(connection, account, scope) is None:
            connection.execute(insert(BALANCES).values(account=account, scope=scope, committed_micro_usd=amount))
        else:
            _commit_more(connection, account, scope, amount)
        values = {
            "account": account,
            "pool_id": pool_id,
            "scope": scope,
            "reserved_micro_usd": amount,
            "made_microseconds": stamp(self._database.clock()),
        }
        return reservation_of(
            connection.execute(insert(RESERVATIONS).values(values).returning(*RESERVATIONS.c)).mappings().one()
        )

    def settle(self, reservation: Reservation | int, spent_usd: Decimal) -> Reservation:
        """Record what was spent of a reservation; the rest is free again. More than was reserved is recorded too.

        The same sum again changes nothing; another sum raises LedgerConflict.
        """
        number = reservation if isinstance(reservation, int) else reservation.id
        spent = micro_usd(spent_usd)
        if spent < 0:
            raise BadRequest(f"A spent sum is not negative; given {spent_usd} USD.")
        with self._database.write() as connection:
            row = (
                connection.execute(select(RESERVATIONS).where(RESERVATIONS.c.id == number).with_for_update())
                .mappings()
                .first()
            )
            if row is None:
                raise LedgerConflict(
                    f"The ledger at {shown(self._database.url)} has no reservation {number}. Is it another ledger than"
                    " the one it was made in?"
                )
            if row["settled_microseconds"] is not None:
                if row["spent_micro_usd"] != spent:
                    raise LedgerConflict(
                        f"Reservation {number} was settled with {in_usd(row['spent_micro_usd'])} USD already; given"
                        f" {spent_usd} USD."
                    )
                return reservation_of(row)
            _commit_more(connection, row["account"], row["scope"], spent - row["reserved_micro_usd"])
            return self._settled(connection, number, spent)

    def _settled(self, connection: Connection, number: int, spent: int) -> Reservation:
        statement = (
            update(RESERVATIONS)
            .where(RESERVATIONS.c.id == number)
            .values(settled_microseconds=stamp(self._database.clock()), spent_micro_usd=spent)
        )
        return reservation_of(connection.execute(statement.returning(*RESERVATIONS.c)).mappings().one())

    def release(self, reservation: Reservation | int) -> Reservation:
        """Free a reservation unspent."""
        return self.settle(reservation, ZERO_USD)

    def settle_pool(self, pool_id: str, spent_usd: Decimal) -> None:
        """Settle all open reservations of a pool, so that its settled sums add up to `spent_usd`. Idempotent.

        The oldest comes first. Each pays at most its own sum, and the newest pays the rest: so no period and no account
        pays for another one while there is enough. Those from the account of its run add up to `spent_usd` separately.
        If the settled sum is larger already, the open ones pay nothing.
        """
        spent = micro_usd(spent_usd)
        if spent < 0:
            raise BadRequest(f"A spent sum is not negative; given {spent_usd} USD.")
        are_its = RESERVATIONS.c.pool_id == pool_id
        its_accounts = select(RESERVATIONS.c.account).where(are_its, RESERVATIONS.c.settled_microseconds.is_(None))
        with self._database.write() as connection:
            connection.execute(
                select(ACCOUNTS.c.name)
                .where(ACCOUNTS.c.name.in_(its_accounts))
                .order_by(ACCOUNTS.c.name)
                .with_for_update()
            ).all()
            _open_reservations(connection, are_its)  # all before the first balance changes: the order of locks
            run_account = run_account_of(connection, pool_id)
            is_run_s = RESERVATIONS.c.account == run_account
            for which in (true(),) if run_account is None else (~is_run_s, is_run_s):
                left = max(0, spent - _paid(connection, are_its & which))
                self._settle_open(connection, are_its & which, left)

    def _settle_open(self, connection: Connection, which: ColumnElement[bool], spent: int) -> None:
        more: dict[tuple[str, str], int] = defaultdict(int)
        rows = _open_reservations(connection, which)
        for row in rows:
            share = spent if row is rows[-1] else min(spent, row["reserved_micro_usd"])
            spent -= share
            self._settled(connection, row["id"], share)
            more[row["account"], row["scope"]] += share - row["reserved_micro_usd"]
        for (account, scope), amount in sorted(more.items()):
            _commit_more(connection, account, scope, amount)

    def settled_usd(self, pool_id: str, account: str) -> Decimal:
        """Return what an account has paid for a pool so far, in USD."""
        is_its = (RESERVATIONS.c.pool_id == pool_id) & (RESERVATIONS.c.account == account)
        with self._database.read() as connection:
            return in_usd(_paid(connection, is_its))

    def committed_usd(self, pool_id: str) -> Decimal:
        """Return what accounts have paid for a pool, and what is reserved for it now, in USD."""
        r = RESERVATIONS.c
        are_of_runs = r.account.in_(select(ACCOUNTS.c.name).where(ACCOUNTS.c.is_of_run))
        is_its = (r.pool_id == pool_id) & ~are_of_runs
        wanted = select(func.sum(func.coalesce(r.spent_micro_usd, r.reserved_micro_usd))).where(is_its)
        with self._database.read() as connection:
            return in_usd(int(connection.execute(wanted).scalar() or 0))

    def open_reservations(
        self, *, pool_id: str | None = None, unreadable: list[UnreadableRow] | None = None
    ) -> list[Reservation]:
        """Return the reservations that are not settled, oldest first."""
        wanted = select(RESERVATIONS).where(RESERVATIONS.c.settled_microseconds.is_(None)).order_by(RESERVATIONS.c.id)
        with self._database.read() as connection:
            its = connection.execute(wanted if pool_id is None else wanted.where(RESERVATIONS.c.pool_id == pool_id))
            return read_rows(its.mappings(), reservation_of, unreadable)


def _account_row(connection: Connection, account: str) -> Values:
    row = connection.execute(select(ACCOUNTS).where(ACCOUNTS.c.name == account)).mappings().first()
    if row is None:
        raise _unknown(connection, account)
    return row


def _payers(connection: Connection, account: str | None, pool_id: str) -> list[Values]:
    """Return the rows of the accounts on which a pool draws: that of its budget, then that of its run.

    They are locked in the order of their names, which serializes reservations from each (SQLite serializes all
    writers).
    """
    names = [name for name in (account, run_account_of(connection, pool_id)) if name is not None]
    wanted = select(ACCOUNTS).where(ACCOUNTS.c.name.in_(names)).order_by(ACCOUNTS.c.name).with_for_update()
    rows = {row["name"]: row for row in connection.execute(wanted).mappings()}
    for name in names:
        if name not in rows:
            raise _unknown(connection, name)
    if not names:
        raise BadRequest(f"The pool {pool_id!r} draws on no account, neither of a budget nor of its run.")
    return [rows[name] for name in names]


def _unknown(connection: Connection, account: str) -> BadRequest:
    how = f"`skyward budget set {account} --limit USD --per month`, or `Ledger.set_account`"
    there = _names_of_accounts(connection)
    return BadRequest(f"The ledger has no account {account!r}; it has: {there}. Create it: {how}.")


def _names_of_accounts(connection: Connection) -> str:
    names = select(ACCOUNTS.c.name).where(~ACCOUNTS.c.is_of_run)
    return ", ".join(sorted(connection.execute(names).scalars())) or "none"


def _refuse_used(connection: Connection, account: str) -> None:
    """Raise LedgerConflict if an open pool uses the account, or if a reservation from it is not settled."""
    p, r = POOLS.c, RESERVATIONS.c
    has_drawn = select(r.id).where(r.pool_id == p.id, r.account == account).exists()
    are_open = select(p.id).where(p.ended_microseconds.is_(None), (p.account == account) | has_drawn)
    are_unsettled = select(r.pool_id).where(r.account == account, r.settled_microseconds.is_(None))
    pools = sorted({pool for query in (are_open, are_unsettled) for pool in connection.execute(query).scalars()})
    if pools:
        more = f" and {len(pools) - MOST_NAMED} more" if len(pools) > MOST_NAMED else ""
        raise LedgerConflict(
            f"The account {account!r} is not removed: {', '.join(pools[:MOST_NAMED])}{more} may still draw on it. Wait"
            " until they have ended, or end them: `skyward stop POOL`, and `skyward sweep --yes` for dead ones."
        )


def _refuse_overdraft(connection: Connection, account: Values, scope: str, amount: int) -> None:
    """Raise BudgetExceeded if the account has less than that left."""
    name, limit = account["name"], account["limit_micro_usd"]
    committed = _committed(connection, name, scope) or 0
    if not amount or committed + amount <= limit:
        return
    if account["is_of_run"]:
        raise refusal(limit, limit - committed, amount)
    left = in_usd(limit - committed)
    raise BudgetExceeded(
        f"Account {name!r} has {left} USD left of {in_usd(limit)} for {scope}; {in_usd(amount)} requested.", name, left
    )


def _scope(account: Values, pool_id: str, time: datetime) -> str:
    """Return the period of an account to which a reservation of this pool belongs now."""
    if account["is_of_run"]:
        return SCOPE
    day = time.astimezone(UTC).date().isoformat()
    scopes = {Period.RUN: f"pool {pool_id}", Period.DAY: day, Period.MONTH: day[:7]}
    return scopes[Period(account["period"])]


def _paid(connection: Connection, which: ColumnElement[bool]) -> int:
    """Return the micro-dollars with which reservations were settled."""
    return int(connection.execute(select(func.sum(RESERVATIONS.c.spent_micro_usd)).where(which)).scalar() or 0)


def _committed(connection: Connection, account: str, scope: str) -> int | None:
    return connection.execute(
        select(BALANCES.c.committed_micro_usd).where(BALANCES.c.account == account, BALANCES.c.scope == scope)
    ).scalar()


def _commit_more(connection: Connection, account: str, scope: str, amount: int) -> None:
    is_it = (BALANCES.c.account == account) & (BALANCES.c.scope == scope)
    connection.execute(
        update(BALANCES).where(is_it).values(committed_micro_usd=BALANCES.c.committed_micro_usd + amount)
    )


def _open_reservations(connection: Connection, which: ColumnElement[bool]) -> Sequence[RowMapping]:
    wanted = select(RESERVATIONS).where(which, RESERVATIONS.c.settled_microseconds.is_(None))
    return connection.execute(wanted.order_by(RESERVATIONS.c.id).with_for_update()).mappings().all()
