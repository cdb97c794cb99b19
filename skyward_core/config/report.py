"""What holds in a folder, and where each value comes from, as it may be shown: values of secrets are masked."""

from __future__ import annotations

import importlib
import os
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from enum import StrEnum
from pathlib import Path
from typing import Any, cast, get_type_hints

from pydantic import ConfigDict, TypeAdapter
from pydantic.json_schema import GenerateJsonSchema, models_json_schema

from skyward_core.accelerators import Accelerator
from skyward_core.config.settings import FILE, POOLS, PREFIX, PROFILE, PROFILES, Settings, SettingsFile
from skyward_core.errors import BadRequest, LedgerError
from skyward_core.machines import signing
from skyward_core.machines import signing as sealing
from skyward_core.machines.signing import key_file
from skyward_core.machines.spot import KINDS
from skyward_core.providers.base import BUILT_IN, Provider, kind_of
from skyward_core.secret import looks_secret
from skyward_core.spec import UNREPEATED, PoolKeywords, PoolSpec
from skyward_core.wire.masking import MASK

LEDGER = "SKYWARD_LEDGER"
DIALECT = GenerateJsonSchema.schema_dialect
DEFINED = "#/$defs/{model}"
TYPES = {bool: "boolean", int: "integer", float: "number", str: "string"}


class Source(StrEnum):
    """Where a value comes from, the strongest first."""

    OPTION = "option"
    ENVIRONMENT = "environment"
    FILE = "file"
    DEFAULT = "default"


@dataclass(frozen=True, slots=True)
class Value:
    """A setting as it may be shown. `where` is the option, the variable, or the file with the table."""

    name: str
    value: Any
    source: Source
    where: str = ""


@dataclass(frozen=True, slots=True)
class Configuration:
    """All settings. `fault` says why no pool opens with them; then the values are as they were written."""

    file: str | None
    profiles: tuple[str, ...]
    """The profiles and pools that the file has."""
    pools: tuple[str, ...]
    values: tuple[Value, ...]
    """Of a pool's settings, in the order of `PoolSpec`."""
    others: tuple[Value, ...]
    """What belongs to no pool: the ledger, the profile and the keys."""
    fault: str = ""


def configuration(
    *,
    profile: str | None = None,
    pool: str | None = None,
    ledger_url: str | None = None,
    environ: Mapping[str, str] = os.environ,
    directory: Path | None = None,
) -> Configuration:
    """Return all settings that hold in a directory (by default the working directory), for a profile and a pool.

    `ledger_url` is what was typed for it. Raises BadRequest for settings, profiles and files that cannot be read; a
    value that no pool can have is a `fault`.
    """
    settings = Settings.read(environ, directory, profile=profile, pool=pool)
    file = SettingsFile.nearest(directory, environ)
    values, fault = _values(settings)
    return Configuration(
        file=None if file is None else str(file.path),
        profiles=() if file is None else tuple(file.profiles),
        pools=() if file is None else tuple(file.pools),
        values=tuple(_value(name, value, settings, environ) for name, value in values.items()),
        others=tuple(_others(environ, profile, ledger_url)),
        fault=fault,
    )


def _values(settings: Settings) -> tuple[dict[str, Any], str]:
    """Return the value of each field as JSON, and why no spec has these values."""
    try:
        return PoolSpec.of(**cast("Any", dict(settings.fields))).model_dump(mode="json"), ""
    except BadRequest as error:
        where = "; ".join(f"{name} is from {source}" for name, source in settings.sources.items())
        raw = {name: MASK if name in UNREPEATED else value for name, value in settings.fields.items()}
        return {**PoolSpec().model_dump(mode="json"), **raw}, f"{error} ({where})"


def _value(name: str, value: Any, settings: Settings, environ: Mapping[str, str]) -> Value:
    if name not in settings.fields:
        return Value(name, value, Source.DEFAULT)
    variable = PREFIX + name.upper()
    if variable in environ:
        return Value(name, _masked(value), Source.ENVIRONMENT, variable)
    return Value(name, _masked(value), Source.FILE, settings.sources[name])


def _masked(value: Any, name: str = "") -> Any:
    """Return a value without what looks like a secret at any depth."""
    if isinstance(value, Mapping):
        pairs = cast("Mapping[str, Any]", value).items()
        return {key: _masked(one, key) for key, one in pairs}
    if isinstance(value, list | tuple):
        return [_masked(one, name) for one in cast("list[Any]", value)]
    return MASK if isinstance(value, str) and looks_secret(name, value) else value


def _others(environ: Mapping[str, str], profile: str | None, ledger_url: str | None) -> list[Value]:
    return [
        _ledger(environ, ledger_url),
        Value("profile", profile, Source.OPTION, "--profile")
        if profile is not None
        else _of_variable("profile", PROFILE, environ.get(PROFILE) or None, environ),
        _key("secret_key", sealing.SECRET_VARIABLE, sealing.SECRET_FILE, environ),
        _key("lease_key", signing.VARIABLE, signing.FILE, environ),
    ]


def _of_variable(name: str, variable: str, value: Any, environ: Mapping[str, str]) -> Value:
    return (
        Value(name, value, Source.ENVIRONMENT, variable) if environ.get(variable) else Value(name, None, Source.DEFAULT)
    )


def _ledger(environ: Mapping[str, str], given: str | None) -> Value:
    if given is not None:
        return Value("ledger", _without_password(given), Source.OPTION, "--ledger")
    if found := environ.get(LEDGER):
        return Value("ledger", _without_password(found), Source.ENVIRONMENT, LEDGER)
    try:
        url = importlib.import_module("skyward_core.ledger.ledger").default_url(environ)
    except LedgerError as error:
        return Value("ledger", None, Source.DEFAULT, str(error))
    return Value("ledger", url, Source.DEFAULT)


def _without_password(url: str) -> str:
    try:
        engine = importlib.import_module("skyward_core.ledger.sql_engine")
        return str(engine.shown(engine.parse_url(url)))
    except LedgerError:
        return MASK


def _key(name: str, variable: str, file: str, environ: Mapping[str, str]) -> Value:
    """Return that there is a key, and never the key."""
    if environ.get(variable):
        return Value(name, MASK, Source.ENVIRONMENT, variable)
    try:
        place = key_file(file)
        is_there = place.exists()
    except (OSError, RuntimeError, KeyError):  # no home, and no entry for this user
        return Value(name, None, Source.DEFAULT)
    return Value(name, MASK, Source.FILE, str(place)) if is_there else Value(name, None, Source.DEFAULT)


type Schema = dict[str, Any]


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
    for name, hint in get_type_hints(PoolKeywords).items():
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
