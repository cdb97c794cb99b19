"""The name that a user probably meant, for messages: none is better than a wrong one."""

from __future__ import annotations

from collections.abc import Iterable

LEAST_LIKENESS = 0.8
"""Share of equal letters, as difflib counts them. Below it words meet that only look alike: console, nodes."""


def meant(name: str, known: Iterable[str]) -> str | None:
    """Return the known name that `name` is a misspelling or a part of; None if there is no clear one.

    Case, "-" and "_" do not count. A part is made of whole words.

    >>> meant("acelerator", ["accelerator", "nodes"]), meant("lifetime", ["max_cost", "max_lifetime"])
    ('accelerator', 'max_lifetime')
    >>> meant("console", ["nodes"]), meant("max_hourly_cost", ["max_cost"])
    (None, None)
    """
    from difflib import get_close_matches  # for mistakes only: it takes a millisecond

    by_key = {_key(one): one for one in known}
    if near := get_close_matches(_key(name), by_key, 1, cutoff=LEAST_LIKENESS):
        return by_key[near[0]]
    words = set(_key(name).split("_"))
    whole = [one for key, one in by_key.items() if words < set(key.split("_"))]
    return whole[0] if len(whole) == 1 else None


def question(name: str, known: Iterable[str]) -> str:
    """Return "did you mean 'nodes'?", or "" where no known name is near."""
    near = meant(name, known)
    return "" if near is None else f"did you mean {near!r}?"


def _key(name: str) -> str:
    return name.casefold().replace("-", "_")
