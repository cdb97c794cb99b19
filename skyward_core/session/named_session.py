"""The session of the process that has rented a pool with a name. It is the pool's first steward.

    keeps the pool ──this process was silent, and another has taken it──▶ goes on as a client ──▶ left

Each step that rents, pays or ends something asks the `StewardTerm` first.
"""

from __future__ import annotations

import contextlib
import logging
import threading
from collections.abc import Sequence
from typing import TYPE_CHECKING, override

from skyward_core.concurrency.threads import in_thread
from skyward_core.errors import SkywardError
from skyward_core.events.events import Callback
from skyward_core.ledger.names_policy import NotSteward
from skyward_core.machines.instances import Lease, Node
from skyward_core.providers.base import Provider
from skyward_core.provisioning.lifecycle import disown
from skyward_core.session.client_watch import ClientWatcher, Follower, words_of_end
from skyward_core.session.clock import Clock, Step
from skyward_core.session.sealed_lease import KeysInMemory, PoolKeys, find_lease
from skyward_core.session.session import Session
from skyward_core.session.session_engine import PoolSize
from skyward_core.session.state import SessionState
from skyward_core.session.steward_term import StewardUse
from skyward_core.spec import PoolSpec
from skyward_core.work import Work

if TYPE_CHECKING:
    from skyward_core.wire.masking import SecretValues

REACH_SECONDS = 5.0  # the clock waits for it
GUARD_SECONDS = 2.0


class NamedSession(Session):
    """One opening of a pool with a name, by the process that rents."""

    def __init__(
        self,
        spec: PoolSpec,
        providers: Sequence[Provider],
        on_event: Callback | None,
        work: Work,
        secrets: SecretValues | None,
        pool_id: str,
        use: StewardUse,
        belongs_to: Work,
    ) -> None:
        super().__init__(spec, providers, on_event, work, secrets, pool_id, use.term, belongs_to=belongs_to)
        self._use = use
        self.term = use.term
        """Whether this session keeps the pool. Once lost, it stays lost: its records are old then."""
        self._watcher: ClientWatcher | None = None
        """Set when another process keeps the pool."""
        self._client_lease: Lease | None = None
        """The nodes that this process knows since then."""
        self._follower = Follower(self._lease_as_client, self._reach_new, self._go_on_with)
        self._in_memory = KeysInMemory()
        self._stepping_down = threading.Lock()
        """Held while the session becomes one of a client, or checks that."""

    @override
    def own_size(self) -> PoolSize | None:
        return self.size if self.is_steward() else None

    def is_steward(self) -> bool:
        """Whether this process still keeps the pool. If that is not certain, asks the ledger. Raises LedgerError."""
        try:
            self.term.check()
        except NotSteward:
            self.step_down()
            return False
        return self._watcher is None

    @override
    def _may_act(self) -> None:
        self.term.check()

    @override
    def _stop_at_limit(self, reason: str, error: SkywardError | None) -> None:
        try:
            self.term.check()
            self._use.begin_to_end()
        except SkywardError as refusal:
            self.events.log(logging.WARNING, "%s is not ended here (%s): %s", self.pool_id, reason, refusal)
            return
        try:
            self.stop(reason, error)
        finally:
            # otherwise this process is leaving the pool, and `NamedUse.leave` decides whether the pool ends
            if self._claims.state is SessionState.STOPPED:
                self._use.release_stewardship()  # if machines are left, the next process that opens the name ends them

    @override
    def _new_clock(self, often: list[Step], seldom: list[Step]) -> Clock:
        def if_kept(step: Step) -> Step:
            return lambda: step() if self.term.is_certain else None

        return super()._new_clock([*often, self._look_as_client], [if_kept(step) for step in seldom])

    @override
    def _share_current(self) -> None:
        if self.term.is_certain:
            super()._share_current()

    @override
    def note_cost(self) -> None:
        if self.term.is_certain:
            super().note_cost()

    @override
    def leave_to_lease(self, reason: str, error: SkywardError | None = None) -> None:
        try:
            super().leave_to_lease(reason, error)
        finally:
            self._in_memory.close()

    def _look_as_client(self) -> None:
        if self._watcher is not None and self.cluster is not None:
            self._watcher.look()
            self._follower.look(self.cluster)

    @property
    @override
    def lease(self) -> Lease | None:
        return self._client_lease or super().lease

    # ── another process keeps the pool ───────────────────────────────────────────────────────────────────────────────

    def step_down(self) -> None:
        """Continue as a client, which replaces, pays and ends nothing. Calls go on. Idempotent; does not wait for
        machines.
        """
        machines, cluster, recovery = self.machines, self.cluster, self._engine.recovery
        with self._stepping_down:
            if self._watcher is not None or machines is None or cluster is None or recovery is None:
                return
            if not self.is_running:
                return
            self._watcher = watcher = ClientWatcher(
                lambda: self.cluster,
                self._resume,
                self.spec.lease_seconds,
                self._ended,
                self.events.log,
                why_gone=lambda: words_of_end(machines.provider, machines.lease.nodes[0].instance.id),
            )
        recovery.stop()
        machines.leave()
        self._client_lease = machines.lease
        cluster.draining.set_steward(None)
        watcher.go_on(machines.lease)
        disown(machines)
        self.events.log(logging.WARNING, "another process keeps the pool %s: this one was silent", self.pool_id)
        in_thread("skyward-adopt", self._end_own)

    def _resume(self, seconds: float) -> bool:
        if self.machines is None or self.cluster is None:
            return False
        self.cluster.resume(self.machines.scheduler, seconds)
        return True

    def _end_own(self) -> None:
        """End what this process has rented and the new steward does not know."""
        assert self.machines is not None
        with contextlib.suppress(SkywardError):
            self.machines.leave_without(find_lease(self.pool_id)[0])

    # ── nodes that come and leave meanwhile ──────────────────────────────────────────────────────────────────────────

    def _lease_as_client(self) -> Lease:
        assert self._client_lease is not None
        return self._client_lease

    def _reach_new(self, lease: Lease, keys: PoolKeys) -> list[Node]:
        """Connect to the nodes of a newer lease; return those that answer."""
        assert self.machines is not None
        reached = list[Node]()
        for node in self._in_memory.with_keys(lease, keys.ssh_keys).nodes:
            try:
                transport = self.machines.transports.to(node.instance)
                transport.join(timeout_seconds=REACH_SECONDS, guard_seconds=GUARD_SECONDS)
                transport.opened()
            except (SkywardError, OSError):
                self.machines.transports.forget(node.instance)
            else:
                reached.append(node)
        return reached

    def _go_on_with(self, lease: Lease, gone: list[Node]) -> None:
        assert self.machines is not None
        self._client_lease = lease
        for node in gone:
            self.machines.transports.forget(node.instance)
            if self._watcher is not None:
                self._watcher.joined(node.rank)  # does not wait for it any more
