"""Exceptions on their way from a node to their caller: with their own class, and with everything that can travel."""

import asyncio
import dataclasses
import pickle
import sys
import threading
import types
from collections.abc import Iterator
from typing import Any, cast

import botocore.exceptions
import httpx
import pydantic
import pytest
import tenacity
from tblib import pickling_support  # type: ignore[import-untyped]

import skyward_core as sky
from skyward_core.serialization import exceptions
from skyward_core.serialization.exceptions import note_for


class OwnInit(Exception):
    def __init__(self, code: int, extra: str) -> None:
        super().__init__(f"x {code}")
        self.code, self.extra = code, extra


class KeywordOnly(ValueError):
    def __init__(self, *, reason: str) -> None:
        super().__init__(f"because {reason}")
        self.reason = reason


class Doubling(Exception):
    """Python's own pickling makes "x x 1" of it, without an error."""

    def __init__(self, code: object) -> None:
        super().__init__(f"x {code}")


class NoDisk(OSError):
    def __init__(self, code: int, where: str, free_bytes: int) -> None:
        super().__init__(code, "no room", where)
        self.free_bytes = free_bytes


@dataclasses.dataclass
class Data(Exception):
    code: int
    names: list[str] = dataclasses.field(default_factory=list)


class BadReduce(Exception):
    def __reduce__(self) -> Any:
        raise RuntimeError("no")


class Registered(Exception):
    """Defines its own pickling."""

    def __init__(self, code: int) -> None:
        super().__init__(code)
        self.code, self.lock = code, threading.Lock()

    def __reduce__(self) -> Any:
        return Registered, (self.code,)


class Holder(Exception):
    def __init__(self, **held: Any) -> None:
        super().__init__("held")
        vars(self).update(held)

    def __str__(self) -> str:
        return f"held {self.lock!r}" if hasattr(self, "lock") else "nothing held"


class OwnGroup(ExceptionGroup[Exception]):
    def __new__(cls, code: int, errors: list[Exception]) -> "OwnGroup":
        self = super().__new__(cls, f"group {code}", errors)
        self.code = code
        return self

    code: int


class Row(pydantic.BaseModel):
    size: int


pickling_support.install()  # as Dask does, for every class of exceptions: it loses slots


def over[E: BaseException](error: E) -> E:
    """Return an exception that is raised on a node, as the caller gets it."""
    pickled = exceptions.pack(error)
    return cast("E", exceptions.unpack(pickled.data, pickled.buffers, 3, "remote text"))


def raised(error: BaseException) -> BaseException:
    """Raise it, as a call does, so that it has a traceback."""
    try:
        raise error
    except BaseException as caught:
        return caught


@pytest.mark.parametrize(
    "error",
    [
        OwnInit(7, "more"),
        KeywordOnly(reason="so"),
        Doubling(1),
        NoDisk(28, "/data", 12),
        Data(3, ["a"]),
        BadReduce(1, "two"),
        Registered(9),
        FileNotFoundError(2, "no", "/x"),
        UnicodeDecodeError("utf-8", b"\xff", 0, 1, "bad"),
        SyntaxError("odd", ("f.py", 3, 1, "x x")),
        ImportError("no", name="torch", path="/p"),
        StopIteration(5),
        botocore.exceptions.ClientError({"Error": {"Code": "Busy", "Message": "wait"}}, "RunInstances"),
        sky.CallCrashed("gone", 1, 7, ["last"]),
        sky.NotPicklable("no", "args[0]"),
    ],
    ids=lambda error: type(error).__name__,
)
def test_an_exception_arrives_unchanged(error: BaseException) -> None:
    """Its __init__ runs again only if the class defines that."""
    there = over(raised(error))
    assert type(there) is type(error)
    assert (there.args, str(there)) == (error.args, str(error))
    for name in {*vars(error), *vars(there)} - {"__notes__", "lock"}:
        assert vars(there)[name] == vars(error)[name]
    for name in ("errno", "filename", "name", "path", "start", "object", "lineno", "value"):
        assert getattr(there, name, None) == getattr(error, name, None)
    assert str(there.__cause__) == "\n  remote text"
    assert there.__notes__ == ["raised on node 3 of the pool; its traceback there is the cause shown above"]


def test_exceptions_of_libraries_arrive_with_their_attributes() -> None:
    response = httpx.Response(404, request=httpx.Request("GET", "http://x"), text="gone")
    there = over(httpx.HTTPStatusError("404", request=response.request, response=response))
    assert type(there) is httpx.HTTPStatusError
    assert (there.response.status_code, there.response.text, there.request.method) == (404, "gone", "GET")
    with pytest.raises(pydantic.ValidationError) as caught:
        Row.model_validate({"size": "many"})
    invalid = over(caught.value)
    assert type(invalid) is pydantic.ValidationError
    assert invalid.errors() == caught.value.errors()
    attempt = tenacity.Future(1)
    attempt.set_exception(OwnInit(1, "e"))
    given_up = over(tenacity.RetryError(attempt))
    assert type(given_up) is tenacity.RetryError
    assert any("last_attempt" in note for note in given_up.__notes__)


