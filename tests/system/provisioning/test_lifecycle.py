"""Machines of fake clouds: after any failure all are terminated, or an error names them."""

from collections.abc import Sequence
from typing import Any, cast

import pytest
from pydantic import PrivateAttr

import skyward_core as sky
from skyward_core import Instance, Offer, Requirements
from skyward_core.errors import CommandFailed, ConnectionLost, CredentialsError
from skyward_core.ledger.ledger import Ledger, default_url
from skyward_core.provisioning import teardown, termination
from skyward_core.transport.transport import Transport, Transports
from tests.conftest import RecordedEvents, wait_until
from tests.fakes import (
    BlindProvider,
    FakeProvider,
    FlakyProvider,
    LossyProvider,
    NeverReadyProvider,
    NoCapacityProvider,
    NothingSoldProvider,
    ShortProvider,
    SlowToGoProvider,
    StuckProvider,
)
from tests.unit.provisioning.test_lifecycle import (  # noqa: F401 - fixtures
    Make,
    make,
    node_of,
    opened,
)


def open_pool(provider: sky.Provider, recorded: RecordedEvents, **options: Any) -> sky.ComputePool:
    pool = sky.ComputePool(
        provider=provider, on_event=recorded, display="quiet", **{"provision_timeout": 0.3, "nodes": 2, **options}
    )
    try:
        return pool.open()
    except BaseException:
        assert not pool.is_active
        assert pool.cost_final == recorded.of(sky.CostFinal)[0]
        raise


def test_no_capacity_is_raised_and_costs_nothing(make: Make) -> None:
    """NoCapacity of the provider reaches the caller. There is one final cost event, with zero."""
    recorded = RecordedEvents()
    with pytest.raises(sky.NoCapacity, match="nowhere-1"):
        open_pool(make(NoCapacityProvider), recorded)
    (bill,) = recorded.of(sky.CostFinal)
    assert bill.total_cost == 0
    assert recorded.of(sky.InstanceProvisioned) == []


def test_an_empty_list_of_offers_is_no_capacity(make: Make) -> None:
    """It is raised before anything is launched."""
    provider = make(NothingSoldProvider)
    with pytest.raises(sky.NoCapacity):
        open_pool(provider, RecordedEvents())
    assert provider.machines.launched == []


class StrangersProvider(FakeProvider):
    """A provider that refuses all requests. It counts the requests after the first."""

    _asked: list[str] = PrivateAttr(default_factory=list)

    def offers(self, want: Requirements) -> list[Offer]:
        raise CredentialsError("who are you?")

    def instances(self, pool_id: str | None = None) -> list[Instance]:
        self._asked.append("instances")
        raise CredentialsError("who are you?")


def test_missing_credentials_are_reported_at_once(make: Make) -> None:
    """Nothing was launched, so the provider is not queried for machines.

    That query would fail for two minutes, and its error would hide the first.
    """
    provider = make(StrangersProvider)
    with pytest.raises(CredentialsError, match="who are you"):
        open_pool(provider, RecordedEvents())
    assert provider._asked == []


def test_the_error_has_a_reason_for_each_offer(make: Make) -> None:
    """NoCapacity names each offer and the requirement that it does not meet."""
    provider = make(FakeProvider)
    with pytest.raises(sky.NoCapacity, match=r"nowhere-1 fake\.1 has 16\.0 GB"):
        open_pool(provider, RecordedEvents(), memory="1TB")
    assert provider.machines.launched == []


def test_machines_that_do_not_become_ready_are_terminated(make: Make) -> None:
    """ProvisioningTimeout is raised at the deadline, with advice. All machines are terminated, and metered until then."""
    recorded, provider = RecordedEvents(), make(NeverReadyProvider)
    with pytest.raises(sky.ProvisioningTimeout, match="provision_timeout"):
        open_pool(provider, recorded)
    assert provider.machines.running == {}
    assert sorted(provider.machines.launched) == ["fake-0", "fake-1"]
    assert {event.instance_id for event in recorded.of(sky.InstanceStopping)} == {"fake-0", "fake-1"}
    (bill,) = recorded.of(sky.CostFinal)
    assert 2 * 36.0 * 0.3 / 3600 <= bill.total_cost <= 2 * 36.0 * 10 / 3600


