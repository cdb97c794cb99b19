"""Prepares one instance until it is a node: the shell script that does it, and the reader of the script's output.

The script prints a line `::skyward phase NAME` when it enters a phase and `::skyward failed ...` when it fails in one.
Its other output is shown only after a failure. It ends with `exec` of the node's supervisor. The head's scheduler
prints `::skyward head GENERATION ADDRESS`. The listener on a spot machine prints `::skyward notice JSON`. The
supervisor prints `::skyward preload JSON` for each module that it could not import ahead.
"""

from __future__ import annotations

import contextlib
import json
import logging
import math
import re
import shlex
import sys
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

import uv

from skyward_core.accelerators import Accelerator
from skyward_core.errors import (
    BootstrapFailed,
    CommandFailed,
    PoolClosed,
    ProvisioningTimeout,
    Unreachable,
    without_logins,
)
from skyward_core.events.events import BootstrapProgress, BootstrapStarting, LogLine, SkywardEvent
from skyward_core.image import shell
from skyward_core.image.image import FrozenEnv, make_work
from skyward_core.image.local_files import NodeFile, on_node
from skyward_core.image.shell import partition_gpus
from skyward_core.image.volume import mount_volumes
from skyward_core.machines.instances import Instance
from skyward_core.machines.offers import memory_gb
from skyward_core.providers.base import STARTED_FROM_TAG, Provider
from skyward_core.providers.local import installing_environment
from skyward_core.providers.termination_shell import ENDING
from skyward_core.spec import PoolSpec
from skyward_core.transport.code_upload import FileChanged, shipped_archive, shipped_file, shipped_package
from skyward_core.transport.transport import Transport
from skyward_core.wire.info import Notice
from skyward_core.wire.masking import Mask
from skyward_core.wire.settings import NodeSettings, this_process

if TYPE_CHECKING:
    from skyward_core.engine.certificates import PoolCertificate

