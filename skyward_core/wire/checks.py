"""Checks of what comes from a node: its type and its bounds. Whatever fails is `Unreadable`.

Any call can take the pool's certificate from its node, and send what it likes. So each value from a node is data of a
known form, which is checked here before anything is decided by it. Nothing here imports, calls or creates what a
message names.
"""

from __future__ import annotations

import logging
import math
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NoReturn, cast

import msgpack

_log = logging.getLogger("skyward")
MOST_BYTES = 256 << 20
"""The largest message. One report has at most one batch of calls, with inline values, or the output of some ms."""
MOST_ITEMS = 1 << 20
"""Of one list: a worker reads at most so many lines of output at once."""
MOST_NAME = 1024
"""Characters of an id, an address, a path or a name. An id of a user has 128 at most."""
MOST_TEXT = 8 << 20
"""Characters of a text that people read: stacks, an error."""
MOST_RANK = 1_000_000
MOST_SENDERS = 1000
MOST_COUNT = 1 << 53
"""The largest count: up to it a float has each whole number."""
MOST_SECONDS = 1e10
"""The largest time, in seconds: 300 years, also since 1970."""


class Unreadable(ValueError):
    """A message of a node is not of the form that it must have. The text says which part, without its content."""


class UnreadableMessages:
    """Counts the messages that could not be read, by who has sent them, as far as that is known.

    It logs the first of each sender, and the number at each tenfold and at the end: a hostile node can send thousands
    in a second. One thread uses it.
    """

    def __init__(self, whose: str) -> None:
        """`whose`: the pool, in words."""
        self._whose = whose
        self.counts: dict[str, int] = {}

    def note(self, sender: str, error: Unreadable) -> None:
        """Count one."""
        sender = sender if sender in self.counts or len(self.counts) < MOST_SENDERS else "others"
        self.counts[sender] = number = self.counts.get(sender, 0) + 1
        if number == 1:
            _log.warning(
                "%s of %s sends messages that cannot be read, and they are dropped (the first: %s). It lies, or runs"
                " another release of skyward_core",
                sender,
                self._whose,
                error,
            )
        elif number == 10 ** (len(str(number)) - 1):
            _log.warning("%s of %s: %d messages so far that cannot be read", sender, self._whose, number)

    def end(self) -> None:
        """Log how many there were in all, and forget them."""
        for sender, number in self.counts.items():
            _log.warning("%s of %s: %d messages in all that could not be read", sender, self._whose, number)
        self.counts.clear()


def refuse(what: str, value: object) -> NoReturn:
    """Raise Unreadable for a part of a message."""
    raise Unreadable(f"{what} is not readable ({type(value).__name__})")


def packed(content: object) -> bytes:
    """Return data (texts, numbers, bytes, and tuples of them) as one message."""
    return cast(bytes, msgpack.packb(content, unicode_errors="surrogatepass"))


def unpacked(message: object) -> Any:
    """Return the data of a message: texts, numbers, bytes, and tuples of them. Raises Unreadable."""
    if not isinstance(message, bytes | bytearray | memoryview) or memoryview(message).nbytes > MOST_BYTES:
        refuse("a message", message)
    try:
        return msgpack.unpackb(
            message,
            use_list=False,
            unicode_errors="surrogatepass",
            object_pairs_hook=_refuse_map,
            ext_hook=_refuse_type,
            max_array_len=MOST_ITEMS,
        )
    except (ValueError, TypeError, OverflowError, msgpack.exceptions.UnpackException) as error:
        raise Unreadable(f"a message is not readable: {type(error).__name__}") from error


def _refuse_map(_: object) -> NoReturn:
    raise Unreadable("a message has a map")


def _refuse_type(_: int, __: bytes) -> NoReturn:
    raise Unreadable("a message has a value of another type")


# Each returns its value. `what` names the part in the error.


def text(what: str, value: object, most: int = MOST_NAME) -> str:
    """Return a text of at most so many characters."""
    return value if type(value) is str and len(value) <= most else refuse(what, value)


def count(what: str, value: object, most: int = MOST_COUNT, least: int = 0) -> int:
    """Return a whole number within bounds."""
    return value if type(value) is int and least <= value <= most else refuse(what, value)


def finite(what: str, value: object, most: float = math.inf, least: float = -math.inf) -> float:
    """Return a number within bounds as a float. NaN and infinity are none."""
    if type(value) not in (int, float) or not least <= cast(float, value) <= most:
        refuse(what, value)
    try:
        number = float(cast(float, value))
    except OverflowError:
        refuse(what, value)
    return number if math.isfinite(number) else refuse(what, value)


def seconds(what: str, value: object) -> float:
    """Return a time or a duration in seconds, 0 or more."""
    return finite(what, value, MOST_SECONDS, 0.0)


def truth(what: str, value: object) -> bool:
    """Return a bool."""
    return value if type(value) is bool else refuse(what, value)


def maybe[T](check: Callable[[str, object], T], what: str, value: object) -> T | None:
    """Return None, or what this check returns."""
    return None if value is None else check(what, value)


def items(what: str, value: object, most: int = MOST_ITEMS) -> Sequence[Any]:
    """Return a list or tuple of at most so many items, which are not checked."""
    return value if isinstance(value, list | tuple) and len(value) <= most else refuse(what, value)


def texts(what: str, value: object, most: int = MOST_NAME) -> tuple[str, ...]:
    """Return a list of texts as a tuple."""
    return tuple([text(what, item, most) for item in items(what, value)])


def fields(what: str, value: object, number: int) -> Sequence[Any]:
    """Return a list of exactly so many items."""
    return found if len(found := items(what, value)) == number else refuse(what, value)


def mapping(what: str, value: object, most: int = MOST_ITEMS) -> Mapping[str, Any]:
    """Return a mapping from texts, whose values are not checked."""
    if not isinstance(value, Mapping) or len(value) > most:
        refuse(what, value)
    if not all(type(key) is str and len(key) <= MOST_NAME for key in value):
        refuse(what, value)
    return cast("Mapping[str, Any]", value)


def texts_by_name(what: str, value: object, most: int = MOST_NAME) -> Mapping[str, str]:
    """Return a mapping from texts to texts."""
    return {name: text(what, item, most) for name, item in mapping(what, value).items()}


def worker_name(what: str, value: object) -> str:
    """Return the name of a worker, RANK-INDEX."""
    rank, _, index = text(what, value, 32).partition("-")
    if not (rank.isascii() and rank.isdecimal() and index.isascii() and index.isdecimal() and int(rank) <= MOST_RANK):
        refuse(what, value)
    return cast(str, value)
