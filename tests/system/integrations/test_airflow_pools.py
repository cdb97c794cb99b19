"""One pool for several tasks of a DAG run: setup, mapped tasks, teardown, and what happens when one of them fails.

This file is also the program of a worker: `python test_airflow_pools.py FOLDER TASK` runs one task of such a DAG.
"""

import importlib.util
import json
import os
import signal
import subprocess
import sys
import textwrap
import time
from pathlib import Path
from typing import Any

import pytest

if importlib.util.find_spec("airflow") is None:
    pytest.skip("Airflow is not installed", allow_module_level=True)

import skyward_core as sky

if __name__ != "__main__":
    from tests.system.integrations.test_airflow import HEAD, Airflow, Ran, airflow

    POOLS_HEAD = (
        f"{HEAD}from airflow_provider_skyward.pools import SkywardCreatePool, SkywardReleasePool, skyward_pool\n"
    )

__all__ = ["airflow"]

pytestmark = pytest.mark.timeout(400)  # the first test also makes Airflow's database


def run(airflow: "Airflow", name: str, source: str) -> "Ran":
    return airflow.run(name, source, head=POOLS_HEAD)


def evaluate(airflow: "Airflow", code: str) -> Any:
    return airflow.evaluate("from airflow_provider_skyward.pools import *\n" + textwrap.dedent(code))


def pools_of(airflow: "Airflow", dag_id: str) -> list[dict[str, Any]]:
    """The receipts of all pools of a DAG, oldest first, by the ledger."""
    return airflow.evaluate(f"answer = sky.receipts_of(sky.Work(system='airflow', workflow={dag_id!r}))")


SHARED = """
@dag(schedule=None)
def shared():
    with skyward_pool("gpu", provider=LOCAL, hold=300) as pool:
        @task.skyward(skyward_pool=pool)
        def square(x): return x * x

        @task.skyward(skyward_pool=pool, retries=1, retry_delay=timedelta(0))
        def total(squares): return sum(squares)

        total(square.expand(x=[1, 2, 3]))
shared()
"""


def test_tasks_of_a_run_share_one_rental_and_its_cost(airflow: "Airflow") -> None:
    """Mapped tasks and a durable one use one pool, and the teardown ends it. The shares of all tasks add up to the
    ledger's bill; the setup pays for what no call has used.
    """
    ran = run(airflow, "shared", SHARED)
    assert ran.state == "success", ran.log
    assert ran.xcoms["gpu.total", -1, "return_value"] == 14
    (pool,) = pools_of(airflow, "shared")
    assert len(pool["resources"]) == 1
    assert (pool["left"], bool(pool["ended_at"])) == ([], True)
    handle = ran.xcoms["gpu.create_pool", -1, "return_value"]
    assert handle.keys() == {"name", "pool_id"}
    assert handle["pool_id"] == pool["pool_id"]

    bill = ran.xcoms["gpu.release_pool", -1, "return_value"]
    assert bill["pools"] == {pool["pool_id"]: pool["total_cost_usd"]}
    assert bill["cost_usd"] == pool["total_cost_usd"] > 0
    assert set(bill["shares"]) == {"gpu.create_pool", "gpu.square", "gpu.total"}
    assert sum(bill["shares"].values()) == pytest.approx(bill["cost_usd"], abs=1e-9)
    tasks = [ran.bill("gpu.square", number) for number in range(3)] + [ran.bill("gpu.total")]
    assert all(one["share_of"] == handle["name"] and one["pool_id"] == pool["pool_id"] for one in tasks)
    assert all(0 <= one["cost_usd"] < pool["total_cost_usd"] for one in tasks)
    assert pool["buckets"]["warm"]["seconds"] > 0
    assert bill["shares"]["gpu.create_pool"] >= pool["buckets"]["warm"]["cost_usd"]


