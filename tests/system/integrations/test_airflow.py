"""Airflow, for real: DAGs run by `dag.test()` on SQLite in a separate process, with its own logging and settings.

This file is also that process's program: `python test_airflow.py host` runs DAGs and expressions that the tests send
it, `... kill` is a task to be killed.
"""

import importlib.util
import json
import os
import re
import signal
import subprocess
import sys
import textwrap
import time
import traceback
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

from skyward_core.worker.watchdog import tagged_processes

if importlib.util.find_spec("airflow") is None:
    pytest.skip("Airflow is not installed", allow_module_level=True)

ROOT = Path(__file__).parents[3]
KILL_SECONDS = 5.0  # Airflow's supervisor waits this long between SIGTERM and SIGKILL
HEAD = """
from datetime import timedelta
from airflow.sdk import dag, task
import skyward_core as sky
from airflow_provider_skyward.operators import SkywardOperator
LOCAL = sky.Local(price_per_hour=36.0)
"""


# ── the tests' side ──────────────────────────────────────────────────────────────────────────────────────────────────


@dataclass(frozen=True)
class Ran:
    """The results of a DAG run: its state, its XComs by (task, map index, key), and all log records."""

    state: str
    xcoms: dict[tuple[str, int, str], Any]
    log: str

    def bill(self, task_id: str, map_index: int = -1) -> dict[str, Any]:
        return self.xcoms[task_id, map_index, "skyward_cost"]


class Airflow:
    """An Airflow home and a process that uses it."""

    def __init__(self, home: Path) -> None:
        self.home = home
        self.dags = home / "dags"
        self.dags.mkdir(parents=True)
        self.environ = {
            **os.environ,
            "AIRFLOW_HOME": str(home),
            "AIRFLOW__CORE__DAGS_FOLDER": str(self.dags),
            "AIRFLOW__CORE__LOAD_EXAMPLES": "False",
            "AIRFLOW__USAGE_DATA_COLLECTION__ENABLED": "False",
            "PYTHONUNBUFFERED": "1",
        }
        self.cli("db", "migrate")
        self.process = self.start("host")
        self._sent = 0

    def cli(self, *arguments: str) -> str:
        command = [sys.executable, "-m", "airflow", *arguments]
        return subprocess.run(command, env=self.environ, check=True, capture_output=True, text=True, timeout=100).stdout

    def start(self, role: str) -> subprocess.Popen[str]:
        """Start this file as a program, in its own process group, as Airflow's supervisor starts tasks."""
        return subprocess.Popen(
            [sys.executable, __file__, role],
            env=self.environ,
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
            start_new_session=True,
        )

    def evaluate(self, code: str) -> Any:
        """Run code in the Airflow process, after HEAD; return the value of `answer`.

        An exception there is raised here as RuntimeError.
        """
        return self._ask({"code": HEAD + textwrap.dedent(code)})[0]

    def run(self, name: str, source: str, head: str = HEAD, dag_id: str = "") -> Ran:
        """Run the one DAG of a DAG file, or one of several."""
        file = self.dags / f"{name}.py"
        file.write_text(head + textwrap.dedent(source))
        try:
            answer, log = self._ask({"file": str(file), "dag_id": dag_id})
        finally:
            file.unlink()
        return Ran(answer["state"], {(task, index, key): value for task, index, key, value in answer["xcoms"]}, log)

    def close(self) -> None:
        self.process.communicate(timeout=60)

    def send(self, request: dict[str, Any]) -> int:
        """Send a request; return its number, which its reply has."""
        assert self.process.stdin is not None
        self._sent += 1
        self.process.stdin.write(json.dumps(request | {"number": self._sent}) + "\n")
        self.process.stdin.flush()
        return self._sent

    def _ask(self, request: dict[str, Any]) -> tuple[Any, str]:
        log = self.home / "log.txt"
        number = self.send(request | {"log": str(log)})
        assert self.process.stdout is not None
        # a test that has failed by its time limit may have left a reply
        while (reply := json.loads(self.process.stdout.readline()))["number"] != number:
            pass
        assert left_by(self.process.pid) == []
        if "error" in reply:
            raise RuntimeError(reply["error"] + log.read_text())
        return reply["answer"], log.read_text()


@pytest.fixture(scope="session")
def airflow(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Airflow]:
    airflow = Airflow(tmp_path_factory.mktemp("airflow"))
    yield airflow
    airflow.close()


def slowness() -> float:
    from tests import conftest  # unavailable if this file is run as a program

    return conftest.slowness()


def left_by(pid: int) -> list[int]:
    """Processes of the nodes that the process has started."""
    return [
        node for node, environ in tagged_processes() if environ.get("SKYWARD_OWNER", "").partition(":")[0] == str(pid)
    ]


