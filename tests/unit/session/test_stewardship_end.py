"""A stewardship that reaches a limit: in which order the calls, the machines and the stewardship end."""

import threading
from types import SimpleNamespace
from typing import Any

import pytest

from skyward_core.session import stewardship
from skyward_core.session.stewardship import Stewardship


class Keeping(Stewardship):
    """A stewardship without machines; `steps` is what it does, in order."""

    def __init__(self, steps: list[str]) -> None:
        self._ending = threading.RLock()
        self._ended = threading.Event()
        self._pool_id, self._log = "sky-1", lambda *_: None
        self._emitter: Any = SimpleNamespace(emit=lambda _: None)
        self._recovery: Any = SimpleNamespace(stop=lambda: None)
        self._use: Any = SimpleNamespace(
            begin_to_end=lambda: steps.append("closing"), resign=lambda: steps.append("resign")
        )
        self._attached: Any = SimpleNamespace(cluster=object(), end=lambda *_: steps.append("end the machines"))
        self._on_end = lambda *_: steps.append("let the session go")


def test_the_session_learns_of_a_limit_before_the_machines_end(monkeypatch: pytest.MonkeyPatch) -> None:
    """Else its calls are repeated on nodes that end, and raise NodeLost instead of the error of the limit."""
    monkeypatch.setattr(stewardship, "note_all", lambda *_: None)
    steps: list[str] = []
    Keeping(steps).stop("the money is used up")
    assert steps == ["closing", "let the session go", "end the machines", "resign"]
