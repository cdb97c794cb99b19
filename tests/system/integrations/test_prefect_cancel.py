"""What a flow run does not ask for: a cancellation in a plain process, which gets no signal, and the loss of a node."""

import contextvars
import os
import signal
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any
from uuid import UUID

import pytest

pytest.importorskip("prefect")

from tests.integrations import prefect_server  # noqa: I001 - before Prefect
from tests.conftest import signal_members
from tests.integrations.prefect_server import events_of, processes_of, runner, wait_for

from prefect import flow, task
from prefect.cache_policies import NO_CACHE
from prefect.client.orchestration import get_client
from prefect.exceptions import CancelledRun
from prefect.runtime import flow_run as current_run
from prefect.states import Cancelling

import skyward_core as sky
from prefect_skyward import cancellation, on_skyward

pytestmark = [
    pytest.mark.filterwarnings("default"),  # Prefect's own warnings are not our faults
]

api = pytest.fixture(scope="module", autouse=True)(prefect_server.served)


@pytest.fixture(autouse=True)
def quick(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(cancellation, "ASK_SECONDS", 0.2)


@task(cache_policy=NO_CACHE)
def hang(path: Path) -> None:
    wait_for_file(path)


@task(cache_policy=NO_CACHE)
@on_skyward(provider=sky.Local(price_per_hour=36.0))
def hang_beside(path: Path) -> None:
    wait_for_file(path)


def wait_for_file(path: Path) -> None:
    path.with_suffix(".new").write_text(os.environ["SKYWARD_POOL_ID"])
    path.with_suffix(".new").rename(path)
    time.sleep(600)


@pytest.fixture
def cancelling(tmp_path: Path) -> Iterator[Callable[[UUID], None]]:
    """Cancel a flow run as the UI does, once its call runs."""
    threads: list[threading.Thread] = []

    def cancel(run: UUID) -> None:
        wait_for((tmp_path / "began").exists)
        with get_client(sync_client=True) as client:
            client.set_flow_run_state(run, Cancelling())

    def begin(run: UUID) -> None:
        # the address of the server is a context variable
        threads.append(threading.Thread(target=contextvars.copy_context().run, args=(cancel, run)))
        threads[-1].start()

    yield begin
    for thread in threads:
        thread.join()


@pytest.mark.parametrize("task_runner", ["ours", "another"])
def test_a_run_that_no_process_stops_ends_its_calls_and_machines(
    task_runner: str, cancelling: Callable[[UUID], None], tmp_path: Path
) -> None:
    """Also with `on_unfinished="wait"`, and beside another runner. The flow run is Cancelled, and so are its task runs; a
    task that comes later does not run.
    """
    options = {"task_runner": runner([], on_unfinished="wait")} if task_runner == "ours" else {}
    ids: list[UUID] = []
    later: list[BaseException] = []

    @flow(**options)
    def patient() -> None:
        ids.append(UUID(current_run.id))
        cancelling(ids[0])
        one = hang if task_runner == "ours" else hang_beside
        try:
            one.submit(tmp_path / "began").result()
        finally:
            with pytest.raises((sky.PoolClosed, CancelledRun)) as caught:
                one.submit(tmp_path / "later").result()
            later.append(caught.value)

    with pytest.raises(CancelledRun):
        patient()
    assert later
    assert not (tmp_path / "later").exists()
    pool = (tmp_path / "began").read_text()
    wait_for(lambda: processes_of({pool}) == [])
    with get_client(sync_client=True) as client:
        wait_for(lambda: client.read_flow_run(ids[0]).state.name == "Cancelled")
    receipts = wait_for(lambda: [one for one in sky.receipts_of(sky.Work(run=str(ids[0]))) if one["ended_at"]])
    assert [(one["pool_id"], one["left"]) for one in receipts] == [(pool, [])]


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
