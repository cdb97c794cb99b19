"""What an attachment that fails says: that the pool is gone, or that it does not answer just now."""

import json
from types import SimpleNamespace
from typing import Any

import pytest

from skyward_core.compute import PendingCompute
from skyward_core.engine import cluster as engine_cluster
from skyward_core.engine.certificates import PoolCertificate
from skyward_core.engine.cluster import Cluster
from skyward_core.errors import CommandFailed, CommandTimedOut, NodeLost, Unreachable
from skyward_core.events.queue import EventQueue
from skyward_core.session import attached as module
from skyward_core.session.attached import Attached
from tests.session.attached import RANKS, lease

PEM = "-----BEGIN NOTHING"
SETTINGS = {"tls_certificate": PEM, "tls_key": PEM, "instance_id": "i-0", "pool_id": "p", "head_port": 1}


class World:
    """A head that answers, with a scheduler that does not."""

    def __init__(self) -> None:
        self.lives: list[bool | None] = [True]
        """The answers of the head, in their order; the last one stays."""
        self.unread: Exception | None = None
        self.connected = 0

    def head(self, _: Any) -> Any:
        return SimpleNamespace(
            is_connected=True, address=str, join=lambda **_: None, lives=self.next_life, read=self.read
        )

    def next_life(self, _: float) -> bool | None:
        return self.lives.pop(0) if len(self.lives) > 1 else self.lives[0]

    def read(self, name: str) -> str:
        assert name == "settings.json"
        if self.unread is not None:
            raise self.unread
        return json.dumps(SETTINGS)

    def connect(self, *_: Any) -> Any:
        self.connected += 1
        raise TimeoutError("timed out")


@pytest.fixture
def world(monkeypatch: pytest.MonkeyPatch) -> World:
    world = World()
    monkeypatch.setattr(module, "_verify_folder", lambda _: None)
    monkeypatch.setattr(engine_cluster, "connect", world.connect)
    return world


def attach(world: World, monkeypatch: pytest.MonkeyPatch) -> None:
    it = Attached(lease(), None, None, 60.0, 0, EventQueue(lambda _: None))
    monkeypatch.setattr(it.transports, "to", world.head)
    it.start(5.0)


@pytest.mark.parametrize(
    ("lives", "error", "words"),
    [
        (True, Unreachable, "does not answer, although its head lives"),
        (None, Unreachable, "does not answer, although its head lives"),
        (False, NodeLost, "is not there any more, or has another head"),
    ],
)
def test_a_scheduler_that_does_not_answer_is_busy_while_its_head_lives(
    world: World, monkeypatch: pytest.MonkeyPatch, lives: bool | None, error: type[Exception], words: str
) -> None:
    """Whoever waits for the pool tries again, and gives nothing up."""
    world.lives = [True, lives]
    with pytest.raises(error, match=words):
        attach(world, monkeypatch)
    assert world.connected == 1


@pytest.mark.parametrize(
    ("unread", "error"),
    [
        (FileNotFoundError(2, "no such file"), NodeLost),
        (CommandFailed("cat: no such file"), NodeLost),
        (CommandTimedOut("no answer within 30 s"), Unreachable),
        (OSError(24, "Too many open files"), Unreachable),
    ],
)
def test_a_head_that_cannot_be_asked_is_not_gone(
    world: World, monkeypatch: pytest.MonkeyPatch, unread: Exception, error: type[Exception]
) -> None:
    """A missing file says that it has ended; a lack of time or of files on this side says nothing."""
    world.unread = unread
    with pytest.raises(error):
        attach(world, monkeypatch)
    assert world.connected == 0


def test_broadcasts_use_all_nodes_after_another_process_has_taken_the_pool() -> None:
    """They would return no result at all, and no error, if they had no ranks."""
    attached = Attached(lease(), None, None, 60.0, 0, EventQueue(lambda _: None))
    attached.cluster = cluster = Cluster(attached.lease, PoolCertificate("", ""), attached.transports, attached.emit)
    attached.is_running = True
    cluster.set_steward(None, None, RANKS)
    cuts: list[int] = []
    attached.begin_stewardship(SimpleNamespace(cut=lambda: cuts.append(1)))  # type: ignore[arg-type]
    assert cuts == [1], "the new steward must reach the scheduler"
    attached.end_stewardship()
    assert len(cluster.broadcast(PendingCompute(abs, (1,)))) == len(RANKS)
    attached.stop("the test has ended")
