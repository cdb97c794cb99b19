"""Results that cannot be loaded here, pending calls in the place of results, and the events of calls without a result."""

import pickle
import sys
import threading
import types
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import skyward_core as sky
from skyward_core.compute import PendingCompute
from skyward_core.engine import futures
from tests.conftest import RecordedEvents, shared
from tests.waiting import wait_until


def not_loaded(call: Callable[[], Any]) -> sky.ResultNotLoaded:
    with pytest.raises(sky.ResultNotLoaded) as caught:
        call()
    return caught.value


SOURCE = """
class Tensor:
    def __init__(self, data):
        self.data = data
    def __eq__(self, other):
        return type(other) is Tensor and list(other.data) == list(self.data)
    __hash__ = None
"""


def far() -> Any:
    """A library that the node has and the client does not have."""
    if "far_library" not in sys.modules:
        module = types.ModuleType("far_library")
        module.__file__ = "/opt/python/site-packages/far_library.py"
        exec(SOURCE, vars(module))
        sys.modules["far_library"] = module
    return sys.modules["far_library"]


@sky.compute
def weights(size: int) -> Any:
    return {"w": far().Tensor(np.arange(size))} if size else 0


@pytest.fixture
def install() -> Iterator[Callable[[], Any]]:
    """Installs the library here."""
    yield far
    sys.modules.pop("far_library", None)


@pytest.fixture(scope="module")
def _own() -> Iterator[tuple[sky.ComputePool, RecordedEvents]]:
    recorded = RecordedEvents()
    with shared(sky.ComputePool(provider=sky.Local(), nodes=2, display="quiet", on_event=recorded)) as pool:
        yield pool, recorded


@pytest.fixture
def own_pool(_own: tuple[sky.ComputePool, RecordedEvents]) -> sky.ComputePool:
    """Two local nodes of this module."""
    return _own[0]


def counted(pool: sky.ComputePool, recorded: RecordedEvents) -> sky.CallProgress:
    """Return the last CallProgress once all calls are counted; there are at most ten such events a second."""
    sent: int = pool._session.cluster.dispatcher.submitted
    wait_until(
        lambda: (last := recorded.of(sky.CallProgress)[-1]).done + last.cancelled == last.submitted == sent,
        "all calls to be counted",
    )
    return recorded.of(sky.CallProgress)[-1]


def test_a_result_of_a_missing_package_is_kept(
    own_pool: sky.ComputePool, install: Callable[[], Any], tmp_path: Path
) -> None:
    """The error says that the call has succeeded and what to do. The result can be loaded once the package is
    installed, also from a file and in another process.
    """
    error = not_loaded(lambda: weights(3) >> own_pool)
    assert "the call succeeded on node" in str(error)
    assert "'far_library', which is not installed here" in str(error)
    assert "error.load()" in str(error)
    assert "plain values" in str(error)
    assert error.missing == "far_library"
    assert error.node in (0, 1)
    assert isinstance(error.__cause__, ModuleNotFoundError)
    with pytest.raises(ModuleNotFoundError):
        error.load()
    (tmp_path / "result.pickle").write_bytes(error.result_bytes)
    travelled = pickle.loads(pickle.dumps(error))
    tensor = install().Tensor([0, 1, 2])
    assert error.load() == {"w": tensor}
    assert travelled.load() == {"w": tensor}
    assert (travelled.node, travelled.missing, str(travelled)) == (error.node, error.missing, str(error))
    assert pickle.loads((tmp_path / "result.pickle").read_bytes()) == {"w": tensor}
    first, second = error.load(), error.load()
    first["w"].data[0] = 7
    assert second == {"w": tensor}


def test_all_results_of_a_map_a_batch_and_a_broadcast_are_kept(
    own_pool: sky.ComputePool, install: Callable[[], Any]
) -> None:
    """No call is cancelled or run again, results that can be loaded are kept too, and all come in their order."""
    mapped = not_loaded(lambda: own_pool.map(weights, [1, 0, 2, 100_000]))
    assert str(mapped).startswith("3 of 4 results cannot be loaded here, and all are kept")
    batched = not_loaded(lambda: (weights(1) & weights(0)) >> own_pool)
    everywhere = not_loaded(lambda: weights(2) @ own_pool)
    tensor = install().Tensor
    assert mapped.load()[:3] == [{"w": tensor([0])}, 0, {"w": tensor([0, 1])}]
    assert len(mapped.load()[3]["w"].data) == 100_000
    assert pickle.loads(mapped.result_bytes)[1] == 0
    assert batched.load() == ({"w": tensor([0])}, 0)
    assert everywhere.load() == ({"w": tensor([0, 1])},) * 2


