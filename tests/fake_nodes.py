"""Fake machines with real SSH: any number of them in one process, each with its own address.

nodes = FakeNodes(Played(install_seconds=20, has_uv=False), before=slowly(0.3))
nodes.add("fake-0", "127.77.0.1", 22, host_key, login)

A node recognizes the commands of `ssh_transport.SSHTransport` by their text and does not run them. There is no process
and no file, so that only the client's work takes time. Its bootstrap is simulated: phases in its log, a pause for the
installation, then a wait for its settings. `serve` decides what a node does with them. An unknown command is refused and
added to `unknown`.
"""

from __future__ import annotations

import asyncio
import contextlib
import shlex
import threading
from collections.abc import Awaitable, Callable, Coroutine
from dataclasses import dataclass, field
from typing import Any

import asyncssh

from skyward_core.transport import ssh_commands, ssh_transport
from skyward_core.transport import ssh_connection as ssh_files
from skyward_core.wire.settings import NodeSettings

GUARD = "4711"
PHASES_BEFORE, PHASES_AFTER = ("uv", "deps"), ("skyward", "server")

type Before = Callable[[str, "FakeNode"], Awaitable[object]]
"""Awaited before a node obeys a request: "login", "look", "start", "lease", "follow", "read", "lives", "reach", "lead",
"kill", or "put NAME".
"""
type Serve = Callable[["FakeNode", NodeSettings], Awaitable[object]]
"""What a node does with its settings, each time it receives some."""


def slowly(seconds: float) -> Before:
    """Let every login and every command take this much longer, without using the processor."""

    async def wait(what: str, node: FakeNode) -> None:
        if what != "kill":
            await asyncio.sleep(seconds)

    return wait


async def lead(node: FakeNode, settings: NodeSettings) -> None:
    """Log that the head's scheduler listens, although none does."""
    if settings.rank == 0:
        node.say(f"::skyward head {settings.generation} tls://{settings.host}:7700")


@dataclass(frozen=True)
class Played:
    """The behaviour of the nodes.

    `install_seconds` is how long it takes to install the image's packages, the same on each node.
    """

    install_seconds: float = 0.0
    has_uv: bool = True
    sees_others: bool = True
    """Whether nodes can connect to each other."""


@dataclass
class FakeNode:
    """One machine, used on the loop's thread only."""

    id: str
    played: Played
    serve: Serve
    log: list[str] = field(default_factory=list)
    files: dict[str, bytes] = field(default_factory=dict)
    asked: list[str] = field(default_factory=list)
    """The requests that it received, in order; see `Before`."""
    is_started: bool = False
    lives: bool = True
    """Whether its supervisor lives while the machine answers."""
    news: asyncio.Event = field(default_factory=asyncio.Event)
    configured: asyncio.Event = field(default_factory=asyncio.Event)
    tasks: set[asyncio.Task[Any]] = field(default_factory=set)

    def say(self, line: str) -> None:
        """Write a line of its log."""
        self.log.append(line)
        self.news.set()
        self.news = asyncio.Event()

    def write(self, name: str, content: bytes) -> None:
        """Keep a file, under its base name."""
        self.files[name] = content
        if name == "settings.json":
            self.configured.set()

    def start(self) -> None:
        """Start to play the bootstrap; later calls do nothing."""
        if not self.is_started:
            self.is_started = True
            self.spawn(self._boot())

    def spawn(self, work: Coroutine[Any, Any, object]) -> None:
        """Run a coroutine that ends with the node."""
        task = asyncio.ensure_future(work)
        self.tasks.add(task)
        task.add_done_callback(self.tasks.discard)

    async def _boot(self) -> None:
        for phase in PHASES_BEFORE:
            self.say(f"::skyward phase {phase}")
        await asyncio.sleep(self.played.install_seconds)
        for phase in PHASES_AFTER:
            self.say(f"::skyward phase {phase}")
        while True:
            await self.configured.wait()
            self.configured.clear()
            await self.serve(self, NodeSettings.from_json(self.files["settings.json"].decode()))


