"""Deleting machines of Verda, and the scripts and disks that they leave behind."""

from __future__ import annotations

import contextlib
import logging
import time
from collections.abc import Collection, Iterable, Mapping, Sequence
from datetime import UTC, datetime
from http import HTTPStatus
from urllib.parse import quote

from skyward_core.concurrency.backoff import Backoff
from skyward_core.concurrency.threads import side_by_side
from skyward_core.errors import (
    InstancesLeft,
    ProviderFailed,
    SkywardError,
)
from skyward_core.providers._http import rows_in
from skyward_core.providers.verda.api import GONE_WORDS, Json, VerdaApi, speaks_of
from skyward_core.providers.verda.tags import NAME, SCRIPT_NAME, launch_of

log = logging.getLogger(__name__)

BUSY_SECONDS = 240.0
"""How long `terminate` tries again: Verda refuses to delete machines while it provisions them."""
PAUSE_SECONDS, LONGEST_PAUSE_SECONDS = 1.0, 5.0
ORPHAN_SECONDS = 3600
"""Age from which scripts and disks without a machine are deleted.

Another process may need a younger one for its launch.
"""
BUSY_WORDS = ("can't discontinue a", "cannot discontinue a", "can't delete a", "cannot delete a")
DISK_PREFIX = "skyward-"


def delete_all(api: VerdaApi, machines: Sequence[Json]) -> dict[str, SkywardError]:
    """Delete machines with their disks; return the error of each that was not deleted.

    Machines that are still provisioning are tried again, all of them in turn.
    """
    wanted = list(machines)
    deadline = time.monotonic() + BUSY_SECONDS
    pauses = Backoff(PAUSE_SECONDS, LONGEST_PAUSE_SECONDS).pauses()
    left: dict[str, SkywardError] = {}
    while wanted:
        errors = side_by_side(lambda machine: _delete(api, machine), wanted, "skyward-verda")
        failed = {machine["id"]: error for machine, error in zip(wanted, errors, strict=True) if error is not None}
        busy = {machine_id: error for machine_id, error in failed.items() if speaks_of(str(error), BUSY_WORDS)}
        left |= {machine_id: error for machine_id, error in failed.items() if machine_id not in busy}
        if busy:
            pause = next(pauses)
            if time.monotonic() + pause > deadline:
                return left | busy
            time.sleep(pause)
        again = side_by_side(api.machine, list(busy), "skyward-verda")  # a machine may have its disk by now, or be gone
        wanted = [
            machine
            for machine in again
            if machine is not None and machine["status"] not in ("deleting", "discontinued")
        ]
    return left


def instances_left(left: Mapping[str, SkywardError]) -> InstancesLeft:
    error = InstancesLeft(
        f"Verda could not delete {', '.join(sorted(left))}: {'; '.join(dict.fromkeys(map(str, left.values())))}",
        sorted(left),
    )
    error.__cause__ = next(iter(left.values()))
    return error


def _delete(api: VerdaApi, machine: Json) -> SkywardError | None:
    # without `volume_ids` the disk goes to the trash; with an empty list it stays and is billed
    disk = {"volume_ids": [machine["os_volume_id"]], "delete_permanently": True} if machine.get("os_volume_id") else {}
    body = {"id": [machine["id"]], "action": "delete", **disk}
    try:
        answer = api.request("PUT", "/instances", body=body, is_repeatable=True, missing_is_none=True)
    except SkywardError as error:
        return None if speaks_of(str(error), GONE_WORDS) else error
    try:
        rows = (
            []
            if answer is None
            else rows_in([answer] if isinstance(answer, dict) and answer else answer, "Verda answered PUT /instances")
        )
    except ProviderFailed as error:
        return error
    for one in rows:  # 207: each row has its own status
        code = int(one.get("statusCode") or 0)
        if (
            (one.get("error") or code >= HTTPStatus.BAD_REQUEST)
            and code != HTTPStatus.NOT_FOUND
            and not speaks_of(str(one.get("error")), GONE_WORDS)
        ):
            return ProviderFailed(f"{one.get('error') or one.get('status')}").coded(str(code))
    return None


def sweep(api: VerdaApi, machines: Iterable[Json], ended: Collection[str] = ()) -> None:
    """Delete our scripts and disks that serve no machine: those of the machines in `ended`, by name, and old ones.

    `machines` is the complete listing. A script holds the private host key of its machines in clear text until then.
    """
    living = {machine["hostname"] for machine in machines if machine["status"] != "discontinued"} - set(ended)
    serving = {launch_of(name) for name in living}
    over = {launch_of(name) for name in ended}
    now = time.time()
    for one in api.list("/scripts"):
        match = SCRIPT_NAME.fullmatch(str(one["name"]))
        launch = (match["pool"], match["launch"]) if match else ("", "")
        if match and launch not in serving and (launch in over or now - int(match["made"]) > ORPHAN_SECONDS):
            remove(api, f"/scripts/{quote(str(one['id']))}")
    for one in api.list("/volumes"):
        name = str(one["name"]).removeprefix(DISK_PREFIX)
        is_ours = one.get("is_os_volume") and name != one["name"] and NAME.fullmatch(name)
        is_free = (
            one.get("status") == "detached"
            and not one.get("instance_id")
            and not one.get("instances")
            and name not in living
        )
        if is_ours and is_free and (name in ended or now - _seconds(one.get("created_at")) > ORPHAN_SECONDS):
            remove(api, f"/volumes/{quote(str(one['id']))}", {"is_permanent": True})


def remove(api: VerdaApi, path: str, body: Json | None = None) -> None:
    """Delete an object that is not a machine. A failure is only logged, because the next sweep repeats it."""
    try:
        api.request("DELETE", path, body=body, missing_is_none=True)
    except SkywardError as error:
        log.warning("Verda keeps %s for now: %s", path, error)


def _seconds(moment: object) -> float:
    """Return a moment of Verda's in seconds since 1970; now if it is unreadable, so that nothing looks old."""
    with contextlib.suppress(ValueError):
        read = datetime.fromisoformat(str(moment))
        return (read if read.tzinfo else read.replace(tzinfo=UTC)).timestamp()
    return time.time()
