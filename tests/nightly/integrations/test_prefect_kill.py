"""Flow runs that are cancelled or killed, of a worker and of `serve()`: no machine lives, and the ledger has the bill."""

import contextvars
import json
import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Generator, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any
from uuid import UUID

import pytest

pytest.importorskip("prefect")

from tests.integrations import prefect_server  # noqa: I001 - before Prefect
from tests.integrations.prefect_server import asked, deployment_named, is_alive, processes_of
from tests.waiting import wait_until

from prefect import flow, task
from prefect.cache_policies import NO_CACHE
from prefect.client.orchestration import SyncPrefectClient, get_client
from prefect.events import emit_event
from prefect.runtime import flow_run as current_run
from prefect.client.schemas.actions import WorkPoolCreate
from prefect.exceptions import CancelledRun, PrefectHTTPStatusError
from prefect.states import Cancelling, Running

import skyward_core as sky
from prefect_skyward import cancellation, on_skyward
from prefect_skyward.automations import CRASH_GUARD_NAME, HEARTBEAT, deploy_crash_guard
from tests.kill.console import REPOSITORY, RunningService
from tests.kill.provider import PromptRental


pytestmark = [
    pytest.mark.timeout(600),  # the first test waits for servers, the worker and END_SECONDS
    pytest.mark.filterwarnings("default"),  # Prefect's own warnings are not our faults
]
api = pytest.fixture(scope="module", autouse=True)(prefect_server.served_alone)
END_SECONDS = 180.0
"""For a state that Prefect sets: 78 s were seen on a busy machine."""
WORK_POOL = "kill-processes"
PHASES = ("provisioning", "bootstrap", "running")
HOSTS = ("worker", "served")

FLOWS = """
import json, os, time
from pathlib import Path
from prefect import flow, serve, task
from prefect.cache_policies import NO_CACHE
from prefect_skyward import SkywardTaskRunner, cancellation, skyward_options
from tests.kill.provider import PromptRental
import skyward_core as sky

@task(cache_policy=NO_CACHE)
def hang(path: str) -> None:
    names = ("SKYWARD_POOL_ID", "SKYWARD_INSTANCE_ID")
    Path(path + ".new").write_text(json.dumps([os.getpid(), *(os.environ[name] for name in names)]))
    Path(path + ".new").rename(path)
    time.sleep(600)

def two_shapes(folder: str, asks: float, task) -> None:
    cancellation.ASK_SECONDS = asks
    (Path(folder) / "pid").write_text(str(os.getpid()))
    first = task.submit(folder + "/one")
    with skyward_options(memory="1GB"):
        second = task.submit(folder + "/two")
    first.result()
    second.result()

def rents(phase):
    return SkywardTaskRunner(provider=PromptRental(url=os.environ[f"{phase}_URL"], timeout_seconds=5.0))

# each try of a task opens a pool again: so the phase lasts until the run is cancelled
@flow(name="kill-provisioning", task_runner=rents("PROVISIONING"))
def provisioning(folder: str, asks: float = 600.0) -> None:
    two_shapes(folder, asks, hang.with_options(retries=100))

@flow(name="kill-bootstrap", task_runner=rents("BOOTSTRAP"))
def bootstrap(folder: str, asks: float = 600.0) -> None:
    two_shapes(folder, asks, hang.with_options(retries=100))

@flow(name="kill-running", task_runner=SkywardTaskRunner(provider=sky.Local(price_per_hour=36.0)))
def running(folder: str, asks: float = 600.0) -> None:
    two_shapes(folder, asks, hang)

if __name__ == "__main__":
    serve(
        *(one.to_deployment(f"kill-served-{one.fn.__name__}") for one in (provisioning, bootstrap, running)),
        print_starting_message=False,
        pause_on_shutdown=False,
    )
"""


def unless_locked[T](ask: Callable[[], T]) -> T | None:
    """Return the answer of the server; None for an error of its own: "database is locked", by the writes of all runs."""
    try:
        return ask()
    except PrefectHTTPStatusError as error:
        if error.response.status_code < 500:
            raise
        return None


