"""Ending one pool from another process: with a ledger that fails, with listings that come late, and on request."""

from dataclasses import replace
from datetime import datetime, timedelta
from decimal import Decimal
from pathlib import Path
from typing import Any, ClassVar

import pytest
from pydantic import PrivateAttr

from skyward_core import Instance, InstancesLeft, Lease, Requirements
from skyward_core.cleanup.policy import BOOT_SECONDS, paid_until
from skyward_core.cleanup.release import CONDEMN_TRIES, end_pool, release
from skyward_core.errors import BadRequest, CredentialsError, LeaseLost, LedgerError, ProviderFailed
from skyward_core.ledger.ledger import Ledger
from skyward_core.ledger.rows import Account, Bucket, CostBy, Period, ResourceKind
from skyward_core.machines.signing import signed
from skyward_core.providers.base import EXPIRES_TAG, LAUNCH_TAG, POOL_TAG, RANK_TAG, load
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

BECAUSE = "it was ended because its owner is dead"


def test_ending_a_pool_ends_its_machines_and_closes_their_entries(world: World) -> None:
    """Machines of the ledger, in the phase of their last record, and those known only by tags. Every second is in a
    bucket, unspent money returns to the budget, and a second end changes nothing.
    """
    world.ledger.set_account(Account("team", Decimal(100), Period.RUN))
    pool = world.pool(account="team")
    world.ledger.reserve("team", pool, Decimal(60))
    first = world.rent(pool, 3)
    ready, fresh, away = (its.id for its in world.ledger.open_intents())
    world.hands.go(60)
    world.ledger.note_all({ready: {Bucket.LAUNCHING: 10, Bucket.IDLE: 30}, away: {Bucket.IDLE: 5, Bucket.LOST: 5}})
    world.intend(pool, 1, first=3)
    (lost,) = world.launch(pool, 1, first=3)
    world.hands.go(60)
    world.end(pool)
    assert world.ids() == set()
    assert world.ledger.open_intents() == []
    closed = {its.id: its for its in world.ledger.intents()}
    assert {its.cloud_id for its in closed.values()} == {*(instance.id for instance in first), lost.id}
    for its in closed.values():
        assert its.evidence == f"cloud lists it no more; {BECAUSE}"
        assert its.end_asked_at is not None
        assert sum(its.seconds.values()) == pytest.approx(life(its, world.hands.now), abs=0.002)
    assert closed[ready].seconds[Bucket.IDLE] == pytest.approx(110, abs=0.1)
    assert closed[fresh].seconds[Bucket.LAUNCHING] == pytest.approx(120, abs=0.1)
    assert closed[away].seconds[Bucket.LOST] == pytest.approx(115, abs=0.1)
    assert closed[max(closed)].seconds[Bucket.LAUNCHING] == pytest.approx(60, abs=0.1)
    assert [found.ended_at is not None for found in world.ledger.pools(include_ended=True)] == [True]
    assert world.ledger.left_usd("team", pool) == Decimal(100) - 36 * Decimal(120 * 3 + 60) / 3600
    before = world.ledger.intents(), world.ledger.pools(include_ended=True)
    world.hands.go(5)
    world.end(pool, "it is said again")
    assert (world.ledger.intents(), world.ledger.pools(include_ended=True)) == before


def test_seconds_of_termination_are_in_their_bucket(ledger: Ledger, tmp_path: Path, hands: Time) -> None:
    """A machine that ends only after the seventh request was terminating from the first."""
    world = of_kind(SlowToGoProvider, ledger, tmp_path, hands, asks=7)
    world.rent(world.pool())
    hands.go(10)
    world.end()
    (its,) = ledger.intents()
    assert its.seconds[Bucket.LAUNCHING] == pytest.approx(10, abs=0.01)
    assert its.seconds[Bucket.TERMINATING] == pytest.approx(hands.paused, abs=0.01)
    assert hands.paused > 3


UP = {Bucket.LAUNCHING: 30.0, Bucket.IDLE: 30.0}
HARD_END: dict[str, Any] = {"tags": {EXPIRES_TAG: "0"}, "expires_at": START + timedelta(seconds=60)}


