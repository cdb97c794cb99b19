"""The SSH link to one machine: connect, reconnect, notice the loss, drop; and the thread on which asyncssh works.

Part of `ssh_connection.py`, which describes the states.
"""

# ruff: noqa: ASYNC109  deadlines span several awaits
# ruff: noqa: ASYNC240  small local files are read before the first packet
from __future__ import annotations

import asyncio
import concurrent.futures
import logging
import os
import socket
import threading
from collections.abc import AsyncIterator, Awaitable, Callable, Coroutine, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from types import TracebackType
from typing import Any, Self

import asyncssh  # noqa: TID253  a part of ssh_connection.py
from asyncssh.public_key import get_default_public_key_algs  # noqa: TID253

from skyward_core.concurrency.backoff import Backoff
from skyward_core.concurrency.threads import LoopThread, PlainExecutor
from skyward_core.errors import BadRequest, ConnectionLost, CredentialsError, HostKeyChanged, Unreachable
from skyward_core.machines.instances import Endpoint
from skyward_core.transport.proxy_command import Proxy
from skyward_core.wire.private_folders import NotPrivate, refuse_writers

CIPHERS = "^aes128-gcm@openssh.com,aes256-gcm@openssh.com"
"""Preferred where ~/.ssh/config has no opinion: with AES in the processor two to three times faster than chacha20
(shared/facts/testbed.md, section 3).
"""
NOT_CONNECTED = "not connected yet"
NO_FORWARDING = (
    "refuses to forward ports (AllowTcpForwarding no, PermitOpen, or a key with `restrict` or `no-port-forwarding`): a"
    " pool reaches its nodes through one. Set `AllowTcpForwarding yes` in its sshd_config"
)
OPEN_PROHIBITED = 1  # "administratively prohibited", RFC 4254, 5.1
FIRST_PAUSE_SECONDS, LONGEST_PAUSE_SECONDS = 0.05, 1.0
# the kernel repeats a lost SYN after 1, 3, 7 s: a new attempt finds a machine that has just started sooner
FIRST_DIAL_SECONDS, LONGEST_DIAL_SECONDS = 3.0, 15.0
LOGIN_SECONDS = 30.0  # an sshd that looks up names without a name server answers after 10 to 20 s
CLOSE_SECONDS = 1.0
VERDICTS = (
    asyncssh.PermissionDenied,
    asyncssh.HostKeyNotVerifiable,
    asyncssh.KeyExchangeFailed,
    asyncssh.IllegalUserName,
)
"""Errors by which the machine refuses us, or we refuse the machine: the proxy command is not at fault."""


type LossCallback = Callable[[LoginCallbacks, Exception | None], None]


# Log in over SSH once: options of asyncssh, accepted host keys, jump hosts.
#
# Part of `ssh_connection.py`, which describes the rules.


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
    if endpoint.config is None:
        _refuse_configuration_of_others()
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


def _refuse_configuration_of_others() -> None:
    """Raise BadRequest if another user owns ~/.ssh/config, or may write to it: it names commands.

    OpenSSH does the same. HOME may be another user's, for example after `sudo -E`.
    """
    try:
        path = Path("~/.ssh/config").expanduser()
        refuse_writers(path, path.stat())
    except NotPrivate as error:
        raise BadRequest(
            f"the SSH configuration is refused, as OpenSSH does: {error}. Change its owner or mode, or name a file with"
            " config="
        ) from error
    except (OSError, RuntimeError):
        return  # there is none, or no home


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


