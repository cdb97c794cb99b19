"""Dagster for real: what a step has cost is the same figure everywhere, however the step ends and whose the pool is.

The figures are those of Dagster's events, `skyward users`, `skyward cost` and the receipt, after the next process has
looked. The table is printed.
"""

import json
import os
import signal
import subprocess
import sys
from collections.abc import Iterator
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import pytest

dg = pytest.importorskip("dagster")

import skyward_core as sky  # noqa: E402
from dagster_skyward.settlement import settle_ended_runs  # noqa: E402
from skyward_core import cli  # noqa: E402
from skyward_core.ledger.ledger import Ledger  # noqa: E402
from tests.integrations.dagster_cells import ENDS, KINDS, RETRIED, resource  # noqa: E402
from tests.integrations.dagster_server import costs_in_events  # noqa: E402
from tests.waiting import wait_until  # noqa: E402

pytestmark = [pytest.mark.timeout(600), pytest.mark.filterwarnings("default::DeprecationWarning")]

REPOSITORY = Path(__file__).parents[3]


class Home:
    """Dagster's folder, with the ledger."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.ledger = Ledger(f"sqlite:///{folder}/ledger.db")

    def start(self, cell: str) -> subprocess.Popen[bytes]:
        tags = json.dumps({"dagster/partition": f"of_{cell}"})
        module = "tests.integrations.dagster_cells"
        command = [sys.executable, "-m", "dagster", "job", "execute", "-m", module, "-j", f"job_{cell}", "--tags", tags]
        with (self.folder / f"{cell}.log").open("wb") as log:
            return subprocess.Popen(command, cwd=REPOSITORY, stdout=log, stderr=log, start_new_session=True)

    def log(self, cell: str) -> str:
        return (self.folder / f"{cell}.log").read_text()[-4000:]

    def pool_of(self, run: str) -> str:
        """The pool that a run has opened or used."""
        for pool in self.ledger.pools(include_ended=True):
            if pool.work.run == run or any(use.work.run == run for use in self.ledger.uses.of_pool(pool.id)):
                return pool.id
        return ""


@pytest.fixture(scope="module")
def home(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Home]:
    folder = tmp_path_factory.mktemp("dagster")
    (folder / "dagster.yaml").write_text("telemetry: {enabled: false}\n")
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("DAGSTER_HOME", str(folder))
        patch.setenv("SKYWARD_LEDGER", f"sqlite:///{folder}/ledger.db")
        it = Home(folder)
        yield it
        it.ledger.close()


@pytest.fixture(scope="module")
def table(request: pytest.FixtureRequest) -> Iterator[list[list[str]]]:
    """Rows that are printed at the end."""
    rows: list[list[str]] = [["pool", "step", "events", "users", "by task", "receipt", "rest"]]
    yield rows
    with request.config.pluginmanager.get_plugin("capturemanager").global_and_fixture_disabled():
        print("\n" + "\n".join("".join(f"{text:>12}" for text in row) for row in rows))


def answered(capsys: pytest.CaptureFixture[str], *command: str) -> Any:
    capsys.readouterr()
    assert cli.main([*command]) == 0
    return json.loads(capsys.readouterr().out)


def micro(usd: float) -> int:
    return round(usd * 1_000_000)


def interrupt(how: str, home: Home, cell: str) -> None:
    """End the step from outside, while its call runs."""
    if how == "cancelled":
        with dg.DagsterInstance.from_config(str(home.folder)) as instance:
            (record,) = instance.get_run_records(dg.RunsFilter(job_name=f"job_{cell}"))
            instance.report_run_canceled(record.dagster_run)
    elif how in {"sigkill", "sigterm"}:
        pid = int((home.folder / f"{cell}.pid").read_text())
        os.kill(pid, signal.SIGKILL if how == "sigkill" else signal.SIGTERM)


def await_end(home: Home, cell: str, process: subprocess.Popen[bytes]) -> None:
    try:
        process.wait(300)
    finally:
        if process.poll() is None:
            os.killpg(process.pid, signal.SIGKILL)
            process.wait()


def figures(home: Home, cell: str, capsys: pytest.CaptureFixture[str]) -> dict[str, int]:
    """What each place says of the step, in micro-dollars, after its pool has ended and a sensor has looked."""
    with dg.DagsterInstance.from_config(str(home.folder)) as instance:
        (record,) = instance.get_run_records(dg.RunsFilter(job_name=f"job_{cell}"))
        run = record.dagster_run
        wait_until(lambda: run.run_id in settle_ended_runs(instance), f"the costs of {cell} to be reported")
        events = costs_in_events(instance, run.run_id)
    pool = home.pool_of(run.run_id)
    keys = {
        "run": f"dagster:job_{cell}/{run.run_id}",
        "task": f"dagster:job_{cell}/{cell}",
        "asset": cell,
        "partition": f"of_{cell}",
    }
    found = {}
    for by, key in keys.items():
        rows = answered(capsys, "cost", "--json", "--by", by)["rows"]
        found[by] = sum(micro(row["cost_usd"]) for row in rows if row["key"] == key)
    receipt = answered(capsys, "receipt", pool, "--json")
    found |= {"events": events.get(cell, 0), "events of the run": sum(events.values())}
    found["receipt"] = micro(receipt["total_cost_usd"])
    found["rest"] = 0
    if not cell.startswith("own"):
        users = answered(capsys, "users", "--json", pool)
        found["users"] = sum(micro(user["cost_usd"]) for user in users["users"] if user["work"].get("task") == cell)
        found["rest"] = micro(users["rest_usd"])
    return found


def end_of(home: Home, cell: str, keeper: ExitStack) -> None:
    """Let the next process look, and end the pool."""
    if cell.startswith("own"):
        wait_until(lambda: all(pool.ended_at for pool in home.ledger.pools(include_ended=True)), "the end of the pool")
        return
    if cell.startswith("opener"):
        keeper.enter_context(sky.ComputePool.from_spec(resource(cell).spec))
    pool = home.ledger.names.named(cell)
    assert pool is not None
    wait_until(lambda: all(use.ended_at for use in home.ledger.uses.of_pool(pool.pool_id)), "the ends of the uses")
    keeper.close()
    sky.release(cell)


@pytest.mark.parametrize("how", ENDS)
@pytest.mark.parametrize("kind", KINDS)
def test_the_cost_of_a_step_is_one_figure(
    kind: str, how: str, home: Home, table: list[list[str]], capsys: pytest.CaptureFixture[str]
) -> None:
    cell = f"{kind}_{how}"
    with ExitStack() as keeper:
        if kind == "joiner":
            keeper.enter_context(sky.ComputePool.from_spec(resource(cell).spec))
        process = home.start(cell)
        try:
            runs = home.folder / f"{cell}.runs"
            wait_until(lambda: runs.exists() or process.poll() is not None, "the call to run", 240)
            assert runs.exists(), home.log(cell)
            interrupt(how, home, cell)
        finally:
            await_end(home, cell, process)
        end_of(home, cell, keeper)
    found = figures(home, cell, capsys)
    cost = found["task"]
    shown = (
        f"{found[name] / 1e6:.6f}" if name in found else "" for name in ("events", "users", "task", "receipt", "rest")
    )
    table.append([kind, how, *shown])
    assert cost > 0
    assert {
        found[name] for name in ("events", "events of the run", "users", "run", "asset", "partition") if name in found
    } == {cost}, found
    assert found["receipt"] == cost + found["rest"]


def test_a_newer_attempt_does_not_wait_for_its_dead_predecessor(
    home: Home, table: list[list[str]], capsys: pytest.CaptureFixture[str]
) -> None:
    """The step's process is killed; Dagster's retry policy begins another one. The pool has one slot, which the first
    call would hold for as long as the lease.
    """
    with ExitStack() as keeper:
        keeper.enter_context(sky.ComputePool.from_spec(resource(RETRIED).spec))
        process = home.start(RETRIED)
        try:
            wait_until((home.folder / f"{RETRIED}.runs").exists, "the first call to run", 240)
            interrupt("sigkill", home, RETRIED)
        finally:
            await_end(home, RETRIED, process)
        assert process.returncode == 0, home.log(RETRIED)
        pool = home.ledger.names.named(RETRIED)
        assert pool is not None
        first, second = home.ledger.uses.of_pool(pool.pool_id)
        assert [use.work.attempt for use in (first, second)] == ["1", "2"]
        assert first.ended_at is not None
        assert first.ended_at <= second.began_at, "no call of the second attempt was made before"
        end_of(home, RETRIED, keeper)
    found = figures(home, RETRIED, capsys)
    costs = [micro(float(use.cost_usd)) for use in home.ledger.uses.of_pool(pool.pool_id)]
    assert min(costs) > 0
    assert found["task"] == found["events"] == found["users"] == sum(costs)
    with dg.DagsterInstance.from_config(str(home.folder)) as instance:
        (record,) = instance.get_run_records(dg.RunsFilter(job_name=f"job_{RETRIED}"))
        times = {
            entry.dagster_event.event_type_value: entry.timestamp
            for entry in instance.all_logs(record.dagster_run.run_id)
            if entry.is_dagster_event and entry.step_key == RETRIED
        }
    seconds = second.began_at.timestamp() - times["STEP_RESTARTED"]
    table.append(["joiner", "retried", f"{found['events'] / 1e6:.6f}", f"after {seconds:.1f} s"])