# ── the provider ─────────────────────────────────────────────────────────────────────────────────────────────────────


def test_the_provider_info_satisfies_airflow() -> None:
    """The provider's info satisfies Airflow's schema, names our distribution, and names an existing decorator."""
    import jsonschema

    import airflow_provider_skyward

    home = importlib.util.find_spec("airflow").origin
    schema = json.loads((Path(home).parent / "provider_info.schema.json").read_text())
    info = airflow_provider_skyward.get_provider_info()
    jsonschema.validate(info, schema)
    assert info["package-name"] == re.search(r'^name = "(.+)"', (ROOT / "pyproject.toml").read_text(), re.MULTILINE)[1]
    assert info["task-decorators"] == [
        {"name": "skyward", "class-name": "airflow_provider_skyward.decorators.skyward_task"}
    ]


def test_importing_the_provider_imports_nothing() -> None:
    """Airflow asks every process for the provider's info; that imports neither Airflow's SDK nor our core."""
    code = "import sys, airflow_provider_skyward as p; p.get_provider_info(); print([m for m in ('airflow', 'skyward_core', 'pydantic') if m in sys.modules])"
    assert (
        subprocess.run([sys.executable, "-c", code], check=True, capture_output=True, text=True).stdout.strip() == "[]"
    )


def test_airflow_lists_the_provider(airflow: Airflow) -> None:
    """`airflow providers list` shows the distribution."""
    assert "skyward-core" in [
        provider["package_name"] for provider in json.loads(airflow.cli("providers", "list", "-o", "json"))
    ]


# ── while a DAG is parsed ────────────────────────────────────────────────────────────────────────────────────────────

EVERY_KEYWORD = (
    'provider=LOCAL, image=sky.Image(pip=["torch"], env={"A": "b"}), nodes=(2, 4), machine="m", accelerator=sky.Accelerator.NVIDIA.A100(count=2), cpu=4, '
    'memory="32GB", volume=[sky.S3Volume(mount_path="/data", bucket="my-bucket")], spot=sky.Spot.Percent(0.8), timeout=600, max_lifetime=7200, max_cost=10, budget="team-a", lease_seconds=60, '
    'architecture="x86_64", env={"C": "d"}, secrets={"E": sky.Secret.from_env("F")}, concurrency=2, provision_timeout=300, display="quiet", collect_metrics=False, name="nightly", keep_warm=600, scale_up_after=20, scale_down_after=90'
)
CALL_RETRIES = "call_retries=1"


def test_every_keyword_survives_the_serialization_of_the_dag(airflow: Airflow) -> None:
    """A task's keywords are plain data: they are in the serialized DAG as JSON that makes the same PoolSpec again,
    the same at every parse.
    """
    answer = airflow.evaluate(f"""
        from airflow.serialization.serialized_objects import DagSerialization
        def serialized():
            @dag(schedule=None)
            def d():
                SkywardOperator(task_id="t", python_callable=len, op_args=["ab"], retries=2, execution_timeout=timedelta(hours=1), pool_slots=3,
                                trigger_rule="all_done", {EVERY_KEYWORD}, {CALL_RETRIES})
                task.skyward({EVERY_KEYWORD}, {CALL_RETRIES})(lambda x: x).override(task_id="u")(1)
            return DagSerialization.to_dict(d())
        data = serialized()
        back = DagSerialization.from_dict(data).task_dict
        spec = sky.PoolSpec.of({EVERY_KEYWORD}, retries=1)
        from airflow_provider_skyward.pool_keywords import POOL_FIELDS
        answer = dict(
            fields=sorted(spec.model_fields_set) == sorted(sky.PoolSpec.model_fields),
            same=[sky.PoolSpec.of(**{{field: getattr(back[t], name) for name, field in POOL_FIELDS.items()}}) == spec for t in "tu"],
            base=[back["t"].retries, back["t"].execution_timeout.seconds, back["t"].pool_slots, back["t"].trigger_rule],
            stable=serialized() == data,
        )
    """)
    assert answer == {"fields": True, "same": [True, True], "base": [2, 3600, 3, "all_done"], "stable": True}


