"""The ledger: requested and created resources, their cost, and their end. SQLite by default, PostgreSQL by URL.

An intent is committed before the call that creates a resource. After the call it is bound to the cloud's id. It is
closed with the evidence that the resource is gone. A crash in between leaves an open intent with the data to find the
resource: kind, provider, region, name, token, tags.

`rows.py` has the values, `tables.py` the tables, `migrations` their versions. `database.py` owns the connections,
transactions and migrations; `sql_engine.py` opens SQLite and PostgreSQL. `pools.py`, `intents.py`, `uses.py`,
`bills.py` and `accounts.py` each read and write one group of tables. `Ledger` is all of them on one database, and the
one class that other packages use.
"""

from __future__ import annotations

import logging
import os
import tempfile
from collections.abc import Callable, Mapping
from contextlib import AbstractContextManager
from datetime import UTC, datetime
from pathlib import Path
from types import TracebackType
from typing import TYPE_CHECKING, Any, Self, override

from skyward_core.errors import LedgerError
from skyward_core.ledger.accounts import Accounts
from skyward_core.ledger.bills import Bills
from skyward_core.ledger.database import Database
from skyward_core.ledger.intents import Intents
from skyward_core.ledger.lease_clock import awake_seconds
from skyward_core.ledger.names import Names, Stewards
from skyward_core.ledger.pools import Pools
from skyward_core.ledger.sql_engine import parse_url
from skyward_core.ledger.uses import Calls, Uses
from skyward_core.paths import first_private, state_places
from skyward_core.wire.private_folders import NotPrivate

if TYPE_CHECKING:
    from sqlalchemy import URL

BUSY_TIMEOUT_SECONDS = 30.0
"""How long a statement waits for a writer in another process. A write takes milliseconds."""
ELSEWHERE = (
    "name another place, SKYWARD_LEDGER=sqlite:////var/lib/skyward/ledger.db or postgresql+psycopg://host/database"
)
_log = logging.getLogger("skyward")


def default_url(environ: Mapping[str, str] = os.environ, *, must_last: bool = False) -> str:
    """Return the ledger's URL: `SKYWARD_LEDGER`, or a SQLite file under the user's state directory.

    If that directory is not writable, it is a file in the user's runtime folder, with a warning, because a reboot may
    delete it. `must_last` raises LedgerError instead: a budget needs it. A user without a home raises it too.
    """
    if url := environ.get("SKYWARD_LEDGER"):
        return url
    home, *others = state_places()
    try:
        folder = home[1]()
    except (RuntimeError, KeyError) as error:
        raise LedgerError(
            f"there is no place for the ledger, because this user has no home ({error}): set HOME, or {ELSEWHERE}"
        ) from error
    if not folder.is_absolute():
        raise LedgerError(
            f"there is no place for the ledger, because this user has no home ({folder} leads nowhere): set HOME, or"
            f" {ELSEWHERE}"
        )
    if _can_be_written(folder):
        return f"sqlite:///{folder / 'ledger.db'}"
    if must_last:
        raise LedgerError(f"{folder} may not be written to, and a budget needs a ledger that lasts: {ELSEWHERE}")
    try:
        runtime = first_private("ledger", others)
    except NotPrivate as error:
        raise LedgerError(
            f"{folder} may not be written to, and there is no private runtime folder: {error}."
            f" {ELSEWHERE[0].upper()}{ELSEWHERE[1:]}"
        ) from error
    _log.warning(
        "%s may not be written to: the ledger is in %s, which may be gone after a reboot; %s",
        folder,
        runtime,
        ELSEWHERE,
    )
    return f"sqlite:///{runtime / 'ledger.db'}"


def _can_be_written(folder: Path) -> bool:
    """Return whether files can be created in a folder, or the folder itself."""
    there = next(path for path in (folder, *folder.parents) if path.exists())
    return there.is_dir() and os.access(there, os.W_OK | os.X_OK)


def now() -> datetime:
    """Return the time of day, in UTC."""
    return datetime.now(UTC)


