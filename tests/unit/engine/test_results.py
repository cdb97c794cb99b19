"""Results that cannot be loaded here, pending calls in the place of results, and the events of calls without a result."""

import pickle
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

import skyward_core as sky
from skyward_core.engine.futures import CallFuture
from skyward_core.engine.results import PLAIN_BYTES, NotPlain, Results, Settled, plain_value, value_of
from skyward_core.errors import Stored
from skyward_core.worker.wire import Outcome, OutcomeKind, Parcel
from tests.conftest import RecordedEvents


def not_loaded(call: Callable[[], Any]) -> sky.ResultNotLoaded:
    with pytest.raises(sky.ResultNotLoaded) as caught:
        call()
    return caught.value


def test_a_result_that_fails_to_load_here_is_kept() -> None:
    """The stored value loads as the value, also in a pickle of other values."""
    data = pickle.dumps([1, 2])
    assert pickle.loads(pickle.dumps({"a": Stored(data)}, protocol=5)) == {"a": [1, 2]}
    assert sky.ResultNotLoaded("x", 0, "", memoryview(data)).load() == [1, 2]


class Broken:
    """Its result is pickled on the node, and cannot be made here."""

    def __reduce__(self) -> Any:
        return int, ("seven",)


def test_a_result_that_cannot_be_loaded_says_why() -> None:
    """With the node and the error of its type."""
    outcome = Outcome("1", OutcomeKind.RESULT, Parcel(pickle.dumps(Broken())))
    error = not_loaded(lambda: value_of(outcome, 3))
    assert "on node 3, but its result cannot be loaded here: ValueError: invalid literal" in str(error)
    assert error.node == 3


@pytest.mark.parametrize("wrong", [None, 3, "double", [1]], ids=repr)
def test_a_value_that_is_no_function_is_refused_at_the_call(wrong: Any) -> None:
    """By a map, for any items and before its pool is used, and by `sky.compute`."""
    pool = sky.ComputePool(provider=sky.Local())
    for items in ([1, 2], []):
        with pytest.raises(TypeError, match=r"is no function: write pool\.map\(fn, \[1, 2, 3\]\)"):
            pool.map(wrong, items)
    with pytest.raises(TypeError, match="is no function"):
        sky.compute(wrong)


def outcome_of(value: object) -> Outcome:
    return Outcome("call", OutcomeKind.RESULT, Parcel(pickle.dumps(value, protocol=5)))


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
    assert settled == [future]
    assert list(tmp_path.iterdir()) == []
    assert future.done()
    if not future.cancelled():
        assert future.result() == 7 if ending == "result" else isinstance(future.exception(), KeyError)
