"""SSH to one machine: run, put, forward.

A `SSHConnection` is used from any thread and blocks its caller; asyncssh works on the thread of a `Loop`. Its parts:
`ssh_link.py` (the states, keys and jump hosts), `ssh_commands.py` (commands, and from any thread to the loop); here are
files and forwards. The states:

    new ──connect──▶ connected ──the machine falls silent or hangs up──▶ lost ──reconnect──▶ connected
     └──────────────────┴──────────────────────── close ─────────────────┴──────────────────▶ closed

- new, lost: `run`, `put` and the forwards raise at once; nothing connects by itself.
- connected: a silent machine is noticed `keepalive_seconds * (keepalive_count + 1)` after its last answer, a closed
  socket at once. What runs at that moment raises `ConnectionLost`: whether its command took effect is not known.
- `reconnect` keeps the pinned host key and opens the forwards again on the ports they had.
- closed is final; `close` is idempotent, and interrupts callers that wait in other threads.

Host keys: the one that the endpoint names; else those that the known_hosts file has for this host; else the first one
seen, held for the life of the `SSHConnection`. Any other refuses the connection with `HostKeyChanged`.

Jump hosts (ProxyJump of the configuration file) must be known: by the endpoint's `known_hosts` file if it has keys of
them, else by the files that the configuration names, as in OpenSSH.

An endpoint with a `proxy_command` is reached through that command: one process for each connection, which ends with it
(`proxy_command.py`).

Commands, files and shells share SESSIONS places on one connection, and wait for one when all are taken. A `Shell`, and
a `run` that follows a log, hold a place as long as they last: with more than SESSIONS - 4 of those, files wait for each
other.

Speed (benchmarks/ssh_path.py): asyncssh moves 500 to 700 MiB/s where its own streams are left out. So bytes go from the
caller's buffers into the channel and from the channel into one buffer of the right size. Its packets cannot be larger
than sshd's 32 KiB; uvloop was tried and gains nothing.
"""

from __future__ import annotations

import posixpath
import secrets
import shlex
import time
from collections.abc import Buffer, Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from types import TracebackType
from typing import Self

import asyncssh  # noqa: TID253  a part of ssh_connection.py

from skyward_core.errors import CommandFailed, ConnectionLost, Unreachable
from skyward_core.machines.instances import Endpoint
from skyward_core.transport.ssh_commands import (
    ChannelBuffer,
    Commands,
    Completed,
    Download,
    LoopCalls,
    Shell,
    TextStream,
)
from skyward_core.transport.ssh_link import NO_FORWARDING, OPEN_PROHIBITED, Loop, SSHLink

FETCH_WINDOW_BYTES = 16 << 20
"""What the machine may send before we acknowledge some: 16 MiB fill 1 Gbit/s over 130 ms. asyncssh's own 2 MiB are
enough for lines.
"""

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

A lost connection looks to `cat` like the end of the file, so the size is checked first.
No process reads the message then: SIGPIPE must not kill the shell before it has removed its part.
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
"""Writes a line with the size of the file $1, after the word $2, and the file.

With $3 it removes the file once the reader confirms the transfer on stdin.
"""


