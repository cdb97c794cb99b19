"""Sweeping all pools: of several providers, by several processes at once, and with a ledger that fails."""

import subprocess
import sys
import threading
from concurrent.futures import ThreadPoolExecutor
from datetime import UTC, datetime, timedelta
from pathlib import Path

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from skyward_core.cleanup.policy import Action, ProviderFacts, decide
from skyward_core.cleanup.sweep import sweep
from skyward_core.ledger.ledger import Ledger
from skyward_core.ledger.rows import ResourceKind
from skyward_core.providers.base import CREATED_TAG, EXPIRES_TAG, LAUNCH_TAG, PROCESS_TAG
from tests.cleanup.pools import (
    CLOUD,
    DEAD,
    ELSEWHERE,
    HERE,
    ROOT,
    START,
    STATES,
    CloudProvider,
    FolderProvider,
    LaggingProvider,
    Time,
    World,
    entry,
    intent,
    life,
    machine,
    of_kind,
    owner_tags,
)
from tests.conftest import examples
from tests.fakes import FakeProvider

SWEEPER = """
import sys
from skyward_core.ledger.ledger import Ledger
from skyward_core.cleanup.sweep import sweep
from tests.cleanup.pools import FolderProvider
with Ledger(sys.argv[1]) as ledger:
    report = sweep(ledger, [FolderProvider(folder=sys.argv[2])], is_dry_run=False)
for failure in report.failures:
    print(failure)
"""


def test_several_sweeps_at_once_end_dead_pools_only(tmp_path: Path) -> None:
    (tmp_path / "machines").mkdir()
    hands = Time()
    hands.now = datetime.now(UTC)
    provider = FolderProvider(folder=str(tmp_path / "machines"))
    world = World(Ledger(f"sqlite:///{tmp_path / 'ledger.db'}"), provider, hands)
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
            url = world.ledger.url.render_as_string(hide_password=False)
            command = [sys.executable, "-c", SWEEPER, url, provider.folder]
            others = [subprocess.Popen(command, cwd=ROOT, stdout=subprocess.PIPE, text=True) for _ in range(2)]
            reports = list(threads.map(lambda _: sweep(world.ledger, [world.provider], is_dry_run=False), range(4)))
            outputs = [other.communicate(timeout=110)[0] for other in others]
            over.set()
            keeping.result()
        assert outputs == ["", ""]
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


@pytest.mark.parametrize(("pools", "nodes"), [(1, 1000), (1000, 1)])
@pytest.mark.parametrize("left", ["listed", "gone", "never bound"])
def test_a_thousand_open_entries_are_handled(tmp_path: Path, hands: Time, pools: int, nodes: int, left: str) -> None:
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


machine_ids = st.sampled_from([f"m{number}" for number in range(8)])
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
def provider_facts(draw: st.DrawFn) -> ProviderFacts:
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
    return ProviderFacts(provider, machines, pools, intents, START, HERE, STATES)


@pytest.mark.generated
@settings(max_examples=examples(1500), deadline=None, suppress_health_check=[HealthCheck.too_slow])
@given(facts=provider_facts(), min_age=st.sampled_from([0.0, 600.0]), unknown=st.booleans())
def test_each_machine_has_one_finding_and_ends_only_with_evidence(
    facts: ProviderFacts, min_age: float, unknown: bool
) -> None:
    findings = decide(facts, min_age_seconds=min_age, include_unknown=unknown)
    assert findings == decide(facts, min_age_seconds=min_age, include_unknown=unknown)
    assert all(finding.reason for finding in findings)
    harmful = [finding for finding in findings if finding.action in (Action.END, Action.CLOSE, Action.WAIT)]
    listed = {found.id: found for found in facts.machines}
    for finding in harmful:
        pool = facts.pools.get(finding.pool_id)
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
    by_number = {its.id: its for its in facts.intents}
    for finding in findings:
        if finding.action is Action.CLOSE:
            assert not any(
                by_number[number].cloud_id in {found.id for found in facts.machines if found.pool_id == finding.pool_id}
                for number in finding.intents
            )
    found = [
        instance_id
        for finding in findings
        for instance_id in set(finding.resource_ids)
        if instance_id in listed and listed[instance_id].pool_id == finding.pool_id
    ]
    assert sorted(found) == sorted(listed)
    of_the_dead = [
        its.id
        for its in facts.intents
        if facts.pools[its.pool_id].why_dead(START, STATES[facts.pools[its.pool_id].owner])
    ]
    assert (
        sorted(number for finding in findings if finding.action is not Action.ADOPT for number in finding.intents)
        == of_the_dead
    )
