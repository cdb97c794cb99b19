"""The use of calls that name none: begun with the first of them."""

from types import SimpleNamespace
from typing import Any

import pytest

from skyward_core.errors import PoolClosed
from skyward_core.session.pool_uses import PoolUses
from skyward_core.work import Work

WORK = Work(run="1")


class Book:
    """A book that notes what it is told."""

    def __init__(self) -> None:
        self.told: list[str] = []

    def begin(self, use_id: str, work: Work) -> None:
        assert work == WORK
        self.told.append("begin")

    def has_calls(self, use_id: str) -> None:
        self.told.append("calls")

    def count(self, use_id: str) -> Any:
        return SimpleNamespace(cost_usd=1.5)

    def close(self) -> None:
        self.told.append("close")


@pytest.fixture
def books() -> list[Book]:
    return []


@pytest.fixture
def uses(books: list[Book]) -> PoolUses:
    def make() -> Book:
        books.append(Book())
        return books[-1]

    return PoolUses(make, WORK, lambda *_: None)  # type: ignore[arg-type]


def test_a_use_begins_with_the_first_call(uses: PoolUses, books: list[Book]) -> None:
    assert (books, uses.cost_usd) == ([], 0.0)
    first = uses.pays()
    assert uses.pays() == first
    assert books[0].told == ["begin", "calls", "calls"]
    assert uses.cost_usd == 1.5
    uses.close()
    uses.close()
    assert books[0].told[3:] == ["close"]
    assert uses.cost_usd == 1.5
    assert uses.pays() == first, "a call that comes late is refused by the pool"
    with pytest.raises(PoolClosed):
        _ = uses.book


@pytest.mark.parametrize("error", [PoolClosed("the pool has ended"), RuntimeError("can't start new thread")], ids=repr)
@pytest.mark.parametrize("has_book", [True, False])
def test_no_fault_of_the_book_keeps_the_end_of_the_pool(
    uses: PoolUses, monkeypatch: pytest.MonkeyPatch, error: Exception, has_book: bool
) -> None:
    """The machines are ended after it."""

    def fail(*_: Any) -> None:
        raise error

    if has_book:
        uses.pays()
        monkeypatch.setattr(Book, "close", fail)
    else:
        monkeypatch.setattr(uses, "_make_book", fail)
        with pytest.raises(type(error)):
            uses.pays()
    uses.close()
    with pytest.raises(PoolClosed):
        _ = uses.book


def test_a_pool_without_such_calls_has_no_use(uses: PoolUses, books: list[Book]) -> None:
    assert uses.book is books[0]
    uses.close()
    assert (books[0].told, uses.cost_usd) == (["close"], 0.0)
