"""The machines of an open pool, with fake clouds: late launches, standby machines, and a process that lost the pool."""

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
from skyward_core.ledger.names_policy import NotSteward
from skyward_core.providers.base import EXPIRES_TAG
from skyward_core.provisioning.bootstrap import Preparation
from skyward_core.provisioning.lifecycle import PoolMachines
from skyward_core.worker.watchdog import read_paid, uptime
from tests.conftest import RecordedEvents
from tests.fakes import BlindProvider, FakeProvider

type Opened = Callable[..., tuple[PoolMachines, SpendingLimit, Meter]]


@pytest.fixture
def opened(tmp_path: Path) -> Iterator[Opened]:
    """Make the machines of an open pool. They are stopped at the end."""
    with ExitStack() as stack:

        def open_one(
            provider: FakeProvider, may_act: Callable[[], object] = lambda: None, **options: Any
        ) -> tuple[PoolMachines, SpendingLimit, Meter]:
            meter, spec, recorded = Meter(), sky.PoolSpec.of(**options), RecordedEvents()
            ledger = stack.enter_context(Ledger(f"sqlite:///{tmp_path / 'ledger.db'}"))
            journal = Journal(ledger, "sky-1", spec, provider, meter, recorded)
            journal.open()
            limit = SpendingLimit("sky-1", meter, max_cost=spec.max_cost)
            machines = PoolMachines(
                spec,
                [provider],
                "sky-1",
                Future[Any](),
                emit=recorded,
                meter=meter,
                journal=journal,
                spending_limit=limit,
                may_act=may_act,
            )
            stack.callback(machines.stop)
            (offer,) = provider.offers(sky.Requirements())
            machines._selection.offers = {0: offer, 1: offer}
            return machines, limit, meter

        yield open_one


def node_of(machines: PoolMachines, rank: int) -> Preparation:
    (instance,) = machines._rental.launch(machines._selection.offers[rank], 1, rank)
    return Preparation(machines.transports.to(instance), rank, machines._rental._emit)


def test_a_machine_launched_during_close_is_terminated_at_once(tmp_path: Path, opened: Opened) -> None:
    """A launch returns after close has begun. It leaves no machine, and close does not wait for it."""
    provider = FakeProvider(folder=str(tmp_path))
    machines, _, _ = opened(provider)

    def close_meanwhile(event: object) -> None:
        if isinstance(event, sky.InstanceProvisioned):
            machines.stop()

    machines._rental._emit = close_meanwhile
    with pytest.raises(sky.PoolClosed):
        machines.replace(0, lambda: True)
    with Ledger(f"sqlite:///{tmp_path / 'ledger.db'}") as ledger:
        assert [intent.evidence for intent in ledger.intents(pool_id="sky-1")] == ["fake lists it no more"]
    assert (provider.machines.launched, provider.machines.running) == (["fake-0"], {})


def test_a_standby_machine_shortens_the_paid_time_of_the_other(tmp_path: Path, opened: Opened) -> None:
    """The node receives the shorter time. When the other machine is gone it gets a longer one.

    Its tags have the latest possible end.
    """
    machines, limit, _ = opened(FakeProvider(folder=str(tmp_path)), max_cost=10.0)  # a cent a second, a minute to end
    there = node_of(machines, 0)
    other = machines._selection.rent_one(0, None)
    directory = Path(there.instance.directory or "")
    assert 430 < (read_paid(directory) or 0) - uptime() <= 440
    assert (end_of(other) - end_of(there.instance)) in (0, 1)
    machines._rental.end(there)
    limit.check()
    assert 930 < limit.paid_seconds() <= 940  # type: ignore[operator]


def end_of(instance: Instance) -> int:
    return int(instance.tags[EXPIRES_TAG])


def test_an_immediate_end_needs_no_listing(tmp_path: Path, opened: Opened) -> None:
    """Known machines are terminated although the listing fails; machines that a later listing shows, too."""
    provider = BlindProvider(folder=str(tmp_path))
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


@pytest.mark.parametrize(
    "act",
    [
        lambda machines: machines.raise_if_not_steward(),
        lambda machines: machines.add(1, lambda: True),
        lambda machines: machines.remove(1, "i-1"),
        lambda machines: machines.replace(1, lambda: True),
        lambda machines: machines.retire(1, "i-1"),
        lambda machines: machines.stand_by(1),
        lambda machines: machines.restart([], []),
    ],
    ids=["ask", "add", "remove", "replace", "retire", "stand by", "restart"],
)
def test_a_process_that_does_not_keep_the_pool_neither_rents_nor_ends_machines(
    tmp_path: Path, opened: Opened, act: Callable[[PoolMachines], object]
) -> None:
    def refuse() -> None:
        raise NotSteward("another process keeps the pool now")

    provider = FakeProvider(folder=str(tmp_path))
    machines, _, _ = opened(provider, refuse, nodes=(1, 2))
    with pytest.raises(NotSteward):
        act(machines)
    assert (provider.machines.launched, provider.machines.terminated) == ([], [])
