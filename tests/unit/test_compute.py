"""The operators alone, with a runner that records what it receives."""

import functools
from collections.abc import Callable, Iterator
from typing import Any

import pytest

import skyward_core as sky
from skyward_core.compute import PendingBatch, PendingCompute


class Notebook:
    """Used in place of a pool; returns its arguments."""

    def run(self, pending: PendingCompute[Any]) -> Any:
        return "run", pending

    def run_batch(self, batch: PendingBatch[Any]) -> Any:
        return "batch", batch.calls

    def broadcast(self, pending: PendingCompute[Any]) -> Any:
        return "broadcast", pending


@sky.compute
def add(a: int, b: int = 0) -> int:
    """Add."""
    return a + b


def test_a_call_does_not_run() -> None:
    """Calling a lazy function freezes function and arguments, and runs nothing."""

    @sky.compute
    def explode() -> None:
        raise AssertionError

    assert isinstance(explode(), PendingCompute)
    pending = add(1, b=2)
    assert (pending.fn, pending.args, dict(pending.kwargs)) == (add.local, (1,), {"b": 2})
    assert repr(pending) == "<pending add(1, b=2)>"


def test_the_operators_call_the_runner() -> None:
    """`>>` runs, `@` broadcasts, `&` and gather make a batch, whose `>>` runs it."""
    pool, a, b, c = Notebook(), add(1), add(2), add(3)
    assert a >> pool == ("run", a)
    assert a @ pool == ("broadcast", a)
    assert (a & b & c) >> pool == ("batch", (a, b, c))
    assert sky.gather(a, b, c) >> pool == ("batch", (a, b, c))
    assert len(a & b) == 2


class Model:
    def __init__(self, weight: int) -> None:
        self.weight = weight

    @sky.compute
    def predict(self, x: int) -> int:
        return self.weight * x

    @staticmethod
    @sky.compute
    def scale(x: int) -> int:
        return 10 * x

    @classmethod
    @sky.compute
    def make(cls, weight: int) -> int:
        return cls(weight).weight


def test_methods_are_bound() -> None:
    """On an object a lazy method is bound to it; static and class methods work too, on objects and on the class."""
    model = Model(3)
    pending = model.predict(4)
    assert pending.fn(*pending.args, **pending.kwargs) == 12
    assert model.predict.local(5) == 15
    assert Model.predict.local(model, 6) == 18
    assert Model.scale.local(2) == model.scale.local(2) == 20
    pending = Model.make(7)
    assert pending.fn(*pending.args, **pending.kwargs) == 7


class Network:
    def __init__(self, width: int, *, depth: int = 1) -> None:
        self.width = width

    @sky.compute
    def predict(self, x: float, /, y: float = 0.0) -> float:
        return x + y + self.width

    def plain(self, x: float) -> float:
        return x


def _many(a: int, *rest: int, key: str, **more: int) -> None: ...


def _steps(a: int) -> Iterator[int]:
    cell = a
    yield from (cell for _ in range(a))


class Callee:
    def __call__(self, a: int) -> int:
        return a


@pytest.mark.parametrize(
    ("fn", "args", "kwargs"),
    [
        (add.local, (), {}),
        (add.local, (1, 2, 3), {}),
        (add.local, (1,), {"c": 1}),
        (_many, (1,), {}),
        (_steps, (1, 2), {}),
        (Network(1).plain, (1, 2), {}),
        (functools.partial(add.local, 1, 2), (3,), {}),
        (Network.predict.local, (Network(1),), {"x": 1.0}),
    ],
)
def test_wrong_arguments_raise_pythons_own_error_at_once(
    fn: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]
) -> None:
    """Making the pending call raises the error of the plain call, before any machine is rented."""
    with pytest.raises(TypeError) as python:
        fn(*args, **kwargs)
    with pytest.raises(TypeError) as ours:
        sky.compute(fn)(*args, **kwargs)
    assert str(ours.value) == str(python.value)


@pytest.mark.parametrize(
    ("fn", "args", "kwargs"),
    [
        (add.local, (1,), {}),
        (add.local, (), {"b": 1, "a": 2}),
        (_many, (1, 2, 3), {"key": "", "x": 1}),
        (_steps, (2,), {}),
        (Network, (3,), {"depth": 2}),
        (Network(1).plain, (1.0,), {}),
        (Callee(), (1,), {}),
        (functools.partial(functools.partial(add.local, 1), 2), (), {}),
        (max, (1, 2), {"key": None}),
        (functools.wraps(add.local)(lambda *args, **kwargs: None), (1, 2, 3), {}),
    ],
)
def test_right_arguments_are_accepted(fn: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
    """Functions, classes, objects, methods, partial functions and those of C: arguments that Python accepts are
    accepted, and nothing runs.
    """
    assert isinstance(sky.compute(fn)(*args, **kwargs), PendingCompute)


def test_methods_are_checked_with_their_object_and_changed_defaults_count() -> None:
    """`model.predict(1, 2, 3)` has one argument too many; a default that a program sets later is used."""
    with pytest.raises(TypeError, match="takes from 2 to 3 positional arguments but 4 were given"):
        Network(1).predict(1, 2, 3)  # type: ignore[call-arg]  # pyright: ignore[reportCallIssue]

    def late(a: int) -> int:
        return a

    lazy = sky.compute(late)
    with pytest.raises(TypeError, match="missing 1 required positional argument: 'a'"):
        lazy()  # type: ignore[call-arg]  # pyright: ignore[reportCallIssue]
    late.__defaults__ = (5,)
    assert isinstance(lazy(), PendingCompute)  # type: ignore[call-arg]  # pyright: ignore[reportCallIssue]


def test_a_deadline_makes_another_call() -> None:
    """The call itself is not changed; the last deadline counts, and None takes it away. A batch gives it to each of
    its calls.
    """
    call = add(1, 2)
    limited = call.timeout(30)
    assert (limited.fn, limited.args, limited.timeout_seconds) == (call.fn, call.args, 30.0)
    assert call.timeout_seconds is None
    assert limited.timeout(5).timeout_seconds == 5.0
    assert limited.timeout(None).timeout_seconds is None
    assert [each.timeout_seconds for each in (call & limited).timeout(7).calls] == [7.0, 7.0]


@pytest.mark.parametrize("seconds", [0, -1, float("inf"), float("nan"), True, "30"])
def test_a_deadline_that_is_no_time_is_refused(seconds: Any) -> None:
    """At the line that writes it, before anything runs."""
    with pytest.raises(sky.BadRequest, match="timeout="):
        add(1, 2).timeout(seconds)
