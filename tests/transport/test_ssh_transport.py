"""The SSH transport to a node, on real hosts with only a guard: files, lines, ports, values and leases, and the
effects of a lost connection.
"""

import gzip
import os
import pickle
import re
import socket
import subprocess
import threading
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest

import skyward_core as sky
from skyward_core.errors import CommandFailed, ConnectionLost, Unreachable
from skyward_core.events.events import ContactLost, ContactRegained
from skyward_core.image import shell
from skyward_core.machines.instances import Instance
from skyward_core.provisioning.guard import guard_script
from skyward_core.transport import code_upload, ssh_transport
from skyward_core.transport.code_upload import shipped_archive
from skyward_core.transport.ssh_transport import SSHConnections, SSHTransport
from skyward_core.transport.transport import LocalTransport
from skyward_core.worker.watchdog import uptime, write_lease
from skyward_core.worker.wire import Parcel
from tests.conftest import RecordedEvents, wait_until
from tests.testbed import Fleet, Host
from tests.testbed.fixtures import fleet  # noqa: F401 - a fixture
from tests.testbed.rental import Cloud

LEASE_SECONDS = 60
MIB = 1 << 20

pytestmark = pytest.mark.slow


@dataclass
class Way:
    """A transport, its host, and the events of the transport."""

    transport: SSHTransport
    instance: Instance
    host: Host
    recorded: RecordedEvents = field(default_factory=RecordedEvents)
    lines: list[str] = field(default_factory=list)

    @property
    def directory(self) -> Path:
        """The node's directory, as this machine sees it."""
        return self.host.root / str(self.instance.directory).lstrip("/")

    def has_emitted(self, line: str) -> bool:
        self.lines += self.transport.new_lines()
        return line in self.lines

    def hang_up(self, then: str = ":") -> None:
        """Run a command and end all SSH connections to the host, which goes on."""
        self.host.run(f"{then}; pkill -KILL -f '^sshd: root'")


@pytest.fixture
def cloud(fleet: Fleet) -> Iterator[Cloud]:
    cloud = Cloud(fleet, disk="256M")
    yield cloud
    cloud.close()


@pytest.fixture
def lead(cloud: Cloud) -> Iterator[Callable[..., Way]]:
    """Make a transport to a new host with a guard."""
    recorded = RecordedEvents()
    made: list[SSHConnections] = []
    transports: list[SSHTransport] = []

    def lead(lease_seconds: int = LEASE_SECONDS, paid_seconds: Callable[[], float | None] = lambda: None) -> Way:
        provider = cloud.provider()
        offer = provider.offers(sky.Requirements())[0]
        (instance,) = provider.launch(
            offer, 1, {"skyward-pool": "sky-ways", "skyward-rank": "0"}, guard_script(lease_seconds, None, "poweroff")
        )
        made.append(SSHConnections(lease_seconds, recorded, lambda: False, paid_seconds))
        transports.append(made[-1].transport(instance))
        return Way(transports[-1], instance, cloud.host(instance.id), recorded)

    yield lead
    for transport in transports:
        transport.close()
    for wires in made:
        wires.close()


@pytest.fixture
def way(lead: Callable[..., Way]) -> Way:
    """A transport to a host that is there already."""
    way = lead()
    way.transport.join(timeout_seconds=60)
    way.transport.opened()
    return way


# ── its life ─────────────────────────────────────────────────────────────────────────────────────────────────────────


