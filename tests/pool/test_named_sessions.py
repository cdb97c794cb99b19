"""How a process opens and leaves a pool with a name, in which order, on a ledger and machines of the test."""

from datetime import UTC, datetime
from decimal import Decimal
from types import SimpleNamespace
from typing import Any

import pytest

from skyward_core.errors import BudgetExceeded, NodeLost, Unreachable
from skyward_core.events.queue import EventQueue
from skyward_core.ledger.names_policy import Join, NamedPool, NameState, Rent
from skyward_core.machines.instances import Lease
from skyward_core.pool import named_sessions
from skyward_core.pool.named_sessions import leave_named, open_named
from skyward_core.session.attached import Attached

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

    is_let_go = False
    succession = None
    keep_warm = 600.0
    ledger = None
    spec = SimpleNamespace(lease_seconds=120.0)

    def leave(self, *, may_be_warm: bool = True) -> NameState:
        self.steps.append("leave")
        return NameState.IN_USE if self.is_used else NameState.WARM

    @property
    def is_last(self) -> bool:
        """Another process leaves right after this was read."""
        self.is_used = False
        return False

    def left(self) -> None:
        self.steps.append("left")

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


class Left(Attached):
    """An attachment without nodes."""

    def __init__(self, use: Use) -> None:
        lease = Lease(pool_id="sky-1", provider={}, created_at=datetime.now(UTC))
        super().__init__(lease, None, None, 120.0, 0, EventQueue(lambda _: None))
        self.is_running = True
        self._use = use

    def stop(self, reason: str) -> None:
        self._use.steps.append("stop")
        super().stop(reason)


@pytest.mark.parametrize("is_paid", [True, False])
def test_a_process_that_became_the_last_one_while_it_left_extends_the_leases(
    is_paid: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It had seen another user, who left at the same moment. It leaves without an error if that fails."""
    use = Use(is_used=True)

    def keep_warm(_: object, name: str, seconds: float) -> None:
        use.steps.append(f"keep {name} warm {seconds:.0f}")
        if not is_paid:
            raise BudgetExceeded("the account is empty", "team", Decimal(0))

    monkeypatch.setattr(named_sessions, "keep_warm", keep_warm)
    leave_named(Left(use), use)  # type: ignore[arg-type]
    assert use.steps == ["stop", "leave", "keep nightly warm 600", "left"]


def test_a_process_that_has_given_the_pool_up_still_ends_its_attachment(monkeypatch: pytest.MonkeyPatch) -> None:
    use = Use(is_used=True)
    monkeypatch.setattr(use, "is_let_go", True, raising=False)
    leave_named(Left(use), use)  # type: ignore[arg-type]
    assert use.steps == ["stop", "leave", "left"]
