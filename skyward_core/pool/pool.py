"""`ComputePool`: machines with a Dask cluster on them, as a context manager.

The object makes calls and reports cost and state. `current_session.py` owns the state: what is open, and who may open
and close it.
"""

from __future__ import annotations

import inspect
import logging
import re
import threading
from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path
from types import TracebackType
from typing import TYPE_CHECKING, Any, ClassVar, Never, NoReturn, Self, Unpack, cast, overload

from pydantic import ValidationError

from skyward_core.accelerators import Accelerator
from skyward_core.compute import ComputeFunction, PendingBatch, PendingCompute, not_pending
from skyward_core.concurrency import interrupts
from skyward_core.concurrency.item_stream import ItemStream
from skyward_core.concurrency.threads import refuse_greenlets
from skyward_core.engine.futures import CallFuture
from skyward_core.engine.packing import WantedCall
from skyward_core.errors import BadRequest, InstancesLeft, LeaseTampered, NotPicklable, PoolClosed, ShortTraceback
from skyward_core.events import console
from skyward_core.events.events import Callback, CostFinal
from skyward_core.image.image import Image
from skyward_core.machines.instances import Lease
from skyward_core.machines.signing import signed, verify
from skyward_core.pool.aio import AsyncPool, Broadcast
from skyward_core.pool.calls import PoolExecutor, checked, group_results, mapped_calls, results_of
from skyward_core.pool.current_session import CurrentSession, note_machines_left
from skyward_core.pool.preparation import Prepared, Quoting, prepare
from skyward_core.providers.base import Provider
from skyward_core.providers.local import Local
from skyward_core.serialization import pickling
from skyward_core.session.detached_call import DetachedCall
from skyward_core.session.sealed_lease import PoolKeys, find_keys, find_lease
from skyward_core.spec import PoolKeywords, PoolSpec, signature
from skyward_core.wire.masking import SecretValues
from skyward_core.work import NO_WORK, WORK_CHARACTERS, Work
from skyward_core.written_numbers import LONGEST_SECONDS, number

if TYPE_CHECKING:
    import distributed

    from skyward_core.events.utilisation import Utilisation
    from skyward_core.session.pool_uses import UseBook

AHEAD = 16
"""How many items of a stream the node may be ahead of the program."""
CALL_ID = re.compile(r"[A-Za-z0-9._:/-]{1,128}")
POOL_ID = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]{0,254}")


