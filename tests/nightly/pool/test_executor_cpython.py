"""CPython's own tests of executors, as the Python that runs this has them, on the executor of a pool.

All tests of the four classes that CPython runs on each kind of executor run here, but for those of `NOT_APPLICABLE`. A
distribution may come without the package `test`: then `test_executor.py` is what is left.
"""

import unittest
from concurrent.futures import Executor

import pytest

import skyward_core as sky

pytest.importorskip("test.test_concurrent_futures", reason="this Python has no package `test`")

from test.test_concurrent_futures.executor import ExecutorTest
from test.test_concurrent_futures.test_as_completed import AsCompletedTests
from test.test_concurrent_futures.test_shutdown import ExecutorShutdownTest
from test.test_concurrent_futures.test_wait import WaitTests

CLASSES = "it makes executors from a class with max_workers; ours has as many workers as the pool has slots"
PROGRAM = "it starts a program that ends with its executor open; ours belongs to a pool, whose end has its own tests"
NOT_APPLICABLE = {
    "test_max_workers_negative": CLASSES,
    "test_hang_gh94440": f"{CLASSES}. tests/system/pool/test_executor.py has the same case",
    "test_cancel_futures": "it counts calls of 0.1 s that have not begun; test_executor.py has calls that wait for a file",
    **dict.fromkeys(
        ("test_interpreter_shutdown", "test_submit_after_interpreter_shutdown", "test_hang_gh83386"), PROGRAM
    ),
}
"""Why tests of these classes do not run here. Of CPython's other classes none runs: they look into the threads and
processes of CPython's two executors, make futures themselves, break an executor by a dead process, or have an
`initializer`.
"""


class OfAPool(unittest.TestCase):
    """Gives each test an executor of the shared pool."""

    worker_count = 2
    executor: Executor

    @pytest.fixture(autouse=True)
    def _make(self, pool: sky.ComputePool, monkeypatch: pytest.MonkeyPatch) -> None:
        self.executor = pool.executor()
        # it is for other Pythons; here it takes seconds, and meets the garbage of other tests
        monkeypatch.setattr("test.support.gc_collect", lambda: None)

    def setUp(self) -> None:
        if (reason := NOT_APPLICABLE.get(self._testMethodName)) is not None:
            self.skipTest(reason)

    def tearDown(self) -> None:
        self.executor.shutdown(wait=True)


class TestExecutor(OfAPool, ExecutorTest):
    """submit, map, references to arguments and results."""


class TestShutdown(OfAPool, ExecutorShutdownTest):
    """shutdown, with calls that wait and calls that run."""


class TestWait(OfAPool, WaitTests):
    """`concurrent.futures.wait`."""


class TestAsCompleted(OfAPool, AsCompletedTests):
    """`concurrent.futures.as_completed`."""
