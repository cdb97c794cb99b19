"""Keeps a pool with a name warm for longer, from any process (`skyward warm NAME --for 2h`), and ends its warm time.

    checked ──▶ money reserved ──▶ nodes have the longer lease ──▶ ledger written
                └───── given back ─────┘ (the nodes may live longer than the ledger says: a sweep ends them)

The ledger is written last, as when a process leaves (docs/decisions/0028). A kill before that leaves a pool that is
warm for as long as before; money that is reserved then is free again when the pool is settled.

The last process that leaves informs the nodes of the end of their warm time (`end_in_time`) after the ledger has it,
because only the ledger knows which process is the last one. docs/decisions/0046 has what a kill before that leaves.
"""

from __future__ import annotations

import contextlib
import logging
from collections.abc import Generator
from datetime import datetime, timedelta
from decimal import Decimal
from typing import TYPE_CHECKING

from skyward_core.concurrency.threads import side_by_side
from skyward_core.errors import ZERO_USD, BadRequest, BudgetExceeded, CommandFailed, NodeLost, SkywardError
from skyward_core.ledger.metering import projection_of
from skyward_core.ledger.names_policy import NamedPool, NameState
from skyward_core.ledger.rows import PoolEntry
from skyward_core.machines.instances import Lease, Node
from skyward_core.providers.base import Provider
from skyward_core.session.sealed_lease import KeysInMemory, PoolKeys, find_lease
from skyward_core.transport.transport import Transport, Transports
from skyward_core.wire.settings import SeenSettings

if TYPE_CHECKING:
    from skyward_core.ledger.ledger import Ledger

REACH_SECONDS = 60.0
END_REACH_SECONDS = 15.0
"""The process that has left waits for nothing else."""
ALL_AT_ONCE = 1000
_log = logging.getLogger("skyward")


def keep_warm(ledger: Ledger, name: str, seconds: float) -> NamedPool:
    """Set for how many seconds from now a warm pool stays, or a pool in use after it is left.

    Returns the changed row of the name. Raises BadRequest if there is no such pool, or if its own limits end it before;
    BudgetExceeded if `max_cost` or its account does not pay; NodeLost, Unreachable, CredentialsError and LeaseTampered
    if its nodes cannot be reached from here; LedgerError. Then the pool stays as it was.
    """
    row = ledger.names.named(name)
    if row is None or not row.pool_id:
        raise BadRequest(f"the ledger has no pool with the name {name!r}: `skyward ps` shows the names of pools")
    entry, now = ledger.pool(row.pool_id), ledger.names.now()
    _refuse_limits(row, entry, now + timedelta(seconds=seconds), seconds)
    if row.state is NameState.WARM and entry is not None:
        if row.warm_until is None or row.warm_until <= now or entry.ended_at or entry.condemned_at:
            raise _ended(row)  # before the nodes receive anything
        with _paid(ledger, row, entry, seconds):
            _keep_nodes(*find_lease(row.pool_id, ledger=ledger), seconds, is_paid=_is_limited(row))
            return _written(ledger, row, seconds)
    return _written(ledger, row, seconds)


def end_in_time(ledger: Ledger, name: str, pool_id: str, mark: str) -> NamedPool | None:
    """Let the nodes of a warm pool end when the ledger says so, whatever their leases, if no process has come since the
    one with this mark began to leave. Return the row of the name, or None if the pool is not warm any more.

    Raises LedgerError, and what reaching the nodes raises: those that did not answer end with their leases.
    """
    row = ledger.names.named(name)
    if row is None or row.pool_id != pool_id or row.state is not NameState.WARM or row.warm_until is None:
        return None
    lease, keys = find_lease(pool_id, ledger=ledger)
    seconds = (row.warm_until - ledger.names.now()).total_seconds()
    _keep_nodes(lease, keys, max(0.0, seconds), mark=mark, reach_seconds=END_REACH_SECONDS)
    return row


def what_stays(ledger: Ledger, name: str, pool_id: str) -> str:
    """Return in words what is still running of a pool that a process has left: until when, and what it costs.

    "" if nothing is. Raises LedgerError.
    """
    row = ledger.names.named(name)
    if row is None or row.pool_id != pool_id:
        return ""
    rate = sum((its.price.per_hour for its in ledger.open_intents(pool_id=pool_id) if its.cloud_id), ZERO_USD)
    if row.state is NameState.WARM and row.warm_until is not None:
        return f"the pool {name!r} ({pool_id}) stays warm until {row.warm_until:%H:%M:%S} UTC, {per_hour(rate)}"
    users = ledger.names.activity([pool_id])[pool_id].users
    if not users:
        return ""
    return f"the pool {name!r} ({pool_id}) stays, with {users} other process{'es' * (users > 1)}, {per_hour(rate)}"


def what_may_run(ledger: Ledger | None, pool_id: str) -> str:
    """Return in words which machines of a pool that was not closed to its end may still run, and what they cost.

    "" if the ledger says that all are gone. Raises nothing.
    """
    try:
        intents = None if ledger is None else ledger.open_intents(pool_id=pool_id)
    except SkywardError:
        intents = None
    if intents is None:
        return f"machines of the pool {pool_id} may still run; the ledger cannot be read, which would say which ones"
    if not intents:
        return ""
    machines = ", ".join(f"{intent.cloud_id or f'{intent.name} (its id is not known)'}" for intent in intents)
    rate = per_hour(sum((intent.price.per_hour for intent in intents), ZERO_USD))
    return f"of the pool {pool_id} these machines may still run, {rate}: {machines}"


