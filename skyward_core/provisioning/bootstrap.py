"""One instance to one ready node: the shell text that prepares it, and the reading of what that text says.

A node's script prints a line `::skyward phase NAME` when it enters a phase and `::skyward failed ...` when it dies in one; everything else it prints is
told only when it fails. At its end stands the node's supervisor, which takes the script's place.
"""

from __future__ import annotations

import shlex
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path

import uv

from skyward_core.certificates import PoolCertificate
from skyward_core.errors import BootstrapFailed, ProvisioningTimeout
from skyward_core.events import BootstrapProgress, BootstrapStarting, SkywardEvent
from skyward_core.instances import Instance
from skyward_core.provisioning.shipping import shipped_package
from skyward_core.spec import PoolSpec
from skyward_core.worker.settings import NodeSettings, this_process, write_atomically

MARK = "::skyward "
LAST_LINES = 30
POLL_SECONDS = 0.01

# Until the supervisor watches, this does: a client killed while packages are being installed must not leave the installation running.
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


def startup_script(spec: PoolSpec) -> str:
    """Return the bash text that turns a local instance into a node: watcher, environment (if there is anything to install), our package, supervisor."""
    lines = ["#!/usr/bin/env bash", WATCHER]
    if spec.image.is_bare:
        lines.append(f"export SKYWARD_ENV_PYTHON={shlex.quote(sys.executable)}")
    else:
        lines += [
            f"export SKYWARD_PYTHON={shlex.quote(sys.executable)} SKYWARD_UV={shlex.quote(uv.find_uv_bin())}",
            "export PYTHONDONTWRITEBYTECODE=",
            spec.image.bootstrap(),
        ]
    lines += [f"export {name}={shlex.quote(value)}" for name, value in spec.node_environment.items()]
    lines += [
        f"echo '{MARK}phase skyward'",
        f"export PYTHONPATH={shlex.quote(str(shipped_package()))}",
        f"echo '{MARK}phase server'",
        'exec "$SKYWARD_ENV_PYTHON" -m skyward_core.worker.supervisor "$SKYWARD_INSTANCE_DIRECTORY"',
    ]
    return "\n".join(lines) + "\n"


def settings_of(
    instance: Instance, spec: PoolSpec, certificate: PoolCertificate, value_directories: tuple[str, ...], head: Instance, head_port: int, scheduler: str | None
) -> NodeSettings:
    """Return what a node is told. `scheduler` is None for the head, which starts it."""
    limit = spec.requirements.memory_gb
    accelerator = spec.accelerator
    return NodeSettings(
        pool_id=instance.pool_id,
        instance_id=instance.id,
        rank=instance.rank,
        total_nodes=spec.nodes,
        slots=spec.concurrency,
        host=instance.private_ip or "127.0.0.1",
        head_host=head.private_ip or "127.0.0.1",
        head_port=head_port,
        tls_certificate=certificate.certificate,
        tls_key=certificate.key,
        value_directories=value_directories,
        scheduler=scheduler,
        client_shares_memory=instance.directory is not None,
        accelerators=(accelerator.name,) * accelerator.count if accelerator is not None else (),
        memory_limit_bytes=int(limit * 1e9) if limit is not None else None,
        metrics_interval_seconds=2.0 if spec.collect_metrics else None,
        owner=this_process(),
    )


class Preparation:
    """Follows one instance's script through its log."""

    def __init__(self, instance: Instance, emit: Callable[[SkywardEvent], object]) -> None:
        assert instance.directory is not None
        self.instance = instance
        self.directory = Path(instance.directory)
        self.phase = ""
        self._emit = emit
        self._read = 0
        self._partial = b""
        self._tail: list[str] = []
        emit(BootstrapStarting(instance.id))

    def tell(self, settings: NodeSettings) -> None:
        """Write what the node waits for."""
        write_atomically(self.directory / "settings.json", settings.to_json())

    def follow(self) -> None:
        """Read on in the log: emit the phases entered. Raises BootstrapFailed if the script says that it has failed."""
        for line in self._new_lines():
            if line.startswith(f"{MARK}phase "):
                self.phase = line.removeprefix(f"{MARK}phase ").strip()
                self._emit(BootstrapProgress(self.instance.id, self.phase))
            elif line.startswith(f"{MARK}failed "):
                raise self.failure(line.removeprefix(f"{MARK}failed "))
            elif not line.startswith(MARK):
                self._tail = [*self._tail, line][-LAST_LINES:]

    def failure(self, what: str) -> BootstrapFailed:
        """Return the error that says in which phase and with which last lines the node could not be prepared."""
        fields = {name: value for name, _, value in (part.partition("=") for part in what.split(" ", 2))}
        told = "\n".join(f"  {line}" for line in self._tail)
        code = fields.get("exit", "")
        return BootstrapFailed(
            f"node {self.instance.rank} ({self.instance.id}) could not be prepared, phase {self.phase or 'start'}: {what}\n{told}",
            node=self.instance.rank,
            phase=self.phase,
            exit_code=int(code) if code.isdigit() else None,
            output=self._tail,
        )

    def _new_lines(self) -> Iterator[str]:
        with (self.directory / "log").open("rb") as log:
            log.seek(self._read)
            chunk = log.read()
        self._read += len(chunk)
        *whole, self._partial = (self._partial + chunk).split(b"\n")
        yield from (line.decode(errors="replace") for line in whole)


def await_scheduler(preparations: Sequence[Preparation], gone: Callable[[], set[str]], deadline: float) -> str:
    """Wait until the head's scheduler listens; return its address. `gone` tells the ids of instances that live no more.

    Raises BootstrapFailed for a node that fails on the way, ProvisioningTimeout at the deadline (of time.monotonic).
    """
    head = preparations[0].directory / "head.json"
    checked = time.monotonic()
    while not head.exists():
        for preparation in preparations:
            preparation.follow()
        if time.monotonic() > deadline:
            phases = ", ".join(f"node {p.instance.rank} in phase {p.phase or 'start'}" for p in preparations)
            raise ProvisioningTimeout(f"the pool was not ready in time: {phases}. Raise provision_timeout if the image takes that long to install")
        if time.monotonic() - checked > 0.5:
            checked = time.monotonic()
            raise_if_gone(preparations, gone())
        time.sleep(POLL_SECONDS)
    return head.read_text()


def raise_if_gone(preparations: Sequence[Preparation], gone: set[str]) -> None:
    """Raise BootstrapFailed for the first instance that ended while it was being prepared."""
    for preparation in preparations:
        if preparation.instance.id in gone:
            preparation.follow()
            raise preparation.failure("its processes have ended")
