"""`ComputePool`: the open thing. A lease, a Dask cluster and a callback, as a context manager.

States: new -> opening -> open -> closing -> closed. `open` and `close` are the only ways between them; `close` may be called in any state and twice. Whoever
is stopped on the way from new to open has given back what was rented (`lifecycle.acquire`); from there on `close` is the undo.
"""

from __future__ import annotations

import atexit
import importlib
import logging
import threading
import time
import uuid
import warnings
import weakref
from collections.abc import Callable, Iterable, Sequence
from concurrent.futures import FIRST_EXCEPTION, Future, ThreadPoolExecutor, wait
from contextlib import ExitStack
from types import TracebackType
from typing import TYPE_CHECKING, Any, Self, cast

from skyward_core import console, pickling
from skyward_core.certificates import make_certificate
from skyward_core.compute import ComputeFunction, PendingBatch, PendingCompute
from skyward_core.config import Settings
from skyward_core.errors import BadRequest, PoolClosed, SkywardError
from skyward_core.events import Callback, CostFinal, Error, PoolReady, PoolStopping, SkywardEvent, compose, registered_callback
from skyward_core.instances import Lease
from skyward_core.providers import base
from skyward_core.providers.base import Provider
from skyward_core.provisioning import bootstrap, lifecycle
from skyward_core.provisioning.metering import Meter
from skyward_core.spec import PoolSpec

if TYPE_CHECKING:
    import distributed

    from skyward_core.cluster import CallFuture, Cluster

CLOCK_SECONDS = 1.0
COST_SECONDS = 5.0
DEFAULT_PROVIDER = "local"
_log = logging.getLogger("skyward")


