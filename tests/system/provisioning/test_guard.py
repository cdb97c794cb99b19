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
from pathlib import Path

import pytest

from skyward_core.provisioning import guard
from skyward_core.provisioning.guard import guard_script
from skyward_core.worker.watchdog import read_lease, write_paid
from tests.conftest import processes_by_tag, wait_until

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
def guarded(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Callable[..., Node]]:
    """Start a guard on a machine that has been up for 1000 s."""
    monkeypatch.setattr(guard, "PAUSE_SECONDS", 0.02)
    made: list[Node] = []

    def make(
        max_lifetime: float | None = None,
        end_command: str = "",
        locked: Path | None = None,
        paid_seconds: float | None = None,
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
        }
        script = tmp_path / "guard.sh"
        script.write_text(guard_script(LEASE_SECONDS, max_lifetime, end_command, paid_seconds))
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
    """Return the node's log at its end. The node must keep its directory."""
    return (node.directory / "log").read_text()


# ── a living node ────────────────────────────────────────────────────────────────────────────────────────────────────


def test_a_running_guard_has_a_pid_file_and_a_lease(guarded):
    """Its private directory has its pid and the first lease. The Python side can read them."""
    node = guarded()
    assert int((node.directory / "guard").read_text()) == node.process.pid
    assert read_lease(node.directory) == 1000 + LEASE_SECONDS
    assert node.directory.stat().st_mode & 0o777 == 0o700
    assert sorted(path.name for path in node.directory.iterdir()) == ["guard", "lease"]


def test_the_uptime_of_the_machine_counts(guarded):
    """If no other clock is given, the lease counts from the uptime of this machine."""
    before = float(Path("/proc/uptime").read_text().split()[0])
    node = guarded(SKYWARD_UPTIME_FILE="")
    assert before - 1 <= (read_lease(node.directory) or 0) - LEASE_SECONDS <= before + 30


def test_the_script_names_its_shell_first() -> None:
    """A machine runs its user data only if it begins like this."""
    assert guard_script(LEASE_SECONDS, None, "").startswith("#!/bin/sh\n")


def test_the_script_is_plain_sh():
    """shellcheck and dash report nothing, for any end command."""
    script = guard_script(0.5, 3600, "echo 'it'\"'\"'s over'; shutdown -P now")
    assert (
        subprocess.run(
            [SHELLCHECK, "--shell=sh", "-"], input=script, capture_output=True, text=True, check=False
        ).stdout
        == ""
    )
    assert subprocess.run(["dash", "-n"], input=script, capture_output=True, text=True, check=False).stderr == ""


def test_a_guard_that_cannot_write_ends_the_machine(guarded, tmp_path):
    """If no directory can be created, the guard does not wait.

    It writes the reason to standard error and runs the end command.
    """
    (tmp_path / "instance").write_text("in the way")
    node = guarded(end_command="echo shut down", SKYWARD_KEEP_DIRECTORY="1")
    out, errors = node.process.communicate(timeout=60)
    assert out == "shut down\n"
    assert "cannot write" in errors


# ── reasons to end a node ────────────────────────────────────────────────────────────────────────────────────────────


def test_a_node_ends_when_its_lease_expires(guarded):
    """One second before the expiry the node lives. At the expiry it ends and logs the reason."""
    node = guarded(SKYWARD_KEEP_DIRECTORY="1")
    node.set_uptime(1000 + LEASE_SECONDS - 0.01)
    node.looked()
    node.set_uptime(1000 + LEASE_SECONDS)
    node.ended()
    assert (
        last_words(node)
        == "skyward: node ends: no sign of life from a client, and the lease has run out (lease_seconds)\n"
    )


def test_a_lease_can_be_extended_and_shortened(guarded):
    """The guard reads the lease that the Python side writes."""
    node = guarded()
    node.write("lease", "5000.250\n")
    node.looked()
    node.set_uptime(4999)
    node.looked()
    node.write("lease", "4000\n")
    node.ended()


def test_without_a_readable_clock_a_node_lives(guarded):
    """The node lives until an uptime can be read."""
    node = guarded()
    node.clock.unlink()
    node.looked()
    node.set_uptime(1000 + LEASE_SECONDS)
    node.ended()


def test_a_node_ends_at_its_maximum_lifetime(guarded):
    """`max_lifetime` ends the node, for any lease."""
    node = guarded(max_lifetime=300, SKYWARD_KEEP_DIRECTORY="1")
    node.write("lease", "90000\n")
    node.looked()
    node.set_uptime(1299.9)
    node.looked()
    node.set_uptime(1300)
    node.ended()
    assert last_words(node) == "skyward: node ends: alive for 300 s (max_lifetime)\n"


def test_a_node_ends_at_the_end_of_its_paid_time(guarded):
    """The Python side has written this time. It ends the node, for any lease. The reason names the money."""
    node = guarded(SKYWARD_KEEP_DIRECTORY="1")
    node.write("lease", "90000\n")
    write_paid(node.directory, 1300.25)
    node.looked()
    node.set_uptime(1299.9)
    node.looked()
    node.set_uptime(1300.3)
    node.ended()
    assert last_words(node) == "skyward: node ends: the money is used up (max_cost, budget)\n"


