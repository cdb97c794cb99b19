"""SSH to one machine, against a real SSH server on this machine."""

import asyncio
import gzip
import os
import signal
import socket
import threading
import tracemalloc
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import asyncssh
import pytest

from skyward_core.errors import (
    BadRequest,
    CommandFailed,
    CommandTimedOut,
    ConnectionLost,
    CredentialsError,
    HostKeyChanged,
    Unreachable,
)
from skyward_core.machines.instances import Endpoint
from skyward_core.transport.ssh_commands import Completed
from skyward_core.transport.ssh_connection import FETCH_WINDOW_BYTES, SSHConnection
from tests.waiting import wait_until

MIB = 1 << 20


class _Door(asyncssh.SSHServer):
    """Forwards ports on request; records the users that came."""

    def __init__(self, server: "Server") -> None:
        self.server = server

    def connection_made(self, conn):
        self.server.connections.append(conn)

    def begin_auth(self, username):
        self.server.users.append(username)
        return True

    def connection_requested(self, dest_host, dest_port, orig_host, orig_port):
        return True

    def server_requested(self, listen_host, listen_port):
        return True


class Server:
    """An SSH server with real shells, with its own loop and thread."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.host_key = asyncssh.generate_private_key("ssh-ed25519")
        self.users: list[str] = []
        self.connections: list[asyncssh.SSHServerConnection] = []
        self.children: set[int] = set()
        self.port = 0
        self._listener = None
        self._loop = asyncio.new_event_loop()
        self._thread = threading.Thread(target=self._loop.run_forever, name="ssh-server")
        self._thread.start()

    def start(self, port: int = 0) -> None:
        async def listen():
            return await asyncssh.listen(
                "127.0.0.1",
                port,
                server_factory=lambda: _Door(self),
                server_host_keys=[self.host_key],
                authorized_client_keys=str(self.folder / "authorized_keys"),
                process_factory=self._serve,
                encoding=None,
                allow_scp=False,
                reuse_address=True,
            )

        self._listener = self.do(listen())
        self.port = self._listener.get_port()

    def do(self, coroutine):
        return asyncio.run_coroutine_threadsafe(coroutine, self._loop).result(30)

    def hang_up(self) -> None:
        """End all connections abruptly, as a crash does."""

        async def abort():
            for connection in self.connections:
                connection.abort()
            self.connections.clear()

        self.do(abort())

    def stop(self) -> None:
        async def stop():
            self._listener.close()

        if self._listener:
            self.do(stop())
            self._listener = None
        self.hang_up()

    def close(self) -> None:
        self.stop()

        async def end():
            tasks = asyncio.all_tasks() - {asyncio.current_task()}
            for task in tasks:
                task.cancel()
            await asyncio.gather(*tasks, return_exceptions=True)
            for _ in range(5):
                await asyncio.sleep(0)
            await self._loop.shutdown_default_executor()

        self.do(end())
        self._loop.call_soon_threadsafe(self._loop.stop)
        self._thread.join()
        self._loop.close()

    async def _serve(self, process: asyncssh.SSHServerProcess) -> None:
        child = await asyncio.create_subprocess_exec(
            "sh", "-c", process.command, cwd=self.folder, start_new_session=True,
            stdin=asyncio.subprocess.PIPE, stdout=asyncio.subprocess.PIPE, stderr=asyncio.subprocess.PIPE,
        )  # fmt: skip
        self.children.add(child.pid)
        try:
            copies = [
                asyncio.ensure_future(_copy(child.stdout, process.stdout)),
                asyncio.ensure_future(_copy(child.stderr, process.stderr)),
            ]
            feeding = asyncio.ensure_future(_pour(process, child.stdin))
            ended = asyncio.ensure_future(child.wait())
            await asyncio.wait([feeding, ended], return_when=asyncio.FIRST_COMPLETED)
            if feeding.done() and feeding.exception():
                os.killpg(child.pid, signal.SIGKILL)  # the client sent a signal, or went away
            await asyncio.gather(*copies, ended)
            feeding.cancel()
            await asyncio.wait([feeding])
            if child.returncode < 0:
                process.exit_with_signal(signal.Signals(-child.returncode).name.removeprefix("SIG"))
            else:
                process.exit(child.returncode)
        finally:
            if child.returncode is None:
                os.killpg(child.pid, signal.SIGKILL)
                await child.wait()
            child._transport.close()
            self.children.discard(child.pid)


async def _copy(source, target) -> None:
    try:
        while piece := await source.read(65536):
            target.write(piece)
            await target.drain()
    except (BrokenPipeError, ConnectionResetError, asyncssh.Error):
        pass


async def _pour(process, target) -> None:
    source = process.stdin
    while piece := await source.read(65536):
        try:
            target.write(piece)
            await target.drain()
        except (BrokenPipeError, ConnectionResetError):
            break
    target.close()
    while not process.is_closing():  # the next read raises after a signal
        await source.read(1)
        await asyncio.sleep(0.02)
    raise ConnectionResetError


@pytest.fixture(autouse=True)
def own_home(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Hide the keys, agent and configuration of the user who runs the tests."""
    monkeypatch.setenv("HOME", str(tmp_path))
    monkeypatch.delenv("SSH_AUTH_SOCK", raising=False)
    (tmp_path / ".ssh").mkdir(mode=0o700)


