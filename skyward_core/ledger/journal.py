"""What one opening of a pool writes into the ledger: what it asks for, what came of it, what each second went to, and
the evidence of its end.

Before a creating call an error of the ledger is raised: nothing is asked for that is not written down. After it, and
above all while machines are given back, errors are kept, and raised by `close` when the machines are gone: a full disk
must not keep a machine running. The history of tries is not money: what the ledger does not take of it is told in the
log, and that is all.
"""

from __future__ import annotations

import contextlib
import logging
import threading
from collections.abc import Callable, Generator, Iterable, Sequence
from dataclasses import replace
from datetime import UTC, datetime, timedelta
from decimal import Decimal
from typing import TYPE_CHECKING

from skyward_core.errors import ZERO_USD, LeaseLost, LedgerConflict, LedgerError, Refusal, SkywardError
from skyward_core.events.events import InstanceStopping, SkywardEvent
from skyward_core.ledger.budgets import Grant
from skyward_core.ledger.metering import Meter
from skyward_core.ledger.rows import Attempt, Bucket, Intent, Price, Rented, ResourceKind, Wish
from skyward_core.machines.instances import Instance
from skyward_core.machines.offers import Extra, Offer
from skyward_core.machines.owner import Owner
from skyward_core.providers.base import (
    CREATED_TAG,
    EXPIRES_TAG,
    IMAGE_TAG,
    LAUNCH_TAG,
    OWNER_TAG,
    POOL_TAG,
    PROCESS_TAG,
    RANK_TAG,
    TYPE_TAG,
    Provider,
)
from skyward_core.providers.tagging import work_tags
from skyward_core.spec import PoolSpec
from skyward_core.work import NO_WORK, Work

if TYPE_CHECKING:
    from skyward_core.ledger.ledger import Ledger

_log = logging.getLogger("skyward")

NOTES, RENEWALS = "what the seconds went to", "the pool's lease"


def price_of(offer: Offer | Instance, provider: Provider) -> Price:
    """Return what a machine costs with all that is billed beside it, as the provider counts."""
    on_demand = offer.on_demand_price_per_hour
    beside = _usd_of(offer.extras_per_hour)
    return Price(
        Decimal(repr(offer.price_per_hour)) + beside,
        None if on_demand is None else Decimal(repr(on_demand)) + beside,
        offer.is_spot,
        provider.billing_increment_seconds,
        provider.billing_minimum_seconds,
        Decimal(repr(provider.billing_minimum_usd)) if offer.price_per_hour else ZERO_USD,
        offer.extras_per_hour,
    )


def wish_for_found(instance: Instance, provider: Provider, pool_id: str, expires_at: datetime) -> Wish:
    """Return the entry for a machine that a listing shows and the ledger does not have."""
    return Wish(
        kind=ResourceKind.INSTANCE,
        provider=provider.name,
        region=instance.region,
        name=f"{pool_id}-{instance.rank}",
        token=f"{pool_id}-found-{instance.id}",
        tags=dict(instance.tags),
        expires_at=expires_at,
        price=price_of(instance, provider),
    )


def _usd_of(extras: Iterable[Extra]) -> Decimal:
    return sum((Decimal(repr(extra.usd_per_hour)) for extra in extras), ZERO_USD)


class Launch:
    """One creating call that is written down: the tags that it must carry, and the numbers of its intents by rank."""

    def __init__(
        self, tags: dict[str, str], intents: Sequence[Intent], first_rank: int, asked_at: float, price: Price
    ) -> None:
        self.tags = tags
        self.price = price
        self.asked_at = asked_at
        """On the meter's clock."""
        self.by_rank = {first_rank + index: intent.id for index, intent in enumerate(intents)}

    def answered_by(self, instance: Instance) -> int | None:
        """Return the number of the intent that a machine is the answer to; by its rank alone if the provider does not
        tell of which call it came.
        """
        is_of_it = instance.tags.get(LAUNCH_TAG, self.tags[LAUNCH_TAG]) == self.tags[LAUNCH_TAG]
        return self.by_rank.get(instance.rank) if is_of_it else None


