"""An attached process becomes the steward when there is none: in a thread, once at a time, and not again at once."""

import logging
import threading
from types import SimpleNamespace
from typing import Any

import pytest

from skyward_core.errors import NodeLost
from skyward_core.session import successor
from skyward_core.session.successor import Successor
from tests.conftest import wait_until


class Pool:
    """A process as a client of a name, and what it keeps; `steps` is what was done, in order."""

    name = "nightly"

    def __init__(self) -> None:
        self.steps: list[str] = []
        self.can_take = True
        self.trouble: Exception | None = None
        self.may_start = threading.Event()
        self.may_start.set()
        self.guard = SimpleNamespace(is_lost=False)
        self.on_vacant: Any = None
        self.on_lost: Any = None
        self.logged: list[str] = []
        self.successor = Successor(self, lambda: self, self.log)  # type: ignore[arg-type]

    def log(self, level: int, text: str, *values: object, error: Exception | None = None) -> None:
        self.logged.append(logging.getLevelName(level) + ": " + text % values)

    def take_stewardship(self) -> bool:
        self.steps.append("take")
        return self.can_take

    def resign(self) -> None:
        self.steps.append("resign")

    def start(self) -> None:
        assert self.may_start.wait(30)
        self.steps.append("start")
        if self.trouble is not None:
            raise self.trouble

    def keep_warm(self, seconds: float) -> None:
        self.steps.append(f"keep warm {seconds:.0f}")

    def note_cost(self) -> None:
        self.steps.append("note cost")

    def leave(self) -> None:
        self.steps.append("leave")

    def lose(self) -> None:
        self.steps.append("lose")

    def await_steps(self, *steps: str) -> None:
        wait_until(lambda: self.steps == list(steps) and not running(), f"{steps}, not {self.steps}", 30)


def running() -> list[threading.Thread]:
    return [thread for thread in threading.enumerate() if thread.name == "skyward-adopt"]


@pytest.fixture
def pool() -> Pool:
    return Pool()


def test_a_vacant_pool_is_adopted_and_left_at_the_end(pool: Pool) -> None:
    pool.on_vacant()
    pool.await_steps("take", "start")
    assert pool.successor.keep_warm(60)
    pool.successor.note_cost()
    pool.successor.close()
    assert pool.steps == ["take", "start", "keep warm 60", "note cost", "leave", "resign"]


def test_if_another_process_was_faster_nothing_is_adopted(pool: Pool) -> None:
    pool.can_take = False
    pool.on_vacant()
    pool.await_steps("take")
    assert not pool.successor.keep_warm(60)
    pool.successor.note_cost()
    pool.successor.close()
    assert pool.steps == ["take", "resign"]


def test_the_renewal_does_not_wait_for_an_adoption(pool: Pool) -> None:
    """And begins no second one."""
    pool.may_start.clear()
    pool.on_vacant()
    pool.on_vacant()
    pool.may_start.set()
    pool.await_steps("take", "start")


def test_a_process_that_cannot_adopt_resigns_and_leaves_it_to_others_for_a_while(
    pool: Pool, monkeypatch: pytest.MonkeyPatch
) -> None:
    pool.trouble = NodeLost("no node answers")
    monkeypatch.setattr(successor, "time", SimpleNamespace(monotonic=lambda: seconds))
    seconds = 1000.0
    pool.on_vacant()
    pool.await_steps("take", "start", "resign")
    assert pool.logged[0].startswith("WARNING: the pool 'nightly' has no process that replaces its nodes")
    assert pool.logged[0].endswith("no node answers")
    seconds = 1004.0
    pool.on_vacant()
    assert pool.steps == ["take", "start", "resign"]
    pool.trouble, seconds = None, 1005.0
    pool.on_vacant()
    pool.await_steps("take", "start", "resign", "take", "start")


def test_a_pool_that_another_process_keeps_now_is_kept_no_more(pool: Pool) -> None:
    pool.on_vacant()
    pool.await_steps("take", "start")
    pool.on_lost()
    pool.await_steps("take", "start", "lose")
    pool.successor.close()
    assert pool.steps == ["take", "start", "lose", "resign"]


def test_a_pool_that_was_lost_during_the_adoption_is_not_kept(pool: Pool) -> None:
    pool.guard.is_lost = True
    pool.on_vacant()
    pool.await_steps("take", "start", "lose")
    assert not pool.successor.keep_warm(1)


def test_a_loss_is_not_forgotten_while_the_pool_is_adopted(pool: Pool) -> None:
    """The renewal reports it once."""
    pool.may_start.clear()
    pool.on_vacant()
    pool.on_lost()
    pool.may_start.set()
    pool.await_steps("take", "start", "lose")


def test_nothing_is_adopted_after_the_process_has_left(pool: Pool) -> None:
    pool.successor.close()
    pool.on_vacant()
    assert pool.steps == ["resign"]
    assert not running()


def test_a_process_that_leaves_waits_for_its_adoption(pool: Pool) -> None:
    pool.may_start.clear()
    pool.on_vacant()
    wait_until(lambda: pool.steps == ["take"], "the adoption")
    closing = threading.Thread(target=pool.successor.close)
    closing.start()
    pool.may_start.set()
    closing.join()
    assert pool.steps == ["take", "start", "leave", "resign"]
