"""The nodes of a pool: which machine has which rank, where the scheduler is, and the settings of each node.

`Nodes` is the one shared value of a pool's machines. `Startup`, `Replacement` and `HeadRestart` change it:

    nodes, scheduler, generation, ports    while the pool opens by its thread alone; then under `settings_lock`
    removal of one rank                    by the thread that replaces this rank, without the lock (recovery has one
    such thread for each rank)

`settings_lock` is held while nodes get the address of the head, so that no node gets the address of a head that another
thread replaces. It is the only lock here and is not reentrant. Under it the locks of journal, budget and transport may
be taken, never in the other order.
"""

from __future__ import annotations

import contextlib
import random
import threading
from collections.abc import Collection, Mapping, Sequence
from concurrent.futures import Future
from datetime import UTC, datetime
from typing import TYPE_CHECKING
from urllib.parse import urlsplit

from skyward_core.concurrency.threads import side_by_side
from skyward_core.errors import BadRequest, CommandFailed, NodeLost, SkywardError, Unreachable
from skyward_core.machines.instances import Instance, Lease, Node
from skyward_core.provisioning.bootstrap import Preparation, Role, node_script, settings_of
from skyward_core.provisioning.rental import Emit, Rental
from skyward_core.spec import PoolSpec
from skyward_core.transport.transport import LocalTransport, Transport
from skyward_core.wire.checks import Unreadable
from skyward_core.wire.info import Notice
from skyward_core.wire.masking import Mask
from skyward_core.wire.settings import NodeSettings, SeenSettings
from skyward_core.worker.node_clocks import MISSED

if TYPE_CHECKING:
    from skyward_core.engine.certificates import PoolCertificate

LIVES_SECONDS = 4.0  # the longest wait for the answer whether a node's supervisor lives
PORTS = range(20_000, 30_000)  # below Linux's ephemeral ports, ip(7)
ALL_AT_ONCE = 1000  # each node takes some round trips, and no processor


