"""Dagster for real: ephemeral instances, real pools of one or two local nodes."""

import contextlib
import importlib
import json
import logging
import os
import shlex
import signal
import subprocess
import sys
import textwrap
import threading
import time
from decimal import Decimal
from pathlib import Path
from textwrap import dedent
from typing import Any

import pytest

import skyward_core as sky
from skyward_core.worker.node_clocks import tagged_processes
from tests.waiting import WAIT_SECONDS, wait_until

dg = pytest.importorskip("dagster")
from dagster_pipes import PipesContext  # noqa: E402

from dagster_skyward import (  # noqa: E402  # noqa: E402
    PipesSkywardClient,
    SkywardResource,
    step_events,
    step_pools,
)
from dagster_skyward.configuration import spec_of  # noqa: E402
from dagster_skyward.final_errors import refuse_retries  # noqa: E402
from dagster_skyward.lifecycle import CONFIG_TAG, spec_of_step  # noqa: E402
from dagster_skyward.metadata import ACCELERATOR, COST_USD, NODES, POOL_ID, RUNNING_COST_USD, SECONDS  # noqa: E402
from skyward_core.ledger.ledger import Ledger, default_url  # noqa: E402
from skyward_core.ledger.receipt import users_of  # noqa: E402
from skyward_core.ledger.rows import CostBy  # noqa: E402
from tests.integrations.bare_node import BARE  # noqa: E402
from tests.integrations.dagster_server import costs_in_events  # noqa: E402
from tests.unit.integrations.test_dagster import loaded, project, write  # noqa: E402, F401 - a fixture

# Dagster's own: it uses its deprecated names for nested resources
pytestmark = pytest.mark.filterwarnings("default::DeprecationWarning")
PRICE = 36.0
FLOWS = Path(__file__).parents[3] / "flows"


def owned_processes(pid=None):
    """Processes of the local nodes that this process, or another one, has started."""
    return [
        found
        for found, environ in tagged_processes()
        if environ.get("SKYWARD_OWNER", "").split(":")[0] == str(pid or os.getpid())
    ]


@pytest.fixture(autouse=True)
def new_processes():
    """Processes of the local nodes of this test; after the test none of them is left, and no thread of ours."""
    nodes, threads = set(owned_processes()), set(threading.enumerate())

    def new():
        return [pid for pid in owned_processes() if pid not in nodes]

    yield new
    assert new() == []

    def left() -> list[str]:
        there = [thread for thread in threading.enumerate() if thread not in threads]
        return [thread.name for thread in there if thread.name.startswith("skyward")]

    wait_until(lambda: not left(), "the threads to end")


@pytest.fixture
def instance():
    logs = {"python_logs": {"managed_python_loggers": ["managed"], "python_log_level": "DEBUG"}}
    with dg.DagsterInstance.ephemeral(settings=logs) as ephemeral:
        yield ephemeral


def resource(**options):
    return SkywardResource(**{"provider": sky.Local(price_per_hour=PRICE)} | options)


def materialize(assets, compute, instance, **more):
    return dg.materialize(assets, resources={"compute": compute}, instance=instance, **more)


def metadata_of(result, key):
    return next(
        event.materialization.metadata
        for event in result.get_asset_materialization_events()
        if event.asset_key == dg.AssetKey(key)
    )


def messages(instance, result, step):
    return [
        line
        for entry in instance.all_logs(result.run_id)
        if entry.step_key == step
        for line in entry.user_message.splitlines()
    ]


def chatter(lines):
    for number in range(lines):
        print(f"line {number} of the payload")
    logging.getLogger("mine").info("told by logging")
    logging.getLogger("managed").debug("told to Dagster's managed logger")
    return sky.instance_info().node, os.environ["SKYWARD_INSTANCE_ID"]


def where(number):
    return number, os.environ["SKYWARD_INSTANCE_ID"], os.environ["SKYWARD_POOL_ID"]


@sky.compute
def square(number):
    return number * number


# ── runs ─────────────────────────────────────────────────────────────────────────────────────────────────────────────


@dg.asset
def talkative(context: dg.AssetExecutionContext, compute: SkywardResource):
    return compute.run(context, chatter, lines=100).value


@dg.asset(deps=[talkative])
def spread(context: dg.AssetExecutionContext, compute: SkywardResource):
    places = compute.map(context, where, range(8))
    with compute.pool(context) as pool:
        squares = (square(3) & square(4)) >> pool
    return places, squares, compute.run(context, square, 5).value


