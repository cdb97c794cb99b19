"""The table of deaths of docs/airflow/reference.md: how a task dies, and what its next try does, on a real Airflow of
all services.

Each cell is a DAG run. The cells of one phase run at the same time; each has a test of its own. After each cell no
machine of its tasks lives, no generation has run twice, no two runs of a function were there at once, and the bill is the
ledger's. What was seen is printed as a table.
"""

import importlib.util
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from dataclasses import dataclass
from datetime import datetime
from pathlib import Path
from typing import Any

import pytest

if importlib.util.find_spec("airflow") is None:
    pytest.skip("Airflow is not installed", allow_module_level=True)

from skyward_core.worker.node_clocks import INSTANCE_TAG, POOL_TAG, kill_instance, tagged_processes
from tests.integrations.airflow_host import micro
from tests.integrations.airflow_server import DAGS, FINAL, AirflowServer, Job, parent_of
from tests.ledger.fixtures import postgresql_server, run_on  # noqa: F401 - a fixture
from tests.waiting import wait_until

pytestmark = [pytest.mark.timeout(3600)]
AT_ONCE = 9
"""How many cells run at the same time. Each takes a worker of Airflow and a node; most wait for a heartbeat or a time limit."""
LONG = 600.0
"""The limit of a wait, in seconds: a machine with other tests takes long to begin a try."""
SETTINGS = {
    "AIRFLOW__CORE__PARALLELISM": "16",
    "AIRFLOW__SCHEDULER__TASK_INSTANCE_HEARTBEAT_TIMEOUT": "90",
    "AIRFLOW__SCHEDULER__MAX_TIS_PER_QUERY": "0",
}

type Cell = tuple[str, str]
type OfService = Callable[[AirflowServer], None]


@dataclass(frozen=True)
class Seen:
    """What a cell is to show: how often the function has run, how many pools were rented (None: one, or one
    more, as it comes), and the state at the end.

    `adopts`: a later try adopts the call of an earlier one. `needs_go`: the function ends as the test says, and the task
    with it; else the death is the end of the task. `is_one_try`: the pool runs the call again.
    """

    runs: int
    pools: int | None
    state: str = "success"
    adopts: bool = False
    needs_go: bool = True
    is_one_try: bool = False


ADOPTED = Seen(1, 1, adopts=True)
ANEW = Seen(2, 2)
ANEW_SHARED = Seen(2, 1)
ONCE = Seen(1, 2)
GOES_ON = Seen(1, 1)
REPLACED = Seen(2, 1, is_one_try=True)
FAILED = Seen(1, 1, state="failed", needs_go=False)
MARKED = Seen(1, 1, needs_go=False)
KINDS = {
    "durable": "durable",
    "durable=False": "ended_with_worker",
    "deferrable": "deferred",
    "shared pool": "shared",
}
"""The kinds of tasks, and their DAGs."""


def is_deferrable(job: Job) -> bool:
    return job.run.dag_id.startswith("deferred")


def is_shared(job: Job) -> bool:
    return job.run.dag_id.startswith("shared")


# ── deaths ───────────────────────────────────────────────────────────────────────────────────────────────────────────


def run(job: Job) -> None:
    """Wait until the function runs, and a deferred task is deferred and followed."""
    job.begun()
    if is_deferrable(job):
        job.run.wait("deferred")
        wait_until(lambda: "[node 0] line" in job.run.log(), "the trigger to follow the call", LONG)
    else:
        job.run.wait("running")


def rent(job: Job) -> None:
    """Wait until a machine is there, and keep it from coming up."""
    for pid in wait_until(job.machines, "a machine", LONG):
        with suppress(ProcessLookupError):
            os.kill(pid, signal.SIGSTOP)


def defer(job: Job) -> None:
    """Wait until the task is deferred, and its function runs."""
    job.begun()
    job.run.wait("deferred")


def succeed(job: Job) -> None:
    """Let the function end, and the DAG run with it."""
    run(job)
    job.go()
    job.run.wait("success")
    wait_until(lambda: job.server.ask("GET", job.run.path)["state"] == "success", "the end of the DAG run", LONG)
    (job.folder / "go").unlink()


