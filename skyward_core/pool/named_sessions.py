"""Opens and leaves a pool with a name: as the process that rents, or as one that attaches.

docs/decisions/0028 has the states. The order of the steps is what makes a kill between them harmless: the pool lives by
its lease before others may find it, and the nodes have their longer lease before the ledger says that the pool is warm.
They learn when the warm time ends after the ledger has said so (docs/decisions/0046): a node may live for longer than
the ledger says, and never ends under a process that has come.
"""

from __future__ import annotations

import logging
import math
import time
from collections.abc import Callable
from datetime import UTC, datetime, timedelta
from typing import TYPE_CHECKING

from skyward_core.concurrency.backoff import Backoff
from skyward_core.errors import BudgetExceeded, LeaseLost, LedgerError, NodeLost, SkywardError, Unreachable
from skyward_core.ledger.names_policy import NameState, NotSteward, Rent
from skyward_core.machines.instances import Lease, new_pool_id
from skyward_core.session.attached import Attached
from skyward_core.session.detached_call import note_all
from skyward_core.session.named_use import NamedUse
from skyward_core.session.sealed_lease import PoolKeys, find_lease
from skyward_core.session.warm_pools import end_in_time, keep_warm

if TYPE_CHECKING:
    from skyward_core.session.named_session import NamedSession

RETRIES = Backoff(0.5, 10.0)
"""The pauses of a process that cannot reach a pool that others use: its head may be replaced just now. Also those of
one that cannot extend the leases of the pool that it has left.
"""
EXTEND_SECONDS = 30.0

type Attach = Callable[[Lease, PoolKeys], Attached]
type Open = Callable[[str], NamedSession]


def open_named(use: NamedUse, open_own: Open, attach: Attach, timeout_seconds: float) -> NamedSession | Attached:
    """Open the pool of a name, and return what is open.

    Args:
        use: this process as a client of the name.
        open_own: opens a pool of this id. It undoes everything if it fails.
        attach: attaches to the pool of a lease, with its keys.
        timeout_seconds: for how long to wait for another process that opens or closes the pool, and for a pool that
            others use and that does not answer: one of them may be replacing its head.

    Raises what `NamedUse.claim`, `open_own` and `attach` raise. Then this process is no client any more.
    """
    deadline = time.monotonic() + timeout_seconds
    for pause in RETRIES.pauses():
        pool_id = new_pool_id()
        claim = use.claim(pool_id, deadline)
        if isinstance(claim, Rent):
            return _shared(open_own(pool_id), use)
        row = claim.row
        try:
            return attach(*find_lease(row.pool_id, ledger=use.ledger, name=row.name))
        except (NodeLost, LeaseLost, Unreachable) as error:
            words = "the pool %r (%s) is not there any more, and is opened anew: %s"
            if not use.report_unreachable(row.pool_id):
                if time.monotonic() + pause > deadline:
                    raise
                words = "the pool %r (%s), which other processes use, does not answer; it is tried again: %s"
                time.sleep(pause)
            use.log(logging.WARNING, words, row.name, row.pool_id, error)
    raise AssertionError  # the pauses have no end


def _shared(session: NamedSession, use: NamedUse) -> NamedSession:
    """Let other processes use the pool that this one has opened. If that fails, the pool is closed."""
    try:
        session.share()
        use.opened()
    except BaseException:
        session.stop("the name of the pool could not be written into the ledger")
        session.release()
        raise
    return session


def leave_named(opened: NamedSession | Attached, use: NamedUse) -> None:
    """Leave a pool: the last process keeps it warm or ends it, any other leaves it to those that stay.

    Raises InstancesLeft if the last process could not confirm that all machines are gone, and LedgerError if the ledger
    does not answer. After any error this process renews nothing any more: machines that no other process keeps end with
    their leases. Call it again to leave properly; then the last process ends the machines, also if they were to stay
    warm.
    """
    try:
        use.settle_the_dead()
        if opened.is_running and (cluster := opened.cluster) is not None and cluster.is_connected:
            # nobody may look at them again: the pool may end by its own clocks
            pool_id = opened.lease.pool_id if isinstance(opened, Attached) else opened.pool_id
            note_all(cluster, pool_id, opened.events.log)
        if use.has_failed_to_leave:
            _leave_again(opened, use)
        elif isinstance(opened, Attached):
            _leave_attached(opened, use)
        else:
            _leave_own(opened, use)
    except BaseException as error:
        words = _leave_unfinished(opened, use, error)
        if type(error) is LedgerError:
            raise LedgerError(f"{error} {words}") from error
        error.add_note(words)
        raise
    use.left()
    _adopt_no_more(use)