def test_two_assets_share_one_pool_and_each_has_its_lines_cost_and_time(instance, caplog):
    caplog.set_level(logging.INFO)
    result = materialize([talkative, spread], resource(nodes=2, image=BARE, display="quiet"), instance)

    assert result.output_for_node("talkative")[0] in {0, 1}
    places, squares, five = result.output_for_node("spread")
    assert [number for number, _, _ in places] == list(range(8))
    assert (squares, five) == ((9, 16), 25)
    assert len({pool for _, _, pool in places}) == 1
    machines = {machine for _, machine, _ in places}
    assert len(machines) == 2
    assert result.output_for_node("talkative")[1] in machines

    logged = messages(instance, result, "talkative")
    lines = [line for line in logged if line.startswith("[node ")]
    told = [line.partition("] ")[2] for line in lines]
    assert [line for line in told if line.startswith("line ")] == [
        f"line {number} of the payload" for number in range(100)
    ]
    assert set(told) >= {"told by logging", "told to Dagster's managed logger"}
    assert {line.partition("]")[0] for line in lines} == {f"[node {result.output_for_node('talkative')[0]}"}
    assert any(line.startswith("launching 2 x local") for line in logged)
    assert any(line.startswith("the pool is ready after") and "2 nodes" in line for line in logged)
    assert not any(line.startswith("launching") for line in messages(instance, result, "spread"))
    bills = [
        line
        for entry in instance.all_logs(result.run_id)
        for line in entry.user_message.splitlines()
        if line.startswith("done: ")
    ]
    assert len(bills) == 1

    for key in ("talkative", "spread"):
        metadata = metadata_of(result, key)
        assert isinstance(metadata[COST_USD], dg.FloatMetadataValue)
        assert isinstance(metadata[SECONDS], dg.FloatMetadataValue)
        assert (metadata[SECONDS].value, metadata[COST_USD].value) == (
            round(metadata[SECONDS].value, 3),
            round(metadata[COST_USD].value, 9),
        ), "for people to read"
        # the price of the two slots, for as long as the step's calls held them
        assert 0 < metadata[COST_USD].value <= metadata[SECONDS].value * 2 * PRICE / 3600
        assert metadata[NODES] == dg.IntMetadataValue(2)
        assert metadata[ACCELERATOR] == dg.TextMetadataValue("none")
    steps = {key: metadata_of(result, key)[COST_USD].value for key in ("talkative", "spread")}
    costs = costs_in_events(instance, result.run_id)
    assert {step: costs[step] for step in steps} == {step: round(usd * 1_000_000) for step, usd in steps.items()}
    assert costs[""] > costs["talkative"], "start, idle time and end are for the run, and not for the first step"
    bill = sum(sky.cost_of(sky.Work(system="dagster", run=result.run_id)).values())
    assert sum(costs.values()) == round(bill * 1_000_000)


@pytest.mark.filterwarnings("ignore:.*backfill_policy")
def test_the_project_to_start_from_runs_with_fewer_candidates(instance, monkeypatch):
    """flows/dagster_definitions.py in one run and on one pool: assets, partitions, the step with its own hardware, the
    check. All of it runs in tests/nightly/test_examples.py.
    """
    monkeypatch.syspath_prepend(str(FLOWS))
    flow = importlib.import_module("dagster_definitions")
    monkeypatch.setattr(flow, "CANDIDATES", flow.CANDIDATES[3:5])
    monkeypatch.setattr(flow, "FOLDS", 2)
    definitions = [flow.digits_candidates, flow.digits_model, flow.digits_by_half, flow.digits_model_cost]
    both = {"dagster/asset_partition_range_start": "low", "dagster/asset_partition_range_end": "high"}
    result = materialize(definitions, resource(nodes=1), instance, tags=both)
    assert result.output_for_node("digits_model") > 0.9
    assert [one.passed for one in result.get_asset_check_evaluations()] == [True]
    made = [event.materialization for event in result.get_asset_materialization_events()]
    assert sorted((one.asset_key.path[0], one.partition) for one in made) == [
        ("digits_by_half", "high"),
        ("digits_by_half", "low"),
        ("digits_candidates", None),
        ("digits_model", None),
    ]
    assert len({one.metadata[POOL_ID].value for one in made}) == 1
    assert min(one.metadata[COST_USD].value for one in made) > 0
    bill = sum(sky.cost_of(sky.Work(system="dagster", run=result.run_id)).values())
    assert sum(costs_in_events(instance, result.run_id).values()) == round(bill * 1_000_000)


@dg.asset
def watched(context: dg.AssetExecutionContext, compute: SkywardResource):
    """Let the page of the run have what the step has cost so far; return what the ledger has before and after that."""
    with compute.pool(context) as pool, Ledger(default_url()) as ledger:
        pool.run(sky.PendingCompute(time.sleep, (0.3,), {}))  # it costs thousands of micro-dollars

        def noted():
            pool.note_cost()
            work = sky.Work(system="dagster", run=context.run.run_id, task="watched")
            return sum(row.cost_usd for row in ledger.cost_rows(CostBy.TASK, work=work))

        def look():
            before = noted()
            compute._live._observe_running()  # as every second; an ephemeral instance is not watched
            compute._live.events.flush()
            return before, noted()

        before, after = look()
        while pool.spec.name and before != after:  # the node may still report the last moments of the call
            before, after = look()
    return before, after


def live_usd(instance, result, step):
    """The cost of the last observation of a step that runs."""
    entries = instance.all_logs(result.run_id, of_type=dg.DagsterEventType.ASSET_OBSERVATION)
    observed = [
        one.dagster_event.asset_observation_data.asset_observation.metadata for one in entries if one.step_key == step
    ]
    return [metadata[RUNNING_COST_USD].value for metadata in observed if RUNNING_COST_USD in metadata][-1]


