"""Dagster for real: ephemeral instances, real pools of one or two local nodes."""

import importlib.util
import json
import logging
import os
import signal
import subprocess
import sys
import textwrap
import time
from pathlib import Path

import pytest

import skyward_core as sky
from dagster_skyward import SkywardResource
from dagster_skyward.metadata import COST_USD, NODES, OTHER_COST_USD, POOL_ID, SECONDS
from skyward_core.ledger.ledger import Ledger, default_url
from skyward_core.ledger.rows import CostBy
from tests.system.integrations.test_dagster import (  # noqa: F401 - fixtures
    dg,
    instance,
    materialize,
    messages,
    metadata_of,
    new_processes,
    optional,
    owned_processes,
    resource,
    slow_square,
    spread,
    square,
    where,
)


def fail():
    raise LookupError("the payload's own error")


@dg.asset
def failing(context: dg.AssetExecutionContext, compute: SkywardResource):
    compute.run(context, fail)


def test_a_failing_asset_raises_its_own_error_and_closes_the_pool(instance, new_processes):
    """The function's exception arrives as itself, and nothing is left running."""
    result = materialize([failing], resource(), instance, raise_on_error=False)

    assert not result.success
    error = result.failure_data_for_node("failing").error
    assert "LookupError: the payload's own error" in error.to_string()
    assert new_processes() == []


def test_unconfirmed_machines_fail_no_step(instance, monkeypatch):
    """The work is done: the run succeeds, its log has an error that names the machine, and the pool's reaper ends
    it.
    """
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


@dg.asset
def alone(context: dg.AssetExecutionContext, compute: SkywardResource):
    return compute.run(context, where, 1).value


@pytest.mark.parametrize("error", [dg.DagsterExecutionInterruptedError, LookupError])
def test_a_step_that_is_stopped_hands_its_machines_to_the_reaper_first(error, instance, monkeypatch):
    """A terminated step hands the machines to the reaper before any step that may hang. A step that fails does not,
    because other steps may use the pool after it.
    """
    order = []
    terminate_now, close = sky.ComputePool.terminate_now, sky.ComputePool.close
    monkeypatch.setattr(
        sky.ComputePool, "terminate_now", lambda pool: (order.append("handed over"), terminate_now(pool))[1]
    )
    monkeypatch.setattr(
        sky.ComputePool, "close", lambda pool: (order.append("closed") if pool.is_active else None, close(pool))[1]
    )

    @dg.asset
    def stopped(context: dg.AssetExecutionContext, compute: SkywardResource):
        with compute.pool(context):
            raise error

    with pytest.raises(error):
        materialize([stopped], resource(), instance)
    assert order == (["handed over", "closed"] if error is dg.DagsterExecutionInterruptedError else ["closed"])


@dg.op
def work(context: dg.OpExecutionContext, compute: SkywardResource):
    return compute.run(context, square, 6).value


@dg.op(out=dg.DynamicOut())
def spread_out(context: dg.OpExecutionContext, compute: SkywardResource):
    for number in compute.map(context, square, [1, 2]):
        yield dg.DynamicOutput(number, mapping_key=str(number))


@dg.job
def two_ops():
    work()
    spread_out()


def test_an_op_has_its_cost_on_its_output(instance):
    """Ops work as assets do; the output has the metadata, and an op with dynamic outputs has none."""
    result = two_ops.execute_in_process(resources={"compute": resource()}, instance=instance)

    assert result.output_for_node("work") == 36
    assert result.output_for_node("spread_out") == {"1": 1, "4": 4}
    outputs = {
        event.node_name: event.step_output_data.metadata
        for event in result.all_events
        if event.event_type_value == "STEP_OUTPUT"
    }
    assert outputs["work"][COST_USD].value >= 0  # the bill grows by whole seconds, and the step may have taken less
    assert outputs["work"][SECONDS].value > 0
    assert outputs["work"][NODES] == dg.IntMetadataValue(1)
    assert COST_USD not in outputs["spread_out"]


@dg.multi_asset(specs=[dg.AssetSpec("left"), dg.AssetSpec(["deep", "right"])])
def both(context: dg.AssetExecutionContext, compute: SkywardResource):
    compute.run(context, square, 2)
    yield dg.MaterializeResult(asset_key="left", metadata={"own": 1.0})
    compute.run(context, square, 3)
    yield dg.MaterializeResult(asset_key=["deep", "right"])


