"""Runs several functions at the same time, in plain threads.

An `atexit` callback tears down a pool that was left open. By then concurrent.futures has closed its executors ("cannot
schedule new futures after interpreter shutdown"), so teardown cannot use them. Plain threads still start.
"""

from __future__ import annotations

import os
import sys
import threading
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from concurrent.futures import TimeoutError as NotInTime
from contextlib import suppress
from contextvars import copy_context
from queue import SimpleQueue
from types import ModuleType
from typing import Any, override

from skyward_core.errors import BadRequest

MOST_THREADS = 8
SECONDS = 10.0
MODULES = ("thread", "threading", "socket", "select", "selectors", "subprocess", "queue", "time")
"""Modules that a pool's threads and event loops use. If they are replaced, the threads wait for each other for ever."""


class Threads:
    """Runs each piece of work in a separate thread. `join` waits for all of them."""

    def __init__(self, name: str) -> None:
        self._name = name
        self._threads: list[threading.Thread] = []

    def submit[**P, R](self, work: Callable[P, R], *args: P.args, **words: P.kwargs) -> Future[R]:
        """Start a function in a thread, or run it in this one if no thread can be started.

        Its future cannot be cancelled.
        """
        outcome: Future[R] = Future()
        # asyncio cancels futures that it waits for, and a cancelled one would take no result
        outcome.set_running_or_notify_cancel()

        def run() -> None:
            try:
                outcome.set_result(work(*args, **words))
            except BaseException as error:  # the caller of `result` gets it
                outcome.set_exception(error)

        thread = threading.Thread(target=run, name=f"{self._name}-{len(self._threads)}", daemon=True)
        self._threads = [one for one in self._threads if one.is_alive()]
        try:
            thread.start()
        except RuntimeError:  # some Pythons start none at their end, and there may be too many
            run()
        else:
            self._threads.append(thread)
        return outcome

    def join(self) -> None:
        """Wait until all work is done. A failure is only in its future."""
        for thread in self._threads:
            thread.join()


class PlainExecutor(ThreadPoolExecutor):
    """An executor for asyncio's loops: each function runs in a separate plain thread."""

    def __init__(self, name: str) -> None:
        super().__init__(1)  # it starts a thread with its first work, and gets none
        self._plain = Threads(name)

    @override
    def submit[**P, R](self, fn: Callable[P, R], /, *args: P.args, **kwargs: P.kwargs) -> Future[R]:
        return self._plain.submit(fn, *args, **kwargs)

    @override
    def shutdown(self, wait: bool = True, *, cancel_futures: bool = False) -> None:
        super().shutdown(wait, cancel_futures=cancel_futures)
        if wait:
            self._plain.join()


def side_by_side[T, R](work: Callable[[T], R], things: Sequence[T], name: str, most: int = MOST_THREADS) -> list[R]:
    """Return `work(thing)` for each thing, in order, with a few threads. Raises the first one's error when all are
    done.

    If it is interrupted it starts no more work, and waits for the work that has started.
    """
    if len(things) == 1:
        return [work(things[0])]
    outcomes: list[Future[R]] = [Future() for _ in things]
    todo = deque(zip(things, outcomes, strict=True))

    def run() -> None:
        while True:
            try:
                thing, outcome = todo.popleft()
            except IndexError:
                return
            try:
                outcome.set_result(work(thing))
            except BaseException as error:  # it is in the future
                outcome.set_exception(error)

    threads = Threads(name)
    try:
        for _ in range(min(most, len(things))):
            threads.submit(run)
        threads.join()
    except BaseException:
        todo.clear()
        threads.join()
        raise
    return [outcome.result() for outcome in outcomes]


class PeriodicThread:
    """Calls `step` every so many seconds, from a daemon thread of that name, until `end` is called. The first call
    comes after the first pause, or at once.

    `step` must not wait for a callback or a display, and so it must not log either. What it raises goes to `on_error`,
    and it is called again.
    """

    def __init__(
        self,
        name: str,
        seconds: float,
        step: Callable[[], object],
        on_error: Callable[[Exception], object],
        *,
        is_at_once: bool = False,
    ) -> None:
        self._first_seconds = 0.0 if is_at_once else seconds
        self._seconds = seconds
        self._step = step
        self._on_error = on_error
        self._ended = threading.Event()
        self._thread = threading.Thread(target=self._run, name=name, daemon=True)

    def start(self) -> None:
        """Start the thread."""
        self._thread.start()

    def end(self) -> None:
        """Call `step` no more.

        Does not wait for a call that runs; may be called twice, before `start`, and by `step` itself.
        """
        self._ended.set()

    def join(self, timeout_seconds: float) -> None:
        """Wait for a call that runs. Does nothing in the thread itself."""
        if self._thread.ident not in (None, threading.get_ident()):
            self._thread.join(timeout_seconds)

    def _run(self) -> None:
        pause = self._first_seconds
        while not self._ended.wait(pause):
            pause = self._seconds
            try:
                self._step()
            except Exception as error:  # whatever it is: the next call may succeed
                if not self._ended.is_set():  # after the end its resources may be gone
                    self._on_error(error)