def test_a_step_that_has_joined_a_pool_costs_what_its_calls_have_held(instance, monkeypatch):
    """The figure of its metadata is that of the ledger while the pool is open, and all that there is: nothing follows.
    While it runs, the page of the run has what the ledger has at the same moment.
    """
    monkeypatch.setattr(step_events, "LIVE_SECONDS", 0.0)
    compute = resource(name="of-all-runs", keep_warm=60)
    with sky.ComputePool.from_spec(compute.spec) as pool, Ledger(default_url()) as ledger:
        result = materialize([watched], compute, instance)
        cost = round(metadata_of(result, "watched")[COST_USD].value * 1_000_000)
        (part,) = sky.cost_parts(sky.Work(system="dagster", run=result.run_id))
        assert part.is_final
        assert cost == part.cost_usd * 1_000_000 > 0
        (use,) = [user for user in users_of(ledger, pool.id) if user.work == part.work]
        assert (use.cost_usd, use.left_at is None) == (part.cost_usd, False)
        before, after = result.output_for_node("watched")
        assert before == after == Decimal(repr(live_usd(instance, result, "watched"))) > 0
        assert costs_in_events(instance, result.run_id) == {"watched": cost}
    sky.release("of-all-runs")


@pytest.mark.parametrize("error", [dg.DagsterExecutionInterruptedError, LookupError])
def test_an_error_in_the_step_closes_the_pool(error, instance, new_processes, monkeypatch):
    """Dagster's exception for a terminated run is no Exception: such a step hands its machines to the reaper before
    anything that may hang. A step that fails does not, because others may use the pool after it.
    """
    order = []
    for name in ("terminate_now", "close"):
        method = getattr(sky.ComputePool, name)
        noted = lambda pool, name=name, method=method: (pool.is_active and order.append(name), method(pool))[1]
        monkeypatch.setattr(sky.ComputePool, name, noted)

    @dg.asset
    def interrupted(context: dg.AssetExecutionContext, compute: SkywardResource):
        with compute.pool(context) as pool:
            assert pool.is_active
            assert any(environ.get("SKYWARD_POOL_ID") == pool.lease.pool_id for _, environ in tagged_processes())
            raise error

    with pytest.raises(error):
        materialize([interrupted], resource(), instance)
    assert order == (["terminate_now", "close"] if error is dg.DagsterExecutionInterruptedError else ["close"])
    assert new_processes() == []


def test_a_step_that_does_not_use_its_pool_opens_none(instance, new_processes):
    """A pool that is only listed costs nothing: no machine, no log line, no metadata."""

    @dg.asset
    def idle(context: dg.AssetExecutionContext, compute: SkywardResource):
        return len(new_processes())

    result = materialize([idle], resource(), instance)
    assert result.output_for_node("idle") == 0
    assert COST_USD not in metadata_of(result, "idle")


ORPHAN = """
import os, sys, time
import dagster as dg
import skyward_core as sky
from dagster_skyward import SkywardResource

def forever():
    open(os.environ["RUNS"], "w").close()
    time.sleep(600)

@dg.asset
def endless(context: dg.AssetExecutionContext, compute: SkywardResource):
    with open("step.txt", "w") as file:  # Dagster captures what a step prints
        file.write(f"{os.getpid()} {context.run_id}")
    compute.run(context, forever)

defs = dg.Definitions(assets=[endless], jobs=[dg.define_asset_job("orphan")], resources={"compute": SkywardResource(provider=sky.Local(price_per_hour=36.0), env={"RUNS": os.path.abspath("runs.txt")})})
"""


@pytest.mark.parametrize(
    "how",
    ["the run's process is killed", pytest.param("the run is marked as canceled", marks=pytest.mark.nightly)],
)
def test_a_step_without_its_run_ends_its_pool(tmp_path, how):
    """Under the multiprocess executor a killed run process leaves its step processes running."""
    (tmp_path / "dagster.yaml").write_text("telemetry: {enabled: false}\n")
    script = tmp_path / "orphan.py"
    script.write_text(ORPHAN)
    environ = {**os.environ, "DAGSTER_HOME": str(tmp_path), "SKYWARD_LEDGER": f"sqlite:///{tmp_path}/ledger.db"}

    def pools():
        with Ledger(environ["SKYWARD_LEDGER"]) as ledger:
            return ledger.pool_rows(include_ended=True)

    with (tmp_path / "run.log").open("w") as log:
        command = [sys.executable, "-m", "dagster", "job", "execute", "-f", str(script), "-j", "orphan"]
        run = subprocess.Popen(command, stdout=log, stderr=log, cwd=tmp_path, env=environ, start_new_session=True)
    try:
        while not (tmp_path / "runs.txt").exists():
            assert run.poll() is None, (tmp_path / "run.log").read_text()
            time.sleep(0.05)
        step, run_id = (tmp_path / "step.txt").read_text().split()
        assert owned_processes(step)
        if how == "the run's process is killed":
            os.kill(run.pid, signal.SIGKILL)
        else:
            with dg.DagsterInstance.from_config(str(tmp_path)) as instance:
                instance.report_run_canceled(instance.get_run_by_id(run_id))
        wait_until(lambda: owned_processes(step) == [], "the end of the machines")
        wait_until(lambda: pools() and pools()[0].entry.ended_at, "the end in the ledger")
        run.wait(timeout=WAIT_SECONDS)
        wait_until(lambda: not os.path.exists(f"/proc/{step}"), "the end of the step")
    finally:
        with contextlib.suppress(ProcessLookupError):
            os.killpg(run.pid, signal.SIGKILL)
        run.wait()
    (row,) = pools()
    assert (row.open_resources, row.entry.work.run, row.entry.work.asset) == (0, run_id, "endless")
    assert row.cost_usd > 0


# ── retries ──────────────────────────────────────────────────────────────────────────────────────────────────────────


