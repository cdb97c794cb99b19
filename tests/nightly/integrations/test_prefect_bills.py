"""What a task run and its flow run have cost: one figure in Prefect's UI, in the ledger's commands and in the receipt.

On a pool of its own, as the opener of a pool with a name and as one that has joined it; however the flow run ends. The
process that looks next is another run of the flow.
"""

import json
import os
import signal
import subprocess
import sys
from collections.abc import Iterator
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path
from typing import Any
from uuid import UUID

import pytest

pytest.importorskip("prefect")

from tests.integrations import prefect_server  # noqa: I001 - before Prefect
from tests.integrations.prefect_server import artifacts, asked, logs
from tests.kill.console import REPOSITORY
from tests.waiting import wait_until

from prefect import flow, task
from prefect.cache_policies import NO_CACHE
from prefect.client.orchestration import get_client
from prefect.states import Cancelling, Pending

import skyward_core as sky
from prefect_skyward import SkywardTaskRunner
from prefect_skyward.report.settlement import settle_flow_runs
from skyward_core.ledger import Ledger, default_url
from skyward_core.ledger.names_policy import NameState

pytestmark = [
    pytest.mark.timeout(900),  # the first test waits for all flow runs
    pytest.mark.filterwarnings("default"),  # Prefect's own warnings are not our faults
]
api = pytest.fixture(scope="module", autouse=True)(prefect_server.served)
ROLES = ("own", "opener", "joiner")
ENDS = ("ends", "fails", "times out", "is cancelled", "SIGKILL", "SIGTERM")
PRICE = 3600.0
"""USD per hour: a second of a machine is a dollar."""

FLOW = """
import os, sys, time
from pathlib import Path
from uuid import UUID
from prefect import flow, task
from prefect.cache_policies import NO_CACHE
from prefect.flow_engine import load_flow_run, run_flow
from prefect.runtime import flow_run
from prefect_skyward import SkywardTaskRunner, cancellation
from prefect_skyward.report import run_report
import skyward_core as sky

run_report.CLOSE_SECONDS = 0.0  # the end of the process waits for the pages
role, end, folder, name, *again = sys.argv[1:]
settings = {"provider": sky.Local(price_per_hour=3600.0), "lease_seconds": 60.0}
if role != "own":
    settings["name"] = name
cancellation.ASK_SECONDS = 0.2

@task(name=f"hold {role} {end}", cache_policy=NO_CACHE, timeout_seconds=1.0 if end == "times out" else None)
def hold(folder: str, end: str) -> None:
    Path(folder, "begun.new").write_text(os.environ["SKYWARD_POOL_ID"])
    Path(folder, "begun.new").rename(Path(folder, "begun"))
    until = time.monotonic() + (0.5 if end in ("ends", "fails") else 600)
    while time.monotonic() < until:
        Path(folder, "held").touch()
        time.sleep(0.01)
    if end == "fails":
        raise ValueError("as it was asked to")

@flow(name="bills", task_runner=SkywardTaskRunner(**settings))
def run() -> None:
    Path(folder, "run").write_text(str(flow_run.id))
    hold.submit(folder, end).result()

if __name__ == "__main__":
    run_flow(run, flow_run=load_flow_run(UUID(again[0]))) if again else run(return_state=True)
"""


@dataclass(frozen=True)
class Figures:
    """What one task run, and its flow run, have cost by each place, in whole micro-dollars."""

    task: dict[str, int]
    run: dict[str, int]


def micro(usd: float) -> int:
    return round(usd * 1_000_000)


class Program:
    """A flow run in a process of its own, in which one call holds a slot."""

    def __init__(self, api: str, role: str, end: str, folder: Path, name: str, run_id: str = "") -> None:
        """`run_id`: the flow run of which this is another attempt."""
        self.role, self.end, self.folder = role, end, folder
        folder.mkdir()
        (folder / "flow.py").write_text(FLOW)
        argv = [sys.executable, "flow.py", role, end, str(folder), name, *filter(None, [run_id])]
        with (folder / "log").open("w") as log:
            environ = {**os.environ, "PYTHONPATH": str(REPOSITORY), "PREFECT_API_URL": api}
            self.process = subprocess.Popen(argv, cwd=folder, env=environ, stdout=log, stderr=log)

    @property
    def run_id(self) -> str:
        return (self.folder / "run").read_text()

    @property
    def pool_id(self) -> str:
        return (self.folder / "begun").read_text()

    def await_begin(self) -> None:
        begun = self.folder / "begun"
        wait_until(lambda: (begun.exists() and begun.read_text()) or self.process.poll() is not None, self.folder.name)
        assert begun.exists(), (self.folder / "log").read_text()

    def stop(self) -> None:
        """End the flow run as its case says, once the ledger knows that its call holds a slot, and wait for the end of
        its process.
        """
        if self.end in ("is cancelled", "SIGKILL", "SIGTERM"):
            wait_until(lambda: slot_seconds_of(self.pool_id) > 0, "a note of the slot")
        with get_client(sync_client=True) as client:
            if self.end == "is cancelled":
                client.set_flow_run_state(UUID(self.run_id), Cancelling())
            elif self.end in ("SIGKILL", "SIGTERM"):
                self.process.send_signal(getattr(signal, self.end))
            self.process.wait(60)

    def kill(self) -> None:
        self.process.kill()
        self.process.wait()