@pytest.mark.parametrize("paid", [None, 1200.0, 4000.0])
def test_the_paid_time_of_the_launch_counts_until_another_is_written(guarded, paid):
    """The later value may be longer or shorter."""
    node = guarded(paid_seconds=300.9, SKYWARD_KEEP_DIRECTORY="1")
    node.write("lease", "90000\n")
    if paid is not None:
        write_paid(node.directory, paid)
    end = paid or 1300
    node.looked()
    node.set_uptime(end - 1)
    node.looked()
    node.set_uptime(end)
    node.ended()
    assert last_words(node) == "skyward: node ends: the money is used up (max_cost, budget)\n"


def test_paid_time_can_be_raised_and_lowered(guarded):
    """The last value counts."""
    node = guarded()
    node.write("lease", "90000\n")
    write_paid(node.directory, 1300)
    node.looked()
    write_paid(node.directory, 5000)
    node.set_uptime(4999)
    node.looked()
    write_paid(node.directory, 4000)
    node.ended()


@pytest.mark.parametrize("text", ["", "12.5", "soon\n", "inf\n", "9" * 40 + "\n", None])
def test_an_unreadable_paid_time_is_ignored(guarded, text):
    """If the file is invalid or missing, the last valid time counts, and it ends the node."""
    node = guarded()
    node.write("lease", "90000\n")
    node.write("paid", "3000\n")
    node.looked()
    if text is None:
        (node.directory / "paid").unlink()
    else:
        node.write("paid", text)
    node.set_uptime(2999)
    node.looked()
    node.set_uptime(3000)
    node.ended()


def test_an_invalid_paid_time_is_no_limit(guarded):
    """If no value is valid, only the lease counts."""
    node = guarded(SKYWARD_KEEP_DIRECTORY="1")
    node.write("paid", "0x10\n")
    node.set_uptime(1000 + LEASE_SECONDS - 1)
    node.looked()
    node.set_uptime(1000 + LEASE_SECONDS)
    node.ended()
    assert "lease_seconds" in last_words(node)


def test_a_node_ends_if_it_reports_its_end(guarded):
    """The content of the file `ended` is the reason, literally. It comes after other reports."""
    node = guarded(SKYWARD_KEEP_DIRECTORY="1")
    node.write("log", "hello\n")
    node.write("ended", "idle for 3600 s (timeout): $HOME `x` 'y' \\n\n")
    node.ended()
    assert last_words(node) == "hello\nskyward: node ends: idle for 3600 s (timeout): $HOME `x` 'y' \\n\n"


def test_a_node_ends_with_its_supervisor(guarded):
    """The node ends when its supervisor is killed, also while the supervisor is a zombie."""
    node = guarded(SKYWARD_KEEP_DIRECTORY="1")
    node.write("supervisor", "")
    node.looked()
    supervisor = node.start("sleep", "300")
    node.write("supervisor", f"{supervisor.pid}\n")
    node.looked()
    supervisor.kill()
    node.ended()
    assert last_words(node) == "skyward: node ends: its supervisor is gone\n"
    supervisor.wait()


def test_a_process_with_a_reused_pid_is_no_supervisor(guarded):
    """It has the supervisor's pid, but belongs to another instance."""
    node = guarded(SKYWARD_KEEP_DIRECTORY="1")
    node.write("supervisor", f"{os.getpid()}\n")
    node.ended()
    assert "its supervisor is gone" in last_words(node)


def test_a_supervisor_that_ends_the_node_gives_the_reason(guarded):
    """The guard uses the reason that the supervisor has written, and reports no crash."""
    node = guarded(SKYWARD_KEEP_DIRECTORY="1")
    supervisor = node.start(
        "sh",
        "-c",
        'cd "$SKYWARD_INSTANCE_DIRECTORY"; until [ -e go ]; do sleep 0.01; done; echo idle >new; mv new ended',
    )
    node.write("supervisor", f"{supervisor.pid}\n")
    node.looked()
    node.write("go", "")
    node.ended()
    supervisor.wait()
    assert last_words(node) == "skyward: node ends: idle\n"


def test_sigterm_ends_the_node(guarded):
    """The node ends at once, not at the next check."""
    node = guarded(SKYWARD_KEEP_DIRECTORY="1")
    node.process.terminate()
    node.ended()
    assert last_words(node) == "skyward: node ends: asked to\n"


# ── what the guard removes ───────────────────────────────────────────────────────────────────────────────────────────


