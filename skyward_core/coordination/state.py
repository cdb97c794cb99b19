"""The state of a pool's shared objects, on its scheduler. It is pure: it takes requests and returns answers.

A lease of a lock or semaphore belongs to its holder, a connection of one process of one call. `drop` takes back
all that a holder has or waits for. Those who wait are served in the order in which they came.

    request ──may be done now──▶ answered
       └──has to wait──▶ waiting ──another request or `drop` makes it possible──▶ answered
                            ├──`expire`──▶ answered: too late
                            └──`drop`, or "withdraw"──▶ gone, without an answer
"""

from __future__ import annotations

from collections import deque
from typing import NamedTuple

from skyward_core.coordination.messages import TOTAL_BYTES, VALUE_BYTES, Answer, Kind, Request, Status

type Holder = tuple[str, int]
"""Where a holder is (a worker's address, or the name of a program's connection), and its number there."""
type Key = tuple[Holder, int]
"""A request: its holder, and the number that the holder has given it."""

WAITING_ACTIONS = frozenset({"acquire", "wait", "put", "get"})
"""Actions that may wait. All others are answered at once."""


class Letter(NamedTuple):
    """An answer, and the holder that gets it."""

    holder: Holder
    answer: Answer


class _Shared:
    """One object. `waiting` has the requests that wait, by action, in their order."""

    def __init__(self) -> None:
        self.waiting: dict[str, dict[Key, Request]] = {}

    @property
    def is_unused(self) -> bool:
        """Whether the object is as if it had never been used."""
        return not any(self.waiting.values())

    def attempt(self, key: Key, request: Request) -> Answer | None:
        """Do what is requested and return the answer; None if it cannot be done now."""
        raise NotImplementedError

    def drop(self, holder: Holder) -> None:
        """Take back what a holder has."""

    def undo(self, key: Key) -> None:
        """Take back what a request has got."""

    @property
    def nbytes(self) -> int:
        """Size of the values in bytes."""
        return 0


class _Semaphore(_Shared):
    """Leases by the requests that have got them; a lock has at most one."""

    def __init__(self) -> None:
        super().__init__()
        self.limit = 0
        self.leases = dict[Key, None]()

    @property
    def is_unused(self) -> bool:
        return not self.leases and super().is_unused

    def attempt(self, key: Key, request: Request) -> Answer | None:
        match request.action:
            case "acquire":
                if self.is_unused:
                    self.limit = request.limit
                if request.limit != self.limit:
                    text = f"the semaphore {request.name!r} is in use with max_leases={self.limit}"
                    return Answer(request.number, Status.REFUSED, text=f"{text}, not {request.limit}")
                if len(self.leases) >= self.limit:
                    return None
                self.leases[key] = None
                return Answer(request.number, Status.DONE)
            case "release":
                was_held = (key[0], request.target) in self.leases
                self.undo((key[0], request.target))
                return Answer(request.number, Status.DONE if was_held else Status.LOST)
            case _:
                return Answer(request.number, Status.DONE, amount=len(self.leases))

    def drop(self, holder: Holder) -> None:
        for key in [key for key in self.leases if key[0] == holder]:
            del self.leases[key]

    def undo(self, key: Key) -> None:
        self.leases.pop(key, None)


class _Event(_Shared):
    is_set = False

    @property
    def is_unused(self) -> bool:
        return not self.is_set and super().is_unused

    def attempt(self, key: Key, request: Request) -> Answer | None:
        match request.action:
            case "wait":
                return Answer(request.number, Status.DONE) if self.is_set else None
            case "set" | "clear":
                self.is_set = request.action == "set"
                return Answer(request.number, Status.DONE)
            case _:
                return Answer(request.number, Status.DONE, amount=int(self.is_set))


class _Queue(_Shared):
    def __init__(self) -> None:
        super().__init__()
        self.values = deque[bytes]()
        self._nbytes = 0

    @property
    def is_unused(self) -> bool:
        return not self.values and super().is_unused

    def attempt(self, key: Key, request: Request) -> Answer | None:
        match request.action:
            case "put":
                if 0 < request.limit <= len(self.values):
                    return None
                self.values.append(request.value)
                self._nbytes += len(request.value)
                return Answer(request.number, Status.DONE)
            case "get":
                if not self.values:
                    return None
                value = self.values.popleft()
                self._nbytes -= len(value)
                return Answer(request.number, Status.DONE, value)
            case _:
                return Answer(request.number, Status.DONE, amount=len(self.values))

    @property
    def nbytes(self) -> int:
        return self._nbytes + sum(len(request.value) for request in self.waiting.get("put", {}).values())


class _Variable(_Shared):
    value: bytes | None = None

    @property
    def is_unused(self) -> bool:
        return self.value is None and super().is_unused

    def attempt(self, key: Key, request: Request) -> Answer | None:
        match request.action:
            case "get":
                return None if self.value is None else Answer(request.number, Status.DONE, self.value)
            case "set":
                self.value = request.value
            case _:
                self.value = None
        return Answer(request.number, Status.DONE)

    @property
    def nbytes(self) -> int:
        return len(self.value or b"")


