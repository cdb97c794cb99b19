"""Starts the services of docker-compose.yml as processes of this machine, and ends them with all that they started."""

import ctypes
import fcntl
import os
import pwd
import shlex
import shutil
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Iterator, Mapping
from contextlib import suppress
from pathlib import Path
from typing import Any

import psutil

from skyward_core.wire.private_folders import make_private
from tests.stack.compose import ROOT, Service, variables_of

PR_SET_CHILD_SUBREAPER = 36
START_SECONDS = 600.0
"""How long all services together may take; on an idle machine with two cores they take about one minute."""
DOWN_SECONDS = 600.0
"""How long `take_down` waits for the end of the program that runs the services."""
POLL_SECONDS = 2.0
LAST_LINES = 30
KEPT = (
    "LANG",
    "LC_",
    "TZ",
    "TMPDIR",
    "UV_",
    "SSL_CERT_",
    "REQUESTS_CA_BUNDLE",
    "HTTP_PROXY",
    "HTTPS_PROXY",
    "NO_PROXY",
)
"""What services get of the environment of this process, by the beginning of the names. A container gets nothing."""
OF_NODES = ("UV_", "SSL_CERT_")
"""What commands on nodes get of it: with the cache of this machine's uv their environments are there in a second."""
MARK = "STACK_FOLDER"
"""A variable of each service: the folder of its stack. Processes that a service leaves have it too."""


class StackError(Exception):
    """The services cannot start; the text says what to do."""


def native_variables(content: Mapping[str, Any], given: Mapping[str, str], folder: Path) -> dict[str, str]:
    """Return the variables of the compose file that have other values here than in containers.

    `given` is the environment of the user, who may set each of them.
    """
    names = variables_of(content)
    ours = {name: "127.0.0.1" for name in names if name.endswith("_HOST")}
    ours |= {
        "STACK_CODE": str(ROOT),
        "STACK_DATA": str(folder),
        "NODE_VARIABLES": " ".join(f"{name}={value}" for name, value in of_nodes().items()),
    }
    return ours | {name: given[name] for name in names if given.get(name)}


def kept(beginnings: tuple[str, ...]) -> dict[str, str]:
    """Return the part of this process's environment that services may see. uv's cache is always in it."""
    found = {name: value for name, value in os.environ.items() if name.startswith(beginnings)}
    return {"UV_CACHE_DIR": str(Path.home() / ".cache/uv")} | found


def of_nodes() -> dict[str, str]:
    """Return the variables of commands on nodes. uv finds this program's Python on the PATH, and downloads none."""
    return kept(OF_NODES) | {"PATH": f"{sys.base_prefix}/bin:{os.defpath}:/usr/sbin:/sbin:/usr/local/bin"}


def check_ports(ports: Mapping[str, str]) -> None:
    """Raise StackError if another process has one of the ports. `ports` has them by the names of their variables."""
    for name, port in ports.items():
        with socket.socket() as one:
            one.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            try:
                one.bind(("127.0.0.1", int(port)))
            except OSError as error:
                raise StackError(f"port {port} is in use: set {name} to another one ({error.strerror})") from error


def claim(folder: Path) -> int:
    """Return the descriptor of a lock that says that this process runs the services of the folder.

    The lock ends with this process. Raises StackError if another process has it.
    """
    lock = os.open(folder / "stack.pid", os.O_RDWR | os.O_CREAT, 0o600)
    try:
        fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError as error:
        os.close(lock)
        raise StackError(f"a stack runs already in {folder}: `make stack-down` ends it") from error
    os.truncate(lock, 0)
    os.write(lock, str(os.getpid()).encode())
    return lock


def take_down(folder: Path) -> int:
    """End the services of the folder, and return how many processes they had left.

    The program that runs the services is asked to end them. What it could not end, because it was killed, is killed.
    Raises StackError if that program does not end.
    """
    deadline = time.monotonic() + DOWN_SECONDS
    asked: int | None = None
    while (runner := _runner(folder)) is not None:
        if runner != asked:
            os.kill(runner, signal.SIGINT)
            asked = runner
        if time.monotonic() > deadline:
            raise StackError(f"process {runner} does not end the stack: see {folder / 'logs'}")
        time.sleep(0.1)
    killed = set[int]()
    while left := _marked(folder):
        for process in left:
            with suppress(psutil.NoSuchProcess):
                process.kill()
        killed |= {process.pid for process in left}
        psutil.wait_procs(left, timeout=1)
    return len(killed)


def _runner(folder: Path) -> int | None:
    """Return the process that runs the services of the folder; None if there is none."""
    try:
        lock = os.open(folder / "stack.pid", os.O_RDONLY)
    except FileNotFoundError:
        return None
    try:
        fcntl.flock(lock, fcntl.LOCK_SH | fcntl.LOCK_NB)
    except BlockingIOError:
        return int(os.read(lock, 20) or 0) or None
    else:
        return None
    finally:
        os.close(lock)


def _marked(folder: Path) -> list[psutil.Process]:
    found = []
    for process in psutil.process_iter():
        with suppress(psutil.Error):
            if process.environ().get(MARK) == str(folder) and process.status() != psutil.STATUS_ZOMBIE:
                found.append(process)
    return found


