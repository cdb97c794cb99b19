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
from skyward_core.providers.tagging import MORE_TAGS, TagName
from skyward_core.providers.vastai.boot import joined
from skyward_core.providers.vastai.names import country_of, instance_type_of

LABEL_CHARACTERS = 256
OFF = frozenset({"stopped", "exited", "offline", "unknown", "frozen"})
BROKEN = re.compile(
    r"^error|OCI runtime create failed|Error response from daemon|manifest unknown|pull access denied|repository does"
    r" not exist",
    re.IGNORECASE,
)
"""Status message of a container that will never start."""


def to_instance(row: Row, key: Key) -> Instance | None:
    """Return a container as Instance; None without a label of ours."""
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
    """Return the state of a container.

    STOPPING is what costs money and will not run (again): outbid, exited, without contact to its host, or unable to
    start.
    """
    word = row.get("actual_status")
    if row.get("intended_status") == "stopped" or word in OFF:
        return InstanceState.STOPPING
    if word == "running":
        return InstanceState.RUNNING if row.get("cur_state") in (None, "running") else InstanceState.STOPPING
    return InstanceState.STOPPING if BROKEN.search(str(row.get("status_msg") or "")) else InstanceState.PENDING


def address_of(row: Row) -> tuple[str, int] | None:
    """Return host and port for port 22 of a container; None until its host has mapped it.

    Vast.ai puts spaces around the address.
    """
    host = str(row.get("public_ipaddr") or "").strip()
    ports = (row.get("ports") or {}).get("22/tcp") or []
    return (host, int(ports[0]["HostPort"])) if host and ports else None


def tags_of(row: Row) -> dict[str, str] | None:
    """Return the tags of a container; None if its label is not one of ours."""
    pairs: Any = row.get("extra_env") or []  # pairs in a list, or an object
    environment = cast("dict[str, str]", dict(pairs))
    return LABELS.unpack(row.get("label"), {MORE_TAGS: joined(environment, MORE_TAGS)})


def _quoted(text: str) -> str:
    """Return a text with percent codes for all but letters, digits and "-._~"."""
    return quote(text, safe="")


LABELS = TagName(":", LABEL_CHARACTERS, "a label of Vast.ai", _quoted, unquote)
"""Its word for pool and rank is also the machine's id, which we choose: no container needs to know its number."""
