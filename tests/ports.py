"""Ports of servers that begin some seconds after their ports were chosen.

The kernel gives those from 32768 on to any connection and to `bind(0)`: one may be taken before its server begins.
Prefect's was, 20 seconds after it was chosen. So these are below.
"""

import contextlib
import secrets
import socket

FIRST, END = 10_000, 32_000


def free_ports(count: int) -> list[int]:
    """Return so many different ports of this machine that no program has now."""
    ports: set[int] = set()
    while len(ports) < count:
        port = FIRST + secrets.randbelow(END - FIRST)
        with contextlib.suppress(OSError), socket.create_server(("127.0.0.1", port)):
            ports.add(port)
    return list(ports)


def free_port() -> int:
    """Return a port of this machine that no program has now."""
    return free_ports(1)[0]