def test_no_secret_is_in_the_serialized_dag(airflow: Airflow) -> None:
    """A probable secret in `env` is masked there, and has its value where the task runs; templates stay."""
    code = """
        import json
        from airflow.serialization.serialized_objects import DagSerialization
        options = dict(env={"HF_TOKEN": "hf_plaintext1", "DAY": "{{ ds }}", "API_KEY": "{{ conn.x.password }}"}, image=sky.Image(env={"DB_PASSWORD": "opensesame1"}))
        @dag(schedule=None)
        def d():
            SkywardOperator(task_id="a", python_callable=len, secrets=("A",), **options)
            SkywardOperator(task_id="b", python_callable=len, spec=sky.PoolSpec.of(**options))
            task.skyward(image={"env": {"DB_PASSWORD": "opensesame1"}}, env=options["env"])(lambda: 1).override(task_id="c")()
        made = d()
        tasks = {}
        for op in made.tasks:
            op.render_template_fields({"ds": "today", "conn": {"x": {"password": "of the store"}}})
            tasks[op.task_id] = op.pool_spec.node_environment
        answer = [json.dumps(DagSerialization.to_dict(made)), str([op.env for op in made.tasks]), tasks]
    """
    serialized, shown, environments = airflow.evaluate(code)
    assert "hf_plaintext1" not in serialized + shown
    assert "opensesame1" not in serialized + shown
    expected = {"DB_PASSWORD": "opensesame1", "HF_TOKEN": "hf_plaintext1", "DAY": "today", "API_KEY": "of the store"}
    assert environments == dict.fromkeys("abc", expected)


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
    assert ran.xcoms["reads", -1, "return_value"] == [value[::-1] for value in values]
    assert "all: *** *** *** ***" in ran.log
    assert "the secret A is to be the password of Airflow's connection 'nope'" in ran.log
    files = [path.read_bytes().decode(errors="replace") for path in airflow.home.rglob("*") if path.is_file()]
    assert [text[:100] for text in [ran.log, *files] for value in values if len(value) > 2 and value in text] == []


def test_airflow_masks_secrets_from_its_own_store(airflow: Airflow) -> None:
    """Airflow does not mask a variable by an ordinary name. Once it is a secret of a pool, no log of the task's
    process shows it.
    """
    answer = airflow.evaluate("""
        import os
        from airflow.sdk._shared.secrets_masker import redact
        from airflow_provider_skyward.secrets import values_of
        os.environ["AIRFLOW_VAR_WORD"] = "var-9876543210"
        before = redact("value: var-9876543210")
        values = values_of(sky.PoolSpec.of(secrets={"D": sky.Secret.from_store("variable/word")}))
        answer = [before, values, redact("value: var-9876543210")]
    """)
    assert answer == ["value: var-9876543210", {"D": "var-9876543210"}, "value: ***"]


def test_no_keyword_of_the_pool_has_a_name_of_airflows(airflow: Airflow) -> None:
    """A keyword of the pool that BaseOperator has too, as argument or attribute, would silently change the task."""
    code = """
        from airflow.sdk import BaseOperator
        from airflow_provider_skyward.pool_keywords import POOL_KEYWORDS
        import inspect
        theirs = {*inspect.signature(BaseOperator.__init__).parameters, *dir(BaseOperator(task_id="t"))}
        answer = sorted(theirs & set(POOL_KEYWORDS))
    """
    assert airflow.evaluate(code) == []


def test_templates_are_rendered_before_the_pool_opens(airflow: Airflow) -> None:
    """Keywords may be templates, whole or in part, and mean the same as literals; a wrong value is refused after
    rendering.
    """
    code = """
        op = SkywardOperator(task_id="t", python_callable=len, op_args=["{{ ds }}"], accelerator="{{ params.gpu }}", nodes="{{ params.nodes }}",
                             spot="{{ params.spot }}", image={"pip": ["torch=={{ params.torch }}"]}, env={"DAY": "{{ ds }}"}, provider=LOCAL)
        op.render_template_fields({"ds": "2026-11-20", "params": {"gpu": "A100", "nodes": 2, "spot": "never", "torch": "2.9"}})
        spec = sky.PoolSpec.of(accelerator="A100", nodes=2, spot="never", image={"pip": ["torch==2.9"]}, env={"DAY": "2026-11-20"}, provider=LOCAL)
        wrong = SkywardOperator(task_id="t", python_callable=len, accelerator="{{ params.gpu }}")
        wrong.render_template_fields({"params": {"gpu": "A1000000"}})
        try:
            wrong.pool_spec
        except sky.BadRequest as error:
            answer = [op.pool_spec == spec, list(op.op_args), str(error)]
    """
    same, args, error = airflow.evaluate(code)
    assert same
    assert args == ["2026-11-20"]
    assert "A1000000" in error


def test_a_result_of_another_task_is_a_dependency_in_any_place(airflow: Airflow) -> None:
    """An XComArg as a keyword of the pool makes its task run first, in plain, partial and mapped tasks."""
    code = """
        @dag(schedule=None)
        def d():
            gpu = task(lambda: "A100").override(task_id="gpu")()
            SkywardOperator(task_id="plain", python_callable=len, op_args=["ab"], accelerator=gpu, env={"GPU": gpu})
            SkywardOperator.partial(task_id="partial", python_callable=len, accelerator=gpu).expand(op_args=[["a"], ["b"]])
            task.skyward(accelerator=gpu)(lambda x: x).override(task_id="decorated").expand(x=[1, 2])
        answer = {t.task_id: sorted(t.upstream_task_ids) for t in d().tasks}
    """
    assert airflow.evaluate(code) == {"gpu": [], "plain": ["gpu"], "partial": ["gpu"], "decorated": ["gpu"]}


