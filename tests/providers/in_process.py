"""Clouds that answer in this process: no socket, no thread, and pauses that take no time."""

from __future__ import annotations

import sys
import threading
import time
from collections.abc import Callable
from types import SimpleNamespace

import httpx
import pytest

from skyward_core.concurrency import threads
from tests.providers.http_fake import FakeCloud


class Clock:
    """The time of the providers. It goes on only while they pause."""

    def __init__(self) -> None:
        self.start = time.time()
        self.pauses: list[float] = []
        self.passed = 0.0
        self.on_sleep: Callable[[], object] = lambda: None

    def sleep(self, seconds: float) -> None:
        self.pauses.append(seconds)
        self.passed += seconds
        self.on_sleep()

    def monotonic(self) -> float:
        return self.passed

    def time(self) -> float:
        return self.start + self.passed


class NoThread:
    """A thread of an interpreter that starts none. `concurrency.threads` then works in the calling thread."""

    def __init__(self, **_: object) -> None:
        """Take what a thread takes."""

    def start(self) -> None:
        raise RuntimeError("can't start new thread")


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> Clock:
    """Replace `time` in all modules of providers, and let them start no thread."""
    clock = Clock()
    for name, module in list(sys.modules.items()):
        is_ours = name.startswith(
            ("skyward_core.providers.", "tests.providers.example_acme", "tests.providers.fake_verda")
        )
        if is_ours and vars(module).get("time") is time:
            monkeypatch.setattr(module, "time", clock)
    monkeypatch.setattr(threads, "threading", SimpleNamespace(**vars(threading) | {"Thread": NoThread}))
    return clock


type Install = Callable[[FakeCloud], object]


@pytest.fixture
def in_process(clock: Clock, monkeypatch: pytest.MonkeyPatch) -> Install:
    """Return a function that lets a fake answer all requests of httpx."""

    def install(fake: FakeCloud) -> None:
        transport = httpx.MockTransport(fake.respond)
        monkeypatch.setattr(httpx.HTTPTransport, "handle_request", lambda _, request: transport.handle_request(request))

    return install
