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
from skyward_core.providers.verda.api import Json, VerdaApi, id_in
from skyward_core.providers.verda.instances import state_of
from skyward_core.providers.verda.tags import description_of, to_tags
from skyward_core.providers.verda.termination import DISK_PREFIX, delete_all, instances_left

log = logging.getLogger(__name__)

ADDRESS_SECONDS = 600.0
"""How long a machine may take from the creating call to its address."""
POLL_SECONDS, LONGEST_POLL_SECONDS = 1.0, 5.0


def create_machines(session: VerdaApi, orders: Mapping[int, Json]) -> dict[int, str]:
    """Make a machine of each order, by rank; return the ids of those that were made.

    A call whose outcome is unknown is not repeated: its machine is looked for by name. If there is none at all, raises
    the reason.
    """

    def create(order: Json) -> str | SkywardError:
        try:
            return id_in(session.ask("POST", "/instances", body=order), "/instances")
        except SkywardError as error:
            return error

    outcomes = dict(zip(orders, side_by_side(create, list(orders.values()), "skyward-verda"), strict=True))
    made = {rank: outcome for rank, outcome in outcomes.items() if isinstance(outcome, str)}
    failures = {rank: outcome for rank, outcome in outcomes.items() if isinstance(outcome, SkywardError)}
    unsure = {
        rank: error
        for rank, error in failures.items()
        if isinstance(error, ProviderFailed) and not isinstance(error, RateLimited)
    }
    if unsure:
        by_name = {machine["hostname"]: machine["id"] for machine in session.list("/instances")}
        made |= {rank: by_name[name] for rank in unsure if (name := orders[rank]["hostname"]) in by_name}
    if made:
        for rank in failures.keys() - made.keys():
            log.warning("Verda did not make the machine of rank %d: %s", rank, failures[rank])
        return made
    error = next(
        iter([*(error for error in unsure.values() if error.code != "service_unavailable"), *failures.values()])
    )
    if error.code == "service_unavailable":  # what Verda says where it has no machine left
        raise NoCapacity(str(error)).coded(error.code) from error
    raise error


def await_addresses(session: VerdaApi, made: Mapping[int, str]) -> dict[str, Json]:
    """Return the machines, by id, once each has an address or has come to nothing; the latter are ended.

    Raises NoCapacity if none is left.
    """
    up: dict[str, Json] = {}
    failed: dict[str, str] = {}
    deadline = time.monotonic() + ADDRESS_SECONDS
    pauses = Backoff(POLL_SECONDS, LONGEST_POLL_SECONDS).pauses()
    while True:
        listed = {machine["id"]: machine for machine in session.list("/instances")}
        waiting = [machine_id for machine_id in made.values() if machine_id not in up and machine_id not in failed]
        for machine_id in waiting:
            machine = listed.get(machine_id) or session.machine(machine_id)  # the list leaves out what is discontinued
            if machine is None:
                continue
            if state_of(machine) in (InstanceState.STOPPING, InstanceState.GONE):
                failed[machine_id] = machine["status"]
            elif machine.get("ip"):
                up[machine_id] = machine
        if len(up) + len(failed) == len(made):
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
        log.warning("machines at Verda came to nothing: %s", failed)
        left = delete_all(
            session, [machine for machine_id in failed if (machine := session.machine(machine_id)) is not None]
        )
        # neither NoCapacity, which says that there is nothing, nor InstancesLeft, which is `terminate`'s: the next
        # provider is asked
        if left and not up:
            raise ProviderFailed(
                f"none of {len(made)} machines at Verda came up ({failed}): {instances_left(left)}"
            ) from next(iter(left.values()))
        if left:
            log.warning("and could not be deleted: %s", instances_left(left))
    if not up:
        words = list(dict.fromkeys(failed.values()))
        raise NoCapacity(f"none of {len(made)} machines at Verda came up: {', '.join(words)}").coded(words[0])
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
