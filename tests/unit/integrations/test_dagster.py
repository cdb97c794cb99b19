"""Dagster without pools: assets in YAML, the check of the cost, and what a run would cost."""

import functools
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from textwrap import dedent
from types import SimpleNamespace
from typing import Any

import pytest

dg = pytest.importorskip("dagster")

from dagster._config import validate_config  # noqa: E402
from dagster.components.component_scaffolding import scaffold_object  # noqa: E402
from dagster.components.core.package_entry import get_package_objects_in_module  # noqa: E402

import dagster_skyward  # noqa: E402
import skyward_core as sky  # noqa: E402
from dagster_skyward import (  # noqa: E402
    PipesSkywardClient,
    SkywardComponent,
    SkywardResource,
    build_cost_check,
    step,
    step_pools,
)
from dagster_skyward.lifecycle import CONFIG_TAG, divided_keywords, spec_of_step  # noqa: E402
from dagster_skyward.metadata import (  # noqa: E402
    COST_USD,
    NODES,
    OTHER_COST_USD,
    QUEUE_SECONDS,
    SECONDS,
    tags_of,
)
from dagster_skyward.quotes import planned_tasks  # noqa: E402
from dagster_skyward.run_plan import strangers  # noqa: E402
from dagster_skyward.run_steps import note_pool, steps_to_come  # noqa: E402
from dagster_skyward.step import StepTime  # noqa: E402
from dagster_skyward.step_pools import StepPools  # noqa: E402

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


# ── whose a pool is ──────────────────────────────────────────────────────────────────────────────────────────────────


def looked_at(look: Callable[[Any, SkywardResource], object], **options: Any) -> dict[str, Any]:
    """Materialize five assets, and return what a function has found in each: `one`, `two` and `piped` have the same
    settings, `big` has others by its tag, `plain` has no pool. No pool is opened.
    """
    found: dict[str, Any] = {}

    def seen(name: str, **more: Any) -> Any:
        @dg.asset(name=name, **more)
        def made(context: dg.AssetExecutionContext, compute: SkywardResource) -> None:
            found[name] = look(context, compute)

        return made

    @dg.asset
    def piped(context: dg.AssetExecutionContext, pipes: PipesSkywardClient) -> None:
        found["piped"] = look(context, pipes.compute)

    @dg.asset
    def plain() -> None: ...

    assets = [seen("one"), seen("two"), seen("big", op_tags={CONFIG_TAG: {"nodes": 3}}), piped, plain]
    compute = SkywardResource(provider="local", **options)
    resources = {"compute": compute, "pipes": PipesSkywardClient(compute=compute)}
    with dg.DagsterInstance.ephemeral() as instance:
        dg.materialize(assets, resources=resources, instance=instance)
    return found


def named(context: Any, compute: SkywardResource) -> str:
    """The name of the step's pool in a process of its own."""
    pools = StepPools(compute._terms(), None, context.instance, context.run)
    name = pools._spec_for(context, {}).name
    return "none" if name is None else "a run's" if name.startswith(f"dagster/{context.run.run_id}/") else name


def test_the_steps_that_may_use_a_pool_are_known_from_their_settings() -> None:
    """So a pool ends after the last step that needs it, while steps with other hardware go on."""

    def others(context: Any, compute: SkywardResource) -> set[str]:
        return set(strangers(context, spec_of_step(compute.spec, tags_of(context))))

    same, big = {"big", "plain"}, {"one", "two", "piped", "plain"}
    assert looked_at(others) == {"one": same, "two": same, "piped": same, "big": big}
    assert looked_at(lambda context, _: set(strangers(context)))["one"] == {"plain"}


