"""`SkywardTaskRunner` with a real Prefect API (in a separate server process) and real pools on this machine."""

import asyncio
import json
import logging
import os
import pickle
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from concurrent.futures import Future
from pathlib import Path
from typing import Any
from uuid import UUID

import cloudpickle
import pytest

pytest.importorskip("prefect")

from tests.integrations import prefect_server  # noqa: I001 - before Prefect
from tests.integrations.prefect_server import (
    database_text,
    deployment_named,
    is_alive,
    logs,
    processes_of,
    runner,
    wait_for,
)

from prefect import flow, get_run_logger, task
from prefect.blocks.system import Secret
from prefect.cache_policies import NO_CACHE
from prefect.client.orchestration import get_client
from prefect.client.schemas.filters import ArtifactFilter, ArtifactFilterFlowRunId, ArtifactFilterKey
from prefect.context import FlowRunContext
from prefect.states import Cancelling
from pydantic import PrivateAttr

import skyward_core as sky
from prefect_skyward import SkywardTaskRunner, cost_so_far
from prefect_skyward.secrets import values_of
from prefect_skyward.ui import RunLog, RunLogs
from skyward_core.ledger.ledger import Ledger, default_url
from skyward_core.ledger.rows import CostBy

pytestmark = [
    pytest.mark.slow,  # starts a server
    pytest.mark.filterwarnings("default"),  # Prefect's own warnings are not our faults
]

api = pytest.fixture(scope="module", autouse=True)(prefect_server.served)


@pytest.fixture
def events() -> Iterator[list[Any]]:
    """The events of a test's pools; after the test none of their processes is left."""
    recorded: list[Any] = []
    yield recorded
    pools = {event.pool_id for event in recorded if isinstance(event, sky.PoolReady)}
    assert sum(isinstance(event, sky.CostFinal) for event in recorded) == len(pools)
    assert processes_of(pools) == []


# ── calls ────────────────────────────────────────────────────────────────────────────────────────────────────────────


@task
def pid() -> int:
    return os.getpid()


@task
def add(a: int, b: int) -> int:
    return a + b


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


@pytest.mark.slow
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


def test_a_direct_call_runs_here_and_opens_no_pool(events: list[Any]) -> None:
    """`task(x)` never reaches a task runner: it runs in the flow's process, and a flow without a submit rents
    nothing.
    """

    @flow(task_runner=runner(events))
    def direct() -> tuple[int, float]:
        return pid(), cost_so_far()

    assert direct() == (os.getpid(), 0.0)
    assert events == []


# ── failures ─────────────────────────────────────────────────────────────────────────────────────────────────────────


@task(cache_policy=NO_CACHE)
def hang(path: Path) -> None:
    path.with_suffix(".new").write_text(str(os.getpid()))
    path.with_suffix(".new").rename(path)  # atomically, because it may be stopped at any moment
    time.sleep(600)


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


def test_max_cost_is_a_keyword_like_others_and_exceeding_it_fails_with_advice() -> None:
    """`max_cost` and `budget` reach the pool. If the first minute alone costs more, the flow fails, the error says
    what to do, and nothing is rented.
    """
    events: list[Any] = []
    assert SkywardTaskRunner(max_cost=2.5, budget="team-a").spec == sky.PoolSpec.of(max_cost=2.5, budget="team-a")

    @flow(task_runner=runner(events, max_cost=0.0001))
    def poor() -> None:
        add.submit(1, 1).result()

    state = poor(return_state=True)
    assert state.is_failed()
    assert "BudgetExceeded" in state.message
    assert "max_cost" in state.message
    assert not any(isinstance(event, sky.InstanceLaunching) for event in events)


class Gated(sky.Local):
    """Launches only after a signal of the test."""

    _may: threading.Event = PrivateAttr(default_factory=threading.Event)

    def launch(self, *args: Any) -> Any:
        assert self._may.wait(60), "nothing let it launch"
        return super().launch(*args)


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


def test_a_flow_that_fails_while_its_pool_opens_ends_the_opening() -> None:
    provider = Gated()
    futures, recorded = [], list[Any]()

    @flow(task_runner=runner(recorded, provider=provider))
    def broken() -> None:
        futures.append(add.submit(1, 1))
        threading.Timer(1.0, provider._may.set).start()
        raise LookupError("the flow itself is wrong")

    with pytest.raises(LookupError, match="the flow itself"):
        broken()
    futures[0].wait()
    assert futures[0].state.name == "Cancelled"
    assert not any(isinstance(event, sky.PoolReady) for event in recorded)
    (pool_id,) = {event.pool_id for event in recorded if isinstance(event, sky.InfraCreating)}
    assert provider.instances(pool_id) == []


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