@dataclass(frozen=True)
class Run:
    """A flow run, and the folder in which its process and its calls write who they are."""

    id: UUID
    phase: str
    folder: Path
    rental: RunningService | None

    @property
    def work(self) -> sky.Work:
        return sky.Work(system="prefect", workflow=f"kill-{self.phase}", run=str(self.id))

    @property
    def pid_file(self) -> Path:
        return self.folder / "pid"

    @property
    def pid(self) -> int:
        return int(self.pid_file.read_text())

    @property
    def receipts(self) -> list[dict[str, Any]]:
        return sky.receipts_of(self.work)

    @property
    def state(self) -> str:
        """The name of its state; "" if the server does not answer now."""

        def read() -> str | None:
            with get_client(sync_client=True) as client:
                state = client.read_flow_run(self.id).state
            return state.name if state is not None else None

        return unless_locked(read) or ""

    def machines(self) -> set[str]:
        """The living machines of all its pools, as their provider lists them."""
        provider = sky.Local() if self.rental is None else PromptRental(url=self.rental.url)
        return {machine.id for receipt in self.receipts for machine in provider.instances(receipt["pool_id"])}

    def await_phase(self) -> None:
        """Wait until both pools have a machine; in the last phase until both calls run."""
        ends = ("Failed", "Completed", "Crashed")
        # asked once: while a run is provisioning, its machines come and go with each try
        seen = wait_until(lambda: "begun" if self._has_begun() else (end := self.state) in ends and end, END_SECONDS)
        assert seen == "begun"

    def _has_begun(self) -> bool:
        if self.phase == "running":
            return (self.folder / "one").exists() and (self.folder / "two").exists()
        return len(self.receipts) >= 2 and bool(self.machines())

    def cancel(self) -> None:
        """Cancel it as the UI does."""

        def ask() -> bool:
            with get_client(sync_client=True) as client:
                client.set_flow_run_state(self.id, Cancelling())
            return True

        wait_until(lambda: unless_locked(ask))

    def await_end(self, state: str) -> None:
        wait_until(lambda: self.state == state, END_SECONDS)


@dataclass(frozen=True)
class Hosts:
    """The worker, and what runs on it and on `serve()`: by host and phase, to be cancelled; "killed": to be killed."""

    worker: subprocess.Popen[bytes]
    runs: dict[tuple[str, str], Run]


@pytest.fixture(scope="module")
def hosts(api: str, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Hosts]:
    """All runs, two at a time. The last ones try again and again, and so write most."""
    folder = tmp_path_factory.mktemp("kill")
    (folder / "flows.py").write_text(FLOWS)
    with ExitStack() as stack:
        rentals = {
            phase: stack.enter_context(RunningService(folder / f"rental-{phase}"))
            for phase in ("provisioning", "bootstrap")
        }
        # the request takes effect, and is never answered
        rentals["provisioning"].break_down(verb="create", hangs_after=1000)
        environ = {
            **os.environ,
            **{f"{phase.upper()}_URL": rental.url for phase, rental in rentals.items()},
            "PREFECT_API_URL": api,
            "PYTHONPATH": str(REPOSITORY),
        }
        deploy_for_the_worker(folder)
        worker = stack.enter_context(
            program("-m", "prefect", "worker", "start", "--pool", WORK_POOL, folder=folder, environ=environ)
        )
        stack.enter_context(program("flows.py", folder=folder, environ=environ))
        runs: dict[tuple[str, str], Run] = {}
        for case in ("killed", "orphaned", "running", "bootstrap", "provisioning"):
            phase = case if case in PHASES else "running"
            begun_now = [
                begun(host, case, Run(UUID(int=0), phase, folder, rentals.get(phase)))
                for host in HOSTS
                if (host, case) != ("served", "orphaned")
            ]
            runs.update(((run.folder.name.partition("-")[0], case), run) for run in begun_now)
            for run in begun_now:  # not all at once: requests to SQLite that waits for its lock take up to a minute
                wait_until(run.pid_file.exists, END_SECONDS)
        try:
            yield Hosts(worker, runs)
        finally:  # a run that a failed test has left outlives a worker that was killed
            for run in runs.values():
                if run.pid_file.exists() and is_alive(run.pid):
                    os.kill(run.pid, signal.SIGKILL)


