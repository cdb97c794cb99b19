"""Destroying droplets."""

from __future__ import annotations

from collections.abc import Sequence

from skyward_core.concurrency.threads import side_by_side
from skyward_core.errors import (
    CredentialsError,
    InstancesLeft,
    SkywardError,
)
from skyward_core.providers._http import Api, nothing_in


def destroy_droplets(api: Api, ids: Sequence[str]) -> None:
    """Destroy droplets. Raises CredentialsError if all were refused, else InstancesLeft with the rest."""
    # after the first failure the others are tried once each, so that the whole takes a limited time
    troubled: list[str] = []

    def destroy(machine_id: str) -> SkywardError | None:
        try:
            path = f"/v2/droplets/{machine_id}"
            nothing_in(
                api.request("DELETE", path, missing_is_none=True, is_repeatable=not troubled),
                f"DigitalOcean answered DELETE {path}",
            )
        except SkywardError as error:
            troubled.append(machine_id)
            return error
        return None

    failures = {
        machine_id: error
        for machine_id, error in zip(ids, side_by_side(destroy, ids, "skyward-digitalocean"), strict=True)
        if error
    }
    if not failures:
        return
    cause = next(iter(failures.values()))
    if len(failures) == len(ids) and all(isinstance(error, CredentialsError) for error in failures.values()):
        raise cause
    raise InstancesLeft(f"droplets {', '.join(sorted(failures))} may still run: {cause}", sorted(failures)) from cause
