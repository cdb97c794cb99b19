"""The settings of a node: one JSON file, which the client writes.

The node reads it at its start and after each change.
"""

from __future__ import annotations

import dataclasses
import json
import os
import tempfile
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

from skyward_core.wire import checks

MOST_SETTINGS = 8 << 20
"""Characters of the file: the environment of calls is in it."""
MOST_PEM = 1 << 16
MOST_PORT = 65_535


@dataclass(frozen=True, slots=True)
class NodeOwner:
    """The client process that must outlive the node: its pid and start time (clock ticks since boot), which together
    never repeat.
    """

    pid: int
    started: str

    def is_alive(self) -> bool:
        """Return whether this process still runs. A zombie counts as gone."""
        return self.started != "" and process_start(self.pid) == self.started


@dataclass(frozen=True, slots=True)
class NodeSettings:
    """All settings of a node.

    `workers` holds one mapping of environment variables for each worker of the node (a MIG partition is a worker:
    `with_partitions`), `slots` is how many calls each of them runs at once, `accelerators` are those that one worker
    may use. `scheduler` is the address of the pool's scheduler; None on the head, which starts it. `value_directories`
    are folders for large values, the first in this machine's memory; the node makes and removes it. The client fetches
    values from them. `tls_certificate` and `tls_key` are PEM texts. `memory_limit_bytes` bounds the process of a call.
    `neuron_cores` are the NeuronCores of each slot; empty without any, and where Neuron's runtime chooses.

    `timeout_seconds` is how long the node lives without a running call, `max_lifetime_seconds` how long at most (None:
    no end), `lease_seconds` how long after its start without a sign of life from a client, unless one lengthens it
    (`node_clocks.write_lease`). `is_guarded` says that a guard runs beside the supervisor, which ends the node then by
    writing the file `ended`. `scheduler_port` and `worker_ports`, one for each worker, are where to listen; 0 and
    empty: the kernel chooses. If a client writes settings with another `generation`, the node starts again with
    them. `secret_names` are the secret variables of calls; their values are never in this file
    (`worker/scheduler.py`). `notice_url` is where it asks whether its machine is to be taken back
    (`worker/preemption_notice.py`); empty: it does not ask. Without `workers` it runs no calls.
    `is_simulated`: its accelerators are not there. `keeps_calls`: its workers outlive their scheduler while they have
    calls, and take them along to the next. `preload` are modules that are imported before runners are forked.
    """

    pool_id: str
    instance_id: str
    rank: int
    total_nodes: int
    slots: int
    host: str
    head_host: str
    head_port: int
    tls_certificate: str
    tls_key: str
    value_directories: tuple[str, ...]
    scheduler: str | None = None
    workers: tuple[dict[str, str], ...] = ({},)
    accelerators: tuple[str, ...] = ()
    neuron_cores: tuple[tuple[int, ...], ...] = ()
    memory_limit_bytes: int | None = None
    metrics_interval_seconds: float | None = 2.0
    owner: NodeOwner | None = None
    timeout_seconds: float = 3600.0
    max_lifetime_seconds: float | None = None
    lease_seconds: float = 120.0
    is_guarded: bool = False
    scheduler_port: int = 0
    worker_ports: tuple[int, ...] = ()
    generation: int = 0
    notice_url: str = ""
    secret_names: tuple[str, ...] = ()
    is_simulated: bool = False
    keeps_calls: bool = False
    preload: tuple[str, ...] = ()

    def cores_of(self, slot: int) -> tuple[int, ...]:
        """Return the NeuronCores that calls in this slot may use."""
        return self.neuron_cores[slot] if self.neuron_cores else ()

    def environment_of(self, worker: int, slot: int) -> dict[str, str]:
        """Return the environment variables that calls in this slot of this worker have, beside those of the node."""
        cores = self.cores_of(slot)
        return self.workers[worker] | ({"NEURON_RT_VISIBLE_CORES": _ranges(cores)} if cores else {})

    def may_become(self, other: NodeSettings) -> bool:
        """Return whether living workers may continue with other settings.

        They may if only their place in the pool changes, and if they are to keep their calls.
        """
        theirs = (
            other.slots,
            other.workers,
            other.value_directories,
            other.memory_limit_bytes,
            other.tls_certificate,
            other.tls_key,
            other.secret_names,
        )
        ours = (
            self.slots,
            self.workers,
            self.value_directories,
            self.memory_limit_bytes,
            self.tls_certificate,
            self.tls_key,
            self.secret_names,
        )
        is_same = (self.instance_id, self.neuron_cores, self.accelerators) == (
            other.instance_id,
            other.neuron_cores,
            other.accelerators,
        )
        return self.keeps_calls and other.keeps_calls and is_same and ours == theirs

    def to_json(self) -> str:
        """Return the text that `from_json` reads."""
        return json.dumps(dataclasses.asdict(self))

    @classmethod
    def from_json(cls, text: str) -> NodeSettings:
        """Rebuild settings written by `to_json`. Raises ValueError, KeyError or TypeError for any other text."""
        fields: dict[str, Any] = dict(json.loads(text))
        owner = fields.pop("owner")
        for name in ("workers", "accelerators", "value_directories", "worker_ports", "secret_names"):
            fields[name] = tuple(fields[name])
        fields["preload"] = tuple(fields.get("preload", ()))
        fields["neuron_cores"] = tuple(tuple(cores) for cores in fields["neuron_cores"])
        return cls(**fields, owner=NodeOwner(**owner) if owner else None)


