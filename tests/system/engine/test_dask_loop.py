"""The loop of a Dask client, on a machine that is slow to start threads or has no room for more."""

import inspect
import re
import socket
import threading
from collections.abc import Iterator
from types import SimpleNamespace
from typing import Any

import distributed.client
import pytest
import uvloop

from skyward_core.engine import dask_loop
from skyward_core.engine.certificates import make_certificate
from skyward_core.engine.connection import connect
from skyward_core.engine.dask_loop import DaskLoop
from tests.conftest import wait_until


@pytest.fixture
def gate(monkeypatch: pytest.MonkeyPatch) -> Iterator[threading.Event]:
    """No loop begins before this is set: the machine gives its thread no processor time."""
    it = threading.Event()

    def late() -> Any:
        assert it.wait(60)
        return uvloop.new_event_loop()

    monkeypatch.setattr(dask_loop, "uvloop", SimpleNamespace(new_event_loop=late))
    yield it
    it.set()


def loops() -> set[threading.Thread]:
    return {thread for thread in threading.enumerate() if thread.name == "IO loop"}


def connected() -> None:
    """Connect to a port where no process listens."""
    with socket.socket() as there:
        there.bind(("127.0.0.1", 0))
        connect(f"tls://127.0.0.1:{there.getsockname()[1]}", make_certificate("p"), 0.1)


def test_a_loop_runs_from_start_to_stop() -> None:
    loop = DaskLoop()
    with pytest.raises(RuntimeError):
        _ = loop.loop
    loop.start()
    ran = threading.Event()
    loop.loop.add_callback(ran.set)
    assert ran.wait(60)
    assert loop.is_started()
    loop.stop()
    loop.stop()
    assert not loop.is_started()
    with pytest.raises(RuntimeError):
        _ = loop.loop


def test_a_thread_that_begins_late_is_waited_for(gate: threading.Event) -> None:
    """Dask's own runner raises AssertionError after 10 s."""
    loop = DaskLoop()
    starting = threading.Thread(target=loop.start)
    starting.start()
    assert not loop.is_started()
    gate.set()
    starting.join()
    assert loop.is_started()
    loop.stop()


def test_a_thread_that_begins_too_late_is_an_error_of_the_connection(
    gate: threading.Event, monkeypatch: pytest.MonkeyPatch
) -> None:
    """OSError: another try may have more luck. The thread ends when it begins at last."""
    monkeypatch.setattr(dask_loop, "START_SECONDS", 0.01)
    before = loops()
    with pytest.raises(OSError, match="has not begun"):
        connected()
    assert loops() - before
    gate.set()
    wait_until(lambda: not loops() - before, "the late thread to end")


@pytest.mark.parametrize("failure", [OSError(24, "Too many open files"), MemoryError()])
def test_a_loop_that_cannot_be_made_raises_why(monkeypatch: pytest.MonkeyPatch, failure: BaseException) -> None:
    def none() -> Any:
        raise failure

    monkeypatch.setattr(dask_loop, "uvloop", SimpleNamespace(new_event_loop=none))
    with pytest.raises(type(failure)):
        connected()


def test_no_room_for_another_thread_is_an_error_of_the_connection(monkeypatch: pytest.MonkeyPatch) -> None:
    class Refused(threading.Thread):
        def start(self) -> None:
            raise RuntimeError("can't start new thread")

    monkeypatch.setattr(
        dask_loop, "threading", SimpleNamespace(Thread=Refused, current_thread=threading.current_thread)
    )
    with pytest.raises(OSError, match="can't start new thread"):
        connected()


def test_it_has_all_that_dasks_client_calls() -> None:
    called = set(re.findall(r"_loop_runner\.(\w+)", inspect.getsource(distributed.client)))
    assert called <= set(dir(DaskLoop)), called
