"""Messages of the scheduler to clients: workers that join and leave, and the tasks of a client that reconnects.

Both sides use them; they need no Dask.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

POOL_TOPIC = "skyward-pool"
"""The topic of these messages, of samples and of announcements of workers."""
LIST_CALLS = "skyward_list_calls"
"""The operation by which an observer asks for the calls of all clients (`call_lists.py`)."""
LISTING_SECONDS = 5.0
"""How long clients and workers may take to answer it: longer than a worker waits for the stacks of its slots."""
END_CLIENT = "skyward_end_client"
"""The operation by which a client ends the calls of another one, whose process is dead or was replaced."""
ENDING_SECONDS = 10.0
"""How long it waits for slots that such calls hold: longer than from SIGTERM to SIGKILL."""
RUN_BATCH = "skyward-run-batch"
"""The operation of a client's stream that makes a batch a task; see `PoolScheduler.take_batch`."""
START_DETACHED = "skyward_start_detached"
"""The operation that makes a batch a detached call; see `PoolScheduler.start_detached`."""
STALLED_SECONDS = 120.0
"""How long a worker with tasks of Dask's own may be silent: its event loop imports the packages that they need."""
HELD = "paused"
"""Dask's name for the state of a worker that gets no more calls."""


@dataclass(frozen=True, slots=True)
class WorkerJoined:
    """A worker, named RANK-INDEX, has joined the pool. `instance_id` is its machine, "" if that is unknown."""

    name: str
    address: str
    instance_id: str = ""


@dataclass(frozen=True, slots=True)
class WorkerLeft:
    """A worker has left the pool, or does not answer any more."""

    name: str
    address: str


@dataclass(frozen=True, slots=True)
class WorkerHeld:
    """A worker gets no more calls and has `left` of them.

    Sent to every client, at first and after each change of that number.
    """

    address: str
    left: int


@dataclass(frozen=True, slots=True)
class PoolRanks:
    """The ranks of an elastic pool that are to stay: new broadcasts use them. Nodes of other ranks leave."""

    ranks: frozenset[int]


@dataclass(frozen=True, slots=True)
class Resumed:
    """The scheduler's answer to `resume`. The messages after `number` follow: those up to `last` at once, then live
    ones.

    `missed`: how many messages before them were dropped for lack of room. `is_known`: whether the scheduler knew the
    topic; a new head does not. `tasks`: the client's tasks that the scheduler keeps, and Dask's names of their states
    ("processing", "memory", "erred"); all others are lost. From now on the new client wants them: it makes a future of
    each at once (`distributed.Future(key, client)`).
    `gone`: keys that have arrived and have no task any more. If the topic is known, a key in neither has not arrived
    and will not: the scheduler refuses messages of the earlier client that are in transit. `workers`: by address, the
    names of present workers and Dask's names of their states. `abandoned`: how often the scheduler has dropped the
    topic and stopped its calls, because the client was away too long. `instances`: the ids of the workers' machines, by
    address. `ranks`: those of `PoolRanks`; None if the pool has a fixed size.
    """

    number: int
    missed: int
    is_known: bool
    tasks: Mapping[str, str]
    gone: frozenset[str] = frozenset()
    last: int = 0
    workers: Mapping[str, tuple[str, str]] = field(default_factory=dict[str, tuple[str, str]])
    abandoned: int = 0
    instances: Mapping[str, str] = field(default_factory=dict[str, str])
    ranks: frozenset[int] | None = None

    @staticmethod
    def of(answer: Mapping[str, object]) -> Resumed:
        """Return the scheduler's answer to `resume` as a value."""
        fields: dict[str, object] = {**answer, "gone": frozenset(answer["gone"])}  # type: ignore[arg-type]
        if (ranks := answer.get("ranks")) is not None:
            fields["ranks"] = frozenset(ranks)  # type: ignore[arg-type]
        del fields["request"]
        return Resumed(**fields)  # type: ignore[arg-type]
