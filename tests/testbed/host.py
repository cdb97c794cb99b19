"""One host: what it is reached by, and what can happen to it."""

import contextlib
import os
import shlex
import signal
import subprocess
from dataclasses import dataclass
from pathlib import Path

from tests.testbed.command import run, wait_until
from tests.testbed.network import Network


@dataclass(frozen=True)
class Host:
    """A machine with a real `sshd`.

    Made by `Fleet.create`, gone with its fleet; what its methods do lasts until it is undone.
    """

    network: Network
    index: int
    name: str
    directory: Path
    key_path: Path
    """The private key that may log in; one for the whole fleet."""
    process: subprocess.Popen[str]
    pid: int
    """Its first process, as this machine counts."""
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
        """Who it proves to be now, as `known_hosts` writes it."""
        return self.known_hosts_path.read_text().strip()

    @property
    def root(self) -> Path:
        """Its file system, as this machine sees it while the host is up."""
        return Path(f"/proc/{self.pid}/root")

    @property
    def is_up(self) -> bool:
        return self.process.poll() is None

    # ── reaching it ──────────────────────────────────────────────────────────────────────────────────────────────────

    def ssh(self, *options: str) -> list[str]:
        """Return the command line that logs in, free of this user's own configuration and agent; options as after
        `-o`.
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
        """Run a shell command through OpenSSH and return whatever came of it (255: ssh itself failed); `text` is its
        stdin.
        """
        argv = [*self.ssh(*options), "--", command]
        return subprocess.run(argv, input=text, capture_output=True, text=True, timeout=seconds, check=False)

    # ── what can happen to it ────────────────────────────────────────────────────────────────────────────────────────

    def kill(self) -> None:
        """Cut its power, as when a spot machine is taken away: silence, then nothing lives.

        Its address stays a black hole.
        """
        self.partition()
        self.crash()

    def crash(self) -> None:
        """Kill all of its processes with the wire still in: peers hear at once that their connections are closed."""
        if self.is_up:  # else its pid may be somebody else's by now
            with contextlib.suppress(ProcessLookupError):
                os.kill(self.pid, signal.SIGKILL)
        self.process.wait(60)

    def partition(self) -> None:
        """Let every packet from and to it vanish; it runs on."""
        if self.is_up:
            self.network.cut(self.index)

    def heal(self) -> None:
        """End a partition."""
        self.network.join(self.index, is_isolated=self.is_isolated)

    def freeze(self) -> None:
        """Stop all of its processes; its kernel still accepts connections, and nobody answers on them."""
        wait_until(self._is_stopped, f"{self.name} to stand still")

    def thaw(self) -> None:
        """Let its processes go on."""
        _signal(self._processes(), signal.SIGCONT)

    def limit(self, rate: str | None) -> None:
        """Limit its network to a rate such as "80mbit" each way; None: no limit. Needs the kernel's tbf."""
        self.network.shape(self.index, self.pid, rate)

    def impair(self, *, delay_milliseconds: int = 0, loss_percent: float = 0.0) -> None:
        """Delay every packet by so much, each way, and lose some; in place of a limit.

        Raises RuntimeError where the kernel has no netem.
        """
        self.network.impair(self.index, self.pid, delay_milliseconds, loss_percent)

    def fill_disk(self) -> None:
        """Leave no free byte on its disk (which is memory of this machine: give it a small one).

        Undone by `empty_disk`.
        """
        disk = os.statvfs(self.root)
        with (self.root / "var/filler").open("wb") as filler:
            os.posix_fallocate(filler.fileno(), 0, disk.f_bavail * disk.f_frsize)

    def empty_disk(self) -> None:
        """Give back what `fill_disk` took."""
        (self.root / "var/filler").unlink()

    def change_host_key(self) -> None:
        """Let it prove to be somebody else from the next connection on, as a stranger on its address would."""
        write_host_key(self.root / "etc/ssh", self.ip, self.known_hosts_path)
        os.kill(self.pid, signal.SIGHUP)
        new = self.known_hosts_line
        wait_until(lambda: new in self._presented(), f"the new key of {self.name}")

    def is_listening(self) -> bool:
        """True once its sshd takes connections; asked of its kernel, without connecting."""
        with contextlib.suppress(OSError):
            rows = [line.split() for line in Path(f"/proc/{self.pid}/net/tcp").read_text().splitlines()[1:]]
            return any(row[1].endswith(f":{self.port:04X}") and row[3] == "0A" for row in rows)
        return False

    def _is_stopped(self) -> bool:
        # those who were forking are met next time
        moving = [pid for pid in self._processes() if _state(pid) not in "TtZX"]
        _signal(moving, signal.SIGSTOP)
        return not moving

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
    """Make a new host key in this folder, and note it as the key of this address."""
    key = folder / "ssh_host_ed25519_key"
    key.unlink(missing_ok=True)
    run("ssh-keygen", "-q", "-t", "ed25519", "-N", "", "-C", "host", "-f", str(key))
    known_hosts.write_text(f"{address} {' '.join(key.with_suffix('.pub').read_text().split()[:2])}\n")


def shown(host: Host) -> str:
    """Return the line with which a person logs in."""
    return shlex.join(host.ssh())


def _state(pid: int) -> str:
    with contextlib.suppress(OSError):
        return Path(f"/proc/{pid}/stat").read_text().rpartition(") ")[2][:1]
    return "X"


def _signal(pids: list[int], number: signal.Signals) -> None:
    for pid in pids:
        with contextlib.suppress(ProcessLookupError):
            os.kill(pid, number)
