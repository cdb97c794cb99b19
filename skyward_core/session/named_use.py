"""One process's use of a pool with a name: its row in the ledger, from the claim of the name until it leaves.

    claimed ──▶ opening (this process rents) ──▶ using ──▶ left, or closing (this process ends the pool) ──▶ left
            └─▶ joined (another one has rented) ──▶ using ...      └──┴─ that failed ── leaves again ──▶ left

Decision 0028 has the states of the name, and what a kill between two of these lines leaves. The thread
"skyward-client" renews the row; "skyward-clear" ends what a dead pool of the name has left.

`Successor` makes an attached process the steward of the pool when it has none. The renewal notices it
(`NamedUse.on_vacant`). The thread "skyward-adopt" adopts the pool, because that may take long, and a renewal may not.
It also ends a stewardship that was lost.
"""

from __future__ import annotations

import importlib
import logging
import math
import threading
import time
import uuid
from collections.abc import Callable, Mapping, Sequence
from datetime import timedelta
from functools import partial
from typing import TYPE_CHECKING, Any, cast

from skyward_core.concurrency.backoff import Backoff
from skyward_core.concurrency.loading import load
from skyward_core.concurrency.threads import LoopThread, PeriodicThread, in_thread
from skyward_core.errors import BadRequest, LeaseLost, LedgerError, ProvisioningTimeout, SkywardError
from skyward_core.events import console
from skyward_core.image.local_files import included_in
from skyward_core.ledger.names_policy import (
    Client,
    Join,
    LookAgain,
    NameState,
    NotSteward,
    Refused,
    Rent,
    Silent,
    Standing,
    Usage,
    Wait,
    is_earlier_attempt,
)
from skyward_core.machines.owner import Owner
from skyward_core.providers.base import Provider
from skyward_core.session.pool_uses import slot_prices, use_count
from skyward_core.session.steward_term import LedgerContact, StewardTerm
from skyward_core.session.warm_pools import what_stays
from skyward_core.spec import PoolSpec
from skyward_core.wire.protocol import ENDING_SECONDS
from skyward_core.work import Work

if TYPE_CHECKING:
    from skyward_core.engine.cluster import Cluster
    from skyward_core.ledger.ledger import Ledger
    from skyward_core.session.session_engine import PoolSize
    from skyward_core.session.stewardship import Stewardship

LEDGER_BUSY_SECONDS = 10.0
MOST_BEAT_SECONDS = 5.0
RENEWAL_SECONDS = 2 * MOST_BEAT_SECONDS
"""In this time a client that lives renews its lease, and one time may fail."""
RENEWAL_WAIT_SECONDS = 0.5
"""How long a renewal waits for the slots of a dead client: it must not be late itself."""
POLLS = Backoff(0.05, 1.0)
"""The pauses of a process that waits for another one to open or close the pool."""
CLOCK_WAS_SET = "the clocks of the ledger's server and of this computer differ, and whether its users live is in doubt"
EACH_ITS_OWN = frozenset(
    {
        *("name", "display", "output", "retries", "lease_seconds", "provision_timeout", "collect_metrics", "provider"),
        "max_price_ratio",
    }
)
"""Fields of the spec in which the clients of one pool may differ. The providers are compared as they were chosen. Who
opens the pool chooses its machines by `max_price_ratio`; the others take what is there.
"""


def terms_of(spec: PoolSpec, providers: Sequence[Provider]) -> dict[str, Any]:
    """Return the settings that all clients of a named pool must have in common, as JSON data without secrets.

    Paths of one computer are left out: of included files their content counts, of a provider which machines it has.
    """
    terms = spec.model_dump(mode="json", exclude=set(EACH_ITS_OWN))
    included = [[entry.place, entry.sha256] for entry in included_in(spec.image.includes)]
    terms["image"] = {**terms["image"], "includes": included}
    return {**terms, "provider": [_shared_part(provider) for provider in providers]}


