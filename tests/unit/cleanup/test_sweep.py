"""Sweeping all pools: of several providers, by several processes at once, and with a ledger that fails."""

from datetime import datetime, timedelta
from pathlib import Path
from typing import Any, ClassVar

import pytest
from pydantic import PrivateAttr

from skyward_core import Instance
from skyward_core.cleanup.policy import Action
from skyward_core.cleanup.sweep import RENEWAL_SECONDS, sweep
from skyward_core.errors import ProviderFailed
from skyward_core.ledger.ledger import Ledger
from tests.cleanup.pools import ELSEWHERE, HERE, START, CloudProvider, LaggingProvider, Time, World, of_kind


def actions(report: Any) -> list[tuple[str, str]]:
    return [(finding.action.value, finding.pool_id) for finding in report.findings]


def test_a_dry_run_reports_and_changes_nothing(world: World) -> None:
    dead = world.pool("sky-dead")
    world.rent(dead, 2)
    world.rent(world.pool("sky-live", HERE), 1, owner=HERE)
    before = world.ids(), world.ledger.open_intents(), world.ledger.pools()
    planned = sweep(world.ledger, [world.provider], **world.hands.keywords)
    assert actions(planned) == [("end", "sky-dead"), ("leave", "sky-live")]
    assert (world.ids(), world.ledger.open_intents(), world.ledger.pools()) == before
    assert planned.ended == ()
    assert [finding.pool_id for finding in planned.to_do] == ["sky-dead"]
    done = world.sweep()
    assert actions(done) == actions(planned)
    assert done.ended == planned.findings[:1]
    assert {instance.pool_id for instance in world.provider.instances()} == {"sky-live"}
    assert actions(world.sweep()) == [("leave", "sky-live")]


def test_an_owner_that_renews_in_time_keeps_its_machines(world: World, monkeypatch: pytest.MonkeyPatch) -> None:
    pool = world.pool(owner=ELSEWHERE, lease_seconds=-1)
    world.rent(pool, owner=ELSEWHERE)
    listing = CloudProvider.instances

    def slowly(self: CloudProvider, pool_id: str | None = None) -> list[Instance]:
        world.ledger.renew(pool, world.hands.now + timedelta(seconds=60))
        return listing(self, pool_id)

    monkeypatch.setattr(CloudProvider, "instances", slowly)
    report = world.sweep()
    assert [(finding.action, finding.reason) for finding in report.findings] == [
        (Action.LEAVE, "its lease was renewed during the sweep")
    ]
    assert world.provider.machines.terminated == []
    assert world.ledger.pools()[0].condemned_at is None


@pytest.mark.parametrize("renews", [True, False])
def test_a_lease_of_another_computer_is_looked_at_twice(world: World, *, renews: bool) -> None:
    """One of the two clocks may have been set just now: an owner that lives renews before the second look."""
    pool = world.pool(owner=ELSEWHERE, lease_seconds=-3600)
    world.rent(pool, owner=ELSEWHERE)

    def pause(seconds: float) -> None:
        world.hands.pause(seconds)
        if renews:
            world.ledger.renew(pool, world.hands.now - timedelta(seconds=3600 - 120))

    assert actions(world.sweep(pause=pause)) == [("leave" if renews else "end", pool)]
    assert world.hands.paused == RENEWAL_SECONDS
    assert bool(world.ids()) is renews
    # a process that is known to be dead, and a dry run, wait for nothing
    world.pool("sky-2", lease_seconds=-3600)
    world.sweep(is_dry_run=True)
    assert world.hands.paused == RENEWAL_SECONDS


@pytest.mark.parametrize("renews", [True, False])
def test_a_pool_that_its_running_owner_has_abandoned_is_ended(tmp_path: Path, hands: Time, *, renews: bool) -> None:
    """Such as after InstancesLeft in a process that runs for months: it has not renewed for a lease, by a clock that no
    step changes, and does not before the second look.
    """
    url = f"sqlite:///{tmp_path / 'ledger.db'}"
    with Ledger(url, clock=hands, awake=lambda: (hands.now - START).total_seconds()) as ledger:
        world = of_kind(CloudProvider, ledger, tmp_path, hands)
        pool = world.pool(owner=HERE, lease_seconds=120)
        world.rent(pool, owner=HERE)
        hands.go(121)

        def pause(seconds: float) -> None:
            hands.pause(seconds)
            if renews:
                ledger.renew(pool, hands.now + timedelta(seconds=120))

        assert actions(world.sweep(pause=pause)) == [("leave" if renews else "end", pool)]
        assert (hands.paused, bool(world.ids())) == (RENEWAL_SECONDS, renews)


def test_a_late_launch_of_a_dead_pool_is_left_to_the_next_sweep(ledger: Ledger, tmp_path: Path, hands: Time) -> None:
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


def test_a_live_pool_adopts_the_machine_of_a_lost_answer(world: World) -> None:
    pool = world.pool(owner=HERE)
    (its,) = world.intend(pool, owner=HERE)
    (instance,) = world.launch(pool, owner=HERE)
    assert actions(world.sweep()) == [("adopt", pool)]
    assert [(found.id, found.cloud_id) for found in world.ledger.open_intents()] == [(its.id, instance.id)]
    assert world.ids() == {instance.id}


def test_machines_that_no_ledger_has_are_swept_by_their_tags(world: World) -> None:
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
    pool = world.pool()
    world.rent(pool)
    world.ledger.close_all([world.ledger.open_intents()[0].id], "cloud lists it no more")
    world.ledger.end_pool(pool)
    report = world.sweep()
    assert actions(report) == [("end", pool)]
    assert world.ids() == set()
    assert world.ledger.open_intents() == []


class PruningProvider(CloudProvider):
    """Has an unused image that outlives its pools, and cannot remove it if it has a `trouble`."""

    name: ClassVar[str] = "pruning"
    trouble: str = ""
    _asked: list[tuple[datetime, bool]] = PrivateAttr(default_factory=list)

    def prune(self, now: datetime, *, is_dry_run: bool) -> list[str]:
        self._asked.append((now, is_dry_run))
        if self.trouble:
            raise ProviderFailed(self.trouble)
        return ["image ami-1 of the last year"]


def test_a_sweep_that_cannot_remove_what_outlives_pools_ends_machines(
    ledger: Ledger, tmp_path: Path, hands: Time
) -> None:
    world = of_kind(PruningProvider, ledger, tmp_path, hands, trouble="503")
    world.rent(world.pool())
    report = world.sweep()
    assert world.ids() == set()
    assert [(failure.provider, failure.pool_id, str(failure.error)) for failure in report.failures] == [
        ("pruning", "", "503")
    ]
    assert (report.pruned, str(report.failures[0])) == ((), "pruning: 503")
