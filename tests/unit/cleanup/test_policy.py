"""The policy of the sweep ends dead pools, leaves live pools, and reports machines of which it cannot decide."""

from collections.abc import Sequence
from dataclasses import replace
from datetime import timedelta
from typing import Any

import pytest
from hypothesis import strategies as st

from skyward_core import Instance, Provider
from skyward_core.cleanup.policy import Action, ProviderFacts, decide
from skyward_core.ledger.rows import Intent, PoolEntry, ResourceKind
from skyward_core.providers.base import CREATED_TAG, EXPIRES_TAG, LAUNCH_TAG, PROCESS_TAG
from tests.cleanup.pools import (
    CLOUD,
    DEAD,
    ELSEWHERE,
    HERE,
    START,
    STATES,
    LaggingProvider,
    entry,
    intent,
    machine,
    owner_tags,
)
from tests.fakes import FakeProvider


def verdicts(
    machines: Sequence[Instance] = (),
    pools: Sequence[PoolEntry] = (),
    intents: Sequence[Intent] = (),
    provider: Provider = CLOUD,
    **how: Any,
) -> list[tuple[str, str, tuple[str, ...]]]:
    facts = ProviderFacts(provider, machines, {pool.id: pool for pool in pools}, intents, START, HERE, STATES)
    return [(finding.action.value, finding.pool_id, finding.resource_ids) for finding in decide(facts, **how)]


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
def test_a_machine_is_ended_only_if_its_pool_is_certainly_dead(pool: PoolEntry, is_dead: bool) -> None:
    """Otherwise it stays."""
    found = verdicts([launched("m")], [pool], [intent(1, cloud_id="m")])
    assert found == [("end" if is_dead else "leave", "sky-1", ("m",))]


def test_a_machine_whose_launch_was_not_answered_is_adopted() -> None:
    pool = entry(owner=HERE)
    assert verdicts([launched("m", 1)], [pool], [intent(1, rank=0), intent(2, rank=1)]) == [("adopt", "sky-1", ("m",))]
    assert verdicts([launched("m", 1, launch="sky-1-2")], [pool], [intent(1, rank=1)]) == [("leave", "sky-1", ("m",))]
    assert verdicts([launched("m", launch=None)], [pool], [intent(1)]) == [("adopt", "sky-1", ("m",))]


def test_a_machine_without_a_certain_entry_is_not_adopted() -> None:
    pool = entry(owner=HERE)
    assert verdicts([launched("a"), launched("b")], [pool], [intent(1)]) == [("leave", "sky-1", ("a", "b"))]
    assert verdicts([launched("a", launch=None)], [pool], [intent(1), intent(2)]) == [("leave", "sky-1", ("a",))]


def test_an_entry_is_closed_only_when_its_machine_must_be_listed() -> None:
    lagging = LaggingProvider(folder="/nowhere")
    dead = entry(lease_seconds=-1000)
    assert verdicts([], [dead], [intent(1, cloud_id="m", age_seconds=59)], lagging) == [("end", "sky-1", ("m",))]
    assert verdicts([], [dead], [intent(1, cloud_id="m", age_seconds=60)], lagging) == [("close", "sky-1", ("m",))]
    assert verdicts([], [dead], [intent(1, age_seconds=59)], lagging) == [("wait", "sky-1", ("sky-1-0",))]
    assert verdicts([], [dead], [intent(1, age_seconds=60)], lagging) == [("close", "sky-1", ("sky-1-0",))]


def test_a_launch_may_come_until_its_owner_was_condemned() -> None:
    assert verdicts([], [entry(owner=DEAD)], [intent(1)]) == [("wait", "sky-1", ("sky-1-0",))]
    barred = START - timedelta(seconds=9)
    assert verdicts([], [entry(owner=DEAD, condemned_at=barred)], [intent(1)]) == [("wait", "sky-1", ("sky-1-0",))]
    assert verdicts([], [entry(owner=DEAD, condemned_at=barred - timedelta(seconds=1))], [intent(1)]) == [
        ("close", "sky-1", ("sky-1-0",))
    ]
    assert verdicts([], [entry(owner=ELSEWHERE, lease_seconds=-10)], [intent(1)]) == [("close", "sky-1", ("sky-1-0",))]


