"""Compare Skyward, Dask and Ray on this machine in one run, then over SSH (`_far.py`): `make bench`.

Each measurement is a new subprocess (`_cases.py`). The systems take turns in each round, and the table shows the median
of the rounds. The program prints the table, and writes it into `RESULTS.md` beside this file, before the line OTHERS.

    python benchmarks/bench.py --only calls,array --rounds 5
"""

from __future__ import annotations

import argparse
import contextlib
import datetime as dt
import importlib.metadata
import itertools
import json
import os
import platform
import shutil
import subprocess
import sys
import tempfile
import threading
import time
from collections import defaultdict
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import IO, Any

import _far
import _memory
import psutil
from _table import Measured, Row, table

HERE = Path(__file__).resolve().parent
RESULTS = HERE / "RESULTS.md"
OTHERS = "<!-- The tables below are those of other programs. Each names its own. -->"
"""The line in RESULTS.md from which on this program keeps it as it is."""
SYSTEMS = ("skyward", "dask", "ray")
ROUNDS = 3
TURNS = {"start": 2, "calls": 1, "array": 1}  # measurements of each case in a round
BUDGET_SECONDS = 345.0  # after the first round, a round begins only if it will probably end before this time
CASES = (*TURNS, "import", "far")
IMPORT_ROUNDS = 15
PACKAGES = {"skyward": "skyward_core", "dask": "distributed", "ray": "ray"}
HEAVY = ("distributed", "dask", "pydantic")
LIMIT_SECONDS = 120.0
LEAVE_SECONDS = 10.0
MB = 1e6

ROWS = (
    Row("start: fresh interpreter to first result", "start", "first", "s", 1, "first", "first", dask_mark=1.5),
    Row("end: first result to end of the process", "start", "end", "s", 1, "end", "end"),
    Row("tiny call, one after another", "calls", "median", "ms", 1e3, "median", "median", dask_mark=0.7),
    Row("the same, 99th percentile", "calls", "p99", "ms", 1e3, "p99", "p99"),
    Row(
        "the same, Dask's client on our pool",
        "calls",
        "median",
        "ms",
        1e3,
        "median",
        "median",
        our_system="dask-on-skyward",
    ),
    Row(
        "10,000 tiny calls, `pool.map`",
        "calls",
        "map",
        "calls/s",
        1,
        "map",
        "map",
        more_is_better=True,
        dask_mark=1,
        ray_mark=1,
        least=5000,
    ),
    Row(
        "10,000 tiny calls, `gather(...) >> pool`",
        "calls",
        "gather",
        "calls/s",
        1,
        "map",
        "map",
        more_is_better=True,
        dask_mark=1,
        ray_mark=1,
        least=5000,
    ),
    Row("2,000 calls, 1 % of them take 50 ms", "calls", "mixed", "s", 1, "mixed", "mixed"),
    Row("100 MB array in and out", "array", "seconds", "s", 1, "seconds", "seconds", dask_mark=0.6, ray_mark=1.0),
    Row("peak memory of it, above the memory before", "array", "peak", "MB", 1 / MB, "peak", "peak"),
    Row("peak use of /dev/shm, above the use before", "array", "peak_shm", "MB", 1 / MB, "peak_shm", "peak_shm"),
    Row("memory still in use after it", "array", "left", "MB", 1 / MB, "left", "left"),
    Row("/dev/shm still in use after it", "array", "left_shm", "MB", 1 / MB, "left_shm", "left_shm"),
    Row("memory of an idle pool", "array", "idle", "MB", 1 / MB, "idle", "idle"),
    Row("import, without the interpreter's start", "import", "seconds", "ms", 1e3, "seconds", "seconds", most=100),
)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument(
        "--only", default="", help=f"cases, separated by commas: {', '.join(CASES)}; does not write RESULTS.md"
    )
    parser.add_argument(
        "--rounds", type=int, default=0, help=f"number of rounds instead of {ROUNDS}; does not write RESULTS.md"
    )
    options = parser.parse_args()
    only = [case for case in options.only.split(",") if case]
    if unknown := set(only) - {*CASES}:
        parser.error(f"unknown case: {', '.join(sorted(unknown))}")
    _memory.adopt_orphans()
    bench = Bench()
    began, load = time.monotonic(), os.getloadavg()
    try:
        if not only or "import" in only:
            bench.compare_imports(IMPORT_ROUNDS)
        bench.compare(
            [case for case in TURNS if not only or case in only],
            options.rounds or ROUNDS,
            deadline=began + BUDGET_SECONDS,
        )
    finally:
        bench.close()
    far, troubles = _far.section(options.rounds or _far.ROUNDS) if not only or "far" in only else ([], [])
    report = _report(bench, load, time.monotonic() - began, far)
    print(report)
    if bench.troubles or troubles:
        print("Some measurements failed: RESULTS.md was not written.", file=sys.stderr)
        return 1
    if not only and not options.rounds:
        others = RESULTS.read_text().index(OTHERS)  # ValueError: nothing is written, or the other tables would be lost
        RESULTS.write_text(f"{report}\n{RESULTS.read_text()[others:]}")
    return 0


