"""One session of a pool: which end wins when two threads end it in different ways, and the message at the end."""

import contextlib
import logging
import threading
from collections.abc import Generator, Iterator
from datetime import UTC, datetime
from types import SimpleNamespace
from typing import Any

import pytest

import skyward_core as sky
from skyward_core.events.events import CostFinal
from skyward_core.machines.instances import Lease
from skyward_core.session import departure
from skyward_core.session.session import Session
from skyward_core.session.state import SessionState
from tests.conftest import RecordedEvents

OVER_BUDGET = sky.BudgetExceeded("the money is used up: the pool has closed", "team")


class World:
    """An open pool whose parts are fakes, except for its states; it records the actions in order."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.done: list[str] = []
        self.recorded = RecordedEvents()
        self.opened = opened = Session(sky.PoolSpec.of(display="quiet", lease_seconds=60), [sky.Local()], self.recorded)
        self.hooks: dict[str, Any] = {}
        """What happens during each action, by the action's name."""
        do = self.do
        lease = Lease(
            pool_id=opened.pool_id, provider={}, nodes=(), scheduler="tls://127.0.0.1:1", created_at=datetime.now(UTC)
        )
        opened.machines = SimpleNamespace(  # type: ignore[assignment]
            lease=lease,
            stop=lambda: None,
            release=lambda: do("released"),
            launch_no_more=lambda: None,
            may_be_left=True,
            end_now=lambda: None,
            leave=lambda: None,
        )
        opened._engine.cluster = SimpleNamespace(
            owner=SimpleNamespace(connection=None),
            close=lambda error: do(f"closed with {type(error).__name__}"),
            leave=lambda _: do("left"),
            take_sample=lambda: None,
        )  # type: ignore[assignment]
        opened._engine.recovery = SimpleNamespace(stop=lambda: None, join=lambda: None)  # type: ignore[assignment]
        opened._bookkeeping.journal = SimpleNamespace(live_by_lease=lambda _: do("ledger updated"), note=lambda: None)  # type: ignore[assignment]
        monkeypatch.setattr(opened._bookkeeping, "close_journal", lambda: do("written down"))
        monkeypatch.setattr(opened._bookkeeping, "paid_for", self._paid_for)
        monkeypatch.setattr(opened.meter, "final", lambda: CostFinal(1.0, 1.0, 1.0, 0, 1, 0.0))
        monkeypatch.setattr(departure, "detached_nodes", self._living_alone)
        opened._claims.state = SessionState.OPEN

    def do(self, what: str) -> None:
        self.done.append(what)
        if what in self.hooks:
            self.hooks.pop(what)()

    @contextlib.contextmanager
    def _paid_for(self, seconds: float) -> Generator[float]:
        yield seconds

    @contextlib.contextmanager
    def _living_alone(self, *_: Any) -> Generator[None]:
        self.do("nodes informed")
        try:
            yield
        except BaseException:
            self.do("nodes informed again")
            raise

    def in_a_thread(self, what: Any, *given: Any) -> None:
        """Run this in the clock's thread now, and wait for it."""
        thread = threading.Thread(target=what, args=given)
        thread.start()
        thread.join(60)
        assert not thread.is_alive()

    def stop(self) -> None:
        """Do what the clock does when the money is used up."""
        self.in_a_thread(self.opened.stop, str(OVER_BUDGET), OVER_BUDGET)


@pytest.fixture
def world(monkeypatch: pytest.MonkeyPatch) -> Iterator[World]:
    """A pool that is open."""
    world = World(monkeypatch)
    yield world
    world.opened.events.close()
    world.opened.events.flush()


GIVEN_BACK = ["closed with BudgetExceeded", "released", "written down"]


