"""SSH to one machine: run, put, forward. The one place where async meets sync.

A `Connection` is used from any thread and blocks its caller; asyncssh works behind it on the thread of a `Loop`. Its states:

    new ──connect──▶ connected ──the machine falls silent or hangs up──▶ lost ──reconnect──▶ connected
     └──────────────────┴──────────────────────── close ─────────────────┴──────────────────▶ closed

- new, lost: `run`, `put` and the forwards raise at once; nothing is dialled behind the caller's back.
- connected: a silent machine is noticed `keepalive_seconds * (keepalive_count + 1)` after its last word, a closed socket at once.
  What runs at that moment raises `ConnectionLost`: whether its command took effect is not known.
- `reconnect` keeps the pinned host key and opens the forwards again on the ports they had.
- closed is final and may be asked for twice; it interrupts whatever waits in other threads.

Host keys: the one that the endpoint names; else those that the known_hosts file has for this host; else the first one seen, held for the
life of the `Connection`. Any other refuses the connection with `HostKeyChanged`.
"""

from __future__ import annotations

# ruff: noqa: ASYNC109, ASYNC240  deadlines span several awaits; small local files are read before the first packet
import asyncio
import codecs
import concurrent.futures
import logging
import os
import shlex
import socket
import threading
import time
import warnings
from collections.abc import AsyncIterator, Callable, Coroutine, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from types import TracebackType
from typing import Any, Self

import asyncssh  # noqa: TID253  this file owns it
from asyncssh.public_key import get_default_public_key_algs  # noqa: TID253
from pydantic import BaseModel, ConfigDict, Field

from skyward_core.errors import BadRequest, CommandFailed, CommandTimedOut, ConnectionLost, CredentialsError, HostKeyChanged, Unreachable

CIPHERS = "^aes128-gcm@openssh.com,aes256-gcm@openssh.com"
"""Preferred where ~/.ssh/config has no opinion: with AES in the processor two to three times faster than chacha20 (shared/facts/testbed.md, section 3)."""
FIRST_PAUSE_SECONDS, LONGEST_PAUSE_SECONDS = 0.05, 1.0
FIRST_DIAL_SECONDS, LONGEST_DIAL_SECONDS = 3.0, 15.0  # the kernel repeats a lost SYN after 1, 3, 7 s: dialling anew finds a machine that just came up sooner
LOGIN_SECONDS = 30.0  # an sshd that looks up names without a name server answers after 10 to 20 s
CLOSE_SECONDS = 1.0
SESSIONS = 10
"""Commands at once on one connection; further ones wait. OpenSSH's default for MaxSessions, sshd_config(5)."""
PIECE_BYTES = 128 * 1024

PUT = """\
set -e
part="$1.part.$$"
trap 'rm -f -- "$part"' EXIT
trap 'exit 1' HUP INT TERM
if [ -d "$1" ]; then echo "$1 is a directory" >&2; exit 1; fi
mkdir -p -- "$(dirname -- "$1")"
umask 077
cat >"$part"
[ "$(wc -c <"$part")" -eq "$2" ] || { echo "only a part arrived" >&2; exit 1; }
chmod "$3" "$part"
mv -f -- "$part" "$1"
"""
"""A connection that dies looks to `cat` like the end of the file: hence the count before the rename."""


class Endpoint(BaseModel):
    """Where and as whom to log in. Plain JSON, no secrets: `key` is a path.

    What is None is decided by ~/.ssh/config and, after it, by OpenSSH's defaults: the port, the user, the keys and the agent, the known_hosts
    file. `host` may be an alias of that file.
    """

    model_config = ConfigDict(frozen=True, extra="forbid")

    host: str = Field(min_length=1)
    port: int | None = Field(default=None, ge=1, le=65535)
    user: str | None = None
    key: str | None = None
    """Path of a private key without passphrase. The agent and other keys are not tried then."""
    host_key: str | None = None
    """The machine's public key as in a `.pub` file: "ssh-ed25519 AAAA..."."""
    known_hosts: str | None = None
    """Path; "/dev/null" trusts the first key seen, which suits addresses that a cloud hands from one machine to the next."""
    config: str | None = None
    """Path of the file to read in place of ~/.ssh/config."""

    def __str__(self) -> str:
        host = f"[{self.host}]" if ":" in self.host else self.host
        return (f"{self.user}@" if self.user else "") + host + (f":{self.port}" if self.port else "")


