"""Commands on a machine, over the link of a connection; `Shell` for many of them in a row.

Part of `ssh_connection.py`.
"""

from __future__ import annotations

import asyncio
import codecs
import mmap
import secrets
import shlex
import threading
import time
import warnings
from collections import deque
from collections.abc import AsyncGenerator, Callable, Coroutine, Iterable, Iterator, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass
from pathlib import Path
from types import TracebackType
from typing import Any, Self, cast

import asyncssh  # noqa: TID253  a part of ssh_connection.py

from skyward_core.errors import BadRequest, CommandFailed, CommandTimedOut, ConnectionLost, Unreachable
from skyward_core.machines.instances import Endpoint
from skyward_core.transport.ssh_link import Loop, SSHLink, attempts

PIECE_BYTES = 256 * 1024
WRITE_AHEAD_BYTES = 1 << 20
READ_AHEAD_BYTES = 1 << 20
TAIL_CHARACTERS = 64 * 1024
LARGE_BYTES = 4 << 20  # larger values get separate pages, which are freed with the last view of them
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


# Input and output of one command on an SSH connection, from asyncssh's callbacks. Part of `ssh_connection.py`.
#
# Bytes go from the caller's buffers into the channel and from the channel into one buffer of the right size;
# `ssh_connection.py` says why asyncssh's streams are left out.


class ChannelSession(asyncssh.SSHClientSession[bytes]):
    """A command on the machine, with asyncssh's callbacks.

    Its callbacks must not raise: that would end the connection.
    """

    channel: asyncssh.SSHClientChannel[bytes]

    def __init__(self) -> None:
        self.name = ""  # KILL finds the command by it
        self.is_made = False
        self.feeding: asyncio.Task[None] | None = None
        self.ended = asyncio.Event()
        self._may_write = asyncio.Event()
        self._may_write.set()

    def connection_made(self, chan: asyncssh.SSHClientChannel[bytes]) -> None:
        self.channel, self.is_made = chan, True
        chan.set_write_buffer_limits(WRITE_AHEAD_BYTES)

    def eof_received(self) -> bool:
        """Keep our side open: input may still be sent."""
        return True

    def connection_lost(self, exc: Exception | None) -> None:
        self._may_write.set()
        self.ended.set()

    def pause_writing(self) -> None:
        self._may_write.clear()

    def resume_writing(self) -> None:
        self._may_write.set()

    async def send(self, content: Path | bytes | Sequence[memoryview], *, end: bool = True) -> None:
        """Send the command's input, no faster than it reads, and then the end of file if `end`."""
        try:
            for piece in pieces(content):
                self.channel.write(piece)
                if not self._may_write.is_set():
                    await self._may_write.wait()
        except OSError:
            pass  # the command or the connection has ended: the reading side finds out which
        if end:
            self.finish()

    def finish(self) -> None:
        """Send the end of file to the command."""
        try:
            self.channel.write_eof()
        except OSError:
            pass  # the same


class ChannelBuffer(ChannelSession):
    """A command whose output is read piece by piece; it waits when it is too far ahead of its reader."""

    def __init__(self) -> None:
        super().__init__()
        self._pieces: list[bytes] = []
        self._size = 0
        self._is_paused = False
        self._is_at_end = False
        self._news = asyncio.Event()

    def data_received(self, data: bytes, datatype: int | None) -> None:
        self._pieces.append(data)
        self._size += len(data)
        self._news.set()
        if self._size > READ_AHEAD_BYTES and not self._is_paused:
            self._is_paused = True
            self.channel.pause_reading()

    def eof_received(self) -> bool:
        self._is_at_end = True
        self._news.set()
        return super().eof_received()

    def connection_lost(self, exc: Exception | None) -> None:
        super().connection_lost(exc)
        self.eof_received()

    async def read(self) -> bytes:
        """Wait for output and return it; nothing at the end."""
        while not self._pieces and not self._is_at_end:
            self._news.clear()
            await self._news.wait()
        whole = b"".join(self._pieces)
        self._pieces.clear()
        self._size = 0
        if self._is_paused:
            self._is_paused = False
            self.channel.resume_reading()
        return whole

    async def read_until(self, mark: bytes) -> tuple[bytes, int | None]:
        """Return the output before a mark, and the number in the mark's line; None if the output ends before."""
        said, seen = bytearray(), 0
        while piece := await self.read():
            said += piece
            found = said.find(mark, seen)
            if found >= 0 and said.endswith(b"\n"):
                return bytes(said[:found]), int(said[found + len(mark) :])
            seen = found if found >= 0 else max(0, len(said) - len(mark))
        return bytes(said), None


