"""Texts of nodes, providers and others on their way through events and displays of a pool."""

import dataclasses
import io
import typing
from typing import Any

import pytest

import skyward_core as sky
from skyward_core.engine.calls import call_events
from skyward_core.events.console import display
from skyward_core.events.narrator import Narrator
from skyward_core.events.notebook import Summary, after, as_html, as_text
from skyward_core.programs import ProgramOutput
from skyward_core.serialization import exceptions
from skyward_core.wire.messages import CallMetrics, Output, Report, ReportedMetrics, lines_with_levels
from tests.hostile_texts import HOSTILE_TEXTS, hidden_in, refuse_hidden, refuse_lines_of_ours, tags_of

hostile = pytest.mark.parametrize("text", HOSTILE_TEXTS.values(), ids=HOSTILE_TEXTS)
VALUES: dict[str, Any] = {"int | None": 30, "int": 1, "float": 1.0, "bool": True, "Work": sky.Work()}


def events_with(text: str) -> list[Any]:
    """Return an event of each class, with the text in each field that holds one."""
    return [
        kind(**{field.name: _value(str(field.type), text) for field in dataclasses.fields(kind)})
        for kind in typing.get_args(sky.SkywardEvent.__value__)
    ]


def _value(kind: str, text: str) -> Any:
    if kind.startswith("Mapping"):
        return {text: 1.0}
    if kind.startswith("tuple"):
        return (text,)
    return next((value for name, value in VALUES.items() if kind.startswith(name)), text)


@hostile
def test_a_hostile_text_is_visible_in_every_event(text: str) -> None:
    """In each field of each class, also in names of metrics, and with `dataclasses.replace`."""
    for event in events_with(text):
        for value in dataclasses.asdict(event).values():
            for one in value if isinstance(value, tuple | dict) else (value,):
                if isinstance(one, str):
                    refuse_hidden(one)
        assert dataclasses.replace(event) == event


@hostile
def test_a_hostile_text_is_no_line_of_ours_in_the_words(text: str) -> None:
    """Each line of a node begins with its number; of other events all lines but the first are indented."""
    narrator = Narrator()
    for event in events_with(text):
        if (told := narrator.tell(event)) is not None:
            first, *others = told[1].split("\n")
            refuse_hidden(told[1])
            mark = "[node 1] " if isinstance(event, sky.LogLine) else "  "
            assert all(line.startswith(mark) for line in others if line)
            assert first.startswith("[node 1] ") or not isinstance(event, sky.LogLine)


@pytest.mark.usefixtures("unconfigured")
@pytest.mark.parametrize("kind", ["log", "spinner"])
@hostile
def test_a_hostile_text_acts_on_no_terminal(kind: str, text: str) -> None:
    """`spinner` prints plain lines here; its rows on a terminal: tests/system/events."""
    file = io.StringIO()
    shown = display(kind, file=file)
    for event in events_with(text):
        shown(event)
    shown.close()
    refuse_lines_of_ours(file.getvalue())
    assert file.getvalue().count("[node 1] ") >= 2
    assert all(line.startswith(("skyward  ", "[node 1] ", "  ")) for line in file.getvalue().split("\n") if line), (
        "each line has its mark"
    )


@hostile
def test_a_hostile_text_is_only_text_in_a_notebook(text: str) -> None:
    summary, narrator = Summary(), Narrator()
    for event in events_with(text):
        summary = after(summary, event, narrator.tell(event))
    refuse_hidden(as_text(summary))
    tags, words = tags_of(as_html(summary))
    assert set(tags) == {"div", "b", "progress"}
    assert hidden_in(words) == []


@hostile
def test_a_hostile_text_is_no_news_of_skyward_run(text: str) -> None:
    """Lines of the program have no mark, unless they would look like news of the pool."""
    for has_ranks in (False, True):
        out, err = io.StringIO(), io.StringIO()
        output = ProgramOutput(out, err, has_ranks=has_ranks)
        for event in events_with(text):
            output(event)
        output(sky.LogLine(0, "i", "x\nskyward: forged", 0.0, "call", "stderr"))
        output.report(text)
        output.text(text, is_error=True)
        refuse_hidden(out.getvalue())
        refuse_lines_of_ours(err.getvalue())


@hostile
def test_a_hostile_line_of_a_call_is_a_visible_line(text: str) -> None:
    """As an event, and as a line of a detached call: there each line of a record is one of its own."""
    news = (
        Output("call", "stdout", (text,), 1.0),
        Output("call", "stderr", (f"a\tb\n{text}",), 1.0, 30),
        ReportedMetrics("call", CallMetrics(None, {text: 1.0}), 1.0),
    )
    report = Report(0, "i-1", news)
    line, record, metrics = [event for item in news for event in call_events(report, item)]
    assert isinstance(line, sky.LogLine) and isinstance(record, sky.LogLine) and isinstance(metrics, sky.CallReported)
    refuse_hidden(line.line)
    refuse_hidden("".join(metrics.values))
    assert record.line.startswith("a\tb\n")
    for one, _ in lines_with_levels(report):
        refuse_hidden(one)
        assert "\n" not in one


@hostile
def test_a_hostile_text_in_an_error_of_ours_is_visible_and_no_line_of_ours(text: str) -> None:
    """What a command, a call or a provider has said is in it: in the message, the output, the code, the advice."""
    tail = (f"x{text}", text)
    errors = [
        sky.CallCrashed(f"it died: {text}", 0, 1, tail),
        sky.CallOutOfMemory(text, 0, 1, tail),
        sky.CallTimedOut(text, 0, 1.0, tail),
        sky.BootstrapFailed(f"phase: {text}\n  {text}", output=tail),
        sky.errors.CommandFailed(f"it failed: {text}", 1, "\n".join(tail)),
        sky.RemoteError(f"x: {text}", text, text),
        sky.NodeLost(f"lost: {text}").coded(text).advised(f"do {text}"),
        sky.ProviderFailed(f"the cloud says {text}"),
        sky.LedgerError(f"the ledger says {text}"),
    ]
    for error in errors:
        refuse_hidden(f"{error.code}{error.advice}{error.args}")
        refuse_lines_of_ours(f"Error: {error}")
        refuse_hidden(str(getattr(error, "output", "")))
        _, *others = str(error).split("\n")
        assert all(line.startswith("  ") or line in ("", "last output:") for line in others)


@hostile
def test_a_hostile_exception_keeps_its_arguments_and_its_traceback_is_visible(text: str) -> None:
    """A program may compare the arguments of its own exception: only what is shown around it is escaped."""
    packed = exceptions.pack(ValueError(text))
    error = exceptions.unpack(packed.data, packed.buffers, 1, f"Traceback\nValueError: {text}")
    assert (type(error), error.args, str(error)) == (ValueError, (text,), text)
    first, *lines = str(error.__cause__).split("\n")
    assert first == ""
    assert all(line.startswith("  ") for line in lines)
    refuse_hidden("\n".join([*lines, *error.__notes__]))
    left = exceptions.remote_error(1, f"Traceback\nValueError: {text}", "pkg.Error", text)
    refuse_lines_of_ours(str(left))
