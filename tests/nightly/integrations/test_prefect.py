"""Prefect: openings, unconfirmed machines, a crowd of log lines, secrets, pools beside another runner, shared pools, money."""

import asyncio
import logging
import os
import pickle
import threading
import time
from collections.abc import Iterator
from itertools import groupby
from pathlib import Path
from typing import Any
from uuid import UUID

import pytest

pytest.importorskip("prefect")

from tests.integrations import prefect_server  # noqa: I001 - before Prefect
from tests.integrations.prefect_server import (
    artifacts,
    asked,
    database_text,
    events_of,
    is_alive,
    logs,
    processes_of,
    runner,
)
from tests.waiting import wait_until
from tests.system.integrations.test_prefect import Gated, add, events, hang  # noqa: F401 - a fixture
from tests.system.integrations.test_prefect_steps import here, where

from prefect import flow, get_run_logger, task
from prefect.blocks.system import Secret
from prefect.cache_policies import NO_CACHE
from prefect.client.orchestration import get_client
from prefect.context import FlowRunContext
from prefect.runtime import flow_run as current_run
from pydantic import PrivateAttr

import skyward_core as sky
from prefect_skyward import SkywardTaskRunner, on_skyward, skyward_options
from prefect_skyward.report import run_report
from prefect_skyward.report.pages import usd
from prefect_skyward.report.run_report import RunReport
from prefect_skyward.ui import RunLog
from skyward_core.ledger.ledger import Ledger, default_url
from skyward_core.ledger.rows import CostBy
from tests.waiting import wait_until

pytestmark = [pytest.mark.filterwarnings("default")]  # Prefect's own warnings are not our faults
api = pytest.fixture(scope="module", autouse=True)(prefect_server.served)


# ── openings and ends ────────────────────────────────────────────────────────────────────────────────────────────────


def states_of(task_run_id: str) -> list[dict[str, Any]]:
    """All states of a task run, in the order of their time."""
    with get_client(sync_client=True) as client:
        answer = client._client.get("/task_run_states/", params={"task_run_id": task_run_id})
        answer.raise_for_status()
        return sorted(answer.json(), key=lambda state: state["timestamp"])


def test_the_first_submit_does_not_wait_for_machines(events: list[Any]) -> None:
    """Meanwhile they are Pending, and their limits of time do not run. Sleeps: longer than the task's limit."""
    provider, runs = Gated(), list[str]()

    @task(timeout_seconds=2)
    def quick() -> str:
        return "done"

    @flow(task_runner=runner(events, provider=provider))
    async def goes_on() -> list[Any]:
        futures = [quick.submit(), add.submit(1, 1)]
        runs.append(str(futures[0].task_run_id))
        assert not any(isinstance(event, sky.PoolReady) for event in events)
        await asyncio.sleep(2.5)  # longer than the task's own limit
        provider._may.set()
        return [await asyncio.to_thread(future.result) for future in futures]

    assert asyncio.run(goes_on()) == ["done", 2]
    found = wait_until(lambda: its if (its := states_of(runs[0]))[-1:] and its[-1]["name"] == "Completed" else None)
    states = [next(its) for _, its in groupby(found, lambda state: state["name"])]  # the message may have changed
    assert [state["name"] for state in states] == ["Pending", "Running", "WaitingForMachines", "Running", "Completed"]
    (shown,) = asked("/task_runs/filter", {"task_runs": {"id": {"any_": [runs[0]]}}})
    assert shown["start_time"] == states[3]["timestamp"], "its time is that of its work"
    assert (shown["total_run_time"], shown["run_count"]) < (2.0, 2)


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


class Clinging(sky.Local):
    """Terminates its machines, and goes on listing them."""

    _listed: dict[str, Any] = PrivateAttr(default_factory=dict)

    def instances(self, pool_id: str | None = None) -> Any:
        self._listed.update((instance.id, instance) for instance in super().instances(pool_id))
        return list(self._listed.values())


