"""Dagster: pools that several processes share, how long they live, and hardware for each step."""

import os
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest

import skyward_core as sky
from dagster_skyward import AWSCredentials, Lifecycle, PoolResult, RunPodCredentials, SkywardResource
from dagster_skyward.metadata import COST_USD, NODES, OTHER_COST_USD, POOL_ID
from dagster_skyward.run_steps import pools_of, steps_to_come
from dagster_skyward.settlement import settle
from dagster_skyward.upkeep import release_after
from skyward_core.ledger.ledger import Ledger, default_url
from tests.system.integrations.test_dagster_sharing import (
    PRICE,
    dg,
    resource,
)

pytestmark = [pytest.mark.filterwarnings("default::DeprecationWarning")]


def pool_id() -> str:
    return os.environ["SKYWARD_POOL_ID"]


def fail() -> None:
    raise LookupError("the payload's own error")


def micro_usd_of(pool: str) -> int:
    with Ledger(default_url()) as ledger:
        return int(sum(row.cost_usd for row in ledger.cost_rows(pool_id=pool)) * 1_000_000)


def is_ended(pool: str) -> bool:
    with Ledger(default_url()) as ledger:
        entry = ledger.pool(pool)
    assert entry is not None
    return entry.ended_at is not None


def test_in_a_script_there_is_no_context() -> None:
    """`run`, `map`, `broadcast` and `pool` work without a context; a result has its cost and metadata."""
    compute = resource(nodes=2)
    with pytest.raises(LookupError):
        compute.run(None, fail)
    result = compute.broadcast(None, pool_id)
    assert isinstance(result, PoolResult)
    assert len(result.value) == 2
    assert set(result.value) == {result.metadata[POOL_ID]}
    assert result.cost == result.metadata[COST_USD] >= 2 * PRICE / 3600
    assert result.metadata[NODES] == 2


def test_each_step_has_its_hardware_and_the_life_of_its_pools() -> None:
    """One resource opens a pool before the first step, and another one for the step with a tag. Both stay after a step
    has failed, until they are released.
    """
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


def busy() -> str:
    time.sleep(1.2)  # the cost of a bucket is by whole seconds
    return pool_id()


def test_steps_of_one_process_have_their_parts_of_a_shared_pool() -> None:
    """The process joins the pool for the run, and writes the shares of its steps. A failed step has one too."""

    @dg.asset
    def one(context: dg.AssetExecutionContext, compute: SkywardResource) -> str:
        return compute.run(context, busy).value

    @dg.asset(deps=[one])
    def two(context: dg.AssetExecutionContext, compute: SkywardResource) -> None:
        compute.run(context, busy)
        compute.run(context, fail)

    with dg.DagsterInstance.ephemeral() as instance:
        compute = resource(sharing="run")
        result = dg.materialize([one, two], resources={"compute": compute}, instance=instance, raise_on_error=False)
        pool = result.output_for_node("one")
        costs = costs_in_events(instance, result.run_id)
    parts = parts_of(result.run_id)
    assert {"one", "two"} <= set(parts)
    assert set(costs) == {"one", "two"}
    assert costs["one"] > costs["two"] > 0, "the first one also pays for the opening"
    assert sum(costs.values()) == sum(parts.values()) == micro_usd_of(pool)


# ── a run of several processes ───────────────────────────────────────────────────────────────────────────────────────

SHARED = '''
import os, sys, time
import dagster as dg
import skyward_core as sky
from dagster_skyward import SkywardResource

def where():
    time.sleep(1.5)  # the cost of a bucket is by whole seconds
    return os.environ["SKYWARD_POOL_ID"]

def note(context, compute):
    pool = compute.run(context, where).value
    with open("pools.txt", "a") as file:
        file.write(f"{context.asset_key.to_user_string()} {pool} {os.getpid()}\\n")

@dg.asset
def first(context: dg.AssetExecutionContext, compute: SkywardResource) -> None:
    note(context, compute)

@dg.asset(deps=[first])
def left(context: dg.AssetExecutionContext, compute: SkywardResource) -> None:
    note(context, compute)

@dg.asset(deps=[first])
def right(context: dg.AssetExecutionContext, compute: SkywardResource) -> None:
    note(context, compute)
    if os.environ.get("FAILS"):
        raise LookupError("after its call")

@dg.asset(deps=[left, right])
def report() -> None:
    """It uses no pool: the machines do not wait for it."""

compute = SkywardResource(provider=sky.Local(price_per_hour=36.0), sharing="run", lease_seconds=20)
defs = dg.Definitions(assets=[first, left, right, report], jobs=[dg.define_asset_job("shared")], resources={"compute": compute})
'''


