"""The futures that a pool returns for calls, and how outcomes become their values or exceptions.

Futures are set in the thread "skyward-results". Loading a value runs the code of its types, and may import whole
frameworks: the engine's thread does not wait for that. It only loads small results whose pickles name no type
(`plain_value`), and sets their futures. Callbacks of futures run in the thread "skyward-callbacks": one that blocks
delays other callbacks, and no result.

A call that streams has an `ItemFuture`. Its result has no meaning; only the end of the call counts. Items that have
come before the end are taken first:

    engine's thread ──put_item, set_total, break_off──▶ ItemFuture ──take──▶ the consumer's thread
                    ◀───────────────────give_credit, leave─────────
"""

from __future__ import annotations

import contextlib
import io
import logging
import pickle
import queue
import signal
import threading
import time
from _thread import LockType, RLock, allocate_lock
from collections.abc import Callable, Sequence
from concurrent.futures import Future
from dataclasses import dataclass
from typing import Any, NamedTuple, NoReturn

from skyward_core.concurrency.threads import LoopThread
from skyward_core.errors import Bytes, CallCrashed, CallOutOfMemory, CallTimedOut, ResultNotLoaded
from skyward_core.serialization import exceptions, pickling
from skyward_core.serialization import unpicklable as exception_state
from skyward_core.serialization.exceptions import note_for
from skyward_core.serialization.unpicklable import one_line
from skyward_core.wire.messages import Outcome, OutcomeKind, Parcel, no_link

PLAIN_BYTES = 4096
"""The largest pickle of a result that the engine's thread loads."""
LINES_SECONDS = 0.2
"""How long a result waits for the lines of its call while callbacks and displays take no events."""
MOST_LINES_SECONDS = 5.0
"""How long a result waits for the lines of its call at most, where callbacks and displays are slow."""
LOADING_SECONDS = 60.0
"""How long the end of a pool waits for results that are being loaded: longer than the import of a framework takes."""
LOOK_SECONDS = 0.005
_log = logging.getLogger("skyward")


class SmallCondition(RLock):  # pyright: ignore[reportGeneralTypeIssues] - in C it is not final
    """The methods of `threading.Condition()` that a future uses, in a tenth of its 1,300 bytes: a map of 100,000 calls
    has as many futures.
    """

    __slots__ = ("_waiters",)

    def __init__(self) -> None:
        self._waiters: tuple[LockType, ...] = ()

    def wait(self, timeout: float | None = None) -> bool:
        """Release the lock until `notify_all`, and take it again; False if the time runs out before."""
        waiter = allocate_lock()
        waiter.acquire()
        self._waiters = (*self._waiters, waiter)
        is_notified = False
        me: Any = self  # typeshed does not have these methods of an RLock
        state = me._release_save()
        try:
            is_notified = waiter.acquire() if timeout is None else waiter.acquire(timeout=max(0.0, timeout))
        finally:
            me._acquire_restore(state)
            if not is_notified:  # a timeout or an exception
                self._waiters = tuple(other for other in self._waiters if other is not waiter)
        return is_notified

    def notify_all(self) -> None:
        """Wake all waiting threads."""
        waiters, self._waiters = self._waiters, ()
        for waiter in waiters:
            waiter.release()


class CallFuture[R](Future[R]):
    """The future of a submitted call. Like any `concurrent.futures.Future`, but `cancel()` also stops a call that is
    running.

    `cancel` calls `stop` with the call's id. `call_back` runs the done-callbacks; by default the thread that ends the
    future does.
    """

    def __init__(
        self, call_id: str, stop: Callable[[str], None], call_back: Callable[[Callable[[], None]], None] | None = None
    ) -> None:
        super().__init__()
        self._condition: Any = SmallCondition()
        self.call_id = call_id
        self.use = ""
        """The id of the use that pays for the call; "" for none."""
        self.seconds: float | None = None
        """How long the call ran on its node, in its last run. None before its end, and if it was lost or cancelled."""
        self.cost: float | None = None
        """Its share of the bill, in USD: the price of its slot for that time.

        None where `seconds` is, and in a pool that another client pays for.
        """
        self._stop = stop
        self._call_back = call_back

    def cancel(self) -> bool:
        """Stop the call, or do not begin it; False if it has ended already.

        A call in flight may begin, and is stopped then.
        """
        if not super().cancel():
            return False
        self._stop(self.call_id)
        return True

    def claim(self) -> bool:
        """Take the right to set the result; False if the call was cancelled before."""
        return self.running() or self.set_running_or_notify_cancel()

    def _invoke_callbacks(self) -> None:
        callbacks: list[Any] = self._done_callbacks  # type: ignore[attr-defined]
        if self._call_back is None or not callbacks:
            super()._invoke_callbacks()  # type: ignore[misc]
        else:
            self._call_back(super()._invoke_callbacks)  # type: ignore[misc]


