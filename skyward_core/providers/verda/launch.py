"""One launch at Verda: creating calls, and waiting for addresses."""

from __future__ import annotations

import logging
import time
from collections.abc import Mapping

from skyward_core.concurrency.backoff import Backoff
from skyward_core.concurrency.threads import side_by_side
from skyward_core.errors import (
    NoCapacity,
    ProviderFailed,
    RateLimited,
    SkywardError,
)
from skyward_core.machines.instances import InstanceState
from skyward_core.providers.base import Tags
from skyward_core.providers.verda.api import CAPACITY, Json, VerdaApi, id_in
from skyward_core.providers.verda.instances import state_of
from skyward_core.providers.verda.tags import description_of, to_tags
from skyward_core.providers.verda.termination import DISK_PREFIX, delete_all, instances_left

log = logging.getLogger(__name__)

ADDRESS_SECONDS = 600.0
"""How long a machine may take from the creating call to its address."""
POLL_SECONDS, LONGEST_POLL_SECONDS = 1.0, 5.0


def create_machines(api: VerdaApi, orders: Mapping[int, Json]) -> dict[int, str]:
    """Create a machine of each order; return their ids by rank.

    A call with unknown outcome is not repeated: its machine is looked up by name. Raises the error if there is no
    machine.
    """

    def create(order: Json) -> str | SkywardError:
        try:
            return id_in(api.request("POST", "/instances", body=order), "/instances")
        except SkywardError as error:
            return error

    outcomes = dict(zip(orders, side_by_side(create, list(orders.values()), "skyward-verda"), strict=True))
    created = {rank: outcome for rank, outcome in outcomes.items() if isinstance(outcome, str)}
    failures = {rank: outcome for rank, outcome in outcomes.items() if isinstance(outcome, SkywardError)}
    unsure = {
        rank: error
        for rank, error in failures.items()
        if isinstance(error, ProviderFailed) and not isinstance(error, RateLimited)
    }
    if unsure:
        by_name = {machine["hostname"]: machine["id"] for machine in api.list("/instances")}
        created |= {rank: by_name[name] for rank in unsure if (name := orders[rank]["hostname"]) in by_name}
    if created:
        for rank in failures.keys() - created.keys():
            log.warning("Verda did not create the machine of rank %d: %s", rank, failures[rank])
        return created
    error = next(
        iter([*(error for error in unsure.values() if error.code != "service_unavailable"), *failures.values()])
    )
    if error.code == "service_unavailable":  # Verda's code where it has no machine left
        raise NoCapacity(str(error)).coded(error.code).advised(CAPACITY) from error
    raise error


def await_addresses(api: VerdaApi, created: Mapping[int, str]) -> dict[str, Json]:
    """Wait until each machine has an address or has failed. Delete those that failed; return the others by id.

    Raises NoCapacity if no machine is left.
    """
    up: dict[str, Json] = {}
    failed: dict[str, str] = {}
    deadline = time.monotonic() + ADDRESS_SECONDS
    pauses = Backoff(POLL_SECONDS, LONGEST_POLL_SECONDS).pauses()
    while True:
        listed = {machine["id"]: machine for machine in api.list("/instances")}
        waiting = [machine_id for machine_id in created.values() if machine_id not in up and machine_id not in failed]
        for machine_id in waiting:
            machine = listed.get(machine_id) or api.machine(machine_id)  # the list omits discontinued machines
            if machine is None:
                continue
            if state_of(machine) in (InstanceState.STOPPING, InstanceState.GONE):
                failed[machine_id] = machine["status"]
            elif machine.get("ip"):
                up[machine_id] = machine
        if len(up) + len(failed) == len(created):
            break
        if time.monotonic() + (pause := next(pauses)) > deadline:
            failed |= {
                machine_id: f"no address after {ADDRESS_SECONDS:.0f} s"
                for machine_id in waiting
                if machine_id not in up and machine_id not in failed
            }
            break
        time.sleep(pause)
    if failed:
        log.warning("machines at Verda failed: %s", failed)
        left = delete_all(api, [machine for machine_id in failed if (machine := api.machine(machine_id)) is not None])
        # not NoCapacity, because machines are left; not InstancesLeft, because the pool should try its next provider
        if left and not up:
            raise ProviderFailed(
                f"none of {len(created)} machines at Verda got an address ({failed}): {instances_left(left)}"
            ) from next(iter(left.values()))
        if left:
            log.warning("some could not be deleted: %s", instances_left(left))
    if not up:
        words = list(dict.fromkeys(failed.values()))
        raise NoCapacity(f"none of {len(created)} machines at Verda got an address: {', '.join(words)}").coded(words[0])
    return up


def order_of(order: Json, name: str, script_id: str, tags: Tags) -> Json:
    return {
        **order,
        "hostname": name,
        "description": description_of(name),
        "startup_script_id": script_id,
        "os_volume": {"name": DISK_PREFIX + name, **order["os_volume"]},
        "tags": to_tags(tags),
    }