def test_the_teardown_ends_the_pool_after_a_task_has_failed(airflow: "Airflow") -> None:
    """The function fails, the task behind it does not run, the teardown does. The run has failed, and nothing lives."""
    ran = run(
        airflow,
        "fails",
        """
        @dag(schedule=None)
        def fails():
            create = SkywardCreatePool(task_id="create", provider=LOCAL)
            release = SkywardReleasePool(task_id="release", skyward_pool=create.output)
            @task.skyward(skyward_pool=create.output)
            def middle(): raise LookupError("it fails")
            @task
            def behind(): ...
            create >> (work := middle()) >> (last := behind()) >> release
            work >> release
        fails()
        """,
    )
    assert ran.state == "failed"
    assert "LookupError: it fails" in ran.log
    assert ("behind", -1, "return_value") not in ran.xcoms
    (pool,) = pools_of(airflow, "fails")
    assert (len(pool["resources"]), pool["left"], bool(pool["ended_at"])) == (1, [], True)
    assert ran.xcoms["release", -1, "return_value"]["pools"] == {pool["pool_id"]: pool["total_cost_usd"]}


TAMPERED = """
class TaskInstance:
    dag_id, run_id, task_id, map_index, try_number = "tampered", "r", "use", -1, 1
    def xcom_push(self, key, value):
        self.pushed = {**getattr(self, "pushed", {}), key: value}
    def get_task_states(self, **asked):
        self.asked = asked
        return {"r": {"release": self.state}}

@dag(schedule=None)
def tampered():
    create = SkywardCreatePool(task_id="create", provider=LOCAL)
    release = SkywardReleasePool(task_id="release", skyward_pool=create.output)
    create >> SkywardOperator(task_id="use", python_callable=abs, op_args=[-3], skyward_pool=create.output) >> release
    SkywardOperator(task_id="forgotten", python_callable=abs, op_args=[-3], skyward_pool=create.output)

tasks = tampered().task_dict

class SetupInstance(TaskInstance):
    task_id = "create"

handle = tasks["create"].execute({"ti": SetupInstance()})

def use(given, state=None, task_id="use"):
    tasks[task_id].skyward_pool = given
    instance = TaskInstance()
    instance.state = state
    try:
        return tasks[task_id].execute({"ti": instance}), instance.pushed["skyward_cost"]["pool_id"]
    except sky.SkywardError as error:
        return type(error).__name__, str(error)

foreign = sky.ComputePool(provider=LOCAL, display="quiet", work=sky.Work(system="airflow", workflow="other", run="r"))
"""


def test_an_altered_xcom_is_refused_and_a_pool_that_is_gone_is_rented_anew(airflow: "Airflow") -> None:
    """A user who edits the XCom of the setup sends no function to another pool, and keeps no machine from its end. A pool
    that is gone is rented anew while the teardown is to come, and not after it.
    """
    code = (
        TAMPERED.replace(
            'foreign = sky.ComputePool(provider=LOCAL, display="quiet", work=',
            "foreign = sky.ComputePool.from_spec(sky.PoolSpec.of(provider=LOCAL, display='quiet'), work=",
        )
        + """
with foreign:
    answer = {
        "own": use(handle),
        "no value": use(None),
        "name": use(handle | {"name": "airflow-other-1"}),
        "foreign": use(handle | {"pool_id": foreign.id}),
        "unknown": use(handle | {"pool_id": "sky-000000000000"}),
        "more": use(handle | {"lease": "x"}),
    }
rented = len(sky.receipts_of(sky.Work(workflow="tampered")))
sky.release(handle["pool_id"])
answer["gone"] = use(handle)
answer["after"] = use(handle, "success")
answer["forgotten"] = use(handle, task_id="forgotten")
released = tasks["release"].execute({"ti": TaskInstance()})
left = sum(len(sky.Local().instances(one["pool_id"])) for one in sky.receipts_of(sky.Work(workflow="tampered")))
answer |= {"handle": handle, "rented": rented, "released": sorted(released["pools"]), "left": left}
"""
    )
    answer = evaluate(airflow, code)
    handle = answer["handle"]
    assert answer["own"] == [3, handle["pool_id"]]
    for case in ("no value", "name", "foreign", "unknown", "more"):
        assert answer[case][0] == "LeaseTampered", answer[case]
        assert "clear 'create'" in answer[case][1].lower()
    assert answer["rented"] == 1
    result, anew = answer["gone"]
    assert (result, anew != handle["pool_id"]) == (3, True)
    assert answer["released"] == sorted([handle["pool_id"], anew])
    assert answer["after"][0] == "BadRequest"
    assert "release has already ended the pool" in answer["after"][1]
    assert "forgotten >> release" in answer["forgotten"][1]
    assert answer["left"] == 0


