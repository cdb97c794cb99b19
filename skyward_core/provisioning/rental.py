"""Starts and ends the rental of single machines: the only code of an open pool that starts or stops spending.

States of a launch, and what is left when the client is killed between two lines:

    committed money -> intended (ledger) -> requested -> bound (ledger), metered
                    nothing is rented    └─ a machine with our tags: found by the ledger's intent, or by its tags

A launch that fails may have created machines. So the money of such a launch stays committed, and `end_all` lists the
machines by tag. It never relies on a list in memory.

`Rental` owns the provider that rents. It knows whether more may be rented (`is_closing`) and whether a machine may be
left (`may_be_left`). It has no lock. Launches and ends of several ranks run at the same time in several threads;
journal, budget and `Terminations` have their own locks.
"""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Callable, Iterable, Sequence
from types import TracebackType

from skyward_core.accelerators import Accelerator
from skyward_core.concurrency import interrupts
from skyward_core.errors import BadRequest, BudgetExceeded, InstancesLeft, NoCapacity, PoolClosed, SkywardError
from skyward_core.events.events import InstanceLaunching, InstanceProvisioned, InstanceStopping, SkywardEvent
from skyward_core.ledger.budgets import Commitment, SpendingLimit
from skyward_core.ledger.journal import Journal, price_of
from skyward_core.ledger.metering import Meter
from skyward_core.machines.instances import Instance
from skyward_core.machines.offers import Offer, total_of
from skyward_core.providers.base import Provider
from skyward_core.provisioning.bootstrap import Preparation, startup_script
from skyward_core.provisioning.candidates import Part
from skyward_core.provisioning.teardown import Termination, Terminations, tear_down
from skyward_core.spec import PoolSpec
from skyward_core.transport.transport import Transports

GUARD_GRACE_SECONDS = 10.0

_log = logging.getLogger("skyward")

type Emit = Callable[[SkywardEvent], object]


