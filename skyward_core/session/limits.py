"""The limits of one session: money, lifetime and idle time. A pool that exceeds one of them ends itself.

`OpeningLimits` checks them while the pool opens, in the thread "skyward-opening". `Limits` checks them while it is
open, in the clock's thread. Each is used by one thread only, and has no lock.
"""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Callable
from typing import TYPE_CHECKING

from skyward_core.errors import BudgetExceeded, SkywardError
from skyward_core.events.events import BudgetWarning, SkywardEvent
from skyward_core.ledger.budgets import Fill, SpendingLimit
from skyward_core.ledger.metering import Meter
from skyward_core.session.clock import Stop
from skyward_core.session.renewal import Renewal
from skyward_core.spec import PoolSpec
from skyward_core.transport.transport import Transports

if TYPE_CHECKING:
    from skyward_core.engine.cluster import Cluster

ASK_SECONDS = 5.0


class OpeningLimits:
    """Checks the money and the lease while machines start, which may take half an hour.

    `end` ends the thread, and waits for it.
    """

    def __init__(
        self,
        spending_limit: SpendingLimit,
        renewal: Renewal,
        give_up: Callable[[SkywardError], None],
        log: Callable[..., object],
    ) -> None:
        self._spending_limit = spending_limit
        self._renewal = renewal
        self._give_up = give_up
        self._log = log
        self._ended = threading.Event()
        self._thread = threading.Thread(target=self._run, name="skyward-opening", daemon=True)

    def start(self) -> None:
        """Start the thread."""
        self._thread.start()

    def end(self) -> None:
        """Stop checking. May be called twice."""
        self._ended.set()
        self._thread.join()

    def _run(self) -> None:
        while not self._ended.wait(self._renewal.beat_seconds):
            try:
                fill, reason = self._spending_limit.check()
            except Exception as error:  # any error ends the pool, because no other thread checks the money
                self._log(
                    logging.ERROR,
                    "the money of a pool that opens could not be checked; it is checked again in a moment",
                    error=error,
                )
                continue
            if self._renewal.lost is not None:
                self._give_up(self._renewal.lost)
            elif fill >= Fill.USED_UP:
                self._give_up(
                    BudgetExceeded(f"{reason} before the pool was open: its machines end", self._spending_limit.account)
                )
            else:
                continue
            return


class Limits:
    """Warns, drains or stops an open pool. Times are of `time.monotonic`, in seconds."""

    def __init__(
        self,
        spec: PoolSpec,
        cluster: Cluster,
        transports: Transports,
        spending_limit: SpendingLimit,
        meter: Meter,
        *,
        emit: Callable[[SkywardEvent], object],
        stop: Stop,
        log: Callable[..., object],
        began: float,
        busy_at: float = 0.0,
    ) -> None:
        self._spec = spec
        self._cluster = cluster
        self._transports = transports
        self._spending_limit = spending_limit
        self._meter = meter
        self._emit = emit
        self._stop = stop
        self._log = log
        self._began = began
        self._fill = Fill.FULL
        self._sent_at = time.monotonic()
        self._is_busy = False
        self._busy_at = busy_at
        """When there was last work of another client."""

    @property
    def is_busy(self) -> bool:
        """Whether any call of any client ran or waited when that was last looked at."""
        return self._is_busy

    def check_money(self) -> None:
        """Warn, refuse new calls, or end the pool, depending on the money that is left."""
        fill, reason = self._spending_limit.check()
        account = self._spending_limit.account
        before, self._fill = self._fill, fill
        if fill >= Fill.WARNED > before:
            self._emit(BudgetWarning(float(self._meter.total()), self._spec.max_cost, account or None, reason))
        if fill >= Fill.USED_UP:
            error = BudgetExceeded(f"{reason}: the pool has closed", account)
            self._log(logging.WARNING, "%s", error)
            self._stop(str(error), error)
        elif fill >= Fill.DRAINED:
            self._cluster.drain(BudgetExceeded(f"{reason}: running calls may end, and no others begin", account))
        elif before >= Fill.DRAINED:
            self._cluster.drain(None)

    def check_work(self) -> None:
        """Send the nodes whether there are calls; end the pool if it is too old, or was idle for too long.

        `busy_at` is read after `is_idle`: only the cluster writes it, when work comes, and when the last call has
        ended, before it is idle.
        """
        now = time.monotonic()
        max_lifetime, timeout = self._spec.max_lifetime, self._spec.timeout
        if now - self._sent_at >= ASK_SECONDS or self._cluster.is_idle == self._is_busy:
            self._sent_at, self._is_busy = now, self._cluster.has_work()
            self._transports.is_busy = self._is_busy
        if max_lifetime is not None and now - self._began > max_lifetime:
            self._log(logging.WARNING, "the pool has lived for %.0f s (max_lifetime) and ends itself", max_lifetime)
            self._stop(
                f"the pool has lived for {max_lifetime:.0f} s (ComputePool(max_lifetime=...)) and has ended itself",
                None,
            )
        elif self._is_busy:
            self._busy_at = now
        elif now - max(self._busy_at, self._cluster.busy_at) > timeout:
            self._log(logging.WARNING, "the pool was idle for %.0f s (timeout) and ends itself", timeout)
            self._stop(f"the pool was idle for {timeout:.0f} s (ComputePool(timeout=...)) and has ended itself", None)
