"""Signatures of leases. A lease says to which machines a process logs in, as whom, and by which command: whoever could
alter it could have his own code run.

The opener signs a lease that leads to other machines with a key of its user: SKYWARD_LEASE_KEY, else the file
`lease.key` of the state folder, which is made when it is first needed. Who attaches has the same key, for it is the
same user, or was given it. The path of the SSH key is not signed: it differs from machine to machine, and leads to no
other one.
"""

from __future__ import annotations

import hashlib
import hmac
import json
import logging
import os
import secrets
import stat
from pathlib import Path
from typing import Any

from platformdirs import user_state_path

from skyward_core.errors import BadRequest, CredentialsError
from skyward_core.machines.instances import Lease
from skyward_core.worker.private_folders import make_file

VARIABLE = "SKYWARD_LEASE_KEY"
PURPOSE = b"skyward lease 1\n"
SHORTEST_KEY = 16
_CURE = (
    f"Give both processes the same {VARIABLE}. Else attach with is_trusted=True if nobody else can write to where the"
    " lease comes from, and release with credentials=, the provider itself"
)
_log = logging.getLogger("skyward")


def signed(lease: Lease) -> Lease:
    """Return the lease with a signature; as it is where it leads to this machine alone, or where no key can be kept."""
    if not _leads_elsewhere(lease) and not _asks_elsewhere(lease):
        return lease
    try:
        key = _key(may_make=True)
    except (OSError, RuntimeError, KeyError) as error:  # the latter two: no home
        _log.warning("the lease is not signed, for no key of it can be kept: %s. %s", error, _CURE)
        return lease
    return lease.model_copy(update={"signature": f"{_name_of(key)}:{_mac(key, lease)}"})


def verify(lease: Lease, *, asks_provider: bool = False) -> None:
    """Raise CredentialsError unless the lease leads to this machine alone, where its folders are checked, or is as one
    with our key has signed it.

    `asks_provider` says that its provider is followed too: credentials of this process go to the address that is its
    `endpoint_url`.
    """
    if not _leads_elsewhere(lease) and not (asks_provider and _asks_elsewhere(lease)):
        return
    try:
        key = _key(may_make=False)
    except (OSError, RuntimeError, KeyError) as error:
        raise CredentialsError(
            f"the lease of pool {lease.pool_id} cannot be verified, for there is no key: {error}. {_CURE}"
        ) from error
    name, _, mac = lease.signature.partition(":")
    if not hmac.compare_digest(name.encode(), _name_of(key).encode()):
        what = "is signed with another key" if name else "is not signed"
        raise CredentialsError(f"the lease of pool {lease.pool_id} {what}, and may lead to anybody's machines. {_CURE}")
    if not hmac.compare_digest(mac.encode(), _mac(key, lease).encode()):
        raise CredentialsError(
            f"the lease of pool {lease.pool_id} was altered since it was signed: ask its opener for `pool.lease` again"
        )


def _leads_elsewhere(lease: Lease) -> bool:
    return any(node.instance.endpoint is not None for node in lease.nodes)


def _asks_elsewhere(lease: Lease) -> bool:
    return lease.provider.get("name") != "local"


def _key(*, may_make: bool) -> bytes:
    if text := os.environ.get(VARIABLE):
        if len(text) < SHORTEST_KEY:
            raise BadRequest(
                f"{VARIABLE} is too short to be a secret: at least {SHORTEST_KEY} characters, as `openssl rand -hex 32`"
                " prints them"
            )
        return text.encode()
    place = user_state_path("skyward") / "lease.key"
    if may_make and not place.exists():
        place.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
        make_file(place, secrets.token_bytes(32))
    return _read(place)


def _read(place: Path) -> bytes:
    with open(place, "rb", opener=lambda path, flags: os.open(path, flags | os.O_NOFOLLOW | os.O_NONBLOCK)) as file:
        status = os.fstat(file.fileno())
        if not stat.S_ISREG(status.st_mode) or status.st_uid != os.geteuid() or status.st_mode & 0o077:
            raise PermissionError(
                f"{place} is not this user's alone (user {status.st_uid}, mode {stat.S_IMODE(status.st_mode):04o}):"
                " remove it"
            )
        key = file.read()
    if len(key) < SHORTEST_KEY:
        raise PermissionError(
            f"{place} has {len(key)} bytes, which anybody can guess: remove it, and a new one is made"
        )
    return key


def _name_of(key: bytes) -> str:
    return hmac.new(key, b"name", hashlib.sha256).hexdigest()[:8]


def _mac(key: bytes, lease: Lease) -> str:
    fields: dict[str, Any] = lease.with_key("").model_dump(mode="json", exclude={"signature"})
    return hmac.new(key, PURPOSE + json.dumps(fields, sort_keys=True).encode(), hashlib.sha256).hexdigest()
