"""Transport to a node over SSH: one connection per node for the life of the pool, which also renews the node's lease.

States of an `SSHTransport`, and what changes them:

    new ──start / join──▶ connected ──keepalive──▶ silent ──lease thread───▶ connected
     └───────────────────────┴──────── close ────────┴──────────────────────▶ closed

It has two threads once it is connected. The lease thread renews the lease, and connects again after a loss. The
log thread reads the node's log. `close` ends both and leaves the node alone, which ends when its lease expires.

Time limits: while the pool opens, a request may take as long as the opening, because a machine that installs packages
is slow. After `opened` it may take COMMAND_SECONDS. A request waits for a lost connection for PATIENCE_SECONDS, or
during the opening for as long as the node's lease.
"""

from __future__ import annotations

import contextlib
import functools
import logging
import math
import shlex
import subprocess
import threading
import time
import uuid
from collections import deque
from collections.abc import Callable, Sequence
from pathlib import PurePosixPath
from urllib.parse import urlsplit

from skyward_core.concurrency.threads import LoopThread
from skyward_core.errors import CommandFailed, ConnectionLost, SkywardError
from skyward_core.events.events import ContactLost, ContactRegained, SkywardEvent
from skyward_core.image.local_files import NodeFile
from skyward_core.machines.instances import Instance
from skyward_core.transport.code_upload import CompressedFile, shipped_archive, shipped_file, shipped_uv
from skyward_core.transport.ssh_connection import SSHConnection
from skyward_core.transport.ssh_link import Loop
from skyward_core.transport.transport import refuse_elsewhere
from skyward_core.wire.messages import Parcel
from skyward_core.wire.node_log import LogPosition

_log = logging.getLogger("skyward")
AUTH_GRACE_SECONDS = 60.0  # cloud-init may install our key after sshd answers
RECONNECT_SECONDS, KEEPALIVE_SECONDS = 5.0, 5.0
# a proxy command has to start and to find the machine first
PROXIED_RECONNECT_SECONDS = 30.0
# after three of them the connection is lost: a keepalive may wait behind 2 MiB of a file in Session Manager
PROXIED_KEEPALIVE_SECONDS = 10.0
AGAIN_SECONDS = 1.0
COMMAND_SECONDS = 20.0
LONGEST_RENEWAL_SECONDS = 10.0
CONNECT_TEST_SECONDS = 3
LINES_KEPT = 10_000
SENDING_UV = "::skyward phase uv"
"""A line as the node's log has for each phase: an error then names the phase in which the upload failed."""
PATIENCE_SECONDS = 10.0
# `tail` polls where inotify does not work, as on overlay file systems; its default is one second
POLL_SECONDS = 0.05

LEASE = """\
cd "$1" || exit 3
{ exec 8<. && flock -w 5 8; } 2>/dev/null
read -r now rest </proc/uptime
until=$((${now%.*} + $2))
case $5 in
  '') rm -f leaving warm ;;
  leaving) ;;
  *) echo "$5" >>leaving || exit 3 ;;
esac
old=0
[ -s lease ] && read -r old <lease
[ "${old%.*}" -ge "$until" ] || { echo "$until" >"lease.$$" && mv -f "lease.$$" lease; }
[ -z "$3" ] || { echo "$now" >"busy.$$" && mv -f "busy.$$" busy; }
[ -z "$4" ] || { echo "$((${now%.*} + $4))" >"paid.$$" && mv -f "paid.$$" paid; }
"""
"""Renews the lease for $2 seconds from now, by the node's clock. Never shortens it.

Clients take turns, as in `node_clocks.write_lease`. A client that gets no turn writes without it: the node must live.
With $3 it reports that the pool has calls to run. $4 is the number of seconds from now for which the node is paid;
it may be less than before. $5 is the mark of a client that is about to leave (`node_clocks.LEAVING`); "leaving" renews
for a client that has left its mark; without it the client uses the node, and all marks end.
"""

