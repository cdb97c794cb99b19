"""Large outcomes in transit from the memory of nodes to the client."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import dataclass

from skyward_core.engine import actions as do
from skyward_core.engine.members import Members
from skyward_core.engine.outbox import Entry
from skyward_core.worker.wire import Outcome, Parcel

FETCH_SECONDS = 120.0  # how long a fetch whose connection is cut is repeated while the node lives: as long as a lease
KNOWN_SECONDS = 30.0  # how long the outcome of a node that has just joined waits until this client knows the node


@dataclass(slots=True)
class Fetching:
    """A large outcome in transit from a node. With an `error` the connection was cut: the fetch waits for it."""

    entry: Entry
    outcome: Outcome
    node: int
    instance_id: str
    lies_at: str
    until: float
    since: float
    error: Exception | None = None


class Fetches:
    """The outcomes that are being fetched. `act` takes the actions."""

    def __init__(self, members: Members, act: Callable[[do.Action], object]) -> None:
        self.by_call: dict[str, Fetching] = {}
        self._counts: Counter[str] = Counter()
        """By instance: how many outcomes are still to be fetched from it."""
        self._members = members
        self._do = act

    def begin(self, entry: Entry, outcome: Outcome, node: int, instance_id: str, now: float) -> None:
        """Fetch an outcome from the memory of an instance."""
        call_id = outcome.call_id
        until = now + (FETCH_SECONDS if self._members.knows(instance_id) else KNOWN_SECONDS)
        self._pop(call_id)
        self.by_call[call_id] = Fetching(entry, outcome, node, instance_id, str(outcome.parcel.path), until, now)
        self._counts[instance_id] += 1
        self._do(do.Fetch(call_id, instance_id, outcome.parcel))

    def find(self, call_id: str, lies_at: str) -> Fetching | None:
        """Return the fetch to which a message belongs; None if there is none."""
        fetching = self.by_call.get(call_id)
        return fetching if fetching is not None and fetching.lies_at == lies_at else None

    def fetched(self, call_id: str, parcel: Parcel, lies_at: str) -> Fetching | None:
        """An outcome is here: end its fetch and return that.

        None: the outcome has no caller any more, and is removed.
        """
        if (fetching := self.find(call_id, lies_at)) is None:
            self._do(do.Discard(parcel))
            return None
        self._pop(call_id)
        return fetching

    def forget(self, call_id: str) -> None:
        """End the fetch of an outcome that has no caller any more, and remove the outcome from the node."""
        if (fetching := self._pop(call_id)) is not None:
            self._do(do.Remove(fetching.instance_id, fetching.outcome.parcel))

    def go_on(self, now: float, is_reachable: Callable[[str], bool], *, is_live: bool) -> Iterator[Fetching]:
        """Repeat the fetches whose node is reachable again. End and yield those that are not repeated any more."""
        for call_id, fetching in list(self.by_call.items()):
            if fetching.error is None:
                continue
            is_too_late = now > fetching.until or not self._members.may_know(fetching.instance_id)
            if not is_too_late and is_reachable(fetching.instance_id):
                fetching.error = None
                self._do(do.Fetch(call_id, fetching.instance_id, fetching.outcome.parcel))
            elif is_too_late or (is_live and not self._members.is_there(fetching.instance_id)):
                self.forget(call_id)
                yield fetching

    def is_under_way(self, call_id: str) -> bool:
        """Return whether an outcome is in transit, and does not wait for a connection that was cut."""
        fetching = self.by_call.get(call_id)
        return fetching is not None and fetching.error is None

    def count_from(self, instance_id: str) -> int:
        """Return how many outcomes are still to be fetched from a node."""
        return self._counts[instance_id]

    @property
    def instances(self) -> frozenset[str]:
        """The ids of the instances from which outcomes are fetched."""
        return frozenset(self._counts)

    def _pop(self, call_id: str) -> Fetching | None:
        if (fetching := self.by_call.pop(call_id, None)) is not None:
            self._counts[fetching.instance_id] -= 1
            if not self._counts[fetching.instance_id]:
                del self._counts[fetching.instance_id]
        return fetching
