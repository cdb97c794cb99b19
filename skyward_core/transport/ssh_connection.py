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

Jump hosts (ProxyJump of the configuration file) must be known: by the endpoint's `known_hosts` file if it has keys of them, else by the files that the
configuration names, as in OpenSSH.

An endpoint with a `proxy_command` is reached through that command: one process for each connection, which ends with it (`proxy_command.py`).

Commands, files and shells share SESSIONS places on one connection, and wait for one when all are taken. What stays for long (a `Shell`, a `run` that follows
a log) holds one of them all that time: whoever keeps more than SESSIONS - 4 of those lets files wait for each other.

Speed (benchmarks/ssh_path.py): asyncssh moves 500 to 700 MiB/s where its own streams are left out. So bytes go from the caller's buffers into the channel and
from the channel into one buffer of the right size. Its packets cannot be larger than sshd's 32 KiB; uvloop was tried and gains nothing.
"""

from __future__ import annotations

# ruff: noqa: ASYNC109, ASYNC240  deadlines span several awaits; small local files are read before the first packet
import asyncio
import os
import posixpath
import secrets
import shlex
import socket
import threading
import time
import warnings
from collections.abc import AsyncGenerator, AsyncIterator, Buffer, Callable, Coroutine, Sequence
from contextlib import asynccontextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from types import TracebackType
from typing import Any, Self

import asyncssh  # noqa: TID253  this file owns it
from asyncssh.public_key import get_default_public_key_algs  # noqa: TID253

from skyward_core.errors import BadRequest, CommandFailed, CommandTimedOut, ConnectionLost, CredentialsError, HostKeyChanged, Unreachable
from skyward_core.machines.instances import Endpoint
from skyward_core.transport.proxy_command import Proxy
from skyward_core.transport.ssh_channels import Download, Inbox, Session, Text
from skyward_core.transport.ssh_loop import Loop

CIPHERS = "^aes128-gcm@openssh.com,aes256-gcm@openssh.com"
"""Preferred where ~/.ssh/config has no opinion: with AES in the processor two to three times faster than chacha20 (shared/facts/testbed.md, section 3)."""
NO_FORWARDING = (
    "refuses to forward ports (AllowTcpForwarding no, PermitOpen, or a key with `restrict` or `no-port-forwarding`): a pool reaches its nodes through one."
    " Set `AllowTcpForwarding yes` in its sshd_config"
)
OPEN_PROHIBITED = 1  # "administratively prohibited", RFC 4254, 5.1
FIRST_PAUSE_SECONDS, LONGEST_PAUSE_SECONDS = 0.05, 1.0
FIRST_DIAL_SECONDS, LONGEST_DIAL_SECONDS = 3.0, 15.0  # the kernel repeats a lost SYN after 1, 3, 7 s: dialling anew finds a machine that just came up sooner
LOGIN_SECONDS = 30.0  # an sshd that looks up names without a name server answers after 10 to 20 s
CLOSE_SECONDS = 1.0
KILL_SECONDS = 2.0
REFUSED_SECONDS = 5.0  # sshd counts a session a moment longer than we do; where MaxSessions is below ours, one of ours may end
SESSIONS = 10
"""Commands at once on one connection; further ones wait. OpenSSH's default for MaxSessions, sshd_config(5)."""
FETCH_WINDOW_BYTES = 16 << 20
"""What the machine may send before we have told it that we took some: 16 MiB fill 1 Gbit/s over 130 ms. asyncssh's own 2 MiB are enough for lines."""
VERDICTS = (asyncssh.PermissionDenied, asyncssh.HostKeyNotVerifiable, asyncssh.KeyExchangeFailed, asyncssh.IllegalUserName)
"""What a machine itself has said of us, or we of it: not the fault of the way to it."""