def test_a_dead_pool_without_machines_is_closed() -> None:
    assert verdicts([], [entry()]) == [("close", "sky-1", ())]
    assert verdicts([], [entry(ended_at=START)]) == []
    assert verdicts([], [entry(owner=HERE)]) == []


def test_a_resource_that_is_no_machine_stays_open_with_a_reason() -> None:
    others = [intent(1, kind=ResourceKind.OTHER), intent(2, kind=ResourceKind.OTHER, cloud_id="volume-2")]
    (finding,) = decide(ProviderFacts(CLOUD, [], {"sky-1": entry()}, others, START, HERE, STATES))
    assert finding.action is Action.LEAVE
    assert "a sweep ends machines only" in finding.reason
    assert finding.resource_ids == ("sky-1-0", "volume-2")
    assert finding.intents == (1, 2)


def test_each_finding_names_the_entries_that_it_is_about() -> None:
    its = [
        intent(1, rank=0, cloud_id="listed"),
        intent(2, rank=1),
        intent(3, rank=2, cloud_id="too young to be listed", age_seconds=30),
        intent(4, rank=3, age_seconds=30),
        intent(5, rank=4, cloud_id="gone"),
    ]
    machines = [launched("listed", 0), launched("answered", 1)]
    lagging = LaggingProvider(folder="/nowhere")
    facts = ProviderFacts(lagging, machines, {"sky-1": entry(lease_seconds=-1000)}, its, START, HERE, STATES)
    assert [(found.action.value, found.resource_ids, found.intents) for found in decide(facts)] == [
        ("end", ("answered", "listed", "too young to be listed"), (1, 2, 3)),
        ("wait", ("sky-1-3",), (4,)),
        ("close", ("gone",), (5,)),
    ]


def test_a_listing_may_lack_a_machine_counted_from_when_its_id_was_known() -> None:
    lagging = LaggingProvider(folder="/nowhere")
    late = intent(1, cloud_id="m", age_seconds=1000, bound_at=START - timedelta(seconds=30))
    assert verdicts([], [entry(lease_seconds=-1000)], [late], lagging) == [("end", "sky-1", ("m",))]


def test_no_launch_of_a_dead_process_on_this_host_comes_late() -> None:
    """A machine that is a process here is listed as soon as it runs, so that a dead pool's entries close at once."""
    local = FakeProvider(folder="/nowhere")
    assert verdicts([], [entry(owner=DEAD)], [intent(1)], local) == [("close", "sky-1", ("sky-1-0",))]


def test_machines_that_are_not_visible_from_here_are_named() -> None:
    local = FakeProvider(folder="/nowhere")
    pool = entry(owner=ELSEWHERE, lease_seconds=-1000)
    its = [intent(1, rank=0, cloud_id="bound"), intent(2, rank=1)]
    facts = ProviderFacts(local, [launched("listed", 2)], {"sky-1": pool}, its, START, HERE, STATES)
    (finding,) = decide(facts)
    assert (finding.action, finding.resource_ids) == (Action.LEAVE, ("bound", "listed", "sky-1-1"))
    assert finding.intents == (1, 2)


def test_the_machines_of_a_live_pool_that_are_adopted_are_not_left_as_well() -> None:
    its = [intent(1, rank=0, cloud_id="known"), intent(2, rank=1)]
    machines = [launched("known", 0), launched("new", 1)]
    facts = ProviderFacts(CLOUD, machines, {"sky-1": entry(owner=HERE)}, its, START, HERE, STATES)
    assert [(found.action.value, found.resource_ids, found.intents) for found in decide(facts)] == [
        ("adopt", ("new",), (2,)),
        ("leave", ("known",), ()),
    ]


