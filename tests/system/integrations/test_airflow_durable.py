"""Airflow's tasks that outlive their workers: adoption after a kill, generations, warm retries.

This file is also the program of a worker: `python test_airflow_durable.py FOLDER TRY` runs one try of a task, with the
state store as a file.
"""

import importlib.util
import json
import os
import re
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

if importlib.util.find_spec("airflow") is None:
    pytest.skip("Airflow is not installed", allow_module_level=True)

import skyward_core as sky
from airflow_provider_skyward.generations import Generation, Phase, begun, may_adopt, pool_name_of

WORK = sky.Work(system="airflow", workflow="d", run="r", task="t", attempt="1")


# ── generations ──────────────────────────────────────────────────────────────────────────────────────────────────────


def test_a_name_is_that_of_one_task_instance_in_all_tries() -> None:
    """DAG, run, task and map index make the name; the try does not, and no text of a user breaks it."""
    tries = {pool_name_of(sky.Work(workflow="d", run="r", task="t", attempt=str(number))) for number in (1, 2)}
    others = {
        pool_name_of(sky.Work(workflow="d", run="r", task="t", task_run="3")),
        pool_name_of(sky.Work(workflow="d", run="r2", task="t")),
        pool_name_of(sky.Work(workflow="d/r", run="", task="t")),
        pool_name_of(sky.Work(workflow="é ü" * 100, run="r", task="t")),
    }
    assert len(tries | others) == 5
    assert all(sky.PoolSpec.of(name=name).name == name for name in tries | others)


def test_a_generation_survives_the_store_and_a_wrong_value_is_none() -> None:
    """What is written is read again. A user may edit the store: a wrong value begins a new generation."""
    generation = Generation(2, Phase.STARTED, "pool", "call", "sky-1", (3, 0))
    stored = json.loads(json.dumps(generation.to_json()))
    assert Generation.of(stored) == generation
    wrong = [None, 7, {}, stored | {"phase": "x"}, stored | {"number": "x"}, stored | {"cursors": 1}]
    assert [Generation.of(value) for value in wrong] == [None] * 6


@pytest.mark.parametrize(("phase", "is_adopted"), list(zip(Phase, (False, True, True, False), strict=True)))
def test_only_a_call_that_may_have_begun_is_adopted(phase: Phase, is_adopted: bool) -> None:
    """A generation that has ended, that has rented only, or that is another task's is not adopted."""
    first = begun(WORK, 1, name := pool_name_of(WORK))
    before = Generation(1, phase, name, first.call_id, "sky-1", (0,))
    assert may_adopt(before, WORK, name) is is_adopted
    assert not may_adopt(before, WORK, "other")
    assert not may_adopt(before, sky.Work(workflow="d", run="r", task="other"), name)
    assert not may_adopt(Generation(1, phase, name, first.call_id), WORK, name)
    assert begun(WORK, 2, name).call_id != first.call_id


# ── workers that are killed ──────────────────────────────────────────────────────────────────────────────────────────


