"""Signatures of leases. A lease names the machines, users and commands of logins, so a forged lease could run code.

The owner signs a lease of machines over SSH with a key of its user: SKYWARD_LEASE_KEY, else a key that is derived from
SKYWARD_SECRET_KEY (`sealing.py`), else the file `lease.key` of the state folder, which is created at first use. A
process that attaches has the same key, because it runs as the same user, or received the key. The path of the SSH key
is not signed: it differs between machines, and leads to no other machine.
"""

from __future__ import annotations

import hashlib
import hmac
import json
import logging
import os
from typing import Any

from skyward_core.errors import BadRequest, CredentialsError, LeaseTampered
from skyward_core.machines.instances import Lease
from skyward_core.machines.sealing import secret_keys
from skyward_core.machines.user_keys import SHORTEST_KEY, derived, file_key, name_of

VARIABLE = "SKYWARD_LEASE_KEY"
FILE = "lease.key"
PURPOSE = b"skyward lease 1\n"
SIGNING = b"skyward signing 1"
_CURE = (
    f"Give both processes the same {VARIABLE}, or the same SKYWARD_SECRET_KEY. Else attach with is_trusted=True if no"
    " other user can write to the source of the lease, and release with credentials=, the provider itself"
)
_log = logging.getLogger("skyward")


def signed(lease: Lease) -> Lease:
    """Return the lease with a signature; unchanged if it names only this machine, or if no key can be stored."""
    if not _leads_elsewhere(lease) and not _asks_elsewhere(lease):
        return lease
    try:
        key = _key_to_sign()
    except (OSError, RuntimeError, KeyError) as error:  # the latter two: the user has no home
        _log.warning("the lease is not signed, because its key cannot be stored: %s. %s", error, _CURE)
        return lease
    return lease.model_copy(update={"signature": f"{name_of(key)}:{_mac(key, lease)}"})


def verify(lease: Lease, *, asks_provider: bool = False) -> None:
    """Raise CredentialsError unless the lease names only this machine, or has a valid signature with our key.

    It is LeaseTampered if one of our keys has signed another lease. A lease that is not signed and names only this
    machine passes: there the folders are checked instead. With `asks_provider` the provider of the lease is used too:
    this process's credentials go to the address in its `endpoint_url`.
    """
    if not lease.signature and not _leads_elsewhere(lease) and not (asks_provider and _asks_elsewhere(lease)):
        return
    try:
        keys = _keys_to_verify()
    except (OSError, RuntimeError, KeyError) as error:
        raise CredentialsError(
            f"the lease of pool {lease.pool_id} cannot be verified, because there is no key: {error}. {_CURE}"
        ) from error
    name, _, mac = lease.signature.partition(":")
    named = [key for key in keys if name_of(key) == name]
    if not named:
        what = "is signed with another key" if name else "is not signed"
        raise CredentialsError(
            f"the lease of pool {lease.pool_id} {what}, and may name any other user's machines. {_CURE}"
        )
    if not any(hmac.compare_digest(mac.encode(), _mac(key, lease).encode()) for key in named):
        raise LeaseTampered(
            f"the lease of pool {lease.pool_id} was changed after it was signed: get `pool.lease` from its owner again"
        )


def _leads_elsewhere(lease: Lease) -> bool:
    return any(node.instance.endpoint is not None for node in lease.nodes)


def _asks_elsewhere(lease: Lease) -> bool:
    return lease.provider.get("name") != "local"


def _keys_to_verify() -> list[bytes]:
    """Return all keys whose signatures this process accepts. Raises BadRequest; without any, as `_lease_key`."""
    keys = _derived_keys()
    try:
        keys.append(_lease_key(may_make=False))
    except (OSError, RuntimeError, KeyError):
        if not keys:
            raise
    return keys


def _key_to_sign() -> bytes:
    derived_keys = [] if os.environ.get(VARIABLE) else _derived_keys()
    return derived_keys[0] if derived_keys else _lease_key(may_make=True)


def _derived_keys() -> list[bytes]:
    return [derived(key, SIGNING) for key in secret_keys()]


def _lease_key(*, may_make: bool) -> bytes:
    if text := os.environ.get(VARIABLE):
        if len(text) < SHORTEST_KEY:
            raise BadRequest(
                f"{VARIABLE} is too short to be a secret: at least {SHORTEST_KEY} characters, as `openssl rand -hex 32`"
                " prints them"
            )
        return text.encode()
    return file_key(FILE, may_make=may_make)


def _mac(key: bytes, lease: Lease) -> str:
    fields: dict[str, Any] = lease.with_key("").model_dump(mode="json", exclude={"signature"})
    return hmac.new(key, PURPOSE + json.dumps(fields, sort_keys=True).encode(), hashlib.sha256).hexdigest()
