"""A real Airflow for tests: api-server, scheduler, dag-processor and triggerer, driven through the REST API. Its database
and its ledger are SQLite, if the environment says nothing else.

All its processes, and the machines of its tasks, have the folder of the server in their environment, or run in it. A
guard, which is this file as a program, ends them when the test process has ended in whatever way:
`python airflow_server.py FOLDER`.
"""

import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterable, Mapping
from contextlib import suppress
from pathlib import Path
from typing import Any

import httpx

import skyward_core as sky
from skyward_core.worker.node_clocks import POOL_TAG, tagged_processes
from tests.integrations.airflow_host import micro
from tests.ports import free_ports
from tests.waiting import wait_until

HEARTBEAT_SECONDS = 20
"""After which the scheduler counts a silent worker as dead; Airflow's default is 300."""
DAGS = {
    path.name: path.read_text()
    for path in (Path(__file__).parent / "airflow_dags.py", Path(__file__).parents[2] / "dags/deferrable_training.py")
}
COMPONENTS = {"api-server": "api-server --workers 1", "scheduler": "", "dag-processor": "", "triggerer": ""}
# Shorter limits would count components as dead on a machine with ten other test processes, and tasks would be tried again.
SETTINGS = {
    "CORE__LOAD_EXAMPLES": "False",
    "CORE__PARALLELISM": "2",
    "CORE__SIMPLE_AUTH_MANAGER_ALL_ADMINS": "True",
    "CORE__DAGS_ARE_PAUSED_AT_CREATION": "False",
    "API_AUTH__JWT_SECRET": "only-for-tests-and-long-enough-for-the-algorithm-that-signs",
    "DAG_PROCESSOR__REFRESH_INTERVAL": "3",
    "DAG_PROCESSOR__MIN_FILE_PROCESS_INTERVAL": "600",
    "DAG_PROCESSOR__PARSING_PROCESSES": "1",
    "SCHEDULER__TASK_INSTANCE_HEARTBEAT_TIMEOUT": str(HEARTBEAT_SECONDS),
    "SCHEDULER__TASK_INSTANCE_HEARTBEAT_TIMEOUT_DETECTION_INTERVAL": "2",
    "SCHEDULER__ORPHANED_TASKS_CHECK_INTERVAL": "10",
    "SCHEDULER__TRIGGER_TIMEOUT_CHECK_INTERVAL": "2",
    "SCHEDULER__JOB_HEARTBEAT_SEC": "2",
    "TRIGGERER__JOB_HEARTBEAT_SEC": "2",
    "TRIGGERER__TRIGGERER_HEALTH_CHECK_THRESHOLD": "20",
    "WORKERS__MIN_HEARTBEAT_INTERVAL": "2",
    "WORKERS__EXECUTION_API_TIMEOUT": "60",
    "USAGE_DATA_COLLECTION__ENABLED": "False",
    "LOGGING__LOGGING_LEVEL": "INFO",
}

FINAL = ("success", "failed")
START_SECONDS = 600.0
"""The limit for a state of a task. Beside other tests, Airflow takes long to begin a try."""
TRIES = 5
ANSWER_SECONDS = 120.0
LOOK_SECONDS = 1.0
"""The pause between two looks at a task, at most: the looks of a dozen tests would slow the server down."""
BELOW_THE_KERNELS = range(20_000, 32_768)
"""Ports that no connection gets by itself, by the default of Linux."""


def processes_of(folder: str) -> list[int]:
    """Return the processes with a path below the folder in their environment, or that run in it.

    The api-server writes its title over its environment.
    """
    return [int(entry) for entry in filter(str.isdigit, os.listdir("/proc")) if _is_of(Path("/proc", entry), folder)]


def _is_of(process: Path, folder: str) -> bool:
    try:
        return (
            f"{folder}/".encode() in process.joinpath("environ").read_bytes() or os.readlink(process / "cwd") == folder
        )
    except OSError:  # it has ended
        return False


