"""Replaces one node that is lost or about to be lost; adds a node to a pool that grows, and removes one.

    lost ──────────────> rented ─> started ─┬─> has its settings ─> its workers have joined: a node
    about to be lost ─> rented ─> started ──┴─> stands by, until the next `replace` of its rank takes it

A machine that fails before it is a node is terminated at once (`Rental.end`). One that stands by has the pool's tags:
if this process dies, the reaper finds and terminates it.

`Replacement` owns the machines that stand by. Each rank has one thread at a time (`engine.recovery`).
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Collection, Mapping, Sequence
from concurrent.futures import Future
from dataclasses import replace

from skyward_core.concurrency.threads import Threads, side_by_side
from skyward_core.errors import CommandFailed, NodeLost, PoolClosed, Unreachable
from skyward_core.machines.instances import Lease
from skyward_core.provisioning.bootstrap import LAST_PHASE, LOOK_SECONDS, Preparation, await_scheduler
from skyward_core.provisioning.nodes import ALL_AT_ONCE, Nodes
from skyward_core.provisioning.rental import Rental
from skyward_core.provisioning.selection import Selection
from skyward_core.provisioning.teardown import Termination
from skyward_core.spec import PoolSpec

RETIRED = -1  # the generation of a node that ends its workers and does not restart them
HEIR_SECONDS = 60.0  # for a surviving node to become the head; its scheduler usually listens after two seconds
LIVES_AGAIN_SECONDS = 2.0
BEGIN_SECONDS = 20.0  # for the other nodes to begin, when the head is up
# for the end of nodes whose processes have died, before others are started on the same machines
END_FIRST_SECONDS = 10.0
_log = logging.getLogger("skyward")


class Replacement:
    """Replaces single nodes of an open pool; several ranks at the same time."""

    def __init__(self, spec: PoolSpec, rental: Rental, selection: Selection, nodes: Nodes) -> None:
        self._spec = spec
        self._rental = rental
        self._selection = selection
        self._nodes = nodes
        self._standing_by: dict[int, Preparation] = {}
        """Machines that are prepared to take the place of one that is still there."""
        self._adding: dict[int, Preparation | None] = {}
        """The machines of ranks that the pool has not had, until they are nodes; None: it is being rented."""

    def replace(self, rank: int, is_there: Callable[[], bool]) -> None:
        """Replace a lost node and wait until the workers of the new one have joined (`is_there`).

        Raises what `acquire` raises, PoolClosed.
        """
        nodes, is_new = self._nodes, rank in self._adding
        lost = nodes.all.pop(rank, None)
        termination = self._rental.end_in_thread(lost) if lost is not None else None
        deadline = time.monotonic() + self._spec.provision_timeout
        node = self._standing_by.pop(rank, None) or self._rent_instead(rank, termination)
        try:
            with nodes.settings_lock:
                nodes.forwarding.choose_for(rank)
                nodes.all[rank] = node
                nodes.connect()
                self._raise_if_cut_off(node)
                node.send_settings(nodes.settings(node, rank, nodes.scheduler))
            looked = time.monotonic()
            while not is_there():
                node.follow()
                self._raise_if_dropped(rank, node)
                self._go_on(rank, deadline, is_there)
                if time.monotonic() - looked > LOOK_SECONDS:
                    looked = time.monotonic()
                    nodes.raise_if_lost(node)
            if is_new:
                self._raise_if_abandoned(rank)
            node.transport.opened()
        except BaseException:
            nodes.drop(rank, node)
            self._rental.end(node)
            raise

    def add(self, rank: int, is_there: Callable[[], bool]) -> None:
        """Give a rank that the pool has not had a node, and wait until its workers have joined.

        Raises BudgetExceeded if the money would not last for long; what `replace` raises; what `is_there` raises, and
        then the machine is ended.
        """
        self._adding[rank] = None
        try:
            self._selection.choose_for(rank)
            self.replace(rank, is_there)
        except BaseException:
            self._selection.forget(rank)
            raise
        finally:
            self._adding.pop(rank, None)

    def abandon_coming(self) -> None:
        """Stop waiting for machines that `add` has rented, and end them at once. A request in flight goes on, because
        the id of its machine is not known; no other machine is requested after it. Does not wait. Repeat it.
        """
        for rank in list(self._adding):
            self._selection.try_no_other(rank)
            # taken out of the dictionary by one thread only: by this one, or by the one that has made it a node
            if self._adding.get(rank) is not None and (node := self._adding.pop(rank, None)) is not None:
                self._rental.transports.forget(node.instance)  # the thread that waits for the answer then ends

    def remove(self, rank: int, instance_id: str) -> None:
        """End the machine of a rank, if it still is this one, and put none in its place. Does not wait for its end."""
        with self._nodes.settings_lock:
            node = self._nodes.all.get(rank)
            is_it = node is not None and node.instance.id == instance_id and self._nodes.drop(rank, node)
        if node is not None and is_it:
            self._selection.forget(rank)
            self._rental.end_in_thread(node)

    def stand_by(self, rank: int) -> None:
        """Prepare a machine that the next `replace` of this rank will take; nothing to do if there is one. Raises what
        `acquire` raises, PoolClosed.

        It waits for its settings, and ends if none come (`supervisor.SETTINGS_DEADLINE_SECONDS`). Then `replace` fails,
        and rents another one the next time.
        """
        if rank in self._standing_by:
            return
        deadline = time.monotonic() + self._spec.provision_timeout
        node = self._rent_instead(rank, None)
        try:
            looked = time.monotonic()
            while node.phase != LAST_PHASE:
                node.follow()
                self._rental.go_on_until(deadline, f"the machine that stands by for node {rank} was not ready in time")
                if time.monotonic() - looked > LOOK_SECONDS:
                    looked = time.monotonic()
                    self._nodes.raise_if_lost(node)
        except BaseException:
            self._rental.end(node)
            raise
        node.transport.opened()
        self._standing_by[rank] = node

    def dismiss(self, rank: int) -> None:
        """Terminate the machine that stands by for this rank, if there is one. Does not wait."""
        if (node := self._standing_by.pop(rank, None)) is not None:
            self._rental.end_in_thread(node)

    def retire(self, rank: int, instance_id: str) -> None:
        """Let a node end its workers, without a restart, if it still is this machine; `replace` terminates it.

        Calls that run there are lost. Raises what a `Transport` raises.
        """
        with self._nodes.settings_lock:
            node = self._nodes.all.get(rank)
            if node is not None and node.instance.id == instance_id:
                settings = replace(
                    self._nodes.settings(node, rank, self._nodes.scheduler), workers=(), generation=RETIRED
                )
                node.transport.write("settings.json", settings.to_json())

    def _rent_instead(self, rank: int, termination: Termination | None) -> Preparation:
        """Rent a machine and start its preparation."""
        node = self._nodes.preparation_of(self._selection.rent_one(rank, termination), rank)
        if rank in self._adding:
            self._adding[rank] = node
        try:
            node.start(self._nodes.script(), self._spec.provision_timeout, self._spec.image.uploads)
        except BaseException:
            self._rental.end(node)
            raise
        return node

    def _go_on(self, rank: int, deadline: float, is_there: Callable[[], bool]) -> None:
        """Pause. Raises what `Rental.go_on_until` raises, unless the node has joined since the last look.

        A process that leaves a shared pool stops this wait. Without the second look it would terminate a node that
        other processes already use.
        """
        try:
            self._rental.go_on_until(deadline, f"node {rank} did not join the pool in time")
        except PoolClosed:
            if not is_there():
                raise

    def _raise_if_cut_off(self, node: Preparation) -> None:
        if not self._nodes.forwarding.is_on and not self._nodes.sees_the_head(node):
            raise node.failure(f"it cannot connect to the head at {self._nodes.scheduler}, and the other nodes do")

    def _raise_if_abandoned(self, rank: int) -> None:
        if self._adding.pop(rank, None) is None:
            raise PoolClosed("the pool is left as it is")

    def _raise_if_dropped(self, rank: int, node: Preparation) -> None:
        if self._nodes.all.get(rank) is not node:
            raise NodeLost(f"node {rank} could not get the address of the new head")


# Gives a pool another head when its head is lost.
#
#     lost ─┬─ a node that is left may be the head ─> it becomes the head ────────────────┬─> its scheduler listens
#           │                                                                             │   ─> all others get it
#           └─ none is left ─> machines are rented again, the first one becomes the head ─┘
#
# Nodes that do not get the address are terminated, and their ranks are vacant: `replacement` fills them. After a crash
# the pool's machines are found by tag.
#
# All of it runs under `Nodes.settings_lock`, which `restart` takes.


class HeadRestart:
    """Makes a node the head, or rents a new one, and sends its address to all nodes."""

    def __init__(self, spec: PoolSpec, rental: Rental, selection: Selection, nodes: Nodes) -> None:
        self._spec = spec
        self._rental = rental
        self._selection = selection
        self._nodes = nodes

    def restart(self, heirs: Collection[str], dead: Collection[str]) -> Lease:
        """Give the pool another head. Returns the new lease; ranks that it lacks are vacant.

        `heirs` are the ids of the nodes that may become the head. `dead` are the nodes whose processes have died while
        their machines answer (`lives`), possibly the head too: they are terminated. Without an heir, one machine is
        rented for each dead node, all at once. With `Local` and `Hosts` these are the same machines, because the
        terminations have freed them. Without heir and dead node one machine is rented for the head.
        """
        with self._nodes.settings_lock:  # a machine in preparation gets its settings later, with the new head
            return self._restart(frozenset(heirs), frozenset(dead))

    def _restart(self, heirs: frozenset[str], dead: frozenset[str]) -> Lease:
        nodes = self._nodes.all
        self._nodes.generation += 1
        lost = nodes.pop(0, None)
        fallen = [nodes.pop(rank) for rank, node in sorted(nodes.items()) if node.instance.id in dead]
        terminations = {
            node.rank: self._rental.end_in_thread(node) for node in ([] if lost is None else [lost]) + fallen
        }
        left = [rank for rank, node in sorted(nodes.items()) if node.instance.id in heirs]
        if left:
            return self._succeed(nodes.pop(left[0]))
        is_head_dead = lost is not None and lost.instance.id in dead
        ranks = [0] if is_head_dead or not fallen else []
        return self._begin_anew(
            [*ranks, *(node.rank for node in fallen)], terminations, is_end_awaited=bool(fallen) or is_head_dead
        )

    def _succeed(self, heir: Preparation) -> Lease:
        """Make a node that is left the head. If it does not come up, the caller may try another one."""
        self._nodes.all[0] = heir
        deadline = time.monotonic() + min(HEIR_SECONDS, self._spec.provision_timeout)
        checked_at = time.monotonic()

        def look() -> None:
            nonlocal checked_at
            self._rental.go_on_until(deadline, "the new head did not come up in time")
            self._nodes.raise_if_lost(heir)
            if time.monotonic() - checked_at > LIVES_AGAIN_SECONDS:
                if self._nodes.lives([0]).get(0) is False:
                    raise NodeLost("the processes of the node that was to be the new head have died")
                checked_at = time.monotonic()

        self._choose_ports()
        self._nodes.connect()
        self._go_on_under(heir, look, deadline)
        return self._nodes.lease

    def _begin_anew(
        self, ranks: Sequence[int], terminations: Mapping[int, Termination], *, is_end_awaited: bool
    ) -> Lease:
        """Rent machines for these ranks, make the first of them the head, and prepare all at the same time.

        Ranks whose node fails are vacant.
        """
        provider = self._rental.provider
        deadline = time.monotonic() + self._spec.provision_timeout
        if is_end_awaited and (provider.is_local or provider.terminate_confirms):  # then the machines are free
            until = time.monotonic() + END_FIRST_SECONDS
            for termination in terminations.values():
                termination.over.wait(max(0.0, until - time.monotonic()))
        nodes = [
            self._nodes.preparation_of(instance, instance.rank)
            for instance in self._selection.rent_again(ranks, terminations)
        ]
        self._nodes.all |= {node.rank: node for node in nodes}
        head = self._nodes.all[0] = self._nodes.all.pop(nodes[0].rank)
        self._choose_ports()
        threads = Threads("skyward-anew")
        begun = [
            (node, threads.submit(node.start, self._nodes.script(), self._spec.provision_timeout)) for node in nodes
        ]

        def look() -> None:
            self._rental.go_on_until(deadline, "the new head did not come up in time")
            self._nodes.raise_if_lost(head)

        (_, head_begun), *others = begun
        while not head_begun.done():
            self._rental.go_on_until(deadline, "the new head could not begin in time")
        head_begun.result()
        if self._nodes.forwarding.is_on:
            self._drop_unless_begun(others, deadline)
        self._nodes.connect()
        self._go_on_under(head, look, deadline, lambda: self._drop_unless_begun(others, deadline))
        return self._nodes.lease

    def _choose_ports(self) -> None:
        if self._nodes.forwarding.is_on:
            self._nodes.forwarding.choose()

    def _drop_unless_begun(self, begun: Sequence[tuple[Preparation, Future[None]]], deadline: float) -> None:
        """Terminate the nodes that could not begin, or have not begun by now."""
        until = min(deadline, time.monotonic() + BEGIN_SECONDS)
        for node, future in begun:
            while not future.done() and time.monotonic() < until:
                self._rental.go_on_until(deadline, "the nodes did not begin in time")
            if (not future.done() or future.exception() is not None) and self._nodes.drop(node.rank, node):
                _log.warning(
                    "node %d could not be started again, and is replaced: %s",
                    node.rank,
                    future.exception() if future.done() else "it takes too long",
                )
                self._rental.end_in_thread(node)

    def _go_on_under(
        self,
        head: Preparation,
        look: Callable[[], None],
        deadline: float,
        before_others: Callable[[], None] = lambda: None,
    ) -> None:
        """Make a node the head, wait for its scheduler, and send the scheduler's address to all other nodes."""
        head.send_settings(self._nodes.settings(head, 0, None))
        self._nodes.scheduler = await_scheduler(head, [head], look, deadline)
        head.transport.opened()
        before_others()
        others = [(rank, node) for rank, node in list(self._nodes.all.items()) if rank]
        side_by_side(lambda ranked: self._send_or_drop(*ranked), others, "skyward-nodes", ALL_AT_ONCE)

    def _send_or_drop(self, rank: int, node: Preparation) -> None:
        has_settings = not self._rental.provider.is_local or self._nodes.is_connected(rank)
        try:
            if has_settings:
                node.send_settings(self._nodes.settings(node, rank, self._nodes.scheduler))
                node.transport.opened()
        except (Unreachable, CommandFailed, OSError):
            has_settings = False
        if not has_settings and self._nodes.drop(rank, node):  # lost as well
            self._rental.end(node)
