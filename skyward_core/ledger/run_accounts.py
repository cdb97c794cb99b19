"""The account of a run: one limit for all pools whose work names the same run (docs/decisions/0037).

It is a row of ACCOUNTS that no user sees. It is made in the transaction that records the first pool of the run. A pool
that has one draws on it with each reservation, beside the account of its budget.
"""

from __future__ import annotations

import hashlib
from decimal import Decimal
from typing import cast

from sqlalchemy import Connection, select, update

from skyward_core.errors import BadRequest, BudgetExceeded
from skyward_core.ledger.rows import Period, micro_usd
from skyward_core.ledger.tables import ACCOUNTS, POOLS, in_usd, insert_new
from skyward_core.work import Work

SCOPE = "run"
"""The one period of such an account."""
NAME_CHARACTERS = 255


def account_of_run(work: Work) -> str:
    """Return the name of the account of a run. Raises BadRequest if the work names none."""
    if not work.run:
        raise BadRequest('a limit for all pools of a run needs the run: work=Work(system="...", run="...")')
    name = f"run {Work(work.system, work.workflow, work.run)}"
    if len(name) <= NAME_CHARACTERS:
        return name
    digest = hashlib.sha256(name.encode(errors="replace")).hexdigest()[:16]
    return f"{name[: NAME_CHARACTERS - len(digest) - 1]}#{digest}"


def share_limit(connection: Connection, work: Work, limit_usd: Decimal) -> str:
    """Make the account of a run, or change its limit: the newest pool's counts. Return its name."""
    name, limit = account_of_run(work), micro_usd(limit_usd)
    values = {"name": name, "limit_micro_usd": limit, "period": Period.RUN.value, "is_of_run": True}
    connection.execute(insert_new(connection, ACCOUNTS).values(values))
    is_it = (ACCOUNTS.c.name == name) & ACCOUNTS.c.is_of_run
    connection.execute(update(ACCOUNTS).where(is_it, ACCOUNTS.c.limit_micro_usd != limit).values(limit_micro_usd=limit))
    return name


def run_account_of(connection: Connection, pool_id: str) -> str | None:
    """Return the account of a pool's run; None if it has none, or the pool is unknown. It does not change."""
    found = connection.execute(select(POOLS.c.run_account).where(POOLS.c.id == pool_id)).scalar()
    return cast("str | None", found)


def refusal(limit: int, left: int, amount: int) -> BudgetExceeded:
    """Return the error of a reservation for which the limit of the run, in micro-dollars, is too small.

    It names no account: the limit is a `max_cost`.
    """
    words = f"max_cost={in_usd(limit).normalize():f} is for all pools of the run: {in_usd(left).normalize():f} USD are"
    return BudgetExceeded(f"{words} left, and {in_usd(amount).normalize():f} requested", left_usd=in_usd(left))
