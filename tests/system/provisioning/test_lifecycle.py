"""Machines of pools that fail, or that cannot be terminated: all are terminated, or an error names them."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from types import SimpleNamespace
from typing import Any, ClassVar, NoReturn, cast

import pytest
from pydantic import PrivateAttr

import skyward_core as sky
from skyward_core import Instance, Offer, Requirements
from skyward_core.errors import CommandFailed, ConnectionLost, CredentialsError
from skyward_core.ledger.ledger import Ledger, default_url
from skyward_core.provisioning.lifecycle import PoolMachines
from skyward_core.session.warm_pools import what_may_run
from skyward_core.transport.transport import Transports
from tests.conftest import RecordedEvents
from tests.fakes import (
    BlindProvider,
    FakeProvider,
    LossyProvider,
    NoCapacityProvider,
    NothingSoldProvider,
    StuckProvider,
)
from tests.unit.provisioning.test_lifecycle import Opened, opened  # noqa: F401 - a fixture
from tests.waiting import wait_until


def open_pool(provider: sky.Provider, recorded: RecordedEvents, **options: Any) -> sky.ComputePool:
    pool = sky.ComputePool(
        provider=provider, on_event=recorded, display="quiet", **{"provision_timeout": 1.0, "nodes": 2, **options}
    )
    try:
        return pool.open()
    except BaseException:
        assert not pool.is_active
        assert recorded.of(sky.CostFinal) == [pool.cost_final]
        raise


class StrangersProvider(FakeProvider):
    """A provider that refuses all requests."""

    def offers(self, want: Requirements) -> list[Offer]:
        raise CredentialsError("who are you?")

    def instances(self, pool_id: str | None = None) -> list[Instance]:
        raise AssertionError("it would fail for two minutes, and its error would hide the first")


@pytest.mark.parametrize(
    ("kind", "options", "error", "words"),
    [
        (NoCapacityProvider, {}, sky.NoCapacity, "nowhere-1"),
        (NothingSoldProvider, {}, sky.NoCapacity, "no offers"),
        (StrangersProvider, {}, CredentialsError, "who are you"),
        (FakeProvider, {"memory": "1TB"}, sky.NoCapacity, r"nowhere-1 fake\.1 has 16\.0 GB"),
        (FakeProvider, {"spot": "always"}, sky.BadRequest, "if-available"),
    ],
)
def test_what_cannot_be_rented_costs_nothing(
    tmp_path: Path, kind: type[FakeProvider], options: dict[str, Any], error: type[Exception], words: str
) -> None:
    """The error of the provider reaches the caller. There is one final cost event, with zero."""
    provider, recorded = kind(folder=str(tmp_path)), RecordedEvents()
    with pytest.raises(error, match=words):
        open_pool(provider, recorded, **options)
    assert provider.machines.launched == []
    assert [bill.total_cost for bill in recorded.of(sky.CostFinal)] == [0]
    assert recorded.of(sky.InstanceProvisioned) == []


@pytest.mark.parametrize(("options", "spot"), [({"spot": "never"}, [False, False]), ({"spot": 0.5}, [False, True])])
def test_machines_that_do_not_become_ready_are_terminated(
    tmp_path: Path, options: dict[str, Any], spot: list[bool]
) -> None:
    """All are metered until then. In a mixed pool the head is on demand; the bill has the savings of the others."""
    recorded, provider = RecordedEvents(), FakeProvider(folder=str(tmp_path), spot_is_sold=True)
    with pytest.raises(sky.ProvisioningTimeout, match="provision_timeout"):
        open_pool(provider, recorded, max_cost=5.0, **options)
    assert (sorted(provider.machines.launched), provider.machines.running) == (["fake-0", "fake-1"], {})
    assert [(event.node, event.spot) for event in recorded.of(sky.InstanceProvisioned)] == [*enumerate(spot)]
    assert {event.instance_id for event in recorded.of(sky.InstanceStopping)} == {"fake-0", "fake-1"}
    (bill,) = recorded.of(sky.CostFinal)
    assert bill.total_cost >= (36.0 + (12.0 if any(spot) else 36.0)) / 3600
    assert (bill.spot_count, bill.savings_vs_ondemand > 0) == (sum(spot), any(spot))


def test_a_mixed_pool_without_the_money_for_both_parts_rents_nothing(tmp_path: Path) -> None:
    recorded = RecordedEvents()
    with pytest.raises(
        sky.BudgetExceeded, match=r"1 x 36.0 USD per hour and 1 x 12.0 .* 60 s that their termination may take"
    ):
        open_pool(FakeProvider(folder=str(tmp_path), spot_is_sold=True), recorded, spot=0.5, max_cost=1.5)
    assert recorded.of(sky.InstanceLaunching) == []


@pytest.mark.parametrize("error", [ConnectionError("the answer was lost"), KeyboardInterrupt(), SystemExit(1)])
def test_machines_of_a_failed_launch_are_found_and_terminated(tmp_path: Path, error: BaseException) -> None:
    """An error of `launch`, also an interrupt, does not prove that no machine runs. It is raised unchanged.

    They are found by their tags: machines of other pools of the account, with similar ids, are not terminated.
    """
    recorded, provider = RecordedEvents(), LossyProvider(folder=str(tmp_path)).fail_with(error)
    offer = provider.offers(sky.Requirements())[0]
    others = [provider._start(offer, pool_id, 0).id for pool_id in ("sky-", "sky-other")]
    with pytest.raises(type(error)) as caught:
        open_pool(provider, recorded)
    assert caught.value is error
    assert len(provider.machines.launched) == 2 + len(others)
    assert sorted(provider.machines.running) == others


class Stuck(StuckProvider):
    gone_deadline_seconds: ClassVar[float] = 0.5


class Blind(BlindProvider):
    gone_deadline_seconds: ClassVar[float] = 0.5


@pytest.mark.parametrize("kind", [Stuck, Blind])
def test_machines_that_do_not_end_are_named(
    tmp_path: Path, kind: type[FakeProvider], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Those that are listed at the deadline, or whose end no listing confirms."""
    # they stay in a ledger of their own: no sweep of a later test knows the provider
    monkeypatch.setenv("SKYWARD_LEDGER", f"sqlite:///{tmp_path}/ledger.db")
    recorded, provider = RecordedEvents(), kind(folder=str(tmp_path))
    with pytest.raises(sky.InstancesLeft, match="fake-0, fake-1") as caught:
        open_pool(provider, recorded)
    assert caught.value.ids == ("fake-0", "fake-1")
    assert {*provider.machines.terminated} == {"fake-0", "fake-1"}
    assert kind is Blind or isinstance(caught.value.__context__, sky.ProvisioningTimeout)
    assert any("fake-0" in event.message for event in recorded.of(sky.Error))


