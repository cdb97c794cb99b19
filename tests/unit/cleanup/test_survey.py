"""What the sweep knows before it decides: listings, pools, what it leaves, and what could not be read."""

import sqlite3
from collections.abc import Sequence
from pathlib import Path
from typing import ClassVar

from skyward_core.cleanup.policy import Action
from skyward_core.cleanup.survey import Failure, ProviderListing, SurveyView, owner_states, take_survey
from skyward_core.errors import CredentialsError, LedgerError
from skyward_core.ledger.ledger import Ledger
from skyward_core.machines.owner import OwnerState
from tests.cleanup.pools import DEAD, ELSEWHERE, HERE, CloudProvider, Time, World, entry, machine, of_kind, owner_tags
from tests.fakes import Machines


def damage(tmp_path: Path, statement: str) -> None:
    with sqlite3.connect(tmp_path / "ledger.db") as connection:
        connection.execute(statement)
    connection.close()


def only(view: SurveyView) -> ProviderListing:
    (listing,) = view.listings
    return listing


def summary(failures: Sequence[Failure]) -> list[tuple[str, str]]:
    return [(failure.provider, failure.pool_id) for failure in failures]


def test_a_pool_of_the_ledger_is_found_with_its_machines_and_intents(world: World) -> None:
    world.rent(world.pool("sky-1"), 2)
    world.launch(world.pool("sky-ended"))
    world.ledger.end_pool("sky-ended")
    world.launch("sky-stranger")
    view = take_survey(world.ledger, [world.provider])
    listing = only(view)
    assert listing.provider is world.provider
    assert listing.pools.keys() == {"sky-1", "sky-ended"}
    assert [intent.cloud_id for intent in listing.intents] == ["fake-0", "fake-1"]
    assert [machine.id for machine in listing.machines] == ["fake-0", "fake-1", "fake-2", "fake-3"]
    assert (view.left, view.failures, listing.other_accounts) == ([], [], {})


def test_without_a_ledger_there_are_machines_only(world: World) -> None:
    world.launch("sky-stranger")
    view = take_survey(None, [world.provider])
    assert [machine.pool_id for machine in only(view).machines] == ["sky-stranger"]
    assert (only(view).pools, only(view).intents, view.left, view.failures) == ({}, [], [], [])


def test_the_machines_of_a_pool_that_cannot_be_read_are_left(world: World, tmp_path: Path) -> None:
    world.rent(world.pool("sky-odd"), 2)
    world.rent(world.pool("sky-1"))
    damage(tmp_path, "UPDATE skyward_pools SET provider_json = '{' WHERE id = 'sky-odd'")
    view = take_survey(world.ledger, [world.provider])
    (left,) = view.left
    assert (left.action, left.pool_id, left.provider) == (Action.LEAVE, "sky-odd", "cloud")
    assert left.resource_ids == ("fake-0", "fake-1")
    assert left.reason.endswith("end the pool with `skyward stop sky-odd --provider cloud`")
    assert [machine.id for machine in only(view).machines] == ["fake-2"]
    assert [intent.pool_id for intent in only(view).intents] == ["sky-1"]
    assert only(view).pools.keys() == {"sky-1"}
    (failure,) = view.failures
    assert (failure.provider, failure.pool_id) == ("ledger", "sky-odd")
    assert str(failure).startswith("ledger, pool sky-odd: row 'sky-odd' of skyward_pools in the ledger cannot be read")


def test_an_ended_pool_that_cannot_be_read_is_left_too(world: World, tmp_path: Path) -> None:
    """Its entry is read only because a machine names it."""
    world.launch(world.pool("sky-odd"))
    world.ledger.end_pool("sky-odd")
    damage(tmp_path, "UPDATE skyward_pools SET provider_json = '{' WHERE id = 'sky-odd'")
    view = take_survey(world.ledger, [world.provider])
    assert [(left.pool_id, left.resource_ids) for left in view.left] == [("sky-odd", ("fake-0",))]
    assert summary(view.failures) == [("ledger", "sky-odd")]
    assert only(view).machines == []


def test_a_pool_whose_owner_cannot_be_read_is_a_failure_and_judged_all_the_same(world: World, tmp_path: Path) -> None:
    world.rent(world.pool("sky-odd"))
    damage(tmp_path, "UPDATE skyward_pools SET owner_process = 'garbage' WHERE id = 'sky-odd'")
    view = take_survey(world.ledger, [world.provider])
    assert only(view).pools.keys() == {"sky-odd"}
    (failure,) = view.failures
    assert (failure.provider, failure.pool_id, type(failure.error)) == ("ledger", "sky-odd", LedgerError)
    assert "'garbage'" in str(failure.error)


class OursProvider(CloudProvider):
    """A cloud of the account "ours"."""

    name: ClassVar[str] = "cloud-of-ours"

    def account(self) -> str:
        return "ours"


def test_a_pool_of_another_account_is_kept_apart(ledger: Ledger, tmp_path: Path, hands: Time) -> None:
    """Its intents are not in the listing, because this account may not list its machines."""
    world = of_kind(OursProvider, ledger, tmp_path, hands)
    for pool_id, account in (("sky-theirs", "theirs"), ("sky-ours", "ours")):
        world.rent(world.pool(pool_id))
        ledger.turn_to(pool_id, world.provider.to_json(), account)
    view = take_survey(ledger, [world.provider])
    listing = only(view)
    assert (listing.account, listing.pools.keys()) == ("ours", {"sky-ours"})
    ((other, reason),) = listing.other_accounts.values()
    (failure,) = view.failures
    assert (other.id, reason) == ("sky-theirs", str(failure.error))
    assert (failure.provider, failure.pool_id, type(failure.error)) == ("cloud-of-ours", "sky-theirs", CredentialsError)
    assert [intent.pool_id for intent in listing.intents] == ["sky-ours"]


def cloud(folder: Path, machines: Machines, price: float) -> CloudProvider:
    """Return the cloud with these machines, in settings that have this price."""
    provider = CloudProvider(folder=str(folder), price_per_hour=price)
    provider._machines = machines
    return provider


def listed(view: SurveyView) -> dict[float, list[str]]:
    return {
        listing.provider.price_per_hour: [machine.id for machine in listing.machines]
        for listing in view.listings
        if isinstance(listing.provider, CloudProvider)
    }


def test_the_states_of_all_owners_are_known() -> None:
    tagged = machine("fake-0", "sky-9", tags=owner_tags(ELSEWHERE))
    listing = ProviderListing(
        CloudProvider(folder="/nowhere"),
        "ours",
        [tagged],
        {"sky-1": entry("sky-1", DEAD)},
        other_accounts={"sky-2": (entry("sky-2", HERE), "another account")},
    )
    states = owner_states(listing)
    assert states[DEAD] is OwnerState.DEAD
    assert states[HERE] is OwnerState.ALIVE
    assert [state for owner, state in states.items() if owner.host == "elsewhere"] == [OwnerState.UNKNOWN]