def test_the_whole_node_is_removed_and_nothing_else(guarded, tmp_path):
    """Each process with the tag is killed, also those with their own session, those that ignore signals, and those that
    fork.

    Other instances live, also one with a similar id. The node's folders in memory and on disk are removed. Folders of
    other instances stay.
    """
    node = guarded()
    deaf = node.start(
        sys.executable,
        "-c",
        "import signal, time\nfor n in (1, 2, 15): signal.signal(n, signal.SIG_IGN)\ntime.sleep(300)",
    )
    forking = node.start("bash", "-c", "for i in {1..2000}; do (sleep 300 & sleep 0.02); done")
    alike = node.start("sleep", "300", SKYWARD_INSTANCE_ID=node.id, SKYWARD_POOL_ID="x")
    strangers = []
    for tag in (f"{node.id}0", node.id[:-1]):
        strangers.append(
            subprocess.Popen(
                ["sleep", "300"],
                env={
                    "PATH": os.environ["PATH"],
                    "SKYWARD_INSTANCE_ID": tag,
                    "SKYWARD_INSTANCE_DIRECTORY": "/nowhere",
                    "WAS": f"SKYWARD_INSTANCE_ID={node.id}",
                },
            )
        )
    memory, other = Path(f"/dev/shm/skyward-node-{node.id}"), Path(f"/dev/shm/skyward-node-{node.id}0")
    try:
        memory.mkdir()
        (memory / "value").write_bytes(b"x" * 100_000)
        other.mkdir()
        node.process.terminate()
        node.ended()
        for process in (deaf, forking, alike):
            assert process.wait(30) == -signal.SIGKILL
        assert node.id not in {tag for _, tag in processes_by_tag("SKYWARD_INSTANCE_ID")}
        assert [process.poll() for process in strangers] == [None, None]
        assert not node.directory.exists()
        assert not memory.exists()
        assert other.exists()
    finally:
        other.rmdir()
        for process in strangers:
            process.kill()
            process.wait()


@pytest.mark.skipif(os.geteuid() != 0, reason="mounting needs root")
def test_mounts_are_unmounted(guarded, tmp_path):
    """All mounts of the node are unmounted, also nested ones. Files below a mount point stay.

    A recorded mount point without a mount is no error.
    """
    outer = tmp_path / "a folder"
    inner = outer / "inner"
    outer.mkdir()
    (outer / "below").write_text("stays")
    node = guarded()
    subprocess.run(["mount", "-t", "tmpfs", "skyward-test", str(outer)], check=True)
    inner.mkdir()
    subprocess.run(["mount", "-t", "tmpfs", "skyward-test", str(inner)], check=True)
    node.write("mounts", f"{outer}\n/no/such/mount\n{inner}")
    try:
        node.process.terminate()
        node.ended()
        mounted = Path("/proc/self/mounts").read_text()
    finally:
        subprocess.run(["umount", "-l", str(inner), str(outer)], check=False, capture_output=True)
    assert str(outer).replace(" ", "\\040") not in mounted
    assert [path.name for path in outer.iterdir()] == ["below"]


def test_the_last_mount_is_unmounted_first(guarded, tmp_path):
    """A nested mount is unmounted before the outer one."""
    fake = tmp_path / "bin/fusermount"
    fake.parent.mkdir()
    fake.write_text(f'#!/bin/sh\necho "$2" >>{tmp_path}/undone\n')
    fake.chmod(0o755)
    node = guarded(PATH=f"{fake.parent}:{os.environ['PATH']}")
    node.write("mounts", "/outer\n/outer/in ner\n/last\n")
    node.process.terminate()
    node.ended()
    assert (tmp_path / "undone").read_text() == "/last\n/outer/in ner\n/outer\n"


@pytest.mark.skipif(os.geteuid() != 0, reason="mounting needs root")
def test_an_unrecorded_mount_is_not_emptied(guarded, tmp_path):
    """The removal of the node's directory stops at the border of its file system.

    A bucket that is mounted below keeps its objects.
    """
    node = guarded()
    bucket, seen = node.directory / "bucket", tmp_path / "seen"
    bucket.mkdir()
    seen.mkdir()
    subprocess.run(["mount", "-t", "tmpfs", "skyward-test", str(bucket)], check=True)
    try:
        (bucket / "precious").write_text("x")
        node.process.terminate()
        node.ended()
        assert (bucket / "precious").exists()
    finally:
        subprocess.run(["umount", str(bucket)], check=True)


def test_the_end_command_runs_last(guarded, tmp_path):
    """It runs after everything else, for any reason. Its quotes are kept."""
    node = guarded(end_command=f"test -e '{tmp_path}/instance' || echo \"it's over\"")
    node.write("ended", "enough")
    assert node.ended() == "it's over\n"


def test_a_killed_guard_holds_nothing(guarded, monkeypatch, tmp_path):
    """Its `sleep` process survives. That process has neither the node's tag nor the provider's lock on descriptor 9.

    With the tag it would count as the node.
    """
    monkeypatch.setattr(guard, "PAUSE_SECONDS", 60)  # the `sleep` must live longer than the checks
    lock = tmp_path / "lock"
    lock.touch()
    node = guarded(locked=lock)
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