def test_a_script_is_started_once_and_followed_to_its_end(lead, monkeypatch):
    """The script runs with the instance's tag, with the sent files, uv and our package; once, although the answer to
    its start was lost. Its exit code is reported.

    Looks inside: one answer is lost, which no server does when asked.
    """
    way = lead()
    ask, starts = way.transport._command, []

    def lose_the_first_answer(text: str, words: list[str], **settings: Any) -> str:
        answer = ask(text, words, **settings)
        if text == ssh_transport.START:
            starts.append(words)
            if len(starts) == 1:
                raise ConnectionLost("after it was done")
        return answer

    monkeypatch.setattr(way.transport, "_command", lose_the_first_answer)
    script = (
        'echo "ran on $SKYWARD_INSTANCE_ID, $SKYWARD_RANK of $SKYWARD_POOL_ID"\n'
        '"$SKYWARD_UV" --version | sed "s/ .*//"\n'
        f'ls "$SKYWARD_HOME/ship/{shipped_archive().name}/skyward_core/transport/ssh_transport.py"\n'
        "exit 7\n"
    )
    way.transport.start(script, timeout_seconds=60, emit=way.recorded)
    wait_until(lambda: way.has_emitted("::skyward exited 7"), "the end of the script")
    assert len(starts) == 2
    home = str(way.instance.directory).partition("/instances/")[0]
    ours = [
        "::skyward phase uv",
        f"ran on {way.instance.id}, 0 of sky-ways",
        "uv",
        f"{home}/ship/{shipped_archive().name}/skyward_core/transport/ssh_transport.py",
    ]
    assert way.lines == [*ours, "::skyward exited 7"]
    assert not (way.directory / "ship.tar.gz").exists()


def test_a_visitor_reads_and_renews_nothing(lead):
    """It follows the log and reads files; the lease stays as it is, and no keeper runs."""
    way = lead()
    wait_until(lambda: (way.directory / "guard").exists(), "the guard")
    lease = (way.directory / "lease").read_text() if (way.directory / "lease").exists() else None
    way.transport.visit(timeout_seconds=60)
    assert way.transport.is_connected
    (way.directory / "log").write_text("first\n")
    wait_until(lambda: way.has_emitted("first"), "the line")
    assert way.transport.read("log") == "first\n"
    assert ((way.directory / "lease").read_text() if lease is not None else None) == lease
    assert not [one for one in threading.enumerate() if one.name.startswith("skyward-keep")]


@pytest.mark.parametrize(("kind", "file"), [("Linux aarch64", "aarch64"), ("Linux riscv64", None)])
def test_a_host_gets_the_uv_of_its_own_architecture(lead, monkeypatch, tmp_path, kind, file):
    """It is chosen by the output of `uname` there. For an unknown architecture nothing is sent, and the host has to
    find uv itself.

    Looks inside: the real one would fetch a program.
    """
    (tmp_path / "uv.gz").write_bytes(gzip.compress(b"of another architecture"))
    fetched: list[str] = []
    monkeypatch.setattr(
        code_upload,
        "_fetched_uv",
        lambda machine: fetched.append(machine) or code_upload.CompressedFile(tmp_path / "uv.gz", 23),
    )
    way = lead()
    uname = way.host.root / "usr/local/bin/uname"
    uname.write_text(f"#!/bin/sh\ncase $1 in -s) echo {kind.split()[0]} ;; -m) echo {kind.split()[1]} ;; esac\n")
    uname.chmod(0o755)
    way.transport.start('echo "uv is ${SKYWARD_UV:-to be found}"\nexit 7\n', timeout_seconds=60, emit=way.recorded)
    wait_until(lambda: way.has_emitted("::skyward exited 7"), "the end of the script")
    sent = way.directory.parent.parent / "uv/bin/uv"
    assert fetched == ([file] if file else [])
    assert sent.exists() is (file is not None)
    assert file is None or sent.read_bytes() == b"of another architecture"
    assert "uv is to be found" in way.lines  # a uv that does not run here is not used


def test_a_running_script_is_not_touched_by_a_second_request_to_start_it(lead):
    """Not even if only a part of the script arrives then, or none: bash reads a script while it runs it, and would take
    the end of the part for the end of the script.

    Looks inside: the command is kept, and sent a second time.
    """
    way = lead()
    wait = 'until [ -e "$SKYWARD_INSTANCE_DIRECTORY/go" ]; do sleep 0.05; done\n'
    script = "echo runs\n" + wait + f"# {'x' * 100}\n" * 1000 + "exit 7\n"
    ask = way.transport._command
    asked: list[list[str]] = []

    def remember(text: str, words: list[str], **settings: Any) -> str:
        if text == ssh_transport.START:
            asked.append(words)
        return ask(text, words, **settings)

    way.transport._command = remember
    way.transport.start(script, timeout_seconds=60, emit=way.recorded)
    wait_until(lambda: way.has_emitted("runs"), "the script to run")
    for part in (script[:20], ""):
        ask(ssh_transport.START, asked[0], stdin=part)
    (way.directory / "go").touch()
    wait_until(
        lambda: way.has_emitted("::skyward exited 7") or way.has_emitted("::skyward exited 0"), "the end of the script"
    )
    assert way.lines[-1] == "::skyward exited 7"


