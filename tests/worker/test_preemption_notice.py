"""The notice before a spot machine is taken back: read on the machine, sent to the client, and the pool's actions
before the machine is gone.
"""

import ast
import json
import socket
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from datetime import UTC, datetime
from pathlib import Path

import pytest

import skyward_core as sky
from skyward_core.engine.membership import HOLD_SECONDS, LATE_SECONDS, LOOKS_AT_REST
from skyward_core.errors import NodeLost
from skyward_core.events.narrator import Narrator
from skyward_core.machines.instances import Instance
from skyward_core.provisioning.bootstrap import Preparation
from skyward_core.provisioning.nodes import Nodes
from skyward_core.worker.preemption_notice import (
    FILE_ENV,
    MARK,
    NOTICE_FILE,
    NOTICE_SECONDS,
    Kind,
    MetadataService,
    Notice,
    NoticePoller,
    note,
)
from skyward_core.worker.settings import NodeSettings, with_partitions
from tests.conftest import RecordedEvents, wait_until
from tests.engine.test_recovery import World
from tests.providers.fake_metadata import FakeMetadata, instance_action, stamp

INTERRUPTED = Notice(Kind.INTERRUPTION, "terminate", 1e9, 120.0)
QUICK = 0.2
"""Timeout of a request in tests of a service that does not answer, in seconds."""


class Heard:
    """A poller, its notices, and its error messages."""

    def __init__(self, url: str, answer_seconds: float = 10.0) -> None:
        self.notices: list[Notice] = []
        self.complaints: list[str] = []
        self._listener = NoticePoller(MetadataService(url, answer_seconds), self.notices.append, self.complaints.append)

    def look(self, times: int = 1) -> None:
        for _ in range(times):
            self._listener.look()


@pytest.fixture
def service(tmp_path: Path) -> Iterator[FakeMetadata]:
    """A metadata service that serves what a test puts into its folder."""
    with FakeMetadata(tmp_path) as service:
        yield service


# ── on the machine ───────────────────────────────────────────────────────────────────────────────────────────────────


def test_without_a_notice_nothing_is_reported(service: FakeMetadata) -> None:
    """404 means that nothing is announced: no notice, and no error. One token serves all requests."""
    heard = Heard(service.url)
    heard.look(3)
    assert (heard.notices, heard.complaints) == ([], [])
    assert service.tokens_given == 1
    assert len(service.asked) == 1 + 3 * 2


def test_a_notice_is_reported_once(service: FakeMetadata, tmp_path: Path) -> None:
    """However often it is served; the remaining time is by the service's clock."""
    heard = Heard(service.url)
    heard.look()
    (tmp_path / "instance-action").write_text(instance_action(110))
    heard.look(3)
    (notice,) = heard.notices
    assert (notice.kind, notice.action) == (Kind.INTERRUPTION, "terminate")
    assert 100 < notice.seconds_left <= 110
    assert notice.at == pytest.approx(time.time() + 110, abs=10)


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


def test_a_recommendation_is_separate_from_the_notice(service: FakeMetadata, tmp_path: Path) -> None:
    """It may come before the notice."""
    heard = Heard(service.url)
    (tmp_path / "rebalance").write_text('{"noticeTime": "2026-11-21T08:20:00Z"}')
    heard.look(2)
    (tmp_path / "instance-action").write_text(instance_action(60, "stop"))
    heard.look(2)
    assert [(notice.kind, notice.action) for notice in heard.notices] == [
        (Kind.REBALANCE, ""),
        (Kind.INTERRUPTION, "stop"),
    ]
    assert heard.notices[0].at == 1795249200.0


def test_an_expired_token_is_replaced(service: FakeMetadata, tmp_path: Path) -> None:
    """401 does not count as an answer: with a new token the notice is there."""
    heard = Heard(service.url)
    heard.look()
    service.tokens.clear()
    (tmp_path / "instance-action").write_text(instance_action(60))
    heard.look()
    assert len(heard.notices) == 1
    assert (service.tokens_given, heard.complaints) == (2, [])


