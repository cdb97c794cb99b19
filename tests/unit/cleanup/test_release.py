"""Ending one pool from another process: with a ledger that fails, with listings that come late, and on request."""

from collections.abc import Sequence
from dataclasses import replace
from datetime import datetime, timedelta
from decimal import Decimal
from pathlib import Path
from typing import Any, ClassVar

import pytest
from pydantic import PrivateAttr

import skyward_core.providers.hosts  # noqa: F401 - it imports asyncssh, which starts a process: not inside a unit test
from skyward_core import Instance, InstancesLeft, Lease, Requirements
from skyward_core.cleanup.policy import BOOT_SECONDS, paid_until
from skyward_core.cleanup.release import CONDEMN_TRIES, end_pool, release
from skyward_core.errors import BadRequest, CredentialsError, LeaseLost, LedgerError
from skyward_core.ledger.ledger import Ledger
from skyward_core.ledger.rows import Account, Bucket, CostBy, Period, ResourceKind
from skyward_core.machines.signing import signed
from skyward_core.providers.base import EXPIRES_TAG, POOL_TAG, load
from tests.cleanup.pools import (
    CLOUD,
    ELSEWHERE,
    HERE,
    START,
    CloudProvider,
    FailingLedger,
    LaggingProvider,
    SelfEndingProvider,
    Time,
    World,
    entry,
    intent,
    life,
    of_kind,
)
from tests.fakes import FakeProvider, SlowToGoProvider, StuckProvider


def test_ending_a_pool_ends_its_machines_and_closes_their_entries(world: World) -> None:
    pool = world.pool()
    first = world.rent(pool, 2)
    ready = world.ledger.open_intents()[0]
    world.hands.go(60)
    world.ledger.note_all({ready.id: {Bucket.LAUNCHING: 10, Bucket.IDLE: 30}})
    world.intend(pool, 1, first=2)
    (lost,) = world.launch(pool, 1, first=2)
    world.hands.go(60)
    world.end(pool)
    assert world.ids() == set()
    assert world.ledger.open_intents() == []
    closed = {its.cloud_id: its for its in world.ledger.intents()}
    assert set(closed) == {*(instance.id for instance in first), lost.id}
    for its in closed.values():
        assert its.evidence == "cloud lists it no more; it was ended because its owner is dead"
        assert its.end_asked_at is not None
        assert sum(its.seconds.values()) == pytest.approx(life(its, world.hands.now), abs=0.002)
    assert closed[first[0].id].seconds[Bucket.IDLE] == pytest.approx(110, abs=0.1)
    assert closed[first[1].id].seconds[Bucket.LAUNCHING] == pytest.approx(120, abs=0.1)
    assert closed[lost.id].seconds[Bucket.LAUNCHING] == pytest.approx(60, abs=0.1)
    assert [found.ended_at is not None for found in world.ledger.pools(include_ended=True)] == [True]


def test_a_machine_lost_before_its_owner_died_stays_lost(world: World) -> None:
    pool = world.pool()
    world.rent(pool)
    world.hands.go(10)
    world.ledger.note_all({world.ledger.open_intents()[0].id: {Bucket.IDLE: 5, Bucket.LOST: 5}})
    world.hands.go(10)
    world.end(pool)
    (its,) = world.ledger.intents()
    assert its.seconds[Bucket.IDLE] == 5
    assert its.seconds[Bucket.LOST] == pytest.approx(15, abs=0.1)


def test_seconds_of_termination_are_in_their_bucket(ledger: Ledger, tmp_path: Path, hands: Time) -> None:
    world = of_kind(SlowToGoProvider, ledger, tmp_path, hands, asks=7)
    pool = world.pool()
    world.rent(pool)
    hands.go(10)
    world.end(pool)
    (its,) = ledger.intents()
    assert its.seconds[Bucket.LAUNCHING] == pytest.approx(10, abs=0.01)
    assert its.seconds[Bucket.TERMINATING] == pytest.approx(hands.paused, abs=0.01)
    assert hands.paused > 3


UP = {Bucket.LAUNCHING: 30.0, Bucket.IDLE: 30.0}


