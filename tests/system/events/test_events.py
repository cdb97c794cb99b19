"""Events are values. Callbacks are called in order, may replace the event, and stop no other callback."""

import threading
from typing import Any

import pytest

import skyward_core as sky
from tests.unit.events.test_events import LINE


def test_a_callback_belongs_to_its_context() -> None:
    """Another thread does not see the callback of this one, and an error in the block removes it."""
    seen: list[Any] = []
    with pytest.raises(ZeroDivisionError), sky.use_callback(lambda event: seen.append(event)):
        thread = threading.Thread(target=sky.emit, args=(LINE,))
        thread.start()
        thread.join()
        raise ZeroDivisionError
    sky.emit(LINE)
    assert seen == []
