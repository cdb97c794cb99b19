"""What happens in a pool, as frozen values.

Every event is a `SkywardEvent`; a `Callback` takes one and may return one in its place. Times are seconds, money is
USD, `node` is the rank of a node (0 is the head).
"""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable, Generator, Mapping
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass, field, replace
from typing import ClassVar

from skyward_core.errors import Refusal
from skyward_core.shown_text import is_visible, visible, visible_data, visible_lines, visible_logger
from skyward_core.work import NO_WORK, Work

_callback: ContextVar[Callback | None] = ContextVar("skyward_callback", default=None)
_log = visible_logger("skyward")


type ProviderName = str
"""A provider's short name: "local", "aws", ..."""


_OF_LINES = frozenset({"line", "message", "reason"})
"""Fields whose texts may have several lines."""


class _Event:
    """Makes each text of an event visible when the event is made: a node or a provider may have written it, and any
    display, log or page may show it (`shown_text.py`).
    """

    __slots__ = ()
    __match_args__: ClassVar[tuple[str, ...]] = ()

    def __post_init__(self) -> None:
        for name in self.__match_args__:
            value = getattr(self, name)
            if type(value) is str and not is_visible(value):
                object.__setattr__(self, name, visible_lines(value) if name in _OF_LINES else visible(value))
            elif type(value) in (dict, tuple):
                object.__setattr__(self, name, visible_data(value))


# ── provision ────────────────────────────────────────────────────────────────────────────────────────────────────────


@dataclass(frozen=True, slots=True)
class InfraCreating(_Event):
    """The pool begins to look for machines: it is written down in the ledger under this id, and nothing is rented yet.

    `work` is that to which it belongs: empty for a pool to which its user has given a name.
    """

    pool_id: str = ""
    work: Work = NO_WORK


@dataclass(frozen=True, slots=True)
class InfraCreated(_Event):
    """A provider sells what the spec needs, in this region; it is about to be rented.

    `price_per_hour` is the price of all machines with all extras, None if it is unknown. `candidates` is how many ways
    there were to rent them. `max_cost` and `account` limit what the pool may cost, None where nothing does.
    """

    region: str
    candidates: int = 0
    price_per_hour: float | None = None
    max_cost: float | None = None
    account: str | None = None


@dataclass(frozen=True, slots=True)
class CandidateRefused(Refusal, _Event):
    """One that might have rented out the machines did not; the next one is tried.

    The fields are those of `errors.Refusal`.
    """


@dataclass(frozen=True, slots=True)
class InstanceLaunching(_Event):
    """Machines are being requested; from here on they may cost money."""

    count: int
    instance_type: str
    provider: ProviderName


@dataclass(frozen=True, slots=True)
class InstanceProvisioned(_Event):
    """A machine exists. Prices are USD per hour, None where the provider does not sell it so.

    `accelerator` is what its calls may use ("A100", "2 x T4"), None without one. `console_url` is the page of the
    provider's console that shows the machine, if there is one.
    """

    instance_id: str
    node: int
    spot: bool
    provider: ProviderName
    ip: str | None = None
    instance_type: str | None = None
    price_on_demand: float | None = None
    price_spot: float | None = None
    accelerator: str | None = None
    console_url: str | None = None


# ── set-up ───────────────────────────────────────────────────────────────────────────────────────────────────────────


@dataclass(frozen=True, slots=True)
class BootstrapStarting(_Event):
    """A machine is being prepared."""

    instance_id: str


@dataclass(frozen=True, slots=True)
class BootstrapProgress(_Event):
    """A machine enters a step: "uv", "apt", "deps", "keep", "skyward", "volumes", "shell", "mig" or "server"."""

    instance_id: str
    step: str


@dataclass(frozen=True, slots=True)
class BootstrapCompleted(_Event):
    """A machine is a node: its workers have joined the pool."""

    instance_id: str