@pytest.mark.parametrize(
    ("known", "lease_seconds", "seconds"),
    [
        ({"seconds": UP}, 120, 180),
        ({"seconds": {Bucket.LAUNCHING: 30.0}}, 120, 180 + BOOT_SECONDS),
        ({"seconds": UP, "end_asked_at": START + timedelta(seconds=300)}, 120, 360),
        ({"seconds": UP, **HARD_END}, 3600, 150),
        ({"seconds": {Bucket.IDLE: 30.0}, **HARD_END}, 3600, 120),
        ({"seconds": UP, **HARD_END, "tags": {}}, 3600, 3660),
        ({"seconds": {**UP, Bucket.RUNNING_CALLS: 9000}}, 120, 9060),
        ({"seconds": UP, "bound_at": START + timedelta(seconds=500)}, 120, 500),
        ({"seconds": UP}, 10**6, 10**5),
    ],
    ids=[
        "its lease, and a minute to go",
        "it was never seen up, and counts its lease from then",
        "asked for later than its lease",
        "its hard end, counted from when it was up",
        "its hard end, and its time of launching was not recorded",
        "an end that is no hard one",
        "what was noted is known",
        "when it answered it was there",
        "never later than now",
    ],
)
def test_a_machine_found_gone_is_billed_until_its_latest_possible_end(
    known: dict[str, Any], lease_seconds: float, seconds: float
) -> None:
    """Since the request. Where machines do not end themselves permanently, the bill ends now."""
    its, now = intent(1, cloud_id="a", age_seconds=0, **known), START + timedelta(seconds=10**5)
    pool = entry(lease_seconds=lease_seconds)
    assert paid_until(SelfEndingProvider(folder="/nowhere"), pool, its, now) == START + timedelta(seconds=seconds)
    assert paid_until(CLOUD, pool, its, now) == now


@pytest.mark.parametrize(
    ("kind", "others", "is_asked", "expected"),
    [
        (SelfEndingProvider, 0, False, {**UP, Bucket.IDLE: 150}),
        (SelfEndingProvider, 1, False, {**UP, Bucket.IDLE: 150}),
        (SelfEndingProvider, 0, True, {**UP, Bucket.TERMINATING: 120}),
        (CloudProvider, 0, False, {**UP, Bucket.IDLE: 62 * 3600 - 30}),
    ],
    ids=["nothing of the pool is left", "another machine runs", "its end was asked for", "it costs money when off"],
)
def test_a_late_sweep_bills_no_machine_after_its_end(
    ledger: Ledger,
    tmp_path: Path,
    hands: Time,
    kind: type[CloudProvider],
    others: int,
    is_asked: bool,
    expected: dict[Bucket, float],
) -> None:
    """Its guard ended it when the lease expired, 62 hours ago. A machine that still runs is billed until the sweep ends
    it, and one that may have existed until a moment ago.
    """
    world = of_kind(kind, ledger, tmp_path, hands)
    ledger.set_account(Account("team-a", Decimal(10_000), Period.MONTH))
    gone, *_ = world.rent(world.pool(account="team-a"), 1 + others)
    ledger.reserve("team-a", "sky-1", Decimal(10))
    ledger.note_all({its.id: UP for its in ledger.open_intents()})
    if is_asked:
        hands.go(60)
        ledger.ask_end_all([1])
    world.provider.terminate([gone.id])
    hands.go(62 * 3600)
    assert world.sweep().failures == ()
    assert ledger.open_intents() == []
    first, *rest = ledger.intents()
    assert {bucket: spent for bucket, spent in first.seconds.items() if spent} == pytest.approx(expected, abs=0.01)
    assert ("estimated" in str(first.evidence)) is (kind is SelfEndingProvider)
    assert first.gone_at == hands.now
    for its in rest:
        assert sum(its.seconds.values()) == pytest.approx(62 * 3600, abs=1)
        assert "estimated" not in str(its.evidence)
    spent = Decimal(sum(expected.values()) + others * 62 * 3600) / 100
    assert ledger.left_usd("team-a", "another") == pytest.approx(10_000 - spent, abs=Decimal("0.02"))


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
        ({"name": "hosts", "addresses": ["ada@somewhere"]}, True),
    ],
    ids=str,
)
def test_providers_know_if_a_machine_that_ends_itself_costs_nothing_more(kind: dict[str, Any], is_sure: bool) -> None:
    """False if a machine that ends itself is only off, and still billed."""
    assert load(kind).ends_for_good() is is_sure


