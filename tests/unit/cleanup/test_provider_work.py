"""What a sweep does at one provider when the ledger or a listing fails: the report has the failure, and no more is done
than is proved.
"""

import sqlite3
from contextlib import closing
from pathlib import Path
from typing import Any, ClassVar

import pytest
from pydantic import PrivateAttr

from skyward_core import Instance
from skyward_core.cleanup.sweep import SweepReport, sweep
from skyward_core.errors import LedgerConflict, LedgerError
from skyward_core.ledger.ledger import Ledger
from tests.cleanup.pools import HERE, CloudProvider, FailingLedger, Time, World, of_kind

FULL = "the disk is full"


def failures(report: SweepReport) -> list[tuple[str, str, str]]:
    return [(failure.provider, failure.pool_id, str(failure.error)) for failure in report.failures]


def sweep_with(world: World, *fails: str) -> SweepReport:
    ledger: Any = FailingLedger(world.ledger, fails)
    return sweep(ledger, [world.provider], is_dry_run=False, **world.hands.keywords)


def vanished(world: World) -> str:
    """Return a dead pool with a bound entry whose machine the provider lists no more."""
    pool = world.pool()
    world.rent(pool)
    world.provider.machines.running.clear()
    world.hands.go(1000)
    return pool


def test_a_machine_that_cannot_be_adopted_is_a_failure(world: World) -> None:
    """It goes on running, and the next sweep adopts it. If its owner has bound it meanwhile, that is no failure."""
    pool = world.pool(owner=HERE)
    world.intend(pool, owner=HERE)
    (instance,) = world.launch(pool, owner=HERE)
    report = sweep_with(world, "bind_all")
    assert (failures(report), report.adopted) == ([("cloud", pool, FULL)], ())
    assert world.ids() == {instance.id}

    class BoundMeanwhile(FailingLedger):
        def bind_all(self, ids: Any) -> None:
            raise LedgerConflict("it is bound")

    ledger: Any = BoundMeanwhile(world.ledger, [])
    report = sweep(ledger, [world.provider], is_dry_run=False, **world.hands.keywords)
    assert (report.failures, report.adopted) == ((), ())
    assert [finding.resource_ids for finding in world.sweep().adopted] == [(instance.id,)]


def test_a_ledger_that_cannot_be_written_to_ends_nothing_of_its_pools(world: World) -> None:
    """A pool that cannot be condemned keeps its machines, and the report says why; unknown machines end."""
    for number in range(3):
        world.rent(world.pool(f"sky-{number}"))
    world.launch("sky-stranger")
    world.hands.go(1000)
    report = sweep_with(world, "condemn_all")
    assert failures(report) == [("cloud", "", FULL)]
    assert [finding.pool_id for finding in report.ended] == ["sky-stranger"]
    left = [(found.pool_id, found.reason) for found in report.findings if found.action.value == "leave"]
    assert left == [(f"sky-{number}", "the ledger could not be written to") for number in range(3)]
    assert {instance.pool_id for instance in world.provider.instances()} == {"sky-0", "sky-1", "sky-2"}


def test_a_ledger_that_cannot_be_read_ends_nothing(world: World) -> None:
    """Without the ledger every live pool would be unknown."""
    world.launch("sky-stranger")
    world.hands.go(1000)
    with pytest.raises(LedgerError):
        sweep_with(world, "open_intents")
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
    """One listing without the machine may have been wrong. The entry and its pool stay open."""
    world = of_kind(OnceListing, ledger, tmp_path, hands)
    pool = vanished(world)
    report = world.sweep()
    assert (failures(report), report.closed) == ([("once", "", "503 from the listing")], ())
    assert [intent.pool_id for intent in ledger.open_intents()] == [pool]
    assert [entry.id for entry in ledger.pools()] == [pool]


@pytest.mark.parametrize("verb", ["close_all", "end_pools"])
def test_an_entry_that_cannot_be_closed_is_a_failure(world: World, verb: str) -> None:
    """Or a pool that cannot be ended. It is not reported as closed, and the next sweep does it."""
    pool = vanished(world)
    report = sweep_with(world, verb)
    assert (failures(report), report.closed) == ([("cloud", "", FULL)], ())
    assert len(world.ledger.open_intents()) == (verb == "close_all")
    assert [entry.id for entry in world.ledger.pools()] == [pool]
    assert [finding.pool_id for finding in world.sweep().closed] == [pool]
    assert world.ledger.pools() == []
    assert [intent.evidence for intent in world.ledger.intents()] == ["cloud does not list it; a sweep has closed it"]


@pytest.mark.parametrize("is_ended", [False, True])
def test_the_machines_of_a_pool_that_cannot_be_read_are_left(world: World, tmp_path: Path, is_ended: bool) -> None:
    """The failure names the pool, and the finding says how to end it. The other pools are swept."""
    world.rent(world.pool("sky-odd"), 2)
    world.rent(world.pool("sky-1"))
    if is_ended:
        world.ledger.end_pool("sky-odd")
    damage(tmp_path, "provider_json = '{'")
    report = world.sweep()
    (left,) = [found for found in report.findings if found.action.value == "leave"]
    assert (left.pool_id, left.provider, left.resource_ids) == ("sky-odd", "cloud", ("fake-0", "fake-1"))
    assert left.reason.endswith("end the pool with `skyward stop sky-odd --provider cloud`")
    assert [found.pool_id for found in report.ended] == ["sky-1"]
    (failure,) = report.failures
    assert (failure.provider, failure.pool_id) == ("ledger", "sky-odd")
    assert str(failure).startswith("ledger, pool sky-odd: row 'sky-odd' of skyward_pools in the ledger cannot be read")
    assert world.ids() == {"fake-0", "fake-1"}


def test_a_pool_whose_owner_cannot_be_read_is_a_failure_and_judged_all_the_same(world: World, tmp_path: Path) -> None:
    world.rent(world.pool("sky-odd", lease_seconds=-1))
    damage(tmp_path, "owner_process = 'garbage'")
    report = world.sweep()
    (failure,) = report.failures
    assert (failure.provider, failure.pool_id, type(failure.error)) == ("ledger", "sky-odd", LedgerError)
    assert "'garbage'" in str(failure.error)
    assert [found.pool_id for found in report.ended] == ["sky-odd"]


def damage(tmp_path: Path, change: str) -> None:
    with closing(sqlite3.connect(tmp_path / "ledger.db")) as connection, connection:
        connection.execute(f"UPDATE skyward_pools SET {change} WHERE id = 'sky-odd'")
