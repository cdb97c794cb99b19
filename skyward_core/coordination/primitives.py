"""`sky.Lock`, `sky.Semaphore`, `sky.Event`, `sky.Queue`, `sky.Variable`: for the calls of a pool, on any node.

Objects with the same name are the same object, as in Dask. Names belong to a pool and end with it. In a call it is the
pool of the call; elsewhere it is `pool`. An object may be an argument of a call, or a variable that the function reads:
only its name travels.
"""

from __future__ import annotations

import pickle
import threading
from types import TracebackType
from typing import Any, Protocol, Self, cast

from skyward_core.coordination.channel import Channel, call_channel
from skyward_core.coordination.messages import (
    LONGEST_SECONDS,
    NAME_CHARACTERS,
    VALUE_BYTES,
    Answer,
    Kind,
    Request,
    Status,
    is_name,
)
from skyward_core.errors import BadRequest, NodeLost, NotPicklable
from skyward_core.serialization import sources


class HasCoordination(Protocol):
    """A pool: `ComputePool`."""

    def coordination(self) -> Channel: ...


class _Shared:
    """An object of a pool, by its kind and name."""

    _kind: Kind

    def __init__(self, name: str, pool: HasCoordination | None) -> None:
        if not is_name(name):
            raise BadRequest(f"the name {name!r}: write 1 to {NAME_CHARACTERS} characters")
        self.name = name
        self._pool = pool

    def __reduce__(self) -> tuple[Any, ...]:
        """Travel as the name, without the pool and without leases."""
        return type(self), (self.name,)

    def __repr__(self) -> str:
        return f"sky.{type(self).__name__}({self.name!r})"

    @property
    def _channel(self) -> Channel:
        return call_channel(repr(self)) if self._pool is None else self._pool.coordination()

    def _ask(
        self,
        action: str,
        *,
        value: bytes = b"",
        limit: int = 0,
        target: int = 0,
        timeout: float | None = 0.0,
        channel: Channel | None = None,
    ) -> Answer:
        if timeout is not None and not 0 <= timeout <= LONGEST_SECONDS:
            raise BadRequest(f"timeout={timeout!r}: write seconds, or None to wait as long as it takes")
        channel = channel or self._channel
        answer = channel.ask(Request(channel.number(), self._kind, self.name, action, value, limit, target, timeout))
        if answer.status == Status.REFUSED:
            raise BadRequest(answer.text)
        return answer


def _packed(value: Any, shared: _Shared) -> bytes:
    """Return the pickle of a value, with what calls' values have: functions of the user's project by value."""
    pickled = sources.pack(value)
    packed = pickle.dumps((pickled.data, tuple(map(bytes, pickled.buffers))), protocol=5)
    if len(packed) > VALUE_BYTES:
        raise NotPicklable(
            f"a value of {len(packed):,} bytes for {shared!r}, which takes at most {VALUE_BYTES:,}: write it to a"
            " volume and put its path here; pass a large value that many calls read as an argument, with sky.scatter"
        )
    return packed


def _unpacked(packed: bytes) -> Any:
    data, buffers = pickle.loads(packed)
    return sources.unpack(data, map(bytearray, buffers)).value


class Semaphore(_Shared):
    """At most `max_leases` holders at a time, in all calls of a pool and the program that has opened it.

        with sky.Semaphore(2, "downloads"):
            download()

    Leases are given in the order of the requests. A lease that is not released ends with its call, or with the process
    that holds it. After an error, a crash, a deadline or a cancellation it ends at once; after the loss of a node, when
    the pool notices it. All who use a name at the same time must give the same `max_leases`: BadRequest otherwise.
    """

    _kind = Kind.SEMAPHORE

    def __init__(self, max_leases: int, name: str, *, pool: HasCoordination | None = None) -> None:
        if max_leases < 1:
            raise BadRequest(f"max_leases={max_leases!r}: write at least 1")
        super().__init__(name, pool)
        self.max_leases = max_leases
        self._changing = threading.Lock()
        self._leases: list[tuple[Channel, int]] = []
        """The leases that this object has got, in this process or one that it is a fork of."""

    def __reduce__(self) -> tuple[Any, ...]:
        """Travel as the name, without the pool and without leases."""
        return type(self), (self.max_leases, self.name)

    def __repr__(self) -> str:
        return f"sky.{type(self).__name__}({self.max_leases}, {self.name!r})"

    def acquire(self, timeout: float | None = None) -> bool:
        """Wait for a lease, for `timeout` seconds at most (None: any time); return whether there is one.

        Raises NodeLost if the pool's scheduler is out of reach.
        """
        channel = self._channel
        answer = self._ask("acquire", limit=self.max_leases, timeout=timeout, channel=channel)
        if answer.status == Status.LATE:
            return False
        with self._changing:
            self._leases.append((channel, answer.number))
        return True

    def release(self) -> None:
        """Release a lease that this object has got. Raises RuntimeError if it has none in this process.

        Raises NodeLost if the lease was lost before, with the head of the pool or the connection to it. Then another
        holder may have had a lease meanwhile.
        """
        with self._changing:
            self._leases = [lease for lease in self._leases if lease[0].is_ours]
            if not self._leases:
                raise RuntimeError(f"{self!r} is not held here")
            channel, target = self._leases.pop()
        if self._ask("release", target=target, channel=channel).status == Status.LOST:
            raise NodeLost(f"{self!r} was released before: the pool has lost contact with this process meanwhile")

    def get_value(self) -> int:
        """Return how many leases there are now, of all holders. Raises NodeLost."""
        return self._ask("count").amount

    def __enter__(self) -> Self:
        self.acquire()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if error is None:
            self.release()
            return
        try:
            self.release()
        except NodeLost as lost:
            error.add_note(f"besides: {lost}")


