"""The first process of a node: `python -m skyward_core.worker.supervisor DIRECTORY`.

It imports Dask once and forks all other processes: the scheduler (on the head), the workers, the runners in which calls
run, and on spot machines the poller of preemption notices. So a node starts with one import for all processes, and a
crashed runner is replaced within milliseconds. It has one thread, because only then forking is safe. It runs no code of
the user, except the import of installed modules that the image names. It reaps dead processes. It ends the node when
its owner is gone, or when one of its clocks has run out.

Files of DIRECTORY: the client writes `settings.json`, and writes it again to restart the node in another place. Clients
write `lease` to renew it. `partitions`, if it exists, is written by the bootstrap script and names the GPU of each
worker. `supervisor` has this process's pid. The head writes `head.json` when its scheduler listens. `ended` says to the
guard, if there is one, why the node ends. The client writes `missed` when workers stay away from the scheduler; the
supervisor removes it and kills them. The supervisor may start before `settings.json` exists.
"""

from __future__ import annotations

import array
import contextlib
import gc
import json
import math
import os
import pickle
import resource
import shutil
import signal
import socket
import sys
import threading
import time
import traceback
import warnings
from collections import Counter, defaultdict, deque
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from importlib import import_module
from pathlib import Path
from typing import NoReturn

from skyward_core.concurrency.backoff import Backoff
from skyward_core.wire import node_log
from skyward_core.wire.info import JOB_PLACE, InstanceInfo, to_env
from skyward_core.wire.private_folders import make_private
from skyward_core.wire.settings import NodeOwner, NodeSettings, with_partitions, write_atomically
from skyward_core.worker import node  # the only costly import: all forked processes have it already
from skyward_core.worker.call_groups import CallGroups, MemoryAllowance, call_groups, enter
from skyward_core.worker.keeper import ENDED, KEEPER, adopt_orphans, name_of
from skyward_core.worker.node_clocks import (
    DETACHED,
    MISSED,
    BusyFlag,
    ProcessIdentity,
    Watch,
    descendants,
    die_with_parent,
    kill_all_but_keepers,
    kill_descendants,
    reap_all,
    uptime,
)
from skyward_core.worker.preemption_notice import FILE_ENV, NOTICE_FILE, listen
from skyward_core.worker.runner import RunnerChannels, run_calls
from skyward_core.worker.runner_process import REQUEST_BYTES, Forked, Reassigned, RunnerExit, ready

WATCH_SECONDS = 0.2
SETTINGS_DEADLINE_SECONDS = 120.0
KILL_SECONDS = 10.0  # after that the node ignores those that are stuck in the kernel
CRASH_LOOP_DEATHS = 5  # a worker process of the head that dies so often ...
CRASH_LOOP_SECONDS = 60.0  # ... within this time takes the node down
FIRST_PAUSE_SECONDS = 0.2
LONGEST_PAUSE_SECONDS = 5.0
RESTART_GRACE_SECONDS = 8.0  # a worker that has restarted may need so long to join
FORK_AGAIN_SECONDS = 0.5
"""When a fork that the system has refused is tried again: others end within moments, or nothing helps."""
FILES_OF_A_SLOT, FILES_OF_A_WORKER = 7, 256
"""Open files of a worker: for each slot (160 slots had 1,139), and for all else."""
LISTEN_AGAIN_SECONDS = 30.0  # the poller of notices raises nothing: another process has killed it
HELD_SIGNALS = (signal.SIGCHLD, signal.SIGTERM)
MARK = "::skyward preload "
SKIPPED = "SKYWARD_PRELOAD_SKIPPED"
"""Variable with the skipped modules and the reasons, from a start before."""
DEVICES = ("/dev/nvidia", "/dev/kfd", "/dev/dri/", "/dev/neuron", "/dev/accel", "/dev/vfio/")


@dataclass(frozen=True, slots=True)
class RunnerRequest:
    """A worker's request for a process for calls, which has these descriptors."""

    index: int
    number: int
    mark: bytes
    descriptors: tuple[int, ...]

    def close(self) -> None:
        """Close the supervisor's own copies of the descriptors."""
        for descriptor in self.descriptors:
            os.close(descriptor)


