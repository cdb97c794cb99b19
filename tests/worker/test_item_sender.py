"""What a call yields, in its runner: credit, large items, and how it ends."""

import asyncio
import pickle
import socket
from collections.abc import AsyncGenerator, Generator, Iterator
from typing import Any

import pytest

from skyward_core.errors import NotPicklable
from skyward_core.worker.item_sender import ItemSender, is_generator, items_of
from skyward_core.worker.wire import Call, Credit, Item, Parcel

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


def test_items_come_in_order_with_their_numbers(line: Line) -> None:
    line.sender.send_all(streaming(), (number * number for number in range(5)))
    assert [(item.call_id, item.number) for item in line.items] == [("a", number) for number in range(5)]
    assert line.values == [0, 1, 4, 9, 16]


def test_no_item_is_computed_without_credit(line: Line) -> None:
    """The generator is at most AHEAD items before the credit. Credit for another call does not count."""
    lead = list[int]()

    def watched() -> Generator[int]:
        for number in range(6):
            lead.append(number - len(line.items))
            yield number
            line.give(1000, "another call")

    line.sender.send_all(streaming(), watched())
    assert line.values == list(range(6))
    assert set(lead) == {0}

    taken = list[int]()
    sender = ItemSender(line.runner, lambda item: taken.append(item.number), line.store)
    while True:  # what the first call has left in the queue
        try:
            line.runner.recv(1000, socket.MSG_DONTWAIT)
        except BlockingIOError:
            break

    def asks() -> Generator[int]:
        for number in range(4):
            if number == AHEAD - 1:
                line.give(AHEAD + 1)
            if number == AHEAD:
                assert taken == [0, 1]
                line.give(AHEAD + 3)
            yield number

    sender.send_all(streaming(), asks())
    assert taken == [0, 1, 2, 3]


def test_an_asynchronous_generator_is_stepped(line: Line) -> None:
    line.sender.send_all(streaming(), counted(4))
    assert line.values == [0, 1, 2, 3]
    assert list(items_of(counted(3))) == [0, 1, 2]
    assert is_generator(counted(1)) and is_generator(iter_of(1)) and not is_generator([1])


def iter_of(n: int) -> Generator[int]:
    yield from range(n)


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


def test_a_value_that_yields_nothing(line: Line) -> None:
    with pytest.raises(TypeError, match="not iterable"):
        line.sender.send_all(streaming(), 3)