@dataclass(frozen=True, slots=True)
class PoolReady(_Event):
    """All nodes have joined; calls can run. `slots` is how many run at once, `seconds` how long opening took."""

    pool_id: str
    nodes: int
    slots: int
    seconds: float


@dataclass(frozen=True, slots=True)
class NodesScaled(_Event):
    """A pool of `nodes=(least, most)` is to have another number of nodes from now on; `before` is the number so far.

    New ones take calls when they have joined, and those that leave end their calls first.
    """

    nodes: int
    before: int
    reason: str


# ── execute ──────────────────────────────────────────────────────────────────────────────────────────────────────────


@dataclass(frozen=True, slots=True)
class CallProgress(_Event):
    """How many calls this pool was given, how many have ended, well or not, and how many were cancelled; at most ten a
    second.

    `done` holds the failed ones, and not the cancelled ones.
    """

    submitted: int
    done: int
    failed: int
    cancelled: int = 0


@dataclass(frozen=True, slots=True)
class Metrics(_Event):
    """A sample of one node.

    Percent is 0 to 100 of the whole machine, memory in MB = 10⁶ bytes, temperature in °C; GPU values are means
    (temperature: the highest) over the node's GPUs, None where there is none.
    """

    instance_id: str
    node: int
    cpu_percent: float
    memory_percent: float
    memory_used_mb: float
    memory_total_mb: float
    gpu_utilization: float | None = None
    gpu_memory_used_mb: float | None = None
    gpu_memory_total_mb: float | None = None
    gpu_temperature: float | None = None
    timestamp: float = 0.0


@dataclass(frozen=True, slots=True)
class CallReported(_Event):
    """Metrics that a running call has reported with `sky.report`.

    `call_id` names the call, as in `LogLine`; `step` is None if the call named none. `values` has the last value of
    each metric since the last event of the call. `timestamp` is the node's clock, seconds since 1970. A broadcast
    reports from each of its nodes. When a call that has reported ends, however it does, an event with `is_last` has
    its last step, and the last values of all of its metrics. `use` is the id of the `PoolUse` that pays for the call,
    "" for none.
    """

    node: int
    instance_id: str
    call_id: str | None
    step: int | None
    values: Mapping[str, float]
    timestamp: float
    is_last: bool = False
    use: str = ""


@dataclass(frozen=True, slots=True)
class LogLine(_Event):
    r"""One line that a call wrote, without its line end; or one log record, with its traceback.

    `line` is visible text: control characters and what shows nothing are written out, as "\x1b", and colours are left
    out. Tabs stay, and line breaks between the lines of a record.
    `timestamp` is the node's clock, seconds since 1970; `call_id` names the call
    (`None`: written between calls), `stream` is "stdout" or "stderr". `level` is
    that of a log record, as in `logging` (30 is WARNING); None for other lines.
    `place` is for a call of a broadcast: that of its node among those of the
    broadcast, from 0 on; None for other calls. `is_shown` is False if displays
    leave the line out, because the pool has `output="head"`.
    """

    node: int
    instance_id: str
    line: str
    timestamp: float
    call_id: str | None = None
    stream: str = "stdout"
    level: int | None = None
    place: int | None = None
    is_shown: bool = True

    def __post_init__(self) -> None:  # as for all events; a map may print 100,000 lines
        if is_visible(f"{self.line}{self.stream}{self.instance_id}{self.call_id}"):
            return
        if is_visible(f"{self.stream}{self.instance_id}{self.call_id}"):
            object.__setattr__(self, "line", visible_lines(self.line))
        else:
            _Event.__post_init__(self)


# ── shut-down ────────────────────────────────────────────────────────────────────────────────────────────────────────


@dataclass(frozen=True, slots=True)
class InstanceStopping(_Event):
    """A machine is being given back."""

    instance_id: str


@dataclass(frozen=True, slots=True)
class InstanceLost(_Event):
    """A machine went away without a request; `reason` says how it was noticed."""

    instance_id: str
    node: int
    reason: str


