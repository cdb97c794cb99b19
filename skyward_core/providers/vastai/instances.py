"""Containers of Vast.ai as `Instance`: state, address and the label that holds our tags."""

from __future__ import annotations

import re
from typing import Any, cast
from urllib.parse import quote, unquote

from skyward_core.machines.instances import Endpoint, Instance, InstanceState
from skyward_core.providers import userdata
from skyward_core.providers._http import Row
from skyward_core.providers.base import LAUNCH_TAG, POOL_TAG, RANK_TAG
from skyward_core.providers.ssh_keys import Key, host_key
from skyward_core.providers.tagging import TagName
from skyward_core.providers.vastai.names import country_of, instance_type_of

LABEL_CHARACTERS = 256
OFF = frozenset({"stopped", "exited", "offline", "unknown", "frozen"})
BROKEN = re.compile(
    r"^error|OCI runtime create failed|Error response from daemon|manifest unknown|pull access denied|repository does"
    r" not exist",
    re.IGNORECASE,
)
"""What a container that will never start says of itself before it runs."""


def to_instance(row: Row, key: Key) -> Instance | None:
    """Read a container; None for one without a label of ours."""
    tags = tags_of(row)
    if tags is None:
        return None
    address, is_spot, price = address_of(row), bool(row.get("is_bid")), float(row.get("dph_total") or 0)
    return Instance(
        id=str(row["id"]),
        provider="vastai",
        pool_id=tags[POOL_TAG],
        rank=int(tags[RANK_TAG]),
        state=state_of(row),
        region=country_of(row),
        instance_type=instance_type_of(row),
        is_spot=is_spot,
        price_per_hour=price,
        on_demand_price_per_hour=None if is_spot else price,
        ip=None if address is None else address[0],
        tags=tags,
        directory=userdata.directory_of(LABELS.machine(tags)),
        endpoint=None if address is None else _endpoint(*address, tags[LAUNCH_TAG], key),
    )


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
    """What is paid for and will not run (again) is STOPPING: outbid, exited, without a sign of its host, or unable to
    start.
    """
    word = row.get("actual_status")
    if row.get("intended_status") == "stopped" or word in OFF:
        return InstanceState.STOPPING
    if word == "running":
        return InstanceState.RUNNING if row.get("cur_state") in (None, "running") else InstanceState.STOPPING
    return InstanceState.STOPPING if BROKEN.search(str(row.get("status_msg") or "")) else InstanceState.PENDING


def address_of(row: Row) -> tuple[str, int] | None:
    """Where port 22 of a container is reached; None until its host has mapped it.

    The address is told with spaces around it.
    """
    host = str(row.get("public_ipaddr") or "").strip()
    ports = (row.get("ports") or {}).get("22/tcp") or []
    return (host, int(ports[0]["HostPort"])) if host and ports else None


def tags_of(row: Row) -> dict[str, str] | None:
    """Read the tags of a container; None if its label is none of ours."""
    told: Any = row.get("extra_env") or []  # pairs in a list, or an object
    return LABELS.unpack(row.get("label"), cast("dict[str, str]", dict(told)))


def _quoted(text: str) -> str:
    """Write a text with per cent signs for what is no letter, digit or one of "-._~"."""
    return quote(text, safe="")


LABELS = TagName(":", LABEL_CHARACTERS, "a label of Vast.ai", _quoted, unquote)
"""Its word for pool and rank is also what a machine calls itself, told to it by us: no container needs to know its
number for that.
"""
