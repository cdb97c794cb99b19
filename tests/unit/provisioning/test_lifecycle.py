"""The machines of a pool, with the real rental, ledger and limit, and a fake cloud: what a launch and an end leave."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import Future
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path
from types import SimpleNamespace
from typing import Any, ClassVar

import pytest
from pydantic import PrivateAttr

import skyward_core as sky
from skyward_core import Instance, Offer
from skyward_core.engine.certificates import PoolCertificate, make_certificate
from skyward_core.errors import BadRequest, BudgetExceeded, LedgerError, PoolClosed
from skyward_core.ledger.budgets import SpendingLimit
from skyward_core.ledger.journal import Journal
from skyward_core.ledger.ledger import Ledger
from skyward_core.ledger.metering import Meter
from skyward_core.ledger.names_policy import NotSteward
from skyward_core.providers.base import EXPIRES_TAG
from skyward_core.provisioning import rental as rental_module
from skyward_core.provisioning.bootstrap import Preparation, guard_script
from skyward_core.provisioning.lifecycle import PoolMachines
from skyward_core.provisioning.rental import GUARD_GRACE_SECONDS, Rental
from skyward_core.worker.node_clocks import read_paid, uptime
from tests.conftest import RecordedEvents
from tests.fakes import BlindProvider, FakeProvider
from tests.offers import offer


class FarProvider(FakeProvider):
    """Rents machines over a network, which have an address. It keeps their scripts."""

    is_local: ClassVar[bool] = False
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
class Pool:
    """The machines of an open pool, with all its events."""

    machines: PoolMachines
    provider: Any
    ledger: Ledger
    journal: Journal
    limit: SpendingLimit
    meter: Meter
    recorded: RecordedEvents
    offer: Offer

    @property
    def rental(self) -> Rental:
        return self.machines._rental

    def node(self, rank: int) -> Preparation:
        """Rent a machine for this rank."""
        (instance,) = self.rental.launch(self.offer, 1, rank)
        return Preparation(self.machines.transports.to(instance), rank, self.recorded)


type Opened = Callable[..., Pool]


@pytest.fixture
def opened(tmp_path: Path) -> Iterator[Opened]:
    """Open a pool with these options. It is stopped at the end."""
    with ExitStack() as undo:

        def open_one(
            kind: type[FakeProvider] | FakeProvider = FakeProvider,
            may_act: Callable[[], object] = lambda: None,
            meter: Meter | None = None,
            certificate: PoolCertificate | None = None,
            others: Sequence[FakeProvider] = (),
            **options: Any,
        ) -> Pool:
            meter, spec, recorded = meter or Meter(), sky.PoolSpec.of(**options), RecordedEvents()
            provider = kind(folder=str(tmp_path)) if isinstance(kind, type) else kind
            made = Future[PoolCertificate]()
            if certificate is not None:
                made.set_result(certificate)
            ledger = undo.enter_context(Ledger(f"sqlite:///{tmp_path / 'ledger.db'}"))
            journal = Journal(ledger, "sky-1", spec, provider, meter, recorded)
            journal.open()
            limit = SpendingLimit("sky-1", meter, max_cost=spec.max_cost)
            machines = PoolMachines(
                spec,
                [provider, *others],
                "sky-1",
                made,
                emit=recorded,
                meter=meter,
                journal=journal,
                spending_limit=limit,
                may_act=may_act,
            )
            undo.callback(machines.stop)
            sold = next(iter(provider.offers(sky.Requirements())), offer())
            machines._selection.offers = {0: sold, 1: sold}
            return Pool(machines, provider, ledger, journal, limit, meter, recorded, sold)

        yield open_one


# ── launches ─────────────────────────────────────────────────────────────────────────────────────────────────────────


@pytest.mark.parametrize("max_cost", [None, 36.0])
def test_a_machine_gets_the_guard_of_its_pool(opened: Opened, max_cost: float | None) -> None:
    """Nothing else ends it without a client. With a limit it also knows from its start how long it is paid."""
    limit = {} if max_cost is None else {"max_cost": max_cost}
    it = opened(FarProvider, lease_seconds=90, max_lifetime=7200, **limit)
    it.rental.launch(it.offer, 2, 0)
    (script,) = it.provider._scripts
    assert script.splitlines()[0] == "#!/bin/sh"
    assert (script == guard_script(90, 7200, "poweroff --now", None)) is (max_cost is None)


def test_a_launch_is_announced_and_its_machines_are_reported(opened: Opened) -> None:
    it = opened(FarProvider)
    instances = it.rental.launch(it.offer, 2, 3)
    assert it.recorded.of(sky.InstanceLaunching) == [sky.InstanceLaunching(2, "fake.1", "fake")]
    assert [(event.node, event.ip, event.price_spot) for event in it.recorded.of(sky.InstanceProvisioned)] == [
        (3, "203.0.113.3", None),
        (4, "203.0.113.4", None),
    ]
    it.rental.end(node_of(instances[1]))
    assert it.recorded.of(sky.InstanceStopping) == [sky.InstanceStopping("fake-1")]


def node_of(instance: Instance) -> Any:
    return SimpleNamespace(instance=instance, rank=instance.rank)


def test_the_money_of_a_launch_that_was_never_requested_is_free(
    opened: Opened, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The ledger could not record it, so that no machine can exist: the whole limit is there for the next launch."""
    it = opened(max_cost=5.0)

    def fail(*_: object) -> None:
        raise LedgerError("the disk is full")

    with monkeypatch.context() as patch:
        patch.setattr(it.journal, "intend", fail)
        for _ in range(3):
            with pytest.raises(LedgerError):
                it.rental.launch_up_to(it.offer, 1, 0)
    assert it.provider.machines.launched == []
    assert it.recorded.of(sky.InstanceLaunching) == []
    it.rental.launch_up_to(it.offer, 1, 0)
    assert it.limit.paid_seconds() > 400  # type: ignore[operator]  # a cent a second


