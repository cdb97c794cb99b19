"""`PoolUse`: one step's use of one pool, with its own bill.

    new ──open──▶ open (its row is in the ledger) ──close──▶ ended: its bill is final
     └─────stop, from a signal handler, in any state──────▶ its calls end; a pool of its own ends too

A pool without a name that belongs to the use alone ends with it, and its whole bill is the use's. Of any other pool the
use has the price of the slots that its calls hold, for as long as they hold them: those that fail, time out, are
cancelled or lost with their node, too. The ledger has a row of the use from before its first call
(`ledger/uses.py`), so a killed process loses nothing: docs/decisions/0045.
"""

from __future__ import annotations

import os
import threading
import time
import uuid
from collections.abc import Callable, Generator, Iterable
from contextlib import contextmanager
from dataclasses import dataclass
from types import TracebackType
from typing import TYPE_CHECKING, Any, Self, cast

from skyward_core.compute import PendingCompute
from skyward_core.concurrency.item_stream import ItemStream
from skyward_core.engine.futures import CallFuture
from skyward_core.errors import InstancesLeft, PoolClosed
from skyward_core.events.utilisation import Utilisation
from skyward_core.pool.current_session import note_machines_left
from skyward_core.pool.pool import ComputePool
from skyward_core.work import Work, paid_by

if TYPE_CHECKING:
    from skyward_core.ledger.uses import UseCount
    from skyward_core.session.pool_uses import UseBook


@dataclass(frozen=True, slots=True)
class UseBill:
    """What a use has cost so far, or in all.

    Units: USD, seconds. `is_final`: nothing is added any more. `seconds` is the time since it was opened,
    `slot_seconds` for how long its calls have held slots. `is_shared`: the pool may have other uses, and this is the
    part of this one.
    """

    pool_id: str
    cost_usd: float
    is_final: bool
    seconds: float
    slot_seconds: float
    is_shared: bool


