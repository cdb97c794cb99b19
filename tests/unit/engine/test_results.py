"""Results and items of streams at the client: what is loaded where, what is kept, and what a consumer takes and leaves."""

import asyncio
import gc
import pickle
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

import skyward_core as sky
from skyward_core.concurrency.item_stream import ItemStream
from skyward_core.engine.futures import (
    PLAIN_BYTES,
    CallFuture,
    ItemFuture,
    NotPlain,
    Results,
    Settled,
    plain_value,
    value_of,
)
from skyward_core.errors import NodeLost, PoolClosed, SkywardError, Stored
from skyward_core.wire.messages import Outcome, OutcomeKind, Parcel
from tests.conftest import RecordedEvents

# ── results ──────────────────────────────────────────────────────────────────────────────────────────────────────────


def test_a_result_that_fails_to_load_here_is_kept() -> None:
    """The stored value loads as the value, also in a pickle of other values."""
    data = pickle.dumps([1, 2])
    assert pickle.loads(pickle.dumps({"a": Stored(data)}, protocol=5)) == {"a": [1, 2]}
    assert sky.ResultNotLoaded("x", 0, "", memoryview(data)).load() == [1, 2]


class Broken:
    """It is pickled on the node, and cannot be made here."""

    def __reduce__(self) -> Any:
        return int, ("seven",)


def outcome_of(value: object) -> Outcome:
    return Outcome("call", OutcomeKind.RESULT, Parcel(pickle.dumps(value, protocol=5)))


def test_a_result_that_cannot_be_loaded_says_why() -> None:
    with pytest.raises(
        sky.ResultNotLoaded, match=r"on node 3, .* cannot be loaded here: ValueError: invalid lit"
    ) as error:
        value_of(outcome_of(Broken()), 3)
    assert error.value.node == 3


