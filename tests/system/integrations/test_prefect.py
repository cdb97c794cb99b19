"""`SkywardTaskRunner` with a real Prefect API (in a separate server process) and real pools on this machine."""

import json
import os
import pickle
import signal
import subprocess
import sys
import threading
import time
from pathlib import Path
from typing import Any
from uuid import UUID, uuid4

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
    processes_of,
    runner,
)
from tests.waiting import wait_until

from prefect import allow_failure, flow, task, unmapped
from prefect.blocks.system import Secret
from prefect.cache_policies import INPUTS, NO_CACHE
from prefect.client.orchestration import get_client
from prefect.concurrency.sync import concurrency
from prefect.runtime import flow_run as current_run
from prefect.states import Cancelling, Completed
from pydantic import PrivateAttr

import skyward_core as sky
from prefect_skyward import SkywardTaskRunner, blocks, cost_so_far, on_skyward
from prefect_skyward.secrets import values_of

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


@task(retries=2, cache_policy=NO_CACHE)
def use(data: Any, upstream: Any = None) -> None:
    """The function of a task."""


@on_skyward(provider=sky.Local())
def used_at_once(data: Any) -> None:
    """The function of no task."""


def test_what_cannot_travel_rents_nothing(events: list[Any]) -> None:
    """The parameter that holds it is named, and the task is tried once."""
    upstream = [Completed(data=1)]

    @flow(task_runner=runner(events))
    def body() -> list[sky.NotPicklable]:
        found: list[sky.NotPicklable] = []
        for call in (
            lambda: use.submit([1, {"lock": threading.Lock()}], upstream=upstream).result(),
            lambda: use.map([[threading.Lock()]], upstream=unmapped(upstream)).result(),
            lambda: used_at_once({"a": threading.Lock()}),
        ):
            with pytest.raises(sky.NotPicklable) as caught:
                call()
            found.append(caught.value)
        return found

    assert [error.path for error in body()] == ["data[1]['lock']", "data[0]", "data['a']"]
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

    _asked: threading.Event = PrivateAttr(default_factory=threading.Event)
    _may: threading.Event = PrivateAttr(default_factory=threading.Event)

    def launch(self, *args: Any) -> Any:
        self._asked.set()
        assert self._may.wait(120), "nothing let it launch"
        return super().launch(*args)


def test_a_flow_that_fails_while_its_pool_opens_ends_the_opening() -> None:
    """Until then its task run is shown as one that waits for machines."""
    provider = Gated()
    futures, recorded = [], list[Any]()

    @flow(task_runner=runner(recorded, provider=provider))
    def broken() -> None:
        futures.append(add.submit(1, 1))
        assert provider._asked.wait(120)
        wanted = {"task_runs": {"id": {"any_": [str(futures[0].task_run_id)]}}}
        # while a state is replaced, the server may show a run with the new name and without its state
        (shown,) = wait_until(
            lambda: [
                run
                for run in asked("/task_runs/filter", wanted)
                if run["state_name"] == "WaitingForMachines" and run["state"] is not None
            ]
        )
        assert shown["state_type"] == "PENDING"
        assert shown["state"]["message"].startswith("waiting for machines: the pool (1 x machine) is being opened")
        threading.Timer(1.0, provider._may.set).start()
        raise LookupError("the flow itself is wrong")

    with pytest.raises(LookupError, match="the flow itself"):
        broken()
    futures[0].wait()
    assert futures[0].state.name == "Cancelled"
    assert not any(isinstance(event, sky.PoolReady) for event in recorded)
    (pool_id,) = {event.pool_id for event in recorded if isinstance(event, sky.InfraCreating)}
    assert provider.instances(pool_id) == []


@task(cache_policy=INPUTS, persist_result=True)
def remembered(x: int, session: str) -> int:
    return x + len(session)


def test_a_flow_whose_tasks_are_all_cached_rents_nothing(events: list[Any]) -> None:
    """Prefect finds a cached result before it calls the function; a pool is opened only then."""

    session = uuid4().hex  # the storage of results outlives the server

    @flow(task_runner=runner(events))
    def repeated() -> list[int]:
        return remembered.map([1, 2], unmapped(session)).result()

    assert repeated() == [33, 34]
    assert any(isinstance(event, sky.PoolReady) for event in events)
    events.clear()
    assert repeated() == [33, 34]
    assert events == []


