"""DAGs that run by `dag.test()` in a separate process with its own Airflow home: results, failures, bills, secrets.

What is about arguments, results and exceptions runs on nodes without Airflow (BARE).
"""

import importlib.util
import re
from pathlib import Path

import pytest

if importlib.util.find_spec("airflow") is None:
    pytest.skip("Airflow is not installed", allow_module_level=True)

from tests.integrations import airflow_host
from tests.integrations.airflow_host import Airflow, micro

airflow = pytest.fixture(scope="session")(airflow_host.served)


def test_a_task_runs_on_a_pool_of_its_own_and_reports_its_cost(airflow: Airflow) -> None:
    ran = airflow.run(
        "single",
        """
        OFFSET = 40
        def helper(x):
            return x + OFFSET
        def classic(day, *, run_id, logical_date, params, **context):
            import os
            print("for", day)
            print("to stderr", file=__import__("sys").stderr)
            import logging
            logging.getLogger("mine").info("told by logging")
            return [day, run_id, logical_date.isoformat(), type(logical_date).__module__, params, context["ds"], os.environ["GREETING"]]
        @dag(default_args={"image": BARE}, schedule=None, params={"n": 1})
        def single():
            @task.skyward(provider=LOCAL, nodes=2, display="quiet", retries=0)
            def decorated(x) -> dict:
                from skyward_core import instance_info
                print("on", instance_info().total_nodes, "nodes")
                return {"answer": helper(x), "other": 1}
            decorated(2)
            SkywardOperator(task_id="classic", python_callable=classic, op_args=["{{ ds }}"], nodes="{{ params.n }}", provider=LOCAL, env={"GREETING": "hi"})
        single()
        """,
    )
    assert ran.state == "success"
    assert ran.result("decorated") == {"answer": 42, "other": 1}
    assert ran.xcoms["decorated", -1, "answer"] == 42  # multiple_outputs, inferred from `-> dict`
    day, run_id, logical_date, module, params, ds, greeting = ran.result("classic")
    assert (params, module, greeting) == ({"n": 1}, "datetime", "hi")
    assert day == ds == logical_date[:10]
    assert run_id.startswith("manual__")
    assert re.search(r"\[node \d\] on 2 nodes.*SkywardDecoratedOperator", ran.log)
    assert re.search(rf"\[node 0\] for {day}", ran.log)
    assert re.search(r"\[node 0\] to stderr", ran.log)
    assert re.search(r"\[node 0\] told by logging", ran.log)
    order = r"::group::Provisioning.*launching 2 x local.*node 1: starting the workers.*is ready after.*::endgroup::.*\[node \d\] on 2 nodes.*giving the machines back.*cost: 0\.\d+ USD.*skyward receipt sky-"
    assert re.search(order, ran.log, re.DOTALL)
    bill = ran.bill("decorated")
    assert bill["pool_id"].startswith("sky-")
    assert (bill["nodes"], bill["hourly_rate"], bill["provider"], bill["calls"]) == (2, 72.0, "local", 1)
    assert bill["seconds"] == round(bill["seconds"], 3), "for people to read"
    assert (bill["pool_cost_usd"], bill["of_tries"]) == (bill["cost_usd"], ["1"])
    # begun seconds are paid in full, from the launch on; `seconds` begin with the search for machines
    second = 2 * 36.0 / 3600
    assert second <= bill["cost_usd"] <= second * (bill["seconds"] + 1)
    assert ran.bill("classic")["nodes"] == 1
    idle = r"1 call for 2 nodes: 1 of node 0 \(.+?\), node 1 \(.+?\) has nothing to do, for 36\.0000 USD per hour\. Write nodes=1, broadcast=True"
    assert len(re.findall(idle, ran.log)) == 1, "of the task with two nodes alone"


