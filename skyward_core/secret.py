"""Secrets of calls: references that travel, values that are read where a pool opens, and the look of variables that
hold one without saying so.

A spec holds references (`Secret`) and no value. The process that opens a pool reads the values (`read_values`). They go
to the nodes in memory (`worker/scheduler.py`). Plain text in `env` is masked wherever a spec is shown or written,
if its name or its value looks like a secret.
"""

from __future__ import annotations

import os
import re
from collections.abc import Iterable, Mapping
from itertools import pairwise
from typing import Any, Literal, Self, cast

from pydantic import BaseModel, ConfigDict, Field

from skyward_core.errors import BadRequest
from skyward_core.wire.masking import MASK, SHORTEST, SHORTEST_LINE, SecretValues

LARGEST_BYTES = 32 * 1024
"""Of all values together: they travel in one packet with a call."""
VARIABLE = re.compile(r"[A-Za-z_][A-Za-z0-9_]*")

_WORDS = re.compile(r"[A-Z]+(?![a-z])|[A-Z]?[a-z]+|[0-9]+")
_SECRET_WORDS = re.compile(
    ".*(TOKEN|SECRETS?|PASSWORDS?|PASSWD|PASSPHRASE|CREDENTIALS?|(API|ACCESS|PRIVATE|SECRET)KEY)|PASS|PAT"
)
_SECRET_KEYS = re.compile(
    "API|ACCESS|PRIVATE|SECRET|SIGNING|ENCRYPTION|MASTER|ACCOUNT|STORAGE|DEPLOY|LICENSE|AUTH|SERVICE"
)
"""Names of keys that are secret; a SORT_KEY is not."""
_PLACES = re.compile(
    "FILE|PATH|DIR|DIRECTORY|FOLDER|URL|URI|ENDPOINT|NAME|TTL|LIMIT|COUNT|LENGTH|SIZE|TYPE|ENABLED|TIMEOUT|EXPIRY"
)
"""What a variable is about that ends so: not the secret itself, but where it is, or how long."""
_PATHS = frozenset({"GOOGLE_APPLICATION_CREDENTIALS"})
_USERINFO = re.compile(r"://[^/?#\s@]+@")


class Secret(BaseModel):
    """Where the value of a secret is read when a pool opens: never the value itself.

    Make one with `from_env` or `from_store`. It is JSON both ways, compares by value, and may be written anywhere.

    >>> ComputePool(secrets={"HF_TOKEN": Secret.from_env("HF_TOKEN_OF_THE_TEAM")})
    """

    model_config = ConfigDict(frozen=True, extra="forbid", hide_input_in_errors=True)

    source: Literal["env", "store"] = "env"
    key: str = Field(min_length=1)
    field: str = ""

    @classmethod
    def from_env(cls, name: str) -> Self:
        """Refer to an environment variable of the process that opens the pool.

        Raises BadRequest for what cannot be the name of one.
        """
        _refuse_no_variable(name)
        return cls(source="env", key=name)

    @classmethod
    def from_store(cls, key: str, field: str = "") -> Self:
        """Refer to an entry of the orchestrator's own store: a `Secret` block of Prefect, a connection or variable of
        Airflow. `field` is a part of it.
        """
        if not key:
            raise BadRequest("the key of a secret in a store must not be empty")
        return cls(source="store", key=key, field=field)

    def __str__(self) -> str:
        return (
            f"environment variable {self.key}"
            if self.source == "env"
            else f"entry {self.key!r} of the orchestrator's store"
        )


def as_references(given: Any) -> Any:
    """Read what a user may write for `secrets`: names, or references by name.

    Raises ValueError, which never repeats what may be a value.
    """
    if isinstance(given, str):
        given = (given,)
    if not isinstance(given, Mapping):
        if not isinstance(given, Iterable) or not all(isinstance(name, str) for name in cast("Iterable[Any]", given)):
            raise ValueError(
                'write the names of variables, secrets=("HF_TOKEN",), or where they are read: secrets={"HF_TOKEN":'
                ' sky.Secret.from_env("OTHER")}'
            )
        given = {str(name): Secret.from_env(str(name)) for name in cast("Iterable[Any]", given)}
    found = dict[str, Secret]()
    for name, reference in cast("Mapping[Any, Any]", given).items():
        _refuse_no_variable(name)
        if name.startswith("SKYWARD_"):
            raise ValueError(f"{name!r} belongs to us: choose another name")
        if not isinstance(reference, Secret | Mapping):
            raise BadRequest(
                f'{name} must refer to its value and not be it: write {{"{name}": sky.Secret.from_env("{name}")}}, or'
                f' ("{name}",) for the same'
            )
        found[name] = reference if isinstance(reference, Secret) else Secret.model_validate(reference)
    return found


