"""The pool's journal in the ledger: committed before each request; it never delays the end of machines."""

from __future__ import annotations

import sqlite3
from collections.abc import Callable, Iterator, Mapping
from contextlib import closing
from dataclasses import dataclass
from datetime import timedelta
from decimal import Decimal
from pathlib import Path
from typing import Any, ClassVar, cast

import pytest
from pydantic import PrivateAttr

import skyward_core as sky
from skyward_core import Instance, Offer
from skyward_core.errors import LeaseLost, LedgerConflict, LedgerError, NoCapacity, Refusal
from skyward_core.ledger.budgets import Commitment
from skyward_core.ledger.journal import Journal, Launch, price_of
from skyward_core.ledger.ledger import Ledger
from skyward_core.ledger.metering import Meter
from skyward_core.ledger.rows import Account, Attempt, Bucket, CostBy, Intent, Period, PoolEntry, ResourceKind
from skyward_core.machines.offers import by_month
from skyward_core.machines.owner import Owner
from skyward_core.providers.base import (
    CREATED_TAG,
    EXPIRES_TAG,
    IMAGE_TAG,
    LAUNCH_TAG,
    OWNER_TAG,
    POOL_TAG,
    PROCESS_TAG,
    RANK_TAG,
    TYPE_TAG,
)
from skyward_core.provisioning.teardown import tear_down
from skyward_core.spec import PoolSpec
from skyward_core.work import NO_WORK, Work
from tests.conftest import RecordedEvents
from tests.fakes import FakeProvider, LossyProvider
from tests.ledger.fixtures import NOON, MeterClock

POOL = "sky-1"
PRICE = Decimal(36)  # a cent a second
REFUSAL = Refusal("other", "", "", spot=False, error="CredentialsError", code="401", message="who", seconds=0.1)


class Outage:
    """A ledger with methods that can be made to fail, as on a full disk; `calls` are the attempted ones."""

    def __init__(self, ledger: Ledger) -> None:
        self.ledger = ledger
        self.failing: set[str] = set()
        self.error: Callable[[], Exception] = lambda: LedgerError("the disk is full")
        self.calls: list[str] = []

    def __getattr__(self, verb: str) -> Any:
        if verb in self.failing or "all verbs" in self.failing:

            def fail(*_: object, **__: object) -> None:
                self.calls.append(verb)
                raise self.error()

            return fail
        return getattr(self.ledger, verb)


@dataclass
class JournalCase:
    """A journal with its ledger, its provider, and a clock that the test sets."""

    clock: MeterClock
    url: str
    ledger: Ledger
    outage: Outage
    provider: FakeProvider
    meter: Meter
    journal: Journal
    recorded: RecordedEvents

    @property
    def offer(self) -> Offer:
        return self.provider.offers(sky.Requirements())[0]

    def intents(self) -> list[Intent]:
        return self.ledger.intents(pool_id=POOL)

    def launch(
        self, count: int = 2, first_rank: int = 0, commitment: Commitment | None = None
    ) -> tuple[Launch, list[Instance]]:
        """Record and request machines, without the result."""
        launch = self.journal.intend(self.offer, count, first_rank, commitment or Commitment())
        return launch, self.provider.launch(self.offer, count, launch.tags, "")

    def rent(self, count: int = 2, first_rank: int = 0) -> list[Instance]:
        launch, instances = self.launch(count, first_rank)
        self.journal.bind(launch, instances)
        return instances

    def tear_down(self) -> None:
        tear_down(self.provider, POOL, self.journal, clock=self.clock, pause=self.clock.go)
        self.journal.nothing_is_left()

    @property
    def entry(self) -> PoolEntry:
        entry = self.ledger.pool(POOL)
        assert entry is not None
        return entry

    def bill(self) -> Decimal:
        """The bill of the ledger, which is that of the meter."""
        (row,) = self.ledger.cost_rows(CostBy.POOL, pool_id=POOL)
        assert row.cost_usd == self.meter.total()
        return row.cost_usd

    def open_ids(self) -> list[str]:
        return sorted(intent.cloud_id or "" for intent in self.ledger.open_intents(pool_id=POOL))


type Make = Callable[..., JournalCase]


