"""What one session writes into the ledger: requests, their results, the seconds by bucket, and the evidence of the end.

Before a creating call, errors of the ledger are raised, because every request must be recorded first. After it, and
above all during the teardown, errors are kept, and `close` raises them when the machines are gone: a full disk must not
keep a machine running. The history of attempts is not money. Errors while it is written are only logged.
"""

from __future__ import annotations

import contextlib
import logging
import threading
from collections import deque
from collections.abc import Callable, Generator, Iterable, Sequence
from dataclasses import replace
from datetime import UTC, datetime, timedelta
from decimal import Decimal
from typing import TYPE_CHECKING

from skyward_core.errors import ZERO_USD, LeaseLost, LedgerConflict, LedgerError, Refusal, SkywardError
from skyward_core.events.events import InstanceStopping, SkywardEvent
from skyward_core.ledger.budgets import Commitment
from skyward_core.ledger.metering import Meter, metered_of
from skyward_core.ledger.rows import Attempt, Bucket, Intent, Price, Rented, ResourceKind, ResourceRequest
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

NOTES, RENEWALS = "the seconds by bucket", "the pool's lease"


def price_of(offer: Offer | Instance, provider: Provider) -> Price:
    """Return the price of a machine with all extras, and with the provider's billing rules."""
    on_demand = offer.on_demand_price_per_hour
    extras = _usd_of(offer.extras_per_hour)
    return Price(
        Decimal(repr(offer.price_per_hour)) + extras,
        None if on_demand is None else Decimal(repr(on_demand)) + extras,
        offer.is_spot,
        provider.billing_increment_seconds,
        provider.billing_minimum_seconds,
        Decimal(repr(provider.billing_minimum_usd)) if offer.price_per_hour else ZERO_USD,
        offer.extras_per_hour,
    )


def requested_by(instance: Instance, intents: Iterable[Intent]) -> Intent | None:
    """Return an intent of the launch and the rank in a machine's tags; None if these intents requested no such machine.

    Tags prove nothing: every member of the cloud account can copy those of a pool. So a machine without such an intent
    is not billed, and one with it has the intent's price, not one from the listing.
    """
    named = instance.tags.get(LAUNCH_TAG), str(instance.rank)
    same = (one for one in intents if (one.tags.get(LAUNCH_TAG), one.tags.get(RANK_TAG)) == named)
    return None if named[0] is None else next(same, None)


def not_billed(pool_id: str, instance: Instance) -> str:
    """Return the warning about a machine that a listing shows and no intent requested."""
    return (
        f"{instance.id} has the tags of pool {pool_id}, and no request in the ledger names it: it is ended with the"
        " pool, and not billed to it"
    )


def request_for_found(
    instance: Instance, provider: Provider, pool_id: str, expires_at: datetime, price: Price
) -> ResourceRequest:
    """Return the request for one more machine of a launch: a creating call that was repeated can create two."""
    return ResourceRequest(
        kind=ResourceKind.INSTANCE,
        provider=provider.name,
        region=instance.region,
        name=f"{pool_id}-{instance.rank}",
        token=f"{pool_id}-found-{instance.id}",
        tags=dict(instance.tags),
        expires_at=expires_at,
        price=price,
    )


def _usd_of(extras: Iterable[Extra]) -> Decimal:
    return sum((Decimal(repr(extra.usd_per_hour)) for extra in extras), ZERO_USD)


class Launch:
    """One recorded creating call: the tags of its machines, and the numbers of its intents by rank."""

    def __init__(
        self, tags: dict[str, str], intents: Sequence[Intent], first_rank: int, requested_at: float, price: Price
    ) -> None:
        self.tags = tags
        self.price = price
        self.requested_at = requested_at
        """On the meter's clock."""
        self.by_rank = {first_rank + index: intent.id for index, intent in enumerate(intents)}

    def answered_by(self, instance: Instance) -> int | None:
        """Return the number of the intent of a machine; None if another call has created it.

        Without a launch tag its rank decides.
        """
        is_of_this_launch = instance.tags.get(LAUNCH_TAG, self.tags[LAUNCH_TAG]) == self.tags[LAUNCH_TAG]
        return self.by_rank.get(instance.rank) if is_of_this_launch else None