def test_a_setup_that_does_not_succeed_leaves_no_pool(airflow: "Airflow") -> None:
    """Airflow runs no teardown then. An error after the opening, and money that does not pay for `hold`, end the pool."""
    code = """
        from airflow.sdk.exceptions import AirflowFailException
        from airflow_provider_skyward.pools import SetupAttempt
        from skyward_core.ledger.ledger import Ledger, default_url
        from skyward_core.ledger.rows import Account, Period
        class TaskInstance:
            dag_id, run_id, map_index, try_number = "unborn", "r", -1, 1
            def __init__(self, task_id): self.task_id = task_id
            def xcom_push(self, key, value): ...
        def left(task_id):
            pools = sky.receipts_of(sky.Work(workflow="unborn", task=task_id))
            return len(pools), sum(len(sky.Local().instances(one["pool_id"])) for one in pools)
        def fail(attempt, pool): raise OSError("a full disk")
        note = SetupAttempt._note_open
        SetupAttempt._note_open = fail
        try:
            SkywardCreatePool(task_id="breaks", provider=LOCAL).execute({"ti": TaskInstance("breaks")})
        except OSError as error:
            said = [str(error)]
        finally:
            SetupAttempt._note_open = note
        from decimal import Decimal
        with Ledger(default_url()) as ledger:
            ledger.set_account(Account("poor", Decimal(10), Period.RUN))
        try:
            SkywardCreatePool(task_id="poor", provider=LOCAL, budget="poor", hold=3600).execute({"ti": TaskInstance("poor")})
        except AirflowFailException as error:
            said.append(str(error))
        answer = [said, left("breaks"), left("poor")]
    """
    said, broken, poor = evaluate(airflow, code)
    assert said[0] == "a full disk"
    assert "does not pay for 3600 s of warm time (hold)" in said[1]
    assert (broken, poor) == ([1, 0], [1, 0])


def test_the_group_wires_each_task_between_setup_and_teardown(airflow: "Airflow") -> None:
    """Plain, mapped and partial tasks, and one before a task outside. The serialized DAG has neither lease nor key, and
    the tasks have the settings of the setup.
    """
    answer = evaluate(
        airflow,
        """
import json
from airflow.serialization.serialized_objects import DagSerialization
@dag(schedule=None)
def d():
    @task
    def after(): ...
    end = after()
    with skyward_pool("gpu", provider=LOCAL, accelerator="{{ params.gpu }}", env={"HF_TOKEN": "hf_plaintext1"}) as pool:
        first = SkywardOperator(task_id="first", python_callable=len, op_args=["ab"], skyward_pool=pool, call_retries=0)
        mapped = task.skyward(skyward_pool=pool)(lambda x: x).override(task_id="mapped").expand(x=[1, 2])
        SkywardOperator.partial(task_id="partial", python_callable=len, skyward_pool=pool).expand(op_args=[["a"], ["b"]])
        first >> mapped
        mapped >> end
made = d()
data = DagSerialization.to_dict(made)
back = DagSerialization.from_dict(data).task_dict
answer = {
    "up": {t.task_id: sorted(t.upstream_task_ids) for t in made.tasks},
    "marks": [back["gpu.create_pool"].is_setup, back["gpu.release_pool"].is_teardown],
    "fields": [
        made.task_dict["gpu.first"].plain_fields[name] for name in ("accelerator", "keep_warm", "timeout", "retries")
    ],
    "secret": "hf_plaintext1" in json.dumps(data),
}
""",
    )
    create, release = "gpu.create_pool", "gpu.release_pool"
    assert answer["up"] == {
        "after": ["gpu.mapped"],
        create: [],
        "gpu.first": [create],
        "gpu.mapped": [create, "gpu.first"],
        "gpu.partial": [create],
        release: [create, "gpu.mapped", "gpu.partial"],
    }
    assert answer["marks"] == [True, True]
    assert answer["fields"] == ["{{ params.gpu }}", 1800.0, 2400.0, 0]
    assert not answer["secret"]