KEEP_WARM = """\
cd "$1" || exit 3
exec 8<. && flock -w 5 8 || exit 3
read -r now rest </proc/uptime
until=$((${now%.*} + $2))
old=0 warm=0
[ -s lease ] && read -r old <lease
[ -s warm ] && read -r warm <warm
if [ -n "$3" ] && ! grep -qsxF -e "$3" leaving; then
  echo used
  exit 0
fi
[ "${old%.*}" -ge "$until" ] || { echo "$until" >"lease.$$" && mv -f "lease.$$" lease; } || exit 3
if [ -n "$3" ] || { [ "${warm%.*}" -gt 0 ] && [ "${warm%.*}" -lt "$until" ]; }; then
  echo "$until" >"warm.$$" && mv -f "warm.$$" warm || exit 3
fi
echo "$now" >"busy.$$" && mv -f "busy.$$" busy
[ -z "$4" ] || { echo "$((${now%.*} + $4))" >"paid.$$" && mv -f "paid.$$" paid; }
"""
"""Lets a node over SSH end $2 seconds from now, if it has the mark $3: `node_clocks.write_warm` as a script.

Unlike a renewal it needs its turn: a client may be coming. Prints "used" if one has come.
"""

LOOK = """\
i=0
while [ ! -s "$1/guard" ]; do
  [ "$i" -lt "$2" ] || { echo "the guard of $1 has not started" >&2; exit 3; }
  i=$((i + 1)); sleep 0.1
done
home="${1%/instances/*}"
umask 077
mkdir -p "$home/ship" && chmod go= "$home/ship" # code of the user; $home itself may be open to others
echo "guard $(cat "$1/guard")"
echo "system $(uname -s) $(uname -m)"
for loader in /lib/ld-musl-*; do [ ! -e "$loader" ] || [ -e /lib64/ld-linux-x86-64.so.2 ] || [ -e /lib/ld-linux-aarch64.so.1 ] || echo musl; done
if [ -d "$home/ship/$3" ]; then touch -c "$home/ship/$3"; echo shipped; fi
if "$home/uv/bin/uv" --version >/dev/null 2>&1 || uv --version >/dev/null 2>&1; then echo uv; fi
if [ -n "$3" ] && [ ! -e "$1/memory" ] && memory=$(mktemp -d --suffix="-$4" /dev/shm/skyward-XXXXXXXXXX 2>/dev/null); then
  { echo "$memory" >"$1/memory.$$" && mv -f "$1/memory.$$" "$1/memory"; } || rmdir "$memory"
fi
if [ -s "$1/memory" ]; then echo "memory $(cat "$1/memory")"; fi
"""  # noqa: E501
"""Waits until the node's guard is up ($2 tenths of a second), then prints what the node has.

For the client that starts the node (with $3) it makes the folder in memory, under a random name: another user of the
machine sees the node's id in the process list, and could make a folder of a known name first.
"""

PLACE = """\
above=${parent%/*}
if grep -qsw memory "$above/cgroup.subtree_control" && [ -w "$above" ] && [ -w "$above/cgroup.procs" ] &&
  ! (cd "$parent" && cat memory.max memory.high pids.max cpu.max cpuset.cpus io.max 2>/dev/null | grep -qvE '^(max( 100000)?)?$'); then parent=$above; fi
"""  # noqa: E501
"""Finds the parent of the node's control group, from $parent, the group of this process.

`providers.local` does the same on the client's computer.
"""