class SSHLink:
    """The present connection to a machine, or why there is none, and the proxy command that carries it. To be used on
    the loop's thread only.

    `on_lost` is called once for each loss, with the reason, and must not wait.
    """

    def __init__(self, endpoint: Endpoint, keepalive: tuple[float, int], on_lost: Callable[[str], None] | None) -> None:
        self.ssh: asyncssh.SSHClientConnection | None = None
        self.lost = NOT_CONNECTED
        """Why there is no connection; empty while there is one."""
        self._pinned = host_key_of(endpoint)
        self._endpoint = endpoint
        self._keepalive = keepalive
        self._on_lost = on_lost
        self._dialling = asyncio.Lock()
        self._proxy: Proxy | None = None  # of the present connection, or of the one that is being made
        self._ending_proxies: set[asyncio.Task[None]] = set()

    @property
    def host_key(self) -> str | None:
        """The pinned host key as in a `.pub` file, or None before one is known."""
        return key_text(self._pinned) if self._pinned else None

    async def connect(self, timeout: float, grace: float, *, anew: bool, then: Callable[[], Awaitable[None]]) -> None:
        """Connect and await `then`, trying again until `timeout`; on a living link do nothing unless `anew`.

        Raises as `SSHConnection.connect` does.
        """
        async with self._dialling:
            if self.ssh and not anew:
                return
            await self.drop("left for a new one")
            options = await login_options(self._endpoint, *self._keepalive)
            started = asyncio.get_running_loop().time()
            answered_at: float | None = None
            refused_at: float | None = None
            problem: BaseException | None = None
            async for left, patience in attempts(started, timeout):
                try:
                    await self._dial(options, patience, min(left, LOGIN_SECONDS))
                    await then()
                    return
                except asyncssh.PermissionDenied as error:
                    refused_at = refused_at or asyncio.get_running_loop().time()
                    if (
                        asyncio.get_running_loop().time() - (refused_at if self._endpoint.proxy_command else started)
                        >= grace
                    ):
                        raise CredentialsError(
                            f"{self._endpoint} refuses our keys: {error}. Check the user, the key and the agent."
                        ) from error
                    problem = error
                except HostKeyChanged as error:
                    answered_at = answered_at or asyncio.get_running_loop().time()
                    if (
                        not grace
                        or asyncio.get_running_loop().time() - answered_at >= self._endpoint.host_key_grace_seconds
                    ):
                        raise
                    problem = error
                except (asyncssh.HostKeyNotVerifiable, asyncssh.KeyExchangeFailed, asyncssh.IllegalUserName) as error:
                    raise Unreachable(
                        f"{self._endpoint}, or a jump host before it, cannot be trusted: {error}"
                    ) from error
                except asyncssh.ChannelOpenError as error:
                    if error.code == OPEN_PROHIBITED:  # by the jump host: only it opens channels here
                        raise Unreachable(f"the jump host before {self._endpoint} {NO_FORWARDING}") from error
                    problem = error
                except socket.gaierror as error:
                    if error.errno == socket.EAI_NONAME:
                        raise Unreachable(f"there is no host named {self._endpoint.host}") from error
                    problem = error
                except (_SilenceError, TimeoutError) as error:  # the last attempt may be too short for an answer
                    problem = problem or error
                except (asyncssh.Error, asyncssh.ChannelListenError, OSError) as error:
                    problem = error
                await self.drop("its forwards could not be opened")
            raise Unreachable(
                f"no SSH connection to {self._endpoint} within {timeout:g} s; the last try ended with:"
                f" {_words(problem)}"
            ) from problem

    def living(self) -> asyncssh.SSHClientConnection:
        """Return the present connection; raises Unreachable or ConnectionLost if there is none."""
        if self.ssh is None:
            kind = Unreachable if self.lost == NOT_CONNECTED else ConnectionLost
            raise kind(f"no SSH connection to {self._endpoint}: {self.lost}")
        return self.ssh

    async def drop(self, why: str) -> None:
        """Close the present connection, if there is one."""
        ssh, self.ssh = self.ssh, None
        if ssh is None:
            return
        self.lost = why
        ssh.close()
        try:
            async with asyncio.timeout(CLOSE_SECONDS):
                await ssh.wait_closed()
        except TimeoutError:  # data that is not sent yet is lost
            ssh.abort()
            await ssh.wait_closed()
        self._release_proxy()

    async def close(self) -> None:
        """Drop the connection and wait until all proxies have ended."""
        await self.drop("closed")
        if self._ending_proxies:
            await asyncio.wait(self._ending_proxies)

    async def _dial(self, options: dict[str, Any], dial_seconds: float, login_seconds: float) -> None:
        """One attempt, through the proxy command if there is one: `dial_seconds` for the machine to answer,
        `login_seconds` for all of it.

        Raises what the proxy refuses for good. Any other failure includes the proxy's last words, unless the machine
        itself refuses us.
        """
        if self._endpoint.proxy_command is None:
            await self._log_in(options, dial_seconds, login_seconds)
            return
        proxy = self._proxy = await Proxy.start(self._endpoint.proxy_command)
        try:
            await self._log_in(
                options | {"sock": proxy.socket, "tunnel": None, "proxy_command": None}, dial_seconds, login_seconds
            )
        except BaseException as error:
            self._proxy = None
            await self._end_now(proxy)
            if not isinstance(error, asyncssh.Error | OSError) or isinstance(error, VERDICTS):
                raise
            if (verdict := proxy.verdict()) is not None:
                raise verdict from error
            if words := proxy.last_words():
                raise ConnectionError(words) from error
            raise _SilenceError(f"{_words(error)}; the command that leads there said nothing") from error

    async def _log_in(self, options: dict[str, Any], dial_seconds: float, login_seconds: float) -> None:
        ssh, callbacks = await log_in(
            options, self._endpoint, self._pinned, self._note_loss, dial_seconds, login_seconds
        )
        self._pinned = self._pinned or ssh.get_server_host_key()
        self.ssh, self.lost = ssh, ""
        if ssh.is_closed():
            self._note_loss(callbacks, None)

    def _note_loss(self, callbacks: LoginCallbacks, error: Exception | None) -> None:
        """Called when a connection ends. Ignores any but the present one."""
        if self.ssh is None or callbacks.ssh is not self.ssh:
            return
        self.ssh, self.lost = None, _words(error) if error else "the machine closed it"
        self._release_proxy()
        if self._on_lost:
            self._on_lost(self.lost)

    def _release_proxy(self) -> None:
        """End the proxy of a connection that has ended, in the background."""
        proxy, self._proxy = self._proxy, None
        if proxy is not None:
            self._end(proxy)

    def _end(self, proxy: Proxy) -> asyncio.Task[None]:
        ending = asyncio.ensure_future(proxy.end())
        self._ending_proxies.add(ending)
        ending.add_done_callback(self._ending_proxies.discard)
        return ending

    async def _end_now(self, proxy: Proxy) -> None:
        """End a proxy whose connection has failed.

        If this is cancelled, the proxy still ends, and `close` waits for it.
        """
        await asyncio.wait([self._end(proxy)])