@pytest.mark.parametrize(
    ("known", "lease_seconds", "seconds"),
    [
        pytest.param({"seconds": UP}, 120, 240, id="its lease, and two minutes to go"),
        pytest.param(
            {"seconds": {Bucket.LAUNCHING: 30.0}},
            120,
            240 + BOOT_SECONDS,
            id="it was never seen up, and counts its lease from then",
        ),
        pytest.param(
            {"seconds": UP, "end_asked_at": START + timedelta(seconds=300)},
            120,
            420,
            id="asked for later than its lease",
        ),
        pytest.param(
            {"seconds": UP, "tags": {EXPIRES_TAG: "0"}, "expires_at": START + timedelta(seconds=60)},
            3600,
            210,
            id="its hard end, counted from when it was up",
        ),
        pytest.param(
            {"seconds": {Bucket.IDLE: 30.0}, "tags": {EXPIRES_TAG: "0"}, "expires_at": START + timedelta(seconds=60)},
            3600,
            180,
            id="its hard end, and its time of launching was not recorded",
        ),
        pytest.param(
            {"seconds": UP, "tags": {}, "expires_at": START + timedelta(seconds=60)},
            3600,
            3720,
            id="an end that is no hard one",
        ),
        pytest.param({"seconds": {**UP, Bucket.RUNNING_CALLS: 9000}}, 120, 9060, id="what was noted is known"),
        pytest.param(
            {"seconds": UP, "bound_at": START + timedelta(seconds=500)}, 120, 500, id="when it answered it was there"
        ),
        pytest.param({"seconds": UP}, 10**6, 10**5, id="never later than now"),
    ],
)
def test_a_machine_found_gone_is_billed_until_its_latest_possible_end(
    known: dict[str, Any], lease_seconds: float, seconds: float
) -> None:
    its, now = intent(1, cloud_id="a", age_seconds=0, **known), START + timedelta(seconds=10**5)
    pool = entry(lease_seconds=lease_seconds)
    assert paid_until(SelfEndingProvider(folder="/nowhere"), pool, its, now) == START + timedelta(seconds=seconds)
    assert paid_until(CLOUD, pool, its, now) == now


@pytest.mark.parametrize(
    "is_alone", [True, False], ids=["nothing of the pool is left", "another machine of the pool runs"]
)
def test_a_late_sweep_bills_no_machine_after_its_end(
    ledger: Ledger, tmp_path: Path, hands: Time, is_alone: bool
) -> None:
    world = of_kind(SelfEndingProvider, ledger, tmp_path, hands)
    ledger.set_account(Account("team-a", Decimal(10_000), Period.MONTH))
    gone, *others = world.rent(world.pool(account="team-a"), 1 if is_alone else 2)
    ledger.reserve("team-a", "sky-1", Decimal(10))
    ledger.note_all({its.id: UP for its in ledger.open_intents()})
    world.provider.terminate([gone.id])
    hands.go(62 * 3600)
    assert world.sweep().failures == ()
    assert ledger.open_intents() == []
    first, *rest = ledger.intents()
    assert sum(first.seconds.values()) == pytest.approx(240, abs=0.01)
    assert "estimated" in str(first.evidence)
    assert first.gone_at == hands.now
    for its in rest:
        assert sum(its.seconds.values()) == pytest.approx(62 * 3600, abs=1)
        assert "estimated" not in str(its.evidence)
    assert ledger.left_usd("team-a", "another") == pytest.approx(
        10_000 - Decimal("2.4") - 36 * 62 * len(others), abs=Decimal("0.02")
    )


def test_a_late_sweep_does_not_extend_the_time_of_termination(ledger: Ledger, tmp_path: Path, hands: Time) -> None:
    world = of_kind(SelfEndingProvider, ledger, tmp_path, hands)
    (gone,) = world.rent(world.pool())
    (its,) = ledger.open_intents()
    ledger.note_all({its.id: UP})
    hands.go(60)
    ledger.ask_end_all([its.id])
    world.provider.terminate([gone.id])
    hands.go(62 * 3600)
    world.sweep()
    (its,) = ledger.intents()
    assert {bucket: seconds for bucket, seconds in its.seconds.items() if seconds} == {
        **UP,
        Bucket.TERMINATING: pytest.approx(180, abs=0.01),
    }


def test_machines_that_cost_money_when_off_are_billed_until_the_sweep(world: World) -> None:
    (gone,) = world.rent(world.pool())
    world.provider.terminate([gone.id])
    world.hands.go(3600)
    world.sweep()
    (its,) = world.ledger.intents()
    assert sum(its.seconds.values()) == pytest.approx(3600, abs=0.01)
    assert "estimated" not in str(its.evidence)