def end_all(folder: str, seconds: float = 30.0) -> None:
    """Kill each process of the server, and each machine of its tasks, until none is left."""
    deadline = time.monotonic() + seconds
    while (left := processes_of(folder)) and time.monotonic() < deadline:
        for pid in left:
            with suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
        time.sleep(0.05)


class AirflowServer:
    """An Airflow with its own home, ports and ledger. `close` ends all of it."""

    def __init__(self, home: Path, dags: Mapping[str, str], **environ: str) -> None:
        """Start it. `dags` has the text of each DAG file by its name."""
        self.home = home
        (home / "dags").mkdir(parents=True)
        for name, text in dags.items():
            (home / "dags" / name).write_text(text)
        port, *log_ports = free_ports(3)
        self.url = f"http://127.0.0.1:{port}"
        settings = SETTINGS | {
            "CORE__DAGS_FOLDER": str(home / "dags"),
            "API__PORT": str(port),
            "API__HOST": "127.0.0.1",
            "API__BASE_URL": self.url,
            "CORE__EXECUTION_API_SERVER_URL": f"{self.url}/execution/",
            "LOGGING__WORKER_LOG_SERVER_PORT": str(log_ports[0]),
            "LOGGING__TRIGGER_LOG_SERVER_PORT": str(log_ports[1]),
        }
        self.ledger_url = environ.get("SKYWARD_LEDGER", f"sqlite:///{home}/ledger.db")
        self.environ = {
            **os.environ,
            **{f"AIRFLOW__{name}": value for name, value in settings.items()},
            **{f"XDG_{kind}_HOME": str(home / kind.lower()) for kind in ("CACHE", "STATE", "CONFIG")},
            "AIRFLOW_HOME": str(home),
            "SKYWARD_LEDGER": self.ledger_url,
            "PYTHONUNBUFFERED": "1",
            **environ,
        }
        self._guard = subprocess.Popen(
            [sys.executable, __file__, str(home)], stdin=subprocess.PIPE, start_new_session=True
        )
        self.processes: dict[str, subprocess.Popen[bytes]] = {}
        self._http = httpx.Client(base_url=self.url, timeout=ANSWER_SECONDS)
        try:
            subprocess.run([*_airflow(), "db", "migrate"], env=self.environ, check=True, capture_output=True)
            for name in COMPONENTS:
                self.start(name)
            wait_until(self.is_healthy, "a healthy Airflow", START_SECONDS)
            token = self._http.get("/auth/token").json()["access_token"]
            self._http.headers["Authorization"] = f"Bearer {token}"
        except BaseException:
            self.close()
            raise

    # ── processes ────────────────────────────────────────────────────────────────────────────────────────────────────

    def start(self, component: str) -> None:
        """Start a component, in its own process group."""
        arguments = (COMPONENTS[component] or component).split()
        with (self.home / f"{component}.log").open("ab") as log:
            self.processes[component] = subprocess.Popen(
                [*_airflow(), *arguments],
                env=self.environ,
                cwd=self.home,
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=subprocess.STDOUT,
                start_new_session=True,
            )

    def kill(self, component: str) -> None:
        """Kill a component with its process group, as the end of its container does."""
        process = self.processes.pop(component)
        with suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGKILL)
        process.wait()

    def close(self) -> None:
        """End all processes, and close the connection to the server. Idempotent."""
        self._http.close()
        end_all(str(self.home))
        for process in self.processes.values():
            process.wait()
        self.processes.clear()
        self._guard.communicate()

    def is_healthy(self) -> bool:
        """Return whether all components answer. Raises AssertionError if one has ended."""
        dead = [name for name, process in self.processes.items() if process.poll() is not None]
        assert not dead, "\n".join((self.home / f"{name}.log").read_text()[-3000:] for name in dead)
        try:
            health = self._http.get("/api/v2/monitor/health").json()
        except httpx.HTTPError:
            return False
        return {health[name]["status"] for name in ("scheduler", "triggerer", "dag_processor")} == {"healthy"}

    # ── the REST API ─────────────────────────────────────────────────────────────────────────────────────────────────

    def ask(self, method: str, path: str, **more: Any) -> Any:
        """Return the answer of a request. Raises httpx.HTTPStatusError for an error.

        SQLite may be locked by another component for too long: then the server answers 500 and has changed nothing.
        """
        for _ in range(TRIES):
            answer = self._http.request(method, path, **more)
            if answer.status_code != httpx.codes.INTERNAL_SERVER_ERROR:
                break
        answer.raise_for_status()
        return answer.json() if answer.content else None

    def trigger(self, dag_id: str, **conf: Any) -> "DagRun":
        """Begin a run of a DAG, once it is parsed."""

        def is_there() -> bool:
            return self._http.get(f"/api/v2/dags/{dag_id}").status_code == 200

        wait_until(is_there, f"the DAG {dag_id}", START_SECONDS)
        run = self.ask("POST", f"/api/v2/dags/{dag_id}/dagRuns", json={"logical_date": None, "conf": conf})
        return DagRun(self, dag_id, run["dag_run_id"])


