"""Selects the offers that a pool rents: for all machines when it opens, and for one or some when they are replaced.

`Selection` owns the offer of each rank. `rental.Rental` launches the machines.
"""

from __future__ import annotations

import contextlib
import logging
import threading
import time
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import asdict, replace
from datetime import UTC, datetime

from skyward_core.accelerators.mig import RESET_MAY_BE_REFUSED, needs_reset
from skyward_core.errors import (
    BadRequest,
    BudgetExceeded,
    CredentialsError,
    NoCapacity,
    OfferGone,
    PoolClosed,
    ProviderFailed,
    QuotaExceeded,
    Refusal,
    SkywardError,
)
from skyward_core.events.events import CandidateRefused, InfraCreated
from skyward_core.events.narrator import usd
from skyward_core.ledger.journal import Journal
from skyward_core.machines import spot
from skyward_core.machines.instances import Instance
from skyward_core.machines.offers import Offer
from skyward_core.providers.base import Provider
from skyward_core.provisioning.candidates import (
    ENOUGH_SECONDS,
    MEMORY_SECONDS,
    TOO_DEAR,
    Candidate,
    ProviderOffers,
    ask,
    comparable,
    fitting,
    is_sold_as_spot,
    may_come,
    none_left,
    offers_for_one_more,
    order,
    own_mistake,
    refusal,
    refusals_of,
    resting,
    within_hourly_limit,
)
from skyward_core.provisioning.quote import Question, ask_each, joined, questions, rank_all
from skyward_core.provisioning.rental import Emit, Rental
from skyward_core.provisioning.teardown import Termination
from skyward_core.spec import MOST_RATIO, PoolSpec

ON_TO_THE_NEXT = (NoCapacity, CredentialsError, ProviderFailed, OfferGone, BudgetExceeded, BadRequest)
"""Errors of one candidate after which the next one is tried.

Not InstancesLeft: no other provider is tried while machines may be there.
"""

HOURS_PER_DAY = 24
_log = logging.getLogger("skyward")


