"""A pool's events in words, one line each: what the displays print and what the orchestrators' logs show."""

from __future__ import annotations

import logging
from collections.abc import Mapping
from dataclasses import dataclass, replace
from decimal import Decimal

from skyward_core.events.events import (
    BootstrapCompleted,
    BootstrapProgress,
    BootstrapStarting,
    BudgetWarning,
    CallProgress,
    CallReported,
    CallRetrying,
    CallsWaiting,
    CandidateRefused,
    ClusterRestarting,
    ContactLost,
    ContactRegained,
    CostFinal,
    CostUpdate,
    Error,
    InfraCreated,
    InfraCreating,
    InstanceLaunching,
    InstanceLost,
    InstanceProvisioned,
    InstanceStopping,
    InstancesUnconfirmed,
    LogLine,
    Metrics,
    NodesScaled,
    PoolLeft,
    PoolReady,
    PoolStopping,
    PreemptionNoticed,
    RebalanceRecommended,
    SkywardEvent,
)
from skyward_core.events.utilisation import Utilisation, written
from skyward_core.shown_text import each_line, indented

SECONDS_BETWEEN_COSTS = 60.0
SECONDS_BETWEEN_REPORTS = 60.0
"""Of one call on one node; the last one is told always, and callbacks get all of them."""


