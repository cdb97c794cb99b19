"""The futures that a pool returns for calls."""

from __future__ import annotations

from _thread import LockType, RLock, allocate_lock
from collections.abc import Callable
from concurrent.futures import Future
from typing import Any


class SmallCondition(RLock):  # pyright: ignore[reportGeneralTypeIssues] - in C it is not final
    """The methods of `threading.Condition()` that a future uses, in a tenth of its 1,300 bytes: a map of 100,000 calls
    has as many futures.
    """

    __slots__ = ("_waiters",)

    def __init__(self) -> None:
        self._waiters: tuple[LockType, ...] = ()

    def wait(self, timeout: float | None = None) -> bool:
        """Release the lock until `notify_all`, and take it again; False if the time runs out before."""
        waiter = allocate_lock()
        waiter.acquire()
        self._waiters = (*self._waiters, waiter)
        is_notified = False
        me: Any = self  # typeshed does not have these methods of an RLock
        state = me._release_save()
        try:
            is_notified = waiter.acquire() if timeout is None else waiter.acquire(timeout=max(0.0, timeout))
        finally:
            me._acquire_restore(state)
            if not is_notified:  # a timeout or an exception
                self._waiters = tuple(other for other in self._waiters if other is not waiter)
        return is_notified

    def notify_all(self) -> None:
        """Wake all waiting threads."""
        waiters, self._waiters = self._waiters, ()
        for waiter in waiters:
            waiter.release()


class CallFuture[R](Future[R]):
    """The future of a submitted call. Like any `concurrent.futures.Future`, but `cancel()` also stops a call that is
    running.

    `cancel` calls `stop` with the call's id. `call_back` runs the done-callbacks; by default the thread that ends the
    future does.
    """

    def __init__(
        self, call_id: str, stop: Callable[[str], None], call_back: Callable[[Callable[[], None]], None] | None = None
    ) -> None:
        super().__init__()
        self._condition: Any = SmallCondition()
        self.call_id = call_id
        self.use = ""
        """The id of the use that pays for the call; "" for none."""
        self.seconds: float | None = None
        """How long the call ran on its node, in its last run. None before its end, and if it was lost or cancelled."""
        self.cost: float | None = None
        """Its share of the bill, in USD: the price of its slot for that time.

        None where `seconds` is, and in a pool that another client pays for.
        """
        self._stop = stop
        self._call_back = call_back

    def cancel(self) -> bool:
        """Stop the call, or do not begin it; False if it has ended already.

        A call in flight may begin, and is stopped then.
        """
        if not super().cancel():
            return False
        self._stop(self.call_id)
        return True

    def claim(self) -> bool:
        """Take the right to set the result; False if the call was cancelled before."""
        return self.running() or self.set_running_or_notify_cancel()

    def _invoke_callbacks(self) -> None:
        callbacks: list[Any] = self._done_callbacks  # type: ignore[attr-defined]
        if self._call_back is None or not callbacks:
            super()._invoke_callbacks()  # type: ignore[misc]
        else:
            self._call_back(super()._invoke_callbacks)  # type: ignore[misc]