def executed(folder: Path, **environ: str) -> tuple[list[list[str]], Any]:
    """Run the job with Dagster's default executor; return what its steps have noted, and the instance's run."""
    (folder / "dagster.yaml").write_text("telemetry: {enabled: false}\n")
    (folder / "shared.py").write_text(SHARED)
    (folder / "pools.txt").unlink(missing_ok=True)
    done = subprocess.run(
        [sys.executable, "-m", "dagster", "job", "execute", "-f", "shared.py", "-j", "shared"],
        cwd=folder,
        env={**os.environ, "DAGSTER_HOME": str(folder), **environ},
        capture_output=True,
        text=True,
        timeout=240,
        check=False,
    )
    assert (done.returncode != 0) == bool(environ), done.stderr[-5000:]
    notes = [line.split() for line in (folder / "pools.txt").read_text().splitlines()]
    with dg.DagsterInstance.from_config(str(folder)) as instance:
        (record,) = instance.get_run_records(limit=1)
        run = record.dagster_run
        assert steps_to_come(instance, run.run_id) == set()
        costs = costs_in_events(instance, run.run_id)
    return notes, (run, costs)


def costs_in_events(instance: Any, run_id: str) -> dict[str, int]:
    """Return the micro-dollars in the materializations and observations of a run, by step."""
    costs: dict[str, int] = {}
    for record in instance.get_records_for_run(run_id).records:
        event = record.event_log_entry.dagster_event
        if event is None or event.event_type_value not in ("ASSET_MATERIALIZATION", "ASSET_OBSERVATION"):
            continue
        if event.event_type_value == "ASSET_MATERIALIZATION":
            usd = event.step_materialization_data.materialization.metadata.get(COST_USD)
        else:
            usd = event.asset_observation_data.asset_observation.metadata.get(OTHER_COST_USD)
        if usd is not None:
            costs[event.step_key] = costs.get(event.step_key, 0) + round(usd.value * 1_000_000)
    return costs


def parts_of(run_id: str) -> dict[str, int]:
    """Return the parts of the ledger's bill for a run, in micro-dollars, by step; all are final."""
    parts = sky.cost_parts(sky.Work(system="dagster", run=run_id))
    assert all(part.is_final for part in parts)
    return {part.work.task: int(part.cost_usd * 1_000_000) for part in parts}


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
    """The step that has succeeded runs once, nothing more is rented, and the second run releases the pool. The events
    of both runs add up to the bill.
    """
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


@pytest.mark.timeout(600)
def test_the_steps_of_a_run_share_a_pool_which_the_last_one_releases(tmp_path: Path) -> None:
    """Under the multiprocess executor the first step opens, the others attach, and the last one that needs the pool
    releases it. After a failure too; a sensor's function may release once more.
    """
    for environ in ({}, {"FAILS": "yes"}):
        notes, (run, costs) = executed(tmp_path, **environ)
        assert sorted(name for name, _, _ in notes) == ["first", "left", "right"]
        (pool,) = {pool for _, pool, _ in notes}
        assert len({pid for _, _, pid in notes}) == 3
        assert pools_of(run) == [pool]
        assert is_ended(pool)
        assert costs == parts_of(run.run_id)
        assert set(costs) == {"first", "left", "right"}
        assert sum(costs.values()) == micro_usd_of(pool)
        assert release_after(run) == f"released: {pool}"
