"""The JSON schema of `skyward.toml`, for editors: made from `PoolSpec` and the providers, so that it says the same."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any, cast, get_type_hints

from pydantic import ConfigDict, TypeAdapter
from pydantic.json_schema import GenerateJsonSchema, models_json_schema

from skyward_core.accelerators import Accelerator
from skyward_core.config.settings import FILE, POOLS, PROFILES
from skyward_core.machines.spot import KINDS
from skyward_core.providers.base import BUILT_IN, Provider, kind_of
from skyward_core.spec import PoolSpec, Wishes

type Schema = dict[str, Any]

DIALECT = GenerateJsonSchema.schema_dialect
DEFINED = "#/$defs/{model}"
TYPES = {bool: "boolean", int: "integer", float: "number", str: "string"}


def settings_schema() -> Schema:
    """Return the schema of the file. What it refuses the file's reader refuses too, but not the other way round."""
    kinds = {name: kind_of(name) for name in sorted(BUILT_IN)}
    _, models = models_json_schema(
        [(model, "validation") for model in (PoolSpec, *kinds.values())], ref_template=DEFINED
    )
    defined: Schema = models["$defs"]
    defined[Accelerator.__name__]["required"] = ["name"]  # the catalogue has the rest
    for kind, strategy in KINDS.items():
        _need(defined[strategy.__name__], {"kind": {"const": kind}})
    settings = {name: _without_null(one) for name, one in defined.pop(PoolSpec.__name__)["properties"].items()}
    settings["provider"] = {"description": settings["provider"]["description"], **_provider(kinds, defined)}
    for name, hint in get_type_hints(Wishes).items():
        if name in settings and name != "provider":
            settings[name] = _with_short_forms(settings[name], hint, defined)
    without_name = {name: one for name, one in settings.items() if name != "name"}
    return {
        "$schema": DIALECT,
        "title": FILE,
        "description": "Settings of Skyward: what a pool has when its program does not say it.",
        **_table(
            settings
            | {
                PROFILES: _tables("Sets of settings; SKYWARD_PROFILE names the one that holds.", settings),
                POOLS: _tables("Settings of the pools with these names.", without_name),
            }
        ),
        "$defs": defined,
    }


def _table(properties: Schema) -> Schema:
    return {"type": "object", "properties": properties, "additionalProperties": False}


def _tables(about: str, settings: Schema) -> Schema:
    return {"type": "object", "description": about, "additionalProperties": _table(settings)}


def _need(table: Schema, properties: Schema) -> None:
    """Add properties without which an object is refused, before its others."""
    table["properties"] = properties | {name: _without_null(one) for name, one in table["properties"].items()}
    table["required"] = [*properties, *table.get("required", [])]


def _provider(kinds: Mapping[str, type[Provider]], defined: Schema) -> Schema:
    """Return what a provider may be: a name, a table with a name, or several of these."""
    for name, kind in kinds.items():
        _need(defined[kind.__name__], {"name": {"const": name}})
    other = {"type": "object", "properties": {"name": {"type": "string", "not": {"enum": [*kinds]}}}}
    one = {
        "anyOf": [
            {"enum": [*kinds]},
            {"type": "string"},
            *({"$ref": DEFINED.format(model=kind.__name__)} for kind in kinds.values()),
            {**other, "required": ["name"]},
        ]
    }
    return {"anyOf": [*one["anyOf"], {"type": "array", "items": one, "minItems": 1}]}


def _with_short_forms(setting: Schema, hint: Any, defined: Schema) -> Schema:
    """Return what a setting may be, with the short forms that `PoolSpec` reads too, such as a text for an object."""
    short = TypeAdapter(hint, config=ConfigDict(arbitrary_types_allowed=True)).json_schema(ref_template=DEFINED)
    definitions = defined | short.pop("$defs", {})
    more = sorted(set(_types(short, definitions)) - set(_types(setting, definitions)) - {"null"})
    if not more:
        return setting
    about = {key: setting[key] for key in ("description", "default") if key in setting}
    main = {key: one for key, one in setting.items() if key not in about}
    return about | {"anyOf": [*main.pop("anyOf", [main] if main else []), *({"type": one} for one in more)]}


def _types(schema: Schema, definitions: Schema) -> Iterator[str]:
    """Yield the types of JSON that a schema accepts, at its top."""
    if "$ref" in schema:
        yield from _types(definitions[schema["$ref"].rpartition("/")[2]], definitions)
    elif "anyOf" in schema:
        for one in schema["anyOf"]:
            yield from _types(one, definitions)
    elif "type" in schema:
        yield schema["type"]
    else:
        yield from {TYPES[type(one)] for one in schema.get("enum", [])}


def _without_null(schema: Schema) -> Schema:
    """Return a schema without null, which TOML has not."""
    rest = {key: one for key, one in schema.items() if key != "title" and (key, one) != ("default", None)}
    if "anyOf" not in rest:
        return rest
    forms = [_without_null(one) for one in rest.pop("anyOf") if one != {"type": "null"}]
    return cast("Schema", rest | (forms[0] if len(forms) == 1 else {"anyOf": forms}))
