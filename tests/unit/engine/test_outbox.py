"""The client's queue: which calls travel together, and in which order.

That none is lost, and none is in two places, is shown by the simulation (`tests/engine`).
"""

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from skyward_core.engine.outbox import BATCH_BYTES, BATCH_CALLS, LEAST_SECONDS, TARGET_SECONDS, Entry, Queue, Shipment
from skyward_core.wire.messages import Call, Parcel

FUNCTIONS = {name: Parcel(name.encode()) for name in ("f", "g", "h")}


def entry(call_id: str, function: str = "f", worker: str | None = None, size: int = 0) -> Entry:
    return Entry(Call(call_id, function, Parcel(b"x" * size), call_id), FUNCTIONS[function], worker)


def entries(count: int, size: int = 0) -> list[Entry]:
    return [entry(str(number), size=size) for number in range(count)]


def ids_of(shipment: Shipment) -> list[str]:
    return [call.call_id for call in shipment.batch.calls]


def shipped(queue: Queue) -> list[list[str]]:
    return [ids_of(shipment) for shipment in queue.ship()]


def learned(seconds: float, slots: int = 2) -> Queue:
    """A queue that knows the function: one call of it ended after so many seconds."""
    queue = Queue("topic")
    queue.slots = slots
    queue.add([entry("first")])
    queue.ship()
    queue.ended("first", seconds)
    return queue


# ── examples ─────────────────────────────────────────────────────────────────────────────────────────────────────────


def test_unknown_calls_travel_alone_one_for_each_slot() -> None:
    queue = Queue("topic")
    queue.slots = 3
    queue.add(entries(10))
    assert (shipped(queue), shipped(queue)) == ([["0"], ["1"], ["2"]], [])
    queue.ended("1")
    assert shipped(queue) == [["3"]]
    assert not queue.ended("1")
    assert not queue.ended("unheard of", 1.0)


def test_a_lost_call_travels_alone() -> None:
    """It may have crashed its node: no other call is in its batch, or behind it in its slot."""
    queue, calls = learned(0.0001), entries(40)
    for lost in calls[1:3]:
        lost.losses = 1
    queue.add(calls)
    assert shipped(queue) == [["0"], ["1"]]
    queue.ended("0", 0.0001)
    assert shipped(queue) == [["2"]]
    queue.ended("1", 0.0001)
    assert len(queue.ship()) == 1
    queue.ended("2", 0.0001)
    assert len(queue.ship()) == 3


@pytest.mark.parametrize(
    ("seconds", "count", "sizes"), [(1.0, 100, [1, 1]), (TARGET_SECONDS / 10.5, 1000, [10] * 4)], ids=["long", "short"]
)
def test_short_calls_travel_together(seconds: float, count: int, sizes: list[int]) -> None:
    """In batches of about the target's work, two for each slot. Long ones travel alone."""
    queue = learned(seconds)
    queue.add(entries(count))
    assert [len(ids) for ids in shipped(queue)] == sizes


def test_a_batch_is_bounded() -> None:
    """By the bytes of its arguments; by the least cost of a call, if calls take no time. All slots get some."""
    queue = learned(0.0, slots=1)
    queue.add(entries(100, BATCH_BYTES // 2))
    assert all(len(ids) <= 3 for ids in shipped(queue))
    queue = learned(0.0)
    queue.add(entries(40))
    assert (len(sizes := [len(ids) for ids in shipped(queue)]), max(sizes) <= 10) == (4, True)
    queue.clear()
    queue.add(entries(20_000))
    sizes = [len(ids) for ids in shipped(queue)]
    assert 100 < min(sizes) <= max(sizes) <= min(BATCH_CALLS, TARGET_SECONDS / LEAST_SECONDS + 2)


def test_a_function_that_becomes_slow_is_noticed() -> None:
    queue, largest = learned(0.0), list[int]()
    for n in range(12):
        queue.add([entry(f"a{n}")])
        queue.ship()
        queue.ended(f"a{n}", 0.5)
        queue.add([entry(f"b{n}-{k}") for k in range(50)])
        largest.append(max(map(len, shipped(queue))))
        queue.clear()
    assert largest[-1] == 1


class CountedId(str):
    """An id that counts how often it is compared or looked up."""

    __slots__ = ()

    looks = 0

    def __hash__(self) -> int:
        CountedId.looks += 1
        return super().__hash__()

    def __eq__(self, other: object) -> bool:
        CountedId.looks += 1
        return super().__eq__(other)


def test_cancelling_one_call_does_not_read_all_that_wait() -> None:
    """Else 100,000 cancelled calls would keep the engine's thread busy for minutes."""
    queue = Queue("topic")
    queue.add([entry(CountedId(number), worker="0-0" if number % 3 == 0 else None) for number in range(1000)])
    CountedId.looks = 0
    assert queue.drop({"500"}) == {"500"}
    assert CountedId.looks < 10
    assert len(queue.withdraw()) == 999


def test_returned_calls_are_first_again_and_keep_their_order() -> None:
    queue = learned(TARGET_SECONDS / 4, slots=1)
    queue.add(entries(40))
    _, second = queue.ship()
    queue.returned(ids_of(second))
    queue.returned(ids_of(second))
    assert shipped(queue) == [ids_of(second)]


def test_calls_for_a_given_worker_are_sent_at_once() -> None:
    """They wait for no free slot, and take none from the others. If the worker is absent they wait for it."""
    queue = learned(1.0, slots=1)
    queue.workers = ["0-0"]
    queue.add([entry("long"), entry("waits"), entry("here", worker="0-0"), entry("there", worker="1-0")])
    assert [(ids_of(shipment), shipment.worker) for shipment in queue.ship()] == [(["here"], "0-0"), (["long"], None)]
    assert (queue.pinned_to("1-0"), queue.pinned_to("0-0")) == (["there"], [])
    queue.workers = ["0-0", "1-0"]
    assert [(ids_of(shipment), shipment.worker) for shipment in queue.ship()] == [(["there"], "1-0")]
    queue.workers = ["0-0"]
    queue.returned(["there"])
    assert (shipped(queue), queue.pinned_to("1-0")) == ([], ["there"])


def test_a_batch_carries_each_function_it_needs() -> None:
    queue = learned(0.0, slots=1)
    queue.add([entry(str(n), "fg"[n % 2]) for n in range(20)])
    for shipment in queue.ship():
        names = {call.function for call in shipment.batch.calls}
        assert shipment.batch.functions == {name: FUNCTIONS[name] for name in names}
        assert shipment.batch.topic == "topic"


@given(st.lists(st.floats(0, 5), min_size=1, max_size=30), st.integers(1, 8), st.integers(1, 300))
@settings(max_examples=60, deadline=None, database=None)
def test_there_is_always_work_for_a_free_slot(seconds: list[float], slots: int, calls: int) -> None:
    """With any known times: while calls wait every slot has a shipment, and not more than two."""
    queue = Queue("topic")
    queue.slots = slots
    for n, value in enumerate(seconds):
        queue.add([entry(f"s{n}")])
        queue.ship()
        queue.ended(f"s{n}", value)
    queue.add(entries(calls))
    assert min(slots, calls) <= len(queue.ship()) <= 2 * slots