_CLASSES: dict[str, type[_Shared]] = {
    Kind.LOCK: _Semaphore,
    Kind.SEMAPHORE: _Semaphore,
    Kind.EVENT: _Event,
    Kind.QUEUE: _Queue,
    Kind.VARIABLE: _Variable,
}


class CoordinationState:
    """All shared objects of one pool. An object exists while it is used: it needs no creation and no deletion."""

    def __init__(self, total_bytes: int = TOTAL_BYTES) -> None:
        self._total_bytes = total_bytes
        self._objects: dict[tuple[str, str], _Shared] = {}
        self._sizes: dict[tuple[str, str], int] = {}
        self._nbytes = 0
        self._used: dict[Holder, set[tuple[str, str]]] = {}
        """By holder: the objects of which it may have a lease, or for which it may wait."""

    @property
    def is_empty(self) -> bool:
        """Whether nothing is left of any holder, and no value."""
        return not self._objects and not self._used

    def receive(self, holder: Holder, request: Request) -> list[Letter]:
        """Take a request; return all answers that it makes possible. The holder's own is missing if it has to wait."""
        place = (request.kind, request.name)
        if request.action == "withdraw":
            return self._withdraw(place, (holder, request.target))
        if refusal := self._refusal(request):
            return [Letter(holder, Answer(request.number, Status.REFUSED, text=refusal))]
        shared = self._objects.setdefault(place, _CLASSES[request.kind]())
        key = (holder, request.number)
        is_first = not shared.waiting.get(request.action)  # those who wait come first
        answer = shared.attempt(key, request) if is_first or request.action not in WAITING_ACTIONS else None
        if request.action in WAITING_ACTIONS:
            self._used.setdefault(holder, set()).add(place)
        if answer is None and request.seconds is not None and request.seconds <= 0:
            answer = Answer(request.number, Status.LATE)
        if answer is None:
            shared.waiting.setdefault(request.action, {})[key] = request
        letters = [] if answer is None else [Letter(holder, answer)]
        return letters + self._settle(place)

    def expire(self, holder: Holder, request: Request) -> list[Letter]:
        """The time of a request that waits is up; without effect if it does not wait any more."""
        if not self._forget((request.kind, request.name), (holder, request.number)):
            return []
        late = Letter(holder, Answer(request.number, Status.LATE))
        return [late, *self._settle((request.kind, request.name))]

    def drop(self, *holders: Holder) -> list[Letter]:
        """Take back all that these holders have or wait for; return the answers that this makes possible."""
        places = set[tuple[str, str]]()
        for holder in holders:
            used = self._used.pop(holder, set())
            for shared in [self._objects[place] for place in used if place in self._objects]:
                for waiting in shared.waiting.values():
                    for key in [key for key in waiting if key[0] == holder]:
                        del waiting[key]
                shared.drop(holder)
            places |= used
        return [letter for place in sorted(places) for letter in self._settle(place)]

    def _withdraw(self, place: tuple[str, str], key: Key) -> list[Letter]:
        """Forget a request that waits, or take back the lease that it has got: no thread waits for it."""
        if not self._forget(place, key) and (shared := self._objects.get(place)) is not None:
            shared.undo(key)
        return self._settle(place)

    def _forget(self, place: tuple[str, str], key: Key) -> bool:
        shared = self._objects.get(place)
        return shared is not None and any(waiting.pop(key, None) for waiting in shared.waiting.values())

    def _settle(self, place: tuple[str, str]) -> list[Letter]:
        """Answer those who wait for an object, as far as that is possible now."""
        shared = self._objects.get(place)
        letters: list[Letter] = []
        progress = shared is not None
        while progress and shared is not None:
            progress = False
            for waiting in shared.waiting.values():
                while waiting:
                    key, request = next(iter(waiting.items()))
                    if (answer := shared.attempt(key, request)) is None:
                        break
                    del waiting[key]
                    letters.append(Letter(key[0], answer))
                    progress = True
        if shared is not None and shared.is_unused:
            del self._objects[place]
        nbytes = 0 if shared is None else shared.nbytes
        self._nbytes += nbytes - self._sizes.pop(place, 0)
        if nbytes:
            self._sizes[place] = nbytes
        return letters

    def _refusal(self, request: Request) -> str:
        if not request.value:
            return ""
        if len(request.value) > VALUE_BYTES:
            return f"a value has {len(request.value):,} bytes, and may have {VALUE_BYTES:,}"
        if self._nbytes + len(request.value) > self._total_bytes:
            return (
                f"the queues and variables of the pool hold {self._nbytes:,} bytes, and may hold {self._total_bytes:,}"
            )
        return ""
