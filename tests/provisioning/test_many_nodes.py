"""Many nodes are made, told and led at once, and not one after the other.

Each node waits with what it is asked until all of them have been asked the same: whoever goes from one to the next
comes no further than the first. No clock tells it. How long 64 take is for `benchmarks/clouds.py`.
"""

from __future__ import annotations

import asyncio
import gzip
import os
import platform
import subprocess
import threading
from collections import Counter, defaultdict
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import ExitStack
from pathlib import Path
from typing import Any, ClassVar

import asyncssh
import pytest
import uv
from pydantic import PrivateAttr

import skyward_core as sky
from skyward_core.engine.certificates import make_certificate
from skyward_core.errors import CommandFailed, CommandTimedOut
from skyward_core.ledger.budgets import SpendingLimit
from skyward_core.ledger.journal import Journal
from skyward_core.ledger.ledger import Ledger
from skyward_core.ledger.metering import Meter
from skyward_core.machines.instances import Endpoint, Instance
from skyward_core.machines.offers import Offer
from skyward_core.provisioning import head_restart, lifecycle
from skyward_core.transport import code_upload, ssh_transport
from skyward_core.worker.settings import NodeSettings
from tests.conftest import Told, wait_until
from tests.fake_nodes import Before, FakeNode, FakeNodes, Played
from tests.fakes import FakeProvider

NODES = 16
PATIENCE_SECONDS = 15.0
"""How long a node waits for the others; only one that waits in vain waits so long."""

pytestmark = pytest.mark.slow
CERTIFICATE = make_certificate("sky-many")


class Together:
    """Lets nodes do something only when so many of them have been asked for it.

    `alone` tells of those that waited for others in vain.
    """

    def __init__(self) -> None:
        self.wanted: dict[str, int] = {}
        self.met: set[str] = set()
        self.alone: list[str] = []
        self._excused = ""
        self._there: defaultdict[str, set[str]] = defaultdict(set)
        self._all_there: defaultdict[str, asyncio.Event] = defaultdict(asyncio.Event)

    def begin(self, wanted: dict[str, int], excused: str) -> None:
        """Wait for these from now on."""
        self.met, self._excused = set(), excused
        self._there.clear()
        self._all_there.clear()
        self.wanted = wanted

    async def __call__(self, what: str, node: FakeNode) -> None:
        """Wait for the others, if this is something that all are asked for."""
        what = "put settings" if what == "put settings.json" else what
        wanted = self.wanted.get(what)
        if wanted is None or what in self.met or (node.id == self._excused and wanted < NODES):
            return
        self._there[what].add(node.id)
        if len(self._there[what]) == wanted:
            self.met.add(what)
            self._all_there[what].set()
        try:
            await asyncio.wait_for(self._all_there[what].wait(), PATIENCE_SECONDS)
        except TimeoutError:
            self.alone.append(f"{node.id}, asked to {what}, with {len(self._there[what])} of {wanted}")
            self._all_there[what].set()  # one wait in vain is enough


class Cloud(FakeProvider):
    """Rents out fake nodes of this process."""

    name: ClassVar[str] = "many"
    is_here: ClassVar[bool] = False
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
        there = instance.model_copy(
            update={"endpoint": endpoint, "directory": f"/root/.cache/skyward/instances/{instance.id}"}
        )
        self.machines.running[instance.id] = there
        return there


class Many:
    """The machines of a pool of NODES nodes, and what they wait for."""

    def __init__(
        self, nodes: FakeNodes, together: Together, machines: lifecycle.PoolMachines, meter: Meter, told: Told
    ) -> None:
        self.nodes = nodes
        self.together = together
        self.machines = machines
        self.meter = meter
        self.told = told

    def expect(self, *what: str, excused: str = "", **others: int) -> None:
        """From now on nodes wait for each other with these, all of them but one that may be excused; `others` are asked
        of fewer.
        """
        self.together.begin(
            dict.fromkeys(what, NODES) | {name.replace("_", " "): count for name, count in others.items()}, excused
        )

    def told_of(self, instance_id: str) -> NodeSettings:
        """Return what a node was told last."""
        return NodeSettings.from_json(self.nodes.nodes[instance_id].files["settings.json"].decode())


type Rent = Callable[..., Many]