START = (
    """\
cd "$1" || exit 3
umask 077
[ ! -d started ] || exec cat >/dev/null
cat >"bootstrap.$$"
[ "$(wc -c <"bootstrap.$$")" -eq "$5" ] || { rm -f "bootstrap.$$"; echo "only a part of the script arrived" >&2; exit 1; }
mv -f "bootstrap.$$" bootstrap.sh
home="${1%/instances/*}"
if [ -f "$6.tar.gz" ]; then
  mkdir -p "$6" && tar -xzf "$6.tar.gz" -C "$6" && rm "$6.tar.gz" || exit 1
  mv -T "$6" "$home/ship/$7" 2>/dev/null || [ -d "$home/ship/$7" ] || exit 1
  rm -rf "$6"
fi
id=$(tr '\\0' '\\n' <"/proc/$(cat "$1/guard")/environ" 2>/dev/null | sed -n 's/^SKYWARD_INSTANCE_ID=//p')
export SKYWARD_INSTANCE_DIRECTORY="$1" SKYWARD_INSTANCE_ID="${id:-$2}" SKYWARD_POOL_ID="$3" SKYWARD_RANK="$4" SKYWARD_HOME="$home"
tags=$(tr '\\0' '\\n' <"/proc/$(cat "$1/guard")/environ" 2>/dev/null | sed -n 's/^SKYWARD_TAGS=//p')
[ -z "$tags" ] || export SKYWARD_TAGS="$tags"
export UV_CACHE_DIR="${UV_CACHE_DIR:-$home/uv-cache}" UV_PYTHON_INSTALL_DIR="${UV_PYTHON_INSTALL_DIR:-$home/python}"
if "$home/uv/bin/uv" --version >/dev/null 2>&1; then export SKYWARD_UV="$home/uv/bin/uv"; fi
export SKYWARD_RESERVE="$1/reserve"
head -c 65536 /dev/zero >reserve || exit 1
mkdir started 2>/dev/null || exit 0
point='' group=''
while read -r _ _ _ root at rest; do
  case "$root $rest" in "/ "*" - cgroup2 "*) point=$at && break ;; esac
done </proc/self/mountinfo
own=$(sed -n 's/^0:://p' /proc/self/cgroup 2>/dev/null)
case $point:$own in
  :* | *:/..* | *:) ;;
  *)
    parent="${point%/}${own%/}"
"""  # noqa: E501
    + PLACE
    + """    group="$parent/skyward.$SKYWARD_INSTANCE_ID"
    echo "$group" >group
    { mkdir "$group" && [ -w "$group/cgroup.kill" ]; } 2>/dev/null || { rmdir "$group" 2>/dev/null; rm -f group; group=; }
    ;;
esac
setsid sh -c '[ -z "$0" ] || { echo 0 >"$0/cgroup.procs"; } 2>/dev/null || rm -f group
bash ./bootstrap.sh; code=$?; rm -f reserve; [ -z "$(tail -c 1 log)" ] || echo; echo "::skyward exited $code"' "$group" </dev/null >>log 2>&1 &
"""  # noqa: E501
)
"""Reads the bootstrap script from stdin and starts it in the background. Idempotent.

A second start leaves the running script as it is: bash reads the file while it runs, and a truncated file would end
with exit code 0. The script has the guard's tag, by which the guard can end it. This need not be the cloud's id, which
some machines do not know. If this user may make a control group (cgroup v2), the script runs in one, named by the file
`group`. The reserve file is removed first, so that a message about a full disk has room in the log.
"""


LIVES = """\
[ -d "$1" ] || { echo "::skyward dead"; exit 0; }
{ read -r pid rest <"$1/supervisor"; } 2>/dev/null || exit 0
{ tr '\\0' '\\n' <"/proc/$pid/environ"; } 2>/dev/null | grep -qxF -e "SKYWARD_INSTANCE_DIRECTORY=$1" && echo "::skyward lives" || echo "::skyward dead"
"""  # noqa: E501
"""Prints whether the node's supervisor lives; nothing if it has not started yet.

Compares the environment of the process, because another process may have its pid by now. A zombie's is empty."""


FOLLOW = """\
from=$3 first=
{ IFS= read -r first <"$1/log"; } 2>/dev/null
missing=${first#"::skyward cut "}
case $missing in "$first" | "" | *[!0-9]* | ????????????????*) ;;
  *) from=$(($3 - missing + 1)); [ "$from" -gt 0 ] || from=1 ;;
esac
exec tail --pid="$2" -n "+$from" -s "$4" -F "$1/log" 2>/dev/null
"""
"""Prints the node's log from line $3 on while its guard lives, without messages of `tail` itself. A log that was cut
(`wire/node_log.py`) is printed from its first line if line $3 is gone."""