def test_defaults_of_the_dag_and_a_shared_spec_are_overridden_by_keywords(airflow: Airflow) -> None:
    """`default_args` reach the pool's keywords. A keyword overrides `spec`; the other fields of `spec` are used."""
    code = """
        @dag(schedule=None, default_args={"nodes": 3, "provider": "local"})
        def d():
            SkywardOperator(task_id="a", python_callable=len, spec=sky.PoolSpec.of(provider=LOCAL, concurrency=2), concurrency=4)
            task.skyward(nodes=5)(lambda: 1).override(task_id="b")()
        answer = {t.task_id: [t.pool_spec.nodes, t.pool_spec.concurrency, t.pool_spec.provider.price_per_hour] for t in d().tasks}
    """
    assert airflow.evaluate(code) == {"a": [3, 4, 0.0], "b": [5, 1, 0.0]}


@pytest.mark.parametrize(
    ("task", "words"),
    [
        (
            "SkywardOperator(task_id='t', python_callable=len, acelerator='A100')",
            "no keyword 'acelerator'; did you mean 'accelerator'?",
        ),
        (
            "SkywardOperator(task_id='t', python_callable=len, retires=2)",
            "no keyword 'retires'; did you mean 'retries'?",
        ),
        ("SkywardOperator(task_id='t', python_callable=len, nodes=0)", "nodes=0"),
        ("SkywardOperator(task_id='t', python_callable=len, memory='32 gigs')", "32 gigs"),
        ("SkywardOperator(task_id='t', python_callable='len')", "python_callable='len' is no function"),
        ("task.skyward(nodes=0)(lambda: 1).override(task_id='t')()", "nodes=0"),
        ("task.skyward()(lambda x, ti, dag_run=None: 1).override(task_id='t')(1)", "asks for 'dag_run', 'ti'"),
        (
            "task.skyward(map_over='candidat')(lambda candidate: 1).override(task_id='t')([1])",
            "did you mean 'candidate'?",
        ),
        ("exec('async def f(): pass', globals()) or task.skyward(f)()", "f is async"),
    ],
)
def test_a_wrong_task_is_refused_while_the_dag_is_parsed(airflow: Airflow, task: str, words: str) -> None:
    """A task that cannot run raises BadRequest when it is made, and the message says what to do."""
    with pytest.raises(RuntimeError) as caught:
        airflow.evaluate(f"answer = str({task})")
    assert "skyward_core.errors.BadRequest" in str(caught.value)
    assert words in str(caught.value)


def test_parsing_a_dag_is_fast_and_uses_no_network(airflow: Airflow) -> None:
    """Making four hundred tasks imports no engine and no SDK, opens no connection, never reads the installed
    packages, reads no signature of a plain function, and checks equal keywords once.
    """
    code = """
        import sys
        def square(x): return x**2
        dag("first", schedule=None)(lambda: None)()  # Airflow itself starts a process when its first DAG is made
        opened = []
        sys.addaudithook(lambda event, args: opened.append(event) if event in ("socket.connect", "subprocess.Popen") else None)
        @dag(schedule=None)
        def d():
            for n in range(100):
                task.skyward(provider=LOCAL, nodes=2, image=sky.Image(pip=["torch"]), accelerator="A100")(lambda x: x).override(task_id=f"t{n}")(n)
                SkywardOperator(task_id=f"named{n}", python_callable=square, op_args=[n], provider="local")
                SkywardOperator(task_id=f"spec{n}", python_callable=len, op_args=["ab"], spec=spec)
                SkywardOperator(task_id=f"env{n}", python_callable=len, op_args=["ab"], env={"TOKEN": "s"}, image=sky.Image(env={"TOKEN": "s"}))
        spec = sky.PoolSpec.of(provider=LOCAL, nodes=2)
        import inspect
        read, signature = [], inspect.signature
        inspect.signature = lambda fn: read.append(fn) or signature(fn)
        made, of = [], sky.PoolSpec.of
        sky.PoolSpec.of = lambda **options: made.append(options) or of(**options)
        from importlib import metadata
        from skyward_core.providers import base
        base.entry_points = lambda **group: opened.append("a scan of all distributions") or metadata.entry_points(**group)
        assert len(d().tasks) == 400
        print("answer", len(made), read.count(square), opened, [m for m in ("distributed", "dask", "boto3", "torch", "skyward_core.pool") if m in sys.modules])
    """
    done = subprocess.run(
        [sys.executable, "-c", HEAD + textwrap.dedent(code)],
        env=airflow.environ,
        check=True,
        capture_output=True,
        text=True,
    )
    assert done.stdout.splitlines()[-1] == "answer 4 0 [] []"