class Rental:
    """Launches machines and ends them.

    One provider rents at a time; another one only when the first has no machine of the pool.
    """

    def __init__(
        self,
        spec: PoolSpec,
        provider: Provider,
        pool_id: str,
        *,
        emit: Emit,
        meter: Meter,
        journal: Journal,
        spending_limit: SpendingLimit,
        transports: Transports | None = None,
        may_act: Callable[[], object] = lambda: None,
    ) -> None:
        self.spec = spec
        """With one accelerator, as soon as a candidate is tried (`turn_to`)."""
        self._provider = provider
        self._pool_id = pool_id
        self._emit = emit
        self._meter = meter
        self._journal = journal
        self._spending_limit = spending_limit
        self._may_act = may_act
        """Raises if another process keeps the pool now."""
        self._owns_transports = transports is None
        self.transports = transports or Transports(spec.lease_seconds, emit, spending_limit.paid_seconds)
        self._is_left = False
        self._accelerators: dict[str, Accelerator | None] = {}
        """What the calls on each machine may use."""
        self._lost_at: dict[str, float] = {}
        self._terminations = Terminations(pool_id, journal.gone)
        self.answered_at = 0.0
        """When the last launch was answered or has failed."""
        self._launched_at = 0.0
        self._is_launch_unsure = False
        """Whether the answer to a launch was lost: there may be machines that this process does not know."""
        self._unsure = set[Commitment]()
        """The money of such launches, until a listing that came late enough has no machine of the pool."""
        self._has_requested = False
        """Whether any launch was requested."""
        self.may_be_left = False
        """Whether a machine was requested that is not known to be gone.

        If the teardown was interrupted, another process must finish it.
        """
        self._closing = threading.Event()
        self._is_closing = False

    @property
    def provider(self) -> Provider:
        """The provider that rents the machines."""
        return self._provider

    def turn_to(self, provider: Provider, account: str, spec: PoolSpec) -> None:
        """Rent from this provider from now on, for this alternative of the spec.

        The one before has no machine of the pool.
        """
        self.spec = spec
        self._journal.turn_to(provider, account)
        if provider != self._provider:
            # these values were about the provider before, which has none of our machines
            self._is_launch_unsure = False
            self._launched_at = 0.0
        self._provider = provider

    def accelerator_of(self, instance_id: str) -> Accelerator | None:
        """Return what the calls on a machine may use."""
        return self._accelerators.get(instance_id)

    def living(self) -> set[str]:
        """Return the ids of the pool's machines that the provider lists. Raises what the provider raises."""
        return {instance.id for instance in self._provider.instances(self._pool_id)}

    # ── another process has rented, or goes on ───────────────────────────────────────────────────────────────────────

    def adopt(self, machines: Iterable[Instance], spec: PoolSpec, *, is_launch_unsure: bool) -> None:
        """Go on with machines that another process has rented, for this alternative of the spec.

        `is_launch_unsure` if a launch was not answered.
        """
        self.spec = spec
        self._has_requested = self.may_be_left = True
        self._is_launch_unsure = is_launch_unsure
        self.answered_at = self._launched_at = time.monotonic()
        self._accelerators |= {instance.id: spec.first_accelerator for instance in machines}

    def end_machine(self, instance: Instance) -> None:
        """Terminate a machine of the pool that is no node, and do not wait."""
        self._emit(InstanceStopping(instance.id))
        self._terminations.end_in_thread(instance.id, self._provider, f"skyward-end-{instance.rank}", lambda: None)

    def leave(self) -> None:
        """From now on the other machines of the pool belong to other processes: this process does not end them."""
        self._is_left = True

    def _keep_or_end(self, instances: Sequence[Instance]) -> None:
        """If the pool does not belong to this process any more, terminate machines that have just been launched, and
        raise.
        """
        if self.is_closing and not self._is_left:  # the teardown of the pool may be over already
            self.end_all()
            raise PoolClosed("the pool is closing")
        try:
            if self.is_closing:
                raise PoolClosed("the pool is closing")
            self._may_act()
        except SkywardError:
            for instance in instances:
                self._terminations.end(instance.id, self._provider)
            raise

    # ── launch ───────────────────────────────────────────────────────────────────────────────────────────────────────

    def launch(
        self,
        offer: Offer,
        count: int,
        first_rank: int,
        along: Sequence[Part] = (),
        *,
        least_seconds: float = 0.0,
    ) -> list[Instance]:
        """Rent machines, as `launch_up_to`.

        Raises NoCapacity if fewer came than were requested: the caller terminates them.
        """
        began = time.monotonic()
        instances = self.launch_up_to(offer, count, first_rank, along, least_seconds=least_seconds)
        if len(instances) < count:
            few = NoCapacity(
                f"{self._provider.name} had {len(instances)} of {count} x {offer.instance_type} in {offer.region}; they"
                " were terminated"
            )
            self._journal.note_attempt(offer, time.monotonic() - began, few)
            raise few
        return instances

    def launch_up_to(
        self,
        offer: Offer,
        count: int,
        first_rank: int,
        along: Sequence[Part] = (),
        *,
        least_seconds: float = 0.0,
    ) -> list[Instance]:
        """Rent machines, one at least; the meter counts from their request on. Raises what `Provider.launch` raises,
        BudgetExceeded, PoolClosed.

        `along` are the parts of the same candidate that are requested next: the money must be enough for all of them.
        `max_cost` must last for `least_seconds` with them (`SpendingLimit.commit`).
        """
        self._raise_if_closing()
        self._may_act()
        commitment, accelerator = self._commit(offer, count, along, least_seconds)
        is_refused = is_unsure = False
        try:
            script = startup_script(self.spec, self._provider, commitment.lifetime_seconds)
            self._has_requested = True
            launch = self._journal.intend(offer, count, first_rank, commitment)
        except BaseException:
            self._spending_limit.returned(commitment)
            raise
        self.may_be_left = True
        began = time.monotonic()
        try:
            # after the intent: the ledger refuses that of a pool which somebody else has stopped
            self._emit(InstanceLaunching(count, offer.instance_type, self._provider.name))
            instances = self._provider.launch(offer, count, launch.tags, script)
        except BaseException as error:
            is_refused = isinstance(error, SkywardError) and error.left_nothing
            if is_refused:
                self._journal.refused(launch, str(error))
                self._spending_limit.returned(commitment)
            if isinstance(error, SkywardError):
                self._journal.note_attempt(offer, time.monotonic() - began, error)
            if is_refused:
                raise
            # never reset: the success of another launch proves nothing about this one
            self._is_launch_unsure = is_unsure = True
            # the money stays committed, because machines may live until it is used up
            raise
        finally:
            self.answered_at = time.monotonic()
            if not is_refused:
                self._launched_at = time.monotonic()  # a machine may have been created as late as this
            if is_unsure:  # last: `end_all` must know how late the machines of this launch may appear
                self._unsure.add(commitment)
        self._journal.bind(launch, instances)
        self._spending_limit.launched([instance.id for instance in instances], commitment)
        self._accelerators |= {instance.id: accelerator for instance in instances}
        for instance in instances:
            self._emit(_provisioned(instance, accelerator, self._console_url(instance)))
        self._keep_or_end(instances)
        if len(instances) == count:
            self._journal.note_attempt(offer, time.monotonic() - began)
        return instances

    def _commit(
        self, offer: Offer, count: int, along: Sequence[Part], least_seconds: float
    ) -> tuple[Commitment, Accelerator | None]:
        """Commit money for these machines; return the commitment, and what calls on the machines may use.

        Raises BadRequest, BudgetExceeded.
        """
        began = time.monotonic()
        try:
            accelerator = self.spec.accelerator_on(offer)
            # an error is raised now, before the machine is paid for
            self.spec.neuron_cores_of(accelerator)
            prices = [(part.count, price_of(part.offer, self._provider)) for part in along]
            commitment = self._spending_limit.commit(
                count,
                price_of(offer, self._provider),
                along=prices,
                ending_seconds=self._provider.ending_seconds,
                least_seconds=least_seconds,
                notify=self.transports.send_paid_time,
            )
        except (BadRequest, BudgetExceeded) as error:
            self._journal.note_attempt(offer, time.monotonic() - began, error)
            raise
        return commitment, accelerator

    # ── one machine ends, the pool goes on ───────────────────────────────────────────────────────────────────────────

    def end_in_thread(self, node: Preparation) -> Termination:
        """Terminate a lost machine in a separate thread, because one that does not answer takes long."""
        return self._terminations.end_in_thread(
            node.instance.id, self._provider, f"skyward-end-{node.rank}", lambda: self._note_end(node)
        )

    def end(self, node: Preparation) -> None:
        """Terminate a lost machine. A failed request is repeated; the teardown of the pool is the last one."""
        self._note_end(node)
        self._terminations.end(node.instance.id, self._provider)

    def _note_end(self, node: Preparation) -> None:
        self._lost_at[node.instance.id] = time.monotonic()
        self.transports.forget(node.instance)
        self._emit(InstanceStopping(node.instance.id))

    # ── all machines end ─────────────────────────────────────────────────────────────────────────────────────────────

    @property
    def is_closing(self) -> bool:
        """Whether nothing may be rented any more."""
        return self._is_closing or self._closing.is_set()

    def launch_no_more(self) -> None:
        """Rent nothing from now on. Never waits, so that a signal handler may call it."""
        self._is_closing = True

    def stop(self) -> None:
        """Stop launching, and wake every thread that waits for a machine here."""
        self._closing.set()
        if self._owns_transports:
            self.transports.close()
        self._terminations.stop()

    def go_on_until(self, deadline: float, what: str, pause_seconds: float = 0.05) -> None:
        """Pause.

        Raises PoolClosed after `stop`, and SkywardError with the text `what` after the deadline (time.monotonic).
        """
        if self._closing.wait(pause_seconds):
            raise PoolClosed("the pool is closing")
        if time.monotonic() > deadline:
            raise SkywardError(what)

    def tear_down_or_warn(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        """Tear the pool down after its opening has failed; the exit callback of an ExitStack.

        For machines that cost nothing this only warns, so that the error of the opening is raised. After a second
        interrupt it does nothing: the pool's reaper ends the machines.
        """
        if interrupts.is_again(error):
            return
        try:
            self.tear_down()
        except InstancesLeft as left:
            if not self._provider.may_be_left_to_its_lease():
                raise
            _log.warning("left to their lease: %s", left)

    def tear_down(self) -> None:
        """End all machines of the pool, and make sure. Raises InstancesLeft if some could not be confirmed gone."""
        if not self._has_requested:
            return  # there can be no machine, and the provider may be one that has just refused our credentials
        over = time.monotonic() - self.spec.lease_seconds - GUARD_GRACE_SECONDS
        ended = frozenset(machine for machine, since in self._lost_at.items() if since < over)
        for machine in ended & self._meter.rented():
            _log.warning(
                "%s has not answered for longer than its lease: its guard has ended it there, or its host is off",
                machine,
            )
        self.end_all(ended)

    def end_all(self, presumed_gone: frozenset[str] = frozenset()) -> None:
        """End all machines that the provider lists under the pool's tags.

        Raises InstancesLeft. Money of unsure launches is free after it.
        """
        lag = self._provider.listing_lag_seconds
        # read before the listing: another thread may launch a machine after it
        over = set(self._unsure)
        tear_down(
            self._provider,
            self._pool_id,
            self._journal,
            are_all_known=not self._is_launch_unsure,
            presumed_gone=presumed_gone,
            unsure_until=self._launched_at + lag if lag else 0.0,
        )
        self.may_be_left = False
        self._journal.nothing_is_left()
        for commitment in over:  # their machines were found, ended and metered
            self._spending_limit.returned(commitment)
        self._unsure -= over

    def end_now(self) -> None:
        """Request the end of all machines once and do not wait for it: for a pool without a reaper.

        `tear_down` deals with errors.
        """
        requested = set[str]()
        for known in (self._meter.rented, self.living):  # the known ones first, because a listing may fail
            try:
                if ids := known() - requested:
                    requested |= ids
                    self._provider.terminate(sorted(ids))
            except Exception:
                _log.exception("the machines could not all be ended right away; closing the pool tries again")

    def _console_url(self, instance: Instance) -> str | None:
        """Return the machine's page. A fault there must not stop what is done with a machine that costs money."""
        try:
            return self._provider.console_url(instance)
        except Exception:
            _log.exception("the console's page of %s is not known", instance.id)
            return None

    def _raise_if_closing(self) -> None:
        if self.is_closing:
            raise PoolClosed("the pool is closing")


def _provisioned(instance: Instance, accelerator: Accelerator | None, console_url: str | None) -> InstanceProvisioned:
    beside = total_of(instance.extras_per_hour)
    return InstanceProvisioned(
        instance_id=instance.id,
        node=instance.rank,
        spot=instance.is_spot,
        provider=instance.provider,
        ip=instance.ip,
        instance_type=instance.instance_type,
        price_on_demand=(
            None if instance.on_demand_price_per_hour is None else instance.on_demand_price_per_hour + beside
        ),
        price_spot=instance.price_per_hour + beside if instance.is_spot else None,
        accelerator=None if accelerator is None else str(accelerator),
        console_url=console_url,
    )
