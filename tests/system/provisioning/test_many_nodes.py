"""Operations on many nodes run on all nodes at the same time, not one after the other.

Each node blocks in an operation until all nodes have begun it. A sequential client would stop at the first node.
"""

from __future__ import annotations

import asyncio
import os
from collections import Counter, defaultdict
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack
from pathlib import Path
from typing import ClassVar

import asyncssh
import pytest
from pydantic import PrivateAttr

import skyward_core as sky
from skyward_core.engine.certificates import make_certificate
from skyward_core.machines.instances import Endpoint, Instance, Lease
from skyward_core.machines.offers import Offer
from skyward_core.wire.settings import NodeSettings
from tests.fake_nodes import FakeNode, FakeNodes, Played
from tests.fakes import FakeProvider
from tests.unit.provisioning.test_lifecycle import Opened, Pool, opened  # noqa: F401 - a fixture
from tests.waiting import wait_until

NODES = 16
PATIENCE_SECONDS = 120.0
"""How long a node waits for the others. Only a failed wait takes as long."""


class Together:
    """A barrier for nodes: an operation goes on only when a number of nodes have begun it."""

    def __init__(self, nodes: Callable[[], FakeNodes]) -> None:
        self._nodes = nodes
        self._wanted: dict[str, int] = {}
        self._met: set[str] = set()
        self._alone: list[str] = []
        self._excused = ""
        self._there: defaultdict[str, set[str]] = defaultdict(set)
        self._all_there: defaultdict[str, asyncio.Event] = defaultdict(asyncio.Event)

    def expect(self, *what: str, excused: str = "", **others: int) -> None:
        """Let nodes wait for all others in these operations. `others` are those with their own numbers of nodes, where
        the node `excused` does not wait.
        """
        self._wanted = dict.fromkeys(what, NODES) | {name.replace("_", " "): count for name, count in others.items()}
        self._met, self._excused = set(), excused
        self._there.clear()
        self._all_there.clear()

    def is_as_expected(self) -> None:
        """Fail if a node has waited in vain, or if not all have done what was expected."""
        assert self._alone == []
        assert self._met == self._wanted.keys()
        assert self._nodes().unknown == []

    async def __call__(self, what: str, node: FakeNode) -> None:
        """Wait for the other nodes if this operation is one of those that wait."""
        what = what.removesuffix(".json")
        wanted = self._wanted.get(what)
        if wanted is None or what in self._met or (node.id == self._excused and wanted < NODES):
            return
        self._there[what].add(node.id)
        if len(self._there[what]) == wanted:
            self._met.add(what)
            self._all_there[what].set()
        try:
            await asyncio.wait_for(self._all_there[what].wait(), PATIENCE_SECONDS)
        except TimeoutError:
            self._alone.append(f"{node.id}, asked to {what}, with {len(self._there[what])} of {wanted}")
            self._all_there[what].set()  # one failed wait is enough


class Cloud(FakeProvider):
    """A cloud of fake nodes in this process."""

    name: ClassVar[str] = "many"
    is_local: ClassVar[bool] = False
    key: str
    host_key: str
    host_key_text: str
    login: str
    _nodes: FakeNodes = PrivateAttr()

    def launch(self, offer: Offer, count: int, tags: Mapping[str, str], startup: str) -> list[Instance]:
        return [self._at_an_address(instance) for instance in super().launch(offer, count, tags, startup)]

    def terminate(self, ids: Sequence[str]) -> None:
        super().terminate(ids)
        for instance_id in ids:
            self._nodes.end(instance_id)

    def _at_an_address(self, instance: Instance) -> Instance:
        port = self._nodes.add(instance.id, "127.0.0.1", 0, self.host_key_text, self.login)
        endpoint = Endpoint(
            host="127.0.0.1", port=port, user="root", key=self.key, host_key=self.host_key, known_hosts=os.devnull
        )
        place = {"endpoint": endpoint, "directory": f"/root/.cache/skyward/instances/{instance.id}"}
        self.machines.running[instance.id] = there = instance.model_copy(update=place)
        return there

    def settings_of(self, instance_id: str) -> NodeSettings:
        """Return the latest settings that a node has received."""
        return NodeSettings.from_json(self._nodes.nodes[instance_id].files["settings.json"].decode())


