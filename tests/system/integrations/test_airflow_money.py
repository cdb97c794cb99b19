"""What Airflow shows of money: links, live metrics, gauges, spans, asset events, warnings, tabs, quotes."""

import importlib.util
import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

if importlib.util.find_spec("airflow") is None:
    pytest.skip("Airflow is not installed", allow_module_level=True)

from airflow_provider_skyward.quotes import planned_tasks
from tests.integrations import airflow_host
from tests.integrations.airflow_host import Airflow, environ_of, micro

airflow = pytest.fixture(scope="session")(airflow_host.served)


def answer_of(home: Path, code: str, *arguments: str, code_of_exit: int = 0, **environ: str) -> Any:
    """Run a program that prints JSON as its last line; return that."""
    ran = subprocess.run(
        [sys.executable, "-c", code, *arguments],
        env=environ_of(home) | environ,
        cwd=home,
        capture_output=True,
        text=True,
        timeout=200,
        check=False,
    )
    assert ran.returncode == code_of_exit, ran.stdout + ran.stderr
    return json.loads(ran.stdout[ran.stdout.index("\nANSWER ") + 8 :] if "\nANSWER " in ran.stdout else ran.stdout)


# ── a running pool; the task instance only keeps what it is given ────────────────────────────────────────────────────


PROGRAM = """
import json, logging, os
from types import SimpleNamespace
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
    sky.report(loss=0.5, rate=float("nan"))
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
print("\\nANSWER", json.dumps(answer))
"""


