"""Airflow: one pool for several tasks of a DAG run, and tasks that are killed."""

import importlib.util
import os
import signal
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

if importlib.util.find_spec("airflow") is None:
    pytest.skip("Airflow is not installed", allow_module_level=True)

from tests.integrations import airflow_host
from tests.integrations.airflow_host import POOLS_HEAD, Airflow, Workers, left_by, micro, pushed, read_until, returned

airflow = pytest.fixture(scope="session")(airflow_host.served)


def pools_of(airflow: Airflow, dag_id: str) -> list[dict[str, Any]]:
    """The receipts of all pools of a DAG, oldest first, by the ledger."""
    return airflow.evaluate(f"answer = sky.receipts_of(sky.Work(system='airflow', workflow={dag_id!r}))")


def test_tasks_of_a_run_share_one_rental_and_its_cost(airflow: Airflow) -> None:
    """dags/shared_pool.py, on machines that have its packages. Mapped tasks, which are durable, and one behind them use
    one pool, and the teardown ends it. The bill of each is that of the ledger, to the micro-dollar, and final before the
    pool has ended.
    """
    ran = airflow.run_example("shared_pool", ', image=sky.Image(pip=["scikit-learn"])')
    assert ran.state == "success", ran.log
    assert ran.result("machines.fit_best")["score"] > 0.9
    (pool,) = pools_of(airflow, "shared_pool")
    assert len(pool["resources"]) == 2
    assert (pool["left"], bool(pool["ended_at"])) == ([], True)
    handle = ran.result("machines.create_pool")
    assert handle.keys() == {"name", "pool_id"}
    assert handle["pool_id"] == pool["pool_id"]

    bill = ran.result("machines.release_pool")
    assert bill["pools"] == {pool["pool_id"]: pool["total_cost_usd"]}
    assert bill["cost_usd"] == pool["total_cost_usd"] > 0
    assert set(bill["shares"]) == {"machines.create_pool", "machines.cross_validate", "machines.fit_best"}
    tasks = [ran.bill("machines.cross_validate", number) for number in range(3)] + [ran.bill("machines.fit_best")]
    assert all(one["share_of"] == handle["name"] and one["pool_id"] == pool["pool_id"] for one in tasks)
    assert all(one["is_final"] and 0 < one["cost_usd"] < pool["total_cost_usd"] for one in tasks)
    whole = {task: micro(usd) for task, usd in bill["shares"].items()}
    assert sum(whole.values()) == micro(bill["cost_usd"])
    assert whole["machines.cross_validate"] == sum(micro(one["cost_usd"]) for one in tasks[:3])
    assert whole["machines.fit_best"] == micro(tasks[3]["cost_usd"])
    assert {one["pool_cost_usd"] > one["cost_usd"] for one in tasks} == {True}
    setup = ran.bill("machines.create_pool")  # it was not final while the pool was open: the teardown has written it
    assert (setup["is_final"], micro(setup["cost_usd"])) == (True, whole["machines.create_pool"])
    assert micro(setup["pool_cost_usd"]) == micro(bill["cost_usd"])
    assert pool["buckets"]["warm"]["seconds"] > 0
    assert bill["shares"]["machines.create_pool"] >= pool["buckets"]["warm"]["cost_usd"]


def test_tasks_find_the_files_of_earlier_ones_on_the_machine(airflow: Airflow) -> None:
    """dags/train_and_evaluate.py: setup, three tasks on one machine, teardown."""
    ran = airflow.run_example("train_and_evaluate", rows=500, epochs=20)
    assert ran.state == "success", ran.log
    assert ran.result("evaluate") < 0.01
    (pool,) = pools_of(airflow, "train_and_evaluate")
    assert (len(pool["resources"]), pool["left"]) == (1, [])
    shares = ran.result("end")["shares"]
    assert set(shares) == {"rent", "prepare", "train", "evaluate"}
    assert sum(map(micro, shares.values())) == micro(pool["total_cost_usd"])


NAMED = """
@dag(schedule=None, params={"team": "a"})
def named():
    def group(name):
        with skyward_pool(name, name="nightly-{{ params.team }}", keep_warm=120, provider=LOCAL) as pool:
            @task.skyward(skyward_pool=pool)
            def square(x): return x * x
            square(3)
    @task
    def end(): sky.release("nightly-a")
    from airflow.sdk.definitions._internal.contextmanager import DagContext
    group("first")
    group("second")
    end()
    tasks = DagContext.get_current().task_dict
    tasks["first.release_pool"] >> tasks["second.create_pool"]
    tasks["second.release_pool"] >> tasks["end"]
named()
"""


