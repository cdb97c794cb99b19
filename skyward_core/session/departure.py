"""How the process of a session leaves its machines to others, without ending any: to their lease, or to the reaper.

    open ──live_by_lease──▶ shared ──detach, leave──▶ detached: the pool lives by its lease
                               └──leave_to_lease────▶ the same, without a message to nodes and ledger
    stopped ──hand_over──▶ the reaper ends the machines that are not confirmed gone

`state.Claims` decides which thread does it. docs/decisions/0008 and 0028 have what a kill between two steps leaves.

`SessionReaper` is the reaper as this process sees it: it starts before anything is rented, gets a message when the pool
ends, and starts again if it was killed.
"""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable, Sequence
from datetime import UTC, datetime, timedelta

from skyward_core.cleanup.reaper import Reaper, ReaperInput
from skyward_core.errors import InstancesLeft, NotPicklable, SkywardError
from skyward_core.machines.instances import Lease
from skyward_core.providers.base import Provider
from skyward_core.provisioning.lifecycle import PoolMachines, detached_nodes, disown
from skyward_core.session.bookkeeping import LEDGER_BUSY_SECONDS, Bookkeeping, EventEmitter
from skyward_core.session.clock import Renewal
from skyward_core.session.sealed_lease import SharedLease
from skyward_core.session.session_engine import SessionEngine
from skyward_core.session.state import Claims


class SessionReaper:
    """Owns the connection to the reaper. There is no reaper if the provider cannot travel to another process."""

    def __init__(self, pool_id: str, log: Callable[..., object]) -> None:
        self._pool_id = pool_id
        self._log = log
        self._reaper: Reaper | None = None
        self._input: ReaperInput | None = None
        self.has_detached = False
        """Whether a call was started detached: then the pool lives by its lease, and a restarted reaper gets that
        message.
        """

    @property
    def reaper(self) -> Reaper | None:
        """The present reaper."""
        return self._reaper

    def start(self, providers: Sequence[Provider], ledger_url: str) -> None:
        """Start the reaper, or log why there is none."""
        try:
            self._input = ReaperInput.of(providers, self._pool_id, ledger_url)
            self._reaper = Reaper.start(self._input)
        except NotPicklable as error:
            words = (
                "the pool has no reaper, because its provider cannot be pickled (%s): after a kill, `skyward"
                " sweep` ends it"
            )
            self._log(logging.WARNING, words, error)

    def restart_if_gone(self, is_running: Callable[[], bool]) -> None:
        """Start another reaper if this one was killed and the pool is open.

        In this order: a pool that is stopped releases its reaper afterwards.
        """
        if self._reaper is not None and self._input is not None and not self._reaper.is_alive and is_running():
            self._log(logging.WARNING, "the pool's reaper is gone: another one is started")
            self._reaper.leave()
            self._reaper = Reaper.start(self._input)
            if self.has_detached:
                self._reaper.live_by_lease()

    def terminate_now(self) -> bool:
        """Have the reaper end the machines. Returns False if there is no living reaper. Waits for nothing."""
        if self._reaper is None or not self._reaper.is_alive:
            return False
        self._reaper.terminate_now()
        return True

    def live_by_lease(self) -> None:
        """From now on the machines live by their lease, and not with this process."""
        if self._reaper is not None:
            self._reaper.live_by_lease()

    def leave(self) -> None:
        """The pool has ended, or was detached: the reaper has nothing to do."""
        if self._reaper is not None:
            self._reaper.leave()

    def hang_up(self) -> None:
        """Leave the pool to the reaper, as if this process were gone."""
        if self._reaper is not None:
            if self.has_detached:  # else the reaper would leave the pool to its lease
                self._reaper.terminate_now()
            self._reaper.hang_up()


