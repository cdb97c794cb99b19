"""What an open pool does when a node, its head or the wire goes away.

States of a node, by rank; `turn` moves it on, and looks at who is there rather than at who is said to have come or gone:

    joined ──gone──▶ away ──there again──▶ joined
                      └──REJOIN_SECONDS, or it has ended──▶ vacant ──replaced──▶ joined
                                                             └──not to be had──▶ vacant (tried again later)

    joined ──its machine is to be taken back──▶ leaving ──gone, or retired──▶ vacant

A node that is leaving is given no more calls, and a machine is prepared that will stand in for it. It is retired as soon as that machine is ready and the last
call there has ended, or when its time is up: its workers end, what they still ran is lost with them, and the vacancy is filled with the machine that stands by,
under the same rank. Whatever comes in between (the machine goes early, nobody can be had, the head is lost) is an ordinary loss. The head does not leave: its
notice is told, and it is replaced when it is lost.

The head: connected ──cut──▶ silent ──it answers──▶ connected
                              └──gone, ended, dead, or silent for too long──▶ lost ──restart──▶ connected
                                                                               └──not to be had──▶ lost (tried again later)

Gone is what the provider says, ended what the head has said itself, dead what its machine says: the supervisor's process is not there any more.

A restart asks all nodes at once whether they live. The first that does becomes the head. Where none does and machines answer that their processes have died, as
many are rented anew, all at once; else a machine is rented for the head. What is dead is given back either way.

How long is too long: HEAD_PATIENCE_SECONDS where another node answers, or half the lease if that is less. Where none does, it is rather this client that is
cut off, and all of them live: the lease is waited out, with which the head ends in any case.

A head whose scheduler answers and whose workers stay away (they stand still) has them killed and begun anew by its supervisor; if that brings none back within
HEAD_WORKERS_SECONDS, it is lost.

All of it changes in one thread. What may take minutes (a machine that comes up) runs in a thread of its own and leaves its outcome for the next turn; what the
cluster tells (`joined`, `left`, `cut`) comes in any thread, and only wakes that one.

Nothing here owns a machine: what is rented or given back is `Machines`' business, and when this thread is stopped between two lines the pool's release finds
every machine by its tag.
"""

from __future__ import annotations

import logging
import queue
import threading
import time
from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass
from typing import Protocol

from skyward_core.errors import NodeLost, PoolClosed, SkywardError
from skyward_core.events import ClusterRestarting, Error, InstanceLost, PoolReady, PreemptionNoticed, RebalanceRecommended, SkywardEvent
from skyward_core.instances import Instance, Lease, Node
from skyward_core.worker.notice import Kind, Notice

TICK_SECONDS = 0.25
JOIN_SECONDS = 60.0
REJOIN_SECONDS = 2.0  # a worker process that has crashed is back in one
ROUSE_SECONDS, ROUSE_AGAIN_SECONDS = 2.0, 10.0  # on top of REJOIN_SECONDS and the 14 s after which the scheduler gives a silent worker up: within 20 in all
HEAD_WORKERS_SECONDS = 60.0  # a supervisor that is asked so long to begin them anew does not
HEAD_PATIENCE_SECONDS = 45.0  # a wire that was cut for 30 s, and the tries to connect again
LISTINGS = 2  # in a row without a machine, before a cloud is believed that it is gone; of processes of this machine one is enough
ASK_SECONDS = 2.0
RESUME_SECONDS = 2.0
RESTART_SECONDS = 30.0
FIRST_PAUSE_SECONDS, LONGEST_PAUSE_SECONDS = 2.0, 60.0
NOBODY_LEFT_SECONDS = 300.0
HOLD_SECONDS = 1.0
LOOKS_AT_REST = 2  # in a row without a call: what the last one told is here by then
DIED = "its processes have died"
ANNOUNCED = "its provider had announced to take its machine back (spot notice)"
LATE_SECONDS = 5.0  # for which a machine may outlive the time that its notice has named
ASKING = "skyward-ask"
MAYBE = 1  # call that a node may have left, where nobody knows
_log = logging.getLogger("skyward")


