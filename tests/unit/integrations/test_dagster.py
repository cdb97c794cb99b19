"""Dagster without pools: assets in YAML, the check of the cost, and what a run would cost."""

import sys
from collections.abc import Iterator
from pathlib import Path
from textwrap import dedent
from typing import Any

import pytest

dg = pytest.importorskip("dagster")

from dagster.components.component_scaffolding import scaffold_object  # noqa: E402
from dagster.components.core.package_entry import get_package_objects_in_module  # noqa: E402

import dagster_skyward  # noqa: E402
import skyward_core as sky  # noqa: E402
from dagster_skyward import SkywardComponent, SkywardResource, build_cost_check  # noqa: E402
from dagster_skyward.metadata import COST_USD, OTHER_COST_USD  # noqa: E402
from dagster_skyward.quotes import planned_tasks  # noqa: E402

# Dagster's own: it uses its deprecated names for nested resources
pytestmark = pytest.mark.filterwarnings("default::DeprecationWarning")


# ── assets in YAML ───────────────────────────────────────────────────────────────────────────────────────────────────


@pytest.fixture
def project(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """The folder of a project, whose package `yaml_project` has a module with functions and an empty `defs`."""
    package = tmp_path / "yaml_project"
    (package / "defs").mkdir(parents=True)
    (tmp_path / "pyproject.toml").write_text(
        '[tool.dg]\ndirectory_type = "project"\n[tool.dg.project]\nroot_module = "yaml_project"\n'
    )
    (package / "__init__.py").write_text("")
    (package / "training.py").write_text(
        dedent("""
        import os

        import skyward_core as sky

        FACTOR = 2

        def train(number, day=""):
            if day == "sun":
                raise sky.Skip("closed")
            return f"{day}{FACTOR * number}"
        """)
    )
    monkeypatch.syspath_prepend(str(tmp_path))
    yield tmp_path
    for name in [name for name in sys.modules if name.partition(".")[0] == "yaml_project"]:
        del sys.modules[name]


def write(project: Path, name: str, text: str) -> Path:
    folder = project / "yaml_project" / "defs" / name
    folder.mkdir()
    (folder / "defs.yaml").write_text(dedent(text))
    return folder


def loaded(project: Path) -> Any:
    return dg.load_from_defs_folder(path_within_project=project)


def test_a_resource_has_the_alternatives_of_its_pool() -> None:
    """In its configuration as plain data."""
    either = ["H100", sky.Alternative("A100", "local")]
    spec = sky.PoolSpec.of(provider="local", accelerator=either, max_hourly_cost=9, display="quiet")
    resource = SkywardResource(provider="local", accelerator=either, max_hourly_cost=9)
    assert resource.spec == SkywardResource(**spec.model_dump(mode="json", exclude_unset=True)).spec == spec


def test_dg_finds_the_component_and_shows_its_fields() -> None:
    assert dict(get_package_objects_in_module(dagster_skyward)) == {"SkywardComponent": SkywardComponent}
    fields = SkywardComponent.model().model_json_schema()["properties"]
    assert {name for name, field in fields.items() if "description" not in field} == {"asset"}  # it has its own fields
    assert sky.PoolSpec.model_fields["nodes"].description in fields["nodes"]["description"]


def test_dg_scaffolds_an_asset_that_is_whole(project: Path) -> None:
    """The files that `dg scaffold defs` writes load as they are."""
    folder = project / "yaml_project" / "defs" / "model"
    scaffold_object(folder, "dagster_skyward.SkywardComponent", None, "yaml", project)
    assert loaded(project).resolve_asset_graph().get_all_asset_keys() == {dg.AssetKey("model")}
    assert "open_dagster_pipes" in (folder / "on_node.py").read_text()


def test_the_project_to_start_from_loads_in_a_project_of_dg(project: Path) -> None:
    """flows/dagster_definitions.py, in the folder of definitions."""
    source = Path(__file__).parents[3] / "flows" / "dagster_definitions.py"
    (project / "yaml_project" / "defs" / "digits.py").write_bytes(source.read_bytes())
    defs = loaded(project)
    graph = defs.resolve_asset_graph()
    assert {key.to_user_string() for key in graph.get_all_asset_keys()} == {
        "digits_candidates",
        "digits_model",
        "digits_by_half",
    }
    assert graph.get(dg.AssetKey("digits_by_half")).is_partitioned
    assert [key.name for key in graph.asset_check_keys] == ["skyward_cost"]
    repository = defs.get_repository_def()
    assert {schedule.job_name for schedule in repository.schedule_defs} == {"digits", "skyward_sweep"}
    assert "skyward_report_costs" in {sensor.name for sensor in repository.sensor_defs}


@pytest.mark.parametrize(
    ("attributes", "message"),
    [
        ("{asset: {key: a}}", "either `function` or `script`"),
        ("{asset: {key: a}, function: 'yaml_project.training:train', script: x.py}", "either `function` or `script`"),
        ("{asset: {key: a}, function: yaml_project.training}", '"package.module:name"'),
        ("{asset: {key: a}, function: 'yaml_project.training:fit'}", "cannot be imported"),
        ("{asset: {key: a}, script: missing.py}", "there is no file"),
        ("{asset: {key: a}, script: missing.py, kwargs: {a: 1}}", "a script has args"),
        ("{asset: {key: a}, function: 'yaml_project.training:train', accelerator: H1000}", "H1000"),
        ("{asset: {key: a}, function: 'yaml_project.training:train', nodes: 2, compute: {nodes: 1}}", "write it once"),
        ("{asset: {key: a}, function: 'yaml_project.training:train', resource: c, nodes: many}", "nodes"),
        (
            "{asset: {key: a}, function: 'yaml_project.training:train', resource: c, compute: {sharing: run}}",
            "where `resource` is defined",
        ),
    ],
)
def test_what_cannot_be_is_refused_when_the_project_is_loaded(project: Path, attributes: str, message: str) -> None:
    """The error says what to write, before anything is rented."""
    write(project, "a", f"type: dagster_skyward.SkywardComponent\nattributes: {attributes}\n")
    with pytest.raises(Exception) as caught:
        loaded(project)
    texts, error = [], caught.value
    while error is not None:
        texts.append(str(error))
        error = error.__cause__ or error.__context__
    assert message in "\n".join(texts)


# ── the check of the cost; metadata are written by hand ──────────────────────────────────────────────────────────────


def evaluated(costs: dict[str, float] | None, others: list[dict[str, Any]], max_usd: float, **options: Any) -> Any:
    """Materialize an asset with these amounts (None: not at all), then run its check; return its evaluation."""

    @dg.asset
    def model(context: dg.AssetExecutionContext) -> dg.MaterializeResult:
        for other in others:
            context.log_event(dg.AssetObservation(**{"asset_key": "model"} | other))
        return dg.MaterializeResult(metadata=costs)

    check = build_cost_check(model, max_usd, **options)
    with dg.DagsterInstance.ephemeral() as instance:
        if costs is not None:
            dg.materialize([model], instance=instance)
        result = dg.materialize(
            [model, check], selection=dg.AssetSelection.checks(check), instance=instance, raise_on_error=False
        )
    (evaluation,) = result.get_asset_check_evaluations()
    return evaluation


@pytest.mark.parametrize(("max_usd", "passed"), [(3.0, True), (2.9, False)])
def test_the_cost_of_a_materialization_and_the_rest_of_its_run_are_compared(max_usd: float, passed: bool) -> None:
    """Observations of the asset count with the materialization; those of other assets and other keys do not."""
    others = [
        {"metadata": {OTHER_COST_USD: 0.5}},
        {"metadata": {OTHER_COST_USD: 0.5}},
        {"metadata": {"skyward/seconds": 70.0}},
        {"asset_key": "other", "metadata": {OTHER_COST_USD: 70.0}},
        {"metadata": {OTHER_COST_USD: 70.0}, "partition": "another"},
    ]
    evaluation = evaluated({COST_USD: 2.0}, others, max_usd, severity=dg.AssetCheckSeverity.ERROR)
    assert evaluation.passed is passed
    assert evaluation.severity is dg.AssetCheckSeverity.ERROR
    assert evaluation.description == f"3.000000 USD of {max_usd:g} USD"
    assert (evaluation.metadata[COST_USD].value, evaluation.metadata[OTHER_COST_USD].value) == (2.0, 1.0)


def test_without_a_cost_the_check_warns_and_says_why() -> None:
    """A cost that is not known is not taken for a low one."""
    evaluation = evaluated({}, [], 1.0, severity=dg.AssetCheckSeverity.ERROR, name="cheap")
    assert evaluation.check_name == "cheap"
    assert not evaluation.passed
    assert evaluation.severity is dg.AssetCheckSeverity.WARN
    assert "no skyward/cost_usd" in evaluation.description
    evaluation = evaluated(None, [], 1.0)
    assert "no materialization" in evaluation.description


@pytest.mark.parametrize("max_usd", [0, -1.0, float("nan")])
def test_a_limit_that_is_no_amount_is_refused(max_usd: float) -> None:
    """The error says what to write."""
    with pytest.raises(sky.BadRequest, match="above 0"):
        build_cost_check("model", max_usd)


# ── what a run would cost ────────────────────────────────────────────────────────────────────────────────────────────


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
def quoted(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("dagster")
    (folder / "neighbour.py").write_text('LOCAL = {"name": "local", "price_per_hour": 2.0}\n')
    (folder / "quoted_project.py").write_text(PROJECT)
    return folder / "quoted_project.py"


@pytest.mark.parametrize("name", ["defs", "lazy"])
def test_each_pool_of_each_job_and_asset_is_planned(quoted: Path, name: str) -> None:
    """Steps that share a pool are one task."""
    plan = planned_tasks(f"{quoted}:{name}")
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


TARGETS = ["dags", "jobs.py", "no/such.py:defs", "a b:defs", "skyward_core:sweep", ":defs", "{quoted}:something"]


@pytest.mark.parametrize("target", TARGETS)
def test_another_target_is_left_to_other_orchestrators(target: str, quoted: Path) -> None:
    """A path, a file without a name, and an object that is no definitions are not Dagster's."""
    assert planned_tasks(target.replace("{quoted}", str(quoted))) is None