@dataclass(frozen=True, slots=True)
class RunnerProcess:
    """A process for calls: its worker, the worker's slot that it serves, and the flag that says whether it has a call.

    `group` is its control group, if the kernel limits its memory.
    """

    index: int
    slot: int
    busy: BusyFlag
    group: Path | None


class CallQueue(socket.socket):
    """A runner's end of the queue of its calls. The runner is idle while it waits in `recv`, and busy otherwise."""

    def __init__(self, fileno: int, busy: BusyFlag) -> None:
        super().__init__(fileno=fileno)
        self._busy = busy

    def recv(self, bufsize: int, flags: int = 0, /) -> bytes:
        """Wait for the next call; b"" when the worker has closed the queue."""
        self._busy.end()
        packet = super().recv(bufsize, flags)
        self._busy.begin()
        return packet


@dataclass(frozen=True, slots=True)
class CrashHistory:
    """When a worker process died in the last CRASH_LOOP_SECONDS (time.monotonic)."""

    times: tuple[float, ...] = ()

    def and_at(self, now: float) -> CrashHistory:
        """Return these times and one more."""
        return CrashHistory((*(time for time in self.times if now - time < CRASH_LOOP_SECONDS), now))

    @property
    def is_loop(self) -> bool:
        """Whether the process dies too often to be started again."""
        return len(self.times) >= CRASH_LOOP_DEATHS

    @property
    def pause_seconds(self) -> float:
        """How long to wait before the next process is started."""
        return Backoff(FIRST_PAUSE_SECONDS, LONGEST_PAUSE_SECONDS).seconds(len(self.times))


