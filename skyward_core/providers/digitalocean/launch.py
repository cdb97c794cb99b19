"""One launch at DigitalOcean: the key, creating calls, and waiting for addresses."""

from __future__ import annotations

import base64
import hashlib
import logging
import time
from collections.abc import Mapping, Sequence
from itertools import batched
from typing import Any

from skyward_core.concurrency.backoff import Backoff
from skyward_core.concurrency.threads import side_by_side
from skyward_core.errors import (
    BadRequest,
    NoCapacity,
    ProviderFailed,
    RateLimited,
    SkywardError,
)
from skyward_core.machines.instances import InstanceState
from skyward_core.providers._http import Api, Row, field_of, rows_of
from skyward_core.providers.digitalocean.api import droplets
from skyward_core.providers.digitalocean.instances import is_ready, state_of
from skyward_core.providers.digitalocean.termination import destroy_droplets
from skyward_core.providers.ssh_keys import Key

log = logging.getLogger(__name__)

NAMES_PER_CALL = 10
ADDRESS_SECONDS = 600.0
"""How long a machine may take to get its address. One that has none by then is destroyed."""
POLL_SECONDS, LONGEST_POLL_SECONDS = 1.0, 15.0
ACTIONS_PER_POLL = 10
"""How many actions one poll reads, for machines without an address, in turns. The limit is 250 requests a minute."""
KEY_SECONDS, KEY_PAUSE_SECONDS = 60.0, 2.0
"""How long a registered key may be unknown to the creating call. Others report some seconds."""
KEY_IS_THERE = ("already been taken", "already in use")
KEY_IS_UNKNOWN = "invalid key identifiers"


def registered(api: Api, key: Key) -> str:
    """Register our public key in the account, where it stays; return its fingerprint.

    Keys are not listed, because that is limited to ten requests a minute.
    """
    kind, blob = key.public.split()[:2]
    digest = hashlib.md5(base64.b64decode(blob), usedforsecurity=False).hexdigest()
    try:
        api.request(
            "POST", "/v2/account/keys", body={"name": "skyward", "public_key": f"{kind} {blob}"}, is_repeatable=True
        )
    except BadRequest as error:
        if not any(part in str(error) for part in KEY_IS_THERE):
            raise
    return ":".join(map("".join, batched(digest, 2)))


def create_droplets(
    creating: Api, api: Api, order: Mapping[str, Any], names: Sequence[str], *, is_gpu: bool
) -> list[Row]:
    """Create machines with these names, ten in one call and one call at a time: only ten may be in creation at once.

    Stops at the first failure and returns the machines so far. If the outcome of that call is unknown, its machines are
    looked up by name. Raises the failure if there is no machine.
    """
    created: list[Row] = []
    for chunk in batched(names, NAMES_PER_CALL):
        try:
            created += _created(creating, {**order, **({"name": chunk[0]} if len(chunk) == 1 else {"names": chunk})})
        except SkywardError as error:
            if isinstance(error, ProviderFailed) and not isinstance(error, RateLimited):
                created += [row for row in droplets(api, is_gpu=is_gpu) if row["name"] in chunk]
            if not created:
                raise
            log.warning("DigitalOcean created %d of %d machines: %s", len(created), len(names), error)
            break
    return created


def _created(api: Api, body: Mapping[str, Any]) -> list[Row]:
    """Make one creating call. Repeat it for a while if our key was registered a moment ago."""
    deadline = time.monotonic() + KEY_SECONDS
    while True:
        try:
            answer = api.request("POST", "/v2/droplets", body=body)
            who = "DigitalOcean answered POST /v2/droplets"
            created: list[Row] = (
                rows_of(answer, "droplets", who) if "names" in body else [field_of(answer, "droplet", dict, who)]
            )
            return [row for row in created if field_of(row, "id", int, who)]
        except BadRequest as error:
            if KEY_IS_UNKNOWN not in str(error) or time.monotonic() > deadline:
                raise
            time.sleep(KEY_PAUSE_SECONDS)


def await_addresses(api: Api, created: Sequence[Row], *, is_gpu: bool) -> tuple[list[Row], dict[str, str]]:
    """Wait until each machine has an address or has failed.

    Returns those with an address, and the reasons of the others by id.
    """
    rows = {str(row["id"]): row for row in created}
    failed: dict[str, str] = {}
    requested_at: dict[str, float] = {}

    def waiting() -> list[str]:
        return [machine_id for machine_id, row in rows.items() if machine_id not in failed and not is_ready(row)]

    deadline = time.monotonic() + ADDRESS_SECONDS
    pauses = Backoff(POLL_SECONDS, LONGEST_POLL_SECONDS, 1.5).pauses()
    while waiting() and time.monotonic() < deadline:
        time.sleep(next(pauses))
        rows.update({str(row["id"]): row for row in droplets(api, is_gpu=is_gpu) if str(row["id"]) in rows})
        turn = sorted(waiting(), key=lambda machine_id: requested_at.get(machine_id, 0.0))[:ACTIONS_PER_POLL]
        requested_at |= dict.fromkeys(turn, time.monotonic())
        found = dict(
            zip(
                turn,
                side_by_side(lambda machine_id: _failure(api, rows[machine_id]), turn, "skyward-digitalocean"),
                strict=True,
            )
        )
        failed |= {machine_id: reason for machine_id, reason in found.items() if reason}
    failed |= dict.fromkeys(waiting(), f"no address within {ADDRESS_SECONDS:g} s")
    return [row for machine_id, row in rows.items() if machine_id not in failed], failed


def _failure(api: Api, row: Row) -> str:
    """Return why a machine without an address will never have one; "" while it may."""
    path = f"/v2/droplets/{row['id']}/actions"
    answer = api.request("GET", path, missing_is_none=True)
    if answer is None:
        return "it is gone"
    actions = rows_of(answer, "actions", f"DigitalOcean answered GET {path}")
    status = next((action["status"] for action in actions if action["type"] == "create"), None)
    if status == "errored":
        return "its creation is errored"
    return f"it is {row['status']}" if status == "completed" and state_of(row) is InstanceState.STOPPING else ""


def destroy_failed(api: Api, failed: Mapping[str, str], *, is_any_ready: bool) -> None:
    """Destroy machines that failed.

    Raises NoCapacity if no machine is ready, or ProviderFailed if failed machines may remain then.
    """
    reasons = "; ".join(f"droplet {machine_id}: {reason}" for machine_id, reason in failed.items())
    trouble: SkywardError | None = None
    try:
        destroy_droplets(api, list(failed))
    except SkywardError as error:
        trouble = error
    if not is_any_ready and trouble:
        raise ProviderFailed(
            f"DigitalOcean created no machine ({reasons}), and failed droplets could not be destroyed: {trouble}"
        ) from trouble
    if not is_any_ready:
        raise NoCapacity(f"DigitalOcean created no machine: {reasons}").coded("errored")
    log.warning("some machines of DigitalOcean failed: %s%s", reasons, f"; {trouble}" if trouble else "")
