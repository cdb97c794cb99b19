"""Signatures of leases and of providers in rows of the ledger, with a key of the user.

A lease names the machines, users and commands of logins, so a forged lease could run code. The row of a pool names its
provider, so a forged row could send credentials to an address of its writer (docs/decisions/0052).

The owner signs a lease of machines over SSH with a key of its user: SKYWARD_LEASE_KEY, else a key that is derived from
SKYWARD_SECRET_KEY, else the file `lease.key` of the state folder, which is created at first use. A
process that attaches has the same key, because it runs as the same user, or received the key. The path of the SSH key
is not signed: it differs between machines, and leads to no other machine.
"""

from __future__ import annotations

import base64
import hashlib
import hmac
import importlib
import json
import logging
import os
import secrets
import stat
from collections.abc import Mapping, Sequence
from enum import StrEnum
from pathlib import Path
from typing import Any

from platformdirs import user_state_path

from skyward_core.errors import BadRequest, CredentialsError, LeaseTampered
from skyward_core.machines.instances import Lease
from skyward_core.wire.private_folders import kept_path, make_file, make_private

SHORTEST_KEY = 16
KEY_BYTES = 32
SECRET_VARIABLE = "SKYWARD_SECRET_KEY"  # noqa: S105 - a name
SECRET_FILE = "secret.key"  # noqa: S105 - a name
VERSION = "1"
NONCE_BYTES = 12
TAG_BYTES = 16
SEALING = b"skyward sealing 1"
HOW_TO_MAKE_ONE = "`openssl rand -base64 32` prints a new one"
CURE = (
    f"Set {SECRET_VARIABLE} to the same key where the pool is opened and here ({HOW_TO_MAKE_ONE}). Without it only this"
    f" machine, and others with the same file {SECRET_FILE} of the state folder, can open what the ledger keeps sealed"
)
VARIABLE = "SKYWARD_LEASE_KEY"
FILE = "lease.key"
PURPOSE = b"skyward lease 1\n"
ROW_PURPOSE = b"skyward provider of a pool 1\n"
SIGNING = b"skyward signing 1"
_CURE = (
    f"Give both processes the same {VARIABLE}, or the same SKYWARD_SECRET_KEY. Else attach with is_trusted=True if no"
    " other user can write to the source of the lease, and release with credentials=, the provider itself"
)
_log = logging.getLogger("skyward")


def key_file(name: str) -> Path:
    """Return the path of a key of this user."""
    return user_state_path("skyward") / name


def file_key(name: str, *, may_make: bool) -> bytes:
    """Return the key in a file of the state folder; with `may_make` it is created if it is missing.

    Raises OSError if the file is missing, cannot be created, or is not private; RuntimeError or KeyError if the user
    has no home.
    """
    place = key_file(name)
    if may_make and not place.exists():
        make_private(place.parent)
        make_file(place, secrets.token_bytes(KEY_BYTES))
    return _read(place)


def name_of(key: bytes) -> str:
    """Return eight characters that tell keys apart and say nothing about the key."""
    return hmac.new(key, b"name", hashlib.sha256).hexdigest()[:8]


def derived(key: bytes, purpose: bytes) -> bytes:
    """Return the key of 32 bytes for one purpose: the others cannot be computed from it."""
    return hmac.new(key, purpose, hashlib.sha256).digest()


def _read(place: Path) -> bytes:
    place = kept_path(place.parent) / place.name
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


# Sealing: what another machine needs to reach a pool is encrypted, and bound to the lease that it belongs to.
#
# The keys are those of SKYWARD_SECRET_KEY, a list with commas: the first one seals, all open. Without it the key is the
# file `secret.key` of the state folder, which is created at first use. AES-256-GCM of `cryptography` encrypts and
# authenticates; docs/decisions/0030 says why it is not Fernet. A sealed text is "1:NAME:TEXT": the name of the key, and
# nonce and ciphertext in base64.


