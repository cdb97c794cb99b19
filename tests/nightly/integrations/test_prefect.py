"""`SkywardTaskRunner` with a real Prefect API (in a separate server process) and real pools on this machine."""

import asyncio
import logging
import os
import pickle
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any
from uuid import UUID

import pytest

from tests.system.integrations.test_prefect import (  # noqa: F401 - fixtures
    Gated,
    add,
    events,
    hang,
    pid,
)

pytest.importorskip("prefect")

from prefect import flow, get_run_logger, task
from prefect.blocks.system import Secret
from prefect.cache_policies import NO_CACHE
from prefect.client.orchestration import get_client
from prefect.client.schemas.filters import ArtifactFilter, ArtifactFilterFlowRunId, ArtifactFilterKey
from prefect.context import FlowRunContext
from pydantic import PrivateAttr

import skyward_core as sky
from prefect_skyward import SkywardTaskRunner
from skyward_core.ledger.ledger import Ledger, default_url
from skyward_core.ledger.rows import CostBy
from tests.integrations import prefect_server
from tests.integrations.prefect_server import (
    database_text,
    is_alive,
    logs,
    processes_of,
    runner,
    wait_for,
)

api = pytest.fixture(scope="module", autouse=True)(prefect_server.served)


pytestmark = [
    pytest.mark.filterwarnings("default"),  # Prefect's own warnings are not our faults
]


@task
async def slow_double(x: int) -> int:
    await asyncio.sleep(0.01)
    return 2 * x


@task
def nap(seconds: float) -> float:
    time.sleep(seconds)
    return seconds


@task(name="doze")
async def long_nap(seconds: float) -> float:
    await asyncio.sleep(seconds)
    return seconds


def test_the_ledger_has_the_flow_run_and_the_cost_of_each_task(events: list[Any]) -> None:
    """The pool belongs to the flow run before anything is rented; each task run has its share, and the rest belongs
    to the flow run.
    """

    @flow(name="naps", task_runner=runner(events))
    def naps() -> str:
        assert nap.map([0.5, 0.5]).result() == [0.5, 0.5]
        assert long_nap.submit(1.0).result() == 1.0
        return str(FlowRunContext.get().flow_run.id)

    run = naps()
    (started,) = (event for event in events if isinstance(event, sky.InfraCreating))
    assert started.work == sky.Work(system="prefect", workflow="naps", run=run)
    with Ledger(default_url()) as ledger:
        shares = ledger.shares(started.pool_id)
        by_task = {row.key: float(row.cost_usd) for row in ledger.cost_rows(CostBy.TASK, work=started.work)}
        ((by_run, bill),) = ((row.key, float(row.cost_usd)) for row in ledger.cost_rows(CostBy.RUN, work=started.work))
    assert sorted((work.task, work.attempt) for work in shares) == [("doze", "1"), ("nap", "1"), ("nap", "1")]
    assert len({work.task_run for work in shares}) == 3
    assert by_run == f"prefect:naps/{run}"
    assert set(by_task) == {"prefect:naps/nap", "prefect:naps/doze", "(no task)"}
    assert all(by_task[key] >= 1.0 * 36 / 3600 for key in by_task if key != "(no task)")
    assert sum(by_task.values()) == pytest.approx(bill)
    assert bill == pytest.approx(
        next(event.total_cost for event in events if isinstance(event, sky.CostFinal)), abs=1e-5
    )


def test_a_failing_flow_stops_its_calls_and_closes_its_pool(events: list[Any], tmp_path: Path) -> None:
    """When the flow's body raises, calls in flight are stopped rather than waited for, their runs are cancelled, and
    the machines are gone.
    """
    futures = []

    @flow(task_runner=runner(events))
    def broken() -> None:
        futures.append(hang.submit(tmp_path / "pid"))
        wait_for((tmp_path / "pid").exists)
        raise LookupError("the flow itself is wrong")

    started = time.monotonic()
    with pytest.raises(LookupError, match="the flow itself"):
        broken()
    # the call sleeps for 600 s; Prefect would swallow a test's own timeout here
    assert time.monotonic() - started < 60
    # it has ended; a run that was not waited for asks the server, with a client that it never closes
    futures[0].wait()
    assert futures[0].state.name == "Cancelled"
    assert not is_alive(int((tmp_path / "pid").read_text()))
    assert processes_of({event.pool_id for event in events if isinstance(event, sky.PoolReady)}) == []


def test_the_first_submit_does_not_wait_for_machines(events: list[Any]) -> None:
    """The flow goes on while they are rented; a task's timeout begins when they are ready.

    Sleeps: the call has to take longer than the task's limit.
    """
    provider = Gated()

    @task(timeout_seconds=2)
    def quick() -> str:
        return "done"

    @flow(task_runner=runner(events, provider=provider))
    def goes_on() -> str:
        future = quick.submit()
        assert not any(isinstance(event, sky.PoolReady) for event in events)
        time.sleep(2.5)  # longer than the task's own limit
        provider._may.set()
        return future.result()

    assert goes_on() == "done"


