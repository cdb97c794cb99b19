"""`skyward quote module:defs`: what the steps of Dagster's jobs and assets would rent, from the definitions alone."""

from pathlib import Path

import pytest

pytest.importorskip("dagster")

import skyward_core as sky
from dagster_skyward.quotes import planned_tasks

PROJECT = """
import dagster as dg
from dagster_skyward import PipesSkywardClient, SkywardResource, skyward_executor
from neighbour import LOCAL

@dg.asset(retry_policy=dg.RetryPolicy(max_retries=2), op_tags={"skyward/config": {"nodes": 3}})
def big(compute: SkywardResource): ...

@dg.asset
def plain(): ...

@dg.asset
def one(shared: SkywardResource): ...

@dg.asset(deps=[one])
def two(shared: SkywardResource): ...

@dg.asset
def piped(pipes: PipesSkywardClient): ...

@dg.op(out=dg.DynamicOut())
def many(): ...

@dg.op
def each(launched: SkywardResource, x): ...

@dg.op
def later(unknown: SkywardResource): ...

@dg.op
def first(compute: SkywardResource): ...

@dg.op
def second(compute: SkywardResource, x): ...

@dg.graph
def inner():
    later()

@dg.job(tags={"dagster/max_retries": 1})
def nightly():
    many().map(each)
    inner()

@dg.job(executor_def=dg.in_process_executor)
def one_process():
    second(first())

@dg.job(executor_def=skyward_executor.configured({"compute": {"provider": LOCAL, "nodes": 4}}))
def on_nodes():
    many()

resources = {
    "compute": SkywardResource(provider=LOCAL, max_cost=3.0),
    "shared": SkywardResource(provider=LOCAL, sharing="run"),
    "pipes": PipesSkywardClient(compute=SkywardResource(provider=LOCAL)),
    "launched": SkywardResource.configure_at_launch(provider=LOCAL, nodes=2),
    "unknown": SkywardResource(provider=LOCAL, accelerator=dg.EnvVar("NO_SUCH_VARIABLE")),
}
defs = dg.Definitions(assets=[big, plain, one, two, piped], jobs=[nightly, one_process, on_nodes], resources=resources)

@dg.definitions
def lazy():
    return defs

something = 3
"""


@pytest.fixture(scope="module")
def project(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("dagster")
    (folder / "neighbour.py").write_text('LOCAL = {"name": "local", "price_per_hour": 2.0}\n')
    (folder / "quoted_project.py").write_text(PROJECT)
    return folder / "quoted_project.py"


@pytest.mark.parametrize("name", ["defs", "lazy"])
def test_each_pool_of_each_job_and_asset_is_planned(project: Path, name: str) -> None:
    """Steps that share a pool are one task. Tries are those of the step's policy and of the run; what only a run knows
    has a reason.
    """
    plan = planned_tasks(f"{project}:{name}")
    assert plan is not None
    found = {(task.workflow, task.task): task for task in plan.tasks}
    assert set(found) == {
        ("nightly", "inner.later"),
        ("nightly", "each"),
        ("one_process", "first, second"),
        ("on_nodes", "all steps"),
        ("__ASSET_JOB", "piped"),
        ("__ASSET_JOB", "big"),
        ("__ASSET_JOB", "one, two"),
    }
    later, each, big = (found[key] for key in (("nightly", "inner.later"), ("nightly", "each"), ("__ASSET_JOB", "big")))
    assert (later.spec, later.tries, "NO_SUCH_VARIABLE is not set" in later.reason) == (None, 2, True)
    assert each.spec is not None
    assert (each.spec.nodes, each.instances) == (2, None)
    assert big.spec is not None
    assert (big.spec.nodes, big.spec.max_cost, big.tries) == (3, 3.0, 3)
    assert found["on_nodes", "all steps"].spec == sky.PoolSpec.of(
        provider=sky.Local(price_per_hour=2.0), nodes=4, display="quiet"
    )


@pytest.mark.parametrize("target", ["dags", "jobs.py", "no/such.py:defs", "a b:defs", "skyward_core:sweep", ":defs"])
def test_another_target_is_left_to_other_orchestrators(target: str, tmp_path: Path) -> None:
    """A path, a file without a name, and an object that is no definitions are not Dagster's."""
    (tmp_path / "jobs.py").touch()
    assert planned_tasks(target) is None


def test_an_object_of_a_project_that_is_no_definitions_is_none(project: Path) -> None:
    """The file has them under another name."""
    assert planned_tasks(f"{project}:something") is None
