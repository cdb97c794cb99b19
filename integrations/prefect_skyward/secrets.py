"""Secrets from Prefect's `Secret` blocks: the runner has their names, and loads them when its pool opens."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, cast

from prefect.blocks.system import Secret

import skyward_core as sky
from prefect_skyward.prefect_context import keys_of_prefect


def with_references(keywords: Mapping[str, Any]) -> dict[str, Any]:
    """Return the keywords with loaded blocks replaced by references.

    Raises BadRequest for a block that is not saved.
    """
    secrets = keywords.get("secrets")
    if not isinstance(secrets, Mapping):
        return dict(keywords)
    references = {name: _reference(name, one) for name, one in cast("Mapping[str, Any]", secrets).items()}
    return {**keywords, "secrets": references}


def values_of(spec: sky.PoolSpec) -> dict[str, str]:
    """Return the values of the secrets that Prefect stores, and of the keys of its API. Raises BadRequest for a missing
    block.
    """
    stored = {
        name: _value_of(name, reference)
        for name, reference in (spec.secrets or {}).items()
        if reference.source == "store"
    }
    return stored | keys_of_prefect(spec)


def _reference(name: str, one: Any) -> Any:
    if not isinstance(one, Secret):
        return one
    if (block := cast(Any, one)._block_document_name) is None:
        raise sky.BadRequest(
            f"secrets: the block for {name} has no name, because it was not saved: save it, and write"
            ' sky.Secret.from_store("its-name")'
        )
    return sky.Secret.from_store(block)


def _value_of(name: str, reference: sky.Secret) -> str:
    described = f"Prefect's Secret block {reference.key!r}"
    try:
        value = cast(Any, Secret).load(reference.key, _sync=True).get()
    except ValueError as error:
        raise sky.BadRequest(
            f"the secret {name} is to be {described}, which cannot be loaded: make it with"
            f" Secret(value=...).save({reference.key!r})"
        ) from error
    if reference.field:
        value = cast("Mapping[str, Any]", value).get(reference.field) if isinstance(value, Mapping) else None
    if value is None or value == "":
        raise sky.BadRequest(
            f"the secret {name} is to be {reference.field or 'the value'} of {described}, which has none"
        )
    return str(value)
