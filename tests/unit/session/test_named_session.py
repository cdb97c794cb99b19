"""The session of the process that has rented a pool with a name, at a limit."""

from types import SimpleNamespace
from typing import Any, override

import pytest

from skyward_core.errors import SkywardError
from skyward_core.session.named_session import NamedSession
from skyward_core.session.state import Claims, SessionState


class Opener(NamedSession):
    """A session that does nothing when it is stopped."""

    def __init__(self, steps: list[str], state: SessionState) -> None:
        self._claims = Claims()
        self._claims.state = state
        self._steps = steps
        self.guard: Any = SimpleNamespace(check=lambda: None)
        self._use: Any = SimpleNamespace(
            begin_to_end=lambda: steps.append("closing"), resign=lambda: steps.append("resign")
        )

    def reach_limit(self) -> None:
        self._stop_at_limit("the money is used up", None)

    @override
    def stop(self, reason: str, error: SkywardError | None = None) -> None:
        self._steps.append(f"ours: {self._claims.claim_stop(reason, error)}")


@pytest.mark.parametrize(
    ("state", "is_ours"), [(SessionState.OPEN, True), (SessionState.DETACHING, False), (SessionState.LEAVING, False)]
)
def test_a_session_that_leaves_at_its_limit_stays_the_steward_until_it_has_left(
    state: SessionState, is_ours: bool
) -> None:
    """Its leave, in another thread, decides whether the pool goes on: `closing` without a steward would end it."""
    steps: list[str] = []
    Opener(steps, state).reach_limit()
    assert steps == ["closing", f"ours: {is_ours}", *["resign"] * is_ours]
