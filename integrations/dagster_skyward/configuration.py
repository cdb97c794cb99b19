"""The keywords of a pool as fields of Dagster's config system: plain data, checked, with references to the environment.

Dagster stores and shows a resource's configuration, so that values of secrets are refused.
"""

import os
from collections.abc import Mapping
from types import UnionType
from typing import Annotated, Any, Literal, Optional, TypeAliasType, Union, cast, get_args, get_origin

import dagster as dg
from pydantic import Field
from pydantic_core import PydanticUndefined

import skyward_core as sky
from dagster_skyward.config_types import BY_NAME, SCALARS, as_config, as_setting

ENVIRONMENT = (dg.EnvVar, type(dg.EnvVar.int("NAME")))
"""Classes of values that Dagster reads from the environment when a run starts."""

OF_VARIABLES = ("env", "image.env")
"""Fields that map names of variables to values: `{"env": "prod"}` is a variable called env there, and no `EnvVar`.
Their values may be `EnvVar`s.
"""

RUN_ID = "{run_id}"
"""In a name, an account or a value of `env`: the id of the run, which is known in a run only."""
WITH_RUN_ID = ("name", "budget", "env")

OF_MAPPINGS = {
    "image": 'image={"env": {"PIP_INDEX_URL": dg.EnvVar("INDEX")}}',
    "env": 'env={"STAGE": dg.EnvVar("STAGE")}',
}
"""Fields that no variable can hold whole, with what to write instead."""

OWN_DEFAULTS = {"display": "quiet"}
"""Defaults that differ from the core's: the step's log has the output of a display."""


def _plain_type(annotation: Any) -> Any:
    """Return the type by which Dagster's config system describes a field of `PoolSpec`: a scalar, a mapping, or any
    plain data.
    """
    match annotation:
        case TypeAliasType():
            return _plain_type(annotation.__value__)
        case _ if get_origin(annotation) is Annotated:
            return Any  # read and written by its own functions: a name, a number, a mapping
        case _ if get_origin(annotation) in (Union, UnionType):
            return _plain_type(next(part for part in get_args(annotation) if part is not type(None)))
        case _ if get_origin(annotation) is Literal:
            return str
        case _ if get_origin(annotation) is Mapping:
            return dict[str, str]
        case _ if annotation in SCALARS:
            return SCALARS[annotation]
        case _:
            return Any


def config_fields() -> dict[str, Any]:
    """A config field for each field of `PoolSpec`.

    Each may be omitted: then the settings decide, and after them the default in the description.
    """
    fields: dict[str, Any] = {}
    for name, field in sky.PoolSpec.model_fields.items():
        own = OWN_DEFAULTS.get(name)
        default = "" if own or field.default in {None, PydanticUndefined, ()} else f" Default: {field.default!r}."
        fields[name] = (
            Optional[BY_NAME.get(name) or _plain_type(field.annotation)],  # noqa: UP045 - the type is known at run time only
            Field(default=own, description=f"{field.description}{default}"),
        )
    return fields


FIELDS = config_fields()


def plain(keywords: Mapping[str, Any]) -> dict[str, Any]:
    """Return the keywords as plain data, checked as far as they are known.

    None means not given, as in Dagster's config. Raises BadRequest.
    """
    said = with_references({name: value for name, value in keywords.items() if value is not None})
    refuse_plain_secrets(said)
    later = {name: value for name, value in said.items() if name in FIELDS and _is_known_later(value, name)}
    for name, value in later.items():
        _refuse_unreadable(name, value)
    spec = sky.PoolSpec.of(**{name: as_setting(name, value) for name, value in said.items() if name not in later})
    refuse_credentials(spec)
    spec.refuse_what_cannot_be()
    if "name" not in later:
        spec.refuse_keep_warm_without_a_name()
    plain = spec.model_dump(mode="json", exclude_unset=True) | later
    image = plain.get("image")
    if isinstance(image, Mapping) and set(cast("Mapping[str, Any]", image)) == {"env"}:
        # if the only key of a mapping in a default is "env", Dagster takes it for an EnvVar, and fails on its value
        plain["image"] = {**image, "pip": []}
    return {name: as_config(name, value) for name, value in plain.items()}


def refuse_credentials(spec: sky.PoolSpec) -> None:
    """Raise BadRequest for credentials on a provider: a resource's configuration, and a tag, are plain data."""
    spec.refuse_written_credentials(
        "Dagster's configuration, which it stores and shows",
        'write credentials={kind}Credentials({field}=dg.EnvVar("NAME"), ...), a class of dagster_skyward, or leave'
        " them to the environment of the process that runs the step",
    )


def with_references(said: Mapping[str, Any]) -> dict[str, Any]:
    """Return the keywords with each `EnvVar` among `secrets` replaced by the name of its variable.

    Raises BadRequest.
    """
    secrets = said.get("secrets")
    if isinstance(secrets, Mapping):
        secrets = {name: _reference(one) for name, one in cast("Mapping[str, Any]", secrets).items()}
    elif isinstance(secrets, (list, tuple)):
        secrets = [one.env_var_name if isinstance(one, dg.EnvVar) else one for one in cast("list[Any]", secrets)]
    return {**said, "secrets": secrets} if secrets is not None else dict(said)


