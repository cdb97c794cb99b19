"""Runs several functions at the same time, in plain threads.

An `atexit` callback tears down a pool that was left open. By then concurrent.futures has closed its executors ("cannot
schedule new futures after interpreter shutdown"), so teardown cannot use them. Plain threads still start.
"""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import Callable, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from typing import override

MOST_THREADS = 8


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