class Book:
    """The pool's page of the ledger, and the witness of its giving back (`teardown.Witness`). Safe to use from several
    threads.

    `open` first, `close` last.
    """

    def __init__(
        self,
        ledger: Ledger,
        pool_id: str,
        spec: PoolSpec,
        provider: Provider,
        meter: Meter,
        emit: Callable[[SkywardEvent], object],
        now: Callable[[], datetime] = lambda: datetime.now(UTC),
        work: Work = NO_WORK,
    ) -> None:
        self._ledger = ledger
        self._pool_id = pool_id
        self._spec = spec
        self._provider = provider
        self._provider_account = ""
        self._meter = meter
        self._emit = emit
        self._now = now
        self._owner = Owner.here()
        self.work = work
        self._lock = threading.Lock()
        self._numbers: dict[str, int] = {}
        self._unbound: dict[int, Launch] = {}
        """The calls that have asked for what has no id yet, by the number of the intent."""
        self._launches = 0
        self._trouble: dict[str, LedgerError] = {}

    # ── before anything is asked for ─────────────────────────────────────────────────────────────────────────────────

    def open(self) -> None:
        """Write down the pool. Raises LedgerError; then nothing must be asked for."""
        self._ledger.open_pool(
            self._pool_id,
            owner=self._owner,
            provider=self._provider.to_json(),
            spec_json=self._spec.model_dump_json(exclude_unset=True),
            lease_expires_at=self._now() + timedelta(seconds=self._spec.lease_seconds),
            account=self._spec.budget,
            work=self.work,
        )

    def turn_to(self, provider: Provider, account: str) -> None:
        """From now on this one is asked, for this account; what another was asked for is known to be gone.

        Raises LedgerError, LeaseLost.
        """
        if (provider, account) != (self._provider, self._provider_account):
            self._ledger.turn_to(self._pool_id, provider.to_json(), account)
        self._provider, self._provider_account = provider, account

    def recent_attempts(self, seconds: float) -> list[Attempt]:
        """Return what became of everybody's tries to rent machines in the last so many seconds; nothing if the ledger
        does not tell.
        """
        try:
            return self._ledger.attempts(since=self._now() - timedelta(seconds=seconds))
        except LedgerError:
            return []

    def tried(self, offer: Offer, seconds: float, error: SkywardError | None = None) -> None:
        """Write down what became of a try to rent machines."""
        attempt = Attempt(
            self._pool_id, self._now(), offer.provider, offer.region, offer.instance_type, offer.is_spot, seconds
        )
        if error is not None:
            attempt = replace(attempt, error=type(error).__name__, code=error.code, message=str(error))
        self._note_attempt(attempt)

    def was_refused(self, refusal: Refusal) -> None:
        """Write down that a provider as a whole could not be asked, or sells nothing that fits."""
        self._note_attempt(
            Attempt(
                self._pool_id,
                self._now(),
                refusal.provider,
                "",
                "",
                is_spot=False,
                seconds=refusal.seconds,
                error=refusal.error,
                code=refusal.code,
                message=refusal.message,
            )
        )

    def _note_attempt(self, attempt: Attempt) -> None:
        """Write down a try.

        What cannot be written is lost for `skyward why` and for who rests, and for nothing else: it ends no pool and
        hides no error.
        """
        try:
            self._ledger.note_attempts([attempt])
        except LedgerError as error:
            _log.warning(
                "the ledger does not take what became of a try to rent machines; `skyward why` will lack it: %s", error
            )

    def intend(self, offer: Offer, count: int, first_rank: int, grant: Grant) -> Launch:
        """Write down machines that are about to be asked for in one call.

        Raises LedgerError, and LeaseLost if the pool was judged dead.
        """
        with self._lock:
            self._launches += 1
            token = f"{self._pool_id}-{self._launches}"
        now = self._now()
        latest = grant.hard_end if grant.latest_end is None else grant.latest_end
        limit = None if latest is None else now + timedelta(seconds=latest - self._meter.now())
        if self._spec.max_lifetime is not None:
            end = now + timedelta(seconds=self._spec.max_lifetime + self._spec.provision_timeout)
            limit = end if limit is None else min(limit, end)
        tags = {
            POOL_TAG: self._pool_id,
            RANK_TAG: str(first_rank),
            LAUNCH_TAG: token,
            OWNER_TAG: self._owner.name,
            PROCESS_TAG: self._owner.process,
            CREATED_TAG: str(int(now.timestamp())),
            TYPE_TAG: offer.instance_type,
            **work_tags(self.work),
        }
        if self._spec.image.cache and self._provider.keeps_images:
            tags[IMAGE_TAG] = self._spec.image.content_hash()
        if limit is not None:
            tags[EXPIRES_TAG] = str(int(limit.timestamp()) + 1)
        price = price_of(offer, self._provider)
        wishes = [
            Wish(
                kind=ResourceKind.INSTANCE,
                provider=self._provider.name,
                region=offer.region,
                name=f"{self._pool_id}-{rank}",
                token=f"{token}-{rank}",
                tags=tags | {RANK_TAG: str(rank)},
                expires_at=limit or now + timedelta(seconds=self._spec.lease_seconds),
                price=price,
            )
            for rank in range(first_rank, first_rank + count)
        ]
        launch = Launch(tags, self._ledger.intend_all(self._pool_id, wishes), first_rank, self._meter.now(), price)
        with self._lock:
            self._unbound |= dict.fromkeys(launch.by_rank.values(), launch)
        return launch

    # ── what came of it ──────────────────────────────────────────────────────────────────────────────────────────────

    def bind(self, launch: Launch, instances: Sequence[Instance]) -> None:
        """Write down the ids of what was launched; what fewer came than were asked for, never was, and what came
        unasked is there all the same.
        """
        ids = {
            number: instance.id for instance in instances if (number := launch.by_rank.get(instance.rank)) is not None
        }
        with self._lock:
            self._numbers |= {instance_id: number for number, instance_id in ids.items()}
            for number in ids:
                self._unbound.pop(number, None)
        for instance in instances:
            self._meter.start(instance, launch.asked_at, self._price_as_rented(instance, launch))
        as_rented = {
            number: Rented(self._price_as_rented(instance, launch).per_hour, {TYPE_TAG: instance.instance_type})
            for instance in instances
            if self._provider.tells_what_is_paid and (number := launch.by_rank.get(instance.rank)) is not None
        }
        with self._kept("the ids of what was launched"):
            self._ledger.bind_all(ids, as_rented)
        self._never_were(launch.by_rank.values() - ids.keys(), "fewer came than were asked for")
        self.found(instances)

    def _price_as_rented(self, instance: Instance, launch: Launch) -> Price:
        """What a machine costs: never more than what was set aside for it, and less if the provider says so."""
        told = Decimal(repr(instance.price_per_hour)) + _usd_of(launch.price.extras)
        is_told = self._provider.tells_what_is_paid and instance.price_per_hour
        return replace(launch.price, per_hour=min(told, launch.price.per_hour)) if is_told else launch.price

    def refused(self, launch: Launch, why: str) -> None:
        """The provider had none of it, and says so: nothing was created."""
        self._never_were(launch.by_rank.values(), f"{self._provider.name} had none: {why}")

    def _never_were(self, numbers: Iterable[int], evidence: str) -> None:
        gone = sorted(numbers)
        with self._lock:
            for number in gone:
                self._unbound.pop(number, None)
        if gone:
            with self._kept("what never was"):
                self._ledger.close_all(gone, evidence)

    def found(self, instances: Iterable[Instance]) -> None:
        """Write down machines of the pool that only a listing tells of: the answer to their launch was lost."""
        with self._lock:
            new = [instance for instance in instances if instance.id not in self._numbers]
        answers = [(instance, self._answered_by(instance)) for instance in new]
        for instance, launch in answers:
            asked_at = self._meter.now() if launch is None else launch.asked_at
            self._meter.start(
                instance, asked_at, price_of(instance, self._provider) if launch is None else launch.price
            )
        # its first error ends this: each may have taken half a minute, and the machines are still to be ended
        with self._kept("what was found"):
            for instance, launch in answers:
                self._adopt(instance, launch)

    def _answered_by(self, instance: Instance) -> Launch | None:
        """The launch that a machine is the answer to, as long as nothing else was."""
        with self._lock:
            return next(
                (launch for number, launch in self._unbound.items() if launch.answered_by(instance) == number), None
            )

    def _adopt(self, instance: Instance, launch: Launch | None) -> None:
        number = None if launch is None else self._taken(launch, instance)
        if number is not None:
            with contextlib.suppress(LedgerConflict):  # a sweep has seen another one first
                self._ledger.bind(number, instance.id)
                return
        adopted = self._ledger.adopt(
            self._pool_id, wish_for_found(instance, self._provider, self._pool_id, self._now()), instance.id
        )
        with self._lock:
            self._numbers[instance.id] = adopted.id

    def _taken(self, launch: Launch, instance: Instance) -> int | None:
        """Take the number that a machine is the answer to; None if another one has it."""
        number = launch.answered_by(instance)
        with self._lock:
            if number is None or self._unbound.pop(number, None) is None:
                return None
            self._numbers[instance.id] = number
            return number

    # ── the witness ──────────────────────────────────────────────────────────────────────────────────────────────────

    def rented(self) -> set[str]:
        """Return the ids of the machines that are not known to be gone."""
        return self._meter.rented()

    def ending(self, instance_ids: Iterable[str]) -> None:
        """Termination of these will be asked for now."""
        for instance_id in instance_ids:
            self._meter.enter(instance_id, Bucket.TERMINATING)
            self._emit(InstanceStopping(instance_id))

    def asked(self, instance_ids: Iterable[str]) -> None:
        """Termination of these was asked for."""
        with self._kept("what was to end"):
            self._ledger.ask_end_all(self._numbers_of(instance_ids))

    def gone(self, instance_ids: Iterable[str], evidence: str) -> None:
        """These are gone, and this is how it is known."""
        ids = list(instance_ids)
        for instance_id in ids:
            self._meter.end(instance_id)
        self.note()
        with self._kept("what is gone"):
            self._ledger.close_all(self._numbers_of(ids), evidence)

    def _numbers_of(self, instance_ids: Iterable[str]) -> list[int]:
        with self._lock:
            return [self._numbers[instance_id] for instance_id in instance_ids if instance_id in self._numbers]

    # ── while it is open ─────────────────────────────────────────────────────────────────────────────────────────────

    def note(self) -> None:
        """Write down what the seconds went to so far."""
        buckets = self._meter.buckets()
        with self._lock:
            seconds = {
                self._numbers[instance_id]: its for instance_id, its in buckets.items() if instance_id in self._numbers
            }
        if seconds:
            with self._kept(NOTES):
                self._ledger.note_all(seconds)

    def renew(self) -> None:
        """Lengthen the pool's lease.

        Raises LeaseLost if it was judged dead; an outage of the ledger is kept, for the machines do well without it.
        """
        with self._kept(RENEWALS):
            self._ledger.renew(self._pool_id, self._now() + timedelta(seconds=self._spec.lease_seconds))

    def live_by_lease(self, seconds: float) -> None:
        """Let the pool outlive this process, for so many seconds from now.

        Raises LedgerError, and LeaseLost if it was judged dead.
        """
        self._ledger.live_by_lease(self._pool_id, self._now() + timedelta(seconds=seconds))

    # ── the end ──────────────────────────────────────────────────────────────────────────────────────────────────────

    def nothing_is_left(self) -> None:
        """The provider lists nothing of the pool any more: what was asked for and never got an id is not there."""
        with self._lock:
            unbound = sorted(self._unbound)
        self._never_were(unbound, f"{self._provider.name} lists nothing of the pool")

    def close(self) -> None:
        """Write down the end of the pool. Raises what the ledger has refused since it was opened, if it matters still:
        the machines are gone all the same.

        Called again after an error of the ledger it tries again.
        """
        with self._kept("the end"):
            self._settle()  # before the end: killed in between the pool is one that a sweep still looks after
            self._ledger.end_pool(self._pool_id)
            self._settle()  # nothing can be reserved for it any more, but something may have been meanwhile
        trouble, self._trouble = self._trouble, {}
        if trouble:
            *others, last = trouble.values()
            for other in others:
                last.add_note(str(other))
            raise last

    def _settle(self) -> None:
        if self._spec.budget is not None:
            self._ledger.settle_pool(self._pool_id, self._meter.total())

    @contextlib.contextmanager
    def _kept(self, what: str) -> Generator[None]:
        """Keep an error of the ledger for `close`; LeaseLost is told at once.

        What is written anew all the time is mended when it is written again.
        """
        try:
            yield
        except LeaseLost:
            raise
        except LedgerError as error:
            error.add_note(
                f"not written down: {what}; the machines themselves are dealt with all the same, and `skyward sweep`"
                " mends what the ledger missed"
            )
            self._trouble[what] = error
        else:
            if what in (NOTES, RENEWALS):
                self._trouble.pop(what, None)
