"""The large functions and scattered values in the memory of each node, and when they are removed: pure bookkeeping.

States of a function or value at a node:

    absent ──planned──▶ coming ──arrived──▶ there ──evicted──▶ absent
                          └────failed────▶ absent

Least recently used functions are evicted first, until the others fit the limit. A scattered value is evicted when the
client has released it, which may be before it has arrived. Functions and values stay while a batch refers to them that
is in flight, or has outlived its head (`kept_calls.py`).
"""

from __future__ import annotations

from collections.abc import Callable, Collection
from dataclasses import dataclass, field

from skyward_core.engine import actions as do
from skyward_core.worker.wire import SHARED, Parcel

LIMIT_BYTES = 64 << 20


@dataclass(slots=True)
class _File:
    parcel: Parcel
    nbytes: int
    users: set[int] = field(default_factory=set[int])
    """The numbers of the batches in flight that refer to it."""
    is_shared: bool = False
    is_released: bool = False
    """Whether it is a scattered value, and whether the client has released it."""


class FunctionFiles:
    """The functions and scattered values in the memory of one node."""

    def __init__(self, limit_bytes: int = LIMIT_BYTES) -> None:
        self._limit_bytes = limit_bytes
        self._files: dict[str, _File] = {}
        """In the order of their last use."""
        self._coming: set[str] = set()
        self._released: set[str] = set()
        """Scattered values that were released while they were coming."""

    @property
    def nbytes(self) -> int:
        """How much memory the functions take, in bytes."""
        return sum(file.nbytes for file in self._files.values() if not file.is_shared)

    def find(self, name: str) -> Parcel | None:
        """Return the parcel of a function in the node's memory; None if the function is not there."""
        file = self._files.get(name)
        return file.parcel if file is not None else None

    def use(self, number: int, names: Collection[str]) -> dict[str, Parcel]:
        """Note that a batch refers to these functions; return those that are there."""
        found = dict[str, Parcel]()
        for name in names:
            if (file := self._files.pop(name, None)) is not None:
                self._files[name] = file
                file.users.add(number)
                found[name] = file.parcel
        return found

    def done(self, number: int) -> None:
        """Note that a batch is no longer in flight."""
        for file in self._files.values():
            file.users.discard(number)

    def is_coming(self, names: Collection[str]) -> bool:
        """Return whether one of these functions is being uploaded."""
        return any(name in self._coming for name in names)

    def plan(self, names: Collection[str]) -> None:
        """Note that functions are being uploaded."""
        self._coming.update(names)

    def arrived(self, name: str, parcel: Parcel, nbytes: int) -> None:
        """Note that a function is there."""
        self._coming.discard(name)
        self._files[name] = _File(parcel, nbytes, is_shared=name.startswith(SHARED), is_released=name in self._released)
        self._released.discard(name)

    def failed(self, names: Collection[str]) -> None:
        """Note that functions have not arrived."""
        self._coming.difference_update(names)
        self._released.difference_update(names)

    def release(self, name: str) -> None:
        """Note that no call will use a scattered value any more."""
        if (file := self._files.get(name)) is not None:
            file.is_released = True
        elif name in self._coming:
            self._released.add(name)

    def evict(self) -> list[Parcel]:
        """Forget functions beyond the limit, and released values; return the files that are to be removed."""
        evicted = list[Parcel]()
        excess = self.nbytes - self._limit_bytes
        for name, file in list(self._files.items()):
            if file.users or not (file.is_released if file.is_shared else excess > 0):
                continue
            del self._files[name]
            evicted.append(file.parcel)
            if not file.is_shared:
                excess -= file.nbytes
        return evicted


class FunctionsOnNodes:
    """The functions in the memory of all nodes, by instance id. `act` takes the actions."""

    def __init__(self, act: Callable[[do.Action], object]) -> None:
        self._by_instance: dict[str, FunctionFiles] = {}
        self._do = act

    def at(self, instance_id: str) -> FunctionFiles:
        """Return the functions in the memory of a node."""
        return self._by_instance.setdefault(instance_id, FunctionFiles())

    def evict(self, instance_id: str) -> None:
        """Remove functions beyond the limit from a node."""
        for parcel in self.at(instance_id).evict():
            self._do(do.Remove(instance_id, parcel))

    def done(self, number: int) -> None:
        """Note that a batch is no longer in flight, on any node, and remove functions beyond the limit."""
        for instance_id, files in self._by_instance.items():
            files.done(number)
            self.evict(instance_id)

    def release(self, name: str) -> None:
        """Remove a scattered value from all nodes: no call will use it any more."""
        for instance_id, files in self._by_instance.items():
            files.release(name)
            self.evict(instance_id)

    def keep(self, is_known: Callable[[str], bool]) -> None:
        """Forget the functions of instances that are not known any more."""
        self._by_instance = {
            instance_id: files for instance_id, files in self._by_instance.items() if is_known(instance_id)
        }
