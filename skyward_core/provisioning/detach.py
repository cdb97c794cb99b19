"""Informs the nodes that they run without their client from now on, and undoes this if a node or the ledger fails.

States of a pool that is detached, and which pool a crash leaves:

    attended -> money reserved -> nodes informed -> ledger written -> reaper informed -> detached
    └─────────────── an attended pool ─────────┘   └─ a detached pool, whose nodes and money last until its lease ends

Until the ledger is written, the owner's death ends the pool: the reaper and every sweep decide by the ledger, not by
the leases of the nodes. So the nodes are informed first and the ledger is written last.
"""

from __future__ import annotations

import contextlib
import logging
from collections.abc import Generator, Sequence
from pathlib import Path

from skyward_core.concurrency.threads import side_by_side
from skyward_core.errors import CommandFailed, SkywardError
from skyward_core.provisioning.lifecycle import PoolMachines
from skyward_core.provisioning.port_forwarding import ALL_AT_ONCE
from skyward_core.transport.transport import LocalTransport, Transport
from skyward_core.worker.watchdog import DETACHED, LEASE, uptime, write_lease

_log = logging.getLogger("skyward")


@contextlib.contextmanager
def detached_nodes(machines: PoolMachines, seconds: float, usual_seconds: float) -> Generator[None]:
    """Let all nodes live for so many seconds from now, with or without this client. If that or the body fails, undo it.

    Nodes of this machine that had no lease then get one of `usual_seconds`. Raises Unreachable if a node does not
    answer, BadRequest if the nodes need this client.
    """
    nodes = machines.transports.all()
    # reads before it writes: most nodes that do not answer are found here, with nothing to undo
    before = side_by_side(_lease_of, nodes, "skyward-nodes", ALL_AT_ONCE)
    try:
        machines.extend_leases(seconds)
        for transport in machines.transports.here():
            transport.write(DETACHED, "")
        yield
    except BaseException:
        _take_back(nodes, before, usual_seconds)
        raise


def disown(machines: PoolMachines) -> None:
    """Let nodes of this machine end with their lease, although this process lives on. Raises nothing."""
    for transport in machines.transports.here():
        with contextlib.suppress(OSError):  # it has ended
            transport.write(DETACHED, "")


def _lease_of(transport: Transport) -> str:
    """Return a node's lease as it has written it; "" if it has none, as nodes of this machine that end with their
    client.
    """
    try:
        return transport.read(LEASE)
    except (FileNotFoundError, CommandFailed):
        return ""


def _take_back(nodes: Sequence[Transport], before: Sequence[str], usual_seconds: float) -> None:
    """Restore the nodes' leases. The next lease renewal of this client, or of another one, makes them longer again."""

    def take_back(node: tuple[Transport, str]) -> None:
        transport, lease = node
        try:
            if isinstance(transport, LocalTransport):
                _take_back_here(Path(str(transport.instance.directory)), lease, usual_seconds)
            elif lease and transport.is_connected:  # else it probably has the old lease; do not wait
                transport.write(LEASE, lease)
        except (SkywardError, OSError, ValueError) as error:
            _log.warning(
                "%s could not be informed that its pool is not detached; its lease may be too long: %s",
                transport.instance.id,
                error,
            )

    side_by_side(take_back, list(zip(nodes, before, strict=True)), "skyward-nodes", ALL_AT_ONCE)


def _take_back_here(directory: Path, lease: str, usual_seconds: float) -> None:
    """Restore the lease of a node of this machine.

    The lease is written first: a node whose owner dies would otherwise use the long lease that it has in memory.
    """
    usual = uptime() + usual_seconds
    write_lease(directory, max(usual, float(lease)) if lease else usual, may_shorten=True)
    (directory / DETACHED).unlink(missing_ok=True)