def test_each_finding_names_its_provider_and_a_reason() -> None:
    its = [
        intent(1, rank=0, cloud_id="known"),
        intent(2, rank=1),
        *(
            intent(number, "sky-2", number, kind=kind)
            for number, kind in ((3, ResourceKind.INSTANCE), (4, ResourceKind.OTHER))
        ),
    ]
    machines = [launched("known", 0), launched("new", 1), launched("m", 0, "sky-2"), launched("strange", 0, "sky-3")]
    pools = {"sky-1": entry(owner=HERE), "sky-2": entry("sky-2", lease_seconds=-1000), "sky-4": entry("sky-4")}
    facts = ProviderFacts(CLOUD, machines, pools, its, START, HERE, STATES)
    findings = decide(facts)
    assert [(found.pool_id, found.action.value) for found in findings] == [
        ("sky-1", "adopt"),
        ("sky-1", "leave"),
        ("sky-2", "leave"),
        ("sky-2", "end"),
        ("sky-2", "close"),
        ("sky-3", "leave"),
        ("sky-4", "close"),
    ]
    assert {found.provider for found in findings} == {"cloud"}
    assert all(found.reason for found in findings)


def test_a_closed_entry_does_not_hide_the_launch_that_its_machine_comes_from() -> None:
    """The machine's tags name no launch. Of two entries of its rank one is closed, so that the other is certain."""
    its = [intent(1, gone_at=START), intent(2)]
    facts = ProviderFacts(CLOUD, [launched("m", launch=None)], {"sky-1": entry(owner=HERE)}, its, START, HERE, STATES)
    (finding,) = decide(facts)
    assert (finding.action, finding.intents) == (Action.ADOPT, (2,))


def test_an_owner_of_whom_nothing_is_known_counts_as_unknown() -> None:
    nobody = replace(ELSEWHERE, host="never seen")
    its = [machine("m", "sky-x", 0, owner_tags(nobody, OLD))]
    assert verdicts(its) == [("leave", "sky-x", ("m",))]
    assert verdicts(its, include_unknown=True) == [("end", "sky-x", ("m",))]


def test_processes_of_another_host_are_not_recorded_as_gone() -> None:
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
        (owner_tags(ELSEWHERE, OLD) | {EXPIRES_TAG: str(int(START.timestamp()))}, "end", "end"),
        (owner_tags(ELSEWHERE, OLD) | {EXPIRES_TAG: str(int(START.timestamp()) + 1)}, "leave", "end"),
        (owner_tags(DEAD, OLD) | {CREATED_TAG: "yesterday"}, "leave", "end"),
        (owner_tags(ELSEWHERE, OLD) | {EXPIRES_TAG: "9" * 30, PROCESS_TAG: "?"}, "leave", "end"),
        ({}, "leave", "end"),
    ],
    ids=["dead", "young", "alive", "unknown", "expired", "expires now", "not expired", "no age", "garbage", "no tags"],
)
def test_a_machine_that_the_ledger_lacks_is_decided_by_its_tags(
    tags: dict[str, str], expected: str, if_asked_for: str
) -> None:
    its = [machine("m", "sky-x", 0, tags)]
    assert verdicts(its, min_age_seconds=600) == [(expected, "sky-x", ("m",))]
    assert verdicts(its, min_age_seconds=600, include_unknown=True) == [(if_asked_for, "sky-x", ("m",))]


@pytest.mark.parametrize(
    ("tags", "name"), [(owner_tags(ELSEWHERE, OLD), ELSEWHERE.name), ({}, "an unknown owner")], ids=["named", "no tags"]
)
def test_the_reason_names_the_owner_in_the_tags(tags: dict[str, str], name: str) -> None:
    facts = ProviderFacts(CLOUD, [machine("m", "sky-x", 0, tags)], {}, [], START, HERE, STATES)
    (finding,) = decide(facts)
    assert f"belongs to {name}" in finding.reason


def test_an_unknown_pool_is_ended_completely_or_not_at_all() -> None:
    its = [machine("a", "sky-x", 0, owner_tags(DEAD, OLD)), machine("b", "sky-x", 1, owner_tags(DEAD, START))]
    assert verdicts(its, min_age_seconds=600) == [("leave", "sky-x", ("a", "b"))]
    assert verdicts(its, min_age_seconds=0, pools=[entry("sky-1", HERE)]) == [("leave", "sky-x", ("a", "b"))]


machine_ids = st.sampled_from([f"m{number}" for number in range(8)])
