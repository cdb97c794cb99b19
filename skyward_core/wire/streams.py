"""Dask's batched streams, changed so that messages of calls go out at once.

A message costs each side about 0.2 ms, mostly in the kernel. Dask exchanges eight messages for a task; a call waits for
four of them. The others are sent together with the next message.
"""

from __future__ import annotations

from collections import UserDict
from collections.abc import Mapping
from typing import Any

from distributed.batched import BatchedSend  # noqa: TID253 - with calls.py, node.py and cluster.py owns Dask
from distributed.protocol.pickle import dumps as dump_type  # noqa: TID253

from skyward_core.wire.messages import Outcome
from skyward_core.wire.protocol import ACKNOWLEDGE

CAN_WAIT_SECONDS = 0.05
_CAN_WAIT = {"free-keys", "release-worker-data", "client-releases-keys", ACKNOWLEDGE}


class ReportedOutcomes(UserDict[str, Outcome]):
    """The outcomes of a batch whose reports were sent already, so they are not urgent. Not a dict: Dask measures those.

    `node` and `instance_id` are of the node that ran it.
    """

    def __init__(self, outcomes: Mapping[str, Outcome], node: int, instance_id: str) -> None:
        super().__init__(outcomes)
        self.node = node
        self.instance_id = instance_id


_REPORTED_OUTCOMES = dump_type(ReportedOutcomes)


class PromptStream(BatchedSend):
    """Sends at once, except what no call waits for: that goes with the next message, or after CAN_WAIT_SECONDS.

    The order does not change.
    """

    _is_due = False

    @property
    def next_deadline(self) -> None:
        """None: otherwise Dask would start a timer after each message."""

    @next_deadline.setter
    def next_deadline(self, _: float | None) -> None:
        pass

    def send(self, *msgs: Any) -> None:
        """Send messages, after those that wait. Raises CommClosedError."""
        if self.closed() or not all(map(_can_wait, msgs)):
            super().send(*msgs)
            return
        self.buffer.extend(msgs)
        if not self._is_due:
            self._is_due = True
            self.loop.call_later(CAN_WAIT_SECONDS, self._wake)

    def _wake(self) -> None:
        self._is_due = False
        self.waker.set()


def send_at_once(stream: Any) -> None:
    """Make one of Dask's streams a `PromptStream`."""
    stream.__class__ = PromptStream
    if stream.comm is not None:
        # otherwise Dask measures each message, which costs as much as sending it
        stream.comm.allow_offload = False


def _can_wait(message: dict[str, Any]) -> bool:
    return message["op"] in _CAN_WAIT or (
        message["op"] == "key-in-memory" and message.get("type") == _REPORTED_OUTCOMES
    )
