"""Pods of RunPod as `Instance`: state, address, and the name that holds our tags."""

from __future__ import annotations

from typing import cast

from skyward_core.machines.instances import Endpoint, Instance, InstanceState
from skyward_core.machines.offers import Extra, total_of
from skyward_core.providers import userdata
from skyward_core.providers._http import Row
from skyward_core.providers.base import LAUNCH_TAG, POOL_TAG, RANK_TAG
from skyward_core.providers.runpod.offers import ANYWHERE, COMMUNITY, cpu_type, extras_of, gpu_type
from skyward_core.providers.ssh_keys import Key, host_key
from skyward_core.providers.tagging import TagName, from_codes, to_codes

STATES = {
    "PROVISIONING": InstanceState.PENDING,
    "STARTING": InstanceState.PENDING,
    "RUNNING": InstanceState.RUNNING,
    "EXITED": InstanceState.STOPPING,
    "ERROR": InstanceState.STOPPING,
    "TERMINATED": InstanceState.GONE,
}
PRICE_VARIABLE = "SKYWARD_PRICE_PER_HOUR"
"""The catalogue's price of a pod when it was created, in USD. It splits the pod's `cost`; it never replaces it."""
NAME_CHARACTERS = 191
"""The limit of the API's version 1. Version 2 names none."""


def to_instance(row: Row, key: Key) -> Instance | None:
    """Return a pod as Instance; None without a name of ours."""
    tags = _tags(row)
    if tags is None:
        return None
    address, (price, extras) = address_of(row), prices_of(row)
    return Instance(
        id=str(row["id"]),
        provider="runpod",
        pool_id=tags[POOL_TAG],
        rank=int(tags[RANK_TAG]),
        state=state_of(row),
        region=ANYWHERE if row.get("cloud") == COMMUNITY else str(row.get("dataCenterId") or ANYWHERE),
        instance_type=_type(row),
        price_per_hour=price,
        on_demand_price_per_hour=price or None,
        extras_per_hour=extras,
        ip=None if address is None else address[0],
        private_ip=private_ip_of(row),
        tags=tags,
        directory=userdata.directory_of(str(row["id"])),
        endpoint=None if address is None else _endpoint(*address, tags[LAUNCH_TAG], key),
    )


def prices_of(row: Row) -> tuple[float, tuple[Extra, ...]]:
    """Return what a pod costs in an hour without its disk, and its disk; together never more than RunPod's `cost`, if
    that has the disk in it.

    RunPod does not document whether it has (its OpenAPI description of 2026-10 says "cost"). So each pod keeps the
    catalogue's price, which is without disk (PRICE_VARIABLE): `cost` has the disk in it if it is nearer to the sum.
    """
    cost, extras = float(row.get("cost") or 0), extras_of(row.get("disk"))
    disk = total_of(extras)
    catalogue = cast("Row", row.get("env") or {}).get(PRICE_VARIABLE)
    try:
        price = float(str(catalogue))
    except ValueError:
        return cost, extras
    return (cost - disk if abs(cost - price - disk) < abs(cost - price) else cost), extras


def _endpoint(host: str, port: int, launch: str, key: Key) -> Endpoint:
    return Endpoint(
        host=host,
        port=port,
        user="root",
        key=str(key.path),
        host_key=host_key(launch, key).public,
        known_hosts="/dev/null",
        config="/dev/null",
    )


def state_of(row: Row) -> InstanceState:
    """Return the state of a pod. An unknown status is PENDING: neither running nor gone."""
    return STATES.get(str(row.get("status")), InstanceState.PENDING)


def word_of(row: Row) -> str:
    """Return RunPod's word for the state of a pod; for a missing one the word for that."""
    return str(row.get("status") or "TERMINATED")


def _type(row: Row) -> str:
    gpu: Row = row.get("gpu") or {}
    cpu: Row = row.get("cpu") or {}
    if cpu:
        return cpu_type(cpu["id"], int(cpu["vcpuCount"]), float(cpu["memory"]))
    return gpu_type(str(gpu.get("id")), int(gpu.get("count") or 1), str(row.get("cloud")))


def address_of(row: Row) -> tuple[str, int] | None:
    """Return host and port for port 22 of a pod; None until it is mapped.

    The other listed address, `proxy`, carries a terminal and nothing else.
    """
    direct: Row = (row.get("ssh") or {}).get("direct") or {}
    return (str(direct["host"]), int(direct["port"])) if direct.get("host") and direct.get("port") else None


def private_ip_of(row: Row) -> str | None:
    network: Row = row.get("globalNetworking") or {}
    return network.get("ip") if network.get("enabled") else None


def _tags(row: Row) -> dict[str, str] | None:
    """Return the tags of a pod; None if its name is not one of ours."""
    return NAMES.unpack(row.get("name"), cast("Row", row.get("env") or {}))


def _escaped(text: str) -> str:
    """Return a text with only letters, digits and "-", because RunPod documents no other characters of names."""
    return to_codes(text, "A-Za-z0-9-")


NAMES = TagName(".", NAME_CHARACTERS, "a name of RunPod", _escaped, from_codes)
