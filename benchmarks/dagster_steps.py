"""Measure steps of Dagster on pools: against a plain op and Dagster's own Pipes client, five that share a pool against
five that do not, the second try of a step whose process was killed, and 10,000 messages of Dagster Pipes.

    python benchmarks/dagster_steps.py --rounds 3
    python benchmarks/dagster_steps.py --rounds 3 --only plain,warm,warm_pipes,subprocess_pipes,cold

Without `--only` it is what the marks are for; the first step of a process is the second line.

Each measurement is a new process, which imports Dagster and Skyward before the time begins, as a code location does.
The instance keeps its events in SQLite. The ways take turns. A step's time is that from its start event to its success
event; a run's is that of the call which executes it. "turns" is one process with ten steps of each kind, in turns: its
first step of a kind is left out, because it connects the process to the pool. It prints tables for
benchmarks/RESULTS.md.
"""

from __future__ import annotations

import argparse
import json
import os
import signal
import statistics
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from importlib.metadata import version
from pathlib import Path
from typing import Any

WAYS = (
    "plain",
    "warm",
    "warm_pipes",
    "subprocess_pipes",
    "cold",
    "five_plain",
    "five_shared",
    "five_alone",
    "turns",
    "killed_plain",
    "killed_on_pool",
    "messages",
    "messages_of_subprocess",
)
MARKS = WAYS[WAYS.index("five_plain") :]
WORDS = {
    "plain": "plain op",
    "warm": "`compute.run` on a warm pool",
    "warm_pipes": "`PipesSkywardClient` on a warm pool",
    "subprocess_pipes": "`PipesSubprocessClient`",
    "cold": "`compute.run` on a cold pool",
    "five_plain": "five plain ops",
    "five_shared": 'five, `sharing="run"`',
    "five_alone": "five, each its own pool",
}
TURNS = {
    "plain": "plain op",
    "on_pool": "`compute.run`",
    "pipes_on_pool": "`PipesSkywardClient`",
    "in_subprocess": "`PipesSubprocessClient`",
}
KILLED = {"killed_plain": "plain op", "killed_on_pool": "`compute.run` on a warm pool"}
MESSAGES = {"messages": "many_messages", "messages_of_subprocess": "many_from_a_subprocess"}
"""The ways that send 10,000 messages, and their ops, which return the seconds."""
SECONDS = 900
HERE = Path(__file__).resolve().parent
"""The folder of `_dagster_jobs`, from which processes of steps import it."""


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--only", default=",".join(MARKS), help=f"ways, with commas, of: {', '.join(WAYS)}")
    parser.add_argument("--measure", metavar="WAY", help=argparse.SUPPRESS)
    parser.add_argument("--hold", action="store_true", help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.measure:
        print(json.dumps(measured(options.measure)))
        return 0
    if options.hold:
        hold()
        return 0
    load, ways = os.getloadavg()[0], options.only.split(",")
    found: dict[str, list[dict[str, float]]] = {way: [] for way in ways}
    with tempfile.TemporaryDirectory(prefix="skyward-bench-") as folder, warm_pool(Path(folder)) as environ:
        for _ in range(options.rounds):
            for way in ways:
                began = time.monotonic()
                found[way].append(in_a_process(way, environ))
                print(f"{way} {found[way][-1]} ({time.monotonic() - began:.0f} s)", flush=True)
    print("\n".join(report(found, options.rounds, load)))
    return 0


def in_a_process(way: str, environ: dict[str, str]) -> dict[str, float]:
    command = [sys.executable, HERE / Path(__file__).name, "--measure", way]
    done = subprocess.run(command, env=environ, cwd=HERE, capture_output=True, text=True, timeout=SECONDS, check=False)
    assert done.returncode == 0, done.stdout[-2000:] + done.stderr[-4000:]
    return json.loads(done.stdout.splitlines()[-1])


@contextmanager
def warm_pool(folder: Path) -> Iterator[dict[str, str]]:
    """A process that holds a pool with a name; yields the environment with the instance and the ledger."""
    (folder / "dagster.yaml").write_text("telemetry: {enabled: false}\n")
    environ = os.environ | {
        "DAGSTER_HOME": str(folder),
        "SKYWARD_LEDGER": f"sqlite:///{folder}/ledger.db",
        **{f"XDG_{kind}_HOME": f"{folder}/{kind.lower()}" for kind in ("CACHE", "CONFIG", "STATE")},
    }
    pipe = subprocess.PIPE
    with subprocess.Popen(
        [sys.executable, HERE / Path(__file__).name, "--hold"], env=environ, stdin=pipe, stdout=pipe, text=True
    ) as holder:
        assert holder.stdout is not None
        assert holder.stdout.readline() == "open\n"
        try:
            yield environ
        finally:
            holder.communicate("")


def hold() -> None:
    import _dagster_jobs as jobs

    import skyward_core as sky

    with sky.ComputePool.from_spec(jobs.WARM.spec):
        print("open", flush=True)
        sys.stdin.read()
    sky.release(jobs.NAME)


# ── one measurement, in its own process ──────────────────────────────────────────────────────────────────────────────


def measured(way: str) -> dict[str, float]:
    """Return the seconds of the run, and of its longest step."""
    import _dagster_jobs as jobs
    import dagster as dg

    import skyward_core.pool.pool  # noqa: F401 - as in a process that has loaded the definitions

    functions = {
        "five_plain": jobs.plain_job,
        "five_shared": jobs.shared_job,
        "five_alone": jobs.alone_job,
        "killed_plain": jobs.killed_plain_job,
        "killed_on_pool": jobs.killed_on_pool_job,
    }
    with dg.DagsterInstance.get() as instance, killing(way) as folder:
        processor = note_processor_time(instance)
        began = time.monotonic()
        if way in functions:
            result = dg.execute_job(dg.reconstructable(functions[way]), instance=instance)
        else:
            result = jobs.JOBS[way].execute_in_process(instance=instance)
        seconds = time.monotonic() - began
        assert result.success
        if way in KILLED:
            return seconds_of_retry(instance, result.run_id, folder)
        stats = instance.get_run_step_stats(result.run_id)
    steps = {one.step_key: one.end_time - one.start_time for one in stats if one.end_time and one.start_time}
    if way == "turns":
        later = {kind: [f"{kind}__{number}" for number in range(1, jobs.TURNS)] for kind in TURNS}
        middles = {kind: statistics.median(steps[key] for key in keys) for kind, keys in later.items()}
        for kind, keys in later.items():
            middles[f"{kind} processor"] = statistics.median(
                processor[key, "STEP_SUCCESS"] - processor[key, "STEP_START"] for key in keys
            )
        return middles
    found = {"run": seconds, "step": max(steps.values())}
    op = MESSAGES.get(way)
    return found if op is None else {"messages": result.output_for_node(op)}


def note_processor_time(instance: Any) -> dict[tuple[str, str], float]:
    """Return the seconds of processor time of this process, all threads, at each event by step and type."""
    storage = instance.event_log_storage
    store, seconds = storage.store_event, dict[tuple[str, str], float]()

    def noted(entry: Any) -> None:
        if entry.is_dagster_event and entry.step_key:
            seconds[entry.step_key, entry.dagster_event.event_type_value] = time.process_time()
        store(entry)

    storage.store_event = noted
    return seconds


@contextmanager
def killing(way: str) -> Iterator[Path]:
    """Kill the process of the step once its first call runs, if the way is about that."""
    with tempfile.TemporaryDirectory(prefix="skyward-bench-") as name:
        folder = Path(name)
        os.environ["BENCH_FOLDER"] = name

        def kill() -> None:
            while not (folder / "0.call").exists():
                time.sleep(0.02)
            time.sleep(1.0)  # the step is at rest
            (folder / "killed").write_text(repr(time.time()))
            os.kill(int((folder / "0.pid").read_text()), signal.SIGKILL)

        if way in KILLED:
            threading.Thread(target=kill, daemon=True).start()
        yield folder


def seconds_of_retry(instance: Any, run_id: str, folder: Path) -> dict[str, float]:
    """From the kill, and from the event that begins the second try, to the first line of its call."""
    call, killed = (float((folder / name).read_text()) for name in ("1.call", "killed"))
    (restarted,) = [
        entry.timestamp
        for entry in instance.all_logs(run_id)
        if entry.is_dagster_event and entry.dagster_event.event_type_value == "STEP_RESTARTED"
    ]
    return {"from the kill": call - killed, "from its start event": call - restarted}


# ── the table ────────────────────────────────────────────────────────────────────────────────────────────────────────


def report(found: dict[str, list[dict[str, float]]], rounds: int, load: float) -> list[str]:
    lines = [
        (
            f"Medians of {rounds} rounds, [least, most]; {os.cpu_count()} cores, load average of the last minute, before →"
            f" after: {load:.1f} → {os.getloadavg()[0]:.1f}. Python {sys.version.split()[0]}, dagster {version('dagster')}."
        ),
        "",
        "| way | step, s | to plain | run, s | to plain |",
        "| --- | ---: | ---: | ---: | ---: |",
    ]
    for way in (way for way in WORDS if way in found):
        base = "five_plain" if way.startswith("five") else "plain"
        cells: list[str] = []
        for key in ("step", "run"):
            middle, ratio = statistics.median(values(found, way, key)), ""
            if base in found:
                ratio = f"{middle / statistics.median(values(found, base, key)):.1f}"
            least, most = min(values(found, way, key)), max(values(found, way, key))
            cells += [f"{middle:.2f} [{least:.2f}, {most:.2f}]", ratio]
        lines.append(f"| {WORDS[way]} | {' | '.join(cells)} |")
    if "turns" in found:
        head = "a further step in one process | ms | more than plain, ms | processor time of the process, ms"
        lines += ["", f"| {head} | more than plain, ms |", "| --- | ---: | ---: | ---: | ---: |"]
        for kind, words in TURNS.items():
            cells = []
            for suffix in ("", " processor"):
                middle, least, most = spread(values(found, "turns", f"{kind}{suffix}"), 1000)
                plain = 1000 * statistics.median(values(found, "turns", f"plain{suffix}"))
                cells += [f"{middle:.1f} [{least:.1f}, {most:.1f}]", f"{middle - plain:.1f}"]
            lines.append(f"| {words} | {' | '.join(cells)} |")
    if killed := [way for way in KILLED if way in found]:
        lines += ["", "| a second try, after SIGKILL | from the kill, s | from its start event, s |"]
        lines.append("| --- | ---: | ---: |")
        for way in killed:
            times = [spread(values(found, way, key)) for key in ("from the kill", "from its start event")]
            cells = [f"{middle:.2f} [{least:.2f}, {most:.2f}]" for middle, least, most in times]
            lines.append(f"| {KILLED[way]} | {' | '.join(cells)} |")
    words = {"messages": "a node", "messages_of_subprocess": "a subprocess, by Dagster's own client"}
    for way in (way for way in MESSAGES if way in found):
        middle, least, most = spread(values(found, way, "messages"))
        lines += ["", f"10,000 messages of Pipes from {words[way]}: {middle:.2f} s [{least:.2f}, {most:.2f}]."]
    return lines


def spread(values: list[float], scale: float = 1.0) -> tuple[float, float, float]:
    return scale * statistics.median(values), scale * min(values), scale * max(values)


def values(found: dict[str, list[dict[str, float]]], way: str, key: str) -> list[float]:
    return [one[key] for one in found[way]]


if __name__ == "__main__":
    sys.exit(main())
