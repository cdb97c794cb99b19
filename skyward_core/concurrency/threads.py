"""Runs several functions at the same time, in plain threads.

An `atexit` callback tears down a pool that was left open. By then concurrent.futures has closed its executors ("cannot
schedule new futures after interpreter shutdown"), so teardown cannot use them. Plain threads still start.
"""

from __future__ import annotations

import atexit
import logging
import os
import sys
import threading
import time
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from concurrent.futures import TimeoutError as NotInTime
from contextlib import suppress
from contextvars import copy_context
from functools import partial
from queue import SimpleQueue
from types import ModuleType
from typing import Any, override

from skyward_core.concurrency.backoff import Backoff
from skyward_core.errors import BadRequest

MOST_THREADS = 8
SECONDS = 10.0
RESTART_PAUSES = Backoff(0.01, 1.0)
"""How long after its error the work of a thread begins again."""
NO_THREAD_WORDS = (
    "this process, or its container, has as many threads as it may have: raise the limit (`ulimit -u`, `pids.max`, "
    "`docker run --pids-limit`), or open fewer pools in one process"
)
_log = logging.getLogger("skyward")
MODULES = ("thread", "threading", "socket", "select", "selectors", "subprocess", "queue", "time")
"""Modules that a pool's threads and event loops use. If they are replaced, the threads wait for each other for ever."""


class LoopThread:
    """A thread that does one piece of work until its owner ends it. If the work raises, `on_error` gets that, and the
    work begins again: it must be able to, and must return once its owner has ended it.

    `join` waits only for a thread that was started.
    """

    def __init__(
        self,
        name: str,
        work: Callable[[], object],
        on_error: Callable[[BaseException], object] | None = None,
        *,
        is_daemon: bool = True,
    ) -> None:
        self._work = work
        self._on_error = on_error or partial(_report, name)
        self._thread = threading.Thread(target=self._run, name=name, daemon=is_daemon)
        self._was_started = False

    def start(self) -> None:
        """Start the thread. Raises RuntimeError, with words, if no thread can be started; it may be tried again."""
        try:
            self._thread.start()
        except RuntimeError as error:
            if NO_THREAD_WORDS not in getattr(error, "__notes__", ()):
                error.add_note(NO_THREAD_WORDS)
            raise
        self._was_started = True

    def start_if_possible(self) -> bool:
        """Start the thread, and return whether that was possible. If not, the caller tries again later."""
        try:
            self.start()
        except RuntimeError as error:  # some Pythons start none at their end, and there may be too many
            _log.debug("the thread %s is not started yet: %s", self._thread.name, error)
            return False
        return True

    @property
    def is_alive(self) -> bool:
        """Whether it was started, and has not ended."""
        return self._thread.is_alive()

    @property
    def is_current(self) -> bool:
        """Whether this is the calling thread."""
        return self._thread is threading.current_thread()

    def join(self, timeout_seconds: float | None = None) -> None:
        """Wait for its end. Does nothing in the thread itself, and before it was started."""
        if self._was_started and not self.is_current:
            self._thread.join(timeout_seconds)

    def _run(self) -> None:
        pauses = RESTART_PAUSES.pauses()
        while True:
            try:
                self._work()
                return
            except BaseException as error:  # also SystemExit, which Python would end the thread by without a word
                with suppress(Exception):  # what tells of it must not end the thread either
                    self._on_error(error)
            time.sleep(next(pauses))


class Threads:
    """Runs each piece of work in a separate thread, or in the caller's if no thread can be started. `join` waits for
    all of them; `close` lets none begin any more.
    """

    def __init__(self, name: str = "skyward", *, is_daemon: bool = True) -> None:
        self._name = name
        self._is_daemon = is_daemon
        self._lock = threading.Lock()
        self._threads: list[threading.Thread] = []
        self._is_closed = False

    def submit[**P, R](self, work: Callable[P, R], *args: P.args, **words: P.kwargs) -> Future[R]:
        """Start a function in a thread, or run it in this one if no thread can be started.

        Its future cannot be cancelled. After `close` its future has RuntimeError.
        """
        outcome: Future[R] = Future()
        # asyncio cancels futures that it waits for, and a cancelled one would take no result
        outcome.set_running_or_notify_cancel()

        def run() -> None:
            try:
                outcome.set_result(work(*args, **words))
            except BaseException as error:  # the caller of `result` gets it
                outcome.set_exception(error)

        has_thread = self.run(f"{self._name}-{len(self._threads)}", run)
        if not has_thread and not outcome.done():
            outcome.set_exception(RuntimeError("nothing begins any more: its owner has ended"))
        return outcome

    def run(self, name: str, work: Callable[[], object]) -> bool:
        """Do something in a thread of this name, or in this one if no thread can be started. Return whether it has a
        thread. What the work raises is logged.
        """

        def guarded() -> None:
            try:
                work()
            except BaseException as error:
                _report(name, error)

        thread = threading.Thread(target=guarded, name=name, daemon=self._is_daemon)
        with self._lock:
            if self._is_closed:
                return False
            self._threads = [other for other in self._threads if other.is_alive()]
            if has_thread := _could_start(thread):
                self._threads.append(thread)
        if not has_thread:
            guarded()
        return has_thread

    def close(self) -> None:
        """Let no work begin any more. Does not wait."""
        with self._lock:
            self._is_closed = True

    def join(self, timeout_seconds: float | None = None, *, except_for: str = "") -> None:
        """Wait until all work is done, or as long for all of it; not in its own threads, nor for those of a name."""
        until = None if timeout_seconds is None else time.monotonic() + timeout_seconds
        with self._lock:
            threads = list(self._threads)
        for thread in threads:
            if thread is not threading.current_thread() and thread.name != except_for:
                thread.join(None if until is None else max(0.0, until - time.monotonic()))


