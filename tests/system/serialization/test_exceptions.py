"""Exceptions on their way from a node to their caller: with their own class, and with everything that can travel."""

import asyncio
import threading

import pytest

import skyward_core as sky
from tests.unit.serialization.test_exceptions import Holder, OwnInit


def test_except_clauses_catch_the_exceptions_of_calls(pool: sky.ComputePool) -> None:
    class Local(Exception):
        def __init__(self, code: int, extra: str) -> None:
            super().__init__(f"x {code}")
            self.extra = extra

    @sky.compute
    def fails(how: str) -> None:
        match how:
            case "local":
                raise Local(1, "e")
            case "own":
                raise OwnInit(2, "f") from KeyError("k")
            case "lock":
                raise Holder(lock=threading.Lock(), size=1)
            case "group":
                raise ExceptionGroup("all", [OwnInit(3, "g"), ExceptionGroup("inner", [Local(4, "h")])])
            case _:
                raise asyncio.CancelledError

    with pytest.raises(Local) as local:
        fails("local") >> pool
    assert local.value.extra == "e"
    with pytest.raises(OwnInit) as own:
        fails("own") >> pool
    assert own.value.extra == "f"
    assert isinstance(own.value.__cause__, KeyError)
    with pytest.raises(Holder) as holder:
        fails("lock") >> pool
    assert vars(holder.value)["size"] == 1
    caught = list[BaseException]()
    try:
        fails("group") >> pool
    except* Local as errors:
        caught += errors.exceptions
    except* OwnInit as errors:
        caught += errors.exceptions
    assert len(caught) == 2
    with pytest.raises(sky.RemoteError, match=r"^asyncio\.exceptions\.CancelledError"):
        fails("cancelled") >> pool


def _notes(pending: sky.PendingCompute, pool: sky.ComputePool, kind: type[BaseException]) -> str:
    with pytest.raises(kind) as caught:
        pending >> pool
    assert type(caught.value) is kind
    return "\n".join(caught.value.__notes__)


@sky.compute
def import_missing(name: str) -> None:
    raise ModuleNotFoundError(f"No module named {name!r}", name=name)


@sky.compute
def read(path: str) -> str:
    with open(path) as file:
        return file.read()


def test_a_module_that_the_node_lacks_is_named_as_its_distribution(pool):
    assert 'Image(pip=[...]), as "scikit-learn"' in _notes(import_missing("sklearn"), pool, ModuleNotFoundError)
    assert 'Image(pip=[...]), as "no_such_module_9"' in _notes(
        import_missing("no_such_module_9"), pool, ModuleNotFoundError
    )


def test_a_relative_path_belongs_to_the_node(pool):
    assert "the working directory of a call is the node's own" in _notes(read("data.csv"), pool, FileNotFoundError)
    assert "working directory" not in _notes(read("/no/such/file"), pool, FileNotFoundError)
    assert "working directory" not in _notes(read("."), pool, IsADirectoryError)