@pytest.fixture
def make(tmp_path: Path) -> Iterator[Make]:
    """Open a journal at a provider of some kind."""
    ledgers: list[Ledger] = []

    def make(
        kind: type[FakeProvider] = FakeProvider,
        price: float = float(PRICE),
        is_opened: bool = True,
        work: Work = NO_WORK,
        **spec: Any,
    ) -> JournalCase:
        clock, recorded, url = MeterClock(), RecordedEvents(), f"sqlite:///{tmp_path}/ledger.db"
        ledger = Ledger(url, clock=clock.date, busy_timeout_seconds=0.05)
        ledgers.append(ledger)
        if "budget" in spec:
            ledger.set_account(Account(spec["budget"], Decimal(100), Period.MONTH))
        outage, meter, provider = (
            Outage(ledger),
            Meter(clock),
            kind(folder=str(tmp_path / "machines"), price_per_hour=price),
        )
        journal = Journal(
            cast("Ledger", outage), POOL, PoolSpec.of(**spec), provider, meter, recorded, now=clock.date, work=work
        )
        if is_opened:
            journal.open()
        return JournalCase(clock, url, ledger, outage, provider, meter, journal, recorded)

    yield make
    for ledger in ledgers:
        ledger.close()


def test_a_pool_is_recorded_with_all_that_a_sweep_needs(make: Make) -> None:
    it = make(budget="team", lease_seconds=90, work=Work(system="cron", task="train"))
    entry = it.entry
    assert (entry.owner, entry.written_provider, entry.account) == (Owner.here(), it.provider.to_json(), "team")
    assert entry.lease_expires_at == NOON + timedelta(seconds=90)
    assert PoolSpec.model_validate_json(entry.spec_json).lease_seconds == 90
    assert (entry.ended_at, entry.lives_by_lease, entry.work) == (None, False, Work(system="cron", task="train"))
    launch, _ = it.launch(1)
    assert launch.tags["skyward-work-task"] == "train"


def test_the_entry_names_the_provider_that_a_pool_has_turned_to(make: Make) -> None:
    it = make()
    elsewhere = FakeProvider(folder="/elsewhere")
    for provider, account in ((it.provider, ""), (elsewhere, ""), (elsewhere, "account-2")):
        it.journal.turn_to(provider, account)
        entry = it.entry
        assert (entry.written_provider, entry.provider_account) == (provider.to_json(), account)
    it.outage.failing = {"turn_to"}
    it.journal.turn_to(elsewhere, "account-2")
    with pytest.raises(LedgerError):
        it.journal.turn_to(elsewhere, "account-3")


def test_attempts_are_recorded_with_their_errors(make: Make) -> None:
    it = make()
    it.journal.note_attempt(it.offer, 9.0)
    it.clock.go(4000)
    it.journal.note_attempt(it.offer, 0.5, NoCapacity("none left").coded("sold-out"))
    it.journal.note_refusal(REFUSAL)
    now, here = it.clock.date(), ("fake", "nowhere-1", "fake.1")
    assert it.journal.recent_attempts(3600) == [
        Attempt(POOL, now, *here, is_spot=False, seconds=0.5, error="NoCapacity", code="sold-out", message="none left"),
        Attempt(
            POOL, now, "other", "", "", is_spot=False, seconds=0.1, error="CredentialsError", code="401", message="who"
        ),
    ]
    assert [attempt.error for attempt in it.journal.recent_attempts(5000)] == ["", "NoCapacity", "CredentialsError"]
    it.outage.failing = {"attempts"}
    assert it.journal.recent_attempts(5000) == []


class CountingProvider(FakeProvider):
    """Bills by the minute, at least ten minutes and half a dollar, and keeps the images of its machines."""

    billing_increment_seconds: ClassVar[int] = 60
    billing_minimum_seconds: ClassVar[int] = 600
    billing_minimum_usd: ClassVar[float] = 0.5
    keeps_images: ClassVar[bool] = True