MARK = "::skyward "
GUARD_ENDS = "skyward: node ends: "
LAST_LINES = 30
CHAINED = ("During handling of the above exception", "The above exception was the direct cause")
"""How the lines begin that Python prints between the tracebacks of an exception and its cause."""
KEEP_PHASE, IMAGE_ENV, REST = "keep", "image-env", "rest.sh"
POLL_SECONDS = 0.01
LOOK_SECONDS = 0.5
LAST_PHASE = "server"
# It watches the owner until the supervisor does: the installation of packages must end when the client is killed.
WATCHER = """\
(
  owner_pid="${SKYWARD_OWNER%%:*}"
  while stat="$(cat "/proc/$owner_pid/stat" 2>/dev/null)"; do
    read -r -a field <<<"${stat##*) }"
    if [ "${field[19]}" != "${SKYWARD_OWNER##*:}" ] || [ "${field[0]}" = Z ]; then break; fi
    sleep 0.5
  done
  kill -KILL -- "-$$"
) >/dev/null 2>&1 &
export SKYWARD_BOOT_WATCHER=$!
"""
CAPTURE_LOOK_SECONDS = 0.05
PAUSE_SECONDS = 1.0
"""Between two checks."""
GUARD = r"""skyward_write() { # file, text: whole or not at all
  echo "$2" >"$skyward_directory/.$1.partial" && mv -f -- "$skyward_directory/.$1.partial" "$skyward_directory/$1"
}
skyward_clock() { # sets skyward_now, in seconds; the time of day may jump
  { read -r skyward_uptime _ <"${SKYWARD_UPTIME_FILE:-/proc/uptime}" && skyward_now=${skyward_uptime%%.*}; } 2>/dev/null
}
skyward_read() { # file: sets skyward_text to the uptime in it; fails for what cannot be read, a line without its end included
  { read -r skyward_text _ <"$skyward_directory/$1"; } 2>/dev/null || return 1
  skyward_text=${skyward_text%%.*}
  case $skyward_text in '' | *[!0-9]*) return 1 ;; esac
  [ "${#skyward_text}" -le 15 ]
}
skyward_birth() { # pid: sets skyward_born to when it was started; fails if it is gone or a zombie
  { read -r skyward_stat <"/proc/$1/stat"; } 2>/dev/null || return 1
  # shellcheck disable=SC2086 # its fields
  set -- ${skyward_stat##*) }
  case ${1:-Z} in Z | X) return 1 ;; esac
  skyward_born=${20:-}
}
skyward_lost_supervisor() { # succeeds if there was a supervisor and it is gone; its pid may be reused
  { read -r skyward_pid _ <"$skyward_directory/supervisor"; } 2>/dev/null || return 1
  case $skyward_pid in '' | *[!0-9]*) return 1 ;; esac
  skyward_birth "$skyward_pid" || return 0
  [ "$skyward_pid $skyward_born" != "$skyward_supervisor" ] || return 1
  env -i PATH="$PATH" LC_ALL=C grep -qsaxzF -e "SKYWARD_INSTANCE_ID=$SKYWARD_INSTANCE_ID" "/proc/$skyward_pid/environ" 9<&- || return 0
  skyward_supervisor="$skyward_pid $skyward_born"
  return 1
}
skyward_ended() { # sets skyward_reason if the file says that the node has ended
  [ -e "$skyward_directory/ended" ] || return 1
  skyward_reason=
  { read -r skyward_reason <"$skyward_directory/ended"; } 2>/dev/null
  [ -n "$skyward_reason" ] || skyward_reason="it says so"
}
skyward_verdict() { # succeeds, with skyward_reason, if the node must end now
  skyward_clock
  ! skyward_read lease || skyward_lease=$skyward_text # else the last good value stands
  ! skyward_read paid || skyward_paid=$skyward_text
  if skyward_ended; then
    return 0
  elif skyward_read warm && [ "$skyward_now" -ge "$skyward_text" ]; then
    skyward_reason="its warm time is over (keep_warm)"
  elif [ "$skyward_now" -ge "$skyward_lease" ]; then
    skyward_reason="no sign of life from a client, and the lease has run out (lease_seconds)"
  elif [ -n "$skyward_paid" ] && [ "$skyward_now" -ge "$skyward_paid" ]; then
    skyward_reason="the money is used up (max_cost, budget)"
  elif [ -n "$skyward_max_lifetime" ] && [ "$skyward_now" -ge $((skyward_started + skyward_max_lifetime)) ]; then
    skyward_reason="alive for $skyward_max_lifetime s (max_lifetime)"
  elif skyward_lost_supervisor; then
    skyward_ended || skyward_reason="its supervisor is gone"
  else
    return 1
  fi
}
skyward_end() { # reason
  trap : TERM
  skyward_say "node ends: $1"
  [ -z "$skyward_sleep" ] || kill "$skyward_sleep" 2>/dev/null
  skyward_kill "$SKYWARD_INSTANCE_ID" "$skyward_directory" || skyward_say "SIGKILL does not end the processes$skyward_pids"
  skyward_note "$1"
  skyward_clean "$SKYWARD_INSTANCE_ID" "$skyward_directory"
  if [ -n "$skyward_end_command" ]; then
    env -i PATH="$PATH" sleep 0.5 9<&- # until who follows the log has read why
    sh -c "$skyward_end_command"
  fi
  exit 0
}
skyward_note() { # reason
  skyward_place=${SKYWARD_ENDS:-}
  [ -n "$skyward_place" ] && [ "$1" != "asked to" ] && mkdir -p -- "$skyward_place" 2>/dev/null || return 0
  skyward_clock
  skyward_boot=
  { read -r skyward_boot </proc/sys/kernel/random/boot_id; } 2>/dev/null
  { printf '%s %s %s\n%s\n' "$skyward_now" "$(env -i PATH="$PATH" date +%s 9<&-)" "$skyward_boot" "$1" >"$skyward_place/$SKYWARD_INSTANCE_ID"; } 2>/dev/null
}
skyward_say() {
  { printf 'skyward: %s\n' "$1" >>"$skyward_directory/log"; } 2>/dev/null
}

set -u
umask 077
: "${SKYWARD_INSTANCE_ID:?}" "${SKYWARD_INSTANCE_DIRECTORY:?}"
skyward_directory=$SKYWARD_INSTANCE_DIRECTORY
skyward_sleep='' skyward_supervisor='' skyward_now='' skyward_paid=''
cd / || exit 1
trap '' HUP INT
trap 'skyward_end "asked to"' TERM
skyward_clock
: "${skyward_now:?the uptime of this machine cannot be read}"
skyward_started=$skyward_now
skyward_lease=$((skyward_now + skyward_lease_seconds))
[ -z "$skyward_paid_seconds" ] || skyward_paid=$((skyward_now + skyward_paid_seconds))
if ! { mkdir -p -- "$skyward_directory" && skyward_write lease "$skyward_lease" && skyward_write guard "$$"; }; then
  echo "skyward: the guard cannot write to $skyward_directory" >&2
  skyward_end "its guard cannot write"
fi
while ! skyward_verdict; do
  env -i PATH="$PATH" sleep "$skyward_pause" 9<&- &
  skyward_sleep=$!
  wait "$skyward_sleep"
  skyward_sleep=''
done
skyward_end "$skyward_reason"
"""  # noqa: E501
"""The program, after ENDING and the five values.

One `sleep` a look is all that it starts; `wait`, unlike a command, is cut short by a signal.
"""
_log = logging.getLogger("skyward")


