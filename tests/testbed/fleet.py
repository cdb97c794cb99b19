"""Creates hosts, and removes all of them however the process that created them ends."""

import contextlib
import itertools
import os
import select
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path

from tests.testbed import sweeping
from tests.testbed.command import run
from tests.testbed.host import Host, write_host_key
from tests.testbed.network import FIRST_HOST, LAST_HOST, Network
from tests.testbed.preflight import NAMESPACES
from tests.waiting import wait_until

INIT = Path(__file__).with_name("init.sh")
REPOSITORY = Path(__file__).parents[2]
SYSTEM = {"usr", "etc", "var", "bin", "sbin", "lib", "lib32", "lib64", "libx32", "proc", "sys", "dev"}
"""The top folders of this machine that a host shares: it can read them, and its writes are not visible here.

All others are empty on the host, so it has no caches and no homes.
"""

SSHD_CONFIG = """\
Port 22
AddressFamily inet
HostKey /etc/ssh/ssh_host_ed25519_key
PermitRootLogin prohibit-password
PasswordAuthentication no
KbdInteractiveAuthentication no
UsePAM no
UseDNS no
PidFile none
MaxStartups 100
MaxSessions 100
Subsystem sftp internal-sftp
"""
START_SECONDS = 60.0
POWEROFF = "#!/bin/sh\nexec kill -TERM 1\n"


class Fleet:
    """Hosts on their own network, up to 253; a context manager. `number` identifies the fleet.

    When the process that holds the fleet is killed, a watcher process removes everything. If the watcher is killed too,
    the next fleet or `python -m tests.testbed gc` does it.
    """

    def __init__(self) -> None:
        self.number, self._lock = sweeping.claim()
        self.network = Network(self.number)
        self.directory = sweeping.directory(self.number)
        self.hosts: list[Host] = []
        self._indices = itertools.count(FIRST_HOST)
        try:
            self.directory.mkdir(mode=0o700)
            self.key_path = self.directory / "id_ed25519"
            run("ssh-keygen", "-q", "-t", "ed25519", "-N", "", "-C", "testbed", "-f", str(self.key_path))
            self.network.build()
            self.watcher = _watch(self.number)
        except BaseException:
            sweeping.release(self.number, self._lock)
            raise

    def __enter__(self) -> "Fleet":
        return self

    def __exit__(self, *exc_info: object) -> None:
        self.close()

    def create(self, *, isolated: bool = False, disk: str = "4G", shared: Sequence[Path] = ()) -> Host:
        """Return a new host, once its `sshd` listens. Raises RuntimeError or TimeoutError with what the host said.

        Args:
            isolated: reachable from this machine, and not from the fleet's other isolated hosts.
            disk: size of its disk, such as "64M"; kept in memory, and taken only as it is written.
            shared: folders of this machine that it has at the same paths, as on a network file system.
        """
        index = next(self._indices)
        if index > LAST_HOST:
            raise RuntimeError(f"a fleet has at most {LAST_HOST - FIRST_HOST + 1} hosts")
        folder = self._prepare(index)
        process = self._boot(index, disk, shared)
        assert process.stdin is not None and process.stdout is not None
        try:
            pid = _first_process(process, folder)
            self.network.plug(index, pid, is_isolated=isolated)
            host = Host(self.network, index, _name(index), folder, self.key_path, process, pid, isolated)
            process.stdin.write("go\n")
            process.stdin.flush()
            wait_until(lambda: host.is_listening() or not host.is_up, f"sshd of {host.name}")
            if not host.is_up:
                raise RuntimeError(f"{host.name} did not come up: {_console(folder)}")
        except BaseException:
            process.kill()
            process.wait(60)
            raise
        finally:
            process.stdin.close()
            process.stdout.close()
        self.hosts.append(host)
        return host

    def close(self) -> None:
        """Remove everything. Raises RuntimeError with what could not be removed."""
        with contextlib.ExitStack() as undo:  # in reverse order; a failure of one does not stop the others
            undo.callback(self.watcher.wait, 60)
            undo.callback(sweeping.release, self.number, self._lock)
            for host in self.hosts:
                undo.callback(host.crash)

    def _prepare(self, index: int) -> Path:
        """Create the host's own part of its disk when it is first started."""
        folder = self.directory / _name(index)
        seed = folder / "seed"
        for name in ("root", "disk", "seed/root/.ssh", "seed/etc/ssh", "seed/usr/local/sbin", "seed/tmp"):
            (folder / name).mkdir(parents=True)
        strangers = [
            entry
            for entry in Path("/").iterdir()
            if entry.is_dir() and not entry.is_symlink() and entry.name not in SYSTEM
        ]
        for place in (*strangers, REPOSITORY, Path("/etc/ssh")):
            hidden = seed / place.relative_to("/")
            hidden.mkdir(parents=True, exist_ok=True)
            _hide_what_is_below(hidden)
        (seed / "tmp").chmod(0o1777)
        for name in ("root", "root/.ssh"):
            (seed / name).chmod(0o700)
        (seed / "run/sshd").mkdir(mode=0o755)
        (seed / "root/.ssh/authorized_keys").write_text(self.key_path.with_suffix(".pub").read_text())
        (seed / "etc/ssh/sshd_config").write_text(SSHD_CONFIG)
        (seed / "etc/hostname").write_text(f"{_name(index)}\n")
        (seed / "etc/hosts").write_text(f"127.0.0.1 localhost\n{self.network.address(index)} {_name(index)}\n")
        (seed / "etc/testbed-network").write_text(self.network.inside(index))
        (seed / "usr/local/sbin/poweroff").write_text(POWEROFF)
        (seed / "usr/local/sbin/poweroff").chmod(0o755)
        write_host_key(seed / "etc/ssh", self.network.address(index), folder / "known_hosts")
        return folder

    def _boot(self, index: int, disk: str, shared: Sequence[Path]) -> "subprocess.Popen[str]":
        folder = self.directory / _name(index)
        env = {
            "PATH": "/usr/sbin:/usr/bin:/sbin:/bin",
            "NAME": _name(index),
            "DISK_SIZE": disk,
            "SHARED": ":".join(str(folder) for folder in shared),
            sweeping.TAG: str(self.number),
        }
        with (folder / "console").open("wb") as console:
            return subprocess.Popen(
                ["unshare", *NAMESPACES, "sh", str(INIT), str(folder)],
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=console,
                env=env,
                cwd="/",
                text=True,
                start_new_session=True,
            )


