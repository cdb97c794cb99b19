"""The way to a node over SSH: one connection a node, kept for the life of the pool, and the node's lease with it.

States of a `RemoteReach`, and who moves it on:

    new ──start / join──▶ connected ──keepalive──▶ silent ──keeper thread──▶ connected
     └───────────────────────┴──────── close ────────┴──────────────────────▶ closed

Two threads belong to it once it is connected: the keeper extends the lease and connects again after a loss, the
follower reads the node's log. Both end with `close`, which does not touch the node: that ends when its lease does.

How long it may take to do what a node is asked: until the node is `opened`, as long as the pool has to open, for a
machine that installs packages is slow; then COMMAND_SECONDS. A connection that is lost is waited for PATIENCE_SECONDS,
and meanwhile for as long as the node's lease, if the pool has that long.
"""

from __future__ import annotations

import contextlib
import logging
import math
import shlex
import subprocess
import threading
import time
import uuid
from collections import deque
from collections.abc import Callable
from pathlib import PurePosixPath
from urllib.parse import urlsplit

from skyward_core.errors import CommandFailed, ConnectionLost, SkywardError
from skyward_core.events.events import ContactLost, ContactRegained, SkywardEvent
from skyward_core.machines.instances import Instance
from skyward_core.transport.code_upload import Packed, shipped_archive, shipped_uv
from skyward_core.transport.ssh_connection import Connection
from skyward_core.transport.ssh_loop import Loop
from skyward_core.worker.wire import Parcel

_log = logging.getLogger("skyward")
AUTH_GRACE_SECONDS = 60.0  # cloud-init may install our key after sshd has begun to answer
RECONNECT_SECONDS, KEEPALIVE_SECONDS = 5.0, 5.0
# a proxy command has to be started, and to find the machine, before the first word is said
PROXIED_RECONNECT_SECONDS = 30.0
# three of them: so long a sign of life may stand behind 2 MiB of a file, on its way through Session Manager
PROXIED_KEEPALIVE_SECONDS = 10.0
AGAIN_SECONDS = 1.0
COMMAND_SECONDS = 20.0
LONGEST_BEAT_SECONDS = 10.0
REACH_SECONDS = 3
LINES_KEPT = 10_000
SENDING_UV = "::skyward phase uv"
"""Told as the node's log tells its phases: whoever reads them knows then in which one the sending has failed."""
PATIENCE_SECONDS = 10.0
# where inotify does not work, as on overlay file systems, `tail` looks again and again: every second if not told
# otherwise
LOOK_AGAIN_SECONDS = 0.05

LEASE = """\
cd "$1" || exit 3
{ exec 8<. && flock -w 5 8; } 2>/dev/null
read -r now rest </proc/uptime
until=$((${now%.*} + $2))
old=0
[ -s lease ] && read -r old <lease
[ "${old%.*}" -ge "$until" ] || { echo "$until" >"lease.$$" && mv -f "lease.$$" lease; }
[ -z "$3" ] || { echo "$now" >"busy.$$" && mv -f "busy.$$" busy; }
[ -z "$4" ] || { echo "$((${now%.*} + $4))" >"paid.$$" && mv -f "paid.$$" paid; }
"""
"""Extends a lease to $2 seconds from now, on the node's own clock; never shortens it, for which clients take turns (as
in `watchdog.write_lease`; one that cannot have its turn goes ahead, for the node is to live). With $3, says that the
pool has calls to run; with $4, for how many seconds from now the node is paid for, which may be less than before.
"""

LOOK = """\
i=0
while [ ! -s "$1/guard" ]; do
  [ "$i" -lt "$2" ] || { echo "the guard of $1 has not started" >&2; exit 3; }
  i=$((i + 1)); sleep 0.1
done
home="${1%/instances/*}"
mkdir -p "$home/ship"
echo "guard $(cat "$1/guard")"
echo "system $(uname -s) $(uname -m)"
for loader in /lib/ld-musl-*; do [ ! -e "$loader" ] || [ -e /lib64/ld-linux-x86-64.so.2 ] || [ -e /lib/ld-linux-aarch64.so.1 ] || echo musl; done
if [ -d "$home/ship/$3" ]; then echo shipped; fi
if "$home/uv/bin/uv" --version >/dev/null 2>&1 || uv --version >/dev/null 2>&1; then echo uv; fi
if [ -n "$3" ] && [ ! -e "$1/memory" ] && memory=$(mktemp -d --suffix="-$4" /dev/shm/skyward-XXXXXXXXXX 2>/dev/null); then
  { echo "$memory" >"$1/memory.$$" && mv -f "$1/memory.$$" "$1/memory"; } || rmdir "$memory"
fi
if [ -s "$1/memory" ]; then echo "memory $(cat "$1/memory")"; fi
"""  # noqa: E501
"""Waits until the node's guard is up ($2 tenths of a second), then tells what is there.

Asked by who starts the node (with $3), it makes the folder in memory, under a name that nobody can guess: another user
of the machine sees the node's id in the list of processes, and could make a folder of a known name first.
"""

