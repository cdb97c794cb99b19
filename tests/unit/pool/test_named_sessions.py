"""How a process opens and leaves a pool with a name, in which order, on a ledger and machines of the test."""

import logging
import math
from datetime import UTC, datetime
from decimal import Decimal
from types import SimpleNamespace
from typing import Any

import pytest

from skyward_core.errors import BudgetExceeded, LedgerError, NodeLost, Unreachable
from skyward_core.events.queue import EventQueue
from skyward_core.ledger.names_policy import Join, NamedPool, NameState, NotSteward, Rent
from skyward_core.machines.instances import Lease
from skyward_core.pool import named_sessions
from skyward_core.pool.named_sessions import leave_named, open_named
from skyward_core.providers.local import Local
from skyward_core.session.attached import Attached
from skyward_core.session.named_session import NamedSession
from skyward_core.spec import PoolSpec
from skyward_core.work import NO_WORK

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

    def report_unreachable(self, pool_id: str) -> bool:
        self.steps.append("unreachable")
        self.is_condemned = not self.is_used
        return self.is_condemned

    has_failed_to_leave = False
    succession = None
    keep_warm = 600.0
    ledger = None
    log = logging.getLogger("skyward").log
    spec = SimpleNamespace(lease_seconds=120.0)

    mark = "a"

    def settle_the_dead(self) -> None: ...

    def say_what_stays(self, pool_id: str) -> None:
        self.steps.append("say")

    def leave(self, *, may_be_warm: bool = True, warm_seconds: float = math.inf) -> NameState:
        self.steps.append("leave")
        return NameState.IN_USE if self.is_used else NameState.WARM

    def is_last(self) -> bool:
        """Another process leaves right after this was read."""
        self.is_used = False
        return False

    def end_pool(self, pool_id: str) -> None:
        self.steps.append(f"end {pool_id}")

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
    monkeypatch.setattr(named_sessions, "find_lease", lambda pool_id, **_: (pool_id, None))


def open_it(use: Use, attach: Any) -> Any:
    session = SimpleNamespace(share=lambda: use.steps.append("share"))
    return open_named(use, lambda _: session, attach, 60.0)  # type: ignore[arg-type,return-value]


@pytest.mark.usefixtures("lease")
@pytest.mark.parametrize("kind", [NodeLost, Unreachable])
def test_a_pool_that_others_use_and_that_does_not_answer_is_tried_again(
    kind: type[Exception], seconds: list[float]
) -> None:
    """Its head may be being replaced. After `provision_timeout` the last error is raised."""
    use, trouble = Use(is_used=True), [kind("no answer"), kind("no answer")]

    def attach(*_: object) -> str:
        if trouble:
            raise trouble.pop(0)
        return "attached"

    assert open_it(use, attach) == "attached"
    assert use.steps == ["claim", "unreachable", "claim", "unreachable", "claim"]
    assert len(seconds) == 2
    trouble += [kind(f"no answer {number}") for number in range(1000)]
    seconds.clear()
    with pytest.raises(kind, match=r"no answer \d"):
        open_it(use, attach)
    assert 40 < sum(seconds) <= 60


@pytest.mark.usefixtures("lease")
def test_a_pool_that_nobody_uses_is_opened_anew_at_once(seconds: list[float]) -> None:
    use = Use(is_used=False)

    def attach(*_: object) -> str:
        raise NodeLost("its nodes have ended")

    open_it(use, attach)
    assert use.steps == ["claim", "unreachable", "claim", "share", "opened"]
    assert seconds == []


class Left(Attached):
    """An attachment without nodes."""

    def __init__(self, use: Use) -> None:
        lease = Lease(pool_id="sky-1", provider={}, created_at=datetime.now(UTC))
        super().__init__(lease, None, None, 120.0, 0, EventQueue(lambda _: None))
        self.is_running = True
        self._by = use

        self.transports.begin_to_leave = lambda mark: use.steps.append(f"mark {mark}")  # type: ignore[method-assign]

    def stop(self, reason: str) -> None:
        self._by.steps.append("stop")


@pytest.fixture
def extending(monkeypatch: pytest.MonkeyPatch) -> tuple[Use, list[Exception]]:
    """A process that becomes the last one while it leaves, and the errors with which the extension fails, one by one."""
    use, trouble = Use(is_used=True), list[Exception]()

    def keep_warm(_: object, name: str, seconds: float) -> None:
        use.steps.append(f"keep {name} warm {seconds:.0f}")
        if trouble:
            raise trouble.pop(0)

    monkeypatch.setattr(named_sessions, "keep_warm", keep_warm)
    monkeypatch.setattr(named_sessions, "end_in_time", lambda *words: use.steps.append(f"end {words[-1]} in time"))
    return use, trouble


