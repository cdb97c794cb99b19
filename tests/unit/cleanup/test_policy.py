"""The policy of the sweep ends dead pools, leaves live pools, and reports machines of which it cannot decide."""

from collections.abc import Sequence
from dataclasses import replace
from datetime import timedelta
from typing import Any

import pytest

from skyward_core import Instance, Provider
from skyward_core.cleanup.policy import Action, Finding, ProviderFacts, decide
from skyward_core.ledger.rows import Intent, PoolEntry, ResourceKind
from skyward_core.providers.base import CREATED_TAG, EXPIRES_TAG, LAUNCH_TAG, PROCESS_TAG
from tests.cleanup.pools import (
    CLOUD,
    DEAD,
    ELSEWHERE,
    HERE,
    START,
    STATES,
    STOPPED,
    LaggingProvider,
    entry,
    intent,
    machine,
    owner_tags,
)
from tests.fakes import FakeProvider

LAGGING, LOCAL = LaggingProvider(folder="/nowhere"), FakeProvider(folder="/nowhere")
LIVE, LONG_DEAD = entry(owner=HERE), entry(lease_seconds=-1000)
OLD = START - timedelta(hours=1)
BARRED = START - timedelta(seconds=9)


def found(
    machines: Sequence[Instance] = (),
    pools: Sequence[PoolEntry] = (),
    intents: Sequence[Intent] = (),
    provider: Provider = CLOUD,
    **how: Any,
) -> list[Finding]:
    return decide(
        ProviderFacts(provider, machines, {pool.id: pool for pool in pools}, intents, START, HERE, STATES), **how
    )


def verdicts(*facts: Any, **how: Any) -> list[tuple[str, str, tuple[str, ...]]]:
    return [(finding.action.value, finding.pool_id, finding.resource_ids) for finding in found(*facts, **how)]


def launched(instance_id: str, rank: int = 0, pool_id: str = "sky-1", launch: str | None = "sky-1-1") -> Instance:
    return machine(instance_id, pool_id, rank, {LAUNCH_TAG: launch} if launch else {})


@pytest.mark.parametrize(
    ("pool", "is_dead"),
    [
        (entry(owner=HERE), False),
        (entry(owner=ELSEWHERE), False),
        (entry(owner=DEAD), True),
        (entry(owner=DEAD, lives_by_lease=True), False),
        (entry(owner=HERE, lease_seconds=-1), False),
        (entry(owner=HERE, lives_by_lease=True, lease_seconds=0), True),
        (entry(owner=STOPPED), False),
        (entry(owner=STOPPED, lease_seconds=0), True),
        (entry(owner=ELSEWHERE, lease_seconds=-1), True),
        (entry(owner=DEAD, lives_by_lease=True, lease_seconds=-1), True),
        (entry(owner=HERE, condemned_at=START), True),
        (entry(owner=HERE, ended_at=START), True),
    ],
)
def test_a_machine_is_ended_only_if_its_pool_is_certainly_dead(pool: PoolEntry, is_dead: bool) -> None:
    """Its lease has expired and no process of this computer runs that owns it, its owner was needed and is dead, or the
    pool has ended or was condemned.
    """
    expected = [("end" if is_dead else "leave", "sky-1", ("m",))]
    assert verdicts([launched("m")], [pool], [intent(1, cloud_id="m")]) == expected


@pytest.mark.parametrize(
    ("machines", "intents", "expected"),
    [
        ([launched("m", 1)], [intent(1, rank=0), intent(2, rank=1)], [("adopt", ("m",), (2,))]),
        ([launched("m", 1, launch="sky-1-2")], [intent(1, rank=1)], [("leave", ("m",), ())]),
        ([launched("m", launch=None)], [intent(1)], [("adopt", ("m",), (1,))]),
        ([launched("m", launch=None)], [intent(1, gone_at=START), intent(2)], [("adopt", ("m",), (2,))]),
        ([launched("a"), launched("b")], [intent(1)], [("leave", ("a", "b"), ())]),
        ([launched("a", launch=None)], [intent(1), intent(2)], [("leave", ("a",), ())]),
        (
            [launched("known", 0), launched("new", 1)],
            [intent(1, rank=0, cloud_id="known"), intent(2, rank=1)],
            [("adopt", ("new",), (2,)), ("leave", ("known",), ())],
        ),
    ],
    ids=["by rank", "another launch", "no tag", "no tag, one closed", "two machines", "two entries", "one is known"],
)
def test_a_machine_of_a_live_pool_is_adopted_if_its_entry_is_certain(
    machines: list[Instance], intents: list[Intent], expected: list[Any]
) -> None:
    """Its launch was not answered. It is matched by launch and rank; if two match, only the owner can decide."""
    findings = found(machines, [LIVE], intents)
    assert [(finding.action.value, finding.resource_ids, finding.intents) for finding in findings] == expected


