"""Functions of calls as they travel: name, pickle, and the scattered values that they read."""

from __future__ import annotations

import hashlib
import uuid
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

from skyward_core.compute import PendingCompute
from skyward_core.engine.outbox import Entry
from skyward_core.serialization import pickling, sources
from skyward_core.worker import shared_values
from skyward_core.worker.shared_values import SharedValue
from skyward_core.worker.wire import Call, Parcel


@dataclass(frozen=True, slots=True)
class PackedFunction:
    """A function that was pickled once, for one or many calls."""

    name: str
    parcel: Parcel
    shared: Mapping[str, SharedValue]
    """The scattered values among its variables: then runners load it for each call, and forget the values after it."""

    @staticmethod
    def of(fn: Callable[..., Any], replace_object: pickling.Replace | None) -> PackedFunction:
        """Pickle a function. Raises NotPicklable."""
        with shared_values.noted() as used:
            name, parcel = packed_function(fn, replace_object)
        return PackedFunction(name, parcel, used)

    def entry(
        self,
        pending: PendingCompute[Any],
        arguments: Parcel,
        shared: Mapping[str, SharedValue],
        job_id: str | None,
        worker: str | None,
        ahead: int = 0,
    ) -> Entry:
        """Return a new call of the function, whose arguments use these scattered values."""
        call_id, used = uuid.uuid4().hex, {**self.shared, **shared}
        in_group = job_id is not None and pending.forms_group
        job_id = job_id or call_id
        call = Call(call_id, self.name, arguments, job_id, pending.timeout_seconds, tuple(used), not self.shared, ahead)
        return Entry(call, self.parcel, worker, in_group, shared=used)


def packed_function(fn: Callable[..., Any], replace_object: pickling.Replace | None) -> tuple[str, Parcel]:
    """Return a name for the function, the hash of its content, and its pickle.

    A runner loads each name once, so the function's globals stay between calls.
    """
    pickled = sources.pack(fn, label=getattr(fn, "__name__", "function"), replace=replace_object)
    digest = hashlib.sha256(pickled.data)
    for buffer in pickled.buffers:
        digest.update(buffer)
    return digest.hexdigest(), Parcel(pickled.data, pickled.buffers)
