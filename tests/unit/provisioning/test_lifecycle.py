"""Machines of fake clouds: after any failure all are terminated, or an error names them."""

from collections.abc import Callable, Iterator
from concurrent.futures import Future
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import pytest

import skyward_core as sky
from skyward_core import Instance
from skyward_core.engine.certificates import make_certificate
from skyward_core.ledger.budgets import SpendingLimit
from skyward_core.ledger.journal import Journal
from skyward_core.ledger.ledger import Ledger
from skyward_core.ledger.metering import Meter
from skyward_core.providers.base import EXPIRES_TAG
from skyward_core.provisioning import lifecycle, teardown
from skyward_core.provisioning.bootstrap import Preparation
from skyward_core.worker.watchdog import read_paid, uptime
from tests.conftest import RecordedEvents
from tests.fakes import (
    BlindProvider,
    FakeProvider,
)

type Make = Callable[..., Any]


@pytest.fixture
def make(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Make:
    """Make a fake provider with its files in this test's folder. The wait for the end of machines is short."""
    monkeypatch.setattr(teardown, "DEADLINE_SECONDS", 0.5)
    monkeypatch.setattr(teardown, "FIRST_PAUSE_SECONDS", 0.01)
    return lambda kind, **fields: kind(folder=str(tmp_path), **fields)


def test_a_machine_launched_during_close_is_terminated_at_once(make: Make, tmp_path: Path) -> None:
    """A launch returns after close has begun. It leaves no machine, and close does not wait for it."""
    recorded, certificate = RecordedEvents(), Future[Any]()
    provider = make(FakeProvider)
    meter, spec = Meter(), sky.PoolSpec.of()
    with Ledger(f"sqlite:///{tmp_path / 'ledger.db'}") as ledger:
        journal = Journal(ledger, "sky-1", spec, provider, meter, recorded)
        journal.open()
        machines = lifecycle.PoolMachines(
            spec,
            [provider],
            "sky-1",
            certificate,
            emit=recorded,
            meter=meter,
            journal=journal,
            spending_limit=SpendingLimit("sky-1", meter),
        )
        _close_while_it_launches(machines, provider)
        assert [intent.evidence for intent in ledger.intents(pool_id="sky-1")] == ["fake lists it no more"]
    assert provider.machines.launched == ["fake-0"]
    assert provider.machines.running == {}


def _close_while_it_launches(machines: lifecycle.PoolMachines, provider: FakeProvider) -> None:
    machines._selection.offers = {0: provider.offers(sky.Requirements())[0]}

    def close_meanwhile(event: object) -> None:
        if isinstance(event, sky.InstanceProvisioned):
            machines.stop()

    machines._rental._emit = close_meanwhile
    with pytest.raises(sky.PoolClosed):
        machines.replace(0, lambda: True)


@pytest.fixture
def opened(make: Make, tmp_path: Path) -> Iterator[Callable[..., tuple[lifecycle.PoolMachines, SpendingLimit, Meter]]]:
    """Make the machines of an open pool. They are stopped at the end."""
    with ExitStack() as stack:

        def open_one(provider: FakeProvider, **options: Any) -> tuple[lifecycle.PoolMachines, SpendingLimit, Meter]:
            meter, spec, recorded = Meter(), sky.PoolSpec.of(**options), RecordedEvents()
            ledger = stack.enter_context(Ledger(f"sqlite:///{tmp_path / 'ledger.db'}"))
            journal = Journal(ledger, "sky-1", spec, provider, meter, recorded)
            journal.open()
            limit = SpendingLimit("sky-1", meter, max_cost=spec.max_cost)
            machines = lifecycle.PoolMachines(
                spec,
                [provider],
                "sky-1",
                Future[Any](),
                emit=recorded,
                meter=meter,
                journal=journal,
                spending_limit=limit,
            )
            stack.callback(machines.stop)
            (offer,) = provider.offers(sky.Requirements())
            machines._selection.offers = {0: offer, 1: offer}
            return machines, limit, meter

        yield open_one


def node_of(machines: lifecycle.PoolMachines, rank: int) -> Preparation:
    (instance,) = machines._rental.launch(machines._selection.offers[rank], 1, rank)
    return Preparation(machines.transports.to(instance), rank, machines._rental._emit)


def test_a_standby_machine_shortens_the_paid_time_of_the_other(make: Make, opened: Any) -> None:
    """The node receives the shorter time. When the other machine is gone it gets a longer time.

    Its tags have the latest possible end.

    Looks inside: a replacement does more than rent.
    """
    provider = make(FakeProvider)
    machines, limit, _ = opened(provider, max_cost=10.0)  # one cent a second, and a minute for the termination
    there = node_of(machines, 0)
    other = machines._selection.rent_one(0, None)
    directory = Path(there.instance.directory or "")
    assert 430 < (read_paid(directory) or 0) - uptime() <= 440
    assert (end_of(other) - end_of(there.instance)) in (0, 1)
    machines._rental.end(there)
    limit.check()
    assert 930 < limit.paid_seconds() <= 940


def end_of(instance: Instance) -> int:
    return int(instance.tags[EXPIRES_TAG])


def test_an_immediate_end_needs_no_listing(make: Make, opened: Any) -> None:
    """Known machines are terminated although the listing fails. Machines that a later listing shows are terminated too."""
    provider = make(BlindProvider)
    machines, _, _ = opened(provider)
    node_of(machines, 0)
    machines.end_now()
    assert provider.machines.terminated == ["fake-0"]
    provider.see()
    provider._start(provider.offers(sky.Requirements())[0], "sky-1", 1)
    machines.end_now()
    assert provider.machines.terminated == ["fake-0", "fake-0", "fake-1"]


def test_the_certificate_is_made_for_one_pool() -> None:
    """Two pools have different keys, so a member of one cannot join the other."""
    first, second = make_certificate("sky-1"), make_certificate("sky-2")
    assert first.key != second.key
    assert first.certificate.startswith("-----BEGIN CERTIFICATE-----")
