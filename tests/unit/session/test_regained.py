"""The process that has rented a pool is its steward again: beside its session, which stays that of a client."""

from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import pytest

from skyward_core.errors import NodeLost, SkywardError
from skyward_core.session.regained import RegainedStewardship, regaining
from skyward_core.session.steward_guard import StewardGuard


class Process:
    """A process whose session has rented; `steps` is what was done, in order."""

    def __init__(self) -> None:
        self.steps: list[str] = []
        self.trouble: SkywardError | None = None
        self.guard = StewardGuard(10.0, lambda: None)
        self.session: Any = SimpleNamespace(
            guard=self.guard,
            events=SimpleNamespace(log=lambda *_: None),
            step_down=lambda: self.steps.append("step down"),
            let_go=lambda reason, _: self.steps.append(f"let go: {reason}"),
        )
        self.end_session: Callable[[str, SkywardError | None], object] | None = None
        self.on_vacant: Any = None
        self.on_lost: Any = None

    def attach(self) -> Any:
        self.steps.append("attach")
        return SimpleNamespace(stop=lambda _: self.steps.append("detach"))

    def new(self, _: Any, end_session: Callable[[str, SkywardError | None], object]) -> Any:
        self.end_session = end_session
        step = self.steps.append
        return SimpleNamespace(start=self._start, leave=lambda: step("leave"), lose=lambda: step("lose"))

    def _start(self) -> None:
        self.steps.append("start")
        if self.trouble is not None:
            raise self.trouble


@pytest.mark.parametrize("end", ["leave", "lose", None], ids=["left", "lost", "not adopted"])
def test_a_regained_stewardship_ends_with_its_connection(end: str | None) -> None:
    """A limit that it reaches ends the session too."""
    process = Process()
    it = RegainedStewardship(process.session, process.attach, process.new)
    if end is None:
        process.trouble = NodeLost("no node answers")
        with pytest.raises(NodeLost):
            it.start()
        assert process.steps == ["attach", "start", "detach"]
        return
    it.start()
    getattr(it, end)()
    assert process.steps == ["attach", "start", end, "detach"]
    assert process.end_session is not None
    process.end_session("the money is used up", None)
    assert process.steps[-1] == "let go: the money is used up"


def test_a_process_that_was_replaced_ends_both_stewardships(monkeypatch: pytest.MonkeyPatch) -> None:
    """The regained one too, if the session cannot step down; and if it was replaced right after the opening."""
    process = Process()
    successor = regaining(process.session, process, process.attach, process.new)  # type: ignore[arg-type]
    monkeypatch.setattr(successor, "lose", lambda: process.steps.append("lose"))

    def fail() -> None:
        raise OSError("no thread can be started")

    process.on_lost()
    process.session.step_down = fail
    with pytest.raises(OSError, match="no thread"):
        process.on_lost()
    assert process.steps == ["step down", "lose", "lose"]
    early = Process()
    early.guard.begin(1, 0.0)
    early.guard.lose()
    regaining(early.session, early, early.attach, early.new)  # type: ignore[arg-type]
    assert early.steps == ["step down"]
