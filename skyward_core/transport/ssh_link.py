"""The SSH link to one machine: connect, reconnect, notice the loss, drop.

Part of `ssh_connection.py`, which describes the states.
"""

from __future__ import annotations

# ruff: noqa: ASYNC109  deadlines span several awaits
import asyncio
import socket
from collections.abc import AsyncIterator, Awaitable, Callable
from typing import Any

import asyncssh  # noqa: TID253  a part of ssh_connection.py

from skyward_core.concurrency.backoff import Backoff
from skyward_core.errors import ConnectionLost, CredentialsError, HostKeyChanged, Unreachable
from skyward_core.machines.instances import Endpoint
from skyward_core.transport.proxy_command import Proxy
from skyward_core.transport.ssh_login import LoginCallbacks, host_key_of, key_text, log_in, login_options

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
