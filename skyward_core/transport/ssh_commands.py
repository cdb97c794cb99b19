"""Commands on a machine, over the link of a connection; `Shell` for many of them in a row.

Part of `ssh_connection.py`.
"""

from __future__ import annotations

import asyncio
import secrets
import shlex
import threading
import time
from collections.abc import AsyncGenerator
from contextlib import asynccontextmanager
from dataclasses import dataclass
from pathlib import Path
from types import TracebackType
from typing import Any, Self

import asyncssh  # noqa: TID253  a part of ssh_connection.py

from skyward_core.errors import CommandFailed, CommandTimedOut, ConnectionLost, Unreachable
from skyward_core.machines.instances import Endpoint
from skyward_core.transport.ssh_calls import LoopCalls, short
from skyward_core.transport.ssh_channels import ChannelBuffer, ChannelSession, TextStream
from skyward_core.transport.ssh_link import SSHLink, attempts

KILL_SECONDS = 2.0
# sshd counts a session slightly longer than we do; if its MaxSessions is smaller, one of ours may end soon
REFUSED_SECONDS = 5.0
SESSIONS = 10
"""Commands at once on one connection; further ones wait. OpenSSH's default for MaxSessions, sshd_config(5)."""

LEADER = 'SKYWARD_COMMAND=$1.$$ exec "${SHELL:-/bin/sh}" -c "$2"'
KILL = """\
leader=$(cat /proc/[0-9]*/environ 2>/dev/null | tr '\\0' '\\n' | sed -n "s/^SKYWARD_COMMAND=$1[.]//p" | head -n 1)
[ -z "$leader" ] || kill -KILL "-$leader"
"""
"""OpenSSH 9.2 ends the processes of a session on request, but not those of root. Commands of root have a name and the
pid of their group in their environment.
"""

SHELL_LINE = "(eval {command}) </dev/null 2>&1; printf '\\n%s %s\\n' {mark} $?\n"
"""A subshell, because a syntax error or `exit` ends a shell that reads its commands from stdin."""


@dataclass(frozen=True, slots=True)
class Completed:
    """How a command ended. `exit_code` as in `subprocess` (negative: the signal); `output` is stdout and stderr in the
    order of arrival.

    With `on_line`, for commands that may run for days, `output` is only the end: 64 Ki characters or some more.
    """

    exit_code: int
    output: str


class Commands:
    """Starts commands in sessions of the link and ends them, at most SESSIONS at once.

    To be used on the loop's thread only.
    """

    def __init__(self, endpoint: Endpoint, link: SSHLink) -> None:
        self.endpoint = endpoint
        self._link = link
        self._sessions = asyncio.Semaphore(SESSIONS)

    async def start(self, command: str, content: bytes | Path | None, *, stays: bool = False) -> ChannelBuffer:
        """Start a command and send its input, in the background; without `content` it reads the end of file, unless it
        `stays`.
        """
        inbox = ChannelBuffer()
        await self.open(command, inbox)
        if content is not None:
            inbox.feeding = asyncio.ensure_future(inbox.send(content))
        elif not stays:
            inbox.finish()
        return inbox

    @asynccontextmanager
    async def running[S: ChannelSession](
        self, command: str, session: S, *, window: int | None = None, is_killed: bool = True
    ) -> AsyncGenerator[S, None]:
        """Start a command; afterwards it has ended, or is killed, or at least sees the end of its input."""
        ended = False
        await self.open(command, session, window=window)
        try:
            yield session
            ended = True
        finally:
            await self.leave(session, kill=is_killed and not ended)

    async def open(self, command: str, session: ChannelSession, *, window: int | None = None) -> None:
        """Start a command in a session, waiting while SESSIONS of them are taken."""
        self._link.living()
        await self._sessions.acquire()
        try:
            ssh = self._link.living()
            if ssh.get_extra_info("username") == "root":
                session.name = secrets.token_hex(8)
                command = "exec " + shlex.join(["sh", "-c", LEADER, "sh", session.name, command])
            await self._create(ssh, command, session, window)
        except BaseException:
            self._sessions.release()
            if session.is_made:
                session.channel.close()
            raise

    async def _create(
        self, ssh: asyncssh.SSHClientConnection, command: str, session: ChannelSession, window: int | None
    ) -> None:
        """Start a command on the machine, trying again for REFUSED_SECONDS while it takes no further one."""
        arguments: dict[str, Any] = {"encoding": None, "request_pty": False, "x11_forwarding": False} | (
            {"window": window} if window else {}
        )
        refusal: asyncssh.ChannelOpenError | None = None
        async for _ in attempts(asyncio.get_running_loop().time(), REFUSED_SECONDS):
            try:
                await ssh.create_session(lambda: session, command, **arguments)
                return
            except asyncssh.ChannelOpenError as error:
                refusal = error
                if self._link.ssh is not ssh or session.is_made:
                    break
        assert refusal is not None
        if self._link.ssh is not ssh:  # it was lost meanwhile; a new connection has refused nothing
            raise ConnectionLost(f"the SSH connection to {self.endpoint} is gone: {refusal}") from refusal
        raise refusal

    async def exit_code(self, session: ChannelSession, command: str) -> int:
        """Wait for the end of a command and return its exit code.

        Raises ConnectionLost if the connection ended instead.
        """
        await session.ended.wait()
        exit_code = session.channel.get_returncode()
        if exit_code is None:  # asyncssh reports a connection that died like this too, whatever `check` says
            raise ConnectionLost(
                f"{self.endpoint} went away under: {short(command)}" + f" ({self._link.lost})" * bool(self._link.lost)
            )
        return exit_code

    async def leave(self, session: ChannelSession, *, kill: bool) -> None:
        """Give back the place of a session, and kill its command if it may still run."""
        self._sessions.release()
        if session.feeding:
            session.feeding.cancel()
        if kill:
            try:
                session.channel.kill()
            except OSError:
                pass  # it has ended
        session.channel.close()
        if kill and session.name and self._link.ssh:
            await self._kill(session.name)

    async def _kill(self, name: str) -> None:
        """Kill the command of this name; give up after KILL_SECONDS."""
        killer = ChannelBuffer()
        try:
            async with asyncio.timeout(KILL_SECONDS):
                await self.open(shlex.join(["sh", "-c", KILL, "kill", name]), killer)
                try:
                    killer.finish()
                    await killer.ended.wait()
                finally:
                    await self.leave(killer, kill=False)
        except (TimeoutError, Unreachable, asyncssh.Error, OSError):
            pass