class SeenSettings(NamedTuple):
    """What another client takes from the settings of a node, which the node's calls may have changed."""

    pool_id: str
    instance_id: str
    tls_certificate: str
    tls_key: str
    generation: int
    head_port: int
    scheduler_port: int

    @classmethod
    def of(cls, text: str) -> SeenSettings:
        """Return the settings of a node's file. Raises Unreadable."""
        try:
            known = checks.mapping("the settings of a node", json.loads(text[:MOST_SETTINGS]))
        except (ValueError, RecursionError) as error:
            raise checks.Unreadable("the settings of a node are not readable") from error
        return cls(
            checks.text("the pool of a node", known.get("pool_id")),
            checks.text("the id of a node", known.get("instance_id")),
            _pem("the certificate of a node", known.get("tls_certificate")),
            _pem("the key of a node", known.get("tls_key")),
            checks.count("the generation of a node", known.get("generation", 0)),
            checks.count("the port of a node", known.get("head_port"), MOST_PORT),
            checks.count("the port of a scheduler", known.get("scheduler_port", 0), MOST_PORT),
        )


def _pem(what: str, value: object) -> str:
    """Return the text of a certificate or a key: OpenSSL would take any other text for the path of one."""
    pem = checks.text(what, value, MOST_PEM)
    return pem if pem.startswith("-----BEGIN ") else checks.refuse(what, value)


def with_partitions(settings: NodeSettings, text: str) -> NodeSettings:
    """Return settings that show each worker one partition of a GPU: the first worker the first UUID of a text of one a
    line, and so on.

    Raises ValueError if there are not as many partitions as workers, unless the node is to have no workers any more.
    """
    if not settings.workers:
        return settings
    partitions = text.split()
    if len(partitions) != len(settings.workers):
        raise ValueError(f"the node has {len(partitions)} partitions of GPUs for {len(settings.workers)} workers")
    shown = (
        {**worker, "CUDA_VISIBLE_DEVICES": partition}
        for worker, partition in zip(settings.workers, partitions, strict=True)
    )
    return dataclasses.replace(settings, workers=tuple(shown))


def _ranges(cores: Sequence[int]) -> str:
    """Write numbers as Neuron's runtime reads them: "0-3,6". Its older versions read only a single range."""
    runs: list[list[int]] = []
    for core in cores:
        if runs and core == runs[-1][-1] + 1:
            runs[-1].append(core)
        else:
            runs.append([core])
    return ",".join(str(run[0]) if len(run) == 1 else f"{run[0]}-{run[-1]}" for run in runs)


def memory_directory(instance_id: str) -> str:
    """Return the folder in the node's memory for large values, made by the node and removed with it."""
    base = Path("/dev/shm")  # noqa: S108 - private folders (mode 0700) are made in it
    return str((base if base.is_dir() else Path(tempfile.gettempdir())) / f"skyward-{os.getuid()}-{instance_id}")


def is_stopped(pid: int) -> bool:
    """Return whether a process is stopped, by a signal or a debugger. It can be continued."""
    try:
        stat = Path(f"/proc/{pid}/stat").read_text()
    except OSError:
        return False
    return stat.rpartition(") ")[2][:1] in {"T", "t"}


def process_start(pid: int) -> str | None:
    """Return a process's start time in clock ticks since boot (field 22 of proc(5) stat), "" if it is gone or a zombie.

    None if it is there and /proc does not show it, as where that is mounted with `hidepid` processes of other users.
    """
    try:
        stat = Path(f"/proc/{pid}/stat").read_text()
    except OSError:
        return None if _is_there(pid) else ""
    state, *rest = stat.rpartition(") ")[2].split()
    return "" if state in "ZX" else rest[18]


def _is_there(pid: int) -> bool:
    """Return whether a process or zombie of any user has this pid."""
    try:
        os.kill(pid, 0)
    except PermissionError:
        return True
    except (ProcessLookupError, OverflowError):  # the latter: no pid at all
        return False
    return pid > 0


def this_process() -> NodeOwner:
    """Return the running process as an owner."""
    return NodeOwner(os.getpid(), process_start(os.getpid()) or "")


def write_atomically(path: Path, text: str) -> None:
    """Write a private file (mode 0600) atomically."""
    partial = path.with_name(f".{path.name}.partial")
    descriptor = os.open(partial, os.O_WRONLY | os.O_CREAT | os.O_TRUNC, 0o600)
    with os.fdopen(descriptor, "w") as file:
        file.write(text)
    partial.replace(path)
