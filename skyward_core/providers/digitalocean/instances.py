"""Droplets as `Instance`."""

from __future__ import annotations

import os
from collections.abc import Mapping

from skyward_core.machines.instances import Endpoint, Instance, InstanceState
from skyward_core.providers._http import Row
from skyward_core.providers.base import LAUNCH_TAG, POOL_TAG, RANK_TAG
from skyward_core.providers.digitalocean.offers import SPOT_SUFFIX
from skyward_core.providers.ssh_keys import Key, host_key
from skyward_core.providers.tagging import rank_in
from skyward_core.providers.userdata import directory_of


def to_instance(row: Row, tags: Mapping[str, str], key: Key) -> Instance:
    size = row["size"]
    slug = row.get("size_slug") or size["slug"]
    price = float(size.get("price_hourly") or 0.0)
    is_spot = slug.endswith(SPOT_SUFFIX)
    ip, launch = _address(row, "public"), tags.get(LAUNCH_TAG)
    return Instance(
        id=str(row["id"]),
        provider="digitalocean",
        pool_id=tags[POOL_TAG],
        rank=rank_in(tags.get(RANK_TAG, ""), str(row["id"])),
        state=state_of(row),
        region=row["region"]["slug"],
        instance_type=slug.removesuffix(SPOT_SUFFIX),
        is_spot=is_spot,
        price_per_hour=price,
        on_demand_price_per_hour=None if is_spot else price,
        ip=ip,
        private_ip=_address(row, "private"),
        tags=dict(tags),
        directory=directory_of(str(row["id"])),
        endpoint=(
            Endpoint(
                host=ip,
                port=22,
                user="root",
                key=str(key.path),
                host_key=host_key(launch, key).public,
                known_hosts=os.devnull,
            )
            if ip and launch
            else None
        ),
    )


def state_of(row: Row) -> InstanceState:
    """Return the state of a droplet.

    One that is off is billed in full. An unknown status is PENDING, not RUNNING.
    """
    match row["status"]:
        case "active":
            return InstanceState.RUNNING
        case "off" | "archive":
            return InstanceState.STOPPING
        case _:
            return InstanceState.PENDING


def _address(row: Row, kind: str) -> str | None:
    networks = (row.get("networks") or {}).get("v4") or ()
    return next((network["ip_address"] for network in networks if network["type"] == kind), None)


def is_ready(row: Row) -> bool:
    return _address(row, "public") is not None and state_of(row) is not InstanceState.STOPPING