class DagRun:
    """A run of a DAG, and its task instances."""

    def __init__(self, server: AirflowServer, dag_id: str, run_id: str) -> None:
        self.server = server
        self.dag_id = dag_id
        self.run_id = run_id
        self.path = f"/api/v2/dags/{dag_id}/dagRuns/{run_id}"

    def task(self, task_id: str = "work", map_index: int = -1) -> dict[str, Any]:
        suffix = "" if map_index < 0 else f"/{map_index}"
        return self.server.ask("GET", f"{self.path}/taskInstances/{task_id}{suffix}")

    def wait(self, states: Iterable[str], task_id: str = "work", map_index: int = -1) -> dict[str, Any]:
        """Return a task instance, once it has one of these states."""
        wanted = {states} if isinstance(states, str) else set(states)

        def found() -> dict[str, Any] | None:
            task = self.task(task_id, map_index)
            return task if task["state"] in wanted else None

        try:
            task = wait_until(found, f"{task_id} to be {wanted}", START_SECONDS, LOOK_SECONDS)
        except TimeoutError as error:
            error.add_note(f"it is {self.task(task_id, map_index)['state']}\n{self.log(task_id, map_index)}")
            raise
        assert task is not None
        return task

    def mark(self, state: str, task_id: str = "work") -> None:
        """Give a task instance another state, as a user does in the UI."""
        self.server.ask("PATCH", f"{self.path}/taskInstances/{task_id}", json={"new_state": state})

    def clear(self, task_id: str = "work") -> None:
        """Clear a task instance, as a user does in the UI."""
        body = {
            "dry_run": False,
            "task_ids": [task_id],
            "dag_run_id": self.run_id,
            "only_failed": False,
            "reset_dag_runs": True,
        }
        self.server.ask("POST", f"/api/v2/dags/{self.dag_id}/clearTaskInstances", json=body)

    def xcom(self, key: str, task_id: str = "work", map_index: int = -1) -> Any:
        query = {"map_index": map_index, "deserialize": False, "stringify": False}
        return self.server.ask("GET", f"{self.path}/taskInstances/{task_id}/xcomEntries/{key}", params=query)["value"]

    def log(self, task_id: str = "work", map_index: int = -1, attempt: int | None = None) -> str:
        """Return the text of the log of one try; the last one by default."""
        attempt = attempt or max(1, self.task(task_id, map_index)["try_number"])
        query = {"map_index": map_index, "full_content": True}
        found = self.server.ask("GET", f"{self.path}/taskInstances/{task_id}/logs/{attempt}", params=query)["content"]
        return "\n".join(
            line if isinstance(line, str) else f"{line.get('level', '')} {line['event']}{_error(line)}"
            for line in found
        )

    def links(self, task_id: str = "work") -> dict[str, str | None]:
        """Return the links on the page of a task instance."""
        return self.server.ask("GET", f"{self.path}/taskInstances/{task_id}/links")["extra_links"]

    def stored(self, key: str, task_id: str = "work") -> Any:
        """Return a value of the task state store, which the tab Storage shows."""
        path = f"{self.path}/taskInstances/{task_id}/state-store/{key}"
        return self.server.ask("GET", path)["value"]

    def tab(self, task_id: str = "work", map_index: int = -1) -> dict[str, Any]:
        """Return what the tab "Skyward" of a task instance shows."""
        query = {"run_id": self.run_id, "task_id": task_id, "map_index": map_index}
        return self.server.ask("GET", f"/skyward/dags/{self.dag_id}/task", params=query)