PUT = """\
set -e
part="$1.part.$$"
trap 'rm -f -- "$part"' EXIT
trap 'exit 1' HUP INT TERM
trap '' PIPE
if [ -d "$1" ]; then echo "$1 is a directory" >&2; exit 1; fi
[ -d "$4" ] || mkdir -p -- "$4"
umask 077
if [ -n "$5" ]; then gzip -dc >"$part"; else cat >"$part"; fi
[ "$(wc -c <"$part")" -eq "$2" ] || { echo "only a part arrived" >&2; exit 1; }
[ "$3" = 600 ] || chmod "$3" "$part"
mv -f -- "$part" "$1"
trap - EXIT
"""
"""Writes stdin to $1, with $5 decompressed, with mode $3 in the folder $4; it has $2 bytes there.

A connection that dies looks to `cat` like the end of the file: hence the count first.
Nobody listens then: saying so must not kill the shell before it has removed its part.
"""

FETCH = """\
set -e
exec 3<"$1"
echo "$2 $(wc -c <"$1")"
cat <&3
[ -n "$3" ] || exit 0
exec >&- 2>&-
read -r _
rm -f -- "$1"
"""
"""Writes a line with the size of the file $1, after the word $2, and the file. With $3 it removes the file once somebody says, on stdin, that it has it."""

LEADER = 'SKYWARD_COMMAND=$1.$$ exec "${SHELL:-/bin/sh}" -c "$2"'
KILL = """\
leader=$(cat /proc/[0-9]*/environ 2>/dev/null | tr '\\0' '\\n' | sed -n "s/^SKYWARD_COMMAND=$1[.]//p" | head -n 1)
[ -z "$leader" ] || kill -KILL "-$leader"
"""
"""OpenSSH 9.2 ends the processes of a session when asked to, but not of one that runs as root: there, commands carry a name and the pid of their group."""

SHELL_LINE = "(eval {command}) </dev/null 2>&1; printf '\\n%s %s\\n' {mark} $?\n"
"""In a subshell of its own: a syntax error, or `exit`, ends a shell that reads its commands from stdin."""


