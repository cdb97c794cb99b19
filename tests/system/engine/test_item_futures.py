"""The consumer's side of a stream: what it takes, what it leaves, and how it waits."""

import gc
import threading

from skyward_core.concurrency.item_stream import ItemStream
from tests.unit.engine.test_item_futures import (  # noqa: F401 - fixtures
    Call,
    call,
)


def test_the_end_waits_for_items_that_are_being_fetched(call: Call) -> None:
    """The call has ended, but one of its items is still on its way."""
    call.put(0)
    call.end(2)
    taken = list[int]()
    consumer = threading.Thread(target=lambda: taken.extend(ItemStream[int](call.future)))
    consumer.start()
    call.put(1)
    consumer.join(30)
    assert taken == [0, 1]


def test_a_stream_without_references_is_left(call: Call) -> None:
    """In the engine's thread: garbage may be collected anywhere."""
    for _ in ItemStream[int](call.future) if call.put(0) is None else ():
        break
    gc.collect()
    assert call.stopped == []
    (leave,) = call.posted
    leave()
    assert call.stopped == ["a"]
