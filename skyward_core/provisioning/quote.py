"""What a pool would rent now, before it is opened.

`Plan` is what the tasks of an orchestrator would ask for, as its plugin reads it from their definitions: for `skyward
quote`. A plugin is a function of the entry-point group `skyward.quotes`. It takes the target that a user has typed,
such as a folder of DAGs. It returns a Plan, or None if such a target is not its own. It runs no task and rents nothing.
"""

from __future__ import annotations

import os
from collections import Counter
from collections.abc import Callable, Hashable, Iterable, Sequence
from dataclasses import dataclass, replace
from importlib.metadata import entry_points

from skyward_core.concurrency.threads import side_by_side
from skyward_core.errors import BadRequest, NotYetSupported, Refusal, SkywardError
from skyward_core.events.narrator import usd
from skyward_core.providers.base import Provider, plain_name
from skyward_core.provisioning.candidates import Candidate, ProviderOffers, candidates, query, refusal
from skyward_core.spec import PoolSpec

SECONDS_PER_HOUR = 3600
SHOWN = 5
ENTRY_POINTS = "skyward.quotes"


# The candidates of all alternatives of a pool's accelerator (`accelerator=["H100", "A100"]`), in one order.
#
#     spec --questions--> one for each alternative --ask_each--> answers of its providers --rank_all--> candidates
#
# A spec without alternatives is one `Question`. With selection="first" all candidates of an alternative are tried
# before those of the next one.
#
# Which provider may rent which alternative is known before any request, by the features that the spec asks for.


def ask_each(asked: Sequence[Question]) -> list[list[ProviderOffers]]:
    """Ask the providers of all questions at once. Return the answers of each question."""
    pairs = [(question, provider) for question in asked for provider in question.providers]
    answers = side_by_side(
        lambda pair: query(pair[1], pair[0].spec.requirements), pairs, "skyward-offers", max(1, len(pairs))
    )
    rest = iter(answers)
    return [[next(rest) for _ in question.providers] for question in asked]


def rank_all(
    asked: Sequence[Question], answers: Sequence[Sequence[ProviderOffers]]
) -> tuple[list[Candidate], list[Refusal]]:
    """Return the candidates of all questions in the order in which they are tried, and why a provider has none.

    A reason that holds for several questions is in it once. Raises BadRequest if `candidates` does for each of them.
    """
    found: list[Candidate] = []
    refusals: list[list[Refusal]] = []
    unsold: list[BadRequest] = []
    for question, sold in zip(asked, answers, strict=True):
        try:
            its, reasons = candidates(question.spec, sold, question.place)
        except BadRequest as error:
            unsold.append(error)
            its, reasons = [], [refusal(one.provider, None, error, one.seconds) for one in sold]
        found += its
        refusals.append(reasons)
    if unsold and len(unsold) == len(asked):
        raise unsold[0]
    is_cheapest_first = any(question.spec.selection == "cheapest" for question in asked)
    found.sort(key=lambda one: one.weight if is_cheapest_first else (one.place, *one.weight))
    return found, joined(refusals, lambda one: replace(one, seconds=0.0))


def joined[T](lists: Iterable[Sequence[T]], key: Callable[[T], Hashable]) -> list[T]:
    """Return the items of all lists without those that an earlier list has: a provider gives each question the same
    error. Items of one list stay, because two providers may have the same error.
    """
    found: list[T] = []
    for one in lists:
        known = Counter(map(key, found))
        for item in one:
            if known[key(item)]:
                known[key(item)] -= 1
            else:
                found.append(item)
    return found


@dataclass(frozen=True, slots=True)
class Question:
    """One alternative: its place in the user's list, the spec with it alone, and the providers that may rent it."""

    place: int
    spec: PoolSpec
    providers: tuple[Provider, ...]


