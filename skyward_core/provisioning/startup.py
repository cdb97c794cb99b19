"""Makes nodes of the machines of a pool that opens: prepares all at once, checks them, and waits for the head's
scheduler.

    started -> the head gets its settings -> its scheduler listens -> the other nodes get its address -> opened

`Startup` owns the list of machines that do not answer. Only the thread that opens the pool uses it. It ends the threads
that it starts.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Sequence
from concurrent.futures import Future, ThreadPoolExecutor

from skyward_core.errors import CommandFailed, ConnectionLost, PoolClosed, SkywardError, Unreachable
from skyward_core.provisioning.bootstrap import Preparation, await_scheduler, raise_if_gone
from skyward_core.provisioning.image_capture import is_to_be_kept, start_and_keep
from skyward_core.provisioning.nodes import Nodes
from skyward_core.provisioning.rental import Rental
from skyward_core.spec import PoolSpec

PORT_TRIES = 5
ASK_SECONDS = 5.0


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

        Over SSH the provider is queried only for machines that do not answer, and at most every ASK_SECONDS, because
        a listing may take seconds.
        """
        silent = list(nodes)
        is_here = self._rental.provider.is_here
        if not is_here:
            silent = [node for node in nodes if not node.transport.is_connected]
            self._silent = {node.instance.id: self._silent.get(node.instance.id, time.monotonic()) for node in silent}
            lease_over = {
                machine
                for machine, since in self._silent.items()
                if time.monotonic() - since > self._spec.lease_seconds
            }
            raise_if_gone(silent, lease_over)  # its guard has ended it, or its host is off
            if not silent or time.monotonic() < max(self._listed_at, self._rental.answered_at) + ASK_SECONDS:
                return
            self._listed_at = time.monotonic()
        try:
            living = self._rental.living()
        except Exception:
            if is_here:
                raise
            return  # an outage proves nothing
        missing = {node.instance.id for node in silent} - living
        # a cloud may list a new machine some seconds late
        gone, self._missed = missing if is_here else missing & self._missed, missing
        raise_if_gone(silent, gone)

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
