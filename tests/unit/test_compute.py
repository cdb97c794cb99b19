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
    return a + b


def test_the_operators_call_the_runner() -> None:
    """A call freezes function and arguments, and runs nothing."""
    pending = add(1, b=2)
    assert (pending.fn, pending.args, dict(pending.kwargs)) == (add.local, (1,), {"b": 2})
    assert repr(pending) == "<pending add(1, b=2)>"
    pool, a, b, c = Notebook(), add(1), add(2), add(3)
    assert a >> pool == ("run", a)
    assert a @ pool == ("broadcast", a)
    assert (a & b & c) >> pool == sky.gather(a, b, c) >> pool == ("batch", (a, b, c))
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
    model = Model(3)
    for pending, value in ((model.predict(4), 12), (Model.make(7), 7)):
        assert pending.fn(*pending.args, **pending.kwargs) == value
    assert (model.predict.local(5), Model.predict.local(model, 6)) == (15, 18)
    assert Model.scale.local(2) == model.scale.local(2) == 20


class Network:
    def __init__(self, width: int, *, depth: int = 1) -> None:
        self.width = width

    @sky.compute
    def predict(self, x: float, /, y: float = 0.0) -> float:
        return x + y + self.width

    def plain(self, x: float) -> float:
        return x

    def __call__(self, a: int) -> int:
        return a


def _many(a: int, *rest: int, key: str, **more: int) -> None: ...


def _steps(a: int) -> Iterator[int]:
    yield from range(a)


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
    """Before any machine is rented."""
    with pytest.raises(TypeError) as python:
        fn(*args, **kwargs)
    with pytest.raises(TypeError) as ours:
        sky.compute(fn)(*args, **kwargs)
    assert str(ours.value) == str(python.value)


@pytest.mark.parametrize(
    ("fn", "args", "kwargs"),
    [
        (add.local, (), {"b": 1, "a": 2}),
        (_many, (1, 2, 3), {"key": "", "x": 1}),
        (_steps, (2,), {}),
        (Network, (3,), {"depth": 2}),
        (Network(1).plain, (1.0,), {}),
        (Network(1), (1,), {}),
        (functools.partial(functools.partial(add.local, 1), 2), (), {}),
        (max, (1, 2), {"key": None}),
        (functools.wraps(add.local)(lambda *args, **kwargs: None), (1, 2, 3), {}),
    ],
)
def test_right_arguments_are_accepted(fn: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
    assert isinstance(sky.compute(fn)(*args, **kwargs), PendingCompute)


def test_methods_are_checked_with_their_object_and_changed_defaults_count() -> None:
    with pytest.raises(TypeError, match="takes from 2 to 3 positional arguments but 4 were given"):
        Network(1).predict(1, 2, 3)  # type: ignore[call-arg]  # pyright: ignore[reportCallIssue]

    def late(a: int) -> int:
        return a

    lazy: Any = sky.compute(late)
    with pytest.raises(TypeError, match="missing 1 required positional argument: 'a'"):
        lazy()
    late.__defaults__ = (5,)
    assert isinstance(lazy(), PendingCompute)


def test_a_deadline_makes_another_call() -> None:
    """The last one counts, and None takes it away. A batch gives it to each of its calls."""
    call = add(1, 2)
    limited = call.timeout(30)
    assert (limited.fn, limited.args, limited.timeout_seconds) == (call.fn, call.args, 30.0)
    assert call.timeout_seconds is None
    assert (limited.timeout(5).timeout_seconds, limited.timeout(None).timeout_seconds) == (5.0, None)
    assert [each.timeout_seconds for each in (call & limited).timeout(7).calls] == [7.0, 7.0]


@pytest.mark.parametrize("seconds", [0, -1, float("inf"), float("nan"), True, "30"])
def test_a_deadline_that_is_no_time_is_refused(seconds: Any) -> None:
    with pytest.raises(sky.BadRequest, match="timeout="):
        add(1, 2).timeout(seconds)


@pytest.mark.parametrize("target", [3, "pool", None, [1], add, sky.ComputePool], ids=repr)
def test_only_a_pool_can_be_the_right_operand(target: Any) -> None:
    for use in (lambda: add(1) >> target, lambda: add(1) @ target, lambda: (add(1) & add(2)) >> target):
        with pytest.raises(TypeError, match=r"with sky\.ComputePool"):
            use()


@pytest.mark.parametrize(
    ("wrong", "words"), [(add, r"write `add\(\.\.\.\) {} pool`"), (42, "'int' is none: write @sky.compute")]
)
def test_what_is_no_pending_call_is_explained_by_the_pool(wrong: Any, words: str) -> None:
    pool: Any = sky.ComputePool(provider=sky.Local())
    with pytest.raises(TypeError, match=words.format(">>")):
        wrong >> pool
    with pytest.raises(TypeError, match=words.format("@")):
        wrong @ pool


def test_a_function_in_place_of_its_call_is_explained() -> None:
    wrong: Any
    for wrong, combined, gathered in ((add, r"add\(\.\.\.\)", r"add\(\.\.\.\)"), (42, "parentheses", "@compute")):
        with pytest.raises(TypeError, match=combined):
            add(1) & wrong
        with pytest.raises(TypeError, match=gathered):
            sky.gather(wrong)
