"""Replaces secret values in text by MASK, plain or quoted in a common way.

This helps against accidents only. Code that has a value can print it reversed, encrypted or in pieces.
"""

from __future__ import annotations

import html
import json
import re
from base64 import b64encode
from collections.abc import Iterable, Iterator
from functools import cached_property
from typing import Any, cast
from urllib.parse import quote, quote_plus

MASK = "***"
SHORTEST = 4
"""Characters of the shortest value that is masked: a shorter one is part of unrelated words."""
SHORTEST_LINE = 8
"""The same for one line of a value of several lines, such as a private key."""
SHORTEST_IN_PICKLE = 12
"""Bytes of the shortest value that is masked in a pickle. A shorter one may be the name of a module or a class."""
SHORTEST_IN_BASE64 = 8
"""Characters of the shortest piece of base64 that is masked."""
DEEPEST = 6
_URLSAFE = str.maketrans("+/", "-_")
_SAFE_IN_URL = ("", "/", "!'()*~", "!$&'()*+,;=:~", "!$&'()*+,;=:~/")
"""The characters, besides letters and digits, that quoting leaves as they are: Python's default, JavaScript's
encodeURIComponent, and those allowed in user information (RFC 3986).
"""
_APOSTROPHES_IN_SHELL = ("'\"'\"'", r"'\''")


class SecretValues(dict[str, str]):
    """The values of secrets by the names of their variables. Does not show them."""

    def __repr__(self) -> str:
        return f"SecretValues({', '.join(self)})"

    __str__ = __repr__
    __sentry_repr__ = __repr__
    """Sentry sends the variables of frames, and the items of a mapping, even if its `__repr__` hides them. This
    attribute prevents that.
    """

    def __reduce__(self) -> tuple[Any, ...]:
        return SecretValues, (dict(self),)


class Mask:
    """Masks these values. Without any it changes nothing."""

    def __init__(self, values: Iterable[str] = ()) -> None:
        long = [value for value in values if len(value) >= SHORTEST]
        found = {spelling for value in long for spelling in spellings(value) if len(spelling) >= SHORTEST}
        found |= {line for value in long for line in _lines(value) if len(line) >= SHORTEST_LINE}
        longest_first = sorted(found, key=len, reverse=True)
        self._pattern = re.compile("|".join(map(re.escape, longest_first))) if longest_first else None
        self._spellings = longest_first

    def __repr__(self) -> str:
        return "Mask(...)"

    @cached_property
    def _raw(self) -> re.Pattern[bytes] | None:
        """The spellings as bytes.

        Made when the first exception needs it: for a key with many lines that takes tenths of a second.
        """
        return self._of_bytes(SHORTEST)

    @cached_property
    def _in_pickle(self) -> re.Pattern[bytes] | None:
        return self._of_bytes(SHORTEST_IN_PICKLE)

    def _of_bytes(self, shortest: int) -> re.Pattern[bytes] | None:
        raw = [
            raw
            for spelling in self._spellings
            for raw in {spelling.encode(errors=errors) for errors in ("surrogateescape", "surrogatepass")}
        ]
        patterns = [re.escape(one) for one in raw if len(one) >= shortest]
        return re.compile(b"|".join(patterns)) if patterns else None

    def text(self, text: str) -> str:
        """Return the text without the values."""
        return text if self._pattern is None else self._pattern.sub(MASK, text)

    def error(self, error: BaseException) -> None:
        """Take the values out of an exception, and of all that come with it: arguments, attributes, notes, causes, the
        exceptions of a group.
        """
        seen = set[int]()
        left: list[BaseException | None] = [error] if self._pattern is not None else []
        while left:
            one = left.pop()
            if one is None or id(one) in seen:
                continue
            seen.add(id(one))
            self._mask_one(one)
            left += [
                one.__cause__,
                one.__context__,
                *(cast("BaseExceptionGroup[Any]", one).exceptions if isinstance(one, BaseExceptionGroup) else ()),
            ]

    def pickle(self, data: bytes) -> bytes:
        """Return a pickle, or a buffer of one, with the values replaced by stars of the same length."""
        return data if self._in_pickle is None else self._in_pickle.sub(lambda found: b"*" * len(found[0]), data)

    def _mask_one(self, error: BaseException) -> None:
        try:
            if (args := self.value(error.args)) is not error.args:
                error.args = args
            attributes = vars(error)
            attributes.update(
                {name: masked for name, value in list(attributes.items()) if (masked := self.value(value)) is not value}
            )
        except Exception:  # noqa: S110 - a class of the user's that does not let itself be changed; the pickle is looked through after this
            pass

    def value(self, value: Any, depth: int = 0) -> Any:
        """Return a text, or a collection with texts, without the values; itself if it has none of them that can be seen
        from here.
        """
        if self._pattern is None:
            return value
        if isinstance(value, str):
            masked = self.text(value)
            return value if masked == value else masked
        if type(value) in (bytes, bytearray):
            return self._raw.sub(MASK.encode(), value) if self._raw is not None and self._raw.search(value) else value
        if depth > DEEPEST:
            return value
        if type(value) in (list, tuple, set, frozenset):
            items = [self.value(item, depth + 1) for item in value]
            return value if all(new is old for new, old in zip(items, value, strict=True)) else type(value)(items)
        if type(value) is dict:
            pairs = [(key, item) for key, item in cast("dict[Any, Any]", value).items()]
            masked = self.value(pairs, depth)
            return value if masked is pairs else dict(masked)
        return value


