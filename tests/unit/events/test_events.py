"""Events are values. Callbacks are called in order, may replace the event, and stop no other callback."""

import contextvars
import dataclasses
import logging
import re
import typing
from pathlib import Path
from typing import Any

import pytest

import skyward_core as sky
from skyward_core.events import events

EVENTS = [
    value
    for value in vars(events).values()
    if dataclasses.is_dataclass(value) and isinstance(value, type) and value.__module__ == events.__name__
]
PAGE = Path(__file__).parents[3] / "docs/events.md"
LINE = sky.LogLine(0, "i-1", "hello", 1.0)


def test_every_event_is_part_of_the_union() -> None:
    assert set(typing.get_args(sky.SkywardEvent.__value__)) == set(EVENTS)
    assert EVENTS
    for kind in EVENTS:
        assert getattr(sky, kind.__name__) is kind
        arguments = [1 for _ in dataclasses.fields(kind)]
        assert kind(*arguments) == kind(*arguments)
        assert hash(kind(*arguments)) == hash(kind(*arguments))
        assert kind.__dataclass_params__.frozen
        assert kind.__doc__ and not kind.__doc__.startswith(kind.__name__)


def test_the_page_of_events_has_each_event_with_its_fields() -> None:
    """In the order in which the class has them."""
    rows = re.findall(r"^\| `(\w+)` \| .+ \| (.*?) ?\|$", PAGE.read_text(), re.M)
    assert len(rows) == len(EVENTS)
    assert {name: re.findall(r"`(\w+)`", fields) for name, fields in rows} == {
        kind.__name__: [field.name for field in dataclasses.fields(kind)] for kind in EVENTS
    }


def test_composed_callbacks_are_called_in_order() -> None:
    seen: list[Any] = []

    def shout(event: Any) -> Any:
        return dataclasses.replace(event, line=event.line.upper())

    result = sky.compose(seen.append, shout, seen.append)(LINE)
    assert [event.line for event in seen] == ["hello", "HELLO"]
    assert result == seen[1]
    assert sky.compose()(LINE) == LINE


def test_a_failing_callback_is_reported_once_and_skipped(caplog: pytest.LogCaptureFixture) -> None:
    seen: list[Any] = []

    def broken(event: Any) -> None:
        raise ValueError("trouble")

    def also_broken(event: Any) -> None:
        raise KeyError("more")

    together = sky.compose(broken, also_broken, seen.append)
    with caplog.at_level(logging.ERROR, logger="skyward"):
        for _ in range(3):
            together(LINE)
    assert seen == [LINE] * 3
    assert [type(record.exc_info[1]) for record in caplog.records if record.exc_info] == [ValueError, KeyError]
    assert all("LogLine" in record.getMessage() for record in caplog.records)


def test_emit_reaches_the_registered_callback_only() -> None:
    seen: list[Any] = []
    sky.emit(LINE)
    with pytest.raises(ZeroDivisionError), sky.use_callback(seen.append):
        contextvars.Context().run(sky.emit, LINE)  # another thread has a context of its own
        sky.emit(LINE)
        raise ZeroDivisionError
    sky.emit(LINE)
    assert seen == [LINE]
