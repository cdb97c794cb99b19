"""What the scheduler tells clients: who has come and gone, and what it still has of a client that comes back. Known to both sides; needs no Dask."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

HELD = "paused"
"""The state, in Dask's words, of a worker that is given no more calls."""


@dataclass(frozen=True, slots=True)
class WorkerJoined:
    """A worker, named RANK-INDEX, has joined the pool."""

    name: str
    address: str


@dataclass(frozen=True, slots=True)
class WorkerLeft:
    """A worker has left the pool, or does not answer any more."""

    name: str
    address: str


@dataclass(frozen=True, slots=True)
class WorkerHeld:
    """A worker is given no more calls; so many are left that it has. Sent to every client, at first and whenever that number changes."""

    address: str
    left: int


@dataclass(frozen=True, slots=True)
class Resumed:
    """What the scheduler knows of a topic; the messages after `number` follow, up to `last` at once, then live ones.

    `missed`: so many before them were dropped, for want of room. `is_known` is False if the scheduler had not heard of the topic, as a new head has not.
    `tasks`: the client's tasks that are still kept, and their states in Dask's words ("processing", "memory", "erred"); what is not there is lost. The new
    client wants them from here on: it makes a future of each at once (`distributed.Future(key, client)`), or sends `let_go` with those it is done with.
    `gone`: those that came here, and of which there is no task any more. A key in neither has not come and will not, if the topic is known: what the client
    before this one has sent and is still on its way is refused. `workers`: name and state, in Dask's words, of the workers that are there, by address.
    """

    number: int
    missed: int
    is_known: bool
    tasks: Mapping[str, str]
    gone: frozenset[str] = frozenset()
    last: int = 0
    workers: Mapping[str, tuple[str, str]] = field(default_factory=dict[str, tuple[str, str]])
    abandoned: int = 0

    @staticmethod
    def of(answer: Mapping[str, object]) -> Resumed:
        """Return what the scheduler's answer to `resume` says."""
        fields: dict[str, object] = {**answer, "gone": frozenset(answer["gone"])}  # type: ignore[arg-type]
        del fields["asked"]
        return Resumed(**fields)  # type: ignore[arg-type]