class Bench:
    """The measurements so far, their directory, and the failures."""

    def __init__(self) -> None:
        self.measured: Measured = defaultdict(lambda: defaultdict(lambda: defaultdict(list)))
        self.troubles: list[str] = []
        self.notes: list[str] = []
        # The path is short, because Ray puts sockets far below it, and the path of a socket has at most 107 bytes.
        self._directory = Path(tempfile.mkdtemp(prefix="skb-", dir="/tmp"))

    def close(self) -> None:
        shutil.rmtree(self._directory, ignore_errors=True)

    def compare(self, cases: Sequence[str], rounds: int, deadline: float) -> None:
        """Measure all cases with all systems in each round. A busy machine gets fewer rounds."""
        for number in range(1, rounds + 1):
            began = time.monotonic()
            for case in cases:
                self._compare_once(case, f"round {number} of {rounds}")
            if number < rounds and 2 * time.monotonic() - began > deadline:
                self.notes.append(f"The machine was slow: {number} of {rounds} rounds.")
                break

    def _compare_once(self, case: str, which: str) -> None:
        systems = (*SYSTEMS, "dask-on-skyward") if case == "calls" else SYSTEMS
        for _, system in itertools.product(range(TURNS[case]), systems):
            print(f"{which}: {case}, {system}", file=sys.stderr, flush=True)
            try:
                values = self._measure("sequential" if system == "dask-on-skyward" else case, system)
            except (subprocess.SubprocessError, ValueError, KeyError) as error:
                self.troubles.append(f"{which}: {case}, {system}: {error}")
                continue
            for metric, value in values.items():
                self.measured[case][system][metric].append(value)

    def compare_imports(self, rounds: int) -> None:
        """Measure the imports in turns, each in a new interpreter, which reads the clock itself.

        The slow imports have a turn in every third round.
        """
        for number in range(rounds):
            for system, package in PACKAGES.items():
                if system == "skyward" or number % 3 == 0:
                    code = f"import time; began = time.perf_counter(); import {package}; print(time.perf_counter() - began)"
                    self.measured["import"][system]["seconds"].append(float(_printed(code)))
        code = f"import sys, skyward_core; print(*(name for name in {HEAVY!r} if name in sys.modules), sep=', ')"
        loaded = _printed(code)
        self.notes.append(f"After `import skyward_core`, of {', '.join(HEAVY)} these are loaded: {loaded or 'none'}.")

    def _measure(self, case: str, system: str) -> dict[str, float]:
        directory = Path(tempfile.mkdtemp(dir=self._directory))
        began = time.monotonic()
        with (directory / "stderr").open("w+") as errors:
            process = subprocess.Popen(
                [sys.executable, str(HERE / "_cases.py"), "--case", case, "--system", system],
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=errors,
                text=True,
                cwd=directory,
                env=_environment(directory),
            )
            try:
                result = _listen(process)
                process.communicate(timeout=LIMIT_SECONDS)
            finally:
                ended = time.monotonic()
                self._clear(process, f"{case}, {system}")
            if result is None or process.returncode != 0:
                errors.seek(0)
                tail = " / ".join(line.strip() for line in errors.read().splitlines() if line.strip(" ^~"))[-300:]
                raise subprocess.SubprocessError(f"exit status {process.returncode}: {tail}")
        if case == "start":
            first = result["first_result_at"]
            return {"first": first - began, "end": ended - first}
        return result

    def _clear(self, process: subprocess.Popen[str], measurement: str) -> None:
        """Wait until all processes of a measurement have ended; kill those that do not end, and report them."""
        deadline = time.monotonic() + LEAVE_SECONDS
        if process.poll() is None:
            process.kill()
            process.wait()
        while (left := _memory.descendants()) and time.monotonic() < deadline:
            time.sleep(0.05)
        if left:
            self.notes.append(
                f"{measurement}: {len(left)} processes ran {LEAVE_SECONDS:.0f} s after it and were killed."
            )
        for one in left:
            with contextlib.suppress(psutil.NoSuchProcess):
                one.kill()
        _reap()


