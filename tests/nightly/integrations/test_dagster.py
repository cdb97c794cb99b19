"""Dagster: variants of steps, signals, money of steps and backfills, pools that several processes share."""

import json
import logging
import os
import signal
import subprocess
import sys
import time
from concurrent.futures import ThreadPoolExecutor
from decimal import Decimal
from typing import Any

import pytest

dg = pytest.importorskip("dagster")

import skyward_core as sky  # noqa: E402
from dagster_skyward import (  # noqa: E402
    AWSCredentials,
    Lifecycle,
    PoolResult,
    RunPodCredentials,
    SkywardResource,
    step_events,
)
from dagster_skyward.backfills import BACKFILL_TAG  # noqa: E402
from dagster_skyward.metadata import COST_USD, NODES, OTHER_COST_USD, POOL_ID, SECONDS  # noqa: E402
from dagster_skyward.settlement import settle  # noqa: E402
from skyward_core.ledger.budgets import LONGEST_BOOT_SECONDS  # noqa: E402
from skyward_core.ledger.ledger import Ledger, default_url  # noqa: E402
from skyward_core.ledger.rows import Account, Period  # noqa: E402
from tests.integrations.dagster_server import costs_in_events  # noqa: E402
from tests.system.integrations.test_dagster import (  # noqa: E402, F401 - fixtures
    PRICE,
    instance,
    live_usd,
    materialize,
    messages,
    metadata_of,
    new_processes,
    owned_processes,
    resource,
    square,
    watched,
    where,
)
from tests.system.integrations.test_dagster_executor import DAYS, days, is_ended, made  # noqa: E402, F401 - fixtures

pytestmark = [
    pytest.mark.timeout(600),
    pytest.mark.filterwarnings("default::DeprecationWarning"),
    pytest.mark.filterwarnings("ignore:.*backfill_policy"),
]


def pool_id():
    return os.environ["SKYWARD_POOL_ID"]


def fail():
    raise LookupError("the payload's own error")


def busy():
    time.sleep(1.2)  # the cost of a bucket is by whole seconds
    return pool_id()


def micro_usd_of(pool):
    with Ledger(default_url()) as ledger:
        return int(sum(row.cost_usd for row in ledger.cost_rows(pool_id=pool)) * 1_000_000)


# ── steps ────────────────────────────────────────────────────────────────────────────────────────────────────────────


@dg.asset
def alone(context: dg.AssetExecutionContext, compute: SkywardResource):
    return compute.run(context, where, 1).value


def test_unconfirmed_machines_fail_no_step(instance, monkeypatch):
    monkeypatch.setattr("skyward_core.provisioning.teardown.DEADLINE_SECONDS", 0.3)
    monkeypatch.setattr(sky.Local, "terminate", lambda *_: {})
    result = materialize([alone], resource(), instance)
    assert result.success
    machine, pool_id = result.output_for_node("alone")[1:]
    logged = [
        (entry.level, line) for entry in instance.all_logs(result.run_id) for line in entry.user_message.splitlines()
    ]
    assert [machine in line for level, line in logged if level == logging.ERROR and "NOT CONFIRMED GONE" in line] == [
        True
    ]
    deadline = time.monotonic() + 60
    while sky.Local().instances(pool_id):  # until the reaper has ended it
        assert time.monotonic() < deadline
        time.sleep(0.05)