class Stack:
    """The services as processes, from `start` to `stop`. `folder` is for their data and their logs."""

    def __init__(self, services: Mapping[str, Service], folder: Path) -> None:
        self._services = services
        self._folder = folder
        self._processes: dict[str, subprocess.Popen[bytes]] = {}
        self._ready: set[str] = set()
        self._checked_at: dict[str, float] = {}
        # orphans of services become children of this process, so that `stop` finds them
        if ctypes.CDLL(None, use_errno=True).prctl(PR_SET_CHILD_SUBREAPER, 1, 0, 0, 0):
            raise OSError(ctypes.get_errno(), "prctl(PR_SET_CHILD_SUBREAPER)")

    def start(self) -> Iterator[str]:
        """Start each service when those that it needs are ready; yield the names in the order in which they are ready.

        Raises StackError, with the last lines of its log, for a service that ends or is not healthy in time.
        """
        for folder in (self._folder / "logs", self._folder / "home"):
            make_private(folder)
        self._let_users_pass()
        deadline = time.monotonic() + START_SECONDS
        while len(self._ready) < len(self._services):
            for one in self._services.values():
                if one.name not in self._processes and self._ready >= one.needs.keys():
                    self._processes[one.name] = self._begin(one)
            for name in [name for name in self._processes if name not in self._ready]:
                if self._is_ready(self._services[name]):
                    self._ready.add(name)
                    yield name
            if time.monotonic() > deadline:
                waiting = self._services.keys() - self._ready
                raise StackError(f"not ready after {START_SECONDS:.0f} s: {', '.join(sorted(waiting))}")
            time.sleep(0.1)

    def wait(self) -> None:
        """Return never. Raises StackError when a service has ended."""
        while True:
            for name in self._processes:
                self._check_alive(self._services[name])
            time.sleep(1)

    def stop(self) -> None:
        """End all services, those first that no other one needs, and then each process that they have left."""
        for depth in sorted({depth_of(one, self._services) for one in self._services.values()}, reverse=True):
            level = [name for name in self._processes if depth_of(self._services[name], self._services) == depth]
            for name in level:
                self._processes[name].send_signal(getattr(signal, self._services[name].stop_signal))
            asked_at = time.monotonic()
            for name in level:
                left = asked_at + self._services[name].stop_seconds - time.monotonic()
                with suppress(subprocess.TimeoutExpired):
                    self._processes[name].wait(max(0.0, left))
        end_descendants()

    def _let_users_pass(self) -> None:
        """Let the group of a service with a user of its own, as PostgreSQL has, pass through the folder to its data."""
        users = {one.user for one in self._services.values() if one.user is not None}
        if os.getuid() == 0 and users:
            (group,) = {pwd.getpwnam(user).pw_gid for user in users}
            os.chown(self._folder, -1, group)
            self._folder.chmod(0o710)

    # ── one service ──────────────────────────────────────────────────────────────────────────────────────────────────

    def _begin(self, one: Service) -> subprocess.Popen[bytes]:
        for volume in map(Path, one.volumes):
            volume.mkdir(mode=0o700, exist_ok=True)
            if one.user is not None and os.getuid() == 0:
                shutil.chown(volume, one.user)
        with self._log(one).open("ab") as log:
            return subprocess.Popen(
                self._as_user(one, one.command),
                env=self._environment(one),
                cwd=one.folder,
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=log,
                start_new_session=True,
                umask=0o077,
            )

    def _as_user(self, one: Service, command: tuple[str, ...]) -> list[str]:
        """Return the command for the user of the service. The kernel ends it if this process is killed."""
        prefix = ["setpriv", f"--pdeathsig={one.stop_signal.removeprefix('SIG')}"]
        if one.user is not None and os.getuid() == 0:
            entry = pwd.getpwnam(one.user)
            prefix += [f"--reuid={entry.pw_uid}", f"--regid={entry.pw_gid}", "--clear-groups"]
        return [*prefix, *command]

    def _environment(self, one: Service) -> dict[str, str]:
        programs = [os.path.dirname(sys.executable), *([one.path] if one.path else []), os.environ["PATH"]]
        own = {"PATH": os.pathsep.join(programs), "HOME": str(self._folder / "home"), "PYTHONUNBUFFERED": "1"}
        own[MARK] = str(self._folder)
        return kept(KEPT) | own | dict(one.environment)

    def _log(self, one: Service) -> Path:
        return self._folder / "logs" / f"{one.name}.log"

    def _is_ready(self, one: Service) -> bool:
        self._check_alive(one)
        if one.health is None:
            return self._processes[one.name].returncode == 0
        if time.monotonic() < self._checked_at.get(one.name, 0.0) + POLL_SECONDS:
            return False
        try:
            done = subprocess.run(
                one.health.command,
                env=self._environment(one),
                cwd=one.folder,
                stdin=subprocess.DEVNULL,
                capture_output=True,
                check=False,
                timeout=one.health.timeout_seconds,
            )
        except subprocess.TimeoutExpired:
            return False
        finally:
            self._checked_at[one.name] = time.monotonic()
        return done.returncode == 0

    def _check_alive(self, one: Service) -> None:
        """Raise StackError if the service has ended, other than with success if it runs once."""
        code = self._processes[one.name].poll()
        if code is None or (code == 0 and one.runs_once):
            return
        lines = self._log(one).read_text(errors="replace").splitlines()[-LAST_LINES:]
        raise StackError(
            f"{one.name} has ended with code {code}: {shlex.join(one.command)[:200]}\n"
            + "\n".join(lines)
            + f"\nThe whole log is {self._log(one)}"
        )


def depth_of(one: Service, services: Mapping[str, Service]) -> int:
    """Return how many services must be there before this one, one after the other."""
    return max((1 + depth_of(services[name], services) for name in one.needs), default=0)


def end_descendants() -> None:
    """Kill all children of this process, and theirs, until none is left. Those that a killed one leaves come here."""
    while left := psutil.Process().children(recursive=True):
        for process in left:
            with suppress(psutil.NoSuchProcess):
                process.kill()
        psutil.wait_procs(left, timeout=1)
