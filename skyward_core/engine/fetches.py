"""Large outcomes on their way from the memory of nodes to the client."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass

from skyward_core.engine import actions as do
from skyward_core.engine.members import Members
from skyward_core.engine.outbox import Entry
from skyward_core.worker.wire import Outcome, Parcel

FETCH_SECONDS = 120.0  # for which a result whose wire is cut is asked for again, while its node lives: as long as a lease


@dataclass(slots=True)
class Fetching:
    """A large outcome on its way from a node; `error` says why it waits for the way to that node to come back."""

    entry: Entry
    outcome: Outcome
    node: int
    instance_id: str
    lies_at: str
    until: float
    error: Exception | None = None


class Fetches:
    """The outcomes that are being fetched. `act` takes the actions."""

    def __init__(self, members: Members, act: Callable[[do.Action], object]) -> None:
        self.by_call: dict[str, Fetching] = {}
        self._members = members
        self._do = act

    def begin(self, entry: Entry, outcome: Outcome, node: int, instance_id: str, now: float) -> None:
        """Fetch an outcome from the memory of an instance."""
        call_id = outcome.call_id
        self.by_call[call_id] = Fetching(entry, outcome, node, instance_id, str(outcome.parcel.path), now + FETCH_SECONDS)
        self._do(do.Fetch(call_id, instance_id, outcome.parcel))

    def find(self, call_id: str, lies_at: str) -> Fetching | None:
        """Return the outcome that a message is about; None if that one is not being fetched."""
        fetching = self.by_call.get(call_id)
        return fetching if fetching is not None and fetching.lies_at == lies_at else None

    def fetched(self, call_id: str, parcel: Parcel, lies_at: str) -> Fetching | None:
        """An outcome is here: return what is known of it. None: it has no caller any more, and is removed."""
        if (fetching := self.find(call_id, lies_at)) is None:
            self._do(do.Discard(parcel))
            return None
        del self.by_call[call_id]
        return fetching

    def forget(self, call_id: str) -> None:
        """Forget an outcome that has no caller any more, and remove it from the node."""
        if (fetching := self.by_call.pop(call_id, None)) is not None:
            self._do(do.Remove(fetching.instance_id, fetching.outcome.parcel))

    def go_on(self, now: float, is_reachable: Callable[[str], bool], *, is_live: bool) -> Iterator[Fetching]:
        """Ask again for the outcomes that wait for a way to their node. Forget those that cannot be had, and yield them."""
        for call_id, fetching in list(self.by_call.items()):
            if fetching.error is None:
                continue
            is_too_late = now > fetching.until or not self._members.knows(fetching.instance_id)
            if not is_too_late and is_reachable(fetching.instance_id):
                fetching.error = None
                self._do(do.Fetch(call_id, fetching.instance_id, fetching.outcome.parcel))
            elif is_too_late or (is_live and not self._members.is_there(fetching.instance_id)):
                self.forget(call_id)
                yield fetching

    def is_under_way(self, call_id: str) -> bool:
        """Tell whether an outcome may still arrive: it does not wait for a way to its node."""
        fetching = self.by_call.get(call_id)
        return fetching is not None and fetching.error is None

    def count_from(self, instance_id: str) -> int:
        """Return how many outcomes still lie on a node."""
        return sum(fetching.instance_id == instance_id for fetching in self.by_call.values())
