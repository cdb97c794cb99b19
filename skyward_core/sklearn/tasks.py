"""What runs on a node: the tasks of one batch of joblib's, one after the other.

A task may itself call joblib, or a library with its own threads. All slots of a machine do so at the same time, so
each gets its share of the processors: `Share`.
"""

from __future__ import annotations

import os
import sys
import weakref
from collections.abc import Generator, Sequence
from contextlib import ExitStack, contextmanager
from contextvars import ContextVar
from importlib import import_module
from importlib.util import find_spec
from typing import Any, NamedTuple

from skyward_core.serialization import sources
from skyward_core.serialization.pickling import Pickled
from skyward_core.wire.messages import INLINE_BYTES
from skyward_core.wire.shared_values import Scattered, scatter

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
_arrays: ContextVar[Sequence[Any]] = ContextVar("arrays", default=())
_controller: tuple[int, Any] = (0, None)
"""How many modules were loaded when it was made, and threadpoolctl's list of libraries. Making it takes some ms."""
SHARED_BYTES = INLINE_BYTES
"""Smaller arrays travel with their task: a file costs more than they do."""
TASK_BYTES = INLINE_BYTES // 2
"""Larger tasks are scattered too. On this machine large arguments move to the process that runs the call, and a call
that was lost with it could not run again.
"""


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


# Large arrays of joblib's tasks: each is sent once to each node, however many tasks have it as an argument.
#
# A grid search hands the same data to each of its fits. joblib on one machine writes such arrays into a file that all
# processes map; here `scatter` does the same on each node.


class TaskPacker:
    """Packs the tasks of one call of `joblib.Parallel`, and knows the arrays that are on the nodes already.

    An array is recognised by its place in memory as long as its owner lives. If it is changed in place meanwhile, later
    tasks get it as it was, as with joblib's own memmaps.
    """

    def __init__(self, max_nbytes: int | None = None, mmap_mode: str | None = "r") -> None:
        self._view_bytes = max_nbytes if mmap_mode == "r" and max_nbytes is not None else sys.maxsize
        """Larger arrays are read-only in tasks, as with joblib's own memmaps; of others each batch gets a copy."""
        self._known: dict[tuple[Any, ...], tuple[weakref.ref[Any], Any]] = {}

    def pack(self, tasks: Sequence[Any]) -> tuple[Pickled, tuple[Any, ...]]:
        """Return the pickle of the tasks, with placeholders, and references to the arrays, in the order of the
        placeholders' numbers. A large pickle is a reference too.

        Raises NotPicklable.
        """
        references = dict[Any, tuple[int, Any]]()

        def replace(value: Any) -> Any:
            if type(value) is Scattered:
                index, _ = references.setdefault(id(value), (len(references), value))
                return Placeholder(index, None)
            if not _is_large_array(value):
                return NotImplemented
            key = _key(value)
            if key not in references:
                references[key] = len(references), self._reference(key, value)
            return Placeholder(references[key][0], value.nbytes <= self._view_bytes)

        packed = sources.pack(tasks, label="tasks", replace=replace)
        return packed if packed.nbytes <= TASK_BYTES else scatter(packed), tuple(
            reference for _, reference in references.values()
        )

    def _reference(self, key: tuple[Any, ...], array: Any) -> Any:
        owner, reference = self._known.get(key, (None, None))
        if owner is None or owner() is None:
            reference = scatter(sys.modules["numpy"].asarray(array))
            self._known[key] = (weakref.ref(_owner(array), lambda _: self._known.pop(key, None)), reference)
        return reference


def _is_large_array(value: Any) -> bool:
    numpy = sys.modules.get("numpy")
    kinds = (getattr(numpy, "ndarray", None), getattr(numpy, "memmap", None))
    return type(value) in kinds and value.nbytes >= SHARED_BYTES and not value.dtype.hasobject


def _key(array: Any) -> tuple[Any, ...]:
    return array.__array_interface__["data"][0], array.shape, array.strides, array.dtype


def _owner(array: Any) -> Any:
    """Return the array that owns the memory, or the last one before something else that does."""
    numpy = sys.modules["numpy"]
    while isinstance(array.base, numpy.ndarray):
        array = array.base
    return array
