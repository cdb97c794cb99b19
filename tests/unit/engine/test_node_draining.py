"""What a node that is to leave still has, by the client's own dispatcher."""

from collections.abc import Callable
from typing import Any

import pytest

from skyward_core.engine import actions as do
from skyward_core.engine.broadcast_ranks import BroadcastRanks
from skyward_core.engine.node_draining import NodeDraining
from tests.engine.model import LARGE
from tests.unit.engine.test_dispatcher import Pool, entry, value


class Owner:
    """Does at once what the engine's thread would do."""

    def __init__(self, pool: Pool) -> None:
        self.dispatcher = pool.dispatcher

    def run(self, work: Callable[[], Any], timeout_seconds: float) -> Any:
        return work()


def draining_of(pool: Pool) -> tuple[NodeDraining, list[str]]:
    """A draining whose scheduler knows of no call; and what it was asked."""
    owner: Any = Owner(pool)
    asked = list[str]()

    def hold(rank: int) -> int:
        asked.append("hold")
        return 0

    def ask(operation: str, *args: Any, **kwargs: Any) -> int:
        asked.append(operation.removeprefix("skyward_"))
        return 0

    return NodeDraining(owner, BroadcastRanks(range(2)), hold, ask), asked


@pytest.mark.parametrize(("worker", "bound"), [("1-0", 1), (None, 0)])
def test_a_call_counts_from_the_choice_of_its_node_on(worker: str | None, bound: int) -> None:
    """Its large arguments go there first, and the scheduler does not know it yet. Until its end the node stays."""
    pool = Pool(workers=["1-0"])
    draining, asked = draining_of(pool)
    pool.submit(entry("a", arguments=LARGE, worker=worker))
    (upload,) = pool.take(do.Upload)
    assert draining.drain(1) == (1, bound)
    assert draining.drain(0) == (0, 0)
    pool.upload(upload)
    assert [action.address for action in pool.take(do.Send)] == ["tls://one"]
    assert draining.drain(1) == (1, bound), "its message may be slower than the question"
    pool.report(value("a"), node=1)
    pool.dispatcher.task_ended(pool.epoch, upload.number, is_finished=True, reason="")
    assert draining.drain(1) == (0, 0)
    assert "free" not in asked


def test_a_node_is_not_held_while_a_call_of_a_broadcast_waits_for_it() -> None:
    pool = Pool(workers=["0-0"])
    draining, asked = draining_of(pool)
    pool.submit(entry("a", worker="1-0"))
    assert draining.drain(1) == (1, 1)
    assert asked == ["free"]
