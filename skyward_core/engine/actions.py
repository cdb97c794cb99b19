"""The actions that the dispatcher returns and its owner does. Each is a frozen value: the dispatcher only decides.

An action with an `epoch` belongs to one connection to a scheduler. The owner drops it when another connection has
replaced that one.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from skyward_core.errors import SkywardError
from skyward_core.events.events import SkywardEvent
from skyward_core.wire.messages import Batch, Outcome, Parcel

# ── on the connection to the scheduler ───────────────────────────────────────────────────────────────────────────────


@dataclass(frozen=True, slots=True)
class Send:
    """Send a batch as the task `key`, to the worker at `address` (None: the scheduler chooses).

    Then `task_ended`; `unsent` if it has not gone out.
    """

    epoch: int
    number: int
    key: str
    batch: Batch
    address: str | None


@dataclass(frozen=True, slots=True)
class Follow:
    """A batch that an earlier connection has sent is still known to the scheduler: `task_ended` when its task ends."""

    epoch: int
    number: int
    key: str


@dataclass(frozen=True, slots=True)
class TakeBack:
    """The worker to which a batch was sent is gone.

    If the batch's task has not ended, release it; then `taken_back`.
    """

    epoch: int
    number: int
    key: str


@dataclass(frozen=True, slots=True)
class Gather:
    """Get the result of a batch's task, which holds the outcomes of all its calls; then `gathered`, or
    `not_gathered`.
    """

    epoch: int
    number: int
    key: str


@dataclass(frozen=True, slots=True)
class Release:
    """Let the scheduler forget these tasks."""

    epoch: int
    keys: tuple[str, ...]


@dataclass(frozen=True, slots=True)
class Stop:
    """Stop these calls on all workers."""

    epoch: int
    call_ids: tuple[str, ...]


@dataclass(frozen=True, slots=True)
class GiveCredit:
    """Let streaming calls yield the items below these numbers, by call."""

    epoch: int
    credit: Mapping[str, int]


@dataclass(frozen=True, slots=True)
class RepeatReports:
    """Ask every worker to announce the calls that it keeps from an earlier head (`WorkerKept`), and to report them
    again.
    """

    epoch: int


@dataclass(frozen=True, slots=True)
class ReleaseRetainedCalls:
    """Let workers forget these calls, which have outlived the head that sent them."""

    epoch: int
    call_ids: tuple[str, ...]


@dataclass(frozen=True, slots=True)
class Acknowledge:
    """The scheduler may drop the messages up to this number."""

    epoch: int
    number: int


@dataclass(frozen=True, slots=True)
class AskLoad:
    """Ask the scheduler which batches each worker has; then `load_known`."""

    epoch: int


@dataclass(frozen=True, slots=True)
class Ping:
    """Ask the scheduler whether it answers; then `pinged`."""

    epoch: int


# ── large values ─────────────────────────────────────────────────────────────────────────────────────────────────────


@dataclass(frozen=True, slots=True)
class Upload:
    """Put large arguments (by call id) and functions (by name) of a batch into a node's memory; then `uploaded` or
    `upload_failed`.

    Among the functions are scattered values. A function for which the node has no room travels in the message.
    Arguments and values fail the upload then.
    """

    number: int
    instance_id: str
    arguments: tuple[tuple[str, Parcel], ...]
    functions: tuple[tuple[str, Parcel], ...]


@dataclass(frozen=True, slots=True)
class Fetch:
    """Get a large outcome from a node's memory; then `fetched` or `not_fetched`."""

    call_id: str
    instance_id: str
    parcel: Parcel


@dataclass(frozen=True, slots=True)
class FetchItem:
    """Get a large item from a node's memory (None: the node is not known any more) and hand it to its consumer."""

    call_id: str
    number: int
    node: int
    instance_id: str | None
    parcel: Parcel


@dataclass(frozen=True, slots=True)
class DeliverItem:
    """Hand an item to its consumer. `parcel` is on this machine, or in a message."""

    call_id: str
    number: int
    node: int
    parcel: Parcel


@dataclass(frozen=True, slots=True)
class Remove:
    """Remove a file from a node's memory."""

    instance_id: str
    parcel: Parcel


# ── for the caller ───────────────────────────────────────────────────────────────────────────────────────────────────


@dataclass(frozen=True, slots=True)
class Finish:
    """A call has ended: give its caller the value, or raise its exception.

    `outcome.parcel` is on this machine, or in a message.
    """

    call_id: str
    node: int
    instance_id: str
    outcome: Outcome
    arguments: Parcel
    function: str = ""
    """Its name, for people."""


@dataclass(frozen=True, slots=True)
class Fail:
    """A call has no outcome: raise this at its caller."""

    call_id: str
    error: SkywardError
    arguments: Parcel


@dataclass(frozen=True, slots=True)
class Cancelled:
    """A cancelled call does not need its arguments any more."""

    call_id: str
    arguments: Parcel


@dataclass(frozen=True, slots=True)
class Discard:
    """Remove an outcome that has no caller any more, on this machine."""

    parcel: Parcel


@dataclass(frozen=True, slots=True)
class EmitEvent:
    """Emit an event. A log line names its call: the call's result must come after the line."""

    event: SkywardEvent
    call_id: str | None = None


@dataclass(frozen=True, slots=True)
class MeterCalls:
    """Calls have ended that kept slots of a machine busy for these seconds, by the uses that pay ("": none)."""

    instance_id: str
    seconds_by_use: Mapping[str, float]


# ── for recovery ─────────────────────────────────────────────────────────────────────────────────────────────────────


@dataclass(frozen=True, slots=True)
class Joined:
    """All workers of a node have joined."""

    rank: int


@dataclass(frozen=True, slots=True)
class Left:
    """A worker of a node is gone."""

    rank: int


@dataclass(frozen=True, slots=True)
class UseRanks:
    """Another process has decided which ranks stay: let new broadcasts use these, whose nodes are known."""

    ranks: frozenset[int]


@dataclass(frozen=True, slots=True)
class CutOff:
    """The scheduler does not answer."""


@dataclass(frozen=True, slots=True)
class Answered:
    """The scheduler has answered: calls go out on this connection from now on."""

    epoch: int


type Action = (
    Send
    | Follow
    | TakeBack
    | Gather
    | Release
    | Stop
    | GiveCredit
    | RepeatReports
    | ReleaseRetainedCalls
    | Acknowledge
    | AskLoad
    | Ping
    | Upload
    | Fetch
    | FetchItem
    | DeliverItem
    | Remove
    | Finish
    | Fail
    | Cancelled
    | Discard
    | EmitEvent
    | MeterCalls
    | Joined
    | Left
    | UseRanks
    | CutOff
    | Answered
)
