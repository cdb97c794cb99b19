"""A deferrable task whose pool is lost, out of reach, or out of money: what it ends, what it rents, and what it says."""

import importlib.util
import logging
from types import SimpleNamespace
from typing import Any

import pytest

if importlib.util.find_spec("airflow") is None:
    pytest.skip("Airflow is not installed", allow_module_level=True)

import skyward_core as sky
from airflow_provider_skyward import deferred_attempt, durable_attempt
from airflow_provider_skyward.deferred_attempt import DeferredAttempt
from airflow_provider_skyward.generations import STATE_KEY, Generation, Phase, begun, pool_name_of
from airflow_provider_skyward.task_attempt import Killed

WORK = sky.Work(system="airflow", workflow="d", run="r", task="t", attempt="1")
NAME = pool_name_of(WORK)
OLD = Generation(1, Phase.STARTED, NAME, begun(WORK, 1, NAME).call_id, "sky-old", (0,))


@sky.compute
def nothing() -> None:
    return None


class World:
    """What the second try finds, and what it does, in order."""

    def __init__(self) -> None:
        self.done: list[str] = []
        self.states: dict[str, Any] = {STATE_KEY: OLD.to_json()}
        self.pushed: dict[str, Any] = {}
        self.why_not_attached: list[Exception] = []
        self.why_not_released: Exception | None = None
        self.costs = {"sky-old": 1.0}

    def attempt(self) -> DeferredAttempt:
        instance = SimpleNamespace(
            dag_id="d", run_id="r", task_id="t", map_index=-1, try_number=2, xcom_push=self.push, max_tries=3
        )
        states = SimpleNamespace(get=self.states.get, set=self.states.__setitem__)
        context: Any = {"ti": instance, "task_state_store": states}
        return DeferredAttempt(logging.getLogger("test"), context, None)

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
        for name in ("detach", "close", "hand_over", "terminate_now"):
            setattr(pool, name, lambda *_, name=name: self.done.append(f"{name} {pool_id}"))
        pool.detached_call = lambda call_id: SimpleNamespace()
        return pool

    def release(self, pool_id: str, **_: Any) -> None:
        self.done.append(f"release {pool_id}")
        if self.why_not_released is not None:
            raise self.why_not_released


@pytest.fixture
def world(monkeypatch: pytest.MonkeyPatch) -> World:
    world = World()
    monkeypatch.setattr(sky.ComputePool, "attach", world.attach)
    monkeypatch.setattr(sky.ComputePool, "from_spec", world.rent)
    monkeypatch.setattr(sky, "release", world.release)
    monkeypatch.setattr(sky, "cost_of", lambda work: world.costs)
    monkeypatch.setattr(durable_attempt, "LOOK_SECONDS", 0.0)
    return world


def test_a_pool_that_cannot_be_adopted_is_ended_before_another_is_rented(world: World) -> None:
    """The head is lost; other machines of the pool may live, and the call may run on one of them."""
    world.why_not_attached = [sky.NodeLost("its head has ended")]
    generation = world.start()
    assert world.done == ["release sky-old", "rent", f"start {NAME}/2/0", "detach sky-new"]
    assert (generation.number, generation.pool_id) == (2, "sky-new")


def test_a_pool_that_is_out_of_reach_for_a_while_is_adopted(world: World) -> None:
    world.why_not_attached = [sky.Unreachable("away")] * 5
    generation = world.start()
    assert world.done == ["attach sky-old", "close sky-old"]
    assert (generation.number, generation.pool_id) == (1, "sky-old")


def test_a_pool_that_stays_out_of_reach_is_ended_first(world: World, monkeypatch: pytest.MonkeyPatch) -> None:
    """Its call runs, perhaps: it must not run beside the next one."""
    monkeypatch.setattr(deferred_attempt, "REACH_SECONDS", -1.0)
    world.why_not_attached = [sky.Unreachable("away")]
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
    """But a pool that the ledger has, and that cannot be ended from here, is."""
    world.why_not_attached = [sky.BadRequest("no such pool")]
    world.why_not_released = sky.BadRequest("no such pool, or processes of another computer")
    world.costs = costs
    if is_rented:
        assert world.start().pool_id == "sky-new"
    else:
        with pytest.raises(sky.BadRequest):
            world.start()
    assert ("rent" in world.done) is is_rented


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


def test_a_task_that_is_not_followed_any_more_ends_its_pool_and_pushes_its_bill(world: World) -> None:
    """The deferral has timed out, or the trigger has failed."""
    world.attempt().give_up()
    assert world.done == ["release sky-old"]
    assert world.pushed["skyward_cost"]["is_final"]
    assert world.states[STATE_KEY]["phase"] == Phase.ENDED


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