def watch(number: int) -> None:
    """Wait until no process holds this fleet's number, then remove what is left of the fleet."""
    if (lock := sweeping.take(number, is_patient=True)) is not None:
        sweeping.release(number, lock)


def _watch(number: int) -> "subprocess.Popen[bytes]":
    argv = [sys.executable, "-m", "tests.testbed", "watch", str(number)]
    null = subprocess.DEVNULL
    return subprocess.Popen(argv, cwd=REPOSITORY, start_new_session=True, stdin=null, stdout=null, stderr=null)


def _hide_what_is_below(folder: Path) -> None:
    """Mark a folder of an overlay's upper layer so that the lower layer's entries are hidden in it."""
    os.setxattr(folder, "trusted.overlay.opaque", b"y")


def _first_process(process: "subprocess.Popen[str]", folder: Path) -> int:
    """Wait until the host's own part of its start is done; return the pid of its first process."""
    assert process.stdout is not None
    if not select.select([process.stdout], [], [], START_SECONDS)[0]:
        raise TimeoutError(f"a host did not start in {START_SECONDS} s: {_console(folder)}")
    if process.stdout.readline() != "ready\n":
        raise RuntimeError(f"a host did not start: {_console(folder)}")
    return int(Path(f"/proc/{process.pid}/task/{process.pid}/children").read_text())


def _console(folder: Path) -> str:
    return " ".join((folder / "console").read_text().split()) or "it said nothing"


def _name(index: int) -> str:
    return f"host{index}"