@pytest.mark.parametrize(("error", "tries"), [(sky.BudgetExceeded("no"), 1), (sky.NodeLost("gone"), 2)])
def test_a_step_is_tried_again_only_if_that_may_help(error: Exception, tries: int) -> None:
    """The step itself can catch the error by its class."""
    caught: list[tuple[type[BaseException], str]] = []

    @dg.op(retry_policy=dg.RetryPolicy(max_retries=1))
    def work(context: dg.OpExecutionContext, compute: SkywardResource) -> None:
        try:
            with compute.pool(context):
                raise error
        except type(error) as found:
            caught.append((type(found).__mro__[1], str(found)))
            raise

    @dg.job(resource_defs={"compute": SkywardResource(provider=sky.Local(), display="quiet")})
    def job() -> None:
        work()

    result = job.execute_in_process(raise_on_error=False)
    assert not result.success
    assert [text for _, text in caught] == [str(error)] * tries
    (failed,) = [event for event in result.all_events if event.is_step_failure]
    assert type(error).__name__ in failed.step_failure_data.error.to_string()


def test_a_pool_that_may_not_cost_enough_fails_its_step_once() -> None:
    """Nothing is rented, nothing waits for the next try, and the error says what to do."""
    tries: list[int] = []

    @dg.op(retry_policy=dg.RetryPolicy(max_retries=3, delay=600))
    def work(context: dg.OpExecutionContext, compute: SkywardResource) -> None:
        tries.append(1)
        compute.run(context, abs, -1)

    @dg.job(resource_defs={"compute": resource(max_cost=0.0001)})
    def job() -> None:
        work()

    result = job.execute_in_process(raise_on_error=False)
    assert tries == [1]
    (failed,) = [event for event in result.all_events if event.is_step_failure]
    assert "BudgetExceeded" in failed.step_failure_data.error.to_string()
    assert "max_cost" in failed.step_failure_data.error.to_string()
    assert not any("launching" in (event.message or "") for event in result.all_events)


@pytest.mark.parametrize(
    ("fn", "argument", "error"),
    [
        (lambda _: _gives_up(), 1, "GiveUp: the table has no such column"),
        (lambda _: {"the": threading.Lock()}, 1, "NotPicklable: result['the'] cannot travel"),
        (lambda data: data, [{"lock": threading.Lock()}], "NotPicklable: data[0]['lock'] cannot travel"),
        (lambda _: _skips(), 1, "Skip: no new rows. Dagster skips what is downstream of an output that was not made"),
    ],
    ids=["gives up", "result", "argument", "skips"],
)
def test_what_another_try_meets_again_is_not_tried_again(fn: Any, argument: Any, error: str) -> None:
    """Nothing is rented for an argument that cannot travel."""
    tries: list[int] = []

    @dg.op(retry_policy=dg.RetryPolicy(max_retries=3))
    def work(context: dg.OpExecutionContext, compute: SkywardResource) -> None:
        tries.append(1)
        compute.run(context, fn, argument)

    @dg.job(resource_defs={"compute": SkywardResource(provider=sky.Local(), display="quiet")})
    def job() -> None:
        work()

    result = job.execute_in_process(raise_on_error=False)
    assert tries == [1]
    (failed,) = [event for event in result.all_events if event.is_step_failure]
    assert error in failed.step_failure_data.error.to_string()
    if isinstance(argument, list):
        assert not any("launching" in (event.message or "") for event in result.all_events)


def _gives_up() -> None:
    raise sky.GiveUp("the table has no such column")


def _skips() -> None:
    raise sky.Skip("no new rows")


def test_an_optional_output_is_left_out_by_a_function_that_skips() -> None:
    """So are the assets downstream of it, and the run is a success."""
    made: list[int] = []

    @dg.asset(output_required=False)
    def rows(context: dg.AssetExecutionContext, compute: SkywardResource) -> Any:
        try:
            yield dg.Output(compute.run(context, _skips).value)
        except sky.Skip as skip:
            context.log.info("skipped: %s", skip)

    @dg.asset
    def model(rows: Any) -> None:
        made.append(rows)

    with dg.DagsterInstance.ephemeral() as instance:
        compute = SkywardResource(provider=sky.Local(), display="quiet")
        result = dg.materialize([rows, model], resources={"compute": compute}, instance=instance)
    assert result.success
    assert result.get_asset_materialization_events() == []
    assert [event.step_key for event in result.all_events if event.is_step_skipped] == ["model"]
    assert made == []
    assert not [event for event in result.all_events if "Skip:" in (event.message or "")]  # it is no error


def test_a_schedule_has_its_result() -> None:
    """Its context is that of no step: it has no metadata, and no weak reference to it can be made."""

    @dg.schedule(target="*", cron_schedule="* * * * *")
    def rows(context: dg.ScheduleEvaluationContext, compute: SkywardResource) -> dg.SkipReason:
        return dg.SkipReason(f"{compute.run(context, abs, -2).value} rows")

    compute = SkywardResource(provider=sky.Local(), display="quiet")
    with (
        dg.DagsterInstance.ephemeral() as instance,
        dg.build_schedule_context(instance=instance, resources={"compute": compute}) as context,
    ):
        assert rows.evaluate_tick(context).skip_message == "2 rows"


