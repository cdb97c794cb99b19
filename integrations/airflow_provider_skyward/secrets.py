"""Secrets from Airflow's connections and variables, read while the task runs; values that are hidden in the serialized
DAG.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, cast

from airflow.sdk import Connection, Variable
from airflow.sdk.exceptions import AirflowException, AirflowRuntimeError
from airflow.sdk.log import mask_secret

import skyward_core as sky

VARIABLE = "variable/"


class Hidden:
    """A value that Airflow writes as a mask, in the serialized DAG and wherever it shows a task's fields.

    `shown` returns the value.
    """

    __slots__ = ("_value",)

    def __init__(self, value: str) -> None:
        self._value = value

    def __repr__(self) -> str:
        return "***"

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Hidden) and other._value == self._value

    def __hash__(self) -> int:
        return hash(self._value)

    @property
    def shown(self) -> str:
        """The value."""
        return self._value


def hidden(env: Any, masked: Mapping[str, str] | None = None) -> Any:
    """Return environment variables with probable secrets hidden. Templates stay as they are: they name a secret, and
    hold none.

    `masked` has the same variables as the spec's JSON shows them, if there is a spec.
    """
    if masked is not None:
        return {name: value if masked[name] == value else Hidden(value) for name, value in env.items()}
    if not isinstance(env, Mapping):
        return env
    variables = dict(cast("Mapping[str, Any]", env))
    plain = {
        name: value
        for name, value in variables.items()
        if isinstance(value, str) and "{{" not in value and "{%" not in value
    }
    return variables | {name: Hidden(plain[name]) for name in sky.PoolSpec.of(env=plain).plain_secrets}


def shown(value: Any) -> Any:
    """Return a field of the pool with its hidden values."""
    if isinstance(value, Hidden):
        return value.shown
    if isinstance(value, Mapping):
        return {key: shown(item) for key, item in cast("Mapping[str, Any]", value).items()}
    return value


def values_of(spec: sky.PoolSpec) -> dict[str, str]:
    """Return the values of the secrets that Airflow stores, and have its logs mask them.

    Raises BadRequest for a missing one.
    """
    found = {
        name: _value_of(name, reference)
        for name, reference in (spec.secrets or {}).items()
        if reference.source == "store"
    }
    for value in found.values():
        mask_secret(value)
    return found


def _value_of(name: str, reference: sky.Secret) -> str:
    try:
        value = (
            _variable(reference)
            if reference.key.startswith(VARIABLE)
            else _part_of(Connection.get(reference.key), reference.field or "password")
        )
    except (AirflowException, AirflowRuntimeError, KeyError) as error:
        raise sky.BadRequest(
            f"the secret {name} is to be {_described(reference)}, and Airflow has none: {type(error).__name__}"
        ) from error
    if not value:
        raise sky.BadRequest(f"the secret {name} is to be {_described(reference)}, which is empty")
    return str(value)


def _variable(reference: sky.Secret) -> Any:
    return Variable.get(reference.key.removeprefix(VARIABLE))


def _part_of(connection: Any, field: str) -> Any:
    if field in ("password", "login", "host", "schema", "extra"):
        return getattr(connection, field)
    return connection.get_uri() if field == "uri" else connection.extra_dejson.get(field)


def _described(reference: sky.Secret) -> str:
    if reference.key.startswith(VARIABLE):
        return f"Airflow's variable {reference.key.removeprefix(VARIABLE)!r}"
    return f"the {reference.field or 'password'} of Airflow's connection {reference.key!r}"