def questions(spec: PoolSpec, providers: Sequence[Provider]) -> list[Question]:
    """Return a question for each alternative that a provider can do.

    Raises BadRequest if none can, or if an alternative names a provider that the pool does not have.
    """
    names = [one.provider for one in spec.alternatives] or [None]
    found: list[Question] = []
    reasons: list[BadRequest] = []
    for place, (alone, name) in enumerate(zip(spec.each_alternative(), names, strict=True)):
        own = [one for one in providers if name is None or plain_name(one.name) == plain_name(name)]
        if not own:
            having = ", ".join(sorted({provider.name for provider in providers}))
            raise BadRequest(
                f"accelerator: {spec.alternatives[place]} is for a provider that the pool does not have (it has"
                f" {having}): add it to provider=[...]"
            )
        try:
            found.append(Question(place, alone, tuple(able(alone, own))))
        except BadRequest as error:
            reasons.append(error)
    if not found:
        raise reasons[0]
    return found


def able(spec: PoolSpec, providers: Sequence[Provider]) -> list[Provider]:
    """Return the providers that can do what the spec asks for. Raises what `refuse` raises if none can."""
    found: list[Provider] = []
    reasons: list[BadRequest] = []
    for provider in providers:
        try:
            refuse(spec, provider)
            found.append(provider)
        except BadRequest as error:
            reasons.append(error)
    if not found:
        raise reasons[0]
    return found


def refuse(spec: PoolSpec, provider: Provider) -> None:
    """Raise BadRequest for a feature or a number of machines that the provider never has, before any request to it."""
    is_partitioned = spec.first_accelerator is not None and bool(spec.first_accelerator.mig)
    needed = {
        "apt": bool(spec.image.apt),
        "shell": bool(spec.image.shell),
        "volume": bool(spec.volume),
        "mig": is_partitioned,
    }
    for feature, reason in type(provider).refuses.items():
        if needed.get(feature):
            raise NotYetSupported(f"{provider.name} does not do {feature}: {reason}")
    most = provider.most_machines
    if most is not None and spec.least_nodes > most:
        raise BadRequest(
            f"nodes={spec.least_nodes}, and {provider.name} has {most}: write nodes={most}, or name"
            f" {spec.least_nodes - most} more"
        )


@dataclass(frozen=True, slots=True)
class QuotedCandidate:
    """One candidate for all machines: what it is, and the price of all of them with all extras, in USD per hour."""

    name: str
    price_per_hour: float


@dataclass(frozen=True, slots=True)
class Quote:
    """The candidates for the machines of a pool now, in the order in which they would be tried.

    `ceiling_usd` is the most that the pool may cost: `max_cost`, or what the most expensive candidate (of a pool that
    grows: `max_hourly_cost`) costs for `max_lifetime`; None if nothing limits it. `account` is the account that pays.
    `refusals` are the reasons of the providers without a candidate. Prices are present prices: they may differ when a
    pool is opened later.
    """

    candidates: tuple[QuotedCandidate, ...]
    ceiling_usd: float | None = None
    account: str | None = None
    refusals: tuple[Refusal, ...] = ()

    @property
    def price_per_hour(self) -> float | None:
        """The price of the candidate that would be tried first, in USD; None if there is none."""
        return self.candidates[0].price_per_hour if self.candidates else None

    def __str__(self) -> str:
        if not self.candidates:
            return "nothing to rent: " + ("; ".join(str(one) for one in self.refusals) or "no provider sells it")
        shown = ", ".join(f"{one.name} at {usd(one.price_per_hour)} per hour" for one in self.candidates[:SHOWN])
        dearest = max(self.candidates, key=lambda candidate: candidate.price_per_hour)
        more = f" and {len(self.candidates) - SHOWN} more" if len(self.candidates) > SHOWN else ""
        if more:
            more += f", the dearest {dearest.name} at {usd(dearest.price_per_hour)} per hour"
        ceiling = "no limit of the cost" if self.ceiling_usd is None else f"at most {usd(self.ceiling_usd)}"
        payer = f", paid by account {self.account!r}" if self.account else ""
        return f"{shown}{more}; {ceiling}{payer}"