def _shared_part(provider: Provider) -> dict[str, Any]:
    own = type(provider).of_one_computer
    return {name: value for name, value in provider.to_json().items() if name not in own}


class NamedUse:
    """This process as a client of a named pool. `close` it at the end; it does not end the pool."""

    def __init__(self, spec: PoolSpec, providers: Sequence[Provider], work: Work) -> None:
        """Connect to the ledger. Raises LedgerError."""
        assert spec.name is not None
        self.name = spec.name
        self.spec = spec
        self._work = work
        self._providers = providers
        self.log = console.log_of(spec.display)
        """Logs what is said of the pool, before and after its session too."""
        self.terms = terms_of(spec, providers)
        """The settings that all clients of the pool must have in common."""
        self._client_id = ""
        self._cluster: Cluster | None = None
        self._count: Callable[[], Usage] = Usage
        """Returns what this process has of the pool."""
        self._others: set[str] = set()
        """The clients whose calls this one has begun to end."""
        self._must_end = False
        """Whether this process was the last one that left, and has to end the pool."""
        self.longest_seconds = spec.lease_seconds
        """For how long the nodes may live after the last sign of life of this process."""
        self._is_ending = False
        """Whether this process ends the pool at a limit, or has done it. Then it no longer keeps the pool."""
        self.still_running = ""
        """What this process has left running, in words; "" before it has left, and if nothing is left."""
        self.has_failed_to_leave = False
        """Whether this process failed to leave. Then it renews nothing any more."""
        self._may_settle = False
        """Whether this process has not looked yet at pools of this computer that have ended themselves. One that rents
        does it when it writes its pool into the ledger.
        """
        self.term = StewardTerm(spec.lease_seconds, self.renew)
        """Whether this process is the steward of the pool."""
        self.on_vacant: Callable[[], object] = lambda: None
        """Called by the renewal when the pool has no living steward. Must not wait."""
        self.on_lost: Callable[[], object] = lambda: None
        """Called by the renewal when another process has become the steward after this one."""
        self.succession: Successor | None = None
        """What makes this process the steward, if it is attached."""
        module = load("skyward_core.ledger.ledger")
        url = module.default_url(must_last=spec.budget is not None)
        self._ledger = cast("Ledger", module.Ledger(url, busy_timeout_seconds=LEDGER_BUSY_SECONDS, may_migrate=True))
        self._beat_seconds = min(MOST_BEAT_SECONDS, spec.lease_seconds / 6)
        self._contact = LedgerContact(self._beat_seconds)
        self._renewal = self._new_renewal()

    @property
    def client_id(self) -> str:
        """The ledger's row of this process; "" before it has claimed the name."""
        return self._client_id

    # ── open ─────────────────────────────────────────────────────────────────────────────────────────────────────────

    def claim(self, pool_id: str, deadline: float) -> Rent | Join:
        """Claim the name; wait while another process opens or closes its pool, until the deadline (time.monotonic).

        Raises BadRequest if the name has a pool with other settings, ProvisioningTimeout, and LedgerError: then
        nothing is rented.
        """
        doubts: dict[Silent, float] = {}
        for pause in POLLS.pauses():
            self._client_id = uuid.uuid4().hex
            since = self.term.now()
            dead = [silent for silent, seen in doubts.items() if time.monotonic() - seen >= RENEWAL_SECONDS]
            claim = self._ledger.names.claim(
                self.name,
                pool_id,
                self._client_id,
                owner=Owner.here(),
                terms=self.terms,
                keep_warm_seconds=self.spec.keep_warm,
                lease_seconds=self.spec.lease_seconds,
                work=self._work,
                dead=dead,
            )
            if isinstance(claim, Refused):
                raise BadRequest(_refusal(self.name, claim.pool_id, claim.differences))
            if isinstance(claim, LookAgain):
                doubts = {silent: doubts.get(silent, time.monotonic()) for silent in (*claim.silent, *dead)}
            elif not isinstance(claim, Wait):
                if isinstance(claim, Rent):
                    self.term.begin(claim.epoch, since)
                    self._clear(claim)
                self._contact.answered(since)
                self._renewal = self._new_renewal()
                self._renewal.start()
                self._may_settle = isinstance(claim, Join)
                return claim
            if time.monotonic() + pause > deadline:
                reason = claim.reason if isinstance(claim, Wait) else CLOCK_WAS_SET
                raise ProvisioningTimeout(
                    f"the pool {self.name!r} ({claim.pool_id}) was not usable in time: {reason}. Nothing was rented by"
                    " this process"
                )
            time.sleep(pause)
        raise AssertionError  # the pauses have no end

    def _clear(self, claim: Rent) -> None:
        """End what may be left of the pool that had the name: its opener is dead, or no process can reach it."""
        if not claim.dead_pool:
            return
        words = "the pool %r is rented again, because %s cannot be used any more: %s. Machines that are left of it end"
        self.log(logging.WARNING, words, self.name, claim.dead_pool, claim.why_dead)
        in_thread("skyward-clear", partial(self._end, claim.dead_pool, claim.why_dead))

    def _end(self, pool_id: str, why: str) -> None:
        """End the machines of a condemned pool. If that fails or is killed, its reaper and a sweep do it."""
        module = importlib.import_module("skyward_core.ledger.ledger")
        try:
            with module.Ledger(self._ledger.url, busy_timeout_seconds=LEDGER_BUSY_SECONDS) as ledger:
                self._release(ledger, pool_id, why)
        except (SkywardError, OSError) as error:
            self.log(logging.WARNING, "%s could not be ended; `skyward sweep` tries again: %s", pool_id, error)

    def measure(self, count: Callable[[], Usage], cluster: Cluster) -> None:
        """Record from now on what this process has of the pool, as `count` returns it.

        First the calls of earlier attempts of the same work end, and those of processes that are seen to be dead: no
        call of this process runs beside them, or waits for their slots. If the ledger does not answer, they end with
        their lease.
        """
        self._count, self._cluster = count, cluster
        try:
            self._ledger.names.note_topic(self._client_id, cluster.topic)
            self._end_others(cluster, ENDING_SECONDS)
        except LedgerError as error:
            self.log(logging.WARNING, "it is not known whether earlier calls run on %r: %s", self.name, error)

    def settle_the_dead(self) -> None:
        """Before the steward leaves: end the calls of processes that are seen to be dead, and settle their uses by what
        the nodes say. Raises nothing: the end of the pool settles them too, by what they had noted. A ledger that has
        not answered lately is not waited for.
        """
        is_away = self._contact.gap(self.term.now()) is not None
        if self.term.is_held and self._cluster is not None and not is_away:
            try:
                self._end_others(self._cluster, RENEWAL_WAIT_SECONDS)
            except LedgerError as error:
                self.log(logging.DEBUG, "the uses of dead processes on %r are settled later: %s", self.name, error)

    def settle_the_silent(self) -> None:
        """Before the pool ends: end the calls of processes that are silent too, because they are stopped or cut off
        from the ledger, and settle their uses by what the nodes say. Nobody can ask the nodes later. Raises nothing.
        """
        if self._cluster is None or self._contact.gap(self.term.now()) is not None:
            return
        try:
            silent = self._ledger.names.silent(self.name, self._client_id)
            self._end_these(silent, self._cluster, RENEWAL_WAIT_SECONDS, "it is silent, and the pool ends")
        except LedgerError as error:
            words = "what silent processes have used of %r is settled by what they had noted: %s"
            self.log(logging.DEBUG, words, self.name, error)

    def _end_others(self, cluster: Cluster, seconds: float) -> None:
        """End the calls of the clients for which this one does that, and wait for their slots, so long for each."""
        self._end_these(self._ledger.names.ended_by(self.name, self._client_id), cluster, seconds, "it is dead")

    def _end_these(self, others: Sequence[Client], cluster: Cluster, seconds: float, why_ended: str) -> None:
        for other in others:
            is_new = other.id not in self._others
            self._others.add(other.id)
            if is_new:
                words = "the calls of %s (process %s, %s) on %r are ended: %s"
                why = "a newer attempt has begun" if is_earlier_attempt(other.work, self._work) else why_ended
                self.log(logging.WARNING, words, other.owner.name, other.owner.pid, other.work, self.name, why)
            try:
                is_free, spent = cluster.end_client(other.topic, seconds) if other.topic else (True, {})
            except (SkywardError, OSError) as error:
                is_free, spent, words = False, {}, f"could not be ended yet: {error}"
            else:
                words = "hold slots still"
            if is_free:
                prices = slot_prices(cluster.dispatcher.members.nodes.values())
                self._ledger.names.ended(other.id, {use: use_count(its, prices) for use, its in spent.items() if use})
            elif is_new:  # the steward tries again with each renewal; at the latest they end with their lease
                self.log(logging.WARNING, "they %s", words)

    def _release(self, ledger: Ledger, pool_id: str, why: str) -> None:
        entry = ledger.pool(pool_id)
        if entry is not None:  # else its opener has requested nothing
            from skyward_core.cleanup.release import release

            release(pool_id, ledger=ledger, given=self._providers, why=why)

    def opened(self) -> None:
        """Let other processes use the pool. Raises LeaseLost if another process has the name now, and LedgerError."""
        assert self.term.epoch is not None
        self._ledger.names.opened(self.name, self.term.epoch)

    # ── the steward ──────────────────────────────────────────────────────────────────────────────────────────────────

    def take_stewardship(self) -> bool:
        """Become the steward, if the pool has none that lives; return whether this process is it.

        A lost term stays lost: the stewardship that used it does not act again. Raises LedgerError.
        """
        since = self.term.now()
        self._ledger.names.renew(self._client_id, self.spec.lease_seconds, self._count())
        epoch = self._ledger.stewards.take(self.name, self._client_id)
        if epoch is not None:
            term = StewardTerm(self.spec.lease_seconds, self.renew) if self.term.is_lost else self.term
            term.begin(epoch, since)
            self.term = term
        return epoch is not None

    def steward(self) -> Owner | None:
        """Return the process that keeps the pool; None if there is none, or it is this one. Raises LedgerError."""
        row = self._ledger.names.named(self.name)
        if row is None or row.steward in ("", self._client_id):
            return None
        return next((one.owner for one in self._ledger.names.clients(row.pool_id) if one.id == row.steward), None)

    def release_stewardship(self) -> None:
        """Let another process become the steward.

        If the ledger does not answer, it still names this process. Then a later renewal takes the pool again.
        """
        epoch = self.term.epoch
        if self.term.lose() and epoch is not None:
            try:
                self._ledger.stewards.release(self.name, self._client_id, epoch)
            except LedgerError as error:
                self.log(logging.WARNING, "the ledger does not know yet that %r has no steward: %s", self.name, error)

    def begin_to_end(self) -> None:
        """Record that this process, the steward, ends the pool at one of its limits. A process that opens the name
        waits.

        `release_stewardship` comes next. Raises NotSteward if another process keeps the pool, and LedgerError if that
        is not certain and the ledger does not answer. If this process is certainly the steward, it ends the pool
        without the ledger too.
        """
        self.term.check()
        epoch = self.term.epoch
        assert epoch is not None
        try:
            self._ledger.stewards.close(self.name, self._client_id, epoch)
        except NotSteward:
            raise
        except LedgerError as error:
            self.term.check()
            words = "the ledger does not know that the pool %r ends: a process may still attach to it: %s"
            self.log(logging.WARNING, words, self.name, error)
        self._is_ending = True
        self.settle_the_silent()

    # ── leave ────────────────────────────────────────────────────────────────────────────────────────────────────────

    def is_last(self) -> bool:
        """Whether no other process uses the pool, at this moment. Raises LedgerError.

        After an outage of the ledger this waits until others had time to renew their rows, at most RENEW_SECONDS.
        """
        self._let_others_renew()
        return self._ledger.names.is_last(self.name, self._client_id)

    def _let_others_renew(self) -> None:
        """Wait while no other process has renewed its row, and some may still do so, because the ledger has just come
        back.

        If this process is killed meanwhile, or the ledger is gone again, the pool is unchanged.
        """
        self._let_those_in_doubt_renew()
        for pause in POLLS.pauses():
            now = self.term.now()
            gap = self._contact.gap(now)
            if gap is None or not self._ledger.names.may_come_back(self.name, self._client_id, now - gap.began):
                return
            self._contact.answered(now)
            time.sleep(pause)

    def _let_those_in_doubt_renew(self) -> None:
        """Wait at most RENEWAL_SECONDS while the clock of the ledger's server says of clients that they are silent, and
        that of this computer does not.
        """
        silent, began = self._ledger.names.in_doubt(self.name, self._client_id), time.monotonic()
        for pause in POLLS.pauses():
            if not silent or time.monotonic() - began > RENEWAL_SECONDS:
                return
            time.sleep(pause)
            silent &= self._ledger.names.in_doubt(self.name, self._client_id)

    @property
    def keep_warm(self) -> float:
        """For how many seconds the last process keeps the pool warm; `skyward warm` may have changed it.

        Raises LedgerError.
        """
        row = self._ledger.names.named(self.name)
        return self.spec.keep_warm if row is None else row.keep_warm_seconds

    @property
    def mark(self) -> str:
        """The mark that this process leaves on the nodes before it leaves the pool."""
        return self._client_id

    def leave(self, *, may_be_warm: bool = True, warm_seconds: float = math.inf) -> NameState | None:
        """Record that this process leaves; return what the pool is now (`Names.leave`).

        After CLOSING this process ends the pool, then calls `left`; before that, each call returns CLOSING again. Waits
        as `is_last` does. Raises LedgerError.
        """
        if self._must_end:
            return NameState.CLOSING
        self._let_others_renew()
        state = self._ledger.names.leave(
            self.name, self._client_id, self._count(), may_be_warm=may_be_warm, warm_seconds=warm_seconds
        )
        self._must_end = state is NameState.CLOSING
        if not self._must_end:
            self._renewal.end()
        return state

    def end_pool(self, pool_id: str) -> None:
        """End the machines, after CLOSING. Raises what `cleanup.release.release` raises."""
        self._release(self._ledger, pool_id, "the last process that used it has left")

    def leave_unfinished(self, error: BaseException) -> None:
        """Stop renewing this process's row, because leaving has failed with this error. Raises nothing. If the ledger
        answers, the row is removed at once; otherwise its lease expires.
        """
        self.has_failed_to_leave = True
        self.term.lose()
        self._renewal.end()
        if not isinstance(error, LedgerError):
            try:
                self._ledger.names.leave_unfinished(self.name, self._client_id, self._count())
            except LedgerError as trouble:
                self.log(logging.WARNING, "the ledger does not know yet that %r was left: %s", self.name, trouble)

    def extend(self, pool_id: str, seconds: float) -> None:
        """Let the pool live for so many seconds in the ledger. Raises LeaseLost and LedgerError."""
        self._ledger.renew(pool_id, self._ledger.names.now() + timedelta(seconds=seconds))

    def report_unreachable(self, pool_id: str) -> bool:
        """Record that the pool could not be reached; return whether the name may be claimed again."""
        self._renewal.end()
        return self._ledger.names.report_unreachable(self.name, pool_id, self._client_id)

    def say_what_stays(self, pool_id: str) -> None:
        """Log what this process leaves running, until when, and its price. Raises nothing."""
        try:
            self.still_running = what_stays(self._ledger, self.name, pool_id)
        except LedgerError as error:
            self.log(logging.DEBUG, "the ledger does not say what stays of the pool %r: %s", self.name, error)
        if self.still_running:
            console.last_log_of(self.spec.display)(logging.INFO, "%s", self.still_running)

    def left(self) -> None:
        """Record that this process does not use the pool any more, and close the connection. Raises nothing.

        If the ledger does not answer, the lease of the client expires there.
        """
        self.term.lose()
        self._renewal.end()
        self._settle_others()
        try:
            if self._client_id:
                self._ledger.names.closed(self._client_id, self._count())
        except LedgerError as error:
            self.log(logging.WARNING, "the ledger does not know yet that %r was left: %s", self.name, error)
        finally:
            self._renewal.join(LEDGER_BUSY_SECONDS)
            self._ledger.close()

    @property
    def ledger(self) -> Ledger:
        """The ledger of the names."""
        return self._ledger

    # ── renewal ──────────────────────────────────────────────────────────────────────────────────────────────────────

    def note_cost(self) -> None:
        """Record how long the calls of this process have held slots, and the pool's cost if this process keeps it.

        Raises LeaseLost and LedgerError.
        """
        self._ledger.names.renew(self._client_id, self.spec.lease_seconds, self._count())
        if self.succession is not None:
            self.succession.note_cost()

    def _settle_others(self) -> None:
        """Settle pools of this computer that have ended themselves, once: with the first renewal, or when this process
        leaves, and not before its first call. Raises nothing.
        """
        may_settle, self._may_settle = self._may_settle, False
        if may_settle:
            from skyward_core.cleanup.pool_record import settle_here

            settle_here(self._ledger)

    def _new_renewal(self) -> PeriodicThread:
        return PeriodicThread("skyward-client", self._beat_seconds, self.renew, self._on_trouble)

    def renew(self) -> None:
        """Renew this process's row, and look who is the steward; the renewal's thread does it every few seconds.

        The ledger may name this process without its knowledge: then an answer to `release_stewardship` or to
        `take_stewardship` was lost. No other process can become the steward, so this one tries again: to take the pool,
        or to release it if it has ended the pool.
        """
        since = self.term.now()
        try:
            self._ledger.names.renew(self._client_id, self.spec.lease_seconds, self._count())
        except LeaseLost:
            self._renewal.end()
            raise
        self._contact.answered(since)
        self._settle_others()
        if self.term.is_held and self._cluster is not None:
            self._end_others(self._cluster, RENEWAL_WAIT_SECONDS)
        found, epoch = self._ledger.stewards.look(self.name, self._client_id)
        if found is Standing.HELD and epoch == self.term.epoch and self.term.is_held:
            self.term.confirm(since)
        elif self._is_ending:
            if found is Standing.HELD:  # the answer of `release_stewardship` was lost
                self._ledger.stewards.release(self.name, self._client_id, epoch)
        elif found is not Standing.HELD and self.term.lose():
            self.on_lost()  # first, even if the other process has already left: the records of this one are old
        elif found is Standing.VACANT or (found is Standing.HELD and not self.term.is_held):
            self.on_vacant()

    def _on_trouble(self, error: BaseException) -> None:
        self.log(logging.WARNING, "this process is not renewed as a client of the pool %r: %s", self.name, error)


