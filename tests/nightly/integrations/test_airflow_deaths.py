"""The table of deaths of docs/airflow.md: how a task dies, and what its next try does, on a real Airflow of all services.

Each cell is a DAG run. The cells of one phase run at the same time; each has a test of its own. After each cell no
machine of its tasks lives, no generation has run twice, no two runs of a function were there at once, and the bill is the
ledger's. What was seen is printed as a table.
"""

import importlib.util
import os
import signal
import time
from collections.abc import Callable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from datetime import datetime
from pathlib import Path

import pytest

if importlib.util.find_spec("airflow") is None:
    pytest.skip("Airflow is not installed", allow_module_level=True)

from tests.integrations.airflow_host import micro
from tests.integrations.airflow_server import DAGS, FINAL, AirflowServer, Job, parent_of
from tests.waiting import wait_until

pytestmark = [pytest.mark.timeout(1800)]
AT_ONCE = 5
"""How many cells run at the same time. Each takes a worker of Airflow and a node."""
SETTINGS = {
    "AIRFLOW__CORE__PARALLELISM": "16",
    "AIRFLOW__SCHEDULER__TASK_INSTANCE_HEARTBEAT_TIMEOUT": "30",
    "AIRFLOW__SCHEDULER__MAX_TIS_PER_QUERY": "0",
}


@dataclass(frozen=True)
class Seen:
    """What a cell is to show: the tries that have begun a run of the function, the pools, and the state at the end.

    `adopts`: a later try adopts the call of an earlier one. `needs_go`: the function ends as the test says, and the task
    with it; else the death is the end of the task.
    """

    runs: str
    pools: int
    state: str = "success"
    adopts: bool = False
    needs_go: bool = True


ADOPTED = Seen("1", 1, adopts=True)
ANEW = Seen("12", 2)
FAILED = Seen("1", 1, state="failed", needs_go=False)
MARKED = Seen("1", 1, needs_go=False)
NOT_BEGUN = Seen("", 1, state="failed", needs_go=False)


# ── deaths ───────────────────────────────────────────────────────────────────────────────────────────────────────────


def is_ready(job: Job) -> None:
    """Wait until the function runs, and a deferred task is deferred and followed."""
    job.begun()
    if "deferred" in job.run.dag_id:
        job.run.wait("deferred")
        wait_until(lambda: "[node 0] line" in job.run.log(), "the trigger to follow the call")
    else:
        job.run.wait("running")


def kill_task(job: Job) -> None:
    is_ready(job)
    os.kill(job.run.task()["pid"], signal.SIGKILL)


def kill_supervisor(job: Job) -> None:
    is_ready(job)
    os.kill(parent_of(job.run.task()["pid"]), signal.SIGKILL)


def clear(job: Job) -> None:
    is_ready(job)
    job.run.clear()


DEATHS: dict[str, Callable[[Job], None]] = {
    "SIGKILL of the task": kill_task,
    "SIGKILL of the supervisor": kill_supervisor,
    "cleared while it runs": clear,
}
CELLS: dict[tuple[str, str], Seen] = {
    ("SIGKILL of the task", "durable"): ADOPTED,
    ("cleared while it runs", "durable"): ANEW,
}


# ── the cells ────────────────────────────────────────────────────────────────────────────────────────────────────────


class Cells:
    """Plays cells on a server; keeps what was seen."""

    def __init__(self, server: AirflowServer, folder: Path) -> None:
        self.server = server
        self.folder = folder
        self.rows: list[tuple[str, ...]] = []
        self.played: dict[tuple[str, str], Future[None]] = {}

    def play(self, death: str, kind: str) -> None:
        wanted = CELLS[death, kind]
        job = Job(self.server, self.folder / f"{death}-{kind}".replace(" ", "-"), kind)
        try:
            DEATHS[death](job)
            died_at = time.time()
            settle(job, wanted)
            check(job, wanted)
        finally:
            job.go()
        self.note(death, kind, job, died_at)

    def note(self, death: str, kind: str, job: Job, died_at: float) -> None:
        task, receipts = job.run.task(), job.receipts()
        ends = [datetime.fromisoformat(pool["ended_at"]).timestamp() - died_at for pool in receipts]
        pools = ", ".join(f"{pool['total_cost_usd']:.3f}" for pool in receipts)
        row = (death, kind, task["state"], f"try {task['try_number']}", " ".join(job.runs), pools)
        self.rows.append((*row, f"{min(ends, default=0.0):.0f} s"))


def settle(job: Job, wanted: Seen) -> None:
    """Wait for what the death leads to."""
    if wanted.needs_go:
        job.begun(len(wanted.runs))
        if wanted.adopts:
            wait_until(lambda: job.run.task()["try_number"] > 1, "the next try")
            job.run.wait(("running", "deferred"))
        job.go()
    job.run.wait(FINAL)


def check(job: Job, wanted: Seen) -> None:
    cost = job.ended(wanted.pools)
    task = job.run.task()
    assert (task["state"], "".join(job.runs)) == (wanted.state, wanted.runs), job.run.log()
    assert not (job.folder / "overlaps").exists(), "a run has begun beside another one"
    logs = [job.run.log(attempt=number) for number in range(1, task["try_number"] + 1)]
    assert any("adopted the call that try 1 has begun" in log for log in logs) == wanted.adopts, logs
    assert micro(job.run.tab()["cost_usd"]) == micro(cost)
    if wanted.needs_go and wanted.state == "success":
        assert job.run.xcom("return_value") == 42
        job.check_bill(wanted.pools)


@pytest.fixture(scope="module")
def cells(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Cells]:
    """All cells that are asked for, begun at once."""
    folder = tmp_path_factory.mktemp("deaths")
    server = AirflowServer(folder / "home", DAGS, **SETTINGS)
    cells = Cells(server, folder)
    asked = [item.callspec.params for item in request.session.items if item.path == request.path]
    with ThreadPoolExecutor(AT_ONCE) as threads:
        for death, kind in CELLS:
            if {"death": death, "kind": kind} in asked:
                cells.played[death, kind] = threads.submit(cells.play, death, kind)
        yield cells
    server.close()
    with request.config.pluginmanager.get_plugin("capturemanager").global_and_fixture_disabled():
        print("\n" + "\n".join(" | ".join(row) for row in cells.rows))


@pytest.mark.parametrize(("death", "kind"), CELLS)
def test_a_death(death: str, kind: str, cells: Cells) -> None:
    cells.played[death, kind].result()
