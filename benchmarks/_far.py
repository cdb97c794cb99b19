"""Measure pools on hosts of the test bed over SSH, and bare Dask behind an asyncssh tunnel: the second section.

Each measurement is a new subprocess (`_cases.py`), which measures its own time from `with` on. The systems take turns
on the same hosts. Then `ssh_path.py` measures the SSH path alone.

    python benchmarks/bench.py --only far
"""

from __future__ import annotations

import contextlib
import importlib
import json
import os
import shutil
import subprocess
import sys
import tempfile
import time
from collections import defaultdict
from collections.abc import Generator, Sequence
from dataclasses import asdict
from importlib.metadata import version
from pathlib import Path
from typing import Any

import ssh_path
from _place import Place
from _table import Measured, Row, table

from skyward_core import Image
from skyward_core.image.image import runtime_pins

HERE = Path(__file__).resolve().parent
ROUNDS = 3
SSH_PATH_ROUNDS = 3
MANY_HOSTS = 6
LIMIT_SECONDS = 120.0
BUDGET_SECONDS = 200.0  # after the first round, a round begins only if it will probably end before this time
SYSTEMS = {"skyward": "skyward-far", "dask": "dask-far"}
PACKAGES = (f"numpy=={version('numpy')}",)

ROWS = (
    Row("one host, environment cached: `with` to first result", "far", "first", "s", 1, "first", most=4),
    Row("tiny call, one after another", "far", "median", "ms", 1e3, "median", most=6),
    Row("the same, 99th percentile", "far", "p99", "ms", 1e3, "p99"),
    Row("2,000 tiny calls, `pool.map`", "far", "map", "calls/s", 1, "map", more_is_better=True, least=2000),
    Row("100 MiB array to the host and back", "far", "array", "s", 1, "array", most=0.7),
    Row("the same, the first time", "far", "first_array", "s", 1, "first_array"),
    Row("bare host: `with` to first result", "bare", "one", "s", 1, "one"),
    Row(f"{MANY_HOSTS} bare hosts, until all have joined", "bare", "many", "s", 1, "many"),
    Row(f"{MANY_HOSTS} bare hosts to one", "bare", "growth", "x", 1, "growth"),
    Row(f"{MANY_HOSTS} bare hosts, time if no core were idle", "bare", "least", "s", 1, "least"),
    Row("cached host: `with` to first result", "cached", "one", "s", 1, "one"),
    Row(f"{MANY_HOSTS} cached hosts, until all have joined", "cached", "many", "s", 1, "many"),
    Row(f"{MANY_HOSTS} cached hosts to one", "cached", "growth", "x", 1, "growth"),
    Row(f"{MANY_HOSTS} cached hosts, time if no core were idle", "cached", "least", "s", 1, "least"),
)


def section(rounds: int = ROUNDS) -> tuple[list[str], list[str]]:
    """Measure all rows; return the lines of the section, and the failures.

    If this machine cannot make hosts, the section has one line with the reason.
    """
    title = ["", "# On hosts of the test bed, over SSH", ""]
    if reason := ssh_path.why_not():
        return [*title, f"Not measured: {reason}"], []
    comparison = Comparison()
    try:
        comparison.run(rounds)
    finally:
        comparison.close()
    path = [] if comparison.troubles else ssh_path.table(ssh_path.measure(SSH_PATH_ROUNDS)).splitlines()
    return [
        *title,
        "Hosts are network, mount and process namespaces of this machine. Each has an `sshd`, and all share the cores with the client. Dask: its scheduler and one",
        "worker with one thread on each host, started through a plain asyncssh tunnel in the same environment, with default settings, without TLS. Each measurement",
        "is a new process. The seconds from `with` on include the import of Dask, for both systems. Bare hosts have neither this version of Python nor uv; packages",
        "and Python come from an index on the same machine. Time if no core were idle: the processor time of all processes meanwhile, divided by the number of cores.",
        "",
        *table(ROWS, comparison.measured, ["dask"]),
        "",
        *(f"- {note}" for note in (*comparison.notes, *(f"FAILED {trouble}" for trouble in comparison.troubles))),
        "",
        "## The SSH path alone",
        "",
        *path,
    ], comparison.troubles


