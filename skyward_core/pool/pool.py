"""`ComputePool`: machines with a Dask cluster on them, as a context manager.

States: new -> opening -> open -> closing -> closed. `open` and `close` are the only ways between them; `close` may be
called in any state and twice. If opening fails, `PoolMachines.acquire` has ended what was rented; afterwards `close`
does. If this process is killed, the reaper does; it is started before anything is rented (docs/decisions/0008).

A pool belongs to the process that has opened it. In a fork of that process it raises PoolClosed when it is used;
closing or collecting it there does nothing.
"""

from __future__ import annotations

import inspect
import os
import threading
import warnings
import weakref
from collections.abc import Callable, Iterable, Mapping, Sequence
from decimal import Decimal
from pathlib import Path
from types import TracebackType
from typing import TYPE_CHECKING, Any, ClassVar, NoReturn, Self, Unpack, cast

from skyward_core.compute import ComputeFunction, PendingBatch, PendingCompute
from skyward_core.concurrency.greenlets import refuse_greenlets
from skyward_core.engine.futures import CallFuture
from skyward_core.errors import BadRequest, InstancesLeft, NotPicklable, PoolClosed, SkywardError
from skyward_core.events import console
from skyward_core.events.events import Callback, CostFinal, compose, registered_callback
from skyward_core.events.queue import EventQueue
from skyward_core.machines.instances import Lease
from skyward_core.machines.signing import signed, verify
from skyward_core.pool.calls import checked, mapped_calls, results_of
from skyward_core.pool.preparation import Prepared, prepare
from skyward_core.providers.base import Provider
from skyward_core.providers.local import Local
from skyward_core.serialization import pickling
from skyward_core.session.attached import Attached, DetachedCall
from skyward_core.session.session import Session
from skyward_core.spec import LONGEST_SECONDS, PoolSpec, Wishes, signature
from skyward_core.work import NO_WORK, Work
from skyward_core.worker.masking import SecretValues

if TYPE_CHECKING:
    import distributed

    from skyward_core.engine.cluster import Cluster