def test_a_pool_with_a_name_of_the_users_goes_on_after_the_teardown(airflow: Airflow) -> None:
    """The next setup, of this run or another one, finds it warm; the bill of the teardown is the part of its tasks."""
    ran = airflow.run("named", NAMED, POOLS_HEAD)
    assert ran.state == "success", ran.log
    first, second = (ran.result(f"{group}.create_pool") for group in ("first", "second"))
    assert first == second == {"name": "nightly-a", "pool_id": first["pool_id"]}
    bill = ran.result("first.release_pool")
    task = ran.bill("first.square")
    assert (task["share_of"], task["is_final"], task["pool_id"]) == ("nightly-a", True, first["pool_id"])
    assert bill["shares"] == {"first.create_pool": 0, "first.square": task["cost_usd"]}
    assert bill["pools"] == {first["pool_id"]: bill["cost_usd"]}
    assert ran.log.count("the pool nightly-a is left: it ends after its last user") == 2
    assert (
        ran.log.count(
            "the pool nightly-a stays warm for 120 s after its last user; `skyward stop nightly-a` ends it at once; the machines cost 36.0000 USD per hour"
        )
        == 2
    )


def test_the_teardown_ends_the_pool_after_a_task_has_failed(airflow: Airflow) -> None:
    """The function fails, the task behind it does not run, the teardown does. The run has failed, and nothing lives."""
    ran = airflow.run(
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
        POOLS_HEAD,
    )
    assert ran.state == "failed"
    assert "LookupError: it fails" in ran.log
    assert ("behind", -1, "return_value") not in ran.xcoms
    (pool,) = pools_of(airflow, "fails")
    assert (len(pool["resources"]), pool["left"], bool(pool["ended_at"])) == (1, [], True)
    assert ran.result("release")["pools"] == {pool["pool_id"]: pool["total_cost_usd"]}


LIVE = """
import time
from airflow_provider_skyward.durable_attempt import DurableAttempt

class TaskInstance:
    dag_id, run_id, map_index, try_number, max_tries = "live", "r", -1, 1, 0
    def __init__(self, task_id): self.task_id = task_id
    def xcom_push(self, key, value): ...

class Store(dict):
    set = dict.__setitem__

def nap():
    time.sleep(0.5)

def compared(attempt):
    # a last report of seconds may come between two looks: then they are repeated
    for _ in range(100):
        live = attempt.progress.metrics()["cost_usd"]
        attempt._pool.note_cost()
        ledger = sum(sky.cost_of(attempt._work).values())
        if attempt.progress.metrics()["cost_usd"] == live:
            return [live, ledger]

close, leave, answer = sky.PoolUse.close, DurableAttempt._leave, {}

def look_and_close(use):
    answer["use"] = compared(operator._attempt)
    return close(use)

def look_and_leave(attempt, **how):
    answer["detached"] = compared(attempt)
    return leave(attempt, **how)

sky.PoolUse.close, DurableAttempt._leave = look_and_close, look_and_leave
try:
    for durable in (False, True):
        operator = SkywardOperator(task_id=f"t{durable}", python_callable=nap, provider=LOCAL, name="live", keep_warm=60, durable=durable)
        operator.execute({"ti": TaskInstance(operator.task_id), "task_state_store": Store()})
finally:
    sky.PoolUse.close, DurableAttempt._leave = close, leave
    sky.release("live")
"""


def test_the_live_cost_of_a_task_on_a_shared_pool_is_that_of_the_ledger(airflow: Airflow) -> None:
    """At the same moment, to the micro-dollar, and while the pool has cost more than the task: of a use, which knows its
    seconds itself, and of a detached call.
    """
    answer = airflow.evaluate(LIVE, POOLS_HEAD)
    for live, ledger in answer.values():
        assert micro(live) == micro(ledger)
        assert 5_000 <= micro(live) < 20_000, (
            "half a second at 36 USD per hour is 5,000 micro-dollars; opening takes longer"
        )
    assert answer.keys() == {"use", "detached"}


