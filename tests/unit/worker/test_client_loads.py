"""What the scheduler knows of its clients' own queues, of the nodes that they need, and of the ranks that stay."""

import asyncio
import pickle
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

from skyward_core.worker.calls import CallMemory, leave, resume
from skyward_core.worker.client_loads import load, stay
from skyward_core.worker.detached_calls import BUSY_TIMES
from skyward_core.worker.scheduler_messages import POOL_TOPIC, PoolRanks, Resumed
from tests.unit.worker.test_calls import FakeScheduler, Wire

FIRST, SECOND = "skyward-first", "skyward-second"


def worker(name: str, instance_id: str) -> Any:
    return SimpleNamespace(
        name=name,
        address=f"tls://{name}",
        status=SimpleNamespace(name="running"),
        metrics={BUSY_TIMES: (instance_id, "1", 0.0, {})},
        processing=(),
        nthreads=1,
    )


def with_two_clients(check: Callable[[Any, CallMemory], None]) -> None:
    """Check with a scheduler of one worker, and clients "a" and "b" of the two topics."""

    async def main() -> None:
        calls = CallMemory(3600.0)
        scheduler: Any = FakeScheduler(calls)
        scheduler.unrunnable, scheduler.queued = set(), set()
        scheduler.workers = {"tls://1-0": worker("1-0", "machine-001")}
        await calls.start(scheduler)
        for client, topic in (("a", FIRST), ("b", SECOND)):
            scheduler.wires[client] = Wire(client, lambda event: None)
            scheduler.take(client, resume(client, topic, 0, 1))
        check(scheduler, calls)
        await calls.close()

    asyncio.run(main())


def test_the_calls_in_the_queues_of_all_other_clients_wait() -> None:
    """Not those of a client that is away: they do not come while it is. A client cannot speak for another one."""

    def check(scheduler: Any, calls: CallMemory) -> None:
        scheduler.take("a", load(FIRST, 3, []))
        scheduler.take("b", load(SECOND, 4, []))
        scheduler.take("b", load(FIRST, 100, []))
        assert [calls.skyward_waiting(topic) for topic in ("", FIRST, SECOND)] == [7, 4, 3]
        scheduler.take("a", load(FIRST, 0, []))
        assert calls.skyward_waiting() == 4
        del scheduler.wires["b"]
        assert calls.skyward_waiting() == 0

    with_two_clients(check)


def test_a_machine_is_needed_until_its_client_leaves_or_says_otherwise() -> None:
    """A client that is away still needs it, until its topic is dropped."""

    def check(scheduler: Any, calls: CallMemory) -> None:
        workers = list(scheduler.workers.values())
        scheduler.take("a", load(FIRST, 0, ["machine-001", "machine-002"]))
        scheduler.take("b", load(SECOND, 0, ["machine-001"]))
        assert calls.needs(workers) == 2
        assert calls.needs([worker("3-0", "machine-003")]) == 0
        scheduler.take("b", load(SECOND, 0, []))
        assert calls.needs(workers) == 1
        wire = scheduler.wires.pop("a")
        calls.remove_client(scheduler, "a")
        assert calls.needs(workers) == 1
        scheduler.wires["a"] = wire
        scheduler.take("a", leave(FIRST))
        assert calls.needs(workers) == 0

    with_two_clients(check)


def test_the_ranks_that_stay_are_sent_once_and_to_each_client_that_comes() -> None:
    def check(scheduler: Any, calls: CallMemory) -> None:
        scheduler.subscribe_topic(POOL_TOPIC, "b")
        for ranks in ([0, 1], [1, 0], [0]):
            scheduler.take("a", stay(ranks))
        sent = [content for _, content in scheduler.wires["b"].sent if isinstance(content, bytes)]
        assert [pickle.loads(content) for content in sent] == [
            PoolRanks(frozenset({0, 1})),
            PoolRanks(frozenset({0})),
        ]
        scheduler.wires["c"] = Wire("c", lambda event: None)
        scheduler.take("c", resume("c", "skyward-third", 0, 1))
        answer = Resumed.of(scheduler.wires["c"].sent[-1][1])
        assert (answer.ranks, answer.instances) == (frozenset({0}), {"tls://1-0": "machine-001"})

    with_two_clients(check)
