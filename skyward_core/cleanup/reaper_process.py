"""The reaper's process: a script that ends a pool's machines when the pool's owner is gone, or at its command.

`reaper.py` starts it; no module imports it. Until it must act it is a bare interpreter, without `site` and without this
package, so that it starts in milliseconds and stays small. Its standard input has its input, then commands. The end of
the standard input, or another parent process, means that the owner is gone. Its output goes into the log.
"""

from __future__ import annotations

import contextlib
import os
import select
import signal
import sys
import threading
import time

TYPE_CHECKING = False  # `typing` takes longer to import than all the rest
if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from skyward_core.ledger.ledger import Ledger
    from skyward_core.ledger.rows import PoolEntry
    from skyward_core.providers.base import Provider

LOOK_SECONDS = 1.0
"""The interval of the checks whether the owner is still the parent. The owner's forks may keep the pipe open."""
PATIENCE_SECONDS = 1800.0
LEDGER_PATIENCE_SECONDS = 120.0
"""How long to try to record that the machines are gone. A later sweep records it otherwise."""
TRY_SECONDS = 300.0
"""A try that takes longer hangs: it is abandoned, and the next one begins."""
FIRST_PAUSE_SECONDS, LONGEST_PAUSE_SECONDS = 1.0, 30.0
LEDGER_BUSY_SECONDS = 5.0
"""How long a locked ledger may delay the end of the machines, at each step."""
LEAVE, TERMINATE, LEASE, GONE = b"leave", b"terminate", b"lease", b""
LENGTH_BYTES = 8
NAME = "skyward-reaper"
"""The name in the process table. A node's keeper (`worker/keeper.py`) ends all that calls have started, except for
processes of this name, which end other pools.
"""

_IGNORED_SIGNALS = ("SIGHUP", "SIGINT", "SIGQUIT", "SIGTERM", "SIGTSTP", "SIGUSR1", "SIGUSR2")
_SITES = ("site-packages", "dist-packages")


class LedgerNotUpdated(Exception):
    """The machines are gone, and this is not in the ledger yet: to be tried again for LEDGER_PATIENCE_SECONDS."""


class OwnerProcess:
    """The process that has started this one: its commands, and whether it lives."""

    def __init__(self, pid: int, pipe: int) -> None:
        self._pid = pid
        self._pipe = pipe
        self._unread = bytearray()
        self._poll = select.poll()
        self._poll.register(pipe, select.POLLIN)

    def input(self) -> bytes | None:
        """Wait for the input.

        None if the owner is gone before it has sent all of it: then it has not requested any machine yet.
        """
        while len(self._unread) < LENGTH_BYTES or len(self._unread) < self._input_end():
            if not self._receive():
                return None
        end = self._input_end()
        content = bytes(self._unread[LENGTH_BYTES:end])
        del self._unread[:end]
        return content

    def _input_end(self) -> int:
        return LENGTH_BYTES + int.from_bytes(self._unread[:LENGTH_BYTES], "big")

    def command(self) -> bytes:
        """Wait for the next command; GONE when the owner is gone."""
        while b"\n" not in self._unread:
            if not self._receive():
                return GONE
        command, _, self._unread = self._unread.partition(b"\n")
        return bytes(command)

    def _receive(self) -> bool:
        """Wait for more bytes; return False if the owner is gone."""
        while not self._poll.poll(LOOK_SECONDS * 1000):
            if os.getppid() != self._pid:
                return False
        received = os.read(self._pipe, 65536)
        self._unread += received
        return received != b""


