"""`prefect_context=True`: Prefect's context in functions on nodes, against a real Prefect API."""

import json
import logging
import os
import pickle
import sys
from concurrent.futures import Future
from contextvars import copy_context
from dataclasses import replace
from types import SimpleNamespace
from typing import Any, cast
from uuid import UUID, uuid4

import pytest

pytest.importorskip("prefect")


from prefect import get_run_logger, runtime, task
from prefect.artifacts import create_markdown_artifact
from prefect.concurrency.sync import concurrency
from prefect.settings import (
    PREFECT_API_AUTH_STRING,
    PREFECT_API_KEY,
    PREFECT_API_URL,
    PREFECT_LOGGING_TO_API_ENABLED,
    temporary_settings,
)
from prefect.task_runners import ThreadPoolTaskRunner
from prefect.variables import Variable

import skyward_core as sky
from prefect_skyward import SkywardTaskRunner, on_skyward
from prefect_skyward.nested_runs import has_died, left_by
from prefect_skyward.node_objects import NO_API, packing, portable, without_prefect_s_api
from prefect_skyward.prefect_context import (
    in_prefect_s_context,
    keys_of_prefect,
    refuse_without_prefect,
    with_prefect_s_api,
)
from prefect_skyward.ui import RunLog
from skyward_core.serialization import sources

pytestmark = [pytest.mark.filterwarnings("default")]  # Prefect's own warnings are not our faults

KEY = "pnu_0123456789abcdef_of_a_test"
HERE = "http://127.0.0.1:4200/api"


def local(**keywords: Any) -> sky.PoolSpec:
    return sky.PoolSpec.of(provider=sky.Local(), **keywords)


# ── what a pool gets, and what is refused before money is spent ──────────────────────────────────────────────────────


def test_the_spec_has_the_address_and_the_names_of_the_keys_and_no_value() -> None:
    """The values are read when the pool opens."""
    login = "me:open-sesame"
    with temporary_settings({PREFECT_API_URL: HERE, PREFECT_API_KEY: KEY, PREFECT_API_AUTH_STRING: login}):
        spec = with_prefect_s_api(local(env={"A": "b"}, secrets=("HF_TOKEN",)))
        assert keys_of_prefect(spec) == {"PREFECT_API_KEY": KEY, "PREFECT_API_AUTH_STRING": login}
    assert spec.env == {"A": "b", "PREFECT_API_URL": HERE}
    assert set(spec.secrets or {}) == {"HF_TOKEN", "PREFECT_API_KEY", "PREFECT_API_AUTH_STRING"}
    shown = f"{spec!r}{spec.model_dump_json()}{pickle.dumps(spec)!r}"
    assert KEY not in shown
    assert login not in shown