def _leave_unfinished(opened: NamedSession | Attached, use: NamedUse, error: BaseException) -> str:
    """Keep neither the machines nor the row of this process; return what that means for the pool, as a sentence."""
    until = datetime.now(UTC) + timedelta(seconds=use.longest_seconds)
    reason = "the pool was left"
    if isinstance(opened, Attached):
        _adopt_no_more(use)
        opened.stop(reason)
    else:
        opened.leave_to_lease(reason)
    use.leave_unfinished(error)
    _adopt_no_more(use)
    return (
        f"This process uses the pool {use.name!r} no more, and renews nothing of it. What is left of it ends by itself"
        f" at {until:%H:%M:%S} UTC at the latest, unless other processes use it. To end it earlier, close the pool"
        f" again, or run `skyward stop {use.name}`."
    )


def _leave_again(opened: NamedSession | Attached, use: NamedUse) -> None:
    """Leave a pool that could not be left before, or whose nodes this process cannot reach any more."""
    if isinstance(opened, Attached):
        _adopt_no_more(use)
        opened.stop("the pool was left")
    if not isinstance(opened, Attached) and not opened.is_left_to_lease:
        _end(opened)
    else:
        _end_if_last(use, opened.lease.pool_id if isinstance(opened, Attached) else opened.pool_id, may_be_warm=False)


def _leave_own(session: NamedSession, use: NamedUse) -> None:
    if session.is_running and not session.is_steward():
        _leave_as_client(session, use)
        return
    is_last = session.is_running and use.is_last()
    ends_now = is_last and not (use.keep_warm and _may_be_warm(session, use))
    if ends_now:
        use.settle_the_silent()
    if not session.is_running or (ends_now and use.leave(may_be_warm=False) is NameState.CLOSING):
        _end(session)
        return
    _mark(session, use)
    try:
        lease = session.detach(max(use.spec.lease_seconds, use.keep_warm if is_last else 0.0))
    except NotSteward:  # another process has taken the pool since the check
        _leave_as_client(session, use)
    except SkywardError as error:
        if isinstance(error, LedgerError) or not session.is_running:
            raise
        if use.leave(may_be_warm=False) is NameState.CLOSING:
            # for example the account does not pay for the warm time: a pool that stays open would cost more
            use.log(logging.WARNING, "the pool %r is not kept warm, and is ended: %s", use.name, error)
            _end(session)
        else:
            use.log(logging.WARNING, "the pool %r was left without a last renewal of its leases: %s", use.name, error)
            session.leave_to_lease("the pool was left")
    else:
        warm_seconds = math.inf
        if is_last and lease.expires_at is not None:
            warm_seconds = (lease.expires_at - datetime.now(UTC)).total_seconds()
        _end_if_last(use, lease.pool_id, is_extended=is_last, warm_seconds=warm_seconds)


def _may_be_warm(opened: NamedSession | Attached, use: NamedUse) -> bool:
    """Return whether the pool takes calls: warm machines that take none would only spend the rest of the money."""
    refusal = None if opened.cluster is None else opened.cluster.refusal
    if refusal is not None:
        use.log(logging.WARNING, "the pool %r is not kept warm, and is ended: %s", use.name, refusal)
    return refusal is None


def _mark(opened: NamedSession | Attached, use: NamedUse) -> None:
    """Mark the nodes: if the mark is still there when this process has left, no other one has come."""
    transports = opened.transports if isinstance(opened, Attached) else opened.machines and opened.machines.transports
    if transports and use.keep_warm:
        transports.begin_to_leave(use.mark)


def _leave_as_client(session: NamedSession, use: NamedUse) -> None:
    """Leave a pool that another process keeps, or none."""
    use.is_last()  # after an outage of the ledger this waits, and the session renews the nodes
    _adopt_no_more(use)
    _mark(session, use)
    session.leave_to_lease("the pool was left")
    _end_if_last(use, session.pool_id, is_extended=False)


