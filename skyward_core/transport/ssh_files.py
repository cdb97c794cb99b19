"""Files to and from a machine, by sh, cat and wc there. Part of `ssh_connection.py`."""

from __future__ import annotations

import posixpath
import secrets
import shlex
from collections.abc import Buffer, Sequence
from contextlib import suppress
from pathlib import Path

from skyward_core.errors import CommandFailed, ConnectionLost
from skyward_core.transport.ssh_calls import LoopCalls
from skyward_core.transport.ssh_channels import ChannelBuffer, Download
from skyward_core.transport.ssh_commands import Commands

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