def startup_script(spec: PoolSpec, provider: Provider, paid_seconds: float | None = None) -> str:
    """Return the script that a machine runs at its start: the guard, or on this machine the whole preparation.
    `paid_seconds` is how long it may live by its own clock, before it gets the time up to which it is paid. On this
    machine it gets that before it is a node.
    """
    if not provider.is_local:
        return guard_script(spec.lease_seconds, spec.max_lifetime, provider.end_command, paid_seconds)
    lines = ["#!/usr/bin/env bash", WATCHER]
    if spec.image.is_bare:
        lines += [
            shell.prelude() if spec.image.included else "",
            f"export SKYWARD_ENV_PYTHON={shlex.quote(sys.executable)}",
        ]
    else:
        lines += [
            f"export SKYWARD_PYTHON={shlex.quote(sys.executable)} SKYWARD_UV={shlex.quote(uv.find_uv_bin())}",
            "export PYTHONDONTWRITEBYTECODE=",
            *_for_installing(spec.image.bootstrap()),
        ]
    archive = "".join(shlex.quote(str(shipped_file(one))) for one in spec.image.included)
    return "\n".join(lines) + "\n" + _server(spec, shlex.quote(str(shipped_package())), archive, is_kept=True)


def _for_installing(installation: str) -> list[str]:
    """Show this process's package indexes and proxies with passwords to the installation only."""
    secret = installing_environment()
    return [shell.export(secret), installation, f"unset {' '.join(sorted(secret))}"] if secret else [installation]


def node_script(spec: PoolSpec) -> str:
    """Return the bash script that makes a node of a machine over SSH: environment, our package, volumes, partitions of
    GPUs, supervisor.
    """
    return on_node(spec.image.bootstrap()) + "\n" + _server_over_ssh(spec)


def node_script_in_two(spec: PoolSpec) -> tuple[str, str]:
    """Return the same script in two parts. The first one installs the packages and has no secret. It waits in phase
    KEEP_PHASE for the second one.

    The second part is written into the node's directory as REST, and before it the image's `env` as IMAGE_ENV.
    """
    packages = spec.image.model_copy(update={"env": FrozenEnv()})
    first = [
        "#!/usr/bin/env bash",
        _awaited(IMAGE_ENV) if spec.image.env else "",
        on_node(packages.bootstrap()),
        "skyward_run sync",
        f"skyward_phase {KEEP_PHASE}",
    ]
    return "\n".join([*(line for line in first if line), _awaited(REST)]), _server_over_ssh(spec)


def _awaited(name: str) -> str:
    file = f'"$SKYWARD_INSTANCE_DIRECTORY/{name}"'
    return f"until [ -e {file} ]; do sleep 0.1; done\n. {file}\n"


def _server_over_ssh(spec: PoolSpec) -> str:
    archive = "".join(f'"$SKYWARD_HOME/{one.place}"' for one in spec.image.included)
    return _server(spec, f'"$SKYWARD_HOME/ship/{shipped_archive().name}"', archive)


