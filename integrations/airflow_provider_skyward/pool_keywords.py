"""The fields of `PoolSpec` as keywords of the operator: their names, and their values as plain data."""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from typing import Any, cast

from pydantic import BaseModel

import skyward_core as sky
from airflow_provider_skyward.secrets import hidden

OTHER_NAMES = {"retries": "call_retries", "output": "node_output"}
"""Fields of PoolSpec that have names of Airflow's: `retries` run the task again, `call_retries` a call that lost its
node; the `output` of an operator is its XCom.
"""
POOL_FIELDS = {OTHER_NAMES.get(name, name): name for name in sky.PoolSpec.model_fields}
POOL_KEYWORDS = tuple(POOL_FIELDS)


def as_keywords(spec: sky.PoolSpec | Mapping[str, Any] | None) -> dict[str, Any]:
    """Return the fields that a spec sets."""
    if isinstance(spec, sky.PoolSpec):
        return {name: getattr(spec, name) for name in spec.model_fields_set}
    return dict(spec or {})


PLACEHOLDER = "airflow"
"""The name in a spec with `keep_warm` and without a name: the task instance has one (`generations.py`)."""


def named(known: Mapping[str, Any], fields: Collection[str]) -> dict[str, Any]:
    """Return keywords for a PoolSpec, with a name if `keep_warm` needs one and none is among the fields."""
    return {**known, "name": PLACEHOLDER} if known.get("keep_warm") and "name" not in fields else dict(known)


_SCALARS = frozenset({str, int, float, bool, type(None)})
_MOST_KEPT = 1000
_kept: dict[object, dict[str, Any]] = {}
"""Checked fields, by what was given."""


def as_plain_data(fields: Mapping[str, Any]) -> dict[str, Any]:
    """Return fields as JSON data, checked by PoolSpec.

    Templates and results of other tasks stay as they are. They are checked when they are known. Most tasks of a DAG
    have the same fields, which are checked once: a check takes as long as a whole PythonOperator.
    """
    try:
        key = _key_of(dict(fields))
    except TypeError:  # a value whose parts are not known here
        return _checked(fields)
    if (plain := _kept.get(key)) is None:
        if len(_kept) >= _MOST_KEPT:
            _kept.clear()
        plain = _kept[key] = _checked(fields)
    return _copied(plain)


def _key_of(value: object) -> object:
    """Return a key that two values share only if they are checked alike. Raises TypeError if there is none.

    It has the types, because 1 and True are equal, and of a model the fields that were set.
    """
    kind = type(value)
    if kind in _SCALARS:
        return kind, value
    if kind is tuple or kind is list:
        return kind, tuple(map(_key_of, cast("Sequence[object]", value)))
    if isinstance(value, BaseModel) and value.model_config.get("frozen"):
        is_set = value.model_fields_set
        return kind, tuple([(name, _key_of(field)) for name, field in vars(value).items() if name in is_set])
    if isinstance(value, Mapping):
        return kind, tuple([(name, _key_of(item)) for name, item in cast("Mapping[object, object]", value).items()])
    raise TypeError(kind)


def _copied(value: Any) -> Any:
    """Return JSON data without a list or dict that a task could change for another one."""
    kind = type(value)
    if kind is dict:
        return {name: item if type(item) in _SCALARS else _copied(item) for name, item in value.items()}
    return list(map(_copied, value)) if kind is list else value


def _checked(fields: Mapping[str, Any]) -> dict[str, Any]:
    known = {name: value for name, value in fields.items() if not is_template(value)}
    spec = sky.PoolSpec.of(**named(known, fields))
    refuse_credentials(spec)
    checked = spec.model_dump(mode="json", exclude_unset=True)
    plain = {name: checked.get(name, value) for name, value in fields.items()}
    if plain.get("env"):
        plain["env"] = hidden(spec.env, plain["env"]) if "env" in known else hidden(plain["env"])
    if isinstance(image := plain.get("image"), Mapping) and cast("Mapping[str, Any]", image).get("env"):
        env = cast("Mapping[str, Any]", image)["env"]
        plain["image"] = {**image, "env": hidden(spec.image.env, env) if "image" in known else hidden(env)}
    return plain


def refuse_credentials(spec: sky.PoolSpec) -> None:
    """Raise BadRequest for credentials on a provider: Airflow serializes DAGs, and stores and shows rendered fields."""
    spec.refuse_written_credentials(
        "a DAG or a rendered field, which Airflow stores",
        "write provider_conn_id with the name of a connection (docs/airflow/connections.md), or leave them to the"
        " worker's environment",
    )


def is_template(value: object) -> bool:
    """Return whether a value is known only in a run: a template, a result of another task, a mapped argument."""
    if isinstance(value, str):
        return "{{" in value or "{%" in value
    if isinstance(value, (int, float, BaseModel)):
        return False
    if isinstance(value, Mapping):
        return any(map(is_template, value.values()))
    if isinstance(value, (list, tuple)):
        return any(map(is_template, value))
    return callable(getattr(value, "iter_references", None))  # an XComArg, or an argument of a mapped task group