def test_a_price_has_the_extras_and_the_billing_rules_of_its_provider(make: Make) -> None:
    it = make(CountingProvider)
    disk = by_month("disk", 72.0, "a price page", "2026-11-22")  # 0.1 USD an hour
    offer = it.offer.model_copy(
        update={"price_per_hour": 2.0, "on_demand_price_per_hour": 5.0, "is_spot": True, "extras_per_hour": (disk,)}
    )
    price = price_of(offer, it.provider)
    assert (price.per_hour, price.on_demand_per_hour, price.is_spot) == (Decimal("2.1"), Decimal("5.1"), True)
    assert (price.increment_seconds, price.minimum_seconds, price.minimum_usd) == (60, 600, Decimal("0.5"))
    assert price.extras == (disk,)
    assert price_of(it.offer, it.provider).on_demand_per_hour is None
    assert price_of(it.offer.model_copy(update={"price_per_hour": 0.0}), it.provider).minimum_usd == 0


@pytest.mark.parametrize(
    ("kind", "is_cached", "is_tagged"),
    [(CountingProvider, True, True), (CountingProvider, False, False), (FakeProvider, True, False)],
)
def test_machines_whose_image_is_kept_name_it_in_their_tags(
    make: Make, kind: type[FakeProvider], is_cached: bool, is_tagged: bool
) -> None:
    it = make(kind, image=sky.Image(cache=is_cached))
    launch, _ = it.launch(1)
    assert (IMAGE_TAG in launch.tags) is is_tagged


class LedgerReadingProvider(FakeProvider):
    """Reads the ledger through its own connection at each launch."""

    _seen: list[tuple[object, ...]] = PrivateAttr(default_factory=list)
    _file: list[str] = PrivateAttr(default_factory=list)

    def launch(self, offer: Offer, count: int, tags: Mapping[str, str], startup: str) -> list[Instance]:
        with closing(sqlite3.connect(self._file[0])) as connection:
            self._seen += connection.execute(
                "select token, cloud_id, gone_microseconds from skyward_resources order by id"
            ).fetchall()
        return super().launch(offer, count, tags, startup)


def test_an_intent_is_committed_before_the_creating_call(make: Make, tmp_path: Path) -> None:
    it = make(LedgerReadingProvider)
    provider = cast("LedgerReadingProvider", it.provider)
    provider._file.append(f"{tmp_path}/ledger.db")
    it.rent(3)
    assert provider._seen == [(f"{POOL}-1-{rank}", None, None) for rank in range(3)]


def test_an_intent_has_all_that_is_needed_to_find_its_machine(make: Make) -> None:
    it = make()
    it.clock.go(0.5)
    launch, instances = it.launch(2, first_rank=3)
    owner = Owner.here()
    tags = {
        POOL_TAG: POOL,
        LAUNCH_TAG: f"{POOL}-1",
        OWNER_TAG: owner.name,
        PROCESS_TAG: owner.process,
        CREATED_TAG: str(int(NOON.timestamp())),
        TYPE_TAG: "fake.1",
    }
    for rank, intent, instance in zip((3, 4), it.intents(), instances, strict=True):
        assert tags.items() | {(RANK_TAG, str(rank))} <= intent.tags.items()
        assert intent.tags == instance.tags
        assert (intent.name, intent.region, intent.price.per_hour) == (f"{POOL}-{rank}", "nowhere-1", PRICE)
        assert intent.token == f"{POOL}-1-{rank}"
        assert intent.expires_at == NOON + timedelta(seconds=120.5)
    assert EXPIRES_TAG not in launch.tags
    assert sorted(launch.by_rank) == [3, 4]


@pytest.mark.parametrize(
    ("ends", "spec", "expected"),
    [
        ((600.0,), {}, 600),
        ((), {"max_lifetime": 50, "provision_timeout": 30}, 80),
        ((600.0,), {"max_lifetime": 50, "provision_timeout": 30}, 80),
        ((600.0, 900.0), {}, 900),
    ],
)
def test_a_machine_with_an_end_says_so_in_its_tags(
    make: Make, ends: tuple[float, ...], spec: dict[str, Any], expected: int
) -> None:
    """The earlier of what the money and `max_lifetime` allow, not too early. The tags have the latest end that it may
    ever get, because a sweep must not end it before.
    """
    it = make(**spec)
    launch, _ = it.launch(1, commitment=Commitment(500.0, *(it.clock() + end for end in ends)))
    (intent,) = it.intents()
    assert intent.expires_at == NOON + timedelta(seconds=expected)
    assert 0 <= int(launch.tags[EXPIRES_TAG]) - (NOON.timestamp() + expected) <= 1


