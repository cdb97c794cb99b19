"""A command through which a machine is reached, as OpenSSH's ProxyCommand. It ends with the connection that it carries.

    started ──our end of its socket is closed──▶ ending ──it exits, or is killed CLOSE_SECONDS later──▶ ended

Its stdin and stdout are one end of a pair of sockets; the other end is given to asyncssh. asyncssh's own
`proxy_command` is not used: it mixes the command's stderr into the stream, and kills the command without a graceful
shutdown.

The code that starts a command owns it and ends it. If this process is killed, the kernel closes our end: a command that
reads the end of its input must end by itself.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import signal
import socket
import sys
from asyncio.subprocess import PIPE
from collections.abc import Sequence
from typing import Self, cast

from skyward_core.errors import BadRequest, CredentialsError, SkywardError

PYTHON = "{python}"
"""Stands in a command for the Python interpreter of the process that connects: it may differ from the endpoint's
author's.
"""
REFUSED, WRONG = os.EX_NOPERM, os.EX_CONFIG
"""Exit codes after which a retry is useless, from sysexits.h: credentials are refused, or the request is wrong."""
CLOSE_SECONDS = 1.0
KILL_SECONDS = 2.0
TAIL_BYTES = 4096


class Proxy(asyncio.SubprocessProtocol):
    """A running command. `socket` is our end, for one connection. To be used on one loop."""

    def __init__(self, ours: socket.socket) -> None:
        self.socket = ours
        self._said = b""
        self._has_exited = asyncio.Event()
        self._is_finished = asyncio.Event()
        self._transport: asyncio.SubprocessTransport

    @classmethod
    async def start(cls, command: Sequence[str]) -> Self:
        """Start a command. Raises BadRequest if it cannot be started."""
        words = [sys.executable or "python3" if word == PYTHON else word for word in command]
        ours, theirs = socket.socketpair()
        proxy, ends = cls(ours), theirs.fileno()
        starting = asyncio.ensure_future(
            asyncio.get_running_loop().subprocess_exec(
                lambda: proxy, *words, stdin=ends, stdout=ends, stderr=PIPE, start_new_session=True
            )
        )
        try:
            await asyncio.shield(starting)
        except asyncio.CancelledError:
            # asyncio would kill a command that is half started without its children, and wait for these
            await asyncio.wait([starting])
            await proxy._end_if_started(starting.exception())
            raise
        except OSError as error:
            ours.close()
            raise BadRequest(
                f"{words[0]}, the command that leads to the machine, cannot be started: {error}"
            ) from error
        except BaseException:
            ours.close()
            raise
        finally:
            theirs.close()
        return proxy

    async def _end_if_started(self, error: BaseException | None) -> None:
        if error is None:
            await self.end()
        else:
            self.socket.close()

    async def end(self) -> None:
        """Close the socket and wait until the command has exited; after a while kill it, with its children."""
        self.socket.close()
        try:
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(CLOSE_SECONDS):
                    await self._is_finished.wait()
            self._kill()
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(KILL_SECONDS):
                    await self._has_exited.wait()
        finally:
            self._kill()
            self._transport.close()

    def verdict(self) -> SkywardError | None:
        """Return the error of a command that has refused for good; None if a retry may help."""
        kind = {REFUSED: CredentialsError, WRONG: BadRequest}.get(self._transport.get_returncode() or 0)
        return kind(self.last_words() or f"it ended with {self._transport.get_returncode()}") if kind else None

    def last_words(self) -> str:
        """Return the last line of its stderr; "" if it wrote none."""
        lines = [line.strip() for line in self._said.decode(errors="replace").splitlines()]
        return next((line for line in reversed(lines) if line), "")

    def _kill(self) -> None:
        if self._transport.get_returncode() is None:
            with contextlib.suppress(ProcessLookupError):
                os.killpg(self._transport.get_pid(), signal.SIGKILL)

    # ── callbacks of the loop
    # ─────────────────────────────────────────────────────────────────────────────────────────────

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self._transport = cast("asyncio.SubprocessTransport", transport)

    def pipe_data_received(self, fd: int, data: bytes) -> None:
        self._said = (self._said + data)[-TAIL_BYTES:]

    def process_exited(self) -> None:
        self._has_exited.set()

    def connection_lost(self, exc: Exception | None) -> None:
        """Note that it has exited and has closed its stderr."""
        self._is_finished.set()
