"""Ports of nodes that cannot reach each other, forwarded through this client."""

from types import SimpleNamespace
from typing import Any

from skyward_core.provisioning.nodes import PORTS, PortForwarding

HEAD_PORT = 8786


class Forwarded:
    """A node that records which of its ports lead to which ports of this client."""

    def __init__(self, rank: int) -> None:
        self.rank = rank
        self.instance = SimpleNamespace(id=f"i-{rank}")
        self.transport = self
        self.ways: list[tuple[int, int]] = []

    def address(self, address: str) -> str:
        """Return where this client reaches a port of the node."""
        scheme, _, port = address.rpartition(":")
        assert scheme == "tls://127.0.0.1"
        return f"tls://127.0.0.1:{here(self.rank, int(port))}"

    def lead(self, port: int, local: int) -> None:
        self.ways.append((port, local))


def here(rank: int, port: int) -> int:
    return 30_000 + port % 10_000 + 10_000 * rank


def forwarding_of(nodes: int, workers: int = 1) -> PortForwarding:
    spec: Any = SimpleNamespace(most_nodes=nodes, workers_per_node=workers)
    return PortForwarding(spec)


def nodes_of(*ranks: int) -> dict[int, Any]:
    return {rank: Forwarded(rank) for rank in ranks}


def test_every_node_reaches_the_ports_of_all_others() -> None:
    """Each rank has its own for a scheduler and each worker. And that of the head, through a port of this client."""
    forwarding, nodes = forwarding_of(3, workers=2), nodes_of(0, 1, 2)
    forwarding.choose()
    ports = [forwarding.ports_of(rank) for rank in range(3)]
    assert [len(each) for each in ports] == [3, 3, 3]
    assert len({port for each in ports for port in each} & {*PORTS}) == 9
    assert (forwarding.is_on, forwarding.ports_of(3)) == (True, ())
    forwarding.connect(nodes, HEAD_PORT)
    for rank, node in nodes.items():
        expected = [(port, here(other, port)) for other in range(3) if other != rank for port in ports[other]]
        assert sorted(node.ways) == sorted(expected + ([(HEAD_PORT, here(0, HEAD_PORT))] if rank else []))


def test_ports_are_forwarded_once() -> None:
    """A second time only those of a replaced node are, and all of them to the replacement; a vacant rank has none."""
    forwarding, nodes = forwarding_of(3), nodes_of(0, 1)
    forwarding.choose()
    forwarding.connect(nodes, HEAD_PORT)
    assert len(nodes[0].ways) == 2
    for node in nodes.values():
        node.ways.clear()
    forwarding.connect(nodes, HEAD_PORT)
    assert [node.ways for node in nodes.values()] == [[], []]
    forwarding.choose_for(2)
    nodes[2] = Forwarded(2)
    forwarding.connect(nodes, HEAD_PORT)
    assert [port for port, _ in nodes[0].ways] == [port for port, _ in nodes[1].ways] == list(forwarding.ports_of(2))
    assert len(nodes[2].ways) == 5