@pytest.mark.parametrize("moment", ["before", "nodes informed"])
def test_a_pool_whose_money_is_used_up_is_not_detached(world: World, moment: str) -> None:
    """Until the transaction commits, the owner can end the pool: the nodes receive their end again, the machines end,
    and no lease is returned.
    """
    if moment == "before":
        world.stop()
    else:
        world.hooks[moment] = world.stop
    with pytest.raises(sky.BudgetExceeded, match="used up"):
        world.opened.detach(600)
    informed = [] if moment == "before" else ["nodes informed", "nodes informed again"]
    assert world.done == [*informed, *GIVEN_BACK]
    assert (world.opened.is_running, world.opened.is_released) == (False, True)
    assert world.opened.events.flush()
    assert len(world.recorded.of(CostFinal)) == 1


def test_a_pool_that_was_detached_is_not_stopped(world: World) -> None:
    """After the transaction has committed, no thread ends the machines of a lease, and the calls of other clients
    continue.
    """
    world.hooks["ledger updated"] = world.stop
    lease = world.opened.detach(600)
    assert lease.expires_at is not None
    world.stop()
    world.opened.release()
    assert world.done == ["nodes informed", "ledger updated", "left"]
    assert world.opened.why_ended is None
    assert world.opened.is_released


def test_a_detach_that_fails_leaves_the_pool_open(world: World) -> None:
    for error, moment in (
        (sky.Unreachable("node 1 does not answer"), "nodes informed"),
        (KeyboardInterrupt(), "nodes informed"),
        (sky.LedgerError("the disk is full"), "ledger updated"),
    ):

        def fails(error: BaseException = error) -> None:
            raise error

        world.hooks[moment] = fails
        with pytest.raises(type(error)):
            world.opened.detach(600)
        assert world.opened.is_running
    world.opened.stop("the pool was closed")
    assert world.done[-3:] == ["closed with PoolClosed", "released", "written down"]


@pytest.mark.parametrize("moment", ["nodes informed", "ledger updated"])
def test_a_signal_handler_may_close_a_pool_that_is_being_detached(world: World, moment: str) -> None:
    """It runs in the thread that detaches. Neither waits for the other, and no lease of ended machines is returned."""
    world.hooks[moment] = lambda: world.opened.stop("the pool was closed")
    with pytest.raises(sky.PoolClosed, match="closed while it was detached"):
        world.opened.detach(600)
    assert not world.opened.is_running
    assert "released" in world.done


def test_a_pool_that_is_to_be_terminated_is_not_detached(world: World) -> None:
    """A kill hook may run during the detach."""
    world.hooks["nodes informed"] = world.opened.terminate_now
    with pytest.raises(sky.PoolClosed, match="terminate_now"):
        world.opened.detach(600)
    assert world.done == ["nodes informed", "nodes informed again"]


def test_a_close_that_fails_at_the_programs_end_is_one_clear_line(
    world: World, caplog: pytest.LogCaptureFixture
) -> None:
    """The line names the machines that are left and what ends them, in place of the interpreter's traceback.

    Looks inside: the interpreter calls it when it ends.
    """

    def fails() -> None:
        raise sky.InstancesLeft("2 machines are not confirmed gone: i-1, i-2", ("i-1", "i-2"))

    machines: Any = world.opened.machines
    machines.may_be_left_to_their_lease = False
    machines.release = fails
    with pytest.raises(sky.InstancesLeft):
        world.opened.stop("the pool was closed")
    world.opened._at_exit()
    (record,) = [record for record in caplog.records if record.levelno >= logging.ERROR]
    assert "2 machines are not confirmed gone: i-1, i-2" in record.getMessage()
    assert "skyward sweep" in record.getMessage()
    assert record.exc_info is None


def test_an_interrupted_teardown_names_the_next_step(world: World) -> None:
    """A notebook goes on after an interrupt: the exception and an event say that the machines may still run."""

    def interrupts() -> None:
        raise KeyboardInterrupt

    world.hooks["released"] = interrupts
    with pytest.raises(KeyboardInterrupt) as caught:
        world.opened.stop("the pool was closed")
    assert world.opened.events.flush()
    (event,) = world.recorded.of(sky.Error)
    assert "close the pool again" in event.message
    assert caught.value.__notes__ == [event.message]
    assert not world.opened.is_released
    world.opened.release()
    assert world.opened.is_released
    assert world.done == ["closed with PoolClosed", "released", "released", "written down"]
