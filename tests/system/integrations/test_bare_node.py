"""Arguments, results and exceptions of each integration on a node that has none of the orchestrators."""

import importlib.util
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import pytest

import skyward_core as sky
from tests.integrations import airflow_host, prefect_server
from tests.integrations.airflow_host import HEAD, Airflow
from tests.integrations.bare_node import BARE, importable

if any(importlib.util.find_spec(name) is None for name in ("airflow", "dagster", "prefect")):
    pytest.skip("Airflow, Dagster or Prefect is not installed", allow_module_level=True)

import dagster as dg
from prefect import task
from prefect.cache_policies import NO_CACHE
from prefect.states import Completed

from dagster_skyward import SkywardResource
from prefect_skyward import SkywardTaskRunner, on_skyward

airflow = pytest.fixture(scope="session")(airflow_host.served)
api = pytest.fixture(scope="module")(prefect_server.served)
pytestmark = pytest.mark.filterwarnings("default")  # Prefect's own warnings are not our faults


@dataclass
class Point:
    """A class of the user's file: it travels with the call."""

    x: int
    y: int = 2


class TooFar(Exception):
    """An exception of the user's file, with a value."""

    def __init__(self, point: Point) -> None:
        super().__init__(f"{point} is too far")
        self.point = point


class OfDagster(dg.Failure):
    """An exception of the user's file that a node without Dagster cannot load."""


class Part(dg.Config):
    name: str = "part"


class Options(dg.Config):
    """A configuration of Dagster's, which a node without Dagster gets as an object of plain values."""

    rate: float = 0.5
    parts: list[Part] = [Part()]


def moved(point: Point, by: int) -> Point:
    return Point(point.x + by, point.y)


def too_far(point: Point) -> None:
    raise TooFar(point)


def fails_as_dagster() -> None:
    raise OfDagster("on purpose")


def rate(options: Any) -> Any:
    return options.rate, options.parts[0].name


def dumped(options: Any) -> Any:
    return options.model_dump()


def skips() -> None:
    raise sky.Skip("no new rows")


@dataclass
class Locked:
    """An object of the user that cannot travel."""

    lock: Any


def shown(value: Any) -> str:
    return repr(value)


def failure_of(call: Callable[[], Any]) -> tuple[str, str]:
    """Call the function, which must fail. Return the name of the exception's class, and its text with its notes."""
    with pytest.raises(Exception) as caught:
        call()
    notes: list[str] = getattr(caught.value, "__notes__", [])
    return type(caught.value).__name__, "\n".join([str(caught.value), *notes])


def assert_names(failure: tuple[str, str], module: str, kind: str = "ModuleNotFoundError") -> None:
    """The failure names the module that the node lacks, and what to do."""
    name, text = failure
    assert name == kind, text
    assert f"No module named '{module}'" in text
    assert f'list it in Image(pip=[...]), as "{module}"' in text


# ── Dagster ──────────────────────────────────────────────────────────────────────────────────────────────────────────


def test_dagster() -> None:
    found: dict[str, Any] = {}

    @dg.asset
    def on_a_bare_node(context: dg.AssetExecutionContext, compute: SkywardResource) -> None:
        found["modules"] = compute.run(context, importable).value
        found["moved"] = compute.run(context, moved, Point(1), by=3).value
        found["map"] = compute.map(context, lambda n: Point(n), range(2))
        with pytest.raises(TooFar) as caught:
            compute.run(context, too_far, Point(7))
        found["point"] = caught.value.point
        found["config"] = compute.run(context, rate, Options()).value
        found["nested"] = compute.run(context, lambda these: these["a"][0].rate, {"a": [Options(rate=2.0)]}).value
        found["methods"] = failure_of(lambda: compute.run(context, dumped, Options()))
        found["skips"] = failure_of(lambda: compute.run(context, skips))
        found["exception"] = failure_of(lambda: compute.run(context, fails_as_dagster))
        found["result"] = failure_of(lambda: compute.run(context, lambda: dg.Output(1)))

    with dg.DagsterInstance.ephemeral() as instance:
        compute = SkywardResource(provider=sky.Local(), image=BARE, display="quiet")
        assert dg.materialize([on_a_bare_node], resources={"compute": compute}, instance=instance).success
    assert found["modules"] == ["six"]
    assert found["moved"] == Point(4)
    assert found["map"] == [Point(0), Point(1)]
    assert found["point"] == Point(7)
    assert found["config"] == (0.5, "part")
    assert found["nested"] == 2.0
    assert found["methods"][0] == "AttributeError"
    assert "'model_dump' is no value of this object" in found["methods"][1]
    assert found["skips"][0] == "Skip"
    assert found["skips"][1].startswith("no new rows. Dagster skips what is downstream of an output that was not made")
    for kind in ("exception", "result"):
        assert_names(found[kind], "dagster")