@pytest.mark.parametrize("error", [LedgerError, LeaseLost])
def test_without_the_ledger_nothing_is_requested(make: Make, error: type[Exception]) -> None:
    it = make(is_opened=False)
    it.outage.error = lambda: error("no")
    it.outage.failing = {"open_pool", "intend_all"}
    with pytest.raises(error):
        it.journal.open()
    it.outage.failing = {"intend_all"}
    it.journal.open()
    with pytest.raises(error):
        it.journal.intend(it.offer, 1, 0, Commitment())
    assert it.provider.machines.launched == []
    it.journal.close()


def test_nothing_is_requested_for_a_condemned_pool(make: Make) -> None:
    it = make()
    assert it.ledger.condemn(POOL, seen=NOON + timedelta(seconds=120))
    with pytest.raises(LeaseLost):
        it.journal.intend(it.offer, 1, 0, Commitment())
    assert it.intents() == []


def test_from_launch_to_end_each_machine_is_one_entry(make: Make) -> None:
    it = make()
    launch, instances = it.launch(2)
    it.clock.go(10)
    it.journal.bind(launch, instances)
    assert [intent.cloud_id for intent in it.intents()] == ["fake-0", "fake-1"]
    it.meter.enter("fake-0", Bucket.BOOTSTRAPPING)
    it.meter.enter("fake-1", Bucket.BOOTSTRAPPING)
    it.clock.go(20)
    it.meter.enter("fake-0", Bucket.IDLE)
    it.clock.go(70)
    it.journal.note()
    assert sum(it.intents()[0].seconds.values()) == 100
    it.tear_down()
    it.journal.close()
    first, second = it.intents()
    assert (first.evidence, second.evidence) == ("fake lists it no more",) * 2
    assert first.end_asked_at == first.gone_at == NOON + timedelta(seconds=100)
    none = dict.fromkeys(Bucket, 0)
    assert first.seconds == none | {Bucket.LAUNCHING: 10, Bucket.BOOTSTRAPPING: 20, Bucket.IDLE: 70}
    assert second.seconds == none | {Bucket.LAUNCHING: 10, Bucket.BOOTSTRAPPING: 90}
    assert it.bill() == 2
    assert it.open_ids() == []
    assert it.entry.ended_at == NOON + timedelta(seconds=100)
    assert [event.instance_id for event in it.recorded.of(sky.InstanceStopping)] == ["fake-0", "fake-1"]


def test_the_time_of_a_termination_is_in_its_bucket(make: Make) -> None:
    it = make()
    it.rent(1)
    it.clock.go(30)
    it.journal.ending(["fake-0"])
    it.clock.go(12)
    it.journal.gone(["fake-0"], "seen to be gone")
    it.clock.go(1000)
    it.journal.note()
    (intent,) = it.intents()
    assert (intent.seconds[Bucket.TERMINATING], sum(intent.seconds.values())) == (12, 42)


def test_the_intents_of_a_refused_launch_are_closed_and_cost_nothing(make: Make) -> None:
    it = make()
    launch = it.journal.intend(it.offer, 2, 0, Commitment())
    it.clock.go(10)
    it.journal.refused(launch, "sold out")
    assert [intent.evidence for intent in it.intents()] == ["fake had none: sold out"] * 2
    assert it.ledger.cost_rows(CostBy.POOL)[0].cost_usd == 0
    assert it.journal.rented() == set()


def test_if_fewer_machines_come_the_other_intents_are_closed(make: Make) -> None:
    it = make()
    launch = it.journal.intend(it.offer, 3, 0, Commitment())
    came = it.provider.launch(it.offer, 3, launch.tags, "")[1:2]
    it.journal.bind(launch, came)
    fewer = (None, "fewer machines came than were requested")
    assert [(intent.cloud_id, intent.evidence) for intent in it.intents()] == [fewer, ("fake-1", None), fewer]


class PriceReportingProvider(FakeProvider):
    """Returns the real prices of its machines, which may be lower than offered."""

    tells_what_is_paid: ClassVar[bool] = True