class Download(ChannelSession):
    """The output of FETCH: the bytes of a file go directly into their buffer."""

    def __init__(self, mark: bytes, into: memoryview | None) -> None:
        super().__init__()
        self.settled = asyncio.Event()
        self.problem: Exception | None = None
        self.said = bytearray()
        self.content = memoryview(b"")
        self._mark = mark
        self._into = into
        self._head: bytes | None = b""
        self._filled = 0
        self._overflow = 0

    @property
    def is_begun(self) -> bool:
        return self._head is None

    @property
    def is_whole(self) -> bool:
        return self.is_begun and self._filled == len(self.content) and not self._overflow

    def data_received(self, data: bytes, datatype: int | None) -> None:
        if datatype is not None:
            self.said += data
            return
        if self.problem:
            return
        if self._head is not None:
            data = self._begin(data)
        taken = min(len(data), len(self.content) - self._filled)
        if taken:
            self.content[self._filled : self._filled + taken] = data[:taken]
        self._filled += taken
        self._overflow += len(data) - taken
        if self.problem or (self._head is None and self._filled == len(self.content)):
            self.settled.set()

    def eof_received(self) -> bool:
        self.settled.set()
        return super().eof_received()

    def connection_lost(self, exc: Exception | None) -> None:
        super().connection_lost(exc)
        self.settled.set()

    def _begin(self, data: bytes) -> bytes:
        """Find the line with the size, after any output of a login shell; return the bytes after it."""
        assert self._head is not None
        *lines, self._head = (self._head + data).split(b"\n")
        for number, line in enumerate(lines):
            word, _, size = line.partition(b" ")
            if word == self._mark:
                rest = b"\n".join([*lines[number + 1 :], self._head])
                self._head = None
                try:
                    self.content = self._room(int(size))
                except (MemoryError, OSError, BadRequest) as error:
                    self.problem = error
                    return b""
                return rest
        return b""

    def _room(self, size: int) -> memoryview:
        if self._into is None:
            return memory(size)
        if size > len(self._into):
            raise BadRequest(f"the file has {size} bytes, more than there is room for: {len(self._into)}")
        return self._into[:size]


