"""Pools of this computer that have ended themselves are settled by any process that looks, with the time they ended."""

from collections.abc import Mapping, Sequence
from datetime import UTC, datetime, timedelta
from decimal import Decimal
from typing import Any, ClassVar

import pytest
from pydantic import PrivateAttr

from skyward_core import Instance
from skyward_core.cleanup import pool_record as settlement
from skyward_core.cleanup.pool_record import settle_here
from skyward_core.ledger.ledger import Ledger
from skyward_core.ledger.rows import Account, Bucket, CostBy, Period
from skyward_core.machines.instances import NodeEnd, node_end
from tests.cleanup.pools import DEAD, ELSEWHERE, HERE, START, FailingLedger, Time, World
from tests.fakes import FakeProvider

UP = {Bucket.LAUNCHING: 5.0, Bucket.BOOTSTRAPPING: 15.0, Bucket.IDLE: 10.0}
OVER = "its warm time is over (keep_warm)"


class Here(FakeProvider):
    """This computer: what has ended has written when, unless a test forgets that."""

    name: ClassVar[str] = "local"
    _ends: dict[str, NodeEnd] = PrivateAttr(default_factory=dict[str, NodeEnd])

    def end(self, instance: Instance, after_seconds: float) -> None:
        self.machines.running.pop(instance.id)
        self._ends[instance.id] = NodeEnd(START + timedelta(seconds=after_seconds), OVER)

    def forget(self) -> None:
        self._ends.clear()

    def ends(self, ids: Sequence[str]) -> Mapping[str, NodeEnd]:
        return {instance_id: end for instance_id, end in self._ends.items() if instance_id in ids}


@pytest.fixture
def world(ledger: Ledger, tmp_path: Any, hands: Time) -> World:
    return World(ledger, Here(folder=str(tmp_path)), hands)


def here(world: World) -> Here:
    assert isinstance(world.provider, Here)
    return world.provider


def settle(world: World, ledger: Any = None) -> list[str]:
    return settle_here(ledger or world.ledger, clock=world.hands, provider_of=lambda _: world.provider)


def dead_pool(world: World, *, after_seconds: float = 100, nodes: int = 1, **fields: Any) -> str:
    """Return a pool whose nodes have ended themselves; its lease ran out at 120 s, and now it is an hour later."""
    pool = world.pool(**fields)
    machines = world.rent(pool, nodes)
    world.ledger.note_all({its.id: UP for its in world.ledger.open_intents(pool_id=pool)})
    for machine in machines:
        here(world).end(machine, after_seconds)
    world.hands.go(3600)
    return pool


@pytest.mark.parametrize("owner", [DEAD, HERE], ids=["its owner is dead", "warm, and its last process lives"])
def test_a_pool_that_has_ended_itself_is_billed_until_its_end(owner: Any, world: World) -> None:
    """Not until its lease, nor until somebody looks. Its account gets back what was not spent."""
    world.ledger.set_account(Account("team-a", Decimal(100), Period.MONTH))
    pool = world.pool(owner=owner, account="team-a")
    if owner is HERE:
        world.ledger.live_by_lease(pool, START + timedelta(seconds=120))
    world.ledger.reserve("team-a", pool, Decimal(50))
    (machine,) = world.rent(pool)
    world.ledger.note_all({1: UP})
    here(world).end(machine, 100)
    world.hands.go(3600)
    assert settle(world) == [pool]
    (its,) = world.ledger.intents()
    assert {bucket: spent for bucket, spent in its.seconds.items() if spent} == {**UP, Bucket.IDLE: 80.0}
    assert (
        str(its.evidence) == f"nothing of it is left; it has written that it ended at 2026-11-21 12:01:40 UTC: {OVER}"
    )
    assert world.ledger.cost_rows(CostBy.POOL)[0].cost_usd == 1
    assert world.ledger.left_usd("team-a", "another") == 99
    entry = world.ledger.pool(pool)
    assert entry is not None
    assert entry.ended_at == world.hands.now
    assert settle(world) == []


def test_a_pool_that_may_still_live_is_left(world: World) -> None:
    """One of its machines runs, or has written no end, or may have been launched; or it is dead for nobody else."""
    running = world.pool("sky-running")
    here(world).end(world.rent(running, 2)[0], 100)
    launching = world.pool("sky-launching")
    here(world).end(world.rent(launching)[0], 100)
    world.intend(launching, 1, first=1)
    dead_pool(world, pool_id="sky-elsewhere", owner=ELSEWHERE)
    alive = world.pool("sky-alive", owner=HERE, lease_seconds=7200)
    here(world).end(world.rent(alive)[0], 100)
    assert settle(world) == []
    here(world).forget()
    dead_pool(world, pool_id="sky-untold")
    here(world).forget()
    assert settle(world) == []
    assert all(entry.condemned_at is None for entry in world.ledger.pools())