class Supervisor:
    """Forks the node's processes, reaps dead ones, and ends the node when it is time.

    `_workers` maps pids of worker processes to their indexes, and `_runners` pids of runners to their data. `_due` maps
    the index of a dead worker to the time (time.monotonic) at which it is started again.
    """

    def __init__(self, directory: Path, settings: NodeSettings, watch: Watch) -> None:
        self._directory = directory
        self._settings = settings
        self._watch = watch
        self._controls: dict[int, socket.socket] = {}
        self._workers: dict[int, int] = {}
        self._runners: dict[int, RunnerProcess] = {}
        self._scheduler_pid = 0
        self._scheduler_at = math.inf
        self._listener_pid = 0
        self._listen_at = math.inf
        self._due: dict[int, float] = {}
        self._requests: deque[RunnerRequest] = deque()
        """Those that wait for a process, because the system has refused to fork."""
        self._fork_at = 0.0
        """When they are tried again (time.monotonic)."""
        self._most_files = resource.getrlimit(resource.RLIMIT_NOFILE)
        """The limits of open files that calls have: those with which the node was started."""
        self._deaths: defaultdict[int, CrashHistory] = defaultdict(CrashHistory)
        self._settings_seen: tuple[int, int, int] | None = None
        self._groups: CallGroups | None = None
        self._spared = frozenset(descendants())  # processes of the startup script must not be killed

    def run(self) -> NoReturn:
        """Start the node's processes and watch until the end; never returns."""
        adopt_orphans()
        wake_read, wake_write = os.pipe2(os.O_NONBLOCK | os.O_CLOEXEC)
        signal.signal(signal.SIGCHLD, lambda *_: None)
        signal.signal(signal.SIGTERM, lambda *_: self._end("asked to"))
        signal.set_wakeup_fd(wake_write, warn_on_full_buffer=False)
        self._allow_files()
        self._start()
        watched_at = time.monotonic()
        while True:
            sockets = {control.fileno(): index for index, control in self._controls.items()}
            for descriptor in ready([wake_read, *sockets], (), self._wait_seconds()):
                if descriptor == wake_read:
                    os.read(wake_read, 4096)
                else:
                    self._serve(sockets[descriptor])
            self._reap()
            self._start_due()
            if time.monotonic() - watched_at >= WATCH_SECONDS:
                watched_at = time.monotonic()
                self._look_at_settings()
                self._look_for_missed()
                self._look_at_clocks()
                self._cut_log()

    # ── starting ─────────────────────────────────────────────────────────────────────────────────────────────────────

    def _start(self) -> None:
        self._bound_memory()
        if self._settings.rank == 0:
            self._start_scheduler()
        for index in range(len(self._settings.workers)):
            self._start_worker(index)
        self._listen_at = time.monotonic() if self._settings.notice_url and self._settings.workers else math.inf

    def _cut_log(self) -> None:
        """Keep the log of a node that lives for months small."""
        with contextlib.suppress(OSError):
            node_log.cut(str(self._directory / "log"))

    def _allow_files(self) -> None:
        """Raise the limit of open files as far as the system lets us: a worker has FILES_OF_A_SLOT for each slot."""
        soft, hard = self._most_files
        needed = self._settings.slots * FILES_OF_A_SLOT + FILES_OF_A_WORKER
        most = hard if hard != resource.RLIM_INFINITY else max(soft, needed)
        if most < needed:
            self._end(
                f"{self._settings.slots} calls at once need {needed} open files, and this machine allows {most}: raise"
                f" its hard limit (ulimit -Hn), or set concurrency to {(most - FILES_OF_A_WORKER) // FILES_OF_A_SLOT}"
            )
        if most > soft:
            resource.setrlimit(resource.RLIMIT_NOFILE, (most, hard))

    def _bound_memory(self) -> None:
        """Let the kernel limit the memory of calls, if it can; log whether it does."""
        limit = self._settings.memory_limit_bytes
        self._groups = call_groups(self._settings.instance_id, limit)
        if limit is not None:
            kernel = "by the kernel, with all that they start (control group)"
            self._log(
                "the memory of calls is bounded"
                f" {kernel if self._groups is not None else 'by their worker, which looks ten times a second'}"
            )

    def _start_due(self) -> None:
        now = time.monotonic()
        if self._scheduler_at <= now:
            self._start_scheduler()
        if self._listen_at <= now:
            self._listen_at = math.inf
            try:
                self._listener_pid = self._fork(lambda: listen(self._settings.notice_url, self._directory))
            except OSError as error:
                self._refused("the listener for notices is started later", error)
                self._listen_at = self._fork_at
        for index in [index for index, due in self._due.items() if due <= now]:
            del self._due[index]
            self._start_worker(index)
        if self._requests and self._fork_at <= now:
            self._fork_requested()

    def _wait_seconds(self) -> float:
        requested = self._fork_at if self._requests else math.inf
        soonest = min(requested, self._scheduler_at, *self._due.values()) - time.monotonic()
        return max(0.0, min(WATCH_SECONDS, soonest))

    def _start_scheduler(self) -> None:
        """Start the scheduler; if the system refuses, try again later."""
        self._scheduler_at = math.inf
        try:
            self._scheduler_pid = self._fork(lambda: node.run_scheduler(self._directory, self._settings))
        except OSError as error:
            self._refused("the scheduler is started later", error)
            self._scheduler_at = self._fork_at

    def _start_worker(self, index: int) -> None:
        """Start a worker; if the system refuses, try again later."""
        try:
            ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        except OSError as error:
            self._refused(f"worker {index} is started later", error)
            self._due[index] = self._fork_at
            return
        with theirs:
            self._controls[index] = ours
            try:
                pid = self._fork(lambda: node.run_worker(self._directory, self._settings, index, theirs))
            except OSError as error:
                self._controls.pop(index).close()
                self._refused(f"worker {index} is started later", error)
                self._due[index] = self._fork_at
                return
        self._workers[pid] = index

    def _refused(self, what: str, error: OSError) -> None:
        """Log that the system lacks something that other processes may give back, and wait a moment for it."""
        self._log(f"{what}: {error}")
        self._fork_at = time.monotonic() + FORK_AGAIN_SECONDS

    def _serve(self, index: int) -> None:
        """Fork a runner for a worker, with the descriptors that came with the request."""
        control = self._controls[index]
        space = socket.CMSG_SPACE(4 * array.array("i").itemsize)
        try:
            request, ancillary, _, _ = control.recvmsg(4096, space)
        except ConnectionResetError:
            request, ancillary = b"", []
        if not request:
            control.close()
            del self._controls[index]
            return
        descriptors = array.array("i")
        descriptors.frombytes(ancillary[0][2])
        number, mark = int.from_bytes(request[:REQUEST_BYTES]), request[REQUEST_BYTES:]
        self._requests.append(RunnerRequest(index, number, mark, tuple(descriptors)))
        if self._fork_at <= time.monotonic():
            self._fork_requested()

    def _fork_requested(self) -> None:
        """Fork the runners that were requested; what the system refuses is tried again later.

        Other processes depend on this one, so that a lack of memory or processes must not end it.
        """
        while self._requests:
            request = self._requests[0]
            try:
                if request.index in self._controls:
                    self._fork_runner(request)
            except OSError as error:
                self._refused("a process for calls is started later", error)
                return
            self._requests.popleft().close()

    def _forget_requests(self, is_over: Callable[[RunnerRequest], bool]) -> None:
        """Drop requests of workers that are gone: the next worker of an index counts its own from 1 on."""
        for request in [request for request in self._requests if is_over(request)]:
            self._requests.remove(request)
            request.close()

    def _fork_runner(self, request: RunnerRequest) -> None:
        """Fork a runner. Raises OSError; then nothing is left of it."""
        index, busy = request.index, BusyFlag()
        slot = self._free_slot(index)
        group = self._groups.make() if self._groups is not None else None
        try:
            pid = self._fork(
                lambda: self._become_runner(index, slot, request.mark, list(request.descriptors), busy, group)
            )
        except OSError:
            if self._groups is not None and group is not None:
                self._groups.end(group)
            raise
        with contextlib.suppress(PermissionError, ProcessLookupError):
            os.setpgid(pid, pid)
        self._runners[pid] = RunnerProcess(index, slot, busy, group)
        self._say(index, Forked(request.number, pid))

    def _free_slot(self, index: int) -> int:
        """Return the first slot of a worker that no process serves.

        A worker requests another process when the supervisor has reported the end of the one before. A process that is
        stuck in the kernel is not reported in time. Then no slot may be free, and the one with the fewest processes is
        used.
        """
        held = Counter(runner.slot for runner in self._runners.values() if runner.index == index)
        return min(range(self._settings.slots), key=lambda slot: held[slot])

    def _become_runner(
        self, index: int, slot: int, mark: bytes, descriptors: list[int], busy: BusyFlag, group: Path | None
    ) -> NoReturn:
        os.setpgid(0, 0)
        resource.setrlimit(resource.RLIMIT_NOFILE, self._most_files)
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
            neuron_cores=list(settings.cores_of(slot)),
            is_simulated=settings.is_simulated,
        )
        run_calls(
            RunnerChannels(
                CallQueue(calls, busy),
                socket.socket(fileno=outcomes),
                stdout,
                stderr,
                mark,
                to_env(info),
                settings.value_directories,
                {**settings.environment_of(index, slot), FILE_ENV: str(self._directory / NOTICE_FILE)},
                (
                    MemoryAllowance(group, settings.memory_limit_bytes)
                    if group is not None and settings.memory_limit_bytes is not None and enter(group)
                    else None
                ),
            )
        )

    def _fork(self, main: Callable[[], NoReturn]) -> int:
        """Fork a child that closes the supervisor's sockets and dies with the supervisor.

        Signals are blocked during the fork: the supervisor's handlers, which end the node, must not run in the child.
        Raises OSError if the system refuses.
        """
        supervisor = os.getpid()
        signal.pthread_sigmask(signal.SIG_BLOCK, HELD_SIGNALS)
        try:
            pid = os.fork()
        except OSError:
            signal.pthread_sigmask(signal.SIG_UNBLOCK, HELD_SIGNALS)
            raise
        if pid:
            signal.pthread_sigmask(signal.SIG_UNBLOCK, HELD_SIGNALS)
            return pid
        try:
            die_with_parent(supervisor)
            signal.set_wakeup_fd(-1)
            for sig in HELD_SIGNALS:
                signal.signal(sig, signal.SIG_DFL)
            signal.pthread_sigmask(signal.SIG_UNBLOCK, HELD_SIGNALS)
            for control in self._controls.values():
                control.close()
            main()
        except BaseException:
            traceback.print_exc()
        finally:
            os._exit(70)

    # ── processes that have ended
    # ─────────────────────────────────────────────────────────────────────────────────────────────────────

    def _reap(self) -> None:
        while True:
            try:
                pid, status = os.waitpid(-1, os.WNOHANG)
            except ChildProcessError:
                return
            if pid == 0:
                return
            code = os.waitstatus_to_exitcode(status)
            if pid in self._runners:
                runner = self._runners.pop(pid)
                if runner.busy.look():
                    self._watch.note_call()
                was_too_large = self._was_too_large(runner)
                self._say(
                    runner.index, RunnerExit(pid, code, is_out_of_memory=was_too_large and code == -signal.SIGKILL)
                )
            elif pid in self._workers:
                self._bury_worker(self._workers.pop(pid), code)
            elif pid == self._listener_pid:
                self._log(f"the listener for notices died with {code}")
                self._listener_pid, self._listen_at = 0, time.monotonic() + LISTEN_AGAIN_SECONDS
            elif pid == self._scheduler_pid:
                self._end(f"the scheduler died with {code}")

    def _was_too_large(self, runner: RunnerProcess) -> bool:
        """Return whether the kernel has killed a runner for lack of memory; remove its control group."""
        return self._groups is not None and runner.group is not None and self._groups.end(runner.group)

    def _bury_worker(self, index: int, code: int) -> None:
        """Handle the end of a worker process: kill its runners, and start it again after a pause.

        On the head, repeated crashes are the worker's own fault and end the node. On other nodes there may be no
        scheduler while the head is replaced.
        """
        if index in self._controls:
            self._controls.pop(index).close()
        self._forget_requests(lambda request: request.index == index)
        for pid, runner in self._runners.items():
            if runner.index == index:
                with contextlib.suppress(PermissionError, ProcessLookupError):
                    os.killpg(pid, signal.SIGKILL)
        now = time.monotonic()
        if code == node.LEFT:
            self._due[index] = now
            return
        deaths = self._deaths[index] = self._deaths[index].and_at(now)
        self._log(f"worker {index} died with {code}")
        if self._settings.rank == 0 and deaths.is_loop:
            self._end(
                f"worker {index} died {len(deaths.times)} times within {CRASH_LOOP_SECONDS:g} s, last with {code}"
            )
        self._due[index] = now + deaths.pause_seconds

    def _say(self, index: int, message: object) -> None:
        with contextlib.suppress(OSError, KeyError):
            self._controls[index].send(pickle.dumps(message))

    # ── watching ─────────────────────────────────────────────────────────────────────────────────────────────────────

    def _look_at_clocks(self) -> None:
        if reason := self._watch.verdict(self._settings, [runner.busy for runner in self._runners.values()]):
            self._end(reason)

    def _look_at_settings(self) -> None:
        """Restart the node if the client has written settings of another generation.

        Log settings that are unreadable.
        """
        path = self._directory / "settings.json"
        try:
            stat = path.stat()
            seen = (stat.st_mtime_ns, stat.st_size, stat.st_ino)
            if seen == self._settings_seen:
                return
            self._settings_seen = seen
            settings = read_settings(self._directory)
        except (OSError, ValueError, KeyError, TypeError) as error:
            if not isinstance(error, FileNotFoundError):
                self._log(f"the new settings cannot be read: {error!r}")
            return
        if settings.generation == self._settings.generation:
            return
        if self._workers and not self._scheduler_pid and self._settings.may_become(settings):
            self._carry_on(settings)
        else:
            self._begin_anew(settings)

    def _look_for_missed(self) -> None:
        """Kill the workers that are missing at the scheduler: a frozen worker does not end by itself.

        They are started again as after any crash.
        """
        path = self._directory / MISSED
        try:
            missed = path.read_text().split()
            path.unlink()
        except OSError:
            return
        now = time.monotonic()
        for pid, index in self._workers.items():
            died_at = max(self._deaths[index].times, default=-math.inf)
            if str(index) in missed and now - died_at > RESTART_GRACE_SECONDS:
                self._log(f"worker {index} is missed by the pool, and is killed")
                with contextlib.suppress(ProcessLookupError):
                    os.kill(pid, signal.SIGKILL)

    def _carry_on(self, settings: NodeSettings) -> None:
        """Send living workers the node's new place: they go there with their calls, or end if they have none.

        The head was another node.
        """
        (self._directory / "head.json").unlink(missing_ok=True)
        self._settings = settings
        self._watch.note_call()  # the client is there
        self._log(f"carries on as generation {settings.generation}")
        if settings.rank == 0:
            self._start_scheduler()
        for index in self._workers.values():
            self._say(index, Reassigned(settings))
        self._deaths.clear()
        self._due = dict.fromkeys(self._due, time.monotonic())

    def _begin_anew(self, settings: NodeSettings) -> None:
        """Kill all forked processes and start them again with other settings: another rank, another head."""
        began = time.monotonic()
        for control in self._controls.values():
            control.close()
        self._forget_requests(lambda _: True)
        self._scheduler_at = math.inf
        if stuck := kill_descendants(self._spared, KILL_SECONDS):
            self._log(f"processes that outlive SIGKILL: {', '.join(str(birth.pid) for birth in sorted(stuck))}")
        for runner in self._runners.values():
            self._was_too_large(runner)
        for state in (self._controls, self._workers, self._runners, self._due, self._deaths):
            state.clear()
        self._scheduler_pid = self._listener_pid = 0
        (self._directory / "head.json").unlink(missing_ok=True)
        self._settings = settings
        self._watch.note_call()  # the client is there, and will run its lost calls again
        self._log(f"begins anew as generation {settings.generation}, all gone after {time.monotonic() - began:.3f} s")
        self._start()

    def _log(self, text: str) -> None:
        print(f"skyward: node {self._settings.rank}: {text}", flush=True)

    def _end(self, reason: str) -> NoReturn:
        print(f"skyward: node {self._settings.rank} ends: {reason}", flush=True)
        if self._settings.is_guarded:
            end_guarded_node(self._directory, self._settings, reason, self._spared)
        _write_reason(self._directory, reason)
        owner = self._settings.owner
        is_owned = owner is not None and owner.is_alive() and not (self._directory / DETACHED).exists()
        is_kept = name_of(os.getppid()) == KEEPER  # it reads the reason, and removes the folder then
        end_node(self._settings, None if is_owned or is_kept else self._directory)


