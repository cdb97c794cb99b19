"""An environment variable that is set for each call: visible everywhere, stored once."""

import os
import subprocess
import sys

import pytest

from skyward_core.worker.environment_variable import RewrittenVariable

NAME = "SKYWARD_TEST_VARIABLE"

HEAP = """
import ctypes, os, sys

class Heap(ctypes.Structure):  # struct mallinfo2 of mallinfo(3)
    _fields_ = [(name, ctypes.c_size_t) for name in "arena ordblks smblks hblks hblkhd usmblks fsmblks uordblks fordblks keepcost".split()]

libc = ctypes.CDLL(None)
libc.mallinfo2.restype = Heap
from skyward_core.worker.environment_variable import RewrittenVariable
variable = RewrittenVariable("SKYWARD_TEST_VARIABLE")
set_value = variable.set if sys.argv[1] == "rewritten" else lambda text: os.environ.__setitem__("SKYWARD_TEST_VARIABLE", text)
def turns(first):
    for number in range(first, first + 5000):
        set_value(f"{number:0200d}")
turns(0)
before = libc.mallinfo2().uordblks
turns(5000)
print(libc.mallinfo2().uordblks - before)
"""


@pytest.fixture(autouse=True)
def unset(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(NAME, "before")


def seen_by_a_child() -> str:
    return subprocess.run(["sh", "-c", f'printf %s "${NAME}"'], capture_output=True, text=True, check=True).stdout


def heap_growth(how: str) -> int:
    return int(subprocess.run([sys.executable, "-c", HEAP, how], capture_output=True, text=True, check=True).stdout)


def test_it_is_visible_here_and_in_every_process_that_is_started() -> None:
    """A short value after a long one has blanks at its end, and no rest of the old value."""
    variable = RewrittenVariable(NAME)
    for value in ("short", " and much longer than the one before it" * 9, "short again"):
        variable.set(value)
        assert os.environ[NAME].rstrip() == value
        assert seen_by_a_child().rstrip() == value
        assert os.environb[NAME.encode()].rstrip() == value.encode()


def test_removing_it_does_not_prevent_the_next_value() -> None:
    variable = RewrittenVariable(NAME)
    variable.set("one")
    del os.environ[NAME]
    assert seen_by_a_child() == ""
    variable.set("two")
    os.environ[NAME] = "a call's own"
    assert seen_by_a_child() == "a call's own"
    variable.set("three")
    assert (os.environ[NAME].rstrip(), seen_by_a_child().rstrip()) == ("three", "three")


def test_a_value_that_no_variable_can_hold_is_refused() -> None:
    with pytest.raises(ValueError, match="NUL"):
        RewrittenVariable(NAME).set("a\0b")


def test_five_thousand_values_take_no_memory() -> None:
    """The usual way is measured too: it keeps each of the 5,000 texts."""
    assert heap_growth("usual") > 5000 * 200
    assert heap_growth("rewritten") < 20_000
