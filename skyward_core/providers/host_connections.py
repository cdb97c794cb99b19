"""SSH to many hosts at once, for `Hosts`: connections, host keys that were seen, and answers of the scripts."""

from __future__ import annotations

import re
import shlex
from collections.abc import Mapping, Sequence
from concurrent.futures import FIRST_COMPLETED, Future, wait
from dataclasses import dataclass, field
from types import TracebackType
from typing import Self

from skyward_core.concurrency.threads import Threads
from skyward_core.errors import CommandFailed, HostKeyChanged, SkywardError, Unreachable
from skyward_core.machines.instances import Endpoint
from skyward_core.providers.termination_shell import ENDING, OWN
from skyward_core.transport.ssh_connection import SSHConnection
from skyward_core.transport.ssh_link import Loop
from skyward_core.worker.node_clocks import INSTANCE_TAG

CONNECT_SECONDS = 10.0
COMMAND_SECONDS = 60.0
MARK = "::skyward "
PROCESS_SHAPE = re.compile(r"/proc/([0-9]+)/environ:(\w+)=(.*)")
PLACES = r"""skyward_places() { # sets skyward_home, the folder of all our files on this host, and skyward_ip, its address for this connection
  skyward_home=${SKYWARD_HOME:-${HOME:-~}/.cache/skyward}
  case $skyward_home in /*) ;; *) skyward_home=$PWD/$skyward_home ;; esac
  skyward_home=${skyward_home%/}
  # shellcheck disable=SC2086 # addresses and ports of the client and this host
  set -- ${SSH_CONNECTION:-}
  skyward_ip=${3:-}
}
skyward_lock() { # seconds: takes the machine's lock on descriptor 9
  exec 9</proc
  flock -w "$1" 9 && return 0
  [ -r /proc/1/cmdline ] || return 1 # mounted with hidepid: the holder of the lock is invisible
  for _ in 1 2 3 4 5 6; do
    [ -z "$(skyward_holders)" ] || return 1
    flock -w 0.5 9 && return 0
  done
  [ -r "${HOME:-/}" ] || return 0
  exec 9<"${HOME:-/}"
  flock -w "$1" 9
  [ $? -ne 1 ] # 1 means that it is held; other codes: NFS cannot lock folders
}
skyward_holders() { # prints the pools that have processes here: our own by their tags, other users' by the command lines of their guards
  {
    grep -hsaz '^skyward-pool=' /proc/[0-9]*/cmdline
    env -i PATH="$PATH" LC_ALL=C grep -hsaz '^SKYWARD_POOL_ID=' /proc/[0-9]*/environ
  } | tr '\0' '\n' | sed 's/^[^=]*=/::skyward held /' | sort -u
}
skyward_list() { # prints the tags of this user's processes of nodes. The search must also find its own process, else it has failed
  skyward_files=/proc/self/environ
  for skyward_file in $(env -i PATH="$PATH" LC_ALL=C grep -lsaz '^SKYWARD_INSTANCE_ID=' /proc/[0-9]*/environ 9<&-); do
    skyward_pid=${skyward_file#/proc/}
    ! skyward_is_own "${skyward_pid%/environ}" || skyward_files="$skyward_files $skyward_file"
  done
  # shellcheck disable=SC2086 # one word each
  skyward_tags=$(env -i PATH="$PATH" LC_ALL=C SKYWARD_LOOK=1 grep -sHazE \
    '^SKYWARD_(LOOK|INSTANCE_ID|POOL_ID|RANK|INSTANCE_DIRECTORY|INSTANCE_TYPE|PRICE_PER_HOUR|PRIVATE_IP|TAGS)=' $skyward_files 9<&- | tr '\0' '\n')
  case $skyward_tags in
    *:SKYWARD_LOOK=1*) printf '%s\n' "$skyward_tags" ;;
    *) echo "grep does not find the tags of processes here" && exit 1 ;;
  esac
}
skyward_sweep() { # removes the caches, unless a node of ours is here
  if skyward_lock 1 && [ -z "$(skyward_holders)" ]; then
    for skyward_cache in envs files uv uv.partial uv.lock apt.lock ship uv-cache python; do skyward_remove "$skyward_home/$skyward_cache"; done
    rmdir "$skyward_home/instances" "$skyward_home" 2>/dev/null
    echo "::skyward swept $skyward_home"
  fi
}
"""  # noqa: E501
"""The lock is /proc. Each pid namespace has one, so pools that see each other share it. It belongs to root, so no user
can create, replace or remove it.

But any user can hold it. If a pool holds it, its guard is visible within moments. If no guard is visible, the lock of
this user's home is taken instead, which only this user's pools hold.
"""
LOOK = (
    PLACES
    + r"""skyward_places
unset OMP_NUM_THREADS OMP_THREAD_LIMIT # nproc would obey them
echo "::skyward vcpus $(nproc)"
echo "::skyward machine $(uname -m)"
sed -n 's/^MemTotal: *\([0-9]*\) kB$/::skyward memory_kib \1/p' /proc/meminfo
if [ "$1" = gpus ] && skyward_gpus=$(timeout 30 nvidia-smi --query-gpu=name,memory.total --format=csv,noheader,nounits 2>/dev/null); then
  printf '%s\n' "$skyward_gpus" | sed 's/^/::skyward gpu /'
fi
skyward_holders
"""  # noqa: E501
)
"""Prints the host's properties and the pools that hold it; GPUs only if $1 is "gpus", which may take seconds."""
START = (
    ENDING
    + PLACES
    + r"""umask 077
skyward_places
if ! skyward_lock 0.3 || [ -n "$(skyward_holders)" ]; then
  skyward_holders
  echo "::skyward taken"
  exit 0
fi
directory=$skyward_home/instances/$1
trap 'skyward_remove "$directory"' EXIT
trap 'exit 1' HUP INT TERM
mkdir -p -- "$directory" || exit 1
for skyward_place in "$skyward_home" "$skyward_home/instances" "$directory"; do
  case "$(stat -L -c '%u %a' -- "$skyward_place")" in
    "$(id -u) "*[2367]) ;; # every user may write to it
    "$(id -u) "*) continue ;;
  esac
  echo "$skyward_place belongs to another user, or every user may write to it: its programs could be replaced. Set SKYWARD_HOME to a folder of your own" >&2
  exit 1
done
# shellcheck disable=SC2012 # names of ours
[ ! -d "$skyward_home/ended" ] || ls -1t -- "$skyward_home/ended" | tail -n +1001 | while read -r old; do
  rm -f -- "$skyward_home/ended/$old"
done
cat >"$directory/startup.sh" || exit 1
[ "$(wc -c <"$directory/startup.sh")" -eq "$6" ] || { echo "only a part of the script arrived" >&2; exit 1; }
SKYWARD_HOME=$skyward_home SKYWARD_INSTANCE_ID=$1 SKYWARD_POOL_ID=$2 SKYWARD_RANK=$3 SKYWARD_PRICE_PER_HOUR=$4 SKYWARD_INSTANCE_TYPE=$5 \
  SKYWARD_PRIVATE_IP=$skyward_ip SKYWARD_INSTANCE_DIRECTORY=$directory SKYWARD_TAGS=$7 SKYWARD_ENDS=$skyward_home/ended \
  setsid sh "$directory/startup.sh" "skyward-pool=$2" </dev/null >>"$directory/log" 2>&1 &
trap - EXIT
echo "::skyward ip $skyward_ip"
echo "::skyward directory $directory"
"""  # noqa: E501
)
"""Takes the lock and starts the script on stdin under it, detached from this connection; or prints who holds the host.
"""
LIST = (
    OWN
    + PLACES
    + r"""skyward_places
echo "::skyward ip $skyward_ip"
skyward_list
"""
)
END = (
    ENDING
    + PLACES
    + r"""end() { # id
  skyward_find "$1"
  directory=$skyward_home/instances/$1
  for pid in $skyward_pids; do
    found=$(tr '\0' '\n' <"/proc/$pid/environ" 2>/dev/null | sed -n 's/^SKYWARD_INSTANCE_DIRECTORY=//p')
    case $found in /*/"$1") directory=$found && break ;; esac
  done
  [ -n "$skyward_pids" ] || [ -e "$directory" ] || return 0
  echo "::skyward found $1"
  if skyward_group_of "$1" "$directory"; then
    echo "::skyward proof $1 group"
  elif [ "${skyward_keepers:- }" != " " ] || [ -e "$directory/kept" ]; then
    echo "::skyward proof $1 tree"
  elif [ -e "$directory/supervisor" ]; then
    echo "::skyward proof $1 tag"
  fi
  guard=
  { read -r guard <"$directory/guard"; } 2>/dev/null
  case " $skyward_pids " in
    *" ${guard:-none} "*)
      kill -TERM "$guard" 2>/dev/null
      patience=100
      [ ! -f "$directory/mig" ] || patience=$((skyward_unpartition_seconds * 50 + patience)) # the guard restores the GPUs
      while [ "$patience" -gt 0 ] && kill -0 "$guard" 2>/dev/null; do
        patience=$((patience - 1))
        sleep 0.02
      done
      ;;
  esac
  skyward_kill "$1" "$directory"
  [ ! -f "$directory/mig" ] || skyward_lock 5 || : # no other pool may begin to use a GPU that is being restored
  skyward_clean "$1" "$directory" | sed 's/^/::skyward warning /'
}
skyward_places
keep=$1
shift
for id; do end "$id" & done
wait
skyward_list
[ "$keep" = keep ] || skyward_sweep || :
"""  # noqa: E501
)
"""Signals the guards of these instances to end them. After 2 s (longer with GPUs to restore), or without a guard, it
kills the instances itself. Then it lists the processes that are left.
"""
ENDS = (
    PLACES
    + r"""skyward_places
read -r up _ </proc/uptime
read -r boot </proc/sys/kernel/random/boot_id
for id; do
  [ -f "$skyward_home/ended/$id" ] || continue
  { read -r ended epoch of_boot && read -r reason; } <"$skyward_home/ended/$id" || continue
  if [ "$of_boot" = "$boot" ]; then
    seconds=$((${up%.*} - ${ended%.*}))
  else
    seconds=$(($(date +%s) - ${epoch%.*}))
  fi
  [ "$seconds" -ge 0 ] || seconds=0
  echo "::skyward ended $id $seconds $reason"
done
"""
)
"""Prints for how many seconds these instances have ended, and why, if their guards have written it."""
SWEEP = ENDING + PLACES + "skyward_places\nskyward_sweep\n"


