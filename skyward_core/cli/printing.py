"""Printing for all commands: tables, JSON, warnings, and numbers in words."""

from __future__ import annotations

import json
import sys
from collections.abc import Iterable, Sequence
from datetime import UTC, datetime
from typing import TYPE_CHECKING

from skyward_core.shown_text import indented, visible

if TYPE_CHECKING:
    from rich.console import Console

FAILED, TO_DO = 1, 3
"""Exit codes: something failed; a dry run has found something to do. 0 is success, 2 a command line with a fault."""
READABLE_CHARACTERS = 16
"""A text needs at least this many columns before it is folded."""
WIDE = 400
"""Columns where stdout is no terminal: nothing is folded there, so that `grep` finds whole lines."""


def say(text: str, *, is_error: bool = False, is_now: bool = False) -> None:
    """Print a text of our own, in which names and texts of others may stand (`shown_text.py`)."""
    print(indented(text), file=sys.stderr if is_error else sys.stdout, flush=is_now)


def print_json(data: object) -> None:
    print(json.dumps(data, indent=2))


def print_json_line(data: object) -> None:
    """Print JSON as one line at once, for a reader that follows."""
    print(json.dumps(data), flush=True)


def print_warnings(warnings: Iterable[object]) -> int:
    """Print each warning as one line on stderr, without repeats; return the exit code."""
    lines = list(dict.fromkeys(one_line(warning) for warning in warnings))
    for line in lines:
        print(f"skyward: {line}", file=sys.stderr)
    return FAILED if lines else 0


def one_line(text: object) -> str:
    """Return a text, an error's for example, as one visible line."""
    return visible(" ".join(str(text).split()))


def stack_text(stacks: str) -> str:
    """Return the stacks of a process, indented."""
    return "\n".join(f"  {visible(one)}" for one in stacks.splitlines() if one) or "  no answer: it has just ended"


def print_table(heads: Sequence[str], rows: Sequence[Sequence[str]]) -> None:
    """Print columns. A column whose head begins with `>` is aligned to the right.

    On a terminal, long texts are folded. A table that is too wide even then becomes one line for each value.
    """
    print(table_text(heads, rows))


def table_text(heads: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    """Return what `print_table` prints."""
    from rich.console import Console

    rows = [[visible(text) for text in row] for row in rows]
    console = Console(markup=False, highlight=False, emoji=False, color_system=None)
    if not console.is_terminal:
        console.width = WIDE
    if _least_width(heads, rows) > console.width:
        return _as_lines(heads, rows)
    return _as_table(console, heads, rows)


def _as_lines(heads: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    return "\n\n".join(
        "\n".join(f"{head.removeprefix('>')}: {text}" for head, text in zip(heads, row, strict=True) if text)
        for row in rows
    )


def _as_table(console: Console, heads: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    from rich.table import Table

    table = Table(box=None, pad_edge=False, padding=(0, 2, 0, 0))
    for head in heads:
        table.add_column(head.removeprefix(">"), justify="right" if head.startswith(">") else "left", overflow="fold")
    for row in rows:
        table.add_row(*row)
    with console.capture() as captured:
        console.print(table)
    return "\n".join(line.rstrip() for line in captured.get().splitlines())


def _least_width(heads: Sequence[str], rows: Sequence[Sequence[str]]) -> int:
    """Return how many columns a readable table needs: numbers are whole, texts may be folded."""
    columns = zip(heads, *rows, strict=True)
    widths = [
        max(map(len, texts)) if texts[0].startswith(">") else min(max(map(len, texts)), READABLE_CHARACTERS)
        for texts in columns
    ]
    return sum(widths) + 2 * len(widths)


def number_of(things: Sequence[object], noun: str) -> str:
    """Return "1 pool", "2 pools"."""
    return f"{len(things)} {noun}{'' if len(things) == 1 else 's'}"


def first_of(ids: Sequence[str], most: int = 4) -> str:
    """Return the first ids, and how many more there are."""
    return ", ".join(ids) if len(ids) <= most else f"{', '.join(ids[:most])} and {len(ids) - most} more"


def duration(seconds: float) -> str:
    """Return seconds in words: "47 s", "12 min", "3.4 h", "2.1 d"; negative ones have a sign."""
    size = abs(seconds)
    for unit, length, most, digits in (("s", 1, 120, 0), ("min", 60, 7200, 0), ("h", 3600, 172_800, 1)):
        if size < most:
            return f"{seconds / length:.{digits}f} {unit}"
    return f"{seconds / 86_400:.1f} d"


def money(usd: float) -> str:
    """Return a sum with as many decimals as the events' display has."""
    from skyward_core.events.narrator import digits

    return digits(usd)


def iso(at: datetime) -> str:
    return at.astimezone(UTC).isoformat(timespec="seconds").replace("+00:00", "Z")
