"""The guard of a node, as a real process on this machine: when it ends the node, and what it removes."""

import contextlib
import os
import shutil
import signal
import subprocess
import sys
import uuid
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from datetime import UTC, datetime, timedelta
from pathlib import Path

import pytest

from skyward_core.machines.instances import NodeEnd, node_end
from skyward_core.provisioning.bootstrap import guard_script
from skyward_core.worker.node_clocks import read_lease, write_paid
from tests.conftest import processes_by_tag
from tests.waiting import wait_until

SHELLCHECK = Path(sys.executable).with_name("shellcheck")
LEASE_SECONDS = 120


@dataclass
class Node:
    """A node on a machine with an uptime that the test sets."""

    folder: Path
    id: str
    process: "subprocess.Popen[str]"
    clock: Path
    environ: dict[str, str]
    others: "list[subprocess.Popen[bytes]]" = field(default_factory=list)

    @property
    def directory(self) -> Path:
        return self.folder / "instance"

    def write(self, name: str, text: str) -> None:
        partial = self.folder / "partial"
        partial.write_text(text)
        partial.replace(self.directory / name)

    def set_uptime(self, seconds: float) -> None:
        partial = self.folder / "clock.partial"
        partial.write_text(f"{seconds:.2f} 5.00\n")
        partial.replace(self.clock)

    def start(self, *argv: str, **environ: str) -> "subprocess.Popen[bytes]":
        """Start another process of the node."""
        process = subprocess.Popen(
            argv,
            env=self.environ | environ,
            stdin=subprocess.DEVNULL,
            stdout=subprocess.DEVNULL,
            start_new_session=True,
        )
        self.others.append(process)
        wait_until(lambda: (process.pid, self.id) in processes_by_tag("SKYWARD_INSTANCE_ID"), "the process to be there")
        return process

    def looked(self) -> None:
        """Return after the guard has read the present state once more."""
        last = self.sleep()
        wait_until(lambda: self.sleep() not in (None, last), "the guard to look")
        last = self.sleep()
        wait_until(lambda: self.sleep() not in (None, last), "the guard to look again")

    def sleep(self) -> str | None:
        try:
            return Path(f"/proc/{self.process.pid}/task/{self.process.pid}/children").read_text().strip() or None
        except OSError:
            pytest.fail(f"the guard has ended: {self.process.stderr.read() if self.process.stderr else ''}")

    def ended(self) -> str:
        """Wait until the guard has ended. Return its standard output."""
        out, _ = self.process.communicate(timeout=60)
        assert self.process.returncode == 0
        return out


@pytest.fixture
def guarded(tmp_path: Path) -> Iterator[Callable[..., Node]]:
    """Start a guard on a machine that has been up for 1000 s. It looks more often than once a second."""
    made: list[Node] = []

    def make(
        max_lifetime: float | None = None,
        end_command: str = "",
        locked: Path | None = None,
        paid_seconds: float | None = None,
        pause_seconds: float = 0.02,
        **environ: str,
    ) -> Node:
        instance_id = f"host-{uuid.uuid4().hex[:12]}"
        clock = tmp_path / "clock"
        clock.write_text("1000.99 5.00\n")
        fields = {
            "PATH": os.environ["PATH"],
            "SKYWARD_INSTANCE_ID": instance_id,
            "SKYWARD_INSTANCE_DIRECTORY": str(tmp_path / "instance"),
            "SKYWARD_POOL_ID": "sky-x",
            "SKYWARD_KEEP_DIRECTORY": "1",
        }
        script = tmp_path / "guard.sh"
        text = guard_script(LEASE_SECONDS, max_lifetime, end_command, paid_seconds)
        assert "\nskyward_pause=1\n" in text
        script.write_text(text.replace("\nskyward_pause=1\n", f"\nskyward_pause={pause_seconds}\n"))
        full = fields | {"SKYWARD_UPTIME_FILE": str(clock)} | environ
        argv = (
            ["dash", "-c", 'exec 9<"$2"; flock -n 9; exec dash "$1"', "lock", str(script), str(locked)]
            if locked
            else ["dash", str(script)]
        )
        process = subprocess.Popen(
            argv, env=full, stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
        )
        node = Node(tmp_path, instance_id, process, clock, fields)
        made.append(node)
        wait_until(lambda: process.poll() is not None or (node.directory / "guard").exists(), "the guard to be up")
        return node

    yield make
    for node in made:
        node.process.kill()
        node.process.communicate()
        for pid, tag in processes_by_tag("SKYWARD_INSTANCE_ID"):
            if tag == node.id:
                with contextlib.suppress(ProcessLookupError):
                    os.kill(pid, signal.SIGKILL)
        for process in node.others:
            process.wait()
        if node.directory.is_dir():
            shutil.rmtree(node.directory)
        node.directory.unlink(missing_ok=True)