@pytest.mark.parametrize("error", [ConnectionError("the answer was lost"), KeyboardInterrupt(), SystemExit(1)])
def test_machines_of_a_failed_launch_are_found_and_terminated(make: Make, error: BaseException) -> None:
    """An error of `launch`, also an interrupt, does not prove that no machine runs.

    The machines are found by their tags. The error is raised unchanged.
    """
    recorded, provider = RecordedEvents(), make(LossyProvider).fail_with(error)
    with pytest.raises(type(error)) as caught:
        open_pool(provider, recorded)
    assert caught.value is error
    assert len(provider.machines.launched) == 2
    assert provider.machines.running == {}
    assert len(recorded.of(sky.CostFinal)) == 1


def test_an_incomplete_launch_is_terminated(make: Make) -> None:
    """A launch returns fewer machines than requested. NoCapacity has both numbers, and the machines are terminated."""
    recorded, provider = RecordedEvents(), make(ShortProvider)
    with pytest.raises(sky.NoCapacity, match="2 of 3"):
        open_pool(provider, recorded, nodes=3)
    assert len(provider.machines.launched) == 2
    assert provider.machines.running == {}
    assert len(recorded.of(sky.CostFinal)) == 1


def test_machines_of_other_pools_are_not_terminated(make: Make) -> None:
    """The other pool has the same account and a similar id."""
    provider = make(LossyProvider)
    offer = provider.offers(sky.Requirements())[0]
    others = [provider._start(offer, pool_id, 0).id for pool_id in ("sky-", "sky-other")]
    with pytest.raises(ConnectionError):
        open_pool(provider, RecordedEvents())
    assert sorted(provider.machines.running) == sorted(others)


def test_machines_that_do_not_end_are_named(make: Make) -> None:
    """InstancesLeft has the ids of machines that are listed at the deadline. The first error is its context."""
    recorded, provider = RecordedEvents(), make(StuckProvider)
    with pytest.raises(sky.InstancesLeft) as caught:
        open_pool(provider, recorded)
    assert caught.value.ids == ("fake-0", "fake-1")
    assert "fake-0" in str(caught.value)
    assert "fake-1" in str(caught.value)
    assert isinstance(caught.value.__context__, sky.ProvisioningTimeout)
    assert len(recorded.of(sky.CostFinal)) == 1
    assert any("fake-0" in event.message for event in recorded.of(sky.Error))


def test_a_termination_is_repeated_until_the_machine_is_gone(make: Make) -> None:
    """A machine that is still listed is terminated again."""
    provider = make(SlowToGoProvider)
    with pytest.raises(sky.ProvisioningTimeout):
        open_pool(provider, RecordedEvents(), nodes=1)
    assert provider.machines.terminated == ["fake-0"] * 3
    assert provider.machines.running == {}


def test_a_failed_termination_is_repeated(make: Make) -> None:
    """A failed request leaves no machine. The raised error is the original one."""
    recorded, provider = RecordedEvents(), make(FlakyProvider)
    with pytest.raises(sky.ProvisioningTimeout):
        open_pool(provider, recorded)
    assert provider.machines.running == {}
    assert len(recorded.of(sky.CostFinal)) == 1


@pytest.fixture
def unending(monkeypatch: pytest.MonkeyPatch) -> None:
    """Local nodes cannot be terminated by this process, which soon gives up. A reaper can terminate them."""
    monkeypatch.setattr(teardown, "DEADLINE_SECONDS", 0.3)
    monkeypatch.setattr(sky.Local, "terminate", lambda *_: {})


