"""The leases that nodes receive when their pool is detached, and after a detach that fails."""

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from skyward_core import Instance, InstanceState, Unreachable
from skyward_core.errors import CommandFailed
from skyward_core.provisioning.lifecycle import detached_nodes
from skyward_core.transport.transport import LocalTransport
from skyward_core.worker.node_clocks import DETACHED, read_lease, uptime, write_lease


class SSHTransport:
    """The transport to another machine. The uptime of that machine determines its lease."""

    def __init__(self, lease: str | None, *, is_connected: bool = True) -> None:
        self.instance = SimpleNamespace(id="far away")
        self.is_connected = is_connected
        self.lease = lease

    def read(self, name: str) -> str:
        assert name == "lease"
        if self.lease is None:
            raise CommandFailed("there is none", 1, "")
        return self.lease

    def write(self, name: str, text: str) -> None:
        assert name == "lease"
        self.lease = text


def local(directory: Path) -> LocalTransport:
    directory.mkdir()
    instance = Instance(
        id=directory.name,
        provider="local",
        pool_id="p",
        rank=0,
        tags={},
        state=InstanceState.RUNNING,
        region="here",
        instance_type="local",
        is_spot=False,
        price_per_hour=0.0,
        directory=str(directory),
    )
    return LocalTransport(instance, lambda: False, lambda: None)


def machines_of(nodes: list[Any], error: Exception | None = None) -> Any:
    """Return machines that all get a longer lease. An `error`, if given, is raised afterwards."""

    def extend_leases(seconds: float) -> None:
        for node in nodes:
            if isinstance(node, LocalTransport):
                write_lease(Path(node.instance.directory or ""), uptime() + seconds)
            else:
                node.lease = "99999\n"
        if error is not None:
            raise error

    here = [node for node in nodes if isinstance(node, LocalTransport)]
    return SimpleNamespace(
        transports=SimpleNamespace(all=lambda: nodes, here=lambda: here), extend_leases=extend_leases
    )


def test_after_a_detach_the_nodes_keep_their_longer_lease(tmp_path: Path) -> None:
    """Nodes of this machine end by their lease and not with their owner."""
    here, there = local(tmp_path / "node"), SSHTransport("700\n")
    with detached_nodes(machines_of([here, there]), 1000.0, 120.0):
        assert (tmp_path / "node" / DETACHED).exists()
    assert there.lease == "99999\n"
    assert (read_lease(tmp_path / "node") or 0.0) > uptime() + 900
    assert (tmp_path / "node" / DETACHED).exists()


@pytest.mark.parametrize(("before", "does_answer"), [(None, True), (60.0, False), (600.0, True)])
def test_after_a_failed_detach_nodes_get_their_former_lease(
    tmp_path: Path, before: float | None, *, does_answer: bool
) -> None:
    """A node of this machine gets the usual lease, or its own if that was longer. It ends with its owner again."""
    here, there, bare = local(tmp_path / "node"), SSHTransport("700\n"), SSHTransport(None)
    lost = SSHTransport("800\n", is_connected=False)
    now = uptime()
    if before is not None:
        write_lease(tmp_path / "node", now + before)
    error = None if does_answer else Unreachable("the last one does not answer")
    machines = machines_of([here, there, lost, bare], error)
    with pytest.raises((Unreachable, KeyboardInterrupt)), detached_nodes(machines, 1000.0, 120.0):
        raise KeyboardInterrupt
    assert there.lease == "700\n"
    assert lost.lease == bare.lease == "99999\n"  # one does not answer, the former lease of the other is unknown
    assert read_lease(tmp_path / "node") == pytest.approx(now + max(before or 0.0, 120.0), abs=60.0)
    assert not (tmp_path / "node" / DETACHED).exists()


def test_all_nodes_are_asked_before_any_gets_another_lease() -> None:
    class Silent(SSHTransport):
        def read(self, name: str) -> str:
            raise Unreachable("no answer")

    there = SSHTransport("700\n")
    with (
        pytest.raises(Unreachable),
        detached_nodes(machines_of([there, Silent("800\n", is_connected=False)]), 1000.0, 120.0),
    ):
        pytest.fail("it is not to be detached")
    assert there.lease == "700\n"


def test_the_lease_of_a_node_of_this_machine_that_is_gone_cannot_be_extended(tmp_path: Path) -> None:
    """It is out of reach, as one over SSH: whoever leaves its pool goes on leaving."""
    node = local(tmp_path / "node")
    (tmp_path / "node").rmdir()
    with pytest.raises(Unreachable, match="the node node has ended"):
        node.extend_lease(60.0)