def test_mapped_tasks_have_a_pool_each_and_map_over_shares_one(airflow: Airflow) -> None:
    ran = airflow.run(
        "mapped",
        """
        from airflow.sdk import Asset
        from skyward_core.distributed.group import decorator
        class Ranks:
            needs_process = False
            @__import__("contextlib").contextmanager
            def running(self, group):
                group.set_environment({"RANKS": str(group.exchange(group.place.rank))})
                yield
        @dag(default_args={"image": BARE}, schedule=None)
        def mapped():
            @task.skyward(provider=LOCAL, nodes=2, broadcast=True, retries=1, outlets=[Asset(name="model")])
            @decorator(Ranks(), 60.0)
            def train(step, outlet_events) -> dict:
                import os
                print("training")
                info = sky.instance_info()
                if info.node == 0:
                    outlet_events["model"].extra["ranks"] = os.environ["RANKS"]
                return {"rank": info.node, "step": step, "ranks": os.environ["RANKS"]}
            train(7)
            @task.skyward(provider=LOCAL)
            def double(x, plus=0):
                return 2 * x + plus
            @task.skyward(provider=LOCAL)
            def total(values):
                return [type(values).__name__, sum(values)]
            @task.skyward(provider=LOCAL, nodes=2, map_over=("x", "y"))
            def add(x, y, z) -> dict:
                return {"sum": x + y + z}
            total(double.partial(plus=1).expand(x=[1, 2]))
            add([1, 2, 3], y=[10, 20, 30], z=100)
            add.override(task_id="nothing")([], [], 100)
            SkywardOperator.partial(task_id="power", python_callable=pow, provider="local").expand(op_args=[[2, 3], [3, 2]])
        mapped()
        """,
    )
    assert ran.state == "success"
    assert [ran.result("double", index) for index in range(2)] == [3, 5]
    assert [ran.bill("double", index)["calls"] for index in range(2)] == [1, 1]
    assert ran.result("total") == ["list", 8]
    assert ran.result("add") == [{"sum": 111}, {"sum": 122}, {"sum": 133}]
    assert (ran.bill("add")["calls"], ran.bill("add")["nodes"]) == (3, 2)
    assert ran.result("nothing") == []
    assert ("nothing", -1, "skyward_cost") not in ran.xcoms
    assert [ran.result("power", index) for index in range(2)] == [8, 9]
    assert ran.result("train") == [{"rank": rank, "step": 7, "ranks": "[0, 1]"} for rank in range(2)]
    assert (ran.bill("train")["calls"], ran.bill("train")["nodes"]) == (2, 2)
    assert re.search(r"\[node 1\] training", ran.log)
    assert "nothing to do" not in ran.log


def test_a_task_that_fails_has_closed_its_pool_and_reports_its_cost(airflow: Airflow) -> None:
    """After a function's exception, a crash, a wrong argument and the task's time limit."""
    ran = airflow.run(
        "failing",
        """
        from airflow.sdk.definitions.retry_policy import ExceptionRetryPolicy, RetryAction, RetryRule

        class Busy(Exception):
            def __init__(self, code, wait):
                super().__init__(f"busy {code}")

        never_again = ExceptionRetryPolicy(rules=[RetryRule(exception=Busy, action=RetryAction.FAIL, reason="it is busy for good")])

        @dag(default_args={"image": BARE}, schedule=None)
        def failing():
            @task.skyward(provider=LOCAL, map_over="x", nodes=2)
            def divide(x):
                return 1 / x
            @task.skyward(provider=LOCAL, nodes=2, broadcast=True)
            def broken():
                if sky.instance_info().node == 1:
                    raise ValueError("node 1 is wrong")
                __import__("time").sleep(600)
            @task.skyward(provider=LOCAL)
            def crash():
                import os
                print("last words", flush=True)
                os._exit(3)
            @task.skyward(provider=LOCAL, execution_timeout=timedelta(seconds=3))
            def sleep():
                import time
                time.sleep(600)
            @task.skyward(provider=LOCAL, map_over="x")
            def count(x): return x
            @task.skyward(provider=LOCAL, retries=1, retry_delay=timedelta(0), retry_policy=never_again)
            def busy():
                raise Busy(503, "for ever")
            divide([1, 0, 2]), broken(), crash(), sleep(), count.override(task_id="not_a_list")(7), busy()
        failing()
        """,
    )
    assert ran.state == "failed"
    for words in (
        "ZeroDivisionError: division by zero",
        "in call 2 of 3 (map_over)",
        "ValueError: node 1 is wrong",
        "in call 2 of 2 (broadcast)",
        "CallCrashed",
        "[node 0] last words",
        "AirflowTaskTimeout",
        "map_over='x' needs a list or tuple in x",
        "it is busy for good",
    ):
        assert words in ran.log
    assert min(ran.bill(name)["cost_usd"] for name in ("divide", "broken", "crash", "sleep", "busy")) > 0
    assert ran.bill("busy")["pools"] == [ran.bill("busy")["pool_id"]]
    assert ("not_a_list", -1, "skyward_cost") not in ran.xcoms  # refused before a pool was opened
    assert not any(key == "return_value" for _, _, key in ran.xcoms)