def test_an_asynchronous_flow_s_event_loop_is_not_blocked_by_the_first_submit(events: list[Any]) -> None:
    provider = Gated()

    @flow(task_runner=runner(events, provider=provider))
    async def goes_on() -> list[int]:
        futures = [slow_double.submit(4), add.submit(1, 1)]
        await asyncio.sleep(0)
        provider._may.set()
        return [await asyncio.to_thread(future.result) for future in futures]

    assert asyncio.run(goes_on()) == [8, 2]


class SoldOutAtFirst(sky.Local):
    """Has no machines at the first request."""

    _asked: list[int] = PrivateAttr(default_factory=list)

    def offers(self, want: Any) -> Any:
        self._asked.append(1)
        return [] if len(self._asked) == 1 else super().offers(want)


def test_if_a_pool_cannot_open_the_task_runs_fail_and_their_retries_try_again() -> None:
    """Without retries each of them fails with the reason; a retry opens the pool again."""
    stubborn = add.with_options(retries=1)

    @flow(task_runner=runner([], provider=SoldOutAtFirst()))
    def patient() -> tuple[Any, int]:
        first, second = add.submit(1, 1), stubborn.submit(2, 2)
        first.wait()
        return first.state, second.result()

    state, total = patient()
    assert total == 4
    assert state.is_failed()
    assert "NoCapacity" in state.message


def test_a_flow_that_is_tried_again_at_once_stops_the_calls_of_the_first_attempt(
    events: list[Any], tmp_path: Path
) -> None:
    bodies: list[int] = []

    @flow(task_runner=runner(events), retries=1)
    def second_time_lucky() -> bool:
        bodies.append(1)
        if len(bodies) == 1:
            hang.submit(tmp_path / "pid")
            wait_for((tmp_path / "pid").exists)
            raise LookupError("the first attempt")
        return is_alive(int((tmp_path / "pid").read_text()))

    assert second_time_lucky() is False


def test_a_flow_that_ends_well_finishes_its_calls(events: list[Any], tmp_path: Path) -> None:
    """A call that runs when the flow returns is waited for, as with Prefect's own runner.

    Sleeps: the call has to go on after the flow has returned.
    """
    go, began = tmp_path / "go", tmp_path / "began"
    futures = []

    @task(cache_policy=NO_CACHE)
    def wait_a_little() -> str:
        began.touch()
        while not go.exists():
            time.sleep(0.01)
        time.sleep(0.5)
        return "done"

    @flow(task_runner=runner(events))
    def hasty() -> None:
        futures.append(wait_a_little.submit())
        wait_for(began.exists)
        go.touch()

    hasty()
    assert futures[0].result() == "done"


class Clinging(sky.Local):
    """Terminates its machines, and goes on listing them."""

    _listed: dict[str, Any] = PrivateAttr(default_factory=dict)

    def instances(self, pool_id: str | None = None) -> Any:
        self._listed.update((instance.id, instance) for instance in super().instances(pool_id))
        return list(self._listed.values())


def test_unconfirmed_machines_are_reported(events: list[Any], monkeypatch: pytest.MonkeyPatch) -> None:
    """If closing cannot confirm that the machines are gone, the flow still succeeds; its log and its artifact name
    them.
    """
    monkeypatch.setattr("skyward_core.provisioning.teardown.DEADLINE_SECONDS", 0.5)
    ids = []

    pools: list[sky.ComputePool] = []

    @flow(task_runner=runner(events, provider=Clinging()))
    def left() -> int:
        from prefect.context import FlowRunContext
        from prefect.runtime import flow_run

        ids.append(UUID(flow_run.id))
        result = add.submit(1, 1).result()
        context = FlowRunContext.get()
        assert isinstance(context.task_runner, SkywardTaskRunner)
        pools.append(context.task_runner.pool)
        return result

    assert left() == 2
    assert pools[0].unconfirmed is not None
    assert wait_for(lambda: [r for r in logs(ids[0]) if r["level"] == 40 and "NOT CONFIRMED GONE" in r["message"]])
    (machine,) = pools[0].unconfirmed.ids
    with get_client(sync_client=True) as client:
        (artifact,) = client.read_artifacts(
            artifact_filter=ArtifactFilter(
                flow_run_id=ArtifactFilterFlowRunId(any_=ids), key=ArtifactFilterKey(any_=["skyward-cost"])
            )
        )
    assert f"| **Not confirmed gone** | {machine}" in artifact.data
    assert artifact.description.endswith("NOT CONFIRMED GONE")


@task(cache_policy=NO_CACHE)
def log_at_each_level(number: int) -> int:
    logger = get_run_logger()
    for level in ("debug", "info", "warning", "error"):
        getattr(logger, level)("%s by %d", level, number)
    logging.getLogger("of.a.library").critical("critical by %d", number)
    print(f"print by {number}")
    info = sky.instance_info()
    assert info is not None
    return info.node


