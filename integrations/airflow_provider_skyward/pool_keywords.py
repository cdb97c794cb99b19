"""The fields of `PoolSpec` as keywords of the operator: their names, and their values as plain data."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, cast

from pydantic import BaseModel

import skyward_core as sky
from airflow_provider_skyward.secrets import hidden

OTHER_NAMES = {"retries": "call_retries"}
"""Fields of PoolSpec that have names of Airflow's fields: `retries` run the task again, `call_retries` a call that lost
its node.
"""
POOL_FIELDS = {OTHER_NAMES.get(name, name): name for name in sky.PoolSpec.model_fields}
POOL_KEYWORDS = tuple(POOL_FIELDS)


def as_keywords(spec: sky.PoolSpec | Mapping[str, Any] | None) -> dict[str, Any]:
    """Return the fields that a spec sets."""
    if isinstance(spec, sky.PoolSpec):
        return {name: getattr(spec, name) for name in spec.model_fields_set}
    return dict(spec or {})


def as_plain_data(fields: Mapping[str, Any]) -> dict[str, Any]:
    """Return fields as JSON data, checked by PoolSpec.

    Templates and results of other tasks stay as they are. They are checked when they are known.
    """
    known = {name: value for name, value in fields.items() if not _is_template(value)}
    spec = sky.PoolSpec.of(**known)
    checked = spec.model_dump(mode="json", exclude_unset=True)
    plain = {name: checked.get(name, value) for name, value in fields.items()}
    if plain.get("env"):
        plain["env"] = hidden(spec.env, plain["env"]) if "env" in known else hidden(plain["env"])
    if isinstance(image := plain.get("image"), Mapping) and cast("Mapping[str, Any]", image).get("env"):
        env = cast("Mapping[str, Any]", image)["env"]
        plain["image"] = {**image, "env": hidden(spec.image.env, env) if "image" in known else hidden(env)}
    return plain


def _is_template(value: object) -> bool:
    if isinstance(value, str):
        return "{{" in value or "{%" in value
    if isinstance(value, (int, float, BaseModel)):
        return False
    if isinstance(value, Mapping):
        return any(map(_is_template, value.values()))
    if isinstance(value, (list, tuple)):
        return any(map(_is_template, value))
    return callable(getattr(value, "iter_references", None))  # an XComArg, or an argument of a mapped task group
