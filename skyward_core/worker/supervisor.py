"""The first process of a node: `python -m skyward_core.worker.supervisor DIRECTORY`.

It imports Dask once and forks everything else from there: the scheduler (on the head), the workers, the runners in
which calls run, and on spot machines who listens for the notice that they are taken back. So a node starts with one
import instead of one for each process, and a crashed runner is replaced within milliseconds. It stays single-threaded
(forking is only safe so), never runs a user's code, reaps the dead, and is the node's watchdog: when its owner is gone,
or one of its clocks has run out, it takes the whole node down.

Files of DIRECTORY: `settings.json` is written by the client, and written again to have the node begin anew as another;
`lease` is written by whoever may lengthen it; `partitions`, if there is one, by the bootstrap script, and names the GPU
of each worker; `supervisor` holds this process's pid; `head.json` is written by the head when its scheduler listens;
`ended` says to the guard, where there is one, why the node ends. The supervisor may be started before `settings.json`
is there. `missed` is written by the client when workers stay away from the scheduler, and taken away when they are
dead.
"""

from __future__ import annotations

import array
import contextlib
import math
import os
import pickle
import select
import shutil
import signal
import socket
import sys
import time
import traceback
from collections import Counter, defaultdict
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import NoReturn

from skyward_core.concurrency.backoff import Backoff
from skyward_core.worker import node  # the one costly import: everything forked from here has it already
from skyward_core.worker.call_groups import CallGroups, MemoryAllowance, call_groups, enter
from skyward_core.worker.info import InstanceInfo, to_env
from skyward_core.worker.keeper import adopt_orphans
from skyward_core.worker.preemption_notice import listen
from skyward_core.worker.private_folders import make_private
from skyward_core.worker.runner import JOB_PLACE, RunnerChannels, run_calls
from skyward_core.worker.runner_factory import REQUEST_BYTES, Forked, Reassigned, RunnerExit
from skyward_core.worker.settings import NodeOwner, NodeSettings, with_partitions, write_atomically
from skyward_core.worker.watchdog import (
    DETACHED,
    MISSED,
    BusyFlag,
    ProcessIdentity,
    Watch,
    descendants,
    die_with_parent,
    kill_descendants,
    kill_instance,
    members,
    reap_all,
    uptime,
)

WATCH_SECONDS = 0.2
SETTINGS_DEADLINE_SECONDS = 120.0
KILL_SECONDS = 10.0  # then the node goes on without those that are stuck in the kernel
CRASH_LOOP_DEATHS = 5  # a worker process of the head that dies so often ...
CRASH_LOOP_SECONDS = 60.0  # ... within this time takes the node down
FIRST_PAUSE_SECONDS = 0.2
LONGEST_PAUSE_SECONDS = 5.0
YOUNG_SECONDS = 8.0  # for so long after it was begun anew a worker that is missed may still be on its way
LISTEN_AGAIN_SECONDS = 30.0  # what listens for notices raises nothing: somebody has killed it
HELD_SIGNALS = (signal.SIGCHLD, signal.SIGTERM)


@dataclass(frozen=True, slots=True)
class RunnerProcess:
    """A process for calls: the worker that it belongs to, which of that worker's slots it serves, and the mark that
    says whether it has a call.

    `group` is its control group, where the kernel bounds its memory.
    """

    index: int
    slot: int
    busy: BusyFlag
    group: Path | None


class CallQueue(socket.socket):
    """A runner's end of the queue of its calls.

    While it waits there for the next one it is not busy, and else it is.
    """

    def __init__(self, fileno: int, busy: BusyFlag) -> None:
        super().__init__(fileno=fileno)
        self._busy = busy

    def recv(self, bufsize: int, flags: int = 0, /) -> bytes:
        """Wait for the next call; b"" when the worker has closed the line."""
        self._busy.end()
        packet = super().recv(bufsize, flags)
        self._busy.begin()
        return packet


@dataclass(frozen=True, slots=True)
class CrashHistory:
    """When a worker process died, of late: the last CRASH_LOOP_SECONDS, on time.monotonic's clock."""

    times: tuple[float, ...] = ()

    def and_at(self, now: float) -> CrashHistory:
        """Return these and one more."""
        return CrashHistory((*(time for time in self.times if now - time < CRASH_LOOP_SECONDS), now))

    @property
    def is_loop(self) -> bool:
        """Tell whether it is no use to try again."""
        return len(self.times) >= CRASH_LOOP_DEATHS

    @property
    def pause_seconds(self) -> float:
        """How long to wait before the next one is started."""
        return Backoff(FIRST_PAUSE_SECONDS, LONGEST_PAUSE_SECONDS).seconds(len(self.times))


