"""Lines of a live pool: the logs of its nodes, and the output of detached calls.

A node writes what it does into its log: how it was prepared, workers that start and end. What calls print goes to the
process that has made them, and is kept only for detached calls, by the pool's scheduler.
"""

from __future__ import annotations

import pickle
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from skyward_core.errors import BadRequest, SkywardError
from skyward_core.live.observer import Observer
from skyward_core.worker.topic import lines_of

POLL_SECONDS = 0.3
LOOK_SECONDS = 5.0
"""How often a reader that follows looks whether a pool still lives."""


@dataclass(frozen=True, slots=True)
class Line:
    """A line of a node's log. `node` is -1 for a line of a detached call."""

    node: int
    text: str


class NodeLogs:
    """The logs of all nodes, or of one. `new` returns the lines since the last call."""

    def __init__(self, observer: Observer, ranks: frozenset[int]) -> None:
        """Connect. Raises Unreachable if no node can be reached."""
        self.failures: list[str] = []
        """Why some nodes cannot be reached."""
        self._transports = list[tuple[int, Any]]()
        last: SkywardError | None = None
        for instance in observer.instances:
            if instance.rank not in ranks:
                continue
            try:
                self._transports.append((instance.rank, observer.reach(instance)))
            except SkywardError as error:
                last = error
                self.failures.append(f"node {instance.rank} cannot be reached: {error}")
        if last is not None and not self._transports:
            raise last

    def all(self) -> Iterator[Line]:
        """Yield all lines that the logs have now, node by node."""
        for rank, transport in self._transports:
            for text in transport.read("log").splitlines():
                yield Line(rank, text)

    def new(self) -> Iterator[Line]:
        """Yield the lines since the last call. Does not wait."""
        for rank, transport in self._transports:
            for text in transport.new_lines():
                yield Line(rank, text)

    @property
    def have_ended(self) -> bool:
        """Whether no node lives any more."""
        return not any(_lives(transport) for _, transport in self._transports)


class CallLog:
    """The output of one detached call."""

    failures: Sequence[str] = ()

    def __init__(self, observer: Observer, call_id: str) -> None:
        self._client = observer.client()
        self._call_id = call_id
        self._after = 0
        self._known: Mapping[str, Any] = {}

    def all(self) -> Iterator[Line]:
        """Yield all lines so far. Raises BadRequest if the pool has no such call."""
        return self.new()

    def new(self) -> Iterator[Line]:
        """Yield the lines since the last call. Raises BadRequest if the pool has no such call."""
        known = _ask(self._client, "skyward_call", call_id=self._call_id, after=self._after)
        if known is None:
            names = ", ".join(one["call_id"] for one in _ask(self._client, "skyward_calls")) or "none"
            raise BadRequest(f"the pool has no detached call {self._call_id!r}; it has {names}")
        self._known = known
        self._after = known["number"] + len(known["messages"])
        for message in known["messages"]:
            for text in lines_of(pickle.loads(message)):
                yield Line(-1, text)

    @property
    def have_ended(self) -> bool:
        """Whether the call has ended."""
        return self._known.get("ended_at") is not None


def followed(source: NodeLogs | CallLog) -> Iterator[Line]:
    """Yield lines as they come, until the pool or the call has ended."""
    looked_at = time.monotonic()
    while True:
        yield from source.new()
        if isinstance(source, CallLog) or time.monotonic() - looked_at > LOOK_SECONDS:
            looked_at = time.monotonic()
            if source.have_ended:
                yield from source.new()
                return
        time.sleep(POLL_SECONDS)


def _ask(client: Any, operation: str, **arguments: Any) -> Any:
    return client.sync(getattr(client.scheduler, operation), **arguments)


def _lives(transport: Any) -> bool:
    try:
        return transport.lives(LOOK_SECONDS) is not False
    except (SkywardError, OSError):
        return True  # an outage is no end
