"""The Airflow provider without pools: its package, generations, deferred tasks whose pools misbehave, and a kill's order."""

import importlib.util
import io
import json
import logging
import re
import signal
import sys
import time
import tomllib
from collections.abc import Callable
from concurrent.futures import Future
from dataclasses import dataclass, replace
from datetime import datetime, timedelta
from decimal import Decimal
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import jsonschema
import pytest

if (AIRFLOW := importlib.util.find_spec("airflow")) is None:
    pytest.skip("Airflow is not installed", allow_module_level=True)

from airflow.sdk.exceptions import AirflowFailException, AirflowRuntimeError, ErrorType
from airflow.sdk.execution_time.comms import ErrorResponse

import skyward_core as sky
from airflow_provider_skyward import (
    deferred_attempt,
    durable_attempt,
    get_provider_info,
    marks,
    stop_order,
    task_attempt,
)
from airflow_provider_skyward.airflow_compat import is_supervisor_gone, known_level
from airflow_provider_skyward.bills import SETTLED_KEY, Cost, bill_of, make_final, micro, settle_bills
from airflow_provider_skyward.call_follower import LEASE_SECONDS, CallFollower
from airflow_provider_skyward.deferred_attempt import DeferredAttempt
from airflow_provider_skyward.durable_attempt import DurableAttempt
from airflow_provider_skyward.generations import STATE_KEY, Generation, Phase, begun, may_adopt, pool_name_of
from airflow_provider_skyward.keyword_types import DecoratorKeywords
from airflow_provider_skyward.operators import SkywardOperator
from airflow_provider_skyward.pool_keywords import POOL_KEYWORDS, as_plain_data
from airflow_provider_skyward.progress import Progress
from airflow_provider_skyward.retry import default_retry_policy, raise_as_airflows
from airflow_provider_skyward.task_attempt import Killed, idle_machines
from skyward_core.concurrency import threads as afterwards

ROOT = Path(__file__).parents[3]
PACKAGE = ROOT / "integrations/airflow_provider_skyward"
WORK = sky.Work(system="airflow", workflow="d", run="r", task="t", attempt="1")
INSTANCE = {"dag_id": "d", "run_id": "r", "task_id": "t", "map_index": -1, "try_number": 1}


# ── the package ──────────────────────────────────────────────────────────────────────────────────────────────────────


def test_the_provider_info_is_valid_by_airflows_schema() -> None:
    """Airflow itself only logs a fault, and then leaves the provider, or a key that it does not know, out."""
    assert AIRFLOW.submodule_search_locations
    file = Path(next(iter(AIRFLOW.submodule_search_locations))) / "provider_info.schema.json"
    schema = json.loads(file.read_text())
    jsonschema.validate(get_provider_info(), schema)
    assert set(get_provider_info()) <= set(schema["properties"])
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    assert project["name"] == get_provider_info()["package-name"]
    assert {"Framework :: Apache Airflow", "Framework :: Apache Airflow :: Provider"} <= set(project["classifiers"])


def test_each_field_with_a_name_of_ours_says_what_to_write() -> None:
    """A form shows the placeholder until something is written."""
    info: dict[str, Any] = get_provider_info()
    for one in info["connection-types"]:
        behaviour = one["ui-field-behaviour"]
        assert behaviour["placeholders"].keys() == behaviour["relabeling"].keys(), one["connection-type"]
        assert all(behaviour["placeholders"].values())


def test_each_name_of_the_provider_info_is_one_of_ours() -> None:
    """The modules exist, and define the named classes; looks at the source, because an import takes seconds."""
    info: dict[str, Any] = get_provider_info()
    modules = [
        module for kind in ("operators", "triggers", "hooks") for one in info[kind] for module in one["python-modules"]
    ]
    classes = [
        *info["extra-links"],
        *info["notifications"],
        *(one["hook-class-name"] for one in info["connection-types"]),
        *(one["class-name"] for one in info["task-decorators"]),
    ]
    for module in modules:
        assert (PACKAGE.parent / f"{module.replace('.', '/')}.py").is_file()
    for path in classes:
        module, _, name = path.rpartition(".")
        source = (PACKAGE.parent / f"{module.replace('.', '/')}.py").read_text()
        assert re.search(rf"^(class|def) {name}\b", source, re.MULTILINE), path


# ── generations ──────────────────────────────────────────────────────────────────────────────────────────────────────


def test_a_name_is_that_of_one_task_instance_in_all_tries() -> None:
    """DAG, run, task and map index make the name; the try does not, and no text of a user breaks it."""
    tries = {pool_name_of(sky.Work(workflow="d", run="r", task="t", attempt=str(number))) for number in (1, 2)}
    others = {
        pool_name_of(sky.Work(workflow="d", run="r", task="t", task_run="3")),
        pool_name_of(sky.Work(workflow="d", run="r2", task="t")),
        pool_name_of(sky.Work(workflow="d/r", run="", task="t")),
        pool_name_of(sky.Work(workflow="é ü" * 100, run="r", task="t")),
    }
    assert len(tries | others) == 5
    assert all(sky.PoolSpec.of(name=name).name == name for name in tries | others)


def test_a_template_may_name_a_pool_that_is_kept_warm() -> None:
    """It is kept as it is, and checked when it is rendered: run ids hold "+" and ":"."""
    fields = {"name": "team/{{ run_id }}", "keep_warm": 60}
    assert as_plain_data(fields) == fields
    operator = SkywardOperator(task_id="t", python_callable=len, op_args=["ab"], **fields)
    operator.name = "team/manual__2026-11-26T10:00:00+00:00"  # as Airflow sets it when it renders the template
    assert (operator.pool_spec.name, operator.pool_spec.keep_warm) == (operator.name, 60)
    operator.name = ""
    with pytest.raises(sky.BadRequest, match="write letters and digits"):
        _ = operator.pool_spec