def test_only_equal_keywords_have_one_check(airflow: Airflow) -> None:
    """1 and True are checked apart, and so is a model that sets a default. No task can change the data of another."""
    code = """
        def plain(**keywords):
            return SkywardOperator(task_id="t", python_callable=len, **keywords).plain_fields
        def refused(**keywords):
            try:
                return plain(**keywords)
            except sky.BadRequest as error:
                return "refused"
        first, second = [plain(image=sky.Image(pip=["torch"])) for _ in range(2)]
        first["image"]["pip"].append("numpy")
        answer = [
            plain(nodes=1), refused(nodes=True), refused(nodes=True), plain(nodes=1.0), plain(nodes="{{ ds }}"),
            second, plain(image=sky.Image(pip=["torch"], apt=[])), plain(env={"A": "1"}), plain(env={"A": "2"}),
            plain(image=sky.Image(env={"A_TOKEN": "x"})) == plain(image=sky.Image(env={"A_TOKEN": "y"})),
        ]
    """
    assert airflow.evaluate(code) == [
        {"nodes": 1},
        "refused",
        "refused",
        {"nodes": 1},
        {"nodes": "{{ ds }}"},
        {"image": {"pip": ["torch"]}},
        {"image": {"pip": ["torch"], "apt": []}},
        {"env": {"A": "1"}},
        {"env": {"A": "2"}},
        False,
    ]


def test_a_task_holds_and_shows_only_the_given_keywords(airflow: Airflow) -> None:
    """Airflow reads each attribute that is set and each templated field, at every parse, and stores and shows the
    fields of every run.
    """
    code = """
        from airflow_provider_skyward.pool_keywords import POOL_KEYWORDS
        class Mine(SkywardOperator):
            template_fields = ("bucket", *SkywardOperator.template_fields)
            def __init__(self, bucket, **kwargs):
                super().__init__(**kwargs)
                self.bucket = bucket
        @dag(schedule=None, default_args={"nodes": 2})
        def d():
            SkywardOperator(task_id="a", python_callable=len, provider="local", call_retries=1)
            task.skyward(spec={"env": {"DAY": "{{ ds }}"}})(lambda: 1).override(task_id="b")()
            Mine(task_id="c", python_callable=len, bucket="{{ ds }}", accelerator="{{ ds }}")
            SkywardOperator.partial(task_id="m", python_callable=len).expand(nodes=[1, 2])
        tasks = d().task_dict
        mapped = tasks["m"].unmap({"nodes": 2})
        held = [sorted({*POOL_KEYWORDS} & {*vars(op)}) for op in (tasks["a"], tasks["b"], tasks["c"], mapped)]
        answer = [[sorted(tasks[t].template_fields) for t in "abc"], held, mapped.pool_spec.nodes, tasks["a"].cpu, len(tasks["m"].template_fields)]
    """
    shown, held, nodes, cpu, of_mapped = airflow.evaluate(code)
    call = ["op_args", "op_kwargs"]
    assert shown == [
        ["call_retries", "nodes", *call, "provider"],
        ["env", "nodes", *call],
        ["accelerator", "bucket", "nodes", *call],
    ]
    assert held == [["call_retries", "nodes", "provider"], ["env", "nodes"], ["accelerator", "nodes"], ["nodes"]]
    assert (nodes, cpu) == (2, None)
    assert of_mapped > 20, "which of them a mapped task sets is known when it runs"


# ── runs ─────────────────────────────────────────────────────────────────────────────────────────────────────────────


