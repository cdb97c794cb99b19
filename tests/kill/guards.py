"""The second safeguard: the real guard of each machine, a shell script, on a clock that the test advances."""

from __future__ import annotations

import subprocess
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from tests.kill.console import RunningService

PROMISE_SECONDS = 10.0
"""A machine must be gone within this time after its lease."""
BEFORE_SECONDS = 3.0
REAL_SECONDS = 60.0
"""Time limit for an action that normally takes milliseconds, on a busy machine."""
PAUSE = "0.05"


def left_alone(service: RunningService, machines: Sequence[dict[str, Any]], lease_seconds: float) -> list[str]:
    """Start the guards of these machines as they were at boot, and advance their clock."""
    if not machines:
        return []
    began = float(Path("/proc/uptime").read_text().split()[0])
    clock = service.folder / "uptime"
    _turn(clock, began)
    leases = {machine["id"]: _lease(machine) for machine in machines}
    guards = [_start(service, machine, clock) for machine in machines]
    try:
        if not _wait(lambda: all((Path(machine["directory"]) / "guard").exists() for machine in machines)):
            return ["the guards do not begin"]
        for machine in machines:
            if (
                lease := leases[machine["id"]]
            ) is not None:  # the driver's extensions of the lease before it was killed
                (Path(machine["directory"]) / "lease").write_text(lease)
        ends = [began + lease_seconds if lease is None else float(lease) for lease in leases.values()]
        _turn(clock, min(ends) - BEFORE_SECONDS)
        time.sleep(0.2 if len(machines) == 1 else 0.0)
        early = {machine["id"] for machine in machines} - service.look().billed()
        problems = [f"{machine_id} has ended before its lease" for machine_id in sorted(early)]
        _turn(clock, max(ends) + PROMISE_SECONDS)
        if not _wait(lambda: all(guard.poll() is not None for guard in guards)):
            problems.append(f"guards still run {PROMISE_SECONDS} s after the lease")
        return problems
    finally:
        for guard in guards:
            guard.kill()
            guard.wait()


def _lease(machine: dict[str, Any]) -> str | None:
    path = Path(machine["directory"]) / "lease"
    return path.read_text() if path.exists() else None


def _start(service: RunningService, machine: dict[str, Any], clock: Path) -> subprocess.Popen[bytes]:
    script = machine["startup"].replace("skyward_pause=1\n", f"skyward_pause={PAUSE}\n")
    assert f"skyward_pause={PAUSE}" in script, "the guard's pause is written in another way now"
    environment = {
        "PATH": "/usr/bin:/bin",
        "SKYWARD_INSTANCE_ID": machine["id"],
        "SKYWARD_INSTANCE_DIRECTORY": machine["directory"],
        "SKYWARD_UPTIME_FILE": str(clock),
        "RENTAL_PORT": str(service.port),
    }
    path = service.folder / f"{machine['id']}.sh"
    path.write_text(script)
    return subprocess.Popen(["sh", str(path)], env=environment, stdin=subprocess.DEVNULL, start_new_session=True)


def _turn(clock: Path, uptime: float) -> None:
    """Write atomically, because the readers read it as they read /proc/uptime."""
    partial = clock.with_suffix(".partial")
    partial.write_text(f"{uptime:.2f} 0.00\n")
    partial.replace(clock)


def _wait(condition: Any) -> bool:
    deadline = time.monotonic() + REAL_SECONDS
    while not condition():
        if time.monotonic() > deadline:
            return False
        time.sleep(0.01)
    return True