# ── the end of an open pool ──────────────────────────────────────────────────────────────────────────────────────────


@pytest.fixture
def unending(monkeypatch: pytest.MonkeyPatch) -> None:
    """Local nodes cannot be terminated by this process, which soon gives up. A reaper can terminate them."""
    monkeypatch.setattr(sky.Local, "gone_deadline_seconds", 0.3)
    monkeypatch.setattr(sky.Local, "terminate", lambda *_: {})


def is_ended(pool_id: str) -> bool:
    """Return whether the ledger has recorded the pool's end."""
    with Ledger(default_url()) as ledger:
        entry = ledger.pool(pool_id)
        return entry is not None and entry.ended_at is not None


@pytest.mark.usefixtures("unending")
@pytest.mark.parametrize("is_multi", [False, True])
def test_an_error_of_the_with_block_is_never_hidden(is_multi: bool) -> None:
    """It is raised unchanged, with a note that names the machines. The reaper then terminates them."""
    pool = sky.ComputePool(provider=sky.Local(), display="quiet")
    with pytest.raises(ZeroDivisionError) as caught, sky.MultiPool(pool) if is_multi else pool:
        pool_id, (node,) = pool.lease.pool_id, pool.lease.nodes
        raise ZeroDivisionError
    assert [node.instance.id in note for note in caught.value.__notes__] == [True]
    assert not pool.is_active
    wait_until(lambda: is_ended(pool_id), "the reaper to end it")


@pytest.mark.parametrize("name", [None, "nightly"])
def test_an_interrupted_close_names_the_machines_that_may_run(
    monkeypatch: pytest.MonkeyPatch, name: str | None
) -> None:
    """In a sentence with the price, in the event and in the receipt. Once they are gone it is empty."""
    recorded = RecordedEvents()
    provider = sky.Local(price_per_hour=36)
    pool = sky.ComputePool(provider=provider, name=name, on_event=recorded, display="quiet").open()
    (node,) = pool.lease.nodes

    def interrupts(_: object) -> None:
        raise KeyboardInterrupt

    with monkeypatch.context() as patched, pytest.raises(KeyboardInterrupt):
        patched.setattr(PoolMachines, "release", interrupts)
        pool.close()
    assert pool.still_running.endswith(f"may still run, 36.00 USD/h: {node.instance.id}")
    assert [entry["cloud_id"] for entry in (pool.receipt or {})["left"]] == [node.instance.id]
    (event,) = recorded.of(sky.Error)
    assert "close the pool again" in event.message
    assert node.instance.id in event.message
    pool.close()
    assert pool.still_running == ""
    assert sky.Local().instances(node.instance.pool_id) == []


def test_a_ledger_that_cannot_be_read_is_no_end_of_machines() -> None:
    class Silent:
        def open_intents(self, **_: object) -> NoReturn:
            raise sky.LedgerError("it does not answer")

    for ledger in (cast(Any, Silent()), None):
        assert "machines of the pool sky-1 may still run" in what_may_run(ledger, "sky-1")