class ComputePool:
    """Machines for as long as a `with` block lasts.

    Takes the fields of `PoolSpec` as keywords, `on_event`, a callback for every event, and `work`, what the machines
    are for: the ledger, the receipt and the machines' tags say so. Nothing is asked of the provider before `with` (or
    `open`). Wrong wishes raise BadRequest right here.

        with ComputePool(accelerator="A100", image=Image(pip=["torch"])) as pool:
            result = train(data) >> pool
    """

    __signature__: ClassVar = signature(
        inspect.Parameter("on_event", inspect.Parameter.KEYWORD_ONLY, default=None, annotation=Callback | None),
        inspect.Parameter("work", inspect.Parameter.KEYWORD_ONLY, default=NO_WORK, annotation=Work),
    )

    def __init__(self, *, on_event: Callback | None = None, work: Work = NO_WORK, **wishes: Unpack[Wishes]) -> None:
        self._reset(prepare(PoolSpec.of(**wishes), on_event=on_event, work=work))

    @classmethod
    def from_spec(
        cls,
        spec: PoolSpec,
        *,
        on_event: Callback | None = None,
        credentials: Provider | Sequence[Provider] | None = None,
        secrets: Mapping[str, str] | None = None,
        replace_object: pickling.Replace | None = None,
        work: Work = NO_WORK,
    ) -> Self:
        """Make a pool from a spec. `credentials` is the provider, or all of them, with secrets from the caller's own
        store; the spec's hold none.

        `secrets` are values from that store for names of the spec's `secrets`; the others are read from the environment
        when the pool opens. `work` is what the machines are for. `replace_object` may exchange objects on their way
        into a pickle (see `pickling.dumps`).
        """
        secrets = SecretValues(secrets or {})  # what reports errors may show this frame
        pool = cls.__new__(cls)
        pool._reset(
            prepare(
                spec,
                credentials=credentials,
                on_event=on_event,
                replace_object=replace_object,
                work=work,
                secrets=secrets,
            )
        )
        return pool

    def _reset(self, prepared: Prepared) -> None:
        """Make this a pool that was never opened."""
        self._prepared = prepared
        self._id = ""
        self._opening = threading.RLock()
        self._open: Session | Attached | None = None
        self._process = 0
        """The process that has opened it."""
        self._was_opened = False
        self._terminations = 0
        """How often `terminate_now` was called."""
        self._final: CostFinal | None = None
        self._unconfirmed: InstancesLeft | None = None
        self._receipt: Mapping[str, Any] | None = None
        self._why_ended: SkywardError | None = None
        self._finalizer: weakref.finalize[Any, ComputePool] | None = None

    @classmethod
    def attach(
        cls,
        lease: Lease | Mapping[str, Any] | str,
        *,
        key: str | Path | None = None,
        on_event: Callback | None = None,
        retries: int = 3,
        lease_seconds: float = 120.0,
        timeout_seconds: float = 60.0,
        is_trusted: bool = False,
    ) -> Self:
        """Use a pool that another process has opened, from its `lease` (or the JSON of it); several may at once.
        Returns it open, for `with` or `close`.

        Closing it leaves the pool as it is. As long as it is open it keeps the nodes' lease, `lease_seconds` ahead.
        `key` is the path of the SSH key that the nodes know, if it is not where it was for the opener, or its text,
        which is kept in memory alone.
        The lease is verified before anything in it is followed: the folder of a node of this machine must be this
        user's alone, and a lease that leads to other machines must be signed with this user's key (SKYWARD_LEASE_KEY,
        `signing.py`), unless `is_trusted` says that no other user could have altered it. Raises Unreachable,
        CredentialsError or HostKeyChanged, and NodeLost if the scheduler that the lease names is gone.
        """
        refuse_greenlets()
        claim = _read_lease(lease, is_trusted=is_trusted)
        spec = PoolSpec.of(
            nodes=max(1, len(claim.nodes)), display="quiet", retries=retries, lease_seconds=lease_seconds
        )
        pool = cls.__new__(cls)
        pool._reset(Prepared(spec, (Local(),), on_event=on_event))
        attached = _attach(claim, None if key is None else str(key), spec, on_event, timeout_seconds)
        pool._was_opened = True
        pool._open = attached
        pool._process = os.getpid()
        pool._finalizer = weakref.finalize(pool, _left, attached, pool._process)
        return pool

    # ── life ─────────────────────────────────────────────────────────────────────────────────────────────────────────

    def open(self) -> Self:
        """Rent and prepare the machines; what `with` does. Returns the pool. A closed pool may be opened again: new
        machines, a new bill.

        Raises NoCapacity, BootstrapFailed, ProvisioningTimeout or what the provider raises; then nothing is left
        running. PoolClosed if it has ended, and must be closed first. BadRequest in a process that gevent or eventlet
        has patched.
        """
        self._raise_in_a_fork()
        refuse_greenlets()
        terminations = self._terminations
        opened: Session | None = None
        try:
            with self._opening:
                if isinstance(self._open, Session) and not self._open.is_running:
                    raise PoolClosed(
                        "the pool has ended, and closing it has not succeeded yet: close it, and open it then"
                    )
                if self._open is None:
                    prepared = self._prepared
                    secrets = prepared.read_secrets()
                    self._was_opened = True
                    self._final = self._receipt = self._why_ended = self._unconfirmed = None
                    self._process = os.getpid()
                    self._open = opened = Session(
                        prepared.spec, prepared.providers, prepared.on_event, prepared.work, secrets
                    )
                    self._start(opened, terminations)
        finally:
            if opened is not None:
                self._flush(opened)
        return self

    def _start(self, opened: Session, terminations: int) -> None:
        self._id = opened.pool_id
        if self._terminations != terminations:  # by a signal handler, before there was a session
            opened.terminate_now()
        self._prepared.log_provider()
        try:
            opened.start()
        except BaseException:
            self._open = None
            opened.stop("the pool could not be opened")
            self._final, self._receipt = opened.final, opened.receipt
            raise
        self._finalizer = weakref.finalize(self, _collected, opened)
        self._finalizer.atexit = False

    def _flush(self, opened: Session) -> None:
        """Wait for the callbacks, without the lock: one of them may be closing the pool.

        If that is interrupted, no other code closes it: no block has begun.
        """
        try:
            opened.events.flush()
        except BaseException as error:
            self.__exit__(type(error), error, error.__traceback__)
            raise

    def close(self) -> None:
        """Give the machines back and make sure that they are gone. Calls that still run are stopped. May be called
        twice, from any thread.

        Raises InstancesLeft if some could not be confirmed gone, unless they cost nothing and end themselves (`Hosts`
        without a price): then there is a warning and an `InstancesUnconfirmed` event, and `unconfirmed` names them.
        Raises LedgerError if the ledger could not be written: then the reaper tries that for two minutes, and
        closing again tries it at once. In a fork of the process that has opened the pool it does nothing.
        """
        if self._is_in_a_fork:
            return
        opened = self._open
        try:
            with self._opening:
                self._close()
        finally:
            if opened is not None:
                opened.events.flush()  # without the lock: a callback may be closing the pool too

    def _close(self) -> None:
        opened = self._open
        if opened is None:
            return
        try:
            opened.stop("the pool was closed")
            opened.release()
        finally:
            self._final, self._receipt, self._why_ended = opened.final, opened.receipt, opened.why_ended
            self._unconfirmed = opened.unconfirmed if isinstance(opened, Session) else None
        self._open = None  # only now: after an interrupt, InstancesLeft or LedgerError, closing again tries again
        if self._finalizer is not None:
            self._finalizer.detach()
            self._finalizer = None

    def hand_over(self) -> InstancesLeft | None:
        """Close; what cannot be confirmed gone is left to the pool's reaper, and returned in place of being raised.
        None if all is gone.

        For whoever runs the work of others, such as an orchestrator's step: its result, or its own exception, must not
        be lost for that. The machines may be billed still: tell of them. There is an `InstancesUnconfirmed` event,
        their entries in the ledger stay open, and `skyward sweep` asks again.
        """
        opened = self._open
        try:
            self.close()
        except InstancesLeft as error:
            if not isinstance(opened, Session):
                raise
            opened.hand_over(error)
            self._unconfirmed = error
            self.close()
        return self._unconfirmed

    def terminate_now(self) -> None:
        """Hand the ending of the machines to the reaper and return at once, in well under a second; for kill hooks and
        signal handlers.

        Waits for nothing and raises nothing. Calls fail as their machines go. `close` may follow, and says whether all
        are gone; it need not. A pool that is about to open rents nothing more, and `open` raises. In a fork of the
        process that has opened the pool it does nothing.
        """
        self._terminations += 1
        opened = self._open
        if isinstance(opened, Session):
            opened.terminate_now()

    def __enter__(self) -> Self:
        return self.open()

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        """Close.

        An exception of the block is never hidden by machines that could not be confirmed gone: it has a note of them
        then.
        """
        if error is None:
            self.close()
        elif (left := self.hand_over()) is not None:
            error.add_note(f"besides, machines are not confirmed gone: {left}")

    # ── calls ────────────────────────────────────────────────────────────────────────────────────────────────────────

    def submit[R](self, pending: PendingCompute[R]) -> CallFuture[R]:
        """Hand a call over and return at once; `.result()` waits, `.cancel()` stops it even while it runs, `.seconds`
        and `.cost` have its duration and cost.
        """
        return cast("CallFuture[R]", self._cluster.submit([checked(pending)], self._prepared.replace_object)[0])

    def submit_all[R](self, calls: Iterable[PendingCompute[R]]) -> list[CallFuture[R]]:
        """Hand many calls over at once; returns their futures, in order.

        Quicker than one by one: a function that they share is pickled once.
        """
        return cast(
            "list[CallFuture[R]]",
            self._cluster.submit([checked(pending) for pending in calls], self._prepared.replace_object),
        )

    def run[R](self, pending: PendingCompute[R]) -> R:
        """Run one call on the first free worker and return its result.

        Its own exception is raised here, with its remote traceback as the cause.
        """
        return cast(
            "R", results_of(self._cluster.submit([checked(pending)], self._prepared.replace_object, is_awaited=True))[0]
        )

    def run_batch(self, batch: PendingBatch[*tuple[Any, ...]]) -> tuple[Any, ...]:
        """Run the calls in parallel; return their results in order.

        On the first error the others are cancelled and it is raised.
        """
        return cast(
            "tuple[Any, ...]",
            results_of(self._cluster.submit([*batch.calls], self._prepared.replace_object, is_awaited=True), tuple),
        )

    def broadcast[R](self, pending: PendingCompute[R]) -> tuple[R, ...]:
        """Run the call on all workers at once; return the results in the order of nodes and workers."""
        return cast(
            "tuple[R, ...]", results_of(self._cluster.broadcast(checked(pending), self._prepared.replace_object), tuple)
        )

    def map[R](self, fn: Callable[..., R] | ComputeFunction[..., R], *iterables: Iterable[Any]) -> list[R]:
        """Run `fn(a, b, ...)` for the items of the iterables taken together; return the results in order. `fn` need not
        be decorated.

        The iterables must have the same length: BadRequest otherwise, before anything runs; and TypeError for as many
        as the function does not take.
        """
        calls = mapped_calls(fn, iterables)
        return cast("list[R]", results_of(self._cluster.submit(calls, self._prepared.replace_object, is_awaited=True)))

    def start_detached[R](self, pending: PendingCompute[R]) -> DetachedCall[R]:
        """Hand a call over that goes on when this process dies; return what is known of it. Its `call_id` finds it
        again, from any attached process.

        It lives, with its result, as long as the pool does: until the pool is closed, or the lease of its nodes runs
        out (`lease_seconds` after the last sign of life from a client). Arguments travel whole; large ones are better
        read by the call itself.
        """
        cluster = self._cluster
        if isinstance(self._open, Session):
            self._open.live_by_lease()
        return DetachedCall(
            cluster.start_detached(checked(pending), self._prepared.replace_object), lambda: self._cluster
        )

    def detached_call(self, call_id: str) -> DetachedCall[Any]:
        """Return the call of this id that was started detached, here or elsewhere.

        Raises BadRequest if the pool knows none.
        """
        self._cluster.detached_call(call_id)
        return DetachedCall(call_id, lambda: self._cluster)

    def detached_calls(self) -> list[DetachedCall[Any]]:
        """Return all calls that were started detached and not forgotten, in the order in which they came."""
        return [DetachedCall(str(known["call_id"]), lambda: self._cluster) for known in self._cluster.detached_calls()]

    def detach(self, lease_seconds: float | None = None) -> Lease:
        """Leave the pool running, for `lease_seconds` (at least the spec's) from now; return its lease, for `attach`.
        This object is closed then.

        An attached process keeps it alive for longer. When the lease runs out the nodes end themselves, and `skyward
        sweep` ends what does not. Calls that were not started detached are given up. `cost` is what was spent so far;
        the ledger goes on counting, and has the whole bill once the pool is ended. The account of a pool with a budget
        pays for the whole lease now: BudgetExceeded says what is left if it cannot. With `max_cost` the lease ends when
        that is used up. Raises Unreachable if a node cannot be reached, and LedgerError. After an error the pool is
        open as before.
        """
        self._raise_in_a_fork()
        if lease_seconds is not None and not 0 < lease_seconds <= LONGEST_SECONDS:
            raise BadRequest(
                f"lease_seconds={lease_seconds!r}: write the seconds that nodes may live on without a sign of life, at"
                f" most {LONGEST_SECONDS:.0f}"
            )
        with self._opening:
            opened = self._open
            if not isinstance(opened, Session):
                raise PoolClosed(self._why_closed() if opened is None else "an attached pool is left by closing it")
            lease = signed(opened.detach(self._prepared.spec.lease_seconds if lease_seconds is None else lease_seconds))
            self._final = opened.final
            self._open = None
            if self._finalizer is not None:
                self._finalizer.detach()
                self._finalizer = None
        opened.events.flush()
        return lease

    def dask_client(self) -> distributed.Client:
        """Return a Dask client of the pool's cluster, for Dask collections and everything that takes one: the same one
        as long as it is open.

        It has a connection of its own, which Dask makes again if it breaks, and ends with the pool. It is not Dask's
        current client: `client.as_current()` makes it that within a `with`. When the head of the pool was lost its
        futures are cancelled, and this returns another client, of the new head. Raises NodeLost while the scheduler is
        out of reach: try again.
        """
        _, opened = self._cluster, self._open
        if opened is None or opened.user_client is None:
            raise PoolClosed(self._why_closed())
        return opened.user_client.get()

    # ── what it is ───────────────────────────────────────────────────────────────────────────────────────────────────

    @property
    def spec(self) -> PoolSpec:
        """What was asked for, settings included."""
        return self._prepared.spec

    @property
    def id(self) -> str:
        """The pool's id, by which the ledger, `skyward receipt` and the machines' tags know it: that of the last
        opening, "" before the first.
        """
        return self._open.lease.pool_id if isinstance(self._open, Attached) else self._id

    @property
    def work(self) -> Work:
        """What the machines are for, as it was given."""
        return self._prepared.work

    @property
    def is_active(self) -> bool:
        """True while the pool is open, in the process that has opened it."""
        return self._open is not None and self._open.is_running and not self._is_in_a_fork

    @property
    def instance_count(self) -> int:
        """Number of machines of the open pool; 0 while it is not open."""
        return len(self._open.lease.nodes) if self._open is not None and self._open.lease is not None else 0

    @property
    def lease(self) -> Lease:
        """The written claim on the machines. Raises PoolClosed while there is none."""
        if self._open is None or self._open.lease is None:
            raise PoolClosed(self._why_closed())
        return signed(self._open.lease)

    def __reduce__(self) -> NoReturn:
        """Refuse to be pickled: a copy in another process could not end the pool's machines."""
        raise NotPicklable(
            "a pool belongs to the process that has opened it and cannot be pickled: pass `pool.lease` to the other"
            " process, and call sky.ComputePool.attach(lease) there"
        )

    @property
    def cost(self) -> float:
        """USD spent so far; after the end the whole bill."""
        if self._final is not None:
            return self._final.total_cost
        return self._open.meter.update().accumulated_cost if isinstance(self._open, Session) else 0.0

    def share_cost(self, shares: Mapping[Work, float]) -> None:
        """Say what parts of the cost, in USD, are for: where several tasks use one pool, `skyward cost --by task`
        counts each with its own.

        Takes the place of what was said before; what no share takes is for the pool's own work. Allowed after the end.
        Raises LedgerError, and PoolClosed for a pool that was never opened.
        """
        if not self._id:
            raise PoolClosed(self._why_closed())
        # SQLAlchemy is not loaded by those who only describe pools
        from skyward_core.ledger.ledger import Ledger, default_url

        with Ledger(default_url()) as ledger:
            ledger.set_shares(self._id, {work: Decimal(repr(float(usd))) for work, usd in shares.items()})

    @property
    def receipt(self) -> Mapping[str, Any] | None:
        """Once the pool has ended, what became of each thing that was rented, as JSON data: when it was asked for,
        ended and confirmed gone, and its cost.
        """
        return self._receipt

    @property
    def unconfirmed(self) -> InstancesLeft | None:
        """What could not be confirmed gone when the pool was closed, with the machines' ids; None if all is gone, or
        the pool is open.
        """
        return self._unconfirmed

    @property
    def cost_final(self) -> CostFinal | None:
        """The whole bill, once the pool has ended."""
        return self._final

    def __repr__(self) -> str:
        state = "open" if self.is_active else "closed" if self._was_opened else "new"
        spec, names = self._prepared.spec, " or ".join(provider.name for provider in self._prepared.providers)
        return f"<ComputePool {state}, {spec.nodes} x {spec.accelerator or 'node'} on {names}>"

    @property
    def _is_in_a_fork(self) -> bool:
        return self._open is not None and self._process != os.getpid()

    def _raise_in_a_fork(self) -> None:
        if self._is_in_a_fork:
            raise PoolClosed(
                f"process {os.getpid()} is a fork of the one that has opened the pool, {self._process}, and has no"
                " connection to it. Make the calls there; or start this process anew (multiprocessing's 'spawn') and"
                " let it attach: ComputePool.attach(pool.lease)"
            )

    @property
    def _cluster(self) -> Cluster:
        self._raise_in_a_fork()
        if self._open is None or self._open.cluster is None:
            if self._why_ended is not None:
                raise type(self._why_ended)(*self._why_ended.args)
            raise PoolClosed(self._why_closed())
        return self._open.cluster

    def _why_closed(self) -> str:
        return (
            "the pool is closed: its machines are gone"
            if self._was_opened
            else "the pool is not open: write `with sky.ComputePool(...) as pool:`"
        )


