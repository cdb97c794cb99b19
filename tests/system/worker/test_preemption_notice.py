"""The notice before a spot machine is taken back: read on the machine, sent to the client, and the pool's actions
before the machine is gone.
"""

import ast
import json
import socket
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from datetime import UTC, datetime
from pathlib import Path

import pytest

import skyward_core as sky
from skyward_core.provisioning.bootstrap import Preparation
from skyward_core.provisioning.nodes import Nodes
from skyward_core.wire.info import NOTICE_SECONDS, Kind, Notice
from skyward_core.worker.preemption_notice import MetadataService, NoticePoller
from tests.conftest import RecordedEvents
from tests.providers.fake_metadata import FakeMetadata, instance_action, stamp
from tests.waiting import wait_until

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

RECOMMENDATION = '{"noticeTime": "2026-11-21T08:20:00Z"}'


def test_a_notice_is_reported_once(service: FakeMetadata, tmp_path: Path) -> None:
    """However often it is served. 404 means that nothing is announced. One token serves all requests until it expires.

    No proxy is used: the address belongs to the machine itself.
    """
    heard = Heard(service.url)
    heard.look(3)
    assert (heard.notices, heard.complaints, service.tokens_given, len(service.asked)) == ([], [], 1, 1 + 3 * 2)
    service.tokens.clear()
    (tmp_path / "instance-action").write_text(instance_action(110))
    heard.look(3)
    (notice,) = heard.notices
    assert (notice.kind, notice.action) == (Kind.INTERRUPTION, "terminate")
    assert 100 < notice.seconds_left <= 110
    assert notice.at == pytest.approx(time.time() + 110, abs=10)
    assert (service.tokens_given, heard.complaints) == (2, [])


def test_a_recommendation_is_separate_from_the_notice(service: FakeMetadata, tmp_path: Path) -> None:
    """One that cannot be read hides no other."""
    heard = Heard(service.url)
    (tmp_path / "rebalance").write_text(RECOMMENDATION)
    (tmp_path / "instance-action").write_text("no JSON")
    heard.look(2)
    (tmp_path / "rebalance").write_text("no JSON")
    (tmp_path / "instance-action").write_text(instance_action(60, "stop"))
    heard.look(2)
    notices = [(notice.kind, notice.action) for notice in heard.notices]
    assert notices == [(Kind.REBALANCE, ""), (Kind.INTERRUPTION, "stop")]
    assert heard.notices[0].at == 1795249200.0


UNREADABLE = ["", "no JSON", "[]", "null", '{"action": "dance"}', '{"time": "2026-11-21T08:20:00Z"}', '{"action": [1]}']


@pytest.mark.parametrize("answer", [*UNREADABLE, 400, 403, 500, 503, "hangs"])
def test_an_answer_that_is_no_notice(service: FakeMetadata, tmp_path: Path, answer: str | int) -> None:
    """It is reported once as an error, and requested again: the next answer counts."""
    heard = Heard(service.url, QUICK if answer == "hangs" else 10.0)
    if isinstance(answer, int):
        service.status = answer
    service.hangs = answer == "hangs"
    (tmp_path / "instance-action").write_text(str(answer))
    heard.look(3)
    assert (heard.notices, len(heard.complaints)) == ([], 1)
    service.status, service.hangs = 0, False
    (tmp_path / "instance-action").write_text(instance_action(60))
    heard.look()
    assert len(heard.notices) == 1


def test_a_service_that_does_not_exist_does_no_harm() -> None:
    with socket.socket() as unserved:
        unserved.bind(("127.0.0.1", 0))
        heard = Heard(f"http://127.0.0.1:{unserved.getsockname()[1]}", QUICK)
        heard.look(2)
    assert (heard.notices, len(heard.complaints)) == ([], 1)
    assert not heard.complaints[0].startswith("skyward: "), "that would be taken for the node's last words"


NOW = 1795249200.0


@pytest.mark.parametrize(
    ("end", "left"),
    [("soon", NOTICE_SECONDS), (None, NOTICE_SECONDS), (-600, 0.0), (86_400, NOTICE_SECONDS), (90, 90.0)],
)
def test_the_time_left_is_by_the_clock_of_the_service(
    service: FakeMetadata, tmp_path: Path, end: float | str | None, left: float
) -> None:
    """The machine's own may be wrong by hours. It is at most what AWS promises, also if there is none."""
    service.date = "Sat, 21 Nov 2026 08:20:00 GMT"
    at = stamp(NOW + end) if isinstance(end, int) else end
    (tmp_path / "instance-action").write_text(json.dumps({"action": "terminate", "time": at}))
    heard = Heard(service.url)
    heard.look()
    assert [notice.seconds_left for notice in heard.notices] == [left]


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


def ids(pool: sky.ComputePool) -> set[str]:
    return {node.instance.id for node in pool.lease.nodes}