@dataclass(slots=True)
class Settled:
    """A call that has ended: its future, a function that loads its value (and may raise), and the parcels to remove
    after that.

    The value comes after the event with the number `after`, unless that takes too long.
    """

    future: CallFuture[Any]
    value: Callable[[], Any]
    spent: Sequence[Parcel] = ()
    after: int = 0
    until: float = 0.0


class Results:
    """Sets futures in the order of `put`, except that a result whose log lines are still to be displayed comes later.

    It waits while callbacks and displays take events, MOST_LINES_SECONDS at most: one that blocks costs LINES_SECONDS.

    `delivered` returns the number of the last event that callbacks and displays have taken.
    """

    def __init__(self, delivered: Callable[[], int], settled: Callable[[CallFuture[Any]], object]) -> None:
        self._delivered = delivered
        self._settled = settled
        self._queue: queue.SimpleQueue[Settled | None] = queue.SimpleQueue()
        self._waiting: list[Settled] = []
        self._behind = 0
        """The number of the event for which a result has waited too long: until its delivery no result waits."""
        self._last_delivered = 0
        self._delivered_at = 0.0
        """When `delivered` was last seen to grow."""
        self._is_closing = False
        self._thread = LoopThread("skyward-results", self._run)

    def start(self) -> None:
        """Start the thread."""
        self._thread.start()

    @property
    def is_own_thread(self) -> bool:
        """Whether this is the results' thread, which runs code of a value that it loads."""
        return self._thread.is_current

    def put(self, settled: Settled) -> None:
        """Let the thread set a future. Does not wait."""
        if settled.after:
            settled.until = time.monotonic() + MOST_LINES_SECONDS
        self._queue.put(settled)

    def close(self) -> None:
        """End the thread once all futures are set, and wait for that, LOADING_SECONDS at most: machines must not cost
        money because the code of a result's type hangs. The thread itself does not wait.
        """
        self._queue.put(None)
        if not self.is_own_thread:
            self._thread.join(LOADING_SECONDS)
            if self._thread.is_alive:
                words = "a result is still being loaded after %g s; the pool ends, and the result comes later"
                _log.warning(words, LOADING_SECONDS)

    def _run(self) -> None:
        while not (self._is_closing and not self._waiting):
            try:
                item = self._queue.get(timeout=LOOK_SECONDS if self._waiting else None)
            except queue.Empty:
                item = None
            else:
                self._is_closing = self._is_closing or item is None
            if isinstance(item, Settled):
                self._waiting.append(item) if self._is_to_wait(item) else self.set(item)
            item = None  # a large result must not live until the next one comes
            self._set_due()

    def _is_to_wait(self, item: Settled) -> bool:
        delivered = self._delivered()
        return delivered < item.after and delivered >= self._behind

    def _set_due(self) -> None:
        if not self._waiting:
            self._delivered_at = 0.0
            return
        delivered, now = self._delivered(), time.monotonic()
        if delivered != self._last_delivered or not self._delivered_at:
            self._last_delivered, self._delivered_at = delivered, now
        is_stuck = now - self._delivered_at > LINES_SECONDS
        if is_stuck:
            self._behind = max(item.after for item in self._waiting)
        waiting, self._waiting = self._waiting, []
        due = list[Settled]()
        for item in waiting:
            (due if item.after <= delivered or item.until <= now or is_stuck else self._waiting).append(item)
        del waiting[:]
        while due:
            self.set(due.pop(0))

    def set(self, item: Settled) -> None:
        """Set a future in this thread.

        Another thread may call this only if the value is loaded: loading may run code of its types.
        """
        future = item.future
        try:
            if not future.claim():
                self._settled(future)
                return
            try:
                value = item.value()
            except BaseException as error:
                self._settled(future)
                future.set_exception(error)
            else:
                self._settled(future)
                future.set_result(value)
        except Exception:
            _log.exception("the future of a call could not be set")
        finally:
            for parcel in item.spent:  # last: freeing a hundred megabytes takes longer than all other steps
                _release(parcel)


def _release(parcel: Parcel) -> None:
    """Release a value's memory. A file that cannot be removed stays until its node ends; later results must come."""
    try:
        parcel.release()
    except Exception:
        _log.warning("the memory of a result could not be freed", exc_info=True)


