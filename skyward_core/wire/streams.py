"""Dask's batched streams, changed so that messages of calls go out at once.

A message costs each side about 0.2 ms, mostly in the kernel. Dask exchanges eight messages for a task; a call waits for
four of them. The others are sent together with the next message.
"""

from __future__ import annotations

import pickle
from collections import UserDict
from collections.abc import Mapping, Sequence
from typing import Any

from distributed.batched import BatchedSend  # noqa: TID253 - with calls.py, node.py and cluster.py owns Dask
from distributed.protocol.pickle import dumps as dump_type  # noqa: TID253

from skyward_core.wire.messages import Outcome, Report
from skyward_core.wire.protocol import ACKNOWLEDGE
from skyward_core.wire.reports import decode_report, encode_report

CAN_WAIT_SECONDS = 0.05
_CAN_WAIT = {"free-keys", "release-worker-data", "client-releases-keys", ACKNOWLEDGE}


class ReportedOutcomes(UserDict[str, Outcome]):
    """The outcomes of a batch whose reports were sent already, so they are not urgent. Not a dict: Dask measures those.

    `node` and `instance_id` are of the node that ran it. For a client they are a message in the form of a report, which
    Dask's pickle has out of band (`read_outcomes`).
    """

    def __init__(self, outcomes: Mapping[str, Outcome], node: int, instance_id: str) -> None:
        super().__init__(outcomes)
        self.node = node
        self.instance_id = instance_id

    def __reduce_ex__(self, protocol: Any) -> tuple[Any, ...]:
        message = encode_report(Report(self.node, self.instance_id, tuple(self.values())))
        return _outcomes_of, (pickle.PickleBuffer(message) if protocol >= 5 else message,)


def _outcomes_of(message: Any) -> ReportedOutcomes:
    report = decode_report(message)
    outcomes = {item.call_id: item for item in report.news if isinstance(item, Outcome)}
    return ReportedOutcomes(outcomes, report.node, report.instance_id)


def read_outcomes(frames: Sequence[bytes | bytearray | memoryview]) -> Report:
    """Return the outcomes from the frames that Dask has made of `ReportedOutcomes`, without the first one, a pickle.

    Raises Unreadable.
    """
    return decode_report(b"".join(frames[1:]))


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
