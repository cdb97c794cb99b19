"""Machines of Verda as `Instance`."""

from __future__ import annotations

from collections.abc import Mapping

from skyward_core.machines.instances import Endpoint, Instance, InstanceState
from skyward_core.machines.offers import Extra, Offer
from skyward_core.providers.base import LAUNCH_TAG, POOL_TAG, RANK_TAG
from skyward_core.providers.ssh_keys import Key, host_key
from skyward_core.providers.userdata import directory_of
from skyward_core.providers.verda.api import Json
from skyward_core.providers.verda.offers import usd

HOST_KEY_SECONDS = 180.0
"""How long after its first answer a machine may show its image's host key.

Its script may finish a minute after sshd answers.
"""
STATES: Mapping[str, InstanceState] = {
    **dict.fromkeys(("ordered", "new", "provisioning", "validating", "pending", "restoring"), InstanceState.PENDING),
    "running": InstanceState.RUNNING,
    **dict.fromkeys(
        ("offline", "starting_hibernation", "hibernating", "error", "no_capacity", "deleting", "notfound"),
        InstanceState.STOPPING,
    ),
    "discontinued": InstanceState.GONE,
}
"""States that are missing here ("unknown") are PENDING: the machine may be billed and is not usable."""


def to_instance(
    machine: Json, tags: dict[str, str], key: Key | None, extras: tuple[Extra, ...], offer: Offer | None = None
) -> Instance:
    """Return a machine as Instance; with the offer of its launch, at that offer's prices."""
    launch, ip = tags.get(LAUNCH_TAG), machine.get("ip")
    price = offer.price_per_hour if offer is not None else usd(machine.get("price_per_hour")) or 0.0
    is_spot = bool(machine.get("is_spot"))
    endpoint = None
    if ip and key is not None and launch is not None:
        endpoint = Endpoint(
            host=ip,
            port=22,
            user="root",
            key=str(key.path),
            host_key=host_key(launch, key).public,
            known_hosts="/dev/null",
            host_key_grace_seconds=HOST_KEY_SECONDS,
        )
    return Instance(
        id=machine["id"],
        provider="verda",
        pool_id=tags[POOL_TAG],
        rank=int(tags[RANK_TAG]),
        state=state_of(machine),
        region=machine["location"],
        instance_type=machine["instance_type"],
        is_spot=is_spot,
        price_per_hour=price,
        on_demand_price_per_hour=offer.on_demand_price_per_hour if offer is not None else None if is_spot else price,
        extras_per_hour=extras,
        ip=ip,
        private_ip=machine.get("private_ip"),
        tags=tags,
        directory=directory_of(machine["hostname"]),
        endpoint=endpoint,
    )


def state_of(machine: Json) -> InstanceState:
    return STATES.get(machine["status"], InstanceState.PENDING)
