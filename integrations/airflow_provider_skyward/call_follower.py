"""Follows the detached calls of one pool for a trigger: their lines, whether they have ended, and why money is missing.

    unattached ──attached──▶ following ──all calls have ended──▶ over
     │  ▲  └──out of reach──┐   │
     │  │                   │   │    not attached for longer than a lease ──▶ NodeLost
     └──│── the pool is gone: NodeLost, LeaseLost
        └───────────────────┴───┘ the connection was cut, or an unexpected error: attached again
    any of them ──left──▶ left: an attachment that comes later is closed at once

`look` runs in a thread of the trigger's, one at a time; `leave` may be called meanwhile from another thread.
"""

from __future__ import annotations

import contextlib
import logging
import queue
import threading
import time
from collections.abc import Callable, Sequence

import skyward_core as sky
from airflow_provider_skyward.task_log import lines_for_log

_log = logging.getLogger("skyward")
LEASE_SECONDS = 600.0
"""For how long the nodes live after the last sign of life of a triggerer."""
ATTACH_SECONDS = 30.0

ATTACH_AT_ONCE = 8
_attaching = threading.BoundedSemaphore(ATTACH_AT_ONCE)
"""For the whole process: a triggerer that is restarted gets hundreds of deferred tasks at once. Each attachment takes
processor time and the ledger, so all together would take so long that each of them fails.
"""


class _Gone(Exception):
    """A new attachment says that the pool is gone. An attachment that breaks does not: its scheduler may be busy."""

    def __init__(self, error: sky.NodeLost) -> None:
        super().__init__(str(error))
        self.error = error


class CallFollower:
    """The trigger's side of one pool. `cursors` are the numbers of the lines of each call that were returned."""

    def __init__(
        self,
        pool_id: str,
        call_ids: Sequence[str],
        cursors: Sequence[int],
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._pool_id = pool_id
        self._clock = clock
        self._heard_at = clock()
        """When the pool has answered last, or this object was made."""
        self._call_ids = tuple(call_ids)
        self.cursors = list(cursors)
        self.last_warning = ""
        """Why the money of the pool ends just now; "" while it does not."""
        self._narrator = sky.Narrator()
        self._records: queue.SimpleQueue[tuple[int, str]] = queue.SimpleQueue()
        """What the pool says of calls that wait, with levels, from its own thread."""
        self._following: dict[int, sky.DetachedCall[object]] = {}
        """The calls that have not ended, by their number; only `look` uses it."""
        self._ended: set[int] = set()
        self._changing = threading.Lock()
        """Guards the next two fields."""
        self._pool: sky.ComputePool | None = None
        self._is_left = False

    def look(self) -> tuple[list[tuple[int, str]], bool]:
        """Return the new lines with their levels, and whether all calls have ended.

        Raises NodeLost, LeaseLost, BadRequest, CredentialsError: then the pool or its calls cannot be followed any
        more. While nodes, scheduler or ledger do not answer there is nothing new, but not for longer than a lease.
        """
        lines = list[tuple[int, str]]()
        try:
            if not self._attach():
                return [], False
            for number, call in list(self._following.items()):
                news = call.follow(self.cursors[number])
                lines.extend(lines_for_log(news))
                self.cursors[number] = news.cursor
                if news.has_ended:
                    self._ended.add(number)
                    del self._following[number]
            while not self._records.empty():
                lines.append(self._records.get())
            self._heard_at = self._clock()
        except _Gone as gone:
            raise gone.error from gone.error.__cause__
        except (sky.Unreachable, sky.LedgerError, sky.NodeLost, sky.PoolClosed) as error:
            # an outage, or a cut: the next attachment finds out whether the pool lives
            self._detach()
            self._refuse_long(error)
        except sky.SkywardError:
            raise
        except Exception as error:  # such as too many threads or files: it says nothing of the pool
            _log.warning("a look at the pool %s has failed; it is looked at again", self._pool_id, exc_info=error)
            self._detach()
            self._refuse_long(error)
        return lines, len(self._ended) == len(self._call_ids)

    def _refuse_long(self, error: Exception) -> None:
        """Raise NodeLost if the nodes may have ended by now, because no process has renewed their lease."""
        away = self._clock() - self._heard_at
        if away > LEASE_SECONDS:
            raise sky.NodeLost(
                f"the pool could not be reached for {away:.0f} s, and its lease may have run out"
            ) from error

    @property
    def is_attached(self) -> bool:
        """Whether there is a connection to the pool."""
        return self._pool is not None

    def leave(self) -> None:
        """Close the connection, and make none any more; the pool goes on. Idempotent."""
        with self._changing:
            self._is_left = True
        self._detach()

    def _attach(self) -> bool:
        """Be attached; return whether that is so. Raises _Gone if there is nothing to attach to."""
        if self._pool is not None:
            return True
        with _attaching:
            if self._is_left:
                return False
            try:
                pool = sky.ComputePool.attach(
                    self._pool_id,
                    retries=0,
                    lease_seconds=LEASE_SECONDS,
                    timeout_seconds=ATTACH_SECONDS,
                    pays=True,
                    on_event=self._receive,
                )
            except sky.NodeLost as error:
                raise _Gone(error) from error
        try:
            self._following = {
                number: pool.detached_call(call_id)
                for number, call_id in enumerate(self._call_ids)
                if number not in self._ended
            }
        except BaseException:
            pool.close()
            raise
        with self._changing:
            if not self._is_left:
                self._pool = pool
                return True
        pool.close()
        return False

    def _detach(self) -> bool:
        """Close the connection; return whether there was one."""
        with self._changing:
            pool, self._pool = self._pool, None
        if pool is None:
            return False
        with contextlib.suppress(sky.SkywardError):
            pool.close()
        return True

    def _receive(self, event: sky.SkywardEvent) -> None:
        if isinstance(event, sky.BudgetWarning):
            self.last_warning = event.reason
        elif isinstance(event, sky.CallsWaiting) and (record := self._narrator.tell(event)):
            self._records.put(record)