def _listen(process: subprocess.Popen[str]) -> dict[str, float] | None:
    """Return the result of the case; measure its memory between the phases that it announces."""
    assert process.stdin is not None
    assert process.stdout is not None
    before = after = peak = None
    watch: _memory.Peak | None = None
    result: dict[str, float] | None = None
    try:
        for line in _lines(process.stdout, process):
            message: dict[str, Any] = json.loads(line)
            match message.get("phase"):
                case "before":
                    before = _memory.settled()
                case "transfer":
                    watch = _memory.Peak()
                case "after" if watch:
                    peak, watch = watch.read(), None
                    after = _memory.settled()
                case _:
                    result = message["result"]
                    break
            process.stdin.write("\n")
            process.stdin.flush()
    finally:
        if watch:
            watch.read()
    if result is not None and before and peak and after:
        result |= {"idle": before.pss, "peak": peak.pss - before.pss, "peak_shm": peak.shm - before.shm}
        result |= {"left": after.pss - before.pss, "left_shm": after.shm - before.shm}
    return result


def _lines(stdout: IO[str], process: subprocess.Popen[str]) -> Iterator[str]:
    """Yield the lines of a case; kill a case that takes too long, which ends its lines."""
    timer = threading.Timer(LIMIT_SECONDS, process.kill)
    timer.start()
    try:
        yield from stdout
    finally:
        timer.cancel()
        timer.join()


def _environment(directory: Path) -> dict[str, str]:
    """Return the environment of this process, changed so that systems write only to the measurement's directory.

    It also turns off Ray's statistics and its use of uv.
    """
    return os.environ | {
        "TMPDIR": str(directory),
        "XDG_CACHE_HOME": str(directory.parent / "cache"),
        "XDG_CONFIG_HOME": str(directory.parent / "config"),
        "XDG_DATA_HOME": str(directory.parent / "data"),
        "XDG_STATE_HOME": str(directory.parent / "state"),
        "RAY_USAGE_STATS_ENABLED": "0",
        # Without this, Ray under `uv run` starts each of its workers with `uv run` too.
        "RAY_ENABLE_UV_RUN_RUNTIME_ENV": "0",
    }


def _reap() -> None:
    """Take the exit status of every adopted child that has ended."""
    with contextlib.suppress(ChildProcessError):
        while os.waitpid(-1, os.WNOHANG)[0]:
            pass


def _printed(code: str) -> str:
    return subprocess.run(
        [sys.executable, "-c", code], check=True, timeout=60, cwd="/tmp", capture_output=True, text=True
    ).stdout.strip()


# ── report ───────────────────────────────────────────────────────────────────────────────────────────────────────────


def _report(bench: Bench, load: tuple[float, float, float], seconds: float, far: Sequence[str]) -> str:
    lines = [
        "# Side by side",
        "",
        "Written by `make bench`. Medians of the rounds. The systems take turns in each round, each in a new process: two nodes (workers) of one slot",
        "on this machine, connected over loopback. Dask: `LocalCluster(n_workers=2, threads_per_worker=1)`; Ray: `ray.init(num_cpus=2)`.",
        "In brackets: lowest and highest round. A ratio is our value divided by the value of the other system.",
        "",
        *_machine(load, seconds),
        "",
        *table(ROWS, bench.measured),
        "",
        *(f"- {note}" for note in (*bench.notes, *(f"FAILED {trouble}" for trouble in bench.troubles))),
        *far,
    ]
    return "\n".join(lines).rstrip() + "\n"


def _machine(load: tuple[float, float, float], seconds: float) -> list[str]:
    cpu = next(
        (
            line.split(":", 1)[1].strip()
            for line in Path("/proc/cpuinfo").read_text().splitlines()
            if line.startswith("model name")
        ),
        "?",
    )
    versions = ", ".join(f"{name} {_version(name)}" for name in ("dask", "distributed", "ray", "numpy", "asyncssh"))
    loads = " → ".join(f"{one[0]:.2f}" for one in (load, os.getloadavg()))
    return [
        f"- {dt.datetime.now(dt.UTC):%Y-%m-%d %H:%M} UTC, {seconds:.0f} s; load average of the last minute, before → after: {loads}",
        f"- {cpu}, {len(os.sched_getaffinity(0))} cores, {psutil.virtual_memory().total / 1e9:.1f} GB of memory, Linux {platform.release()}",
        f"- Commit {_commit()}, Python {platform.python_version()}, {versions}",
    ]


def _commit() -> str:
    """Return the commit that is measured. The version of the installed package is that of its installation."""
    described = ["git", "-C", str(HERE), "describe", "--always", "--abbrev=8", "--dirty=, and uncommitted changes"]
    return subprocess.run(described, check=True, timeout=60, capture_output=True, text=True).stdout.strip()


def _version(name: str) -> str:
    try:
        return importlib.metadata.version(name)
    except importlib.metadata.PackageNotFoundError:
        return "(not installed)"


if __name__ == "__main__":
    sys.exit(main())