@pytest.mark.parametrize(
    ("kind", "reported", "billed"),
    [
        (PriceReportingProvider, 18.0, 18),
        (PriceReportingProvider, 36.0, 36),
        (PriceReportingProvider, 72.0, 36),
        (PriceReportingProvider, 0.0, 36),
        (FakeProvider, 18.0, 36),
    ],
)
def test_a_machine_that_costs_less_than_its_offer_is_billed_at_its_price(
    make: Make, kind: type[FakeProvider], reported: float, billed: int
) -> None:
    """If its provider says what is paid; also a machine of another type, and never above the reserved price."""
    it = make(kind)
    launch, (machine,) = it.launch(1)
    it.journal.bind(launch, [machine.model_copy(update={"price_per_hour": reported, "instance_type": "another"})])
    it.clock.go(100)
    it.tear_down()
    assert it.bill() == Decimal(billed) / 36
    (intent,) = it.intents()
    kind_of_machine = "another" if kind.tells_what_is_paid else "fake.1"
    assert (intent.price.per_hour, intent.tags[TYPE_TAG]) == (Decimal(billed), kind_of_machine)


def test_machines_that_were_not_requested_are_recorded_too(make: Make) -> None:
    it = make()
    launch = it.journal.intend(it.offer, 2, 0, Commitment())
    came = it.provider.launch(it.offer, 3, launch.tags, "")
    came[1] = came[1].model_copy(update={"rank": 0})
    it.journal.bind(launch, came)
    assert it.open_ids() == ["fake-0", "fake-1", "fake-2"]
    assert it.journal.rented() == {"fake-0", "fake-1", "fake-2"}
    it.tear_down()
    assert it.open_ids() == []


def test_a_machine_whose_launch_was_never_answered_is_bound_to_its_intent(make: Make) -> None:
    it = make(LossyProvider)
    launch = it.journal.intend(it.offer, 2, 0, Commitment())
    with pytest.raises(ConnectionError):
        it.provider.launch(it.offer, 2, launch.tags, "")
    running = it.provider.machines.running
    running["fake-1"] = running["fake-1"].model_copy(update={"price_per_hour": 0.0})  # a listing may omit it
    it.clock.go(50)
    it.tear_down()
    it.journal.close()
    assert [(intent.token, intent.cloud_id, intent.evidence) for intent in it.intents()] == [
        (f"{POOL}-1-{rank}", f"fake-{rank}", "fake lists it no more") for rank in (0, 1)
    ]
    assert [sum(intent.seconds.values()) for intent in it.intents()] == [50, 50]
    assert it.bill() == 1


def test_the_token_identifies_the_launch_of_a_machine(make: Make) -> None:
    it = make()
    _, (first,) = it.launch(1)
    _, (second,) = it.launch(1)
    it.journal.found([second, first])
    found = [(intent.token, intent.cloud_id) for intent in it.intents()]
    assert found == [(f"{POOL}-1-0", first.id), (f"{POOL}-2-0", second.id)]


def test_without_a_token_the_rank_identifies_the_launch(make: Make) -> None:
    it = make()
    _, instances = it.launch(2)
    it.journal.found([instance.model_copy(update={"tags": {}}) for instance in instances])
    assert [intent.cloud_id for intent in it.intents()] == ["fake-0", "fake-1"]


def test_a_second_machine_of_a_launch_gets_its_own_entry(make: Make) -> None:
    """A creating call that was repeated has created two. Both are billed at the price of the intent."""
    it = make()
    launch, (first,) = it.launch(1)
    it.journal.bind(launch, [first])
    second = it.provider.launch(it.offer, 1, {**launch.tags, "colour": "red"}, "")
    it.journal.found([*second, *second])
    it.ledger.condemn(POOL, seen=NOON + timedelta(seconds=120))
    third = it.provider.launch(it.offer, 1, launch.tags, "")
    it.journal.found([*second, *third])
    assert [intent.cloud_id for intent in it.intents()] == ["fake-0", "fake-1", "fake-2"]
    found = it.intents()[1]
    assert found.tags["colour"] == "red"
    assert (found.kind, found.provider, found.region) == (ResourceKind.INSTANCE, "fake", "nowhere-1")
    assert (found.name, found.price.per_hour) == (f"{POOL}-0", PRICE)
    it.clock.go(10)
    it.tear_down()
    assert it.open_ids() == []
    assert it.bill() == Decimal("0.3")