class Shell:
    """A `sh` on the machine that stays: a command costs one round trip and no login, an eighth of the time of
    `SSHConnection.run`.

    It may be used from many threads, which take turns. It holds one of the connection's SESSIONS from its first command
    until `close`.
    """

    def __init__(self, calls: LoopCalls, commands: Commands) -> None:
        self._calls = calls
        self._commands = commands
        self._turn = threading.Lock()
        self._mark = secrets.token_hex(16)
        self._count = 0
        self._inbox: ChannelBuffer | None = None

    def run(self, command: str, *, timeout_seconds: float | None = None) -> Completed:
        """Run a command of POSIX sh in the user's home and return how it ended, with any exit code.

        Each command runs in a subshell and reads the end of file. A process that it leaves running writes into the
        output of the next command. Raises CommandTimedOut after `timeout_seconds`, waiting for its turn included,
        ConnectionLost if the connection dies first, and CommandFailed if the command killed the shell. Then the next
        command starts another shell.
        """
        deadline = None if timeout_seconds is None else time.monotonic() + timeout_seconds
        if not self._turn.acquire(timeout=-1 if timeout_seconds is None else timeout_seconds):
            raise CommandTimedOut(
                f"the shell on {self._commands.endpoint} was busy until the deadline of: {short(command)}", output=""
            )
        try:
            return self._calls.call_command(deadline, self._ask(command), command, TextStream(None))
        finally:
            self._turn.release()

    def close(self) -> None:
        """End the shell, after the command that it runs. May be called twice."""
        with self._turn:
            inbox, self._inbox = self._inbox, None
            if inbox:
                self._calls.call_quietly(self._commands.leave(inbox, kill=False))

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    async def _ask(self, command: str) -> Completed:
        commands = self._commands
        inbox = self._inbox
        if inbox and inbox.ended.is_set():
            self._inbox = None
            await commands.leave(inbox, kill=False)
        inbox = self._inbox = self._inbox or await commands.start("exec sh", None, stays=True)
        answered = False
        try:
            self._count += 1
            mark = f"{self._mark}.{self._count}"
            await inbox.send(SHELL_LINE.format(command=shlex.quote(command), mark=mark).encode(), end=False)
            said, exit_code = await inbox.read_until(f"\n{mark} ".encode())
            if exit_code is None:
                exit_code = await commands.exit_code(inbox, command)
                raise CommandFailed(
                    f"the shell on {commands.endpoint} ended under: {short(command)}",
                    exit_code,
                    said.decode(errors="replace"),
                )
            answered = True
            return Completed(exit_code, said.decode(errors="replace"))
        finally:
            if not answered:
                self._inbox = None if self._inbox is inbox else self._inbox
                await commands.leave(inbox, kill=True)