def test_a_part_of_a_script_is_not_started(lead):
    """It is refused and removed, and the whole script is started when it comes.

    Looks inside: half of a command is lost, which no server does when asked.
    """
    way = lead()
    ask = way.transport._command

    def lose_half(text: str, words: list[str], *, stdin: str | None = None, **settings: Any) -> str:
        return ask(text, words, stdin=stdin[: len(stdin) // 2] if stdin else None, **settings)

    way.transport._command = lose_half
    with pytest.raises(CommandFailed, match="could not run a command of ours"):
        way.transport.start("exit 6\nexit 7\n", timeout_seconds=60, emit=way.recorded)
    assert not list(way.directory.glob("bootstrap*"))
    way.transport._command = ask
    way.transport.start("exit 6\nexit 7\n", timeout_seconds=60, emit=way.recorded)
    wait_until(lambda: way.has_emitted("::skyward exited 6"), "the end of the script")


def test_on_a_full_disk_a_script_can_still_report_its_failure(lead):
    """Not one byte is free when a script fails, not even for the log. Still the log has the failed command, the
    reason, and the end.
    """
    way = lead()
    fill = 'cat /dev/zero >"$HOME/filler" || true\nwhile printf "x\\n"; do :; done 2>/dev/null\n'
    way.transport.start(
        shell.script(shell.prelude(), "skyward_phase deps", fill, "skyward_run cp /etc/passwd /root"),
        timeout_seconds=60,
        emit=way.recorded,
    )
    wait_until(lambda: way.has_emitted("::skyward exited 1"), "the end of the script")
    last = [line for line in way.lines if line != "x"][-3:]
    assert last[0] == "The disk that holds /root/.cache/skyward is full, or nearly so."
    assert last[1:] == ["::skyward failed phase=deps exit=1 command=cp /etc/passwd /root", "::skyward exited 1"]


def test_a_host_whose_guard_has_not_started_is_waited_for(lead, cloud, monkeypatch):
    """If there is no guard by the deadline, the error says so."""
    monkeypatch.setattr("tests.testbed.rental.BOOT", "mkdir -p {directory}; cat >/dev/null; : {variables}")
    way = lead()
    with pytest.raises(CommandFailed, match=r"the guard of .* has not started"):
        way.transport.join(timeout_seconds=1)


def test_closing_ends_waiting_threads_and_leaves_the_node_alone(lead):
    """A close during `start` ends it with Unreachable at once; the node lives on."""
    way = lead()
    wait_until((way.directory / "guard").exists, "the guard")
    (way.directory / "guard").unlink()
    caught: list[BaseException] = []

    def start() -> None:
        try:
            way.transport.start("true", timeout_seconds=60, emit=way.recorded)
        except Unreachable as error:
            caught.append(error)

    thread = threading.Thread(target=start)
    thread.start()
    wait_until(lambda: way.transport.is_connected, "the connection")
    way.transport.close()
    thread.join(30)
    assert not thread.is_alive()
    assert len(caught) == 1
    assert way.host.is_up
    with pytest.raises(Unreachable):
        way.transport.write("late", "")


def test_the_node_lives_as_long_as_its_lease_is_extended_and_then_ends(lead):
    """It lives longer than its lease while there is a connection, and for the lease after that. A lease is never
    shortened.
    """
    way = lead(lease_seconds=5)
    way.transport.join(timeout_seconds=60)
    first = int((way.directory / "lease").read_text())
    way.transport.extend_lease(1)
    assert int((way.directory / "lease").read_text()) >= first
    wait_until(lambda: int((way.directory / "lease").read_text()) >= first + 6, "signs of life for longer than a lease")
    way.transport.close()
    wait_until(lambda: not way.host.is_up, "the host to turn itself off")


@pytest.mark.parametrize("is_remote", [True, False])
def test_a_supervisor_is_recognised_by_its_start_and_not_by_its_pid(tmp_path: Path, is_remote: bool) -> None:
    """The pid may belong to another process by now. A supervisor that has not begun yet is not dead; a node without
    its folder is.
    """
    directory = tmp_path / "host-1"

    def lives() -> bool | None:
        if not is_remote:
            return LocalTransport(here(directory), lambda: False, lambda: None).lives(1.0)
        output = subprocess.run(
            ["sh", "-c", ssh_transport.LIVES, "skyward", str(directory)], capture_output=True, text=True, check=True
        ).stdout
        return {"": None, "::skyward lives\n": True, "::skyward dead\n": False}[output]

    assert lives() is False
    directory.mkdir()
    assert lives() is None
    (directory / "supervisor").write_text(f"{os.getpid()}\n")
    assert lives() is False, "that is this process"
    with subprocess.Popen(
        ["sleep", "60"], env={"PATH": os.environ["PATH"], "SKYWARD_INSTANCE_DIRECTORY": str(directory)}
    ) as process:
        (directory / "supervisor").write_text(f"{process.pid}\n")
        wait_until(lives, "it to be what it was started as")
        process.kill()
        os.waitid(os.P_PID, process.pid, os.WEXITED | os.WNOWAIT)
        assert lives() is False, "it is a zombie"
    assert lives() is False


def here(directory: Path) -> Instance:
    """A node of this machine with this folder."""
    return Instance(
        id=directory.name,
        provider="local",
        pool_id="p",
        rank=0,
        state=sky.InstanceState.RUNNING,
        region="r",
        instance_type="t",
        directory=str(directory),
    )


def test_several_clients_at_once_do_not_shorten_a_lease(tmp_path: Path) -> None:
    """Several clients extend the lease of one node at once: the longest one holds, from sh and from Python."""
    lease = tmp_path / "lease"
    for interpreter in ("sh", "bash"):
        for _ in range(30):
            lease.write_text(f"{int(uptime()) + 1}\n")
            others = [
                subprocess.Popen([interpreter, "-c", ssh_transport.LEASE, "skyward", str(tmp_path), seconds, "", ""])
                for seconds in ("5", "300", "5")
            ]
            write_lease(tmp_path, uptime() + 10)
            assert [other.wait(30) for other in others] == [0, 0, 0]
            assert float(lease.read_text()) > uptime() + 200
    assert [path.name for path in tmp_path.iterdir()] == ["lease"]


def test_the_keeper_goes_on_after_any_error(lead, monkeypatch, caplog):
    """An unexpected error does not end the thread: it is logged, and the lease is renewed the next time."""
    way = lead(lease_seconds=5)
    extend, tries = way.transport.extend_lease, []

    def fail_first(seconds: float) -> None:
        tries.append(seconds)
        if len(tries) < 3:
            raise ValueError("an unexpected error")
        extend(seconds)

    monkeypatch.setattr(way.transport, "extend_lease", fail_first)
    way.transport.join(timeout_seconds=60)
    wait_until(lambda: len(tries) > 4, "it to go on")
    assert caplog.text.count("the lease of node 0 could not be renewed") == 1
    assert way.recorded.of(ContactLost) == []


def test_each_sign_of_life_has_the_paid_time_of_the_node(lead):
    """On its own clock, rounded down; it may be less than before.

    Without a limit of money there is no such file. When the paid time is over the node ends.
    """
    paid: list[float | None] = [None]
    way = lead(lease_seconds=30, paid_seconds=lambda: paid[0])
    way.transport.join(timeout_seconds=60)
    way.transport.extend_lease(30)
    assert not (way.directory / "paid").exists()
    for seconds in (500.9, 100.9):
        paid[0] = seconds
        before = uptime()
        way.transport.extend_lease(30)
        until = int((way.directory / "paid").read_text())
        assert before - 1 + seconds - 1 <= until <= uptime() + seconds
    assert sorted(path.name for path in way.directory.iterdir() if path.name.startswith(("lease", "paid"))) == [
        "lease",
        "paid",
    ]
    paid[0] = 0.5
    way.transport.extend_lease(30)
    wait_until(lambda: not way.host.is_up, "the host to turn itself off")


# ── files and lines ──────────────────────────────────────────────────────────────────────────────────────────────────


def test_files_are_private_and_read_back(way):
    """A file is readable for its owner only, with any text; reading a missing file raises CommandFailed."""
    way.transport.write("settings.json", "it's\n$HOME \N{SNOWMAN}")
    assert way.transport.read("settings.json") == "it's\n$HOME \N{SNOWMAN}"
    assert (way.directory / "settings.json").stat().st_mode & 0o777 == 0o600
    with pytest.raises(CommandFailed):
        way.transport.read("nothing")


def test_each_line_of_the_log_is_delivered_once_however_often_the_connection_is_lost(way):
    """Lines that are written during a loss are read after it. No line is read twice, and messages of `tail` itself
    are not delivered.
    """
    with (way.directory / "log").open("a") as log:
        for number in range(60):
            log.write(f"line {number}\n")
            log.flush()
            if number % 20 == 10:
                wait_until(lambda number=number: way.has_emitted(f"line {number}"), f"line {number}")
                way.hang_up()
    wait_until(lambda: way.has_emitted("line 59"), "the last line")
    assert way.lines == [f"line {number}" for number in range(60)]
    (way.directory / "log").rename(way.directory / "old")
    (way.directory / "log").write_text("line 60\n")
    wait_until(lambda: way.has_emitted("line 60"), "the line of another file")
    assert [line for line in way.lines if not line.startswith("line ")] == []


def test_a_line_is_delivered_soon(way):
    """About a tenth of a second after it is written, also on file systems that do not report changes."""
    with (way.directory / "log").open("a") as log:
        waits = []
        for number in range(5):
            log.write(f"line {number}\n")
            log.flush()
            written_at = time.monotonic()
            wait_until(lambda number=number: way.has_emitted(f"line {number}"), f"line {number}")
            waits.append(time.monotonic() - written_at)
    assert sorted(waits)[2] < 0.5


# ── a lost connection ────────────────────────────────────────────────────────────────────────────────────────────────


def test_requests_during_a_loss_are_served_after_it(way):
    """Writing, forwards and checks of the node wait until the keeper has made a new connection."""
    way.hang_up()
    way.transport.write("settings.json", "there")
    assert (way.directory / "settings.json").read_text() == "there"
    way.hang_up()
    assert way.transport.can_reach("127.0.0.1", 22)


def test_a_node_that_refuses_us_counts_as_silent_until_it_accepts(way, monkeypatch):
    """ContactLost once, ContactRegained once, with the seconds between them; meanwhile a write waits until its
    deadline and raises ConnectionLost.
    """
    monkeypatch.setattr(ssh_transport, "PATIENCE_SECONDS", 0.2)
    keys = way.host.root / "root/.ssh/authorized_keys"
    ours = keys.read_text()
    way.hang_up(": >/root/.ssh/authorized_keys")
    wait_until(lambda: way.recorded.of(ContactLost), "ContactLost")
    with pytest.raises(ConnectionLost):
        way.transport.write("settings.json", "")
    keys.write_text(ours)
    wait_until(lambda: way.recorded.of(ContactRegained), "ContactRegained")
    (lost,), (regained,) = way.recorded.of(ContactLost), way.recorded.of(ContactRegained)
    assert (lost.instance_id, lost.node, regained.instance_id) == (way.instance.id, 0, way.instance.id)
    assert "refuses our keys" in lost.reason
    assert 0 < regained.seconds < 20
    way.transport.write("settings.json", "again")


# ── ports ────────────────────────────────────────────────────────────────────────────────────────────────────────────


def test_ports_are_forwarded_both_ways_and_checked(way, lead):
    """An address on the node is reached through a port here, which is kept for the next caller. A port there leads
    to one here. A closed port is not reached.
    """
    here, port = way.transport.address("tls://127.0.0.1:22").rsplit(":", 1)
    assert here == "tls://127.0.0.1"
    assert way.transport.address("tls://127.0.0.1:22") == f"{here}:{port}"
    with socket.create_connection(("127.0.0.1", int(port)), timeout=30) as wire:
        assert wire.recv(4) == b"SSH-"
    other = lead()
    assert way.transport.can_reach(other.host.ip, 22)
    assert not way.transport.can_reach(other.host.ip, 23)
    with socket.create_server(("127.0.0.1", 0)) as server:
        way.transport.lead(20_001, server.getsockname()[1])
        assert way.transport.can_reach("127.0.0.1", 20_001)
        with pytest.raises(Unreachable, match="refuses"):
            way.transport.lead(22, server.getsockname()[1])


# ── large values ─────────────────────────────────────────────────────────────────────────────────────────────────────


def _parcel(size: int) -> Parcel:
    buffers: list[pickle.PickleBuffer] = []
    data = pickle.dumps(bytearray(b"ab" * (size // 2)), protocol=5, buffer_callback=buffers.append)
    return Parcel(data, tuple(buffer.raw() for buffer in buffers))


def test_values_go_to_the_nodes_memory_and_come_back(lead):
    """A value on the node is in its memory, for its owner only. After it is taken it is unchanged, and removed
    there. A released value is removed too.
    """
    way = lead()
    way.transport.start("true", timeout_seconds=60, emit=way.recorded)
    memory = way.host.root / way.transport.value_directories[0].lstrip("/")
    there = way.transport.put(_parcel(MIB))
    assert [path.name for path in memory.iterdir()] == [Path(str(there.path)).name]
    assert next(memory.iterdir()).stat().st_mode & 0o777 == 0o600
    data, buffers = way.transport.take(there).contents()
    assert pickle.loads(data, buffers=buffers) == b"ab" * (MIB // 2)
    assert list(memory.iterdir()) == []
    way.transport.release(way.transport.put(_parcel(MIB)))
    assert list(memory.iterdir()) == []


def test_the_nodes_folder_in_memory_has_a_name_that_other_users_cannot_guess(lead):
    """Another user of the host sees the node's id: a folder that he makes with that name is not used.

    Clients that attach to the node later get the same folder.
    """
    way = lead()
    squatted = [f"/dev/shm/skyward-node-{way.instance.id}", f"/dev/shm/skyward-0-{way.instance.id}"]
    assert way.host.run(f"setpriv --reuid=nobody --clear-groups mkdir -m 777 {' '.join(squatted)}").returncode == 0
    way.transport.start("true", timeout_seconds=60, emit=way.recorded)
    memory, directory = way.transport.value_directories
    assert directory == way.instance.directory
    assert re.fullmatch(rf"/dev/shm/skyward-[A-Za-z0-9]{{10}}-{way.instance.id}", memory)
    there = (way.host.root / memory.lstrip("/")).stat()
    assert (there.st_uid, there.st_mode & 0o777) == (0, 0o700)
    way.transport.put(_parcel(MIB))
    assert [list((way.host.root / path.lstrip("/")).iterdir()) for path in squatted] == [[], []]
    way.transport.join(timeout_seconds=60)
    assert way.transport.value_directories == (memory, directory)
    way.host.run(f"rmdir {' '.join(squatted)}")


def test_a_value_goes_to_disk_if_memory_is_full_and_is_refused_if_both_are(lead):
    """Without room in the node's memory its disk takes the value. Without room there it raises CommandFailed, and no
    part of the value is left.
    """
    way = lead()
    way.transport.start("true", timeout_seconds=60, emit=way.recorded)
    there = way.transport.put(_parcel(MIB))
    (way.host.root / "dev/shm/filler").write_bytes(b"")
    way.host.run("head -c 300M /dev/zero >/dev/shm/filler")
    on_disk = way.transport.put(_parcel(4 * MIB))
    assert (str(there.path).startswith("/dev/shm/"), str(on_disk.path).startswith(str(way.instance.directory))) == (
        True,
        True,
    )
    way.host.fill_disk()
    before = sorted(way.directory.iterdir())
    with pytest.raises(CommandFailed, match="No space left"):
        way.transport.put(_parcel(4 * MIB))
    assert sorted(way.directory.iterdir()) == before