def _server(spec: PoolSpec, package: str, archive: str, *, is_kept: bool = False) -> str:
    """Return the last part of a node's script. `archive`: of the included files (`make_work`). `is_kept`: it already
    runs below a keeper (`worker/keeper.py`).
    """
    keeper = "" if is_kept else f'"$SKYWARD_ENV_PYTHON" -I -S {package}/skyward_core/worker/keeper.py -- '
    lines = [f"export {name}={shlex.quote(value)}" for name, value in spec.node_environment.items()]
    lines += [
        f"echo '{MARK}phase skyward'",
        f"export PYTHONPATH={package}",
        mount_volumes(spec.volume),
        make_work(spec.image, archive, spec.node_environment),
        partition_gpus(chips.mig, chips.count) if (chips := spec.first_accelerator) is not None else "",
        f"echo '{MARK}phase {LAST_PHASE}'",
        f'exec {keeper}"$SKYWARD_ENV_PYTHON" -P -m skyward_core.worker.supervisor "$SKYWARD_INSTANCE_DIRECTORY"',
    ]
    return "\n".join(line for line in lines if line) + "\n"


@dataclass(frozen=True, slots=True)
class Role:
    """A node's place in the pool. `generation` counts the heads of the pool, because each new head changes the roles.

    `scheduler` is None for the head, which starts it. The node listens at `host`. It listens on `ports` (one for the
    scheduler, then one for each worker) if there are some, and on free ports otherwise.
    """

    rank: int
    generation: int
    host: str
    head_host: str
    head_port: int
    scheduler: str | None = None
    ports: tuple[int, ...] = ()


def settings_of(
    transport: Transport,
    role: Role,
    spec: PoolSpec,
    certificate: PoolCertificate,
    accelerator: Accelerator | None,
    max_lifetime_seconds: float | None = None,
    notice_url: str = "",
    *,
    is_simulated: bool = False,
) -> NodeSettings:
    """Return the settings of a node.

    `accelerator` is what its calls may use (`PoolSpec.accelerator_on`), or what is simulated with `is_simulated`.
    """
    limit = memory_gb(spec.memory) if spec.memory is not None else None
    chips = 0 if accelerator is None else 1 if accelerator.mig else accelerator.count
    return NodeSettings(
        pool_id=transport.instance.pool_id,
        instance_id=transport.instance.id,
        rank=role.rank,
        total_nodes=spec.most_nodes,
        slots=spec.concurrency,
        host=role.host,
        head_host=role.head_host,
        head_port=role.head_port,
        tls_certificate=certificate.certificate,
        tls_key=certificate.key,
        value_directories=transport.value_directories,
        scheduler=role.scheduler,
        workers=tuple({"CUDA_VISIBLE_DEVICES": ""} if is_simulated else {} for _ in range(spec.workers_per_node)),
        accelerators=(accelerator.name,) * chips if accelerator is not None else (),
        neuron_cores=spec.neuron_cores_of(accelerator),
        memory_limit_bytes=int(limit * 1e9) if limit is not None else None,
        metrics_interval_seconds=2.0 if spec.collect_metrics else None,
        owner=this_process() if transport.is_local else None,
        timeout_seconds=spec.timeout,
        max_lifetime_seconds=max_lifetime_seconds,
        lease_seconds=spec.lease_seconds,
        is_guarded=not transport.is_local,
        scheduler_port=role.ports[0] if role.ports else 0,
        worker_ports=role.ports[1:],
        generation=role.generation,
        notice_url=notice_url,
        secret_names=tuple(spec.secrets or ()),
        is_simulated=is_simulated,
        keeps_calls=True,
        preload=tuple(spec.image.preload),
    )


class FirstCause:
    """Finds the first exception of the last traceback in a log.

    Python prints the cause before what it has caused, so the last lines of a log may lack it.

        outside ──a traceback begins──▶ inside ──its last line──▶ outside, with a cause ──"another exception"──▶ chained
        chained ──a traceback begins──▶ inside, and the cause stays
    """

    def __init__(self) -> None:
        self.text = ""
        """The last line of that exception's traceback; "" if the log has none."""
        self._is_inside = False
        self._is_chained = False

    def feed(self, line: str) -> None:
        """Take the next line of the log."""
        if line.startswith("Traceback (most recent call last):"):
            if not self._is_chained:
                self.text = ""
            self._is_inside, self._is_chained = True, False
        elif self._is_inside and line and not line[0].isspace():
            self.text, self._is_inside = self.text or line, False
        elif line.startswith(CHAINED):
            self._is_chained = True


