"""Destroying containers of Vast.ai."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from itertools import batched
from typing import cast

from skyward_core.errors import (
    BadRequest,
    ProviderFailed,
    SkywardError,
)
from skyward_core.providers._http import Api, Row
from skyward_core.providers.vastai.api import reason_in

DESTROYED_AT_ONCE = 100


def destroy(api: Api, contracts: Sequence[int]) -> dict[int, SkywardError]:
    """Destroy containers; return those that were not, and why.

    Ids that nobody has are passed over by Vast, and are a 404 if they are all.
    """
    errors: dict[int, SkywardError] = {}
    for some in batched(contracts, DESTROYED_AT_ONCE):
        try:
            answer = api.ask("DELETE", "/api/v0/instances/", body={"instance_ids": list(some)}, missing_is_none=True)
            is_done = answer is None or _is_done(answer)
        except BadRequest:
            is_done = False
        except SkywardError as error:
            errors |= dict.fromkeys(some, error)
            continue
        if not is_done:  # one of them is in the way of all
            errors |= _destroy_each(api, some)
    return errors


def _destroy_each(api: Api, contracts: Iterable[int]) -> dict[int, SkywardError]:
    errors: dict[int, SkywardError] = {}
    for contract in contracts:
        try:
            answer = api.ask("DELETE", f"/api/v0/instances/{contract}/", body={}, missing_is_none=True)
            if answer is not None and not _is_done(answer):
                errors[contract] = ProviderFailed(f"Vast.ai was asked to destroy {contract}: {reason_in(answer)}")
        except SkywardError as error:
            errors[contract] = error
    return errors


def _is_done(answer: object) -> bool:
    """Whether an answer says that something was done; what is no object, or an empty one, says nothing."""
    return isinstance(answer, dict) and bool(cast("Row", answer).get("success", bool(answer)))