@pytest.fixture
def debug_records_of_nodes() -> Iterator[None]:
    """Let the logs of task runs have debug records too, but of Prefect's own only those above."""

    def is_wanted(record: logging.LogRecord) -> bool:
        return record.levelno > logging.DEBUG or record.getMessage().startswith("[node ")

    logger = logging.getLogger("prefect.task_runs")
    before = logger.level
    logger.setLevel(logging.DEBUG)
    logger.addFilter(is_wanted)
    yield
    logger.removeFilter(is_wanted)
    logger.setLevel(before)


@pytest.mark.usefixtures("debug_records_of_nodes")
def test_every_log_line_of_200_tasks_on_two_nodes_is_in_the_api_once_at_its_level(events: list[Any]) -> None:
    """Of the run's logger at each level, of another logger, and printed: in the log of the task run, with its node."""
    nodes: dict[str, tuple[int, int]] = {}
    levels = {"debug": 10, "info": 20, "warning": 30, "error": 40, "critical": 50, "print": 20}

    @flow(task_runner=runner(events, nodes=2))
    def talk() -> None:
        futures = log_at_each_level.map(range(200))
        nodes.update((str(one.task_run_id), (number, one.result())) for number, one in enumerate(futures))

    flow_run_id = talk(return_state=True).state_details.flow_run_id

    def found() -> list[tuple[str, int, str]]:
        return [
            (record["task_run_id"], record["level"], record["message"])
            for record in logs(flow_run_id)
            if "[node " in record["message"]
        ]

    expected = [
        (run, level, f"[node {node}] {name} by {number}")
        for run, (number, node) in nodes.items()
        for name, level in levels.items()
    ]
    assert {node for _, node in nodes.values()} == {0, 1}
    assert len(expected) == 1200
    assert sorted(wait_for(lambda: len(lines := found()) >= len(expected) and lines)) == sorted(expected)


@task
def set_variable() -> None:
    from prefect.variables import Variable

    Variable.set("mine", "1", overwrite=True)


@task
async def limit() -> None:
    from prefect.concurrency.asyncio import concurrency

    async with concurrency("mine", occupy=1):
        pass


@task
def publish() -> None:
    from prefect.artifacts import create_markdown_artifact

    create_markdown_artifact("hello", key="mine")


def test_prefect_s_api_in_a_task_fails_at_once_and_starts_no_server(events: list[Any], tmp_path: Path) -> None:
    """Prefect's client would start one on the node, with a database in the home directory."""

    @flow(task_runner=runner(events, env={"HOME": str(tmp_path)}))
    def asks() -> None:
        for use in (set_variable, limit, publish):
            with pytest.raises(sky.BadRequest, match="which nodes have no way to"):
                use.submit().result()

    asks()
    assert not [path for path in tmp_path.rglob("*") if path.suffix == ".db"]


# ── secrets ──────────────────────────────────────────────────────────────────────────────────────────────────────────


@task
def reads_secrets() -> list[str]:
    """Print them, and return them backwards."""
    print("they are", os.environ["HF_TOKEN"], os.environ["OTHER"], os.environ["USER_TOKEN"])
    return [os.environ[name][::-1] for name in ("HF_TOKEN", "OTHER", "USER_TOKEN")]


def test_secrets_come_from_blocks_when_the_pool_opens(
    events: list[Any], monkeypatch: pytest.MonkeyPatch, tmp_path_factory: pytest.TempPathFactory
) -> None:
    """By name, by the block itself or from the environment; the run's log masks them, and the server's database has
    none in plain text.
    """
    Secret(value="block-0123456789").save("hf-token", overwrite=True)
    Secret(value={"token": "part-0123456789"}).save("user", overwrite=True)
    monkeypatch.setenv("OF_THE_WORKER", "env-0123456789")
    secrets = {
        "HF_TOKEN": Secret.load("hf-token"),
        "OTHER": sky.Secret.from_env("OF_THE_WORKER"),
        "USER_TOKEN": sky.Secret.from_store("user", "token"),
    }
    made = runner(events, secrets=secrets)
    assert made == runner(events, secrets={**secrets, "HF_TOKEN": sky.Secret.from_store("hf-token")})

    @flow(task_runner=made)
    def reading() -> tuple[Any, UUID]:
        context = FlowRunContext.get()
        assert context is not None
        assert context.flow_run is not None
        return reads_secrets.submit().result(), context.flow_run.id

    read, flow_run_id = reading()
    values = ["block-0123456789", "env-0123456789", "part-0123456789"]
    assert read == [value[::-1] for value in values]
    messages = wait_for(lambda: [text for record in logs(flow_run_id) if "they are" in (text := record["message"])])
    assert "they are *** *** ***" in messages[0]
    spoken = [
        database_text(tmp_path_factory),
        repr(made.spec),
        made.spec.model_dump_json(),
        repr(events),
        repr(pickle.dumps(made)),
        str([record["message"] for record in logs(flow_run_id)]),
    ]
    assert [text[:100] for text in spoken for value in values if value in text] == []
