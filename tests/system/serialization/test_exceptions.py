"""Exceptions on their way from a node to their caller: with their own class, and with everything that can travel."""

import asyncio
import threading

import pytest
from tblib import pickling_support  # type: ignore[import-untyped]

import skyward_core as sky
from tests.unit.serialization.test_exceptions import (
    Holder,
    OwnInit,
)

pickling_support.install()  # as Dask does, for every class of exceptions: it loses slots


# ── over real nodes ──────────────────────────────────────────────────────────────────────────────────────────────────


def test_except_clauses_catch_the_exceptions_of_calls(pool: sky.ComputePool) -> None:
    """The classes are the caller's: those of this file, which travel by value, and those made in a function; also
    one raised by a helper.
    """

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