def run_in_worker(job: Job) -> None:
    """As `run`. The function of a deferrable task ends: its last worker is there, which has not done anything yet."""
    run(job)
    if is_deferrable(job):
        job.go()
        wait_until(lambda: job.run.task()["state"] == "running", "the last worker", LONG, longest_pause_seconds=0.05)


def process_of(job: Job) -> int:
    """Return the process of the task that rents, or runs."""
    task_id = "create" if is_shared(job) and not job.runs else "work"
    return int(job.run.task(task_id)["pid"])


def kill_task(job: Job) -> None:
    os.kill(process_of(job), signal.SIGKILL)


def kill_supervisor(job: Job) -> None:
    os.kill(parent_of(process_of(job)), signal.SIGKILL)


def evict(job: Job) -> None:
    os.kill(parent_of(process_of(job)), signal.SIGTERM)


def end_machines(job: Job) -> None:
    """Kill all processes of the machines, as if the cloud had taken them."""
    pools = {pool["pool_id"] for pool in job.receipts()}
    for machine in {env[INSTANCE_TAG] for _, env in tagged_processes() if env.get(POOL_TAG) in pools}:
        wait_until(lambda machine=machine: not kill_instance(machine), f"the end of {machine}")


def stop_pools(job: Job) -> None:
    """Stop the pools by hand, as an operator does."""
    for pool in job.receipts():
        command = [sys.executable, "-m", "skyward_core.cli", "--ledger", job.server.ledger_url, "stop", pool["pool_id"]]
        subprocess.run(command, check=True, timeout=LONG)


def mark_alone(state: str) -> Callable[[Job], None]:
    """Mark a task that nobody follows: its machines end all the same."""

    def strike(job: Job) -> None:
        job.run.mark(state)
        wait_until(lambda: not job.machines(), "the end of the machines", LONG)

    return strike


@dataclass(frozen=True)
class Death:
    """`until` waits for the moment, `strike` is the death of one cell. A death of a whole service strikes all of its
    cells at once: `before` they begin, or `after` each has come to its moment.
    """

    until: Callable[[Job], None] = run
    strike: Callable[[Job], object] = lambda job: None
    before: OfService | None = None
    after: OfService | None = None
    dag: str = ""
    """What the id of the DAG ends with."""
    files: Sequence[str] = ()
    """Those that are there before the DAG run begins."""


def without_triggerer(strike: Callable[[Job], None]) -> Death:
    """A death of a deferred task that no triggerer has taken yet."""
    return Death(defer, strike, before=end_triggerer, after=start_triggerer)


def end_triggerer(server: AirflowServer) -> None:
    server.kill("triggerer")


def start_triggerer(server: AirflowServer) -> None:
    server.start("triggerer")


def kill_triggerer(server: AirflowServer) -> None:
    server.kill("triggerer")
    server.start("triggerer")


def kill_scheduler(server: AirflowServer) -> None:
    """Kill it with its process group: LocalExecutor has the supervisors of the tasks there."""
    server.kill("scheduler")
    server.start("scheduler")


