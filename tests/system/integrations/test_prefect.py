"""`SkywardTaskRunner` with a real Prefect API (in a separate server process) and real pools on this machine."""

import contextlib
import json
import os
import pickle
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Generator
from dataclasses import dataclass
from decimal import Decimal
from pathlib import Path
from typing import Any, ClassVar
from uuid import UUID

import cloudpickle
import pytest

pytest.importorskip("prefect")

from tests.integrations import prefect_server  # noqa: I001 - before Prefect
from tests.conftest import signal_members
from tests.integrations.prefect_server import (
    asked,
    database_text,
    deployment_named,
    events_of,
    is_alive,
    logs,
    messages,
    processes_of,
    runner,
    wait_for,
)

from prefect import flow, task
from prefect.assets import materialize
from prefect.blocks.system import Secret
from prefect.cache_policies import NO_CACHE
from prefect.client.orchestration import get_client
from prefect.runtime import flow_run as current_run
from prefect.states import Cancelling
from pydantic import PrivateAttr

import skyward_core as sky
from prefect_skyward import SkywardTaskRunner, blocks, cost_so_far, on_skyward, skyward_options
from prefect_skyward.secrets import values_of
from skyward_core.distributed.group import Group, decorator
from skyward_core.distributed.group import places as places_of_call
from skyward_core.ledger.ledger import Ledger, default_url
from skyward_core.ledger.users import users_of

pytestmark = [pytest.mark.filterwarnings("default")]  # Prefect's own warnings are not our faults
api = pytest.fixture(scope="module", autouse=True)(prefect_server.served)
events = pytest.fixture(prefect_server.recorded)
SECRET = "s3cr3t-0123456789"


@task
def add(a: int, b: int) -> int:
    return a + b


@task(cache_policy=NO_CACHE)
def hang(path: Path) -> None:
    path.with_suffix(".new").write_text(str(os.getpid()))
    path.with_suffix(".new").rename(path)  # atomically, because it may be stopped at any moment
    time.sleep(600)


def test_a_direct_call_runs_here_and_opens_no_pool(events: list[Any]) -> None:
    """`task(x)` never reaches a task runner, and a flow without a submit rents nothing."""

    @task
    def pid() -> int:
        return os.getpid()

    @flow(task_runner=runner(events))
    def direct() -> tuple[int, float]:
        return pid(), cost_so_far()

    assert direct() == (os.getpid(), 0.0)
    assert events == []


def test_importing_the_package_is_light() -> None:
    """Prefect's server imports each collection, and the module of its blocks."""
    heavy = {
        "prefect_skyward": ("prefect", "pydantic", "distributed"),
        "prefect_skyward.blocks": ("distributed", "asyncssh", "skyward_core.pool.pool", "skyward_core.spec"),
    }
    for module, names in heavy.items():
        code = f"import sys, {module}; print([m for m in {names!r} if m in sys.modules])"
        done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
        assert done.stdout.strip() == "[]"


# ── how a flow ends ──────────────────────────────────────────────────────────────────────────────────────────────────


class Gated(sky.Local):
    """Launches only after a signal of the test."""

    _may: threading.Event = PrivateAttr(default_factory=threading.Event)

    def launch(self, *args: Any) -> Any:
        assert self._may.wait(60), "nothing let it launch"
        return super().launch(*args)


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


def test_machines_are_terminated_before_a_flow_is_tried_again(events: list[Any], tmp_path: Path) -> None:
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
            deployment = wait_for(lambda: deployment_named("patient"), 120)
            run = client.create_flow_run_from_deployment(deployment.id, parameters={"path": str(marker)})
            wait_for(lambda: marker.exists() and marker.read_text(), 120)
            began = json.loads(marker.read_text())
            client.set_flow_run_state(run.id, Cancelling())
            wait_for(lambda: client.read_flow_run(run.id).state.name == "Cancelled", 120)
            wait_for(lambda: processes_of({began["pool"]}) == [])
            assert not is_alive(began["pid"])
            records = wait_for(lambda: [r["message"] for r in logs(run.id) if "done: " in r["message"]])
            assert records
        finally:
            server.send_signal(signal.SIGINT)
            server.wait(timeout=60)


