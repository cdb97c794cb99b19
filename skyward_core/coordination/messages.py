"""Requests about the shared objects of a pool, their answers, and the frames in which both travel on a Unix socket.

A value is bytes here: only the process that has put it, and the one that gets it, know its pickle.
"""

from __future__ import annotations

import json
import struct
from enum import StrEnum
from typing import Any, NamedTuple

VALUE_BYTES = 64 << 10
"""The largest value of a queue or a variable, pickled."""
TOTAL_BYTES = 64 << 20
"""All values of a pool together: the scheduler has them in memory."""
NAME_CHARACTERS = 200
LONGEST_SECONDS = 1e8
MOST = 1 << 53
"""The greatest number in a request."""
HEADER_BYTES = 4096
"""The longest header of a frame: a name may have six bytes for each character in JSON."""
_SIZES = struct.Struct(">II")


class Kind(StrEnum):
    """What an object is. Objects of different kinds may have the same name. A lock is a semaphore."""

    LOCK = "lock"
    SEMAPHORE = "semaphore"
    EVENT = "event"
    QUEUE = "queue"
    VARIABLE = "variable"


class Status(StrEnum):
    """How a request has ended."""

    DONE = "done"
    LATE = "late"  # its time is up
    REFUSED = "refused"  # the answer's text says why
    LOST = "lost"  # a lease is released that is not held any more


class Request(NamedTuple):
    """A request of one holder, with the number that it has given it.

    `limit` is the maximum of a semaphore or a queue, `target` the number of an earlier request, for "release" and
    "withdraw". `seconds`: how long it may wait; None: any time.
    """

    number: int
    kind: str
    name: str
    action: str
    value: bytes = b""
    limit: int = 0
    target: int = 0
    seconds: float | None = None


class Answer(NamedTuple):
    """The answer to the request of this number. `amount` is how many leases or items there are, or 1 for true."""

    number: int
    status: str
    value: bytes = b""
    amount: int = 0
    text: str = ""


def frame_of(message: Request | Answer | str) -> bytes:
    """Return a message as it is sent: two sizes, a header of JSON, and the value.

    A text is the first message of a connection: the id of its call.
    """
    value = b"" if isinstance(message, str) else message.value
    fields = message if isinstance(message, str) else ["" if isinstance(one, bytes) else one for one in message]
    header = json.dumps(fields).encode()
    return _SIZES.pack(len(header), len(value)) + header + value


class Frames:
    """Takes what arrives on a connection, in any pieces, and returns whole messages."""

    def __init__(self) -> None:
        self._received = bytearray()

    def add(self, data: bytes) -> None:
        """Take what has arrived."""
        self._received += data

    def next(self) -> tuple[Any, bytes] | None:
        """Return the fields and the value of the next message; None until it is whole. Raises ValueError."""
        if len(self._received) < _SIZES.size:
            return None
        header_bytes, value_bytes = _SIZES.unpack_from(self._received)
        if header_bytes > HEADER_BYTES or value_bytes > VALUE_BYTES:
            raise ValueError("a message is too long")
        end = _SIZES.size + header_bytes + value_bytes
        if len(self._received) < end:
            return None
        value = bytes(self._received[end - value_bytes : end])
        header = bytes(self._received[_SIZES.size : end - value_bytes])
        del self._received[:end]
        try:
            return json.loads(header), value
        except RecursionError as error:
            raise ValueError("a message is too deep") from error


def request_of(fields: Any, value: bytes) -> Request:
    """Return the request in a message. Raises ValueError for anything else, and for what Dask cannot send."""
    match fields:
        case [
            int(number),
            str(kind),
            str(name),
            str(action),
            _,
            int(limit),
            int(target),
            None | int() | float() as wait,
        ]:
            is_sound = kind in Kind and is_name(name) and action.isidentifier() and 0 <= (wait or 0) <= LONGEST_SECONDS
            if is_sound and all(0 <= one <= MOST for one in (number, limit, target)):
                return Request(number, kind, name, action, value, limit, target, wait)
        case _:
            pass
    raise ValueError("no request")


def is_name(name: object) -> bool:
    """Return whether an object can have this name: it has characters, not too many, and all of them can be encoded."""
    try:
        return isinstance(name, str) and 0 < len(name) <= NAME_CHARACTERS and bool(name.encode())
    except UnicodeEncodeError:
        return False


def answer_of(fields: Any, value: bytes) -> Answer:
    """Return the answer in a message. Raises ValueError for anything else."""
    match fields:
        case [int(), str(), _, int(), str()]:
            return Answer(*fields)._replace(value=value)
        case _:
            raise ValueError("no answer")


def fields_of(message: Request | Answer) -> list[Any]:
    """Return the fields of a message for a stream of Dask's, which takes no enumerations."""
    return [str(field) if isinstance(field, str) else field for field in message]