def test_programs_run_with_their_files_and_their_exit_codes_decide(airflow: Airflow) -> None:
    """A script and commands, on one shared pool. Relative paths begin at the folder of the DAG file."""
    (airflow.dags / "job").mkdir()
    (airflow.dags / "job/word.py").write_text("WORD = 'from the module'\n")
    (airflow.dags / "job/data.txt").write_text("from the file\n")
    (airflow.dags / "job/main.py").write_text(
        "import pathlib, sys, word\nprint(word.WORD, pathlib.Path(__file__).with_name('data.txt').read_text(), sys.argv[1:])\n"
    )
    ran = airflow.run(
        "programs",
        """
        from airflow_provider_skyward.pools import skyward_pool
        from airflow_provider_skyward.programs import SkywardRunOperator
        @dag(schedule=None, default_args={"retries": 0}, params={"code": 7})
        def programs():
            with skyward_pool("g", provider=LOCAL, nodes=2) as pool:
                job = {"skyward_pool": pool}
                SkywardRunOperator(task_id="script", script="job/main.py", args=["--code", "{{ params.code }}"], files=["job/data.txt"], **job)
                SkywardRunOperator(task_id="skipped", command="exit 99", **job)
                SkywardRunOperator(task_id="skipped_too", command=["sh", "-c", "exit {{ params.code }}"], skip_on_exit_code=[7], **job)
                SkywardRunOperator(task_id="failed", command="echo rank $RANK of $WORLD_SIZE; exit 7", broadcast=True, **job)
        programs()
        """,
    )
    assert re.search(r"\[node \d\] from the module from the file", ran.log)
    assert "['--code', '7']" in ran.log
    assert {key[0] for key in ran.xcoms if key[2] == "return_value"} == {"g.create_pool", "g.script", "g.release_pool"}
    assert ran.result("g.script") == 0
    assert (
        "AirflowSkipException: exit 99 has exit code 99, which is in skip_on_exit_code" in ran.log
        or "exit code 99" in ran.log
    )
    assert len(re.findall(r"\[node (\d)\] rank \1 of 2", ran.log)) == 2
    assert "CallCrashed: echo rank $RANK of $WORLD_SIZE; exit 7 has exit code 7" in ran.log


def test_large_results(airflow: Airflow, tmp_path: Path) -> None:
    ran = airflow.run(
        "large",
        f"""
        from airflow_provider_skyward.results import read_result
        @dag(default_args={{"image": BARE, "name": "large", "keep_warm": 600}}, schedule=None, params={{"day": "mon"}})
        def large():
            @task.skyward(provider=LOCAL, retries=3)
            def produce(size): return "x" * size
            @task.skyward(provider=LOCAL, retries=3)
            def code(): return lambda: 1
            produce(2_000_000), code()
            produce.override(task_id="unlimited", max_xcom_bytes=None)(2_000_000)
            produce.override(task_id="kept", do_xcom_push=False)(2_000_000)

            @task.skyward(provider=LOCAL, result_path="{tmp_path}/{{{{ params.day }}}}/")
            def place(size: int) -> dict: return {{"text": b"x" * size, "code": lambda: size}}
            @task
            def read(paths):
                found = [read_result(path) for path in paths]
                return [[len(one["text"]), one["code"]()] for one in found]
            read(place.expand(size=[2_000_000, 3]))
            place.override(task_id="nowhere", result_path="nonsense://bucket")(1)
            end_with_the_pool("large")
        large()
        """,
    )
    assert ran.state == "failed"
    assert re.search(
        r"the result takes 2,000,00\d bytes as XCom, more than 1,000,000 \(max_xcom_bytes\): give result_path= a",
        ran.log,
    )
    assert "the result, a function, is nothing that XCom can store" in ran.log
    assert "result_path='nonsense://bucket' is no place for a result: " in ran.log
    assert len(ran.result("unlimited")) == 2_000_000
    assert ran.result("read") == [[2_000_000, 2_000_000], [3, 3]]
    assert ran.result("place", 0).startswith(f"{tmp_path}/mon/large/manual__")
    assert ran.result("place", 0).endswith("/place/0-1.pickle")
    paid = {"produce", "code", "unlimited", "kept", "place"}
    assert {task for task, _, key in ran.xcoms if key == "skyward_cost"} == paid
    assert {task for task, _, key in ran.xcoms if key == "return_value"} == {"unlimited", "read", "place"}