type Rent = Callable[..., tuple[Pool, Together, Lease]]


@pytest.fixture
def rent(tmp_path: Path, opened: Opened) -> Iterator[Rent]:
    """Rent the machines of a pool. They are terminated at the end."""
    with ExitStack() as undo:

        def rent(played: Played, *what: str, **others: int) -> tuple[Pool, Together, Lease]:
            together = Together(lambda: nodes)
            nodes = FakeNodes(played, before=together)
            undo.callback(nodes.close)
            host_key, login = (asyncssh.generate_private_key("ssh-ed25519") for _ in range(2))
            login.write_private_key(tmp_path / "id")
            cloud = Cloud(
                folder=str(tmp_path),
                key=str(tmp_path / "id"),
                host_key=host_key.export_public_key().decode(),
                host_key_text=host_key.export_private_key().decode(),
                login=login.export_public_key().decode(),
            )
            cloud._nodes = nodes
            pool = opened(cloud, certificate=make_certificate("sky-1"), nodes=NODES, lease_seconds=3600)
            undo.callback(pool.machines.release)
            together.expect(*what, excused="fake-0", **others)
            with ExitStack() as opening:
                lease = pool.machines.acquire(opening)
                opening.pop_all()
            together.is_as_expected()
            return pool, together, lease

        yield rent


def test_all_nodes_are_prepared_and_replaced_at_the_same_time(rent: Rent) -> None:
    """Each step is in flight on all nodes before one node goes on.

    Then the processes of all nodes die. All are asked at the same time, and terminated. One launch rents as many
    machines, which get the same ranks.
    """
    steps = ("login", "look", "put uv", "put ship.tar.gz", "start")
    pool, together, before = rent(Played(has_uv=False), *steps, reach=NODES - 1, put_settings=NODES - 1)
    cloud = pool.provider
    assert [node.rank for node in before.nodes] == list(range(NODES))
    assert {cloud.settings_of(node.instance.id).scheduler for node in before.nodes} == {None, before.scheduler}
    phases = Counter(event.instance_id for event in pool.recorded.of(sky.BootstrapProgress))
    assert phases == {node.instance.id: 4 for node in before.nodes}

    together.expect("lives")
    for node in cloud._nodes.nodes.values():
        node.lives = False
    assert pool.machines.lives(range(NODES)) == dict.fromkeys(range(NODES), False)
    together.is_as_expected()
    together.expect("login", "look", "start", excused=f"fake-{NODES}", put_settings=NODES - 1)
    lease = pool.machines.restart([], {node.instance.id for node in before.nodes})
    together.is_as_expected()
    assert [(node.rank, node.instance.id) for node in lease.nodes] == [
        (rank, f"fake-{NODES + rank}") for rank in range(NODES)
    ]
    assert {cloud.settings_of(node.instance.id).scheduler for node in lease.nodes} == {None, lease.scheduler}
    assert [event.count for event in pool.recorded.of(sky.InstanceLaunching)] == [NODES, NODES]
    there = {node.instance.id for node in lease.nodes}
    wait_until(lambda: pool.meter.rented() == there, "the dead ones to be gone")


def test_forwarded_ports_are_opened_on_all_nodes_at_the_same_time(rent: Rent) -> None:
    """The nodes cannot reach each other. The first port is requested on all nodes before the second on any."""
    pool, _, lease = rent(Played(sees_others=False), "lead")
    nodes = pool.provider._nodes.nodes
    asked = {node.rank: nodes[node.instance.id].asked.count("lead") for node in lease.nodes}
    # two ports for each other node, and the head's rendezvous
    assert asked == {rank: 2 * (NODES - 1) + (rank > 0) for rank in range(NODES)}