class Supervisor:
    """Forks, reaps, watches.

    `_workers` maps the pid of each worker process to its index, `_runners` that of each runner to what belongs to it,
    `_due` the index of a worker process that has died to the time (time.monotonic) at which the next one is started.
    """

    def __init__(self, directory: Path, settings: NodeSettings, watch: Watch) -> None:
        self._directory = directory
        self._settings = settings
        self._watch = watch
        self._controls: dict[int, socket.socket] = {}
        self._workers: dict[int, int] = {}
        self._runners: dict[int, RunnerProcess] = {}
        self._scheduler_pid = 0
        self._listener_pid = 0
        self._listen_at = math.inf
        self._due: dict[int, float] = {}
        self._deaths: defaultdict[int, CrashHistory] = defaultdict(CrashHistory)
        self._settings_seen: tuple[int, int, int] | None = None
        self._groups: CallGroups | None = None
        self._spared = frozenset(descendants())  # what the startup script has left running is not ours to kill

    def run(self) -> NoReturn:
        """Start the node's processes and watch until the end; never returns."""
        adopt_orphans()
        wake_read, wake_write = os.pipe2(os.O_NONBLOCK | os.O_CLOEXEC)
        signal.signal(signal.SIGCHLD, lambda *_: None)
        signal.signal(signal.SIGTERM, lambda *_: self._end("asked to"))
        signal.set_wakeup_fd(wake_write, warn_on_full_buffer=False)
        self._start()
        watched_at = time.monotonic()
        while True:
            sockets = {control.fileno(): index for index, control in self._controls.items()}
            ready, _, _ = select.select([wake_read, *sockets], [], [], self._wait_seconds())
            for descriptor in ready:
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

    # ── starting ─────────────────────────────────────────────────────────────────────────────────────────────────────

    def _start(self) -> None:
        self._bound_memory()
        if self._settings.rank == 0:
            self._scheduler_pid = self._fork(lambda: node.run_scheduler(self._directory, self._settings))
        for index in range(len(self._settings.workers)):
            self._start_worker(index)
        self._listen_at = time.monotonic() if self._settings.notice_url and self._settings.workers else math.inf

    def _bound_memory(self) -> None:
        """Have the kernel bound the memory of calls where it may, and say whether it does."""
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
        if self._listen_at <= now:
            self._listen_at = math.inf
            self._listener_pid = self._fork(lambda: listen(self._settings.notice_url))
        for index in [index for index, due in self._due.items() if due <= now]:
            del self._due[index]
            self._start_worker(index)

    def _wait_seconds(self) -> float:
        soonest = min(self._due.values(), default=math.inf) - time.monotonic()
        return max(0.0, min(WATCH_SECONDS, soonest))

    def _start_worker(self, index: int) -> None:
        ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        self._controls[index] = ours
        pid = self._fork(lambda: node.run_worker(self._directory, self._settings, index, theirs))
        theirs.close()
        self._workers[pid] = index

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
        number, mark = int.from_bytes(request[:REQUEST_BYTES]), request[REQUEST_BYTES:]
        descriptors = array.array("i")
        descriptors.frombytes(ancillary[0][2])
        busy = BusyFlag()
        slot = self._free_slot(index)
        group = self._groups.make() if self._groups is not None else None
        pid = self._fork(lambda: self._become_runner(index, slot, mark, list(descriptors), busy, group))
        with contextlib.suppress(PermissionError, ProcessLookupError):
            os.setpgid(pid, pid)
        for descriptor in descriptors:
            os.close(descriptor)
        self._runners[pid] = RunnerProcess(index, slot, busy, group)
        self._say(index, Forked(number, pid))

    def _free_slot(self, index: int) -> int:
        """Return the first slot of a worker that no process serves.

        A worker asks for another process when it was told that the one before has ended. If that could not be told in
        time, because one is stuck in the kernel, there may be no free slot: then it is the one with the fewest
        processes, and what they hold is not to be had.
        """
        held = Counter(runner.slot for runner in self._runners.values() if runner.index == index)
        return min(range(self._settings.slots), key=lambda slot: held[slot])

    def _become_runner(
        self, index: int, slot: int, mark: bytes, descriptors: list[int], busy: BusyFlag, group: Path | None
    ) -> NoReturn:
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
                settings.environment_of(index, slot),
                (
                    MemoryAllowance(group, settings.memory_limit_bytes)
                    if group is not None and settings.memory_limit_bytes is not None and enter(group)
                    else None
                ),
            )
        )

    def _fork(self, main: Callable[[], NoReturn]) -> int:
        """Fork a child that keeps none of the supervisor's lines open and dies with it.

        Signals are held back meanwhile: one that is meant for the child must not find the supervisor's way of taking it
        there, which ends the node.
        """
        supervisor = os.getpid()
        signal.pthread_sigmask(signal.SIG_BLOCK, HELD_SIGNALS)
        pid = os.fork()
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

    # ── the dead ─────────────────────────────────────────────────────────────────────────────────────────────────────

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
        """Whether the kernel has killed what was in the control group of a runner that has ended; the group goes."""
        return self._groups is not None and runner.group is not None and self._groups.end(runner.group)

    def _bury_worker(self, index: int, code: int) -> None:
        """A worker process is gone, and with it whoever waits for its calls. The next one is started after a pause.

        On the head, dying again and again is the worker's own fault. Elsewhere it may only mean that there is no
        scheduler, while a new head is found.
        """
        if index in self._controls:
            self._controls.pop(index).close()
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
        """Begin anew if the client has written settings of another generation.

        What cannot be read is told and passed over.
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
        """Kill workers that the client misses: one that stands still does nothing, and does not die.

        Their successors come as after any death.
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
            if str(index) in missed and now - died_at > YOUNG_SECONDS:
                self._log(f"worker {index} is missed by the pool, and is killed")
                with contextlib.suppress(ProcessLookupError):
                    os.kill(pid, signal.SIGKILL)

    def _carry_on(self, settings: NodeSettings) -> None:
        """Tell living workers the node's new place: they go there with their calls, or end at once if they have none.

        The head was another node.
        """
        (self._directory / "head.json").unlink(missing_ok=True)
        self._settings = settings
        self._watch.note_call()  # the client is there
        self._log(f"carries on as generation {settings.generation}")
        if settings.rank == 0:
            self._scheduler_pid = self._fork(lambda: node.run_scheduler(self._directory, self._settings))
        for index in self._workers.values():
            self._say(index, Reassigned(settings))
        self._deaths.clear()
        self._due = dict.fromkeys(self._due, time.monotonic())

    def _begin_anew(self, settings: NodeSettings) -> None:
        """Kill all that has been forked, forget it, and start with other settings: another rank, another head.

        Dask stays imported.
        """
        began = time.monotonic()
        for control in self._controls.values():
            control.close()
        if stuck := kill_descendants(self._spared, KILL_SECONDS):
            self._log(f"processes that outlive SIGKILL: {', '.join(str(birth.pid) for birth in sorted(stuck))}")
        for runner in self._runners.values():
            self._was_too_large(runner)
        for state in (self._controls, self._workers, self._runners, self._due, self._deaths):
            state.clear()
        self._scheduler_pid = self._listener_pid = 0
        (self._directory / "head.json").unlink(missing_ok=True)
        self._settings = settings
        self._watch.note_call()  # the client is there, and what it has lost will run again
        self._log(f"begins anew as generation {settings.generation}, all gone after {time.monotonic() - began:.3f} s")
        self._start()

    def _log(self, text: str) -> None:
        print(f"skyward: node {self._settings.rank}: {text}", flush=True)

    def _end(self, reason: str) -> NoReturn:
        print(f"skyward: node {self._settings.rank} ends: {reason}", flush=True)
        if self._settings.is_guarded:
            end_guarded_node(self._directory, self._settings, reason, self._spared)
        owner = self._settings.owner
        is_owned = owner is not None and owner.is_alive() and not (self._directory / DETACHED).exists()
        end_node(self._settings, None if is_owned else self._directory)