TIMED_OUT = """
import signal, sys
import structlog
from airflow.sdk.exceptions import AirflowTaskTimeout
from airflow.sdk.execution_time.timeout import timeout
from airflow_provider_skyward.task_log import TaskLog
from tests.integrations.airflow_host import AlarmAt

answer = []
for name in ("info", "warning", "exception", "log"):
    logger = structlog.wrap_logger(structlog.PrintLogger(AlarmAt(sys.stdout, "a line")))
    said = []
    try:
        with timeout(60) as limit:
            limit.log, handler = logger, signal.getsignal(signal.SIGALRM)
            getattr(TaskLog(logger), name)(*([20] if name == "log" else []), "%s", "a line")
            said.append("goes on")
    except AirflowTaskTimeout:
        said.append("timed out")
    answer.append([said, signal.getsignal(signal.SIGALRM) == handler])
"""


def test_a_time_limit_waits_for_the_line_that_is_being_written(airflow: Airflow) -> None:
    """Airflow's handler writes a line too: it would wait for ever for a lock that its own thread has."""
    assert airflow.evaluate(TIMED_OUT) == [[["timed out"], True]] * 4


def test_a_task_that_is_tried_again_adds_up_its_cost(airflow: Airflow) -> None:
    """Each try has its own pool."""
    ran = airflow.run(
        "tried",
        """
        @dag(schedule=None)
        def tried():
            @task.skyward(provider=LOCAL, retries=1, retry_delay=timedelta(0))
            def unlucky(x, attempt):
                if x and int(attempt) == 1:
                    raise LookupError("the first try")
                return x
            unlucky.partial(attempt="{{ ti.try_number }}").expand(x=[0, 1])
        tried()
        """,
    )
    assert ran.state == "success"
    once, twice = ran.bill("unlucky", 0), ran.bill("unlucky", 1)
    assert (len(once["pools"]), len(twice["pools"])) == (1, 2)
    assert once["all_tries_usd"] == once["cost_usd"]
    assert twice["all_tries_usd"] > twice["cost_usd"]
    pool = ran.xcoms["unlucky", 1, "skyward_pool"]
    assert pool["pool_id"] == twice["pool_id"]
    assert pool["receipt"] == f"skyward receipt {pool['pool_id']}"
    assert pool["earlier_pools"] == [one for one in twice["pools"] if one != pool["pool_id"]]
    assert micro(pool["earlier_tries_usd"]) == micro(twice["all_tries_usd"]) - micro(twice["cost_usd"])
    work = pool["work"]
    assert (work["system"], work["workflow"], work["task"], work["task_run"], work["attempt"]) == (
        "airflow",
        "tried",
        "unlucky",
        "1",
        "2",
    )
    assert re.search(r"skyward receipt sky-\w+` shows.*launching", ran.log, re.DOTALL)


def test_a_task_without_money_fails_without_another_try(airflow: Airflow) -> None:
    """If the first minute costs more than allowed, the task is refused."""
    ran = airflow.run(
        "poor",
        """
        @dag(schedule=None)
        def poor():
            @task.skyward(provider=LOCAL, max_cost=0.0001, retries=3)
            def dear(): return 1
            dear()
        poor()
        """,
    )
    assert ran.state == "failed"
    assert re.search(r"AirflowFailException: .*not tried again. Allow more \(max_cost, budget\)", ran.log)
    assert "BudgetExceeded" in ran.log
    assert "launching" not in ran.log