@dataclass(frozen=True, slots=True)
class Completed:
    """How a command ended. `exit_code` as in `subprocess` (negative: the signal); `output` is stdout and stderr in the order of arrival.

    Of a command whose lines were told one by one (`on_line`), which may run for days, `output` has the end only: 64 Ki characters or some more.
    """

    exit_code: int
    output: str


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
        self._proxy: Proxy | None = None  # of the present connection, or of the one that is being made
        self._endings: set[asyncio.Task[None]] = set()  # of proxies

    # ── its life ─────────────────────────────────────────────────────────────────────────────────────────────────────

    def connect(self, timeout_seconds: float = 60.0, *, auth_grace_seconds: float = 0.0) -> Self:
        """Connect, dialling again with growing pauses while nobody answers; on a living connection do nothing.

        Raises at once CredentialsError (the machine refuses our keys), HostKeyChanged and BadRequest (a key or configuration file that cannot be
        read), and Unreachable after `timeout_seconds`. A machine that was launched a moment ago runs its sshd before cloud-init has installed our key:
        for `auth_grace_seconds` a refusal is not final, nor is another host key for the endpoint's `host_key_grace_seconds` after it was first shown.
        Where a proxy command leads there, which may take minutes to find the machine, the grace begins with the first refusal.
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
        Raises CommandTimedOut after `timeout_seconds`, ConnectionLost if the connection dies or is closed first.
        On a time-out, and on an exception in `on_line` or in this thread, the command's processes are sent SIGKILL, those that left its process group excepted.
        """
        deadline = None if timeout_seconds is None else time.monotonic() + timeout_seconds
        content = stdin.encode() if isinstance(stdin, str) else stdin
        text = Text(on_line)
        ended = False
        inbox = self._within(deadline, self._start(command, content), command, text)
        try:
            while piece := self._within(deadline, inbox.read(), command, text, begun=True):
                text.feed(piece)
            text.feed(b"", last=True)
            exit_code = self._within(deadline, self._exit_code(inbox, command), command, text, begun=True)
            ended = True
            return Completed(exit_code, text.whole)
        finally:
            self._quietly(self._leave(inbox, kill=not ended))

    def shell(self) -> Shell:
        """Return a shell that stays, for commands that are run often. It is started with its first command, and anew after a `reconnect`."""
        return Shell(self)

    def put(
        self,
        source: Path | Buffer | Sequence[Buffer],
        remote: str,
        *,
        mode: int = 0o644,
        unpacked_bytes: int | None = None,
        timeout_seconds: float | None = None,
    ) -> None:
        """Write a file on the machine, in the place of one that may be there. Others see the old file or the whole new one, never a part.

        `source` is a file here, or its content: bytes or any other contiguous buffer, or several of them to be written one after another. `remote` is relative
        to the user's home, its folders are made. Two round trips, however small or large. Needs sh, cat, wc and mv there, no SFTP.
        With `unpacked_bytes` the source is compressed with gzip and becomes a file of so many bytes, which needs gzip there, and no more room than the file.
        Raises CommandFailed (no space, no permission, a folder of that name), ConnectionLost and CommandTimedOut.
        """
        content = source if isinstance(source, Path) else [memoryview(one).cast("B") for one in ([source] if isinstance(source, Buffer) else source)]
        size = content.stat().st_size if isinstance(content, Path) else sum(len(one) for one in content)
        is_packed = unpacked_bytes is not None
        words = [remote, str(unpacked_bytes if is_packed else size), f"{mode:o}", posixpath.dirname(remote) or ".", "gzip" * is_packed]
        command = shlex.join(["sh", "-c", PUT, "put", *words])
        failed = f"{remote} could not be written on {self.endpoint}"
        self._transfer(self._put(command, content, failed), f"{remote} was not written on {self.endpoint}", timeout_seconds)

    def fetch(self, remote: str, *, into: bytearray | memoryview | None = None, remove: bool = False, timeout_seconds: float | None = None) -> memoryview:
        """Return the content of a file of the machine: the first bytes of `into`, or else memory of its own, which is writable and lives as long as its views.

        With `remove` the file is removed once all of it is here, for one round trip more than the two, and gone when this returns.
        Raises CommandFailed (no such file, no permission, changed while it was read), BadRequest (`into` is too small), ConnectionLost and CommandTimedOut.
        """
        room = None if into is None else memoryview(into).cast("B")
        return self._transfer(self._fetch(remote, room, remove=remove), f"{remote} was not read from {self.endpoint}", timeout_seconds)

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

    def _within[T](self, deadline: float | None, coroutine: Coroutine[Any, Any, T], command: str, text: Text, *, begun: bool = False) -> T:
        try:
            return self._call(coroutine, None if deadline is None else max(0.0, deadline - time.monotonic()))
        except TimeoutError as error:
            raise CommandTimedOut(f"still running on {self.endpoint} at its deadline: {_short(command)}", output=text.whole) from error
        except Unreachable as error:
            if begun and not isinstance(error, ConnectionLost):  # closed while this thread was in `on_line`
                raise ConnectionLost(f"{error}, under: {_short(command)}") from error
            raise

    def _transfer[T](self, coroutine: Coroutine[Any, Any, T], undone: str, timeout_seconds: float | None) -> T:
        try:
            return self._call(coroutine, timeout_seconds)
        except TimeoutError as error:
            raise CommandTimedOut(f"{undone} within {timeout_seconds} s", output="") from error

    def _quietly(self, coroutine: Coroutine[Any, Any, None]) -> None:
        try:
            self._call(coroutine)
        except Unreachable:
            pass  # the connection ended with the command

    def check_forwarding(self) -> None:
        """Raise Unreachable if the machine's sshd forwards no ports: every forward would accept connections here, and close them."""
        self._call(self._check_forwarding())

    # ── on the loop: connecting ──────────────────────────────────────────────────────────────────────────────────────

    async def _connect(self, timeout: float, grace: float, *, anew: bool) -> None:
        async with self._dialling:
            if self._ssh and not anew:
                return
            await self._drop("left for a new one")
            settings = await self._settings()
            started = asyncio.get_running_loop().time()
            answered_at: float | None = None
            refused_at: float | None = None
            problem: BaseException | None = None
            async for left, patience in _attempts(started, timeout):
                try:
                    await self._dial(settings, patience, min(left, LOGIN_SECONDS))
                    await self._open_forwards()
                    return
                except asyncssh.PermissionDenied as error:
                    refused_at = refused_at or asyncio.get_running_loop().time()
                    if asyncio.get_running_loop().time() - (refused_at if self.endpoint.proxy_command else started) >= grace:
                        raise CredentialsError(f"{self.endpoint} refuses our keys: {error}. Check the user, the key and the agent.") from error
                    problem = error
                except HostKeyChanged as error:
                    answered_at = answered_at or asyncio.get_running_loop().time()
                    if not grace or asyncio.get_running_loop().time() - answered_at >= self.endpoint.host_key_grace_seconds:
                        raise
                    problem = error
                except (asyncssh.HostKeyNotVerifiable, asyncssh.KeyExchangeFailed, asyncssh.IllegalUserName) as error:
                    raise Unreachable(f"{self.endpoint}, or a jump host before it, cannot be trusted: {error}") from error
                except asyncssh.ChannelOpenError as error:
                    if error.code == OPEN_PROHIBITED:  # by the jump host: nothing else is opened on the way
                        raise Unreachable(f"the jump host before {self.endpoint} {NO_FORWARDING}") from error
                    problem = error
                except socket.gaierror as error:
                    if error.errno == socket.EAI_NONAME:
                        raise Unreachable(f"there is no host named {self.endpoint.host}") from error
                    problem = error
                except _SilenceError as error:  # the last try may be too short for a word
                    problem = problem or error
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
                keys = asyncssh.load_keypairs([Path(endpoint.key).expanduser()], ignore_encrypted=True)
                if not keys:
                    raise CredentialsError(f"the key {endpoint.key} has a passphrase: add it to your agent and leave `key` out")
                named |= {"client_keys": keys, "agent_path": None}
            elif identities:
                named |= {"client_keys": [path for path in identities if os.path.exists(path)], "ignore_encrypted": True}  # as OpenSSH does
        except (asyncssh.KeyImportError, OSError, ValueError) as error:
            raise BadRequest(f"cannot prepare a connection to {endpoint}: {error}") from error
        # asyncssh says None for "UserKnownHostsFile none" and an empty list where the user has not said anything.
        files = [endpoint.known_hosts] if endpoint.known_hosts else [] if base.known_hosts is None else _listed(base.known_hosts) or ["~/.ssh/known_hosts"]
        if endpoint.known_hosts and not endpoint.proxy_command and isinstance(base.tunnel, str):
            named["jumps"] = base.tunnel.split(",")
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
        """One attempt, through the proxy command if there is one: `dial_seconds` for the machine to pick up, `login_seconds` for all of it.

        Raises what the proxy has refused for good; what it has said is told with any other failure that is not the machine's own verdict on us.
        """
        if self.endpoint.proxy_command is None:
            await self._log_in(settings, dial_seconds, login_seconds)
            return
        proxy = self._proxy = await Proxy.start(self.endpoint.proxy_command)
        try:
            await self._log_in(settings | {"sock": proxy.socket, "tunnel": None, "proxy_command": None}, dial_seconds, login_seconds)
        except BaseException as error:
            self._proxy = None
            await self._ended(proxy)
            if not isinstance(error, asyncssh.Error | OSError) or isinstance(error, VERDICTS):
                raise
            if (verdict := proxy.verdict()) is not None:
                raise verdict from error
            if words := proxy.last_words():
                raise ConnectionError(words) from error
            raise _SilenceError(f"{_words(error)}; the command that leads there said nothing") from error

    async def _log_in(self, settings: dict[str, Any], dial_seconds: float, login_seconds: float) -> None:
        guard = _Guard(self, [path for path in settings["known_hosts"] if os.access(path, os.R_OK)])
        jumps = _Jumps(settings.get("jumps", ()), settings["config"], settings["known_hosts"])
        plain = {name: value for name, value in settings.items() if name != "jumps"}
        arguments = plain | {"known_hosts": guard.trusted, "client_factory": lambda: guard, "login_timeout": login_seconds}
        if self._pinned:  # other kinds of keys stay on offer, so that a machine that has none of this kind is told from a broken one
            arguments["server_host_key_algs"] = _unique([*self._pinned.sig_algorithms, *get_default_public_key_algs()])
        deadline = asyncio.get_running_loop().time() + login_seconds
        connecting = asyncio.ensure_future(_opened(arguments, jumps))
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
        self._let_go()
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
        self._let_go()

    def _let_go(self) -> None:
        """Have the proxy of a connection that has ended end too, aside."""
        proxy, self._proxy = self._proxy, None
        if proxy is not None:
            self._ending_of(proxy)

    def _ending_of(self, proxy: Proxy) -> asyncio.Task[None]:
        ending = asyncio.ensure_future(proxy.end())
        self._endings.add(ending)
        ending.add_done_callback(self._endings.discard)
        return ending

    async def _ended(self, proxy: Proxy) -> None:
        """End a proxy whose connection came to nothing. If this is cancelled the ending goes on, and `_close` waits for it."""
        await asyncio.wait([self._ending_of(proxy)])

    async def _close(self) -> None:
        tasks = set(self._tasks)
        for task in tasks:
            task.cancel()
        if tasks:
            await asyncio.wait(tasks)
        await self._drop("closed")
        if self._endings:
            await asyncio.wait(self._endings)

    # ── on the loop: forwards ────────────────────────────────────────────────────────────────────────────────────────

    async def _add_forward(self, wanted: _Forward) -> int:
        port = await self._open_forward(self._living(), wanted)
        self._forwards.append(_Forward(wanted.is_remote, wanted.listen_host, port, wanted.host, wanted.port))
        return port

    async def _open_forwards(self) -> None:
        ssh = self._living()
        for forward in self._forwards:
            await self._open_forward(ssh, forward)

    async def _check_forwarding(self) -> None:
        try:
            _, writer = await self._living().open_connection("127.0.0.1", 1)
            writer.close()
        except asyncssh.ChannelOpenError as error:
            if error.code == OPEN_PROHIBITED:  # else nobody listens there, as was to be expected
                raise Unreachable(f"{self.endpoint} {NO_FORWARDING}") from error

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

    async def _start(self, command: str, content: bytes | Path | None, *, stays: bool = False) -> Inbox:
        inbox = Inbox()
        await self._open(command, inbox)
        if content is not None:
            inbox.feeding = asyncio.ensure_future(inbox.send(content))
        elif not stays:
            inbox.finish()
        return inbox

    async def _put(self, command: str, content: Path | Sequence[memoryview], failed: str) -> None:
        async with self._running(command, Inbox(), is_killed=False) as inbox:  # it would leave its part of a file: at the end of its input it tidies up
            await inbox.send(content)
            said = b""
            while piece := await inbox.read():
                said += piece
            if exit_code := await self._exit_code(inbox, failed):
                raise CommandFailed(failed, exit_code, said.decode(errors="replace"))

    async def _fetch(self, remote: str, into: memoryview | None, *, remove: bool) -> memoryview:
        mark = secrets.token_hex(8)
        download = Download(mark.encode(), into)
        command = shlex.join(["sh", "-c", FETCH, "fetch", remote, mark, "remove" * remove])
        async with self._running(command, download, window=FETCH_WINDOW_BYTES):
            await download.settled.wait()
            if download.problem:
                raise download.problem
            if download.is_whole and remove:
                with suppress(BrokenPipeError):  # it went away: the file stays there, and all of it is here
                    download.channel.write(b"\n")
            download.finish()
            failed = f"{remote} could not be read from {self.endpoint}"
            try:
                exit_code = await self._exit_code(download, failed)
            except ConnectionLost:
                if not download.is_whole:
                    raise
                return download.content  # asked for again it might not be there any more
            if exit_code or not download.is_whole:
                changed = ": it changed meanwhile" * (download.is_begun and not download.is_whole)
                raise CommandFailed(failed + changed, exit_code, download.said.decode(errors="replace"))
            return download.content

    @asynccontextmanager
    async def _running[S: Session](self, command: str, session: S, *, window: int | None = None, is_killed: bool = True) -> AsyncGenerator[S, None]:
        """Start a command; afterwards it has ended, or is killed, or at least sees the end of its input."""
        ended = False
        await self._open(command, session, window=window)
        try:
            yield session
            ended = True
        finally:
            await self._leave(session, kill=is_killed and not ended)

    async def _open(self, command: str, session: Session, *, window: int | None = None) -> None:
        self._living()
        await self._sessions.acquire()
        try:
            ssh = self._living()
            if ssh.get_extra_info("username") == "root":
                session.name = secrets.token_hex(8)
                command = "exec " + shlex.join(["sh", "-c", LEADER, "sh", session.name, command])
            await self._create(ssh, command, session, window)
        except BaseException:
            self._sessions.release()
            if session.is_made:
                session.channel.close()
            raise

    async def _create(self, ssh: asyncssh.SSHClientConnection, command: str, session: Session, window: int | None) -> None:
        """Start a command on the machine, trying again for REFUSED_SECONDS while it takes no further one."""
        arguments: dict[str, Any] = {"encoding": None, "request_pty": False, "x11_forwarding": False} | ({"window": window} if window else {})
        refusal: asyncssh.ChannelOpenError | None = None
        async for _ in _attempts(asyncio.get_running_loop().time(), REFUSED_SECONDS):
            try:
                await ssh.create_session(lambda: session, command, **arguments)
                return
            except asyncssh.ChannelOpenError as error:
                refusal = error
                if self._ssh is not ssh or session.is_made:
                    break
        assert refusal is not None
        if self._ssh is not ssh:  # it was lost meanwhile, and maybe made anew: the new one has refused nothing
            raise ConnectionLost(f"the SSH connection to {self.endpoint} is gone: {refusal}") from refusal
        raise refusal

    async def _exit_code(self, session: Session, command: str) -> int:
        await session.ended.wait()
        exit_code = session.channel.get_returncode()
        if exit_code is None:  # asyncssh tells a connection that died just like this, whatever `check` says
            raise ConnectionLost(f"{self.endpoint} went away under: {_short(command)}" + f" ({self._lost})" * bool(self._lost))
        return exit_code

    async def _leave(self, session: Session, *, kill: bool) -> None:
        self._sessions.release()
        if session.feeding:
            session.feeding.cancel()
        if kill:
            try:
                session.channel.kill()
            except OSError:
                pass  # it has ended
        session.channel.close()
        if kill and session.name and self._ssh:
            await self._kill(session.name)

    async def _kill(self, name: str) -> None:
        """Kill what runs under a name; a machine that cannot be asked within KILL_SECONDS keeps it."""
        killer = Inbox()
        try:
            async with asyncio.timeout(KILL_SECONDS):
                await self._open(shlex.join(["sh", "-c", KILL, "kill", name]), killer)
                try:
                    killer.finish()
                    await killer.ended.wait()
                finally:
                    await self._leave(killer, kill=False)
        except (TimeoutError, Unreachable, asyncssh.Error, OSError):
            pass


