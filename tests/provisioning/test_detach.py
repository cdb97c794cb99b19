"""What a node is told when its pool is detached, and what it is told when that has failed."""

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from skyward_core import Instance, InstanceState, Unreachable
from skyward_core.errors import CommandFailed
from skyward_core.provisioning.detach import detached_nodes
from skyward_core.transport.transport import LocalTransport
from skyward_core.worker.watchdog import DETACHED, read_lease, uptime, write_lease


class SSHTransport:
    """A node elsewhere, whose uptime is its own: its lease is a number that means nothing here."""

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
    """Machines whose nodes are all told to live longer; then there is an error, if one is given."""

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


def test_nodes_live_on_when_all_is_well(tmp_path: Path) -> None:
    """Theirs is the lease that they were told, and those of this machine go by it."""
    here, there = local(tmp_path / "node"), SSHTransport("700\n")
    with detached_nodes(machines_of([here, there]), 1000.0, 120.0):
        assert (tmp_path / "node" / DETACHED).exists()
    assert there.lease == "99999\n"
    assert (read_lease(tmp_path / "node") or 0.0) > uptime() + 900
    assert (tmp_path / "node" / DETACHED).exists()


@pytest.mark.parametrize("before", [None, 60.0, 600.0])
@pytest.mark.parametrize("is_told", [True, False])
def test_nodes_are_told_again_when_something_fails(tmp_path: Path, before: float | None, *, is_told: bool) -> None:
    """A node elsewhere has the lease that it had; one of this machine the usual one, or its own if that was longer, and
    its owner stands for it again.
    """
    here, there, lost, bare = (
        local(tmp_path / "node"),
        SSHTransport("700\n"),
        SSHTransport("800\n", is_connected=False),
        SSHTransport(None),
    )
    now = uptime()
    if before is not None:
        write_lease(tmp_path / "node", now + before)
    machines = machines_of([here, there, lost, bare], None if is_told else Unreachable("the last one does not answer"))
    with pytest.raises((Unreachable, KeyboardInterrupt)), detached_nodes(machines, 1000.0, 120.0):
        raise KeyboardInterrupt
    assert there.lease == "700\n"
    assert lost.lease == bare.lease == "99999\n"  # the one is not there, of the other nobody knows what it had
    lease = read_lease(tmp_path / "node")
    assert lease is not None
    assert lease == pytest.approx(now + max(before or 0.0, 120.0), abs=5.0)
    assert not (tmp_path / "node" / DETACHED).exists()


def test_a_node_that_is_found_to_be_out_of_reach_first_changes_nothing() -> None:
    """All are asked before any is told."""

    class Silent(SSHTransport):
        def read(self, name: str) -> str:
            raise Unreachable("no answer")

    there = SSHTransport("700\n")
    with pytest.raises(Unreachable), detached_nodes(machines_of([there, Silent("800\n")]), 1000.0, 120.0):
        pytest.fail("it is not to be detached")
    assert there.lease == "700\n"
