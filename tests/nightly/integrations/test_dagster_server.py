"""Dagster for real: a web server and a daemon, with runs that end well, are terminated, or whose processes are killed.

All runs are launched at once, because each takes seconds. After each no machine lives, and its events add up to the
ledger's bill.
"""

import json
import os
import signal
from collections.abc import Iterator
from typing import Any

import pytest

dg = pytest.importorskip("dagster")

import skyward_core as sky  # noqa: E402
from dagster_skyward.metadata import COST_USD, OTHER_COST_USD, POOL_ID, RUNNING_COST_USD  # noqa: E402
from dagster_skyward.pool_asset import TOTAL_USD, USERS  # noqa: E402
from dagster_skyward.settlement import REPORTED, STATE_TAG, TOTAL_TAG  # noqa: E402
from dagster_skyward.step_report import NODES_TABLE  # noqa: E402
from skyward_core import cli  # noqa: E402
from skyward_core.ledger.ledger import Ledger  # noqa: E402
from tests.conftest import signal_members  # noqa: E402
from tests.integrations.dagster_server import DagsterServer, Run, costs_in_events, metadata_of, served  # noqa: E402
from tests.waiting import wait_until  # noqa: E402

pytestmark = [pytest.mark.timeout(1200), pytest.mark.filterwarnings("default::DeprecationWarning")]

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

def held(name, **options):
    @dg.asset(name=name, **options)
    def made(context: dg.AssetExecutionContext, compute: SkywardResource) -> None:
        compute.run(context, hold, name)
    return made

def resource(lease_seconds=60, **options):
    return SkywardResource(provider=sky.Local(price_per_hour=36.0), lease_seconds=lease_seconds, **options)

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

def killed(name, **options):
    @dg.asset(name=name, **options)
    def made(context: dg.AssetExecutionContext, shared: SkywardResource) -> None:
        (HERE / f"{name}.{context.run_id}.{context.retry_number}").write_text(f"{os.getpid()} {os.getppid()}")
        shared.run(context, hold, name)
    return made

@dg.asset(partitions_def=dg.StaticPartitionsDefinition(["mon", "tue", "wed", "thu"]))
def days(context: dg.AssetExecutionContext, of_backfill: SkywardResource) -> None:
    of_backfill.run(context, brief)

@dg.asset
def nightly(context: dg.AssetExecutionContext, team: SkywardResource) -> None:
    team.run(context, brief)

HELD = ["payload", "provisioning", "forced"]
KILLED = ["step", "run", "retried"]
five_steps = [one, two, three, four, five]
nightly_job = dg.define_asset_job("nightly_job", selection=[nightly])

@dg.schedule(job=nightly_job, cron_schedule="* * * * *", default_status=dg.DefaultScheduleStatus.RUNNING)
def each_night(context):
    if not (HERE / "team.go").exists() or (HERE / "scheduled").exists():
        return dg.SkipReason("not asked for, or done")
    (HERE / "scheduled").touch()
    return dg.RunRequest()

@dg.sensor(job=nightly_job, minimum_interval_seconds=2, default_status=dg.DefaultSensorStatus.RUNNING)
def file_sensor(context):
    return dg.RunRequest(run_key="once") if (HERE / "team.go").exists() else dg.SkipReason("no file")