def test_a_task_runs_on_a_pool_of_its_own_and_reports_its_cost(airflow: Airflow) -> None:
    """The result and the bill are XComs, the nodes' lines are in the task log, and functions of the DAG file travel
    too.
    """
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
            return [day, run_id, logical_date.isoformat(), type(logical_date).__module__, params, context["ds"], os.environ["GREETING"]]
        @dag(schedule=None, params={"n": 1})
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
    assert ran.xcoms["decorated", -1, "return_value"] == {"answer": 42, "other": 1}
    assert ran.xcoms["decorated", -1, "answer"] == 42  # multiple_outputs, inferred from `-> dict`
    day, run_id, logical_date, module, params, ds, greeting = ran.xcoms["classic", -1, "return_value"]
    assert (params, module, greeting) == ({"n": 1}, "datetime", "hi")
    assert day == ds == logical_date[:10]
    assert run_id.startswith("manual__")
    assert re.search(r"\[node \d\] on 2 nodes.*SkywardDecoratedOperator", ran.log)
    assert re.search(rf"\[node 0\] for {day}", ran.log)
    assert re.search(r"\[node 0\] to stderr", ran.log)
    order = r"::group::Provisioning.*launching 2 x local.*node 1: server.*is ready after.*::endgroup::.*\[node \d\] on 2 nodes.*giving the machines back.*cost: 0\.\d+ USD.*skyward receipt sky-"
    assert re.search(order, ran.log, re.DOTALL)
    bill = ran.bill("decorated")
    assert bill["pool_id"].startswith("sky-")
    assert (bill["nodes"], bill["hourly_rate"], bill["provider"], bill["calls"]) == (2, 72.0, "local", 1)
    assert bill["seconds"] == round(bill["seconds"], 3), "for people to read"
    # begun seconds are paid in full, from the launch on; `seconds` begin with the search for machines
    second = 2 * 36.0 / 3600
    assert second <= bill["cost_usd"] <= second * (bill["seconds"] + 1)
    assert ran.bill("classic")["nodes"] == 1


def test_mapped_tasks_have_a_pool_each_and_map_over_shares_one(airflow: Airflow) -> None:
    """`expand` makes a pool for each item, `map_over` one for all; results of mapped tasks arrive on a node as
    values.
    """
    ran = airflow.run(
        "mapped",
        """
        @dag(schedule=None)
        def mapped():
            @task.skyward(provider=LOCAL)
            def double(x, plus=0):
                return 2 * x + plus
            @task.skyward(provider=LOCAL)
            def total(values):
                return [type(values).__name__, sum(values)]
            @task.skyward(provider=LOCAL, nodes=2, map_over=("x", "y"))
            def add(x, y, z) -> dict:
                return {"sum": x + y + z}
            total(double.partial(plus=1).expand(x=[1, 2, 3]))
            add([1, 2, 3], y=[10, 20, 30], z=100)
            add.override(task_id="nothing")([], [], 100)
            SkywardOperator.partial(task_id="power", python_callable=pow, provider="local").expand(op_args=[[2, 3], [3, 2]])
        mapped()
        """,
    )
    assert ran.state == "success"
    assert [ran.xcoms["double", index, "return_value"] for index in range(3)] == [3, 5, 7]
    assert [ran.bill("double", index)["calls"] for index in range(3)] == [1, 1, 1]
    assert ran.xcoms["total", -1, "return_value"] == ["list", 15]
    assert ran.xcoms["add", -1, "return_value"] == [{"sum": 111}, {"sum": 122}, {"sum": 133}]
    assert (ran.bill("add")["calls"], ran.bill("add")["nodes"]) == (3, 2)
    assert ran.xcoms["nothing", -1, "return_value"] == []
    assert ("nothing", -1, "skyward_cost") not in ran.xcoms
    assert [ran.xcoms["power", index, "return_value"] for index in range(2)] == [8, 9]


def test_a_task_that_fails_has_closed_its_pool_and_reports_its_cost(airflow: Airflow) -> None:
    """A function's exception, a crash, a wrong argument and the task's time limit all end the pool; the cost is
    reported.
    """
    ran = airflow.run(
        "failing",
        """
        @dag(schedule=None)
        def failing():
            @task.skyward(provider=LOCAL, map_over="x", nodes=2)
            def divide(x):
                return 1 / x
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
            divide([1, 0, 2]), crash(), sleep(), count.override(task_id="not_a_list")(7)
        failing()
        """,
    )
    assert ran.state == "failed"
    assert "ZeroDivisionError: division by zero" in ran.log
    assert "in call 2 of 3 (map_over)" in ran.log
    assert "CallCrashed" in ran.log
    assert "[node 0] last words" in ran.log
    assert "AirflowTaskTimeout" in ran.log
    assert "map_over='x' needs a list or tuple in x" in ran.log
    assert 2 < ran.bill("sleep")["seconds"] < 30
    assert ran.bill("divide")["cost_usd"] > 0
    assert ran.bill("crash")["cost_usd"] > 0
    assert ("not_a_list", -1, "skyward_cost") not in ran.xcoms  # refused before a pool was opened
    assert not any(key == "return_value" for _, _, key in ran.xcoms)