def test_machines_are_terminated_before_a_flow_is_tried_again(events: list[Any], tmp_path: Path) -> None:
    """Prefect sleeps for `retry_delay_seconds` before it leaves the runner: nothing is billed meanwhile, and calls
    of the failed attempt are stopped.
    """
    bodies: list[float] = []
    finals: list[float] = []
    ids = []

    def keep(event: Any) -> None:
        events.append(event)
        if isinstance(event, sky.CostFinal):
            finals.append(time.monotonic())

    @flow(task_runner=runner(events, on_event=keep), retries=1, retry_delay_seconds=4)
    def second_time_lucky() -> int:
        from prefect.runtime import flow_run

        ids.append(UUID(flow_run.id))
        bodies.append(time.monotonic())
        if len(bodies) == 1:
            hang.submit(tmp_path / "pid")
            wait_for((tmp_path / "pid").exists)
            raise LookupError("the first attempt")
        assert not is_alive(int((tmp_path / "pid").read_text()))
        return add.submit(1, 2).result()

    assert second_time_lucky() == 3
    assert len(finals) == 2
    assert finals[0] < bodies[1] - 1, "the machines were kept through the delay"
    assert wait_for(lambda: [r for r in logs(ids[0]) if "machines of this attempt are given back" in r["message"]])


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


# ── what the UI shows ────────────────────────────────────────────────────────────────────────────────────────────────


@task
def chatter(name: str, lines: int) -> None:
    for i in range(lines):
        print(f"{name} {i}")


def test_every_line_of_a_task_is_in_its_log(events: list[Any]) -> None:
    """Each of 200 lines of each of three tasks arrives, once and in order, in the log of its own task run; the flow
    run's log has the events of the machines.
    """
    names = {}

    @flow(task_runner=runner(events, nodes=2))
    def talk() -> None:
        for name in "abc":
            future = chatter.submit(name, 200)
            names[str(future.task_run_id)] = name
        for future in chatter.map(["short"] * 3, [1, 1, 1]):
            future.wait()

    flow_run_id = talk(return_state=True).state_details.flow_run_id

    def lines() -> dict[str, list[str]]:
        found: dict[str, list[str]] = {}
        for record in logs(flow_run_id):
            if record["task_run_id"] in names and "[node" in record["message"]:
                assert record["level"] == 20
                found.setdefault(names[record["task_run_id"]], []).append(record["message"].partition("] ")[2])
        return found

    def news() -> list[str]:
        return [record["message"] for record in logs(flow_run_id) if record["task_run_id"] is None]

    # Prefect sends logs in batches from a thread of its own: the calls' lines and the pool's last line may come in
    # different ones.
    wait_for(lambda: sum(map(len, lines().values())) >= 600 and any("done: " in message for message in news()))
    assert lines() == {name: [f"{name} {i}" for i in range(200)] for name in "abc"}
    of_flow = news()
    assert any("launching 2 x local on local" in message for message in of_flow)
    assert any("is ready after" in message for message in of_flow)
    assert any("done: " in message for message in of_flow)
    assert not any("[node" in message for message in of_flow)


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


@pytest.mark.long
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


def test_a_line_that_comes_before_its_call_is_registered_is_not_lost() -> None:
    """A node may be faster than `submit`: such a line waits, and goes to the task run; a line of no call goes to the
    flow run.
    """

    @task
    def quick() -> str:
        from prefect.runtime import task_run

        logs, future = RunLogs(RunLog.of_flow()), Future()
        future.call_id = "call-1"

        def submit() -> Future[Any]:
            for call_id in ("call-1", "call-2", None):
                logs(sky.LogLine(0, "local-0", f"early line of {call_id}", 0.0, call_id))
            return future

        logs.follow_all(lambda: [submit()])
        logs(sky.LogLine(0, "local-0", "later line", 0.0, "call-1"))
        return task_run.id

    @flow
    def waiting() -> str:
        return quick()

    state = waiting(return_state=True)
    found = wait_for(
        lambda: (
            len(lines := [r for r in logs(state.state_details.flow_run_id) if "[node 0]" in r["message"]]) == 4
            and lines
        )
    )
    assert {(record["message"], record["task_run_id"]) for record in found} == {
        ("[node 0] early line of call-1", state.result()),
        ("[node 0] later line", state.result()),
        ("[node 0] early line of call-2", None),
        ("[node 0] early line of None", None),
    }


# ── secrets ──────────────────────────────────────────────────────────────────────────────────────────────────────────


@task
def reads_secrets() -> list[str]:
    """Print them, and return them backwards."""
    print("they are", os.environ["HF_TOKEN"], os.environ["OTHER"], os.environ["USER_TOKEN"])
    return [os.environ[name][::-1] for name in ("HF_TOKEN", "OTHER", "USER_TOKEN")]


@pytest.mark.slow
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


def test_a_missing_block_is_named() -> None:
    """A block that was not saved when the runner is made, or that does not exist when its pool opens; nothing is
    rented.
    """
    with pytest.raises(sky.BadRequest, match="HF_TOKEN"):
        SkywardTaskRunner(secrets={"HF_TOKEN": Secret(value="block-0123456789")})
    with pytest.raises(sky.BadRequest, match="the secret HF_TOKEN is to be Prefect's Secret block 'no-such-block'"):
        values_of(sky.PoolSpec.of(secrets={"HF_TOKEN": sky.Secret.from_store("no-such-block")}))


