"""The machines of a pool: the only code that starts or stops spending.

States of a pool's machines, and who undoes what when the client is stopped between two lines:

    nothing -> intended -> launch asked for -> launched -> prepared -> leased -> terminated -> known to be gone
               `_give_back`, by tag, on the caller's ExitStack                `release`        the meter ends

A launch that fails may have launched: so `teardown` asks the provider by tag, never a list kept here. What is written down when: `journal.py`.
"""

from __future__ import annotations

import contextlib
import logging
import random
import socket
import threading
import time
from collections.abc import Callable, Collection, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import ExitStack
from dataclasses import asdict, replace
from datetime import UTC, datetime
from typing import TYPE_CHECKING
from urllib.parse import urlsplit

from skyward_core.accelerators import Accelerator
from skyward_core.accelerators.mig import RESET_MAY_BE_REFUSED, needs_reset
from skyward_core.concurrency.threads import Threads, side_by_side
from skyward_core.errors import (
    BadRequest,
    BudgetExceeded,
    CommandFailed,
    ConnectionLost,
    CredentialsError,
    InstancesLeft,
    NoCapacity,
    NodeLost,
    NotYetSupported,
    OfferGone,
    PoolClosed,
    ProviderFailed,
    Refusal,
    SkywardError,
    Unreachable,
)
from skyward_core.events.events import CandidateRefused, InfraCreated, InfraCreating, InstanceLaunching, InstanceProvisioned, InstanceStopping, SkywardEvent
from skyward_core.ledger.budgets import Grant, Purse
from skyward_core.ledger.journal import Book, price_of
from skyward_core.ledger.metering import Meter
from skyward_core.machines import spot
from skyward_core.machines.instances import Instance, Lease, Node
from skyward_core.machines.offers import Offer, total_of
from skyward_core.providers.base import Provider
from skyward_core.provisioning.bootstrap import (
    LAST_PHASE,
    LOOK_SECONDS,
    Preparation,
    Role,
    await_scheduler,
    node_script,
    raise_if_gone,
    settings_of,
    startup_script,
)
from skyward_core.provisioning.candidates import (
    MEMORY_SECONDS,
    Candidate,
    Part,
    ask,
    candidates,
    is_sold_as_spot,
    may_come,
    none_left,
    order,
    own_mistake,
    refusal,
    resting,
)
from skyward_core.provisioning.image_capture import is_to_be_kept, start_and_keep
from skyward_core.provisioning.teardown import give_back
from skyward_core.provisioning.termination import Ending, Endings
from skyward_core.spec import PoolSpec
from skyward_core.transport.transport import LocalReach, Reaches
from skyward_core.worker.preemption_notice import Notice
from skyward_core.worker.settings import NodeSettings
from skyward_core.worker.watchdog import MISSED

if TYPE_CHECKING:
    from skyward_core.engine.certificates import PoolCertificate

HEIR_SECONDS = 60.0  # for a node that is left to become the head: its scheduler listens in two
LIVES_SECONDS = 4.0  # for the answer whether a node's supervisor lives
LIVES_AGAIN_SECONDS = 2.0
BEGIN_SECONDS = 20.0  # for the other nodes to begin, when the head is up
END_FIRST_SECONDS = 10.0  # for the end of nodes whose processes have died, before others are started on the same machines
PORTS = range(20_000, 30_000)  # below Linux's ephemeral ports, ip(7)
PORT_TRIES = 5
GUARD_GRACE_SECONDS = 10.0
ASK_SECONDS = 5.0
ALL_AT_ONCE = 1000  # each node takes some round trips, and no processor
RETIRED = -1  # the generation of a node that is to be none any more
ON_TO_THE_NEXT = (NoCapacity, CredentialsError, ProviderFailed, OfferGone, BudgetExceeded, BadRequest)
"""What one candidate may fail with, and the next is tried. Not InstancesLeft: nobody else is asked while machines may be there."""

_log = logging.getLogger("skyward")

type Emit = Callable[[SkywardEvent], object]


