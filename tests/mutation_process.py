"""The process of `make mutate` that runs tests on mutants: it imports and collects once, then it forks for each mutant.

`python -P tests/mutation_process.py REQUEST` runs in the copy of the working tree. REQUEST is a JSON file with the
tests and the names of the mutants. It prints a line of JSON for each mutant; the output of pytest goes to stderr. No
mutant is active in this process itself.
"""

import ctypes
import json
import os
import select
import shutil
import signal
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import TextIO

import psutil
import pytest
from mutmut.mutation.trampoline import set_mutant_under_test
from mutmut.state import state
from mutmut.utils.format_utils import mangled_name_from_mutant_name

TIMES_LONGER = 5.0
"""A test may take this many times as long with a mutant as it takes without, and the seconds of the request."""
PR_SET_CHILD_SUBREAPER = 36
PASSED, FAILED, TIMED_OUT = 0, 1, 2
STATUS = {PASSED: "survived", FAILED: "killed", TIMED_OUT: "timeout"}


def main(request: str) -> int:
    """Run the tests on each mutant; return another code than 0 if they fail without a mutant."""
    asked = json.loads(Path(request).read_text())
    arguments = ["-q", "-p", "no:cacheprovider", f"--basetemp={os.environ['TMPDIR']}/pytest"]
    ctypes.CDLL(None).prctl(PR_SET_CHILD_SUBREAPER, 1)
    with os.fdopen(os.dup(1), "w") as report:
        os.dup2(2, 1)
        mutants = Mutants(asked["names"], asked["seconds_longer"], report)
        return int(pytest.main([*arguments, *asked["tests"]], plugins=[mutants]))


class Mutants:
    """A plug-in of pytest that runs the collected tests once for each mutant."""

    def __init__(self, names: Sequence[str], seconds_longer: float, report: TextIO) -> None:
        self._names, self._seconds_longer, self._report = names, seconds_longer, report
        self._last = PASSED

    @pytest.hookimpl
    def pytest_collection_modifyitems(self, items: list[pytest.Item]) -> None:
        """Leave out PostgreSQL: its server runs as another user, who may not enter the folder of this process."""
        items[:] = [
            item
            for item in items
            if "postgresql" not in item.name and "postgresql_server" not in getattr(item, "fixturenames", ())
        ]

    @pytest.hookimpl(tryfirst=True)
    def pytest_runtestloop(self, session: pytest.Session) -> bool:
        """Run the tests without a mutant, then those that reach its function with each mutant."""
        if session.testsfailed:
            raise session.Failed("the tests cannot be collected")
        seconds, reached = self._measured(session)
        for item in session.items:
            item.add_marker(pytest.mark.timeout(self._limit(seconds[item.nodeid])), append=False)
        quickest_first = sorted(session.items, key=lambda item: seconds[item.nodeid])
        for name in self._names:
            function = mangled_name_from_mutant_name(name)
            items = [item for item in quickest_first if function in reached[item.nodeid]]
            result = {"name": name, "status": self._status(name, items, seconds)}
            print(json.dumps(result), file=self._report, flush=True)
        return True

    @pytest.hookimpl
    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        if report.failed:
            print(report.longreprtext)
            self._last = _code_of(report.longreprtext)

    def _measured(self, session: pytest.Session) -> tuple[dict[str, float], dict[str, list[str]]]:
        """Return the seconds of each test without a mutant, and the functions of the module that it reaches."""
        path = Path(os.environ["TMPDIR"], "measured.json")

        def measure() -> int:
            set_mutant_under_test("stats")
            seconds: dict[str, float] = {}
            reached: dict[str, list[str]] = {}
            for item, following in _in_order(session.items):
                began = time.monotonic()
                self._run(item, following)
                seconds[item.nodeid] = time.monotonic() - began
                reached[item.nodeid] = sorted(state()._stats)
                state()._stats.clear()
                if self._last != PASSED:
                    return self._last
            path.write_text(json.dumps([seconds, reached]))
            return PASSED

        if _forked(measure, None) != PASSED:
            raise session.Failed("the tests fail without a mutant")
        seconds, reached = json.loads(path.read_text())
        if not any(reached.values()):
            raise session.Failed("no test reaches a function of the module")
        return seconds, reached

    def _status(self, name: str, items: Sequence[pytest.Item], seconds: dict[str, float]) -> str:
        def attempt() -> int:
            set_mutant_under_test(name)
            for item, following in _in_order(items):
                self._run(item, following)
                if self._last != PASSED:
                    break
            return self._last

        if not items:
            return "no tests"
        return STATUS.get(_forked(attempt, sum(self._limit(seconds[item.nodeid]) for item in items)), "killed")

    def _limit(self, seconds: float) -> float:
        return TIMES_LONGER * seconds + self._seconds_longer

    def _run(self, item: pytest.Item, following: pytest.Item | None) -> None:
        item.config.hook.pytest_runtest_protocol(item=item, nextitem=following)


def _code_of(failure: str) -> int:
    return TIMED_OUT if "Timeout (>" in failure else FAILED


def _in_order(items: Sequence[pytest.Item]) -> Iterator[tuple[pytest.Item, pytest.Item | None]]:
    """Yield each test with the one that follows, by which pytest decides which fixtures it keeps."""
    return zip(items, [*items[1:], None], strict=True)


def _forked(work: Callable[[], int], limit: float | None) -> int:
    """Return what `work` returns in a child process, or TIMED_OUT after so many seconds. Nothing of it is left."""
    _forget_the_last()
    with _nothing_left_running():
        if not (pid := os.fork()):
            try:
                code = work()
            except BaseException as error:  # the time is up while pytest is between two steps of a test
                code = _code_of(str(error))
            sys.stdout.flush()
            os._exit(code)
        ended = os.pidfd_open(pid)
        try:
            if not select.select([ended], [], [], limit)[0]:
                return TIMED_OUT
            return os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])
        finally:
            os.close(ended)


def _forget_the_last() -> None:
    """Remove the ledger and the caches that the tests of the mutant before have left."""
    for name in ("XDG_CACHE_HOME", "XDG_CONFIG_HOME", "XDG_STATE_HOME"):
        if (home := os.environ.get(name, "")).startswith(os.environ["TMPDIR"]):
            shutil.rmtree(home, ignore_errors=True)


@contextmanager
def _nothing_left_running() -> Iterator[None]:
    """Kill what was started meanwhile and still runs, because killed tests clean nothing up. This process adopts the
    children of processes that have ended.
    """
    try:
        yield
    finally:
        while left := psutil.Process().children(recursive=True):
            for process in left:
                process.send_signal(signal.SIGKILL)
            psutil.wait_procs(left)


if __name__ == "__main__":
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(128 + signal.SIGTERM))
    sys.exit(main(*sys.argv[1:]))