@pytest.mark.parametrize(
    "provider",
    [
        sky.RunPod(api_key="rp_plaintext"),
        {"name": "runpod", "api_key": "rp_plaintext"},
        [sky.Local(), sky.RunPod(api_key="rp_plaintext")],
    ],
    ids=["object", "dict", "one of two"],
)
def test_credentials_on_a_provider_are_refused_in_a_dag(provider: Any) -> None:
    """When the DAG is parsed, and when a template has made them: the machines would be another account's."""
    with pytest.raises(sky.BadRequest, match="provider_conn_id") as caught:
        SkywardOperator(task_id="t", python_callable=len, op_args=["ab"], provider=provider)
    assert "rp_plaintext" not in str(caught.value)
    with pytest.raises(sky.BadRequest, match="provider_conn_id"):
        SkywardOperator(task_id="t", python_callable=len, op_args=["ab"], spec=sky.PoolSpec.of(provider=provider))
    templated = {"name": "runpod", "api_key": "{{ var.value.key }}"}
    operator = SkywardOperator(task_id="t", python_callable=len, op_args=["ab"], provider=templated)
    operator.provider = {"name": "runpod", "api_key": "rp_plaintext"}  # as Airflow sets it when it renders the template
    with pytest.raises(sky.BadRequest, match="provider_conn_id"):
        _ = operator.pool_spec


def test_a_generation_survives_the_store_and_a_wrong_value_is_none() -> None:
    """What is written is read again. A user may edit the store: a wrong value begins a new generation."""
    generation = Generation(2, Phase.STARTED, "pool", "call", "sky-1", (3, 0))
    stored = json.loads(json.dumps(generation.to_json()))
    assert Generation.of(stored) == generation
    wrong = [None, 7, {}, stored | {"phase": "x"}, stored | {"number": "x"}, stored | {"cursors": 1}]
    assert [Generation.of(value) for value in wrong] == [None] * 6


@pytest.mark.parametrize(("phase", "is_adopted"), list(zip(Phase, (False, True, True, False), strict=True)))
def test_only_a_call_that_may_have_begun_is_adopted(phase: Phase, is_adopted: bool) -> None:
    """A generation that has ended, that has rented only, or that is another task's is not adopted."""
    first = begun(WORK, 1, name := pool_name_of(WORK))
    before = Generation(1, phase, name, first.call_id, "sky-1", (0,))
    assert may_adopt(before, WORK, name) is is_adopted
    assert not may_adopt(before, WORK, "other")
    assert not may_adopt(before, sky.Work(workflow="d", run="r", task="other"), name)
    assert not may_adopt(Generation(1, phase, name, first.call_id), WORK, name)
    assert begun(WORK, 2, name).call_id != first.call_id


# ── the trigger: outages, cuts, ends, and a user who is quicker ──────────────────────────────────────────────────────


class Pool:
    """A pool whose calls write one line for each look, and end after `looks` of them. `failure` is raised instead."""

    def __init__(self, looks: int = 3) -> None:
        self.looks = looks
        self.level: int | None = None
        self.failure: Exception | None = None
        self.attached = 0
        self.closed = 0
        self.followed: list[str] = []
        self.on_event: Callable[[Any], object] = lambda _: None
        self.why_not_attached: list[Exception] = []

    def attach(self, pool_id: str, **options: Any) -> Any:
        assert (pool_id, options["pays"]) == ("sky-a", True)
        if self.why_not_attached:
            raise self.why_not_attached.pop(0)
        self.attached += 1
        self.on_event = options["on_event"]
        return SimpleNamespace(detached_call=self.call, close=self.close)

    def call(self, call_id: str) -> Any:
        return SimpleNamespace(follow=lambda cursor: self.follow(call_id, cursor))

    def follow(self, call_id: str, cursor: int) -> sky.CallNews:
        if self.failure is not None:
            failure, self.failure = self.failure, None
            raise failure
        self.followed.append(call_id)
        state = "ended" if cursor + 1 >= self.looks else "running"
        return sky.CallNews(state, [f"{call_id} {cursor}"], cursor + 1, 1, [self.level])

    def close(self) -> None:
        self.closed += 1


@pytest.fixture
def pool(monkeypatch: pytest.MonkeyPatch) -> Pool:
    pool = Pool()
    monkeypatch.setattr(sky.ComputePool, "attach", pool.attach)
    return pool


def follower(*cursors: int, clock: Callable[[], float] = lambda: 0.0) -> CallFollower:
    return CallFollower("sky-a", [f"c/{number}" for number in range(len(cursors))], cursors, clock)


def test_each_line_comes_once_and_a_call_that_has_ended_is_not_looked_at_again(pool: Pool) -> None:
    """The second call begins with two lines in the log."""
    it = follower(0, 2)
    assert it.look() == ([(20, "[node 1] c/0 0"), (20, "[node 1] c/1 2")], False)
    assert it.look() == ([(20, "[node 1] c/0 1")], False)
    assert it.look() == ([(20, "[node 1] c/0 2")], True)
    assert (pool.followed, it.cursors, pool.attached) == (["c/0", "c/1", "c/0", "c/0"], [3, 3], 1)


SHORTAGES = [OSError(24, "Too many open files"), RuntimeError("can't start new thread"), AssertionError()]
OUTAGES = [sky.Unreachable("away"), sky.LedgerError("locked")]


@pytest.mark.parametrize("outage", [*OUTAGES, *SHORTAGES])
def test_an_outage_of_network_ledger_or_resources_is_no_end(pool: Pool, outage: Exception) -> None:
    """Nodes out of reach are looked for again; lines before the outage are not lost."""
    pool.why_not_attached = [outage] * 20
    it = follower(0)
    assert [it.look() for _ in range(20)] == [([], False)] * 20
    assert it.look() == ([(20, "[node 1] c/0 0")], False)
    pool.failure = outage
    assert it.look() == ([], False)
    assert it.look() == ([(20, "[node 1] c/0 1")], False)
    assert (pool.attached, pool.closed) == (2, 1)


def test_an_outage_that_is_longer_than_the_lease_is_an_end(pool: Pool) -> None:
    """No process has renewed the lease of the nodes: a task must not be deferred forever."""
    now = [0.0]
    it = follower(0, clock=lambda: now[0])
    it.look()
    pool.failure = sky.Unreachable("away")
    now[0] += LEASE_SECONDS
    assert it.look() == ([], False)
    pool.why_not_attached = [sky.LedgerError("locked")] * 2
    assert it.look() == ([], False)
    now[0] += 1
    with pytest.raises(sky.NodeLost, match="could not be reached for 601 s"):
        it.look()


def test_a_cut_connection_is_made_again_unless_the_pool_is_gone(pool: Pool) -> None:
    """It is gone if a new attachment says so."""
    it = follower(0)
    it.look()
    pool.failure = sky.NodeLost("cut")
    assert it.look() == ([], False)
    assert it.look() == ([(20, "[node 1] c/0 1")], False)
    pool.failure = sky.NodeLost("cut")
    it.look()
    pool.why_not_attached = [sky.NodeLost("gone")]
    with pytest.raises(sky.NodeLost, match="gone"):
        it.look()
    assert pool.closed == pool.attached == 2


