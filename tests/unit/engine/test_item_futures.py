"""The consumer's side of a stream: what it takes, what it leaves, and how it waits."""

import asyncio
import gc
import pickle
from collections.abc import Callable
from pathlib import Path

import pytest

from skyward_core.concurrency.item_stream import ItemStream
from skyward_core.engine.item_futures import ItemFuture
from skyward_core.errors import NodeLost, PoolClosed, SkywardError
from skyward_core.worker.wire import Parcel

AHEAD = 4


class Call:
    """A streaming call: what its future asks of the engine."""

    def __init__(self) -> None:
        self.stopped: list[str] = []
        self.credit: list[int] = []
        self.posted: list[Callable[[], None]] = []
        self.future = ItemFuture(
            "a",
            AHEAD,
            self.stopped.append,
            lambda call: call(),
            lambda _, below: self.credit.append(below),
            self.posted.append,
        )

    def put(self, *numbers: int) -> None:
        for number in numbers:
            self.future.put_item(number, Parcel(pickle.dumps(number)), 0)

    def end(self, total: int, error: BaseException | None = None) -> None:
        assert self.future.claim()
        self.future.set_total(total)
        if error is None:
            self.future.set_result(None)
        else:
            self.future.set_exception(error)


@pytest.fixture
def call() -> Call:
    return Call()


def test_items_are_taken_in_the_order_of_their_numbers(call: Call) -> None:
    """Also if a fetch makes one late."""
    call.put(1, 0, 2)
    call.end(3)
    assert list(ItemStream[int](call.future)) == [0, 1, 2]
    assert call.stopped == []


def test_the_exception_comes_once_after_the_items(call: Call) -> None:
    call.put(0, 1)
    call.end(2, KeyError("x"))
    items = ItemStream[int](call.future)
    assert [next(items), next(items)] == [0, 1]
    with pytest.raises(KeyError):
        next(items)
    assert list(items) == []


def test_an_item_that_cannot_be_fetched(call: Call) -> None:
    """The error comes in its place, and the call is stopped."""
    call.put(0)
    call.future.break_off(NodeLost("gone"))
    items = ItemStream[int](call.future)
    assert next(items) == 0
    with pytest.raises(NodeLost, match="gone"):
        next(items)
    assert call.stopped == ["a"]
    assert list(items) == []


def test_a_call_that_is_lost_gives_what_has_come(call: Call) -> None:
    """Its pool was closed: the number of its items is unknown."""
    call.put(0)
    call.future.claim()
    call.future.set_exception(PoolClosed("closed"))
    items = ItemStream[int](call.future)
    assert next(items) == 0
    with pytest.raises(PoolClosed):
        next(items)


def test_credit_follows_the_consumer(call: Call) -> None:
    """The node is never more than AHEAD items before it, and hears of each second one that is taken."""
    items = ItemStream[int](call.future)
    call.put(0, 1, 2, 3)
    for number in range(4):
        assert next(items) == number
        assert call.credit == [6, 8][: (number + 1) // 2]


def test_what_is_not_taken_is_removed(call: Call, tmp_path: Path) -> None:
    """Files of items that have come, and of those that come after the consumer has left."""
    files = [tmp_path / "0", tmp_path / "1"]
    for file in files:
        file.write_bytes(b"")
    call.future.put_item(0, Parcel(b"", (), str(files[0]), ((0, 0),)), 0)
    with ItemStream[int](call.future) as items:
        assert iter(items) is items
    assert call.stopped == ["a"]
    call.future.put_item(1, Parcel(b"", (), str(files[1]), ((0, 0),)), 0)
    assert [file.exists() for file in files] == [False, False]
    assert list(items) == []


def test_an_item_that_was_taken_is_removed(call: Call, tmp_path: Path) -> None:
    """Its file in memory goes with it, also if it cannot be loaded. The error names the node."""
    whole, damaged = (Parcel(data).moved_to_file([str(tmp_path)]) for data in (pickle.dumps("x"), b"no pickle"))
    call.future.put_item(0, whole, 0)
    call.future.put_item(1, damaged, 5)
    items = ItemStream[str](call.future)
    assert next(items) == "x"
    assert [file for file in (whole.path, damaged.path) if file and Path(file).exists()] == [damaged.path]
    with pytest.raises(SkywardError, match="node 5"):
        next(items)
    assert list(tmp_path.iterdir()) == []


def test_a_stream_whose_consumer_was_interrupted_is_left(call: Call, monkeypatch: pytest.MonkeyPatch) -> None:
    """Although the traceback is kept, as a notebook keeps the last one: its frames do not refer to the stream."""
    monkeypatch.setattr(ItemFuture, "take", interrupted)
    with pytest.raises(KeyboardInterrupt) as caught:
        for _ in ItemStream[int](call.future):
            pass
    gc.collect()
    assert caught.tb is not None
    assert len(call.posted) == 1


def interrupted(_: ItemFuture) -> None:
    raise KeyboardInterrupt


def test_a_stream_whose_task_was_cancelled_is_left(call: Call) -> None:
    """The same in a cell that awaits the next item."""

    async def consume() -> None:
        async for _ in ItemStream[int](call.future):
            pass

    async def cancel() -> BaseException:
        task = asyncio.create_task(consume())
        await asyncio.sleep(0)
        task.cancel()
        with pytest.raises(asyncio.CancelledError) as caught:
            await task
        return caught.value

    error = asyncio.run(cancel())
    gc.collect()
    assert error.__traceback__ is not None
    assert len(call.posted) == 1


def test_async_for_waits_without_blocking(call: Call) -> None:
    """Other tasks run while no item is there. The end and the error come as in plain programs."""

    async def consume() -> list[int]:
        async def produce() -> None:
            for number in range(3):
                await asyncio.sleep(0)
                call.put(number)
            call.end(3, KeyError("x"))

        producer = asyncio.create_task(produce())
        taken = list[int]()
        with pytest.raises(KeyError):
            async for number in ItemStream[int](call.future):
                taken.append(number)
        await producer
        return taken

    assert asyncio.run(consume()) == [0, 1, 2]


def test_async_for_over_nothing(call: Call) -> None:
    call.end(0)

    async def consume() -> list[int]:
        items = ItemStream[int](call.future)
        taken = [number async for number in items]
        await items.aclose()
        return taken

    assert asyncio.run(consume()) == []
