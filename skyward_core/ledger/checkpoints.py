"""Checkpoints of a ledger in SQLite: they move what is in the `-wal` file into the ledger's file.

SQLite does this after commits by itself, beside the commits of other processes. Before 3.51.3 (3.50.7, 3.44.6) that may
lose commits or damage the file (sqlite.org/wal.html, "The WAL-Reset Bug"), and distributions have older versions. So
connections switch it off, and this module does it in the mode TRUNCATE, which takes the write lock first. SQLite goes
on without the lock if it does not get it in WAIT_SECONDS. So this module first waits until the lock is free, and makes
no checkpoint if a process keeps it. A process that takes the lock in the moment between, and keeps it for longer than
WAIT_SECONDS, can still commit beside a checkpoint. The last connection that is closed makes a checkpoint too, when no
other process has the ledger open.
"""

from __future__ import annotations

import logging
import sqlite3
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any, cast

from sqlalchemy import Engine
from sqlalchemy.engine import URL
from sqlalchemy.exc import DBAPIError

LARGEST_BYTES = 4 << 20
"""SQLite's own limit: 1,000 pages."""
AGAIN_SECONDS = 60.0
"""When the next attempt follows one that did not succeed, because a process reads for long, or is stopped."""
WAIT_SECONDS = 2.0
"""How long a checkpoint waits for the write lock, and then for readers. Writers wait meanwhile."""

_log = logging.getLogger("skyward")


class Checkpoints:
    """Decides when a ledger needs a checkpoint, and makes it. Safe to use from threads. PostgreSQL needs none."""

    def __init__(self, url: URL, busy_timeout_seconds: float, clock: Callable[[], float] = time.monotonic) -> None:
        self._wal = Path(f"{url.database}-wal") if url.get_backend_name() == "sqlite" else None
        self._busy_timeout_seconds = busy_timeout_seconds
        self._clock = clock
        self._again_at = 0.0

    def after_commit(self, engine: Engine) -> None:
        """Make a checkpoint if the `-wal` file is large. Raises nothing: what was committed is safe without it."""
        if self._wal is None or self._size() < LARGEST_BYTES or self._clock() < self._again_at:
            return
        self._again_at = self._clock() + AGAIN_SECONDS
        try:
            if self._make(engine):
                self._again_at = 0.0
        except (DBAPIError, sqlite3.Error) as error:  # the second one from the driver itself
            _log.debug("no checkpoint of the ledger: %s", error)

    def _size(self) -> int:
        assert self._wal is not None
        try:
            return self._wal.stat().st_size
        except OSError:  # there is none
            return 0

    def _make(self, engine: Engine) -> bool:
        """Make a checkpoint; return whether the `-wal` file is empty now."""
        with engine.connect().execution_options(isolation_level="AUTOCOMMIT") as connection:
            driver = cast("Any", connection.connection)
            driver.rollback()  # SQLite refuses a checkpoint in a transaction
            driver.execute(f"PRAGMA busy_timeout={WAIT_SECONDS * 1000:.0f}")
            try:
                driver.execute("BEGIN IMMEDIATE")  # waits for the write lock
                driver.execute("ROLLBACK")
                is_busy, _, _ = driver.execute("PRAGMA wal_checkpoint(TRUNCATE)").fetchone()
            finally:
                driver.execute(f"PRAGMA busy_timeout={self._busy_timeout_seconds * 1000:.0f}")
        return not is_busy