def test_a_lost_node_fails_its_call_which_prefect_tries_again(tmp_path: Path) -> None:
    """With `NodeLost` in the engine, so that the task's own condition sees it; an event of Prefect names the machine."""
    ids: list[str] = []
    failures: list[Any] = []

    def only_if_a_node_is_lost(_task: Any, _run: Any, state: Any) -> bool:
        failures.append(state.data)
        return isinstance(state.data, sky.NodeLost)

    @task(retries=1, retry_condition_fn=only_if_a_node_is_lost, cache_policy=NO_CACHE)
    def wait_for_go(number: int) -> int:
        info = sky.instance_info()
        assert info is not None
        (tmp_path / f"{info.node}.new").write_text(os.environ["SKYWARD_INSTANCE_ID"])
        (tmp_path / f"{info.node}.new").rename(tmp_path / str(info.node))
        while not (tmp_path / "go").exists():
            time.sleep(0.02)
        return number

    @flow(task_runner=runner([], nodes=2, retries=0))
    def losing() -> list[int]:
        ids.append(current_run.id)
        futures = wait_for_go.map([0, 1])
        wait_for(lambda: all((tmp_path / name).exists() for name in "01"))
        instance = (tmp_path / "1").read_text()
        signal_members(instance, signal.SIGKILL)
        wait_for(lambda: failures)
        (tmp_path / "go").touch()
        (lost,) = wait_for(lambda: events_of(ids[0], "skyward.instance.lost"))
        assert lost["payload"]["instance_id"] == instance
        return futures.result()

    assert losing() == [0, 1]
    assert [type(failure) for failure in failures] == [sky.NodeLost]


# ── logs, secrets, blocks ────────────────────────────────────────────────────────────────────────────────────────────


def test_a_missing_block_is_named() -> None:
    with pytest.raises(sky.BadRequest, match="HF_TOKEN"):
        SkywardTaskRunner(secrets={"HF_TOKEN": Secret(value="block-0123456789")})
    with pytest.raises(sky.BadRequest, match="the secret HF_TOKEN is to be Prefect's Secret block 'no-such-block'"):
        values_of(sky.PoolSpec.of(secrets={"HF_TOKEN": sky.Secret.from_store("no-such-block")}))


def test_a_runner_is_made_from_a_saved_block_and_its_pickle_names_the_block_only(
    api: str, tmp_path_factory: pytest.TempPathFactory
) -> None:
    command = [sys.executable, "-m", "prefect", "block", "register", "-m", "prefect_skyward"]
    environ = {**os.environ, "PREFECT_API_URL": api}
    registered = subprocess.run(command, capture_output=True, text=True, check=True, env=environ).stdout
    assert "Successfully registered 6 blocks" in registered
    types = {one["slug"]: one for one in asked("/block_types/filter", {})}
    schemas = asked(
        "/block_schemas/filter", {"block_schemas": {"block_type_id": {"any_": [types["skyward-pool"]["id"]]}}}
    )
    form = schemas[0]["fields"]["properties"]
    assert set(form) == set(blocks.SkywardPool.model_fields)
    assert form["accelerator"]["description"].startswith("The accelerators of one machine")
    credentials = blocks.SkywardAWSCredentials(access_key_id="AKIA-of-test", secret_access_key=SECRET)
    credentials.save("team", overwrite=True)
    blocks.SkywardPool(credentials=credentials, accelerator="A100").save("cloud", overwrite=True)
    blocks.SkywardPool(provider="local", provider_options={"price_per_hour": 1.0}, nodes=2).save("gpu", overwrite=True)

    rented = SkywardTaskRunner.from_block("cloud")
    assert rented.spec.providers[0].secret_access_key.get_secret_value() == SECRET
    texts = [cloudpickle.dumps(rented), pickle.dumps(rented.duplicate()), rented.spec.model_dump_json().encode()]
    assert not any(SECRET.encode() in text for text in texts)
    assert pickle.loads(texts[0]).spec.providers[0].secret_access_key.get_secret_value() == SECRET
    assert SECRET not in database_text(tmp_path_factory)

    @flow(task_runner=SkywardTaskRunner.from_block("gpu"))
    def doubled() -> list[int]:
        return add.map([1, 2, 3], [1, 2, 3]).result()

    assert doubled() == [2, 4, 6]
    with pytest.raises(sky.BadRequest, match="there is no SkywardPool block 'no-such'"):
        SkywardTaskRunner.from_block("no-such")
    assert form["nodes"]["default"] == 1