@dataclass(frozen=True, slots=True)
class Completed:
    """How a command ended. `exit_code` as in `subprocess` (negative: the signal); `output` is stdout and stderr in the order of arrival."""

    exit_code: int
    output: str


class Loop:
    """A thread that runs an asyncio loop, for one connection or shared by many; whoever makes it closes it."""

    def __init__(self) -> None:
        self._loop = asyncio.new_event_loop()
        self._lock = threading.Lock()
        self._closed = False
        self._thread = threading.Thread(target=_turn, args=(self._loop,), name="skyward-ssh", daemon=True)
        self._thread.start()

    def call[T](self, coroutine: Coroutine[Any, Any, T], timeout_seconds: float | None = None) -> T:
        """Run a coroutine on the loop and return its result; raises TimeoutError, with the coroutine cancelled, when it takes longer."""
        with self._lock:
            if self._closed or threading.current_thread() is self._thread:
                coroutine.close()
                raise Unreachable("the SSH loop is closed" if self._closed else "a callback of an SSH connection must not wait for SSH")
            future = asyncio.run_coroutine_threadsafe(coroutine, self._loop)
        try:
            return future.result(timeout_seconds)
        except concurrent.futures.CancelledError:
            raise ConnectionLost("the SSH connection was closed meanwhile") from None
        finally:
            future.cancel()

    def close(self) -> None:
        """Cancel what still runs and end the thread. May be called twice."""
        with self._lock:
            first, self._closed = not self._closed, True
        if first:
            self._loop.call_soon_threadsafe(self._loop.stop)
        if threading.current_thread() is not self._thread:
            self._thread.join()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        self.close()


def _turn(loop: asyncio.AbstractEventLoop) -> None:
    """The life of the loop's thread. Knows the loop alone, so that an abandoned `Loop` can be collected."""
    log = logging.getLogger("asyncssh")
    if log.level == logging.NOTSET:
        log.setLevel(logging.WARNING)  # it tells each connection and channel at INFO, into the task logs of orchestrators
    asyncio.set_event_loop(loop)
    try:
        loop.run_forever()
        loop.run_until_complete(_settle())
        loop.run_until_complete(loop.shutdown_asyncgens())
        loop.run_until_complete(loop.shutdown_default_executor())
    finally:
        asyncio.set_event_loop(None)
        loop.close()


async def _settle() -> None:
    """Cancel all tasks, then let transports that were told to close do so."""
    tasks = asyncio.all_tasks() - {asyncio.current_task()}
    for task in tasks:
        task.cancel()
    await asyncio.gather(*tasks, return_exceptions=True)
    for _ in range(3):
        await asyncio.sleep(0)


@dataclass(frozen=True, slots=True)
class _Forward:
    """A forwarded port: from `listen_port`, here or (`is_remote`) there, to `host:port` on the other side."""

    is_remote: bool
    listen_host: str
    listen_port: int
    host: str
    port: int


