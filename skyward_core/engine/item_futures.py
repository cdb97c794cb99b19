"""`ItemFuture`: the future of a call that streams, and the items that have come and were not taken.

    engine's thread ──put_item, set_total, break_off──▶ ItemFuture ──take──▶ the consumer's thread
                    ◀───────────────────give_credit, leave─────────

Its result has no meaning; only the end of the call counts. Items that have come before the end are taken first.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple, NoReturn

from skyward_core.engine.futures import CallFuture
from skyward_core.engine.results import value_of
from skyward_core.worker.wire import Outcome, OutcomeKind, Parcel


class _Arrived(NamedTuple):
    parcel: Parcel
    node: int


class ItemFuture(CallFuture[Any]):
    """The future of one call that streams. `ahead`: how many items the node may be ahead of the consumer.

    `give_credit` lets the call yield the items below a number; `post` does something in the engine's thread.
    """

    def __init__(
        self,
        call_id: str,
        ahead: int,
        stop: Callable[[str], None],
        call_back: Callable[[Callable[[], None]], None],
        give_credit: Callable[[str, int], None],
        post: Callable[[Callable[[], None]], None],
    ) -> None:
        super().__init__(call_id, stop, call_back)
        self._ahead = self._below = ahead
        self._give_credit = give_credit
        self._post = post
        self._items: dict[int, _Arrived] = {}
        self._taken = 0
        self._total: int | None = None
        self._broken: BaseException | None = None
        self._is_over = False
        self._wake: Callable[[], object] | None = None

    # ── from the engine ──────────────────────────────────────────────────────────────────────────────────────────────

    def put_item(self, number: int, parcel: Parcel, node: int) -> None:
        """An item is here. Its memory is released when it is taken, or at once if there is no consumer any more."""
        with self._condition:
            is_wanted = not self._is_over
            if is_wanted:
                self._items[number] = _Arrived(parcel, node)
        if is_wanted:
            self._notify()
        else:
            parcel.release()

    def set_total(self, total: int) -> None:
        """The call has ended after so many items. Some may still be on their way here."""
        self._total = total

    def break_off(self, error: BaseException) -> None:
        """An item cannot come: the consumer gets this error in its place."""
        with self._condition:
            self._broken = self._broken or error
        self._notify()

    def _invoke_callbacks(self) -> None:
        self._notify()
        super()._invoke_callbacks()

    def _notify(self) -> None:
        with self._condition:
            self._condition.notify_all()
            wake, self._wake = self._wake, None
        if wake is not None:
            wake()

    # ── from the consumer ────────────────────────────────────────────────────────────────────────────────────────────

    def take(self) -> Any:
        """Return the next item; waits for it. Raises StopIteration at the end, and the call's exception."""
        with self._condition:
            while not self._is_decided:
                self._condition.wait()
            arrived = self._items.pop(self._taken, None)
            if arrived is not None:
                self._taken += 1
        if arrived is None:
            self._end()
        self._go_ahead()
        try:
            return value_of(Outcome(self.call_id, OutcomeKind.RESULT, arrived.parcel), arrived.node)
        finally:
            arrived.parcel.release()

    def is_ready(self, wake: Callable[[], object]) -> bool:
        """Return whether `take` would not wait. If it would, `wake` is called once when that changes, in any thread."""
        with self._condition:
            is_decided = self._is_decided
            self._wake = None if is_decided else wake
        return is_decided

    def leave(self) -> None:
        """Take no more items: stop the call and drop what has come. Idempotent."""
        with self._condition:
            self._is_over = True
            items, self._items = self._items, {}
        for arrived in items.values():
            arrived.parcel.release()
        self.cancel()

    def leave_later(self) -> None:
        """The same, soon and in the engine's thread."""
        self._post(self.leave)

    @property
    def _is_decided(self) -> bool:
        """Whether the next item is here, or known not to come."""
        if self._taken in self._items or self._is_over or self._broken is not None:
            return True
        return self.done() and (self._total is None or self._taken >= self._total)

    def _end(self) -> NoReturn:
        """Raise StopIteration or, once, the exception that has ended the items."""
        if self._is_over:
            raise StopIteration
        error = self._broken or (self.exception() if not self.cancelled() else None)
        self.leave()
        if error is not None:
            raise error
        raise StopIteration

    def _go_ahead(self) -> None:
        """Let the call yield more once the consumer has taken half of what the node may be ahead."""
        below = self._taken + self._ahead
        if not self.done() and below - self._below >= max(1, self._ahead // 2):
            self._below = below
            self._give_credit(self.call_id, below)
