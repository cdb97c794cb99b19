"""Sweeping: what is dead is ended, what lives is left, and what cannot be proved is told.

In every order, by several at once, and with a ledger that fails.
"""

import json
import os
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from datetime import UTC, datetime, timedelta
from decimal import Decimal
from pathlib import Path
from typing import Any, ClassVar

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from pydantic import PrivateAttr

from skyward_core import Instance, InstancesLeft, InstanceState, Lease, Offer, Provider, Requirements
from skyward_core.cleanup import survey
from skyward_core.cleanup.policy import BOOT_SECONDS, Action, Scene, judge, paid_until
from skyward_core.cleanup.release import end_pool, release
from skyward_core.cleanup.sweep import sweep
from skyward_core.errors import BadRequest, LeaseLost, LedgerError
from skyward_core.ledger.ledger import Ledger
from skyward_core.ledger.rows import (
    Account,
    Bucket,
    CostBy,
    Intent,
    Period,
    PoolEntry,
    Price,
    ResourceKind,
    ResourceRequest,
)
from skyward_core.machines.owner import Owner, OwnerState
from skyward_core.providers.base import (
    CREATED_TAG,
    EXPIRES_TAG,
    LAUNCH_TAG,
    OWNER_TAG,
    POOL_TAG,
    PROCESS_TAG,
    RANK_TAG,
    load,
)
from tests.conftest import examples
from tests.fakes import BlindProvider, FakeProvider, FlakyProvider, SlowToGoProvider, StuckProvider

ROOT = Path(__file__).parents[2]
START = datetime(2026, 11, 21, 12, 0, tzinfo=UTC)
HERE = Owner.here()
DEAD = replace(HERE, started="1")
ELSEWHERE = replace(HERE, host="elsewhere", boot="another")
STATES = {HERE: OwnerState.ALIVE, DEAD: OwnerState.DEAD, ELSEWHERE: OwnerState.UNKNOWN}


class Time:
    """A clock that a test turns; who pauses turns it on."""

    def __init__(self) -> None:
        self.now = START
        self.paused = 0.0

    def __call__(self) -> datetime:
        return self.now

    def monotonic(self) -> float:
        return self.now.timestamp()

    def pause(self, seconds: float) -> None:
        self.paused += seconds
        self.go(seconds)

    def go(self, seconds: float) -> None:
        self.now += timedelta(seconds=seconds)

    @property
    def keywords(self) -> dict[str, Any]:
        return {"clock": self, "monotonic": self.monotonic, "pause": self.pause}


class CloudProvider(FakeProvider):
    """A cloud: its machines are seen from everywhere, and a creating call may be at work when its caller is dead."""

    name: ClassVar[str] = "cloud"
    is_here: ClassVar[bool] = False


class SelfEndingProvider(CloudProvider):
    """A cloud whose machines end themselves for good, at the latest two minutes after they should."""

    name: ClassVar[str] = "self-ending"

    def ends_for_good(self) -> bool:
        return True


class LaggingProvider(CloudProvider):
    """A cloud whose listing lacks machines for a minute after they were made, by the clock it is given."""

    name: ClassVar[str] = "lagging"
    listing_lag_seconds: ClassVar[float] = 60.0
    made: ClassVar[dict[str, datetime]] = {}
    clock: ClassVar[Callable[[], datetime]]

    def _start(self, offer: Offer, pool_id: str, rank: int, tags: Mapping[str, str] | None = None) -> Instance:
        instance = super()._start(offer, pool_id, rank, tags)
        self.made[instance.id] = type(self).clock()
        return instance

    def instances(self, pool_id: str | None = None) -> list[Instance]:
        now = type(self).clock()
        return [
            instance for instance in super().instances(pool_id) if self.made[instance.id] + timedelta(seconds=60) <= now
        ]


class FolderProvider(Provider):
    """Machines are files in a folder, which any process may list: a cloud for several processes.

    The folder `log` has a line for each termination.
    """

    name: ClassVar[str] = "folder"
    folder: str

    def launch(self, offer: Offer | None, count: int, tags: Mapping[str, str], startup: str) -> list[Instance]:
        first = int(tags[RANK_TAG])
        return [self._start({**tags, RANK_TAG: str(rank)}) for rank in range(first, first + count)]

    def instances(self, pool_id: str | None = None) -> list[Instance]:
        found = []
        for path in sorted(Path(self.folder).glob("*.json")):
            try:
                found.append(self._instance(path.stem, json.loads(path.read_text())))
            except FileNotFoundError:
                pass  # another sweep was faster
        return [instance for instance in found if pool_id in (None, instance.pool_id)]

    def terminate(self, ids: Sequence[str]) -> None:
        with (Path(self.folder) / "log").open("a") as log:
            for instance_id in ids:
                log.write(f"{instance_id}\n")
                (Path(self.folder) / f"{instance_id}.json").unlink(missing_ok=True)

    def _start(self, tags: dict[str, str]) -> Instance:
        instance_id = f"{tags[POOL_TAG]}.{tags[RANK_TAG]}.{os.urandom(3).hex()}"
        path = Path(self.folder) / f"{instance_id}.json"
        partial = path.with_suffix(".partial")
        partial.write_text(json.dumps(tags))
        partial.rename(path)
        return self._instance(instance_id, tags)

    def _instance(self, instance_id: str, tags: dict[str, str]) -> Instance:
        return machine(instance_id, tags[POOL_TAG], int(tags[RANK_TAG]), tags, provider=self.name)


def machine(
    instance_id: str, pool_id: str, rank: int = 0, tags: Mapping[str, str] | None = None, provider: str = "fake"
) -> Instance:
    return Instance(
        id=instance_id,
        provider=provider,
        pool_id=pool_id,
        rank=rank,
        state=InstanceState.RUNNING,
        region="nowhere-1",
        instance_type="fake.1",
        price_per_hour=36.0,
        tags={POOL_TAG: pool_id, RANK_TAG: str(rank), **(tags or {})},
    )


def owner_tags(owner: Owner, created: datetime = START, **more: str) -> dict[str, str]:
    return {OWNER_TAG: owner.name, PROCESS_TAG: owner.process, CREATED_TAG: str(int(created.timestamp())), **more}


@pytest.fixture
def hands() -> Time:
    return Time()


@pytest.fixture
def ledger(tmp_path: Path, hands: Time) -> Iterator[Ledger]:
    with Ledger(f"sqlite:///{tmp_path / 'ledger.db'}", clock=hands) as opened:
        yield opened


