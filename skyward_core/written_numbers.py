"""Numbers that users write: as arguments, in options, files and variables of the environment.

Python's own readers take `True`, `nan`, and digits of all scripts, and raise OverflowError or ValueError of their own
for numbers of hundreds of digits.
"""

from __future__ import annotations

import contextlib
import math
from decimal import Decimal

from skyward_core.errors import BadRequest

LONGEST_SECONDS = 10 * 365 * 86_400
"""The longest time, and the longest life of a machine. Longer ones would overflow dates."""
MOST_RETRIES = 1_000_000
MOST_DIGITS = 9
"""Of a whole number that is read or shown."""
SHOWN_CHARACTERS = 500


def number(
    given: object,
    name: str,
    what: str,
    *,
    least: float | None = None,
    most: float = math.inf,
    is_text_read: bool = True,
) -> float:
    """Return a number that a user has given, above zero or from `least` on, also as a text unless that is excluded.

    Raises BadRequest, which says what to write: no boolean, no infinity and no text without a number counts.
    """
    value = math.nan
    kinds = (int, float, str, Decimal) if is_text_read else (int, float)
    if (
        isinstance(given, kinds)
        and not isinstance(given, bool)
        and not (isinstance(given, str) and not given.isascii())
    ):
        with contextlib.suppress(ValueError, OverflowError):
            value = float(given)
    is_large_enough = value > 0 if least is None else value >= least
    if not (is_large_enough and value <= most) or math.isinf(value):
        raise BadRequest(f"{name}={shown(given)}: write {what}")
    return value


def whole(given: object, name: str, what: str, *, least: int = 1, most: int) -> int:
    """Return a whole number that a user has given. Raises BadRequest, which says what to write."""
    if type(given) is not int or not least <= given <= most:
        raise BadRequest(f"{name}={shown(given)}: write {what}")
    return given


def whole_of_digits(text: str) -> int:
    """Return the number that a text of ASCII digits has, or if it has too many of them, one above each limit."""
    return int(text) if len(text) <= MOST_DIGITS else 10**MOST_DIGITS


def shown(value: object) -> str:
    """Return a value as Python writes it, cut where it is long."""
    try:
        text = repr(value)
    except ValueError:  # Python shows no number of more than 4300 digits
        return "a longer number"
    return text if len(text) <= SHOWN_CHARACTERS else f"{text[:SHOWN_CHARACTERS]}..."