class ThreadPool:
    """Does work in a few threads, which begin with the first piece of it and end with the last. If no thread can be
    started, the caller does it.
    """

    def __init__(self, most: int, name: str) -> None:
        self._most = most
        self._name = name
        self._lock = threading.Lock()
        self._todo: deque[Callable[[], object]] = deque()
        self._working = 0
        """How many threads take work."""
        self._is_closed = False

    def submit[**P](self, work: Callable[P, object], *args: P.args, **words: P.kwargs) -> None:
        """Do this soon. What it raises is logged. After `close` it does nothing."""
        with self._lock:
            if self._is_closed:
                return
            self._todo.append(partial(work, *args, **words))
            if self._working >= self._most:
                return
            self._working += 1
            number = self._working
        thread = LoopThread(f"{self._name}_{number}", self._work)
        if not thread.start_if_possible():
            self._work()

    def close(self) -> None:
        """Begin no more work. Does not wait for what runs."""
        with self._lock:
            self._is_closed = True
            self._todo.clear()

    def _work(self) -> None:
        while True:
            with self._lock:
                if not self._todo:
                    self._working -= 1
                    return
                work = self._todo.popleft()
            try:
                work()
            except BaseException as error:
                _report(self._name, error)
            del work  # it may hold a large value


def in_thread(name: str, work: Callable[[], object], *, is_daemon: bool = True) -> bool:
    """Do something in a thread of this name that nobody waits for, or here if no thread can be started. Return whether
    it has a thread. What the work raises is logged. It has the context variables of the caller.
    """
    return Threads(is_daemon=is_daemon).run(name, partial(copy_context().run, work))


def _could_start(thread: threading.Thread) -> bool:
    try:
        thread.start()
    except RuntimeError:  # some Pythons start none at their end, and there may be too many
        return False
    return True


def _report(name: str, error: BaseException) -> None:
    _log.error("the thread %s has failed", name, exc_info=error)


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
        on_error: Callable[[BaseException], object],
        *,
        is_at_once: bool = False,
    ) -> None:
        self._next_seconds = 0.0 if is_at_once else seconds
        self._seconds = seconds
        self._step = step
        self._on_error = on_error
        self._ended = threading.Event()
        self._thread = LoopThread(name, self._run, self._on_failure)

    def start(self) -> None:
        """Start the thread. Raises RuntimeError if no thread can be started; it may be tried again."""
        self._thread.start()

    def end(self) -> None:
        """Call `step` no more.

        Does not wait for a call that runs; may be called twice, before `start`, and by `step` itself.
        """
        self._ended.set()

    def join(self, timeout_seconds: float) -> None:
        """Wait for a call that runs. Does nothing in the thread itself."""
        self._thread.join(timeout_seconds)

    def _run(self) -> None:
        while not self._ended.wait(self._next_seconds):
            self._next_seconds = self._seconds
            self._step()

    def _on_failure(self, error: BaseException) -> None:
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
        self._thread: LoopThread | None = None

    def begin(self) -> None:
        """An object with a finalizer is made. If no thread can be started, finalizers do their work themselves."""
        with self._lock:
            self._objects += 1
            if self._handed_over is None:
                handed_over: SimpleQueue[Callable[[], object] | None] = SimpleQueue()
                thread = LoopThread("skyward-collected", partial(self._run, handed_over))
                if thread.start_if_possible():
                    self._handed_over, self._thread = handed_over, thread

    def end(self) -> None:
        """An object is not collected any more, or its work is done."""
        with self._lock:
            self._objects = max(0, self._objects - 1)
            if not self._objects and self._handed_over is not None:
                self._handed_over.put(None)
                self._handed_over = None

    def hand_over(self, work: Callable[[], object]) -> None:
        """Let the thread do this. At the end of the interpreter, when it may not run any more, do it here."""
        handed_over = self._handed_over
        if handed_over is not None and threading.main_thread().is_alive():
            handed_over.put(work)  # re-entrant (Python's documentation of `queue.SimpleQueue`)
        else:
            work()

    def finish(self) -> None:
        """Wait until all that was handed over is done: the interpreter's end would cut off a daemon thread."""
        with self._lock:
            thread = self._thread
            if self._handed_over is not None:
                self._handed_over.put(None)
                self._handed_over = None
        if thread is not None:
            thread.join()

    def _run(self, handed_over: SimpleQueue[Callable[[], object] | None]) -> None:
        while (work := handed_over.get()) is not None:
            try:
                work()
            except BaseException as error:  # of one object: the others are waited for nevertheless
                raised = (type(error), error, error.__traceback__, threading.current_thread())
                threading.excepthook(threading.ExceptHookArgs(raised))
            del work  # it may hold what it has closed
            self.end()


FINAL_WORK = FinalWork()
"""That of this process: any object may be collected in any thread."""
if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=FINAL_WORK.__init__)
atexit.register(FINAL_WORK.finish)


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