def test_bookkeeping_that_fails_leaves_the_result(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """The step has its result, and the log says what is missing."""

    def fails(*_: Any) -> None:
        raise OSError("the disk is full")

    monkeypatch.setattr(step_pools, "record", fails)

    @dg.asset
    def model(context: dg.AssetExecutionContext, compute: SkywardResource) -> int:
        return compute.run(context, abs, -2).value

    with dg.DagsterInstance.ephemeral() as instance:
        compute = SkywardResource(provider=sky.Local(), display="quiet")
        result = dg.materialize([model], resources={"compute": compute}, instance=instance)
        assert result.output_for_node("model") == 2
    assert "what the step has cost could not all be noted" in caplog.text


def test_the_error_keeps_what_it_has() -> None:
    """Attributes, cause and notes. An error that is no such error stays as it is."""
    error = sky.BudgetExceeded("the money of team is used up", "team")
    error.add_note("try later")
    error.__cause__ = KeyError("x")
    refuse_retries(error)
    found: Any = error
    assert isinstance(found, sky.BudgetExceeded)
    assert (found.account, found.__notes__, found.allow_retries) == ("team", ["try later"], False)
    assert isinstance(found.__cause__, KeyError)
    for kind in (
        sky.BadRequest,
        sky.CredentialsError,
        sky.PoolStopped,
        sky.NotPicklable,
        sky.ResultNotLoaded,
        sky.GiveUp,
    ):
        final: Any = kind("no")
        refuse_retries(final)
        assert (isinstance(final, kind), str(final), final.allow_retries) == (True, "no", False)
    other = ValueError("x")
    refuse_retries(other)
    assert type(other) is ValueError


# ── configuration ────────────────────────────────────────────────────────────────────────────────────────────────────


def test_the_keywords_become_plain_data_and_the_same_spec():
    """Values as objects and in their plain forms make equal resources, with the JSON and the spec of the core."""
    options = {"nodes": 2, "accelerator": "A100", "spot": 0.8, "env": {"A": "1"}, "timeout": 60, "max_cost": 2.5}
    objects = resource(image=sky.Image(pip=["torch"]), budget="team-a", **options)
    plain = SkywardResource(
        provider={"name": "local", "price_per_hour": PRICE}, image={"pip": ["torch"]}, budget="team-a", **options
    )
    assert objects == plain
    json.dumps(objects.model_dump())
    assert objects.spec == sky.PoolSpec.of(
        provider=sky.Local(price_per_hour=PRICE),
        image=sky.Image(pip=["torch"]),
        budget="team-a",
        display="quiet",
        **options,
    )


def test_each_setting_is_a_config_field_with_its_description():
    """The config that Dagster shows has the fields of PoolSpec, all of them optional, with the texts of the core."""
    fields = SkywardResource.to_fields_dict()

    assert set(fields) == {*sky.PoolSpec.model_fields, "lifecycle", "sharing"}
    assert not any(field.is_required for field in fields.values())
    assert fields["nodes"].description.startswith("Number of machines; (least, most)")
    assert fields["nodes"].description.endswith("Default: 1.")


def test_a_name_from_the_environment_may_have_keep_warm(monkeypatch: pytest.MonkeyPatch) -> None:
    """It is checked when it is known: in the process of a step."""
    compute = resource(name=dg.EnvVar("TEAM_POOL"), keep_warm=60)
    with pytest.raises(sky.BadRequest, match="TEAM_POOL is not set"):
        _ = compute.spec
    monkeypatch.setenv("TEAM_POOL", "nightly+1")
    assert (compute.spec.name, compute.spec.keep_warm) == ("nightly+1", 60)
    monkeypatch.setenv("TEAM_POOL", "")
    with pytest.raises(sky.BadRequest, match="write letters and digits"):
        _ = compute.spec


def test_credentials_of_a_provider_come_from_the_environment(monkeypatch: pytest.MonkeyPatch) -> None:
    """Dagster stores the name of the variable. What is typed into the launchpad or a tag is refused."""
    compute = resource(provider={"name": "runpod", "api_key": dg.EnvVar("TEAM_KEY")})
    monkeypatch.setenv("TEAM_KEY", "rp-1")
    provider = compute.spec.provider
    assert isinstance(provider, sky.RunPod)
    assert provider.api_key is not None
    assert provider.api_key.get_secret_value() == "rp-1"
    typed = {"provider": {"name": "runpod", "api_key": "rp-1"}}
    with pytest.raises(sky.BadRequest, match="RunPodCredentials"):
        spec_of(typed)
    with pytest.raises(sky.BadRequest, match="RunPodCredentials"):
        spec_of_step(sky.PoolSpec(), {"skyward/config": json.dumps(typed)})


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"acelerator": "A100"}, "did you mean 'accelerator'"),
        ({"nods": dg.EnvVar("NODES")}, "did you mean 'nodes'"),
        ({"nodes": 0}, "nodes=0"),
        ({"provider": "locl"}, "did you mean 'local'"),
        ({"memory": "32 gigs"}, "32GB"),
        ({"image": {"pipp": ["torch"]}}, "did you mean 'pip'"),
        ({"image": sky.Image(python="3.9")}, "Python 3.9"),
        ({"sharing": "job"}, "'step', 'run', 'backfill', 'deployment'"),
        ({"sharing": "deployment"}, "needs a name"),
        ({"sharing": "run", "name": "team"}, "leave out one of the two"),
        ({"sharing": "backfill", "name": "team"}, "leave out one of the two"),
        ({"sharing": "run", "keep_warm": -1}, "keep_warm"),
        ({"keep_warm": 60}, "keep_warm needs a name"),
        ({"lifecycle": {"cleanup": "sometimes"}}, "'on_exception'"),
        ({"lifecycle": {"keep_on_failure": -1}}, "at least 0"),
        ({"env": {"HF_TOKEN": "hf_plaintext1"}}, "EnvVar"),
        ({"env": {"HF_TOKEN": "hf_plaintext1", "A": dg.EnvVar("A")}}, "EnvVar"),
        ({"image": sky.Image(env={"HF_TOKEN": "hf_plaintext1"})}, "EnvVar"),
        ({"image": {"env": {"HF_TOKEN": "hf_plaintext1"}}}, "EnvVar"),
        ({"secrets": {"HF_TOKEN": "hf_plaintext1"}}, "from_env"),
        ({"provider": sky.RunPod(api_key="hf_plaintext1")}, 'RunPodCredentials(api_key=dg.EnvVar("NAME")'),
        ({"provider": {"name": "runpod", "api_key": "hf_plaintext1"}}, 'RunPodCredentials(api_key=dg.EnvVar("NAME")'),
        (
            {"provider": [sky.Local(), sky.AWS(access_key_id="a", secret_access_key="b")]},
            "AWSCredentials(access_key_id=",
        ),
        ({"secrets": {"HF_TOKEN": sky.Secret.from_store("hf_plaintext1")}}, "EnvVar"),
    ],
)
def test_what_cannot_be_is_refused_when_the_resource_is_made(options, message):
    """Before Dagster runs anything; also for values that are left to the launch."""
    for make in (resource, SkywardResource.configure_at_launch):
        with pytest.raises(sky.BadRequest) as caught:
            make(**options)
        assert message in str(caught.value)
        assert "hf_plaintext1" not in str(caught.value)


