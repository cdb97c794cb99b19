"""A pool's events on their way to callbacks and displays, which are called in a separate thread, "skyward-events".

    put (any thread, never waits) -> waiting -> the thread calls `deliver` -> delivered

One queue per pool, so that events are delivered one at a time and in the order in which they were put. States:

    open -> ended (by the bill, or by `close`) -> drained: all is delivered, the display is closed

A callback that blocks, or a terminal that takes nothing, delays this thread and nothing else. A thread that must not
wait for a terminal does not log either: the handlers of `logging` are locked while one of them writes. `log` puts a
record into the queue instead.

A fork of the process delivers nothing: the pool belongs to its parent.
"""

from __future__ import annotations

import contextvars
import logging
import os
import threading
import time
from collections import deque
from collections.abc import Callable
from functools import partial

from skyward_core.concurrency.threads import LoopThread
from skyward_core.events.events import (
    CallProgress,
    CallReported,
    CostFinal,
    Error,
    LogLine,
    Metrics,
    PoolLeft,
    SkywardEvent,
)

MOST_WAITING = 100_000
"""Events that may wait: beyond, log lines, metrics and progress are dropped until half of them are delivered.

All others are kept.
"""
PATIENCE_SECONDS = 5.0
"""How long `flush` waits for the callbacks with one event."""
FLUSH_SECONDS = 60.0
"""How long `flush` waits in all."""

_log = logging.getLogger("skyward")