class Connection:
    """An SSH connection to one machine; see the head of this file for its states. Safe to use from many threads at once.

    `on_lost` is told, once for each loss, why the connection went away; it is called on the loop's thread and must not wait.
    """

    def __init__(
        self,
        endpoint: Endpoint,
        *,
        loop: Loop | None = None,
        keepalive_seconds: float = 5.0,
        keepalive_count: int = 2,
        on_lost: Callable[[str], None] | None = None,
    ) -> None:
        self._is_closed = True
        self._pinned = _host_key(endpoint)
        self.endpoint = endpoint
        self._keepalive = (keepalive_seconds, keepalive_count)
        self._on_lost = on_lost
        self._owns_loop = loop is None
        self._loop = loop or Loop()
        self._is_closed = False
        # What follows is touched on the loop's thread only.
        self._ssh: asyncssh.SSHClientConnection | None = None
        self._lost = "not connected yet"
        self._forwards: list[_Forward] = []
        self._dialling = asyncio.Lock()
        self._sessions = asyncio.Semaphore(SESSIONS)
        self._tasks: set[asyncio.Task[Any]] = set()

    # ── its life ─────────────────────────────────────────────────────────────────────────────────────────────────────

    def connect(self, timeout_seconds: float = 60.0, *, auth_grace_seconds: float = 0.0) -> Self:
        """Connect, dialling again with growing pauses while nobody answers; on a living connection do nothing.

        Raises at once CredentialsError (the machine refuses our keys), HostKeyChanged and BadRequest (a key or configuration file that cannot be
        read), and Unreachable after `timeout_seconds`. A machine that was launched a moment ago runs its sshd before cloud-init has installed our key:
        for `auth_grace_seconds` a refusal is not final.
        """
        self._call(self._connect(timeout_seconds, auth_grace_seconds, anew=False))
        return self

    def reconnect(self, timeout_seconds: float = 60.0) -> None:
        """Leave the present connection, living or not, and make a new one to the same machine, with the same forwards. Raises as `connect` does."""
        self._call(self._connect(timeout_seconds, 0.0, anew=True))

    def close(self) -> None:
        """End the connection, its commands and its forwards. May be called twice, and while other threads wait in it: they get ConnectionLost."""
        if self._is_closed:
            return
        self._is_closed = True
        try:
            self._loop.call(self._close())
        finally:
            if self._owns_loop:
                self._loop.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        self.close()

    def __del__(self) -> None:
        if not getattr(self, "_is_closed", True):
            warnings.warn(f"the SSH connection to {self.endpoint} was never closed", ResourceWarning, source=self, stacklevel=1)
            if self._owns_loop:
                self._loop.close()

    @property
    def is_connected(self) -> bool:
        """True while the machine answers, as far as is known."""
        return self._ssh is not None

    @property
    def host_key(self) -> str | None:
        """The machine's public key as in a `.pub` file, or None before it was seen. For `Endpoint.host_key` of another process."""
        return self._pinned.export_public_key().decode().strip() if self._pinned else None

    # ── its use ──────────────────────────────────────────────────────────────────────────────────────────────────────

    def run(
        self,
        command: str,
        *,
        stdin: bytes | str | Path | None = None,
        on_line: Callable[[str], None] | None = None,
        timeout_seconds: float | None = None,
    ) -> Completed:
        """Run a command in the user's login shell and return how it ended, whatever its exit code.

        `stdin` is bytes, text, or a file to read them from; without it the command reads the end of file. `on_line` is called in this thread with each
        line, without its end, as soon as it is there; a command waits when it writes faster than that. Two round trips.
        Raises CommandTimedOut after `timeout_seconds`, ConnectionLost if the connection dies first.
        On a time-out, and on an exception in `on_line` or in this thread, the command's processes are sent SIGKILL.
        """
        deadline = None if timeout_seconds is None else time.monotonic() + timeout_seconds
        content = stdin.encode() if isinstance(stdin, str) else stdin
        text = _Text(on_line)
        ended = False
        process = self._within(deadline, self._start(command, content), command, text)
        try:
            while piece := self._within(deadline, _read(process), command, text):
                text.feed(piece)
            text.feed(b"", last=True)
            exit_code = self._within(deadline, self._exit_code(process, command), command, text)
            ended = True
            return Completed(exit_code, text.whole)
        finally:
            self._quietly(self._leave(process, kill=not ended))

    def put(self, source: Path | bytes, remote: str, *, mode: int = 0o644, timeout_seconds: float | None = None) -> None:
        """Write a file on the machine, in the place of one that may be there. Others see the old file or the whole new one, never a part.

        `source` is a file here or its content; `remote` is relative to the user's home, its folders are made. Needs sh, cat, wc and mv there, no SFTP.
        Raises CommandFailed (no space, no permission, a folder of that name), ConnectionLost and CommandTimedOut.
        """
        size = len(source) if isinstance(source, bytes) else source.stat().st_size
        command = shlex.join(["sh", "-c", PUT, "put", remote, str(size), f"{mode:o}"])
        try:
            completed = self.run(command, stdin=source, timeout_seconds=timeout_seconds)
        except CommandTimedOut as error:
            raise CommandTimedOut(f"{remote} was not written on {self.endpoint} within {timeout_seconds} s", output=error.output) from None
        if completed.exit_code:
            raise CommandFailed(f"{remote} could not be written on {self.endpoint}", completed.exit_code, completed.output)

    def forward_local(self, remote_host: str, remote_port: int, *, local_port: int = 0) -> int:
        """Listen on 127.0.0.1 here and pass connections on to `remote_host:remote_port` as the machine sees it; return the port here.

        A connection to a port that nobody listens on there is accepted here and closed. Lasts until `close`, across `reconnect`.
        """
        return self._call(self._add_forward(_Forward(is_remote=False, listen_host="127.0.0.1", listen_port=local_port, host=remote_host, port=remote_port)))

    def forward_remote(self, local_host: str, local_port: int, *, remote_host: str = "127.0.0.1", remote_port: int = 0) -> int:
        """Listen on the machine and pass connections on to `local_host:local_port` as this machine sees it; return the port there.

        A `remote_host` that is not loopback needs `GatewayPorts clientspecified` in the machine's sshd_config. Lasts until `close`, across `reconnect`.
        """
        return self._call(self._add_forward(_Forward(is_remote=True, listen_host=remote_host, listen_port=remote_port, host=local_host, port=local_port)))

    # ── from the caller's thread to the loop ─────────────────────────────────────────────────────────────────────────

    def _call[T](self, coroutine: Coroutine[Any, Any, T], timeout_seconds: float | None = None) -> T:
        if self._is_closed:
            coroutine.close()
            raise Unreachable(f"the SSH connection to {self.endpoint} is closed")
        return self._loop.call(self._watched(coroutine), timeout_seconds)

    async def _watched[T](self, coroutine: Coroutine[Any, Any, T]) -> T:
        """Run a coroutine so that `_close` can cancel it; tell a connection's end in our words."""
        task = asyncio.current_task()
        assert task is not None
        self._tasks.add(task)
        try:
            return await coroutine
        except (asyncssh.Error, asyncssh.ChannelListenError, OSError) as error:
            if isinstance(error, asyncssh.ChannelOpenError | asyncssh.ChannelListenError) and self._ssh:
                raise Unreachable(f"{self.endpoint} refuses: {error}") from error
            if isinstance(error, asyncssh.Error | ConnectionError) or self._ssh is None:  # ETIMEDOUT too ends a connection, and is a TimeoutError
                raise ConnectionLost(f"the SSH connection to {self.endpoint} is gone: {error}") from error
            raise
        finally:
            self._tasks.discard(task)

    def _within[T](self, deadline: float | None, coroutine: Coroutine[Any, Any, T], command: str, text: _Text) -> T:
        try:
            return self._call(coroutine, None if deadline is None else max(0.0, deadline - time.monotonic()))
        except TimeoutError as error:
            raise CommandTimedOut(f"still running on {self.endpoint} at its deadline: {_short(command)}", output=text.whole) from error

    def _quietly(self, coroutine: Coroutine[Any, Any, None]) -> None:
        try:
            self._call(coroutine)
        except Unreachable:
            pass  # the connection ended with the command

    # ── on the loop: connecting ──────────────────────────────────────────────────────────────────────────────────────

    async def _connect(self, timeout: float, grace: float, *, anew: bool) -> None:
        async with self._dialling:
            if self._ssh and not anew:
                return
            await self._drop("left for a new one")
            settings = await self._settings()
            started = asyncio.get_running_loop().time()
            problem: BaseException | None = None
            async for left, patience in _attempts(started, timeout):
                try:
                    await self._dial(settings, patience, min(left, LOGIN_SECONDS))
                    await self._open_forwards()
                    return
                except asyncssh.PermissionDenied as error:
                    if asyncio.get_running_loop().time() - started >= grace:
                        raise CredentialsError(f"{self.endpoint} refuses our keys: {error}. Check the user, the key and the agent.") from error
                    problem = error
                except (asyncssh.HostKeyNotVerifiable, asyncssh.KeyExchangeFailed, asyncssh.IllegalUserName) as error:
                    raise Unreachable(f"{self.endpoint}, or a jump host before it, cannot be trusted: {error}") from error
                except socket.gaierror as error:
                    if error.errno == socket.EAI_NONAME:
                        raise Unreachable(f"there is no host named {self.endpoint.host}") from error
                    problem = error
                except (asyncssh.Error, asyncssh.ChannelListenError, OSError) as error:
                    problem = error
                await self._drop("its forwards could not be opened")
            raise Unreachable(f"no SSH connection to {self.endpoint} within {timeout:g} s; the last try ended with: {_words(problem)}") from problem

    async def _settings(self) -> dict[str, Any]:
        """What to pass to asyncssh.connect. Reads the user's files, before the first packet: what is wrong with them is not the network's fault."""
        endpoint = self.endpoint
        named: dict[str, Any] = {"host": endpoint.host, "config": [endpoint.config] if endpoint.config else ()}
        named |= {name: value for name, value in (("port", endpoint.port), ("username", endpoint.user)) if value is not None}
        try:
            base = await asyncssh.SSHClientConnectionOptions.construct(client_keys=None, **named)
            identities = [os.path.expanduser(str(path)) for path in _listed(base.config.get("IdentityFile"))]
            if endpoint.key:
                named |= {"client_keys": [asyncssh.read_private_key(Path(endpoint.key).expanduser())], "agent_path": None}
            elif identities:
                named |= {"client_keys": [path for path in identities if os.path.exists(path)], "ignore_encrypted": True}  # as OpenSSH does
        except asyncssh.KeyEncryptionError as error:
            raise CredentialsError(f"the key {endpoint.key} has a passphrase: add it to your agent and leave `key` out") from error
        except (asyncssh.KeyImportError, OSError, ValueError) as error:
            raise BadRequest(f"cannot prepare a connection to {endpoint}: {error}") from error
        # asyncssh says None for "UserKnownHostsFile none" and an empty list where the user has not said anything.
        files = [endpoint.known_hosts] if endpoint.known_hosts else [] if base.known_hosts is None else _listed(base.known_hosts) or ["~/.ssh/known_hosts"]
        return named | {
            "known_hosts": [os.path.expanduser(str(path)) for path in files],
            "encryption_algs": () if base.config.get("Ciphers") else CIPHERS,
            "keepalive_interval": self._keepalive[0],
            "keepalive_count_max": self._keepalive[1],
            "agent_forwarding": False,
            "x11_forwarding": False,
            "connect_timeout": None,
        }

    async def _dial(self, settings: dict[str, Any], dial_seconds: float, login_seconds: float) -> None:
        """One attempt: `dial_seconds` for the machine to pick up, `login_seconds` for all of it."""
        guard = _Guard(self, [path for path in settings["known_hosts"] if os.access(path, os.R_OK)])
        arguments = settings | {"known_hosts": guard.trusted, "client_factory": lambda: guard, "login_timeout": login_seconds}
        if self._pinned:  # other kinds of keys stay on offer, so that a machine that has none of this kind is told from a broken one
            arguments["server_host_key_algs"] = _unique([*self._pinned.sig_algorithms, *get_default_public_key_algs()])
        deadline = asyncio.get_running_loop().time() + login_seconds
        connecting = asyncio.ensure_future(_opened(arguments))
        try:
            async with asyncio.timeout(dial_seconds):
                await asyncio.wait([connecting, asyncio.ensure_future(guard.picked_up.wait())], return_when=asyncio.FIRST_COMPLETED)
            async with asyncio.timeout_at(deadline):
                ssh = await connecting
        except asyncssh.HostKeyNotVerifiable:
            if guard.refused:
                raise HostKeyChanged(guard.refused) from None
            raise
        finally:
            guard.picked_up.set()
            if not connecting.done():
                connecting.cancel()
                await asyncio.gather(connecting, return_exceptions=True)
        self._pinned = self._pinned or ssh.get_server_host_key()
        self._ssh, self._lost = ssh, ""
        if ssh.is_closed():
            self._note_loss(guard, None)

    def _note_loss(self, guard: _Guard, error: Exception | None) -> None:
        """Called when the connection of a guard ends; one that is no longer ours, or was never, does not count."""
        if self._ssh is None or guard.ssh is not self._ssh:
            return
        self._ssh, self._lost = None, _words(error) if error else "the machine closed it"
        if self._on_lost:
            self._on_lost(self._lost)

    async def _drop(self, why: str) -> None:
        ssh, self._ssh = self._ssh, None
        if ssh is None:
            return
        self._lost = why
        ssh.close()
        try:
            async with asyncio.timeout(CLOSE_SECONDS):
                await ssh.wait_closed()
        except TimeoutError:  # what is still to be sent reaches nobody
            ssh.abort()
            await ssh.wait_closed()

    async def _close(self) -> None:
        tasks = set(self._tasks)
        for task in tasks:
            task.cancel()
        if tasks:
            await asyncio.wait(tasks)
        await self._drop("closed")

    # ── on the loop: forwards ────────────────────────────────────────────────────────────────────────────────────────

    async def _add_forward(self, wanted: _Forward) -> int:
        port = await self._open_forward(self._living(), wanted)
        self._forwards.append(_Forward(wanted.is_remote, wanted.listen_host, port, wanted.host, wanted.port))
        return port

    async def _open_forwards(self) -> None:
        ssh = self._living()
        for forward in self._forwards:
            await self._open_forward(ssh, forward)

    @staticmethod
    async def _open_forward(ssh: asyncssh.SSHClientConnection, forward: _Forward) -> int:
        open_one = ssh.forward_remote_port if forward.is_remote else ssh.forward_local_port
        listener = await open_one(forward.listen_host, forward.listen_port, forward.host, forward.port)
        return listener.get_port()

    def _living(self) -> asyncssh.SSHClientConnection:
        if self._ssh is None:
            kind = Unreachable if self._lost == "not connected yet" else ConnectionLost
            raise kind(f"no SSH connection to {self.endpoint}: {self._lost}")
        return self._ssh

    # ── on the loop: commands ────────────────────────────────────────────────────────────────────────────────────────

    async def _start(self, command: str, content: bytes | Path | None) -> _Process:
        stdin = asyncssh.DEVNULL if content is None else asyncssh.PIPE
        self._living()
        await self._sessions.acquire()
        try:
            channel = await self._living().create_process(command, stdin=stdin, stderr=asyncssh.STDOUT, encoding=None, request_pty=False, x11_forwarding=False)
        except BaseException:
            self._sessions.release()
            raise
        return _Process(channel, None if content is None else asyncio.ensure_future(_feed(channel.stdin, content)))

    async def _exit_code(self, process: _Process, command: str) -> int:
        await process.channel.wait_closed()
        exit_code = process.channel.returncode
        if exit_code is None:  # asyncssh tells a connection that died just like this, whatever `check` says
            raise ConnectionLost(f"{self.endpoint} went away under: {_short(command)}" + f" ({self._lost})" * bool(self._lost))
        return exit_code

    async def _leave(self, process: _Process, *, kill: bool) -> None:
        self._sessions.release()
        if process.feeding:
            process.feeding.cancel()
        if kill:
            try:
                process.channel.kill()
            except OSError:
                pass  # it has ended
        process.channel.close()


