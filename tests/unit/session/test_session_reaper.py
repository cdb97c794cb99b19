"""The reaper of an open pool, which may be killed."""

from types import SimpleNamespace
from typing import Any

import pytest

import skyward_core as sky
from skyward_core.session import departure as session_reaper
from skyward_core.session.departure import SessionReaper


@pytest.mark.parametrize("has_detached", [False, True])
def test_a_reaper_that_was_killed_is_started_again(has_detached: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """While the pool is open. The new one learns whether the pool lives by its lease."""
    steps: list[str] = []
    started: list[Any] = []

    def start(_: object) -> Any:
        started.append(
            SimpleNamespace(is_alive=True, leave=lambda: None, live_by_lease=lambda: steps.append("lives by its lease"))
        )
        return started[-1]

    monkeypatch.setattr(session_reaper.Reaper, "start", start)
    monkeypatch.setattr(session_reaper.ReaperInput, "of", lambda *_: object())
    reaper = SessionReaper("sky-1", lambda *_: None)
    reaper.start([sky.Local()], "sqlite://")
    reaper.has_detached = has_detached
    reaper.restart_if_gone(lambda: True)
    assert len(started) == 1
    started[0].is_alive = False
    reaper.restart_if_gone(lambda: False)
    assert len(started) == 1
    reaper.restart_if_gone(lambda: True)
    assert (len(started), reaper.reaper) == (2, started[1])
    assert steps == ["lives by its lease"] * has_detached