class Files:
    """Writes and reads files by commands on the machine."""

    def __init__(self, calls: LoopCalls, commands: Commands) -> None:
        self._calls = calls
        self._commands = commands

    def put(
        self,
        source: Path | Buffer | Sequence[Buffer],
        remote: str,
        *,
        mode: int,
        unpacked_bytes: int | None,
        timeout_seconds: float | None,
    ) -> None:
        """See `SSHConnection.put`."""
        content = (
            source
            if isinstance(source, Path)
            else [memoryview(one).cast("B") for one in ([source] if isinstance(source, Buffer) else source)]
        )
        size = content.stat().st_size if isinstance(content, Path) else sum(len(one) for one in content)
        is_packed = unpacked_bytes is not None
        words = [
            remote,
            str(unpacked_bytes if is_packed else size),
            f"{mode:o}",
            posixpath.dirname(remote) or ".",
            "gzip" * is_packed,
        ]
        command = shlex.join(["sh", "-c", PUT, "put", *words])
        failed = f"{remote} could not be written on {self._commands.endpoint}"
        self._calls.call_transfer(
            self._put(command, content, failed),
            f"{remote} was not written on {self._commands.endpoint}",
            timeout_seconds,
        )

    def fetch(
        self, remote: str, *, into: bytearray | memoryview | None, remove: bool, timeout_seconds: float | None
    ) -> memoryview:
        """See `SSHConnection.fetch`."""
        room = None if into is None else memoryview(into).cast("B")
        return self._calls.call_transfer(
            self._fetch(remote, room, remove=remove),
            f"{remote} was not read from {self._commands.endpoint}",
            timeout_seconds,
        )

    async def _put(self, command: str, content: Path | Sequence[memoryview], failed: str) -> None:
        async with self._commands.running(
            command, ChannelBuffer(), is_killed=False
        ) as inbox:  # killed, it would leave a part of the file; at the end of its input it removes it
            await inbox.send(content)
            said = b""
            while piece := await inbox.read():
                said += piece
            if exit_code := await self._commands.exit_code(inbox, failed):
                raise CommandFailed(failed, exit_code, said.decode(errors="replace"))

    async def _fetch(self, remote: str, into: memoryview | None, *, remove: bool) -> memoryview:
        mark = secrets.token_hex(8)
        download = Download(mark.encode(), into)
        command = shlex.join(["sh", "-c", FETCH, "fetch", remote, mark, "remove" * remove])
        async with self._commands.running(command, download, window=FETCH_WINDOW_BYTES):
            await download.settled.wait()
            if download.problem:
                raise download.problem
            if download.is_whole and remove:
                with suppress(BrokenPipeError):  # the connection ended: the file stays there, and all of it is here
                    download.channel.write(b"\n")
            download.finish()
            failed = f"{remote} could not be read from {self._commands.endpoint}"
            try:
                exit_code = await self._commands.exit_code(download, failed)
            except ConnectionLost:
                if not download.is_whole:
                    raise
                return download.content  # if fetched again, it might not be there any more
            if exit_code or not download.is_whole:
                changed = ": it changed meanwhile" * (download.is_begun and not download.is_whole)
                raise CommandFailed(failed + changed, exit_code, download.said.decode(errors="replace"))
            return download.content


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