def test_an_op_has_its_cost_on_its_output(instance):
    """An op with dynamic outputs has none. A captured context fails with an error that names it and says what to write."""

    @dg.op
    def work(context: dg.OpExecutionContext, compute: SkywardResource):
        return compute.run(context, square, 6).value

    @dg.op(out=dg.DynamicOut())
    def spread_out(context: dg.OpExecutionContext, compute: SkywardResource):
        for number in compute.map(context, square, [1, 2]):
            yield dg.DynamicOutput(number, mapping_key=str(number))

    @dg.op
    def captures(context: dg.OpExecutionContext, compute: SkywardResource):
        compute.run(context, lambda: context.log.info("on a node"))

    @dg.job(resource_defs={"compute": resource()})
    def ops():
        work()
        spread_out()
        captures()

    result = ops.execute_in_process(instance=instance, raise_on_error=False)
    assert result.output_for_node("work") == 36
    assert result.output_for_node("spread_out") == {"1": 1, "4": 4}
    outputs = {
        event.node_name: event.step_output_data.metadata
        for event in result.all_events
        if event.event_type_value == "STEP_OUTPUT"
    }
    assert outputs["work"][COST_USD].value >= 0  # the bill grows by whole seconds, and the step may have taken less
    assert (outputs["work"][SECONDS].value > 0, outputs["work"][NODES]) == (True, dg.IntMetadataValue(1))
    assert COST_USD not in outputs["spread_out"]
    (failed,) = [event for event in result.all_events if event.is_step_failure]
    error = failed.step_failure_data.error.to_string()
    assert "the step's `context` (a Dagster OpExecutionContext), which cannot travel to a node" in error
    assert "compute.run(context, train, context.partition_key)" in error


def test_outside_of_a_run(new_processes):
    @dg.asset
    def model(context: dg.AssetExecutionContext, compute: SkywardResource):
        context.add_output_metadata({"loss": 1.0})
        first = compute.run(context, pool_id).value
        context.add_output_metadata({"loss": 0.5}, output_name="result")
        return first, compute.run(context, pool_id).value

    with dg.build_asset_context() as context:
        first, second = model(context, compute=resource())
        metadata = context.get_output_metadata("result")
    assert first == second
    assert metadata["loss"] == 0.5
    assert metadata[COST_USD] > 0
    compute = resource(nodes=2)
    with pytest.raises(LookupError):
        compute.run(None, fail)
    result = compute.broadcast(None, pool_id)
    assert isinstance(result, PoolResult)
    assert (len(result.value), set(result.value)) == (2, {result.metadata[POOL_ID]})
    assert result.cost == result.metadata[COST_USD] >= 2 * PRICE / 3600
    assert new_processes() == []


def test_a_sensor_has_its_result() -> None:
    """Its context is that of no step, and has no metadata."""

    @dg.job
    def job() -> None: ...

    @dg.sensor(job=job)
    def rows(context: dg.SensorEvaluationContext, compute: SkywardResource) -> dg.SkipReason:
        return dg.SkipReason(f"{compute.run(context, abs, -2).value} rows")

    compute = SkywardResource(provider=sky.Local(), display="quiet")
    with (
        dg.DagsterInstance.ephemeral() as instance,
        dg.build_sensor_context(instance=instance, resources={"compute": compute}) as context,
    ):
        assert rows.evaluate_tick(context).skip_message == "2 rows"


SCRIPT = """
import dagster as dg
import skyward_core as sky
from dagster_skyward import PipesSkywardClient, SkywardResource

@dg.asset
def endless(context: dg.AssetExecutionContext, pipes: PipesSkywardClient):
    return pipes.run(context=context, script="sleep.py").get_materialize_result()

if __name__ == "__main__":
    compute = SkywardResource(provider=sky.Local(price_per_hour=1.0))
    dg.materialize([endless], resources={"pipes": PipesSkywardClient(compute=compute)})
"""


def test_a_terminated_script_of_pipes_ends_on_its_node(tmp_path):
    """Dagster sends SIGINT. Run, call and the process of the script end, the pool is closed, the bill reported."""
    (tmp_path / "endless.py").write_text(SCRIPT)
    (tmp_path / "sleep.py").write_text(
        "import os, time\n"
        "from dagster_pipes import open_dagster_pipes\n"
        "with open_dagster_pipes() as pipes:\n"
        "    pipes.log.info(f'the script runs in {os.getpid()}')\n"
        "    time.sleep(600)\n"
    )
    environ = {**os.environ, "DAGSTER_HOME": ""}
    command = [sys.executable, "endless.py"]
    with subprocess.Popen(command, stderr=subprocess.PIPE, text=True, cwd=tmp_path, env=environ) as process:
        try:
            line = next(line for line in process.stderr if "the script runs in" in line)
            process.send_signal(signal.SIGINT)
            rest = process.communicate(timeout=60)[1]
        finally:
            process.kill()
    assert "DagsterExecutionInterruptedError" in rest
    assert "done: " in rest
    assert owned_processes(process.pid) == []
    assert not os.path.exists(f"/proc/{line.split('runs in')[1].split()[0]}")


