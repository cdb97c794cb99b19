"""The SSH transport to a node, on real hosts with only a guard: files, lines, ports, values and leases, and the
effects of a lost connection.
"""

import os
import pickle
import re
import socket
import subprocess
import threading
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor, wait
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest

import skyward_core as sky
from skyward_core.concurrency.threads import LoopThread
from skyward_core.errors import CommandFailed, ConnectionLost, Unreachable
from skyward_core.events.events import ContactLost, ContactRegained
from skyward_core.image import shell
from skyward_core.machines.instances import Instance
from skyward_core.provisioning.bootstrap import guard_script
from skyward_core.transport import ssh_transport
from skyward_core.transport.code_upload import shipped_archive
from skyward_core.transport.ssh_transport import SSHConnections, SSHTransport
from skyward_core.transport.transport import LocalTransport
from skyward_core.wire.messages import Parcel
from skyward_core.wire.node_log import cut
from skyward_core.worker.node_clocks import uptime, write_lease
from tests.conftest import RecordedEvents
from tests.testbed import Fleet, Host
from tests.testbed.fixtures import fleet  # noqa: F401 - a fixture
from tests.testbed.rental import Cloud
from tests.waiting import wait_until

LEASE_SECONDS = 60
MIB = 1 << 20


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
    monkeypatch.setattr("tests.testbed.rental.BOOT", "mkdir -p {directory}; cat >/dev/null; : {variables}")
    way = lead()
    with pytest.raises(CommandFailed, match=r"the guard of .* has not started"):
        way.transport.join(timeout_seconds=1)


def test_closing_ends_a_start_that_waits_and_leaves_the_host_alone(lead):
    way = lead()
    wait_until((way.directory / "guard").exists, "the guard")
    (way.directory / "guard").unlink()
    with ThreadPoolExecutor(1) as threads:
        start = threads.submit(run_script, way, "true")
        wait_until(lambda: way.transport.is_connected, "the connection")
        way.transport.close()
        with pytest.raises(Unreachable):
            start.result(60)
    assert way.host.is_up
    with pytest.raises(Unreachable):
        way.transport.write("late", "")


def test_closing_while_a_thread_begins_waits_for_it(lead, monkeypatch):
    way = lead()
    wait_until((way.directory / "guard").exists, "the guard")
    with ThreadPoolExecutor(1) as threads:
        closing = []

        class Thread(LoopThread):
            def start(self) -> None:
                closing.append(threads.submit(way.transport.close))
                wait(closing, timeout=0.3)  # it does not end before this thread has started
                super().start()

        monkeypatch.setattr(ssh_transport, "LoopThread", Thread)
        with pytest.raises(Unreachable):
            run_script(way, "true")
        closing[0].result(60)
        assert len(closing) == 1
    assert not [one for one in threading.enumerate() if one.name.startswith("skyward-keep")]


@pytest.mark.nightly
def test_the_node_lives_as_long_as_its_lease_is_extended_and_then_ends(lead):
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
    """The pid may belong to another process by now. One that has not begun yet is not dead."""
    directory = tmp_path / "host-1"
    node = {"id": "host-1", "provider": "local", "pool_id": "p", "rank": 0, "region": "r", "instance_type": "t"}
    instance = Instance(**node, state=sky.InstanceState.RUNNING, directory=str(directory))

    def lives() -> bool | None:
        if not is_remote:
            return LocalTransport(instance, lambda: False, lambda: None).lives(1.0)
        output = subprocess.check_output(["sh", "-c", ssh_transport.LIVES, "skyward", str(directory)])
        return {b"": None, b"::skyward lives\n": True, b"::skyward dead\n": False}[output]

    assert lives() is False
    directory.mkdir()
    assert lives() is None
    (directory / "supervisor").write_text(f"{os.getpid()}\n")
    assert lives() is False, "that is this process"
    env = {"PATH": os.environ["PATH"], "SKYWARD_INSTANCE_DIRECTORY": str(directory)}
    with subprocess.Popen(["sleep", "600"], env=env) as process:
        (directory / "supervisor").write_text(f"{process.pid}\n")
        wait_until(lives, "it to be what it was started as")
        process.kill()
        os.waitid(os.P_PID, process.pid, os.WEXITED | os.WNOWAIT)
        assert lives() is False, "it is a zombie"
    assert lives() is False


