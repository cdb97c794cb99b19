"""One Prefect server for all files of a test session, also if the session has several processes (pytest-xdist).

The process that needs it first starts this file as a program, the guardian. It starts the server, and ends it when the
session has ended, however that ended: it waits for the process of pytest, the controller of the others. The kernel ends
the server with the guardian.

States of FOLDER: empty -> locked (one process waits for the server, the others for the lock) -> `address` is there.
"""

from __future__ import annotations

import ctypes
import fcntl
import os
import select
import shutil
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any
from urllib.request import urlopen

if TYPE_CHECKING:  # the guardian has only the standard library
    import pytest

START_SECONDS, POLL_SECONDS = 300.0, 0.1
TRIES = 5
PR_SET_PDEATHSIG = 1
DATABASE = "prefect.db"
OF_THE_PROCESS = ("XDG_", "SKYWARD_", "PREFECT_", "PYTEST_")
"""Variables of the test process that starts the server: its folders end with that process."""


def address(tmp_path_factory: pytest.TempPathFactory) -> str:
    """Return the address of the API of the server of this test session; start the server at the first call."""
    controller = os.getppid() if is_one_of_several() else os.getpid()
    return address_in(folder(tmp_path_factory), controller)


def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return the folder of the server, with its database."""
    own = tmp_path_factory.getbasetemp()
    return (own.parent if is_one_of_several() else own) / "prefect-server"


def is_one_of_several() -> bool:
    """Whether this process is one of those that the controller of pytest-xdist has started."""
    return "PYTEST_XDIST_WORKER" in os.environ


def address_in(folder: Path, controller: int) -> str:
    """Return the address of the session's API; start the server if no process has done it.

    Args:
        folder: one folder of the whole session.
        controller: the process with which the server ends.
    """
    folder.mkdir(exist_ok=True)
    file = folder / "address"
    with (folder / "lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        if not file.exists():
            _start(folder, controller)
    return file.read_text()


def _start(folder: Path, controller: int) -> None:
    environ = {name: value for name, value in os.environ.items() if not name.startswith(OF_THE_PROCESS)}
    with (folder / "log").open("w") as log:
        guardian = subprocess.Popen(
            [sys.executable, "-IS", __file__, str(folder), str(controller)],
            env=environ,
            stdin=subprocess.DEVNULL,
            stdout=log,
            stderr=log,
            start_new_session=True,  # Ctrl-C is for the tests; the guardian outlives the process that has started it
        )
    deadline = time.monotonic() + START_SECONDS
    while not (folder / "address").exists():
        if guardian.poll() is not None or time.monotonic() > deadline:
            raise RuntimeError(f"Prefect's server does not start:\n{(folder / 'log').read_text()[-4000:]}")
        time.sleep(POLL_SECONDS)
    guardian.returncode = 0  # else Python warns of a process that was not waited for


def main(folder: Path, controller: int) -> None:
    """Start the server, write its address into the folder, and end it with the controller.

    Another port is tried if a program takes the first one. The log of a server that ends by itself stays.
    """
    end_of_session = os.pidfd_open(controller)
    for _ in range(TRIES):
        port = free_port()
        server = server_at(folder, port, preexec_fn=_die_with_parent)  # this process has one thread
        try:
            if any(is_healthy(port) for _ in _moments(server, end_of_session)):
                partial = folder / "address.new"
                partial.write_text(f"http://127.0.0.1:{port}/api")
                partial.rename(folder / "address")
                select.select([end_of_session, os.pidfd_open(server.pid)], [], [])
                break
        finally:
            server.kill()
            server.wait()
    if _has_ended(end_of_session):
        shutil.rmtree(folder, ignore_errors=True)


def server_at(folder: Path, port: int, preexec_fn: Any = None, **settings: str) -> subprocess.Popen[bytes]:
    """Start a server with all its services (automations too), and without a UI."""
    environ = os.environ | {
        "PREFECT_HOME": str(folder),
        "PREFECT_API_DATABASE_CONNECTION_URL": f"sqlite+aiosqlite:///{folder / DATABASE}",
        "PREFECT_SERVER_ANALYTICS_ENABLED": "false",
        # on a loaded machine SQLite was busy for longer than the usual 10 s: the server answered 503
        "PREFECT_SERVER_DATABASE_TIMEOUT": "60",
        "PREFECT_UI_ENABLED": "0",
        "PREFECT__SERVER_FINAL": "1",
        "DO_NOT_TRACK": "1",
        **settings,
    }
    command = [sys.executable, "-m", "uvicorn", "--factory", "prefect.server.api.server:create_app"]
    return subprocess.Popen(
        [*command, "--host", "127.0.0.1", "--port", str(port), "--log-level", "error"],
        env=environ,
        stdin=subprocess.DEVNULL,
        preexec_fn=preexec_fn,
    )


def _die_with_parent() -> None:
    ctypes.CDLL(None).prctl(PR_SET_PDEATHSIG, int(signal.SIGKILL))


def _moments(server: subprocess.Popen[bytes], end_of_session: int) -> Iterator[None]:
    """Yield now and then, as long as the server may become ready and is needed."""
    deadline = time.monotonic() + START_SECONDS
    while server.poll() is None and not _has_ended(end_of_session) and time.monotonic() < deadline:
        yield
        time.sleep(POLL_SECONDS)


def _has_ended(pidfd: int) -> bool:
    return bool(select.select([pidfd], [], [], 0)[0])


def is_healthy(port: int) -> bool:
    """Whether a server of Prefect answers at a port."""
    try:
        with urlopen(f"http://127.0.0.1:{port}/api/health", timeout=5) as answer:
            return answer.status == 200
    except OSError:
        return False


def free_port() -> int:
    """A port of this machine that no program has now."""
    with socket.create_server(("127.0.0.1", 0)) as free:
        return free.getsockname()[1]


if __name__ == "__main__":
    main(Path(sys.argv[1]), int(sys.argv[2]))