def test_unconfirmed_machines_are_reported(events: list[Any], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("skyward_core.provisioning.teardown.DEADLINE_SECONDS", 0.5)
    ids = []

    pools: list[sky.ComputePool] = []

    @flow(task_runner=runner(events, provider=Clinging()))
    def left() -> int:
        ids.append(UUID(current_run.id))
        result = add.submit(1, 1).result()
        context = FlowRunContext.get()
        assert isinstance(context.task_runner, SkywardTaskRunner)
        pools.append(context.task_runner.pool)
        return result

    assert left() == 2
    assert pools[0].unconfirmed is not None
    assert wait_until(lambda: [r for r in logs(ids[0]) if r["level"] == 40 and "NOT CONFIRMED GONE" in r["message"]])
    (machine,) = pools[0].unconfirmed.ids
    words, page = cost_page(ids[0])
    assert f"| **Not confirmed gone** | {machine}" in page
    assert words.endswith("NOT CONFIRMED GONE")


def cost_page(flow_run_id: UUID | str) -> tuple[str, str]:
    """Description and text of the cost artifact of a flow run."""
    ((words, page),) = [
        (one["description"], one["data"]) for one in artifacts(flow_run_id) if one["key"] == "skyward-cost"
    ]
    return words, page


def test_on_unfinished_and_max_workers(events: list[Any], tmp_path: Path) -> None:
    futures: list[Any] = []
    go = tmp_path / "go"

    @task(cache_policy=NO_CACHE)
    def wait_for_go(began: Path) -> str:
        began.touch()
        while not go.exists():
            time.sleep(0.02)
        return "done"

    @flow(task_runner=runner(events, on_unfinished="cancel"))
    def hasty() -> None:
        futures.append(hang.submit(tmp_path / "hasty"))
        wait_until((tmp_path / "hasty").exists)

    @flow(task_runner=runner(events, on_unfinished="wait", max_workers=1, nodes=2))
    def failing() -> None:
        futures.extend(wait_for_go.submit(tmp_path / name) for name in ("one", "two"))
        wait_until((tmp_path / "one").exists)
        assert not (tmp_path / "two").exists()
        threading.Timer(0.5, go.touch).start()
        raise LookupError("the flow is wrong")

    @flow(task_runner=runner(events))
    def patient() -> None:
        go.unlink()
        futures.append(wait_for_go.submit(tmp_path / "three"))
        wait_until((tmp_path / "three").exists)
        threading.Timer(0.5, go.touch).start()

    hasty()
    with pytest.raises(LookupError):
        failing()
    patient()
    for future in futures:
        future.wait()
    assert [future.state.name for future in futures] == ["Cancelled"] + ["Completed"] * 3
    for wrong in ({"max_workers": 0}, {"on_unfinished": "hope"}, {"idle_timeout": 0}):
        with pytest.raises(sky.BadRequest, match=next(iter(wrong))):
            runner(events, **wrong)


def test_a_flow_that_is_tried_again_at_once_stops_the_calls_of_the_first_attempt(
    events: list[Any], tmp_path: Path
) -> None:
    """Without a delay Prefect has set Running again when it leaves the runner."""
    bodies: list[int] = []

    @flow(task_runner=runner(events), retries=1)
    def second_time_lucky() -> bool:
        bodies.append(1)
        if len(bodies) == 1:
            hang.submit(tmp_path / "pid")
            wait_until((tmp_path / "pid").exists)
            raise LookupError("the first attempt")
        return is_alive(int((tmp_path / "pid").read_text()))

    assert second_time_lucky() is False


def test_the_end_of_a_flow_does_not_wait_long_for_a_slow_api(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """The log says where the bill is, also after an earlier warning. What the API takes later is not lost."""
    answers, writes, labels = threading.Event(), list[object](), list[object]()

    class Api:
        def __init__(self, _: UUID) -> None:
            pass

        def write(self, *_: object, **__: object) -> None:
            if not writes:
                writes.append(1)
                raise OSError("the API answers 503")
            assert answers.wait(60)

        def label(self, values: object, *_: object) -> None:
            labels.append(values)

        def emit(self, *_: object) -> None:
            pass

    monkeypatch.setattr(run_report, "RunApi", Api)
    monkeypatch.setattr(run_report, "CLOSE_SECONDS", 0.0)
    monkeypatch.setattr(run_report, "EXIT_SECONDS", 0.0)
    report = RunReport(UUID(int=1), RunLog.of_flow(), sky.Work())
    take = report.sink()
    take(sky.InfraCreating("p-1"))
    wait_until(lambda: "incomplete" in caplog.text, "the warning about the first request")
    labels.clear()
    take(sky.PoolReady("p-1", 1, 1, 2.0))
    report.close()
    report.close()  # it does not wait again
    assert "skyward receipt" not in caplog.text
    run_report.wait_for_late_reports()  # at the end of the process
    assert caplog.text.count("skyward receipt p-1") == 1
    answers.set()
    wait_until(lambda: labels, "the last request")


def test_the_end_of_a_process_does_not_wait_long_for_the_pages_of_other_runs(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """The next run of the flow writes them too."""
    begun, answers = threading.Event(), threading.Event()

    def settle(_: UUID, __: UUID) -> int:
        begun.set()
        assert answers.wait(60)
        return 0

    monkeypatch.setattr(run_report, "settle_earlier_runs", settle)
    monkeypatch.setattr(run_report, "OTHERS_SECONDS", 0.05)
    monkeypatch.setattr(run_report, "EXIT_SECONDS", 60.0)
    report = RunReport(UUID(int=1), RunLog.of_flow(), sky.Work(), UUID(int=2))
    report.close()
    assert begun.wait(60)
    run_report.wait_for_late_reports()
    assert report._thread.is_alive
    assert "skyward receipt" not in caplog.text
    answers.set()
    report._thread.join(60)


# ── logs and secrets ─────────────────────────────────────────────────────────────────────────────────────────────────


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
def test_every_log_line_of_300_tasks_on_two_nodes_is_in_the_api_once_at_its_level(events: list[Any]) -> None:
    """Of the run's logger at each level, of another logger, and printed: in the log of the task run, with its node."""
    nodes: dict[str, tuple[int, int]] = {}
    levels = {"debug": 10, "info": 20, "warning": 30, "error": 40, "critical": 50, "print": 20}

    @flow(task_runner=runner(events, nodes=2))
    def talk() -> None:
        futures = log_at_each_level.map(range(300))
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
    assert len(expected) == 1800
    assert sorted(wait_until(lambda: len(lines := found()) >= len(expected) and lines)) == sorted(expected)


@task
def publish() -> None:
    from prefect.artifacts import create_markdown_artifact

    create_markdown_artifact("hello", key="mine")


def test_prefect_s_api_in_a_task_fails_at_once_and_starts_no_server(events: list[Any], tmp_path: Path) -> None:
    """Prefect's client would start one on the node, with a database in the home directory."""

    @flow(task_runner=runner(events, env={"HOME": str(tmp_path)}))
    def asks() -> None:
        with pytest.raises(sky.BadRequest, match="which nodes have no way to"):
            publish.submit().result()

    asks()
    assert not [path for path in tmp_path.rglob("*") if path.suffix == ".db"]


@task
def reads_secrets() -> list[str]:
    """Print them, and return them backwards."""
    print("they are", os.environ["HF_TOKEN"], os.environ["OTHER"], os.environ["USER_TOKEN"])
    return [os.environ[name][::-1] for name in ("HF_TOKEN", "OTHER", "USER_TOKEN")]


def test_secrets_come_from_blocks_when_the_pool_opens(
    events: list[Any], monkeypatch: pytest.MonkeyPatch, tmp_path_factory: pytest.TempPathFactory
) -> None:
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
    messages = wait_until(lambda: [text for record in logs(flow_run_id) if "they are" in (text := record["message"])])
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


# ── pools beside another runner, and of subflows ─────────────────────────────────────────────────────────────────────


BESIDE: dict[str, Any] = {"provider": sky.Local(price_per_hour=36.0), "env": {"STEP": "beside"}}


@task(cache_policy=NO_CACHE)
@on_skyward(**BESIDE)
def beside(_number: int = 0) -> tuple[str, str]:
    print("beside")
    return here()


@task(cache_policy=NO_CACHE)
@on_skyward(**BESIDE)
async def beside_coroutine() -> tuple[str, str]:
    return here()


@task
@on_skyward(**BESIDE)
def counted(n: int) -> Iterator[tuple[int, str]]:
    for i in range(n):
        yield i, here()[1]


@task(timeout_seconds=4, cache_policy=NO_CACHE)
@on_skyward(**BESIDE)
def sleeper(path: Path) -> None:
    path.write_text(str(os.getpid()))
    time.sleep(600)


@on_skyward(**BESIDE)
def helper() -> tuple[str, str]:
    return here()


def test_beside_another_runner_a_pool_is_kept_for_the_flow_run(tmp_path: Path) -> None:
    @flow
    async def plain() -> tuple[list[Any], UUID]:
        from prefect.runtime import flow_run

        places = [beside(), beside.submit().result(), *beside.map([1, 2]).result(), helper()]
        places.append(await beside_coroutine())
        assert list(counted(3)) == [(0, "beside"), (1, "beside"), (2, "beside")]
        assert counted.submit(2).result() == [(0, "beside"), (1, "beside")]
        for state in (
            sleeper(tmp_path / "here", return_state=True),
            sleeper.submit(tmp_path / "there", return_state=True),
        ):
            assert state.name == "TimedOut"
        return places, UUID(flow_run.id)

    places, flow_run_id = asyncio.run(plain())
    ((pool, name),) = set(places)
    assert name == "beside"
    wait_until(lambda: processes_of({pool}) == [])
    found = wait_until(lambda: [r for r in logs(flow_run_id) if "done: " in r["message"]])
    assert found
    lines = [r for r in logs(flow_run_id) if r["message"] == "[node 0] beside"]
    assert len({r["task_run_id"] for r in lines}) == len(lines) == 4


def test_a_failing_flow_beside_another_runner_ends_its_pool(tmp_path: Path) -> None:
    """Also before its retry; each attempt has a pool."""
    pools: list[str] = []

    @flow(retries=1)
    def broken() -> None:
        if pools:
            wait_until(lambda: processes_of(set(pools)) == [])
        pools.append(beside()[0])
        raise LookupError("the flow itself is wrong")

    with pytest.raises(LookupError):
        broken()
    assert len(set(pools)) == 2
    wait_until(lambda: processes_of(set(pools)) == [])


def test_without_a_flow_the_pool_lives_for_one_call() -> None:
    """A task that is called outside of a flow, and a plain function."""
    pools = [beside()[0], helper()[0], asyncio.run(beside_coroutine())[0]]
    assert len(set(pools)) == 3
    assert processes_of(set(pools)) == []


# ── shared pools, and the run on the node ────────────────────────────────────────────────────────────────────────────


@task(cache_policy=NO_CACHE)
def busy() -> str:
    time.sleep(1.5)  # the cost of buckets is by whole seconds
    return os.environ["SKYWARD_POOL_ID"]


def test_a_flow_run_that_finds_a_pool_warm_has_its_share_of_the_cost() -> None:
    found: list[tuple[str, str]] = []

    @flow(name="sharing", task_runner=runner([], name="warm-gpu", keep_warm=60, lease_seconds=10))
    def sharing() -> None:
        found.append((current_run.id, busy.submit().result()))

    sharing()
    sharing()
    (first, pool), (second, other) = found
    sky.release(pool)
    assert pool == other
    for run in (first, second):
        words, page = cost_page(run)
        assert "share of pool warm-gpu" in words
        assert "share of pool `warm-gpu`" in page
        assert {"skyward-machines", "skyward-nodes"} <= {one["key"] for one in artifacts(run)}
        (final,) = wait_until(lambda: [one for one in events_of(run) if one["event"] == "skyward.cost.final"])
        assert final["payload"]["share_of"] == "warm-gpu"
        assert final["payload"]["has_opened"] is (run == first)
        with get_client(sync_client=True) as client:
            labels = client.read_flow_run(UUID(run)).labels
        assert labels["skyward.cost_usd"] == final["payload"]["usd"] > 0
        assert words.startswith(usd(final["payload"]["usd"]))
        assert (labels["skyward.pool_id"], labels["skyward.nodes"], labels["skyward.is_final"]) == (pool, 1, True)
    with Ledger(default_url()) as ledger:
        rows = {row.key: row.cost_usd for row in ledger.cost_rows(CostBy.RUN, pool_id=pool)}
        assert set(rows) == {f"prefect:sharing/{first}", f"prefect:sharing/{second}", "pool warm-gpu"}
        assert min(rows.values()) > 0
        assert sum(rows.values()) == sum(row.cost_usd for row in ledger.cost_rows(pool_id=pool))


@task(cache_policy=NO_CACHE, tags=["gpu"], retries=1)
def context() -> sky.RunContext | None:
    found = sky.run_context()
    if found is not None and found.run_count == 1:
        raise ValueError("the first attempt")
    return found


@task
@on_skyward()
def contexts() -> Any:
    yield sky.run_context()


def test_a_call_knows_its_run(events: list[Any]) -> None:
    """On the node: ids and names of flow run and task run, tags, attempt, and the parameters as Prefect has them, unless they are long."""

    @flow(name="knowing", task_runner=runner(events))
    def knowing(rate: float, path: Path, long: str) -> tuple[Any, ...]:
        from prefect.runtime import flow_run

        assert sky.run_context() is None
        future = context.submit()
        return flow_run.id, flow_run.name, future.task_run_id, future.result(), next(contexts())

    run_id, run_name, task_run_id, found, streamed = knowing(0.5, Path("here"), "x" * 10_000)
    assert (found.system, found.workflow, found.run_id, found.run_name) == ("prefect", "knowing", run_id, run_name)
    assert (found.task, found.task_run_id, found.run_count) == ("context", str(task_run_id), 2)
    assert found.task_run_name.startswith("context-")
    assert (found.tags, dict(found.parameters), found.deployment) == (("gpu",), {"rate": 0.5, "path": "here"}, "")
    assert (streamed.run_id, streamed.task) == (run_id, "contexts")
    assert sky.run_context() is None


# ── money ────────────────────────────────────────────────────────────────────────────────────────────────────────────


@task
def nap(seconds: float) -> float:
    time.sleep(seconds)
    return seconds


@task(name="doze")
async def long_nap(seconds: float) -> float:
    await asyncio.sleep(seconds)
    return seconds


def test_the_ledger_has_the_flow_run_and_the_cost_of_each_task(events: list[Any]) -> None:
    @flow(name="naps", task_runner=runner(events))
    def naps() -> str:
        assert nap.map([0.5, 0.5]).result() == [0.5, 0.5]
        assert long_nap.submit(1.0).result() == 1.0
        return str(FlowRunContext.get().flow_run.id)

    run = naps()
    (started,) = (event for event in events if isinstance(event, sky.InfraCreating))
    assert started.work == sky.Work(system="prefect", workflow="naps", run=run)
    with Ledger(default_url()) as ledger:
        works = [use.work for use in ledger.uses.of_pool(started.pool_id)]
        by_task = {row.key: float(row.cost_usd) for row in ledger.cost_rows(CostBy.TASK, work=started.work)}
        ((by_run, bill),) = ((row.key, float(row.cost_usd)) for row in ledger.cost_rows(CostBy.RUN, work=started.work))
    assert sorted((work.task, work.attempt) for work in works) == [("doze", "1"), ("nap", "1"), ("nap", "1")]
    assert len({work.task_run for work in works}) == 3
    assert by_run == f"prefect:naps/{run}"
    assert set(by_task) == {"prefect:naps/nap", "prefect:naps/doze", "(no task)"}
    assert all(by_task[key] >= 1.0 * 36 / 3600 for key in by_task if key != "(no task)")
    assert sum(by_task.values()) == pytest.approx(bill)
    assert bill == pytest.approx(
        next(event.total_cost for event in events if isinstance(event, sky.CostFinal)), abs=1e-5
    )


def test_the_limit_of_the_money_is_for_all_attempts_and_all_specs_of_a_flow_run(events: list[Any]) -> None:
    """The second attempt asks for other hardware, and the first one has left too little for a minute of it."""
    attempts: list[int] = []

    @flow(retries=3, task_runner=runner(events, max_cost=0.615))
    def poor() -> None:
        attempts.append(len(attempts))
        with skyward_options(env={"STEP": str(len(attempts))}):
            where.submit().result()
        raise LookupError

    state = poor(return_state=True)
    assert state.is_failed()
    assert "BudgetExceeded" in state.message
    assert "max_cost=0.615 is for all pools of the run" in state.message
    assert attempts == [0, 1]


def test_two_pools_at_once_spend_the_limit_of_their_flow_run_once(
    events: list[Any], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The nodes of both end when that is used up; the flow run fails with the reason, and is not tried again."""
    # a machine costs a dollar a second: the first pool reserves 20 s, the second one gets what is left
    monkeypatch.setattr("skyward_core.ledger.budgets.FIRST_MINUTE_SECONDS", 1.0)
    monkeypatch.setattr("skyward_core.ledger.budgets.LONGEST_BOOT_SECONDS", 0.0)
    attempts: list[int] = []
    provider = sky.Local(price_per_hour=3600.0)

    @flow(retries=3, task_runner=runner(events, max_cost=30, provider=provider, lease_seconds=10))
    def costly() -> None:
        attempts.append(len(attempts))
        with skyward_options(env={"STEP": "other"}):
            other = hang.submit(tmp_path / "other")
        hang.submit(tmp_path / "first").wait()
        other.result()

    state = costly(return_state=True)
    assert state.is_failed()
    assert "BudgetExceeded" in state.message
    assert attempts == [0]
    costs = [event.total_cost for event in events if isinstance(event, sky.CostFinal)]
    assert len(costs) == 2
    assert all(costs), "one was refused at its start"
    assert sum(costs) < 45, "both have spent the whole limit"


def test_a_pool_without_calls_reports_that_its_money_is_used_up(monkeypatch: pytest.MonkeyPatch) -> None:
    """Its end raises nothing in the flow, which goes on."""
    monkeypatch.setattr("skyward_core.ledger.budgets.FIRST_MINUTE_SECONDS", 1.0)
    ids: list[str] = []

    @flow(task_runner=SkywardTaskRunner(provider=sky.Local(price_per_hour=3600.0), max_cost=20))
    def idle() -> None:
        ids.append(current_run.id)
        add.submit(1, 1).result()
        wait_until(lambda: events_of(ids[0], "skyward.budget.exceeded"))

    idle()
    (event,) = events_of(ids[0], "skyward.budget.exceeded")
    assert event["payload"]["limit_usd"] == 20
    assert "max_cost" in event["payload"]["reason"]