@dataclass(frozen=True, slots=True)
class _Process:
    channel: asyncssh.SSHClientProcess[bytes]
    feeding: asyncio.Task[None] | None


async def _read(process: _Process) -> bytes:
    return await process.channel.stdout.read(PIECE_BYTES)


async def _feed(stdin: asyncssh.SSHWriter[bytes], content: bytes | Path) -> None:
    """Send all of a command's input, no faster than it reads."""
    try:
        for piece in _pieces(content):
            stdin.write(piece)
            await stdin.drain()
    except (asyncssh.Error, OSError):
        pass  # the command ended without reading all of it, or the connection did: the reading side tells which
    try:
        stdin.write_eof()
    except OSError:
        pass  # likewise


def _pieces(content: bytes | Path) -> Iterator[bytes]:
    if isinstance(content, bytes):
        for start in range(0, len(content), PIECE_BYTES):
            yield content[start : start + PIECE_BYTES]
        return
    with content.open("rb") as file:
        while piece := file.read(PIECE_BYTES):
            yield piece


class _Text:
    """A command's output: bytes in, lines out, the whole of it kept."""

    def __init__(self, on_line: Callable[[str], None] | None) -> None:
        self._decoder = codecs.getincrementaldecoder("utf-8")(errors="replace")
        self._on_line = on_line
        self._parts: list[str] = []
        self._open_line = ""

    @property
    def whole(self) -> str:
        return "".join(self._parts)

    def feed(self, piece: bytes, *, last: bool = False) -> None:
        text = self._decoder.decode(piece, last)
        self._parts.append(text)
        if self._on_line:
            *lines, self._open_line = (self._open_line + text).split("\n")
            if last and self._open_line:
                lines.append(self._open_line)
            for line in lines:
                self._on_line(line.removesuffix("\r"))