class Ledger(Pools, Calls, Intents, Bills, Accounts):
    """An open ledger. Close it, or use it as a context manager. Safe to use from several threads, not across a fork.

    Its methods are those of its parts, which share its database. `names`, `uses` and `stewards` are parts of their own.

    Every method is one transaction, committed when it returns, and raises LedgerError when the database cannot be used.
    SQLite files are in WAL mode: readers never wait, and nothing waits for them. Do not put the file on a network file
    system: processes there do not see each other's locks.
    """

    def __init__(
        self,
        url: str,
        *,
        clock: Callable[[], datetime] = now,
        busy_timeout_seconds: float = BUSY_TIMEOUT_SECONDS,
        uses_server_clock: bool | None = None,
        awake: Callable[[], float] | None = None,
        may_migrate: bool = False,
    ) -> None:
        """Open the ledger at a SQLAlchemy URL, and create it if it is new.

        `uses_server_clock`: whether a PostgreSQL server's clock decides about pools with a name; None: unless another
        clock is given. `awake` counts the seconds for which this computer was awake since its boot, by which leases of
        this boot are judged although its time of day was set; None: the kernel's, unless another clock is given.
        `may_migrate`: migrate a ledger of an earlier release, unless a pool of it lives; it is for those who open a
        pool. Raises LedgerError for a ledger of another version that is not migrated.
        """
        of_server = clock is now if uses_server_clock is None else uses_server_clock
        awake = awake_seconds if awake is None and clock is now else awake
        self._database = Database(
            url, clock, busy_timeout_seconds, uses_server_clock=of_server, awake=awake, may_migrate=may_migrate
        )
        self.url = self._database.url
        self.names = Names(self._database)
        """Pools with a name, and their clients."""
        self.uses = Uses(self._database)
        """What each step has cost that makes calls on a pool."""
        self.stewards = Stewards(self._database)
        """Which client keeps a named pool."""

    def close(self) -> None:
        """Close all connections. May be called twice. A later call opens its own connection."""
        self._database.close()

    def time_of_day(self) -> datetime:
        """Return the time of this computer, by which `PoolEntry.lease_expires_at` is judged."""
        return self._database.clock()

    def snapshot(self) -> AbstractContextManager[None]:
        """Let all that this thread reads in the block be of one moment."""
        return self._database.snapshot()

    def try_write(self) -> int:
        """Write without changing anything; return the version of the tables. For checks of an installation."""
        return self._database.try_write()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def vacuum(self) -> None:
        """Free the space of deleted rows: on the disk (SQLite), or in the tables (PostgreSQL)."""
        self._database.vacuum()


def is_made(url: str) -> bool:
    """Return whether there is a ledger at a URL; True for a server, whose tables only a connection finds."""
    place = parse_url(url)
    return place.get_backend_name() != "sqlite" or Path(str(place.database)).exists()


def ledger_to_read(url: str, **options: Any) -> Ledger:
    """Open a ledger to look into it, with the options of `Ledger`. A file that does not exist is not made: the ledger
    is empty then. Raises LedgerError, also for a file that could not be made.
    """
    if is_made(url):
        return Ledger(url, **options)
    place = parse_url(url)
    folder = Path(str(place.database)).parent
    if not _can_be_written(folder):
        raise LedgerError(
            f"there is no ledger at {place.database}, and none can be made: {folder} cannot be written to."
            f" {ELSEWHERE[0].upper()}{ELSEWHERE[1:]}."
        )
    return _Unmade(place, **options)


class _Unmade(Ledger):
    """A ledger that nobody has made yet, for those who only read: an empty one, in a folder that is removed with it."""

    def __init__(self, url: URL, **options: Any) -> None:
        self._folder = tempfile.TemporaryDirectory(prefix="skyward-no-ledger-", ignore_cleanup_errors=True)
        super().__init__(f"sqlite:///{self._folder.name}/ledger.db", **options)
        self.url = url

    @override
    def close(self) -> None:
        super().close()
        self._folder.cleanup()