EXTENDED, IN_TIME = "keep nightly warm 600", ["end a in time", "say"]
UNREACHABLE, ENDED = Unreachable("no answer"), NodeLost("it has ended")
NOT_PAID = BudgetExceeded("the account is empty", "team", Decimal(0))


@pytest.mark.parametrize(
    ("failures", "is_used_again", "steps", "pauses"),
    [
        ([], False, [EXTENDED], 0),
        ([LedgerError("no answer"), UNREACHABLE], False, [EXTENDED] * 3, 2),
        ([ENDED], False, [EXTENDED], 0),
        ([NOT_PAID], False, [EXTENDED, "unreachable", "end sky-1"], 0),
        ([NOT_PAID], True, [EXTENDED], 0),
    ],
    ids=["extended", "tried again", "it has ended", "not paid for", "not paid for, but used again"],
)
def test_a_process_that_became_the_last_one_while_it_left_extends_the_leases(
    failures: list[Exception],
    is_used_again: bool,
    steps: list[str],
    pauses: int,
    extending: tuple[Use, list[Exception]],
    seconds: list[float],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """It had seen another user, who left at the same moment. A warm pool that is not paid for is ended."""
    use, trouble = extending
    trouble += failures
    if is_used_again:
        monkeypatch.setattr(use, "report_unreachable", lambda _: False)
    leave_named(Left(use), use)  # type: ignore[arg-type]
    assert use.steps == ["mark a", "stop", "leave", *steps, *IN_TIME, "left"]
    assert len(seconds) == pauses


def test_leases_that_cannot_be_extended_end_the_nodes(
    extending: tuple[Use, list[Exception]], seconds: list[float], caplog: pytest.LogCaptureFixture
) -> None:
    """The process tries for some time, and says until when the pool lives. It ends nothing."""
    use, trouble = extending
    trouble += [UNREACHABLE] * 1000
    leave_named(Left(use), use)  # type: ignore[arg-type]
    assert 15 < sum(seconds) <= named_sessions.EXTEND_SECONDS
    assert set(use.steps) == {"mark a", "stop", "leave", EXTENDED, *IN_TIME, "left"}
    assert "120 s after it was left at the latest: no answer" in caplog.text


def test_a_process_that_has_given_the_pool_up_still_ends_its_attachment() -> None:
    use = Use(is_used=True)
    use.has_failed_to_leave = True
    leave_named(Left(use), use)  # type: ignore[arg-type]
    assert use.steps == ["stop", "leave", "say", "left"]


class Replaced(NamedSession):
    """The session of an opener that is the steward when it looks, and is not when it leaves its machines."""

    def __init__(self, use: Use) -> None:
        keeper: Any = SimpleNamespace(term=None)
        super().__init__(PoolSpec(name="nightly"), [Local()], None, NO_WORK, None, "sky-1", keeper, NO_WORK)
        self._by = use

    @property
    def is_running(self) -> bool:
        """Always."""
        return True

    def is_steward(self) -> bool:
        return True

    def detach(self, lease_seconds: float) -> Lease:
        raise NotSteward("another process keeps the pool now")

    def leave_to_lease(self, reason: str, error: Exception | None = None) -> None:
        self._by.steps.append("leave to lease")


@pytest.mark.parametrize("is_last", [True, False])
def test_an_opener_that_is_replaced_while_it_leaves_leaves_as_a_client(
    is_last: bool, extending: tuple[Use, list[Exception]], monkeypatch: pytest.MonkeyPatch
) -> None:
    """No error reaches the program, and the machines are not ended."""
    use, _ = extending
    monkeypatch.setattr(Use, "is_last", lambda self: bool(self.steps.append("look")))
    use.is_used = not is_last
    if not is_last:
        monkeypatch.setattr(use, "leave", lambda **_: use.steps.append("leave") or NameState.IN_USE)
    leave_named(Replaced(use), use)  # type: ignore[arg-type]
    stays = [EXTENDED, *IN_TIME] if is_last else ["say"]
    assert use.steps == ["look", "look", "leave to lease", "leave", *stays, "left"]
