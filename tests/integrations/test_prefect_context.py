"""`prefect_context=True`: Prefect's context in functions on nodes, against a real Prefect API."""

import asyncio
import contextlib
import json
import logging
import os
import pickle
import sys
import threading
import time
from collections.abc import Iterator
from concurrent.futures import Future
from contextvars import copy_context
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast
from uuid import UUID, uuid4

import pytest

pytest.importorskip("prefect")

from tests.integrations import prefect_server  # noqa: I001 - before Prefect
from tests.integrations.prefect_server import artifacts, asked, logs, runner, wait_for

from prefect import flow, get_run_logger, runtime, task
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
from prefect_skyward import SkywardTaskRunner, on_skyward, skyward_options
from prefect_skyward.nested_runs import has_died, left_by
from prefect_skyward.node_objects import NO_API, packing, portable, without_prefect_s_api
from prefect_skyward.prefect_context import (
    in_prefect_s_context,
    keys_of_prefect,
    refuse_without_prefect,
    with_prefect_s_api,
)
from prefect_skyward.ui import RunLog
from skyward_core.ledger.ledger import default_url
from skyward_core.serialization import sources
from tests.conftest import content_of

pytestmark = [pytest.mark.filterwarnings("default")]  # Prefect's own warnings are not our faults
slow = pytest.mark.slow

KEY = "pnu_0123456789abcdef_of_a_test"
HERE = "http://127.0.0.1:4200/api"


api = pytest.fixture(scope="module")(prefect_server.served)


@pytest.fixture
def events(api: str) -> Iterator[list[Any]]:
    yield from prefect_server.recorded()


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


@task
def what_is_left() -> tuple[list[str], list[str]]:
    """The threads of the process of calls, and its connections."""
    files = list[str]()
    for number in os.listdir("/proc/self/fd"):
        with contextlib.suppress(FileNotFoundError):  # the listing's own
            files.append(os.readlink(f"/proc/self/fd/{number}"))
    return [thread.name for thread in threading.enumerate()], [file for file in files if file.startswith("socket")]


def runs_of(flow_run_id: str) -> dict[str, Any]:
    return {run["id"]: run for run in asked("/task_runs/filter", {"flow_runs": {"id": {"any_": [flow_run_id]}}})}


def has_lines(records: list[Any]) -> bool:
    """Whether the lines of all nested task runs have arrived: one each, and one of the engine."""
    return sum("doubling" in one["message"] for one in records) == 5 and any(
        "it says hey" in one["message"] for one in records
    )


@slow
def test_prefect_works_in_a_function_on_a_node(events: list[Any], tmp_path: Path, capfd: Any) -> None:
    """With one slot: the parent waits for its nested task runs. Each log record is there once, at its level, in the log
    of its run. The key is nowhere; no thread or connection of Prefect is left.
    """
    asked("/v2/concurrency_limits/", {"name": "limit-of-context", "limit": 1})

    @flow(task_runner=runner(events, prefect_context=True))
    def whole(a: int) -> tuple[Any, ...]:
        before = what_is_left.submit().result()
        found = parent.submit(7).result()
        return before, found, what_is_left.submit().result(), runtime.flow_run.name

    with temporary_settings({PREFECT_API_KEY: KEY}):
        before, found, after, name = whole(a=3)
    flow_run_id, task_run_id = found["flow run"][0], found["task run"][0]
    assert found["flow run"] == (flow_run_id, name, "whole")
    assert found["flow parameters"] == {"a": 3}
    assert found["task run"][1].startswith("parent-")
    assert found["task run"][2:] == (["of-parent"], 1)
    assert (found["parameters"], found["variable"]) == ({"x": 7}, 7)
    assert found["nested"] == [0, 2, 4, "hey", 8, 10]
    assert found["key"] == KEY[::-1]
    assert after == before
    assert [one["task_run_id"] for one in artifacts(flow_run_id) if one["key"] == "from-a-node"] == [task_run_id]

    runs = wait_for(lambda: len(all_runs := runs_of(flow_run_id)) == 9 and all_runs)
    nested = {
        id
        for id, run in runs.items()
        if [one["id"] for one in run["task_inputs"].get("__parents__", ())] == [task_run_id]
    }
    assert sorted(runs[id]["name"].rpartition("-")[0] for id in nested) == ["double"] * 5 + ["says"]
    assert wait_for(lambda: all(run["state_name"] == "Completed" for run in runs_of(flow_run_id).values()))

    records = wait_for(lambda: has_lines(found := logs(UUID(flow_run_id))) and found)
    own = [
        (one["level"], one["message"])
        for one in records
        if one["task_run_id"] == task_run_id
        and "[node" in one["message"]
        and "Still processing items" not in one["message"]  # Prefect's own, on a slow machine
    ]
    assert own == [
        (20, "[node 0] an info\nof two lines"),
        (40, "[node 0] an error"),
        (20, "[node 0] a print with ***"),
    ]
    for task_run in nested:
        of_run = [(one["level"], one["message"]) for one in records if one["task_run_id"] == task_run]
        is_double = runs[task_run]["name"].startswith("double")
        assert [level for level, _ in of_run] == [30 if is_double else 20, 20]
        assert ("doubling" if is_double else "it says hey") in of_run[0][1]
        assert of_run[1][1] == "[node 0] Finished in state Completed()"
    assert_nowhere(KEY, records, events, capfd.readouterr())


