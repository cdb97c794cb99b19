"""The pools of a flow run, on pools that rent nothing: what happens between the threads, without a server."""

import asyncio
import contextvars
import logging
import threading
from collections import Counter
from collections.abc import AsyncIterator, Iterator
from concurrent.futures import Future
from dataclasses import replace
from types import SimpleNamespace
from typing import Any, cast
from uuid import UUID

import pytest

pytest.importorskip("prefect")
import pickle

from prefect.context import TaskRunContext

import skyward_core as sky
from prefect_skyward import SkywardTaskRunner, on_skyward, ui, waiting_state
from prefect_skyward.flow_pools import FlowPools
from prefect_skyward.money import MoneyEnd
from prefect_skyward.node_objects import raise_if_prefect_s_api_was_used
from prefect_skyward.prefect_context import NO_API
from prefect_skyward.remote_call import state_of
from prefect_skyward.report import run_report
from prefect_skyward.report.run_report import RunReport
from prefect_skyward.run_calls import RunCalls, facts_of
from prefect_skyward.ui import RunLog

SPEC = sky.PoolSpec()


class Pool:
    """Stands for a `ComputePool`: opens when it may, and counts its ends."""

    cost = 0.0
    receipt = None

    def __init__(self, **_: Any) -> None:
        self.id = f"pool-{id(self):x}"
        self.may_open = threading.Event()
        self.may_open.set()
        self.is_active = True
        self.ends = 0

    def open(self) -> None:
        assert self.may_open.wait(60)

    def terminate_now(self) -> None:
        self.may_open.set()

    def hand_over(self) -> None:
        self.is_active = False
        self.ends += 1


@pytest.fixture
def rented(monkeypatch: pytest.MonkeyPatch) -> list[Pool]:
    """The pools that were opened, in their order."""
    pools: list[Pool] = []

    def from_spec(_spec: sky.PoolSpec, **keywords: Any) -> Pool:
        pools.append(Pool(**keywords))
        return pools[-1]

    monkeypatch.setattr(sky.ComputePool, "from_spec", from_spec)
    return pools


@pytest.fixture
def pools(rented: list[Pool]) -> Iterator[FlowPools]:
    flow_pools = FlowPools(facts_of(None, None), 300.0)
    yield flow_pools
    flow_pools.end()
    assert all(pool.ends == 1 for pool in rented)


def test_a_flow_that_ends_while_an_idle_end_begins_ends_its_pools(
    pools: FlowPools, rented: list[Pool], monkeypatch: pytest.MonkeyPatch
) -> None:
    class Thread(threading.Thread):
        def start(self) -> None:
            pools.end()
            super().start()

    life = pools.request(SPEC)
    life.opened.result(60)
    life.idle_since -= 1000
    monkeypatch.setattr("prefect_skyward.flow_pools.threading", SimpleNamespace(Thread=Thread))
    pools.end_idle()
    assert [pool.ends for pool in rented] == [1]


def test_a_pool_that_was_long_in_opening_is_not_idle_when_it_is_open(
    pools: FlowPools, monkeypatch: pytest.MonkeyPatch
) -> None:
    gate = threading.Event()
    monkeypatch.setattr(Pool, "open", lambda _pool: gate.wait(60))
    life = pools.request(SPEC)
    life.idle_since -= 1000
    gate.set()
    life.opened.result(60)
    pools.end_idle()
    assert pools.request(SPEC) is life


def test_an_opening_whose_thread_cannot_start_does_not_hold_up_the_end(
    pools: FlowPools, monkeypatch: pytest.MonkeyPatch
) -> None:
    def start(_self: threading.Thread) -> None:
        raise RuntimeError("can't start new thread")

    with monkeypatch.context() as patch:
        patch.setattr(threading.Thread, "start", start)
        with pytest.raises(RuntimeError, match="start new thread"):
            pools.request(SPEC)
    assert pools.request(SPEC).opened.result(60)


