"""The displays get the events of a pool's life, and the tests check their text."""

import io
import re
from typing import override

import pytest

import skyward_core as sky
from skyward_core.events.console import display
from tests.hostile_texts import HOSTILE_TEXTS, refuse_lines_of_ours
from tests.unit.events.test_console import OPENING, _written
from tests.unit.events.test_hostile_events import events_with


class Terminal(io.StringIO):
    """A file that claims to be a terminal."""

    @override
    def isatty(self) -> bool:
        return True


@pytest.fixture
def terminal(monkeypatch: pytest.MonkeyPatch) -> Terminal:
    for name in ("NO_COLOR", "FORCE_COLOR", "TTY_COMPATIBLE", "TTY_INTERACTIVE"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("TERM", "xterm-256color")
    monkeypatch.setenv("COLUMNS", "120")
    return Terminal()


@pytest.mark.parametrize("text", HOSTILE_TEXTS.values(), ids=HOSTILE_TEXTS)
def test_a_hostile_text_acts_on_no_terminal_with_a_spinner(text: str, terminal: Terminal) -> None:
    """What is written is rich's own sequences for colours and the cursor, and text that can be seen."""
    shown = display("spinner", file=terminal)
    for event in events_with(text):
        shown(event)
    shown.close()
    written = re.sub(r"\x1b\[[0-9;]*[mAK]|\x1b\[\?25[lh]|\x1b\[[12]K|\r", "", terminal.getvalue())
    refuse_lines_of_ours(written)


def test_spinner_draws_phases_calls_and_cost(terminal: Terminal):
    shown = display("spinner", file=terminal)
    for event in OPENING[:8]:
        shown(event)
    for event in (sky.CallProgress(40, 12, 1), sky.CostUpdate(5.0, 0.05, 36.0, 1, 0)):
        shown(event)
    shown.close()
    screen = terminal.getvalue().rsplit("\x1b[2K", 1)[-1]
    assert "launching 2 x local on local" in terminal.getvalue()
    assert "$0.0500 at $36.00/h" in terminal.getvalue()
    assert "12 of 40 calls, 1 failed" in screen
    assert terminal.getvalue().count("\x1b[?25l") == terminal.getvalue().count("\x1b[?25h") == 1


@pytest.mark.parametrize(
    ("event", "line"),
    [
        (sky.ContactLost("i-b", 1, "timed out"), "node 1 does not answer: timed out"),
        (sky.ContactRegained("i-b", 1, 12.0), "node 1 answers again after 12.0 s"),
        (sky.ClusterRestarting("node 0 is lost"), "the cluster comes up anew: node 0 is lost"),
        (
            sky.CallRetrying("0123456789", 2, 3, "node 1 is lost"),
            "call 01234567 runs again (attempt 2 of 3): node 1 is lost",
        ),
        (
            sky.CallsWaiting("gpu", 1, 5.0, "run nightly", 62.0),
            "a call waits for a slot of pool gpu, held by run nightly for 1 min 2 s",
        ),
        (sky.Error("no key"), "no key"),
        (
            sky.CallReported(1, "i-b", "call", 7, {"loss": 0.25, "rate": 1e-05}, 0.0),
            "[node 1] step 7: loss 0.25, rate 1e-05",
        ),
        (sky.CallReported(1, "i-b", "call", None, {"loss": 0.25}, 0.0), "[node 1] loss 0.25"),
    ],
)
def test_spinner_prints_each_problem_above_the_rows(event: sky.SkywardEvent, line: str, terminal: Terminal):
    assert line in _written("spinner", [event], terminal)