# ── the runner as a value ────────────────────────────────────────────────────────────────────────────────────────────


def test_runners_compare_by_their_spec() -> None:
    """Equality, `duplicate` and pickling use only the spec."""
    one = SkywardTaskRunner(nodes=2, provider=sky.Local(price_per_hour=1.2))
    assert one == SkywardTaskRunner(spec=sky.PoolSpec.of(nodes=2, provider=sky.Local(price_per_hour=1.2)))
    assert one != SkywardTaskRunner(nodes=3, provider=sky.Local(price_per_hour=1.2))
    assert one != "something else"
    assert one.duplicate() == one
    assert one.duplicate() is not one
    assert pickle.loads(pickle.dumps(one)) == one
    assert cloudpickle.loads(cloudpickle.dumps(one)).spec == one.spec
    assert one.name == "skyward"


def test_a_started_runner_can_be_compared_and_pickled() -> None:
    """Threads and pool of a runner do not travel with it, and do not count when it is compared."""
    with SkywardTaskRunner(nodes=2).duplicate() as live:
        assert live == SkywardTaskRunner(nodes=2)
        assert pickle.loads(pickle.dumps(live)) == live


def test_the_class_without_arguments_is_a_runner() -> None:
    """`@flow(task_runner=SkywardTaskRunner)` is a pool of one node at the provider of the settings."""

    @flow(task_runner=SkywardTaskRunner)
    def nothing() -> None: ...

    assert nothing.task_runner == SkywardTaskRunner()


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"node": 2}, "did you mean 'nodes'"),
        ({"nodes": 0}, "nodes=0"),
        ({"memory": "32 gigs"}, "memory"),
        ({"image": sky.Image(python="3.1")}, "same minor version"),
        ({"provider": sky.Local(), "image": sky.Image(apt=["ffmpeg"])}, "apt"),
        ({"spec": sky.PoolSpec.of(nodes=2), "nodes": 3}, "not both"),
    ],
)
def test_wrong_keywords_are_refused_at_construction(options: dict[str, Any], message: str) -> None:
    """A flow file with a wrong keyword fails when it is imported, and the error says what to write instead."""
    with pytest.raises(sky.BadRequest, match=message):
        SkywardTaskRunner(**options)


def test_submitting_to_a_runner_that_is_not_started_is_an_error() -> None:
    """Outside a flow and a `with` block it has no pool."""
    with pytest.raises(RuntimeError, match="not started"):
        SkywardTaskRunner().submit(add, {"a": 1, "b": 2})


def test_importing_the_package_is_light() -> None:
    """Prefect's server imports each collection: ours loads neither Prefect nor pydantic until a name is used."""
    code = "import sys, prefect_skyward; print([m for m in ('prefect', 'pydantic', 'distributed') if m in sys.modules])"
    assert (
        subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True).stdout.strip() == "[]"
    )


# ── a run that is cancelled ──────────────────────────────────────────────────────────────────────────────────────────

SERVED = """
import json, os, sys, time
from pathlib import Path
from prefect import flow, task
from prefect_skyward import SkywardTaskRunner
import skyward_core as sky

@task
def hang(path: str) -> None:
    Path(path).write_text(json.dumps({"pid": os.getpid(), "pool": os.environ["SKYWARD_POOL_ID"]}))
    time.sleep(600)

@flow(task_runner=SkywardTaskRunner(provider=sky.Local()))
def patient(path: str) -> None:
    hang.submit(path).result()

if __name__ == "__main__":
    patient.serve("patient", print_starting_message=False, limit=1, pause_on_shutdown=False)
"""


def test_a_cancelled_run_leaves_nothing(api: str, tmp_path: Path) -> None:
    """Cancelling a served run stops the call, closes the pool and ends both runs as Cancelled."""
    (tmp_path / "served.py").write_text(SERVED)
    marker = tmp_path / "began"
    environ = {**os.environ, "PREFECT_API_URL": api}
    with (
        subprocess.Popen([sys.executable, "served.py"], cwd=tmp_path, env=environ) as server,
        get_client(sync_client=True) as client,
    ):
        try:
            deployment = wait_for(lambda: deployment_named("patient"), 60)
            run = client.create_flow_run_from_deployment(deployment.id, parameters={"path": str(marker)})
            wait_for(lambda: marker.exists() and marker.read_text(), 90)
            began = json.loads(marker.read_text())
            client.set_flow_run_state(run.id, Cancelling())
            wait_for(lambda: client.read_flow_run(run.id).state.name == "Cancelled", 60)
            wait_for(lambda: processes_of({began["pool"]}) == [])
            assert not is_alive(began["pid"])
            records = wait_for(lambda: [r["message"] for r in logs(run.id) if "done: " in r["message"]])
            assert records
        finally:
            server.send_signal(signal.SIGINT)
            server.wait(timeout=60)