def test_a_result_that_is_one_pickle_in_a_file_is_not_mapped(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Mapped, 200 MB of bytes would be in memory twice. One that cannot be loaded is kept, and is."""
    outcomes = [
        outcome._replace(parcel=outcome.parcel.moved_to_file([str(tmp_path)]))
        for outcome in (outcome_of([b"x" * 100_000, 1]), outcome_of(Broken()))
    ]
    with pytest.raises(sky.ResultNotLoaded) as error:
        value_of(outcomes[1], 3)
    with pytest.raises(ValueError, match="seven"):
        error.value.load()
    monkeypatch.setattr(Parcel, "open", lambda *_, **__: pytest.fail("it was mapped"))
    assert value_of(outcomes[0], 3) == [b"x" * 100_000, 1]


@pytest.mark.parametrize("wrong", [None, 3, "double", [1]], ids=repr)
def test_a_value_that_is_no_function_is_refused_at_the_call(wrong: Any) -> None:
    """By a map, for any items and before its pool is used, and by `sky.compute`."""
    pool = sky.ComputePool(provider=sky.Local())
    for items in ([1, 2], []):
        with pytest.raises(TypeError, match=r"is no function: write pool\.map\(fn, \[1, 2, 3\]\)"):
            pool.map(wrong, items)
    with pytest.raises(TypeError, match="is no function"):
        sky.compute(wrong)


@pytest.mark.parametrize("value", [None, 3, "text", [1, {"a": (2.5, b"bytes", {4})}]])
def test_a_small_result_without_types_is_loaded_at_once(value: object) -> None:
    assert plain_value(outcome_of(value)) == value


@pytest.mark.parametrize(
    "outcome",
    [
        outcome_of(len),
        outcome_of(RecordedEvents()),
        outcome_of("x" * PLAIN_BYTES),
        outcome_of(1)._replace(kind=OutcomeKind.ERROR),
        outcome_of(1)._replace(parcel=Parcel(b"", (), "/dev/shm/value", ((0, 5),))),
        outcome_of(1)._replace(parcel=Parcel(b"no pickle")),
    ],
    ids=["a function", "a type", "large", "an exception", "in a file", "unreadable"],
)
def test_all_other_results_are_loaded_in_the_results_thread(outcome: Outcome) -> None:
    """Loading one may run code of its types, which may block: the engine's thread must not wait for that."""
    with pytest.raises(NotPlain):
        plain_value(outcome)


@pytest.mark.parametrize("ending", ["result", "error", "cancelled"])
def test_each_future_that_ends_is_reported_and_its_files_are_removed(tmp_path: Path, ending: str) -> None:
    """Otherwise the pool would count the call as running for ever, and would never be idle."""
    settled: list[CallFuture[Any]] = []
    parcel = Parcel(b"x").moved_to_file([str(tmp_path)])
    future = CallFuture[Any]("a", lambda _: None)

    def value() -> int:
        assert settled == []
        if ending == "error":
            raise KeyError("x")
        return 7

    if ending == "cancelled":
        future.cancel()
    Results(lambda: 0, settled.append).set(Settled(future, value, [parcel]))
    assert (settled, list(tmp_path.iterdir())) == ([future], [])
    if not future.cancelled():
        assert future.result() == 7 if ending == "result" else isinstance(future.exception(), KeyError)


# ── items of a stream ────────────────────────────────────────────────────────────────────────────────────────────────

AHEAD = 4


class Stream:
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

    def end(self, total: int | None, error: BaseException | None = None) -> None:
        assert self.future.claim()
        if total is not None:
            self.future.set_total(total)
        if error is None:
            self.future.set_result(None)
        else:
            self.future.set_exception(error)


@pytest.fixture
def call() -> Stream:
    return Stream()


def test_items_are_taken_in_the_order_of_their_numbers(call: Stream) -> None:
    """Also if a fetch makes one late. The end and the error come after them, once."""
    call.put(1, 0, 2)
    call.end(3, KeyError("x"))
    items = ItemStream[int](call.future)
    assert [next(items), next(items), next(items)] == [0, 1, 2]
    with pytest.raises(KeyError):
        next(items)
    assert (list(items), call.stopped) == ([], [])


@pytest.mark.parametrize("how", ["not fetched", "closed"])
def test_a_stream_that_is_lost_gives_what_has_come(call: Stream, how: str) -> None:
    """The error comes in the place of the lost item. A call whose item cannot be fetched is stopped."""
    call.put(0)
    if how == "closed":
        call.end(None, PoolClosed("gone"))
    else:
        call.future.break_off(NodeLost("gone"))
    items = ItemStream[int](call.future)
    assert next(items) == 0
    with pytest.raises(PoolClosed if how == "closed" else NodeLost, match="gone"):
        next(items)
    assert (call.stopped, list(items)) == ([] if how == "closed" else ["a"], [])


def test_credit_follows_the_consumer(call: Stream) -> None:
    """The node is never more than AHEAD items before it, and hears of each second one that is taken."""
    items = ItemStream[int](call.future)
    call.put(0, 1, 2, 3)
    for number in range(4):
        assert next(items) == number
        assert call.credit == [6, 8][: (number + 1) // 2]


def test_what_is_not_taken_is_removed(call: Stream, tmp_path: Path) -> None:
    """Files of items that have come, and of those that come after the consumer has left."""
    first, second = (Parcel(pickle.dumps(0)).moved_to_file([str(tmp_path)]) for _ in range(2))
    call.future.put_item(0, first, 0)
    with ItemStream[int](call.future) as items:
        assert iter(items) is items
    assert call.stopped == ["a"]
    call.future.put_item(1, second, 0)
    assert (list(tmp_path.iterdir()), list(items)) == ([], [])


def test_an_item_that_was_taken_is_removed(call: Stream, tmp_path: Path) -> None:
    """Its file goes with it, also if it cannot be loaded. The error names the node."""
    whole, damaged = (Parcel(data).moved_to_file([str(tmp_path)]) for data in (pickle.dumps("x"), b"no pickle"))
    call.future.put_item(0, whole, 0)
    call.future.put_item(1, damaged, 5)
    items = ItemStream[str](call.future)
    assert next(items) == "x"
    assert [str(path) for path in tmp_path.iterdir()] == [damaged.path]
    with pytest.raises(SkywardError, match="node 5"):
        next(items)
    assert list(tmp_path.iterdir()) == []


async def consume(call: Stream) -> list[int]:
    return [number async for number in ItemStream[int](call.future)]


@pytest.mark.parametrize("how", ["interrupted", "cancelled"])
def test_a_stream_whose_consumer_was_stopped_is_left(call: Stream, monkeypatch: pytest.MonkeyPatch, how: str) -> None:
    """Although the traceback is kept, as a notebook keeps the last one: its frames do not refer to the stream."""

    def interrupted(_: ItemFuture) -> None:
        raise KeyboardInterrupt

    async def cancel() -> None:
        task = asyncio.create_task(consume(call))
        await asyncio.sleep(0)
        task.cancel()
        await task

    with pytest.raises((KeyboardInterrupt, asyncio.CancelledError)) as caught:
        if how == "cancelled":
            asyncio.run(cancel())
        monkeypatch.setattr(ItemFuture, "take", interrupted)
        for _ in ItemStream[int](call.future):
            pass
    gc.collect()
    assert caught.tb is not None
    assert len(call.posted) == 1


def test_a_stream_without_references_is_left(call: Stream) -> None:
    """In the engine's thread: garbage may be collected anywhere."""
    call.put(0)
    for _ in ItemStream[int](call.future):
        break
    gc.collect()
    assert call.stopped == []
    (leave,) = call.posted
    leave()
    assert call.stopped == ["a"]


@pytest.mark.parametrize("total", [0, 3])
def test_async_for_waits_without_blocking(call: Stream, total: int) -> None:
    """Other tasks run while no item is there."""

    async def produce() -> None:
        for number in range(total):
            await asyncio.sleep(0)
            call.put(number)
        call.end(total)

    async def both() -> list[int]:
        taken, _ = await asyncio.gather(consume(call), produce())
        return taken

    assert asyncio.run(both()) == list(range(total))