def test_futures_detached_calls_and_attached_clients_keep_it_too(
    own_pool: sky.ComputePool, _own: Any, install: Callable[[], Any]
) -> None:
    """In whatever way the result is requested. The call runs once, and counts as done and not as failed."""
    recorded: RecordedEvents = _own[1]
    add(1, 1) >> own_pool
    before = counted(own_pool, recorded)
    future = own_pool.submit(weights(1))
    errors = [not_loaded(lambda: future.result(timeout=60))]
    wait_until(lambda: recorded.of(sky.CallProgress)[-1].done == before.done + 1, "the call to be counted")
    assert recorded.of(sky.CallProgress)[-1].failed == before.failed
    detached = own_pool.start_detached(weights(1))
    errors.append(not_loaded(lambda: detached.result(timeout=60)))
    with sky.ComputePool.attach(own_pool.lease) as attached:
        errors.append(not_loaded(lambda: weights(1) >> attached))
        errors.append(not_loaded(lambda: attached.detached_call(detached.call_id).result(timeout=60)))
    assert all(error.node >= 0 for error in errors)
    assert not recorded.of(sky.CallRetrying)
    tensor = install().Tensor([0])
    assert [error.load() for error in errors] == [{"w": tensor}] * 4
    assert detached.result(timeout=60) == {"w": tensor}
    detached.forget()


# ── calls that were not made ─────────────────────────────────────────────────────────────────────────────────────────


class LoadedHere:
    """A value whose loading runs code of a module of this process."""

    def __reduce__(self) -> Any:
        return eval, ("__import__('sys').modules['loaded_here'].load()",)


def test_a_result_whose_loading_hangs_does_not_keep_the_machines(monkeypatch: pytest.MonkeyPatch) -> None:
    """The pool ends after a while without it; its future is set when it is loaded."""
    has_begun, go = threading.Event(), threading.Event()
    module: Any = types.ModuleType("loaded_here")
    module.load = lambda: (has_begun.set(), go.wait(120), "loaded")[-1]
    monkeypatch.setitem(sys.modules, "loaded_here", module)
    monkeypatch.setattr(futures, "LOADING_SECONDS", 0.1)
    pool = sky.ComputePool(provider=sky.Local(), display="quiet").open()
    future = pool.submit(PendingCompute(LoadedHere, (), {}))
    assert has_begun.wait(120)
    pool.close()
    assert pool.receipt is not None
    assert pool.receipt["left"] == []
    assert not future.done()
    go.set()
    assert future.result(60) == "loaded"


@sky.compute
def add(a: int, b: int) -> int:
    return a + b


@sky.compute
def outer(how: str) -> Any:
    match how:
        case "call":
            return add(1, 2)
        case "batch":
            return add(1, 2) & add(3, 4)
        case "list":
            return [add(n, n) for n in range(3)]
        case "deep":
            return {"a": (add(1, 2),)}
        case _:
            return {"a": add(1, 2)}


@pytest.mark.parametrize(
    ("how", "what"),
    [
        ("call", "<pending add(1, 2)>"),
        ("batch", "<pending batch of 2>"),
        ("list", "a list with <pending add"),
        ("dict", "a dict with"),
    ],
)
def test_a_function_that_returns_a_pending_call_raises_an_error_with_the_cure(
    own_pool: sky.ComputePool, how: str, what: str
) -> None:
    """The error names the call and both cures."""
    with pytest.raises(TypeError) as caught:
        outer(how) >> own_pool
    assert what in str(caught.value)
    assert "add.local(...)" in str(caught.value)
    assert "pool.map(add, ...)" in str(caught.value)


@pytest.mark.parametrize(
    ("send", "path"),
    [
        (lambda pool: add(add(1, 2), 3) >> pool, "args[0]"),
        (lambda pool: pool.map(len, [[add(1, 2) & add(3, 4)]]), "args[0][0]"),
        (lambda pool: pool.map(add(1, 2), [1]), "function"),
        (lambda pool: outer("deep") >> pool, "result['a'][0]"),
    ],
)
def test_the_error_of_a_nested_pending_call_has_its_path(
    own_pool: sky.ComputePool, send: Callable[[sky.ComputePool], Any], path: str
) -> None:
    """It used to travel, and to fail on the other side: `a pending call cannot be changed (args)`."""
    with pytest.raises(
        sky.NotPicklable, match=r"make (it|them) first, .* >> pool, and pass (its result|their results)"
    ) as caught:
        send(own_pool)
    assert caught.value.path == path


def test_a_map_with_wrong_arguments_sends_nothing(own_pool: sky.ComputePool, monkeypatch: pytest.MonkeyPatch) -> None:
    """A function that takes another number of arguments than there are iterables is refused here.

    Looks inside: what is not sent shows nowhere else.
    """
    sent = list[object]()
    monkeypatch.setattr(own_pool._session.cluster, "submit", lambda *what, **_: sent.append(what))
    with pytest.raises(TypeError, match="missing 1 required positional argument: 'b'"):
        own_pool.map(add, [1, 2])
    assert sent == []
    assert isinstance(PendingCompute(add.local, (1,)), PendingCompute)


# ── cancelled calls ──────────────────────────────────────────────────────────────────────────────────────────────────
