"""Log in over SSH once: options of asyncssh, accepted host keys, jump hosts.

Part of `ssh_connection.py`, which describes the rules.
"""

from __future__ import annotations

# ruff: noqa: ASYNC240  small local files are read before the first packet
import asyncio
import os
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import asyncssh  # noqa: TID253  a part of ssh_connection.py
from asyncssh.public_key import get_default_public_key_algs  # noqa: TID253

from skyward_core.errors import BadRequest, CredentialsError, HostKeyChanged
from skyward_core.machines.instances import Endpoint

CIPHERS = "^aes128-gcm@openssh.com,aes256-gcm@openssh.com"
"""Preferred where ~/.ssh/config has no opinion: with AES in the processor two to three times faster than chacha20
(shared/facts/testbed.md, section 3).
"""

type LossCallback = Callable[[LoginCallbacks, Exception | None], None]


def host_key_of(endpoint: Endpoint) -> asyncssh.SSHKey | None:
    """Return the host key that an endpoint names. Raises BadRequest if it cannot be read."""
    try:
        return asyncssh.import_public_key(endpoint.host_key) if endpoint.host_key else None
    except asyncssh.KeyImportError as error:
        raise BadRequest(
            f"the host key of {endpoint} must be text as in a .pub file, not {endpoint.host_key!r}"
        ) from error


def key_text(key: asyncssh.SSHKey) -> str:
    """Return a public key as in a `.pub` file."""
    return key.export_public_key().decode().strip()


async def login_options(endpoint: Endpoint, keepalive_seconds: float, keepalive_count: int) -> dict[str, Any]:
    """Return the arguments of asyncssh.connect, and `jumps`.

    Reads the user's files before the first packet, so that their errors are not the network's.
    """
    named: dict[str, Any] = {"host": endpoint.host, "config": [endpoint.config] if endpoint.config else ()}
    named |= {
        name: value for name, value in (("port", endpoint.port), ("username", endpoint.user)) if value is not None
    }
    try:
        base = await asyncssh.SSHClientConnectionOptions.construct(client_keys=None, **named)
        identities = [os.path.expanduser(str(path)) for path in _listed(base.config.get("IdentityFile"))]
        if endpoint.key:
            keys = asyncssh.load_keypairs([Path(endpoint.key).expanduser()], ignore_encrypted=True)
            if not keys:
                raise CredentialsError(
                    f"the key {endpoint.key} has a passphrase: add it to your agent and leave `key` out"
                )
            named |= {"client_keys": keys, "agent_path": None}
        elif identities:
            # as OpenSSH does
            named |= {"client_keys": [path for path in identities if os.path.exists(path)], "ignore_encrypted": True}
    except (asyncssh.KeyImportError, OSError, ValueError) as error:
        raise BadRequest(f"cannot prepare a connection to {endpoint}: {error}") from error
    # asyncssh says None for "UserKnownHostsFile none" and an empty list where the user has not said anything.
    files = (
        [endpoint.known_hosts]
        if endpoint.known_hosts
        else []
        if base.known_hosts is None
        else _listed(base.known_hosts) or ["~/.ssh/known_hosts"]
    )
    if endpoint.known_hosts and not endpoint.proxy_command and isinstance(base.tunnel, str):
        named["jumps"] = base.tunnel.split(",")
    return named | {
        "known_hosts": [os.path.expanduser(str(path)) for path in files],
        "encryption_algs": () if base.config.get("Ciphers") else CIPHERS,
        "keepalive_interval": keepalive_seconds,
        "keepalive_count_max": keepalive_count,
        "agent_forwarding": False,
        "x11_forwarding": False,
        "connect_timeout": None,
    }


async def log_in(
    options: dict[str, Any],
    endpoint: Endpoint,
    pinned: asyncssh.SSHKey | None,
    on_lost: LossCallback,
    dial_seconds: float,
    login_seconds: float,
) -> tuple[asyncssh.SSHClientConnection, LoginCallbacks]:
    """Connect and log in once: `dial_seconds` for the machine to answer, `login_seconds` for all of it.

    Raises HostKeyChanged if the machine shows another key than the known one, else what asyncssh raises.
    """
    callbacks = LoginCallbacks(
        endpoint, pinned, [path for path in options["known_hosts"] if os.access(path, os.R_OK)], on_lost
    )
    jumps = _JumpHosts(options.get("jumps", ()), options["config"], options["known_hosts"])
    plain = {name: value for name, value in options.items() if name != "jumps"}
    arguments = plain | {
        "known_hosts": callbacks.trusted,
        "client_factory": lambda: callbacks,
        "login_timeout": login_seconds,
    }
    # other kinds of keys stay on offer, so that a machine that has none of this kind differs from a broken one
    if pinned:
        arguments["server_host_key_algs"] = _unique([*pinned.sig_algorithms, *get_default_public_key_algs()])
    deadline = asyncio.get_running_loop().time() + login_seconds
    connecting = asyncio.ensure_future(_connect(arguments, jumps))
    try:
        async with asyncio.timeout(dial_seconds):
            await asyncio.wait(
                [connecting, asyncio.ensure_future(callbacks.answered.wait())], return_when=asyncio.FIRST_COMPLETED
            )
        async with asyncio.timeout_at(deadline):
            ssh = await connecting
    except asyncssh.HostKeyNotVerifiable:
        if callbacks.refused:
            raise HostKeyChanged(callbacks.refused) from None
        raise
    finally:
        callbacks.answered.set()
        if not connecting.done():
            connecting.cancel()
            await asyncio.gather(connecting, return_exceptions=True)
    return ssh, callbacks


