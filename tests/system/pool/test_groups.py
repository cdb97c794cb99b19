"""Broadcasts of groups: they run again as a whole after the loss of a node."""

import threading
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest

import skyward_core as sky
from skyward_core.pool import groups
from tests.unit.pool.test_groups import (
    Broadcasts,
)


@pytest.mark.parametrize("cause", [sky.NodeLost("node 1 is lost"), sky.CallCrashed("exit code -9")])
def test_the_cause_of_a_rank_that_failed_is_waited_for(cause: Exception, waits_at_cause: Callable[[], None]):
    """The other ranks notice a loss before this client does."""
    broadcasts = Broadcasts([sky.RankFailed("rank 1 is gone", 1), None], [1, 2])
    with ThreadPoolExecutor(1) as thread:
        running = thread.submit(broadcasts.results, 1)
        waits_at_cause()
        broadcasts.begun[0][1].set_exception(cause)
        if isinstance(cause, sky.NodeLost):
            assert running.result(60) == (1, 2)
        else:
            with pytest.raises(sky.CallCrashed, match="exit code -9"):
                running.result(60)


@pytest.fixture
def waits_at_cause(monkeypatch: pytest.MonkeyPatch) -> Callable[[], None]:
    """Return a function that waits until the group has only RankFailed, and waits for the cause."""
    reached = threading.Event()
    wait = groups.wait

    def observed(futures: Any, *args: Any, **kwargs: Any) -> Any:
        if args:
            reached.set()
        return wait(futures, *args, **kwargs)

    monkeypatch.setattr(groups, "wait", observed)

    def until() -> None:
        assert reached.wait(60)

    return until