def test_a_pool_whose_lease_is_renewed_meanwhile_is_left(world: World) -> None:
    """A process has come between the look and the write."""
    pool = dead_pool(world)

    class RenewedMeanwhile(FailingLedger):
        def condemn_all(self, seen: Any) -> set[str]:
            world.ledger.renew(pool, world.hands.now + timedelta(seconds=60))
            return world.ledger.condemn_all(seen)

    assert settle(world, RenewedMeanwhile(world.ledger, [])) == []
    assert len(world.ledger.open_intents()) == 1


@pytest.mark.parametrize("step", ["pools", "open_intents", "condemn_all", "close_all", "end_pools"])
def test_the_next_process_goes_on_after_a_failure_or_a_kill(step: str, world: World) -> None:
    """Nothing is raised, whatever the ledger refuses, and the bill is the same."""
    pool = dead_pool(world, nodes=2)
    assert settle(world, FailingLedger(world.ledger, [step], times=1)) == []
    world.hands.go(3600)
    assert settle(world) == [pool]
    assert world.ledger.cost_rows(CostBy.POOL)[0].cost_usd == 2
    assert world.ledger.pools() == []


def test_one_look_settles_a_limited_number_of_pools(world: World, monkeypatch: pytest.MonkeyPatch) -> None:
    """The oldest first: the command that looks shall answer soon."""
    monkeypatch.setattr(settlement, "MOST_POOLS", 2)
    pools = []
    for number in range(5):
        pools.append(dead_pool(world, pool_id=f"sky-{number}"))
    assert [settle(world) for _ in range(4)] == [pools[:2], pools[2:4], pools[4:], []]


def test_pools_that_cannot_be_settled_do_not_block_later_ones(world: World, monkeypatch: pytest.MonkeyPatch) -> None:
    """A node that was killed with its keeper has written no end: its pool waits for a sweep, and the others do not."""
    monkeypatch.setattr(settlement, "MOST_POOLS", 2)
    untold = [dead_pool(world, pool_id=f"sky-{number}") for number in range(5)]
    here(world).forget()
    pools = [dead_pool(world, pool_id=f"sky-{number}") for number in range(5, 8)]
    assert [settle(world) for _ in range(3)] == [pools[:2], pools[2:], []]
    assert [entry.id for entry in world.ledger.pools()] == untold
    assert all(entry.condemned_at is None for entry in world.ledger.pools())


def test_a_sweep_and_a_process_that_opens_the_name_use_the_written_end_too(world: World) -> None:
    swept, ended = dead_pool(world, pool_id="sky-1"), dead_pool(world, pool_id="sky-2", after_seconds=3700)
    world.ledger.condemn(ended, seen=START + timedelta(seconds=3720))
    world.end(ended)
    assert world.sweep().failures == ()
    for pool, seconds in ((swept, 100), (ended, 100)):
        (its,) = world.ledger.intents(pool_id=pool)
        assert sum(its.seconds.values()) == pytest.approx(seconds, abs=0.01)
        assert OVER in str(its.evidence)


def test_a_provider_that_does_not_show_ends_gets_an_estimate(world: World, monkeypatch: pytest.MonkeyPatch) -> None:
    """A sweep closes the entries all the same."""
    pool = dead_pool(world)
    monkeypatch.setattr(Here, "ends", lambda *_: 1 / 0)
    assert settle(world) == []
    assert world.sweep().failures == ()
    (its,) = world.ledger.intents(pool_id=pool)
    assert OVER not in str(its.evidence)


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        (f"1000.50 1790000000.5 boot-1\n{OVER}\n", NodeEnd(START - timedelta(seconds=99.5), OVER)),
        ("1000 1790000000 boot-0\n\n", NodeEnd(datetime(2026, 9, 21, 14, 13, 20, tzinfo=UTC), "it gave no reason")),
        ("2000 1790000000 boot-1\nlater than now\n", NodeEnd(START, "later than now")),
        ("1000 99999999999 \nlater than now\n", NodeEnd(START, "later than now")),
        ("", None),
        ("soon\nwhy\n", None),
        ("1 1e99 other\nwhy\n", None),
    ],
    ids=["this boot", "before a reboot", "a clock that goes back", "no boot", "nothing", "no number", "no time"],
)
def test_an_end_is_read_by_the_clock_that_has_not_been_set(text: str, expected: NodeEnd | None) -> None:
    """The uptime of the same boot, else the time of day."""
    assert node_end(text, now=START, uptime=1100, boot="boot-1") == expected