def last_words(node: Node) -> str:
    """Return the node's log at its end."""
    node.ended()
    return (node.directory / "log").read_text()


def lives_until(node: Node, seconds: float) -> None:
    """Move the clock: one second before this uptime the node lives, at this uptime it ends."""
    node.looked()
    node.set_uptime(seconds - 1)
    node.looked()
    node.set_uptime(seconds)


LEASE_OVER = "no sign of life from a client, and the lease has run out (lease_seconds)"
MONEY_OVER = "the money is used up (max_cost, budget)"

# ── a living node ────────────────────────────────────────────────────────────────────────────────────────────────────


def test_a_running_guard_has_a_pid_file_and_a_lease(guarded):
    """In a private directory. Without another clock the lease counts from the uptime of this machine."""
    before = float(Path("/proc/uptime").read_text().split()[0])
    node = guarded(SKYWARD_UPTIME_FILE="")
    assert int((node.directory / "guard").read_text()) == node.process.pid
    assert (read_lease(node.directory) or 0) - LEASE_SECONDS >= before - 1
    assert node.directory.stat().st_mode & 0o777 == 0o700
    assert sorted(path.name for path in node.directory.iterdir()) == ["guard", "lease"]


def test_the_script_is_plain_sh():
    """shellcheck and dash report nothing, for any end command. A machine runs user data only with the first line."""
    script = guard_script(0.5, 3600, "echo 'it'\"'\"'s over'; shutdown -P now")
    assert script.startswith("#!/bin/sh\n")
    for argv in ([SHELLCHECK, "--shell=sh", "-"], ["dash", "-n"]):
        done = subprocess.run(argv, input=script, capture_output=True, text=True, check=False)
        assert done.stdout + done.stderr == ""


def test_a_guard_that_cannot_write_ends_the_machine(guarded, tmp_path):
    """It does not wait: it writes the reason to standard error and runs the end command."""
    (tmp_path / "instance").write_text("in the way")
    node = guarded(end_command="echo shut down")
    out, errors = node.process.communicate(timeout=120)
    assert out == "shut down\n"
    assert "cannot write" in errors


# ── reasons to end a node ────────────────────────────────────────────────────────────────────────────────────────────


@pytest.mark.parametrize(
    ("options", "files", "seconds", "reason"),
    [
        ({}, {}, 1000 + LEASE_SECONDS, LEASE_OVER),
        ({}, {"lease": "5000.250\n"}, 5000, LEASE_OVER),
        ({"max_lifetime": 300}, {"lease": "90000\n"}, 1300, "alive for 300 s (max_lifetime)"),
        ({}, {"lease": "90000\n", "paid": "1300\n"}, 1300, MONEY_OVER),
        # the paid time of the launch counts until another is written, which may be longer or shorter
        ({"paid_seconds": 300.9}, {"lease": "90000\n"}, 1300, MONEY_OVER),
        ({"paid_seconds": 300.9}, {"lease": "90000\n", "paid": "1200\n"}, 1200, MONEY_OVER),
        ({"paid_seconds": 300.9}, {"lease": "90000\n", "paid": "4000\n"}, 4000, MONEY_OVER),
        ({}, {"lease": "90000\n", "warm": "1020.250\n"}, 1020, "its warm time is over (keep_warm)"),
        ({}, {"lease": "1050\n", "warm": "soon\n"}, 1050, LEASE_OVER),
        # without any valid value there is no limit of money
        ({}, {"paid": "0x10\n"}, 1000 + LEASE_SECONDS, LEASE_OVER),
    ],
)
def test_a_node_ends_by_its_clocks(guarded, options, files, seconds, reason):
    """It lives until a second before, and logs the reason."""
    node = guarded(**options)
    for name, text in files.items():
        node.write(name, text)
    lives_until(node, seconds)
    assert last_words(node) == f"skyward: node ends: {reason}\n"


