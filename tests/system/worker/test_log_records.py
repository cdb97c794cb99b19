"""Log records of calls: their level, and their traceback in one piece."""

import itertools
import logging
import sys

from hypothesis import given
from hypothesis import strategies as st

import skyward_core as sky
from skyward_core.worker.log_records import LogLines, split_records
from tests.conftest import RecordedEvents

MARK = b"\x1e0123456789abcdef\x1e"
START = MARK[:-1].decode() + ":"


@sky.compute
def write_everything() -> None:
    import contextlib
    import io

    print("a line")
    logging.getLogger("mine").warning("two\nlines")
    print("no line end yet", end="")
    sys.stdout.flush()
    try:
        raise ValueError("boom")
    except ValueError:
        logging.exception("it failed")
    logging.basicConfig(level=logging.DEBUG, format="%(name)s says %(message)s", stream=sys.stdout, force=True)
    logging.getLogger("mine").debug("of little use")
    logging.getLogger("mine").error("ünïcode \x1e \r and a 'quote\"")
    own = io.StringIO()
    elsewhere = logging.StreamHandler(own)
    logging.getLogger("elsewhere").addHandler(elsewhere)
    logging.getLogger("elsewhere").propagate = False
    logging.getLogger("elsewhere").error("kept")
    print("elsewhere:", repr(own.getvalue()))
    with contextlib.redirect_stdout(own):
        print("not seen")
    print("the end")


@sky.compute
def log_and_die() -> None:
    import os

    logging.error("first\nsecond")
    os._exit(3)


def test_a_record_arrives_whole_and_with_its_level(pool: sky.ComputePool, recorded: RecordedEvents) -> None:
    """By Python's last resort and by handlers of the call's own. Printed text has no level, and records for other
    outputs stay there.
    """
    future = pool.submit(write_everything())
    future.result()
    lines = [line for line in recorded.of(sky.LogLine) if line.call_id == future.call_id]
    out = [(line.level, line.line) for line in lines if line.stream == "stdout"]
    assert out == [
        (None, "a line"),
        (None, "no line end yet"),
        (logging.DEBUG, "mine says of little use"),
        (logging.ERROR, "mine says ünïcode \x1e \r and a 'quote\""),
        (None, "elsewhere: 'kept\\n'"),
        (None, "the end"),
    ]
    warning, failure = [line for line in lines if line.stream == "stderr"]
    assert (warning.level, warning.line) == (logging.WARNING, "two\nlines")
    assert failure.level == logging.ERROR
    assert failure.line.startswith("ERROR:root:it failed\nTraceback (most recent call last):\n")
    assert failure.line.endswith("\nValueError: boom")


def test_the_last_lines_of_a_call_that_dies_are_lines(pool: sky.ComputePool) -> None:
    try:
        log_and_die() >> pool
    except sky.CallCrashed as error:
        assert "first\n" in str(error)
        assert "\x1e" not in str(error)
    else:
        raise AssertionError("it lived")


@given(
    st.lists(st.one_of(st.text(st.characters(exclude_characters="\n\r\x1e")), st.tuples(st.integers(0, 60), st.text())))
)
def test_lines_and_records_are_read_back_in_their_order(written: list[str | tuple[int, str]]) -> None:
    """Adjacent texts of one level come together; nothing is lost or changed."""
    import json

    lines = [item if isinstance(item, str) else f"{START}{item[0]} {json.dumps(item[1])}" for item in written]
    read = list(split_records(MARK, lines))
    assert [(group.level, text) for group in read for text in group.texts] == [
        (None, item) if isinstance(item, str) else item for item in written
    ]
    assert all(one.level != other.level for one, other in itertools.pairwise(read))


def test_a_record_after_text_without_a_line_end_and_one_cut_short() -> None:
    assert list(split_records(MARK, [f'abc{START}40 "x"'])) == [LogLines(None, ("abc",)), LogLines(40, ("x",))]
    assert list(split_records(MARK, [f'{START}40 "x'])) == [LogLines(None, ('"x',))]
