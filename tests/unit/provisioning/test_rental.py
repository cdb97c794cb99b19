"""What a rental does around a launch and an end: the script of the machine, events, attempts, and money that returns."""

from collections.abc import Callable, Iterator, Mapping
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path
from types import SimpleNamespace
from typing import Any, ClassVar

import pytest
from pydantic import PrivateAttr

import skyward_core as sky
from skyward_core import Instance, Offer
from skyward_core.errors import BadRequest, BudgetExceeded, LedgerError, PoolClosed
from skyward_core.ledger.budgets import SpendingLimit
from skyward_core.ledger.journal import Journal
from skyward_core.ledger.ledger import Ledger
from skyward_core.ledger.metering import Meter
from skyward_core.ledger.names_policy import NotSteward
from skyward_core.provisioning import rental as rental_module
from skyward_core.provisioning.guard import guard_script
from skyward_core.provisioning.rental import GUARD_GRACE_SECONDS, Rental
from tests.conftest import RecordedEvents
from tests.fakes import FakeProvider


class FarProvider(FakeProvider):
    """Rents machines over a network, which have an address. It keeps their scripts."""

    is_here: ClassVar[bool] = False
    end_command: ClassVar[str] = "poweroff --now"
    _scripts: list[str] = PrivateAttr(default_factory=list[str])
    _during: list[Callable[[], object]] = PrivateAttr(default_factory=list[Callable[[], object]])
    """Called before a launch is answered."""

    def launch(self, offer: Offer, count: int, tags: Mapping[str, str], startup: str) -> list[Instance]:
        self._scripts.append(startup)
        for step in self._during:
            step()
        machines = super().launch(offer, count, tags, startup)
        return [machine.model_copy(update={"ip": f"203.0.113.{machine.rank}"}) for machine in machines]


@dataclass
class Rented:
    """A rental of a pool, with all its events."""

    rental: Rental
    provider: FarProvider
    ledger: Ledger
    journal: Journal
    limit: SpendingLimit
    recorded: RecordedEvents
    offer: Offer

    def attempts(self) -> list[tuple[str, str]]:
        return [(attempt.error, attempt.message) for attempt in self.ledger.attempts(pool_id="sky-1")]


type Make = Callable[..., Rented]


@pytest.fixture
def make(tmp_path: Path) -> Iterator[Make]:
    """Make the rental of a pool with these options. It is stopped at the end."""
    with ExitStack() as undo:

        def made(may_act: Callable[[], object] = lambda: None, **options: Any) -> Rented:
            provider, meter, recorded = FarProvider(folder=str(tmp_path)), Meter(), RecordedEvents()
            spec = sky.PoolSpec.of(**options)
            ledger = undo.enter_context(Ledger(f"sqlite:///{tmp_path / 'ledger.db'}"))
            journal = Journal(ledger, "sky-1", spec, provider, meter, recorded)
            journal.open()
            limit = SpendingLimit("sky-1", meter, max_cost=spec.max_cost)
            rental = Rental(
                spec,
                provider,
                "sky-1",
                emit=recorded,
                meter=meter,
                journal=journal,
                spending_limit=limit,
                may_act=may_act,
            )
            undo.callback(rental.stop)
            (offer,) = provider.offers(sky.Requirements())
            return Rented(rental, provider, ledger, journal, limit, recorded, offer)

        yield made


def node_of(instance: Instance) -> Any:
    return SimpleNamespace(instance=instance, rank=instance.rank)


@pytest.mark.parametrize("max_cost", [None, 36.0])
def test_a_machine_gets_the_guard_of_its_pool(make: Make, max_cost: float | None) -> None:
    """Nothing else ends it without a client. With a limit it also knows from its start how long it is paid."""
    it = make(lease_seconds=90, max_lifetime=7200, **({} if max_cost is None else {"max_cost": max_cost}))
    it.rental.launch(it.offer, 2, 0)
    (script,) = it.provider._scripts
    assert script.splitlines()[0] == "#!/bin/sh"
    assert (script == guard_script(90, 7200, "poweroff --now", None)) is (max_cost is None)


def test_a_launch_is_announced_and_its_machines_are_reported(make: Make) -> None:
    it = make()
    instances = it.rental.launch(it.offer, 2, 3)
    assert it.recorded.of(sky.InstanceLaunching) == [sky.InstanceLaunching(2, "fake.1", "fake")]
    assert [(event.node, event.ip, event.price_spot) for event in it.recorded.of(sky.InstanceProvisioned)] == [
        (3, "203.0.113.3", None),
        (4, "203.0.113.4", None),
    ]
    it.rental.end(node_of(instances[1]))
    assert it.recorded.of(sky.InstanceStopping) == [sky.InstanceStopping("fake-1")]


