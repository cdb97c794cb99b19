"""Runs commands of the operating system and waits for conditions. Each has a deadline; an error has the command's
output.
"""

import subprocess
import time
from collections.abc import Callable, Sequence


def run(*argv: str, text: str | None = None, seconds: float = 60.0) -> str:
    """Return what the command wrote on stdout; `text` is its stdin.

    Raises RuntimeError with what it wrote on stderr.
    """
    done = subprocess.run(argv, input=text or "", text=True, capture_output=True, timeout=seconds, check=False)
    if done.returncode:
        raise RuntimeError(f"{' '.join(argv)}: exit code {done.returncode}: {done.stderr.strip()}")
    return done.stdout


def ip(lines: Sequence[str]) -> None:
    """Apply lines of iproute2's `ip`, in order, in one process; it stops at the first that fails."""
    run("ip", "-batch", "-", text="\n".join(lines) + "\n")


def wait_until(condition: Callable[[], object], what: str, seconds: float = 60.0) -> None:
    """Wait until the condition holds. Raises TimeoutError with the name of the condition."""
    deadline = time.monotonic() + seconds
    while not condition():
        if time.monotonic() > deadline:
            raise TimeoutError(f"waited {seconds} s for {what}")
        time.sleep(0.005)