def test_several_clients_at_once_do_not_shorten_a_lease(tmp_path: Path) -> None:
    """The longest one holds, from sh and from Python."""
    lease, words = tmp_path / "lease", (ssh_transport.LEASE, "skyward", str(tmp_path))
    for interpreter in ["sh", "bash"] * 20:
        lease.write_text(f"{int(uptime()) + 1}\n")
        others = [subprocess.Popen([interpreter, "-c", *words, seconds, "", ""]) for seconds in ("5", "300", "5")]
        write_lease(tmp_path, uptime() + 10)
        assert [other.wait(60) for other in others] == [0, 0, 0]
        assert float(lease.read_text()) > uptime() + 200
    assert [path.name for path in tmp_path.iterdir()] == ["lease"]


@pytest.mark.parametrize("interpreter", ["dash", "bash"])
def test_the_scripts_of_a_client_that_leaves_do_as_those_of_this_machine(interpreter: str, tmp_path: Path) -> None:
    """`node_clocks` has the same rules. A client that comes ends the warm time, and is told of by "used"."""

    def run(script: str, *words: str) -> str:
        command = [interpreter, "-c", script, "skyward", str(tmp_path), *words]
        return subprocess.run(command, check=True, capture_output=True, text=True).stdout.strip()

    def seconds(name: str) -> float:
        return float((tmp_path / name).read_text()) - uptime()

    run(ssh_transport.LEASE, "300", "", "", "")
    for mark in ("a", "b", "leaving"):
        run(ssh_transport.LEASE, "60", "", "", mark)
    assert (tmp_path / "leaving").read_text() == "a\nb\n"
    assert run(ssh_transport.KEEP_WARM, "20", "c", "") == "used"
    assert run(ssh_transport.KEEP_WARM, "20", "a", "") == ""
    assert (seconds("warm"), seconds("lease")) == (pytest.approx(20, abs=10), pytest.approx(300, abs=10))
    assert run(ssh_transport.KEEP_WARM, "5", "", "") == run(ssh_transport.KEEP_WARM, "600", "", "900") == ""
    found = (seconds("warm"), seconds("lease"), seconds("paid"))
    assert found == (pytest.approx(600, abs=10), pytest.approx(600, abs=10), pytest.approx(900, abs=10))
    run(ssh_transport.LEASE, "60", "", "", "")
    assert run(ssh_transport.KEEP_WARM, "20", "a", "") == "used"
    assert sorted(path.name for path in tmp_path.iterdir()) == ["busy", "lease", "paid"]


@pytest.mark.nightly
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


@pytest.mark.nightly
def test_each_sign_of_life_has_the_paid_time_of_the_node(lead):
    """On its own clock, rounded down. Without a limit of money there is no such file. After it the node ends."""
    paid: list[float | None] = [None]
    way = lead(lease_seconds=30, paid_seconds=lambda: paid[0])
    way.transport.join(timeout_seconds=60)
    way.transport.extend_lease(30)
    assert not (way.directory / "paid").exists()
    for seconds in (500.9, 100.9):
        paid[0], before = seconds, uptime()
        way.transport.extend_lease(30)
        assert before - 1 + seconds - 1 <= int((way.directory / "paid").read_text()) <= uptime() + seconds
    assert sorted(path.name for path in way.directory.glob("[lp]*") if path.name != "log") == ["lease", "paid"]
    paid[0] = 0.5
    way.transport.extend_lease(30)
    wait_until(lambda: not way.host.is_up, "the host to turn itself off")


def test_files_are_private_and_read_back(way):
    way.transport.write("settings.json", "it's\n$HOME \N{SNOWMAN}")
    assert way.transport.read("settings.json") == "it's\n$HOME \N{SNOWMAN}"
    assert (way.directory / "settings.json").stat().st_mode & 0o777 == 0o600
    with pytest.raises(CommandFailed):
        way.transport.read("nothing")