def quote(spec: PoolSpec, providers: Sequence[Provider]) -> Quote:
    """Query the providers for their present offers. Rents nothing, and leaves no trace in the ledger.

    Raises BadRequest if no provider can do what the spec asks for.
    """
    asked = questions(spec, providers)
    found, refusals = rank_all(asked, ask_each(asked))
    candidates = tuple(
        QuotedCandidate(candidate.machines, candidate.price_per_hour) for candidate in found if not candidate.too_dear
    )
    return Quote(candidates, ceiling_of(spec, candidates), spec.budget, tuple(refusals))


def ceiling_of(spec: PoolSpec, candidates: Sequence[QuotedCandidate], seconds: float | None = None) -> float | None:
    """Return the most that the pool may cost, in USD; None if nothing limits it.

    `seconds` is after how long the pool's user ends it, such as an orchestrator.
    """
    ends = [end for end in (spec.max_lifetime, seconds) if end is not None]
    dearest = (
        max(one.price_per_hour for one in candidates) if candidates and not spec.is_elastic else spec.max_hourly_cost
    )
    of_life = dearest * min(ends) / SECONDS_PER_HOUR if ends and dearest is not None else None
    limits = [limit for limit in (spec.max_cost, of_life) if limit is not None]
    return min(limits, default=None)


@dataclass(frozen=True, slots=True)
class PlannedTask:
    """A task that opens a pool, before any run of it.

    `spec` is that of its pool; None if it is not known before a run, and then `reason` says why. After
    `timeout_seconds` the orchestrator ends a try of the task, and the pool with it; None if it never does. `tries` is
    how often one run may try it. `instances` is how many such tasks one run has; None if only the run knows.
    """

    workflow: str
    task: str
    spec: PoolSpec | None
    reason: str = ""
    timeout_seconds: float | None = None
    tries: int = 1
    instances: int | None = 1


@dataclass(frozen=True, slots=True)
class Plan:
    """The tasks of a target that open pools. `warnings` say what could not be read, such as a file with a fault."""

    tasks: tuple[PlannedTask, ...] = ()
    warnings: tuple[str, ...] = ()


def plans_of(target: str) -> dict[str, Plan]:
    """Return the plan of each orchestrator whose plugin knows the target, by the plugin's name.

    Raises BadRequest if none does.
    """
    found, absent = dict[str, Plan](), list[str]()
    for entry in sorted(entry_points(group=ENTRY_POINTS), key=lambda entry: entry.name):
        try:
            planner: Callable[[str], Plan | None] = entry.load()
        except ModuleNotFoundError:  # the plugin is a part of a distribution whose orchestrator is not installed
            absent.append(f"{entry.name} is not installed")
            continue
        except ImportError as error:
            absent.append(f"the plugin of {entry.name} cannot be imported ({error})")
            continue
        try:
            plan = _plan(entry.name, planner, target)
        except ImportError as error:
            absent.append(f"{entry.name} cannot import it ({error})")
        else:
            if plan is None:
                absent.append(f"{entry.name} does not know it")
            else:
                found[entry.name] = plan
    if not found:
        if os.sep in target and not os.path.exists(target):
            raise BadRequest(f"there is no file or folder {target!r}")
        raise BadRequest(
            f"no orchestrator reads {target!r}: {'; '.join(absent) or 'none is installed'}. Name a folder or a file of"
            " DAGs of Airflow, or a program that makes a ComputePool; docs/commands/quote.md lists what else can be"
            " named"
        )
    return found


def _plan(name: str, planner: Callable[[str], Plan | None], target: str) -> Plan | None:
    try:
        return planner(target)
    except (SkywardError, ImportError):
        raise
    except Exception as error:  # the definitions are programs of the user, and so may raise anything
        raise BadRequest(f"{name} cannot read {target!r}: {type(error).__name__}: {error}") from error
