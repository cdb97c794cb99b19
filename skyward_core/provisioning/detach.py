"""How nodes learn that they live without their client from now on; and that they do not, if one could not be told, or
the ledger not be written.

States of a pool that is detached, and what a kill between two lines leaves:

    attended -> paid for -> the nodes are told -> the ledger is told -> the reaper is told -> let go of
    └──────────── an attended pool ───────────┘   └─ a detached one, whose nodes and money last as long as its lease
    says ─┘

Up to the ledger's word the pool is its owner's: the reaper, and every sweep, ends it when the owner dies, whatever
lease its nodes have by then. So the nodes are told first, and the ledger, by which all others go, last.
"""

from __future__ import annotations

import contextlib
import logging
from collections.abc import Generator, Sequence
from pathlib import Path

from skyward_core.concurrency.threads import side_by_side
from skyward_core.errors import CommandFailed, SkywardError
from skyward_core.provisioning.lifecycle import Machines
from skyward_core.provisioning.port_forwarding import ALL_AT_ONCE
from skyward_core.transport.transport import LocalTransport, Transport
from skyward_core.worker.watchdog import DETACHED, LEASE, uptime, write_lease

_log = logging.getLogger("skyward")


@contextlib.contextmanager
def living_alone(machines: Machines, seconds: float, usual_seconds: float) -> Generator[None]:
    """Let all nodes live for so many seconds from now, with or without this client. If that fails, or what is done
    within, they are told again: as before.

    Nodes of this machine that had no lease have one of `usual_seconds` then. Raises Unreachable if one cannot be told,
    BadRequest if they need this client.
    """
    nodes = machines.transports.all()
    # asked before told: most that cannot be told are found here, with nothing to undo
    before = side_by_side(_lease_of, nodes, "skyward-nodes", ALL_AT_ONCE)
    try:
        machines.extend_leases(seconds)
        for transport in machines.transports.here():
            transport.write(DETACHED, "")
        yield
    except BaseException:
        _take_back(nodes, before, usual_seconds)
        raise


def _lease_of(transport: Transport) -> str:
    """Until when a node lives, in its own words; "" for one that has no lease, as those of this machine that live as
    long as their client.
    """
    try:
        return transport.read(LEASE)
    except (FileNotFoundError, CommandFailed):
        return ""


def _take_back(nodes: Sequence[Transport], before: Sequence[str], usual_seconds: float) -> None:
    """Whoever else keeps the nodes' leases lengthens them again with his next sign of life, and so does this client,
    which lives.
    """

    def take_back(told: tuple[Transport, str]) -> None:
        transport, lease = told
        try:
            if isinstance(transport, LocalTransport):
                _take_back_here(Path(str(transport.instance.directory)), lease, usual_seconds)
            elif (
                lease and transport.is_connected
            ):  # if not, it was most probably not told either, and would be waited for
                transport.write(LEASE, lease)
        except (SkywardError, OSError, ValueError) as error:
            _log.warning(
                "%s could not be told that its pool is not detached; its own lease may be longer than it should: %s",
                transport.instance.id,
                error,
            )

    side_by_side(take_back, list(zip(nodes, before, strict=True)), "skyward-nodes", ALL_AT_ONCE)


def _take_back_here(directory: Path, lease: str, usual_seconds: float) -> None:
    """A lease first: without it a node whose owner dies would go by the long one, which it remembers."""
    usual = uptime() + usual_seconds
    write_lease(directory, max(usual, float(lease)) if lease else usual, may_shorten=True)
    (directory / DETACHED).unlink(missing_ok=True)
