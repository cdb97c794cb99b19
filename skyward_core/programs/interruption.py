"""Ctrl-C and SIGTERM while a program runs on a pool: the first one stops cleanly, the next one does not wait.

running ──first──▶ stopping (the block gets `Interrupted`, its `with` ends the machines) ──next──▶ left
                                              (the reaper ends them, and nothing is waited for)
"""

from __future__ import annotations

import signal
import threading
from collections.abc import Callable, Generator
from contextlib import contextmanager
from types import FrameType

SIGNALS = (signal.SIGINT, signal.SIGTERM)


class Interrupted(KeyboardInterrupt):
    """A signal has stopped the program."""

    def __init__(self, number: int) -> None:
        super().__init__(number)
        self.exit_code = 128 + number


@contextmanager
def interruptible(tell: Callable[[str], object], leave: Callable[[], object], what_ends: str) -> Generator[None]:
    """Raise `Interrupted` in the block at the first signal, and say what happens; call `leave` at the next one.

    Outside of the main thread, and for signals that are ignored, it changes nothing.
    """
    received: list[int] = []

    def handle(number: int, _: FrameType | None) -> None:
        received.append(number)
        name = signal.Signals(number).name
        if len(received) == 1:
            tell(f"{name}: stopping; the program is cancelled, and {what_ends}. Once more to wait for nothing")
        else:
            tell(f"{name} again: nothing is waited for; `skyward ps` shows whether something is left")
            leave()
        raise Interrupted(number)

    if threading.current_thread() is not threading.main_thread():
        yield
        return
    before = {number: signal.getsignal(number) for number in SIGNALS}
    mine = [number for number, handler in before.items() if handler is not signal.SIG_IGN]
    try:
        for number in mine:
            signal.signal(number, handle)
        yield
    finally:
        for number in mine:
            signal.signal(number, before[number] or signal.SIG_DFL)