@dg.asset_check(asset="left")
def checked(context: dg.AssetCheckExecutionContext, compute: SkywardResource) -> dg.AssetCheckResult:
    return dg.AssetCheckResult(passed=compute.run(context, square, 2).value == 4)


def test_assets_made_together_share_the_cost_and_a_check_runs_too(instance):
    """Each of two assets of a step has half of the cost known when it was yielded, beside its own metadata; a check
    cannot have metadata.
    """
    result = materialize([both, checked], resource(), instance)

    left, right = metadata_of(result, "left"), metadata_of(result, ["deep", "right"])
    assert left["own"] == dg.FloatMetadataValue(1.0)
    assert 0 < left[COST_USD].value <= right[COST_USD].value
    assert result.get_asset_check_evaluations()[0].passed


def test_an_asset_can_be_invoked_directly(new_processes):
    """A test may call an asset with a context of its own: the pool lives as long as the context, and the metadata
    can be read there.
    """
    with dg.build_asset_context() as context:
        places, squares, five = spread(context, compute=resource())

        assert (len(places), squares, five) == (8, (9, 16), 25)
        assert len({pool for _, _, pool in places}) == 1
        assert context.get_output_metadata("result")[COST_USD] > 0
    assert new_processes() == []


def test_outside_of_a_run_a_pool_lives_for_the_call(new_processes):
    """A resource that Dagster has not set up opens a pool for one call, and closes it."""
    for build in (dg.build_op_context, dg.build_asset_context):
        with build() as context:  # it has an instance with two databases in memory
            assert resource().run(context, square, 7).value == 49
    assert new_processes() == []


def test_helpers_of_an_asset_module_travel(tmp_path, instance):
    """Functions, dataclasses and globals of a module that the nodes cannot import exist when the function runs; the
    result has the module's own class.
    """
    path = tmp_path / "asset_module.py"
    path.write_text(
        textwrap.dedent("""
            from dataclasses import dataclass
            import dagster as dg
            from dagster_skyward import SkywardResource

            FACTOR = 3

            @dataclass(frozen=True)
            class Point:
                x: int

            def scaled(point):
                return Point(point.x * FACTOR)

            @dg.asset
            def point(context: dg.AssetExecutionContext, compute: SkywardResource):
                return compute.run(context, scaled, Point(14)).value
        """)
    )
    specification = importlib.util.spec_from_file_location("asset_module", path)
    module = importlib.util.module_from_spec(specification)
    sys.modules["asset_module"] = module
    try:
        specification.loader.exec_module(module)
        result = materialize([module.point], resource(), instance)
        assert result.output_for_node("point") == module.Point(42)
    finally:
        del sys.modules["asset_module"]


# ── money ────────────────────────────────────────────────────────────────────────────────────────────────────────────


def bill_of(pool_id):
    with Ledger(default_url()) as ledger:
        return float(sum(row.cost_usd for row in ledger.cost_rows(CostBy.POOL, pool_id=pool_id)))


def costs_by_asset(pool_id):
    with Ledger(default_url()) as ledger:
        return {row.key: float(row.cost_usd) for row in ledger.cost_rows(CostBy.ASSET, pool_id=pool_id)}


def reported_costs(instance, run_id):
    """The costs in the run's events, by asset; and the pools' ids."""
    costs, pools = {}, set()
    for kind in (dg.DagsterEventType.ASSET_MATERIALIZATION, dg.DagsterEventType.ASSET_OBSERVATION):
        for entry in instance.all_logs(run_id, of_type=kind):
            event = entry.dagster_event
            data = (
                event.step_materialization_data.materialization
                if kind.value == "ASSET_MATERIALIZATION"
                else event.asset_observation_data.asset_observation
            )
            key = COST_USD if kind.value == "ASSET_MATERIALIZATION" else OTHER_COST_USD
            if key in data.metadata:
                name = event.asset_key.to_user_string()
                costs[name] = costs.get(name, 0.0) + data.metadata[key].value
                pools |= set(data.metadata[POOL_ID].value.split(", "))
    return costs, pools


