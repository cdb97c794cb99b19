r"""Text that others have written, as it may be shown: what nodes print, errors of providers, names in a shared ledger.

    text of a node or a provider -> `visible`, `visible_lines` -> event, error, row -> `markdown`, `html` -> page

A terminal obeys escape sequences, and a browser obeys tags. Some characters show nothing, or change the order of the
others. PostgreSQL takes no NUL, and half of a surrogate pair cannot be encoded as UTF-8. `visible` and `visible_lines`
write all of them out, as Python does: `\x1b`, `\u202e`, `\udc80`. They leave visible text as it is.

`markdown` and `html` escape for one format. They refuse text that is escaped already, because a reader would see the
escapes.
"""

from __future__ import annotations

import logging
import re
from html import escape
from typing import Any, cast, override
from urllib.parse import quote

__all__ = [
    "each_line",
    "html",
    "indented",
    "is_visible",
    "markdown",
    "markdown_code",
    "markdown_link",
    "visible",
    "visible_data",
    "visible_lines",
    "visible_logger",
]

_COLOURS = re.compile(r"\x1b\[[0-9;:]*m")
"""SGR. Keras's bars have them also where stdout is no terminal; they say only how a text looks."""
_SHOWS_NOTHING = (
    "\xad\u034f\u0600-\u0605\u061c\u06dd\u070f\u0890-\u0891\u08e2\u115f-\u1160\u17b4-\u17b5\u180b-\u180f\u200b-\u200f"
    "\u2028-\u202e\u2060-\u2064\u2066-\u206f\u3164\ud800-\udfff\ufeff\uffa0\ufff9-\ufffb\U000110bd\U000110cd"
    "\U00013430-\U0001343f\U0001bca0-\U0001bca3\U0001d173-\U0001d17a\U000e0000-\U000e0fff"
)
"""Beside the control characters: Unicode's categories Cf, Cs, Zl and Zp, and some letters without a picture."""
_HIDDEN = re.compile(rf"[\x00-\x1f\x7f-\x9f{_SHOWS_NOTHING}]")
_HIDDEN_IN_LINES = re.compile(rf"[\x00-\x08\x0b-\x1f\x7f-\x9f{_SHOWS_NOTHING}]")
_IN_MARKDOWN = re.compile(r"[\\`*_\[\]|~@]|[:/](?=/)|\.(?=[^\W\d])|(?<=[wW])\.|^[-+=#]")
"""Dots, colons and slashes too: pages make links of addresses without any sign around them."""
_NUMBER = re.compile(r"^(\d+)([.)])")
"""It would begin a list."""
_NAMES = {"&": "&amp;", "<": "&lt;", ">": "&gt;"}
_PLAIN_CODE = re.compile(r"[\w.:/@+ -]+", re.ASCII)
_IN_URLS = ":/?#@!$&+,=%~"
_PAGE = re.compile(r"https?://[^\s/?#]", re.IGNORECASE)


class _Escaped(str):
    """Text that is escaped for a format."""

    __slots__ = ()


class Markdown(_Escaped):
    """Text that is escaped for Markdown."""

    __slots__ = ()


class Html(_Escaped):
    """Text that is escaped for HTML."""

    __slots__ = ()


def is_visible(text: str) -> bool:
    """Return whether a text surely stays as it is. False says nothing: the text may have umlauts only."""
    return text.isascii() and text.isprintable()


def visible(text: str) -> str:
    r"""Return a text as one line in which each character can be seen. Colours are left out.

    >>> print(visible("a \x1b[31mred\x1b[0m line,\n\x1b[2J cleared"))
    a red line,\n\x1b[2J cleared
    """
    if is_visible(text) or not _HIDDEN.search(text):
        return text
    return _HIDDEN.sub(_written_out, _COLOURS.sub("", text))