@pytest.mark.parametrize(
    ("kind", "is_sure"),
    [
        ({"name": "aws"}, True),
        ({"name": "runpod"}, True),
        ({"name": "vastai"}, True),
        ({"name": "local"}, True),
        ({"name": "digitalocean"}, False),
        ({"name": "digitalocean", "node_token": "t"}, True),
        ({"name": "verda"}, False),
        ({"name": "verda", "node_client_id": "i", "node_client_secret": "s"}, True),
        ({"name": "hosts", "addresses": ["ada@somewhere"]}, False),
    ],
    ids=str,
)
def test_providers_know_if_a_machine_that_ends_itself_costs_nothing_more(kind: dict[str, Any], is_sure: bool) -> None:
    assert load(kind).ends_for_good() is is_sure


def test_an_entry_without_a_machine_costs_nothing(world: World) -> None:
    pool = world.pool()
    world.intend(pool, 3)
    world.ledger.condemn(pool, seen=world.hands.now + timedelta(seconds=120))
    began = world.hands.now
    world.end(pool)
    assert (world.hands.now - began).total_seconds() >= 10
    assert [its.evidence for its in world.ledger.intents()] == [
        "cloud lists nothing of the pool; it was ended because its owner is dead"
    ] * 3
    assert world.ledger.cost_rows(CostBy.POOL)[0].cost_usd == 0


def test_a_machine_that_is_listed_late_is_ended(ledger: Ledger, tmp_path: Path, hands: Time) -> None:
    LaggingProvider.clock = hands
    world = of_kind(LaggingProvider, ledger, tmp_path, hands)
    pool = world.pool()
    world.intend(pool)
    (instance,) = world.launch(pool)
    world.end(pool)
    assert world.provider.machines.terminated[0] == instance.id
    assert world.provider.machines.running == {}
    assert ledger.intents()[0].cloud_id == instance.id
    assert hands.paused >= 60


def test_a_listed_machine_of_an_unanswered_launch_needs_no_wait(world: World) -> None:
    pool = world.pool()
    world.intend(pool, 2)
    world.launch(pool, 2)
    world.end(pool)
    assert world.ids() == set()
    assert world.hands.paused == 0


def test_machines_that_are_processes_are_not_waited_for(ledger: Ledger, tmp_path: Path, hands: Time) -> None:
    world = of_kind(FakeProvider, ledger, tmp_path, hands)
    pool = world.pool()
    world.intend(pool)
    world.end(pool)
    assert hands.paused == 0
    assert ledger.pools() == []


def test_a_machine_without_an_entry_gets_one(world: World) -> None:
    pool = world.pool()
    world.intend(pool)
    both = {world.launch(pool)[0].id, world.launch(pool)[0].id}
    world.ledger.condemn(pool, seen=world.hands.now + timedelta(seconds=120))
    world.end(pool)
    assert {its.cloud_id for its in world.ledger.intents()} == both
    assert world.ledger.open_intents() == []
    assert world.ids() == set()


def test_an_entry_that_was_closed_too_early_is_opened_and_closed_again(world: World) -> None:
    pool = world.pool()
    (its,) = world.intend(pool)
    world.ledger.close_all([its.id], "nothing was listed")
    (instance,) = world.launch(pool)
    world.end(pool)
    (its,) = world.ledger.intents()
    assert (its.cloud_id, its.evidence) == (
        instance.id,
        "cloud lists it no more; it was ended because its owner is dead",
    )
    assert world.ids() == set()


def test_ending_twice_changes_nothing(world: World) -> None:
    pool = world.pool()
    world.rent(pool, 2)
    world.end(pool)
    before = world.ledger.intents(), world.ledger.pools(include_ended=True)
    world.hands.go(5)
    world.end(pool, "it is said again")
    assert (world.ledger.intents(), world.ledger.pools(include_ended=True)) == before


def test_the_entry_of_a_machine_that_does_not_end_stays_open(ledger: Ledger, tmp_path: Path, hands: Time) -> None:
    world = of_kind(StuckProvider, ledger, tmp_path, hands)
    pool = world.pool()
    (instance,) = world.rent(pool)
    with pytest.raises(InstancesLeft) as caught:
        world.end(pool)
    assert caught.value.ids == (instance.id,)
    (its,) = ledger.open_intents()
    assert its.end_asked_at is not None
    assert [found.id for found in ledger.pools()] == [pool]


