"""Runs commands of the operating system. Each has a deadline; an error has the command's output."""

import subprocess
from collections.abc import Sequence


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