def test_nothing_is_rented_after_the_stop(make: Make) -> None:
    """Nothing is requested: the provider would bill its first minute."""
    it = make()
    it.rental.launch_no_more()
    with pytest.raises(PoolClosed):
        it.rental.launch_up_to(it.offer, 1, 0)
    assert (it.provider.machines.launched, it.recorded.events) == ([], [])


def test_the_money_of_a_launch_that_was_never_requested_is_free(make: Make, monkeypatch: pytest.MonkeyPatch) -> None:
    """The ledger could not record it, so that no machine can exist: the whole limit is there for the next launch."""
    it = make(max_cost=5.0)

    def fail(*_: object) -> None:
        raise LedgerError("the disk is full")

    with monkeypatch.context() as patch:
        patch.setattr(it.journal, "intend", fail)
        for _ in range(3):
            with pytest.raises(LedgerError):
                it.rental.launch_up_to(it.offer, 1, 0)
    assert it.provider.machines.launched == []
    it.rental.launch_up_to(it.offer, 1, 0)
    assert it.limit.paid_seconds() > 400  # type: ignore[operator]  # a cent a second


def test_an_attempt_that_is_refused_before_its_request_is_recorded_with_the_reason(make: Make) -> None:
    """A machine with fewer cores than calls run at once, and one that costs too much."""
    it = make(concurrency=3, max_cost=0.1)
    small = it.offer.model_copy(update={"accelerator": "Inferentia2", "accelerators": 1})
    with pytest.raises(BadRequest, match="concurrency=3") as wrong:
        it.rental.launch_up_to(small, 1, 0)
    with pytest.raises(BudgetExceeded) as caught:
        it.rental.launch_up_to(it.offer, 1, 0)
    assert it.provider.machines.launched == []
    assert it.attempts() == [("BadRequest", str(wrong.value)), ("BudgetExceeded", str(caught.value))]


@pytest.mark.parametrize(("seconds", "presumed"), [(-1.0, set[str]()), (1.0, {"fake-0"})])
def test_a_machine_is_presumed_gone_some_time_after_its_lease(
    make: Make, monkeypatch: pytest.MonkeyPatch, seconds: float, presumed: set[str]
) -> None:
    """Its guard gets a grace to end it. Before that only the provider can prove its end."""
    it, now, seen = make(lease_seconds=60), [1000.0], list[frozenset[str]]()
    lost, *_ = it.rental.launch(it.offer, 2, 0)
    monkeypatch.setattr(rental_module, "time", SimpleNamespace(monotonic=lambda: now[0]))

    def torn_down(*_: object, presumed_gone: frozenset[str], **__: object) -> None:
        seen.append(presumed_gone)

    monkeypatch.setattr(rental_module, "tear_down", torn_down)
    it.rental.end(node_of(lost))
    now[0] += 60 + GUARD_GRACE_SECONDS + seconds
    it.rental.tear_down()
    assert seen == [presumed]


def test_nothing_is_rented_when_another_process_keeps_the_pool(make: Make) -> None:
    """Nothing is requested, and no money is committed for it."""

    def refuse() -> None:
        raise NotSteward("another process keeps the pool now")

    it = make(refuse, max_cost=36.0)
    with pytest.raises(NotSteward):
        it.rental.launch(it.offer, 1, 0)
    assert it.provider.machines.launched == []
    assert it.limit.paid_seconds() is None


@pytest.mark.parametrize(
    ("why", "error", "running"),
    [("closed", PoolClosed, []), ("left", PoolClosed, ["fake-0"]), ("kept by another", NotSteward, ["fake-0"])],
)
def test_a_machine_that_comes_too_late_is_ended(
    make: Make, why: str, error: type[Exception], running: list[str]
) -> None:
    """With all others when the pool was closed; alone when the others belong to other processes."""
    has_lost_the_pool = False

    def may_act() -> None:
        if has_lost_the_pool:
            raise NotSteward("another process keeps the pool now")

    def meanwhile() -> None:
        nonlocal has_lost_the_pool
        has_lost_the_pool = why == "kept by another"
        if why == "left":
            it.rental.leave()
        if not has_lost_the_pool:
            it.rental.stop()

    it = make(may_act)
    it.rental.launch(it.offer, 1, 0)
    it.provider._during.append(meanwhile)
    with pytest.raises(error):
        it.rental.launch(it.offer, 1, 1)
    assert list(it.provider.machines.running) == running