class World:
    """A ledger, a provider, and pools that their owners have left at one line or another."""

    def __init__(self, ledger: Ledger, provider: Provider, hands: Time) -> None:
        self.ledger, self.provider, self.hands = ledger, provider, hands

    def pool(
        self, pool_id: str = "sky-1", owner: Owner = DEAD, lease_seconds: float = 120, account: str | None = None
    ) -> str:
        expires = self.hands.now + timedelta(seconds=lease_seconds)
        self.ledger.open_pool(
            pool_id,
            owner=owner,
            provider=self.provider.to_json(),
            spec_json="{}",
            lease_expires_at=expires,
            account=account,
        )
        return pool_id

    def intend(self, pool_id: str, nodes: int = 1, first: int = 0, owner: Owner = DEAD) -> list[Intent]:
        return self.ledger.intend_all(
            pool_id, [self.wish(pool_id, rank, first, owner) for rank in range(first, first + nodes)]
        )

    def wish(self, pool_id: str, rank: int, first: int = 0, owner: Owner = DEAD) -> ResourceRequest:
        return ResourceRequest(
            kind=ResourceKind.INSTANCE,
            provider=self.provider.name,
            region="nowhere-1",
            name=f"{pool_id}-{rank}",
            token=f"{pool_id}-launch{first}-{rank}",
            tags={**self.tags(pool_id, first, owner), RANK_TAG: str(rank)},
            expires_at=self.hands.now + timedelta(hours=1),
            price=Price(Decimal(36)),
        )

    def tags(self, pool_id: str, first: int = 0, owner: Owner = DEAD) -> dict[str, str]:
        return {
            POOL_TAG: pool_id,
            RANK_TAG: str(first),
            LAUNCH_TAG: f"{pool_id}-launch{first}",
            **owner_tags(owner, self.hands.now),
        }

    def launch(self, pool_id: str, nodes: int = 1, first: int = 0, owner: Owner = DEAD) -> list[Instance]:
        return self.provider.launch(self.offer(), nodes, self.tags(pool_id, first, owner), "")

    def offer(self) -> Offer:
        return Offer(
            provider=self.provider.name,
            instance_type="fake.1",
            region="nowhere-1",
            price_per_hour=36.0,
            vcpus=4,
            memory_gb=16,
        )

    def rent(self, pool_id: str, nodes: int = 1, first: int = 0, owner: Owner = DEAD) -> list[Instance]:
        intents = self.intend(pool_id, nodes, first, owner)
        instances = self.launch(pool_id, nodes, first, owner)
        self.ledger.bind_all({intent.id: instance.id for intent, instance in zip(intents, instances, strict=True)})
        return instances

    def end(self, pool_id: str = "sky-1", why: str = "its owner is dead") -> None:
        end_pool(self.ledger, self.provider, pool_id, why=why, **self.hands.keywords)

    def sweep(self, *, is_dry_run: bool = False, **how: Any) -> Any:
        return sweep(self.ledger, [self.provider], is_dry_run=is_dry_run, **{**self.hands.keywords, **how})

    def ids(self) -> set[str]:
        return {instance.id for instance in self.provider.instances()}


@pytest.fixture
def world(ledger: Ledger, tmp_path: Path, hands: Time) -> World:
    return World(ledger, CloudProvider(folder=str(tmp_path)), hands)


def of_kind(kind: type[FakeProvider], ledger: Ledger, tmp_path: Path, hands: Time, **fields: Any) -> World:
    return World(ledger, kind(folder=str(tmp_path), **fields), hands)


# ── judging ──────────────────────────────────────────────────────────────────────────────────────────────────────────


def entry(pool_id: str = "sky-1", owner: Owner = DEAD, lease_seconds: float = 100, **fields: Any) -> PoolEntry:
    return PoolEntry(
        pool_id,
        owner,
        {"name": "cloud"},
        "{}",
        START - timedelta(hours=1),
        START + timedelta(seconds=lease_seconds),
        **fields,
    )


def intent(
    number: int,
    pool_id: str = "sky-1",
    rank: int = 0,
    cloud_id: str | None = None,
    age_seconds: float = 1000,
    **fields: Any,
) -> Intent:
    intended = START - timedelta(seconds=age_seconds)
    told: dict[str, Any] = {
        "id": number,
        "pool_id": pool_id,
        "kind": ResourceKind.INSTANCE,
        "provider": "cloud",
        "region": "nowhere-1",
        "name": f"{pool_id}-{rank}",
        "token": f"t{number}",
        "tags": {POOL_TAG: pool_id, RANK_TAG: str(rank), LAUNCH_TAG: f"{pool_id}-1"},
        "price": Price(),
        "intended_at": intended,
        "expires_at": START,
        "cloud_id": cloud_id,
        "bound_at": None if cloud_id is None else intended,
        "end_asked_at": None,
        "gone_at": None,
        "evidence": None,
        "seconds": {},
    }
    return Intent(**(told | fields))


CLOUD = CloudProvider(folder="/nowhere")


def verdicts(
    machines: Sequence[Instance] = (),
    pools: Sequence[PoolEntry] = (),
    intents: Sequence[Intent] = (),
    provider: Provider = CLOUD,
    **how: Any,
) -> list[tuple[str, str, tuple[str, ...]]]:
    scene = Scene(provider, machines, {pool.id: pool for pool in pools}, intents, START, HERE, STATES)
    return [(finding.action.value, finding.pool_id, finding.resource_ids) for finding in judge(scene, **how)]


def launched(instance_id: str, rank: int = 0, pool_id: str = "sky-1", launch: str | None = "sky-1-1") -> Instance:
    return machine(instance_id, pool_id, rank, {LAUNCH_TAG: launch} if launch else {})


@pytest.mark.parametrize(
    ("pool", "is_dead"),
    [
        (entry(owner=HERE), False),
        (entry(owner=ELSEWHERE), False),
        (entry(owner=DEAD), True),
        (entry(owner=DEAD, lives_by_lease=True), False),
        (entry(owner=HERE, lease_seconds=0), True),
        (entry(owner=ELSEWHERE, lease_seconds=-1), True),
        (entry(owner=DEAD, lives_by_lease=True, lease_seconds=-1), True),
        (entry(owner=HERE, condemned_at=START), True),
        (entry(owner=HERE, ended_at=START), True),
    ],
)
def test_only_what_is_proved_dead_is_ended(pool: PoolEntry, is_dead: bool) -> None:
    """A machine goes if its pool's lease has run out, its owner is known to be dead and was needed, or the pool has
    ended or was condemned; else it stays.
    """
    found = verdicts([launched("m")], [pool], [intent(1, cloud_id="m")])
    assert found == [("end" if is_dead else "leave", "sky-1", ("m",))]