def _launch_of(intent: Intent, requested_at: float) -> Launch:
    """Return the creating call of an earlier steward, as far as this entry has it."""
    return Launch(dict(intent.tags), [intent], int(intent.tags[RANK_TAG]), requested_at, intent.price)


class Journal:
    """The ledger's entries of one session. Safe to use from several threads. Call `open` first and `close` last.

    It also receives the confirmed ends of a teardown (`teardown.MachineRecord`).
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
        epoch: int | None = None,
        run_limit_usd: Decimal | None = None,
    ) -> None:
        self._ledger = ledger
        self._run_limit_usd = run_limit_usd
        self._epoch = epoch
        """With a name: the number of this steward. The ledger refuses requests of an earlier one."""
        self._prefix = pool_id
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
        """The creating calls of intents without an id, by the number of the intent."""
        self._requested: dict[tuple[str, int], Launch] = {}
        """All creating calls, by the launch and the rank in the tags of their machines."""
        self._strange: set[str] = set()
        """The machines of listings that no intent names."""
        self._launches = 0
        self._trouble: dict[str, LedgerError] = {}
        self._unwritten = deque[tuple[str, Callable[[], object]]]()
        """Writes that are still to be made, in their order. Without its id a machine that outlives this process is not
        billed to its end.
        """
        self._in_order = threading.RLock()
        """Held while they are made: two threads must not change their order."""

    # ── before the request ───────────────────────────────────────────────────────────────────────────────────────────

    def open(self) -> None:
        """Record the pool. Raises LedgerError; then nothing must be requested."""
        self._ledger.open_pool(
            self._pool_id,
            owner=self._owner,
            provider=self._provider.to_json(),
            spec_json=self._spec.model_dump_json(exclude_unset=True),
            lease_expires_at=self._now() + timedelta(seconds=self._spec.lease_seconds),
            account=self._spec.budget,
            work=self.work,
            name=self._spec.name or "",
            run_limit_usd=self._run_limit_usd,
        )

    def adopt(self, intents: Iterable[Intent], provider_account: str, slots: int) -> None:
        """Go on with the entries of an earlier steward, and count their machines, `slots` calls at once on each.

        The tokens of later requests contain the epoch, so that they are new.
        """
        self._provider_account = provider_account
        self._prefix = f"{self._pool_id}-e{self._epoch}"
        at, now = self._meter.now(), self._now()
        for intent in intents:
            if intent.cloud_id is not None:
                self._meter.adopt(metered_of(intent, now, at, slots))
            if intent.kind is not ResourceKind.INSTANCE:
                continue
            launch = _launch_of(intent, at - (now - intent.intended_at).total_seconds())
            with self._lock:
                self._note_requested(launch)
                if intent.gone_at is None and intent.cloud_id is not None:
                    self._numbers[intent.cloud_id] = intent.id
                elif intent.gone_at is None:
                    self._unbound[intent.id] = launch

    def turn_to(self, provider: Provider, account: str) -> None:
        """Record the provider and account of all later requests. Raises LedgerError, LeaseLost.

        All machines at an earlier provider must be known to be gone.
        """
        if (provider, account) != (self._provider, self._provider_account):
            self._ledger.turn_to(self._pool_id, provider.to_json(), account)
        self._provider, self._provider_account = provider, account

    def recent_attempts(self, seconds: float) -> list[Attempt]:
        """Return the attempts of all pools in the last so many seconds; none if the ledger cannot be read."""
        try:
            return self._ledger.attempts(since=self._now() - timedelta(seconds=seconds))
        except LedgerError:
            return []

    def note_attempt(self, offer: Offer, seconds: float, error: SkywardError | None = None) -> None:
        """Record the result of an attempt to rent machines."""
        attempt = Attempt(
            self._pool_id, self._now(), offer.provider, offer.region, offer.instance_type, offer.is_spot, seconds
        )
        if error is not None:
            attempt = replace(attempt, error=type(error).__name__, code=error.code, message=str(error))
        self._write_attempt(attempt)

    def note_refusal(self, refusal: Refusal) -> None:
        """Record that a provider could not be queried, or has no offer that fits."""
        self._write_attempt(
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

    def _write_attempt(self, attempt: Attempt) -> None:
        """Record an attempt; an error of the ledger is only logged.

        A lost attempt is missing in `skyward why` and in the choice of offers. It must not end a pool or hide an error.
        """
        try:
            self._ledger.note_attempts([attempt])
        except LedgerError as error:
            _log.warning(
                "the ledger could not record an attempt to rent machines; `skyward why` will lack it: %s", error
            )

    def intend(self, offer: Offer, count: int, first_rank: int, commitment: Commitment) -> Launch:
        """Record machines that are about to be requested in one call.

        Raises LedgerError, and LeaseLost if the pool was condemned.
        """
        with self._lock:
            self._launches += 1
            token = f"{self._prefix}-{self._launches}"
        now = self._now()
        latest = commitment.hard_end if commitment.latest_end is None else commitment.latest_end
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
        requests = [
            ResourceRequest(
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
        intents = self._ledger.intend_all(self._pool_id, requests, epoch=self._epoch)
        launch = Launch(tags, intents, first_rank, self._meter.now(), price)
        with self._lock:
            self._note_requested(launch)
            self._unbound |= dict.fromkeys(launch.by_rank.values(), launch)
        return launch

    # ── after the request ────────────────────────────────────────────────────────────────────────────────────────────

    def bind(self, launch: Launch, instances: Sequence[Instance]) -> None:
        """Record the ids of the launched machines.

        Intents without a machine are closed. If the answer has more machines, each gets an entry at the same price.
        """
        ids = {
            number: instance.id for instance in instances if (number := launch.by_rank.get(instance.rank)) is not None
        }
        with self._lock:
            self._numbers |= {instance_id: number for number, instance_id in ids.items()}
            for number in ids:
                self._unbound.pop(number, None)
        for instance in instances:
            self._meter.start(instance, launch.requested_at, self._price_as_rented(instance, launch))
        as_rented = {
            number: Rented(self._price_as_rented(instance, launch).per_hour, {TYPE_TAG: instance.instance_type})
            for instance in instances
            if self._provider.tells_what_is_paid and (number := launch.by_rank.get(instance.rank)) is not None
        }
        self._write("the ids of launched machines", lambda: self._ledger.bind_all(ids, as_rented))
        self._never_were(launch.by_rank.values() - ids.keys(), "fewer machines came than were requested")
        bound = set(ids.values())
        for instance in instances:
            if instance.id not in bound:
                self._adopt(instance, launch)

    def _price_as_rented(self, instance: Instance, launch: Launch) -> Price:
        """Return the price of a machine: that of its intent, or a lower one that the provider reports."""
        if not (self._provider.tells_what_is_paid and instance.price_per_hour):
            return launch.price
        paid = Decimal(repr(instance.price_per_hour)) + _usd_of(launch.price.extras)
        return replace(launch.price, per_hour=min(paid, launch.price.per_hour))

    def refused(self, launch: Launch, why: str) -> None:
        """The provider has refused the whole launch: nothing was created."""
        self._never_were(launch.by_rank.values(), f"{self._provider.name} had none: {why}")

    def _never_were(self, numbers: Iterable[int], evidence: str) -> None:
        gone = sorted(numbers)
        with self._lock:
            for number in gone:
                self._unbound.pop(number, None)
        if gone:
            self._write("machines that were never created", lambda: self._ledger.close_all(gone, evidence))

    def found(self, instances: Iterable[Instance]) -> None:
        """Record machines of the pool from a listing: the answer to their launch was lost.

        Those that no intent names are not billed (`requested_by`). The teardown ends them, as all that is listed.
        """
        with self._lock:
            new = [instance for instance in instances if instance.id not in self._numbers]
        answers = [(instance, launch) for instance in new if (launch := self._counted(instance)) is not None]
        for instance, launch in answers:
            self._adopt(instance, launch)

    def _counted(self, instance: Instance) -> Launch | None:
        """Return the launch that has created a listed machine, and count the machine; None if no intent names it."""
        with self._lock:
            first = next(
                (launch for number, launch in self._unbound.items() if launch.answered_by(instance) == number), None
            )
            launch = first or self._requested.get((instance.tags.get(LAUNCH_TAG, ""), instance.rank))
            is_new_stranger = launch is None and instance.id not in self._strange
            self._strange |= {instance.id} if launch is None else set()
        if is_new_stranger:
            _log.warning("%s", not_billed(self._pool_id, instance))
        if launch is not None:
            self._meter.start(instance, self._meter.now() if first is None else launch.requested_at, launch.price)
        return launch

    def _note_requested(self, launch: Launch) -> None:
        self._requested |= {(launch.tags[LAUNCH_TAG], rank): launch for rank in launch.by_rank}

    def _adopt(self, instance: Instance, launch: Launch) -> None:
        number = self._taken(launch, instance)
        self._write("machines that were found", lambda: self._enter(number, instance, launch))

    def _enter(self, number: int | None, instance: Instance, launch: Launch) -> None:
        """Record a machine, as that of an intent or in an entry of its own."""
        if number is not None:
            with contextlib.suppress(LedgerConflict):  # a sweep has bound another machine before
                self._ledger.bind(number, instance.id)
                return
        request = request_for_found(instance, self._provider, self._pool_id, self._now(), launch.price)
        adopted = self._ledger.adopt(self._pool_id, request, instance.id)
        with self._lock:
            self._numbers[instance.id] = adopted.id

    def _taken(self, launch: Launch, instance: Instance) -> int | None:
        """Return the intent of a machine, which is bound from now on; None if another machine has it."""
        number = launch.answered_by(instance)
        with self._lock:
            if number is None or self._unbound.pop(number, None) is None:
                return None
            self._numbers[instance.id] = number
            return number

    # ── confirmation of the teardown ──────────────────────────────────────────────────────────────────────────────────

    def rented(self) -> set[str]:
        """Return the ids of the machines that are not known to be gone."""
        return self._meter.rented()

    def ending(self, instance_ids: Iterable[str]) -> None:
        """The termination of these will be requested now."""
        for instance_id in instance_ids:
            self._meter.enter(instance_id, Bucket.TERMINATING)
            self._emit(InstanceStopping(instance_id))

    def end_requested(self, instance_ids: Iterable[str]) -> None:
        """The termination of these was requested."""
        with self._kept("requested terminations"):
            self._ledger.ask_end_all(self._numbers_of(instance_ids))

    def seen_gone(self, instance_ids: Iterable[str]) -> None:
        """These are gone: they cost nothing from now on."""
        for instance_id in instance_ids:
            self._meter.end(instance_id)

    def gone(self, instance_ids: Iterable[str], evidence: str) -> None:
        """These are gone, with the evidence."""
        ids = list(instance_ids)
        self.seen_gone(ids)
        self.note()
        numbers = self._numbers_of(ids)
        self._write("machines that are gone", lambda: self._ledger.close_all(numbers, evidence))

    def _numbers_of(self, instance_ids: Iterable[str]) -> list[int]:
        with self._lock:
            return [self._numbers[instance_id] for instance_id in instance_ids if instance_id in self._numbers]

    # ── periodic ─────────────────────────────────────────────────────────────────────────────────────────────────────

    def note(self) -> None:
        """Record the seconds by bucket so far, and what the ledger has refused before."""
        self._write_all()
        buckets = self._meter.buckets()
        with self._lock:
            seconds = {
                self._numbers[instance_id]: its_seconds
                for instance_id, its_seconds in buckets.items()
                if instance_id in self._numbers
            }
        if seconds:
            with self._kept(NOTES):
                self._ledger.note_all(seconds)

    def renew(self) -> None:
        """Renew the pool's lease. Raises LeaseLost if it was condemned.

        Other errors of the ledger are kept, because the machines do not need it.
        """
        with self._kept(RENEWALS):
            self._ledger.renew(self._pool_id, self._now() + timedelta(seconds=self._spec.lease_seconds))

    def live_by_lease(self, seconds: float) -> None:
        """Let the pool outlive this process, for so many seconds from now.

        Raises LedgerError, and LeaseLost if it was condemned.
        """
        self._write_all()
        if self._unwritten:
            raise self._trouble[self._unwritten[0][0]]
        self._ledger.live_by_lease(self._pool_id, self._now() + timedelta(seconds=seconds))

    # ── the end ──────────────────────────────────────────────────────────────────────────────────────────────────────

    def nothing_is_left(self) -> None:
        """The provider lists no machine of the pool any more: close the intents that never got an id."""
        with self._lock:
            unbound = sorted(self._unbound)
        self._never_were(unbound, f"{self._provider.name} lists nothing of the pool")

    def close(self) -> None:
        """Record the end of the pool, and raise the kept errors of the ledger. The machines are gone before.

        After an error it may be called again.
        """
        self._write_all()
        with self._kept("the end"):
            self._settle()  # before the end: after a crash in between, a sweep still handles the pool
            self._ledger.end_pool(self._pool_id)
            self._settle()  # a reservation may have come in between; from now on none can come
        trouble, self._trouble = self._trouble, {}
        if trouble:
            *others, last = trouble.values()
            for other in others:
                last.add_note(str(other))
            raise last

    def _settle(self) -> None:
        if self._spec.budget is not None or self._run_limit_usd is not None:
            self._ledger.settle_pool(self._pool_id, self._ledger.pool_cost_usd(self._pool_id))

    def _write(self, what: str, write: Callable[[], object]) -> None:
        """Make a write that may be made twice, after those that the ledger has refused before. If it is refused, its
        error is kept, and it is made again with the next note.
        """
        with self._in_order:
            self._unwritten.append((what, write))
            if len(self._unwritten) == 1:  # else the ledger was out of reach: an attempt may take half a minute
                self._write_all()

    def _write_all(self) -> None:
        """Make the writes that are left, in their order, until the ledger refuses one: an id that is written after the
        end of its machine would open the entry again.
        """
        with self._in_order:
            while self._unwritten:
                what, write = self._unwritten[0]
                self._trouble.pop(what, None)
                try:
                    write()
                except LeaseLost:
                    self._unwritten.popleft()
                    raise
                except LedgerError as error:
                    self._keep(what, error)
                    if not isinstance(error, LedgerConflict):
                        return
                self._unwritten.popleft()

    @contextlib.contextmanager
    def _kept(self, what: str) -> Generator[None]:
        """Keep an error of the ledger for `close`; raise LeaseLost at once.

        The error of a periodic write is dropped when a later write succeeds.
        """
        try:
            yield
        except LeaseLost:
            raise
        except LedgerError as error:
            self._keep(what, error)
        else:
            if what in (NOTES, RENEWALS):
                self._trouble.pop(what, None)

    def _keep(self, what: str, error: LedgerError) -> None:
        error.add_note(
            f"not recorded: {what}; the machines themselves are handled nevertheless, and `skyward sweep` completes"
            " the ledger"
        )
        self._trouble[what] = error
