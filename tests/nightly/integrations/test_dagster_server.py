"""Dagster for real: a web server and a daemon, with runs that end well, are terminated, or whose processes are killed.

All runs are launched at once, because each takes seconds. After each no machine lives, and its events add up to the
ledger's bill.
"""

import os
import signal
from collections.abc import Iterator
from typing import Any

import pytest

dg = pytest.importorskip("dagster")

import skyward_core as sky  # noqa: E402
from dagster_skyward.metadata import COST_USD, RUNNING_COST_USD  # noqa: E402
from dagster_skyward.settlement import REPORTED, STATE_TAG  # noqa: E402
from dagster_skyward.step_report import NODES_TABLE  # noqa: E402
from skyward_core.ledger.ledger import Ledger  # noqa: E402
from tests.conftest import signal_members  # noqa: E402
from tests.integrations.dagster_server import DagsterServer, Run, costs_in_events, metadata_of, served  # noqa: E402
from tests.waiting import wait_until  # noqa: E402

pytestmark = [pytest.mark.timeout(900), pytest.mark.filterwarnings("default::DeprecationWarning")]

DEFINITIONS = '''
import logging, os, time
from pathlib import Path
import dagster as dg
import skyward_core as sky
from dagster_skyward import SkywardResource, upkeep

HERE = Path(os.environ["DAGSTER_HOME"])

def hold(name):
    """Run until the test says that it may end."""
    print("plain words of", name)
    logging.getLogger("payload").warning("a warning of %s", name)
    (HERE / f"{name}.runs").touch()
    while not (HERE / f"{name}.go").exists():
        time.sleep(0.05)

def brief():
    time.sleep(1.2)  # the cost of a bucket is by whole seconds

def held(name):
    @dg.asset(name=name)
    def made(context: dg.AssetExecutionContext, compute: SkywardResource) -> None:
        (HERE / f"{name}.{context.run_id}.pid").write_text(f"{os.getpid()} {os.getppid()}")
        compute.run(context, hold, name)
    return made

def resource(**options):
    return SkywardResource(provider=sky.Local(price_per_hour=36.0), lease_seconds=20, **options)

@dg.asset
def one(context: dg.AssetExecutionContext, compute: SkywardResource) -> None:
    compute.run(context, brief)

@dg.asset(deps=[one])
def two(context: dg.AssetExecutionContext, compute: SkywardResource) -> None:
    compute.run(context, brief)

@dg.asset(deps=[one])
def three(context: dg.AssetExecutionContext, compute: SkywardResource) -> None:
    compute.run(context, brief)

@dg.asset(deps=[two, three])
def four(context: dg.AssetExecutionContext, compute: SkywardResource) -> None:
    compute.run(context, hold, "four")

@dg.asset(deps=[four])
def five(context: dg.AssetExecutionContext, compute: SkywardResource) -> None:
    compute.run(context, brief)

def killed(name):
    @dg.asset(name=name)
    def made(context: dg.AssetExecutionContext, shared: SkywardResource) -> None:
        (HERE / f"{name}.{context.run_id}.pid").write_text(f"{os.getpid()} {os.getppid()}")
        shared.run(context, hold, name)
    return made

HELD = ["payload", "provisioning", "forced"]
KILLED = ["step", "run"]
five_steps = [one, two, three, four, five]
defs = dg.Definitions.merge(
    dg.Definitions(
        assets=[*five_steps, *map(held, HELD), *map(killed, KILLED)],
        jobs=[
            dg.define_asset_job("five_steps", selection=five_steps),
            *(dg.define_asset_job(f"{name}_job", selection=[name], executor_def=dg.in_process_executor) for name in HELD),
            *(dg.define_asset_job(f"{name}_job", selection=[name]) for name in KILLED),
        ],
        resources={"compute": resource(), "shared": resource(sharing="run")},
    ),
    upkeep(),
)
'''


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[DagsterServer]:
    with served(tmp_path_factory.mktemp("dagster"), DEFINITIONS) as it:
        yield it


@pytest.fixture(scope="module")
def runs(server: DagsterServer) -> dict[str, Run]:
    """One run of each job, by the job's name."""
    names = ["provisioning_job", "five_steps", "payload_job", "forced_job", "step_job"]
    launched = {name: server.launch(name) for name in names}
    return launched | {"run_job": server.launch("run_job", **{"dagster/max_retries": "1"})}


def await_payload(server: DagsterServer, name: str) -> None:
    wait_until((server.folder / f"{name}.runs").exists, f"the payload of {name}", 240)


def let_go(server: DagsterServer, name: str) -> None:
    (server.folder / f"{name}.go").touch()


def processes(server: DagsterServer, name: str, run: Run) -> tuple[int, int]:
    """The pid of the step's process, and of the one that has started it: the run's."""
    step, parent = (server.folder / f"{name}.{run.id}.pid").read_text().split()
    return int(step), int(parent)