def test_an_answer_that_was_lost_is_adopted_into_a_live_pool() -> None:
    """By launch and rank: the entry of that rank of another launch is not taken for it."""
    pool = entry(owner=HERE)
    assert verdicts([launched("m", 1)], [pool], [intent(1, rank=0), intent(2, rank=1)]) == [("adopt", "sky-1", ("m",))]
    assert verdicts([launched("m", 1, launch="sky-1-2")], [pool], [intent(1, rank=1)]) == [("leave", "sky-1", ("m",))]
    assert verdicts([launched("m", launch=None)], [pool], [intent(1)]) == [("adopt", "sky-1", ("m",))]


def test_what_is_ambiguous_is_not_adopted() -> None:
    """Two machines for one entry, or two entries of that rank and no launch in the tags: its owner knows which."""
    pool = entry(owner=HERE)
    assert verdicts([launched("a"), launched("b")], [pool], [intent(1)]) == [("leave", "sky-1", ("a", "b"))]
    assert verdicts([launched("a", launch=None)], [pool], [intent(1), intent(2)]) == [("leave", "sky-1", ("a",))]


def test_an_entry_is_closed_only_when_its_machine_must_be_listed() -> None:
    """Bound or not, what a listing may still lack is ended by its id or waited for; after that it is not there."""
    lagging = LaggingProvider(folder="/nowhere")
    dead = entry(lease_seconds=-1000)
    assert verdicts([], [dead], [intent(1, cloud_id="m", age_seconds=59)], lagging) == [("end", "sky-1", ("m",))]
    assert verdicts([], [dead], [intent(1, cloud_id="m", age_seconds=60)], lagging) == [("close", "sky-1", ("m",))]
    assert verdicts([], [dead], [intent(1, age_seconds=59)], lagging) == [("wait", "sky-1", ("sky-1-0",))]
    assert verdicts([], [dead], [intent(1, age_seconds=60)], lagging) == [("close", "sky-1", ("sky-1-0",))]


def test_a_launch_may_have_been_asked_for_as_late_as_its_owner_could() -> None:
    """An intent that is old says nothing of when the call was made: until the owner was barred it may have been; then
    it may still be at work for a while.
    """
    assert verdicts([], [entry(owner=DEAD)], [intent(1)]) == [("wait", "sky-1", ("sky-1-0",))]
    barred = START - timedelta(seconds=9)
    assert verdicts([], [entry(owner=DEAD, condemned_at=barred)], [intent(1)]) == [("wait", "sky-1", ("sky-1-0",))]
    assert verdicts([], [entry(owner=DEAD, condemned_at=barred - timedelta(seconds=1))], [intent(1)]) == [
        ("close", "sky-1", ("sky-1-0",))
    ]
    assert verdicts([], [entry(owner=ELSEWHERE, lease_seconds=-10)], [intent(1)]) == [("close", "sky-1", ("sky-1-0",))]


def test_a_dead_pool_of_which_nothing_is_left_is_closed() -> None:
    """So that nobody looks for it again."""
    assert verdicts([], [entry()]) == [("close", "sky-1", ())]
    assert verdicts([], [entry(ended_at=START)]) == []
    assert verdicts([], [entry(owner=HERE)]) == []


def test_what_is_no_machine_is_left_and_told() -> None:
    """A sweep ends machines only; another thing is not called gone for that."""
    (finding,) = judge(Scene(CLOUD, [], {"sky-1": entry()}, [intent(1, kind=ResourceKind.OTHER)], START, HERE, STATES))
    assert finding.action is Action.LEAVE
    assert "a sweep ends machines only" in finding.reason


def test_processes_of_another_host_are_not_called_gone() -> None:
    """Local machines are not listed from another host, by another user, or from another container; after a boot of
    their own host they are gone for certain.
    """
    local = FakeProvider(folder="/nowhere")
    for owner in (ELSEWHERE, replace(HERE, namespace="1"), replace(HERE, user="other")):
        expected = "close" if owner.user == "other" and HERE.user == "root" else "leave"
        assert [
            verdict[0]
            for verdict in verdicts([], [entry(owner=owner, lease_seconds=-1000)], [intent(1, cloud_id="m")], local)
        ] == [expected]
    rebooted = replace(HERE, boot="before", namespace="1")
    assert verdicts([], [entry(owner=rebooted, lease_seconds=-1000)], [intent(1, cloud_id="m")], local) == [
        ("close", "sky-1", ("m",))
    ]


OLD = START - timedelta(hours=1)


@pytest.mark.parametrize(
    ("tags", "expected", "if_asked_for"),
    [
        (owner_tags(DEAD, OLD), "end", "end"),
        (owner_tags(DEAD, START), "leave", "leave"),
        (owner_tags(HERE, OLD), "leave", "leave"),
        (owner_tags(ELSEWHERE, OLD), "leave", "end"),
        (owner_tags(ELSEWHERE, OLD) | {EXPIRES_TAG: str(int(START.timestamp()) - 1)}, "end", "end"),
        (owner_tags(ELSEWHERE, OLD) | {EXPIRES_TAG: str(int(START.timestamp()) + 1)}, "leave", "end"),
        (owner_tags(DEAD, OLD) | {CREATED_TAG: "yesterday"}, "leave", "end"),
        (owner_tags(ELSEWHERE, OLD) | {EXPIRES_TAG: "9" * 30, PROCESS_TAG: "?"}, "leave", "end"),
        ({}, "leave", "end"),
    ],
    ids=["dead", "young", "alive", "unknown", "expired", "not expired", "no age", "garbage", "no tags"],
)
def test_what_the_ledger_does_not_know_is_judged_by_its_tags(
    tags: dict[str, str], expected: str, if_asked_for: str
) -> None:
    """Ended are only old machines whose time has run out, or whose owner was of this host and is dead; with
    `include_unknown` those too of whom nobody knows.
    """
    its = [machine("m", "sky-x", 0, tags)]
    assert verdicts(its, min_age_seconds=600) == [(expected, "sky-x", ("m",))]
    assert verdicts(its, min_age_seconds=600, include_unknown=True) == [(if_asked_for, "sky-x", ("m",))]


