"""How a process opens and leaves a pool with a name, in which order, on a ledger and machines of the test."""

from types import SimpleNamespace
from typing import Any

import pytest

from skyward_core.errors import NodeLost, Unreachable
from skyward_core.ledger.names_policy import Join, NamedPool, NameState, Rent
from skyward_core.pool import named_sessions
from skyward_core.pool.named_sessions import open_named

ROW = NamedPool("nightly", "sky-1", {}, NameState.IN_USE, "a", 1, 0.0)


class Use:
    """A process as a client of a name that has a pool; `is_used` is whether others use it."""

    name = "nightly"

    def __init__(self, *, is_used: bool) -> None:
        self.is_used = is_used
        self.is_condemned = False
        self.steps: list[str] = []

    def claim(self, pool_id: str, _deadline: float) -> Rent | Join:
        self.steps.append("claim")
        return Rent(2) if self.is_condemned else Join(ROW)

    def give_up(self, pool_id: str) -> bool:
        self.steps.append("give up")
        self.is_condemned = not self.is_used
        return self.is_condemned

    def opened(self) -> None:
        self.steps.append("opened")


@pytest.fixture
def seconds(monkeypatch: pytest.MonkeyPatch) -> list[float]:
    """The pauses, which pass at once on a clock of their own."""
    pauses: list[float] = []
    clock = SimpleNamespace(monotonic=lambda: sum(pauses), sleep=pauses.append)
    monkeypatch.setattr(named_sessions, "time", clock)
    return pauses


@pytest.fixture
def lease(monkeypatch: pytest.MonkeyPatch) -> None:
    """The ledger has a lease of each pool."""
    monkeypatch.setattr(named_sessions, "find_lease", lambda pool_id: (pool_id, None))


def open_it(use: Use, attach: Any) -> Any:
    session = SimpleNamespace(share=lambda: use.steps.append("share"))
    return open_named(use, lambda _: session, attach, 60.0)  # type: ignore[arg-type,return-value]


@pytest.mark.usefixtures("lease")
@pytest.mark.parametrize("kind", [NodeLost, Unreachable])
def test_a_pool_whose_head_is_being_replaced_is_tried_again(kind: type[Exception], seconds: list[float]) -> None:
    use, trouble = Use(is_used=True), [kind("no answer"), kind("no answer")]

    def attach(*_: object) -> str:
        if trouble:
            raise trouble.pop()
        return "attached"

    assert open_it(use, attach) == "attached"
    assert use.steps == ["claim", "give up", "claim", "give up", "claim"]
    assert len(seconds) == 2


@pytest.mark.usefixtures("lease")
def test_a_pool_that_does_not_answer_in_time_raises_the_last_error(seconds: list[float]) -> None:
    use, count = Use(is_used=True), iter(range(1000))

    def attach(*_: object) -> str:
        raise NodeLost(f"no answer {next(count)}")

    with pytest.raises(NodeLost, match=r"no answer \d"):
        open_it(use, attach)
    assert 40 < sum(seconds) <= 60
    assert next(count) == len(seconds) + 1


@pytest.mark.usefixtures("lease")
def test_a_pool_that_nobody_uses_is_opened_anew_at_once(seconds: list[float]) -> None:
    use = Use(is_used=False)

    def attach(*_: object) -> str:
        raise NodeLost("its nodes have ended")

    open_it(use, attach)
    assert use.steps == ["claim", "give up", "claim", "share", "opened"]
    assert seconds == []