def test_an_entry_without_a_machine_costs_nothing(world: World) -> None:
    """It is closed once the provider has listed nothing for as long as the call may have been in progress."""
    pool = world.pool()
    world.intend(pool, 3)
    world.ledger.condemn(pool, seen=world.hands.now + timedelta(seconds=120))
    world.end(pool)
    assert world.hands.paused >= 10
    assert [its.evidence for its in world.ledger.intents()] == [f"cloud lists nothing of the pool; {BECAUSE}"] * 3
    assert world.ledger.cost_rows(CostBy.POOL)[0].cost_usd == 0


def test_a_machine_that_is_listed_late_is_ended(ledger: Ledger, tmp_path: Path, hands: Time) -> None:
    """The owner was killed during the launch. Its machine is listed 60 s later, and the teardown waits for it."""
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


def test_an_outage_of_the_first_listing_is_no_absence(world: World, monkeypatch: pytest.MonkeyPatch) -> None:
    """The machines of a launch without an answer are listed again, and ended."""
    listed, outages = CloudProvider.instances, [ProviderFailed("it does not answer")]

    def instances(provider: CloudProvider, pool_id: str | None = None) -> list[Instance]:
        if outages:
            raise outages.pop()
        return listed(provider, pool_id)

    pool = world.pool()
    world.intend(pool)
    world.launch(pool)
    monkeypatch.setattr(CloudProvider, "instances", instances)
    world.end(pool)
    assert (outages, world.ids(), world.ledger.pools()) == ([], set(), [])


def test_what_is_not_waited_for(ledger: Ledger, tmp_path: Path, hands: Time) -> None:
    """A launch whose machines are listed can create no other; a launch of processes was killed with its process."""
    for number, kind in enumerate((CloudProvider, FakeProvider)):
        world = of_kind(kind, ledger, tmp_path / str(number), hands)
        pool = world.pool(f"sky-{number}")
        world.intend(pool, 2)
        if kind is CloudProvider:
            world.launch(pool, 2)
        world.end(pool)
        assert world.ids() == set()
    assert (hands.paused, ledger.pools()) == (0, [])


def test_a_machine_without_an_entry_gets_one(world: World) -> None:
    """A retried call created two machines: the second is recorded too, ended, and billed."""
    pool = world.pool()
    world.intend(pool)
    both = {world.launch(pool)[0].id, world.launch(pool)[0].id}
    world.ledger.condemn(pool, seen=world.hands.now + timedelta(seconds=120))
    world.end(pool)
    assert {its.cloud_id for its in world.ledger.intents()} == both
    assert world.ledger.open_intents() == []
    assert world.ids() == set()


@pytest.mark.parametrize("copied", [{}, {LAUNCH_TAG: "sky-1-launch9"}, {LAUNCH_TAG: "sky-1-launch0", RANK_TAG: "4"}])
@pytest.mark.parametrize("is_gone", [True, False])
def test_a_machine_that_no_entry_names_is_ended_and_not_billed(
    world: World, caplog: pytest.LogCaptureFixture, copied: dict[str, str], is_gone: bool
) -> None:
    """Whoever may write tags can copy those of a pool, and a ledger may have lost an entry: it is ended, and said."""
    pool = world.pool()
    (ours,) = world.rent(pool)
    if is_gone:
        world.provider.terminate([ours.id])
        world.ledger.close_all([1], "seen to be gone")
    dear = world.offer().model_copy(update={"price_per_hour": 1e7})
    (strange,) = world.provider.launch(dear, 1, {POOL_TAG: pool, RANK_TAG: "0", **copied}, "")
    world.hands.go(100)
    world.end(pool)
    assert world.ids() == set()
    assert [its.cloud_id for its in world.ledger.intents()] == [ours.id]
    assert world.ledger.cost_rows(CostBy.POOL)[0].cost_usd <= 2
    (warning,) = [record.getMessage() for record in caplog.records if "not billed" in record.getMessage()]
    assert strange.id in warning


def test_an_entry_that_was_closed_too_early_is_opened_and_closed_again(world: World) -> None:
    """It was closed as never created; then its machine is listed."""
    pool = world.pool()
    (its,) = world.intend(pool)
    world.ledger.close_all([its.id], "nothing was listed")
    (instance,) = world.launch(pool)
    world.end(pool)
    (its,) = world.ledger.intents()
    assert (its.cloud_id, its.evidence) == (instance.id, f"cloud lists it no more; {BECAUSE}")
    assert world.ids() == set()