@pytest.mark.parametrize(
    "tags",
    [
        {RANK_TAG: "0"},
        {RANK_TAG: "7"},
        {RANK_TAG: "0", LAUNCH_TAG: f"{POOL}-2"},
        {RANK_TAG: "7", LAUNCH_TAG: f"{POOL}-1"},
    ],
)
def test_a_machine_that_no_intent_names_is_ended_and_not_billed(
    make: Make, caplog: pytest.LogCaptureFixture, tags: dict[str, str]
) -> None:
    """Anybody who may write tags can copy those of a pool, with any price."""
    it = make()
    it.rent(1)
    (strange,) = it.provider.launch(
        it.offer.model_copy(update={"price_per_hour": 1e7}), 1, {POOL_TAG: POOL, **tags}, ""
    )
    it.clock.go(10)
    it.journal.found([strange])
    it.journal.found([strange])
    assert it.journal.rented() == {"fake-0"}
    it.clock.go(90)
    it.tear_down()
    it.journal.close()
    assert it.provider.machines.running == {}
    assert [intent.cloud_id for intent in it.intents()] == ["fake-0"]
    assert it.bill() == 1
    (warning,) = [record.getMessage() for record in caplog.records if strange.id in record.getMessage()]
    assert "no request in the ledger names it" in warning


def test_a_second_machine_costs_what_was_requested_and_not_what_its_listing_says(make: Make) -> None:
    it = make()
    launch, (first,) = it.launch(1)
    it.journal.bind(launch, [first])
    it.provider.launch(it.offer.model_copy(update={"price_per_hour": 1e7}), 1, launch.tags, "")
    it.journal.found(it.provider.instances(POOL))
    it.clock.go(50)
    it.tear_down()
    assert it.bill() == 1


def test_an_intent_that_a_sweep_has_bound_to_another_machine_does_not_change(make: Make) -> None:
    """One call has created two machines. This one gets its own entry, so that each is closed separately."""
    it = make()
    launch, (instance,) = it.launch(1)
    it.ledger.bind(launch.by_rank[0], "seen-by-a-sweep")
    it.journal.found([instance])
    it.journal.gone([instance.id], "gone")
    found = [(intent.cloud_id, intent.evidence) for intent in it.intents()]
    assert found == [("seen-by-a-sweep", None), (instance.id, "gone")]


def test_an_intent_without_a_machine_is_closed_when_the_provider_lists_none(make: Make) -> None:
    it = make()
    it.journal.intend(it.offer, 2, 0, Commitment())
    it.tear_down()
    assert [intent.evidence for intent in it.intents()] == ["fake lists nothing of the pool"] * 2


@pytest.mark.parametrize("verb", ["bind_all", "ask_end_all", "note_all", "close_all", "end_pool", "all verbs"])
def test_an_outage_keeps_no_machine_running_and_is_raised_at_the_end(make: Make, verb: str) -> None:
    it = make()
    launch, instances = it.launch(2)
    it.outage.failing = {verb}
    it.journal.bind(launch, instances)
    it.clock.go(10)
    it.journal.note()
    it.tear_down()
    assert it.provider.machines.running == {}
    assert it.journal.rented() == set()
    with pytest.raises(LedgerError, match="the disk is full") as caught:
        it.journal.close()
    assert any("skyward sweep" in note for note in caught.value.__notes__)
    it.outage.failing = set()
    it.journal.close()
    assert it.entry.ended_at is not None


def test_machines_found_during_an_outage_are_terminated(make: Make) -> None:
    it = make()
    it.launch(5)
    it.outage.failing = {"all verbs"}
    it.tear_down()
    assert it.provider.machines.running == {}
    assert it.outage.calls.count("bind") + it.outage.calls.count("adopt") <= 2
    with pytest.raises(LedgerError):
        it.journal.close()


def test_a_locked_database_is_an_outage(make: Make, tmp_path: Path) -> None:
    it = make()
    it.rent(2)
    with closing(sqlite3.connect(tmp_path / "ledger.db", isolation_level=None)) as other:
        other.execute("begin immediate")
        it.tear_down()
        with pytest.raises(LedgerError):
            it.journal.close()
        other.execute("rollback")
    assert it.provider.machines.running == {}
    assert len(it.ledger.open_intents(pool_id=POOL)) == 2


