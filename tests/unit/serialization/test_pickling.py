"""Which modules travel, buffers, and the path to what cannot travel."""

import functools
import sys
import threading
import types
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import cloudpickle
import numpy as np
import pytest

import skyward_core
from skyward_core.errors import NotPicklable
from skyward_core.serialization.ownership import belongs_to_user
from skyward_core.serialization.pickling import OUT_OF_BAND_BYTES, dumps, loads
from tests.serialization.bare_interpreter import Write, user_project


@pytest.fixture
def project(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Write]:
    with user_project(tmp_path, monkeypatch) as write:
        yield write
    assert cloudpickle.list_registry_pickle_by_value() == set()


def test_which_modules_are_the_users(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, project: Write) -> None:
    target = tmp_path / "target"
    (target / "thing-1.0.dist-info").mkdir(parents=True)
    (target / "own_thing").mkdir()
    (target / "own_thing" / "__init__.py").write_text("import own_thing.part")
    (target / "own_thing" / "part.py").write_text("")
    monkeypatch.syspath_prepend(str(target))
    own = project(own="import own_thing.part")
    assert belongs_to_user(own)
    import json

    import hypothesis
    import numpy.random

    installed = [json, sys, hypothesis, np, numpy.random, skyward_core, own.own_thing, own.own_thing.part]
    assert [module.__name__ for module in installed if belongs_to_user(module)] == []
    part_of_numpy = types.ModuleType("numpy.made_up")
    assert not belongs_to_user(part_of_numpy)


@pytest.mark.parametrize("wrap", [lambda a: a, lambda a: {"rows": {1, 2}, "a": a}], ids=["plain", "with a set"])
def test_large_arrays_stay_out_of_band(wrap: Callable[[Any], Any]) -> None:
    """Loading makes views again: neither end copies."""
    large, small = np.zeros(OUT_OF_BAND_BYTES // 8), np.zeros(OUT_OF_BAND_BYTES // 8 - 1)
    pickled = dumps(wrap([large, small]))
    assert len(pickled.buffers) == 1
    assert np.shares_memory(np.frombuffer(pickled.buffers[0]), large)
    assert pickled.nbytes == len(pickled.data) + OUT_OF_BAND_BYTES
    assert len(pickled.data) < OUT_OF_BAND_BYTES + 1000
    loaded = loads(pickled.data, [memoryview(bytearray(pickled.buffers[0]))])
    array = (loaded if isinstance(loaded, list) else loaded["a"])[0]
    assert not array.flags.owndata
    assert array.flags.writeable


def test_arrays_that_are_not_contiguous_travel_too() -> None:
    base = np.arange(40_000.0).reshape(200, 200)
    read_only = base.copy()
    read_only.flags.writeable = False
    arrays = [
        base[::2, ::3],
        np.asfortranarray(base),
        read_only,
        np.empty((0, 3)),
        np.zeros(3, dtype="i4,f8"),
        np.array([{1}, None], dtype=object),
    ]
    for array in arrays:
        back = loads(dumps(array))
        assert np.array_equal(back, array)
        assert back.dtype == array.dtype


class Client:
    def __init__(self) -> None:
        self.lock = threading.Lock()


class Slotted:
    __slots__ = ("hook",)

    def __init__(self) -> None:
        self.hook = threading.Lock()


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
        (lambda: threading.Lock(), "value", "value"),
        (lambda: (x for x in ()), "result", "result"),
    ],
)
def test_the_path_leads_to_the_unpicklable_value(make: Callable[[], Any], label: str, path: str) -> None:
    with pytest.raises(NotPicklable) as caught:
        dumps(make(), label=label)
    assert caught.value.path == path
    assert str(caught.value).startswith(f"{caught.value.path} cannot travel: it is a ")
    assert caught.value.__cause__ is not None


def test_globals_are_named(project: Write) -> None:
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


LIMIT = 3


class Odd:
    def __repr__(self) -> str:
        raise ValueError("no repr")


def _least(x: Any) -> None:
    assert min(x, 9) > LIMIT


def _both(x: Any) -> None:
    assert x.real > 1 and not x.imag < -1, f"both:\n{x}"


def _no_repr(x: Any) -> None:
    assert not x


def _chain(x: Any) -> None:
    assert 0 < abs(x) < LIMIT or x in (7, 8)


def _object(x: Any) -> None:
    assert x is None, [x, "100 %"]


@pytest.mark.parametrize(
    ("check", "value"),
    [(_least, 2), (_both, 0), (_chain, 5), (_chain, -3), (_object, "a" * 500), (_object, 10), (_no_repr, "ab\ncd")],
)
def test_a_rewritten_assertion_tells_the_same_without_pytest(check: Callable[[Any], None], value: Any) -> None:
    """Its text is that of pytest itself, here and after the way to a node."""
    travelled = loads(dumps(check))
    assert type(travelled.__globals__["@pytest_ar"]) is types.SimpleNamespace
    with pytest.raises(AssertionError) as here:
        check(value)
    with pytest.raises(AssertionError) as there:
        travelled(value)
    assert str(there.value) == str(here.value)
    with pytest.raises(AssertionError, match="<ValueError in the repr of Odd>"):
        loads(dumps(_no_repr))(Odd())


def test_the_path_to_what_cannot_travel_names_the_implementation(project: Write) -> None:
    own = project(
        own="""
            import functools, threading
            lock = threading.Lock()
            @functools.singledispatch
            def show(x): return x
            @show.register
            def _(x: int): return lock
            """
    )
    with pytest.raises(NotPicklable) as caught:
        dumps(own.show)
    assert caught.value.path == "show.registry[int].<global> lock"
