"""Events are values. Callbacks are called in order, may replace the event, and stop no other callback."""

import dataclasses
import logging
import typing
from typing import Any

import pytest

import skyward_core as sky
from skyward_core.events import events

EVENTS = [
    value
    for value in vars(events).values()
    if dataclasses.is_dataclass(value) and isinstance(value, type) and value.__module__ == events.__name__
]
LINE = sky.LogLine(0, "i-1", "hello", 1.0)


def test_every_event_is_part_of_the_union() -> None:
    """`SkywardEvent` lists every event class, and `skyward_core` exports each."""
    assert set(typing.get_args(sky.SkywardEvent.__value__)) == set(EVENTS)
    assert len(EVENTS) == 28
    assert all(getattr(sky, kind.__name__) is kind for kind in EVENTS)


@pytest.mark.parametrize("kind", EVENTS, ids=lambda kind: kind.__name__)
def test_events_are_values(kind: type) -> None:
    """Events are frozen, compare by value and have a docstring of their own."""
    arguments = [1 for _ in dataclasses.fields(kind)]
    event = kind(*arguments)
    assert event == kind(*arguments)
    assert hash(event) == hash(kind(*arguments))
    for field in dataclasses.fields(kind):
        with pytest.raises(dataclasses.FrozenInstanceError):
            setattr(event, field.name, 2)
    assert kind.__doc__ and not kind.__doc__.startswith(kind.__name__)


def test_composed_callbacks_are_called_in_order() -> None:
    """`compose` calls each callback with the result of the one before; None passes the event on unchanged."""
    seen: list[Any] = []

    def note(event: Any) -> None:
        seen.append(event)

    def shout(event: Any) -> Any:
        return dataclasses.replace(event, line=event.line.upper())

    result = sky.compose(note, shout, note)(LINE)
    assert [event.line for event in seen] == ["hello", "HELLO"]
    assert result is not None
    assert result == seen[1]
    assert sky.compose()(LINE) == LINE


def test_a_failing_callback_is_reported_once_and_skipped(caplog: pytest.LogCaptureFixture) -> None:
    """The first failure of each callback is logged with its traceback; the others are called anyway."""
    seen: list[Any] = []

    def broken(event: Any) -> None:
        raise ValueError("trouble")

    def also_broken(event: Any) -> None:
        raise KeyError("more")

    together = sky.compose(broken, also_broken, lambda event: seen.append(event))
    with caplog.at_level(logging.ERROR, logger="skyward"):
        for _ in range(3):
            together(LINE)
    assert seen == [LINE] * 3
    assert [type(record.exc_info[1]) for record in caplog.records if record.exc_info] == [ValueError, KeyError]
    assert all("LogLine" in record.message or "LogLine" in record.getMessage() for record in caplog.records)


def test_emit_reaches_the_registered_callback_only() -> None:
    """`emit` without a callback does nothing; inside `use_callback` it calls that callback, and after it no more."""
    seen: list[Any] = []
    sky.emit(LINE)
    with sky.use_callback(lambda event: seen.append(event)):
        sky.emit(LINE)
    sky.emit(LINE)
    assert seen == [LINE]