def test_a_strange_pool_is_ended_whole_or_not_at_all() -> None:
    """One machine that may be counted on keeps the others."""
    its = [machine("a", "sky-x", 0, owner_tags(DEAD, OLD)), machine("b", "sky-x", 1, owner_tags(DEAD, START))]
    assert verdicts(its, min_age_seconds=600) == [("leave", "sky-x", ("a", "b"))]
    assert verdicts(its, min_age_seconds=0, pools=[entry("sky-1", HERE)]) == [("leave", "sky-x", ("a", "b"))]


owners = st.sampled_from([HERE, DEAD, ELSEWHERE])
offsets = st.integers(-200, 200)
moments = st.one_of(st.none(), st.integers(-200, 0).map(lambda seconds: START + timedelta(seconds=seconds)))
pool_ids = st.sampled_from(["sky-1", "sky-2", "sky-3"])
entries_ = st.builds(
    lambda pool_id, owner, lease, lives, condemned, ended: entry(
        pool_id, owner, lease, lives_by_lease=lives, condemned_at=condemned, ended_at=ended
    ),
    pool_ids,
    owners,
    offsets,
    st.booleans(),
    moments,
    moments,
)
machine_ids = st.sampled_from([f"m{number}" for number in range(8)])
machines_ = st.builds(
    lambda instance_id, pool_id, rank, launch, owner, age, expires: machine(
        instance_id,
        pool_id,
        rank,
        (owner_tags(owner, START - timedelta(seconds=age)) if owner else {})
        | ({LAUNCH_TAG: f"{pool_id}-1"} if launch else {})
        | ({EXPIRES_TAG: str(int(START.timestamp()) + expires)} if expires is not None else {}),
    ),
    machine_ids,
    pool_ids,
    st.integers(0, 2),
    st.booleans(),
    st.one_of(st.none(), owners),
    st.integers(0, 2000),
    st.one_of(st.none(), offsets),
)


@st.composite
def scenes(draw: st.DrawFn) -> Scene:
    pools = {pool.id: pool for pool in draw(st.lists(entries_, max_size=3))}
    machines = list({found.id: found for found in draw(st.lists(machines_, max_size=6))}.values())
    intents, bound = [], set[str]()
    for number in range(draw(st.integers(0, 6)) if pools else 0):
        cloud_id = draw(st.one_of(st.none(), machine_ids))
        if cloud_id in bound:
            cloud_id = None
        elif cloud_id is not None:
            bound.add(cloud_id)
        pool_id = draw(st.sampled_from(sorted(pools)))
        kind = draw(
            st.sampled_from([ResourceKind.INSTANCE, ResourceKind.INSTANCE, ResourceKind.INSTANCE, ResourceKind.OTHER])
        )
        if kind is ResourceKind.OTHER and cloud_id is not None:
            cloud_id = f"volume-{number}"
        intents.append(intent(number, pool_id, draw(st.integers(0, 2)), cloud_id, draw(st.integers(0, 300)), kind=kind))
    provider = draw(st.sampled_from([CLOUD, LaggingProvider(folder="/nowhere"), FakeProvider(folder="/nowhere")]))
    return Scene(provider, machines, pools, intents, START, HERE, STATES)


@pytest.mark.slow
@pytest.mark.generated
@settings(max_examples=examples(1500), deadline=None, suppress_health_check=[HealthCheck.too_slow])
@given(scene=scenes(), min_age=st.sampled_from([0.0, 600.0]), unknown=st.booleans())
def test_nothing_is_ended_without_proof_and_nothing_is_overlooked(scene: Scene, min_age: float, unknown: bool) -> None:
    """Whatever the ledger, the tags and the listing say: a live pool is never touched, a stranger only with proof, and
    each machine has one verdict.
    """
    findings = judge(scene, min_age_seconds=min_age, include_unknown=unknown)
    assert findings == judge(scene, min_age_seconds=min_age, include_unknown=unknown)
    assert all(finding.reason for finding in findings)
    harmful = [finding for finding in findings if finding.action in (Action.END, Action.CLOSE, Action.WAIT)]
    listed = {found.id: found for found in scene.machines}
    for finding in harmful:
        pool = scene.pools.get(finding.pool_id)
        if pool is not None:
            by_owner = pool.owner == DEAD and not pool.lives_by_lease
            assert pool.ended_at or pool.condemned_at or pool.lease_expires_at <= START or by_owner
            continue
        for instance_id in finding.resource_ids:
            tags = listed[instance_id].tags
            expired = EXPIRES_TAG in tags and int(tags[EXPIRES_TAG]) <= START.timestamp()
            assert (
                expired or tags.get(PROCESS_TAG) == DEAD.process or (unknown and tags.get(PROCESS_TAG) != HERE.process)
            )
            assert unknown or START.timestamp() - int(tags[CREATED_TAG]) > min_age
    by_number = {its.id: its for its in scene.intents}
    for finding in findings:
        if finding.action is Action.CLOSE:
            assert not any(
                by_number[number].cloud_id in {found.id for found in scene.machines if found.pool_id == finding.pool_id}
                for number in finding.intents
            )
    told = [
        instance_id
        for finding in findings
        for instance_id in set(finding.resource_ids)
        if instance_id in listed and listed[instance_id].pool_id == finding.pool_id
    ]
    assert sorted(told) == sorted(listed)
    of_the_dead = [
        its.id
        for its in scene.intents
        if scene.pools[its.pool_id].why_dead(START, STATES[scene.pools[its.pool_id].owner])
    ]
    assert (
        sorted(number for finding in findings if finding.action is not Action.ADOPT for number in finding.intents)
        == of_the_dead
    )


# ── one pool ─────────────────────────────────────────────────────────────────────────────────────────────────────────


def life(its: Intent, now: datetime) -> float:
    return ((its.gone_at or now) - its.intended_at).total_seconds()


def test_ending_a_pool_ends_all_and_writes_it_down(world: World) -> None:
    """What the ledger knows and what only tags tell; each entry is closed with its evidence, the pool's too, and every
    second is in a bucket.
    """
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


def test_what_was_lost_before_its_owner_died_stays_lost(world: World) -> None:
    """What nobody noted of a machine that was last noted as lost is no idling."""
    pool = world.pool()
    world.rent(pool)
    world.hands.go(10)
    world.ledger.note_all({world.ledger.open_intents()[0].id: {Bucket.IDLE: 5, Bucket.LOST: 5}})
    world.hands.go(10)
    world.end(pool)
    (its,) = world.ledger.intents()
    assert its.seconds[Bucket.IDLE] == 5
    assert its.seconds[Bucket.LOST] == pytest.approx(15, abs=0.1)


