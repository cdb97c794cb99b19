"""Large arrays of joblib's tasks: each is sent once to each node, however many tasks have it as an argument.

A grid search hands the same data to each of its fits. joblib on one machine writes such arrays into a file that all
processes map; here `scatter` does the same on each node.
"""

from __future__ import annotations

import sys
import weakref
from collections.abc import Sequence
from typing import Any

from skyward_core.integrations.tasks import Placeholder
from skyward_core.serialization import sources
from skyward_core.serialization.pickling import Pickled
from skyward_core.worker.shared_values import Scattered, scatter
from skyward_core.worker.wire import INLINE_BYTES

SHARED_BYTES = INLINE_BYTES
"""Smaller arrays travel with their task: a file costs more than they do."""
TASK_BYTES = INLINE_BYTES // 2
"""Larger tasks are scattered too. On this machine large arguments move to the process that runs the call, and a call
that was lost with it could not run again.
"""


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