@pytest.mark.parametrize(
    "body",
    [
        "",
        "no JSON",
        "[]",
        "null",
        '{"action": "dance"}',
        '{"time": "2026-11-21T08:20:00Z"}',
        '{"action": ["terminate"]}',
    ],
)
def test_an_unreadable_answer_is_no_notice(service: FakeMetadata, tmp_path: Path, body: str) -> None:
    """It is reported once as an error, and requested again: the next answer counts."""
    heard = Heard(service.url)
    (tmp_path / "instance-action").write_text(body)
    heard.look(3)
    assert (heard.notices, len(heard.complaints)) == ([], 1)
    (tmp_path / "instance-action").write_text(instance_action(60))
    heard.look()
    assert len(heard.notices) == 1


def test_a_recommendation_that_cannot_be_read_hides_no_notice(service: FakeMetadata, tmp_path: Path) -> None:
    """An unreadable notice hides no recommendation either."""
    heard = Heard(service.url)
    (tmp_path / "rebalance").write_text("no JSON")
    (tmp_path / "instance-action").write_text(instance_action(60))
    heard.look()
    (tmp_path / "rebalance").write_text('{"noticeTime": "2026-11-21T08:20:00Z"}')
    (tmp_path / "instance-action").write_text("no JSON")
    heard.look()
    assert [notice.kind for notice in heard.notices] == [Kind.INTERRUPTION, Kind.REBALANCE]


@pytest.mark.parametrize("time_given", ["soon", None])
def test_a_notice_without_a_time_counts(service: FakeMetadata, tmp_path: Path, time_given: str | None) -> None:
    """Then the machine counts as having the longest time that AWS promises."""
    heard = Heard(service.url)
    (tmp_path / "instance-action").write_text(json.dumps({"action": "terminate", "time": time_given}))
    heard.look()
    assert heard.notices[0].seconds_left == NOTICE_SECONDS


@pytest.mark.parametrize(("seconds", "left"), [(-600, 0.0), (86_400, NOTICE_SECONDS)])
def test_a_wrong_clock_is_bounded(service: FakeMetadata, tmp_path: Path, seconds: float, left: float) -> None:
    """A time is at most two minutes away, because no machine has more, and never in the past."""
    heard = Heard(service.url)
    (tmp_path / "instance-action").write_text(instance_action(seconds))
    heard.look()
    assert heard.notices[0].seconds_left == left


def test_the_time_left_is_by_the_clock_of_the_service(service: FakeMetadata, tmp_path: Path) -> None:
    """The machine's own clock may be wrong by hours."""
    now = 1795249200.0
    service.date = "Sat, 21 Nov 2026 08:20:00 GMT"
    (tmp_path / "instance-action").write_text(json.dumps({"action": "terminate", "time": stamp(now + 90)}))
    heard = Heard(service.url)
    heard.look()
    assert heard.notices == [Notice(Kind.INTERRUPTION, "terminate", now + 90, 90.0)]


@pytest.mark.parametrize("status", [400, 403, 500, 503])
def test_an_outage_is_neither_a_notice_nor_the_end_of_one(service: FakeMetadata, tmp_path: Path, status: int) -> None:
    """It is reported once, and the requests go on."""
    heard = Heard(service.url)
    service.status = status
    heard.look(3)
    assert (heard.notices, len(heard.complaints)) == ([], 1)
    service.status = 0
    (tmp_path / "instance-action").write_text(instance_action(60))
    heard.look()
    assert len(heard.notices) == 1


def test_a_service_that_hangs_or_does_not_exist_does_no_harm(service: FakeMetadata) -> None:
    """Each request ends by its timeout."""
    service.hangs = True
    heard = Heard(service.url, QUICK)
    heard.look(2)
    assert (heard.notices, len(heard.complaints)) == ([], 1)
    with socket.socket() as unserved:
        unserved.bind(("127.0.0.1", 0))
        heard = Heard(f"http://127.0.0.1:{unserved.getsockname()[1]}", QUICK)
        heard.look(2)
    assert (heard.notices, len(heard.complaints)) == ([], 1)
    assert not heard.complaints[0].startswith("skyward: "), "that would be taken for the node's last words"


def test_no_proxy_is_used(service: FakeMetadata, monkeypatch: pytest.MonkeyPatch) -> None:
    """The address belongs to the machine itself."""
    for name in ("http_proxy", "HTTP_PROXY", "all_proxy", "ALL_PROXY"):
        monkeypatch.setenv(name, "http://127.0.0.1:9")
    heard = Heard(service.url)
    heard.look()
    assert heard.complaints == []


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


# ── nodes of this machine ────────────────────────────────────────────────────────────────────────────────────────────