@pytest.fixture
def rent(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Rent]:
    """Make the machines of a pool, which are not rented yet; they are given back at the end."""
    monkeypatch.setattr(ssh_transport, "LONGEST_RENEWAL_SECONDS", 600.0)  # only the test renews leases
    with ExitStack() as undo:

        def rent(
            played: Played = Played(has_uv=False), before: Before | None = None, nodes_wanted: int = NODES
        ) -> Many:
            together, told = Together(), Told()
            nodes = FakeNodes(played, before=before or together)
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
            certificate = Future[Any]()
            certificate.set_result(CERTIFICATE)
            spec, meter = sky.PoolSpec.of(nodes=nodes_wanted, lease_seconds=3600), Meter()
            ledger = undo.enter_context(Ledger(f"sqlite:///{tmp_path / 'ledger.db'}"))
            book = Journal(ledger, "sky-many", spec, cloud, meter, told)
            book.open()
            machines = lifecycle.PoolMachines(
                spec,
                [cloud],
                "sky-many",
                certificate,
                emit=told,
                meter=meter,
                book=book,
                purse=SpendingLimit("sky-many", meter),
            )
            undo.callback(machines.release)
            return Many(nodes, together, machines, meter, told)

        yield rent


# ── up ───────────────────────────────────────────────────────────────────────────────────────────────────────────────


def test_nodes_are_reached_prepared_and_told_all_at_once(rent: Rent) -> None:
    """Login, a look around, both uploads, the start, the way to the head, the settings: each of these is outstanding on
    all nodes before one goes on.
    """
    many = rent()
    many.expect(
        "login",
        "look",
        "put uv",
        "put ship.tar.gz",
        "start",
        excused="fake-0",
        transport=NODES - 1,
        put_settings=NODES - 1,
    )
    with ExitStack() as undo:
        lease = many.machines.acquire(undo)
        undo.pop_all()
    assert many.together.alone == []
    assert many.together.met == many.together.wanted.keys()
    assert many.nodes.unknown == []
    assert [node.rank for node in lease.nodes] == list(range(NODES))
    assert {many.told_of(node.instance.id).scheduler for node in lease.nodes} == {None, lease.scheduler}
    phases = Counter(event.instance_id for event in many.told.of(sky.BootstrapProgress))
    assert phases == {node.instance.id: 4 for node in lease.nodes}


def test_nodes_that_do_not_see_each_other_are_led_all_at_once(rent: Rent) -> None:
    """The first of the ports that lead to the others is asked for on all nodes before the second one on any."""
    many = rent(Played(sees_others=False))
    many.expect("lead")
    with ExitStack() as undo:
        lease = many.machines.acquire(undo)
        undo.pop_all()
    assert many.together.alone == []
    assert many.together.met == {"lead"}
    asked = {node.instance.id: many.nodes.nodes[node.instance.id].asked.count("lead") for node in lease.nodes}
    # two ports for each other node, the head's rendezvous
    assert asked == {node.instance.id: 2 * (NODES - 1) + (node.rank > 0) for node in lease.nodes}


def test_an_sshd_that_forwards_no_ports_is_named_before_anything_is_sent(rent: Rent) -> None:
    """A pool reaches its nodes through forwarded ports only: it would prepare them for nothing, and then wait."""
    asked = set[str]()

    async def note(what: str, node: FakeNode) -> None:
        asked.add(what)

    many = rent(Played(forwards_ports=False), before=note, nodes_wanted=1)
    with ExitStack() as undo, pytest.raises(sky.SkywardError, match="AllowTcpForwarding no"):
        many.machines.acquire(undo)
    assert "login" in asked
    assert not asked & {"put uv", "put ship.tar.gz", "start"}


