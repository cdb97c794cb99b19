"""The first process of a node: `python -m skyward_core.worker.supervisor DIRECTORY`.

It imports Dask once and forks everything else from there: the scheduler (on the head), the workers, and the runners in which calls run. So a node
starts with one import instead of one for each process, and a crashed runner is replaced within milliseconds. It stays single-threaded (forking is
only safe so), never runs a user's code, reaps the dead, and is the node's watchdog: when its owner is gone, it takes the whole node down.

Files of DIRECTORY: `settings.json` is written by the client, `head.json` by the head when its scheduler listens. The supervisor may be started before
`settings.json` is there.
"""

from __future__ import annotations

import array
import contextlib
import os
import pickle
import select
import shutil
import signal
import socket
import sys
import time
import traceback
from collections.abc import Callable
from pathlib import Path
from typing import NoReturn

from skyward_core.worker import node  # the one costly import: everything forked from here has it already
from skyward_core.worker.info import InstanceInfo, to_env
from skyward_core.worker.invoke import JOB_PLACE, Line, run_calls
from skyward_core.worker.settings import NodeSettings, Owner
from skyward_core.worker.slot import Exit
from skyward_core.worker.watchdog import die_with_parent, kill_instance

WATCH_SECONDS = 0.5
SETTINGS_DEADLINE_SECONDS = 120.0
RESPAWN_LIMIT = 5  # a worker process that dies this often in a row takes the node down


class Supervisor:
    """Forks, reaps, watches. `children` maps the pid of each worker process to its index."""

    def __init__(self, directory: Path, settings: NodeSettings) -> None:
        self._directory = directory
        self._settings = settings
        self._controls: dict[int, socket.socket] = {}
        self._worker_pids: dict[int, int] = {}
        self._runner_control: dict[int, int] = {}
        self._scheduler_pid = 0
        self._deaths = 0

    def run(self) -> NoReturn:
        """Start the node's processes and watch until the end; never returns."""
        wake_read, wake_write = os.pipe2(os.O_NONBLOCK | os.O_CLOEXEC)
        signal.signal(signal.SIGCHLD, lambda *_: None)
        signal.signal(signal.SIGTERM, lambda *_: self._end("asked to"))
        signal.set_wakeup_fd(wake_write, warn_on_full_buffer=False)
        if self._settings.rank == 0:
            self._scheduler_pid = self._fork(lambda: node.run_scheduler(self._directory, self._settings))
        for index in range(len(self._settings.workers)):
            self._start_worker(index)
        watched_at = time.monotonic()
        while True:
            sockets = {control.fileno(): index for index, control in self._controls.items()}
            ready, _, _ = select.select([wake_read, *sockets], [], [], WATCH_SECONDS)
            for descriptor in ready:
                if descriptor == wake_read:
                    os.read(wake_read, 4096)
                else:
                    self._serve(sockets[descriptor])
            self._reap()
            if time.monotonic() - watched_at > WATCH_SECONDS:
                watched_at = time.monotonic()
                self._watch()

    def _start_worker(self, index: int) -> None:
        ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        self._controls[index] = ours
        pid = self._fork(lambda: node.run_worker(self._directory, self._settings, index, theirs))
        theirs.close()
        self._worker_pids[pid] = index

    def _serve(self, index: int) -> None:
        """Fork a runner for a worker, with the descriptors that came with the request."""
        control = self._controls[index]
        space = socket.CMSG_SPACE(4 * array.array("i").itemsize)
        try:
            mark, ancillary, _, _ = control.recvmsg(4096, space)
        except ConnectionResetError:
            mark, ancillary = b"", []
        if not mark:
            control.close()
            del self._controls[index]
            return
        descriptors = array.array("i")
        descriptors.frombytes(ancillary[0][2])
        pid = self._fork(lambda: self._become_runner(index, mark, list(descriptors)))
        with contextlib.suppress(PermissionError, ProcessLookupError):
            os.setpgid(pid, pid)
        for descriptor in descriptors:
            os.close(descriptor)
        self._runner_control[pid] = index
        self._say(index, pid)

    def _become_runner(self, index: int, mark: bytes, descriptors: list[int]) -> NoReturn:
        os.setpgid(0, 0)
        calls, outcomes, stdout, stderr = descriptors
        settings = self._settings
        info = InstanceInfo(
            node=settings.rank,
            total_nodes=settings.total_nodes,
            is_head=settings.rank == 0,
            accelerators=list(settings.accelerators),
            head_addr=settings.head_host,
            head_port=settings.head_port,
            job_id=JOB_PLACE,
            worker=index,
            workers_per_node=len(settings.workers),
        )
        run_calls(
            Line(
                socket.socket(fileno=calls),
                socket.socket(fileno=outcomes),
                stdout,
                stderr,
                mark,
                to_env(info),
                settings.value_directories,
                settings.workers[index],
            )
        )

    def _fork(self, main: Callable[[], NoReturn]) -> int:
        """Fork a child that keeps none of the supervisor's lines open and dies with it."""
        supervisor = os.getpid()
        pid = os.fork()
        if pid:
            return pid
        try:
            die_with_parent(supervisor)
            signal.set_wakeup_fd(-1)
            for sig in (signal.SIGCHLD, signal.SIGTERM):
                signal.signal(sig, signal.SIG_DFL)
            for control in self._controls.values():
                control.close()
            main()
        except BaseException:
            traceback.print_exc()
        finally:
            os._exit(70)

    def _reap(self) -> None:
        while True:
            try:
                pid, status = os.waitpid(-1, os.WNOHANG)
            except ChildProcessError:
                return
            if pid == 0:
                return
            code = os.waitstatus_to_exitcode(status)
            if pid in self._runner_control:
                self._say(self._runner_control.pop(pid), Exit(pid, code))
            elif pid in self._worker_pids:
                self._deaths += 1
                index = self._worker_pids.pop(pid)
                if index in self._controls:
                    self._controls.pop(index).close()
                if self._deaths > RESPAWN_LIMIT:
                    self._end(f"worker {index} died {self._deaths} times, last with {code}")
                self._start_worker(index)
            elif pid == self._scheduler_pid:
                self._end(f"the scheduler died with {code}")

    def _say(self, index: int, message: object) -> None:
        with contextlib.suppress(OSError, KeyError):
            self._controls[index].send(pickle.dumps(message))

    def _watch(self) -> None:
        if self._settings.owner is not None and not self._settings.owner.is_alive():
            self._end("its client is gone")

    def _end(self, reason: str) -> NoReturn:
        print(f"skyward: node {self._settings.rank} ends: {reason}", flush=True)
        end_node(self._settings)