class Departure:
    """Leaves the machines of one session. `ended` is set when its threads are to end."""

    def __init__(
        self,
        pool_id: str,
        claims: Claims,
        bookkeeping: Bookkeeping,
        reaper: SessionReaper,
        renewal: Renewal,
        shared: SharedLease,
        engine: SessionEngine,
        emitter: EventEmitter,
        ended: threading.Event,
    ) -> None:
        self._pool_id = pool_id
        self._claims = claims
        self._bookkeeping = bookkeeping
        self._reaper = reaper
        self._renewal = renewal
        self._shared = shared
        self._engine = engine
        self._emitter = emitter
        self._ended = ended
        self.is_left_to_lease = False
        """Whether the machines were left to their lease."""

    def live_by_lease(self, lease: Lease | None, lease_seconds: float) -> None:
        """From now on the end of this process does not end the pool. Raises LedgerError."""
        assert self._bookkeeping.journal is not None
        self._shared.share(lease)  # first: killed here, the reaper ends the pool and deletes the row
        self._bookkeeping.journal.live_by_lease(lease_seconds)
        self._reaper.live_by_lease()
        self._reaper.has_detached = True

    def detach(self, machines: PoolMachines, longest_seconds: float, usual_seconds: float) -> datetime:
        """Let the machines live for so long without this process; return until when. `leave` comes next.

        Raises what `Session.detach` raises. Then the caller decides whether the pool stays open (`Claims.go_on`).
        """
        assert self._bookkeeping.journal is not None
        self._claims.claim_detach()
        with self._engine.settled():
            now = datetime.now(UTC)
            with (
                self._bookkeeping.paid_for(longest_seconds) as paid_seconds,
                detached_nodes(machines, longest_seconds, usual_seconds),
            ):
                self._shared.share(machines.lease)
                self._claims.begin_to_leave()
                self._bookkeeping.journal.live_by_lease(paid_seconds)
        self._claims.note_detached()
        return now + timedelta(seconds=paid_seconds)

    def leave(self, machines: PoolMachines, expires_at: datetime) -> Lease:
        """Release everything that belongs to detached nodes from now on; return their lease."""
        assert self._bookkeeping.journal is not None
        self.is_left_to_lease = True
        machines.leave()
        self._reaper.live_by_lease()
        self._ended.set()
        self._renewal.end()
        lease = machines.lease.model_copy(update={"expires_at": expires_at})
        try:
            self._engine.end(machines, lambda cluster: cluster.leave("the pool was detached: attach to it"))
            self._shared.keep_at_last(machines.lease)
            self._bookkeeping.journal.note()
        finally:
            self._reaper.leave()
            self.close_ledger()
            self._emitter.emit_left(self._pool_id)
            self._emitter.queue.close()
        return lease

    def leave_to_lease(self, machines: PoolMachines, reason: str, error: SkywardError | None = None) -> None:
        """Stop using and renewing a shared pool, after `Claims.claim_stop`. Sends nothing to ledger and machines.

        Calls that have not ended raise `error`, or PoolClosed with the reason.
        """
        self._claims.is_released = self._claims.is_written_down = self.is_left_to_lease = True
        self._renewal.end()
        self._ended.set()
        machines.leave()
        try:
            disown(machines)
            self._engine.end(machines, lambda cluster: cluster.leave(reason, error))
        finally:
            self._reaper.leave()
            self._bookkeeping.close_ledger()
            self._emitter.emit_left(self._pool_id)
            self._emitter.queue.close()
            self._claims.end_stop()

    def hand_over(self, machines: PoolMachines, left: InstancesLeft) -> None:
        """Leave unconfirmed machines to the reaper, as if this process were dead.

        The reaper repeats its requests for half an hour; after that, sweeps do. The entries of machines and pool stay
        open. If this process is killed here, the pool has a dead owner: reaper and sweeps end it.
        """
        if self._bookkeeping.journal is None:
            return
        level = logging.WARNING if machines.may_be_left_to_their_lease else logging.ERROR
        self._emitter.queue.log(
            level, "%s was closed, and some of its machines are not confirmed gone: %s", self._pool_id, left
        )
        self._claims.is_released = self._claims.is_written_down = True
        self._bookkeeping.note_what_is_left()
        self._reaper.hang_up()
        self.close_ledger()

    def close_ledger(self) -> None:
        """Close the connection to the ledger, once the renewal does not use it any more."""
        self._renewal.join(LEDGER_BUSY_SECONDS)
        self._bookkeeping.close_ledger()
