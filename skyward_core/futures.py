"""What a pool hands out for a call that it has taken over."""

from __future__ import annotations

from collections.abc import Callable
from concurrent.futures import Future


class CallFuture[R](Future[R]):
    """A call that was handed over. As any `concurrent.futures.Future`, but `cancel()` also stops a call that is running."""

    def __init__(self, call_id: str, stop: Callable[[str], None]) -> None:
        super().__init__()
        self.call_id = call_id
        self.seconds: float | None = None
        """For how long it ran on its node, the last time if it ran again; None before its end, and where that is not known: it was lost, or cancelled here."""
        self.cost: float | None = None
        """Its share of the bill, in USD: the price of its slot for that time. None where `seconds` is, and in a pool that somebody else pays for."""
        self._stop = stop

    def cancel(self) -> bool:
        """Stop the call, or do not begin it; False if it has ended already. One that is on its way may begin and is stopped then."""
        if not super().cancel():
            return False
        self._stop(self.call_id)
        return True
