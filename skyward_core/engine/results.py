"""Outcomes become values or exceptions, and futures are set: in the thread "skyward-results".

Loading a value runs the code of its types, and may import whole frameworks: the engine's thread does not wait for that.
It only loads small results whose pickles name no type (`plain_value`), and sets their futures. Callbacks of futures run
in the thread "skyward-callbacks": one that blocks delays other callbacks, and no result.
"""

from __future__ import annotations

import io
import logging
import pickle
import queue
import signal
import threading
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, NoReturn

from skyward_core.engine.futures import CallFuture
from skyward_core.errors import Bytes, CallCrashed, CallOutOfMemory, CallTimedOut, ResultNotLoaded
from skyward_core.serialization import exception_state, exceptions, pickling
from skyward_core.serialization.exception_notes import note_for
from skyward_core.serialization.unpicklable import one_line
from skyward_core.worker.wire import Outcome, OutcomeKind, Parcel

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
        self._thread = threading.Thread(target=self._run, name="skyward-results", daemon=True)

    def start(self) -> None:
        """Start the thread."""
        self._thread.start()

    @property
    def is_own_thread(self) -> bool:
        """Whether this is the results' thread, which runs code of a value that it loads."""
        return threading.current_thread() is self._thread

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
        if self._thread.is_alive() and not self.is_own_thread:
            self._thread.join(LOADING_SECONDS)
            if self._thread.is_alive():
                words = "a result is still being loaded after %g s; the pool ends, and the result comes later"
                _log.warning(words, LOADING_SECONDS)

    def _run(self) -> None:
        is_closing = False
        while not (is_closing and not self._waiting):
            try:
                item = self._queue.get(timeout=LOOK_SECONDS if self._waiting else None)
            except queue.Empty:
                item = None
            else:
                is_closing = is_closing or item is None
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
                parcel.release()


class Callbacks:
    """Calls done-callbacks of futures, one after the other, in a thread that starts with the first of them."""

    def __init__(self) -> None:
        self._queue: queue.SimpleQueue[Callable[[], object] | None] = queue.SimpleQueue()
        self._lock = threading.Lock()
        self._thread: threading.Thread | None = None
        self._is_closed = False

    def put(self, call: Callable[[], object]) -> None:
        """Let the thread call a function, without waiting. After `close` it is called in this thread."""
        with self._lock:
            if not self._is_closed:
                self._queue.put(call)
                if self._thread is None:
                    self._thread = threading.Thread(target=self._run, name="skyward-callbacks", daemon=True)
                    self._thread.start()
                return
        call()

    def close(self) -> None:
        """End the thread after all callbacks. Does not wait for it: a callback may block."""
        with self._lock:
            if not self._is_closed:
                self._is_closed = True
                self._queue.put(None)

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
    with open(parcel.path, "rb") as file:  # mapped, the pickle would be in memory beside the value that it holds
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
    return f"killed by {signal.Signals(-exit_code).name}{' (out of memory?)' if exit_code == -signal.SIGKILL else ''}"