class Machines:
    """The machines of one opening of a pool: rents them, makes them nodes, puts others in the place of lost ones, gives them back.

    `acquire` first, `release` last; between them `stand_by` and `replace` (one thread for each rank) and `restart` may be called at the same time.
    """

    def __init__(
        self,
        spec: PoolSpec,
        providers: Sequence[Provider],
        pool_id: str,
        certificate: Future[PoolCertificate],
        *,
        emit: Emit,
        meter: Meter,
        book: Book,
        purse: Purse,
    ) -> None:
        self._spec = spec
        self._providers = tuple(provider.for_pool() for provider in providers)
        self._provider = self._providers[0]
        """Who rents the machines: one at a time, and another only when this one has nothing of ours."""
        self._pool_id = pool_id
        self._certificate = certificate
        self._emit = emit
        self._meter = meter
        self._book = book
        self._purse = purse
        self.reaches = Reaches(spec.lease_seconds, emit, purse.paid_seconds)
        self._nodes: dict[int, Preparation] = {}
        self._standing_by: dict[int, Preparation] = {}
        """Machines that are prepared to take the place of one that is still there."""
        self._offers: dict[int, Offer] = {}
        """What each rank is rented as."""
        self._others: list[Offer] = []
        """What a lost machine may be replaced with too: other offers of the provider in the same region."""
        self._scheduler = ""
        self._generation = 0
        self._head_port = 0
        self._ports: dict[int, tuple[int, ...]] = {}
        self._led: set[tuple[str, int]] = set()
        self._created_at = datetime.now(UTC)
        self._ask_at = 0.0
        self._lost_at: dict[str, float] = {}
        self._endings = Endings(pool_id, book)
        self._missed = set[str]()
        self._silent: dict[str, float] = {}
        self._accelerators: dict[str, Accelerator | None] = {}
        """What the calls on each machine may use."""
        self._launched_at = 0.0
        self._is_launch_unsure = False
        """True once a launch was asked for and its answer lost: there may be machines that nobody here knows of."""
        self._unsure = set[Grant]()
        """What such launches were granted, until a listing that came late enough has nothing of the pool."""
        self._has_asked = False
        """Whether any launch was begun at all."""
        self.may_be_left = False
        """Whether something was asked for that is not known to be gone: whatever has cut off the giving back, somebody must go on with it."""
        self._is_not_opening = threading.Event()
        self._telling = threading.Lock()
        self._closing = threading.Event()
        self._is_closing = False

    # ── acquire and release ──────────────────────────────────────────────────────────────────────────────────────────

    def acquire(self, undo: ExitStack) -> Lease:
        """Rent and prepare what the spec asks for; return the lease with the address of its scheduler.

        The giving back is pushed on `undo` before anything is launched, and stays there: no interrupt can fall between this function's care and its caller's.
        Raises NoCapacity, BootstrapFailed, ProvisioningTimeout and whatever the provider raises; InstancesLeft, from the undo, says which machines may be left.
        """
        self._emit(InfraCreating(self._pool_id, self._book.work))
        self._created_at = datetime.now(UTC)
        deadline = time.monotonic() + self._spec.provision_timeout
        undo.callback(self._give_back_or_warn)
        undo.callback(self.reaches.close)
        instances = self._rent(deadline)
        if self._spec.image.cache and not self._provider.keeps_images:
            _log.info("%s cannot keep the disks of machines: the image's packages are installed as if it had no cache=True", self._provider.name)
        self._head_port = _free_port() if self._provider.is_here else random.choice(PORTS)  # noqa: S311 - a port, no secret
        self._nodes = {instance.rank: Preparation(self.reaches.to(instance), instance.rank, self._emit) for instance in instances}
        self._prepare(deadline)
        return self.lease

    # ── who rents them ───────────────────────────────────────────────────────────────────────────────────────────────

    def _rent(self, deadline: float) -> list[Instance]:
        """Rent all machines from the first candidate that has them. Each refusal is told, written down and kept.

        What of a candidate's machines came is given back, and known to be gone, before the next one is asked. Raises NoCapacity with the refusals, or the
        error itself if all have refused for the same reason; BadRequest if nobody can do what is asked for, BudgetExceeded if only the money is missing.
        """
        providers = able(self._spec, self._providers)
        warn(self._spec, providers)
        strategy = self._spec.spot
        rounds, interval = (strategy.retries + 1, strategy.interval) if isinstance(strategy, spot.Always) else (1, 0.0)
        while True:
            rounds -= 1
            found, refusals, errors = self._candidates(providers)
            unable: list[Provider] = []
            for candidate in found:
                if candidate.provider in unable:
                    continue
                try:
                    instances = self._rent_from(candidate, refusals)
                    self._settle_for(candidate, found)
                    return instances
                except ON_TO_THE_NEXT as error:
                    if self._is_closing or self._closing.is_set() or time.monotonic() > deadline:
                        raise
                    ours = own_mistake([*errors, error])
                    if isinstance(error, BadRequest) or ours:  # a setting of this provider's, as a rule: its other machines would say the same
                        if len(providers) == 1 and ours:
                            raise ours from error
                        if len(providers) == 1:
                            raise
                        unable.append(candidate.provider)
                    if self.may_be_left:
                        self._end_all()  # an error does not prove that nothing was launched
                    errors.append(ours or error)
            want = self._spec.requirements
            if not rounds or not may_come(providers, found, want, errors) or time.monotonic() + interval > deadline:
                refused = own_mistake(errors, len(errors)) or none_left(want, self._spec.nodes, refusals, errors)
                raise refused from next((error for error in reversed(errors) if error is not refused), None)
            self._go_on_until(deadline, "no spot machine became free in time", interval)

    def _candidates(self, providers: Sequence[Provider]) -> tuple[list[Candidate], list[Refusal], list[SkywardError]]:
        sold = ask(providers, self._spec.requirements)
        found, refusals = candidates(self._spec, sold)
        for one in refusals:
            self._emit(_refused(one))
            self._book.was_refused(one)
        rest = resting(self._book.recent_attempts(MEMORY_SECONDS), datetime.now(UTC), self._spec.nodes) if len(found) > 1 else {}
        for key in {key for candidate in found for key in candidate.keys} & rest.keys():
            _log.info("%s failed again and again, and is asked later until %s", "/".join(map(str, key[:3])), rest[key].isoformat(timespec="seconds"))
        return order(found, rest), refusals, [error for one in sold for error in one.errors]

    def _note_refusal(self, provider: Provider, offer: Offer, error: SkywardError, seconds: float) -> Refusal:
        refused = refusal(provider, offer, error, seconds)
        self._emit(_refused(refused))
        return refused

    def _settle_for(self, candidate: Candidate, found: Sequence[Candidate]) -> None:
        """The machines are this candidate's: remember what may replace them, and say so if spot was left to us and is not sold."""
        near = [other for other in found if other.provider is candidate.provider and other.region == candidate.region]
        self._others = [part.offer for other in near for part in other.parts]
        is_free = self._spec.spot is None or isinstance(self._spec.spot, spot.IfAvailable)
        if is_free and candidate.price_per_hour and not is_sold_as_spot(candidate, found):
            _log.info("%s has no spot offer: it is rented on demand", candidate.parts[0].offer.name)

    def _rent_from(self, candidate: Candidate, refusals: list[Refusal]) -> list[Instance]:
        """Rent all machines of a candidate. What refuses is told and put to the refusals under its own name: of a mixed one it may be either part."""
        self._book.turn_to(candidate.provider, candidate.account)
        if candidate.provider != self._provider:
            self._is_launch_unsure = False  # that was about the one before, which has been asked and has nothing of ours
            self._launched_at = 0.0
        self._provider = candidate.provider
        self._emit(InfraCreated(candidate.region))
        instances: list[Instance] = []
        for index, part in enumerate(candidate.parts):
            began = time.monotonic()
            try:
                instances += self._launch(part.offer, part.count, part.first_rank, candidate.parts[index + 1 :])
            except ON_TO_THE_NEXT as error:
                refusals.append(self._note_refusal(candidate.provider, part.offer, error, time.monotonic() - began))
                raise
        self._offers = {part.first_rank + index: part.offer for part in candidate.parts for index in range(part.count)}
        return instances

    def release(self) -> None:
        """Give the pool's machines back and make sure. May be called again. Raises InstancesLeft if some could not be confirmed gone."""
        self.stop()
        self._give_back()

    @property
    def may_be_left_to_their_lease(self) -> bool:
        """Whether machines that cannot be confirmed gone cost nothing, and end themselves."""
        return self._provider.may_be_left_to_its_lease()

    def _give_back_or_warn(self) -> None:
        """Give back what an opening that fails has rented; what has cut it short is told, and not hidden behind hosts that cost nothing."""
        try:
            self._give_back()
        except InstancesLeft as error:
            if not self.may_be_left_to_their_lease:
                raise
            _log.warning("left to their lease: %s", error)

    def _give_back(self) -> None:
        if not self._has_asked:
            return  # nothing can be there, and whoever would be asked for it may be the one who has just refused us
        over = time.monotonic() - self._spec.lease_seconds - GUARD_GRACE_SECONDS
        ended = frozenset(machine for machine, since in self._lost_at.items() if since < over)
        for machine in ended & self._meter.rented():
            _log.warning("%s has been silent for longer than its lease: its guard has ended it there, if it lives at all", machine)
        self._end_all(ended)

    def _end_all(self, presumed_gone: frozenset[str] = frozenset()) -> None:
        lag = self._provider.listing_lag_seconds
        over = set(self._unsure)  # before the listing: a launch that another thread asks for meanwhile may come after it
        give_back(
            self._provider,
            self._pool_id,
            self._book,
            are_all_known=not self._is_launch_unsure,
            presumed_gone=presumed_gone,
            unsure_until=self._launched_at + lag if lag else 0.0,
        )
        self.may_be_left = False
        self._book.nothing_is_left()
        for grant in over:  # what they made was found, ended and counted by then
            self._purse.returned(grant)
        self._unsure -= over

    def launch_no_more(self) -> None:
        """From now on rent nothing. Waits for nothing: a signal handler may call it."""
        self._is_closing = True

    def end_now(self) -> None:
        """Ask once for the end of all machines, and wait for nothing: for a pool without a reaper. Errors are left to `release`."""
        asked = set[str]()
        for known in (self._meter.rented, self.living):  # those that are known first: a listing may fail
            try:
                if ids := known() - asked:
                    asked |= ids
                    self._provider.terminate(sorted(ids))
            except Exception:
                _log.exception("the machines could not all be ended right away; closing the pool tries again")

    def stop(self) -> None:
        """Launch no more, and let whoever waits for a machine here wait no longer."""
        self._closing.set()
        self.reaches.close()
        self._endings.stop()

    def extend_leases(self, seconds: float) -> None:
        """Let all nodes live for so many seconds from now. Raises Unreachable if one cannot be told, BadRequest if they need this client."""
        if self._ports:
            raise BadRequest("the nodes do not see each other, and talk through this client: the pool cannot be left alone")
        side_by_side(lambda node: node.reach.extend_lease(seconds), list(self._nodes.values()), "skyward-nodes", ALL_AT_ONCE)

    @property
    def lease(self) -> Lease:
        """The written claim on the machines that there are now."""
        nodes = tuple(
            Node(instance=node.instance, rank=rank, workers=self._spec.workers_per_node, slots=self._spec.concurrency)
            for rank, node in sorted(self._nodes.items())
        )
        return Lease(pool_id=self._pool_id, provider=self._provider.to_json(), nodes=nodes, scheduler=self._scheduler, created_at=self._created_at)

    @property
    def scheduler(self) -> str:
        """Where the scheduler is reached from here."""
        return self._nodes[0].reach.address(self._scheduler)

    def living(self) -> set[str]:
        """Return the ids of the pool's machines that the provider lists. Raises what the provider raises."""
        return {instance.id for instance in self._provider.instances(self._pool_id)}

    def check(self) -> None:
        """Raise BootstrapFailed for a node that has failed on its way to being one."""
        nodes = list(self._nodes.values())
        for node in nodes:
            node.follow()
        self._raise_if_gone(nodes)

    def last_words(self, rank: int) -> str:
        """Return what a node has said last, if anything can still be heard of it."""
        node = self._nodes.get(rank)
        if node is None:
            return ""
        try:
            node.follow()
        except SkywardError:
            pass  # it has failed, and that is what is being told
        return node.last_words

    def has_ended(self, rank: int) -> bool:
        """Tell whether a node has said that it has ended, or is not there at all."""
        node = self._nodes.get(rank)
        if node is None:
            return True
        try:
            node.follow()
        except SkywardError:
            return True
        return node.has_ended

    def is_connected(self, rank: int) -> bool:
        """Tell whether a node answers this client, as far as is known."""
        node = self._nodes.get(rank)
        if node is None or not node.reach.is_connected:
            return False
        return not self._provider.is_here or node.instance.id in self.living()

    # ── what is lost ─────────────────────────────────────────────────────────────────────────────────────────────────

    def replace(self, rank: int, is_there: Callable[[], bool]) -> None:
        """Put another machine in the place of a lost one, and wait until its workers have joined (`is_there`). Raises what `acquire` raises, PoolClosed."""
        lost = self._nodes.pop(rank, None)
        ending = self._end_aside(lost) if lost is not None else None
        deadline = time.monotonic() + self._spec.provision_timeout
        node = self._standing_by.pop(rank, None) or self._rent_instead(rank, ending)
        try:
            with self._telling:
                if self._ports:
                    self._ports[rank] = tuple(random.sample(PORTS, 1 + self._spec.workers_per_node))
                self._nodes[rank] = node
                self._lead_all()
                self._raise_if_cut_off(node)
                node.tell(self._settings(node, rank, self._scheduler))
            looked = time.monotonic()
            while not is_there():
                node.follow()
                self._raise_if_dropped(rank, node)
                self._go_on_until(deadline, f"node {rank} did not join the pool in time")
                if time.monotonic() - looked > LOOK_SECONDS:
                    looked = time.monotonic()
                    self._raise_if_lost(node)
            node.reach.opened()
        except BaseException:
            if self._nodes.get(rank) is node:
                del self._nodes[rank]
            self._end(node)
            raise

    def stand_by(self, rank: int) -> None:
        """Prepare a machine that the next `replace` of this rank will take; nothing to do if there is one. Raises what `acquire` raises, PoolClosed.

        It waits for its settings, and gives up without (`supervisor.SETTINGS_DEADLINE_SECONDS`): then `replace` fails, and does better the next time. It bears
        the pool's tags, as every machine: whatever becomes of this process, it is found and given back.
        """
        if rank in self._standing_by:
            return
        deadline = time.monotonic() + self._spec.provision_timeout
        node = self._rent_instead(rank, None)
        try:
            looked = time.monotonic()
            while node.phase != LAST_PHASE:
                node.follow()
                self._go_on_until(deadline, f"the machine that stands by for node {rank} was not ready in time")
                if time.monotonic() - looked > LOOK_SECONDS:
                    looked = time.monotonic()
                    self._raise_if_lost(node)
        except BaseException:
            self._end(node)
            raise
        node.reach.opened()
        self._standing_by[rank] = node

    def retire(self, rank: int, instance_id: str) -> None:
        """Have a node end its workers for good, if it still is this machine; `replace` gives it back. What runs there is lost. Raises what a `Reach` raises."""
        with self._telling:
            node = self._nodes.get(rank)
            if node is not None and node.instance.id == instance_id:
                settings = replace(self._settings(node, rank, self._scheduler), workers=(), generation=RETIRED)
                node.reach.write("settings.json", settings.to_json())

    def rouse(self, rank: int, workers: Sequence[int]) -> None:
        """Have a node kill those of its workers and begin them anew: they stay away, though it is there. Raises what a `Reach` raises."""
        node = self._nodes.get(rank)
        if node is not None:
            node.reach.write(MISSED, " ".join(map(str, workers)))

    def lives(self, ranks: Collection[int]) -> dict[int, bool]:
        """Ask these nodes, all at once, whether their supervisors live. False: the machine answers, and there is none any more. Without an answer: left out.

        Takes LIVES_SECONDS at most.
        """

        def ask_one(ranked: tuple[int, Preparation]) -> tuple[int, bool | None]:
            rank, node = ranked
            try:
                return rank, node.reach.lives(LIVES_SECONDS)
            except (SkywardError, OSError):
                return rank, None

        nodes = [(rank, node) for rank in ranks if (node := self._nodes.get(rank)) is not None]
        return {rank: lives for rank, lives in side_by_side(ask_one, nodes, "skyward-lives", ALL_AT_ONCE) if lives is not None}

    def notices(self, rank: int) -> tuple[Notice, ...]:
        """Return what the machine of a node was told of being taken back."""
        node = self._nodes.get(rank)
        if node is None or not self._notice_url(node):
            return ()
        with contextlib.suppress(SkywardError):  # it has failed, which is noticed elsewhere
            node.follow()
        return node.notices

    def _notice_url(self, node: Preparation) -> str:
        return self._provider.notice_url if node.instance.is_spot else ""

    def _rent_instead(self, rank: int, ending: Ending | None) -> Preparation:
        """Rent a machine and have it begin to become a node."""
        node = Preparation(self.reaches.to(self._launch_instead(rank, ending)), rank, self._emit)
        try:
            node.start(self._node_script(), self._spec.provision_timeout)
        except BaseException:
            self._end(node)
            raise
        return node

    def _launch_instead(self, rank: int, ending: Ending | None) -> Instance:
        """Rent a machine while the lost one is given back, which may take long; where it is the last of its kind, or the money is, that must come first."""
        own = self._offers[rank]
        try:
            return self._launch(own, 1, rank)[0]
        except (NoCapacity, BudgetExceeded):
            for other in self._others:
                if other != own and self._may_stand_for(other, own):
                    with contextlib.suppress(NoCapacity, BudgetExceeded):  # one that the money is not enough for has none for us
                        return self._launch(other, 1, rank)[0]
            if ending is None:
                raise
        ending.over.wait(min(self._provider.gone_deadline_seconds, self._spec.provision_timeout))
        return self._launch(own, 1, rank)[0]

    def _may_stand_for(self, other: Offer, own: Offer) -> bool:
        """With a share of spot machines each kind keeps to itself; otherwise every candidate is what the strategy allows."""
        return other.is_spot == own.is_spot or not isinstance(self._spec.spot, spot.Percent)

    def restart(self, heirs: Collection[str], dead: Collection[str]) -> Lease:
        """The head is lost: make a node that is left the head, tell every node anew. Returns the new lease; ranks that miss in it are vacant.

        `heirs` are the ids of those that may become the head. `dead` are those whose processes have died while their machines answer (`lives`), the head among
        them if it is one: they are given back. Where there is no heir, as many machines are rented anew, all at once; where an instance is nothing but its
        processes (`Local`, `Hosts`) these are the same machines, for they are free again by then. Without either a machine is rented for the head.
        """
        with self._telling:  # a machine that is being prepared meanwhile is told afterwards, of the new head
            return self._restart(frozenset(heirs), frozenset(dead))

    def _restart(self, heirs: frozenset[str], dead: frozenset[str]) -> Lease:
        self._generation += 1
        lost = self._nodes.pop(0, None)
        fallen = [self._nodes.pop(rank) for rank, node in sorted(self._nodes.items()) if node.instance.id in dead]
        endings = {node.rank: self._end_aside(node) for node in ([] if lost is None else [lost]) + fallen}
        left = [rank for rank, node in sorted(self._nodes.items()) if node.instance.id in heirs]
        if left:
            return self._succeed(self._nodes.pop(left[0]))
        is_head_dead = lost is not None and lost.instance.id in dead
        ranks = [0] if is_head_dead or not fallen else []
        return self._begin_anew([*ranks, *(node.rank for node in fallen)], endings, is_end_awaited=bool(fallen) or is_head_dead)

    def _succeed(self, heir: Preparation) -> Lease:
        """Make a node that is left the head. It has all that it needs, and another may have to try if it does not come up."""
        self._nodes[0] = heir
        deadline = time.monotonic() + min(HEIR_SECONDS, self._spec.provision_timeout)
        asked_at = time.monotonic()

        def look() -> None:
            nonlocal asked_at
            self._go_on_until(deadline, "the new head did not come up in time")
            self._raise_if_lost(heir)
            if time.monotonic() - asked_at > LIVES_AGAIN_SECONDS:
                if self.lives([0]).get(0) is False:
                    raise NodeLost("the processes of the node that was to be the new head have died")
                asked_at = time.monotonic()

        if self._ports:
            self._choose_ports()
        self._lead_all()
        self._go_on_under(heir, look, deadline)
        return self.lease

    def _begin_anew(self, ranks: Sequence[int], endings: Mapping[int, Ending], *, is_end_awaited: bool) -> Lease:
        """Rent machines for these ranks, make the first of them the head, and have them all become nodes at the same time. Who cannot is vacant."""
        deadline = time.monotonic() + self._spec.provision_timeout
        if is_end_awaited and (self._provider.is_here or self._provider.terminate_confirms):  # then the machines are free
            until = time.monotonic() + END_FIRST_SECONDS
            for ending in endings.values():
                ending.over.wait(max(0.0, until - time.monotonic()))
        nodes = [Preparation(self.reaches.to(instance), instance.rank, self._emit) for instance in self._launch_anew(ranks, endings)]
        self._nodes |= {node.rank: node for node in nodes}
        head = self._nodes[0] = self._nodes.pop(nodes[0].rank)
        if self._ports:
            self._choose_ports()
        threads = Threads("skyward-anew")
        begun = [(node, threads.submit(node.start, self._node_script(), self._spec.provision_timeout)) for node in nodes]

        def look() -> None:
            self._go_on_until(deadline, "the new head did not come up in time")
            self._raise_if_lost(head)

        (_, head_begun), *others = begun
        while not head_begun.done():
            self._go_on_until(deadline, "the new head could not begin in time")
        head_begun.result()
        if self._ports:
            self._drop_unless_begun(others, deadline)
        self._lead_all()
        self._go_on_under(head, look, deadline, lambda: self._drop_unless_begun(others, deadline))
        return self.lease

    def _launch_anew(self, ranks: Sequence[int], endings: Mapping[int, Ending]) -> list[Instance]:
        """Rent machines for these ranks, or some of them, the lowest first; at least one."""
        instances: list[Instance] = []
        for first, count in _runs(ranks, self._offers):
            try:
                instances += self._launch_up_to(self._offers[first], count, first)
            except (NoCapacity, BudgetExceeded):
                break
        return sorted(instances, key=lambda instance: instance.rank) or [self._launch_instead(ranks[0], endings.get(ranks[0]))]

    def _drop_unless_begun(self, begun: Sequence[tuple[Preparation, Future[None]]], deadline: float) -> None:
        """Give back those nodes that could not begin, or have not by now."""
        until = min(deadline, time.monotonic() + BEGIN_SECONDS)
        for node, future in begun:
            while not future.done() and time.monotonic() < until:
                self._go_on_until(deadline, "the nodes did not begin in time")
            if self._nodes.get(node.rank) is node and (not future.done() or future.exception() is not None):
                _log.warning("node %d could not begin anew, and is replaced: %s", node.rank, future.exception() if future.done() else "it takes too long")
                del self._nodes[node.rank]
                self._end_aside(node)

    def _go_on_under(self, head: Preparation, look: Callable[[], None], deadline: float, before_others: Callable[[], None] = lambda: None) -> None:
        """Tell a node that it is the head, wait for its scheduler, and tell all the others."""
        head.tell(self._settings(head, 0, None))
        self._scheduler = await_scheduler(head, [head], look, deadline)
        head.reach.opened()
        before_others()
        side_by_side(lambda ranked: self._tell_or_drop(*ranked), [(rank, node) for rank, node in self._nodes.items() if rank], "skyward-nodes", ALL_AT_ONCE)

    def _tell_or_drop(self, rank: int, node: Preparation) -> None:
        is_told = not self._provider.is_here or self.is_connected(rank)
        try:
            if is_told:
                node.tell(self._settings(node, rank, self._scheduler))
                node.reach.opened()
        except (Unreachable, CommandFailed, OSError):
            is_told = False
        if not is_told:  # lost as well
            del self._nodes[rank]
            self._end(node)

    def _end_aside(self, node: Preparation) -> Ending:
        """Give back a machine that is lost in a thread of its own: one that does not answer takes its time."""
        return self._endings.end_aside(node.instance.id, self._provider, f"skyward-end-{node.rank}", lambda: self._let_go(node))

    def _end(self, node: Preparation) -> None:
        """Give back a machine that is lost. What cannot be done now is tried again, and done in any case when the pool ends."""
        self._let_go(node)
        self._endings.end(node.instance.id, self._provider)

    def _let_go(self, node: Preparation) -> None:
        self._lost_at[node.instance.id] = time.monotonic()
        self.reaches.forget(node.instance)
        self._emit(InstanceStopping(node.instance.id))

    def _raise_if_cut_off(self, node: Preparation) -> None:
        if not self._ports and not self._sees_the_head(node):
            raise node.failure(f"it does not get through to the head at {self._scheduler}, and the other nodes do")

    def _raise_if_dropped(self, rank: int, node: Preparation) -> None:
        if self._nodes.get(rank) is not node:
            raise NodeLost(f"node {rank} could not be told of the new head")

    def _raise_if_lost(self, node: Preparation) -> None:
        """Raise BootstrapFailed if a machine that is waited for is gone; an outage of the provider says nothing.

        Over SSH only one that is silent is asked for.
        """
        if node.reach.is_connected and not self._provider.is_here:
            return
        try:
            is_gone = node.instance.id not in self.living()
        except Exception:
            return
        if is_gone:
            raise node.failure("its machine is gone")

    def _go_on_until(self, deadline: float, what: str, pause_seconds: float = 0.05) -> None:
        if self._closing.wait(pause_seconds):
            raise PoolClosed("the pool is closing")
        if time.monotonic() > deadline:
            raise SkywardError(what)

    # ── from machines to nodes ───────────────────────────────────────────────────────────────────────────────────────

    def _launch(self, offer: Offer, count: int, first_rank: int, along: Sequence[Part] = ()) -> list[Instance]:
        """Rent machines, as `_launch_up_to`. Raises NoCapacity if fewer came than were asked for: its caller gives them back."""
        began = time.monotonic()
        instances = self._launch_up_to(offer, count, first_rank, along)
        if len(instances) < count:
            few = NoCapacity(f"{self._provider.name} had {len(instances)} of {count} x {offer.instance_type} in {offer.region}; they have been given back")
            self._book.tried(offer, time.monotonic() - began, few)
            raise few
        return instances

    def _launch_up_to(self, offer: Offer, count: int, first_rank: int, along: Sequence[Part] = ()) -> list[Instance]:
        """Rent machines, one at least; the meter counts from the moment they are asked for. Raises what `Provider.launch` raises, BudgetExceeded, PoolClosed.

        `along` are the parts of the same candidate that are asked for next: the money has to be enough for all of them.
        """
        if self._is_closing or self._closing.is_set():
            raise PoolClosed("the pool is closing")
        began, is_refused, is_unsure = time.monotonic(), False, False
        try:
            accelerator = self._spec.accelerator_on(offer)
            self._spec.neuron_cores_of(accelerator)  # refuses what would be refused when the machine has been paid for
            prices = [(part.count, price_of(part.offer, self._provider)) for part in along]
            grant = self._purse.grant(
                count, price_of(offer, self._provider), along=prices, ending_seconds=self._provider.ending_seconds, tell=self.reaches.tell_paid
            )
        except (BadRequest, BudgetExceeded) as error:
            self._book.tried(offer, time.monotonic() - began, error)
            raise
        try:
            script = startup_script(self._spec, self._provider, grant.lifetime_seconds)
            self._emit(InstanceLaunching(count, offer.instance_type, self._provider.name))
            self._has_asked = True
            launch = self._book.intend(offer, count, first_rank, grant)
        except BaseException:
            self._purse.returned(grant)
            raise
        self.may_be_left = True
        began = time.monotonic()
        try:
            instances = self._provider.launch(offer, count, launch.tags, script)
        except NoCapacity as error:
            is_refused = True
            self._book.refused(launch, str(error))
            self._purse.returned(grant)
            self._book.tried(offer, time.monotonic() - began, error)
            raise
        except BaseException as error:
            if isinstance(error, SkywardError):
                self._book.tried(offer, time.monotonic() - began, error)
            self._is_launch_unsure = is_unsure = True  # never taken back: another launch that went well says nothing of this one
            raise  # the money stays set aside: what was launched lives as long as it was granted, or until it is known to be gone
        finally:
            self._ask_at = time.monotonic() + ASK_SECONDS
            if not is_refused:
                self._launched_at = time.monotonic()  # a machine may have been created as late as this
            if is_unsure:  # last: whoever gives back what this one made has to know how late that may be
                self._unsure.add(grant)
        self._book.bind(launch, instances)
        self._purse.launched([instance.id for instance in instances], grant)
        self._accelerators |= {instance.id: accelerator for instance in instances}
        for instance in instances:
            self._emit(_provisioned(instance))
        if self._is_closing or self._closing.is_set():  # the pool's own giving back may be over already
            self._end_all()
            raise PoolClosed("the pool is closing")
        if len(instances) == count:
            self._book.tried(offer, time.monotonic() - began)
        return instances

    def _prepare(self, deadline: float) -> None:
        """Turn instances into nodes that look for their scheduler. All are prepared at once, the head's address is the only wait."""
        nodes = list(self._nodes.values())
        head, *others = nodes
        threads = ThreadPoolExecutor(len(nodes), thread_name_prefix="skyward-prepare")
        try:
            started = {node.rank: threads.submit(self._start, node, deadline) for node in nodes}
            self._scheduler = await_scheduler(head, nodes, lambda: self._check_all(nodes, list(started.values())), deadline)
            for node in others:
                while not started[node.rank].done():
                    self._check_all(nodes, list(started.values()))
                    for other in nodes:
                        other.follow()
                    time.sleep(0.01)
                started[node.rank].result()
            if not all(threads.map(self._sees_the_head, others)):
                self._go_through_the_client(nodes, deadline)
            list(threads.map(lambda node: self._tell(node, self._scheduler), others))
            for node in nodes:
                node.follow()
                node.reach.opened()
        except BaseException:
            self._is_not_opening.set()
            self.reaches.close()  # whoever waits for a machine in one of the threads waits no longer
            raise
        finally:
            threads.shutdown()

    def _start(self, node: Preparation, deadline: float) -> None:
        timeout = max(1.0, deadline - time.monotonic())
        if node.rank == 0 and is_to_be_kept(self._spec, self._provider, node.instance):
            start_and_keep(node, self._spec, self._provider, timeout, self._is_not_opening)
        else:
            node.start(self._node_script(), timeout)
        if node.rank == 0:
            self._tell(node, None)

    def _tell(self, node: Preparation, scheduler: str | None) -> None:
        try:
            node.tell(self._settings(node, node.rank, scheduler))
        except (Unreachable, CommandFailed) as error:
            raise node.failure(f"it does not answer any more: {error}") from error

    def _check_all(self, nodes: Sequence[Preparation], started: Sequence[Future[None]]) -> None:
        for future in started:
            if future.done():
                future.result()
        self._raise_if_gone(nodes)

    def _raise_if_gone(self, nodes: Sequence[Preparation]) -> None:
        """Over SSH the provider is asked only about nodes that do not answer, and not all the time: asking may cost seconds."""
        silent = list(nodes)
        if not self._provider.is_here:
            silent = [node for node in nodes if not node.reach.is_connected]
            self._silent = {node.instance.id: self._silent.get(node.instance.id, time.monotonic()) for node in silent}
            lease_over = {machine for machine, since in self._silent.items() if time.monotonic() - since > self._spec.lease_seconds}
            raise_if_gone(silent, lease_over)  # its guard has ended it, if it lives at all
            if not silent or time.monotonic() < self._ask_at:
                return
            self._ask_at = time.monotonic() + ASK_SECONDS
        try:
            living = self.living()
        except Exception:
            if self._provider.is_here:
                raise
            return  # an outage says nothing of the machines
        missing = {node.instance.id for node in silent} - living
        gone, self._missed = missing & self._missed if not self._provider.is_here else missing, missing  # a cloud may list a new machine some seconds late
        raise_if_gone(silent, gone)

    def _node_script(self) -> str:
        return "" if self._provider.is_here else node_script(self._spec)

    def _settings(self, node: Preparation, rank: int, scheduler: str | None) -> NodeSettings:
        host = "127.0.0.1" if self._ports else node.instance.private_ip or "127.0.0.1"
        head_host = "127.0.0.1" if self._ports else self._nodes[0].instance.private_ip or "127.0.0.1"
        role = Role(rank, self._generation, host, head_host, self._head_port, scheduler, self._ports.get(rank, ()))
        machine = node.instance.id
        certificate = self._certificate.result()
        if isinstance(node.reach, LocalReach):
            node.reach.say_busy()  # for how long it is paid: nothing else tells it before it can do without us
        accelerator, lifetime = self._accelerators.get(machine), self._spec.max_lifetime
        return settings_of(node.reach, role, self._spec, certificate, accelerator, lifetime, self._notice_url(node), is_simulated=self._provider.simulates)

    # ── nodes that do not see each other ─────────────────────────────────────────────────────────────────────────────

    def _sees_the_head(self, node: Preparation) -> bool:
        parts = urlsplit(self._scheduler)
        try:
            return node.reach.can_reach(str(parts.hostname), parts.port or 0)
        except (Unreachable, CommandFailed) as error:
            raise node.failure(f"it does not answer any more: {error}") from error

    def _go_through_the_client(self, nodes: Sequence[Preparation], deadline: float) -> None:
        """Let every node listen on loopback, at ports of its own that lead to it from every other node."""
        for left in reversed(range(PORT_TRIES)):
            self._choose_ports()
            try:
                self._lead_all()
                break
            except ConnectionLost:
                raise
            except (SkywardError, OSError):  # one of the ports is taken somewhere
                if not left:
                    raise
        self._generation += 1
        head = nodes[0]
        head.tell(self._settings(head, 0, None))
        self._scheduler = await_scheduler(head, nodes, lambda: self._raise_if_gone(nodes), deadline)

    def _choose_ports(self) -> None:
        """Choose the ports of each rank: one for a scheduler, one for each of its workers."""
        each = 1 + self._spec.workers_per_node
        numbers = random.sample(PORTS, each * self._spec.nodes)
        self._ports = {rank: tuple(numbers[rank * each : (rank + 1) * each]) for rank in range(self._spec.nodes)}
        self._led = set()

    def _lead_all(self) -> None:
        """Have the ports of each node lead to it from all the others, through this client; nothing to do where nodes see each other."""
        wanted = [(self._nodes[rank], port) for rank, ports in self._ports.items() if rank in self._nodes for port in ports]
        if self._ports:
            wanted.append((self._nodes[0], self._head_port))
        ways = [(target, port, urlsplit(target.reach.address(f"tls://127.0.0.1:{port}")).port or 0) for target, port in wanted]

        def lead(node: Preparation) -> None:
            for target, port, local in ways:
                if node is not target and (node.instance.id, port) not in self._led:
                    node.reach.lead(port, local)
                    self._led.add((node.instance.id, port))

        side_by_side(lead, list(self._nodes.values()), "skyward-nodes", ALL_AT_ONCE)


