"""What Airflow shows of a running pool: links, live metrics, gauges, spans, folded phases, asset events, warnings.

Two tasks run in one separate process, on real local pools, with a task instance that only keeps what it is given.
"""

import importlib.util
import json
import os
import subprocess
import sys
from typing import Any

import pytest

if importlib.util.find_spec("airflow") is None:
    pytest.skip("Airflow is not installed", allow_module_level=True)

pytestmark = [pytest.mark.timeout(400)]

PROGRAM = """
import json, logging, os, sys
from types import SimpleNamespace
from airflow.providers.standard.operators.python import PythonOperator
from airflow.sdk import Asset, AssetAlias, dag
from airflow.sdk.execution_time.context import OutletEventAccessors
from opentelemetry import trace
from opentelemetry.sdk.trace import TracerProvider
from opentelemetry.sdk.trace.export import SimpleSpanProcessor
from opentelemetry.sdk.trace.export.in_memory_span_exporter import InMemorySpanExporter
import skyward_core as sky
from airflow_provider_skyward import airflow_compat, links, progress
from airflow_provider_skyward.notifications import BudgetNotifier
from airflow_provider_skyward.operators import SkywardOperator

os.environ["AIRFLOW__TRACES__OTEL_ON"] = "True"  # only now, else Airflow sends spans elsewhere
spans = InMemorySpanExporter()
provider = TracerProvider()
provider.add_span_processor(SimpleSpanProcessor(spans))
trace.set_tracer_provider(provider)
gauges, told, lines = [], [], []
progress.gauge = lambda name, value, tags: gauges.append([name, value, tags])
progress.SECONDS_BETWEEN_WRITES = 0.0

sky.Local.console_url = lambda provider, instance: "https://console.example/" + instance.id

def see_and_warn(self, event, see=progress.Progress.see):
    see(self, event)
    if isinstance(event, sky.PoolReady):
        see(self, sky.BudgetWarning(0.016, 0.02, None, "most of it is spent"))
progress.Progress.see = see_and_warn

class Kept(logging.Handler):
    def emit(self, record):
        lines.append(record.getMessage())

logger = logging.Logger("task", logging.INFO)
logger.addHandler(Kept())
SkywardOperator.log = logger

class TaskInstance:
    dag_id, run_id, map_index, try_number, max_tries = "nightly dag", "manual__2026-11-22T01:00:00+00:00", 3, 1, 0
    def __init__(self, task_id):
        self.task_id, self.pushed, self.order = task_id, {}, []
    def xcom_push(self, key, value):
        self.pushed[key] = value
        self.order.append(key)

class Store(dict):
    def set(self, key, value):
        history.append(json.loads(json.dumps(value)))
        self[key] = value

history = []
model, alias = Asset(name="model", uri="s3://bucket/model"), AssetAlias("tables")

def train(x, outlet_events, y=2):
    sky.report(loss=0.5)
    outlet_events["model"].extra["rows"] = x * y
    outlet_events["tables"].add("s3://bucket/table", {"part": 1})
    return x + y

def other_outlet(*, outlet_events):
    outlet_events["nonesuch"].extra["a"] = 1

def ran(name, fn, args, **keywords):
    operator = SkywardOperator(task_id=name, python_callable=fn, op_args=args, provider=sky.Local(price_per_hour=36.0), **keywords)
    instance, events, store = TaskInstance(name), OutletEventAccessors(), Store()
    context = {"ti": instance, "outlet_events": events, "task_state_store": store}
    error = result = None
    with trace.get_tracer("test").start_as_current_span("worker." + name):
        try:
            result = operator.execute(context)
        except Exception as caught:
            error = f"{type(caught).__name__}: {caught}"
    shown = {link.name: link.get_link(operator, ti_key=instance) for link in operator.operator_extra_links}
    return {
        "result": result, "error": error, "pushed": instance.pushed, "order": instance.order, "links": shown,
        "store": store, "extra": events[model].extra,
        "added": [{"uri": one.dest_asset_key.uri, "extra": one.extra} for one in events[alias].asset_alias_events],
    }

def warn(context):
    told.append(context["skyward_warning"] | {"ti": context["ti"].task_id})

answer = {"train": ran("train", train, [20], outlets=[model, alias], on_budget_warning=BudgetNotifier(warn))}
answer |= {"lines": list(lines), "metrics": [one for one in history if "cost_usd" in one], "gauges": gauges, "told": list(told)}
answer["spans"] = [[one.name, one.parent and one.parent.span_id == root.context.span_id, dict(one.attributes)]
    for root in spans.get_finished_spans() if root.name == "worker.train" for one in spans.get_finished_spans() if one is not root]
answer["wrong"] = ran("wrong", other_outlet, [], outlets=[model])

notified = []
failed = BudgetNotifier(lambda context: notified.append(context["skyward_warning"]["reason"]))
money = RuntimeError("not tried again")
money.__cause__ = sky.BudgetExceeded("max_cost is used up")
for error in (money, LookupError("another reason"), None):
    failed({"exception": error})
answer["notified"] = notified

class AwayStore(Store):
    def set(self, key, value):
        attempts.append(clock[0])
        if clock[0] < 20:
            raise ConnectionError("the api-server is away")

attempts, clock, warnings = [], [0.0], []
progress.time = SimpleNamespace(monotonic=lambda: clock[0])
log = SimpleNamespace(warning=lambda text, error: warnings.append(text % error))
away = progress.Progress(log, {"task_state_store": AwayStore()}, sky.Work(workflow="d", task="t"))
away.see(sky.InfraCreating("pool"))
for clock[0] in (15.0, 30.0, 45.0, 60.0, 75.0, 90.0):
    away.tick()
answer["away"] = [attempts, warnings]

def refusal(version):
    try:
        airflow_compat.refuse_older(version)
    except ImportError as error:
        return str(error)
answer["refusals"] = [refusal(version) for version in ("1.2.4", "1.3.0", "1.3.2", "1.10.0", "2.0")]

@dag(schedule=None)
def d():
    SkywardOperator(task_id="t", python_callable=len, op_args=["ab"], provider="local")
from airflow.serialization.serialized_objects import DagSerialization
answer["serialized"] = DagSerialization.to_dict(d())["dag"]["tasks"][0]["__var"]["_operator_extra_links"]

def size_of(make):
    @dag(schedule=None)
    def sized():
        for number in range(50):
            make(f"t{number}")
    return len(json.dumps(DagSerialization.to_dict(sized())))

answer["sizes"] = [
    size_of(lambda name: PythonOperator(task_id=name, python_callable=len, op_args=["ab"])),
    size_of(lambda name: SkywardOperator(task_id=name, python_callable=len, op_args=["ab"], provider="local")),
]
print("ANSWER", json.dumps(answer))
"""