def assert_nowhere(key: str, records: list[Any], events: list[Any], output: Any) -> None:
    ledger = Path(default_url().removeprefix("sqlite:///"))
    written = b"".join(content_of(path) for path in ledger.parent.glob(f"{ledger.name}*"))
    assert b"PREFECT_API_KEY" in written, "the names of the secrets are in the spec that the ledger has"
    assert key.encode() not in written
    assert key not in f"{records}{events}{output}"


@task
def goes_on(mark: str, is_patient: bool) -> None:
    """Write a file, and go on for ever: in Python, or in one call that no exception can interrupt."""
    Path(mark).touch()
    while True:
        time.sleep(600 if is_patient else 0.02)


@task
def fails_beside_its_child(mark: str) -> None:
    goes_on.submit(mark, is_patient=False)
    while not Path(mark).exists():
        time.sleep(0.02)
    raise ValueError("the parent has failed")


@task
def waits_for_its_child(mark: str) -> None:
    goes_on.submit(mark, is_patient=True).wait()


@slow
def test_nested_task_runs_end_with_their_parent(events: list[Any], tmp_path: Path) -> None:
    """If it fails they are interrupted, and its exception is the flow's. If its process is stopped they end with that,
    and the flow's process gives them a final state.
    """
    ids: list[str] = []

    @flow(task_runner=runner(events, prefect_context=True, nodes=2, on_unfinished="cancel"))
    def ends() -> None:
        ids.append(runtime.flow_run.id)
        stopped = waits_for_its_child.submit(str(tmp_path / "patient"))
        failed = fails_beside_its_child.submit(str(tmp_path / "child"))
        failed.wait()
        with pytest.raises(ValueError, match="the parent has failed"):
            failed.result()
        wait_for((tmp_path / "patient").exists)
        assert stopped.state is None or not stopped.state.is_final()

    ends()
    states = wait_for(
        lambda: (
            len(runs := runs_of(ids[0])) == 4
            and all(run["state_type"] not in ("PENDING", "RUNNING") for run in runs.values())
            and sorted((run["name"].rpartition("-")[0], run["state_name"]) for run in runs.values())
        )
    )
    assert states == [
        ("fails_beside_its_child", "Failed"),
        ("goes_on", "Cancelled"),
        ("goes_on", "Crashed"),
        ("waits_for_its_child", "Cancelled"),
    ]


@task
async def awaits(x: int) -> tuple[str, int]:
    await asyncio.sleep(0)
    get_run_logger().info("from a coroutine")
    return runtime.task_run.id, double.submit(x).result()


@task
@on_skyward(prefect_context=True)
def yields(n: int) -> Iterator[str]:
    for number in range(n):
        yield f"{runtime.task_run.name} {double(number)}"


@task
@on_skyward(prefect_context=True)
async def yields_later(n: int) -> Any:
    for number in range(n):
        await asyncio.sleep(0)
        yield f"{runtime.task_run.name} {number}"


@task
def which() -> tuple[int, str]:
    return sky.instance_info().node, runtime.task_run.id


@pytest.mark.slow
@pytest.mark.long
def test_coroutines_generators_and_broadcasts_have_the_context(events: list[Any]) -> None:
    """By an option of one submit, too: then with a pool of its own, because its nodes know the API."""

    @flow(task_runner=runner(events))
    async def mixed() -> tuple[Any, ...]:
        with skyward_options(prefect_context=True):
            coroutine = awaits.submit(3)
            with skyward_options(nodes=2, broadcast=True):
                everywhere = which.submit()
            later = [item async for item in yields_later(2)]
        return (coroutine.task_run_id, coroutine.result()), everywhere.result(), list(yields(2)), later

    (task_run_id, coroutine), everywhere, items, later = asyncio.run(mixed())
    assert coroutine == (str(task_run_id), 6)
    assert [node for node, _ in everywhere] == [0, 1]
    assert len({task_run for _, task_run in everywhere}) == 1
    assert [item.rpartition(" ")[2] for item in items] == ["0", "2"]
    assert [item.rpartition(" ")[2] for item in later] == ["0", "1"]
    assert all(item.startswith("yields") for item in [*items, *later])


@task
def submits() -> None:
    double.submit(1)


@task
def reads_runtime() -> str:
    return runtime.flow_run.id


@pytest.mark.slow
@pytest.mark.long
@pytest.mark.parametrize("use", [submits, reads_runtime], ids=lambda use: use.name)
def test_without_the_context_each_fails_at_once_and_says_so(use: Any, events: list[Any]) -> None:
    @flow(task_runner=runner(events))
    def asks() -> None:
        use.submit().result()

    with pytest.raises(sky.BadRequest, match="prefect_context=True"):
        asks()
