"""SSH to real machines: OpenSSH on hosts of the test bed, and failures of these hosts."""

import os
import signal
import subprocess
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path

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
from skyward_core.transport import ssh_channels, ssh_commands
from skyward_core.transport.ssh_connection import SSHConnection
from tests.conftest import wait_until
from tests.system.transport.test_ssh_connection import Echo, say
from tests.testbed import Fleet, Host, why_not

MIB = 1 << 20


@pytest.fixture(scope="module")
def fleet() -> Iterator[Fleet]:
    if reason := why_not():
        (pytest.fail if os.environ.get("CI") == "true" else pytest.skip)(reason)
    with Fleet() as fleet:
        yield fleet


@pytest.fixture
def host(fleet: Fleet) -> Iterator[Host]:
    """A host for one test."""
    host = fleet.create()
    yield host
    host.crash()


@pytest.fixture(autouse=True)
def own_home(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Hide the keys, agent and configuration of the user who runs the tests."""
    monkeypatch.setenv("HOME", str(tmp_path))
    monkeypatch.delenv("SSH_AUTH_SOCK", raising=False)
    (tmp_path / ".ssh").mkdir(mode=0o700)


@pytest.fixture
def connection(host: Host) -> Iterator[SSHConnection]:
    with transport(host).connect(60) as connection:
        yield connection


@pytest.fixture
def echo() -> Iterator[Echo]:
    echo = Echo()
    yield echo
    echo.close()


def endpoint(host: Host) -> Endpoint:
    return Endpoint(host=host.ip, user=host.user, key=str(host.key_path), known_hosts=str(host.known_hosts_path))


def transport(host: Host, **settings) -> SSHConnection:
    return SSHConnection(endpoint(host), **settings)


def processes(host: Host, words: str) -> str:
    """The host's processes with these words in their command lines."""
    return "".join(
        line for line in host.run("ps ax -o args").stdout.splitlines() if words in line and "bash -c ps" not in line
    )


def seconds_until_lost(connection: SSHConnection, then: Callable[[], object]) -> float:
    """Run a long command, do something while it runs, and return the seconds until ConnectionLost."""
    since = 0.0

    def on_line(line: str) -> None:
        nonlocal since
        then()
        since = time.monotonic()

    with pytest.raises(ConnectionLost):
        connection.run("echo begun; exec sleep 60", on_line=on_line, timeout_seconds=30)
    return time.monotonic() - since


# ── commands ─────────────────────────────────────────────────────────────────────────────────────────────────────────


def test_a_command_is_run_as_it_is_written(connection, host):
    """Exit codes, signals, both streams, quotes and the login shell are those of the machine."""
    assert connection.run("hostname").output == f"{host.name}\n"
    assert connection.run('echo "it\'s $((6 * 7))" >&2; exit 3') == ssh_commands.Completed(3, "it's 42\n")
    assert connection.run("kill -TERM $$").exit_code == -signal.SIGTERM
    assert connection.run("echo $0").output == f"{connection.run('echo $SHELL').output}"


def test_a_command_past_its_deadline_is_killed_with_its_children(connection, host):
    """OpenSSH does not pass signals on for root: the command ends all the same, with its children."""
    with pytest.raises(CommandTimedOut):
        connection.run("sleep 61 & sleep 62", timeout_seconds=0.5)
    wait_until(lambda: processes(host, "sleep 6") == "", "both to be killed")
    assert connection.run("echo on").output == "on\n"


def test_ten_commands_may_last_and_all_end_with_the_connection(host):
    """As many commands as sshd accepts by default follow something at once; `close` from another thread ends them
    all with ConnectionLost.
    """
    connection = transport(host).connect(60)
    begun = threading.Barrier(ssh_commands.SESSIONS + 1)
    caught: list[type] = []

    def follow() -> None:
        try:
            connection.run("echo begun; exec sleep 60", on_line=lambda line: begun.wait(60))
        except Unreachable as error:
            caught.append(type(error))

    threads = [threading.Thread(target=follow) for _ in range(ssh_commands.SESSIONS)]
    for thread in threads:
        thread.start()
    begun.wait(60)
    connection.close()
    for thread in threads:
        thread.join(60)
    assert caught == [ConnectionLost] * ssh_commands.SESSIONS


def test_a_machine_with_fewer_sessions_delays_commands(host, monkeypatch):
    """With MaxSessions 2, eight short commands at once all run; beside two long ones, a third is refused after a
    while with a clear error.
    """
    config = host.root / "etc/ssh/sshd_config"
    config.write_text(config.read_text().replace("MaxSessions 100", "MaxSessions 2"))
    host.change_host_key()  # the new key proves that sshd has read its configuration again
    with transport(host).connect(60) as connection:
        codes: list[int] = []
        threads = [
            threading.Thread(target=lambda n=n: codes.append(connection.run(f"exit {n}").exit_code)) for n in range(8)
        ]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join(60)
        assert sorted(codes) == list(range(8))
        monkeypatch.setattr(ssh_commands, "REFUSED_SECONDS", 0.2)
        begun = threading.Barrier(3)

        def follow() -> None:
            with pytest.raises(ConnectionLost):
                connection.run("echo begun; exec sleep 60", on_line=lambda line: begun.wait(60))

        lasting = [threading.Thread(target=follow) for _ in range(2)]
        for thread in lasting:
            thread.start()
        begun.wait(60)
        with pytest.raises(Unreachable, match="refuses"):
            connection.run("true")
        connection.close()
        for thread in lasting:
            thread.join(60)


# ── a shell that stays ───────────────────────────────────────────────────────────────────────────────────────────────


def test_a_shell_outlives_bad_commands_and_a_new_connection(connection, host):
    """No command ends the shell for the next one. After a loss the next command starts it again."""
    with connection.shell() as shell:
        first = shell.run("echo $PPID $$").output
        assert shell.run("if").exit_code == 2
        assert shell.run("exit 7").exit_code == 7
        assert shell.run("cd /; x=1; printf none") == ssh_commands.Completed(0, "none")
        assert shell.run('pwd; echo "[$x]"; cat').output == "/root\n[]\n"
        assert shell.run("echo $PPID $$").output == first
        with pytest.raises(CommandTimedOut):
            shell.run("echo begun; sleep 63", timeout_seconds=0.5)
        wait_until(lambda: processes(host, "sleep 63") == "", "it to be killed")
        with pytest.raises(CommandFailed, match="ended under"):
            shell.run("kill -KILL $$")
        assert shell.run("echo anew").output == "anew\n"
        connection.reconnect(20)
        assert shell.run("seq 100000").output == "".join(f"{n}\n" for n in range(1, 100001))
    wait_until(lambda: processes(host, "sh").count("exec sh") == 0, "the shell to end")


# ── files ────────────────────────────────────────────────────────────────────────────────────────────────────────────


def test_a_value_travels_to_the_host_and_back(connection, host):
    """Several buffers of any kind become one private file; it comes back as writable memory, and is removed on
    request.
    """
    content = os.urandom(20 * MIB)
    pieces = [
        content[:5],
        bytearray(content[5:MIB]),
        memoryview(content)[MIB : 9 * MIB],
        b"",
        memoryview(content)[9 * MIB :].cast("I"),
    ]
    connection.put(pieces, "/dev/shm/made/value", mode=0o600)
    assert connection.run("cd /dev/shm/made; stat -c '%a %s' value; ls").output == f"600 {20 * MIB}\nvalue\n"
    back = connection.fetch("/dev/shm/made/value")
    assert back == content
    back[-1:] = b"!"
    room = bytearray(20 * MIB + 3)
    back = connection.fetch("/dev/shm/made/value", into=room, remove=True)
    assert back == content == room[: 20 * MIB]
    assert (len(back), room[20 * MIB :]) == (20 * MIB, bytes(3))
    assert connection.run("ls /dev/shm/made").output == ""


def test_small_files_of_every_size_come_back(connection, host):
    """An empty file, lines, and a line that looks like a size are ordinary files, whatever the login shell prints."""
    (host.root / "root/.bashrc").write_text("echo welcome; echo 12 34\n")
    for content in (b"", b"\n", b"x" * 70000, b"0 0\n" * 3):
        connection.put(content, "some/file")
        assert connection.fetch("some/file", remove=True) == content


def test_a_file_that_cannot_be_read_is_an_error(connection):
    """Errors about a missing file and a folder have the machine's message, a small buffer ours; the file stays."""
    with pytest.raises(CommandFailed, match="could not be read") as caught:
        connection.fetch("/nowhere")
    assert "nowhere" in caught.value.output
    with pytest.raises(CommandFailed) as caught:
        connection.fetch("/etc")
    assert "directory" in caught.value.output
    connection.put(b"four", "file")
    with pytest.raises(BadRequest, match="4 bytes"):
        connection.fetch("file", into=bytearray(3), remove=True)
    with pytest.raises(CommandTimedOut, match="was not read"):
        connection.run("mkfifo pipe") and connection.fetch("pipe", timeout_seconds=0.3)
    assert connection.fetch("file") == b"four"


def test_a_file_that_shrinks_while_it_is_read_is_an_error(connection, host, monkeypatch):
    """Fewer bytes than announced are not returned as the file."""

    def shrinking(size: int) -> memoryview:
        (host.root / "dev/shm/file").write_bytes(b"")
        return memoryview(bytearray(size))

    connection.put(bytes(40 * MIB), "/dev/shm/file")
    monkeypatch.setattr(ssh_channels, "memory", shrinking)
    with pytest.raises(CommandFailed, match="changed"):
        connection.fetch("/dev/shm/file", remove=True)
    assert connection.run("ls /dev/shm").output == "file\n"


def test_a_value_stays_on_the_host_if_the_connection_dies_during_its_transfer(host, monkeypatch):
    """A file that is to be removed after its transfer is not removed earlier."""

    def cut(size: int) -> memoryview:
        host.partition()
        return memoryview(bytearray(size))

    monkeypatch.setattr(ssh_channels, "memory", cut)
    with transport(host, keepalive_seconds=0.3, keepalive_count=1).connect(60) as connection:
        connection.put(bytes(40 * MIB), "/dev/shm/value")  # more than can be in transit before the partition
        with pytest.raises(ConnectionLost):
            connection.fetch("/dev/shm/value", remove=True)
        host.heal()
        connection.reconnect(20)
        assert connection.run("stat -c %s /dev/shm/value").output == f"{40 * MIB}\n"


def test_an_incomplete_transfer_leaves_the_old_file(connection, host, monkeypatch):
    """A transfer that is interrupted replaces nothing, and its part is removed."""
    pieces = ssh_channels.pieces

    def breaking_off(content):
        yield next(pieces(content))
        raise ArithmeticError

    connection.put(b"old", "folder/file")
    with monkeypatch.context() as patch, pytest.raises(ArithmeticError):
        patch.setattr(ssh_channels, "pieces", breaking_off)
        connection.put(bytes(8 * MIB), "folder/file")
    wait_until(lambda: connection.run("ls folder").output == "file\n", "the part to be removed")
    assert connection.fetch("folder/file") == b"old"
    wait_until(lambda: processes(host, "put folder") == "", "the transfer to end")


def test_a_full_disk_is_an_error_and_leaves_the_old_file(fleet):
    """No space: the error has the machine's message, the old file is complete, and no other file is left."""
    host = fleet.create(disk="64M")
    with transport(host).connect(60) as connection:
        connection.put(b"old", "folder/file")
        host.fill_disk()
        with pytest.raises(CommandFailed, match="could not be written") as caught:
            connection.put(os.urandom(8 * MIB), "folder/file", timeout_seconds=20)
        assert "No space left" in caught.value.output
        host.empty_disk()
        assert connection.run("ls folder; cat folder/file").output == "file\nold"
    host.crash()


# ── forwards, loss and return ────────────────────────────────────────────────────────────────────────────────────────


def test_after_a_partition_the_forwards_have_the_same_ports(host, echo):
    """Silence ends running commands within the keepalive time; after the partition `reconnect` restores the
    forwards, with their ports.
    """
    losses: list[str] = []
    with transport(host, keepalive_seconds=0.4, keepalive_count=2, on_lost=losses.append).connect(60) as connection:
        here, there = connection.forward_local("127.0.0.1", 22), connection.forward_remote("127.0.0.1", echo.port)
        asking = f"exec 3<>/dev/tcp/127.0.0.1/{there}; echo hello >&3; head -n 1 <&3"
        assert say(here, b"\n").startswith(b"SSH-2.0-OpenSSH")
        assert connection.run(f"bash -c '{asking}'").output == "HELLO\n"
        assert seconds_until_lost(connection, host.partition) < 10
        assert not connection.is_connected
        with pytest.raises(Unreachable, match=r"within 0\.5 s"):
            connection.reconnect(0.5)
        host.heal()
        connection.reconnect(20)
        assert say(here, b"\n").startswith(b"SSH-2.0-OpenSSH")
        assert connection.run(f"bash -c '{asking}'").output == "HELLO\n"
    assert len(losses) == 1


def test_a_lost_machine_is_noticed(fleet):
    """A machine without power is silent; a machine that crashes closes the connection at once."""
    for end, keepalive_seconds in (("kill", 0.4), ("crash", 10.0)):
        host = fleet.create()
        with transport(host, keepalive_seconds=keepalive_seconds, keepalive_count=2).connect(60) as connection:
            assert seconds_until_lost(connection, getattr(host, end)) < 10
            with pytest.raises(ConnectionLost):
                connection.fetch("/etc/hostname")
            with pytest.raises(ConnectionLost):
                connection.shell().run("true")


def test_a_machine_that_starts_late_is_reached(host):
    """While packets are lost, the connection is tried again until the machine answers."""
    host.partition()
    timer = threading.Timer(1.0, host.heal)
    timer.start()
    with transport(host).connect(30, auth_grace_seconds=10) as connection:
        assert connection.run("hostname").output == f"{host.name}\n"
    timer.join()


# ── trust and the user's own settings ────────────────────────────────────────────────────────────────────────────────


def test_a_host_key_that_changes_refuses_the_connection(host):
    """The first key seen is pinned; another machine at the same address is refused."""
    with SSHConnection(endpoint(host).model_copy(update={"known_hosts": "/dev/null"})).connect(60) as connection:
        assert connection.host_key.split()[:2] == host.known_hosts_line.split()[1:]
        host.change_host_key()
        assert connection.run("echo still").output == "still\n"
        with pytest.raises(HostKeyChanged, match="another machine"):
            connection.reconnect(20)
    host.known_hosts_path.write_text(f"{host.ip} {connection.host_key}\n")
    with transport(host) as connection, pytest.raises(HostKeyChanged, match="known_hosts"):
        connection.connect(60)


def test_an_agent_logs_in_with_a_key_that_has_a_passphrase(host, tmp_path, monkeypatch):
    """The key itself cannot be used by path; from the agent it can."""
    key, sock, ask = tmp_path / "locked", tmp_path / "agent", tmp_path / "ask"
    subprocess.run(["ssh-keygen", "-q", "-t", "ed25519", "-N", "secret words", "-f", str(key)], check=True)
    (host.root / "root/.ssh/authorized_keys").write_text(key.with_suffix(".pub").read_text())
    ask.write_text("#!/bin/sh\necho secret words\n")
    ask.chmod(0o700)
    agent = subprocess.Popen(["ssh-agent", "-D", "-a", str(sock)], stdout=subprocess.DEVNULL)
    try:
        wait_until(sock.exists, "the agent")
        with (
            SSHConnection(endpoint(host).model_copy(update={"key": str(key)})) as connection,
            pytest.raises(CredentialsError, match="passphrase"),
        ):
            connection.connect(60)
        with (
            SSHConnection(endpoint(host).model_copy(update={"key": None})) as connection,
            pytest.raises(CredentialsError),
        ):
            connection.connect(60)
        monkeypatch.setenv("SSH_AUTH_SOCK", str(sock))
        env = os.environ | {"SSH_ASKPASS": str(ask), "SSH_ASKPASS_REQUIRE": "force", "DISPLAY": "none"}
        subprocess.run(["ssh-add", "-q", str(key)], check=True, env=env, stdin=subprocess.DEVNULL, capture_output=True)
        with SSHConnection(endpoint(host).model_copy(update={"key": None})).connect(60) as connection:
            assert connection.run("whoami").output == "root\n"
    finally:
        agent.kill()
        agent.wait()


def test_a_configuration_file_leads_through_another_machine(fleet, host, tmp_path):
    """Alias, User, IdentityFile and ProxyJump come from the file that the endpoint names; the machine behind sees
    the connection of the jump host.
    """
    jump = fleet.create()
    (tmp_path / "known").write_text(f"{jump.known_hosts_line}\n{host.known_hosts_line}\n")
    (tmp_path / "config").write_text(
        f"Host jump\n  HostName {jump.ip}\nHost behind\n  HostName {host.ip}\n  ProxyJump jump\n"
        f"Host *\n  User root\n  IdentityFile {host.key_path}\n  UserKnownHostsFile {tmp_path / 'known'}\n"
    )
    with SSHConnection(Endpoint(host="behind", config=str(tmp_path / "config"))).connect(60) as connection:
        assert connection.run("hostname; echo ${SSH_CONNECTION%% *}").output == f"{host.name}\n{jump.ip}\n"
        connection.put(b"x" * MIB, "through")
        assert connection.fetch("through", remove=True) == b"x" * MIB
        assert seconds_until_lost(connection, jump.crash) < 20


@pytest.mark.parametrize("trust", ["named", "usual", "another", "none"])
def test_the_named_file_applies_to_jump_hosts_too(fleet, host, tmp_path, trust):
    """A jump host is verified by the file that the endpoint names, else by the user's own. A jump host with another
    key there, or with none in either, is refused.
    """
    jump = fleet.create()
    lines = {
        "named": jump.known_hosts_line,
        "usual": "",
        "another": f"{jump.ip} {host.known_hosts_line.partition(' ')[2]}",
        "none": "",
    }
    (tmp_path / "named").write_text(f"{lines[trust]}\n{host.known_hosts_line}\n")
    (tmp_path / ".ssh" / "known_hosts").write_text("" if trust in {"named", "none"} else f"{jump.known_hosts_line}\n")
    (tmp_path / "config").write_text(
        f"Host {host.ip}\n  ProxyJump root@{jump.ip}:22\nHost *\n  User root\n  IdentityFile {host.key_path}\n"
    )
    connection = SSHConnection(
        Endpoint(host=host.ip, config=str(tmp_path / "config"), known_hosts=str(tmp_path / "named"))
    )
    with connection:
        if trust in {"named", "usual"}:
            assert connection.connect(60).run("echo ${SSH_CONNECTION%% *}").output == f"{jump.ip}\n"
            assert seconds_until_lost(connection, jump.crash) < 20
        else:
            with pytest.raises(Unreachable, match=f"cannot be trusted.*{jump.ip}"):
                connection.connect(60)
    jump.crash()


def forbid_forwarding(host: Host) -> None:
    """Set `AllowTcpForwarding no` from the next connection on."""
    with (host.root / "etc/ssh/sshd_config").open("a") as config:
        config.write("\nAllowTcpForwarding no\n")
    os.kill(host.pid, signal.SIGHUP)
    wait_until(lambda: "allowtcpforwarding no" in host.run("/usr/sbin/sshd -T").stdout, "the setting")
    wait_until(host.is_listening, "sshd to be back")


def test_the_error_says_that_forwarding_is_not_allowed(fleet, host, tmp_path):
    """At once, for the machine itself and for a jump host; where forwarding is allowed there is no such error."""
    jump = fleet.create()
    with transport(host).connect(60) as connection:
        connection.check_forwarding()
    (tmp_path / "known").write_text(f"{jump.known_hosts_line}\n{host.known_hosts_line}\n")
    (tmp_path / "config").write_text(
        f"Host *\n  User root\n  IdentityFile {host.key_path}\nHost {host.ip}\n  ProxyJump {jump.ip}\n"
    )
    forbid_forwarding(jump)
    forbid_forwarding(host)
    began = time.monotonic()
    with transport(host).connect(60) as connection, pytest.raises(Unreachable, match="AllowTcpForwarding no"):
        connection.check_forwarding()
    behind = SSHConnection(Endpoint(host=host.ip, config=str(tmp_path / "config"), known_hosts=str(tmp_path / "known")))
    with behind, pytest.raises(Unreachable, match=r"the jump host before .*AllowTcpForwarding no"):
        behind.connect(60)
    assert time.monotonic() - began < 30
    jump.crash()