class Preparation:
    """Prepares one instance, and follows the preparation in its log."""

    def __init__(
        self, transport: Transport, rank: int, emit: Callable[[SkywardEvent], object], mask: Mask | None = None
    ) -> None:
        """`mask` hides the secrets of the image's and the pool's `env` in what the machine prints."""
        self.transport = transport
        self._mask = mask or Mask()
        self.rank = rank
        self.phase = ""
        self.head: str | None = None
        """The address of the scheduler on this node, in the node's own network."""
        self.has_ended = False
        self.notices: tuple[Notice, ...] = ()
        """The notices that its machine is taken back."""
        self._emit = emit
        self._generation = 0
        self._tail: list[str] = []
        self._first_cause = FirstCause()
        emit(BootstrapStarting(transport.instance.id))

    @classmethod
    def adopted(
        cls, transport: Transport, rank: int, generation: int, emit: Callable[[SkywardEvent], object]
    ) -> Preparation:
        """Return a node that another process has prepared. Of its log so far only notices and its end count."""
        node = cls(transport, rank, lambda _: None)
        node.phase, node._generation = LAST_PHASE, generation
        with contextlib.suppress(BootstrapFailed):
            node.follow()
        node._emit = emit
        return node

    @property
    def instance(self) -> Instance:
        """The machine."""
        return self.transport.instance

    def start(self, script: str, timeout_seconds: float, files: Sequence[NodeFile] = ()) -> None:
        """Connect to the machine, upload the image's files and start its script.

        Raises BootstrapFailed if it cannot be reached in time, or a file is not here.
        """
        try:
            self.transport.start(script, timeout_seconds=timeout_seconds, emit=self._emit, files=files)
        except FileChanged as error:
            raise self.failure(str(error)) from error
        except Unreachable as error:
            raise self.failure(f"it cannot be reached: {error}") from error
        except CommandFailed as error:
            self._tail = [*self._tail, *error.output.splitlines()][-LAST_LINES:]
            raise self.failure(f"exit={error.exit_code} command={error.args[0]}") from error

    def send_settings(self, settings: NodeSettings) -> None:
        """Write the settings that the node waits for, or its new settings."""
        self.rank, self.head, self._generation = settings.rank, None, settings.generation
        self.transport.write("settings.json", settings.to_json())

    def follow(self) -> None:
        """Read the new lines of the log and emit the phases.

        Raises BootstrapFailed if the script has reported its failure or its end.
        """
        for line in self.transport.new_lines():
            kind, _, rest = line.removeprefix(MARK).partition(" ")
            if not line.startswith(MARK):
                # pip, uv and git may repeat the address of an index or a repository
                shown = self._mask.text(without_logins(line))
                self._tail = [*self._tail, shown][-LAST_LINES:]
                self._first_cause.feed(shown)
                if line.startswith(GUARD_ENDS):
                    self.has_ended = True
                    raise self.failure(line.removeprefix("skyward: "))
            elif kind == "phase":
                if rest.strip() != self.phase:
                    self.phase = rest.strip()
                    self._emit(BootstrapProgress(self.instance.id, self.phase))
            elif kind == "head":
                generation, _, address = rest.partition(" ")
                if generation == str(self._generation):
                    self.head = address.strip()
            elif kind == "notice":
                with contextlib.suppress(
                    ValueError, RecursionError
                ):  # a full disk has cut the line, or a call wrote it
                    self.notices = (*self.notices, Notice.from_text(rest))
            elif kind == "preload":
                with contextlib.suppress(ValueError, LookupError, TypeError, RecursionError):  # as above
                    self._warn_of_skipped(json.loads(rest))
            elif kind == "failed":
                raise self.failure(rest)
            elif kind == "exited":
                self.has_ended = True
                raise self.failure(f"exit={rest.strip()}")

    def _warn_of_skipped(self, skipped: Mapping[str, str]) -> None:
        """A module of `Image(preload=...)` was not imported ahead. Calls import it themselves."""
        text = f"the image's preload of {skipped['module']!r} was skipped: {skipped['reason']}"
        self._emit(LogLine(self.rank, self.instance.id, text, time.time(), stream="stderr", level=logging.WARNING))

    def failure(self, what: str) -> BootstrapFailed:
        """Return the error of a failed preparation, with the phase and the last lines."""
        what = self._mask.text(what)
        fields = {name: value for name, _, value in (part.partition("=") for part in what.split(" ", 2))}
        last_lines = "\n".join(f"  {line}" for line in self._tail)
        cause = f"; the first error was {self._first_cause.text}" if self._first_cause.text else ""
        code = fields.get("exit", "")
        return BootstrapFailed(
            f"node {self.rank} ({self.instance.id}) could not be prepared, phase {self.phase or 'start'}:"
            f" {what}{cause}\n{last_lines}",
            node=self.rank,
            phase=self.phase,
            exit_code=int(code) if code.isdigit() else None,
            output=self._tail,
        )

    @property
    def last_words(self) -> str:
        """The last message of the node's guard or supervisor."""
        return next(
            (line.removeprefix("skyward: ") for line in reversed(self._tail) if line.startswith("skyward: ")), ""
        )


