"""`SkywardComponent`: an asset whose function or script runs on a pool, written in YAML for `dg`.

Each field is declared with its description, which `dg` shows beside its type.
"""

import importlib
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Annotated, Any

import dagster as dg
from pydantic import Field, model_validator

import skyward_core as sky
from dagster_skyward.configuration import FIELDS, with_references
from dagster_skyward.lifecycle import CONFIG_TAG
from dagster_skyward.pipes import PipesSkywardClient
from dagster_skyward.resource import OWN_FIELDS, SkywardResource

SHORT_FIELDS = ("provider", "accelerator", "nodes", "spot", "max_cost", "max_hourly_cost", "budget")
"""Fields of a pool that are fields of the component too."""


def _field(description: str, *examples: Any) -> dg.Resolver:
    return dg.Resolver.default(description=description, examples=list(examples) or None)


def _of_pool(name: str, *examples: Any) -> dg.Resolver:
    return _field(FIELDS[name][1].description, *examples)


SCRIPT = '''"""Runs on a node of the pool. What it prints is in the step's log."""

from dagster_pipes import open_dagster_pipes

with open_dagster_pipes() as pipes:
    pipes.log.info(f"{pipes.asset_key} is made here")
    pipes.report_asset_materialization(metadata={"rows": 1})
'''


class _Scaffolder(dg.Scaffolder):
    """What `dg scaffold defs dagster_skyward.SkywardComponent NAME` writes: an asset that can be materialized."""

    def scaffold(self, request: dg.ScaffoldRequest[Any]) -> None:
        folder = request.target_path.parent if request.append else request.target_path
        script = folder / "on_node.py"
        dg.scaffold_component(request, {"asset": {"key": folder.name}, "script": script.name, "nodes": 1})
        if request.scaffold_format == "yaml" and not script.exists():
            script.write_text(SCRIPT)


@dg.scaffold_with(_Scaffolder)
class SkywardComponent(dg.Component, dg.Model, dg.Resolvable):
    """An asset that is made on an ephemeral accelerator pool, by a function or by a script."""

    asset: dg.ResolvedAssetSpec
    function: Annotated[
        str | None,
        _field(
            'The function that runs on a node, as "package.module:name". What it returns is the asset\'s value.',
            "my_project.training:train",
        ),
    ] = None
    script: Annotated[
        str | None,
        _field(
            "A Python file that runs on a node instead, beside this YAML file. It may use Dagster Pipes.", "train.py"
        ),
    ] = None
    args: Annotated[list[Any], _field("Arguments of the function or the script.")] = Field(default_factory=list[Any])
    kwargs: Annotated[dict[str, Any], _field("Keyword arguments of the function.", {"learning_rate": 0.001})] = Field(
        default_factory=dict[str, Any]
    )
    partition: Annotated[
        str | None,
        _field(
            "Name of the function's keyword, or of the script's environment variable, that gets the partition's key.",
            "day",
        ),
    ] = None
    provider: Annotated[Any, _of_pool("provider", "aws")] = None
    accelerator: Annotated[Any, _of_pool("accelerator", "A100")] = None
    nodes: Annotated[Any, _of_pool("nodes", 2)] = None
    spot: Annotated[Any, _of_pool("spot", "if-available")] = None
    max_cost: Annotated[float | None, _of_pool("max_cost", 5.0)] = None
    max_hourly_cost: Annotated[float | None, _of_pool("max_hourly_cost", 12.0)] = None
    budget: Annotated[str | None, _of_pool("budget", "team")] = None
    compute: Annotated[
        dict[str, Any],
        _field(
            "Other settings of the pool (image, env, secrets, timeout, name, ...) and of its resource (sharing,"
            " lifecycle).",
            {"image": {"pip": ["torch"]}, "sharing": "run"},
        ),
    ] = Field(default_factory=dict[str, Any])
    resource: Annotated[
        str | None,
        _field(
            "Key of a SkywardResource of the project that the asset uses, with these settings for its step. Without"
            " it, the asset has its own resource.",
            "compute",
        ),
    ] = None
    op_tags: Annotated[dict[str, Any], _field("Tags of the step.")] = Field(default_factory=dict[str, Any])

    @model_validator(mode="after")
    def _has_one_payload(self) -> "SkywardComponent":
        if (self.function is None) == (self.script is None):
            raise ValueError("write either `function` or `script`")
        if self.function is not None and not all(self.function.partition(":")):
            raise ValueError(f'function: {self.function!r} is no function: write "package.module:name"')
        if self.script is not None and self.kwargs:
            raise ValueError("kwargs are for a function: a script has args")
        return self

    def build_defs(self, context: dg.ComponentLoadContext) -> dg.Definitions:
        """Return the asset, and its own resource unless it uses one of the project."""
        spec, settings = self.asset, self._settings()
        own_key = "skyward_" + "__".join(spec.key.path)
        key = self.resource or own_key
        tags = dict(self.op_tags)
        if self.resource is not None and settings:
            tags[CONFIG_TAG] = _for_step(settings)
        payload = self._payload(context)

        @dg.multi_asset(name=own_key, required_resource_keys={key}, op_tags=tags, **self._outputs())
        def on_pool(context: dg.AssetExecutionContext) -> Iterator[dg.MaterializeResult[Any]]:
            yield from payload(context, getattr(context.resources, key))

        own = {} if self.resource is not None else {own_key: SkywardResource(**settings)}
        return dg.Definitions(assets=[on_pool], resources=own)

    def _settings(self) -> dict[str, Any]:
        """Return the keywords of the pool. Raises BadRequest for a field that is written twice."""
        short = {name: value for name in SHORT_FIELDS if (value := getattr(self, name)) is not None}
        if twice := sorted(set(short) & set(self.compute)):
            raise sky.BadRequest(f"{', '.join(twice)}: write it once, outside of `compute`")
        return {**short, **self.compute}

    def _outputs(self) -> dict[str, Any]:
        """Return the keywords for what the step makes: a spec alone makes an asset without a value."""
        spec = self.asset
        if self.script is not None:
            return {"specs": [spec]}
        out = dg.AssetOut.from_spec(spec.replace_attributes(deps=[]), is_required=False)
        return {"outs": {"result": out}, "deps": list(spec.deps), "partitions_def": spec.partitions_def}

    def _payload(self, context: dg.ComponentLoadContext) -> "Payload":
        if self.script is not None:
            return _script(context.path / self.script, self.args, self.partition)
        assert self.function is not None
        return _function(function_of(self.function), self.args, self.kwargs, self.partition)