def test_an_outage_that_is_over_is_not_raised(make: Make) -> None:
    it = make()
    it.rent(1)
    it.outage.failing = {"note_all", "renew"}
    it.clock.go(10)
    it.journal.note()
    it.journal.renew()
    it.outage.failing = set()
    it.clock.go(10)
    it.journal.note()
    it.journal.renew()
    it.tear_down()
    it.journal.close()
    assert sum(it.intents()[0].seconds.values()) == 20


@pytest.mark.parametrize("next_step", ["note", "live_by_lease", "close"])
def test_what_the_ledger_has_refused_once_is_written_with_the_next_note(make: Make, next_step: str) -> None:
    """A machine without its id that outlives this process was billed to the last note only, not to its end."""
    it = make()
    launch, instances = it.launch(2)
    it.outage.failing = {"bind_all", "close_all"}
    it.journal.bind(launch, instances[:1])
    it.journal.refused(it.launch(1, 2)[0], "none was free")
    assert [(intent.cloud_id, intent.gone_at) for intent in it.intents()] == [(None, None)] * 3
    it.outage.failing = set()
    {"note": it.journal.note, "close": it.journal.close, "live_by_lease": lambda: it.journal.live_by_lease(60)}[
        next_step
    ]()
    assert [(intent.cloud_id, intent.gone_at is None) for intent in it.intents()] == [
        (instances[0].id, True),
        (None, False),
        (None, False),
    ]
    it.journal.close()  # it raises nothing


def test_what_was_refused_is_written_before_what_came_later(make: Make) -> None:
    """An id that is written after the end of its machine would open the entry again, and bill it on."""
    it = make()
    it.outage.failing = {"bind_all"}
    (instance,) = it.rent(1)
    it.journal.gone([instance.id], "it is not listed any more")
    assert [(intent.cloud_id, intent.gone_at) for intent in it.intents()] == [(None, None)]
    it.outage.failing = set()
    it.journal.note()
    assert [(intent.cloud_id, intent.gone_at is None) for intent in it.intents()] == [(instance.id, False)]


def test_during_an_outage_a_step_waits_once_for_what_was_refused(make: Make) -> None:
    """Each attempt may take half a minute."""
    it = make()
    it.outage.failing = {"bind_all", "close_all", "adopt", "bind"}
    it.rent(1)
    for number in range(5):
        it.journal.refused(it.launch(1, 2 + number)[0], "none was free")
    it.outage.calls.clear()
    it.journal.note()
    assert it.outage.calls == ["bind_all"]


def test_no_pool_is_left_to_its_lease_before_the_ledger_has_its_machines(make: Make) -> None:
    it = make()
    it.outage.failing = {"bind_all"}
    it.rent(1)
    with pytest.raises(LedgerError, match="the disk is full"):
        it.journal.live_by_lease(60)
    assert not it.entry.lives_by_lease


def test_a_history_that_cannot_be_written_ends_no_pool_and_hides_no_error(
    make: Make, caplog: pytest.LogCaptureFixture
) -> None:
    it = make()
    it.outage.failing = {"note_attempts"}
    it.journal.note_attempt(it.offer, 0.1, NoCapacity("none left"))
    it.journal.note_refusal(REFUSAL)
    it.rent(1)
    it.tear_down()
    it.journal.close()
    logged = [record.levelname for record in caplog.records if "the disk is full" in record.getMessage()]
    assert logged == ["WARNING"] * 2
    it.outage.failing = {"close_all"}
    it.journal.gone(["fake-0"], "seen")
    with pytest.raises(LedgerError, match="the disk is full"):
        it.journal.close()