@pytest.mark.usefixtures("unending")
@pytest.mark.parametrize("is_free", [True, False])
def test_results_are_kept_if_machines_cannot_be_confirmed_gone(monkeypatch: pytest.MonkeyPatch, is_free: bool) -> None:
    """If the machines cost nothing and end themselves there is no error, else InstancesLeft is raised.

    The event comes before the final cost event, and the ledger's entry stays open until the reaper has ended them.
    """
    monkeypatch.setattr(sky.Local, "may_be_left_to_its_lease", lambda *_: is_free)
    recorded = RecordedEvents()
    pool = sky.ComputePool(provider=sky.Local(), on_event=recorded, display="quiet").open()
    (node,) = pool.lease.nodes
    result = pool.run(sky.PendingCompute(abs, (-1,)))
    try:
        pool.close()
        assert is_free
    except sky.InstancesLeft as left_over:
        assert not is_free
        assert left_over.ids == (node.instance.id,)
    assert result == 1
    (left,) = recorded.of(sky.InstancesUnconfirmed)
    assert (left.instance_ids, left.is_free) == ((node.instance.id,), is_free)
    assert recorded.events.index(left) < recorded.events.index(recorded.of(sky.CostFinal)[0])
    assert pool.unconfirmed is not None
    assert pool.unconfirmed.ids == (node.instance.id,)
    if is_free:
        assert [entry["cloud_id"] for entry in (pool.receipt or {})["left"]] == [node.instance.id]
        pool.close()
        with pytest.raises(sky.PoolClosed):
            pool.run(sky.PendingCompute(abs, (-1,)))
    else:
        assert pool.hand_over() is not None
        assert pool.hand_over() is not None
    wait_until(lambda: is_ended(node.instance.pool_id), "the reaper to end it")
    assert sky.Local().instances(node.instance.pool_id) == []


def test_a_second_close_finishes_an_interrupted_one(monkeypatch: pytest.MonkeyPatch) -> None:
    """A second Ctrl-C interrupts the teardown and is raised. There is only one final cost event."""
    recorded = RecordedEvents()
    pool = sky.ComputePool(provider=sky.Local(), on_event=recorded, display="quiet").open()
    pool_id = pool.lease.pool_id

    def interrupted(*_: object) -> None:
        raise KeyboardInterrupt

    with monkeypatch.context() as patch:
        patch.setattr(sky.Local, "terminate", interrupted)
        with pytest.raises(KeyboardInterrupt):
            pool.close()
    assert sky.Local().instances(pool_id) != []
    pool.close()
    assert sky.Local().instances(pool_id) == []
    assert len(recorded.of(sky.CostFinal)) == 1


# ── a lost machine ───────────────────────────────────────────────────────────────────────────────────────────────────


class UnheardOf(FakeProvider):
    """A provider with a first termination that fails, and machines that are still listed for some time."""

    _listings: int = PrivateAttr(default=2)

    def terminate(self, ids: Sequence[str]) -> None:
        self.machines.terminated.extend(ids)
        if len(self.machines.terminated) == 1:
            raise ConnectionError("503")

    def instances(self, pool_id: str | None = None) -> list[Instance]:
        self._listings -= 1
        if not self._listings:
            super().terminate(self.machines.terminated[:1])
        return super().instances(pool_id)


def test_a_lost_machine_is_terminated_while_the_pool_is_open(opened: Opened) -> None:
    """The termination is repeated until the machine is gone, and its metering ends. The other machine stays."""
    it = opened(UnheardOf)
    lost, _ = it.node(0), it.node(1)
    it.rental.end_in_thread(lost)
    wait_until(lambda: it.meter.rented() == {"fake-1"}, "it to be gone")
    assert {*it.provider.machines.terminated} == {"fake-0"}
    assert list(it.provider.machines.running) == ["fake-1"]


def test_a_replacement_waits_for_the_commitment_of_the_lost_machine(opened: Opened) -> None:
    """The whole limit was committed to the lost machine, which is unreachable. The replacement gets that money."""
    it = opened(UnheardOf, max_cost=5.0)
    lost = it.node(0)
    paid = it.limit.paid_seconds()
    assert it.machines._selection.rent_one(0, it.rental.end_in_thread(lost)).id == "fake-1"
    assert it.meter.rented() == {"fake-1"}
    assert it.limit.paid_seconds() > paid - 60  # type: ignore[operator]


class Way:
    """A transport to a node over the network."""

    def __init__(self, name: str, *, is_connected: bool = True, error: Exception | None = None) -> None:
        self.instance = SimpleNamespace(id=name)
        self.is_connected = is_connected
        self.error = error

    def extend_lease(self, seconds: float) -> None:
        if self.error is not None:
            raise self.error

    def close(self) -> None:
        """Do nothing."""


def test_only_nodes_that_answer_have_received_their_paid_time() -> None:
    """The lease renewal sends it. A node without a connection is skipped."""
    transports = Transports(60.0, lambda _: None)
    assert transports.send_paid_time() == set()
    ways: list[Any] = [
        Way("a"),
        Way("b", is_connected=False, error=AssertionError("it is not asked")),
        Way("c", error=ConnectionLost("cut")),
        Way("d", error=CommandFailed("full", 1, "")),
        Way("e"),
    ]
    transports._transports = {way.instance.id: way for way in ways}
    assert transports.send_paid_time() == {"a", "e"}
    transports.close()