class SSHConnection:
    """An SSH connection to one machine; see the head of this file for its states. Safe to use from many threads at
    once.

    `on_lost` is called once for each loss, with the reason, on the loop's thread; it must not wait.
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
        link = SSHLink(endpoint, (keepalive_seconds, keepalive_count), on_lost)
        self.endpoint = endpoint
        self._link = link
        self._calls = LoopCalls(endpoint, link, loop)
        self._commands = Commands(endpoint, link)
        self._files = Files(self._calls, self._commands)
        self._forwards = Forwards(endpoint, link)

    def connect(self, timeout_seconds: float = 60.0, *, auth_grace_seconds: float = 0.0) -> Self:
        """Connect, again with growing pauses while the machine does not answer. On a living connection do nothing.

        Raises at once CredentialsError (the machine refuses our keys), HostKeyChanged and BadRequest (a key or
        configuration file that cannot be read), and Unreachable after `timeout_seconds`. A machine that was launched a
        moment ago runs its sshd before cloud-init has installed our key: for `auth_grace_seconds` a refusal is not
        final, nor is another host key for the endpoint's `host_key_grace_seconds` after it was first shown. Where a
        proxy command leads there, which may take minutes to find the machine, the grace begins with the first refusal.
        """
        self._calls.call(
            self._link.connect(timeout_seconds, auth_grace_seconds, anew=False, then=self._forwards.open_all)
        )
        return self

    def reconnect(self, timeout_seconds: float = 60.0) -> None:
        """Leave the present connection, living or not, and make a new one to the same machine, with the same forwards.

        Raises as `connect` does.
        """
        self._calls.call(self._link.connect(timeout_seconds, 0.0, anew=True, then=self._forwards.open_all))

    def close(self) -> None:
        """End the connection, its commands and its forwards.

        May be called twice, and while other threads wait in it: they get ConnectionLost.
        """
        self._calls.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    @property
    def is_connected(self) -> bool:
        """True while the machine answers, as far as is known."""
        return self._link.ssh is not None

    @property
    def host_key(self) -> str | None:
        """The machine's public key as in a `.pub` file, or None before it was seen.

        For `Endpoint.host_key` of another process.
        """
        return self._link.host_key

    def run(
        self,
        command: str,
        *,
        stdin: bytes | str | Path | None = None,
        on_line: Callable[[str], None] | None = None,
        timeout_seconds: float | None = None,
    ) -> Completed:
        """Run a command in the user's login shell and return how it ended, with any exit code.

        `stdin` is bytes, text, or a file to read them from; without it the command reads the end of file. `on_line` is
        called in this thread with each line, without its end, as soon as it is there; a command waits when it writes
        faster than that. Two round trips. Raises CommandTimedOut after `timeout_seconds`, ConnectionLost if the
        connection dies or is closed first. On a time-out, and on an exception in `on_line` or in this thread, the
        command's processes are sent SIGKILL, those that left its process group excepted.
        """
        deadline = None if timeout_seconds is None else time.monotonic() + timeout_seconds
        content = stdin.encode() if isinstance(stdin, str) else stdin
        text = TextStream(on_line)
        ended = False
        inbox = self._calls.call_command(deadline, self._commands.start(command, content), command, text)
        try:
            while piece := self._calls.call_command(deadline, inbox.read(), command, text, begun=True):
                text.feed(piece)
            text.feed(b"", last=True)
            exit_code = self._calls.call_command(
                deadline, self._commands.exit_code(inbox, command), command, text, begun=True
            )
            ended = True
            return Completed(exit_code, text.whole)
        finally:
            self._calls.call_quietly(self._commands.leave(inbox, kill=not ended))

    def shell(self) -> Shell:
        """Return a shell that stays, for commands that are run often.

        It is started with its first command, and anew after a `reconnect`.
        """
        return Shell(self._calls, self._commands)

    def put(
        self,
        source: Path | Buffer | Sequence[Buffer],
        remote: str,
        *,
        mode: int = 0o644,
        unpacked_bytes: int | None = None,
        timeout_seconds: float | None = None,
    ) -> None:
        """Write a file on the machine, atomically: readers see the old file or the whole new one, never a part.

        `source` is a file here, or its content: bytes or any other contiguous buffer, or several of them to be written
        one after another. `remote` is relative to the user's home, its folders are made. Two round trips, however small
        or large. Needs sh, cat, wc and mv there, no SFTP. With `unpacked_bytes` the source is compressed with gzip and
        becomes a file of so many bytes, which needs gzip there, and no more room than the file. Raises CommandFailed
        (no space, no permission, a folder of that name), ConnectionLost and CommandTimedOut.
        """
        self._files.put(source, remote, mode=mode, unpacked_bytes=unpacked_bytes, timeout_seconds=timeout_seconds)

    def fetch(
        self,
        remote: str,
        *,
        into: bytearray | memoryview | None = None,
        remove: bool = False,
        timeout_seconds: float | None = None,
    ) -> memoryview:
        """Return the content of a file of the machine: the first bytes of `into`, or else new memory, which is
        writable and lives as long as its views.

        With `remove` the file is removed once all of it is here, for one round trip more than the two, and gone when
        this returns. Raises CommandFailed (no such file, no permission, changed while it was read), BadRequest (`into`
        is too small), ConnectionLost and CommandTimedOut.
        """
        return self._files.fetch(remote, into=into, remove=remove, timeout_seconds=timeout_seconds)

    def forward_local(self, remote_host: str, remote_port: int, *, local_port: int = 0) -> int:
        """Listen on 127.0.0.1 here and pass connections on to `remote_host:remote_port` as the machine sees it; return
        the port here.

        A connection to a port without a listener there is accepted here and closed. Lasts until `close`, across
        `reconnect`.
        """
        return self._calls.call(
            self._forwards.add(
                Forward(
                    is_remote=False, listen_host="127.0.0.1", listen_port=local_port, host=remote_host, port=remote_port
                )
            )
        )

    def forward_remote(
        self, local_host: str, local_port: int, *, remote_host: str = "127.0.0.1", remote_port: int = 0
    ) -> int:
        """Listen on the machine and pass connections on to `local_host:local_port` as this machine sees it; return the
        port there.

        A `remote_host` that is not loopback needs `GatewayPorts clientspecified` in the machine's sshd_config. Lasts
        until `close`, across `reconnect`.
        """
        return self._calls.call(
            self._forwards.add(
                Forward(
                    is_remote=True, listen_host=remote_host, listen_port=remote_port, host=local_host, port=local_port
                )
            )
        )

    def check_forwarding(self) -> None:
        """Raise Unreachable if the machine's sshd forwards no ports: each forward would accept connections here and
        close them.
        """
        self._calls.call(self._forwards.check())