@dataclass(frozen=True, slots=True)
class SeenKeys:
    """The host keys that were seen, by address; with None, they are not remembered.

    They are no part of a provider's value: any two are equal.
    """

    seen: dict[str, str] | None = field(default=None, compare=False)

    def of(self, address: str) -> str | None:
        return None if self.seen is None else self.seen.get(address)

    def note(self, address: str, key: str | None) -> None:
        """Remember a key that was verified, or seen for the first time.

        Raises HostKeyChanged if another connection has seen a different key meanwhile.
        """
        if self.seen is not None and key is not None and (before := self.seen.setdefault(address, key)) != key:
            raise HostKeyChanged(f"{address} has shown two host keys: {before} and {key}")


@dataclass(frozen=True, slots=True)
class HostAnswer:
    """The output of a script on a host: values by name, and the tags of each process of an instance."""

    values: Mapping[str, Sequence[str]]
    processes: Sequence[Mapping[str, str]] = ()

    @classmethod
    def read(cls, output: str) -> Self:
        """Read the output of a script; other lines, for instance of a login shell, are ignored."""
        values: dict[str, list[str]] = {}
        processes: dict[str, dict[str, str]] = {}
        for line in output.splitlines():
            if line.startswith(MARK):
                name, _, value = line.removeprefix(MARK).partition(" ")
                values.setdefault(name, []).append(value)
            elif found := PROCESS_SHAPE.fullmatch(line):
                processes.setdefault(found[1], {})[found[2]] = found[3]
        return cls(values, [tags for tags in processes.values() if INSTANCE_TAG in tags])

    def all(self, name: str) -> Sequence[str]:
        return self.values.get(name, ())

    def one(self, name: str) -> str:
        """Return a value; raises CommandFailed if the output does not have it."""
        if name not in self.values:
            raise CommandFailed(f"the host did not report its {name}")
        return self.values[name][0]