def secret_keys() -> list[bytes]:
    """Return the keys of SKYWARD_SECRET_KEY in their order; none if it is not set.

    Raises BadRequest for one that is no base64 of 32 bytes. The message does not show it.
    """
    text = os.environ.get(SECRET_VARIABLE, "")
    return _keys_in(text) if text else []


def check_secret_key(text: str) -> None:
    """Raise BadRequest if a text from another place, such as an orchestrator's store, cannot be SKYWARD_SECRET_KEY.

    The message does not show it.

    >>> import skyward_core as sky
    >>> sky.check_secret_key("c2t5d2FyZCBza3l3YXJkIHNreXdhcmQgc2t5d2FyZCE=")
    """
    _keys_in(text)


def _keys_in(text: str) -> list[bytes]:
    keys: list[bytes] = []
    for number, part in enumerate(text.split(","), 1):
        try:
            key = base64.b64decode(part.strip().translate(str.maketrans("-_", "+/")), validate=True)
        except ValueError:
            key = b""
        if len(key) != KEY_BYTES:
            raise BadRequest(
                f"{SECRET_VARIABLE}: key {number} is not {KEY_BYTES} bytes in base64: {HOW_TO_MAKE_ONE}. Several keys"
                " are separated by commas; the first one seals, and all open"
            )
        keys.append(key)
    return keys


class KeyRing:
    """Keys that seal and open. Does not show them."""

    def __init__(self, keys: Sequence[bytes]) -> None:
        """Use these keys of 32 bytes or more: the first one seals."""
        self._keys = tuple(keys)

    def __repr__(self) -> str:
        return f"KeyRing({', '.join(map(name_of, self._keys))})"

    @classmethod
    def to_seal(cls) -> KeyRing:
        """Return the keys for sealing; the key file is created if there is neither it nor the variable.

        Raises BadRequest; OSError, RuntimeError or KeyError if the file cannot be used.
        """
        return cls(secret_keys() or [file_key(SECRET_FILE, may_make=True)])

    @classmethod
    def to_open(cls) -> KeyRing:
        """Return all keys of the variable and the file. Raises BadRequest, and CredentialsError if there is none."""
        keys = secret_keys()
        try:
            keys.append(file_key(SECRET_FILE, may_make=False))
        except (OSError, RuntimeError, KeyError) as error:
            if not keys:
                raise CredentialsError(
                    f"{SECRET_VARIABLE} is not set, and the key file {_place()} cannot be used: {error}. {CURE}"
                ) from error
        return cls(keys)

    def seal(self, content: bytes, context: bytes) -> str:
        """Return the content encrypted. Only `unseal` with the same context returns it."""
        key = self._keys[0]
        nonce = secrets.token_bytes(NONCE_BYTES)
        return _joined(name_of(key), nonce + _cipher(key).encrypt(nonce, content, context))

    def unseal(self, text: str, context: bytes) -> bytes:
        """Return what was sealed with this context.

        Raises LeaseTampered if text or context were altered, and CredentialsError if another key has sealed it.
        """
        version, _, rest = text.partition(":")
        name, _, body = rest.partition(":")
        try:
            found = base64.b64decode(body, validate=True)
        except ValueError:
            found = b""
        # base64 has several spellings of some bytes, and only ours is accepted
        if version != VERSION or len(found) < NONCE_BYTES + TAG_BYTES or _joined(name, found) != text:
            raise LeaseTampered("what the ledger keeps sealed is no sealed text, or was altered")
        keys = [key for key in self._keys if name_of(key) == name]
        if not keys:
            raise CredentialsError(f"what the ledger keeps sealed was sealed with another key. {CURE}")
        for key in keys:
            try:
                return _cipher(key).decrypt(found[:NONCE_BYTES], found[NONCE_BYTES:], context)
            except importlib.import_module("cryptography.exceptions").InvalidTag:
                continue
        raise LeaseTampered(
            "what the ledger keeps sealed, or the lease beside it, was altered, or belongs to another pool"
        )


