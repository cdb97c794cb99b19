"""Types of Dagster's config system for the settings of a pool that have several forms: a text, or a mapping of fields.

The launchpad then knows the fields, and refuses others. A list of alternatives, which a config type cannot have beside
a mapping, is the field `any_of`, and nodes=(1, 4) is {least: 1, most: 4}. Each of them, and each number, may be
{env: NAME}: the value of an environment variable, which `configuration` reads.
"""

from collections.abc import Iterator, Mapping, Sequence
from importlib.metadata import entry_points
from types import UnionType
from typing import Annotated, Any, Literal, Union, get_args, get_origin

import dagster as dg
from pydantic import SecretStr, SkipValidation

import skyward_core as sky

ANY_OF = "any_of"
LEAST, MOST = "least", "most"


def _optional(config_type: Any, description: str | None = None) -> dg.Field:
    return dg.Field(config_type, is_required=False, description=description)


ENV = {"env": _optional(str, "Name of an environment variable that has the value.")}
INT, FLOAT, BOOL = (dg.ScalarUnion(kind, ENV) for kind in (int, float, bool))
TEXTS = dg.ScalarUnion(str, dg.Array(dg.StringSource))
"""One text or several."""

NODES = dg.ScalarUnion(
    int,
    {
        LEAST: _optional(INT, "The number of machines with which the pool opens, and to which it shrinks."),
        MOST: _optional(INT, "The most machines that it has at once."),
        **ENV,
    },
)

_ACCELERATOR = {
    "name": _optional(dg.StringSource, "The chip, in its vendor's words: A100, H100, Trainium2."),
    "count": _optional(INT, "How many of them one machine has."),
    "memory_gb": _optional(INT, "The memory of each, in GB."),
    "mig": _optional(dg.Array(str), "The partitions of each: 3g.40gb."),
    "form_factor": _optional(dg.StringSource, "SXM or PCIe, for example."),
}
ACCELERATOR = dg.ScalarUnion(
    str,
    {
        **_ACCELERATOR,
        **ENV,
        ANY_OF: _optional(
            dg.Array(
                dg.ScalarUnion(
                    str,
                    {
                        **_ACCELERATOR,
                        "accelerator": _optional(
                            dg.ScalarUnion(str, _ACCELERATOR), "The accelerator, beside a provider."
                        ),
                        "provider": _optional(dg.StringSource, "The one of the pool's providers that rents it."),
                    },
                )
            ),
            "Alternatives, the best first.",
        ),
    },
)


def _fields_of(model: Any) -> Iterator[tuple[str, Any, str | None]]:
    for name, field in model.model_fields.items():
        yield name, _type_of(field.annotation), field.description


def _type_of(annotation: Any) -> Any:
    """Return the config type of a field of an image or a provider; Any for one with several forms."""
    match annotation:
        case _ if get_origin(annotation) is Annotated:
            return _type_of(get_args(annotation)[0])
        case _ if get_origin(annotation) in (Union, UnionType):
            parts = [part for part in get_args(annotation) if part is not type(None)]
            return _type_of(parts[0]) if len(parts) == 1 else dg.Any
        case _ if get_origin(annotation) is Literal or annotation in (str, SecretStr):
            return dg.StringSource
        case _ if annotation in (int, float, bool):
            return {int: INT, float: FLOAT, bool: BOOL}[annotation]
        case _ if get_origin(annotation) in (tuple, Sequence) and get_args(annotation)[0] is str:
            return TEXTS
        case _ if get_origin(annotation) is dict and get_args(annotation)[1] is str:
            return dg.Map(str, dg.StringSource)
        case _:
            return dg.Any


def _provider_fields() -> dict[str, dg.Field]:
    """Return the fields of all providers, also of other distributions: the config system cannot choose them by the
    name.
    """
    classes = [getattr(sky, name) for name in sky.PROVIDERS]
    for entry in entry_points(group="skyward.providers"):
        try:
            classes.append(entry.load())
        except Exception:  # noqa: S112 - a pool that names it says what is wrong
            continue
    types: dict[str, set[Any]] = {}
    words: dict[str, str | None] = {}
    for one in classes:
        for name, its_type, description in _fields_of(one):
            types.setdefault(name, set()).add(its_type)
            words[name] = words.get(name) or description
    return {
        name: _optional(next(iter(its)) if len(its) == 1 else dg.Any, words[name])
        for name, its in sorted(types.items())
    }


_PROVIDER = {"name": _optional(dg.StringSource, "aws, local, hosts, ..."), **_provider_fields()}
PROVIDER = dg.ScalarUnion(
    str, {**_PROVIDER, **ENV, ANY_OF: _optional(dg.Array(dg.ScalarUnion(str, _PROVIDER)), "Several to choose from.")}
)
IMAGE = dg.Shape({name: _optional(kind, words) for name, kind, words in _fields_of(sky.Image)})


def _of_field(config_type: Any) -> Any:
    """Return the type of a pydantic field with this type in Dagster's config: pydantic takes its value as it is."""
    return Annotated[config_type, SkipValidation()]  # pyright: ignore[reportCallIssue] - it is a class


BY_NAME: Mapping[str, Any] = {
    name: _of_field(its)
    for name, its in {"accelerator": ACCELERATOR, "nodes": NODES, "provider": PROVIDER, "image": IMAGE}.items()
}
"""The types of settings that have several forms."""
SCALARS: Mapping[Any, Any] = {str: str, int: _of_field(INT), float: _of_field(FLOAT), bool: _of_field(BOOL)}
"""The types of the others."""


def as_config(name: str, value: Any) -> Any:
    """Return the plain value of a setting in the form that its config type has: what is None is not given."""
    if name not in BY_NAME:
        return value
    if name in ("accelerator", "provider") and isinstance(value, list | tuple):
        return {ANY_OF: _without_none(list(value))}  # pyright: ignore[reportUnknownArgumentType]
    if name == "nodes" and isinstance(value, list | tuple) and len(value) == 2:  # pyright: ignore[reportUnknownArgumentType]
        return {LEAST: value[0], MOST: value[1]}
    return _without_none(value)


def _without_none(value: Any) -> Any:
    match value:
        case Mapping():
            return {key: _without_none(item) for key, item in value.items() if item is not None}  # pyright: ignore[reportUnknownVariableType]
        case list() | tuple():
            return [_without_none(item) for item in value]  # pyright: ignore[reportUnknownVariableType]
        case _:
            return value


def as_setting(name: str, value: Any) -> Any:
    """Return a value of the config in the form that `PoolSpec` reads."""
    match value:
        case {"any_of": alternatives, **others} if not others and name in ("accelerator", "provider"):
            return alternatives
        case {"least": int() | str() as least, "most": int() | str() as most, **others} if (
            not others and name == "nodes"
        ):
            return int(least), int(most)
        case _:
            return value
