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

import contextlib
import logging
import math
import random
import socket
import threading
import time
from collections.abc import Callable, Collection, Generator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import ExitStack
from datetime import UTC, datetime
from pathlib import Path
from typing import TYPE_CHECKING

from skyward_core.concurrency.threads import side_by_side
from skyward_core.errors import CommandFailed, ConnectionLost, PoolClosed, SkywardError, Unreachable
from skyward_core.events.events import InfraCreating
from skyward_core.ledger.budgets import SpendingLimit
from skyward_core.ledger.journal import Journal
from skyward_core.ledger.lease_clock import boot_seconds
from skyward_core.ledger.metering import Meter
from skyward_core.machines.instances import Instance, Lease
from skyward_core.providers.base import Provider
from skyward_core.provisioning.bootstrap import (
    Preparation,
    await_scheduler,
    is_to_be_kept,
    raise_if_gone,
    start_and_keep,
)
from skyward_core.provisioning.nodes import ALL_AT_ONCE, PORTS, Nodes
from skyward_core.provisioning.rental import Emit, Rental
from skyward_core.provisioning.replacement import HeadRestart, Replacement
from skyward_core.provisioning.selection import Selection
from skyward_core.spec import PoolSpec
from skyward_core.transport.transport import LocalTransport, Transport, Transports
from skyward_core.wire.info import Notice
from skyward_core.worker.node_clocks import DETACHED, LEASE, uptime, write_lease

if TYPE_CHECKING:
    from skyward_core.engine.certificates import PoolCertificate

PORT_TRIES = 5
ASK_SECONDS = 5.0
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
        undo.push(self._rental.tear_down_or_warn)
        undo.callback(self.transports.close)
        instances = self._selection.rent_all(deadline)
        provider = self._rental.provider
        if self._spec.image.cache and not provider.keeps_images:
            _log.info(
                "%s cannot keep the disks of machines: the image's packages are installed as if it had no cache=True",
                provider.name,
            )
        self._nodes.head_port = _free_port() if provider.is_local else random.choice(PORTS)  # noqa: S311 - a port, no secret
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

        May be called again. Raises InstancesLeft if some could not be confirmed gone. If `stop` fails, the machines end
        nevertheless, and its error is raised after that.
        """
        try:
            self.stop()
        finally:
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
    def provider(self) -> Provider:
        """The provider that has the machines."""
        return self._rental.provider

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


# Makes nodes of the machines of a pool that opens: prepares all at once, checks them, and waits for the head's
# scheduler.
#
#     started -> the head gets its settings -> its scheduler listens -> the other nodes get its address -> opened
#
# `Startup` owns the list of machines that do not answer. Only the thread that opens the pool uses it. It ends the
# threads that it starts.


class Startup:
    """Makes nodes of rented machines while the pool opens."""

    def __init__(self, spec: PoolSpec, rental: Rental, nodes: Nodes) -> None:
        self._spec = spec
        self._rental = rental
        self._nodes = nodes
        self._listed_at = 0.0
        self._missed = set[str]()
        """The machines that the last listing lacked."""
        self._silent: dict[str, float] = {}
        """By machine: since when it does not answer."""
        self._looked_at = math.inf
        """When the machines were last looked at, by `boot_seconds`."""
        self._has_slept = False
        """Whether two looks were further apart than a lease: the process was stopped, or the computer slept."""
        self._has_failed = threading.Event()

    def prepare(self, deadline: float) -> None:
        """Make nodes of all instances, at the same time; they wait only for the head's address."""
        nodes = list(self._nodes.all.values())
        head, *others = nodes
        threads = ThreadPoolExecutor(len(nodes), thread_name_prefix="skyward-prepare")
        try:
            started = {node.rank: threads.submit(self._start, node, deadline) for node in nodes}
            self._nodes.scheduler = await_scheduler(
                head, nodes, lambda: self._check_all(nodes, list(started.values())), deadline
            )
            for node in others:
                while not started[node.rank].done():
                    self._check_all(nodes, list(started.values()))
                    for other in nodes:
                        other.follow()
                    time.sleep(0.01)
                started[node.rank].result()
            if not all(threads.map(self._nodes.sees_the_head, others)):
                self._go_through_the_client(nodes, deadline)
            list(threads.map(lambda node: self._send_settings(node, self._nodes.scheduler), others))
            for node in nodes:
                node.follow()
                node.transport.opened()
        except BaseException:
            self._has_failed.set()
            self._rental.transports.close()  # wakes the threads that wait for a machine
            raise
        finally:
            threads.shutdown()

    def check(self) -> None:
        """Raise BootstrapFailed for a machine that has failed before it became a node."""
        nodes = list(self._nodes.all.values())
        for node in nodes:
            node.follow()
        self._raise_if_gone(nodes)

    def _start(self, node: Preparation, deadline: float) -> None:
        timeout = max(1.0, deadline - time.monotonic())
        if node.rank == 0 and is_to_be_kept(self._spec, self._rental.provider, node.instance):
            start_and_keep(node, self._rental.spec, self._rental.provider, timeout, self._has_failed)
        else:
            node.start(self._nodes.script(), timeout, self._spec.image.uploads)
        if node.rank == 0:
            self._send_settings(node, None)

    def _send_settings(self, node: Preparation, scheduler: str | None) -> None:
        try:
            node.send_settings(self._nodes.settings(node, node.rank, scheduler))
        except (Unreachable, CommandFailed) as error:
            raise node.failure(f"it does not answer any more: {error}") from error

    def _check_all(self, nodes: Sequence[Preparation], started: Sequence[Future[None]]) -> None:
        if self._rental.is_closing:  # the reaper ends the machines: one that has not answered yet may never do it
            raise PoolClosed(
                "terminate_now() was called, or a limit was reached, while the pool opened: its machines end"
            )
        for future in started:
            if future.done():
                future.result()
        self._raise_if_gone(nodes)

    def _raise_if_gone(self, nodes: Sequence[Preparation]) -> None:
        """Raise BootstrapFailed for a machine that is gone.

        Over SSH the provider is queried at most every ASK_SECONDS, because a listing may take seconds, and only for
        machines that do not answer or whose script has not begun. After a sleep it is queried for all: a guard has
        ended its node meanwhile, and the host of the node still answers.
        """
        asked = silent = list(nodes)
        is_local = self._rental.provider.is_local
        if not is_local:
            now = boot_seconds()
            self._has_slept |= now - self._looked_at > self._spec.lease_seconds
            self._looked_at = now
            silent = [node for node in nodes if not node.transport.is_connected]
            asked = [node for node in nodes if self._has_slept or not node.transport.is_connected or not node.phase]
            self._silent = {node.instance.id: self._silent.get(node.instance.id, time.monotonic()) for node in silent}
            lease_over = {
                machine
                for machine, since in self._silent.items()
                if time.monotonic() - since > self._spec.lease_seconds
            }
            raise_if_gone(silent, lease_over)  # its guard has ended it, or its host is off
            if not asked or time.monotonic() < max(self._listed_at, self._rental.answered_at) + ASK_SECONDS:
                return
            self._listed_at = time.monotonic()
        try:
            living = self._rental.living()
        except Exception:
            if is_local:
                raise
            return  # an outage proves nothing
        missing = {node.instance.id for node in asked} - living
        # a cloud may list a new machine some seconds late
        gone, self._missed = missing if is_local else missing & self._missed, missing
        raise_if_gone(asked, gone)

    def _go_through_the_client(self, nodes: Sequence[Preparation], deadline: float) -> None:
        """Let every node listen on loopback, at its own ports. This client forwards them from every other node."""
        for left in reversed(range(PORT_TRIES)):
            self._nodes.forwarding.choose()
            try:
                self._nodes.connect()
                break
            except ConnectionLost:
                raise
            except (SkywardError, OSError):  # one of the ports is used on a node
                if not left:
                    raise
        self._nodes.generation += 1
        head = nodes[0]
        head.send_settings(self._nodes.settings(head, 0, None))
        self._nodes.scheduler = await_scheduler(head, nodes, lambda: self._raise_if_gone(nodes), deadline)


