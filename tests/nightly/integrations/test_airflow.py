"""Airflow, for real: DAGs run by `dag.test()` on SQLite in a separate process, with its own logging and settings.

This file is also that process's program: `python test_airflow.py host` runs DAGs and expressions that the tests send
it, `... kill` is a task to be killed.
"""

import ast
import importlib.util
import json
import os
import re
import signal
import time
from copy import copy
from pathlib import Path
from typing import Any

import pytest

from tests.system.integrations.test_airflow import (  # noqa: F401 - fixtures
    KILL_SECONDS,
    Airflow,
    _hang,
    _host,
    _kill,
    airflow,
    left_by,
    skyward,
    slowness,
)

if importlib.util.find_spec("airflow") is None:
    pytest.skip("Airflow is not installed", allow_module_level=True)


def test_a_late_reply_is_not_taken_for_that_of_the_next_request(airflow: Airflow) -> None:
    """A test that fails by its time limit reads no reply to its request."""
    airflow.send({"code": "answer = 'late'", "log": os.devnull})
    assert airflow.evaluate("answer = 'own'") == "own"


LEFT = """
import time
from airflow_provider_skyward.operators import SkywardOperator
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


def test_unconfirmed_machines_fail_no_task(airflow: "Airflow") -> None:
    """The work is done: the task succeeds, its bill in XCom names the machine, and the pool's reaper ends it."""
    assert airflow.evaluate(LEFT) == [2, 1]


def test_a_killed_task_leaves_its_machines_to_the_reaper_if_the_provider_does_not_answer(airflow: Airflow) -> None:
    """If the killed task hangs while it terminates its machines, the reaper ends them.

    SIGKILL to the task's process group does not change that.
    """
    process = airflow.start("hang")
    assert process.stdout is not None
    try:
        assert any("] working" in line for line in process.stdout)
        assert left_by(process.pid) != []
        os.killpg(process.pid, signal.SIGTERM)
        killed = time.monotonic()
        assert any("handed over" in line for line in process.stdout)
        assert time.monotonic() - killed < KILL_SECONDS * slowness()
        assert any("the provider does not answer" in line for line in process.stdout)
        while left_by(process.pid) and time.monotonic() - killed < 60:
            time.sleep(0.05)
        assert left_by(process.pid) == []
        assert process.poll() is None, "the task should still hang"
    finally:
        os.killpg(process.pid, signal.SIGKILL)
        process.communicate()


def test_a_try_killed_with_sigkill_is_in_the_bill_of_the_next(airflow: Airflow, tmp_path: Path) -> None:
    """The pool's id was logged before anything was rented. The reaper ends the machines and the reservation, and the
    next try adds up the costs.
    """
    environ = {**airflow.environ, "SKYWARD_LEDGER": f"sqlite:///{tmp_path}/ledger.db", "RUN": "run-1"}
    airflow = replace_environ(airflow, environ)
    first = airflow.start("kill")
    assert first.stdout is not None
    output: list[str] = []
    try:
        assert any("] working" in line for line in first.stdout if output.append(line) is None)
    finally:
        os.killpg(first.pid, signal.SIGKILL)
        first.communicate()
    text = "".join(output)
    (pool,) = re.findall(r"`skyward receipt (sky-\w+)` shows", text)
    assert text.index("pushed skyward_pool") < text.index("launching")
    # the reaper's work; a limit is the test's own
    while left_by(first.pid) or not [row for row in ps(environ) if row["ended_at"]]:
        time.sleep(0.1)
    ((killed, cost),) = ((row["pool"], row["cost_usd"]) for row in ps(environ))
    assert (killed, cost > 0) == (pool, True)

    airflow = replace_environ(airflow, environ | {"TRY": "2"})
    second = airflow.start("kill")
    assert second.stdout is not None
    assert any("] working" in line for line in second.stdout if output.append(line) is None)
    os.killpg(second.pid, signal.SIGTERM)
    said, _ = second.communicate(timeout=60)
    text = "".join(output)
    assert f"earlier tries of this task have cost {cost:.6f} USD: {pool}" in text
    bill = ast.literal_eval(re.search(r"pushed skyward_cost (.*)", said)[1])
    assert bill["pools"] == sorted({pool, bill["pool_id"]})
    assert bill["all_tries_usd"] == pytest.approx(cost + bill["cost_usd"])
    assert f"cost of all tries: {bill['all_tries_usd']:.6f} USD, for 2 pools" in said
    (row,) = json.loads(skyward(environ, "cost", "--by", "task", "--json"))["rows"]
    assert (row["key"], row["cost_usd"]) == ("airflow:killed/work", pytest.approx(bill["all_tries_usd"], abs=1e-5))


def replace_environ(airflow: Airflow, environ: dict[str, str]) -> Airflow:
    """The same Airflow home, with other variables for processes that start from now on."""
    other = copy(airflow)
    other.environ = environ
    return other


def ps(environ: dict[str, str]) -> list[dict[str, Any]]:
    return json.loads(skyward(environ, "ps", "--all", "--json"))
