"""Forwarded ports of a connection, which outlive its losses. Part of `ssh_connection.py`."""

from __future__ import annotations

from dataclasses import dataclass

import asyncssh  # noqa: TID253  a part of ssh_connection.py

from skyward_core.errors import Unreachable
from skyward_core.machines.instances import Endpoint
from skyward_core.transport.ssh_link import NO_FORWARDING, OPEN_PROHIBITED, SSHLink


@dataclass(frozen=True, slots=True)
class Forward:
    """A forwarded port: from `listen_port`, here or (`is_remote`) there, to `host:port` on the other side."""

    is_remote: bool
    listen_host: str
    listen_port: int
    host: str
    port: int


class Forwards:
    """The forwarded ports of one connection. To be used on the loop's thread only."""

    def __init__(self, endpoint: Endpoint, link: SSHLink) -> None:
        self._endpoint = endpoint
        self._link = link
        self._forwards: list[Forward] = []

    async def add(self, wanted: Forward) -> int:
        """Open a forward and return the port that it listens on; `open_all` opens it again after a loss, on the same
        port.
        """
        port = await self._open(self._link.living(), wanted)
        self._forwards.append(Forward(wanted.is_remote, wanted.listen_host, port, wanted.host, wanted.port))
        return port

    async def open_all(self) -> None:
        """Open all forwards on a new connection."""
        ssh = self._link.living()
        for forward in self._forwards:
            await self._open(ssh, forward)

    async def check(self) -> None:
        """Raise Unreachable if the machine forwards no ports."""
        try:
            _, writer = await self._link.living().open_connection("127.0.0.1", 1)
            writer.close()
        except asyncssh.ChannelOpenError as error:
            if error.code == OPEN_PROHIBITED:  # otherwise nothing listens on that port, as expected
                raise Unreachable(f"{self._endpoint} {NO_FORWARDING}") from error

    @staticmethod
    async def _open(ssh: asyncssh.SSHClientConnection, forward: Forward) -> int:
        open_one = ssh.forward_remote_port if forward.is_remote else ssh.forward_local_port
        listener = await open_one(forward.listen_host, forward.listen_port, forward.host, forward.port)
        return listener.get_port()
