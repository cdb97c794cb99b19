"""Sweeping the pools of several providers."""

import threading
from pathlib import Path

import pytest

from skyward_core import InstancesLeft
from skyward_core.cleanup import sweep as survey
from skyward_core.cleanup.policy import Action
from skyward_core.cleanup.sweep import sweep
from skyward_core.ledger.ledger import Ledger
from tests.cleanup.pools import DEAD, CloudProvider, FolderProvider, Time, World, install_folder_provider, of_kind
from tests.fakes import BlindProvider, FlakyProvider, Machines, StuckProvider
from tests.ledger.fixtures import open_pool
from tests.unit.cleanup.test_sweep import PruningProvider, actions


def test_a_sweep_finds_providers_in_the_ledger(
    ledger: Ledger, tmp_path: Path, hands: Time, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The caller names no provider, because the entries name them."""
    install_folder_provider(monkeypatch)
    world = World(ledger, FolderProvider(folder=str(tmp_path)), hands)
    world.rent(world.pool("sky-folder"), 2)
    report = sweep(ledger, is_dry_run=False, **hands.keywords)
    assert report.failures == ()
    assert [finding.pool_id for finding in report.ended] == ["sky-folder"]
    assert (ledger.pools(), world.ids()) == ([], set())


def test_a_provider_that_cannot_list_or_be_loaded_is_not_swept(ledger: Ledger, tmp_path: Path, hands: Time) -> None:
    """Its entries and machines stay, and it is one failure. The other providers are swept."""
    blind = of_kind(BlindProvider, ledger, tmp_path / "blind", hands)
    seeing = of_kind(CloudProvider, ledger, tmp_path / "seeing", hands)
    blind.rent(blind.pool("sky-blind"))
    seeing.rent(seeing.pool("sky-seeing"))
    for pool_id, provider in (("sky-odd", {"name": "nonesuch"}), ("sky-nameless", {"key": "no name"})):
        open_pool(ledger, pool_id, DEAD, provider=provider, lease_expires_at=hands.now)
    hands.go(1000)
    report = sweep(ledger, [blind.provider, seeing.provider], is_dry_run=False, **hands.keywords)
    failures = {failure.provider: (failure.pool_id, str(failure.error)) for failure in report.failures}
    assert failures.keys() == {"?", "fake", "nonesuch"}
    assert failures["fake"] == ("", "503 from the listing")
    assert "no provider is called 'nonesuch'" in failures["nonesuch"][1]
    assert [finding.pool_id for finding in report.ended] == ["sky-seeing"]
    assert [its.pool_id for its in ledger.open_intents()] == ["sky-blind"]
    left = [(found.id, found.condemned_at) for found in ledger.pools()]
    assert left == [("sky-blind", None), ("sky-nameless", None), ("sky-odd", None)]
    assert blind.provider.machines.terminated == []


def test_a_machine_that_does_not_end_does_not_stop_the_others(ledger: Ledger, tmp_path: Path, hands: Time) -> None:
    """InstancesLeft of one pool is in the report; the next sweep requests the end again."""
    stuck = of_kind(StuckProvider, ledger, tmp_path / "stuck", hands)
    other = of_kind(FlakyProvider, ledger, tmp_path / "other", hands)
    for world in (stuck, other):
        world.rent(world.pool(f"sky-{type(world.provider).__name__}"))
    waited = threading.local()  # each pool ends in a thread of its own, and waits by a clock of its own

    def monotonic() -> float:
        return getattr(waited, "seconds", 0.0)

    def pause(seconds: float) -> None:
        waited.seconds = monotonic() + seconds

    providers = [stuck.provider, other.provider]
    report = sweep(ledger, providers, is_dry_run=False, clock=hands, monotonic=monotonic, pause=pause)
    (failure,) = report.failures
    assert failure.pool_id == "sky-StuckProvider"
    assert isinstance(failure.error, InstancesLeft)
    assert other.ids() == set()
    assert [its.pool_id for its in ledger.open_intents()] == ["sky-StuckProvider"]
    assert actions(sweep(ledger, [stuck.provider], **hands.keywords)) == [("end", "sky-StuckProvider")]


def cloud(folder: Path, machines: Machines, price: float) -> CloudProvider:
    """Return the cloud with these machines, in settings that have this price."""
    provider = CloudProvider(folder=str(folder), price_per_hour=price)
    provider._machines = machines
    return provider


def test_a_machine_is_in_the_listing_of_the_settings_of_its_pool(ledger: Ledger, tmp_path: Path, hands: Time) -> None:
    """A provider that is named with several settings lists the same machines. A machine without an entry is in the
    first listing, and one that only other settings list is left.
    """
    machines = Machines()
    first, its, last = (cloud(tmp_path, machines, price) for price in (1.0, 2.0, 3.0))
    world = World(ledger, its, hands)
    world.rent(world.pool("sky-1"))
    world.launch("sky-stranger")
    for order in ([first, its, last], [last, first, its]):
        view = survey.take_survey(ledger, order)
        for machine_id, expected in (("fake-0", its), ("fake-1", view.listings[0].provider)):
            listed = [one.provider for one in view.listings if machine_id in {found.id for found in one.machines}]
            assert listed == [expected]
        assert view.left == []
    hands.go(1000)
    report = sweep(ledger, [first, its], is_dry_run=False, **hands.keywords)
    assert sorted(actions(report)) == [("end", "sky-1"), ("end", "sky-stranger")]
    assert report.failures == ()
    other = cloud(tmp_path / "other", Machines(), 4.0)
    World(ledger, other, hands).launch(world.pool("sky-2"))
    view = survey.take_survey(ledger, [other, its])
    (left,) = view.left
    assert [listing.machines for listing in view.listings] == [[], []]
    assert (left.action, left.pool_id, left.resource_ids) == (Action.LEAVE, "sky-2", ("fake-0",))
    assert "other settings of the provider" in left.reason


@pytest.mark.parametrize("is_dry_run", [True, False])
def test_a_sweep_removes_what_outlives_pools(ledger: Ledger, tmp_path: Path, hands: Time, is_dry_run: bool) -> None:
    """A dry run only reports it. Two settings of one account report it once."""
    one, twin = PruningProvider(folder=str(tmp_path)), PruningProvider(folder=str(tmp_path), price_per_hour=1.0)
    report = sweep(ledger, [one, twin], is_dry_run=is_dry_run, **hands.keywords)
    assert report.pruned == ("pruning: image ami-1 of the last year",)
    assert report.failures == ()
    assert one._asked == twin._asked == [(hands.now, is_dry_run)]