class ComputePool:
    """Machines for as long as a `with` block lasts.

    Takes the fields of `PoolSpec` as keywords, and `on_event`, a callback for every event. Nothing is asked of the provider before `with` (or `open`).
    Wrong wishes raise BadRequest right here.

        with ComputePool(accelerator="A100", image=Image(pip=["torch"])) as pool:
            result = train(data) >> pool
    """

    def __init__(self, *, on_event: Callback | None = None, **wishes: Any) -> None:
        self._settle(PoolSpec.of(**wishes), on_event, None, None)

    @classmethod
    def from_spec(
        cls, spec: PoolSpec, *, on_event: Callback | None = None, credentials: Provider | None = None, replace_object: pickling.Replace | None = None
    ) -> Self:
        """Make a pool from a spec. `credentials` is the provider with secrets from the caller's own store, in place of the spec's, which holds none.

        `replace_object` may exchange objects on their way into a pickle (see `pickling.dumps`).
        """
        pool = cls.__new__(cls)
        pool._settle(spec, on_event, credentials, replace_object)
        return pool

    def _settle(self, spec: PoolSpec, on_event: Callback | None, credentials: Provider | None, replace_object: pickling.Replace | None) -> None:
        self._spec, self._provider, self._why_provider = complete(spec, credentials)
        self._spec.refuse_what_cannot_be()
        lifecycle.refuse(self._spec, self._provider)
        self._on_event = on_event
        self._replace_object = replace_object
        self._opening = threading.RLock()
        self._open: _Open | None = None
        self._was_opened = False
        self._final: CostFinal | None = None
        self._finalizer: weakref.finalize[..., ComputePool] | None = None

    # ── life ─────────────────────────────────────────────────────────────────────────────────────────────────────────

    def open(self) -> Self:
        """Rent and prepare the machines; what `with` does. Returns the pool. A closed pool may be opened again: new machines, a new bill.

        Raises NoCapacity, BootstrapFailed, ProvisioningTimeout or what the provider raises; then nothing is left running.
        """
        with self._opening:
            if self._open is None:
                self._was_opened = True
                self._final = None
                self._open = opened = _Open(self._spec, self._provider, self._on_event)
                if self._why_provider:
                    _log.info("%s", self._why_provider)  # now, because before the display has opened nobody may be listening
                try:
                    opened.start()
                except BaseException:
                    self._open = None
                    opened.stop("the pool could not be opened")
                    self._final = opened.final
                    raise
                self._finalizer = weakref.finalize(self, _collected, opened)
                self._finalizer.atexit = False
        return self

    def close(self) -> None:
        """Give the machines back and make sure that they are gone. Calls that still run are stopped. May be called twice, from any thread.

        Raises InstancesLeft if some could not be confirmed gone.
        """
        with self._opening:
            opened = self._open
            if opened is None:
                return
            try:
                opened.stop("the pool was closed")
                opened.release()
            finally:
                self._final = opened.final
            self._open = None  # only now: after an interrupt or InstancesLeft, closing again tries again
            if self._finalizer is not None:
                self._finalizer.detach()
                self._finalizer = None

    def __enter__(self) -> Self:
        return self.open()

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        self.close()

    # ── calls ────────────────────────────────────────────────────────────────────────────────────────────────────────

    def submit[R](self, pending: PendingCompute[R]) -> Future[R]:
        """Hand a call over and return at once; `.result()` waits, `.cancel()` stops it even while it runs."""
        return cast("Future[R]", self._cluster.submit([_checked(pending)], self._replace_object)[0])

    def submit_all[R](self, calls: Iterable[PendingCompute[R]]) -> list[Future[R]]:
        """Hand many calls over at once; returns their futures, in order. Quicker than one by one: a function that they share is pickled once."""
        return cast("list[Future[R]]", self._cluster.submit([_checked(pending) for pending in calls], self._replace_object))

    def run[R](self, pending: PendingCompute[R]) -> R:
        """Run one call on the first free worker and return its result. Its own exception is raised here, with its remote traceback as the cause."""
        return _results([self.submit(pending)])[0]

    def run_batch(self, batch: PendingBatch[*tuple[Any, ...]]) -> tuple[Any, ...]:
        """Run the calls in parallel; return their results in order. On the first error the others are cancelled and it is raised."""
        return tuple(_results(self._cluster.submit([*batch.calls], self._replace_object)))

    def broadcast[R](self, pending: PendingCompute[R]) -> tuple[R, ...]:
        """Run the call on all workers at once; return the results in the order of nodes and workers."""
        return tuple(_results(self._cluster.broadcast(_checked(pending), self._replace_object)))

    def map[R](self, fn: Callable[..., R] | ComputeFunction[..., R], *iterables: Iterable[Any]) -> list[R]:
        """Run `fn(a, b, ...)` for the items of the iterables taken together; return the results in order. `fn` need not be decorated.

        The iterables must have the same length: BadRequest otherwise, before anything runs.
        """
        if not iterables:
            raise BadRequest("map needs something to map over: pool.map(fn, [1, 2, 3])")
        function = fn.local if isinstance(fn, ComputeFunction) else fn
        try:
            calls = [PendingCompute(function, items) for items in zip(*iterables, strict=True)]
        except ValueError as error:
            raise BadRequest(f"map: {error}. Give iterables of one length, or zip them yourself with what should happen to the rest") from error
        return cast("list[R]", _results(self._cluster.submit(calls, self._replace_object)))

    def dask_client(self) -> distributed.Client:
        """Return the real Dask client of the pool's cluster, for Dask collections and everything that takes one. It ends with the pool."""
        return self._cluster.client

    # ── what it is ───────────────────────────────────────────────────────────────────────────────────────────────────

    @property
    def spec(self) -> PoolSpec:
        """What was asked for, settings included."""
        return self._spec

    @property
    def is_active(self) -> bool:
        """True while the pool is open."""
        return self._open is not None and self._open.is_running

    @property
    def instance_count(self) -> int:
        """Number of machines of the open pool; 0 while it is not open."""
        return len(self._open.lease.nodes) if self._open is not None and self._open.lease is not None else 0

    @property
    def lease(self) -> Lease:
        """The written claim on the machines. Raises PoolClosed while there is none."""
        if self._open is None or self._open.lease is None:
            raise PoolClosed(self._why_closed())
        return self._open.lease

    @property
    def cost(self) -> float:
        """USD spent so far; after the end the whole bill."""
        if self._final is not None:
            return self._final.total_cost
        return self._open.meter.update().accumulated_cost if self._open is not None else 0.0

    @property
    def cost_final(self) -> CostFinal | None:
        """The whole bill, once the pool has ended."""
        return self._final

    def __repr__(self) -> str:
        state = "open" if self.is_active else "closed" if self._was_opened else "new"
        return f"<ComputePool {state}, {self._spec.nodes} x {self._spec.accelerator or 'node'} on {self._provider.name}>"

    @property
    def _cluster(self) -> Cluster:
        if self._open is None or self._open.cluster is None:
            raise PoolClosed(self._why_closed())
        return self._open.cluster

    def _why_closed(self) -> str:
        return "the pool is closed: its machines are gone" if self._was_opened else "the pool is not open: write `with sky.ComputePool(...) as pool:`"