def backwards():
    print("they are", os.environ["HF_TOKEN"], os.environ["B_TOKEN"])
    return [os.environ[name][::-1] for name in ("HF_TOKEN", "B_TOKEN")]


def test_secrets_are_read_from_the_environment_when_the_step_opens_the_pool(instance, monkeypatch):
    compute = resource(secrets={"HF_TOKEN": dg.EnvVar("TEST_SECRET"), "B_TOKEN": sky.Secret.from_env("TEST_OTHER")})
    assert compute == resource(secrets={"HF_TOKEN": {"env": "TEST_SECRET"}, "B_TOKEN": dg.EnvVar("TEST_OTHER")})
    assert resource(secrets=[dg.EnvVar("TEST_SECRET")]).spec == resource(secrets=("TEST_SECRET",)).spec
    monkeypatch.setenv("TEST_SECRET", "env-0123456789")
    monkeypatch.setenv("TEST_OTHER", "other-0123456789")

    @dg.asset
    def read(context: dg.AssetExecutionContext, compute: SkywardResource):
        return compute.run(context, backwards).value

    result = materialize([read], compute, instance)
    assert result.output_for_node("read") == ["9876543210-vne", "9876543210-rehto"]
    lines = messages(instance, result, "read")
    assert any("they are *** ***" in line for line in lines)
    written = [
        json.dumps(compute.model_dump()),
        repr(compute),
        str(instance.all_logs(result.run_id)),
        str(instance.get_run_by_id(result.run_id)),
    ]
    job = dg.Definitions(assets=[read], resources={"compute": compute}).resolve_implicit_global_asset_job_def()
    written.append(str(job.get_job_snapshot() if hasattr(job, "get_job_snapshot") else job.job_snapshot))
    assert [text[:100] for text in written if "0123456789" in text] == []


def test_credentials_reach_the_provider_and_no_configuration(monkeypatch: pytest.MonkeyPatch) -> None:
    """Values come from the environment when the run starts. The definition, its snapshot and the run have the name."""
    monkeypatch.setenv("TEST_ID", "id-0123456789")
    monkeypatch.setenv("TEST_KEY", "key-0123456789")
    given: list[Any] = []
    from_spec = sky.ComputePool.from_spec

    def noted(spec: sky.PoolSpec, *, credentials: Any, **options: Any) -> sky.ComputePool:
        given.append((spec, credentials))
        return from_spec(spec.with_(provider=sky.Local()), **options)

    monkeypatch.setattr(sky.ComputePool, "from_spec", noted)
    credentials = AWSCredentials(access_key_id=dg.EnvVar("TEST_ID"), secret_access_key=dg.EnvVar("TEST_KEY"))
    compute = resource(provider={"name": "aws", "region": "eu-west-1"}, credentials=credentials)

    @dg.asset
    def one(context: dg.AssetExecutionContext, compute: SkywardResource) -> str:
        return compute.run(context, pool_id).value

    with dg.DagsterInstance.ephemeral() as instance:
        result = dg.materialize([one], resources={"compute": compute}, instance=instance)
        written = [repr(compute), str(instance.all_logs(result.run_id)), str(instance.get_run_by_id(result.run_id))]
    job = dg.Definitions(assets=[one], resources={"compute": compute}).resolve_implicit_global_asset_job_def()
    written.append(str(job.get_job_snapshot() if hasattr(job, "get_job_snapshot") else job.job_snapshot))
    ((spec, provider),) = given
    assert (provider.access_key_id.get_secret_value(), provider.region) == ("id-0123456789", "eu-west-1")
    written += [repr(provider), spec.model_dump_json()]
    assert [text[:100] for text in written if "0123456789" in text] == []
    wrong = resource(credentials=RunPodCredentials(api_key="x"))  # it has provider=sky.Local()
    with pytest.raises(sky.BadRequest, match="credentials of runpod: choose one cloud"):
        wrong.run(None, pool_id)


