"""A callback or terminal that blocks delays only itself: calls, the lease and the pool's end continue."""

import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Any

import pytest

import skyward_core as sky
from skyward_core.ledger.ledger import Ledger, default_url
from tests.conftest import RecordedEvents
from tests.waiting import wait_until

LEASE_SECONDS = 5.0


class BlockedByLines:
    """A sink that blocks at the first line of a call, until it is released."""

    def __init__(self) -> None:
        self.recorded = RecordedEvents()
        self.may_go_on = threading.Event()
        self.is_in = threading.Event()

    def __call__(self, event: Any) -> None:
        if isinstance(event, sky.LogLine):
            self.is_in.set()
            self.may_go_on.wait(120)
        self.recorded(event)


@pytest.fixture
def sink() -> Iterator[BlockedByLines]:
    """A sink that blocks; released at the end of the test."""
    blocked = BlockedByLines()
    yield blocked
    blocked.may_go_on.set()


@sky.compute
def prints(number: int) -> int:
    """Print a line; return twice the number."""
    print("line", number)
    return 2 * number


def pool_with(sink: BlockedByLines, **options: Any) -> sky.ComputePool:
    return sky.ComputePool(provider=sky.Local(), display="quiet", on_event=sink, **options)


def lives_on(pool_id: str, since: datetime) -> bool:
    with Ledger(default_url()) as ledger:
        entry = ledger.pool(pool_id)
    assert entry is not None
    return entry.lease_expires_at > since + timedelta(seconds=2 * LEASE_SECONDS)


def test_a_sweep_leaves_a_living_pool_while_a_callback_blocks(
    sink: BlockedByLines, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    # the ledger of all tests has hosts for which a sweep takes longer than the lease
    monkeypatch.setenv("SKYWARD_LEDGER", f"sqlite:///{tmp_path / 'ledger.db'}")
    with pool_with(sink, lease_seconds=LEASE_SECONDS) as pool:
        assert prints(1) >> pool == 2
        assert sink.is_in.wait(60)
        since = datetime.now(UTC)
        wait_until(lambda: lives_on(pool.id, since), "the lease to be renewed while the callback blocks", 20)
        command = [sys.executable, "-m", "skyward_core.cli", "sweep"]
        said = subprocess.run(command, capture_output=True, text=True, timeout=60, check=False)
        assert f"leave   {pool.id}" in said.stdout, said
        assert pool.is_active
        assert prints(2) >> pool == 4
        sink.may_go_on.set()
    assert [event.line for event in sink.recorded.of(sky.LogLine)] == ["line 1", "line 2"]


def test_an_attached_client_keeps_the_lease_while_a_callback_blocks(sink: BlockedByLines) -> None:
    opener = sky.ComputePool(provider=sky.Local(), display="quiet", lease_seconds=LEASE_SECONDS).open()
    lease = opener.detach(lease_seconds=2 * LEASE_SECONDS)
    try:
        with sky.ComputePool.attach(lease, on_event=sink, lease_seconds=2 * LEASE_SECONDS) as pool:
            assert prints(1) >> pool == 2
            assert sink.is_in.wait(60)
            since = datetime.now(UTC)
            wait_until(lambda: lives_on(lease.pool_id, since), "the lease to be renewed while the callback blocks", 20)
            assert prints(2) >> pool == 4
            sink.may_go_on.set()
    finally:
        sky.release(lease.pool_id)


def test_results_do_not_wait_for_a_callback_that_blocks(sink: BlockedByLines) -> None:
    with pool_with(sink) as pool:
        assert prints(1) >> pool == 2
        assert sink.is_in.wait(60)
        began = time.monotonic()
        assert pool.map(prints.local, range(200)) == list(range(0, 400, 2))
        assert time.monotonic() - began < 20  # and not 200 times 0.2 s
        threading.Timer(0.2, sink.may_go_on.set).start()
    assert len(sink.recorded.of(sky.LogLine)) == 201
    assert isinstance(sink.recorded.events[-1], sky.CostFinal)


def test_a_callback_may_close_the_pool() -> None:
    """Callback and `with` block do not wait for each other; the bill is emitted after the callback's event."""
    recorded = RecordedEvents()
    closed = threading.Event()

    def closes(event: Any) -> None:
        recorded(event)
        if isinstance(event, sky.LogLine):
            pool.close()
            closed.set()

    with sky.ComputePool(provider=sky.Local(), display="quiet", on_event=closes) as pool:
        future = pool.submit(prints(1))
        assert closed.wait(60)
        assert not pool.is_active
        future.exception(60)
    assert isinstance(recorded.events[-1], sky.CostFinal)
    assert len(recorded.of(sky.CostFinal)) == 1