@pytest.fixture
def key(tmp_path: Path) -> str:
    """A key that the server accepts."""
    pair = asyncssh.generate_private_key("ssh-ed25519")
    pair.write_private_key(tmp_path / "id")
    (tmp_path / "authorized_keys").write_bytes(pair.export_public_key())
    return str(tmp_path / "id")


@pytest.fixture
def server(tmp_path: Path, key: str) -> Iterator[Server]:
    server = Server(tmp_path)
    server.start()
    yield server
    server.close()


@pytest.fixture
def endpoint(server: Server, key: str) -> Endpoint:
    return Endpoint(host="127.0.0.1", port=server.port, user="ann", key=key)


@pytest.fixture
def connection(endpoint: Endpoint) -> Iterator[SSHConnection]:
    with SSHConnection(endpoint).connect(30) as connection:
        yield connection


class Echo:
    """A TCP server that sends back what it gets, in capitals."""

    def __init__(self) -> None:
        self._listening = socket.create_server(("127.0.0.1", 0))
        self.port = self._listening.getsockname()[1]
        self._thread = threading.Thread(target=self._serve, name="echo")
        self._thread.start()

    def _serve(self) -> None:
        while True:
            peer, _ = self._listening.accept()
            with peer:
                said = peer.recv(100)
                if said == b"end":
                    return
                peer.sendall(said.upper())

    def close(self) -> None:
        with socket.create_connection(("127.0.0.1", self.port)) as last:
            last.sendall(b"end")
        self._thread.join()
        self._listening.close()


@pytest.fixture
def echo() -> Iterator[Echo]:
    echo = Echo()
    yield echo
    echo.close()


def say(port: int, text: bytes) -> bytes:
    with socket.create_connection(("127.0.0.1", port), timeout=10) as peer:
        peer.sendall(text)
        return peer.recv(100)


def test_a_command_returns_its_exit_code_and_output(connection):
    assert connection.run("echo hello") == Completed(0, "hello\n")
    assert connection.run("echo out of order >&2; exit 3") == Completed(3, "out of order\n")
    assert connection.run("kill -TERM $$").exit_code == -signal.SIGTERM


def test_lines_are_delivered_while_the_command_runs(connection, tmp_path):
    lines = []

    def on_line(line: str) -> None:
        lines.append((line, threading.current_thread()))
        (tmp_path / "go").touch()

    command = "echo grüße; while ! [ -e go ]; do sleep 0.01; done; printf 'two\\r\\nno end'"
    assert connection.run(command, on_line=on_line, timeout_seconds=60).exit_code == 0
    assert lines == [(line, threading.current_thread()) for line in ("grüße", "two", "no end")]