class Machines(Protocol):
    """What recovery needs of `provisioning.lifecycle.Machines`."""

    @property
    def lease(self) -> Lease: ...
    @property
    def scheduler(self) -> str: ...
    def living(self) -> set[str]: ...
    def has_ended(self, rank: int) -> bool: ...
    def is_connected(self, rank: int) -> bool: ...
    def last_words(self, rank: int) -> str: ...
    def notices(self, rank: int) -> tuple[Notice, ...]: ...
    def stand_by(self, rank: int) -> None: ...
    def retire(self, rank: int, instance_id: str) -> None: ...
    def rouse(self, rank: int, workers: Sequence[int]) -> None: ...
    def replace(self, rank: int, is_there: Callable[[], bool]) -> None: ...
    def lives(self, ranks: Collection[int]) -> dict[int, bool]: ...
    def restart(self, heirs: Collection[str], dead: Collection[str]) -> Lease: ...


class Cluster(Protocol):
    """What recovery needs of `cluster.Cluster`."""

    @property
    def slots(self) -> int: ...
    def has(self, rank: int) -> bool: ...
    def missing(self, rank: int) -> list[int]: ...
    def hold(self, rank: int) -> int: ...
    def resume(self, address: str, timeout_seconds: float) -> None: ...
    def restart(self, lease: Lease, address: str, timeout_seconds: float) -> None: ...
    def know(self, lease: Lease) -> None: ...
    def give_up(self, error: SkywardError, rank: int | None = None) -> None: ...


class Aside(Protocol):
    """Runs what may take long in a thread of that name, and does not wait for it."""

    def __call__(self, name: str, work: Callable[[], None], /) -> None: ...


@dataclass(slots=True)
class _Retry:
    """Something that is tried until it succeeds: when next, how long to wait after that, and since when it is wanted."""

    since: float
    try_at: float
    pause: float = FIRST_PAUSE_SECONDS
    is_trying: bool = False

    def put_off(self, now: float) -> None:
        """It has failed: try again later, and each time later than before."""
        self.try_at = now + self.pause
        self.pause = min(self.pause * 2, LONGEST_PAUSE_SECONDS)


@dataclass(slots=True)
class _Silence:
    """The head is out of reach, since when, and in how many listings in a row its provider had it no more.

    `alone_since` is when it fell silent, or when last no other node answered either. `is_dead`: its machine answers, and its processes have died.
    """

    since: float
    alone_since: float
    head: Instance | None
    ask_at: float
    is_asking: bool = False
    is_dead: bool = False
    misses: int = 0

    def take(self, *, is_dead: bool, is_listed: bool | None) -> None:
        """What was asked is answered; None: the provider has not said."""
        self.is_asking, self.is_dead = False, is_dead
        if is_listed is not None:
            self.misses = 0 if is_listed else self.misses + 1

    @property
    def is_gone(self) -> bool:
        """Tell whether the provider is believed that there is no such machine: a cloud may leave one out once."""
        return self.head is not None and self.misses >= (1 if self.head.endpoint is None else LISTINGS)


@dataclass(slots=True)
class _Lost:
    """The head is lost, and why; `trouble` says why the cluster is not up again."""

    retry: _Retry
    trouble: Exception | None = None


@dataclass(slots=True)
class _Leaving:
    """A node whose machine is to be taken back when the clock says `due`: who stands in for it, and how far its calls are."""

    instance_id: str
    due: float
    relief: _Retry
    hold_at: float
    is_relieved: bool = False
    is_asking: bool = False
    looks_at_rest: int = 0
    is_retired: bool = False

    def note(self, left: int) -> None:
        """So many calls are left there, says who was asked."""
        self.is_asking = False
        self.looks_at_rest = 0 if left else self.looks_at_rest + 1

    def take_retired(self, is_retired: bool) -> None:
        """It was asked to end its workers; False: it does not answer."""
        self.is_asking, self.is_retired = False, is_retired