def _place() -> str:
    try:
        return str(key_file(SECRET_FILE))
    except (RuntimeError, KeyError):  # the user has no home
        return SECRET_FILE


def _joined(name: str, content: bytes) -> str:
    return f"{VERSION}:{name}:{base64.b64encode(content).decode()}"


def _cipher(key: bytes) -> Any:
    return importlib.import_module("cryptography.hazmat.primitives.ciphers.aead").AESGCM(derived(key, SEALING))


class Signed(StrEnum):
    """What a signature proves here. The text continues "the lease ..." or "the row ..."."""

    VALID = "is signed with a key of this process"
    NOT = "is not signed"
    WITH_ANOTHER_KEY = "is signed with another key"
    ALTERED = "was changed after it was signed"


def signed(lease: Lease) -> Lease:
    """Return the lease with a signature; unchanged if it names only this machine, or if no key can be stored."""
    if not _leads_elsewhere(lease) and not _asks_elsewhere(lease):
        return lease
    try:
        signature = _signature(PURPOSE, _fields_of(lease))
    except (OSError, RuntimeError, KeyError) as error:  # the latter two: the user has no home
        _log.warning("the lease is not signed, because its key cannot be stored: %s. %s", error, _CURE)
        return lease
    return lease.model_copy(update={"signature": signature})


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
    what = _proven(lease.signature, keys, PURPOSE, _fields_of(lease))
    if what is Signed.ALTERED:
        raise LeaseTampered(f"the lease of pool {lease.pool_id} {what}: get `pool.lease` from its owner again")
    if what is not Signed.VALID:
        raise CredentialsError(
            f"the lease of pool {lease.pool_id} {what}, and may name any other user's machines. {_CURE}"
        )


def sign_provider(pool_id: str, provider: Mapping[str, Any]) -> str:
    """Return a signature of the provider in a pool's row; "" with a warning, if no key can be stored.

    It is bound to the pool, so that it proves nothing in another row.
    """
    try:
        return _signature(ROW_PURPOSE, [pool_id, dict(provider)])
    except (OSError, RuntimeError, KeyError) as error:  # the latter two: the user has no home
        words = "the provider of pool %s is not signed in the ledger, because its key cannot be stored: %s. Only"
        words += " processes whose own settings name the provider can use that row"
        _log.warning(words, pool_id, error)
        return ""


def proven_provider(pool_id: str, provider: Mapping[str, Any], signature: str) -> Signed:
    """Return what the signature of a pool's row proves. Raises BadRequest for a key that is no key."""
    if not signature:
        return Signed.NOT
    try:
        keys = _keys_to_verify()
    except (OSError, RuntimeError, KeyError):
        return Signed.WITH_ANOTHER_KEY
    return _proven(signature, keys, ROW_PURPOSE, [pool_id, dict(provider)])


def _signature(purpose: bytes, content: object) -> str:
    key = _key_to_sign()
    return f"{name_of(key)}:{_mac(key, purpose, content)}"


def _proven(signature: str, keys: Sequence[bytes], purpose: bytes, content: object) -> Signed:
    name, _, mac = signature.partition(":")
    if not name:
        return Signed.NOT
    named = [key for key in keys if name_of(key) == name]
    if not named:
        return Signed.WITH_ANOTHER_KEY
    is_valid = any(hmac.compare_digest(mac.encode(), _mac(key, purpose, content).encode()) for key in named)
    return Signed.VALID if is_valid else Signed.ALTERED


def _fields_of(lease: Lease) -> dict[str, Any]:
    return lease.with_key("").model_dump(mode="json", exclude={"signature"})


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


def _mac(key: bytes, purpose: bytes, content: object) -> str:
    return hmac.new(key, purpose + json.dumps(content, sort_keys=True).encode(), hashlib.sha256).hexdigest()
