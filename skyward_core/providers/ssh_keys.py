"""Keys for SSH to rented machines: our own key, and host keys of machines that do not exist yet.

A machine gets its host key in its user data, so the client knows the key before it connects. The host key is derived
from our key and from the launch token, which is a tag of the machine. Every process with our key derives the same one,
also one that attaches or sweeps, so nothing is stored. All machines of one creating call share it.
"""

from __future__ import annotations

import base64
import hashlib
import hmac
import importlib
import os
import textwrap
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from platformdirs import user_state_path

from skyward_core.errors import BadRequest
from skyward_core.machines.instances import Endpoint
from skyward_core.worker.private_folders import make_file

PURPOSE = b"skyward host key of launch "


@dataclass(frozen=True, slots=True)
class Key:
    """Our SSH key: `path` of the private one, and the public one as in a `.pub` file, without comment."""

    path: Path
    public: str


@dataclass(frozen=True, slots=True)
class HostKey:
    """A machine's host key. `private` is in OpenSSH's format and goes only into the machine's user data."""

    private: str
    public: str

    def __repr__(self) -> str:
        return f"HostKey(public={self.public!r})"


def our_key(path: str | None = None) -> Key:
    """Return the key at a path, or this user's key, which is created when it is first needed.

    A key at a path is an OpenSSH private key without passphrase. Raises BadRequest for any other file, and if no key
    can be created.
    """
    try:
        file = (
            Path(path).expanduser().absolute()
            if path is not None
            else user_state_path("skyward") / "ssh" / "id_ed25519"
        )
    except RuntimeError as error:
        raise BadRequest(f"the path {path} cannot be expanded: {error}") from error
    if path is None and not file.exists():
        try:
            _create_key(file)
        except OSError as error:
            raise BadRequest(
                f"the SSH key {file} cannot be created: {error}; name one of your own with ssh_key="
            ) from error
    return Key(file, _public(_load(file)))


def host_key(launch: str, key: Key) -> HostKey:
    """Return the host key of the machines of a launch. It is always the same, and secret without our private key.

    A repeated creating call with the same token must have the same user data (AWS: IdempotentParameterMismatch).
    """
    serialization = _serialization()
    ed25519 = importlib.import_module("cryptography.hazmat.primitives.asymmetric.ed25519")
    secret = _load(key.path).private_bytes(
        serialization.Encoding.DER, serialization.PrivateFormat.PKCS8, serialization.NoEncryption()
    )
    seed = hmac.new(secret, PURPOSE + launch.encode(), hashlib.sha256).digest()
    private = ed25519.Ed25519PrivateKey.from_private_bytes(seed)
    return HostKey(_fixed_text(seed, private.public_key().public_bytes_raw()), _public(private))


def endpoint_of(host: str, port: int, launch: str, key: Key, **more: Any) -> Endpoint:
    """Return where and with which keys root logs in on a machine of a launch."""
    public = host_key(launch, key).public
    return Endpoint(
        host=host, port=port, user="root", key=str(key.path), host_key=public, known_hosts=os.devnull, **more
    )


def _create_key(file: Path) -> None:
    """Create our key. If two processes do so at the same time, one complete key remains."""
    file.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
    private = importlib.import_module("cryptography.hazmat.primitives.asymmetric.ed25519").Ed25519PrivateKey.generate()
    make_file(file, _text(private).encode())


def _load(file: Path) -> Any:
    serialization = _serialization()
    try:
        return serialization.load_ssh_private_key(file.read_bytes(), None)
    except OSError as error:
        raise BadRequest(f"the SSH key {file} cannot be read: {error}") from error
    # for example a key in a security token
    except (ValueError, TypeError, importlib.import_module("cryptography.exceptions").UnsupportedAlgorithm) as error:
        raise BadRequest(f"{file} is no OpenSSH private key without passphrase: {error}") from error


def _text(private: Any) -> str:
    serialization = _serialization()
    return private.private_bytes(
        serialization.Encoding.PEM, serialization.PrivateFormat.OpenSSH, serialization.NoEncryption()
    ).decode()


def _fixed_text(seed: bytes, public: bytes) -> str:
    """Return an Ed25519 key in OpenSSH's format (its PROTOCOL.key), with 0 for its random number."""

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