def end_node(settings: NodeSettings, directory: Path | None = None) -> NoReturn:
    """Kill all processes of the node and remove its files in memory, and its directory if that is given; then exit.

    The keepers live on: they end after the caller, and kill processes that were missed.
    """
    signal.signal(signal.SIGTERM, signal.SIG_IGN)
    while kill_all_but_keepers(settings.instance_id):
        # until the kernel has ended them; a process that forks meanwhile is found in the next round
        time.sleep(0.01)
        reap_all()
    _remove_memory(settings)
    if directory is not None:  # no process reads it any more
        shutil.rmtree(directory, ignore_errors=True)
    os._exit(0)


def end_guarded_node(
    directory: Path, settings: NodeSettings, reason: str, spared: frozenset[ProcessIdentity]
) -> NoReturn:
    """Write for the guard why the node ends, unless that is written already; kill all forked processes, and exit.

    The guard does the rest.
    """
    signal.signal(signal.SIGTERM, signal.SIG_IGN)
    _write_reason(directory, reason)
    kill_descendants(spared, KILL_SECONDS)
    _remove_memory(settings)
    os._exit(0)


def _write_reason(directory: Path, reason: str) -> None:
    """Write why the node ends, for its keeper or its guard, unless that is written already."""
    if not (directory / ENDED).exists():
        with contextlib.suppress(OSError):  # a full disk: the guard sees that this process is gone
            write_atomically(directory / ENDED, f"{reason}\n")