defs = dg.Definitions.merge(
    dg.Definitions(
        assets=[
            *five_steps, *map(held, HELD), days, nightly,
            *(killed(name) for name in KILLED[:2]), killed("retried", retry_policy=dg.RetryPolicy(max_retries=1)),
        ],
        jobs=[
            dg.define_asset_job("five_steps", selection=five_steps, executor_def=dg.multiprocess_executor),
            *(dg.define_asset_job(f"{name}_job", selection=[name]) for name in HELD),
            *(dg.define_asset_job(f"{name}_job", selection=[name], executor_def=dg.multiprocess_executor) for name in KILLED),
            nightly_job,
        ],
        schedules=[each_night],
        sensors=[file_sensor],
        executor=dg.in_process_executor,
        resources={
            "compute": resource(), "shared": resource(300, sharing="run"), "of_backfill": resource(sharing="backfill"),
            "team": resource(name="team", keep_warm=300),
        },
    ),
    upkeep(),
)
'''
SECONDS = 300.0
"""For how long a test waits: all runs go on at once, and each starts processes that load Dagster."""
PARTITIONS = ["mon", "tue", "wed", "thu"]


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[DagsterServer]:
    with served(tmp_path_factory.mktemp("dagster"), DEFINITIONS) as it:
        yield it


@pytest.fixture(scope="module")
def runs(server: DagsterServer) -> dict[str, Run]:
    """One run of each job, by the job's name."""
    names = ["provisioning_job", "five_steps", "payload_job", "forced_job", "step_job", "retried_job"]
    launched = {name: server.launch(name) for name in names}
    return launched | {"run_job": server.launch("run_job", **{"dagster/max_retries": "1"})}


@pytest.fixture(scope="module")
def backfill(server: DagsterServer, runs: dict[str, Run]) -> str:
    """The id of a backfill of four partitions, a run for each."""
    return server.backfill("days", PARTITIONS)


@pytest.fixture(autouse=True)
def ledger(server: DagsterServer, backfill: str, monkeypatch: pytest.MonkeyPatch) -> Iterator[Ledger]:
    """That of the server, for this process too."""
    url = f"sqlite:///{server.folder}/ledger.db"
    monkeypatch.setenv("SKYWARD_LEDGER", url)
    with Ledger(url) as ledger:
        yield ledger


def await_payload(server: DagsterServer, name: str) -> None:
    wait_until((server.folder / f"{name}.runs").exists, f"the payload of {name}", SECONDS)


def let_go(server: DagsterServer, name: str) -> None:
    (server.folder / f"{name}.go").touch()


def processes(server: DagsterServer, name: str, run: Run) -> tuple[int, int]:
    """The pid of the process of the step's first try, and of the one that has started it: the run's."""
    step, parent = (server.folder / f"{name}.{run.id}.0").read_text().split()
    return int(step), int(parent)


def micro(usd: float) -> int:
    return round(usd * 1_000_000)


def assert_all_is_ended_and_reported(server: DagsterServer, run: Run) -> None:
    """No machine lives, and the run's events and its tag have the same costs as the ledger, by step."""
    wait_until(lambda: not server.machines(run), f"the machines of {run.id} to end: {server.machines(run)}", SECONDS)
    wait_until(
        lambda: run.tags.get(STATE_TAG) == REPORTED, f"the costs of {run.id} to be reported; {run.last()}", SECONDS
    )
    parts: dict[str, int] = {}
    for part in sky.cost_parts(sky.Work(system="dagster", run=run.id)):
        parts[part.work.task] = parts.get(part.work.task, 0) + micro(float(part.cost_usd))
    assert sum(parts.values()) > 0
    with dg.DagsterInstance.from_config(str(server.folder)) as instance:
        in_events = costs_in_events(instance, run.id)
    assert {step: cost for step, cost in in_events.items() if cost} == {
        step: cost for step, cost in parts.items() if cost
    }
    assert micro(float(run.tags[TOTAL_TAG])) == sum(parts.values())


def cost_of_asset(asset: str, capsys: pytest.CaptureFixture[str]) -> int:
    """What `skyward cost --by asset --since 30d` says of it, in micro-dollars."""
    capsys.readouterr()
    assert cli.main(["cost", "--by", "asset", "--since", "30d", "--json"]) == 0
    rows = json.loads(capsys.readouterr().out)["rows"]
    return sum(micro(row["cost_usd"]) for row in rows if row["key"] == asset)


def await_cost(asset: str, capsys: pytest.CaptureFixture[str]) -> None:
    """Until the ledger has a part of its cost: it is written every few seconds, so a kill may lose those."""
    wait_until(lambda: cost_of_asset(asset, capsys), f"a cost of {asset}", SECONDS)


def observed_usd(run: Run, asset: str) -> list[float]:
    """The costs in the observations of a run's asset."""
    return [
        metadata_of(event)[OTHER_COST_USD]["floatValue"]
        for event in run.events()
        if event["__typename"] == "ObservationEvent"
        and event["assetKey"]["path"] == [asset]
        and OTHER_COST_USD in metadata_of(event)
    ]


def test_a_run_that_is_terminated_while_its_pool_opens(server: DagsterServer, runs: dict[str, Run]) -> None:
    """The machine is stopped as a process, so that its preparation does not end before the termination."""
    run = runs["provisioning_job"]
    for machine in wait_until(lambda: server.machines(run), "a machine of the run", SECONDS):
        signal_members(machine, signal.SIGSTOP)
    run.terminate()
    assert run.await_end() == "CANCELED"
    assert not any("the pool is ready" in (event["message"] or "") for event in run.events())
    assert not (server.folder / "provisioning.runs").exists()
    assert_all_is_ended_and_reported(server, run)


@pytest.mark.parametrize("force", [False, True])
def test_a_run_that_is_terminated_while_its_call_runs(
    force: bool, server: DagsterServer, runs: dict[str, Run], capsys: pytest.CaptureFixture[str]
) -> None:
    """Also if its termination is forced: then it is marked as canceled at once. Nothing is made, so that the whole cost
    of the asset is an observation.
    """
    name = "forced" if force else "payload"
    run = runs[f"{name}_job"]
    await_payload(server, name)
    run.terminate(force=force)
    assert run.await_end() == "CANCELED"
    assert_all_is_ended_and_reported(server, run)
    assert not any("1 of 1 call done" in (event["message"] or "") for event in run.events())
    assert sum(map(micro, observed_usd(run, name))) == cost_of_asset(name, capsys) > 0


def test_a_step_whose_process_is_killed(
    server: DagsterServer, runs: dict[str, Run], capsys: pytest.CaptureFixture[str]
) -> None:
    """A sensor releases the pool that the run shares, and another one reports what the step has cost."""
    run = runs["step_job"]
    await_payload(server, "step")
    await_cost("step", capsys)
    os.kill(processes(server, "step", run)[0], signal.SIGKILL)
    assert run.await_end() == "FAILURE"
    assert_all_is_ended_and_reported(server, run)
    assert sum(map(micro, observed_usd(run, "step"))) == cost_of_asset("step", capsys) > 0


def test_a_step_whose_process_is_killed_is_tried_again(
    server: DagsterServer, runs: dict[str, Run], ledger: Ledger, capsys: pytest.CaptureFixture[str]
) -> None:
    """On the same machine. Both tries are in the asset's cost."""
    run = runs["retried_job"]
    await_payload(server, "retried")
    await_cost("retried", capsys)
    os.kill(processes(server, "retried", run)[0], signal.SIGKILL)
    wait_until((server.folder / f"retried.{run.id}.1").exists, "the second try", SECONDS)
    let_go(server, "retried")
    assert run.await_end() == "SUCCESS"
    assert_all_is_ended_and_reported(server, run)
    (pool,) = server.pools(run)
    assert server.rentals(pool) == 1
    assert [use.work.attempt for use in ledger.uses.of_pool(pool)] == ["1", "2"]
    made = [event for event in run.events() if event["__typename"] == "MaterializationEvent"]
    costs = [metadata_of(event)[COST_USD]["floatValue"] for event in made] + observed_usd(run, "retried")
    assert sum(map(micro, costs)) == cost_of_asset("retried", capsys) > 0


def test_a_run_whose_process_is_killed_is_tried_again(server: DagsterServer, runs: dict[str, Run]) -> None:
    """Its step ends, and the run that tries again ends well. Both have their costs."""
    run = runs["run_job"]
    await_payload(server, "run")
    step, parent = processes(server, "run", run)
    os.kill(parent, signal.SIGKILL)
    wait_until(lambda: not os.path.exists(f"/proc/{step}"), "the end of the step's process", SECONDS)
    let_go(server, "run")  # for the second try
    assert run.await_end() == "FAILURE"
    again = wait_until(
        lambda: next((one for one in server.runs("run_job") if one["parentRunId"] == run.id), None),
        "the second try",
        SECONDS,
    )
    second = Run(server, again["runId"])
    assert second.await_end() == "SUCCESS"
    for one in (run, second):
        assert_all_is_ended_and_reported(server, one)


def test_five_steps_share_a_pool_and_show_what_they_do(server: DagsterServer, runs: dict[str, Run]) -> None:
    """One machine is rented, though nothing says `sharing`: each step has a process of its own. Observations come while
    a step runs; spans, output, warnings and metadata are in place.
    """
    run = runs["five_steps"]
    await_payload(server, "four")

    def live() -> list[dict[str, Any]]:
        observed = [event for event in run.events() if event["__typename"] == "ObservationEvent"]
        return [event for event in observed if RUNNING_COST_USD in metadata_of(event)]

    first = wait_until(live, "an observation of a step that runs", SECONDS)[0]
    assert run.status == "STARTED"
    assert metadata_of(first)[RUNNING_COST_USD]["floatValue"] >= 0
    assert "[node 0] plain words of four\n" in run.output("four")["stdout"]
    let_go(server, "four")
    assert run.await_end() == "SUCCESS"
    assert_all_is_ended_and_reported(server, run)
    (pool,) = server.pools(run)
    assert server.rentals(pool) == 1

    events = run.events()
    made = {
        event["assetKey"]["path"][0]: metadata_of(event)
        for event in events
        if event["__typename"] == "MaterializationEvent"
    }
    assert set(made) == {"one", "two", "three", "four", "five"}
    assert all(metadata[COST_USD]["floatValue"] >= 0 for metadata in made.values())
    assert all(len(metadata[NODES_TABLE]["table"]["records"]) == 1 for metadata in made.values())

    assert "plain words" not in run.output("five")["stdout"]
    said = {event["message"]: event for event in events if "of four" in (event["message"] or "")}
    (warning,) = [event for message, event in said.items() if "a warning of four" in message]
    assert (warning["level"], warning["stepKey"]) == ("WARNING", "four")
    assert not any("plain words" in message for message in said), "the event log has warnings only"


def test_a_backfill_of_four_partitions_is_one_pool(server: DagsterServer, backfill: str) -> None:
    """One machine is rented. Each run has the cost of its partition; what no run has used is at the pools' asset."""
    runs = wait_until(
        lambda: found if len(found := server.runs_with("dagster/backfill", backfill)) == len(PARTITIONS) else None,
        "the runs of the backfill",
        SECONDS,
    )
    assert [run.await_end() for run in runs] == ["SUCCESS"] * len(PARTITIONS)
    (pool,) = server.pools_for(f"backfill-{backfill}")
    assert server.rentals(pool) == 1
    assert {run.tags["dagster/partition"] for run in runs} == set(PARTITIONS)
    for run in runs:
        assert_all_is_ended_and_reported(server, run)
    assert_the_rest_is_observed(server, runs, pool, "assets")


def test_a_schedule_and_a_sensor_use_a_pool_with_a_name(server: DagsterServer) -> None:
    """The second run finds the first one's pool warm: both are asked for now, as it is warm for some minutes only. When
    it has ended, what no run has used is at its own asset.
    """
    let_go(server, "team")
    runs = [
        wait_until(lambda tag=tag, name=name: server.runs_with(tag, name), f"the run of {name}", SECONDS)[0]
        for tag, name in (("dagster/sensor_name", "file_sensor"), ("dagster/schedule_name", "each_night"))
    ]
    assert [run.await_end() for run in runs] == ["SUCCESS"] * 2
    (pool,) = server.pools_for("")
    assert server.rentals(pool) == 1
    sky.release(pool)
    for run in runs:
        assert_all_is_ended_and_reported(server, run)
    assert_the_rest_is_observed(server, runs, pool, "team")


def assert_the_rest_is_observed(server: DagsterServer, runs: list[Run], pool: str, key: str) -> None:
    """Once; with what the runs have reported it is the receipt."""

    def found() -> list[dict[str, Any]]:
        observed = server.observations("skyward", "pools", key)
        return [one for one in observed if POOL_ID in one and one[POOL_ID]["text"] == pool]

    (rest,) = wait_until(found, f"the observation of {pool}", SECONDS)
    total = sky.receipt_of(pool)["total_cost_usd"]
    assert rest[TOTAL_USD]["floatValue"] == total
    users = [json.loads(row)["run"] for row in rest[USERS]["table"]["records"]]
    assert {run.id for run in runs} <= set(users)
    with dg.DagsterInstance.from_config(str(server.folder)) as instance:
        in_events = sum(sum(costs_in_events(instance, run.id).values()) for run in runs)
    assert in_events + micro(rest[OTHER_COST_USD]["floatValue"]) == micro(total)