@pytest.mark.parametrize("error", [LookupError, KeyboardInterrupt])
def test_a_flow_that_is_stopped_leaves_all_machines_to_their_reapers_first(
    error: type[BaseException], rented: list[Pool], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Before the first pool is closed: after a signal its process may be killed before a provider has answered."""
    order: list[str] = []
    for name in ("terminate_now", "hand_over"):
        monkeypatch.setattr(Pool, name, lambda _pool, name=name: order.append(name))
    with pytest.raises(error), SkywardTaskRunner().duplicate() as runner:
        assert runner.live is not None
        for spec in (SPEC, SPEC.with_(nodes=2)):
            runner.live.calls().pools.request(spec).opened.result(60)
        raise error
    assert order == ["terminate_now"] * (2 if error is KeyboardInterrupt else 0) + ["hand_over"] * 2
    assert len(rented) == 2


@on_skyward()
def plain() -> int:
    return 1


@on_skyward()
async def asynchronous_items() -> AsyncIterator[int]:
    yield 1


async def _drain(values: AsyncIterator[int]) -> list[int]:
    return [value async for value in values]


DIRECT_CALLS = [
    lambda: plain(),
    lambda: asyncio.run(_drain(asynchronous_items())),
]


@pytest.mark.parametrize("call", DIRECT_CALLS)
def test_a_direct_call_without_money_ends_the_run_s_money_and_is_not_tried_again(
    call: Any, rented: list[Pool], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Of each kind of function. Other failures are tried again, as the task's own condition says."""
    ends: list[BaseException] = []
    error = sky.BudgetExceeded("none is left")

    def open_pool(_pool: Pool) -> None:
        raise error

    monkeypatch.setattr(Pool, "open", open_pool)
    monkeypatch.setattr(MoneyEnd, "after", lambda _self, failure, *_: ends.append(failure))
    task: Any = SimpleNamespace(name="t", timeout_seconds=None, retry_condition_fn=None)
    run: Any = SimpleNamespace(id=None, name="t-1", run_count=1, flow_run_id=None, tags=[], state=None)
    monkeypatch.setattr(waiting_state, "emit_task_run_state_change_event", lambda **_: None)
    with monkeypatch.context() as patch:
        patch.setattr(TaskRunContext, "get", lambda: SimpleNamespace(task=task, task_run=run))
        for _ in range(2):
            with pytest.raises(sky.BudgetExceeded):
                call()
    assert ends == [error, error]
    condition = task.retry_condition_fn
    monkeypatch.setattr("prefect_skyward.remote_call.task_run_logger", lambda *_: SimpleNamespace(error=print))
    assert not condition(task, run, SimpleNamespace(data=error))
    assert condition(task, run, SimpleNamespace(data=ValueError()))
    assert len(rented) == 2


def test_a_step_after_a_pool_has_ended_by_itself_gets_a_new_one(pools: FlowPools, rented: list[Pool]) -> None:
    """Its `max_lifetime` is used up, or its lease is lost."""
    life = pools.request(SPEC)
    life.opened.result(60)
    rented[0].is_active = False
    again = pools.request(SPEC)
    assert again is not life
    again.opened.result(60)
    assert pools.request(SPEC) is again


def test_money_that_is_used_up_names_its_pool_and_its_limit(rented: list[Pool]) -> None:
    class Report:
        def __init__(self) -> None:
            self.ends: list[tuple[float | None, str]] = []

        def money_is_used_up(self, error: sky.BudgetExceeded, limit_usd: float | None, pool_id: str) -> None:
            self.ends.append((limit_usd, pool_id))

    report = Report()
    facts = facts_of(None, None)
    money = MoneyEnd(None, facts.log, report)  # type: ignore[arg-type]
    flow_pools = FlowPools(replace(facts, money=money), None)
    calls = RunCalls(flow_pools, SPEC.with_(max_cost=50), sky.Work())
    limited = SPEC.with_(max_cost=1)
    for spec in (limited, SPEC.with_(max_cost=50)):
        flow_pools.request(spec).opened.result(60)
    with pytest.raises(sky.BudgetExceeded):
        state_of(calls, sky.BudgetExceeded("used up"), limited)
    flow_pools.end()
    assert report.ends == [(1, rented[0].id)]


def test_a_line_is_in_the_log_of_its_task_run_however_early_or_late_it_comes(monkeypatch: pytest.MonkeyPatch) -> None:
    """A node may be faster than `submit`, and events have their own thread. A line of no call is the flow run's."""

    class Log(RunLog):
        def say_line(self, line: sky.LogLine) -> None:
            said.append((self.logger.name, line.line))

    said: list[tuple[str, str]] = []
    flow, task = (Log(logging.getLogger(name), contextvars.copy_context()) for name in ("flow", "task"))
    monkeypatch.setattr(RunLog, "of_task", lambda: task)
    run_logs, future = ui.RunLogs(flow), Future[Any]()
    future.call_id = "call-1"  # type: ignore[attr-defined]

    def submit() -> list[Any]:
        for call_id in ("call-1", "call-2", None):
            run_logs(sky.LogLine(0, "local-0", f"early line of {call_id}", 0.0, call_id))
        return [future]

    run_logs.follow_all(submit)
    run_logs(sky.LogLine(0, "local-0", "a line", 0.0, "call-1"))
    future.set_result(None)
    run_logs(sky.LogLine(0, "local-0", "a late line", 0.0, "call-1"))
    own = [("task", "early line of call-1"), ("task", "a line"), ("task", "a late line")]
    assert [one for one in said if one[0] == "task"] == own
    assert {line for name, line in said if name == "flow"} == {"early line of call-2", "early line of None"}


def test_a_pool_with_another_env_is_not_taken_for_a_use_of_prefect_s_api() -> None:
    """The refusal to join a pool that a plain program has opened shows the address that nodes get from us."""
    refusal = sky.BadRequest(f"opened with other settings: env: it has {{}}, here {{'PREFECT_API_URL': '{NO_API}'}}")
    raise_if_prefect_s_api_was_used(refusal)
    with pytest.raises(sky.BadRequest, match="asks Prefect's API"):
        raise_if_prefect_s_api_was_used(OSError(f"no server at {NO_API}"))


def test_a_started_runner_can_be_compared_and_pickled() -> None:
    """Threads and pool of a runner do not travel with it, and do not count when it is compared."""
    with SkywardTaskRunner(nodes=2).duplicate() as live:
        assert live == SkywardTaskRunner(nodes=2)
        assert pickle.loads(pickle.dumps(live)) == live


def provisioned() -> sky.InstanceProvisioned:
    return sky.InstanceProvisioned("i-0", 0, spot=False, provider="aws", instance_type="p4d", price_on_demand=3.6)


def test_a_page_is_written_at_once_at_a_change_of_the_pool_and_else_every_15_seconds(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """However many costs and reports come, and task runs end: these are rows. Here the 15 seconds do not pass."""
    written: list[str] = []

    class Api:
        def __init__(self, _: UUID) -> None:
            """Nothing to keep."""

        def write(self, key: str, *_: object, **__: object) -> None:
            written.append(key)

        def label(self, *_: object) -> None:
            written.append("labels")

        def tag(self, _: object) -> None:
            written.append("tag")

        def emit(self, *_: object) -> None:
            """Events are few by the sieve."""

    monkeypatch.setattr(run_report, "RunApi", Api)
    assert run_report.WRITE_SECONDS == 15.0
    report = RunReport(UUID(int=1), RunLog.of_flow(), sky.Work())
    take = report.sink()
    take(sky.InfraCreating("p-1"))
    take(provisioned())
    take(sky.PoolReady("p-1", 1, 1, 2.0))
    for second in range(1000):
        take(sky.CostUpdate(float(second), second / 1000, 3.6, 0, 1))
    for number in range(1000):
        work = sky.Work(task="tiny", task_run=f"run-{number}")
        report.task_cost(cast("Any", SimpleNamespace(id=f"use-{number}", work=work, cost=1e-6)), calls=1)
    take(sky.CostFinal(1.0, 1000.0, 3.6, 0, 1, 0.0))
    report.close()
    counts = Counter(written)
    assert counts["skyward-machines"] == 3, "at the request, when it is ready, at the end with its bill"
    assert counts["skyward-cost"] == counts["tag"] == 2
    assert counts["labels"] == 1 + 1 + 1, "before there is a cost, with it, and at last that it is final"
    assert (counts["skyward-tasks"], counts["skyward-task-run"]) == (1, 0)
