"""`ComputePool`: machines with a Dask cluster on them, as a context manager.

States: new -> opening -> open -> closing -> closed. Only `open` and `close` change the state; `close` may be called in
any state and twice. If opening fails, `PoolMachines.acquire` ends the machines that were rented; later `close` does. If
this process is killed, the reaper does, which is started before anything is rented (docs/decisions/0008).

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
    """Machines that live as long as a `with` block.

    Takes the fields of `PoolSpec` as keywords, a callback for every event as `on_event`, and the purpose of the
    machines as `work`, for the ledger, the receipt and the machines' tags. No provider is asked before `with` (or
    `open`). Invalid values raise BadRequest here.

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
        """Make a pool from a spec.

        `credentials` is the provider, or all of them, with secrets from the caller's own store; the spec's providers
        hold none. `secrets` are values from that store for names of the spec's `secrets`; the others are read from the
        environment when the pool opens. `work` is the purpose of the machines. `replace_object` may replace objects
        during pickling (see `pickling.dumps`).
        """
        secrets = SecretValues(secrets or {})  # error reports may show the variables of this frame
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
        """Set the state of a pool that was never opened."""
        self._prepared = prepared
        self._id = ""
        self._opening = threading.RLock()
        self._open: Session | Attached | None = None
        self._process = 0
        """The process that has opened the pool."""
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
        """Attach to a pool that another process has opened, by its `lease` (or the lease's JSON).

        Several processes may attach at once. Returns the pool open, for `with` or `close`. Closing it leaves the
        machines running. As long as it is open it renews the nodes' lease, `lease_seconds` ahead. `key` is the path of
        the SSH key that the nodes know, if it differs from the opener's, or its text, which is kept only in memory.

        The lease is verified before anything in it is used: the folder of a node of this machine must belong to this
        user alone, and a lease with other machines must be signed with this user's key (SKYWARD_LEASE_KEY,
        `signing.py`), unless `is_trusted` says that no other user could have changed it. Raises Unreachable,
        CredentialsError or HostKeyChanged, and NodeLost if the scheduler of the lease is gone.
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
        """Rent and prepare the machines, as `with` does; return the pool.

        A closed pool may be opened again: new machines, a new bill. Raises NoCapacity, BootstrapFailed,
        ProvisioningTimeout or an error of the provider; then no machine is left running. Raises PoolClosed if the pool
        has ended itself: close it first. Raises BadRequest in a process that gevent or eventlet has patched.
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
        """Wait for the callbacks, without the lock, because one of them may be closing the pool.

        An interrupt closes the pool here: no `with` block has begun that would close it.
        """
        try:
            opened.events.flush()
        except BaseException as error:
            self.__exit__(type(error), error, error.__traceback__)
            raise

    def close(self) -> None:
        """Terminate the machines and wait until they are confirmed gone.

        Calls that still run are stopped. May be called twice, from any thread. Raises InstancesLeft if some could not
        be confirmed gone, unless they cost nothing and end themselves (`Hosts` without a price): then there is a
        warning and an `InstancesUnconfirmed` event, and `unconfirmed` names them. Raises LedgerError if the ledger
        could not be written: then the reaper tries that for two minutes, and closing again tries it at once. In a fork
        of the process that has opened the pool it does nothing.
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
        self._open = None  # after all else: after an interrupt, InstancesLeft or LedgerError, closing again tries again
        if self._finalizer is not None:
            self._finalizer.detach()
            self._finalizer = None

    def hand_over(self) -> InstancesLeft | None:
        """Close; leave unconfirmed machines to the pool's reaper, and return them instead of raising.

        Returns None if all are gone. For programs that run other users' work, such as an orchestrator's step, which
        must not lose its result or its own exception. The machines may still cost money: report them to the user. There
        is an `InstancesUnconfirmed` event, their entries in the ledger stay open, and `skyward sweep` asks again.
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
        """Leave the end of the machines to the reaper and return at once; for kill hooks and signal handlers.

        It returns in well under a second, waits for nothing and raises nothing. Calls fail when their machines end.
        `close` may follow, and reports whether all are gone; it need not. A pool that is still opening rents no more
        machines, and `open` raises. In a fork of the process that has opened the pool it does nothing.
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

        Unconfirmed machines never hide an exception of the block: a note of the exception names them.
        """
        if error is None:
            self.close()
        elif (left := self.hand_over()) is not None:
            error.add_note(f"besides, machines are not confirmed gone: {left}")

    # ── calls ────────────────────────────────────────────────────────────────────────────────────────────────────────

    def submit[R](self, pending: PendingCompute[R]) -> CallFuture[R]:
        """Submit a call and return at once.

        `.result()` of the future waits, `.cancel()` stops the call even while it runs, `.seconds` and `.cost` are its
        duration and cost.
        """
        return cast("CallFuture[R]", self._cluster.submit([checked(pending)], self._prepared.replace_object)[0])

    def submit_all[R](self, calls: Iterable[PendingCompute[R]]) -> list[CallFuture[R]]:
        """Submit many calls at once; return their futures, in order.

        It is faster than one by one, because a function that they share is pickled once.
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
        """Run `fn(a, b, ...)` for the items of the iterables taken together; return the results in order.

        `fn` need not be decorated. The iterables must have the same length: BadRequest otherwise, before anything runs.
        Raises TypeError if the function does not take as many arguments.
        """
        calls = mapped_calls(fn, iterables)
        return cast("list[R]", results_of(self._cluster.submit(calls, self._prepared.replace_object, is_awaited=True)))

    def start_detached[R](self, pending: PendingCompute[R]) -> DetachedCall[R]:
        """Submit a call that goes on when this process dies; return an object that represents it.

        Any attached process finds the call by its `call_id`. It lives, with its result, as long as the pool: until the
        pool is closed, or the lease of its nodes runs out (`lease_seconds` after the last sign of life from a client).
        Arguments are sent in one message; the call should read large values itself.
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

        This object is closed then. An attached process keeps the pool alive for longer. When the lease runs out the
        nodes end themselves, and `skyward sweep` ends the others. Calls that were not started detached are abandoned.
        `cost` is the cost so far; the ledger goes on counting, and has the whole bill once the pool is ended. The
        account of a pool with a budget pays for the whole lease now: if it cannot, BudgetExceeded says what is left.
        With `max_cost` the lease ends when that is used up. Raises Unreachable if a node cannot be reached, and
        LedgerError. After an error the pool is open as before.
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
        """Return a Dask client of the pool's cluster, for Dask collections and other libraries that take one.

        It is the same client as long as that is open. It has its own connection, which Dask restores if it breaks, and
        is closed with the pool. It is not Dask's current client: `client.as_current()` makes it the current one within
        a `with`. When the head of the pool was lost its futures are cancelled, and this returns another client, of the
        new head. Raises NodeLost while the scheduler is out of reach: try again.
        """
        _, opened = self._cluster, self._open
        if opened is None or opened.user_client is None:
            raise PoolClosed(self._why_closed())
        return opened.user_client.get()

    # ── properties ───────────────────────────────────────────────────────────────────────────────────────────────────

    @property
    def spec(self) -> PoolSpec:
        """The spec of the pool, settings included."""
        return self._prepared.spec

    @property
    def id(self) -> str:
        """The pool's id, in the ledger, `skyward receipt` and the machines' tags: of the last opening, "" before the
        first.
        """
        return self._open.lease.pool_id if isinstance(self._open, Attached) else self._id

    @property
    def work(self) -> Work:
        """The purpose of the machines, as it was given."""
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
        """The written claim on the machines. Raises PoolClosed while the pool has none."""
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
        """Divide parts of the cost, in USD, among tasks that share the pool, for `skyward cost --by task`.

        Replaces earlier shares; the rest of the cost belongs to the pool's own work. Allowed after the end. Raises
        LedgerError, and PoolClosed for a pool that was never opened.
        """
        if not self._id:
            raise PoolClosed(self._why_closed())
        # programs that only describe pools do not load SQLAlchemy
        from skyward_core.ledger.ledger import Ledger, default_url

        with Ledger(default_url()) as ledger:
            ledger.set_shares(self._id, {work: Decimal(repr(float(usd))) for work, usd in shares.items()})

    @property
    def receipt(self) -> Mapping[str, Any] | None:
        """The cost and the times of each rented resource, as JSON data, once the pool has ended: when it was requested,
        ended and confirmed gone.
        """
        return self._receipt

    @property
    def unconfirmed(self) -> InstancesLeft | None:
        """The machines that were not confirmed gone when the pool was closed, with their ids; None if all are gone, or
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
    """Close an attachment. Also called in forks of the process, when they end."""
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