def test_a_node_writes_when_and_why_it_has_ended(guarded, tmp_path):
    """Into a folder that stays, if it was given one. A node that is asked to end writes nothing: who asks knows when."""
    asked = guarded(SKYWARD_ENDS=str(tmp_path / "ended"))
    asked.process.terminate()
    asked.ended()
    assert not (tmp_path / "ended").exists()
    shutil.rmtree(asked.directory)
    node = guarded(SKYWARD_ENDS=str(tmp_path / "ended"))
    node.set_uptime(1000 + LEASE_SECONDS)
    node.ended()
    boot = Path("/proc/sys/kernel/random/boot_id").read_text().strip()
    now = datetime.now(UTC)
    text = (tmp_path / "ended" / node.id).read_text()
    assert node_end(text, now=now, uptime=1000 + LEASE_SECONDS + 50, boot=boot) == NodeEnd(
        now - timedelta(seconds=50), LEASE_OVER
    )
    assert abs(float(text.split()[1]) - now.timestamp()) < 60


def test_lease_and_paid_time_can_be_raised_and_lowered(guarded):
    """The last value that the Python side has written counts."""
    node = guarded()
    node.write("lease", "3000\n")
    write_paid(node.directory, 1300)
    node.looked()
    node.write("lease", "90000\n")
    write_paid(node.directory, 5000)
    node.set_uptime(4999)
    node.looked()
    write_paid(node.directory, 4000)
    assert MONEY_OVER in last_words(node)


@pytest.mark.parametrize(("name", "reason"), [("lease", LEASE_OVER), ("paid", MONEY_OVER)])
def test_an_unreadable_time_is_ignored(guarded, name, reason):
    """If the file is incomplete, invalid or missing, the last valid time counts, and it ends the node. Without a
    readable clock the node lives.
    """
    node = guarded()
    node.write("lease", "90000\n")
    node.write(name, "3000\n")
    node.looked()
    node.clock.unlink()
    node.looked()
    node.set_uptime(2999)
    for text in ("", "12.5", "soon\n", "-5\n", "1e3\n", "inf\n", "9" * 40 + "\n", "\0\0\n"):
        node.write(name, text)
        node.looked()
    (node.directory / name).unlink()
    node.looked()
    node.set_uptime(3000)
    assert reason in last_words(node)


def test_a_node_ends_if_it_reports_its_end(guarded):
    """The content of the file `ended` is the reason, literally. It comes after other reports."""
    node = guarded()
    node.write("log", "hello\n")
    node.write("ended", "idle for 3600 s (timeout): $HOME `x` 'y' \\n\n")
    assert last_words(node) == "hello\nskyward: node ends: idle for 3600 s (timeout): $HOME `x` 'y' \\n\n"


def test_a_node_ends_with_its_supervisor(guarded):
    """Also while the supervisor is a zombie, or if a process of another instance has its pid."""
    node = guarded()
    node.write("supervisor", "")
    node.looked()
    supervisor = node.start("sleep", "300")
    node.write("supervisor", f"{supervisor.pid}\n")
    node.looked()
    supervisor.kill()
    assert last_words(node) == "skyward: node ends: its supervisor is gone\n"
    supervisor.wait()
    shutil.rmtree(node.directory)
    reused = guarded()
    reused.write("supervisor", f"{os.getpid()}\n")
    assert "its supervisor is gone" in last_words(reused)


def test_a_supervisor_that_ends_the_node_gives_the_reason(guarded):
    """The guard reports no crash."""
    node = guarded()
    wait = 'cd "$SKYWARD_INSTANCE_DIRECTORY"; until [ -e go ]; do sleep 0.01; done; echo idle >new; mv new ended'
    supervisor = node.start("sh", "-c", wait)
    node.write("supervisor", f"{supervisor.pid}\n")
    node.looked()
    node.write("go", "")
    assert last_words(node) == "skyward: node ends: idle\n"
    supervisor.wait()


# ── what the guard removes ───────────────────────────────────────────────────────────────────────────────────────────