@pytest.mark.parametrize(
    ("is_alone", "options", "of_same", "of_big"),
    [
        (True, {}, "a run's", "none"),
        (False, {}, "none", "none"),
        (True, {"sharing": "step"}, "none", "none"),
        (False, {"sharing": "run"}, "a run's", "a run's"),
        (True, {"sharing": "team-gpu"}, "team-gpu", "none"),
    ],
    ids=["several processes", "one process", "each its own", "all of the run", "a name"],
)
def test_steps_in_processes_of_their_own_share_a_pool_if_several_need_it(
    is_alone: bool, options: dict[str, Any], of_same: str, of_big: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Unless `sharing` says otherwise."""
    monkeypatch.setattr(step_pools, "is_alone", lambda _: is_alone)
    assert looked_at(named, **options) == {"one": of_same, "two": of_same, "piped": of_same, "big": of_big}


@pytest.mark.parametrize("has_pools", [True, False])
def test_a_re_execution_goes_on_with_the_pools_of_its_parent(has_pools: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """Also if only one step is executed again. Without pools it has its own."""
    monkeypatch.setattr(step_pools, "is_alone", lambda _: True)
    found: list[Any] = []
    parent: list[str] = []

    @dg.asset
    def one(context: dg.AssetExecutionContext, compute: SkywardResource) -> None:
        run = context.run
        if parent:
            run = run._replace(parent_run_id=parent[0], root_run_id=parent[0])
        found.append(StepPools(compute._terms(), None, context.instance, run)._spec_for(context, {}).name)

    with dg.DagsterInstance.ephemeral() as instance:
        for _ in range(2):
            result = dg.materialize([one], resources={"compute": SkywardResource(provider="local")}, instance=instance)
            parent.append(result.run_id)
            if has_pools:
                note_pool(instance, result.run_id, "settings", "sky-1", keeps=True)
    assert found[0] is None
    assert (found[1] or "").startswith(f"dagster/{parent[0]}/") is has_pools


def test_the_steps_to_come_are_known_at_any_time() -> None:
    """Of a mapped output each item counts, as soon as there are items; after a failure all that is downstream is over,
    whatever the names: a plan is in the order of names.
    """
    seen: dict[str, set[str]] = {}

    def look(context: Any) -> None:
        key = context.get_step_execution_context().step.key
        seen[key] = steps_to_come(context.instance, context.run.run_id)

    @dg.op(out=dg.DynamicOut())
    def many(context: dg.OpExecutionContext) -> Any:
        look(context)
        for key in "xy":
            yield dg.DynamicOutput(key, mapping_key=key)

    @dg.op
    def each(context: dg.OpExecutionContext, x: str) -> str:
        look(context)
        return x

    @dg.op
    def all_of(context: dg.OpExecutionContext, given: list[str]) -> None:
        look(context)
        raise LookupError

    @dg.op
    def b_last(given: Any) -> Any: ...

    @dg.op
    def a_last(given: Any) -> Any: ...

    @dg.job
    def job() -> None:
        a_last(b_last(all_of(many().map(each).collect())))

    with dg.DagsterInstance.ephemeral() as instance:
        result = job.execute_in_process(instance=instance, raise_on_error=False)
        seen["end"] = steps_to_come(instance, result.run_id)
    after = {"all_of", "a_last", "b_last"}
    assert seen == {
        "many": {"many", "each[?]", *after},
        "each[x]": {"each[x]", "each[y]", *after},
        "each[y]": {"each[y]", *after},
        "all_of": after,
        "end": set(),
    }


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"sharing": "job"}, "'step', 'run', 'backfill', 'deployment', or the name of a pool"),
        ({"sharing": "rn"}, "'step', 'run'"),
        ({"sharing": "Step"}, "'step', 'run'"),
        ({"sharing": "team", "name": "team"}, "leave out one of the two"),
        ({"image": dg.EnvVar("IMAGE")}, "a variable holds one text, and image is a mapping"),
        ({"env": dg.EnvVar("VARIABLES")}, 'env={"STAGE": dg.EnvVar("STAGE")}'),
    ],
)
def test_a_resource_that_cannot_be_is_refused_in_words(options: dict[str, Any], message: str) -> None:
    with pytest.raises(sky.BadRequest) as caught:
        SkywardResource(**options)
    assert message in str(caught.value)


@pytest.mark.parametrize(
    ("written", "keywords"),
    [
        ({"accelerator": "2xA100"}, {"accelerator": "2xA100"}),
        ({"accelerator": {"name": "A100", "memory_gb": 40, "count": 2}}, {"accelerator": "2xA100-40GB"}),
        (
            {"accelerator": {"any_of": ["H100", {"accelerator": "A100", "provider": "local"}]}, "max_hourly_cost": 9},
            {"accelerator": ["H100", sky.Alternative("A100", "local")], "max_hourly_cost": 9},
        ),
        ({"nodes": 2}, {"nodes": 2}),
        ({"nodes": {"least": 1, "most": {"env": "TEST_MOST"}}}, {"nodes": (1, 4)}),
        ({"provider": {"name": "local", "price_per_hour": 3}}, {"provider": sky.Local(price_per_hour=3)}),
        ({"provider": {"any_of": ["local", {"name": "aws", "region": "eu-west-1"}]}}, {"provider": [sky.Local(), sky.AWS(region="eu-west-1")]}),
        ({"image": {"pip": ["torch"], "env": {"A": "1"}}}, {"image": sky.Image(pip=["torch"], env={"A": "1"})}),
    ],
)  # fmt: skip
def test_a_launch_may_write_each_form_of_a_setting(
    written: dict[str, Any], keywords: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    """As the keyword that Python has for it."""
    monkeypatch.setenv("TEST_MOST", "4")
    found: list[Any] = []

    @dg.asset
    def one(context: dg.AssetExecutionContext, compute: SkywardResource) -> None:
        found.append(compute.spec)

    config = {"resources": {"compute": {"config": written}}}
    launched = {"compute": SkywardResource.configure_at_launch()}
    with dg.DagsterInstance.ephemeral() as instance:
        dg.materialize([one], resources=launched, instance=instance, run_config=config)
        dg.materialize([one], resources={"compute": SkywardResource(**keywords)}, instance=instance)
    assert found == [sky.PoolSpec.of(**keywords, display="quiet")] * 2


@pytest.mark.parametrize(
    "written",
    [
        {"accelerator": {"nam": "A100"}},
        {"accelerator": 3},
        {"nodes": {"min": 1}},
        {"nodes": "many"},
        {"provider": {"name": "local", "pric_per_hour": 3}},
        {"image": {"pipp": ["torch"]}},
        {"timeout": "long"},
    ],
)
def test_a_launch_with_an_unknown_field_or_a_wrong_type_is_refused_by_the_schema(written: dict[str, Any]) -> None:
    """As in the editor of the launchpad, before a run begins."""
    schema = SkywardResource.to_config_schema().as_field().config_type
    result = validate_config(schema, written)
    assert not result.success


def test_the_schema_has_each_field_of_images_and_providers_with_its_type() -> None:
    """None of the four settings is any value."""
    fields = SkywardResource.to_fields_dict()
    for name, inner in (("accelerator", "count"), ("nodes", "most"), ("provider", "price_per_hour"), ("image", "pip")):
        its = fields[name].config_type.inner_type
        shape = its if isinstance(its, dg.Shape) else its.non_scalar_type
        assert inner in shape.fields
    image, provider = fields["image"].config_type.inner_type.fields, fields["provider"].config_type.inner_type
    assert set(image) == set(sky.Image.model_fields)
    assert set(provider.non_scalar_type.fields) >= {*sky.AWS.model_fields, *sky.Hosts.model_fields, "name", "any_of"}


def test_a_name_may_have_the_id_of_the_run() -> None:
    """So may the account and the values of `env`. Outside of a run it is refused."""
    options = {"name": "team/{run_id}", "budget": "of-{run_id}", "env": {"RUN": "{run_id}"}}
    found = looked_at(lambda context, compute: (context.run.run_id, compute.spec), **options)["one"]
    assert (found[1].name, found[1].budget, found[1].env) == (f"team/{found[0]}", f"of-{found[0]}", {"RUN": found[0]})
    with pytest.raises(sky.BadRequest, match="known in a run only"):
        _ = SkywardResource(**options).spec
    assert SkywardResource(sharing="nightly").spec == SkywardResource(sharing="deployment", name="nightly").spec


# ── hardware for one call ────────────────────────────────────────────────────────────────────────────────────────────


def fit(data: int, nodes: int = 0) -> int:
    return data + nodes


def fit_with(data: int, **options: int) -> int:
    return data


@pytest.mark.parametrize(
    ("fn", "keywords", "of_fn", "of_pool"),
    [
        (abs, {}, {}, {}),
        (fit, {"data": 1, "accelerator": "H100"}, {"data": 1}, {"accelerator": "H100"}),
        (fit, {"nodes": 4, "cpu": 2}, {"nodes": 4}, {"cpu": 2}),
        (fit, {"learning_rate": 1}, {"learning_rate": 1}, {}),
        (fit_with, {"anything": 1}, {"anything": 1}, {}),
        (functools.partial(fit_with, nodes=4), {"data": 1}, {"data": 1}, {}),
    ],
)
def test_keywords_of_a_call_are_the_function_s_or_the_pool_s(
    fn: Any, keywords: dict[str, Any], of_fn: dict[str, Any], of_pool: dict[str, Any]
) -> None:
    """A parameter of the function is the function's, whatever its name."""
    assert divided_keywords(fn, keywords) == (of_fn, of_pool)


def test_a_keyword_that_may_be_either_s_is_refused() -> None:
    """The error says how to write both, and these are what it says."""
    with pytest.raises(sky.BadRequest) as caught:
        SkywardResource(provider="local").run(None, fit_with, 1, nodes=2)
    assert "functools.partial(fn, nodes=...)" in str(caught.value)
    assert "compute.pool(context, nodes=...)" in str(caught.value)
    with pytest.raises(sky.BadRequest, match="a call may give its pool provider, accelerator"):
        SkywardResource(provider="local").map(None, fit, [1], image={"pip": ["six"]})


def test_a_call_has_its_own_pool_only_if_it_asks_for_something_else() -> None:
    """It has no name: a name has one set of settings, and a pool of the run is for what its definitions say."""

    def specs(context: Any, compute: SkywardResource) -> list[Any]:
        pools = StepPools(compute._terms(), None, context.instance, context.run)
        return [pools._spec_for(context, settings) for settings in ({}, {"nodes": 1}, {"nodes": 2})]

    for sharing in ("run", "team"):
        same, again, other = looked_at(specs, sharing=sharing, nodes=1)["one"]
        assert same == again
        assert same.name is not None
        assert (other.name, other.keep_warm, other.nodes) == (None, 0.0, 2)


def test_a_tag_that_means_nothing_is_an_error() -> None:
    """Of an op, and of an asset, whose tags are short texts."""
    with pytest.raises(sky.BadRequest, match=r"skyward/accelerator .* op_tags=\{\"skyward/config\""):
        spec_of_step(sky.PoolSpec(), {"skyward/accelerator": "A100", "team/nodes": "2"})
    for config, words in (
        ('{"acelerator": "A100"}', "there is no 'acelerator'"),
        ('{"nodes": "many"}', "nodes='many'"),
    ):
        with pytest.raises(sky.BadRequest, match=f"the tag skyward/config: {words}"):
            spec_of_step(sky.PoolSpec(), {"skyward/config": config})

    @dg.asset(tags={"skyward/nodes": "2"})
    def tagged(context: dg.AssetExecutionContext, compute: SkywardResource) -> None:
        compute.run(context, abs, -1)

    with pytest.raises(sky.BadRequest, match="the tag skyward/nodes is ignored there"):
        dg.materialize([tagged], resources={"compute": SkywardResource(provider="local")})


# ── how long a step has worked and waited ────────────────────────────────────────────────────────────────────────────


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> list[float]:
    now = [1000.0]
    monkeypatch.setattr(step, "time", SimpleNamespace(monotonic=lambda: now[0]))
    return now


def test_waiting_is_apart_from_work(clock: list[float]) -> None:
    """Until the pool is open, and for slots that others hold, which is known two seconds late or more. What the step does
    between two uses is neither.
    """
    its = StepTime()
    clock[0] += 100
    with its.block():
        with its.opening():
            clock[0] += 30
        clock[0] += 5
        assert its.note_waiting(is_waiting=True)
        clock[0] += 2
        assert not its.note_waiting(is_waiting=True)
        assert (its.used, its.queued) == (37, 30 + 2 + 2)
        assert its.note_waiting(is_waiting=False)
        clock[0] += 10
    clock[0] += 100
    with its.block():
        clock[0] += 1
        its.note_waiting(is_waiting=True)
        clock[0] += 1
    assert (its.used, its.queued, its.since_began) == (49, 34 + 2, 249)


def test_blocks_of_several_threads_count_once(clock: list[float]) -> None:
    """The opening of a second pool is no waiting while the first one works."""
    its = StepTime()
    with its.block():
        clock[0] += 1
        with its.block(), its.opening():
            clock[0] += 2
        clock[0] += 4
    assert (its.used, its.queued) == (7, 0)


# ── tests of a project ───────────────────────────────────────────────────────────────────────────────────────────────


def test_a_sensor_and_a_schedule_may_use_a_local_resource() -> None:
    """Their contexts are those of no step, and have no metadata."""
    for decorated, built in (
        (dg.sensor(target="*"), dg.build_sensor_context),
        (dg.schedule(target="*", cron_schedule="* * * * *"), dg.build_schedule_context),
    ):

        @decorated
        def rows(context: Any, compute: SkywardResource) -> Any:
            return dg.SkipReason(f"{compute.run(context, abs, -2).value} rows")

        with built(resources={"compute": SkywardResource.local()}) as context:
            assert rows(context).skip_message == "2 rows"


async def later(number: int) -> int:
    return number + 1


def test_a_local_resource_runs_functions_in_the_process() -> None:
    """Nothing is rented. Metadata have the keys of a pool's, and the same mistakes are refused."""
    seen: list[Any] = []

    @dg.asset
    def model(context: dg.AssetExecutionContext, compute: SkywardResource) -> int:
        seen.append(compute.map(context, fit, [1, 2]))
        seen.append(compute.broadcast(context, fit, 3, accelerator="A100").value)
        with compute.pool(context, nodes=3) as pool:
            seen.append((pool.instance_count, sky.compute(fit)(4) >> pool, pool.submit(sky.compute(fit)(5)).result()))
            seen.append((sky.compute(fit)(6) & sky.compute(fit)(7)) >> pool)
            with pytest.raises(AttributeError, match=r"provider=sky\.Local\(\)"):
                pool.dask_client()
        with pytest.raises(sky.NotPicklable, match="which cannot travel to a node"):
            compute.run(context, lambda: context.log.info("no"))
        with pytest.raises(sky.BadRequest, match=r"acelerator.*did you mean 'accelerator'"):
            compute.run(context, fit, 1, acelerator="H100")  # type: ignore[call-arg]
        with pytest.raises(sky.BadRequest, match=r"missing 1 required positional argument: '\w+'$"):
            compute.run(context, fit)  # type: ignore[call-arg]
        with pytest.raises(sky.BadRequest, match=r"1 is no function: write compute\.run\(context, fn"):
            compute.run(fit, 1)  # type: ignore[arg-type]
        return compute.run(context, later, 41).value

    result = dg.materialize([model], resources={"compute": SkywardResource.local(nodes=2)})
    assert result.output_for_node("model") == 42
    assert seen == [[1, 2], (3, 3), (3, 4, 5), (6, 7)]
    (made,) = result.get_asset_materialization_events()
    assert made.materialization.metadata[COST_USD].value == 0
    assert {SECONDS, QUEUE_SECONDS, NODES} <= set(made.materialization.metadata)
    assert SkywardResource.local().run(None, fit, 1).value == 1
    with pytest.raises(sky.BadRequest, match="did you mean 'nodes'"):
        SkywardResource.local(nods=2)


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
    "shared": SkywardResource(provider=LOCAL, sharing="run", keep_warm=60),
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
    """Steps that share a pool are one task: those that need the same, unless `sharing="step"`."""
    plan = planned_tasks(f"{quoted}:{name}")
    assert plan is not None
    found = {(task.workflow, task.task): task for task in plan.tasks}
    assert set(found) == {
        ("nightly", "inner.later"),
        ("nightly", "each"),
        ("one_process", "first, second"),
        ("on_nodes", "all steps"),
        ("__ASSET_JOB", "big"),
        ("__ASSET_JOB", "one, piped, two"),
    }
    later, each, big = (found[key] for key in (("nightly", "inner.later"), ("nightly", "each"), ("__ASSET_JOB", "big")))
    assert (later.spec, later.tries, "NO_SUCH_VARIABLE is not set" in later.reason) == (None, 2, True)
    assert each.spec is not None
    assert (each.spec.nodes, each.instances) == (2, 1)  # however many there are of it
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
