"""The notice before a spot machine is taken back: read on the machine, sent to the client, and the pool's actions
before the machine is gone.
"""

from dataclasses import replace
from pathlib import Path

import pytest

import skyward_core as sky
from skyward_core.engine.membership import HOLD_SECONDS, LATE_SECONDS, LOOKS_AT_REST
from skyward_core.errors import NodeLost
from skyward_core.events.narrator import Narrator
from skyward_core.machines.instances import Instance
from skyward_core.provisioning.bootstrap import Preparation
from skyward_core.worker.preemption_notice import (
    FILE_ENV,
    MARK,
    NOTICE_FILE,
    Kind,
    Notice,
    note,
)
from skyward_core.worker.settings import NodeSettings, with_partitions
from tests.unit.engine.test_recovery import World

INTERRUPTED = Notice(Kind.INTERRUPTION, "terminate", 1e9, 120.0)


def test_calls_read_how_much_time_is_left(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A recommendation is no notice; a time that is over is 0, and outside a pool there is none."""
    assert sky.preemption_notice() is None
    monkeypatch.setenv(FILE_ENV, str(tmp_path / NOTICE_FILE))
    note(Notice(Kind.REBALANCE, "", 0.0), tmp_path)
    assert sky.preemption_notice() is None
    note(Notice(Kind.INTERRUPTION, "terminate", 0.0, seconds_left=100.0), tmp_path)
    assert 50 < (sky.preemption_notice() or 0) <= 100
    note(Notice(Kind.INTERRUPTION, "terminate", 0.0, seconds_left=0.0), tmp_path)
    assert sky.preemption_notice() == 0.0
    note(Notice(Kind.INTERRUPTION, "terminate", 0.0), tmp_path / "gone")  # a full disk must not end the poller


# ── as text ──────────────────────────────────────────────────────────────────────────────────────────────────────────


def test_a_notice_travels_as_text() -> None:
    """The printed line is read back; any other line is refused."""
    assert Notice.from_text(INTERRUPTED.to_text()) == INTERRUPTED
    for text in (
        "",
        "null",
        "{}",
        "7",
        INTERRUPTED.to_text()[:-5],
        INTERRUPTED.to_text().replace("interruption", "party"),
        '{"kind": "rebalance"}',
    ):
        with pytest.raises(ValueError, match=r".*"):
            Notice.from_text(text)
    with pytest.raises(ValueError, match="no number of seconds"):
        Notice.from_text(INTERRUPTED.to_text().replace("120.0", "NaN"))


class FakeReach:
    """A node's log and nothing else."""

    is_here = False

    def __init__(self, *lines: str) -> None:
        self.instance = Instance.model_construct(id="i-1")
        self._lines = list(lines)

    def new_lines(self) -> list[str]:
        lines, self._lines = self._lines, []
        return lines


def test_the_log_has_the_notices_of_a_machine() -> None:
    """A line that was cut short is ignored."""
    node = Preparation(
        FakeReach("hello", MARK + '{"kind": "inter', MARK + INTERRUPTED.to_text(), "bye"), 1, lambda _: None
    )  # type: ignore[arg-type]
    node.follow()
    assert node.notices == (INTERRUPTED,)


def test_a_node_without_workers_needs_no_partitions(tmp_path: Path) -> None:
    """A retired node has as many partitions of GPUs as before, and no workers for them."""
    settings = NodeSettings(
        "pool", "i-1", 1, 2, 1, "127.0.0.1", "127.0.0.1", 1, "", "", (str(tmp_path),), workers=({}, {})
    )
    retired = replace(settings, workers=())
    assert with_partitions(retired, "MIG-a\nMIG-b\n") == retired
    assert NodeSettings.from_json(retired.to_json()) == retired


# ── what the pool decides ────────────────────────────────────────────────────────────────────────────────────────────


@pytest.fixture
def world() -> World:
    return World()


AT_REST_SECONDS = (LOOKS_AT_REST + 2) * HOLD_SECONDS


def test_a_node_without_calls_is_replaced_at_once(world: World) -> None:
    """Emitted once, held, retired, and replaced by the new machine: all before its time is up, and no call is lost."""
    machine = world.announce(1)
    world.go_on(AT_REST_SECONDS)
    assert [(event.instance_id, event.node, event.action) for event in world.recorded.of(sky.PreemptionNoticed)] == [
        (machine.id, 1, "terminate")
    ]
    assert world.machines.retired == [machine.id]
    assert machine.id in world.former
    (lost,) = world.recorded.of(sky.InstanceLost)
    assert "announced" in lost.reason
    assert world.all_are_there()
    assert world.machines.standing_by == {}


def test_a_node_with_calls_is_waited_for(world: World) -> None:
    """It gets no more calls from the first moment, stays until its calls have ended, and is retired then."""
    machine = world.announce(1, calls_left=1)
    world.go_on(60)
    assert machine.is_held
    assert list(world.machines.standing_by) == [1]
    assert world.machines.retired == []
    machine.calls_left = 0
    world.go_on(AT_REST_SECONDS)
    assert world.machines.retired == [machine.id]
    assert world.all_are_there()


def test_one_check_without_calls_is_not_enough(world: World) -> None:
    """Messages of the last call may still be in flight."""
    machine = world.announce(1, calls_left=1)
    world.go_on(10)
    machine.calls_left = 0
    world.go_on(HOLD_SECONDS)
    machine.calls_left = 1
    world.go_on(20)
    assert world.machines.retired == []


def test_a_node_whose_calls_are_unknown_is_not_at_rest(world: World, monkeypatch: pytest.MonkeyPatch) -> None:
    """The scheduler does not answer how many calls it has: they may run, and it is not retired before its time."""
    machine = world.announce(1, seconds_left=30)

    def no_answer(rank: int) -> int:
        raise NodeLost("the scheduler does not answer")

    with monkeypatch.context() as patch:
        patch.setattr(world.cluster, "hold", no_answer)
        world.go_on(20)
    assert world.machines.retired == []
    world.go_on(AT_REST_SECONDS)
    assert world.machines.retired == [machine.id]


def test_when_the_time_is_up_a_node_is_lost_with_its_calls(world: World) -> None:
    """Not earlier, and not much later."""
    machine = world.announce(1, seconds_left=30, calls_left=1)
    world.go_on(30)
    assert world.machines.retired == []
    world.go_on(LATE_SECONDS + 2 * HOLD_SECONDS)
    assert world.machines.retired == [machine.id]
    assert world.all_are_there()


def test_a_machine_that_ends_early_is_an_ordinary_loss(world: World) -> None:
    """The new machine replaces it, and the reason says that the loss was announced."""
    world.announce(1, calls_left=1)
    world.go_on(5)
    (standing_by,) = world.machines.standing_by.values()
    world.kill(1)
    world.go_on(5)
    assert world.nodes[1] is standing_by
    (lost,) = world.recorded.of(sky.InstanceLost)
    assert "announced" in lost.reason
    assert world.machines.retired == []


@pytest.mark.parametrize("is_ready", [True, False], ids=["ready", "on its way"])
def test_a_spare_machine_is_terminated_when_a_restart_has_filled_its_rank(world: World, is_ready: bool) -> None:
    """All processes die at once: machines are rented for all ranks.

    A spare machine for one of them would cost money until the pool ends.
    """
    world.announce(1, calls_left=1)
    world.go_on(5) if is_ready else world.turn()
    for rank in range(world.size):
        world.hollow_out(rank)
    world.go_on(60)
    assert world.all_are_there()
    assert (world.machines.standing_by, len(world.machines.dismissed)) == ({}, 1)


def test_while_a_machine_is_being_prepared_no_second_one_is_rented(world: World) -> None:
    """The vacant rank waits for the machine that is being prepared."""
    world.announce(1)
    world.turn()
    world.kill(1)
    for _ in range(100):
        world.turn(0.25)
    assert [name for name, _ in world.in_thread if name != "skyward-query"] == ["skyward-stand-by-1"]
    world.go_on(1)
    assert world.machines.standing_by == {}
    assert world.all_are_there()


def test_without_another_machine_the_node_stays_until_its_end(world: World) -> None:
    """The failure to prepare a machine is emitted and the attempt repeated; the node is not abandoned early."""
    world.has_capacity = False
    machine = world.announce(1)
    world.go_on(60)
    assert world.machines.retired == []
    assert any("no machine stands by yet for node 1" in event.message for event in world.recorded.of(sky.Error))
    world.has_capacity = True
    world.go_on(60)
    assert world.machines.retired == [machine.id]
    assert world.all_are_there()


def test_a_second_notice_changes_nothing(world: World) -> None:
    """A node that restarts logs its machine's notice again."""
    machine = world.announce(1, seconds_left=60, calls_left=1)
    world.go_on(30)
    machine.notices = (*machine.notices, Notice(Kind.INTERRUPTION, "terminate", 1e9, 60.0))
    world.go_on(30 + LATE_SECONDS + 2 * HOLD_SECONDS)
    assert len(world.recorded.of(sky.PreemptionNoticed)) == 1
    assert world.machines.retired == [machine.id]


def test_the_head_is_not_replaced_early(world: World) -> None:
    """Its notice is emitted; the head is not replaced early, and when it is lost the reason names the notice."""
    head = world.announce(0)
    world.go_on(200)
    assert [event.node for event in world.recorded.of(sky.PreemptionNoticed)] == [0]
    assert not head.is_held
    assert (world.machines.retired, world.machines.standing_by, world.machines.restarts) == ([], {}, 0)
    world.kill(0, "asked to")
    world.go_on(10)
    assert "announced" in world.recorded.of(sky.InstanceLost)[0].reason
    assert world.machines.restarts == 1


def test_a_node_with_a_notice_does_not_become_the_head(world: World) -> None:
    """The lowest rank of the others does."""
    leaving = world.announce(1, calls_left=1)
    heir = world.nodes[2]
    world.go_on(5)
    world.kill(0, "gone")
    world.go_on(10)
    assert world.nodes[0] is heir
    leaving.calls_left = 0
    world.go_on(20)
    assert world.machines.retired == [leaving.id]
    assert world.all_are_there()


def test_a_recommendation_is_only_emitted(world: World) -> None:
    """The machine may stay for days."""
    world.nodes[1].notices = (Notice(Kind.REBALANCE, "", 1e9),)
    world.go_on(200)
    assert [(event.node, event.at) for event in world.recorded.of(sky.RebalanceRecommended)] == [(1, 1e9)]
    assert not world.nodes[1].is_held
    assert world.lost() == []


def test_a_node_that_cannot_be_reached_gets_the_message_later(world: World) -> None:
    """The pool tries as long as the node exists."""
    machine = world.announce(1)
    machine.is_wired = False  # the connection to the client, and not the one to the scheduler
    world.go_on(20)
    assert world.machines.retired == []
    machine.is_wired = True
    world.go_on(5)
    assert world.machines.retired == [machine.id]
    assert world.all_are_there()


def test_the_texts_of_the_notices() -> None:
    """They describe what happens next."""
    texts = [
        Narrator().tell(event)
        for event in (
            sky.PreemptionNoticed("i-1", 1, "terminate", 1e9, 118.0),
            sky.PreemptionNoticed("i-0", 0, "stop", 1e9, 118.0),
            sky.RebalanceRecommended("i-1", 1, 1e9),
        )
    ]
    assert [line and line[1] for line in texts] == [
        "node 1 is taken back by its provider in 1 min 58 s (terminate): it takes no more calls, and another machine is prepared",
        "node 0 is taken back by its provider in 1 min 58 s (stop): it is the head, and the cluster comes up anew without it then",
        "node 1 may be taken back by its provider soon",
    ]