class Narrator:
    """Puts one pool's events into words, and leaves out what would be noise. Not thread-safe."""

    def __init__(self) -> None:
        self._nodes: dict[str, int] = {}
        self._calls = CallProgress(submitted=0, done=0, failed=0)
        self._cost_shown_at = 0.0
        self._reports: dict[tuple[str | None, str], _Reports] = {}
        """By call and machine."""
        self._use = Utilisation()
        """Since the last line about it."""

    def tell(self, event: SkywardEvent) -> tuple[int, str] | None:
        """Return the level (of `logging`) and the words for an event, or None if it is not worth a line.

        Each line of a node begins with its number. Of other events all lines but the first are indented, so that no
        text of a node or a provider looks like a line of ours.
        """
        if isinstance(event, LogLine):
            level = (event.level or logging.INFO) if event.is_shown else logging.DEBUG
            return level, each_line(f"[node {event.node}] ", event.line)
        told = self._told(event)
        return told and (told[0], indented(told[1]))

    def _told(self, event: SkywardEvent) -> tuple[int, str] | None:
        if isinstance(event, Metrics | CallProgress):
            self._use.see(event)
        match event:
            case InstanceProvisioned(instance_id, node):
                self._nodes[instance_id] = node
                return logging.INFO, _provisioned(event)
            case CallReported():
                return self._reported(event)
            case CallProgress():
                self._calls = event
                return None
            case CostUpdate():
                return self._cost_so_far(event)
            case BudgetWarning():
                return logging.WARNING, _running_low(event)
            case InstanceLost(_, node, reason):
                return logging.WARNING, f"node {node} is lost: {reason}"
            case InstancesUnconfirmed(_, reason, is_free):
                return (
                    (logging.WARNING, f"not confirmed gone, left to their lease: {reason}")
                    if is_free
                    else (logging.ERROR, f"NOT CONFIRMED GONE: {reason}")
                )
            case PreemptionNoticed():
                return logging.WARNING, _noticed(event)
            case RebalanceRecommended(_, node):
                return logging.WARNING, f"node {node} may be taken back by its provider soon"
            case CandidateRefused():
                return logging.INFO, str(event)
            case ContactLost(_, node, reason):
                return logging.WARNING, f"node {node} does not answer: {reason}"
            case ContactRegained(_, node, seconds):
                return logging.INFO, f"node {node} answers again after {_duration(seconds)}"
            case ClusterRestarting(reason):
                return logging.WARNING, f"the cluster comes up anew: {reason}"
            case CallRetrying(call_id, attempt, attempts, reason):
                return logging.WARNING, f"call {call_id[:8]} runs again (attempt {attempt} of {attempts}): {reason}"
            case CallsWaiting():
                return logging.INFO, _waiting(event)
            case Error(message, machine):
                return (logging.ERROR, message if machine is None else f"{self.name(machine)}: {message}")
            case InstanceStopping(machine):
                return logging.DEBUG, f"{self.name(machine)}: stopping"
            case _:
                words = self._phase(event)
                return (logging.INFO, words) if words else None

    def name(self, instance_id: str) -> str:
        """Return "node 1" for a machine whose rank is known, else its id."""
        node = self.rank(instance_id)
        return instance_id if node is None else f"node {node}"

    def rank(self, instance_id: str) -> int | None:
        """Return the rank of a machine, once an event has named it."""
        return self._nodes.get(instance_id)

    def _phase(self, event: SkywardEvent) -> str | None:
        match event:
            case InfraCreating():
                return f"pool {event.pool_id} looks for machines" if event.pool_id else "looking for machines"
            case InfraCreated(region):
                return f"{_chosen(event)} in {region}{_quoted(event)}"
            case InstanceLaunching(count, instance_type, provider):
                return f"launching {count} x {instance_type} on {provider}"
            case BootstrapStarting(machine):
                return f"{self.name(machine)}: preparing"
            case BootstrapProgress(machine, step):
                return f"{self.name(machine)}: {PHASES.get(step, step)}"
            case BootstrapCompleted(machine):
                return f"{self.name(machine)}: ready"
            case PoolReady():
                return (
                    f"the pool is ready after {_duration(event.seconds)}: {_count(event.nodes, 'node')},"
                    f" {_count(event.slots, 'slot')}"
                )
            case NodesScaled(nodes, before, reason):
                return f"the pool {'grows' if nodes > before else 'shrinks'} to {_count(nodes, 'node')}: {reason}"
            case PoolStopping():
                return "giving the machines back" + (f" ({self._calls_so_far()})" if self._calls.submitted else "")
            case CostFinal():
                return _bill(event)
            case PoolLeft():
                return _left(event)
            case _:
                return None

    def _cost_so_far(self, event: CostUpdate) -> tuple[int, str] | None:
        if event.elapsed_seconds - self._cost_shown_at < SECONDS_BETWEEN_COSTS:
            return None
        self._cost_shown_at = event.elapsed_seconds
        parts = [f"running for {_duration(event.elapsed_seconds)}"]
        if self._calls.submitted:
            parts.append(self._calls_so_far())
        if event.accumulated_cost or event.hourly_rate:
            parts.append(f"{usd(event.accumulated_cost)} so far at {usd(event.hourly_rate)} per hour")
        if words := self._use.words():
            parts.append(words)
        self._use = self._use.anew()
        return logging.INFO, ", ".join(parts)

    def _reported(self, event: CallReported) -> tuple[int, str] | None:
        key = (event.call_id, event.instance_id)
        known = self._reports.setdefault(key, _Reports())
        if event.is_last:
            del self._reports[key]
            if known.shown_at is not None and known.untold is None:
                return None
        else:
            event = known.untold = event if known.untold is None else _both(known.untold, event)
            if known.shown_at is not None and event.timestamp - known.shown_at < SECONDS_BETWEEN_REPORTS:
                return None
        known.shown_at, known.untold = event.timestamp, None
        values = ", ".join(f"{name} {written(value)}" for name, value in event.values.items())
        step = "" if event.step is None else f"step {event.step}"
        return logging.INFO, f"[node {event.node}] {': '.join(part for part in (step, values) if part)}"

    def _calls_so_far(self) -> str:
        calls = self._calls
        return f"{calls.done - calls.failed} of {_count(calls.submitted, 'call')} done{not_well(calls)}"


@dataclass(slots=True)
class _Reports:
    """The reports of one call on one node: when one was told last, and what has come since."""

    shown_at: float | None = None
    untold: CallReported | None = None


def _both(earlier: CallReported, later: CallReported) -> CallReported:
    step = earlier.step if later.step is None else later.step
    return replace(later, step=step, values={**earlier.values, **later.values})


PHASES: Mapping[str, str] = {
    "apt": "installing system packages",
    "uv": "getting uv",
    "deps": "installing packages",
    "volumes": "mounting volumes",
    "shell": "running the image's commands",
    "mig": "partitioning the GPU",
    "skyward": "starting",
    "server": "starting the workers",
}
"""What a machine does in each phase of its preparation. Another phase is shown by its name."""


def _waiting(event: CallsWaiting) -> str:
    who = "a call waits" if event.calls == 1 else f"{event.calls} calls wait"
    held = f"held by {event.holder} for {_duration(event.held_seconds)}"
    return f"{who} for a slot of pool {event.pool}, {held}"


def not_well(calls: CallProgress) -> str:
    """Return how many calls have failed and were cancelled, as the end of a sentence; "" if none."""
    return (f", {calls.failed} failed" if calls.failed else "") + (
        f", {calls.cancelled} cancelled" if calls.cancelled else ""
    )


