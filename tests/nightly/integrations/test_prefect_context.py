"""`prefect_context=True`: Prefect's context in functions on nodes, against a real Prefect API."""

import asyncio
import contextlib
import os
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any
from uuid import UUID

import pytest

pytest.importorskip("prefect")

from tests.integrations import prefect_server  # noqa: I001 - before Prefect
from tests.integrations.prefect_server import artifacts, asked, logs, runner
from tests.waiting import wait_until

from prefect import flow, get_run_logger, runtime, task
from prefect.settings import PREFECT_API_KEY, temporary_settings

from prefect.artifacts import create_markdown_artifact
from prefect.concurrency.sync import concurrency
from prefect.variables import Variable
import skyward_core as sky
from prefect_skyward import skyward_options
from skyward_core.ledger.ledger import default_url
from tests.conftest import content_of


pytestmark = [pytest.mark.filterwarnings("default")]  # Prefect's own warnings are not our faults
KEY = "pnu_0123456789abcdef_of_a_test"
api = pytest.fixture(scope="module")(prefect_server.served)


@pytest.fixture
def events(api: str) -> Iterator[list[Any]]:
    yield from prefect_server.recorded()


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


def test_prefect_works_in_a_function_on_a_node(events: list[Any], tmp_path: Path, capfd: Any) -> None:
    """With one slot: the parent waits for its nested task runs."""
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

    runs = wait_until(lambda: len(all_runs := runs_of(flow_run_id)) == 9 and all_runs)
    nested = {
        id
        for id, run in runs.items()
        if [one["id"] for one in run["task_inputs"].get("__parents__", ())] == [task_run_id]
    }
    assert sorted(runs[id]["name"].rpartition("-")[0] for id in nested) == ["double"] * 5 + ["says"]
    assert wait_until(lambda: all(run["state_name"] == "Completed" for run in runs_of(flow_run_id).values()))

    records = wait_until(lambda: has_lines(found := logs(UUID(flow_run_id))) and found)
    own = [
        (one["level"], one["message"])
        for one in records
        if one["task_run_id"] == task_run_id
        and "[node" in one["message"]
        and "Still processing items" not in one["message"]  # Prefect's own, on a slow machine
    ]
    assert own == [
        (20, "[node 0] an info\n[node 0] of two lines"),
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


def test_nested_task_runs_end_with_their_parent(events: list[Any], tmp_path: Path) -> None:
    """If it fails they are interrupted, and its exception is the flow's."""
    ids: list[str] = []

    @flow(task_runner=runner(events, prefect_context=True, nodes=2, on_unfinished="cancel"))
    def ends() -> None:
        ids.append(runtime.flow_run.id)
        stopped = waits_for_its_child.submit(str(tmp_path / "patient"))
        failed = fails_beside_its_child.submit(str(tmp_path / "child"))
        failed.wait()
        with pytest.raises(ValueError, match="the parent has failed"):
            failed.result()
        wait_until((tmp_path / "patient").exists)
        assert stopped.state is None or not stopped.state.is_final()

    ends()
    states = wait_until(
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
def which() -> tuple[int, str]:
    return sky.instance_info().node, runtime.task_run.id


def test_coroutines_and_broadcasts_have_the_context(events: list[Any]) -> None:
    """By an option of one submit, too: then with a pool of its own, because its nodes know the API."""

    @flow(task_runner=runner(events))
    async def mixed() -> tuple[Any, ...]:
        with skyward_options(prefect_context=True):
            coroutine = awaits.submit(3)
            with skyward_options(nodes=2, broadcast=True):
                everywhere = which.submit()
        return str(coroutine.task_run_id), coroutine.result(), everywhere.result()

    task_run_id, coroutine, everywhere = asyncio.run(mixed())
    assert coroutine == (task_run_id, 6)
    assert [node for node, _ in everywhere] == [0, 1]
    assert len({task_run for _, task_run in everywhere}) == 1


@task
def submits() -> None:
    double.submit(1)


def test_without_the_context_a_submit_in_a_task_fails_at_once_and_says_so(events: list[Any]) -> None:
    @flow(task_runner=runner(events))
    def asks() -> None:
        submits.submit().result()

    with pytest.raises(sky.BadRequest, match="prefect_context=True"):
        asks()


@task
def own_name() -> str:
    return runtime.task_run.task_name


@task
def asks_the_api() -> str:
    return str(Variable.get("answer"))


def address_of_the_api() -> str | None:
    return os.environ.get("PREFECT_API_URL")


@pytest.mark.parametrize("opener", ["a script", "a flow"])
def test_a_script_and_flows_share_a_pool_with_a_name(opener: str, api: str, events: list[Any]) -> None:
    """In Prefect's context or not: the address of the API is of each call. Those of the script have none."""
    name = f"shared-{opener.replace(' ', '-')}"

    @contextlib.contextmanager
    def script() -> Iterator[None]:
        with sky.ComputePool(name=name, provider=sky.Local(price_per_hour=36.0), display="quiet") as pool:
            yield
            assert sky.compute(address_of_the_api)() >> pool is None

    @flow(task_runner=runner(events, name=name, prefect_context=True))
    def with_it() -> None:
        assert own_name.submit().result() == "own_name"
        with script():
            assert task(address_of_the_api).submit().result() == api

    @flow(task_runner=runner(events, name=name))
    def without() -> None:
        asks_the_api.submit().result()

    with script() if opener == "a script" else contextlib.nullcontext():
        with pytest.raises(sky.BadRequest, match="asks Prefect's API"):
            without()
        with_it()