def spellings(secret: str) -> Iterator[str]:
    """Return a secret as it is and as others quote it, and without the white space around it.

    In a URL, JSON, HTML, a shell, base64, hexadecimal and UTF-16; as Python shows text and bytes; and with escapes for
    bytes that are not UTF-8.
    """
    for text in (secret, secret.strip()):
        if text:
            encoded = text.encode(errors="surrogateescape")
            yield from (
                text,
                text.encode(errors="backslashreplace").decode(),
                encoded.decode(errors="backslashreplace"),
            )
            yield from (repr(text)[1:-1], ascii(text)[1:-1], repr(encoded)[2:-1])
            yield from (json.dumps(text, ensure_ascii=is_ascii)[1:-1] for is_ascii in (True, False))
            yield from (html.escape(text), html.escape(text, quote=False))
            yield from (text.replace("'", in_shell) for in_shell in _APOSTROPHES_IN_SHELL)
            for in_url in (*(quote(encoded, safe=safe) for safe in _SAFE_IN_URL), quote_plus(encoded)):
                yield from (in_url, re.sub("%[0-9A-F]{2}", lambda match: match[0].lower(), in_url))
            yield from (encoded.hex(), encoded.hex().upper())
            wide = text.encode("utf-16-le", errors="surrogatepass")
            yield from (part.decode(errors="backslashreplace") for part in (wide[:-1], wide) if len(wide) > 1)
            yield from _in_base64(encoded)


def _lines(value: str) -> list[str]:
    """Return the lines of a value of several: as output is cut into lines, and as Python does it."""
    lines = [*re.split(r"[\r\n]+", value), *value.splitlines()]
    return [line.strip() for line in lines] if len(value.strip().splitlines()) > 1 else []


def _in_base64(value: bytes) -> Iterator[str]:
    """Return what base64 makes of a value, alone or within a longer text (`user:password` of HTTP): the characters that
    the text around it does not change.
    """
    yield b64encode(value).decode()
    for before in range(3):
        encoded = b64encode(b"\0" * before + value)
        certain = encoded[(8 * before + 5) // 6 : 8 * (before + len(value)) // 6].decode()
        if len(certain) >= SHORTEST_IN_BASE64:
            yield from (certain, certain.translate(_URLSAFE))
