"""Keys of one user in files of the state folder: created at first use, and refused if another user may know them."""

from __future__ import annotations

import hashlib
import hmac
import os
import secrets
import stat
from pathlib import Path

from platformdirs import user_state_path

from skyward_core.worker.private_folders import make_file

SHORTEST_KEY = 16
KEY_BYTES = 32


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
        place.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
        make_file(place, secrets.token_bytes(KEY_BYTES))
    return _read(place)


def name_of(key: bytes) -> str:
    """Return eight characters that tell keys apart and say nothing about the key."""
    return hmac.new(key, b"name", hashlib.sha256).hexdigest()[:8]


def derived(key: bytes, purpose: bytes) -> bytes:
    """Return the key of 32 bytes for one purpose: the others cannot be computed from it."""
    return hmac.new(key, purpose, hashlib.sha256).digest()


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