class ForgetfulProvider(StuckProvider):
    """Ends no machine, and omits `fake-0` from its listings while `forgets` is set."""

    name: ClassVar[str] = "forgetful"
    _listings: list[bool] = PrivateAttr(default_factory=list[bool])

    def forget_in(self, listings: Sequence[bool]) -> None:
        """Set for each of the next listings whether it omits `fake-0`."""
        self._listings[:] = listings

    def instances(self, pool_id: str | None = None) -> list[Instance]:
        forgets = bool(self._listings) and self._listings.pop(0)
        return [one for one in super().instances(pool_id) if not (forgets and one.id == "fake-0")]


def test_a_machine_that_is_listed_again_is_not_recorded_as_gone(ledger: Ledger, tmp_path: Path, hands: Time) -> None:
    world = of_kind(ForgetfulProvider, ledger, tmp_path, hands)
    pool = world.pool()
    forgotten, other = (instance.id for instance in world.rent(pool, 2))
    assert isinstance(world.provider, ForgetfulProvider)
    world.provider.forget_in([False, True])
    with pytest.raises(InstancesLeft) as caught:
        world.end(pool)
    assert set(caught.value.ids) == {forgotten, other}
    assert {its.cloud_id for its in ledger.open_intents()} == {forgotten, other}


def test_unspent_money_returns_to_the_budget(world: World) -> None:
    world.ledger.set_account(Account("team", Decimal(100), Period.RUN))
    pool = world.pool(account="team")
    world.ledger.reserve("team", pool, Decimal(60))
    world.rent(pool, 2)
    world.hands.go(100)
    world.end(pool)
    assert world.ledger.left_usd("team", pool) == Decimal(100) - 2 * Decimal(36) * 100 / 3600


def test_a_resource_that_is_no_machine_keeps_the_pool_open(world: World) -> None:
    pool = world.pool()
    world.ledger.intend(pool, replace(world.resource_request(pool, 0), kind=ResourceKind.OTHER, token="key"))
    world.rent(pool)
    world.end(pool)
    assert [its.kind for its in world.ledger.open_intents()] == [ResourceKind.OTHER]
    assert [found.id for found in world.ledger.pools()] == [pool]


VERBS = ["pool", "intents", "bind", "ask_end_all", "close_all", "open_intents", "end_pools"]


@pytest.mark.parametrize("verb", VERBS)
def test_machines_are_ended_although_the_ledger_fails(world: World, verb: str) -> None:
    pool = world.pool()
    world.rent(pool)
    world.intend(pool, 1, first=1)
    world.launch(pool, 1, first=1)
    failing: Any = FailingLedger(world.ledger, [verb])
    with pytest.raises(LedgerError, match="the disk is full"):
        end_pool(failing, world.provider, pool, why="its owner is dead", **world.hands.keywords)
    assert world.ids() == set()
    world.hands.go(300)
    report = world.sweep()
    assert report.failures == ()
    assert world.ledger.open_intents() == []
    assert world.ledger.pools() == []


@pytest.mark.parametrize("verb", VERBS)
def test_a_ledger_that_fails_once_is_brought_up_to_date(world: World, verb: str) -> None:
    pool = world.pool()
    instances = world.rent(pool)
    world.intend(pool, 1, first=1)
    instances += world.launch(pool, 1, first=1)
    failing: Any = FailingLedger(world.ledger, [verb], times=1)
    try:
        end_pool(failing, world.provider, pool, why="its owner is dead", **world.hands.keywords)
    except LedgerError:
        # these are called when the machines are gone: the caller tries again
        assert verb in ("close_all", "open_intents", "end_pools")
        world.end(pool)
    assert {its.cloud_id for its in world.ledger.intents()} == {instance.id for instance in instances}
    assert world.ledger.pools() == []


def test_machines_are_ended_without_any_ledger(world: World) -> None:
    world.launch("sky-1", 2)
    end_pool(None, world.provider, "sky-1", why="its owner is dead", **world.hands.keywords)
    assert world.ids() == set()
    assert world.hands.paused >= 10


