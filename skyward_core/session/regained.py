"""The process that has rented a pool with a name becomes its steward again, after another process was the steward.

    steward ──it was silent, and another process has taken the pool──▶ client ──the pool has no steward──▶ steward again

The session itself does not become the steward again: its records of nodes and money are old, so its guard stays lost.
The new stewardship has another guard and another epoch, and a connection beside that of the session, as if it were
another process: it adopts the pool from the ledger. The calls of the session go on as those of a client.
"""

from __future__ import annotations

from collections.abc import Callable

from skyward_core.errors import SkywardError
from skyward_core.session.attached import Attached
from skyward_core.session.named_session import NamedSession
from skyward_core.session.named_use import NamedUse
from skyward_core.session.pool_size import PoolSize
from skyward_core.session.stewardship import Stewardship
from skyward_core.session.successor import Successor

type New = Callable[[Attached, Callable[[str, SkywardError | None], object]], Stewardship]


class RegainedStewardship:
    """A stewardship with an attachment beside the session. The methods are those of `Stewardship`."""

    def __init__(self, session: NamedSession, attach: Callable[[], Attached], new: New) -> None:
        """`attach` connects to the nodes of the newest lease. `new` takes the attachment, and what ends the session."""
        self._session = session
        self._attach = attach
        self._new = new
        self._attached: Attached | None = None
        self._stewardship: Stewardship | None = None

    @property
    def size(self) -> PoolSize | None:
        """The number of the pool's nodes."""
        return None if self._stewardship is None else self._stewardship.size

    def start(self) -> None:
        """Attach, then adopt the pool. After an error nothing has changed."""
        self._attached = attached = self._attach()
        try:
            self._stewardship = stewardship = self._new(attached, self._session.let_go)
            stewardship.start()
        except BaseException:
            attached.stop("the pool could not be kept")
            raise

    def keep_warm(self, seconds: float) -> float:
        """As that of the stewardship."""
        assert self._stewardship is not None
        return self._stewardship.keep_warm(seconds)

    def note_cost(self) -> None:
        """As that of the stewardship."""
        if self._stewardship is not None:
            self._stewardship.note_cost()

    def leave(self) -> None:
        """Stop keeping the pool; its machines go on."""
        assert self._stewardship is not None
        self._end(self._stewardship.leave)

    def lose(self) -> None:
        """Another process keeps the pool."""
        assert self._stewardship is not None
        self._end(self._stewardship.lose)

    def _end(self, end: Callable[[], object]) -> None:
        assert self._attached is not None
        try:
            end()
        finally:
            self._attached.stop("this process does not keep the pool any more")


def regaining(session: NamedSession, use: NamedUse, attach: Callable[[], Attached], new: New) -> Successor:
    """Return what makes this process the steward again, and makes its session that of a client when it is not."""
    successor = Successor(use, lambda: RegainedStewardship(session, attach, new), session.events.log)

    def lost() -> None:
        try:
            session.step_down()
        finally:
            successor.lose()

    use.on_lost = lost
    if session.guard.is_lost:  # since the pool was opened; its renewal has not reported that to any object yet
        session.step_down()
    return successor