class Nodes:
    """The nodes by rank, requests to them, and their settings."""

    def __init__(
        self, spec: PoolSpec, pool_id: str, rental: Rental, certificate: Future[PoolCertificate], emit: Emit
    ) -> None:
        self._spec = spec
        self._pool_id = pool_id
        self._rental = rental
        self._certificate = certificate
        self._emit = emit
        env = {**spec.image.env, **(spec.env or {})}
        self._mask = Mask(env[name] for name in spec.plain_secrets)
        self.settings_lock = threading.Lock()
        self.all: dict[int, Preparation] = {}
        """The present nodes, by rank."""
        self.scheduler = ""
        """The scheduler's address, in the network of the nodes."""
        self.generation = 0
        """The number of the head: it grows when all nodes get new settings because of a new head."""
        self.head_port = 0
        self.forwarding = PortForwarding(spec)
        self.created_at = datetime.now(UTC)

    def adopt(self, lease: Lease) -> None:
        """Go on with the nodes of a lease, which another process has prepared.

        Raises BadRequest if their connections go through that process, and NodeLost if no node answers.
        """
        transports = [(node, self._rental.transports.to(node.instance)) for node in lease.nodes]
        settings = _first_settings([transport for _, transport in transports])
        if settings.scheduler_port:
            raise BadRequest("the nodes cannot reach each other, and were connected through the process that is gone")
        self.generation, self.head_port = settings.generation, settings.head_port
        self.scheduler, self.created_at = lease.scheduler, lease.created_at
        self.all = {
            node.rank: Preparation.adopted(transport, node.rank, self.generation, self._emit)
            for node, transport in transports
        }

    def drop(self, rank: int, node: Preparation) -> bool:
        """Count a node as lost. Return False if it does not have this rank any more.

        A replacement and a restart may both find the loss; one of them gets True.
        """
        if self.all.get(rank) is not node:
            return False
        return self.all.pop(rank, None) is not None

    # ── the lease and the scheduler ──────────────────────────────────────────────────────────────────────────────────

    @property
    def lease(self) -> Lease:
        """The written claim on the machines that there are now."""
        nodes = tuple(
            Node(instance=node.instance, rank=rank, workers=self._spec.workers_per_node, slots=self._spec.concurrency)
            for rank, node in sorted(self.all.items())
        )
        taken = self._rental.spec.first_accelerator if self._spec.alternatives else None
        return Lease(
            pool_id=self._pool_id,
            provider=self._rental.provider.to_json(),
            accelerator=None if taken is None else taken.to_json(),
            nodes=nodes,
            scheduler=self.scheduler,
            created_at=self.created_at,
        )

    @property
    def head(self) -> Preparation:
        """The node with the scheduler. Raises NodeLost while there is none: it was lost, and another is not ready."""
        if (head := self.all.get(0)) is None:
            raise NodeLost("the pool has no head now: it was lost, and another one is not ready")
        return head

    @property
    def scheduler_from_here(self) -> str:
        """The address of the scheduler for this client. Raises NodeLost as `head`."""
        return self.head.transport.address(self.scheduler)

    def extend_leases(self, seconds: float) -> None:
        """Let all nodes live for so many seconds from now.

        Raises Unreachable if one does not answer, BadRequest if they need this client.
        """
        if self.forwarding.is_on:
            raise BadRequest(
                "the nodes cannot reach each other, and are connected through this client: the pool cannot be detached"
            )
        side_by_side(
            lambda node: node.transport.extend_lease(seconds), list(self.all.values()), "skyward-nodes", ALL_AT_ONCE
        )

    # ── settings of a node ──────────────────────────────────────────────────────────────────────────────────────────

    def preparation_of(self, instance: Instance, rank: int) -> Preparation:
        """Return the preparation of a machine. The machine has no rank in the pool yet."""
        return Preparation(self._rental.transports.to(instance), rank, self._emit, self._mask)

    def script(self) -> str:
        """Return the script that makes a node of a machine."""
        return "" if self._rental.provider.is_local else node_script(self._rental.spec)

    def settings(self, node: Preparation, rank: int, scheduler: str | None) -> NodeSettings:
        """Return the settings of a node; without a scheduler it is the head. Raises NodeLost as `head`."""
        forwarding = self.forwarding
        host = "127.0.0.1" if forwarding.is_on else node.instance.private_ip or "127.0.0.1"
        head_host = "127.0.0.1" if forwarding.is_on else self.head.instance.private_ip or "127.0.0.1"
        role = Role(rank, self.generation, host, head_host, self.head_port, scheduler, forwarding.ports_of(rank))
        certificate = self._certificate.result()
        if isinstance(node.transport, LocalTransport):
            # Writes for how long the node is paid: a node of this machine gets that in no other way. A new node of a
            # shared pool needs a lease too: its process may leave before the next renewal.
            node.transport.keep_alive()
        accelerator, lifetime = self._rental.accelerator_of(node.instance.id), self._spec.max_lifetime
        is_simulated = self._rental.provider.simulates
        return settings_of(
            node.transport,
            role,
            self._rental.spec,
            certificate,
            accelerator,
            lifetime,
            self.notice_url(node),
            is_simulated=is_simulated,
        )

    def connect(self) -> None:
        """Forward ports between the nodes if they cannot reach each other."""
        self.forwarding.connect(self.all, self.head_port)

    # ── requests to a node ───────────────────────────────────────────────────────────────────────────────────────────

    def sees_the_head(self, node: Preparation) -> bool:
        """Return whether a node can reach the scheduler. Raises BootstrapFailed if it does not answer."""
        parts = urlsplit(self.scheduler)
        try:
            return node.transport.can_reach(str(parts.hostname), parts.port or 0)
        except (Unreachable, CommandFailed) as error:
            raise node.failure(f"it does not answer any more: {error}") from error

    def last_words(self, rank: int) -> str:
        """Return the last message of a node's supervisor or guard; "" if there is none."""
        node = self.all.get(rank)
        if node is None:
            return ""
        try:
            node.follow()
        except SkywardError:
            pass  # it has failed, and that is what is reported
        return node.last_words

    def has_ended(self, rank: int) -> bool:
        """Return whether a node has reported its end, or does not exist."""
        node = self.all.get(rank)
        if node is None:
            return True
        try:
            node.follow()
        except SkywardError:
            return True
        return node.has_ended

    def is_connected(self, rank: int) -> bool:
        """Return whether a node answers this client, as far as is known."""
        node = self.all.get(rank)
        if node is None or not node.transport.is_connected:
            return False
        return not self._rental.provider.is_local or node.instance.id in self._rental.living()

    def lives(self, ranks: Collection[int]) -> dict[int, bool]:
        """Ask these nodes, all at once, whether their supervisors live. Takes LIVES_SECONDS at most.

        False: the machine answers, and its supervisor has died. A node that does not answer is not in the result.
        """

        def ask_one(ranked: tuple[int, Preparation]) -> tuple[int, bool | None]:
            rank, node = ranked
            try:
                return rank, node.transport.lives(LIVES_SECONDS)
            except (SkywardError, OSError):
                return rank, None

        nodes = [(rank, node) for rank in ranks if (node := self.all.get(rank)) is not None]
        return {
            rank: lives
            for rank, lives in side_by_side(ask_one, nodes, "skyward-lives", ALL_AT_ONCE)
            if lives is not None
        }

    def restart_workers(self, rank: int, workers: Sequence[int]) -> None:
        """Have a node kill and restart these of its workers, which have left the pool although the node lives.

        Raises what a `Transport` raises.
        """
        node = self.all.get(rank)
        if node is not None:
            node.transport.write(MISSED, " ".join(map(str, workers)))

    def notices(self, rank: int) -> tuple[Notice, ...]:
        """Return the notices of a node's machine that the provider takes back."""
        node = self.all.get(rank)
        if node is None or not self.notice_url(node):
            return ()
        with contextlib.suppress(SkywardError):  # it has failed, which is noticed elsewhere
            node.follow()
        return node.notices

    def notice_url(self, node: Preparation) -> str:
        """Return the URL at which a machine learns that it is taken back; "" if there is none."""
        return self._rental.provider.notice_url if node.instance.is_spot else ""

    def raise_if_lost(self, node: Preparation) -> None:
        """Raise BootstrapFailed if a machine is gone. An outage of the provider proves nothing.

        Over SSH the provider is queried only if the machine does not answer.
        """
        if node.transport.is_connected and not self._rental.provider.is_local:
            return
        try:
            is_gone = node.instance.id not in self._rental.living()
        except Exception:
            return
        if is_gone:
            raise node.failure("its machine is gone")