DEATHS: dict[str, Death] = {
    "SIGKILL of the supervisor": Death(run_in_worker, kill_supervisor),
    "SIGKILL of the supervisor of a silent function": Death(run, kill_supervisor, files=("silent",)),
    "SIGKILL of the last supervisor in the last try": Death(run_in_worker, kill_supervisor, dag="_once"),
    "execution_timeout": Death(dag="_limited"),
    "SIGKILL of the task": Death(run_in_worker, kill_task),
    "SIGKILL while it rents": Death(rent, kill_task),
    "SIGTERM while it rents": Death(rent, evict),
    "SIGTERM in the call": Death(run_in_worker, evict),
    "the machine is gone": Death(strike=end_machines),
    "`skyward stop`": Death(strike=stop_pools),
    "cleared while it runs": Death(strike=lambda job: job.run.clear()),
    "cleared while its result is fetched": Death(run_in_worker, lambda job: job.run.clear()),
    "cleared after its success": Death(succeed, lambda job: job.run.clear()),
    "marked as failed": Death(strike=lambda job: job.run.mark("failed")),
    "marked as success": Death(strike=lambda job: job.run.mark("success")),
    "cleared before a triggerer took it": without_triggerer(lambda job: job.run.clear()),
    "marked as failed before a triggerer took it": without_triggerer(mark_alone("failed")),
    "marked as success before a triggerer took it": without_triggerer(mark_alone("success")),
    "SIGKILL of the triggerer": Death(after=kill_triggerer),
    "SIGKILL of the scheduler": Death(after=kill_scheduler),
}
SEEN: dict[str, dict[str, Seen]] = {
    "SIGKILL of the supervisor": dict.fromkeys(KINDS, ADOPTED) | {"durable=False": ANEW},
    "SIGKILL of the supervisor of a silent function": {"durable=False": ANEW},
    "SIGKILL of the last supervisor in the last try": {"deferrable": FAILED},
    "execution_timeout": dict.fromkeys(KINDS, ANEW) | {"shared pool": ANEW_SHARED},
    "SIGKILL of the task": dict.fromkeys(KINDS, ADOPTED) | {"durable=False": ANEW},
    "SIGKILL while it rents": dict.fromkeys(KINDS, ONCE),
    "SIGTERM while it rents": dict.fromkeys(KINDS, ONCE),
    "SIGTERM in the call": dict.fromkeys(KINDS, ANEW) | {"deferrable": ADOPTED, "shared pool": ANEW_SHARED},
    "the machine is gone": dict.fromkeys(KINDS, ANEW) | {"durable=False": REPLACED, "shared pool": Seen(2, None)},
    "`skyward stop`": dict.fromkeys(KINDS, FAILED),
    "cleared while it runs": dict.fromkeys(KINDS, ANEW) | {"shared pool": ANEW_SHARED},
    "cleared while its result is fetched": {"deferrable": ANEW},
    "cleared after its success": dict.fromkeys(KINDS, ANEW),
    "marked as failed": dict.fromkeys(KINDS, FAILED),
    "marked as success": dict.fromkeys(KINDS, MARKED),
    "cleared before a triggerer took it": {"deferrable": ANEW},
    "marked as failed before a triggerer took it": {"deferrable": FAILED},
    "marked as success before a triggerer took it": {"deferrable": MARKED},
    "SIGKILL of the triggerer": {"deferrable": GOES_ON},
    "SIGKILL of the scheduler": dict.fromkeys(KINDS, ADOPTED) | {"durable=False": ANEW, "deferrable": GOES_ON},
}
"""Those that wait for a time come first."""
CELLS = [(death, kind) for death, row in SEEN.items() for kind in row]


# ── the cells ────────────────────────────────────────────────────────────────────────────────────────────────────────


class Cells:
    """Plays cells on a server; keeps what was seen, and the error of each cell that was not as it is to be."""

    def __init__(self, server: AirflowServer, folder: Path) -> None:
        self.server = server
        self.folder = folder
        self.rows: dict[Cell, tuple[str, ...]] = {}
        self.errors: dict[Cell, BaseException] = {}

    def play(self, asked: Sequence[Cell]) -> None:
        """Play cells: those of one task all at the same time, then the deaths of services, one after another."""
        alone = [cell for cell in asked if DEATHS[cell[0]].after is None]
        with ThreadPoolExecutor(AT_ONCE) as threads:
            list(threads.map(lambda cell: self._end(cell, self._strike(cell)), alone))
        for before, after in dict.fromkeys((DEATHS[death].before, DEATHS[death].after) for death, _ in asked):
            if after is not None:
                self._play_together([cell for cell in asked if DEATHS[cell[0]].after is after], before, after)

    def _play_together(self, cells: Sequence[Cell], before: OfService | None, after: OfService) -> None:
        if before is not None:
            before(self.server)
        with ThreadPoolExecutor(len(cells)) as threads:
            struck = list(threads.map(self._strike, cells))
            after(self.server)
            list(threads.map(self._end, cells, struck))

    def _strike(self, cell: Cell) -> tuple[Job, int] | None:
        """Let a cell come to its moment, and strike; return it and the number of its try then."""
        name, kind = cell
        death = DEATHS[name]
        job: Job | None = None
        try:
            job = Job(self.server, self.folder / "-".join(cell).replace(" ", "-"), KINDS[kind] + death.dag, death.files)
            death.until(job)
            tried = job.run.task()["try_number"]
            death.strike(job)
        except Exception as error:
            self.errors[cell] = error
            if job is not None:
                job.go()
            return None
        return job, tried

    def _end(self, cell: Cell, struck: tuple[Job, int] | None) -> None:
        if struck is None:
            return
        job, tried = struck
        died_at, wanted = time.time(), SEEN[cell[0]][cell[1]]
        try:
            settle(job, wanted, tried)
            check(job, wanted, tried)
        except Exception as error:
            error.add_note(job.run.log())
            self.errors[cell] = error
        finally:
            job.go()
        self.rows[cell] = seen(job, died_at)


