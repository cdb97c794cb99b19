"""The machines of a pool, from the first offer to the last machine that is known to be gone.

States of a pool's machines, and which code ends them when the client is stopped:

    nothing -> intended -> launch requested -> launched -> prepared -> leased -> terminated -> known to be gone
               `Rental.tear_down`, by tag, on the caller's ExitStack   `release`        the meter ends

The session and `engine.recovery` use `PoolMachines`. It has no state; its parts have:

    rental          the provider that rents, launches, ends; what may be left    no lock; see there
    selection       the offer of each rank, and what may replace it              written while the pool opens
    nodes           ranks, scheduler, generation, ports                          `settings_lock`, the only lock
    startup         from machines to nodes, while the pool opens                 one thread
    replacement     machines that stand by; one node is replaced                 one thread for each rank
    head_restart    another head                                                 under `nodes.settings_lock`

`ledger.journal` says what is recorded when.
"""

from __future__ import annotations

import logging
import random
import socket
import time
from collections.abc import Callable, Collection, Sequence
from concurrent.futures import Future
from contextlib import ExitStack
from datetime import UTC, datetime
from typing import TYPE_CHECKING

from skyward_core.events.events import InfraCreating
from skyward_core.ledger.budgets import SpendingLimit
from skyward_core.ledger.journal import Journal
from skyward_core.ledger.metering import Meter
from skyward_core.machines.instances import Instance, Lease
from skyward_core.providers.base import Provider
from skyward_core.provisioning.head_restart import HeadRestart
from skyward_core.provisioning.nodes import Nodes
from skyward_core.provisioning.port_forwarding import PORTS
from skyward_core.provisioning.rental import Emit, Rental
from skyward_core.provisioning.replacement import Replacement
from skyward_core.provisioning.selection import Selection
from skyward_core.provisioning.startup import Startup
from skyward_core.spec import PoolSpec
from skyward_core.transport.transport import Transports
from skyward_core.worker.preemption_notice import Notice

if TYPE_CHECKING:
    from skyward_core.engine.certificates import PoolCertificate

_log = logging.getLogger("skyward")