def _remove_memory(settings: NodeSettings) -> None:
    """Remove the folders for values, except the last: it is the node's directory, which is still needed."""
    for place in settings.value_directories[:-1]:
        shutil.rmtree(place, ignore_errors=True)


def await_settings(directory: Path, owner: NodeOwner | None) -> NodeSettings:
    """Wait for the client's settings. Ends the process when they do not come in time or the client is gone."""
    deadline = time.monotonic() + SETTINGS_DEADLINE_SECONDS
    path = directory / "settings.json"
    while not path.exists():
        if time.monotonic() > deadline or (owner is not None and not owner.is_alive()):
            sys.exit(f"no {path} after {SETTINGS_DEADLINE_SECONDS} s, or the client is gone")
        time.sleep(0.01)
    return read_settings(directory)


def read_settings(directory: Path) -> NodeSettings:
    """Return the client's settings, with this machine's GPU partitions.

    Raises OSError, ValueError, KeyError or TypeError.
    """
    settings = NodeSettings.from_json((directory / "settings.json").read_text())
    try:
        partitions = (directory / "partitions").read_text()
    except FileNotFoundError:
        return settings
    return with_partitions(settings, partitions)


def main() -> NoReturn:
    """Run the supervisor of the node whose directory is the only argument."""
    directory = Path(sys.argv[1])
    write_atomically(directory / "supervisor", f"{os.getpid()}\n")
    owner_text = os.environ.get("SKYWARD_OWNER")
    owner = NodeOwner(int(owner_text.partition(":")[0]), owner_text.partition(":")[2]) if owner_text else None
    settings = await_settings(directory, owner)
    for place in settings.value_directories[:-1]:
        make_private(Path(place))
    for module, reason in preload(settings.preload).items():
        print(f"{MARK}{json.dumps({'module': module, 'reason': reason})}", flush=True)
    if watcher := os.environ.get("SKYWARD_BOOT_WATCHER"):
        with contextlib.suppress(ProcessLookupError, ValueError):
            os.kill(int(watcher), signal.SIGKILL)
    Supervisor(directory, settings, Watch(directory, uptime)).run()