def test_values_that_cannot_travel_are_omitted_and_named() -> None:
    many, mixed = [OwnInit(2, "a"), Doubling(5)], [1, OwnInit(3, "b")]
    there = over(Holder(lock=threading.Lock(), size=3, inner=OwnInit(1, "deep"), many=many, mixed=mixed))
    assert (there.size, there.inner.extra, there.mixed[1].extra) == (3, "deep", "b")
    assert (there.many[0].code, str(there.many[1])) == (2, "x 5")
    assert not hasattr(there, "lock")
    assert any(note.startswith("it has come without lock (TypeError: cannot pickle") for note in there.__notes__)
    assert any(note.startswith("on its node it says: held <unlocked") for note in there.__notes__)
    without = over(ValueError("open", threading.Lock()))
    assert without.args[0] == "open"
    assert without.args[1].startswith("<unlocked _thread.lock")


def test_notes_causes_and_contexts_arrive() -> None:
    try:
        try:
            try:
                raise OwnInit(1, "root")
            except OwnInit as error:
                raise KeywordOnly(reason="middle") from error
        except KeywordOnly:
            raise Doubling("top")
    except Doubling as error:
        error.add_note("mind this")
        there = over(error)
    assert there.__notes__[0] == "mind this"
    middle = there.__context__
    assert isinstance(middle, KeywordOnly)
    assert isinstance(middle.__cause__, OwnInit)
    assert middle.__cause__.extra == "root"
    assert isinstance(there.__cause__, exceptions.RemoteTraceback)
    explicit = KeywordOnly(reason="explicit")
    explicit.__cause__ = OwnInit(2, "cause")
    there_too = over(explicit)
    assert isinstance(there_too.__cause__, OwnInit)
    assert isinstance(there_too.__cause__.__cause__, exceptions.RemoteTraceback)


def test_groups_arrive_with_their_members() -> None:
    inner = ExceptionGroup("inner", [KeywordOnly(reason="b"), Holder(lock=threading.Lock())])
    there = over(ExceptionGroup("outer", [OwnInit(1, "a"), inner, OwnGroup(4, [OSError(2, "no")])]))
    assert str(there) == "outer (3 sub-exceptions)"
    assert there.subgroup(KeywordOnly) is not None
    assert isinstance(there.exceptions[2], OwnGroup)
    assert there.exceptions[2].code == 4
    own, rest = there.split(OwnInit)
    assert own is not None
    assert cast(OwnInit, own.exceptions[0]).extra == "a"
    assert rest is not None


@pytest.fixture
def elsewhere() -> Iterator[types.ModuleType]:
    """A library that exists only on the node."""
    module = types.ModuleType("far_library")
    module.__file__ = "/opt/python/site-packages/far_library.py"
    source = "class FarError(RuntimeError):\n    pass\nclass Tensor:\n    pass\n"
    exec(source, vars(module))
    sys.modules["far_library"] = module
    yield module
    sys.modules.pop("far_library", None)


def test_a_class_that_does_not_exist_here_is_named_first(elsewhere: types.ModuleType) -> None:
    alone = exceptions.pack(elsewhere.FarError("out of\nmemory"))
    group = exceptions.pack(ExceptionGroup("some", [elsewhere.FarError("far"), OwnInit(1, "near")]))
    with_tensor = Holder(size=3)
    with_tensor.tensor = elsewhere.Tensor()  # type: ignore[attr-defined]
    partly = exceptions.pack(with_tensor)
    del sys.modules["far_library"]
    error = exceptions.unpack(alone.data, alone.buffers, 2, "Traceback ...\nfar_library.FarError: out of\nmemory")
    assert isinstance(error, sky.RemoteError)
    assert error.type_name == "far_library.FarError"
    assert str(error).splitlines()[0] == (
        "far_library.FarError: out of (raised on node 2; its class cannot be loaded here: ModuleNotFoundError: No module named 'far_library')"
    )
    assert "Traceback ..." in str(error)
    assert pickle.loads(pickle.dumps(error)).type_name == error.type_name
    both = exceptions.unpack(group.data, group.buffers, 2, "text")
    assert isinstance(both, ExceptionGroup)
    far, near = cast("tuple[Exception, Exception]", both.exceptions)
    assert isinstance(far, sky.RemoteError)
    assert str(far).startswith("far_library.FarError: far")
    assert isinstance(near, OwnInit)
    held = exceptions.unpack(partly.data, partly.buffers, 2, "text")
    assert isinstance(held, Holder)
    assert any("without tensor (ModuleNotFoundError: No module named 'far_library')" in note for note in held.__notes__)


@pytest.mark.parametrize(
    "error",
    [KeyboardInterrupt(), SystemExit(3), GeneratorExit(), asyncio.CancelledError("stop")],
    ids=lambda error: type(error).__name__,
)
def test_exceptions_that_would_end_the_caller_are_replaced(error: BaseException) -> None:
    """They are not raised here, because the caller was neither interrupted nor cancelled."""
    there = over(error)
    assert isinstance(there, sky.RemoteError)
    assert str(there).startswith(exceptions.name_of(type(error)))


@pytest.mark.parametrize(
    ("file", "advice"),
    [
        ("own_note.py", "travels if an `import` statement names it"),
        ("own_note.abi3.so", "machine code does not travel"),
    ],
)
def test_a_module_of_the_project_is_in_no_index(tmp_path, monkeypatch, file, advice):
    (tmp_path / file).write_bytes(b"")
    monkeypatch.syspath_prepend(str(tmp_path))
    assert advice in str(note_for(ModuleNotFoundError(name="own_note")))