class _SilenceError(ConnectionError):
    """An attempt through a proxy command has failed without a message of the command."""


async def attempts(started: float, timeout: float) -> AsyncIterator[tuple[float, float]]:
    """Yield (seconds left, seconds to wait for an answer) for each attempt, with a pause between them that
    grows; at least one.
    """
    clock = asyncio.get_running_loop().time
    pauses = Backoff(FIRST_PAUSE_SECONDS, LONGEST_PAUSE_SECONDS, 1.6).pauses()
    for patience in Backoff(FIRST_DIAL_SECONDS, LONGEST_DIAL_SECONDS, 1.5).pauses():
        left = max(0.01, started + timeout - clock())
        yield left, min(left, patience)
        left = started + timeout - clock()
        if left <= 0:
            return
        await asyncio.sleep(min(next(pauses), left))


def _words(error: BaseException | None) -> str:
    return (
        "no answer"
        if error is None or (isinstance(error, TimeoutError) and not str(error))
        else str(error) or type(error).__name__
    )


class Loop:
    """A thread that runs an asyncio loop, for one connection or many. The code that makes it closes it."""

    def __init__(self) -> None:
        self._loop = asyncio.new_event_loop()
        # teardown also runs when the interpreter ends, and asyncio's own executor accepts no work by then
        self._loop.set_default_executor(PlainExecutor("skyward-ssh-work"))
        self._lock = threading.Lock()
        self._closed = False
        self._thread = LoopThread("skyward-ssh", partial(_turn, self._loop))
        try:
            self._thread.start()
        except RuntimeError:
            self._loop.close()
            raise

    def call[T](self, coroutine: Coroutine[Any, Any, T], timeout_seconds: float | None = None) -> T:
        """Run a coroutine on the loop and return its result; raises TimeoutError, with the coroutine cancelled, when it
        takes longer.
        """
        with self._lock:
            if self._closed or self._thread.is_current:
                coroutine.close()
                raise Unreachable(
                    "the SSH loop is closed"
                    if self._closed
                    else "a callback of an SSH connection must not wait for SSH"
                )
            future = asyncio.run_coroutine_threadsafe(coroutine, self._loop)
        try:
            return future.result(timeout_seconds)
        except concurrent.futures.CancelledError:
            raise ConnectionLost("the SSH connection was closed meanwhile") from None
        finally:
            future.cancel()

    def close(self) -> None:
        """Cancel all coroutines and end the thread. Idempotent."""
        with self._lock:
            first, self._closed = not self._closed, True
        if first:
            self._loop.call_soon_threadsafe(self._loop.stop)
        self._thread.join()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()


def _turn(loop: asyncio.AbstractEventLoop) -> None:
    """Run the loop. Refers to the loop only, so that an abandoned `Loop` can be collected."""
    if loop.is_closed():  # it has failed while it ended
        return
    log = logging.getLogger("asyncssh")
    if log.level == logging.NOTSET:
        # it logs each connection and channel at INFO, into the task logs of orchestrators
        log.setLevel(logging.WARNING)
    asyncio.set_event_loop(loop)
    try:
        loop.run_forever()
        loop.run_until_complete(_settle())
        loop.run_until_complete(loop.shutdown_asyncgens())
        loop.run_until_complete(loop.shutdown_default_executor())
    finally:
        asyncio.set_event_loop(None)
        loop.close()


async def _settle() -> None:
    """Cancel all tasks, then let transports close."""
    tasks = asyncio.all_tasks() - {asyncio.current_task()}
    for task in tasks:
        task.cancel()
    await asyncio.gather(*tasks, return_exceptions=True)
    for _ in range(3):
        await asyncio.sleep(0)
