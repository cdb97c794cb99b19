"""What a sweep does at one provider when the ledger or a listing fails"""

from pathlib import Path
from typing import Any, ClassVar

from pydantic import PrivateAttr

from skyward_core import Instance
from skyward_core.cleanup.sweep import SweepReport, sweep
from skyward_core.errors import LedgerConflict
from skyward_core.ledger.ledger import Ledger
from tests.cleanup.pools import HERE, CloudProvider, FailingLedger, Time, World, of_kind

FULL = "the disk is full"


def failures(report: SweepReport) -> list[tuple[str, str, str]]:
    return [(failure.provider, failure.pool_id, str(failure.error)) for failure in report.failures]


def sweep_with(world: World, *fails: str) -> SweepReport:
    ledger: Any = FailingLedger(world.ledger, fails)
    return sweep(ledger, [world.provider], is_dry_run=False, **world.hands.keywords)


def reasons(report: SweepReport) -> list[tuple[str, str, str]]:
    return [(finding.action.value, finding.pool_id, finding.reason) for finding in report.findings]


def vanished(world: World) -> str:
    """Return a dead pool with a bound entry whose machine the provider lists no more."""
    pool = world.pool()
    world.rent(pool)
    world.provider.machines.running.clear()
    world.hands.go(1000)
    return pool


def test_a_machine_that_cannot_be_adopted_is_a_failure(world: World) -> None:
    pool = world.pool(owner=HERE)
    world.intend(pool, owner=HERE)
    (instance,) = world.launch(pool, owner=HERE)
    report = sweep_with(world, "bind_all")
    assert failures(report) == [("cloud", pool, FULL)]
    assert report.adopted == ()
    assert world.ids() == {instance.id}
    assert [finding.resource_ids for finding in world.sweep().adopted] == [(instance.id,)]


def test_a_machine_that_its_owner_has_bound_meanwhile_is_no_failure(world: World) -> None:
    pool = world.pool(owner=HERE)
    world.intend(pool, owner=HERE)
    world.launch(pool, owner=HERE)

    class BoundMeanwhile(FailingLedger):
        def bind_all(self, ids: Any) -> None:
            raise LedgerConflict("it is bound")

    ledger: Any = BoundMeanwhile(world.ledger, [])
    report = sweep(ledger, [world.provider], is_dry_run=False, **world.hands.keywords)
    assert (report.failures, report.adopted) == ((), ())


def test_pools_that_cannot_be_condemned_are_one_failure_and_are_left(world: World) -> None:
    for number in range(2):
        world.rent(world.pool(f"sky-{number}"))
    report = sweep_with(world, "condemn_all")
    assert failures(report) == [("cloud", "", FULL)]
    assert reasons(report) == [
        ("leave", "sky-0", "the ledger could not be written to"),
        ("leave", "sky-1", "the ledger could not be written to"),
    ]
    assert report.ended == ()
    assert world.provider.machines.terminated == []


class OnceListing(CloudProvider):
    """A cloud that answers one listing and fails all later ones."""

    name: ClassVar[str] = "once"
    _listings: list[None] = PrivateAttr(default_factory=list[None])

    def instances(self, pool_id: str | None = None) -> list[Instance]:
        self._listings.append(None)
        if len(self._listings) > 1:
            raise ConnectionError("503 from the listing")
        return super().instances(pool_id)


def test_an_entry_is_not_closed_if_the_second_listing_fails(ledger: Ledger, tmp_path: Path, hands: Time) -> None:
    world = of_kind(OnceListing, ledger, tmp_path, hands)
    pool = vanished(world)
    report = world.sweep()
    assert failures(report) == [("once", "", "503 from the listing")]
    assert report.closed == ()
    assert [intent.pool_id for intent in ledger.open_intents()] == [pool]
    assert [entry.id for entry in ledger.pools()] == [pool]


def test_an_entry_that_cannot_be_closed_is_a_failure(world: World) -> None:
    pool = vanished(world)
    report = sweep_with(world, "close_all")
    assert failures(report) == [("cloud", "", FULL)]
    assert report.closed == ()
    assert [entry.id for entry in world.ledger.pools()] == [pool]
    assert [finding.pool_id for finding in world.sweep().closed] == [pool]
    assert world.ledger.pools() == []


def test_a_pool_that_cannot_be_ended_in_the_ledger_is_a_failure(world: World) -> None:
    pool = vanished(world)
    report = sweep_with(world, "end_pools")
    assert failures(report) == [("cloud", "", FULL)]
    assert report.closed == ()
    assert world.ledger.open_intents() == []
    assert [entry.id for entry in world.ledger.pools()] == [pool]
    world.sweep()
    assert world.ledger.pools() == []


def test_an_entry_closed_by_a_sweep_has_the_evidence(world: World) -> None:
    vanished(world)
    world.sweep()
    assert [intent.evidence for intent in world.ledger.intents()] == ["cloud does not list it; a sweep has closed it"]