@pytest.mark.parametrize(
    "config", [{"env": {"HF_TOKEN": "hf_plaintext1"}}, {"image": {"env": {"HF_TOKEN": "hf_plaintext1"}}, "nodes": 2}]
)
def test_a_secret_in_the_tag_of_a_step_is_refused_before_anything_is_rented(config: dict[str, Any]) -> None:
    """Dagster stores and shows tags. The message says what to write, and does not repeat the value."""
    with pytest.raises(sky.BadRequest) as caught:
        spec_of_step(resource().spec, {CONFIG_TAG: json.dumps(config)})
    assert '"secrets": {"NAME": {"env": "NAME"}}' in str(caught.value)
    assert "hf_plaintext1" not in str(caught.value)
    written = {"secrets": {"HF_TOKEN": {"env": "TEST_SECRET"}}, "env": {"STAGE": "test"}}
    spec = spec_of_step(resource().spec, {CONFIG_TAG: json.dumps(written)})
    assert spec.secrets == resource(secrets={"HF_TOKEN": dg.EnvVar("TEST_SECRET")}).spec.secrets
    assert spec.env == {"STAGE": "test"}


@pytest.fixture
def seen(instance):
    """What a resource has become in a run: `seen(compute, run_config)` is its spec."""

    def spec_in_run(compute, config=None):
        specs = []

        @dg.asset
        def look(context: dg.AssetExecutionContext, compute: SkywardResource):
            specs.append(compute.spec)

        run_config = {"resources": {"compute": {"config": config}}} if config else None
        assert materialize([look], compute, instance, run_config=run_config).success
        return specs[0]

    return spec_in_run


def test_a_variable_called_env_is_not_a_reference_to_the_environment(seen, monkeypatch):
    """In `env` and `Image(env=...)`; values of these mappings may still come from the environment."""
    monkeypatch.delenv("prod", raising=False)
    monkeypatch.setenv("TEST_STAGE", "staging")
    for image in (sky.Image(env={"env": "prod"}), {"env": {"env": "prod"}}):
        spec = seen(resource(image=image, env={"env": "test"}))
        assert (spec.image.env, spec.env) == ({"env": "prod"}, {"env": "test"})
    spec = seen(resource(image={"env": {"STAGE": dg.EnvVar("TEST_STAGE")}}))
    assert spec.image.env == {"STAGE": "staging"}
    spec = seen(SkywardResource.configure_at_launch(), {"image": {"env": {"env": "prod"}}})
    assert spec.image.env == {"env": "prod"}


def test_environment_variables_are_read_when_the_run_starts(seen, monkeypatch):
    """EnvVar works for text, for numbers, for what is true or false, and inside plain data; the definition has the name,
    not the value.
    """
    compute = SkywardResource(
        provider={"name": "local", "price_per_hour": dg.EnvVar("TEST_PRICE")},
        nodes=dg.EnvVar.int("TEST_NODES"),
        env={"GREETING": dg.EnvVar("TEST_GREETING")},
        image={"env": {"STAGE": dg.EnvVar("TEST_GREETING")}, "require_hashes": dg.EnvVar("TEST_METRICS")},
        accelerator=dg.EnvVar("TEST_CHIP"),
        timeout=dg.EnvVar("TEST_SECONDS"),
        concurrency=dg.EnvVar("TEST_NODES"),
        collect_metrics=dg.EnvVar("TEST_METRICS"),
    )
    with pytest.raises(sky.BadRequest, match="TEST_"):
        _ = compute.spec
    values = {"PRICE": "7.5", "NODES": "2", "GREETING": "hello", "CHIP": "2xT4", "SECONDS": "90", "METRICS": "false"}
    for name, value in values.items():
        monkeypatch.setenv(f"TEST_{name}", value)
    spec = seen(compute)
    assert (spec.provider, spec.nodes, spec.env) == (sky.Local(price_per_hour=7.5), 2, {"GREETING": "hello"})
    assert (spec.image.env, spec.image.require_hashes) == ({"STAGE": "hello"}, False)
    assert spec.accelerator == sky.PoolSpec.of(accelerator="2xT4").accelerator
    assert (spec.timeout, spec.concurrency, spec.collect_metrics) == (90.0, 2, False)


