"""What holds in a folder, and where each value comes from, as it may be shown: values of secrets are masked."""

from __future__ import annotations

import importlib
import os
from collections.abc import Mapping
from dataclasses import dataclass
from enum import StrEnum
from pathlib import Path
from typing import Any, cast

from skyward_core.config.settings import PREFIX, PROFILE, Settings, SettingsFile
from skyward_core.errors import BadRequest, LedgerError
from skyward_core.machines import sealing, signing
from skyward_core.machines.user_keys import key_file
from skyward_core.secret import looks_secret
from skyward_core.spec import UNREPEATED, PoolSpec
from skyward_core.worker.masking import MASK

LEDGER = "SKYWARD_LEDGER"


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
    file = SettingsFile.nearest(directory)
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
        _key("secret_key", sealing.VARIABLE, sealing.FILE, environ),
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