QUOTED = """
from airflow.sdk import dag, task
from airflow_provider_skyward.pools import skyward_pool

@dag(schedule=None)
def quoted():
    with skyward_pool("gpu", provider="local", max_cost=3.0) as pool:
        task.skyward(skyward_pool=pool)(lambda x: x).override(task_id="mapped").expand(x=[1, 2])
        task.skyward(skyward_pool=pool)(lambda: 1).override(task_id="plain")()
quoted()
"""


def test_a_quote_has_the_shared_pool_once(airflow: "Airflow", tmp_path: Path) -> None:
    """As that of the setup: its tasks rent nothing."""
    (tmp_path / "quoted.py").write_text(QUOTED)
    code = f"""
        from pathlib import Path
        from airflow_provider_skyward.dag_plans import plan_of
        answer = [(one.task, one.spec.max_cost, one.timeout_seconds) for one in plan_of(Path({str(tmp_path)!r})).tasks]
    """
    assert airflow.evaluate(code) == [["gpu.create_pool", 3.0, None]]


@pytest.mark.parametrize(
    ("task", "words"),
    [
        ("SkywardCreatePool(task_id='c', name='x')", "name='x': the pool of a setup is that of one DAG run"),
        ("SkywardCreatePool(task_id='c', keep_warm=60)", "keep_warm=60: the teardown ends the pool"),
        ("SkywardCreatePool(task_id='c', hold=0)", "hold=0: write for how many seconds"),
        ("SkywardCreatePool(task_id='c', hold=900, timeout=600)", "timeout=600 ends idle machines before hold=900"),
        ("SkywardCreatePool(task_id='c', acelerator='A100')", "no keyword 'acelerator'; did you mean 'accelerator'?"),
        ("use(skyward_pool='default_pool')", "skyward_pool=str: give what"),
        ("use(skyward_pool=create.output, nodes=2)", "nodes: the pool of 'create' has its settings from there"),
        ("use(skyward_pool=create.output, deferrable=True)", "leave out one of deferrable and skyward_pool"),
        ("use(skyward_pool=create.output, provider='local', lease_seconds=60)", ""),
    ],
)
def test_a_wrong_pool_is_refused_while_the_dag_is_parsed(airflow: "Airflow", task: str, words: str) -> None:
    """Nothing is opened for it, and the message says what to write."""
    code = f"""
from contextlib import suppress
said = ""
@dag(schedule=None)
def d():
    create = SkywardCreatePool(task_id="create", provider="local")
    def use(**keywords): return SkywardOperator(task_id="use", python_callable=len, **keywords)
    {task}
try:
    d()
except sky.BadRequest as error:
    said = str(error)
answer = said
"""
    assert words in (said := evaluate(airflow, code))
    assert bool(said) == bool(words)


# ── workers in processes of their own ────────────────────────────────────────────────────────────────────────────────