class PoolMachines:
    """The machines of one session: rents them, makes them nodes, replaces lost ones, terminates them.

    `acquire` first, `release` last; between them `stand_by` and `replace` (one thread for each rank) and `restart` may
    be called at the same time.
    """

    def __init__(
        self,
        spec: PoolSpec,
        providers: Sequence[Provider],
        pool_id: str,
        certificate: Future[PoolCertificate],
        *,
        emit: Emit,
        meter: Meter,
        journal: Journal,
        spending_limit: SpendingLimit,
        transports: Transports | None = None,
        may_act: Callable[[], object] = lambda: None,
    ) -> None:
        own = tuple(provider.for_pool() for provider in providers)
        self._spec = spec
        self._pool_id = pool_id
        self._emit = emit
        self._journal = journal
        self._may_act = may_act
        """Raises if another process keeps the pool now (docs/decisions/0028)."""
        self._rental = Rental(
            spec,
            own[0],
            pool_id,
            emit=emit,
            meter=meter,
            journal=journal,
            spending_limit=spending_limit,
            transports=transports,
            may_act=may_act,
        )
        self._selection = Selection(spec, own, self._rental, emit=emit, journal=journal)
        self._nodes = Nodes(spec, pool_id, self._rental, certificate, emit)
        self._startup = Startup(spec, self._rental, self._nodes)
        self._replacement = Replacement(spec, self._rental, self._selection, self._nodes)
        self._head_restart = HeadRestart(spec, self._rental, self._selection, self._nodes)

    # ── acquire and release ──────────────────────────────────────────────────────────────────────────────────────────

    def acquire(self, undo: ExitStack) -> Lease:
        """Rent and prepare the machines of the spec; return the lease with the address of its scheduler.

        The teardown is pushed on `undo` before the first launch and stays there, so that an interrupt at any line ends
        the machines. Raises NoCapacity, BootstrapFailed, ProvisioningTimeout and what the provider raises;
        InstancesLeft, from `undo`, names the machines that may be left.
        """
        self._emit(InfraCreating(self._pool_id, self._journal.work))
        self._nodes.created_at = datetime.now(UTC)
        deadline = time.monotonic() + self._spec.provision_timeout
        undo.callback(self._rental.tear_down_or_warn)
        undo.callback(self.transports.close)
        instances = self._selection.rent_all(deadline)
        provider = self._rental.provider
        if self._spec.image.cache and not provider.keeps_images:
            _log.info(
                "%s cannot keep the disks of machines: the image's packages are installed as if it had no cache=True",
                provider.name,
            )
        self._nodes.head_port = _free_port() if provider.is_here else random.choice(PORTS)  # noqa: S311 - a port, no secret
        self._nodes.all = {instance.rank: self._nodes.preparation_of(instance, instance.rank) for instance in instances}
        self._startup.prepare(deadline)
        return self.lease

    def adopt(self, lease: Lease, listed: Collection[Instance], *, is_launch_unsure: bool) -> None:
        """Go on with the nodes of a lease that another process has rented, in place of `acquire`.

        Machines that the provider lists and the lease lacks are terminated: their owner died before they were nodes.
        Raises what `Nodes.adopt` raises; then nothing has changed.
        """
        self._nodes.adopt(lease)
        nodes = {node.instance.id: node.instance for node in lease.nodes}
        self._selection.adopted = {node.rank: node.instance for node in lease.nodes}
        spec = self._spec
        if lease.accelerator is not None:
            spec = spec.with_(accelerator=lease.accelerator)
        self._rental.adopt([*nodes.values(), *listed], spec, is_launch_unsure=is_launch_unsure)
        for instance in listed:
            if instance.id not in nodes:
                self._rental.end_machine(instance)

    def leave(self) -> None:
        """From now on other processes have the machines: neither `stop` nor a late answer to a launch ends them."""
        self._rental.leave()

    def leave_without(self, lease: Lease) -> None:
        """Another process keeps the pool: terminate what was rented here meanwhile and is not in its lease."""
        self._rental.leave()
        there = {node.instance.id for node in lease.nodes}
        for rank, node in list(self._nodes.all.items()):
            if node.instance.id not in there and self._nodes.drop(rank, node):
                self._rental.end_in_thread(node)
        for rank in range(self._spec.most_nodes):
            self._replacement.dismiss(rank)

    def check(self) -> None:
        """Raise BootstrapFailed for a machine that has failed before it became a node."""
        self._startup.check()

    def launch_no_more(self) -> None:
        """Rent nothing from now on. Never waits, so that a signal handler may call it."""
        self._rental.launch_no_more()

    def end_now(self) -> None:
        """Request the end of all machines once and do not wait for it: for a pool without a reaper.

        `release` deals with errors.
        """
        self._rental.end_now()

    def stop(self) -> None:
        """Stop launching, and wake every thread that waits for a machine here."""
        self._rental.stop()

    def release(self) -> None:
        """End all machines of the pool, and wait until the provider confirms it.

        May be called again. Raises InstancesLeft if some could not be confirmed gone.
        """
        self.stop()
        self._rental.tear_down()

    @property
    def may_be_left(self) -> bool:
        """Whether a machine was requested that is not known to be gone.

        If the teardown was interrupted, another process must finish it.
        """
        return self._rental.may_be_left

    @property
    def may_be_left_to_their_lease(self) -> bool:
        """Whether machines that cannot be confirmed gone cost nothing and end themselves."""
        return self._rental.provider.may_be_left_to_its_lease()

    # ── present nodes ────────────────────────────────────────────────────────────────────────────────────────────────

    @property
    def transports(self) -> Transports:
        """The transports to all nodes."""
        return self._rental.transports

    @property
    def lease(self) -> Lease:
        """The written claim on the machines that there are now."""
        return self._nodes.lease

    @property
    def scheduler(self) -> str:
        """The address of the scheduler for this client."""
        return self._nodes.scheduler_from_here

    def extend_leases(self, seconds: float) -> None:
        """Let all nodes live for so many seconds from now.

        Raises Unreachable if one does not answer, BadRequest if they need this client.
        """
        self._nodes.extend_leases(seconds)

    def living(self) -> set[str]:
        """Return the ids of the pool's machines that the provider lists. Raises what the provider raises."""
        return self._rental.living()

    def last_words(self, rank: int) -> str:
        """Return the last message of a node's supervisor or guard; "" if there is none."""
        return self._nodes.last_words(rank)

    def has_ended(self, rank: int) -> bool:
        """Return whether a node has reported its end, or does not exist."""
        return self._nodes.has_ended(rank)

    def is_connected(self, rank: int) -> bool:
        """Return whether a node answers this client, as far as is known."""
        return self._nodes.is_connected(rank)

    def lives(self, ranks: Collection[int]) -> dict[int, bool]:
        """Ask these nodes whether their supervisors live (`Nodes.lives`)."""
        return self._nodes.lives(ranks)

    def notices(self, rank: int) -> tuple[Notice, ...]:
        """Return the notices of a node's machine that the provider takes back."""
        return self._nodes.notices(rank)

    # ── lost nodes ───────────────────────────────────────────────────────────────────────────────────────────────────

    def raise_if_not_steward(self) -> None:
        """Raise NotSteward if another process keeps the pool now, and LedgerError if that cannot be found out."""
        self._may_act()

    def restart_workers(self, rank: int, workers: Sequence[int]) -> None:
        """Have a node kill and restart these of its workers (`Nodes.restart_workers`)."""
        self._may_act()
        self._nodes.restart_workers(rank, workers)

    def stand_by(self, rank: int) -> None:
        """Prepare a machine that the next `replace` of this rank will take (`Replacement.stand_by`)."""
        self._may_act()
        self._replacement.stand_by(rank)

    def dismiss(self, rank: int) -> None:
        """Terminate the machine that stands by for this rank (`Replacement.dismiss`)."""
        self._replacement.dismiss(rank)

    def retire(self, rank: int, instance_id: str) -> None:
        """Let a node end its workers, without a restart, if it still is this machine (`Replacement.retire`)."""
        self._may_act()
        self._replacement.retire(rank, instance_id)

    def replace(self, rank: int, is_there: Callable[[], bool]) -> None:
        """Replace a lost node and wait until its workers have joined (`Replacement.replace`)."""
        self._may_act()
        self._replacement.replace(rank, is_there)

    def add(self, rank: int, is_there: Callable[[], bool]) -> None:
        """Give a rank that the pool has not had a node, and wait until its workers have joined (`Replacement.add`)."""
        self._may_act()
        self._replacement.add(rank, is_there)

    def abandon_coming(self) -> None:
        """Stop waiting for machines that are to become new nodes (`Replacement.abandon_coming`)."""
        self._replacement.abandon_coming()

    def remove(self, rank: int, instance_id: str) -> None:
        """End the machine of a rank, if it still is this one, and put none in its place (`Replacement.remove`)."""
        self._may_act()
        self._replacement.remove(rank, instance_id)

    def restart(self, heirs: Collection[str], dead: Collection[str]) -> Lease:
        """Give the pool another head. Returns the new lease (`HeadRestart.restart`)."""
        self._may_act()
        return self._head_restart.restart(heirs, dead)


def _free_port() -> int:
    """Return a port that was free a moment ago, for torch's or JAX's rendezvous on the head."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])
