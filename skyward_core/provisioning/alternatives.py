"""The candidates of all alternatives of a pool's accelerator (`accelerator=["H100", "A100"]`), in one order.

    spec --questions--> one for each alternative --ask_each--> answers of its providers --rank_all--> candidates

A spec without alternatives is one question (`abilities.Question`). With selection="first" all candidates of an
alternative are tried before those of the next one.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Hashable, Iterable, Sequence
from dataclasses import replace

from skyward_core.concurrency.threads import side_by_side
from skyward_core.errors import BadRequest, Refusal
from skyward_core.provisioning.abilities import Question
from skyward_core.provisioning.candidates import Candidate, ProviderOffers, candidates, query, refusal


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
