"""Count the files of the core that a reader has to follow: those that the client enters while it opens a pool, and during
one warm call.

A file is entered when one of its functions is called; the bodies of modules and classes, which run at import, do not count. A
change of file is a call of a function of another file than the last one. A file counts for the warm call if most of `--calls` calls
enter it: what only happens every second does not.

    python benchmarks/hops.py
    python benchmarks/hops.py --files     also the names of the files, with their calls
"""

from __future__ import annotations

import argparse
import inspect
import os
import statistics
import sys
import threading
import time
from collections import Counter
from collections.abc import Callable, Sequence
from types import FrameType
from typing import Any

import skyward_core as sky

CORE = os.path.dirname(sky.__file__) + os.sep
IS_FUNCTION = inspect.CO_OPTIMIZED
LATE_SECONDS = 0.05  # what follows a result in other threads
LIMITS = {"one warm call": 15, "... skyward-engine": 6, "opening": 60}


class Profile:
    """The calls of the core's functions, by thread and file, while `active`."""

    def __init__(self) -> None:
        self.calls: dict[str, Counter[str]] = {}
        self.changes: Counter[str] = Counter()
        self._last: dict[str, str] = {}

    def note(self, frame: FrameType, event: str, _: Any) -> None:
        code = frame.f_code
        if event == "call" and code.co_flags & IS_FUNCTION and code.co_filename.startswith(CORE):
            thread, file = threading.current_thread().name, code.co_filename.removeprefix(CORE)
            self.calls.setdefault(thread, Counter())[file] += 1
            self.changes[thread] += self._last.get(thread, file) != file
            self._last[thread] = file

    def during(self, work: Callable[[], object]) -> Profile:
        """Profile this in all threads."""
        threading.setprofile_all_threads(self.note)
        try:
            work()
        finally:
            threading.setprofile_all_threads(None)
        return self


@sky.compute
def answer() -> int:
    return 42


def measured(calls: int) -> tuple[Profile, list[Profile]]:
    """Return what opening a pool enters, and what each of some warm calls does."""
    pool = sky.ComputePool(provider=sky.Local(), display="quiet")
    opening = Profile().during(pool.__enter__)
    try:
        for _ in range(20):
            answer() >> pool

        def call() -> None:
            answer() >> pool
            time.sleep(LATE_SECONDS)

        return opening, [Profile().during(call) for _ in range(calls)]
    finally:
        pool.__exit__(None, None, None)


def row(what: str, profiles: Sequence[Profile], thread: str | None = None) -> tuple[str, Counter[str]]:
    """Return a line of the table and the calls of each file, in the median, of one thread or (None) of all."""
    found = [
        sum((calls for name, calls in profile.calls.items() if thread in (None, name)), Counter[str]())
        for profile in profiles
    ]
    files = Counter({file: round(statistics.median(one[file] for one in found)) for one in found for file in one})
    files = +files
    changes = statistics.median(
        sum(profile.changes[name] for name in profile.calls if thread in (None, name)) for profile in profiles
    )
    packages = {file.partition(os.sep)[0] for file in files}
    return (
        f"| {what} | {len(files)} | {LIMITS.get(what, '')} | {len(packages)} | {files.total()} | {changes:.0f} |",
        files,
    )


def main() -> int:
    """Print the table."""
    parser = argparse.ArgumentParser(prog="python benchmarks/hops.py", description=__doc__.partition(":")[0])
    parser.add_argument("--calls", type=int, default=21)
    parser.add_argument("--files", action="store_true", help="list the files of each row")
    options = parser.parse_args()
    opening, calls = measured(options.calls)
    rows = [row("opening", [opening]), row("one warm call", calls)]
    threads = sorted({name for profile in calls for name in profile.calls})
    rows += [row(f"... {thread}", calls, thread) for thread in threads]
    print("| what | files | aim | packages | calls | changes of file |\n| --- | ---: | ---: | ---: | ---: | ---: |")
    for line, files in rows:
        if files:
            print(line)
        if options.files:
            print("".join(f"    {calls:5} {file}\n" for file, calls in files.most_common()), end="")
    return 0


if __name__ == "__main__":
    sys.exit(main())
