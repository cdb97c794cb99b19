"""The log of a node: it is cut where it is long, and its readers know it by the numbers of its lines.

A node that is kept warm for months would fill its disk. A cut log begins with a line that says how many lines it lacks:

    ::skyward cut 5120           lines 1 to 5120 are gone
    ::skyward phase ready        line 5121: the newest of each kind that a new reader needs
    ...                          the last lines

The node's supervisor cuts (`cut`); clients read (`LogPosition`).
"""

from __future__ import annotations

import os
import re

CUT = "::skyward cut "
CUT_LINE = re.compile(rf"{CUT}(\d{{1,15}})", re.ASCII)
"""Calls may write to the log of their node: the number has a bound."""
MOST_BYTES, KEPT_BYTES = 8 << 20, 256 << 10
"""At what size a log is cut, and how much of its end stays."""
KEPT_MARKS = ("::skyward phase ", "::skyward head ", "::skyward notice ", "::skyward preload ")
"""Of lines that begin so, the newest stays of each: clients that come later read the log from its beginning."""


class LogPosition:
    """How many lines of a log were read, and at which line its reader is. It may begin again at an earlier line."""

    def __init__(self) -> None:
        self.lines_read = 0
        self._at = 0
        """The number of the line that came last."""

    def resume(self) -> None:
        """The next line is the first that was not read."""
        self._at = self.lines_read

    def restart(self) -> None:
        """The next line is the first of the file."""
        self._at = 0

    def is_new(self, line: str) -> bool:
        """Count a line, and return whether it is one of the log that was not read."""
        if cut_line := CUT_LINE.fullmatch(line):
            self._at = int(cut_line[1])
            return False
        self._at += 1
        if self._at <= self.lines_read:
            return False
        self.lines_read = self._at
        return True


def cut(path: str, most_bytes: int = MOST_BYTES, kept_bytes: int = KEPT_BYTES) -> bool:
    """Cut a log that is longer than `most_bytes`; return whether it was. Its writers append, so they go on in it.

    What they write in the moment of the cut may be lost. Raises OSError.
    """
    if os.stat(path).st_size <= most_bytes:
        return False
    with open(path, "rb+", buffering=0) as file:
        lines = file.read().splitlines(keepends=True)
        missing = 0
        if cut_line := CUT_LINE.fullmatch(b"".join(lines[:1]).decode(errors="replace").rstrip("\n")):
            missing = int(cut_line[1])
            del lines[0]
        end = _last(lines, kept_bytes)
        marks = [line for line in _newest_marks(lines[: len(lines) - len(end)]) if line not in end]
        kept = [*marks, *end]
        head = f"{CUT}{missing + len(lines) - len(kept)}\n".encode()
        file.truncate(0)
        file.seek(0)
        file.write(b"".join([head, *kept]))
    return True


def _last(lines: list[bytes], kept_bytes: int) -> list[bytes]:
    """Return the last lines that have so many bytes together."""
    size = 0
    for index in range(len(lines) - 1, -1, -1):
        size += len(lines[index])
        if size > kept_bytes:
            return lines[index + 1 :]
    return lines


def _newest_marks(lines: list[bytes]) -> list[bytes]:
    """Return the newest line of each kind in KEPT_MARKS, in their order."""
    newest = {mark: index for index, line in enumerate(lines) for mark in KEPT_MARKS if line.startswith(mark.encode())}
    return [lines[index] for index in sorted(newest.values())]
