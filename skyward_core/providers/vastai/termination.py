"""Destroying containers of Vast.ai."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from itertools import batched
from typing import cast

from skyward_core.errors import ProviderFailed, SkywardError
from skyward_core.providers._http import Api, Row
from skyward_core.providers.vastai.api import reason_in

DESTROYED_AT_ONCE = 100


def destroy(api: Api, contracts: Sequence[int]) -> dict[int, SkywardError]:
    """Destroy containers; return the error of each that was not destroyed.

    Vast.ai skips unknown ids. If it refuses the common call, whatever its reason (404 if all ids are unknown, 403 for a
    key without that right, 410 if there is no such call any more), each container gets its own.
    """
    errors: dict[int, SkywardError] = {}
    for some in batched(contracts, DESTROYED_AT_ONCE):
        try:
            is_done = _is_done(api.request("DELETE", "/api/v0/instances/", body={"instance_ids": list(some)}))
        except ProviderFailed as error:  # an outage, or too many requests: other calls would fare no better
            errors |= dict.fromkeys(some, error)
            continue
        except SkywardError:
            is_done = False
        if not is_done:
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