def end_node(settings: NodeSettings, directory: Path | None = None) -> NoReturn:
    """Kill every process of the node and remove what it keeps in memory, and its directory if that is given; the caller
    last.

    Its keepers are left: they end when the caller does, and take along what may have slipped by.
    """
    signal.signal(signal.SIGTERM, signal.SIG_IGN)
    while not all(members(settings.instance_id).values()):
        kill_instance(settings.instance_id)
        # until the kernel has taken them down; a process that forks meanwhile is found in the next round
        time.sleep(0.01)
        reap_all()
    _remove_memory(settings)
    if directory is not None:  # nobody is left to read it
        shutil.rmtree(directory, ignore_errors=True)
    os._exit(0)


def end_guarded_node(
    directory: Path, settings: NodeSettings, reason: str, spared: frozenset[ProcessIdentity]
) -> NoReturn:
    """Tell the guard why the node ends, unless somebody has done so already, and kill what the caller has forked, then
    itself. The guard does the rest.
    """
    signal.signal(signal.SIGTERM, signal.SIG_IGN)
    if not (directory / "ended").exists():
        with contextlib.suppress(OSError):  # a full disk: the guard sees that this process is gone
            write_atomically(directory / "ended", f"{reason}\n")
    kill_descendants(spared, KILL_SECONDS)
    _remove_memory(settings)
    os._exit(0)


def _remove_memory(settings: NodeSettings) -> None:
    """The last of the folders for values is the node's own directory, which others still need."""
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
    """Return what the client has written, and what this machine has found about its GPUs.

    Raises OSError, ValueError, KeyError or TypeError.
    """
    settings = NodeSettings.from_json((directory / "settings.json").read_text())
    try:
        partitions = (directory / "partitions").read_text()
    except FileNotFoundError:
        return settings
    return with_partitions(settings, partitions)


def main() -> NoReturn:
    """Become the supervisor of the node whose files are in the directory given as the only argument."""
    directory = Path(sys.argv[1])
    write_atomically(directory / "supervisor", f"{os.getpid()}\n")
    owner_text = os.environ.get("SKYWARD_OWNER")
    owner = NodeOwner(int(owner_text.partition(":")[0]), owner_text.partition(":")[2]) if owner_text else None
    settings = await_settings(directory, owner)
    for place in settings.value_directories[:-1]:
        make_private(Path(place))
    if watcher := os.environ.get("SKYWARD_BOOT_WATCHER"):
        with contextlib.suppress(ProcessLookupError, ValueError):
            os.kill(int(watcher), signal.SIGKILL)
    Supervisor(directory, settings, Watch(directory, uptime)).run()


if __name__ == "__main__":
    main()