class Run:
    """A DAG run whose tasks are processes: a folder with the ledger, what they have begun, and what lets them end."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.environ = {**os.environ, "SKYWARD_LEDGER": f"sqlite:///{folder}/ledger.db", "PYTHONUNBUFFERED": "1"}
        self.processes: list[subprocess.Popen[str]] = []

    def start(self, task: str) -> subprocess.Popen[str]:
        process = subprocess.Popen(
            [sys.executable, __file__, str(self.folder), task],
            env=self.environ,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            start_new_session=True,
        )
        self.processes.append(process)
        return process

    def finish(self, task: str) -> Any:
        """Run a task to its end; return its result, and its output in `said`."""
        (self.folder / f"go-{task}").touch()
        self.said, _ = self.start(task).communicate(timeout=240)
        return self.result()

    def result(self) -> Any:
        assert "\nreturned " in self.said, self.said
        return json.loads(self.said.rpartition("\nreturned ")[2].splitlines()[0])

    def wait_for_share(self, task: str) -> None:
        """Wait until the ledger has a cost of the task's calls."""
        work = sky.Work(system="airflow", workflow="killed", run="run", task=task)
        deadline = time.monotonic() + 120
        while not sum(sky.cost_of(work, ledger_url=self.environ["SKYWARD_LEDGER"]).values()):
            assert time.monotonic() < deadline
            time.sleep(0.2)

    def pools(self) -> list[dict[str, Any]]:
        command = [sys.executable, "-m", "skyward_core.cli", "ps", "--all", "--json"]
        return json.loads(subprocess.run(command, env=self.environ, check=True, capture_output=True).stdout)

    def end(self) -> None:
        for process in self.processes:
            if process.poll() is None:
                os.killpg(process.pid, signal.SIGKILL)
            process.wait()
            if process.stdout is not None:
                process.stdout.close()
        for pool in self.pools():
            if not pool["ended_at"]:
                command = [sys.executable, "-m", "skyward_core.cli", "stop", pool["pool"]]
                subprocess.run(command, env=self.environ, check=True)


def _payload(folder: str, name: str) -> str:
    print("working", flush=True)
    while not (Path(folder) / f"go-{name}").exists():
        time.sleep(0.1)
    return name


def _work(folder: Path, name: str) -> None:
    """Run one task, with the handler of SIGTERM that Airflow's task runner has."""
    from airflow.sdk import DAG

    from airflow_provider_skyward.operators import SkywardOperator
    from airflow_provider_skyward.pools import SkywardCreatePool, SkywardReleasePool

    class TaskInstance:
        dag_id, run_id, task_id, map_index, try_number = "killed", "run", name, -1, 1

        def xcom_push(self, key: str, value: Any) -> None:
            print("pushed", key, json.dumps(value), flush=True)

    with DAG("killed", schedule=None):
        create = SkywardCreatePool(task_id="create", provider=sky.Local(price_per_hour=36.0), concurrency=3)
        release = SkywardReleasePool(task_id="release", skyward_pool=create.output)
        tasks: dict[str, Any] = {"create": create, "release": release}
        for task_id in ("killed", "asked", "going_on", "later"):
            tasks[task_id] = task = SkywardOperator(
                task_id=task_id, python_callable=_payload, op_args=[str(folder), task_id], skyward_pool=create.output
            )
            task >> release
    task, handle = tasks[name], folder / "handle.json"
    if handle.exists() and name != "release":
        task.skyward_pool = json.loads(handle.read_text())
    signal.signal(signal.SIGTERM, lambda number, frame: task.on_kill())
    try:
        result = task.execute({"ti": TaskInstance()})
    except Exception as error:
        print(f"raised {type(error).__name__}: {error}")
        return
    if name == "create":
        handle.write_text(json.dumps(result))
    print("\nreturned", json.dumps(result))


if __name__ == "__main__":
    os.environ["AIRFLOW_HOME"] = sys.argv[1]
    _work(Path(sys.argv[1]), sys.argv[2])
