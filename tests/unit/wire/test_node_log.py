"""The log of a node is cut where it is long; who reads it misses nothing that is left, and reads nothing twice."""

from pathlib import Path

import pytest

from skyward_core.transport.transport import LocalTransport
from skyward_core.wire.node_log import CUT, LogPosition, cut
from tests.ledger.fixtures import machine

LINES = [f"line {number:04}" for number in range(1, 1001)]
MARKS = {3: "::skyward phase deps", 5: "::skyward phase ready", 7: "::skyward head 0 tls://10.0.0.1:4000"}


def written(path: Path) -> list[str]:
    """Write a log with marks among its first lines; return the lines."""
    lines = [MARKS.get(number, line) for number, line in enumerate(LINES, 1)]
    path.write_text("".join(f"{line}\n" for line in lines))
    return lines


def read(path: Path, position: LogPosition) -> list[str]:
    return [line for line in path.read_text().splitlines() if position.is_new(line)]


def test_a_cut_log_has_the_newest_marks_and_the_last_lines(tmp_path: Path) -> None:
    path = tmp_path / "log"
    lines = written(path)
    assert not cut(str(path), most_bytes=100_000)
    assert cut(str(path), most_bytes=1000, kept_bytes=100)
    assert path.read_text().splitlines() == [f"{CUT}988", MARKS[5], MARKS[7], *lines[-10:]]
    with path.open("a") as log:
        log.write("more\n" * 300)
    assert cut(str(path), most_bytes=1000, kept_bytes=100)
    assert path.read_text().splitlines()[0] == f"{CUT}{1300 - 2 - 20}"
    assert path.read_text().splitlines()[1:3] == [MARKS[5], MARKS[7]]


@pytest.mark.parametrize("seen", [0, 500, 995, 1000])
def test_who_reads_on_after_a_cut_gets_each_line_that_is_left_once(tmp_path: Path, seen: int) -> None:
    path, position = tmp_path / "log", LogPosition()
    lines = written(path)
    assert [line for line in lines[:seen] if position.is_new(line)] == lines[:seen]
    cut(str(path), most_bytes=1000, kept_bytes=100)
    with path.open("a") as log:
        log.write("new\n")
    position.restart()
    left = lines[-10:] if seen < 988 else lines[seen:]
    marks = [MARKS[5], MARKS[7]] if seen < 988 else []
    assert read(path, position) == [*marks, *left, "new"]
    position.restart()
    assert read(path, position) == []


def test_a_node_of_this_machine_is_read_on_after_a_cut(tmp_path: Path) -> None:
    path = tmp_path / "log"
    instance = machine("local-1").model_copy(update={"directory": str(tmp_path)})
    transport = LocalTransport(instance, lambda: False, lambda: None)
    path.write_text("::skyward ")
    assert transport.new_lines() == []
    lines = written(path)
    assert transport.new_lines() == lines
    cut(str(path), most_bytes=1000, kept_bytes=100)
    with path.open("a") as log:
        log.write("new\n")
    assert transport.new_lines() == ["new"]
    assert transport.new_lines() == []


@pytest.mark.parametrize("number", ["", "-1", "x", "1 2", "٣", "9" * 5000, "a[$(touch there)]"])
def test_a_line_that_a_call_has_written_is_no_cut(tmp_path: Path, number: str) -> None:
    """Calls may write to the log of their node."""
    position = LogPosition()
    assert position.is_new("first")
    assert position.is_new(f"{CUT}{number}")
    assert position.lines_read == 2
    path = tmp_path / "log"
    path.write_text(f"{CUT}{number}\n" + "line\n" * 300)
    assert cut(str(path), most_bytes=1000, kept_bytes=10)
    assert path.read_text().splitlines()[0] == f"{CUT}299"