class SSHConnections:
    """The SSH connections of a pool, which share one thread."""

    def __init__(
        self,
        lease_seconds: float,
        emit: Callable[[SkywardEvent], object],
        is_busy: Callable[[], bool],
        paid_seconds: Callable[[], float | None],
    ) -> None:
        self._loop = Loop()
        self._lease_seconds = lease_seconds
        self._emit = emit
        self._is_busy = is_busy
        self._paid_seconds = paid_seconds

    def transport(self, instance: Instance) -> SSHTransport:
        """Return the transport to an instance. It does not connect yet."""
        return SSHTransport(instance, self._loop, self._lease_seconds, self._emit, self._is_busy, self._paid_seconds)

    def close(self) -> None:
        """End the thread."""
        self._loop.close()


class SSHTransport:
    """Transport to a node over SSH. `transport.Transport` documents the methods, the head of this file the states."""

    is_local = False

    def __init__(
        self,
        instance: Instance,
        loop: Loop,
        lease_seconds: float,
        emit: Callable[[SkywardEvent], object],
        is_busy: Callable[[], bool] = lambda: False,
        paid_seconds: Callable[[], float | None] = lambda: None,
    ) -> None:
        assert instance.endpoint is not None
        assert instance.directory is not None
        self.instance = instance
        self._directory = instance.directory
        self._lease_seconds = lease_seconds
        self._emit = emit
        self._is_busy = is_busy
        self._paid_seconds = paid_seconds
        self._reporting = threading.Lock()
        """Held while the paid time is read and sent, so that an older value never replaces a newer one."""
        self._is_leaving = False
        self._wake = threading.Event()
        self._closed = threading.Event()
        is_direct = instance.endpoint.proxy_command is None
        self._reconnect_seconds = RECONNECT_SECONDS if is_direct else PROXIED_RECONNECT_SECONDS
        keepalive_seconds = KEEPALIVE_SECONDS if is_direct else PROXIED_KEEPALIVE_SECONDS
        self._connection = SSHConnection(
            instance.endpoint, loop=loop, keepalive_seconds=keepalive_seconds, on_lost=lambda _: self._wake.set()
        )
        self._memory: str | None = None
        """The node's folder in its memory; None if it has none, or if it is not known yet."""
        self._opening_until = 0.0
        """Until when (time.monotonic) the pool may open; 0 once the node has joined the pool."""
        self._guard = "1"
        self._lines: deque[str] = deque(maxlen=LINES_KEPT)
        self._position = LogPosition()
        self._forwards: dict[tuple[str, int], int] = {}
        self._threads: list[LoopThread] = []
        self._beginning = threading.Lock()
        """Held while a thread is started: `close` waits for those that have started, and none starts after it."""

    # ── life ─────────────────────────────────────────────────────────────────────────────────────────────────────────

    def start(
        self,
        script: str,
        *,
        timeout_seconds: float,
        emit: Callable[[SkywardEvent], object],
        files: Sequence[NodeFile] = (),
    ) -> None:
        deadline = time.monotonic() + timeout_seconds
        archive = shipped_archive()
        found = self.join(timeout_seconds=timeout_seconds, archive=archive.name)
        self._again(lambda: self._upload_what_is_missing(found), deadline)
        for file in files:
            self._again(functools.partial(self._upload, file), deadline)
        part = f"{self._directory}/ship"
        words = [
            self._directory,
            self.instance.id,
            self.instance.pool_id,
            str(self.instance.rank),
            str(len(script.encode())),
            part,
            archive.name,
        ]
        self._again(lambda: self._command(START, words, stdin=script), deadline)

    def send(self, files: Sequence[NodeFile]) -> None:
        for file in files:
            self._patiently(functools.partial(self._upload, file))

    def join(self, *, timeout_seconds: float, guard_seconds: float | None = None, archive: str = "") -> set[str]:
        """Connect, wait for the node's guard, then renew its lease and follow its log. Return the lines that LOOK
        printed.

        `guard_seconds`: how long to wait for the guard of a machine that has been prepared; None: the machine is new.
        A new one may refuse our key for a while, and may take the whole time-out for its guard.
        """
        deadline = self._opening_until = time.monotonic() + timeout_seconds
        grace = min(AUTH_GRACE_SECONDS, timeout_seconds) if guard_seconds is None else 0.0
        self._connection.connect(timeout_seconds, auth_grace_seconds=grace)
        self._begin(self._keep)
        self._again(self._connection.check_forwarding, deadline)  # before anything is installed
        patience = deadline if guard_seconds is None else min(deadline, time.monotonic() + guard_seconds)
        found = set(self._again(lambda: self._look(archive, patience), deadline).splitlines())
        self._memory = next((line.removeprefix("memory ") for line in found if line.startswith("memory ")), None)
        self._guard = next(line.split()[1] for line in found if line.startswith("guard "))
        self._begin(self._follow)
        return found

    def visit(self, *, timeout_seconds: float) -> None:
        self._connection.connect(timeout_seconds, auth_grace_seconds=0.0)
        self._begin(self._follow)

    def opened(self) -> None:
        self._opening_until = 0.0

    def close(self) -> None:
        self._closed.set()
        self._wake.set()
        self._connection.close()
        with self._beginning:
            threads = tuple(self._threads)
        for thread in threads:
            thread.join()

    @property
    def is_connected(self) -> bool:
        return self._connection.is_connected

    def _begin(self, work: Callable[[], None]) -> None:
        thread = LoopThread(f"skyward-{work.__name__.strip('_')}-{self.instance.rank}", work)
        with self._beginning:
            if not self._closed.is_set():
                thread.start()
                self._threads.append(thread)

    def _look(self, archive: str, deadline: float) -> str:
        left = max(1.0, deadline - time.monotonic())
        return self._command(
            LOOK,
            [self._directory, str(int(left * 10)), archive, self.instance.id],
            timeout_seconds=left + COMMAND_SECONDS,
        )

    def _again[T](self, step: Callable[[], T], deadline: float) -> T:
        """Do something idempotent; repeat it if the connection is lost, once the lease thread has made a new one."""
        while True:
            try:
                return step()
            except ConnectionLost:
                while not self._connection.is_connected:
                    if time.monotonic() > deadline or self._closed.wait(POLL_SECONDS):
                        raise
                if time.monotonic() > deadline or self._closed.is_set():
                    raise

    def _patiently[T](self, step: Callable[[], T]) -> T:
        now = time.monotonic()  # a node that is silent for longer than its lease has ended itself
        return self._again(step, max(now + PATIENCE_SECONDS, min(self._opening_until, now + self._lease_seconds)))

    @property
    def _command_seconds(self) -> float:
        """How long a command that begins now may take."""
        return max(COMMAND_SECONDS, self._opening_until - time.monotonic())

    # ── files and lines ──────────────────────────────────────────────────────────────────────────────────────────────

    @property
    def value_directories(self) -> tuple[str, ...]:
        return (self._directory,) if self._memory is None else (self._memory, self._directory)

    def write(self, name: str, text: str) -> None:
        self._patiently(
            lambda: self._connection.put(
                text.encode(), f"{self._directory}/{name}", mode=0o600, timeout_seconds=self._command_seconds
            )
        )

    def write_in_memory(self, name: str, text: str) -> str | None:
        if self._memory is None:
            return None
        path = f"{self._memory}/{name}"
        self._patiently(
            lambda: self._connection.put(text.encode(), path, mode=0o600, timeout_seconds=self._command_seconds)
        )
        return path

    def read(self, name: str) -> str:
        """Return the text of a file of the node's directory. Raises CommandFailed if the file is missing."""
        return self._command('cat -- "$1/$2"', [self._directory, name])

    def new_lines(self) -> list[str]:
        lines = list[str]()
        with contextlib.suppress(IndexError):
            while True:
                lines.append(self._lines.popleft())
        return lines

    # ── ports ────────────────────────────────────────────────────────────────────────────────────────────────────────

    def address(self, address: str) -> str:
        parts = urlsplit(address)
        place = (str(parts.hostname), parts.port or 0)
        if place not in self._forwards:
            self._forwards[place] = self._patiently(lambda: self._connection.forward_local(*place))
        return f"{parts.scheme}://127.0.0.1:{self._forwards[place]}"

    def can_reach(self, host: str, port: int) -> bool:
        command = shlex.join(
            ["timeout", str(CONNECT_TEST_SECONDS), "bash", "-c", 'exec 3<>"/dev/tcp/$0/$1"', host, str(port)]
        )
        return (
            self._patiently(lambda: self._connection.run(command, timeout_seconds=self._command_seconds)).exit_code == 0
        )

    def lead(self, port: int, to_local_port: int) -> None:
        self._patiently(lambda: self._connection.forward_remote("127.0.0.1", to_local_port, remote_port=port))

    def lives(self, timeout_seconds: float) -> bool | None:
        # a login shell may print more
        lines = self._command(LIVES, [self._directory], timeout_seconds=timeout_seconds).splitlines()
        return None if not {"::skyward lives", "::skyward dead"} & set(lines) else "::skyward lives" in lines

    # ── large values ─────────────────────────────────────────────────────────────────────────────────────────────────

    def put(self, parcel: Parcel) -> Parcel:
        *others, last = self.value_directories
        for directory in others:
            with contextlib.suppress(CommandFailed):  # no room in memory
                return self._put(parcel, directory)
        return self._put(parcel, last)

    def _put(self, parcel: Parcel, directory: str) -> Parcel:
        there, pieces = parcel.as_file_at(f"{directory}/{uuid.uuid4().hex}")
        assert there.path is not None
        self._connection.put(pieces, there.path, mode=0o600)
        return there

    def take(self, parcel: Parcel, *, keep: bool = False) -> Parcel:
        if parcel.path is None:
            return parcel
        refuse_elsewhere(parcel, self)
        path = parcel.path  # the file stays until we confirm the transfer: it may be fetched again
        return parcel.with_content(self._patiently(lambda: self._connection.fetch(path, remove=not keep)))

    def release(self, parcel: Parcel) -> None:
        if parcel.path is not None:
            with contextlib.suppress(SkywardError):  # it is elsewhere, or removed with the node
                refuse_elsewhere(parcel, self)
                self._command('rm -f -- "$1"', [parcel.path])

    # ── the lease ────────────────────────────────────────────────────────────────────────────────────────────────────

    def extend_lease(self, seconds: float) -> None:
        with self._reporting:
            self._renew(seconds, "leaving" if self._is_leaving else "")

    def begin_to_leave(self, mark: str) -> None:
        with self._reporting:
            self._renew(self._lease_seconds, mark)
            self._is_leaving = True

    def keep_warm(self, seconds: float, mark: str = "") -> bool:
        with self._reporting:
            words = [self._directory, str(math.ceil(seconds)), mark, self._paid_word()]
            return "used" not in self._command(KEEP_WARM, words, timeout_seconds=COMMAND_SECONDS)

    def _renew(self, seconds: float, mark: str) -> None:
        busy = "busy" if self._is_busy() else ""
        words = [self._directory, str(math.ceil(seconds)), busy, self._paid_word(), mark]
        # patient: a slow node that gets a new request every few seconds would answer none of them
        self._command(LEASE, words, timeout_seconds=max(COMMAND_SECONDS, self._lease_seconds / 2))

    def _paid_word(self) -> str:
        paid = self._paid_seconds()
        return "" if paid is None else str(math.floor(paid))

    def _keep(self) -> None:
        """The lease thread: renews the lease, and connects again when the connection is lost."""
        interval = min(self._lease_seconds / 6, LONGEST_RENEWAL_SECONDS)
        silent_since: float | None = None
        is_logged = False
        reconnect_seconds = self._reconnect_seconds
        while not self._closed.is_set():
            try:
                if not self._connection.is_connected:
                    self._connection.reconnect(reconnect_seconds)
                self.extend_lease(self._lease_seconds)
                if silent_since is not None:
                    self._emit(ContactRegained(self.instance.id, self.instance.rank, time.monotonic() - silent_since))
                    silent_since = None
                pause, is_logged, reconnect_seconds = interval, False, self._reconnect_seconds
            except Exception as error:  # an error of any kind: the node would end without lease renewals
                if not is_logged and not isinstance(error, SkywardError):
                    is_logged = True
                    _log.exception("the lease of node %d could not be renewed; it is tried again", self.instance.rank)
                pause = AGAIN_SECONDS
                # a machine that installs packages may need longer for a login
                if time.monotonic() < self._opening_until:
                    reconnect_seconds = max(
                        self._reconnect_seconds, min(2 * reconnect_seconds, self._lease_seconds / 4)
                    )
                if silent_since is None and not self._closed.is_set() and not self._connection.is_connected:
                    silent_since = time.monotonic()
                    self._emit(ContactLost(self.instance.id, self.instance.rank, str(error)))
            self._wake.wait(pause)
            if not self._closed.is_set():
                self._wake.clear()

    def _follow(self) -> None:
        """The log thread: reads the node's log, from the last line that it has read before a loss."""
        while not self._closed.is_set():
            self._position.resume()
            words = [self._directory, self._guard, str(self._position.lines_read + 1), str(POLL_SECONDS)]
            with contextlib.suppress(SkywardError):
                self._connection.run(shlex.join(["sh", "-c", FOLLOW, "skyward", *words]), on_line=self._on_line)
            self._closed.wait(AGAIN_SECONDS)

    def _on_line(self, line: str) -> None:
        if self._position.is_new(line):
            self._lines.append(line)

    # ── commands ─────────────────────────────────────────────────────────────────────────────────────────────────────

    def _upload_what_is_missing(self, found: set[str]) -> None:
        home = str(PurePosixPath(self._directory).parent.parent)
        if "uv" not in found and (packed := self._uv_for(found)) is not None:
            self._connection.put(packed.path, f"{home}/uv/bin/uv", mode=0o755, unpacked_bytes=packed.unpacked_bytes)
        if "shipped" not in found:
            self._connection.put(shipped_archive().path, f"{self._directory}/ship.tar.gz")

    def _upload(self, file: NodeFile) -> None:
        path = f"{PurePosixPath(self._directory).parent.parent}/{file.place}"
        if not self._command('if [ -f "$1" ]; then touch -c "${1%/*}"; echo there; fi', [path]):
            self._connection.put(shipped_file(file), path)

    def _uv_for(self, found: set[str]) -> CompressedFile | None:
        """Return the uv that runs on the node; None if this client cannot get it: then the node fetches it itself."""
        _, system, machine = next(line for line in found if line.startswith("system ")).split()
        self._lines.append(SENDING_UV)
        try:
            return shipped_uv(system, machine, is_musl="musl" in found)
        except (OSError, subprocess.SubprocessError) as error:
            why = str(getattr(error, "stderr", None) or error).strip()
            _log.warning(
                "uv for %s on %s could not be fetched here, and node %d has to fetch it itself: %s",
                system,
                machine,
                self.instance.rank,
                why,
            )
            return None

    def _command(
        self, text: str, words: list[str], *, stdin: str | None = None, timeout_seconds: float | None = None
    ) -> str:
        """Run a sh script with these arguments, under any login shell of the user; return its output.

        Raises CommandFailed.
        """
        seconds = self._command_seconds if timeout_seconds is None else timeout_seconds
        done = self._connection.run(
            shlex.join(["sh", "-c", text, "skyward", *words]), stdin=stdin, timeout_seconds=seconds
        )
        if done.exit_code:
            raise CommandFailed(
                f"{self._connection.endpoint} could not run a command of ours", done.exit_code, done.output
            )
        return done.output