@dataclass(frozen=True, slots=True)
class InstancesUnconfirmed(_Event):
    """The pool has ended, and these machines could not be confirmed gone. Their ledger entries stay open; the pool's
    reaper, and every sweep, asks again.

    `is_free`: they cost nothing and end themselves by their lease. Else they may be billed until they are known to be
    gone.
    """

    instance_ids: tuple[str, ...]
    reason: str
    is_free: bool


@dataclass(frozen=True, slots=True)
class PreemptionNoticed(_Event):
    """The cloud will take a spot machine back: it gets no more calls, and another one is prepared to
    take its place.

    `action` is what its provider will do with it ("terminate", "stop", "hibernate"), `at` when (seconds since 1970),
    `seconds_left` how long that was off when the machine heard of it. Nothing is done ahead for the head (node 0): it
    is replaced when it is lost.
    """

    instance_id: str
    node: int
    action: str
    at: float
    seconds_left: float


@dataclass(frozen=True, slots=True)
class RebalanceRecommended(_Event):
    """At `at` (seconds since 1970) the cloud noted that it may soon take a spot machine back.

    Nothing else happens.
    """

    instance_id: str
    node: int
    at: float


@dataclass(frozen=True, slots=True)
class CallRetrying(_Event):
    """A call runs again, for its node was lost under it: the `attempt`-th time (2: the first time again) of at most
    `attempts`.
    """

    call_id: str
    attempt: int
    attempts: int
    reason: str


@dataclass(frozen=True, slots=True)
class CallsWaiting(_Event):
    """No call of this process has run for `seconds`, because others hold the slots of the pool: `calls` wait. `holder`
    has held one longest, for `held_seconds`; it is named by its run, else by its process.

    It comes after 5 seconds, then after a minute more, two, four, and every ten minutes.
    """

    pool: str
    calls: int
    seconds: float
    holder: str
    held_seconds: float


@dataclass(frozen=True, slots=True)
class ContactLost(_Event):
    """A node does not answer this client any more; it may live and be reached again (`ContactRegained`), or turn out to
    be lost (`InstanceLost`).
    """

    instance_id: str
    node: int
    reason: str


@dataclass(frozen=True, slots=True)
class ContactRegained(_Event):
    """A node answers again, after `seconds` of silence."""

    instance_id: str
    node: int
    seconds: float


@dataclass(frozen=True, slots=True)
class ClusterRestarting(_Event):
    """The head was lost: the cluster comes up anew on the nodes that are left and those that replace the lost ones;
    `PoolReady` follows when it works again.
    """

    reason: str


@dataclass(frozen=True, slots=True)
class PoolStopping(_Event):
    """The pool gives its machines back."""


# ── cost ─────────────────────────────────────────────────────────────────────────────────────────────────────────────


@dataclass(frozen=True, slots=True)
class CostUpdate(_Event):
    """The bill so far. `hourly_rate` is what all machines of the pool cost per hour now."""

    elapsed_seconds: float
    accumulated_cost: float
    hourly_rate: float
    spot_count: int
    ondemand_count: int


@dataclass(frozen=True, slots=True)
class CostFinal(_Event):
    """The whole bill, in USD, in any way that the pool ends: exactly once, in the process that keeps the pool then. It
    is that of the ledger, if that answers. A process that leaves the pool to others has `PoolLeft` instead.

    `buckets`: what it went to, in USD, by the names of `rows.Bucket`, together all of it.
    """

    total_cost: float
    total_seconds: float
    hourly_rate: float
    spot_count: int
    ondemand_count: int
    savings_vs_ondemand: float
    buckets: Mapping[str, float] = field(default_factory=dict[str, float], hash=False)


@dataclass(frozen=True, slots=True)
class PoolLeft(_Event):
    """This process uses the pool no more, and has no more events of it; the pool goes on: for other processes, warm, or
    by its lease. `cost_so_far` is that of the pool, in USD, and `hourly_rate` what its machines cost from now on.

    The last event in place of `CostFinal`, which the process has that ends the pool.
    """

    pool_id: str
    cost_so_far: float
    elapsed_seconds: float
    hourly_rate: float