def test_work_is_not_repeated_if_airflow_would_refuse_its_result(airflow: Airflow, tmp_path: Path) -> None:
    """Airflow itself refuses them after `execute`, and tries the task again: the work would be done and paid for twice.
    A lazy result of the function's own cannot leave the node.
    """
    ran = airflow.run(
        "refused",
        f"""
        @dag(schedule=None, default_args={{"provider": LOCAL, "name": "refused", "keep_warm": 600, "retries": 2, "retry_delay": timedelta(0)}})
        def refused():
            def ran(name):
                import time
                open(f"{tmp_path}/{{name}}-{{time.monotonic_ns()}}", "w").close()
            @task.skyward
            def numbers():
                ran("numbers")
                return [0.5, {{"loss": float("nan")}}]
            @task.skyward
            def keys() -> dict:
                ran("keys")
                return {{"a": 1, 2: "b"}}
            @task.skyward(multiple_outputs=True)
            def outputs():
                ran("outputs")
                return [1]
            @task.skyward
            def mapped():
                ran("mapped")
                return 3
            @task.skyward
            def lock():
                import threading
                ran("lock")
                return {{"the": threading.Lock()}}
            @task
            def use(item): pass
            numbers(), keys(), outputs(), lock()
            use.expand(item=mapped())
            end_with_the_pool("refused")
        refused()
        """,
    )
    assert ran.state == "failed"
    assert sorted(path.name.partition("-")[0] for path in tmp_path.iterdir()) == [
        "keys",
        "lock",
        "mapped",
        "numbers",
        "outputs",
    ]
    for why in (
        r"result\[1\]\['loss'\]=nan is no number in JSON: return None in its place",
        r"the result has the key 2, a int, and each key of multiple_outputs is the name of an XCom, a string",
        r"the result is a list, and multiple_outputs wants a dictionary",
        r"the result is a int, and a task downstream is mapped over it: return a list or a dictionary",
        r"result\['the'\] cannot travel: it is a _thread.lock",
    ):
        assert re.search(f"AirflowFailException: .*{why}.*not tried again", ran.log), why
    assert {task for task, _, key in ran.xcoms if key == "return_value"} == set()
    assert {task for task, _, key in ran.xcoms if key == "skyward_cost"} == {
        "numbers",
        "keys",
        "outputs",
        "mapped",
        "lock",
    }


def test_secrets_come_from_connections_and_variables_when_the_task_runs(airflow: Airflow) -> None:
    """Parsing reads none of them. The call has them, the log masks them, and they are nowhere in Airflow's home."""
    code = """
        import os
        os.environ["AIRFLOW_CONN_HF"] = '{"conn_type": "generic", "login": "me", "password": "pw-0123456789", "extra": {"token": "extra-0123456789"}}'
        os.environ["AIRFLOW_VAR_HF"] = "var-0123456789"
        os.environ["OF_THE_WORKER"] = "env-0123456789"
        answer = None
    """
    airflow.evaluate(code)  # not in the DAG file, because Airflow stores its source
    ran = airflow.run(
        "secrets",
        """
        @dag(schedule=None)
        def secrets():
            @task.skyward(
                provider=LOCAL,
                secrets={
                    "A": sky.Secret.from_store("hf"), "B": sky.Secret.from_store("hf", "login"), "C": sky.Secret.from_store("hf", "token"),
                    "D": sky.Secret.from_store("variable/hf"), "E": sky.Secret.from_env("OF_THE_WORKER"),
                },
            )
            def reads():
                import os
                print("all:", *(os.environ[name] for name in "ACDE"))
                return ["".join(reversed(os.environ[name])) for name in "ABCDE"]

            @task.skyward(provider=LOCAL, secrets={"A": sky.Secret.from_store("nope")})
            def fails(): ...

            reads()
            fails()

        secrets()
        """,
    )
    values = ["pw-0123456789", "me", "extra-0123456789", "var-0123456789", "env-0123456789"]
    assert ran.result("reads") == [value[::-1] for value in values]
    assert "all: *** *** *** ***" in ran.log
    assert "the secret A is to be the password of Airflow's connection 'nope'" in ran.log
    files = [path.read_bytes().decode(errors="replace") for path in airflow.home.rglob("*") if path.is_file()]
    assert [text[:100] for text in [ran.log, *files] for value in values if len(value) > 2 and value in text] == []


