"""URLs in messages: passwords and tokens in them are hidden, also in texts of libraries and clouds."""

from __future__ import annotations

import re

HIDDEN = "***"
_BEGIN = r"(?<![A-Za-z0-9+.-])(?P<scheme>[A-Za-z][A-Za-z0-9+.-]{0,20}://)"
_WITH_PASSWORD = re.compile(_BEGIN + r"(?P<user>[^\s/?#@:]{0,500}):(?P<password>\S{0,500})@")
"""A password may have any characters: one that breaks the URL is the very one that an error shows. So it lasts up to
the last "@" before white space.
"""
_WITH_TOKEN = re.compile(_BEGIN + r"(?P<user>[^\s/?#@:]{1,500})@")
_IN_QUERY = re.compile(
    r"(?P<name>[?&][^=&\s?#]{0,100}(?:password|passwd|passphrase|secret|token|api_?key|signature|credential)[^=&\s?#]{0,100}=)"
    r"[^&\s#'\"]+",
    re.IGNORECASE,
)
_TOKEN_SCHEMES = re.compile(r"(?:\w+\+)?https?://", re.IGNORECASE)
"""The user of these may be a token. That of SSH or of a database is none."""
_PLAIN = re.compile(r"sqlite:.*|[\w./~-]+", re.DOTALL)


def without_logins(text: str) -> str:
    """Return a text without the passwords and tokens of the URLs in it.

    >>> without_logins("no answer from https://jo:secret@host/simple?token=abc, nor from ssh://git@host")
    'no answer from https://***@host/simple?token=***, nor from ssh://git@host'
    """
    if "://" not in text:
        return text
    text = _WITH_TOKEN.sub(_hidden, _WITH_PASSWORD.sub(_hidden, text))
    return _IN_QUERY.sub(rf"\g<name>{HIDDEN}", text)


def shown_unread(url: str) -> str:
    """Return what may be shown of a text that cannot be read as a URL: any part may be a piece of a password.

    >>> shown_unread("postgresql://jo:secret/db"), shown_unread("/var/lib/ledger.db")
    ('postgresql://***', '/var/lib/ledger.db')
    """
    if _PLAIN.fullmatch(url):
        return url
    scheme = re.match(_BEGIN, url)
    return f"{scheme[0] if scheme else ''}{HIDDEN}"


def _hidden(found: re.Match[str]) -> str:
    scheme, user = found["scheme"], found["user"]
    if _TOKEN_SCHEMES.fullmatch(scheme):
        return f"{scheme}{HIDDEN}@"
    return found[0] if "password" not in found.re.groupindex else f"{scheme}{user}:{HIDDEN}@"
