"""Airflow's tasks that outlive their workers: adoption after a kill, generations, warm retries.

This file is also the program of a worker: `python test_airflow_durable.py FOLDER TRY` runs one try of a task, with the
state store as a file.
"""

import importlib.util
import json
import os
import random
import re
import signal
import subprocess
import time

import pytest

from tests.system.integrations.test_airflow_durable import (  # noqa: F401 - fixtures
    Task,
    _work,
    job,
    read_until,
)

if importlib.util.find_spec("airflow") is None:
    pytest.skip("Airflow is not installed", allow_module_level=True)


# How many kills at random moments: `KILLS=200 make long` is the whole trial, of half an hour.
KILLS = int(os.environ.get("KILLS", "6"))


def test_a_call_goes_on_while_the_api_server_is_away(job: Task) -> None:
    """The state cannot be stored for a moment. The task neither fails nor ends its call, and stores it later."""
    first = job.start(1, AWAY="1")
    read_until(first, "api-server is away; the call goes on: API_SERVER_ERROR")
    (job.folder / "go").touch()
    after, _ = first.communicate(timeout=60)
    assert "returned 42" in after
    assert job.runs == ["1"]
    assert job.state["phase"] == "ended"


def test_the_next_try_adopts_each_call_of_a_mapped_function(job: Task) -> None:
    """With `map_over` each item is a call of the generation. After SIGKILL the next try has all results, in order."""
    first = job.start(1, MAP="1")
    read_until(first, "[node 0] line 1")
    os.killpg(first.pid, signal.SIGKILL)
    first.communicate()
    after = job.finish(2, MAP="1")
    assert "adopted the call that try 1 has begun" in after
    assert "returned ['a', 'b', 'c']" in after
    assert sorted(job.runs) == ["a", "b", "c"]
    assert [bool(pool["ended_at"]) for pool in job.pools()] == [True]


def test_the_next_try_adopts_the_call_of_a_deferrable_task_that_was_killed_before_its_deferral(job: Task) -> None:
    """The worker has begun the call, and is killed before Airflow knows of the deferral. The next try goes on with the
    call, and so do the trigger and the worker that comes back: the function has run once, in one pool.
    """
    first = job.start(1, DEFERRED="1", HOLD_AT="started")
    read_until(first, "holding at started")
    os.killpg(first.pid, signal.SIGKILL)
    first.communicate()
    after = job.finish(2, DEFERRED="1")
    assert "adopted the call that try 1 has begun" in after
    assert "the trigger has seen the end" in after
    assert "returned 42" in after
    assert job.runs == ["1"]
    (pool,) = job.pools()
    assert pool["ended_at"]
    bill = json.loads(re.findall(r"pushed skyward_cost (.*)", after)[-1])
    assert (bill["is_final"], bill["pools"]) == (True, [pool["pool"]])


def test_a_retry_finds_the_machines_warm_and_the_last_failure_releases_them(job: Task) -> None:
    """With `keep_warm` each try of a failing function uses one pool; after the last try it has ended."""
    outputs = [job.finish(number, FAIL="1", KEEP_WARM="120", MAX_TRIES="2") for number in (1, 2, 3)]
    assert ["launching" in output for output in outputs] == [True, False, False]
    assert all("raised LookupError" in output for output in outputs)
    assert len(job.runs) == 3
    (pool,) = job.pools()
    assert pool["ended_at"]
    bill = json.loads(re.findall(r"pushed skyward_cost (.*)", outputs[-1])[-1])
    assert sorted(bill["tries"]) == ["1", "2", "3"]
    assert sum(bill["tries"].values()) == pytest.approx(bill["all_tries_usd"])


def go_on_after_kill(job: Task, process: subprocess.Popen[str], number: int, signal_number: int) -> None:
    """Kill a try, with SIGKILL five seconds after SIGTERM, as Airflow does. The next try has the result, no generation
    has run twice, and no pool is left.
    """
    os.killpg(process.pid, signal_number)
    try:
        process.communicate(timeout=5)
    except subprocess.TimeoutExpired:
        os.killpg(process.pid, signal.SIGKILL)
        process.communicate()
    assert "returned 42" in (said := job.finish(number + 1)), said
    (job.folder / "go").unlink()
    assert len(job.runs) == len(set(job.runs)), job.runs
    assert [pool for pool in job.pools() if not pool["ended_at"]] == []


@pytest.mark.timeout(240)
def test_no_generation_runs_twice_after_kills_at_each_phase(job: Task) -> None:
    """Kills before and after machines are rented, and right before the call begins."""
    moments = [("Provisioning", signal.SIGKILL), ("launching", signal.SIGTERM), ("the pool is ready", signal.SIGKILL)]
    for index, (moment, number) in enumerate(moments):
        process = job.start(2 * index + 1)
        read_until(process, moment)
        go_on_after_kill(job, process, 2 * index + 1, number)
    assert len(job.runs) >= len(moments)


@pytest.mark.timeout(60 + 30 * KILLS)
def test_no_generation_runs_twice_after_kills_at_random_moments(job: Task) -> None:
    """As above, at random moments of the whole execution. Sleeps: the moment of the kill is what is tested."""
    chance = random.Random(16)
    for number in range(1, 2 * KILLS, 2):
        process = job.start(number)
        time.sleep(chance.uniform(0.0, 12.0))
        go_on_after_kill(job, process, number, chance.choice([signal.SIGKILL, signal.SIGTERM]))
    assert len(job.runs) >= KILLS