@pytest.mark.parametrize("is_multi", [False, True])
def test_an_error_of_the_with_block_is_never_hidden(unending: None, is_multi: bool) -> None:
    """It is raised unchanged, with a note that names the machines. The reaper then terminates them."""
    pool = sky.ComputePool(provider=sky.Local(), display="quiet")
    with pytest.raises(ZeroDivisionError) as caught, sky.MultiPool(pool) if is_multi else pool:
        pool_id, (node,) = pool.lease.pool_id, pool.lease.nodes
        raise ZeroDivisionError
    assert [node.instance.id in note for note in caught.value.__notes__] == [True]
    assert not pool.is_active
    wait_until(lambda: is_ended(pool_id), "the reaper to end it")


def is_ended(pool_id: str) -> bool:
    """Return whether the ledger has recorded the pool's end."""
    with Ledger(default_url()) as ledger:
        entry = ledger.pool(pool_id)
        return entry is not None and entry.ended_at is not None


def test_machines_are_terminated_even_if_they_cannot_be_listed(make: Make) -> None:
    """The listing fails. Machines with known ids are terminated.

    The error names them, because their end is not confirmed.
    """
    recorded, provider = RecordedEvents(), make(BlindProvider)
    with pytest.raises((sky.InstancesLeft, ConnectionError)):
        open_pool(provider, recorded)
    assert sorted(set(provider.machines.terminated)) == ["fake-0", "fake-1"]
    assert provider.machines.running == {}
    assert len(recorded.of(sky.CostFinal)) == 1


@pytest.mark.parametrize(
    ("spot", "is_sold", "taken"),
    [
        (None, True, True),
        (None, False, False),
        ("always", True, True),
        ("if-available", False, False),
        ("if-available", True, True),
        ("never", True, False),
    ],
)
def test_spot_is_used_as_requested(make: Make, spot: str | None, is_sold: bool, taken: bool) -> None:
    """If the user does not set spot, it is used where it is sold. The final cost has the savings against on demand."""
    recorded = RecordedEvents()
    options = {} if spot is None else {"spot": spot}
    with pytest.raises(sky.ProvisioningTimeout):
        open_pool(make(NeverReadyProvider, spot_is_sold=is_sold), recorded, nodes=1, **options)
    (machine,) = recorded.of(sky.InstanceProvisioned)
    assert machine.spot is taken
    (bill,) = recorded.of(sky.CostFinal)
    assert (bill.spot_count, bill.ondemand_count) == ((1, 0) if taken else (0, 1))
    # each machine is rounded up to a micro-dollar
    assert bill.savings_vs_ondemand == pytest.approx(2 * bill.total_cost if taken else 0.0, abs=1e-5)


def test_spot_that_is_not_sold_is_refused_before_anything_is_launched(make: Make) -> None:
    """A pool requires spot, and it is not sold: BadRequest is raised."""
    provider = make(FakeProvider)
    with pytest.raises(sky.BadRequest, match="if-available"):
        open_pool(provider, RecordedEvents(), spot="always")
    assert provider.machines.launched == []


def test_a_mixed_pool_rents_both_kinds(make: Make) -> None:
    """Half of the machines are spot: there is one machine of each kind. The head is on demand."""
    recorded = RecordedEvents()
    with pytest.raises((sky.ProvisioningTimeout, sky.NotYetSupported)) as caught:
        open_pool(make(NeverReadyProvider, spot_is_sold=True), recorded, spot=0.5)
    if isinstance(caught.value, sky.NotYetSupported):
        assert recorded.of(sky.InstanceLaunching) == []
        return
    assert [(event.node, event.spot) for event in recorded.of(sky.InstanceProvisioned)] == [(0, False), (1, True)]


