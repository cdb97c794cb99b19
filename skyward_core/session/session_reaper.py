"""The reaper of one session, as this process sees it: starts before anything is rented, gets a message when the pool
ends, starts again if it was killed.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Sequence

from skyward_core.cleanup.reaper import Reaper, ReaperInput
from skyward_core.errors import NotPicklable
from skyward_core.providers.base import Provider


class SessionReaper:
    """Owns the connection to the reaper. There is no reaper if the provider cannot travel to another process."""

    def __init__(self, pool_id: str, log: Callable[..., object]) -> None:
        self._pool_id = pool_id
        self._log = log
        self._reaper: Reaper | None = None
        self._input: ReaperInput | None = None
        self.has_detached = False
        """Whether a call was started detached: then the pool lives by its lease, and a restarted reaper gets that
        message.
        """

    @property
    def reaper(self) -> Reaper | None:
        """The present reaper."""
        return self._reaper

    def start(self, providers: Sequence[Provider], ledger_url: str) -> None:
        """Start the reaper, or log why there is none."""
        try:
            self._input = ReaperInput.of(providers, self._pool_id, ledger_url)
            self._reaper = Reaper.start(self._input)
        except NotPicklable as error:
            words = (
                "the pool has no reaper, because its provider cannot be pickled (%s): after a kill, `skyward"
                " sweep` ends it"
            )
            self._log(logging.WARNING, words, error)

    def restart_if_gone(self, is_running: Callable[[], bool]) -> None:
        """Start another reaper if this one was killed and the pool is open.

        In this order: a pool that is stopped releases its reaper afterwards.
        """
        if self._reaper is not None and self._input is not None and not self._reaper.is_alive and is_running():
            self._log(logging.WARNING, "the pool's reaper is gone: another one is started")
            self._reaper.leave()
            self._reaper = Reaper.start(self._input)
            if self.has_detached:
                self._reaper.live_by_lease()

    def terminate_now(self) -> bool:
        """Have the reaper end the machines. Returns False if there is no living reaper. Waits for nothing."""
        if self._reaper is None or not self._reaper.is_alive:
            return False
        self._reaper.terminate_now()
        return True

    def live_by_lease(self) -> None:
        """From now on the machines live by their lease, and not with this process."""
        if self._reaper is not None:
            self._reaper.live_by_lease()

    def leave(self) -> None:
        """The pool has ended, or was detached: the reaper has nothing to do."""
        if self._reaper is not None:
            self._reaper.leave()

    def hang_up(self) -> None:
        """Leave the pool to the reaper, as if this process were gone."""
        if self._reaper is not None:
            if self.has_detached:  # else the reaper would leave the pool to its lease
                self._reaper.terminate_now()
            self._reaper.hang_up()