SAMPLED = """
from airflow_provider_skyward.durable_attempt import DurableAttempt

class TaskInstance:
    dag_id, run_id, task_id, map_index, try_number, max_tries = "sampled", "r", "t", -1, 1, 1
    def xcom_push(self, key, value):
        self.pushed = {**getattr(self, "pushed", {}), key: value}

class Store(dict):
    set = dict.__setitem__

results = DurableAttempt._results

def results_and_a_sample(attempt, calls):
    attempt._inbox.put(sky.Metrics("i-0", 0, cpu_percent=50.0, memory_percent=25.0, memory_used_mb=1.0, memory_total_mb=4.0))
    found = results(attempt, calls)
    attempt._drain()
    return found

DurableAttempt._results = results_and_a_sample
try:
    operator = SkywardOperator(task_id="t", python_callable=abs, op_args=[-3], provider=LOCAL, durable=True)
    instance = TaskInstance()
    operator.execute({"ti": instance, "task_state_store": Store()})
finally:
    DurableAttempt._results = results
answer = instance.pushed["skyward_cost"]["utilisation"]
"""


def test_the_utilisation_of_a_durable_task_has_the_samples_of_the_time_of_its_calls(airflow: Airflow) -> None:
    """A pool says nothing of detached calls itself."""
    answer = airflow.evaluate(SAMPLED, POOLS_HEAD)
    assert answer["cpu_percent_max"] >= 50.0


TAMPERED = """
from airflow.sdk.exceptions import AirflowFailException

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
    except AirflowFailException as error:  # another try would meet the same
        return type(error.__cause__).__name__, str(error)

foreign = sky.ComputePool.from_spec(
    sky.PoolSpec.of(provider=LOCAL, display="quiet"), work=sky.Work(system="airflow", workflow="other", run="r"))
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


def test_an_altered_xcom_is_refused_and_a_pool_that_is_gone_is_rented_anew(airflow: Airflow) -> None:
    """A user who edits the XCom of the setup sends no function to another pool, and keeps no machine from its end."""
    answer = airflow.evaluate(TAMPERED, POOLS_HEAD)
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


def test_a_setup_that_does_not_succeed_leaves_no_pool(airflow: Airflow) -> None:
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
        def fail(attempt): raise OSError("a full disk")
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
    said, broken, poor = airflow.evaluate(code, POOLS_HEAD)
    assert said[0] == "a full disk"
    assert "does not pay for 3600 s of warm time (hold)" in said[1]
    assert (broken, poor) == ([1, 0], [1, 0])


def test_the_group_wires_each_task_between_setup_and_teardown(airflow: Airflow) -> None:
    """Plain, mapped and partial tasks, and one before a task outside."""
    answer = airflow.evaluate(
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
        POOLS_HEAD,
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


# ── tasks that are killed ────────────────────────────────────────────────────────────────────────────────────────────


@pytest.fixture
def workers(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[Workers]:
    found = Workers(tmp_path, request.param)
    yield found
    found.end()


@pytest.mark.parametrize("workers", ["plain"], indirect=True)
@pytest.mark.parametrize("moment", [pytest.param("launching 2 x local", marks=pytest.mark.nightly), "] line 1"])
def test_a_killed_task_ends_its_pool(workers: Workers, moment: str) -> None:
    """SIGTERM to the task's process group while machines start, or the function runs: all nodes are gone."""
    process = workers.start(1)
    read_until(process, moment)
    os.killpg(process.pid, signal.SIGTERM)
    said, _ = process.communicate(timeout=120)
    assert left_by(process.pid) == []
    assert "raised AirflowException: the task was asked to stop" in said
    assert pushed(said)["cost_usd"] > 0 or "launching" in moment
    assert process.returncode == 0


@pytest.mark.parametrize("workers", ["durable"], indirect=True)
def test_the_next_try_adopts_the_call_of_a_killed_worker(workers: Workers) -> None:
    """After SIGKILL the function goes on, and the next try has its result and its later lines."""
    first = workers.start(1)
    before = read_until(first, "[node 0] line 1")
    assert "pushed skyward_cost" in before.partition("launching")[0], before
    os.killpg(first.pid, signal.SIGKILL)
    first.communicate()
    assert workers.state["phase"] == "started"

    after = workers.finish(2)
    assert "adopted the call that try 1 has begun" in after
    assert returned(after) == "1"
    assert "[node 0] the end" in after
    assert workers.runs == ["1"]
    assert workers.state["phase"] == "ended"
    (pool,) = workers.pools()
    assert (pool["pool"], bool(pool["ended_at"])) == (workers.state["pool_id"], True)
    bill = pushed(after)
    assert (bill["is_final"], bill["pools"]) == (True, [pool["pool"]])
    assert micro(bill["cost_usd"]) == micro(bill["all_tries_usd"]) == micro(pool["cost_usd"])