def test_a_mixed_pool_with_a_limit_rents_both_kinds(make: Make) -> None:
    """The commitment covers both parts, so the second part is not refused."""
    recorded = RecordedEvents()
    with pytest.raises(sky.ProvisioningTimeout):
        open_pool(make(NeverReadyProvider, spot_is_sold=True), recorded, spot=0.5, max_cost=5.0)
    assert [(event.node, event.spot) for event in recorded.of(sky.InstanceProvisioned)] == [(0, False), (1, True)]
    refused = RecordedEvents()
    with pytest.raises(
        sky.BudgetExceeded, match=r"1 x 36.0 USD per hour and 1 x 12.0 .* 60 s that their termination may take"
    ):
        open_pool(make(NeverReadyProvider, spot_is_sold=True), refused, spot=0.5, max_cost=1.5)
    assert refused.of(sky.InstanceLaunching) == []


class UnheardOf(FakeProvider):
    """A provider with a first termination that fails, and machines that are still listed for some time."""

    _listings: int = PrivateAttr(default=3)

    def terminate(self, ids: Sequence[str]) -> None:
        self.machines.terminated.extend(ids)
        if len(self.machines.terminated) == 1:
            raise ConnectionError("503")

    def instances(self, pool_id: str | None = None) -> list[Instance]:
        self._listings -= 1
        if not self._listings:
            super().terminate(self.machines.terminated[:1])
        return super().instances(pool_id)


def test_a_lost_machine_is_terminated_while_the_pool_is_open(
    make: Make, opened: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The termination is repeated until the machine is gone, and its metering ends. The other machine is not changed."""
    monkeypatch.setattr(termination, "FIRST_PAUSE_SECONDS", 0.01)
    provider = make(UnheardOf)
    machines, _, meter = opened(provider)
    lost, _ = node_of(machines, 0), node_of(machines, 1)
    machines._rental.end_in_thread(lost)
    wait_until(lambda: meter.rented() == {"fake-1"}, "it to be gone")
    assert set(provider.machines.terminated) == {"fake-0"}
    assert list(provider.machines.running) == ["fake-1"]


def test_a_replacement_waits_for_the_commitment_of_the_lost_machine(
    make: Make, opened: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The whole limit was committed to the lost machine, which is unreachable.

    When it is gone the replacement gets that money.

    Looks inside: a replacement does more than rent.
    """
    monkeypatch.setattr(termination, "FIRST_PAUSE_SECONDS", 0.01)
    provider = make(UnheardOf)
    machines, limit, meter = opened(provider, max_cost=5.0)
    lost = node_of(machines, 0)
    paid = limit.paid_seconds()
    assert machines._selection.rent_one(0, machines._rental.end_in_thread(lost)).id == "fake-1"
    assert meter.rented() == {"fake-1"}
    assert limit.paid_seconds() > paid - 60


class Way:
    """A transport to a node over the network."""

    def __init__(self, name: str, *, is_connected: bool = True, error: Exception | None = None) -> None:
        self.instance = Instance(
            id=name,
            provider="fake",
            pool_id="sky-1",
            rank=0,
            state=sky.InstanceState.RUNNING,
            region="r",
            instance_type="t",
        )
        self.is_connected = is_connected
        self.error = error
        self.leases: list[float] = []

    def extend_lease(self, seconds: float) -> None:
        self.leases.append(seconds)
        if self.error is not None:
            raise self.error

    def close(self) -> None:
        """Do nothing."""


def test_only_nodes_that_answer_have_received_their_paid_time() -> None:
    """The lease renewal sends it. A node without a connection is skipped.

    Looks inside: transports are set, without machines.
    """
    transports = Transports(60.0, lambda _: None)
    assert transports.send_paid_time() == set()
    ways = [
        Way("a"),
        Way("b", is_connected=False),
        Way("c", error=ConnectionLost("cut")),
        Way("d", error=CommandFailed("full", 1, "")),
        Way("e"),
    ]
    transports._transports = {way.instance.id: cast("Transport", way) for way in ways}
    assert transports.send_paid_time() == {"a", "e"}
    assert [way.leases for way in ways] == [[60.0], [], [60.0], [60.0], [60.0]]
    transports.close()