class MultiPool:
    """Several pools, opened in parallel and closed in parallel. If one fails to open, all are closed and its error is raised.

    with MultiPool(ComputePool(accelerator="T4"), ComputePool(accelerator="A100")) as (t4, a100):
        ...
    """

    def __init__(self, *pools: ComputePool) -> None:
        self._pools = pools

    def __enter__(self) -> tuple[ComputePool, ...]:
        try:
            self._all(ComputePool.open, "could not open all pools")
        except BaseException:
            self._all(ComputePool.close, "could not close all pools")
            raise
        return self._pools

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        self._all(ComputePool.close, "could not close all pools")

    def _all(self, verb: Callable[[ComputePool], object], what: str) -> None:
        if not self._pools:
            return
        with ThreadPoolExecutor(len(self._pools), thread_name_prefix="skyward-multipool") as threads:
            errors = [future.exception() for future in [threads.submit(verb, pool) for pool in self._pools]]
        failures = [error for error in errors if error is not None]
        if len(failures) == 1:
            raise failures[0]
        if failures:
            raise BaseExceptionGroup(what, failures)


class _Open:
    """One opening of a pool: everything that must be undone. Knows nothing of the pool object, so that a forgotten pool can be collected."""

    def __init__(self, spec: PoolSpec, provider: Provider, on_event: Callback | None) -> None:
        self.pool_id = f"sky-{uuid.uuid4().hex[:12]}"
        self.spec = spec
        self.provider = provider
        self.meter = Meter()
        self.lease: Lease | None = None
        self.cluster: Cluster | None = None
        self.final: CostFinal | None = None
        self.is_running = False
        self.is_released = False
        self._display = console.display(spec.display)
        sinks = [callback for callback in (registered_callback(), on_event) if callback is not None]
        self._callback = compose(*sinks, self._display)
        self._telling = threading.RLock()
        self._stopping = threading.Lock()
        self._ended = threading.Event()

    def emit(self, event: SkywardEvent) -> None:
        """Tell one event, never two at once, and none after the bill."""
        with self._telling:
            if self.final is None or event is self.final:
                self._callback(event)

    def start(self) -> None:
        """Open; on any error everything is undone and the bill is told before it is raised."""
        started = time.monotonic()
        deadline = started + self.spec.provision_timeout
        dask = threading.Thread(target=importlib.import_module, args=("skyward_core.cluster",), name="skyward-import", daemon=True)
        try:
            with ExitStack() as undo:
                undo.callback(self._settle_bill)
                undo.push(self._tell_error)
                dask.start()  # half a second that passes while the nodes come up
                certificate = make_certificate(self.pool_id)
                lease = lifecycle.acquire(self.spec, self.provider, self.pool_id, certificate, emit=self.emit, meter=self.meter, undo=undo)
                self.lease = lease
                dask.join()
                cluster_module = importlib.import_module("skyward_core.cluster")
                self.cluster = cluster = cluster_module.Cluster(lease, certificate, self.emit)
                undo.callback(cluster.close, "the pool could not be opened")
                cluster.start(deadline, lambda: self._check_nodes(lease))
                self.is_running = True  # before the undo is let go: an asynchronous exception may come between any two lines, and then `stop` is the undo
                undo.pop_all()
        except BaseException:
            self._display.close()
            raise
        atexit.register(self._at_exit)
        self.emit(PoolReady(self.pool_id, len(lease.nodes), cluster.slots, time.monotonic() - started))
        threading.Thread(target=self._watch_clock, name="skyward-clock", daemon=True).start()

    def stop(self, reason: str) -> None:
        """Close everything, in the order cluster, machines, bill; each is tried whatever happened to the one before."""
        with self._stopping:
            if not self.is_running:
                return
            self.is_running = False
        self._ended.set()
        assert self.cluster is not None
        try:
            self.emit(PoolStopping())
            self.cluster.close(reason)
        finally:
            try:
                self.release()
            finally:
                self._settle_bill()
                self._display.close()

    def release(self) -> None:
        """Give the machines back unless that was done. Called again, by `close` or at the interpreter's end, if a second interrupt has cut it off."""
        if self.lease is not None and not self.is_running and not self.is_released:
            lifecycle.release(self.lease, self.provider, emit=self.emit, meter=self.meter)
            self.is_released = True
            atexit.unregister(self._at_exit)

    def _tell_error(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        if isinstance(error, SkywardError):
            self.emit(Error(str(error)))

    def _settle_bill(self) -> None:
        final = self.meter.final()
        if final is not None:
            self.final = final
            self.emit(final)

    def _check_nodes(self, lease: Lease) -> None:
        living = {instance.id for instance in self.provider.instances(lease.pool_id)}
        preparations = [bootstrap.Preparation(node.instance, lambda _: None) for node in lease.nodes]
        bootstrap.raise_if_gone(preparations, {node.instance.id for node in lease.nodes} - living)

    def _watch_clock(self) -> None:
        """Tell the cost now and then, and end a pool that has been idle for too long."""
        told = time.monotonic()
        while not self._ended.wait(CLOCK_SECONDS):
            cluster = self.cluster
            assert cluster is not None
            now = time.monotonic()
            if now - told >= COST_SECONDS:
                told = now
                self.emit(self.meter.update())
            if not cluster.is_idle:
                cluster.busy_at = now
            elif now - cluster.busy_at > self.spec.timeout:
                _log.warning("the pool was idle for %.0f s (timeout) and ends itself", self.spec.timeout)
                self.stop(f"the pool was idle for {self.spec.timeout:.0f} s (ComputePool(timeout=...)) and has ended itself")

    def _at_exit(self) -> None:
        self.stop("the interpreter ends")
        self.release()


def complete(spec: PoolSpec, credentials: Provider | None = None) -> tuple[PoolSpec, Provider, str]:
    """Return the spec with the settings filled in where it says nothing, the provider to ask, and where it comes from if not from the caller."""
    settings = Settings.read()
    missing = {name: value for name, value in settings.fields.items() if name not in spec.model_fields_set or (name == "provider" and spec.provider is None)}
    if missing:
        try:
            spec = spec.with_(**missing)
        except BadRequest as error:
            raise BadRequest(f"{error} (from the settings: {', '.join(f'{name} from {settings.sources[name]}' for name in missing)})") from error
    if credentials is not None:
        return spec, credentials, ""
    if spec.provider is not None:
        return spec, spec.provider, f"provider {spec.provider.name!r}, from {settings.sources['provider']}" if "provider" in missing else ""
    return spec, base.load(DEFAULT_PROVIDER), "no provider was named, neither in the program nor in the settings: running on this machine (Local)"


def _checked[R](pending: PendingCompute[R]) -> PendingCompute[R]:
    if isinstance(cast(object, pending), PendingCompute):
        return pending
    raise TypeError(f"a pool runs pending calls, not {type(pending).__name__!r}: decorate the function with @sky.compute and call it")


def _results(futures: Sequence[Future[Any]] | Sequence[CallFuture[Any]]) -> list[Any]:
    """Wait for all. On the first error, in the order of the calls among those that ended, or an interrupt, the others are cancelled."""
    try:
        wait(futures, return_when=FIRST_EXCEPTION)
        for future in futures:
            if future.done() and not future.cancelled() and (error := future.exception()) is not None:
                raise error
        return [future.result() for future in futures]
    finally:
        for future in futures:
            future.cancel()


def _collected(opened: _Open) -> None:
    if opened.is_running:
        ids = ", ".join(node.instance.id for node in opened.lease.nodes) if opened.lease else "none"
        try:
            warnings.warn(f"a ComputePool was collected while open ({ids}): use `with`, or close() it", ResourceWarning, stacklevel=2)
        finally:  # the warning is an error under `python -W error`
            opened.stop("the pool object was collected")