class Callbacks:
    """Calls done-callbacks of futures, one after the other, in a thread that starts with the first of them."""

    def __init__(self) -> None:
        self._queue: queue.SimpleQueue[Callable[[], object] | None] = queue.SimpleQueue()
        self._lock = threading.Lock()
        self._thread: LoopThread | None = None
        self._is_closed = False

    def put(self, call: Callable[[], object]) -> None:
        """Let the thread call a function, without waiting. After `close` it is called in this thread."""
        with self._lock:
            if not self._is_closed:
                self._queue.put(call)
                self._start()
                return
        call()

    def try_again(self) -> None:
        """Start the thread if functions wait because none could be started. For those who come every second: a program
        may wait for a callback, and make no other call.
        """
        with self._lock:
            if not self._is_closed and not self._queue.empty():
                self._start()

    def _start(self) -> None:
        if self._thread is None:
            thread = LoopThread("skyward-callbacks", self._run)
            self._thread = thread if thread.start_if_possible() else None

    def close(self) -> None:
        """End the thread after all callbacks. Does not wait for it: a callback may block.

        If no thread could be started, what waits is called here.
        """
        with self._lock:
            if self._is_closed:
                return
            self._is_closed = True
            self._queue.put(None)
        if self._thread is None:
            self._run()

    def _run(self) -> None:
        while (call := self._queue.get()) is not None:
            try:
                call()
            except BaseException:  # a callback may raise SystemExit: no thread of the engine ends by it
                _log.exception("a callback of a call's future has failed")


class NotPlain(Exception):
    """The value must be loaded in the results' thread."""


class _PlainUnpickler(pickle.Unpickler):
    """Loads pickles without classes and functions: then only the unpickler's code runs."""

    def find_class(self, module_name: str, global_name: str, /) -> NoReturn:
        raise NotPlain


def plain_value(outcome: Outcome) -> Any:
    """Return the result if it is small and made of Python's own scalars and containers. Raises NotPlain.

    The engine's thread may load such a result: the caller has it sooner by one change of threads.
    """
    parcel = outcome.parcel
    if (
        outcome.kind is not OutcomeKind.RESULT
        or parcel.path is not None
        or parcel.buffers
        or len(parcel.data) > PLAIN_BYTES
    ):
        raise NotPlain
    try:
        return _PlainUnpickler(io.BytesIO(parcel.data)).load()
    except Exception as error:  # the results' thread gets the same error, and reports it
        raise NotPlain from error


def value_of(outcome: Outcome, node: int) -> Any:
    """Return the call's result, or raise its exception. The outcome's parcel must be on this machine."""
    parcel = outcome.parcel
    if outcome.kind is OutcomeKind.RESULT:
        try:
            return _loaded(parcel)
        except MemoryError:
            raise
        except BaseException as failure:  # loading runs the code of the result's types
            raise _not_loaded(failure, *parcel.contents(), node) from failure
    if outcome.kind is OutcomeKind.ERROR:
        raise _remote_exception(outcome, parcel, node)
    if outcome.kind is OutcomeKind.CANCELLED:
        raise CallCrashed(f"the call was stopped on node {node}", node, outcome.exit_code, outcome.output)
    if outcome.kind is OutcomeKind.TIMED_OUT:
        had = float(outcome.text)
        raise CallTimedOut(
            f"the call had {had:g} s to run on node {node}, and was stopped after {outcome.seconds:.1f} s",
            node,
            had,
            outcome.output,
        )
    if outcome.kind is OutcomeKind.OUT_OF_MEMORY:
        by = f" by {outcome.text}" if outcome.text else ""
        message = (
            f"the call used more memory than its worker on node {node} has, and was killed{by}; ask for more with"
            " ComputePool(memory=...)"
        )
        raise CallOutOfMemory(message, node, outcome.exit_code, outcome.output)
    raise CallCrashed(
        f"the process of the call died on node {node}: {outcome.text or _death(outcome.exit_code)}",
        node,
        outcome.exit_code,
        outcome.output,
    )


def _loaded(parcel: Parcel) -> Any:
    if parcel.path is None or parcel.data or len(parcel.spans) > 1:
        return pickling.loads(*parcel.contents())
    with open(
        parcel.path, "rb", opener=no_link
    ) as file:  # mapped, the pickle would be in memory beside the value that it holds
        return pickle.load(file)


def _not_loaded(failure: BaseException, data: Bytes, buffers: Sequence[Bytes], node: int) -> ResultNotLoaded:
    missing = failure.name.partition(".")[0] if isinstance(failure, ModuleNotFoundError) and failure.name else ""
    if missing:
        why = f"its type is of {missing!r}, which is not installed here. Install its package and call error.load()"
    else:
        cause = one_line(failure) if isinstance(failure, Exception) else type(failure).__name__
        why = f"{cause}. Fix that and call error.load()"
    message = (
        f"the call succeeded on node {node}, but its result cannot be loaded here: {why}; or let the function return"
        " plain values (numbers, lists, dictionaries, NumPy arrays). There is no need to run it again:"
        " error.result_bytes keeps the result"
    )
    return ResultNotLoaded(message, node, missing, data, buffers)