# ── Prefect ──────────────────────────────────────────────────────────────────────────────────────────────────────────


@task(cache_policy=NO_CACHE)
def state_of_prefect() -> Any:
    return Completed(data=1)


@on_skyward(provider=sky.Local(), image=BARE)
def shown_at_once(value: Any) -> str:
    return repr(value)


def test_prefect(api: str) -> None:
    fns: list[Callable[..., Any]] = [importable, moved, too_far, shown]
    run, move, fail, show = [task(cache_policy=NO_CACHE)(fn) for fn in fns]
    with prefect_server.flow_body(SkywardTaskRunner(provider=sky.Local(), image=BARE, idle_timeout=None)) as in_flow:
        assert in_flow(lambda: run.submit().result()) == ["six"]
        assert in_flow(lambda: move.submit(move.submit(Point(1), by=3), by=1).result()) == Point(5)
        assert in_flow(lambda: move.map([Point(0), Point(1)], by=1).result()) == [Point(1), Point(2)]
        with pytest.raises(TooFar) as caught:
            in_flow(lambda: fail.submit(Point(7)).result())
        assert caught.value.point == Point(7)
        deep = in_flow(
            lambda: deque([move.submit(Point(2), by=1), [Completed(data=Point(9))]])
        )  # Prefect looks into no deque
        assert in_flow(lambda: show.submit(deep).result()) == f"deque([{Point(3)!r}, [{Point(9)!r}]])"
        assert in_flow(lambda: shown_at_once(deep)) == f"deque([{Point(3)!r}, [{Point(9)!r}]])"
        argument = failure_of(lambda: in_flow(lambda: show.submit(NO_CACHE).result()))
        result = failure_of(lambda: in_flow(lambda: state_of_prefect.submit().result()))
    for failure in (argument, result):
        assert_names(failure, "prefect", "BadRequest")
        assert "prefect_context=True" in failure[1]


# ── Airflow ──────────────────────────────────────────────────────────────────────────────────────────────────────────

