"""`SkywardTaskRunner` with a real Prefect API (in a separate server process) and real pools on this machine."""

import json
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
    deployment_named,
    is_alive,
    logs,
    processes_of,
    runner,
    wait_for,
)

from prefect import flow, task
from prefect.blocks.system import Secret
from prefect.cache_policies import NO_CACHE
from prefect.client.orchestration import get_client
from prefect.states import Cancelling
from pydantic import PrivateAttr

import skyward_core as sky
from prefect_skyward import SkywardTaskRunner, cost_so_far
from prefect_skyward.secrets import values_of
from prefect_skyward.ui import RunLog, RunLogs

pytestmark = [
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