class Lock(Semaphore):
    """A lock for all calls of a pool and the program that has opened it.

        with sky.Lock("report"):
            append(line)

    It is a semaphore with one lease: it ends with its call and its process. It is not re-entrant: a thread that has it
    and acquires it again waits. Any thread of the process may release it, through the object that has acquired it.
    """

    _kind = Kind.LOCK

    def __init__(self, name: str, *, pool: HasCoordination | None = None) -> None:
        super().__init__(1, name, pool=pool)

    def __reduce__(self) -> tuple[Any, ...]:
        """Travel as the name, without the pool and without the lock itself."""
        return type(self), (self.name,)

    def __repr__(self) -> str:
        return f"sky.Lock({self.name!r})"

    def locked(self) -> bool:
        """Return whether any process holds the lock now. Raises NodeLost."""
        return self.get_value() > 0


class Event(_Shared):
    """A flag of a pool: calls wait until another call, or the program, sets it. It is not set at first."""

    _kind = Kind.EVENT

    def __init__(self, name: str, *, pool: HasCoordination | None = None) -> None:
        super().__init__(name, pool)

    def set(self) -> None:
        """Set the flag: all who wait go on. It stays set until `clear`. Raises NodeLost."""
        self._ask("set")

    def clear(self) -> None:
        """Reset the flag. Raises NodeLost."""
        self._ask("clear")

    def is_set(self) -> bool:
        """Return whether the flag is set. Raises NodeLost."""
        return self._ask("is_set").amount == 1

    def wait(self, timeout: float | None = None) -> bool:
        """Wait until the flag is set, for `timeout` seconds at most (None: any time); return whether it is.

        Raises NodeLost.
        """
        return self._ask("wait", timeout=timeout).status == Status.DONE


class Queue[T](_Shared):
    """A queue of small values between the calls of a pool and the program: first in, first out.

    With `maxsize` a `put` waits while the queue has as many values; 0: no bound. A value that a call has taken is gone
    with that call. A value has at most 64 KiB when it is pickled; all queues and variables of a pool together hold
    64 MiB.
    """

    _kind = Kind.QUEUE

    def __init__(self, name: str, maxsize: int = 0, *, pool: HasCoordination | None = None) -> None:
        if maxsize < 0:
            raise BadRequest(f"maxsize={maxsize!r}: write how many values the queue may have, or 0 for no bound")
        super().__init__(name, pool)
        self.maxsize = maxsize

    def __reduce__(self) -> tuple[Any, ...]:
        """Travel as name and size, without the pool."""
        return type(self), (self.name, self.maxsize)

    def put(self, value: T, timeout: float | None = None) -> None:
        """Append a value, when there is room.

        Raises TimeoutError after `timeout` seconds (None: never), NotPicklable for a value that is too large or cannot
        be pickled, BadRequest if the pool's values take too much memory, and NodeLost.
        """
        answer = self._ask("put", value=_packed(value, self), limit=self.maxsize, timeout=timeout)
        if answer.status == Status.LATE:
            raise TimeoutError(f"{self!r} has had no room for {timeout:g} s")

    def get(self, timeout: float | None = None) -> T:
        """Take the first value, when there is one. Raises TimeoutError after `timeout` seconds (None: never), and
        NodeLost.
        """
        answer = self._ask("get", timeout=timeout)
        if answer.status == Status.LATE:
            raise TimeoutError(f"{self!r} has had no value for {timeout:g} s")
        return cast("T", _unpacked(answer.value))

    def qsize(self) -> int:
        """Return how many values the queue has now. Raises NodeLost."""
        return self._ask("size").amount


class Variable[T](_Shared):
    """A small value that all calls of a pool, and the program, may read and replace. The last `set` counts.

    Sizes are limited as those of `Queue`.
    """

    _kind = Kind.VARIABLE

    def __init__(self, name: str, *, pool: HasCoordination | None = None) -> None:
        super().__init__(name, pool)

    def set(self, value: T) -> None:
        """Replace the value. Raises NotPicklable and BadRequest as `Queue.put`, and NodeLost."""
        self._ask("set", value=_packed(value, self))

    def get(self, timeout: float | None = None) -> T:
        """Return the value; wait for it if none was set. Raises TimeoutError after `timeout` seconds (None: never), and
        NodeLost.
        """
        answer = self._ask("get", timeout=timeout)
        if answer.status == Status.LATE:
            raise TimeoutError(f"{self!r} has had no value for {timeout:g} s")
        return cast("T", _unpacked(answer.value))

    def delete(self) -> None:
        """Remove the value: `get` waits for another one. Raises NodeLost."""
        self._ask("delete")
