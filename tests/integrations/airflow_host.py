"""Airflow without a server: DAGs run by `dag.test()` on SQLite, and tasks as processes with Airflow's handler of SIGTERM.

This file is also the program of these processes: `python airflow_host.py host` runs DAGs and expressions that tests
send it, `python airflow_host.py ROLE FOLDER NAME` runs one task.
"""

import fcntl
import json
import os
import shutil
import signal
import subprocess
import sys
import textwrap
import threading
import time
import traceback
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TextIO

from skyward_core.worker.node_clocks import tagged_processes

ROOT = Path(__file__).parents[2]
HEAD = """
from datetime import timedelta
from airflow.sdk import dag, task
import skyward_core as sky
from airflow_provider_skyward.operators import SkywardOperator
LOCAL = sky.Local(price_per_hour=36.0)
from tests.integrations.airflow_host import end_with_the_pool
from tests.integrations.bare_node import BARE
"""
POOLS_HEAD = f"{HEAD}from airflow_provider_skyward.pools import *\n"


# ── DAGs ─────────────────────────────────────────────────────────────────────────────────────────────────────────────


def end_with_the_pool(name: str) -> None:
    """Let the present DAG end the pool with this name. Its tasks share it, which is cheaper than a pool for each."""
    from airflow.sdk import teardown
    from airflow.sdk.definitions._internal.contextmanager import DagContext

    import skyward_core as sky

    @teardown
    def end_of_pool() -> None:
        sky.release(name)

    dag: Any = DagContext.get_current()
    dag.leaves >> end_of_pool()


@dataclass(frozen=True)
class Ran:
    """The results of a DAG run: its state, its XComs by (task, map index, key), and all log records."""

    state: str
    xcoms: dict[tuple[str, int, str], Any]
    log: str

    def result(self, task_id: str, map_index: int = -1) -> Any:
        return self.xcoms[task_id, map_index, "return_value"]

    def bill(self, task_id: str, map_index: int = -1) -> dict[str, Any]:
        return self.xcoms[task_id, map_index, "skyward_cost"]


class Airflow:
    """An Airflow home, and a process that uses it. `database` is a copy of a new one."""

    def __init__(self, home: Path, database: Path) -> None:
        self.home = home
        self.dags = home / "dags"
        self.dags.mkdir(parents=True)
        shutil.copy(database, home / "airflow.db")
        self.environ = environ_of(home)
        self.process = subprocess.Popen(
            [sys.executable, __file__, "host"],
            env=self.environ,
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
            start_new_session=True,
        )
        self._sent = 0

    def cli(self, *arguments: str) -> str:
        command = [sys.executable, "-m", "airflow", *arguments]
        return subprocess.run(command, env=self.environ, check=True, capture_output=True, text=True, timeout=100).stdout

    def run_example(self, name: str, *without: str, **conf: Any) -> Ran:
        """Run a DAG of dags/. `without` are texts of the file that are left out, such as packages to install."""
        source = (ROOT / "dags" / f"{name}.py").read_text()
        for text in without:
            assert text in source
            source = source.replace(text, "")
        return self.run(f"example_{name}", source, head="", **conf)

    def evaluate(self, code: str, head: str = HEAD) -> Any:
        """Run code in the Airflow process, after a head; return the value of `answer`.

        An exception there is raised here as RuntimeError.
        """
        return self._ask({"code": head + textwrap.dedent(code)})[0]

    def run(
        self, name: str, source: str, head: str = HEAD, dag_id: str = "", *, has_date: bool = True, **conf: Any
    ) -> Ran:
        """Run the one DAG of a DAG file, or one of several. `has_date`: the run has a logical date, else it is one that
        an asset, or a request without a date, starts. `conf` is the configuration of the run.
        """
        file = self.dags / f"{name}.py"
        file.write_text(head + textwrap.dedent(source))
        try:
            asked = {"file": str(file), "dag_id": dag_id, "has_date": has_date, "conf": conf}
            answer, log = self._ask(asked)
        finally:
            file.unlink()
        return Ran(answer["state"], {(task, index, key): value for task, index, key, value in answer["xcoms"]}, log)

    def close(self) -> None:
        self.process.communicate(timeout=60)

    def _ask(self, request: dict[str, Any]) -> tuple[Any, str]:
        assert self.process.stdin is not None
        assert self.process.stdout is not None
        log = self.home / "log.txt"
        self._sent += 1
        self.process.stdin.write(json.dumps(request | {"number": self._sent, "log": str(log)}) + "\n")
        self.process.stdin.flush()
        # a test that has failed by its time limit may have left a reply
        while (reply := json.loads(self.process.stdout.readline()))["number"] != self._sent:
            pass
        assert left_by(self.process.pid) == []
        if "error" in reply:
            raise RuntimeError(reply["error"] + log.read_text())
        return reply["answer"], log.read_text()