DAG = """
from dataclasses import dataclass
import airflow.exceptions
from tests.integrations.bare_node import importable
@dataclass
class Point:
    x: int
class OfAirflow(airflow.exceptions.AirflowFailException):
    pass
class TooFar(Exception):
    pass
def point(x): return Point(x)
def classic(day, *, run_id, logical_date, data_interval_start, params, **context):
    return [day, type(logical_date).__module__, type(data_interval_start).__module__, params, sorted(context)]
@dag(schedule=None, params={"n": 1, "deep": {"list": [1, 2]}})
def bare():
    here = {"provider": LOCAL, "image": BARE, "retries": 0, "name": "bare", "keep_warm": 600}
    @task.skyward(**here)
    def works(extra) -> dict:
        return {"modules": importable(), "x": point(extra["x"]).x, "kind": type(extra).__name__}
    @task.skyward(**here)
    def own():
        raise TooFar("too far")
    @task.skyward(**here)
    def airflows():
        raise OfAirflow("on purpose")
    @task.skyward(**here)
    def imports():
        from airflow.exceptions import AirflowSkipException
    @task
    def before():
        return {"x": 41}
    works(before()), own(), airflows(), imports()
    import pendulum
    SkywardOperator(task_id="pendulums", python_callable=point, op_args=[pendulum.WeekDay.MONDAY], **here)
    @task
    def when():
        return {"at": [pendulum.datetime(2026, 3, 1, 12, tz="Europe/Paris")], "day": pendulum.date(2026, 3, 1)}
    @task.skyward(**here)
    def kinds(**values):
        def kind(value):
            if isinstance(value, (list, tuple)): return [kind(item) for item in value]
            if isinstance(value, dict): return {key: kind(item) for key, item in value.items()}
            return f"{type(value).__module__}.{type(value).__name__} {value}"
        return {name: kind(values[name]) for name in ("when", "deep", "rows", "mapped", "zipped", "joined", "zone")}
    @task
    def row(n):
        return n
    rows = row.expand(n=[1, 2])
    kinds(
        when=when(), deep={"list": [rows, {"when": when()}]}, rows=rows, mapped=rows.map(lambda n: n * 10),
        zipped=rows.zip(rows), joined=rows.concat(rows), zone=pendulum.timezone("UTC"),
    )
    @task.skyward(**here)
    def skipped():
        raise sky.Skip("no new rows")
    @task.skyward(**here | {"retries": 3})
    def given_up():
        raise sky.GiveUp("no such column")
    skipped(), given_up()
    class Locked:
        def __init__(self):
            import threading
            self.lock = threading.Lock()
    @task.skyward(**here)
    def locked(data):
        return data
    locked.override(task_id="locked")(data=[1, 2, 3, Locked()])
    SkywardOperator(task_id="classic", python_callable=classic, op_args=["{{ ds }}"], **here)
    end_with_the_pool("bare")
bare()
"""


def test_airflow(airflow: Airflow) -> None:
    ran = airflow.run("bare", DAG, HEAD)
    assert ran.state == "failed"
    assert ran.xcoms["works", -1, "return_value"] == {"modules": ["six"], "x": 41, "kind": "dict"}
    day, of_date, of_interval, params, others = ran.xcoms["classic", -1, "return_value"]
    assert (of_date, of_interval) == ("datetime", "datetime")
    assert (len(day), params) == (10, {"n": 1, "deep": {"list": [1, 2]}})
    assert {"dag_run", "ds", "ts"} - set(others) == {"dag_run"}  # plain values only
    assert "TooFar: too far" in ran.log
    assert ran.log.count("the module 'airflow' is not installed on the node: list it in Image(pip=[...])") == 2
    assert ran.log.count("the module 'pendulum' is not installed on the node: list it in Image(pip=[...])") == 1
    kinds = ran.result("kinds")
    at, day = ["datetime.datetime 2026-03-01 12:00:00+01:00"], "datetime.date 2026-03-01"
    one, two = "builtins.int 1", "builtins.int 2"
    assert kinds["when"] == {"at": at, "day": day}
    assert kinds["deep"] == {"list": [[one, two], {"when": kinds["when"]}]}
    assert kinds["rows"] == [one, two]
    assert kinds["mapped"] == ["builtins.int 10", "builtins.int 20"]
    assert kinds["zipped"] == [[one, one], [two, two]]
    assert kinds["joined"] == [one, two, one, two]
    assert kinds["zone"] == "datetime.timezone UTC"
    assert "AirflowSkipException: no new rows" in ran.log or "Skipping task." in ran.log
    assert ran.log.count("AirflowFailException: no such column: not tried again") == 1
    assert "AirflowFailException: op_kwargs['data'][3].lock cannot travel: it is a _thread.lock" in ran.log
    returned = {task for task, _, key in ran.xcoms if key == "return_value"}
    assert returned == {"before", "works", "classic", "when", "when__1", "row", "kinds"}
    assert "locked" not in {task for task, _, key in ran.xcoms if key == "skyward_cost"}  # nothing was rented