def slow_fail():
    time.sleep(1.1)
    raise LookupError("the payload's own error")


@dg.asset
def failing_late(context: dg.AssetExecutionContext, compute: SkywardResource):
    compute.run(context, slow_fail)


@dg.op
def first_op(context: dg.OpExecutionContext, compute: SkywardResource):
    return compute.run(context, slow_square, 2).value


@dg.op
def second_op(context: dg.OpExecutionContext, compute: SkywardResource, number):
    return compute.run(context, square, number).value


@dg.graph_asset
def graphic():
    return second_op(first_op())


@dg.asset(deps=["graphic"])
def pause():
    time.sleep(2.1)  # the pool stays open: no step uses these seconds, and all steps pay for them


@dg.asset(deps=["pause"])
def after_pause(context: dg.AssetExecutionContext, compute: SkywardResource):
    compute.run(context, slow_square, 2)


def test_the_shares_add_up_to_the_bill_whatever_the_steps_are(instance):
    """Graphs of ops, generators, checks, missing outputs and failed steps: materializations and observations add up to
    the bill, and the ledger agrees.

    The same holds for a pool that no step uses for a while.
    """
    result = materialize(
        [graphic, both, checked, optional, failing_late, pause, after_pause], resource(), instance, raise_on_error=False
    )

    assert not result.success
    costs, (pool,) = reported_costs(instance, result.run_id)
    bill = bill_of(pool)
    assert set(costs) == {"graphic", "left", "deep/right", "made", "failing_late", "after_pause"}
    assert all(cost > 0 for cost in costs.values())
    assert sum(costs.values()) == pytest.approx(bill, abs=1e-5)
    assert {name: cost for name, cost in costs_by_asset(pool).items() if cost > 1e-5} == {
        name: pytest.approx(cost, abs=1e-5) for name, cost in costs.items()
    }
    assert "the shares of the bill could not" not in "".join(
        entry.user_message for entry in instance.all_logs(result.run_id)
    )


@dg.asset(retry_policy=dg.RetryPolicy(max_retries=1))
def second_try(context: dg.AssetExecutionContext, compute: SkywardResource):
    compute.run(context, slow_square, 2)
    if context.retry_number == 0:
        raise LookupError("the first try's error")


def test_tries_of_a_step_in_one_process_add_up_to_the_bill(instance):
    """The cost in the second try's materialization is not subtracted from the first try's cost too."""
    result = materialize([second_try], resource(), instance)

    costs, (pool,) = reported_costs(instance, result.run_id)
    assert costs == {"second_try": pytest.approx(bill_of(pool), abs=1e-5)}


days = dg.StaticPartitionsDefinition(["monday", "tue|sday"])


@dg.asset(partitions_def=days)
def daily(context: dg.AssetExecutionContext, compute: SkywardResource):
    return compute.run(context, tags_of_the_node).value


def tags_of_the_node():
    return json.loads(os.environ["SKYWARD_TAGS"])


def test_pool_run_job_step_asset_and_partition_are_in_metadata_ledger_and_tags(instance):
    """The machine itself, the ledger and the materialization agree on the purpose of the machine."""
    result = materialize([daily], resource(), instance, partition_key="tue|sday")

    metadata = metadata_of(result, "daily")
    said = {name: metadata[f"skyward/{name}"].value for name in ("pool_id", "run", "job", "step", "asset", "partition")}
    pool = said.pop("pool_id")
    assert said == {
        "run": result.run_id,
        "job": result.job_def.name,
        "step": "daily",
        "asset": "daily",
        "partition": "tue|sday",
    }
    work = sky.Work(
        system="dagster",
        workflow=said["job"],
        run=said["run"],
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
    } == {
        **{name: value for name, value in work.labels().items() if name != "partition"},
        "partition": "tue_sday",
    }


# ── what cannot travel, and what comes in any order ──────────────────────────────────────────────────────────────────


@dg.asset
def captures(context: dg.AssetExecutionContext, compute: SkywardResource):
    def payload():
        context.log.info("on a node")

    compute.run(context, payload)