def environ_of(home: Path) -> dict[str, str]:
    return {
        **os.environ,
        "AIRFLOW_HOME": str(home),
        "AIRFLOW__CORE__DAGS_FOLDER": str(home / "dags"),
        "AIRFLOW__CORE__LOAD_EXAMPLES": "False",
        "AIRFLOW__USAGE_DATA_COLLECTION__ENABLED": "False",
        "PYTHONUNBUFFERED": "1",
    }


def new_database(tmp_path_factory: Any) -> Path:
    """Return a new database of Airflow, which all processes of the test session copy: it takes ten seconds to make."""
    own = tmp_path_factory.getbasetemp()
    folder = (own.parent if "PYTEST_XDIST_WORKER" in os.environ else own) / "airflow-database"
    folder.mkdir(exist_ok=True)
    with (folder / "lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        if not (folder / "made").exists():
            command = [sys.executable, "-m", "airflow", "db", "migrate"]
            subprocess.run(command, env=environ_of(folder), check=True, capture_output=True, timeout=200)
            (folder / "made").touch()
    return folder / "airflow.db"


def served(tmp_path_factory: Any) -> Iterator[Airflow]:
    """The fixture `airflow`."""
    airflow = Airflow(tmp_path_factory.mktemp("airflow"), new_database(tmp_path_factory))
    yield airflow
    airflow.close()


def left_by(pid: int) -> list[int]:
    """Processes of the nodes that the process has started."""
    return [
        node for node, environ in tagged_processes() if environ.get("SKYWARD_OWNER", "").partition(":")[0] == str(pid)
    ]


# ── tasks as processes ───────────────────────────────────────────────────────────────────────────────────────────────


class Workers:
    """Tasks that are processes, as below Airflow's supervisor. Their function waits for the file `go` or `go-MARK`.

    The folder has these files, the ledger, the state store, and `runs` with the mark of each run of the function. The
    roles: "plain" (a task without retries; POOL names its pool, TASK is its id, and it times out in the moment in which it
    writes the line ALARM_AT), "hang" (the same, with a provider that does not answer), "durable" (NAME is
    the number of the try), "shared" (NAME is a task of a DAG run with one pool).
    """

    def __init__(self, folder: Path, role: str) -> None:
        self.folder = folder
        self.role = role
        self.environ = {**os.environ, "SKYWARD_LEDGER": f"sqlite:///{folder}/ledger.db", "PYTHONUNBUFFERED": "1"}
        self.processes: list[subprocess.Popen[str]] = []

    def start(self, name: str | int, **environ: str) -> subprocess.Popen[str]:
        process = subprocess.Popen(
            [sys.executable, __file__, self.role, str(self.folder), str(name)],
            env=self.environ | environ,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            start_new_session=True,
        )
        self.processes.append(process)
        return process

    def finish(self, name: str | int, **environ: str) -> str:
        """Run a task to its end; return its output."""
        (self.folder / ("go" if self.role == "durable" else f"go-{name}")).touch()
        process = self.start(name, **environ)
        output, _ = process.communicate(timeout=240)
        assert process.returncode == 0, output
        return output

    @property
    def state(self) -> dict[str, Any]:
        return json.loads((self.folder / "state.json").read_text())

    @property
    def runs(self) -> list[str]:
        return (self.folder / "runs").read_text().split() if (self.folder / "runs").exists() else []

    def cli(self, *arguments: str) -> str:
        """The output of `skyward` with the ledger of these tasks."""
        command = [sys.executable, "-m", "skyward_core.cli", *arguments]
        return subprocess.run(command, env=self.environ, check=True, capture_output=True, text=True).stdout

    def pools(self) -> list[dict[str, Any]]:
        return json.loads(self.cli("ps", "--all", "--json"))

    def end(self) -> None:
        """Kill each process that a failed test has left, close its pipe, and end its pool."""
        for process in self.processes:
            if process.poll() is None:
                os.killpg(process.pid, signal.SIGKILL)
            process.wait()
            if process.stdout is not None:
                process.stdout.close()
        for pool in self.pools():
            if not pool["ended_at"]:
                self.cli("stop", pool["pool"])


def read_until(process: subprocess.Popen[str], text: str) -> str:
    """Return the output of a process up to a line with this text."""
    assert process.stdout is not None
    output = ""
    for line in process.stdout:
        output += line
        if text in line:
            return output
    raise AssertionError(f"no {text!r} in {output}")


def pushed(output: str, key: str = "skyward_cost") -> dict[str, Any]:
    """Return the last value that a task has pushed under a key."""
    return json.loads(output.rpartition(f"pushed {key} ")[2].splitlines()[0])


def micro(usd: float) -> int:
    """Return USD as whole micro-dollars, in which bills are compared."""
    return round(usd * 1_000_000)


def returned(output: str) -> Any:
    assert "\nreturned " in output, output
    return json.loads(output.rpartition("\nreturned ")[2].splitlines()[0])


# ── the program ──────────────────────────────────────────────────────────────────────────────────────────────────────


def _host() -> None:
    """Answer one request for each line of stdin; all output meanwhile goes to the file that the request names."""
    replies = os.fdopen(os.dup(1), "w", buffering=1)
    for line in sys.stdin:
        request = json.loads(line)
        with open(request["log"], "wb") as log:
            os.dup2(log.fileno(), 1)
            os.dup2(log.fileno(), 2)
        try:
            is_dag = "file" in request
            asked = (request.get(name) for name in ("file", "dag_id", "has_date", "conf"))
            answer = _run_dag(*asked) if is_dag else _evaluate(request["code"])
            reply = {"answer": answer}
        except BaseException:
            reply = {"error": traceback.format_exc()}
        replies.write(json.dumps(reply | {"number": request["number"]}) + "\n")


def _evaluate(code: str) -> Any:
    names: dict[str, Any] = {"__name__": "evaluated"}
    exec(code, names)
    return names["answer"]


def _run_dag(file: str, dag_id: str, has_date: bool, conf: dict[str, Any]) -> dict[str, Any]:
    from airflow.dag_processing.dagbag import DagBag
    from airflow.models.xcom import XComModel
    from airflow.settings import Session

    bag = DagBag(file)
    if bag.import_errors:
        raise RuntimeError("\n".join(map(str, bag.import_errors.values())))
    (dag,) = [bag.dags[dag_id]] if dag_id else bag.dags.values()
    run = dag.test(run_conf=conf, **({} if has_date else {"logical_date": None}))
    session = Session()
    rows = session.query(XComModel).filter(XComModel.run_id == run.run_id, XComModel.dag_id == dag.dag_id).all()
    return {
        "state": run.state,
        "xcoms": [[row.task_id, row.map_index, row.key, XComModel.deserialize_value(row)] for row in rows],
    }


def _payload(folder: str, mark: str, fails: bool = False) -> str:
    path = Path(folder)
    with (path / "runs").open("a") as runs:
        runs.write(mark + "\n")
    number = 0
    while not ((path / "go").exists() or (path / f"go-{mark}").exists()):
        number += 1
        print("line", number, flush=True)
        time.sleep(0.2)
    print("the end", flush=True)
    if fails:
        raise LookupError("it fails")
    return mark


class _Store:
    """Airflow's task state store, as a file that is replaced in one step."""

    def __init__(self, path: Path) -> None:
        self._path = path

    def get(self, key: str, default: Any = None) -> Any:
        return json.loads(self._path.read_text()) if self._path.exists() else default

    def set(self, key: str, value: Any) -> None:
        new = self._path.with_suffix(".new")
        new.write_text(json.dumps(value))
        new.replace(self._path)
        if value["phase"] == os.environ.get("HOLD_AT"):
            print("holding at", value["phase"], flush=True)
            time.sleep(600)


def _operator(role: str, folder: Path, name: str) -> Any:
    import skyward_core as sky
    from airflow_provider_skyward.operators import SkywardOperator

    call: dict[str, Any] = {"python_callable": _payload, "op_args": [str(folder), name, "FAIL" in os.environ]}
    options: dict[str, Any] = {"provider": sky.Local(price_per_hour=36.0)}
    if role == "durable":
        options |= {"retries": 3, "deferrable": "DEFERRED" in os.environ}
    if "POOL" in os.environ:
        options |= {"name": os.environ["POOL"], "keep_warm": 60.0, "concurrency": 2}
    elif role != "durable":
        options["nodes"] = 2
    if "KEEP_WARM" in os.environ:
        options["keep_warm"] = float(os.environ["KEEP_WARM"])
    if "MAP" in os.environ:
        call["op_args"] = [str(folder), ["a", "b", "c"]]
        options |= {"map_over": "mark", "concurrency": 3}
    return SkywardOperator(task_id="work", **call, **options)


def _shared(folder: Path, name: str) -> Any:
    """A task of a DAG run with one pool. The setup's XCom is a file."""
    from airflow.sdk import DAG

    import skyward_core as sky
    from airflow_provider_skyward.operators import SkywardOperator
    from airflow_provider_skyward.pools import SkywardCreatePool, SkywardReleasePool

    with DAG("killed", schedule=None):
        create = SkywardCreatePool(task_id="create", provider=sky.Local(price_per_hour=36.0), concurrency=3)
        release = SkywardReleasePool(task_id="release", skyward_pool=create.output)
        tasks: dict[str, Any] = {"create": create, "release": release}
        for task_id in ("killed", "asked", "going_on", "later"):
            tasks[task_id] = SkywardOperator(
                task_id=task_id, python_callable=_payload, op_args=[str(folder), task_id], skyward_pool=create.output
            )
            tasks[task_id] >> release
    handle = folder / "handle.json"
    if handle.exists() and name != "release":
        tasks[name].skyward_pool = json.loads(handle.read_text())
    return tasks[name]


def _do_not_answer() -> None:
    """Let no machine end; tell when the reaper got the machines."""
    import skyward_core as sky

    terminate_now = sky.ComputePool.terminate_now

    def hand_over(pool: sky.ComputePool) -> None:
        terminate_now(pool)
        print("handed over", flush=True)

    def hang(provider: sky.Local, ids: object) -> None:
        print("the provider does not answer", flush=True)
        threading.Event().wait()

    sky.ComputePool.terminate_now = hand_over
    sky.Local.terminate = hang


def _resumed(task: Any, context: Any, deferred: Any) -> Any:
    """Follow the trigger of a task that was deferred, and return the result of the worker that comes back."""
    import asyncio

    async def payloads() -> list[Any]:
        return [event.payload async for event in deferred.trigger.run()]

    (payload,) = asyncio.run(payloads())
    print("the trigger has seen the end", payload)
    return task.execute_complete(context, payload)


def _executed(task: Any, context: Any) -> Any:
    """As Airflow's task runner, with `execution_timeout`, whose time is over when SIGALRM comes."""
    from airflow.sdk.exceptions import AirflowTaskTimeout
    from airflow.sdk.execution_time.timeout import timeout

    try:
        with timeout(3600):
            return task.execute(context)
    except AirflowTaskTimeout as error:
        task.on_kill()
        raise RuntimeError("the task has timed out") from error


class AlarmAt:
    """A stream whose process gets SIGALRM at the first line with this text, in the worst moment: the line was written,
    and its writer has not yet given back the lock of structlog.
    """

    def __init__(self, stream: TextIO, text: str) -> None:
        self._stream, self._text = stream, text

    def write(self, text: str) -> int:
        written = self._stream.write(text)
        if self._text and self._text in text:
            self._text = ""
            self._stream.flush()
            os.kill(os.getpid(), signal.SIGALRM)
        return written

    def __getattr__(self, name: str) -> Any:
        return getattr(self._stream, name)


def _work(role: str, folder: Path, name: str) -> None:
    """Run one task, with the handler of SIGTERM that Airflow's task runner has (`_run_task_and_map_outcome`)."""
    from airflow.sdk.exceptions import TaskDeferred

    class TaskInstance:
        dag_id, run_id, map_index = "killed", "run", -1
        task_id = name if role == "shared" else os.environ.get("TASK", "work")
        try_number = 1 if role == "shared" else int(name)
        max_tries = int(os.environ.get("MAX_TRIES", "1000"))

        def xcom_push(self, key: str, value: Any) -> None:
            print("pushed", key, json.dumps(value), flush=True)

    if "ALARM_AT" in os.environ:
        sys.stdout = AlarmAt(sys.stdout, os.environ["ALARM_AT"])
    if role == "hang":
        _do_not_answer()
    task = _shared(folder, name) if role == "shared" else _operator(role, folder, name)
    signal.signal(signal.SIGTERM, lambda number, frame: task.on_kill())
    context: Any = {"ti": TaskInstance()}
    if role == "durable":
        context["task_state_store"] = _Store(folder / "state.json")
    try:
        try:
            result = _executed(task, context)
        except TaskDeferred as deferred:
            result = _resumed(task, context, deferred)
    except Exception as error:
        print(f"raised {type(error).__name__}: {error}")
        return
    if name == "create":
        (folder / "handle.json").write_text(json.dumps(result))
    print("\nreturned", json.dumps(result))


if __name__ == "__main__":
    if sys.argv[1] == "host":
        _host()
    else:
        os.environ["AIRFLOW_HOME"] = sys.argv[2]
        _work(sys.argv[1], Path(sys.argv[2]), sys.argv[3])