def deploy_for_the_worker(folder: Path) -> None:
    step = {"prefect.deployments.steps.set_working_directory": {"directory": str(folder)}}
    with get_client(sync_client=True) as client:
        client.create_work_pool(WorkPoolCreate(name=WORK_POOL, type="process"))
        for phase in PHASES:
            client.create_deployment(
                client.create_flow_from_name(f"kill-{phase}"),
                f"kill-worker-{phase}",
                work_pool_name=WORK_POOL,
                entrypoint=f"flows.py:{phase}",
                pull_steps=[step],
                enforce_parameter_schema=False,
            )


@contextmanager
def program(*arguments: str, folder: Path, environ: dict[str, str]) -> Generator[subprocess.Popen[bytes]]:
    """A program of Python, which is interrupted at the end."""
    with subprocess.Popen([sys.executable, *arguments], cwd=folder, env=environ) as process:
        try:
            yield process
        finally:
            process.send_signal(signal.SIGINT)
            process.wait(60)


def begun(host: str, case: str, run: Run) -> Run:
    folder = run.folder / f"{host}-{case}"
    folder.mkdir()
    deployment = wait_until(lambda: deployment_named(f"kill-{host}-{run.phase}"), 90)
    parameters: dict[str, Any] = {"folder": str(folder)}
    if case == "orphaned":
        parameters["asks"] = 1.0
    with get_client(sync_client=True) as client:
        begun = client.create_flow_run_from_deployment(deployment.id, parameters=parameters)
    return Run(begun.id, run.phase, folder, run.rental)


def assert_all_is_ended_and_billed(run: Run) -> None:
    wait_until(lambda: all(receipt["ended_at"] for receipt in run.receipts))
    receipts = run.receipts
    pools = {receipt["pool_id"] for receipt in receipts}
    assert len(pools) >= 2
    assert run.machines() == set()
    wait_until(lambda: processes_of(pools) == [])
    wait_until(lambda: not is_alive(run.pid))
    billed = {machine["cloud_id"]: machine for receipt in receipts for machine in receipt["resources"]}
    assert [receipt["left"] for receipt in receipts] == [[] for _ in receipts]
    assert all(machine["cost_usd"] > 0 for machine in billed.values())
    total = sum(receipt["total_cost_usd"] for receipt in receipts)
    assert sum(sky.cost_of(run.work).values()) == pytest.approx(total)
    if run.rental is None:
        calls = [json.loads((run.folder / name).read_text()) for name in ("one", "two")]
        assert {(pool, machine) for _, pool, machine in calls} == {
            (receipt["pool_id"], machine["cloud_id"]) for receipt in receipts for machine in receipt["resources"]
        }
        assert not any(is_alive(pid) for pid, _, _ in calls)
    else:
        seen = run.rental.look()
        assert not any(seen.billed(pool) for pool in pools)
        assert {machine["id"] for pool in pools for machine in seen.of(pool)} == billed.keys()


def states_of_task_runs(run: Run) -> set[str]:
    body = {"task_runs": {"flow_run_id": {"any_": [str(run.id)]}}}
    return {one["state_name"] for one in unless_locked(lambda: asked("/task_runs/filter", body)) or ()}


@pytest.fixture(scope="module")
def stopped(hosts: Hosts) -> Hosts:
    """Each run is cancelled or killed once it is in its phase: they end at the same time."""
    for (_, case), run in reversed(hosts.runs.items()):
        if case == "orphaned":
            continue
        run.await_phase()
        if case == "killed":
            os.kill(run.pid, signal.SIGKILL)
        else:
            run.cancel()
    return hosts


@pytest.mark.parametrize("host", HOSTS)
@pytest.mark.parametrize("phase", PHASES)
def test_a_cancelled_run_leaves_no_machine_and_its_whole_bill(phase: str, host: str, stopped: Hosts) -> None:
    """On a rental service that never answers, on machines that never come up, and while calls run; two pools each."""
    run = stopped.runs[host, phase]
    run.await_end("Cancelled")
    assert_all_is_ended_and_billed(run)
    wait_until(lambda: states_of_task_runs(run) == {"Cancelled"})