def test_the_run_config_decides_before_the_keywords_and_these_before_the_settings(seen, monkeypatch):
    """`configure_at_launch` keeps its arguments as defaults."""
    compute = SkywardResource.configure_at_launch(provider=sky.Local(price_per_hour=PRICE), nodes=3)
    config = {"nodes": 2, "spot": "never", "image": {"pip": ["torch"]}, "timeout": 90}
    assert seen(compute, config) == sky.PoolSpec.of(
        provider=sky.Local(price_per_hour=PRICE), display="quiet", **config | {"image": sky.Image(pip=["torch"])}
    )
    monkeypatch.setenv("SKYWARD_NODES", "5")
    monkeypatch.setenv("SKYWARD_CONCURRENCY", "2")
    spec = sky.ComputePool.from_spec(seen(resource(nodes=1))).spec
    assert (spec.nodes, spec.concurrency) == (1, 2)


def test_the_library_is_known_to_dagster():
    """`import dagster_skyward` registers the library and its version with Dagster, for its UI and telemetry."""
    from dagster_shared.libraries import DagsterLibraryRegistry

    assert DagsterLibraryRegistry.get()["dagster-skyward"] == sky.__version__


# ── Pipes, and assets in YAML ────────────────────────────────────────────────────────────────────────────────────────


def train(step: int, large: int = 0) -> None:
    pipes = PipesContext.get()
    print("a progress bar", end="")
    pipes.log.info(f"step {step} of {pipes.asset_key} with {pipes.get_extra('rate')}")
    print("printed")
    pipes.report_custom_message({"node": pipes.get_extra("rate"), "large": "x" * large})
    pipes.report_asset_check("sound", passed=True)
    pipes.report_asset_materialization(metadata={"loss": 0.5})


def rank() -> None:
    info = sky.instance_info()
    assert info is not None
    PipesContext.get().report_custom_message(info.node)
    print("a line of each node")


def meet(own: str, folder: str) -> None:
    """Wait for the other call: the two run at the same time."""
    other = {"left": "right", "right": "left"}[own]
    Path(folder, f"{own}.here").touch()
    while not Path(folder, f"{other}.here").exists():
        time.sleep(0.01)
    PipesContext.get().report_custom_message([own, other])


def fail() -> None:
    PipesContext.get().log.info("before the error")
    raise LookupError("the payload's own error")


SCRIPT = """
import os, sys
from dagster_pipes import open_dagster_pipes

with open_dagster_pipes() as pipes:
    print("from the script")
    pipes.report_custom_message([sys.argv[1], os.environ["MODE"]])
    pipes.report_asset_materialization(metadata={"loss": 0.25})
sys.exit(int(sys.argv[2]))
"""