@pytest.mark.parametrize(
    ("pool", "its", "provider", "expected"),
    [
        (LONG_DEAD, intent(1, cloud_id="m", age_seconds=59), LAGGING, ("end", "m")),
        (LONG_DEAD, intent(1, cloud_id="m", age_seconds=60), LAGGING, ("close", "m")),
        (LONG_DEAD, intent(1, cloud_id="m", bound_at=START - timedelta(seconds=30)), LAGGING, ("end", "m")),
        (LONG_DEAD, intent(1, age_seconds=59), LAGGING, ("wait", "sky-1-0")),
        (LONG_DEAD, intent(1, age_seconds=60), LAGGING, ("close", "sky-1-0")),
        (entry(owner=DEAD), intent(1), CLOUD, ("wait", "sky-1-0")),
        (entry(owner=DEAD, condemned_at=BARRED), intent(1), CLOUD, ("wait", "sky-1-0")),
        (entry(owner=DEAD, condemned_at=BARRED - timedelta(seconds=1)), intent(1), CLOUD, ("close", "sky-1-0")),
        (entry(owner=ELSEWHERE, lease_seconds=-10), intent(1), CLOUD, ("close", "sky-1-0")),
        (entry(owner=DEAD), intent(1), LOCAL, ("close", "sky-1-0")),
    ],
)
def test_an_entry_is_closed_only_when_its_machine_must_be_listed(
    pool: PoolEntry, its: Intent, provider: Provider, expected: tuple[str, str]
) -> None:
    """A machine that a listing may still lack is ended by its id, from when that was known, or waited for. A launch may
    come until its owner was condemned, and that call may take a while; not of a dead process on this host.
    """
    action, resource = expected
    assert verdicts([], [pool], [its], provider) == [(action, "sky-1", (resource,))]


def test_a_dead_pool_without_machines_is_closed() -> None:
    """Later sweeps do not look for it again."""
    assert verdicts([], [entry()]) == [("close", "sky-1", ())]
    assert verdicts([], [entry(ended_at=START)]) == []
    assert verdicts([], [LIVE]) == []


def test_a_resource_that_is_no_machine_stays_open_with_a_reason() -> None:
    """The report names it by its id, or by its name if it has no id."""
    others = [intent(1, kind=ResourceKind.OTHER), intent(2, kind=ResourceKind.OTHER, cloud_id="volume-2")]
    (finding,) = found([], [entry()], others)
    assert finding.action is Action.LEAVE
    assert "a sweep ends machines only" in finding.reason
    assert (finding.resource_ids, finding.intents) == (("sky-1-0", "volume-2"), (1, 2))


def test_each_finding_names_the_entries_that_it_is_about() -> None:
    """Of machines that are listed or were bound just now, of launches that may still come, and of those that are gone."""
    its = [
        intent(1, rank=0, cloud_id="listed"),
        intent(2, rank=1),
        intent(3, rank=2, cloud_id="too young to be listed", age_seconds=30),
        intent(4, rank=3, age_seconds=30),
        intent(5, rank=4, cloud_id="gone"),
    ]
    findings = found([launched("listed", 0), launched("answered", 1)], [LONG_DEAD], its, LAGGING)
    assert [(finding.action.value, finding.resource_ids, finding.intents) for finding in findings] == [
        ("end", ("answered", "listed", "too young to be listed"), (1, 2, 3)),
        ("wait", ("sky-1-3",), (4,)),
        ("close", ("gone",), (5,)),
    ]


def test_machines_that_are_not_visible_from_here_are_named() -> None:
    """By their ids, or by their names if they have none, also those that a listing shows."""
    its = [intent(1, rank=0, cloud_id="bound"), intent(2, rank=1)]
    (finding,) = found([launched("listed", 2)], [entry(owner=ELSEWHERE, lease_seconds=-1000)], its, LOCAL)
    assert (finding.action, finding.resource_ids) == (Action.LEAVE, ("bound", "listed", "sky-1-1"))
    assert finding.intents == (1, 2)