def _first_settings(transports: Sequence[Transport]) -> SeenSettings:
    """Return the settings of the first node that answers: the head may be lost. Raises NodeLost if none does."""
    for transport in transports:
        with contextlib.suppress(SkywardError, OSError, Unreadable):
            return SeenSettings.of(transport.read("settings.json"))
    raise NodeLost("no node of the pool answers")


# Ports of nodes that cannot reach each other: each node listens on loopback, and this client forwards the ports
# between them.
#
# `PortForwarding` owns the ports. Its callers change them while they hold `Nodes.settings_lock`, or while the pool
# opens.


class PortForwarding:
    """The ports of each rank: one for a scheduler, one for each of its workers. Off until ports are chosen."""

    def __init__(self, spec: PoolSpec) -> None:
        self._nodes = spec.most_nodes
        self._each = 1 + spec.workers_per_node
        self._ports: dict[int, tuple[int, ...]] = {}
        self._forwarded: set[tuple[str, int]] = set()
        """Machines and their ports that are forwarded to another node already."""

    @property
    def is_on(self) -> bool:
        """Whether the nodes are connected through this client."""
        return bool(self._ports)

    def ports_of(self, rank: int) -> tuple[int, ...]:
        """Return the ports of a rank; none while this is off."""
        return self._ports.get(rank, ())

    def choose(self) -> None:
        """Choose new ports for all ranks."""
        numbers = random.sample(PORTS, self._each * self._nodes)
        self._ports = {rank: tuple(numbers[rank * self._each : (rank + 1) * self._each]) for rank in range(self._nodes)}
        self._forwarded = set()

    def choose_for(self, rank: int) -> None:
        """Choose new ports for one rank; nothing to do while this is off."""
        if self._ports:
            self._ports[rank] = tuple(random.sample(PORTS, self._each))

    def connect(self, nodes: Mapping[int, Preparation], head_port: int) -> None:
        """Forward the ports of each node to it from all the others; nothing to do while this is off."""
        nodes = dict(nodes)  # a replacement may fail meanwhile, and drop its node
        wanted = [(nodes[rank], port) for rank, ports in self._ports.items() if rank in nodes for port in ports]
        if self._ports:
            wanted.append((nodes[0], head_port))
        forwards = [
            (target, port, urlsplit(target.transport.address(f"tls://127.0.0.1:{port}")).port or 0)
            for target, port in wanted
        ]

        def forward(node: Preparation) -> None:
            for target, port, local in forwards:
                if node is not target and (node.instance.id, port) not in self._forwarded:
                    node.transport.lead(port, local)
                    self._forwarded.add((node.instance.id, port))

        side_by_side(forward, list(nodes.values()), "skyward-nodes", ALL_AT_ONCE)