@pytest.mark.parametrize("host", HOSTS)
def test_a_run_whose_process_is_killed_has_crashed_and_leaves_no_machine(host: str, stopped: Hosts) -> None:
    run = stopped.runs[host, "killed"]
    run.await_end("Crashed")
    assert_all_is_ended_and_billed(run)


def test_a_run_whose_worker_is_killed_can_be_cancelled(stopped: Hosts) -> None:
    """It goes on without its worker. No process sends it a signal: it looks for its cancellation itself."""
    run = stopped.runs["worker", "orphaned"]
    run.await_phase()
    os.kill(stopped.worker.pid, signal.SIGKILL)
    stopped.worker.wait()
    assert is_alive(run.pid)
    wait_until(lambda: run.state == "Running")
    run.cancel()
    run.await_end("Cancelled")
    assert_all_is_ended_and_billed(run)


# ── without a worker ─────────────────────────────────────────────────────────────────────────────────────────────────


@task(cache_policy=NO_CACHE)
@on_skyward(provider=sky.Local(price_per_hour=36.0))
def hang_beside(path: Path) -> None:
    path.with_suffix(".new").write_text(os.environ["SKYWARD_POOL_ID"])
    path.with_suffix(".new").rename(path)
    time.sleep(600)


def test_a_run_that_no_process_stops_ends_its_calls_and_machines(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Also beside another runner. The flow run is Cancelled; a task that comes later does not run."""
    monkeypatch.setattr(cancellation, "ASK_SECONDS", 0.2)
    ids: list[UUID] = []

    def cancel() -> None:
        wait_until((tmp_path / "began").exists)
        with get_client(sync_client=True) as client:
            client.set_flow_run_state(ids[0], Cancelling())

    @flow
    def patient() -> None:
        ids.append(UUID(current_run.id))
        # the address of the server is a context variable
        threading.Thread(target=contextvars.copy_context().run, args=(cancel,)).start()
        try:
            hang_beside.submit(tmp_path / "began").result()
        finally:
            with pytest.raises((sky.PoolClosed, CancelledRun)):
                hang_beside.submit(tmp_path / "later").result()

    with pytest.raises(CancelledRun):
        patient()
    assert not (tmp_path / "later").exists()
    pool = (tmp_path / "began").read_text()
    wait_until(lambda: processes_of({pool}) == [])
    with get_client(sync_client=True) as client:
        wait_until(lambda: client.read_flow_run(ids[0]).state.name == "Cancelled")
    receipts = wait_until(lambda: [one for one in sky.receipts_of(sky.Work(run=str(ids[0]))) if one["ended_at"]])
    assert [(one["pool_id"], one["left"]) for one in receipts] == [(pool, [])]


@flow
def abandoned() -> None:
    """Its run is only created."""


@flow
def unwatched() -> None:
    """As `abandoned`; no automation is for it."""


def silent_run(client: SyncPrefectClient, of: Any) -> UUID:
    """Create a run that is Running and has sent one heartbeat."""
    run = client.create_flow_run(of, state=Running())
    names = {"prefect.resource.id": f"prefect.flow.{run.flow_id}", "prefect.resource.role": "flow"}
    emit_event(
        HEARTBEAT,
        resource={"prefect.resource.id": f"prefect.flow-run.{run.id}"},
        related=[names | {"prefect.resource.name": of.name}],
    )
    return run.id


def test_the_crash_guard_ends_a_silent_run_of_the_named_flows() -> None:
    """It is deployed by one call, which may be repeated. A run of another flow stays Running."""
    deploy_crash_guard(600, flows=["other"])
    guard = deploy_crash_guard(10, flows=["abandoned"])
    with get_client(sync_client=True) as client:
        assert [one.id for one in client.read_automations_by_name(CRASH_GUARD_NAME)] == [guard.id]
        other, run = silent_run(client, unwatched), silent_run(client, abandoned)
        wait_until(lambda: client.read_flow_run(run).state.name == "Crashed")
        assert "no heartbeat for 10 s" in client.read_flow_run(run).state.message
        assert client.read_flow_run(other).state.name == "Running"
