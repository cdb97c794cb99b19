"""The keeper of a node: the ancestor of all its processes, which kills all of them when the node ends, tagged or not.

Run as a script, `python -I -S keeper.py [--group PATH] [--ended PATH] [--remove PATH] ... -- COMMAND ...`, it starts
within milliseconds, because it imports nothing of this package. It becomes a child subreaper (prctl(2)). A process that
a call starts stays below it in the process tree when its parent dies. This holds for each session, environment and user
of the process. Two keeper processes are above the command:

    keeper ── second keeper ── command (the startup shell, then the supervisor) ── workers, runners ── what calls start

    the command ends or is killed      the second keeper kills all that is below it, and exits; then the first one exits
    the second keeper is killed        its children become children of the first, which kills all that is below it, and
    exits the first keeper is killed         the second one goes on: it has everything below it already
    both are killed at once            what was below them gets other parents: it is found by its tag or by the node's
    control group, if it has one of them

A keeper exits when the kernel says that it has no child left. For a subreaper this means: no descendant. It then writes
the file `kept` into the node's directory. It spares one kind of process: the reaper of a pool that a call has opened,
which ends by itself. It may not kill some processes, for example one that has become root by sudo. It waits for them
without a limit. The node is then still listed, because the keeper carries its tag.
"""

from __future__ import annotations

import contextlib
import ctypes
import os
import shutil
import signal
import sys
import time

TYPE_CHECKING = False  # `typing` takes longer to import than all the rest
if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Sequence

KEEPER, REAPER = "skyward-keeper", "skyward-reaper"
"""Names of these processes in the process table (proc(5), comm)."""
KEPT = "kept"
ENDED = "ended"
"""The file in which a node writes why it ends, before it does."""
BY_GROUP, BY_TREE = "group", "tree"
"""What the file `kept` says: the node's processes were in a control group of their own, or only below the keeper."""
PR_SET_CHILD_SUBREAPER = 36
LONGEST_PAUSE_SECONDS = 0.2


def adopt_orphans() -> None:
    """Become the parent of every descendant whose own parent dies (prctl(2), PR_SET_CHILD_SUBREAPER).

    So processes that a call leaves behind stay below this one.
    """
    ctypes.CDLL(None).prctl(PR_SET_CHILD_SUBREAPER, 1)


def call_oneself(name: str) -> None:
    """Set this process's name in the process table."""
    with contextlib.suppress(OSError), open("/proc/self/comm", "w") as comm:
        comm.write(name)


def name_of(pid: int) -> str:
    """Return a process's name in the process table; "" if it is gone."""
    try:
        with open(f"/proc/{pid}/comm") as comm:
            return comm.read().rstrip("\n")
    except (OSError, ValueError):
        return ""


def start_of(pid: int) -> str:
    """Return a process's start time in clock ticks since boot (field 22 of proc(5) stat), "" if it is gone, a zombie or
    hidden.
    """
    try:
        with open(f"/proc/{pid}/stat", errors="replace") as stat:
            state, *rest = stat.read().rpartition(") ")[2].split()
    except OSError:
        return ""
    return "" if state in "ZX" else rest[18]


def children_of(pid: int) -> list[int]:
    """Return the children of a process, zombies included; none if it is gone."""
    if not HAS_CHILDREN:
        return [child for child in processes() if parent_of(child) == pid]
    found: list[int] = []
    with contextlib.suppress(FileNotFoundError, ProcessLookupError):
        for task in os.listdir(f"/proc/{pid}/task"):
            with open(f"/proc/{pid}/task/{task}/children") as children:
                found += map(int, children.read().split())
    return found


def processes() -> list[int]:
    """Return the pids that the process table shows."""
    return [int(entry) for entry in os.listdir("/proc") if entry.isdigit()]


def parent_of(pid: int) -> int:
    """Return the pid of a process's parent; 0 if it is gone."""
    try:
        with open(f"/proc/{pid}/stat", errors="replace") as stat:
            return int(stat.read().rpartition(") ")[2].split()[1])
    except OSError:
        return 0


def kill_all(pids: Iterable[int]) -> None:
    """Send SIGKILL to these processes and all below them, except reapers.

    Each is killed as soon as it is found: a process that forks all the time must be killed between two forks.
    """
    for pid in pids:
        if name_of(pid) != REAPER:
            below = children_of(pid)
            with contextlib.suppress(ProcessLookupError, PermissionError):
                os.kill(pid, signal.SIGKILL)
            kill_all(below)


def end_all_below() -> None:
    """Kill and reap all processes below this one, which adopts orphans, until only reapers are left."""
    pause, rounds_without = 0.0005, 0
    while True:
        kill_all(children_of(os.getpid()))
        try:
            while os.waitpid(-1, os.WNOHANG)[0]:
                pause = 0.0005
        except ChildProcessError:
            return
        alive = [child for child in children_of(os.getpid()) if start_of(child)]
        rounds_without = rounds_without + 1 if all(name_of(child) == REAPER for child in alive) else 0
        if alive and rounds_without > 1:
            return
        time.sleep(pause)
        pause = min(pause * 1.5, LONGEST_PAUSE_SECONDS)