class Shell:
    """A `sh` on the machine that stays: a command costs one round trip and no login, an eighth of what `Connection.run` takes.

    It may be used from many threads, which take turns. It holds one of the connection's SESSIONS from its first command until `close`.
    """

    def __init__(self, connection: Connection) -> None:
        self._connection = connection
        self._turn = threading.Lock()
        self._mark = secrets.token_hex(16)
        self._commands = 0
        self._inbox: Inbox | None = None

    def run(self, command: str, *, timeout_seconds: float | None = None) -> Completed:
        """Run a command of POSIX sh in the user's home and return how it ended, whatever its exit code.

        Each has a subshell of its own and reads the end of file: it leaves nothing to the next one but what it leaves running, whose output would be the
        next one's. Raises CommandTimedOut after `timeout_seconds`, waiting for its turn included, ConnectionLost if the connection dies first, and
        CommandFailed if the command killed the shell. The shell is started anew by the next command then.
        """
        deadline = None if timeout_seconds is None else time.monotonic() + timeout_seconds
        if not self._turn.acquire(timeout=-1 if timeout_seconds is None else timeout_seconds):
            raise CommandTimedOut(f"the shell on {self._connection.endpoint} was busy until the deadline of: {_short(command)}", output="")
        try:
            return self._connection._within(deadline, self._ask(command), command, Text(None))  # pyright: ignore[reportPrivateUsage]
        finally:
            self._turn.release()

    def close(self) -> None:
        """End the shell, after the command that it runs. May be called twice."""
        with self._turn:
            inbox, self._inbox = self._inbox, None
            if inbox:
                self._connection._quietly(self._connection._leave(inbox, kill=False))  # pyright: ignore[reportPrivateUsage]

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        self.close()

    async def _ask(self, command: str) -> Completed:
        connection = self._connection
        inbox = self._inbox
        if inbox and inbox.ended.is_set():
            self._inbox = None
            await connection._leave(inbox, kill=False)  # pyright: ignore[reportPrivateUsage]
        inbox = self._inbox = self._inbox or await connection._start("exec sh", None, stays=True)  # pyright: ignore[reportPrivateUsage]
        answered = False
        try:
            self._commands += 1
            mark = f"{self._mark}.{self._commands}"
            await inbox.send(SHELL_LINE.format(command=shlex.quote(command), mark=mark).encode(), end=False)
            said, exit_code = await inbox.read_until(f"\n{mark} ".encode())
            if exit_code is None:
                exit_code = await connection._exit_code(inbox, command)  # pyright: ignore[reportPrivateUsage]
                raise CommandFailed(f"the shell on {connection.endpoint} ended under: {_short(command)}", exit_code, said.decode(errors="replace"))
            answered = True
            return Completed(exit_code, said.decode(errors="replace"))
        finally:
            if not answered:
                self._inbox = None if self._inbox is inbox else self._inbox
                await connection._leave(inbox, kill=True)  # pyright: ignore[reportPrivateUsage]


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


