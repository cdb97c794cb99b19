"""Airflow: what is parsed, the docs' DAG, connections, hooks, and the retry policy."""

import base64
import importlib.util
import json
import re
import subprocess
import sys
import textwrap
from typing import Any

import pytest

if importlib.util.find_spec("airflow") is None:
    pytest.skip("Airflow is not installed", allow_module_level=True)

from tests.integrations import airflow_host
from tests.integrations.airflow_host import HEAD, Airflow
from tests.page_blocks import pages_of, programs

airflow = pytest.fixture(scope="session")(airflow_host.served)

SECRET_KEY = base64.b64encode(b"k" * 32).decode()


def test_airflow_lists_the_provider(airflow: Airflow) -> None:
    """Airflow asks every process for the provider's info; that imports neither Airflow nor our core."""
    listed = json.loads(airflow.cli("providers", "list", "-o", "json"))
    assert "skyward-core" in [provider["package_name"] for provider in listed]
    heavy = "('airflow', 'skyward_core', 'pydantic')"
    code = f"import sys, airflow_provider_skyward as p; p.get_provider_info(); print([m for m in {heavy} if m in sys.modules])"
    done = subprocess.run([sys.executable, "-c", code], check=True, capture_output=True, text=True)
    assert done.stdout.strip() == "[]"


# ── while a DAG is parsed ────────────────────────────────────────────────────────────────────────────────────────────


EVERY_KEYWORD = (
    'provider=LOCAL, image=sky.Image(pip=["torch"], env={"A": "b"}), nodes=(2, 4), machine="m", accelerator=[sky.Accelerator.NVIDIA.A100(count=2), sky.Alternative("T4", provider="local")], selection="cheapest", cpu=4, '
    'memory="32GB", volume=[sky.S3Volume(mount_path="/data", bucket="my-bucket")], spot=sky.Spot.Percent(0.8), timeout=600, max_lifetime=7200, max_cost=10, max_hourly_cost=30, max_price_ratio=3, budget="team-a", lease_seconds=60, '
    'architecture="x86_64", env={"C": "d"}, secrets={"E": sky.Secret.from_env("F")}, concurrency=2, provision_timeout=300, display="quiet", collect_metrics=False, name="nightly", keep_warm=600, scale_up_after=20, scale_down_after=90'
)
OTHER_NAMES = 'call_retries=1, node_output="head"'