class _Threads:
    """The default `Aside`: owns the threads that it starts, and starts none after `stop`."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._threads: list[threading.Thread] = []
        self._is_stopped = False

    def __call__(self, name: str, work: Callable[[], None], /) -> None:
        thread = threading.Thread(target=work, name=name, daemon=True)
        with self._lock:
            if not self._is_stopped:
                self._threads = [*(other for other in self._threads if other.is_alive()), thread]
                thread.start()

    def stop(self) -> list[threading.Thread]:
        """Start nothing any more; return the threads there are."""
        with self._lock:
            self._is_stopped = True
            return list(self._threads)


class Recovery:
    """Watches the members of an open pool's cluster; `start`, `stop` and `join` belong to the pool. `clock` counts seconds.

    Without `start`, `turn` may be called by whoever has time for it: a test.
    """

    def __init__(
        self,
        machines: Machines,
        cluster: Cluster,
        nodes: int,
        lease_seconds: float,
        emit: Callable[[SkywardEvent], object],
        clock: Callable[[], float] = time.monotonic,
        aside: Aside | None = None,
    ) -> None:
        self._machines = machines
        self._cluster = cluster
        self._ranks = range(nodes)
        self._lease_seconds = lease_seconds
        self._patience = min(HEAD_PATIENCE_SECONDS, lease_seconds / 2)
        self._emit = emit
        self._clock = clock
        self._threads = _Threads()
        self._aside = aside or self._threads
        self._wake = threading.Event()
        self._was_cut = threading.Event()
        self._inbox: queue.SimpleQueue[Callable[[], None]] = queue.SimpleQueue()
        """What was done or asked aside, for the next turn: what is known here changes in one thread alone."""
        self._lost_by: dict[int, float] = {}
        self._rouse_at = 0.0
        self._vacant: dict[int, _Retry] = {}
        self._head: _Silence | _Lost | None = None
        self._told_lost: set[str] = set()
        self._told_notices: set[tuple[str, Kind]] = set()
        self._due: dict[str, float] = {}
        """When machines are to be taken back, by the clock, once they have been told."""
        self._leaving: dict[int, _Leaving] = {}
        self._relieving: set[int] = set()
        """Ranks for which somebody is being prepared to stand by."""
        self._has_given_up = False
        self._closing = threading.Event()
        self._thread = threading.Thread(target=self._run, name="skyward-recovery", daemon=True)

    def start(self) -> None:
        """Begin to watch."""
        self._thread.start()

    def stop(self) -> None:
        """Do nothing more; whoever waits for a machine must be woken by its owner (`Machines.stop`) before `join`."""
        self._closing.set()
        self._threads.stop()
        self._wake.set()

    def join(self) -> None:
        """Wait until nothing is under way any more, but for a question to the provider: that ends when it is answered, and changes nothing.

        A provider that hangs in a launch is not waited for longer than JOIN_SECONDS: the machines that there are must be given back, and what comes
        after that `Machines` gives back itself.
        """
        deadline = time.monotonic() + JOIN_SECONDS
        for thread in (self._thread, *self._threads.stop()):
            if thread.is_alive() and thread is not threading.current_thread() and thread.name != ASKING:
                thread.join(max(0.0, deadline - time.monotonic()))

    # ── what the cluster tells, in any thread ────────────────────────────────────────────────────────────────────────
    # Each only leaves a mark for the next turn, and waits for nothing. They may come late, and of a connection of before: a turn looks for itself who is there.

    def joined(self, rank: int) -> None:
        """All workers of a node are there."""
        self._wake.set()

    def left(self, rank: int) -> None:
        """A worker of a node is gone."""
        self._wake.set()

    def cut(self) -> None:
        """The scheduler is out of reach."""
        self._was_cut.set()
        self._wake.set()

    # ── in the thread of recovery ────────────────────────────────────────────────────────────────────────────────────

    def _run(self) -> None:
        told = ""
        while not self._closing.is_set():
            self._wake.wait(TICK_SECONDS)
            self._wake.clear()
            try:
                self.turn()
            except PoolClosed:
                return
            except Exception as error:  # the next turn tries again; what it says again need not be told four times a second
                _log.debug("a lost node could not be dealt with", exc_info=True)
                if told != repr(error):
                    told = repr(error)
                    self._emit(Error(f"a lost node could not be dealt with: {error!r}"))

    def turn(self) -> None:
        """Look once at the head, at who is there and at the clock, and do what is to be done by now."""
        while not self._inbox.empty():
            self._inbox.get()()
        if self._closing.is_set() or self._has_given_up:
            return
        if self._was_cut.is_set():
            self._was_cut.clear()
            if self._head is None:
                now = self._clock()
                self._head = _Silence(now, now, self._instance_of(0), now)
        if isinstance(self._head, _Silence):
            self._listen(self._head)
        if isinstance(self._head, _Lost):
            self._restart(self._head)
        if self._head is None:
            self._look_around()
            self._heed()
            self._fill()

    # ── nodes ────────────────────────────────────────────────────────────────────────────────────────────────────────

    def _look_around(self) -> None:
        """Compare who should be there with who is."""
        now = self._clock()
        for rank in self._ranks:
            if rank in self._vacant:
                continue
            if self._cluster.has(rank):
                self._lost_by.pop(rank, None)
                continue
            lost_by = self._lost_by.setdefault(rank, now + REJOIN_SECONDS)
            leaving = self._leaving.get(rank)
            is_retired = leaving is not None and leaving.is_retired
            if rank == 0:  # the head is lost when its scheduler is, which answers
                self._mind_workers_of_head(now - lost_by)
            elif now > lost_by or is_retired or self._machines.has_ended(rank):
                del self._lost_by[rank]
                self._leaving.pop(rank, None)
                self._tell_lost(rank, "it was retired" if is_retired else "its worker has left the pool")
                self._vacant[rank] = _Retry(now, now)

    def _mind_workers_of_head(self, overdue_seconds: float) -> None:
        """Workers of the head are away: have them begun anew by and by, for one that stands still is not dead; in the end the head is lost."""
        now = self._clock()
        if overdue_seconds > HEAD_WORKERS_SECONDS:
            self._lose_head(f"its scheduler answers, but its workers have stayed away for {overdue_seconds:.0f} s")
        elif overdue_seconds > ROUSE_SECONDS and now >= self._rouse_at:
            self._rouse_at = now + ROUSE_AGAIN_SECONDS
            missing = self._cluster.missing(0)
            self._emit(Error("the scheduler of node 0 answers, but its workers stay away: they are killed and begun anew", self._id_of(0)))
            self._aside("skyward-rouse-0", lambda: self._rouse(missing))

    def _rouse(self, workers: Sequence[int]) -> None:
        """Aside, for the machine may not answer; then it is tried again."""
        try:
            self._machines.rouse(0, workers)
        except Exception as error:
            _log.debug("the workers of node 0 could not be begun anew: %s", error)

    def _fill(self) -> None:
        """Begin to replace those that are lost."""
        now = self._clock()
        for rank, vacancy in list(self._vacant.items()):
            if vacancy.is_trying or now < vacancy.try_at or rank in self._relieving:
                continue
            vacancy.is_trying = True
            self._aside(f"skyward-replace-{rank}", lambda rank=rank, vacancy=vacancy: self._replace(rank, vacancy))

    def _replace(self, rank: int, vacancy: _Retry) -> None:
        """Try to fill a vacancy. In a thread of its own, for a machine may take minutes to come up."""
        failure: Exception | None = None
        try:
            if not self._cluster.has(rank):  # else it has come back by itself
                self._machines.replace(rank, lambda: self._is_there(rank))
        except Exception as error:
            failure = error
        self._post(lambda: self._take_in(rank, vacancy, failure))

    def _post(self, news: Callable[[], None]) -> None:
        """Have the next turn begin with it; from any thread."""
        self._inbox.put(news)
        self._wake.set()

    def _is_there(self, rank: int) -> bool:
        self._cluster.know(self._machines.lease)
        return self._cluster.has(rank) or self._closing.is_set()

    def _take_in(self, rank: int, vacancy: _Retry, failure: Exception | None) -> None:
        """A try to fill a vacancy has ended."""
        vacancy.is_trying = False
        if failure is None:
            del self._vacant[rank]
            return
        if self._closing.is_set() or self._has_given_up or isinstance(failure, PoolClosed):
            return
        self._emit(Error(f"no node in the place of node {rank} yet: {failure}"))
        self._cluster.give_up(_lost(f"node {rank} is lost and not replaced: {failure}", failure), rank)
        vacancy.put_off(self._clock())  # without end: while the head lives somebody works, and without its workers it is lost

    def _give_up(self, message: str, cause: Exception) -> None:
        """Nobody is left: all calls raise, and no machine is rented any more for which there would be nothing to do."""
        self._has_given_up = True
        self._cluster.give_up(_lost(message, cause))

    # ── nodes whose machines are to be taken back ────────────────────────────────────────────────────────────────────

    def _heed(self) -> None:
        """Take in what machines were told, and go on with the nodes that are leaving."""
        for rank in self._ranks:
            if rank not in self._vacant and self._cluster.has(rank):
                for notice in self._machines.notices(rank):
                    self._take_notice(rank, notice)
        for rank, leaving in list(self._leaving.items()):
            if self._id_of(rank) != leaving.instance_id:
                del self._leaving[rank]
            else:
                self._relieve(rank, leaving)
                self._see_off(rank, leaving)

    def _take_notice(self, rank: int, notice: Notice) -> None:
        """Tell of a notice, once for each machine; from then on its node is leaving, also if it was away in between."""
        machine = self._id_of(rank)
        if machine is None:
            return
        now, is_new = self._clock(), (machine, notice.kind) not in self._told_notices
        self._told_notices.add((machine, notice.kind))
        if notice.kind is Kind.REBALANCE:
            if is_new:
                self._emit(RebalanceRecommended(machine, rank, notice.at))
            return
        if is_new:
            self._due[machine] = now + notice.seconds_left
            self._emit(PreemptionNoticed(machine, rank, notice.action, notice.at, notice.seconds_left))
        if rank and rank not in self._leaving:
            self._leaving[rank] = _Leaving(machine, self._due[machine], _Retry(now, now), now)

    def _relieve(self, rank: int, leaving: _Leaving) -> None:
        """Have a machine prepared that stands by; not again when there is no time left for it."""
        if leaving.is_relieved or rank in self._relieving or not leaving.relief.try_at <= self._clock() <= leaving.due:
            return

        def stand_by() -> None:
            failure: Exception | None = None
            try:
                self._machines.stand_by(rank)
            except Exception as error:
                failure = error
            self._post(lambda: self._take_relief(rank, leaving, failure))

        self._relieving.add(rank)
        self._aside(f"skyward-relieve-{rank}", stand_by)

    def _take_relief(self, rank: int, leaving: _Leaving, failure: Exception | None) -> None:
        """A try to have somebody stand by has ended."""
        self._relieving.discard(rank)
        leaving.is_relieved = failure is None
        if failure is None or self._closing.is_set() or self._has_given_up or isinstance(failure, PoolClosed):
            return
        self._emit(Error(f"nobody stands by for node {rank}, which is to be taken back, yet: {failure}"))
        leaving.relief.put_off(self._clock())

    def _see_off(self, rank: int, leaving: _Leaving) -> None:
        """Give a node no more calls, and retire it when the time has come."""
        now = self._clock()
        if leaving.is_retired or leaving.is_asking or now < leaving.hold_at:
            return
        leaving.is_asking, leaving.hold_at = True, now + HOLD_SECONDS
        if now > leaving.due + LATE_SECONDS or (leaving.is_relieved and leaving.looks_at_rest >= LOOKS_AT_REST):
            leaving.is_retired = True
            self._aside(f"skyward-retire-{rank}", lambda: self._retire(rank, leaving))
        else:
            self._aside(ASKING, lambda: self._hold(rank, leaving))

    def _hold(self, rank: int, leaving: _Leaving) -> None:
        """Aside, for the scheduler may not answer; asked again and again, for a worker that comes anew is free."""
        left = MAYBE
        try:
            left = self._cluster.hold(rank)
        except Exception as error:
            _log.debug("node %d could not be held: %s", rank, error)
        self._post(lambda: leaving.note(left))

    def _retire(self, rank: int, leaving: _Leaving) -> None:
        """Aside, for a machine may not answer; then it is tried again."""
        is_retired = True
        try:
            self._machines.retire(rank, leaving.instance_id)
        except Exception as error:
            _log.debug("node %d could not be retired: %s", rank, error)
            is_retired = False
        self._post(lambda: leaving.take_retired(is_retired))

    # ── the head ─────────────────────────────────────────────────────────────────────────────────────────────────────

    def _listen(self, silence: _Silence) -> None:
        """The scheduler is out of reach: wait for it while it may live."""
        reason = self._why_lost(silence)
        if reason:
            self._lose_head(reason)
        elif self._resumed():
            self._head = None
            self._lost_by.clear()  # who is not there has as long as ever to come back

    def _lose_head(self, reason: str) -> None:
        self._tell_lost(0, reason)
        self._emit(ClusterRestarting(reason))
        now = self._clock()
        self._head = _Lost(_Retry(now, now))

    def _why_lost(self, silence: _Silence) -> str:
        self._ask(silence)
        now = self._clock()
        if not self._hears_anybody():
            silence.alone_since = now
        silent_seconds = now - silence.since
        is_too_long = now - silence.alone_since > self._patience or silent_seconds > self._lease_seconds
        if self._machines.has_ended(0):
            return "it has ended"
        if silence.is_dead:
            return DIED
        if silence.is_gone:
            return "its provider lists it no more"
        return f"it has been silent for {silent_seconds:.0f} s" if is_too_long else ""

    def _hears_anybody(self) -> bool:
        """Tell whether any node answers. Those that fell silent with the head are taken to answer until their connection is known to be gone."""
        return any(self._machines.is_connected(node.rank) for node in self._machines.lease.nodes)

    def _ask(self, silence: _Silence) -> None:
        """Ask the head's machine now and then whether its processes live, and its provider whether it exists.

        Aside, for an answer may take as long as the machine is silent; an outage says nothing.
        """
        now, head = self._clock(), silence.head
        if silence.is_asking or now < silence.ask_at or head is None:
            return

        def ask() -> None:
            is_dead, is_listed = False, None
            try:
                is_dead = self._machines.lives([0]).get(0) is False
                is_listed = is_dead or head.id in self._machines.living()
            except Exception as error:
                _log.debug("the provider does not say whether the head exists: %s", error)
            self._post(lambda: silence.take(is_dead=is_dead, is_listed=is_listed))

        silence.is_asking, silence.ask_at = True, now + ASK_SECONDS
        self._aside(ASKING, ask)

    def _resumed(self) -> bool:
        if not self._machines.is_connected(0):
            return False
        try:
            self._cluster.resume(self._machines.scheduler, RESUME_SECONDS)
        except (SkywardError, OSError):
            return False
        return True

    def _restart(self, lost: _Lost) -> None:
        """Try to bring the cluster up with another head."""
        if self._clock() < lost.retry.try_at:
            return
        if lost.trouble is not None:  # the head that was to be: `Machines.restart` gives it back
            self._tell_lost(0, f"the cluster did not come up on it: {lost.trouble}")
        before = [node for node in self._machines.lease.nodes if node.rank not in self._vacant]
        heirs, dead = self._who_is_left(before)
        try:
            lease = self._machines.restart(heirs, dead)
            self._cluster.restart(lease, self._machines.scheduler, RESTART_SECONDS)
        except PoolClosed:
            raise
        except Exception as error:
            self._on_no_restart(lost, error)
        else:
            self._head = None
            self._renumber(lease)
            self._emit(PoolReady(lease.pool_id, len(lease.nodes), self._cluster.slots, self._clock() - lost.retry.since))
        self._tell_dropped(before, dead)

    def _on_no_restart(self, lost: _Lost, error: Exception) -> None:
        if self._closing.is_set():
            return
        self._emit(Error(f"the cluster could not come up anew yet: {error}"))
        now = self._clock()
        if now - lost.retry.since > NOBODY_LEFT_SECONDS:
            self._give_up(f"the head of the pool is lost, and the cluster could not come up anew: {error}", error)
        lost.trouble = error
        lost.retry.put_off(now)

    def _renumber(self, lease: Lease) -> None:
        """Take note of who is left, and under which rank: what is vacant is to be replaced, the others have some time to come over to the new head."""
        now, there = self._clock(), {node.rank for node in lease.nodes}
        self._lost_by = {rank: now + RESTART_SECONDS for rank in self._ranks if rank in there}
        for rank in self._ranks:
            if rank not in there:
                self._vacant.setdefault(rank, _Retry(now, now))

    def _who_is_left(self, nodes: Sequence[Node]) -> tuple[list[str], list[str]]:
        """Ask all nodes whether they live; return the ids of those that may become the head, and of those whose processes have died under a living machine.

        Nodes that do not say are believed to live only where nobody else answers, neither yes nor no: waiting for one of them in vain takes its time.
        """
        answers = self._machines.lives([node.rank for node in nodes])
        dead = [node.instance.id for node in nodes if answers.get(node.rank) is False]
        fit = [node for node in nodes if node.rank and node.rank not in self._leaving and not self._machines.has_ended(node.rank)]
        heirs = [node for node in fit if answers.get(node.rank) is True]
        if not heirs and not dead:
            heirs = [node for node in fit if self._machines.is_connected(node.rank)]
        return [node.instance.id for node in heirs], dead

    # ── what is told ─────────────────────────────────────────────────────────────────────────────────────────────────

    def _tell_lost(self, rank: int, reason: str) -> None:
        """Tell that the node of a rank is lost, with its own last words; once for each instance."""
        node = next((node for node in self._machines.lease.nodes if node.rank == rank), None)
        if node is None or node.instance.id in self._told_lost:
            return
        self._told_lost.add(node.instance.id)
        words = self._machines.last_words(rank)
        told = f"{reason} ({words})" if words else reason
        self._emit(InstanceLost(node.instance.id, rank, f"{told}; {ANNOUNCED}" if node.instance.id in self._due else told))

    def _tell_dropped(self, before: Sequence[Node], dead: Collection[str]) -> None:
        """Tell of nodes that were lost while the cluster came up anew."""
        left = {node.instance.id for node in self._machines.lease.nodes}
        for node in before:
            if node.instance.id not in left | self._told_lost:
                self._told_lost.add(node.instance.id)
                reason = DIED if node.instance.id in dead else "it could not be told of the new head"
                self._emit(InstanceLost(node.instance.id, node.rank, reason))

    def _id_of(self, rank: int) -> str | None:
        instance = self._instance_of(rank)
        return instance.id if instance is not None else None

    def _instance_of(self, rank: int) -> Instance | None:
        return next((node.instance for node in self._machines.lease.nodes if node.rank == rank), None)


def _lost(message: str, cause: BaseException) -> NodeLost:
    error = NodeLost(message)
    error.__cause__ = cause
    return error