def test_input_of_every_kind_reaches_the_command(connection, tmp_path):
    """A command that writes while it reads does not block, and unread input is no error."""
    (tmp_path / "input").write_bytes(b"from a file")
    large = "0123456789abcde\n" * (5 * MIB // 16)
    for stdin, output in ((b"bytes", "bytes"), (tmp_path / "input", "from a file"), (None, ""), (large, large)):
        assert connection.run("cat", stdin=stdin, timeout_seconds=60).output == output
    assert connection.run("exit 4", stdin=large, timeout_seconds=60).exit_code == 4


def test_a_command_past_its_deadline_is_killed(connection, server):
    with pytest.raises(CommandTimedOut, match="sleep 60") as caught:
        connection.run("echo begun; exec sleep 60", timeout_seconds=0.8)
    assert caught.value.output == "begun\n"
    assert isinstance(caught.value, TimeoutError)
    wait_until(lambda: not server.children, "the command to be killed")
    assert connection.run("echo on").output == "on\n"


def test_an_error_in_the_callback_ends_the_command(connection, server):
    def on_line(line: str) -> None:
        raise ArithmeticError(line)

    with pytest.raises(ArithmeticError, match="bad"):
        connection.run("echo bad; exec sleep 60", on_line=on_line)
    wait_until(lambda: not server.children, "the command to be killed")


def test_only_the_end_of_delivered_lines_is_kept(connection):
    lines: list[str] = []
    completed = connection.run("seq 500000", on_line=lines.append, timeout_seconds=30)  # 3.3 MiB
    assert lines == [str(n) for n in range(1, 500001)]
    assert completed.output.endswith("\n499999\n500000\n")
    assert 64 * 1024 <= len(completed.output) < 2 * MIB


def test_a_shell_answers_command_after_command(connection, server):
    """One process answers all, also the threads that take turns."""
    with connection.shell() as shell:
        assert shell.run("echo 'a b'; echo out >&2; exit 3") == Completed(3, "a b\nout\n")
        assert shell.run("printf 'no end'") == Completed(0, "no end")
        assert shell.run("cat <<END\nit's $((1 + 1))\nEND") == Completed(0, "it's 2\n")
        assert len(server.children) == 1
        assert connection.run("echo beside").output == "beside\n"
        with ThreadPoolExecutor(20) as threads:
            answers = list(threads.map(lambda n: shell.run(f"echo {n}").output, range(20)))
        assert answers == [f"{n}\n" for n in range(20)]
    wait_until(lambda: not server.children, "the shell to end")
    with connection.shell() as unused:
        unused.close()


def test_a_connection_that_dies_during_a_command_is_an_error(endpoint, server):
    """The loss is reported once, and nothing works before `reconnect`."""
    losses = []
    with SSHConnection(endpoint, on_lost=losses.append).connect(60) as connection:
        with pytest.raises(ConnectionLost):
            connection.run("echo begun; exec sleep 60", on_line=lambda line: server.hang_up())
        assert not connection.is_connected
        with pytest.raises(ConnectionLost):
            connection.run("true")
        connection.reconnect(60)
        assert connection.run("echo back").output == "back\n"
    assert len(losses) == 1


def test_a_file_arrives_whole_and_replaces_the_old_one(connection, tmp_path):
    """With its mode, in new folders, and no other file is left there."""
    content = os.urandom(2 * MIB)
    (tmp_path / "here").write_bytes(b"second")
    connection.put(content, "a folder/it's there", mode=0o600)
    there = tmp_path / "a folder" / "it's there"
    assert (there.read_bytes(), there.stat().st_mode & 0o777) == (content, 0o600)
    connection.put(tmp_path / "here", str(there), mode=0o755)
    assert (there.read_bytes(), there.stat().st_mode & 0o777) == (b"second", 0o755)
    assert os.listdir(there.parent) == [there.name]
    with pytest.raises(CommandFailed, match="is a directory"):
        connection.put(b"x", "a folder")
    assert os.listdir(there.parent) == [there.name]


def test_compressed_content_arrives_unpacked(connection, tmp_path):
    content = os.urandom(MIB) + bytes(MIB)
    packed = gzip.compress(content)
    connection.put(packed, "folder/tool", mode=0o755, unpacked_bytes=len(content))
    there = tmp_path / "folder" / "tool"
    assert (there.read_bytes(), there.stat().st_mode & 0o777) == (content, 0o755)
    for broken in (packed[:-9], gzip.compress(b"another"), b"no gzip"):
        with pytest.raises(CommandFailed, match="could not be written"):
            connection.put(broken, "folder/tool", unpacked_bytes=len(content))
    assert there.read_bytes() == content
    assert os.listdir(there.parent) == [there.name]


def test_buffers_arrive_one_after_another_and_come_back(connection, tmp_path):
    content = os.urandom(3 * MIB)
    connection.put([content[:7], bytearray(content[7:MIB]), memoryview(content)[MIB:]], "value", mode=0o600)
    assert (tmp_path / "value").read_bytes() == content
    assert (tmp_path / "value").stat().st_mode & 0o777 == 0o600
    back = connection.fetch("value")
    assert (back, back.readonly) == (content, False)
    room = bytearray(4 * MIB)
    assert connection.fetch("value", into=room, remove=True).obj is room
    assert room[: 3 * MIB] == content
    assert not (tmp_path / "value").exists()


def test_a_missing_file_cannot_be_fetched(connection, tmp_path):
    with pytest.raises(CommandFailed, match="could not be read") as caught:
        connection.fetch("nothing")
    assert "nothing" in caught.value.output
    (tmp_path / "five").write_text("five!")
    with pytest.raises(BadRequest, match="5 bytes"):
        connection.fetch("five", into=bytearray(4), remove=True)
    assert connection.fetch("five") == b"five!"


def test_a_command_that_waits_for_a_busy_shell_ends_at_its_deadline(connection, tmp_path):
    with connection.shell() as shell, ThreadPoolExecutor(1) as threads:
        busy = threads.submit(shell.run, "touch busy; until [ -e go ]; do sleep 0.01; done", timeout_seconds=60)
        wait_until((tmp_path / "busy").exists, "the other command")
        with pytest.raises(CommandTimedOut, match="busy"):
            shell.run("true", timeout_seconds=0.05)
        (tmp_path / "go").touch()
        assert busy.result(60).exit_code == 0


def test_a_wrong_key_is_refused_at_once(endpoint, server, tmp_path):
    """It is not tried again, unless the endpoint says that the machine is new. A missing key makes no connection."""
    with SSHConnection(endpoint.model_copy(update={"key": "/nonexistent/id"})) as connection:
        with pytest.raises(BadRequest, match="/nonexistent/id"):
            connection.connect(60)
    with pytest.raises(BadRequest, match="pub file"):
        SSHConnection(Endpoint(host="127.0.0.1", host_key="nonsense"))
    assert server.connections == []
    asyncssh.generate_private_key("ssh-ed25519").write_private_key(tmp_path / "other")
    with SSHConnection(endpoint.model_copy(update={"key": str(tmp_path / "other")})) as connection:
        with pytest.raises(CredentialsError, match="ann@127"):
            connection.connect(60)
        assert server.users == ["ann"]
        with pytest.raises(CredentialsError):
            connection.connect(60, auth_grace_seconds=1.5)
        assert len(server.users) > 2


@pytest.mark.parametrize("algorithm", ["ssh-ed25519", "ecdsa-sha2-nistp256"])
def test_a_changed_host_key_refuses_the_connection(connection, server, algorithm):
    pinned = connection.host_key
    connection.reconnect(30)
    assert connection.host_key == pinned == server.host_key.export_public_key().decode().strip()
    port = server.port
    server.stop()
    server.host_key = asyncssh.generate_private_key(algorithm)
    server.start(port)
    with pytest.raises(HostKeyChanged, match="another machine"):
        connection.reconnect(30)


def test_a_new_machine_may_show_another_key_at_first(endpoint, server):
    """It gets its key from its startup script. Nothing is sent to it meanwhile."""
    later = asyncssh.generate_private_key("ssh-ed25519")
    young = endpoint.model_copy(
        update={"host_key": later.export_public_key().decode().strip(), "host_key_grace_seconds": 60}
    )
    done = []
    with SSHConnection(young) as connection:
        with pytest.raises(HostKeyChanged):
            connection.connect(30)
        thread = threading.Thread(target=lambda: done.append(connection.connect(50, auth_grace_seconds=5)))
        thread.start()
        before = len(server.connections)
        wait_until(lambda: len(server.connections) > before + 1, "the connection to be tried twice")
        port = server.port
        server.stop()
        assert server.users == []
        server.host_key = later
        server.start(port)
        thread.join(30)
        assert done == [connection]
    with SSHConnection(young.model_copy(update={"host_key_grace_seconds": 0, "host_key": None})) as connection:
        connection.connect(30)


def test_a_known_host_key_is_verified(endpoint, server, tmp_path):
    right = server.host_key.export_public_key().decode().strip()
    wrong = asyncssh.generate_private_key("ssh-ed25519").export_public_key().decode().strip()
    (tmp_path / ".ssh" / "known_hosts").write_text(f"[127.0.0.1]:{server.port} {wrong}\n")
    with SSHConnection(endpoint) as connection, pytest.raises(HostKeyChanged, match="known_hosts"):
        connection.connect(30)
    with SSHConnection(endpoint.model_copy(update={"host_key": wrong})) as connection, pytest.raises(HostKeyChanged):
        connection.connect(30)
    for update in ({"host_key": right}, {"known_hosts": "/dev/null"}):
        with SSHConnection(endpoint.model_copy(update=update)).connect(30) as connection:
            assert connection.host_key == right


def test_a_jump_host_of_the_users_configuration_is_used(server, key, tmp_path):
    """The user's known_hosts verifies the host key of that machine; a missing IdentityFile is ignored."""
    (tmp_path / ".ssh" / "config").write_text(
        "Host jump\n  User carol\nHost behind\n  User dave\n  ProxyJump jump\n  IdentityFile /nonexistent\n"
        f"Host *\n  HostName 127.0.0.1\n  Port {server.port}\n  IdentityFile {key}\n"
    )
    with SSHConnection(Endpoint(host="behind", known_hosts="/dev/null")) as connection:
        with pytest.raises(Unreachable, match="jump host"):
            connection.connect(60)
    known = server.host_key.export_public_key().decode().strip()
    (tmp_path / ".ssh" / "known_hosts").write_text(f"[127.0.0.1]:{server.port} {known}\n")
    server.users.clear()
    with SSHConnection(Endpoint(host="behind")).connect(60) as connection:
        assert connection.run("echo in").output == "in\n"
    assert server.users == ["carol", "dave"]


def test_a_machine_that_starts_later_is_reached(endpoint, server):
    port = server.port
    server.stop()
    timer = threading.Timer(0.5, server.start, (port,))
    timer.start()
    with SSHConnection(endpoint).connect(20) as connection:
        assert connection.run("echo up").output == "up\n"
    timer.join()


def test_a_machine_that_never_starts_or_stays_silent_is_unreachable(endpoint, server, key):
    """The error has the deadline and the error of the last attempt."""
    server.stop()
    with SSHConnection(endpoint) as connection, pytest.raises(Unreachable, match=r"within 8 s.*\[Errno 111\]"):
        connection.connect(8.0)  # a busy machine needs seconds for an attempt
    with socket.create_server(("127.0.0.1", 0)) as mute:
        silent = Endpoint(host="127.0.0.1", port=mute.getsockname()[1], user="ann", key=key)
        with SSHConnection(silent) as connection, pytest.raises(Unreachable):
            connection.connect(0.3)


def test_close_may_be_called_twice_and_ends_waiting_commands(endpoint, server):
    connection = SSHConnection(endpoint).connect(30)
    caught: list[BaseException] = []
    begun = threading.Event()

    def wait() -> None:
        try:
            connection.run("echo begun; exec sleep 60", on_line=lambda line: begun.set())
        except Unreachable as error:
            caught.append(error)

    thread = threading.Thread(target=wait)
    thread.start()
    assert begun.wait(30)
    connection.close()
    connection.close()
    thread.join(30)
    assert [type(error) for error in caught] == [ConnectionLost]
    with pytest.raises(Unreachable, match="closed"):
        connection.run("true")


def test_close_ends_a_command_with_lines_in_delivery(endpoint, server):
    connection = SSHConnection(endpoint).connect(30)
    with pytest.raises(ConnectionLost, match="sleep 60"):
        connection.run("echo begun; exec sleep 60", on_line=lambda line: connection.close())
    wait_until(lambda: not server.children, "the command to end")


@pytest.mark.nightly
def test_a_large_value_is_not_copied_as_a_whole(connection):
    size = 8 * FETCH_WINDOW_BYTES
    content, room = bytes(size), bytearray(size)
    tracemalloc.start()
    try:
        connection.put([content], "value")
        connection.fetch("value", into=room, remove=True)
        # the server is in this process too, and may be some windows ahead of us
        assert tracemalloc.get_traced_memory()[1] < size * 3 / 4
    finally:
        tracemalloc.stop()
