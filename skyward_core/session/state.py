"""The states of one session and their changes: pure, without machines, ledger or nodes.

    new ── start ──> open ────────── stop ──────────> stopped ──> released ──> written down
     │                │ ^                             (by `release`, which is called again where it has failed)
     └─ all undone    │ └──── an error, or a request to stop: nodes and budget are as before; then the request is met
                      └─ detach ──> detaching ──> leaving ──> detached
                         (the nodes get a lease)   (the ledger is written: from here on no request to stop the pool has
                         an effect)

Two threads may want to end a pool in different ways: one to stop it, one to detach it. The first one wins.
"""

from __future__ import annotations

import threading
from enum import Enum, auto

from skyward_core.errors import PoolClosed, SkywardError

JOIN_SECONDS = 10.0
"""How long `stop` waits for another thread that is stopping the pool.

The wait has a limit, because that thread may wait for a callback that runs in this one.
"""


class SessionState(Enum):
    """The state of a session; `Claims.is_released` and `Claims.is_written_down` have the states after `STOPPED`."""

    NEW = auto()
    OPEN = auto()
    DETACHING = auto()
    """Still open: the nodes get the lease by which they live.

    A request to stop the pool has an effect until the ledger is written.
    """
    LEAVING = auto()
    """Still open: the ledger is being written.

    If that succeeds the pool is detached, and requests that came meanwhile have no effect.
    """
    DETACHED = auto()
    STOPPED = auto()
    """By `stop`, which may still be running."""


class Claims:
    """The state of a session, and the claims to stop or to detach it.

    It owns one lock, which guards the changes. Only these fields are used under it, so it has no order with other
    locks.
    """

    def __init__(self) -> None:
        self.state = SessionState.NEW
        self.why_ended: SkywardError | None = None
        """The error by which the pool has ended itself, if it has: its calls raise it from then on."""
        self.is_to_end = False
        """Whether `terminate_now` was called."""
        self.is_released = False
        """Whether the machines are gone, or go on running by their lease."""
        self.is_written_down = False
        """Whether the ledger has the end of the pool, or another process writes it."""
        self._changing = threading.RLock()
        """Re-entrant: any thread that collects a forgotten pool stops it."""
        self._detacher = 0
        """The thread that detaches the pool."""
        self._stopper = 0
        """The thread that stops the pool."""
        self._stop_request: tuple[str, SkywardError | None] | None = None
        """A request to stop the pool that came while it was being detached."""
        self._is_over = threading.Event()
        self._is_over.set()
        """Cleared while a thread stops the pool."""

    @property
    def is_running(self) -> bool:
        """Whether calls can be made."""
        return self.state in (SessionState.OPEN, SessionState.DETACHING, SessionState.LEAVING)

    # ── stop ─────────────────────────────────────────────────────────────────────────────────────────────────────────

    def claim_stop(self, reason: str, error: SkywardError | None) -> bool:
        """Begin to stop; return whether this thread has to do it. It calls `end_stop` afterwards.

        If another thread stops the pool, wait for it. If another thread detaches the pool, leave the request to that
        thread, as long as it can still act on it.
        """
        with self._changing:
            # An interrupt may have cut off the detaching in this thread: then the pool is open.
            is_cut_off = (
                self.state in (SessionState.DETACHING, SessionState.LEAVING) and self._detacher == threading.get_ident()
            )
            is_ours = is_cut_off or self.state is SessionState.OPEN
            if is_ours:
                self.state = SessionState.STOPPED
                self._is_over.clear()
                self._stopper = threading.get_ident()
                self.why_ended = error
            elif self.state is SessionState.DETACHING:
                self._stop_request = self._stop_request or (reason, error)
        if not is_ours and not self.is_running and self._stopper != threading.get_ident():
            self._is_over.wait(JOIN_SECONDS)
        return is_ours

    def end_stop(self) -> None:
        """The pool is stopped: wake the threads that wait for it."""
        self._is_over.set()

    # ── detach ───────────────────────────────────────────────────────────────────────────────────────────────────────

    def claim_detach(self) -> None:
        """Begin to detach. Raises the error that has ended the pool, if another thread was faster."""
        with self._changing:
            is_ours = self.state is SessionState.OPEN
            if is_ours:
                self.state, self._detacher, self._stop_request = SessionState.DETACHING, threading.get_ident(), None
        if not is_ours:
            self._is_over.wait(JOIN_SECONDS)  # then the machines are gone
            if self.why_ended is not None:
                raise type(self.why_ended)(*self.why_ended.args)
            raise PoolClosed("the pool has ended, or is being detached: there is nothing to detach")

    def begin_to_leave(self) -> None:
        """Take the step after which no thread can stop the pool any more, unless the ledger refuses.

        Raises the error of an earlier request to stop.
        """
        with self._changing:
            request = self._stop_request
            if request is None and self.is_to_end:
                request = "terminate_now() was called while the pool was detached: its machines are ended", None
            if request is None and self.state is SessionState.DETACHING:
                self.state = SessionState.LEAVING
                return
        reason, error = request or ("the pool was closed while it was detached", None)
        raise error or PoolClosed(reason)

    def note_detached(self) -> None:
        """The pool is detached."""
        with self._changing:
            if self.state is not SessionState.LEAVING:  # a signal handler has closed the pool
                raise PoolClosed("the pool was closed while it was detached")
            self.state = SessionState.DETACHED
            self.is_released = self.is_written_down = True

    def go_on(self) -> tuple[str, SkywardError | None] | None:
        """The pool was not detached and is open as before.

        Returns the request to stop it that came meanwhile, if there was one.
        """
        with self._changing:
            if (
                self.state not in (SessionState.DETACHING, SessionState.LEAVING)
                or self._detacher != threading.get_ident()
            ):
                return None
            self.state = SessionState.OPEN
            request, self._stop_request = self._stop_request, None
        return request
