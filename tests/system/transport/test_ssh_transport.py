"""The SSH transport to a node, on real hosts with only a guard: files, lines, ports, values and leases, and the
effects of a lost connection.
"""

import os
import socket
import subprocess
import threading
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path

import pytest

import skyward_core as sky
from skyward_core.errors import CommandFailed, ConnectionLost, Unreachable
from skyward_core.events.events import ContactLost, ContactRegained
from skyward_core.machines.instances import Instance
from skyward_core.provisioning.guard import guard_script
from skyward_core.transport import ssh_transport
from skyward_core.transport.ssh_transport import SSHConnections, SSHTransport
from skyward_core.transport.transport import LocalTransport
from skyward_core.worker.watchdog import uptime, write_lease
from tests.conftest import RecordedEvents, wait_until
from tests.testbed import Fleet, Host
from tests.testbed.fixtures import fleet  # noqa: F401 - a fixture
from tests.testbed.rental import Cloud

LEASE_SECONDS = 60


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