@dg.asset
def threaded(context: dg.AssetExecutionContext, compute: SkywardResource) -> set[str]:
    """Make calls from threads that know nothing of the step but its context."""
    with ThreadPoolExecutor(4) as threads:
        found = set(threads.map(lambda _: compute.run(context, busy).value, range(4)))
        own = [threads.submit(compute.run, context, square, 3, nodes=1) for _ in range(2)]
        assert {one.result().value for one in own} == {9}
    return found


@dg.asset(deps=["threaded"])
def after_threads(context: dg.AssetExecutionContext, compute: SkywardResource) -> str:
    return compute.run(context, busy).value


def test_threads_of_a_step_call_for_the_step(instance):
    """No thread needs a copy of the step's context variables."""
    result = materialize([threaded, after_threads], resource(nodes=2), instance)
    assert result.output_for_node("threaded") == {result.output_for_node("after_threads")}
    costs, parts = costs_in_events(instance, result.run_id), parts_of(result.run_id)
    assert costs == parts
    assert parts["threaded"] > parts["after_threads"] > 0


# ── money ────────────────────────────────────────────────────────────────────────────────────────────────────────────


@dg.multi_asset(specs=[dg.AssetSpec("left"), dg.AssetSpec(["deep", "right"])])
def both(context: dg.AssetExecutionContext, compute: SkywardResource):
    compute.run(context, square, 2)
    yield dg.MaterializeResult(asset_key="left", metadata={"own": 1.0})
    compute.run(context, square, 3)
    yield dg.MaterializeResult(asset_key=["deep", "right"])


@dg.asset_check(asset="left")
def checked(context: dg.AssetCheckExecutionContext, compute: SkywardResource) -> dg.AssetCheckResult:
    return dg.AssetCheckResult(passed=compute.run(context, square, 2).value == 4)


@dg.multi_asset(outs={"made": dg.AssetOut(is_required=False), "unmade": dg.AssetOut(is_required=False)})
def optional(context: dg.AssetExecutionContext, compute: SkywardResource):
    compute.run(context, busy)
    yield dg.Output(1, output_name="made")


@dg.asset(retry_policy=dg.RetryPolicy(max_retries=1))
def failing_late(context: dg.AssetExecutionContext, compute: SkywardResource):
    compute.run(context, busy)
    compute.run(context, fail)


@dg.op
def first_op(context: dg.OpExecutionContext, compute: SkywardResource):
    return compute.run(context, busy).value


@dg.op
def second_op(context: dg.OpExecutionContext, compute: SkywardResource, given):
    return compute.run(context, square, len(given)).value


@dg.graph_asset
def graphic():
    return second_op(first_op())


@dg.asset(deps=["graphic"])
def pause():
    time.sleep(2.1)  # the pool stays open: no step uses these seconds, and the run pays for them


@dg.asset(deps=["pause"])
def after_pause(context: dg.AssetExecutionContext, compute: SkywardResource):
    compute.run(context, busy)


@pytest.mark.parametrize("sharing", ["step", "run"])
def test_the_costs_of_steps_and_run_add_up_to_the_bill_whatever_the_steps_are(instance, sharing):
    assets = [graphic, both, checked, optional, failing_late, pause, after_pause]
    result = materialize(assets, resource(sharing=sharing), instance, raise_on_error=False)
    assert not result.success
    assert result.get_asset_check_evaluations()[0].passed
    left = metadata_of(result, "left")
    assert left["own"] == dg.FloatMetadataValue(1.0)
    assert left[COST_USD].value > 0
    costs, parts = costs_in_events(instance, result.run_id), parts_of(result.run_id)
    pools = {part.pool_id for part in sky.cost_parts(sky.Work(system="dagster", run=result.run_id))}
    assert len(pools) == 1
    assert {"both", "optional", "failing_late", "after_pause"} <= set(costs)
    assert costs == parts
    assert costs[""] > 2.1 * PRICE / 3600 * 1_000_000
    assert sum(costs.values()) == micro_usd_of(*pools)
    assert "could not" not in "".join(entry.user_message for entry in instance.all_logs(result.run_id))