def test_the_time_of_terminating_is_counted_as_that(ledger: Ledger, tmp_path: Path, hands: Time) -> None:
    """A machine that goes only when it is asked for the seventh time was terminating from the first."""
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
def test_a_machine_that_is_found_gone_is_paid_for_until_it_must_have_ended(
    known: dict[str, Any], lease_seconds: float, seconds: float
) -> None:
    """Seconds since it was asked for; where machines do not end themselves for good, it may have been there until
    now.
    """
    its, now = intent(1, cloud_id="a", age_seconds=0, **known), START + timedelta(seconds=10**5)
    pool = entry(lease_seconds=lease_seconds)
    assert paid_until(SelfEndingProvider(folder="/nowhere"), pool, its, now) == START + timedelta(seconds=seconds)
    assert paid_until(CLOUD, pool, its, now) == now


@pytest.mark.parametrize(
    "is_alone", [True, False], ids=["nothing of the pool is left", "another machine of the pool runs"]
)
def test_a_sweep_that_comes_late_bills_no_machine_that_is_gone(
    ledger: Ledger, tmp_path: Path, hands: Time, is_alone: bool
) -> None:
    """Its guard has ended it when the lease ran out, 62 hours ago; one that still runs is billed until the sweep ends
    it.
    """
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


def test_what_was_asked_to_end_was_not_terminating_until_a_late_sweep(
    ledger: Ledger, tmp_path: Path, hands: Time
) -> None:
    """Its owner had asked for its end, and was killed before it saw it gone."""
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


def test_where_machines_are_paid_for_when_they_are_off_a_sweep_bills_all_the_time(world: World) -> None:
    """It may have been there until a moment ago, when somebody has terminated it by hand."""
    (gone,) = world.rent(world.pool())
    world.provider.terminate([gone.id])
    world.hands.go(3600)
    world.sweep()
    (its,) = world.ledger.intents()
    assert sum(its.seconds.values()) == pytest.approx(3600, abs=0.01)
    assert "estimated" not in str(its.evidence)


