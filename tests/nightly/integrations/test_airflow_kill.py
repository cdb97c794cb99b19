"""Airflow's tasks that are killed, below a supervisor that is a test: phases, random moments, shared pools, triggers."""

import importlib.util
import json
import os
import random
import signal
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

if importlib.util.find_spec("airflow") is None:
    pytest.skip("Airflow is not installed", allow_module_level=True)

import skyward_core as sky
from tests.conftest import slowness
from tests.integrations import airflow_host
from tests.integrations.airflow_host import ROOT, Airflow, Workers, left_by, micro, pushed, read_until, returned
from tests.waiting import wait_until

airflow = pytest.fixture(scope="module")(airflow_host.served)
pytestmark = pytest.mark.timeout(400)
KILL_SECONDS = 5.0  # Airflow's supervisor waits this long between SIGTERM and SIGKILL
KILLS = int(os.environ.get("KILLS", "6"))
"""How many kills at random moments: `KILLS=200 make long` is the whole trial, of half an hour."""


@pytest.fixture
def workers(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[Workers]:
    """Of the role that the test names; "durable" by default."""
    found = Workers(tmp_path, getattr(request, "param", "durable"))
    yield found
    found.end()


def in_role(role: str) -> pytest.MarkDecorator:
    return pytest.mark.parametrize("workers", [role], indirect=True)


@in_role("hang")
def test_a_killed_task_leaves_its_machines_to_the_reaper_if_the_provider_does_not_answer(workers: Workers) -> None:
    """Before Airflow sends SIGKILL. If the task hangs while it terminates its machines, the reaper ends them."""
    process = workers.start(1)
    read_until(process, "] line 1")
    os.killpg(process.pid, signal.SIGTERM)
    killed = time.monotonic()
    read_until(process, "handed over")
    assert time.monotonic() - killed < KILL_SECONDS * slowness()
    read_until(process, "the provider does not answer")
    wait_until(lambda: left_by(process.pid) == [], "the end of the machines")
    assert process.poll() is None, "the task should still hang"


@in_role("plain")
def test_a_try_killed_with_sigkill_is_in_the_bill_of_the_next(workers: Workers) -> None:
    """The pool's id was logged before anything was rented. The reaper ends the machines and the reservation."""
    first = workers.start(1)
    said = read_until(first, "] line 1")
    os.killpg(first.pid, signal.SIGKILL)
    first.communicate()
    pool = pushed(said, "skyward_pool")["pool_id"]
    assert said.index("pushed skyward_pool") < said.index("launching")
    wait_until(lambda: workers.pools()[0]["ended_at"], "the reaper")
    (killed,) = workers.pools()
    assert (killed["pool"], killed["cost_usd"] > 0) == (pool, True)
    second = workers.start(2)
    said = read_until(second, "] line 1")
    assert f"earlier tries of this task have cost {killed['cost_usd']:.6f} USD: {pool}" in said
    os.killpg(second.pid, signal.SIGTERM)
    bill = pushed(second.communicate(timeout=60)[0])
    assert bill["pools"] == sorted({pool, bill["pool_id"]})
    assert micro(bill["all_tries_usd"]) == micro(killed["cost_usd"]) + micro(bill["cost_usd"])


LEFT = """
import time
from skyward_core.provisioning import teardown

class TaskInstance:
    dag_id, run_id, task_id, map_index, try_number = "left", "run", "work", -1, 1
    pushed = {}
    def xcom_push(self, key, value):
        self.pushed[key] = value

terminate, teardown.DEADLINE_SECONDS = sky.Local.terminate, 0.3
sky.Local.terminate = lambda *_: {}
try:
    result = SkywardOperator(task_id="work", python_callable=abs, op_args=[-2], provider="local").execute({"ti": TaskInstance()})
    bill = TaskInstance.pushed["skyward_cost"]
    deadline = time.monotonic() + 60
    while sky.Local().instances(bill["pool_id"]) and time.monotonic() < deadline:
        time.sleep(0.1)
finally:
    sky.Local.terminate, teardown.DEADLINE_SECONDS = terminate, 600.0
answer = [result, len(bill["unconfirmed"])]
"""


def test_unconfirmed_machines_fail_no_task(airflow: Airflow) -> None:
    """The work is done: the task succeeds, its bill in XCom names the machine, and the pool's reaper ends it."""
    assert airflow.evaluate(LEFT) == [2, 1]


@pytest.mark.parametrize(
    ("environ", "moment", "result"),
    [({"MAP": "1"}, "[node 0] line 1", ["a", "b", "c"]), ({"DEFERRED": "1"}, "holding at started", "1")],
    ids=["mapped", "before its deferral"],
)
def test_the_next_try_adopts_each_call(environ: dict[str, str], moment: str, result: Any, workers: Workers) -> None:
    """Each item of a mapped function, and the call of a worker that dies before Airflow knows of its deferral."""
    first = workers.start(1, **environ | ({"HOLD_AT": "started"} if "holding" in moment else {}))
    read_until(first, moment)
    os.killpg(first.pid, signal.SIGKILL)
    first.communicate()
    after = workers.finish(2, **environ)
    assert "adopted the call that try 1 has begun" in after
    assert (returned(after), sorted(workers.runs)) == (result, list(result))
    (pool,) = workers.pools()
    assert pool["ended_at"]
    assert (pushed(after)["is_final"], pushed(after)["pools"]) == (True, [pool["pool"]])


def test_a_retry_finds_the_machines_warm_and_the_last_failure_releases_them(workers: Workers) -> None:
    """With `keep_warm` each try of a failing function uses one pool; after the last try it has ended."""
    outputs = [workers.finish(number, FAIL="1", KEEP_WARM="120", MAX_TRIES="2") for number in (1, 2, 3)]
    assert ["launching" in output for output in outputs] == [True, False, False]
    assert all("raised LookupError" in output for output in outputs)
    (pool,) = workers.pools()
    assert pool["ended_at"]
    bill = pushed(outputs[-1])
    assert sorted(bill["tries"]) == ["1", "2", "3"]
    assert sum(map(micro, bill["tries"].values())) == micro(bill["all_tries_usd"]) == micro(pool["cost_usd"])


@pytest.mark.parametrize("pool", ["", "cell"], ids=["its own pool", "a pool with a name"])
def test_a_durable_task_whose_time_is_over_while_it_writes_a_line_ends_its_call(pool: str, workers: Workers) -> None:
    """Airflow's handler writes into the log too. The call ends with the task, also where the pool goes on."""
    named = {"POOL": pool} if pool else {}
    said = workers.start(1, ALARM_AT="] line 1", **named).communicate(timeout=120)[0]
    assert "Process timed out" in said
    assert "raised RuntimeError: the task has timed out" in said
    (its,) = workers.pools()
    assert bool(its["ended_at"]) == (not pool)
    if pool:
        assert json.loads(workers.cli("calls", pool, "--json"))["calls"] == []
        workers.cli("stop", pool)
        users = json.loads(workers.cli("users", "--json", its["pool"]))["users"]
        (user,) = [user for user in users if user["is_detached"]]
        assert micro(user["cost_usd"]) == micro(pushed(said)["cost_usd"]) > 0
    else:
        assert micro(its["cost_usd"]) == micro(pushed(said)["cost_usd"]) > 0
        assert pushed(said)["is_final"]


@pytest.mark.timeout(300 + 30 * KILLS)
def test_no_generation_runs_twice_after_kills(workers: Workers) -> None:
    chance = random.Random(16)
    moments = [("Provisioning", signal.SIGKILL), ("launching", signal.SIGTERM), ("the pool is ready", signal.SIGKILL)]
    moments += [("", chance.choice([signal.SIGKILL, signal.SIGTERM])) for _ in range(KILLS)]
    for index, (moment, number) in enumerate(moments):
        process = workers.start(2 * index + 1)
        if moment:
            read_until(process, moment)
        else:
            time.sleep(chance.uniform(0.0, 12.0))
        os.killpg(process.pid, number)
        wait_until(lambda process=process: process.poll() is not None or number == signal.SIGTERM, "the kill")
        time.sleep(KILL_SECONDS if number == signal.SIGTERM and process.poll() is None else 0)
        if process.poll() is None:
            os.killpg(process.pid, signal.SIGKILL)
        process.communicate()
        returned(workers.finish(2 * index + 2))
        (workers.folder / "go").unlink()
        assert len(workers.runs) == len(set(workers.runs)), workers.runs
        assert [pool for pool in workers.pools() if not pool["ended_at"]] == []
    assert len(workers.runs) >= len(moments)


def test_the_example_shares_its_machines(airflow: Airflow) -> None:
    """dags/shared_pool.py: mapped tasks and one behind them, on one pool of two machines."""
    ran = airflow.run("example", (ROOT / "dags" / "shared_pool.py").read_text(), head="")
    assert ran.state == "success", ran.log
    assert ran.result("machines.fit_best")["score"] > 0.9
    (pool,) = airflow.evaluate("answer = sky.receipts_of(sky.Work(system='airflow', workflow='shared_pool'))")
    assert (len(pool["resources"]), pool["left"]) == (2, [])
    shares = ran.result("machines.release_pool")["shares"]
    assert sum(map(micro, shares.values())) == micro(pool["total_cost_usd"])


@in_role("shared")
def test_a_killed_task_leaves_the_pool_to_the_others(workers: Workers) -> None:
    """One task is killed, one is told to end, and a third goes on; a later one finds the same machines."""
    handle = returned(workers.finish("create"))
    killed, asked, going_on = (workers.start(task) for task in ("killed", "asked", "going_on"))
    for process in (killed, asked, going_on):
        read_until(process, "[node 0] line 1")
    os.killpg(killed.pid, signal.SIGKILL)
    os.killpg(asked.pid, signal.SIGTERM)
    assert "raised AirflowException: the task was asked to stop" in asked.communicate(timeout=60)[0]
    assert not workers.pools()[0]["ended_at"]
    work = sky.Work(system="airflow", workflow="killed", run="run", task="going_on")
    url = workers.environ["SKYWARD_LEDGER"]
    wait_until(lambda: sum(sky.cost_of(work, ledger_url=url).values()), "the task's part in the ledger", 120)
    (workers.folder / "go-going_on").touch()
    assert returned(going_on.communicate(timeout=120)[0]) == "going_on"
    assert "launching" not in workers.finish("later")
    bill = returned(workers.finish("release"))
    (pool,) = workers.pools()
    assert (pool["pool"], bool(pool["ended_at"])) == (handle["pool_id"], True)
    assert micro(bill["cost_usd"]) == micro(pool["cost_usd"]) == sum(map(micro, bill["shares"].values()))
    assert 0 < bill["shares"]["going_on"] < bill["cost_usd"]
    assert bill["shares"]["create"] > 0


@in_role("shared")
def test_a_setup_that_is_asked_to_end_ends_its_pool(workers: Workers) -> None:
    """Airflow runs no teardown after it."""
    setup = workers.start("create")
    read_until(setup, "launching")
    os.killpg(setup.pid, signal.SIGTERM)
    assert "raised AirflowException: the task was asked to stop" in setup.communicate(timeout=60)[0]
    wait_until(lambda: all(pool["ended_at"] for pool in workers.pools()), "the end of the pool", 120)
