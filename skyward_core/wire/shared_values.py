"""`scatter`: a large argument is sent once to each node, and calls carry only its name.

States of a shared value at a node: absent, coming, there (`engine/shipments.py`). On the client `SharedValue` has
the bytes; references and calls that have not ended hold it. When it is collected, each open pool removes its copies. On
a node a value is a file in memory that each runner maps read-only for the time of one call. NumPy arrays in it are the
file's own pages, which all runners of the node share. Everything else in it is loaded for each call.
"""

from __future__ import annotations

import threading
import uuid
from collections.abc import Mapping
from typing import Any, NoReturn, cast

from skyward_core.errors import NodeLost
from skyward_core.serialization import sources
from skyward_core.wire.messages import INLINE_BYTES, SHARED, Parcel

_parcels: Mapping[str, Parcel] = {}
_values: dict[str, Any] = {}


class SharedValue:
    """The bytes of a scattered value, and its name on nodes."""

    __slots__ = ("__weakref__", "name", "parcel")

    def __init__(self, parcel: Parcel) -> None:
        self.name = f"{SHARED}{uuid.uuid4().hex}"
        self.parcel = parcel


class Scattered:
    """A reference to a scattered value. In a call the value is in its place."""

    __slots__ = ("_kind", "_shared")

    def __init__(self, shared: SharedValue, kind: str) -> None:
        self._shared = shared
        self._kind = kind

    def __reduce__(self) -> tuple[Any, ...]:
        """Travel as the name of the value. Raises TypeError outside calls that a pool waits for."""
        parcel = self._shared.parcel
        if parcel.nbytes <= INLINE_BYTES:
            return _loaded, (parcel.data, parcel.buffers)
        if _packing.is_scattering:
            raise TypeError(
                "a reference from sky.scatter cannot be inside another scattered value: scatter the value itself as a"
                " part of the other one, or pass both references to the call"
            )
        if (used := _packing.used) is None:
            raise TypeError(
                "a reference from sky.scatter travels with a pool's calls only, and not in detached calls, which"
                " outlive it: pass the value itself"
            )
        used[self._shared.name] = self._shared
        return value_of, (self._shared.name,)

    def __repr__(self) -> str:
        return f"<scattered {self._kind} of {self._shared.parcel.nbytes:,} bytes>"

    def __getattr__(self, name: str) -> NoReturn:
        """Raise AttributeError that says where the value is: in this process this is only a reference."""
        raise AttributeError(name if name in self.__slots__ else _advice_about(self))

    def __len__(self) -> NoReturn:
        """Raise TypeError, for the same reason."""
        raise TypeError(_advice_about(self))

    def __iter__(self) -> NoReturn:
        """Raise TypeError, for the same reason."""
        raise TypeError(_advice_about(self))

    def __getitem__(self, key: object) -> NoReturn:
        """Raise TypeError, for the same reason."""
        raise TypeError(_advice_about(self))

    def __bool__(self) -> bool:
        """Be true, as any object."""
        return True


def _advice_about(reference: Scattered) -> str:
    return (
        f"{reference!r} is only a reference in this process, and calls of a pool get the value in its place: keep the"
        " value itself to use it here, also in fn.local(...)"
    )


def scatter[T](value: T) -> T:
    """Return a reference to a large value, for the arguments of many calls: each node gets the value once.

    For type checkers the reference is the value, because calls get the value in its place. This also works inside lists
    and dictionaries, and for a variable that a function reads. Each call gets the value as it is now. NumPy arrays in
    it are read-only, and lie only once in the memory of a node. The client keeps a copy for nodes that join later. When
    the reference and its calls are gone, all copies are removed. Raises NotPicklable.
    """
    _packing.is_scattering = True
    try:
        pickled = sources.pack(value)
    finally:
        _packing.is_scattering = False
    parcel = Parcel(pickled.data, tuple(bytes(buffer) for buffer in pickled.buffers))
    return cast("T", Scattered(SharedValue(parcel), type(value).__name__))


# ── on the client: which values does a call use ──────────────────────────────────────────────────────────────────────


class _Packing(threading.local):
    used: dict[str, SharedValue] | None = None
    is_scattering = False


_packing = _Packing()


class NotedValues:
    """Lets references be pickled in this thread, in a `with` block that gets the values of those that were, by name.

    A class, because each call has such a block, and one of `contextlib` takes 3 us.
    """

    def __enter__(self) -> Mapping[str, SharedValue]:
        used = _packing.used = dict[str, SharedValue]()
        return used

    def __exit__(self, *_: object) -> None:
        _packing.used = None


# ── on a node: values during one call ────────────────────────────────────────────────────────────────────────────────


def begin_call(parcels: Mapping[str, Parcel]) -> None:
    """The next call may use these values."""
    global _parcels  # noqa: PLW0603 - a runner runs one call at a time
    _parcels = parcels
    _values.clear()


def value_of(name: str) -> Any:
    """Return a value of the present call. Pickles of references call it. Raises NodeLost if its file is gone."""
    if name not in _values:
        try:
            data, buffers = _parcels[name].read_only()
        except FileNotFoundError as error:
            raise NodeLost(
                "the machine that had a scattered value in its memory is gone: submit the call again"
            ) from error
        _values[name] = sources.unpack(data, buffers).value
    return _values[name]


def _loaded(data: bytes, buffers: tuple[bytes, ...]) -> Any:
    return sources.unpack(data, buffers).value
