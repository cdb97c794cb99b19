"""The reaper's own side: a script that waits until a pool's driver is gone, or asks for it, and then ends the pool's
machines.

`reaper.py` starts it, and nobody imports it. Until it must act it is a bare interpreter, without `site` and without
this package: up in some milliseconds, and small. Its standard input brings the charge, then words; its end, or another
parent, means that the driver is gone. What it writes goes into the log.
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
"""How often to look whether the driver is still the parent: its forks may hold the pipe open, which then never ends."""
PATIENCE_SECONDS = 1800.0
BOOKS_PATIENCE_SECONDS = 120.0
"""How long to try to write down that the machines are gone. A sweep does it later."""
TRY_SECONDS = 300.0
"""A try that takes longer hangs: it is abandoned, and another one begun."""
FIRST_PAUSE_SECONDS, LONGEST_PAUSE_SECONDS = 1.0, 30.0
LEDGER_BUSY_SECONDS = 5.0
"""How long a locked ledger may hold up the end of the machines, at each step."""
LEAVE, TERMINATE, LEASE, GONE = b"leave", b"terminate", b"lease", b""
LENGTH_BYTES = 8
NAME = "skyward-reaper"
"""In the process table: a node's keeper (`worker/keeper.py`) ends all that a call has started, but not what ends
another pool.
"""

_DEAF_TO = ("SIGHUP", "SIGINT", "SIGQUIT", "SIGTERM", "SIGTSTP", "SIGUSR1", "SIGUSR2")
_SITES = ("site-packages", "dist-packages")


class BooksOpen(Exception):
    """The machines are gone, and the ledger does not say so: try again, not for long."""


class Driver:
    """The process that has started this one, as it is seen and heard from here."""

    def __init__(self, pid: int, pipe: int) -> None:
        self._pid = pid
        self._pipe = pipe
        self._unread = bytearray()
        self._poll = select.poll()
        self._poll.register(pipe, select.POLLIN)

    def charge(self) -> bytes | None:
        """Wait for the charge.

        None if the driver is gone before it has told all of it: then it has asked for nothing yet.
        """
        while len(self._unread) < LENGTH_BYTES or len(self._unread) < self._charge_end():
            if not self._hear():
                return None
        end = self._charge_end()
        charge = bytes(self._unread[LENGTH_BYTES:end])
        del self._unread[:end]
        return charge

    def _charge_end(self) -> int:
        return LENGTH_BYTES + int.from_bytes(self._unread[:LENGTH_BYTES], "big")

    def word(self) -> bytes:
        """Wait for the next word; GONE when the driver is."""
        while b"\n" not in self._unread:
            if not self._hear():
                return GONE
        word, _, self._unread = self._unread.partition(b"\n")
        return bytes(word)

    def _hear(self) -> bool:
        """Wait until more was said; False if the driver is gone."""
        while not self._poll.poll(LOOK_SECONDS * 1000):
            if os.getppid() != self._pid:
                return False
        said = os.read(self._pipe, 65536)
        self._unread += said
        return said != b""


class Ending:
    """Ends the pool, as often as it is asked to, in a thread: meanwhile the driver may say that it is done itself."""

    def __init__(
        self,
        charge: bytes,
        end_pool: Callable[..., None] | None = None,
        *,
        try_seconds: float = TRY_SECONDS,
        clock: Callable[[], float] = time.monotonic,
        pause: Callable[[float], None] = time.sleep,
    ) -> None:
        self.is_by_lease = False
        """The driver has said that the pool outlives it."""
        self._charge = charge
        self._end_pool = end_pool
        self._try_seconds = try_seconds
        self._clock = clock
        self._pause = pause
        self._was_asked = False
        self._asked = threading.Event()
        self._busy = threading.Lock()
        self._pool_id = self._ledger_url = ""
        self._providers = b""

    def ask(self) -> None:
        """End the pool whatever its driver does. Returns at once."""
        self._asked.set()
        if not self._was_asked:
            self._was_asked = True
            threading.Thread(target=self._serve, daemon=True).start()

    def _serve(self) -> None:
        while True:
            self._asked.wait()
            self._asked.clear()
            with self._busy:
                self._end("its process asked for it")

    def finish(self) -> int:
        """End the pool, for its driver is gone, unless it has ended or outlives its driver. Returns 0, or 1 if it could
        not be ended.

        Once more, if it was ended while the driver lived: an answer to a launch may have come after that.
        """
        with self._busy:
            return self._end("its process is gone")

    def _end(self, why: str) -> int:
        began, seconds = self._clock(), FIRST_PAUSE_SECONDS
        while (trouble := self._tried(why)) is not None:
            self._say(_one_line(trouble))
            if self._clock() - began > (BOOKS_PATIENCE_SECONDS if isinstance(trouble, BooksOpen) else PATIENCE_SECONDS):
                self._say("given up; its entry stays open, and `skyward sweep` asks again")
                return 1
            self._pause(seconds)
            seconds = min(seconds * 2, LONGEST_PAUSE_SECONDS)
        return 0

    def _tried(self, why: str) -> Exception | None:
        """Try to end the pool, in a thread that is abandoned if it hangs; return what went wrong."""
        outcome: list[Exception | None] = []

        def run() -> None:
            try:
                self._try(why)
                outcome.append(None)
            except Exception as error:  # whatever it is, the machines still run
                outcome.append(error)

        thread = threading.Thread(target=run, daemon=True)
        thread.start()
        thread.join(self._try_seconds)
        return outcome[0] if outcome else TimeoutError(f"no answer within {self._try_seconds:.0f} s")

    def _try(self, why: str) -> None:
        if not self._pool_id:
            self._unpack()
        ledger, entry, trouble = self._looked_up()
        try:
            if not self._was_asked and (reason := self._why_not(entry)):
                self._say(f"{why}, and {reason}: nothing to do")
                return
            self._say(f"{why}: ending its machines")
            self._give_back_all(ledger, self._load(entry), why)
            if ledger is None:
                raise BooksOpen(f"its machines are gone; the ledger cannot be used: {trouble}")
            after = ledger.pool(self._pool_id)
            if after is not None and after.ended_at is None:
                raise BooksOpen("its machines are gone; the ledger has other things of it that are not")
        finally:
            if ledger is not None:
                ledger.close()
        self._say("its machines are gone")

    def _unpack(self) -> None:
        """Become a process that can import what the driver could."""
        import logging
        import pickle
        import site

        pool_id, self._ledger_url, self._providers, path, directory = pickle.loads(self._charge)
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
        """Open the ledger and look the pool up; no ledger, and why, if it cannot be used."""
        ledger = None
        try:
            from skyward_core.ledger.ledger import Ledger

            ledger = Ledger(self._ledger_url, busy_timeout_seconds=LEDGER_BUSY_SECONDS)
            return ledger, ledger.pool(self._pool_id), None
        # a full disk, a lock, a server that is away, a driver that is not installed: the machines are ended all the
        # same
        except Exception as error:
            if ledger is not None:
                ledger.close()
            self._say(f"the ledger cannot be used: {_one_line(error)}")
            return None, None, error

    def _why_not(self, entry: PoolEntry | None) -> str:
        """Why the pool's machines are not ours to end; "" if they are."""
        if entry is not None and entry.ended_at is not None:
            return "the pool has ended"
        if self.is_by_lease or (entry is not None and entry.lives_by_lease):
            return "the pool lives on by its lease"
        return ""

    def _load(self, entry: PoolEntry | None) -> Sequence[Provider]:
        """Return who may have machines of the pool: of the driver's providers the one that the ledger names, all if it
        names none of them or is not there.

        If they cannot be rebuilt, what the ledger knows, which holds no secrets.
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
            from skyward_core.providers.base import load

            return [load(entry.provider)]
        named = [provider for provider in providers if entry is not None and provider.to_json() == dict(entry.provider)]
        return named or providers

    def _give_back_all(self, ledger: Ledger | None, providers: Sequence[Provider], why: str) -> None:
        """Ask all at once: an outage of a cloud that has nothing, which takes minutes to be told, must not keep
        machines of another running.
        """
        troubles: list[Exception] = []

        def give_back(provider: Provider) -> None:
            try:
                self._give_back(ledger, provider, why)
            except Exception as error:
                troubles.append(error)

        threads = [threading.Thread(target=give_back, args=(provider,), daemon=True) for provider in providers]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        if troubles:  # machines that may live count for more than books that are open
            raise next((error for error in troubles if not isinstance(error, BooksOpen)), troubles[0])

    def _give_back(self, ledger: Ledger | None, provider: Provider, why: str) -> None:
        from skyward_core.errors import LedgerError

        end_pool = self._end_pool
        if end_pool is None:
            from skyward_core.cleanup.release import end_pool
        try:
            end_pool(ledger, provider, self._pool_id, why=why)
        except LedgerError as error:
            raise BooksOpen(f"its machines are gone; this could not be written down: {error}") from error

    def _say(self, text: str) -> None:
        import logging

        logging.getLogger("skyward").info("%s", text)


def _one_line(error: Exception) -> str:
    text = str(error).partition("\n")[0][:500]
    return f"{type(error).__name__}: {text}" if text else type(error).__name__


def watch(driver: Driver, ending: Ending) -> int:
    """Do what the driver says, until it says that it is done, or is gone. Returns the exit status."""
    while (word := driver.word()) not in (LEAVE, GONE):
        if word == TERMINATE:
            ending.ask()
        elif word == LEASE:
            ending.is_by_lease = True
    return 0 if word == LEAVE else ending.finish()


def _outlive_the_node() -> None:
    """Where a call on a node has opened the pool: leave the node's control group, and be spared by its keeper, by this
    name. The node ends before the pool.
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
    # the group is not ours to leave: the reaper ends with the node then, and what it would have ended by its lease or
    # the sweep
    except OSError:
        pass


def _enter_above(group: str) -> None:
    """Enter a control group, or one below it that all reapers share, where it may hold no process because it hands
    controllers down (cgroups(7)).
    """
    for place in (group, os.path.join(group, "skyward-reapers")):
        with contextlib.suppress(OSError):
            os.makedirs(place, exist_ok=True)
            with open(os.path.join(place, "cgroup.procs"), "w") as processes:
                processes.write("0")
            return


def main(ending: Callable[[bytes], Ending] = Ending) -> int:
    """Run as `reaper_process.py POOL_ID DRIVER_PID`; the pool's id is for people who look at the process table."""
    _outlive_the_node()
    for name in _DEAF_TO:  # by a handler: what is ignored would stay so in whatever a provider starts
        signal.signal(signal.Signals[name], lambda *_: None)
    driver = Driver(int(sys.argv[2]), 0)
    charge = driver.charge()
    return 0 if charge is None else watch(driver, ending(charge))


if __name__ == "__main__":
    status = 1
    try:
        status = main()
    finally:
        os._exit(status)  # abandoned tries may hang for ever