class Comparison:
    """The measurements so far, and the failures."""

    def __init__(self) -> None:
        self.measured: Measured = defaultdict(lambda: defaultdict(lambda: defaultdict(list)))
        self.troubles: list[str] = []
        self.notes: list[str] = []
        self._directory = Path(tempfile.mkdtemp(prefix="skb-", dir="/tmp"))

    def close(self) -> None:
        shutil.rmtree(self._directory, ignore_errors=True)

    def run(self, rounds: int) -> None:
        """Measure all cases with both systems in each round. A busy machine gets fewer rounds."""
        deadline = time.monotonic() + BUDGET_SECONDS
        testbed = ssh_path.testbed()
        mirror: Any = importlib.import_module("tests.testbed.mirror")
        with testbed.Fleet() as fleet, mirror.Mirror(fleet.network.gateway, requirements()) as index:
            one = fleet.create()
            index.configure(one)
            key = str(fleet.key_path)
            self._open("skyward", _place([one], key))  # fills the cache, and is not measured
            for number in range(1, rounds + 1):
                began = time.monotonic()
                for system in SYSTEMS:
                    print(f"far, round {number} of {rounds}: {system}", file=sys.stderr, flush=True)
                    self._record("far", system, self._measure("far", system, _place([one], key, is_cached=True)))
                with _hosts(fleet, index, 2 * (1 + MANY_HOSTS)) as hosts:
                    self._compare_openings(f"round {number} of {rounds}", hosts, key)
                if number < rounds and 2 * time.monotonic() - began > deadline:
                    self.notes.append(f"The machine was slow: {number} of {rounds} rounds.")
                    break

    def _compare_openings(self, which: str, hosts: Sequence[Any], key: str) -> None:
        """Measure openings on bare hosts, half of them for each system, then on hosts with a cached environment."""
        ours, theirs = hosts[: len(hosts) // 2], hosts[len(hosts) // 2 :]
        for case, system, case_hosts, is_cached in (
            ("bare", "skyward", ours, False),
            ("bare", "dask", theirs, False),
            ("cached", "skyward", ours, True),
            ("cached", "dask", ours, True),
        ):
            print(f"far, {which}: {case}, {system}", file=sys.stderr, flush=True)
            first, *others = case_hosts
            one = self._open(system, _place([first], key, is_cached=is_cached))
            many = self._open(system, _place(others, key, is_cached=is_cached))
            if one and many:
                least = many["processor"] / len(os.sched_getaffinity(0))
                self._record(
                    case,
                    system,
                    {
                        "one": one["first"],
                        "many": many["first"],
                        "growth": many["first"] / one["first"],
                        "least": least,
                    },
                )

    def _open(self, system: str, place: Place) -> dict[str, float]:
        return self._measure("opening", system, place)

    def _record(self, case: str, system: str, values: dict[str, float]) -> None:
        for metric, value in values.items():
            self.measured[case][system][metric].append(value)

    def _measure(self, case: str, system: str, place: Place) -> dict[str, float]:
        argv = [
            sys.executable,
            str(HERE / "_cases.py"),
            "--case",
            case,
            "--system",
            SYSTEMS[system],
            "--place",
            json.dumps(asdict(place)),
        ]
        env = os.environ | {"TMPDIR": str(self._directory)}
        env |= {
            f"XDG_{kind}_HOME": str(self._directory / kind.lower()) for kind in ("CACHE", "CONFIG", "DATA", "STATE")
        }
        stderr = ""
        try:
            done = subprocess.run(
                argv,
                stdin=subprocess.DEVNULL,
                capture_output=True,
                text=True,
                timeout=LIMIT_SECONDS,
                cwd=self._directory,
                env=env,
                check=False,
            )
            stderr = done.stderr
            return json.loads(done.stdout.splitlines()[-1])["result"]
        except (subprocess.SubprocessError, ValueError, LookupError) as error:
            self.troubles.append(f"{case}, {system}: {error!r}: {' / '.join(stderr.splitlines()[-5:])}")
            return {}


@contextlib.contextmanager
def _hosts(fleet: Any, index: Any, count: int) -> Generator[list[Any]]:
    """Make new hosts, and end them with the context, because their disks use memory of this machine."""
    hosts = [fleet.create() for _ in range(count)]
    try:
        for host in hosts:
            index.configure(host)
        yield hosts
    finally:
        for host in hosts:
            host.crash()


def _place(hosts: Sequence[Any], key: str, *, is_cached: bool = False) -> Place:
    python = f"/root/.cache/skyward/envs/{Image(pip=PACKAGES).content_hash()}/bin/python"
    return Place([host.ip for host in hosts], key, PACKAGES, requirements(), python if is_cached else None)


def requirements() -> tuple[str, ...]:
    return (*runtime_pins(), *PACKAGES)