class ForgetfulProvider(StuckProvider):
    """Ends no machine, and omits `fake-0` from the listings that `forgets` names."""

    name: ClassVar[str] = "forgetful"
    _forgets: list[bool] = PrivateAttr(default_factory=lambda: [False, True])

    def instances(self, pool_id: str | None = None) -> list[Instance]:
        forgets = bool(self._forgets) and self._forgets.pop(0)
        return [one for one in super().instances(pool_id) if not (forgets and one.id == "fake-0")]


@pytest.mark.parametrize("kind", [StuckProvider, ForgetfulProvider])
def test_the_entry_of_a_machine_that_does_not_end_stays_open(
    ledger: Ledger, tmp_path: Path, hands: Time, kind: type[StuckProvider]
) -> None:
    """InstancesLeft names it, also if one listing omits it. The request of the end is recorded for the next sweep."""
    world = of_kind(kind, ledger, tmp_path, hands)
    pool = world.pool()
    ids = {instance.id for instance in world.rent(pool, 2)}
    with pytest.raises(InstancesLeft) as caught:
        world.end(pool)
    assert set(caught.value.ids) == ids
    assert {its.cloud_id for its in ledger.open_intents()} == ids
    assert all(its.end_asked_at is not None for its in ledger.open_intents())
    assert [found.id for found in ledger.pools()] == [pool]


def test_a_resource_that_is_no_machine_keeps_the_pool_open(world: World) -> None:
    pool = world.pool()
    world.ledger.intend(pool, replace(world.resource_request(pool, 0), kind=ResourceKind.OTHER, token="key"))
    world.rent(pool)
    world.end(pool)
    assert [its.kind for its in world.ledger.open_intents()] == [ResourceKind.OTHER]
    assert [found.id for found in world.ledger.pools()] == [pool]


@pytest.mark.parametrize("times", [1, 10**6], ids=["once", "for long"])
@pytest.mark.parametrize("verb", ["pool", "intents", "bind", "ask_end_all", "close_all", "open_intents", "end_pools"])
def test_machines_are_ended_although_the_ledger_fails(world: World, verb: str, times: int) -> None:
    """They end first, and the error is raised then. A ledger that answers again is brought up to date: by this call
    itself, by the next one, or by a sweep.
    """
    pool = world.pool()
    instances = world.rent(pool)
    world.intend(pool, 1, first=1)
    instances += world.launch(pool, 1, first=1)
    failing: Any = FailingLedger(world.ledger, [verb], times=times)
    is_raised = times > 1 or verb in ("close_all", "open_intents", "end_pools")
    try:
        end_pool(failing, world.provider, pool, why="its owner is dead", **world.hands.keywords)
    except LedgerError as error:
        assert (is_raised, "the disk is full" in str(error)) == (True, True)
    else:
        assert not is_raised
    assert world.ids() == set()
    if is_raised and times == 1:
        world.end(pool)
    elif is_raised:
        world.hands.go(300)
        assert world.sweep().failures == ()
        assert world.ledger.open_intents() == []
    else:
        assert {its.cloud_id for its in world.ledger.intents()} == {instance.id for instance in instances}
    assert world.ledger.pools() == []


def test_machines_are_ended_without_any_ledger(world: World) -> None:
    """The tags suffice. Without a ledger the launches are unknown, so the provider is listed for a while."""
    world.launch("sky-1", 2)
    end_pool(None, world.provider, "sky-1", why="its owner is dead", **world.hands.keywords)
    assert world.ids() == set()
    assert world.hands.paused >= 10


def test_a_live_pool_can_be_stopped_by_request(world: World) -> None:
    """Its owner learns of it at the next renewal, and can rent nothing more."""
    pool = world.pool(owner=HERE)
    world.rent(pool, 2, owner=HERE)
    release(pool, ledger=world.ledger, credentials=world.provider, why="Ada stopped it", **world.hands.keywords)
    assert world.ids() == set()
    assert world.ledger.pools() == []
    evidence = {its.evidence for its in world.ledger.intents()}
    assert evidence == {"cloud lists it no more; it was ended because Ada stopped it"}
    with pytest.raises(LeaseLost):
        world.ledger.renew(pool, world.hands.now + timedelta(hours=1))
    with pytest.raises(LeaseLost):
        world.intend(pool, 1, first=2)