# Informs the nodes that they run without their client from now on, and undoes this if a node or the ledger fails.
#
# States of a pool that is detached, and which pool a crash leaves:
#
#     attended -> money reserved -> nodes informed -> ledger written -> reaper informed -> detached
#     └─────────────── an attended pool ─────────┘   └─ a detached pool, whose nodes and money last until its lease ends
#
# Until the ledger is written, the owner's death ends the pool: the reaper and every sweep decide by the ledger, not by
# the leases of the nodes. So the nodes are informed first and the ledger is written last.


@contextlib.contextmanager
def detached_nodes(machines: PoolMachines, seconds: float, usual_seconds: float) -> Generator[None]:
    """Let all nodes live for so many seconds from now, with or without this client. If that or the body fails, undo it.

    Nodes of this machine that had no lease then get one of `usual_seconds`. Raises Unreachable if a node does not
    answer, BadRequest if the nodes need this client.
    """
    nodes = machines.transports.all()
    # reads before it writes: most nodes that do not answer are found here, with nothing to undo
    before = side_by_side(_lease_of, nodes, "skyward-nodes", ALL_AT_ONCE)
    try:
        machines.extend_leases(seconds)
        for transport in machines.transports.here():
            transport.write(DETACHED, "")
        yield
    except BaseException:
        _take_back(nodes, before, usual_seconds)
        raise


def disown(machines: PoolMachines) -> None:
    """Let nodes of this machine end with their lease, although this process lives on. Raises nothing."""
    for transport in machines.transports.here():
        with contextlib.suppress(OSError):  # it has ended
            transport.write(DETACHED, "")


def _lease_of(transport: Transport) -> str:
    """Return a node's lease as it has written it; "" if it has none, as nodes of this machine that end with their
    client.
    """
    try:
        return transport.read(LEASE)
    except (FileNotFoundError, CommandFailed):
        return ""


def _take_back(nodes: Sequence[Transport], before: Sequence[str], usual_seconds: float) -> None:
    """Restore the nodes' leases. The next lease renewal of this client, or of another one, makes them longer again."""

    def take_back(node: tuple[Transport, str]) -> None:
        transport, lease = node
        try:
            if isinstance(transport, LocalTransport):
                _take_back_here(Path(str(transport.instance.directory)), lease, usual_seconds)
            elif lease and transport.is_connected:  # else it probably has the old lease; do not wait
                transport.write(LEASE, lease)
        except (SkywardError, OSError, ValueError) as error:
            _log.warning(
                "%s could not be informed that its pool is not detached; its lease may be too long: %s",
                transport.instance.id,
                error,
            )

    side_by_side(take_back, list(zip(nodes, before, strict=True)), "skyward-nodes", ALL_AT_ONCE)


def _take_back_here(directory: Path, lease: str, usual_seconds: float) -> None:
    """Restore the lease of a node of this machine.

    The lease is written first: a node whose owner dies would otherwise use the long lease that it has in memory.
    """
    usual = uptime() + usual_seconds
    write_lease(directory, max(usual, float(lease)) if lease else usual, may_shorten=True)
    (directory / DETACHED).unlink(missing_ok=True)
