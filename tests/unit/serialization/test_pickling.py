"""Objects of the user's project reach a bare interpreter with only installed packages, and come back as themselves."""

import pickle
import sys
import types
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import cloudpickle
import numpy as np
import pytest

import skyward_core
from skyward_core.serialization.ownership import belongs_to_user
from skyward_core.serialization.pickling import OUT_OF_BAND_BYTES, Pickled, dumps, loads
from tests.serialization.bare_interpreter import Write, results_of, user_project

NODE = """
import pickle, sys
sys.path.append(sys.argv[1])
from skyward_core.serialization.pickling import dumps, loads
for call in pickle.load(sys.stdin.buffer):
    try:
        fn, args, kwargs = loads(call)
        ending = True, fn(*args, **kwargs)
    except Exception as error:
        ending = False, error.with_traceback(None)
    pickle.dump(dumps(ending, label="result"), sys.stdout.buffer, protocol=5)
    assert not any(name == "own" or name.startswith("own_") for name in sys.modules)
"""


def on_node(*calls: Pickled) -> list[Any]:
    """Run the calls, one after the other, in one bare interpreter; return their results, or raise the first error."""
    return results_of(NODE, calls)


def call(fn: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
    return on_node(dumps((fn, args, kwargs)))[0]


@pytest.fixture
def project(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Write]:
    with user_project(tmp_path, monkeypatch) as write:
        yield write
    assert cloudpickle.list_registry_pickle_by_value() == set()


def test_which_modules_are_the_users(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, project: Write) -> None:
    """The standard library, installed distributions in any place, extension modules and skyward itself are not the
    user's; all others are.
    """
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


# ── buffers ──────────────────────────────────────────────────────────────────────────────────────────────────────────


@pytest.mark.parametrize("wrap", [lambda a: a, lambda a: {"rows": {1, 2}, "a": a}], ids=["plain", "with a set"])
def test_large_arrays_stay_out_of_band(wrap: Callable[[Any], Any]) -> None:
    """A large array is a view in `buffers`, a small one is in the pickle, and loading makes views again: neither end
    copies.
    """
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
    """Strided, Fortran-ordered, read-only, empty, structured and object arrays come back equal."""
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


def test_a_pickled_passes_its_buffers_on() -> None:
    """A transport with protocol 5 carries the buffers of a `Pickled` out of band; any other one carries it as a
    whole.
    """
    pickled = dumps(np.arange(100_000))
    seen: list[pickle.PickleBuffer] = []
    data = pickle.dumps(pickled, protocol=5, buffer_callback=seen.append)
    assert len(data) < 1000
    for again in (pickle.loads(data, buffers=seen), pickle.loads(pickle.dumps(pickled, protocol=4))):
        assert np.array_equal(loads(again), np.arange(100_000))
