"""Results that cannot be loaded here, pending calls in the place of results, and the events of calls without a result."""

import pytest

from skyward_core.engine.results import Callbacks
from tests.conftest import wait_until


def test_a_callback_that_fails_stops_no_other(caplog: pytest.LogCaptureFixture) -> None:
    """They run in their order; after the end of the thread in the thread that adds them."""
    callbacks, called = Callbacks(), list[int]()

    def fail() -> None:
        raise SystemExit

    for call in (lambda: called.append(1), fail, lambda: called.append(2)):
        callbacks.put(call)
    callbacks.close()
    callbacks.put(lambda: called.append(3))
    wait_until(lambda: len(called) == 3, "the callbacks")
    assert [number for number in called if number != 3] == [1, 2]
    assert "a callback of a call's future has failed" in caplog.text
