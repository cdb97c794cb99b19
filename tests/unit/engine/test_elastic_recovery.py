"""Recovery of an elastic pool: whose nodes it takes out of the pool, and what it leaves when it is settled."""

from __future__ import annotations

from typing import Any

import pytest

from skyward_core.engine import recovery
from skyward_core.engine.recovery import Recovery
from skyward_core.engine.scaling import ScalingPolicy
from skyward_core.errors import LedgerError
from skyward_core.ledger.names_policy import NotSteward
from tests.unit.engine.test_recovery import World


class ElasticWorld(World):
    """A pool of two nodes that is to have one; its machines and its scheduler only record what is requested."""

    def __init__(self) -> None:
        super().__init__(2)
        self.requested: list[str] = []
        self.refusals: list[Exception] = []
        """What the next questions are answered whether this process is the steward."""
        self.refusals_to_remove: list[Exception] = []
        machines, cluster, draining = self.machines, self.cluster, Draining(self)
        asked: Any = machines
        asked.raise_if_not_steward, asked.remove = self.raise_if_not_steward, self.remove
        controlled: Any = cluster
        controlled.draining, controlled.forget = draining, lambda rank: self.requested.append(f"forget {rank}")
        policy = ScalingPolicy(1, 2, 1, 30.0, 300.0, 2)
        self.recovery = Recovery(
            asked, controlled, 2, 600.0, self.recorded, lambda: self.now, self.moved_to_file, policy
        )
        self.recovery.fix_size(1)

    def raise_if_not_steward(self) -> None:
        if self.refusals:
            raise self.refusals.pop(0)

    def remove(self, rank: int, instance_id: str) -> None:
        if self.refusals_to_remove:
            raise self.refusals_to_remove.pop(0)
        self.requested.append(f"remove {rank}")
        self.machines.give_back(rank)


class Draining:
    """The interface of `node_draining.NodeDraining`: a node is at rest when it is held."""

    def __init__(self, world: ElasticWorld) -> None:
        self.world = world

    def take_in(self, rank: int) -> None:
        self.world.requested.append(f"take in {rank}")

    def leave_out(self, rank: int) -> None:
        self.world.requested.append(f"leave out {rank}")

    def drain(self, rank: int) -> tuple[int, int]:
        self.world.requested.append(f"hold {rank}")
        return (0, 0)

    def free(self, rank: int) -> None:
        self.world.requested.append(f"free {rank}")


@pytest.fixture
def world() -> ElasticWorld:
    return ElasticWorld()


NOT_STEWARD = NotSteward("another process keeps the pool now")


def test_a_node_that_is_not_wanted_leaves(world: ElasticWorld) -> None:
    world.go_on(10.0)
    assert world.requested == ["leave out 1", "hold 1", "hold 1", "remove 1", "forget 1"]


def test_a_process_that_is_not_the_steward_any_more_holds_no_node(world: ElasticWorld) -> None:
    """The node may be one of the new steward, and would get no calls."""
    world.refusals = [NOT_STEWARD] * 100
    world.go_on(10.0)
    assert world.requested == ["leave out 1"]


def test_a_process_that_is_not_the_steward_any_more_frees_no_node(world: ElasticWorld) -> None:
    """The new steward may be taking it out of the pool."""
    world.turn()
    world.work()
    world.recovery.fix_size(2)
    world.refusals = [NOT_STEWARD]
    world.go_on(1.5)
    assert world.requested == ["leave out 1", "hold 1"]
    world.go_on(2.0)
    assert world.requested == ["leave out 1", "hold 1", "free 1", "take in 1"]


def test_a_machine_is_ended_when_the_ledger_has_said_that_this_process_is_the_steward(
    world: ElasticWorld, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The ledger does not answer twice."""
    monkeypatch.setattr(recovery, "ASK_LEDGER_SECONDS", 0.0)
    world.refusals_to_remove = [LedgerError("away")] * 2
    world.go_on(10.0)
    assert world.requested[-2:] == ["remove 1", "forget 1"]
    assert world.refusals_to_remove == []
