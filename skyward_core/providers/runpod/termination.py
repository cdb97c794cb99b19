"""Deleting pods of RunPod."""

from __future__ import annotations

import logging
from collections.abc import Sequence

from skyward_core.concurrency.threads import side_by_side
from skyward_core.errors import (
    SkywardError,
)
from skyward_core.providers._http import Api, nothing_in
from skyward_core.providers.runpod.api import path_of

log = logging.getLogger(__name__)


def delete_all(api: Api, pods: Sequence[str]) -> dict[str, SkywardError]:
    """Delete pods; return the error of each that was not deleted. One that is gone is no error."""

    def end(pod: str) -> SkywardError | None:
        try:
            nothing_in(
                api.request("DELETE", path_of(pod), missing_is_none=True), f"RunPod answered DELETE {path_of(pod)}"
            )
        except SkywardError as error:
            return error
        return None

    outcomes = zip(pods, side_by_side(end, pods, "skyward-runpod"), strict=True)
    return {pod: error for pod, error in outcomes if error is not None}


def delete_failed(api: Api, pods: Sequence[str]) -> None:
    """Delete pods that did not start. One that cannot be deleted now has a name of ours, so a sweep finds it."""
    for pod, error in delete_all(api, pods).items():
        log.warning("RunPod did not delete %s, which did not start: %s", pod, error)