def test_every_keyword_survives_the_serialization_of_the_dag(airflow: Airflow) -> None:
    answer = airflow.evaluate(f"""
        from airflow.serialization.serialized_objects import DagSerialization
        def serialized():
            @dag(schedule=None)
            def d():
                SkywardOperator(task_id="t", python_callable=len, op_args=["ab"], retries=2, execution_timeout=timedelta(hours=1), pool_slots=3,
                                trigger_rule="all_done", {EVERY_KEYWORD}, {OTHER_NAMES})
                task.skyward({EVERY_KEYWORD}, {OTHER_NAMES})(lambda x: x).override(task_id="u")(1)
            return DagSerialization.to_dict(d())
        data = serialized()
        back = DagSerialization.from_dict(data).task_dict
        spec = sky.PoolSpec.of({EVERY_KEYWORD}, retries=1, output="head")
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


def test_no_keyword_of_the_pool_has_a_name_of_airflows(airflow: Airflow) -> None:
    """A keyword of the pool that BaseOperator has too, as argument or attribute, would silently change the task."""
    code = """
        from airflow.sdk import BaseOperator
        from airflow_provider_skyward.pool_keywords import POOL_KEYWORDS
        import inspect
        theirs = {*inspect.signature(BaseOperator.__init__).parameters, *dir(BaseOperator(task_id="t"))}
        from airflow_provider_skyward import keyword_types
        from airflow_provider_skyward.operators import KNOWN_KEYWORDS
        typed = set(keyword_types.DecoratorKeywords.__annotations__)
        answer = sorted(theirs & set(POOL_KEYWORDS)), sorted(typed ^ KNOWN_KEYWORDS)
    """
    of_calls = ["kwargs", "op_args", "op_kwargs", "python_callable", "self"]
    assert airflow.evaluate(code) == [[], of_calls], "type checkers know each keyword, and no other one"


def test_keywords_may_be_templates_results_and_defaults(airflow: Airflow) -> None:
    """A template means the same as the literal, and a wrong value is refused after rendering."""
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
            refused = str(error)

        @dag(schedule=None)
        def with_results():
            gpu = task(lambda: "A100").override(task_id="gpu")()
            SkywardOperator(task_id="plain", python_callable=len, op_args=["ab"], accelerator=gpu, env={"GPU": gpu})
            SkywardOperator.partial(task_id="partial", python_callable=len, accelerator=gpu).expand(op_args=[["a"], ["b"]])
            task.skyward(accelerator=gpu)(lambda x: x).override(task_id="decorated").expand(x=[1, 2])

        @dag(schedule=None, default_args={"nodes": 3, "provider": "local"})
        def with_defaults():
            SkywardOperator(task_id="a", python_callable=len, spec=sky.PoolSpec.of(provider=LOCAL, concurrency=2), concurrency=4)
            task.skyward(nodes=5)(lambda: 1).override(task_id="b")()

        answer = [
            op.pool_spec == spec, list(op.op_args), refused,
            {t.task_id: sorted(t.upstream_task_ids) for t in with_results().tasks},
            {t.task_id: [t.pool_spec.nodes, t.pool_spec.concurrency, t.pool_spec.provider.price_per_hour] for t in with_defaults().tasks},
        ]
    """
    is_same, args, refused, upstream, specs = airflow.evaluate(code)
    assert (is_same, args) == (True, ["2026-11-20"])
    assert "A1000000" in refused
    assert upstream == {"gpu": [], "plain": ["gpu"], "partial": ["gpu"], "decorated": ["gpu"]}
    assert specs == {"a": [3, 4, 0.0], "b": [5, 1, 0.0]}


@pytest.mark.parametrize(
    ("task", "words"),
    [
        ("skyward(acelerator='A100')", "no keyword 'acelerator'; did you mean 'accelerator'?"),
        (
            "skyward(acelerator='A100', nodez=2)",
            "of task 'use' has no keyword 'acelerator' and 'nodez'; did you mean 'accelerator' and 'nodes'?",
        ),
        ("skyward(retires=2)", "no keyword 'retires'; did you mean 'retries'?"),
        ("skyward(nodes=0)", "nodes=0"),
        ("skyward(memory='32 gigs')", "32 gigs"),
        ("SkywardOperator(task_id='t', python_callable='len')", "python_callable='len' is no function"),
        ("task.skyward(nodes=0)(lambda: 1).override(task_id='t')()", "nodes=0"),
        ("task.skyward()(lambda x, ti, dag_run=None: 1).override(task_id='t')(1)", "asks for 'dag_run', 'ti'"),
        (
            "task.skyward(map_over='candidat')(lambda candidate: 1).override(task_id='t')([1])",
            "did you mean 'candidate'?",
        ),
        ("exec('async def f(): pass', globals()) or task.skyward(f)()", "f is async"),
        ("skyward(broadcast=True, map_over='x')", "leave out one of them"),
        ("skyward(broadcast=True, durable=True)", "leave out one of durable and broadcast"),
        ("skyward(broadcast=True, deferrable=True)", "leave out one of deferrable and broadcast"),
        ("run()", "write command= or script=, one of them"),
        ("run(command='a', script='b.py')", "write command= or script=, one of them"),
        ("run(command='a', args=['b'])", "write them into the command"),
        ("run(command='a', map_over='x')", "map_over is for functions"),
        ("run(command='a', acelerator='A100')", "SkywardRunOperator of task 'run' has no keyword 'acelerator'"),
        ("run(command='{{ params.c }}', provider='local', nodes=2, broadcast=True, skip_on_exit_code=None)", ""),
        ("SkywardCreatePool(task_id='c', name='x', hold=60)", "hold=60: with name= the pool is shared with other runs"),
        ("SkywardCreatePool(task_id='c', name='{{ params.n }}', keep_warm='{{ params.s }}')", ""),
        ("SkywardCreatePool(task_id='c', keep_warm=60)", "keep_warm=60: the teardown ends the pool"),
        ("SkywardCreatePool(task_id='c', hold=0)", "hold=0: write for how many seconds"),
        ("SkywardCreatePool(task_id='c', hold=900, timeout=600)", "timeout=600 ends idle machines before hold=900"),
        ("SkywardCreatePool(task_id='c', acelerator='A100')", "no keyword 'acelerator'; did you mean 'accelerator'?"),
        ("skyward(skyward_pool='default_pool')", "skyward_pool=str: give what"),
        ("skyward(skyward_pool=create.output, nodes=2)", "nodes: the pool of 'create' has its settings from there"),
        ("skyward(skyward_pool=create.output, deferrable=True)", "leave out one of deferrable and skyward_pool"),
        ("skyward(skyward_pool=create.output, provider='local', lease_seconds=60)", ""),
    ],
)
def test_a_wrong_task_is_refused_while_the_dag_is_parsed(airflow: Airflow, task: str, words: str) -> None:
    """A task that cannot run raises BadRequest when it is made, and the message says what to write."""
    code = f"""
        from airflow_provider_skyward.programs import SkywardRunOperator
        def run(**keywords): return SkywardRunOperator(task_id="run", **keywords)
        def skyward(**keywords): return SkywardOperator(task_id="use", python_callable=len, **keywords)
        @dag(schedule=None)
        def d():
            create = SkywardCreatePool(task_id="create", provider="local")
            {task}
        answer = ""
        try:
            d()
        except sky.BadRequest as error:
            answer = str(error)
    """
    said = airflow.evaluate(code, airflow_host.POOLS_HEAD)
    assert words in said
    assert bool(said) == bool(words)


def test_parsing_a_dag_uses_no_network_and_no_engine(airflow: Airflow) -> None:
    code = """
        import sys
        dag("first", schedule=None)(lambda: None)()  # Airflow itself starts a process when its first DAG is made
        opened = []
        sys.addaudithook(lambda event, args: opened.append(event) if event in ("socket.connect", "subprocess.Popen") else None)
        @dag(schedule=None)
        def d():
            for n in range(10):
                task.skyward(provider=LOCAL, nodes=2, image=sky.Image(pip=["torch"]), accelerator="A100")(lambda x: x).override(task_id=f"t{n}")(n)
                SkywardOperator(task_id=f"env{n}", python_callable=len, op_args=["ab"], env={"TOKEN": "s"}, spec=sky.PoolSpec.of(nodes=2))
        assert len(d().tasks) == 20
        engine = [m for m in ("distributed", "dask", "boto3", "torch", "skyward_core.pool") if m in sys.modules]
        def plain(**keywords):
            return SkywardOperator(task_id="t", python_callable=len, **keywords).plain_fields
        first, second = [plain(image=sky.Image(pip=["torch"])) for _ in range(2)]
        first["image"]["pip"].append("numpy")
        secrets = [plain(image=sky.Image(env={"A_TOKEN": value})) for value in "xy"]
        plain(nodes=1)
        try:
            plain(nodes=True)
        except sky.BadRequest:
            print("answer", opened, engine, second, secrets[0] == secrets[1])
    """
    done = subprocess.run(
        [sys.executable, "-c", HEAD + textwrap.dedent(code)],
        env=airflow.environ,
        check=True,
        capture_output=True,
        text=True,
    )
    assert done.stdout.splitlines()[-1] == "answer [] [] {'image': {'pip': ['torch']}} False"


def test_each_block_of_the_pages_is_a_dag_file(airflow: Airflow) -> None:
    """The first one of docs/airflow/function.md runs without a date, and prints what it says; the others can be loaded."""
    first = programs("docs/airflow/function.md")[0]
    others = [program for page in pages_of("airflow") for program in programs(page) if program != first]
    assert others
    for other in others:
        airflow.evaluate(f"{other}\nanswer = None\n", head="")
    ran = airflow.run("howto", first, head="", dag_id="pools", has_date=False)
    assert ran.state == "success"
    assert re.search(r"\[1, 4, 9\] for 0\.\d+ USD", ran.log)
    assert ran.result("classic") == 5.0


def test_what_a_run_without_a_date_lacks_is_said_before_anything_is_rented(airflow: Airflow) -> None:
    ran = airflow.run(
        "undated",
        """
        @dag(schedule=None, default_args={"provider": LOCAL, "retries": 2})
        def undated():
            @task.skyward
            def argument(x, ds): return ds
            @task.skyward
            def template(x): return x
            argument(1), template("{{ ts }}")
        undated()
        """,
        has_date=False,
    )
    assert ran.state == "failed"
    why = "is not known, because this DAG run has no logical date: an asset, or a request without a date, has started it. Use run_id or params"
    assert f"AirflowFailException: argument: 'ds' {why}" in ran.log
    assert (
        f"AirflowFailException: the template in op_args of the task 'template' cannot be rendered: 'ts' {why}"
        in ran.log
    )
    assert "up_for_retry" not in ran.log, "another try would lack it too"
    assert "skyward_pool" not in {key for _, _, key in ran.xcoms}, "nothing was rented"


@pytest.mark.parametrize(
    ("keywords", "said", "remedy"),
    [
        (
            "nodes='{{ params.nodse }}'",
            "nodes of the task 't' cannot be rendered: 'dict object' has no attr",
            "default(",
        ),
        ("env={'A': '{{ [] | first }}'}", "env of the task 't' cannot be rendered: No first item", "default("),
        (
            "op_args=['{{ nonesuch }}']",
            "op_args of the task 't' cannot be rendered: 'nonesuch' is undefined",
            "default(",
        ),
        (
            "accelerator='{{ params.gpu }'",
            "accelerator of the task 't' cannot be rendered: unexpected '}'",
            "{% raw %}",
        ),
        (
            "node_output='{{ 1 | uper }}'",
            "node_output of the task 't' cannot be rendered: No filter named 'uper'",
            "{% raw %}",
        ),
        ("op_args=[Away()]", "[Errno 111] it may be there at the next try", ""),
    ],
    ids=["a param", "deep", "a name", "braces", "a filter", "no template"],
)
def test_an_error_of_a_template_has_its_keyword_and_what_to_do(
    airflow: Airflow, keywords: str, said: str, remedy: str
) -> None:
    """Airflow renders before it executes, so nothing is rented. The error is final, as another try would have it too."""
    code = f"""
        from airflow.sdk.exceptions import AirflowFailException
        class Away:
            def resolve(self, context): raise ConnectionError(111, "it may be there at the next try")
        @dag(schedule=None)
        def d():
            SkywardOperator(task_id="t", python_callable=len, {keywords})
        try:
            d().task_dict["t"].render_template_fields({{"params": {{"nodes": 2}}}})
        except (AirflowFailException, ConnectionError) as error:
            answer = str(error)
    """
    answer = airflow.evaluate(code)
    assert answer.removeprefix("the template in ").startswith(said)
    assert remedy in answer


# ── connections ──────────────────────────────────────────────────────────────────────────────────────────────────────


WITH_CONNECTIONS = (
    HEAD
    + """
import json, os
from airflow_provider_skyward import connections, hooks
from airflow_provider_skyward.hooks import CloudHook

class LocalHook(CloudHook):
    conn_type, provider_class, secrets_by_part = "skyward_test", "Local", {}
    plain_by_extra = {"price": "price_per_hour"}

hooks.HOOKS["skyward_test"] = LocalHook

def has_connection(name, **fields):
    os.environ[f"AIRFLOW_CONN_{name.upper()}"] = json.dumps(fields)

def known(url, task):
    return len(sky.cost_of(sky.Work(system="airflow", task=task), ledger_url=url))
"""
)


def test_a_task_uses_the_ledger_and_the_credentials_of_its_connections(airflow: Airflow) -> None:
    """Its pool is in the connection's ledger and has the price of the connection's provider."""
    url = f"sqlite:///{airflow.home}/connected.sqlite"
    ran = airflow.run(
        "connected",
        f"""
        @dag(schedule=None, params={{"cloud": "our_cloud"}})
        def connected():
            @task.skyward(skyward_conn_id="our_ledger", provider_conn_id="{{{{ params.cloud }}}}", provider="local",
                          image=sky.Image(env={{"A": "b"}}))
            def connected_task():
                return 1
            @task
            def check():
                here = os.environ.get("SKYWARD_SECRET_KEY")
                names = ("connected_task", "connected_durable")
                return [[known("{url}", name), known(None, name)] for name in names] + [here]
            [connected_task(), connected_task.override(task_id="connected_durable", durable=True)()] >> check()
        connected()
        has_connection("our_ledger", conn_type="skyward", password="{SECRET_KEY}", extra={{"ledger_url": "{url}"}})
        has_connection("our_cloud", conn_type="skyward_test", extra={{"price": 7.2}})
        """,
        head=WITH_CONNECTIONS,
    )
    assert ran.state == "success", ran.log
    assert ran.bill("connected_task")["hourly_rate"] == pytest.approx(7.2)
    assert ran.result("check") == [[1, 0], [1, 0], None]


def test_connections_that_do_not_fit_say_so(airflow: Airflow) -> None:
    """A connection of no cloud, one of another cloud, several providers, and a triggerer with another ledger."""
    code = """
        import asyncio
        has_connection("web", conn_type="http")
        has_connection("pod", conn_type="skyward_runpod", password="secret")
        has_connection("one", conn_type="skyward", extra={"ledger_url": "sqlite:////tmp/none/a"})
        has_connection("two", conn_type="skyward", extra={"ledger_url": "sqlite:////tmp/none/b"})
        def error_of(of):
            try:
                of()
            except sky.BadRequest as error:
                return str(error)
        before = os.environ.pop("SKYWARD_LEDGER", None)
        answer = [
            error_of(lambda: connections.credentials_of("web", None)),
            error_of(lambda: connections.credentials_of("pod", sky.AWS(region="us-east-1"))),
            error_of(lambda: connections.credentials_of("pod", (sky.AWS(), sky.RunPod()))),
            error_of(lambda: asyncio.run(connections.ledger_of_triggerer("one"))),
            error_of(lambda: asyncio.run(connections.ledger_of_triggerer("one"))),
            error_of(lambda: asyncio.run(connections.ledger_of_triggerer("two"))),
        ]
        pod = asyncio.run(connections.credentials_in_triggerer("pod", {"name": "runpod", "region": "EU-RO-1"}))
        answer += [pod.region, pod.api_key.get_secret_value(), repr(pod)]
        os.environ.pop("SKYWARD_LEDGER")
        if before is not None:
            os.environ["SKYWARD_LEDGER"] = before
    """
    web, aws, several, first, same, other, region, key, shown = airflow.evaluate(code, WITH_CONNECTIONS)
    assert "has the type 'http'" in web
    assert "choose one cloud" in aws
    assert "for one provider" in several
    assert (first, same) == (None, None)
    assert "SKYWARD_LEDGER of the connection 'two' is not that of this triggerer" in other
    assert (region, key) == ("EU-RO-1", "secret")
    assert "secret" not in shown.replace("SecretStr", "")


def test_serialized_tasks_and_triggers_carry_the_names_of_connections_and_no_secret(airflow: Airflow) -> None:
    """Parsing reads none: these do not exist."""
    code = """
        import asyncio
        from airflow.serialization.serialized_objects import DagSerialization
        from airflow_provider_skyward.triggers import SkywardTrigger
        @dag(schedule=None)
        def d():
            task.skyward(provider=LOCAL, skyward_conn_id="none_such", provider_conn_id="none_either")(lambda: 1).override(task_id="a")()
            task.skyward(provider=LOCAL)(lambda: 1).override(task_id="b")()
        answer = [[one["__var"] for one in DagSerialization.to_dict(d())["dag"]["tasks"]]]
        has_connection("pod", conn_type="skyward_runpod", password="secret")
        has_connection("two", conn_type="skyward", extra={"ledger_url": "sqlite:////tmp/none/b"})
        plain = SkywardTrigger("sky-1", ["a"], [0])
        named = SkywardTrigger("sky-1", ["a"], [0], skyward_conn_id="two", provider_conn_id="pod",
                               provider={"name": "runpod", "region": "EU-RO-1"})
        answer += [one.serialize()[1] for one in (plain, named, SkywardTrigger(**named.serialize()[1]))]
        release, before = sky.release, dict(os.environ)
        sky.release = lambda pool, credentials, ledger_url: answer.append(
            [pool, ledger_url] + ([credentials.region, credentials.api_key.get_secret_value()] if credentials else []))
        asyncio.run(named.on_kill())
        asyncio.run(plain.on_kill())
        sky.release = release
        answer.append(before == dict(os.environ))
    """
    tasks, plain, named, again, ended, ended_plain, is_unchanged = airflow.evaluate(code, WITH_CONNECTIONS)
    assert (tasks[0]["skyward_conn_id"], tasks[0]["provider_conn_id"]) == ("none_such", "none_either")
    assert "conn_id" not in json.dumps(tasks[1])
    assert set(plain) == {"pool_id", "call_ids", "cursors"}
    assert named == again
    assert (named["skyward_conn_id"], named["provider_conn_id"]) == ("two", "pod")
    assert "secret" not in json.dumps(named)
    assert (ended, ended_plain) == (["sky-1", "sqlite:////tmp/none/b", "EU-RO-1", "secret"], ["sky-1", None])
    assert is_unchanged


SECRET = "secret-of-a-connection"

CONNECTIONS = {
    "skyward_default": {
        "conn_type": "skyward",
        "password": SECRET_KEY,
        "extra": {"ledger_url": "sqlite:///{home}/ledger.sqlite"},
    },
    "no_ledger": {"conn_type": "skyward", "extra": {"ledger_url": "sqlite:////etc/hostname/none/ledger.sqlite"}},
    "skyward_aws_default": {
        "conn_type": "skyward_aws",
        "login": "AKIA",
        "password": SECRET,
        "extra": {"region": "us-east-1, eu-west-1"},
    },
    "aws_default": {"conn_type": "aws", "login": "AKIB", "password": SECRET, "extra": {"region_name": "eu-west-1"}},
    "wrong_key": {"conn_type": "skyward", "password": SECRET, "extra": {"ledger_url": "sqlite:///{home}/hook.sqlite"}},
    "skyward_runpod_default": {"conn_type": "skyward_runpod", "password": SECRET, "extra": {"cloud": "secure"}},
    "skyward_vastai_default": {"conn_type": "skyward_vastai", "password": SECRET},
    "skyward_verda_default": {"conn_type": "skyward_verda", "login": "id", "password": SECRET},
    "skyward_digitalocean_default": {"conn_type": "skyward_digitalocean", "password": SECRET},
}

HOOKS = """
import json, os
from airflow.providers_manager import ProvidersManager
from airflow.sdk import ExceptionRetryPolicy
from airflow_provider_skyward import hooks, retry

os.environ.update(json.loads(CONNECTIONS))
KINDS = (hooks.AWSHook, hooks.RunPodHook, hooks.VastAIHook, hooks.VerdaHook, hooks.DigitalOceanHook)
SECRETS = ("access_key_id", "secret_access_key", "api_key", "client_id", "client_secret", "token")

def fields(provider):
    secrets = {name: getattr(provider, name, None) for name in SECRETS}
    return {"json": provider.to_json(), "repr": repr(provider)} | {
        name: value.get_secret_value() for name, value in secrets.items() if value is not None}

manager = ProvidersManager()
policy = retry.default_retry_policy()
again = ExceptionRetryPolicy.deserialize(policy.serialize())

def decided(error):
    decision = again.evaluate(error, 1, 3)
    delay = decision.retry_delay
    return [decision.action.value, None if delay is None else delay.total_seconds()]

def tested(kind, found):
    provider = getattr(sky, kind.provider_class)
    def answer(self):
        if isinstance(found, Exception):
            raise found
        return found
    account, provider.account = provider.account, answer
    try:
        return kind().test_connection()
    finally:
        provider.account = account

answer = json.loads(json.dumps({
    "hooks": {name: hook.hook_name for name, hook in manager.hooks.items() if hook and name.startswith("skyward")},
    "widgets": sorted(name for name in manager.connection_form_widgets if "skyward" in name),
    "providers": {kind.conn_type: fields(kind().get_conn()) for kind in KINDS},
    "aws_default": fields(hooks.AWSHook("aws_default").get_conn()),
    "ledger": hooks.SkywardHook().get_conn(),
    "ledger_test": hooks.SkywardHook().test_connection(),
    "no_ledger_test": hooks.SkywardHook("no_ledger").test_connection(),
    "wrong_key_test": hooks.SkywardHook("wrong_key").test_connection(),
    "missing_test": hooks.SkywardHook("there is none").test_connection(),
    "account_test": tested(hooks.RunPodHook, "acc-1"),
    "refused_test": tested(hooks.VerdaHook, sky.CredentialsError("refused")),
    "retries": {type(error).__name__: decided(error) for error in (
        sky.NoCapacity(), sky.QuotaExceeded(), sky.NodeLost(), sky.BudgetExceeded("none left"), sky.CredentialsError(),
        sky.BadRequest(), sky.NotPicklable("no"), ValueError())},
}))
"""


@pytest.fixture(scope="module")
def hooks(airflow: Airflow) -> dict[str, Any]:
    text = json.dumps(CONNECTIONS).replace("{home}", str(airflow.home))
    variables = {f"AIRFLOW_CONN_{name.upper()}": json.dumps(value) for name, value in json.loads(text).items()}
    return airflow.evaluate(f"CONNECTIONS = {json.dumps(variables)!r}\n{HOOKS}")


def test_each_connection_type_has_its_form_and_becomes_a_provider_that_shows_no_secret(hooks: dict[str, Any]) -> None:
    """Airflow loads our six hooks by the provider info. `aws_default` works without the Amazon provider, too."""
    names = {"skyward", "skyward_aws", "skyward_runpod", "skyward_vastai", "skyward_verda", "skyward_digitalocean"}
    assert set(hooks["hooks"]) == names
    assert "extra__skyward__ledger_url" in hooks["widgets"]
    assert {name for name in hooks["widgets"] if name.endswith("__region")} == {
        f"extra__{name}__region" for name in names - {"skyward"}
    }
    found, (amazon,) = hooks["providers"], [hooks["aws_default"]]
    aws, runpod, verda = (found[f"skyward_{name}"] for name in ("aws", "runpod", "verda"))
    assert (aws["access_key_id"], aws["secret_access_key"]) == ("AKIA", SECRET)
    assert aws["json"]["region"] == ["us-east-1", "eu-west-1"]
    assert (amazon["access_key_id"], amazon["secret_access_key"], amazon["json"]["region"]) == (
        "AKIB",
        SECRET,
        "eu-west-1",
    )
    assert runpod["api_key"] == found["skyward_vastai"]["api_key"] == found["skyward_digitalocean"]["token"] == SECRET
    assert runpod["json"]["cloud"] == "secure"
    assert (verda["client_id"], verda["client_secret"]) == ("id", SECRET)
    assert not [name for name, one in found.items() if SECRET in one["repr"] + json.dumps(one["json"])]


def test_the_test_of_a_connection_answers_with_a_reason(hooks: dict[str, Any]) -> None:
    """The test reads from the ledger or queries the account; a failure has the error's name and text."""
    assert hooks["ledger"].keys() == {"SKYWARD_LEDGER", "SKYWARD_SECRET_KEY"}
    assert hooks["ledger"]["SKYWARD_SECRET_KEY"] == SECRET_KEY
    assert hooks["ledger_test"] == [True, "the ledger answers"]
    assert hooks["no_ledger_test"][0] is False
    assert "LedgerError" in hooks["no_ledger_test"][1]
    assert hooks["wrong_key_test"][0] is False, "a task refuses it too"
    assert "BadRequest: SKYWARD_SECRET_KEY: key 1 is not 32 bytes in base64" in hooks["wrong_key_test"][1]
    assert SECRET not in hooks["wrong_key_test"][1]
    assert hooks["missing_test"][0] is False
    assert hooks["account_test"] == [True, "the credentials are valid for the account acc-1"]
    assert hooks["refused_test"] == [False, "CredentialsError: refused"]


def test_the_retry_policy_decides_by_the_error(hooks: dict[str, Any]) -> None:
    assert hooks["retries"] == {
        "NoCapacity": ["retry", 600.0],
        "QuotaExceeded": ["retry", 600.0],
        "NodeLost": ["retry", 0.0],
        "BudgetExceeded": ["fail", None],
        "CredentialsError": ["fail", None],
        "BadRequest": ["fail", None],
        "NotPicklable": ["fail", None],
        "ValueError": ["default", None],
    }