class _Guard(asyncssh.SSHClient):
    """What is seen of one attempt to connect: when the machine picks up, which key it shows, when and why it hangs up."""

    def __init__(self, connection: Connection, files: list[str]) -> None:
        self.picked_up = asyncio.Event()
        self.refused = ""
        self.ssh: asyncssh.SSHClientConnection | None = None
        self._connection = connection
        self._files = files
        self._knows_some = False

    def trusted(self, host: str, address: str, port: int | None) -> Sequence[Any]:
        """The keys that the machine may show, as asyncssh's `known_hosts` wants them; none: whichever it shows first."""
        pinned = self._connection._pinned  # pyright: ignore[reportPrivateUsage]
        if pinned:
            found: Sequence[Any] = ([pinned], [], [], [], [], [], [])
        elif self._files:
            found = asyncssh.match_known_hosts(asyncssh.read_known_hosts(self._files), host, address, port)
        else:
            found = ([], [], [], [], [], [], [])
        self._knows_some = bool(found[0] or found[1])
        return found

    def connection_made(self, conn: asyncssh.SSHClientConnection) -> None:
        self.ssh = conn
        self.picked_up.set()

    def validate_host_public_key(self, host: str, addr: str, port: int, key: asyncssh.SSHKey) -> bool:
        """Asked for keys that are not among the trusted ones."""
        if self._knows_some:
            endpoint = self._connection.endpoint
            known = self._connection.host_key or f"the one in {' or '.join(self._files)}"
            shown = key.export_public_key().decode().strip()
            self.refused = f"{endpoint} shows the host key {shown}, and not the known one, {known}: another machine may be answering"
        return not self._knows_some

    def connection_lost(self, exc: Exception | None) -> None:
        self._connection._note_loss(self, exc)  # pyright: ignore[reportPrivateUsage]