def test_a_live_pool_can_be_stopped_by_request(world: World) -> None:
    pool = world.pool(owner=HERE)
    world.rent(pool, 2, owner=HERE)
    release(pool, ledger=world.ledger, credentials=world.provider, why="Ada stopped it", **world.hands.keywords)
    assert world.ids() == set()
    assert world.ledger.pools() == []
    assert {its.evidence for its in world.ledger.intents()} == {
        "cloud lists it no more; it was ended because Ada stopped it"
    }
    with pytest.raises(LeaseLost):
        world.ledger.renew(pool, world.hands.now + timedelta(hours=1))
    with pytest.raises(LeaseLost):
        world.intend(pool, 1, first=2)


class BusyLedger(FailingLedger):
    """A ledger whose pool is renewed by its owner just before each of the first condemnations."""

    def __init__(self, ledger: Ledger, renewals: int) -> None:
        super().__init__(ledger, [])
        self.renewals = renewals

    def condemn(self, pool_id: str, *, seen: datetime) -> bool:
        if self.renewals:
            self.renewals -= 1
            self._ledger.renew(pool_id, seen + timedelta(seconds=1))
        return self._ledger.condemn(pool_id, seen=seen)


def test_a_pool_that_is_renewed_meanwhile_is_condemned_with_its_new_lease(world: World) -> None:
    pool = world.pool(owner=HERE)
    world.rent(pool, owner=HERE)
    busy: Any = BusyLedger(world.ledger, renewals=2)
    release(pool, ledger=busy, credentials=world.provider, **world.hands.keywords)
    assert world.ids() == set()
    assert world.ledger.pools() == []


def test_a_pool_that_is_renewed_all_the_time_is_not_stopped(world: World) -> None:
    """Its owner would go on launching. Nothing was condemned, and no machine has received a request."""
    pool = world.pool(owner=HERE)
    world.rent(pool, owner=HERE)
    busy: Any = BusyLedger(world.ledger, renewals=CONDEMN_TRIES)
    with pytest.raises(LedgerError, match=f"could not be condemned in {CONDEMN_TRIES} tries"):
        release(pool, ledger=busy, credentials=world.provider, **world.hands.keywords)
    assert busy.renewals == 0
    assert world.provider.machines.terminated == []
    assert world.ledger.pools()[0].condemned_at is None


def test_a_lease_is_enough_to_stop_a_pool(tmp_path: Path, hands: Time) -> None:
    provider = CloudProvider(folder=str(tmp_path))
    offer = provider.offers(Requirements())[0]
    provider.launch(offer, 2, {POOL_TAG: "sky-1"}, "")
    provider.launch(offer, 1, {POOL_TAG: "sky-other"}, "")
    lease = Lease(pool_id="sky-1", provider=provider.to_json(), created_at=START)
    for _ in range(2):
        release(lease, ledger=None, credentials=provider, **hands.keywords)
    assert {instance.pool_id for instance in provider.instances()} == {"sky-other"}


def test_an_unsigned_lease_reaches_no_provider(tmp_path: Path, hands: Time, monkeypatch: pytest.MonkeyPatch) -> None:
    """It may name any address, to which this process's credentials would go. A signed one is enough."""
    monkeypatch.setenv("SKYWARD_LEASE_KEY", "k" * 32)
    provider = CloudProvider(folder=str(tmp_path))
    monkeypatch.setattr("skyward_core.cleanup.release.load", lambda _: provider)
    provider.launch(provider.offers(Requirements())[0], 2, {POOL_TAG: "sky-1"}, "")
    lease = Lease(pool_id="sky-1", provider=provider.to_json(), created_at=START)
    with pytest.raises(CredentialsError, match="is not signed"):
        release(lease, ledger=None, **hands.keywords)
    assert len(provider.instances()) == 2
    release(signed(lease), ledger=None, **hands.keywords)
    assert provider.instances() == []


def test_an_unknown_pool_cannot_be_stopped(ledger: Ledger, tmp_path: Path, hands: Time) -> None:
    with pytest.raises(BadRequest, match="skyward ps --all"):
        release("sky-nowhere", ledger=ledger)
    world = of_kind(FakeProvider, ledger, tmp_path, hands)
    pool = world.pool(owner=ELSEWHERE)
    with pytest.raises(BadRequest, match=r"elsewhere.*stop it there"):
        release(pool, ledger=ledger, credentials=world.provider)
    assert [found.id for found in ledger.pools()] == [pool]