def parts_of(run_id: str) -> dict[str, int]:
    """Return the parts of the ledger's bill for a run, in micro-dollars, by step; all are final."""
    parts = sky.cost_parts(sky.Work(system="dagster", run=run_id))
    assert all(part.is_final for part in parts)
    found: dict[str, int] = {}
    for part in parts:  # each try of a step has one
        found[part.work.task] = found.get(part.work.task, 0) + int(part.cost_usd * 1_000_000)
    return found


days_with_signs = dg.StaticPartitionsDefinition(["monday", "tue|sday"])


@dg.asset(partitions_def=days_with_signs)
def daily(context: dg.AssetExecutionContext, compute: SkywardResource):
    return compute.run(context, tags_of_the_node).value


def tags_of_the_node():
    return json.loads(os.environ["SKYWARD_TAGS"])


def test_pool_run_job_step_asset_and_partition_are_in_ledger_and_tags(instance):
    """The machine itself and the ledger agree on its purpose. The metadata name the pool; the page has the rest."""
    result = materialize([daily], resource(), instance, partition_key="tue|sday")

    metadata = metadata_of(result, "daily")
    assert not {"run", "job", "step", "asset", "partition"} & {name.removeprefix("skyward/") for name in metadata}
    pool = metadata[POOL_ID].value
    work = sky.Work(
        system="dagster",
        workflow=result.job_def.name,
        run=result.run_id,
        task="daily",
        attempt="1",
        asset="daily",
        partition="tue|sday",
    )
    with Ledger(default_url()) as ledger:
        assert ledger.pool(pool).work == work
    tags = result.output_for_node("daily")
    assert {
        name.removeprefix("skyward-work-"): value for name, value in tags.items() if name.startswith("skyward-work-")
    } == {**{name: value for name, value in work.labels().items() if name != "partition"}, "partition": "tue_sday"}


@pytest.mark.parametrize("sharing", ["step", "backfill"])
def test_a_backfill_rents_nothing_more_when_its_budget_is_spent(sharing: str, instance: Any, days: Any) -> None:
    lease_seconds, account = 10, f"backfills by {sharing}"
    limit = Decimal("0.01") * (int(LONGEST_BOOT_SECONDS) + 2 * lease_seconds) + Decimal("0.003")
    with Ledger(default_url()) as ledger:
        ledger.set_account(Account(account, limit, Period.MONTH))
    compute = SkywardResource(
        provider=sky.Local(price_per_hour=36.0), sharing=sharing, lease_seconds=lease_seconds, budget=account
    )
    results = [
        dg.materialize(
            [days],
            resources={"compute": compute},
            instance=instance,
            partition_key=day,
            tags={BACKFILL_TAG: sharing},
            raise_on_error=False,
        )
        for day in DAYS
    ]
    assert [result.success for result in results] == [True, False, False, False]
    assert list(made) == DAYS[:1]
    for result in results[1:]:
        assert "BudgetExceeded" in result.failure_data_for_node("days").error.to_string()
        messages = [entry.user_message for entry in instance.all_logs(result.run_id)]
        assert not any("launching" in message for message in messages)
    with Ledger(default_url()) as ledger:
        assert Decimal("0.01") <= limit - ledger.left_usd(account, "") <= limit


def test_a_range_of_partitions_is_one_pool_and_each_partition_has_its_share(instance: Any, days: Any) -> None:
    """A backfill of one run makes all partitions in one step."""
    compute = SkywardResource(provider=sky.Local(price_per_hour=36.0))
    result = dg.materialize(
        [days],
        resources={"compute": compute},
        instance=instance,
        tags={"dagster/asset_partition_range_start": "mon", "dagster/asset_partition_range_end": "thu"},
    )
    assert len(set(made.values())) == 1
    events = [event.materialization for event in result.get_asset_materialization_events()]
    assert sorted(event.partition for event in events) == sorted(DAYS)
    assert {event.metadata[POOL_ID].value for event in events} == set(made.values())
    costs = [event.metadata[COST_USD].value for event in events]
    observed = [
        entry.asset_observation.metadata
        for entry in instance.all_logs(result.run_id, of_type=dg.DagsterEventType.ASSET_OBSERVATION)
    ]
    others = [metadata[OTHER_COST_USD].value for metadata in observed if OTHER_COST_USD in metadata]
    bill = sum(sky.cost_of(sky.Work(system="dagster", run=result.run_id)).values())
    assert min(costs) > 0
    assert all(other > 0 for other in others)  # none if the machine ended within a second that was billed before
    assert sum(costs) + sum(others) == pytest.approx(bill, abs=1e-6)


