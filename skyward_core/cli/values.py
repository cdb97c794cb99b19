"""Values of options and arguments: each function reads a text that the user typed, or raises `typer.BadParameter`.

typer gives default values to these functions too: numbers come as numbers.
"""

import re
from datetime import UTC, datetime, timedelta
from decimal import Decimal, InvalidOperation

import typer

MAX_COUNT = 1_000_000_000
MAX_SECONDS = 3_155_760_000.0
"""A hundred years: longer ages leave the calendar."""
MAX_DAYS = 36_500
MAX_PORT = 65_535
MAX_USD = 1_000_000_000_000
"""The ledger's micro-dollars are 64-bit numbers."""
MAX_NAME_LENGTH = 200
"""The ledger's columns have 255 characters; a scope is a name and a little more."""
SHOWN_CHARACTERS = 60
_DURATION = r"([0-9]{1,10}(?:\.[0-9]{1,3})?)([smhd])"


def date(text: str) -> datetime:
    """Return a time; one without a time zone is UTC."""
    try:
        at = datetime.fromisoformat(text)
    except ValueError as error:
        raise typer.BadParameter(f"{text!r} is no date such as 2026-11-21") from error
    return at if at.tzinfo is not None else at.replace(tzinfo=UTC)


def since(text: str) -> datetime:
    """Return a time; of a duration such as 30d the one that is so long ago."""
    if re.fullmatch(_DURATION, text, re.ASCII) is None:
        try:
            return date(text)
        except typer.BadParameter as error:
            raise typer.BadParameter(f"{error.message}, and no duration such as 30d") from error
    return datetime.now(UTC) - timedelta(seconds=duration(text))


def count(text: str | int) -> int:
    """Return a whole number from 1 to `MAX_COUNT`."""
    if not _is_whole_number(str(text), MAX_COUNT):
        raise typer.BadParameter(f"{shortened(str(text))} is no whole number from 1 to {MAX_COUNT}")
    return int(text)


def whole(text: str | int) -> int:
    """Return a whole number from 0 to `MAX_COUNT`."""
    return 0 if str(text) == "0" else count(text)


def port(text: str | int) -> int:
    """Return the number of a port; 0 is any free one."""
    if (number := whole(text)) > MAX_PORT:
        raise typer.BadParameter(f"a port is a number from 0 to {MAX_PORT}; given {number}")
    return number


def days(text: str) -> timedelta:
    """Return a duration such as 90d."""
    number = text.removesuffix("d")
    if number == text or not _is_whole_number(number, MAX_DAYS):
        raise typer.BadParameter(f"{shortened(text)} is no number of days from 1d to {MAX_DAYS}d")
    return timedelta(days=int(number))


def seconds(text: str | float) -> float:
    """Return seconds, zero or more."""
    if not 0 <= (value := _number(text)) <= MAX_SECONDS:
        raise typer.BadParameter(
            f"seconds are zero or more, and at most {MAX_SECONDS:.0f}; given {shortened(str(text))}"
        )
    return value


def duration(text: str) -> float:
    """Return the seconds of a duration such as 90s, 30m, 2h or 1d, more than zero."""
    found = re.fullmatch(_DURATION, text, re.ASCII)
    value = 0.0 if found is None else float(found[1]) * {"s": 1, "m": 60, "h": 3600, "d": 86_400}[found[2]]
    if not 0 < value <= MAX_SECONDS:
        raise typer.BadParameter(f"{shortened(text)} is no duration such as 90s, 30m, 2h or 1d")
    return value


def price(text: str) -> float:
    """Return USD per hour, more than zero."""
    if not 0 < (value := _number(text)) <= MAX_USD:
        raise typer.BadParameter(f"a price is more than zero, and at most {MAX_USD} USD; given {shortened(text)}")
    return value


def usd(text: str) -> Decimal:
    """Return a sum in USD, zero or more."""
    try:
        value = Decimal(_in_ascii(text))
    except (InvalidOperation, ValueError) as error:
        raise typer.BadParameter(f"{shortened(text)} is no sum in USD") from error
    if not value.is_finite() or not 0 <= value <= MAX_USD:
        raise typer.BadParameter(f"a limit is zero or more, and at most {MAX_USD} USD; given {shortened(text)}")
    return value


def gigabytes(text: str | float) -> float:
    """Return a size in GB, zero or more."""
    if not 0 <= (value := _number(text)) <= MAX_COUNT:
        raise typer.BadParameter(f"a size in GB is zero or more; given {shortened(str(text))}")
    return value


def name(text: str) -> str:
    """Return a printable text that fits a column of the ledger."""
    if not text.strip() or len(text) > MAX_NAME_LENGTH:
        raise typer.BadParameter(f"a name has 1 to {MAX_NAME_LENGTH} characters; given {shortened(text)}")
    return printable(text)


def assignment(text: str) -> str:
    """Return a text such as NAME=VALUE. Refuses one without a name or without "="."""
    if not halves(text)[0].isidentifier() or "=" not in text:
        raise typer.BadParameter(f"{shortened(text)} is not NAME=VALUE")
    return text


def halves(text: str) -> tuple[str, str]:
    """Return what is before the first "=", and what is after it."""
    name, _, value = text.partition("=")
    return name, value


def printable(text: str) -> str:
    """Return the text. Refuses control characters, which a terminal executes, and bytes that are no text."""
    if not text.strip() or not text.replace("\n", " ").isprintable():
        raise typer.BadParameter(f"{shortened(text)} is empty, or has characters that cannot be printed")
    return text


def shortened(text: str) -> str:
    """Return the text as Python writes it, cut where it is long."""
    return repr(text) if len(text) <= SHOWN_CHARACTERS else f"{text[:SHOWN_CHARACTERS]!r}... ({len(text)} characters)"


def _is_whole_number(text: str, most: int) -> bool:
    return text.isascii() and text.isdecimal() and len(text) <= len(str(most)) and 0 < int(text) <= most


def _number(text: str | float) -> float:
    try:
        return float(_in_ascii(str(text)))
    except ValueError as error:
        raise typer.BadParameter(f"{shortened(str(text))} is no number") from error


def _in_ascii(text: str) -> str:
    """Return the text. Raises ValueError for digits of another script, which Python reads too."""
    text.encode("ascii")
    return text