class PoolTeardown:
    """Ends the pool in a thread, at each request: meanwhile the owner may send `leave`."""

    def __init__(
        self,
        reaper_input: bytes,
        end_pool: Callable[..., None] | None = None,
        *,
        try_seconds: float = TRY_SECONDS,
        clock: Callable[[], float] = time.monotonic,
        pause: Callable[[float], None] = time.sleep,
    ) -> None:
        self.is_by_lease = False
        """Whether the owner has informed this process that the pool outlives it."""
        self._input = reaper_input
        self._end_pool = end_pool
        self._try_seconds = try_seconds
        self._clock = clock
        self._pause = pause
        self._is_requested = self._is_serving = False
        self._request = threading.Event()
        self._busy = threading.Lock()
        self._pool_id = self._ledger_url = ""
        self._providers = b""

    def ask(self) -> None:
        """End the pool whether its owner lives or not. Returns at once."""
        self._request.set()
        self._is_requested = True
        if self._is_serving:
            return
        self._is_serving = _could_start(threading.Thread(target=self._serve, daemon=True))
        if not self._is_serving:  # the next request tries again
            with self._busy:
                self._end("its process has requested it")

    def _serve(self) -> None:
        while True:
            self._request.wait()
            self._request.clear()
            with self._busy:
                self._end("its process has requested it")

    def finish(self) -> int:
        """End the pool because its owner is gone, unless it has ended or outlives its owner. Return 0, or 1 if it could
        not be ended.

        A pool that was ended while the owner lived is ended once more: a launch may have been answered after that.
        """
        with self._busy:
            return self._end("its process is gone")

    def _end(self, why: str) -> int:
        began, seconds = self._clock(), FIRST_PAUSE_SECONDS
        while (trouble := self._tried(why)) is not None:
            self._say(_one_line(trouble))
            if self._clock() - began > (
                LEDGER_PATIENCE_SECONDS if isinstance(trouble, LedgerNotUpdated) else PATIENCE_SECONDS
            ):
                self._say("given up; its entry stays open, and `skyward sweep` tries again")
                return 1
            self._pause(seconds)
            seconds = min(seconds * 2, LONGEST_PAUSE_SECONDS)
        return 0

    def _tried(self, why: str) -> Exception | None:
        """Try to end the pool, in a thread that is abandoned if it hangs; return the error, if there is one."""
        outcome: list[Exception | None] = []

        def run() -> None:
            try:
                self._try(why)
                outcome.append(None)
            except Exception as error:  # after an error of any kind the machines still run
                outcome.append(error)

        thread = threading.Thread(target=run, daemon=True)
        if _could_start(thread):
            thread.join(self._try_seconds)
        else:
            run()
        return outcome[0] if outcome else TimeoutError(f"no answer within {self._try_seconds:.0f} s")

    def _try(self, why: str) -> None:
        if not self._pool_id:
            self._unpack()
        ledger, entry, trouble = self._looked_up()
        try:
            if not self._is_requested and (reason := self._why_not(entry)):
                self._say(f"{why}, and {reason}: nothing to do")
                return
            self._say(f"{why}: ending its machines")
            self._tear_down_all(ledger, self._load(entry), why)
            if ledger is None:
                raise LedgerNotUpdated(f"its machines are gone; the ledger cannot be used: {trouble}")
            after = ledger.pool(self._pool_id)
            if after is not None and after.ended_at is None:
                raise LedgerNotUpdated("its machines are gone; the ledger has other things of it that are not")
        finally:
            if ledger is not None:
                ledger.close()
        self._say("its machines are gone")

    def _unpack(self) -> None:
        """Become a process that can import all modules of the owner."""
        import logging
        import pickle
        import site

        pool_id, self._ledger_url, self._providers, path, directory = pickle.loads(self._input)
        try:
            os.chdir(directory)  # a provider or a ledger may name files relative to it
        except OSError:
            pass
        for entry in path:
            if os.path.basename(entry) in _SITES:
                site.addsitedir(entry)  # import hooks of packages that are installed to be edited
        sys.path[:] = [*path, os.path.dirname(os.path.dirname(os.path.dirname(os.path.abspath(__file__))))]
        logging.Formatter.converter = time.gmtime
        logging.basicConfig(
            format=f"%(asctime)sZ {pool_id} %(message)s", datefmt="%Y-%m-%dT%H:%M:%S", level=logging.WARNING
        )
        logging.getLogger("skyward").setLevel(logging.INFO)
        self._pool_id = pool_id

    def _looked_up(self) -> tuple[Ledger | None, PoolEntry | None, Exception | None]:
        """Return the ledger and the pool's entry; if the ledger cannot be used, None, None and the error."""
        ledger = None
        try:
            from skyward_core.ledger.ledger import Ledger

            ledger = Ledger(self._ledger_url, busy_timeout_seconds=LEDGER_BUSY_SECONDS)
            return ledger, ledger.pool(self._pool_id), None
        # a full disk, a lock, a server that does not answer, a missing database driver: the machines must still end
        except Exception as error:
            if ledger is not None:
                ledger.close()
            self._say(f"the ledger cannot be used: {_one_line(error)}")
            return None, None, error

    def _why_not(self, entry: PoolEntry | None) -> str:
        """Return why the pool's machines must not be ended; "" if they must."""
        if entry is not None and entry.ended_at is not None:
            return "the pool has ended"
        if self.is_by_lease or (entry is not None and entry.lives_by_lease):
            return "the pool lives on by its lease"
        return ""

    def _load(self, entry: PoolEntry | None) -> Sequence[Provider]:
        """Return the providers that may have machines of the pool.

        This is the one of the owner's providers that the ledger names; all of them if it names none or cannot be read.
        If they cannot be rebuilt, it is the provider in the ledger, which has no secrets and may be refused.
        """
        import pickle

        try:
            from skyward_core.serialization.pickling import Pickled, loads

            sent = pickle.loads(self._providers)
            providers: Sequence[Provider] = loads(sent) if isinstance(sent, Pickled) else sent
        except Exception as error:
            if entry is None:
                raise
            self._say(f"its provider cannot be rebuilt ({_one_line(error)}): taken from the ledger")
            from skyward_core.config.own_providers import provider_of

            return [provider_of(entry)]
        if entry is None:
            return providers
        from skyward_core.config.own_providers import same_as

        return same_as(entry, providers) or providers

    def _tear_down_all(self, ledger: Ledger | None, providers: Sequence[Provider], why: str) -> None:
        """Tear the pool down at all providers at once.

        An outage of one cloud may last minutes, and must not delay the end of machines at another cloud.
        """
        troubles: list[Exception] = []

        def tear_down_at(provider: Provider) -> None:
            try:
                self._tear_down(ledger, provider, why)
            except Exception as error:
                troubles.append(error)

        threads = list[threading.Thread]()
        for provider in providers:
            thread = threading.Thread(target=tear_down_at, args=(provider,), daemon=True)
            if _could_start(thread):
                threads.append(thread)
            else:
                tear_down_at(provider)
        for thread in threads:
            thread.join()
        if troubles:  # machines that may be left are worse than a ledger that is behind
            raise next((error for error in troubles if not isinstance(error, LedgerNotUpdated)), troubles[0])

    def _tear_down(self, ledger: Ledger | None, provider: Provider, why: str) -> None:
        from skyward_core.errors import LedgerError

        end_pool = self._end_pool
        if end_pool is None:
            from skyward_core.cleanup.release import end_pool
        try:
            end_pool(ledger, provider, self._pool_id, why=why)
        except LedgerError as error:
            raise LedgerNotUpdated(f"its machines are gone; this could not be recorded: {error}") from error

    def _say(self, text: str) -> None:
        import logging

        logging.getLogger("skyward").info("%s", text)