def _refusal(name: str, pool_id: str, differences: Mapping[str, tuple[Any, Any]]) -> str:
    fields = "; ".join(f"{field}: it has {theirs!r}, here {ours!r}" for field, (theirs, ours) in differences.items())
    return (
        f"the pool {name!r} ({pool_id}) was opened with other settings: {fields}. Use the same settings, or another"
        " name"
    )


# ── the next steward ──────────────────────────────────────────────────────────────────────────────────────────────────


PAUSES = Backoff(5.0, 120.0)
"""How long a process that could not adopt the pool leaves it to others."""
ADOPT_SECONDS = 60.0
"""How long a process that leaves waits for an adoption that has begun."""


class Successor:
    """Owns the present stewardship of one attached process, and the thread that begins and ends it."""

    def __init__(self, use: NamedUse, new: Callable[[], Stewardship], log: Callable[..., object]) -> None:
        self._use = use
        self._new = new
        self._log = log
        self._changing = threading.Lock()
        """Guards the next three fields."""
        self._work: list[Callable[[], None]] = []
        """What the thread does, and what it does then; empty if there is no thread."""
        self._thread: LoopThread | None = None
        self._is_closing = False
        self._try_at = 0.0
        self._failures = 0
        self.stewardship: Stewardship | None = None
        """The present one; None while another process, or none, keeps the pool."""
        use.on_vacant, use.on_lost = self.take, self.lose

    def look(self) -> None:
        """Start the thread, if it could not be started when there was work for it. Called with each renewal."""
        with self._changing:
            if self._work and self._thread is None:
                self._start()

    def take(self) -> None:
        """Adopt the pool in another thread, unless an adoption is running or has just failed. Does not wait."""
        if time.monotonic() >= self._try_at:
            self._in_thread(self._take, may_be_dropped=True)

    def lose(self) -> None:
        """Another process keeps the pool. Does not wait."""
        self._in_thread(self._lose, may_be_dropped=False)

    @property
    def size(self) -> PoolSize | None:
        """The number of the pool's nodes, if this process keeps it."""
        return None if self.stewardship is None else self.stewardship.size

    def keep_warm(self, seconds: float) -> float | None:
        """Let the nodes live for so long, and pay for it, if this process keeps the pool; return for how many seconds
        they are paid, and None if it does not keep the pool.

        Raises what `Stewardship.keep_warm` raises.
        """
        return None if self.stewardship is None else self.stewardship.keep_warm(seconds)

    def note_cost(self) -> None:
        """Record the cost so far in the ledger, if this process keeps the pool."""
        if (stewardship := self.stewardship) is not None:
            stewardship.note_cost()

    def close(self) -> None:
        """Leave the pool to its next steward. Nothing is adopted after that."""
        with self._changing:
            self._is_closing = True
            thread = self._thread
        if thread is not None:
            thread.join(ADOPT_SECONDS)
        if self.stewardship is not None:
            self.stewardship.leave()
            self.stewardship = None
        self._use.release_stewardship()

    def _in_thread(self, work: Callable[[], None], *, may_be_dropped: bool) -> None:
        with self._changing:
            if self._is_closing or (self._work and may_be_dropped):
                return
            self._work.append(work)
            if self._thread is None:
                self._start()

    def _start(self) -> None:
        # not here, if there is no thread: the renewal, which calls this, must not wait. It calls `look` again
        thread = LoopThread("skyward-adopt", self._run)
        self._thread = thread if thread.start_if_possible() else None

    def _run(self) -> None:
        while True:
            with self._changing:
                if not self._work:
                    self._thread = None
                    return
                work = self._work[0]
            try:
                work()
            except Exception as error:
                self._log(
                    logging.ERROR, "the pool %r could not be left to another process", self._use.name, error=error
                )
            finally:
                with self._changing:
                    self._work.remove(work)

    def _take(self) -> None:
        try:
            if not self._use.take_stewardship():
                return
            stewardship = self._new()
            stewardship.start()
            self._failures = 0
            if self._use.term.is_lost:  # meanwhile
                stewardship.lose()
            else:
                self.stewardship = stewardship
        except Exception as error:  # after any error another process must get its turn
            self._use.release_stewardship()
            self._failures += 1
            self._try_at = time.monotonic() + PAUSES.seconds(self._failures)
            self._log(
                logging.WARNING,
                "the pool %r has no process that replaces its nodes and pays for it, and this one cannot: %s",
                self._use.name,
                error,
            )

    def _lose(self) -> None:
        stewardship, self.stewardship = self.stewardship, None
        if stewardship is not None:
            stewardship.lose()