def await_scheduler(
    head: Preparation, preparations: Sequence[Preparation], check: Callable[[], None], deadline: float
) -> str:
    """Wait until the head's scheduler listens; return its address in the network of the nodes.

    `check` is called every LOOK_SECONDS and raises if a machine is gone. Raises BootstrapFailed for a node whose
    preparation fails, ProvisioningTimeout at the deadline (time.monotonic).
    """
    looked = time.monotonic()
    while head.head is None:
        for preparation in preparations:
            preparation.follow()
        if time.monotonic() > deadline:
            phases = ", ".join(f"node {p.rank} in phase {p.phase or 'start'}" for p in preparations)
            raise ProvisioningTimeout(
                f"the pool was not ready in time: {phases}. Raise provision_timeout if the image takes that long to"
                " install"
            )
        if time.monotonic() - looked > LOOK_SECONDS:
            looked = time.monotonic()
            check()
        time.sleep(POLL_SECONDS)
    return head.head


def raise_if_gone(preparations: Sequence[Preparation], gone: set[str]) -> None:
    """Raise BootstrapFailed for the first instance that ended while it was being prepared."""
    for preparation in preparations:
        if preparation.instance.id in gone:
            preparation.follow()
            raise preparation.failure("it is gone, or has been silent for longer than its lease")


# Captures the disk of the first machine with an image's packages, so that later ones start from it (`Image.cache`).
#
# Every user of a disk image can read it. So the machine is prepared in two parts, and secrets come after the capture:
#
#     bootstrap.sh               installs the packages; the image's `env`, which the installation may need (indexes,
#                                proxies), is kept in the machine's memory
#     sync, phase "keep"         and the machine waits
#     `Provider.keep_image`      returns when the content of the disk image is fixed, or fails; the machine goes on
#     included files             of `Image(includes=...)`
#     rest.sh, settings.json     the environment of calls, volumes with their credentials, the commands of
#                                `Image(shell=...)`, the pool's certificate
#
# The disk is that of the head, because each pool has one; the other machines go on meanwhile. If the client is
# killed, the machine waits until its lease runs out, and `Provider.prune` removes the incomplete disk image.
# Replacements and new heads are prepared in one part.


def is_to_be_kept(spec: PoolSpec, provider: Provider, instance: Instance) -> bool:
    """Return whether to capture this machine's disk: the spec wants it, the provider can, and the machine was not
    started from a captured disk itself.
    """
    return spec.image.cache and provider.keeps_images and STARTED_FROM_TAG not in instance.tags


def start_and_keep(
    node: Preparation, spec: PoolSpec, provider: Provider, timeout_seconds: float, is_over: threading.Event
) -> None:
    """Start a machine's installation, capture its disk, and start the rest. Returns when the rest begins; another
    thread must follow the node meanwhile.

    `is_over` is set when the opening of the pool has failed. Raises BootstrapFailed if the machine cannot be reached,
    PoolClosed if `is_over` is set. A failed capture is only logged, because the pool does not need it.
    """
    first, rest = node_script_in_two(spec)
    node.start(first, timeout_seconds, spec.image.files)
    try:
        can_be_kept = _write_environment(node, spec)
        while node.phase != KEEP_PHASE:
            if is_over.wait(CAPTURE_LOOK_SECONDS):
                raise PoolClosed("the pool is not going to open")
        if can_be_kept:
            _keep(node.instance, spec, provider)
        node.transport.send(spec.image.included)
        node.transport.write(REST, rest)
    except FileChanged as error:
        raise node.failure(str(error)) from error
    except (Unreachable, CommandFailed) as error:
        raise node.failure(f"it does not answer any more: {error}") from error


