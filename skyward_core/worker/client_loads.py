"""What clients have that the scheduler does not see: calls that wait in their own queues, and nodes whose memory they
still need, because they send arguments there or fetch results from there.

Each client reports it with LOAD on its stream when it changes. A client that is away keeps its needs until its topic is
abandoned; its waiting calls do not count.
"""

from __future__ import annotations

from collections.abc import Callable, Collection
from dataclasses import dataclass
from typing import Any

LOAD = "skyward-load"
"""The operation on a client's stream to the scheduler."""
RANKS = "skyward-ranks"
"""The operation by which the process that keeps an elastic pool says which ranks are to stay."""


def load(topic: str, waiting: int, needed: Collection[str]) -> dict[str, Any]:
    """Return the message with the load of the client of this topic: how many calls wait in its queue, and the ids of
    the instances that it needs.
    """
    return {"op": LOAD, "topic": topic, "waiting": waiting, "needed": sorted(needed)}


def stay(ranks: Collection[int]) -> dict[str, Any]:
    """Return the message that these ranks are to stay: broadcasts use them. All others leave. Idempotent."""
    return {"op": RANKS, "ranks": sorted(ranks)}


@dataclass(frozen=True, slots=True)
class _Load:
    waiting: int
    needed: frozenset[str]


class ClientLoads:
    """The loads of all clients, by topic."""

    def __init__(self) -> None:
        self._loads: dict[str, _Load] = {}

    def note(self, topic: str, waiting: int, needed: Collection[str]) -> None:
        """Note the present load of a client."""
        self._loads[topic] = _Load(waiting, frozenset(needed))

    def forget(self, topic: str) -> None:
        """Note that a client has left, or was away for too long."""
        self._loads.pop(topic, None)

    def waiting(self, counts: Callable[[str], bool]) -> int:
        """Return how many calls wait in the queues of the clients whose topics count."""
        return sum(one.waiting for topic, one in self._loads.items() if counts(topic))

    def needs(self, instance_ids: Collection[str]) -> int:
        """Return how many clients need one of these instances."""
        return sum(not one.needed.isdisjoint(instance_ids) for one in self._loads.values())
