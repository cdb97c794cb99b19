"""Measure tasks of one real Airflow: on a pool of this machine beside Airflow's own Python operators, on a pool that is
warm, and the next try of a task whose supervisor and process were killed.

All operators run the same function. The server is that of the tests: api-server, scheduler, dag-processor and
triggerer, SQLite. A task's time is that between its start and its end, as Airflow has them: from the start of its
process, over the import of its DAG file, to its last request. What the scheduler takes is not in it. The ways take
turns in each round. The virtual environment of `PythonVirtualenvOperator` downloads nothing. DAG files of Airflow's own
operators do not import Skyward.

    python -m benchmarks.airflow_tasks --rounds 5
"""

from __future__ import annotations

import argparse
import os
import signal
import statistics
import sys
import tempfile
from collections import defaultdict
from collections.abc import Mapping
from datetime import datetime
from importlib.metadata import version
from pathlib import Path

from tests.integrations.airflow_server import FINAL, AirflowServer, DagRun
from tests.waiting import wait_until

WORK = '''
def work() -> int:
    """How many primes are below 20,000."""
    return sum(all(n % d for d in range(2, int(n**0.5) + 1)) for n in range(2, 20_000))
'''
AIRFLOWS = f"""
import sys
from airflow.providers.standard.operators.python import (
    ExternalPythonOperator, PythonOperator, PythonVirtualenvOperator,
)
from airflow.sdk import DAG
{WORK}
for dag_id, operator, settings in (
    ("python", PythonOperator, {{}}),
    ("external", ExternalPythonOperator, dict(python=sys.executable, expect_airflow=False)),
    ("virtualenv", PythonVirtualenvOperator, dict(system_site_packages=True, expect_airflow=False)),
):
    with DAG(dag_id, schedule=None):
        operator(task_id="work", python_callable=work, **settings)
"""
OURS = f"""
from airflow.sdk import DAG
from airflow_provider_skyward.operators import SkywardOperator
{WORK}
for dag_id, settings in (
    ("cold", {{}}), ("cold_durable", dict(retries=1)), ("warm", dict(name="bench", keep_warm=1800)),
):
    with DAG(dag_id, schedule=None):
        SkywardOperator(task_id="work", python_callable=work, provider="local", **settings)
"""
KILLED = '''
from datetime import timedelta
from airflow.sdk import DAG
from airflow_provider_skyward.operators import SkywardOperator

def begun(folder: str) -> int:
    """Say that it runs, and end when it may."""
    import time
    from pathlib import Path
    Path(folder, "begun").touch()
    while not Path(folder, "go").exists():
        time.sleep(0.1)
    return 2262

with DAG("killed", schedule=None):
    SkywardOperator(
        task_id="work", python_callable=begun, op_args=["{{ dag_run.conf['folder'] }}"], provider="local", retries=1,
        retry_delay=timedelta(0),
    )
'''
WORDS = {
    "python": "`PythonOperator`",
    "external": "`ExternalPythonOperator`",
    "virtualenv": "`PythonVirtualenvOperator`",
    "cold": "`SkywardOperator`, a pool of its own",
    "cold_durable": "the same with `retries` (durable)",
    "warm": "`SkywardOperator`, a warm pool with a name",
}
ADOPTION = {
    "adopted": "until it has adopted the call",
    "answer": "until it has returned the call's result, and its pool has ended",
}
MOST_SECONDS = {"warm": 0.5, "adopted": 2.0}
"""More than PythonOperator; after the begin of the next try."""
ANSWER = 2262
SETTINGS = {
    "CORE__PARALLELISM": "4",  # a killed supervisor may keep a slot
    "SCHEDULER__TASK_INSTANCE_HEARTBEAT_TIMEOUT": "8",  # else each round waits for Airflow's 300 seconds
    "WORKERS__MIN_HEARTBEAT_INTERVAL": "1",
}
type Found = Mapping[str, list[float]]


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=5)
    rounds, load = parser.parse_args().rounds, os.getloadavg()[0]
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(1))  # the server ends then too
    with tempfile.TemporaryDirectory(prefix="skyward-bench-") as folder:
        found = measured(Path(folder), rounds)
    print("\n".join(report(found, rounds, load)))
    return 0