def _write_environment(node: Preparation, spec: PoolSpec) -> bool:
    """Write the image's `env` to the machine. Return False if it is not in memory, so that a captured disk would have
    it.
    """
    if not spec.image.env:
        return True
    text = shell.export(spec.image.env) + "\n"
    path = node.transport.write_in_memory(IMAGE_ENV, text)
    node.transport.write(IMAGE_ENV, text if path is None else f"{shell.source(path)}\n")
    if path is None:
        _log.warning("%s has no place in memory for the image's env: its disk is not kept", node.instance.id)
    return path is not None


def _keep(instance: Instance, spec: PoolSpec, provider: Provider) -> None:
    name = spec.image.content_hash()
    try:
        kept = provider.keep_image(instance, name)
    except Exception as error:  # after an error of any kind the machine is usable and paid for
        _log.warning(
            "the disk of %s is not kept, and later pools install the packages of image %s again: %s",
            instance.id,
            name,
            error,
        )
        return
    if kept is not None:
        _log.info(
            "the disk of %s is being kept as %s: later pools with the packages of image %s start from it",
            instance.id,
            kept,
            name,
        )


# The guard of a node on its own machine: a shell script that ends the node by its clocks (ADR 0006, ADR 0011).
#
# It works before there is a Python on the machine, and after that Python has died. It runs as the provider's `startup`,
# with SKYWARD_INSTANCE_ID and SKYWARD_INSTANCE_DIRECTORY in its environment. It uses these files in that directory:
#
#     lease       read     the uptime in seconds at which the lease runs out, one line; the guard writes the first one
#     paid        read     the uptime in seconds until which the machine is paid for, one line; overrides its argument
#     warm        read     the uptime in seconds at which the warm time of a node without a client ends; else absent
#     guard       written  its pid, once it watches
#     supervisor  read     the pid of the node's supervisor: when that process is gone, the node ends
#     ended       read     the reason why the node has ended, one line
#     group       read     the folder of the node's control group, one line; without it the node has none
#     mounts      read     the mount points of the node, one per line
#     log         written  the reason why the node ends, appended
#
# The end of a node: the reason is written into its log. SIGKILL goes to all processes with its tag, to their
# descendants, and to all in its control group. Its keepers get it last (`worker/keeper.py`). If SKYWARD_ENDS names a
# folder, reason and time are written into a file with the node's id there, which stays (`machines/instances.py`); not
# for a node that was asked to end: the process that asked knows when. Mounts are undone. Its folders in memory and on
# disk are removed (the latter is kept if SKYWARD_KEEP_DIRECTORY is set). Then the command runs with which the machine
# ends itself.


def guard_script(
    lease_seconds: float, max_lifetime_seconds: float | None, end_command: str = "", paid_seconds: float | None = None
) -> str:
    """Return the POSIX sh text of a guard.

    Args:
        lease_seconds: how long the node lives without a lease renewal, from now on. A renewal writes the file `lease`.
        max_lifetime_seconds: how long it lives at most; None: no end.
        end_command: shell text that runs when the node has ended; empty if the machine goes on without us.
        paid_seconds: for how long it is paid, from now on, unless the file `paid` has another time; None: no limit.
    """
    values = {
        "skyward_lease_seconds": str(math.ceil(lease_seconds)),
        "skyward_max_lifetime": "" if max_lifetime_seconds is None else str(math.ceil(max_lifetime_seconds)),
        "skyward_paid_seconds": "" if paid_seconds is None else str(math.floor(paid_seconds)),
        "skyward_pause": f"{PAUSE_SECONDS:g}",
        "skyward_end_command": end_command,
    }
    # user data is small: 16 KiB on AWS, in which a line end and a quote count twice
    program = re.sub(r"(?m)^ +", "", ENDING + GUARD)
    return "\n".join(["#!/bin/sh", *(f"{name}={shlex.quote(value)}" for name, value in values.items()), program])
