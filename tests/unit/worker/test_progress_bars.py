"""Progress bars in the output of a call."""

import io
import os
from collections.abc import Callable, Generator
from contextlib import contextmanager
from itertools import pairwise

import pytest

from skyward_core.wire.log_records import LogLines, split_records
from skyward_core.worker.runner_process import SECONDS_BETWEEN_STATES, Stream

MARK = b"\x1e0123456789abcdef\x1e"
RECORD = b'\x1e0123456789abcdef:30 "careful"\n'


class Output:
    """A runner's stderr, and a clock that a test moves."""

    def __init__(self, read: int, write: int) -> None:
        self.now = 0.0
        self._write = write
        self.stream = Stream("stderr", read, MARK, clock=lambda: self.now)

    def write(self, text: bytes) -> list[str]:
        """Return what passes of a text that comes in one piece; of none: at a look."""
        if text:
            os.write(self._write, text)
            assert self.stream.read()
        return self.look()

    def look(self) -> list[str]:
        items = [item for _, lines in self.stream.lines() for item in split_records(MARK, lines)]
        return [text for item in items if isinstance(item, LogLines) for text in item.texts]


@contextmanager
def output() -> Generator[Output]:
    read, write = os.pipe()
    try:
        yield Output(read, write)
    finally:
        os.close(read)
        os.close(write)


def test_of_a_bar_one_state_in_15_seconds_passes_and_the_last():
    """The bar is drawn ten times a second, for two minutes."""
    passed: list[tuple[float, str]] = []
    with output() as out:
        for tenth in range(1201):
            out.now = tenth / 10
            passed += [(out.now, line) for line in out.write(f"\r{tenth} of 1200".encode())]
        passed += [(out.now, line) for line in out.write(b"\n")]
    assert passed[-1] == (120.0, "1200 of 1200")
    assert len(passed) == 1 + 120 / SECONDS_BETWEEN_STATES
    assert all(later - earlier >= SECONDS_BETWEEN_STATES for (earlier, _), (later, _) in pairwise(passed[:-1]))


def test_a_bar_that_stands_still_shows_where():
    with output() as out:
        assert out.write(b"\r1 of 9\r2 of 9\r3 of 9") == ["1 of 9"]
        out.now = 14.0
        assert out.look() == []
        out.now = 15.0
        assert out.look() == ["3 of 9"]
        out.now = 40.0
        assert out.look() == []
        assert out.write(b"\r3 of 9\r") == []
        assert out.write(MARK) == []


@pytest.mark.parametrize("end", [b"", b"\r", b"\r      \r"])
def test_the_last_state_passes_when_the_call_ends(end: bytes):
    with output() as out:
        assert out.write(b"\r1 of 9\r2 of 9" + end + MARK) == ["1 of 9", "2 of 9"]
        assert out.write(b"\r1 of 5\rnext call" + MARK) == ["1 of 5", "next call"]


@pytest.mark.parametrize("between", [b"", b"\r        \r"])
def test_lines_and_records_beside_a_bar_all_pass(between: bytes):
    with output() as out:
        assert out.write(b"\r1 of 9") == []
        for number in range(3):
            assert out.write(b"\r2 of 9" + between + RECORD)[-1] == "careful"
            assert out.write(b"\r3 of 9" + b"\r      \r" + b"a line %d\n" % number) == [f"a line {number}"]
        assert out.write(b"plain\n\nplain\n") == ["plain", "", "plain"]


def test_bars_below_each_other_are_few_lines_too():
    """As tqdm draws the second of two: a line down, the state, and a line up again."""
    with output() as out:
        passed = out.write(b"\router 0\n\rinner 0\x1b[A")
        for number in range(1, 100):
            passed += out.write(b"\router %d\n" % number) + out.write(b"\rinner %d\x1b[A" % number)
        passed += out.write(b"\router 100\n")
        assert len(passed) <= 3
        assert (passed + out.write(MARK))[-1] == "outer 100"


@pytest.mark.parametrize(
    ("text", "lines"),
    [
        (b"a\nb\n", ["a", "b"]),
        (b"a\r\nb\r\n", ["a", "b"]),
        (b"\n\n", ["", ""]),
        (b"50%\r100%\n", ["50%", "100%"]),
        (b"100%\r100%\n", ["100%"]),
        (b"\r 1/2\r 2/2\nEpoch 2\n\r 1/2\r 2/2\n", [" 1/2", " 2/2", "Epoch 2", " 2/2"]),
    ],
)
def test_the_lines_of_a_text(text: bytes, lines: list[str]):
    """Also if it comes byte by byte."""
    with output() as out:
        assert out.write(text) == lines
    with output() as out:
        assert [line for byte in text for line in out.write(bytes([byte]))] == lines


def _plain(bars: Callable[..., object], file: io.StringIO) -> None:
    for _ in bars(range(500), file=file, mininterval=0, desc="rows"):
        pass


def _nested(bars: Callable[..., object], file: io.StringIO) -> None:
    for _ in bars(range(10), file=file, mininterval=0, desc="epochs"):
        for _ in bars(range(50), file=file, mininterval=0, desc="rows", leave=False):
            pass


@pytest.mark.parametrize(("draw", "last"), [(_plain, "rows: 100%"), (_nested, "epochs: 100%")])
def test_the_bars_of_tqdm(
    draw: Callable[[Callable[..., object], io.StringIO], None], last: str, monkeypatch: pytest.MonkeyPatch
):
    tqdm = pytest.importorskip("tqdm")
    monkeypatch.setattr(tqdm.tqdm, "monitor_interval", 0)  # else it has a thread
    drawn = io.StringIO()
    draw(tqdm.tqdm, drawn)
    assert drawn.getvalue().count("\r") >= 500
    with output() as out:
        passed = [line for piece in drawn.getvalue().splitlines(keepends=True) for line in out.write(piece.encode())]
        passed += out.write(MARK)
    assert len(passed) <= 4
    assert passed[-1].startswith(last)