@pytest.fixture(scope="module")
def answer(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    home = tmp_path_factory.mktemp("airflow")
    environ = {
        **os.environ,
        "AIRFLOW_HOME": str(home),
        "AIRFLOW__API__BASE_URL": "https://airflow.example/team",
        "SKYWARD_LEDGER": f"sqlite:///{home}/ledger.sqlite",
    }
    program = home / "program.py"
    program.write_text(PROGRAM)
    ran = subprocess.run([sys.executable, program], env=environ, capture_output=True, text=True, timeout=300)
    lines = [line for line in ran.stdout.splitlines() if line.startswith("ANSWER ")]
    assert lines, ran.stdout + ran.stderr
    return json.loads(lines[0].removeprefix("ANSWER "))


def test_the_links_are_there_from_renting_on(answer: dict[str, Any]) -> None:
    """The tab and the bill have their links before a machine is known, the cloud's page when it is. At the end Airflow
    writes the same ones.
    """
    pushed, order = answer["train"]["pushed"], answer["train"]["order"]
    page = "https://airflow.example/team/dags/nightly%20dag/runs/manual__2026-11-22T01:00:00+00:00/tasks/train/mapped/3"
    assert pushed["skyward_page"] == f"{page}/plugin/skyward"
    assert pushed["skyward_receipt"].startswith("https://airflow.example/team/skyward/dags/nightly%20dag/task?run_id=")
    assert pushed["skyward_receipt"].endswith("&task_id=train&map_index=3")
    assert pushed["skyward_console"].startswith("https://console.example/")
    assert order.index("skyward_page") < order.index("skyward_console") < len(order) - 1
    assert answer["train"]["links"] == {
        "Skyward": pushed["skyward_page"],
        "Receipt": pushed["skyward_receipt"],
        "Cloud console": pushed["skyward_console"],
    }
    assert answer["serialized"] == {
        "Skyward": "skyward_page",
        "Receipt": "skyward_receipt",
        "Cloud console": "skyward_console",
    }


def test_each_phase_is_a_group_of_the_log(answer: dict[str, Any]) -> None:
    """Provisioning, bootstrap and release are folded; what the function prints is not."""
    marks = [line for line in answer["lines"] if line.startswith("::")]
    assert marks == [
        part for title in ("Provisioning", "Bootstrap", "Release") for part in (f"::group::{title}", "::endgroup::")
    ]


def test_the_state_store_has_live_metrics(answer: dict[str, Any]) -> None:
    """They are written while the call runs, and at the end with the bill and without nodes."""
    during, last = answer["metrics"][:-1], answer["metrics"][-1]
    assert any(one["nodes"] == 1 and one["usd_per_hour"] == 36.0 for one in during)
    assert last["reported"] == {"loss": 0.5}
    bill = answer["train"]["pushed"]["skyward_cost"]
    assert (last["cost_usd"], last["pool_id"], last["nodes"]) == (bill["cost_usd"], bill["pool_id"], 0)
    assert answer["train"]["store"]["skyward_metrics"] == last


def test_live_metrics_go_on_after_the_api_server_was_away(answer: dict[str, Any]) -> None:
    """Each failed request takes the main thread some seconds, so that a minute passes before the next one."""
    attempts, warnings = answer["away"]
    assert attempts == [15.0, 75.0, 90.0]
    assert warnings == ["the live metrics could not be stored; the next try is in a minute: the api-server is away"]


def test_gauges_show_cost_rate_and_nodes(answer: dict[str, Any]) -> None:
    tags = {"dag_id": "nightly dag", "task_id": "train", "provider": "local"}
    ours = [one for one in answer["gauges"] if one[2] == tags]
    assert {name for name, _, _ in ours} == {"skyward.cost_usd", "skyward.usd_per_hour", "skyward.nodes"}
    assert [value for name, value, _ in ours if name == "skyward.nodes"][-1] == 0


def test_spans_of_the_phases_are_below_the_tasks_span(answer: dict[str, Any]) -> None:
    train = answer["spans"][:4]
    assert [name for name, _, _ in train] == [
        f"skyward.{phase}" for phase in ("provision", "bootstrap", "call", "release")
    ]
    assert all(is_below for _, is_below, _ in train)
    assert train[2][2]["skyward.pool_id"] == answer["train"]["pushed"]["skyward_pool"]["pool_id"]


def test_asset_events_have_the_cost_and_what_the_function_has_written(answer: dict[str, Any]) -> None:
    """`outlet_events` is recorded on the node, and written by the worker. The result is the function's own."""
    train, bill = answer["train"], answer["train"]["pushed"]["skyward_cost"]
    cost = {name: bill[name] for name in ("cost_usd", "pool_id", "seconds")}
    assert (train["result"], train["error"]) == (22, None)
    assert train["extra"] == {**cost, "rows": 40}
    assert train["added"] == [{"uri": "s3://bucket/table", "extra": {**cost, "part": 1}}]


def test_an_event_of_no_outlet_is_an_error_of_the_function(answer: dict[str, Any]) -> None:
    assert "'nonesuch' is no outlet of this task; they are model, s3://bucket/model" in answer["wrong"]["error"]


def test_a_budget_warning_is_passed_on_while_the_task_runs(answer: dict[str, Any]) -> None:
    """So is a failure for lack of money, and no other one."""
    (warning,) = answer["told"]
    assert (warning["reason"], warning["limit_usd"]) == ("most of it is spent", 0.02)
    assert (warning["ti"], warning["pool_id"]) == ("train", answer["train"]["pushed"]["skyward_pool"]["pool_id"])
    assert answer["notified"] == ["max_cost is used up"]


def test_an_older_airflow_is_refused_with_the_version_that_is_needed(answer: dict[str, Any]) -> None:
    older, *others = answer["refusals"]
    assert "needs Airflow 3.3 or later" in older
    assert others == [None] * 4


def test_a_task_takes_little_more_of_airflows_database_than_a_plain_one(answer: dict[str, Any]) -> None:
    """Links and renderers are in the serialized form of each task."""
    plain, ours = answer["sizes"]
    assert ours <= 1.3 * plain