class DetachedCalls:
    """The part of `ComputePool` for calls that outlive their client."""

    _session: CurrentSession
    _prepared: Prepared

    def start_detached[R](
        self,
        pending: PendingCompute[R],
        *,
        call_id: str | None = None,
        owner: str = "",
        result_ttl: float | None = None,
    ) -> DetachedCall[R]:
        """Submit a call that goes on when this process dies; return an object that represents it.

        Any attached process finds the call by its `call_id`. The call and its result live as long as the pool. The pool
        lives until it is closed, or the lease of its nodes runs out (`lease_seconds` after the last sign of life from a
        client). Arguments are sent in one message; the call should read large values itself.

        `call_id`, 1 to 128 letters, digits and `._:/-`, makes the start idempotent. If the pool has had a call of this
        id, from any process, that call is returned and nothing begins. This is so even if it has ended or was
        forgotten, and for another function or other arguments. `name` is the function of the existing call, and
        `is_new` says whether this start began it. If the head is lost with its records, the id is unknown.
        `result_ttl`: how many seconds after its end the call is forgotten; None: never. `owner` says in the ledger whom
        the call is for, such as "dag/run/task"; by default it is the pool's `work`, which bears the cost of the call:
        the price of the slots that it holds. Raises BadRequest for other values.
        """
        if call_id is not None and not (isinstance(call_id, str) and CALL_ID.fullmatch(call_id)):  # pyright: ignore[reportUnnecessaryIsInstance]
            raise BadRequest(f"call_id={call_id!r}: write 1 to 128 letters, digits and characters of ._:/-")
        if result_ttl is not None:
            what = f"for how many seconds after the end of the call its result is kept, from 0 to {LONGEST_SECONDS:.0f}"
            result_ttl = number(result_ttl, "result_ttl", what, least=0, most=LONGEST_SECONDS, is_text_read=False)
        if not (len(owner) <= WORK_CHARACTERS and owner.isprintable()):
            raise BadRequest(f"owner={owner!r}: write a printable text of at most {WORK_CHARACTERS} characters")
        cluster, calls = self._session.cluster, self._session.calls
        work = self._prepared.work
        call, wanted = checked(pending), WantedCall.of(call_id, owner, result_ttl, work)
        self._session.live_by_lease()
        calls.starts(wanted.call_id, getattr(call.fn, "__name__", ""), owner, work)
        known = cluster.detached.start(call, self._prepared.replace_object, wanted)
        calls.note(known)
        return self._represented(wanted.call_id, is_new=bool(known["is_new"]))

    def detached_call(self, call_id: str) -> DetachedCall[Any]:
        """Return the call of this id that was started detached, here or elsewhere.

        Raises BadRequest if the pool knows none.
        """
        self._session.cluster.detached.record(call_id)
        return self._represented(call_id)

    def detached_calls(self) -> list[DetachedCall[Any]]:
        """Return all calls that were started detached and not forgotten, in the order in which they came."""
        return [self._represented(str(known["call_id"])) for known in self._session.cluster.detached.all()]

    def _represented(self, call_id: str, *, is_new: bool = False) -> DetachedCall[Any]:
        return DetachedCall(
            call_id,
            lambda: self._session.cluster,
            lambda record: self._session.calls.note(record),
            lambda: self._session.calls.raise_if_stopped(),
            is_new=is_new,
        )


class ElasticSize:
    """The part of `ComputePool` for pools of `nodes=(least, most)`."""

    _session: CurrentSession

    def scale(self, nodes: int | None, *, wait_seconds: float = 0.0) -> int:
        """Keep the pool at this number of nodes from now on; None: let it grow and shrink by itself again.

        New nodes take calls as soon as each has joined; a node that is to leave ends its calls first. Machines that are
        not to be had are tried again, with an `Error` event each time. Returns how many nodes take calls now, or as
        soon as they are as many as wanted, after at most `wait_seconds`.

        Raises BadRequest for a pool of a fixed size, for a number outside its limits, and in a process that does not
        keep the machines, as after `attach`: the error names the process that does, if the pool has a name. Raises
        PoolClosed, and LedgerError if it is not certain which process keeps the pool.
        """
        what = f"for how many seconds to wait for the nodes, or 0, at most {LONGEST_SECONDS:.0f}"
        wait_seconds = number(wait_seconds, "wait_seconds", what, least=0, most=LONGEST_SECONDS)
        return self._session.scale(nodes, wait_seconds)


