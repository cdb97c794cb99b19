"""Runs all points in several processes at once, and prints the table of what was found alive."""

from __future__ import annotations

import json
import subprocess
import sys
import tempfile
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

from rich.table import Table

from tests.kill.boundaries import PHASES
from tests.kill.console import REPOSITORY

WORKERS = 2
COLUMNS = (
    ("none", "close", "none; close"),
    ("driver", "sweep", "driver; sweep"),
    ("driver", "two sweeps at once", "driver; two sweeps"),
    ("driver and sweep", "sweep", "driver, sweep; sweep"),
    ("driver and reaper", "sweep", "driver, reaper; sweep"),
    ("driver", "reaper", "driver; reaper"),
    ("driver", "node", "driver; node"),
)
"""Who is killed, which safeguard recovers, and the names of both."""


def work_off(
    seed: int, points: int, reaped: int, report: Callable[[dict[str, Any]], object] = lambda point: None
) -> list[dict[str, Any]]:
    """Run this many points, and `reaped` more in which a reaper recovers; return them as plain data, in the order of
    their ends. Errors as of `run`.
    """
    shares = [points // WORKERS + (number < points % WORKERS) for number in range(WORKERS)]
    arguments: list[list[object]] = [["sweep", seed, number, WORKERS, share] for number, share in enumerate(shares)]
    if reaped:
        arguments.append(["reaper", reaped])
    return run(arguments, report)


def run(
    arguments: Sequence[Sequence[object]], report: Callable[[dict[str, Any]], object] = lambda point: None
) -> list[dict[str, Any]]:
    """Run workers with these arguments at once; return their points."""
    found: list[dict[str, Any]] = []
    memory = Path("/dev/shm")
    with (
        tempfile.TemporaryDirectory(prefix="skyward-kill-", dir=memory if memory.is_dir() else None) as folder,
        ThreadPoolExecutor(len(arguments)) as threads,
    ):

        def work(number: int) -> str:
            place = Path(folder) / str(number)
            place.mkdir()
            command = [sys.executable, "-m", "tests.kill.worker", str(place), *map(str, arguments[number])]
            pipes = {"stdin": subprocess.DEVNULL, "stdout": subprocess.PIPE}
            with (place / "errors").open("wb") as errors:
                process = subprocess.Popen(command, cwd=REPOSITORY, stderr=errors, text=True, **pipes)
            with process:
                assert process.stdout is not None
                for line in process.stdout:
                    found.append(json.loads(line))
                    report(found[-1])
            if not process.returncode:
                return ""
            return f"a worker ended with {process.returncode}:\n{(place / 'errors').read_text()}"

        failed = [trouble for trouble in threads.map(work, range(len(arguments))) if trouble]
    if failed:
        raise RuntimeError("\n".join(failed))
    return found


def is_kill(point: dict[str, Any]) -> bool:
    return point["killed"] != "none"


def wrong(points: Sequence[dict[str, Any]]) -> list[str]:
    return [
        f"{point['scenario']}; killed: {point['killed']} at {point['boundary']}/{point['then']} ({point['phase']}); safeguard: {point['safeguard']}: {'; '.join(point['problems'])}"
        for point in points
        if point["problems"] or point["alive"]
    ]


def table(points: Sequence[dict[str, Any]]) -> Table:
    """Phase by killed process and safeguard: points, machines left by the kill, machines alive after the safeguard."""
    shown = Table(
        title="points / machines that the kill has left running / alive after the safeguard", title_justify="left"
    )
    shown.add_column("killed in the phase")
    for _, _, name in COLUMNS:
        shown.add_column(name, justify="right")
    for phase in PHASES:
        shown.add_row(phase.value, *(_cell(points, killed, safeguard, phase.value) for killed, safeguard, _ in COLUMNS))
    shown.add_section()
    shown.add_row("all", *(_cell(points, killed, safeguard, None) for killed, safeguard, _ in COLUMNS))
    return shown


def _cell(points: Sequence[dict[str, Any]], killed: str, safeguard: str, phase: str | None) -> str:
    its = [
        point
        for point in points
        if (point["killed"], point["safeguard"]) == (killed, safeguard) and phase in (None, point["phase"])
    ]
    if not its:
        return ""
    alive = sum(point["alive"] for point in its)
    return f"{len(its)} / {sum(point['alive_before'] for point in its)} / {f'[bold red]{alive}[/]' if alive else 0}"
