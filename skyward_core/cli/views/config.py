"""Settings as JSON and as a table."""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any, cast

if TYPE_CHECKING:
    from skyward_core.config.report import Configuration, Value

UNSET = "-"


def as_json(found: Configuration) -> dict[str, Any]:
    return {
        "file": found.file,
        "profiles": list(found.profiles),
        "pools": list(found.pools),
        "settings": [_as_json(one) for one in found.values],
        "others": [_as_json(one) for one in found.others],
        "fault": found.fault or None,
    }


def _as_json(one: Value) -> dict[str, Any]:
    return {"name": one.name, "value": one.value, "source": one.source.value, "where": one.where or None}


def table(found: Configuration) -> tuple[list[str], list[list[str]]]:
    """Return heads and rows: the settings of a pool, then the others."""
    return ["SETTING", "VALUE", "FROM"], [_row(one) for one in (*found.values, *found.others)]


def _row(one: Value) -> list[str]:
    return [one.name, _text(one.value), one.where or one.source.value]


def _text(value: Any) -> str:
    if isinstance(value, Mapping):  # an image has many empty fields
        fields = cast("Mapping[str, Any]", value)
        value = {name: one for name, one in fields.items() if one not in (None, [], {}, False)}
    return UNSET if value is None else value if isinstance(value, str) else json.dumps(value, ensure_ascii=False)


def summary(found: Configuration) -> str:
    """Return which file was read, and the names of its tables."""
    if found.file is None:
        return "there is no skyward.toml here, nor in the folders above, nor in your configuration folder"
    names = [
        f"{kind}: {', '.join(names)}" for kind, names in (("profiles", found.profiles), ("pools", found.pools)) if names
    ]
    return "; ".join([f"read: {found.file}", *names])
