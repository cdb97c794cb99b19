"""How tests wait: for an event, never for a time."""

import time
from collections.abc import Callable, Iterator

WAIT_SECONDS = 120.0
"""The limit of each wait. A wait ends with its event: the limit only names what did not happen."""
LONGEST_PAUSE_SECONDS = 0.2
SHARE_OF_PAUSES = 9
"""How many times longer a wait pauses than it looks. With 4, five test processes that wait with looks at all processes
of the machine use a whole processor for that.
"""


def wait_until[T](
    condition: Callable[[], T],
    what: str = "a condition",
    seconds: float = WAIT_SECONDS,
    longest_pause_seconds: float = LONGEST_PAUSE_SECONDS,
) -> T:
    """Return what the condition returns, once it holds. Raises TimeoutError with its name."""
    deadline = time.monotonic() + seconds
    for _ in pauses(0.005, longest_pause_seconds):
        if found := condition():
            return found
        if time.monotonic() > deadline:
            break
    raise TimeoutError(f"waited {seconds:g} s for {what}")


def pauses(shortest_seconds: float, longest_seconds: float = LONGEST_PAUSE_SECONDS) -> Iterator[None]:
    """Yield before each look at a condition, after a pause that is SHARE_OF_PAUSES times as long as the last look.

    So a wait leaves the processors to other tests, also if its condition asks a server or lists all processes.
    """
    while True:
        began = time.monotonic()
        yield
        time.sleep(min(max(shortest_seconds, SHARE_OF_PAUSES * (time.monotonic() - began)), longest_seconds))
