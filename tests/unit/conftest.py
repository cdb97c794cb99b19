"""A unit test starts no process or thread, does not sleep, sends no signal, and opens no connection.

An audit hook refuses it (sys.addaudithook), in the test and in its fixtures. So a unit test takes milliseconds, and
cannot depend on the speed of the machine. A test that needs one of these belongs to tests/system.
"""

import logging
import sys
import threading
from collections.abc import Iterator
from pathlib import Path

import asyncssh  # noqa: F401 - its first import starts a process (ldconfig), which must not happen in a test
import pytest

REFUSED = {
    "time.sleep": "sleep",
    "subprocess.Popen": "start a process",
    "os.fork": "start a process",
    "os.forkpty": "start a process",
    "os.posix_spawn": "start a process",
    "os.system": "start a process",
    "os.kill": "send a signal",
    "os.killpg": "send a signal",
    "socket.connect": "open a connection",
    "_thread.start_new_thread": "start a thread",
    "_thread.start_joinable_thread": "start a thread",
}
"""Audit events of CPython 3.12 and 3.13 (docs.python.org/3/library/audit_events.html), and what raises them."""

_refused: list[str] | None = None
"""What the current test was refused; None between tests."""


def _refuse(event: str, _: object) -> None:
    if event in REFUSED and _refused is not None and threading.current_thread() is threading.main_thread():
        _refused.append(event)
        raise RuntimeError(f"a unit test must not {REFUSED[event]} ({event}): it belongs to tests/system")


sys.addaudithook(_refuse)


@pytest.hookimpl(wrapper=True)
def pytest_runtest_protocol(item: pytest.Item) -> Iterator[None]:
    """Watch a test and its fixtures; pytest calls this for tests of other folders too."""
    global _refused
    _refused = [] if Path(__file__).parent in item.path.parents else None
    try:
        return (yield)
    finally:
        _refused = None


@pytest.hookimpl(wrapper=True)
def pytest_runtest_call(item: pytest.Item) -> Iterator[None]:
    """Fail a test whose code has caught the refusal."""
    result = yield
    if _refused:
        pytest.fail(f"a unit test must not {REFUSED[_refused[0]]} ({_refused[0]}): it belongs to tests/system")
    return result


@pytest.fixture
def unconfigured(monkeypatch: pytest.MonkeyPatch) -> logging.Logger:
    """Logging as in a script that has configured nothing: a new root logger in place of the one to which pytest
    listens.
    """
    root = logging.RootLogger(logging.WARNING)
    monkeypatch.setattr(logging.getLogger("skyward"), "parent", root)
    return root
