"""Lines of output of any length: each byte is looked at a few times, and what is too long is cut, with a word about it."""

import os
import random
from collections.abc import Iterator

import pytest

from skyward_core.transport.ssh_commands import TextStream
from skyward_core.worker import runner_process
from skyward_core.worker.runner_process import LONGEST_LINE_BYTES, Stream

MARK = b"\x1e0123456789abcdef\x1e"


class Watched(bytearray):
    """Counts how many bytes are searched."""

    searched = 0

    def find(self, what: bytes, start: int = 0, *rest: int) -> int:  # type: ignore[override]
        Watched.searched += len(self) - start
        return super().find(what, start, *rest)

    def rfind(self, what: bytes, start: int = 0, *rest: int) -> int:  # type: ignore[override]
        Watched.searched += len(self) - start
        return super().rfind(what, start, *rest)


@pytest.fixture
def stream() -> Iterator[Stream]:
    read, write = os.pipe()
    os.close(write)
    yield Stream("stdout", read, MARK)
    os.close(read)


def passed(stream: Stream, pieces: list[bytes]) -> list[tuple[int, str]]:
    """Return the lines with the number of marks before them, after the call has ended."""
    found: list[tuple[int, str]] = []
    for piece in pieces:
        stream.rest += piece
        found += [(marks, line) for marks, lines in stream.lines() for line in lines]
    return found + [(marks, line) for marks, lines in stream.lines(flush=True) for line in lines]


def test_a_line_that_is_too_long_is_cut_and_the_next_line_says_so(stream: Stream) -> None:
    """The lines and the calls after it are whole."""
    long = b"x" * (3 * LONGEST_LINE_BYTES)
    lines = passed(
        stream, [b"before\n", *(long[at : at + 65536] for at in range(0, len(long), 65536)), b"\nafter\n", MARK]
    )
    more = 2 * LONGEST_LINE_BYTES
    assert lines == [
        (0, "before"),
        (0, "x" * LONGEST_LINE_BYTES),
        (0, f"skyward: the line above is cut, and {more} more bytes are left out"),
        (0, "after"),
    ]
    assert stream.marks_seen == 1


def test_each_byte_of_a_long_line_is_searched_a_few_times(stream: Stream) -> None:
    """Not once for each piece that follows: 40 MiB took 71 seconds."""
    Watched.searched = 0
    stream.rest = Watched()
    piece = b"x" * 65536
    passed(stream, [piece] * 640)
    assert Watched.searched < 12 * 640 * len(piece)


@pytest.mark.parametrize("seed", range(200))
def test_lines_and_marks_are_the_same_however_the_output_is_cut_into_pieces(
    stream: Stream, seed: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """No line is lost, divided or put before another mark; only too long ones are cut."""
    monkeypatch.setattr(runner_process, "LONGEST_LINE_BYTES", 40)
    dice = random.Random(seed)
    expected: list[tuple[int, str]] = []
    content, marks = b"", 0  # lines slightly above the limit may come whole, so there are none
    for _ in range(dice.randrange(1, 12)):
        if dice.random() < 0.3:
            content, marks = content + MARK, marks + 1
            continue
        text = dice.choice("abc") * dice.choice((1, 7, 39, 40, 120))
        content += text.encode() + b"\n"
        is_cut = len(text) > 40
        expected += [(marks, text[:40] if is_cut else text)]
        if is_cut:
            expected += [(marks, f"skyward: the line above is cut, and {len(text) - 40} more bytes are left out")]
    pieces: list[bytes] = []
    while content:
        count = dice.randrange(1, 30)
        pieces, content = [*pieces, content[:count]], content[count:]
    assert passed(stream, pieces) == expected
    assert stream.marks_seen == marks


def test_a_line_of_a_commands_output_is_joined_once() -> None:
    lines: list[str] = []
    stream = TextStream(lines.append)
    for _ in range(1000):
        stream.feed(b"x" * 1000)
    stream.feed(b"\r\nshort\nopen")
    stream.feed(b"", last=True)
    assert lines == ["x" * 1_000_000, "short", "open"]