def pool_of(name: str) -> sky.ComputePool:
    """The pool of a name, as a flow run opens it."""
    provider = sky.Local(price_per_hour=PRICE)
    spec = sky.PoolSpec.of(name=name, provider=provider, lease_seconds=60.0, display="quiet")
    return sky.ComputePool.from_spec(spec)


def is_in_use(name: str) -> bool:
    with Ledger(default_url()) as ledger:
        row = ledger.names.named(name)
    return row is not None and row.state is NameState.IN_USE


@task(cache_policy=NO_CACHE)
def look() -> int:
    return 1


@flow(name="bills", task_runner=SkywardTaskRunner(provider=sky.Local(price_per_hour=PRICE)))
def next_run() -> int:
    return look.submit().result()


@pytest.fixture(scope="module")
def programs(api: str, tmp_path_factory: pytest.TempPathFactory) -> Iterator[dict[tuple[str, str], Program]]:
    """A flow run of each case, three at a time; then another process of each pool with a name, and another flow run."""
    folder, found = tmp_path_factory.mktemp("bills"), dict[tuple[str, str], Program]()
    with ExitStack() as stack:
        for end in ENDS:
            with ExitStack() as held:
                place = end.replace(" ", "-")
                held.enter_context(pool_of(f"joiner-{place}"))
                for role in ROLES:
                    its = Program(api, role, end, folder / f"{role}-{place}", f"{role}-{place}")
                    stack.callback(its.kill)
                    found[role, end] = its
                for role in ROLES:
                    found[role, end].await_begin()
                for role in ROLES:
                    found[role, end].stop()
                if is_in_use(f"opener-{place}"):  # it was killed: its calls go on until another process comes
                    held.enter_context(pool_of(f"opener-{place}"))
        for its in found.values():
            wait_until(lambda: has_ended(its.pool_id), f"the end of {its.pool_id}")
        assert next_run() == 1
        runs = [its.run_id for its in found.values()]
        wait_until(lambda: all(map(is_settled, runs)), "the final figures of all flow runs")
        yield found


def slot_seconds_of(pool_id: str) -> float:
    with Ledger(default_url()) as ledger:
        return sum(use.slot_seconds for use in ledger.uses.of_pool(pool_id))


def has_ended(pool_id: str) -> bool:
    """Whether a pool has ended; the reaper ends that of a killed process."""
    with Ledger(default_url()) as ledger:
        entry = ledger.pool(pool_id)
    return entry is not None and entry.ended_at is not None


def is_settled(run_id: str) -> bool:
    """Whether the figures of a flow run are final; the next run of its flow completes those of a killed process."""
    (run,) = asked("/flow_runs/filter", {"flow_runs": {"id": {"any_": [run_id]}}})
    return bool((run["labels"] or {}).get("skyward.is_final"))


def command(*arguments: str) -> Any:
    """What a command of `skyward` prints as JSON."""
    argv = [sys.executable, "-m", "skyward_core.cli", *arguments]
    return json.loads(subprocess.run(argv, cwd=REPOSITORY, check=True, capture_output=True, text=True).stdout)


@pytest.fixture(scope="module")
def costs(programs: dict[tuple[str, str], Program]) -> dict[str, dict[str, float]]:
    """What `skyward cost` prints, by its kind of line and the line's key."""
    return {
        by: {row["key"]: row["cost_usd"] for row in command("cost", "--by", by, "--json")["rows"]}
        for by in ("task", "run")
    }


def rows_of_tasks(run_id: str) -> list[dict[str, Any]]:
    """The table of task runs. On a server that is slow Prefect's client repeats a request, and there may be two."""
    tables = [one for one in artifacts(run_id) if one["key"] == "skyward-tasks"]
    return json.loads(max(tables, key=lambda table: table["updated"])["data"])


