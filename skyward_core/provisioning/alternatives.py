"""The candidates of all alternatives of a pool's accelerator (`accelerator=["H100", "A100"]`), in one order.

    spec --questions--> one for each alternative --ask_each--> answers of its providers --rank_all--> candidates

A spec without alternatives is one question (`abilities.Question`). With selection="first" all candidates of an
alternative are tried before those of the next one.

Which provider may rent which alternative is known before any request, by the features that the spec asks for.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Hashable, Iterable, Sequence
from dataclasses import dataclass, replace

from skyward_core.concurrency.threads import side_by_side
from skyward_core.errors import BadRequest, NotYetSupported, Refusal
from skyward_core.providers.base import Provider, plain_name
from skyward_core.provisioning.candidates import Candidate, ProviderOffers, candidates, query, refusal
from skyward_core.spec import PoolSpec


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
    reasons: list[NotYetSupported] = []
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
        except NotYetSupported as error:
            reasons.append(error)
    if not found:
        raise reasons[0]
    return found


def able(spec: PoolSpec, providers: Sequence[Provider]) -> list[Provider]:
    """Return the providers that can do what the spec asks for. Raises what `refuse` raises if none can."""
    found: list[Provider] = []
    reasons: list[NotYetSupported] = []
    for provider in providers:
        try:
            refuse(spec, provider)
            found.append(provider)
        except NotYetSupported as error:
            reasons.append(error)
    if not found:
        raise reasons[0]
    return found


def refuse(spec: PoolSpec, provider: Provider) -> None:
    """Raise BadRequest for a feature that the provider never has, before any request to it."""
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