class Selection:
    """Rents from the first candidate that has all machines, and later from offers that may replace a lost machine."""

    def __init__(
        self, spec: PoolSpec, providers: Sequence[Provider], rental: Rental, *, emit: Emit, journal: Journal
    ) -> None:
        self._spec = spec
        self._providers = tuple(providers)
        self._rental = rental
        self._emit = emit
        self._journal = journal
        self.offers: dict[int, Offer] = {}
        """The offer of each rank."""
        self._rented: dict[int, Offer] = {}
        """The offer of a rank's machine, where another one may stand for the rank's own."""
        self.adopted: dict[int, Instance] = {}
        """The machines that another process has rented, by rank: their offers are searched when one is lost."""
        self.others: list[Offer] = []
        """Other offers of the provider in the same region: they may replace a lost machine too."""
        self._choices: dict[int, list[Offer]] = {}
        """The offers for a rank that the pool has not had, the best first, until its machine is rented."""
        self._choice_lock = threading.Lock()
        """Several ranks may come at once. The share of spot machines, and the price per hour, hold for all of them."""

    # ── all machines of a pool that opens ────────────────────────────────────────────────────────────────────────────

    def rent_all(self, deadline: float) -> list[Instance]:
        """Rent all machines from the first candidate that has them. Each refusal is emitted and written into the
        ledger.

        If only some of a candidate's machines came, they are terminated and known to be gone before the next candidate
        is tried. Raises NoCapacity with the refusals, or the error itself if all have refused for the same reason;
        BadRequest if no provider can do what the spec asks for, BudgetExceeded if only the money is missing. A provider
        that refuses the credentials or the request is not tried again; if it is the only one, its error is raised at
        once.
        """
        asked = questions(self._spec, self._providers)
        is_only_one = len({id(provider) for one in asked for provider in one.providers}) == 1
        for one in asked:
            warn(one.spec, one.providers)
        excluded = Excluded()
        strategy = self._spec.spot
        rounds, interval = (strategy.retries + 1, strategy.interval) if isinstance(strategy, spot.Always) else (1, 0.0)
        while True:
            rounds -= 1
            found, refusals, errors = self._candidates(asked, excluded)
            for candidate in found:
                if excluded.has(candidate):
                    continue
                if candidate.too_dear:
                    error = NoCapacity(candidate.too_dear).coded(TOO_DEAR)
                    refusals.append(self._note_refusal(candidate.provider, candidate.parts[0].offer, error, 0.0))
                    continue
                try:
                    instances = self._rent_from(candidate, refusals, sum(not other.too_dear for other in found))
                    self._settle_for(candidate, found)
                    return instances
                except ON_TO_THE_NEXT as error:
                    if self._rental.is_closing or time.monotonic() > deadline:
                        raise
                    ours = own_mistake([*errors, error])
                    excluded.note(candidate.provider, ours or error, candidate.place)
                    if is_only_one and not excluded.left(asked):
                        if ours:
                            raise ours from error
                        raise
                    if self._rental.may_be_left:
                        self._rental.end_all()  # an error does not prove that no machine was launched
                    errors.append(ours or error)
            is_hopeless = not any(
                may_come(
                    one.providers,
                    [candidate for candidate in found if candidate.place == one.place],
                    one.spec.requirements,
                    errors,
                )
                for one in excluded.left(asked)
            )
            if not rounds or is_hopeless or time.monotonic() + interval > deadline:
                wanted = [one.spec.requirements for one in asked]
                refused = own_mistake(errors, len(errors)) or none_left(
                    wanted, self._spec.least_nodes, refusals, errors
                )
                if refused in errors:
                    raise refused  # its cause is its own
                raise refused from (errors[-1] if errors else None)
            self._rental.go_on_until(deadline, "no spot machine became free in time", interval)

    def _candidates(
        self, asked: Sequence[Question], excluded: Excluded
    ) -> tuple[list[Candidate], list[Refusal], list[SkywardError]]:
        """Ask the providers that are not excluded. The errors of the others are among the refusals, and emitted
        once.
        """
        known = [excluded.answers(one) for one in asked]
        new = ask_each([excluded.without(one) for one in asked])
        sold = [[*answers, *errors] for answers, errors in zip(new, known, strict=True)]
        found, refusals = rank_all(asked, sold)
        for one, answers in zip(asked, new, strict=True):
            for answer in answers:
                if answer.error is not None:
                    excluded.note(answer.provider, answer.error, one.place)
        old = Counter(one for errors in known for answer in errors for one in refusals_of(answer))
        for one in refusals:
            if old[one]:
                old[one] -= 1
            else:
                self._emit(_refused(one))
                self._journal.note_refusal(one)
        rest = (
            resting(self._journal.recent_attempts(MEMORY_SECONDS), datetime.now(UTC), self._spec.least_nodes)
            if len(found) > 1
            else {}
        )
        for key in {key for candidate in found for key in candidate.keys} & rest.keys():
            _log.info(
                "%s has failed several times in a row, and is tried after other candidates until %s",
                "/".join(map(str, key[:3])),
                rest[key].isoformat(timespec="seconds"),
            )
        errors = [[error for answer in answers for error in answer.errors] for answers in sold]
        return order(found, rest), refusals, joined(errors, lambda error: (type(error), str(error)))

    def _rent_from(self, candidate: Candidate, refusals: list[Refusal], candidates: int) -> list[Instance]:
        """Rent all machines of a candidate.

        A refusal names the part that refused: a mixed candidate has two.
        """
        self._rental.turn_to(candidate.provider, candidate.account, candidate.spec)
        limits = self._spec.max_cost, self._spec.budget
        self._emit(InfraCreated(candidate.region, candidates, candidate.price_per_hour, *limits))
        instances: list[Instance] = []
        for index, part in enumerate(candidate.parts):
            began = time.monotonic()
            try:
                instances += self._rental.launch(part.offer, part.count, part.first_rank, candidate.parts[index + 1 :])
            except ON_TO_THE_NEXT as error:
                refusals.append(self._note_refusal(candidate.provider, part.offer, error, time.monotonic() - began))
                raise
        self.offers = {part.first_rank + index: part.offer for part in candidate.parts for index in range(part.count)}
        return instances

    def _note_refusal(self, provider: Provider, offer: Offer, error: SkywardError, seconds: float) -> Refusal:
        refused = refusal(provider, offer, error, seconds)
        self._emit(_refused(refused))
        return refused

    def _settle_for(self, candidate: Candidate, found: Sequence[Candidate]) -> None:
        """Remember the offers that may replace this candidate's machines.

        Log if the spec allows both spot and on-demand machines, and there is no spot offer.
        """
        near = [
            other
            for other in found
            if not other.too_dear
            and (other.provider, other.region, other.place) == (candidate.provider, candidate.region, candidate.place)
        ]
        if len(self._spec.alternatives) > 1:
            _log.info("%s is rented, of %s", candidate.spec.accelerator_words, self._spec.accelerator_words)
        self.others = [part.offer for other in near for part in other.parts]
        if candidate.price_per_hour and not candidate.provider.ends_for_good():
            _warn_of_no_end(candidate)
        if any(part.offer.is_spot for part in candidate.parts) and (bill := candidate.provider.stopped_spot()):
            _log.warning("without this computer and its reaper, %s", bill)
        offer = candidate.parts[0].offer
        want = candidate.spec.requirements
        if offer.accelerators and offer.total_per_hour and want.accelerator is None and want.instance_type is None:
            words = "%s sells no machine without an accelerator: %s is rented, with %d x %s, for %s per hour"
            price = usd(candidate.price_per_hour)
            _log.info(words, candidate.provider.name, candidate.machines, offer.accelerators, offer.accelerator, price)
        is_free = self._spec.spot is None or isinstance(self._spec.spot, spot.IfAvailable)
        if is_free and candidate.price_per_hour and not is_sold_as_spot(candidate, found):
            _log.info("%s has no spot offer: it is rented on demand", offer.name)

    # ── one more node ────────────────────────────────────────────────────────────────────────────────────────────────

    def choose_for(self, rank: int) -> None:
        """Choose the offers of a rank that the pool has not had (`growth`), for the next `rent_one`. The provider is
        asked for its present offers; if it does not answer, the offers of the opening count.

        Raises NoCapacity if the strategy, the size and price of the pool's machines and `max_hourly_cost` allow none.
        """
        self._find_offers([*self.adopted])
        provider, want = self._rental.provider, self._rental.spec.requirements
        (answer,) = ask([provider], want)
        sold = fitting(answer.offers, want)
        with self._choice_lock:
            present = [offer for other, offer in sorted(self.offers.items()) if other != rank]
            offers = offers_for_one_more(self._rental.spec, provider, present, sold or [*present, *self.others])
            if not offers:
                raise NoCapacity(
                    f"{provider.name} sells no machine that the pool's spot strategy, and size and price of its"
                    " machines, allow"
                )
            offers = within_hourly_limit(self._spec, self._rented_beside(rank), offers)
            self.offers[rank], self._choices[rank] = offers[0], offers

    def forget(self, rank: int) -> None:
        """A rank has no node any more, and will have none."""
        with self._choice_lock:
            self.offers.pop(rank, None)
            self._rented.pop(rank, None)
            self.adopted.pop(rank, None)
            self._choices.pop(rank, None)

    # ── replacements ─────────────────────────────────────────────────────────────────────────────────────────────────

    def rent_one(self, rank: int, termination: Termination | None) -> Instance:
        """Rent a machine for a rank while the lost one is terminated, which may take long.

        If no other machine of its kind is available, or there is no money for one, wait for the end of the lost machine
        first. A rank that the pool has not had gets one of the offers that were chosen for it, or raises the first
        refusal.
        """
        if rank in self._choices:
            return self._rent_chosen(rank)
        self._find_offers([rank, *self.adopted])
        own = self.offers[rank]
        try:
            return self._launch(own, rank)
        except (NoCapacity, BudgetExceeded):
            for other in self.others:
                if other != own and self._may_stand_for(other, own):
                    with contextlib.suppress(NoCapacity, BudgetExceeded):  # the next offer may be cheaper
                        return self._launch(other, rank)
            if termination is None:
                raise
        termination.over.wait(min(self._rental.provider.gone_deadline_seconds, self._spec.provision_timeout))
        return self._launch(own, rank)

    def _launch(self, offer: Offer, rank: int) -> Instance:
        self._count(offer, rank)
        return self._rental.launch(offer, 1, rank)[0]

    def _count(self, offer: Offer, rank: int) -> None:
        """Count the price of an offer for a rank. Raises NoCapacity if the pool would cost more per hour than
        `max_hourly_cost`.
        """
        with self._choice_lock:  # several ranks may come or be replaced at once
            within_hourly_limit(self._spec, self._rented_beside(rank), [offer])
            self._rented[rank] = offer

    def _rented_beside(self, rank: int) -> list[Offer]:
        """Return the offers of the machines of all other ranks; a vacant one keeps its offer."""
        return [self._rented.get(other, offer) for other, offer in [*self.offers.items()] if other != rank]

    def _rent_chosen(self, rank: int) -> Instance:
        refusals: list[SkywardError] = []
        for offer in self._choices[rank]:
            try:
                self._count(offer, rank)
                (instance,) = self._rental.launch(offer, 1, rank, least_seconds=ENOUGH_SECONDS)
            except (NoCapacity, BudgetExceeded) as error:  # the next offer may be cheaper
                refusals.append(error)
            else:
                with self._choice_lock:
                    self.offers[rank] = offer
                    del self._choices[rank]
                return instance
        raise refusals[0] if refusals else PoolClosed("the pool is left as it is")

    def try_no_other(self, rank: int) -> None:
        """Stop requesting the offers that were chosen for a rank; a request that was made goes on."""
        with self._choice_lock:
            self._choices.get(rank, []).clear()

    def _may_stand_for(self, other: Offer, own: Offer) -> bool:
        """Return whether an offer may replace another one.

        With a share of spot machines (`Percent`) a spot machine replaces only spot ones.
        """
        return other.is_spot == own.is_spot or not isinstance(self._spec.spot, spot.Percent)

    def _find_offers(self, ranks: Sequence[int]) -> None:
        """Ask the provider for the offers of ranks that another process has rented: of the same kind, or the cheapest
        in the same region.

        Raises NoCapacity if there is none.
        """
        if all(rank in self.offers for rank in ranks) or not self.adopted:
            return
        # their own prices are the measure, and not those of the machines that are sold now
        spec = self._rental.spec.with_(max_price_ratio=MOST_RATIO)
        question = Question(0, spec, (self._rental.provider,))
        found, refusals, errors = self._candidates([question], Excluded())
        regions = {instance.region for instance in self.adopted.values()}
        near_all = [offer for region in sorted(regions) for offer in _near(found, region)]
        self.others = comparable(self._spec, self.adopted.values(), near_all)
        first = self.adopted[min(self.adopted)]
        for rank in ranks:
            own = self.adopted.get(rank, first)
            near = _near(found, own.region)
            if not near:
                raise none_left([question.spec.requirements], self._spec.least_nodes, refusals, errors)
            same = [one for one in near if (one.instance_type, one.is_spot) == (own.instance_type, own.is_spot)]
            self.offers.setdefault(rank, (same or near)[0])

    def rent_again(self, ranks: Sequence[int], terminations: Mapping[int, Termination]) -> list[Instance]:
        """Rent machines for these ranks, or some of them, the lowest first; at least one."""
        instances: list[Instance] = []
        self._find_offers(ranks)
        for first, count in _runs(ranks, self.offers):
            try:
                instances += self._rental.launch_up_to(self.offers[first], count, first)
            except (NoCapacity, BudgetExceeded):
                break
        return sorted(instances, key=lambda instance: instance.rank) or [
            self.rent_one(ranks[0], terminations.get(ranks[0]))
        ]