def _quoted(event: InfraCreated) -> str:
    """The price before anything is rented, and what limits it."""
    if event.price_per_hour is None:
        return ""
    limits = [
        f"at most {usd(event.max_cost)} (max_cost)" if event.max_cost is not None else "",
        f"paid by account {event.account!r}" if event.account else "",
    ]
    return f": {usd(event.price_per_hour)} per hour; {', '.join(filter(None, limits)) or 'no max_cost'}"


def _chosen(event: InfraCreated) -> str:
    return f"chose the first of {event.candidates} candidates," if event.candidates > 1 else "chose machines"


def _provisioned(event: InstanceProvisioned) -> str:
    price = event.price_spot if event.spot else event.price_on_demand
    market = "spot" if event.spot else "on demand"
    facts = [event.instance_type, event.ip, f"{market} at {usd(price)} per hour" if price else None]
    rest = ", ".join(part for part in facts if part)
    return f"node {event.node} is {event.instance_id}" + (f" ({rest})" if rest else "")


def _noticed(event: PreemptionNoticed) -> str:
    then = (
        "it takes no more calls, and another machine is prepared"
        if event.node
        else "it is the head, and the cluster comes up anew without it then"
    )
    return (
        f"node {event.node} is taken back by its provider in {_duration(event.seconds_left)} ({event.action}): {then}"
    )


def _bill(event: CostFinal) -> str:
    markets = ((event.spot_count, "spot"), (event.ondemand_count, "on demand"))
    machines = ", ".join(f"{count} {market}" for count, market in markets if count)
    saved = f", {usd(event.savings_vs_ondemand)} less than on demand" if event.savings_vs_ondemand > 0 else ""
    return (
        f"done: {_duration(event.total_seconds)}, {usd(event.total_cost)}"
        + (f" ({machines})" if machines else "")
        + saved
        + _shares(event)
    )


def _left(event: PoolLeft) -> str:
    rate = f", at {usd(event.hourly_rate)} per hour" if event.hourly_rate else ""
    return (
        f"left: the pool {event.pool_id} goes on{rate}; it has cost {usd(event.cost_so_far)} in"
        f" {_duration(event.elapsed_seconds)} so far"
    )


def _shares(event: CostFinal) -> str:
    """What the money went to, the largest part first; parts that would be 0 % are left out."""
    parts = (
        {name: round(100 * amount / event.total_cost) for name, amount in event.buckets.items()}
        if event.total_cost
        else {}
    )
    parts = ", ".join(
        f"{name} {percent} %" for name, percent in sorted(parts.items(), key=lambda part: -part[1]) if percent
    )
    return f"; {parts}" if parts else ""


def _running_low(event: BudgetWarning) -> str:
    if event.reason:
        return f"the money runs low: {event.reason}"
    if event.limit_usd is not None:
        return f"the money runs low: {usd(event.spent_usd)} of {usd(event.limit_usd)} are spent"
    return f"the money runs low: {usd(event.spent_usd)} are spent" + (
        f", and account {event.account!r} has little left" if event.account else ""
    )


def usd(amount: float) -> str:
    """Return an amount of US dollars as it is written, with the small parts that a short run costs."""
    if amount == 0:
        return "$0"
    return f"${digits(amount)}" if abs(amount) < 1 else f"${amount:,.2f}"


def digits(amount: float | Decimal) -> str:
    """Return an amount of money with four decimals, and as many more as its first four digits need: no cost is
    shown as zero.

    >>> digits(12.5), digits(0.0123), digits(0.000012345)
    ('12.5000', '0.0123', '0.00001234')
    """
    exact = Decimal(repr(amount)) if isinstance(amount, float) else Decimal(amount)
    decimals = max(4, 3 - exact.adjusted()) if exact and exact.is_finite() else 4
    whole, _, rest = f"{exact:.{decimals}f}".partition(".")
    return f"{whole}.{rest[:4]}{rest[4:].rstrip('0')}"


def _duration(seconds: float) -> str:
    if seconds < 60:
        return f"{seconds:.1f} s"
    minutes, rest = divmod(round(seconds), 60)
    if minutes < 60:
        return f"{minutes} min {rest} s"
    return f"{minutes // 60} h {minutes % 60} min"


def _count(number: int, noun: str) -> str:
    return f"{number} {noun}" if number == 1 else f"{number} {noun}s"