@pytest.mark.parametrize("error", [sky.NodeLost("no answer in time"), sky.PoolClosed("cut"), *SHORTAGES])
def test_attachments_that_break_are_no_end_within_a_lease(pool: Pool, error: Exception) -> None:
    """Each new attachment has found the pool, so it lives: its machine is overloaded."""
    now = [0.0]
    it = follower(0, clock=lambda: now[0])
    call = pool.call

    def broken(call_id: str) -> Any:
        raise error

    pool.call = broken  # type: ignore[method-assign]
    assert [it.look() for _ in range(20)] == [([], False)] * 20
    assert pool.closed == pool.attached == 20
    now[0] = LEASE_SECONDS + 1
    with pytest.raises(sky.NodeLost, match="could not be reached for 601 s"):
        it.look()
    pool.call = call  # type: ignore[method-assign]
    assert it.look() == ([(20, "[node 1] c/0 0")], False)


@pytest.mark.parametrize("error", [sky.BadRequest("no such call"), sky.CredentialsError("no key"), sky.LeaseLost("x")])
def test_an_error_that_stays_is_raised_at_once(pool: Pool, error: Exception) -> None:
    pool.why_not_attached = [error]
    with pytest.raises(type(error)):
        follower(0).look()


def test_an_attachment_that_comes_after_the_end_of_the_trigger_is_closed(pool: Pool) -> None:
    """A user ends the task while a look waits for the pool: the connection must not keep the nodes alive."""
    it = follower(0)
    call = pool.call

    def left_meanwhile(call_id: str) -> Any:
        it.leave()
        return call(call_id)

    pool.call = left_meanwhile
    assert it.look() == ([], False)
    assert (pool.attached, pool.closed, pool.followed) == (1, 1, [])


def test_the_reason_why_the_money_ends_is_kept(pool: Pool) -> None:
    it = follower(0)
    it.look()
    assert it.last_warning == ""
    pool.on_event(sky.BudgetWarning(1.0, None, "team", "nothing is left: the machines end in 20 s"))
    assert it.last_warning == "nothing is left: the machines end in 20 s"


def test_lines_keep_their_levels_and_calls_that_wait_for_a_slot_are_told(pool: Pool) -> None:
    pool.level = logging.WARNING
    it = follower(0)
    assert it.look() == ([(30, "[node 1] c/0 0")], False)
    pool.on_event(sky.CallsWaiting("gpu", 1, 5.2, "run nightly", 60.0))
    _, told = it.look()[0]
    assert told == (20, "a call waits for a slot of pool gpu, held by run nightly for 1 min 0 s")


@pytest.mark.parametrize(("level", "known"), [(5, 10), (10, 10), (25, 20), (30, 30), (41, 40), (99, 50)])
def test_a_level_of_its_own_is_shown_as_the_next_one_that_airflow_knows(level: int, known: int) -> None:
    """Its loggers raise KeyError for others, and that would fail the task."""
    assert known_level(level) == known


# ── the bill ─────────────────────────────────────────────────────────────────────────────────────────────────────────

FIRST, SECOND = Cost("a", "1", 300_001, is_final=True), Cost("a", "2", 20, is_final=True)
OTHER = Cost("b", "1", 4, is_final=False)


def use_bill(usd: float, *, is_final: bool) -> sky.UseBill:
    return sky.UseBill("a", usd, is_final, 1.0, 1.0, is_shared=True)


@pytest.mark.parametrize(
    ("tries", "costs", "use", "cost_usd", "is_final", "by_try"),
    [
        (["2"], [FIRST, SECOND, OTHER], None, 0.00002, True, {"1": 0.300005, "2": 0.00002}),
        (["1", "2"], [FIRST, SECOND, OTHER], None, 0.300021, True, {"1": 0.300005, "2": 0.00002}),
        (["1"], [FIRST, replace(OTHER, pool_id="a")], None, 0.300005, False, {"1": 0.300005}),
        (["1"], [replace(FIRST, micro_usd=0)], None, 0.0, True, {"1": 0.0}),
        (["2"], [FIRST], None, 0.0, False, {"1": 0.300001, "2": 0.0}),
        (["1"], None, None, 0.0, False, {}),
        (["2"], [FIRST, SECOND], use_bill(0.00003, is_final=True), 0.00003, True, {"1": 0.300001, "2": 0.00003}),
        (["2"], None, use_bill(0.00003, is_final=True), 0.00003, False, {"2": 0.00003}),
        (["1"], [], use_bill(0.0, is_final=True), 0.0, True, {"1": 0.0}),
        (["1"], [], use_bill(0.0, is_final=False), 0.0, False, {"1": 0.0}),
    ],
    ids=[
        *("its own part", "an adopted call", "a part that grows", "for nothing", "not in the ledger"),
        *("no ledger", "a use", "a use, and no ledger", "a use for nothing", "a use that goes on"),
    ],
)
def test_a_bill_has_the_parts_of_its_tries(
    tries: list[str],
    costs: list[Cost] | None,
    use: sky.UseBill | None,
    cost_usd: float,
    is_final: bool,
    by_try: dict[str, float],
) -> None:
    """To the micro-dollar, by pool and try. What is not known is not final, and a price of 0 is known."""
    bill = bill_of("a", tries, costs, use)
    assert (bill["cost_usd"], bill["is_final"], bill["tries"]) == (cost_usd, is_final, by_try)
    assert micro(bill["all_tries_usd"]) == sum(map(micro, by_try.values()))
    assert bill["pools"] == sorted({"a", *(one.pool_id for one in costs or ())})


def test_the_course_over_time_has_a_bound(monkeypatch: pytest.MonkeyPatch) -> None:
    """The first point and the last ones stay; between them every other one is dropped."""
    monkeypatch.setattr("airflow_provider_skyward.progress.gauge", lambda *_: None)
    clock = SimpleNamespace(monotonic=lambda: 0.0)
    monkeypatch.setattr("airflow_provider_skyward.progress.time", clock)
    written: list[dict[str, Any]] = []
    store = SimpleNamespace(set=lambda key, value: written.append(value))
    progress = Progress(logging.getLogger("test"), {"task_state_store": store}, WORK)
    progress.see(sky.InfraCreating("sky-1"))
    for number in range(400):
        clock.monotonic = lambda now=number: 100.0 * (now + 1)
        progress.see(sky.CostUpdate(1.0, float(number), 36.0, 0, 1))
        progress.tick()
    costs = [point[3] for point in written[-1]["course"]]
    assert len(written) == 400
    assert 60 <= len(costs) <= 120
    assert (costs[0], costs[-1], costs == sorted(costs)) == (0.0, 399.0, True)