class ComputePool(DetachedCalls, ElasticSize, AsyncPool, Quoting):
    """Machines that live as long as a `with` block.

    Takes the fields of `PoolSpec` as keywords, or a `PoolSpec` as `spec`. `on_event` is called with every event; `work`
    is the purpose of the machines, for the ledger, the receipt and the machines' tags. No provider gets a request
    before `with` (or `open`). Invalid values raise BadRequest here.

        with ComputePool(accelerator="A100", image=Image(pip=["torch"])) as pool:
            result = train(data) >> pool
    """

    __signature__: ClassVar = signature(
        inspect.Parameter("spec", inspect.Parameter.KEYWORD_ONLY, default=None, annotation=PoolSpec | None),
        inspect.Parameter("on_event", inspect.Parameter.KEYWORD_ONLY, default=None, annotation=Callback | None),
        inspect.Parameter("work", inspect.Parameter.KEYWORD_ONLY, default=NO_WORK, annotation=Work),
    )

    @ShortTraceback()
    def __init__(
        self,
        *values: Never,
        spec: PoolSpec | None = None,
        on_event: Callback | None = None,
        work: Work = NO_WORK,
        **keywords: Unpack[PoolKeywords],
    ) -> None:
        if values:
            named = ", ".join(f"{_name_for(value)}=..." for value in cast("tuple[object, ...]", values))
            raise BadRequest(f"{type(self).__name__} takes its values by name: write {type(self).__name__}({named})")
        if spec is not None and keywords:
            raise BadRequest(
                f"give spec=... or keywords, not both: {', '.join(keywords)} stand beside a spec; write"
                " spec=spec.with_(...)"
            )
        self._reset(prepare(PoolSpec.of(**keywords) if spec is None else spec, on_event=on_event, work=work))

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
        run_max_cost: float | None = None,
        belongs_to: Work | None = None,
    ) -> Self:
        """Make a pool from a spec.

        `credentials` is the provider, or all of them, with secrets from the caller's own store; the spec's providers
        hold none. `secrets` are values from that store for names of the spec's `secrets`; the others are read from the
        environment when the pool opens. `work` is the purpose of the machines. `replace_object` may replace objects
        during pickling (see `pickling.dumps`). `run_max_cost` is the most that all pools of the run together may cost,
        in USD: of those whose `work` names the same system, workflow and run, and that have this limit. The newest
        value counts; the ledger keeps it (docs/ledger.md). `belongs_to` is the work that bears what no call uses, such
        as start and warm time: by default `work`; nobody if the pool has a name, because others may use it too. Give it
        if you have made the name for a work, such as a run whose steps share the pool.
        """
        secrets = SecretValues(secrets or {})  # error reports may show the variables of this frame
        pool = cls.__new__(cls)
        with ShortTraceback():
            prepared = prepare(
                spec,
                credentials=credentials,
                on_event=on_event,
                replace_object=replace_object,
                work=work,
                secrets=secrets,
                run_max_cost=run_max_cost,
                belongs_to=belongs_to,
            )
        pool._reset(prepared)
        return pool

    def _reset(self, prepared: Prepared) -> None:
        """Set the state of a pool that was never opened."""
        self._prepared = prepared
        self._session = CurrentSession()

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
        pays: bool = False,
        work: Work = NO_WORK,
    ) -> Self:
        """Attach to a pool that another process has opened, by its `lease`, the lease's JSON, or the pool's id.

        The id is enough if the pool was detached or has a detached call: then the ledger has its newest lease, and its
        keys sealed; SKYWARD_SECRET_KEY, or the same key file, opens them. They are also used if this
        machine does not have the lease's SSH key. `key` is the path of one that the nodes know, or its text, which is
        kept only in memory. Several processes may attach at once. Returns the pool open, for `with` or `close`. Closing
        it leaves the machines running. As long as it is open it renews the nodes' lease, `lease_seconds` ahead. With
        `pays` it also reserves from the `budget` of a pool that was detached, as its opener did: the nodes end where
        the money does. A `BudgetWarning` comes before. `work` is for what detached calls are that it starts.

        A lease is verified before anything in it is used: it must name only folders of this machine that belong to this
        user alone, or be signed (`signing.py`), unless `is_trusted` says that no other user could have changed it.
        Raises Unreachable (also if the scheduler does not answer in time although its head lives: try again),
        CredentialsError (LeaseTampered if altered), HostKeyChanged, NodeLost if the head or the pool is gone; for an id
        also LeaseLost, BadRequest and LedgerError.
        """
        refuse_greenlets()
        what = f"for how many seconds to wait for the pool, more than 0, at most {LONGEST_SECONDS:.0f}"
        timeout_seconds = number(timeout_seconds, "timeout_seconds", what, most=LONGEST_SECONDS)
        with ShortTraceback():
            claim, sealed = verified_claim(lease, has_key=key is not None, is_trusted=is_trusted)
        spec = PoolSpec.of(
            nodes=max(1, len(claim.nodes)), display="quiet", retries=retries, lease_seconds=lease_seconds
        )
        pool = cls.__new__(cls)
        pool._reset(Prepared(spec, (Local(),), on_event=on_event, work=work))
        key_text = None if key is None else str(key)
        with ShortTraceback():
            pool._session.attach(claim, key_text, sealed, spec, on_event, timeout_seconds, pays=pays)
        return pool

    # ── life ─────────────────────────────────────────────────────────────────────────────────────────────────────────

    @ShortTraceback()
    def open(self) -> Self:
        """Rent and prepare the machines, as `with` does; return the pool.

        A closed pool may be opened again: new machines, a new bill. Raises NoCapacity, BootstrapFailed,
        ProvisioningTimeout or an error of the provider; then no machine is left running. Raises PoolClosed if the pool
        has ended itself: close it first. Raises BadRequest in a process that gevent or eventlet has patched, and in a
        thread that goes on after the main thread has ended. After Ctrl-C it gives back what was rented; after another
        one it waits for nothing, and the pool's reaper ends the machines.
        """
        if not threading.main_thread().is_alive():  # Python starts no executor's thread any more: nothing is rented
            raise BadRequest(
                "the main thread of this program has ended, and no pool can be opened after that: let the main thread"
                " wait for the thread that opens it (thread.join()), or open it before"
            )
        interrupt: BaseException | None = None
        try:
            self._session.open(self._prepared)
        except KeyboardInterrupt as error:
            if not interrupts.is_again(error):
                raise
            console.last_log_of(self.spec.display)(logging.WARNING, interrupts.AGAIN)
            interrupt = interrupts.first(error)
        if interrupt is not None:  # the program ends with it, without the frames in which the second one came
            raise interrupt
        return self

    def close(self) -> None:
        """Terminate the machines and wait until they are confirmed gone.

        Calls that still run are stopped. May be called twice, from any thread. Raises InstancesLeft if some could not
        be confirmed gone, unless they cost nothing and end themselves (`Hosts` without a price): then there is a
        warning and an `InstancesUnconfirmed` event, and `unconfirmed` names them. Raises LedgerError if the ledger
        could not be written: then the reaper tries that for two minutes, and closing again tries it at once. In a fork
        of the process that has opened the pool it does nothing.
        """
        self._session.close()

    def hand_over(self) -> InstancesLeft | None:
        """Close; leave unconfirmed machines to the pool's reaper, and return them instead of raising.

        Returns None if all are gone. For programs that run other users' work, such as an orchestrator's step, which
        must not lose its result or its own exception. The machines may still cost money: report them to the user. There
        is an `InstancesUnconfirmed` event, their entries in the ledger stay open, and `skyward sweep` asks again.
        """
        return self._session.hand_over(self.close)

    def terminate_now(self) -> None:
        """Leave the end of the machines to the reaper and return at once; for kill hooks and signal handlers.

        It returns in well under a second, waits for nothing and raises nothing. Calls fail when their machines end.
        `close` may follow, and reports whether all are gone; it need not. A pool that is still opening rents no more
        machines, and `open` raises. In a fork of the process that has opened the pool it does nothing.
        """
        self._session.terminate_now()

    def __enter__(self) -> Self:
        return self.open()

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        """Close.

        Unconfirmed machines never hide an exception of the block: a note of the exception names them. After Ctrl-C
        another one waits for nothing, and neither does the end of the program: the reaper ends the machines.
        """
        if error is None:
            self.close()
        elif isinstance(error, KeyboardInterrupt):
            self._close_interrupted(error)
        elif (left := self.hand_over()) is not None:
            note_machines_left(error, left)

    def _close_interrupted(self, error: KeyboardInterrupt) -> None:
        console.log_of(self.spec.display)(logging.INFO, interrupts.CLOSING)
        try:
            left = self.hand_over()
        except KeyboardInterrupt:
            self._session.terminate_now(may_wait_at_exit=False)
            console.last_log_of(self.spec.display)(logging.WARNING, interrupts.AGAIN)
        else:
            if left is not None:
                note_machines_left(error, left)

    def __rrshift__(self, other: Never) -> NoReturn:
        """Raise TypeError: what is no pending call was sent to the pool."""
        raise not_pending(other, ">>")

    def __rmatmul__(self, other: Never) -> NoReturn:
        """Raise TypeError: what is no pending call was sent to the pool."""
        raise not_pending(other, "@")

    # ── calls ────────────────────────────────────────────────────────────────────────────────────────────────────────

    def submit[R](self, pending: PendingCompute[R], *values: Never, timeout: float | None = None) -> CallFuture[R]:
        """Submit a call and return at once.

        `.result()` of the future waits, `.cancel()` stops the call even while it runs, `.seconds` and `.cost` are its
        duration and cost. `timeout`: how many seconds it may run on its node, as `PendingCompute.timeout` has it.
        """
        if values:
            raise TypeError("pool.submit takes one call: write pool.submit(fn(x)), or pool.executor().submit(fn, x)")
        calls = [checked(pending, timeout)]
        return cast("CallFuture[R]", self._session.cluster.submit(calls, self._prepared.replace_object)[0])

    def submit_all[R](self, calls: Iterable[PendingCompute[R]]) -> list[CallFuture[R]]:
        """Submit many calls at once; return their futures, in order.

        It is faster than one by one, because a function that they share is pickled once.
        """
        return cast(
            "list[CallFuture[R]]",
            self._session.cluster.submit([checked(pending) for pending in calls], self._prepared.replace_object),
        )

    def submit_broadcast[R](self, pending: PendingCompute[R]) -> list[CallFuture[R]]:
        """Submit the call once for each worker; return the futures, in the order of nodes and workers.

        If the workers form a group, nothing runs again after the loss of a node.
        """
        return cast(
            "list[CallFuture[R]]",
            self._session.cluster.broadcast(checked(pending), self._prepared.replace_object, is_awaited=False),
        )

    def run[R](self, pending: PendingCompute[R]) -> R:
        """Run one call on the first free worker and return its result.

        Its own exception is raised here, with its remote traceback as the cause.
        """
        return cast(
            "R",
            results_of(
                self._session.cluster.submit([checked(pending)], self._prepared.replace_object, is_awaited=True)
            )[0],
        )

    @overload
    def stream[T](self, pending: PendingCompute[list[T]], *, ahead: int = ...) -> ItemStream[T]: ...
    @overload
    def stream(self, pending: PendingCompute[Any], *, ahead: int = ...) -> ItemStream[Any]: ...
    def stream(self, pending: PendingCompute[Any], *, ahead: int = AHEAD) -> ItemStream[Any]:
        """Submit one call and return at once with its items, which come as the node yields them.

        `>>` does this for generators. This is for any function that returns something to iterate over, and for another
        `ahead`: how many items the node may compute, at most, before the program has taken the first of them.
        Raises BadRequest.
        """
        if ahead < 1:
            raise BadRequest(f"ahead={ahead!r}: write how many items the node may be ahead, at least 1")
        return ItemStream(self._session.cluster.stream(checked(pending), self._prepared.replace_object, ahead))

    def run_batch(self, batch: PendingBatch[*tuple[Any, ...]]) -> tuple[Any, ...]:
        """Run the calls in parallel; return their results in order.

        On the first error the others are cancelled and it is raised.
        """
        return cast(
            "tuple[Any, ...]",
            results_of(
                self._session.cluster.submit([*batch.calls], self._prepared.replace_object, is_awaited=True), tuple
            ),
        )

    def broadcast[R](self, pending: PendingCompute[R], *, submit: Broadcast | None = None) -> tuple[R, ...]:
        """Run the call on all workers at once; return the results in the order of nodes and workers.

        If the workers form a group (`sky.distributed`) and a node is lost, the call runs again on all of them. `submit`
        is called instead of `submit_broadcast`, by a caller that needs the futures too.
        """
        cluster = self._session.cluster

        def start(call: PendingCompute[Any]) -> list[CallFuture[Any]]:
            return cluster.broadcast(call, self._prepared.replace_object) if submit is None else submit(call)

        if not checked(pending).forms_group:
            return cast("tuple[R, ...]", results_of(start(pending), tuple))
        return cast("tuple[R, ...]", group_results(start, pending, cluster.retries, cluster.note_retry))

    def map[R](
        self, fn: Callable[..., R] | ComputeFunction[..., R], *iterables: Iterable[Any], timeout: float | None = None
    ) -> list[R]:
        """Run `fn(a, b, ...)` for the items of the iterables taken together; return the results in order.

        `fn` need not be decorated. The iterables must have the same length: BadRequest otherwise, before anything runs.
        Raises TypeError if the function does not take as many arguments. `timeout`: how many seconds each call may run
        on its node, as `PendingCompute.timeout` has it.
        """
        calls = mapped_calls(fn, iterables, timeout)
        return cast(
            "list[R]", results_of(self._session.cluster.submit(calls, self._prepared.replace_object, is_awaited=True))
        )

    def executor(self) -> PoolExecutor:
        """Return an executor of the standard library (`concurrent.futures`) that runs functions on this pool.

        Leaving its `with` block waits for its calls, and leaves the pool open. A pool may have several.
        """
        return PoolExecutor(self.submit_all, lambda futures: self._session.cluster.cancel_waiting(futures))

    def detach(self, lease_seconds: float | None = None) -> Lease:
        """Leave the pool running, for `lease_seconds` (at least the spec's) from now; return its lease, for `attach`.

        This object is closed then. An attached process keeps the pool alive for longer. When the lease runs out the
        nodes end themselves, and `skyward sweep` ends the others. Calls that were not started detached are abandoned.
        `cost` is the cost so far; the ledger goes on counting, and has the whole bill once the pool is ended. The
        account of a pool with a budget pays for the whole lease now: if it cannot, BudgetExceeded says what is left.
        With `max_cost` the lease ends when that is used up. Raises Unreachable if a node cannot be reached, and
        LedgerError. After an error the pool is open as before.
        """
        if lease_seconds is None:
            return self._session.detach(self._prepared.spec.lease_seconds)
        what = f"the seconds that nodes may live on without a sign of life, at most {LONGEST_SECONDS:.0f}"
        return self._session.detach(number(lease_seconds, "lease_seconds", what, most=LONGEST_SECONDS))

    def dask_client(self) -> distributed.Client:
        """Return a Dask client of the pool's cluster, for Dask collections and other libraries that take one.

        It is the same client as long as that is open. It has its own connection, which Dask restores if it breaks, and
        is closed with the pool. It is not Dask's current client: `client.as_current()` makes it the current one within
        a `with`. When the head of the pool was lost its futures are cancelled, and this returns another client, of the
        new head. Raises NodeLost while the scheduler is out of reach: try again.
        """
        return self._session.user_client.get()

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
        return self._session.pool_id

    @property
    def work(self) -> Work:
        """The purpose of the machines, as it was given."""
        return self._prepared.work

    @property
    def is_active(self) -> bool:
        """True while the pool is open, in the process that has opened it."""
        return self._session.is_active

    @property
    def instance_count(self) -> int:
        """Number of machines of the open pool; 0 while it is not open."""
        return len(lease.nodes) if (lease := self._session.lease) is not None else 0

    @property
    def lease(self) -> Lease:
        """The written claim on the machines. Raises PoolClosed while the pool has none."""
        if (lease := self._session.lease) is None:
            raise PoolClosed(self._session.why_closed)
        return signed(lease)

    def __reduce__(self) -> NoReturn:
        """Refuse to be pickled: a copy in another process could not end the pool's machines."""
        raise NotPicklable(
            "a pool belongs to the process that has opened it and cannot be pickled: pass `pool.lease` to the other"
            " process, and call sky.ComputePool.attach(lease) there"
        )

    @property
    def cost(self) -> float:
        """USD spent so far; after the end the whole bill.

        Of a pool with a name: what the calls have cost that were made with this object and belong to no `PoolUse`.
        """
        return self._session.cost

    def note_cost(self) -> None:
        """Write the cost so far into the ledger now, so that `sky.cost_of` is up to date; otherwise it is some seconds
        behind.

        The process writes what the uses of the pool in it have cost; the process that keeps the pool writes the rest,
        every few seconds. Without an open pool nothing happens. Raises LedgerError, and
        LeaseLost if the pool was condemned.
        """
        self._session.note_cost()

    def cancel_for(self, use: str) -> None:
        """Stop the calls for which a use of the pool pays, by its id; for `PoolUse`. A signal handler may call it."""
        self._session.cancel_for(use)

    def begin_use(self, use: str, utilisation: Utilisation) -> None:
        """Measure what the nodes do while calls run for which a use of the pool pays; for `PoolUse`."""
        self._session.begin_use(use, utilisation)

    def end_use(self, use: str) -> None:
        """Stop the calls for which a use of the pool pays, and refuse others that it would pay for; for `PoolUse`."""
        self._session.end_use(use)

    @property
    def uses(self) -> UseBook:
        """The accounts of the steps that use the pool, for `PoolUse`. Raises PoolClosed."""
        return self._session.uses

    @property
    def receipt(self) -> Mapping[str, Any] | None:
        """The cost and the times of each rented resource, as JSON data, once the pool has ended: when it was requested,
        ended and confirmed gone. After InstancesLeft it has the cost so far, and the machines in `left`.
        """
        return self._session.receipt

    @property
    def unconfirmed(self) -> InstancesLeft | None:
        """The machines that were not confirmed gone when the pool was closed, with their ids; None if all are gone, or
        the pool is open.
        """
        return self._session.unconfirmed

    @property
    def still_running(self) -> str:
        """What this process has left running when it left the pool, until when, and what that costs, as a sentence that
        the log has too; "" if nothing is, or the pool is open. After a close that was interrupted or has failed it
        names the machines that may still run, by the ledger.
        """
        return self._session.still_running

    @property
    def cost_final(self) -> CostFinal | None:
        """The whole bill, once the pool has ended; None if this process has left it to others."""
        return self._session.final

    def __repr__(self) -> str:
        state = "open" if self.is_active else "closed" if self._session.was_opened else "new"
        spec, names = self._prepared.spec, " or ".join(provider.name for provider in self._prepared.providers)
        nodes = f"{spec.least_nodes} to {spec.most_nodes}" if spec.is_elastic else spec.least_nodes
        return f"<ComputePool {state}, {nodes} x {spec.accelerator_words or 'node'} on {names}>"