class FinalWork:
    """Does the work that finalizers hand over, in one thread of the process.

    A finalizer runs in any thread, at any line: also in one that holds a lock for which its work would wait. So it
    takes no lock, starts no thread, and waits for nothing.

        begin: the first object with a finalizer ──▶ the thread waits ──hand over──▶ it works ──▶ it waits
                                                          └─ end: of the last object ──▶ the thread ends
    """

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._objects = 0
        """How many may be collected."""
        self._handed_over: SimpleQueue[Callable[[], object] | None] | None = None
        """What the thread takes; None: no thread runs."""
        os.register_at_fork(after_in_child=self.__init__)

    def begin(self) -> None:
        """An object with a finalizer is made. If no thread can be started, finalizers do their work themselves."""
        with self._lock:
            self._objects += 1
            if self._handed_over is None:
                handed_over: SimpleQueue[Callable[[], object] | None] = SimpleQueue()
                thread = threading.Thread(target=self._run, args=(handed_over,), name="skyward-collected", daemon=True)
                with suppress(RuntimeError):
                    thread.start()
                    self._handed_over = handed_over

    def end(self) -> None:
        """An object is not collected any more, or its work is done."""
        with self._lock:
            self._objects -= 1
            if self._objects <= 0 and self._handed_over is not None:
                self._handed_over.put(None)
                self._handed_over = None

    def hand_over(self, work: Callable[[], object]) -> None:
        """Let the thread do this. At the end of the interpreter, when it may not run any more, do it here."""
        handed_over = self._handed_over
        if handed_over is not None and threading.main_thread().is_alive():
            handed_over.put(work)  # re-entrant (Python's documentation of `queue.SimpleQueue`)
        else:
            work()

    def _run(self, handed_over: SimpleQueue[Callable[[], object] | None]) -> None:
        while (work := handed_over.get()) is not None:
            try:
                work()
            except Exception as error:  # of one object: the others are waited for nevertheless
                raised = (type(error), error, error.__traceback__, threading.current_thread())
                threading.excepthook(threading.ExceptHookArgs(raised))
            del work  # it may hold what it has closed
            self.end()


FINAL_WORK = FinalWork()
"""That of this process: any object may be collected in any thread."""


def after_the_work[R](
    what: str, do: Callable[[], R], say: Callable[[str], object], *, seconds: float = SECONDS
) -> R | None:
    """Return what a piece of bookkeeping returns; None if it fails, or has not ended in time. Raises nothing.

    `say` gets a line about either, which begins with `what`. It runs in a thread, with the context variables of the
    caller, and goes on after its time, until it ends or the process does.
    """
    outcome = Threads("skyward-after").submit(copy_context().run, do)
    try:
        return outcome.result(seconds)
    except NotInTime as error:
        is_late = not outcome.done()
        words = f"has not ended within {seconds:g} s, and is not waited for" if is_late else f"has failed: {error!r}"
    except Exception as error:
        words = f"has failed: {error!r}"
    say(f"{what} {words}; the result of the work is not concerned")
    return None


def refuse_greenlets(modules: Mapping[str, ModuleType] = sys.modules) -> None:
    """Raise BadRequest if gevent or eventlet has replaced modules of the standard library: a pool would hang in `open`
    without an error.
    """
    for library, patched in (("gevent", _by_gevent(modules)), ("eventlet", _by_eventlet(modules))):
        if patched:
            raise BadRequest(
                f"{library} has replaced {', '.join(patched)} in this process, and a pool needs the real ones: its"
                " threads would wait for each other for ever. Open the pool in a separate process that is not"
                f" patched (`subprocess`, or a worker of another kind for these tasks), or do not call {library}'s"
                " monkey patching in this one."
            )


def _by_gevent(modules: Mapping[str, Any]) -> list[str]:
    if (monkey := modules.get("gevent.monkey")) is None:
        return []
    return [name for name in MODULES if monkey.is_module_patched(name)]


def _by_eventlet(modules: Mapping[str, Any]) -> list[str]:
    if (patcher := modules.get("eventlet.patcher")) is None:
        return []
    return [name for name in MODULES if patcher.is_monkey_patched(name)]