def assert_all_is_ended_and_reported(server: DagsterServer, run: Run, monkeypatch: pytest.MonkeyPatch) -> None:
    """No machine lives, and the run's events have the same costs as the ledger, by step."""
    wait_until(lambda: not server.machines(run), f"the machines of {run.id} to end: {server.machines(run)}")
    wait_until(lambda: run.tags.get(STATE_TAG) == REPORTED, f"the costs of {run.id} to be reported; {run.last()}")
    monkeypatch.setenv("SKYWARD_LEDGER", f"sqlite:///{server.folder}/ledger.db")
    parts = {
        part.work.task: round(part.cost_usd * 1_000_000)
        for part in sky.cost_parts(sky.Work(system="dagster", run=run.id))
    }
    assert sum(parts.values()) > 0
    with dg.DagsterInstance.from_config(str(server.folder)) as instance:
        in_events = costs_in_events(instance, run.id)
    assert {step: cost for step, cost in in_events.items() if cost} == {
        step: cost for step, cost in parts.items() if cost
    }


def test_a_run_that_is_terminated_while_its_pool_opens(
    server: DagsterServer, runs: dict[str, Run], monkeypatch: pytest.MonkeyPatch
) -> None:
    """The machine is stopped as a process, so that its preparation does not end before the termination."""
    run = runs["provisioning_job"]
    for machine in wait_until(lambda: server.machines(run), "a machine of the run", 240):
        signal_members(machine, signal.SIGSTOP)
    run.terminate()
    assert run.await_end() == "CANCELED"
    assert not any("the pool is ready" in (event["message"] or "") for event in run.events())
    assert not (server.folder / "provisioning.runs").exists()
    assert_all_is_ended_and_reported(server, run, monkeypatch)


@pytest.mark.parametrize("force", [False, True])
def test_a_run_that_is_terminated_while_its_call_runs(
    force: bool, server: DagsterServer, runs: dict[str, Run], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Also if its termination is forced: then it is marked as canceled at once."""
    name = "forced" if force else "payload"
    run = runs[f"{name}_job"]
    await_payload(server, name)
    run.terminate(force=force)
    assert run.await_end() == "CANCELED"
    assert_all_is_ended_and_reported(server, run, monkeypatch)
    assert not any("1 of 1 call done" in (event["message"] or "") for event in run.events())


def test_a_step_whose_process_is_killed(
    server: DagsterServer, runs: dict[str, Run], monkeypatch: pytest.MonkeyPatch
) -> None:
    """A sensor releases the pool that the run shares, and another one reports what the step has cost."""
    run = runs["step_job"]
    await_payload(server, "step")
    os.kill(processes(server, "step", run)[0], signal.SIGKILL)
    assert run.await_end() == "FAILURE"
    assert_all_is_ended_and_reported(server, run, monkeypatch)


def test_a_run_whose_process_is_killed_is_tried_again(
    server: DagsterServer, runs: dict[str, Run], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its step ends, and the run that tries again ends well. Both have their costs."""
    run = runs["run_job"]
    await_payload(server, "run")
    step, parent = processes(server, "run", run)
    os.kill(parent, signal.SIGKILL)
    wait_until(lambda: not os.path.exists(f"/proc/{step}"), "the end of the step's process")
    let_go(server, "run")  # for the second try
    assert run.await_end() == "FAILURE"
    again = wait_until(
        lambda: next((one for one in server.runs("run_job") if one["parentRunId"] == run.id), None), "the second try"
    )
    second = Run(server, again["runId"])
    assert second.await_end() == "SUCCESS"
    for one in (run, second):
        assert_all_is_ended_and_reported(server, one, monkeypatch)


def test_five_steps_share_a_pool_and_show_what_they_do(
    server: DagsterServer, runs: dict[str, Run], monkeypatch: pytest.MonkeyPatch
) -> None:
    """One machine is rented, though nothing says `sharing`: each step has a process of its own. Observations come while
    a step runs; spans, output, warnings and metadata are in place.
    """
    run = runs["five_steps"]
    await_payload(server, "four")

    def live() -> list[dict[str, Any]]:
        observed = [event for event in run.events() if event["__typename"] == "ObservationEvent"]
        return [event for event in observed if RUNNING_COST_USD in metadata_of(event)]

    first = wait_until(live, "an observation of a step that runs")[0]
    assert run.status == "STARTED"
    assert metadata_of(first)[RUNNING_COST_USD]["floatValue"] >= 0
    let_go(server, "four")
    assert run.await_end() == "SUCCESS"
    assert_all_is_ended_and_reported(server, run, monkeypatch)
    (pool,) = server.pools(run)
    with Ledger(f"sqlite:///{server.folder}/ledger.db") as ledger:
        assert len(ledger.intents(pool_id=pool)) == 1

    events = run.events()
    made = {
        event["assetKey"]["path"][0]: metadata_of(event)
        for event in events
        if event["__typename"] == "MaterializationEvent"
    }
    assert set(made) == {"one", "two", "three", "four", "five"}
    assert all(metadata[COST_USD]["floatValue"] >= 0 for metadata in made.values())
    assert all(len(metadata[NODES_TABLE]["table"]["records"]) == 1 for metadata in made.values())