@pytest.mark.parametrize("in_context", [False, True])
def test_variables_of_the_settings_reach_the_nodes(in_context: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """The address of Prefect's API is added to them, and does not replace them. Those of a spec are instead of them."""
    monkeypatch.setenv("SKYWARD_ENV", '{"GREETING": "hello"}')
    with temporary_settings({PREFECT_API_URL: HERE}):
        specs = [local(), local(env={"A": "b"})]
        changed = [with_prefect_s_api(spec) if in_context else without_prefect_s_api(spec) for spec in specs]
    address = HERE if in_context else NO_API
    assert [spec.env for spec in changed] == [
        {"GREETING": "hello", "PREFECT_API_URL": address},
        {"A": "b", "PREFECT_API_URL": address},
    ]


def test_an_address_with_a_login_is_a_secret() -> None:
    with temporary_settings({PREFECT_API_URL: "https://me:word-of-mine@prefect.example/api"}):
        spec = with_prefect_s_api(local())
        assert keys_of_prefect(spec) == {"PREFECT_API_URL": "https://me:word-of-mine@prefect.example/api"}
    assert "word-of-mine" not in f"{spec!r}{spec.model_dump_json()}{pickle.dumps(spec)!r}"


def test_what_the_user_gives_has_precedence() -> None:
    """An address that only the nodes see, a key of their own."""
    with temporary_settings({PREFECT_API_URL: HERE, PREFECT_API_KEY: KEY}):
        given = local(
            env={"PREFECT_API_URL": "http://10.0.0.5/api"}, secrets={"PREFECT_API_KEY": sky.Secret.from_env("X")}
        )
        spec = with_prefect_s_api(given)
        assert keys_of_prefect(spec) == {}
    assert spec.env == {"PREFECT_API_URL": "http://10.0.0.5/api"}
    assert spec.secrets == given.secrets


@pytest.mark.parametrize(
    ("image", "is_refused"),
    [
        (sky.Image(), True),
        (sky.Image(pip=["torch", "prefectish"]), True),
        (sky.Image(pip=["torch", "Prefect>=3.6"]), False),
        (sky.Image(pip=["prefect-dask"]), False),
        (sky.Image(lock=f"prefect==3.7.7 --hash=sha256:{'0' * 64}\n"), False),
    ],
    ids=["bare", "others", "prefect", "collection", "lock"],
)
def test_nodes_without_prefect_are_refused_where_the_runner_is_made(image: sky.Image, is_refused: bool) -> None:
    """On this machine a bare image has the interpreter of the flow, and so its Prefect."""
    keywords: dict[str, Any] = {"provider": sky.AWS(region="us-east-1"), "image": image, "prefect_context": True}
    if is_refused:
        with pytest.raises(sky.BadRequest, match=r'Image\(pip=\["prefect==3'):
            SkywardTaskRunner(**keywords)
    else:
        SkywardTaskRunner(**keywords)
    refuse_without_prefect(local())


def test_an_api_that_nodes_cannot_reach_is_refused_before_money_is_spent() -> None:
    far = sky.PoolSpec.of(provider=sky.AWS(region="us-east-1"), image=sky.Image(pip=["prefect"]))
    with temporary_settings({PREFECT_API_URL: HERE}):
        with pytest.raises(sky.BadRequest, match="an address of this machine only"):
            with_prefect_s_api(far)
        assert with_prefect_s_api(far.with_(env={"PREFECT_API_URL": HERE})).env == {"PREFECT_API_URL": HERE}
    with temporary_settings({PREFECT_API_URL: "https://prefect.example/api"}):
        assert with_prefect_s_api(far).env == {"PREFECT_API_URL": "https://prefect.example/api"}
    with (
        temporary_settings(restore_defaults={PREFECT_API_URL}),
        pytest.raises(sky.BadRequest, match="outside of a flow"),
    ):
        with_prefect_s_api(local())


def test_a_runner_keeps_the_keyword_and_holds_no_key() -> None:
    with temporary_settings({PREFECT_API_URL: HERE, PREFECT_API_KEY: KEY}):
        one = SkywardTaskRunner(provider=sky.Local(), prefect_context=True)
        assert one.duplicate() == one != SkywardTaskRunner(provider=sky.Local())
        assert pickle.loads(pickle.dumps(one)) == one
        assert KEY.encode() not in pickle.dumps(one)


# ── what travels ─────────────────────────────────────────────────────────────────────────────────────────────────────


def test_a_node_with_another_prefect_says_what_to_install(monkeypatch: pytest.MonkeyPatch) -> None:
    """The function travels by value: nodes have no `prefect_skyward`."""
    monkeypatch.setattr("prefect_skyward.prefect_context.version", lambda _: "99.1.0")
    data = sources.pack(in_prefect_s_context(len)).data
    for name in [name for name in sys.modules if name.startswith("prefect_skyward")]:
        monkeypatch.setitem(sys.modules, name, None)
    with pytest.raises(sky.BadRequest, match=r'has Prefect 99.1.0, and the node has 3.*pip=\["prefect==99.1.0"'):
        sources.unpack(data).value("{}", (), {})


def test_a_function_of_a_group_stays_one() -> None:
    def train() -> None: ...

    train.forms_group = True
    wrapped = cast(Any, in_prefect_s_context(train))
    assert (wrapped.forms_group, wrapped.__name__) == (True, "train")


def test_prefect_s_objects_travel_as_themselves_in_its_context_only() -> None:
    @task
    @on_skyward(nodes=2)
    def child() -> int:
        return 1

    plain = portable(child)
    assert plain() == 1
    assert portable(get_run_logger) is not NotImplemented
    with packing(in_prefect_s_context=True):
        assert portable(child) is NotImplemented
        assert portable(child.fn) is plain
        assert portable(get_run_logger) is NotImplemented
        assert portable(runtime) is NotImplemented
        assert type(portable(SkywardTaskRunner(provider=sky.Local()))) is ThreadPoolTaskRunner
    with pytest.raises(sky.BadRequest, match="prefect_context=True"):
        portable(runtime).flow_run


def test_a_line_goes_to_the_log_of_the_run_that_it_names(caplog: pytest.LogCaptureFixture) -> None:
    """A line that only begins so is left as it is, and so is one of a call that has no such runs."""
    names = {"task_run_id": "t-1", "flow_run_id": "f-1", "task_run_name": "child-0"}
    lines = [f"[task run {json.dumps(names)}] two\nlines", "[task run {no json}] text", "text"]
    plain = RunLog(logging.getLogger("of the call"), copy_context())
    with caplog.at_level(logging.INFO), temporary_settings({PREFECT_LOGGING_TO_API_ENABLED: False}):
        for line in lines:
            replace(plain, has_nested_runs=True).say_line(
                sky.LogLine(0, "local-0", line, 0.0, "call-1", level=logging.WARNING)
            )
        plain.say_line(sky.LogLine(0, "local-0", lines[0], 0.0, "call-1"))
    assert [(one.name, one.levelname, one.message) for one in caplog.records] == [
        ("prefect.task_runs", "WARNING", "[node 0] two\nlines"),
        ("of the call", "WARNING", "[node 0] [task run {no json}] text"),
        ("of the call", "WARNING", "[node 0] text"),
        ("of the call", "INFO", f"[node 0] {lines[0]}"),
    ]
    assert {name: getattr(caplog.records[0], name) for name in names} == names


def test_task_runs_below_a_dead_call_are_found() -> None:
    """Also those below them; those of other calls are left alone."""

    def run(parent: UUID) -> Any:
        return SimpleNamespace(id=uuid4(), task_inputs={"__parents__": [SimpleNamespace(id=parent)]})

    dead, stopped, other = uuid4(), uuid4(), uuid4()
    child = run(dead)
    grandchild, of_stopped = run(child.id), run(stopped)
    runs = [grandchild, child, of_stopped, run(other), SimpleNamespace(id=uuid4(), task_inputs={})]
    assert left_by({str(dead): False, str(stopped): True}, runs) == {
        child.id: False,
        grandchild.id: False,
        of_stopped.id: True,
    }


@pytest.mark.parametrize(
    ("error", "died"),
    [(None, False), (ValueError("x"), False), (sky.CallCrashed("x"), True), (sky.NodeLost("x"), True)],
    ids=["returned", "raised", "crashed", "lost"],
)
def test_a_call_has_died_if_its_process_has(error: Exception | None, died: bool) -> None:
    future = Future[Any]()
    future.set_exception(error) if error is not None else future.set_result(1)
    assert has_died(future) == died


# ── on a node ────────────────────────────────────────────────────────────────────────────────────────────────────────


@task
def double(x: int) -> int:
    get_run_logger().warning("doubling %s", x)
    return 2 * x


@task(log_prints=True)
def says(word: str) -> str:
    print("it says", word)
    return word


@task(tags=["of-parent"])
def parent(x: int) -> dict[str, Any]:
    get_run_logger().info("an info\nof two lines")
    get_run_logger().error("an error")
    print("a print with", os.environ["PREFECT_API_KEY"])
    Variable.set("answer", x, overwrite=True)
    with concurrency("limit-of-context", occupy=1):
        create_markdown_artifact("hello", key="from-a-node")
    nested = [double.submit(number) for number in range(3)]
    return {
        "flow run": (runtime.flow_run.id, runtime.flow_run.name, runtime.flow_run.flow_name),
        "flow parameters": runtime.flow_run.parameters,
        "task run": (runtime.task_run.id, runtime.task_run.name, runtime.task_run.tags, runtime.task_run.run_count),
        "parameters": runtime.task_run.parameters,
        "variable": Variable.get("answer"),
        "nested": [future.result() for future in nested] + [says("hey")] + double.map([4, 5]).result(),
        "key": os.environ["PREFECT_API_KEY"][::-1],
    }
