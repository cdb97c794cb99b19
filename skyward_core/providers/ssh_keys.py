"""How we log in to machines that a cloud makes for us: our SSH key, and the host keys of machines that do not exist
yet.

A machine is given its host key with its user data, so that the client knows whom to expect before anybody answers. The
key is derived from ours and from the token of the launch, a tag of the machine: every process that has our key, the one
that attaches or sweeps as well, derives the same one and nothing needs to be kept. All machines of one creating call
share it.
"""

from __future__ import annotations

import base64
import hashlib
import hmac
import importlib
import textwrap
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from platformdirs import user_state_path

from skyward_core.errors import BadRequest
from skyward_core.worker.private_folders import make_file

PURPOSE = b"skyward host key of launch "


@dataclass(frozen=True, slots=True)
class Key:
    """Our SSH key: `path` of the private one, and the public one as in a `.pub` file, without comment."""

    path: Path
    public: str


@dataclass(frozen=True, slots=True)
class HostKey:
    """A machine's own key. `private` is in OpenSSH's format and goes nowhere but into the machine's user data."""

    private: str
    public: str

    def __repr__(self) -> str:
        return f"HostKey(public={self.public!r})"


def our_key(path: str | None = None) -> Key:
    """Return the key at a path, or the one of this user, which is made when it is first asked for.

    A key of one's own is an OpenSSH private key without passphrase. Raises BadRequest for what is none, and where none
    can be made.
    """
    try:
        place = (
            Path(path).expanduser().absolute()
            if path is not None
            else user_state_path("skyward") / "ssh" / "id_ed25519"
        )
    except RuntimeError as error:
        raise BadRequest(f"there is no such place as {path}: {error}") from error
    if path is None and not place.exists():
        try:
            _make(place)
        except OSError as error:
            raise BadRequest(
                f"the SSH key {place} cannot be made: {error}; name one of your own with ssh_key="
            ) from error
    return Key(place, _public(_load(place)))


def host_key(launch: str, key: Key) -> HostKey:
    """Return the host key of the machines of a launch: the same each time, to the letter, and not to be told without
    our private key.

    A creating call that is tried again under the same token must ask for the same, user data included (AWS:
    IdempotentParameterMismatch).
    """
    serialization = _serialization()
    ed25519 = importlib.import_module("cryptography.hazmat.primitives.asymmetric.ed25519")
    secret = _load(key.path).private_bytes(
        serialization.Encoding.DER, serialization.PrivateFormat.PKCS8, serialization.NoEncryption()
    )
    seed = hmac.new(secret, PURPOSE + launch.encode(), hashlib.sha256).digest()
    private = ed25519.Ed25519PrivateKey.from_private_bytes(seed)
    return HostKey(_same_text(seed, private.public_key().public_bytes_raw()), _public(private))


def _make(place: Path) -> None:
    """Make our key. Two processes may do so at once: that of one of them stays, and whole."""
    place.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
    private = importlib.import_module("cryptography.hazmat.primitives.asymmetric.ed25519").Ed25519PrivateKey.generate()
    make_file(place, _text(private).encode())


def _load(place: Path) -> Any:
    serialization = _serialization()
    try:
        return serialization.load_ssh_private_key(place.read_bytes(), None)
    except OSError as error:
        raise BadRequest(f"the SSH key {place} cannot be read: {error}") from error
    # a key in a security token, for one
    except (ValueError, TypeError, importlib.import_module("cryptography.exceptions").UnsupportedAlgorithm) as error:
        raise BadRequest(f"{place} is no OpenSSH private key without passphrase: {error}") from error


def _text(private: Any) -> str:
    serialization = _serialization()
    return private.private_bytes(
        serialization.Encoding.PEM, serialization.PrivateFormat.OpenSSH, serialization.NoEncryption()
    ).decode()


def _same_text(seed: bytes, public: bytes) -> str:
    """Return an Ed25519 key in OpenSSH's format (its PROTOCOL.key), which has a random number in it: here that number
    is 0.
    """

    def field(content: bytes) -> bytes:
        return len(content).to_bytes(4) + content

    kind = field(b"ssh-ed25519") + field(public)
    private = bytes(8) + kind + field(seed + public) + field(b"")
    private += bytes(range(1, 1 + -len(private) % 8))
    content = (
        b"openssh-key-v1\0"
        + field(b"none")
        + field(b"none")
        + field(b"")
        + (1).to_bytes(4)
        + field(kind)
        + field(private)
    )
    lines = textwrap.wrap(base64.b64encode(content).decode(), 70)
    return "\n".join(["-----BEGIN OPENSSH PRIVATE KEY-----", *lines, "-----END OPENSSH PRIVATE KEY-----", ""])


def _public(private: Any) -> str:
    serialization = _serialization()
    return (
        private.public_key().public_bytes(serialization.Encoding.OpenSSH, serialization.PublicFormat.OpenSSH).decode()
    )


def _serialization() -> Any:
    return importlib.import_module("cryptography.hazmat.primitives.serialization")