def _could_start(thread: threading.Thread) -> bool:
    """Start a thread; False if none can be started: then the caller does the work."""
    try:
        thread.start()
    except RuntimeError:
        return False
    return True


def _one_line(error: Exception) -> str:
    text = str(error).partition("\n")[0][:500]
    return f"{type(error).__name__}: {text}" if text else type(error).__name__


def watch(owner: OwnerProcess, teardown: PoolTeardown) -> int:
    """Carry out the owner's commands until it sends LEAVE or is gone. Returns the exit status."""
    while (command := owner.command()) not in (LEAVE, GONE):
        if command == TERMINATE:
            teardown.ask()
        elif command == LEASE:
            teardown.is_by_lease = True
    return 0 if command == LEAVE else teardown.finish()


def _outlive_the_node() -> None:
    """Survive the end of the node, if a call on a node has opened the pool: leave the node's control group, and take
    the name that its keeper spares. The node ends before the pool.
    """
    try:
        with open("/proc/self/comm", "w") as comm:
            comm.write(NAME)
        with open("/proc/self/cgroup") as groups:
            own = next((line.rstrip("\n")[3:] for line in groups if line.startswith("0::")), "")
        above, mark, _ = own.partition("/skyward.")
        with open("/proc/self/mountinfo") as mounts:
            points = [line.split()[4] for line in mounts if " - cgroup2 " in line and line.split()[3] == "/"]
        if mark and points:
            _enter_above(points[0] + above)
    except OSError:  # without permission to leave the group the reaper ends with the node; the lease ends the pool
        pass


def _enter_above(group: str) -> None:
    """Enter a control group, or a group below it that all reapers share.

    A group that passes controllers to groups below it may not contain processes (cgroups(7)).
    """
    for place in (group, os.path.join(group, "skyward-reapers")):
        with contextlib.suppress(OSError):
            os.makedirs(place, exist_ok=True)
            with open(os.path.join(place, "cgroup.procs"), "w") as processes:
                processes.write("0")
            return


def main(teardown: Callable[[bytes], PoolTeardown] = PoolTeardown) -> int:
    """Run as `reaper_process.py POOL_ID OWNER_PID`; the pool's id is for people who read the process table."""
    _outlive_the_node()
    for name in _IGNORED_SIGNALS:  # by a handler, because SIG_IGN is inherited by the processes that a provider starts
        signal.signal(signal.Signals[name], lambda *_: None)
    owner = OwnerProcess(int(sys.argv[2]), 0)
    reaper_input = owner.input()
    return 0 if reaper_input is None else watch(owner, teardown(reaper_input))


if __name__ == "__main__":
    status = 1
    try:
        status = main()
    finally:
        os._exit(status)  # abandoned tries may hang without end
