"""Operations on many nodes run on all nodes at the same time, not one after the other.

Each node blocks in an operation until all nodes have begun it. A sequential client would stop at the first node. No
test measures time. `benchmarks/clouds.py` measures 64 nodes.
"""

from __future__ import annotations

import asyncio
import gzip
import platform
import subprocess
import threading
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import uv

import skyward_core as sky
from skyward_core.errors import CommandFailed, CommandTimedOut
from skyward_core.provisioning import head_restart
from skyward_core.transport import code_upload, ssh_transport
from tests.conftest import wait_until
from tests.fake_nodes import FakeNode, Played
from tests.system.provisioning.test_many_nodes import (  # noqa: F401 - fixtures
    NODES,
    PATIENCE_SECONDS,
    Rent,
    rent,
)


def test_forwarded_ports_are_opened_on_all_nodes_at_the_same_time(rent: Rent) -> None:
    """The nodes cannot reach each other. The first forwarded port is requested on all nodes before the second on any."""
    many = rent(Played(sees_others=False))
    many.expect("lead")
    with ExitStack() as undo:
        lease = many.machines.acquire(undo)
        undo.pop_all()
    assert many.together.alone == []
    assert many.together.met == {"lead"}
    asked = {node.instance.id: many.nodes.nodes[node.instance.id].asked.count("lead") for node in lease.nodes}
    # two ports for each other node, and the head's rendezvous
    assert asked == {node.instance.id: 2 * (NODES - 1) + (node.rank > 0) for node in lease.nodes}


def test_an_sshd_that_forwards_no_ports_is_named_before_any_upload(rent: Rent) -> None:
    """The pool reaches its nodes only through forwarded ports, so it would prepare them for nothing."""
    asked = set[str]()

    async def note(what: str, node: FakeNode) -> None:
        asked.add(what)

    many = rent(Played(forwards_ports=False), before=note, nodes_wanted=1)
    with ExitStack() as undo, pytest.raises(sky.SkywardError, match="AllowTcpForwarding no"):
        many.machines.acquire(undo)
    assert "login" in asked
    assert not asked & {"put uv", "put ship.tar.gz", "start"}


def test_slow_nodes_may_take_as_long_as_the_pool_to_open(rent: Rent, monkeypatch: pytest.MonkeyPatch) -> None:
    """Each command takes longer than an open pool allows. The node becomes ready, and its lease is renewed.

    A command in an open pool has its limit.

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
    assert many.recorded.of(sky.ContactLost) == []
    seconds[0] = PATIENCE_SECONDS
    with pytest.raises(CommandTimedOut):
        many.machines.restart_workers(1, [0])


# ── after the opening ────────────────────────────────────────────────────────────────────────────────────────────────


def test_leases_and_a_new_head_are_sent_to_all_nodes_at_the_same_time(rent: Rent) -> None:
    """A detach takes little time, and the pool soon continues after it has lost its head."""
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
    of_nodes = [many.settings_of(node.instance.id) for node in lease.nodes]
    assert [(settings.generation, settings.scheduler) for settings in of_nodes] == [(1, None)] + [
        (1, lease.scheduler)
    ] * (NODES - 2)


def test_a_node_that_does_not_receive_the_new_head_is_terminated_and_the_others_continue(
    rent: Rent, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The number of nodes that receive it at the same time does not matter."""
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
    assert {event.instance_id for event in many.recorded.of(sky.InstanceStopping)} >= set(lost)


def test_if_all_processes_have_died_all_nodes_are_replaced_at_the_same_time(rent: Rent) -> None:
    """All nodes are checked at the same time, and terminated.

    One launch rents the same number of machines. They are prepared at the same time and get the same ranks.
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
    assert {many.settings_of(node.instance.id).scheduler for node in lease.nodes} == {None, lease.scheduler}
    assert [event.count for event in many.recorded.of(sky.InstanceLaunching)] == [NODES, NODES]
    wait_until(lambda: many.meter.rented() == {node.instance.id for node in lease.nodes}, "the dead ones to be gone")


def test_a_failed_replacement_leaves_its_rank_vacant(rent: Rent, monkeypatch: pytest.MonkeyPatch) -> None:
    """One machine fails and one takes too long: the others continue without them, and both are terminated.

    A living node that cannot be the head gets the new head's address.
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
            is_over.wait()  # longer than the others wait
        if self.instance.rank in {2, 4}:
            raise CommandFailed("no room", 1, "")
        start(self, *args, **words)
        begun.add(self.instance.rank)
        if self.instance.rank == 0:  # the head is last: a node that has not begun by now never will
            wait_until(lambda: len(begun) == NODES - 3, "the others to begin")

    monkeypatch.setattr(ssh_transport.SSHTransport, "start", fail)
    try:
        lease = many.machines.restart([], {node.instance.id for node in before.nodes if node.rank != 3})
    finally:
        is_over.set()
    assert [node.rank for node in lease.nodes] == [rank for rank in range(NODES) if rank not in {2, 4}]
    assert lease.nodes[2].instance.id == "fake-3"
    assert many.settings_of("fake-3").scheduler == lease.scheduler
    wait_until(lambda: many.meter.rented() == {node.instance.id for node in lease.nodes}, "the others to be gone")


# ── uploads ──────────────────────────────────────────────────────────────────────────────────────────────────────────


def test_an_upload_for_all_nodes_is_created_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Threads that need it at the same time wait for the first of them.

    Looks inside: its caches are cleared, as another process has none.
    """
    made: list[str] = []
    compile_all, caches = (
        code_upload.compileall.compile_dir,
        (code_upload._archive, code_upload._compressed_uv, code_upload._package),
    )
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    compiling = SimpleNamespace(compile_dir=lambda folder, **how: made.append(folder) or compile_all(folder, **how))
    monkeypatch.setattr(code_upload, "compileall", compiling)
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
def test_nodes_of_another_architecture_get_their_own_uv(
    rent: Rent, monkeypatch: pytest.MonkeyPatch, tmp_path: Path, caplog: pytest.LogCaptureFixture, can_fetch: bool
) -> None:
    """It is downloaded once for all nodes.

    If the download fails, the client logs it and the nodes install uv themselves.

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
