"""The thread of recovery: it ends, and outlives its errors."""

import itertools
import threading
from collections.abc import Callable, Collection

import pytest

import skyward_core as sky
from skyward_core.engine.recovery import Recovery
from skyward_core.errors import PoolClosed
from skyward_core.machines.instances import Lease
from tests.engine.recovery_world import NODES, FakeMachines, World
from tests.waiting import wait_until


class Blocking(FakeMachines):
    """Machines that never start, until `stop`."""

    def __init__(self, world: World) -> None:
        super().__init__(world)
        self.is_waiting = threading.Event()
        self.stopped = threading.Event()

    def replace(self, rank: int, is_there: Callable[[], bool]) -> None:
        self._wait()

    def restart(self, heirs: Collection[str], dead: Collection[str]) -> Lease:
        self._wait()
        raise AssertionError

    def _wait(self) -> None:
        self.is_waiting.set()
        assert self.stopped.wait(30)
        raise PoolClosed("the pool is closing")


@pytest.fixture
def others() -> set[threading.Thread]:
    """Threads that existed before: a pool that tests share has its own recovery."""
    return set(threading.enumerate())


def threads_of_recovery(others: set[threading.Thread]) -> list[str]:
    mine = set(threading.enumerate()) - others
    return [thread.name for thread in mine if thread.name.startswith(("skyward-recovery", "skyward-replace"))]


@pytest.mark.parametrize("rank", [0, 1])
def test_closing_during_recovery_ends_all_threads(rank: int, others: set[threading.Thread]) -> None:
    """If recovery is stopped while it waits for a machine, it ends as soon as it is woken, and emits nothing."""
    world = World()
    machines = Blocking(world)
    recovery = world.recovery = Recovery(machines, world.cluster, NODES, 600.0, world.recorded)
    recovery.start()
    world.kill(rank, "gone")
    assert machines.is_waiting.wait(30)
    recovery.stop()
    machines.stopped.set()
    recovery.join()
    assert threads_of_recovery(others) == []
    assert world.recorded.of(sky.Error) == []
    assert world.cluster.given_up == []


class Held(Blocking):
    """The same, but a turn waits too, until `go`."""

    def __init__(self, world: World) -> None:
        super().__init__(world)
        self.is_in_turn = threading.Event()
        self.go = threading.Event()

    def has_ended(self, rank: int) -> bool:
        self.is_in_turn.set()
        assert self.go.wait(30)
        return super().has_ended(rank)


def test_nothing_starts_after_recovery_is_stopped(others: set[threading.Thread]) -> None:
    """A turn that runs when recovery is stopped starts no thread, because `join` could not know of it."""
    world = World()
    machines = Held(world)
    recovery = world.recovery = Recovery(machines, world.cluster, NODES, 600.0, world.recorded)
    recovery.start()
    world.kill(1, "gone")
    assert machines.is_in_turn.wait(30)
    recovery.stop()
    machines.go.set()
    try:
        recovery.join()
        assert (threads_of_recovery(others), machines.is_waiting.is_set()) == ([], False)
    finally:
        machines.stopped.set()


def test_an_error_in_a_turn_does_not_end_recovery() -> None:
    """A turn that fails is repeated, and its error is emitted once, not four times a second."""
    world = World()
    turns = itertools.count()
    real = world.machines.has_ended

    def fail(rank: int) -> bool:
        if next(turns) < 3:
            raise OSError("the log cannot be read")
        return real(rank)

    world.machines.has_ended = fail  # type: ignore[method-assign]
    world.recovery = Recovery(world.machines, world.cluster, NODES, 600.0, world.recorded)
    world.recovery.start()
    try:
        world.kill(1, "gone")
        wait_until(world.all_are_there, "the replacement")
    finally:
        world.recovery.stop()
        world.recovery.join()
    assert len(world.recorded.of(sky.Error)) == 1