def _remote_exception(outcome: Outcome, parcel: Parcel, node: int) -> BaseException:
    try:
        error = exceptions.unpack(*parcel.contents(), node, outcome.text)
    except Exception:
        return exceptions.remote_error(node, outcome.text)
    if note := note_for(error):
        exception_state.add_note(error, note)
    return error


def _death(exit_code: int | None) -> str:
    if exit_code is None:
        return "its exit code is unknown"
    if exit_code >= 0:
        return f"it ended with exit code {exit_code}"
    with contextlib.suppress(ValueError):  # a real-time signal has no name
        by = signal.Signals(-exit_code).name
        return f"killed by {by}{' (out of memory?)' if exit_code == -signal.SIGKILL else ''}"
    return f"killed by signal {-exit_code}"


class _Arrived(NamedTuple):
    parcel: Parcel
    node: int


class ItemFuture(CallFuture[Any]):
    """The future of one call that streams. `ahead`: how many items the node may be ahead of the consumer.

    `give_credit` lets the call yield the items below a number; `post` does something in the engine's thread.
    """

    def __init__(
        self,
        call_id: str,
        ahead: int,
        stop: Callable[[str], None],
        call_back: Callable[[Callable[[], None]], None],
        give_credit: Callable[[str, int], None],
        post: Callable[[Callable[[], None]], None],
    ) -> None:
        super().__init__(call_id, stop, call_back)
        self._ahead = self._below = ahead
        self._give_credit = give_credit
        self._post = post
        self._items: dict[int, _Arrived] = {}
        self._taken = 0
        self._total: int | None = None
        self._broken: BaseException | None = None
        self._is_over = False
        self._wake: Callable[[], object] | None = None

    # ── from the engine ──────────────────────────────────────────────────────────────────────────────────────────────

    def put_item(self, number: int, parcel: Parcel, node: int) -> None:
        """An item is here. Its memory is released when it is taken, or at once if there is no consumer any more."""
        with self._condition:
            is_wanted = not self._is_over
            if is_wanted:
                self._items[number] = _Arrived(parcel, node)
        if is_wanted:
            self._notify()
        else:
            parcel.release()

    def set_total(self, total: int) -> None:
        """The call has ended after so many items. Some may still be on their way here."""
        self._total = total

    def break_off(self, error: BaseException) -> None:
        """An item cannot come: the consumer gets this error in its place."""
        with self._condition:
            self._broken = self._broken or error
        self._notify()

    def _invoke_callbacks(self) -> None:
        self._notify()
        super()._invoke_callbacks()

    def _notify(self) -> None:
        with self._condition:
            self._condition.notify_all()
            wake, self._wake = self._wake, None
        if wake is not None:
            wake()

    # ── from the consumer ────────────────────────────────────────────────────────────────────────────────────────────

    def take(self) -> Any:
        """Return the next item; waits for it. Raises StopIteration at the end, and the call's exception."""
        with self._condition:
            while not self._is_decided:
                self._condition.wait()
            arrived = self._items.pop(self._taken, None)
            if arrived is not None:
                self._taken += 1
        if arrived is None:
            self._end()
        self._go_ahead()
        try:
            return value_of(Outcome(self.call_id, OutcomeKind.RESULT, arrived.parcel), arrived.node)
        finally:
            arrived.parcel.release()

    def is_ready(self, wake: Callable[[], object]) -> bool:
        """Return whether `take` would not wait. If it would, `wake` is called once when that changes, in any thread."""
        with self._condition:
            is_decided = self._is_decided
            self._wake = None if is_decided else wake
        return is_decided

    def leave(self) -> None:
        """Take no more items: stop the call and drop what has come. Idempotent."""
        with self._condition:
            self._is_over = True
            items, self._items = self._items, {}
        for arrived in items.values():
            arrived.parcel.release()
        self.cancel()

    def leave_later(self) -> None:
        """The same, soon and in the engine's thread."""
        self._post(self.leave)

    @property
    def _is_decided(self) -> bool:
        """Whether the next item is here, or known not to come."""
        if self._taken in self._items or self._is_over or self._broken is not None:
            return True
        return self.done() and (self._total is None or self._taken >= self._total)

    def _end(self) -> NoReturn:
        """Raise StopIteration or, once, the exception that has ended the items."""
        if self._is_over:
            raise StopIteration
        error = self._broken or (self.exception() if not self.cancelled() else None)
        self.leave()
        if error is not None:
            raise error
        raise StopIteration

    def _go_ahead(self) -> None:
        """Let the call yield more once the consumer has taken half of what the node may be ahead."""
        below = self._taken + self._ahead
        if not self.done() and below - self._below >= max(1, self._ahead // 2):
            self._below = below
            self._give_credit(self.call_id, below)