@dataclass(frozen=True, slots=True)
class BudgetWarning(_Event):
    """The money runs low: most of `limit_usd` (`max_cost`, None if there is none) is spent, or `account` has no more to
    reserve; `reason` in words.
    """

    spent_usd: float
    limit_usd: float | None
    account: str | None
    reason: str = ""


# ── trouble ──────────────────────────────────────────────────────────────────────────────────────────────────────────


@dataclass(frozen=True, slots=True)
class Error(_Event):
    """Something went wrong; the error itself is raised where the caller is."""

    message: str
    instance_id: str | None = None


type SkywardEvent = (
    InfraCreating
    | InfraCreated
    | CandidateRefused
    | InstanceLaunching
    | InstanceProvisioned
    | BootstrapStarting
    | BootstrapProgress
    | BootstrapCompleted
    | PoolReady
    | NodesScaled
    | CallProgress
    | Metrics
    | CallReported
    | LogLine
    | InstanceStopping
    | PreemptionNoticed
    | RebalanceRecommended
    | InstanceLost
    | InstancesUnconfirmed
    | CallRetrying
    | CallsWaiting
    | ContactLost
    | ContactRegained
    | ClusterRestarting
    | PoolStopping
    | CostUpdate
    | CostFinal
    | PoolLeft
    | BudgetWarning
    | Error
)
"""Any event."""

type Callback = Callable[[SkywardEvent], SkywardEvent | None]
"""The event sink: takes an event, returns one to pass on in its place, or None to pass on the one it was given."""


def compose(*callbacks: Callback) -> Callback:
    """Merge callbacks into one that calls them in order, each with what the one before it returned.

    A callback that raises is reported once in the log, with its traceback, and skipped for that event; the others still
    run.
    """
    guarded = tuple(_Guarded(callback) for callback in callbacks)

    def composed(event: SkywardEvent) -> SkywardEvent | None:
        for callback in guarded:
            event = callback(event) or event
        return event

    return composed


def emit(event: SkywardEvent) -> None:
    """Hand an event to the callbacks that `use_callback` has registered in this context; without any, nothing
    happens.
    """
    callback = _callback.get()
    if callback is not None:
        callback(event)


def registered_callback() -> Callback | None:
    """Return what `use_callback` has registered in this context. A pool asks once, when it opens."""
    return _callback.get()


@contextmanager
def use_callback(callback: Callback) -> Generator[None]:
    """Register a callback for this context; inside another `use_callback`, both are called, the outer one first."""
    outer = _callback.get()
    token = _callback.set(compose(outer, callback) if outer else compose(callback))
    try:
        yield
    finally:
        _callback.reset(token)


class _Guarded:
    """A callback that cannot break its caller: the first error is logged, later ones are silent."""

    def __init__(self, callback: Callback) -> None:
        self._callback = callback
        self._lock = threading.Lock()
        self._reported = False

    def __call__(self, event: SkywardEvent) -> SkywardEvent | None:
        try:
            return self._callback(event)
        except Exception:
            with self._lock:
                first, self._reported = not self._reported, True
            if first:
                _log.exception(
                    "the event callback %r failed on %s; the pool goes on, later failures are not logged",
                    self._callback,
                    event,
                )
            return None


# `output="head"`: of a broadcast, displays and task logs show what the first of its nodes prints.
#
# The events still have the lines of all nodes. Those of the others have `is_shown=False`, except log records of WARNING
# and above. Lines on stderr without a level, as those of `warnings.warn`, are not shown.


def hide_other_nodes(event: SkywardEvent, /) -> SkywardEvent:
    """Return the event; a line of another node of a broadcast is not to be shown. The first callback of a pool."""
    if isinstance(event, LogLine) and event.place and (event.level or 0) < logging.WARNING:
        return replace(event, is_shown=False)
    return event