def memory(size: int) -> memoryview:
    """Return new, writable memory.

    In huge pages where the kernel has them: touching 100 MiB for the first time then takes 15 ms, not 70.
    """
    if size < LARGE_BYTES:
        return memoryview(bytearray(size))
    pages = mmap.mmap(-1, size, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    if hasattr(mmap, "MADV_HUGEPAGE"):
        try:
            pages.madvise(mmap.MADV_HUGEPAGE)
        except OSError:
            pass  # a kernel built without them
    return memoryview(pages)


def pieces(content: Path | bytes | Iterable[memoryview]) -> Iterator[bytes]:
    """Cut the content into pieces. Views pass for bytes: asyncssh copies its input in any case."""
    if isinstance(content, Path):
        with content.open("rb") as file:
            while piece := file.read(PIECE_BYTES):
                yield piece
        return
    for view in [memoryview(content)] if isinstance(content, bytes) else content:
        for start in range(0, len(view), PIECE_BYTES):
            yield cast(bytes, view[start : start + PIECE_BYTES])


class TextStream:
    """A command's output: bytes in, lines out. Keeps all of it, or only its end if there is a callback for lines."""

    def __init__(self, on_line: Callable[[str], None] | None) -> None:
        self._decoder = codecs.getincrementaldecoder("utf-8")(errors="replace")
        self._on_line = on_line
        self._parts: deque[str] = deque()
        self._open_line: list[str] = []
        """The pieces of the line that has no end yet."""
        self._size = 0

    @property
    def whole(self) -> str:
        return "".join(self._parts)

    def feed(self, piece: bytes, *, last: bool = False) -> None:
        text = self._decoder.decode(piece, last)
        self._parts.append(text)
        if self._on_line:
            self._size += len(text)
            while self._size - len(self._parts[0]) >= TAIL_CHARACTERS:
                self._size -= len(self._parts.popleft())
            first, *others = text.split("\n")
            self._open_line.append(first)
            for other in others:
                self._end_line()
                self._open_line.append(other)
            if last and any(self._open_line):
                self._end_line()

    def _end_line(self) -> None:
        assert self._on_line is not None
        line = "".join(self._open_line)
        self._open_line.clear()
        self._on_line(line.removesuffix("\r"))


class LoopCalls:
    """Runs coroutines of a connection on its loop, for callers of other threads; `close` cancels them and closes the
    link.
    """

    def __init__(self, endpoint: Endpoint, link: SSHLink, loop: Loop | None) -> None:
        self.is_closed = True  # for `__del__`, if no loop can be made
        self.endpoint = endpoint
        self._link = link
        self._owns_loop = loop is None
        self._loop = loop or Loop()
        self._tasks: set[asyncio.Task[Any]] = set()  # touched on the loop's thread only
        self.is_closed = False

    def call[T](self, coroutine: Coroutine[Any, Any, T], timeout_seconds: float | None = None) -> T:
        """Run a coroutine on the loop and return its result.

        Raises Unreachable once this is closed, TimeoutError after `timeout_seconds`.
        """
        if self.is_closed:
            coroutine.close()
            raise Unreachable(f"the SSH connection to {self.endpoint} is closed")
        return self._loop.call(self._watched(coroutine), timeout_seconds)

    def call_command[T](
        self,
        deadline: float | None,
        coroutine: Coroutine[Any, Any, T],
        command: str,
        text: TextStream,
        *,
        begun: bool = False,
    ) -> T:
        """`call` for a step of a command that has a deadline, of `time.monotonic`.

        Raises CommandTimedOut after it, with the output so far.
        """
        try:
            return self.call(coroutine, None if deadline is None else max(0.0, deadline - time.monotonic()))
        except TimeoutError as error:
            raise CommandTimedOut(
                f"still running on {self.endpoint} at its deadline: {short(command)}", output=text.whole
            ) from error
        except Unreachable as error:
            if begun and not isinstance(error, ConnectionLost):  # closed while this thread was in `on_line`
                raise ConnectionLost(f"{error}, under: {short(command)}") from error
            raise

    def call_transfer[T](self, coroutine: Coroutine[Any, Any, T], undone: str, timeout_seconds: float | None) -> T:
        """`call` for the transfer of a file. Raises CommandTimedOut, which says what was not done."""
        try:
            return self.call(coroutine, timeout_seconds)
        except TimeoutError as error:
            raise CommandTimedOut(f"{undone} within {timeout_seconds} s", output="") from error

    def call_quietly(self, coroutine: Coroutine[Any, Any, None]) -> None:
        """`call` for what tidies up after a command."""
        try:
            self.call(coroutine)
        except Unreachable:
            pass  # the connection ended with the command

    def close(self) -> None:
        """Cancel all calls, which raise ConnectionLost in their threads, and close the link. May be called twice."""
        if self.is_closed:
            return
        self.is_closed = True
        try:
            self._loop.call(self._close())
        finally:
            if self._owns_loop:
                self._loop.close()

    def __del__(self) -> None:
        if not getattr(self, "is_closed", True):
            warnings.warn(
                f"the SSH connection to {self.endpoint} was never closed", ResourceWarning, source=self, stacklevel=1
            )
            if self._owns_loop:
                self._loop.close()

    async def _watched[T](self, coroutine: Coroutine[Any, Any, T]) -> T:
        """Run a coroutine so that `close` can cancel it; raise our own errors when the connection ends."""
        task = asyncio.current_task()
        assert task is not None
        self._tasks.add(task)
        try:
            return await coroutine
        except (asyncssh.Error, asyncssh.ChannelListenError, OSError) as error:
            if isinstance(error, asyncssh.ChannelOpenError | asyncssh.ChannelListenError) and self._link.ssh:
                raise Unreachable(f"{self.endpoint} refuses: {error}") from error
            # ETIMEDOUT too ends a connection, and is a TimeoutError
            if isinstance(error, asyncssh.Error | ConnectionError) or self._link.ssh is None:
                raise ConnectionLost(f"the SSH connection to {self.endpoint} is gone: {error}") from error
            raise
        finally:
            self._tasks.discard(task)

    async def _close(self) -> None:
        tasks = set(self._tasks)
        for task in tasks:
            task.cancel()
        if tasks:
            await asyncio.wait(tasks)
        await self._link.close()


def short(command: str) -> str:
    """Return a command in one line of at most 120 characters, for messages."""
    line = " ".join(command.split())
    return line if len(line) <= 120 else line[:117] + "..."


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