def test_slow_nodes_have_as_long_as_the_pool_to_open_and_are_asked_for_a_sign_of_life_once(
    rent: Rent, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A node that needs longer for each command than an open pool's may take is opened all the same, and its lease is
    extended; an open pool has its limit.

    Sleeps: the nodes have to be slow.
    """
    monkeypatch.setattr(ssh_transport, "COMMAND_SECONDS", 0.05)
    seconds = [0.3]
    many = rent(before=lambda what, node: asyncio.sleep(seconds[0] if what not in {"kill", "follow"} else 0))
    with ExitStack() as undo:
        lease = many.machines.acquire(undo)
        undo.pop_all()
    assert len(lease.nodes) == NODES
    assert {node.id: node.asked.count("lease") for node in many.nodes.nodes.values()} == dict.fromkeys(
        many.nodes.nodes, 1
    )
    assert many.told.of(sky.ContactLost) == []
    seconds[0] = PATIENCE_SECONDS
    with pytest.raises(CommandTimedOut):
        many.machines.restart_workers(1, [0])


# ── afterwards ───────────────────────────────────────────────────────────────────────────────────────────────────────


def test_leases_are_extended_and_a_new_head_is_told_of_all_at_once(rent: Rent) -> None:
    """So a pool is let go of in a moment, and goes on soon after it has lost its head."""
    many = rent()
    with ExitStack() as undo:
        many.machines.acquire(undo)
        undo.pop_all()
    many.expect("lease")
    many.machines.extend_leases(7200.0)
    many.expect(excused="fake-1", put_settings=NODES - 2)
    lease = many.machines.restart([node.instance.id for node in many.machines.lease.nodes], [])
    assert many.together.alone == []
    assert many.together.met == {"put settings"}
    assert [node.instance.id for node in lease.nodes] == [f"fake-{number}" for number in range(1, NODES)]
    told = [many.told_of(node.instance.id) for node in lease.nodes]
    assert [(settings.generation, settings.scheduler) for settings in told] == [(1, None)] + [(1, lease.scheduler)] * (
        NODES - 2
    )


def test_a_node_that_cannot_be_told_of_a_new_head_is_given_back_and_the_others_go_on(
    rent: Rent, monkeypatch: pytest.MonkeyPatch
) -> None:
    """However many are told at the same time."""
    many = rent()
    with ExitStack() as undo:
        many.machines.acquire(undo)
        undo.pop_all()
    monkeypatch.setattr(ssh_transport, "PATIENCE_SECONDS", 0.1)
    lost = ["fake-3", "fake-7"]
    for instance_id in lost:
        many.nodes.end(instance_id)
    lease = many.machines.restart([node.instance.id for node in many.machines.lease.nodes], [])
    assert [node.instance.id for node in lease.nodes] == [
        f"fake-{number}" for number in range(1, NODES) if f"fake-{number}" not in lost
    ]
    assert {event.instance_id for event in many.told.of(sky.InstanceStopping)} >= set(lost)


def test_where_all_processes_have_died_all_begin_anew_at_once(rent: Rent) -> None:
    """They are asked at once whether they live, given back, and as many machines are rented in one launch and prepared
    at the same time, under their ranks.
    """
    many = rent()
    with ExitStack() as undo:
        before = many.machines.acquire(undo)
        undo.pop_all()
    assert many.machines.lives(range(NODES)) == dict.fromkeys(range(NODES), True)
    for node in many.nodes.nodes.values():
        node.lives = False
    many.expect("lives")
    assert many.machines.lives(range(NODES)) == dict.fromkeys(range(NODES), False)
    assert many.together.met == {"lives"}
    many.expect("login", "look", "start", excused=f"fake-{NODES}", put_settings=NODES - 1)
    dead = {node.instance.id for node in before.nodes}
    lease = many.machines.restart([], dead)
    assert many.together.alone == []
    assert many.together.met == many.together.wanted.keys()
    assert [(node.rank, node.instance.id) for node in lease.nodes] == [
        (rank, f"fake-{NODES + rank}") for rank in range(NODES)
    ]
    assert {many.told_of(node.instance.id).scheduler for node in lease.nodes} == {None, lease.scheduler}
    assert [event.count for event in many.told.of(sky.InstanceLaunching)] == [NODES, NODES]
    wait_until(lambda: many.meter.rented() == {node.instance.id for node in lease.nodes}, "the dead ones to be gone")


def test_a_machine_that_cannot_begin_anew_leaves_its_rank_vacant(rent: Rent, monkeypatch: pytest.MonkeyPatch) -> None:
    """One that fails, and one that takes too long: the others go on without them, and they are given back; whose
    processes live, and may not be the head, is told of the new one.
    """
    many = rent()
    with ExitStack() as undo:
        before = many.machines.acquire(undo)
        undo.pop_all()
    monkeypatch.setattr(head_restart, "BEGIN_SECONDS", 1.0)
    start, is_over = ssh_transport.SSHTransport.start, threading.Event()
    begun: set[int] = set()

    def fail(self: ssh_transport.SSHTransport, *args: Any, **words: Any) -> None:
        if self.instance.rank == 4:
            is_over.wait()  # it takes longer than the others wait
        if self.instance.rank in {2, 4}:
            raise CommandFailed("no room", 1, "")
        start(self, *args, **words)
        begun.add(self.instance.rank)
        if self.instance.rank == 0:  # the head comes last: whoever has not begun by then never will
            wait_until(lambda: len(begun) == NODES - 3, "the others to begin")

    monkeypatch.setattr(ssh_transport.SSHTransport, "start", fail)
    try:
        lease = many.machines.restart([], {node.instance.id for node in before.nodes if node.rank != 3})
    finally:
        is_over.set()
    assert [node.rank for node in lease.nodes] == [rank for rank in range(NODES) if rank not in {2, 4}]
    assert lease.nodes[2].instance.id == "fake-3"
    assert many.told_of("fake-3").scheduler == lease.scheduler
    wait_until(lambda: many.meter.rented() == {node.instance.id for node in lease.nodes}, "the others to be gone")


# ── what they are sent ───────────────────────────────────────────────────────────────────────────────────────────────


def test_what_all_are_sent_is_made_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Threads that ask for it at once, before it is there, wait for the first of them.

    Looks inside: its caches are cleared, as another process has none.
    """
    made: list[str] = []
    compile_all, caches = (
        code_upload.compileall.compile_dir,
        (code_upload._archive, code_upload._compressed_uv, code_upload._package),
    )
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    monkeypatch.setattr(
        code_upload.compileall, "compile_dir", lambda folder, **how: made.append(folder) or compile_all(folder, **how)
    )
    for cached in caches:
        cached.cache_clear()
    try:
        at_once = threading.Barrier(NODES)
        with ThreadPoolExecutor(NODES) as threads:
            archives = list(threads.map(lambda _: (at_once.wait(), code_upload.shipped_archive())[1], range(NODES)))
            uvs = list(
                threads.map(
                    lambda _: (at_once.wait(), code_upload.shipped_uv("Linux", platform.machine()))[1], range(NODES)
                )
            )
    finally:
        for cached in caches:
            cached.cache_clear()
    assert len(made) == 1
    assert len({archive.path for archive in archives}) == len(set(uvs)) == 1
    with gzip.open(uvs[0].path) as content:
        unpacked = content.read()
    assert unpacked == Path(uv.find_uv_bin()).read_bytes()
    assert len(unpacked) == uvs[0].unpacked_bytes
    assert not [
        path for path in (tmp_path / "skyward" / "ship").iterdir() if path.name.count(".") > path.name.count(".tar") + 1
    ]


@pytest.mark.parametrize("can_fetch", [True, False])
def test_nodes_of_another_architecture_are_sent_the_uv_of_theirs_and_do_without_where_it_cannot_be_had(
    rent: Rent, monkeypatch: pytest.MonkeyPatch, tmp_path: Path, caplog: pytest.LogCaptureFixture, can_fetch: bool
) -> None:
    """Fetched once for all nodes; a client that cannot fetch it says so, and leaves it to the nodes.

    Looks inside: the real one would fetch a program.
    """
    asked: list[str] = []
    packed = tmp_path / "uv.gz"
    packed.write_bytes(gzip.compress(b"of another architecture"))

    def fetch(machine: str) -> code_upload.CompressedFile:
        asked.append(machine)
        if not can_fetch:
            raise subprocess.CalledProcessError(2, ["uv"], stderr="error: no such host\n")
        return code_upload.CompressedFile(packed, 23)

    monkeypatch.setattr(code_upload, "_fetched_uv", fetch)
    many = rent(Played(has_uv=False, system="Linux aarch64"))
    with ExitStack() as undo:
        many.machines.acquire(undo)
        undo.pop_all()
    assert asked == ["aarch64"] * NODES
    puts = {node.id: node.asked.count("put uv") for node in many.nodes.nodes.values()}
    assert puts == dict.fromkeys(many.nodes.nodes, int(can_fetch))
    assert ("has to fetch it itself: error: no such host" in caplog.text) is not can_fetch
    assert many.nodes.unknown == []