def _read_lease(lease: Lease | Mapping[str, Any] | str, *, is_trusted: bool) -> Lease:
    """Return a lease from its JSON, verified unless it is trusted."""
    claim = (
        lease
        if isinstance(lease, Lease)
        else Lease.model_validate_json(lease)
        if isinstance(lease, str)
        else Lease.model_validate(lease)
    )
    if not is_trusted:
        verify(claim)
    return claim


def _attach(
    claim: Lease, key: str | None, spec: PoolSpec, on_event: Callback | None, timeout_seconds: float
) -> Attached:
    """Connect to the nodes of a lease; nothing stays open if that fails."""
    show = console.display(spec.display)
    callback = compose(*[sink for sink in (registered_callback(), on_event) if sink is not None], show)
    attached = Attached(claim, key, spec.lease_seconds, spec.retries, EventQueue(callback, show.close))
    try:
        attached.start(timeout_seconds)
        attached.events.flush()
    except BaseException:
        attached.stop("the pool could not be attached to")
        attached.events.flush()
        raise
    return attached


def _left(attached: Attached, process: int) -> None:
    """Called in forks of the process too, when they end."""
    if process == os.getpid():
        attached.stop("the pool object was collected")


def _collected(opened: Session) -> None:
    if opened.is_running and not opened.is_fork:
        ids = ", ".join(node.instance.id for node in opened.lease.nodes) if opened.lease else "none"
        try:
            warnings.warn(
                f"a ComputePool was collected while open ({ids}): use `with`, or close() it",
                ResourceWarning,
                stacklevel=2,
            )
        finally:  # the warning is an error under `python -W error`
            opened.stop("the pool object was collected")