def test_a_captured_context_is_named_with_the_cure(instance):
    """A function that uses the step's context fails with an error that names the context and says what to write, not
    with the first lock in it.
    """
    result = materialize([captures], resource(), instance, raise_on_error=False)

    error = result.failure_data_for_node("captures").error.to_string()
    assert "the step's `context` (a Dagster AssetExecutionContext), which cannot travel to a node" in error
    assert "compute.run(context, train, context.partition_key)" in error


@pytest.mark.parametrize("order", ["before", "after", "both"])
def test_metadata_may_be_added_in_any_order_if_an_asset_is_invoked_directly(order):
    """A valid asset is valid under `build_asset_context`, where Dagster itself takes an output's metadata only once."""

    @dg.asset
    def model(context: dg.AssetExecutionContext, compute: SkywardResource):
        if order in {"before", "both"}:
            context.add_output_metadata({"loss": 1.0})
        compute.run(context, square, 2)
        if order in {"after", "both"}:
            context.add_output_metadata({"loss": 0.5}, output_name="result")
        return compute.run(context, square, 3).value

    with dg.build_asset_context() as context:
        assert model(context, compute=resource()) == 9
        metadata = context.get_output_metadata("result")
    assert metadata["loss"] == (1.0 if order == "before" else 0.5)
    assert metadata[COST_USD] > 0


SCRIPT = """
import sys, time
import dagster as dg
import skyward_core as sky
from dagster_skyward import SkywardResource

def forever():
    print("the payload runs", flush=True)
    time.sleep(600)

@dg.asset
def endless(context: dg.AssetExecutionContext, compute: SkywardResource):
    compute.run(context, forever)

if __name__ == "__main__":
    dg.materialize([endless], resources={"compute": SkywardResource(provider=sky.Local(price_per_hour=1.0))})
"""


@pytest.mark.parametrize("moment", ["launching 1 x local", "[node 0] the payload runs"])
def test_a_signal_during_provisioning_or_a_call_leaves_nothing(tmp_path, moment):
    """Dagster's terminate sends SIGINT. It ends the run at once: the call is stopped, the pool closed, the bill
    reported.
    """
    script = tmp_path / "endless.py"
    script.write_text(SCRIPT)
    process = subprocess.Popen(
        [sys.executable, str(script)],
        stderr=subprocess.PIPE,
        text=True,
        cwd=tmp_path,
        env={**os.environ, "DAGSTER_HOME": ""},
    )
    try:
        lines = []
        for line in process.stderr:
            lines.append(line)
            if moment in line:
                break
        assert moment in lines[-1], "".join(lines)
        process.send_signal(signal.SIGINT)
        rest = process.communicate(timeout=60)[1]
    finally:
        process.kill()
        process.wait()
        process.stderr.close()
    assert "DagsterExecutionInterruptedError" in rest
    assert "done: " in rest
    assert owned_processes(process.pid) == []


def backwards():
    print("they are", os.environ["HF_TOKEN"], os.environ["B_TOKEN"])
    return [os.environ[name][::-1] for name in ("HF_TOKEN", "B_TOKEN")]


def test_secrets_are_read_from_the_environment_when_the_step_opens_the_pool(instance, monkeypatch):
    """EnvVar among `secrets`, and names; no value is in the definition, in the run's events and configuration, or in
    its metadata.
    """
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


def test_the_first_example_of_the_page_runs_on_a_machine_without_a_gpu(instance, tmp_path, monkeypatch, caplog):
    """As it is written, with its accelerator: this machine simulates it, with one warning."""
    monkeypatch.setattr("skyward_core.providers.local.gpus_here", lambda: ())
    page = (Path(__file__).parents[3] / "docs" / "dagster.md").read_text()
    (tmp_path / "page.py").write_text(page.partition("```python\n")[2].partition("```")[0])
    spec = importlib.util.spec_from_file_location("page", tmp_path / "page.py")
    module = importlib.util.module_from_spec(spec)
    monkeypatch.setitem(sys.modules, "page", module)
    spec.loader.exec_module(module)
    assert module.defs.resources["compute"].accelerator is not None
    with caplog.at_level("WARNING", "skyward"):
        result = dg.materialize([module.model], resources=module.defs.resources, instance=instance)
    assert result.output_for_node("model") == 0.98
    assert [record.getMessage() for record in caplog.records if "stands in for A100" in record.getMessage()] != []