# ── a pool with a name ───────────────────────────────────────────────────────────────────────────────────────────────


@task(cache_policy=NO_CACHE)
def pool_id() -> str:
    return os.environ["SKYWARD_POOL_ID"]


def test_flow_runs_share_a_pool_with_a_name_and_a_retry_finds_it_warm(tmp_path: Path) -> None:
    """While the flow run waits for its retry the pool has no users."""
    events: list[Any] = []
    shared = runner(events, name="team-gpu", keep_warm=600, lease_seconds=10)
    pools: list[str] = []

    @flow(name="beside", task_runner=shared)
    def beside() -> str:
        return pool_id.submit().result()

    @flow(name="trying", task_runner=shared, retries=1, retry_delay_seconds=2)
    def trying() -> None:
        if pools:
            with Ledger(default_url()) as ledger:
                assert [user.lives for user in users_of(ledger, pools[0])] == [False]
        pools.append(pool_id.submit().result())
        if len(pools) == 1:
            raise LookupError("the first attempt")
        pools.append(beside())
        with skyward_options(nodes=2):
            pools.append(pool_id.submit().result())

    trying()
    pools.append(beside())
    try:
        first, second, during, other, after = pools
        assert first == second == during == after != other
        with Ledger(default_url()) as ledger:
            (share,) = ledger.shares(first)  # of the process that has opened it: the others know no cost of a call
            other_work = sky.Work(system="prefect", workflow="another")
            ledger.set_shares(first, {other_work: Decimal("0.25")}, keeps_others=True)
            ledger.set_shares(first, {other_work: Decimal("0.5")}, keeps_others=True)
            assert share.workflow == "trying"
            assert set(ledger.shares(first)) == {share, other_work}
            assert ledger.shares(first)[other_work] == Decimal("0.5")
    finally:
        sky.release(pools[0])


# ── hardware for each step ───────────────────────────────────────────────────────────────────────────────────────────


def here() -> tuple[str, str]:
    """The pool and the step's name for it."""
    return os.environ.get("SKYWARD_POOL_ID", ""), os.environ.get("STEP", "")


@task(cache_policy=NO_CACHE)
def where(_number: int = 0) -> tuple[str, str]:
    return here()


@task(cache_policy=NO_CACHE)
@on_skyward(nodes=2, env={"STEP": "marked"})
def marked(_number: int = 0) -> tuple[str, str]:
    return here()


@materialize("test://model", cache_policy=NO_CACHE)
@on_skyward(nodes=2, env={"STEP": "marked"})
def model() -> tuple[str, str]:
    return here()


@task(cache_policy=NO_CACHE)
@on_skyward(nodes=2, env={"STEP": "marked"})
async def marked_coroutine() -> tuple[str, str]:
    return here()


def ready(events: list[Any]) -> list[int]:
    return [event.nodes for event in events if isinstance(event, sky.PoolReady)]


def test_each_step_has_its_hardware_and_equal_steps_share_a_pool(events: list[Any]) -> None:
    @flow(task_runner=SkywardTaskRunner(inherit=True, nodes=2, env={"STEP": "marked"}))
    def inheriting() -> tuple[str, str]:
        return where.submit().result()

    @flow(task_runner=runner(events))
    def steps() -> dict[str, Any]:
        found: dict[str, Any] = {"plain": [where.submit().result()]}
        assert ready(events) == [1]
        with skyward_options(nodes=2):
            with skyward_options(env={"STEP": "marked"}):
                found["options"] = [where.submit().result(), *where.map([1, 2]).result()]
            assert ready(events) == [1, 2]
        found["decorator"] = [
            marked.submit().result(),
            *marked.map([1, 2]).result(),
            model.submit().result(),
            marked.with_options(name="renamed").submit().result(),
            marked(),
            model(),
            marked_coroutine.submit().result(),
        ]
        with skyward_options(env={"STEP": "inner"}, nodes=1):
            found["inner"] = [marked.submit().result(), marked()]
        with pytest.raises(sky.BadRequest, match="did you mean 'nodes'"), skyward_options(node=2):
            pass
        found["decorator"].append(inheriting())
        found["cost"] = cost_so_far()
        return found

    found = steps()
    assert sorted(ready(events)) == [1, 1, 2]
    pools = {name: set(places) for name, places in found.items() if name != "cost"}
    assert pools["options"] == pools["decorator"]
    assert [len(places) for places in pools.values()] == [1, 1, 1, 1]
    assert [name for ((_, name),) in pools.values()] == ["", "marked", "marked", "inner"]
    assert len({pool for ((pool, _),) in pools.values()}) == 3
    finals = [event.total_cost for event in events if isinstance(event, sky.CostFinal)]
    assert len(finals) == 3
    assert max(finals) < found["cost"] <= sum(finals)