def test_a_result_that_is_too_large_for_xcom_fails_with_advice(airflow: Airflow) -> None:
    """A result that is too large for the database, or is no data, fails the task without a retry, and the error says
    what to do.
    """
    ran = airflow.run(
        "large",
        """
        @dag(schedule=None)
        def large():
            @task.skyward(provider=LOCAL, retries=3)
            def produce(size): return "x" * size
            @task.skyward(provider=LOCAL, retries=3)
            def code(): return lambda: 1
            produce(2_000_000), code()
            produce.override(task_id="unlimited", max_xcom_bytes=None)(2_000_000)
            produce.override(task_id="kept", do_xcom_push=False)(2_000_000)
        large()
        """,
    )
    assert ran.state == "failed"
    assert re.search(
        r"the result takes 2,000,00\d bytes as XCom, more than 1,000,000 \(max_xcom_bytes\): give result_path= a",
        ran.log,
    )
    assert "the result, a function, is nothing that XCom can store" in ran.log
    assert len(ran.xcoms["unlimited", -1, "return_value"]) == 2_000_000
    assert {task for task, _, key in ran.xcoms if key == "skyward_cost"} == {"produce", "code", "unlimited", "kept"}
    assert {task for task, _, key in ran.xcoms if key == "return_value"} == {"unlimited"}


def test_a_result_with_a_path_is_in_a_file_and_xcom_has_the_path(airflow: Airflow, tmp_path: Path) -> None:
    """Any size, and what XCom cannot store. Each mapped task has a file. A place that is none is refused before a pool
    is opened.
    """
    ran = airflow.run(
        "placed",
        f"""
        from airflow_provider_skyward.results import read_result
        @dag(schedule=None, params={{"day": "mon"}})
        def placed():
            @task.skyward(provider=LOCAL, result_path="{tmp_path}/{{{{ params.day }}}}/")
            def produce(size: int) -> dict: return {{"text": b"x" * size, "code": lambda: size}}
            @task
            def read(paths):
                found = [read_result(path) for path in paths]
                return [[len(one["text"]), one["code"]()] for one in found]
            read(produce.expand(size=[2_000_000, 3]))
            produce.override(task_id="nowhere", result_path="nonsense://bucket")(1)
        placed()
        """,
    )
    assert ran.xcoms["read", -1, "return_value"] == [[2_000_000, 2_000_000], [3, 3]]
    first = ran.xcoms["produce", 0, "return_value"]
    assert first.startswith(f"{tmp_path}/mon/placed/manual__")
    assert first.endswith("/produce/0-1.pickle")
    assert "result_path='nonsense://bucket' is no place for a result: " in ran.log
    assert ("nowhere", -1, "skyward_cost") not in ran.xcoms
    assert {task for task, _, key in ran.xcoms if key == "return_value"} == {"read", "produce"}


@pytest.mark.parametrize("moment", ["launching 2 x local", "] working"])
def test_a_killed_task_ends_its_pool_before_airflow_sends_sigkill(airflow: Airflow, moment: str) -> None:
    """SIGTERM to the task's process group, while machines start or while the function runs: `execute` raises, and
    all nodes are gone in time.
    """
    process = airflow.start("kill")
    assert process.stdout is not None
    try:
        assert any(moment in line for line in process.stdout)
        os.killpg(process.pid, signal.SIGTERM)
        killed = time.monotonic()
        said, _ = process.communicate(timeout=60)
        took = time.monotonic() - killed
    finally:
        process.kill()
        process.communicate()
    assert took < KILL_SECONDS * slowness()
    assert left_by(process.pid) == []
    assert "raised AirflowException: the task was asked to stop" in said
    assert "skyward_cost" in said
    assert process.returncode == 0


def skyward(environ: dict[str, str], *arguments: str) -> str:
    return subprocess.run(
        [sys.executable, "-m", "skyward_core.cli", *arguments], env=environ, check=True, capture_output=True, text=True
    ).stdout


def test_a_task_that_is_tried_again_adds_up_its_cost(airflow: Airflow) -> None:
    """Each try has its own pool. Log and XCom have the cost of this try and of all of them; a mapped task is
    identified by its index.
    """
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
    assert pool["earlier_tries_usd"] == pytest.approx(twice["all_tries_usd"] - twice["cost_usd"])
    work = pool["work"]
    assert (work["system"], work["workflow"], work["task"], work["task_run"], work["attempt"]) == (
        "airflow",
        "tried",
        "unlucky",
        "1",
        "2",
    )
    assert re.search(r"skyward receipt sky-\w+` shows.*launching", ran.log, re.DOTALL)


