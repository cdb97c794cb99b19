"""Compare task runners of Prefect on one server and this machine: ours on `Local`, threads, Dask and Ray.

    uv run --locked --extra prefect --with prefect-dask --with prefect-ray --with ray python benchmarks/prefect_runners.py
    python benchmarks/prefect_runners.py --rounds 1 --only skyward,threads --cases tiny

Each measurement is a flow run in a new process, which submits one task before the time begins: the start of a cluster
is not in the numbers, except in those of the whole run. Runners take turns; each begins when the server
has nothing to do any more. It prints a table for benchmarks/RESULTS.md.
"""

from __future__ import annotations

import argparse
import json
import os
import resource
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any
from urllib.request import urlopen

RUNNERS = ("threads", "skyward", "threads-64", "skyward-64", "dask", "ray")
CASES = ("tiny", "one", "rows", "result", "large", "first", "retry")
OURS_ONLY = ("first", "retry")
TINY, ONE, ROWS, RESULT_BYTES, LARGE, LARGE_BYTES = 1000, 100, 200_000, 200_000_000, 200, 5_000_000
SECONDS = 900


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--only", default=",".join(RUNNERS), help="runners, with commas")
    parser.add_argument("--cases", default=",".join(CASES), help="cases, with commas")
    parser.add_argument("--measure", nargs=2, metavar=("RUNNER", "CASE"), help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.measure:
        print(json.dumps(measured(*options.measure)))
        return 0
    load = os.getloadavg()
    runners = options.only.split(",")
    found: dict[tuple[str, str], list[dict[str, float]]] = {}
    with tempfile.TemporaryDirectory(prefix="skyward-bench-") as folder, server(Path(folder)) as (environ, server_id):
        for _ in range(options.rounds):
            for case in options.cases.split(","):
                for runner in runners if case not in OURS_ONLY else ["skyward"]:
                    wait_until_idle(server_id)
                    result = in_a_process(runner, case, environ)
                    found.setdefault((runner, case), []).append(result)
                    print(runner, case, result, flush=True)
    print(report(found, runners, options.rounds, load))
    return 0


def in_a_process(runner: str, case: str, environ: dict[str, str]) -> dict[str, float]:
    command = [sys.executable, __file__, "--measure", runner, case]
    done = subprocess.run(command, env=environ, capture_output=True, text=True, timeout=SECONDS, check=False)
    ended_at = time.time()
    assert done.returncode == 0, done.stdout[-2000:] + done.stderr[-4000:]
    found = json.loads(done.stdout.splitlines()[-1])
    if (last_task_at := found.pop("last_task_at", None)) is not None:
        found["to the end"] = ended_at - last_task_at
        found["run"] = ended_at - found.pop("begun_at")
    return found


@contextmanager
def server(folder: Path) -> Iterator[tuple[dict[str, str], int]]:
    """A Prefect server with an empty database; yields the environment of its clients, and the id of its process."""
    port = "4299"
    environ = os.environ | {
        "PREFECT_HOME": str(folder),
        "PREFECT_API_URL": f"http://127.0.0.1:{port}/api",
        "PREFECT_SERVER_ANALYTICS_ENABLED": "false",
        "PREFECT_LOGGING_LEVEL": "WARNING",
        "XDG_STATE_HOME": str(folder / "state"),
        "RAY_USAGE_STATS_ENABLED": "0",
        "RAY_ENABLE_UV_RUN_RUNTIME_ENV": "0",
    }
    command = [sys.executable, "-m", "prefect", "server", "start", "--port", port]
    with subprocess.Popen(command, env=environ, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL) as process:
        try:
            deadline = time.monotonic() + 300
            while not answers(f"http://127.0.0.1:{port}/api/health"):
                assert time.monotonic() < deadline, "the server of Prefect does not answer"
                time.sleep(0.2)
            yield environ, process.pid
        finally:
            process.terminate()
            process.wait(30)


def wait_until_idle(process_id: int) -> None:
    """Wait until the server has taken in the events of the run before: it refuses the requests of the next one
    meanwhile (503, "database is locked"), and Prefect's client waits up to a minute before it tries again.
    """
    deadline, last = time.monotonic() + 300, [0.0]
    while (now := processor_seconds(process_id)) - last[0] > 0.2:
        assert time.monotonic() < deadline, "the server of Prefect is never idle"
        last = [*last, now][-3:]
        time.sleep(2)


def processor_seconds(process_id: int) -> float:
    fields = Path(f"/proc/{process_id}/stat").read_text().rpartition(")")[2].split()
    return (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")


def answers(url: str) -> bool:
    try:
        with urlopen(url, timeout=5) as answer:
            return answer.status == 200
    except OSError:
        return False


# ── one measurement, in its own process ──────────────────────────────────────────────────────────────────────────────


def runner_of(kind: str, **options: Any) -> Any:
    """Two workers with two slots each. Threads have no limit by default, in Prefect and in ours; "-64" is a limit."""
    name, _, limit = kind.partition("-")
    if limit:
        options["max_workers"] = int(limit)
    if name == "threads":
        from prefect.task_runners import ThreadPoolTaskRunner

        return ThreadPoolTaskRunner(**options)
    if kind == "dask":
        from prefect_dask import DaskTaskRunner

        return DaskTaskRunner(cluster_kwargs={"n_workers": 2, "threads_per_worker": 2, "dashboard_address": None})
    if kind == "ray":
        from prefect_ray import RayTaskRunner

        return RayTaskRunner(init_kwargs={"num_cpus": 4, "include_dashboard": False})
    import skyward_core as sky
    from prefect_skyward import SkywardTaskRunner

    return SkywardTaskRunner(provider=sky.Local(), nodes=2, concurrency=2, display="quiet", **options)


def measured(name: str, case: str) -> dict[str, float]:
    """Return seconds, and the peak memory of the flow's process in MB."""
    from prefect import flow, task
    from prefect.cache_policies import NO_CACHE

    @task(cache_policy=NO_CACHE)
    def tiny(number: int) -> int:
        return number + 1

    @task(cache_policy=NO_CACHE)
    def large(number: int) -> bytes:  # noqa: ARG001 - one call for each
        return b"x" * LARGE_BYTES

    @task(cache_policy=NO_CACHE)
    def length(rows: list[dict[str, int]]) -> int:
        return len(rows)

    @task(cache_policy=NO_CACHE)
    def result() -> bytes:
        return b"x" * RESULT_BYTES

    if case == "first":
        return first_result(flow, tiny)
    if case == "retry":
        return second_attempt()

    def work() -> None:
        match case:
            case "tiny":
                assert len(tiny.map(range(TINY)).result()) == TINY
            case "one":
                for number in range(ONE):
                    tiny.submit(number).result()
            case "rows":
                assert length.submit([{"number": number} for number in range(ROWS)]).result() == ROWS
            case "result":
                assert len(result.submit().result()) == RESULT_BYTES
            case "large":
                assert len(large.map(range(LARGE)).result()) == LARGE

    @flow(task_runner=runner_of(name))
    def run() -> dict[str, float]:
        assert tiny.submit(0).result() == 1
        before_mb, before_s, started = memory_mb(reset_peak=True)["VmRSS"], time.process_time(), time.perf_counter()
        work()
        return {
            "seconds": time.perf_counter() - started,
            "processor_s": time.process_time() - before_s,
            "above_mb": memory_mb()["VmHWM"] - before_mb,
            "last_task_at": time.time(),
        }

    begun_at = time.time()
    found = run()
    return {**found, "begun_at": begun_at, "peak_mb": resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1000}


def memory_mb(*, reset_peak: bool = False) -> dict[str, float]:
    """Return VmRSS and VmHWM of proc(5); the peak begins anew now if it is to be reset."""
    if reset_peak:
        Path("/proc/self/clear_refs").write_text("5")
    lines = Path("/proc/self/status").read_text().splitlines()
    words = [line.split() for line in lines if line.startswith(("VmRSS", "VmHWM"))]
    return {name.rstrip(":"): int(kilobytes) * 1.024 / 1000 for name, kilobytes, _ in words}


def first_result(flow: Any, task: Any) -> dict[str, float]:
    """Seconds from the call of the flow to its first result, on a cold pool, and on the same pool when it is warm."""
    import skyward_core as sky

    name = f"bench-{os.getpid()}"

    @flow(task_runner=runner_of("skyward", name=name, keep_warm=60))
    def run(started: float) -> float:
        task.submit(0).result()
        return time.perf_counter() - started

    cold, warm = run(time.perf_counter()), run(time.perf_counter())
    sky.release(name)
    return {"cold": cold, "warm": warm}


ATTEMPT = """
import sys, time
from pathlib import Path
from uuid import UUID
from prefect import flow, task
from prefect.flow_engine import load_flow_run, run_flow
from prefect.runtime import flow_run
from prefect_skyward import SkywardTaskRunner
import skyward_core as sky

name, folder, *again = sys.argv[1:]

@task
def work(file: str, seconds: float) -> None:
    Path(file + ".new").write_text(str(time.monotonic()))
    Path(file + ".new").rename(file)
    time.sleep(seconds)

@flow(task_runner=SkywardTaskRunner(provider=sky.Local(), name=name, keep_warm=60))
def run() -> None:
    began = time.monotonic()
    file = folder + ("/second" if again else "/first")
    Path(file + "-run").write_text(f"{flow_run.id} {began}")
    work.submit(file, 0.0 if again else 600.0).result()

if __name__ == "__main__":
    run_flow(run, flow_run=load_flow_run(UUID(again[0]))) if again else run()
"""


def second_attempt() -> dict[str, float]:
    """Seconds until the task of a second attempt of a flow run runs on its node, after the process of the first one was
    killed: from the start of its process, and from the first line of its flow.
    """
    from prefect.client.orchestration import get_client
    from prefect.states import Pending

    import skyward_core as sky

    name = f"bench-{os.getpid()}"
    with tempfile.TemporaryDirectory(prefix="skyward-bench-") as folder:
        first, second = Path(folder, "first"), Path(folder, "second")
        program = Path(folder, "attempt.py")
        program.write_text(ATTEMPT)
        command = [sys.executable, str(program), name, folder]
        with subprocess.Popen(command) as process:
            while not first.exists():
                time.sleep(0.01)
            process.kill()
        run_id, _ = Path(f"{first}-run").read_text().split()
        with get_client(sync_client=True) as client:
            client.set_flow_run_state(run_id, Pending(), force=True)
        started = time.monotonic()
        subprocess.run([*command, run_id], check=True)
        (_, began), begun = Path(f"{second}-run").read_text().split(), float(second.read_text())
    sky.release(name)
    return {"from the process": begun - started, "from the flow": begun - float(began)}


# ── the table ────────────────────────────────────────────────────────────────────────────────────────────────────────


def report(
    found: dict[tuple[str, str], list[dict[str, float]]], runners: list[str], rounds: int, load: tuple[float, ...]
) -> str:
    def median(runner: str, case: str, key: str) -> float | None:
        values = [one[key] for one in found.get((runner, case), ())]
        return statistics.median(values) if values else None

    packages = ("skyward-core", "prefect", "prefect-dask", "prefect-ray", "dask", "ray")
    lines = [
        (
            f"Medians of {rounds} rounds, each flow run in a new process, one server with SQLite, {os.cpu_count()} cores, load"
            f" {load[0]:.1f} at the start. {', '.join(f'{name} {installed(name)}' for name in packages)}."
        ),
        "",
        (
            f"| runner | {TINY} mapped tasks, s | to threads with the same limit | processor time of the flow, s | whole"
            f" run, s | from the last task to the end, s | peak memory of the flow, MB | one at a time, ms each | {ROWS} dicts as argument, s |"
            f" result of {RESULT_BYTES // 10**6} MB, s | memory above the start, MB |"
            f" {LARGE} results of 5 MB, s | peak memory, MB |"
        ),
        "| --- |" + " ---: |" * 12,
    ]
    for runner in runners:
        seconds = median(runner, "tiny", "seconds")
        same = median(f"threads{''.join(runner.partition('-')[1:])}", "tiny", "seconds")
        one = median(runner, "one", "seconds")
        cells = [
            shown(seconds, 2),
            shown(seconds / same if seconds and same else None, 2),
            shown(median(runner, "tiny", "processor_s"), 2),
            shown(median(runner, "tiny", "run"), 2),
            shown(median(runner, "tiny", "to the end"), 2),
            shown(median(runner, "tiny", "peak_mb")),
            shown(1000 * one / ONE if one else None, 1),
            shown(median(runner, "rows", "seconds"), 2),
            shown(median(runner, "result", "seconds"), 2),
            shown(median(runner, "result", "above_mb")),
            shown(median(runner, "large", "seconds"), 2),
            shown(median(runner, "large", "peak_mb")),
        ]
        lines.append(f"| {runner} | {' | '.join(cells)} |")
    if ("skyward", "first") in found:
        cold, warm = (shown(median("skyward", "first", key), 2) for key in ("cold", "warm"))
        lines += [
            "",
            f"From the call of the flow to its first result: {cold} s on a cold pool, {warm} s on a warm one.",
        ]
    if ("skyward", "retry") in found:
        process, flow = (shown(median("skyward", "retry", f"from the {which}"), 2) for which in ("process", "flow"))
        lines += [
            "",
            (
                "A second attempt of a flow run, after its process was killed: from its start to the first line of its"
                f" task on the node {process} s, of which {flow} s from the first line of the flow."
            ),
        ]
    return "\n".join(lines)


def shown(value: float | None, digits: int = 0) -> str:
    return "" if value is None else f"{value:.{digits}f}"


def installed(name: str) -> str:
    try:
        return version(name)
    except PackageNotFoundError:
        return "(not installed)"


if __name__ == "__main__":
    sys.exit(main())