class _SilenceError(ConnectionError):
    """A try through a proxy command came to nothing, and the command did not say why."""


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


@dataclass(frozen=True, slots=True)
class _Jumps:
    """The jump hosts on the way, each `[user@]host[:port]` as ProxyJump has it, the configuration that they are of, and the file that has their keys."""

    names: Sequence[str]
    config: Any
    files: Sequence[str]


async def _opened(arguments: dict[str, Any], jumps: _Jumps) -> asyncssh.SSHClientConnection:
    """Connect, through the jump hosts if there are any. The connection closes those with itself."""
    last: asyncssh.SSHClientConnection | None = None
    try:
        for name in jumps.names:
            before, last = last, await _jumped(name, jumps, last)
            last.set_tunnel(before)
        ssh = await asyncssh.connect(**arguments, **({"tunnel": last} if last else {}))
    except BaseException:
        if last is not None:
            last.close()
        raise
    if last is not None:
        ssh.set_tunnel(last)
    return ssh


async def _jumped(name: str, jumps: _Jumps, tunnel: asyncssh.SSHClientConnection | None) -> asyncssh.SSHClientConnection:
    """Connect to a jump host, whose key must be in the named file or, if that has none for it, where the configuration says that keys are."""
    user, _, place = name.strip().rpartition("@")
    host, _, port = place.rpartition(":") if ":" in place else (place, "", "")
    named: dict[str, Any] = {"host": host, "config": jumps.config} | ({"username": user} if user else {}) | ({"port": int(port)} if port else {})
    usual = (await asyncssh.SSHClientConnectionOptions.construct(client_keys=None, **named)).known_hosts
    files = [] if usual is None else _listed(usual) or [os.path.expanduser("~/.ssh/known_hosts")]
    ours = [path for path in jumps.files if os.access(path, os.R_OK)]

    def trusted(host: str, address: str, port: int | None) -> Sequence[Any]:
        found = asyncssh.match_known_hosts(asyncssh.read_known_hosts(ours), host, address, port)
        if found[0] or found[1]:
            return found
        others = [path for path in files if os.access(str(path), os.R_OK)]
        return asyncssh.match_known_hosts(asyncssh.read_known_hosts(others), host, address, port) if others else found

    return await asyncssh.connect(**named, known_hosts=trusted, tunnel=tunnel or ())


def _listed(value: object) -> list[Any]:
    return [value] if isinstance(value, str) else list(value) if isinstance(value, list | tuple) else []


def _unique(algorithms: list[bytes]) -> list[str]:
    return list(dict.fromkeys(algorithm.decode() for algorithm in algorithms))


def _words(error: BaseException | None) -> str:
    return "no answer" if error is None or (isinstance(error, TimeoutError) and not str(error)) else str(error) or type(error).__name__


def _short(command: str) -> str:
    line = " ".join(command.split())
    return line if len(line) <= 120 else line[:117] + "..."
