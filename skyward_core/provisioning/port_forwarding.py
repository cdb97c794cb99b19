"""Ports of nodes that cannot reach each other: each node listens on loopback, and this client forwards the ports
between them.

`PortForwarding` owns the ports. Its callers change them while they hold `Nodes.settings_lock`, or while the pool opens.
"""

from __future__ import annotations

import random
from collections.abc import Mapping
from urllib.parse import urlsplit

from skyward_core.concurrency.threads import side_by_side
from skyward_core.provisioning.bootstrap import Preparation
from skyward_core.spec import PoolSpec

PORTS = range(20_000, 30_000)  # below Linux's ephemeral ports, ip(7)
ALL_AT_ONCE = 1000  # each node takes some round trips, and no processor


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
        ways = [
            (target, port, urlsplit(target.transport.address(f"tls://127.0.0.1:{port}")).port or 0)
            for target, port in wanted
        ]

        def forward(node: Preparation) -> None:
            for target, port, local in ways:
                if node is not target and (node.instance.id, port) not in self._forwarded:
                    node.transport.lead(port, local)
                    self._forwarded.add((node.instance.id, port))

        side_by_side(forward, list(nodes.values()), "skyward-nodes", ALL_AT_ONCE)
