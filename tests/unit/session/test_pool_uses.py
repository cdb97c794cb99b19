"""The use of calls that name none: begun with the first of them, whether the ledger answers or not."""

from types import SimpleNamespace
from typing import Any

import pytest

from skyward_core.errors import LedgerError, PoolClosed
from skyward_core.session.pool_uses import PoolUses
from skyward_core.work import Work

WORK = Work(run="1")


class Book:
    """A book that notes what it is told. While `is_away`, nothing can be written."""

    is_away = False

    def __init__(self) -> None:
        self.told: list[str] = []
        if Book.is_away:
            raise LedgerError("the server is being restarted")

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
def test_no_fault_of_the_book_keeps_the_end_of_the_pool(
    uses: PoolUses, monkeypatch: pytest.MonkeyPatch, error: Exception
) -> None:
    """The machines are ended after it."""
    monkeypatch.setattr(Book, "is_away", True)
    uses.pays()

    def fail() -> Book:
        raise error

    monkeypatch.setattr(uses, "_make_book", fail)
    uses.close()
    with pytest.raises(PoolClosed):
        _ = uses.book


def test_a_pool_without_such_calls_has_no_use(uses: PoolUses, books: list[Book]) -> None:
    assert uses.book is books[0]
    uses.close()
    assert (books[0].told, uses.cost_usd) == (["close"], 0.0)


@pytest.mark.parametrize("is_back", [True, False])
def test_a_ledger_that_is_away_stops_no_call(
    uses: PoolUses, books: list[Book], monkeypatch: pytest.MonkeyPatch, is_back: bool
) -> None:
    """It is tried again, but not with each call; at last at the end."""
    monkeypatch.setattr(Book, "is_away", True)
    first = uses.pays()
    monkeypatch.setattr(Book, "is_away", False)
    assert (uses.pays(), books) == (first, [])
    if is_back:
        uses._again_at = 0.0
        assert uses.pays() == first
        assert books[0].told == ["begin", "calls"]
    uses.close()
    assert books[0].told == (["begin", "calls", "close"] if is_back else ["begin", "close"])