def per_hour(usd: Decimal) -> str:
    """Return a price as text: to the cent, and one below a dollar more exactly."""
    return f"{usd:.2f} USD/h" if usd >= 1 or not usd else f"{usd:.4f} USD/h"


def _written(ledger: Ledger, row: NamedPool, seconds: float) -> NamedPool:
    if (changed := ledger.names.keep_warm(row.name, row.pool_id, seconds)) is None:
        raise _ended(row)
    return changed


def _ended(row: NamedPool) -> BadRequest:
    return BadRequest(
        f"the pool {row.name!r} ({row.pool_id}) has ended, or is being ended just now: open it again (`skyward ps`"
        " shows its state)"
    )


def _refuse_limits(row: NamedPool, entry: PoolEntry | None, until: datetime, seconds: float) -> None:
    """Raise BadRequest if the nodes end themselves before, by the clocks with which the pool was opened."""
    timeout, max_lifetime = row.terms.get("timeout"), row.terms.get("max_lifetime")
    if timeout is not None and seconds > timeout:
        raise BadRequest(
            f"the pool {row.name!r} ends itself after {timeout:.0f} s without a call (timeout), so it can be kept warm"
            f" for {timeout:.0f} s from now at most; a pool that is opened with a larger timeout stays longer"
        )
    if max_lifetime is None or entry is None:
        return
    if until > (end := entry.created_at + timedelta(seconds=max_lifetime)):
        raise BadRequest(
            f"the pool {row.name!r} ends itself at {end:%Y-%m-%d %H:%M:%S} UTC (max_lifetime): keep it warm for a"
            " shorter time"
        )


# ── money ────────────────────────────────────────────────────────────────────────────────────────────────────────────


def _is_limited(row: NamedPool) -> bool:
    return row.terms.get("max_cost") is not None or row.terms.get("budget") is not None


@contextlib.contextmanager
def _paid(ledger: Ledger, row: NamedPool, entry: PoolEntry, seconds: float) -> Generator[None]:
    """Reserve what the pool costs up to that time; if the block fails, the added amount is released."""
    if not _is_limited(row):
        yield
        return
    until = ledger.names.now() + timedelta(seconds=seconds + Provider.ending_seconds)
    cost = projection_of(ledger, row.pool_id).at(until)
    max_cost = row.terms.get("max_cost")
    if max_cost is not None and cost > Decimal(repr(max_cost)):
        raise BudgetExceeded(
            f"the pool {row.name!r} would have cost {cost} USD by then, and its max_cost is {max_cost}: keep it warm"
            " for a shorter time, or stop it (`skyward stop`)"
        )
    more = ZERO_USD if entry.account is None else cost - ledger.committed_usd(row.pool_id)
    if entry.account is None or more <= 0:
        yield
        return
    try:
        reservation = ledger.reserve(entry.account, row.pool_id, more)
    except BudgetExceeded as error:
        raise BudgetExceeded(
            f"the pool {row.name!r} is not kept warm for longer: {error} Keep it warm for a shorter time, or raise the"
            f" account's limit (`skyward budget set {entry.account}`)",
            error.account,
            error.left_usd,
        ) from error
    try:
        yield
    except BaseException:
        ledger.release(reservation)
        raise


# ── nodes ────────────────────────────────────────────────────────────────────────────────────────────────────────────


def _keep_nodes(
    lease: Lease,
    keys: PoolKeys,
    seconds: float,
    *,
    is_paid: bool = False,
    mark: str = "",
    reach_seconds: float = REACH_SECONDS,
) -> None:
    """Let all nodes of a lease live for so many seconds from now (`Transport.keep_warm`).

    Raises NodeLost if a node has ended, and what logging in raises: then some nodes may have the longer lease.
    """
    in_memory = KeysInMemory()
    transports = Transports(seconds, lambda _: 0, lambda: seconds if is_paid else None)
    try:
        nodes = in_memory.with_keys(lease, keys.ssh_keys).nodes
        failures = side_by_side(
            lambda node: _why_not_kept(transports.to(node.instance), node, seconds, mark, reach_seconds),
            nodes,
            "skyward-attach",
            ALL_AT_ONCE,
        )
    finally:
        transports.close()
        in_memory.close()
    if failure := next(filter(None, failures), None):
        raise failure


def _why_not_kept(
    transport: Transport, node: Node, seconds: float, mark: str, reach_seconds: float
) -> SkywardError | None:
    """Reach a node, and let it live for so long; return why that has failed."""
    try:
        transport.visit(timeout_seconds=reach_seconds)
        settings = SeenSettings.of(transport.read("settings.json"))
        if (settings.instance_id, settings.pool_id) != (node.instance.id, node.instance.pool_id):
            return _lost(node)
        if transport.lives(reach_seconds) is False:
            return _lost(node)
        transport.keep_warm(seconds, mark)
    except (CommandFailed, OSError, ValueError):
        return _lost(node)
    except SkywardError as error:
        error.add_note("nothing was changed in the ledger: run the command on a machine that can reach the nodes")
        return error
    return None


def _lost(node: Node) -> NodeLost:
    return NodeLost(
        f"node {node.rank} ({node.instance.id}) of pool {node.instance.pool_id} has ended, or is a process of another"
        " machine: the pool is not kept warm for longer. Open it by its name: what is left of it is ended then"
    )