# ── pools that several steps and runs use ────────────────────────────────────────────────────────────────────────────


def test_each_step_has_its_hardware_and_the_life_of_its_pools() -> None:
    """One resource opens a pool before the first step, and another one for the step with a tag."""
    lifecycle = Lifecycle(create="eager", keep_on_failure=300)
    seen: dict[str, str] = {}

    @dg.asset
    def one(context: dg.AssetExecutionContext, compute: SkywardResource) -> None:
        seen["one"] = compute.run(context, pool_id).value

    @dg.asset(deps=[one], op_tags={"skyward/config": {"nodes": 2}})
    def two(context: dg.AssetExecutionContext, compute: SkywardResource) -> None:
        seen["two"], again = compute.broadcast(context, pool_id).value
        assert seen["two"] == again
        compute.run(context, fail)

    try:
        with dg.DagsterInstance.ephemeral() as instance:
            result = dg.materialize(
                [one, two],
                resources={"compute": resource(lifecycle=lifecycle)},
                instance=instance,
                raise_on_error=False,
            )
            first = next(
                entry.step_key for entry in instance.all_logs(result.run_id) if "launching" in entry.user_message
            )
        assert not result.success
        assert first is None or "one" in first  # the resource's own log: no step has begun
        assert seen["one"] != seen["two"]
        assert [is_ended(pool) for pool in seen.values()] == [False, False]
    finally:
        for pool in seen.values():
            sky.release(pool)
    assert all(is_ended(pool) for pool in seen.values())


tries: dict[str, list[str]] = {"first": [], "second": []}
"""The pools of all tries of two steps."""


def fails_once_job() -> Any:
    """A job whose second step fails at its first try, after its call. Its pool stays then."""

    @dg.asset
    def first(context: dg.AssetExecutionContext, compute: SkywardResource) -> None:
        tries["first"].append(compute.run(context, pool_id).value)

    @dg.asset(deps=[first])
    def second(context: dg.AssetExecutionContext, compute: SkywardResource) -> None:
        tries["second"].append(compute.run(context, pool_id).value)
        if len(tries["second"]) == 1:
            raise LookupError("only the second try succeeds")

    compute = resource(sharing="run", lifecycle=Lifecycle(keep_on_failure=300))
    job = dg.define_asset_job("fails_once", executor_def=dg.in_process_executor)
    return dg.Definitions(assets=[first, second], jobs=[job], resources={"compute": compute}).resolve_job_def(
        "fails_once"
    )


def test_a_run_that_is_tried_again_from_its_failure_uses_the_pool_of_the_first_one() -> None:
    """The step that has succeeded runs once, nothing more is rented, and the second run releases the pool."""
    job = dg.reconstructable(fails_once_job)
    with dg.DagsterInstance.ephemeral() as instance:
        first = dg.execute_job(job, instance, raise_on_error=False)
        assert not first.success
        assert not is_ended(tries["first"][0])
        again = dg.ReexecutionOptions.from_failure(first.run_id, instance)
        second = dg.execute_job(job, instance, reexecution_options=again)
        assert second.success
        assert [len(pools) for pools in tries.values()] == [1, 2]
        (pool,) = {pool for pools in tries.values() for pool in pools}
        assert is_ended(pool)
        for run_id in (first.run_id, second.run_id):
            settle(instance, instance.get_run_by_id(run_id))
            assert sum(costs_in_events(instance, run_id).values()) == sum(parts_of(run_id).values())
        assert sum(sum(parts_of(run).values()) for run in (first.run_id, second.run_id)) == micro_usd_of(pool)


