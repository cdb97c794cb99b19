"""Sweeping all pools: of several providers, by several processes at once, and with a ledger that fails."""

import threading
from pathlib import Path

import pytest

from skyward_core import InstancesLeft
from skyward_core.cleanup import survey
from skyward_core.cleanup.sweep import sweep
from skyward_core.ledger.ledger import Ledger
from skyward_core.providers.base import load
from tests.cleanup.pools import DEAD, CloudProvider, FolderProvider, Time, World, of_kind
from tests.fakes import BlindProvider, FlakyProvider, StuckProvider
from tests.unit.cleanup.test_sweep import PruningProvider, actions


def test_a_sweep_finds_providers_in_the_ledger(
    ledger: Ledger, tmp_path: Path, hands: Time, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The caller names no provider, because the entries name them."""
    folders = {"name": "folder", "folder": str(tmp_path)}
    monkeypatch.setattr(
        survey,
        "load",
        lambda requested: (
            FolderProvider(folder=requested["folder"]) if requested["name"] == "folder" else load(requested)
        ),
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


def test_a_provider_that_cannot_list_is_not_swept(ledger: Ledger, tmp_path: Path, hands: Time) -> None:
    """Its entries and machines stay, because they could not be listed. The other providers are swept."""
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


def test_a_machine_that_does_not_end_does_not_stop_the_others(ledger: Ledger, tmp_path: Path, hands: Time) -> None:
    stuck = of_kind(StuckProvider, ledger, tmp_path / "stuck", hands)
    other = of_kind(FlakyProvider, ledger, tmp_path / "other", hands)
    for world in (stuck, other):
        world.rent(world.pool(f"sky-{type(world.provider).__name__}"))
    waited = threading.local()  # each pool ends in a thread of its own, and waits by a clock of its own

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


def test_machines_listed_by_two_settings_have_one_finding(ledger: Ledger, tmp_path: Path, hands: Time) -> None:
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


@pytest.mark.parametrize("is_dry_run", [True, False])
def test_a_sweep_removes_what_outlives_pools(ledger: Ledger, tmp_path: Path, hands: Time, is_dry_run: bool) -> None:
    one, twin = PruningProvider(folder=str(tmp_path)), PruningProvider(folder=str(tmp_path), price_per_hour=1.0)
    report = sweep(ledger, [one, twin], is_dry_run=is_dry_run, **hands.keywords)
    assert report.pruned == ("pruning: image ami-1 of the last year",)
    assert report.failures == ()
    assert one._asked == twin._asked == [(hands.now, is_dry_run)]