def verified_claim(
    given: Lease | Mapping[str, Any] | str, *, has_key: bool, is_trusted: bool
) -> tuple[Lease, PoolKeys | None]:
    """Return a lease that may be used, and the sealed keys for it; None if it needs none.

    Raises LeaseTampered for what is no lease, or an altered one; else as `find_lease` and `verify`. Nothing is
    unpickled, and nothing in the lease is used before.
    """
    if isinstance(given, str) and POOL_ID.fullmatch(given):
        return find_lease(given, has_key=has_key)
    lease = _parsed(given)
    if not is_trusted:
        verify(lease)
    return lease, None if has_key else find_keys(lease)


def _name_for(value: object) -> str:
    """Return the keyword that a value without one was probably meant for."""
    if isinstance(value, str):
        return "accelerator" if value[:1].isupper() or value[:1].isdigit() else "provider"
    kinds = {Provider: "provider", Image: "image", Accelerator: "accelerator", PoolSpec: "spec", int: "nodes"}
    return next((name for kind, name in kinds.items() if isinstance(value, kind)), "provider")


def _parsed(given: Lease | Mapping[str, Any] | str) -> Lease:
    if isinstance(given, Lease):
        return given
    try:
        if not isinstance(given, str):
            # values that have no JSON, such as bytes, are no part of a lease, and the signature is over the JSON
            given = Lease.model_validate(given).model_dump_json()
        return Lease.model_validate_json(given)
    except ValidationError as error:
        fields = sorted({".".join(map(str, detail["loc"])) or "the whole" for detail in error.errors()})
        raise LeaseTampered(_words(", ".join(fields)[:200])) from error
    except ValueError as error:
        raise LeaseTampered(_words(str(error)[:200])) from error


def _words(reason: str) -> str:
    return f"this is no lease, or was altered ({reason}): get `pool.lease` from its owner again"