def test_an_attempt_that_is_refused_before_its_request_is_recorded_with_the_reason(opened: Opened) -> None:
    """A machine with fewer cores than calls run at once, and one that costs too much."""
    it = opened(concurrency=3, max_cost=0.1)
    small = it.offer.model_copy(update={"accelerator": "Inferentia2", "accelerators": 1})
    with pytest.raises(BadRequest, match="concurrency=3") as wrong:
        it.rental.launch_up_to(small, 1, 0)
    with pytest.raises(BudgetExceeded) as caught:
        it.rental.launch_up_to(it.offer, 1, 0)
    assert it.provider.machines.launched == []
    recorded = [(attempt.error, attempt.message) for attempt in it.ledger.attempts(pool_id="sky-1")]
    assert recorded == [("BadRequest", str(wrong.value)), ("BudgetExceeded", str(caught.value))]


def test_nothing_is_rented_after_the_stop(opened: Opened) -> None:
    """Nothing is requested: the provider would bill its first minute."""
    it = opened()
    it.rental.launch_no_more()
    with pytest.raises(PoolClosed):
        it.rental.launch_up_to(it.offer, 1, 0)
    assert (it.provider.machines.launched, it.recorded.events) == ([], [])


@pytest.mark.parametrize(
    ("why", "error", "running"),
    [("closed", PoolClosed, []), ("left", PoolClosed, ["fake-0"]), ("kept by another", NotSteward, ["fake-0"])],
)
def test_a_machine_that_comes_too_late_is_ended(
    opened: Opened, why: str, error: type[Exception], running: list[str]
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

    it = opened(FarProvider, may_act)
    it.rental.launch(it.offer, 1, 0)
    it.provider._during.append(meanwhile)
    with pytest.raises(error):
        it.rental.launch(it.offer, 1, 1)
    assert list(it.provider.machines.running) == running
    assert it.ledger.intents(pool_id="sky-1")[-1].evidence == "fake lists it no more"


# ── ends ─────────────────────────────────────────────────────────────────────────────────────────────────────────────


@pytest.mark.parametrize(("seconds", "presumed"), [(-1.0, set[str]()), (1.0, {"fake-0"})])
def test_a_machine_is_presumed_gone_some_time_after_its_lease(
    opened: Opened, monkeypatch: pytest.MonkeyPatch, seconds: float, presumed: set[str]
) -> None:
    """Its guard gets a grace to end it. Before that only the provider can prove its end."""
    it, now, seen = opened(FarProvider, lease_seconds=60), [1000.0], list[frozenset[str]]()
    lost, *_ = it.rental.launch(it.offer, 2, 0)

    def torn_down(*_: object, presumed_gone: frozenset[str], **__: object) -> None:
        seen.append(presumed_gone)

    with monkeypatch.context() as patch:
        patch.setattr(rental_module, "time", SimpleNamespace(monotonic=lambda: now[0]))
        patch.setattr(rental_module, "tear_down", torn_down)
        it.rental.end(node_of(lost))
        now[0] += 60 + GUARD_GRACE_SECONDS + seconds
        it.rental.tear_down()
    assert seen == [presumed]


def test_a_standby_machine_shortens_the_paid_time_of_the_other(opened: Opened) -> None:
    """The node receives the shorter time. When the other machine is gone it gets a longer one.

    Its tags have the latest possible end.
    """
    it = opened(max_cost=10.0)  # a cent a second, and a minute for the end
    there = it.node(0)
    other = it.machines._selection.rent_one(0, None)
    directory = Path(there.instance.directory or "")
    assert 430 < (read_paid(directory) or 0) - uptime() <= 440
    assert int(other.tags[EXPIRES_TAG]) - int(there.instance.tags[EXPIRES_TAG]) in (0, 1)
    it.rental.end(there)
    it.limit.check()
    assert 930 < it.limit.paid_seconds() <= 940  # type: ignore[operator]


def test_an_immediate_end_needs_no_listing(opened: Opened) -> None:
    """Known machines are terminated although the listing fails; machines that a later listing shows, too."""
    it = opened(BlindProvider)
    it.node(0)
    it.machines.end_now()
    assert it.provider.machines.terminated == ["fake-0"]
    it.provider.see()
    it.provider._start(it.offer, "sky-1", 1)
    it.machines.end_now()
    assert it.provider.machines.terminated == ["fake-0", "fake-0", "fake-1"]


def test_the_certificate_is_made_for_one_pool() -> None:
    """Two pools have different keys, so a member of one cannot join the other."""
    first, second = make_certificate("sky-1"), make_certificate("sky-2")
    assert first.key != second.key
    assert first.certificate.startswith("-----BEGIN CERTIFICATE-----")


@pytest.mark.parametrize(
    "act",
    [
        lambda it: it.machines.raise_if_not_steward(),
        lambda it: it.machines.add(1, lambda: True),
        lambda it: it.machines.remove(1, "i-1"),
        lambda it: it.machines.replace(1, lambda: True),
        lambda it: it.machines.retire(1, "i-1"),
        lambda it: it.machines.stand_by(1),
        lambda it: it.machines.restart([], []),
        lambda it: it.rental.launch(it.offer, 1, 0),
    ],
    ids=["ask", "add", "remove", "replace", "retire", "stand by", "restart", "launch"],
)
def test_a_process_that_does_not_keep_the_pool_neither_rents_nor_ends_machines(
    opened: Opened, act: Callable[[Pool], object]
) -> None:
    """No money is committed either."""

    def refuse() -> None:
        raise NotSteward("another process keeps the pool now")

    it = opened(FakeProvider, refuse, nodes=(1, 2), max_cost=36.0)
    with pytest.raises(NotSteward):
        act(it)
    assert (it.provider.machines.launched, it.provider.machines.terminated) == ([], [])
    assert it.limit.paid_seconds() is None