def visible_lines(text: str) -> str:
    r"""Return a text in which each character can be seen, beside tabs and line feeds. Colours are left out.

    >>> visible_lines("first\r\nsecond\x1b]52;c;eA==\x07")
    'first\nsecond\\x1b]52;c;eA==\\x07'
    """
    if is_visible(text) or not _HIDDEN_IN_LINES.search(text):
        return text
    return _HIDDEN_IN_LINES.sub(_written_out, _COLOURS.sub("", text.replace("\r\n", "\n")))


def each_line(prefix: str, text: str) -> str:
    r"""Return a text with `prefix` before each of its lines, so that none of them looks like ours.

    >>> each_line("[node 0] ", "first\nsecond")
    '[node 0] first\n[node 0] second'
    """
    return prefix + visible_lines(text).replace("\n", f"\n{prefix}")


def indented(text: str) -> str:
    r"""Return a text of our own in which foreign line breaks may stand: all lines but the first are indented.

    >>> indented("no machine: the provider says\nskyward  done")
    'no machine: the provider says\n  skyward  done'
    """
    first, *others = visible_lines(text).split("\n")
    return "\n".join([first, *(line if line.startswith("  ") or not line else f"  {line}" for line in others)])


def visible_logger(name: str) -> logging.Logger:
    """Return the logger with this name, whose records are visible text, whoever handles them: errors of providers are
    in them.
    """
    logger = logging.getLogger(name)
    if _visible_records not in logger.filters:
        logger.addFilter(_visible_records)
    return logger


class _VisibleRecords(logging.Filter):
    @override
    def filter(self, record: logging.LogRecord) -> bool:
        try:
            message = record.getMessage()
        except Exception:  # the handlers report it, as `logging` does
            return True
        if not is_visible(message) and (shown := indented(message)) != message:
            record.msg, record.args = shown, None
        return True


_visible_records = _VisibleRecords()


def visible_data[T](value: T) -> T:
    """Return JSON data with each text in it visible, the names of objects too."""
    found: Any = value
    if isinstance(found, str):
        return cast("T", visible_lines(found))
    if isinstance(found, dict):
        items = cast("dict[Any, Any]", found).items()
        return cast("T", {visible(name) if isinstance(name, str) else name: visible_data(item) for name, item in items})
    if type(found) in (list, tuple):
        return cast("T", type(found)(map(visible_data, found)))
    return value


def markdown(text: str) -> Markdown:
    r"""Return a text for one line or one cell of a page in Markdown, where it looks as on a terminal.

    Raises TypeError for text that is escaped already.

    >>> markdown("a|b *c*")
    'a\\|b \\*c\\*'
    """
    _refuse_escaped(text)
    shown = re.sub("[&<>]", lambda found: _NAMES[found[0]], visible(" ".join(text.split())))
    return Markdown(_NUMBER.sub(r"\1\\\2", _IN_MARKDOWN.sub(r"\\\g<0>", shown)))


def markdown_code(text: str) -> Markdown:
    """Return an id or a name as code in Markdown; one with other characters as plain text."""
    return Markdown(f"`{text}`") if _PLAIN_CODE.fullmatch(text) else markdown(text)


def markdown_link(text: str, url: str) -> Markdown:
    """Return a link in Markdown; only its text if the address is no page of the web."""
    if not _PAGE.match(url):
        return markdown(text)
    return Markdown(f"[{markdown(text)}]({quote(url, safe=_IN_URLS, errors='replace')})")


def html(text: str) -> Html:
    """Return a text for HTML, inside of an element or of an attribute in quotes, where it looks as on a terminal.

    Raises TypeError for text that is escaped already.

    >>> html("a & b")
    'a &amp; b'
    """
    _refuse_escaped(text)
    return Html(escape(visible_lines(text)))


def _refuse_escaped(text: str) -> None:
    if isinstance(text, _Escaped):
        raise TypeError(f"this text is escaped already: {str(text)!r}")


def _written_out(found: re.Match[str]) -> str:
    return ascii(found[0])[1:-1]