def test_a_retry_policy_sees_the_function_s_own_exception(airflow: Airflow) -> None:
    """An exception that pickle alone cannot rebuild keeps its class: the rule that names it matches, and the task is
    not tried again.
    """
    ran = airflow.run(
        "policy",
        """
        from airflow.sdk.definitions.retry_policy import ExceptionRetryPolicy, RetryAction, RetryRule

        class Busy(Exception):
            def __init__(self, code, wait):
                super().__init__(f"busy {code}")

        never_again = ExceptionRetryPolicy(rules=[RetryRule(exception=Busy, action=RetryAction.FAIL, reason="it is busy for good")])

        @dag(schedule=None)
        def policy():
            @task.skyward(provider=LOCAL, retries=1, retry_delay=timedelta(0), retry_policy=never_again)
            def busy():
                raise Busy(503, "for ever")
            busy()
        policy()
        """,
    )
    assert ran.state == "failed"
    assert "it is busy for good" in ran.log
    assert ran.bill("busy")["pools"] == [ran.bill("busy")["pool_id"]]


def test_a_task_without_money_fails_without_another_try(airflow: Airflow) -> None:
    """If the first minute costs more than allowed, the task is refused. It is not tried again, says why, and nothing
    was rented.
    """
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


def test_the_page_is_a_dag_that_runs(airflow: Airflow) -> None:
    """The Python of docs/airflow.md is a DAG file that runs and prints what it says."""
    source = "".join(re.findall(r"```python\n(.*?)```", (ROOT / "docs" / "airflow.md").read_text(), re.DOTALL))
    ran = airflow.run("howto", source, head="", dag_id="pools")
    assert ran.state == "success"
    assert re.search(r"\[1, 4, 9\] for 0\.\d+ USD", ran.log)
    assert ran.xcoms["classic", -1, "return_value"] == 5.0


# ── the Airflow process's side ───────────────────────────────────────────────────────────────────────────────────────


def _host() -> None:
    """Answer one request for each line of stdin; all output meanwhile goes to the file that the request names."""
    replies = os.fdopen(os.dup(1), "w", buffering=1)
    for line in sys.stdin:
        request = json.loads(line)
        with open(request["log"], "wb") as log:
            os.dup2(log.fileno(), 1)
            os.dup2(log.fileno(), 2)
        try:
            reply = {
                "answer": _run_dag(request["file"], request["dag_id"])
                if "file" in request
                else _evaluate(request["code"])
            }
        except BaseException:
            reply = {"error": traceback.format_exc()}
        replies.write(json.dumps(reply | {"number": request["number"]}) + "\n")


def _evaluate(code: str) -> Any:
    names: dict[str, Any] = {"__name__": "evaluated"}
    exec(code, names)
    return names["answer"]


def _run_dag(file: str, dag_id: str) -> dict[str, Any]:
    from airflow.dag_processing.dagbag import DagBag
    from airflow.models.xcom import XComModel
    from airflow.settings import Session

    bag = DagBag(file)
    if bag.import_errors:
        raise RuntimeError("\n".join(map(str, bag.import_errors.values())))
    (dag,) = [bag.dags[dag_id]] if dag_id else bag.dags.values()
    run = dag.test()
    session = Session()
    rows = session.query(XComModel).filter(XComModel.run_id == run.run_id, XComModel.dag_id == dag.dag_id).all()
    return {
        "state": run.state,
        "xcoms": [[row.task_id, row.map_index, row.key, XComModel.deserialize_value(row)] for row in rows],
    }


def _hang() -> None:
    """Like `_kill`, with a provider that never answers after the kill. It reports when the reaper got the machines."""
    import threading

    import skyward_core as sky

    terminate_now = sky.ComputePool.terminate_now

    def hand_over(pool: sky.ComputePool) -> None:
        terminate_now(pool)
        print("handed over", flush=True)

    def hang(provider: sky.Local, ids: object) -> None:
        print("the provider does not answer", flush=True)
        threading.Event().wait()

    sky.ComputePool.terminate_now = hand_over
    sky.Local.terminate = hang
    _kill()


def _kill() -> None:
    """Run a task that works for ever, with the handler of SIGTERM that Airflow's task runner has
    (`_run_task_and_map_outcome`).
    """
    from airflow.sdk.exceptions import AirflowException

    import skyward_core as sky
    from airflow_provider_skyward.operators import SkywardOperator

    class TaskInstance:
        dag_id, run_id, task_id, map_index = "killed", os.environ.get("RUN", f"run-{os.getpid()}"), "work", -1
        try_number = int(os.environ.get("TRY", "1"))

        def xcom_push(self, key: str, value: Any) -> None:
            print("pushed", key, value, flush=True)

    task = SkywardOperator(task_id="work", python_callable=_work, provider=sky.Local(price_per_hour=36.0), nodes=2)
    signal.signal(signal.SIGTERM, lambda number, frame: task.on_kill())
    try:
        task.execute({"ti": TaskInstance()})
    except AirflowException as error:
        print(f"raised AirflowException: {error}")


def _work() -> None:
    print("working")
    while True:
        time.sleep(1)


if __name__ == "__main__":
    {"host": _host, "kill": _kill, "hang": _hang}[sys.argv[1]]()