@task(cache_policy=NO_CACHE)
def wrong() -> None:
    raise ValueError("wrong")


class SoldOut(sky.Local):
    def offers(self, want: Any) -> Any:
        return []


def test_a_pool_that_is_idle_ends_and_the_next_call_opens_another(events: list[Any]) -> None:
    def gone() -> bool:
        return any(isinstance(event, sky.CostFinal) for event in events)

    @flow(task_runner=runner(events, idle_timeout=0.3, max_cost=5.0))
    def patient() -> list[Any]:
        first = where.submit().result()
        wait_for(gone)
        second = where.submit().result()
        failed = wrong.submit()
        with skyward_options(nodes=2):
            after_failure = where.submit(failed)
        with skyward_options(provider=SoldOut()):
            sold_out = where.submit()
        sold_out.wait()
        after_failure.wait()
        return [first, second, after_failure.state.name, sold_out.state.message, cost_so_far()]

    first, second, after_failure, sold_out, cost = patient()
    assert first[0] != second[0]
    assert after_failure == "NotReady"
    assert "NoCapacity" in sold_out
    assert set(ready(events)) == {1}
    assert cost >= next(event.total_cost for event in events if isinstance(event, sky.CostFinal))


# ── calls on all workers ─────────────────────────────────────────────────────────────────────────────────────────────


@dataclass(frozen=True)
class Ranks:
    """A framework that lets the ranks exchange their numbers."""

    needs_process: ClassVar[bool] = False

    @contextlib.contextmanager
    def running(self, group: Group) -> Generator[None]:
        group.set_environment({"RANKS": str(group.exchange(group.place.rank))})
        yield


def trained() -> Any:
    return decorator(Ranks(), 60.0)


@task(cache_policy=NO_CACHE)
def node() -> int:
    info = sky.instance_info()
    assert info is not None
    print("here")
    return info.node


@task(cache_policy=NO_CACHE)
@on_skyward(nodes=2, broadcast=True)
async def node_coroutine() -> int:
    return node.fn()


@task(cache_policy=NO_CACHE)
@on_skyward(nodes=2, broadcast=True)
@trained()
def train() -> tuple[int, str]:
    (place,) = places_of_call(1)
    return place.rank, os.environ["RANKS"]


@task(cache_policy=NO_CACHE)
@on_skyward(nodes=2, broadcast=True)
def broken_on_one() -> None:
    if node.fn() == 1:
        raise ValueError("node 1 is wrong")
    time.sleep(600)


@task(timeout_seconds=4, cache_policy=NO_CACHE)
@on_skyward(nodes=2, broadcast=True)
def endless() -> None:
    time.sleep(600)


@task(cache_policy=NO_CACHE)
def interrupted() -> None:
    raise KeyboardInterrupt


def test_a_broadcast_gives_a_tuple_with_a_result_of_each_node(events: list[Any]) -> None:
    """By options and by the decorator, submitted and called; the lines of all nodes are in the log of the task run."""

    @flow(task_runner=runner(events))
    def everywhere() -> Any:
        from prefect.runtime import flow_run

        with skyward_options(nodes=2, broadcast=True):
            future = node.submit()
        assert future.result() == node_coroutine.submit().result() == (0, 1)
        assert train.submit().result() == train() == ((0, "[0, 1]"), (1, "[0, 1]"))
        with pytest.raises(ValueError, match="node 1 is wrong"):
            broken_on_one.submit().result()
        assert endless.submit(return_state=True).name == "TimedOut"
        state = interrupted.submit(return_state=True)
        assert (state.type.name, "KeyboardInterrupt" in state.message) == ("CRASHED", True)
        return flow_run.id

    run = everywhere()
    assert [event.nodes for event in events if isinstance(event, sky.PoolReady)].count(2) == 1
    wait_for(lambda: {"[node 0] here", "[node 1] here"} <= {text for _, text in messages(run)})
    assert not any("cannot interrupt blocking operations" in text for _, text in messages(run))