def settle(job: Job, wanted: Seen, tried: int) -> None:
    """Wait for what the death leads to."""
    if wanted.needs_go:
        job.begun(wanted.runs)
        if wanted.adopts:
            wait_until(lambda: job.run.task()["try_number"] > tried, "the next try", LONG)
            job.run.wait(("running", "deferred", *FINAL))
        job.go()
    job.run.wait(FINAL)


def check(job: Job, wanted: Seen, tried: int) -> None:
    job.is_repeated = wanted.is_one_try
    cost = job.ended(wanted.pools)
    task = job.run.task()
    assert (task["state"], len(job.runs)) == (wanted.state, wanted.runs)
    assert not wanted.is_one_try or set(job.runs) == {"1"}
    assert not (job.folder / "overlaps").exists(), "a run has begun beside another one"
    assert (f"adopted the call that try {tried} has" in job.run.log()) == wanted.adopts
    if is_shared(job):
        job.run.wait("success", "release")
        bill = job.run.xcom("return_value", "release")
        assert micro(bill["cost_usd"]) == micro(sum(bill["shares"].values())) == micro(cost)
    else:
        assert micro(job.run.tab()["cost_usd"]) == micro(cost)
        assert job.run.xcom("skyward_pool")["pool_id"] in {pool["pool_id"] for pool in job.receipts()}
        if wanted.needs_go:
            job.check_bill(wanted.pools)
    if wanted.needs_go:
        assert job.run.xcom("return_value") == 42


def seen(job: Job, died_at: float) -> tuple[str, ...]:
    """Return a row for the table that is printed: state, tries, runs, and when each pool ended and what it has cost."""
    task = job.run.task()
    pools = [
        f"{datetime.fromisoformat(pool['ended_at']).timestamp() - died_at:.0f} s {pool['total_cost_usd']:.3f}"
        if pool["ended_at"]
        else "not ended"
        for pool in job.receipts()
    ]
    return task["state"], f"try {task['try_number']}", " ".join(job.runs), ", ".join(pools)


def on_postgresql(server: str) -> dict[str, str]:
    """Have Airflow's database and the ledger there. With SQLite a busy scheduler ends, as the database is locked."""
    urls = [server.replace("/postgres?", f"/{name}?") for name in ("deaths", "deaths_ledger")]
    for url in urls:
        run_on(server, f"CREATE DATABASE {url.partition('@/')[2].partition('?')[0]}")
    return {
        "AIRFLOW__DATABASE__SQL_ALCHEMY_CONN": urls[0],
        "AIRFLOW__DATABASE__SQL_ALCHEMY_CONN_ASYNC": urls[0],
        "SKYWARD_LEDGER": urls[1],
    }


@pytest.fixture(scope="module")
def cells(
    request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory, postgresql_server: str
) -> Iterator[Cells]:
    """All cells that are asked for, played."""
    folder = tmp_path_factory.mktemp("deaths")
    server = AirflowServer(folder / "home", DAGS, **SETTINGS, **on_postgresql(postgresql_server))
    try:
        cells = Cells(server, folder)
        cells.play([cell for cell in CELLS if cell in asked_for(request)])
        yield cells
    finally:
        server.close()
    capture: Any = request.config.pluginmanager.get_plugin("capturemanager")
    with capture.global_and_fixture_disabled():
        print("\n" + "\n".join(" | ".join(cell + row) for cell, row in cells.rows.items()))


def asked_for(request: pytest.FixtureRequest) -> list[Cell]:
    items: list[Any] = [item for item in request.session.items if item.path == request.path]
    return [(item.callspec.params["death"], item.callspec.params["kind"]) for item in items]


@pytest.mark.parametrize(("death", "kind"), CELLS)
def test_a_death(death: str, kind: str, cells: Cells) -> None:
    if (error := cells.errors.get((death, kind))) is not None:
        raise error
    assert (death, kind) in cells.rows