@pytest.mark.parametrize("name", [None, "that-the-step-opens"])
def test_a_running_step_shows_what_the_ledger_has(name, instance, new_processes, monkeypatch):
    """Of a pool that it opens: of one with a name the price of its slots, of its own the whole bill, which grows."""
    monkeypatch.setattr(step_events, "LIVE_SECONDS", 0.0)
    result = materialize([watched], resource(name=name), instance)
    before, after = result.output_for_node("watched")
    shown = Decimal(repr(live_usd(instance, result, "watched")))
    if name is not None:
        assert before == after == shown > 0
    else:
        assert 0 < before <= shown <= after
    (bill,) = sky.cost_of(sky.Work(system="dagster", run=result.run_id, task="watched")).values()
    assert after <= Decimal(repr(bill))


MULTIPROCESS = """
import os, time
import dagster as dg
import skyward_core as sky
from dagster_skyward import SkywardResource
from skyward_core.ledger.ledger import Ledger

def pool_id():
    time.sleep(1.2)  # the cost of a bucket is by whole seconds
    return os.environ["SKYWARD_POOL_ID"]

def noted(context, compute):
    with open(f"{context.op_execution_context.get_step_execution_context().step.key}.pool", "w") as file:
        file.write(compute.run(context, pool_id).value)

@dg.op(out=dg.DynamicOut())
def many():
    for key in "xy":
        yield dg.DynamicOutput(key, mapping_key=key)

@dg.op
def each(context: dg.OpExecutionContext, compute: SkywardResource, key):
    noted(context, compute)

@dg.op(tags={"skyward/config": {"concurrency": 2}})
def own(context: dg.OpExecutionContext, compute: SkywardResource):
    noted(context, compute)

@dg.op
def after(given: list, other):
    with Ledger(os.environ["SKYWARD_LEDGER"]) as ledger:
        while not all(pool.ended_at for pool in ledger.pools(include_ended=True)):
            time.sleep(0.1)

@dg.job(resource_defs={"compute": SkywardResource(provider=sky.Local(price_per_hour=36.0))})
def job():
    after(many().map(each).collect(), own())
"""


def test_steps_in_their_own_processes_share_a_pool_until_the_last_one_that_needs_it(tmp_path, monkeypatch):
    """Nothing says `sharing`. Two mapped steps have one pool, which ends before the run; a step with other settings has
    its own. The run's tag and its events have the ledger's bill.
    """
    (tmp_path / "dagster.yaml").write_text("telemetry: {enabled: false}\n")
    (tmp_path / "several.py").write_text(MULTIPROCESS)
    monkeypatch.setenv("SKYWARD_LEDGER", f"sqlite:///{tmp_path}/ledger.db")
    environ = {**os.environ, "DAGSTER_HOME": str(tmp_path)}
    command = [sys.executable, "-m", "dagster", "job", "execute", "-f", "several.py", "-j", "job"]
    done = subprocess.run(command, cwd=tmp_path, env=environ, capture_output=True, text=True, timeout=500, check=False)
    assert done.returncode == 0, done.stderr[-4000:]
    one, other, own = [(tmp_path / f"{step}.pool").read_text() for step in ("each[x]", "each[y]", "own")]
    assert one == other != own
    with dg.DagsterInstance.from_config(str(tmp_path)) as instance:
        (record,) = instance.get_run_records()
        run = record.dagster_run
        assert [value for name, value in run.tags.items() if name.startswith("skyward/pool/")] == [one]
        settle(instance, run)
        costs = costs_in_events(instance, run.run_id)
        for entry in instance.all_logs(run.run_id, of_type=dg.DagsterEventType.STEP_OUTPUT):  # ops have no asset
            if (usd := entry.dagster_event.step_output_data.metadata.get(COST_USD)) is not None:
                costs[entry.step_key] = costs.get(entry.step_key, 0) + round(usd.value * 1_000_000)
        assert costs == parts_of(run.run_id)
        assert sum(costs.values()) == micro_usd_of(one) + micro_usd_of(own)
        tags = instance.get_run_by_id(run.run_id).tags
        assert tags["skyward/cost_usd"] == f"{sum(costs.values()) / 1_000_000:.6f}"