@pytest.mark.parametrize(
    ("found", "is_written"),
    [(None, False), ({"is_final": True, "of_tries": ["1"]}, False), ({"is_final": False, "of_tries": ["1"]}, True)],
    ids=["no bill", "a final bill", "the bill of a worker that was killed"],
)
def test_only_a_bill_that_is_not_final_is_written_by_the_teardown(
    found: dict[str, Any] | None, is_written: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """What the ledger does not know of stays."""
    pushed: list[tuple[Any, ...]] = []
    xcom = SimpleNamespace(
        get_one=lambda **_: found and found | {"pool_id": "a", "cost_usd": 0.0, "calls": 3, "share_of": ""},
        set=lambda key, value, **of: pushed.append((key, value, of)),
    )
    monkeypatch.setattr("airflow_provider_skyward.bills.xcom_class", lambda: xcom)
    assert make_final(replace(WORK, task_run="4", attempt=""), [FIRST, SECOND]) is is_written
    for key, bill, of in pushed:
        assert (key, of["task_id"], of["map_index"]) == ("skyward_cost", WORK.task, 4)
        assert (bill["cost_usd"], bill["all_tries_usd"], bill["is_final"], bill["calls"]) == (
            0.300001,
            0.300021,
            True,
            3,
        )
    assert len(pushed) == is_written


@pytest.mark.parametrize(
    ("prices", "calls", "words"),
    [
        ([2.0, 2.0], 2, ""),
        ([2.0], 5, ""),
        (
            [2.0, 2.0],
            1,
            "1 call for 2 nodes: 1 of node 0 (i-0), node 1 (i-1) has nothing to do, for 2.0000 USD per hour",
        ),
        (
            [3.0, 1.0, 2.0],
            1,
            "2 of node 0 (i-0), node 1 (i-1), node 2 (i-2) have nothing to do, for at least 3.0000 USD",
        ),
    ],
)
def test_nodes_without_a_call_are_named_with_their_price(prices: list[float], calls: int, words: str) -> None:
    nodes: list[Any] = [
        SimpleNamespace(instance=SimpleNamespace(id=f"i-{number}", price_per_hour=price))
        for number, price in enumerate(prices)
    ]
    said = idle_machines(nodes, calls)
    assert words in said
    assert bool(said) == bool(words)


# ── the next try: what it ends, what it rents, and what it says ──────────────────────────────────────────────────────

NAME = pool_name_of(WORK)
OLD = Generation(1, Phase.STARTED, NAME, begun(WORK, 1, NAME).call_id, "sky-old", (0,))


@sky.compute
def nothing() -> None:
    return None


@dataclass
class AdoptedCall:
    """A call that an earlier try has begun; `known` is its state, or "away" if the pool does not answer."""

    call_id: str
    known: str

    @property
    def state(self) -> str:
        if self.known == "away":
            raise sky.Unreachable("the head does not answer")
        return self.known

    def follow(self, cursor: int) -> sky.CallNews:
        return sky.CallNews(self.known, ["the end"], cursor + 1, 0, [None])

    def result(self, timeout: float) -> str:
        assert timeout > 0
        return self.call_id


class World:
    """What the second try finds, and what it does, in order."""

    def __init__(self) -> None:
        self.done: list[str] = []
        self.states: dict[str, Any] = {STATE_KEY: OLD.to_json()}
        self.pushed: dict[str, Any] = {}
        self.why_not_attached: list[Exception] = []
        self.why_not_released: Exception | None = None
        self.call_state = "running"
        self.costs = {"sky-old": 1.0}

    def attempt(self) -> DeferredAttempt:
        return DeferredAttempt(logging.getLogger("test"), self.context(), None)

    def context(self) -> Any:
        instance = SimpleNamespace(
            dag_id="d", run_id="r", task_id="t", map_index=-1, try_number=2, xcom_push=self.push, max_tries=3
        )
        states = SimpleNamespace(get=self.states.get, set=self.states.__setitem__)
        return {"ti": instance, "task_state_store": states}

    def start(self) -> Generation:
        return self.attempt().start(sky.PoolSpec.of(provider="local"), [nothing()])

    def push(self, key: str, value: Any) -> None:
        self.pushed[key] = value

    def attach(self, pool_id: str, **_: Any) -> Any:
        if self.why_not_attached:
            raise self.why_not_attached.pop(0)
        self.done.append(f"attach {pool_id}")
        return self.pool(pool_id)

    def rent(self, *_: Any, **__: Any) -> Any:
        self.done.append("rent")
        return self.pool("sky-new")

    def pool(self, pool_id: str) -> Any:
        def start_detached(call: Any, *, call_id: str, owner: str) -> Any:
            self.done.append(f"start {call_id}")
            return SimpleNamespace(is_new=True)

        pool = SimpleNamespace(id=pool_id, open=lambda: None, start_detached=start_detached, spec=sky.PoolSpec.of())
        pool.lease, pool.cost_final, pool.unconfirmed = SimpleNamespace(nodes=()), None, None
        for name in ("detach", "close", "hand_over", "terminate_now"):
            setattr(pool, name, lambda *_, name=name: self.done.append(f"{name} {pool_id}"))
        pool.detached_call = lambda call_id: AdoptedCall(call_id, self.call_state)
        return pool

    def release(self, pool_id: str, **_: Any) -> None:
        self.done.append(f"release {pool_id}")
        if self.why_not_released is not None:
            raise self.why_not_released

    def parts(self, work: sky.Work) -> list[sky.CostPart]:
        usd = {pool_id: Decimal(repr(cost)) for pool_id, cost in self.costs.items()}
        of_first = replace(work, attempt="1")
        return [sky.CostPart(pool_id, of_first, cost, cost, is_final=True) for pool_id, cost in usd.items()]


class InThisThread:
    """In place of `Threads`, in a unit test."""

    def __init__(self, _: str) -> None:
        pass

    def submit(self, work: Callable[..., Any], *args: Any) -> Future[Any]:
        future: Future[Any] = Future()
        try:
            future.set_result(work(*args))
        except Exception as error:
            future.set_exception(error)
        return future


@pytest.fixture
def world(monkeypatch: pytest.MonkeyPatch) -> World:
    world = World()
    monkeypatch.setattr(sky.ComputePool, "attach", world.attach)
    monkeypatch.setattr(sky.ComputePool, "from_spec", world.rent)
    monkeypatch.setattr(sky, "release", world.release)
    monkeypatch.setattr(sky, "cost_of", lambda work: world.costs)
    monkeypatch.setattr(sky, "cost_parts", world.parts)
    monkeypatch.setattr(afterwards, "Threads", InThisThread)
    monkeypatch.setattr(durable_attempt, "LOOK_SECONDS", 0.0)
    return world


def test_a_pool_that_cannot_be_adopted_is_ended_before_another_is_rented(world: World) -> None:
    """The head is lost; other machines of the pool may live, and the call may run on one of them."""
    world.why_not_attached = [sky.NodeLost("its head has ended")]
    generation = world.start()
    assert world.done == ["release sky-old", "rent", f"start {NAME}/2/0", "detach sky-new"]
    assert (generation.number, generation.pool_id) == (2, "sky-new")


@pytest.mark.parametrize("state", ["running", "away", "ended"])
def test_an_adopted_call_that_has_ended_is_not_followed(world: World, state: str) -> None:
    """Its result is there: to defer the task would cost another worker's start, and the pool for that time. If the pool
    does not answer, the trigger follows the call.
    """
    world.call_state = state
    attempt = world.attempt()
    attempt.start(sky.PoolSpec.of(provider="local"), [nothing()])
    assert attempt.has_ended is (state == "ended")
    if attempt.has_ended:
        assert attempt.results() == [f"{NAME}/1/0"]
    ends = ["hand_over sky-old", "release sky-old"]
    assert world.done == ["attach sky-old", *(ends if state == "ended" else ["close sky-old"])]


def test_the_call_of_a_task_that_was_cleared_is_ended_and_not_adopted(world: World) -> None:
    """A clear raises Airflow's number of tries. Its trigger may not have ended the pool yet, or nobody does."""
    world.states[STATE_KEY] = replace(OLD, max_tries=2).to_json()
    generation = world.start()
    assert world.done == ["release sky-old", "rent", f"start {NAME}/2/0", "detach sky-new"]
    assert (generation.number, generation.max_tries) == (2, 3)


def test_a_clear_waits_until_the_old_pool_is_ended(world: World) -> None:
    cleared = replace(OLD, max_tries=2)
    world.states[STATE_KEY] = cleared.to_json()
    world.why_not_released = sky.InstancesLeft("still there", ())
    with pytest.raises(sky.InstancesLeft):
        world.start()
    assert world.done == ["release sky-old"]
    assert Generation.of(world.states[STATE_KEY]) == cleared


@pytest.mark.parametrize(
    ("operator", "previous", "is_ended"),
    [("SkywardOperator", None, True), ("SkywardOperator", "running", False), ("SkywardCreatePool", None, False)],
)
def test_a_mark_ends_the_pools_of_the_task_that_live(
    operator: str, previous: str | None, is_ended: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Airflow names the state before each end but a mark. Others use the pool of a setup."""
    pools = [{"pool_id": "sky-old", "ended_at": "2026-11-28"}, {"pool_id": "sky-new", "ended_at": None}]
    ended: list[str] = []
    monkeypatch.setattr(sky, "receipts_of", lambda work: pools if work == replace(WORK, attempt="") else [])
    monkeypatch.setattr(stop_order, "order_stop", ended.append)
    marks.on_task_instance_success(previous, SimpleNamespace(operator=operator, **INSTANCE))
    assert ended == (["sky-new"] if is_ended else [])


@pytest.mark.parametrize(
    ("of_scheduler", "state", "is_ended"),
    [(True, "failed", True), (True, "up_for_retry", False), (False, "failed", False)],
)
def test_the_scheduler_ends_the_pools_of_a_task_that_it_fails_for_good(
    monkeypatch: pytest.MonkeyPatch, *, of_scheduler: bool, state: str, is_ended: bool
) -> None:
    """Its worker is dead, such as the one that was to fetch the result of a deferred task. A worker ends its own."""
    instance = type(
        "Instance", (SimpleNamespace,), {"__module__": "airflow.models.taskinstance" if of_scheduler else "x"}
    )
    ended: list[str] = []
    monkeypatch.setattr(sky, "in_thread", lambda _, work: work())
    monkeypatch.setattr(sky, "receipts_of", lambda _: [{"pool_id": "sky-new", "ended_at": None}])
    monkeypatch.setattr(stop_order, "order_stop", ended.append)
    marks.on_task_instance_failed("running", instance(operator="SkywardOperator", state=state, **INSTANCE))
    assert ended == (["sky-new"] if is_ended else [])


def test_a_mark_goes_on_without_the_ledger_and_one_line_says_so(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """The user's mark has been made: no fault of ours may be an error of Airflow's listeners, with its traceback."""

    def away(_: sky.Work) -> Any:
        raise sky.LedgerError("the database does not answer")

    monkeypatch.setattr(sky, "receipts_of", away)
    marks.on_task_instance_failed(None, SimpleNamespace(operator="SkywardOperator", **INSTANCE))
    (line,) = caplog.records
    assert line.levelname == "WARNING"
    assert line.exc_info is None
    assert line.getMessage() == (
        "the machines of d/r/t were not looked for after its end, and end by their lease; `skyward sweep` ends them at"
        " once: the database does not answer"
    )


def test_the_other_pools_of_a_task_are_ended_if_one_cannot_be(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    pools = [{"pool_id": name, "ended_at": None} for name in ("sky-a", "sky-b")]
    ended: list[str] = []

    def order(pool_id: str) -> None:
        ended.append(pool_id)
        if pool_id == "sky-a":
            raise OSError("no more processes")

    monkeypatch.setattr(sky, "receipts_of", lambda _: pools)
    monkeypatch.setattr(stop_order, "order_stop", order)
    marks.on_task_instance_failed(None, SimpleNamespace(operator="SkywardOperator", **INSTANCE))
    assert ended == ["sky-a", "sky-b"]
    assert "the pool sky-a of d/r/t was not ended with it" in caplog.text


@pytest.mark.parametrize("is_gone", [True, False])
def test_a_silent_call_does_not_keep_a_worker_whose_supervisor_has_died(
    world: World, monkeypatch: pytest.MonkeyPatch, *, is_gone: bool
) -> None:
    """Airflow begins the next try, and this one would hear nothing of it: two runs of one function at once."""
    monkeypatch.setattr(task_attempt, "is_supervisor_gone", lambda: is_gone)
    monkeypatch.setattr(task_attempt, "SUPERVISOR_SECONDS", 0.0)
    future: Future[int] = Future()
    attempt = world.attempt()
    if is_gone:
        with pytest.raises(task_attempt.SupervisorGone):
            attempt._wait([future])  # pyright: ignore[reportPrivateUsage]
        with pytest.raises(task_attempt.SupervisorGone):
            attempt._drain()  # pyright: ignore[reportPrivateUsage]
    else:
        attempt._drain()  # pyright: ignore[reportPrivateUsage]
        monkeypatch.setattr(task_attempt, "is_supervisor_gone", lambda: bool(future.set_result(42)))
        assert attempt._wait([future]) == [42]  # pyright: ignore[reportPrivateUsage]


def test_a_supervisor_is_gone_when_its_end_of_the_connection_is_closed(monkeypatch: pytest.MonkeyPatch) -> None:
    """A task that supervises itself has no connection (`airflow dags test`)."""
    from airflow.sdk.execution_time import task_runner

    answers: list[Any] = [BlockingIOError(), b"x", b"", ConnectionResetError()]

    def recv(*_: Any) -> bytes:
        answer = answers.pop(0)
        if isinstance(answer, Exception):
            raise answer
        return answer

    monkeypatch.setattr(task_runner, "SUPERVISOR_COMMS", SimpleNamespace(socket=SimpleNamespace(recv=recv)), False)
    assert [is_supervisor_gone() for _ in range(4)] == [False, False, True, True]
    monkeypatch.setattr(task_runner, "SUPERVISOR_COMMS", SimpleNamespace())
    assert not is_supervisor_gone()


def test_a_time_limit_waits_for_the_answer_of_a_request_to_airflow(world: World) -> None:
    """Airflow's client has no number for an answer: after a request that was cut off, the next one reads its answer.

    Each request meets Airflow's handler of SIGALRM, as if the signal came in it.
    """
    answered: list[str] = []

    class TimedOut(BaseException):
        pass

    def late(number: int, frame: Any) -> None:
        raise TimedOut(f"after {answered[-1:]}")

    def during(request: str) -> None:
        handler: Any = signal.getsignal(signal.SIGALRM)
        handler(signal.SIGALRM, None)
        answered.append(request)

    before = signal.signal(signal.SIGALRM, late)
    try:
        attempt = world.attempt()
        attempt._announced = "sky-old"  # pyright: ignore[reportPrivateUsage]
        attempt._task_instance.xcom_push = lambda key, value: during(key)  # pyright: ignore[reportPrivateUsage]
        attempt._states.set = lambda key, value: during(key)  # pyright: ignore[reportPrivateUsage]
        attempt._states.get = lambda key: during("the state")  # pyright: ignore[reportPrivateUsage]
        attempt.progress.see(sky.PoolReady(pool_id="sky-old", nodes=1, slots=1, seconds=1.0))
        for ask, request in (
            (attempt._stored, "the state"),  # pyright: ignore[reportPrivateUsage]
            (lambda: attempt._push("skyward_pool", {}), "skyward_pool"),  # pyright: ignore[reportPrivateUsage]
            (lambda: attempt._remember(OLD), STATE_KEY),  # pyright: ignore[reportPrivateUsage]
            (attempt.progress.tick, "skyward_metrics"),
        ):
            with pytest.raises(TimedOut, match=f"after .'{request}'"):
                ask()
    finally:
        signal.signal(signal.SIGALRM, before)


@pytest.mark.parametrize("kept", ["2026-11-01T00:00:00+00:00", None, 7, "yesterday"])
def test_bills_are_settled_from_where_the_last_sweep_has_ended(kept: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """However long ago; a value that a user has broken is as if there were none. An error keeps it as it was."""
    looked: list[tuple[datetime, datetime]] = []

    def parts(work: sky.Work, *, ended_between: tuple[datetime, datetime]) -> list[sky.CostPart]:
        looked.append(ended_between)
        if len(looked) == 2:
            raise sky.LedgerError("away")
        return []

    state: dict[str, Any] = {} if kept is None else {SETTLED_KEY: kept}
    store = SimpleNamespace(get=state.get, set=state.__setitem__)
    monkeypatch.setattr(sky, "cost_parts", parts)
    assert settle_bills(store) == []
    with pytest.raises(sky.LedgerError):
        settle_bills(store)
    settle_bills(store)
    first, away, last = looked
    began = first[1] - timedelta(days=7) if kept is None or len(str(kept)) < 10 else datetime.fromisoformat(kept)
    assert first[0] == began
    assert away[0] == last[0] == first[1]
    assert state[SETTLED_KEY] == last[1].isoformat()


def test_a_pool_out_of_reach_is_waited_for_and_then_ended_first(world: World, monkeypatch: pytest.MonkeyPatch) -> None:
    """Its call runs, perhaps: it must not run beside the next one."""
    world.why_not_attached = [sky.Unreachable("away")] * 5
    generation = world.start()
    assert world.done == ["attach sky-old", "close sky-old"]
    assert (generation.number, generation.pool_id) == (1, "sky-old")
    monkeypatch.setattr(deferred_attempt, "REACH_SECONDS", -1.0)
    world.why_not_attached, world.done = [sky.Unreachable("away")], []
    assert world.start().pool_id == "sky-new"
    assert world.done[:2] == ["release sky-old", "rent"]


def test_nothing_is_rented_while_the_old_pool_cannot_be_ended(world: World) -> None:
    """The state still names it: the next try does the same again."""
    world.why_not_attached = [sky.NodeLost("its head has ended")]
    world.why_not_released = sky.InstancesLeft("still there", ())
    with pytest.raises(sky.InstancesLeft):
        world.start()
    assert "rent" not in world.done
    assert Generation.of(world.states[STATE_KEY]) == OLD


def test_nothing_is_rented_while_the_ledger_is_away(world: World, monkeypatch: pytest.MonkeyPatch) -> None:
    """It is not known whether the old pool lives. An outage that ends in time does no harm."""
    world.why_not_attached = [sky.LedgerError("locked")] * 3
    assert world.start().pool_id == "sky-old"
    monkeypatch.setattr(deferred_attempt, "REACH_SECONDS", -1.0)
    world.why_not_attached = [sky.LedgerError("locked")]
    with pytest.raises(sky.LedgerError):
        world.start()
    assert "rent" not in world.done


@pytest.mark.parametrize(("costs", "is_rented"), [({}, True), ({"sky-old": 1.0}, False)])
def test_a_pool_that_no_ledger_knows_is_nothing_to_end(world: World, costs: dict[str, float], is_rented: bool) -> None:
    """But a pool that the ledger has, and that cannot be ended from here, is: another try may run where it can."""
    world.why_not_attached = [sky.BadRequest("no such pool")]
    world.why_not_released = sky.BadRequest("no such pool, or processes of another computer")
    world.costs = costs
    if is_rented:
        assert world.start().pool_id == "sky-new"
    else:
        with pytest.raises(sky.Unreachable, match="the machines of try 1 are elsewhere"):
            world.start()
    assert ("rent" in world.done) is is_rented


@pytest.mark.parametrize(
    ("error", "has_policy", "stays"),
    [
        (sky.NodeLost("gone"), False, True),
        (sky.BadRequest("no such value"), False, False),
        (sky.BadRequest("no such value"), True, True),
        (sky.PoolStopped("by ada"), True, False),
    ],
)
def test_a_pool_stays_warm_only_for_a_try_that_comes(
    error: sky.SkywardError, has_policy: bool, stays: bool, world: World, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fail(*_: object) -> None:
        raise error

    attempt = DurableAttempt(logging.getLogger("test"), world.context(), 30.0, has_policy=has_policy)
    left: list[bool] = []
    monkeypatch.setattr(attempt, "_open_or_adopt", fail)
    monkeypatch.setattr(attempt, "_leave", lambda *, is_to_stay_warm, **_: left.append(is_to_stay_warm))
    with pytest.raises(type(error)):
        attempt.run(sky.PoolSpec.of(provider="local", name="nightly", keep_warm=60), [nothing()])
    assert left == [stays]


@pytest.mark.parametrize(
    ("max_cost", "why_unpaid", "error"),
    [
        (1.05, "", sky.BudgetExceeded),
        (None, "account 'team' has 0 USD left", sky.BudgetExceeded),
        (2.0, "", sky.NodeLost),
        (None, "", sky.NodeLost),
    ],
)
def test_a_pool_that_is_gone_says_whether_the_money_has_ended_it(
    world: World, max_cost: float | None, why_unpaid: str, error: type[Exception]
) -> None:
    """Another try would cost again, so it must be known. The bill is pushed in any case."""
    world.why_not_attached = [sky.NodeLost("its head has ended")]
    attempt = world.attempt()
    with pytest.raises(error):
        attempt.finish(1, max_cost, why_unpaid)
    attempt.push_bill()
    assert world.done == ["release sky-old"]
    bill = world.pushed["skyward_cost"]
    assert (bill["is_final"], bill["pool_id"], bill["all_tries_usd"]) == (True, "sky-old", 1.0)


@pytest.mark.parametrize(
    ("error", "connection", "words"),
    [
        (sky.CredentialsError("there is no key"), None, ('name it, provider_conn_id="..."',)),
        (sky.CredentialsError("there is no key"), "verda_team", ("from the connection 'verda_team'",)),
        (sky.BadRequest("nodes=0"), None, ("nodes=0: not tried again",)),
        (sky.LeaseTampered("an altered XCom"), None, ("an altered XCom: not tried again",)),
    ],
)
def test_what_another_try_meets_again_is_not_tried_again(
    error: sky.SkywardError, connection: str | None, words: tuple[str, ...]
) -> None:
    """Bad input and credentials: a task without a policy fails at once; a policy may decide otherwise."""
    task = SkywardOperator(task_id="train", python_callable=nothing, provider="verda", provider_conn_id=connection)
    with pytest.raises(AirflowFailException) as failed:
        raise_as_airflows(error, task)
    assert all(word in str(failed.value) for word in ("not tried again", *words))
    assert ("provider_conn_id" in str(failed.value)) == (type(error) is sky.CredentialsError)
    assert failed.value.__cause__ is error
    task.retry_policy = default_retry_policy()
    raise_as_airflows(error, task)


@pytest.mark.parametrize("error", [sky.NoCapacity("none"), sky.NodeLost("gone"), sky.ProviderFailed("an outage")])
def test_what_may_pass_is_tried_again(error: sky.SkywardError) -> None:
    raise_as_airflows(error, SkywardOperator(task_id="train", python_callable=nothing))


def test_the_bill_of_a_try_that_begins_again_leaves_out_the_earlier_ones(world: World) -> None:
    """If it has adopted a call, it has the whole cost of that. It names what earlier tries have cost in both cases."""
    world.costs = {"sky-old": 1.0, "sky-new": 0.25}
    bills = {}
    for is_gone in (False, True):
        world.why_not_attached = [sky.NodeLost("its head has ended")] if is_gone else []
        world.states[STATE_KEY] = OLD.to_json()
        attempt = world.attempt()
        attempt.start(sky.PoolSpec.of(provider="local"), [nothing()])
        attempt.push_bill()
        bills[is_gone] = world.pushed["skyward_cost"]
        assert world.pushed["skyward_pool"]["earlier_tries_usd"] == 1.25
    assert [(bill["pool_id"], bill["cost_usd"]) for bill in bills.values()] == [("sky-old", 1.0), ("sky-new", 0.0)]
    assert [(bill["is_final"], bill["all_tries_usd"]) for bill in bills.values()] == [(True, 1.25), (False, 1.25)]


def test_a_task_that_is_not_followed_any_more_ends_its_pool_and_pushes_its_bill(world: World) -> None:
    """The deferral has timed out, or the trigger has failed."""
    world.attempt().end_unfollowed()
    assert world.done == ["release sky-old"]
    assert world.pushed["skyward_cost"]["is_final"]
    assert world.states[STATE_KEY]["phase"] == Phase.ENDED


@pytest.mark.parametrize("fault", ["the ledger", "the store", "the log"])
def test_bookkeeping_that_fails_after_the_work_raises_nothing(
    world: World, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture, fault: str
) -> None:
    """The result of the task is there. The bill of before stays, as one that is not final."""

    def fails(*_: Any, **__: Any) -> Any:
        raise OSError("no space left")

    attempt = world.attempt()
    attempt._announced = "sky-old"  # pyright: ignore[reportPrivateUsage]
    attempt._generation = OLD  # pyright: ignore[reportPrivateUsage]
    if fault == "the ledger":
        monkeypatch.setattr(sky, "cost_parts", fails)
    elif fault == "the store":
        monkeypatch.setattr(attempt._states, "set", fails)  # pyright: ignore[reportPrivateUsage]
    else:
        monkeypatch.setattr(attempt.progress, "end", fails)
    attempt.end()
    assert "no space left" in caplog.text
    assert ("skyward_cost" in world.pushed) is (fault != "the ledger")


@pytest.mark.parametrize("step", ["start", "finish"])
def test_a_worker_whose_supervisor_is_dead_leaves_the_pool_to_the_next_try(
    world: World, monkeypatch: pytest.MonkeyPatch, step: str
) -> None:
    """Its requests to Airflow fail a moment before it has another parent. Looks inside: the steps that make them."""
    parents = iter([7, 7, 7, 1])
    monkeypatch.setattr(durable_attempt, "os", SimpleNamespace(getppid=lambda: next(parents, 1)))
    monkeypatch.setattr(durable_attempt, "time", SimpleNamespace(monotonic=time.monotonic, sleep=lambda _: None))

    def fails(*_: Any) -> Any:
        raise BrokenPipeError(32, "Broken pipe")

    attempt = world.attempt()
    for name in ("_started", "_results"):
        monkeypatch.setattr(attempt, name, fails)
    with pytest.raises(BrokenPipeError):
        if step == "start":
            attempt.start(sky.PoolSpec.of(provider="local"), [nothing()])
        else:
            attempt.finish(1, None, "")
    assert attempt.is_orphan
    assert world.done == ["attach sky-old"]


@pytest.mark.parametrize(("status", "is_away"), [(None, True), (503, True), (404, False)])
def test_an_outage_of_the_api_server_ends_no_call(
    world: World, monkeypatch: pytest.MonkeyPatch, status: int | None, is_away: bool
) -> None:
    """Which lines are in the log cannot be stored then. A refusal is another error."""
    monkeypatch.setattr(durable_attempt, "CURSOR_SECONDS", -1.0)
    states = iter(["running", "running", "ended", "ended"])

    class Call:
        result = staticmethod(lambda _: 42)

        def follow(self, cursor: int) -> sky.CallNews:
            return sky.CallNews(next(states), ["a line"], cursor + 1, 0, [None])

    def refuse(*_: Any) -> None:
        raise AirflowRuntimeError(ErrorResponse(error=ErrorType.API_SERVER_ERROR, detail={"status_code": status}))

    attempt: Any = world.attempt()
    attempt._generation, attempt._states = OLD, SimpleNamespace(set=refuse)
    if is_away:
        assert attempt._results([Call()]) == [42]
    else:
        with pytest.raises(AirflowRuntimeError):
            attempt._results([Call()])


def test_a_kill_before_the_pool_is_reached_orders_its_end(world: World, monkeypatch: pytest.MonkeyPatch) -> None:
    """The worker that comes back is killed while it waits for the pool."""
    ordered: list[str] = []
    monkeypatch.setattr(durable_attempt, "order_stop", lambda pool, _: ordered.append(pool))
    attempt = world.attempt()

    def killed(*_: Any, **__: Any) -> Any:
        attempt.kill()

    monkeypatch.setattr(sky.ComputePool, "attach", killed)
    with pytest.raises(Killed):
        attempt.finish(1, None, "")
    assert ordered == ["sky-old"]
    assert world.done == ["release sky-old"]


def test_the_order_goes_through_stdin_and_no_argument_has_a_secret(monkeypatch: pytest.MonkeyPatch) -> None:
    """Other users see the arguments and the environment of a process."""
    started: list[tuple[list[str], dict[str, Any], bytes]] = []
    ended: list[tuple[str, Any]] = []

    class Pipe(io.BytesIO):
        def close(self) -> None:
            started[-1] = (*started[-1][:2], self.getvalue())

    def start(command: list[str], **options: Any) -> SimpleNamespace:
        started.append((command, options, b""))
        return SimpleNamespace(stdin=Pipe())

    monkeypatch.setattr(stop_order, "subprocess", SimpleNamespace(Popen=start, PIPE=-1, DEVNULL=-3))
    stop_order.order_stop("nightly", sky.RunPod(api_key="a-secret", region="EU-RO-1"))
    ((command, options, order),) = started
    assert command == [sys.executable, "-m", "airflow_provider_skyward.stop_order"]
    assert "env" not in options
    assert options["start_new_session"], "SIGKILL to the task's process group must not end it"

    monkeypatch.setattr(sys, "stdin", SimpleNamespace(buffer=io.BytesIO(order)))
    monkeypatch.setattr(sky, "release", lambda pool, credentials: ended.append((pool, credentials)))
    stop_order.main()
    ((pool, credentials),) = ended
    assert pool == "nightly"
    assert credentials.api_key.get_secret_value() == "a-secret"
    assert credentials.region == "EU-RO-1"


def test_type_checkers_know_each_keyword_of_the_pool() -> None:
    missing = sorted(set(POOL_KEYWORDS) - set(DecoratorKeywords.__annotations__))
    assert not missing, f"add {missing} to integrations/airflow_provider_skyward/keyword_types.py"


@pytest.mark.parametrize(("max_tries", "begins_anew"), [(3, False), (4, True)], ids=["resumed", "cleared"])
def test_a_task_that_was_cleared_while_its_result_was_fetched_begins_anew(
    max_tries: int, begins_anew: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Airflow resumes it where it was, and a clear raises the number of its last try. Its old pool is gone."""
    done: list[str] = []
    before = Generation(1, Phase.STARTED, "pool", "call", pool_id="sky-old", max_tries=3)
    states = SimpleNamespace(get={STATE_KEY: before.to_json()}.get, set=lambda *_: None)
    instance = SimpleNamespace(**{**INSTANCE, "try_number": 2}, max_tries=max_tries)
    operator = SkywardOperator(task_id="t", python_callable=len, provider="local")
    monkeypatch.setattr(SkywardOperator, "execute", lambda *_: done.append("execute"))
    monkeypatch.setattr(SkywardOperator, "_finished", lambda *_: done.append("finish"))
    operator.execute_complete({"ti": instance, "task_state_store": states}, {"calls": 1, "cursors": [0]})
    assert done == ["execute" if begins_anew else "finish"]
