"""What runs on a node: the tasks of one batch of joblib's, one after the other.

A task may itself call joblib, or a library with its own threads. All slots of a machine do so at the same time, so
each gets its share of the processors: `Share`.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Generator, Sequence
from contextlib import ExitStack, contextmanager
from contextvars import ContextVar
from importlib import import_module
from importlib.util import find_spec
from typing import Any, NamedTuple

from skyward_core.serialization import sources
from skyward_core.serialization.pickling import Pickled

THREAD_VARIABLES = (
    "OMP_NUM_THREADS",
    "OPENBLAS_NUM_THREADS",
    "MKL_NUM_THREADS",
    "BLIS_NUM_THREADS",
    "VECLIB_MAXIMUM_THREADS",
    "NUMBA_NUM_THREADS",
    "NUMEXPR_NUM_THREADS",
)
MOST_PROCESSORS = "LOKY_MAX_CPU_COUNT"
"""What joblib takes for the number of processors, and so for `n_jobs=-1` inside a task."""


class Share(NamedTuple):
    """How many slots share the processors of a machine, and the threads of a task if the user has set them
    (`inner_max_num_threads`).
    """

    slots: int
    threads: int | None = None

    @property
    def inner_threads(self) -> int:
        """How many threads each library in a task may use."""
        return self.threads if self.threads is not None else max(1, _processors() // self.slots)


def run_tasks(packed: Pickled, arrays: Sequence[Any], share: Share) -> list[Any]:
    """Run tasks in turn; return their results. `arrays` are the large arrays of their arguments (`Placeholder`)."""
    with ExitStack() as stack:
        threads = share.inner_threads
        stack.enter_context(_variables(threads))
        token = _arrays.set(arrays)
        try:
            tasks = sources.unpack(packed.data, map(_writable, packed.buffers)).value
        finally:
            _arrays.reset(token)
        stack.enter_context(_limited_libraries(threads, is_set=share.threads is not None))
        stack.enter_context(_nested_joblib(threads))
        return [function(*args, **kwargs) for function, args, kwargs in tasks]


def _writable(buffer: memoryview | bytes) -> memoryview | bytearray:
    """Return a buffer that a task may change, as it may here. Those of large tasks are read-only."""
    view = memoryview(buffer)
    return bytearray(view) if view.readonly else view


# ── large arrays ─────────────────────────────────────────────────────────────────────────────────────────────────────

_arrays: ContextVar[Sequence[Any]] = ContextVar("arrays", default=())


class Placeholder:
    """Stands for a large array in the pickle of the tasks. On the node the array is in its place.

    With `is_copied` each batch gets a copy that it may change, otherwise a read-only view, as from joblib's memmaps.
    None is for what the user has scattered, which need not be an array: tasks get it as it is.
    """

    def __init__(self, index: int, is_copied: bool | None) -> None:
        self._index = index
        self._is_copied = is_copied

    def __reduce__(self) -> tuple[Any, ...]:
        return value_at, (self._index, self._is_copied)


def value_at(index: int, is_copied: bool | None) -> Any:
    """Return a large array, or a scattered value, of the present batch."""
    array = _arrays.get()[index]
    if is_copied is None:
        return array
    if is_copied:
        return array.copy(order="K")
    view = array.view()
    view.flags.writeable = False
    return view


# ── processors ───────────────────────────────────────────────────────────────────────────────────────────────────────


def _processors() -> int:
    """Return how many processors this process may use. joblib knows the limits of containers too."""
    if find_spec("joblib") is None:
        return len(os.sched_getaffinity(0))
    return import_module("joblib").cpu_count()


@contextmanager
def _variables(threads: int) -> Generator[None]:
    """Set the variables that libraries read when they are loaded, except those that the user has set."""
    added = [name for name in (*THREAD_VARIABLES, MOST_PROCESSORS) if name not in os.environ]
    os.environ.update(dict.fromkeys(added, str(threads)))
    try:
        yield
    finally:
        for name in added:
            os.environ.pop(name, None)


_controller: tuple[int, Any] = (0, None)
"""How many modules were loaded when it was made, and threadpoolctl's list of libraries. Making it takes some ms."""


@contextmanager
def _limited_libraries(threads: int, *, is_set: bool) -> Generator[None]:
    """Limit the threads of the numerical libraries that are loaded already, where threadpoolctl is installed."""
    global _controller  # noqa: PLW0603 - a runner runs one call at a time
    if "numpy" not in sys.modules or find_spec("threadpoolctl") is None:
        yield
        return
    if _controller[0] != len(sys.modules):
        controller = import_module("threadpoolctl").ThreadpoolController()
        _controller = (len(sys.modules), controller)
    users = os.environ["OMP_NUM_THREADS"]  # the user's own, or ours
    limit = int(users) if users.isdigit() and not is_set else threads
    with _controller[1].limit(limits=limit):
        yield


@contextmanager
def _nested_joblib(threads: int) -> Generator[None]:
    """Let joblib inside a task use threads, or nothing beside the task's own thread if that is its whole share."""
    if find_spec("joblib") is None:
        yield
        return
    backends = import_module("joblib.parallel")
    kind = backends.SequentialBackend if threads == 1 else backends.ThreadingBackend
    with backends.parallel_config(backend=kind(nesting_level=1), n_jobs=None):
        yield