def test_a_wait_for_a_locked_ledger_is_not_billed_after_the_machines_are_gone(
    make: Make, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The provider has confirmed their end: what the process waits for then costs nothing."""
    monkeypatch.setattr(FakeProvider, "terminate_confirms", True)
    it = make()
    it.rent(1)
    it.clock.go(10)

    def locked() -> LedgerError:
        it.clock.go(11)
        return LedgerError("the ledger is locked")

    it.outage.failing, it.outage.error = {"ask_end_all", "close_all", "note_all"}, locked
    it.tear_down()
    final = it.meter.final()
    assert final is not None
    assert final.total_cost == pytest.approx(0.10)


def test_several_errors_are_raised_as_one(make: Make) -> None:
    it = make()
    it.rent(1)
    for verb, words in (("ask_end_all", "the disk is full"), ("close_all", "the file is gone")):
        it.outage.failing, it.outage.error = {verb}, lambda words=words: LedgerError(words)
        (it.journal.end_requested if verb == "ask_end_all" else lambda ids: it.journal.gone(ids, "seen"))(["fake-0"])
    with pytest.raises(LedgerError, match="the file is gone") as caught:
        it.journal.close()
    assert "the disk is full" in caught.value.__notes__


def test_the_lease_is_renewed_from_now(make: Make) -> None:
    it = make(lease_seconds=60)
    it.clock.go(30)
    it.journal.renew()
    assert it.entry.lease_expires_at == NOON + timedelta(seconds=90)
    it.journal.live_by_lease(600)
    assert (it.entry.lease_expires_at, it.entry.lives_by_lease) == (NOON + timedelta(seconds=630), True)


def test_a_lost_lease_is_raised_at_once(make: Make) -> None:
    it = make()
    it.rent(1)
    assert it.ledger.condemn(POOL, seen=NOON + timedelta(seconds=120))
    with pytest.raises(LeaseLost):
        it.journal.renew()
    with pytest.raises(LeaseLost):
        it.journal.live_by_lease(600)
    it.tear_down()
    it.journal.close()
    assert it.ledger.open_intents(pool_id=POOL) == []


def test_an_outage_of_the_ledger_costs_no_lease(make: Make) -> None:
    """`renew` keeps the error; `live_by_lease` raises it, because the life of the pool depends on it."""
    it = make()
    it.outage.failing = {"renew", "live_by_lease"}
    it.journal.renew()
    with pytest.raises(LedgerError):
        it.journal.live_by_lease(600)
    it.outage.error = lambda: LedgerConflict("no such pool")
    it.journal.renew()
    with pytest.raises(LedgerConflict):
        it.journal.close()


def test_the_account_is_settled_with_the_bill_before_the_pool_has_ended(make: Make) -> None:
    """After a crash in between, a sweep still handles the pool. Later reservations are settled too."""
    it = make(budget="team")
    it.ledger.reserve("team", POOL, Decimal(50))
    it.rent(2)
    it.clock.go(100)
    it.tear_down()
    it.outage.failing, it.outage.error = {"end_pool"}, lambda: cast("Exception", KeyboardInterrupt())
    with pytest.raises(KeyboardInterrupt):
        it.journal.close()
    assert (it.entry.ended_at, it.ledger.open_reservations()) == (None, [])
    it.ledger.reserve("team", POOL, Decimal(5))
    it.outage.failing = set()
    end_pool = it.ledger.end_pool

    def reserve_and_end(pool_id: str) -> None:
        it.ledger.reserve("team", POOL, Decimal(7))
        end_pool(pool_id)

    it.outage.end_pool = reserve_and_end
    it.journal.close()
    assert it.ledger.open_reservations() == []
    assert it.ledger.left_usd("team", POOL) == 98


def test_the_account_pays_the_bill_of_the_ledger(make: Make) -> None:
    """Not what this process has counted: others may have measured more, of time for which it was stopped."""
    it = make(budget="team", price=3600.0)
    it.ledger.reserve("team", POOL, Decimal(60))
    (machine,) = it.rent(1)
    it.clock.go(20)
    (intent,) = it.intents()
    it.ledger.note_all({intent.id: {Bucket.IDLE: 15.0, Bucket.LAUNCHING: 5.0}})
    it.meter.end(machine.id)
    it.meter._metered[machine.id].ended = it.meter.now() - 10
    it.tear_down()
    it.journal.close()
    (row,) = it.ledger.cost_rows(CostBy.POOL, pool_id=POOL)
    assert row.cost_usd > it.meter.total()
    assert it.ledger.left_usd("team", "another") == Decimal(100) - row.cost_usd
