"""What is done after the work: its result is there, and must neither be lost nor wait long."""

from __future__ import annotations

from collections.abc import Callable
from concurrent.futures import TimeoutError as NotInTime
from contextvars import copy_context

from skyward_core.concurrency.threads import Threads

SECONDS = 10.0


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