class Excluded:
    """Providers that an opening does not try again, because their other offers would be refused for the same reason:
    the request, a setting or the credentials are wrong, or the account has no money for the cheapest.

    A provider that only lacks the right to rent spot machines is tried with on-demand ones. A wrong request for one
    alternative may be right for another one; credentials are refused for all.
    """

    def __init__(self) -> None:
        self._errors: list[tuple[Provider, int | None, SkywardError]] = []
        """The errors, each with the place of its alternative; None: of all."""
        self._without_spot: list[Provider] = []

    def note(self, provider: Provider, error: SkywardError, place: int) -> None:
        """Exclude the provider, or its spot machines, if the error concerns its other offers too."""
        if isinstance(error, CredentialsError) and error.is_about_spot:
            self._without_spot.append(provider)
        elif isinstance(error, BadRequest | CredentialsError) or (
            isinstance(error, QuotaExceeded) and error.is_about_money
        ):
            self._errors.append((provider, None if isinstance(error, CredentialsError) else place, error))

    def error_of(self, provider: Provider, place: int) -> SkywardError | None:
        """Return why a provider is excluded for an alternative; None if it is not."""
        return next((error for one, its, error in self._errors if one is provider and its in (None, place)), None)

    def without(self, question: Question) -> Question:
        """Return the question to the providers that are not excluded."""
        left = [provider for provider in question.providers if self.error_of(provider, question.place) is None]
        return replace(question, providers=tuple(left))

    def left(self, asked: Sequence[Question]) -> list[Question]:
        """Return the questions for which a provider is left."""
        return [one for one in map(self.without, asked) if one.providers]

    def has(self, candidate: Candidate) -> bool:
        """Return whether a candidate is excluded."""
        is_spot = any(part.offer.is_spot for part in candidate.parts)
        is_without = is_spot and any(one is candidate.provider for one in self._without_spot)
        return is_without or self.error_of(candidate.provider, candidate.place) is not None

    def answers(self, question: Question) -> list[ProviderOffers]:
        """Return the error of each excluded provider, as its answer to a question that is not asked again."""
        errors = [(provider, self.error_of(provider, question.place)) for provider in question.providers]
        return [ProviderOffers(provider, error=error) for provider, error in errors if error is not None]