class HostConnections:
    """SSH connections to several hosts, used at the same time; closed at exit, even while commands run on them."""

    def __init__(self, endpoints: Mapping[str, Endpoint], keys: SeenKeys) -> None:
        self._endpoints = endpoints
        self._keys = keys
        self._threads = Threads("skyward-hosts")
        self._loop = Loop()
        self._connections = {
            address: SSHConnection(endpoint, loop=self._loop) for address, endpoint in endpoints.items()
        }

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        for connection in self._connections.values():
            connection.close()  # this also ends commands that wait in the threads
        self._threads.join()
        self._loop.close()

    def connect(self, straggler_seconds: float | None = None) -> dict[str, SkywardError]:
        """Connect to all hosts; return the errors of those that do not answer.

        With `straggler_seconds` the others may take so much longer than the first host that answers.
        """
        futures = {address: self._threads.submit(self._connect, address) for address in self._endpoints}
        if straggler_seconds is not None:
            pending = set(futures.values())
            while pending and not any(future.done() and future.exception() is None for future in futures.values()):
                pending = wait(pending, return_when=FIRST_COMPLETED).not_done
            wait(pending, straggler_seconds)
            late = Unreachable(f"no SSH connection within {straggler_seconds:g} s of the other hosts'")
            failures: dict[str, SkywardError] = {
                address: late for address, future in futures.items() if not future.done()
            }
            futures = {address: future for address, future in futures.items() if address not in failures}
            return failures | _settled(futures)[1]
        return _settled(futures)[1]

    def _connect(self, address: str) -> None:
        connection = self._connections[address]
        connection.connect(CONNECT_SECONDS)
        self._keys.note(address, connection.host_key)

    def ask(
        self,
        script: str,
        arguments: Mapping[str, Sequence[str]],
        *,
        stdin: str | None = None,
        timeout_seconds: float = COMMAND_SECONDS,
    ) -> tuple[dict[str, HostAnswer], dict[str, SkywardError]]:
        """Run a script with these arguments on each of these hosts; return the answers, and the errors.

        An exit code other than 0 is CommandFailed.
        """
        return _settled(
            {
                address: self._threads.submit(self._ask, address, script, its, stdin, timeout_seconds)
                for address, its in arguments.items()
            }
        )

    def endpoint(self, address: str) -> Endpoint:
        """Return the endpoint of a connected host, with the key that it has shown."""
        return self._endpoints[address].model_copy(update={"host_key": self._connections[address].host_key})

    def _ask(
        self, address: str, script: str, arguments: Sequence[str], stdin: str | None, timeout_seconds: float
    ) -> HostAnswer:
        done = self._connections[address].run(
            shlex.join(["sh", "-c", script, "skyward", *arguments]), stdin=stdin, timeout_seconds=timeout_seconds
        )
        if done.exit_code:
            raise CommandFailed(f"a command failed on {address}", done.exit_code, done.output)
        return HostAnswer.read(done.output)


def _settled[T](futures: Mapping[str, Future[T]]) -> tuple[dict[str, T], dict[str, SkywardError]]:
    """Wait for all; return the results, and the errors that are ours. Raises other errors."""
    results: dict[str, T] = {}
    failures: dict[str, SkywardError] = {}
    for address, future in futures.items():
        try:
            results[address] = future.result()
        except SkywardError as error:
            failures[address] = error
    return results, failures
