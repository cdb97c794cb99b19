"""The state of the connection to the scheduler: its epoch, the messages that were heard and acknowledged, and
unanswered pings.

States; each connection has a number, its epoch:

    none ──connected──▶ asking ──resumed──▶ live ──three pings unanswered, or closed──▶ cut
     ▲                    │ └──the same──────┼──────────────────────────────────────────▶│
     └──disconnected──────┴──────────────────┴───────────────────────────────────────────┘

Calls go out only while the connection is live. The dispatcher drops messages of other epochs: the scheduler keeps them
and sends them again to the connection that resumes the topic, or they are lost with their scheduler.
"""

from __future__ import annotations

import math
from collections.abc import Callable

from skyward_core.engine import actions as do

PING_SECONDS = 4.0
PINGS = 3  # unanswered in a row
ACKNOWLEDGED_TOGETHER = 1000


class ConnectionState:
    """The state of the present connection. `act` takes the actions."""

    def __init__(self, act: Callable[[do.Action], object]) -> None:
        self.epoch = 0
        self.is_connected = False
        """From `connected` until the connection is known to be cut."""
        self.is_live = False
        self.heard = 0
        """The number of the last message of the topic."""
        self._do = act
        self._acknowledged = 0
        self._unanswered = 0
        self._is_pinging = False
        self._pinged_at = -math.inf

    def connected(self, now: float) -> int:
        """There is a connection: return its epoch."""
        self.epoch += 1
        self.is_connected = True
        self._unanswered, self._is_pinging, self._pinged_at = 0, False, now
        return self.epoch

    def disconnected(self) -> None:
        """There is no connection."""
        self.is_connected = self.is_live = False

    def resumed(self, epoch: int, number: int) -> bool:
        """The scheduler has answered, and sends the messages after this number.

        False: it has answered another connection, or answers too late.
        """
        if epoch != self.epoch or not self.is_connected:
            return False
        self.is_live, self.heard = True, number
        return True

    def is_live_in(self, epoch: int) -> bool:
        """Return whether the present connection has this epoch and is live."""
        return self.is_live and epoch == self.epoch

    def hear(self, epoch: int) -> bool:
        """Count the next message of the topic. False: it is of another connection, or the connection is not live."""
        if not self.is_live_in(epoch):
            return False
        self.heard += 1
        return True

    def acknowledge_many(self) -> None:
        """Acknowledge the messages once there are many."""
        if self.heard - self._acknowledged > ACKNOWLEDGED_TOGETHER:
            self._acknowledge()

    def pinged(self, epoch: int, *, is_answered: bool) -> None:
        """The scheduler has answered a ping, or has not.

        Misses are counted, not timed: a busy program misses one answer, not several in a row.
        """
        if epoch == self.epoch:
            self._is_pinging = False
            self._unanswered = 0 if is_answered else self._unanswered + 1
            if self._unanswered >= PINGS:
                self.cut(epoch)

    def cut(self, epoch: int) -> None:
        """The connection is closed, or the scheduler does not answer any more."""
        if epoch == self.epoch and self.is_connected:
            self.is_connected = self.is_live = False
            self._do(do.CutOff())

    def tick(self, now: float) -> None:
        """Acknowledge messages, and ping the scheduler."""
        if self.is_live:
            self._acknowledge()
        if self.is_connected and not self._is_pinging and now - self._pinged_at > PING_SECONDS:
            self._is_pinging, self._pinged_at = True, now
            self._do(do.Ping(self.epoch))

    def _acknowledge(self) -> None:
        if self.heard != self._acknowledged:
            self._acknowledged = self.heard
            self._do(do.Acknowledge(self.epoch, self.heard))