def _near(found: Sequence[Candidate], region: str) -> list[Offer]:
    """Return the offers of candidates in this region, the cheapest candidate first."""
    return [part.offer for candidate in found if candidate.region == region for part in candidate.parts]


def _runs(ranks: Sequence[int], offers: Mapping[int, Offer]) -> list[tuple[int, int]]:
    """Split ascending ranks into runs of one kind of machine without a gap: the first rank and the number of each."""
    runs: list[tuple[int, int]] = []
    for rank in ranks:
        first, count = runs[-1] if runs else (rank, 0)
        if runs and rank == first + count and offers[rank] == offers[first]:
            runs[-1] = (first, count + 1)
        else:
            runs.append((rank, 1))
    return runs


def warn(spec: PoolSpec, providers: Sequence[Provider]) -> None:
    """Log what may fail only after machines have been paid for."""
    if (
        spec.first_accelerator is not None
        and needs_reset(spec.first_accelerator)
        and any(provider.end_command for provider in providers)
    ):
        _log.warning("%s: %s", spec.first_accelerator, RESET_MAY_BE_REFUSED)


def _warn_of_no_end(candidate: Candidate) -> None:
    """Both guarantees of `docs/nothing-left-running.md` need a machine that ends for good by itself."""
    provider = candidate.provider
    cure = f"{provider.ends_for_good_with}, or run" if provider.ends_for_good_with else "run"
    _log.warning(
        "a machine of %s that ends itself may be billed until somebody deletes it: without this computer and its"
        " reaper, max_cost and leases stop the work, and not the bill of %s a day. For an end of the bill too, %s"
        " `skyward sweep --yes` every few minutes on another computer",
        provider.name,
        usd(candidate.price_per_hour * HOURS_PER_DAY),
        cure,
    )


def _refused(one: Refusal) -> CandidateRefused:
    return CandidateRefused(**asdict(one))
