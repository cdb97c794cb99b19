"""What cannot travel is named, with its place in the value."""

import functools
import threading
import types
from collections.abc import Callable
from typing import Any

import pytest

from skyward_core.errors import NotPicklable
from skyward_core.serialization.pickling import dumps
from tests.serialization.bare_interpreter import Write
from tests.unit.serialization.test_pickling import project  # noqa: F401 - fixture


class Client:
    def __init__(self) -> None:
        self.lock = threading.Lock()


class Slotted:
    __slots__ = ("hook",)

    def __init__(self) -> None:
        self.hook = threading.Lock()


class Careful:
    """Has a lock, and does not pickle it."""

    def __init__(self, other: object) -> None:
        self.lock, self.other = threading.Lock(), other

    def __getstate__(self) -> dict[str, Any]:
        return {"other": self.other}


class Parent:
    """A circle: the child is not the cause."""

    def __init__(self) -> None:
        self.children = [types.SimpleNamespace(parent=self)]
        self.file = threading.Lock()


def _closure(db: object) -> Callable[[], object]:
    def train() -> object:
        return db

    return train


@pytest.mark.parametrize(
    ("make", "label", "path"),
    [
        (lambda: (types.SimpleNamespace(client=Client()),), "args", "args[0].client.lock"),
        (lambda: {"model": Slotted()}, "result", "result['model'].hook"),
        (lambda: _closure(threading.Lock()), "value", "train.<closure>.db"),
        (lambda: _closure(Client()), "value", "train.<closure>.db.lock"),
        (lambda: [1, {"a": {(1, threading.Lock())}}], "args", "args[1]['a']{tuple}[1]"),
        (lambda: functools.partial(print, 1, sep=threading.Lock()), "value", "value.keywords['sep']"),
        (lambda: Client().__init__, "value", "value.__self__.lock"),
        (lambda: Careful(Client()), "value", "value.other.lock"),
        (lambda: Parent(), "value", "value.file"),
        (lambda: threading.Lock(), "value", "value"),
        (lambda: (x for x in ()), "result", "result"),
    ],
)
def test_the_path_leads_to_the_unpicklable_value(make: Callable[[], Any], label: str, path: str) -> None:
    """The error names the smallest part that cannot travel, as a Python expression."""
    with pytest.raises(NotPicklable) as caught:
        dumps(make(), label=label)
    assert caught.value.path == path
    assert str(caught.value).startswith(f"{caught.value.path} cannot travel: it is a ")
    assert caught.value.__cause__ is not None


def test_globals_are_named(project: Write) -> None:
    """A global is named with the function that uses it, through helpers and modules, and the message says what to
    do.
    """
    own = project(
        own="""
            import threading, own_helpers
            CONNECTION = threading.Lock()
            def train(): return CONNECTION
            def indirect(): return train()
            def through_module(): return own_helpers.db
            def default(x=CONNECTION): return x
            """,
        own_helpers="import threading\ndb = threading.Lock()",
    )
    paths: dict[str, str] = {}
    for name in ("train", "indirect", "through_module", "default"):
        with pytest.raises(NotPicklable, match=r"[Cc]reate it inside the function") as caught:
            dumps(getattr(own, name))
        paths[name] = caught.value.path
    assert paths == {
        "train": "train.<global> CONNECTION",
        "indirect": "indirect.<global> train.<global> CONNECTION",
        "through_module": "through_module.<global> own_helpers.db",
        "default": "default.<default> x",
    }


def test_a_large_value_is_diagnosed_in_bounded_time() -> None:
    """An unpicklable value deep inside something large or circular ends in an error, not in an endless search."""
    deep: list[Any] = [threading.Lock()]
    for _ in range(100):
        deep = [deep]
    circle: list[Any] = [threading.Lock()]
    circle.append(circle)
    for value in (deep, circle, [*range(100_000), threading.Lock()]):
        with pytest.raises(NotPicklable, match="cannot travel"):
            dumps(value)