class Job:
    """A DAG run whose function has its files in a folder. `is_repeated`: its pool may run the function again."""

    is_repeated = False

    def __init__(self, server: AirflowServer, folder: Path, dag_id: str, files: Iterable[str] = ()) -> None:
        self.server = server
        self.folder = folder
        folder.mkdir()
        for name in files:
            (folder / name).touch()
        self.run: DagRun = server.trigger(dag_id, folder=str(folder))

    @property
    def runs(self) -> list[str]:
        """What began each run of the function."""
        path = self.folder / "runs"
        return path.read_text().split() if path.exists() else []

    def begun(self, count: int = 1) -> None:
        """Wait until the function runs for the time `count`."""
        wait_until(lambda: len(self.runs) >= count, f"run {count} of the function", START_SECONDS)

    def go(self) -> None:
        """Let the function end."""
        (self.folder / "go").touch()

    def receipts(self) -> list[dict[str, Any]]:
        work = sky.Work(system="airflow", workflow=self.run.dag_id, run=self.run.run_id)
        return sky.receipts_of(work, ledger_url=self.server.ledger_url)

    def ended(self, pools: int | None) -> float:
        """Wait until no machine is left; return the cost of these pools, which the tab has too."""
        wait_until(lambda: self.machines() == [], "the end of the machines", START_SECONDS, LOOK_SECONDS)
        wait_until(lambda: all(pool["ended_at"] for pool in self.receipts()), "the end in the ledger", START_SECONDS)
        found = self.receipts()
        assert pools is None or len(found) == pools
        assert self.is_repeated or len(self.runs) == len(set(self.runs)), f"a generation has run twice: {self.runs}"
        cost = sum(pool["total_cost_usd"] for pool in found)
        assert cost > 0
        return cost

    def machines(self) -> list[int]:
        ids = {pool["pool_id"] for pool in self.receipts()}
        return [pid for pid, environ in tagged_processes() if environ.get(POOL_TAG) in ids]

    def check_bill(self, pools: int | None, map_index: int = -1) -> None:
        """The XCom, the tab and the ledger have one cost."""
        cost, bill = self.ended(pools), self.run.xcom("skyward_cost", map_index=map_index)
        tab = self.run.tab(map_index=map_index)
        assert bill["is_final"]
        assert micro(bill["all_tries_usd"]) == micro(tab["cost_usd"]) == micro(cost)
        assert sorted(pool["pool_id"] for pool in tab["pools"]) == sorted(bill["pools"])


def parent_of(pid: int) -> int:
    return int(Path(f"/proc/{pid}/stat").read_text().rpartition(") ")[2].split()[1])


def _error(line: Mapping[str, Any]) -> str:
    details = line.get("error_detail") or []
    return "".join(f" {one.get('exc_type')}: {one.get('exc_value')}" for one in details)


def _airflow() -> list[str]:
    return [sys.executable, "-m", "airflow"]


def _guard(folder: str) -> None:
    """Wait until the test process closes the pipe or dies; then end what is left of its server."""
    for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
        signal.signal(number, signal.SIG_IGN)
    sys.stdin.buffer.read()
    end_all(folder)


if __name__ == "__main__":
    _guard(sys.argv[1])