# Modules that a node imports once, in the process from which runners are forked (`Image(preload=...)`).
#
# States of a module: named -> imported, or skipped for a reason. It is skipped if its import fails. It is also
# skipped if it starts a thread or opens an accelerator: a fork copies neither, so this process could not be forked
# safely. An import cannot be undone, so the process then starts again without the module. Nothing was forked before,
# and the client sees one start.


def preload(modules: Sequence[str]) -> Mapping[str, str]:
    """Import these modules; return those that were skipped, with the reason.

    Starts this program again if a module may not be imported in it.
    """
    skipped: dict[str, str] = json.loads(os.environ.pop(SKIPPED, "{}"))
    inherited = frozenset(_descriptors())
    for module in modules:
        if module in skipped:
            continue
        try:
            import_module(module)
        except BaseException as error:  # a module may raise anything, also SystemExit
            skipped[module] = f"{type(error).__name__}: {error}"
        if reason := why_unsafe():
            skipped[module] = reason
            _start_again(skipped, inherited)
    if modules:
        gc.collect()
        gc.freeze()  # the collector writes to what it looks at, and forks would get copies of these pages
    return skipped


def why_unsafe() -> str:
    """Return why this process cannot be forked safely; "" if it can.

    A fork comes first, because OpenBLAS and others end their threads before a fork and start them again when they are
    needed.
    """
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", DeprecationWarning)  # of a fork beside threads, which is what is looked for
        if not (pid := os.fork()):
            os._exit(0)
    os.waitpid(pid, 0)
    names = [thread.name for thread in threading.enumerate() if thread is not threading.main_thread()]
    count = len(os.listdir("/proc/self/task")) - 1
    if count:
        return f"the import has started {count} threads{f' ({", ".join(names)})' if names else ''}"
    devices = sorted({what for what in _descriptors().values() if what.startswith(DEVICES)})
    return f"the import has opened {', '.join(devices)}" if devices else ""


def _descriptors() -> Mapping[int, str]:
    found = dict[int, str]()
    for entry in os.listdir("/proc/self/fd"):
        try:
            found[int(entry)] = os.readlink(f"/proc/self/fd/{entry}")
        except OSError:  # it was the descriptor of this listing
            continue
    return found


def _start_again(skipped: Mapping[str, str], inherited: frozenset[int]) -> NoReturn:
    """Run this program from its beginning, in this process, with the descriptors that it had then."""
    for descriptor in _descriptors().keys() - inherited:
        os.set_inheritable(descriptor, False)  # noqa: FBT003 - the only way to call it
    os.environ[SKIPPED] = json.dumps(dict(skipped))
    sys.stdout.flush()
    os.execv(sys.executable, sys.orig_argv)  # noqa: S606 - a shell would be another process


if __name__ == "__main__":
    main()
