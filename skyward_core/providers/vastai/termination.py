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
    """Destroy containers; return the error of each that was not destroyed.

    Vast.ai skips unknown ids, and answers 404 if all are unknown.
    """
    errors: dict[int, SkywardError] = {}
    for some in batched(contracts, DESTROYED_AT_ONCE):
        try:
            answer = api.request(
                "DELETE", "/api/v0/instances/", body={"instance_ids": list(some)}, missing_is_none=True
            )
            is_done = answer is None or _is_done(answer)
        except BadRequest:
            is_done = False
        except SkywardError as error:
            errors |= dict.fromkeys(some, error)
            continue
        if not is_done:  # one of them blocks the others
            errors |= _destroy_each(api, some)
    return errors


def _destroy_each(api: Api, contracts: Iterable[int]) -> dict[int, SkywardError]:
    errors: dict[int, SkywardError] = {}
    for contract in contracts:
        try:
            answer = api.request("DELETE", f"/api/v0/instances/{contract}/", body={}, missing_is_none=True)
            if answer is not None and not _is_done(answer):
                errors[contract] = ProviderFailed(f"Vast.ai did not destroy {contract}: {reason_in(answer)}")
        except SkywardError as error:
            errors[contract] = error
    return errors


def _is_done(answer: object) -> bool:
    """Return whether an answer reports success; an empty answer or one that is no object does not."""
    return isinstance(answer, dict) and bool(cast("Row", answer).get("success", bool(answer)))