@pytest.mark.parametrize(
    ("wish", "is_sure"),
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
def test_who_ends_for_good(wish: dict[str, Any], is_sure: bool) -> None:
    """Where an end of its own leaves a machine that is off and paid for, nothing is said."""
    assert load(wish).ends_for_good() is is_sure


def test_a_launch_that_never_was_costs_nothing(world: World) -> None:
    """Its entry is closed once the provider has listed nothing for as long as the call may still have been at work."""
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


def test_a_machine_that_is_listed_late_is_ended_late(ledger: Ledger, tmp_path: Path, hands: Time) -> None:
    """The owner was killed in the middle of the launch: its machine turns up 60 s later, and is waited for."""
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


def test_an_answer_that_is_listed_is_not_waited_for(world: World) -> None:
    """What was asked for is there: no other can come of it."""
    pool = world.pool()
    world.intend(pool, 2)
    world.launch(pool, 2)
    world.end(pool)
    assert world.ids() == set()
    assert world.hands.paused == 0


def test_machines_that_are_processes_are_not_waited_for(ledger: Ledger, tmp_path: Path, hands: Time) -> None:
    """A launch that was killed with its process has launched nothing later."""
    world = of_kind(FakeProvider, ledger, tmp_path, hands)
    pool = world.pool()
    world.intend(pool)
    world.end(pool)
    assert hands.paused == 0
    assert ledger.pools() == []


def test_what_has_no_entry_gets_one(world: World) -> None:
    """Two machines came of one call that was tried again: the second is written down too, ended, and paid for."""
    pool = world.pool()
    world.intend(pool)
    both = {world.launch(pool)[0].id, world.launch(pool)[0].id}
    world.ledger.condemn(pool, seen=world.hands.now + timedelta(seconds=120))
    world.end(pool)
    assert {its.cloud_id for its in world.ledger.intents()} == both
    assert world.ledger.open_intents() == []
    assert world.ids() == set()


def test_an_entry_that_was_closed_too_early_is_opened_and_closed_again(world: World) -> None:
    """It was said that nothing came of it; then its machine turns up."""
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
    """The first evidence stands."""
    pool = world.pool()
    world.rent(pool, 2)
    world.end(pool)
    before = world.ledger.intents(), world.ledger.pools(include_ended=True)
    world.hands.go(5)
    world.end(pool, "it is said again")
    assert (world.ledger.intents(), world.ledger.pools(include_ended=True)) == before


def test_what_cannot_be_ended_stays_open(ledger: Ledger, tmp_path: Path, hands: Time) -> None:
    """InstancesLeft names it; entry and pool stay open for the next sweep, and that the end was asked for is written
    down.
    """
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
    """Ends no machine, and leaves `fake-0` out of its listings while `forgets` is set."""

    name: ClassVar[str] = "forgetful"
    _listings: list[bool] = PrivateAttr(default_factory=list[bool])

    def forget_in(self, listings: Sequence[bool]) -> None:
        """Set for the next listings whether each lacks `fake-0`."""
        self._listings[:] = listings

    def instances(self, pool_id: str | None = None) -> list[Instance]:
        forgets = bool(self._listings) and self._listings.pop(0)
        return [one for one in super().instances(pool_id) if not (forgets and one.id == "fake-0")]


def test_a_machine_that_is_listed_again_is_not_recorded_as_gone(ledger: Ledger, tmp_path: Path, hands: Time) -> None:
    """One listing lacks a machine and the next has it: it still runs, so InstancesLeft names it and its entry stays
    open.
    """
    world = of_kind(ForgetfulProvider, ledger, tmp_path, hands)
    pool = world.pool()
    forgotten, other = (instance.id for instance in world.rent(pool, 2))
    assert isinstance(world.provider, ForgetfulProvider)
    world.provider.forget_in([False, True])
    with pytest.raises(InstancesLeft) as caught:
        world.end(pool)
    assert set(caught.value.ids) == {forgotten, other}
    assert {its.cloud_id for its in ledger.open_intents()} == {forgotten, other}


def test_an_account_gets_back_what_was_not_spent(world: World) -> None:
    """The dead pool's reservations are settled with what its machines have cost."""
    world.ledger.set_account(Account("team", Decimal(100), Period.RUN))
    pool = world.pool(account="team")
    world.ledger.reserve("team", pool, Decimal(60))
    world.rent(pool, 2)
    world.hands.go(100)
    world.end(pool)
    assert world.ledger.left_usd("team", pool) == Decimal(100) - 2 * Decimal(36) * 100 / 3600


def test_other_things_keep_the_pool_open(world: World) -> None:
    """A thing that is no machine is not called gone, and so the pool is not over."""
    pool = world.pool()
    world.ledger.intend(pool, replace(world.wish(pool, 0), kind=ResourceKind.OTHER, token="key"))
    world.rent(pool)
    world.end(pool)
    assert [its.kind for its in world.ledger.open_intents()] == [ResourceKind.OTHER]
    assert [found.id for found in world.ledger.pools()] == [pool]


class FailingLedger:
    """A ledger whose verbs fail from the one on that is named; the machines must not run on for it."""

    def __init__(self, ledger: Ledger, fails: Sequence[str], times: int = 1_000_000) -> None:
        self._ledger, self._fails, self._times = ledger, fails, times

    def __getattr__(self, name: str) -> Any:
        verb = getattr(self._ledger, name)

        def failing(*args: Any, **keywords: Any) -> Any:
            if name in self._fails and self._times > 0:
                self._times -= 1
                raise LedgerError("the disk is full")
            return verb(*args, **keywords)

        return failing


VERBS = ["pool", "intents", "bind", "ask_end_all", "close_all", "open_intents", "end_pools"]


@pytest.mark.parametrize("verb", VERBS)
def test_machines_are_ended_though_the_ledger_fails(world: World, verb: str) -> None:
    """At whatever verb it fails, the machines are given back first and the error is raised then; a sweep finishes the
    entries.
    """
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
    """When the machines are gone all of it is written again, from the beginning."""
    pool = world.pool()
    instances = world.rent(pool)
    world.intend(pool, 1, first=1)
    instances += world.launch(pool, 1, first=1)
    failing: Any = FailingLedger(world.ledger, [verb], times=1)
    try:
        end_pool(failing, world.provider, pool, why="its owner is dead", **world.hands.keywords)
    except LedgerError:
        # these are made when the machines are gone: who called tries again
        assert verb in ("close_all", "open_intents", "end_pools")
        world.end(pool)
    assert {its.cloud_id for its in world.ledger.intents()} == {instance.id for instance in instances}
    assert world.ledger.pools() == []


def test_machines_are_ended_without_any_ledger(world: World) -> None:
    """The tags tell enough; and as nobody knows what was asked for, the provider is asked for a while."""
    world.launch("sky-1", 2)
    end_pool(None, world.provider, "sky-1", why="its owner is dead", **world.hands.keywords)
    assert world.ids() == set()
    assert world.hands.paused >= 10


def test_a_live_pool_can_be_stopped_on_purpose(world: World) -> None:
    """Its owner learns of it when it renews; a machine that it had just asked for goes too."""
    pool = world.pool(owner=HERE)
    world.rent(pool, 2, owner=HERE)
    release(pool, ledger=world.ledger, credentials=world.provider, **world.hands.keywords)
    assert world.ids() == set()
    assert world.ledger.pools() == []
    with pytest.raises(LeaseLost):
        world.ledger.renew(pool, world.hands.now + timedelta(hours=1))
    with pytest.raises(LeaseLost):
        world.intend(pool, 1, first=2)


def test_a_lease_is_enough_to_stop_a_pool(tmp_path: Path, hands: Time) -> None:
    """Without a ledger, from any process; twice is silent."""
    provider = CloudProvider(folder=str(tmp_path))
    offer = provider.offers(Requirements())[0]
    provider.launch(offer, 2, {POOL_TAG: "sky-1"}, "")
    provider.launch(offer, 1, {POOL_TAG: "sky-other"}, "")
    lease = Lease(pool_id="sky-1", provider=provider.to_json(), created_at=START)
    for _ in range(2):
        release(lease, ledger=None, credentials=provider, **hands.keywords)
    assert {instance.pool_id for instance in provider.instances()} == {"sky-other"}


def test_what_nobody_knows_cannot_be_stopped(ledger: Ledger, tmp_path: Path, hands: Time) -> None:
    """A pool that is not in the ledger, and one whose machines are processes of another host: the message says what to
    do.
    """
    with pytest.raises(BadRequest, match="skyward ps --all"):
        release("sky-nowhere", ledger=ledger)
    world = of_kind(FakeProvider, ledger, tmp_path, hands)
    pool = world.pool(owner=ELSEWHERE)
    with pytest.raises(BadRequest, match=r"elsewhere.*stop it there"):
        release(pool, ledger=ledger, credentials=world.provider)
    assert [found.id for found in ledger.pools()] == [pool]


# ── all pools ────────────────────────────────────────────────────────────────────────────────────────────────────────


def actions(report: Any) -> list[tuple[str, str]]:
    return [(finding.action.value, finding.pool_id) for finding in report.findings]


def test_a_dry_run_tells_and_does_nothing(world: World) -> None:
    """It is the default; what it says is what the real one does."""
    dead = world.pool("sky-dead")
    world.rent(dead, 2)
    world.rent(world.pool("sky-live", HERE), 1, owner=HERE)
    before = world.ids(), world.ledger.open_intents(), world.ledger.pools()
    told = sweep(world.ledger, [world.provider], **world.hands.keywords)
    assert actions(told) == [("end", "sky-dead"), ("leave", "sky-live")]
    assert (world.ids(), world.ledger.open_intents(), world.ledger.pools()) == before
    assert told.ended == ()
    assert [finding.pool_id for finding in told.to_do] == ["sky-dead"]
    done = world.sweep()
    assert actions(done) == actions(told)
    assert done.ended == told.findings[:1]
    assert {instance.pool_id for instance in world.provider.instances()} == {"sky-live"}
    assert actions(world.sweep()) == [("leave", "sky-live")]


def test_a_sweep_finds_providers_in_the_ledger(
    ledger: Ledger, tmp_path: Path, hands: Time, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Nobody need name them: entries tell which. One that cannot be loaded is told, and stops nothing."""
    folders = {"name": "folder", "folder": str(tmp_path)}
    monkeypatch.setattr(
        survey, "load", lambda wish: FolderProvider(folder=wish["folder"]) if wish["name"] == "folder" else load(wish)
    )
    world = World(ledger, FolderProvider(folder=str(tmp_path)), hands)
    world.rent(world.pool("sky-folder"), 2)
    ledger.open_pool("sky-odd", owner=DEAD, provider={"name": "nonesuch"}, spec_json="{}", lease_expires_at=hands.now)
    assert world.provider.to_json() == folders
    report = sweep(ledger, is_dry_run=False, **hands.keywords)
    assert [failure.provider for failure in report.failures] == ["nonesuch"]
    assert "no provider is called 'nonesuch'" in str(report.failures[0])
    assert [finding.pool_id for finding in report.ended] == ["sky-folder"]
    assert [found.id for found in ledger.pools()] == ["sky-odd"]
    assert world.ids() == set()


def test_a_provider_that_cannot_list_is_left_alone(ledger: Ledger, tmp_path: Path, hands: Time) -> None:
    """Nothing of it is closed or ended on the strength of what could not be seen; the other providers are swept."""
    blind = of_kind(BlindProvider, ledger, tmp_path / "blind", hands)
    seeing = of_kind(CloudProvider, ledger, tmp_path / "seeing", hands)
    blind.rent(blind.pool("sky-blind"))
    seeing.rent(seeing.pool("sky-seeing"))
    hands.go(1000)
    report = sweep(ledger, [blind.provider, seeing.provider], is_dry_run=False, **hands.keywords)
    assert [(failure.provider, str(failure.error)) for failure in report.failures] == [("fake", "503 from the listing")]
    assert [finding.pool_id for finding in report.ended] == ["sky-seeing"]
    assert [its.pool_id for its in ledger.open_intents()] == ["sky-blind"]
    assert [(found.id, found.condemned_at) for found in ledger.pools()] == [("sky-blind", None)]
    assert blind.provider.machines.terminated == []


def test_one_that_does_not_go_stops_no_other(ledger: Ledger, tmp_path: Path, hands: Time) -> None:
    """InstancesLeft of one pool is in the report; the next sweep asks again."""
    stuck = of_kind(StuckProvider, ledger, tmp_path / "stuck", hands)
    other = of_kind(FlakyProvider, ledger, tmp_path / "other", hands)
    for world in (stuck, other):
        world.rent(world.pool(f"sky-{type(world.provider).__name__}"))
    waited = threading.local()  # each pool is ended in a thread of its own, and waits by a clock of its own

    def pause(seconds: float) -> None:
        waited.seconds = getattr(waited, "seconds", 0.0) + seconds

    report = sweep(
        ledger,
        [stuck.provider, other.provider],
        is_dry_run=False,
        clock=hands,
        monotonic=lambda: getattr(waited, "seconds", 0.0),
        pause=pause,
    )
    (failure,) = report.failures
    assert failure.pool_id == "sky-StuckProvider"
    assert isinstance(failure.error, InstancesLeft)
    assert other.ids() == set()
    assert [its.pool_id for its in ledger.open_intents()] == ["sky-StuckProvider"]
    assert actions(sweep(ledger, [stuck.provider], **hands.keywords)) == [("end", "sky-StuckProvider")]


def test_an_owner_that_comes_back_in_time_keeps_its_machines(world: World, monkeypatch: pytest.MonkeyPatch) -> None:
    """The lease was renewed between the look and the condemnation: the sweep leaves the pool."""
    pool = world.pool(owner=ELSEWHERE, lease_seconds=-1)
    world.rent(pool, owner=ELSEWHERE)
    listing = CloudProvider.instances

    def slowly(self: CloudProvider, pool_id: str | None = None) -> list[Instance]:
        world.ledger.renew(pool, world.hands.now + timedelta(seconds=60))
        return listing(self, pool_id)

    monkeypatch.setattr(CloudProvider, "instances", slowly)
    report = world.sweep()
    assert [(finding.action, finding.reason) for finding in report.findings] == [
        (Action.LEAVE, "its lease was renewed while the sweep looked")
    ]
    assert world.provider.machines.terminated == []
    assert world.ledger.pools()[0].condemned_at is None


def test_what_was_launched_for_the_dead_is_waited_for_by_the_next_sweep(
    ledger: Ledger, tmp_path: Path, hands: Time
) -> None:
    """The first one condemns the pool and waits for nothing; when a listing must show the machine, another ends it, or
    closes what never was.
    """
    LaggingProvider.clock = hands
    world = of_kind(LaggingProvider, ledger, tmp_path, hands)
    for pool_id in ("sky-came", "sky-never"):
        world.intend(world.pool(pool_id))
    world.launch("sky-came")
    assert actions(world.sweep()) == [("wait", "sky-came"), ("wait", "sky-never")]
    assert hands.paused == 0
    assert all(found.condemned_at for found in ledger.pools())
    hands.go(60)
    assert actions(world.sweep()) == [("end", "sky-came"), ("close", "sky-never")]
    assert world.provider.machines.running == {}
    assert (ledger.open_intents(), ledger.pools()) == ([], [])


def test_a_live_pool_gets_its_lost_answer(world: World) -> None:
    """The machine is bound to its entry, and nothing else happens to it."""
    pool = world.pool(owner=HERE)
    (its,) = world.intend(pool, owner=HERE)
    (instance,) = world.launch(pool, owner=HERE)
    assert actions(world.sweep()) == [("adopt", pool)]
    assert [(found.id, found.cloud_id) for found in world.ledger.open_intents()] == [(its.id, instance.id)]
    assert world.ids() == {instance.id}


def test_what_no_ledger_knows_is_swept_by_its_tags(world: World) -> None:
    """The ledger was lost: old machines of a dead owner are ended, young ones and somebody else's are left; with
    `include_unknown` all of the latter go.
    """
    world.launch("sky-dead")
    world.launch("sky-theirs", owner=ELSEWHERE)
    world.launch("sky-mine", owner=HERE)
    assert {action for action, _ in actions(world.sweep())} == {"leave"}
    world.hands.go(601)
    for keep in (world.ledger, None):
        assert actions(sweep(keep, [world.provider], **world.hands.keywords)) == [
            ("end", "sky-dead"),
            ("leave", "sky-mine"),
            ("leave", "sky-theirs"),
        ]
    world.sweep()
    assert {instance.pool_id for instance in world.provider.instances()} == {"sky-mine", "sky-theirs"}
    sweep(None, [world.provider], is_dry_run=False, include_unknown=True, **world.hands.keywords)
    assert {instance.pool_id for instance in world.provider.instances()} == {"sky-mine"}
    assert world.hands.paused < 1


def test_machines_of_a_pool_that_has_ended_are_ended(world: World) -> None:
    """Its entries are closed, and yet a machine is listed: gone, and then back."""
    pool = world.pool()
    world.rent(pool)
    world.ledger.close_all([world.ledger.open_intents()[0].id], "cloud lists it no more")
    world.ledger.end_pool(pool)
    report = world.sweep()
    assert actions(report) == [("end", pool)]
    assert world.ids() == set()
    assert world.ledger.open_intents() == []


def test_the_same_machines_by_two_settings_are_judged_once(ledger: Ledger, tmp_path: Path, hands: Time) -> None:
    """A provider that is named twice, with other settings, lists the same machines; those of a pool are judged by the
    settings it was opened with.
    """
    world = of_kind(CloudProvider, ledger, tmp_path, hands)
    twin = CloudProvider(folder=str(tmp_path), price_per_hour=1.0)
    twin._machines = world.provider.machines
    world.rent(world.pool())
    world.launch("sky-stranger")
    hands.go(1000)
    report = sweep(ledger, [twin, world.provider], is_dry_run=False, **hands.keywords)
    assert sorted(actions(report)) == [("end", "sky-1"), ("end", "sky-stranger")]
    assert report.failures == ()
    alone = of_kind(CloudProvider, ledger, tmp_path / "alone", hands)
    alone.rent(alone.pool("sky-2"))
    twin._machines = alone.provider.machines
    report = sweep(ledger, [twin], is_dry_run=False, **hands.keywords)
    assert actions(report) == [("leave", "sky-2")]


def test_a_ledger_that_cannot_be_written_to_ends_nothing_of_its_pools(world: World) -> None:
    """Nobody is ended who was not condemned; strangers are. The others are not tried, for each would wait as long."""
    for number in range(3):
        world.rent(world.pool(f"sky-{number}"))
    world.launch("sky-stranger")
    world.hands.go(1000)
    failing: Any = FailingLedger(world.ledger, ["condemn_all"])
    report = sweep(failing, [world.provider], is_dry_run=False, **world.hands.keywords)
    assert len(report.failures) == 1
    assert [finding.pool_id for finding in report.ended] == ["sky-stranger"]
    assert {instance.pool_id for instance in world.provider.instances()} == {"sky-0", "sky-1", "sky-2"}


def test_a_ledger_that_cannot_be_read_ends_nothing(world: World) -> None:
    """Without it every live pool would be a stranger."""
    failing: Any = FailingLedger(world.ledger, ["open_intents"])
    world.launch("sky-stranger")
    world.hands.go(1000)
    with pytest.raises(LedgerError):
        sweep(failing, [world.provider], is_dry_run=False, **world.hands.keywords)
    assert world.provider.machines.terminated == []


# ── several at once, and many ────────────────────────────────────────────────────────────────────────────────────────


def real_world(tmp_path: Path) -> tuple[World, Time]:
    class Now(Time):
        def __call__(self) -> datetime:
            return datetime.now(UTC)

    hands = Now()
    (tmp_path / "machines").mkdir()
    provider = FolderProvider(folder=str(tmp_path / "machines"))
    world = World(Ledger(f"sqlite:///{tmp_path / 'ledger.db'}"), provider, hands)
    hands.now = datetime.now(UTC)
    return world, hands


SWEEPER = """
import sys
from skyward_core.ledger.ledger import Ledger
from skyward_core.cleanup.sweep import sweep
from tests.cleanup.test_sweep import FolderProvider
with Ledger(sys.argv[1]) as ledger:
    report = sweep(ledger, [FolderProvider(folder=sys.argv[2])], is_dry_run=False)
for failure in report.failures:
    print(failure)
"""


@pytest.mark.slow
def test_several_sweeps_at_once_end_the_dead_and_touch_no_living(tmp_path: Path) -> None:
    """Four threads and two processes sweep the same ledger while a live pool renews its lease and launches: no failure,
    nothing dead is left, nothing live is asked to end.
    """
    world, _ = real_world(tmp_path)
    with world.ledger:
        for number in range(20):
            world.rent(world.pool(f"sky-dead-{number:02}", lease_seconds=-60), 3)
            world.intend(f"sky-dead-{number:02}", 1, first=3)
        live = world.pool("sky-live", HERE)
        over = threading.Event()
        mine: list[str] = []

        def keep() -> None:
            rank = 0
            while not over.is_set():
                world.ledger.renew(live, datetime.now(UTC) + timedelta(seconds=120))
                mine.extend(instance.id for instance in world.rent(live, 1, rank, HERE))
                rank += 1

        with ThreadPoolExecutor(5) as threads:
            keeping = threads.submit(keep)
            command = [
                sys.executable,
                "-c",
                SWEEPER,
                world.ledger.url.render_as_string(hide_password=False),
                world.provider.folder,
            ]
            others = [subprocess.Popen(command, cwd=ROOT, stdout=subprocess.PIPE, text=True) for _ in range(2)]
            reports = list(threads.map(lambda _: sweep(world.ledger, [world.provider], is_dry_run=False), range(4)))
            told = [other.communicate(timeout=110)[0] for other in others]
            over.set()
            keeping.result()
        assert told == ["", ""]
        assert [other.returncode for other in others] == [0, 0]
        assert [failure for report in reports for failure in report.failures] == []
        assert {instance.pool_id for instance in world.provider.instances()} == {"sky-live"}
        assert world.ids() == set(mine)
        assert {its.cloud_id for its in world.ledger.open_intents()} == set(mine)
        assert [found.id for found in world.ledger.pools()] == ["sky-live"]
        ended = (tmp_path / "machines" / "log").read_text().split()
        assert not set(ended) & set(mine)
        closed = [its for its in world.ledger.intents() if its.pool_id != "sky-live"]
        assert all(
            abs(sum(its.seconds.values()) - life(its, datetime.now(UTC))) < 0.002 for its in closed if its.cloud_id
        )


@pytest.mark.slow
@pytest.mark.parametrize(("pools", "nodes"), [(1, 1000), (1000, 1)])
@pytest.mark.parametrize("left", ["listed", "gone", "never bound"])
def test_a_thousand_open_entries_are_recovered(tmp_path: Path, hands: Time, pools: int, nodes: int, left: str) -> None:
    """Of one pool or of a thousand, whatever their machines have come to; how fast, `benchmarks/books.py` says."""
    with Ledger(f"sqlite:///{tmp_path / 'ledger.db'}", clock=hands) as ledger:
        world = of_kind(CloudProvider, ledger, tmp_path, hands)
        for number in range(pools):
            pool = world.pool(f"sky-{number:04}")
            if left == "never bound":
                world.intend(pool, nodes)
            else:
                world.rent(pool, nodes)
        if left == "gone":
            world.provider.machines.running.clear()
        hands.go(1000)
        report = world.sweep()
        assert report.failures == ()
        assert world.ids() == set()
        assert (ledger.open_intents(), ledger.pools()) == ([], [])