def test_each_finding_names_its_provider_and_a_reason() -> None:
    """Of pools that are live or dead, and of those that the ledger does not know."""
    its = [
        intent(1, rank=0, cloud_id="known"),
        intent(2, rank=1),
        intent(3, "sky-2", 3, kind=ResourceKind.INSTANCE),
        intent(4, "sky-2", 4, kind=ResourceKind.OTHER),
    ]
    machines = [launched("known", 0), launched("new", 1), launched("m", 0, "sky-2"), launched("strange", 0, "sky-3")]
    findings = found(machines, [LIVE, entry("sky-2", lease_seconds=-1000), entry("sky-4")], its)
    assert [(finding.pool_id, finding.action.value) for finding in findings] == [
        ("sky-1", "adopt"),
        ("sky-1", "leave"),
        ("sky-2", "leave"),
        ("sky-2", "end"),
        ("sky-2", "close"),
        ("sky-3", "leave"),
        ("sky-4", "close"),
    ]
    assert {finding.provider for finding in findings} == {"cloud"}
    assert all(finding.reason for finding in findings)


def test_processes_of_another_host_are_not_recorded_as_gone() -> None:
    """Another host, user or container cannot list local machines, and root does not list those of other users. After a
    reboot of their own host they are certainly gone.
    """
    for owner in (ELSEWHERE, replace(HERE, namespace="1"), replace(HERE, user="other")):
        pool = entry(owner=owner, lease_seconds=-1000)
        assert [verdict[0] for verdict in verdicts([], [pool], [intent(1, cloud_id="m")], LOCAL)] == ["leave"]
    for user in (HERE.user, "other"):
        owner = replace(HERE, boot="before", namespace="1", user=user)
        expected = "close" if HERE.user in (user, "root") else "leave"
        pool = entry(owner=owner, lease_seconds=-1000)
        assert verdicts([], [pool], [intent(1, cloud_id="m")], LOCAL) == [(expected, "sky-1", ("m",))]


@pytest.mark.parametrize(
    ("tags", "expected", "if_asked_for"),
    [
        (owner_tags(DEAD, OLD), "end", "end"),
        (owner_tags(DEAD, START), "leave", "leave"),
        (owner_tags(HERE, OLD), "leave", "leave"),
        (owner_tags(ELSEWHERE, OLD), "leave", "end"),
        (owner_tags(replace(ELSEWHERE, host="never seen"), OLD), "leave", "end"),
        (owner_tags(ELSEWHERE, OLD) | {EXPIRES_TAG: str(int(START.timestamp()) - 1)}, "end", "end"),
        (owner_tags(ELSEWHERE, OLD) | {EXPIRES_TAG: str(int(START.timestamp()))}, "end", "end"),
        (owner_tags(ELSEWHERE, OLD) | {EXPIRES_TAG: str(int(START.timestamp()) + 1)}, "leave", "end"),
        (owner_tags(DEAD, OLD) | {CREATED_TAG: "yesterday"}, "leave", "end"),
        (owner_tags(ELSEWHERE, OLD) | {EXPIRES_TAG: "9" * 30, PROCESS_TAG: "?"}, "leave", "end"),
        ({}, "leave", "end"),
    ],
    ids=[
        "dead",
        "young",
        "alive",
        "unknown",
        "unseen",
        "expired",
        "expires now",
        "not expired",
        "no age",
        "garbage",
        "no tags",
    ],
)
def test_a_machine_that_the_ledger_lacks_is_decided_by_its_tags(
    tags: dict[str, str], expected: str, if_asked_for: str
) -> None:
    """Only old machines end, if their time has expired or their owner on this host is dead. With `include_unknown`,
    machines with an unknown owner end too.
    """
    its = [machine("m", "sky-x", 0, tags)]
    assert verdicts(its, min_age_seconds=600) == [(expected, "sky-x", ("m",))]
    assert verdicts(its, min_age_seconds=600, include_unknown=True) == [(if_asked_for, "sky-x", ("m",))]


@pytest.mark.parametrize(
    ("tags", "name"), [(owner_tags(ELSEWHERE, OLD), ELSEWHERE.name), ({}, "an unknown owner")], ids=["named", "no tags"]
)
def test_the_reason_names_the_owner_in_the_tags(tags: dict[str, str], name: str) -> None:
    """The user may have to ask the owner before the machine is ended."""
    (finding,) = found([machine("m", "sky-x", 0, tags)])
    assert f"belongs to {name}" in finding.reason


def test_an_unknown_pool_is_ended_completely_or_not_at_all() -> None:
    """If one machine of the pool may still be in use, all of them stay."""
    its = [machine("a", "sky-x", 0, owner_tags(DEAD, OLD)), machine("b", "sky-x", 1, owner_tags(DEAD, START))]
    assert verdicts(its, min_age_seconds=600) == [("leave", "sky-x", ("a", "b"))]
    assert verdicts(its, min_age_seconds=0, pools=[entry("sky-1", HERE)]) == [("leave", "sky-x", ("a", "b"))]