def _adopt_no_more(use: NamedUse) -> None:
    """Leave the pool to its next steward, if this process has adopted it, or would do it."""
    if use.succession is not None:
        use.succession.close()


def _end(session: NamedSession) -> None:
    session.stop("the pool was closed")
    session.release()


def _leave_attached(attached: Attached, use: NamedUse) -> None:
    pool_id, may_be_warm, is_extended, warm_seconds = attached.lease.pool_id, True, False, math.inf
    if attached.is_running:
        _mark(attached, use)
    if (
        attached.is_running
        and use.is_last()
        and (seconds := use.keep_warm)
        and (may_be_warm := _may_be_warm(attached, use))
    ):
        try:
            use.longest_seconds = max(use.longest_seconds, seconds)
            paid_seconds = None if use.succession is None else use.succession.keep_warm(seconds)
            if paid_seconds is None:
                attached.extend_leases(seconds)
            else:
                warm_seconds = paid_seconds
            use.extend(pool_id, seconds)
            is_extended = True
        except BudgetExceeded as error:
            use.log(logging.WARNING, "the pool %r is not kept warm, and is ended: %s", use.name, error)
            may_be_warm = False
        except SkywardError as error:
            use.log(logging.INFO, "the leases of the pool %r are extended after it was left: %s", use.name, error)
    if attached.is_running and (not may_be_warm or not use.keep_warm) and use.is_last():
        use.settle_the_silent()
    _adopt_no_more(use)
    attached.stop("the pool was left")
    _end_if_last(use, pool_id, may_be_warm=may_be_warm, is_extended=is_extended, warm_seconds=warm_seconds)


def _end_if_last(
    use: NamedUse,
    pool_id: str,
    *,
    may_be_warm: bool = True,
    is_extended: bool = True,
    warm_seconds: float = math.inf,
) -> None:
    """Leave; end the machines if no process uses the pool any more and it is not to stay warm.

    `is_extended`: the nodes have the longer lease of a warm pool, if this is the last process. It may have become the
    last one after it had looked, or that has failed: then they get it now. `warm_seconds` is for how long they are
    paid.
    """
    state = use.leave(may_be_warm=may_be_warm, warm_seconds=warm_seconds)
    if state is NameState.CLOSING:
        use.end_pool(pool_id)
        return
    if state is NameState.WARM and not is_extended:
        _extend(use, pool_id)
    if state is NameState.WARM:
        _end_in_time(use, pool_id)
    if state is not None:
        use.say_what_stays(pool_id)


def _end_in_time(use: NamedUse, pool_id: str) -> None:
    """Inform the nodes of the end of their warm time, now that the ledger has it. Raises nothing: nodes that do not
    answer end with their present leases, and the ledger is settled with the time at which they did.
    """
    try:
        end_in_time(use.ledger, use.name, pool_id, use.mark)
    except SkywardError as error:
        words = "some nodes of the pool %r do not know when their warm time ends, and may live for %.0f s: %s"
        use.log(logging.WARNING, words, use.name, max(use.spec.lease_seconds, use.longest_seconds), error)


def _extend(use: NamedUse, pool_id: str) -> None:
    """Give the nodes the longer lease of a warm pool, after this process has left.

    A ledger or a node that does not answer is tried again, as long as the nodes live without this process, but for
    EXTEND_SECONDS at most. Then their present lease ends them, and the pool's row runs out at that time: the next
    process rents anew. If the account does not pay for the warm time, the pool is ended, unless a process has come.
    """
    deadline = time.monotonic() + min(use.spec.lease_seconds, EXTEND_SECONDS)
    for pause in RETRIES.pauses():
        try:
            keep_warm(use.ledger, use.name, use.keep_warm)
            return
        except BudgetExceeded as error:
            use.log(logging.WARNING, "the pool %r is not kept warm, and is ended: %s", use.name, error)
            if use.report_unreachable(pool_id):
                use.end_pool(pool_id)
            return
        except SkywardError as error:
            if not isinstance(error, LedgerError | Unreachable) or time.monotonic() + pause > deadline:
                words = "the pool %r ends before its warm time is over, %.0f s after it was left at the latest: %s"
                use.log(logging.WARNING, words, use.name, use.spec.lease_seconds, error)
                return
        time.sleep(pause)
