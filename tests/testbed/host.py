"""One host: its addresses and keys, and the faults that it can have."""

import contextlib
import os
import signal
import subprocess
from dataclasses import dataclass
from pathlib import Path

from tests.testbed.command import run
from tests.testbed.network import Network
from tests.waiting import wait_until


@dataclass(frozen=True)
class Host:
    """A machine with a real `sshd`.

    `Fleet.create` creates it, and the fleet removes it. The effect of its methods lasts until it is undone.
    """

    network: Network
    index: int
    name: str
    directory: Path
    key_path: Path
    """The private key that may log in; one for the whole fleet."""
    process: subprocess.Popen[str]
    pid: int
    """Its first process, by its pid on this machine."""
    is_isolated: bool
    user: str = "root"
    port: int = 22

    @property
    def ip(self) -> str:
        return self.network.address(self.index)

    @property
    def known_hosts_path(self) -> Path:
        return self.directory / "known_hosts"

    @property
    def known_hosts_line(self) -> str:
        """Its current host key, as a line of `known_hosts`."""
        return self.known_hosts_path.read_text().strip()

    @property
    def root(self) -> Path:
        """Its file system, as this machine sees it while the host is up."""
        return Path(f"/proc/{self.pid}/root")

    @property
    def is_up(self) -> bool:
        return self.process.poll() is None

    # ── access ───────────────────────────────────────────────────────────────────────────────────────────────────────

    def ssh(self, *options: str) -> list[str]:
        """Return the command line that logs in, without this user's own configuration and agent; options as
        after `-o`.
        """
        fixed = [
            f"UserKnownHostsFile={self.known_hosts_path}",
            "GlobalKnownHostsFile=/dev/null",
            "StrictHostKeyChecking=yes",
            "IdentitiesOnly=yes",
            "IdentityAgent=none",
            "BatchMode=yes",
            "ConnectTimeout=10",
        ]
        flags = [item for option in (*options, *fixed) for item in ("-o", option)]
        return ["ssh", "-F", "none", "-i", str(self.key_path), *flags, f"{self.user}@{self.ip}"]

    def run(
        self, command: str, *, text: str = "", seconds: float = 60.0, options: tuple[str, ...] = ()
    ) -> subprocess.CompletedProcess[str]:
        """Run a shell command through OpenSSH and return its result (255: ssh itself failed); `text` is its stdin."""
        argv = [*self.ssh(*options), "--", command]
        return subprocess.run(argv, input=text, capture_output=True, text=True, timeout=seconds, check=False)

    # ── faults ───────────────────────────────────────────────────────────────────────────────────────────────────────

    def kill(self) -> None:
        """Cut its power, as when a spot machine is preempted: its peers get no message, then no process lives.

        Packets to its address are dropped without an answer.
        """
        self.partition()
        self.crash()

    def crash(self) -> None:
        """Kill all of its processes while the network is up: peers see at once that their connections are closed."""
        if self.is_up:  # else its pid may belong to another process by now
            with contextlib.suppress(ProcessLookupError):
                os.kill(self.pid, signal.SIGKILL)
        self.process.wait(60)

    def partition(self) -> None:
        """Drop every packet from and to it; it continues to run."""
        if self.is_up:
            self.network.cut(self.index)

    def heal(self) -> None:
        """End a partition."""
        self.network.join(self.index, is_isolated=self.is_isolated)

    def fill_disk(self) -> None:
        """Leave no free byte on its disk. The disk is memory of this machine, so give the host a small one.

        Undone by `empty_disk`.
        """
        disk = os.statvfs(self.root)
        with (self.root / "var/filler").open("wb") as filler:
            os.posix_fallocate(filler.fileno(), 0, disk.f_bavail * disk.f_frsize)

    def empty_disk(self) -> None:
        """Free the space that `fill_disk` took."""
        (self.root / "var/filler").unlink()

    def change_host_key(self) -> None:
        """Change its host key from the next connection on, as if another machine had its address."""
        write_host_key(self.root / "etc/ssh", self.ip, self.known_hosts_path)
        os.kill(self.pid, signal.SIGHUP)
        new = self.known_hosts_line
        wait_until(lambda: new in self._presented(), f"the new key of {self.name}")

    def is_listening(self) -> bool:
        """Return whether its sshd accepts connections; its kernel is queried, without a connection."""
        with contextlib.suppress(OSError):
            rows = [line.split() for line in Path(f"/proc/{self.pid}/net/tcp").read_text().splitlines()[1:]]
            return any(row[1].endswith(f":{self.port:04X}") and row[3] == "0A" for row in rows)
        return False

    def _presented(self) -> str:
        argv = ["ssh-keyscan", "-t", "ed25519", "-T", "2", self.ip]
        return subprocess.run(argv, capture_output=True, text=True, timeout=60, check=False).stdout

    def _processes(self) -> list[int]:
        """Return the living processes of its process namespace, its first one first."""
        mine = os.stat(f"/proc/{self.pid}/ns/pid").st_ino
        found = []
        for entry in Path("/proc").iterdir():
            with contextlib.suppress(OSError):
                if entry.name.isdigit() and (entry / "ns/pid").stat().st_ino == mine:
                    found.append(int(entry.name))
        return sorted(found, key=lambda pid: (pid != self.pid, pid))


def write_host_key(folder: Path, address: str, known_hosts: Path) -> None:
    """Create a new host key in this folder, and record it as the key of this address."""
    key = folder / "ssh_host_ed25519_key"
    key.unlink(missing_ok=True)
    run("ssh-keygen", "-q", "-t", "ed25519", "-N", "", "-C", "host", "-f", str(key))
    known_hosts.write_text(f"{address} {' '.join(key.with_suffix('.pub').read_text().split()[:2])}\n")