def _reference(one: Any) -> Any:
    match one:
        case dg.EnvVar():
            return sky.Secret.from_env(one.env_var_name)
        case {"env": str() as variable, **others} if not others:
            return sky.Secret.from_env(variable)
        case sky.Secret(source="store") | {"source": "store"}:
            raise sky.BadRequest('secrets: Dagster has no store for secrets: write secrets={"NAME": dg.EnvVar("NAME")}')
        case _:
            return one


def refuse_plain_secrets(said: Mapping[str, Any]) -> None:
    """Raise BadRequest for a probable secret in plain text: Dagster writes a resource's configuration, and the tags of
    ops, to its database, and shows them.
    """
    image = said.get("image")
    for env in (
        said.get("env"),
        image.env if isinstance(image, sky.Image) else image.get("env") if isinstance(image, Mapping) else None,
    ):
        if isinstance(env, Mapping):
            plain = {
                name: value
                for name, value in cast("Mapping[str, Any]", env).items()
                if isinstance(value, str) and not isinstance(value, dg.EnvVar)
            }
            if found := sky.PoolSpec.of(env=plain).plain_secrets:
                raise sky.BadRequest(
                    f"env holds {', '.join(found)} in plain text, which Dagster writes to its database and shows:"
                    " write "
                    f'secrets={{"{found[0]}": dg.EnvVar("{found[0]}")}}, or env={{"{found[0]}":'
                    f' dg.EnvVar("{found[0]}")}} for what installing packages needs'
                )


def _is_known_later(value: object, name: str) -> bool:
    """Whether a value depends on the environment or on the run."""
    return _is_from_environment(value, name) or (name in WITH_RUN_ID and RUN_ID in _texts(value))


def _texts(value: object) -> str:
    return (
        " ".join(map(str, cast("Mapping[str, object]", value).values())) if isinstance(value, Mapping) else str(value)
    )


def _is_from_environment(value: object, place: str) -> bool:
    """Whether a value is, or holds, an `EnvVar`, also in its form in config: {"env": "NAME"}."""
    match value:
        case _ if isinstance(value, ENVIRONMENT):
            return True
        case {"env": str(), **others} if not others and place not in OF_VARIABLES:
            return True
        case Mapping():
            return any(_is_from_environment(item, f"{place}.{key}") for key, item in value.items())
        case list() | tuple():
            return any(_is_from_environment(item, place) for item in value)
        case _:
            return False


def _refuse_unreadable(name: str, value: object) -> None:
    """Raise BadRequest for an environment variable in the place of a mapping."""
    if isinstance(value, dg.EnvVar) and name in OF_MAPPINGS:
        raise sky.BadRequest(
            f'{name}=dg.EnvVar("{value.env_var_name}"): a variable holds one text, and {name} is a mapping: write'
            f" EnvVar for its values, {OF_MAPPINGS[name]}"
        )


def spec_of(values: Mapping[str, Any], run_id: str | None = None) -> sky.PoolSpec:
    """Return the values of fields as a `PoolSpec`, environment variables and the run's id filled in; None means not
    given.

    Raises BadRequest if a variable is not set, and for {run_id} without a run.
    """
    said = with_references(values)
    provider = said.get("provider")  # also what was typed into the launchpad
    if provider is not None and not _is_from_environment(provider, "provider"):
        refuse_credentials(sky.PoolSpec.of(provider=as_setting("provider", provider)))
    filled = {name: as_setting(name, filled_in(value, name)) for name, value in said.items() if value is not None}
    return sky.PoolSpec.of(
        **filled | {name: _of_run(filled[name], name, run_id) for name in WITH_RUN_ID if name in filled}
    )


def _of_run(value: Any, name: str, run_id: str | None) -> Any:
    if isinstance(value, Mapping):
        return {key: _of_run(item, f"{name}.{key}", run_id) for key, item in cast("Mapping[str, Any]", value).items()}
    if not isinstance(value, str) or RUN_ID not in value:
        return value
    if run_id is None:
        raise sky.BadRequest(f"{name}={value!r}: {RUN_ID} is known in a run only; write a text without it")
    return value.replace(RUN_ID, run_id)


def filled_in(value: Any, name: str) -> Any:
    """Return the value with the environment variables that it refers to filled in.

    Dagster has filled in text and whole numbers, but not inside plain data.
    """
    match value:
        case {"env": str() as variable, **others} if not others and name not in OF_VARIABLES:
            return _from_environment(variable, name)
        case _ if isinstance(value, ENVIRONMENT):  # outside of a run Dagster has filled in nothing
            return _from_environment(getattr(value, "env_var_name", None) or getattr(value, "name", ""), name)
        case Mapping():
            return {key: filled_in(item, f"{name}.{key}") for key, item in value.items()}
        case list() | tuple():
            return [filled_in(item, name) for item in value]
        case _:
            return value


def _from_environment(variable: str, name: str) -> str:
    if (value := os.environ.get(variable)) is None:
        raise sky.BadRequest(
            f"{name}: the environment variable {variable} is not set in the process that runs the step"
        )
    return value
