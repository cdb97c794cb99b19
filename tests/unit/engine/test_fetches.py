"""Fetches of large outcomes: which are repeated, and which have failed permanently."""

import pytest

from skyward_core.engine import actions as do
from skyward_core.engine.fetches import FETCH_SECONDS, Fetches
from skyward_core.engine.members import Members
from skyward_core.worker.wire import Outcome
from tests.engine.model import machine_id, node_of
from tests.unit.engine.test_dispatcher import entry, value

PATH = "/dev/shm/result"
FIRST, SECOND = machine_id(0), machine_id(1)


class Begun:
    """Fetches of two nodes, the first with its worker; the fetch of call "a" from the first began at time 10."""

    def __init__(self) -> None:
        self.done: list[do.Action] = []
        self.members = Members.of([node_of(0, 0, 1, 1), node_of(1, 1, 1, 1)])
        self.members.join("0-0", "tls://zero")
        self.fetches = Fetches(self.members, self.done.append)
        self.outcome: Outcome = value("a", PATH)
        self.fetches.begin(entry("a"), self.outcome, 0, FIRST, 10.0)
        self.fetch = do.Fetch("a", FIRST, self.outcome.parcel)
        self.remove = do.Remove(FIRST, self.outcome.parcel)

    def cut(self) -> None:
        self.fetches.by_call["a"].error = OSError("cut")

    def go_on(self, now: float = 10.0, *, is_reachable: bool = False, is_live: bool = True) -> list[str]:
        """Return the calls whose fetches have failed permanently."""
        return [
            failed.outcome.call_id
            for failed in self.fetches.go_on(now, lambda name: is_reachable and name == FIRST, is_live=is_live)
        ]


def test_a_fetch_ends_with_the_outcome_at_its_place() -> None:
    """An outcome of the same call at another place belongs to no fetch, and is discarded."""
    begun = Begun()
    other = value("a", "/dev/shm/other").parcel
    assert begun.fetches.fetched("a", other, "/dev/shm/other") is None
    assert begun.done == [begun.fetch, do.Discard(other)]
    ended = begun.fetches.fetched("a", begun.outcome.parcel, PATH)
    assert ended is not None
    assert (ended.entry, ended.outcome, ended.node, ended.instance_id) == (entry("a"), begun.outcome, 0, FIRST)
    assert begun.fetches.by_call == {}
    assert begun.fetches.fetched("a", other, PATH) is None


def test_a_forgotten_fetch_is_removed_from_the_node() -> None:
    """It is removed once."""
    begun = Begun()
    begun.fetches.forget("b")
    begun.fetches.forget("a")
    begun.fetches.forget("a")
    assert begun.done == [begun.fetch, begun.remove]


def test_a_fetch_that_loses_its_connection_is_repeated_when_its_node_is_reached() -> None:
    """A fetch that is in progress is not started again."""
    begun = Begun()
    assert begun.fetches.is_under_way("a")
    assert begun.go_on(is_reachable=True) == []
    begun.cut()
    assert not begun.fetches.is_under_way("a")
    assert begun.go_on() == []
    assert begun.done == [begun.fetch]
    assert begun.go_on(10.0 + FETCH_SECONDS, is_reachable=True) == []
    assert begun.done == [begun.fetch] * 2
    assert begun.fetches.is_under_way("a")
    assert not begun.fetches.is_under_way("b")


@pytest.mark.parametrize("why", ["too late", "no node of the pool any more", "its worker has left"])
def test_a_fetch_that_fails_for_good(why: str) -> None:
    """The outcome is removed from the node, and the fetch is forgotten."""
    begun = Begun()
    begun.cut()
    if why == "no node of the pool any more":
        begun.members.nodes = {1: node_of(1, 1, 1, 1)}
    elif why == "its worker has left":
        begun.members.leave("0-0", "tls://zero")
        assert begun.go_on(is_live=False) == []
    is_late = why == "too late"
    now, is_reachable = 10.0 + FETCH_SECONDS + (0.1 if is_late else 0.0), why != "its worker has left"
    assert begun.go_on(now, is_reachable=is_reachable, is_live=not is_late) == ["a"]
    assert begun.done == [begun.fetch, begun.remove]
    assert begun.fetches.by_call == {}


def test_a_waiting_fetch_does_not_prevent_others_from_being_repeated() -> None:
    """Each fetch is checked."""
    begun = Begun()
    begun.fetches.begin(entry("b"), value("b", "/dev/shm/b"), 1, SECOND, 10.0)
    begun.fetches.begin(entry("c"), value("c", "/dev/shm/c"), 0, FIRST, 10.0)
    assert (begun.fetches.count_from(FIRST), begun.fetches.count_from(SECOND)) == (2, 1)
    begun.fetches.by_call["c"].error = OSError("cut")
    del begun.done[:]
    assert begun.go_on(is_reachable=True) == []
    assert [type(action) for action in begun.done] == [do.Fetch]