@pytest.mark.parametrize("is_async", [False, pytest.param(True, marks=pytest.mark.nightly)])
def test_a_task_that_waits_for_a_slot_of_a_limit_rents_nothing(events: list[Any], is_async: bool) -> None:
    tag = f"one of us, {is_async}"

    @task(tags=[tag], cache_policy=NO_CACHE)
    def plain() -> int:
        return 3

    @task(tags=[tag], cache_policy=NO_CACHE)
    async def coroutine() -> int:
        return 3

    @flow(task_runner=runner(events))
    def waiting() -> int:
        with concurrency(f"tag:{tag}"):
            future = (coroutine if is_async else plain).submit()
            wanted = {"task_runs": {"id": {"any_": [str(future.task_run_id)]}}}
            wait_until(lambda: asked("/task_runs/filter", wanted))  # its engine has begun
            assert events == []
        return future.result()

    with get_client(sync_client=True) as client:
        client.create_concurrency_limit(tag=tag, concurrency_limit=1)
    assert waiting() == 3
    assert any(isinstance(event, sky.PoolReady) for event in events)


class Refusing(sky.Local):
    """Sells nothing, and counts how often it was asked."""

    _asked: list[float] = PrivateAttr(default_factory=list)

    def offers(self, *args: Any) -> Any:
        self._asked.append(time.monotonic())
        raise sky.ProviderFailed("the cloud is down")


def test_tasks_that_were_submitted_before_an_opening_failed_fail_with_it() -> None:
    """Also those whose turn comes later; each does not rent again. What is submitted afterwards does."""
    provider = Refusing()

    @flow(task_runner=runner([], provider=provider))
    def refused() -> list[str]:
        first = add.submit(1, 1)
        later = [add.submit(1, 1, wait_for=[allow_failure(first)]) for _ in range(3)]
        names = [future.wait() or future.state.name for future in (first, *later)]
        asked_once = len(provider._asked)
        last = add.submit(1, 1)
        last.wait()
        assert asked_once < len(provider._asked) == 2 * asked_once
        return [*names, last.state.name]

    assert refused(return_state=True).result(raise_on_failure=False) == ["Failed"] * 5


def test_machines_are_terminated_before_a_flow_is_tried_again(events: list[Any], tmp_path: Path) -> None:
    bodies: list[float] = []
    finals: list[float] = []
    ids = []

    def keep(event: Any) -> None:
        events.append(event)
        if isinstance(event, sky.CostFinal):
            finals.append(time.monotonic())

    @flow(task_runner=runner(events, on_event=keep), retries=1, retry_delay_seconds=10)
    def second_time_lucky() -> int:
        from prefect.runtime import flow_run

        ids.append(UUID(flow_run.id))
        bodies.append(time.monotonic())
        if len(bodies) == 1:
            hang.submit(tmp_path / "pid")
            wait_until((tmp_path / "pid").exists)
            raise LookupError("the first attempt")
        assert not is_alive(int((tmp_path / "pid").read_text()))
        return add.submit(1, 2).result()

    assert second_time_lucky() == 3
    assert len(finals) == 2
    assert finals[0] < bodies[1] - 1, "the machines were kept through the delay"
    assert wait_until(lambda: [r for r in logs(ids[0]) if "machines of this attempt are given back" in r["message"]])


SERVED = """
import json, os, sys, time
from pathlib import Path
from prefect import flow, task, unmapped
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
            deployment = wait_until(lambda: deployment_named("patient"), 120)
            run = client.create_flow_run_from_deployment(deployment.id, parameters={"path": str(marker)})
            wait_until(lambda: marker.exists() and marker.read_text(), 120)
            began = json.loads(marker.read_text())
            client.set_flow_run_state(run.id, Cancelling())
            wait_until(lambda: client.read_flow_run(run.id).state.name == "Cancelled", 120)
            wait_until(lambda: processes_of({began["pool"]}) == [])
            assert not is_alive(began["pid"])
            records = wait_until(lambda: [r["message"] for r in logs(run.id) if "done: " in r["message"]])
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
        wait_until(lambda: all((tmp_path / name).exists() for name in "01"))
        instance = (tmp_path / "1").read_text()
        signal_members(instance, signal.SIGKILL)
        wait_until(lambda: failures)
        (tmp_path / "go").touch()
        (lost,) = wait_until(lambda: events_of(ids[0], "skyward.instance.lost"))
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
