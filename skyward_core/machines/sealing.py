"""Sealing: what another machine needs to reach a pool is encrypted, and bound to the lease that it belongs to.

The keys are those of SKYWARD_SECRET_KEY, a list with commas: the first one seals, all open. Without it the key is the
file `secret.key` of the state folder, which is created at first use. AES-256-GCM of `cryptography` encrypts and
authenticates; docs/decisions/0030 says why it is not Fernet. A sealed text is "1:NAME:TEXT": the name of the key, and
nonce and ciphertext in base64.
"""

from __future__ import annotations

import base64
import importlib
import os
import secrets
from collections.abc import Sequence
from typing import Any

from skyward_core.errors import BadRequest, CredentialsError, LeaseTampered
from skyward_core.machines.user_keys import KEY_BYTES, derived, file_key, key_file, name_of

VARIABLE = "SKYWARD_SECRET_KEY"
FILE = "secret.key"
VERSION = "1"
NONCE_BYTES = 12
TAG_BYTES = 16
SEALING = b"skyward sealing 1"
HOW_TO_MAKE_ONE = "`openssl rand -base64 32` prints a new one"
CURE = (
    f"Set {VARIABLE} to the same key where the pool is opened and here ({HOW_TO_MAKE_ONE}). Without it only this"
    f" machine, and others with the same file {FILE} of the state folder, can open what the ledger keeps sealed"
)


def secret_keys() -> list[bytes]:
    """Return the keys of SKYWARD_SECRET_KEY in their order; none if it is not set.

    Raises BadRequest for one that is no base64 of 32 bytes. The message does not show it.
    """
    text = os.environ.get(VARIABLE, "")
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
                f"{VARIABLE}: key {number} is not {KEY_BYTES} bytes in base64: {HOW_TO_MAKE_ONE}. Several keys are"
                " separated by commas; the first one seals, and all open"
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
        return cls(secret_keys() or [file_key(FILE, may_make=True)])

    @classmethod
    def to_open(cls) -> KeyRing:
        """Return all keys of the variable and the file. Raises BadRequest, and CredentialsError if there is none."""
        keys = secret_keys()
        try:
            keys.append(file_key(FILE, may_make=False))
        except (OSError, RuntimeError, KeyError) as error:
            if not keys:
                raise CredentialsError(
                    f"{VARIABLE} is not set, and the key file {_place()} cannot be used: {error}. {CURE}"
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
        return str(key_file(FILE))
    except (RuntimeError, KeyError):  # the user has no home
        return FILE


def _joined(name: str, content: bytes) -> str:
    return f"{VERSION}:{name}:{base64.b64encode(content).decode()}"


def _cipher(key: bytes) -> Any:
    return importlib.import_module("cryptography.hazmat.primitives.ciphers.aead").AESGCM(derived(key, SEALING))