class PoolUse:
    """One step's use of one pool.

        with sky.PoolUse(sky.ComputePool(name="nightly", keep_warm=600, work=work)) as use:
            result = use.run(train(data))
        print(use.bill().cost_usd)

    Opens the pool if it is not open, and closes what it has opened: a pool with a name is left to its other users.
    """

    def __init__(self, pool: ComputePool, work: Work | None = None, *, is_alone: bool = True) -> None:
        """Make a use that is not open.

        `work`: what the calls are for; None: what the pool is for. `is_alone`: no other use has this pool object.
        """
        self.id = uuid.uuid4().hex
        self.pool = pool
        self.work = pool.work if work is None else work
        self.utilisation = Utilisation()
        """What the nodes do while calls of the use run, and what these have reported; complete some moments later."""
        self._is_alone = is_alone and pool.spec.name is None
        self._has_opened = False
        self._began = self._ended = 0.0
        self._book: UseBook | None = None
        self._count: UseCount | None = None
        """What it has had in all, after its end."""
        self._is_stopped = False
        self._process = os.getpid()
        self._opening, self._closing = threading.Lock(), threading.Lock()

    # ── life ─────────────────────────────────────────────────────────────────────────────────────────────────────────

    def open(self) -> Self:
        """Open the pool, or join it by its name, and record the use.

        May be called again, from any thread. Raises what `ComputePool.open` raises. If the ledger does not answer when
        the pool is open, the use begins, and its row is written later.
        """
        with self._opening:
            if not self._began:
                self._open()
        return self

    def _open(self) -> None:
        self._began, self._process = time.monotonic(), os.getpid()
        try:
            if not self.pool.is_active:
                self._has_opened = True  # before: a signal handler may raise as soon as the pool is open
                self.pool.open()
            if not self._is_alone:
                book = self.pool.uses
                book.begin(self.id, self.work)
                self._book = book
            self.pool.begin_use(self.id, self.utilisation)
        except BaseException as error:
            if (left := self.close()) is not None:
                note_machines_left(error, left)
            self._began = self._ended = 0.0
            self._has_opened = False
            raise

    def close(self) -> InstancesLeft | None:
        """End the use and what it has opened; return the machines that were not confirmed gone. May be called twice.

        Calls that still run are stopped, and no others are accepted. If the ledger does not answer, the bill is not
        final: the row of the use is settled later. In a fork of the process that has opened it, this does nothing.
        Raises LedgerError if the pool's end could not be written.
        """
        if self._process != os.getpid():
            return None
        with self._closing:
            self.pool.end_use(self.id)
            try:
                if self._book is not None and not self._ended:
                    self._count = self._book.end(self.id)
            finally:
                self._ended = self._ended or time.monotonic()
                left = self.pool.hand_over() if self._has_opened else None
            return left

    def stop(self) -> None:
        """End the calls, and a pool that belongs to this use alone, and return at once; for kill hooks and signal
        handlers. `close` may follow.
        """
        self._is_stopped = True
        if self._is_alone:
            self.pool.terminate_now()
        self.pool.cancel_for(self.id)

    def __enter__(self) -> Self:
        return self.open()

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        """Close. Raises InstancesLeft; after an exception of the block, a note of that names the machines."""
        left = self.close()
        if left is not None and error is None:
            raise left
        if left is not None and error is not None:
            note_machines_left(error, left)

    # ── calls ────────────────────────────────────────────────────────────────────────────────────────────────────────

    def submit[R](self, call: PendingCompute[R]) -> CallFuture[R]:
        """Submit a call and return at once (`ComputePool.submit`)."""
        return self.submit_all([call])[0]

    def submit_all[R](self, calls: Iterable[PendingCompute[R]]) -> list[CallFuture[R]]:
        """Submit many calls at once; return their futures, in order (`ComputePool.submit_all`)."""
        return self._noted(lambda: self.pool.submit_all(calls))

    def submit_broadcast[R](self, call: PendingCompute[R]) -> list[CallFuture[R]]:
        """Submit the call once for each worker (`ComputePool.submit_broadcast`)."""
        return self._noted(lambda: self.pool.submit_broadcast(call))

    def stream(self, call: PendingCompute[Any]) -> ItemStream[Any]:
        """Submit a call and return at once with its items (`ComputePool.stream`)."""
        streams: list[ItemStream[Any]] = []

        def submit() -> list[CallFuture[Any]]:
            streams.append(self.pool.stream(call))
            return [cast("CallFuture[Any]", streams[0].future)]

        self._noted(submit)
        return streams[0]

    def run[R](self, call: PendingCompute[R]) -> R:
        """Run one call and return its result."""
        return self.submit(call).result()

    @contextmanager
    def paying(self) -> Generator[ComputePool]:
        """Yield the pool, and pay for all calls that the block makes on it, by any method of the pool.

        Calls of other threads are the use's too if they run in a copy of the block's context, as `asyncio.to_thread`
        makes one. `stop` and `close` end those that were made before; after `close` others raise PoolClosed.
        """
        self._must_be_open()
        if self._book is not None:
            self._book.has_calls(self.id)
        with paid_by(self.id):
            yield self.pool

    def _noted[R](self, submit: Callable[[], list[CallFuture[R]]]) -> list[CallFuture[R]]:
        self._must_be_open()
        with paid_by(self.id):
            futures = submit()
        if self._book is not None:
            self._book.has_calls(self.id)
        if self._is_stopped:  # `stop` may have missed these
            self.pool.cancel_for(self.id)
        return futures

    def _must_be_open(self) -> None:
        if not self._began or self._ended:
            raise PoolClosed(f"the use of the pool {'has ended' if self._ended else 'is not open'}: open another one")

    # ── money ────────────────────────────────────────────────────────────────────────────────────────────────────────

    @property
    def cost(self) -> float:
        """USD that the use has cost so far; after its end in all."""
        return self.bill().cost_usd

    @property
    def is_waiting(self) -> bool:
        """Whether it has calls, and none of them holds a slot: they wait at their workers for slots that others hold.

        It is known two to seven seconds after the calls were made; of a pool that belongs to this use alone it is
        never so.
        """
        return self._book is not None and self._book.is_waiting(self.id)

    def bill(self) -> UseBill:
        """Return its bill so far; after `close` the whole one, which is also that of the ledger."""
        slot_seconds, cost_usd, is_final = 0.0, self.pool.cost, self.pool.cost_final is not None
        if not self._is_alone:
            count = self._count or (None if self._book is None else self._book.count(self.id))
            slot_seconds, cost_usd = (0.0, 0.0) if count is None else (count.slot_seconds, count.cost_usd)
            is_final = self._book is not None and self._book.is_final(self.id)
        return UseBill(
            self.pool.id,
            cost_usd,
            is_final,
            (self._ended or time.monotonic()) - self._began,
            slot_seconds,
            not self._is_alone,
        )