def test_each_line_of_the_log_is_delivered_once_however_often_the_connection_is_lost(way):
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


def test_a_log_that_is_cut_is_read_on_also_over_a_lost_connection(way):
    log = way.directory / "log"

    def write(first: int, last: int) -> list[str]:
        lines = [f"line {number:06}" for number in range(first, last)]
        with log.open("a") as file:
            file.write("".join(f"{line}\n" for line in lines))
        return lines

    written = write(0, 1000)
    wait_until(lambda: way.has_emitted(written[-1]), "the first lines")
    assert cut(str(log), most_bytes=1000, kept_bytes=100)
    written += write(1000, 1010)
    wait_until(lambda: way.has_emitted(written[-1]), "the lines after the cut")
    way.hang_up()
    written += write(1010, 1020)
    wait_until(lambda: way.has_emitted(written[-1]), "the lines after the loss")
    assert [line for line in way.lines if line.startswith("line ")] == written


def test_requests_during_a_loss_are_served_after_it(way):
    way.hang_up()
    way.transport.write("settings.json", "there")
    assert (way.directory / "settings.json").read_text() == "there"
    way.hang_up()
    assert way.transport.can_reach("127.0.0.1", 22)


@pytest.mark.nightly
def test_a_node_that_refuses_us_counts_as_silent_until_it_accepts(way, monkeypatch):
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


def test_ports_are_forwarded_both_ways_and_checked(way, lead):
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


def run_script(way: Way, script: str) -> None:
    way.transport.start(script, timeout_seconds=60, emit=way.recorded)


@pytest.mark.nightly
def test_a_script_is_started_once_and_followed_to_its_end(lead):
    """Although the answer to its start was lost. Looks inside: no server loses an answer when asked."""
    way = lead()
    ask, starts = way.transport._command, []

    def lose_the_first_answer(text: str, words: list[str], **settings: Any) -> str:
        answer = ask(text, words, **settings)
        if text == ssh_transport.START:
            starts.append(words)
            if len(starts) == 1:
                raise ConnectionLost("after it was done")
        return answer

    way.transport._command = lose_the_first_answer
    package = f"ship/{shipped_archive().name}/skyward_core/transport/ssh_transport.py"
    tags = 'echo "ran on $SKYWARD_INSTANCE_ID, $SKYWARD_RANK of $SKYWARD_POOL_ID"\n'
    run_script(way, f'{tags}"$SKYWARD_UV" --version | sed "s/ .*//"\nls "$SKYWARD_HOME/{package}"\nexit 7\n')
    wait_until(lambda: way.has_emitted("::skyward exited 7"), "the end of the script")
    assert len(starts) == 2
    home = str(way.instance.directory).partition("/instances/")[0]
    ours = ["::skyward phase uv", f"ran on {way.instance.id}, 0 of sky-ways", "uv", f"{home}/{package}"]
    assert way.lines == [*ours, "::skyward exited 7"]
    assert not (way.directory / "ship.tar.gz").exists()