def test_the_whole_node_is_removed_and_nothing_else(guarded):
    """Each process with the tag is killed, also those that ignore signals, and those that fork. SIGTERM ends it at once.

    Other instances live, also one with a similar id. Their folders in memory stay.
    """
    node = guarded(SKYWARD_KEEP_DIRECTORY="")
    deaf = node.start(
        sys.executable,
        "-c",
        "import signal, time\nfor n in (1, 2, 15): signal.signal(n, signal.SIG_IGN)\ntime.sleep(300)",
    )
    forking = node.start("bash", "-c", "for i in {1..2000}; do (sleep 300 & sleep 0.02); done")
    alike = node.start("sleep", "300", SKYWARD_INSTANCE_ID=node.id, SKYWARD_POOL_ID="x")
    others = [
        {"SKYWARD_INSTANCE_ID": tag, "SKYWARD_INSTANCE_DIRECTORY": "/nowhere", "WAS": f"SKYWARD_INSTANCE_ID={node.id}"}
        for tag in (f"{node.id}0", node.id[:-1])
    ]
    strangers = [subprocess.Popen(["sleep", "300"], env={"PATH": os.environ["PATH"], **other}) for other in others]
    memory, other = Path(f"/dev/shm/skyward-node-{node.id}"), Path(f"/dev/shm/skyward-node-{node.id}0")
    try:
        memory.mkdir()
        (memory / "value").write_bytes(b"x" * 100_000)
        other.mkdir()
        node.process.terminate()
        node.ended()
        for process in (deaf, forking, alike):
            assert process.wait(120) == -signal.SIGKILL
        assert node.id not in {tag for _, tag in processes_by_tag("SKYWARD_INSTANCE_ID")}
        assert [process.poll() for process in strangers] == [None, None]
        assert (node.directory.exists(), memory.exists(), other.exists()) == (False, False, True)
    finally:
        other.rmdir()
        for process in strangers:
            process.kill()
            process.wait()


@pytest.mark.skipif(os.geteuid() != 0, reason="mounting needs root")
def test_mounts_are_unmounted(guarded, tmp_path):
    """All recorded mounts, also nested ones. Files below a mount point stay, and so do those of an unrecorded mount.

    A recorded mount point without a mount is no error.
    """
    outer = tmp_path / "a folder"
    inner = outer / "inner"
    outer.mkdir()
    (outer / "below").write_text("stays")
    node = guarded(SKYWARD_KEEP_DIRECTORY="")
    bucket = node.directory / "bucket"
    bucket.mkdir()
    for place in (outer, inner, bucket):
        place.mkdir(exist_ok=True)
        subprocess.run(["mount", "-t", "tmpfs", "skyward-test", str(place)], check=True)
    (bucket / "precious").write_text("x")
    node.write("mounts", f"{outer}\n/no/such/mount\n{inner}")
    try:
        node.process.terminate()
        node.ended()
        mounted = Path("/proc/self/mounts").read_text()
        assert (bucket / "precious").exists()
    finally:
        subprocess.run(["umount", "-l", str(inner), str(outer), str(bucket)], check=False, capture_output=True)
    assert str(outer).replace(" ", "\\040") not in mounted
    assert [path.name for path in outer.iterdir()] == ["below"]


def test_the_end_command_runs_last(guarded, tmp_path):
    """After everything else, for any reason. Its quotes are kept."""
    node = guarded(end_command=f"test -e '{tmp_path}/instance' || echo \"it's over\"", SKYWARD_KEEP_DIRECTORY="")
    node.write("ended", "enough")
    assert node.ended() == "it's over\n"


def test_a_killed_guard_holds_nothing(guarded, tmp_path):
    """Its `sleep` survives. That process has neither the node's tag, with which it would count as the node, nor the
    provider's lock on descriptor 9.
    """
    lock = tmp_path / "lock"
    lock.touch()
    node = guarded(locked=lock, pause_seconds=60)
    pauses: list[int] = []
    wait_until(lambda: pauses.extend(pauses_of(node)) or pauses, "the guard to pause")
    pause = pauses[0]
    assert flock(lock) == 1
    node.process.kill()
    node.process.wait()
    assert Path(f"/proc/{pause}/comm").read_text() == "sleep\n"
    assert flock(lock) == 0
    assert node.id not in {tag for _, tag in processes_by_tag("SKYWARD_INSTANCE_ID")}
    os.kill(pause, signal.SIGKILL)


def pauses_of(node: Node) -> list[int]:
    """Return the id of the guard's `sleep`. The guard has other children for moments."""
    found: list[int] = []
    for pid in (node.sleep() or "").split():
        with contextlib.suppress(OSError):
            found += [int(pid)] if Path(f"/proc/{pid}/comm").read_text() == "sleep\n" else []
    return found


def flock(lock: Path) -> int:
    return subprocess.run(["flock", "-n", str(lock), "true"], check=False).returncode