def figures_of(its: Program, costs: dict[str, dict[str, float]]) -> Figures:
    task_name = f"hold {its.role} {its.end}"
    (run,) = asked("/flow_runs/filter", {"flow_runs": {"id": {"any_": [its.run_id]}}})
    assert run["labels"]["skyward.is_final"]
    (row,) = rows_of_tasks(its.run_id)
    users = [user for user in command("users", its.pool_id, "--json")["users"] if user["work"].get("task") == task_name]
    receipt = command("receipt", its.pool_id, "--json")
    (its_own,) = [user for user in receipt["users"] if user["work"].get("task") == task_name]
    assert [user["work"]["task_run"] for user in users] == [row["task run"]]
    by_run = {
        "ui": run["labels"]["skyward.cost_usd"],
        "cost --by run": costs["run"][f"prefect:bills/{its.run_id}"],
    }
    if its.role == "own":
        by_run["receipt"] = receipt["total_cost_usd"]
    by_task = {
        "ui": row["USD"],
        "users": sum(user["cost_usd"] for user in users),
        "cost --by task": costs["task"][f"prefect:bills/{task_name}"],
        "receipt": its_own["cost_usd"],
    }
    return Figures(
        {place: micro(usd) for place, usd in by_task.items()}, {place: micro(usd) for place, usd in by_run.items()}
    )


@pytest.mark.parametrize("end", ENDS)
@pytest.mark.parametrize("role", ROLES)
def test_all_places_have_the_same_figure(
    role: str,
    end: str,
    programs: dict[tuple[str, str], Program],
    costs: dict[str, dict[str, float]],
    capsys: pytest.CaptureFixture[str],
) -> None:
    """To the micro-dollar, of the task run and of its flow run; and the call has cost something."""
    found = figures_of(programs[role, end], costs)
    with capsys.disabled():
        print(f"| {role} | {end} | {cells(found.task)} | {cells(found.run)} |")
    assert len(set(found.task.values())) == 1, found.task
    assert len(set(found.run.values())) == 1, found.run
    assert min(found.task.values()) > 0
    assert max(found.task.values()) <= min(found.run.values())


def cells(figures: dict[str, int]) -> str:
    return ", ".join(f"{place} {amount / 1_000_000:.6f}" for place, amount in figures.items())


def test_a_process_that_is_told_to_end_writes_its_bill_first(
    api: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """And its last lines. It has no worker, which would set the state of its run: after SIGTERM that is Running."""
    monkeypatch.setenv("PREFECT_LOGGING_TO_API_BATCH_INTERVAL", "600")  # Prefect itself sends none in time
    its = Program(api, "own", "SIGTERM", tmp_path / "own", "own")
    try:
        its.await_begin()
        its.stop()
        assert is_settled(its.run_id), (its.folder / "log").read_text()
    finally:
        its.kill()
    (run,) = asked("/flow_runs/filter", {"flow_runs": {"id": {"any_": [its.run_id]}}})
    assert run["state_name"] == "Running"
    assert [one for one in logs(UUID(its.run_id)) if "giving the machines back" in one["message"]] != []
    assert micro(run["labels"]["skyward.cost_usd"]) == micro(
        command("receipt", its.pool_id, "--json")["total_cost_usd"]
    )


def test_a_second_attempt_begins_when_the_killed_one_has_stopped(api: str, tmp_path: Path) -> None:
    """On a pool with a name, that another process keeps open: never both calls at once. The flow run's figure is that of
    both attempts, or not final: the bill of the killed one may come last.
    """
    first = Program(api, "joiner", "SIGKILL", tmp_path / "first", "attempts")
    try:
        with pool_of("attempts"):
            first.await_begin()
            first.process.send_signal(signal.SIGKILL)
            first.process.wait()
            with get_client(sync_client=True) as client:
                client.set_flow_run_state(UUID(first.run_id), Pending(), force=True)
            second = Program(api, "joiner", "ends", tmp_path / "second", "attempts", first.run_id)
            try:
                assert second.process.wait(120) == 0, (second.folder / "log").read_text()
            finally:
                second.kill()
            held, begun = (its.stat().st_mtime_ns for its in (first.folder / "held", second.folder / "begun"))
            assert held <= begun
            assert second.pool_id == first.pool_id
            assert second.run_id == first.run_id
    finally:
        first.kill()
    found = command("users", first.pool_id, "--json")["users"]
    users = [user for user in found if user["work"].get("task", "").startswith("hold")]
    assert [user["left_at"] is None for user in users] == [False, False]
    if not is_settled(first.run_id):
        assert settle_flow_runs() >= 1
    assert is_settled(first.run_id)
    (run,) = asked("/flow_runs/filter", {"flow_runs": {"id": {"any_": [first.run_id]}}})
    assert micro(run["labels"]["skyward.cost_usd"]) == sum(micro(user["cost_usd"]) for user in users)
    assert sorted(micro(row["USD"]) for row in rows_of_tasks(first.run_id)) == sorted(
        micro(user["cost_usd"]) for user in users
    )
