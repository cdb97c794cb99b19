"""Makes an attached process the steward of a named pool when the pool has none (docs/decisions/0028).

The renewal of the process's row notices it (`NamedUse.on_vacant`). The thread "skyward-adopt" adopts the pool, because
that may take long, and a renewal may not. It also ends a stewardship that was lost.
"""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Callable
from typing import TYPE_CHECKING, Protocol

from skyward_core.concurrency.backoff import Backoff
from skyward_core.session.named_use import NamedUse

if TYPE_CHECKING:
    from skyward_core.session.pool_size import PoolSize

PAUSES = Backoff(5.0, 120.0)
"""How long a process that could not adopt the pool leaves it to others."""
ADOPT_SECONDS = 60.0
"""How long a process that leaves waits for an adoption that has begun."""


class Stewardship(Protocol):
    """The part of `stewardship.Stewardship`, and of `regained.RegainedStewardship`, that a successor needs."""

    @property
    def size(self) -> PoolSize | None: ...
    def start(self) -> None: ...
    def keep_warm(self, seconds: float) -> float: ...
    def note_cost(self) -> None: ...
    def leave(self) -> None: ...
    def lose(self) -> None: ...


class Successor:
    """Owns the present stewardship of one attached process, and the thread that begins and ends it."""

    def __init__(self, use: NamedUse, new: Callable[[], Stewardship], log: Callable[..., object]) -> None:
        self._use = use
        self._new = new
        self._log = log
        self._changing = threading.Lock()
        """Guards the next three fields."""
        self._work: list[Callable[[], None]] = []
        """What the thread does, and what it does then; empty if there is no thread."""
        self._thread: threading.Thread | None = None
        self._is_closing = False
        self._try_at = 0.0
        self._failures = 0
        self.stewardship: Stewardship | None = None
        """The present one; None while another process, or none, keeps the pool."""
        use.on_vacant, use.on_lost = self.take, self.lose

    def take(self) -> None:
        """Adopt the pool in another thread, unless an adoption is running or has just failed. Does not wait."""
        if time.monotonic() >= self._try_at:
            self._in_thread(self._take, may_be_dropped=True)

    def lose(self) -> None:
        """Another process keeps the pool. Does not wait."""
        self._in_thread(self._lose, may_be_dropped=False)

    @property
    def size(self) -> PoolSize | None:
        """The number of the pool's nodes, if this process keeps it."""
        return None if self.stewardship is None else self.stewardship.size

    def keep_warm(self, seconds: float) -> float | None:
        """Let the nodes live for so long, and pay for it, if this process keeps the pool; return for how many seconds
        they are paid, and None if it does not keep the pool.

        Raises what `Stewardship.keep_warm` raises.
        """
        return None if self.stewardship is None else self.stewardship.keep_warm(seconds)

    def note_cost(self) -> None:
        """Record the cost so far in the ledger, if this process keeps the pool."""
        if (stewardship := self.stewardship) is not None:
            stewardship.note_cost()

    def close(self) -> None:
        """Leave the pool to its next steward. Nothing is adopted after that."""
        with self._changing:
            self._is_closing = True
            thread = self._thread
        if thread is not None:
            thread.join(ADOPT_SECONDS)
        if self.stewardship is not None:
            self.stewardship.leave()
            self.stewardship = None
        self._use.resign()

    def _in_thread(self, work: Callable[[], None], *, may_be_dropped: bool) -> None:
        with self._changing:
            if self._is_closing or (self._work and may_be_dropped):
                return
            self._work.append(work)
            if len(self._work) == 1:
                self._thread = threading.Thread(target=self._run, name="skyward-adopt", daemon=True)
                self._thread.start()

    def _run(self) -> None:
        while True:
            try:
                self._work[0]()
            except Exception as error:
                self._log(
                    logging.ERROR, "the pool %r could not be left to another process", self._use.name, error=error
                )
            with self._changing:
                self._work.pop(0)
                if not self._work:
                    return

    def _take(self) -> None:
        try:
            if not self._use.take_stewardship():
                return
            stewardship = self._new()
            stewardship.start()
            self._failures = 0
            if self._use.guard.is_lost:  # meanwhile
                stewardship.lose()
            else:
                self.stewardship = stewardship
        except Exception as error:  # after any error another process must get its turn
            self._use.resign()
            self._failures += 1
            self._try_at = time.monotonic() + PAUSES.seconds(self._failures)
            self._log(
                logging.WARNING,
                "the pool %r has no process that replaces its nodes and pays for it, and this one cannot: %s",
                self._use.name,
                error,
            )

    def _lose(self) -> None:
        stewardship, self.stewardship = self.stewardship, None
        if stewardship is not None:
            stewardship.lose()