PLACE = """\
above=${parent%/*}
if grep -qsw memory "$above/cgroup.subtree_control" && [ -w "$above" ] && [ -w "$above/cgroup.procs" ] &&
  ! (cd "$parent" && cat memory.max memory.high pids.max cpu.max cpuset.cpus io.max 2>/dev/null | grep -qvE '^(max( 100000)?)?$'); then parent=$above; fi
"""  # noqa: E501
"""Where the node's control group is made, from $parent, the group of this process: as `control_groups` does it on the
client's computer.
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
"""Takes the bootstrap script from stdin and starts it, cut loose from this connection, once however often it is asked.
Asked again, it leaves a script that runs as it is: bash reads the file while it runs, and one cut short under it would
end with 0. It carries the tag that the guard carries, which can end it; that need not be the cloud's id, which not
every machine can tell. Where this user may make a control group (cgroup v2) it runs in one, which the file `group`
names. What it says of a full disk finds room in the log because the reserve is given up first.
"""


LIVES = """\
[ -d "$1" ] || { echo "::skyward dead"; exit 0; }
{ read -r pid rest <"$1/supervisor"; } 2>/dev/null || exit 0
{ tr '\\0' '\\n' <"/proc/$pid/environ"; } 2>/dev/null | grep -qxF -e "SKYWARD_INSTANCE_DIRECTORY=$1" && echo "::skyward lives" || echo "::skyward dead"
"""  # noqa: E501
"""Tells whether the node's supervisor lives, by what it was started with, for its pid may be somebody else's by now. Of
a zombie nothing can be read.