def keep(become: Callable[[], object]) -> None:
    """Fork, run `become` in the child, and return when it has ended and no process is left below.

    Forwards SIGTERM to the child.
    """
    adopt_orphans()
    child = 0
    signal.signal(signal.SIGTERM, lambda *_: _pass_on(child))
    for other in (signal.SIGINT, signal.SIGHUP, signal.SIGQUIT):
        signal.signal(other, lambda *_: None)  # not SIG_IGN, which the command would inherit
    signal.pthread_sigmask(signal.SIG_BLOCK, (signal.SIGTERM,))
    child = os.fork()
    if not child:
        try:
            become()
        finally:
            os._exit(70)
    signal.pthread_sigmask(signal.SIG_UNBLOCK, (signal.SIGTERM,))
    with contextlib.suppress(ChildProcessError):
        while os.waitpid(-1, 0)[0] != child:
            pass
    child = 0
    end_all_below()


def _pass_on(child: int) -> None:
    if child:
        with contextlib.suppress(ProcessLookupError):
            os.kill(child, signal.SIGTERM)


def _execute(command: Sequence[str]) -> None:
    """Become the command, in its own process group."""
    os.setpgid(0, 0)
    signal.signal(signal.SIGTERM, signal.SIG_DFL)
    signal.pthread_sigmask(signal.SIG_UNBLOCK, (signal.SIGTERM,))
    try:
        os.execvp(command[0], list(command))  # noqa: S606  a command line of our own
    except OSError as error:
        sys.stderr.write(f"skyward: {command[0]} cannot be started: {error}\n")
        sys.stderr.flush()


def _enter(group: str) -> bool:
    """Move this process into a control group, with all that it will start. False where that is not possible."""
    try:
        with open(os.path.join(group, "cgroup.procs"), "w") as processes_of_group:
            processes_of_group.write("0")
    except OSError:
        return False
    return True


def _is_alone(directory: str) -> bool:
    """Return whether this process must remove the node's files: its owner is gone, or has detached it."""
    pid, _, started = os.environ.get("SKYWARD_OWNER", "").partition(":")
    is_owned = pid.isdigit() and started != "" and start_of(int(pid)) == started
    return not is_owned or os.path.exists(os.path.join(directory, "detached"))


def main(arguments: Sequence[str]) -> None:
    """Run as a script; see the head of this file.

    `--group` is the control group to enter, `--ended` the file that says when and why the node has ended, `--remove`
    what to remove at the end if the owner is gone.
    """
    options, command = list(arguments[: arguments.index("--")]), arguments[arguments.index("--") + 1 :]
    call_oneself(KEEPER)
    how, ended, to_remove = BY_TREE, "", list[str]()
    for option, value in zip(options[::2], options[1::2], strict=True):
        if option == "--group":
            how = BY_GROUP if _enter(value) else BY_TREE
        elif option == "--ended":
            ended = value
        else:
            to_remove.append(value)

    def second() -> None:
        keep(lambda: _execute(command))
        _finish(how, ended, to_remove)
        os._exit(0)

    keep(second)
    _finish(how, ended, to_remove)


def _finish(how: str, ended: str, to_remove: Sequence[str]) -> None:
    """Write that no process of the node runs, and remove its files if the owner will not.

    Both keepers do this, because either may be the only one left.
    """
    directory = os.environ.get("SKYWARD_INSTANCE_DIRECTORY", "")
    if ended:
        _write_end(ended, os.path.join(directory, ENDED))
    # its folder may be gone already
    with contextlib.suppress(OSError), open(os.path.join(directory, KEPT), "w") as kept:
        kept.write(f"{how}\n")
    if to_remove and _is_alone(directory):
        for path in to_remove:
            shutil.rmtree(path, ignore_errors=True)


def _write_end(path: str, reason_path: str) -> None:
    """Write when and why the node has ended (`machines/instances.py`), unless the other keeper has done so."""
    reason = "all of its processes have ended"
    with contextlib.suppress(OSError, UnicodeDecodeError), open(reason_path) as written:
        reason = written.readline().strip() or reason
    # a full disk, or a folder that is gone: its cost is estimated
    with contextlib.suppress(OSError):
        with open("/proc/uptime") as uptime, open("/proc/sys/kernel/random/boot_id") as boot:
            head = f"{uptime.read().split()[0]} {time.time():.3f} {boot.read().strip()}"
        partial = f"{path}.{os.getpid()}"
        with open(partial, "w") as record:
            record.write(f"{head}\n{reason}\n")
        try:
            os.link(partial, path)  # never over an earlier one
        finally:
            os.unlink(partial)


HAS_CHILDREN = os.path.exists(f"/proc/self/task/{os.getpid()}/children")
"""Whether the kernel lists the children of a process (CONFIG_PROC_CHILDREN); else all of the process table is read."""

if __name__ == "__main__":
    main(sys.argv[1:])