def _for_step(settings: Mapping[str, Any]) -> Mapping[str, Any]:
    """Return the settings as those of a step of another resource. Raises BadRequest."""
    if own := sorted(set(OWN_FIELDS) & set(settings)):
        raise sky.BadRequest(f"compute: {', '.join(own)}: write it where `resource` is defined")
    sky.PoolSpec.of(**with_references(settings)).refuse_what_cannot_be()
    return settings


type Payload = Callable[[dg.AssetExecutionContext, SkywardResource], Iterator[dg.MaterializeResult[Any]]]


def function_of(reference: str) -> Callable[..., Any]:
    """Return the function that "package.module:name" names. Raises BadRequest if there is none."""
    module, _, name = reference.partition(":")
    try:
        found = getattr(importlib.import_module(module), name)
    except (ImportError, AttributeError) as error:
        raise sky.BadRequest(
            f'function: {reference!r} cannot be imported ({error}): write "package.module:name", and install the'
            " project"
        ) from error
    if not callable(found):
        raise sky.BadRequest(f"function: {reference!r} is a {type(found).__name__} and no function")
    return found


def _function(fn: Callable[..., Any], args: list[Any], kwargs: Mapping[str, Any], partition: str | None) -> Payload:
    def run(context: dg.AssetExecutionContext, compute: SkywardResource) -> Iterator[dg.MaterializeResult[Any]]:
        of_partition = {} if partition is None else {partition: context.partition_key}
        try:
            value = compute.run(context, fn, *args, **kwargs, **of_partition).value
        except sky.Skip as skip:  # the asset is not made, and what is downstream of it is skipped
            context.log.info("skipped: %s", skip.without_advice)
            return
        yield dg.MaterializeResult() if value is None else dg.MaterializeResult(value=value)

    return run


def _script(path: Path, args: list[Any], partition: str | None) -> Payload:
    if not path.is_file():
        raise sky.BadRequest(f"script: there is no file {path}")

    def run(context: dg.AssetExecutionContext, compute: SkywardResource) -> Iterator[Any]:
        env = {} if partition is None else {partition: context.partition_key}
        pipes = PipesSkywardClient(compute=compute)
        yield from pipes.run(context=context, script=path, args=args, env=env).get_results()

    return run