class Task:
    """One task instance: its folder has the state store, the counter of side effects, and the file that ends it."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.environ = {**os.environ, "SKYWARD_LEDGER": f"sqlite:///{folder}/ledger.db", "PYTHONUNBUFFERED": "1"}
        self.processes: list[subprocess.Popen[str]] = []

    def start(self, number: int, **environ: str) -> subprocess.Popen[str]:
        process = subprocess.Popen(
            [sys.executable, __file__, str(self.folder), str(number)],
            env=self.environ | environ,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            start_new_session=True,
        )
        self.processes.append(process)
        return process

    def end(self) -> None:
        """Kill each process that a failed test has left, and close its pipe."""
        for process in self.processes:
            if process.poll() is None:
                os.killpg(process.pid, signal.SIGKILL)
            process.wait()
            if process.stdout is not None:
                process.stdout.close()

    def finish(self, number: int, **environ: str) -> str:
        """Run one try to its end, with the file that lets the call return; return its output."""
        (self.folder / "go").touch()
        process = self.start(number, **environ)
        output, _ = process.communicate(timeout=240)
        assert process.returncode == 0, output
        return output

    @property
    def state(self) -> dict[str, Any]:
        return json.loads((self.folder / "state.json").read_text()) if (self.folder / "state.json").exists() else {}

    @property
    def runs(self) -> list[str]:
        """The generation of each run of the function."""
        return (self.folder / "runs").read_text().split() if (self.folder / "runs").exists() else []

    def pools(self) -> list[dict[str, Any]]:
        command = [sys.executable, "-m", "skyward_core.cli", "ps", "--all", "--json"]
        return json.loads(subprocess.run(command, env=self.environ, check=True, capture_output=True).stdout)


@pytest.fixture
def job(tmp_path: Path) -> Iterator[Task]:
    task = Task(tmp_path)
    yield task
    task.end()
    for pool in task.pools():
        if not pool["ended_at"]:
            subprocess.run(
                [sys.executable, "-m", "skyward_core.cli", "stop", pool["pool"]], env=task.environ, check=True
            )


def read_until(process: subprocess.Popen[str], text: str) -> str:
    assert process.stdout is not None
    output = ""
    for line in process.stdout:
        output += line
        if text in line:
            return output
    raise AssertionError(f"no {text!r} in {output}")


def test_the_next_try_adopts_the_call_of_a_killed_worker(job: Task) -> None:
    """After SIGKILL the function goes on, and the next try has its result and its later lines. It has run once, and the
    machines are gone. A try after that begins a new generation; SIGTERM ends its pool and its generation.
    """
    first = job.start(1)
    before = read_until(first, "[node 0] line 1")
    assert "pushed skyward_cost" in before, before
    assert before.index("pushed skyward_cost") < before.index("launching"), before
    os.killpg(first.pid, signal.SIGKILL)
    first.communicate()
    assert job.state["phase"] == "started"

    after = job.finish(2)
    assert "adopted the call that try 1 has begun" in after
    assert "returned 42" in after
    assert "[node 0] the end" in after
    assert len(job.runs) == 1
    assert job.state["phase"] == "ended"
    (pool,) = job.pools()
    assert (pool["pool"], bool(pool["ended_at"])) == (job.state["pool_id"], True)
    bill = json.loads(re.findall(r"pushed skyward_cost (.*)", after)[-1])
    assert bill["is_final"]
    assert bill["pools"] == [pool["pool"]]
    assert bill["all_tries_usd"] == pytest.approx(pool["cost_usd"], rel=0.05)

    (job.folder / "go").unlink()
    third = job.start(3)
    read_until(third, "[node 0] line 1")
    assert len(job.runs) == 2
    os.killpg(third.pid, signal.SIGTERM)
    said, _ = third.communicate(timeout=60)
    assert "raised AirflowException: the task was asked to stop" in said
    assert [bool(pool["ended_at"]) for pool in job.pools()] == [True, True]
    assert job.state["phase"] == "ended"


# ── the worker's side ────────────────────────────────────────────────────────────────────────────────────────────────


def _payload(folder: str, generation: str, fails: bool) -> int:
    path = Path(folder)
    with (path / "runs").open("a") as runs:
        runs.write(generation + "\n")
    number = 0
    while not (path / "go").exists():
        number += 1
        print("line", number, flush=True)
        time.sleep(0.2)
    print("the end", flush=True)
    if fails:
        raise LookupError("it fails")
    return 42


class _Store:
    """Airflow's task state store, as a file that is replaced in one step."""

    def __init__(self, path: Path) -> None:
        self._path = path

    def get(self, key: str, default: Any = None) -> Any:
        return json.loads(self._path.read_text()) if self._path.exists() else default

    def set(self, key: str, value: Any) -> None:
        if "AWAY" in os.environ and any(value.get("cursors", ())):
            del os.environ["AWAY"]
            raise away()
        new = self._path.with_suffix(".new")
        new.write_text(json.dumps(value))
        new.replace(self._path)
        if value["phase"] == os.environ.get("HOLD_AT"):
            print("holding at", value["phase"], flush=True)
            time.sleep(600)


def away() -> Exception:
    """The error of a request while the api-server is restarted."""
    from airflow.sdk.exceptions import AirflowRuntimeError, ErrorType
    from airflow.sdk.execution_time.comms import ErrorResponse

    return AirflowRuntimeError(ErrorResponse(error=ErrorType.API_SERVER_ERROR, detail={"status_code": None}))


def _named(folder: str, name: str) -> str:
    _payload(folder, name, fails=False)
    return name


def _resumed(task: Any, context: Any, deferred: Any) -> Any:
    """Follow the trigger of a task that was deferred, and return the result of the worker that comes back."""
    import asyncio

    async def payloads() -> list[Any]:
        return [event.payload async for event in deferred.trigger.run()]

    (payload,) = asyncio.run(payloads())
    print("the trigger has seen the end", payload)
    return task.execute_complete(context, payload)


def _work(folder: Path, number: int) -> None:
    """Run one try, with the handler of SIGTERM that Airflow's task runner has."""
    from airflow.sdk.exceptions import TaskDeferred

    from airflow_provider_skyward.operators import SkywardOperator

    class TaskInstance:
        dag_id, run_id, task_id, map_index = "killed", "run", "work", -1
        try_number, max_tries = number, int(os.environ.get("MAX_TRIES", "1000"))

        def xcom_push(self, key: str, value: Any) -> None:
            print("pushed", key, json.dumps(value), flush=True)

    warm: dict[str, Any] = {"keep_warm": float(os.environ["KEEP_WARM"])} if "KEEP_WARM" in os.environ else {}
    call: dict[str, Any] = {"python_callable": _payload, "op_args": [str(folder), str(number), "FAIL" in os.environ]}
    if "MAP" in os.environ:
        call = {"python_callable": _named, "op_args": [str(folder), ["a", "b", "c"]], "map_over": "name"}
        call["concurrency"] = 3
    task = SkywardOperator(
        task_id="work",
        provider=sky.Local(price_per_hour=36.0),
        deferrable="DEFERRED" in os.environ,
        retries=3,
        **call,
        **warm,
    )
    signal.signal(signal.SIGTERM, lambda number, frame: task.on_kill())
    try:
        context: Any = {"ti": TaskInstance(), "task_state_store": _Store(folder / "state.json")}
        try:
            result = task.execute(context)
        except TaskDeferred as deferred:
            result = _resumed(task, context, deferred)
        print("returned", result)
    except Exception as error:
        print(f"raised {type(error).__name__}: {error}")


if __name__ == "__main__":
    os.environ["AIRFLOW_HOME"] = sys.argv[1]
    _work(Path(sys.argv[1]), int(sys.argv[2]))
