"""What a call yields, in its runner: credit, large items, and how it ends."""

import asyncio
import pickle
import socket
from collections.abc import AsyncGenerator, Generator, Iterator
from typing import Any, cast

import pytest

from skyward_core.errors import NotPicklable
from skyward_core.wire.messages import Call, Credit, Item, Parcel
from skyward_core.worker.runner import ItemSender, is_generator, items_of

AHEAD = 2


def streaming(call_id: str = "a") -> Call:
    return Call(call_id, "f", Parcel(b""), "job", ahead=AHEAD)


class Line:
    """The runner's ends, and the worker's: it gives credit for one more item with each that it gets."""

    def __init__(self) -> None:
        self.worker, self.runner = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        self.items: list[Item] = []
        self.stored: list[Parcel] = []
        self.sender = ItemSender(self.runner, self._got, self.store)

    def give(self, below: int, call_id: str = "a") -> None:
        self.worker.send(pickle.dumps(Credit(call_id, below)))

    def _got(self, item: Item) -> None:
        self.items.append(item)
        self.give(len(self.items) + AHEAD)

    def store(self, parcel: Parcel) -> Parcel:
        self.stored.append(parcel)
        return Parcel(b"", (), f"/file-{len(self.stored)}", ((0, parcel.nbytes),))

    @property
    def values(self) -> list[Any]:
        return [pickle.loads(item.parcel.data) for item in self.items]


@pytest.fixture
def line() -> Iterator[Line]:
    line = Line()
    yield line
    line.worker.close()
    line.runner.close()


async def counted(n: int) -> AsyncGenerator[int]:
    for number in range(n):
        await asyncio.sleep(0)
        yield number


class Queue:
    """A runner's queue with these messages. It notes how many items were computed when each was awaited."""

    def __init__(self, *messages: Credit) -> None:
        self.messages = list(messages)
        self.computed: list[int] = []
        self.asked_at: list[int] = []

    def recv(self, _: int) -> bytes:
        self.asked_at.append(len(self.computed))
        return pickle.dumps(self.messages.pop(0))

    def items(self, n: int) -> Generator[int]:
        for number in range(n):
            self.computed.append(number)
            yield number


def test_no_item_is_computed_without_credit() -> None:
    """The generator waits after AHEAD items, and where its credit ends. Credit for another call does not count."""
    queue = Queue(Credit("another call", 1000), Credit("a", 3), Credit("a", 1000))
    sent = list[int]()
    sender = ItemSender(cast(Any, queue), lambda item: sent.append(item.number), lambda parcel: parcel)
    sender.send_all(streaming(), queue.items(5))
    assert sent == [0, 1, 2, 3, 4]
    assert queue.asked_at == [2, 2, 3]


def test_an_asynchronous_generator_is_stepped(line: Line) -> None:
    line.sender.send_all(streaming(), counted(4))
    assert line.values == [0, 1, 2, 3]
    assert list(items_of(counted(3))) == [0, 1, 2]
    assert [is_generator(value) for value in (counted(1), (n for n in [1]), [1])] == [True, True, False]


def test_an_asynchronous_generator_is_closed_where_it_stands() -> None:
    """Its `finally` blocks run in its loop."""
    closed = list[str]()

    async def watched() -> AsyncGenerator[int]:
        try:
            yield 1
            yield 2
        finally:
            await asyncio.sleep(0)
            closed.append("closed")

    items = items_of(watched())
    assert next(items) == 1
    assert isinstance(items, Generator)
    items.close()
    assert closed == ["closed"]


def test_a_large_item_goes_into_a_file(line: Line) -> None:
    line.sender.send_all(streaming(), ["small", "x" * 100_000])
    assert [item.parcel.path for item in line.items] == [None, "/file-1"]
    assert len(line.stored) == 1


def test_an_item_that_cannot_travel(line: Line) -> None:
    """The error names it. Those before it were sent."""
    with pytest.raises(NotPicklable, match="item 1"):
        line.sender.send_all(streaming(), [0, (x for x in [])])
    assert line.values == [0]
