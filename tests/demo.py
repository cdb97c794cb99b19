"""`make demo`: runs the same real job on Prefect, Airflow and Dagster, one after the other, and prints a table.

Each runs as its users run it, with its own home under .demo/, so that its UI can show the run afterwards. What the
programs print is in .demo/NAME.log.
"""

import json
import os
import subprocess
import sys
import time
from dataclasses import dataclass
from pathlib import Path
from typing import NoReturn

ROOT = Path(__file__).parent.parent
HOME = ROOT / ".demo"
BIN = Path(sys.executable).parent
RESULT = "digits_sweep: "
LAST_LINES = 40


@dataclass(frozen=True)
class Orchestrator:
    """How one orchestrator runs: its commands, the last of which prints the result, and where a person finds the run."""

    name: str
    environ: dict[str, str]
    commands: tuple[str, ...]
    look: str


ORCHESTRATORS = [
    Orchestrator(
        "Prefect",
        {
            "PREFECT_HOME": str(HOME / "prefect"),
            "PREFECT_SERVER_ANALYTICS_ENABLED": "false",
            "PREFECT_SERVER_EPHEMERAL_STARTUP_TIMEOUT_SECONDS": "200",  # a busy machine needs more than the 20
            "DO_NOT_TRACK": "1",
        },
        ("python flows/digits_sweep.py",),
        "PREFECT_HOME=.demo/prefect .venv/bin/prefect server start, then http://127.0.0.1:4200: the run's Artifacts and its tasks' Logs",
    ),
    Orchestrator(
        "Airflow",
        {
            "AIRFLOW_HOME": str(HOME / "airflow"),
            "AIRFLOW__CORE__DAGS_FOLDER": str(ROOT / "dags"),
            "AIRFLOW__CORE__LOAD_EXAMPLES": "False",
            "AIRFLOW__USAGE_DATA_COLLECTION__ENABLED": "False",
        },
        ("airflow db migrate", "airflow dags test digits_sweep"),
        "AIRFLOW_HOME=.demo/airflow AIRFLOW__CORE__DAGS_FOLDER=dags .venv/bin/airflow standalone, then http://127.0.0.1:8080: XCom skyward_cost",
    ),
    Orchestrator(
        "Dagster",
        {"DAGSTER_HOME": str(HOME / "dagster")},
        ("python flows/dagster_definitions.py",),
        "DAGSTER_HOME=$PWD/.demo/dagster .venv/bin/dagster dev -f flows/dagster_definitions.py, then http://127.0.0.1:3000: the asset's metadata",
    ),
]


def run(orchestrator: Orchestrator) -> dict[str, float]:
    """Run the job; return its result. If it failed or its result was too bad, print the end of its output and exit."""
    Path(next(iter(orchestrator.environ.values()))).mkdir(parents=True, exist_ok=True)
    if orchestrator.name == "Dagster":
        (HOME / "dagster" / "dagster.yaml").write_text("telemetry: {enabled: false}\nnux: {enabled: false}\n")
    environ = {**os.environ, "PATH": f"{BIN}{os.pathsep}{os.environ['PATH']}", **orchestrator.environ}
    log = HOME / f"{orchestrator.name.lower()}.log"
    log.write_text("")
    for command in orchestrator.commands:
        print(f"{orchestrator.name}: {command}  (its output: {log.relative_to(ROOT)})", flush=True)
        program, *words = command.split()
        with log.open("a") as output:
            done = subprocess.run(
                [BIN / program, *words], cwd=ROOT, env=environ, stdout=output, stderr=subprocess.STDOUT, check=False
            )
        if done.returncode:
            give_up(log, f"{orchestrator.name} failed with {done.returncode}")
    results = [line.partition(RESULT)[2] for line in log.read_text().splitlines() if RESULT + "{" in line]
    if not results:
        give_up(log, f"{orchestrator.name} printed no result")
    result = json.JSONDecoder().raw_decode(results[-1])[0]
    if not result["accuracy"] > 0.97:
        give_up(log, f"{orchestrator.name}: accuracy {result['accuracy']} is not above 0.97")
    print(f"{orchestrator.name}: {result['calls']} calls, ${result['cost_usd']:.4f}", flush=True)
    return result


def give_up(log: Path, why: str) -> NoReturn:
    """Print the end of a log and exit."""
    print(*log.read_text().splitlines()[-LAST_LINES:], sep="\n", file=sys.stderr)
    sys.exit(f"{why}; all of its output is in {log}")


def main() -> None:
    """Run all three and print the table."""
    print(
        "A grid search over scikit-learn's digits, on a pool of two nodes of this machine, by each orchestrator.",
        flush=True,
    )
    rows = []
    for orchestrator in ORCHESTRATORS:
        started = time.monotonic()
        rows.append((orchestrator.name, run(orchestrator), time.monotonic() - started))
    print(f"\n{'orchestrator':<13}{'accuracy':>9}{'calls':>7}{'pool seconds':>14}{'cost':>10}{'all seconds':>13}")
    for name, found, seconds in rows:
        print(f"{name:<13}{found['accuracy']:>9.4f}{found['calls']:>7}{found['seconds']:>14.1f}", end="")
        print(f"{found['cost_usd']:>10.4f}{seconds:>13.1f}")
    print("\nWhere to look:", *(f"  {one.name}: {one.look}" for one in ORCHESTRATORS), sep="\n")


if __name__ == "__main__":
    main()