class LoginCallbacks(asyncssh.SSHClient):
    """What asyncssh reports of one attempt to connect: when the machine answers, which host key it shows, when and why
    the connection ends.

    `pinned` is the host key that the machine must show; without one, a key of the known_hosts `files`, or else any.
    `on_lost` gets this object and the error.
    """

    def __init__(
        self, endpoint: Endpoint, pinned: asyncssh.SSHKey | None, files: list[str], on_lost: LossCallback
    ) -> None:
        self.answered = asyncio.Event()
        self.refused = ""
        self.ssh: asyncssh.SSHClientConnection | None = None
        self._endpoint = endpoint
        self._pinned = pinned
        self._files = files
        self._on_lost = on_lost
        self._knows_some = False

    def trusted(self, host: str, address: str, port: int | None) -> Sequence[Any]:
        """Return the keys that the machine may show, in the form of asyncssh's `known_hosts`; without any, it may show
        any key.
        """
        if self._pinned:
            found: Sequence[Any] = ([self._pinned], [], [], [], [], [], [])
        elif self._files:
            found = asyncssh.match_known_hosts(asyncssh.read_known_hosts(self._files), host, address, port)
        else:
            found = ([], [], [], [], [], [], [])
        self._knows_some = bool(found[0] or found[1])
        return found

    def connection_made(self, conn: asyncssh.SSHClientConnection) -> None:
        self.ssh = conn
        self.answered.set()

    def validate_host_public_key(self, host: str, addr: str, port: int, key: asyncssh.SSHKey) -> bool:
        """Accept or refuse a key that is not among the trusted ones."""
        if self._knows_some:
            known = key_text(self._pinned) if self._pinned else f"the one in {' or '.join(self._files)}"
            shown = key_text(key)
            self.refused = (
                f"{self._endpoint} shows the host key {shown}, and not the known one, {known}: another machine may be"
                " answering"
            )
        return not self._knows_some

    def connection_lost(self, exc: Exception | None) -> None:
        self._on_lost(self, exc)


@dataclass(frozen=True, slots=True)
class _JumpHosts:
    """Jump hosts, each `[user@]host[:port]` as in ProxyJump, the configuration that names them, and the known_hosts
    files with their keys.
    """

    names: Sequence[str]
    config: Any
    files: Sequence[str]


async def _connect(arguments: dict[str, Any], jumps: _JumpHosts) -> asyncssh.SSHClientConnection:
    """Connect, through the jump hosts if there are any. The connection closes those with itself."""
    last: asyncssh.SSHClientConnection | None = None
    try:
        for name in jumps.names:
            before, last = last, await _connect_jump_host(name, jumps, last)
            last.set_tunnel(before)
        ssh = await asyncssh.connect(**arguments, **({"tunnel": last} if last else {}))
    except BaseException:
        if last is not None:
            last.close()
        raise
    if last is not None:
        ssh.set_tunnel(last)
    return ssh


async def _connect_jump_host(
    name: str, jumps: _JumpHosts, tunnel: asyncssh.SSHClientConnection | None
) -> asyncssh.SSHClientConnection:
    """Connect to a jump host, whose key must be in the named file or, if that has none for it, where the configuration
    says that keys are.
    """
    user, _, place = name.strip().rpartition("@")
    host, _, port = place.rpartition(":") if ":" in place else (place, "", "")
    named: dict[str, Any] = (
        {"host": host, "config": jumps.config}
        | ({"username": user} if user else {})
        | ({"port": int(port)} if port else {})
    )
    usual = (await asyncssh.SSHClientConnectionOptions.construct(client_keys=None, **named)).known_hosts
    files = [] if usual is None else _listed(usual) or [os.path.expanduser("~/.ssh/known_hosts")]
    ours = [path for path in jumps.files if os.access(path, os.R_OK)]

    def trusted(host: str, address: str, port: int | None) -> Sequence[Any]:
        found = asyncssh.match_known_hosts(asyncssh.read_known_hosts(ours), host, address, port)
        if found[0] or found[1]:
            return found
        others = [path for path in files if os.access(str(path), os.R_OK)]
        return asyncssh.match_known_hosts(asyncssh.read_known_hosts(others), host, address, port) if others else found

    return await asyncssh.connect(**named, known_hosts=trusted, tunnel=tunnel or ())


def _listed(value: object) -> list[Any]:
    return [value] if isinstance(value, str) else list(value) if isinstance(value, list | tuple) else []


def _unique(algorithms: list[bytes]) -> list[str]:
    return list(dict.fromkeys(algorithm.decode() for algorithm in algorithms))
