"""SSH to one machine: run, put, forward.

A `SSHConnection` is used from any thread and blocks its caller; asyncssh works on the thread of a `Loop`. Its parts:
`ssh_link.py` (the states), `ssh_login.py` (keys and jump hosts), `ssh_calls.py` (from any thread to the loop),
`ssh_commands.py`, `ssh_files.py`, `ssh_forwards.py`. The states:

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

import time
from collections.abc import Buffer, Callable, Sequence
from pathlib import Path
from types import TracebackType
from typing import Self

from skyward_core.machines.instances import Endpoint
from skyward_core.transport.ssh_calls import LoopCalls
from skyward_core.transport.ssh_channels import TextStream
from skyward_core.transport.ssh_commands import Commands, Completed, Shell
from skyward_core.transport.ssh_files import Files
from skyward_core.transport.ssh_forwards import Forward, Forwards
from skyward_core.transport.ssh_link import SSHLink
from skyward_core.transport.ssh_loop import Loop


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