Says nothing if it has not begun yet."""


FOLLOW = """\
exec tail --pid="$2" -n "+$3" -s "$4" -F "$1/log" 2>/dev/null
"""
"""Tells the node's log from line $3 on, for as long as its guard lives; what `tail` has to say itself would be taken
for lines of the log.
"""


class Wires:
    """What the SSH connections of a pool share: the thread that they run on."""

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

    def reach(self, instance: Instance) -> RemoteReach:
        """Return the way to an instance; nothing is dialled yet."""
        return RemoteReach(instance, self._loop, self._lease_seconds, self._emit, self._is_busy, self._paid_seconds)

    def close(self) -> None:
        """End the thread."""
        self._loop.close()


class RemoteReach:
    """The way to a node over SSH; see the head of this file for its states, and `transport.Reach` for what the methods
    promise.
    """

    is_here = False

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
        self._telling = threading.Lock()
        """Held from asking for how long the node is paid until it is told: what was asked for later is what stands
        there.
        """
        self._wake = threading.Event()
        self._closed = threading.Event()
        is_direct = instance.endpoint.proxy_command is None
        self._reconnect_seconds = RECONNECT_SECONDS if is_direct else PROXIED_RECONNECT_SECONDS
        keepalive_seconds = KEEPALIVE_SECONDS if is_direct else PROXIED_KEEPALIVE_SECONDS
        self._connection = Connection(
            instance.endpoint, loop=loop, keepalive_seconds=keepalive_seconds, on_lost=lambda _: self._wake.set()
        )
        self._memory: str | None = None
        """The node's folder in its memory; None if there is none, or it is not known yet."""
        self._opening_until = 0.0
        """Until when (of time.monotonic) the pool has time to open; 0 when the node is a part of it."""
        self._guard = "1"
        self._lines: deque[str] = deque(maxlen=LINES_KEPT)
        self._lines_read = 0
        self._forwards: dict[tuple[str, int], int] = {}
        self._threads: list[threading.Thread] = []

    # ── life ─────────────────────────────────────────────────────────────────────────────────────────────────────────

    def start(self, script: str, *, timeout_seconds: float, emit: Callable[[SkywardEvent], object]) -> None:
        deadline = time.monotonic() + timeout_seconds
        archive = shipped_archive()
        found = self.join(timeout_seconds=timeout_seconds, archive=archive.name)
        self._again(lambda: self._send_what_is_missing(found), deadline)
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

    def join(self, *, timeout_seconds: float, guard_seconds: float | None = None, archive: str = "") -> set[str]:
        """Connect, wait for the node's guard, and begin to keep its lease and to follow its log. Returns what LOOK has
        found, a line each.

        `guard_seconds` is how long to wait for the guard of a node that should have one; None: as long as for all of
        it.
        """
        deadline = self._opening_until = time.monotonic() + timeout_seconds
        self._connection.connect(timeout_seconds, auth_grace_seconds=min(AUTH_GRACE_SECONDS, timeout_seconds))
        self._begin(self._keep)
        self._again(self._connection.check_forwarding, deadline)  # before anything is installed
        patience = deadline if guard_seconds is None else min(deadline, time.monotonic() + guard_seconds)
        found = set(self._again(lambda: self._look(archive, patience), deadline).splitlines())
        self._memory = next((line.removeprefix("memory ") for line in found if line.startswith("memory ")), None)
        self._guard = next(line.split()[1] for line in found if line.startswith("guard "))
        self._begin(self._follow)
        return found

    def opened(self) -> None:
        self._opening_until = 0.0

    def close(self) -> None:
        self._closed.set()
        self._wake.set()
        self._connection.close()
        for thread in self._threads:
            if thread is not threading.current_thread():
                thread.join()

    @property
    def is_connected(self) -> bool:
        return self._connection.is_connected

    def _begin(self, work: Callable[[], None]) -> None:
        thread = threading.Thread(
            target=work, name=f"skyward-{work.__name__.strip('_')}-{self.instance.rank}", daemon=True
        )
        self._threads.append(thread)
        thread.start()

    def _look(self, archive: str, deadline: float) -> str:
        left = max(1.0, deadline - time.monotonic())
        return self._command(
            LOOK,
            [self._directory, str(int(left * 10)), archive, self.instance.id],
            timeout_seconds=left + COMMAND_SECONDS,
        )

    def _again[T](self, ask: Callable[[], T], deadline: float) -> T:
        """Ask for something that may be asked for twice; once more if the connection was lost under it, as soon as the
        keeper has made a new one.
        """
        while True:
            try:
                return ask()
            except ConnectionLost:
                while not self._connection.is_connected:
                    if time.monotonic() > deadline or self._closed.wait(LOOK_AGAIN_SECONDS):
                        raise
                if time.monotonic() > deadline or self._closed.is_set():
                    raise

    def _patiently[T](self, ask: Callable[[], T]) -> T:
        now = time.monotonic()  # one that is silent for longer than its lease has ended itself
        return self._again(ask, max(now + PATIENCE_SECONDS, min(self._opening_until, now + self._lease_seconds)))

    @property
    def _command_seconds(self) -> float:
        """How long a command may take that is begun now."""
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
        """Return the text of a file of the node's directory. Raises CommandFailed if it is not there."""
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
        command = shlex.join(["timeout", str(REACH_SECONDS), "bash", "-c", 'exec 3<>"/dev/tcp/$0/$1"', host, str(port)])
        return (
            self._patiently(lambda: self._connection.run(command, timeout_seconds=self._command_seconds)).exit_code == 0
        )

    def lead(self, port: int, to_local_port: int) -> None:
        self._patiently(lambda: self._connection.forward_remote("127.0.0.1", to_local_port, remote_port=port))

    def lives(self, timeout_seconds: float) -> bool | None:
        # a login shell may have said more
        told = self._command(LIVES, [self._directory], timeout_seconds=timeout_seconds).splitlines()
        return None if not {"::skyward lives", "::skyward dead"} & set(told) else "::skyward lives" in told

    # ── large values ─────────────────────────────────────────────────────────────────────────────────────────────────

    def put(self, parcel: Parcel) -> Parcel:
        *others, last = self.value_directories
        for directory in others:
            with contextlib.suppress(CommandFailed):  # no room in memory
                return self._put(parcel, directory)
        return self._put(parcel, last)

    def _put(self, parcel: Parcel, directory: str) -> Parcel:
        there, pieces = parcel.laid_out(f"{directory}/{uuid.uuid4().hex}")
        assert there.path is not None
        self._connection.put(pieces, there.path, mode=0o600)
        return there

    def take(self, parcel: Parcel, *, keep: bool = False) -> Parcel:
        if parcel.path is None:
            return parcel
        path = parcel.path  # it stays until we have said that we have it: it may be asked for again
        return parcel.cut(self._patiently(lambda: self._connection.fetch(path, remove=not keep)))

    def release(self, parcel: Parcel) -> None:
        if parcel.path is not None:
            with contextlib.suppress(SkywardError):  # it goes with the node
                self._command('rm -f -- "$1"', [parcel.path])

    # ── the lease ────────────────────────────────────────────────────────────────────────────────────────────────────

    def extend_lease(self, seconds: float) -> None:
        with self._telling:
            paid = self._paid_seconds()
            words = [
                self._directory,
                str(math.ceil(seconds)),
                "busy" if self._is_busy() else "",
                "" if paid is None else str(math.floor(paid)),
            ]
            # a node that is slow must not be asked anew for ever: the first answer would be good for the whole lease
            self._command(LEASE, words, timeout_seconds=max(COMMAND_SECONDS, self._lease_seconds / 2))

    def _keep(self) -> None:
        """The keeper: signs of life, and the connection made anew when it is lost."""
        beat = min(self._lease_seconds / 6, LONGEST_BEAT_SECONDS)
        silent_since: float | None = None
        is_told = False
        reconnect_seconds = self._reconnect_seconds
        while not self._closed.is_set():
            try:
                if not self._connection.is_connected:
                    self._connection.reconnect(reconnect_seconds)
                self.extend_lease(self._lease_seconds)
                if silent_since is not None:
                    self._emit(ContactRegained(self.instance.id, self.instance.rank, time.monotonic() - silent_since))
                    silent_since = None
                pause, is_told, reconnect_seconds = beat, False, self._reconnect_seconds
            except Exception as error:  # whatever it is: the node would end when nobody keeps its lease
                if not is_told and not isinstance(error, SkywardError):
                    is_told = True
                    _log.exception(
                        "the lease of node %d could not be extended; it is tried again and again", self.instance.rank
                    )
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
        """The follower: the node's log, line by line, from where it stopped when the connection was lost."""
        while not self._closed.is_set():
            words = [self._directory, self._guard, str(self._lines_read + 1), str(LOOK_AGAIN_SECONDS)]
            with contextlib.suppress(SkywardError):
                self._connection.run(shlex.join(["sh", "-c", FOLLOW, "skyward", *words]), on_line=self._on_line)
            self._closed.wait(AGAIN_SECONDS)

    def _on_line(self, line: str) -> None:
        self._lines_read += 1
        self._lines.append(line)

    # ── commands ─────────────────────────────────────────────────────────────────────────────────────────────────────

    def _send_what_is_missing(self, found: set[str]) -> None:
        home = str(PurePosixPath(self._directory).parent.parent)
        if "uv" not in found and (packed := self._uv_for(found)) is not None:
            self._connection.put(packed.path, f"{home}/uv/bin/uv", mode=0o755, unpacked_bytes=packed.unpacked_bytes)
        if "shipped" not in found:
            self._connection.put(shipped_archive().path, f"{self._directory}/ship.tar.gz")

    def _uv_for(self, found: set[str]) -> Packed | None:
        """Return the uv that runs on the node; None if there is none to be had here: then the node has to find one
        itself.
        """
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
        """Run a few lines of sh with these arguments, whatever the user's login shell is; return what they print.

        Raises CommandFailed.
        """
        seconds = self._command_seconds if timeout_seconds is None else timeout_seconds
        done = self._connection.run(
            shlex.join(["sh", "-c", text, "skyward", *words]), stdin=stdin, timeout_seconds=seconds
        )
        if done.exit_code:
            raise CommandFailed(
                f"{self._connection.endpoint} could not do what it was asked", done.exit_code, done.output
            )
        return done.output