@sky.compute
def wait_for_go(folder: str, mark: str) -> int:
    """Note where this runs, wait for the file `go-MARK`, note the notice, return the node."""
    node = sky.instance_info().node
    Path(folder, f"{mark}-on-{node}").touch()
    while not Path(folder, f"go-{mark}").exists():
        time.sleep(0.01)
    Path(folder, f"notice-of-{mark}").write_text(repr(sky.preemption_notice()))
    return node


@sky.compute
def where() -> int:
    return sky.instance_info().node


@sky.compute
def square(number: int) -> int:
    return number * number


@pytest.fixture
def noticed(service: FakeMetadata, monkeypatch: pytest.MonkeyPatch) -> FakeMetadata:
    """The metadata service of the first machine that is node 1; the other nodes and the shared pool have none."""
    first: list[str] = []
    begun = datetime.now(UTC)

    def url_of(nodes: Nodes, node: Preparation) -> str:
        if node.rank == 1 and not first and nodes.created_at > begun:
            first.append(node.instance.id)
        return service.url if node.instance.id in first else ""

    monkeypatch.setattr(Nodes, "notice_url", url_of)
    return service


@pytest.mark.slow
def test_after_a_notice_running_calls_end_and_no_others_begin(noticed: FakeMetadata, tmp_path: Path) -> None:
    """After the notice node 1 gets no more calls. Its running call ends there, and a prepared machine takes its
    rank. Nothing is lost, without retries.
    """
    recorded, folder = RecordedEvents(), str(tmp_path)
    with sky.ComputePool(
        provider=sky.Local(), nodes=2, concurrency=2, display="quiet", on_event=recorded, retries=0
    ) as pool:
        running = [pool.submit(wait_for_go(folder, mark)) for mark in "abcd"]
        wait_until(lambda: len([*tmp_path.glob("?-on-?")]) == 4, "a call in each slot")
        on = {node: sorted(path.name[0] for path in tmp_path.glob(f"?-on-{node}")) for node in range(2)}
        (tmp_path / "instance-action").write_text(instance_action(110))
        wait_until(lambda: recorded.of(sky.PreemptionNoticed), "the notice")
        old = recorded.of(sky.PreemptionNoticed)[0].instance_id
        assert [event.node for event in recorded.of(sky.PreemptionNoticed)] == [1]
        wait_until(
            lambda: any(
                event.step == "server" and event.instance_id not in ids(pool)
                for event in recorded.of(sky.BootstrapProgress)
            ),
            "who stands by",
        )
        for mark in (*on[0], on[1][0]):
            (tmp_path / f"go-{mark}").touch()
        wait_until(lambda: sum(future.done() for future in running) == 3, "a free slot on node 1")
        assert [future.result(60) for future in pool.submit_all([where() for _ in range(10)])] == [0] * 10
        assert old in ids(pool)
        with ThreadPoolExecutor(1) as thread:
            everywhere = thread.submit(lambda: where() @ pool)
            (tmp_path / f"go-{on[1][1]}").touch()
            assert sorted(future.result(60) for future in running) == [0, 0, 1, 1]
            assert list(everywhere.result(60)) == [0, 1]
        assert old not in ids(pool)
        assert pool.map(square, range(20)) == [number * number for number in range(20)]
    for node, marks in on.items():
        for mark in marks:
            left = ast.literal_eval((tmp_path / f"notice-of-{mark}").read_text())
            assert (left is None) if node == 0 else (0 < left <= 110)
    assert recorded.of(sky.CallRetrying) == []
    assert [(event.instance_id, event.node) for event in recorded.of(sky.InstanceLost)] == [(old, 1)]
    assert len(recorded.of(sky.InstanceProvisioned)) == 3


@pytest.mark.slow
def test_a_service_that_hangs_delays_no_node(noticed: FakeMetadata) -> None:
    """Calls run as usual, and the node ends as usual."""
    recorded = RecordedEvents()
    with sky.ComputePool(provider=sky.Local(), nodes=2, display="quiet", on_event=recorded) as pool:
        wait_until(lambda: noticed.asked, "the first question")
        noticed.hangs = True
        asked = len(noticed.asked)
        wait_until(lambda: len(noticed.asked) > asked, "a question without an answer")
        assert pool.map(square, range(20)) == [number * number for number in range(20)]
    assert recorded.of(sky.InstanceLost) == []


def ids(pool: sky.ComputePool) -> set[str]:
    return {node.instance.id for node in pool.lease.nodes}
