"""Signatures of leases. A lease names the machines, users and commands of logins, so a forged lease could run code.

The owner signs a lease of machines over SSH with a key of its user: SKYWARD_LEASE_KEY, else the file `lease.key` of the
state folder, which is created at first use. A process that attaches has the same key, because it runs as the same user,
or received the key. The path of the SSH key is not signed: it differs between machines, and leads to no other machine.
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
    f"Give both processes the same {VARIABLE}. Else attach with is_trusted=True if no other user can write to the"
    " source of the lease, and release with credentials=, the provider itself"
)
_log = logging.getLogger("skyward")


def signed(lease: Lease) -> Lease:
    """Return the lease with a signature; unchanged if it names only this machine, or if no key can be stored."""
    if not _leads_elsewhere(lease) and not _asks_elsewhere(lease):
        return lease
    try:
        key = _key(may_make=True)
    except (OSError, RuntimeError, KeyError) as error:  # the latter two: the user has no home
        _log.warning("the lease is not signed, because its key cannot be stored: %s. %s", error, _CURE)
        return lease
    return lease.model_copy(update={"signature": f"{_name_of(key)}:{_mac(key, lease)}"})


def verify(lease: Lease, *, asks_provider: bool = False) -> None:
    """Raise CredentialsError unless the lease names only this machine, or has a valid signature with our key.

    On this machine the folders are checked instead. With `asks_provider` the provider of the lease is used too: this
    process's credentials go to the address in its `endpoint_url`.
    """
    if not _leads_elsewhere(lease) and not (asks_provider and _asks_elsewhere(lease)):
        return
    try:
        key = _key(may_make=False)
    except (OSError, RuntimeError, KeyError) as error:
        raise CredentialsError(
            f"the lease of pool {lease.pool_id} cannot be verified, because there is no key: {error}. {_CURE}"
        ) from error
    name, _, mac = lease.signature.partition(":")
    if not hmac.compare_digest(name.encode(), _name_of(key).encode()):
        what = "is signed with another key" if name else "is not signed"
        raise CredentialsError(
            f"the lease of pool {lease.pool_id} {what}, and may name any other user's machines. {_CURE}"
        )
    if not hmac.compare_digest(mac.encode(), _mac(key, lease).encode()):
        raise CredentialsError(
            f"the lease of pool {lease.pool_id} was changed after it was signed: get `pool.lease` from its owner again"
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
                f"{place} is not private to this user (user {status.st_uid}, mode {stat.S_IMODE(status.st_mode):04o}):"
                " remove it"
            )
        key = file.read()
    if len(key) < SHORTEST_KEY:
        raise PermissionError(
            f"{place} has {len(key)} bytes, which is too short to be secret: remove it, and a new key is created"
        )
    return key


def _name_of(key: bytes) -> str:
    return hmac.new(key, b"name", hashlib.sha256).hexdigest()[:8]


def _mac(key: bytes, lease: Lease) -> str:
    fields: dict[str, Any] = lease.with_key("").model_dump(mode="json", exclude={"signature"})
    return hmac.new(key, PURPOSE + json.dumps(fields, sort_keys=True).encode(), hashlib.sha256).hexdigest()
