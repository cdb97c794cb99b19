"""The use of calls that name none: begun with the first of them."""

from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import pytest

from skyward_core.errors import PoolClosed
from skyward_core.events.events import CallReported, Metrics, SkywardEvent
from skyward_core.events.utilisation import Utilisation
from skyward_core.session.pool_uses import PoolUses, UseGauges
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


class Events:
    """A queue without a thread."""

    def __init__(self) -> None:
        self.listeners: list[Callable[[SkywardEvent], object]] = []
        self.listen = self.listeners.append

    def put(self, event: SkywardEvent) -> None:
        for listener in self.listeners:
            listener(event)

    def in_order(self, call: Callable[[], object]) -> None:
        call()


@pytest.fixture
def books() -> list[Book]:
    return []


@pytest.fixture
def uses(books: list[Book]) -> PoolUses:
    def make() -> Book:
        books.append(Book())
        return books[-1]

    return PoolUses(make, WORK, lambda *_: None, UseGauges(Events(), lambda: None))  # type: ignore[arg-type]


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


def sample(percent: float) -> Metrics:
    return Metrics("i-0", 0, percent, 50.0, 1.0, 2.0)


def test_a_use_has_the_samples_of_its_own_calls_and_their_reports() -> None:
    """Also those of calls that were shorter than the time between two samples, and none after the end."""
    held: dict[str, int] = {}
    ran: dict[str, dict[str, float]] = {"fit": {}, "score": {}}
    cluster = SimpleNamespace(slots_held=lambda: held, owner=SimpleNamespace(slot_seconds=SimpleNamespace(of=ran.get)))
    events = Events()
    gauges = UseGauges(events, lambda: cluster)  # type: ignore[arg-type, return-value]
    fit, score = Utilisation(), Utilisation()
    gauges.begin("fit", fit)
    gauges.begin("score", score)
    events.put(sample(1.0))  # no calls yet
    held["fit"] = 2
    events.put(sample(10.0))
    del held["fit"]
    events.put(sample(20.0))  # of the two seconds before it
    ran["score"] = {"i-0": 0.5}
    events.put(sample(90.0))
    events.put(sample(2.0))
    for use, loss in (("fit", 0.5), ("score", 0.25), ("another", 7.0)):
        events.put(CallReported(0, "i-0", "c", None, {"loss": loss}, 0.0, use=use))
    gauges.end("fit")
    events.put(CallReported(0, "i-0", "c", None, {"loss": 9.0}, 0.0, use="fit"))
    assert (fit.numbers()["cpu_percent_mean"], fit.numbers()["cpu_percent_max"]) == (15.0, 20.0)
    assert score.numbers()["cpu_percent_mean"] == 90.0
    assert (fit.last_values(), score.last_values()) == ({"loss": 0.5}, {"loss": 0.25})