class EventQueue:
    """The events of one pool. Safe to use from any thread, from signal handlers and from finalizers.

    `deliver` is called for each event, `at_end` after the last one: it closes the display. Both run in the context
    (`contextvars`) in which the queue was made. `log` takes the records of the pool (`console.log_of`).
    """

    def __init__(
        self,
        deliver: Callable[[SkywardEvent], object],
        at_end: Callable[[], object] = lambda: None,
        most_waiting: int = MOST_WAITING,
        log: Callable[..., object] = _log.log,
    ) -> None:
        self._deliver = deliver
        self._at_end = at_end
        self._most_waiting = most_waiting
        self._log = log
        self._context = contextvars.copy_context()
        self._process = os.getpid()
        self._lock = threading.RLock()  # re-entrant: a signal handler or a finalizer may call `put` during a `put`
        self._filled = threading.Condition(self._lock)
        self._changed = threading.Condition(self._lock)
        self._listeners: tuple[Callable[[SkywardEvent], object], ...] = ()
        self._waiting = deque[SkywardEvent | Callable[[], object]]()
        self._thread: LoopThread | None = None
        self._awaited: list[int] = []
        """The numbers of events that threads wait for."""
        self._is_hungry = False
        """Whether the thread waits for an event."""
        self._began = 0.0
        """When `deliver` was called with the event that is being delivered, by `time.monotonic`; 0 between events."""
        self._is_ended = False
        self._is_closed = False
        self._is_over = False
        """Whether the thread takes nothing more from the queue."""
        self._is_drained = False
        self._dropped = 0
        self._is_dropping = False
        self._last_progress: CallProgress | None = None
        self._escaped: BaseException | None = None
        """What a callback has raised that is no Exception, as `sys.exit` does; raised by the next `flush`."""
        self.number = 0
        """The number of the event that was put last; the first one's is 1."""
        self.delivered = 0
        """The number of the last event for which, and for all before it, the callbacks have returned."""

    # ── in ───────────────────────────────────────────────────────────────────────────────────────────────────────────

    def put(self, event: SkywardEvent) -> int:
        """Add an event to the queue without waiting; return its number, to compare with `delivered`.

        After the bill, and after the pool was left, the queue takes no more events.
        """
        if os.getpid() != self._process:
            return self.delivered
        with self._lock:
            if self._is_ended or self._is_too_much(event):
                return self.number
            if self._dropped and not self._is_dropping:
                self._deliver_what_was_dropped()
            if isinstance(event, CostFinal | PoolLeft):
                self._deliver_what_was_dropped()
                self._is_ended = True
            return self._add(event)

    def log(self, level: int, message: str, *args: object, error: BaseException | None = None) -> None:
        """Put a record for the logger "skyward" on its way, in order with the events, with the traceback of `error` if
        there is one. After the end too.
        """
        if os.getpid() != self._process:
            return
        self.in_order(lambda: self._log(level, message, *args, exc_info=error))

    def listen(self, listener: Callable[[SkywardEvent], object]) -> None:
        """Call a listener with each event from now on, after the callbacks."""
        with self._lock:
            self._listeners = (*self._listeners, listener)

    def in_order(self, call: Callable[[], object]) -> None:
        """Call something after the events so far; after the end at once."""
        with self._lock:
            if not self._is_over:
                self._add(call)
                return
        call()

    def _add(self, item: SkywardEvent | Callable[[], object]) -> int:
        self.number += 1
        self._waiting.append(item)
        if self._is_hungry:
            self._is_hungry = False
            self._filled.notify()
        elif self._thread is None:
            self._start()
        return self.number

    def _start(self) -> None:
        # before it starts: it may deliver an event at once, and `is_own_thread` must know it
        self._thread = thread = LoopThread("skyward-events", partial(self._context.run, self._run))
        # the system has no thread left, or the interpreter ends: the next event tries again, and `close` delivers what
        # waits
        if not thread.start_if_possible():
            self._thread = None

    def _is_too_much(self, event: SkywardEvent) -> bool:
        """Return whether an event is dropped, and count it then.

        The last progress is kept, so that no display stops at 99 of 100 calls, and the last report of each call.
        """
        if not isinstance(event, LogLine | Metrics | CallProgress | CallReported):
            return False
        if isinstance(event, CallReported) and event.is_last:
            return False
        limit = self._most_waiting // 2 if self._is_dropping else self._most_waiting
        self._is_dropping = len(self._waiting) >= limit
        if self._is_dropping:
            self._dropped += 1
            if isinstance(event, CallProgress):
                self._last_progress = event
        return self._is_dropping

    def _deliver_what_was_dropped(self) -> None:
        count, progress, self._dropped, self._last_progress, self._is_dropping = (
            self._dropped,
            self._last_progress,
            0,
            None,
            False,
        )
        if count:
            self._add(
                Error(
                    f"{count} log lines, metrics and progress events were dropped here: the callbacks or the display"
                    " are too slow for them"
                )
            )
        if progress is not None:
            self._add(progress)

    def close(self) -> None:
        """Take no more events; what waits is delivered, and the display is closed then.

        Waits for nothing (`flush` does). May be called twice.
        """
        if os.getpid() != self._process:
            return
        with self._lock:
            if self._is_closed:
                return
            self._deliver_what_was_dropped()
            self._is_ended = self._is_closed = True
            self._filled.notify()
            if self._thread is None:
                self._start()
        if self._thread is None:
            self._run()

    # ── out ──────────────────────────────────────────────────────────────────────────────────────────────────────────

    def _run(self) -> None:
        if self._is_drained:
            return
        while (item := self._next()) is not None:
            try:
                self._deliver_one(item)
            except Exception as error:
                _log.error("%r could not be delivered", item, exc_info=error)
            except BaseException as error:
                self._escaped = self._escaped or error
            if os.getpid() != self._process:  # a callback has forked, and this is the child
                return
        try:
            self._at_end()
        except Exception as error:
            _log.error("the display could not be closed", exc_info=error)
        finally:
            with self._lock:
                self._is_drained = True
                self._changed.notify_all()

    def _deliver_one(self, item: SkywardEvent | Callable[[], object]) -> None:
        if callable(item):
            item()
        else:
            self._deliver(item)
            for listener in self._listeners:
                listener(item)

    def _next(self) -> SkywardEvent | Callable[[], object] | None:
        """Note that the last one was delivered; return the next one, when there is one, or None at the end."""
        with self._lock:
            if self._began:
                self._began = 0.0
                self.delivered += 1
                if self._awaited and self.delivered >= min(self._awaited):
                    self._changed.notify_all()
            while not self._waiting:
                if self._dropped:
                    self._deliver_what_was_dropped()
                elif self._is_closed:
                    self._is_over = True
                    return None
                else:
                    self._is_hungry = True
                    self._filled.wait()
            self._began = time.monotonic()
            return self._waiting.popleft()

    # ── waiting for it ───────────────────────────────────────────────────────────────────────────────────────────────

    def flush(self, patience_seconds: float = PATIENCE_SECONDS, longest_seconds: float = FLUSH_SECONDS) -> bool:
        """Wait until all events so far are delivered, and after `close` until the display is closed.

        Returns False if the callbacks take too long.

        Too long is more than `patience_seconds` for one event, or `longest_seconds` for all; the rest is delivered
        when they are ready. Raises what a callback has raised to end the program, as `sys.exit` does. Called by a
        callback it does not wait.
        """
        is_delivered = self._wait(self.number, longest_seconds, patience_seconds) and (
            not self._is_closed or self._wait(None, longest_seconds, patience_seconds)
        )
        with self._lock:
            escaped, self._escaped = self._escaped, None
        if escaped is not None:
            raise escaped
        return is_delivered

    @property
    def is_own_thread(self) -> bool:
        """Whether the caller is a callback."""
        return self._thread is not None and self._thread.is_current

    def _wait(self, number: int | None, timeout: float, patience: float) -> bool:
        """Wait for an event, or, without a number, for the end of the thread."""
        if os.getpid() != self._process or self.is_own_thread:
            return False
        deadline = time.monotonic() + timeout
        with self._lock:
            while not (self._is_drained or (number is not None and self.delivered >= number)):
                until = min(deadline, self._began + patience) if self._began else deadline
                left = until - time.monotonic()
                if left <= 0 or self._thread is None:
                    return False
                self._await(number, left)
            return True

    def _await(self, number: int | None, seconds: float) -> None:
        awaited = self.number if number is None else number
        self._awaited.append(awaited)
        try:
            self._changed.wait(seconds)
        finally:
            self._awaited.remove(awaited)