def read_values(
    secrets: Mapping[str, Secret], given: Mapping[str, str], environ: Mapping[str, str] | None = None
) -> SecretValues:
    """Return the values: those that are given, the others from the environment.

    Raises BadRequest for those that there are not, by the names of their variables, and for what no variable can hold.
    What reports errors may show the variables of this frame: none of them shows a value.
    """
    if unknown := sorted(given.keys() - secrets.keys()):
        raise BadRequest(f"values were given for {', '.join(unknown)}, and the spec names no such secrets")
    found = _looked_up(secrets, given, os.environ if environ is None else environ)
    missing = [f"{name} ({_cure(reference)})" for name, reference in secrets.items() if name not in found]
    if missing:
        raise BadRequest(f"secrets without a value: {'; '.join(missing)}. Nothing was rented")
    if odd := [name for name in found if "\0" in found[name]]:
        raise BadRequest(f"the values of {', '.join(odd)} hold a NUL character, which no environment variable can")
    if odd := [name for name in found if not _is_storable(found[name])]:
        raise BadRequest(
            f"the values of {', '.join(odd)} hold half of a surrogate pair, which no environment variable can"
        )
    if (size := sum(len(os.fsencode(found[name])) for name in found)) > LARGEST_BYTES:
        raise BadRequest(
            f"the values of all secrets take {size:,} bytes, and {LARGEST_BYTES:,} is the limit: keep what is larger in"
            " a store that calls can read"
        )
    return found


def _looked_up(secrets: Mapping[str, Secret], given: Mapping[str, str], environ: Mapping[str, str]) -> SecretValues:
    values = {
        name: given.get(name) or (environ.get(reference.key) if reference.source == "env" else None)
        for name, reference in secrets.items()
    }
    return SecretValues({name: value for name, value in values.items() if value})


def _is_storable(value: str) -> bool:
    """Whether an environment variable can hold a text. The error that says why not would repeat it."""
    try:
        value.encode(errors="surrogateescape")
    except UnicodeEncodeError:
        return False
    return True


def too_short_to_mask(values: SecretValues) -> list[str]:
    """Return the names of those that stay as they are in what calls print."""
    return [name for name, value in values.items() if len(value) < SHORTEST]


def looks_secret(name: str, value: str = "") -> bool:
    """Return whether a variable of this name seems to hold a secret, or its value is a URL with user information."""
    if _USERINFO.search(value):
        return True
    words = [word.upper() for word in _WORDS.findall(name)]
    if not words or name in _PATHS or _PLACES.fullmatch(words[-1]):
        return False
    is_key = any(word == "KEY" and _SECRET_KEYS.fullmatch(before) for before, word in pairwise(words))
    is_password = words[-1] == "PWD" and len(words) > 1
    return is_key or is_password or any(map(_SECRET_WORDS.fullmatch, words))


def masked(env: Mapping[str, str]) -> dict[str, str]:
    """Return variables as they may be shown and written."""
    return {name: MASK if looks_secret(name, value) else value for name, value in env.items()}


def refuse_masks(env: Mapping[str, str], where: str) -> None:
    """Raise BadRequest for a mask in the place of a value: it came from JSON, which does not hold the value."""
    if lost := [name for name, value in env.items() if value == MASK]:
        raise BadRequest(
            f"{where} holds {MASK!r} in the place of the value of {', '.join(lost)}: it comes from JSON, where values"
            f" that look like secrets are masked. Name it in secrets=({lost[0]!r},), or set it anew"
        )


def _refuse_no_variable(name: object) -> None:
    if not isinstance(name, str) or not VARIABLE.fullmatch(name):
        raise BadRequest(
            "secrets has what is no name of a variable (letters, digits and underscores, no digit first): write the"
            " name and not the value"
        )
    if variable := _variable_with(name):
        raise BadRequest(f'secrets has the value of {variable} in the place of a name: write secrets=("{variable}",)')


def _variable_with(value: str) -> str:
    """Return the variable of this process that has this value and seems to hold a secret; "" if there is none.

    Most tokens could be names.
    """
    if len(value) < SHORTEST_LINE or value in os.environ:
        return ""
    ours = (name for name, its in os.environ.items() if its == value and not name.startswith("SKYWARD_"))
    return next((name for name in ours if looks_secret(name)), "")


def _cure(reference: Secret) -> str:
    if reference.source == "env":
        return f"{reference} is not set, or empty, in the process that opens the pool"
    return (
        f"{reference} can be read only by the plugin of an orchestrator: use sky.Secret.from_env, or"
        " ComputePool.from_spec(spec, secrets={...})"
    )