def end_node(settings: NodeSettings) -> NoReturn:
    """Kill every process of the node and remove what it keeps in memory; the caller last."""
    signal.signal(signal.SIGTERM, signal.SIG_IGN)
    while kill_instance(settings.instance_id):
        time.sleep(0.01)  # until the kernel has taken them down; a process that forks meanwhile is found in the next round
        with contextlib.suppress(ChildProcessError):
            while os.waitpid(-1, os.WNOHANG)[0]:
                pass
    shutil.rmtree(settings.value_directories[0], ignore_errors=True)
    os._exit(0)


def await_settings(directory: Path, owner: Owner | None) -> NodeSettings:
    """Wait for the client's settings. Ends the process when they do not come in time or the client is gone."""
    deadline = time.monotonic() + SETTINGS_DEADLINE_SECONDS
    path = directory / "settings.json"
    while not path.exists():
        if time.monotonic() > deadline or (owner is not None and not owner.is_alive()):
            sys.exit(f"no {path} after {SETTINGS_DEADLINE_SECONDS} s, or the client is gone")
        time.sleep(0.01)
    return NodeSettings.from_json(path.read_text())


def main() -> NoReturn:
    """Become the supervisor of the node whose files are in the directory given as the only argument."""
    directory = Path(sys.argv[1])
    owner_text = os.environ.get("SKYWARD_OWNER")
    owner = Owner(int(owner_text.partition(":")[0]), owner_text.partition(":")[2]) if owner_text else None
    settings = await_settings(directory, owner)
    Path(settings.value_directories[0]).mkdir(mode=0o700, parents=True, exist_ok=True)
    if watcher := os.environ.get("SKYWARD_BOOT_WATCHER"):
        with contextlib.suppress(ProcessLookupError, ValueError):
            os.kill(int(watcher), signal.SIGKILL)
    Supervisor(directory, settings).run()


if __name__ == "__main__":
    main()