async def _attempts(started: float, timeout: float) -> AsyncIterator[tuple[float, float]]:
    """Yield (seconds left, seconds to wait for the machine to pick up) for each attempt, with a pause between them that grows; at least one."""
    clock = asyncio.get_running_loop().time
    pause, patience = FIRST_PAUSE_SECONDS, FIRST_DIAL_SECONDS
    while True:
        left = max(0.01, started + timeout - clock())
        yield left, min(left, patience)
        left = started + timeout - clock()
        if left <= 0:
            return
        await asyncio.sleep(min(pause, left))
        pause, patience = min(pause * 1.6, LONGEST_PAUSE_SECONDS), min(patience * 1.5, LONGEST_DIAL_SECONDS)


def _host_key(endpoint: Endpoint) -> asyncssh.SSHKey | None:
    try:
        return asyncssh.import_public_key(endpoint.host_key) if endpoint.host_key else None
    except asyncssh.KeyImportError as error:
        raise BadRequest(f"the host key of {endpoint} must be text as in a .pub file, not {endpoint.host_key!r}") from error


async def _opened(arguments: dict[str, Any]) -> asyncssh.SSHClientConnection:
    return await asyncssh.connect(**arguments)


def _listed(value: object) -> list[Any]:
    return [value] if isinstance(value, str) else list(value) if isinstance(value, list | tuple) else []


def _unique(algorithms: list[bytes]) -> list[str]:
    return list(dict.fromkeys(algorithm.decode() for algorithm in algorithms))


def _words(error: BaseException | None) -> str:
    return "no answer" if error is None or (isinstance(error, TimeoutError) and not str(error)) else str(error) or type(error).__name__


def _short(command: str) -> str:
    line = " ".join(command.split())
    return line if len(line) <= 120 else line[:117] + "..."