def test_a_deferred_task_has_its_result_its_log_and_its_bill(airflow: Airflow) -> None:
    """A trigger follows the call. Result, exception, lines and bill are those of a task that is not deferred."""
    ran = airflow.run(
        "deferred",
        """
        @dag(schedule=None)
        def deferred():
            @task.skyward(provider=LOCAL, deferrable=True, map_over="x")
            def square(x):
                import logging, time
                print("squaring", x, flush=True)
                logging.getLogger("mine").warning("told of %d", x)
                time.sleep(2)
                print("squared", x, flush=True)
                if x == 3:
                    raise LookupError("it fails")
                return x * x
            square.override(task_id="all")([2, 4]), square.override(task_id="fails")([2, 3])
        deferred()
        """,
    )
    assert ran.result("all") == [4, 16]
    assert [len(re.findall(rf"squared {x}\b", ran.log)) for x in (2, 3, 4)] == [2, 1, 1]
    assert all(re.search(rf"warning[^\n]*\[node 0\] told of {x}\b", ran.log) for x in (2, 3, 4)), ran.log
    assert "LookupError: it fails" in ran.log
    for name in ("all", "fails"):
        bill = ran.bill(name)
        assert bill["is_final"]
        assert bill["all_tries_usd"] == bill["cost_usd"] > 0


def test_the_example_trains_while_it_is_deferred(airflow: Airflow, tmp_path: Path) -> None:
    """dags/deferrable_training.py, without the loss of its process (that is in tests/nightly)."""
    ran = airflow.run_example("deferrable_training", folder=str(tmp_path / "checkpoints"), lost_at=None)
    assert ran.state == "success", ran.log
    assert ran.result("train") == {"begun_at": 0, "slope": pytest.approx(3.0, abs=0.01)}
    assert "deferrable_training: {" in ran.log


def test_the_nightly_sweep_lists_and_ends_nothing_in_a_dry_run(airflow: Airflow) -> None:
    """dags/sweep.py; what it ends is tested in `test_sweeps.py`."""
    ran = airflow.run_example("sweep", dry_run=True)
    assert ran.state == "success", ran.log
    assert ran.result("end_what_is_left_running") == []


def test_a_trigger_leaves_the_pool_unless_the_user_ends_the_task(airflow: Airflow) -> None:
    """Two triggerers may follow one call. `cleanup` ends neither call nor pool; `on_kill` ends both."""
    code = """
        import asyncio
        from airflow_provider_skyward.triggers import SkywardTrigger
        def work():
            import time
            print("working", flush=True)
            time.sleep(600)
        pool = sky.ComputePool(provider=LOCAL, display="quiet").open()
        call = pool.start_detached(sky.compute(work)(), call_id="a/1/0")
        pool.detach(600)
        def alive():
            return len(sky.Local().instances(pool.id))
        async def follow():
            triggers = [SkywardTrigger(pool.id, ["a/1/0"], [0]) for _ in range(2)]
            async def first(trigger):
                return [event async for event in trigger.run()]
            tasks = [asyncio.create_task(first(trigger)) for trigger in triggers]
            while not all(trigger.cursors[0] for trigger in triggers):
                await asyncio.sleep(0.1)
            found = []
            for trigger, task, ends in zip(triggers, tasks, (False, True)):
                task.cancel()
                await asyncio.gather(task, return_exceptions=True)
                if ends:  # Airflow's order after an action of the user
                    await trigger.on_kill()
                await trigger.cleanup()
                found.append(alive())
            return found
        answer = asyncio.run(follow())
    """
    assert airflow.evaluate(code) == [1, 0]


def test_a_trigger_waits_until_the_scheduler_has_taken_up_the_end_of_the_worker(airflow: Airflow) -> None:
    """Else Airflow 3.3 fails the task when the scheduler is busy, and tries it again."""
    code = """
        import asyncio
        from airflow_provider_skyward import triggers
        with sky.ComputePool(provider=LOCAL, display="quiet") as pool:
            pool.start_detached(sky.compute(int)(), call_id="a/1/0").result()
            pauses, sleep = [], asyncio.sleep
            async def at_once(seconds):
                pauses.append(seconds)
                await sleep(0)
            async def events():
                return [event async for event in triggers.SkywardTrigger(pool.id, ["a/1/0"], [0]).run()]
            least, triggers.LEAST_SECONDS = triggers.LEAST_SECONDS, 1000.0
            asyncio.sleep = at_once
            try:
                found = asyncio.run(events())
            finally:
                asyncio.sleep, triggers.LEAST_SECONDS = sleep, least
        answer = [len(found), 900 < pauses[-1] <= 1000]
    """
    assert airflow.evaluate(code) == [1, True]