def measured(folder: Path, rounds: int) -> Found:
    """Return the seconds of each way, one value for each round. A round before the first one warms all of them."""
    dags = {"airflows.py": AIRFLOWS, "ours.py": OURS, "killed.py": KILLED}
    server = AirflowServer(folder / "home", dags, **{f"AIRFLOW__{name}": value for name, value in SETTINGS.items()})
    found: dict[str, list[float]] = defaultdict(list)
    try:
        for way in WORDS:
            seconds_of(server, way)
        for number in range(rounds):
            for way in WORDS:
                found[way].append(seconds_of(server, way))
            for part, seconds in adoption(server, folder / f"killed-{number}").items():
                found[part].append(seconds)
            print({way: round(values[-1], 2) for way, values in found.items()}, flush=True)
    finally:
        server.close()
    return found


def seconds_of(server: AirflowServer, way: str) -> float:
    """Run a task; return its time."""
    run = server.trigger(way)
    task = run.wait(FINAL)
    assert task["state"] == "success", run.log()
    assert run.xcom("return_value") == ANSWER
    return (at(task["end_date"]) - at(task["start_date"])).total_seconds()


def adoption(server: AirflowServer, folder: Path) -> dict[str, float]:
    """Kill the supervisor and the process of a task whose call runs; return the seconds from the begin of the next
    try. The call ends between both, so that its result waits for that try.
    """
    folder.mkdir()
    run = server.trigger("killed", folder=str(folder))
    wait_until((folder / "begun").exists, "the call")
    process = run.task()["pid"]
    for pid in (parent_of(process), process):
        os.kill(pid, signal.SIGKILL)
    (folder / "go").touch()
    wait_until(lambda: run.task()["try_number"] == 2, "the next try")
    task = run.wait(FINAL)
    assert task["state"] == "success", run.log()
    assert run.xcom("return_value") == ANSWER
    began = at(task["start_date"])
    times = {"adopted": written_at(run, "adopted the call"), "answer": written_at(run, "returned value")}
    return {part: (time - began).total_seconds() for part, time in times.items()}


def parent_of(pid: int) -> int:
    return int(Path(f"/proc/{pid}/stat").read_text().rpartition(") ")[2].split()[1])


def written_at(run: DagRun, words: str) -> datetime:
    """Return when the last try has written the first line with these words."""
    path, query = f"{run.path}/taskInstances/work/logs/2", {"map_index": -1, "full_content": True}
    lines = run.server.ask("GET", path, params=query)["content"]
    return at(next(line["timestamp"] for line in lines if words in line["event"]))


def at(text: str) -> datetime:
    return datetime.fromisoformat(text)


# ── the tables ───────────────────────────────────────────────────────────────────────────────────────────────────────


def report(found: Found, rounds: int, load: float) -> list[str]:
    lines = [
        (
            f"Medians of {rounds} rounds, [least, most]; {os.cpu_count()} cores, load average of the last minute, before →"
            f" after: {load:.1f} → {os.getloadavg()[0]:.1f}. Python {sys.version.split()[0]}, Airflow {version('apache-airflow')}."
        ),
        "",
        "| one task | s | to `PythonOperator` | more than it, s | mark |",
        "| --- | ---: | ---: | ---: | --- |",
    ]
    plain = found["python"]
    for way, words in WORDS.items():
        pairs = list(zip(found[way], plain, strict=True))
        ratio, more = (
            statistics.median(values)
            for values in ([ours / its for ours, its in pairs], [ours - its for ours, its in pairs])
        )
        beside = ["", ""] if way == "python" else [f"{ratio:.2f}", f"{more:.2f}"]
        lines.append(f"| {words} | {cell(found[way])} | {' | '.join(beside)} | {mark(way, more)} |")
    lines += ["", "| the next try after SIGKILL, from its begin | s | mark |", "| --- | ---: | --- |"]
    for part, words in ADOPTION.items():
        lines.append(f"| {words} | {cell(found[part])} | {mark(part, statistics.median(found[part]))} |")
    return lines


def cell(values: list[float]) -> str:
    return f"{statistics.median(values):.2f} [{min(values):.2f}, {max(values):.2f}]"


def mark(way: str, seconds: float) -> str:
    most = MOST_SECONDS.get(way)
    return "" if most is None else f"≤ {most:g} s: {'met' if seconds <= most else '**missed**'}"


if __name__ == "__main__":
    sys.exit(main())