def test_functions_and_scripts_report_with_pipes(tmp_path: Path) -> None:
    script = tmp_path / "train.py"
    script.write_text(textwrap.dedent(SCRIPT))
    seen: dict[str, Any] = {}

    @dg.asset(check_specs=[dg.AssetCheckSpec("sound", asset="model")])
    def model(context: dg.AssetExecutionContext, pipes: PipesSkywardClient) -> dg.MaterializeResult:
        done = pipes.run(context=context, fn=train, args=[1], kwargs={"large": 20_000}, extras={"rate": 3})
        seen["model"] = done.get_custom_messages()
        return done.get_materialize_result()

    @dg.asset(deps=[model])
    def scripted(context: dg.AssetExecutionContext, pipes: PipesSkywardClient) -> dg.MaterializeResult:
        done = pipes.run(context=context, script=script, args=["one", 0], env={"MODE": "test"})
        seen["scripted"] = done.get_custom_messages()
        with pytest.raises(RuntimeError, match=r"train\.py ended with exit code 3"):
            pipes.run(context=context, script=script, args=["two", 3], env={"MODE": "test"})
        return done.get_materialize_result()

    @dg.asset(deps=[scripted])
    def commanded(context: dg.AssetExecutionContext, pipes: PipesSkywardClient) -> dg.MaterializeResult:
        text = "echo of a shell | cat; MODE=shell python3 -c " + shlex.quote(textwrap.dedent(SCRIPT))
        done = pipes.run(context=context, command=text, args=["five", 0])
        python = [sys.executable, "-c", textwrap.dedent(SCRIPT)]
        many = pipes.run(context=context, command=python, args=[0], env={"MODE": "list"}, map_over=["six", "seven"])
        seen["commanded"] = [*done.get_custom_messages(), *sorted(many.get_custom_messages())]
        return done.get_materialize_result()

    @dg.asset(deps=[commanded])
    def parallel(context: dg.AssetExecutionContext, pipes: PipesSkywardClient) -> dg.MaterializeResult:
        done = pipes.run(context=context, fn=meet, args=[str(tmp_path)], map_over=["left", "right"])
        seen["parallel"] = sorted(done.get_custom_messages())
        with pytest.raises(sky.BadRequest, match="choose one"):
            pipes.run(context=context, fn=meet, map_over=["left"], broadcast=True)
        with pytest.raises(sky.BadRequest, match="nothing to run"):
            pipes.run(context=context, fn=meet, map_over=[])
        return done.get_materialize_result()

    @dg.asset(deps=[parallel])
    def everywhere(context: dg.AssetExecutionContext, pipes: PipesSkywardClient) -> dg.MaterializeResult:
        done = pipes.run(context=context, fn=rank, broadcast=True)
        seen["everywhere"] = sorted(done.get_custom_messages())
        with pytest.raises(LookupError, match="the payload's own error"):
            pipes.run(context=context, fn=fail)
        with pytest.raises(sky.BadRequest, match="either"):
            pipes.run(context=context)
        return done.get_materialize_result()

    client = PipesSkywardClient(
        compute=SkywardResource(provider=sky.Local(price_per_hour=36.0), nodes=2, output="head")
    )
    with dg.DagsterInstance.ephemeral() as instance:
        assets = [model, scripted, commanded, parallel, everywhere]
        result = dg.materialize(assets, resources={"pipes": client}, instance=instance)
        assert seen == {
            "model": ({"node": 3, "large": "x" * 20_000},),
            "scripted": (["one", "test"],),
            "commanded": [["five", "shell"], ["seven", "list"], ["six", "list"]],
            "parallel": [["left", "right"], ["right", "left"]],
            "everywhere": [0, 1],
        }
        logged = {
            asset.key.to_user_string(): messages(instance, result, asset.key.to_user_string()) for asset in assets
        }
        of_nodes = {
            (entry.level, entry.user_message)
            for entry in instance.all_logs(result.run_id)
            if "a line of each node" in entry.user_message
        }
    assert of_nodes == {(logging.INFO, "[node 0] a line of each node"), (logging.DEBUG, "[node 1] a line of each node")}
    assert "step 1 of model with 3" in logged["model"]
    assert any(line.endswith("printed") and line.startswith("[node ") for line in logged["model"])
    assert any(line.endswith("] from the script") for line in logged["scripted"])
    assert any(line.endswith("] of a shell") for line in logged["commanded"])
    assert "before the error" in logged["everywhere"]
    assert not [line for step in logged.values() for line in step if "skyward-pipes" in line]
    assert not [line for step in logged.values() for line in step if "did not receive" in line or "unexpected" in line]
    made = {
        event.asset_key.to_user_string(): event.materialization.metadata
        for event in result.get_asset_materialization_events()
    }
    assert (made["model"]["loss"].value, made["scripted"]["loss"].value) == (0.5, 0.25)
    assert all(metadata[COST_USD].value >= 0 for metadata in made.values())
    assert len({metadata[POOL_ID].value for metadata in made.values()}) == 1
    assert [check.check_name for check in result.get_asset_check_evaluations()] == ["sound"]
    assert "dagster_pipes" in sys.modules


YAML_FUNCTION = """
type: dagster_skyward.SkywardComponent
attributes:
  asset: {key: team/model, partitions_def: {type: static, partition_keys: [mon, tue, sun]}, group_name: training}
  function: yaml_project.training:train
  args: [21]
  partition: day
  provider: {name: local, price_per_hour: 36.0}
  max_cost: 5
  compute: {env: {COLOR: red}}
"""

YAML_SCRIPT = """
type: dagster_skyward.SkywardComponent
attributes:
  asset: {key: report, deps: [other]}
  script: report.py
  args: [3]
  resource: compute
  nodes: 2
"""


def test_assets_of_yaml_files_are_made_on_pools(project: Path) -> None:
    write(project, "model", YAML_FUNCTION)
    folder = write(project, "report", YAML_SCRIPT)
    (folder / "report.py").write_text(
        dedent("""
        import sys
        from dagster_pipes import open_dagster_pipes
        with open_dagster_pipes() as pipes:
            pipes.report_asset_materialization(metadata={"rows": int(sys.argv[1])})
        """)
    )
    compute = resource()
    defs = dg.Definitions.merge(
        loaded(project),
        dg.Definitions(resources={"compute": compute}, jobs=[dg.define_asset_job("report_job", ["report"])]),
    )
    assert defs.resolve_asset_graph().get(dg.AssetKey(["team", "model"])).group_name == "training"
    with dg.DagsterInstance.ephemeral() as instance:
        made = defs.resolve_implicit_global_asset_job_def().execute_in_process(
            instance=instance, partition_key="tue", asset_selection=[dg.AssetKey(["team", "model"])]
        )
        assert made.output_for_node("skyward_team__model") == "tue42"
        skipped = defs.resolve_implicit_global_asset_job_def().execute_in_process(
            instance=instance, partition_key="sun", asset_selection=[dg.AssetKey(["team", "model"])]
        )
        assert skipped.success
        assert skipped.get_asset_materialization_events() == []  # the function has raised sky.Skip
        reported = defs.resolve_job_def("report_job").execute_in_process(instance=instance)
    (of_model,) = made.get_asset_materialization_events()
    (of_report,) = reported.get_asset_materialization_events()
    assert of_model.materialization.metadata[COST_USD].value > 0
    assert of_report.materialization.metadata["rows"].value == 3
    assert of_report.materialization.metadata[NODES].value == 2
    assert of_report.materialization.metadata[COST_USD].value > 0
    assert of_report.materialization.metadata[POOL_ID].value != of_model.materialization.metadata[POOL_ID].value
    assert "yaml_project" not in os.environ.get("PYTHONPATH", "")  # the module has travelled by value
