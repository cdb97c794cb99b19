"""Several things at once, in plain threads.

A pool that was left open is given back when the interpreter ends, in an `atexit` callback. concurrent.futures has
closed its executors for good by then ("cannot schedule new futures after interpreter shutdown"), so that nothing of
what giving back needs may run in one; threads still start.
"""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import Callable, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from typing import override

MOST_THREADS = 8


class Threads:
    """Runs each piece of work in a thread of its own. `join` waits for all of them."""

    def __init__(self, name: str) -> None:
        self._name = name
        self._threads: list[threading.Thread] = []

    def submit[**P, R](self, work: Callable[P, R], *args: P.args, **words: P.kwargs) -> Future[R]:
        """Begin a piece of work; here and now, where no thread can be started any more.

        It has begun, and cannot be cancelled.
        """
        outcome: Future[R] = Future()
        # one that was cancelled, as asyncio does with what it waits for, would take no result
        outcome.set_running_or_notify_cancel()

        def run() -> None:
            try:
                outcome.set_result(work(*args, **words))
            except BaseException as error:  # it is whoever asks for the result that has to know
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
        """Return when all work is done. What has failed is told by its future alone."""
        for thread in self._threads:
            thread.join()


class PlainExecutor(ThreadPoolExecutor):
    """For what insists on an executor, as asyncio's loops do: each piece of work in a plain thread of its own."""

    def __init__(self, name: str) -> None:
        super().__init__(1)  # it starts no thread before it is given work, and it is given none
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
    """Return what `work` makes of each thing, in their order, a few at a time. Raises the first one's error, when all
    are done.

    Interrupted, it begins no more, and waits for what has begun: nothing goes on behind the caller's back.
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
            except BaseException as error:  # told by the future
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