class BusyLedger(FailingLedger):
    """A ledger whose pool is renewed by its owner just before each of the first condemnations."""

    def __init__(self, ledger: Ledger, renewals: int) -> None:
        super().__init__(ledger, [])
        self.renewals = renewals

    def condemn(self, pool_id: str, *, seen: datetime, stopped_by: str = "") -> bool:
        if self.renewals:
            self.renewals -= 1
            self._ledger.renew(pool_id, seen + timedelta(seconds=1))
        return self._ledger.condemn(pool_id, seen=seen, stopped_by=stopped_by)


def test_a_pool_that_is_renewed_meanwhile_is_condemned_with_its_new_lease(world: World) -> None:
    """If it is renewed all the time its owner would go on launching: nothing is condemned, and no machine ended."""
    pool = world.pool(owner=HERE)
    world.rent(pool, owner=HERE)
    busy: Any = BusyLedger(world.ledger, renewals=CONDEMN_TRIES)
    with pytest.raises(LedgerError, match=f"could not be condemned in {CONDEMN_TRIES} tries"):
        release(pool, ledger=busy, credentials=world.provider, **world.hands.keywords)
    assert busy.renewals == 0
    assert world.provider.machines.terminated == []
    assert world.ledger.pools()[0].condemned_at is None
    busy.renewals = 2
    release(pool, ledger=busy, credentials=world.provider, **world.hands.keywords)
    assert world.ids() == set()
    assert world.ledger.pools() == []


def test_a_signed_lease_is_enough_to_stop_a_pool(tmp_path: Path, hands: Time, monkeypatch: pytest.MonkeyPatch) -> None:
    """Without a ledger, from any process. One that is not signed may name any address, to which this process's
    credentials would go: it reaches no provider. A second stop does nothing.
    """
    monkeypatch.setenv("SKYWARD_LEASE_KEY", "k" * 32)
    provider = CloudProvider(folder=str(tmp_path))
    monkeypatch.setattr("skyward_core.config.own_providers.load", lambda _: provider)
    offer = provider.offers(Requirements())[0]
    provider.launch(offer, 2, {POOL_TAG: "sky-1"}, "")
    provider.launch(offer, 1, {POOL_TAG: "sky-other"}, "")
    lease = Lease(pool_id="sky-1", provider=provider.to_json(), created_at=START)
    with pytest.raises(CredentialsError, match="is not signed"):
        release(lease, ledger=None, **hands.keywords)
    assert len(provider.instances()) == 3
    for _ in range(2):
        release(signed(lease), ledger=None, **hands.keywords)
    assert {instance.pool_id for instance in provider.instances()} == {"sky-other"}
    other = Lease(pool_id="sky-other", provider=lease.provider, created_at=START)
    release(other, ledger=None, credentials=provider, **hands.keywords)
    assert provider.instances() == []


def test_a_provider_that_refuses_the_credentials_is_asked_once(world: World, monkeypatch: pytest.MonkeyPatch) -> None:
    """A person waits for the answer. The owner of the pool, if it lives, reads in the ledger that it was stopped."""
    pool = world.pool()
    world.rent(pool, 2)
    refusal, asked = CredentialsError("401 Unable to authenticate you"), list[str]()

    def refuse(self: object, *_: object) -> None:
        asked.append("asked")
        raise refusal

    monkeypatch.setattr(type(world.provider), "instances", refuse)
    monkeypatch.setattr(type(world.provider), "terminate", refuse)
    with pytest.raises(CredentialsError, match=r"refuses the credentials.*401 Unable.*The ledger has noted") as caught:
        release(pool, ledger=world.ledger, credentials=world.provider, **world.hands.keywords)
    assert caught.value.__cause__ is refusal
    assert (len(asked), world.hands.paused) == (1, 0.0)
    assert world.ledger.pools()[0].condemned_at is not None
    assert len(world.ledger.open_intents()) == 2


def test_an_unknown_pool_cannot_be_stopped(ledger: Ledger, tmp_path: Path, hands: Time) -> None:
    """Nor one whose machines are processes of another host. The message says what to do."""
    with pytest.raises(BadRequest, match="skyward ps --all"):
        release("sky-nowhere", ledger=ledger)
    world = of_kind(FakeProvider, ledger, tmp_path, hands)
    pool = world.pool(owner=ELSEWHERE)
    with pytest.raises(BadRequest, match=r"elsewhere.*stop it there"):
        release(pool, ledger=ledger, credentials=world.provider)
    assert [found.id for found in ledger.pools()] == [pool]
