"""Values of an orchestrator in the arguments of a call: plain ones travel in their place, and faults have the user's path."""

import threading
from collections import OrderedDict, namedtuple
from collections.abc import Sequence
from dataclasses import dataclass
from datetime import UTC, date, datetime, time, timedelta, timezone
from typing import Any

import pytest

import skyward_core as sky
from skyward_core.serialization.pickling import dumps, loads

pendulum = pytest.importorskip("pendulum")

Pair = namedtuple("Pair", "left right")


class Rows(Sequence[int]):
    """A lazy sequence of an orchestrator: its items are read one by one, and it cannot travel."""

    def __init__(self, *rows: Any) -> None:
        self._rows = rows
        self.lock = threading.Lock()

    def __len__(self) -> int:
        return len(self._rows)

    def __getitem__(self, index: Any) -> Any:
        return self._rows[index]


class MoreRows(Rows):
    """A subclass has the conversion of its nearest class."""


class Context:
    """An object of an orchestrator that must not travel."""


@dataclass
class Holder:
    """An object of the user."""

    inner: Any


def _refused(_: Context) -> Any:
    raise sky.BadRequest("pass what it is made from")


TABLE = sky.PlainTypes({Rows: list, f"{__name__}.Context": _refused})
PARIS = pendulum.datetime(2026, 3, 1, 12, 30, 1, 5, tz="Europe/Paris")


def plain(value: Any) -> Any:
    call = sky.PendingCompute(print, (value,))
    return sky.plain_call(call, TABLE).args[0]


@pytest.mark.parametrize(
    ("value", "expected"),
    [
        (Rows(1, MoreRows(2)), [1, [2]]),
        ({"a": (Rows(1), {"b": [Rows(2)]})}, {"a": ([1], {"b": [[2]]})}),
        ([{"a": 1}, {"b": Rows(2)}], [{"a": 1}, {"b": [2]}]),
        ([{"a": 1}, {PARIS.date(): 1}], [{"a": 1}, {date(2026, 3, 1): 1}]),
        ([(1,), [2, Rows(3)]], [(1,), [2, [3]]]),
        (Pair(Rows(1), 2), Pair([1], 2)),
        (PARIS, datetime(2026, 3, 1, 12, 30, 1, 5, timezone(timedelta(hours=1)))),
        (pendulum.datetime(2026, 3, 1), datetime(2026, 3, 1, tzinfo=UTC)),
        (pendulum.naive(2026, 3, 1), datetime(2026, 3, 1)),
        ({PARIS.date(): [PARIS.time()]}, {date(2026, 3, 1): [time(12, 30, 1, 5)]}),
        ({pendulum.duration(days=1, microseconds=1)}, {timedelta(days=1, microseconds=1)}),
        (PARIS - PARIS.subtract(hours=3), timedelta(hours=3)),
        (pendulum.UTC, UTC),
        (pendulum.timezone(3600), timezone(timedelta(hours=1))),
    ],
    ids=lambda value: type(value).__name__,
)
def test_values_of_the_table_and_of_pendulum_become_plain_ones(value: Any, expected: Any) -> None:
    """Nested in collections too; and of the same type, which a node without pendulum can load."""
    found = plain(value)
    assert found == expected
    assert repr(found).replace("fold=1, ", "") == repr(expected)


def test_what_needs_no_conversion_is_the_same_object() -> None:
    """Nothing is copied, and an object stays shared; a collection may contain itself."""
    shared = [1, "a", None]
    value: dict[str, Any] = {"a": [shared, (shared,)], "set": {1}, "pair": Pair(1, 2)}
    value["self"] = value
    assert plain(value) is value
    twice = plain([rows := Rows(1), rows, [rows]])
    assert twice[0] is twice[1] is twice[2][0]


@pytest.mark.parametrize("row", [{"a": 1, "b": None}, (1, "a"), [0.5]], ids=lambda row: type(row).__name__)
def test_the_rows_of_a_table_are_not_looked_at_one_by_one(row: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """A list of 200,000 dictionaries is an ordinary argument."""
    looks, look = [], sky.PlainTypes._plain
    monkeypatch.setattr(sky.PlainTypes, "_plain", lambda *arguments: (looks.append(1), look(*arguments))[1])
    rows = [row] * 1000
    assert plain(rows) is rows
    assert len(looks) == 1


@pytest.mark.parametrize("wrap", [Holder, lambda value: OrderedDict(key=value), lambda value: lambda: value])
def test_values_that_stand_deeper_are_converted_while_they_are_pickled(wrap: Any) -> None:
    """In attributes, in collections of other classes, and in closures; the caller's object stays as it is."""
    value = wrap(Rows(1, PARIS))
    back = loads(dumps(plain(value), replace=TABLE.replace))
    found = back() if callable(back) else back["key"] if isinstance(back, dict) else back.inner
    assert [type(item) for item in found] == [int, datetime]


def train(data: Any, *rest: Any, rate: Any = None) -> None:
    """A function of the user."""


LOCK = threading.Lock()


def uses_a_lock() -> Any:
    return LOCK


@pytest.mark.parametrize(
    ("call", "names", "path"),
    [
        (sky.PendingCompute(train, ([1, 2, 3, Holder(LOCK)],)), None, "data[3].inner"),
        (sky.PendingCompute(train, (1, 2, Context())), None, "args[2]"),
        (sky.PendingCompute(train, (), {"rate": {"a": LOCK}}), None, "rate['a']"),
        (sky.PendingCompute(train, (1,), {"data": [LOCK]}), ("op_args", "op_kwargs"), "op_kwargs['data'][0]"),
        (sky.PendingCompute(train, ((0, [Context()]),)), ("op_args", "op_kwargs"), "op_args[0][1][0]"),
        (sky.PendingCompute(uses_a_lock), None, "uses_a_lock.<global> LOCK"),
    ],
)
def test_what_cannot_travel_is_named_by_the_path_in_the_users_arguments(
    call: sky.PendingCompute[Any], names: tuple[str, str] | None, path: str
) -> None:
    with pytest.raises(sky.NotPicklable) as caught:
        sky.plain_call(call, TABLE, names=names)
    assert caught.value.path == path
    assert str(caught.value).startswith(f"{path} cannot travel: ")
    assert "pass what it is made from" in str(caught.value).lower()


def test_an_object_of_plain_values_shows_them_and_says_that_methods_stay() -> None:
    found = loads(dumps(sky.PlainObject(rate=0.5, name="a")))
    assert (found.rate, found.name, found) == (0.5, "a", sky.PlainObject(rate=0.5, name="a"))
    with pytest.raises(AttributeError, match=r"'model_dump' is no value .* \(rate, name\), and not its methods"):
        found.model_dump()


@pytest.mark.parametrize("kind", [sky.Skip, sky.GiveUp])
def test_what_a_function_asks_for_arrives_as_itself(kind: type[sky.SkywardError]) -> None:
    class Own(kind):  # type: ignore[misc, valid-type]
        pass

    for error in (kind("no rows"), Own("no rows")):
        back = loads(dumps(error))
        assert (type(back), str(back), back.is_final) == (type(error), "no rows", True)