class FakeNodes:
    """All fake nodes, on their own loop and thread. `close` ends them."""

    def __init__(self, played: Played = Played(), *, before: Before = slowly(0), serve: Serve = lead) -> None:
        self.unknown: list[str] = []
        self.nodes: dict[str, FakeNode] = {}
        self._played = played
        self._before = before
        self._serve = serve
        self._doors: dict[str, asyncssh.SSHAcceptor] = {}
        self._connections: dict[str, list[asyncssh.SSHServerConnection]] = {}
        self._options: dict[tuple[str, str], asyncssh.SSHServerConnectionOptions] = {}
        self._loop = asyncio.new_event_loop()
        self._thread = threading.Thread(target=self._loop.run_forever, name="fake-nodes", daemon=True)
        self._thread.start()

    def add(self, node_id: str, host: str, port: int, host_key: str, login: str) -> int:
        """Start a node with this host key (private, OpenSSH's format), which accepts the login key (public); return its
        port.
        """
        return self.do(self._add(node_id, host, port, host_key, login))

    def end(self, node_id: str) -> None:
        """Cut a node's power."""
        self.do(self._end(node_id))

    def do[T](self, coroutine: Coroutine[Any, Any, T]) -> T:
        """Run a coroutine on the nodes' loop and return its result."""
        return asyncio.run_coroutine_threadsafe(coroutine, self._loop).result(60)

    def close(self) -> None:
        """End all nodes and the loop."""

        async def end() -> None:
            for node_id in list(self.nodes):
                await self._end(node_id)
            tasks = asyncio.all_tasks() - {asyncio.current_task()}
            for task in tasks:
                task.cancel()
            await asyncio.gather(*tasks, return_exceptions=True)
            await self._loop.shutdown_default_executor()

        self.do(end())
        self._loop.call_soon_threadsafe(self._loop.stop)
        self._thread.join()
        self._loop.close()

    async def _add(self, node_id: str, host: str, port: int, host_key: str, login: str) -> int:
        node = self.nodes[node_id] = FakeNode(node_id, self._played, self._serve)
        self._connections[node_id] = []
        self._doors[node_id] = door = await asyncssh.listen(
            host,
            port,
            options=self._options_for(host_key, login),
            server_factory=lambda: _Door(self, node),
            reuse_address=True,
            backlog=16,
        )
        return door.get_port()

    def _options_for(self, host_key: str, login: str) -> asyncssh.SSHServerConnectionOptions:
        """The same for all machines of a launch, because reading keys and making options costs more than listening."""
        if (host_key, login) not in self._options:
            self._options[host_key, login] = asyncssh.SSHServerConnectionOptions(
                server_host_keys=[asyncssh.import_private_key(host_key)],
                authorized_client_keys=asyncssh.import_authorized_keys(login),
                encoding=None,
                allow_scp=False,
            )
        return self._options[host_key, login]

    async def _end(self, node_id: str) -> None:
        node = self.nodes.pop(node_id, None)
        if node is None:
            return
        self._doors.pop(node_id).close()
        for connection in self._connections.pop(node_id):
            connection.abort()
        for task in list(node.tasks):
            task.cancel()
        await asyncio.gather(*node.tasks, return_exceptions=True)

    # ── for its servers and commands ─────────────────────────────────────────────────────────────────────────────────

    async def begin(self, what: str, node: FakeNode) -> None:
        """Record a request to a node, and wait as long as it takes."""
        node.asked.append(what)
        await self._before(what, node)

    def connected(self, node: FakeNode, connection: asyncssh.SSHServerConnection) -> None:
        """Record a new connection."""
        self._connections.setdefault(node.id, []).append(connection)


class _Door(asyncssh.SSHServer):
    """One connection to a node."""

    def __init__(self, nodes: FakeNodes, node: FakeNode) -> None:
        self._nodes = nodes
        self._node = node

    def connection_made(self, conn: asyncssh.SSHServerConnection) -> None:
        self._nodes.connected(self._node, conn)

    async def begin_auth(self, username: str) -> bool:  # type: ignore[override]
        await self._nodes.begin("login", self._node)
        return True

    def session_requested(self) -> _Command:
        return _Command(self._nodes, self._node)

    def connection_requested(self, dest_host: str, dest_port: int, orig_host: str, orig_port: int) -> bool:
        return True

    async def server_requested(self, listen_host: str, listen_port: int) -> asyncssh.SSHListener:  # type: ignore[override]
        await self._nodes.begin("lead", self._node)
        return _Nobody(listen_port)