def _runs(ranks: Sequence[int], offers: Mapping[int, Offer]) -> list[tuple[int, int]]:
    """Split ranks, which rise, into stretches of one kind of machine without a gap: the first rank and the number of each."""
    runs: list[tuple[int, int]] = []
    for rank in ranks:
        first, count = runs[-1] if runs else (rank, 0)
        if runs and rank == first + count and offers[rank] == offers[first]:
            runs[-1] = (first, count + 1)
        else:
            runs.append((rank, 1))
    return runs


def refuse(spec: PoolSpec, provider: Provider) -> None:
    """Raise BadRequest for what the provider can never do, before anything is asked of it."""
    is_partitioned = spec.accelerator is not None and bool(spec.accelerator.mig)
    asked = {"apt": bool(spec.image.apt), "volume": bool(spec.volume), "mig": is_partitioned}
    for feature, reason in type(provider).refuses.items():
        if asked.get(feature):
            raise NotYetSupported(f"{provider.name} does not do {feature}: {reason}")


def warn(spec: PoolSpec, providers: Sequence[Provider]) -> None:
    """Log what may fail when machines have been paid for, and nobody knows before."""
    if spec.accelerator is not None and needs_reset(spec.accelerator) and any(provider.end_command for provider in providers):
        _log.warning("%s: %s", spec.accelerator, RESET_MAY_BE_REFUSED)


def able(spec: PoolSpec, providers: Sequence[Provider]) -> list[Provider]:
    """Return the providers that can do what is asked for at all. Raises what `refuse` raises if none can."""
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


def _refused(one: Refusal) -> CandidateRefused:
    return CandidateRefused(**asdict(one))


def _provisioned(instance: Instance) -> InstanceProvisioned:
    beside = total_of(instance.extras_per_hour)
    return InstanceProvisioned(
        instance_id=instance.id,
        node=instance.rank,
        spot=instance.is_spot,
        provider=instance.provider,
        ip=instance.ip,
        instance_type=instance.instance_type,
        price_on_demand=None if instance.on_demand_price_per_hour is None else instance.on_demand_price_per_hour + beside,
        price_spot=instance.price_per_hour + beside if instance.is_spot else None,
    )


def _free_port() -> int:
    """A port that was free a moment ago, for torch's or JAX's rendezvous on the head."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])