@pytest.fixture(scope="module")
def answer(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    home = tmp_path_factory.mktemp("airflow")
    url = {
        "AIRFLOW__API__BASE_URL": "https://airflow.example/team",
        "SKYWARD_LEDGER": f"sqlite:///{home}/ledger.sqlite",
    }
    return answer_of(home, PROGRAM, **url)


def test_the_links_are_there_from_renting_on(answer: dict[str, Any]) -> None:
    """The tab and the bill have their links before a machine is known, the cloud's page when it is."""
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


def test_log_groups_gauges_and_spans_show_the_phases(answer: dict[str, Any]) -> None:
    """Provisioning, bootstrap and release are folded in the log; what the function prints is not."""
    marks = [line for line in answer["lines"] if line.startswith("::")]
    assert marks == [
        part for title in ("Provisioning", "Bootstrap", "Release") for part in (f"::group::{title}", "::endgroup::")
    ]
    tags = {"dag_id": "nightly dag", "task_id": "train", "provider": "local"}
    ours = [one for one in answer["gauges"] if one[2] == tags]
    assert {name for name, _, _ in ours} == {"skyward.cost_usd", "skyward.usd_per_hour", "skyward.nodes"}
    assert [value for name, value, _ in ours if name == "skyward.nodes"][-1] == 0
    spans = answer["spans"][:4]
    assert [name for name, _, _ in spans] == [
        f"skyward.{phase}" for phase in ("provision", "bootstrap", "call", "release")
    ]
    assert all(is_below for _, is_below, _ in spans)
    assert spans[2][2]["skyward.pool_id"] == answer["train"]["pushed"]["skyward_pool"]["pool_id"]


def test_the_state_store_has_live_metrics(answer: dict[str, Any]) -> None:
    """They are written while the call runs, and at the end with the bill and without nodes."""
    during, last = answer["metrics"][:-1], answer["metrics"][-1]
    assert any(one["nodes"] == 1 and one["usd_per_hour"] == 36.0 for one in during)
    assert last["reported"] == {"loss": 0.5, "rate": "NaN"}, "JSON data: the api-server refuses the number"
    bill = answer["train"]["pushed"]["skyward_cost"]
    assert (last["cost_usd"], last["pool_id"], last["nodes"]) == (bill["cost_usd"], bill["pool_id"], 0)
    assert answer["train"]["store"]["skyward_metrics"] == last
    assert [point[3] for point in last["course"]] == [one["cost_usd"] for one in answer["metrics"]]
    attempts, warnings = answer["away"]
    assert attempts == [15.0, 75.0, 90.0]
    assert warnings == ["the live metrics could not be stored; the next try is in a minute: the api-server is away"]


def test_asset_events_have_the_cost_and_what_the_function_has_written(answer: dict[str, Any]) -> None:
    """`outlet_events` is recorded on the node, and written by the worker. The result is the function's own. Each asset
    has an equal part of the bill, to the micro-dollar.
    """
    train, bill = answer["train"], answer["train"]["pushed"]["skyward_cost"]
    whole, same = round(bill["cost_usd"] * 1_000_000), {name: bill[name] for name in ("pool_id", "seconds")}
    assert (train["result"], train["error"]) == (22, None)
    assert train["extra"] == {**same, "cost_usd": whole // 2 / 1_000_000, "rows": 40}
    second = {**same, "cost_usd": (whole - whole // 2) / 1_000_000, "part": 1}
    assert train["added"] == [{"uri": "s3://bucket/table", "extra": second}]
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


# ── the tabs: their routes, who may read them, and the bills from the ledger ─────────────────────────────────────────


TABS = """
import json
from airflow.api_fastapi.app import init_auth_manager
from airflow.api_fastapi.auth.managers.simple.user import SimpleAuthManagerUser
from fastapi.testclient import TestClient
from airflow_provider_skyward.plugin import SkywardPlugin

def nothing():
    return 1

def rent(limits, **work):
    pool = sky.ComputePool.from_spec(
        sky.PoolSpec.of(provider=sky.Local(price_per_hour=36.0), display="quiet", **limits),
        work=sky.Work(system="airflow", **work))
    with pool:
        sky.compute(nothing)() >> pool
    return pool.id

pools = {
    "try 1": rent(dict(max_cost=2.5), workflow="tabs", run="run 1/a", task="train", attempt="1"),
    "try 2": rent(dict(max_lifetime=1800), workflow="tabs", run="run 1/a", task="train", attempt="2"),
    "other dag": rent({}, workflow="secret", run="run 1/a", task="train", attempt="1"),
}
manager = init_auth_manager()
client = TestClient(SkywardPlugin.fastapi_apps[0]["app"])
roles = {"viewer": "VIEWER", "no rights": None}
logins = {"nobody": {}, "bad token": {"Authorization": "Bearer wrong"}} | {
    name: {"Authorization": "Bearer " + manager.generate_jwt(SimpleAuthManagerUser(username=name, role=role))}
    for name, role in roles.items()}
run, task = {"run_id": "run 1/a"}, {"run_id": "run 1/a", "task_id": "train"}
routes = {"/tabs.js": {}, "/dags/tabs/run": run, "/dags/tabs/task": task}
answer = json.loads(json.dumps({
    "pools": pools,
    "paths": sorted(route.path for route in client.app.routes),
    "tabs": SkywardPlugin.react_apps,
    "status": {login: {path: client.get(path, params=params, headers=headers).status_code
        for path, params in routes.items()} for login, headers in logins.items()},
    "run": client.get("/dags/tabs/run", params=run, headers=logins["viewer"]).json(),
    "task": client.get("/dags/tabs/task", params=task, headers=logins["viewer"]).json(),
    "no run": client.get("/dags/tabs/run", params={"run_id": ""}, headers=logins["viewer"]).status_code,
    "unknown": client.get("/dags/tabs/run", params={"run_id": "none"}, headers=logins["viewer"]).json(),
    "bundle": client.get("/tabs.js", headers=logins["viewer"]).text,
    "cost": sky.cost_of(sky.Work(workflow="tabs")),
}))
"""


def test_the_tabs_have_the_bills_of_the_ledger_for_who_may_read_them(airflow: Airflow) -> None:
    """Without a login each route answers 401, with an invalid one 403; so do the bills to a user without rights."""
    answer = airflow.evaluate(TABS)
    bills = ["/dags/tabs/run", "/dags/tabs/task"]
    assert answer["paths"] == ["/dags/{dag_id}/run", "/dags/{dag_id}/task", "/tabs.js"]
    assert set(answer["status"]["nobody"].values()) == {401}
    assert set(answer["status"]["bad token"].values()) == {403}
    assert [answer["status"]["no rights"][path] for path in bills] == [403, 403]
    assert set(answer["status"]["viewer"].values()) == {200}
    assert answer["task"] == answer["run"] | {"used": []}
    pools = [(pool["pool_id"], pool["max_cost_usd"], pool["ceiling_usd"]) for pool in answer["run"]["pools"]]
    assert pools == [(answer["pools"]["try 1"], 2.5, 2.5), (answer["pools"]["try 2"], None, 18.0)]
    assert micro(answer["run"]["cost_usd"]) == sum(map(micro, answer["cost"].values())) > 0
    assert answer["no run"] == 422
    assert (answer["unknown"]["cost_usd"], answer["unknown"]["pools"]) == (0, [])
    assert {tab["name"] for tab in answer["tabs"]} == {"Skyward", "Cost"}
    assert all(f"globalThis.{tab['name']} = " in answer["bundle"] for tab in answer["tabs"])


# ── `skyward quote dags/`: what the tasks of DAGs would rent, from their files alone ─────────────────────────────────


DAGS = """
from datetime import timedelta
from airflow.sdk import dag, task, task_group
import skyward_core as sky
from airflow_provider_skyward.operators import SkywardOperator
from airflow_provider_skyward.pools import skyward_pool
from neighbour import LOCAL

print("this file prints")

@task
def pick(): return [1, 2]

@dag(schedule=None, default_args={"retries": 1})
def nightly():
    @task.skyward(provider=LOCAL, nodes=2, max_cost=3.0)
    def train(x=1): return x
    train()
    train.override(task_id="slow", retries=0, execution_timeout=timedelta(minutes=30), max_cost=None)()
    train.override(task_id="deferred", deferrable=True, execution_timeout=timedelta(minutes=30), max_cost=None)()
    train.override(task_id="templated", nodes="{{ params.nodes }}", cpu=pick())()
    train.override(task_id="tagged", env={"DAY": "{{ ds }}"}, budget="{{ params.team }}")()
    with skyward_pool("gpu", provider=LOCAL, max_cost=3.0) as pool:
        task.skyward(skyward_pool=pool)(lambda x: x).override(task_id="mapped").expand(x=[1, 2])
    train.override(task_id="three").expand(x=[1, 2, 3])
    train.override(task_id="many").expand(x=pick())
    SkywardOperator.partial(task_id="sizes", python_callable=len, op_args=["ab"], spec=sky.PoolSpec.of(provider=LOCAL)
        ).expand(nodes=[1, 2])
    SkywardOperator.partial(task_id="dicts", python_callable=len, op_args=["ab"], provider=LOCAL
        ).expand_kwargs([{"nodes": 2, "op_args": ["a"]}, {"nodes": 2, "op_args": ["b"]}, {"nodes": 1}])
    SkywardOperator.partial(task_id="later", python_callable=len, op_args=["ab"], provider=LOCAL).expand_kwargs(pick())
    @task_group
    def group(x):
        SkywardOperator(task_id="inner", python_callable=len, op_args=["ab"], provider=LOCAL)
    group.expand(x=[1, 2])
nightly()
"""

QUOTE = """
import sys
from skyward_core import cli
sys.addaudithook(lambda event, args: sys.exit(f"{event} {args}") if event == "socket.connect" else None)
sys.exit(cli.main(sys.argv[1:]))
"""


@pytest.fixture(scope="module")
def found(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    """Quote a folder of DAGs, without a database and without a network."""
    home = tmp_path_factory.mktemp("airflow")
    dags = home / "dags"
    dags.mkdir()
    (dags / "nightly.py").write_text(DAGS)
    (dags / "neighbour.py").write_text("import skyward_core as sky\nLOCAL = sky.Local(price_per_hour=2.0)\n")
    (dags / "bad.py").write_text("from airflow.sdk import dag\nraise LookupError('no such table')\n")
    away = f"sqlite:///{home}/no/such/folder"
    databases = {"AIRFLOW__DATABASE__SQL_ALCHEMY_CONN": f"{away}/airflow.db", "SKYWARD_LEDGER": f"{away}/ledger.db"}
    return answer_of(home, QUOTE, "quote", str(dags), "--json", code_of_exit=1, **databases)


def rows(found: dict[str, Any], name: str) -> list[dict[str, Any]]:
    return [one for one in found["tasks"] if one["task"] == name]


def test_each_task_of_the_dags_is_quoted(found: dict[str, Any]) -> None:
    """Price, tries and ceiling: of `max_cost` for both tries, or of `execution_timeout`."""
    (train,), (slow,), (deferred,) = (rows(found, name) for name in ("train", "slow", "deferred"))
    assert (train["workflow"], train["price_per_hour"], train["tries"]) == ("nightly", 4.0, 2)
    assert (train["ceiling_usd"], train["run_ceiling_usd"]) == (3.0, 6.0)
    assert (slow["timeout_seconds"], slow["tries"], slow["run_ceiling_usd"]) == (1800, 1, 2.0)
    assert (deferred["timeout_seconds"], deferred["ceiling_usd"]) == (3600, 4.0)


def test_a_shared_pool_is_quoted_once_in_its_setup(found: dict[str, Any]) -> None:
    """Its tasks rent nothing. A file with a fault does not hide the others."""
    (setup,) = rows(found, "gpu.create_pool")
    assert (setup["price_per_hour"], setup["timeout_seconds"], setup["ceiling_usd"]) == (2.0, None, 3.0)
    assert rows(found, "gpu.mapped") == []
    (warning,) = found["warnings"]
    assert "bad.py: LookupError: no such table" in warning


def test_what_only_a_run_knows_is_named(found: dict[str, Any]) -> None:
    (templated,), (tagged,), (later,) = (rows(found, name) for name in ("templated", "tagged", "later"))
    assert (templated["asks_for"], templated["price_per_hour"]) == (None, None)
    assert "nodes, cpu are known only in a run" in templated["reason"]
    assert tagged["price_per_hour"] == 4.0
    assert later["instances"] is None
    assert later["reason"]


def test_mapped_tasks_are_counted(found: dict[str, Any]) -> None:
    """Lists in the file are counted, and keywords of the pool among them are rows of their own."""
    (three,), (many,), (inner,) = (rows(found, name) for name in ("three", "many", "group.inner"))
    assert (three["instances"], three["run_ceiling_usd"]) == (3, 18.0)
    assert (many["instances"], many["run_ceiling_usd"], inner["instances"]) == (None, None, None)
    assert [(one["instances"], one["price_per_hour"]) for one in rows(found, "sizes")] == [(1, 2.0), (1, 4.0)]
    assert [(one["instances"], one["price_per_hour"]) for one in rows(found, "dicts")] == [(2, 4.0), (1, 2.0)]


@pytest.mark.parametrize("target", ["project.definitions:defs", "jobs.crontab", "no/such/folder"])
def test_another_target_is_left_to_other_orchestrators(target: str, tmp_path: Path) -> None:
    (tmp_path / "jobs.crontab").touch()
    assert planned_tasks(str(tmp_path / target)) is None


@pytest.mark.nightly
def test_the_bill_of_a_task_that_could_not_write_it_is_made_final_once_its_pool_has_ended(airflow: Airflow) -> None:
    """As the sweep DAG does it for a task that was killed in its last try: its XCom is that of the renting."""
    ran = airflow.run(
        "settled",
        """
        from airflow_provider_skyward.airflow_compat import xcom_class
        from airflow_provider_skyward.bills import settle_bills
        @dag(schedule=None)
        def settled():
            @task.skyward(provider=LOCAL)
            def killed(): return 1
            @task
            def sweep(bill, ti):
                unknown = {"cost_usd": 0.0, "all_tries_usd": 0.0, "is_final": False}
                xcom_class().set("skyward_cost", bill | unknown, dag_id=ti.dag_id, task_id="killed", run_id=ti.run_id)
                at_once = timedelta(0)
                return [bill, [settle_bills(), settle_bills(newest=at_once), settle_bills(newest=at_once)]]
            sweep(killed()["skyward_cost"])
        settled()
        """,
    )
    bill, found = ran.result("sweep")
    assert [any(":settled/" in one and one.endswith("/killed") for one in some) for some in found] == [
        False,
        True,
        False,
    ]
    assert bill["is_final"]
    assert ran.bill("killed") == bill