class _Nobody(asyncssh.SSHListener):
    """Listens at no port of a node: it would be a port of this machine."""

    def __init__(self, port: int) -> None:
        super().__init__()
        self._port = port

    def get_port(self) -> int:
        return self._port

    def close(self) -> None: ...

    async def wait_closed(self) -> None: ...


class _Command(asyncssh.SSHServerSession[bytes]):
    """One command: read all of its input, then do its work."""

    def __init__(self, nodes: FakeNodes, node: FakeNode) -> None:
        self._nodes = nodes
        self._node = node
        self._input: list[bytes] = []
        self._is_whole = asyncio.Event()
        self._task: asyncio.Task[None] | None = None
        self._words: list[str] = []

    def connection_made(self, chan: asyncssh.SSHServerChannel[bytes]) -> None:
        self._channel = chan

    def exec_requested(self, command: str) -> bool:
        words = shlex.split(command)
        # as root: a command in a group with a name
        if words[:3] == ["exec", "sh", "-c"] and words[3] == ssh_commands.LEADER:
            words = shlex.split(words[-1])
        self._words = words
        return True

    def session_started(self) -> None:
        self._task = asyncio.ensure_future(self._run())

    def data_received(self, data: bytes, datatype: int | None) -> None:
        self._input.append(data)

    def eof_received(self) -> bool:
        self._is_whole.set()
        return True

    def connection_lost(self, exc: Exception | None) -> None:
        if self._task is not None:
            self._task.cancel()

    async def _run(self) -> None:
        code = 255
        with contextlib.suppress(OSError, asyncssh.Error):
            try:
                code, said = await self._answer()
                self._channel.write(said.encode())
            finally:
                self._channel.exit(code)

    async def _answer(self) -> tuple[int, str]:
        """Return exit code and output."""
        text, arguments = (self._words[2], self._words[4:]) if self._words[:2] == ["sh", "-c"] else ("", [])
        known = {
            ssh_transport.LOOK: "look",
            ssh_transport.START: "start",
            ssh_transport.LEASE: "lease",
            ssh_transport.FOLLOW: "follow",
            ssh_transport.LIVES: "lives",
            ssh_commands.KILL: "kill",
            'cat -- "$1/$2"': "read",
        }
        what = "reach" if self._words[0] == "timeout" else known.get(text)
        if text == ssh_files.PUT:
            what = f"put {arguments[0].rpartition('/')[2]}"
        if what is None:
            self._nodes.unknown.append(shlex.join(self._words))
            return 127, "this is a fake\n"
        await self._nodes.begin(what, self._node)
        match what:
            case "look":
                has_uv = "uv\n" * self._node.played.has_uv
                return 0, f"guard {GUARD}\nsystem Linux x86_64\nmemory /dev/shm/skyward-0123456789-fake\n{has_uv}"
            case "read":
                content = self._node.files.get(arguments[1])
                return (1, "no such file\n") if content is None else (0, content.decode())
            case "start":
                return await self._start(int(arguments[4]))
            case "follow":
                return await self._follow(int(arguments[2]))
            case "lives":
                return 0, f"::skyward {'lives' if self._node.lives else 'dead'}\n"
            case "reach":
                return (0, "") if self._node.played.sees_others else (124, "")
            case _ if text == ssh_files.PUT:
                return await self._put(what.removeprefix("put "), int(arguments[1]), is_packed=bool(arguments[4]))
            case _:
                return 0, ""

    async def _start(self, size: int) -> tuple[int, str]:
        await self._is_whole.wait()
        if sum(map(len, self._input)) != size:
            return 1, "only a part of the script arrived\n"
        self._node.start()
        return 0, ""

    async def _put(self, name: str, size: int, *, is_packed: bool) -> tuple[int, str]:
        await self._is_whole.wait()
        # RFC 1952: ISIZE comes last
        came = int.from_bytes(b"".join(self._input[-4:])[-4:], "little") if is_packed else sum(map(len, self._input))
        if came != size:
            return 1, "only a part arrived\n"
        self._node.write(name, b"".join(self._input) if name.endswith(".json") else b"")
        return 0, ""

    async def _follow(self, line: int) -> tuple[int, str]:
        sent = line - 1
        while True:
            news = self._node.news
            if lines := self._node.log[sent:]:
                sent += len(lines)
                self._channel.write("".join(f"{line}\n" for line in lines).encode())
            await news.wait()
