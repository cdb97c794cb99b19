"""What the sweep knows before it decides: listings, pools, what it leaves, and what could not be read."""

from pathlib import Path

from skyward_core.cleanup.policy import Action
from skyward_core.cleanup.survey import take_survey
from skyward_core.ledger.ledger import Ledger
from tests.cleanup.pools import DEAD, CloudProvider, Time, World, of_kind
from tests.fakes import BlindProvider, Machines
from tests.unit.cleanup.test_survey import cloud, listed, summary


def test_providers_that_do_not_answer_or_cannot_be_loaded(ledger: Ledger, tmp_path: Path, hands: Time) -> None:
    blind = of_kind(BlindProvider, ledger, tmp_path / "blind", hands)
    seeing = of_kind(CloudProvider, ledger, tmp_path / "seeing", hands)
    seeing.rent(seeing.pool("sky-1"))
    for pool_id, provider in (("sky-odd", {"name": "nonesuch"}), ("sky-nameless", {"key": "no name"})):
        ledger.open_pool(pool_id, owner=DEAD, provider=provider, spec_json="{}", lease_expires_at=hands.now)
    view = take_survey(ledger, [blind.provider, seeing.provider])
    assert [listing.provider for listing in view.listings] == [seeing.provider]
    assert sorted(summary(view.failures)) == [("?", ""), ("fake", ""), ("nonesuch", "")]
    assert "fake: 503 from the listing" in map(str, view.failures)


def test_a_machine_is_in_the_listing_of_the_settings_of_its_pool(ledger: Ledger, tmp_path: Path, hands: Time) -> None:
    machines = Machines()
    first, its, last = (cloud(tmp_path, machines, price) for price in (1.0, 2.0, 3.0))
    world = World(ledger, its, hands)
    world.rent(world.pool("sky-1"))
    world.launch("sky-stranger")
    for order in ([first, its, last], [last, first, its]):
        view = take_survey(ledger, order)
        found = listed(view)
        assert [price for price, names in found.items() if "fake-0" in names] == [2.0]
        assert [price for price, names in found.items() if "fake-1" in names] == [next(iter(found))]
        assert view.left == []


def test_a_machine_that_the_settings_of_its_pool_do_not_list_is_left(
    ledger: Ledger, tmp_path: Path, hands: Time
) -> None:
    its, other = cloud(tmp_path, Machines(), 1.0), cloud(tmp_path, Machines(), 2.0)
    pool_id = World(ledger, its, hands).pool("sky-1")
    World(ledger, other, hands).launch(pool_id)
    view = take_survey(ledger, [other, its])
    (left,) = view.left
    assert (left.action, left.pool_id, left.provider) == (Action.LEAVE, "sky-1", "cloud")
    assert left.resource_ids == ("fake-0",)
    assert "other settings of the provider" in left.reason
    assert listed(view) == {2.0: [], 1.0: []}