@pytest.mark.nightly
def test_a_running_script_is_not_touched_by_a_second_request_to_start_it(lead):
    """bash reads a script while it runs it, and would take the end of a part for the end of the script.

    A part is never started. Looks inside: the command is kept, sent again, and half of it is lost.
    """
    way = lead()
    ask, asked = way.transport._command, list[list[str]]()

    def lose_half(text: str, words: list[str], *, stdin: str | None = None, **settings: Any) -> str:
        return ask(text, words, stdin=stdin[: len(stdin) // 2] if stdin else None, **settings)

    way.transport._command = lose_half
    with pytest.raises(CommandFailed, match="could not run a command of ours"):
        run_script(way, "exit 6\nexit 7\n")
    assert not list(way.directory.glob("bootstrap*"))

    def remember(text: str, words: list[str], **settings: Any) -> str:
        if text == ssh_transport.START:
            asked.append(words)
        return ask(text, words, **settings)

    way.transport._command = remember
    wait = 'until [ -e "$SKYWARD_INSTANCE_DIRECTORY/go" ]; do sleep 0.05; done\n'
    script = "echo runs\n" + wait + f"# {'x' * 100}\n" * 1000 + "exit 7\n"
    run_script(way, script)
    wait_until(lambda: way.has_emitted("runs"), "the script to run")
    for part in (script[:20], ""):
        ask(ssh_transport.START, asked[0], stdin=part)
    (way.directory / "go").touch()
    wait_until(lambda: way.has_emitted("::skyward exited 7"), "the end of the script")
    assert "::skyward exited 0" not in way.lines


@pytest.mark.nightly
def test_on_a_full_disk_a_script_can_still_report_its_failure(lead):
    """Not one byte is free when a script fails, not even for the log."""
    way = lead()
    fill = 'cat /dev/zero >"$HOME/filler" || true\nwhile printf "x\\n"; do :; done 2>/dev/null\n'
    run_script(way, shell.script(shell.prelude(), "skyward_phase deps", fill, "skyward_run cp /etc/passwd /root"))
    wait_until(lambda: way.has_emitted("::skyward exited 1"), "the end of the script")
    assert [line for line in way.lines if line != "x"][-3:] == [
        "The disk that holds /root/.cache/skyward is full, or nearly so.",
        "::skyward failed phase=deps exit=1 command=cp /etc/passwd /root",
        "::skyward exited 1",
    ]


def parcel(size: int) -> Parcel:
    buffers: list[pickle.PickleBuffer] = []
    data = pickle.dumps(bytearray(size), protocol=5, buffer_callback=buffers.append)
    return Parcel(data, tuple(buffer.raw() for buffer in buffers))


@pytest.mark.nightly
def test_values_go_to_the_nodes_memory_and_come_back(lead):
    """In a folder with a name that other users cannot guess; they see the node's id. Clients that attach later get it."""
    way = lead()
    squatted = [f"/dev/shm/skyward-{user}-{way.instance.id}" for user in ("node", "0")]
    assert way.host.run(f"setpriv --reuid=nobody --clear-groups mkdir -m 777 {' '.join(squatted)}").returncode == 0
    run_script(way, "true")
    folders = way.transport.value_directories
    assert folders[1] == way.instance.directory
    assert re.fullmatch(rf"/dev/shm/skyward-[A-Za-z0-9]{{10}}-{way.instance.id}", folders[0])
    memory = way.host.root / folders[0].lstrip("/")
    assert (memory.stat().st_uid, memory.stat().st_mode & 0o777) == (0, 0o700)
    there = way.transport.put(parcel(MIB))
    assert [path.name for path in memory.iterdir()] == [Path(str(there.path)).name]
    assert next(memory.iterdir()).stat().st_mode & 0o777 == 0o600
    data, buffers = way.transport.take(there).contents()
    assert pickle.loads(data, buffers=buffers) == bytes(MIB)
    way.transport.release(way.transport.put(parcel(MIB)))
    assert list(memory.iterdir()) == []
    assert [list((way.host.root / path.lstrip("/")).iterdir()) for path in squatted] == [[], []]
    way.transport.join(timeout_seconds=60)
    assert way.transport.value_directories == folders
    way.host.run(f"rmdir {' '.join(squatted)}")


@pytest.mark.nightly
def test_a_value_goes_to_disk_if_memory_is_full_and_is_refused_if_both_are(lead):
    """No part of a refused value is left."""
    way = lead()
    run_script(way, "true")
    there = way.transport.put(parcel(MIB))
    way.host.run("head -c 300M /dev/zero >/dev/shm/filler")
    on_disk = way.transport.put(parcel(4 * MIB))
    assert str(there.path).startswith("/dev/shm/")
    assert str(on_disk.path).startswith(str(way.instance.directory))
    way.host.fill_disk()
    before = sorted(way.directory.iterdir())
    with pytest.raises(CommandFailed, match="No space left"):
        way.transport.put(parcel(4 * MIB))
    assert sorted(way.directory.iterdir()) == before
